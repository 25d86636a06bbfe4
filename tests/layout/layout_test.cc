#include "layout/layout.h"

#include <rapidcheck.h>

#include <catch2/catch.hpp>
#include <map>

#include "base/check.h"
#include "layout/megatron_weights.h"
#include "layout/rollout_weights.h"
#include "layout/train_weights.h"
#include "models.h"
#include "spec/family.h"

using namespace hotbunk;

namespace {

const ParamSpec& find(const std::vector<ParamSpec>& parameters, ParamRole role, int layer, int expert = -1) {
  for (const ParamSpec& p : parameters)
    if (p.role == role && p.layer == layer && p.expert == expert) return p;
  throw InternalError("no such parameter");
}

ModelSpec tiny_moe() {
  ModelSpec m = test::tiny_llama();
  m.name = "tiny-moe";
  m.family = find_family("qwen3_moe");
  m.moe = MoeSpec{};
  m.moe->experts = 8, m.moe->experts_per_token = 2, m.moe->expert_intermediate = 12;
  return m;
}

// How many ranks hold each element of a parameter.
std::vector<int> copies(const Layout& layout, const ModelSpec& model, const ParamSpec& parameter) {
  const Rectangle all = whole(parameter);
  std::vector<int> count(static_cast<std::size_t>(all.elements()), 0);
  for (const std::vector<Rectangle>& boxes : holdings(layout, model, parameter)) {
    for (const Rectangle& box : boxes) {
      for (std::int64_t r = box.rows.begin; r < box.rows.end; ++r) {
        for (std::int64_t c = box.cols.begin; c < box.cols.end; ++c) {
          ++count.at(static_cast<std::size_t>(r * all.cols.end + c));
        }
      }
    }
  }
  return count;
}

bool is_key_value(ParamRole role) {
  return role == ParamRole::k_proj || role == ParamRole::v_proj || role == ParamRole::k_bias ||
         role == ParamRole::v_bias;
}

}  // namespace

TEST_CASE("FSDP2 holds what its units say; HSDP holds it once per replica") {
  const ModelSpec model = test::tiny_llama();
  const Layout fsdp = fsdp_layout(5), hsdp = fsdp_layout(5, 2);
  for (std::int64_t rank = 0; rank < 5; ++rank) {
    std::map<std::string, UnitParam> by_name;
    for (const ShardedUnit& unit : train_units(model, 1, 5, rank))
      for (const UnitParam& p : unit.params) by_name[p.parameter] = p;
    for (const ParamSpec& parameter : parameters_of(model)) {
      const Rectangle box = held_by(fsdp, model, parameter, rank);
      const UnitParam& unit_param = by_name.at(parameter.name);
      CHECK(box.elements() == unit_param.owned_elements());
      if (box.elements() > 0) CHECK(box.rows == unit_param.shard);
      CHECK(held_by(hsdp, model, parameter, rank + 5) == box);  // fsdp is the fast axis
    }
  }
}

TEST_CASE("Rollout layouts hold what the rollout's buffers say, in both engine orders") {
  ModelSpec model = test::tiny_llama();
  model.qkv_bias = true;
  const Layout contiguous = rollout_layout(4, 2), strided = rollout_layout(4, 2, EngineOrder::strided);
  for (std::int64_t tp_rank = 0; tp_rank < 4; ++tp_rank) {
    std::map<std::string, Rectangle> by_name;
    for (const LocalWeight& weight : rollout_weights(model, 4, tp_rank))
      for (const LocalWeight::Source& source : weight.sources) by_name[source.parameter] = box_of(source.piece);
    for (const ParamSpec& parameter : parameters_of(model)) {
      CHECK(held_by(contiguous, model, parameter, 4 + tp_rank) == by_name.at(parameter.name));
      CHECK(held_by(strided, model, parameter, 2 * tp_rank + 1) == by_name.at(parameter.name));
    }
  }
}

