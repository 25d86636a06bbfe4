#include "graph/plan.h"

#include <catch2/catch.hpp>
#include <functional>
#include <set>

#include "programs.h"

using namespace hotbunk;
using namespace hotbunk::test;

namespace {

/// A plan in which every field of every type says something.
Plan full_plan() {
  Program p = test::empty_program();
  p.buffers = {scratch("a", 16, 64), scratch("b", 16, 128)};
  p.num_events = 3;
  Op o = op(OpKind::copy_boxes, {tensor(0, DType::f32, {tokens(8, 4), fixed(2)}, 4)}, {whole(p, 1)});
  o.name = "copy";
  o.attrs = {{Attr::eps, 0.5}, {Attr::heads, std::int64_t{4}}};
  o.moves = {{{0, {1, 2, 3, 4, 5, 6}, {Holds::mine, 0, 2, 1, 5, 6, 7, 8, {0, 2, 1, 3, 4, 9}}},
              {0, {9, 10, 11, 12, 13, 14}, {}}}};
  Plan plan = plan_of(p, {o}, 4096);
  plan.scenario = "name";
  plan.device_capacity_bytes = 1 << 20;
  plan.host_capacity_bytes = 1 << 21;
  plan.overhead_bytes = 7;
  plan.groups = {{"fsdp", {{0, 1}, {2}}}};
  plan.program_of_rank = {0, 0, 0};
  return plan;
}

}  // namespace

TEST_CASE("The hash of a plan changes with every field") {
  using Change = std::function<void(Plan&)>;
  const std::vector<Change> changes = {
      [](Plan& p) { p.scenario += "x"; },
      [](Plan& p) { p.chunk_bytes *= 2; },
      [](Plan& p) { ++p.device_capacity_bytes; },
      [](Plan& p) { ++p.overhead_bytes; },
      [](Plan& p) {
        p.extents.push_back({"routed", 8});
      },
      [](Plan& p) {
        p.extents.push_back({"kept", 8});
      },
      [](Plan& p) {
        p.extents.push_back({"routed", 9});
      },
      [](Plan& p) {
        p.extents.push_back({"routed", 8, CountedBy::device});
      },
      [](Plan& p) { p.groups[0].name = "tp"; },
      [](Plan& p) {
        p.groups[0].groups = {{0}, {1, 2}};
      },
      [](Plan& p) {
        p.groups.push_back({"world", {}});
      },
      [](Plan& p) { p.phases[1].name = "rest"; },
      [](Plan& p) { p.phases[1].when = When::epilogue; },
      [](Plan& p) { p.phases[1].driven = true; },
      [](Plan& p) { p.program_of_rank.push_back(0); },
      [](Plan& p) { p.program_of_rank[1] = 1; },
      [](Plan& p) { p.programs.push_back(p.programs[0]); },
      [](Plan& p) { p.programs[0].buffers[0].name = "c"; },
      [](Plan& p) { p.programs[0].buffers[0].dtype = DType::i32; },
      [](Plan& p) { ++p.programs[0].buffers[0].elements; },
      [](Plan& p) { p.programs[0].buffers[0].category = Category::grads; },
      [](Plan& p) { p.programs[0].buffers[0].section = sections::kv_cache; },
      [](Plan& p) { p.programs[0].buffers[0].offset += 64; },
      [](Plan& p) { p.programs[0].sections[2].bytes += 4096; },
      [](Plan& p) { ++p.programs[0].num_events; },
      [](Plan& p) { p.programs[0].phases[1][0].name = "other"; },
      [](Plan& p) { p.programs[0].phases[1][0].enters = Enters::awake; },
      [](Plan& p) { p.programs[0].phases[1][0].section = sections::kv_cache; },
      [](Plan& p) {
        p.programs[0].phases[1].push_back({"more", {}});
      },
      [](Plan& p) {
        EditedOps ops = work(p);
        ops.push_back(Op(ops[0]));
      },
      [](Plan& p) { work(p)[0].kind = OpKind::copy; },
      [](Plan& p) { work(p)[0].stream = streams::host; },
      [](Plan& p) { work(p)[0].name = "copx"; },
      [](Plan& p) {
        EditedOps ops = work(p);
        ops[0].inputs.push_back(ops[0].inputs[0]);
      },
      [](Plan& p) { work(p)[0].outputs.clear(); },
      [](Plan& p) {
        EditedOps ops = work(p);
        std::swap(ops[0].inputs, ops[0].outputs);
      },
      [](Plan& p) { work(p)[0].inputs[0].buffer = 1; },
      [](Plan& p) { work(p)[0].inputs[0].offset_bytes = 0; },
      [](Plan& p) { work(p)[0].inputs[0].dtype = DType::i32; },
      [](Plan& p) { work(p)[0].inputs[0].rank = 1; },
      [](Plan& p) { work(p)[0].inputs[0].shape[0].size = 7; },
      [](Plan& p) { work(p)[0].inputs[0].shape[0].extent = seqs_extent; },
      [](Plan& p) { work(p)[0].inputs[0].shape[0].extent = fixed_extent; },
      [](Plan& p) { work(p)[0].inputs[0].shape[0].begin = 0; },
      [](Plan& p) { work(p)[0].attrs[0].first = Attr::beta1; },
      [](Plan& p) { work(p)[0].attrs[0].second = 0.25; },
      [](Plan& p) { work(p)[0].attrs[1].second = std::int64_t{5}; },
      [](Plan& p) { work(p)[0].attrs[1].second = 4.0; },  // another type of the same value
      [](Plan& p) {
        EditedOps ops = work(p);
        std::swap(ops[0].attrs[0], ops[0].attrs[1]);
      },
      [](Plan& p) { ++work(p)[0].moves[0].from.piece.row_begin; },
      [](Plan& p) { ++work(p)[0].moves[0].from.piece.row_end; },
      [](Plan& p) { ++work(p)[0].moves[0].from.piece.col_begin; },
      [](Plan& p) { ++work(p)[0].moves[0].from.piece.col_end; },
      [](Plan& p) { ++work(p)[0].moves[0].from.piece.offset; },
      [](Plan& p) { ++work(p)[0].moves[0].from.piece.pitch; },
      [](Plan& p) { ++work(p)[0].moves[0].to.piece.row_begin; },
      [](Plan& p) { ++work(p)[0].moves[0].to.piece.row_end; },
      [](Plan& p) { ++work(p)[0].moves[0].to.piece.col_begin; },
      [](Plan& p) { ++work(p)[0].moves[0].to.piece.col_end; },
      [](Plan& p) { ++work(p)[0].moves[0].to.piece.offset; },
      [](Plan& p) { ++work(p)[0].moves[0].to.piece.pitch; },
      [](Plan& p) { ++work(p)[0].moves[0].from.parts.family; },
      [](Plan& p) { ++work(p)[0].moves[0].from.parts.count; },
      [](Plan& p) { ++work(p)[0].moves[0].from.parts.repeat; },
      [](Plan& p) { ++work(p)[0].moves[0].from.parts.rows; },
      [](Plan& p) { ++work(p)[0].moves[0].from.parts.cols; },
      [](Plan& p) { ++work(p)[0].moves[0].from.parts.pitch; },
      [](Plan& p) { ++work(p)[0].moves[0].from.parts.last_row; },
      [](Plan& p) { work(p)[0].moves[0].from.parts.who = Holds::every; },
      [](Plan& p) { work(p)[0].moves[0].from.parts.within = {}; },
      [](Plan& p) { ++work(p)[0].moves[0].from.parts.within.family; },
      [](Plan& p) { ++work(p)[0].moves[0].from.parts.within.count; },
      [](Plan& p) { ++work(p)[0].moves[0].from.parts.within.repeat; },
      [](Plan& p) { ++work(p)[0].moves[0].from.parts.within.rows; },
      [](Plan& p) { ++work(p)[0].moves[0].from.parts.within.cols; },
      [](Plan& p) { ++work(p)[0].moves[0].from.parts.within.last_row; },
      [](Plan& p) {
        work(p)[0].moves[0].from.parts.run = {-3, 2, 2};
      },
      [](Plan& p) {
        work(p)[0].moves[0].from.parts.run = {-2, 2, 2};
      },
      [](Plan& p) {
        work(p)[0].moves[0].from.parts.run = {-3, 3, 2};
      },
      [](Plan& p) {
        work(p)[0].moves[0].from.parts.run = {-3, 2, 3};
      },
      [](Plan& p) { ++work(p)[0].moves[0].from.tensor; },
      [](Plan& p) { ++work(p)[0].moves[0].to.tensor; },
      [](Plan& p) {
        EditedOps ops = work(p);
        std::swap(ops[0].moves[0].from, ops[0].moves[0].to);
      },
      [](Plan& p) { work(p)[0].moves.clear(); },
      [](Plan& p) { ++work(p)[0].group; },
      [](Plan& p) { ++work(p)[0].buffer; },
      [](Plan& p) { ++work(p)[0].event; },
      [](Plan& p) { work(p)[0].section = sections::kv_cache; },
      [](Plan& p) { work(p)[0].map_begin = 1; },
      [](Plan& p) { work(p)[0].map_end = 1; },
  };
  std::set<std::string> seen = {plan_hash(full_plan())};
  CHECK(plan_hash(full_plan()) == *seen.begin());
  for (std::size_t i = 0; i < changes.size(); ++i) {
    Plan plan = full_plan();
    changes[i](plan);
    INFO("change " << i);
    CHECK_FALSE(plan == full_plan());
    CHECK(seen.insert(plan_hash(plan)).second);
  }
}

