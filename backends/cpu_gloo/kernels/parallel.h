// How the kernels split work: contiguous, static ranges over one OpenMP team. Internal to the kernels. Not
// base/parallel.h's pool: oneDNN's products run on OpenMP's team, and kernels alternate with them within microseconds.
// Two pools would be twice the threads on a rank's cores, each spinning while the other works.
#pragma once
#include <omp.h>

#include <atomic>
#include <cstdint>
#include <limits>
#include <optional>
#include <thread>
#include <type_traits>
#include <vector>

#include "backends/cpu_gloo/kernels/context.h"
#include "base/check.h"

namespace hotbunk::kernels {

/// body(thread, threads) on every thread of one team, and back when the last is done.
template <class Body>
void on_team(int threads, Body&& body) {
#ifdef __SANITIZE_THREAD__  // which does not see the order that OpenMP's barriers make, and sees that of plain threads
  std::vector<std::jthread> others;
  for (int t = 1; t < threads; ++t) others.emplace_back([&body, t, threads] { body(t, threads); });
  body(0, threads);
#else
  ask_for_whole_teams();
#pragma omp parallel num_threads(threads)
  body(omp_get_thread_num(), omp_get_num_threads());
#endif
}

/// body(begin, end) over [0, n), one contiguous range per thread; on the calling thread alone when n ≤ grain, because
/// waking a team costs several µs. The team is all or nothing: OpenMP runtimes rebuild their pool when its size
/// changes. A body with scratch memory of its own takes (begin, end, thread).
template <class Body>
void parallel_for(const KernelContext& ctx, std::int64_t n, std::int64_t grain, Body&& body) {
  const auto run = [&body](std::int64_t begin, std::int64_t end, std::int64_t thread) {
    if constexpr (std::is_invocable_v<Body&, std::int64_t, std::int64_t, std::int64_t>) body(begin, end, thread);
    else body(begin, end);
  };
  if (n <= 0) return;
  if (ctx.num_threads() == 1 || n <= grain) {
    run(0, n, 0);
    return;
  }
  on_team(ctx.num_threads(), [&](std::int64_t t, std::int64_t team) {
    const std::int64_t begin = n * t / team;
    const std::int64_t end = n * (t + 1) / team;
    if (begin < end) run(begin, end, t);
  });
}

/// task(i, thread) for i in [0, n), each on whichever thread is free: for tasks of uneven size that write disjoint
/// results. `worth_team` = false runs them in order on the calling thread.
template <class Task>
void parallel_tasks(const KernelContext& ctx, std::int64_t n, bool worth_team, Task&& task) {
  if (ctx.num_threads() == 1 || n <= 1 || !worth_team) {
    for (std::int64_t i = 0; i < n; ++i) task(i, 0);
    return;
  }
  std::atomic<std::int64_t> next{0};
  on_team(ctx.num_threads(), [&](int thread, int) {
    for (std::int64_t i = next++; i < n; i = next++) task(i, thread);
  });
}

/// What is left of n tasks, of which each of several threads has a part of its own, the same in every call: what they
/// read may still be in its cache. Who has finished takes those of others, from behind.
class Shares {
 public:
  Shares(std::int64_t n, int threads) : parts_(static_cast<std::size_t>(threads)) {
    HB_CHECK(n <= std::numeric_limits<std::uint32_t>::max(), "{} tasks", n);
    for (std::int64_t t = 0; t < threads; ++t) left_of(t) = pack(n * t / threads, n * (t + 1) / threads);
  }
  /// This thread's next task; none when none is left.
  std::optional<std::int64_t> take(std::int64_t thread) {
    const std::int64_t threads = std::ssize(parts_);
    for (std::int64_t i = 0; i < threads; ++i) {
      std::atomic<std::uint64_t>& left = left_of((thread + i) % threads);
      for (std::uint64_t old = left; begin_of(old) < end_of(old);) {
        const std::int64_t begin = begin_of(old), end = end_of(old);
        if (left.compare_exchange_weak(old, i == 0 ? pack(begin + 1, end) : pack(begin, end - 1)))
          return i == 0 ? begin : end - 1;
      }
    }
    return std::nullopt;
  }

 private:
  struct alignas(64) Part {  // of a cache line of its own
    std::atomic<std::uint64_t> left;
  };
  static std::uint64_t pack(std::int64_t begin, std::int64_t end) {
    return static_cast<std::uint64_t>(begin) << 32 | static_cast<std::uint64_t>(end);
  }
  static std::int64_t begin_of(std::uint64_t left) { return static_cast<std::int64_t>(left >> 32); }
  static std::int64_t end_of(std::uint64_t left) { return static_cast<std::int64_t>(left & 0xffffffffu); }
  std::atomic<std::uint64_t>& left_of(std::int64_t thread) { return parts_[static_cast<std::size_t>(thread)].left; }
  std::vector<Part> parts_;
};

/// As parallel_tasks, for tasks whose memory a thread may still have in its cache from the call before.
template <class Task>
void parallel_shares(const KernelContext& ctx, std::int64_t n, bool worth_team, Task&& task) {
  if (ctx.num_threads() == 1 || n <= 1 || !worth_team) {
    for (std::int64_t i = 0; i < n; ++i) task(i, 0);
    return;
  }
  Shares shares(n, ctx.num_threads());
  on_team(ctx.num_threads(), [&](int thread, int) {
    while (const std::optional<std::int64_t> i = shares.take(thread)) task(*i, thread);
  });
}

/// So many elements are streamed in ~5 µs, what waking a team costs.
inline constexpr std::int64_t kTeamElements = 16384;

/// Rows per thread below which a team is not worth waking, for kernels that touch `elements_per_row` per row.
inline std::int64_t rows_grain(std::int64_t elements_per_row) {
  return elements_per_row <= 0 ? kTeamElements : kTeamElements / elements_per_row;
}

/// f(T{}) with T = float or bf16.
template <class F>
decltype(auto) with_float_type(DType t, F&& f) {
  if (t == DType::bf16) return f(bf16{});
  HB_CHECK(t == DType::f32, "kernel got {}, wants fp32 or bf16", name_of(t));
  return f(float{});
}

template <class T>
const T* row(ConstMatrix m, std::int64_t r) {
  return static_cast<const T*>(m.data) + r * m.ld;
}
template <class T>
T* row(Matrix m, std::int64_t r) {
  return static_cast<T*>(m.data) + r * m.ld;
}

}  // namespace hotbunk::kernels
