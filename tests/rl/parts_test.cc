// The parts of a real run by themselves: tasks, advantages, packing, exchange rows, SFT data, parameters.
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <set>

#include "base/file.h"
#include "graph/boxes.h"
#include "rl/advantages.h"
#include "rl/passes.h"
#include "rl/sft_data.h"
#include "rl/tasks.h"
#include "rl/weights.h"
#include "spec/family.h"

using namespace hotbunk;
using Ids = std::vector<std::int32_t>;

namespace {

Scenario scenario_of(const std::string& task, std::int64_t digits) {
  Scenario s;
  s.model.vocab = 16;
  s.task = {.name = task, .digits = digits, .data = ""};
  return s;
}

Ids digits_in(const Ids& tokens) {
  Ids digits;
  for (std::int32_t t : tokens)
    if (t >= token::digit0) digits.push_back(t - token::digit0);
  return digits;
}

std::filesystem::path write_temporary(const std::string& name, const std::string& text) {
  auto path = std::filesystem::temp_directory_path() / name;
  REQUIRE(write_file_atomic(path, text));
  return path;
}

}  // namespace

TEST_CASE("the answer of every task solves its problem") {
  for (const std::string& name : task_names()) {
    const auto task = Task::create(scenario_of(name, 3));
    REQUIRE(task);
    for (std::int64_t i = 0; i < 50; ++i) {
      const Problem p = task->problem(1, 2, i);
      CHECK(static_cast<std::int64_t>(p.prompt.size()) == task->prompt_tokens());
      CHECK(static_cast<std::int64_t>(p.answer.size()) == task->answer_tokens());
      CHECK((p.prompt.front() == token::bos && p.prompt.back() == token::equals && p.answer.back() == token::eos));
      const Ids in = digits_in(p.prompt), out = digits_in(p.answer);
      if (name == "digit_sum") CHECK(out[0] * 10 + out[1] == in[0] + in[1] + in[2]);
      if (name == "parity") CHECK(p.answer[0] % 2 == (in[0] + in[1] + in[2]) % 2);
      if (name == "reverse") CHECK(out == Ids(in.rbegin(), in.rend()));
      if (name == "sort") {
        CHECK(std::is_sorted(out.begin(), out.end()));
        CHECK(std::is_permutation(out.begin(), out.end(), in.begin()));
      }
      if (name == "add")  // least significant digit first
        CHECK(out[0] + 10 * out[1] + 100 * out[2] + 1000 * out[3] ==
              in[0] + in[3] + 10 * (in[1] + in[4]) + 100 * (in[2] + in[5]));
    }
  }
}

TEST_CASE("problems depend on seed, step and index, and on nothing else") {
  const auto task = Task::create(scenario_of("sort", 6));
  REQUIRE(task);
  CHECK(task->problem(1, 2, 3).prompt == task->problem(1, 2, 3).prompt);
  std::set<Ids> different;
  for (std::int64_t seed : {1, 2})
    for (std::int32_t step : {1, 2})
      for (std::int64_t index : {0, 1}) different.insert(task->problem(seed, step, index).prompt);
  CHECK(different.size() == 8);
}

TEST_CASE("a reward is 0.8 of the places that are right, and 0.2 for exactness") {
  const auto task = Task::create(scenario_of("sort", 3));
  REQUIRE(task);
  const Ids answer{5, 6, 7, 2};
  CHECK(task->reward(answer, answer) == Approx(1.0));
  CHECK(task->reward(Ids{5, 6, 9, 2}, answer) == Approx(0.6));     // 3 of 4 places
  CHECK(task->reward(Ids{5, 6}, answer) == Approx(0.4));           // ended early
  CHECK(task->reward(Ids{5, 6, 7, 9}, answer) == Approx(0.6));     // did not end
  CHECK(task->reward(Ids{5, 6, 7, 2, 2}, answer) == Approx(0.8));  // went on: not exact
  CHECK(task->reward(Ids{}, answer) == 0.0);
}

TEST_CASE("the chance level is the mean reward over all responses") {
  const auto task = Task::create(scenario_of("digit_sum", 1));  // answer: one digit, EOS
  REQUIRE(task);
  REQUIRE(task->answer_tokens() == 2);
  // Brute force over two draws of 16 ids; EOS first ends the response.
  double sum = 0.0;
  const Ids answer{7, token::eos};
  for (std::int32_t a = 0; a < 16; ++a)
    for (std::int32_t b = 0; b < 16; ++b) sum += task->reward(a == token::eos ? Ids{a} : Ids{a, b}, answer);
  CHECK(task->chance_reward(16) == Approx(sum / 256.0));
}

