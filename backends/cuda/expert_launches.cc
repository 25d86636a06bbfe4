#include "backends/cuda/expert_launches.h"

#include "backends/cuda/launch_operands.h"
#include "graph/catalogue.h"
#include "graph/slots.h"

namespace hotbunk::cuda {
namespace {

constexpr std::int64_t most_experts = 1024, most_groups = 32;  // bits of a warp (kernels/experts.cu)
constexpr std::int64_t count_bytes = sizeof(std::int32_t);

/// Where bias, weights, … come from: null where the op has no such operand.
CUdeviceptr or_none(const CudaCall& c, std::size_t operand) {
  return c.op.num_operands() > operand ? at(c, in(c, operand)) : CUdeviceptr{0};
}

/// Choices of all tokens, c of each.
struct Choices {
  int tokens, each;
  std::int64_t all() const { return std::int64_t{tokens} * each; }
};
Choices choices(const CudaCall& c, const Tensor& t) { return {extent(c, t, 0), extent(c, t, 1)}; }

struct Routing {
  int experts, each, renormalise, sigmoid, groups, taken;
  float factor;
};
Routing routing(const CudaCall& c, const Tensor& logits, const Tensor& chosen) {
  return {extent(c, logits, 1),
          extent(c, chosen, 1),
          flag(c, Attr::renormalise),
          flag(c, Attr::sigmoid),
          narrow(c.op.integer(Attr::groups, 1)),
          narrow(c.op.integer(Attr::taken_groups, 1)),
          static_cast<float>(c.op.real(Attr::factor, 1.0))};
}

/// Which of the choices have a row here, counted into the scratch.
void count_own_rows(const CudaCall& c, const Tensor& rows) {
  c.launch("own_rows", {1}, walk_threads, at(c, rows), c.scratch, narrow(choices(c, rows).all()));
}

/// Of a grouped product: its matrices, the tile of rows, and threads.
struct Grouped {
  ExpertMatrices m;
  int R, first, N, K, segments, experts, rows_of_tile, threads;
};
Grouped grouped(const CudaCall& c, const Tensor& rows) {
  const ExpertMatrices m = expert_matrices(c.op);
  const bool f32 = rows.dtype == DType::f32;
  const std::int64_t all = rows.elements(c.sizes) / rows.shape[static_cast<std::size_t>(rows.rank) - 1].size;
  const std::int64_t first = rows.rank > 2 ? 0 : rows.shape[0].begin;  // of those that came in a round
  return {m,
          narrow(all),
          narrow(first),
          narrow(m.n),
          narrow(m.k),
          narrow(m.segments),
          narrow(m.experts),
          f32 ? 32 : 64,
          f32 ? 32 : 128};
}
/// Of tiles over rows: at most one more for each segment, and for what lies behind the last.
Grid grouped_grid(const Grouped& g, int columns) {
  if (g.R == 0) return {0};
  return {blocks_of(columns, 64), blocks_of(g.R, g.rows_of_tile) + g.segments + 1};
}

}  // namespace

void run_route(const CudaCall& c) {
  const Routing r = routing(c, in(c, 0), out(c, 1));
  const int T = extent(c, in(c, 0), 0);
  const CUdeviceptr bias = or_none(c, 1);
  const DType dtype = bias != 0 ? in(c, 1).dtype : DType::f32;
  c.launch(named("route", dtype), warps(T), head_threads, at(c, in(c, 0)), bias, at(c, out(c, 0)), at(c, out(c, 1)), T,
           r.experts, r.each, r.renormalise, r.sigmoid, r.groups, r.taken, r.factor);
}

void run_route_backward(const CudaCall& c) {
  const Routing r = routing(c, in(c, 1), in(c, 2));
  const int T = extent(c, in(c, 1), 0);
  c.launch(named("route_backward", out(c, 0).dtype), warps(T), head_threads, at(c, in(c, 0)), at(c, in(c, 1)),
           at(c, in(c, 2)), at(c, out(c, 0)), T, r.experts, r.each, r.renormalise, r.sigmoid, r.groups, r.taken,
           r.factor);
}

void run_expert_counts(const CudaCall& c) {
  const int n = narrow(choices(c, in(c, 0)).all());
  c.launch.fill(at(c, out(c, 0)), 0, out(c, 0).bytes(c.sizes));
  c.launch("expert_counts", {blocks_of(n, walk_threads)}, walk_threads, at(c, in(c, 0)), at(c, in(c, 1)),
           at(c, out(c, 0)), n, extent(c, in(c, 0), 1), width(c, out(c, 0)));
}

void run_router_loss(const CudaCall& c) {
  const int T = extent(c, in(c, 1), 0), E = extent(c, in(c, 1), 1);
  c.launch(named("router_loss", out(c, 0).dtype), warps(T), head_threads, at(c, out(c, 0)), at(c, in(c, 1)),
           at(c, in(c, 2)), at(c, in(c, 3)), at(c, in(c, 4)), c.scratch, T, c.op.real(Attr::factor) * E,
           c.op.real(Attr::z_factor), E, narrow(c.op.integer(Attr::top_k, 1)), flag(c, Attr::sigmoid),
           narrow(c.op.integer(Attr::tp, 1)));
  c.launch("router_loss_sum", {1}, walk_threads, c.scratch, at(c, out(c, 1)), T, static_cast<int>(Metric::loss),
           static_cast<int>(Metric::router_loss));
}

void run_expert_sort(const CudaCall& c) {
  const OwnPart own = own_experts(c.op, c.places);
  const int n = narrow(choices(c, in(c, 0)).all());
  const int each = narrow(own.count / own.groups), group = narrow(each * c.op.integer(Attr::tp, 1));
  const int first = narrow(own.first), parts = extent(c, out(c, 0), 1) / extent(c, in(c, 0), 1);
  c.launch.fill(at(c, out(c, 0)), 0xff, out(c, 0).bytes(c.sizes));  // -1: another rank's
  c.launch("expert_rows", {own.count}, walk_threads, at(c, in(c, 0)), at(c, out(c, 0)), at(c, out(c, 1)), n, each,
           group, first, parts);
}

void run_expert_arrivals(const CudaCall& c) {
  const Tensor& sent = in(c, 0);
  const std::int64_t place = c.places.at(static_cast<std::size_t>(c.op.group));
  c.launch("expert_arrivals", {1}, 32, at(c, sent), at(c, out(c, 0)), at(c, out(c, 1)), extent(c, sent, 1) - 1,
           extent(c, sent, 0), narrow(place));
}

void run_copy_sort(const CudaCall& c) {
  const Choices chosen = choices(c, in(c, 0));
  const Tensor &tokens = out(c, 0), &copies = out(c, 1), &slots = out(c, 2), &blocks = out(c, 3);
  const int W = extent(c, blocks, 0) - 1, each = (extent(c, in(c, 1), 0) - 1) / W;
  c.launch("copy_sort", {W}, walk_threads, at(c, in(c, 0)), at(c, in(c, 1)), at(c, tokens), at(c, copies), at(c, slots),
           at(c, blocks), at(c, out(c, 4)), chosen.tokens, chosen.each, each, extent(c, tokens, 0), width(c, copies));
}

void run_copy_arrivals(const CudaCall& c) {
  const Tensor &blocks = in(c, 0), &slots = in(c, 1), &arrivals = in(c, 2), &rows = out(c, 1);
  const int W = extent(c, blocks, 0), place = narrow(c.places.at(static_cast<std::size_t>(c.op.group)));
  const int segments = (extent(c, arrivals, 0) - 1) / W, U = extent(c, rows, 0);
  const std::int64_t longest = std::max<std::int64_t>(extent(c, slots, 0), U);
  c.launch("copy_arrivals", {walking_blocks_of(std::max<std::int64_t>(1, longest), walk_threads), W + 1}, walk_threads,
           at(c, blocks), at(c, slots), at(c, arrivals), at(c, out(c, 0)), at(c, rows), at(c, out(c, 2)), U, W, place,
           segments, width(c, rows));
}

void run_dispatch(const CudaCall& c) {
  const Choices chosen = choices(c, in(c, 1));
  const int H = width(c, in(c, 0));
  count_own_rows(c, in(c, 1));
  c.launch(named("dispatch", in(c, 0).dtype), {chosen.all()}, row_threads(H), at(c, in(c, 0)), at(c, in(c, 1)),
           c.scratch, at(c, out(c, 0)), chosen.each, H);
}

void run_dispatch_backward(const CudaCall& c) {
  const Choices chosen = choices(c, in(c, 1));
  const int H = width(c, in(c, 0));
  c.launch(named("dispatch_backward", in(c, 0).dtype), {chosen.tokens}, row_threads(H), at(c, in(c, 0)),
           at(c, in(c, 1)), at(c, out(c, 0)), chosen.each, H, flag(c, Attr::accumulate));
}

void run_combine(const CudaCall& c) {
  const Choices chosen = choices(c, in(c, 1));
  const int H = width(c, in(c, 0));
  c.launch(named("combine", in(c, 0).dtype), {chosen.tokens}, row_threads(H), at(c, in(c, 0)), at(c, in(c, 1)),
           at(c, in(c, 2)), or_none(c, 3), at(c, out(c, 0)), chosen.each, chosen.each / extent(c, in(c, 2), 1), H);
}

void run_combine_backward(const CudaCall& c) {
  const Choices chosen = choices(c, in(c, 3));
  const int H = width(c, in(c, 0)), parts = extent(c, in(c, 2), 1) / chosen.each;
  count_own_rows(c, in(c, 2));
  c.launch(named("combine_backward", in(c, 0).dtype), {chosen.all()}, row_threads(H), at(c, in(c, 0)), at(c, in(c, 1)),
           at(c, in(c, 2)), at(c, in(c, 3)), c.scratch, at(c, out(c, 0)), at(c, out(c, 1)), chosen.each, parts, H);
}

void run_grouped_linear(const CudaCall& c) {
  const Grouped g = grouped(c, in(c, 0));
  const CUdeviceptr bias = or_none(c, 3);
  const Range columns = bias != 0 ? bias_columns(c.op, c.places) : Range{};
  c.launch(named("grouped_matmul_nt", in(c, 0).dtype), grouped_grid(g, g.N), g.threads, at(c, in(c, 0)),
           at(c, in(c, 1)), at(c, in(c, 2)), bias, at(c, out(c, 0)), g.N, g.R, g.first, g.N, g.K, g.segments, g.experts,
           narrow(columns.begin), narrow(columns.size()), 0);
}

void run_grouped_linear_dgrad(const CudaCall& c) {
  const Grouped g = grouped(c, in(c, 0));
  c.launch(named("grouped_matmul_nn", in(c, 0).dtype), grouped_grid(g, g.K), g.threads, at(c, in(c, 0)), g.N,
           at(c, in(c, 1)), at(c, in(c, 2)), at(c, out(c, 0)), g.R, g.first, g.N, g.K, g.segments, g.experts,
           flag(c, Attr::accumulate));
}

void run_grouped_linear_wgrad(const CudaCall& c) {
  const Grouped g = grouped(c, in(c, 0));
  const int accumulate = flag(c, Attr::accumulate);
  c.launch(named("grouped_matmul_tn", in(c, 0).dtype, out(c, 0).dtype),
           {blocks_of(g.K, 64), blocks_of(g.N, g.rows_of_tile) * g.experts}, g.threads, at(c, in(c, 0)), g.N,
           at(c, in(c, 1)), at(c, in(c, 2)), at(c, out(c, 0)), g.R, g.first, g.N, g.K, g.segments, g.experts,
           accumulate);
  if (c.op.outputs.size() < 2) return;
  const Range columns = bias_columns(c.op, c.places);
  c.launch(named("grouped_bias", in(c, 0).dtype, out(c, 1).dtype), {blocks_of(columns.size(), head_threads), g.experts},
           head_threads, at(c, in(c, 0)), at(c, in(c, 2)), at(c, out(c, 1)), g.R, g.first, g.segments, g.experts, g.N,
           narrow(columns.begin), narrow(columns.size()), accumulate);
}

namespace {

/// From the column on that the adapter's matrix makes of a wider activation.
CUdeviceptr at_column(const CudaCall& c, const Tensor& t) {
  return at(c, t) + static_cast<CUdeviceptr>(c.op.integer(Attr::column) * size_of(t.dtype));
}
/// y (+)= x w^T from a column of y on.
void adapt_rows(const CudaCall& c, CUdeviceptr y, int accumulate) {
  const Grouped g = grouped(c, in(c, 0));
  c.launch(named("grouped_matmul_nt", in(c, 0).dtype), grouped_grid(g, g.N), g.threads, at(c, in(c, 0)),
           at(c, in(c, 1)), at(c, in(c, 2)), CUdeviceptr{0}, y, width(c, out(c, 0)), g.R, g.first, g.N, g.K, g.segments,
           g.experts, 0, 0, accumulate);
}

}  // namespace

void run_expert_lora_down(const CudaCall& c) { adapt_rows(c, at(c, out(c, 0)), 0); }
void run_expert_lora_up(const CudaCall& c) { adapt_rows(c, at_column(c, out(c, 0)), 1); }
void run_expert_lora_up_dgrad(const CudaCall& c) {
  const Grouped g = grouped(c, in(c, 0));
  c.launch(named("grouped_matmul_nn", in(c, 0).dtype), grouped_grid(g, g.K), g.threads, at_column(c, in(c, 0)),
           width(c, in(c, 0)), at(c, in(c, 1)), at(c, in(c, 2)), at(c, out(c, 0)), g.R, g.first, g.N, g.K, g.segments,
           g.experts, 0);
}
void run_expert_lora_up_wgrad(const CudaCall& c) {
  const Grouped g = grouped(c, in(c, 0));
  c.launch(named("grouped_matmul_tn", in(c, 0).dtype, out(c, 0).dtype),
           {blocks_of(g.K, 64), blocks_of(g.N, g.rows_of_tile) * g.experts}, g.threads, at_column(c, in(c, 0)),
           width(c, in(c, 0)), at(c, in(c, 1)), at(c, in(c, 2)), at(c, out(c, 0)), g.R, g.first, g.N, g.K, g.segments,
           g.experts, flag(c, Attr::accumulate));
}

std::int64_t expert_scratch_bytes(const Op& op) {
  if (op.kind == OpKind::router_loss) return op.inputs[1].shape[0].size * std::int64_t{sizeof(double)};
  if (op.kind == OpKind::dispatch || op.kind == OpKind::combine_backward) return count_bytes;
  return 0;
}

std::string why_not_routed(const Op& op) {
  if (op.kind != OpKind::route && op.kind != OpKind::route_backward) return "";
  const std::int64_t experts = op.inputs[op.kind == OpKind::route ? 0 : 1].shape[1].size,
                     groups = op.integer(Attr::groups, 1);
  if (experts <= most_experts && groups <= most_groups) return "";
  return fmt::format("its kernels route among {} experts in {} groups at most, not {} in {}", most_experts, most_groups,
                     experts, groups);
}

}  // namespace hotbunk::cuda
