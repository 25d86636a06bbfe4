#include "backends/cuda/latent_launches.h"

#include <algorithm>

#include "backends/cuda/attention_launches.h"
#include "backends/cuda/launch_operands.h"
#include "base/rounding.h"

namespace hotbunk::cuda {
namespace {

/// A key-value head for each query head.
Heads latent_heads(const Op& op) {
  const int a = narrow(op.integer(Attr::heads));
  return {a, a, narrow(op.integer(Attr::head_dim)), narrow(op.integer(Attr::value_dim))};
}
int turned(const CudaCall& c) { return narrow(c.op.integer(Attr::rope_dim)); }
float amplitude(const CudaCall& c) { return real(c, Attr::rope_amplitude, 1.0); }

/// How a latent_attention shares its scratch: numbers of the blocks, then a block of keys and values for each of the
/// sequences that it works on at once. Of up to 64 MiB, where one sequence does not take more.
struct Rooms {
  static constexpr std::int64_t enough_bytes = std::int64_t{64} << 20, alignment = 256;
  std::int64_t sequences = 1, tokens = 0, numbers_bytes = 0, block_bytes = 0;

  explicit Rooms(const Op& op) {
    const Heads h = latent_heads(op);
    const std::int64_t most = op.inputs[5].shape[0].size;
    tokens = op.inputs[4].shape[1].size * op.integer(Attr::block_tokens);
    block_bytes = std::max<std::int64_t>(1, tokens * h.a * (h.d + h.v) * size_of(op.inputs[1].dtype));
    sequences = std::clamp<std::int64_t>(enough_bytes / block_bytes, 1, std::max<std::int64_t>(1, most));
    numbers_bytes = round_up(sequences * std::int64_t{sizeof(std::int32_t)}, alignment);
  }
  std::int64_t bytes() const { return numbers_bytes + sequences * block_bytes; }
};

}  // namespace

void run_latent_norm(const CudaCall& c) {
  const int T = extent(c, in(c, 0), 0), r = extent(c, out(c, 0), 1);
  c.launch(named("latent_norm", in(c, 0).dtype), {T}, row_threads(r), at(c, in(c, 0)), at(c, in(c, 1)), at(c, in(c, 2)),
           c.tables.frequencies(c.op), at(c, out(c, 0)), at(c, out(c, 1)), at(c, out(c, 2)), r, turned(c),
           real(c, Attr::eps, 0.0), amplitude(c));
}

void run_latent_norm_backward(const CudaCall& c) {
  const int T = extent(c, in(c, 0), 0), r = extent(c, in(c, 0), 1);
  const int each = rows_in_part(T, rows_of_norm_part), n = parts_of(T, rows_of_norm_part);
  c.launch(named("latent_norm_backward", in(c, 0).dtype), {n}, norm_threads(r, 512), at(c, in(c, 0)), at(c, in(c, 1)),
           at(c, in(c, 2)), at(c, in(c, 3)), at(c, in(c, 4)), at(c, in(c, 5)), c.tables.frequencies(c.op),
           at(c, out(c, 0)), c.scratch, T, r, turned(c), each, amplitude(c));
  if (c.op.outputs.size() > 1) add_parts(c, c.scratch, n, out(c, 1));
}

void run_latent_heads(const CudaCall& c) {
  c.launch(named("latent_heads", in(c, 0).dtype), {extent(c, out(c, 0), 0)}, row_threads(width(c, out(c, 0))),
           at(c, in(c, 0)), at(c, in(c, 1)), at(c, in(c, 2)), at(c, out(c, 0)), latent_heads(c.op), turned(c));
}

void run_latent_heads_backward(const CudaCall& c) {
  c.launch(named("latent_heads_backward", in(c, 0).dtype), {extent(c, in(c, 0), 0)}, row_threads(width(c, in(c, 0))),
           at(c, in(c, 0)), at(c, out(c, 0)), at(c, out(c, 1)), at(c, out(c, 2)), latent_heads(c.op), turned(c));
}

void run_latent_write(const CudaCall& c) {
  const int r = extent(c, in(c, 0), 1), t = extent(c, in(c, 1), 1);
  c.launch(named("latent_write", in(c, 0).dtype), {extent(c, in(c, 0), 0)}, row_threads(r + t), at(c, in(c, 0)),
           at(c, in(c, 1)), at(c, in(c, 2)), at(c, out(c, 0)), r, t, narrow(c.op.integer(Attr::block_tokens)),
           key_share(c));
}

void run_latent_attention(const CudaCall& c) {
  const Tensor &pool = in(c, 1), &w = in(c, 2), &tables = in(c, 4);
  const Heads h = latent_heads(c.op);
  const Rooms rooms(c.op);
  const int S = narrow(c.sizes.seqs), r = extent(c, w, 1), t = turned(c), N = extent(c, w, 0);
  const int max_blocks = extent(c, tables, 1), block_tokens = narrow(c.op.integer(Attr::block_tokens)),
            most = narrow(rooms.tokens);
  const bool f32 = pool.dtype == DType::f32;
  const CUdeviceptr lse = c.op.outputs.size() > 1 ? at(c, out(c, 1)) : CUdeviceptr{0};
  const CUdeviceptr numbers = c.scratch, blocks = c.scratch + static_cast<CUdeviceptr>(rooms.numbers_bytes);
  for (int first = 0; first < S; first += narrow(rooms.sequences)) {
    const int n = std::min(narrow(rooms.sequences), S - first);
    const auto behind = [&](const Tensor& of_i32, std::int64_t elements) {
      return at(c, of_i32) + static_cast<CUdeviceptr>(elements * std::int64_t{sizeof(std::int32_t)});
    };
    const CUdeviceptr table = behind(tables, std::int64_t{first} * max_blocks), lengths = behind(in(c, 5), first);
    c.launch(named("latent_expand", pool.dtype), {blocks_of(N, 64) * n, blocks_of(most, f32 ? 32 : 64)}, f32 ? 32 : 128,
             at(c, pool), table, lengths, max_blocks, block_tokens, r, t, key_share(c), at(c, w), blocks, h);
    c.launch(named("latent_share", pool.dtype), {std::min(most, 1024), n}, row_threads(std::int64_t{h.a} * t),
             at(c, pool), table, lengths, max_blocks, block_tokens, r, t, key_share(c), blocks, numbers, h);
    attend_paged(c, {.heads = h,
                     .pool = blocks,
                     .cu_seqlens = behind(in(c, 3), first),
                     .tables = numbers,
                     .lengths = lengths,
                     .out = out(c, 0),
                     .lse = lse,
                     .S = n,
                     .block_tokens = most,
                     .max_blocks = 1});
  }
  clear_idle_rows(c, {.heads = h, .cu_seqlens = at(c, in(c, 3)), .out = out(c, 0), .lse = lse, .S = S});
}

std::int64_t latent_scratch_bytes(const Op& op) { return op.kind == OpKind::latent_attention ? Rooms(op).bytes() : 0; }

}  // namespace hotbunk::cuda
