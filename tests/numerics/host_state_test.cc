// Where training's state lies and who steps it changes no bit: shards on the host, copied up for every gather
// (train.offload: layerwise), and a part of the optimizer on the host (optimizer.cpu_fraction).
#include <fmt/format.h>

#include <catch2/catch.hpp>

#include "spec/names.h"
#include "tests/numerics/training_run.h"

using namespace hotbunk;
using namespace hotbunk::test;

namespace {

struct HostWay {
  const char* model;
  TrainEngine engine;
  std::int64_t dp, tp = 1, pp = 1, group = -1;
  DType params = DType::f32;
  double fraction = 0;  // 0: layer-wise offload
};

Scenario scenario_of(const Golden& g, const HostWay& way) {
  Scenario s = golden_scenario(g, way.dp * way.tp * way.pp);
  s.train.engine = way.engine;
  s.train.layout.dp = way.dp, s.train.layout.tp = way.tp, s.train.layout.pp = way.pp, s.train.layout.fsdp = way.group;
  s.train.layout.etp = way.tp;
  if (way.pp > 1) s.train.pipeline_split = {1, g.model.layers - 1};
  s.train.precision.params = way.params;
  s.train.micro_batch_tokens = g.longest_sequence();  // several micro-batches: gradients are added up
  return s;
}

Scenario on_host(Scenario s, double fraction) {
  if (fraction > 0) s.optimizer.cpu_fraction = fraction;
  else s.train.offload = Offload::layerwise;
  return s;
}

}  // namespace

TEST_CASE("shards on the host, or a part of the optimizer: losses, norms, gradients and weights are the same bits") {
  const auto fsdp2 = TrainEngine::fsdp2, zero1 = TrainEngine::zero1, zero2 = TrainEngine::zero2, ddp = TrainEngine::ddp;
  for (const HostWay& way :
       {HostWay{.model = "qwen3-norm", .engine = fsdp2, .dp = 3},
        {.model = "llama-tied", .engine = fsdp2, .dp = 2, .pp = 2},
        {.model = "qwen3-moe-tiny", .engine = fsdp2, .dp = 2, .tp = 2, .params = DType::bf16},
        {.model = "deepseek-v3-tiny", .engine = fsdp2, .dp = 4, .group = 2},
        {.model = "qwen3-norm", .engine = TrainEngine::fsdp1, .dp = 2, .params = DType::bf16},
        {.model = "qwen3-norm", .engine = ddp, .dp = 2, .fraction = 0.3},
        {.model = "qwen3-norm", .engine = ddp, .dp = 2, .params = DType::bf16, .fraction = 0.3},
        {.model = "deepseek-v3-tiny", .engine = zero1, .dp = 3, .fraction = 0.61},
        {.model = "qwen3-moe-tiny", .engine = zero1, .dp = 2, .tp = 2, .params = DType::bf16, .fraction = 1},
        {.model = "llama-tied", .engine = zero2, .dp = 2, .pp = 2, .params = DType::bf16, .fraction = 0.5}}) {
    CAPTURE(way.model, name_of(way.engine), way.dp, way.tp, way.pp, way.fraction);
    const Golden g = Golden::load(way.model);
    const Scenario s = scenario_of(g, way);
    const TrainingResult awake = train(g, s), host = train(g, on_host(s, way.fraction));
    CHECK(host.losses == awake.losses);
    CHECK(host.grad_norms == awake.grad_norms);
    CHECK(host.after5 == awake.after5);
    if (way.fraction == 0) CHECK(host.probes == awake.probes);
  }
}

TEST_CASE("a checkpoint does not know where its state lay, and where nothing changes it goes on bit for bit") {
  const Golden g = Golden::load("qwen3-norm");
  const Scenario shards = scenario_of(g, {.model = "", .engine = TrainEngine::fsdp2, .dp = 2}),
                 whole = scenario_of(g, {.model = "", .engine = TrainEngine::zero1, .dp = 2});
  const TrainingResult one = train(g, shards), other = train(g, whole);
  for (const auto& [first, then] : {std::pair(on_host(shards, 0), on_host(shards, 0)),
                                    {on_host(shards, 0), shards},
                                    {shards, on_host(shards, 0)}}) {
    const TrainingResult r = train_on(g, first, then, 2);
    CHECK(r.after5 == one.after5);
  }
  for (const auto& [first, then] : {std::pair(on_host(whole, 0.4), on_host(whole, 0.4)),
                                    {on_host(whole, 1), on_host(whole, 0.25)},
                                    {on_host(whole, 0.25), whole}}) {
    const TrainingResult r = train_on(g, first, then, 2);
    CHECK(r.after5 == other.after5);
  }
}
