// Seconds of one step of one pipeline stage of an engine, and the bytes that its ranks exchange.
#pragma once
#include "planner/rl/rl_model.h"
#include "planner/rl/step_parts.h"

namespace hotbunk {

class EngineStep {
 public:
  EngineStep(const RlModel&, const RolloutPoint&);

  /// One token for each of `sequences` with `context` tokens in the cache. Book: StepSeconds or StepParts.
  template <class Book>
  Book decode(const RolloutStage&, double sequences, double context) const;
  /// `tokens` of prompts, with the head on the `sequences` that end in the step.
  template <class Book>
  Book prefill(const RolloutStage&, double tokens, double sequences) const;
  /// All hops that a step of `local` tokens on each context-parallel rank makes between stages, and the sampled tokens'
  /// way back to the first one.
  double hops_seconds(double local, double sequences) const;
  /// Of one rank while the engine passes `whole` tokens through its layers, `prompt` of them of prompts; `local`: those
  /// of a context-parallel rank, which takes a part of the prompts and all of the rest.
  RolloutPayload payload(const RolloutStage&, double whole, double local, double prompt) const;

  /// Members of an engine `apart` of its ranks from each other.
  GroupShape group(std::int64_t members, std::int64_t apart = 1) const;
  /// Whether two neighbouring stages lie on different nodes somewhere.
  bool leaves_node() const { return crossings_ > 0; }

 private:
  /// Tokens of a step: of the engine, and of one context-parallel rank. Decoding they are the same ones.
  struct Tokens {
    double whole = 0, local = 0;
    bool decode = false;
  };
  // What a step books, in this order.
  template <class Book>
  void layers(const RolloutStage&, const Tokens&, Book&) const;
  template <class Book>
  void exchange(const RolloutStage&, const Tokens&, Book&) const;
  template <class Book>
  void ends(const RolloutStage&, double sequences, Book&) const;
  template <class Book>
  void attend(const RolloutStage&, double flops, double keys, double bytes, Book&) const;
  template <class Book>
  void context(const RolloutStage&, const Tokens&, Book&) const;
  template <class Book>
  void arrive(const RolloutStage&, const Tokens&, Book&) const;
  template <class Book>
  void launch(const RolloutStage&, double each, Book&) const;
  double dispatch_bytes(const RolloutStage&, double tokens) const;
  double attended_bytes() const;
  double sums_bytes() const;
  /// Whether context ranks add up what each found in its part of the cache for prompts as well.
  bool adds_parts() const { return r_.cp > 1 && ways_ == 1.0; }
  double lumped_seconds(double flops, double bytes) const;
  double product_seconds(double rows, double n, double k) const;
  double kernels(const RolloutStage&) const;
  bool sends_rows() const;
  double experts_reduced(const RolloutStage&) const;

  const RlModel& rl_;
  const ModelSpec& model_;
  const CostModel& cost_;
  const RlSetting& set_;
  const ModelCounts& counts_;
  const RolloutPoint r_;
  double ways_ = 1;             // token_shares
  double moe_ = 0;              // layers of the model with experts
  std::int64_t apart_ = 1;      // ranks from one stage to the next
  std::int64_t crossings_ = 0;  // boundaries between stages that lie between nodes
};

}  // namespace hotbunk
