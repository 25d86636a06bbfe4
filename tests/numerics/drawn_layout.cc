#include "tests/numerics/drawn_layout.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <catch2/catch.hpp>
#include <cstdlib>
#include <tuple>
#include <utility>

#include "layout/sequence.h"
#include "layout/train_weights.h"
#include "spec/expert_mesh.h"
#include "spec/names.h"
#include "spec/pipeline_split.h"
#include "spec/shard_over.h"
#include "spec/validate.h"
#include "tests/numerics/training_run.h"

namespace hotbunk::test {
namespace {

/// A mesh of experts that lies over the dense one: as often as not one whose blocks have other experts each, or that
/// has several of them in a tensor-parallel group, where there may be such.
void draw_experts(Scenario& s, std::mt19937_64& random) {
  TrainLayout& l = s.train.layout;
  const std::int64_t data = l.dp * l.cp * l.ulysses, shards = s.train.engine == TrainEngine::ddp ? 1 : l.shard_ranks();
  // (etp, ep): of experts that data ranks share, of blocks, of rows, of neither.
  std::array<std::vector<std::pair<std::int64_t, std::int64_t>>, 4> ways;
  for (std::int64_t etp = 1; etp <= data * l.tp; ++etp)
    for (std::int64_t ep = 1; ep <= s.model.moe->experts; ++ep) {
      if (s.model.moe->experts % ep != 0 || data * l.tp % (etp * ep) != 0) continue;
      if (!why_not_train_tp(s.model, l.tp, etp).empty()) continue;
      l.etp = etp, l.ep = ep;
      const ExpertMesh mesh = expert_mesh(s);
      if (shards > 1 && shards % mesh.spread != 0) continue;
      if ((mesh.blocks > 1 || mesh.wholes > 1) && mesh.lies_apart() && !l.sp) continue;
      ways[mesh.parts > 1 ? 0 : mesh.blocks > 1 ? 1 : mesh.spread > 1 ? 2 : 3].emplace_back(etp, ep);
    }
  std::vector<std::size_t> kinds;
  for (std::size_t k = 0; k < ways.size(); ++k) kinds.insert(kinds.end(), ways[k].empty() ? 0 : 4 - k, k);
  const auto& some = ways[kinds[random() % kinds.size()]];
  std::tie(l.etp, l.ep) = some[random() % some.size()];
  const ExpertMesh mesh = expert_mesh(s);
  if (mesh.spread == 1) return;
  // In rounds, or a row for each expert, or a copy of a token for each rank.
  const auto drawn = random();
  if (drawn % 2 == 0) s.train.expert_capacity = 0.4;
  else if (drawn / 2 % 2 == 0 && mesh.may_send_copies()) s.train.expert_dispatch = ExpertDispatch::per_rank;
}

/// Some of the data ranks' dimensions, whose shards are all of them or some.
void draw_shard_over(TrainLayout& l, std::mt19937_64& random) {
  constexpr std::array ways = {"dp", "cp", "ulysses", "cp-dp", "dp-ulysses", "ulysses-cp"};
  l.shard_over = ways[random() % ways.size()];
  std::vector<std::int64_t> groups{-1};
  for (std::int64_t k = 1; k <= l.shardable(); ++k)
    if (l.shardable() % k == 0) groups.push_back(k);
  l.fsdp = random() % 2 == 0 ? -1 : groups[random() % groups.size()];
}

/// Any order of the ranks, Ulysses' behind cp or apart; what it was where that one does not execute.
void draw_order(Scenario& s, std::mt19937_64& random) {
  std::vector<std::string> axes{"tp", "cp", "ep", "dp", "pp"};
  if (random() % 2 == 0) axes.emplace_back("ulysses");
  std::ranges::shuffle(axes, random);
  Scenario other = s;
  other.train.layout.order = fmt::format("{}", fmt::join(axes, "-"));
  if (unsupported_to_execute(other).empty()) s = other;
}

}  // namespace

std::optional<Scenario> draw_layout(const Golden& g, std::mt19937_64& random) {
  const auto one_of = [&](std::initializer_list<std::int64_t> values) {
    return *(values.begin() + static_cast<std::ptrdiff_t>(random() % values.size()));
  };
  Scenario s = golden_scenario(g, 1);
  TrainLayout& l = s.train.layout;
  l.tp = one_of({1, 2, 2, 4}), l.dp = one_of({1, 2, 2, 3, 4}), l.pp = one_of({1, 1, 2, 2, 3});
  l.ulysses = one_of({1, 1, 2, 2, 3, 4}), l.cp = one_of({1, 1, 1, 2, 2, 3, 4});
  s.train.context_exchange = one_of({0, 1}) == 0 ? ContextExchange::ring : ContextExchange::all_gather;
  if (l.ranks() > 8 || l.pp > g.model.layers || !why_not_train_tp(g.model, l.tp).empty()) return std::nullopt;
  if (!why_not_ulysses(g.model.heads / l.tp, std::max<std::int64_t>(1, g.model.kv_heads / l.tp), l.ulysses).empty())
    return std::nullopt;
  s.cluster.gpus_per_node = l.ranks();
  if (l.pp > 1) {
    if (g.model.layers >= 2 * l.pp)
      l.vpp = 2 + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(g.model.layers / l.pp - 1));
    const std::int64_t chunks = l.pp * l.vpp;
    s.train.pipeline_split.assign(static_cast<std::size_t>(chunks), 1);
    s.train.pipeline_split[random() % static_cast<std::uint64_t>(chunks)] += g.model.layers - chunks;
    if ((g.model.layers + 1) % chunks == 0 && g.model.layers + 1 > chunks && one_of({0, 1}) == 0) {
      set_split(s.train, {});
      (one_of({0, 1}) == 0 ? s.train.account_for_embedding : s.train.account_for_loss) = true;
    }
    const std::int64_t schedule = one_of({0, 1, 2});
    if (schedule > 0) s.train.pipeline_schedule = schedule == 1 ? "gpipe" : "zero-bubble";
    l.order = one_of({0, 1}) == 0 ? l.order : "pp-tp-cp-ep-dp";
  }
  l.sp = l.tp > 1 && one_of({0, 1}) == 1;
  s.train.engine = static_cast<TrainEngine>(
      one_of({static_cast<std::int64_t>(TrainEngine::fsdp2), static_cast<std::int64_t>(TrainEngine::fsdp2),
              static_cast<std::int64_t>(TrainEngine::ddp), static_cast<std::int64_t>(TrainEngine::zero1),
              static_cast<std::int64_t>(TrainEngine::zero2)}));
  // Flat units: most often where nothing but the data ranks and those that share sequences cuts anything.
  const bool biased = g.model.moe && g.model.moe->router_bias;
  if (!biased && one_of({0, 1, 2}) > (l.tp == 1 && l.pp == 1 ? 0 : 1)) {
    s.train.engine = TrainEngine::fsdp1;
    s.train.wrap.policy = static_cast<WrapPolicy>(one_of({0, 1, 2}));
    s.train.wrap.min_parameters = one_of({1, 300, 1000, 3000, 10000, 1 << 20});
    if (s.train.wrap.policy == WrapPolicy::names)
      s.train.wrap.names = one_of({0, 1}) == 0 ? "*.0-*embed*" : "*attn*-*.2";
  }
  if (l.dp % 2 == 0 && s.train.engine != TrainEngine::ddp) l.fsdp = one_of({-1, 1, 2});
  if (s.train.engine != TrainEngine::ddp && one_of({0, 1, 2}) == 0) draw_shard_over(l, random);
  if (g.model.moe) draw_experts(s, random);
  s.train.recompute = static_cast<Recompute>(one_of({0, 1, 2}));
  s.train.reshard_after_forward = one_of({0, 1}) == 1;
  const std::int64_t shared = l.shard_ranks();
  std::vector<std::int64_t> few;  // ranks that may keep a unit among them
  for (std::int64_t k = 2; k < shared; ++k)
    if (shared % (k * expert_mesh(s).spread) == 0) few.push_back(k);
  if (s.train.engine == TrainEngine::fsdp2 && !few.empty() && one_of({0, 1}) == 0)
    s.train.reshard_after_forward = true, s.train.reshard_ranks = few[random() % few.size()];
  s.train.prefetch = one_of({0, 1});
  s.train.loss_chunk_tokens = one_of({0, 0, 5, 17});
  s.train.micro_batch_tokens = l.share_of(one_of({g.longest_sequence(), g.num_tokens()}));
  const bool fsdp = s.train.engine == TrainEngine::fsdp1 || s.train.engine == TrainEngine::fsdp2;
  if (fsdp && one_of({0, 1, 2}) == 0) s.train.offload = Offload::layerwise;
  if (one_of({0, 1}) == 0) draw_order(s, random);
  s.model.vocab_multiple = one_of({0, 0, 4, 16, 64});
  s.train.in_place_elements = one_of({0, 1, 100, 500});
  return s;
}

