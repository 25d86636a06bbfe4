// Waits of a plan, each left out in turn: where the sizes of the run need it, the double must find it missing.
#pragma once
#include <fmt/format.h>

#include <catch2/catch.hpp>
#include <functional>
#include <string>
#include <vector>

#include "tests/cuda_backend/iteration.h"

namespace hotbunk::test {

/// Calls visit(program, call, the mark's number) for every wait of the plan; the mark may be changed.
inline void each_wait(Plan& plan, const std::function<void(const Program&, Call&, std::size_t mark)>& visit) {
  for (Program& program : plan.programs)
    for (auto& blocks : program.phases)
      for (Block& block : blocks)
        for (Call& call : block.calls)
          for (std::size_t m = 0; m < call.marks.size(); ++m)
            if (call.marks[m].kind == OpKind::wait) visit(program, call, m);
}

struct LeftOut {
  std::size_t asked = 0, needed = 0;  // of needed ones, each was found
};

/// Leaves out each wait that `which` picks, one after the other, under a schedule of its own. Checks that the double
/// finds those that this run's sizes need (E612 says which), and finds nothing where the others are left out.
inline LeftOut leave_out_waits(Plan plan, const Scenario& scenario,
                               const std::function<bool(const Program&, const Mark&)>& which) {
  LeftOut out;
  std::vector<std::pair<Call*, std::size_t>> waits;
  each_wait(plan, [&](const Program& program, Call& call, std::size_t m) {
    if (which(program, call.marks[m])) waits.emplace_back(&call, m);
  });
  for (const auto& [call, m] : waits) {
    const std::vector<Mark> whole = call->marks;
    const std::string left_out = fmt::format("a wait of call '{}' for event {}", call->name, whole[m].event);
    call->marks.erase(call->marks.begin() + static_cast<std::ptrdiff_t>(m));
    const std::uint64_t seed = ++out.asked;
    // What is asked of the plan with this run's sizes: is an order missing?
    const std::string said = run_iteration(plan, scenario, {.seed = seed, .check_order = true}).text();
    const bool misses = said.find("E612") != std::string::npos;
    INFO(left_out << (misses ? ", which is needed: " : ", which is not needed: ") << said);
    if (!misses) {
      CHECK(said.empty());
    } else if (said.find("barrier '") == std::string::npos) {
      // A barrier touches no bytes: it orders what other ranks do, which the host may have waited for besides.
      CHECK(!run_iteration(plan, scenario, {.seed = seed}).findings.empty());
      ++out.needed;
    }
    call->marks = whole;
  }
  return out;
}

}  // namespace hotbunk::test
