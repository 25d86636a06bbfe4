#include "runtime/stream_thread.h"

#include <pthread.h>

#include <utility>

#include "base/limits.h"

namespace hotbunk {

struct StreamEvent::State {
  std::mutex mutex;
  std::condition_variable fired;
  std::uint64_t recorded = 0;   // tickets given out by record
  std::uint64_t completed = 0;  // highest ticket whose work is done
  std::exception_ptr failure;   // of the recording stream, at that ticket
};

StreamEvent::StreamEvent() : state_(std::make_shared<State>()) {}

StreamThread::StreamThread(std::string name, Mode mode) : name_(std::move(name)), mode_(mode) {
  if (mode_ == Mode::inlined) return;
  thread_ = start_thread([this] { run_loop(); });
  pthread_setname_np(thread_.native_handle(), name_.substr(0, 15).c_str());  // 15 characters are the kernel's limit
}

StreamThread::~StreamThread() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    // Records among the skipped work must still fire, or a stream waiting for them could never end: run the queue as
    // failed.
    if (!failure_)
      failure_ = std::make_exception_ptr(std::runtime_error("stream " + name_ + " was destroyed before its work ran"));
  }
  wake_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void StreamThread::push(std::function<void()> work) {
  auto guarded = [this, work = std::move(work)] {
    if (!failed()) work();
  };
  bool was_idle;
  {
    std::lock_guard lock(mutex_);
    was_idle = queue_.empty() && !busy_;
    queue_.emplace_back(std::move(guarded));
  }
  if (was_idle) wake_.notify_one();
}

void StreamThread::record(const StreamEvent& event) {
  auto state = event.state_;
  std::uint64_t ticket;
  {
    std::lock_guard lock(state->mutex);
    ticket = ++state->recorded;
  }
  auto fire = [this, state, ticket] {
    {
      std::lock_guard lock(state->mutex);
      if (ticket > state->completed) {  // two streams may record one event; the latest record is the one that counts
        state->completed = ticket;
        state->failure = failure();
      }
    }
    state->fired.notify_all();
  };
  if (mode_ == Mode::inlined) return fire();
  bool was_idle;
  {
    std::lock_guard lock(mutex_);
    was_idle = queue_.empty() && !busy_;
    queue_.emplace_back(std::move(fire));
  }
  if (was_idle) wake_.notify_one();
}

void StreamThread::wait(const StreamEvent& event) {
  auto state = event.state_;
  std::uint64_t target;
  {
    std::lock_guard lock(state->mutex);
    target = state->recorded;
    if (state->completed >= target && !state->failure) return;  // nothing to wait for, nothing to catch
  }
  enqueue([state, target] {
    std::unique_lock lock(state->mutex);
    state->fired.wait(lock, [&] { return state->completed >= target; });
    if (state->failure) std::rethrow_exception(state->failure);
  });
}

void StreamThread::sync() {
  std::unique_lock lock(mutex_);
  if (mode_ == Mode::threaded) idle_.wait(lock, [&] { return queue_.empty() && !busy_; });
  if (failure_) std::rethrow_exception(failure_);
}

bool StreamThread::failed() const { return failure() != nullptr; }

std::exception_ptr StreamThread::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

void StreamThread::run_loop() {
  std::deque<std::function<void()>> batch;  // taken whole, so that a busy stream locks once per batch
  std::unique_lock lock(mutex_);
  for (;;) {
    busy_ = false;
    if (queue_.empty()) idle_.notify_all();
    wake_.wait(lock, [&] { return stop_ || !queue_.empty(); });
    if (queue_.empty()) return;
    batch.swap(queue_);
    busy_ = true;
    lock.unlock();
    for (auto& work : batch) run_one(work);
    batch.clear();
    lock.lock();
  }
}

}  // namespace hotbunk
