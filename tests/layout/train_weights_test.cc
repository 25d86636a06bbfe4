#include "layout/train_weights.h"

#include <fmt/format.h>
#include <rapidcheck.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <map>

#include "base/check.h"
#include "layout/scenario_layout.h"
#include "models.h"

using namespace hotbunk;

namespace {

const UnitParam& param(const ShardedUnit& unit, ParamRole role) {
  for (const UnitParam& p : unit.params)
    if (p.role == role) return p;
  throw InternalError("no such parameter");
}

}  // namespace

TEST_CASE("FSDP units of a small Llama, by hand") {
  // World 4, rank 3. Embedding 37 x 24: ceil(37/4) = 10 rows each, rank 3 owns rows 30..37 (7 of 10).
  const std::vector<ShardedUnit> units = train_units(test::tiny_llama(), 1, 4, 3);
  REQUIRE(units.size() == 4);
  CHECK(units[0].name == "root");
  CHECK(units[0].layer == -1);
  CHECK((units[1].name == "lm_head" && units[1].layer == -1));
  CHECK(units[2].name == "layers.0");
  CHECK(units[3].layer == 1);

  const UnitParam& embedding = param(units[0], ParamRole::embedding);
  CHECK(embedding.shard == Range{30, 37});
  CHECK(embedding.padded_rows == 10);
  // Root: the embedding, 10*24 = 240 per rank, 37*24 = 888 whole.
  CHECK((units[0].shard_elements == 240 && units[0].full_elements == 888));
  CHECK(units[0].padding_elements() == 4 * 240 - 888);
  // Head: final norm (24 rows -> 6 each) and head, 6 + 10*24 = 246 per rank, 24 + 37*24 = 912 whole.
  CHECK((units[1].shard_elements == 246 && units[1].full_elements == 912));
  CHECK(param(units[1], ParamRole::final_norm).shard_offset == 0);
  CHECK(param(units[1], ParamRole::final_norm).cols == 1);
  CHECK(param(units[1], ParamRole::lm_head).full_offset == 24);

  // Layer: norm 24, q 32 x 24, k 8 x 24, v 8 x 24, o 24 x 32, norm 24, gate 40 x 24, up 40 x 24, down 24 x 40: all
  // extents divide by 4, so nothing is padded.
  CHECK(units[2].full_elements == 2 * 24 + 48 * 24 + 24 * 32 + 3 * 24 * 40);
  CHECK(units[2].padding_elements() == 0);
  CHECK(param(units[2], ParamRole::k_proj).shard == Range{6, 8});
}

TEST_CASE(
    "Learned positions are cut over tensor-parallel ranks as the vocabulary is; biases behind a sum are repeated") {
  const std::vector<ShardedUnit> units = train_units(test::tiny_gpt2(), 2, 1, 0);
  const UnitParam &table = param(units[0], ParamRole::embedding),
                  &positions = param(units[0], ParamRole::position_embedding);
  CHECK((table.rows == 19 && table.step.rows == 19));  // of 37
  CHECK((positions.rows == 8 && positions.whole_rows == 15 && positions.step.rows == 8 && positions.step.repeat == 1));
  CHECK(positions.full_offset == 19 * 24);
  CHECK(param(units[1], ParamRole::up_bias).step == TensorStep{.rows = 20});
  CHECK(param(units[1], ParamRole::down_bias).step.repeat == 2);
  CHECK(param(units[1], ParamRole::post_norm_bias).step.repeat == 2);
}

