#include "backends/cpu_gloo/kernels/onednn.h"

#include <omp.h>

#include <algorithm>
#include <string_view>

#include "backends/cpu_gloo/kernels/elementwise.h"
#include "base/check.h"

namespace hotbunk::kernels {
namespace {

// Scratch slots 0..2 are matmul's (0: oneDNN's own, 1 and 2: widened operands); slot 3 is the other kernels', slot 4
// fused_linear's, slot 5 latent attention's.
constexpr int kScratchpadSlot = 0;
constexpr int kWideASlot = 1;
constexpr int kWideBSlot = 2;

// Rollout meets many token counts; a cached primitive costs some ten KiB, making one anew some hundred µs.
constexpr std::size_t kMaxCachedMatmuls = 512;

dnnl::memory::data_type onednn_type(DType t) {
  return t == DType::bf16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
}

dnnl::memory::desc weights_desc(const MatmulShape& s) {
  using dnnl::memory;
  const memory::dims dims{s.K, s.N};
  if (s.b_pairs == 0) return {dims, onednn_type(s.in), {s.b_strides[0], s.b_strides[1]}};
  return {dims, onednn_type(s.in), s.b_pairs == 64 ? memory::format_tag::BA16a64b2a : memory::format_tag::BA16a32b2a};
}

KernelContext::Onednn::Entry make_entry(const dnnl::engine& engine, const MatmulShape& s) {
  using dnnl::memory;
  const memory::desc a({s.M, s.K}, onednn_type(s.in), {s.a_strides[0], s.a_strides[1]});
  const memory::desc b = weights_desc(s);
  const memory::desc c({s.M, s.N}, onednn_type(s.out), {s.ldc, 1});
  const memory::desc bias({1, s.N}, memory::data_type::f32, {s.N, 1});
  dnnl::primitive_attr attr;
  attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  attr.set_fpmath_mode(dnnl::fpmath_mode::strict);  // not ONEDNN_DEFAULT_FPMATH_MODE's, where it narrows fp32
  if (s.accumulate) {
    dnnl::post_ops ops;
    ops.append_sum(1.0f);
    attr.set_post_ops(ops);
  }
  const auto desc = s.bias ? dnnl::matmul::desc(a, b, bias, c) : dnnl::matmul::desc(a, b, c);
  KernelContext::Onednn::Entry entry;
  entry.desc = dnnl::matmul::primitive_desc(desc, attr, engine, /*allow_empty=*/true);
  // Of blocks there is else its reference, element by element.
  if (s.b_pairs > 0 && entry.desc && !std::string_view(entry.desc.impl_info_str()).starts_with("brg")) return {};
  if (entry.desc) entry.primitive = dnnl::matmul(entry.desc);
  return entry;
}

/// A strided operand as dense fp32 with the same order of dimensions; `strides` become the new ones.
const float* widen_operand(KernelContext& ctx, int slot, const void* data, std::int64_t rows, std::int64_t cols,
                           std::array<std::int64_t, 2>& strides) {
  const bool row_major = strides[1] == 1;
  const std::int64_t outer = row_major ? rows : cols;
  const std::int64_t inner = row_major ? cols : rows;
  const std::int64_t pitch = row_major ? strides[0] : strides[1];
  auto* wide = static_cast<float*>(ctx.scratch(slot, static_cast<std::size_t>(outer * inner) * sizeof(float)));
  const Box box{.src_pitch = pitch, .dst_pitch = inner, .rows = outer, .cols = inner};
  copy_boxes(ctx, {data, DType::bf16}, wide, DType::f32, {&box, 1});
  strides = row_major ? std::array<std::int64_t, 2>{inner, 1} : std::array<std::int64_t, 2>{1, inner};
  return wide;
}

}  // namespace

bool try_matmul(KernelContext& ctx, const MatmulShape& shape, const void* a, const void* b, const float* bias,
                void* c) {
  using dnnl::memory;
  auto& dnn = ctx.onednn();
  ask_for_whole_teams();
  omp_set_num_threads(ctx.num_threads());  // oneDNN sizes its blocking and its team by it; per calling thread
  auto it = dnn.matmuls.find(shape);
  if (it == dnn.matmuls.end()) {
    if (dnn.matmuls.size() >= kMaxCachedMatmuls) dnn.matmuls.clear();
    it = dnn.matmuls.emplace(shape, make_entry(dnn.engine, shape)).first;
  }
  const auto& [desc, primitive] = it->second;
  if (!desc) return false;
  const auto argument = [&](const memory::desc& d, const void* p) {
    return memory(d, dnn.engine, const_cast<void*>(p));  // oneDNN has no const memory; sources are only read
  };
  std::unordered_map<int, memory> args{{DNNL_ARG_SRC, argument(desc.src_desc(), a)},
                                       {DNNL_ARG_WEIGHTS, argument(desc.weights_desc(), b)},
                                       {DNNL_ARG_DST, argument(desc.dst_desc(), c)}};
  if (shape.bias) args.emplace(DNNL_ARG_BIAS, argument(desc.bias_desc(), bias));
  const memory::desc pad = desc.scratchpad_desc();
  args.emplace(DNNL_ARG_SCRATCHPAD, argument(pad, ctx.scratch(kScratchpadSlot, pad.get_size())));
  primitive.execute(dnn.stream, args);
  dnn.stream.wait();
  return true;
}

bool has_pairs_matmul() {
  // Before 2.6 it takes such blocks and reads them at other addresses where it chooses blocks of other widths itself.
  const dnnl_version_t& version = *dnnl_version();
  if (version.major < 2 || (version.major == 2 && version.minor < 6)) return false;
  const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return std::ranges::all_of(std::array<std::int64_t, 2>{64, 32}, [&](std::int64_t rows) {
    return !!make_entry(
                 engine,
                 {.M = 32, .N = rows, .K = 32, .a_strides = {32, 1}, .ldc = rows, .in = DType::bf16, .b_pairs = rows})
                 .desc;
  });
}

void matmul_widened(KernelContext& ctx, MatmulShape shape, const void* a, const void* b, const float* bias, void* c) {
  HB_CHECK(shape.b_pairs == 0, "widening reads rows");
  const std::int64_t c_rows = shape.M;
  void* out = c;
  std::int64_t out_ld = shape.ldc;
  if (shape.in == DType::bf16) {
    a = widen_operand(ctx, kWideASlot, a, shape.M, shape.K, shape.a_strides);
    b = widen_operand(ctx, kWideBSlot, b, shape.K, shape.N, shape.b_strides);
    shape.in = DType::f32;
  }
  const bool narrow_out = shape.out == DType::bf16;
  if (narrow_out) {  // compute in fp32, then round once
    out = ctx.scratch(3, static_cast<std::size_t>(c_rows * shape.N) * sizeof(float));
    shape.out = DType::f32;
    shape.ldc = shape.N;
    const Box in_box{.src_pitch = out_ld, .dst_pitch = shape.N, .rows = c_rows, .cols = shape.N};
    if (shape.accumulate) copy_boxes(ctx, {c, DType::bf16}, out, DType::f32, {&in_box, 1});
  }
  const bool done = try_matmul(ctx, shape, a, b, bias, out);
  HB_CHECK(done, "oneDNN has no fp32 matmul for {}x{}x{}", shape.M, shape.N, shape.K);
  if (narrow_out) {
    const Box out_box{.src_pitch = shape.N, .dst_pitch = out_ld, .rows = c_rows, .cols = shape.N};
    copy_boxes(ctx, {out, DType::f32}, c, DType::bf16, {&out_box, 1});
  }
}

}  // namespace hotbunk::kernels
