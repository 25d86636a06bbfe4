// Selective recomputation by module: what is run again is what the module made, and gradients are those of keeping it
// all.
#include <catch2/catch.hpp>
#include <set>
#include <string>
#include <vector>

#include "lowering/lower.h"
#include "tests/numerics/training_run.h"

using namespace hotbunk;
using namespace hotbunk::test;

namespace {

/// Kinds of the ops that backward runs again in any layer.
std::set<OpKind> recomputed_kinds(const Scenario& s) {
  const auto plan = lower(s);
  REQUIRE(plan);
  std::set<OpKind> out;
  for (const Program& p : plan->programs)
    for (const Body& body : p.bodies)
      if (body.name.find("layer.recompute") != std::string::npos)
        for (const Op& op : body.ops) out.insert(op.kind);
  return out;
}

struct Recomputed {
  std::string model, modules;
  OpKind again;                     // runs again
  std::vector<OpKind> not_again{};  // does not
  std::int64_t ulysses = 1, tp = 1, ep = 1;
};

}  // namespace

TEST_CASE("what a module of selective recomputation drops is computed again, and gradients are the same to the bit") {
  using K = OpKind;
  for (const Recomputed& way : std::vector<Recomputed>{
           {"qwen3-norm", "core_attn", K::attention, {K::linear, K::swiglu, K::rms_norm}},
           {"qwen3-norm", "core_attn", K::attention, {K::linear}, 2},
           {"llama-gqa", "core_attn", K::attention, {K::linear, K::rope}, 2},
           {"qwen3-norm", "mlp", K::linear, {K::attention}},
           {"qwen3-norm", "mlp_act", K::swiglu, {K::linear, K::rms_norm}, 1, 2},
           {"qwen3-norm", "layernorm", K::rms_norm, {K::linear, K::swiglu}},
           {"qwen3-norm", "layernorm-core_attn-mlp", K::attention},
           {"gpt2-tiny", "mlp", K::gelu, {K::attention}},
           {"gpt-oss-tiny", "core_attn-moe", K::grouped_linear},
           {"mixtral-tiny", "moe", K::grouped_linear, {K::attention, K::rms_norm}},
           {"mixtral-tiny", "moe", K::grouped_linear, {K::attention}, 1, 2, 2},
           {"mixtral-tiny", "moe_act", K::swiglu, {K::grouped_linear, K::route}},
           {"deepseek-v3-tiny", "core_attn", K::attention, {K::grouped_linear}},
           {"deepseek-v3-tiny", "mla_up_proj", K::linear, {K::grouped_linear}},
           {"deepseek-v3-tiny", "shared_experts", K::linear, {K::grouped_linear, K::attention}},
       }) {
    CAPTURE(way.model, way.modules, way.ulysses, way.tp, way.ep);
    const Golden g = Golden::load(way.model);
    Scenario s = golden_scenario(g, way.ulysses * way.tp);
    TrainLayout& l = s.train.layout;
    l.ulysses = way.ulysses, l.tp = way.tp, l.ep = way.ep, l.dp = 1;
    if (way.ep > 1) l.etp = 1;
    s.train.micro_batch_tokens = (g.num_tokens() + 3) / 4 * 4 / way.ulysses;
    const TrainingResult kept = train(g, s);
    s.train.recompute = Recompute::selective, s.train.recompute_modules = way.modules;
    const std::set<OpKind> kinds = recomputed_kinds(s);
    CHECK(kinds.contains(way.again));
    for (const OpKind k : way.not_again) CHECK_FALSE(kinds.contains(k));
    const TrainingResult again = train(g, s);
    CHECK(again.losses == kept.losses);
    CHECK(again.grad_norms == kept.grad_norms);
    for (const auto& [name, gradient] : kept.probes) {
      CAPTURE(name);
      CHECK(again.probes.at(name) == gradient);
    }
  }
}
