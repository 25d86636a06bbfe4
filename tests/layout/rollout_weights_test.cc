#include "layout/rollout_weights.h"

#include <rapidcheck.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <map>

#include "base/check.h"
#include "models.h"

using namespace hotbunk;

namespace {

const LocalWeight& weight(const std::vector<LocalWeight>& weights, const std::string& name) {
  for (const LocalWeight& w : weights)
    if (w.name == name) return w;
  throw InternalError("no such buffer");
}

/// Whether a rank's piece is that of the first rank, its steps further and cut off at the parameter's end.
bool follows(const Piece& piece, const LocalWeight& first, const std::string& parameter, std::int64_t rank,
             std::int64_t rows) {
  for (const LocalWeight::Source& s : first.sources) {
    if (s.parameter != parameter) continue;
    const std::int64_t steps = rank / s.step.repeat;
    Piece moved = s.piece;
    moved.row_begin += steps * s.step.rows, moved.row_end = std::min(moved.row_end + steps * s.step.rows, rows);
    moved.col_begin += steps * s.step.cols, moved.col_end += steps * s.step.cols;
    return piece == moved;
  }
  return false;
}

}  // namespace

TEST_CASE("A rank of an engine has its columns of every expert, expert by expert") {
  // H = 24, E = 4, I = 10: of rank 1 of 2 rows 5 … 9 of gate and up, columns 5 … 9 of down.
  const std::vector<LocalWeight> all = rollout_weights(test::tiny_mixtral(), 2, 1);
  const auto named = [&](const char* name) {
    return *std::ranges::find(all, std::string("layers.1.") + name, &LocalWeight::name);
  };
  const LocalWeight router = named("router"), gate_up = named("experts_gate_up"), down = named("experts_down");
  CHECK((router.rows == 4 && router.cols == 24));
  CHECK((gate_up.rows == 4 * 2 * 5 && gate_up.cols == 24));
  CHECK((down.rows == 4 * 24 && down.cols == 5));
  REQUIRE((gate_up.sources.size() == 8 && down.sources.size() == 4));
  CHECK(gate_up.sources[5].parameter == "model.layers.1.block_sparse_moe.experts.2.w3.weight");
  CHECK(gate_up.sources[5].piece == Piece{5, 10, 0, 24, 5 * 5 * 24, 24});
  CHECK(gate_up.sources[5].step == TensorStep{.rows = 5});
  CHECK(down.sources[3].parameter == "model.layers.1.block_sparse_moe.experts.3.w2.weight");
  CHECK(down.sources[3].piece == Piece{0, 24, 5, 10, 3 * 24 * 5, 5});
  CHECK(down.sources[3].step == TensorStep{.cols = 5});
  CHECK(why_not_rollout_tp(test::tiny_mixtral(), 4) == "expert intermediate size 10 does not divide over tp 4");
  CHECK(why_not_rollout_tp(test::tiny_mixtral(), {.tp = 4, .experts = 4}).empty());
  CHECK(why_not_rollout_tp(test::tiny_mixtral(), {.tp = 4, .experts = 2}).empty());  // 5 columns on each of two
  CHECK(why_not_rollout_tp(test::tiny_mixtral(), {.tp = 8, .experts = 2}) ==
        "expert intermediate size 10 does not divide over etp 4");
  CHECK(why_not_rollout_tp(test::tiny_mixtral(), {.tp = 6, .experts = 3}) ==
        "4 experts over ep 3 of tp 6: both have to divide by it");
}

