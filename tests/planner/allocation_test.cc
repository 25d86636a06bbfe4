// The searches' inner loops do not allocate: a million layouts a second leave no time for it. Counted by this binary's
// own operator new.
#include <atomic>
#include <catch2/catch.hpp>
#include <cstdlib>
#include <new>

#include "planner/answers/answers.h"
#include "planner/search/train_points.h"
#include "spec/catalog.h"
#include "spec/loader.h"

namespace {
std::atomic<long> allocations{0};
}

void* operator new(std::size_t size) {
  ++allocations;
  if (void* p = std::malloc(size == 0 ? 1 : size)) return p;
  throw std::bad_alloc();
}
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {  // temporary buffers of stable algorithms
  ++allocations;
  return std::malloc(size == 0 ? 1 : size);
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }
void operator delete(void* p, const std::nothrow_t&) noexcept { std::free(p); }

namespace hotbunk {

TEST_CASE("pricing a layout allocates nothing, a search next to nothing") {
  const auto s = load_scenario_text(
      "model: qwen2.5-7b\ncluster: {gpu: h100-sxm-80gb, gpus_per_node: 8}\ntrain: {layout: {dp: 8}, "
      "micro_batch_tokens: 9216}\n"
      "rollout: {layout: {tp: 4, dp: 2}}\nworkload: {response_tokens: {mean: 2048, max: 8192}, prompt_tokens: {mean: "
      "512}}\n",
      "t.yaml");
  REQUIRE(s.has_value());
  const auto pricer = ScenarioPricer::make(*s, catalog_root());
  REQUIRE(pricer.has_value());
  const RlModel& rl = (*pricer)->rl();
  const TrainModel& train = (*pricer)->train();
  TrainSpace space = default_train_space(s->model, 8, 8, 1024, TrainEngine::megatron);
  const RlPoint base = (*pricer)->point();
  const ShiftShape shift(base.transition);
  const RolloutPrice rollout = rl.price_rollout(base.rollout);
  double sum = 0;
  long points = 0;
  for (const LayerKey& key : layer_keys(space)) {
    // What a weight update moves between two layouts is counted once.
    visit_points(train, space, key, [&](const TrainPoint& p, const TrainModel::Layers&) {
      RlPoint point = base;
      point.train = p;
      rl.sync_price(point);
    });
    const long before = allocations;
    visit_points(train, space, key, [&](const TrainPoint& p, const TrainModel::Layers& layers) {
      const TrainSide side = rl.train_side(p, train.price(p, layers), layers);
      RlPoint point = base;
      point.train = p;
      const RolloutPrice beside = rl.rollout_beside(point.rollout, rl.leftovers(point, shift, side), rollout);
      sum += rl.combine(point, shift, side, beside, rl.sync_price(point)).iteration_seconds;
      ++points;
    });
    REQUIRE(allocations == before);
  }
  CHECK(points > 1000);
  CHECK(sum > 0);
  // The counter counts: one string is one allocation.
  const long before = allocations;
  const std::string text(100, 'x');
  CHECK(allocations == before + 1);

  // Eight times the points of a search cost no more than lists that grow.
  RlSpace joint = default_rl_space(*s);
  const auto allocated = [&](std::size_t buckets, std::int64_t& priced) {
    joint.bucket_bytes.clear();
    for (std::size_t i = 0; i < buckets; ++i) joint.bucket_bytes.push_back(1e8 * static_cast<double>(i + 1));
    const long start = allocations;
    priced = search_rl(rl, joint, {.threads = 1, .prune = false}).priced;
    return allocations - start;
  };
  std::int64_t few = 0, many = 0;
  const long once = allocated(1, few), eightfold = allocated(8, many);
  CHECK(many == 8 * few);
  CHECK(many > 200'000);
  CHECK(eightfold < once + 1'000);
}

}  // namespace hotbunk
