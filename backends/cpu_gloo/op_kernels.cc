// From an op to its kernel, one function each: long because it has all of them.
#include "backends/cpu_gloo/op_kernels.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include "backends/cpu_gloo/kernels/attention.h"
#include "backends/cpu_gloo/kernels/context_attention.h"
#include "backends/cpu_gloo/kernels/elementwise.h"
#include "backends/cpu_gloo/kernels/embedding.h"
#include "backends/cpu_gloo/kernels/experts.h"
#include "backends/cpu_gloo/kernels/fused_linear.h"
#include "backends/cpu_gloo/kernels/gemm.h"
#include "backends/cpu_gloo/kernels/latent.h"
#include "backends/cpu_gloo/kernels/lora.h"
#include "backends/cpu_gloo/kernels/loss.h"
#include "backends/cpu_gloo/kernels/norm.h"
#include "backends/cpu_gloo/kernels/optimizer.h"
#include "backends/cpu_gloo/kernels/paged_attention.h"
#include "backends/cpu_gloo/kernels/prepack.h"
#include "backends/cpu_gloo/kernels/rope.h"
#include "backends/cpu_gloo/kernels/sampling.h"
#include "backends/cpu_gloo/kernels/sinks.h"
#include "base/check.h"
#include "graph/catalogue.h"
#include "graph/slots.h"
#include "runtime/rope_frequencies.h"

namespace hotbunk {
namespace {

using namespace kernels;
using CallBox = kernels::Box;

// --- operands -------------------------------------------------------------------------------------------------------

std::int64_t extent(const KernelCall& c, const Tensor& t, int dim) {
  return t.shape[static_cast<std::size_t>(dim)].actual(c.sizes);
}

/// All dimensions but the last one count rows.
std::int64_t row_width(const KernelCall& c, const Tensor& t) { return extent(c, t, t.rank - 1); }
std::int64_t num_rows(const KernelCall& c, const Tensor& t) {
  std::int64_t n = 1;
  for (int d = 0; d + 1 < t.rank; ++d) n *= extent(c, t, d);
  return n;
}

const Tensor& in(const KernelCall& c, std::size_t i) { return c.op.inputs[i]; }
const Tensor& out(const KernelCall& c, std::size_t i) { return c.op.outputs[i]; }

template <class T = void>
T* data(const KernelCall& c, const Tensor& t) {
  return reinterpret_cast<T*>(c.addresses.address(t));
}
template <>
void* data<void>(const KernelCall& c, const Tensor& t) {
  return c.addresses.address(t);
}

/// Row-major with the actual extents; the leading dimension is the last extent.
Matrix matrix(const KernelCall& c, const Tensor& t) { return {data(c, t), t.dtype, extent(c, t, t.rank - 1)}; }
ConstVector vec(const KernelCall& c, const Tensor& t) { return {data(c, t), t.dtype}; }

/// The gradient of a vector, as kernels write it: in fp32. Of one that the plan has in bf16, a copy, which is rounded
/// into its place once, at the end.
class VectorGradient {
 public:
  /// No such output (its parameter does not train): none.
  VectorGradient(const KernelCall& c, std::size_t output) : call_(c) {
    if (output >= c.op.outputs.size()) return;
    to_ = vec(c, out(c, output)), elements_ = out(c, output).elements(c.sizes);
    if (to_.dtype == DType::f32) return;
    copy_.resize(static_cast<std::size_t>(elements_));
    if (c.op.integer(Attr::accumulate, 0) != 0) cast(c.context, to_, copy_.data(), DType::f32, elements_);
  }
  ~VectorGradient() {
    if (is_copy()) cast(call_.context, {copy_.data(), DType::f32}, const_cast<void*>(to_.data), to_.dtype, elements_);
  }
  VectorGradient(const VectorGradient&) = delete;
  VectorGradient& operator=(const VectorGradient&) = delete;

  float* data() { return is_copy() ? copy_.data() : static_cast<float*>(const_cast<void*>(to_.data)); }

 private:
  bool is_copy() const { return to_.data != nullptr && to_.dtype != DType::f32; }

