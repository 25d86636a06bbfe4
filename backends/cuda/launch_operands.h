// What launches of ops say of their operands: addresses, extents as kernels count them, attributes. Internal to
// *_launches.cc.
#pragma once
#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "backends/cuda/kernels/attention.h"
#include "backends/cuda/op_launches.h"
#include "base/check.h"

namespace hotbunk::cuda {

inline constexpr int walk_threads = 256;  // of kernels that go through elements
inline constexpr int head_threads = 128;  // of kernels with a warp per row and head

inline const Tensor& in(const CudaCall& c, std::size_t i) { return c.op.inputs[i]; }
inline const Tensor& out(const CudaCall& c, std::size_t i) { return c.op.outputs[i]; }
inline CUdeviceptr at(const CudaCall& c, const Tensor& t) {
  return reinterpret_cast<CUdeviceptr>(c.addresses.address(t));
}

/// Kernels count rows and columns in 32 bits.
inline int narrow(std::int64_t n) {
  HB_CHECK(n >= 0 && n <= INT32_MAX, "{} is no count for a kernel", n);
  return static_cast<int>(n);
}
inline int extent(const CudaCall& c, const Tensor& t, int dim) {
  return narrow(t.shape[static_cast<std::size_t>(dim)].actual(c.sizes));
}
/// Rows of a tensor, whatever dimensions they have, and numbers of a row, the last one.
inline int width(const CudaCall& c, const Tensor& t) { return extent(c, t, t.rank - 1); }
inline int rows(const CudaCall& c, const Tensor& t) { return narrow(t.elements(c.sizes) / std::max(1, width(c, t))); }
inline int flag(const CudaCall& c, Attr a) { return c.op.integer(a, 0) != 0 ? 1 : 0; }
inline std::string named(const char* kernel, DType dtype) { return fmt::format("{}_{}", kernel, kernel_dtype(dtype)); }
/// Of a kernel that makes gradients of weights: by the dtypes of activations and of these gradients.
inline std::string named(const char* kernel, DType activations, DType gradients) {
  return fmt::format("{}_{}_{}", kernel, kernel_dtype(activations), kernel_dtype(gradients));
}

inline float real(const CudaCall& c, Attr a, double otherwise) { return static_cast<float>(c.op.real(a, otherwise)); }

using Heads = AttentionHeads;
inline Heads heads(const Op& op) {
  const std::int64_t d = op.integer(Attr::head_dim);
  return {narrow(op.integer(Attr::heads)), narrow(op.integer(Attr::kv_heads)), narrow(d),
          narrow(op.integer(Attr::value_dim, d))};
}
inline Heads heads(const CudaCall& c) { return heads(c.op); }

/// What this rank's pool has of the sequences that the ranks of op.group hold in parts.
inline KeyShare key_share(const CudaCall& c) {
  if (!c.op.has(Attr::ranks)) return {};
  return {narrow(c.op.integer(Attr::ranks)), narrow(c.places.at(static_cast<std::size_t>(c.op.group)))};
}

/// A gradient of a weight that all rows add to is made in parts, of so many rows each, and summed in a second launch:
/// one thread per column alone would leave a GPU idle. By the number of rows alone, so that the sums have one order.
inline constexpr int rows_of_part = 64;
/// The same where the launch that makes them also streams the rows through, of norms: fewer keep more of a GPU at work;
/// so many keep what is written and read of the parts, 8 B a column, below 5 % of the rows' own three times 2 B.
inline constexpr int rows_of_norm_part = 32;
/// Parts are a grid's dimension, which has 65,535 blocks in y.
inline constexpr int most_parts = 32'767;
/// How many rows a part has: `least`, or more where there would be too many parts.
inline int rows_in_part(std::int64_t rows, int least = rows_of_part) {
  return std::max(least, narrow(blocks_of(rows, most_parts)));
}
inline int parts_of(std::int64_t rows, int least = rows_of_part) {
  return narrow(blocks_of(rows, rows_in_part(rows, least)));
}
/// Parts of so many rows or fewer: where parts have more rows than `least`, more of them may make fewer parts.
inline std::int64_t parts_at_most(std::int64_t rows, int least = rows_of_part) {
  return std::min<std::int64_t>(blocks_of(rows, least), most_parts);
}
inline std::int64_t parts_bytes(const Tensor& rows, std::int64_t columns, int least = rows_of_part) {
  const std::int64_t most = rows.capacity() / rows.shape[static_cast<std::size_t>(rows.rank) - 1].size;
  return parts_at_most(most, least) * columns * std::int64_t{sizeof(float)};
}
/// gradient (+)= the sum of parts[n, its elements].
inline void add_parts(const CudaCall& c, CUdeviceptr parts, int n, const Tensor& gradient) {
  const int N = narrow(gradient.elements(c.sizes));
  c.launch(named("column_sums", gradient.dtype), {blocks_of(N, 32)}, walk_threads, parts, at(c, gradient), n, N,
           flag(c, Attr::accumulate));
}

/// Threads of a norm's backward: a thread has 4 columns of a row, where there are threads enough. By the row's length
/// alone. `most`: as the kernel's registers allow.
inline int norm_threads(std::int64_t columns, int most) {
  return static_cast<int>(std::clamp<std::int64_t>((columns + 127) / 128 * 32, 32, most));
}
/// A warp for each of n items.
inline Grid warps(std::int64_t n) { return {blocks_of(32 * n, head_threads)}; }
/// Threads for a row of n elements: whole warps, by the row's length alone, so that a row's sums have one order.
inline int row_threads(std::int64_t n) {
  return static_cast<int>(std::clamp<std::int64_t>((n + 31) / 32 * 32, 32, 256));
}

}  // namespace hotbunk::cuda
