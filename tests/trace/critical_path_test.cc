// The longest chain of an executed step, against chains added up by hand.
#include "trace/critical_path.h"

#include <catch2/catch.hpp>

#include "tests/blocks.h"
#include "trace/meetings.h"

using namespace hotbunk;

namespace {

Op op(OpKind kind, StreamId stream, std::string name, std::int32_t event = 0) {
  Op o;
  o.kind = kind;
  o.stream = stream;
  o.name = std::move(name);
  o.event = event;
  o.group = 0;
  return o;
}

/// Two ranks, phases "one" and "two". One: a on compute; then g, a gather of both ranks, behind an event of its own
/// stream's op p; b on compute after the gather. Two: c.
Plan plan_of_two() {
  Plan plan = test::empty_plan();
  plan.groups = {{"world", {{0, 1}}}};
  plan.phases = {{"one", When::iteration, false}, {"two", When::iteration, false}};
  Program program = test::empty_program();
  program.num_events = 1;
  const Block one =
      test::block_of(program, "",
                     {op(OpKind::zero, streams::gather, "p"), op(OpKind::all_gather, streams::gather, "g"),
                      op(OpKind::record, streams::gather, "record"), op(OpKind::zero, streams::compute, "a"),
                      op(OpKind::wait, streams::compute, "wait"), op(OpKind::zero, streams::compute, "b")});
  const Block two = test::block_of(program, "", {op(OpKind::zero, streams::compute, "c")});
  program.phases = {{one}, {two}};
  plan.programs = {program};
  plan.program_of_rank = {0, 0};
  return plan;
}

struct Row {
  Rank rank;
  const char* name;
  std::int64_t start, end;
};

Trace trace_of(const std::vector<Row>& rows, std::int64_t end_of_one, std::int64_t end_of_two) {
  Trace t;
  for (const Row& row : rows) {
    const std::string name = row.name;
    t.names.push_back(name);
    Span s;
    s.rank = row.rank;
    s.stream = name == "p" || name == "g" ? streams::gather : streams::compute;
    s.kind = name == "g" ? OpKind::all_gather : OpKind::zero;
    s.phase = name == "c" ? 1 : 0;
    s.step = 1;
    s.name = static_cast<std::int32_t>(t.names.size()) - 1;
    s.start_ns = row.start, s.end_ns = row.end;
    t.spans.push_back(s);
  }
  for (Rank r : {0, 1}) {
    t.phases.push_back({r, 1, 0, 0, end_of_one, 1});
    t.phases.push_back({r, 1, 1, end_of_one, end_of_two, 1});
  }
  return t;
}

/// "rank:name" of the path, in order.
std::string text_of(const Trace& t, const CriticalPath& path) {
  std::string out;
  for (const std::size_t i : path.spans)
    out += (out.empty() ? "" : " ") + std::to_string(t.spans[i].rank) + ":" +
           t.names[static_cast<std::size_t>(t.spans[i].name)];
  return out;
}

}  // namespace

TEST_CASE("the path goes over a collective to the rank that came last, then back over an event") {
  // Rank 0: p 10, rank 1: p 40, so g can start at 40 and is done at 55 on rank 0, 50 on rank 1: its own time is 15 and
  // 10. b waits for g: 30 on rank 0, 5 on rank 1. Then c: 20 on rank 0, 25 on rank 1.
  // Chains: 1:p 40, 0:g 15, 0:b 30, 0:c 20 = 105; over rank 1's g and b only 40 + 10 + 5 + 25; a (50) is no match for
  // g.
  const Plan plan = plan_of_two();
  const Trace t = trace_of({{0, "p", 0, 10},
                            {0, "g", 12, 55},
                            {0, "a", 0, 50},
                            {0, "b", 60, 90},
                            {0, "c", 100, 120},
                            {1, "p", 0, 40},
                            {1, "g", 40, 50},
                            {1, "a", 0, 5},
                            {1, "b", 52, 57},
                            {1, "c", 95, 120}},
                           95, 125);
  const CriticalPath path = critical_path(plan, t, 1);
  CHECK(text_of(t, path) == "1:p 0:g 0:b 0:c");
  CHECK(path.own_ns == std::vector<std::int64_t>{40, 15, 30, 20});
  CHECK(path.busy_ns == 105);
  // Phase one ends at 95 on both: 85 busy, 10 waiting. Phase two: 30 long, 20 busy.
  REQUIRE(path.phases.size() == 2);
  CHECK(path.phases[0].elapsed_ns == 95);
  CHECK(path.phases[0].busy_ns == 85);
  CHECK(path.phases[0].waiting_ns() == 10);
  CHECK(path.phases[1].elapsed_ns == 30);
  CHECK(path.phases[1].waiting_ns() == 10);
}

