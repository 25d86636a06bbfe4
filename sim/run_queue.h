// Cores that threads take in turn: what happens when more threads can go on than there are cores to run them.
#pragma once
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

namespace hotbunk {

/// Ranks whose streams are threads of one machine. cores = 0: streams are hardware queues that never wait for a core.
struct ThreadModel {
  std::int64_t cores = 0;             // of one device, shared by all threads of all ranks on it
  std::int64_t wake_ns = 0;           // from the moment a sleeping thread may go on until it works on an idle core
  std::int64_t switch_ns = 0;         // the same on a core that another thread leaves at that moment
  std::int64_t slice_ns = 4'000'000;  // what a thread may run while others wait
  std::int64_t call_ns = 0;           // of a rank's host thread, per call that it enqueues
};

/// `cores` cores, first come first served: a thread runs until it blocks, and is put behind those who wait only when a
/// slice is over. That is what a kernel's scheduler does with bursts shorter than its tick, and it is not the same as
/// sharing: two jobs of 1 ms on one core end at 1 and 2 ms, not both at 2.
class RunQueue {
 public:
  explicit RunQueue(const ThreadModel&);

  /// The thread has `work_ns` to do. One that was done at this very instant goes on where it runs; any other waits
  /// behind those who came before it, and pays for the change of threads on its core before its work.
  void join(std::int64_t now_ns, std::uint32_t thread, std::int64_t work_ns);
  /// Whoever did not go on leaves its core; free cores go to those who wait longest, idle ones first. To be called when
  /// all that happens at `now_ns` has joined.
  void dispatch(std::int64_t now_ns);
  /// Removes a thread that is done at `now_ns`.
  std::optional<std::uint32_t> take_done(std::int64_t now_ns);
  /// When the next thread is done or a slice over; nothing when all cores are idle.
  std::optional<std::int64_t> next_ns() const;

 private:
  struct Waiting {
    std::uint32_t thread;
    std::int64_t work_ns;
  };
  enum class State : std::uint8_t { idle, running, done };  // done: at this instant; its thread may yet go on
  struct Core {
    State state = State::idle;
    std::uint32_t thread = 0;
    std::int64_t until_ns = -1;  // end of its work or of its slice; idle: when it was left, -1: never used
    std::int64_t left_ns = 0;    // of its work, behind `until_ns`
    std::int64_t slice_end_ns = 0;
  };
  void run(Core&, std::int64_t now_ns, std::int64_t work_ns) const;

  std::int64_t wake_ns_, switch_ns_, slice_ns_;
  std::vector<Core> cores_;
  std::deque<Waiting> waiting_;
};

}  // namespace hotbunk
