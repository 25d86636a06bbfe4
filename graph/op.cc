#include "graph/op.h"

#include <algorithm>
#include <array>

#include "base/check.h"

namespace hotbunk {
namespace {

enum class OpClass : std::uint8_t { memory, event, data, communication, compute };

struct KindFacts {
  OpKind kind;
  std::string_view name;
  OpClass what;
};

constexpr std::array<KindFacts, num_op_kinds> kinds = {{
    {OpKind::alloc, "alloc", OpClass::memory},
    {OpKind::free, "free", OpClass::memory},
    {OpKind::map, "map", OpClass::memory},
    {OpKind::unmap, "unmap", OpClass::memory},
    {OpKind::record, "record", OpClass::event},
    {OpKind::wait, "wait", OpClass::event},
    {OpKind::feed, "feed", OpClass::data},
    {OpKind::fetch, "fetch", OpClass::data},
    {OpKind::copy, "copy", OpClass::data},
    {OpKind::copy_boxes, "copy_boxes", OpClass::data},
    {OpKind::hash_boxes, "hash_boxes", OpClass::data},
    {OpKind::zero, "zero", OpClass::data},
    {OpKind::cast, "cast", OpClass::data},
    {OpKind::all_gather, "all_gather", OpClass::communication},
    {OpKind::reduce_scatter, "reduce_scatter", OpClass::communication},
    {OpKind::all_reduce, "all_reduce", OpClass::communication},
    {OpKind::broadcast, "broadcast", OpClass::communication},
    {OpKind::all_to_all, "all_to_all", OpClass::communication},
    {OpKind::send, "send", OpClass::communication},
    {OpKind::recv, "recv", OpClass::communication},
    {OpKind::send_recv, "send_recv", OpClass::communication},
    {OpKind::barrier, "barrier", OpClass::communication},
    {OpKind::peer_copy, "peer_copy", OpClass::communication},
    {OpKind::embedding, "embedding", OpClass::compute},
    {OpKind::embedding_backward, "embedding_backward", OpClass::compute},
    {OpKind::linear, "linear", OpClass::compute},
    {OpKind::linear_dgrad, "linear_dgrad", OpClass::compute},
    {OpKind::linear_wgrad, "linear_wgrad", OpClass::compute},
    {OpKind::rms_norm, "rms_norm", OpClass::compute},
    {OpKind::rms_norm_backward, "rms_norm_backward", OpClass::compute},
    {OpKind::qk_norm, "qk_norm", OpClass::compute},
    {OpKind::qk_norm_backward, "qk_norm_backward", OpClass::compute},
    {OpKind::rope, "rope", OpClass::compute},
    {OpKind::rope_backward, "rope_backward", OpClass::compute},
    {OpKind::attention, "attention", OpClass::compute},
    {OpKind::attention_backward, "attention_backward", OpClass::compute},
    {OpKind::kv_write, "kv_write", OpClass::compute},
    {OpKind::paged_attention, "paged_attention", OpClass::compute},
    {OpKind::swiglu, "swiglu", OpClass::compute},
    {OpKind::swiglu_backward, "swiglu_backward", OpClass::compute},
    {OpKind::add, "add", OpClass::compute},
    {OpKind::gather_rows, "gather_rows", OpClass::compute},
    {OpKind::log_prob, "log_prob", OpClass::compute},
    {OpKind::log_prob_backward, "log_prob_backward", OpClass::compute},
    {OpKind::vocab_stats, "vocab_stats", OpClass::compute},
    {OpKind::vocab_log_prob, "vocab_log_prob", OpClass::compute},
    {OpKind::token_loss, "token_loss", OpClass::compute},
    {OpKind::sum_squares, "sum_squares", OpClass::compute},
    {OpKind::clip_coefficient, "clip_coefficient", OpClass::compute},
    {OpKind::adamw, "adamw", OpClass::compute},
    {OpKind::sample, "sample", OpClass::compute},
    {OpKind::route, "route", OpClass::compute},
    {OpKind::route_backward, "route_backward", OpClass::compute},
    {OpKind::expert_sort, "expert_sort", OpClass::compute},
    {OpKind::dispatch, "dispatch", OpClass::compute},
    {OpKind::dispatch_backward, "dispatch_backward", OpClass::compute},
    {OpKind::grouped_linear, "grouped_linear", OpClass::compute},
    {OpKind::grouped_linear_dgrad, "grouped_linear_dgrad", OpClass::compute},
    {OpKind::grouped_linear_wgrad, "grouped_linear_wgrad", OpClass::compute},
    {OpKind::combine, "combine", OpClass::compute},
    {OpKind::combine_backward, "combine_backward", OpClass::compute},
    {OpKind::split_heads, "split_heads", OpClass::compute},
    {OpKind::merge_heads, "merge_heads", OpClass::compute},
    {OpKind::add_bias, "add_bias", OpClass::compute},
    {OpKind::geglu, "geglu", OpClass::compute},
    {OpKind::geglu_backward, "geglu_backward", OpClass::compute},
    {OpKind::softcap, "softcap", OpClass::compute},
    {OpKind::layer_norm, "layer_norm", OpClass::compute},
    {OpKind::layer_norm_backward, "layer_norm_backward", OpClass::compute},
    {OpKind::gelu, "gelu", OpClass::compute},
    {OpKind::gelu_backward, "gelu_backward", OpClass::compute},
    {OpKind::take_kv, "take_kv", OpClass::compute},
    {OpKind::merge_qkv, "merge_qkv", OpClass::compute},
    {OpKind::context_attention, "context_attention", OpClass::compute},
    {OpKind::context_attention_backward, "context_attention_backward", OpClass::compute},
    {OpKind::expert_arrivals, "expert_arrivals", OpClass::compute},
    {OpKind::lora_down, "lora_down", OpClass::compute},
    {OpKind::lora_up, "lora_up", OpClass::compute},
    {OpKind::lora_up_dgrad, "lora_up_dgrad", OpClass::compute},
    {OpKind::lora_up_wgrad, "lora_up_wgrad", OpClass::compute},
    {OpKind::lora_merge, "lora_merge", OpClass::compute},
    {OpKind::latent_norm, "latent_norm", OpClass::compute},
    {OpKind::latent_norm_backward, "latent_norm_backward", OpClass::compute},
    {OpKind::latent_heads, "latent_heads", OpClass::compute},
    {OpKind::latent_heads_backward, "latent_heads_backward", OpClass::compute},
    {OpKind::latent_write, "latent_write", OpClass::compute},
    {OpKind::latent_attention, "latent_attention", OpClass::compute},
    {OpKind::attention_sinks, "attention_sinks", OpClass::compute},
    {OpKind::attention_sinks_backward, "attention_sinks_backward", OpClass::compute},
    {OpKind::clamped_swiglu, "clamped_swiglu", OpClass::compute},
    {OpKind::clamped_swiglu_backward, "clamped_swiglu_backward", OpClass::compute},
    {OpKind::copy_sort, "copy_sort", OpClass::compute},
    {OpKind::copy_arrivals, "copy_arrivals", OpClass::compute},
    {OpKind::expert_counts, "expert_counts", OpClass::compute},
    {OpKind::router_loss, "router_loss", OpClass::compute},
    {OpKind::priced, "priced", OpClass::compute},
    {OpKind::prepack, "prepack", OpClass::compute},
    {OpKind::fused_linear, "fused_linear", OpClass::compute},
}};
static_assert(std::ranges::is_sorted(kinds, {}, &KindFacts::kind), "one for each kind, in the order of OpKind");

OpClass class_of(OpKind k) { return kinds[static_cast<std::size_t>(k)].what; }

constexpr std::array<std::string_view, num_attrs> attr_names = {
    "heads",       "kv_heads",      "head_dim",     "eps",         "rope_theta",      "rope_factor",   "rope_low",
    "rope_high",   "rope_original", "vocab",        "vocab_begin", "vocab_end",       "vocab_stride",  "accumulate",
    "temperature", "top_k",         "top_p",        "clip_low",    "clip_high",       "kl_coef",       "lr_slot",
    "beta1",       "beta2",         "weight_decay", "max_norm",    "padding_bytes",   "peer",          "block_tokens",
    "tp",          "reduce_max",    "slot",         "src_rank",    "max_blocks",      "layer",         "sft",
    "reference",   "residual",      "as_dtype",     "source",      "relative",        "renormalise",   "window",
    "softcap",     "scale",         "offset",       "factor",      "rope_ramp_begin", "rope_ramp_end", "rope_amplitude",
    "ranks",       "value_dim",     "rope_dim",     "sigmoid",     "groups",          "taken_groups",  "count",
    "gives",       "column",        "rope_first",   "limit",       "alpha",           "rounds",        "z_factor",
    "prepacked",   "gate"};

const AttrValue* find(const Op& op, Attr attr) {
  for (const auto& [key, value] : op.attrs)
    if (key == attr) return &value;
  return nullptr;
}

template <class T>
T convert(const AttrValue& value) {
  return std::visit([](auto v) { return static_cast<T>(v); }, value);
}

template <class T>
T required(const Op& op, Attr attr) {
  const AttrValue* value = find(op, attr);
  HB_CHECK(value, "{} '{}' lacks attribute {}", name_of(op.kind), op.name, name_of(attr));
  return convert<T>(*value);
}

template <class T>
T optional(const Op& op, Attr attr, T otherwise) {
  const AttrValue* value = find(op, attr);
  return value ? convert<T>(*value) : otherwise;
}

}  // namespace

std::string_view name_of(OpKind k) { return kinds[static_cast<std::size_t>(k)].name; }
std::string_view name_of(Attr a) { return attr_names[static_cast<std::size_t>(a)]; }

PricePoint Op::price(const Sizes& s) const {
  HB_CHECK(is_priced(), "{} '{}' has no price", name_of(kind), name);
  if (prices.size() == 1) return prices.front();
  // The two points around, or the first or last two.
  const auto behind = std::ranges::upper_bound(prices, s.tokens, {}, &PricePoint::tokens);
  const auto right = std::clamp(behind, prices.begin() + 1, prices.end() - 1), left = right - 1;
  const double share = static_cast<double>(s.tokens - left->tokens) / static_cast<double>(right->tokens - left->tokens);
  const auto between = [&](double PricePoint::*what) {
    return std::clamp((*left).*what + share * ((*right).*what - (*left).*what), 0.0, most_payload);
  };
  return {s.tokens, between(&PricePoint::seconds), between(&PricePoint::seconds_per_pair),
          between(&PricePoint::payload_bytes)};
}

std::size_t Op::num_operands() const {
  const auto given = static_cast<std::int64_t>(inputs.size());
  return static_cast<std::size_t>(std::clamp<std::int64_t>(integer(Attr::count, given), 0, given));
}

bool Op::has(Attr a) const { return find(*this, a) != nullptr; }
std::int64_t Op::integer(Attr a) const { return required<std::int64_t>(*this, a); }
std::int64_t Op::integer(Attr a, std::int64_t otherwise) const { return optional(*this, a, otherwise); }
double Op::real(Attr a) const { return required<double>(*this, a); }
double Op::real(Attr a, double otherwise) const { return optional(*this, a, otherwise); }

Op& with(Op& op, Attr attr, std::int64_t value) {
  op.attrs.emplace_back(attr, value);
  return op;
}
Op& with(Op& op, Attr attr, double value) {
  op.attrs.emplace_back(attr, value);
  return op;
}

bool is_memory(OpKind k) { return class_of(k) == OpClass::memory; }
bool is_event(OpKind k) { return class_of(k) == OpClass::event; }
bool is_communication(OpKind k) { return class_of(k) == OpClass::communication; }
bool is_pairwise(OpKind k) { return k == OpKind::send || k == OpKind::recv || k == OpKind::send_recv; }
bool is_compute(OpKind k) { return class_of(k) == OpClass::compute; }
bool is_linear(OpKind k) { return k == OpKind::linear || k == OpKind::fused_linear; }
bool is_grouped(OpKind k) {
  return k == OpKind::grouped_linear || k == OpKind::grouped_linear_dgrad || k == OpKind::grouped_linear_wgrad;
}

}  // namespace hotbunk
