#include "rl/training_driver.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include "base/check.h"

namespace hotbunk {
namespace {

/// A checkpoint or export being written; on ranks that write nothing the sink is empty.
struct WeightsPayload final : Payload {
  std::optional<ParameterSink> sink;
  Diagnostics problems;  // of the first write that failed

  void take(const Op& op, std::span<const std::byte> source) {
    if (!sink || !problems.empty()) return;
    if (Status ok = sink->take(op, source); !ok) problems = std::move(ok.error());
  }
  void finish() {
    if (!sink) return;
    if (problems.empty())
      if (Status ok = sink->finish(); !ok) problems = std::move(ok.error());
    if (!problems.empty()) throw RuntimeFailure(render(problems));
  }
};

double metric(const std::vector<float>& metrics, Metric which) {
  return static_cast<double>(metrics[static_cast<std::size_t>(which)]);
}

}  // namespace

TrainingDriver::TrainingDriver(const Plan& plan, const Scenario& scenario, ParameterSource source,
                               DriverOptions options)
    : IterationDriver(plan, scenario), source_(std::move(source)), options_(std::move(options)) {}

void TrainingDriver::feed(Rank, const Op& op, const Args& args, std::span<std::byte> destination) {
  const auto slot = static_cast<Slot>(op.integer(Attr::slot));
  if (slot == Slot::parameter) {
    source_.read(op.name, op.boxes, op.outputs[0].dtype, destination);
    return;
  }
  const auto* payload = dynamic_cast<const SlotPayload*>(args.payload.get());
  HB_CHECK(payload != nullptr && payload->feed(slot, destination), "nothing to feed to '{}' (slot {})", op.name,
           static_cast<std::int64_t>(slot));
}

void TrainingDriver::fetch(Rank, const Op& op, const Args& args, std::span<const std::byte> source) {
  const auto slot = static_cast<Slot>(op.integer(Attr::slot));
  if (slot == Slot::sync_mismatches) {
    std::int32_t count = 0;
    std::memcpy(&count, source.data(), sizeof count);
    sync_mismatches_ += count;
    return;
  }
  if (slot == Slot::exported) {
    auto* weights = dynamic_cast<WeightsPayload*>(args.payload.get());
    HB_CHECK(weights != nullptr, "'{}' exported outside a checkpoint", op.name);
    weights->take(op, source);
    return;
  }
  auto* payload = dynamic_cast<SlotPayload*>(args.payload.get());
  HB_CHECK(payload != nullptr && payload->fetch(slot, source), "nobody takes '{}' (slot {})", op.name,
           static_cast<std::int64_t>(slot));
}

SampleLengths TrainingDriver::sample_lengths(std::int32_t step) {
  SampleLengths lengths;
  for (const TokenSequence& s : samples(step).sequences) {
    lengths.prompt_tokens.push_back(s.prompt_tokens);
    lengths.response_tokens.push_back(s.response_tokens());
  }
  return lengths;
}

std::shared_ptr<Payload> TrainingDriver::micro_payload(Iteration& it, const MicroId& id, const MicroBatch& micro) {
  const Samples& all = samples(it.step);
  const MiniBatch& mini = batches(it.step)[static_cast<std::size_t>(id.mini)];
  // DAPO's token mean: every response token of the mini-batch, on whatever rank, has the same weight.
  std::int64_t predicted = 0;
  for (std::int64_t i = mini.first_sample; i < mini.end_sample; ++i)
    predicted += all.sequences[static_cast<std::size_t>(i)].response_tokens();
  auto payload = std::make_shared<MicroPayload>();
  payload->mini = id.mini;
  payload->micro = id.micro;
  for (std::int64_t i : micro.samples) {
    const auto sample = static_cast<std::size_t>(i);
    payload->append(all.sequences[sample], 1.0f / static_cast<float>(predicted), all.advantages[sample]);
  }
  payload->ref_logps.assign(payload->token_ids.size(), 0.0f);
  if (id.role == PhaseRole::train && logps_step_ == it.step) {
    const auto replace = [&](PhaseRole role, std::vector<float>& logps) {
      const auto found = logps_.find({id.rank, role, id.mini, id.micro});
      if (found != logps_.end()) logps = found->second;
    };
    replace(PhaseRole::reference, payload->ref_logps);
    replace(PhaseRole::old_logprobs, payload->old_logps);
  }
  return payload;
}

std::shared_ptr<Payload> TrainingDriver::step_payload(Iteration& it, Rank, std::int64_t mini) {
  const OptimizerSpec& o = scenario().optimizer;
  auto payload = std::make_shared<StepPayload>();
  payload->mini = mini;
  payload->optimizer_step = (it.step - 1) * scenario().algorithm.mini_batches + mini + 1;
  const double warmed =
      o.warmup_steps > 0
          ? std::min(1.0, static_cast<double>(payload->optimizer_step) / static_cast<double>(o.warmup_steps))
          : 1.0;
  payload->learning_rate = static_cast<float>(o.lr * warmed);
  return payload;
}

std::shared_ptr<Payload> TrainingDriver::weights_payload(PhaseRole role, std::int32_t step, Rank rank) {
  if (role == PhaseRole::load) return {};
  auto payload = std::make_shared<WeightsPayload>();
  if (rank != 0 || options_.checkpoints.empty()) return payload;
  const bool last = role == PhaseRole::export_weights;
  const auto folder = options_.checkpoints / (last ? "final" : fmt::format("step_{}", step));
  const auto phase = static_cast<std::int16_t>(plan().phase_index(last ? "export" : "checkpoint"));
  auto sink = ParameterSink::create(folder, scenario().model, plan().program(rank), phase);
  if (!sink) throw RuntimeFailure(render(sink.error()));
  payload->sink = std::move(*sink);
  return payload;
}

void TrainingDriver::completed(Rank rank, const Args& args, std::int16_t phase) {
  if (auto* weights = dynamic_cast<WeightsPayload*>(args.payload.get())) weights->finish();
  if (auto* micro = dynamic_cast<MicroPayload*>(args.payload.get());
      micro != nullptr && role(phase) != PhaseRole::train)
    keep_logps(rank, args.step, role(phase), *micro);
  if (const auto* step = dynamic_cast<const StepPayload*>(args.payload.get())) add_step_metrics(args.step, *step);
  if (sync_mismatches_ > 0)
    throw RuntimeFailure(
        fmt::format("rank {}: after the weight sync of step {}, {} elements of the rollout's weights "
                    "are not the training weights in the rollout's dtype",
                    rank, args.step, sync_mismatches_.load()));
}

void TrainingDriver::keep_logps(Rank rank, std::int32_t step, PhaseRole pass, MicroPayload& micro) {
  if (logps_step_ != step) {
    logps_.clear();
    gap_ = {};
    logps_step_ = step;
  }
  if (pass == PhaseRole::old_logprobs)
    for (std::size_t t = 0; t < micro.logps.size(); ++t) {
      if (micro.targets[t] < 0) continue;
      const double gap = std::abs(static_cast<double>(micro.logps[t]) - static_cast<double>(micro.old_logps[t]));
      gap_.sum += gap;
      gap_.max = std::max(gap_.max, gap);
      ++gap_.tokens;
    }
  logps_[{rank, pass, micro.mini, micro.micro}] = std::move(micro.logps);
}

void TrainingDriver::add_step_metrics(std::int32_t step, const StepPayload& payload) {
  HB_CHECK(payload.metrics.size() == static_cast<std::size_t>(Metric::count), "step {}: no metrics fetched", step);
  if (payload.mini == 0) step_metrics_.clear();
  step_metrics_.push_back(payload.metrics);
  note(step, "actor/lr", static_cast<double>(payload.learning_rate));
  if (payload.mini + 1 == scenario().algorithm.mini_batches) finish_step(step);
}

/// Means over the step's mini-batches, as verl reports them.
void TrainingDriver::finish_step(std::int32_t step) {
  const auto mean = [&](Metric which) {
    double sum = 0.0;
    for (const auto& m : step_metrics_) sum += metric(m, which);
    return sum / static_cast<double>(step_metrics_.size());
  };
  const double tokens = mean(Metric::tokens);
  note(step, "loss", mean(Metric::loss));
  note(step, "actor/grad_norm", mean(Metric::grad_norm));
  note(step, "actor/entropy", mean(Metric::entropy));
  if (scenario().algorithm.name != AlgorithmName::sft) {
    note(step, "actor/pg_loss", mean(Metric::policy_loss));
    note(step, "actor/ppo_kl", mean(Metric::kl_old));
    note(step, "actor/pg_clipfrac", tokens > 0.0 ? mean(Metric::clipped) / tokens : 0.0);
    if (scenario().algorithm.reference) note(step, "actor/kl_loss", mean(Metric::kl_ref));
    if (logps_step_ == step && gap_.tokens > 0) {
      note(step, "rollout/logprob_gap_mean", gap_.sum / static_cast<double>(gap_.tokens));
      note(step, "rollout/logprob_gap_max", gap_.max);
    } else if (!scenario().algorithm.old_logprobs) {
      // The loss compared with the rollout's own log-probs; before the first update that difference is the gap.
      note(step, "rollout/logprob_gap_max", metric(step_metrics_.front(), Metric::max_logp_gap));
    }
  }
  if (options_.on_step) options_.on_step({step, metrics_[step]});
}

void TrainingDriver::report(Trace& trace) const {
  IterationDriver::report(trace);
  for (StepMetrics& m : trace.metrics)
    if (const auto found = metrics_.find(m.step); found != metrics_.end())
      m.values.insert(found->second.begin(), found->second.end());
}

}  // namespace hotbunk
