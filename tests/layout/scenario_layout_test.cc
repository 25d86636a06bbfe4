#include "layout/scenario_layout.h"

#include <algorithm>
#include <catch2/catch.hpp>

#include "layout/train_mesh.h"
#include "spec/shard_over.h"
#include "spec/train_axes.h"
#include "tests/layout/models.h"

using namespace hotbunk;
using namespace hotbunk::test;

namespace {

Scenario megatron(std::int64_t dp, std::int64_t tp, std::int64_t pp) {
  Scenario s;
  s.model = qwen2_5_7b();
  s.train.engine = TrainEngine::megatron;
  s.train.layout.dp = dp, s.train.layout.tp = tp, s.train.layout.pp = pp;
  return s;
}

std::int64_t elements_of(const std::vector<Rectangle>& boxes) {
  std::int64_t all = 0;
  for (const Rectangle& box : boxes) all += box.elements();
  return all;
}

}  // namespace

TEST_CASE("every parameter is held once by each data rank's stages and tensor-parallel places") {
  const Scenario s = megatron(2, 4, 2);
  const TrainHoldings held = TrainHoldings::of(s).value();
  REQUIRE(held.dense().size() == 16);
  for (const ParamSpec& p : parameters_of(s.model)) {
    std::int64_t all = 0;
    for (std::int64_t rank = 0; rank < 16; ++rank) all += elements_of(held.held(p, rank));
    CAPTURE(p.name);
    const bool cut = tensor_parallel_dim(p.role).has_value();
    CHECK(all == p.numel() * 2 * (cut ? 1 : 4));
  }
  CHECK(held.shards() == 1);  // Megatron's parameters are whole: its optimizer is sharded
  CHECK(held.chunks_of(0) == std::vector<StageChunk>{{0, 0, {0, 14}}});
  CHECK(held.chunks_of(15) == std::vector<StageChunk>{{1, 0, {14, 28}}});
}

TEST_CASE("stages of several chunks hold the layers that interleaving gives them") {
  Scenario s = megatron(1, 1, 2);
  s.train.layout.vpp = 2;
  const TrainHoldings held = TrainHoldings::of(s).value();
  CHECK(held.chunks_of(0) == std::vector<StageChunk>{{0, 0, {0, 7}}, {0, 1, {14, 21}}});
  CHECK(held.chunks_of(1) == std::vector<StageChunk>{{1, 0, {7, 14}}, {1, 1, {21, 28}}});
  s.train.layout.vpp = 3;
  const auto uneven = TrainHoldings::of(s);
  REQUIRE(!uneven);
  CHECK(uneven.error().front().code == "E244");
}

TEST_CASE("neighbours among the data ranks hold other experts, of each fewer shards") {
  // 8 data ranks of FSDP, of 2 tensor-parallel places each: 4 have other experts, 2 a half of each.
  Scenario s = megatron(8, 2, 1);
  s.train.engine = TrainEngine::fsdp2;
  MoeSpec moe;
  moe.experts = 16, moe.experts_per_token = 2, moe.expert_intermediate = 64;
  s.model.moe = moe;
  s.train.layout.ep = 4, s.train.layout.etp = 2;
  const TrainHoldings held = TrainHoldings::of(s).value();
  for (const ParamSpec& p : parameters_of(s.model)) {
    if (p.expert < 0) continue;
    std::int64_t all = 0;
    for (std::int64_t rank = 0; rank < 16; ++rank) {
      const std::int64_t part = elements_of(held.held(p, rank));
      all += part;
      CAPTURE(p.name, rank);
      CHECK((part > 0) == (rank / 2 % 4 == p.expert / 4));
      if (part > 0) CHECK(4 * part == p.numel());
    }
    CHECK(all == p.numel());
  }
}

