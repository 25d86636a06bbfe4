// What a long run leaves of its steps: bounded rows, exact totals, no lost spike.
#include "trace/folds.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <set>

#include "tests/trace/sample.h"
#include "trace/compare.h"
#include "trace/trace_json.h"

namespace hotbunk {
namespace {

/// Of one rank: `steps` iterations of two phases, 1 ms each, but that of step `slow` which trains 9 ms.
StayFold stays_of(const Plan& plan, Rank rank, std::int32_t steps, std::int32_t slow) {
  StayFold fold(plan, rank, {.head = 2});
  std::int64_t now = 0;
  const auto stay = [&](std::int32_t step, std::int16_t phase, std::int64_t ns) {
    fold.add({rank, step, phase, now, now + ns, 3});
    now += ns;
  };
  stay(0, 0, test::ms);
  for (std::int32_t step = 1; step <= steps; ++step) {
    stay(step, 1, test::ms);
    stay(step, 2, step == slow ? 9 * test::ms : test::ms);
  }
  return fold;
}

std::set<std::int32_t> steps_of(const Trace& trace) {
  std::set<std::int32_t> out;
  for (const PhaseSpan& p : trace.phases) out.insert(p.step);
  return out;
}

Trace trace_of(const Plan& plan, std::int32_t steps, std::int32_t slow_0, std::int32_t slow_1) {
  Trace t;
  t.memory.resize(2), t.traffic.resize(2), t.traffic_totals.resize(2);
  for (Rank r = 0; r < 2; ++r) {
    stays_of(plan, r, steps, r == 0 ? slow_0 : slow_1).write(t);
    TrafficFold traffic({.head = 2});
    for (std::int32_t step = 1; step <= steps; ++step)
      traffic.add({step, 2, 0, OpKind::all_gather}, {1, 100 + step, 0, 50});
    t.traffic[static_cast<std::size_t>(r)] = traffic.rows();
    t.traffic_totals[static_cast<std::size_t>(r)] = traffic.totals();
  }
  drop_partial_steps(t);
  return t;
}

}  // namespace

TEST_CASE("up to 256 steps all are kept, then ever fewer, and never one that is gone already") {
  const KeptSteps kept{.head = 2};
  for (std::int32_t step = 0; step <= 256; ++step) CHECK(kept.keeps(step, 256));
  CHECK(kept.distance(256) == 1);
  CHECK(kept.distance(257) == 2);
  CHECK(kept.distance(6000) == 32);
  std::set<std::int32_t> held;
  for (std::int32_t latest = 1; latest <= 5000; ++latest) {
    held.insert(latest);
    std::erase_if(held, [&](std::int32_t step) { return !kept.keeps(step, latest); });
    REQUIRE(held.size() <= 256 + 4);
    if (latest % 613 != 0) continue;
    for (std::int32_t step = 1; step <= latest; ++step) REQUIRE(held.contains(step) == kept.keeps(step, latest));
  }
}

TEST_CASE("many ranks have rows of fewer steps, so that a trace of them is as long") {
  CHECK(KeptSteps::of(1).most == 256);
  CHECK(KeptSteps::of(16).most == 256);
  CHECK(KeptSteps::of(128).most == 32);
  CHECK(KeptSteps::of(100'000).most == 4);
  for (const std::int64_t ranks : {16, 128, 700, 4096}) {
    const KeptSteps kept = KeptSteps::of(ranks, 2);
    std::int64_t rows = 0;
    for (std::int32_t step = 0; step <= 3000; ++step) rows += kept.keeps(step, 3000) ? ranks : 0;
    INFO(ranks << " ranks");
    CHECK(rows <= std::max<std::int64_t>(4096, 4 * ranks) + 6 * ranks);  // and the ends
    CHECK(rows >= 2048);
  }
}

TEST_CASE("totals are exact over all steps, rows are bounded, the slowest step has rows") {
  const Plan plan = test::sample_plan();
  const Trace t = trace_of(plan, 5000, 4001, 4001);
  const std::set<std::int32_t> steps = steps_of(t);
  CHECK(steps.size() < 270);
  for (const std::int32_t step : {0, 1, 2, 4001, 4992, 4999, 5000}) CHECK(steps.contains(step));
  CHECK_FALSE(steps.contains(4002));
  const auto total = [&](std::int16_t phase) {
    for (const PhaseTotal& x : t.phase_totals)
      if (x.rank == 1 && x.phase == phase) return x;
    throw std::runtime_error("no such total");
  };
  CHECK(total(2).stays.times == 5000);
  CHECK(total(2).blocks == 15000);
  CHECK(total(2).stays.total_ns == 4999 * test::ms + 9 * test::ms);
  CHECK(total(2).stays.longest_ns == 9 * test::ms);
  CHECK(total(2).stays.longest_step == 4001);
  CHECK(total(2).stays.quantile_ns(0.95) == Approx(test::ms).epsilon(0.011));
  CHECK(total(2).stays.quantile_ns(1.0) == Approx(9 * test::ms).epsilon(0.011));
  CHECK(total(PhaseTotal::iteration).stays.times == 5000);
  CHECK(total(PhaseTotal::iteration).stays.longest_ns == 10 * test::ms);
  CHECK(t.traffic[0].size() < 270);
  const TrafficKey all{0, 2, 0, OpKind::all_gather};
  CHECK(t.traffic_totals[0].at(all) == TrafficCount{5000, 5000 * 100 + 5000 * 5001 / 2, 0, 5000 * 50});
  // Ten times the steps, the same size.
  const std::size_t of_500 = trace_to_json(trace_of(plan, 500, 100, 100), "").size();
  const std::size_t of_5000 = trace_to_json(t, "").size(),
                    of_50000 = trace_to_json(trace_of(plan, 50000, 1, 1), "").size();
  CHECK(of_5000 < 2 * of_500);
  CHECK(of_50000 < 2 * of_500);
}

TEST_CASE("a step that is the slowest on one rank only has no rows") {
  const Trace t = trace_of(test::sample_plan(), 5000, 4001, 4003);
  CHECK_FALSE(steps_of(t).contains(4001));
  CHECK_FALSE(steps_of(t).contains(4003));
}

TEST_CASE("a byte in a step without rows is found in the totals") {
  const Plan plan = test::sample_plan();
  const Trace a = trace_of(plan, 5000, 4001, 4001), b = trace_of(plan, 5000, 77, 77);
  CHECK(compare_traces(plan, a, b).equal);  // other slowest steps
  Trace other = b;
  ++other.traffic_totals[1][{0, 2, 0, OpKind::all_gather}].payload_bytes;
  const Comparison c = compare_traces(plan, a, other);
  REQUIRE(c.differences.size() == 1);
  CHECK(c.differences[0].step == -1);
  CHECK(c.differences[0].what == "all_gather over fsdp: payload bytes");
  CHECK_FALSE(compare_traces(plan, a, trace_of(plan, 4999, 77, 77)).equal);
}

TEST_CASE("learning curves are thinned without losing a spike") {
  MetricFold fold;
  for (std::int32_t step = 1; step <= 20'000; ++step) {
    double loss = std::sin(0.001 * step);
    if (step == 12'347) loss = 50.0;
    if (step == 12'349) loss = -50.0;
    fold.add({step, {{"loss", loss}, {"reward", 0.5}}});
  }
  const std::vector<StepMetrics> rows = fold.rows();
  CHECK(rows.size() < 1000);
  std::map<std::int32_t, std::map<std::string, double>> by_step;
  for (const StepMetrics& row : rows) by_step[row.step] = row.values;
  CHECK(by_step.at(12'347).at("loss") == 50.0);
  CHECK(by_step.at(12'349).at("loss") == -50.0);
  CHECK_FALSE(by_step.at(12'347).contains("reward"));
  for (const std::int32_t step : {1, 128, 19'968, 20'000}) CHECK(by_step.at(step).size() == 2);
  // A NaN is a spike too.
  fold.add({20'001, {{"loss", std::nan("")}}});
  for (std::int32_t step = 20'002; step <= 40'000; ++step) fold.add({step, {{"loss", 1.0}}});
  bool found = false;
  for (const StepMetrics& row : fold.rows()) found = found || (row.step == 20'001 && std::isnan(row.values.at("loss")));
  CHECK(found);
}

}  // namespace hotbunk
