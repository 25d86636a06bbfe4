#include "exec/iteration_driver.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <span>
#include <utility>

#include "base/check.h"
#include "layout/expert_copies.h"
#include "layout/train_mesh.h"
#include "lowering/rollout.h"
#include "lowering/sample_rows.h"

namespace hotbunk {
namespace {

constexpr std::size_t iterations_kept = 3;  // ranks of one process are never further apart

/// A result that was checked beforehand (check_lengths): a failure now is a fault of ours.
template <class T>
T checked(Result<T> result) {
  HB_CHECK(result.has_value(), "{}", render(result.error()));
  return std::move(*result);
}

SchedulerConfig scheduler_config(const Scenario& s, std::int64_t num_kv_blocks) {
  return {slots_of_group(s), ceil_div(prefill_budget(s), attention_groups(s)), block_span(s.rollout), num_kv_blocks};
}

double mean(const std::vector<std::int64_t>& values) {
  const auto sum = std::accumulate(values.begin(), values.end(), std::int64_t{0});
  return values.empty() ? 0.0 : static_cast<double>(sum) / static_cast<double>(values.size());
}

}  // namespace

PhaseRole role_of_phase(std::string_view name) {
  if (name == "load") return PhaseRole::load;
  if (name == "rollout") return PhaseRole::rollout;
  if (name == "exchange") return PhaseRole::exchange;
  if (name == "sync") return PhaseRole::sync;
  if (name == "reference" || name == "values") return PhaseRole::reference;
  if (name == "old_logprobs") return PhaseRole::old_logprobs;
  if (name == "train" || name == "critic") return PhaseRole::train;
  if (name == "checkpoint") return PhaseRole::checkpoint;
  if (name == "export") return PhaseRole::export_weights;
  return PhaseRole::other;
}

std::int64_t kv_blocks_of(const Plan& plan) {
  const std::int32_t rollout = plan.phase_index("rollout");
  if (rollout < 0) return 0;
  for (const Program& program : plan.programs)
    for (const Block& block : program.phases[static_cast<std::size_t>(rollout)])
      for (const Call& call : block.calls)
        for (const Op& op : program.bodies[static_cast<std::size_t>(call.body)].ops)
          for (const Tensor& t : op.outputs)  // a pool[blocks, …]
            if (BoundOp{&program, &block, &call, &op}.buffer(t).category() == Category::kv_cache)
              return t.shape[0].size;
  return 0;
}

Diagnostics check_lengths(const Scenario& s, std::int64_t num_kv_blocks) {
  Diagnostics problems;
  const std::int64_t longest = max_sample_tokens(s), sharers = s.train.layout.sharers();
  if (longest > micro_batch_capacity(s))
    problems.push_back(
        {.code = "E312",
         .message = "the longest sample does not fit a training micro-batch",
         .where = {},
         .notes = {fmt::format("prompt {} + response {} = {} tokens, train.micro_batch_tokens is {}{}",
                               max_prompt_tokens(s), max_response_tokens(s), longest, s.train.micro_batch_tokens,
                               sharers > 1 ? fmt::format(" on each of {} ranks that share them", sharers) : "")},
         .help = fmt::format("set train.micro_batch_tokens to at least {}", s.train.layout.share_of(longest))});
  if (s.algorithm.name == AlgorithmName::sft) return problems;
  const std::int64_t longest_prompt = std::min(max_prompt_tokens(s), longest - 1);
  auto fits = Scheduler::create(scheduler_config(s, num_kv_blocks), {{0, longest_prompt, longest - longest_prompt}});
  if (!fits) problems.insert(problems.end(), fits.error().begin(), fits.error().end());
  return problems;
}

double training_flops(const ModelSpec& m, std::int64_t tokens, std::int64_t attention_pairs) {
  const std::int64_t lookup_only = m.tie_embeddings ? 0 : m.vocab * m.hidden;
  const auto multiplied = static_cast<double>(active_parameter_count(m) - lookup_only);
  std::int64_t pairs = 0;
  for (int layer = 0; layer < m.layers; ++layer) {
    const std::int64_t window = m.window_of(layer);
    pairs += window > 0 ? std::min(attention_pairs, tokens * window) : attention_pairs;
  }
  return 6.0 * multiplied * static_cast<double>(tokens) +
         12.0 * static_cast<double>(m.heads * m.head_dim) * static_cast<double>(pairs);
}

IterationDriver::IterationDriver(const Plan& plan, const Scenario& scenario)
    : plan_(plan),
      scenario_(scenario),
      num_kv_blocks_(kv_blocks_of(plan)),
      groups_(attention_groups(scenario)),
      cursors_(static_cast<std::size_t>(plan.num_ranks())) {
  for (const PhaseInfo& phase : plan.phases) roles_.push_back(role_of_phase(phase.name));
  const Mesh mesh = train_mesh(scenario.train.layout);
  for (std::int64_t r = 0; r < mesh.size(); ++r) {
    shares_.push_back(static_cast<std::size_t>(mesh.coordinate(r, "dp")));
    parts_.push_back(mesh.coordinate(r, "ulysses")), contexts_.push_back(mesh.coordinate(r, "cp"));
  }
  pipeline_of_plan(mesh);
  // Engines on ranks of their own come behind the trainer's.
  if (scenario.placement == PlacementMode::disaggregated) first_engine_rank_ = static_cast<Rank>(mesh.size());
}

/// A plan that plays a pipeline has its blocks in place of "micro".
void IterationDriver::pipeline_of_plan(const Mesh& mesh) {
  train_phase_ = static_cast<std::int16_t>(plan_.phase_index("train"));
  if (scenario_.train.layout.pp == 1) return;
  for (std::size_t p = 0; p < plan_.phases.size(); ++p) {
    const auto phase = static_cast<std::int16_t>(p);
    const PhaseRole of = role(phase);
    if (of != PhaseRole::train && of != PhaseRole::reference && of != PhaseRole::old_logprobs) continue;
    for (std::size_t i = 0; i < plan_.programs.size(); ++i) {
      std::map<std::string, std::int32_t> numbers;
      for (const Block& block : plan_.programs[i].phases[p])
        numbers.emplace(block.name, static_cast<std::int32_t>(numbers.size()));
      if (phase == train_phase_ && numbers.contains("forward")) {
        const auto fills = std::ranges::count_if(numbers, [](const auto& b) { return b.first.starts_with("fill."); });
        fills_ = std::max<std::int64_t>(fills_, fills);
        priced_pipeline_ = true;
      }
      StageBlocks blocks(numbers);
      if (blocks.chunks() > 0)
        stage_phases_.insert({{phase, static_cast<std::int32_t>(i)}, {std::move(numbers), std::move(blocks)}});
    }
  }
  if (priced_pipeline_ || !stage_phases_.empty()) pipeline_ = pipeline_of(scenario_);
  for (std::int64_t r = 0; r < mesh.size(); ++r) stages_.push_back(mesh.coordinate(r, "pp"));
}

std::int64_t IterationDriver::engine_of(Rank r) const {
  return engine_seat(scenario_.rollout.layout, r - first_engine_rank_).engine;
}
std::int64_t IterationDriver::place_of(Rank r) const {
  return engine_seat(scenario_.rollout.layout, r - first_engine_rank_).place;
}

std::int64_t IterationDriver::group_of(Rank r) const {
  const std::int64_t tp = scenario_.rollout.layout.tp;
  return engine_of(r) * groups_ + place_of(r) % tp * groups_ / tp;
}

IterationDriver::Iteration& IterationDriver::iteration(std::int32_t step) {
  auto& slot = iterations_[step];
  if (!slot) {
    slot = std::make_unique<Iteration>();
    slot->step = step;
    if (iterations_.size() > iterations_kept) iterations_.erase(iterations_.begin());
  }
  return *iterations_.at(step);
}

Scheduler IterationDriver::make_scheduler(std::span<const std::int64_t> samples, const SampleLengths& lengths) const {
  std::vector<RolloutRequest> requests;
  for (std::int64_t i : samples)
    requests.push_back(
        {i, lengths.prompt_tokens[static_cast<std::size_t>(i)], lengths.response_tokens[static_cast<std::size_t>(i)]});
  return checked(Scheduler::create(scheduler_config(scenario_, num_kv_blocks_), std::move(requests)));
}

std::vector<std::vector<std::int64_t>> IterationDriver::samples_of_engines(
    std::span<const std::int64_t> prompt_tokens) const {
  return route_samples(prompt_tokens, scenario_.algorithm.samples_per_prompt, scenario_.rollout.layout.dp * groups_);
}

void IterationDriver::start_rollout(Iteration& it) {
  const std::int64_t per_prompt = scenario_.algorithm.samples_per_prompt;
  const std::vector<std::int64_t> prompts = prompt_tokens(it.step);
  SampleLengths lengths{{}, response_caps(it.step)};
  for (std::int64_t prompt : prompts)
    lengths.prompt_tokens.insert(lengths.prompt_tokens.end(), static_cast<std::size_t>(per_prompt), prompt);
  HB_CHECK(lengths.prompt_tokens.size() == lengths.response_tokens.size(), "{} prompts, {} caps",
           lengths.prompt_tokens.size(), lengths.response_tokens.size());
  for (const auto& samples : samples_of_engines(prompts))
    it.engines.push_back({make_scheduler(samples, lengths), {}, {}, {}, false, false});
}

std::optional<Args> IterationDriver::rollout_decision(Iteration& it, Rank rank, std::int64_t index) {
  if (it.engines.empty()) start_rollout(it);
  const std::int64_t number = group_of(rank);
  const Engine& engine = it.engines[static_cast<std::size_t>(number)];
  while (!engine.done && std::ssize(engine.decisions) <= index) next_step(it, number / groups_ * groups_);
  if (std::ssize(engine.decisions) <= index) return std::nullopt;
  return engine.decisions[static_cast<std::size_t>(index)];
}

/// The next step of the engine whose groups begin with this one. They step together: where one prefills, those that
/// would decode wait, with nothing of their own in the step; all have room for what the one with most has.
void IterationDriver::next_step(Iteration& it, std::int64_t first) {
  const auto groups = std::span(it.engines).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(groups_));
  bool any = false, prefill = false;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    Engine& g = groups[i];
    if (std::exchange(g.runs, false)) {
      g.scheduler.completed(*g.open, ended(it, first + static_cast<std::int64_t>(i), *g.open, g.taken));
      g.open.reset();
    }
    if (!g.open) g.open = g.scheduler.next(groups_ > 1 ? 1 : most_decode_steps());
    any = any || g.open, prefill = prefill || (g.open && g.open->prefill);
  }
  std::int64_t tokens = 0, seqs = 0;
  for (Engine& g : groups) {
    g.done = !any, g.runs = g.open && g.open->prefill == prefill;
    if (g.runs) tokens = std::max(tokens, g.open->sizes.tokens), seqs = std::max(seqs, g.open->sizes.seqs);
  }
  if (!any) return;
  ScheduledStep nothing;
  nothing.prefill = prefill;
  std::vector<std::shared_ptr<Payload>> payloads;
  for (std::size_t i = 0; i < groups.size(); ++i)
    payloads.push_back(
        rollout_payload(it, first + static_cast<std::int64_t>(i), groups[i].runs ? *groups[i].open : nothing));
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const ScheduledStep& own = groups[i].runs ? *groups[i].open : nothing;
    Args args{.block = prefill ? 0 : 1,
              .step = it.step,
              .sizes = own.sizes,
              .times = own.times,
              .pairs_per_time = own.sizes.seqs,
              .payload = payloads[i]};
    groups[i].taken = args;
    if (groups_ > 1) {
      args.sizes.tokens = groups_ * tokens, args.sizes.seqs = seqs, args.sizes[sequence_extent] = tokens;
      args.payload = joint_payload(payloads, i, seqs);
    }
    groups[i].decisions.push_back(std::move(args));
  }
}

