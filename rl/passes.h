// What the feeds of one block hold, and what its fetches brought: the payloads that RL drivers attach to Args.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "exec/driver.h"
#include "exec/scheduler.h"
#include "graph/slots.h"

namespace hotbunk {

/// A prompt and its response as one sequence of token ids.
struct TokenSequence {
  std::vector<std::int32_t> tokens;
  std::int64_t prompt_tokens = 0;
  std::vector<float> rollout_logps;  // [response tokens], as sampled; empty for SFT
  std::int64_t response_tokens() const { return static_cast<std::int64_t>(tokens.size()) - prompt_tokens; }
};

/// Data that is fed and fetched by slot. A feed's tensor may be longer than its data: `fill` says what the rest is.
struct SlotPayload : Payload {
  /// False when this payload has nothing for the slot.
  virtual bool feed(Slot, std::span<std::byte> destination) const = 0;
  virtual bool fetch(Slot, std::span<const std::byte> source) = 0;
};

/// One step of an engine.
struct EnginePayload final : SlotPayload {
  StepTables tables;
  std::vector<std::int32_t> token_ids;  // [tokens]
  std::vector<float> uniforms;          // [seqs]
  std::vector<std::int32_t> sampled_ids;
  std::vector<float> sampled_logps;  // [seqs], fetched
  bool feed(Slot, std::span<std::byte> destination) const override;
  bool fetch(Slot, std::span<const std::byte> source) override;
};

/// One step of all groups of an engine: a rank is fed what its own group has, and learns what all of them sampled.
struct JointPayload final : SlotPayload {
  std::vector<std::shared_ptr<EnginePayload>> groups;
  std::size_t own = 0;
  std::int64_t seqs = 0;  // slots of each in what is fetched
  bool feed(Slot, std::span<std::byte> destination) const override;
  bool fetch(Slot, std::span<const std::byte> source) override;
};
/// Of EnginePayloads.
std::shared_ptr<Payload> joined(const std::vector<std::shared_ptr<Payload>>& groups, std::size_t own,
                                std::int64_t seqs);

/// This rank's finished samples, and everybody's.
struct ExchangePayload final : SlotPayload {
  std::vector<std::int32_t> rows, all_rows;
  std::vector<float> logps, all_logps;
  bool feed(Slot, std::span<std::byte> destination) const override;
  bool fetch(Slot, std::span<const std::byte> source) override;
};

/// One packed micro-batch. Row t of a sequence predicts its token t + 1: targets[t] = tokens[t + 1] where that is a
/// response token, else -1; per-token data of a response token stands in the row that predicts it.
struct MicroPayload final : SlotPayload {
  std::int64_t mini = 0, micro = 0;
  std::vector<std::int32_t> token_ids, positions, targets;            // [tokens]
  std::vector<std::int32_t> cu_seqlens{0};                            // [seqs + 1]
  std::vector<float> loss_weights, advantages, old_logps, ref_logps;  // [tokens]
  std::vector<std::int32_t> sequence_ids;                             // [tokens], as Slot::sequence_ids has them
  std::vector<float> sequence_weights;                                // [tokens]
  std::vector<float> logps;                                           // [tokens], fetched
  /// Appends a sequence; each predicting row gets the weight and the advantage, others 0.
  void append(const TokenSequence&, float weight, float advantage);
  /// So many tokens behind the last sequence, which is theirs too and learns nothing of them: it comes to whole chunks.
  void pad(std::int64_t tokens);
  /// Keeps of each sequence the rows of one context-parallel rank (layout/sequence.h: zigzag_chunks), which they then
  /// begin and end with.
  void take_chunks(std::int64_t ranks, std::int64_t rank);
  /// Keeps rows [begin, end) of what there is for each token: a rank's own part of sequences that ranks share.
  void cut(std::int64_t begin, std::int64_t end);
  bool feed(Slot, std::span<std::byte> destination) const override;
  bool fetch(Slot, std::span<const std::byte> source) override;

 private:
  /// f of each vector that has an element for each token, but log-probs.
  template <class F>
  void each_column(F&& f) {
    f(token_ids), f(positions), f(targets), f(loss_weights), f(advantages), f(old_logps), f(sequence_ids);
    f(sequence_weights);
  }
};

/// What the metrics of a mini-batch start from.
struct FirstMetricsPayload final : SlotPayload {
  std::vector<float> metrics = std::vector<float>(static_cast<std::size_t>(Metric::count), 0.0f);
  bool feed(Slot, std::span<std::byte> destination) const override;
  bool fetch(Slot, std::span<const std::byte>) override { return false; }
};

/// One optimizer step.
struct StepPayload final : SlotPayload {
  std::int64_t mini = 0;
  float learning_rate = 0.0f;
  std::int64_t optimizer_step = 1;
  std::function<bool()> stop_requested;  // asked when it is fed; may be empty
  std::vector<float> metrics;            // fetched
  bool feed(Slot, std::span<std::byte> destination) const override;
  bool fetch(Slot, std::span<const std::byte> source) override;
};

/// What a step of an engine is fed: its chunks' tokens of `sequences` (by sample), and uniforms that are a function of
/// (seed, iteration, sample, position) alone.
std::shared_ptr<EnginePayload> feed_step(const Scheduler&, const ScheduledStep&,
                                         std::span<const TokenSequence> sequences, std::int64_t seed,
                                         std::int32_t iteration, std::int64_t max_blocks);
/// Appends the tokens and log-probs that the step of these Args sampled to their sequences; [chunk]: 1 where the token
/// was `eos` (-1: there is none).
std::vector<std::uint8_t> take_step(const Scheduler&, const ScheduledStep&, const Args&,
                                    std::span<TokenSequence> sequences, std::int32_t eos);

/// Rows of the exchange (lowering/sample_rows.h): header, tokens, the rest -1; log-probs beside them.
void write_row(const TokenSequence&, std::int64_t sample, std::span<std::int32_t> row, std::span<float> logps);
/// The sample's index, or -1 for an empty row.
std::int64_t read_row(std::span<const std::int32_t> row, std::span<const float> logps, TokenSequence&);

}  // namespace hotbunk