TEST_CASE("Megatron packs QKV by query group") {
  // 8 query heads, 2 KV heads of 4 rows. TP 1: two groups [4 query heads (16 rows); key; value]: 24 rows each.
  const LocalWeight one = megatron_qkv(test::tiny_llama(), 0, 1, 0);
  REQUIRE(one.sources.size() == 6);
  CHECK(one.rows == 48);
  CHECK(one.sources[1].piece == Piece{0, 4, 0, 24, 16 * 24, 24});
  CHECK(one.sources[2].parameter == "model.layers.0.self_attn.v_proj.weight");
  CHECK(one.sources[3].piece == Piece{16, 32, 0, 24, 24 * 24, 24});
  CHECK(one.sources[4].piece == Piece{4, 8, 0, 24, 40 * 24, 24});

  // TP 4: rank 3 holds query heads 6, 7 and shares KV head 1 with rank 2.
  const LocalWeight four = megatron_qkv(test::tiny_llama(), 0, 4, 3);
  REQUIRE(four.sources.size() == 3);
  CHECK(four.rows == 16);
  CHECK(four.sources[0].piece == Piece{24, 32, 0, 24, 0, 24});
  CHECK(four.sources[1].piece == Piece{4, 8, 0, 24, 8 * 24, 24});

  // BACKGROUND B3: fc1 of rank 1 of 2 is [gate rows 20..40; up rows 20..40].
  const LocalWeight fc1 = megatron_gate_up(test::tiny_llama(), 0, 2, 1);
  CHECK(fc1.sources.at(1).parameter == "model.layers.0.mlp.up_proj.weight");
  CHECK(fc1.sources.at(1).piece == Piece{20, 40, 0, 24, 20 * 24, 24});
}

TEST_CASE("BACKGROUND B2: 32 heads, 8 KV heads, TP 32: ranks 0, 4, 8, … contribute keys and values") {
  for (std::int64_t rank = 0; rank < 32; ++rank) CHECK(exports_key_value(8, 32, rank) == (rank % 4 == 0));
  for (std::int64_t rank = 0; rank < 4; ++rank) CHECK(exports_key_value(8, 4, rank));
}

TEST_CASE("Vocabulary parallel parts, padded as the rollout and as Megatron do") {
  // Qwen2.5: 152064 rows over 4: 38016 each. GPT-2's 50257 over 4: Megatron pads to a multiple of 128 * 4 = 50688, so
  // 12672 rows each and 50257 - 3 * 12672 = 12241 real ones on the last; without the multiple ceil(50257 / 4) = 12565.
  CHECK(part_of({0, 152064}, Placement::shard(0), 4, 3) == Range{114048, 152064});
  CHECK(part_of({0, 50257}, Placement::shard(0, 128), 4, 0) == Range{0, 12672});
  CHECK(part_of({0, 50257}, Placement::shard(0, 128), 4, 3) == Range{38016, 50257});
  CHECK(part_of({0, 50257}, Placement::shard(0), 4, 1) == Range{12565, 25130});
  // 1 row over 4 ranks: all but the first hold nothing.
  CHECK(part_of({0, 1}, Placement::shard(0), 4, 3).size() == 0);
  CHECK(part_of({3, 9}, Placement::replicate(), 4, 1) == Range{3, 9});
  CHECK(part_of({3, 9}, Placement::partial(), 4, 1) == Range{3, 9});
  CHECK_THROWS_AS(part_of({0, 12}, Placement::shard_blocks(0, 4), 2, 0), InternalError);  // 3 heads over 2 ranks
}

