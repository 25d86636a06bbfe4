#include "planner/price/plan_seconds.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <string>
#include <tuple>

#include "base/check.h"
#include "graph/clock.h"
#include "layout/expert_copies.h"
#include "layout/pipeline_turns.h"
#include "layout/shard.h"
#include "layout/train_mesh.h"
#include "lowering/builder.h"
#include "lowering/rollout.h"
#include "lowering/sample_rows.h"
#include "planner/rl/length_moments.h"

namespace hotbunk {

double RolloutSeconds::total() const {
  StreamSeconds steps;
  for (const Part* part : {&prefill, &decode, &tail}) steps.add(part->seconds, 1.0);
  return steps.seconds() + exchange.seconds();
}

Rank PlanBlocks::first_rank() const {
  const auto at = std::ranges::find(plan_->program_of_rank, static_cast<std::int32_t>(program_));
  return static_cast<Rank>(at - plan_->program_of_rank.begin());
}

PlanBlocks PlanBlocks::of_rank(Rank rank) const {
  PlanBlocks out = *this;
  out.program_ = static_cast<std::size_t>(plan_->program_of_rank[static_cast<std::size_t>(rank)]);
  return out;
}

bool PlanBlocks::has(PlanPhase phase) const { return plan_->phase_index(name_of(phase)) >= 0; }

BlockStreams PlanBlocks::block(PlanPhase phase, std::string_view name) const {
  const auto index = static_cast<std::size_t>(plan_->phase_index(name_of(phase)));
  const auto made = [&](const auto& source, const auto& blocks) {
    const auto found = std::ranges::find(blocks, name, [](const auto& b) { return std::string_view(b.name); });
    HB_CHECK(found != blocks.end(), "phase {} has no block {}", name_of(phase), name);
    return BlockStreams(*plan_, source, *found);
  };
  if (part_ != nullptr) return made(part_->drafts[program_], part_->drafts[program_].phases.at(index));
  return made(plan_->programs[program_], plan_->programs[program_].phases.at(index));
}

std::vector<BlockStreams> PlanBlocks::blocks(PlanPhase phase) const {
  std::vector<BlockStreams> out;
  const auto index = static_cast<std::size_t>(plan_->phase_index(name_of(phase)));
  if (part_ != nullptr)
    for (const DraftBlock& b : part_->drafts[program_].phases.at(index))
      out.emplace_back(*plan_, part_->drafts[program_], b);
  else
    for (const Block& b : plan_->programs[program_].phases.at(index))
      out.emplace_back(*plan_, plan_->programs[program_], b);
  return out;
}

double mean_padded_tokens(const Scenario& s) {
  const LengthSpec &prompt = s.workload.prompt_tokens, &response = s.workload.response_tokens;
  const TrainLayout& l = s.train.layout;
  const double mean = prompt.mean + response.mean;
  if (l.cp == 1) return mean;
  const auto is_fixed = [](const LengthSpec& t) { return t.distribution == LengthDistribution::fixed; };
  return is_fixed(prompt) && is_fixed(response)
             ? static_cast<double>(l.padded(static_cast<std::int64_t>(std::ceil(mean))))
             : mean + 0.5 * static_cast<double>(2 * l.cp - 1);
}

Sizes micro_batch_sizes(const Scenario& s, double sequences) {
  const LengthSpec &prompt = s.workload.prompt_tokens, &response = s.workload.response_tokens;
  const double mean = prompt.mean + response.mean;
  // A token sees on average half of a sequence, and long sequences have more tokens: E[L (L + 1) / 2] / E[L].
  const double square = mean_square(prompt) + 2.0 * prompt.mean * response.mean + mean_square(response);
  const double padded = mean_padded_tokens(s);
  const double pairs = mean > 0.0 ? 0.5 * (square / mean * padded / mean + 1.0) : 0.0;
  const double tokens = std::min(sequences * padded, static_cast<double>(micro_batch_capacity(s)));
  const Sizes sizes{.tokens = std::llround(tokens),
                    .seqs = std::max<std::int64_t>(1, std::llround(sequences)),
                    .attention_pairs = std::llround(tokens * pairs)};
  const TrainLayout& l = s.train.layout;
  const std::int64_t rows_sent = rows_sent_of_token(s);
  if (!l.sp && l.pp == 1 && l.sharers() == 1 && rows_sent == 0) return sizes;
  Sizes out = filled_up(sizes, l, expert_mesh(s), rows_sent, expert_copies(s).of_token);
  out[returned_extent] = out[sequence_extent];
  return out;
}

namespace {

std::size_t index_of_stream(const PlanBlocks& blocks, std::string_view name) {
  const auto id = blocks.plan().stream_index(name);
  HB_CHECK(id, "the plan of a pipeline has no stream '{}'", name);
  return hotbunk::at(*id);
}

/// What a step of a pipeline takes, in passes and messages of so many seconds.
class PipelineSeconds {
 public:
  PipelineSeconds(const Scenario& s, const PlanBlocks& plan, const CostModel& cost)
      : scenario_(s), plan_(plan), cost_(cost), sharing_(device_sharing(cost, s.cluster)), pipeline_(pipeline_of(s)) {
    for (std::int64_t stage = 0; stage < pipeline_.stages; ++stage)
      first_ranks_.push_back(static_cast<Rank>(data_ranks(s.train.layout, stage).front().front()));
  }

