#include "trace/compare.h"

#include <catch2/catch.hpp>
#include <functional>
#include <nlohmann/json.hpp>

#include "tests/json.h"
#include "tests/trace/sample.h"

namespace hotbunk {
namespace {

Trace measured() {
  Trace t = test::sample_trace();
  t.source = "measured";
  return t;
}

}  // namespace

TEST_CASE("a trace equals itself") {
  const Comparison c = compare_traces(test::sample_plan(), test::sample_trace(), measured());
  CHECK(c.equal);
  CHECK(c.differences.empty());
  // Per rank: the device 6 + 14, its three phases 3 + 7 each; the host 6 + 14; traffic 4 rows of 4 and 2 totals of 4; 5
  // visits, and of 3 phases and the iteration how often and with how many blocks; two kinds of op in either step, runs
  // and bytes.
  CHECK(c.numbers_compared == 2 * (20 + 30 + 20 + 16 + 8 + 5 + 8 + 8));
  CHECK(c.mean_error == 0.0);
}

TEST_CASE("one byte or one call anywhere is seen") {
  const Plan plan = test::sample_plan();
  using Mutation = std::function<void(Trace&)>;
  const std::vector<std::pair<std::string, Mutation>> mutations = {
      {"device: live peak", [](Trace& t) { ++t.memory[1].device.peak_bytes; }},
      {"device: mapped peak", [](Trace& t) { ++t.memory[1].device.mapped_peak_bytes; }},
      {"device: live at the end", [](Trace& t) { ++t.memory[1].device.end_live_bytes; }},
      {"device: mapped at the end", [](Trace& t) { ++t.memory[1].device.end_mapped_bytes; }},
      {"device: phase of the peak", [](Trace& t) { t.memory[1].device.peak_phase = 1; }},
      {"device: share of the peak of kv_cache", [](Trace& t) { ++t.memory[1].device.at_peak[4]; }},
      {"device: live peak of params", [](Trace& t) { --t.memory[1].device.category_peaks[0]; }},
      {"device: live peak", [](Trace& t) { ++t.memory[1].device.phase_peaks[1].peak_bytes; }},
      {"device: mapped peak", [](Trace& t) { ++t.memory[1].device.phase_peaks[1].mapped_peak_bytes; }},
      {"device: share of the phase's peak of workspace",
       [](Trace& t) { ++t.memory[1].device.phase_peaks[1].by_category[6]; }},
      {"host: live peak of optimizer", [](Trace& t) { ++t.memory[1].host.category_peaks[2]; }},
      {"linear: ops run", [](Trace& t) { t.spans.push_back(t.spans.back()), t.spans.back().bytes = 0; }},
      {"linear: bytes read and written", [](Trace& t) { ++t.spans.back().bytes; }},
      {"host: visited", [](Trace& t) { t.memory[1].host.phase_peaks[2]; }},
      {"all_gather over fsdp: calls",
       [](Trace& t) {
         ++t.traffic[1][{2, 2, 0, OpKind::all_gather}].calls;
       }},
      {"all_gather over fsdp: payload bytes",
       [](Trace& t) {
         ++t.traffic[1][{2, 2, 0, OpKind::all_gather}].payload_bytes;
       }},
      {"all_gather over fsdp: padding bytes",
       [](Trace& t) {
         ++t.traffic[1][{2, 2, 0, OpKind::all_gather}].padding_bytes;
       }},
      {"all_reduce over tp: wire bytes",
       [](Trace& t) {
         ++t.traffic[1][{1, 2, 1, OpKind::all_reduce}].wire_bytes;
       }},
      {"broadcast over tp: calls",
       [](Trace& t) {
         t.traffic[1][{1, 1, 1, OpKind::broadcast}] = {1, 0, 0, 0};
       }},
      {"blocks run (-1: phase not entered)", [](Trace& t) { ++t.phases.back().blocks; }},
      {"blocks run (-1: phase not entered)", [](Trace& t) { t.phases.pop_back(); }},
      {"blocks run", [](Trace& t) { ++t.phase_totals.back().blocks; }},
      {"times entered", [](Trace& t) { ++t.phase_totals.back().stays.times; }},
      {"all_gather over fsdp: calls",
       [](Trace& t) {
         ++t.traffic_totals[1][{0, 2, 0, OpKind::all_gather}].calls;
       }},
  };
  for (const auto& [what, mutate] : mutations) {
    Trace other = measured();
    mutate(other);
    const Comparison c = compare_traces(plan, test::sample_trace(), other);
    INFO(what);
    CHECK_FALSE(c.equal);
    REQUIRE(c.differences.size() == 1);
    CHECK(c.differences[0].what == what);
    CHECK(c.differences[0].rank == 1);
    CHECK_FALSE(compare_traces(plan, other, test::sample_trace()).equal);
  }
}

TEST_CASE("overhead is outside the promise") {
  Trace other = measured();
  other.memory[0].device.at_peak[static_cast<std::size_t>(Category::overhead)] = 12345;
  CHECK(compare_traces(test::sample_plan(), test::sample_trace(), other).equal);
}

TEST_CASE("a dropped collective is named with rank, phase and both numbers") {
  Trace other = measured();
  other.traffic[0].erase({1, 2, 0, OpKind::all_gather});
  const Comparison c = compare_traces(test::sample_plan(), test::sample_trace(), other);
  REQUIRE(c.differences.size() == 4);
  const Difference& d = c.differences[1];
  CHECK(d.rank == 0);
  CHECK(d.step == 1);
  CHECK(d.phase == "train");
  CHECK(d.what == "all_gather over fsdp: payload bytes");
  CHECK(d.a == 6000);
  CHECK(d.b == 0);
  const auto json = comparison_to_json(c);
  CHECK(json["schema"] == "hotbunk.compare/1");
  CHECK(json["equal"] == false);
  CHECK(json["differences"][1] == nlohmann::ordered_json({{"rank", 0},
                                                          {"step", 1},
                                                          {"phase", "train"},
                                                          {"what", "all_gather over fsdp: payload bytes"},
                                                          {"a", 6000},
                                                          {"b", 0}}));
}

TEST_CASE("times are compared, not judged") {
  Trace other = measured();
  // Training of step 1 really took both ranks 17 ms (8 predicted), everything after it is as long as predicted.
  for (PhaseSpan& p : other.phases)
    if (p.step == 1 && p.phase == 2) p.end_ns += 9 * test::ms;
  total_up(test::sample_plan(), other);
  const Comparison c = compare_traces(test::sample_plan(), test::sample_trace(), other);
  CHECK(c.equal);
  REQUIRE(c.times.size() == 5);
  CHECK(c.times[2].phase == "train");
  CHECK(c.times[2].error == Approx(-9.0 / 17));
  CHECK(c.max_error == Approx(9.0 / 25));  // of training over both steps: 8 + 8 predicted, 17 + 8 measured
  // A rank's stay, mean over both (rank 1 enters the rollout 1 ms late): 2 + 9.5 + 17 + 9.5 + 8 = 46 ms measured, 37
  // predicted.
  CHECK(c.mean_error == Approx(9.0 / 46));
  CHECK(c.iteration_error == Approx(-9.0 / 46));
  CHECK(render_comparison(c, false) ==
        R"(equal  memory, traffic and ops: all 230 numbers are the same in simulated and measured

Time by phase, mean over steps
  phase    times  simulated  measured    error
  load         1    2.00 ms   2.00 ms   +0.0 %
  rollout      2    9.50 ms   9.50 ms   +0.0 %
  train        2    8.00 ms  12.50 ms  -36.0 %
error of simulated against measured: mean 19.6 % (weighted by time), max 36.0 % (phases over 1 %), total -19.6 %
)");
}

TEST_CASE("how many rounds of experts' rows had any is shown, and is no difference") {
  Plan plan = test::sample_plan();
  plan.extents.push_back({"routed", 6, CountedBy::device});
  Program& program = plan.programs[0];
  const ExtentId routed{2};
  const auto buffer = [&](const char* name, DType dtype, std::int64_t elements) {
    program.buffers.push_back({name, dtype, elements, Category::activations, sections::transient, 0});
    return static_cast<BufferId>(program.buffers.size() - 1);
  };
  const auto dim = [](std::int64_t size) { return Dim{size, fixed_extent, 0}; };
  Tensor own{buffer("own", DType::f32, 6), 0, DType::f32, 3, {dim(3), dim(2), dim(1)}},
      sent{buffer("sent", DType::i32, 6), 0, DType::i32, 2, {dim(2), dim(3)}},
      came{buffer("came", DType::f32, 3), 0, DType::f32, 2, {Dim{3, routed, 0}, dim(1)}};
  std::vector<Op> ops;
  for (const std::int64_t round : {0, 1}) {
    Op& op = ops.emplace_back();
    op.kind = OpKind::all_to_all, op.group = 0, op.name = "round" + std::to_string(round);
    came.shape[0].begin = 3 * round;
    op.inputs = {own, sent}, op.outputs = {came};
    op.attrs = {{Attr::rounds, std::int64_t{2}}};
  }
  program.phases[2].push_back(test::block_of(program, "train", ops));
  Trace a = test::sample_trace(), b = measured();
  for (Trace* t : {&a, &b}) t->names.insert(t->names.end(), {"round0", "round1"});
  const auto name = [&](std::int32_t round) { return static_cast<std::int32_t>(a.names.size()) - 2 + round; };
  const auto add = [&](Trace& t, Rank rank, std::int32_t round, std::int64_t bytes) {
    t.spans.push_back({rank, streams::tensor, OpKind::all_to_all, 2, 1, name(round), 0, test::ms, bytes, 0});
  };
  // Two exchanges, of which simulated rows fit a round. Measured, rank 1 gets all of the second one's: it alone has
  // rows in the second round of it, which rank 0 plays with it.
  for (const int exchange : {0, 1})
    for (const Rank rank : {0, 1}) {
      add(a, rank, 0, 12);
      add(b, rank, 0, exchange == 1 && rank == 0 ? 0 : 12);
      add(b, rank, 1, exchange == 1 && rank == 1 ? 12 : 0);
    }
  const Comparison c = compare_traces(plan, a, b);
  CHECK(c.rounds == std::vector<RoundsRow>{{"train", 2, 2, 2, 3}});
  CHECK_THAT(render_verdict(c, false), Catch::Contains("rounds of experts' rows in train: 2 planned, 1.00 played in "
                                                       "simulated, 1.50 in measured, mean of 2 exchanges"));
  CHECK(comparison_to_json(c)["rounds"][0]["b_rounds"] == 3);
  CHECK(compare_traces(test::sample_plan(), test::sample_trace(), measured()).rounds.empty());
}

}  // namespace hotbunk
