#include "runtime/number_watch.h"

#include <catch2/catch.hpp>

#include "tests/blocks.h"

using namespace hotbunk;

TEST_CASE("Who moves numbers is not asked whether they are finite, who makes them is") {
  struct : Addresses {
    std::byte* address(const Tensor&) const override { return nullptr; }
  } nowhere;
  Program program;
  program.buffers = {{"w", DType::f32, 16, Category::params, sections::rollout_weights, 0}};
  int looked = 0;
  const FindNonFinite two = [&](const OpCall&, const Tensor&) {
    ++looked;
    return NonFinite{.count = 2, .first = 5};
  };
  const auto bad = [&](OpKind kind) {
    Tensor w{.buffer = 0, .dtype = DType::f32, .rank = 2};
    w.shape[0] = w.shape[1] = {4, fixed_extent, 0};
    Op op;
    op.kind = kind, op.inputs = op.outputs = {w};
    const Block block = test::block_of(program, "work", {op});
    const BoundOp bound{&program, &block, &block.calls[0], &program.bodies.back().ops[0]};
    return bad_output({nowhere, *bound, Sizes{}, Places{}, bound}, two);
  };
  // What prepack packs, the sync has copied, and the optimizer has made.
  for (const OpKind moves : {OpKind::prepack, OpKind::kv_write, OpKind::latent_write, OpKind::copy}) {
    INFO(name_of(moves));
    CHECK(bad(moves).empty());
  }
  CHECK(looked == 0);
  CHECK(bad(OpKind::add) == "2 NaN or infinite elements, the first at index 5 of 'w'");
  CHECK(looked == 1);
}