TEST_CASE("shard groups lie in the dimensions that shard_over names, the others' ranks have copies") {
  // Ranks are cp + 2 dp: by default the two nearest share, that is those of a sequence.
  Scenario s = megatron(4, 1, 1);
  s.train.engine = TrainEngine::fsdp2;
  TrainLayout& l = s.train.layout;
  l.cp = 2;
  const auto group = [&](std::int64_t rank) { return TrainHoldings::of(s).value().shard_group(rank); };
  const auto copies = [&](std::int64_t rank) { return TrainHoldings::of(s).value().replicas(rank); };
  l.fsdp = 2;
  CHECK(group(5) == std::vector<std::int64_t>{4, 5});
  CHECK(copies(5) == std::vector<std::int64_t>{1, 3, 5, 7});
  l.fsdp = -1, l.shard_over = "cp";
  CHECK(group(5) == std::vector<std::int64_t>{4, 5});
  l.shard_over = "dp";
  CHECK(group(5) == std::vector<std::int64_t>{1, 3, 5, 7});
  CHECK(copies(5) == std::vector<std::int64_t>{4, 5});
  l.fsdp = 2;  // the two nearest of those of a dp line
  CHECK(group(5) == std::vector<std::int64_t>{5, 7});
  CHECK(copies(5) == std::vector<std::int64_t>{0, 1, 4, 5});
  const TrainHoldings held = TrainHoldings::of(s).value();
  for (const ParamSpec& p : parameters_of(s.model)) {
    CAPTURE(p.name);
    CHECK(held.held(p, 4) == held.held(p, 1));
    CHECK(elements_of(held.held(p, 5)) + elements_of(held.held(p, 7)) == p.numel());
  }
  l.order = "tp-dp-ep-cp-pp", l.fsdp = -1;  // dp is the faster one: neighbours
  CHECK(group(5) == std::vector<std::int64_t>{4, 5, 6, 7});
  l.shard_over = "cp";
  CHECK(group(5) == std::vector<std::int64_t>{1, 5});
}

TEST_CASE("the axes of a layout stand in its order, and Ulysses behind cp where it is not named") {
  TrainLayout l{.dp = 2, .cp = 3, .ulysses = 5, .tp = 7, .pp = 11, .ep = 4};
  using Axes = std::vector<std::string>;
  CHECK(axes_in_order(l) == Axes{"tp", "cp", "ulysses", "ep", "dp", "pp"});
  l.order = "ulysses-dp-cp-pp-ep-tp";
  CHECK(axes_in_order(l) == Axes{"ulysses", "dp", "cp", "pp", "ep", "tp"});
  std::int64_t ranks = 1, data = 1;
  for (const std::string& axis : axes_in_order(l)) {
    ranks *= ranks_of(l, axis);
    if (is_data_axis(axis)) data *= ranks_of(l, axis);
    CHECK(train_mesh(l).extent(axis) == ranks_of(l, axis));
  }
  CHECK(ranks == l.ranks());  // experts lie over the others' ranks
  CHECK(data == 2 * 3 * 5);
}

TEST_CASE("shard groups follow one another exactly where the data ranks ascend group by group") {
  std::int64_t follow = 0, apart = 0;
  for (const char* order : {"tp-cp-ep-dp-pp", "dp-ulysses-cp-tp-ep-pp", "ulysses-tp-dp-ep-pp-cp"})
    for (const char* over : {"", "dp", "cp", "ulysses", "cp-dp", "dp-ulysses", "ulysses-cp"})
      for (std::int64_t sizes = 0; sizes < 27; ++sizes) {
        TrainLayout l;
        l.order = order, l.shard_over = over;
        l.dp = 1 + sizes % 3, l.cp = 1 + sizes / 3 % 3, l.ulysses = 1 + sizes / 9;
        for (std::int64_t fsdp = 1; fsdp <= l.shardable(); ++fsdp) {
          if (l.shardable() % fsdp != 0) continue;
          l.fsdp = fsdp;
          CAPTURE(l.order, l.shard_over, l.dp, l.cp, l.ulysses, l.fsdp);
          const bool ascend = std::ranges::is_sorted(data_ranks(l).front());
          CHECK(shard_groups_follow(l) == ascend);
          (ascend ? follow : apart) += 1;
        }
      }
  CHECK(follow > 100);
  CHECK(apart > 100);
}

