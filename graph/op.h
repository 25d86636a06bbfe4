// Op: one node of the plan graph. Plain data; what a kind means is in the op catalogue (catalogue.h).
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "graph/move.h"
#include "graph/tensor.h"

namespace hotbunk {

using EventId = std::int32_t;

/// One of Plan::streams, which says what it is called and what it does. A stream runs in order with itself and in
/// parallel with the others.
enum class StreamId : std::uint8_t {};
inline constexpr int max_streams = 16;  // of a plan
/// Where every block begins and ends: a plan's first stream, which computes.
inline constexpr StreamId lead_stream{0};

/// One of Program::sections: what is mapped and unmapped together.
enum class SectionId : std::uint8_t {};
inline constexpr int max_sections = 24;  // of a program
/// Where buffers live for a block or less: a program's first section, on the device.
inline constexpr SectionId transient_section{0};

enum class OpKind : std::uint8_t {
  // memory and order
  alloc,
  free,
  map,
  unmap,
  record,
  wait,
  // data
  feed,
  fetch,
  copy,
  copy_boxes,
  hash_boxes,
  zero,
  cast,
  // communication
  all_gather,
  reduce_scatter,
  all_reduce,
  broadcast,
  all_to_all,
  send,
  recv,
  send_recv,
  barrier,
  peer_copy,
  // compute
  embedding,
  embedding_backward,
  linear,
  linear_dgrad,
  linear_wgrad,
  rms_norm,
  rms_norm_backward,
  qk_norm,
  qk_norm_backward,
  rope,
  rope_backward,
  attention,
  attention_backward,
  kv_write,
  paged_attention,
  swiglu,
  swiglu_backward,
  add,
  gather_rows,
  log_prob,
  log_prob_backward,
  vocab_stats,
  vocab_log_prob,
  token_loss,
  sum_squares,
  clip_coefficient,
  adamw,
  sample,
  route,
  route_backward,
  expert_sort,
  dispatch,
  dispatch_backward,
  grouped_linear,
  grouped_linear_dgrad,
  grouped_linear_wgrad,
  combine,
  combine_backward,
  split_heads,
  merge_heads,
  add_bias,
  geglu,
  geglu_backward,
  softcap,
  layer_norm,
  layer_norm_backward,
  gelu,
  gelu_backward,
  take_kv,
  merge_qkv,
  context_attention,
  context_attention_backward,
  expert_arrivals,
  lora_down,
  lora_up,
  lora_up_dgrad,
  lora_up_wgrad,
  lora_merge,
  latent_norm,
  latent_norm_backward,
  latent_heads,
  latent_heads_backward,
  latent_write,
  latent_attention,
  attention_sinks,
  attention_sinks_backward,
  clamped_swiglu,
  clamped_swiglu_backward,
  copy_sort,
  copy_arrivals,
  expert_counts,
  router_loss,
  priced,  // whatever a framework does there
  prepack,
  fused_linear,
};
inline constexpr int num_op_kinds = static_cast<int>(OpKind::fused_linear) + 1;
std::string_view name_of(OpKind);

/// Named attributes; the catalogue says which kind has which.
enum class Attr : std::uint8_t {
  heads,
  kv_heads,
  head_dim,
  eps,
  rope_theta,
  rope_factor,
  rope_low,
  rope_high,
  rope_original,
  vocab,
  vocab_begin,
  vocab_end,
  vocab_stride,
  accumulate,
  temperature,
  top_k,
  top_p,
  clip_low,
  clip_high,
  kl_coef,
  lr_slot,
  beta1,
  beta2,
  weight_decay,
  max_norm,
  padding_bytes,
  peer,
  block_tokens,
  tp,
  reduce_max,
  slot,
  src_rank,
  max_blocks,
  layer,
  sft,
  reference,
  residual,
  as_dtype,
  source,
  relative,
  renormalise,
  window,
  softcap,
  scale,
  offset,
  factor,
  rope_ramp_begin,
  rope_ramp_end,
  rope_amplitude,
  ranks,
  value_dim,
  rope_dim,
  sigmoid,
  groups,
  taken_groups,
  count,  // of any kind: Op::num_operands
  gives,  // of a barrier that hands over (graph/catalogue.h)
  column,
  rope_first,
  limit,
  alpha,
  rounds,  // of an exchange of experts' rows: of how many it is one
  z_factor,
  prepacked,
  gate,
};
inline constexpr int num_attrs = static_cast<int>(Attr::gate) + 1;
std::string_view name_of(Attr);
using AttrValue = std::variant<std::int64_t, double>;

/// A price in place of arithmetic: what an op takes in a run of a block with so many tokens. Between two points of an
/// op both numbers are interpolated, beyond the last as between the last two.
inline constexpr double most_price = 9e9;     // seconds: what nanoseconds still count
inline constexpr double most_payload = 1e15;  // bytes
struct PricePoint {
  std::int64_t tokens = 0;
  double seconds = 0.0, seconds_per_pair = 0.0;  // pair: Sizes::attention_pairs
  double payload_bytes = 0.0;                    // of a communication, as the catalogue counts it
  friend bool operator==(const PricePoint&, const PricePoint&) = default;
};

struct Op {
  OpKind kind = OpKind::alloc;
  StreamId stream = lead_stream;
  std::string name;  // "layers.3.attention", unique enough to find it
  std::vector<Tensor> inputs, outputs;
  std::vector<std::pair<Attr, AttrValue>> attrs;
  std::vector<Move> moves;                // copy_boxes, hash_boxes, peer_copy; of a feed or fetch: which elements it is
  GroupId group = -1;                     // communication
  BufferId buffer = -1;                   // alloc, free: a slot of the body
  EventId event = -1;                     // record, wait: in drafts only
  SectionId section = transient_section;  // map, unmap: [begin, end) bytes from the section's base, chunk-aligned
  std::int64_t map_begin = 0, map_end = 0;
  std::vector<PricePoint> prices;  // ascending by tokens; empty: the op costs what it does. Simulated, never executed

  bool is_priced() const { return !prices.empty(); }
  /// What a priced op takes with these sizes.
  PricePoint price(const Sizes&) const;

  /// Of its inputs, those that its kind asks for. Those behind them are counts, int64[1] each: how much is there of the
  /// extents that its dimensions name and the device counts, in their order (Plan::counted_extents). Attr::count is the
  /// first one's number.
  std::size_t num_operands() const;

  /// A barrier at which only who takes waits, for who gives: what is given stays until it is taken.
  bool hands_over() const { return kind == OpKind::barrier && has(Attr::gives); }

  bool has(Attr) const;
  std::int64_t integer(Attr) const;  // internal fault when absent
  std::int64_t integer(Attr, std::int64_t otherwise) const;
  double real(Attr) const;
  double real(Attr, double otherwise) const;
  friend bool operator==(const Op&, const Op&) = default;
};

/// Adds one attribute; chains.
Op& with(Op&, Attr, std::int64_t);
Op& with(Op&, Attr, double);

/// alloc, free, map, unmap.
bool is_memory(OpKind);
/// record, wait.
bool is_event(OpKind);
bool is_communication(OpKind);
/// send, recv and send_recv: between two ranks of a group.
bool is_pairwise(OpKind);
bool is_compute(OpKind);
/// Rows times the rows of one weight: linear and fused_linear.
bool is_linear(OpKind);
/// A product for each expert, of its own rows and weights.
bool is_grouped(OpKind);

}  // namespace hotbunk
