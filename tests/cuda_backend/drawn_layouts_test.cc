// The layouts that tests/numerics draws, played on the driver's double: ranks as threads over the local transport, held
// to the same goldens of transformers and to the plan.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstdlib>
#include <exception>
#include <set>
#include <stdexcept>
#include <string_view>

#include "backends/cuda/cuda_backend.h"
#include "base/check.h"
#include "runtime/launch.h"
#include "spec/expert_mesh.h"
#include "spec/shard_over.h"
#include "tests/cuda_backend/processes.h"
#include "tests/numerics/drawn_layout.h"
#include "tests/numerics/golden_checks.h"

namespace hotbunk::drawn_layouts_test {
namespace {

using namespace test;

/// Ranks as threads on one device. Throws what the first of them failed with, or what the double found.
void start_on_double(int ranks, const PlayRank& play, std::int64_t memory_bytes, std::uint64_t seed) {
  cuda::FakeDriver fake(
      {.memory_bytes = memory_bytes, .seed = seed, .granularity_bytes = 4096, .modules = cuda::test::parsed_kernels()});
  const auto context = std::make_shared<cuda::Context>(fake.table());
  const auto local = std::make_shared<cuda::LocalRanks>();
  std::vector<std::string> failures(static_cast<std::size_t>(ranks));
  thread_ranks(ranks, [&](const LaunchEnv& env) {
    std::string& failure = failures[static_cast<std::size_t>(env.rank)];
    try {
      context->make_current();
      cuda::CudaWorld world(context, local, env);
      try {
        play(world, [&](hotbunk::Driver& driver) {
          return std::make_unique<cuda::CudaBackend>(world, driver, cuda::CudaOptions{.span_steps = 0, .scope = ""});
        });
        world.leave();
      } catch (const std::exception& e) {
        failure = e.what();
        world.watch().announce_failure(fmt::format("rank {} failed: {}", env.rank, failure));
      }
    } catch (const RuntimeFailure& e) {
      failure = e.what();
    }
    return 0;
  });
  if (const auto found = fake.findings(); !found.empty())
    throw std::runtime_error("the double found: " + found.front());
  for (const std::string& f : failures)
    if (!f.empty()) throw std::runtime_error(f);
}

}  // namespace

// Of what the suite on CPU ranks draws the first third: two CPU seconds each. HOTBUNK_LAYOUT_ROUNDS and
// HOTBUNK_LAYOUT_SEED: others. layouts_test.cc names what is rare among them (copies of tokens), or in no such model
// (interleaved stages).
TEST_CASE("layouts drawn at random compute on the double what transformers does") {
  std::vector<std::string> goldens = golden_models();
  std::ranges::copy(golden_router_losses(), std::back_inserter(goldens));
  std::uint64_t seed = 0;
  std::set<std::string_view> met;
  for_drawn_layouts(goldens, 20, 1'000'003, [&](const Golden& g, const Scenario& drawn) {
    Scenario s = drawn;
    s.steps = 2, s.checkpoint_every = 0;
    const TrainLayout& l = s.train.layout;
    if (l.tp > 1) met.insert("tensor-parallel");
    if (l.pp > 1) met.insert("stages");
    if (l.ulysses > 1) met.insert("ulysses");
    if (l.cp > 1) met.insert("context");
    if (s.train.engine == TrainEngine::fsdp1) met.insert("flat units");
    if (l.shard_ranks() > 1) met.insert("shards");
    if (expert_mesh(s).spread > 1) met.insert("experts over ranks");
    if (expert_mesh(s).blocks > 1) met.insert("experts in blocks");
    if (s.train.engine != TrainEngine::ddp && l.shard_ranks() > 1 && !shard_groups_follow(l))
      met.insert("shards apart");
    if (s.train.engine == TrainEngine::fsdp1 && l.tp * l.pp > 1 && l.shard_ranks() > 1) met.insert("flat parts");
    if (expert_mesh(s).lies_apart()) met.insert("experts apart");
    if (s.train.offload != Offload::none) met.insert("offload");
    const TrainingResult r = train(g, s, Against::reference_and_plan, [&, n = ++seed](int ranks, const PlayRank& play) {
      start_on_double(ranks, play, ranks * 2 * s.cluster.device_memory_bytes, n);
    });
    REQUIRE(r.losses.size() == 2);
    CHECK(r.losses[0] == Approx(g.losses[0]).epsilon(loss_bound));
    CHECK(r.losses[1] == Approx(g.losses[1]).epsilon(scalar_bound));
    CHECK(r.grad_norms[0] == Approx(g.grad_norms[0]).epsilon(scalar_bound));
    CHECK(r.grad_norms[1] == Approx(g.grad_norms[1]).epsilon(scalar_bound));
    check_gradients(g, r);
    CHECK(r.unlike_plan == "");
  });
  if (std::getenv("HOTBUNK_LAYOUT_ROUNDS") != nullptr || std::getenv("HOTBUNK_LAYOUT_SEED") != nullptr) return;
  CAPTURE(fmt::format("{}", fmt::join(met, ", ")));
  CHECK(met.size() == 12);
}

}  // namespace hotbunk::drawn_layouts_test
