#include "backends/cuda/attention_launches.h"

#include "backends/cuda/launch_operands.h"
#include "graph/catalogue.h"

namespace hotbunk::cuda {
namespace {

// --- variant 2: tiles on tensor cores -------------------------------------------------------------------------------

constexpr int tile = 64;  // rows of kernels/attention_tiled.cu's tiles
constexpr int tiled_threads = 128;
constexpr int most_tiled = 128;  // numbers of a head

/// By the dtype and the heads alone, which training and rollout have in common: both take the same variant, and their
/// log-probabilities stay equal to the bit (P5).
bool is_tiled(DType dtype, const Heads& h) { return dtype == DType::bf16 && h.d % 8 == 0 && h.d <= most_tiled; }

std::string tiled(const char* kernel, const Heads& h) {
  return fmt::format("tiled_{}_{}", kernel, h.d <= 64 ? 64 : 128);
}

/// At most so many tiles of `items` in all, of S sequences.
Grid tiles(std::int64_t items, int S, int k) { return {items == 0 ? 0 : blocks_of(items, tile) + S, k}; }
Grid tiles_of_queries(int T, int S, const Heads& h) { return tiles(std::int64_t{T} * (h.a / h.k), S, h.k); }

/// Rows are copied 16 bytes at a time.
CUdeviceptr aligned(const CudaCall& c, const Tensor& t) {
  const CUdeviceptr address = at(c, t);
  HB_CHECK(address % 16 == 0, "{}: a tensor of attention in tiles at {:#x}, which is no multiple of 16", c.bound.name(),
           address);
  return address;
}

}  // namespace

void run_attention(const CudaCall& c) {
  const int T = extent(c, in(c, 0), 0), S = narrow(c.sizes.seqs);
  const Heads h = heads(c);
  const DType dtype = in(c, 0).dtype;
  if (is_tiled(dtype, h))
    return c.launch(tiled("attention", h), tiles_of_queries(T, S, h), tiled_threads, aligned(c, in(c, 0)),
                    at(c, in(c, 1)), aligned(c, out(c, 0)), at(c, out(c, 1)), S, h.a, h.k, h.d, attention_scale(h));
  c.launch(named("attention", dtype), warps(std::int64_t{T} * h.a), head_threads, at(c, in(c, 0)), at(c, in(c, 1)),
           at(c, out(c, 0)), at(c, out(c, 1)), T, S, h.a, h.k, h.d, attention_scale(h));
}

void run_attention_backward(const CudaCall& c) {
  const int T = extent(c, in(c, 1), 0), S = narrow(c.sizes.seqs);
  const Heads h = heads(c);
  const CUdeviceptr delta = c.scratch;
  const DType dtype = in(c, 1).dtype;
  if (is_tiled(dtype, h)) {
    c.launch(tiled("attention_query_backward", h), tiles_of_queries(T, S, h), tiled_threads, aligned(c, in(c, 0)),
             aligned(c, in(c, 1)), aligned(c, in(c, 2)), at(c, in(c, 3)), at(c, in(c, 4)), aligned(c, out(c, 0)), delta,
             S, h.a, h.k, h.d, attention_scale(h));
    return c.launch(tiled("attention_key_backward", h), tiles(T, S, h.k), tiled_threads, aligned(c, in(c, 0)),
                    aligned(c, in(c, 1)), at(c, in(c, 3)), delta, at(c, in(c, 4)), aligned(c, out(c, 0)), S, h.a, h.k,
                    h.d, attention_scale(h));
  }
  c.launch(named("attention_query_backward", dtype), warps(std::int64_t{T} * h.a), head_threads, at(c, in(c, 0)),
           at(c, in(c, 1)), at(c, in(c, 2)), at(c, in(c, 3)), at(c, in(c, 4)), at(c, out(c, 0)), delta, T, S, h.a, h.k,
           h.d, attention_scale(h));
  c.launch(named("attention_key_backward", dtype), warps(std::int64_t{T} * h.k), head_threads, at(c, in(c, 0)),
           at(c, in(c, 1)), at(c, in(c, 3)), delta, at(c, in(c, 4)), at(c, out(c, 0)), T, S, h.a, h.k, h.d,
           attention_scale(h));
}

void run_kv_write(const CudaCall& c) {
  const Heads h = heads(c);
  c.launch(named("kv_write", in(c, 0).dtype), {extent(c, in(c, 0), 0)}, row_threads(std::int64_t{h.k} * h.d),
           at(c, in(c, 0)), at(c, in(c, 1)), at(c, out(c, 0)), h.a, h.k, h.d, narrow(c.op.integer(Attr::block_tokens)));
}

void run_paged_attention(const CudaCall& c) {
  const int T = extent(c, in(c, 0), 0), S = narrow(c.sizes.seqs);
  const Heads h = heads(c);
  const DType dtype = in(c, 0).dtype;
  const int block_tokens = narrow(c.op.integer(Attr::block_tokens)), max_blocks = extent(c, in(c, 3), 1);
  if (is_tiled(dtype, h))
    return c.launch(tiled("paged_attention", h), tiles_of_queries(T, S, h), tiled_threads, aligned(c, in(c, 0)),
                    aligned(c, in(c, 1)), at(c, in(c, 2)), at(c, in(c, 3)), at(c, in(c, 4)), aligned(c, out(c, 0)), S,
                    h.a, h.k, h.d, block_tokens, max_blocks, attention_scale(h));
  c.launch(named("paged_attention", dtype), warps(std::int64_t{T} * h.a), head_threads, at(c, in(c, 0)),
           at(c, in(c, 1)), at(c, in(c, 2)), at(c, in(c, 3)), at(c, in(c, 4)), at(c, out(c, 0)), T, S, h.a, h.k, h.d,
           block_tokens, max_blocks, attention_scale(h));
}

// --- context-parallel ranks -----------------------------------------------------------------------------------------

namespace {

/// Elements of a row of queries, and of keys and values.
struct Widths {
  int queries, keys;
};
Widths widths(const Heads& h) { return {h.a * h.d, 2 * h.k * h.d}; }

struct Share {
  int ranks, place, source, all;
};
Share share(const CudaCall& c) {
  const ContextParts parts = context_parts(c.op, c.places);
  return {narrow(parts.ranks), narrow(parts.place), narrow(parts.source), parts.all ? 1 : 0};
}

}  // namespace

void run_take_kv(const CudaCall& c) {
  const Widths w = widths(heads(c));
  c.launch(named("take_kv", in(c, 0).dtype), {extent(c, in(c, 0), 0)}, row_threads(w.keys), at(c, in(c, 0)),
           at(c, out(c, 0)), w.queries, w.keys);
}

void run_merge_qkv(const CudaCall& c) {
  const Widths w = widths(heads(c));
  const CUdeviceptr more = c.op.num_operands() > 2 ? at(c, in(c, 2)) : CUdeviceptr{0};
  c.launch(named("merge_qkv", out(c, 0).dtype), {extent(c, out(c, 0), 0)}, row_threads(w.queries + w.keys),
           at(c, in(c, 0)), at(c, in(c, 1)), more, at(c, out(c, 0)), w.queries, w.keys);
}

void run_context_attention(const CudaCall& c) {
  const int T = extent(c, in(c, 0), 0), S = narrow(c.sizes.seqs);
  const Heads h = heads(c);
  const Share s = share(c);
  c.launch(fmt::format("context_attention_{}_{}", kernel_dtype(in(c, 0).dtype), kernel_dtype(out(c, 0).dtype)),
           warps(std::int64_t{T} * h.a), head_threads, at(c, in(c, 0)), at(c, in(c, 1)), at(c, in(c, 2)),
           at(c, out(c, 0)), at(c, out(c, 1)), T, S, h.a, h.k, h.d, s.ranks, s.place, s.source, s.all,
           attention_scale(h), flag(c, Attr::accumulate));
}

void run_context_attention_backward(const CudaCall& c) {
  const int T = extent(c, in(c, 1), 0), S = narrow(c.sizes.seqs);
  const Heads h = heads(c);
  const Share s = share(c);
  const DType dtype = in(c, 1).dtype;
  const CUdeviceptr delta = c.scratch;
  c.launch(named("context_attention_query_backward", dtype), warps(std::int64_t{T} * h.a), head_threads,
           at(c, in(c, 0)), at(c, in(c, 1)), at(c, in(c, 2)), at(c, in(c, 3)), at(c, in(c, 4)), at(c, in(c, 5)),
           at(c, out(c, 0)), delta, T, S, h.a, h.k, h.d, s.ranks, s.place, s.source, s.all, attention_scale(h),
           flag(c, Attr::accumulate));
  c.launch(named("context_attention_key_backward", dtype), warps(std::int64_t{T} * (s.all != 0 ? s.ranks : 1) * h.k),
           head_threads, at(c, in(c, 0)), at(c, in(c, 1)), at(c, in(c, 2)), at(c, in(c, 4)), delta, at(c, in(c, 5)),
           at(c, out(c, 1)), T, S, h.a, h.k, h.d, s.ranks, s.place, s.source, s.all, attention_scale(h));
}

}  // namespace hotbunk::cuda
