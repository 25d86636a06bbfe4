// Engines with pipeline stages and context parallelism: what each rank holds, exchanges and receives.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <map>
#include <memory>

#include "graph/catalogue.h"
#include "layout/layout.h"
#include "layout/reshard.h"
#include "layout/scenario_layout.h"
#include "lowering/builder.h"
#include "lowering/lower.h"
#include "lowering/rollout.h"
#include "planner/answers/answers.h"
#include "planner/answers/lowered_space.h"
#include "planner/answers/plan_answer.h"
#include "planner/rl/engine_step.h"
#include "planner/rl/reshard_volume.h"
#include "spec/catalog.h"
#include "spec/kv_blocks.h"
#include "spec/loader.h"
#include "tests/paths.h"
#include "tests/planner/pricers.h"

namespace hotbunk {
namespace {

std::unique_ptr<ScenarioPricer> staged_pricer(const std::string& model, const std::vector<std::string>& sets) {
  const std::string text =
      "model: " + model +
      "\ncluster: {gpu: h200-sxm-141gb, nodes: 4}\nprofile: verl-fsdp\n"
      "train: {engine: fsdp2, layout: {dp: 32}, micro_batch_tokens: 16384}\n"
      "algorithm: {name: grpo, prompts: 256, samples_per_prompt: 8}\n"
      "workload: {prompt_tokens: {mean: 512, max: 1024}, response_tokens: {mean: 1536, max: 4096}}\n";
  return pricer_of_text(text, sets);
}

std::vector<std::int64_t> stages(RolloutEngine engine, std::int64_t layers, std::int64_t pp) {
  std::vector<std::int64_t> out;
  for (std::int64_t i = 0; i < pp; ++i) out.push_back(stage_layers(engine, layers, pp, i));
  return out;
}

double wire(const Explanation& e, const std::string& what, bool network) {
  double sum = 0.0;
  for (const LinkUse& u : e.links)
    if (u.phase == RlPhase::rollout && u.what == what) sum += network ? u.network_wire : u.node_wire;
  return sum;
}

}  // namespace

TEST_CASE("layers that do not divide go where each engine puts them") {
  using List = std::vector<std::int64_t>;
  CHECK(stages(RolloutEngine::vllm, 61, 2) == List{31, 30});
  CHECK(stages(RolloutEngine::sglang, 61, 2) == List{30, 31});
  CHECK(stages(RolloutEngine::vllm, 61, 4) == List{15, 15, 16, 15});
  CHECK(stages(RolloutEngine::vllm, 15, 4) == List{4, 4, 4, 3});
  CHECK(stages(RolloutEngine::sglang, 14, 4) == List{3, 3, 4, 4});
  CHECK(stages(RolloutEngine::sglang, 64, 4) == List{16, 16, 16, 16});
}

TEST_CASE("stages hold the model once, a tied embedding at both ends") {
  for (const char* model : {"qwen2.5-7b", "qwen2.5-0.5b", "mixtral-8x7b", "deepseek-v3"})
    for (const std::int64_t pp : {1, 2, 3, 8}) {
      const auto p = staged_pricer(model, {"rollout.layout={dp: 32}"});
      const ModelSpec& m = p->train().model();
      const ModelCounts c = counts_of(m);
      double sum = 0.0, layers = 0.0;
      each_stage(m, RolloutEngine::sglang, pp, [&](const RolloutStage& s, std::int64_t count) {
        sum += static_cast<double>(count) * stage_elements(c, RolloutEngine::vllm, {.pp = pp}, s);
        layers += static_cast<double>(count) * s.layers;
      });
      const double again = m.tie_embeddings && pp > 1 ? static_cast<double>(m.vocab * m.hidden) : 0.0;
      INFO(model << " pp " << pp);
      CHECK(sum == static_cast<double>(parameter_count(m)) + again);
      CHECK(layers == static_cast<double>(m.layers));
    }
}

TEST_CASE("the smallest pool of the stages is the engine's, the fullest stage its memory") {
  // DeepSeek-V3 under SGLang: 30 layers, three of them dense, then 31 and the head.
  for (const char* engine : {"sglang", "vllm"}) {
    const auto p =
        staged_pricer("deepseek-v3", {"rollout.layout={tp: 8, pp: 2, dp: 2, ep: 8}",
                                      std::string("rollout.engine=") + engine, "rollout.memory_fraction=0.9"});
    const RlModel& rl = p->rl();
    const RolloutPoint r = p->point().rollout;
    const RolloutPrice price = rl.price_rollout(r);
    REQUIRE(price.fits);
    const double moe = 3.0 * 7168 * 2048 * 256, table = 129280.0 * 7168;  // routed experts of a layer; an embedding
    CHECK(rl.counts().experts == moe);
    CHECK(rl.counts().front == table);
    // Weights: the last stage, with more layers of experts than the first and as large a table.
    const double layers = engine == std::string("sglang") ? 31 : 30;
    const ModelCounts& c = rl.counts();
    const double attention = layers * c.attention, rest = layers * c.moe_layer + c.back - attention;
    CHECK(price.weight_bytes == Approx(2 * (attention + rest) / 8));
    // A latent of 576 in bf16 for each layer of that stage, the fullest with the cache, too.
    CHECK(price.kv_bytes_per_token == layers * 576 * 2);
    // The last stage's pool, in tokens of its own layers.
    const FrameworkProfile& f = p->train().framework();
    const double device = rl.setting().device_bytes, outside = f.context_bytes.value + 2 * f.communicator_bytes.value;
    if (engine == std::string("sglang"))
      CHECK(price.pool_bytes == Approx((device - outside) * 0.9 - price.weight_bytes));
    else CHECK(price.weight_bytes + price.pool_bytes + price.activation_bytes + outside <= device * 0.9 * (1 + 1e-9));
  }
}

TEST_CASE("hops stay in a node where stages share it") {
  // Every token leaves a stage as hidden states and residual, half of them on each of two ranks.
  const auto near = staged_pricer("qwen2.5-7b", {"rollout.layout={tp: 2, pp: 4, dp: 4}", "rollout.engine=vllm"}),
             far = staged_pricer("qwen2.5-7b",
                                 {"rollout.layout={tp: 2, pp: 4, dp: 4, order: strided}", "rollout.engine=vllm"});
  // 512 sequences on an engine, 64 distinct prompts of 512 tokens; of each response all but the first token.
  const double tokens = 64 * 512 + 512 * 1535.0;
  const Explanation a = explain(*near), b = explain(*far);
  CHECK(wire(a, "pipeline", false) == Approx(tokens * 2 * 3584 * 2 / 2));
  CHECK(wire(a, "pipeline", true) == 0);
  CHECK(wire(b, "pipeline", true) == Approx(tokens * 2 * 3584 * 2 / 2));
  // A ring over two ranks passes half of what it gathers.
  CHECK(wire(a, "tp gather behind a hop", false) == Approx(tokens * 2 * 3584 * 2 / 2));
  // Of the network's hops latency is felt where few sequences are left.
  CHECK(far->rl().decode_round(far->point().rollout, 1, 1000).latency >
        near->rl().decode_round(near->point().rollout, 1, 1000).latency);
}

TEST_CASE("prompts go through the stages in steps: a bubble of pp - 1 of them") {
  // All 512 sequences start at once: 64 distinct prompts of 512 tokens, 32768 tokens in steps of 8192 and 2048.
  for (const std::int64_t tokens : {8192, 2048}) {
    const auto p = staged_pricer(
        "qwen2.5-7b", {"rollout.layout={tp: 2, pp: 4, dp: 4}", "rollout.engine=sglang",
                       "rollout.max_running_requests=512", "rollout.max_prefill_tokens=" + std::to_string(tokens)});
    const RolloutPoint r = p->point().rollout;
    const EngineStep step(p->rl(), r);
    const double steps = 32768.0 / static_cast<double>(tokens), ends = 512 / steps, each = static_cast<double>(tokens);
    double slowest = 0, all = 0;
    each_stage(p->train().model(), RolloutEngine::sglang, 4, [&](const RolloutStage& s, std::int64_t count) {
      const double one = step.prefill<StepSeconds>(s, each, ends).total;
      slowest = std::max(slowest, one), all += static_cast<double>(count) * one;
    });
    const double seconds = p->rl().price_rollout(r).prefill_seconds;
    CHECK(seconds == Approx((steps - 1) * slowest + all + step.hops_seconds(each, ends)));
    // Stages are nearly alike: (steps + pp - 1) / steps of the time without a bubble.
    CHECK(seconds / (steps * slowest) == Approx((steps + 3) / steps).epsilon(0.1));
  }
}

TEST_CASE("context ranks share prompts; only vLLM's share a sequence's cache") {
  const auto of = [](const char* engine, int cp) {
    return staged_pricer("qwen2.5-7b",
                         {"rollout.layout={tp: 2, cp: " + std::to_string(cp) + ", dp: " + std::to_string(16 / cp) + "}",
                          std::string("rollout.engine=") + engine, "algorithm.prompts=512",
                          "workload.prompt_tokens={mean: 16384, max: 32768}", "rollout.max_prefill_tokens=32768",
                          "train.micro_batch_tokens=65536"});
  };
  const auto price = [](const ScenarioPricer& p) { return p.rl().price_rollout(p.point().rollout); };
  const auto vllm1 = of("vllm", 1), vllm2 = of("vllm", 2), sglang1 = of("sglang", 1), sglang2 = of("sglang", 2);
  CHECK(price(*vllm2).kv_bytes_per_token == price(*vllm1).kv_bytes_per_token / 2);
  CHECK(price(*sglang2).kv_bytes_per_token == price(*sglang1).kv_bytes_per_token);
  // The weights lie on both ranks.
  CHECK(price(*vllm2).weight_bytes == price(*vllm1).weight_bytes);
  for (const auto& [one, two] : {std::pair(vllm1.get(), vllm2.get()), std::pair(sglang1.get(), sglang2.get())}) {
    const RolloutPoint a = one->point().rollout, b = two->point().rollout;
    const EngineStep alone(one->rl(), a), shared(two->rl(), b);
    const RolloutStage whole{28, 0, true, true};
    // One step of 32768 tokens: half as many on each rank, and 28 gathers of the keys and values of all of them.
    const CostModel& c = one->train().cost();
    const double gathers = 28 * c.collective_seconds(OpKind::all_gather, GroupShape::strided(2, 2, 8), 32768.0 * 1024);
    const double x = alone.prefill<StepSeconds>(whole, 32768, 2).total,
                 y = shared.prefill<StepSeconds>(whole, 32768, 2).total;
    CHECK(y > 0.5 * x);
    CHECK(y < 0.5 * x + gathers + 0.05 * x);
    // Every rank passes all decoded tokens: no sooner than alone but for the cache that vLLM's ranks share.
    const double s = alone.decode<StepSeconds>(whole, 64, 30000).total,
                 t = shared.decode<StepSeconds>(whole, 64, 30000).total;
    if (one == sglang1.get()) CHECK(t == s);
    else CHECK((t < s && t > s / 2));
  }
  const Explanation e = explain(*vllm2);
  CHECK(wire(e, "cp keys and values", false) > 0);
  CHECK(wire(e, "cp partial attention", false) > 0);
  CHECK(wire(explain(*sglang2), "cp partial attention", false) == 0);
}

namespace {

std::unique_ptr<ScenarioPricer> own_engine(const std::string& model, const std::string& layout) {
  return pricer_of_text("model: " + model +
                            "\ncluster: {gpu: h200-sxm-141gb, nodes: 1}\n"
                            "train: {engine: fsdp2, layout: {dp: 8}, micro_batch_tokens: 16384}\n"
                            "algorithm: {name: grpo, prompts: 16, samples_per_prompt: 8}\n"
                            "workload: {prompt_tokens: {mean: 8, max: 8}, response_tokens: {mean: 8, max: 16}}\n",
                        {"rollout.layout=" + layout, "rollout.engine=hotbunk"});
}

/// Payload of rank 0 in a step of its engine over the groups of a family.
std::map<OpKind, double> sent_in(const Plan& plan, const std::string& block, const Sizes& sizes, Family family) {
  std::map<OpKind, double> sent;
  for (const Block& b : plan.program(0).phases[static_cast<std::size_t>(plan.phase_index("rollout"))])
    if (b.name == block)
      each_op(plan.program(0), b, [&](const BoundOp& op) {
        if (op->group == static_cast<GroupId>(family) && is_communication(op->kind))
          sent[op->kind] += static_cast<double>(payload_bytes(*op, sizes, places_of(plan, 0)));
      });
  return sent;
}

}  // namespace

TEST_CASE("what an engine of ours is priced to send over its context ranks is what its plan sends") {
  for (const std::string& model :
       {std::string("qwen2.5-7b"), source_folder + std::string("/tests/golden/deepseek-v3-tiny")})
    for (const char* layout : {"{tp: 2, cp: 2, dp: 2}", "{tp: 1, cp: 4, dp: 2}"}) {
      INFO(model << " " << layout);
      const auto p = own_engine(model, layout);
      const Scenario& s = p->scenario();
      const auto plan = lower(s);
      REQUIRE(plan.has_value());
      const RolloutPoint r = p->point().rollout;
      const RolloutStage whole{
          static_cast<double>(s.model.layers),
          s.model.moe ? static_cast<double>(s.model.layers - s.model.moe->first_dense_layers) : 0.0, true, true};
      const EngineStep step(p->rl(), r);
      for (const char* block : {"prefill", "decode"}) {
        const std::int64_t seqs = 4, tokens = std::string_view(block) == "decode" ? seqs : 32;
        const Sizes sizes{.tokens = tokens, .seqs = seqs, .attention_pairs = 8 * tokens};
        auto sent = sent_in(*plan, block, sizes, Family::engine_context);
        const auto all = static_cast<double>(tokens);
        const RolloutPayload priced = step.payload(whole, all, all, std::string_view(block) == "decode" ? 0.0 : all);
        CHECK(sent.size() == 2);
        CHECK(sent[OpKind::all_gather] == priced.context_gather);
        CHECK(sent[OpKind::all_reduce] == priced.context_reduce);
      }
      // A rank holds its part of every sequence.
      CHECK(p->rl().price_rollout(r).kv_bytes_per_token * static_cast<double>(block_span(s.rollout)) ==
            static_cast<double>(kv_block_bytes(s)));
    }
}

TEST_CASE("and what ranks with sequences of their own send around the MLP, and hold") {
  const auto p = own_engine("qwen2.5-7b", "{tp: 4, attention_dp: 4, dp: 2}");
  const Scenario& s = p->scenario();
  const auto plan = lower(s);
  REQUIRE(plan.has_value());
  const RolloutPoint r = p->point().rollout;
  const EngineStep step(p->rl(), r);
  for (const std::string block : {"prefill", "decode"}) {
    // 4 ranks with 8 tokens, or one for each of 4 sequences.
    const std::int64_t seqs = 4, own = block == "decode" ? seqs : 8;
    Sizes sizes{.tokens = 4 * own, .seqs = seqs, .attention_pairs = 8 * own};
    sizes[sequence_extent] = own;
    auto sent = sent_in(*plan, block, sizes, Family::tp);
    const auto all = static_cast<double>(4 * own);
    const RolloutPayload priced = step.payload({28, 0, true, true}, all, all, block == "decode" ? 0.0 : all);
    // An all-reduce is a reduce-scatter and an all-gather; beside them everyone's ids and log-probs.
    CHECK(priced.reduce == 28 * all * 3584 * 2);
    CHECK(sent == std::map<OpKind, double>{{OpKind::reduce_scatter, priced.reduce},
                                           {OpKind::all_gather, priced.reduce + 8.0 * 4 * static_cast<double>(seqs)}});
  }
  double weights = 0;
  for (const LocalWeight& w : rollout_weights(s.model, engine_cuts(s)[0], 0))
    weights += static_cast<double>(w.elements());
  const RolloutPrice price = p->rl().price_rollout(r);
  CHECK(price.weight_bytes == Approx(2 * weights).epsilon(1e-4));  // norms are whole on every rank
  CHECK(price.kv_bytes_per_token * 4.0 * static_cast<double>(s.rollout.block_tokens) ==
        static_cast<double>(kv_block_bytes(s)));
}

TEST_CASE("groups with a cache each have theirs in what is put together of parts, however few blocks it has") {
  for (const char* block : {"rollout.block_tokens=4", "rollout.block_tokens=16"}) {  // of the longest, three and one
    const auto s = load_scenario(std::string(source_folder) + "/scenarios/attention-dp-cpu.yaml", {block});
    REQUIRE(s);
    const auto pricer = ScenarioPricer::make(*s, catalog_root()).value();
    const CostModel& cost = pricer->train().cost();
    RlPrice parts, whole;
    REQUIRE(plan_prices(*s, cost).use(pricer->point(), parts));
    REQUIRE(use_mapped_plan(*s, cost, whole));
    CHECK(parts.rollout_bytes == whole.rollout_bytes);
    CHECK(parts.peak_bytes() == whole.peak_bytes());
  }
}

TEST_CASE("an update brings a rank its stage's weights") {
  const auto at = [](const char* layout, const char* order = "contiguous") {
    return staged_pricer("qwen2.5-7b", {std::string("rollout.layout={") + layout + ", order: " + order + "}",
                                        "sync.mode=direct", "rollout.engine=vllm"});
  };
  const auto whole = at("tp: 2, dp: 16"), staged = at("tp: 2, pp: 4, dp: 4");
  const SyncJob a = whole->rl().sync_job(whole->point()), b = staged->rl().sync_job(staged->point());
  // Gathered buckets carry the model; a rank takes its slice of 7 layers and the head out of them.
  CHECK(a.model_bytes == b.model_bytes);
  CHECK(b.slice_bytes == staged->rl().price_rollout(staged->point().rollout).weight_bytes);
  CHECK(b.model_bytes / b.target_parts == Approx(b.slice_bytes));
  // 12 tensors a layer; the last stage has the final norm and the head beside its seven.
  CHECK(a.taken_tensors() == 28 * 12 + 3);
  CHECK(b.taken_tensors() == 7 * 12 + 2);
  CHECK(b.received_bytes < 0.4 * a.received_bytes);
  CHECK(staged->rl().sync_price(staged->point()).seconds() < whole->rl().sync_price(whole->point()).seconds());
}

TEST_CASE("received bytes of stages = every tensor of every layer moved") {
  const auto p = staged_pricer("qwen2.5-0.5b", {"rollout.layout={dp: 32}"});
  ModelSpec m = p->train().model();
  m.layers = 6;
  for (const bool strided : {false, true})
    for (const std::int64_t cp : {1, 2}) {
      // 16 ranks: engines of tp 2 with three stages of 1, 3 and 2 layers would be 6 ranks; here two stages of 4 and 2.
      const std::int64_t engines = 16 / (4 * cp);
      const EngineAxes axes{2, cp, {{0, 0, {0, 4}}, {1, 0, {4, 6}}}};
      const Layout need = rollout_layout(axes, engines, strided ? EngineOrder::strided : EngineOrder::contiguous);
      const Layout have = fsdp_layout(16);
      std::vector<TensorMove> moves;
      for (const ParamSpec& t : parameters_of(m)) moves.push_back({t.name, holdings(have, m, t), holdings(need, m, t)});
      const std::vector<std::int64_t> received = reshard(moves).received;
      CHECK(ReshardCounter(m).received(have, need) == received);
    }
}

}  // namespace hotbunk