TEST_CASE("A rank of an engine with whole experts has some of them, in places that other ranks' have as well") {
  // E = 4 over 2 ranks: place 0 is expert 0's and 2's, place 1 expert 1's and 3's. The second of two stages: layer 1,
  // no embedding.
  const EngineCut cut{.tp = 2, .experts = 2, .stage = {.layers = {{1, 2}}, .first = false}};
  const std::vector<LocalWeight> all = rollout_weights(test::tiny_mixtral(), cut, 0);
  CHECK(std::ranges::none_of(all, [](const LocalWeight& w) { return w.name == "embedding" || w.layer == 0; }));
  CHECK((all.back().name == "lm_head" && all.front().layer == 1));
  const LocalWeight gate_up = weight(all, "layers.1.experts_gate_up"), down = weight(all, "layers.1.experts_down");
  CHECK((gate_up.rows == 2 * 2 * 10 && gate_up.cols == 24 && down.rows == 2 * 24 && down.cols == 10));
  REQUIRE((gate_up.sources.size() == 8 && down.sources.size() == 4));
  CHECK(gate_up.sources[7].parameter == "model.layers.1.block_sparse_moe.experts.3.w3.weight");
  CHECK((gate_up.sources[7].holder == 1 && gate_up.sources[3].holder == 0));
  CHECK(gate_up.sources[7].piece == gate_up.sources[3].piece);
  CHECK(gate_up.sources[7].piece == Piece{0, 10, 0, 24, 3 * 10 * 24, 24});
  CHECK((down.sources[2].holder == 1 && down.sources[2].piece == Piece{0, 24, 0, 10, 0, 10}));
}

TEST_CASE("A rank of an engine may have columns of some experts: two groups of two ranks") {
  // E = 4, I = 10, H = 24: ranks 0 and 1 share experts 0 and 1, ranks 2 and 3 have 2 and 3 in the same places.
  const std::vector<LocalWeight> all = rollout_weights(test::tiny_mixtral(), {.tp = 4, .experts = 2}, 3);
  const LocalWeight gate_up = weight(all, "layers.1.experts_gate_up"), down = weight(all, "layers.1.experts_down");
  CHECK((gate_up.rows == 2 * 2 * 5 && gate_up.cols == 24 && down.rows == 2 * 24 && down.cols == 5));
  REQUIRE((gate_up.sources.size() == 8 && down.sources.size() == 4));
  CHECK(gate_up.sources[6].parameter == "model.layers.1.block_sparse_moe.experts.3.w1.weight");
  CHECK((gate_up.sources[6].holder == 1 && gate_up.sources[2].holder == 0));
  CHECK(gate_up.sources[6].piece == Piece{5, 10, 0, 24, 2 * 5 * 24, 24});  // the second rank's half of place 1
  CHECK(gate_up.sources[6].step == TensorStep{.rows = 5});
  CHECK((down.sources[3].holder == 1 && down.sources[3].piece == Piece{0, 24, 5, 10, 24 * 5, 5}));
  CHECK(down.sources[3].step == TensorStep{.cols = 5});
}

TEST_CASE("A rank of an engine has its rows of learned positions, and of an MLP without a gate, by hand") {
  const std::vector<LocalWeight> all = rollout_weights(test::tiny_gpt2(), 2, 1);
  const LocalWeight& positions = weight(all, "position_embedding");
  CHECK((positions.rows == 8 && positions.cols == 24));
  CHECK(positions.sources.at(0).parameter == "transformer.wpe.weight");
  CHECK(positions.sources.at(0).piece == Piece{8, 15, 0, 24, 0, 24});
  CHECK(positions.sources.at(0).step == TensorStep{.rows = 8});
  // Query, key and value heads 3 … 5 of 4 rows each.
  const LocalWeight& qkv = weight(all, "layers.1.qkv");
  REQUIRE(qkv.sources.size() == 3);
  CHECK(qkv.sources[1].parameter == "transformer.h.1.attn.c_attn.k.weight");
  CHECK(qkv.sources[1].piece == Piece{12, 24, 0, 24, 12 * 24, 24});
  CHECK(weight(all, "layers.0.up").sources.at(0).piece == Piece{20, 40, 0, 24, 0, 24});
  CHECK(weight(all, "layers.0.up_bias").sources.at(0).piece == Piece{20, 40, 0, 1, 0, 1});
  CHECK(weight(all, "layers.0.down").sources.at(0).piece == Piece{0, 24, 20, 40, 0, 20});
  for (const char* whole : {"layers.0.down_bias", "layers.0.o_bias", "layers.1.input_norm_bias", "final_norm_bias"})
    CHECK(weight(all, whole).sources.at(0).piece == Piece{0, 24, 0, 1, 0, 1});
}