std::vector<MiniBatch> IterationDriver::mini_batches_of(const SampleLengths& lengths, const Scenario& cut) const {
  std::vector<std::int64_t> tokens;
  for (std::size_t i = 0; i < lengths.prompt_tokens.size(); ++i)
    tokens.push_back(padded(lengths.prompt_tokens[i] + lengths.response_tokens[i]));
  return checked(make_mini_batches(tokens, {.ranks = scenario_.train.layout.dp,
                                            .mini_batches = scenario_.algorithm.mini_batches,
                                            .micro_batch_tokens = micro_batch_capacity(cut),
                                            .max_seqs = max_micro_batch_seqs(cut)}));
}

const std::vector<MiniBatch>& IterationDriver::batches(std::int32_t step, PhaseRole role) {
  const bool scores = role == PhaseRole::reference || role == PhaseRole::old_logprobs;
  if (!scores || !scenario_.train.scores_apart()) return batches(step);
  Iteration& it = iteration(step);
  if (!it.scored) it.scored = mini_batches_of(sample_lengths(step), as_scored(scenario_));
  return *it.scored;
}

const std::vector<MiniBatch>& IterationDriver::batches(std::int32_t step) {
  Iteration& it = iteration(step);
  if (!it.batches) {
    const SampleLengths lengths = sample_lengths(step);
    it.batches = mini_batches_of(lengths);
    note_trained(step, lengths);
  }
  return *it.batches;
}

