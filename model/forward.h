// A piece of a model as one rank computes it that has all of it: ops over logical tensors, with the roles of the
// parameters that they take. It knows no rank, no shard, no collective and no backward: those follow by the rules of
// shard/, so that a family of models is written down once, whoever trains or serves it.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "graph/op.h"
#include "spec/model.h"

namespace hotbunk {

/// What a row of a logical tensor counts. Tensors of a forward have a row for each token.
enum class Width : std::uint8_t {
  one,       // a number
  token,     // a number, of what every rank has of all tokens
  hidden,    // the residual stream
  qkv,       // query heads, key heads, value heads
  attended,  // query heads
  heads,     // a number for each query head
  qk_heads,  // a number for each query head and each key head
  gate_up,   // twice the MLP's inner width
  inner,
  // of latent attention
  queries,         // query heads alone
  query_latent,    // what they are made of
  latent_and_key,  // what keys and values are made of, and the part of a key that all heads share, not rotated
  latent,          // the one
  shared_key,      // the other
  // of a mixture of experts, of which each token chooses some
  experts,         // a number for each expert
  choices,         // a number for each expert chosen
  choice_rows,     // and for each part of one, where other ranks have these
  routed,          // the residual stream, once for each of them
  expert_gate_up,  // each: twice the inner width of an expert
  expert_inner,
  shared_gate_up,  // of the experts that every token takes
  shared_inner,
  beside_routed,   // the residual stream's width: what they leave, to which the others' is added
  expert_offsets,  // no rows of tokens: for each expert, where its rows begin
};

/// What a value's elements are.
enum class Content : std::uint8_t {
  computed,   // in what is computed in
  statistic,  // fp32
  index,      // int32; has no gradient
};

struct ForwardValue {
  std::string name;
  Width width = Width::hidden;
  Content content = Content::computed;
};
using ValueId = std::int32_t;  // index into Forward::values()

/// Parameters of a unit from one role to another, which lie side by side, as one matrix or vector: q_proj … v_proj.
struct Weight {
  ParamRole first{}, last{};
  explicit(false) Weight(ParamRole role) : first(role), last(role) {}
  Weight(ParamRole from, ParamRole to) : first(from), last(to) {}
  bool has(ParamRole) const;
};

/// An adapter beside a linear's matrix (spec/model.h: LoraSpec): y += factor (x A^T) B^T. Of matrices that lie side by
/// side one may have an adapter and another none.
struct Adapter {
  ParamRole base{};  // whose columns of y it adds to, and those behind it of which B has rows
  Weight a, b;
  double factor = 1.0;
  std::string_view op;  // what its ops are called
};

/// What kind an op is of says what its values are, as in the op catalogue, parameters and the caller's feeds aside:
///   embedding   -> y                                     by ids, and with a second table by positions: the sum of both
///   rms_norm, layer_norm   x, (residual) -> normed, rstd, sum       without a residual the sum is x itself
///   linear      x -> y
///   qk_norm     x -> y, rstd
///   rope        x -> x
///   attention   x -> y, lse                               with a weight: its heads' sinks
///   latent_norm      x -> latent, key, rstd
///   latent_attention queries, latent, key -> y, lse, qkv: training's attention of packed heads, an engine's over what
///   it
///                    keeps; its weight makes keys and values of latents
///   swiglu, clamped_swiglu, geglu, gelu   x -> y
///   route           logits -> weights, experts
///   expert_sort     experts -> rows, offsets
///   dispatch        x, rows -> y
///   grouped_linear  x, offsets -> y
///   combine         y, rows, weights, (base) -> z
struct ForwardOp {
  OpKind kind{};
  std::string name;
  std::vector<ValueId> inputs;
  std::vector<Weight> weights;
  std::vector<ValueId> outputs;
  /// Attributes of the op, and of its backward, that sizes and shares do not say: windows, caps, offsets.
  std::vector<std::pair<Attr, AttrValue>> attrs = {};
  std::vector<Adapter> adapters = {};  // of a linear, or of each expert's
};

/// What attention does to scores, beside the scale of 1/sqrt(head_dim); 0: it does not.
struct AttentionScores {
  std::int64_t window = 0;  // tokens that a query sees, itself the last
  double scale = 0.0;       // in the place of that scale
  double softcap = 0.0;     // c: c tanh(score / c)
};

class Forward {
 public:
  /// What the caller gives.
  ValueId input(std::string name, Width);