TEST_CASE("Rollout weights of a small Llama on rank 1 of 2, by hand") {
  // 8 query heads, 2 KV heads of 4 rows: rank 1 holds query heads 4..8 (rows 16..32) and KV head 1 (rows 4..8).
  const std::vector<LocalWeight> all = rollout_weights(test::tiny_llama(), 2, 1);
  const LocalWeight& qkv = weight(all, "layers.1.qkv");
  CHECK(qkv.rows == 16 + 4 + 4);
  CHECK(qkv.cols == 24);
  REQUIRE(qkv.sources.size() == 3);
  CHECK(qkv.sources[0].parameter == "model.layers.1.self_attn.q_proj.weight");
  CHECK(qkv.sources[0].piece == Piece{16, 32, 0, 24, 0, 24});
  CHECK(qkv.sources[1].piece == Piece{4, 8, 0, 24, 16 * 24, 24});
  CHECK(qkv.sources[2].piece == Piece{4, 8, 0, 24, 20 * 24, 24});

  // Output projection (24, 32) and down projection (24, 40): right column halves.
  const LocalWeight& o = weight(all, "layers.0.o");
  CHECK(o.rows == 24);
  CHECK(o.cols == 16);
  CHECK(o.sources.at(0).piece == Piece{0, 24, 16, 32, 0, 16});
  CHECK(weight(all, "layers.0.down").sources.at(0).piece == Piece{0, 24, 20, 40, 0, 20});

  // Gate and up (40, 24): rows 20..40 of each, one above the other (BACKGROUND B3).
  const LocalWeight& gate_up = weight(all, "layers.0.gate_up");
  CHECK(gate_up.rows == 40);
  CHECK(gate_up.sources.at(0).piece == Piece{20, 40, 0, 24, 0, 24});
  CHECK(gate_up.sources.at(1).parameter == "model.layers.0.mlp.up_proj.weight");
  CHECK(gate_up.sources.at(1).piece == Piece{20, 40, 0, 24, 20 * 24, 24});

  // Vocabulary 37 over 2: 19 rows each; rank 1 has 18 real ones.
  const LocalWeight& embedding = weight(all, "embedding");
  CHECK(embedding.rows == 19);
  CHECK(embedding.sources.at(0).piece == Piece{19, 37, 0, 24, 0, 24});
  CHECK(weight(all, "lm_head").sources.at(0).parameter == "lm_head.weight");
  CHECK(weight(all, "final_norm").cols == 1);
}

TEST_CASE("Fewer KV heads than ranks: each is held by tp / kv_heads ranks") {
  // 2 KV heads over 8 ranks: ranks 0..3 hold KV head 0, ranks 4..7 KV head 1; every rank one query head.
  for (std::int64_t rank = 0; rank < 8; ++rank) {
    const HeadRanges heads = heads_of_rank(test::tiny_llama(), 8, rank);
    CHECK(heads.query == Range{rank, rank + 1});
    CHECK(heads.key_value == Range{rank / 4, rank / 4 + 1});
  }
}

TEST_CASE("BACKGROUND B2: 32 heads, 8 KV heads, TP 4: rank 1 holds Q heads 8-15 and KV heads 2-3") {
  ModelSpec model = test::tiny_llama();
  model.heads = 32, model.kv_heads = 8;
  const HeadRanges heads = heads_of_rank(model, 4, 1);
  CHECK(heads.query == Range{8, 16});
  CHECK(heads.key_value == Range{2, 4});
}

