// What each rank is doing, where it can be read when its writer is stopped or dead: in shared memory for ranks of this
// host, as a message for others.
#pragma once
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace hotbunk {

/// One moment of a rank's status.
struct RankMoment {
  std::string phase, op;
  std::string wait;              // what it waits for other ranks in; "" when it does not
  std::vector<int> waiting_for;  // world ranks
  std::uint64_t finished = 0;    // operations, since the start
  int pid = 0;
  bool left = false;  // said goodbye: no part of it is missing
  bool operator==(const RankMoment&) const = default;
};

/// Lies in zeroed memory that other processes read. Several threads of the owner write; a reader gets texts of one
/// moment (a sequence lock), unless the owner died while it wrote.
class RankStatus {
 public:
  static constexpr std::size_t text_bytes = 64, wait_bytes = 192;
  static constexpr int most_waited = 16;

  /// Texts are cut to what fits. A phase begins without an operation; an operation is of the phase it began in.
  void set_phase(std::string_view phase);
  /// Its name in two parts, as a call has it.
  void set_op(std::string_view call, std::string_view op = {});
  void note_finished() { finished_.fetch_add(1, std::memory_order_relaxed); }
  /// "" when nothing is waited for. More ranks than fit: -1 stands for the rest.
  void set_wait(std::string_view wait, const std::vector<int>& ranks);
  void set_pid(int pid) { pid_.store(pid, std::memory_order_relaxed); }
  void set_left() { left_.store(1, std::memory_order_relaxed); }

  RankMoment read() const;

 private:
  template <class Write>
  void write(const Write&);

  std::atomic<std::uint32_t> version_;  // odd while somebody writes
  std::atomic<std::uint64_t> phase_[text_bytes / 8], op_[text_bytes / 8], wait_[wait_bytes / 8];
  std::atomic<int> waiting_for_[most_waited], num_waiting_for_;
  std::atomic<std::uint64_t> finished_;
  std::atomic<int> pid_, left_;
};

/// A process of this host as the kernel sees it.
struct ProcessState {
  char state = '?';  // of /proc/PID/stat: R running, S asleep, D in the disk, T stopped, t traced, Z dead
  double cpu_seconds = 0.0;
  bool stopped() const { return state == 'T' || state == 't'; }
};
/// nullopt when there is no such process.
std::optional<ProcessState> process_state(int pid);

/// What one rank tells another about itself.
struct RankReport {
  RankMoment moment;
  double cpu_seconds = 0.0;
};
std::string report_text(const RankReport&);
std::optional<RankReport> parse_report(std::string_view text);

}  // namespace hotbunk