TEST_CASE("experts lie on a mesh of their own over the same ranks") {
  Scenario s = megatron(4, 2, 1);
  MoeSpec moe;
  moe.experts = 16, moe.experts_per_token = 2, moe.expert_intermediate = 64;
  s.model.moe = moe;
  s.train.layout.ep = 4, s.train.layout.etp = 1;
  const TrainHoldings held = TrainHoldings::of(s).value();
  CHECK(held.expert().extent("dp") == 2);  // 8 ranks / (etp 1 x ep 4)
  for (const ParamSpec& p : parameters_of(s.model)) {
    if (p.expert < 0) continue;
    std::int64_t all = 0;
    for (std::int64_t rank = 0; rank < 8; ++rank) all += elements_of(held.held(p, rank));
    CAPTURE(p.name);
    CHECK(all == 2 * p.numel());
  }
}

TEST_CASE("experts lie tensor-parallel place by place and data rank by data rank, whatever the order of the ranks") {
  // Any order, any shard groups: each copy has every expert's elements once, and who has which is what the groups say.
  MoeSpec moe;
  moe.experts = 4, moe.experts_per_token = 2, moe.expert_intermediate = 8;
  std::int64_t apart = 0, seen = 0;
  for (const char* order : {"tp-cp-ep-dp-pp", "dp-tp-cp-ep-pp", "cp-tp-dp-ep-pp", "dp-pp-tp-cp-ep", "pp-dp-cp-tp-ep"})
    for (const char* over : {"", "dp", "cp"})
      for (const auto& [etp, ep] : {std::pair(1, 4), {2, 2}, {1, 2}, {4, 1}, {4, 2}, {1, 1}}) {
        Scenario s = megatron(2, 2, 2);
        s.train.engine = TrainEngine::fsdp2, s.model.moe = moe;
        TrainLayout& l = s.train.layout;
        l.cp = 2, l.order = order, l.shard_over = over, l.etp = etp, l.ep = ep, l.sp = true;
        const ExpertMesh mesh = expert_mesh(s);
        if (l.shard_ranks() % mesh.spread != 0) continue;
        CAPTURE(order, over, etp, ep);
        ++seen, apart += std::ranges::is_sorted(data_ranks(l).front()) ? 0 : 1;
        const TrainHoldings held = TrainHoldings::of(s).value();
        for (std::int64_t stage = 0; stage < 2; ++stage) {
          const auto blocks = block_ranks(l, mesh, stage);  // by place, and there by block
          for (std::size_t p = 0; p < blocks.size(); ++p)
            for (std::size_t b = 0; b < blocks[p].size(); ++b) {
              const auto at = static_cast<std::int64_t>(b) % mesh.spread * mesh.places + static_cast<std::int64_t>(p);
              CHECK(held.expert().coordinate(blocks[p][b], "etp") == at % etp);
              CHECK(held.expert().coordinate(blocks[p][b], "ep") == at / etp);
            }
        }
        const std::int64_t copies = 8 / (l.shard_ranks() * l.tp);
        for (const ParamSpec& p : parameters_of(s.model)) {
          if (p.expert < 0 || p.layer > 0) continue;
          std::int64_t all = 0;
          for (std::int64_t rank = 0; rank < 16; ++rank) all += elements_of(held.held(p, rank));
          CAPTURE(p.name);
          CHECK(all == copies * p.numel());
        }
      }
  CHECK(seen > 60);
  CHECK(apart > 10);
}

TEST_CASE("whole experts of an engine may lie over its context-parallel ranks too") {
  Scenario s = megatron(8, 1, 1);
  s.rollout.engine = RolloutEngine::vllm;
  s.rollout.layout.tp = 2, s.rollout.layout.cp = 2, s.rollout.layout.dp = 2, s.rollout.layout.ep = 4;
  const Layout whole = engine_layout(s).value();
  CHECK(whole.expert.extent("ep") == 4);
  CHECK(whole.expert.extent("etp") == 1);
  s.rollout.layout.ep = 2;  // of ours: over the tensor-parallel ranks, the same for each context-parallel one
  const Layout half = engine_layout(s).value();
  CHECK(half.expert.extent("ep") == 2);
  CHECK(half.expert.extent("cp") == 2);
}
