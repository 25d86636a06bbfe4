#include "backends/cuda/launch_order.h"

#include <chrono>
#include <utility>

#include "base/check.h"

namespace hotbunk::cuda {

std::int64_t LaunchOrder::reserve(std::int64_t turns) {
  const std::lock_guard lock(mutex_);
  return std::exchange(reserved_, reserved_ + turns);
}

std::shared_ptr<LaunchOrder::Turn> LaunchOrder::take(const std::shared_ptr<LaunchOrder>& order, std::int64_t number) {
  return std::make_shared<Turn>(order, number);
}

void LaunchOrder::give_up() {
  {
    const std::lock_guard lock(mutex_);
    given_up_ = true;
  }
  changed_.notify_all();
}

LaunchOrder::Turn::Turn(std::shared_ptr<LaunchOrder> order, std::int64_t number)
    : order_(std::move(order)), number_(number) {}

LaunchOrder::Turn::~Turn() { done(); }

void LaunchOrder::Turn::await(const std::function<void()>& keep_waiting) const {
  std::unique_lock lock(order_->mutex_);
  while (order_->next_ != number_) {
    if (order_->given_up_) throw RuntimeFailure("what is to be launched before it is not asked for any more");
    order_->changed_.wait_for(lock, std::chrono::milliseconds(100));
    if (order_->next_ == number_) return;
    lock.unlock();
    keep_waiting();
    lock.lock();
  }
}

void LaunchOrder::Turn::done() {
  if (std::exchange(done_, true)) return;
  {
    const std::lock_guard lock(order_->mutex_);
    order_->over_.insert(number_);
    while (order_->over_.erase(order_->next_) == 1) ++order_->next_;
  }
  order_->changed_.notify_all();
}

}  // namespace hotbunk::cuda
