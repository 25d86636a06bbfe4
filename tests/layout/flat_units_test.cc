#include "layout/flat_units.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <rapidcheck.h>

#include <catch2/catch.hpp>
#include <map>
#include <string>
#include <vector>

#include "models.h"
#include "spec/wrapping.h"

using namespace hotbunk;

namespace {

WrapSpec by_size(std::int64_t least) { return {.policy = WrapPolicy::size, .min_parameters = least, .names = ""}; }
WrapSpec by_names(std::string names) {
  return {.policy = WrapPolicy::names, .min_parameters = 0, .names = std::move(names)};
}

/// "root 240+24 layers.0 …": units in order and their elements.
std::string units_text(const ModelSpec& model, const WrapSpec& wrap) {
  std::vector<std::string> out;
  for (const ShardedUnit& u : flat_units(model, wrap, 1)) out.push_back(fmt::format("{}={}", u.name, u.full_elements));
  return fmt::format("{}", fmt::join(out, " "));
}

}  // namespace

// The model of models.h: hidden 24, 8 query and 2 KV heads of 4, MLP of 40, vocabulary 37, 2 layers, untied. Embedding
// and head 37 x 24 = 888 each, a norm 24; attention (8 + 2 + 2) x 4 x 24 + 24 x 32 = 1,920, MLP 3 x 40 x 24 = 2,880; a
// layer 1,920 + 2,880 + 48 = 4,848.
TEST_CASE("policies wrap what PyTorch's would") {
  const ModelSpec model = test::tiny_llama();
  CHECK(units_text(model, {}) == "root=1800 layers.0=4848 layers.1=4848");
  // Nothing is large enough, or only the whole: then all is the root's.
  CHECK(units_text(model, by_size(1'000'000)) == "root=11496");
  // A layer is: what stands in it is not.
  CHECK(units_text(model, by_size(4'000)) == "root=1800 layers.0=4848 layers.1=4848");
  // An MLP is, and what is left of its layer (1,968) is not; what is left of the model, 888 + 24 + 2 x 1,968, is.
  CHECK(units_text(model, by_size(2'000)) == "root=888 model=4848 layers.0.mlp=2880 layers.1.mlp=2880");
  // Both are, and what is left of a layer, its norms (48), is not, nor what is left of the model (888 + 24 + 96): that
  // belongs to the root, with the head.
  CHECK(units_text(model, by_size(1'700)) ==
        "root=1896 layers.0.self_attn=1920 layers.0.mlp=2880 layers.1.self_attn=1920 layers.1.mlp=2880");
  CHECK(units_text(model, by_size(700)) ==
        "root=120 embed_tokens=888 lm_head=888 layers.0.self_attn=1920 layers.0.mlp=2880 layers.1.self_attn=1920 "
        "layers.1.mlp=2880");
  CHECK(units_text(model, by_names("model.layers.1-lm_head")) == "root=5760 lm_head=888 layers.1=4848");
  CHECK(units_text(model, by_names("*.mlp-*.0")) == "root=3768 layers.0=1968 layers.0.mlp=2880 layers.1.mlp=2880");
}

TEST_CASE("modules that may be units have a forward of their own, and nothing inside is multiplied with others") {
  CHECK(wrappable_modules(test::tiny_llama()) ==
        std::vector<std::string>{"model", "model.embed_tokens", "model.layers.0", "model.layers.0.self_attn",
                                 "model.layers.0.mlp", "model.layers.0.input_layernorm",
                                 "model.layers.0.post_attention_layernorm", "model.layers.1",
                                 "model.layers.1.self_attn", "model.layers.1.mlp", "model.layers.1.input_layernorm",
                                 "model.layers.1.post_attention_layernorm", "model.norm", "lm_head"});
  const auto modules = wrappable_modules(test::tiny_mixtral());
  CHECK(std::ranges::count(modules, "model.layers.1.block_sparse_moe") == 1);
  CHECK(std::ranges::count(wrappable_modules(test::tiny_gpt2()), "transformer.h.0.attn") == 1);
}

TEST_CASE("flat units have every parameter once, back to back, and are cut into equal parts") {
  for (const ModelSpec& model : {test::tiny_llama(), test::tiny_mixtral(), test::tiny_gpt2()})
    CHECK(rc::check("tiles", [&] {
      const WrapSpec wrap = *rc::gen::element(WrapSpec{}, by_size(1), by_size(*rc::gen::inRange(1, 6000)),
                                              by_names("*attn*-*.1"), by_names("*"));
      const std::int64_t world = *rc::gen::inRange<std::int64_t>(1, 9);
      std::map<std::string, int> seen;
      for (const ShardedUnit& unit : flat_units(model, wrap, world)) {
        std::int64_t at = 0;
        for (const UnitParam& p : unit.params) {
          ++seen[p.parameter];
          RC_ASSERT(p.full_offset == at);
          RC_ASSERT(unit.layer < 0 || p.layer == unit.layer);
          at += p.elements();
        }
        RC_ASSERT(unit.full_elements == at);
        RC_ASSERT(unit.flat == (world > 1));
        RC_ASSERT(world * unit.shard_elements >= at);
        RC_ASSERT(world * (unit.shard_elements - 1) < at);
        RC_ASSERT(unit.padding_elements() == world * unit.shard_elements - at);
        RC_ASSERT(unit.padding_elements() < world);
      }
      const auto parameters = parameters_of(model);
      RC_ASSERT(seen.size() == parameters.size());
      for (const ParamSpec& p : parameters) RC_ASSERT(seen[p.name] == 1);
    }));
}

TEST_CASE("experts that lie apart are flat parameters of their own, cut over the ranks that have the same ones") {
  // 4 experts of 3 * 10 * 24 = 720 in each of 2 layers, over 6 data ranks of which 2 have other ones each: a rank has 2
  // experts of a layer, of which 3 ranks have a third each.
  const ModelSpec model = test::tiny_mixtral();
  const std::vector<ShardedUnit> units =
      flat_units(model, WrapSpec{}, {.layers = {{0, model.layers}}}, 1, 6, {.spread = 2});
  std::vector<std::string> names;
  for (const ShardedUnit& u : units) names.push_back(u.name);
  CHECK(names == std::vector<std::string>{"root", "layers.0", "layers.0.experts", "layers.1", "layers.1.experts"});
  for (const ShardedUnit& u : units) {
    const bool experts = u.name.ends_with(".experts");
    CAPTURE(u.name);
    CHECK(std::ranges::all_of(u.params, [&](const UnitParam& p) { return p.apart == experts; }));
    CHECK(u.only_region().shards == (experts ? 3 : 6));
    if (!experts) continue;
    CHECK((u.full_elements == 2 * 720 && u.shard_elements == 480 && u.shared.full_elements == 0));
    CHECK((u.flat && u.layer == (u.name == "layers.0.experts" ? 0 : 1) && u.kind == units[2].kind));
  }
}

TEST_CASE("stages of a pipeline over tensor-parallel ranks have every parameter in units of their own") {
  for (ModelSpec model : {test::tiny_llama(), test::tiny_qwen3(), test::tiny_mixtral()})
    CHECK(rc::check("tiles", [&] {
      const WrapSpec wrap = *rc::gen::element(WrapSpec{}, by_size(1), by_size(*rc::gen::inRange(1, 6000)),
                                              by_names("*attn*-*.1"), by_names("model"));
      const std::int64_t world = *rc::gen::inRange<std::int64_t>(2, 6), tp = *rc::gen::element<std::int64_t>(1, 2);
      std::map<std::string, int> seen;
      std::vector<std::pair<std::int64_t, std::int64_t>> tables;  // of a tied embedding: elements, and of each shard
      for (const StagePart& part : {StagePart{{{0, 1}}, true, false}, StagePart{{{1, 2}}, false, true}})
        for (const ShardedUnit& unit : flat_units(model, wrap, part, tp, world, {.places = tp})) {
          std::int64_t at = 0;
          for (const UnitParam& p : unit.params) {
            ++seen[p.parameter];
            RC_ASSERT(p.full_offset == at);
            RC_ASSERT(p.layer == unit.layer);  // none spans layers, which stages share out
            RC_ASSERT(p.elements() * (p.step.repeat == 1 ? tp : 1) >= p.whole_rows * p.whole_cols);
            at += p.elements();
            if (p.role != ParamRole::embedding || !model.tie_embeddings) continue;
            RC_ASSERT(unit.params.size() == std::size_t{1});
            tables.emplace_back(unit.full_elements, unit.shard_elements);
          }
          RC_ASSERT(unit.full_elements == at);
          RC_ASSERT(unit.padding_elements() == world * unit.shard_elements - at);
          RC_ASSERT(unit.padding_elements() < world);
        }
      RC_ASSERT(tables.size() == (model.tie_embeddings ? std::size_t{2} : std::size_t{0}));
      RC_ASSERT((tables.empty() || tables[0] == tables[1]));
      for (const ParamSpec& p : parameters_of(model))
        RC_ASSERT(seen[p.name] == (p.role == ParamRole::embedding && model.tie_embeddings ? 2 : 1));
    }));
}
