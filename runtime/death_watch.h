// Notices that another rank died, stopped or cannot be reached, and says who, in which phase and in which operation.
//
// Every rank holds one connection to the watcher that runs in rank 0. The kernel closes it when a process ends, however
// it ends; an end without goodbye is a death, which the watcher passes on. A host that is gone shows as a connection
// that times out at both ends (wire.h). The watch's thread sleeps in poll(2); while this rank waits for others it looks
// about once a second what they do (stall.h).
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "runtime/rank_status.h"
#include "runtime/stall.h"

namespace hotbunk {

struct Frame;

struct DeathWatchOptions {
  int rank = 0;
  int world_size = 1;
  int socket = -1;     // connected to the watcher (store_server.h); owned from here on; -1: no other ranks
  bool alone = false;  // with no other ranks: this one's own waits (StallWatch::Wait for itself) are looked at
  /// A process that is still there this long after a death was noticed is stuck: it ends with exit code 3.
  double unwind_seconds = 5.0;
  double say_after_seconds = 10.0, timeout_seconds = 600.0;  // of waits: StallOptions
};

class DeathWatch {
 public:
  explicit DeathWatch(DeathWatchOptions);
  /// Without leave() before, the others take this rank for dead.
  ~DeathWatch();
  DeathWatch(const DeathWatch&) = delete;
  DeathWatch& operator=(const DeathWatch&) = delete;

  /// Cheap (tens of ns): publish what this rank is doing. Longer texts are cut. The phase also travels to the watcher.
  void set_phase(std::string_view phase);
  void set_op(std::string_view call, std::string_view op = {});
  /// An operation is done: this rank makes progress.
  void note_finished() { mine_.load(std::memory_order_relaxed)->note_finished(); }
  /// "phase train, op all_gather fsdp" of a rank of this host; "" when unknown.
  std::string status_of(int rank) const;
  /// Where statuses of ranks are from now on: slots by world rank, nullptr for ranks of other hosts.
  void use_status(std::vector<RankStatus*> slots);

  /// Has some rank died? One relaxed load.
  bool any_dead() const { return dead_.load(std::memory_order_acquire); }
  /// Every rank has said goodbye.
  bool all_left() const;
  /// "rank 2 (pid 123) died while in phase train, op …"; "" while all live.
  std::string message() const;
  /// Throws RuntimeFailure(message()) when a rank died. `during` is added: "; noticed in …".
  void check(std::string_view during) const;
  /// Waits up to `seconds` for a death to be known: after a broken connection, to name the cause. True if one is.
  bool wait_for_death(double seconds) const;
  /// Waits for other ranks are known here while they last.
  StallWatch& stalls() const { return stalls_; }

  /// Called once, from the watch's thread, when a death is noticed; at once when it was before. Must not block.
  int on_death(std::function<void()>);
  void remove_on_death(int token);

  /// Tells the others why this rank gives up (they fail with this reason). Nothing when another rank is to blame, which
  /// they know.
  void announce_failure(std::string_view reason);
  /// A goodbye: returns when every rank has said it. Throws RuntimeFailure when one dies meanwhile.
  void leave();

 private:
  struct Answer;

  void run();
  void handle(const Frame&);
  void handle_death(const Frame&);
  void handle_answer(const Frame&);
  void note_death(std::string message);
  std::string watcher_died(int error) const;
  const RankStatus* status_slot(int rank) const;
  RankReport own_report() const;
  void look_for_stalls();
  std::optional<RankLook> look_at(int rank);
  void end_if_stuck();
  bool receive();  // false: the connection is over
  void stop();

  DeathWatchOptions options_;
  int stop_fd_ = -1;
  std::string watcher_address_;
  std::vector<RankStatus*> status_;
  std::unique_ptr<RankStatus> own_status_;
  std::atomic<RankStatus*> mine_{nullptr};
  std::atomic<bool> dead_{false};
  mutable StallWatch stalls_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::string message_;
  bool all_left_ = false, left_ = false;
  int next_token_ = 1;
  std::vector<std::pair<int, std::function<void()>>> callbacks_;
  std::string input_;              // of the watch's thread, as are the next two
  std::map<int, Answer> answers_;  // of ranks of other hosts
  std::optional<std::chrono::steady_clock::time_point> stuck_at_;
  std::thread thread_;
};

}  // namespace hotbunk
