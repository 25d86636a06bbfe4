// A whole GRPO iteration without a backend: the test plays four processes, each with a driver of its own, feeds what
// the drivers give it and answers with tokens of its own choice.
#include "rl/rl_driver.h"

#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "base/check.h"
#include "exec/length_driver.h"
#include "lowering/sample_rows.h"
#include "rl/sft_driver.h"
#include "spec/family.h"
#include "tests/blocks.h"

using namespace hotbunk;
namespace fs = std::filesystem;

namespace {

constexpr Rank ranks = 4;
enum : std::int16_t { sync_phase, rollout_phase, exchange_phase, reference_phase, old_phase, train_phase };

Scenario scenario() {
  Scenario s;
  s.model.family = find_family("llama");
  s.model.hidden = 8;
  s.model.intermediate = 16;
  s.model.layers = 1;
  s.model.heads = 2;
  s.model.kv_heads = 2;
  s.model.head_dim = 4;
  s.model.vocab = 16;
  s.train.layout.dp = ranks;
  s.train.micro_batch_tokens = 24;
  s.optimizer.lr = 0.5;
  s.optimizer.warmup_steps = 4;
  s.rollout.layout.tp = 2;
  s.rollout.layout.dp = 2;
  s.rollout.max_running_requests = 4;
  s.rollout.max_prefill_tokens = 16;
  s.rollout.block_tokens = 4;
  s.algorithm.prompts = 3;  // does not divide by the engines: the last prompt's samples are split
  s.algorithm.samples_per_prompt = 4;
  s.algorithm.mini_batches = 2;
  s.algorithm.reference = true;
  s.workload.prompt_tokens.max = 5;
  s.workload.response_tokens.max = 6;
  s.task.name = "sort";
  s.task.digits = 3;
  s.seed = 3;
  return s;
}

Plan make_plan() {
  Plan plan = test::empty_plan();
  for (const char* name : {"sync", "rollout", "exchange", "reference", "old_logprobs", "train"})
    plan.phases.push_back({name, When::iteration, std::string(name) != "sync"});
  plan.program_of_rank.assign(ranks, 0);
  Program program = test::empty_program();
  program.phases.resize(plan.phases.size());
  program.buffers = {{"kv_cache", DType::f32, 9 * 8 * 8, Category::kv_cache, sections::kv_cache, 0}};
  Tensor pool;
  pool.buffer = 0;
  pool.rank = 3;
  pool.shape = {Dim{9}, Dim{8}, Dim{8}};
  Op write;
  write.kind = OpKind::kv_write;
  write.outputs = {pool};
  program.phases[rollout_phase] = {test::block_of(program, "prefill", {write}),
                                   test::block_of(program, "decode", {write})};
  plan.programs = {program};
  return plan;
}

Op slot_op(Slot slot) {
  Op op;
  op.name = "op";
  op.attrs = {{Attr::slot, static_cast<std::int64_t>(slot)}};
  return op;
}

template <class T>
std::vector<T> feed(Driver& d, Rank rank, const Args& args, Slot slot, std::int64_t capacity) {
  std::vector<T> values(static_cast<std::size_t>(capacity));
  d.feed(rank, *test::LoneOp(slot_op(slot)), args, std::as_writable_bytes(std::span(values)));
  return values;
}

template <class T>
void fetch(Driver& d, Rank rank, const Args& args, Slot slot, const std::vector<T>& values) {
  d.fetch(rank, *test::LoneOp(slot_op(slot)), args, std::as_bytes(std::span(values)));
}

/// Stands for the model: a token and its log-prob from the uniform that the driver drew. One in eight ends the
/// sequence.
std::int32_t token_of(float uniform) {
  return uniform < 0.125f ? token::eos : token::digit0 + static_cast<std::int32_t>(uniform * 9.99f);
}
float logp_of(float uniform) { return -uniform; }

using Drivers = std::vector<std::unique_ptr<RlDriver>>;

/// A driver that says the lengths of each step it trains.
DriverOptions listening(std::vector<SampleLengths>& lengths) {
  DriverOptions options;
  options.on_samples = [&lengths](std::int32_t, const SampleLengths& of_step) { lengths.push_back(of_step); };
  return options;
}

/// lengths: of rank 0's.
Drivers open_all(const Plan& plan, const Scenario& s, std::vector<SampleLengths>& lengths) {
  Drivers drivers;
  for (Rank r = 0; r < ranks; ++r)
    drivers.push_back(std::move(*RlDriver::create(plan, s, r == 0 ? listening(lengths) : DriverOptions{})));
  return drivers;
}

/// Runs the rollout of one rank to its end; returns its decisions.
std::vector<Sizes> roll_out(RlDriver& d, Rank rank, std::int32_t step, const Scenario& s) {
  std::vector<Sizes> sizes;
  std::set<float> draws;
  while (const auto args = d.next(rank, step, rollout_phase)) {
    sizes.push_back(args->sizes);
    const auto uniforms = feed<float>(d, rank, *args, Slot::uniforms, args->sizes.seqs);
    const auto ids = feed<std::int32_t>(d, rank, *args, Slot::token_ids, args->sizes.tokens);
    const auto positions = feed<std::int32_t>(d, rank, *args, Slot::positions, args->sizes.tokens);
    for (std::size_t t = 0; t < ids.size(); ++t) CHECK((positions[t] == 0) == (ids[t] == token::bos));
    const auto cu = feed<std::int32_t>(d, rank, *args, Slot::cu_seqlens, s.rollout.max_running_requests + 1);
    CHECK(cu.back() == args->sizes.tokens);
    draws.insert(uniforms.begin(), uniforms.end());
    std::vector<std::int32_t> sampled;
    std::vector<float> logps;
    for (float u : uniforms) sampled.push_back(token_of(u)), logps.push_back(logp_of(u));
    fetch(d, rank, *args, Slot::sampled_ids, sampled);
    fetch(d, rank, *args, Slot::sampled_logps, logps);
    d.completed(rank, *args, rollout_phase);
  }
  // Every position has a draw of its own: were it one per sample, there would be no more than samples.
  CHECK(static_cast<std::int64_t>(draws.size()) > num_samples(s));
  return sizes;
}

void exchange(Drivers& drivers, std::int32_t step, const Scenario& s) {
  std::vector<Args> args;
  std::vector<std::int32_t> all_rows;
  std::vector<float> all_logps;
  for (Rank r = 0; r < ranks; ++r) {
    args.push_back(*drivers[static_cast<std::size_t>(r)]->next(r, step, exchange_phase));
    auto& d = *drivers[static_cast<std::size_t>(r)];
    const auto rows = feed<std::int32_t>(d, r, args.back(), Slot::sample_rows, rows_per_rank(s) * row_ints(s));
    const auto logps = feed<float>(d, r, args.back(), Slot::sample_logps, rows_per_rank(s) * max_response_tokens(s));
    all_rows.insert(all_rows.end(), rows.begin(), rows.end());
    all_logps.insert(all_logps.end(), logps.begin(), logps.end());
  }
  for (Rank r = 0; r < ranks; ++r) {
    auto& d = *drivers[static_cast<std::size_t>(r)];
    fetch(d, r, args[static_cast<std::size_t>(r)], Slot::all_sample_rows, all_rows);
    fetch(d, r, args[static_cast<std::size_t>(r)], Slot::all_sample_logps, all_logps);
    d.completed(r, args[static_cast<std::size_t>(r)], exchange_phase);
    CHECK_FALSE(d.next(r, step, exchange_phase));
  }
}

/// Log-prob passes answer with a constant plus the row's position, so that training can be seen to get them back.
void log_probs(RlDriver& d, Rank rank, std::int32_t step, std::int16_t phase, float constant) {
  while (const auto args = d.next(rank, step, phase)) {
    const auto positions = feed<std::int32_t>(d, rank, *args, Slot::positions, args->sizes.tokens);
    std::vector<float> logps;
    for (std::int32_t p : positions) logps.push_back(constant + static_cast<float>(p));
    fetch(d, rank, *args, Slot::logps, logps);
    d.completed(rank, *args, phase);
  }
}

}  // namespace