TEST_CASE("A vocabulary padded to a multiple: as many rows on each rank, whatever of them are tokens") {
  ModelSpec model = test::tiny_llama();  // 37 tokens
  model.vocab_multiple = 16;
  const std::vector<ShardedUnit> whole = train_units(model, 1, 5, 4), cut = train_units(model, 4, 1, 0);
  // 37 -> 48: 10 rows on each of 5 ranks, of which the last has 8.
  const UnitParam &table = param(whole[0], ParamRole::embedding), &head = param(whole[1], ParamRole::lm_head);
  CHECK((table.whole_rows == 37 && table.rows == 48 && table.padded_rows == 10 && table.shard == Range{40, 48}));
  CHECK(head.full_offset == 24);
  // Of 4 ranks each ceil(37/4) = 10 -> 16: the third has 5 tokens, the fourth none.
  const UnitParam& part = param(cut[0], ParamRole::embedding);
  CHECK((part.rows == 16 && part.step == TensorStep{.rows = 16}));
  // Who holds which tokens.
  Scenario s;
  s.model = model, s.train.layout.tp = 4;
  s.cluster.gpus_per_node = 4;
  const auto holdings = TrainHoldings::of(s);
  REQUIRE(holdings);
  const ParamSpec embedding = parameters_of(model)[0];
  std::vector<Range> rows;
  for (int rank = 0; rank < 4; ++rank)
    for (const Rectangle& box : holdings->held(embedding, rank)) rows.push_back(box.rows);
  CHECK(rows == std::vector<Range>{{0, 16}, {16, 32}, {32, 37}});
  s.train.layout.tp = 1, s.train.layout.dp = 4;
  rows.clear();
  for (int rank = 0; rank < 4; ++rank)
    for (const Rectangle& box : TrainHoldings::of(s)->held(embedding, rank)) rows.push_back(box.rows);
  CHECK(rows == std::vector<Range>{{0, 12}, {12, 24}, {24, 36}, {36, 37}});
}

TEST_CASE("A rank beyond the rows owns nothing of a parameter but keeps its padded space") {
  // k_proj of 8 rows over 5 ranks: 2 rows each, rank 4 owns none.
  const std::vector<ShardedUnit> units = train_units(test::tiny_llama(), 1, 5, 4);
  const UnitParam& k = param(units[2], ParamRole::k_proj);
  CHECK(k.shard.size() == 0);
  CHECK(k.padded_rows == 2);
  CHECK(param(units[2], ParamRole::v_proj).shard_offset == k.shard_offset + 2 * 24);
}

TEST_CASE("The unsharded unit holds packed [q; k; v], packed biases and packed [gate; up]") {
  ModelSpec model = test::tiny_qwen3();
  model.qkv_bias = true;
  for (const ShardedUnit& unit : train_units(model, 1, 3, 0)) {
    if (unit.layer < 0) continue;
    const auto follows = [&](ParamRole first, ParamRole second) {
      const UnitParam& a = param(unit, first);
      return a.full_offset + a.elements() == param(unit, second).full_offset && a.cols == param(unit, second).cols;
    };
    CHECK(follows(ParamRole::q_proj, ParamRole::k_proj));
    CHECK(follows(ParamRole::k_proj, ParamRole::v_proj));
    CHECK(follows(ParamRole::q_bias, ParamRole::k_bias));
    CHECK(follows(ParamRole::k_bias, ParamRole::v_bias));
    CHECK(follows(ParamRole::gate_proj, ParamRole::up_proj));
  }
}

TEST_CASE(
    "A unit holds the gate and up matrices of all its experts as one stack, and the down projections as another") {
  // H = 24, I = 10 over tp 2: 5 rows of gate and of up, 24 x 5 of down.
  const ShardedUnit layer = train_units(test::tiny_mixtral(), 2, 3, 0)[2];
  std::vector<const UnitParam*> gate_up, down;
  for (const UnitParam& p : layer.params) {
    if (p.role == ParamRole::expert_gate || p.role == ParamRole::expert_up) gate_up.push_back(&p);
    if (p.role == ParamRole::expert_down) down.push_back(&p);
  }
  REQUIRE((gate_up.size() == 8 && down.size() == 4));
  const std::int64_t first = gate_up.front()->full_offset;
  for (std::size_t i = 0; i < gate_up.size(); ++i) {
    CHECK(gate_up[i]->parameter ==
          fmt::format("model.layers.0.block_sparse_moe.experts.{}.{}.weight", i / 2, i % 2 == 0 ? "w1" : "w3"));
    CHECK(gate_up[i]->full_offset == first + static_cast<std::int64_t>(i) * 5 * 24);
    CHECK(gate_up[i]->step == TensorStep{.rows = 5});
  }
  for (std::size_t e = 0; e < down.size(); ++e) {
    CHECK(down[e]->full_offset == first + 8 * 5 * 24 + static_cast<std::int64_t>(e) * 24 * 5);
    CHECK(down[e]->step == TensorStep{.cols = 5});
  }
}

