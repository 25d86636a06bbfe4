// The rules of catalogue.h, one table of kinds and what each asks of its tensors: long because it has all of them.
#include "graph/catalogue.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <span>

#include "base/rounding.h"

namespace hotbunk {
namespace {

/// How an op's FLOPs follow from its tensors.
enum class FlopRule : std::uint8_t {
  none,
  gemm,
  grouped_gemm,
  lora,
  attention,
  attention_backward,
  latent_attention,
  per_element
};

struct Entry {
  OpKind kind;
  int min_inputs, max_inputs, min_outputs, max_outputs;  // -1: any number
  FlopRule rule;
  double flops_per_element;  // of the first output; of attention: of a pair and of a number of a head, all of one width
};

constexpr int any = -1;
// Per-element counts are arithmetic operations in the formulas of the kernels (transcendentals counted as one).
constexpr std::array<Entry, num_op_kinds> entries = {{
    {OpKind::alloc, 0, 0, 0, 0, FlopRule::none, 0},
    {OpKind::free, 0, 0, 0, 0, FlopRule::none, 0},
    {OpKind::map, 0, 0, 0, 0, FlopRule::none, 0},
    {OpKind::unmap, 0, 0, 0, 0, FlopRule::none, 0},
    {OpKind::record, 0, 0, 0, 0, FlopRule::none, 0},
    {OpKind::wait, 0, 0, 0, 0, FlopRule::none, 0},
    {OpKind::feed, 0, 0, 1, 1, FlopRule::none, 0},
    {OpKind::fetch, 1, 1, 0, 0, FlopRule::none, 0},
    {OpKind::copy, 1, 1, 1, 1, FlopRule::none, 0},
    {OpKind::copy_boxes, 1, any, 1, any, FlopRule::none, 0},
    {OpKind::hash_boxes, 1, any, 1, 1, FlopRule::none, 0},
    {OpKind::zero, 0, 0, 1, 1, FlopRule::none, 0},
    {OpKind::cast, 1, 1, 1, 1, FlopRule::none, 0},
    {OpKind::all_gather, 1, 1, 1, 1, FlopRule::none, 0},
    {OpKind::reduce_scatter, 1, 1, 1, 1, FlopRule::none, 0},
    {OpKind::all_reduce, 1, 1, 1, 1, FlopRule::none, 0},
    {OpKind::broadcast, 1, 1, 1, 1, FlopRule::none, 0},
    {OpKind::all_to_all, 1, 2, 1, 1, FlopRule::none, 0},
    {OpKind::send, 1, 1, 0, 0, FlopRule::none, 0},
    {OpKind::recv, 0, 0, 1, 1, FlopRule::none, 0},
    {OpKind::send_recv, 1, 1, 1, 1, FlopRule::none, 0},
    {OpKind::barrier, 0, any, 0, any, FlopRule::none, 0},
    {OpKind::peer_copy, 1, 1, 1, any, FlopRule::none, 0},
    {OpKind::embedding, 2, 2, 1, 1, FlopRule::none, 0},
    {OpKind::embedding_backward, 2, 2, 1, 1, FlopRule::none, 0},
    {OpKind::linear, 2, 3, 1, 1, FlopRule::gemm, 0},
    {OpKind::linear_dgrad, 2, 2, 1, 1, FlopRule::gemm, 0},
    {OpKind::linear_wgrad, 2, 2, 1, 2, FlopRule::gemm, 0},
    {OpKind::rms_norm, 2, 3, 2, 3, FlopRule::per_element, 5},
    {OpKind::rms_norm_backward, 4, 4, 1, 2, FlopRule::per_element, 10},
    {OpKind::qk_norm, 3, 3, 2, 2, FlopRule::per_element, 5},
    {OpKind::qk_norm_backward, 5, 5, 1, 3, FlopRule::per_element, 10},
    {OpKind::rope, 2, 2, 1, 1, FlopRule::per_element, 3},
    {OpKind::rope_backward, 2, 2, 1, 1, FlopRule::per_element, 3},
    {OpKind::attention, 2, 2, 2, 2, FlopRule::attention, 4},
    {OpKind::attention_backward, 5, 5, 1, 1, FlopRule::attention_backward, 10},
    {OpKind::kv_write, 2, 2, 1, 1, FlopRule::none, 0},
    {OpKind::paged_attention, 5, 5, 1, 2, FlopRule::attention, 4},
    {OpKind::swiglu, 1, 1, 1, 1, FlopRule::per_element, 4},
    {OpKind::swiglu_backward, 2, 2, 1, 1, FlopRule::per_element, 5},
    {OpKind::add, 2, 2, 1, 1, FlopRule::per_element, 1},
    {OpKind::gather_rows, 2, 2, 1, 1, FlopRule::none, 0},
    {OpKind::log_prob, 2, 2, 3, 3, FlopRule::none, 0},
    {OpKind::log_prob_backward, 4, 4, 1, 1, FlopRule::per_element, 4},
    {OpKind::vocab_stats, 2, 2, 1, 1, FlopRule::none, 0},
    {OpKind::vocab_log_prob, 2, 2, 3, 3, FlopRule::none, 0},
    {OpKind::token_loss, 6, 6, 2, 2, FlopRule::per_element, 20},
    {OpKind::sum_squares, 1, 1, 1, 1, FlopRule::none, 0},
    {OpKind::clip_coefficient, 1, 1, 2, 2, FlopRule::none, 0},
    {OpKind::adamw, 3, 3, 3, 3, FlopRule::per_element, 14},
    {OpKind::sample, 2, 2, 2, 2, FlopRule::none, 0},
    {OpKind::route, 1, 2, 2, 2, FlopRule::none, 0},
    {OpKind::route_backward, 3, 3, 1, 1, FlopRule::per_element, 5},
    {OpKind::expert_sort, 1, 1, 2, 2, FlopRule::none, 0},
    {OpKind::dispatch, 2, 2, 1, 1, FlopRule::none, 0},
    {OpKind::dispatch_backward, 2, 2, 1, 1, FlopRule::none, 0},
    {OpKind::grouped_linear, 3, 4, 1, 1, FlopRule::grouped_gemm, 0},
    {OpKind::grouped_linear_dgrad, 3, 3, 1, 1, FlopRule::grouped_gemm, 0},
    {OpKind::grouped_linear_wgrad, 3, 3, 1, 2, FlopRule::grouped_gemm, 0},
    {OpKind::combine, 3, 4, 1, 1, FlopRule::none, 0},
    {OpKind::combine_backward, 4, 4, 2, 2, FlopRule::per_element, 3},
    {OpKind::split_heads, 1, 1, 1, 1, FlopRule::none, 0},
    {OpKind::merge_heads, 1, 1, 1, 1, FlopRule::none, 0},
    {OpKind::add_bias, 2, 2, 1, 1, FlopRule::per_element, 1},
    {OpKind::geglu, 1, 1, 1, 1, FlopRule::per_element, 9},
    {OpKind::geglu_backward, 2, 2, 1, 1, FlopRule::per_element, 9},
    {OpKind::softcap, 1, 1, 1, 1, FlopRule::per_element, 3},
    {OpKind::layer_norm, 3, 4, 2, 3, FlopRule::per_element, 8},
    {OpKind::layer_norm_backward, 4, 4, 1, 3, FlopRule::per_element, 14},
    {OpKind::gelu, 1, 1, 1, 1, FlopRule::per_element, 8},
    {OpKind::gelu_backward, 2, 2, 1, 1, FlopRule::per_element, 8},
    {OpKind::take_kv, 1, 1, 1, 1, FlopRule::none, 0},
    {OpKind::merge_qkv, 2, 3, 1, 1, FlopRule::none, 0},
    {OpKind::context_attention, 3, 3, 2, 2, FlopRule::attention, 4},
    {OpKind::context_attention_backward, 6, 6, 2, 2, FlopRule::attention_backward, 10},
    {OpKind::expert_arrivals, 1, 1, 2, 2, FlopRule::none, 0},
    {OpKind::lora_down, 2, 3, 1, 1, FlopRule::lora, 0},
    {OpKind::lora_up, 2, 3, 1, 1, FlopRule::lora, 0},
    {OpKind::lora_up_dgrad, 2, 3, 1, 1, FlopRule::lora, 0},
    {OpKind::lora_up_wgrad, 2, 3, 1, 1, FlopRule::lora, 0},
    {OpKind::lora_merge, 3, 3, 1, 1, FlopRule::lora, 0},
    {OpKind::latent_norm, 3, 3, 3, 3, FlopRule::per_element, 5},
    {OpKind::latent_norm_backward, 6, 6, 1, 2, FlopRule::per_element, 10},
    {OpKind::latent_heads, 3, 3, 1, 1, FlopRule::none, 0},
    {OpKind::latent_heads_backward, 1, 1, 3, 3, FlopRule::none, 0},
    {OpKind::latent_write, 3, 3, 1, 1, FlopRule::none, 0},
    {OpKind::latent_attention, 6, 6, 1, 2, FlopRule::latent_attention, 0},
    {OpKind::attention_sinks, 3, 3, 2, 2, FlopRule::per_element, 1},
    {OpKind::attention_sinks_backward, 4, 4, 1, 1, FlopRule::none, 0},
    {OpKind::clamped_swiglu, 1, 1, 1, 1, FlopRule::per_element, 8},
    {OpKind::clamped_swiglu_backward, 2, 2, 1, 1, FlopRule::per_element, 8},
    {OpKind::copy_sort, 2, 2, 5, 5, FlopRule::none, 0},
    {OpKind::copy_arrivals, 3, 3, 3, 3, FlopRule::none, 0},
    {OpKind::expert_counts, 2, 2, 1, 1, FlopRule::none, 0},
    {OpKind::router_loss, 5, 5, 2, 2, FlopRule::per_element, 12},
    {OpKind::priced, 0, any, 0, any, FlopRule::none, 0},
    {OpKind::prepack, 1, 1, 1, 1, FlopRule::none, 0},
    {OpKind::fused_linear, 2, 5, 1, 2, FlopRule::gemm, 0},
}};

constexpr bool in_order() {
  for (int i = 0; i < num_op_kinds; ++i)
    if (static_cast<int>(entries[static_cast<std::size_t>(i)].kind) != i) return false;
  return true;
}
static_assert(in_order(), "one entry per kind, in the order of OpKind");

const Entry& entry(OpKind k) { return entries[static_cast<std::size_t>(k)]; }

/// Rows of what is dispatched to experts: one for each choice of each token.
std::int64_t routed_rows(const Tensor& t, const Sizes& s) {
  std::int64_t rows = 1;
  for (std::size_t d = 0; d + 1 < t.rank; ++d) rows *= t.shape[d].actual(s);
  return rows;
}

/// Numbers of all heads that attention's products go over for a pair, in the mean of its products: of queries and keys,
/// and of values, of which forward has one product each, backward three and two.
double head_width(const Op& op, bool backward) {
  const auto keys = static_cast<double>(op.integer(Attr::head_dim));
  const auto values = static_cast<double>(op.integer(Attr::value_dim, op.integer(Attr::head_dim)));
  return static_cast<double>(op.integer(Attr::heads)) *
         (backward ? (3.0 * keys + 2.0 * values) / 5.0 : (keys + values) / 2.0);
}

/// Tokens in the pool that an engine's attention reads: every sequence's context once. A decode step sees one query per
/// sequence, so the visible pairs are the context; for a prefill chunk pairs / tokens is the mean context of a query.
std::int64_t context_tokens(const Op& op, const Sizes& s) {
  const std::int64_t pairs = attention_pairs(op, s), queries = op.inputs[0].shape[0].actual(s);
  return queries <= s.seqs || queries == 0 ? pairs : pairs / queries * s.seqs;
}

/// Bytes of the K and V rows that paged attention reads.
std::int64_t paged_kv_bytes(const Op& op, const Sizes& s) {
  const std::int64_t row = 2 * op.integer(Attr::kv_heads) * op.integer(Attr::head_dim) * size_of(op.inputs[1].dtype);
  return context_tokens(op, s) * row;
}

std::int64_t boxes_bytes(const Op& op, const Places& places) {
  std::int64_t bytes = 0;
  for (const Move& move : op.moves) {
    const DType from = op.inputs[static_cast<std::size_t>(move.from.tensor)].dtype;
    const bool writes = op.kind != OpKind::hash_boxes;
    const std::int64_t written = writes ? size_of(op.outputs[static_cast<std::size_t>(move.to.tensor)].dtype) : 0;
    bytes += moved_elements(move, places).all * (size_of(from) + written);
  }
  return bytes;
}

std::string count_error(const char* what, std::size_t found, int least, int most) {
  if (static_cast<int>(found) >= least && (most == any || static_cast<int>(found) <= most)) return "";
  return fmt::format("has {} {}, expected {}{}", found, what, least,
                     most == any ? " or more" : (most == least ? "" : fmt::format(" to {}", most)));
}

/// The columns that a forward product leaves.
Dim product_columns(const Op& op) {
  Dim columns = op.inputs[1].shape[0];
  if (op.has(Attr::gate)) columns.size /= 2;
  return columns;
}

std::string check_gemm(const Op& op) {
  const Tensor& a = op.inputs[0];
  const Tensor& b = op.inputs[1];
  const Tensor& c = op.outputs[0];
  if (a.rank != 2 || b.rank != 2 || c.rank != 2) return "needs matrices";
  const bool fits = is_linear(op.kind)
                        ? a.shape[1] == b.shape[1] && c.shape[0] == a.shape[0] && c.shape[1] == product_columns(op)
                    : op.kind == OpKind::linear_dgrad
                        ? a.shape[1] == b.shape[0] && c.shape[0] == a.shape[0] && c.shape[1] == b.shape[1]
                        : a.shape[0] == b.shape[0] && c.shape[0] == a.shape[1] && c.shape[1] == b.shape[1];
  return fits ? ""
              : fmt::format("shapes do not multiply: {}x{}, {}x{} -> {}x{}", a.shape[0].size, a.shape[1].size,
                            b.shape[0].size, b.shape[1].size, c.shape[0].size, c.shape[1].size);
}

/// A linear, and beside it what its attributes and second output say.
std::string check_fused(const Op& op) {
  for (const Attr a : {Attr::gate, Attr::residual})
    if (op.integer(a, 1) != 1) return fmt::format("has {} {}: 1 where it is there", name_of(a), op.integer(a));
  if (auto bad = check_gemm(op); !bad.empty()) return bad;
  const std::size_t said = 2 + (op.has(Attr::eps) ? 1 : 0) + (op.outputs.size() > 1 || op.has(Attr::residual) ? 1 : 0);
  if (op.num_operands() != said && op.num_operands() != said + 1)  // with a bias
    return fmt::format("has {} inputs, where its attributes and outputs say {}, or {} with a bias", op.num_operands(),
                       said, said + 1);
  if (op.has(Attr::offset) && !op.has(Attr::eps)) return "offsets the weights of no norm";
  if (op.outputs.size() > 1 && !op.has(Attr::eps)) return "has a sum that nothing norms";
  if (op.has(Attr::residual) && (op.outputs.size() > 1 || op.has(Attr::gate)))
    return "adds to its product, and to its input or to a gate as well";
  const Tensor &x = op.inputs[0], &w = op.inputs[1], &y = op.outputs[0];
  if (op.has(Attr::gate) && w.shape[0].size % 2 != 0) return fmt::format("gates {} columns", w.shape[0].size);
  const ProductSides sides = product_sides(op);
  const auto is_as = [&](int i, const Tensor& like) {
    const Tensor& t = op.inputs[static_cast<std::size_t>(i)];
    return t.rank == 2 && t.shape == like.shape && t.dtype == like.dtype;
  };
  const auto is_wide = [&](int i, const Dim& width) {
    const Tensor& t = op.inputs[static_cast<std::size_t>(i)];
    return t.rank == 1 && t.shape[0] == width;
  };
  const bool rounds = sides.gate || sides.residual >= 0;  // its product, to the type of x
  const bool fits = (sides.bias < 0 || is_wide(sides.bias, w.shape[0])) &&
                    (sides.norm < 0 || is_wide(sides.norm, x.shape[1])) &&
                    (sides.delta < 0 || (is_as(sides.delta, x) && op.outputs[1].rank == 2 &&
                                         op.outputs[1].shape == x.shape && op.outputs[1].dtype == x.dtype)) &&
                    (sides.residual < 0 || is_as(sides.residual, y)) && (!rounds || y.dtype == x.dtype);
  return fits ? "" : "has tensors beside its product that do not fit it";
}

/// Rows of experts on both sides, and of each expert a matrix of its adapter.
std::string check_lora_of_experts(const Op& op) {
  const bool wgrad = op.kind == OpKind::lora_up_wgrad;
  const Tensor &rows = op.inputs[0], &other = wgrad ? op.inputs[1] : op.outputs[0],
               &matrices = wgrad ? op.outputs[0] : op.inputs[1], &offsets = op.inputs[2];
  if (rows.rank < 2 || other.rank != rows.rank || matrices.rank != 2 || offsets.rank != 1)
    return "needs rows of experts, their adapters' matrices one below the other and their offsets";
  const std::int64_t ranks = op.integer(Attr::ranks, 0), segments = offsets.shape[0].size - 1;
  if (ranks < 1 || segments < ranks || segments % ranks != 0)
    return fmt::format("has {} segments of {} ranks", segments, ranks);
  const auto last = [](const Tensor& t) { return t.shape[static_cast<std::size_t>(t.rank) - 1].size; };
  const ExpertMatrices m = expert_matrices(op);
  const std::int64_t column = op.integer(Attr::column, 0);
  const auto inside = [&](const Tensor& wide) { return column >= 0 && column + m.n <= last(wide); };
  const bool fits = matrices.shape[0].size == m.experts * m.n &&
                    std::equal(rows.shape.begin(), rows.shape.begin() + rows.rank - 1, other.shape.begin()) &&
                    (op.kind == OpKind::lora_down ? last(rows) == m.k && last(other) == m.n
                     : op.kind == OpKind::lora_up ? last(rows) == m.k && inside(other)
                                                  : inside(rows) && last(other) == m.k);
  return fits ? "" : "has matrices of experts' adapters that do not multiply";
}

std::string check_lora(const Op& op) {
  const bool scales = op.kind == OpKind::lora_down || op.kind == OpKind::lora_up_dgrad || op.kind == OpKind::lora_merge;
  if (scales && !op.has(Attr::factor)) return "lacks attribute factor";
  if (adapts_experts(op)) return check_lora_of_experts(op);
  return lora_product(op)->fits ? "" : "has matrices of an adapter that do not multiply";
}

/// The matrices of grouped products and their gradients, and rows and width of what is dispatched.
std::string check_grouped(const Op& op) {
  const Tensor& weights = op.kind == OpKind::grouped_linear_wgrad ? op.outputs[0] : op.inputs[1];
  const Tensor& other = op.kind == OpKind::grouped_linear_wgrad ? op.inputs[1] : op.outputs[0];
  const Tensor &rows = op.inputs[0], &offsets = op.inputs[2];
  if (rows.rank < 2 || other.rank != rows.rank || weights.rank != 2 || offsets.rank != 1)
    return "needs rows of experts, their matrices one below the other and their offsets";
  const auto last = [](const Tensor& t) { return t.shape[static_cast<std::size_t>(t.rank) - 1].size; };
  const std::int64_t segments = offsets.shape[0].size - 1;
  const bool forward = op.kind == OpKind::grouped_linear;
  const std::int64_t n = last(forward ? other : rows), k = last(forward ? rows : other);
  const std::int64_t experts = n > 0 ? weights.shape[0].size / n : 0;
  const bool has_bias =
      forward ? op.num_operands() > 3 : op.kind == OpKind::grouped_linear_wgrad && op.outputs.size() > 1;
  if (has_bias && experts > 0) {
    const Tensor& bias = forward ? op.inputs[3] : op.outputs[1];
    const std::int64_t share = bias.rank == 1 ? bias.shape[0].size / experts : 0;
    if (share < 1 || bias.shape[0].size != experts * share || n % share != 0 || (share != n && op.group < 0))
      return fmt::format("has a bias of {} for {} experts of {} columns", bias.rank == 1 ? bias.shape[0].size : 0,
                         experts, n);
  }
  const bool fits = experts > 0 && segments > 0 && segments % experts == 0 && weights.shape[0].size == experts * n &&
                    weights.shape[1].size == k &&
                    std::equal(rows.shape.begin(), rows.shape.begin() + rows.rank - 1, other.shape.begin());
  return fits ? ""
              : fmt::format("shapes do not multiply: {} segments of {}x{} in {}x{}", segments, n, k,
                            weights.shape[0].size, weights.shape[1].size);
}

/// Rows of a rank's own tokens on one side, rows that came on the other, as wide; and what each rank sends.
bool check_routed_exchange(const Op& op) {
  const Tensor &own = own_tokens_rows(op), &other = &own == &op.inputs[0] ? op.outputs[0] : op.inputs[0],
               &offsets = op.inputs[1];
  return own.rank == 3 && other.rank == 2 && (op.integer(Attr::rounds, 1) > 1 || other.shape[0].begin == 0) &&
         own.dtype == other.dtype && own.shape[2] == other.shape[1] && offsets.rank == 2 &&
         offsets.dtype == DType::i32 && (offsets.shape[1].size - 1) % offsets.shape[0].size == 0;
}

/// Groups that divide the experts, of which those taken hold a token's choices; and a bias for each expert.
bool has_routing_groups(const Op& op) {
  const std::int64_t experts = op.inputs[0].shape[1].size, groups = op.integer(Attr::groups, 1),
                     taken = op.integer(Attr::taken_groups, 1);
  if (groups < 1 || taken < 1 || taken > groups || experts % groups != 0) return false;
  const bool has_bias = op.num_operands() > 1;
  if (has_bias && (op.inputs[1].rank != 1 || op.inputs[1].shape[0].size != experts)) return false;
  return taken * (experts / groups) >= op.outputs[0].shape[1].size &&
         (groups == 1 || !has_bias || experts / groups > 1);
}

/// One of ranks to each of which a token goes once, and the other of rows that such copies have.
bool check_copies(const Op& op) {
  const auto is_count = [](const Tensor& t) { return t.capacity() == 1 && t.dtype == DType::i64; };
  const auto numbers = [](std::span<const Tensor> tensors, std::initializer_list<int> ranks) {
    return std::ranges::equal(tensors, ranks,
                              [](const Tensor& t, int rank) { return t.dtype == DType::i32 && t.rank == rank; });
  };
  const std::span inputs(op.inputs.data(), static_cast<std::size_t>(op.num_operands()));
  if (op.kind == OpKind::copy_sort) {
    if (!numbers(inputs, {2, 1}) || !numbers(std::span(op.outputs).first(4), {1, 2, 3, 1})) return false;
    const std::span<const Dim> rows = op.inputs[0].shape;
    const auto &copies = op.outputs[1].shape, &slots = op.outputs[2].shape;
    const std::int64_t ranks = op.outputs[3].shape[0].size - 1;
    return ranks > 0 && (op.inputs[1].shape[0].size - 1) % ranks == 0 && slots[0] == rows[0] && slots[1] == rows[1] &&
           slots[2].size == 1 && copies[0] == rows[0] && copies[1].size == std::min(ranks, rows[1].size) &&
           op.outputs[0].shape[0].size >= rows[0].size * copies[1].size && is_count(op.outputs[4]);
  }
  if (op.group < 0 || !numbers(inputs, {2, 2, 1}) || !numbers(std::span(op.outputs).first(2), {1, 2})) return false;
  const std::int64_t ranks = op.inputs[0].shape[0].size;
  return op.inputs[0].shape[1].size == ranks + 1 && op.inputs[1].shape[1].size == 1 &&
         (op.inputs[2].shape[0].size - 1) % ranks == 0 && op.outputs[0].shape[0] == op.inputs[1].shape[0] &&
         op.outputs[1].shape[1].size > 0 && is_count(op.outputs[2]);
}

/// Choices of tokens, and where their rows lie.
std::string check_routed(const Op& op) {
  const auto same = [](const Tensor& a, const Tensor& b) { return a.rank == b.rank && a.shape == b.shape; };
  const auto leading = [](const Tensor& choices, const Tensor& routed) {
    return choices.rank == 2 && routed.rank == 3 && choices.shape[0] == routed.shape[0] &&
           choices.shape[1] == routed.shape[1];
  };
  const auto row = [](const Tensor& t) { return t.shape[static_cast<std::size_t>(t.rank) - 1]; };
  const auto parts_of = [](const Tensor& rows, const Tensor& choices) {
    return rows.shape[1].size / choices.shape[1].size;
  };
  const auto in_parts = [](const Tensor& rows, const Tensor& choices) {  // a row for each part of a choice
    return rows.rank == 2 && choices.rank == 2 && rows.shape[0] == choices.shape[0] && choices.shape[1].size > 0 &&
           rows.shape[1].size % choices.shape[1].size == 0;
  };
  bool fits = true;
  switch (op.kind) {
    case OpKind::route:
      fits = same(op.outputs[0], op.outputs[1]) && op.outputs[0].rank == 2 && op.inputs[0].rank == 2 &&
             op.outputs[0].shape[1].size <= op.inputs[0].shape[1].size && has_routing_groups(op);
      break;
    case OpKind::route_backward:
      fits = same(op.inputs[0], op.inputs[2]) && same(op.inputs[1], op.outputs[0]) && op.inputs[1].rank == 2;
      break;
    case OpKind::expert_sort:
      fits = in_parts(op.outputs[0], op.inputs[0]) && op.outputs[1].rank == 1 && op.outputs[1].shape[0].size > 1 &&
             (!op.has(Attr::tp) || op.group >= 0) && op.integer(Attr::groups, 1) > 0 &&
             op.integer(Attr::ranks, 1) > 0 && (op.outputs[1].shape[0].size - 1) % op.integer(Attr::groups, 1) == 0 &&
             op.integer(Attr::groups, 1) * op.integer(Attr::tp, 1) % parts_of(op.outputs[0], op.inputs[0]) == 0;
      break;
    case OpKind::all_to_all:
      fits = !is_routed(op) || check_routed_exchange(op);
      break;
    case OpKind::expert_arrivals:
      fits = op.group >= 0 && op.inputs[0].rank == 2 && op.outputs[0].rank == 1 && op.outputs[1].capacity() == 1 &&
             op.outputs[1].dtype == DType::i64 && op.inputs[0].shape[1] == op.outputs[0].shape[0] &&
             (op.outputs[0].shape[0].size - 1) % op.inputs[0].shape[0].size == 0;
      break;
    case OpKind::copy_sort:
    case OpKind::copy_arrivals:
      fits = check_copies(op);
      break;
    case OpKind::expert_counts:
      fits = op.inputs[0].rank == 2 && op.inputs[1].rank == 1 && op.inputs[0].shape[0] == op.inputs[1].shape[0] &&
             op.outputs[0].rank == 2 && op.outputs[0].dtype == DType::f32;
      break;
    case OpKind::router_loss:
      if (!op.has(Attr::factor) || !op.has(Attr::z_factor)) return "lacks attribute factor or z_factor";
      fits = op.outputs[0] == op.inputs[0] && same(op.inputs[0], op.inputs[1]) && op.inputs[1].rank == 2 &&
             op.inputs[1].dtype == DType::f32 && op.inputs[2].rank == 2 && row(op.inputs[2]) == row(op.inputs[1]) &&
             same(op.inputs[3], op.inputs[4]) && op.inputs[3].rank == 1 &&
             op.inputs[3].shape[0] == op.inputs[1].shape[0] && op.integer(Attr::top_k, 1) > 0;
      break;
    case OpKind::dispatch:
      fits = leading(op.inputs[1], op.outputs[0]) && row(op.inputs[0]) == row(op.outputs[0]);
      break;
    case OpKind::dispatch_backward:
      fits = (leading(op.inputs[1], op.inputs[0]) || (op.inputs[0].rank == 2 && op.inputs[1].rank == 2)) &&
             op.inputs[1].shape[0] == op.outputs[0].shape[0] && row(op.inputs[0]) == row(op.outputs[0]);
      break;
    case OpKind::combine:
      fits = leading(op.inputs[1], op.inputs[0]) && in_parts(op.inputs[1], op.inputs[2]) &&
             row(op.inputs[0]) == row(op.outputs[0]) && (op.num_operands() < 4 || same(op.inputs[3], op.outputs[0]));
      break;
    case OpKind::combine_backward:
      fits = leading(op.inputs[2], op.inputs[1]) && in_parts(op.inputs[2], op.inputs[3]) &&
             same(op.inputs[1], op.outputs[0]) && same(op.inputs[3], op.outputs[1]) &&
             row(op.inputs[0]) == row(op.inputs[1]);
      break;
    default:
      break;
  }
  return fits ? "" : "has tensors that do not fit one another";
}

std::string check_bias(const Op& op) {
  const Tensor &x = op.inputs[0], &bias = op.inputs[1];
  return x == op.outputs[0] && x.rank == 2 && bias.rank == 1 && bias.shape[0] == x.shape[1]
             ? ""
             : "needs rows to add to and one bias for each of their columns";
}

/// A norm of rows, with a weight and a bias of their width.
std::string check_layer_norm(const Op& op) {
  const bool backward = op.kind == OpKind::layer_norm_backward;
  const Tensor &x = op.inputs[backward ? 1 : 0], &rstd = backward ? op.inputs[3] : op.outputs[1];
  const auto as_wide = [&](const Tensor& t) { return t.rank == 1 && t.shape[0] == x.shape[1]; };
  const auto same = [&](const Tensor& t) { return t.rank == 2 && t.shape == x.shape; };
  bool fits = x.rank == 2 && rstd.rank == 1 && rstd.shape[0] == x.shape[0] && same(op.outputs[0]);
  if (backward) {
    const bool frozen = op.outputs.size() == 1;  // neither weight nor bias trains
    fits = fits && same(op.inputs[0]) && as_wide(op.inputs[2]) &&
           (frozen || (op.outputs.size() == 3 && as_wide(op.outputs[1]) && as_wide(op.outputs[2])));
  } else {
    const bool adds = op.num_operands() > 3;
    fits = fits && as_wide(op.inputs[1]) && as_wide(op.inputs[2]) && adds == (op.outputs.size() > 2) &&
           (!adds || (same(op.inputs[3]) && same(op.outputs[2])));
  }
  return fits ? "" : "needs rows, and a weight and a bias for each of their columns";
}

/// An embedding's table (or its gradient) has a row for each id that it answers for.
std::string check_table(const Op& op, const Tensor& table) {
  const std::int64_t ids = op.integer(Attr::vocab_end, 0) - op.integer(Attr::vocab_begin, 0);
  return table.rank > 0 && table.shape[0].size >= ids
             ? ""
             : fmt::format("has {} rows for {} ids", table.rank > 0 ? table.shape[0].size : 0, ids);
}

/// Logits of a part of the vocabulary have a column for each id of it.
std::string check_columns(const Op& op, const Tensor& logits) {
  if (!op.has(Attr::vocab_stride)) return "has the logits of no part of a vocabulary";
  const std::int64_t ids = op.integer(Attr::vocab_end, 0) - op.integer(Attr::vocab_begin, 0);
  return logits.rank == 2 && logits.shape[1].size >= ids
             ? ""
             : fmt::format("has {} columns for {} ids", logits.rank == 2 ? logits.shape[1].size : 0, ids);
}

/// Rows with all heads, and the same heads cut into parts.
std::string check_head_parts(const Op& op, const Tensor& whole, const Tensor& parts) {
  for (Attr a : {Attr::heads, Attr::kv_heads, Attr::head_dim})
    if (!op.has(a)) return fmt::format("lacks attribute {}", name_of(a));
  if (whole.rank != 2 || parts.rank != 3 || parts.shape[0].extent != fixed_extent || parts.shape[0].size < 1)
    return "needs rows of heads and parts of them";
  const std::int64_t a = op.integer(Attr::heads), k = op.integer(Attr::kv_heads), d = op.integer(Attr::head_dim),
                     count = parts.shape[0].size;
  if (a < 1 || k < 0 || d < 1) return fmt::format("has {} heads and {} KV heads of {}", a, k, d);
  if (a % count != 0) return fmt::format("cuts {} heads into {} parts", a, count);
  if (k > 0 && k % count != 0 && count % k != 0) return fmt::format("cuts {} KV heads into {} parts", k, count);
  const std::int64_t of_kv = d + op.integer(Attr::value_dim, d), all = a * d + k * of_kv;
  const std::int64_t of_part = a / count * d + (k > 0 ? std::max<std::int64_t>(1, k / count) : 0) * of_kv;
  const bool fits = whole.shape[1] == Dim{all, fixed_extent, 0} && parts.shape[2] == Dim{of_part, fixed_extent, 0} &&
                    whole.shape[0] == parts.shape[1];
  return fits ? ""
              : fmt::format("has rows of {} and {} parts of {} for heads that take {} and {}", whole.shape[1].size,
                            count, parts.shape[2].size, all, of_part);
}

/// Queries, keys and values as columns of one tensor, and as tensors of their own.
std::string check_apart(const Op& op) {
  for (Attr a : {Attr::heads, Attr::kv_heads, Attr::head_dim})
    if (!op.has(a)) return fmt::format("lacks attribute {}", name_of(a));
  const std::int64_t d = op.integer(Attr::head_dim), q = op.integer(Attr::heads) * d,
                     kv = op.integer(Attr::kv_heads) * (d + op.integer(Attr::value_dim, d));
  const auto rows = [](const Tensor& t, const Tensor& of, std::int64_t width) {
    return t.rank == 2 && t.shape[0] == of.shape[0] && t.shape[1] == Dim{width, fixed_extent, 0};
  };
  bool fits = false;
  if (op.kind == OpKind::take_kv) {
    fits = rows(op.inputs[0], op.inputs[0], q + kv) && rows(op.outputs[0], op.inputs[0], kv);
  } else {
    const Tensor& whole = op.outputs[0];
    fits = rows(whole, whole, q + kv) && rows(op.inputs[0], whole, q) && rows(op.inputs[1], whole, kv) &&
           (op.num_operands() < 3 || rows(op.inputs[2], whole, kv));
  }
  return fits ? "" : fmt::format("needs rows of {} and {} columns, and of all of them", q, kv);
}

bool is_latent(OpKind k) {
  switch (k) {
    case OpKind::latent_norm:
    case OpKind::latent_norm_backward:
    case OpKind::latent_heads:
    case OpKind::latent_heads_backward:
    case OpKind::latent_write:
    case OpKind::latent_attention:
      return true;
    default:
      return false;
  }
}

/// Attended rows, their log-sum-exps, and the same of every rank's part of the keys.
std::string check_parts(const Op& op) {
  const Tensor &o = op.inputs[0], &lse = op.inputs[1], &parts = op.inputs[2];
  const bool fits = op.group >= 0 && o.rank == 2 && lse.rank == 2 && o.shape[0] == lse.shape[0] &&
                    lse.shape[1].size > 0 && o.shape[1].size % lse.shape[1].size == 0 &&
                    parts.shape[0].extent == fixed_extent && parts.shape[1] == lse.shape[0] &&
                    parts.shape[2] == lse.shape[1] && parts.dtype == DType::f32 && op.outputs[0] == o &&
                    op.outputs[1] == lse;
  return fits ? "" : "needs attended rows, and a log-sum-exp of each rank of its group for each of their heads";
}

/// Keys and values of a sequence that the ranks of a group hold in parts.
std::string check_held(const Op& op) {
  const std::int64_t ranks = op.integer(Attr::ranks, 1);
  if (ranks < 1) return fmt::format("has {} ranks", ranks);
  return op.has(Attr::ranks) && op.group < 0 ? "has no group" : "";
}

/// Attended rows, their log-sum-exps, and a sink for each head of all ranks that share them.
std::string check_sinks(const Op& op) {
  if (op.kind == OpKind::attention_sinks && op.inputs[2].rank == 3) return check_parts(op);
  const bool backward = op.kind == OpKind::attention_sinks_backward;
  const Tensor &o = op.inputs[backward ? 1 : 0], &lse = op.inputs[backward ? 2 : 1],
               &sinks = op.inputs[backward ? 3 : 2];
  bool fits = o.rank == 2 && lse.rank == 2 && sinks.rank == 1 && o.shape[0] == lse.shape[0] && lse.shape[1].size > 0 &&
              o.shape[1].size % lse.shape[1].size == 0 && sinks.shape[0].size % lse.shape[1].size == 0 &&
              (sinks.shape[0] == lse.shape[1] || op.group >= 0);
  if (backward)
    fits = fits && op.inputs[0].rank == 2 && op.inputs[0].shape == o.shape && op.outputs[0].rank == 1 &&
           op.outputs[0].shape == sinks.shape &&
           (op.outputs[0].dtype == DType::f32 || op.outputs[0].dtype == sinks.dtype);
  else fits = fits && op.outputs[0] == o && op.outputs[1] == lse;
  return fits ? "" : "needs attended rows, a log-sum-exp and a sink for each of their heads";
}

/// A clamped gate and what is clamped beside it.
std::string check_clamped(const Op& op) {
  for (const Attr a : {Attr::limit, Attr::alpha})
    if (!op.has(a)) return fmt::format("lacks attribute {}", name_of(a));
  const Tensor &act = op.kind == OpKind::clamped_swiglu ? op.outputs[0] : op.inputs[0],
               &gate_up = op.kind == OpKind::clamped_swiglu ? op.inputs[0] : op.inputs[1];
  const auto last = [](const Tensor& t) { return t.shape[static_cast<std::size_t>(t.rank) - 1].size; };
  return act.rank > 1 && gate_up.rank == act.rank && last(gate_up) == 2 * last(act) ? "" : "needs gates beside ups";
}

/// Latents and what all heads are made of them (graph/catalogue.h).
std::string check_latent(const Op& op) {
  const auto wide = [](const Tensor& t) { return t.rank == 2 ? t.shape[1].size : -1; };
  const auto rows_as = [](const Tensor& t, const Tensor& of) { return t.rank == 2 && t.shape[0] == of.shape[0]; };
  const bool norm = op.kind == OpKind::latent_norm, norm_back = op.kind == OpKind::latent_norm_backward;
  if (!norm && !norm_back && op.kind != OpKind::latent_write)
    for (Attr a : {Attr::heads, Attr::head_dim, Attr::value_dim, Attr::rope_dim})
      if (!op.has(a)) return fmt::format("lacks attribute {}", name_of(a));
  if ((norm || norm_back) && !op.has(Attr::rope_dim)) return "lacks attribute rope_dim";
  const std::int64_t a = op.integer(Attr::heads, 0), d = op.integer(Attr::head_dim, 0),
                     turned = op.integer(Attr::rope_dim, 0), v = op.integer(Attr::value_dim, 0),
                     of_kv = a * (d - turned + v), packed = a * (2 * d + v);
  bool fits = true;
  const auto parts = [&](const Tensor& whole, const Tensor& latent, const Tensor& rotated, const Tensor& weight) {
    return rows_as(whole, latent) && rows_as(rotated, latent) && wide(rotated) == turned &&
           wide(whole) == wide(latent) + turned && weight.rank == 1 && weight.shape[0].size == wide(latent);
  };
  const auto heads = [&](const Tensor& q, const Tensor& kv, const Tensor& rotated, const Tensor& qkv) {
    return rows_as(q, qkv) && rows_as(kv, qkv) && rows_as(rotated, qkv) && wide(q) == a * d && wide(kv) == of_kv &&
           wide(rotated) == turned && wide(qkv) == packed;
  };
  switch (op.kind) {
    case OpKind::latent_norm:
      fits = parts(op.inputs[0], op.outputs[0], op.outputs[1], op.inputs[1]);
      break;
    case OpKind::latent_norm_backward:
      fits = parts(op.inputs[2], op.inputs[0], op.inputs[1], op.inputs[3]) && op.outputs[0].rank == 2 &&
             op.outputs[0].shape == op.inputs[2].shape &&
             (op.outputs.size() == 1 || op.outputs[1].shape == op.inputs[3].shape);
      break;
    case OpKind::latent_heads:
      fits = heads(op.inputs[0], op.inputs[1], op.inputs[2], op.outputs[0]);
      break;
    case OpKind::latent_heads_backward:
      fits = heads(op.outputs[0], op.outputs[1], op.outputs[2], op.inputs[0]);
      break;
    case OpKind::latent_write:
      fits = rows_as(op.inputs[1], op.inputs[0]) && op.outputs[0].rank == 3 && op.has(Attr::block_tokens) &&
             op.outputs[0].shape[1].size == op.integer(Attr::block_tokens) &&
             op.outputs[0].shape[2].size == wide(op.inputs[0]) + wide(op.inputs[1]);
      break;
    default: {
      const Tensor &q = op.inputs[0], &pool = op.inputs[1], &w = op.inputs[2];
      fits = wide(q) == a * d && pool.rank == 3 && op.has(Attr::block_tokens) && w.rank == 2 &&
             w.shape[0].size == of_kv && pool.shape[2].size == wide(w) + turned && rows_as(op.outputs[0], q) &&
             wide(op.outputs[0]) == a * v;
    }
  }
  return fits ? "" : "has tensors that do not fit one another";
}

/// A rank's queries, and the keys and values of one rank or of all.
std::string check_context(const Op& op) {
  for (Attr a : {Attr::heads, Attr::kv_heads, Attr::head_dim, Attr::ranks})
    if (!op.has(a)) return fmt::format("lacks attribute {}", name_of(a));
  if (op.group < 0) return "has no group";
  const bool backward = op.kind == OpKind::context_attention_backward;
  const Tensor &x = op.inputs[backward ? 1 : 0], &kv = op.inputs[backward ? 2 : 1];
  const std::int64_t ranks = op.integer(Attr::ranks), d = op.integer(Attr::head_dim), k = op.integer(Attr::kv_heads),
                     a = op.integer(Attr::heads), v = op.integer(Attr::value_dim, d);
  if (ranks < 1) return fmt::format("has {} ranks", ranks);
  if (kv.rank != 3 || x.rank != 2 || kv.shape[0].extent != fixed_extent ||
      (kv.shape[0].size != 1 && kv.shape[0].size != ranks))
    return fmt::format("needs the keys and values of one rank or of all {}", ranks);
  const auto of_heads = [&](const Tensor& t, std::int64_t width) {
    return t.rank == 2 && t.shape[0] == x.shape[0] && t.shape[1] == Dim{a * width, fixed_extent, 0};
  };
  bool fits = x.shape[1] == Dim{a * d + k * (d + v), fixed_extent, 0} && kv.shape[1] == x.shape[0] &&
              kv.shape[2] == Dim{k * (d + v), fixed_extent, 0} && of_heads(op.outputs[0], backward ? d : v);
  if (backward)
    fits = fits && of_heads(op.inputs[0], v) && of_heads(op.inputs[3], v) && op.outputs[1].rank == 3 &&
           op.outputs[1].shape == kv.shape;
  return fits ? "" : "has tensors that do not fit one another";
}

}  // namespace

bool adapts_experts(const Op& op) {
  return entry(op.kind).rule == FlopRule::lora && op.kind != OpKind::lora_merge && op.num_operands() > 2;
}

ExpertMatrices expert_matrices(const Op& op) {
  if (adapts_experts(op)) {
    const Tensor& w = op.kind == OpKind::lora_up_wgrad ? op.outputs[0] : op.inputs[1];
    const std::int64_t segments = op.inputs[2].shape[0].size - 1, experts = segments / op.integer(Attr::ranks);
    return {experts, w.shape[0].size / experts, w.shape[1].size, segments};
  }
  const Tensor& w = op.kind == OpKind::grouped_linear_wgrad ? op.outputs[0] : op.inputs[1];
  const Tensor& as_wide = op.kind == OpKind::grouped_linear ? op.outputs[0] : op.inputs[0];
  const std::int64_t n = as_wide.shape[static_cast<std::size_t>(as_wide.rank) - 1].size;
  return {w.shape[0].size / n, n, w.shape[1].size, op.inputs[2].shape[0].size - 1};
}

std::optional<LoraProduct> lora_product(const Op& op) {
  if (entry(op.kind).rule != FlopRule::lora || adapts_experts(op)) return std::nullopt;
  for (const auto* side : {&op.inputs, &op.outputs})
    for (const Tensor& t : *side)
      if (t.rank != 2) return LoraProduct{};
  const Tensor &first = op.inputs[0], &second = op.inputs[1], &out = op.outputs[0];
  const auto inside = [&](const Tensor& wide, const Dim& n) {
    return op.integer(Attr::column, 0) >= 0 && op.integer(Attr::column, 0) + n.size <= wide.shape[1].size;
  };
  switch (op.kind) {
    case OpKind::lora_down:
      return LoraProduct{
          first.shape[0], first.shape[1], second.shape[0],
          second.shape[1] == first.shape[1] && out.shape[0] == first.shape[0] && out.shape[1] == second.shape[0]};
    case OpKind::lora_up:
      return LoraProduct{
          first.shape[0], first.shape[1], second.shape[0],
          second.shape[1] == first.shape[1] && out.shape[0] == first.shape[0] && inside(out, second.shape[0])};
    case OpKind::lora_up_dgrad:
      return LoraProduct{
          first.shape[0], second.shape[0], second.shape[1],
          out.shape[0] == first.shape[0] && out.shape[1] == second.shape[1] && inside(first, second.shape[0])};
    case OpKind::lora_up_wgrad:
      return LoraProduct{
          out.shape[0], first.shape[0], second.shape[1],
          second.shape[0] == first.shape[0] && out.shape[1] == second.shape[1] && inside(first, out.shape[0])};
    default: {
      const Tensor& a = op.inputs[2];
      return LoraProduct{second.shape[0], second.shape[1], a.shape[1],
                         first.shape == out.shape && first.shape[0] == second.shape[0] &&
                             second.shape[1] == a.shape[0] && first.shape[1] == a.shape[1]};
    }
  }
}

Range bias_columns(const Op& op, const Places& places) {
  const ExpertMatrices m = expert_matrices(op);
  const Tensor& bias = op.kind == OpKind::grouped_linear ? op.inputs[3] : op.outputs[1];
  const std::int64_t share = bias.shape[0].size / m.experts;
  const std::int64_t place = share == m.n ? 0 : places.at(static_cast<std::size_t>(op.group)) % (m.n / share);
  return {place * share, (place + 1) * share};
}

Range own_sinks(const Op& op, const Places& places) {
  const bool backward = op.kind == OpKind::attention_sinks_backward;
  const std::int64_t heads = op.inputs[backward ? 2 : 1].shape[1].size, all = op.inputs[backward ? 3 : 2].shape[0].size,
                     place = all == heads ? 0 : places.at(static_cast<std::size_t>(op.group));
  return {place * heads, (place + 1) * heads};
}

bool is_routed(const Op& op) { return op.kind == OpKind::all_to_all && op.num_operands() > 1; }

bool sends_copies(const Op& op) { return is_routed(op) && op.has(Attr::ranks); }

const Tensor& own_tokens_rows(const Op& op) { return op.inputs[0].rank == 3 ? op.inputs[0] : op.outputs[0]; }

std::int64_t own_rows_bytes(const Op& op, const Sizes& s) {
  if (op.has(Attr::rounds)) {  // those of the round
    const Tensor& came = op.inputs[0].rank == 3 ? op.outputs[0] : op.inputs[0];
    return came.bytes(s);
  }
  return own_tokens_rows(op).bytes(s) / op.integer(Attr::tp, 1);
}

bool is_idle_round(const Op& op, const Sizes& s) {
  if (!op.has(Attr::count)) return false;
  const auto idle = [&](const Tensor& t) { return t.rank > 0 && t.shape[0].begin > 0 && t.shape[0].actual(s) == 0; };
  return std::ranges::any_of(op.inputs, idle) || std::ranges::any_of(op.outputs, idle);
}

OwnPart own_experts(const Op& op, const Places& places) {
  const std::int64_t own = op.outputs[1].shape[0].size - 1, groups = op.integer(Attr::groups, 1);
  const std::int64_t columns = op.integer(Attr::ranks, 1);
  const std::int64_t place = op.has(Attr::tp) ? places.at(static_cast<std::size_t>(op.group)) / columns : 0;
  return {place * (own / groups), own, groups};
}

std::string check_prices(const Op& op) {
  std::int64_t before = -1;
  for (const PricePoint& p : op.prices) {
    if (p.tokens <= before) return fmt::format("is priced at {} tokens behind {}", p.tokens, before);
    for (const double v : {p.seconds, p.seconds_per_pair})
      if (!(v >= 0.0 && v <= most_price)) return fmt::format("has a price of {}", v);
    if (!(p.payload_bytes >= 0.0 && p.payload_bytes <= most_payload))
      return fmt::format("has a payload of {} B", p.payload_bytes);
    before = p.tokens;
  }
  return "";
}

namespace {

/// Whether it writes to an engine's pool, or attends to what that has.
bool holds_keys(OpKind k) {
  return k == OpKind::kv_write || k == OpKind::paged_attention || k == OpKind::latent_write ||
         k == OpKind::latent_attention;
}

bool is_context_attention(OpKind k) {
  return k == OpKind::context_attention || k == OpKind::context_attention_backward;
}

/// Of a sequence of 2 W h tokens, W ranks with 2 h queries each, a rank sees W (2 h^2) + h pairs: 2 h^2 with the keys
/// of each rank, and of its own the h on the diagonals besides. All W ranks' are N (N + 1) / 2.
std::int64_t context_pairs(const Op& op, std::int64_t queries, const Sizes& s) {
  const std::int64_t ranks = op.integer(Attr::ranks);
  const Tensor& kv = op.inputs[op.kind == OpKind::context_attention ? 1 : 2];
  if (kv.shape[0].size == ranks) return s.attention_pairs / ranks;
  const std::int64_t others =
      std::max<std::int64_t>(0, (2 * s.attention_pairs - ranks * queries) / (2 * ranks * ranks));
  return op.integer(Attr::source, 0) == 0 ? others + queries / 2 : others;
}

}  // namespace

std::int64_t attention_pairs(const Op& op, const Sizes& s) {
  const bool backward = op.kind == OpKind::attention_backward || op.kind == OpKind::context_attention_backward;
  const auto queries = [&] { return op.inputs[backward ? 1 : 0].shape[0].actual(s); };
  const std::int64_t pairs = is_context_attention(op.kind) ? context_pairs(op, queries(), s) : s.attention_pairs;
  const std::int64_t seen = op.has(Attr::window) ? std::min(pairs, queries() * op.integer(Attr::window)) : pairs;
  return holds_keys(op.kind) ? ceil_div(seen, op.integer(Attr::ranks, 1)) : seen;
}

ContextParts context_parts(const Op& op, const Places& places) {
  const std::int64_t ranks = op.integer(Attr::ranks), place = places.at(static_cast<std::size_t>(op.group));
  const Tensor& kv = op.inputs[op.kind == OpKind::context_attention ? 1 : 2];
  return {ranks, place, ((place + op.integer(Attr::source, 0)) % ranks + ranks) % ranks, kv.shape[0].size == ranks};
}

ProductSides product_sides(const Op& op) {
  ProductSides out;
  out.gate = op.has(Attr::gate);
  const bool sums = op.outputs.size() > 1, adds = op.has(Attr::residual);
  const int norms = op.has(Attr::eps) ? 1 : 0, others = norms + (sums || adds ? 1 : 0);
  int next = 2;
  if (static_cast<int>(op.num_operands()) > next + others) out.bias = next++;
  if (norms > 0) out.norm = next++;
  if (sums) out.delta = next++;
  if (adds) out.residual = next++;
  return out;
}

namespace {

/// Of what stands beside a product, what it counts where it is an op of its own.
double flops_beside(const Op& op, const Sizes& s) {
  const ProductSides sides = product_sides(op);
  const auto each = [&](OpKind kind, const Tensor& t) {
    return entry(kind).flops_per_element * static_cast<double>(t.elements(s));
  };
  double flops = 0.0;
  if (sides.norm >= 0) flops += each(OpKind::rms_norm, op.inputs[0]);
  if (sides.gate) flops += each(OpKind::swiglu, op.outputs[0]);
  if (sides.residual >= 0) flops += each(OpKind::add, op.outputs[0]);
  return flops;
}

}  // namespace

double op_flops(const Op& op, const Sizes& s) {
  const Entry& e = entry(op.kind);
  switch (e.rule) {
    case FlopRule::none:
      return 0;
    case FlopRule::gemm: {
      const Tensor& a = op.inputs[0];
      const Tensor& b = op.inputs[1];
      // linear, dgrad: [T,K] x [N,K] or [T,N] x [N,K]; wgrad: [T,N]^T x [T,K]: every product of the three extents.
      const double third = static_cast<double>(is_linear(op.kind) ? b.shape[0].actual(s) : b.shape[1].actual(s));
      const double product = 2.0 * static_cast<double>(a.elements(s)) * third;
      return op.kind == OpKind::fused_linear ? product + flops_beside(op, s) : product;
    }
    case FlopRule::lora:
      if (const std::optional<LoraProduct> p = lora_product(op))
        return 2.0 * static_cast<double>(p->rows.actual(s)) * static_cast<double>(p->depth.actual(s)) *
               static_cast<double>(p->columns.actual(s));
      [[fallthrough]];  // of experts
    case FlopRule::grouped_gemm: {
      // Every row meets one expert's matrix: [R,K] x [N,K], [R,N] x [N,K] or [R,N]^T x [R,K].
      const ExpertMatrices m = expert_matrices(op);
      // Where ranks share the experts, a rank has its share of the rows.
      return 2.0 * static_cast<double>(routed_rows(op.inputs[0], s)) * static_cast<double>(m.n * m.k) /
             static_cast<double>(op.integer(Attr::tp, 1));
    }
    case FlopRule::attention:
    case FlopRule::attention_backward:
      return e.flops_per_element * static_cast<double>(attention_pairs(op, s)) *
             head_width(op, e.rule == FlopRule::attention_backward);
    case FlopRule::latent_attention:  // keys and values of the context are made again
      return 4.0 * static_cast<double>(attention_pairs(op, s)) * head_width(op, false) +
             2.0 * static_cast<double>(context_tokens(op, s)) * static_cast<double>(op.inputs[2].elements(s));
    case FlopRule::per_element:
      return e.flops_per_element * static_cast<double>(op.outputs[0].elements(s));
  }
  return 0;
}

std::int64_t payload_bytes(const Op& op, const Sizes& s, const Places& places) {
  if (has_priced_payload(op)) return std::llround(op.price(s).payload_bytes);
  const std::int64_t padding = op.integer(Attr::padding_bytes, 0);
  switch (op.kind) {
    case OpKind::all_gather:
      return op.outputs[0].bytes(s) - padding;
    case OpKind::reduce_scatter:
    case OpKind::all_reduce:
    case OpKind::broadcast:
    case OpKind::send:
    case OpKind::send_recv:
      return op.inputs[0].bytes(s) - padding;
    case OpKind::all_to_all:
      return (is_routed(op) ? own_rows_bytes(op, s) : op.inputs[0].bytes(s)) - padding;
    case OpKind::peer_copy: {
      std::int64_t bytes = 0;
      for (const Move& move : op.moves) bytes += moved_elements(move, places).of_peers * size_of(op.inputs[0].dtype);
      return bytes;
    }
    default:
      return 0;
  }
}

std::int64_t op_bytes(const Op& op, const Sizes& s, const Places& places) {
  if (is_communication(op.kind)) return payload_bytes(op, s, places);
  if (op.is_priced()) return 0;  // not known
  switch (op.kind) {
    case OpKind::feed:
      if (op.integer(Attr::accumulate, 0) != 0) {  // only what its boxes have changes
        std::int64_t elements = 0;
        for (const Move& move : op.moves) elements += moved_elements(move, places).all;
        return elements * size_of(op.outputs[0].dtype);
      }
      break;
    case OpKind::copy_boxes:
    case OpKind::hash_boxes:
      return boxes_bytes(op, places);
    case OpKind::embedding:
      return 2 * op.outputs[0].bytes(s) + op.inputs[1].bytes(s);
    case OpKind::embedding_backward:
      return op.inputs[0].bytes(s) + 3 * op.inputs[1].bytes(s);
    case OpKind::gather_rows:
      return 2 * op.outputs[0].bytes(s) + op.inputs[1].bytes(s);
    case OpKind::kv_write: {
      const std::int64_t row = 2 * op.integer(Attr::kv_heads) * op.integer(Attr::head_dim) *
                               (size_of(op.inputs[0].dtype) + size_of(op.outputs[0].dtype));
      return row * ceil_div(op.inputs[0].shape[0].actual(s), op.integer(Attr::ranks, 1)) + op.inputs[1].bytes(s);
    }
    case OpKind::latent_write:
      return 2 * ceil_div(op.inputs[0].bytes(s) + op.inputs[1].bytes(s), op.integer(Attr::ranks, 1)) +
             op.inputs[2].bytes(s);
    case OpKind::latent_attention:
      return op.inputs[0].bytes(s) + op.outputs[0].bytes(s) + op.inputs[2].bytes(s) +
             context_tokens(op, s) * op.inputs[1].shape[2].size * size_of(op.inputs[1].dtype);
    case OpKind::paged_attention:
      return op.inputs[0].bytes(s) + op.outputs[0].bytes(s) + paged_kv_bytes(op, s);
    case OpKind::lora_up:
    case OpKind::lora_up_dgrad:
    case OpKind::lora_up_wgrad: {
      // Of the activation that is wider than the adapter, its columns.
      const bool up = op.kind == OpKind::lora_up;
      const Tensor &wide = up ? op.outputs[0] : op.inputs[0], &narrow = up ? op.inputs[0] : op.outputs[0];
      const std::int64_t columns =
          adapts_experts(op) ? expert_matrices(op).n
                             : (op.kind == OpKind::lora_up_wgrad ? op.outputs[0] : op.inputs[1]).shape[0].size;
      const std::int64_t rows = wide.elements(s) / wide.shape[static_cast<std::size_t>(wide.rank) - 1].size;
      return rows * columns * size_of(wide.dtype) + narrow.bytes(s) + op.inputs[1].bytes(s);
    }
    case OpKind::grouped_linear:
    case OpKind::grouped_linear_dgrad: {
      // Of few rows, at most one expert's weights for each; of those that came from other ranks nobody knows of how
      // many.
      const ExpertMatrices m = expert_matrices(op);
      const std::int64_t read = op.has(Attr::count) ? m.experts : std::min(m.experts, routed_rows(op.inputs[0], s));
      return op.inputs[0].bytes(s) + op.inputs[2].bytes(s) + op.outputs[0].bytes(s) +
             read * m.n * m.k * size_of(op.inputs[1].dtype);
    }
    default:
      break;
  }
  std::int64_t bytes = 0;
  for (const Tensor& t : op.inputs) bytes += t.bytes(s);
  for (const Tensor& t : op.outputs) bytes += t.bytes(s);
  return bytes;
}

Range vocab_rows(const Op& op, const Places& places) {
  const std::int64_t stride = op.integer(Attr::vocab_stride, 0);
  Range rows{op.integer(Attr::vocab_begin), op.integer(Attr::vocab_end)};
  if (stride == 0) return rows;
  const std::int64_t first = stride * places.at(static_cast<std::size_t>(op.group)), ids = op.integer(Attr::vocab);
  return {std::min(rows.begin + first, ids), std::min(rows.end + first, ids)};
}

Partners partners_of(const Op& op, std::int64_t ranks, std::int64_t place) {
  const bool relative = op.integer(Attr::relative, 0) != 0;
  const auto at = [&](Attr attr) {
    const std::int64_t said = op.integer(attr);
    return relative ? ((place + said) % ranks + ranks) % ranks : said;
  };
  switch (op.kind) {
    case OpKind::send:
      return {.to = at(Attr::peer)};
    case OpKind::recv:
      return {.from = at(Attr::peer)};
    case OpKind::send_recv:
      return {.to = at(Attr::peer), .from = at(Attr::source)};
    default:
      return {};
  }
}

SlotWindows windows_of(const Body& body) {
  SlotWindows out(static_cast<std::size_t>(body.num_slots()));
  std::vector<bool> seen(out.size());
  for (const Op& op : body.ops)
    for (const auto* side : {&op.inputs, &op.outputs})
      for (const Tensor& t : *side) {
        const auto slot = static_cast<std::size_t>(t.buffer);
        SlotWindow& w = out[slot];
        const std::int64_t end = t.offset_bytes + t.capacity_bytes(), size = size_of(t.dtype);
        w.begin = seen[slot] ? std::min(w.begin, t.offset_bytes) : t.offset_bytes;
        w.end = seen[slot] ? std::max(w.end, end) : end;
        seen[slot] = true;
        const std::pair remainder{size, ((t.offset_bytes % size) + size) % size};
        if (std::ranges::find(w.remainders, remainder) == w.remainders.end()) w.remainders.push_back(remainder);
      }
  return out;
}

std::string check_windows(const Program& program, const Call& call, const SlotWindows& windows) {
  const Body& body = program.bodies[static_cast<std::size_t>(call.body)];
  for (BufferId slot = 0; slot < body.num_slots(); ++slot) {
    const SlotWindow& w = windows[static_cast<std::size_t>(slot)];
    const bool port = slot < body.num_ports;
    const Port bound = port ? call.ports[static_cast<std::size_t>(slot)] : Port{};
    const Buffer& b = port ? program.buffers[static_cast<std::size_t>(bound.buffer)]
                           : body.locals[static_cast<std::size_t>(slot - body.num_ports)];
    const auto misplaced = [&](const auto& remainder) {
      return (bound.offset_bytes + remainder.second) % remainder.first != 0;
    };
    const bool inside = bound.offset_bytes + w.begin >= 0 && bound.offset_bytes + w.end <= b.bytes();
    if (inside && std::ranges::none_of(w.remainders, misplaced)) continue;
    for (const Op& op : body.ops)  // to name it
      for (const auto* side : {&op.inputs, &op.outputs})
        for (const Tensor& t : *side) {
          const std::int64_t begin = bound.offset_bytes + t.offset_bytes, end = begin + t.capacity_bytes();
          if (t.buffer == slot && (begin < 0 || begin % size_of(t.dtype) != 0 || end > b.bytes()))
            return fmt::format("{} '{}' takes bytes {}..{} of '{}{}', which has {}", name_of(op.kind), op.name, begin,
                               end, port ? "" : call.name, b.name, b.bytes());
        }
  }
  return "";
}

std::string check_op(const Op& op) {
  if (op.kind == OpKind::priced && !op.is_priced()) return "has no price";
  if (op.is_priced()) {
    if (is_communication(op.kind) && op.group < 0) return "has no group";
    if (is_memory(op.kind) || is_event(op.kind)) return "is of a kind that has no price";
    if (auto bad = check_prices(op); !bad.empty() || !is_pairwise(op.kind)) return bad;
  }
  const Entry& e = entry(op.kind);
  if (auto bad = count_error("inputs", op.num_operands(), e.min_inputs, e.max_inputs); !bad.empty()) return bad;
  if (auto bad = count_error("outputs", op.outputs.size(), e.min_outputs, e.max_outputs); !bad.empty()) return bad;
  for (const auto* side : {&op.inputs, &op.outputs})
    for (const Tensor& t : *side)
      for (int d = 0; d < t.rank; ++d)
        if (t.shape[static_cast<std::size_t>(d)].size < 0) return "has a tensor of negative extent";
  if (is_communication(op.kind) && op.group < 0) return "has no group";
  if (op.has(Attr::vocab_stride) && (op.group < 0 || !op.has(Attr::vocab))) return "shares its table with no group";
  if (op.kind == OpKind::vocab_stats) return check_columns(op, op.inputs[0]);
  if (op.kind == OpKind::log_prob_backward && op.has(Attr::vocab_stride)) return check_columns(op, op.inputs[0]);
  if (op.kind == OpKind::embedding) return check_table(op, op.inputs[0]);
  if (op.kind == OpKind::embedding_backward) return check_table(op, op.outputs[0]);
  if (op.kind == OpKind::split_heads) return check_head_parts(op, op.inputs[0], op.outputs[0]);
  if (op.kind == OpKind::merge_heads) return check_head_parts(op, op.outputs[0], op.inputs[0]);
  if (op.kind == OpKind::add_bias) return check_bias(op);
  if (op.kind == OpKind::take_kv || op.kind == OpKind::merge_qkv) return check_apart(op);
  if (op.kind == OpKind::layer_norm || op.kind == OpKind::layer_norm_backward) return check_layer_norm(op);
  if ((op.kind == OpKind::softcap || op.has(Attr::softcap)) && !(op.real(Attr::softcap, 0.0) > 0.0))
    return "caps at no positive number";
  if ((op.kind == OpKind::softcap || op.kind == OpKind::prepack) && !(op.inputs[0] == op.outputs[0]))
    return "is no op in place";
  if (op.kind == OpKind::prepack && op.inputs[0].rank != 2) return "needs a matrix";
  if (op.has(Attr::prepacked) && (!is_linear(op.kind) || op.integer(Attr::prepacked) != 1))
    return "reads no prepacked weights: of a linear, and 1 where it is there";
  if (op.kind == OpKind::fused_linear) return check_fused(op);
  if (op.has(Attr::window) && op.integer(Attr::window) < 1) return "has a window without a token";
  if (is_context_attention(op.kind)) return check_context(op);
  if (holds_keys(op.kind))
    if (auto bad = check_held(op); !bad.empty()) return bad;
  if (is_latent(op.kind)) return check_latent(op);
  if (op.kind == OpKind::attention_sinks || op.kind == OpKind::attention_sinks_backward) return check_sinks(op);
  if (op.kind == OpKind::clamped_swiglu || op.kind == OpKind::clamped_swiglu_backward) return check_clamped(op);
  if (e.rule == FlopRule::gemm) return check_gemm(op);
  if (e.rule == FlopRule::lora) return check_lora(op);
  if (e.rule == FlopRule::grouped_gemm) return check_grouped(op);
  if (auto bad = check_routed(op); !bad.empty()) return bad;
  if (e.rule == FlopRule::attention || e.rule == FlopRule::attention_backward)
    for (Attr a : {Attr::heads, Attr::kv_heads, Attr::head_dim})
      if (!op.has(a)) return fmt::format("lacks attribute {}", name_of(a));
  if ((op.kind == OpKind::feed || op.kind == OpKind::fetch) && !op.has(Attr::slot)) return "has no slot";
  if (is_pairwise(op.kind) && !op.has(Attr::peer)) return "has no peer";
  if (op.kind == OpKind::send_recv && !op.has(Attr::source)) return "has no source";
  return "";
}

}  // namespace hotbunk
