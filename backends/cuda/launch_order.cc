#include "backends/cuda/launch_order.h"

#include <chrono>
#include <utility>

namespace hotbunk::cuda {

std::shared_ptr<LaunchOrder::Turn> LaunchOrder::draw(const std::shared_ptr<LaunchOrder>& order) {
  const std::lock_guard lock(order->mutex_);
  return std::make_shared<Turn>(order, order->drawn_++);
}

LaunchOrder::Turn::Turn(std::shared_ptr<LaunchOrder> order, std::int64_t number)
    : order_(std::move(order)), number_(number) {}

LaunchOrder::Turn::~Turn() { done(); }

void LaunchOrder::Turn::await(const std::function<void()>& keep_waiting) const {
  std::unique_lock lock(order_->mutex_);
  while (order_->next_ != number_) {
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
    order_->given_up_.insert(number_);
    while (order_->given_up_.erase(order_->next_) == 1) ++order_->next_;
  }
  order_->changed_.notify_all();
}

}  // namespace hotbunk::cuda
