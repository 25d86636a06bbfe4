#include "trace/trace_json.h"

#include <catch2/catch.hpp>
#include <limits>
#include <nlohmann/json.hpp>

#include "tests/json.h"
#include "tests/trace/sample.h"

namespace hotbunk {
namespace {

std::string with(const char* pointer, nlohmann::json value) {
  auto doc = json_from<nlohmann::json>(trace_to_json(test::sample_trace(), "abc"));
  doc[nlohmann::json::json_pointer(pointer)] = std::move(value);
  return json_text(doc);
}

std::string code_of(const std::string& text) {
  const auto file = trace_from_json(text, "trace.json");
  return file ? "" : file.error().front().code;
}

}  // namespace

TEST_CASE("a trace comes back from its file unchanged") {
  Trace trace = test::sample_trace();
  trace.metrics[0].values["odd \"name\"\n"] = -std::numeric_limits<double>::infinity();
  trace.spans[0].flops = 1.0 / 3.0;
  const std::string text = trace_to_json(trace, "abc");
  const auto file = trace_from_json(text, "trace.json");
  if (!file) FAIL(render(file.error()));
  CHECK(file->plan_hash == "abc");
  CHECK(trace_to_json(file->trace, "abc") == text);
  CHECK(file->trace.memory == trace.memory);
  CHECK(file->trace.traffic == trace.traffic);
  CHECK(file->trace.spans[0].flops == trace.spans[0].flops);
  CHECK(file->trace.metrics[0].values == trace.metrics[0].values);
  CHECK(file->trace.trained_tokens == 380);
}

TEST_CASE("a trace file's indices are checked") {
  CHECK(code_of(with("/schema", "x")) == "E114");
  CHECK(code_of(with("/source", 1)) == "E112");
  CHECK(code_of(with("/spans/0/0", 2)) == "E113");   // rank
  CHECK(code_of(with("/spans/0/1", 8)) == "E113");   // stream
  CHECK(code_of(with("/spans/0/5", 4)) == "E113");   // name
  CHECK(code_of(with("/spans/0/6", -1)) == "E113");  // start
  CHECK(code_of(with("/spans/0/7", 0)) == "E113");   // end before start
  CHECK(code_of(with("/spans/0", {1})) == "E113");
  CHECK(code_of(with("/memory_events/0/2", 8)) == "E113");
  CHECK(code_of(with("/memory/0/0/8/0/0", 1 << 20)) == "E113");
  CHECK(code_of(with("/traffic/0/0/4", "3")) == "E112");
  CHECK(code_of(with("/kinds/0", "allocate")) == "E113");
  CHECK(code_of("{") == "E111");
}

TEST_CASE("an op that moved in the enumeration is found by its name") {
  auto doc = json_from<nlohmann::json>(trace_to_json(test::sample_trace(), ""));
  std::swap(doc["kinds"][static_cast<std::size_t>(OpKind::linear)],
            doc["kinds"][static_cast<std::size_t>(OpKind::all_gather)]);
  const auto file = trace_from_json(json_text(doc), "trace.json");
  REQUIRE(file);
  CHECK(file->trace.spans[0].kind == OpKind::linear);
}

TEST_CASE("a trace of another plan is refused") {
  const Plan plan = test::sample_plan();
  CHECK(trace_fits_plan(test::sample_trace(), plan, "t"));
  Trace late = test::sample_trace();
  late.phases[0].phase = 3;
  CHECK(trace_fits_plan(late, plan, "t").error().front().message ==
        "the trace is not of this plan: it has phase 3, the plan has 3 phases");
  Trace grouped = test::sample_trace();
  grouped.traffic[0][{1, 1, 2, OpKind::send}] = {1, 1, 0, 1};
  CHECK_FALSE(trace_fits_plan(grouped, plan, "t"));
  Trace narrow = test::sample_trace();
  narrow.memory.pop_back();
  CHECK_FALSE(trace_fits_plan(narrow, plan, "t"));
}

}  // namespace hotbunk
