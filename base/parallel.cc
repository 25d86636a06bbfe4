#include "base/parallel.h"

#include <system_error>
#include <utility>

namespace hotbunk {

Workers::Workers(int threads) {
  try {
    for (int i = 1; i < threads; ++i) helpers_.emplace_back([this, i] { help(i); });
  } catch (const std::system_error&) {  // no more threads (EAGAIN): those that are do all of it
  }
}

Workers::~Workers() {
  {
    const std::scoped_lock lock(mutex_);
    over_ = true;
  }
  wake_.notify_all();
  for (std::thread& t : helpers_) t.join();
}

void Workers::Round::run(int thread) {
  for (std::size_t i = next++; i < count; i = next++) {
    try {
      work(i, thread);
    } catch (...) {
      const std::scoped_lock lock(mutex);
      if (!thrown || i < thrown_by) thrown = std::current_exception(), thrown_by = i;
    }
    if (done.fetch_add(1, std::memory_order_release) + 1 == count) done.notify_one();
  }
}

/// Pieces of a search take microseconds, those of a plan seconds: looks for a moment, then sleeps.
void Workers::Round::wait() {
  constexpr int kLooks = 64;
  std::size_t seen = done.load(std::memory_order_acquire);
  for (int look = 0; seen < count && look < kLooks; ++look) {
    std::this_thread::yield();
    seen = done.load(std::memory_order_acquire);
  }
  for (; seen < count; seen = done.load(std::memory_order_acquire)) done.wait(seen, std::memory_order_acquire);
}

void Workers::help(int thread) {
  std::size_t seen = 0;
  while (true) {
    std::shared_ptr<Round> round;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return over_ || rounds_ > seen; });
      if (over_) return;
      seen = rounds_, round = round_;
    }
    round->run(thread);
  }
}

void Workers::each(std::size_t count, std::function<void(std::size_t, int)> work) {
  if (helpers_.empty() || count < 2) {
    for (std::size_t i = 0; i < count; ++i) work(i, 0);
    return;
  }
  const auto round = std::make_shared<Round>();
  round->work = std::move(work), round->count = count;
  {
    const std::scoped_lock lock(mutex_);
    round_ = round, ++rounds_;
  }
  wake_.notify_all();
  round->run(0);
  round->wait();  // only for pieces that a helper has begun
  if (round->thrown) std::rethrow_exception(round->thrown);
}

}  // namespace hotbunk