  const KernelCall& call_;
  ConstVector to_;
  std::int64_t elements_ = 0;
  std::vector<float> copy_;
};

Write write_mode(const KernelCall& c, Attr a = Attr::accumulate) {
  return c.op.integer(a, 0) != 0 ? Write::accumulate : Write::overwrite;
}

HeadShape heads(const KernelCall& c) {
  return {c.op.integer(Attr::heads), c.op.integer(Attr::kv_heads), c.op.integer(Attr::head_dim),
          c.op.integer(Attr::value_dim, 0)};
}
LatentShape latent_shape(const KernelCall& c) {
  const std::int64_t turned = c.op.integer(Attr::rope_dim);
  return {c.op.integer(Attr::heads), c.op.integer(Attr::head_dim) - turned, turned, c.op.integer(Attr::value_dim)};
}
Scores scores(const KernelCall& c) {
  const double usual = 1.0f / std::sqrt(static_cast<float>(c.op.integer(Attr::head_dim)));
  return {static_cast<float>(c.op.real(Attr::scale, usual)), static_cast<float>(c.op.real(Attr::softcap, 0.0)),
          c.op.integer(Attr::window, 0)};
}
float offset(const KernelCall& c) { return static_cast<float>(c.op.real(Attr::offset, 0.0)); }
float factor(const KernelCall& c) { return static_cast<float>(c.op.real(Attr::factor, 1.0)); }
float eps(const KernelCall& c) { return static_cast<float>(c.op.real(Attr::eps)); }

/// The offsets of this run's sequences: the buffer's capacity may be larger.
std::span<const std::int32_t> sequences(const KernelCall& c, const Tensor& t) {
  return {data<const std::int32_t>(c, t), static_cast<std::size_t>(c.sizes.seqs) + 1};
}

// --- data -----------------------------------------------------------------------------------------------------------

void run_zero(const KernelCall& c) { zero(c.context, data(c, out(c, 0)), out(c, 0).bytes(c.sizes)); }
void run_cast(const KernelCall& c) {
  cast(c.context, vec(c, in(c, 0)), data(c, out(c, 0)), out(c, 0).dtype, in(c, 0).elements(c.sizes));
}

/// Boxes with the same input and output go to the kernel together, which shares them among its threads.
template <class F>
void for_box_runs(const KernelCall& c, F&& run) {
  const std::vector<hotbunk::Box> all = boxes_of(c.op, c.places);
  std::vector<CallBox> boxes;
  for (std::size_t i = 0; i < all.size();) {
    boxes.clear();
    const auto& first = all[i];
    for (; i < all.size() && all[i].input == first.input && all[i].output == first.output; ++i) {
      const auto& b = all[i];
      boxes.push_back({b.src_offset, b.src_pitch, b.dst_offset, b.dst_pitch, b.rows, b.cols});
    }
    run(static_cast<std::size_t>(first.input), static_cast<std::size_t>(first.output), boxes);
  }
}

void run_copy_boxes(const KernelCall& c) {
  for_box_runs(c, [&](std::size_t i, std::size_t o, const std::vector<CallBox>& boxes) {
    copy_boxes(c.context, vec(c, in(c, i)), data(c, out(c, o)), out(c, o).dtype, boxes);
  });
}

void run_hash_boxes(const KernelCall& c) {
  const auto as = static_cast<DType>(c.op.integer(Attr::as_dtype));
  auto& sum = *data<std::uint64_t>(c, out(c, 0));
  for_box_runs(c, [&](std::size_t i, std::size_t, const std::vector<CallBox>& boxes) {
    sum += hash_boxes(c.context, vec(c, in(c, i)), as, boxes);
  });
}

// --- linear ---------------------------------------------------------------------------------------------------------

void run_linear(const KernelCall& c) {
  const ConstVector bias = c.op.num_operands() > 2 ? vec(c, in(c, 2)) : ConstVector{};
  linear_forward(c.context, matrix(c, in(c, 0)), matrix(c, in(c, 1)), bias, matrix(c, out(c, 0)),
                 extent(c, in(c, 0), 0), extent(c, in(c, 1), 0), extent(c, in(c, 1), 1), Write::overwrite,
                 c.op.has(Attr::prepacked) ? WeightOrder::prepacked : WeightOrder::rows);
}
void run_fused_linear(const KernelCall& c) {
  const ProductSides sides = product_sides(c.op);
  const auto input = [&](int i) -> const Tensor& { return in(c, static_cast<std::size_t>(i)); };
  BesideProduct beside{.swiglu = sides.gate};
  if (sides.norm >= 0) beside.norm = vec(c, input(sides.norm)), beside.eps = eps(c), beside.offset = offset(c);
  if (sides.delta >= 0) beside.delta = matrix(c, input(sides.delta)), beside.sum = matrix(c, out(c, 1));
  if (sides.residual >= 0) beside.residual = matrix(c, input(sides.residual));
  fused_linear_forward(c.context, matrix(c, in(c, 0)), matrix(c, in(c, 1)),
                       sides.bias >= 0 ? vec(c, input(sides.bias)) : ConstVector{}, beside, matrix(c, out(c, 0)),
                       extent(c, in(c, 0), 0), extent(c, in(c, 1), 0), extent(c, in(c, 1), 1),
                       c.op.has(Attr::prepacked) ? WeightOrder::prepacked : WeightOrder::rows);
}
void run_prepack(const KernelCall& c) {
  const Tensor& w = out(c, 0);
  kernels::prepack(c.context, data<void>(c, w), w.dtype, extent(c, w, 0), extent(c, w, 1));
}
void run_linear_dgrad(const KernelCall& c) {
  linear_dgrad(c.context, matrix(c, in(c, 0)), matrix(c, in(c, 1)), matrix(c, out(c, 0)), extent(c, in(c, 0), 0),
               extent(c, in(c, 1), 0), extent(c, in(c, 1), 1), write_mode(c));
}
void run_linear_wgrad(const KernelCall& c) {
  const std::int64_t T = extent(c, in(c, 0), 0), N = extent(c, in(c, 0), 1);
  linear_wgrad(c.context, matrix(c, in(c, 0)), matrix(c, in(c, 1)), matrix(c, out(c, 0)), T, N, extent(c, in(c, 1), 1),
               write_mode(c));
  if (c.op.outputs.size() > 1)
    bias_grad(c.context, matrix(c, in(c, 0)), VectorGradient(c, 1).data(), T, N, write_mode(c));
}

// --- norms, rope, attention -----------------------------------------------------------------------------------------

void run_rms_norm(const KernelCall& c) {
  const std::int64_t T = extent(c, in(c, 0), 0), H = extent(c, in(c, 0), 1);
  const Matrix x = matrix(c, in(c, 0));
  if (c.op.num_operands() < 3)
    rmsnorm_forward(c.context, x, vec(c, in(c, 1)), matrix(c, out(c, 0)), data<float>(c, out(c, 1)), T, H, eps(c),
                    offset(c));
  else
    add_rmsnorm_forward(c.context, x, matrix(c, in(c, 2)), vec(c, in(c, 1)), matrix(c, out(c, 2)), matrix(c, out(c, 0)),
                        data<float>(c, out(c, 1)), T, H, eps(c), offset(c));
}
void run_rms_norm_backward(const KernelCall& c) {
  rmsnorm_backward(c.context, matrix(c, in(c, 1)), vec(c, in(c, 2)), data<float>(c, in(c, 3)), matrix(c, in(c, 0)),
                   matrix(c, out(c, 0)), write_mode(c, Attr::residual), VectorGradient(c, 1).data(), write_mode(c),
                   extent(c, in(c, 1), 0), extent(c, in(c, 1), 1), offset(c));
}
void run_layer_norm(const KernelCall& c) {
  const std::int64_t T = extent(c, in(c, 0), 0), H = extent(c, in(c, 0), 1);
  Matrix x = matrix(c, in(c, 0));
  if (c.op.num_operands() > 3) {
    const Matrix sum = matrix(c, out(c, 2));
    copy(c.context, x.data, sum.data, in(c, 0).bytes(c.sizes));
    add(c.context, sum, matrix(c, in(c, 3)), T, H);
    x = sum;
  }
  layernorm_forward(c.context, x, vec(c, in(c, 1)), vec(c, in(c, 2)), matrix(c, out(c, 0)), data<float>(c, out(c, 1)),
                    T, H, eps(c));
}
void run_layer_norm_backward(const KernelCall& c) {
  layernorm_backward(c.context, matrix(c, in(c, 1)), vec(c, in(c, 2)), data<float>(c, in(c, 3)), matrix(c, in(c, 0)),
                     matrix(c, out(c, 0)), write_mode(c, Attr::residual), VectorGradient(c, 1).data(),
                     VectorGradient(c, 2).data(), write_mode(c), extent(c, in(c, 1), 0), extent(c, in(c, 1), 1));
}
void run_qk_norm(const KernelCall& c) {
  qk_norm_forward(c.context, matrix(c, in(c, 0)), vec(c, in(c, 1)), vec(c, in(c, 2)), matrix(c, out(c, 0)),
                  data<float>(c, out(c, 1)), extent(c, in(c, 0), 0), heads(c), eps(c), offset(c));
}
void run_qk_norm_backward(const KernelCall& c) {
  qk_norm_backward(c.context, matrix(c, in(c, 1)), vec(c, in(c, 2)), vec(c, in(c, 3)), data<float>(c, in(c, 4)),
                   matrix(c, in(c, 0)), matrix(c, out(c, 0)), VectorGradient(c, 1).data(), VectorGradient(c, 2).data(),
                   write_mode(c), extent(c, in(c, 1), 0), heads(c), offset(c));
}

void run_rope_in(const KernelCall& c, RopeDirection direction) {
  // d/2 numbers: cheaper to form again than to keep per op.
  const std::vector<float> inv_freq = rope_frequencies(c.op);
  if (c.op.has(Attr::rope_dim))
    return rope_neighbours(c.context, matrix(c, out(c, 0)), data<const std::int32_t>(c, in(c, 1)), inv_freq.data(),
                           extent(c, out(c, 0), 0), c.op.integer(Attr::heads), c.op.integer(Attr::head_dim),
                           c.op.integer(Attr::rope_dim), direction,
                           static_cast<float>(c.op.real(Attr::rope_amplitude, 1.0)));
  rope(c.context, matrix(c, out(c, 0)), data<const std::int32_t>(c, in(c, 1)), inv_freq.data(), extent(c, out(c, 0), 0),
       heads(c), direction, static_cast<float>(c.op.real(Attr::rope_amplitude, 1.0)),
       c.op.integer(Attr::rope_first, 0));
}
void run_rope(const KernelCall& c) { run_rope_in(c, RopeDirection::forward); }
void run_rope_backward(const KernelCall& c) { run_rope_in(c, RopeDirection::backward); }

void run_attention(const KernelCall& c) {
  attention_forward(c.context, matrix(c, in(c, 0)), heads(c), sequences(c, in(c, 1)), scores(c), matrix(c, out(c, 0)),
                    data<float>(c, out(c, 1)));
}
void run_attention_backward(const KernelCall& c) {
  kernels::attention_backward(c.context, matrix(c, in(c, 1)), matrix(c, in(c, 2)), matrix(c, in(c, 0)),
                              data<float>(c, in(c, 3)), heads(c), sequences(c, in(c, 4)), scores(c),
                              matrix(c, out(c, 0)));
}

/// Those of this rank's heads.
ConstVector sinks(const KernelCall& c, const Tensor& all) {
  const ConstVector whole = vec(c, all);
  return {static_cast<const std::byte*>(whole.data) + own_sinks(c.op, c.places).begin * size_of(whole.dtype),
          whole.dtype};
}
void run_attention_sinks(const KernelCall& c) {
  const std::int64_t heads = extent(c, out(c, 1), 1);
  if (in(c, 2).rank == 3)
    return attention_part(c.context, matrix(c, out(c, 0)), data<float>(c, out(c, 1)), data<const float>(c, in(c, 2)),
                          extent(c, in(c, 2), 0), extent(c, out(c, 0), 0), heads, extent(c, out(c, 0), 1) / heads);
  attention_sinks(c.context, matrix(c, out(c, 0)), data<float>(c, out(c, 1)), sinks(c, in(c, 2)),
                  extent(c, out(c, 0), 0), heads, extent(c, out(c, 0), 1) / heads);
}
void run_attention_sinks_backward(const KernelCall& c) {
  const std::int64_t heads = extent(c, in(c, 2), 1), all = extent(c, out(c, 0), 0);
  VectorGradient gradient(c, 0);
  float* const d_sinks = gradient.data();
  if (write_mode(c) == Write::overwrite && all > heads) std::fill_n(d_sinks, all, 0.0f);
  kernels::attention_sinks_backward(c.context, matrix(c, in(c, 0)), matrix(c, in(c, 1)), data<const float>(c, in(c, 2)),
                                    sinks(c, in(c, 3)), d_sinks + own_sinks(c.op, c.places).begin,
                                    extent(c, in(c, 0), 0), heads, extent(c, in(c, 0), 1) / heads, write_mode(c));
}

ContextShare context_share(const KernelCall& c, const Tensor& kv) {
  const ContextParts parts = context_parts(c.op, c.places);
  return {parts.ranks, parts.place, parts.source, parts.all, extent(c, kv, 1)};
}
void run_context_attention(const KernelCall& c) {
  context_attention_forward(c.context, matrix(c, in(c, 0)), matrix(c, in(c, 1)), heads(c), sequences(c, in(c, 2)),
                            context_share(c, in(c, 1)), scores(c), matrix(c, out(c, 0)), data<float>(c, out(c, 1)),
                            write_mode(c));
}
void run_context_attention_backward(const KernelCall& c) {
  kernels::context_attention_backward(c.context, matrix(c, in(c, 1)), matrix(c, in(c, 2)), matrix(c, in(c, 3)),
                                      matrix(c, in(c, 0)), data<float>(c, in(c, 4)), heads(c), sequences(c, in(c, 5)),
                                      context_share(c, in(c, 2)), scores(c), matrix(c, out(c, 0)), write_mode(c),
                                      matrix(c, out(c, 1)));
}

KvPool pool(const KernelCall& c, const Tensor& t) {
  return {data(c, t), t.dtype, t.shape[0].size, c.op.integer(Attr::block_tokens)};
}
/// What this rank holds of the sequences that the ranks of op.group share.
KeyShare key_share(const KernelCall& c) {
  if (!c.op.has(Attr::ranks)) return {};
  return {c.op.integer(Attr::ranks), c.places.at(static_cast<std::size_t>(c.op.group))};
}
/// use(slots of this rank's pool).
template <class Use>
void with_slots(const KernelCall& c, const Tensor& fed, std::int64_t T, Use&& use) {
  const auto* slots = data<const std::int32_t>(c, fed);
  const KeyShare share = key_share(c);
  if (share.ranks == 1) return use(slots);
  use(held_slots(slots, T, share).data());
}
void run_kv_write(const KernelCall& c) {
  const std::int64_t T = extent(c, in(c, 0), 0);
  with_slots(c, in(c, 1), T, [&](const std::int32_t* slots) {
    kv_write(c.context, matrix(c, in(c, 0)), slots, T, heads(c), pool(c, out(c, 0)));
  });
}
/// Of tensors `at` and the next: tables and lengths.
PagedContext paged_context(const KernelCall& c, std::size_t at) {
  return {data<const std::int32_t>(c, in(c, at)), extent(c, in(c, at), 1), data<const std::int32_t>(c, in(c, at + 1)),
          key_share(c)};
}
/// Whether each sequence has one query, in its row. A step that several groups take has room for what the one with most
/// has, and the other groups' tokens are no pattern of its own.
bool one_each(const KernelCall& c, std::int64_t T, const Tensor& cu_seqlens) {
  if (c.sizes.tokens == c.sizes.seqs) return true;  // then nobody need have fed the offsets
  if (T != c.sizes.seqs) return false;
  const auto cu = sequences(c, cu_seqlens);
  for (std::size_t s = 0; s < cu.size(); ++s)
    if (cu[s] != static_cast<std::int32_t>(s)) return false;
  return true;
}
/// Rows behind the last sequence are nobody's.
void clear_idle_rows(const KernelCall& c, const Tensor& cu_seqlens, float* lse) {
  const Tensor& o = out(c, 0);
  const std::int64_t T = extent(c, o, 0), width = extent(c, o, 1), used = sequences(c, cu_seqlens).back();
  if (used >= T) return;
  std::memset(static_cast<char*>(data(c, o)) + used * width * size_of(o.dtype), 0,
              static_cast<std::size_t>((T - used) * width * size_of(o.dtype)));
  if (lse == nullptr) return;
  const std::int64_t heads = extent(c, out(c, 1), 1);
  std::fill_n(lse + used * heads, (T - used) * heads, -std::numeric_limits<float>::infinity());
}
void run_paged_attention(const KernelCall& c) {
  const PagedContext context = paged_context(c, 3);
  // The prefill kernel gives the same bits per token as the decode kernel; one query per sequence is the latter's case.
  float* const lse = c.op.outputs.size() > 1 ? data<float>(c, out(c, 1)) : nullptr;
  if (one_each(c, extent(c, in(c, 0), 0), in(c, 2)))
    paged_decode_attention(c.context, matrix(c, in(c, 0)), heads(c), pool(c, in(c, 1)), context, c.sizes.seqs,
                           scores(c), matrix(c, out(c, 0)), lse);
  else
    paged_prefill_attention(c.context, matrix(c, in(c, 0)), heads(c), pool(c, in(c, 1)), context,
                            sequences(c, in(c, 2)), scores(c), matrix(c, out(c, 0)), lse);
  clear_idle_rows(c, in(c, 2), lse);
}

// --- latent attention -----------------------------------------------------------------------------------------------

/// Columns [begin, …) of a matrix, whose rows stay as far apart.
Matrix columns_from(Matrix m, std::int64_t begin) {
  m.data = static_cast<char*>(m.data) + begin * size_of(m.dtype);
  return m;
}
/// The part of a key that all heads share turns as a head of its own.
void turn_shared(const KernelCall& c, Matrix x, const Tensor& positions, std::int64_t T, RopeDirection direction) {
  const std::int64_t turned = c.op.integer(Attr::rope_dim);
  rope_neighbours(c.context, x, data<const std::int32_t>(c, positions), rope_frequencies(c.op).data(), T, 1, turned,
                  turned, direction, static_cast<float>(c.op.real(Attr::rope_amplitude, 1.0)));
}
void run_latent_norm(const KernelCall& c) {
  const std::int64_t T = extent(c, in(c, 0), 0), r = extent(c, out(c, 0), 1), turned = extent(c, out(c, 1), 1);
  rmsnorm_forward(c.context, matrix(c, in(c, 0)), vec(c, in(c, 1)), matrix(c, out(c, 0)), data<float>(c, out(c, 2)), T,
                  r, eps(c), 0.0f);
  const CallBox box{r, r + turned, 0, turned, T, turned};
  copy_boxes(c.context, vec(c, in(c, 0)), data(c, out(c, 1)), out(c, 1).dtype, {&box, 1});
  turn_shared(c, matrix(c, out(c, 1)), in(c, 2), T, RopeDirection::forward);
}
void run_latent_norm_backward(const KernelCall& c) {
  const std::int64_t T = extent(c, in(c, 0), 0), r = extent(c, in(c, 0), 1), turned = extent(c, in(c, 1), 1);
  const Matrix dx = matrix(c, out(c, 0));
  rmsnorm_backward(c.context, matrix(c, in(c, 2)), vec(c, in(c, 3)), data<float>(c, in(c, 4)), matrix(c, in(c, 0)), dx,
                   Write::overwrite, VectorGradient(c, 1).data(), write_mode(c), T, r, 0.0f);
  const CallBox box{0, turned, r, r + turned, T, turned};
  copy_boxes(c.context, vec(c, in(c, 1)), dx.data, dx.dtype, {&box, 1});
  turn_shared(c, columns_from(dx, r), in(c, 5), T, RopeDirection::backward);
}
void run_latent_heads(const KernelCall& c) {
  latent_heads(c.context, matrix(c, in(c, 0)), matrix(c, in(c, 1)), matrix(c, in(c, 2)), latent_shape(c),
               matrix(c, out(c, 0)), extent(c, out(c, 0), 0));
}
void run_latent_heads_backward(const KernelCall& c) {
  kernels::latent_heads_backward(c.context, matrix(c, in(c, 0)), latent_shape(c), matrix(c, out(c, 0)),
                                 matrix(c, out(c, 1)), matrix(c, out(c, 2)), extent(c, in(c, 0), 0));
}
void run_latent_write(const KernelCall& c) {
  const std::int64_t T = extent(c, in(c, 0), 0);
  with_slots(c, in(c, 2), T, [&](const std::int32_t* slots) {
    latent_write(c.context, matrix(c, in(c, 0)), extent(c, in(c, 0), 1), matrix(c, in(c, 1)), extent(c, in(c, 1), 1),
                 slots, T, pool(c, out(c, 0)));
  });
}
void run_latent_attention(const KernelCall& c) {
  const PagedContext context = paged_context(c, 4);
  // A decode step has one query for each sequence, whose offsets nobody fed.
  std::vector<std::int32_t> each;
  const bool one = one_each(c, extent(c, in(c, 0), 0), in(c, 3));
  for (std::int64_t s = 0; one && s <= c.sizes.seqs; ++s) each.push_back(static_cast<std::int32_t>(s));
  latent_paged_attention(c.context, matrix(c, in(c, 0)), latent_shape(c), pool(c, in(c, 1)), extent(c, in(c, 2), 1),
                         matrix(c, in(c, 2)), context, each.empty() ? sequences(c, in(c, 3)) : each, scores(c),
                         matrix(c, out(c, 0)), c.op.outputs.size() > 1 ? data<float>(c, out(c, 1)) : nullptr);
  if (!one) clear_idle_rows(c, in(c, 3), c.op.outputs.size() > 1 ? data<float>(c, out(c, 1)) : nullptr);
}

// --- elementwise, embedding -----------------------------------------------------------------------------------------

void run_swiglu(const KernelCall& c) {
  const Tensor& act = out(c, 0);
  swiglu_forward(c.context, matrix(c, in(c, 0)), matrix(c, act), num_rows(c, act), row_width(c, act));
}
void run_swiglu_backward(const KernelCall& c) {
  const Tensor& d_act = in(c, 0);
  kernels::swiglu_backward(c.context, matrix(c, d_act), matrix(c, in(c, 1)), matrix(c, out(c, 0)), num_rows(c, d_act),
                           row_width(c, d_act));
}
ClampedGate clamped(const KernelCall& c) {
  return {static_cast<float>(c.op.real(Attr::limit)), static_cast<float>(c.op.real(Attr::alpha))};
}
void run_clamped_swiglu(const KernelCall& c) {
  const Tensor& act = out(c, 0);
  clamped_swiglu_forward(c.context, matrix(c, in(c, 0)), matrix(c, act), num_rows(c, act), row_width(c, act),
                         clamped(c));
}
void run_clamped_swiglu_backward(const KernelCall& c) {
  const Tensor& d_act = in(c, 0);
  kernels::clamped_swiglu_backward(c.context, matrix(c, d_act), matrix(c, in(c, 1)), matrix(c, out(c, 0)),
                                   num_rows(c, d_act), row_width(c, d_act), clamped(c));
}
void run_geglu(const KernelCall& c) {
  const Tensor& act = out(c, 0);
  geglu_forward(c.context, matrix(c, in(c, 0)), matrix(c, act), num_rows(c, act), row_width(c, act));
}
void run_geglu_backward(const KernelCall& c) {
  const Tensor& d_act = in(c, 0);
  kernels::geglu_backward(c.context, matrix(c, d_act), matrix(c, in(c, 1)), matrix(c, out(c, 0)), num_rows(c, d_act),
                          row_width(c, d_act));
}
void run_gelu(const KernelCall& c) {
  const Tensor& y = out(c, 0);
  gelu_forward(c.context, matrix(c, in(c, 0)), matrix(c, y), num_rows(c, y), row_width(c, y));
}
void run_gelu_backward(const KernelCall& c) {
  const Tensor& dx = out(c, 0);
  kernels::gelu_backward(c.context, matrix(c, in(c, 0)), matrix(c, in(c, 1)), matrix(c, dx), num_rows(c, dx),
                         row_width(c, dx));
}
float cap(const KernelCall& c) { return static_cast<float>(c.op.real(Attr::softcap, 0.0)); }
void run_softcap(const KernelCall& c) {
  kernels::softcap(c.context, data<float>(c, out(c, 0)), out(c, 0).elements(c.sizes), cap(c));
}
void run_add_bias(const KernelCall& c) {
  add_bias(c.context, matrix(c, out(c, 0)), vec(c, in(c, 1)), extent(c, out(c, 0), 0), extent(c, out(c, 0), 1));
}
void run_add(const KernelCall& c) {
  const std::int64_t n = out(c, 0).elements(c.sizes);
  const Matrix z{data(c, out(c, 0)), out(c, 0).dtype, n};
  if (!(in(c, 0) == out(c, 0))) copy(c.context, data(c, in(c, 0)), z.data, out(c, 0).bytes(c.sizes));
  add(c.context, z, {data(c, in(c, 1)), in(c, 1).dtype, n}, 1, n);
}
void run_gather_rows(const KernelCall& c) {
  const auto* rows = data<const std::int32_t>(c, in(c, 1));
  const std::int64_t width = extent(c, in(c, 0), 1) * size_of(in(c, 0).dtype);
  const auto* from = data<const std::byte>(c, in(c, 0));
  auto* to = data<std::byte>(c, out(c, 0));
  for (std::int64_t s = 0; s < extent(c, out(c, 0), 0); ++s)
    std::memcpy(to + s * width, from + rows[s] * width, static_cast<std::size_t>(width));
}
VocabRange vocab(const KernelCall& c) {
  const Range rows = vocab_rows(c.op, c.places);
  return {rows.begin, rows.end};
}
void run_embedding(const KernelCall& c) {
  embedding_forward(c.context, data<const std::int32_t>(c, in(c, 1)), matrix(c, in(c, 0)), vocab(c),
                    matrix(c, out(c, 0)), extent(c, out(c, 0), 0), extent(c, out(c, 0), 1), factor(c));
}
void run_embedding_backward(const KernelCall& c) {
  kernels::embedding_backward(c.context, data<const std::int32_t>(c, in(c, 0)), matrix(c, in(c, 1)), vocab(c),
                              matrix(c, out(c, 0)), extent(c, in(c, 1), 0), extent(c, in(c, 1), 1), factor(c));
}

// --- experts --------------------------------------------------------------------------------------------------------

Routing routing(const KernelCall& c, const Tensor& logits, const Tensor& chosen) {
  return {extent(c, logits, 0),
          extent(c, logits, 1),
          extent(c, chosen, 1),
          c.op.integer(Attr::renormalise, 0) != 0,
          c.op.integer(Attr::sigmoid, 0) != 0,
          c.op.integer(Attr::groups, 1),
          c.op.integer(Attr::taken_groups, 1),
          static_cast<float>(c.op.real(Attr::factor, 1.0))};
}
void run_route(const KernelCall& c) {
  Routing r = routing(c, in(c, 0), out(c, 1));
  if (c.op.num_operands() > 1) r.bias = vec(c, in(c, 1));
  route(c.context, r, data<const float>(c, in(c, 0)), data<float>(c, out(c, 0)), data<std::int32_t>(c, out(c, 1)));
}
void run_route_backward(const KernelCall& c) {
  route_backward(c.context, routing(c, in(c, 1), in(c, 2)), data<const float>(c, in(c, 0)),
                 data<const float>(c, in(c, 1)), data<const std::int32_t>(c, in(c, 2)), matrix(c, out(c, 0)));
}
std::span<std::int32_t> numbers(const KernelCall& c, const Tensor& t) {
  return {data<std::int32_t>(c, t), static_cast<std::size_t>(t.elements(c.sizes))};
}
void run_expert_counts(const KernelCall& c) {
  const Tensor& counts = out(c, 0);
  expert_counts(numbers(c, in(c, 0)), numbers(c, in(c, 1)), extent(c, in(c, 0), 1), extent(c, counts, 1),
                {data<float>(c, counts), static_cast<std::size_t>(counts.elements(c.sizes))});
}
void run_router_loss(const KernelCall& c) {
  const RouterLoss loss{extent(c, in(c, 1), 0),   extent(c, in(c, 1), 1),    c.op.integer(Attr::top_k, 1),
                        c.op.real(Attr::factor),  c.op.real(Attr::z_factor), c.op.integer(Attr::sigmoid, 0) != 0,
                        c.op.integer(Attr::tp, 1)};
  const auto found = static_cast<float>(
      router_loss(c.context, loss, data<const float>(c, in(c, 1)), data<const float>(c, in(c, 2)),
                  data<const std::int32_t>(c, in(c, 3)), data<const float>(c, in(c, 4)), matrix(c, out(c, 0))));
  auto* metrics = data<float>(c, out(c, 1));
  for (const Metric m : {Metric::loss, Metric::router_loss}) metrics[static_cast<std::size_t>(m)] += found;
}
void run_expert_sort(const KernelCall& c) {
  const OwnPart own = own_experts(c.op, c.places);
  expert_sort({data<const std::int32_t>(c, in(c, 0)), static_cast<std::size_t>(in(c, 0).elements(c.sizes))},
              OwnExperts{own.first, own.count, own.count * c.op.integer(Attr::tp, 1), own.groups,
                         extent(c, out(c, 0), 1) / extent(c, in(c, 0), 1)},
              data<std::int32_t>(c, out(c, 0)), data<std::int32_t>(c, out(c, 1)));
}
void run_expert_arrivals(const KernelCall& c) {
  const Tensor& sent = in(c, 0);
  const std::int64_t count = expert_arrivals(
      {data<const std::int32_t>(c, sent), static_cast<std::size_t>(sent.elements(c.sizes))}, extent(c, sent, 0),
      c.places.at(static_cast<std::size_t>(c.op.group)), data<std::int32_t>(c, out(c, 0)));
  *data<std::int64_t>(c, out(c, 1)) = count;
}
void run_copy_sort(const KernelCall& c) {
  *data<std::int64_t>(c, out(c, 4)) =
      copy_sort(numbers(c, in(c, 0)), extent(c, in(c, 0), 1), numbers(c, in(c, 1)), extent(c, out(c, 3), 0) - 1,
                {numbers(c, out(c, 0)), data<std::int32_t>(c, out(c, 1)), data<std::int32_t>(c, out(c, 2)),
                 data<std::int32_t>(c, out(c, 3))});
}
void run_copy_arrivals(const KernelCall& c) {
  *data<std::int64_t>(c, out(c, 2)) =
      copy_arrivals(numbers(c, in(c, 0)), extent(c, in(c, 0), 0), c.places.at(static_cast<std::size_t>(c.op.group)),
                    numbers(c, in(c, 2)), data<const std::int32_t>(c, in(c, 1)), data<std::int32_t>(c, out(c, 0)),
                    numbers(c, out(c, 1)), extent(c, out(c, 1), 1));
}
void run_dispatch(const KernelCall& c) {
  const Tensor& choices = in(c, 1);
  dispatch(c.context, matrix(c, in(c, 0)), data<const std::int32_t>(c, choices), matrix(c, out(c, 0)),
           extent(c, choices, 0), extent(c, choices, 1), row_width(c, in(c, 0)));
}
void run_dispatch_backward(const KernelCall& c) {
  const Tensor& choices = in(c, 1);
  dispatch_backward(c.context, matrix(c, in(c, 0)), data<const std::int32_t>(c, choices), matrix(c, out(c, 0)),
                    extent(c, choices, 0), extent(c, choices, 1), row_width(c, in(c, 0)), write_mode(c));
}
void run_combine(const KernelCall& c) {
  const Tensor& choices = in(c, 1);
  const ConstMatrix base = c.op.num_operands() > 3 ? ConstMatrix(matrix(c, in(c, 3))) : ConstMatrix{};
  combine(c.context, matrix(c, in(c, 0)), data<const std::int32_t>(c, choices), data<const float>(c, in(c, 2)),
          extent(c, choices, 1) / extent(c, in(c, 2), 1), base, matrix(c, out(c, 0)), extent(c, choices, 0),
          extent(c, choices, 1), row_width(c, in(c, 0)));
}
void run_combine_backward(const KernelCall& c) {
  const Tensor& choices = in(c, 2);
  combine_backward(c.context, matrix(c, in(c, 0)), matrix(c, in(c, 1)), data<const std::int32_t>(c, choices),
                   data<const float>(c, in(c, 3)), extent(c, choices, 1) / extent(c, in(c, 3), 1), matrix(c, out(c, 0)),
                   data<float>(c, out(c, 1)), extent(c, choices, 0), extent(c, choices, 1), row_width(c, in(c, 0)));
}
/// Where the segments of an op's rows begin; of the rows that came in a round, those of the segments that it has.
std::vector<std::int32_t> segment_offsets(const KernelCall& c) {
  const ExpertMatrices m = expert_matrices(c.op);
  const auto* const all = data<const std::int32_t>(c, in(c, 2));
  std::vector<std::int32_t> out(all, all + m.segments + 1);
  const Dim& rows = in(c, 0).shape[0];
  if (in(c, 0).rank > 2 || (rows.begin == 0 && rows.size >= out.back())) return out;
  for (std::int32_t& o : out) o = static_cast<std::int32_t>(std::clamp<std::int64_t>(o - rows.begin, 0, rows.size));
  return out;
}
Experts experts(const KernelCall& c, std::span<const std::int32_t> offsets) {
  const ExpertMatrices m = expert_matrices(c.op);
  return {offsets, m.experts, m.n, m.k, num_rows(c, in(c, 0))};
}
void run_grouped_linear(const KernelCall& c) {
  ExpertBias bias;
  if (c.op.num_operands() > 3) {
    const Range columns = bias_columns(c.op, c.places);
    bias = {.values = vec(c, in(c, 3)), .first = columns.begin, .count = columns.size()};
  }
  grouped_linear(c.context, experts(c, segment_offsets(c)), matrix(c, in(c, 0)), matrix(c, in(c, 1)),
                 matrix(c, out(c, 0)), bias);
}
void run_grouped_linear_dgrad(const KernelCall& c) {
  grouped_linear_dgrad(c.context, experts(c, segment_offsets(c)), matrix(c, in(c, 0)), matrix(c, in(c, 1)),
                       matrix(c, out(c, 0)), write_mode(c));
}
void run_grouped_linear_wgrad(const KernelCall& c) {
  VectorGradient of_bias(c, 1);
  ExpertBias bias;
  if (c.op.outputs.size() > 1) {
    const Range columns = bias_columns(c.op, c.places);
    bias = {.gradient = of_bias.data(), .first = columns.begin, .count = columns.size()};
  }
  grouped_linear_wgrad(c.context, experts(c, segment_offsets(c)), matrix(c, in(c, 0)), matrix(c, in(c, 1)),
                       matrix(c, out(c, 0)), write_mode(c), bias);
}

// --- adapters -------------------------------------------------------------------------------------------------------

std::int64_t column(const KernelCall& c) { return c.op.integer(Attr::column); }

void run_lora_down(const KernelCall& c) {
  if (adapts_experts(c.op))
    return lora_down(c.context, experts(c, segment_offsets(c)), matrix(c, in(c, 0)), matrix(c, in(c, 1)), factor(c),
                     matrix(c, out(c, 0)));
  lora_down(c.context, matrix(c, in(c, 0)), matrix(c, in(c, 1)), factor(c), matrix(c, out(c, 0)),
            {extent(c, in(c, 0), 0), extent(c, in(c, 0), 1), extent(c, in(c, 1), 0)});
}
void run_lora_up(const KernelCall& c) {
  if (adapts_experts(c.op))
    return lora_up(c.context, experts(c, segment_offsets(c)), matrix(c, in(c, 0)), matrix(c, in(c, 1)),
                   matrix(c, out(c, 0)), column(c));
  lora_up(c.context, matrix(c, in(c, 0)), matrix(c, in(c, 1)), matrix(c, out(c, 0)), column(c),
          {extent(c, in(c, 0), 0), extent(c, in(c, 1), 0), extent(c, in(c, 1), 1)});
}
void run_lora_up_dgrad(const KernelCall& c) {
  if (adapts_experts(c.op))
    return lora_up_dgrad(c.context, experts(c, segment_offsets(c)), matrix(c, in(c, 0)), matrix(c, in(c, 1)), column(c),
                         factor(c), matrix(c, out(c, 0)));
  lora_up_dgrad(c.context, matrix(c, in(c, 0)), matrix(c, in(c, 1)), column(c), factor(c), matrix(c, out(c, 0)),
                {extent(c, in(c, 0), 0), extent(c, in(c, 1), 0), extent(c, in(c, 1), 1)});
}
void run_lora_up_wgrad(const KernelCall& c) {
  if (adapts_experts(c.op))
    return lora_up_wgrad(c.context, experts(c, segment_offsets(c)), matrix(c, in(c, 0)), matrix(c, in(c, 1)), column(c),
                         matrix(c, out(c, 0)), write_mode(c));
  lora_up_wgrad(c.context, matrix(c, in(c, 0)), matrix(c, in(c, 1)), column(c), matrix(c, out(c, 0)),
                {extent(c, in(c, 0), 0), extent(c, out(c, 0), 0), extent(c, out(c, 0), 1)}, write_mode(c));
}
void run_lora_merge(const KernelCall& c) {
  lora_merge(c.context, matrix(c, in(c, 0)), matrix(c, in(c, 1)), matrix(c, in(c, 2)), factor(c), matrix(c, out(c, 0)),
             {extent(c, in(c, 0), 0), extent(c, in(c, 0), 1), extent(c, in(c, 1), 1)});
}

// --- loss, optimizer, sampling --------------------------------------------------------------------------------------

/// All ids, or those of this rank's part of the vocabulary.
Logits logits(const KernelCall& c) {
  const Range ids = c.op.has(Attr::vocab_stride) ? vocab_rows(c.op, c.places) : Range{0, c.op.integer(Attr::vocab)};
  return {data<const float>(c, in(c, 0)), extent(c, in(c, 0), 1), ids.size(), ids.begin};
}
float temperature(const KernelCall& c) { return static_cast<float>(c.op.real(Attr::temperature)); }

void run_log_prob(const KernelCall& c) {
  token_logprobs(c.context, logits(c), data<const std::int32_t>(c, in(c, 1)), temperature(c), data<float>(c, out(c, 0)),
                 data<float>(c, out(c, 1)), data<float>(c, out(c, 2)), extent(c, in(c, 0), 0));
}
void run_log_prob_backward(const KernelCall& c) {
  token_logprobs_backward(c.context, logits(c), data<const std::int32_t>(c, in(c, 2)), temperature(c),
                          data<float>(c, in(c, 1)), data<float>(c, in(c, 3)), matrix(c, out(c, 0)),
                          extent(c, out(c, 0), 1), extent(c, in(c, 0), 0), cap(c));
}
void run_vocab_stats(const KernelCall& c) {
  vocab_stats(c.context, logits(c), data<const std::int32_t>(c, in(c, 1)), temperature(c),
              data<VocabStats>(c, out(c, 0)), extent(c, in(c, 0), 0));
}
void run_vocab_log_prob(const KernelCall& c) {
  merge_vocab_stats(c.context, data<const VocabStats>(c, in(c, 0)), extent(c, in(c, 0), 0),
                    data<const std::int32_t>(c, in(c, 1)), temperature(c), data<float>(c, out(c, 0)),
                    data<float>(c, out(c, 1)), data<float>(c, out(c, 2)), extent(c, in(c, 0), 1));
}
void run_token_loss(const KernelCall& c) {
  const bool sft = c.op.integer(Attr::sft) != 0;
  const float kl = static_cast<float>(c.op.real(Attr::kl_coef));
  const PolicyLossInputs inputs{
      .logp_new = data<float>(c, in(c, 0)),
      .logp_old = sft ? nullptr : data<float>(c, in(c, 1)),
      .logp_ref = sft || c.op.integer(Attr::reference, 0) == 0 ? nullptr : data<float>(c, in(c, 2)),
      .advantage = data<float>(c, in(c, 3)),
      .weight = data<float>(c, in(c, 4)),
      .entropy = data<float>(c, in(c, 5))};
  const PolicyLossConfig config{static_cast<float>(c.op.real(Attr::clip_low)),
                                static_cast<float>(c.op.real(Attr::clip_high)), kl};
  policy_loss(c.context, inputs, config, data<float>(c, out(c, 0)), data<float>(c, out(c, 1)), extent(c, in(c, 0), 0));
}
void run_sum_squares(const KernelCall& c) {
  auto* sum = data<float>(c, out(c, 0));
  const double here = sum_of_squares(c.context, vec(c, in(c, 0)), in(c, 0).elements(c.sizes));
  *sum = static_cast<float>((c.op.integer(Attr::accumulate, 0) != 0 ? static_cast<double>(*sum) : 0.0) + here);
}
void run_clip(const KernelCall& c) {
  const double norm = std::sqrt(static_cast<double>(*data<const float>(c, in(c, 0))));
  const double max_norm = c.op.real(Attr::max_norm);
  auto* metrics = data<float>(c, out(c, 1));
  // Both are sums over all ranks by now: all refuse the step, or none does.
  const bool finite = std::isfinite(norm) && std::isfinite(metrics[static_cast<std::size_t>(Metric::loss)]);
  const float coefficient = !finite        ? std::numeric_limits<float>::quiet_NaN()
                            : max_norm > 0 ? clip_coefficient(norm, max_norm)
                                           : 1.0f;
  *data<float>(c, out(c, 0)) = coefficient;
  metrics[static_cast<std::size_t>(Metric::grad_norm)] = static_cast<float>(norm);
  metrics[static_cast<std::size_t>(Metric::clip_coefficient)] = coefficient;
}
void run_adamw(const KernelCall& c) {
  const auto* rate = data<const float>(c, in(c, 1));
  AdamWConfig config;
  config.lr = rate[0];
  config.step = static_cast<std::int64_t>(rate[1]);
  config.beta1 = static_cast<float>(c.op.real(Attr::beta1));
  config.beta2 = static_cast<float>(c.op.real(Attr::beta2));
  config.eps = eps(c);
  config.weight_decay = static_cast<float>(c.op.real(Attr::weight_decay));
  adamw_step(c.context, config, data<float>(c, out(c, 0)), vec(c, in(c, 0)), data<float>(c, out(c, 1)),
             data<float>(c, out(c, 2)), in(c, 0).elements(c.sizes), data<const float>(c, in(c, 2)), nullptr);
}
void run_sample(const KernelCall& c) {
  const LogitBlocks blocks{data<const float>(c, in(c, 0)), extent(c, in(c, 0), 0), extent(c, in(c, 0), 2),
                           c.op.integer(Attr::vocab)};
  const SamplingParams params{temperature(c), static_cast<std::int32_t>(c.op.integer(Attr::top_k)),
                              static_cast<float>(c.op.real(Attr::top_p))};
  sample_tokens(c.context, blocks, params, data<const float>(c, in(c, 1)), data<std::int32_t>(c, out(c, 0)),
                data<float>(c, out(c, 1)), extent(c, in(c, 0), 1));
}

void run_split_heads(const KernelCall& c) {
  split_heads(c.context, matrix(c, in(c, 0)), heads(c), extent(c, out(c, 0), 0), matrix(c, out(c, 0)),
              extent(c, in(c, 0), 0));
}
void run_merge_heads(const KernelCall& c) {
  merge_heads(c.context, matrix(c, in(c, 0)), heads(c), extent(c, in(c, 0), 0), matrix(c, out(c, 0)),
              extent(c, out(c, 0), 0));
}

void run_take_kv(const KernelCall& c) {
  take_kv(c.context, matrix(c, in(c, 0)), heads(c), matrix(c, out(c, 0)), extent(c, in(c, 0), 0));
}
void run_merge_qkv(const KernelCall& c) {
  const ConstMatrix more = c.op.num_operands() > 2 ? ConstMatrix(matrix(c, in(c, 2))) : ConstMatrix{};
  merge_qkv(c.context, matrix(c, in(c, 0)), matrix(c, in(c, 1)), more, heads(c), matrix(c, out(c, 0)),
            extent(c, out(c, 0), 0));
}

struct Registration {
  OpKind kind;
  OpKernel kernel;
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
                                      Registration{OpKind::rms_norm, run_rms_norm},
                                      Registration{OpKind::rms_norm_backward, run_rms_norm_backward},
                                      Registration{OpKind::qk_norm, run_qk_norm},
                                      Registration{OpKind::qk_norm_backward, run_qk_norm_backward},
                                      Registration{OpKind::rope, run_rope},
                                      Registration{OpKind::rope_backward, run_rope_backward},
                                      Registration{OpKind::attention, run_attention},
                                      Registration{OpKind::attention_backward, run_attention_backward},
                                      Registration{OpKind::kv_write, run_kv_write},
                                      Registration{OpKind::paged_attention, run_paged_attention},
                                      Registration{OpKind::swiglu, run_swiglu},
                                      Registration{OpKind::swiglu_backward, run_swiglu_backward},
                                      Registration{OpKind::clamped_swiglu, run_clamped_swiglu},
                                      Registration{OpKind::clamped_swiglu_backward, run_clamped_swiglu_backward},
                                      Registration{OpKind::attention_sinks, run_attention_sinks},
                                      Registration{OpKind::attention_sinks_backward, run_attention_sinks_backward},
                                      Registration{OpKind::route, run_route},
                                      Registration{OpKind::route_backward, run_route_backward},
                                      Registration{OpKind::expert_sort, run_expert_sort},
                                      Registration{OpKind::dispatch, run_dispatch},
                                      Registration{OpKind::dispatch_backward, run_dispatch_backward},
                                      Registration{OpKind::grouped_linear, run_grouped_linear},
                                      Registration{OpKind::grouped_linear_dgrad, run_grouped_linear_dgrad},
                                      Registration{OpKind::grouped_linear_wgrad, run_grouped_linear_wgrad},
                                      Registration{OpKind::combine, run_combine},
                                      Registration{OpKind::combine_backward, run_combine_backward},
                                      Registration{OpKind::add, run_add},
                                      Registration{OpKind::gather_rows, run_gather_rows},
                                      Registration{OpKind::embedding, run_embedding},
                                      Registration{OpKind::embedding_backward, run_embedding_backward},
                                      Registration{OpKind::log_prob, run_log_prob},
                                      Registration{OpKind::log_prob_backward, run_log_prob_backward},
                                      Registration{OpKind::vocab_stats, run_vocab_stats},
                                      Registration{OpKind::vocab_log_prob, run_vocab_log_prob},
                                      Registration{OpKind::token_loss, run_token_loss},
                                      Registration{OpKind::sum_squares, run_sum_squares},
                                      Registration{OpKind::clip_coefficient, run_clip},
                                      Registration{OpKind::adamw, run_adamw},
                                      Registration{OpKind::sample, run_sample},
                                      Registration{OpKind::split_heads, run_split_heads},
                                      Registration{OpKind::merge_heads, run_merge_heads},
                                      Registration{OpKind::add_bias, run_add_bias},
                                      Registration{OpKind::geglu, run_geglu},
                                      Registration{OpKind::geglu_backward, run_geglu_backward},
                                      Registration{OpKind::softcap, run_softcap},
                                      Registration{OpKind::layer_norm, run_layer_norm},
                                      Registration{OpKind::layer_norm_backward, run_layer_norm_backward},
                                      Registration{OpKind::gelu, run_gelu},
                                      Registration{OpKind::gelu_backward, run_gelu_backward},
                                      Registration{OpKind::take_kv, run_take_kv},
                                      Registration{OpKind::merge_qkv, run_merge_qkv},
                                      Registration{OpKind::context_attention, run_context_attention},
                                      Registration{OpKind::context_attention_backward, run_context_attention_backward},
                                      Registration{OpKind::expert_arrivals, run_expert_arrivals},
                                      Registration{OpKind::copy_sort, run_copy_sort},
                                      Registration{OpKind::copy_arrivals, run_copy_arrivals},
                                      Registration{OpKind::expert_counts, run_expert_counts},
                                      Registration{OpKind::router_loss, run_router_loss},
                                      Registration{OpKind::lora_down, run_lora_down},
                                      Registration{OpKind::lora_up, run_lora_up},
                                      Registration{OpKind::lora_up_dgrad, run_lora_up_dgrad},
                                      Registration{OpKind::lora_up_wgrad, run_lora_up_wgrad},
                                      Registration{OpKind::lora_merge, run_lora_merge},
                                      Registration{OpKind::latent_norm, run_latent_norm},
                                      Registration{OpKind::latent_norm_backward, run_latent_norm_backward},
                                      Registration{OpKind::latent_heads, run_latent_heads},
                                      Registration{OpKind::latent_heads_backward, run_latent_heads_backward},
                                      Registration{OpKind::latent_write, run_latent_write},
                                      Registration{OpKind::latent_attention, run_latent_attention}};

/// "" or why this op's dtypes are not handled.
std::string why_not(const Op& op) {
  const bool stepped = op.kind == OpKind::adamw || op.kind == OpKind::sum_squares;
  const bool product =
      op.kind == OpKind::linear_wgrad || op.kind == OpKind::grouped_linear_wgrad || op.kind == OpKind::lora_up_wgrad;
  for (const auto* side : {&op.inputs, &op.outputs})
    for (const Tensor& t : *side) {
      if (t.dtype == DType::f16 || t.dtype == DType::f64)
        return fmt::format("the CPU kernels compute in fp32 and bf16, not {}", name_of(t.dtype));
      if (stepped && side == &op.outputs && t.dtype != DType::f32) return "masters and moments are fp32 on the CPU";
      if (product && side == &op.outputs && t.dtype != DType::f32 && op.inputs[0].dtype == DType::f32)
        return "products of fp32 operands make gradients in fp32";
    }
  if (op.kind == OpKind::softcap && op.outputs[0].dtype != DType::f32) return "logits are capped in fp32";
  const bool of_latents = op.kind == OpKind::latent_write || op.kind == OpKind::latent_attention;
  if (const Tensor* pool = op.kind == OpKind::kv_write || op.kind == OpKind::latent_write ? &op.outputs[0]
                           : op.kind == OpKind::paged_attention || of_latents             ? &op.inputs[1]
                                                                                          : nullptr)
    if (pool->dtype != op.inputs[0].dtype && (of_latents || pool->dtype == DType::u8))
      return fmt::format("a cache of {}{} in {} (rollout.kv_cache_dtype)", name_of(op.inputs[0].dtype),
                         of_latents ? " latents" : "", name_of(pool->dtype));
  return "";
}

}  // namespace

OpKernel op_kernel(OpKind kind) {
  for (const Registration& r : registrations)
    if (r.kind == kind) return r.kernel;
  return nullptr;
}

Capability kernels_support(const Op& op) {
  if (op.is_priced()) return {false, "it is a priced block: what another framework does there is not written op by op"};
  if (op.hands_over()) return {false, "what roles hand over without meeting is played in virtual time only"};
  if (is_communication(op.kind)) return {};
  const bool built_in = is_memory(op.kind) || is_event(op.kind) || op.kind == OpKind::feed ||
                        op.kind == OpKind::fetch || op.kind == OpKind::copy;
  if (!built_in && !op_kernel(op.kind)) return {false, "no CPU kernel is registered for it"};
  std::string why = why_not(op);
  return {why.empty(), std::move(why)};
}

}  // namespace hotbunk