TEST_CASE("Whole experts over two ranks: two share each place, and the parameter's rows follow from the rank's") {
  // 4 experts over 2 ranks: 0 and 2, 1 and 3.
  const ShardedUnit layer = train_units(test::tiny_mixtral(), 2, 3, 0, ExpertMesh{.places = 2, .wholes = 2})[2];
  std::int64_t elements = 0;
  for (const UnitParam& p : layer.params) {
    if (p.has_place()) elements += p.elements();
    if (p.expert < 0) continue;
    const UnitParam& first = *std::ranges::find_if(
        layer.params, [&](const UnitParam& q) { return q.role == p.role && q.expert == p.expert % 2; });
    CHECK((p.rows == p.whole_rows && p.cols == p.whole_cols));
    CHECK((p.base.row == p.expert / 2 * p.whole_rows && p.base.col == 0));
    CHECK(p.rows_of_all() == 2 * p.whole_rows);
    CHECK(p.step == TensorStep{.rows = p.whole_rows});
    CHECK((p.full_offset == first.full_offset && p.shard_offset == first.shard_offset));
  }
  CHECK(layer.full_elements == elements);
}

TEST_CASE("Whole experts over data ranks: fewer shards of each, behind what all ranks share") {
  // 4 experts over 2 of 4 data ranks: 0 and 2, 1 and 3, each in 2 shards; 2 tensor-parallel ranks have half of each.
  const ShardedUnit layer = train_units(test::tiny_mixtral(), 2, 4, 3, ExpertMesh{.places = 2, .spread = 2})[2];
  std::int64_t shared = 0, experts = 0;
  for (const UnitParam& p : layer.params) {
    if (!p.has_place()) continue;
    (p.expert < 0 ? shared : experts) += p.padded_elements();
    CHECK(p.apart == (p.expert >= 0));
    CHECK((p.expert < 2 && (p.expert < 0) == (p.shard_offset < layer.shared.shard_elements)));
    CHECK(p.padded_rows == ceil_div(p.rows, p.expert < 0 ? 4 : 2));
    if (p.expert >= 0) CHECK(p.shard == chunk_range(p.rows, 2, 1));
  }
  CHECK((layer.shared.shard_elements == shared && layer.experts.shard_elements == experts));
  CHECK((layer.shared.shards == 4 && layer.experts.shards == 2));
  CHECK(layer.shard_elements == shared + experts);
  CHECK(layer.padding_elements() == 4 * shared + 2 * experts - layer.full_elements);
  for (const UnitParam& p : layer.params) {
    if (p.expert < 0) continue;
    // Pieces of all four holders follow one another: of one rank's the first half, then the second, then the next's.
    const bool down = p.role == ParamRole::expert_down;
    CHECK(p.step == (down ? TensorStep{.cols = p.whole_cols / 2} : TensorStep{.rows = p.whole_rows / 2}));
    CHECK(p.base.row == (down ? 0 : p.expert / 2 * p.whole_rows));
    CHECK(p.base.col == (down ? p.expert / 2 * p.whole_cols : 0));
    CHECK(p.rows_of_all() == (down ? 1 : 2) * p.whole_rows);
  }
  // Nothing sharded: each has its experts whole, and nothing is padded.
  const ShardedUnit whole = train_units(test::tiny_mixtral(), 1, 1, 0, ExpertMesh{.spread = 4})[2];
  CHECK((whole.experts.shards == 1 && whole.padding_elements() == 0));
  CHECK(whole.full_elements < train_units(test::tiny_mixtral(), 1, 1, 0)[2].full_elements);
}

