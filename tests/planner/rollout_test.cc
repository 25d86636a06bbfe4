// The closed form of an engine, each expectation derived in a comment.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <memory>

#include "exec/lengths.h"
#include "planner/answers/answers.h"
#include "planner/rl/kv_pool.h"
#include "planner/rl/length_moments.h"
#include "spec/catalog.h"
#include "spec/loader.h"
#include "tests/planner/pricers.h"

namespace hotbunk {
namespace {

std::unique_ptr<ScenarioPricer> pricer_of(const std::vector<std::string>& sets = {}) {
  const char* text =
      "name: qwen\nmodel: qwen2.5-7b\ncluster: {gpu: h100-sxm-80gb, nodes: 1, gpus_per_node: 8}\n"
      "train: {engine: fsdp2, layout: {dp: 8}, recompute: full, micro_batch_tokens: 65536}\n"
      "rollout: {engine: sglang, layout: {tp: 2, dp: 4}, memory_fraction: 0.8}\n"
      "algorithm: {name: grpo, prompts: 64, samples_per_prompt: 8}\n"
      "workload: {prompt_tokens: {mean: 512, max: 1024}, response_tokens: {mean: 1536, max: 4096}}\n";
  return pricer_of_text(text, sets);
}

RolloutPrice price_of(const ScenarioPricer& p) { return p.rl().price_rollout(p.point().rollout); }

constexpr RolloutPoint tp2{.tp = 2, .engines = 4};

}  // namespace

TEST_CASE("an engine's products run in its own precision, whatever training's do") {
  const RolloutPrice plain = price_of(*pricer_of());
  const RolloutPrice fp8 = price_of(*pricer_of({"train.precision.gemm=fp8"}));
  CHECK(fp8.prefill_seconds == plain.prefill_seconds);
  CHECK(fp8.decode_seconds == plain.decode_seconds);
}

TEST_CASE("prefill pays for causal attention") {
  // 4 engines with 30,000 tokens each: 30 prompts of 1,000 against one of 30,000, in one step either way.
  const auto of = [](const char* prompts, const char* tokens) {
    return pricer_of({std::string("algorithm.prompts=") + prompts, "algorithm.samples_per_prompt=1",
                      "rollout.max_prefill_tokens=40000",
                      std::string("workload.prompt_tokens={mean: ") + tokens + ", max: 40000, distribution: fixed}"});
  };
  const auto many = of("120", "1000"), one = of("4", "30000");
  const double more = price_of(*one).prefill_seconds - price_of(*many).prefill_seconds;
  // Pairs: s (s + 1) / 2 each; 4 * 28 heads * 128 FLOPs per pair and layer, 28 layers, over 2 ranks.
  const double pairs = 30000.0 * 30001 / 2 - 30.0 * 1000 * 1001 / 2;
  const double flops = pairs * 4 * 28 * 128 * 28 / 2, peak = many->train().cost().peak_flops(DType::bf16);
  CHECK(more > flops / peak);
  CHECK(more < 2.5 * flops / peak);  // attention reaches more than 40 % of the peak at such lengths
}

TEST_CASE("only sampled tokens meet the head, no token is multiplied by the embedding") {
  const auto p = pricer_of();
  const TrainModel& t = p->train();
  ModelSpec wide = t.model();
  wide.vocab *= 2;
  const TrainModel other(wide, t.setting(), t.cost(), t.framework());
  const RlModel twice(other, p->rl().setting());
  // 16 distinct prompts of 512 tokens on an engine are one step, which samples the first token of 128 responses: 128
  // rows more products with 152064 / 2 columns and 128 rows of fp32 logits more to stream and to gather; 8192 tokens
  // times the table would be 11 % of 7.6e9 parameters.
  const double whole = p->rl().price_rollout(tp2).prefill_seconds;
  const double more = twice.price_rollout(tp2).prefill_seconds - whole;
  const CostModel& c = t.cost();
  const double v = 152064, h = 3584;
  const auto ends = [&](double vocab) {
    return c.gemm_seconds(128, vocab / 2, h, DType::bf16) + c.memory_seconds(4 * 128 * vocab) +
           c.collective_seconds(OpKind::all_gather, GroupShape::strided(2, 1, 8), 4 * 128 * vocab);
  };
  CHECK(more == Approx(ends(2 * v) - ends(v)).epsilon(1e-6));
  CHECK(more < 0.01 * whole);
}

TEST_CASE("what has to fit is the longest prompt with the longest response") {
  const auto p = pricer_of();
  RlSetting s = p->rl().setting();
  s.pool_tokens = 1024 + 4096;
  CHECK(RlModel(p->train(), s).price_rollout(tp2).fits);
  s.pool_tokens -= 1;
  CHECK_FALSE(RlModel(p->train(), s).price_rollout(tp2).fits);
}

TEST_CASE("prefill runs in steps of max_prefill_tokens") {
  // 16 prompts of 512: one step of 8192, 16 of 512. Each step streams the layers' weights, 6.5e9 over 2 ranks, again.
  const double one = price_of(*pricer_of({"rollout.max_prefill_tokens=8192"})).prefill_seconds;
  const auto small = pricer_of({"rollout.max_prefill_tokens=1024"});
  const double eight = price_of(*small).prefill_seconds;
  const double layer_kernels = 28 * 10 * small->train().cost().hardware().kernel_overhead.value;
  CHECK(eight > one + 7 * layer_kernels);
  CHECK(eight < 4 * one);
}

TEST_CASE("every response token is decoded once, by full slots and then by what is left") {
  for (const char* slots : {"8", "32", "4096"}) {
    const auto p = pricer_of({std::string("rollout.max_running_requests=") + slots});
    const RolloutPrice r = price_of(*p);
    // 128 sequences on an engine; all-reduces of 3584 bf16 values twice in 28 layers and once behind the embedding, for
    // each token: 16 prompts once, of each response all but the first, which the prompt's pass samples.
    CHECK(r.sent.reduce == Approx((2.0 * 28 + 1) * 3584 * 2 * (16 * 512 + 128 * 1535)));
    CHECK(r.steps * std::min(128.0, std::stod(slots)) >= 128 * 1535);
    if (std::stod(slots) >= 128) CHECK(r.decode_seconds == 0);
  }
}

TEST_CASE("steps until an engine's sequences have ended") {
  // Without spread: 8 sequences of 10 in 4 slots are two rounds, in 3 slots three, in 8 slots one.
  const LengthSpec fixed{.mean = 10, .max = 100, .distribution = LengthDistribution::fixed};
  CHECK(drain_steps(fixed, 8, 4, 1).full == Approx(10));
  CHECK(drain_steps(fixed, 8, 4, 1).all == Approx(20).epsilon(1e-3));
  CHECK(drain_steps(fixed, 8, 3, 1).all == Approx(30).epsilon(1e-3));
  CHECK(drain_steps(fixed, 8, 8, 1).full == 0);
  CHECK(drain_steps(fixed, 8, 8, 1).all == Approx(10).epsilon(1e-3));
  // With spread, against slots that take the next sequence as soon as one has ended, drawn many times.
  for (const double cv : {0.5, 1.0})
    for (const double slots : {50.0, 100.0, 400.0}) {
      const LengthSpec l{.mean = 1000, .max = 8000, .distribution = LengthDistribution::lognormal, .cv = cv};
      constexpr int sequences = 400, rounds = 200;
      double full = 0, all = 0;
      for (int round = 1; round <= rounds; ++round) {
        std::vector<double> free(static_cast<std::size_t>(slots), 0.0);
        double admitted = 0, ended = 0;
        for (int i = 0; i < sequences; ++i) {
          const auto slot = std::min_element(free.begin(), free.end());
          admitted = std::max(admitted, *slot);
          *slot += static_cast<double>(draw_length(l, 1, round, LengthOf::response, i));
          ended = std::max(ended, *slot);
        }
        full += admitted / rounds, all += ended / rounds;
      }
      const DrainSteps d = drain_steps(l, sequences, slots, 1);
      INFO("cv " << cv << " slots " << slots << ": " << d.full << " of " << full << ", " << d.all << " of " << all);
      CHECK(d.full == Approx(full).epsilon(0.1).margin(1));
      CHECK(d.all == Approx(all).epsilon(0.08));
    }
}

TEST_CASE("the spread of response lengths costs seconds") {
  double first = 0, last = 0;
  for (const char* cv : {"0", "0.2", "0.4", "0.6"}) {
    const auto p = pricer_of({std::string("workload.response_tokens={mean: 1536, max: 4096, cv: ") + cv + "}"});
    const double seconds = price_of(*p).seconds();
    CHECK(seconds > last);
    if (last == 0) first = seconds;
    last = seconds;
  }
  CHECK(last > 1.3 * first);
}

TEST_CASE("prompts of a mixture of experts go through in steps, each with its exchange") {
  const auto of = [](const char* tokens) {
    auto s = load_scenario_text(
        "model: qwen3-30b-a3b\ncluster: {gpu: h100-sxm-80gb, nodes: 1, gpus_per_node: 8}\n"
        "train: {engine: fsdp2, layout: {dp: 8}, micro_batch_tokens: 8192}\n"
        "rollout: {engine: sglang, layout: {tp: 8, dp: 1, ep: 8}}\n"
        "algorithm: {name: grpo, prompts: 64, samples_per_prompt: 8}\n"
        "workload: {prompt_tokens: {mean: 512, max: 1024}, response_tokens: {mean: 1536, max: 4096}}\n",
        "moe.yaml", {std::string("rollout.max_prefill_tokens=") + tokens, "rollout.max_running_requests=512"});
    if (!s) FAIL(render(s.error()));
    auto pricer = ScenarioPricer::make(*s, catalog_root());
    REQUIRE(pricer.has_value());
    return std::move(*pricer);
  };
  // 64 distinct prompts of 512: one step of 32768, or 32 of 1024. Each streams the touched experts again, 48 layers of
  // 128 x 3 x 2048 x 768 bf16 values over 8 ranks, and starts two all-to-alls a layer.
  const auto few = of("32768"), many = of("1024");
  const CostModel& c = many->train().cost();
  const double more = price_of(*many).prefill_seconds - price_of(*few).prefill_seconds;
  const double exchange = c.collective_seconds(OpKind::all_to_all, GroupShape::strided(8, 1, 8), 1.0);
  CHECK(more > 31 * 48 * 2 * exchange);
  CHECK(price_of(*many).sent.dispatch == Approx(price_of(*few).sent.dispatch));
  // 1024 tokens touch every expert, not only the 8 of each token: 128 experts more, of which as many are active, are
  // 128 more to stream in each of 32 steps, which are too short for the products to hide it.
  const TrainModel& t = many->train();
  ModelSpec wider = t.model();
  wider.moe->experts *= 2;
  const RolloutPoint engine = many->point().rollout;
  const TrainModel other(wider, t.setting(), c, t.framework());
  const double streamed = RlModel(other, many->rl().setting()).price_rollout(engine).prefill_seconds -
                          many->rl().price_rollout(engine).prefill_seconds;
  CHECK(streamed == Approx(32 * c.memory_seconds(48.0 * 128 * 3 * 2048 * 768 * 2 / 8)).epsilon(0.02));
}

TEST_CASE("moments of length distributions") {
  const LengthSpec fixed{.mean = 100, .max = 1000, .distribution = LengthDistribution::fixed};
  CHECK(mean_square(fixed) == 100 * 100);
  CHECK(longest_of(fixed, 50) == 100);
  // Integers 1 to 5: (1 + 4 + 9 + 16 + 25) / 5 = 11.
  const LengthSpec uniform{.mean = 3, .max = 1000, .distribution = LengthDistribution::uniform};
  CHECK(mean_square(uniform) == Approx(11));
  CHECK(longest_of(uniform, 4) == Approx(4));  // 4/5 of the way to 5
  // Lognormal: variance = (cv mean)^2. The quantile of one standard deviation, 0.841345 = n / (n + 1) at n = 5.30302,
  // is e^sigma times the median mean / sqrt(1 + cv^2); of one draw no more is expected than the mean.
  const LengthSpec log{.mean = 100, .max = 1e6, .distribution = LengthDistribution::lognormal, .cv = 0.5};
  CHECK(mean_square(log) == Approx(100 * 100 * 1.25));
  CHECK(longest_of(log, 1) == 100);
  CHECK(longest_of(log, 5.30302) == Approx(100 / std::sqrt(1.25) * std::exp(std::sqrt(std::log(1.25)))).epsilon(1e-5));
  // A cut holds both down.
  const LengthSpec cut{.mean = 100, .max = 110, .distribution = LengthDistribution::lognormal, .cv = 2};
  CHECK(mean_square(cut) == 100 * 110);
  CHECK(longest_of(cut, 1000) == 110);
}

TEST_CASE("the pool follows the engine's rule") {
  // 100 bytes, 2 of context, 20 of weights, 5 of activations, 10 of a trainer that is awake.
  PoolInputs in{.device = 100, .fraction = 0.8, .context = 2, .weights = 20, .activations = 5, .leftovers = 10};
  CHECK(kv_pool(RolloutEngine::hotbunk, in).bytes == Approx(60));  // 80 - 20
  // 88 free at init, 68 after the load, of which 88 * 0.2 = 17.6 stay free.
  CHECK(kv_pool(RolloutEngine::sglang, in).bytes == Approx(50.4));
  CHECK(kv_pool(RolloutEngine::vllm, in).bytes == Approx(53));  // 80 - 20 - 5 - 2, whatever else is on the device
  CHECK(kv_pool(RolloutEngine::vllm, in).lacking == 0);
  in.leftovers = 30;  // 68 free, 80 asked for
  CHECK(kv_pool(RolloutEngine::vllm, in).lacking == 12);
  CHECK(kv_pool(RolloutEngine::sglang, in).lacking == 0);
  in.device = 100.5, in.fraction = 0.5, in.leftovers = 0;  // 50.25 is asked for as 51
  CHECK(kv_pool(RolloutEngine::vllm, in).bytes == Approx(51 - 20 - 5 - 2));
}

TEST_CASE("sglang and vllm size other pools, and what training leaves awake shrinks sglang's") {
  const auto of = [](const char* engine, const char* offload, const char* fraction = "0.8") {
    return pricer_of({std::string("rollout.engine=") + engine, std::string("train.offload=") + offload,
                      std::string("rollout.memory_fraction=") + fraction});
  };
  const auto sglang = of("sglang", "sleep"), vllm = of("vllm", "sleep");
  const FrameworkProfile& f = sglang->train().framework();
  const double device = sglang->rl().setting().device_bytes,
               outside = f.context_bytes.value + f.communicator_bytes.value;
  const RolloutPrice a = price_of(*sglang), b = price_of(*vllm);
  CHECK(a.pool_bytes == Approx((device - outside) * 0.8 - a.weight_bytes));
  CHECK(b.pool_bytes == Approx(device * 0.8 - b.weight_bytes - b.activation_bytes - outside));
  // A step of 8192 tokens: fp32 logits of 256 sequences and half of them again are little; the MLP is the widest, the
  // stream with 3 or itself and the norm with 2 halves of 18944 columns, bf16.
  CHECK(a.activation_bytes == Approx(2.0 * 8192 * (3584 + 3 * 18944.0 / 2)));
  // Awake: fp32 master and moments of 1/8, and the trainer's communicator (8 data-parallel ranks).
  const auto shrunk = [&](const ScenarioPricer& p) { return p.rl().price_rollout(p.point()); };
  const double state = 7'615'616'512.0 * 12 / 8, groups = f.communicator_bytes.value;
  CHECK(shrunk(*of("sglang", "none")).pool_bytes == Approx(a.pool_bytes - 0.8 * (state + groups)).epsilon(1e-4));
  CHECK(shrunk(*of("vllm", "none")).pool_bytes == Approx(b.pool_bytes));
  CHECK(shrunk(*sglang).pool_bytes == Approx(a.pool_bytes - 0.8 * groups));
  // 0.9 of 79.19 GiB are not free beside 11.4 GB: vLLM does not start, SGLang takes less.
  const auto late = of("vllm", "none", "0.9"), less = of("sglang", "none", "0.9");
  CHECK_FALSE(late->price(late->point()).fits);
  CHECK(late->price(late->point()).rollout_bytes - device ==
        Approx(0.9 * device - (device - outside - groups - state)).epsilon(1e-3));
  CHECK(shrunk(*less).fits);
  CHECK(of("vllm", "sleep", "0.9")->rl().price_rollout(late->point().rollout).fits);
}

TEST_CASE("worked: an engine of four stages, its weights, its cache and its cadence") {
  // Qwen2.5-7B on one node as one engine of tp 2 x pp 4: 7 layers a stage.
  const auto p = pricer_of({"rollout.layout={tp: 2, pp: 4, dp: 1}"});
  const RolloutPoint r = p->point().rollout;
  const RolloutPrice price = p->rl().price_rollout(r);
  const CostModel& c = p->train().cost();
  // A layer: attention 3584 x 128 x (2 x 28 + 2 x 4) and biases 3584 + 2 x 512, MLP 3 x 3584 x 18944, two norms.
  const double layer = 29'360'128 + 4'608 + 203'685'888 + 7'168, head = 152064.0 * 3584;
  // The last stage has head and final norm, the first the embedding: two slices, bf16.
  CHECK(price.weight_bytes == Approx((7 * layer + head + 3584) / 2 * 2));
  // K and V of 4 / 2 heads of 128 in 7 layers, bf16.
  CHECK(price.kv_bytes_per_token == 7.0 * 2 * 128 * 2 * 2);
  // SGLang's rule on the stage with most weights, the smallest pool; communicators of the stage and of its neighbours.
  const FrameworkProfile& f = p->train().framework();
  const double device = p->rl().setting().device_bytes,
               outside = f.context_bytes.value + 2 * f.communicator_bytes.value;
  CHECK(price.pool_bytes == Approx((device - outside) * 0.8 - price.weight_bytes));
  // A prefill step of 8192 tokens there: MLP 2 x 8192 x (3584 + 3 x 9472), and hidden states and residual that arrive.
  CHECK(price.activation_bytes == Approx(2.0 * 8192 * (3584 + 3 * 9472) + 2.0 * 8192 * 3584 * 2));

  // 64 sequences of 1000 tokens in 4 micro-batches of 16. Seven layers on 16 tokens: Q 1792 columns, K and V 256 each.
  const double n = 16, h = 3584, row = n * h * 2;
  const GroupShape pair = GroupShape::strided(2, 1, 8);
  const DType bf16 = DType::bf16;
  const double kernel = c.hardware().kernel_overhead.value;
  const double layers =
      7 * (c.gemm_seconds(n, 1792 + 512, h, bf16) + c.gemm_seconds(n, h, 1792, bf16) +
           c.gemm_seconds(n, 2 * 9472, h, bf16) + c.gemm_seconds(n, h, 9472, bf16) +
           2 * c.collective_seconds(OpKind::all_reduce, pair, row) +
           c.attention_seconds(4 * 28 * 128 * n * 1000 / 2, 1000, n * 1000 * 1024, false, c.peak_flops(bf16)) +
           10 * kernel) +
      c.memory_seconds((n * 7 * (8 * h + 2 * (1792 + 256)) + 3 * n * 7 * 9472) * 2);
  // Behind a hop both tensors are gathered over tp; the embedding is summed over it.
  const double arrival = c.collective_seconds(OpKind::all_gather, pair, 2 * row);
  const double first = layers + c.collective_seconds(OpKind::all_reduce, pair, row) + kernel, middle = layers + arrival;
  const double logits = 4 * n * 152064;
  const double last = middle + c.gemm_seconds(n, 152064.0 / 2, h, bf16) + c.memory_seconds(logits) + 5 * kernel +
                      c.collective_seconds(OpKind::all_gather, pair, logits);
  // Three hops inside the node with half of both tensors each, and 16 token ids back.
  const double hops = 3 * c.collective_seconds(OpKind::send, {2, 1, 1}, 2 * row / 2) +
                      c.collective_seconds(OpKind::send, {2, 1, 1}, 4 * n);
  const DecodeRound round = p->rl().decode_round(r, 64, 1000);
  CHECK(round.micro_batches == 4);
  CHECK(round.sequences == 16);
  CHECK(round.slowest_stage == Approx(last).epsilon(1e-9));
  CHECK(round.latency == Approx(first + 2 * middle + last + hops).epsilon(1e-9));
  CHECK(round.seconds() == Approx(4 * last).epsilon(1e-9));
  // Each micro-batch reads the stage's weights: four times a token.
  CHECK(round.seconds() > 4 * (7 * layer + head) / 2 * 2 / c.hardware().memory_bandwidth);
  // One sequence alone passes stage after stage, as slowly as two in two micro-batches.
  const DecodeRound one = p->rl().decode_round(r, 1, 1000), two = p->rl().decode_round(r, 2, 1000);
  CHECK(one.seconds() == one.latency);
  CHECK(two.micro_batches == 2);
  CHECK(two.seconds() == Approx(one.seconds()));
}

TEST_CASE("fewer slots beside training are never faster") {
  for (const char* slots : {"64", "1024"})
    for (const char* fraction : {"0.35", "0.5", "0.8"}) {
      const auto p = pricer_of({"algorithm.prompts=512", "train.offload=none",
                                std::string("rollout.max_running_requests=") + slots,
                                std::string("rollout.memory_fraction=") + fraction});
      const RolloutPrice alone = price_of(*p), beside = p->rl().price_rollout(p->point());
      CHECK(beside.slots <= alone.slots);
      CHECK(beside.seconds() >= alone.seconds());
    }
}

}  // namespace hotbunk