void IterationDriver::note_trained(std::int32_t step, const SampleLengths& lengths) {
  std::int64_t tokens = 0, attention_pairs = 0;
  for (std::size_t i = 0; i < lengths.prompt_tokens.size(); ++i) {  // each is trained once, without what pads it
    const std::int64_t length = lengths.prompt_tokens[i] + lengths.response_tokens[i];
    tokens += length, attention_pairs += length * (length + 1) / 2;
  }
  trained_tokens_ += tokens;
  model_flops_ += training_flops(scenario_.model, tokens, attention_pairs);
  note(step, "prompt_length/mean", mean(lengths.prompt_tokens));
  note(step, "response_length/mean", mean(lengths.response_tokens));
  note(step, "response_length/max", static_cast<double>(std::ranges::max(lengths.response_tokens)));
  if (num_kv_blocks_ > 0) {
    const SchedulerStatistics s = replay(lengths);
    note(step, "rollout/prefill_steps", static_cast<double>(s.prefill_steps));
    note(step, "rollout/decode_steps", static_cast<double>(s.decode_steps));
    note(step, "rollout/preemptions", static_cast<double>(s.preemptions));
    note(step, "rollout/max_kv_blocks", static_cast<double>(s.max_blocks_used));
  }
  while (open_figures_.size() > iterations_kept) {
    auto oldest = open_figures_.extract(open_figures_.begin());
    curves_.add({oldest.key(), std::move(oldest.mapped())});
  }
  samples_known(step, lengths);
}

