// Gradients in bf16 (train.precision.grads): as near to exact arithmetic as torch's are, in every kind of layout; and
// among data ranks as near to gradients in fp32 as the roundings of their sums explain.
#include <catch2/catch.hpp>

#include "spec/stored_parameter.h"
#include "tests/numerics/training_run.h"

using namespace hotbunk;
using namespace hotbunk::test;

namespace {

Scenario in_bf16(const Golden& g, const TrainLayout& layout, TrainEngine engine) {
  Scenario s = golden_scenario(g, layout.ranks());
  s.train.engine = engine, s.train.layout = layout;
  s.train.precision.params = s.train.precision.grads = DType::bf16;
  s.train.micro_batch_tokens = layout.share_of(g.num_tokens());
  if (layout.pp > 1) s.train.pipeline_split = {1, g.model.layers - 1};
  if (g.model.moe) s.train.layout.etp = layout.tp;
  return s;
}

double worst_gradient(const Golden& g, const TrainingResult& r, const std::map<std::string, std::vector<float>>& to) {
  double worst = 0.0;
  for (const ParamSpec& p : parameters_of(g.model)) {
    const std::string name = "grad." + stored(g.model, p).tensor;
    CAPTURE(name);
    worst = std::max(worst, relative_error(r.probes.at(name), to.at(name)));
  }
  return worst;
}

/// Whether every number is one of bf16's.
bool is_bf16(const TrainingResult& r) {
  for (const auto& [name, values] : r.probes)
    for (const float x : values)
      if (name.starts_with("grad.") && to_f32(to_bf16(x)) != x) return false;
  return true;
}

}  // namespace

TEST_CASE("gradients in bf16 are as near to exact ones as torch's, in every kind of layout") {
  struct Way {
    TrainEngine engine;
    TrainLayout layout;
    const char* schedule = "1f1b";
  };
  for (const char* name : {"llama-gqa", "qwen2-bias"}) {
    const Golden g = Golden::load(name);
    std::map<std::string, std::vector<float>> exact;
    for (const ParamSpec& p : parameters_of(g.model)) {
      const std::string gradient = "grad." + stored(g.model, p).tensor;
      exact[gradient] = g.tensor(gradient);
    }
    for (const Way& way : {Way{TrainEngine::fsdp2, {.dp = 1}},
                           {TrainEngine::fsdp2, {.dp = 2, .tp = 2, .sp = true}},
                           {TrainEngine::zero1, {.dp = 2, .tp = 2}},
                           {TrainEngine::ddp, {.dp = 1, .pp = 2}},
                           {TrainEngine::fsdp2, {.dp = 2, .pp = 2}, "zero-bubble"},
                           {TrainEngine::fsdp1, {.dp = 1, .cp = 2}},
                           {TrainEngine::zero2, {.dp = 2, .ulysses = 2}}}) {
      CAPTURE(name, static_cast<int>(way.engine), way.layout.dp, way.layout.tp, way.layout.pp, way.layout.cp);
      Scenario s = in_bf16(g, way.layout, way.engine);
      s.train.pipeline_schedule = way.schedule;
      const TrainingResult r = train(g, s);
      CHECK(worst_gradient(g, r, exact) <= g.bf16_gradient_floor);
      CHECK(r.losses.back() == Approx(g.final_loss).epsilon(0.02));
    }
  }
}

TEST_CASE("gradients in bf16 differ among data ranks from fp32 ones by the roundings of their sums") {
  struct Way {
    TrainEngine engine;
    TrainLayout layout;
    Offload offload = Offload::none;
  };
  for (const char* name : {"llama-gqa", "qwen3-moe-tiny"}) {
    const Golden g = Golden::load(name);
    Scenario wide = in_bf16(g, {.dp = 1}, TrainEngine::fsdp2);
    wide.train.precision.grads = DType::f32;
    const TrainingResult one = train(g, wide);
    CHECK(!is_bf16(one));
    for (const Way& way : {Way{TrainEngine::fsdp2, {.dp = 4}},
                           {TrainEngine::fsdp2, {.dp = 4, .fsdp = 2}},
                           {TrainEngine::fsdp1, {.dp = 2}},
                           {TrainEngine::ddp, {.dp = 3}},
                           {TrainEngine::zero1, {.dp = 2}},
                           {TrainEngine::zero2, {.dp = 4}},
                           {TrainEngine::fsdp2, {.dp = 2}, Offload::layerwise}})
      for (const bool several : {false, true}) {
        CAPTURE(name, static_cast<int>(way.engine), way.layout.dp, way.layout.fsdp, several);
        Scenario s = in_bf16(g, way.layout, way.engine);
        s.train.offload = way.offload;
        if (several) s.train.micro_batch_tokens = g.longest_sequence();
        const TrainingResult r = train(g, s);
        // A rank rounds the gradient of each of its micro-batches, the sum over ranks is rounded once, or once for
        // each dimension of them: half a unit in the last of 8 digits each, of what is summed, which may be some times
        // as large as the sum.
        const auto sequences = static_cast<double>(g.sequences.size());
        const double roundings = (several ? sequences : static_cast<double>(way.layout.dp)) + 2.0;
        CHECK(worst_gradient(g, r, one.probes) <= 2.0 * roundings / 512.0);
        // FSDP's shards add micro-batches up in the master's fp32; the others in bf16.
        const bool fsdp = way.engine == TrainEngine::fsdp1 || way.engine == TrainEngine::fsdp2;
        if (!fsdp || !several) CHECK(is_bf16(r));
        else if (way.layout.dp == 2) CHECK(!is_bf16(r));  // of 4 ranks each may have one micro-batch
        CHECK(r.losses.back() == Approx(one.losses.back()).epsilon(0.02));
      }
  }
}