TEST_CASE("Buffers that only some models have") {
  ModelSpec model = test::tiny_qwen3();
  model.qkv_bias = true;
  const std::vector<LocalWeight> all = rollout_weights(model, 2, 0);
  CHECK(weight(all, "layers.0.q_norm").rows == 4);
  CHECK(weight(all, "layers.0.qkv_bias").rows == 24);
  CHECK(weight(all, "layers.0.qkv_bias").cols == 1);
  CHECK_THROWS_AS(weight(all, "lm_head"), InternalError);  // tied
  CHECK_THROWS_AS(weight(rollout_weights(test::tiny_llama(), 2, 0), "layers.0.q_norm"), InternalError);
}

TEST_CASE("What cannot be split says why") {
  CHECK(why_not_rollout_tp(test::tiny_llama(), 8).empty());
  CHECK(why_not_rollout_tp(test::tiny_llama(), 3) == "8 attention heads do not divide over tp 3");
  ModelSpec model = test::tiny_llama();
  model.heads = 12, model.kv_heads = 6;
  CHECK(why_not_rollout_tp(model, 4) == "6 key/value heads neither divide over tp 4 nor divide it");
  model = test::tiny_llama();
  model.intermediate = 42;
  CHECK(why_not_rollout_tp(model, 4) == "intermediate size 42 does not divide over tp 4");
  CHECK_THROWS_AS(rollout_weights(model, 4, 0), InternalError);
}

TEST_CASE("Rollout ranks hold every element as often as its kind says, and fill their buffers") {
  REQUIRE(rc::check("tiling", [] {
    ModelSpec model = *rc::gen::element(test::tiny_llama(), test::tiny_qwen3());
    model.kv_heads = *rc::gen::element(1, 2, 4, 8);
    model.qkv_bias = *rc::gen::arbitrary<bool>();
    model.vocab = *rc::gen::inRange(1, 30);  // fewer rows than ranks included
    const std::int64_t tp = *rc::gen::element(1, 2, 4, 8);
    std::map<std::string, std::vector<int>> held;
    std::map<std::string, const ParamSpec*> specs;
    const std::vector<ParamSpec> parameters = parameters_of(model);
    for (const ParamSpec& p : parameters) {
      held[p.name].assign(static_cast<std::size_t>(p.numel()), 0);
      specs[p.name] = &p;
    }
    const std::vector<LocalWeight> of_first = rollout_weights(model, tp, 0);
    for (std::int64_t rank = 0; rank < tp; ++rank) {
      for (const LocalWeight& w : rollout_weights(model, tp, rank)) {
        std::vector<int> filled(static_cast<std::size_t>(w.elements()), 0);
        for (const auto& [parameter, piece, step, holder] : w.sources) {
          const LocalWeight& first = weight(of_first, w.name);
          RC_ASSERT(follows(piece, first, parameter, rank, specs.at(parameter)->shape[0]));
          const ParamSpec& spec = *specs.at(parameter);
          const std::int64_t cols = spec.shape.size() == 2 ? spec.shape[1] : 1;
          for (std::int64_t r = piece.row_begin; r < piece.row_end; ++r) {
            for (std::int64_t c = piece.col_begin; c < piece.col_end; ++c) {
              ++held[parameter].at(static_cast<std::size_t>(r * cols + c));
              ++filled.at(
                  static_cast<std::size_t>(piece.offset + (r - piece.row_begin) * piece.pitch + c - piece.col_begin));
            }
          }
        }
        const bool padded = w.name == "embedding" || w.name == "lm_head";
        for (int times : filled) RC_ASSERT(times == 1 || (padded && times == 0));
      }
    }
    for (const ParamSpec& p : parameters) {
      const bool key_value = p.role == ParamRole::k_proj || p.role == ParamRole::v_proj ||
                             p.role == ParamRole::k_bias || p.role == ParamRole::v_bias;
      const bool norm = p.shape.size() == 1 && p.role != ParamRole::q_bias && !key_value;
      const std::int64_t copies = norm ? tp : key_value ? std::max<std::int64_t>(1, tp / model.kv_heads) : 1;
      for (int times : held[p.name]) RC_ASSERT(times == copies);
    }
  }));
}
