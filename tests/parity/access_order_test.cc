// The checked mode: silent on what the plan orders, and a wait that is missing is named although the run went well.
#include "runtime/access_order.h"

#include <fmt/format.h>

#include <catch2/catch.hpp>
#include <cstdio>
#include <filesystem>
#include <utility>

#include "graph/verify.h"
#include "lowering/lower.h"
#include "spec/loader.h"
#include "tests/blocks.h"
#include "tests/parity/harness.h"
#include "tests/paths.h"

using namespace hotbunk;
using namespace hotbunk::testing;

namespace {

CpuOptions checked() {
  CpuOptions o;
  o.check_finite = o.poison = o.check_order = o.check_resident = true;
  return o;
}

constexpr Sizes all_there_is{.tokens = 1 << 30, .seqs = 1 << 30, .attention_pairs = 1 << 30};  // dims clamp them

/// The first race of one program's static walk, at full sizes; "" when there is none. `synchronised`: with the host's
/// waits for all streams at the ends of phases, as a run has them; the verifier counts on events alone.
std::string first_race(const Plan& plan, const Program& program, bool synchronised) {
  AccessOrder order(plan, program);
  for (const WalkTurn& turn : walk_turns(plan, program))
    for (std::int16_t phase = -1; const BlockVisit& visit : block_visits(plan, program, turn)) {
      if (std::exchange(phase, visit.phase) != visit.phase && synchronised) order.join();
      std::optional<std::string> first;
      each_step(
          program, block_at(program, visit),
          [&](const BoundOp& op) {
            if (op->kind == OpKind::unmap) order.join();  // the device waits for all of its streams
            else if (auto race = order.touch(op, all_there_is); race && !first) first = race;
          },
          [&](const Mark& m) {
            if (m.kind == OpKind::record) order.record(m.stream, m.event);
            else order.wait(m.stream, m.event);
          });
      if (first) return *first;
    }
  return "";
}

struct Wait {
  std::size_t phase, block, call, mark;
};

void drop(Plan& plan, const Wait& w) {
  for (Program& program : plan.programs) {
    std::vector<Mark>& marks = program.phases[w.phase][w.block].calls[w.call].marks;
    marks.erase(marks.begin() + static_cast<std::ptrdiff_t>(w.mark));
  }
}

std::vector<Wait> waits_of(const Program& program, std::size_t phase, std::size_t block) {
  std::vector<Wait> out;
  const std::vector<Call>& calls = program.phases[phase][block].calls;
  for (std::size_t c = 0; c < calls.size(); ++c)
    for (std::size_t m = 0; m < calls[c].marks.size(); ++m)
      if (calls[c].marks[m].kind == OpKind::wait) out.push_back({phase, block, c, m});
  return out;
}

Scenario two_ranks() {
  return tiny_scenario(2, 2, {"steps=1", "algorithm.reference=true", "sync.verify=true", "rollout.sleep_level=1"});
}

}  // namespace

TEST_CASE("checked runs of healthy plans are silent, whatever the timing") {
  const auto loaded = load_scenario(std::filesystem::path(source_folder) / "tests/parity/race-check.yaml");
  REQUIRE(loaded);
  std::vector<Case> cases;
  for (int i = 0; i < 8; ++i) cases.push_back({fmt::format("poison beside the reduce stream, run {}", i), *loaded});
  const auto nothing = [](const Outcome&) { return std::string(); };
  CHECK(run_cases(4, cases, nothing, checked()) == "");
  CHECK(run_cases(
            2, {{"two ranks", two_ranks()}, {"engines of one", tiny_scenario(2, 1, {"algorithm.old_logprobs=true"})}},
            nothing, checked()) == "");
}

TEST_CASE("a dropped wait is named by the checked mode where the verifier finds it, and a run with it ends") {
  const Scenario s = two_ranks();
  const auto plan = lower(s);
  REQUIRE(plan);
  REQUIRE(first_race(*plan, plan->programs[0], false) == "");
  std::vector<Wait> in_a_run;  // of the training step
  int waits = 0, named = 0, verifier_alone = 0;
  const auto train = static_cast<std::size_t>(plan->phase_index("train"));
  const Program& program = plan->programs[0];
  for (std::size_t p = 0; p < program.phases.size(); ++p)
    for (std::size_t b = 0; b < program.phases[p].size(); ++b)
      for (const Wait& wait : waits_of(program, p, b)) {
        ++waits;
        Plan mutant = *plan;
        drop(mutant, wait);
        const bool faulty = !verify(mutant, 1).empty();
        const std::string race = first_race(mutant, mutant.programs[0], false);
        CAPTURE(p, b, wait.call, wait.mark, race);
        CHECK((race.empty() || faulty));  // what is named is a fault of the plan
        if (race.find(" race for bytes ") != race.npos) ++named;
        if (p == train && !first_race(mutant, mutant.programs[0], true).empty()) in_a_run.push_back(wait);
        if (race.empty()) verifier_alone += faulty;
      }
  std::fprintf(stderr, "%d waits dropped: %d named by the checked mode, %d by the verifier alone\n", waits, named,
               verifier_alone);
  CHECK(named > 100);
  // Around unmap, where the device waits for all of its streams; and at the ends of blocks that only hand out what
  // persists, which the verifier wants ordered whichever block follows; and slots: what the head, in three passes, is
  // gathered into lies where nobody else is meanwhile.
  CHECK(verifier_alone <= 34);

  // On the CPU, whatever the timing.
  REQUIRE(in_a_run.size() >= 3);
  CpuOptions ordered;  // nothing but this check could end the run
  ordered.check_order = true;
  for (std::size_t i : {std::size_t{0}, in_a_run.size() / 2, in_a_run.size() - 1}) {
    const Case job{"dropped", s, [w = in_a_run[i]](Plan& p) { drop(p, w); }};
    // Whichever rank notices first takes the others with it; what it says is the walk's message above.
    CHECK(run_cases(
              2, {job}, [](const Outcome&) { return std::string(); }, ordered) != "");
  }
}
