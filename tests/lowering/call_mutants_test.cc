// A lowered plan with one call spoilt: dropped, played twice, its local placed on what is alive, an event not recorded.
// The verifier finds each.
#include <fmt/format.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <functional>
#include <set>

#include "graph/verify.h"
#include "tiny.h"

using namespace hotbunk;
using namespace hotbunk::test;

namespace {

struct Place {
  std::size_t phase, block, call;
};

/// Of each body the first and the last call.
std::vector<Place> places(const Program& program) {
  std::vector<std::vector<Place>> of_body(program.bodies.size());
  for (std::size_t p = 0; p < program.phases.size(); ++p)
    for (std::size_t b = 0; b < program.phases[p].size(); ++b)
      for (std::size_t c = 0; c < program.phases[p][b].calls.size(); ++c)
        of_body[static_cast<std::size_t>(program.phases[p][b].calls[c].body)].push_back({p, b, c});
  std::vector<Place> out;
  for (const auto& all : of_body) {
    if (!all.empty()) out.push_back(all.front());
    if (all.size() > 1) out.push_back(all.back());
  }
  return out;
}

/// Changes the calls of a block; false: there is nothing to change at this place.
using Change = std::function<bool(const Program&, std::vector<Call>&, std::size_t)>;

bool has(const Program& program, const Call& call, const std::function<bool(const Op&)>& what) {
  return std::ranges::any_of(program.bodies[static_cast<std::size_t>(call.body)].ops, what);
}
bool books(const Op& op) { return is_memory(op.kind); }

/// What the verifier says of each mutant; those that it lets pass by name.
struct Verdict {
  int found = 0;
  std::set<std::string> passed;
};

Verdict verdict_of(const Plan& plan, const Change& change) {
  Verdict out;
  for (const Place& place : places(plan.programs[0])) {
    Plan mutant = plan;
    Program& program = mutant.programs[0];
    std::vector<Call>& calls = program.phases[place.phase][place.block].calls;
    std::string name = program.bodies[static_cast<std::size_t>(calls[place.call].body)].name;
    name.resize(std::min(name.find('/'), name.size()));  // of "name/2" the name
    if (!change(plan.programs[0], calls, place.call)) continue;
    if (verify(mutant, 1).empty()) out.passed.insert(name);
    else ++out.found;
  }
  return out;
}

}  // namespace

TEST_CASE(
    "a call that is dropped or doubled, whose local is misplaced, whose event is missing is found by the verifier") {
  const Plan plan = lowered(tiny(4, 2, {"train.recompute=full", "sync.verify=true", "algorithm.reference=true"}));
  REQUIRE(verify(plan).empty());
  std::set<std::string> all;
  for (const Body& b : plan.programs[0].bodies) all.insert(b.name);
  REQUIRE(all.size() > 60);

  const Verdict dropped = verdict_of(plan, [](const Program&, std::vector<Call>& calls, std::size_t c) {
    calls.erase(calls.begin() + static_cast<std::ptrdiff_t>(c));
    return true;
  });
  // What hands data to the driver, or adds to what is there: without it nothing that is read stays unwritten. Those are
  // found where two interpreters are compared (tests/parity/mutation_test.cc), and by numbers; what a checkpoint lacks,
  // by the first rank, which counts its elements (rl/training_driver.cc).
  CHECK(dropped.passed ==
        std::set<std::string>{"exchange", "export.fetch", "sync.hash", "train.adamw", "train.sum_squares"});
  CHECK(dropped.found > 100);

  const Verdict doubled = verdict_of(plan, [](const Program& program, std::vector<Call>& calls, std::size_t c) {
    if (!has(program, calls[c], books)) return false;  // computes the same again, in place or not
    calls.insert(calls.begin() + static_cast<std::ptrdiff_t>(c), Call(calls[c]));
    return true;
  });
  CHECK(doubled.passed == std::set<std::string>{});
  CHECK(doubled.found > 60);

  // A local on the bytes of a port that is alive while the call runs.
  const Verdict misplaced = verdict_of(plan, [](const Program& program, std::vector<Call>& calls, std::size_t c) {
    Call& call = calls[c];
    if (call.locals.empty()) return false;
    for (const Port& port : call.ports)
      if (const Buffer& b = program.buffers[static_cast<std::size_t>(port.buffer)]; b.section == sections::transient)
        if (!has(program, call, [&](const Op& op) {  // allocated or freed by the call
              const auto slot = static_cast<std::size_t>(op.buffer);
              return op.buffer >= 0 && slot < call.ports.size() && call.ports[slot].buffer == port.buffer;
            })) {
          call.locals[0] = b.offset;
          return true;
        }
    return false;
  });
  CHECK(misplaced.passed == std::set<std::string>{});
  CHECK(misplaced.found > 5);

  const Verdict unmarked = verdict_of(plan, [](const Program&, std::vector<Call>& calls, std::size_t c) {
    const auto record = std::ranges::find(calls[c].marks, OpKind::record, &Mark::kind);
    if (record == calls[c].marks.end()) return false;
    calls[c].marks.erase(record);
    return true;
  });
  CHECK(unmarked.passed == std::set<std::string>{});
  CHECK(unmarked.found > 30);

  const Verdict unbound = verdict_of(plan, [](const Program&, std::vector<Call>& calls, std::size_t c) {
    if (calls[c].ports.empty()) return false;
    calls[c].ports.pop_back();
    return true;
  });
  CHECK(unbound.passed == std::set<std::string>{});
  CHECK(unbound.found > 100);

  // A port on another transient, as large as its own.
  const Verdict rebound = verdict_of(plan, [](const Program& program, std::vector<Call>& calls, std::size_t c) {
    for (Port& port : calls[c].ports) {
      const Buffer& own = program.buffers[static_cast<std::size_t>(port.buffer)];
      if (own.section != sections::transient) continue;
      for (std::size_t b = 0; b < program.buffers.size(); ++b)
        if (const Buffer& other = program.buffers[b]; &other != &own && other.section == own.section &&
                                                      other.dtype == own.dtype && other.elements == own.elements) {
          port.buffer = static_cast<BufferId>(b);
          return true;
        }
    }
    return false;
  });
  // These read another live value of the same size, which nothing but numbers tell apart (tests/numerics).
  CHECK(rebound.passed == std::set<std::string>{"train.adamw", "train.layer.backward", "train.sum_squares"});
  CHECK(rebound.found > 30);
}

TEST_CASE("a slot fewer than the lowering counted on is found by the verifier") {
  for (const char* sets : {"train.recompute=full", "train.recompute=none"}) {
    const Plan plan = lowered(tiny(4, 2, {sets, "algorithm.reference=true"}));
    REQUIRE(verify(plan).empty());
    int limits = 0;
    for (std::size_t l = 0; l < plan.programs[0].slot_limits.size(); ++l) {
      Plan mutant = plan;
      SlotLimit& limit = mutant.programs[0].slot_limits[l];
      if (limit.slots < 2 || limit.turns.size() <= static_cast<std::size_t>(limit.slots)) continue;
      --limit.slots;
      INFO(fmt::format("{}: limit {}", sets, l));
      CHECK_FALSE(verify(mutant, 1).empty());
      ++limits;
    }
    CHECK(limits > 0);
  }
}
