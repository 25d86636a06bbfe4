// What the verifier asks of ops between ranks and of parts: one conversation per group, parts that make a whole, moves
// that stay inside.
#include <algorithm>
#include <catch2/catch.hpp>
#include <functional>

#include "graph/verify.h"
#include "programs.h"
#include "tests/moves.h"

using namespace hotbunk;
using namespace hotbunk::test;
using Catch::Matchers::Contains;

namespace {

std::string first_fault(const std::function<void(Plan&)>& spoil) {
  Plan plan = two_ranks();
  spoil(plan);
  const auto faults = verify(plan);
  return faults.empty() ? "" : faults[0];
}

/// What is wrong when both ranks do `o`, a -> b of 16 elements each, between two families of two ranks.
std::string fault_of(const Op& o) {
  return first_fault([&](Plan& plan) {
    plan.groups.push_back({"other", {{0, 1}}});
    for (Program& p : plan.programs) {
      p.buffers.push_back(scratch("b", 16, 64));
      p.phases[1][0] = block_of(p, "work",
                                {memory(OpKind::alloc, 0), op(OpKind::zero, {}, {whole(p, 0)}),
                                 memory(OpKind::alloc, 1), o, memory(OpKind::free, 0), memory(OpKind::free, 1)});
    }
  });
}

Op between(OpKind kind, const Move& move, GroupId group = -1) {
  Op o = op(kind, {tensor(0, DType::f32, {fixed(16)})}, {tensor(1, DType::f32, {fixed(16)})});
  o.moves = {move};
  o.group = group;
  return o;
}

}  // namespace

TEST_CASE("All ranks of a group hold the same conversation") {
  const std::string expected = "group world: ranks 0 and 1 do not issue the same collectives in the same order";
  CHECK(first_fault([](Plan& p) { work(p, 1).remove(2); }) == expected);  // one call less
  CHECK(first_fault([](Plan& p) { work(p, 1)[2].kind = OpKind::broadcast; }) == expected);
  CHECK(first_fault([](Plan& p) {
          EditedOps ops = work(p, 1);
          ops[2].inputs[0].shape[0].size = ops[2].outputs[0].shape[0].size = 8;
        }) == expected);
  CHECK(first_fault([](Plan& p) { work(p, 1)[2].name = "another name"; }).empty());
}

TEST_CASE("No rank issues a collective with itself") {
  const auto alone = [](const std::function<void(Plan&)>& also) {
    return first_fault([&](Plan& p) {
      p.groups[0].groups = {{0}, {1}};
      also(p);
    });
  };
  const auto fault_of_rank = [](int rank) {
    return "group world: rank " + std::to_string(rank) +
           " issues all_reduce with nobody: leave it out where a group has one rank";
  };
  CHECK(alone([](Plan&) {}) == fault_of_rank(0));
  const auto silence = [](Plan& p, std::size_t rank) {
    EditedOps ops = work(p, rank);
    ops.remove(3), ops.remove(2);
  };
  CHECK(alone([&](Plan& p) { silence(p, 0); }) == fault_of_rank(1));
  CHECK(alone([&](Plan& p) { silence(p, 0), silence(p, 1); }).empty());
}

