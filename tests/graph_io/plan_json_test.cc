#include "graph/plan_json.h"

#include <rapidcheck.h>

#include <catch2/catch.hpp>
#include <chrono>
#include <limits>
#include <nlohmann/json.hpp>

#include "tests/graph_io/random_plan.h"
#include "tests/json.h"

namespace hotbunk {
namespace {

Plan small_plan() {
  Plan p;
  p.scenario = "demo";
  p.streams = {{"compute", StreamKind::compute}, {"gather", StreamKind::communication}};
  p.groups = {{"fsdp", {{0, 1}}}};
  p.phases = {{"train", When::iteration, true}};
  p.program_of_rank = {0, 0};
  Program program;
  program.sections = {{"transient", Space::device, 4096}, {"kv_cache", Space::device, 0}, {"back-up", Space::host, 0}};
  program.num_events = 1;
  program.buffers = {{"x", DType::f32, 16, Category::activations, transient_section, 0}};
  Op alloc;
  alloc.buffer = 1;
  Op gather;
  gather.kind = OpKind::all_gather, gather.stream = StreamId{1}, gather.name = "all_gather";
  gather.inputs = {{0, 0, DType::f32, 1, {Dim{8}}}};
  gather.outputs = {{1, 0, DType::f32, 1, {Dim{16, tokens_extent, 4}}}};
  gather.attrs = {{Attr::padding_bytes, std::int64_t{8}}, {Attr::eps, 1.0}};
  gather.group = 0;
  Body body;
  body.name = "gather", body.num_ports = 1;
  body.locals = {{"y", DType::f32, 16, Category::communication, transient_section, 0}};
  body.ops = {alloc, gather};
  program.bodies = {body};
  Call call;
  call.name = "unit.0.", call.ports = {{0, 32}}, call.locals = {128};
  call.marks = {{1, OpKind::wait, StreamId{1}, 0}};
  Block block;
  block.name = "micro", block.calls = {call, call};
  block.calls[1].ports[0].offset_bytes = 0, block.calls[1].marks.clear();
  program.phases = {{block}};
  p.programs = {program};
  return p;
}

/// The document with one value replaced, its hash made right again where the plan still reads.
std::string with(const Plan& plan, const char* pointer, nlohmann::json value) {
  auto doc = json_from<nlohmann::json>(plan_to_json(plan));
  doc[nlohmann::json::json_pointer(pointer)] = std::move(value);
  return json_text(doc);
}

std::string code_of(const std::string& text) {
  const auto plan = plan_from_json(text, "plan.json");
  return plan ? "" : plan.error().front().code;
}

}  // namespace

TEST_CASE("a plan file is what its description says") {
  CHECK(
      plan_to_json(small_plan()) ==
      R"({"schema":"hotbunk.plan-file/4","hash":")" + plan_hash(small_plan()) +
          R"(","scenario":"demo","chunk_bytes":4096,"device_capacity_bytes":0,"host_capacity_bytes":0,"overhead_bytes":0,)"
          R"("streams":[["compute","compute"],["gather","communication"]],)"
          R"("groups":[{"name":"fsdp","groups":[[0,1]]}],"phases":[{"name":"train","when":"iteration","driven":true}],)"
          R"("program_of_rank":[0,0],"programs":[{"sections":[["transient","device",4096],["kv_cache","device",0],["back-up","host",0]],)"
          R"("num_events":1,)"
          R"("buffers":[["x","fp32",16,"activations","transient",0]],"bodies":[{"name":"gather","ports":1,)"
          R"("locals":[["y","fp32",16,"communication","transient",0]],"ops":[)"
          R"(["alloc","compute","",[],[],{"buffer":1}],)"
          R"(["all_gather","gather","all_gather",[[0,0,"fp32",8]],[[1,0,"fp32",[16,"tokens",4]]],)"
          R"({"attrs":[["padding_bytes",8],["eps",1.0]],"group":0}]]}],"phases":[[{"name":"micro","calls":[)"
          R"([0,"unit.0.",[[0,32]],[128],[[1,"wait","gather",0]]],[0,"unit.0.",[0],[128],[]]]}]]}]})"
          "\n");
}

TEST_CASE("a side that is cut into runs, into pieces, or into runs of pieces comes back as it was") {
  const Within pieces{0, 2, 1, 3, 1, 6};
  const Run runs{-2, 4, 4};
  for (const auto& [within, run] : {std::pair(pieces, Run{}), {Within{}, runs}, {pieces, runs}}) {
    Plan plan = small_plan();
    Side side{0, {0, 3, 0, 2, 0, 2}, {.who = Holds::every, .family = 0, .count = 2, .pitch = 4, .within = within}};
    side.parts.run = run;
    plan.programs[0].bodies[0].ops[1].moves = {{side, {0, {0, 3, 0, 2, 0, 2}, {}}}};
    const auto again = plan_from_json(plan_to_json(plan), "plan.json");
    REQUIRE(again.has_value());
    CHECK(*again == plan);
  }
}