TEST_CASE("Groups of a rank and phases by name") {
  const Plan plan = full_plan();
  CHECK(plan.group_of(0, 1) == std::vector<Rank>{0, 1});
  CHECK(plan.group_of(0, 2) == std::vector<Rank>{2});
  CHECK(plan.group_of(0, 9).empty());
  CHECK(plan.phase_index("work") == 1);
  CHECK(plan.phase_index("sleep") == -1);
}

TEST_CASE("Attributes: found, defaulted, missing") {
  const Plan plan = full_plan();
  const Op& o = plan.programs[0].bodies[1].ops[0];
  CHECK(o.integer(Attr::heads) == 4);
  CHECK(o.real(Attr::eps) == 0.5);
  CHECK(o.integer(Attr::vocab, 9) == 9);
  CHECK_THROWS_WITH(o.integer(Attr::vocab), Catch::Matchers::Contains("copy_boxes 'copy' lacks attribute vocab"));
}

TEST_CASE("a plan's hash covers what is moved and when it is priced, never seconds, which may be measured ones") {
  Plan plan = two_ranks();
  Op& op = plan.programs[0].bodies[1].ops[1];
  op.prices = {{.tokens = 8, .seconds = 1.0, .seconds_per_pair = 0.5, .payload_bytes = 64.0}};
  const std::string hash = plan_hash(plan);
  op.prices[0].seconds = 2.0, op.prices[0].seconds_per_pair = 0.25;
  CHECK(plan_hash(plan) == hash);
  op.prices[0].payload_bytes = 65.0;
  CHECK(plan_hash(plan) != hash);
  op.prices[0].payload_bytes = 64.0, op.prices[0].tokens = 9;
  CHECK(plan_hash(plan) != hash);
}