std::optional<Args> IterationDriver::micro_decision(Iteration& it, Rank rank, std::int16_t phase, std::int64_t index) {
  if (stage_phases_.contains({phase, plan_.program_of_rank[static_cast<std::size_t>(rank)]}))
    return stage_decision(it, rank, phase, index);
  const auto& minis = batches(it.step, role(phase));
  const bool pipelined = priced_pipeline_;
  if (pipelined && index-- == 0) return Args{.block = 0, .step = it.step, .sizes = {}, .payload = {}};
  for (std::size_t mini = 0; mini < minis.size(); index -= minis[mini++].micro_batches()) {
    if (index >= minis[mini].micro_batches()) continue;
    const MicroBatch& micro = minis[mini].ranks[share_of(rank)][static_cast<std::size_t>(index)];
    const MicroId id{rank, role(phase), static_cast<std::int64_t>(mini), index};
    return Args{.block = pipelined ? 1 : 0,
                .step = it.step,
                .sizes = packed(micro.sizes),
                .payload = micro_payload(it, id, micro)};
  }
  // Stages of a pipeline end a pass together.
  if (index == 0 && pipelined) return Args{.block = 2, .step = it.step, .sizes = {}, .payload = {}};
  return std::nullopt;
}

std::optional<Args> IterationDriver::stage_decision(Iteration& it, Rank rank, std::int16_t phase, std::int64_t index) {
  std::int64_t micro_batches = 0;
  for (const MiniBatch& mini : batches(it.step, role(phase))) micro_batches += mini.micro_batches();
  const auto& order = passes(rank, phase, micro_batches);
  if (index > std::ssize(order) + 1) return std::nullopt;
  if (index > 0 && index <= std::ssize(order))
    return pass_args(it, rank, role(phase), 0, order[static_cast<std::size_t>(index - 1)]);
  return Args{.block = index == 0 ? 0 : last_block(rank, phase), .step = it.step, .sizes = {}, .payload = {}};
}

Sizes IterationDriver::packed(const Sizes& micro) const {
  return has_parts() ? filled_up(micro, scenario_.train.layout, expert_mesh(scenario_), rows_sent_of_token(scenario_),
                                 expert_copies(scenario_).of_token)
                     : micro;
}