TEST_CASE("extents are in the file where there are more than two, and a dimension names one of them") {
  Plan plan = small_plan();
  plan.extents.push_back({"routed", 8, CountedBy::device});
  plan.programs[0].bodies[0].ops[1].outputs[0].shape[0].extent = ExtentId{2};
  const auto doc = json_from<nlohmann::json>(plan_to_json(plan));
  CHECK(doc["extents"] == nlohmann::json({{"tokens", 0, "driver"}, {"seqs", 0, "driver"}, {"routed", 8, "device"}}));
  CHECK(doc["programs"][0]["bodies"][0]["ops"][1][4][0][3] == nlohmann::json({16, "routed", 4}));
  CHECK(*plan_from_json(plan_to_json(plan), "plan.json") == plan);
  const auto refused = [&](const std::string& pointer, const nlohmann::json& value, const char* code) {
    INFO(pointer << " = " << json_text(value));
    CHECK(code_of(with(plan, pointer.c_str(), value)) == code);
  };
  refused("/extents", {{"tokens", 0, "driver"}}, "E503");
  auto many = doc["extents"];
  while (many.size() <= max_extents) many.push_back({fmt::format("more {}", many.size()), 8, "device"});
  refused("/extents", many, "E503");
  refused("/extents/2", {"routed", 8}, "E503");
  refused("/extents/2/0", "seqs", "E503");
  refused("/extents/2/0", "kept", "E503");  // a dimension names the one that was there
  refused("/extents/2/1", -1, "E503");
  refused("/extents/2/2", "host", "E503");
}

TEST_CASE("any plan comes back from its file unchanged") {
  CHECK(rc::check("plan -> JSON -> plan", [](std::uint64_t seed) {
    const Plan plan = test::random_plan(seed);
    const std::string text = plan_to_json(plan);
    const auto back = plan_from_json(text, "plan.json");
    if (!back) RC_FAIL(render(back.error()));
    RC_ASSERT(*back == plan);
    RC_ASSERT(plan_hash(*back) == plan_hash(plan));
    RC_ASSERT(plan_to_json(*back) == text);
  }));
}

TEST_CASE("a plan file that was edited is refused") {
  const auto plan = plan_from_json(with(small_plan(), "/overhead_bytes", 1), "plan.json");
  REQUIRE(!plan);
  CHECK(plan.error().front().code == "E504");
  CHECK(plan.error().front().notes.at(0) == "the file states " + plan_hash(small_plan()));
}

