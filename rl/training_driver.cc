#include "rl/training_driver.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>

#include "base/check.h"
#include "base/max.h"
#include "exec/divergence.h"
#include "graph/boxes.h"
#include "rl/checkpoint_parts.h"
#include "rl/manifest.h"
#include "spec/loader.h"
#include "spec/router_loss.h"

namespace hotbunk {
namespace {

double metric(const std::vector<float>& metrics, Metric which) {
  return static_cast<double>(metrics[static_cast<std::size_t>(which)]);
}

bool is_moment(Slot slot) { return slot == Slot::first_moment || slot == Slot::second_moment; }

}  // namespace

TrainingDriver::TrainingDriver(const Plan& plan, const Scenario& s, LoadSources sources, DriverOptions options)
    : IterationDriver(plan, s), sources_(std::move(sources)), options_(std::move(options)), hashes_(plan) {
  if (const auto& from = options_.resume) {
    const std::int64_t done = optimizer_steps(static_cast<std::int32_t>(from->state.step));
    moments_begin_ = from->has_moments ? done - from->state.optimizer_step : done;
  }
  if (options_.checkpoints.empty()) return;
  started_.seed = s.seed;
  started_.plan_hash = plan_hash(plan);
  started_.arithmetic = options_.arithmetic;
  started_.scenario = resolved_yaml(with_absolute_paths(s));
  started_.initial_weights = with_absolute_paths(s).model.weights_path;
  // What they are now, before the run may overwrite them: a run may begin with a checkpoint in its own folder.
  const auto digest = [](const Result<std::string>& found) {
    if (!found) throw RuntimeFailure(render(found.error()));
    return *found;
  };
  if (options_.opens_files && (s.algorithm.reference || s.model.lora.on()) && !s.model.weights_path.empty())
    started_.initial_digest = digest(digest_of_model(s.model.weights_path));
  if (!s.task.data.empty()) started_.data_digest = digest(digest_of_file(s.task.data));
}

TrainingState TrainingDriver::state_after(std::int32_t step) const {
  TrainingState state = started_;
  state.step = step;
  state.optimizer_step = optimizer_steps(step) - moments_begin_;
  if (!scenario().task.data.empty()) state.sequences_taken = step * scenario().algorithm.prompts;
  return state;
}

void TrainingDriver::feed(Rank rank, const BoundOp& op, const Args& args, std::span<std::byte> destination) {
  const auto slot = static_cast<Slot>(op->integer(Attr::slot));
  const auto dtype = [&] { return op->outputs[0].dtype; };
  const auto own = [&] { return boxes_of(*op, places_of(plan(), rank)); };
  // Of the experts that share a place each rank has one, and of a flat unit's parameters some: what else is there
  // stays.
  const bool keeps = op->integer(Attr::accumulate, 0) != 0;
  const int threads = options_.threads;
  if (slot == Slot::parameter) return sources_.parameters.read(op.name(), own(), dtype(), destination, keeps, threads);
  if (slot == Slot::reference_parameter)
    return sources_.initial.read(op.name(), own(), dtype(), destination, keeps, threads);
  if (is_moment(slot)) return sources_.moments.read(op.name(), slot, own(), dtype(), destination, keeps, threads);
  const auto* payload = dynamic_cast<const SlotPayload*>(args.payload.get());
  HB_CHECK(payload != nullptr && payload->feed(slot, destination), "nothing to feed to '{}' (slot {})", op.name(),
           static_cast<std::int64_t>(slot));
}

bool TrainingDriver::feeds_zeros(Rank, const BoundOp& op) const {
  return is_moment(static_cast<Slot>(op->integer(Attr::slot))) && sources_.moments.are_zeros() &&
         op->integer(Attr::accumulate, 0) == 0;
}

void TrainingDriver::fetch(Rank, const BoundOp& op, const Args& args, std::span<const std::byte> source) {
  const auto slot = static_cast<Slot>(op->integer(Attr::slot));
  if (is_exported(slot)) {
    auto* weights = dynamic_cast<WeightsPayload*>(args.payload.get());
    HB_CHECK(weights != nullptr, "'{}' exported outside a checkpoint", op.name());
    weights->take(op, source);
    return;
  }
  auto* payload = dynamic_cast<SlotPayload*>(args.payload.get());
  HB_CHECK(payload != nullptr && payload->fetch(slot, source), "nobody takes '{}' (slot {})", op.name(),
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
    const auto length = static_cast<std::int64_t>(all.sequences[sample].tokens.size());
    payload->append(all.sequences[sample], 1.0f / static_cast<float>(predicted), all.advantages[sample]);
    payload->pad(padded(length) - length);
  }
  // A sequence of its own, that nobody is trained on, fills a micro-batch up (exec/iteration_driver.h).
  const TrainLayout& layout = scenario().train.layout;
  const std::int64_t own = packed(micro.sizes).tokens, filling = own * layout.sharers() - micro.sizes.tokens;
  if (filling > 0)
    payload->append({std::vector<std::int32_t>(static_cast<std::size_t>(filling), 0), filling, {}}, 0.0f, 0.0f);
  payload->take_chunks(layout.cp, context_of(id.rank));
  payload->cut(part_of(id.rank) * own, (part_of(id.rank) + 1) * own);
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

std::shared_ptr<Payload> TrainingDriver::sync_payload(std::int32_t, Rank) { return std::make_shared<SyncPayload>(); }

/// The gaps of the whole iteration travel with its first mini-batch: the metrics' all-reduce is there anyway.
std::shared_ptr<Payload> TrainingDriver::begin_payload(Iteration& it, Rank rank, std::int64_t mini) {
  auto payload = std::make_shared<FirstMetricsPayload>();
  const auto set = [&](Metric which, double value) {
    payload->metrics[static_cast<std::size_t>(which)] = static_cast<float>(value);
  };
  if (mini == 0 && logps_step_ == it.step) {
    const Gap& gap = gaps_[rank];
    set(Metric::sum_rollout_gap, gap.sum);
    set(Metric::max_rollout_gap, gap.max);
    set(Metric::rollout_gap_tokens, static_cast<double>(gap.tokens));
  }
  return payload;
}

std::shared_ptr<Payload> TrainingDriver::step_payload(Iteration& it, Rank, std::int64_t mini) {
  const OptimizerSpec& o = scenario().optimizer;
  auto payload = std::make_shared<StepPayload>();
  payload->mini = mini;
  const std::int64_t done = optimizer_steps(it.step - 1) + mini + 1;
  payload->optimizer_step = done - moments_begin_;
  payload->stop_requested = options_.stop_requested;
  const double warmed =
      o.warmup_steps > 0 ? std::min(1.0, static_cast<double>(done) / static_cast<double>(o.warmup_steps)) : 1.0;
  payload->learning_rate = static_cast<float>(o.lr * warmed);
  return payload;
}

const ExportedParts& TrainingDriver::written_by(std::int16_t phase, Rank rank) {
  const auto [found, is_new] = written_by_.try_emplace({phase, rank});
  if (is_new) found->second = exported_by(plan(), phase, rank);
  return found->second;
}

CheckpointContent TrainingDriver::content(bool merged) const {
  const Precision& precision = scenario().train.precision;
  return {.model = scenario().model, .weights = precision.master, .moments = precision.moments, .merged = merged};
}

std::shared_ptr<Payload> TrainingDriver::weights_payload(PhaseRole role, std::int32_t step, Rank rank) {
  if (role == PhaseRole::load) {
    if (!options_.checkpoints.empty()) look_for_folder(rank);
    return {};
  }
  auto payload = std::make_shared<WeightsPayload>();
  if (options_.checkpoints.empty()) return payload;
  const bool last = role == PhaseRole::export_weights;
  const auto phase = static_cast<std::int16_t>(plan().phase_index(last ? "export" : "checkpoint"));
  const std::vector<Rank> all = exporting_ranks(plan(), phase);
  HB_CHECK((options_.say && options_.hear) || all.empty() || all.back() == 0,
           "{} ranks write a checkpoint and cannot tell each other of it", all.size());
  if (rank != 0 && std::ranges::count(all, rank) == 0) return payload;
  payload->places = places_of(plan(), rank);
  payload->written = &written_by(phase, rank);
  const auto begin = [&](WeightsPayload::Writing& w, const std::string& name, bool merged) {
    w.key = "checkpoint " + name;
    if (rank != 0) {
      const std::string partial = options_.hear(w.key, 0);
      if (!partial.empty()) w.begin(CheckpointWriter::join(partial, content(merged)));
      return;
    }
    // The epilogue's number is that of the iteration after the last.
    std::optional<TrainingState> state;
    if (!merged) state = state_after(last ? step - 1 : step);
    w.begin(CheckpointWriter::create(options_.checkpoints / name, content(merged), std::move(state), options_.carried));
    if (options_.say) options_.say(w.key, w.to ? w.to->partial().string() : "");
  };
  begin(payload->sink, last ? "final" : fmt::format("step_{}", step), false);
  if (last && scenario().model.lora.on()) begin(payload->merged, "merged", true);
  return payload;
}

void TrainingDriver::look_for_folder(Rank rank) {
  const char* key = "a file beside the checkpoints";
  if (rank == 0 && options_.say) {
    probe_ = make_probe(options_.checkpoints.parent_path());
    options_.say(key, probe_->string());
  } else if (rank != 0 && options_.hear) {
    const std::filesystem::path probe = options_.hear(key, 0);
    if (!appears(probe))
      throw RuntimeFailure(
          fmt::format("rank {} does not see {}: every rank writes its part of a checkpoint, into a "
                      "folder that all hosts share; give another --out",
                      rank, probe.parent_path().string()));
  }
}

void TrainingDriver::completed(Rank rank, const Args& args, std::int16_t phase) {
  if (auto* weights = dynamic_cast<WeightsPayload*>(args.payload.get())) {
    if (rank != 0) {
      weights->say(options_.say, rank, !places_meanwhile(role(phase)) || !options_.beside_first);
      return;
    }
    weights->hear(options_.hear, exporting_ranks(plan(), phase));
    weights->finish(!places_meanwhile(role(phase)));
    if (weights->sink.to) unplaced_ = std::move(weights->sink.to);
    Diagnostics problems = std::move(weights->sink.problems);
    // The last one comes after all steps; others wait for the lines of their step (step_ended).
    if (role(phase) == PhaseRole::export_weights && unplaced_) {
      problems = place_checkpoint();
      if (Status earlier = meanwhile_placed(); !earlier) throw DriverFailure(std::move(earlier.error()));
    }
    if (problems.empty()) problems = std::move(weights->merged.problems);
    if (!problems.empty()) not_written(role(phase), args.step, std::move(problems));
  }
  if (auto* micro = dynamic_cast<MicroPayload*>(args.payload.get());
      micro != nullptr && role(phase) != PhaseRole::train)
    keep_logps(rank, args.step, role(phase), *micro);
  if (const auto* step = dynamic_cast<const StepPayload*>(args.payload.get())) add_step_metrics(args.step, *step);
  if (const auto* sync = dynamic_cast<const SyncPayload*>(args.payload.get()); sync != nullptr && !sync->sums.empty())
    check_sync(args.step, *sync);
}

Diagnostics TrainingDriver::failed_checkpoint(std::int32_t step, Diagnostics problems) const {
  problems.front().notes.push_back(fmt::format("after step {}", std::min<std::int64_t>(step, scenario().steps)));
  if (problems.front().code == "E631") return problems;
  return {Diagnostic{.code = "E632",
                     .message = fmt::format("a checkpoint was not written: {}", problems.front().message),
                     .where = problems.front().where,
                     .notes = std::move(problems.front().notes),
                     .help = "checkpoints that were there before are whole; look for space and permissions"}};
}

/// A checkpoint on the way ends the run: who asked for it counts on it. The last one does not, for then all that the
/// run computed would be lost with it: finish_problems() says it.
void TrainingDriver::not_written(PhaseRole role, std::int32_t step, Diagnostics problems) {
  problems = failed_checkpoint(step, std::move(problems));
  if (role != PhaseRole::export_weights) throw DriverFailure(std::move(problems));
  finish_problems_ = std::move(problems);
}

Diagnostics TrainingDriver::place_checkpoint() {
  const auto checkpoint = std::exchange(unplaced_, nullptr);
  const Status placed = checkpoint->place();
  return placed ? Diagnostics{} : placed.error();
}

void TrainingDriver::place_meanwhile(std::int32_t step) {
  placed_step_ = step;
  placing_ = std::async(std::launch::async, [writer = std::shared_ptr(std::move(unplaced_))]() -> Status {
    if (Status ok = writer->finish(); !ok) return ok;
    return writer->place();
  });
}

Status TrainingDriver::meanwhile_placed() {
  if (!placing_.valid()) return {};
  if (Status ok = placing_.get(); !ok) return fail(failed_checkpoint(placed_step_, std::move(ok.error())));
  return {};
}

/// A run that is resumed from here goes on after this step, and would never write its lines.
Status TrainingDriver::step_ended(std::int32_t step) {
  const bool is_done = placing_.valid() && placing_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  if (unplaced_ || is_done)
    if (Status earlier = meanwhile_placed(); !earlier) return earlier;
  if (!unplaced_) return {};
  if (scenario().run.checkpoint_async) {
    place_meanwhile(step);
    return {};
  }
  Diagnostics problems = place_checkpoint();
  if (problems.empty()) return {};
  return fail(failed_checkpoint(step, std::move(problems)));
}

void TrainingDriver::check_sync(std::int32_t step, const SyncPayload& sync) {
  constexpr std::size_t most_named = 4;
  SyncHashes::Verdict verdict = hashes_.judge(sync.sums);
  note(step, "sync/tensors_verified", static_cast<double>(verdict.trained.size()));
  if (options_.on_sync) options_.on_sync(step, verdict.trained);
  auto& found = verdict.differences;
  if (found.empty()) return;
  const std::size_t more = found.size() - std::min(found.size(), most_named);
  found.resize(found.size() - more);
  throw RuntimeFailure(fmt::format(
      "after the weight sync of step {} the rollout does not hold the training weights in {}: {}{}", step,
      name_of(scenario().rollout.dtype), fmt::join(found, "; "), more > 0 ? fmt::format("; and {} more", more) : ""));
}

void TrainingDriver::keep_logps(Rank rank, std::int32_t step, PhaseRole pass, MicroPayload& micro) {
  if (logps_step_ != step) {
    logps_.clear();
    gaps_.clear();
    logps_step_ = step;
  }
  Gap& all = gaps_[rank];
  if (pass == PhaseRole::old_logprobs)
    for (std::size_t t = 0; t < micro.logps.size(); ++t) {
      if (micro.targets[t] < 0) continue;
      const double gap = std::abs(static_cast<double>(micro.logps[t]) - static_cast<double>(micro.old_logps[t]));
      all.sum += gap;
      all.max = max_or_nan(all.max, gap);
      ++all.tokens;
    }
  logps_[{rank, pass, micro.mini, micro.micro}] = std::move(micro.logps);
}

void TrainingDriver::add_step_metrics(std::int32_t step, const StepPayload& payload) {
  HB_CHECK(payload.metrics.size() == static_cast<std::size_t>(Metric::count), "step {}: no metrics fetched", step);
  const double loss = metric(payload.metrics, Metric::loss), norm = metric(payload.metrics, Metric::grad_norm);
  if (!std::isfinite(loss) || !std::isfinite(norm)) throw Diverged(step, payload.mini, loss, norm);
  if (payload.mini == 0) step_metrics_.clear();
  step_metrics_.push_back(payload.metrics);
  if (metric(payload.metrics, Metric::stop_requests) > 0.0) end_after(step);
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
  if (router_losses(scenario()).any()) note(step, "actor/router_loss", mean(Metric::router_loss));
  if (scenario().algorithm.name != AlgorithmName::sft) {
    note(step, "actor/pg_loss", mean(Metric::policy_loss));
    note(step, "actor/ppo_kl", mean(Metric::kl_old));
    note(step, "actor/pg_clipfrac", tokens > 0.0 ? mean(Metric::clipped) / tokens : 0.0);
    if (scenario().algorithm.reference) note(step, "actor/kl_loss", mean(Metric::kl_ref));
    // Without a pass of its own the loss compared with the rollout's log-probs: before the first update that is the
    // gap.
    const bool own = scenario().algorithm.old_logprobs;
    const auto first = [&](Metric which) { return metric(step_metrics_.front(), which); };
    const double compared = first(own ? Metric::rollout_gap_tokens : Metric::tokens);
    if (compared > 0.0)
      note(step, "rollout/logprob_gap_mean", first(own ? Metric::sum_rollout_gap : Metric::sum_logp_gap) / compared);
    note(step, "rollout/logprob_gap_max", first(own ? Metric::max_rollout_gap : Metric::max_logp_gap));
  }
  if (options_.on_step) options_.on_step({step, figures(step)});
}

void TrainingDriver::samples_known(std::int32_t step, const SampleLengths& lengths) {
  if (options_.on_samples) options_.on_samples(step, lengths);
}

/// Of the samples that the rank has trained: those of the pass before the update, by sample.
std::map<std::int64_t, std::vector<float>> TrainingDriver::training_logps(std::int32_t step, Rank rank) {
  std::map<std::int64_t, std::vector<float>> out;
  if (logps_step_ != step || scenario().train.layout.cp > 1) return out;  // no rank has all chunks of a sequence
  const std::vector<MiniBatch>& minis = batches(step);
  const Samples& all = samples(step);
  for (const auto& [key, logps] : logps_) {
    if (key.rank != rank || key.role != PhaseRole::old_logprobs || logps.empty()) continue;  // the last stage has them
    const MicroBatch& micro =
        minis[static_cast<std::size_t>(key.mini)].ranks[share_of(rank)][static_cast<std::size_t>(key.micro)];
    // Of the sequence's first token, counted from the rank's first; row t predicts token t + 1.
    std::ptrdiff_t row = -part_of(rank) * std::ssize(logps);
    for (const std::int64_t sample : micro.samples) {
      const TokenSequence& s = all.sequences[static_cast<std::size_t>(sample)];
      const std::ptrdiff_t first = row + s.prompt_tokens - 1, end = first + s.response_tokens();
      row += std::ssize(s.tokens);
      if (first < 0 || end > std::ssize(logps)) continue;  // with Ulysses, other ranks have some of them
      out[sample].assign(logps.begin() + first, logps.begin() + end);
    }
  }
  return out;
}

std::vector<SampleRecord> TrainingDriver::sample_records(std::int32_t step, Rank rank, std::size_t most) {
  const Samples& all = samples(step);
  const auto trained = training_logps(step, rank);
  std::vector<SampleRecord> out;
  for (const std::size_t i : chosen_samples(all.rewards, all.sequences.size(), most)) {
    SampleRecord r;
    r.sample = static_cast<std::int64_t>(i);
    r.sequence = all.sequences[i];
    const auto tokens = std::span<const std::int32_t>(r.sequence.tokens);
    const auto prompt = static_cast<std::size_t>(r.sequence.prompt_tokens);
    const auto shown = [](std::span<const std::int32_t> s) { return s.first(std::min(s.size(), most_sample_tokens)); };
    r.prompt_text = text(shown(tokens.first(prompt)));
    r.response_text = text(shown(tokens.subspan(prompt)));
    if (const auto found = trained.find(r.sample); found != trained.end()) r.training_logps = found->second;
    if (!all.rewards.empty()) {
      r.reward = all.rewards[i];
      r.advantage = static_cast<double>(all.advantages[i]);
    }
    out.push_back(std::move(r));
  }
  return out;
}

}  // namespace hotbunk