TEST_CASE("one GRPO iteration of four processes") {
  const Scenario s = scenario();
  const Plan plan = make_plan();
  std::vector<SampleLengths> lengths;
  Drivers drivers = open_all(plan, s, lengths);
  std::vector<std::vector<Sizes>> rollouts;
  for (Rank r = 0; r < ranks; ++r) rollouts.push_back(roll_out(*drivers[static_cast<std::size_t>(r)], r, 1, s));
  exchange(drivers, 1, s);

  std::map<std::int64_t, double> weight_of_mini;
  std::vector<std::vector<float>> learning_rates;
  // The log-prob passes of all ranks come before any optimizer step, whose metrics are reduced over the ranks.
  std::vector<double> gaps(static_cast<std::size_t>(Metric::count), 0.0);
  const auto gap = [&](Metric which) -> double& { return gaps[static_cast<std::size_t>(which)]; };
  std::int64_t begun = 0;
  for (Rank r = 0; r < ranks; ++r) {
    RlDriver& d = *drivers[static_cast<std::size_t>(r)];
    log_probs(d, r, 1, reference_phase, 100.0f);
    log_probs(d, r, 1, old_phase, 200.0f);
    const auto begin = d.next(r, 1, train_phase);
    REQUIRE(begin);
    const auto first = feed<float>(d, r, *begin, Slot::first_metrics, static_cast<std::int64_t>(Metric::count));
    begun += first[static_cast<std::size_t>(Metric::rollout_gap_tokens)] > 0.0f ? 1 : 0;
    for (Metric m : {Metric::sum_rollout_gap, Metric::rollout_gap_tokens})
      gap(m) += static_cast<double>(first[static_cast<std::size_t>(m)]);
    gap(Metric::max_rollout_gap) = std::max(
        gap(Metric::max_rollout_gap), static_cast<double>(first[static_cast<std::size_t>(Metric::max_rollout_gap)]));
  }
  CHECK(begun == ranks);
  std::int64_t response_tokens = 0;
  for (std::int64_t n : lengths.at(0).response_tokens) response_tokens += n;
  CHECK(gap(Metric::rollout_gap_tokens) == static_cast<double>(response_tokens));
  for (Rank r = 0; r < ranks; ++r) {
    RlDriver& d = *drivers[static_cast<std::size_t>(r)];
    std::int64_t mini = 0;
    while (const auto args = d.next(r, 1, train_phase)) {
      if (args->block == 0) {
        ++mini;
        for (float value : feed<float>(d, r, *args, Slot::first_metrics, 16)) CHECK(value == 0.0f);
      }
      if (args->block == 1) {
        const std::int64_t n = args->sizes.tokens;
        const auto ids = feed<std::int32_t>(d, r, *args, Slot::token_ids, n);
        const auto positions = feed<std::int32_t>(d, r, *args, Slot::positions, n);
        const auto targets = feed<std::int32_t>(d, r, *args, Slot::targets, n);
        const auto old = feed<float>(d, r, *args, Slot::old_logps, n);
        const auto reference = feed<float>(d, r, *args, Slot::ref_logps, n);
        for (std::size_t t = 0; t < ids.size(); ++t) {
          CHECK(reference[t] == 100.0f + static_cast<float>(positions[t]));
          CHECK(old[t] == 200.0f + static_cast<float>(positions[t]));
          if (targets[t] >= 0) CHECK(targets[t] == ids.at(t + 1));
        }
        for (float w : feed<float>(d, r, *args, Slot::loss_weights, n)) weight_of_mini[mini] += static_cast<double>(w);
      }
      if (args->block == 2) {
        learning_rates.push_back(feed<float>(d, r, *args, Slot::learning_rate, 2));
        std::vector<float> metrics(16, 0.0f);
        if (mini == 0) std::ranges::copy(gaps, metrics.begin());
        metrics[static_cast<std::size_t>(Metric::loss)] = 1.0f + static_cast<float>(mini);
        metrics[static_cast<std::size_t>(Metric::tokens)] = 10.0f;
        metrics[static_cast<std::size_t>(Metric::clipped)] = 5.0f;
        fetch(d, r, *args, Slot::metrics, metrics);
      }
      d.completed(r, *args, train_phase);
    }
  }
  // A token mean: the weights of a mini-batch's response tokens sum to one over all ranks.
  REQUIRE(weight_of_mini.size() == 2);
  for (const auto& [mini, weight] : weight_of_mini) CHECK(weight == Approx(1.0).epsilon(1e-5));
  // Linear warm-up over 4 optimizer steps to 0.5, two steps per iteration.
  CHECK(learning_rates[0] == std::vector<float>{0.125f, 1.0f});
  CHECK(learning_rates[1] == std::vector<float>{0.25f, 2.0f});

  Trace trace, other;
  drivers[0]->report(trace);
  drivers[3]->report(other);
  const auto& values = trace.metrics.front().values;
  CHECK(values.at("loss") == 1.5);  // mean of 1 and 2
  CHECK(values.at("actor/pg_clipfrac") == 0.5);
  CHECK(values.at("reward") == values.at("critic/score/mean"));
  CHECK(values.at("reward") == other.metrics.front().values.at("reward"));
  // Rollout log-probs lie in (-1, 0], the pass answered 200 + position: 200 < gap < 212.
  CHECK(values.at("rollout/logprob_gap_mean") > 200.0);
  CHECK(values.at("rollout/logprob_gap_max") < 212.0);
  CHECK(values.at("rollout/logprob_gap_mean") ==
        Approx(gap(Metric::sum_rollout_gap) / gap(Metric::rollout_gap_tokens)).epsilon(1e-5));
  CHECK(values.at("rollout/logprob_gap_mean") == other.metrics.front().values.at("rollout/logprob_gap_mean"));

  // A simulation that replays the lengths takes the same decisions on every rank.
  auto replay = LengthDriver::create(plan, s, lengths);
  REQUIRE(replay);
  for (Rank r = 0; r < ranks; ++r)
    for (const Sizes& expected : rollouts[static_cast<std::size_t>(r)]) {
      const auto args = (*replay)->next(r, 1, rollout_phase);
      REQUIRE(args);
      CHECK(args->sizes.tokens == expected.tokens);
      CHECK(args->sizes.seqs == expected.seqs);
      CHECK(args->sizes.attention_pairs == expected.attention_pairs);
    }
  Trace simulated;
  (*replay)->next(0, 1, train_phase);
  (*replay)->report(simulated);
  CHECK(simulated.trained_tokens == trace.trained_tokens);
  CHECK(simulated.model_flops == trace.model_flops);
}

