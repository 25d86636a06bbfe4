#include <algorithm>
#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>

#include "base/file.h"
#include "base/lines.h"
#include "exec/length_driver.h"
#include "lowering/sample_rows.h"
#include "spec/family.h"
#include "tests/blocks.h"

using namespace hotbunk;

namespace {

Scenario scenario() {
  Scenario s;
  s.model.family = find_family("llama");
  s.model.hidden = 8;
  s.model.intermediate = 16;
  s.model.layers = 2;
  s.model.heads = 2;
  s.model.kv_heads = 1;
  s.model.head_dim = 4;
  s.model.vocab = 32;
  s.train.layout.dp = 4;
  s.train.micro_batch_tokens = 40;
  s.rollout.layout.tp = 2;
  s.rollout.layout.dp = 2;
  s.rollout.max_running_requests = 3;
  s.rollout.max_prefill_tokens = 16;
  s.rollout.block_tokens = 4;
  s.algorithm.prompts = 4;
  s.algorithm.samples_per_prompt = 3;
  s.algorithm.mini_batches = 2;
  s.workload.prompt_tokens = {.mean = 6, .max = 8};
  s.workload.response_tokens = {.mean = 10, .max = 24};
  s.steps = 2;
  s.seed = 11;
  return s;
}

/// Only what drivers read: phases, ranks, and the KV pool that kv_write names.
Plan plan_of(std::int64_t kv_blocks) {
  Plan plan = test::empty_plan();
  for (const char* name : {"sync", "rollout", "exchange", "old_logprobs", "train", "checkpoint"})
    plan.phases.push_back({name, When::iteration, std::string(name) != "sync"});
  plan.program_of_rank = {0, 0, 0, 0};
  Program program = test::empty_program();
  program.phases.resize(plan.phases.size());
  program.buffers = {{"kv_cache", DType::f32, kv_blocks * 8 * 4, Category::kv_cache, sections::kv_cache, 0}};
  Tensor pool;
  pool.buffer = 0;
  pool.rank = 3;
  pool.shape = {Dim{kv_blocks}, Dim{8}, Dim{4}};
  Op write;
  write.kind = OpKind::kv_write;
  write.outputs = {pool};
  program.phases[1] = {test::block_of(program, "prefill", {write}), test::block_of(program, "decode", {write})};
  plan.programs = {program};
  return plan;
}

struct Decision {
  std::int32_t block;
  std::int64_t tokens, seqs, pairs;
  friend bool operator==(const Decision&, const Decision&) = default;
};

std::vector<Decision> decisions(Driver& driver, Rank rank, std::int32_t step, std::int16_t phase) {
  std::vector<Decision> all;
  while (const auto args = driver.next(rank, step, phase)) {
    all.push_back({args->block, args->sizes.tokens, args->sizes.seqs, args->sizes.attention_pairs});
    driver.completed(rank, *args, phase);
  }
  return all;
}

}  // namespace

TEST_CASE("all ranks of an engine, in one process or in several, decide the same") {
  const Scenario s = scenario();
  const Plan plan = plan_of(20);
  auto together = LengthDriver::create(plan, s);
  REQUIRE(together);
  std::int64_t decoded = 0;
  for (Rank rank = 0; rank < 4; ++rank) {
    auto alone = LengthDriver::create(plan, s);
    REQUIRE(alone);
    for (std::int32_t step = 1; step <= 2; ++step)
      for (std::int16_t phase = 1; phase < 6; ++phase) {
        const auto mine = decisions(**alone, rank, step, phase);
        CHECK(mine == decisions(**together, rank, step, phase));
        if (phase == 1)
          for (const Decision& d : mine) decoded += d.block == 1 ? d.tokens : 0;
      }
  }
  // Each engine's two ranks decode every response token but the first (a prefill samples that one), in both steps.
  std::int64_t responses = 0;
  for (std::int32_t step = 1; step <= 2; ++step)
    for (std::int64_t n : draw_lengths(s, step).response_tokens) responses += n - 1;
  CHECK(decoded <= 2 * responses);  // a prefill after a preemption samples one, too
  CHECK(decoded >= 2 * responses - 200);
}

TEST_CASE("ranks of one engine are neighbours, or strided when the scenario says so") {
  Scenario s = scenario();  // 2 engines of 2 ranks
  const Plan plan = plan_of(20);
  const auto seats = [&] {
    const auto driver = LengthDriver::create(plan, s);
    std::vector<std::pair<std::int64_t, std::int64_t>> all;
    for (Rank r = 0; r < 4; ++r) all.emplace_back((*driver)->engine_of(r), (*driver)->place_of(r));
    return all;
  };
  using Seats = std::vector<std::pair<std::int64_t, std::int64_t>>;
  CHECK(seats() == Seats{{0, 0}, {0, 1}, {1, 0}, {1, 1}});
  s.rollout.layout.order = RankOrder::strided;
  CHECK(seats() == Seats{{0, 0}, {1, 0}, {0, 1}, {1, 1}});
}