bool IterationDriver::has_parts() const { return plan_.extents.size() > static_cast<std::size_t>(sequence_extent); }

std::int64_t IterationDriver::padded(std::int64_t tokens) const {
  return has_parts() ? scenario_.train.layout.padded(tokens) : tokens;
}

/// Those of a mini-batch on a rank, in its stage's order; without a pipeline, its micro-batches.
const std::vector<IterationDriver::Pass>& IterationDriver::passes(Rank rank, std::int16_t phase,
                                                                  std::int64_t micro_batches) {
  const std::int64_t stage = pipeline_.stages > 1 ? stages_[static_cast<std::size_t>(rank)] : 0;
  auto& out = passes_[{phase, stage, micro_batches}];
  if (!out.empty()) return out;
  if (pipeline_.stages > 1) return out = stage_passes(rank, phase, micro_batches);
  for (std::int64_t i = 0; i < micro_batches; ++i) out.push_back({.block = 1, .micro = i});
  return out;
}

std::vector<IterationDriver::Pass> IterationDriver::stage_passes(Rank rank, std::int16_t phase,
                                                                 std::int64_t micro_batches) {
  const std::int64_t stage = stages_[static_cast<std::size_t>(rank)];
  std::vector<Pass> out;
  if (priced_pipeline_) {
    for (const PipelineStep& s : pipeline_steps(pipeline_, stage, micro_batches, fills_))
      out.push_back({.block = pipeline_block_index(pipeline_, s, fills_), .micro = s.micro});
    return out;
  }
  const StagePhase& of = stage_phases_.at({phase, plan_.program_of_rank[static_cast<std::size_t>(rank)]});
  const PipelinePasses which = phase == train_phase_ ? PipelinePasses::both_ways : PipelinePasses::forward;
  auto& turns = turns_[{which, micro_batches}];
  if (turns.empty()) turns = pipeline_turns(pipeline_, micro_batches, which);
  for (const StageTurn& t : turns[static_cast<std::size_t>(stage)]) {
    const auto block = of.numbers.find(of.blocks.name_of(t));
    HB_CHECK(block != of.numbers.end(), "a pipeline without a block {}", of.blocks.name_of(t));
    out.push_back({.block = block->second, .micro = t.micro, .returned = t.returned, .message = !t.is_pass()});
  }
  return out;
}

Args IterationDriver::pass_args(Iteration& it, Rank rank, PhaseRole role, std::int64_t mini, const Pass& pass) {
  const auto& minis = batches(it.step, role);
  const auto id_of = [&](std::int64_t micro) {
    MicroId id{rank, role, mini, micro};
    for (std::int64_t count = 0; (count = minis[static_cast<std::size_t>(id.mini)].micro_batches()) <= id.micro;
         ++id.mini)
      id.micro -= count;
    return id;
  };
  const auto micro_batch = [&](const MicroId& id) -> const MicroBatch& {
    return minis[static_cast<std::size_t>(id.mini)].ranks[share_of(rank)][static_cast<std::size_t>(id.micro)];
  };
  const MicroId id = id_of(pass.micro);
  Args args{.block = pass.block, .step = it.step, .sizes = packed(micro_batch(id).sizes), .payload = {}};
  if (pass.returned >= 0)
    args.sizes[returned_extent] = packed(micro_batch(id_of(pass.returned)).sizes)[sequence_extent];
  if (!pass.message) args.payload = micro_payload(it, id, micro_batch(id));
  return args;
}

std::int32_t IterationDriver::last_block(Rank rank, std::int16_t phase) const {
  return static_cast<std::int32_t>(std::ssize(plan_.program(rank).phases[static_cast<std::size_t>(phase)])) - 1;
}

/// The i-th block of a mini-batch: begin, its passes, step.
Args IterationDriver::train_block(Iteration& it, Rank rank, std::int64_t number, std::int64_t index) {
  const MiniBatch& mini = batches(it.step)[static_cast<std::size_t>(number)];
  const auto& order = passes(rank, train_phase_, mini.micro_batches());
  if (index == 0) return {.block = 0, .step = it.step, .sizes = {}, .payload = begin_payload(it, rank, number)};
  if (index == std::ssize(order) + 1)
    return {.block = pipeline_.stages > 1 ? last_block(rank, train_phase_) : 2,
            .step = it.step,
            .sizes = {},
            .payload = step_payload(it, rank, number)};
  return pass_args(it, rank, PhaseRole::train, number, order[static_cast<std::size_t>(index - 1)]);
}

