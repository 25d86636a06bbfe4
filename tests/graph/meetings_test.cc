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

namespace {

/// A message between buffers `x` (sent) and `y` (received); -1: none.
Op message(const Program& p, std::string name, BufferId x, BufferId y, std::vector<std::int64_t> places,
           bool relative = true, StreamId stream = streams::compute) {
  Op o = op(y < 0 ? OpKind::send : x < 0 ? OpKind::recv : OpKind::send_recv, {}, {}, stream);
  o.name = std::move(name);
  if (x >= 0) o.inputs = {whole(p, x)};
  if (y >= 0) o.outputs = {whole(p, y)};
  o.attrs = {{Attr::peer, places[0]}};
  if (places.size() > 1) o.attrs.emplace_back(Attr::source, places[1]);
  if (relative) o.attrs.emplace_back(Attr::relative, std::int64_t{1});
  o.group = 0;
  return o;
}

/// a and b have 16 fp32, c and d 8.
Program four_buffers() {
  Program p;
  p.buffers = {scratch("a", 16, 0), scratch("b", 16, 64), scratch("c", 8, 128), scratch("d", 8, 192)};
  return p;
}
constexpr BufferId buffer_a = 0, buffer_b = 1, buffer_c = 2, buffer_d = 3;

/// a and c are written before `ops`, b and d are for what is received; all of it on one stream, which begins and ends
/// behind compute.
std::vector<Op> with_memory(const Program& p, const std::vector<Op>& ops, StreamId stream = streams::compute) {
  std::vector<Op> out;
  for (BufferId id : {buffer_a, buffer_b, buffer_c, buffer_d}) out.push_back(memory(OpKind::alloc, id, stream));
  for (BufferId id : {buffer_a, buffer_c}) out.push_back(op(OpKind::zero, {}, {whole(p, id)}, stream));
  out.insert(out.end(), ops.begin(), ops.end());
  for (BufferId id : {buffer_a, buffer_b, buffer_c, buffer_d}) out.push_back(memory(OpKind::free, id, stream));
  if (stream == streams::compute) return out;
  out.insert(out.begin(), {event(OpKind::record, streams::compute, 0), event(OpKind::wait, stream, 0)});
  out.insert(out.end(), {event(OpKind::record, stream, 1), event(OpKind::wait, streams::compute, 1)});
  return out;
}

/// Rank r of the family "ring" runs programs[r]; as many ranks as programs.
Plan ring_of(std::vector<std::vector<Op>> programs) {
  Plan plan = plan_of(four_buffers(), programs[0], 4096);
  plan.groups = {{"ring", {{0}}}};
  for (std::size_t r = 1; r < programs.size(); ++r) {
    plan.programs.push_back(plan_of(four_buffers(), programs[r], 4096).programs[0]);
    plan.program_of_rank.push_back(static_cast<std::int32_t>(r));
    plan.groups[0].groups[0].push_back(static_cast<Rank>(r));
  }
  for (Program& program : plan.programs) program.num_events = 3;
  return plan;
}

}  // namespace