  /// Forward passes alone: what a stage sends, the next one takes when it is done with the micro-batch before.
  StreamSeconds passes(PlanPhase phase, const std::vector<Sizes>& micro_batches) {
    if (pipeline_.chunks > 1) return play(phase, micro_batches, PipelinePasses::forward);
    std::vector<StreamSeconds> own(stages());
    std::vector<double> free(stages(), 0.0);
    for (const Sizes& sizes : micro_batches) {
      const double message = seconds(phase, "micro", 0, sizes).busy[between_stages_];
      double received = free[0];
      for (std::size_t s = 0; s < stages(); ++s) {
        const StreamSeconds& pass = seconds(phase, "micro", s, sizes);
        own[s].add(pass, 1.0);
        // What it gathers first, it gathers while it waits for the stage before.
        const double work = taken(pass) - pass.busy[between_stages_], gathers = s > 0 ? pass.waited[gather_] : 0.0;
        const double done = std::max(free[s] + work, received + work - gathers);
        free[s] = s + 1 < stages() ? std::max(done, free[s + 1]) + message : done;
        received = free[s];
      }
    }
    return of_longest(own, free);
  }

  /// One mini-batch, from its begin to its step.
  StreamSeconds step(const std::vector<Sizes>& micro_batches) {
    return play(PlanPhase::train, micro_batches, PipelinePasses::both_ways);
  }

 private:
  /// The stages' turns against each other, each side of a message waiting for the other.
  StreamSeconds play(PlanPhase phase, const std::vector<Sizes>& micro_batches, PipelinePasses which) {
    const std::vector<std::vector<StageTurn>> turns = pipeline_turns(pipeline_, std::ssize(micro_batches), which);
    std::vector<StreamSeconds> own(stages());
    std::vector<double> now(stages(), 0.0);
    std::vector<std::size_t> at(stages(), 0);
    const auto play = [&](std::size_t s, const std::string& block, const Sizes& sizes) {
      const StreamSeconds& pass = seconds(phase, block, s, sizes);
      own[s].add(pass, 1.0), now[s] += taken(pass);
    };
    const auto turn_of = [&](std::size_t s, const StageTurn& t) {
      const std::string block = t.is_pass() ? pass_name(t.step, pipeline_.chunks, t.chunk, 0)
                                            : block_name(t.step, t.edge >= 0 ? t.edge : t.place);
      play(s, block, micro_batches[static_cast<std::size_t>(t.micro)]);
      ++at[s];
    };
    for (std::size_t s = 0; s < stages(); ++s) play(s, "begin", {});
    for (bool moved = true; moved;) {
      moved = false;
      for (std::size_t s = 0; s < stages(); ++s)
        for (; at[s] < turns[s].size(); moved = true) {
          const StageTurn& t = turns[s][at[s]];
          if (t.edge >= 0) {
            // The stage behind the edge plays it for both.
            const auto from = static_cast<std::size_t>(t.edge) % stages();
            if (s == from || at[from] >= turns[from].size() || turns[from][at[from]] != t) break;
            now[s] = now[from] = std::max(now[s], now[from]);
            turn_of(from, t);
          }
          turn_of(s, t);
        }
    }
    const bool trains = which == PipelinePasses::both_ways;
    // All take part in the norm.
    if (const double last = std::ranges::max(now); trains) std::ranges::fill(now, last);
    for (std::size_t s = 0; s < stages(); ++s) play(s, trains ? "step" : "end", {});
    return of_longest(own, now);
  }