TEST_CASE("what would be used as an index is checked") {
  const Plan plan = small_plan();
  const std::string op = "/programs/0/bodies/0/ops/1", alloc = "/programs/0/bodies/0/ops/0",
                    call = "/programs/0/phases/0/0/calls/0";
  const auto refused = [&](const std::string& pointer, const nlohmann::json& value, const char* code) {
    INFO(pointer << " = " << json_text(value));
    CHECK(code_of(with(plan, pointer.c_str(), value)) == code);
  };
  refused("/schema", "hotbunk.plan/1", "E505");
  refused("/hash", 7, "E502");
  refused("/chunk_bytes", 0, "E503");
  refused("/chunk_bytes", "4096", "E502");
  refused("/device_capacity_bytes", -1, "E503");
  refused("/device_capacity_bytes", 1.5, "E502");
  refused("/overhead_bytes", std::numeric_limits<std::uint64_t>::max(), "E503");
  refused("/groups/0/groups/0/1", 2, "E503");
  refused("/phases/0/when", "sometimes", "E503");
  refused("/phases/0/driven", 1, "E502");
  refused("/phases/0/every", 1, "E503");           // 1 is not written
  refused("/phases/0/players", {{1, 0}}, "E503");  // one role, "job"
  refused("/phases/0/players", {{0, max_steps_back + 1}}, "E503");
  refused("/phases/0/players", {{0}}, "E503");
  refused("/roles", nlohmann::json::array(), "E503");
  refused("/roles", {1}, "E502");
  refused("/programs/0/role", 1, "E503");
  refused("/program_of_rank/1", 1, "E503");
  refused("/program_of_rank/1", -1, "E503");
  refused("/streams", nlohmann::json::array(), "E503");
  refused("/streams/1/0", "compute", "E503");  // two of one name
  refused("/streams/1/0", "reduce", "E503");   // an op names the one that was there
  refused("/streams/1/1", "magic", "E503");
  refused("/programs/0/sections", nlohmann::json::array(), "E503");
  refused("/programs/0/sections/1/0", "transient", "E503");
  refused("/programs/0/sections/0/0", "scratch", "E503");
  refused("/programs/0/sections/0/1", "disk", "E503");
  refused("/programs/0/sections/0/2", -1, "E503");
  refused("/programs/0/num_events", 1 << 30, "E503");
  refused("/programs/0/phases", nlohmann::json::array(), "E503");
  refused("/programs/0/buffers/0/1", "fp12", "E503");
  refused("/programs/0/buffers/0/2", -16, "E503");
  refused("/programs/0/buffers/0/2", std::int64_t{1} << 60, "E503");
  refused("/programs/0/buffers/0/3", "parameters", "E503");
  refused("/programs/0/buffers/0/4", 6, "E502");
  refused(op, nlohmann::json::array({"alloc"}), "E503");
  refused(op + "/0", "all_gathr", "E503");
  refused(op + "/1", "compute2", "E503");
  refused(op + "/2", nullptr, "E502");
  refused(op + "/3/0/0", 2, "E503");                        // no such slot
  refused(op + "/3/0/1", 4, "E503");                        // 32 + 4 + 8*4 > 64
  refused(op + "/4/0/3/0", 17, "E503");                     // 17*4 > 64
  refused(op + "/4/0/3/0", std::int64_t{1} << 60, "E503");  // *4 overflows the bound
  refused(op + "/4/0/3/1", "sequences", "E503");
  refused(op + "/5/group", 1, "E503");
  refused(op + "/5/group", -1, "E503");
  refused(op + "/5/attrs/0/0", "padding", "E503");
  refused(op + "/5/attrs/0/1", nlohmann::json::object(), "E502");
  refused(op + "/5/attrs/1/1", "nan", "E503");
  refused(op + "/0", "record", "E503");
  refused("/programs/0/bodies/0/ports", -1, "E503");
  refused("/programs/0/bodies/0/ports", 2, "E503");        // the calls bind one
  refused("/programs/0/bodies/0/locals/0/5", 64, "E503");  // each call says where
  refused("/programs/0/bodies/0/locals/0/4", "kv_cache", "E503");
  refused(call + "/0", 1, "E503");
  refused(call + "/2", nlohmann::json::array(), "E503");
  refused(call + "/2/0/0", 1, "E503");
  refused(call + "/2/0/1", 36, "E503");
  refused(call + "/2/0", nlohmann::json::array({0}), "E503");
  refused(call + "/3", nlohmann::json::array(), "E503");
  refused(call + "/3/0", -1, "E503");
  refused(call + "/4/0/0", 3, "E503");
  refused(call + "/4/0/1", "alloc", "E503");
  refused(call + "/4/0/3", 1, "E503");
  refused(op + "/5/map", {8, 4}, "E503");
  refused(op + "/5/map", {0, 4097}, "E503");
  const auto moved = [&](nlohmann::json from) {
    refused(op + "/5/moves", {{std::move(from), {0, 0, 1, 0, 1, 0, 1}}}, "E503");
  };
  moved({0, 0, std::int64_t{1} << 40, 0, 1, 0, std::int64_t{1} << 40});  // rows * pitch
  moved({1, 0, 1, 0, 1, 0, 1});                                          // no such input
  moved({0, 2, 1, 0, 1, 0, 1});                                          // ends before it begins
  moved({0, 0, 1, 0, 1, 0});                                             // a number short
  moved({0, 0, 1, 0, 1, 0, 1, {"some", 0, 1, 1, 0, 0, 0, 0}});
  moved({0, 0, 1, 0, 1, 0, 1, {"mine", 1, 1, 1, 0, 0, 0, 0}});                             // no such family
  moved({0, 0, 1, 0, 1, 0, 1, {"mine", 0, 0, 1, 0, 0, 0, 0}});                             // no parts
  moved({0, 0, 1, 0, 1, 0, 1, {"every", 0, 1 << 19, 1, std::int64_t{1} << 50, 0, 0, 0}});  // count * rows
  refused(op + "/5", nlohmann::json::object(), "E503");     // a collective without a group
  refused(alloc + "/5", nlohmann::json::object(), "E503");  // an alloc without a buffer
}

TEST_CASE("a message names the value by its path") {
  const auto plan = plan_from_json(with(small_plan(), "/programs/0/bodies/0/ops/1/3/0/0", 9), "p.json");
  REQUIRE(!plan);
  CHECK(plan.error().front().message == "programs[0].bodies[0].ops[1][3][0][0]: 9 is not between 0 and 1");
  CHECK(code_of(R"({"hash":1})") == "E502");
  CHECK(plan_from_json("[]", "p.json").error().front().message == "the document should be an object, not an array");
}

TEST_CASE("every truncation of a plan file is refused") {
  const std::string text = plan_to_json(small_plan());
  for (std::size_t n = 0; n + 2 < text.size(); ++n) {
    INFO("first " << n << " bytes");
    REQUIRE(code_of(text.substr(0, n)) == "E501");
  }
  CHECK(code_of(std::string(100'000, '[')) == "E501");
}

}  // namespace hotbunk
