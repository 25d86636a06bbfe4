// The order in which a rank launches collectives of several communicators.
//
// A collective's kernel waits on the device for its peers', and holds what it needs there meanwhile. Where two ranks
// launch collectives of two communicators in different orders, each may have only the one running that the other has
// not: NCCL asks for one order on all ranks. A rank's streams have host threads of their own, so the order would be
// luck. It is the plan's instead (graph/program_order.h): a block's turns are numbered when it begins, an op takes its
// number when it is asked for, and a stream's thread launches when all turns before its own have launched, or were
// given up.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>

namespace hotbunk::cuda {

/// Thread-safe.
class LaunchOrder {
 public:
  /// One launch's place. Its end, or done(), lets the next one launch: work that a failed stream skips holds up nobody.
  class Turn {
   public:
    Turn(std::shared_ptr<LaunchOrder>, std::int64_t number);
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    /// Returns when it is this launch's turn. `keep_waiting` is called ten times a second; what it throws comes
    /// through. RuntimeFailure when the order is given up.
    void await(const std::function<void()>& keep_waiting) const;
    void done();

   private:
    const std::shared_ptr<LaunchOrder> order_;
    const std::int64_t number_;
    bool done_ = false;
  };

  /// Numbers of so many turns, each to be taken once; the first of them.
  std::int64_t reserve(std::int64_t turns);
  static std::shared_ptr<Turn> take(const std::shared_ptr<LaunchOrder>& order, std::int64_t number);
  /// Some of the turns will not be taken: whoever waits is told so, from now on.
  void give_up();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::int64_t reserved_ = 0, next_ = 0;
  std::set<std::int64_t> over_;  // ahead of next_
  bool given_up_ = false;
};

}  // namespace hotbunk::cuda