TEST_CASE("training runs the same blocks on all ranks and every token once") {
  const Scenario s = scenario();
  const Plan plan = plan_of(20);
  auto driver = LengthDriver::create(plan, s);
  REQUIRE(driver);
  std::int64_t train_tokens = 0, logprob_tokens = 0;
  std::vector<std::int32_t> order;
  for (Rank rank = 0; rank < 4; ++rank) {
    std::vector<std::int32_t> blocks;
    for (const Decision& d : decisions(**driver, rank, 1, 4)) {
      blocks.push_back(d.block);
      train_tokens += d.tokens;
    }
    for (const Decision& d : decisions(**driver, rank, 1, 3)) {
      CHECK(d.block == 0);
      logprob_tokens += d.tokens;
    }
    if (rank == 0) order = blocks;
    CHECK(blocks == order);
    CHECK(blocks.front() == 0);
    CHECK(blocks.back() == 2);
    CHECK(std::count(blocks.begin(), blocks.end(), 0) == 2);  // mini-batches
    CHECK(std::count(blocks.begin(), blocks.end(), 2) == 2);
  }
  const SampleLengths lengths = draw_lengths(s, 1);
  std::int64_t tokens = 0, pairs = 0;
  for (std::size_t i = 0; i < lengths.prompt_tokens.size(); ++i) {
    const std::int64_t n = lengths.prompt_tokens[i] + lengths.response_tokens[i];
    tokens += n;
    pairs += n * (n + 1) / 2;
  }
  CHECK(train_tokens == tokens);
  CHECK(logprob_tokens == tokens);
  Trace trace;
  (*driver)->report(trace);
  CHECK(trace.trained_tokens == tokens);
  // N = all parameters but the embedding table: 2 layers of q 64 + k 32 + v 32 + o 64 + mlp 3*128 + norms 16 = 592,
  // final norm 8, head 32*8 = 256: 1448. Attention: 12 * 2 heads * 4 * 2 layers = 192 per pair.
  CHECK(trace.model_flops == Approx(6.0 * 1448 * static_cast<double>(tokens) + 192.0 * static_cast<double>(pairs)));
  CHECK(trace.metrics.front().values.at("prompt_length/mean") > 0.0);
}

TEST_CASE("phases that are not driven run once, checkpoints when they are due") {
  Scenario s = scenario();
  s.checkpoint_every = 2;
  const Plan plan = plan_of(20);
  auto driver = LengthDriver::create(plan, s);
  REQUIRE(driver);
  CHECK((*driver)->next(0, 1, 0)->block == 0);
  CHECK(decisions(**driver, 0, 1, 2) == std::vector<Decision>{{0, 0, 0, 0}});  // exchange
  CHECK(decisions(**driver, 0, 1, 5).empty());
  CHECK(decisions(**driver, 0, 2, 5).size() == 1);
  // The iteration that ends a run early has one too, and nothing else of it changes.
  CHECK_FALSE((*driver)->ends_after(3));
  (*driver)->end_after(3);
  CHECK(((*driver)->ends_after(3) && !(*driver)->ends_after(2)));
  CHECK(decisions(**driver, 0, 3, 5).size() == 1);
  CHECK(decisions(**driver, 0, 5, 5).empty());
}

TEST_CASE("lengths without an end of line are refused before they fill the memory") {
  const auto file = std::filesystem::temp_directory_path() / "hotbunk_drivers_test_sparse.jsonl";
  std::ofstream(file).close();
  std::filesystem::resize_file(file, most_line_bytes + 1);
  for (const auto& error : {read_lengths(file).error(), recorded_lengths(file, scenario()).error()}) {
    CHECK(error.front().code == "E102");
    CHECK(error.front().where.line == 1);
  }
  std::filesystem::remove(file);
}