TEST_CASE("Parts make the whole, moves stay inside, a table has its rows") {
  CHECK_THAT(first_fault([](Plan& p) { work(p, 1)[2].inputs[0].shape[0].size = 8; }),
             Contains("all_reduce '' makes 16 elements of 8 over 2 ranks"));
  const auto shaped = [&](OpKind kind, std::int64_t in, std::int64_t out) {
    return first_fault([&](Plan& p) {
      for (Program& program : p.programs) {
        EditedOps ops(program, program.phases[1][0]);
        Op& o = ops[2];
        o.kind = kind;
        o.inputs[0].shape[0].size = in, o.outputs[0].shape[0].size = out;
      }
    });
  };
  CHECK(shaped(OpKind::all_gather, 8, 16).empty());
  CHECK_THAT(shaped(OpKind::all_gather, 8, 15), Contains("makes 15 elements of 8 over 2 ranks"));
  CHECK(shaped(OpKind::reduce_scatter, 16, 8).empty());
  CHECK_THAT(shaped(OpKind::reduce_scatter, 16, 7), Contains("makes 7 elements of 16 over 2 ranks"));
  const auto moved = [](const Box& box, const std::function<void(Move&)>& change = {}) {
    Move move = move_of(box);
    if (change) change(move);
    return fault_of(between(OpKind::copy_boxes, move));
  };
  CHECK(moved({.src_offset = 4, .src_pitch = 6, .dst_pitch = 8, .rows = 2, .cols = 6}).empty());  // 4 + 6 + 6 = 16
  CHECK_THAT(moved({.src_offset = 5, .src_pitch = 6, .dst_pitch = 8, .rows = 2, .cols = 6}),
             Contains("reads what is outside of tensor 0 with move 0"));
  CHECK_THAT(moved({.src_pitch = 6, .dst_offset = 3, .dst_pitch = 8, .rows = 2, .cols = 6}),
             Contains("writes what is outside of tensor 0 with move 0"));
  CHECK_THAT(moved({.rows = 1, .cols = 1, .input = 1}), Contains("reads no tensor with move 0"));
  CHECK_THAT(moved({.rows = -1, .cols = 1}), Contains("reads a piece of no rectangle with move 0"));
  // Four parts of two rows, six apart: the last one ends at 3 * 4 + 2 * 2 = 16.
  const Box two{.src_pitch = 2, .dst_pitch = 2, .rows = 2, .cols = 2};
  const auto every = [](std::int64_t pitch, std::int64_t last_row) {
    return [=](Move& m) {
      m.from.parts = {.who = Holds::every, .count = 4, .rows = 2, .pitch = pitch, .last_row = last_row, .within = {}};
    };
  };
  CHECK(moved(two, every(4, 8)).empty());
  CHECK_THAT(moved(two, every(5, 8)), Contains("reads what is outside of tensor 0"));
  CHECK(moved(two, every(6, 5)).empty());  // the third part has one row, the fourth none: 2 * 6 + 2 = 14
  CHECK_THAT(moved(two, every(8, 5)), Contains("reads what is outside of tensor 0"));
  CHECK_THAT(moved(two, [](Move& m) { m.from.parts = {.who = Holds::mine, .family = 7, .last_row = 2, .within = {}}; }),
             Contains("reads parts over family 7"));
  CHECK_THAT(
      moved(two, [](Move& m) { m.from.parts = {.who = Holds::every, .family = 7, .last_row = 2, .within = {}}; }),
      Contains("reads parts over family 7"));
  CHECK_THAT(moved(two, [](Move& m) { m.from.parts = {.who = Holds::every, .count = 0, .within = {}}; }),
             Contains("reads no parts"));
}

TEST_CASE("Peers are read by the op that can, over its own group") {
  // Eight elements of each of the two ranks' a, one after the other in b.
  const Parts halves{.who = Holds::peers, .family = 0, .count = 2, .rows = 8, .last_row = 16, .within = {}};
  const Move move{{0, {0, 8, 0, 1, 0, 1}, halves}, {0, {0, 16, 0, 1, 0, 1}, {}}};
  CHECK(fault_of(between(OpKind::peer_copy, move, 0)).empty());
  // A box names its peer by the place in the op's group: rows cut over another one would be read elsewhere.
  Move spoilt = move;
  spoilt.from.parts.family = 1;
  CHECK_THAT(fault_of(between(OpKind::peer_copy, spoilt, 0)),
             Contains("reads peers of family 1 with move 0, over group 0"));
  CHECK(fault_of(between(OpKind::peer_copy, spoilt, 1)).empty());
  CHECK_THAT(fault_of(between(OpKind::peer_copy, move, 1)),
             Contains("reads peers of family 0 with move 0, over group 1"));
  // One part more than there are ranks.
  spoilt = move;
  spoilt.from.parts.count = 3;
  CHECK_THAT(fault_of(between(OpKind::peer_copy, spoilt, 0)), Contains("moves 3 parts over groups of 2 in world"));
  // Other kinds take what they read, and every kind takes what it writes, for the rank's own memory.
  CHECK_THAT(fault_of(between(OpKind::copy_boxes, move)), Contains("takes peers' memory for its own with move 0"));
  CHECK_THAT(fault_of(between(OpKind::peer_copy, {move.to, move.from}, 0)),
             Contains("takes peers' memory for its own with move 0"));
}
