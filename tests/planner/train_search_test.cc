// The search of training's layouts against every combination, priced one by one.
#include <algorithm>
#include <catch2/catch.hpp>
#include <set>
#include <utility>
#include <vector>

#include "planner/search/train_points.h"
#include "tests/planner/small_models.h"

namespace hotbunk {

namespace {

template <class A, class B>
std::vector<std::pair<A, B>> pairs_of(const std::vector<A>& a, const std::vector<B>& b) {
  std::vector<std::pair<A, B>> out;
  for (const A& x : a)
    for (const B& y : b) out.emplace_back(x, y);
  return out;
}

}  // namespace

TEST_CASE("the search finds what brute force finds, whatever the number of threads") {
  for (const ModelSpec& spec : {small_gpt(), small_moe()}) {
    const TrainModel model = model_of(spec, 16);
    TrainSpace space = default_train_space(spec, 16, 8, 32, TrainEngine::megatron);
    space.ulysses = {1, 2, 4, 8};  // by default fewer on several nodes
    space.shard = {-1, 2, 4, 8};
    space.schedule = {PipelineSchedule::one_f_one_b, PipelineSchedule::gpipe, PipelineSchedule::zero_bubble};
    space.etp_as_tp = false;
    if (spec.moe) space.etp = {1, 2, 4};  // by default on one node
    SearchOptions options{.keep = 5, .device_bytes = 12e9, .threads = 1};
    const TrainSearch found = search_train(model, space, options);
    // Brute force: every combination, straight from the model.
    double best = 1e300;
    std::int64_t feasible = 0, priced = 0;
    for (auto tp : space.tp)
      for (auto cp : space.cp)
        for (auto [ep, etp] : pairs_of(space.ep, space.etp))
          for (auto b : space.micro_batch)
            for (bool sp : space.sp)
              for (auto pp : space.pp)
                for (auto vpp : space.vpp)
                  for (Recompute r : space.recompute)
                    for (auto ulysses : space.ulysses)
                      for (const auto& [shard, schedule] : pairs_of(space.shard, space.schedule)) {
                        // The others order stages of one chunk each.
                        if (schedule != PipelineSchedule::one_f_one_b && (pp == 1 || vpp > 1)) continue;
                        if (16 % (tp * cp * ulysses * pp) != 0 || (sp && tp == 1)) continue;
                        const std::int64_t dp = 16 / (tp * cp * ulysses * pp), data = dp * cp * ulysses;
                        if (32 % (dp * b) != 0 || (shard > 0 && (data % shard != 0 || shard == data))) continue;
                        TrainPoint p{.dp = dp,
                                     .cp = cp,
                                     .ulysses = ulysses,
                                     .tp = tp,
                                     .pp = pp,
                                     .vpp = vpp,
                                     .ep = ep,
                                     .etp = etp,
                                     .fsdp = shard,
                                     .sp = sp,
                                     .schedule = schedule,
                                     .recompute = r,
                                     .micro_batch = b,
                                     .micro_batches = 32 / (dp * b)};
                        const TrainPrice price = model.price(p);
                        if (!price.valid) continue;
                        // Under fused attention selective recomputation drops nothing: one point, not two.
                        p.recompute = Recompute::none;
                        const TrainPrice none = model.price(p);
                        if (r == Recompute::selective && price.step_seconds == none.step_seconds &&
                            price.peak_bytes == none.peak_bytes)
                          continue;
                        ++priced;
                        if (price.total_bytes() > options.device_bytes) continue;
                        ++feasible;
                        best = std::min(best, price.step_seconds);
                      }
    REQUIRE(!found.best.empty());
    CHECK(found.priced == priced);
    CHECK(found.feasible == feasible);
    CHECK(found.best[0].price.step_seconds == best);
    options.threads = 3;
    const TrainSearch again = search_train(model, space, options);
    REQUIRE(again.best.size() == found.best.size());
    for (std::size_t i = 0; i < found.best.size(); ++i) CHECK(again.best[i].point == found.best[i].point);
    REQUIRE(again.pareto.size() == found.pareto.size());
    for (std::size_t i = 1; i < found.pareto.size(); ++i)
      CHECK(found.pareto[i].price.total_bytes() < found.pareto[i - 1].price.total_bytes());
    // More memory is never infeasible.
    options.device_bytes *= 2;
    CHECK(search_train(model, space, options).feasible >= found.feasible);
  }
}

TEST_CASE("an impossible space says why") {
  const TrainModel model = model_of(small_gpt(), 8);
  TrainSpace space = default_train_space(small_gpt(), 8, 8, 8, TrainEngine::megatron);
  const TrainSearch tight = search_train(model, space, {.device_bytes = 1e6});
  CHECK(tight.best.empty());
  CHECK_THAT(tight.reason, Catch::Contains("none of"));
  space.ranks = 7;
  space.tp = {7};
  const TrainSearch odd = search_train(model, space, {});
  CHECK_THAT(odd.reason, Catch::Contains("divides"));
}

TEST_CASE("experts' own tensor parallelism: any where a node holds all of them, else 1 or the layers'") {
  const auto etp = [](std::int64_t ranks, const ModelSpec& spec, TrainEngine engine, std::int64_t tp) {
    std::set<std::int64_t> out;
    for (const LayerKey& k : layer_keys(default_train_space(spec, ranks, 8, 32, engine)))
      if (k.tp == tp) out.insert(k.etp);
    return out;
  };
  using Set = std::set<std::int64_t>;
  CHECK(etp(8, small_moe(), TrainEngine::megatron, 4) == Set{1, 2, 4, 8});
  CHECK(etp(16, small_moe(), TrainEngine::megatron, 4) == Set{1, 4});
  CHECK(etp(16, small_moe(), TrainEngine::megatron, 1) == Set{1});
  CHECK(etp(8, small_moe(), TrainEngine::fsdp2, 4) == Set{1});
  CHECK(etp(8, small_gpt(), TrainEngine::megatron, 4) == Set{1});
}

}  // namespace hotbunk