std::optional<Args> IterationDriver::train_decision(Iteration& it, Rank rank, std::int64_t index) {
  const auto& minis = batches(it.step);
  for (std::size_t mini = 0; mini < minis.size(); ++mini) {
    const std::int64_t blocks = std::ssize(passes(rank, train_phase_, minis[mini].micro_batches())) + 2;
    if (index < blocks) return train_block(it, rank, static_cast<std::int64_t>(mini), index);
    index -= blocks;
  }
  return std::nullopt;
}

std::vector<Args> IterationDriver::mini_batch(Rank rank, std::int32_t step, std::int64_t mini) {
  std::vector<Args> blocks;
  const std::int64_t count =
      std::ssize(passes(rank, train_phase_, batches(step)[static_cast<std::size_t>(mini)].micro_batches())) + 2;
  for (std::int64_t i = 0; i < count; ++i) blocks.push_back(train_block(iteration(step), rank, mini, i));
  return blocks;
}

std::optional<Args> IterationDriver::decide(Rank rank, std::int32_t step, std::int16_t phase, std::int64_t index) {
  const Args once{.block = 0, .step = step, .sizes = {}, .payload = {}};
  const bool driven = plan_.phases[static_cast<std::size_t>(phase)].driven;
  if (driven) {
    switch (role(phase)) {
      case PhaseRole::rollout:
        return rollout_decision(iteration(step), rank, index);
      case PhaseRole::reference:
      case PhaseRole::old_logprobs:
        return micro_decision(iteration(step), rank, phase, index);
      case PhaseRole::train:
        return train_decision(iteration(step), rank, index);
      case PhaseRole::checkpoint:
        if (!ends_after(step) && (scenario_.checkpoint_every < 1 || step % scenario_.checkpoint_every != 0))
          return std::nullopt;
        break;
      default:
        break;
    }
    if (index > 0) return std::nullopt;
  }
  Args args = once;
  switch (role(phase)) {
    case PhaseRole::sync:
      args.payload = sync_payload(step, rank);
      break;
    case PhaseRole::exchange:
      args.payload = exchange_payload(iteration(step), rank);
      break;
    case PhaseRole::load:
    case PhaseRole::checkpoint:
    case PhaseRole::export_weights:
      args.payload = weights_payload(role(phase), step, rank);
      break;
    default:
      break;
  }
  return args;
}

std::optional<Args> IterationDriver::next(Rank rank, std::int32_t step, std::int16_t phase) {
  Cursor& cursor = cursors_[static_cast<std::size_t>(rank)];
  if (cursor.step != step || cursor.phase != phase) cursor = {step, phase, 0};
  return decide(rank, step, phase, cursor.index++);
}

SchedulerStatistics IterationDriver::replay(const SampleLengths& lengths) const {
  SchedulerStatistics total;
  std::vector<std::int64_t> prompts;
  const auto per_prompt = static_cast<std::size_t>(scenario_.algorithm.samples_per_prompt);
  for (std::size_t i = 0; i < lengths.prompt_tokens.size(); i += per_prompt)
    prompts.push_back(lengths.prompt_tokens[i]);
  for (const auto& samples : samples_of_engines(prompts)) {
    Scheduler scheduler = make_scheduler(samples, lengths);
    while (const auto step = scheduler.next(std::numeric_limits<std::int64_t>::max())) scheduler.completed(*step);
    const SchedulerStatistics& s = scheduler.statistics();
    total.prefill_steps += s.prefill_steps;
    total.decode_steps += s.decode_steps;
    total.preemptions += s.preemptions;
    total.recomputed_tokens += s.recomputed_tokens;
    total.max_blocks_used = std::max(total.max_blocks_used, s.max_blocks_used);
  }
  return total;
}

void IterationDriver::report(Trace& trace) const {
  trace.trained_tokens = trained_tokens_;
  trace.model_flops = model_flops_;
  MetricFold all = curves_;
  for (const auto& [step, values] : open_figures_) all.add({step, values});
  trace.metrics = all.rows();
}

}  // namespace hotbunk