TEST_CASE("recorded lengths come back from their file and replay the same decisions") {
  const Scenario s = scenario();
  const Plan plan = plan_of(20);
  const auto file = std::filesystem::temp_directory_path() / "hotbunk_drivers_test_lengths.jsonl";
  const std::vector<SampleLengths> drawn{draw_lengths(s, 1), draw_lengths(s, 2)};
  REQUIRE(write_file_atomic(file, lengths_line(1, drawn[0]) + '\n' + lengths_line(2, drawn[1]) + '\n'));
  auto read = read_lengths(file);
  REQUIRE(read);
  CHECK(*read == drawn);
  Scenario other = s;
  other.seed = 99;  // would draw other lengths
  auto run = LengthDriver::create(plan, s), replay = LengthDriver::create(plan, other, *read);
  REQUIRE(replay);
  CHECK(decisions(**run, 2, 2, 1) == decisions(**replay, 2, 2, 1));
  CHECK(decisions(**run, 2, 2, 4) == decisions(**replay, 2, 2, 4));

  // A run resumed after its first step, without the lines of the earlier part.
  REQUIRE(write_file_atomic(file, lengths_line(2, drawn[1]) + "\n"));
  const auto later = read_lengths(file);
  REQUIRE(later);
  CHECK(*later == std::vector<SampleLengths>{SampleLengths{}, drawn[1]});
  CHECK(LengthDriver::create(plan, other, *later).error().front().code == "E121");
  CHECK(recorded_lengths(file, other).error().front().code == "E121");
  const auto second = recorded_lengths(file, other, 2);
  REQUIRE(second);
  CHECK((*second)(2) == drawn[1]);
  auto resumed = LengthDriver::create(plan, other, *later, 2), all = LengthDriver::create(plan, other, *read);
  REQUIRE(resumed);
  CHECK(decisions(**resumed, 2, 2, 4) == decisions(**all, 2, 2, 4));

  // The same, read line by line as it is asked for; back to an earlier step too.
  REQUIRE(write_file_atomic(file, lengths_line(1, drawn[0]) + "\n" + lengths_line(2, drawn[1]) + "\n"));
  const auto lines = recorded_lengths(file, other);
  REQUIRE(lines);
  CHECK((*lines)(2) == drawn[1]);
  CHECK((*lines)(1) == drawn[0]);
  CHECK((*lines)(2) == drawn[1]);
  auto streamed = LengthDriver::create(plan, other, *lines);
  REQUIRE(streamed);
  CHECK(decisions(**run, 2, 1, 1) == decisions(**streamed, 2, 1, 1));

  other.steps = 3;
  CHECK(recorded_lengths(file, other).error().front().code == "E121");
  CHECK(LengthDriver::create(plan, other, *read).error().front().code == "E121");
  REQUIRE(write_file_atomic(file,
                            "{\"step\": 1, \"prompt_tokens\": [1, 2], \"response_tokens\": [1, 2]}\n{\"step\": 2}\n"));
  const auto bad = read_lengths(file);
  REQUIRE_FALSE(bad);
  CHECK(bad.error().front().code == "E120");
  CHECK(bad.error().front().where.line == 2);
  std::filesystem::remove(file);
}

TEST_CASE("recorded lengths of SFT may be longer than the workload's, those of sampled responses may not") {
  Scenario s = scenario();
  s.steps = 1;
  s.algorithm.name = AlgorithmName::sft;
  s.train.micro_batch_tokens = 64;
  // Prompts of up to 8 and responses of up to 24 tokens are what the workload says; the data has its own.
  const SampleLengths data{{9, 3, 4, 5}, {40, 1, 25, 2}};
  CHECK(check_recorded(s, {data}).has_value());
  const Plan plan = plan_of(0);
  auto driver = LengthDriver::create(plan, s, std::vector<SampleLengths>{data});
  REQUIRE(driver);
  std::int64_t tokens = 0;
  for (Rank r = 0; r < 4; ++r)
    for (const Decision& d : decisions(**driver, r, 1, 4)) tokens += d.tokens;
  CHECK(tokens == 9 + 40 + 3 + 1 + 4 + 25 + 5 + 2);

  s.algorithm.name = AlgorithmName::grpo;
  s.algorithm.samples_per_prompt = 1;
  const auto refused = check_recorded(s, {data});
  REQUIRE_FALSE(refused);
  CHECK(refused.error().front().code == "E121");
  CHECK_THAT(refused.error().front().message,
             Catch::Contains("sample 0 of iteration 1 has 9 + 40 tokens, the maxima are 8 and 24"));
}

TEST_CASE("drawn lengths stay in range and have the mean that the scenario asks for") {
  const int n = 20000;
  const auto mean_of = [&](const LengthSpec& spec) {
    double sum = 0;
    for (int i = 0; i < n; ++i) {
      const std::int64_t length = draw_length(spec, 3, 1, LengthOf::response, i);
      CHECK((length >= 1 && length <= static_cast<std::int64_t>(spec.max)));
      sum += static_cast<double>(length);
    }
    return sum / n;
  };
  CHECK(mean_of({.mean = 12, .max = 20, .distribution = LengthDistribution::fixed}) == 12.0);
  // Uniform on [1, 23]: variance (23^2 - 1) / 12 = 44, standard error of the mean 6.6 / 141 = 0.047.
  CHECK(mean_of({.mean = 12, .max = 30, .distribution = LengthDistribution::uniform}) == Approx(12.0).margin(0.2));
  // Lognormal far from its maximum: standard deviation 50, standard error 0.35.
  CHECK(mean_of({.mean = 100, .max = 10000, .distribution = LengthDistribution::lognormal, .cv = 0.5}) ==
        Approx(100.0).margin(1.5));
}

TEST_CASE("scenarios whose longest sample fits nowhere are refused before anything runs") {
  Scenario s = scenario();
  CHECK(check_lengths(s, 8).empty());  // 32 tokens in blocks of 4
  CHECK(check_lengths(s, 7).front().code == "E310");
  s.train.micro_batch_tokens = 31;
  const auto problems = check_lengths(s, 8);
  REQUIRE(problems.size() == 1);
  CHECK(problems.front().code == "E312");
  CHECK(problems.front().notes.front() == "prompt 8 + response 24 = 32 tokens, train.micro_batch_tokens is 31");
}