  /// `factor`: of what the table has. `positions`: a table of learned ones.
  ValueId embedding(std::string op, std::string out, Weight table, double factor = 1.0,
                    std::optional<Weight> positions = {});
  struct Normed {
    ValueId normed, sum;
  };
  /// `offset`: what is added to the weight. `eps`: in the place of the model's.
  Normed rms_norm(std::string op, ValueId x, std::optional<ValueId> residual, Weight, std::string normed,
                  std::string sum, double offset = 0.0, double eps = 0.0);
  Normed layer_norm(std::string op, ValueId x, std::optional<ValueId> residual, Weight, Weight bias, std::string normed,
                    std::string sum);
  ValueId linear(std::string op, ValueId x, std::string out, Width, Weight matrix, std::optional<Weight> bias = {});
  /// The same with the adapters that the model has beside these matrices.
  ValueId adapted(const ModelSpec&, std::string op, ValueId x, std::string out, Width, Weight matrix,
                  std::optional<Weight> bias = {});
  ValueId qk_norm(std::string op, ValueId x, std::string out, Weight q, Weight k, double offset = 0.0);
  /// In place. `theta`: in the place of the model's and its scaling.
  ValueId rope(std::string op, ValueId x, double theta = 0.0);
  /// `sinks`: a score for each query head that softmax counts besides those of keys.
  ValueId attention(std::string op, ValueId x, std::string out, const AttentionScores& = {},
                    std::optional<Weight> sinks = {});
  /// Of latent attention: the first is the norm of the one part of x, with an eps of its own, the other the part of a
  /// key that all heads share, rotated.
  struct Latent {
    ValueId latent, key;
  };
  Latent latent_norm(std::string op, ValueId x, Weight, double eps);
  /// Its expansion with an adapter where the model has one.
  ValueId latent_attention(const ModelSpec&, std::string op, ValueId queries, const Latent&, std::string out,
                           Weight expansion, const AttentionScores& = {});
  ValueId swiglu(std::string op, ValueId x, std::string out) {
    return activation(OpKind::swiglu, std::move(op), x, std::move(out));
  }
  /// Gates are at most `limit`, ups in ±`limit`; (up + 1) gate sigmoid(alpha gate).
  ValueId clamped_swiglu(std::string op, ValueId x, std::string out, double limit, double alpha);
  ValueId geglu(std::string op, ValueId x, std::string out) {
    return activation(OpKind::geglu, std::move(op), x, std::move(out));
  }
  ValueId gelu(std::string op, ValueId x, std::string out) {
    return activation(OpKind::gelu, std::move(op), x, std::move(out));
  }

  /// Which experts each token takes.
  struct Routed {
    ValueId weights, rows, offsets;
  };
  /// `bias`: of scores, for the choice alone.
  Routed route(std::string op, ValueId logits, std::optional<Weight> bias = {});
  ValueId dispatch(std::string op, ValueId x, const Routed&, std::string out);
  /// Of each expert's rows by its matrix, which lie one below the other.
  /// With the adapters that the model has beside each expert's matrices.
  ValueId grouped_linear(const ModelSpec&, std::string op, ValueId x, const Routed&, std::string out, Width,
                         Weight matrices, std::optional<Weight> biases = {});
  /// `base`: what the result begins with.
  ValueId combine(std::string op, ValueId y, const Routed&, std::string out, std::optional<ValueId> base = {});

  const std::vector<ForwardValue>& values() const { return values_; }
  const ForwardValue& value(ValueId id) const { return values_[static_cast<std::size_t>(id)]; }
  const std::vector<ForwardOp>& ops() const { return ops_; }

 private:
  static void add_adapters(const ModelSpec&, ForwardOp&);
  ValueId make(std::string name, Width, Content = Content::computed);
  Normed norm(ForwardOp, std::optional<ValueId> residual, std::string normed, std::string sum);
  ValueId activation(OpKind, std::string op, ValueId x, std::string out);

  std::vector<ForwardValue> values_;
  std::vector<ForwardOp> ops_;
};

}  // namespace hotbunk
