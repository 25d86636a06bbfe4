#include "rl/inference_driver.h"

#include <algorithm>

#include "base/check.h"
#include "graph/boxes.h"
#include "lowering/sample_rows.h"
#include "spec/catalog.h"

namespace hotbunk {
namespace {

constexpr std::int64_t pass_tokens = 2048;                    // of one pass over packed tokens
constexpr std::int64_t chunk_bytes = std::int64_t{64} << 20;  // of fp32 logits held at once
constexpr std::int64_t running_requests = 64;

std::int64_t longest(std::span<const TokenSequence> sequences) {
  std::size_t n = 1;
  for (const TokenSequence& s : sequences) n = std::max(n, s.tokens.size());
  return static_cast<std::int64_t>(n);
}

/// What both purposes share: ranks of this machine that divide its memory, one sample per sequence.
Scenario base_scenario(const ModelSpec& model, std::span<const TokenSequence> sequences, std::int64_t ranks,
                       DType dtype) {
  Scenario s;
  s.name = model.name;
  s.model = model;
  s.cluster.gpu.is_cpu = true;
  s.cluster.gpus_per_node = ranks;
  s.cluster.device_memory_bytes = local_machine().memory_bytes / ranks;
  s.train.layout.dp = ranks, s.train.layout.fsdp = -1;
  s.train.precision.params = dtype;
  s.rollout.dtype = dtype;
  s.rollout.engine = RolloutEngine::hotbunk;
  s.rollout.layout.tp = ranks;
  s.algorithm.prompts = static_cast<std::int64_t>(sequences.size());
  s.algorithm.samples_per_prompt = 1;
  s.train.micro_batch_tokens = longest(sequences);
  return s;
}

}  // namespace

Scenario score_scenario(const ModelSpec& model, std::span<const TokenSequence> sequences, DType dtype) {
  Scenario s = base_scenario(model, sequences, 1, dtype);
  std::int64_t total = 0;
  for (const TokenSequence& q : sequences) total += static_cast<std::int64_t>(q.tokens.size());
  s.train.micro_batch_tokens = std::max(s.train.micro_batch_tokens, std::min(total, pass_tokens));
  const auto row = static_cast<std::int64_t>(sizeof(float)) * model.vocab;
  s.train.loss_chunk_tokens = std::clamp<std::int64_t>(chunk_bytes / row, 1, s.train.micro_batch_tokens);
  return s;
}

Scenario generate_scenario(const ModelSpec& model, std::span<const TokenSequence> prompts, const GenerateOptions& o) {
  Scenario s = base_scenario(model, prompts, o.tp, o.dtype);
  std::int64_t total = 0;
  for (const TokenSequence& p : prompts) total += static_cast<std::int64_t>(p.tokens.size());
  s.workload.prompt_tokens.max = static_cast<double>(longest(prompts));
  s.workload.response_tokens.max = static_cast<double>(o.max_new_tokens);
  s.train.micro_batch_tokens = max_sample_tokens(s);
  s.rollout.temperature = o.temperature;
  s.rollout.max_running_requests = std::min(s.algorithm.prompts, running_requests);
  s.rollout.max_prefill_tokens = std::min(total, pass_tokens);
  s.seed = o.seed;
  return s;
}

Result<std::unique_ptr<InferenceDriver>> InferenceDriver::create(const Plan& plan, const Scenario& s,
                                                                 std::vector<TokenSequence> sequences) {
  if (plan.phase_index("rollout") >= 0)
    if (Diagnostics problems = check_lengths(s, kv_blocks_of(plan)); !problems.empty())
      return fail(std::move(problems));
  auto source = ParameterSource::open(s.model, s.seed);
  if (!source) return fail(std::move(source.error()));
  return std::unique_ptr<InferenceDriver>(new InferenceDriver(plan, s, std::move(*source), std::move(sequences)));
}

InferenceDriver::InferenceDriver(const Plan& plan, const Scenario& s, ParameterSource source,
                                 std::vector<TokenSequence> sequences)
    : IterationDriver(plan, s), source_(std::move(source)), sequences_(std::move(sequences)) {
  HB_CHECK(static_cast<std::int64_t>(sequences_.size()) == s.algorithm.prompts, "{} sequences for {} prompts",
           sequences_.size(), s.algorithm.prompts);
}

std::vector<std::int64_t> InferenceDriver::prompt_tokens(std::int32_t) {
  std::vector<std::int64_t> lengths;
  for (const TokenSequence& s : sequences_) lengths.push_back(s.prompt_tokens);
  return lengths;
}

std::vector<std::int64_t> InferenceDriver::response_caps(std::int32_t) {
  return std::vector<std::int64_t>(sequences_.size(), max_response_tokens(scenario()));
}

SampleLengths InferenceDriver::sample_lengths(std::int32_t) {
  SampleLengths lengths;
  for (const TokenSequence& s : sequences_) {
    lengths.prompt_tokens.push_back(s.prompt_tokens);
    lengths.response_tokens.push_back(s.response_tokens());
  }
  return lengths;
}

std::shared_ptr<Payload> InferenceDriver::rollout_payload(Iteration& it, std::int64_t engine,
                                                          const ScheduledStep& step) {
  return feed_step(it.engines[static_cast<std::size_t>(engine)].scheduler, step, sequences_, scenario().seed, it.step,
                   max_blocks_per_seq(scenario()));
}

std::vector<std::uint8_t> InferenceDriver::ended(Iteration& it, std::int64_t engine, const ScheduledStep& step,
                                                 const Args& args) {
  const Scheduler& scheduler = it.engines[static_cast<std::size_t>(engine)].scheduler;
  statistics_ = scheduler.statistics();
  return take_step(scheduler, step, args, sequences_, static_cast<std::int32_t>(scenario().model.eos_token));
}

std::shared_ptr<Payload> InferenceDriver::micro_payload(Iteration&, const MicroId& id, const MicroBatch& micro) {
  auto payload = std::make_shared<MicroPayload>();
  payload->mini = id.mini;
  payload->micro = id.micro;
  for (std::int64_t i : micro.samples) payload->append(sequences_[static_cast<std::size_t>(i)], 0.0f, 0.0f);
  return payload;
}

void InferenceDriver::feed(Rank rank, const BoundOp& op, const Args& args, std::span<std::byte> destination) {
  const auto slot = static_cast<Slot>(op->integer(Attr::slot));
  if (slot == Slot::parameter) {
    source_.read(op.name(), boxes_of(*op, places_of(plan(), rank)), op->outputs[0].dtype, destination);
    return;
  }
  const auto* payload = dynamic_cast<const SlotPayload*>(args.payload.get());
  HB_CHECK(payload != nullptr && payload->feed(slot, destination), "nothing to feed to '{}'", op.name());
}

void InferenceDriver::fetch(Rank, const BoundOp& op, const Args& args, std::span<const std::byte> source) {
  auto* payload = dynamic_cast<SlotPayload*>(args.payload.get());
  HB_CHECK(payload != nullptr && payload->fetch(static_cast<Slot>(op->integer(Attr::slot)), source),
           "nobody takes '{}'", op.name());
}

void InferenceDriver::completed(Rank rank, const Args& args, std::int16_t) {
  const auto* payload = dynamic_cast<const MicroPayload*>(args.payload.get());
  if (payload == nullptr) return;
  const auto& mini = batches(args.step)[static_cast<std::size_t>(payload->mini)];
  const MicroBatch& micro = mini.ranks[static_cast<std::size_t>(rank)][static_cast<std::size_t>(payload->micro)];
  for (std::size_t i = 0; i < micro.samples.size(); ++i) {
    TokenSequence& sequence = sequences_[static_cast<std::size_t>(micro.samples[i])];
    const auto rows = payload->logps.begin() + payload->cu_seqlens[i];
    sequence.rollout_logps.assign(rows + sequence.prompt_tokens - 1,
                                  rows + sequence.prompt_tokens - 1 + sequence.response_tokens());
  }
}

}  // namespace hotbunk