TEST_CASE("Pairs: one program serves a ring of any size, and each half is met") {
  const Program p = four_buffers();
  const Op first = message(p, "first", buffer_a, buffer_b, {1, -1}),
           second = message(p, "second", buffer_c, buffer_d, {1, -1});
  const std::vector<Op> ops = with_memory(p, {first, second});
  for (const Rank ranks : {1, 2, 3, 5}) {
    Plan plan = plan_of(p, ops, 4096);
    plan.groups = {{"ring", {{}}}};
    for (Rank r = 0; r < ranks; ++r) plan.groups[0].groups[0].push_back(r);
    plan.program_of_rank.assign(static_cast<std::size_t>(ranks), 0);
    CHECK(faults_of(plan) == "");
  }
  /// Rank 1 of three does something else.
  const auto verdict = [&](const std::vector<Op>& other) {
    return faults_of(ring_of({ops, with_memory(p, other), ops}));
  };
  CHECK(verdict({first, second}) == "");
  // Its halves as a send and a recv, in either order.
  const Op send = message(p, "out", buffer_a, -1, {1}), recv = message(p, "in", -1, buffer_b, {-1});
  CHECK(verdict({send, recv, second}) == "");
  CHECK(verdict({recv, send, second}) == "");
  // By place instead of relative, and both in one program: 2 is behind rank 1, 0 before it.
  CHECK(verdict({message(p, "first", buffer_a, buffer_b, {2, 0}, false), second}) == "");
  // One is dropped, wholly and by half.
  CHECK(verdict({first}) ==
        "group ring: rank 0 sends rank 1 32 B in phase work, block work, which expects nothing, on stream compute\n"
        "group ring: rank 1 sends rank 2 nothing, which expects 32 B in phase work, block work, on stream compute\n");
  CHECK(verdict({first, message(p, "out", buffer_c, -1, {1})}) ==
        "group ring: rank 0 sends rank 1 32 B in phase work, block work, which expects nothing, on stream compute\n");
  CHECK(verdict({first, message(p, "in", -1, buffer_d, {-1})}) ==
        "group ring: rank 1 sends rank 2 nothing, which expects 32 B in phase work, block work, on stream compute\n");
  // In another order, of another size, on another stream, to another rank.
  CHECK_THAT(verdict({second, first}),
             Contains("rank 0 sends rank 1 64 B in phase work, block work, which expects 32 B in phase work") &&
                 Contains("rank 1 sends rank 2 32 B in phase work, block work, which expects 64 B in phase work"));
  CHECK(verdict({message(p, "first", buffer_a, buffer_d, {1, -1}), second}) ==
        "group ring: rank 0 sends rank 1 64 B in phase work, block work, which expects 32 B in phase work, block work, "
        "on stream compute\n");
  CHECK(verdict({message(p, "first", buffer_c, buffer_b, {1, -1}), second}) ==
        "group ring: rank 1 sends rank 2 32 B in phase work, block work, which expects 64 B in phase work, block work, "
        "on stream compute\n");
  const auto elsewhere = with_memory(p,
                                     {message(p, "first", buffer_a, buffer_b, {1, -1}, true, streams::gather),
                                      message(p, "second", buffer_c, buffer_d, {1, -1}, true, streams::gather)},
                                     streams::gather);
  CHECK_THAT(
      faults_of(ring_of({ops, elsewhere, ops})),
      Contains("rank 0 sends rank 1 64 B in phase work, block work, which expects nothing, on stream compute") &&
          Contains("rank 0 sends rank 1 nothing, which expects 64 B in phase work, block work, on stream gather"));
  CHECK(faults_of(ring_of({elsewhere, elsewhere})) == "");
  CHECK_THAT(verdict({message(p, "first", buffer_a, buffer_b, {-1, 1}), second}),
             Contains("rank 1 sends rank 0 64 B in phase work, block work, which expects nothing"));
  CHECK_THAT(verdict({message(p, "first", buffer_a, buffer_b, {1, 3}, false), second}),
             Contains("rank 1 receives from place 3 of 3"));
  // With itself on one side, and into what it sends.
  CHECK_THAT(verdict({message(p, "alone", buffer_a, -1, {0}), second}),
             Contains("rank 1 is on one side only of send 'alone' with itself"));
  CHECK_THAT(verdict({message(p, "alone", buffer_a, buffer_b, {0, -1}), second}),
             Contains("rank 1 is on one side only of send_recv 'alone' with itself"));
  CHECK_THAT(verdict({message(p, "first", buffer_a, buffer_a, {1, -1}), second}),
             Contains("phase work, block work: send_recv 'first' receives into what it sends"));
}

