// The replay of a step through PyTorch's allocator holds the closed form's bytes, of every layout and stage.
#include "planner/allocator/allocator_replay.h"

#include <fmt/format.h>

#include <catch2/catch.hpp>
#include <random>

#include "planner/validate/validate_tables.h"
#include "spec/catalog.h"

namespace hotbunk {

// A block keeps a rest of up to 1 MiB that is too small to be split off, and counts it as allocated: of a small model's
// tensors that is more.
TEST_CASE("the replay allocates what the closed form says: never less, at most 1 % more") {
  ValidationContext context(catalog_root());
  const auto cost = context.cost("h100-sxm-80gb", 64);
  REQUIRE(cost.has_value());
  std::mt19937 random(7);
  const auto one_of = [&](auto... values) {
    const std::int64_t all[] = {values...};
    return all[random() % sizeof...(values)];
  };
  const Sharding shardings[] = {Sharding::replicated, Sharding::zero1, Sharding::zero2, Sharding::zero3,
                                Sharding::fsdp};
  const Recompute recomputes[] = {Recompute::none, Recompute::selective, Recompute::full};
  int replayed = 0, interleaved = 0, sharded = 0;
  for (const char* name : {"llama-3.1-8b", "mixtral-8x7b", "deepseek-v2", "qwen2.5-1.5b"})
    for (const char* profile :
         {"megatron", "megatron-te", "megatron-vtrain", "torchtitan", "verl-fsdp", "deepspeed-zero3"}) {
      const auto model = context.model(name);
      const auto frame = context.framework(profile);
      REQUIRE((model && frame));
      for (int draw = 0; draw < 40; ++draw) {
        const PipelineSchedule schedule =
            one_of(0, 0, 1) == 1 ? PipelineSchedule::gpipe : PipelineSchedule::one_f_one_b;
        TrainPoint p{.dp = one_of(2, 4, 8), .cp = one_of(1, 1, 2), .tp = one_of(1, 1, 2, 4), .pp = one_of(1, 1, 2, 4)};
        p.vpp = p.pp > 1 && schedule == PipelineSchedule::one_f_one_b ? one_of(1, 1, 2) : 1;
        if (p.pp > 1) p.schedule = schedule;
        p.sp = p.tp > 1 && one_of(0, 1) == 1;
        p.ep = model->moe ? one_of(1, 2, 4) : 1;
        p.sharding = shardings[random() % 5];
        p.recompute = recomputes[random() % 3];
        p.micro_batch = one_of(1, 2);
        p.micro_batches = one_of(1, 2, 4, 8);
        p.reshard_after_forward = one_of(0, 1) == 1;
        p.optimizer_on_host = one_of(0, 0, 1) == 1;
        const TrainModel m(*model,
                           {.sequence = one_of(1024, 4096),
                            .state = {2, one_of(2, 4) == 2 ? 2.0 : 4.0, 4, 8},
                            .prefetch = one_of(0, 1, 1) == 1,
                            .flat_parameters = one_of(0, 0, 1) == 1},
                           *cost, *frame);
        if (!m.divides(p)) continue;
        const TrainModel::Layers layers = m.layers(p);
        for (std::int64_t stage = 0; stage < p.pp; ++stage) {
          double closed = 0.0;
          for (double bytes : m.peak_bytes(p, layers, stage)) closed += bytes;
          const auto got = static_cast<double>(replay_step(m, p, stage).allocated);
          INFO(name << " under " << profile << ": "
                    << fmt::format("dp {} cp {} tp {} pp {} vpp {} sp {} ep {} sharding {} recompute {} micro {} x {} "
                                   "reshard {} schedule {}, stage {}",
                                   p.dp, p.cp, p.tp, p.pp, p.vpp, p.sp, p.ep, static_cast<int>(p.sharding),
                                   static_cast<int>(p.recompute), p.micro_batch, p.micro_batches,
                                   p.reshard_after_forward, static_cast<int>(schedule), stage));
          CHECK(got >= closed * (1.0 - 1e-9));
          CHECK(got <= closed * (model->hidden < 2048 ? 1.04 : 1.01));
          ++replayed, interleaved += p.vpp > 1, sharded += p.sharding == Sharding::fsdp;
        }
        if (draw % 4 == 0)  // of the stages that decide
          CHECK(static_cast<double>(replay_step(m, p).allocated) >= m.price(p, layers).peak_bytes * (1.0 - 1e-9));
      }
    }
  CHECK(replayed > 1000);
  CHECK(interleaved > 50);
  CHECK(sharded > 100);
}

}  // namespace hotbunk
