#include "backends/cuda/attention_launches.h"

#include <algorithm>
#include <cmath>

#include "backends/cuda/attention_variant.h"
#include "backends/cuda/launch_operands.h"
#include "graph/catalogue.h"

namespace hotbunk::cuda {
namespace {

// --- variant 2: tiles on tensor cores -------------------------------------------------------------------------------

constexpr int tile_rows = 64;  // rows of kernels/attention_tiled.cu's tiles
constexpr int tiled_threads = 128;

bool is_tiled(DType dtype, const Heads& h) { return attends_in_tiles(dtype, h.d, h.v); }

std::string tiled(const char* kernel, const Heads& h) {
  return fmt::format("tiled_{}_{}", kernel, std::max(h.d, h.v) <= 64 ? 64 : 128);
}

/// At most so many tiles of `items` in all, of S sequences.
Grid tiles(std::int64_t items, int S, int k) { return {items == 0 ? 0 : blocks_of(items, tile_rows) + S, k}; }
Grid tiles_of_queries(int T, int S, const Heads& h) { return tiles(std::int64_t{T} * (h.a / h.k), S, h.k); }

/// Rows are copied 16 bytes at a time.
CUdeviceptr aligned(const CudaCall& c, CUdeviceptr address) {
  HB_CHECK(address % 16 == 0, "{}: a tensor of attention in tiles at {:#x}, which is no multiple of 16", c.bound.name(),
           address);
  return address;
}
CUdeviceptr aligned(const CudaCall& c, const Tensor& t) { return aligned(c, at(c, t)); }

ScoreOptions scores(const CudaCall& c) {
  const double usual = 1.0f / std::sqrt(static_cast<float>(c.op.integer(Attr::head_dim)));
  return {real(c, Attr::scale, usual), real(c, Attr::softcap, 0.0), narrow(c.op.integer(Attr::window, 0))};
}

}  // namespace

void run_attention(const CudaCall& c) {
  const int T = extent(c, in(c, 0), 0), S = narrow(c.sizes.seqs);
  const Heads h = heads(c);
  const DType dtype = in(c, 0).dtype;
  if (is_tiled(dtype, h))
    return c.launch(tiled("attention", h), tiles_of_queries(T, S, h), tiled_threads, aligned(c, in(c, 0)),
                    at(c, in(c, 1)), aligned(c, out(c, 0)), at(c, out(c, 1)), S, h, scores(c));
  c.launch(named("attention", dtype), warps(std::int64_t{T} * h.a), head_threads, at(c, in(c, 0)), at(c, in(c, 1)),
           at(c, out(c, 0)), at(c, out(c, 1)), T, S, h, scores(c));
}

void run_attention_backward(const CudaCall& c) {
  const int T = extent(c, in(c, 1), 0), S = narrow(c.sizes.seqs);
  const Heads h = heads(c);
  const CUdeviceptr delta = c.scratch;
  const DType dtype = in(c, 1).dtype;
  const AttentionBackward by_library{
      .dtype = dtype, .heads = h, .scores = scores(c), .tokens = T, .sequences = S, .pairs = c.sizes.attention_pairs};
  if (c.attention != nullptr && c.attention->take(by_library, {.d_o = at(c, in(c, 0)),
                                                               .x = at(c, in(c, 1)),
                                                               .o = at(c, in(c, 2)),
                                                               .lse = at(c, in(c, 3)),
                                                               .cu_seqlens = at(c, in(c, 4)),
                                                               .dx = at(c, out(c, 0)),
                                                               .delta = delta}))
    return;
  if (is_tiled(dtype, h)) {
    c.launch(tiled("attention_query_backward", h), tiles_of_queries(T, S, h), tiled_threads, aligned(c, in(c, 0)),
             aligned(c, in(c, 1)), aligned(c, in(c, 2)), at(c, in(c, 3)), at(c, in(c, 4)), aligned(c, out(c, 0)), delta,
             S, h, scores(c));
    return c.launch(tiled("attention_key_backward", h), tiles(T, S, h.k), tiled_threads, aligned(c, in(c, 0)),
                    aligned(c, in(c, 1)), at(c, in(c, 3)), delta, at(c, in(c, 4)), aligned(c, out(c, 0)), S, h,
                    scores(c));
  }
  c.launch(named("attention_query_backward", dtype), warps(std::int64_t{T} * h.a), head_threads, at(c, in(c, 0)),
           at(c, in(c, 1)), at(c, in(c, 2)), at(c, in(c, 3)), at(c, in(c, 4)), at(c, out(c, 0)), delta, T, S, h,
           scores(c));
  c.launch(named("attention_key_backward", dtype), warps(std::int64_t{T} * h.k), head_threads, at(c, in(c, 0)),
           at(c, in(c, 1)), at(c, in(c, 3)), delta, at(c, in(c, 4)), at(c, out(c, 0)), T, S, h, scores(c));
}

void run_kv_write(const CudaCall& c) {
  const Heads h = heads(c);
  c.launch(named("kv_write", in(c, 0).dtype), {extent(c, in(c, 0), 0)},
           row_threads(std::int64_t{h.k} * std::max(h.d, h.v)), at(c, in(c, 0)), at(c, in(c, 1)), at(c, out(c, 0)), h,
           narrow(c.op.integer(Attr::block_tokens)), key_share(c));
}

void attend_paged(const CudaCall& c, const PagedKeys& p) {
  const Tensor& x = in(c, 0);
  const int T = extent(c, x, 0);
  const AttentionHeads& h = p.heads;
  if (is_tiled(x.dtype, h))
    return c.launch(tiled("paged_attention", h), tiles_of_queries(T, p.S, h), tiled_threads, aligned(c, x), width(c, x),
                    aligned(c, p.pool), p.cu_seqlens, p.tables, p.lengths, aligned(c, p.out), p.lse, p.S, h,
                    p.block_tokens, p.max_blocks, scores(c), key_share(c));
  c.launch(named("paged_attention", x.dtype), warps(std::int64_t{T} * h.a), head_threads, at(c, x), width(c, x), p.pool,
           p.cu_seqlens, p.tables, p.lengths, at(c, p.out), p.lse, T, p.S, h, p.block_tokens, p.max_blocks, scores(c),
           key_share(c));
}

void clear_idle_rows(const CudaCall& c, const PagedKeys& p) {
  const int T = extent(c, p.out, 0), wide = width(c, p.out);
  if (T > p.S)  // a step of one row each has none
    c.launch(named("clear_idle_rows", p.out.dtype), {T}, row_threads(wide), at(c, p.out), p.lse, p.cu_seqlens, p.S,
             wide, p.heads.a);
}

void run_paged_attention(const CudaCall& c) {
  const PagedKeys keys{.heads = heads(c),
                       .pool = at(c, in(c, 1)),
                       .cu_seqlens = at(c, in(c, 2)),
                       .tables = at(c, in(c, 3)),
                       .lengths = at(c, in(c, 4)),
                       .out = out(c, 0),
                       .lse = c.op.outputs.size() > 1 ? at(c, out(c, 1)) : CUdeviceptr{0},
                       .S = narrow(c.sizes.seqs),
                       .block_tokens = narrow(c.op.integer(Attr::block_tokens)),
                       .max_blocks = extent(c, in(c, 3), 1)};
  attend_paged(c, keys);
  clear_idle_rows(c, keys);
}

namespace {

/// Those of this rank's heads.
CUdeviceptr own_part(const CudaCall& c, const Tensor& of_all_heads) {
  return at(c, of_all_heads) + static_cast<CUdeviceptr>(own_sinks(c.op, c.places).begin * size_of(of_all_heads.dtype));
}

}  // namespace

void run_attention_sinks(const CudaCall& c) {
  const int T = extent(c, out(c, 0), 0), a = extent(c, out(c, 1), 1), v = extent(c, out(c, 0), 1) / a;
  if (in(c, 2).rank == 3)  // of what ranks have of the keys
    return c.launch(named("attention_sinks_part", out(c, 0).dtype), warps(std::int64_t{T} * a), head_threads,
                    at(c, out(c, 0)), at(c, out(c, 1)), at(c, in(c, 2)), extent(c, in(c, 2), 0), T, a, v);
  c.launch(named("attention_sinks", out(c, 0).dtype), warps(std::int64_t{T} * a), head_threads, at(c, out(c, 0)),
           at(c, out(c, 1)), own_part(c, in(c, 2)), T, a, v);
}

void run_attention_sinks_backward(const CudaCall& c) {
  const int T = extent(c, in(c, 0), 0), a = extent(c, in(c, 2), 1), v = extent(c, in(c, 0), 1) / a;
  const int accumulate = flag(c, Attr::accumulate);
  if (accumulate == 0) c.launch.fill(at(c, out(c, 0)), 0, out(c, 0).bytes(c.sizes));  // other ranks' heads
  c.launch(named("attention_sinks_backward", in(c, 0).dtype, out(c, 0).dtype), {a}, walk_threads, at(c, in(c, 0)),
           at(c, in(c, 1)), at(c, in(c, 2)), own_part(c, in(c, 3)), own_part(c, out(c, 0)), T, a, v, accumulate);
}

// --- context-parallel ranks -----------------------------------------------------------------------------------------

namespace {

/// Elements of a row of queries, and of keys and values.
struct Widths {
  int queries, keys;
};
Widths widths(const Heads& h) { return {h.a * h.d, h.k * (h.d + h.v)}; }

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
           at(c, out(c, 0)), at(c, out(c, 1)), T, S, h, s.ranks, s.place, s.source, s.all, scores(c),
           flag(c, Attr::accumulate));
}

void run_context_attention_backward(const CudaCall& c) {
  const int T = extent(c, in(c, 1), 0), S = narrow(c.sizes.seqs);
  const Heads h = heads(c);
  const Share s = share(c);
  const DType dtype = in(c, 1).dtype;
  const CUdeviceptr delta = c.scratch;
  c.launch(named("context_attention_query_backward", dtype), warps(std::int64_t{T} * h.a), head_threads,
           at(c, in(c, 0)), at(c, in(c, 1)), at(c, in(c, 2)), at(c, in(c, 3)), at(c, in(c, 4)), at(c, in(c, 5)),
           at(c, out(c, 0)), delta, T, S, h, s.ranks, s.place, s.source, s.all, scores(c), flag(c, Attr::accumulate));
  c.launch(named("context_attention_key_backward", dtype), warps(std::int64_t{T} * (s.all != 0 ? s.ranks : 1) * h.k),
           head_threads, at(c, in(c, 0)), at(c, in(c, 1)), at(c, in(c, 2)), at(c, in(c, 4)), delta, at(c, in(c, 5)),
           at(c, out(c, 1)), T, S, h, s.ranks, s.place, s.source, s.all, scores(c));
}

}  // namespace hotbunk::cuda
