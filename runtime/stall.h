// Waits for other ranks that last too long: says for whom, what those do meanwhile, and when the run should end.
//
// A wait may last as long as somebody works. Its clock runs only while none of the ranks that it waits for, directly or
// through what those wait for themselves, finishes an operation or uses its CPU (a hundredth of a core is enough); an
// operation finished sets it back to 0. At the limit (run.timeout_s) the wait is over. A rank that is alone may wait
// for itself: for a device that it gave work to.
#pragma once
#include <chrono>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "runtime/rank_status.h"

namespace hotbunk {

/// What is known of another rank now.
struct RankLook {
  RankMoment moment;
  std::optional<ProcessState> process;  // of a rank of this host; nullopt: no such process
  bool here = true;                     // on this host
  bool answers = true;                  // of another host: has answered within the last seconds
  double cpu_seconds = 0.0;
};

struct StallOptions {
  int rank = 0, world_size = 1;
  double say_after_seconds = 10.0;  // a wait's first report; then after 3 times as long each time, up to 10 minutes
  double timeout_seconds = 600.0;   // 0: never
};

/// The end of a wait that nobody worked for.
struct Stall {
  int blamed = -1;  // the rank that holds up the others; -1: they wait for each other
  std::string text;
};

class StallWatch {
 public:
  using Clock = std::chrono::steady_clock;
  explicit StallWatch(StallOptions options) : options_(options) {}

  /// One wait, from construction to destruction. Both functions are called from the watch's thread while it lives.
  class Wait {
   public:
    /// say_after_seconds: other than the watch's, where waiting long is nothing strange.
    Wait(StallWatch&, std::function<std::string()> what, std::function<std::vector<int>()> missing,
         std::optional<double> say_after_seconds = std::nullopt);
    ~Wait();
    Wait(const Wait&) = delete;
    Wait& operator=(const Wait&) = delete;

   private:
    friend class StallWatch;
    StallWatch& watch_;
    std::function<std::string()> what_;
    std::function<std::vector<int>()> missing_;  // world ranks; empty when it is not known for whom
    Clock::time_point began_;
    double next_report_s_, idle_s_ = 0.0;
  };

  /// Looks at all waits; to be called about once a second. `look` is asked for every rank that matters (nullopt: it
  /// cannot be said), `say` gets the reports. Returns a wait that is over.
  std::optional<Stall> tick(Clock::time_point now, const std::function<std::optional<RankLook>(int)>& look,
                            const std::function<void(const std::string&)>& say);
  /// What this rank waits in now, and for whom: as of the last tick.
  std::string waiting_in() const { return waiting_in_; }
  const std::vector<int>& waiting_for() const { return waiting_for_; }
  /// How often tick wants to be called.
  double interval_seconds() const;

 private:
  struct Seen {
    RankLook look;
    double cores = 0.0;  // CPU seconds per second since the tick before
    bool finished_some = false, known = false;
  };
  /// Among others, a rank that waits does not hold itself up.
  bool is_beside_the_point(int rank) const { return rank == options_.rank && options_.world_size > 1; }
  /// The ranks waited for, then those that they wait for, and so on; who has left is not among them.
  std::vector<int> culprits(const std::vector<int>& missing) const;
  const Seen* seen(int rank) const;
  void look_at_all(double elapsed, const std::function<std::optional<RankLook>(int)>& look);
  std::string text_of(int rank) const;
  std::string texts_of(const std::vector<int>& ranks) const;
  Stall stall_of(const Wait&, const std::vector<int>& ranks) const;

  StallOptions options_;
  std::mutex mutex_;
  std::vector<Wait*> waits_;
  std::map<int, Seen> seen_;
  std::optional<Clock::time_point> last_tick_;
  std::string waiting_in_;
  std::vector<int> waiting_for_;
};

}  // namespace hotbunk
