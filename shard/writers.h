// Who writes a forward's ops, and their backward, on one rank (rules.h). The rules of a mixture of experts are in
// experts.cc, of latent attention in latent_attention.cc, of adapters in adapters.cc, all others in rules.cc.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "base/check.h"
#include "shard/expert_parallel.h"
#include "shard/rules.h"

namespace hotbunk {

/// The same value as attention computes on it (ulysses.h).
inline ValueId in_attention(const Forward& f, const TensorSharding& s, ValueId id) {
  return s.ulysses.ranks > 1 ? static_cast<ValueId>(std::ssize(f.values())) + id : id;
}

OpKind backward_of_activation(OpKind);
inline bool is_norm(OpKind k) { return k == OpKind::rms_norm || k == OpKind::layer_norm; }
/// The sum that a norm is of.
inline ValueId sum_of(const ForwardOp& norm) { return norm.outputs[2]; }
/// What an op leaves.
std::vector<ValueId> results_of(const Forward&, const TensorSharding&, const ForwardOp&);

/// Of what works on rows of experts: how many ranks share those of all choices, where some do; of rows that came to a
/// rank it has all.
Op& with_share(Op&, const TensorSharding&);

/// Of products that are summands of ranks which share each expert, every rank adds its part of the bias, in its
/// columns. `leaves`: what they leave goes back to its tokens.
Op& with_bias_share(Op&, const ForwardOp&, bool leaves, const TensorSharding&);

/// Whether the group is several blocks and an op's tokens are those of the rank's.
inline bool is_of_block(const Forward& f, const TensorSharding& s, const ForwardOp& op) {
  return s.blocks.count > 1 && is_of_experts(f.value(op.outputs[0]).width);
}

/// What adapters that each expert has beside a grouped product's matrices do of rows of experts, all that a rank has or
/// those of a round: as those of a linear (adapters.cc).
class ExpertAdapters {
 public:
  /// `s`: of experts. `suffix`: of the names of a round's ops and tensors. All but it must outlive it.
  ExpertAdapters(Emitter&, const Forward&, const TensorSharding& s, const Values&, const ForwardOp& grouped,
                 const Tensor& offsets, std::string suffix = "");
  /// What they make of x, added to what the matrices left.
  void add(const Tensor& x, const Tensor& found) const;
  /// The gradients of what each adapter's A left; of its two matrices; and of x, added to what the matrices found.
  std::vector<Tensor> through(const Tensor& dy) const;
  void of_weights(BackwardEmitter&, const Tensor& x, const Tensor& dy, const std::vector<Tensor>& d_down,
                  std::int64_t accumulate) const;
  void of_input(const std::vector<Tensor>& d_down, const Tensor& dx) const;

 private:
  Op& emit(OpKind, const Adapter&, const char* what, std::vector<Tensor> in, const Tensor& out) const;
  Tensor down(const Adapter&, const Tensor& x, const char* what) const;

  Emitter& to_;
  const Forward& f_;
  const TensorSharding& s_;
  const Values& values_;
  const ForwardOp& op_;
  const Tensor offsets_;
  const std::string suffix_;
};

class ForwardWriter {
 public:
  ForwardWriter(const Forward& f, const TensorSharding& s, Emitter& to, Values& values)
      : f_(f), s_(s), e_(s.of_experts()), to_(to), values_(values) {}

  void write(const ForwardOp&);

 private:
  void add_positions(const ForwardOp&, const Tensor& found);
  void norm(const ForwardOp&);
  void attention(const ForwardOp&);
  void latent_norm(const ForwardOp&);
  void latent_attention(const ForwardOp&);
  void linear(const ForwardOp&);
  /// What they make of x, added to what the matrices left.
  void add_adapters(const ForwardOp&, const Tensor& x, const Tensor& found);
  void route(const ForwardOp&);
  void expert_sort(const ForwardOp&);
  void dispatch(const ForwardOp&);
  void grouped_linear(const ForwardOp&);
  void rounds(const ForwardOp& down);
  void combine(const ForwardOp&);