TEST_CASE("parity rewards the share of tokens with the right parity, at any vocabulary") {
  const auto task = Task::create(scenario_of("parity", 3));
  REQUIRE(task);
  const Ids even{6, token::eos}, odd{5, token::eos};
  CHECK(task->reward(even, even) == 1.0);
  CHECK(task->reward(Ids{4, 7, 100'000, 9, token::eos}, even) == 0.5);
  CHECK(task->reward(Ids{4, 7, 100'000, 9}, odd) == 0.5);  // did not end: what is there counts
  CHECK(task->reward(Ids{token::eos}, even) == 0.0);       // EOS itself earns nothing, though it is even
  // Brute force over two draws of 16 ids and both parities; EOS ends the response.
  double sum = 0.0;
  for (const Ids& answer : {even, odd})
    for (std::int32_t a = 0; a < 16; ++a)
      for (std::int32_t b = 0; b < 16; ++b) sum += task->reward(Ids{a, b}, answer);
  CHECK(task->chance_reward(16) == Approx(sum / 512.0));
}

TEST_CASE("tasks that do not exist or do not fit are refused") {
  const auto unknown = Task::create(scenario_of("srot", 3));
  REQUIRE_FALSE(unknown);
  CHECK(unknown.error().front().code == "E220");
  CHECK(unknown.error().front().help == "did you mean 'sort'?");
  CHECK(Task::create(scenario_of("sort", 0)).error().front().code == "E221");
  Scenario small = scenario_of("sort", 5);
  small.model.vocab = 10;
  small.workload.response_tokens.max = 5;  // the answer has 5 digits and EOS
  const auto tight = Task::create(small);
  REQUIRE_FALSE(tight);
  REQUIRE(tight.error().size() == 2);
  CHECK(tight.error()[0].code == "E222");
  CHECK(tight.error()[1].notes.front() == "it needs 6, the scenario has 5");
}

TEST_CASE("advantages are normalised within their group") {
  // Group 1, 3: mean 2, sample variance (1 + 1) / 1 = 2. Group 5, 5: no difference, no advantage.
  const std::vector<double> rewards{1, 3, 5, 5};
  const auto a = group_advantages(rewards, 2, true);
  CHECK(a[0] == Approx(-1.0 / std::sqrt(2.0)).epsilon(1e-5));
  CHECK(a[1] == Approx(1.0 / std::sqrt(2.0)).epsilon(1e-5));
  CHECK((a[2] == 0.0f && a[3] == 0.0f));
  const auto plain = group_advantages(rewards, 2, false);
  CHECK((plain[0] == -1.0f && plain[1] == 1.0f));
}

TEST_CASE("a micro-batch packs sequences; the row before a response token predicts it") {
  MicroPayload m;
  m.append({{1, 7, 8, 9, 2}, 2, {-0.5f, -0.25f, -0.125f}}, 0.1f, 3.0f);  // prompt 1 7, response 8 9 2
  m.append({{1, 6, 2}, 1, {}}, 0.1f, -1.0f);                             // SFT: all but the first token
  CHECK(m.token_ids == Ids{1, 7, 8, 9, 2, 1, 6, 2});
  CHECK(m.positions == Ids{0, 1, 2, 3, 4, 0, 1, 2});
  CHECK(m.targets == Ids{-1, 8, 9, 2, -1, 6, 2, -1});
  CHECK(m.cu_seqlens == Ids{0, 5, 8});
  CHECK(m.loss_weights == std::vector<float>{0, 0.1f, 0.1f, 0.1f, 0, 0.1f, 0.1f, 0});
  CHECK(m.advantages == std::vector<float>{0, 3, 3, 3, 0, -1, -1, 0});
  CHECK(m.old_logps == std::vector<float>{0, -0.5f, -0.25f, -0.125f, 0, 0, 0, 0});
  CHECK(m.sequence_ids == Ids{0, 0, 0, 0, 0, 1, 1, 1});
  // 3 of 5 tokens are predicted, and 2 of 3.
  const float first = static_cast<float>(0.1f * 3 / 25.0), then = static_cast<float>(0.1f * 2 / 9.0);
  CHECK(m.sequence_weights == std::vector<float>{first, first, first, first, first, then, then, then});
  // Tensors have the capacity of the plan: what is beyond the data repeats the end.
  std::vector<std::int32_t> fed(6, 77);
  CHECK(m.feed(Slot::cu_seqlens, std::as_writable_bytes(std::span(fed))));
  CHECK(fed == Ids{0, 5, 8, 8, 8, 8});
  CHECK_FALSE(m.feed(Slot::uniforms, std::as_writable_bytes(std::span(fed))));
}

TEST_CASE("sequences that context-parallel ranks share are padded to whole chunks, of which each takes two") {
  // 2 ranks, 4 chunks of a sequence: 5 tokens become 8 and 3 become 4.
  for (const std::int64_t rank : {0, 1}) {
    MicroPayload m;
    m.append({{1, 7, 8, 9, 2}, 2, {-0.5f, -0.25f, -0.125f}}, 0.1f, 3.0f);
    m.pad(3);
    m.append({{1, 6, 2}, 1, {}}, 0.2f, -1.0f);
    m.pad(1);
    CHECK(m.cu_seqlens == Ids{0, 8, 12});
    m.take_chunks(2, rank);
    CHECK(m.cu_seqlens == Ids{0, 4, 6});
    const bool first = rank == 0;
    CHECK(m.token_ids == (first ? Ids{1, 7, 0, 0, 1, 0} : Ids{8, 9, 2, 0, 6, 2}));
    CHECK(m.positions == (first ? Ids{0, 1, 6, 7, 0, 3} : Ids{2, 3, 4, 5, 1, 2}));
    CHECK(m.targets == (first ? Ids{-1, 8, -1, -1, 6, -1} : Ids{9, 2, -1, -1, 2, -1}));
    CHECK(m.loss_weights ==
          (first ? std::vector<float>{0, 0.1f, 0, 0, 0.2f, 0} : std::vector<float>{0.1f, 0.1f, 0, 0, 0.2f, 0}));
    CHECK(m.advantages == (first ? std::vector<float>{0, 3, 0, 0, -1, 0} : std::vector<float>{3, 3, 0, 0, -1, 0}));
    CHECK(m.old_logps ==
          (first ? std::vector<float>{0, -0.5f, 0, 0, 0, 0} : std::vector<float>{-0.25f, -0.125f, 0, 0, 0, 0}));
    CHECK(m.sequence_ids == (first ? Ids{0, 0, -1, -1, 1, -1} : Ids{0, 0, 0, -1, 1, 1}));  // -1: filling
  }
}

TEST_CASE("a sample comes back from its exchange row") {
  const TokenSequence sent{{1, 7, 3, 8, 2}, 3, {-0.5f, -0.75f}};
  std::vector<std::int32_t> row(3 + 8);
  std::vector<float> logps(4);
  write_row(sent, 42, row, logps);
  TokenSequence got;
  CHECK(read_row(row, logps, got) == 42);
  CHECK((got.tokens == sent.tokens && got.prompt_tokens == 3 && got.rollout_logps == sent.rollout_logps));
  std::fill(row.begin(), row.end(), -1);
  CHECK(read_row(row, logps, got) == -1);
}

TEST_CASE("SFT data: both forms of a line, and errors with file and line") {
  const auto good =
      write_temporary("hotbunk_sft_good.jsonl", "[1, 5, 2]\n\n{\"tokens\": [1, 5, 6, 2], \"prompt_length\": 2}\n");
  const auto data = read_sft_data(good, 16, 8);
  REQUIRE(data);
  REQUIRE(data->size() == 2);
  CHECK(((*data)[0].prompt_tokens == 1 && (*data)[0].response_tokens() == 2));
  CHECK(((*data)[1].prompt_tokens == 2 && (*data)[1].response_tokens() == 2));

  const auto bad = write_temporary("hotbunk_sft_bad.jsonl",
                                   "[1, 5\n\"text\"\n[1, 99]\n[1]\n[1, 2, 3, 4, 5, 6, 7, 8, 9]\n[1, 2.5]\n"
                                   "{\"tokens\": [1, 2], \"prompt_length\": 2}\n{\"ids\": [1, 2]}\n");
  const auto problems = read_sft_data(bad, 16, 8);
  REQUIRE_FALSE(problems);
  std::vector<std::pair<int, std::string>> found;
  for (const Diagnostic& d : problems.error()) {
    CHECK(d.where.file == bad.string());
    found.emplace_back(d.where.line, d.code);
  }
  CHECK(found ==
        std::vector<std::pair<int, std::string>>{
            {1, "E122"}, {2, "E122"}, {3, "E123"}, {4, "E124"}, {5, "E124"}, {6, "E122"}, {7, "E124"}, {8, "E122"}});
  CHECK(read_sft_data(write_temporary("hotbunk_sft_empty.jsonl", "\n"), 16, 8).error().front().code == "E125");
  CHECK(read_sft_data("/nonexistent/hotbunk.jsonl", 16, 8).error().front().code == "E101");
}

TEST_CASE("what is fed does not depend on how many threads make it") {
  ModelSpec m;
  m.family = find_family("llama");
  m.hidden = 16;
  m.intermediate = 12;
  m.layers = 1;
  m.heads = 2;
  m.kv_heads = 1;
  m.head_dim = 8;
  m.vocab = 30'000;
  const auto source = ParameterSource::open(m, 5);
  REQUIRE(source);
  const std::string name = "model.embed_tokens.weight";
  std::vector<float> whole(480'000);
  source->read_range(name, 0, whole);
  // One long row, cut between the two numbers of a draw; and 10 000 rows of 7, a pitch of 9 apart, zeros between them.
  const std::int64_t rows = 10'000, begin = 300'100;
  const std::vector<Box> boxes{
      {.src_offset = 1, .src_pitch = 0, .dst_offset = 0, .dst_pitch = 0, .rows = 1, .cols = 300'000},
      {.src_offset = 3, .src_pitch = 16, .dst_offset = begin, .dst_pitch = 9, .rows = rows, .cols = 7}};
  std::vector<float> expected(static_cast<std::size_t>(begin + rows * 9), 0.0f);
  std::copy_n(whole.begin() + 1, 300'000, expected.begin());
  for (std::int64_t r = 0; r < rows; ++r) std::copy_n(whole.begin() + 3 + r * 16, 7, expected.begin() + begin + r * 9);
  for (const int threads : {1, 3}) {
    CAPTURE(threads);
    std::vector<float> fed(expected.size(), 7.0f);
    source->read(name, boxes, DType::f32, std::as_writable_bytes(std::span(fed)), false, threads);
    CHECK((fed == expected));
    std::vector<bf16> half(expected.size(), bf16{});
    source->read(name, boxes, DType::bf16, std::as_writable_bytes(std::span(half)), false, threads);
    CHECK(std::ranges::equal(half, expected, {}, &bf16::bits, [](float x) { return to_bf16(x).bits; }));
    std::vector<float> moments(3'000'000, 7.0f);
    MomentSource().read(name, Slot::first_moment, boxes, DType::f32, std::as_writable_bytes(std::span(moments)), false,
                        threads);
    CHECK(std::ranges::all_of(moments, [](float x) { return x == 0.0f; }));
  }
}

TEST_CASE("random weights do not depend on how they are cut; norms are 1, biases 0, padding 0") {
  ModelSpec m;
  m.family = find_family("llama");
  m.hidden = 8;
  m.intermediate = 12;
  m.layers = 1;
  m.heads = 2;
  m.kv_heads = 1;
  m.head_dim = 4;
  m.vocab = 10;
  m.qkv_bias = true;
  m.init_range = 0.5;
  const auto source = ParameterSource::open(m, 5);
  REQUIRE(source);
  const std::string name = "model.embed_tokens.weight";
  std::vector<float> whole(80), part(7);
  source->read_range(name, 0, whole);
  source->read_range(name, 33, part);
  CHECK(std::equal(part.begin(), part.end(), whole.begin() + 33));
  double squares = 0.0;
  for (float x : whole) squares += static_cast<double>(x) * static_cast<double>(x);
  CHECK(std::sqrt(squares / 80.0) == Approx(0.5).margin(0.2));  // standard error 0.5 / sqrt(160) = 0.04

  // Rows 3 and 4 into a shard of three rows; the last is padding. bf16 rounds.
  const std::vector<Box> boxes{
      {.src_offset = 24, .src_pitch = 8, .dst_offset = 0, .dst_pitch = 8, .rows = 2, .cols = 8}};
  std::vector<float> shard(24, 7.0f);
  source->read(name, boxes, DType::f32, std::as_writable_bytes(std::span(shard)));
  CHECK(std::equal(shard.begin(), shard.begin() + 16, whole.begin() + 24));
  CHECK(std::all_of(shard.begin() + 16, shard.end(), [](float x) { return x == 0.0f; }));
  std::vector<bf16> half(24);
  source->read(name, boxes, DType::bf16, std::as_writable_bytes(std::span(half)));
  CHECK(half[5].bits == to_bf16(whole[29]).bits);

  std::vector<float> norm(8), bias(8);
  source->read_range("model.norm.weight", 0, norm);
  source->read_range("model.layers.0.self_attn.q_proj.bias", 0, bias);
  CHECK(norm == std::vector<float>(8, 1.0f));
  CHECK(bias == std::vector<float>(8, 0.0f));
  const auto other = ParameterSource::open(m, 6);
  std::vector<float> different(80);
  other->read_range(name, 0, different);
  CHECK(different != whole);
}
