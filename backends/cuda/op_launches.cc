// From an op to its launches, one function each, and what the kernels ask of an op: long because it has all of them
// but those of attention, experts, latents and products.
#include "backends/cuda/op_launches.h"

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <vector>

#include "backends/cuda/attention_launches.h"
#include "backends/cuda/expert_launches.h"
#include "backends/cuda/latent_launches.h"
#include "backends/cuda/launch_operands.h"
#include "backends/cuda/many_tensors.h"
#include "backends/cuda/product_launches.h"
#include "base/check.h"
#include "base/rounding.h"
#include "graph/catalogue.h"
#include "graph/slots.h"

namespace hotbunk::cuda {
namespace {

float eps(const CudaCall& c) { return static_cast<float>(c.op.real(Attr::eps)); }
float offset(const CudaCall& c) { return real(c, Attr::offset, 0.0); }
/// So many floats further.
CUdeviceptr behind(CUdeviceptr at, std::int64_t floats) {
  return at + static_cast<CUdeviceptr>(floats * std::int64_t{sizeof(float)});
}
/// A row has many heads that add to one weight: fewer rows make a part (launch_operands.h).
constexpr int rows_of_head_part = 8;

// --- data -----------------------------------------------------------------------------------------------------------

void run_zero(const CudaCall& c) { c.launch.fill(at(c, out(c, 0)), 0, out(c, 0).bytes(c.sizes)); }

void run_cast(const CudaCall& c) {
  const DType from = in(c, 0).dtype, to = out(c, 0).dtype;
  const std::int64_t n = in(c, 0).elements(c.sizes);
  if (from == to) return c.launch.copy(at(c, out(c, 0)), at(c, in(c, 0)), in(c, 0).bytes(c.sizes));
  c.launch(fmt::format("cast_{}_{}", kernel_dtype(from), kernel_dtype(to)), {walking_blocks_of(n, walk_threads)},
           walk_threads, at(c, in(c, 0)), at(c, out(c, 0)), n);
}

void run_copy_boxes(const CudaCall& c) {
  for (const BoxRun& run : c.tables.boxes(c.op)) {
    const Tensor &from = in(c, static_cast<std::size_t>(run.input)), &to = out(c, static_cast<std::size_t>(run.output));
    copy_boxes(c.launch, at(c, from), from.dtype, at(c, to), to.dtype, run, 0, run.boxes);
  }
}

void run_hash_boxes(const CudaCall& c) {
  const auto as = static_cast<DType>(c.op.integer(Attr::as_dtype));
  for (const BoxRun& run : c.tables.boxes(c.op)) {
    const Tensor& from = in(c, static_cast<std::size_t>(run.input));
    c.launch(fmt::format("hash_boxes_{}_{}", kernel_dtype(from.dtype), kernel_dtype(as)),
             {walking_blocks_of(run.most_elements, walk_threads), run.boxes}, walk_threads, at(c, from),
             at(c, out(c, 0)), run.table);
  }
}

void run_add(const CudaCall& c) {
  const std::int64_t n = out(c, 0).elements(c.sizes);
  c.launch(fmt::format("add_{}_{}", kernel_dtype(in(c, 0).dtype), kernel_dtype(in(c, 1).dtype)),
           {walking_blocks_of(n, walk_threads)}, walk_threads, at(c, in(c, 0)), at(c, in(c, 1)), at(c, out(c, 0)), n);
}

void run_gather_rows(const CudaCall& c) {
  const int H = extent(c, in(c, 0), 1);
  c.launch(fmt::format("gather_rows_{}", size_of(in(c, 0).dtype)), {extent(c, out(c, 0), 0)}, row_threads(H),
           at(c, in(c, 0)), at(c, in(c, 1)), at(c, out(c, 0)), H);
}

// --- norms, rope, heads ---------------------------------------------------------------------------------------------

/// Of the op's first input; residual, sum: 0 where nothing is added.
void norm_rows(const CudaCall& c, CUdeviceptr weight, CUdeviceptr residual, CUdeviceptr sum, CUdeviceptr y,
               CUdeviceptr rstd) {
  const Tensor& x = in(c, 0);
  const int H = extent(c, x, 1);
  c.launch(named("rms_norm", x.dtype), {extent(c, x, 0)}, row_threads(H), at(c, x), residual, weight, y, rstd, sum, H,
           eps(c), offset(c));
}
void run_rms_norm(const CudaCall& c) {
  const bool fused = c.op.num_operands() > 2;
  norm_rows(c, at(c, in(c, 1)), fused ? at(c, in(c, 2)) : CUdeviceptr{0}, fused ? at(c, out(c, 2)) : CUdeviceptr{0},
            at(c, out(c, 0)), at(c, out(c, 1)));
}
void run_rms_norm_backward(const CudaCall& c) {
  const int T = extent(c, in(c, 1), 0), H = extent(c, in(c, 1), 1);
  const bool frozen = c.op.outputs.size() == 1;  // then there are no parts, and a row is a block's
  const int each = frozen ? 1 : rows_in_part(T, rows_of_norm_part), n = narrow(blocks_of(T, each));
  const CUdeviceptr parts = frozen ? CUdeviceptr{0} : c.scratch;
  c.launch(named("rms_norm_backward", in(c, 1).dtype), {n}, norm_threads(H, 1024), at(c, in(c, 0)), at(c, in(c, 1)),
           at(c, in(c, 2)), at(c, in(c, 3)), at(c, out(c, 0)), parts, T, H, each, offset(c), flag(c, Attr::residual));
  if (!frozen) add_parts(c, parts, n, out(c, 1));
}
void run_qk_norm(const CudaCall& c) {
  const int T = extent(c, in(c, 0), 0);
  const Heads h = heads(c);
  c.launch(named("qk_norm", in(c, 0).dtype), warps(std::int64_t{T} * (h.a + 2 * h.k)), head_threads, at(c, in(c, 0)),
           at(c, in(c, 1)), at(c, in(c, 2)), at(c, out(c, 0)), at(c, out(c, 1)), T, h.a, h.k, h.d, eps(c), offset(c));
}
void run_qk_norm_backward(const CudaCall& c) {
  const int T = extent(c, in(c, 1), 0), n = parts_of(T, rows_of_head_part);
  const Heads h = heads(c);
  const bool frozen = c.op.outputs.size() == 1;
  const CUdeviceptr parts = frozen ? CUdeviceptr{0} : c.scratch;
  c.launch(named("qk_norm_backward", in(c, 1).dtype), {n}, head_threads, at(c, in(c, 0)), at(c, in(c, 1)),
           at(c, in(c, 2)), at(c, in(c, 3)), at(c, in(c, 4)), at(c, out(c, 0)), parts, T, h.a, h.k, h.d,
           rows_in_part(T, rows_of_head_part), offset(c));
  if (frozen) return;
  add_parts(c, parts, n, out(c, 1));
  add_parts(c, behind(parts, std::int64_t{n} * h.d), n, out(c, 2));
}
void run_layer_norm(const CudaCall& c) {
  const int H = extent(c, in(c, 0), 1);
  const bool fused = c.op.num_operands() > 3;
  const CUdeviceptr residual = fused ? at(c, in(c, 3)) : CUdeviceptr{0},
                    sum = fused ? at(c, out(c, 2)) : CUdeviceptr{0};
  c.launch(named("layer_norm", in(c, 0).dtype), {extent(c, in(c, 0), 0)}, row_threads(H), at(c, in(c, 0)), residual,
           at(c, in(c, 1)), at(c, in(c, 2)), at(c, out(c, 0)), at(c, out(c, 1)), sum, H, eps(c));
}
void run_layer_norm_backward(const CudaCall& c) {
  const int T = extent(c, in(c, 1), 0), H = extent(c, in(c, 1), 1), n = parts_of(T);
  c.launch(named("layer_norm_backward", in(c, 1).dtype), {n}, norm_threads(H, 512), at(c, in(c, 0)), at(c, in(c, 1)),
           at(c, in(c, 2)), at(c, in(c, 3)), at(c, out(c, 0)), c.scratch, T, H, rows_in_part(T),
           flag(c, Attr::residual));
  if (c.op.outputs.size() == 1) return;  // frozen
  add_parts(c, c.scratch, n, out(c, 1));
  add_parts(c, behind(c.scratch, std::int64_t{n} * H), n, out(c, 2));
}

void rotate(const CudaCall& c, float sign) {
  const bool neighbours = c.op.has(Attr::rope_dim);
  const Heads h = heads(c);
  // Of latent attention, whose keys turn elsewhere, only the queries are here.
  const int rotated = neighbours ? h.a : h.a + h.k;
  const int turned = narrow(c.op.integer(Attr::rope_dim, c.op.integer(Attr::rope_first, h.d)));
  c.launch(named(neighbours ? "rope_neighbours" : "rope", out(c, 0).dtype), {extent(c, out(c, 0), 0)},
           row_threads(std::int64_t{rotated} * (turned / 2)), at(c, out(c, 0)), at(c, in(c, 1)),
           c.tables.frequencies(c.op), rotated, width(c, out(c, 0)), h.d, turned, real(c, Attr::rope_amplitude, 1.0),
           sign);
}
void run_rope(const CudaCall& c) { rotate(c, 1.0f); }
void run_rope_backward(const CudaCall& c) { rotate(c, -1.0f); }

/// `parts`: the tensor [W,T,Q'].
void run_heads(const CudaCall& c, const char* kernel, const Tensor& parts) {
  const Heads h = heads(c);
  c.launch(named(kernel, in(c, 0).dtype), {walking_blocks_of(out(c, 0).elements(c.sizes), walk_threads)}, walk_threads,
           at(c, in(c, 0)), at(c, out(c, 0)), extent(c, parts, 1), h.a, h.k, h.d, h.v, extent(c, parts, 0));
}
void run_split_heads(const CudaCall& c) { run_heads(c, "split_heads", out(c, 0)); }
void run_merge_heads(const CudaCall& c) { run_heads(c, "merge_heads", in(c, 0)); }

// --- elementwise, embedding -----------------------------------------------------------------------------------------

/// A function of elements, of rows as wide as what it makes.
template <class... T>
void activate(const CudaCall& c, const char* kernel, const T&... values) {
  const int R = rows(c, out(c, 0)), I = width(c, out(c, 0));
  c.launch(named(kernel, in(c, 0).dtype), {walking_blocks_of(std::int64_t{R} * I, walk_threads)}, walk_threads,
           at(c, in(c, 0)), at(c, out(c, 0)), R, I, values...);
}
/// Its backward: of the gradient and of what the function was of.
template <class... T>
void activate_backward(const CudaCall& c, const char* kernel, const T&... values) {
  const int R = rows(c, in(c, 0)), I = width(c, in(c, 0));
  c.launch(named(kernel, in(c, 0).dtype), {walking_blocks_of(std::int64_t{R} * I, walk_threads)}, walk_threads,
           at(c, in(c, 0)), at(c, in(c, 1)), at(c, out(c, 0)), R, I, values...);
}
void run_swiglu(const CudaCall& c) { activate(c, "swiglu"); }
void run_swiglu_backward(const CudaCall& c) { activate_backward(c, "swiglu_backward"); }
void run_geglu(const CudaCall& c) { activate(c, "geglu"); }
void run_geglu_backward(const CudaCall& c) { activate_backward(c, "geglu_backward"); }
void run_gelu(const CudaCall& c) { activate(c, "gelu"); }
void run_gelu_backward(const CudaCall& c) { activate_backward(c, "gelu_backward"); }
void run_clamped_swiglu(const CudaCall& c) {
  activate(c, "clamped_swiglu", real(c, Attr::limit, 0.0), real(c, Attr::alpha, 0.0));
}
void run_clamped_swiglu_backward(const CudaCall& c) {
  activate_backward(c, "clamped_swiglu_backward", real(c, Attr::limit, 0.0), real(c, Attr::alpha, 0.0));
}
/// Where the launches of a fused_linear leave what lies between them, in scratch: rows that are normed, a product that
/// is gated, and 1 / rms of each row.
struct BetweenLaunches {
  std::int64_t normed = 0, product = 0, rstd = 0, end = 0;  // bytes
};
BetweenLaunches between_launches(const Op& op) {
  constexpr std::int64_t alignment = 256;
  const ProductSides sides = product_sides(op);
  const std::int64_t rows = op.inputs[0].shape[0].size, size = size_of(op.inputs[0].dtype);
  BetweenLaunches out;
  out.product = round_up(sides.norm >= 0 ? rows * op.inputs[0].shape[1].size * size : 0, alignment);
  out.rstd = round_up(out.product + (sides.gate ? rows * op.inputs[1].shape[0].size * size : 0), alignment);
  out.end = out.rstd + rows * std::int64_t{sizeof(float)};
  return out;
}

/// The launches of its parts, one behind the other.
void run_fused_linear(const CudaCall& c) {
  const ProductSides sides = product_sides(c.op);
  const BetweenLaunches between = between_launches(c.op);
  const auto input = [&](int i) { return i < 0 ? CUdeviceptr{0} : at(c, in(c, static_cast<std::size_t>(i))); };
  const auto scratch = [&](std::int64_t bytes) { return c.scratch + static_cast<CUdeviceptr>(bytes); };
  CUdeviceptr x = at(c, in(c, 0));
  if (sides.norm >= 0) {
    const CUdeviceptr normed = scratch(between.normed);
    norm_rows(c, input(sides.norm), input(sides.delta), sides.delta >= 0 ? at(c, out(c, 1)) : CUdeviceptr{0}, normed,
              scratch(between.rstd));
    x = normed;
  }
  const CUdeviceptr y = at(c, out(c, 0)), product = sides.gate ? scratch(between.product) : y;
  const DType dtype = in(c, 0).dtype;
  multiply_rows(c, x, input(sides.bias), sides.gate ? dtype : out(c, 0).dtype, product);
  const std::int64_t n = out(c, 0).elements(c.sizes);
  if (sides.gate)
    c.launch(named("swiglu", dtype), {walking_blocks_of(n, walk_threads)}, walk_threads, product, y, rows(c, out(c, 0)),
             width(c, out(c, 0)));
  if (sides.residual >= 0)
    c.launch(fmt::format("add_{0}_{0}", kernel_dtype(dtype)), {walking_blocks_of(n, walk_threads)}, walk_threads, y,
             input(sides.residual), y, n);
}

float cap(const CudaCall& c) { return real(c, Attr::softcap, 0.0); }
void run_softcap(const CudaCall& c) {
  const std::int64_t n = out(c, 0).elements(c.sizes);
  c.launch("softcap", {walking_blocks_of(n, walk_threads)}, walk_threads, at(c, out(c, 0)), cap(c), n);
}
void run_add_bias(const CudaCall& c) {
  const std::int64_t n = out(c, 0).elements(c.sizes);
  c.launch(named("add_bias", out(c, 0).dtype), {walking_blocks_of(n, walk_threads)}, walk_threads, at(c, out(c, 0)),
           at(c, in(c, 1)), width(c, out(c, 0)), n);
}
void run_embedding(const CudaCall& c) {
  const Range rows = vocab_rows(c.op, c.places);
  const int H = extent(c, out(c, 0), 1);
  c.launch(named("embedding", in(c, 0).dtype), {extent(c, out(c, 0), 0)}, row_threads(H), at(c, in(c, 0)),
           at(c, in(c, 1)), at(c, out(c, 0)), H, narrow(rows.begin), narrow(rows.end), real(c, Attr::factor, 1.0));
}
void run_embedding_backward(const CudaCall& c) {
  const Range rows = vocab_rows(c.op, c.places);
  const int T = extent(c, in(c, 1), 0), H = extent(c, in(c, 1), 1);
  c.launch("embedding_chain", {blocks_of(T, walk_threads)}, walk_threads, at(c, in(c, 0)), c.scratch, T);
  c.launch(named("embedding_backward", in(c, 1).dtype, out(c, 0).dtype), {T}, row_threads(H), at(c, in(c, 0)),
           c.scratch, at(c, in(c, 1)), at(c, out(c, 0)), T, H, narrow(rows.begin), narrow(rows.end),
           real(c, Attr::factor, 1.0));
}

// --- loss, optimizer, sampling --------------------------------------------------------------------------------------

/// log_prob and sample: of one size, by the vocabulary alone, so that both sum in one order (P5). A decode step has few
/// rows, so a row has many threads.
int vocabulary_threads(const CudaCall& c) {
  return static_cast<int>(std::clamp<std::int64_t>((c.op.integer(Attr::vocab) / 8 + 31) / 32 * 32, 32, 1024));
}
/// All ids, or those of this rank's part of the vocabulary.
Range ids(const CudaCall& c) {
  return c.op.has(Attr::vocab_stride) ? vocab_rows(c.op, c.places) : Range{0, c.op.integer(Attr::vocab)};
}
float temperature(const CudaCall& c) { return static_cast<float>(c.op.real(Attr::temperature)); }

void run_log_prob(const CudaCall& c) {
  c.launch("log_prob", {extent(c, in(c, 0), 0)}, vocabulary_threads(c), at(c, in(c, 0)), at(c, in(c, 1)),
           at(c, out(c, 0)), at(c, out(c, 1)), at(c, out(c, 2)), narrow(c.op.integer(Attr::vocab)),
           extent(c, in(c, 0), 1), 1.0f / temperature(c));
}
void run_log_prob_backward(const CudaCall& c) {
  c.launch(named("log_prob_backward", out(c, 0).dtype), {extent(c, in(c, 0), 0)}, vocabulary_threads(c),
           at(c, in(c, 0)), at(c, in(c, 1)), at(c, in(c, 2)), at(c, in(c, 3)), at(c, out(c, 0)), narrow(ids(c).begin),
           narrow(ids(c).size()), extent(c, in(c, 0), 1), 1.0f / temperature(c), cap(c));
}
void run_vocab_stats(const CudaCall& c) {
  c.launch("vocab_stats", {extent(c, in(c, 0), 0)}, vocabulary_threads(c), at(c, in(c, 0)), at(c, in(c, 1)),
           at(c, out(c, 0)), narrow(ids(c).begin), narrow(ids(c).size()), extent(c, in(c, 0), 1),
           1.0f / temperature(c));
}
void run_vocab_log_prob(const CudaCall& c) {
  const int T = extent(c, in(c, 0), 1);
  c.launch("vocab_log_prob", {blocks_of(T, head_threads)}, head_threads, at(c, in(c, 0)), at(c, in(c, 1)),
           at(c, out(c, 0)), at(c, out(c, 1)), at(c, out(c, 2)), extent(c, in(c, 0), 0), T, 1.0f / temperature(c));
}
void run_token_loss(const CudaCall& c) {
  const bool sft = c.op.integer(Attr::sft) != 0, refers = !sft && c.op.integer(Attr::reference, 0) != 0;
  const CUdeviceptr none = 0;
  const auto real = [&](Attr a) { return static_cast<float>(c.op.real(a)); };
  c.launch("token_loss", {1}, walk_threads, at(c, in(c, 0)), sft ? none : at(c, in(c, 1)),
           refers ? at(c, in(c, 2)) : none, at(c, in(c, 3)), at(c, in(c, 4)), at(c, in(c, 5)), at(c, out(c, 0)),
           at(c, out(c, 1)), extent(c, in(c, 0), 0), real(Attr::clip_low), real(Attr::clip_high), real(Attr::kl_coef));
}
void run_sum_squares(const CudaCall& c) { launch_sums({&static_cast<const OpCall&>(c), 1}, c.launch, c.scratch); }
void run_clip(const CudaCall& c) {
  const auto index = [](Metric m) { return static_cast<int>(m); };
  c.launch("clip_coefficient", {1}, 1, at(c, in(c, 0)), at(c, out(c, 0)), at(c, out(c, 1)), c.op.real(Attr::max_norm),
           index(Metric::loss), index(Metric::grad_norm), index(Metric::clip_coefficient));
}
void run_adamw(const CudaCall& c) { launch_steps({&static_cast<const OpCall&>(c), 1}, c.launch); }
void run_sample(const CudaCall& c) {
  const int S = extent(c, in(c, 0), 1);
  c.launch("sample", {S}, vocabulary_threads(c), at(c, in(c, 0)), at(c, in(c, 1)), at(c, out(c, 0)), at(c, out(c, 1)),
           S, narrow(c.op.integer(Attr::vocab)), extent(c, in(c, 0), 2), temperature(c),
           static_cast<int>(c.op.integer(Attr::top_k)), static_cast<float>(c.op.real(Attr::top_p)));
}

/// Products read rows as they are written, in whatever order a linear asks for: nothing to launch, nor in a graph.
void run_prepack(const CudaCall&) {}

struct Registration {
  OpKind kind;
  OpLaunch launch;
};
constexpr std::array registrations = {Registration{OpKind::zero, run_zero},
                                      Registration{OpKind::cast, run_cast},
                                      Registration{OpKind::copy_boxes, run_copy_boxes},
                                      Registration{OpKind::hash_boxes, run_hash_boxes},
                                      Registration{OpKind::linear, run_linear},
                                      Registration{OpKind::prepack, run_prepack},
                                      Registration{OpKind::fused_linear, run_fused_linear},
                                      Registration{OpKind::linear_dgrad, run_linear_dgrad},
                                      Registration{OpKind::linear_wgrad, run_linear_wgrad},
                                      Registration{OpKind::lora_down, run_lora_down},
                                      Registration{OpKind::lora_up, run_lora_up},
                                      Registration{OpKind::lora_up_dgrad, run_lora_up_dgrad},
                                      Registration{OpKind::lora_up_wgrad, run_lora_up_wgrad},
                                      Registration{OpKind::lora_merge, run_lora_merge},
                                      Registration{OpKind::rms_norm, run_rms_norm},
                                      Registration{OpKind::rms_norm_backward, run_rms_norm_backward},
                                      Registration{OpKind::layer_norm, run_layer_norm},
                                      Registration{OpKind::layer_norm_backward, run_layer_norm_backward},
                                      Registration{OpKind::qk_norm, run_qk_norm},
                                      Registration{OpKind::qk_norm_backward, run_qk_norm_backward},
                                      Registration{OpKind::rope, run_rope},
                                      Registration{OpKind::rope_backward, run_rope_backward},
                                      Registration{OpKind::attention, run_attention},
                                      Registration{OpKind::attention_backward, run_attention_backward},
                                      Registration{OpKind::kv_write, run_kv_write},
                                      Registration{OpKind::paged_attention, run_paged_attention},
                                      Registration{OpKind::attention_sinks, run_attention_sinks},
                                      Registration{OpKind::attention_sinks_backward, run_attention_sinks_backward},
                                      Registration{OpKind::swiglu, run_swiglu},
                                      Registration{OpKind::swiglu_backward, run_swiglu_backward},
                                      Registration{OpKind::clamped_swiglu, run_clamped_swiglu},
                                      Registration{OpKind::clamped_swiglu_backward, run_clamped_swiglu_backward},
                                      Registration{OpKind::geglu, run_geglu},
                                      Registration{OpKind::geglu_backward, run_geglu_backward},
                                      Registration{OpKind::gelu, run_gelu},
                                      Registration{OpKind::gelu_backward, run_gelu_backward},
                                      Registration{OpKind::softcap, run_softcap},
                                      Registration{OpKind::add_bias, run_add_bias},
                                      Registration{OpKind::add, run_add},
                                      Registration{OpKind::gather_rows, run_gather_rows},
                                      Registration{OpKind::embedding, run_embedding},
                                      Registration{OpKind::embedding_backward, run_embedding_backward},
                                      Registration{OpKind::log_prob, run_log_prob},
                                      Registration{OpKind::vocab_stats, run_vocab_stats},
                                      Registration{OpKind::vocab_log_prob, run_vocab_log_prob},
                                      Registration{OpKind::log_prob_backward, run_log_prob_backward},
                                      Registration{OpKind::token_loss, run_token_loss},
                                      Registration{OpKind::sum_squares, run_sum_squares},
                                      Registration{OpKind::clip_coefficient, run_clip},
                                      Registration{OpKind::adamw, run_adamw},
                                      Registration{OpKind::sample, run_sample},
                                      Registration{OpKind::route, run_route},
                                      Registration{OpKind::route_backward, run_route_backward},
                                      Registration{OpKind::expert_counts, run_expert_counts},
                                      Registration{OpKind::router_loss, run_router_loss},
                                      Registration{OpKind::expert_sort, run_expert_sort},
                                      Registration{OpKind::expert_arrivals, run_expert_arrivals},
                                      Registration{OpKind::copy_sort, run_copy_sort},
                                      Registration{OpKind::copy_arrivals, run_copy_arrivals},
                                      Registration{OpKind::dispatch, run_dispatch},
                                      Registration{OpKind::dispatch_backward, run_dispatch_backward},
                                      Registration{OpKind::grouped_linear, run_grouped_linear},
                                      Registration{OpKind::grouped_linear_dgrad, run_grouped_linear_dgrad},
                                      Registration{OpKind::grouped_linear_wgrad, run_grouped_linear_wgrad},
                                      Registration{OpKind::combine, run_combine},
                                      Registration{OpKind::combine_backward, run_combine_backward},
                                      Registration{OpKind::take_kv, run_take_kv},
                                      Registration{OpKind::merge_qkv, run_merge_qkv},
                                      Registration{OpKind::context_attention, run_context_attention},
                                      Registration{OpKind::context_attention_backward, run_context_attention_backward},
                                      Registration{OpKind::latent_norm, run_latent_norm},
                                      Registration{OpKind::latent_norm_backward, run_latent_norm_backward},
                                      Registration{OpKind::latent_heads, run_latent_heads},
                                      Registration{OpKind::latent_heads_backward, run_latent_heads_backward},
                                      Registration{OpKind::latent_write, run_latent_write},
                                      Registration{OpKind::latent_attention, run_latent_attention},
                                      Registration{OpKind::split_heads, run_split_heads},
                                      Registration{OpKind::merge_heads, run_merge_heads}};

/// Which of an op's tensors share the dtype of its activations, as its kernels are written.
struct Alike {
  OpKind kind;
  std::vector<std::size_t> inputs, outputs;
};
const std::vector<Alike>& alike() {
  static const std::vector<Alike> rows = {{OpKind::linear, {0, 1, 2}, {}},
                                          {OpKind::fused_linear, {0, 1, 2, 3, 4}, {1}},
                                          {OpKind::linear_dgrad, {0, 1}, {}},
                                          {OpKind::linear_wgrad, {0, 1}, {}},
                                          {OpKind::lora_down, {0, 1}, {0}},
                                          {OpKind::lora_up, {0, 1}, {0}},
                                          {OpKind::lora_up_dgrad, {0, 1}, {0}},
                                          {OpKind::lora_up_wgrad, {0, 1}, {}},
                                          {OpKind::lora_merge, {1, 2}, {}},
                                          {OpKind::rms_norm, {0, 1, 2}, {0, 2}},
                                          {OpKind::layer_norm, {0, 1, 2, 3}, {0, 2}},
                                          {OpKind::layer_norm_backward, {0, 1, 2}, {0}},
                                          {OpKind::rms_norm_backward, {0, 1, 2}, {0}},
                                          {OpKind::qk_norm, {0, 1, 2}, {0}},
                                          {OpKind::qk_norm_backward, {0, 1, 2, 3}, {0}},
                                          {OpKind::attention, {0}, {0}},
                                          {OpKind::attention_backward, {0, 1, 2}, {0}},
                                          {OpKind::kv_write, {0}, {0}},
                                          {OpKind::paged_attention, {0, 1}, {0}},
                                          {OpKind::attention_sinks, {0}, {0}},
                                          {OpKind::attention_sinks_backward, {0, 1, 3}, {}},
                                          {OpKind::swiglu, {0}, {0}},
                                          {OpKind::swiglu_backward, {0, 1}, {0}},
                                          {OpKind::clamped_swiglu, {0}, {0}},
                                          {OpKind::clamped_swiglu_backward, {0, 1}, {0}},
                                          {OpKind::geglu, {0}, {0}},
                                          {OpKind::geglu_backward, {0, 1}, {0}},
                                          {OpKind::gelu, {0}, {0}},
                                          {OpKind::gelu_backward, {0, 1}, {0}},
                                          {OpKind::add_bias, {0, 1}, {0}},
                                          {OpKind::add, {0}, {0}},
                                          {OpKind::gather_rows, {0}, {0}},
                                          {OpKind::embedding, {0}, {0}},
                                          {OpKind::dispatch, {0}, {0}},
                                          {OpKind::dispatch_backward, {0}, {0}},
                                          {OpKind::grouped_linear, {0, 1, 3}, {0}},
                                          {OpKind::grouped_linear_dgrad, {0, 1}, {0}},
                                          {OpKind::grouped_linear_wgrad, {0, 1}, {}},
                                          {OpKind::combine, {0, 3}, {0}},
                                          {OpKind::combine_backward, {0, 1}, {0}},
                                          {OpKind::take_kv, {0}, {0}},
                                          {OpKind::context_attention, {0, 1}, {}},
                                          {OpKind::context_attention_backward, {0, 1, 2, 3}, {}},
                                          {OpKind::latent_norm, {0, 1}, {0, 1}},
                                          {OpKind::latent_norm_backward, {0, 1, 2, 3}, {0}},
                                          {OpKind::latent_heads, {0, 1, 2}, {0}},
                                          {OpKind::latent_heads_backward, {0}, {0, 1, 2}},
                                          {OpKind::latent_write, {0, 1}, {0}},
                                          {OpKind::latent_attention, {0, 1, 2}, {0}},
                                          {OpKind::split_heads, {0}, {0}},
                                          {OpKind::merge_heads, {0}, {0}}};
  return rows;
}

/// Numbers of a head that a warp holds (kernels/attention_rows.cuh, norm.cu).
constexpr std::int64_t most_of_head = 256;
bool is_attention(OpKind k) {
  return k == OpKind::attention || k == OpKind::attention_backward || k == OpKind::paged_attention ||
         k == OpKind::context_attention || k == OpKind::context_attention_backward || k == OpKind::latent_attention;
}

/// Which outputs are gradients of weights: all from this one on; none of other ops.
std::size_t first_weight_gradient(const Op& op) {
  switch (op.kind) {
    case OpKind::linear_wgrad:
    case OpKind::grouped_linear_wgrad:
    case OpKind::lora_up_wgrad:
    case OpKind::embedding_backward:
    case OpKind::attention_sinks_backward:
      return 0;
    case OpKind::rms_norm_backward:
    case OpKind::layer_norm_backward:
    case OpKind::qk_norm_backward:
    case OpKind::latent_norm_backward:
      return 1;
    default:
      return op.outputs.size();
  }
}
/// "" or why gradients of these dtypes are not made, or not stepped.
std::string why_no_gradients(const Op& op) {
  const bool steps = op.kind == OpKind::adamw || op.kind == OpKind::sum_squares;
  if (steps && std::ranges::any_of(op.outputs, [](const Tensor& t) { return t.dtype != DType::f32; }))
    return "masters, moments and norms are fp32";
  const std::size_t first = first_weight_gradient(op);
  if (first >= op.outputs.size()) return "";
  const DType gradients = op.outputs[first].dtype;
  // Activations come first, or, of the embedding, behind the ids.
  const DType activations = op.inputs[op.kind == OpKind::embedding_backward ? 1 : 0].dtype;
  if (gradients != DType::f32 && gradients != activations)
    return fmt::format("gradients of {} weights are {} or fp32, not {}", name_of(activations), name_of(activations),
                       name_of(gradients));
  for (std::size_t i = first; i < op.outputs.size(); ++i)
    if (op.outputs[i].dtype != gradients) return "its weights' gradients are of several dtypes";
  return "";
}

}  // namespace

void copy_boxes(const Launcher& launch, CUdeviceptr from, DType from_dtype, CUdeviceptr to, DType to_dtype,
                const BoxRun& run, std::int64_t first, std::int64_t count) {
  const std::string kernel = from_dtype == to_dtype
                                 ? fmt::format("move_boxes_{}", size_of(from_dtype))
                                 : fmt::format("copy_boxes_{}_{}", kernel_dtype(from_dtype), kernel_dtype(to_dtype));
  const CUdeviceptr table = run.table + static_cast<CUdeviceptr>(first * OpTables::box_bytes);
  launch(kernel, {walking_blocks_of(run.most_elements, walk_threads), count}, walk_threads, from, to, table);
}

OpLaunch op_launch(OpKind kind) {
  for (const Registration& r : registrations)
    if (r.kind == kind) return r.launch;
  return nullptr;
}

std::int64_t scratch_bytes(const Op& op) {
  if (op.kind == OpKind::attention_backward) return op.inputs[3].capacity_bytes();          // a number per row and head
  if (op.kind == OpKind::context_attention_backward) return op.inputs[4].capacity_bytes();  // likewise
  if (op.kind == OpKind::layer_norm_backward) return 2 * parts_bytes(op.inputs[1], op.inputs[1].shape[1].size);
  if (op.kind == OpKind::rms_norm_backward)
    return parts_bytes(op.inputs[1], op.inputs[1].shape[1].size, rows_of_norm_part);
  if (op.kind == OpKind::qk_norm_backward)
    return 2 * parts_bytes(op.inputs[1], op.integer(Attr::head_dim), rows_of_head_part);
  if (op.kind == OpKind::latent_norm_backward)
    return parts_bytes(op.inputs[0], op.inputs[0].shape[1].size, rows_of_norm_part);
  if (op.kind == OpKind::linear_wgrad && op.outputs.size() > 1)
    return parts_bytes(op.inputs[0], op.inputs[0].shape[1].size);
  if (op.kind == OpKind::embedding_backward) return op.inputs[0].capacity_bytes();  // tokens of one id
  if (op.kind == OpKind::fused_linear) return between_launches(op).end;
  if (op.kind == OpKind::sum_squares) return sums_scratch_bytes();
  return std::max(expert_scratch_bytes(op), latent_scratch_bytes(op));
}

std::string why_unsupported(const Op& op) {
  for (const auto* side : {&op.inputs, &op.outputs})
    for (const Tensor& t : *side)
      if (t.dtype == DType::f16 || t.dtype == DType::f64)
        return fmt::format("the CUDA kernels compute in fp32 and bf16, not {}", name_of(t.dtype));
  if (std::string why = why_no_gradients(op); !why.empty()) return why;
  if (op.kind == OpKind::kv_write && op.outputs[0].dtype != op.inputs[0].dtype)
    return fmt::format(
        "its kernels keep keys and values in the engine's type, {}, not in {}: rollout.kv_cache_dtype auto",
        name_of(op.inputs[0].dtype), name_of(op.outputs[0].dtype));
  for (const Alike& row : alike()) {
    if (row.kind != op.kind) continue;
    const DType dtype = op.inputs[row.inputs.front()].dtype;
    const auto differs = [&](const std::vector<Tensor>& side, const std::vector<std::size_t>& which, std::size_t end) {
      return std::ranges::any_of(which, [&](std::size_t i) { return i < end && side[i].dtype != dtype; });
    };
    if (differs(op.inputs, row.inputs, op.num_operands()) || differs(op.outputs, row.outputs, op.outputs.size()))
      return fmt::format("its tensors are of several dtypes, its kernels of one ({})", name_of(dtype));
  }
  if (op.has(Attr::head_dim))
    if (const std::int64_t widest = std::max(op.integer(Attr::head_dim), op.integer(Attr::value_dim, 0));
        (is_attention(op.kind) || op.kind == OpKind::qk_norm_backward) && widest > most_of_head)
      return fmt::format("its kernels take heads of {} numbers at most, not {}", most_of_head, widest);
  if (op.kind == OpKind::attention_sinks && op.inputs[2].rank < 3 && op.inputs[2].dtype != op.inputs[0].dtype)
    return "its sinks are of another dtype than what was attended";
  if ((is_linear(op.kind) || op.kind == OpKind::linear_dgrad) && op.inputs[0].dtype == DType::f32 &&
      op.outputs[0].dtype != DType::f32)
    return "a product of fp32 operands is fp32";
  if (op.kind == OpKind::context_attention && op.inputs[0].dtype == DType::f32 && op.outputs[0].dtype != DType::f32)
    return "attention of fp32 operands is fp32";
  return why_not_routed(op);
}

}  // namespace hotbunk::cuda