TEST_CASE("BACKGROUND B9: experts are consecutive on the expert-parallel ranks, each split over expert TP") {
  // 8 experts over EP 4: 2 each; global id = ep_rank * 2 + local. Expert 5 lives on ep rank 2, its 12 rows on 2 ETP
  // ranks.
  const ModelSpec model = tiny_moe();
  const std::vector<ParamSpec> parameters = parameters_of(model);
  const Layout layout{Mesh({{"tp", 4}, {"dp", 2}}), Mesh({{"etp", 2}, {"ep", 4}}), {}, 1};
  const ParamSpec& gate = find(parameters, ParamRole::expert_gate, 1, 5);
  const ParamSpec& down = find(parameters, ParamRole::expert_down, 1, 5);
  for (std::int64_t rank = 0; rank < 8; ++rank) {
    const Rectangle box = held_by(layout, model, gate, rank);
    if (rank / 2 != 2) CHECK(box.elements() == 0);
    else CHECK(box == Rectangle{{rank % 2 * 6, rank % 2 * 6 + 6}, {0, 24}});
  }
  CHECK(held_by(layout, model, down, 5) == Rectangle{{0, 24}, {6, 12}});
  CHECK(held_by(layout, model, find(parameters, ParamRole::router, 1), 6) == Rectangle{{0, 8}, {0, 24}});

  // 64 experts over EP 8 and 256 over EP 32: 8 each.
  for (const auto& [experts, ranks] : {std::pair{64, 8}, {256, 32}}) {
    ModelSpec wide = tiny_moe();
    wide.moe->experts = experts;
    const std::vector<ParamSpec> of_wide = parameters_of(wide);
    const Layout spread{Mesh({{"tp", 1}, {"dp", ranks}}), Mesh({{"etp", 1}, {"ep", ranks}}), {}, 1};
    CAPTURE(experts, ranks);
    for (int e = 0; e < experts; ++e)
      for (std::int64_t rank = 0; rank < ranks; ++rank)
        CHECK((held_by(spread, wide, find(of_wide, ParamRole::expert_up, 1, e), rank).elements() > 0) ==
              (e / 8 == rank));
  }
}

TEST_CASE("Pipeline stages hold their layers, the ends hold embedding and head, a tied embedding both") {
  const ModelSpec model = test::tiny_qwen3();
  const std::vector<ParamSpec> parameters = parameters_of(model);
  PipelineSplit split;
  split.layers = 2, split.stages = 2;
  const Mesh mesh({{"tp", 1}, {"pp", 2}});
  const Layout layout{mesh, mesh, split_pipeline(split).value(), 1};
  const auto ranks_with = [&](ParamRole role, int layer) {
    std::vector<int> ranks;
    for (int rank = 0; rank < 2; ++rank)
      if (held_by(layout, model, find(parameters, role, layer), rank).elements() > 0) ranks.push_back(rank);
    return ranks;
  };
  CHECK(ranks_with(ParamRole::q_proj, 0) == std::vector<int>{0});
  CHECK(ranks_with(ParamRole::q_proj, 1) == std::vector<int>{1});
  CHECK(ranks_with(ParamRole::final_norm, -1) == std::vector<int>{1});
  CHECK(ranks_with(ParamRole::embedding, -1) == std::vector<int>{0, 1});
}

TEST_CASE("Every element is on exactly the number of ranks that its kind and the meshes say") {
  REQUIRE(rc::check("copies", [] {
    const bool experts = *rc::gen::arbitrary<bool>();
    ModelSpec model = experts ? tiny_moe() : *rc::gen::element(test::tiny_llama(), test::tiny_qwen3());
    model.layers = 4;
    model.vocab = *rc::gen::inRange(1, 50);
    model.kv_heads = *rc::gen::element(1, 2, 4, 8);
    const std::int64_t tp = *rc::gen::element(1, 2, 4, 8), fsdp = *rc::gen::inRange(1, 4), pp = *rc::gen::element(1, 2);
    const std::int64_t dp = *rc::gen::inRange(1, 3);
    const std::int64_t etp = *rc::gen::element(1, tp), ep = tp / etp;  // the same product, so the meshes agree
    PipelineSplit split;
    split.layers = 4, split.stages = pp, split.chunks = *rc::gen::element(1, 2);
    const Layout layout{Mesh({{"tp", tp}, {"fsdp", fsdp}, {"dp", dp}, {"pp", pp}}),
                        Mesh({{"etp", etp}, {"ep", ep}, {"fsdp", fsdp}, {"dp", dp}, {"pp", pp}}),
                        split_pipeline(split).value(), *rc::gen::element(1, 3)};
    RC_ASSERT(check_expert_mesh(layout.dense, layout.expert).has_value());
    for (const ParamSpec& parameter : parameters_of(model)) {
      std::int64_t expected = dp;
      if (is_key_value(parameter.role)) expected *= std::max<std::int64_t>(1, tp / model.kv_heads);
      else if (parameter.expert < 0 && tensor_parallel(parameter, model).empty()) expected *= tp;
      if (parameter.role == ParamRole::embedding && model.tie_embeddings) expected *= std::min<std::int64_t>(pp, 2);
      for (int count : copies(layout, model, parameter)) RC_ASSERT(count == expected);
    }
  }));
}
