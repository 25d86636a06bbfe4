#include "backends/cuda/product_launches.h"

#include <fmt/format.h>

#include <string_view>

#include "backends/cuda/expert_launches.h"
#include "backends/cuda/launch_operands.h"
#include "graph/catalogue.h"

namespace hotbunk::cuda {
namespace {

/// A matrix from an element on, its rows `ld` elements apart.
struct Columns {
  CUdeviceptr at;
  int ld;
};
Columns columns_of(const CudaCall& c, const Tensor& t, std::int64_t first = 0) {
  return {at(c, t) + static_cast<CUdeviceptr>(first * size_of(t.dtype)), width(c, t)};
}

/// The tile of kernels/matmul_nt.cu for so many rows and columns. Weights of a few rows stream through narrow tiles; of
/// more rows it is the largest of which there are as many as multiprocessors, else the smallest.
Grid tile_of(int M, int N, int multiprocessors) {
  const auto fills = [&](int rows, int columns) {
    return M > rows / 2 && blocks_of(M, rows) * blocks_of(N, columns) >= multiprocessors;
  };
  if (M <= 32) return {32, 16};
  if (fills(128, 128)) return {128, 128};
  return fills(64, 64) ? Grid{64, 64} : Grid{64, 32};
}

/// C[M,N] (+)= A B in one of the three forms of kernels/matmul.cu, by our kernels.
void multiply(const CudaCall& c, const char* form, DType from, Columns a, CUdeviceptr b, CUdeviceptr bias, DType result,
              Columns to, int M, int N, int K, int accumulate) {
  const bool f32 = from == DType::f32;
  // The form of training's forward, prefill and decode; a parameter inside a gathered unit may begin at any element.
  if (!f32 && std::string_view(form) == "nt" && (K | a.ld) % 8 == 0 && (a.at | b) % 16 == 0) {
    const Grid tile = tile_of(M, N, c.launch.context().multiprocessors());
    c.launch(fmt::format("matmul_nt_bf16_{}_{}x{}", kernel_dtype(result), tile.x, tile.y),
             {blocks_of(M, static_cast<int>(tile.x)) * blocks_of(N, static_cast<int>(tile.y))}, 128, a.at, a.ld, b,
             bias, to.at, to.ld, M, N, K, accumulate);
    return;
  }
  const Grid grid{blocks_of(N, 64), blocks_of(M, f32 ? 32 : 64)};
  c.launch(fmt::format("matmul_{}_{}_{}", form, kernel_dtype(from), kernel_dtype(result)), grid, f32 ? 32 : 128, a.at,
           a.ld, b, bias, to.at, to.ld, M, N, K, accumulate);
}

/// The same of whole matrices, by cuBLASLt where that is asked for and can.
void multiply(const CudaCall& c, Product::Form product, DType from, Columns a, CUdeviceptr b, CUdeviceptr bias,
              DType result, Columns to, int M, int N, int K, int accumulate) {
  const char* const form = product == Product::Form::nt ? "nt" : product == Product::Form::nn ? "nn" : "tn";
  const auto own = [&](CUdeviceptr rows_at, CUdeviceptr result_at, std::int64_t rows) {
    multiply(c, form, from, {rows_at, a.ld}, b, bias, result, {result_at, to.ld}, narrow(rows), N, K, accumulate);
  };
  if (c.products != nullptr && c.products->take({product, from, result, M, N, K, accumulate != 0, bias != 0},
                                                {a.at, b, bias, to.at}, c.op.kind, own))
    return;
  own(a.at, to.at, M);
}
void multiply(const CudaCall& c, Product::Form product, const Tensor& a, const Tensor& b, CUdeviceptr bias,
              const Tensor& to, int M, int N, int K, int accumulate) {
  multiply(c, product, a.dtype, columns_of(c, a), at(c, b), bias, to.dtype, columns_of(c, to), M, N, K, accumulate);
}

std::int64_t column(const CudaCall& c) { return c.op.integer(Attr::column); }

/// Times the adapter's factor, in place.
void scale(const CudaCall& c, const Tensor& x) {
  const std::int64_t n = x.elements(c.sizes);
  c.launch(named("scale", x.dtype), {walking_blocks_of(n, walk_threads)}, walk_threads, at(c, x),
           real(c, Attr::factor, 1.0), n);
}

}  // namespace

void run_linear(const CudaCall& c) {
  const CUdeviceptr bias = c.op.num_operands() > 2 ? at(c, in(c, 2)) : CUdeviceptr{0};
  multiply(c, Product::Form::nt, in(c, 0), in(c, 1), bias, out(c, 0), extent(c, in(c, 0), 0), extent(c, in(c, 1), 0),
           extent(c, in(c, 1), 1), 0);
}
void multiply_rows(const CudaCall& c, CUdeviceptr x, CUdeviceptr bias, DType result, CUdeviceptr y) {
  const Tensor& w = in(c, 1);
  const int N = extent(c, w, 0), K = extent(c, w, 1);
  multiply(c, Product::Form::nt, w.dtype, {x, K}, at(c, w), bias, result, {y, N}, extent(c, in(c, 0), 0), N, K, 0);
}
void run_linear_dgrad(const CudaCall& c) {
  multiply(c, Product::Form::nn, in(c, 0), in(c, 1), 0, out(c, 0), extent(c, in(c, 0), 0), extent(c, in(c, 1), 1),
           extent(c, in(c, 1), 0), flag(c, Attr::accumulate));
}
void run_linear_wgrad(const CudaCall& c) {
  const int T = extent(c, in(c, 0), 0), N = extent(c, in(c, 0), 1);
  const int accumulate = flag(c, Attr::accumulate);
  multiply(c, Product::Form::tn, in(c, 0), in(c, 1), 0, out(c, 0), N, extent(c, in(c, 1), 1), T, accumulate);
  if (c.op.outputs.size() < 2) return;
  const int n = parts_of(T);
  c.launch(named("column_parts", in(c, 0).dtype), {blocks_of(N, head_threads), n}, head_threads, at(c, in(c, 0)),
           c.scratch, T, N, rows_in_part(T));
  add_parts(c, c.scratch, n, out(c, 1));
}

void run_lora_down(const CudaCall& c) {
  const Tensor &x = in(c, 0), &a = in(c, 1), &u = out(c, 0);
  if (adapts_experts(c.op)) return run_expert_lora_down(c), scale(c, u);
  multiply(c, "nt", x.dtype, columns_of(c, x), at(c, a), CUdeviceptr{0}, u.dtype, columns_of(c, u), extent(c, x, 0),
           extent(c, a, 0), extent(c, x, 1), 0);
  scale(c, u);
}
void run_lora_up(const CudaCall& c) {
  if (adapts_experts(c.op)) return run_expert_lora_up(c);
  const Tensor &u = in(c, 0), &b = in(c, 1), &y = out(c, 0);
  multiply(c, "nt", u.dtype, columns_of(c, u), at(c, b), CUdeviceptr{0}, y.dtype, columns_of(c, y, column(c)),
           extent(c, u, 0), extent(c, b, 0), extent(c, b, 1), 1);
}
void run_lora_up_dgrad(const CudaCall& c) {
  const Tensor &dy = in(c, 0), &b = in(c, 1), &du = out(c, 0);
  if (adapts_experts(c.op)) return run_expert_lora_up_dgrad(c), scale(c, du);
  multiply(c, "nn", dy.dtype, columns_of(c, dy, column(c)), at(c, b), CUdeviceptr{0}, du.dtype, columns_of(c, du),
           extent(c, dy, 0), extent(c, b, 1), extent(c, b, 0), 0);
  scale(c, du);
}
void run_lora_up_wgrad(const CudaCall& c) {
  if (adapts_experts(c.op)) return run_expert_lora_up_wgrad(c);
  const Tensor &dy = in(c, 0), &u = in(c, 1), &db = out(c, 0);
  multiply(c, "tn", dy.dtype, columns_of(c, dy, column(c)), at(c, u), CUdeviceptr{0}, db.dtype, columns_of(c, db),
           extent(c, db, 0), extent(c, db, 1), extent(c, dy, 0), flag(c, Attr::accumulate));
}
void run_lora_merge(const CudaCall& c) {
  const Tensor &w = in(c, 0), &b = in(c, 1), &a = in(c, 2), &y = out(c, 0);
  const int n = extent(c, w, 0), K = extent(c, w, 1);
  c.launch(fmt::format("lora_merge_{}_{}_{}", kernel_dtype(w.dtype), kernel_dtype(a.dtype), kernel_dtype(y.dtype)),
           {walking_blocks_of(std::int64_t{n} * K, walk_threads)}, walk_threads, at(c, w), at(c, b), at(c, a), at(c, y),
           n, K, extent(c, b, 1), real(c, Attr::factor, 1.0));
}

}  // namespace hotbunk::cuda
