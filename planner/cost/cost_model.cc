#include "planner/cost/cost_model.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "base/check.h"
#include "graph/catalogue.h"

namespace hotbunk {
namespace {

bool is_product(OpKind k) { return is_linear(k) || k == OpKind::linear_dgrad || k == OpKind::linear_wgrad; }
/// Attention is measured in heads of 128: a head of 64 is half of one, and one whose values have another width than its
/// keys as both in the mean.
double heads_of_128(const Op& op) {
  const std::int64_t keys = op.integer(Attr::head_dim), values = op.integer(Attr::value_dim, keys);
  return static_cast<double>(op.integer(Attr::heads) * (keys + values)) / 256.0;
}
bool is_attention(OpKind k) {
  return k == OpKind::attention || k == OpKind::attention_backward || k == OpKind::context_attention ||
         k == OpKind::context_attention_backward || k == OpKind::paged_attention;
}

/// Keys and values of another type than the queries: measurements know one type, by which formula and kernel are held
/// against each other.
bool has_other_cache(const Op& op) {
  return op.kind == OpKind::paged_attention && op.inputs[1].dtype != op.inputs[0].dtype;
}

bool is_backward(OpKind k) { return k == OpKind::attention_backward || k == OpKind::context_attention_backward; }

/// Tokens, visible keys of each on average, heads of 128. Groups of an engine step together, but attend to what is
/// their own.
std::array<double, 3> attention_size(const Op& op, const Sizes& s) {
  const bool of_engine = op.kind == OpKind::paged_attention || op.kind == OpKind::latent_attention;
  const auto tokens = std::max(static_cast<double>(of_engine ? op.inputs[0].shape[0].actual(s) : s.tokens), 1.0);
  return {tokens, std::max(static_cast<double>(attention_pairs(op, s)) / tokens, 1.0), heads_of_128(op)};
}

/// The product's rows, columns and depth: dgrad contracts N, wgrad contracts the tokens.
std::array<double, 3> gemm_size(const Op& op, const Sizes& s) {
  const Tensor& a = op.inputs[0];
  const Tensor& b = op.inputs[1];
  const auto m = static_cast<double>(a.shape[0].actual(s));
  const auto first = static_cast<double>(a.shape[1].actual(s));
  const auto other = static_cast<double>((is_linear(op.kind) ? b.shape[0] : b.shape[1]).actual(s));
  return op.kind == OpKind::linear_wgrad ? std::array{first, other, m} : std::array{m, other, first};
}

/// Output tiles that GEMM libraries choose among and the fraction of the large tile's rate that each sustains: a
/// smaller tile reads each operand more often. Rates are stated, after CUTLASS's published tile sweeps.
struct Tile {
  double rows, cols, rate;
};
constexpr Tile tiles[] = {{256, 128, 1.0}, {128, 128, 0.95}, {128, 64, 0.82}, {64, 64, 0.60}};

/// Few rows, as in decoding: operands change places, so that a tile is as narrow as the matrix instruction allows and
/// reads every weight once, and the depth is split where columns are too few to fill the SMs. Up to narrow_rows what is
/// left to wait for is memory; beyond, and up to two of the widest tiles, whole waves count.
constexpr double narrow_rows = 128, instruction_rows = 16, widest_tile = 256;
double narrow_fill(double m, double n, double units) {
  if (m > 2.0 * widest_tile) return 0.0;
  const double useful = m / (std::ceil(m / instruction_rows) * instruction_rows);
  const double waves = std::ceil(m / widest_tile) * std::ceil(n / tiles[1].rows) / units;
  return tiles[1].rate * useful * (m <= narrow_rows || waves < 1.0 ? 1.0 : waves / std::ceil(waves));
}

/// Fraction of the peak rate that an m x n output gets from `units` SMs: whole waves of the best tile, or narrow tiles.
double tile_fill(double m, double n, double units) {
  double best = narrow_fill(m, n, units);
  for (const Tile& t : tiles) {
    const double waves = std::ceil(m / t.rows) * std::ceil(n / t.cols) / units;
    const double useful = (m * n) / (std::ceil(m / t.rows) * t.rows * std::ceil(n / t.cols) * t.cols);
    best = std::max(best, t.rate * useful * waves / std::ceil(waves));
  }
  return best;
}

/// What a communication op's time follows from: its payload; of a recv what comes, of a send_recv the larger of its two
/// directions, which pass each other on the link.
double priced_bytes(const Op& op, const Sizes& s, const Places& places) {
  std::int64_t bytes = payload_bytes(op, s, places);
  if (op.kind == OpKind::recv || op.kind == OpKind::send_recv) bytes = std::max(bytes, op.outputs[0].bytes(s));
  return static_cast<double>(bytes);
}

}  // namespace

std::optional<Measurement> CostModel::measurement_of(const Plan& plan, Rank rank, const Op& op, const Sizes& s,
                                                     double seconds) const {
  const Places places = op.moves.empty() ? Places{} : places_of(plan, rank);
  Measurement m{.op = std::string(name_of(op.kind)), .dtype = DType::f32, .at = {1.0, 1.0, 1.0}, .seconds = seconds};
  const auto bytes = static_cast<double>(op_bytes(op, s, places));
  if (op.kind == OpKind::map || op.kind == OpKind::unmap) {
    if (plan.program(rank).section(op.section).space == Space::host) m.op += "_host";
    m.at[0] = static_cast<double>(op.map_end - op.map_begin);
  } else if (op.kind == OpKind::feed || op.kind == OpKind::fetch) {
    m.at[0] = bytes;
  } else if (plan.crosses_spaces(op)) {
    m.op = plan.stream(op.stream).kind == StreamKind::to_device ? "h2d" : "d2h";
    m.at[0] = static_cast<double>(op.outputs[0].bytes(s));
  } else if (is_communication(op.kind)) {
    const GroupShape shape = shape_of(plan.group_of(op.group, rank));
    m.at = {static_cast<double>(shape.ranks), static_cast<double>(shape.nodes),
            std::max(priced_bytes(op, s, places), 1.0)};
  } else if (is_product(op.kind)) {
    m.dtype = op.inputs[1].dtype;
    m.at = gemm_size(op, s);
  } else if (!is_memory(op.kind) && !is_event(op.kind)) {
    m.dtype = op.inputs.empty() ? DType::f32 : op.inputs[0].dtype;
    m.at[0] = std::max(bytes, 1.0);
    if (is_attention(op.kind)) m.at = attention_size(op, s);
    if (has_other_cache(op)) return std::nullopt;
  } else {
    return std::nullopt;  // order and booking cost nothing
  }
  if (m.at[0] <= 0.0 || m.at[1] <= 0.0 || m.at[2] <= 0.0) return std::nullopt;  // an empty micro-batch
  return m;
}

std::optional<std::array<double, 3>> CostModel::kernel_size(const Op& op, const Sizes& s) const {
  if (!is_product(op.kind)) return std::nullopt;
  return gemm_size(op, s);
}

void Correction::add(std::array<double, 3> at, double ratio) {
  Point p{{}, std::log(ratio)};
  for (std::size_t i = 0; i < 3; ++i) p.log_at[i] = std::log(std::max(at[i], 1e-30));
  points_.push_back(p);
}

double Correction::at(std::array<double, 3> where) const {
  if (points_.empty()) return 1.0;
  std::array<double, 3> log_where;
  for (std::size_t i = 0; i < 3; ++i) log_where[i] = std::log(std::max(where[i], 1e-30));
  double weights = 0.0, sum = 0.0;
  for (const Point& p : points_) {
    double d2 = 0.0;
    for (std::size_t i = 0; i < 3; ++i) {
      const double d = log_where[i] - p.log_at[i];
      d2 += d * d;
    }
    if (d2 < 1e-18) return std::exp(p.log_ratio);
    const double w = 1.0 / (d2 * d2);
    weights += w;
    sum += w * p.log_ratio;
  }
  return std::exp(sum / weights);
}

CostModel::CostModel(Hardware hardware, const ClusterSpec& cluster)
    : hardware_(std::move(hardware)),
      ranks_per_node_(std::max<std::int64_t>(cluster.ranks_per_node(), 1)),
      pod_nodes_(cluster.pod_nodes),
      topology_(cluster.network_topology),
      oversubscription_(std::max(cluster.oversubscription, 1.0)) {
  for (std::size_t t = 0; t < num_dtypes; ++t)
    peaks_[t] = hardware_.peak_flops(std::string(name_of(static_cast<DType>(t))));
  load_measurements(cluster);
}

double CostModel::gemm_seconds(double m, double n, double k, DType dtype) const {
  const auto size = static_cast<double>(size_of(dtype));
  return gemm_seconds(m, n, k, peak_flops(dtype), size * (m * k + n * k + m * n)) *
         correction(OpKind::linear, dtype, {m, n, k});
}

double CostModel::gemm_seconds(double m, double n, double k, double peak, double bytes) const {
  if (m <= 0.0 || n <= 0.0 || k <= 0.0) return 0.0;
  const GemmModel& g = hardware_.gemm;
  const double fill = g.units.value > 0.0 ? tile_fill(m, n, g.units.value) : 1.0;
  const double reached = g.efficiency.value * hardware_.sustained_clock.value;
  const double rate = std::max(peak, 1.0) * reached * fill * k / (k + g.half_k.value);
  return std::max(2.0 * m * n * k / rate * share_, memory_seconds(bytes));
}

/// Every expert with as many rows as the next: the balance that routers are trained for. Where there are fewer rows
/// than experts, each row meets an expert of its own.
double CostModel::grouped_seconds(const Op& op, double flops, double bytes) const {
  const ExpertMatrices m = expert_matrices(op);
  const auto n = static_cast<double>(m.n), k = static_cast<double>(m.k);
  const double rows = flops / (2.0 * n * k), experts = std::min(static_cast<double>(m.experts), rows);
  if (rows <= 0.0) return memory_seconds(bytes);
  const double each = rows / experts, peak = peak_flops(op.inputs[1].dtype);
  const bool of_weights = op.kind == OpKind::grouped_linear_wgrad || op.kind == OpKind::lora_up_wgrad,
             forward = op.kind == OpKind::grouped_linear || op.kind == OpKind::lora_down || op.kind == OpKind::lora_up;
  const double one = of_weights ? gemm_seconds(n, k, each, peak, bytes / experts)
                     : forward  ? gemm_seconds(each, n, k, peak, bytes / experts)
                                : gemm_seconds(each, k, n, peak, bytes / experts);
  return experts * one;
}

double CostModel::attention_seconds(double flops, double keys, double bytes, bool backward, double peak,
                                    AttentionKernel kernel) const {
  const bool flash2 = kernel == AttentionKernel::flash2 && hardware_.flash2.forward.value > 0.0;
  const AttentionModel& a = flash2 ? hardware_.flash2 : hardware_.attention;
  const double reached = (backward ? a.backward : a.forward).value * hardware_.sustained_clock.value;
  const double efficiency = reached * keys / (keys + a.half_keys.value);
  if (flops <= 0.0) return memory_seconds(bytes);
  return std::max(flops / (std::max(peak, 1.0) * std::max(efficiency, 1e-6)) * share_, memory_seconds(bytes));
}

double CostModel::memory_seconds(double bytes) const {
  return bytes / (std::max(hardware_.memory_bandwidth, 1.0) * hardware_.memory_efficiency.value) * share_;
}

double CostModel::host_copy_seconds(double bytes, OpKind kind) const {
  const double formula = hardware_.host_latency.value + bytes / std::max(hardware_.host_bandwidth.value, 1.0) * share_;
  const Correction& own = corrections_[static_cast<std::size_t>(kind)][static_cast<std::size_t>(DType::u8)];
  const bool driver = kind == OpKind::feed || kind == OpKind::fetch;
  return formula * (driver && !own.empty() ? own : host_).at({bytes, 1.0, 1.0});
}

double CostModel::map_seconds(double bytes, OpKind kind, Space space) const {
  const Correction& host = kind == OpKind::map ? host_map_ : host_unmap_;
  const std::array<double, 3> at = {std::max(bytes, 1.0), 1.0, 1.0};
  const bool measured = space == Space::host && !host.empty();
  return bytes / hardware_.map_bandwidth.value * (measured ? host.at(at) : correction(kind, DType::u8, at));
}

double CostModel::compute_seconds(const Op& op, const Sizes& s, const Places& places) const {
  const double flops = op_flops(op, s);
  const auto bytes = static_cast<double>(op_bytes(op, s, places));
  if (is_product(op.kind)) {
    const Tensor& b = op.inputs[1];
    const std::array<double, 3> size = gemm_size(op, s);
    return gemm_seconds(size[0], size[1], size[2], peak_flops(b.dtype), bytes) * correction(op.kind, b.dtype, size);
  }
  const DType dtype = op.inputs.empty() ? DType::f32 : op.inputs[0].dtype;
  if (const auto product = lora_product(op)) {
    const auto extent = [&](const Dim& d) { return static_cast<double>(d.actual(s)); };
    return gemm_seconds(extent(product->rows), extent(product->columns), extent(product->depth),
                        peak_flops(op.inputs[1].dtype), bytes) *
           correction(op.kind, dtype, {std::max(bytes, 1.0), 1.0, 1.0});
  }
  const auto keys_of_query = [&] {
    return std::max(static_cast<double>(attention_pairs(op, s)) / std::max<double>(static_cast<double>(s.tokens), 1.0),
                    1.0);
  };
  const bool grouped = is_grouped(op.kind) || adapts_experts(op);
  if (grouped || op.kind == OpKind::latent_attention) {
    // Measurements are by bytes: how many rows went to which expert is not among an op's coordinates, nor what an
    // engine makes again of latents.
    const Correction& measured = corrections_[static_cast<std::size_t>(op.kind)][static_cast<std::size_t>(dtype)];
    if (!measured.empty()) return memory_seconds(bytes) * measured.at({std::max(bytes, 1.0), 1.0, 1.0});
    return grouped ? grouped_seconds(op, flops, bytes)
                   : attention_seconds(flops, keys_of_query(), bytes, false, peak_flops(dtype));
  }
  if (is_attention(op.kind)) {
    return attention_seconds(flops, keys_of_query(), bytes, is_backward(op.kind), peak_flops(dtype)) *
           (has_other_cache(op) ? 1.0 : correction(op.kind, dtype, attention_size(op, s)));
  }
  // Without a known fp32 peak its memory traffic is what bounds a streaming kernel.
  const double peak = peak_flops(DType::f32);
  return std::max(memory_seconds(bytes), peak > 0.0 ? flops / peak * share_ : 0.0) *
         correction(op.kind, dtype, {std::max(bytes, 1.0), 1.0, 1.0});
}

std::bitset<max_sections> host_sections(const Program& program) {
  std::bitset<max_sections> out;
  for (std::size_t i = 0; i < program.sections.size(); ++i) out[i] = program.sections[i].space == Space::host;
  return out;
}

RankPlace CostModel::place_of(const Plan& plan, Rank rank) const {
  RankPlace out{places_of(plan, rank), {}, {}};
  for (std::size_t f = 0; f < plan.groups.size(); ++f)
    out.groups.push_back(shape_of(plan.group_of(static_cast<GroupId>(f), rank)));
  if (!plan.programs.empty()) out.on_host = host_sections(plan.program(rank));  // single ops are priced without one
  return out;
}

std::int64_t CostModel::op_nanoseconds(const Plan& plan, const RankPlace& rank, const Op& op, const Sizes& s) const {
  if (op.is_priced()) {
    const PricePoint p = op.price(s);
    return std::llround(1e9 *
                        std::min(p.seconds + p.seconds_per_pair * static_cast<double>(s.attention_pairs), most_price));
  }
  if (is_idle_round(op, s)) return 0;
  double seconds = 0.0;
  const Places& places = rank.places;
  switch (op.kind) {
    case OpKind::alloc:
    case OpKind::free:
    case OpKind::record:
    case OpKind::wait:
      return 0;
    case OpKind::map:
    case OpKind::unmap:
      seconds = map_seconds(static_cast<double>(op.map_end - op.map_begin), op.kind,
                            rank.on_host[static_cast<std::size_t>(op.section)] ? Space::host : Space::device);
      break;
    case OpKind::feed:
    case OpKind::fetch:
      seconds = host_copy_seconds(static_cast<double>(op_bytes(op, s, places)), op.kind);
      break;
    default:
      if (is_communication(op.kind)) {
        seconds = collective_seconds(op.kind, rank.groups.at(static_cast<std::size_t>(op.group)),
                                     priced_bytes(op, s, places));
      } else if (plan.crosses_spaces(op)) {
        seconds = host_copy_seconds(static_cast<double>(op.outputs[0].bytes(s)));
      } else if (plan.stream(op.stream).kind == StreamKind::host && hardware_.cores.value <= 0.0) {
        seconds = host_memory_seconds(static_cast<double>(op_bytes(op, s, places)));
      } else {
        seconds = hardware_.kernel_overhead.value + compute_seconds(op, s, places);
      }
  }
  seconds = std::min(seconds, most_price);
  HB_CHECK(std::isfinite(seconds) && seconds >= 0.0, "{} '{}' costs {} s", name_of(op.kind), op.name, seconds);
  // What takes any time at all takes a nanosecond: an op of none would have no span, and a run has one of it.
  return std::max<std::int64_t>(seconds > 0.0 ? 1 : 0, std::llround(seconds * 1e9));
}

double CostModel::correction(OpKind kind, DType dtype, std::array<double, 3> at) const {
  return corrections_[static_cast<std::size_t>(kind)][static_cast<std::size_t>(dtype)].at(at);
}

double CostModel::formula_seconds(const Measurement& m) const {
  const double size = static_cast<double>(size_of(m.dtype)), peak = peak_flops(m.dtype);
  const auto& at = m.at;
  if (is_gemm(m.op))
    return gemm_seconds(at[0], at[1], at[2], peak, size * (at[0] * at[2] + at[1] * at[2] + at[0] * at[1]));
  if (m.op == "h2d" || m.op == "d2h" || m.op == "feed" || m.op == "fetch") return host_copy_seconds(at[0]);
  if (is_mapping(m.op)) return at[0] / hardware_.map_bandwidth.value;
  for (int k = 0; k < num_op_kinds; ++k) {
    const auto kind = static_cast<OpKind>(k);
    if (m.op != name_of(kind)) continue;
    if (is_communication(kind)) {
      const auto ranks = static_cast<std::int64_t>(at[0]),
                 nodes = std::max<std::int64_t>(1, static_cast<std::int64_t>(at[1]));
      return collective_seconds(kind, {ranks, nodes, (ranks + nodes - 1) / nodes}, at[2]);
    }
    if (is_attention(kind)) {
      // A calibration run uses heads of 128 with one K and V head per four queries' (grouped-query attention). Decoding
      // reads the keys and values of every sequence: they are most of what it moves.
      const double pairs = at[0] * at[1], factor = is_backward(kind) ? 10.0 : 4.0, width = size * at[2] * 128.0;
      const double bytes =
          kind == OpKind::paged_attention ? width * (2.0 * at[0] + 2.0 * pairs / 4.0) : width * at[0] * 2.5;
      return attention_seconds(factor * pairs * at[2] * 128.0, at[1], bytes, is_backward(kind), peak);
    }
  }
  return memory_seconds(at[0]);
}

/// Turns measurements into corrections of the formulas. Compute kernels are measured with their start-up, which the
/// plan's ops pay on top of the formula, so it is taken off first.
void CostModel::load_measurements(const ClusterSpec& cluster) {
  std::array<std::array<Correction, num_dtypes>, num_op_kinds> loaded;
  Correction host, host_map, host_unmap;
  for (const Measurement& m : hardware_.measurements) {
    if (m.op == "launch") {
      hardware_.kernel_overhead = {m.seconds, "measured: " + hardware_.source};
      continue;
    }
    const double formula = formula_seconds(m);
    if (formula <= 0.0) continue;
    if (m.op == "h2d" || m.op == "d2h") {
      host.add({m.at[0], 1.0, 1.0}, m.seconds / formula);
      continue;
    }
    if (m.op == "map_host" || m.op == "unmap_host") {
      (m.op == "map_host" ? host_map : host_unmap).add({m.at[0], 1.0, 1.0}, m.seconds / formula);
      continue;
    }
    for (int k = 0; k < num_op_kinds; ++k) {
      const auto kind = static_cast<OpKind>(k);
      if (m.op != name_of(kind)) continue;
      const bool moves = is_communication(kind) || kind == OpKind::map || kind == OpKind::unmap ||
                         kind == OpKind::feed || kind == OpKind::fetch;
      const double seconds =
          moves ? m.seconds : std::max(m.seconds - hardware_.kernel_overhead.value, m.seconds * 0.05);
      const DType dtype = moves ? DType::u8 : m.dtype;
      loaded[static_cast<std::size_t>(k)][static_cast<std::size_t>(dtype)].add(m.at, seconds / formula);
    }
  }
  // The backward products of a linear layer, and a product with others beside it, run the same kernels: without
  // measurements of their own they take its.
  const auto linear = static_cast<std::size_t>(OpKind::linear);
  for (OpKind kind : {OpKind::linear_dgrad, OpKind::linear_wgrad, OpKind::fused_linear})
    for (std::size_t t = 0; t < num_dtypes; ++t)
      if (auto& own = loaded[static_cast<std::size_t>(kind)][t]; own.empty()) own = loaded[linear][t];
  corrections_ = std::move(loaded);
  host_ = std::move(host), host_map_ = std::move(host_map), host_unmap_ = std::move(host_unmap);
  const auto ranks = static_cast<double>(cluster.ranks_per_device);
  const auto measured = static_cast<double>(std::max<std::int64_t>(hardware_.measured_ranks_per_device, 1));
  // With cores, a price is that of the cores which one rank's kernels use: waiting for a core is the simulator's part.
  const double cores = hardware_.cores.value;
  share_ = cores > 0.0 ? std::max(1.0, cores / measured) / std::max(1.0, cores / ranks) : ranks / measured;
  share_ = std::max(1.0, share_);
}

}  // namespace hotbunk
