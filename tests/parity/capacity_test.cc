// A capacity that is too small stops the simulator and the executing backend in the same op, in the same words.
#include <fmt/format.h>

#include <catch2/catch.hpp>
#include <set>

#include "lowering/lower.h"
#include "tests/parity/harness.h"
#include "trace/static_memory.h"

using namespace hotbunk;
using namespace hotbunk::testing;

namespace {

/// What the simulator says of the map that it refuses, from the step on: which op, the arithmetic and what is large.
/// "" when it refuses none.
std::string refused(const Case& job, const Plan& plan) {
  std::vector<SampleLengths> lengths;
  for (std::int32_t step = 1; step <= job.scenario.steps; ++step) lengths.push_back(draw_lengths(job.scenario, step));
  const Trace none;
  const auto trace = simulate({job, plan, none, lengths}, plan);
  if (trace) return "";
  const std::string text = render(trace.error());
  REQUIRE_THAT(text, Catch::StartsWith("error[E301]: the plan does not fit: rank "));
  const auto step = text.find("   = note: step ");
  REQUIRE(step != text.npos);
  return text.substr(step);
}

}  // namespace

TEST_CASE("too small a capacity stops the simulator and the backend in the same op, whatever it is") {
  Case job{.name = "capacity", .scenario = tiny_scenario(2, 2)};
  const auto plan = lower(job.scenario);
  REQUIRE(plan);
  const std::int64_t peak = check_fit(*plan).mapped_peak_bytes;
  std::set<std::string> places;
  for (const double share : {0.02, 0.3, 0.6, 0.9, 1.0}) {
    const std::int64_t capacity = static_cast<std::int64_t>(share * static_cast<double>(peak)) - 1;
    job.mutate = [=](Plan& p) { p.device_capacity_bytes = capacity; };
    Plan small = *plan;
    job.mutate(small);
    job.fails_with = refused(job, small);
    INFO(capacity << " of " << peak << " B: " << job.fails_with);
    REQUIRE(!job.fails_with.empty());
    places.insert(job.fails_with);
    CHECK(run_cases(2, {job}, [](const Outcome&) { return std::string(); }).empty());
  }
  CHECK(places.size() >= 2);  // different ops were met
  // At the peak itself both go through.
  Plan enough = *plan;
  enough.device_capacity_bytes = peak;
  CHECK(refused(job, enough).empty());
}
