// Tensor parallelism: what of a logical tensor one rank of the group has, and the collectives between two such states.
//
//   whole     every rank all of it            the residual stream: h, normed
//   tokens    every rank its part of the      the residual stream with sequence parallelism
//             tokens
//   columns   every rank its heads, or its    qkv, attended, gate_up, activated
//             part of the MLP's inner width,
//             or of each expert's; its
//             queries of latent attention
//   summands  every rank a summand            what o_proj, down_proj, experts and a vocabulary's part leave, or a part
//   of
//                                             the learned positions
//
// Every rank has all of what latent attention makes queries, keys and values of, for all tokens, by all of the matrices
// that leave it; it makes its heads of that, and its gradients are summands, which add up behind these matrices, in the
// stream. So are these matrices' own gradients.
// Every rank routes all tokens, by all of the router, and has its columns of every expert, all of some experts, or
// columns of some: it computes the rows of its own, and adds nothing for others. Where the group is several blocks, all
// tokens are those of a rank's block there. What goes back through the
// router is a summand too, as are the router's own gradients: a choice's weight gets its gradient from what the experts
// left, of which a rank has summands.
//
// A linear that is cut by rows takes all tokens, and its backward leaves summands; one that is cut by columns leaves
// summands, and its backward takes the gradient of all tokens. Summands become the stream by an all-reduce, or with
// sequence parallelism by a reduce-scatter; there an all-gather brings all tokens (Megatron-LM's g and g-bar).
#pragma once
#include <algorithm>
#include <cstdint>

#include "graph/op.h"
#include "model/forward.h"
#include "shard/emitter.h"
#include "spec/frozen.h"

namespace hotbunk {

/// A group over which parameters are cut, and where its collectives run.
struct TensorParallel {
  std::int64_t ranks = 1;
  GroupId group = -1;
  StreamId stream = lead_stream;
  ExtentId tokens = fixed_extent;  // sequence parallelism: the extent that says how many tokens one rank has
  std::int64_t expert_ranks = 1;   // so many have other experts; of each, the ranks with the same have a part
  // Where tokens are cut, so many neighbours may have the same ones: their group, and one rank of each such group.
  std::int64_t token_sharers = 1;
  GroupId sharers = -1, peers = -1;
  std::int64_t expert_columns() const { return ranks / expert_ranks; }
  bool cuts_tokens() const { return tokens != fixed_extent; }
  /// Who together have all tokens, once.
  GroupId token_group() const { return token_sharers > 1 ? peers : group; }
};

/// A group whose ranks have their own tokens of sequences that they share, and how many there are of all of them
/// (ulysses.h).
struct TokenParallel {
  std::int64_t ranks = 1;
  GroupId group = -1;
  StreamId stream = lead_stream;
  ExtentId all_tokens = fixed_extent;
};

/// A group whose ranks have two chunks each of every sequence, and how each comes by the others' keys and values
/// (context_parallel.h).
struct ContextParallel {
  std::int64_t ranks = 1;
  GroupId group = -1;
  StreamId stream = lead_stream;
  bool gathers = false;  // else they go around a ring
};

/// Neighbours among the data ranks that have other experts each; 1: every rank has all of those that its
/// tensor-parallel ones share. `routed`: how many rows have come to a rank's experts, of `most` at most; where there is
/// room for fewer, they come in rounds (expert_rounds.h).
struct ExpertParallel {
  std::int64_t ranks = 1;
  GroupId group = -1;
  StreamId stream = lead_stream;
  ExtentId routed = fixed_extent;
  std::int64_t most = 0, capacity = 0;
  Dim sent{0}, came{0};       // copies of tokens, to all ranks and from them; 0: a row for each expert goes
  GroupId copies_group = -1;  // of the same ranks, for what is as much as routers like
  std::int64_t parts = 1;     // of each expert, on as many neighbours: a row of a choice goes to each
  GroupId places = -1;        // who together have every expert; those that share one are neighbours in it
  bool copies() const { return sent.size > 0; }
  std::int64_t rounds() const { return most > capacity ? (most + capacity - 1) / capacity : 1; }
  /// Rows of what comes in a round.
  Dim rows(std::int64_t round) const { return {std::min(capacity, most - round * capacity), routed, round * capacity}; }
};

/// Where a tensor-parallel group is several blocks, each with tokens of its own, of which it computes the experts' part
/// (spec/expert_mesh.h): the group of a block, and the ranks of all blocks at one place; `tokens`: the extent that says
/// how many a block has.
struct ExpertBlocks {
  std::int64_t count = 1;
  GroupId group = -1, peers = -1;
  ExtentId tokens = fixed_extent;
};

/// How one rank computes a piece: which part, in which dtype, over how many tokens.
struct TensorSharding {
  const ModelSpec& model;
  DType compute = DType::f32;
  Dim tokens;
  TensorParallel tp;
  TokenParallel ulysses = {};
  ContextParallel context = {};
  ExpertParallel ep = {};
  ExpertBlocks blocks = {};
  std::int64_t head_parts = 1;  // of a tensor-parallel rank's heads
  FrozenRoles frozen = {};      // parameters of the layer that do not train
  bool trains(ParamRole role) const { return model.trains(role) && !frozen.test(static_cast<std::size_t>(role)); }
  std::int64_t heads() const;
  std::int64_t kv_heads() const;  // k < ranks: neighbours hold the same one
  /// How it computes what routers and experts do: as its block does, whose tokens are all of them then.
  TensorSharding of_experts() const;
  /// Columns of a value on one rank.
  std::int64_t width_of(Width) const;
  /// Rows of the residual stream, and of what is computed of its rows by themselves.
  Dim stream_tokens() const;
  Dim rows_of(Width w) const { return w == Width::hidden || w == Width::one ? stream_tokens() : tokens; }
};
/// Whether values of this width are those of routers and experts.
bool is_of_experts(Width);

/// This rank's tensor of a value, or of its gradient.
Tensor make_value(Emitter&, const TensorSharding&, const ForwardValue&, const std::string& name, DType);

/// Adds heads, kv_heads and head_dim, and of latent attention value_dim and rope_dim, as this rank has them, to an
/// attention-like op.
Op& with_heads(Op&, const TensorSharding&);
/// Adds what the forward says of it.
Op& with_attrs(Op&, const ForwardOp&);
/// Adds the rotary table's parameters.
Op& with_rope(Op&, const ModelSpec&);
/// Adds the part of the vocabulary that an embedding's table, or logits, answer for on this rank (graph/catalogue.h:
/// vocab_rows).
Op& with_vocabulary(Op&, const TensorSharding&);
/// The same of the positions that have a learned embedding.
Op& with_positions(Op&, const TensorSharding&);

/// All tokens of rows of the residual stream [T/n,H], for an op that takes them all: the tensor itself where every rank
/// has them.
Tensor all_tokens(Emitter&, const TensorSharding&, const std::string& name, const Tensor&);

/// Where an op leaves what `name` is on its way into the residual stream: in the stream's own tensor, or, with sequence
/// parallelism, beside it: summands [T,H].
Tensor make_summands(Emitter&, const TensorSharding&, const std::string& name, const Tensor& stream);
/// They become the stream's tensor: summed, on every rank its rows; where ranks have the same rows first over those
/// that have others, then over these. Nothing where there is one rank.
void sum_into_stream(Emitter&, const TensorSharding&, const std::string& op, const Tensor& summands,
                     const Tensor& stream);

}  // namespace hotbunk
