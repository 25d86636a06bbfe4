// What the verifier proves between ranks: roles that play phases together, and messages between two.
#include <catch2/catch.hpp>
#include <functional>
#include <string>
#include <vector>

#include "graph/verify.h"
#include "programs.h"

using namespace hotbunk;
using namespace hotbunk::test;
using Catch::Matchers::Contains;

namespace {

std::string faults_of(const Plan& plan) {
  std::string all;
  for (const std::string& line : verify(plan)) all += line + '\n';
  return all;
}

}  // namespace

TEST_CASE("Roles: who plays what, and no ring of waits") {
  const auto verdict = [](const std::function<void(Plan&)>& spoil) {
    Program p = test::empty_program();
    p.buffers = {scratch("a", 16, 0)};
    Plan plan =
        plan_of(p, {memory(OpKind::alloc, 0), op(OpKind::zero, {}, {whole(p, 0)}), memory(OpKind::free, 0)}, 4096);
    plan.programs.push_back(plan.programs[0]);
    plan.program_of_rank = {0, 1};
    plan.roles = {"trainer", "engines"};
    plan.programs[1].role = 1;
    for (PhaseInfo& phase : plan.phases) phase.players = {{0, 0}, {1, 0}};
    spoil(plan);
    return faults_of(plan);
  };
  CHECK(verdict([](Plan&) {}).empty());
  CHECK_THAT(verdict([](Plan& p) { p.phases[1].players.clear(); }), Contains("phase work: no role plays it"));
  CHECK_THAT(verdict([](Plan& p) { p.phases[1].players[1].role = 2; }), Contains("phase work: names role 2"));
  CHECK_THAT(verdict([](Plan& p) { p.phases[1].players = {{1, 0}, {0, 0}}; }), Contains("not in ascending order"));
  CHECK_THAT(verdict([](Plan& p) { p.phases[1].players[1].steps_back = -1; }),
             Contains("is played -1 iterations back"));
  CHECK_THAT(verdict([](Plan& p) { p.phases[0].players[1].steps_back = 1; }), Contains("is played 1 iterations back"));
  CHECK_THAT(verdict([](Plan& p) {
               p.phases[1].players = {{0, 0}};
             }),
             Contains("program 1: has blocks in phase work, which engines does not play"));
  CHECK_THAT(verdict([](Plan& p) { p.programs[1].role = 7; }), Contains("program 1: names role 7"));
  CHECK_THAT(verdict([](Plan& p) { p.programs[1].role = 0; }), Contains("role engines: no rank is of it"));
  CHECK_THAT(verdict([](Plan& p) { p.program_of_rank = {0, 0}; }), Contains("role engines: no rank is of it"));
  CHECK_THAT(verdict([](Plan& p) {
               for (PhaseInfo& phase : p.phases) phase.players = {{0, 0}};
               for (auto& blocks : p.programs[1].phases) blocks.clear();
             }),
             Contains("role engines: it plays no phase"));
  CHECK_THAT(verdict([](Plan& p) {
               p.phases[1].every = 2;
               p.phases[1].players[1].steps_back = 1;
             }),
             Contains("phase work: what skips iterations is played in the walk's own"));
}

TEST_CASE("Pairs: what is sent is received, in the same phases and blocks, in order") {
  /// Rank 0 sends two messages, rank 1 receives them.
  const auto verdict = [](const std::function<void(Plan&)>& spoil) {
    Program p = test::empty_program();
    p.buffers = {scratch("a", 16, 0), scratch("b", 8, 64)};
    const auto message = [&](OpKind kind, BufferId buffer) {
      const bool sends = kind == OpKind::send;
      Op o = sends ? op(kind, {whole(p, buffer)}, {}) : op(kind, {}, {whole(p, buffer)});
      o.group = 0;
      o.attrs = {{Attr::peer, std::int64_t{sends ? 1 : 0}}};
      return o;
    };
    const auto ops = [&](OpKind kind) {
      std::vector<Op> out = {memory(OpKind::alloc, 0), memory(OpKind::alloc, 1)};
      if (kind == OpKind::send)
        for (BufferId b : {0, 1}) out.push_back(op(OpKind::zero, {}, {whole(p, b)}));
      for (BufferId b : {0, 1}) out.push_back(message(kind, b));
      for (BufferId b : {0, 1}) out.push_back(memory(OpKind::free, b));
      return out;
    };
    Plan plan = plan_of(p, ops(OpKind::send), 4096);
    plan.programs.push_back(plan_of(p, ops(OpKind::recv), 4096).programs[0]);
    plan.groups = {{"pair", {{0, 1}}}};
    plan.program_of_rank = {0, 1};
    spoil(plan);
    return faults_of(plan);
  };
  CHECK(verdict([](Plan&) {}) == "");
  const auto ops_of = [](Plan& plan, std::size_t program) -> std::vector<Op>& {
    Program& p = plan.programs[program];
    return p.bodies[static_cast<std::size_t>(p.phases[1][0].calls[0].body)].ops;
  };
  CHECK_THAT(verdict([&](Plan& p) { std::swap(ops_of(p, 1)[2], ops_of(p, 1)[3]); }),
             Contains("group pair: rank 0 sends rank 1 64 B in phase work, block work, which expects 32 B in phase"));
  CHECK_THAT(verdict([&](Plan& p) { ops_of(p, 1).erase(ops_of(p, 1).begin() + 3); }),
             Contains("rank 0 sends rank 1 32 B in phase work, block work, which expects nothing"));
  CHECK_THAT(verdict([&](Plan& p) { ops_of(p, 0).erase(ops_of(p, 0).begin() + 5); }),
             Contains("rank 0 sends rank 1 nothing, which expects 32 B"));
  CHECK_THAT(verdict([&](Plan& p) { std::erase_if(ops_of(p, 0), [](const Op& o) { return is_pairwise(o.kind); }); }),
             Contains("rank 0 sends rank 1 nothing, which expects 64 B"));
  CHECK_THAT(verdict([&](Plan& p) {
               ops_of(p, 0)[4].attrs = {{Attr::peer, std::int64_t{2}}};
             }),
             Contains("group pair: rank 0 sends to place 2 of 2"));
  CHECK_THAT(verdict([&](Plan& p) { p.programs[1].phases[1][0].name = "other"; }), Contains("block other"));
}
