// What a weight update shard to shard moves: the planner's count of every rank is layout/'s map, transfer by transfer.
#include "layout/reshard.h"

#include <fmt/format.h>

#include <catch2/catch.hpp>
#include <random>

#include "layout/scenario_layout.h"
#include "planner/rl/reshard_volume.h"
#include "planner/rl/rl_model.h"
#include "spec/family.h"
#include "tests/planner/pricers.h"
#include "tests/planner/small_models.h"

namespace hotbunk {
namespace {

/// Numbers of one fixed sequence.
class LayoutDraw {
 public:
  explicit LayoutDraw(std::uint64_t seed) : bits_(seed) {}
  std::int64_t one_of(const std::vector<std::int64_t>& values) { return values[bits_() % values.size()]; }
  /// A divisor of n, up to `most`.
  std::int64_t divisor(std::int64_t n, std::int64_t most) {
    std::vector<std::int64_t> all;
    for (const std::int64_t d : divisors(n))
      if (d <= most) all.push_back(d);
    return one_of(all);
  }
  bool coin() { return one_of({0, 1}) == 1; }

 private:
  std::mt19937_64 bits_;
};

ModelSpec drawn_model(LayoutDraw& draw) {
  ModelSpec m = draw.coin() ? small_moe() : small_gpt();
  m.layers = draw.one_of({4, 6, 8});
  m.vocab = draw.one_of({1000, 1001, 32000});
  m.kv_heads = draw.one_of({2, 4, 16});
  m.tie_embeddings = draw.coin();
  if (m.moe) m.moe->first_dense_layers = draw.one_of({0, 1, 3});
  if (!m.moe && draw.coin()) {
    m.family = find_family("llama");
    m.gated_mlp = true;
    m.layer_norm = m.qkv_bias = m.o_bias = m.mlp_bias = m.learned_positions = false;
  }
  return m;
}

TrainPoint drawn_training(LayoutDraw& draw, const ModelSpec& m, std::int64_t ranks) {
  TrainPoint p;
  std::int64_t rest = ranks;
  const auto take = [&](std::int64_t& axis, std::int64_t most) { axis = draw.divisor(rest, most), rest /= axis; };
  p.sharding = draw.coin() ? Sharding::fsdp : Sharding::zero1;
  take(p.tp, 8);
  if (p.sharding == Sharding::zero1) take(p.pp, 4);
  if (p.pp > 1) p.vpp = draw.one_of({1, m.layers % (2 * p.pp) == 0 ? 2 : 1});
  take(p.cp, 2);
  take(p.ulysses, 2);
  p.dp = rest;
  p.etp = p.tp;
  if (p.sharding == Sharding::zero1 && m.moe) {
    p.etp = draw.divisor(p.tp, 8);
    p.ep = draw.divisor(ranks / p.pp / p.etp, 8);
  }
  if (p.sharding == Sharding::fsdp && draw.coin()) p.fsdp = draw.divisor(p.data_ranks(), p.data_ranks());
  return p;
}

RolloutPoint drawn_rollout(LayoutDraw& draw, const ModelSpec& m, std::int64_t ranks) {
  RolloutPoint r;
  r.tp = draw.divisor(ranks, 8);
  r.pp = draw.divisor(ranks / r.tp, 4);
  r.cp = draw.divisor(ranks / r.tp / r.pp, 2);
  r.engines = ranks / r.tp / r.pp / r.cp;
  r.strided = draw.coin();
  if (m.moe && draw.coin()) r.ep = draw.divisor(r.tp * r.cp, 8);
  return r;
}

/// Elements of every rank by the map of all tensors.
std::vector<std::int64_t> mapped_elements(const ModelSpec& m, const Layout& have, const Layout& need) {
  std::vector<TensorMove> moves;
  for (const ParamSpec& t : parameters_of(m)) moves.push_back({t.name, holdings(have, m, t), holdings(need, m, t)});
  return reshard(moves).received;
}

}  // namespace

TEST_CASE("received bytes of 500 random pairs of layouts are layout/'s map, rank by rank") {
  LayoutDraw draw(15);
  int pairs = 0, moe = 0, stages = 0, sharded = 0;
  for (int round = 0; round < 4000 && pairs < 500; ++round) {
    const ModelSpec m = drawn_model(draw);
    const std::int64_t ranks = draw.one_of({2, 4, 8, 16});
    const TrainPoint p = drawn_training(draw, m, ranks);
    const RolloutPoint r = drawn_rollout(draw, m, ranks);
    TrainSetting setting;
    setting.order = axis_order(
        std::vector<std::string>{"tp-cp-ep-dp-pp", "tp-pp-cp-ep-dp", "dp-tp-cp-ep-pp"}[draw.one_of({0, 1, 2})]);
    const auto have = trainer_layout(p, setting, m);
    const auto need = engine_layout(r, RolloutEngine::vllm, m.layers);
    REQUIRE(need.has_value());
    if (!have || !check_expert_mesh(have->dense, have->expert)) continue;
    INFO(fmt::format(
        "{} ranks, order {}, tp {} pp {} vpp {} cp {} ulysses {} dp {} ep {} etp {} fsdp {} {} -> tp {} pp {} "
        "cp {} ep {} {}; layers {}, kv heads {}, vocab {}, tied {}",
        ranks, round % 3, p.tp, p.pp, p.vpp, p.cp, p.ulysses, p.dp, p.ep, p.etp, p.fsdp,
        p.sharding == Sharding::fsdp ? "fsdp" : "zero1", r.tp, r.pp, r.cp, r.ep, r.strided ? "strided" : "contiguous",
        m.layers, m.kv_heads, m.vocab, m.tie_embeddings));
    REQUIRE(ReshardCounter(m).received(*have, *need) == mapped_elements(m, *have, *need));
    ++pairs, moe += m.moe ? 1 : 0, stages += p.pp > 1 || r.pp > 1 ? 1 : 0, sharded += p.sharding == Sharding::fsdp;
  }
  CHECK(pairs == 500);
  CHECK(std::min({moe, stages, sharded}) > 100);
}

// What a command prints of a weight update, of the systems whose engines are contiguous: the scenario's own layouts, by
// the map that `hotbunk layout` prints, rank by rank; of the sync the rank that receives most.
TEST_CASE("500 random launches: the worst rank of a weight update receives what layout/'s map of the scenario says") {
  LayoutDraw draw(28);
  int pairs = 0, gathered = 0, flat = 0, experts = 0, stages = 0, apart = 0;
  for (int round = 0; round < 6000 && pairs < 500; ++round) {
    const bool moe = draw.coin(), megatron = draw.coin(), direct = draw.coin();
    const std::int64_t ranks = draw.one_of({2, 4, 8, 16, 16, 96}), nodes = ranks > 8 ? ranks / 8 : 1;
    const std::int64_t tp = megatron ? draw.divisor(std::min<std::int64_t>(ranks, 8), 8) : 1,
                       pp = megatron ? draw.divisor(ranks / tp, 4) : 1, cp = megatron ? draw.one_of({1, 1, 2}) : 1,
                       ulysses = megatron ? 1 : draw.one_of({1, 1, 2}),
                       ep = megatron && moe ? draw.one_of({1, 2, 4}) : 1,
                       etp = megatron && moe ? draw.one_of({1, tp}) : tp;
    if (ranks % (tp * pp * cp * ulysses) != 0) continue;
    const std::int64_t dp = ranks / (tp * pp * cp * ulysses),
                       fsdp = megatron ? -1 : draw.one_of({-1, -1, dp * ulysses / 2});
    const std::string over = ulysses == 1 ? "" : std::vector<std::string>{"", "dp", "ulysses"}[draw.one_of({0, 1, 2})];
    const std::int64_t engine_tp = draw.divisor(ranks, 8), engine_pp = draw.divisor(ranks / engine_tp, 2);
    const std::string engine = megatron ? "megatron" : draw.one_of({0, 1}) == 1 ? "fsdp1" : "fsdp2";
    if (fsdp == 0 || (direct && engine == "fsdp1")) continue;  // no system moves parts of flat parameters
    const std::string model =
        moe ? fmt::format(
                  "{{model_type: qwen3_moe, hidden_size: 64, intermediate_size: 96, num_hidden_layers: {}, "
                  "num_attention_heads: 16, num_key_value_heads: {}, head_dim: 4, vocab_size: {}, num_experts: 8, "
                  "num_experts_per_tok: 2, moe_intermediate_size: 16, max_position_embeddings: 64}}",
                  draw.one_of({4, 8}), draw.one_of({2, 4, 16}), draw.one_of({160, 1001}))
            : fmt::format(
                  "{{model_type: llama, hidden_size: 72, intermediate_size: 96, num_hidden_layers: {}, "
                  "num_attention_heads: 16, num_key_value_heads: {}, head_dim: 4, vocab_size: {}, "
                  "tie_word_embeddings: {}, max_position_embeddings: 64}}",
                  draw.one_of({4, 8}), draw.one_of({2, 4, 16}), draw.one_of({160, 1001}),
                  draw.coin() ? "true" : "false");
    const std::string text = fmt::format(
        "model: {}\nprofile: {}\ncluster: {{gpu: h100-sxm-80gb, nodes: {}, gpus_per_node: {}}}\n"
        "train: {{engine: {}, layout: {{dp: {}, cp: {}, ulysses: {}, tp: {}, pp: {}, ep: {}, etp: {}, fsdp: {}, "
        "shard_over: [{}]}}, micro_batch_tokens: 64}}\n"
        "rollout: {{engine: vllm, layout: {{tp: {}, pp: {}, dp: {}}}, max_prefill_tokens: 64}}\nsync: {{mode: {}}}\n"
        "algorithm: {{prompts: {}, samples_per_prompt: 2}}\n"
        "workload: {{prompt_tokens: {{mean: 4, max: 8}}, response_tokens: {{mean: 8, max: 16}}}}\n",
        model, megatron ? "verl-megatron" : "verl-fsdp", nodes, ranks / nodes, engine, dp, cp, ulysses, tp, pp, ep, etp,
        fsdp, over, engine_tp, engine_pp, ranks / engine_tp / engine_pp, direct ? "direct" : "bucketed", ranks);
    const auto s = load_scenario_text(text, "drawn.yaml");
    if (!s) continue;  // what does not divide
    const auto have = TrainHoldings::of(*s);
    const auto need = engine_layout(*s);
    if (!have || !need) continue;
    INFO(text);
    const auto pricer = pricer_for(*s);
    if (pricer->why_unpriced(pricer->point())) continue;
    std::vector<TensorMove> moves;
    for (const ParamSpec& t : parameters_of(s->model)) {
      TensorMove move{t.name, {}, holdings(*need, s->model, t)};
      const std::int64_t rows = t.shape[0], cols = t.shape.size() > 1 ? t.shape[1] : 1;
      for (std::int64_t rank = 0; rank < ranks; ++rank) {
        move.have.push_back(have->held(t, rank));
        if (!direct) move.need[static_cast<std::size_t>(rank)] = {{{0, rows}, {0, cols}}};  // buckets of whole tensors
      }
      moves.push_back(std::move(move));
    }
    const std::vector<std::int64_t> received = reshard(moves).received;
    REQUIRE(pricer->rl().sync_price(pricer->point()).bytes_received ==
            2.0 * static_cast<double>(*std::ranges::max_element(received)));
    ++pairs, gathered += direct ? 0 : 1, flat += engine == "fsdp1", experts += ep > 1, stages += pp > 1;
    apart += direct && pricer->point().train.shard_over.some();
  }
  CAPTURE(pairs, gathered, flat, experts, stages, apart);
  CHECK(pairs == 500);
  CHECK(std::min(gathered, pairs - gathered) > 100);
  CHECK(std::min({flat, experts, stages}) > 30);
  CHECK(apart > 5);
}

TEST_CASE("a rank that holds its slice receives nothing: Megatron's distributed optimizer cuts moments, not weights") {
  const auto bytes = [](const std::string& train, const std::string& rollout) {
    const auto pricer = pricer_of_text(
        "model: qwen3-8b\nprofile: megatron\ncluster: {gpu: h100-sxm-80gb, nodes: 2, gpus_per_node: 8}\n"
        "train: {engine: megatron, layout: " +
        train +
        ", micro_batch_tokens: 16384, recompute: full}\n"
        "rollout: {engine: vllm, layout: " +
        rollout +
        ", memory_fraction: 0.6}\nsync: {mode: direct}\n"
        "workload: {prompt_tokens: {mean: 512, max: 1024}, response_tokens: {mean: 2048, max: 8192}}\n");
    return pricer->rl().sync_price(pricer->point()).bytes_received;
  };
  CHECK(bytes("{dp: 2, tp: 8, sp: true}", "{tp: 8, dp: 2}") == 0.0);
  CHECK(bytes("{dp: 4, tp: 4, sp: true}", "{tp: 4, dp: 4}") == 0.0);
  // A rank has an eighth and needs a quarter, of which it has at best the half, at worst nothing.
  const double quarter = bytes("{dp: 2, tp: 8, sp: true}", "{tp: 4, dp: 4}");
  CHECK(quarter > 0.9 * 8.19e9 * 2 / 4);
  CHECK(quarter < 8.3e9 * 2 / 4);
}

}  // namespace hotbunk