std::string text_of(const Scenario& s) {
  const TrainLayout& l = s.train.layout;
  return fmt::format(
      "{}: dp {} cp {} ({}) ulysses {} pp {} vpp {} ({}: {}, order {}) tp {} ep {} etp {} sp {} fsdp {} of [{}] engine "
      "{} wrap "
      "{} {} recompute {} reshard {} {} prefetch {} in place {} chunks {} tokens {} offload {} capacity {} dispatch {} "
      "routers {} "
      "{} vocabulary by {}",
      s.model.name, l.dp, l.cp, name_of(s.train.context_exchange), l.ulysses, l.pp, l.vpp, s.train.pipeline_schedule,
      fmt::join(split_layers(s), " "), l.order, l.tp, l.ep, l.etp, l.sp, l.fsdp, l.shard_over,
      static_cast<int>(s.train.engine), static_cast<int>(s.train.wrap.policy), s.train.wrap.min_parameters,
      static_cast<int>(s.train.recompute), s.train.reshard_after_forward, s.train.reshard_ranks, s.train.prefetch,
      s.train.in_place_elements, s.train.loss_chunk_tokens, s.train.micro_batch_tokens, name_of(s.train.offload),
      s.train.expert_capacity, name_of(s.train.expert_dispatch), s.train.router_aux_loss_coef,
      s.train.router_z_loss_coef, s.model.vocab_multiple);
}