  Op& emit(OpKind kind, const std::string& name, std::vector<Tensor> inputs, std::vector<Tensor> outputs) {
    return with_count_of_rows(to_.emit(kind, lead_stream, name, std::move(inputs), std::move(outputs)), f_, s_,
                              values_);
  }
  const Tensor& at(ValueId id) const {
    HB_CHECK(is_there(values_, id), "'{}' is not there", f_.value(id).name);
    return values_[static_cast<std::size_t>(id)];
  }
  Tensor make(ValueId);
  /// All tokens of a value of the residual stream, or those of the rank's block; gathered once, however many ops take
  /// them.
  Tensor all_tokens_of(ValueId, bool of_block = false);
  /// Beside what experts left in the stream's tensor, summands of all ranks.
  void add_beside(const std::string& op, const Tensor& summands, const Tensor& stream);

  const Forward& f_;
  const TensorSharding& s_;
  const TensorSharding e_;  // of routers and experts
  Emitter& to_;
  Values& values_;
  std::map<std::pair<ValueId, bool>, Tensor> gathered_;
};

class BackwardWriter {
 public:
  BackwardWriter(const Forward&, const TensorSharding&, BackwardEmitter&, const Values&, Values& gradients,
                 bool accumulate);

  void write(const ForwardOp&);

 private:
  void norm(const ForwardOp&);
  void latent_norm(const ForwardOp&);
  void latent_attention(const ForwardOp&);
  void sinks(const ForwardOp&, const Tensor& d_attended);
  void linear(const ForwardOp&);
  /// The gradients of what each adapter's A left; of its two matrices; and of x, added to what the matrices found.
  std::vector<Tensor> through_adapters(const ForwardOp&, const Tensor& dy);
  void of_adapters(const ForwardOp&, const Tensor& x, const Tensor& dy, const std::vector<Tensor>& d_down);
  void add_of_adapters(const ForwardOp&, const std::vector<Tensor>& d_down, const Tensor& dx);
  void route(const ForwardOp&);
  void dispatch(const ForwardOp&);
  void grouped_linear(const ForwardOp&);
  void rounds(const ForwardOp& down);
  void combine(const ForwardOp&);

  Op& emit(OpKind kind, const std::string& name, std::vector<Tensor> inputs, std::vector<Tensor> outputs) {
    return with_count_of_rows(to_.emit(kind, lead_stream, name, std::move(inputs), std::move(outputs)), f_, s_,
                              values_);
  }
  const Tensor& value(ValueId id) const {
    HB_CHECK(is_there(values_, id), "backward reads '{}', which is not there",
             f_.value(id % static_cast<ValueId>(std::ssize(f_.values()))).name);
    return values_[static_cast<std::size_t>(id)];
  }
  Tensor& gradient_of(ValueId id) { return gradients_[static_cast<std::size_t>(id)]; }
  Tensor gradient(ValueId id) const {
    HB_CHECK(is_there(gradients_, id), "'{}' has no gradient", f_.value(id).name);
    return gradients_[static_cast<std::size_t>(id)];
  }
  Tensor make(ValueId);

  /// Where an op adds what it finds of the gradient of a value of the residual stream: summands, to which each op that
  /// takes the value adds its own; where there are several blocks, those of routers and experts, whose summands are a
  /// block's, apart from others (`of_block`). `first`: nothing is there yet.
  struct Summands {
    Tensor tensor;
    bool first = true;
  };
  Summands summands_of(ValueId, bool of_block = false);
  /// `op` has added its own: when it was the last one, summands become the gradient.
  void added(ValueId, const std::string& op, bool of_block = false);

  const Forward& f_;
  const TensorSharding& s_;
  const TensorSharding e_;  // of routers and experts
  BackwardEmitter& to_;
  const Values& values_;
  Values& gradients_;
  std::int64_t accumulate_;
  std::map<std::pair<ValueId, bool>, Tensor> summands_;
  std::map<ValueId, Tensor> beside_;                // of all ranks, in the stream: waits for what experts find
  std::map<std::pair<ValueId, bool>, int> takers_;  // ops that take it as the stream and have added nothing yet
};

}  // namespace hotbunk
