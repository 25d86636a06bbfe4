// Random programs: the engine against the slow, obvious simulator of oracle.cc.
#include "tests/sim/oracle.h"

#include <rapidcheck.h>

#include <catch2/catch.hpp>
#include <cmath>

#include "tests/blocks.h"
#include "tests/sim/toy.h"

using namespace hotbunk;
using namespace hotbunk::toy;

namespace {

constexpr std::array streams = {streams::compute, streams::gather, streams::reduce,
                                streams::h2d,     streams::d2h,    streams::host};

StreamId any_stream() { return *rc::gen::elementOf(streams); }

struct RandomPlan {
  Plan plan = test::empty_plan();
  std::vector<std::vector<std::int64_t>> cost;  // [rank][op]
};

/// One order of events over all ranks, of which each rank's program is a part: so it always ends.
RandomPlan random_plan() {
  const int ranks = *rc::gen::inRange(1, 5), actions = *rc::gen::inRange(1, 40);
  std::vector<std::vector<Op>> programs(static_cast<std::size_t>(ranks));
  for (int a = 0; a < actions; ++a) {
    const auto r = *rc::gen::inRange<std::size_t>(0, programs.size());
    const std::string name = "op" + std::to_string(a);
    const int what = *rc::gen::inRange(0, 12);
    if (what < 4) {
      programs[r].push_back(kernel(name, any_stream()));
    } else if (what < 6) {
      programs[r].push_back(record(*rc::gen::inRange(0, 3), any_stream()));
    } else if (what < 8) {
      programs[r].push_back(wait(*rc::gen::inRange(0, 3), any_stream()));
    } else if (what == 10) {
      for (auto& program : programs) program.push_back(exchange(name, {8}, {8}, 1, -1));
    } else if (what == 11 && ranks > 1) {  // the halves of a send_recv meet a send and a recv, of one rank or of two
      const auto n = programs.size(), from = (r + 1 + *rc::gen::inRange<std::size_t>(0, n - 1)) % n,
                 to = (r + 1 + *rc::gen::inRange<std::size_t>(0, n - 1)) % n;
      programs[from].push_back(transfer(OpKind::send, name + "<", {8}, static_cast<std::int64_t>(r)));
      programs[r].push_back(
          exchange(name, {8}, {8}, static_cast<std::int64_t>(to), static_cast<std::int64_t>(from), false));
      programs[to].push_back(transfer(OpKind::recv, name + ">", {8}, static_cast<std::int64_t>(r)));
    } else if (what == 8 || ranks == 1) {
      const StreamId stream = any_stream();
      for (auto& program : programs) program.push_back(all_reduce(name, {8}, 0, stream));
    } else {
      const auto to = (r + 1 + *rc::gen::inRange<std::size_t>(0, programs.size() - 1)) % programs.size();
      programs[r].push_back(transfer(OpKind::send, name, {8}, static_cast<std::int64_t>(to)));
      programs[to].push_back(transfer(OpKind::recv, name, {8}, static_cast<std::int64_t>(r)));
    }
  }
  RandomPlan out;
  for (const auto& program : programs) {
    auto& mine = out.cost.emplace_back();
    for (const Op& o : program) {
      const bool timed = o.kind != OpKind::record && o.kind != OpKind::wait;
      mine.push_back(timed ? *rc::gen::inRange<std::int64_t>(0, 50) : 0);
    }
  }
  out.plan = plan_of(std::move(programs));
  return out;
}

/// The price of an op by its place.
struct ByPlace final : OpCost {
  const RandomPlan& random;
  std::vector<std::vector<std::size_t>> places;  // [rank][op of the body]: its place in the block, events counted
  explicit ByPlace(const RandomPlan& r) : random(r) {
    for (Rank rank = 0; rank < r.plan.num_ranks(); ++rank) {
      const Program& program = r.plan.program(rank);
      const std::vector<Op> ops = test::ops_of(program, program.phases[0][0]);
      auto& mine = places.emplace_back();
      for (std::size_t i = 0; i < ops.size(); ++i)
        if (ops[i].kind != OpKind::record && ops[i].kind != OpKind::wait) mine.push_back(i);
    }
  }
  std::int64_t nanoseconds(const Plan& plan, Rank r, const Op& o, const Args&) const override {
    return random.cost[static_cast<std::size_t>(r)][places[static_cast<std::size_t>(r)].at(
        static_cast<std::size_t>(&o - plan.program(r).bodies[0].ops.data()))];
  }
};

/// Spans of the engine as [rank][op name] -> times in order of runs, and the same of the oracle.
using Table = std::map<std::pair<Rank, std::string>, std::vector<OracleSpan>>;

Table expected(const RandomPlan& random, std::int64_t runs, std::int64_t per_device, std::int64_t slots) {
  const auto spans = oracle(random.plan, random.cost, runs, per_device, slots);
  RC_ASSERT(!spans.empty());
  Table table;
  for (std::size_t r = 0; r < spans.size(); ++r) {
    const Program& program = random.plan.program(static_cast<Rank>(r));
    const std::vector<Op> ops = test::ops_of(program, program.phases[0][0]);
    for (std::size_t i = 0; i < spans[r].size(); ++i)
      if (spans[r][i].end > spans[r][i].start)
        table[{static_cast<Rank>(r), ops[i % ops.size()].name}].push_back(spans[r][i]);
  }
  return table;
}

void compare(std::int64_t slots, double tolerance_ns) {
  RandomPlan random = random_plan();
  const std::int64_t runs = *rc::gen::inRange(1, 4);
  ClusterSpec cluster;
  cluster.ranks_per_device = *rc::gen::inRange(1, 3);
  SimOptions options;
  options.device_slots = slots;
  const auto trace = simulate(random.plan, ByPlace(random), runs, 1, options, cluster);
  RC_ASSERT(trace.has_value());
  Table table = expected(random, runs, cluster.ranks_per_device, slots);
  std::map<std::pair<Rank, std::string>, std::size_t> seen;
  std::size_t spans = 0;
  for (const auto& [key, list] : table) spans += list.size();
  RC_ASSERT(trace->spans.size() == spans);
  for (const Span& s : trace->spans) {
    const std::pair key{s.rank, trace->names[static_cast<std::size_t>(s.name)]};
    const std::size_t n = seen[key]++;
    RC_ASSERT(n < table[key].size());
    RC_ASSERT(std::abs(static_cast<double>(s.start_ns) - table[key][n].start) <= tolerance_ns);
    RC_ASSERT(std::abs(static_cast<double>(s.end_ns) - table[key][n].end) <= tolerance_ns);
  }
}

}  // namespace