TEST_CASE("sampling depends on seed, step, sample and position, not on the layout") {
  // One engine of one rank against two engines of two: every sample comes out the same.
  Scenario s = scenario();
  const Plan plan = make_plan();
  std::vector<SampleLengths> four_lengths, alone_lengths;
  Drivers four = open_all(plan, s, four_lengths);
  for (Rank r = 0; r < ranks; ++r) roll_out(*four[static_cast<std::size_t>(r)], r, 1, s);
  exchange(four, 1, s);
  four[0]->next(0, 1, train_phase);
  Scenario single = s;
  single.rollout.layout = {};
  single.train.layout.dp = 1;
  Plan one_rank = make_plan();
  one_rank.program_of_rank = {0};
  auto alone = RlDriver::create(one_rank, single, listening(alone_lengths));
  REQUIRE(alone);
  roll_out(**alone, 0, 1, single);
  const auto args = (*alone)->next(0, 1, exchange_phase);
  fetch(**alone, 0, *args, Slot::all_sample_rows,
        feed<std::int32_t>(**alone, 0, *args, Slot::sample_rows, rows_per_rank(single) * row_ints(single)));
  fetch(**alone, 0, *args, Slot::all_sample_logps,
        feed<float>(**alone, 0, *args, Slot::sample_logps, rows_per_rank(single) * max_response_tokens(single)));
  (*alone)->completed(0, *args, exchange_phase);
  (*alone)->next(0, 1, train_phase);
  CHECK(alone_lengths == four_lengths);
  Trace a, b;
  (*alone)->report(a);
  four[0]->report(b);
  CHECK(a.metrics.front().values.at("reward") == b.metrics.front().values.at("reward"));
}

