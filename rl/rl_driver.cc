#include "rl/rl_driver.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "lowering/sample_rows.h"
#include "rl/advantages.h"

namespace hotbunk {

Result<std::unique_ptr<RlDriver>> RlDriver::create(const Plan& plan, const Scenario& s, DriverOptions options) {
  auto task = Task::create(s);
  if (!task) return fail(std::move(task.error()));
  if (Diagnostics problems = check_lengths(s, kv_blocks_of(plan)); !problems.empty()) return fail(std::move(problems));
  auto sources = LoadSources::open(s, options.resume, options.opens_files);
  if (!sources) return fail(std::move(sources.error()));
  return std::unique_ptr<RlDriver>(new RlDriver(plan, s, std::move(*sources), std::move(options), *task));
}

RlDriver::RlDriver(const Plan& plan, const Scenario& s, LoadSources sources, DriverOptions options, Task task)
    : TrainingDriver(plan, s, std::move(sources), std::move(options)), task_(task) {}

RlDriver::Rollout& RlDriver::rollout(std::int32_t step) {
  if (const auto found = rollouts_.find(step); found != rollouts_.end()) return found->second;
  rollouts_.erase(rollouts_.begin(), rollouts_.lower_bound(step - 1));
  Rollout& r = rollouts_[step];
  const AlgorithmSpec& a = scenario().algorithm;
  for (std::int64_t p = 0; p < a.prompts; ++p) {
    r.problems.push_back(task_.problem(scenario().seed, step, p));
    const auto& prompt = r.problems.back().prompt;
    for (std::int64_t k = 0; k < a.samples_per_prompt; ++k)
      r.sequences.push_back({prompt, static_cast<std::int64_t>(prompt.size()), {}});
  }
  return r;
}

std::vector<std::int64_t> RlDriver::prompt_tokens(std::int32_t step) {
  std::vector<std::int64_t> lengths;
  for (const Problem& p : rollout(step).problems) lengths.push_back(static_cast<std::int64_t>(p.prompt.size()));
  return lengths;
}

std::vector<std::int64_t> RlDriver::response_caps(std::int32_t) {
  return std::vector<std::int64_t>(static_cast<std::size_t>(num_samples(scenario())), max_response_tokens(scenario()));
}

std::shared_ptr<Payload> RlDriver::rollout_payload(Iteration& it, std::int64_t engine, const ScheduledStep& step) {
  return feed_step(it.engines[static_cast<std::size_t>(engine)].scheduler, step, rollout(it.step).sequences,
                   scenario().seed, it.step, max_blocks_per_seq(scenario()));
}

std::vector<std::uint8_t> RlDriver::ended(Iteration& it, std::int64_t engine, const ScheduledStep& step,
                                          const Args& args) {
  return take_step(it.engines[static_cast<std::size_t>(engine)].scheduler, step, args, rollout(it.step).sequences,
                   token::eos);
}

std::shared_ptr<Payload> RlDriver::exchange_payload(Iteration& it, Rank rank) {
  const auto width = static_cast<std::size_t>(row_ints(scenario()));
  const auto responses = static_cast<std::size_t>(max_response_tokens(scenario()));
  const auto rows = static_cast<std::size_t>(rows_per_rank(scenario()));
  auto payload = std::make_shared<ExchangePayload>();
  payload->rows.assign(rows * width, -1);
  payload->logps.assign(rows * responses, 0.0f);
  const Scheduler& scheduler = it.engines[static_cast<std::size_t>(group_of(rank))].scheduler;
  const RolloutLayout& l = scenario().rollout.layout;
  // The group's ranks, on every stage and beside every part of its sequences.
  const std::int64_t sharers = l.tp / groups_per_engine();
  const auto ranks = static_cast<std::size_t>(sharers * l.cp * l.pp);
  std::size_t row = 0;
  for (auto i = static_cast<std::size_t>(place_of(rank) / l.tp * sharers + place_of(rank) % l.tp % sharers);
       i < scheduler.requests().size(); i += ranks, ++row) {
    HB_CHECK(row < rows, "rank {} has more than {} samples to exchange", rank, rows);
    const std::int64_t sample = scheduler.requests()[i].sample;
    write_row(rollout(it.step).sequences[static_cast<std::size_t>(sample)], sample,
              std::span(payload->rows).subspan(row * width, width),
              std::span(payload->logps).subspan(row * responses, responses));
  }
  return payload;
}

void RlDriver::completed(Rank rank, const Args& args, std::int16_t phase) {
  TrainingDriver::completed(rank, args, phase);
  const auto* payload = dynamic_cast<const ExchangePayload*>(args.payload.get());
  if (payload == nullptr) return;
  Rollout& r = rollout(args.step);
  if (r.exchanged) return;  // another rank of this process has brought the same rows
  const auto width = static_cast<std::size_t>(row_ints(scenario()));
  const auto responses = static_cast<std::size_t>(max_response_tokens(scenario()));
  r.samples.sequences.assign(r.sequences.size(), {});
  std::size_t arrived = 0;
  for (std::size_t row = 0; (row + 1) * width <= payload->all_rows.size(); ++row) {
    TokenSequence sequence;
    const std::int64_t sample = read_row(std::span(payload->all_rows).subspan(row * width, width),
                                         std::span(payload->all_logps).subspan(row * responses, responses), sequence);
    if (sample < 0) continue;
    auto& slot = r.samples.sequences.at(static_cast<std::size_t>(sample));
    HB_CHECK(slot.tokens.empty(), "sample {} arrived twice", sample);
    slot = std::move(sequence);
    ++arrived;
  }
  HB_CHECK(arrived == r.sequences.size(), "step {}: {} of {} samples arrived", args.step, arrived, r.sequences.size());
  r.exchanged = true;
  judge(args.step, r);
}

void RlDriver::judge(std::int32_t step, Rollout& r) {
  const std::int64_t per_prompt = scenario().algorithm.samples_per_prompt;
  std::vector<double> rewards;
  double exact = 0.0;
  for (std::size_t i = 0; i < r.samples.sequences.size(); ++i) {
    const TokenSequence& s = r.samples.sequences[i];
    const auto response = std::span(s.tokens).subspan(static_cast<std::size_t>(s.prompt_tokens));
    const auto& answer = r.problems[i / static_cast<std::size_t>(per_prompt)].answer;
    rewards.push_back(task_.reward(response, answer));
    exact += std::ranges::equal(response, answer) ? 1.0 : 0.0;
  }
  r.samples.advantages = group_advantages(rewards, per_prompt, scenario().algorithm.normalize_std);
  const auto count = static_cast<double>(rewards.size());
  const double mean = std::accumulate(rewards.begin(), rewards.end(), 0.0) / count;
  note(step, "reward", mean);
  note(step, "critic/score/mean", mean);
  note(step, "critic/score/max", std::ranges::max(rewards));
  note(step, "critic/score/min", std::ranges::min(rewards));
  note(step, "reward/exact", exact / count);
  r.samples.rewards = std::move(rewards);
}

const TrainingDriver::Samples& RlDriver::samples(std::int32_t step) {
  const Rollout& r = rollout(step);
  HB_CHECK(r.exchanged, "step {} is trained before its samples were exchanged", step);
  return r.samples;
}

}  // namespace hotbunk