std::uint64_t number_of_environment(const char* variable, std::uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text != nullptr ? std::stoull(text) : otherwise;
}

std::vector<bool> turns(std::size_t number) {
  if (number_of_environment("HOTBUNK_LAYOUT_ALL", 0) > 0) return {false, true};
  return {number % 2 == 1};
}

void for_drawn_layouts(const std::vector<std::string>& goldens, std::uint64_t rounds, std::uint64_t salt,
                       const std::function<void(const Golden&, const Scenario&)>& check) {
  rounds = number_of_environment("HOTBUNK_LAYOUT_ROUNDS", rounds);
  const std::uint64_t seed = number_of_environment("HOTBUNK_LAYOUT_SEED", 1);
  for (std::uint64_t i = 0, drawn = 0; drawn < rounds; ++i) {
    std::mt19937_64 random(seed * salt + i);
    const Golden g = Golden::load(goldens[random() % goldens.size()]);
    const std::optional<Scenario> s = draw_layout(g, random);
    if (!s) continue;
    ++drawn;
    CAPTURE(i, text_of(*s));
    check(g, *s);
  }
}

void for_drawn_pairs(const std::vector<std::string>& goldens, std::uint64_t rounds, std::uint64_t salt,
                     const std::function<void(const Golden&, const Scenario&, const Scenario&)>& check) {
  for (std::uint64_t i = 0, drawn = 0; drawn < rounds; ++i) {
    std::mt19937_64 random(salt + i);
    const Golden g = Golden::load(goldens[random() % goldens.size()]);
    const std::optional<Scenario> first = draw_layout(g, random), then = draw_layout(g, random);
    if (!first || !then) continue;
    ++drawn;
    CAPTURE(i, text_of(*first), text_of(*then));
    check(g, *first, *then);
  }
}

}  // namespace hotbunk::test
