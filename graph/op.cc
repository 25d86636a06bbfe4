#include "graph/op.h"

#include <array>

#include "base/check.h"

namespace hotbunk {
namespace {

constexpr std::array<std::string_view, num_streams> stream_names = {"compute", "gather", "reduce", "tensor",
                                                                    "control", "h2d",    "d2h",    "host"};

constexpr std::array<std::string_view, num_op_kinds> kind_names = {"alloc",
                                                                   "free",
                                                                   "map",
                                                                   "unmap",
                                                                   "record",
                                                                   "wait",
                                                                   "feed",
                                                                   "fetch",
                                                                   "copy",
                                                                   "copy_boxes",
                                                                   "hash_boxes",
                                                                   "zero",
                                                                   "cast",
                                                                   "all_gather",
                                                                   "reduce_scatter",
                                                                   "all_reduce",
                                                                   "broadcast",
                                                                   "all_to_all",
                                                                   "send",
                                                                   "recv",
                                                                   "send_recv",
                                                                   "barrier",
                                                                   "peer_copy",
                                                                   "embedding",
                                                                   "embedding_backward",
                                                                   "linear",
                                                                   "linear_dgrad",
                                                                   "linear_wgrad",
                                                                   "rms_norm",
                                                                   "rms_norm_backward",
                                                                   "qk_norm",
                                                                   "qk_norm_backward",
                                                                   "rope",
                                                                   "rope_backward",
                                                                   "attention",
                                                                   "attention_backward",
                                                                   "kv_write",
                                                                   "paged_attention",
                                                                   "swiglu",
                                                                   "swiglu_backward",
                                                                   "add",
                                                                   "gather_rows",
                                                                   "log_prob",
                                                                   "log_prob_backward",
                                                                   "token_loss",
                                                                   "sum_squares",
                                                                   "clip_coefficient",
                                                                   "adamw",
                                                                   "sample"};

constexpr std::array<std::string_view, num_attrs> attr_names = {
    "heads",       "kv_heads",      "head_dim",     "eps",         "rope_theta",    "rope_factor",  "rope_low",
    "rope_high",   "rope_original", "vocab",        "vocab_begin", "vocab_end",     "vocab_stride", "accumulate",
    "temperature", "top_k",         "top_p",        "clip_low",    "clip_high",     "kl_coef",      "lr_slot",
    "beta1",       "beta2",         "weight_decay", "max_norm",    "padding_bytes", "peer",         "block_tokens",
    "tp",          "reduce_max",    "slot",         "src_rank",    "max_blocks",    "layer",        "sft",
    "reference",   "residual",      "as_dtype",     "source",      "relative"};

constexpr std::array<std::string_view, num_sections> section_names = {
    "train_params", "train_optimizer", "train_reference", "train_grads",    "rollout_weights", "kv_cache",
    "transient",    "host_params",     "host_optimizer",  "host_reference", "host_weights"};

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

std::string_view name_of(StreamId s) { return stream_names[static_cast<std::size_t>(s)]; }
std::string_view name_of(OpKind k) { return kind_names[static_cast<std::size_t>(k)]; }
std::string_view name_of(Attr a) { return attr_names[static_cast<std::size_t>(a)]; }
std::string_view name_of(Section s) { return section_names[static_cast<std::size_t>(s)]; }

bool Op::has(Attr a) const { return find(*this, a) != nullptr; }
std::int64_t Op::integer(Attr a) const { return required<std::int64_t>(*this, a); }
std::int64_t Op::integer(Attr a, std::int64_t otherwise) const { return optional(*this, a, otherwise); }
double Op::real(Attr a) const { return required<double>(*this, a); }
double Op::real(Attr a, double otherwise) const { return optional(*this, a, otherwise); }

bool is_communication(OpKind k) { return k >= OpKind::all_gather && k <= OpKind::peer_copy; }
bool is_pairwise(OpKind k) { return k == OpKind::send || k == OpKind::recv || k == OpKind::send_recv; }
bool is_compute(OpKind k) { return k >= OpKind::embedding; }

}  // namespace hotbunk