TEST_CASE("a rank that does not see the folder of checkpoints says so before training") {
  Plan plan = make_plan();
  const auto load = static_cast<std::int16_t>(plan.phases.size());
  plan.phases.push_back({"load", When::prologue, false});
  plan.programs[0].phases.push_back({test::block_of(plan.programs[0], "load", {})});
  std::map<std::string, std::string> said;
  DriverOptions options;
  const fs::path run = fs::temp_directory_path() / ("hotbunk-rl-driver-" + std::to_string(::getpid()));
  fs::create_directories(run);
  options.checkpoints = run / "checkpoints";
  options.say = [&](const std::string& key, const std::string& value) { said[key] = value; };
  options.hear = [&](const std::string& key, Rank from) { return from == 0 ? said.at(key) : ""; };
  {
    const auto driver = RlDriver::create(plan, scenario(), options);
    REQUIRE(driver);
    CHECK((*driver)->next(0, 0, load));
    CHECK((*driver)->next(1, 0, load));
    // A folder of that path which another host has for itself.
    const std::string probe = std::exchange(said.begin()->second, (run / ".0123456789abcdef.partial").string());
    CHECK(fs::exists(probe));
    CHECK_THROWS_WITH((*driver)->next(1, 0, load), Catch::Contains("rank 1 does not see " + run.string() + ": "));
  }
  CHECK(fs::is_empty(run));
  fs::remove_all(run);
}

TEST_CASE("a last checkpoint that has not all of its elements is not written, and the run's results are not lost") {
  Plan plan = make_plan();
  const auto last = static_cast<std::int16_t>(plan.phases.size());
  plan.phases.push_back({"export", When::epilogue, false});
  plan.programs[0].phases.push_back({test::block_of(plan.programs[0], "export", {})});
  const fs::path run = fs::temp_directory_path() / ("hotbunk-rl-driver-" + std::to_string(::getpid()));
  DriverOptions options;
  options.checkpoints = run / "checkpoints";
  const auto driver = RlDriver::create(plan, scenario(), options);
  REQUIRE(driver);
  const auto args = (*driver)->next(0, 2, last);
  REQUIRE(args);
  (*driver)->completed(0, *args, last);
  REQUIRE((*driver)->finish_problems().size() == 1);
  CHECK((*driver)->finish_problems().front().code == "E632");
  CHECK((*driver)->finish_problems().front().message.starts_with("a checkpoint was not written: 0 of "));
  CHECK(fs::is_empty(options.checkpoints));
  fs::remove_all(run);
}