  std::size_t stages() const { return static_cast<std::size_t>(pipeline_.stages); }
  const StreamSeconds& seconds(PlanPhase phase, const std::string& block, std::size_t stage, const Sizes& sizes) {
    auto& known = known_[{phase, block, stage, sizes.tokens, sizes.attention_pairs}];
    if (!known) {
      const PlanBlocks of = plan_.of_rank(first_ranks_[stage]);
      auto& place = places_[of.first_rank()];
      if (!place) place = cost_.place_of(plan_.plan(), of.first_rank());
      known = of.block(phase, block).seconds(cost_, sharing_, {&*place, 1}, sizes);
    }
    return *known;
  }
  /// Launches go on beside what the device does, over all blocks (StreamSeconds::seconds).
  static double taken(const StreamSeconds& s) { return s.elapsed + s.paced; }
  /// The stage that works longest; what passes until all are done it waits.
  StreamSeconds of_longest(const std::vector<StreamSeconds>& own, const std::vector<double>& ends) const {
    StreamSeconds out = *std::ranges::max_element(own, {}, &StreamSeconds::seconds);
    const double waits = std::max(0.0, std::ranges::max(ends) - taken(out));
    out.waited[between_stages_] += waits, out.elapsed += waits;
    return out;
  }

  const Scenario& scenario_;
  const PlanBlocks& plan_;
  const CostModel& cost_;
  const DeviceSharing sharing_;
  const Pipeline pipeline_;
  const std::size_t between_stages_ = index_of_stream(plan_, "pipeline"), gather_ = index_of_stream(plan_, "gather");
  std::vector<Rank> first_ranks_;  // of each stage
  std::map<Rank, std::optional<RankPlace>> places_;
  using Key = std::tuple<PlanPhase, std::string, std::size_t, std::int64_t, std::int64_t>;
  std::map<Key, std::optional<StreamSeconds>> known_;
};

TrainingSeconds pipeline_training_seconds(const Scenario& s, const TrainPoint& p, const PlanBlocks& plan,
                                          const CostModel& cost) {
  TrainingSeconds out;
  std::vector<Sizes> micro_batches;  // of a step
  p.visit_micro_batches([&](double count, double share) {
    micro_batches.insert(micro_batches.end(), static_cast<std::size_t>(std::llround(count)),
                         micro_batch_sizes(s, share * static_cast<double>(p.micro_batch)));
  });
  const auto steps = static_cast<double>(std::max<std::int64_t>(s.algorithm.mini_batches, 1));
  std::vector<Sizes> all;
  for (double i = 0; i < steps; ++i) all.insert(all.end(), micro_batches.begin(), micro_batches.end());
  PipelineSeconds pipeline(s, plan, cost);
  if (plan.has(PlanPhase::reference)) out.reference = pipeline.passes(PlanPhase::reference, all);
  if (plan.has(PlanPhase::old_logprobs)) out.old_logprobs = pipeline.passes(PlanPhase::old_logprobs, all);
  if (plan.has(PlanPhase::train)) out.train.add(pipeline.step(micro_batches), steps);
  return out;
}

}  // namespace

TrainingSeconds training_seconds(const Scenario& s, const TrainPoint& p, const PlanBlocks& plan,
                                 const CostModel& cost) {
  if (s.train.layout.pp > 1) return pipeline_training_seconds(s, p, plan, cost);
  TrainingSeconds out;
  const DeviceSharing sharing = device_sharing(cost, s.cluster);
  const RankPlace place = cost.place_of(plan.plan(), 0);
  const auto once = [&](const BlockStreams& block, const Sizes& sizes) {
    return block.seconds(cost, sharing, {&place, 1}, sizes);
  };
  const auto steps = static_cast<double>(std::max<std::int64_t>(s.algorithm.mini_batches, 1));
  const auto micro_batches = [&](PlanPhase phase, StreamSeconds& of) {
    const BlockStreams micro = plan.block(phase, "micro");
    p.visit_micro_batches([&](double count, double share) {
      of.add(once(micro, micro_batch_sizes(s, share * static_cast<double>(p.micro_batch))), steps * count);
    });
  };
  if (plan.has(PlanPhase::reference)) micro_batches(PlanPhase::reference, out.reference);
  if (plan.has(PlanPhase::old_logprobs)) micro_batches(PlanPhase::old_logprobs, out.old_logprobs);
  if (plan.has(PlanPhase::train)) {
    micro_batches(PlanPhase::train, out.train);
    for (const char* name : {"begin", "step"}) out.train.add(once(plan.block(PlanPhase::train, name), {}), steps);
  }
  return out;
}

EngineBlocks::EngineBlocks(const Scenario& s, const PlanBlocks& plan, const CostModel& cost)
    : sharing_(device_sharing(cost, s.cluster)),
      stages_([&] {
        std::vector<Stage> out;
        for (std::int64_t stage = 0; stage < s.rollout.layout.pp; ++stage) {
          const auto rank = static_cast<Rank>(rank_of_seat(
              s.rollout.layout, {.engine = 0, .place = stage * s.rollout.layout.tp * s.rollout.layout.cp}));
          const PlanBlocks of = plan.of_rank(rank);
          out.push_back({cost.place_of(plan.plan(), rank), of.block(PlanPhase::rollout, "prefill"),
                         of.block(PlanPhase::rollout, "decode")});
        }
        return out;
      }()),
      exchange_(plan.block(PlanPhase::exchange, "exchange").seconds(cost, sharing_, {&stages_[0].place, 1}, {})) {}

RolloutSeconds EngineBlocks::seconds(const Scenario& s, double pool_tokens, const CostModel& cost) const {
  const LengthSpec &prompt = s.workload.prompt_tokens, &response = s.workload.response_tokens;
  const std::int64_t groups = attention_groups(s);  // each as an engine of its own, but for what they share
  RolloutSeconds out;
  out.exchange = exchange_;
  out.context = held_tokens(prompt.mean, response.mean, mean_square(response));
  const auto sequences = static_cast<double>(std::max<std::int64_t>(samples_per_group(s), 1));
  out.slots = std::clamp(std::min(static_cast<double>(slots_of_group(s)), pool_tokens / out.context), 1.0, sequences);
  const EngineSchedule schedule =
      engine_schedule({.sequences = sequences,
                       .slots = out.slots,
                       .engines = static_cast<double>(std::max<std::int64_t>(s.rollout.layout.dp * groups, 1)),
                       .prompt_tokens = prompt.mean,
                       .max_prefill_tokens = static_cast<double>(prefill_of_group(s)),
                       .responses = response});
  const auto take = [&](BlockStreams Stage::*block, Sizes sizes, double steps, RolloutSeconds::Part& part) {
    if (groups > 1) sizes[sequence_extent] = sizes.tokens, sizes.tokens *= groups;
    for (const Stage& stage : stages_)
      part.seconds.add((stage.*block).seconds(cost, sharing_, {&stage.place, 1}, sizes), steps);
    part.steps += steps, part.tokens += steps * static_cast<double>(sizes.tokens);
    part.sequences += steps * static_cast<double>(sizes.seqs);
  };
  const double keys = 0.5 * (mean_square(prompt) / std::max(prompt.mean, 1.0) + 1.0);
  for (const std::vector<EngineSchedule::Prefill>* steps : {&schedule.first, &schedule.later})
    for (const EngineSchedule::Prefill& p : *steps)
      take(&Stage::prefill,
           {.tokens = std::llround(p.tokens),
            .seqs = std::max<std::int64_t>(1, std::llround(p.sequences)),
            .attention_pairs = std::llround(p.tokens * keys)},
           p.steps, out.prefill);
  const auto decode = [&](const EngineSchedule::Decode& d, RolloutSeconds::Part& part) {
    if (d.steps <= 0.0) return;
    const std::int64_t n = std::max<std::int64_t>(1, std::llround(d.sequences));
    take(&Stage::decode,
         {.tokens = n, .seqs = n, .attention_pairs = std::llround(static_cast<double>(n) * out.context)}, d.steps,
         part);
  };
  decode(schedule.full, out.decode);
  for (const EngineSchedule::Decode& d : schedule.tail) decode(d, out.tail);
  return out;
}

StreamSeconds sync_seconds(const Scenario& s, const Plan& plan, const CostModel& cost) {
  constexpr Rank most_ranks = 64;  // that are looked at
  // Who reads from peers waits for them at barriers; others' ranks are alike.
  GroupId waits = -1;
  for (const Body& body : plan.programs[0].bodies)
    for (const Op& op : body.ops)
      if (op.kind == OpKind::barrier) waits = op.group;
  std::vector<std::vector<Rank>> groups = {{0}};
  if (waits >= 0 && s.sync.transport == SyncTransport::ipc)
    groups = plan.groups[static_cast<std::size_t>(waits)].groups;
  const DeviceSharing sharing = device_sharing(cost, s.cluster);
  const std::vector<BlockStreams> blocks = PlanBlocks(plan).blocks(PlanPhase::sync);
  StreamSeconds out;
  Rank looked_at = 0;
  for (const std::vector<Rank>& members : groups) {
    std::vector<RankPlace> ranks;
    for (const Rank r : members)
      if (looked_at++ < most_ranks) ranks.push_back(cost.place_of(plan, r));
    if (ranks.empty()) break;
    StreamSeconds own;
    for (const BlockStreams& block : blocks) own.add(block.seconds(cost, sharing, ranks, {}), 1.0);
    if (own.elapsed > out.elapsed) out = own;
  }
  return out;
}

PlanSeconds plan_seconds(const Scenario& s, const TrainPoint& point, const Plan& plan, const CostModel& cost) {
  const PlanBlocks blocks(plan);
  PlanSeconds out{.training = training_seconds(s, point, blocks, cost), .rollout = {}, .sync = {}};
  if (s.algorithm.name == AlgorithmName::sft) return out;
  std::int64_t pool = 0;
  const auto kv_cache = plan.programs[0].section_index("kv_cache");
  for (const Buffer& b : plan.programs[0].buffers)
    if (b.section == kv_cache) pool += b.bytes();
  const auto player = std::ranges::find(plan.program_of_rank, 0) - plan.program_of_rank.begin();
  const std::int64_t held = engine_stage_layers(s, engine_stage(s.rollout.layout, player)).size();
  const double tokens =
      static_cast<double>(pool / std::max<std::int64_t>(kv_block_bytes(s, held), 1) * block_span(s.rollout));
  out.rollout = EngineBlocks(s, blocks, cost).seconds(s, tokens, cost);
  out.sync = sync_seconds(s, plan, cost);
  return out;
}

}  // namespace hotbunk