TEST_CASE("without the event the longer stream alone is the path; another step has none") {
  // The same times, but nothing orders b after g: rank 0's compute, a 50 + b 30, then c 20, beats p + g = 55.
  Plan plan = plan_of_two();
  std::erase_if(plan.programs[0].phases[0][0].calls[0].marks, [](const Mark& m) { return m.kind == OpKind::wait; });
  const Trace t = trace_of({{0, "p", 0, 10},
                            {0, "g", 12, 55},
                            {0, "a", 0, 50},
                            {0, "b", 60, 90},
                            {0, "c", 100, 120},
                            {1, "p", 0, 40},
                            {1, "g", 40, 50},
                            {1, "a", 0, 5},
                            {1, "b", 52, 57},
                            {1, "c", 95, 120}},
                           95, 125);
  CHECK(text_of(t, critical_path(plan, t, 1)) == "0:a 0:b 0:c");
  CHECK(critical_path(plan, t, 2).spans.empty());
}

TEST_CASE("meetings: the n-th time of an op meets the n-th time of its group") {
  const Plan plan = plan_of_two();
  const Trace t = trace_of({{0, "g", 0, 5}, {0, "g", 10, 15}, {1, "g", 1, 5}, {1, "g", 11, 15}}, 20, 30);
  CHECK(meetings_of(plan, t) == std::vector<std::vector<std::size_t>>{{0, 2}, {1, 3}});
}

namespace {

/// Own times and idle ones make the step, and so do the phases, to the nanosecond.
void adds_up(const CriticalPath& path) {
  std::int64_t sum = path.idle_after_ns, elapsed = 0, busy = 0;
  for (std::size_t i = 0; i < path.spans.size(); ++i) sum += path.own_ns[i] + path.idle_ns[i];
  for (const auto& p : path.phases) elapsed += p.elapsed_ns, busy += p.busy_ns;
  CHECK(sum == path.elapsed_ns);
  CHECK(elapsed == path.elapsed_ns);
  CHECK(busy == path.busy_ns);
}

}  // namespace

TEST_CASE("the path and what lies between its ops are the step, to the nanosecond") {
  const Plan plan = plan_of_two();
  const Trace t = trace_of({{0, "p", 3, 10},
                            {0, "g", 12, 55},
                            {0, "b", 60, 90},
                            {0, "c", 100, 120},
                            {1, "p", 0, 40},
                            {1, "g", 40, 50},
                            {1, "b", 52, 57},
                            {1, "c", 95, 120}},
                           95, 125);
  const CriticalPath path = critical_path(plan, t, 1);
  CHECK(text_of(t, path) == "1:p 0:g 0:b 0:c");
  CHECK(path.idle_ns == std::vector<std::int64_t>{0, 0, 5, 10});  // g starts when 1:p ends
  CHECK(path.idle_after_ns == 5);
  adds_up(path);
}

TEST_CASE("runs of a block are one behind the other where they lie over one another, and count once") {
  // "steps x 3" on compute [0, 50) and on gather [10, 60): 60 together, not 50.
  Plan plan = plan_of_two();
  plan.programs[0].phases[0][0].name = "steps";
  Trace t = trace_of({{0, "steps x 3", 0, 50}, {0, "steps x 3", 10, 60}, {0, "c", 60, 80}}, 60, 80);
  t.spans[1].stream = streams::gather;
  const CriticalPath path = critical_path(plan, t, 1);
  CHECK(path.own_ns == std::vector<std::int64_t>{50, 10, 20});
  CHECK(path.busy_ns == 80);
  adds_up(path);
}

TEST_CASE("where ranks have devices of their own, what begins when another op ends follows it") {
  // No event leads from a to p, and none from rank 0's p to rank 1's g; in time they follow one another.
  const Plan plan = plan_of_two();
  Trace t = trace_of({{0, "a", 0, 30}, {0, "p", 30, 50}, {1, "p", 0, 5}, {1, "g", 50, 60}, {0, "c", 60, 65}}, 60, 65);
  CHECK(critical_path(plan, t, 1).busy_ns < 65);
  t.links.emplace_back();  // a simulation with links: no threads that share cores
  const CriticalPath path = critical_path(plan, t, 1);
  CHECK(path.busy_ns >= 60);
  adds_up(path);
}
