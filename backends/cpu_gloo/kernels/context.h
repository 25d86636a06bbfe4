// What every CPU kernel receives besides its operands: the number of threads, and the scratch memory and oneDNN
// primitives it may reuse between calls. Owned by the caller (one per stream thread), so that nothing is global.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

#include "backends/cpu_gloo/kernels/product_paths.h"
#include "base/dtype.h"

namespace hotbunk::kernels {

/// A row-major matrix of fp32 or bf16 (unless a kernel says otherwise); `ld` = elements between rows, so that a section
/// of a packed tensor is a matrix too. Rows and columns are arguments of the kernel. 32-bit alignment suffices.
struct ConstMatrix {
  const void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t ld = 0;
};
struct Matrix {
  void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t ld = 0;
  operator ConstMatrix() const { return {data, dtype, ld}; }
};

/// A contiguous vector of fp32 or bf16; data == nullptr where an operand is optional and absent.
struct ConstVector {
  const void* data = nullptr;
  DType dtype = DType::f32;
};

/// What happens to the output's old value: `overwrite` never reads it (it may hold NaN), `accumulate` adds to it.
enum class Write : bool { overwrite, accumulate };

/// How the elements of a product's weights lie: row behind row, or as prepack.h leaves them.
enum class WeightOrder : bool { rows, prepacked };

/// Threads that OpenMP gives a team of this process at most (OMP_THREAD_LIMIT).
int most_team_threads();

/// RuntimeFailure where this process gets no team of so many threads: OMP_THREAD_LIMIT, and the system's limits.
void check_team(int threads);

/// Of the calling thread's next parallel regions: teams as large as asked for, which OMP_DYNAMIC=true and
/// OMP_MAX_ACTIVE_LEVELS=0 would make smaller. Sums by thread would have other bits then, and oneDNN (2.6), which
/// shares a product by how many threads it asked for, leaves what is missing threads' unwritten.
void ask_for_whole_teams();

/// Not thread-safe: two threads that run kernels at the same time need a context each.
/// Determinism: for a fixed num_threads every kernel gives the same bits on every run; no kernel uses atomics on
/// floats.
class KernelContext {
 public:
  /// num_threads ≥ 1: size of the OpenMP team of every kernel called with this context. Whoever reads packed weights
  /// has the product paths of whoever packed them: they say in which order weights lie.
  explicit KernelContext(int num_threads, const ProductPaths& = rule_of_machine());
  ~KernelContext();
  KernelContext(KernelContext&&) noexcept;
  KernelContext& operator=(KernelContext&&) noexcept;

  int num_threads() const { return num_threads_; }
  const ProductPaths& product_paths() const { return product_paths_; }

  /// 64-byte aligned scratch memory of at least `bytes`, uninitialised, valid until the next call with the same slot.
  /// Grows and stays: its size after the largest call is what the kernels cost beyond the plan's buffers (`overhead`).
  void* scratch(int slot, std::size_t bytes);
  std::size_t scratch_bytes() const;
  /// Gives scratch memory and cached primitives back (a sleeping rank keeps nothing).
  void release();

  /// Cached oneDNN primitives; defined in onednn.h, only for the kernels themselves.
  struct Onednn;
  Onednn& onednn();

  static constexpr int kNumSlots = 6;

 private:
  struct Slot;
  int num_threads_;
  ProductPaths product_paths_;
  std::unique_ptr<Slot[]> slots_;
  std::unique_ptr<Onednn> onednn_;
};

}  // namespace hotbunk::kernels