TEST_CASE("Sizes of Qwen2.5-7B units") {
  // BACKGROUND I: 7,615,616,512 parameters; a layer unit is 0.47 GB, and what is outside of layers 2.2 GB in bf16.
  const std::vector<ShardedUnit> units = train_units(test::qwen2_5_7b(), 1, 8, 0);
  std::int64_t total = 0;
  for (const ShardedUnit& unit : units) total += unit.full_elements;
  CHECK(total == 7'615'616'512);
  CHECK(units[2].full_elements * 2 / 1e9 == Approx(0.47).epsilon(0.01));
  CHECK((units[0].full_elements + units[1].full_elements) * 2 / 1e9 == Approx(2.18).epsilon(0.01));
}

TEST_CASE("FSDP shards tile every parameter exactly, whatever the world size") {
  REQUIRE(rc::check("tiling", [] {
    ModelSpec model = *rc::gen::element(test::tiny_llama(), test::tiny_qwen3());
    model.vocab = *rc::gen::inRange(1, 60);
    model.intermediate = *rc::gen::inRange(1, 50);
    const std::int64_t world = *rc::gen::inRange(1, 70);  // beyond every extent: empty shards too
    std::map<std::string, std::int64_t> next_row;
    std::map<std::string, std::int64_t> rows;
    for (std::int64_t rank = 0; rank < world; ++rank) {
      for (const ShardedUnit& unit : train_units(model, 1, world, rank)) {
        std::int64_t shard = 0, full = 0;
        for (const UnitParam& p : unit.params) {
          RC_ASSERT(p.shard.begin == next_row[p.parameter]);  // ranks own consecutive rows
          next_row[p.parameter] = p.shard.end;
          rows[p.parameter] = p.rows;
          RC_ASSERT(p.shard.size() <= p.padded_rows);
          RC_ASSERT(p.shard_offset == shard);
          RC_ASSERT(p.full_offset == full);
          shard += p.padded_elements();
          full += p.elements();
        }
        RC_ASSERT(unit.shard_elements == shard);
        RC_ASSERT(unit.full_elements == full);
        RC_ASSERT(unit.padding_elements() == world * shard - full);
        RC_ASSERT(unit.padding_elements() >= 0);
      }
    }
    RC_ASSERT(next_row == rows);
    std::int64_t listed = 0;
    for (const ParamSpec& p : parameters_of(model)) {
      RC_ASSERT(rows.at(p.name) == p.shape[0]);
      ++listed;
    }
    RC_ASSERT(listed == static_cast<std::int64_t>(rows.size()));
  }));
}

TEST_CASE("Stages have the model's units between them, and a tied table twice") {
  for (const bool tied : {false, true}) {
    ModelSpec model = test::tiny_llama();
    model.tie_embeddings = tied;
    std::map<std::string, std::int64_t> held;
    const std::vector<ShardedUnit> first = train_units(model, {{{0, 1}}, true, false}, 1, 2, 0),
                                   last = train_units(model, {{{1, 2}}, false, true}, 1, 2, 0);
    for (const auto* units : {&first, &last})
      for (const ShardedUnit& unit : *units)
        for (const UnitParam& p : unit.params) ++held[p.parameter];
    for (const ParamSpec& p : parameters_of(model)) {
      CAPTURE(p.name, tied);
      CHECK(held[p.name] == (tied && p.role == ParamRole::embedding ? 2 : 1));
    }
    CHECK(first[0].params.size() == 1);
    CHECK(first[1].name == "layers.0");
    CHECK(last[1].layer == 1);
  }
  // Between the ends there is no root.
  CHECK(train_units(test::tiny_llama(), {{{1, 2}}, false, false}, 1, 2, 0)[0].layer == 1);
}

TEST_CASE("A stage of several chunks has the layers of all, by their numbers in the model") {
  ModelSpec model = test::tiny_llama();
  model.layers = 7;
  const std::vector<ShardedUnit> units = train_units(model, {{{0, 2}, {4, 5}}, true, false}, 1, 2, 0);
  std::vector<int> layers;
  for (const ShardedUnit& unit : units) layers.push_back(unit.layer);
  CHECK(layers == std::vector{-1, 0, 1, 4});
  for (const UnitParam& p : units[3].params) CHECK_THAT(p.parameter, Catch::StartsWith("model.layers.4."));
}