TEST_CASE("random programs, enough slots for all: exactly the oracle's times") {
  // Links have as many slots as ranks share them, and one stream per rank and direction uses them: nothing is shared.
  CHECK(rc::check("engine = oracle", [] { compare(64, 1e-3); }));
}

TEST_CASE("random programs on one or two slots: the oracle's times up to rounding") {
  // A completion is late by less than 1 ns plus 1/1024 per change of load; at most 160 spans follow each other.
  CHECK(rc::check("engine = oracle, one slot", [] { compare(1, 160.0); }));
  CHECK(rc::check("engine = oracle, two slots", [] { compare(2, 160.0); }));
}

namespace {

/// Calls in another order than `execute` makes them: `stride` runs of one rank, then of the next; the engine is asked
/// whenever it likes to be.
std::vector<PhaseSpan> phases_when(const RandomPlan& random, std::int64_t runs, std::int64_t stride,
                                   std::int64_t queue_depth) {
  const ByPlace cost(random);
  SimOptions options;
  options.queue_depth = queue_depth;
  options.device_slots = 1;
  SimBackend backend({}, cost, options);
  std::vector<Rank> ranks(static_cast<std::size_t>(random.plan.num_ranks()));
  for (std::size_t r = 0; r < ranks.size(); ++r) ranks[r] = static_cast<Rank>(r);
  auto devices = backend.open(random.plan, ranks);
  RC_ASSERT(devices.has_value());
  for (auto& device : *devices) device->enter(1, 0);
  for (std::int64_t begun = 0; begun < runs; begun += stride)
    for (auto& device : *devices) {
      const Program& program = random.plan.program(device->rank());
      for (std::int64_t run = begun; run < std::min(runs, begun + stride); ++run)
        RC_ASSERT(device->play(program, program.phases[0][0], {}).has_value());
    }
  for (auto& device : *devices) RC_ASSERT(device->sync().has_value());
  const auto trace = backend.take_trace();
  RC_ASSERT(trace.has_value());
  return trace->phases;
}

}  // namespace

TEST_CASE("times do not depend on the order in which ranks call, though calls exceed the queues by far") {
  const bool same = rc::check("order of calls", [] {
    const RandomPlan random = random_plan();
    const std::int64_t runs = 3000;
    const auto round_robin = phases_when(random, runs, 1, 64), rank_by_rank = phases_when(random, runs, runs, 64);
    for (std::size_t i = 0; i < round_robin.size(); ++i) RC_ASSERT(round_robin[i].end_ns == rank_by_rank[i].end_ns);
  });
  CHECK(same);
}