TEST_CASE("Pairs: ranks that wait for one another for ever") {
  const Program p = four_buffers();
  const Op send = message(p, "out", buffer_a, -1, {1}), recv = message(p, "in", -1, buffer_b, {-1}),
           both = message(p, "both", buffer_a, buffer_b, {1, -1});
  const auto sends = with_memory(p, {send, recv}), receives = with_memory(p, {recv, send}),
             exchanges = with_memory(p, {both});
  CHECK(faults_of(ring_of({sends, sends})) ==
        "phase work, block work: ranks wait for one another for ever: rank 0 stream compute, send 'out', for rank 1 "
        "stream compute; rank 1 stream compute, send 'out', for rank 0 stream compute\n");
  CHECK_THAT(faults_of(ring_of({receives, receives, receives})),
             Contains("rank 0 stream compute, recv 'in', for rank 2 stream compute; rank 2 stream compute, recv 'in', "
                      "for rank 1 stream compute; rank 1 stream compute, recv 'in', for rank 0 stream compute"));
  // One that receives first frees them all, and so does one that does both at once.
  CHECK(faults_of(ring_of({sends, receives})) == "");
  CHECK(faults_of(ring_of({sends, receives, sends, sends})) == "");
  CHECK(faults_of(ring_of({sends, exchanges, sends})) == "");
  CHECK(faults_of(ring_of({exchanges, exchanges, exchanges})) == "");
  // Both at once is no remedy for orders that contradict: each exchanges with its next one first, who does so with his.
  const Op with_next = message(p, "next", buffer_c, buffer_d, {1, 1}),
           with_last = message(p, "last", buffer_c, buffer_d, {-1, -1});
  const auto next_first = with_memory(p, {with_next, with_last});
  CHECK_THAT(
      faults_of(ring_of({next_first, next_first, next_first})),
      Contains("ranks wait for one another for ever") && Contains("send_recv 'next', for rank 1 stream compute"));

  // A collective that one rank comes to before the message, and the other behind it.
  Op reduce = op(OpKind::all_reduce, {whole(p, buffer_c)}, {whole(p, buffer_c)});
  reduce.group = 0, reduce.name = "sum";
  const Op there = message(p, "out", buffer_a, -1, {1}), here = message(p, "in", -1, buffer_b, {1});
  CHECK(faults_of(ring_of({with_memory(p, {reduce, there}), with_memory(p, {reduce, here})})) == "");
  CHECK(
      faults_of(ring_of({with_memory(p, {reduce, there}), with_memory(p, {here, reduce})})) ==
      "phase work, block work: ranks wait for one another for ever: rank 0 stream compute, all_reduce 'sum', for rank "
      "1 stream compute; rank 1 stream compute, recv 'in', for rank 0 stream compute\n");
}

TEST_CASE("Pairs: what waits for an event waits for who records it") {
  // Each rank hands on what it gets: b comes on one stream and goes on the other, which waits for it. Rank 0 receives
  // on compute, rank 1 on gather. A fresh one begins by sending a, which it has.
  const Program p = four_buffers();
  const auto hands_on = [&](StreamId from, StreamId to, bool fresh) {
    const Op in = message(p, "in", -1, buffer_b, {1}, true, from),
             out = message(p, "out", fresh ? buffer_a : buffer_b, -1, {1}, true, to);
    const bool waits = !fresh || to != streams::compute;
    std::vector<Op> ops = {event(OpKind::record, streams::compute, 0), event(OpKind::wait, streams::gather, 0),
                           memory(OpKind::alloc, buffer_a), memory(OpKind::alloc, buffer_b),
                           op(OpKind::zero, {}, {whole(p, buffer_a)})};
    if (!fresh) ops.push_back(in);
    if (waits) ops.push_back(event(OpKind::record, fresh ? streams::compute : from, 1));
    if (waits) ops.push_back(event(OpKind::wait, to, 1));
    ops.push_back(out);
    if (fresh) ops.push_back(in);
    ops.push_back(event(OpKind::record, streams::gather, 2));
    ops.push_back(event(OpKind::wait, streams::compute, 2));
    for (BufferId id : {buffer_a, buffer_b}) ops.push_back(memory(OpKind::free, id));
    return ops;
  };
  const auto verdict = [&](bool first_fresh, bool second_fresh) {
    return faults_of(ring_of({hands_on(streams::compute, streams::gather, first_fresh),
                              hands_on(streams::gather, streams::compute, second_fresh)}));
  };
  CHECK(verdict(false, false) ==
        "phase work, block work: ranks wait for one another for ever: rank 0 stream compute, recv 'in', for rank 1 "
        "stream compute; rank 1 stream compute, an event, for rank 1 stream gather; rank 1 stream gather, recv 'in', "
        "for rank 0 stream gather; rank 0 stream gather, an event, for rank 0 stream compute\n");
  CHECK(verdict(true, false) == "");
  CHECK(verdict(false, true) == "");
  CHECK(verdict(true, true) == "");
}
