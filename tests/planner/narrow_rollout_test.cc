// rollout.dtype fp8, mxfp8, nvfp4: what engines hold narrow, what their steps and the update of their weights cost.
#include <catch2/catch.hpp>

#include "planner/answers/answers.h"
#include "planner/answers/trees.h"
#include "planner/rl/engine_step.h"
#include "spec/catalog.h"
#include "spec/loader.h"

namespace hotbunk {
namespace {

using Sets = std::vector<std::string>;

Result<Scenario> narrow_scenario(const std::string& model, const Sets& sets) {
  const std::string text =
      "model: " + model +
      "\ncluster: {gpu: h100-sxm-80gb, nodes: 4}\nprofile: verl-fsdp\n"
      "train: {engine: fsdp2, layout: {dp: 32}, micro_batch_tokens: 16384}\n"
      "rollout: {engine: sglang, layout: {tp: 2, dp: 16}, dtype: fp8}\n"
      "algorithm: {name: grpo, prompts: 128, samples_per_prompt: 8}\n"
      "workload: {prompt_tokens: {mean: 512, max: 1024}, response_tokens: {mean: 1536, max: 4096}}\n";
  return load_scenario_text(text, "test.yaml", sets);
}

std::unique_ptr<ScenarioPricer> narrow_pricer(const std::string& model, const Sets& sets = {}) {
  const auto s = narrow_scenario(model, sets);
  if (!s) FAIL(render(s.error()));
  auto pricer = ScenarioPricer::make(*s, catalog_root());
  if (!pricer) FAIL(render(pricer.error()));
  return std::move(*pricer);
}

RolloutPrice rollout_of(const ScenarioPricer& p) { return p.rl().price_rollout(p.point().rollout); }

double wire(const Explanation& e, const std::string& what) {
  double sum = 0.0;
  for (const LinkUse& u : e.links)
    if (u.phase == RlPhase::sync && u.what == what) sum += u.network_wire + u.node_wire;
  return sum;
}

const CostNode* find(const CostNode& n, const std::string& name) {
  if (n.name == name) return &n;
  for (const CostNode& c : n.children)
    if (const CostNode* found = find(c, name)) return found;
  return nullptr;
}

// Qwen2.5-7B: Q, K, V and output 3584 x 128 x (2 x 28 + 2 x 4), MLP 3 x 3584 x 18944, 28 layers.
constexpr double qwen = 7'615'616'512, qwen_products = 28.0 * (29'360'128 + 203'685'888);
// Mixtral: 4096 x 128 x (2 x 32 + 2 x 8) and 8 experts of 3 x 4096 x 14336 in 32 layers; the router is no product.
constexpr double mixtral = 46'702'792'704, mixtral_products = 32.0 * (41'943'040 + 8.0 * 176'160'768);
constexpr double fp8 = 1.0 + 4.0 / 16384;  // an fp32 scale per 128 x 128

}  // namespace

TEST_CASE("narrow weights are those of the layers' products, with their scales") {
  const auto dense = narrow_pricer("qwen2.5-7b"),
             moe = narrow_pricer("mixtral-8x7b", {"rollout.layout={tp: 4, dp: 8}"});
  CHECK(rollout_of(*dense).weight_bytes == Approx((qwen_products * fp8 + (qwen - qwen_products) * 2) / 2));
  CHECK(rollout_of(*moe).weight_bytes == Approx((mixtral_products * fp8 + (mixtral - mixtral_products) * 2) / 4));
  CHECK(dense->rl().narrow_bytes(dense->point().rollout) == Approx(qwen_products * fp8 / 2));
  // Half a byte and a scale byte per 16; a byte and a scale byte per 32.
  for (const auto& [format, stored] : {std::pair{"nvfp4", 0.5625}, {"mxfp8", 1.03125}}) {
    const auto p = narrow_pricer("qwen2.5-7b", {"cluster.gpu=b200-sxm-180gb", std::string("rollout.dtype=") + format});
    CHECK(rollout_of(*p).weight_bytes == Approx((qwen_products * stored + (qwen - qwen_products) * 2) / 2));
  }
  // MLA's projections are products, their norms not; DeepSeek's router and its bias neither.
  const auto deep =
      narrow_pricer("deepseek-v3", {"cluster.gpu=h200-sxm-141gb", "rollout.layout={tp: 16, ep: 16, dp: 2}"});
  const ModelCounts& c = deep->rl().counts();
  CHECK(c.dense_layer - c.dense_layer_products == 2 * 7168 + 1536 + 512);
  CHECK(c.moe_layer - c.moe_layer_products == 2 * 7168 + 1536 + 512 + 256 * 7168 + 256);
  CHECK(c.dense_product_tensors == 5 + 3);
  CHECK(c.moe_product_tensors == 5 + 3 * 256 + 3);
}

TEST_CASE("a cache in fp8 holds a token in half the bytes, and a step of decoding reads half") {
  const Sets wide = {"rollout.dtype=bf16"}, narrow = {"rollout.dtype=bf16", "rollout.kv_cache_dtype=fp8"};
  for (const auto& [model, engines] : {std::pair{"qwen2.5-7b", "{tp: 4, dp: 16}"},
                                       {"mixtral-8x7b", "{tp: 8, dp: 8}"},
                                       {"deepseek-v3", "{tp: 16, dp: 4}"}}) {
    CAPTURE(model);
    const Sets apart = {"cluster.gpu=h200-sxm-141gb", "cluster.nodes=8", "train.layout.dp=64",
                        std::string("rollout.layout=") + engines};
    const auto with = [&](const Sets& more) {
      Sets sets = apart;
      sets.insert(sets.end(), more.begin(), more.end());
      return narrow_pricer(model, sets);
    };
    const auto a = with(wide), b = with(narrow);
    CHECK(rollout_of(*b).kv_bytes_per_token == Approx(rollout_of(*a).kv_bytes_per_token / 2));
    CHECK(rollout_of(*b).weight_bytes == rollout_of(*a).weight_bytes);
    CHECK(rollout_of(*b).seconds() < rollout_of(*a).seconds());
    CHECK_THAT(standing_of(*b).hardware, Catch::EndsWith("; the KV cache in fp8 by its bytes alone, uncalibrated"));
    CHECK_FALSE(standing_of(*b).calibrated);
  }
}

TEST_CASE("narrow weights never take more bytes; the cache keeps its type") {
  for (const char* model : {"qwen2.5-0.5b", "qwen2.5-7b", "qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3"})
    for (const char* engine : {"sglang", "vllm"})
      for (const char* layout : {"{tp: 1, dp: 32}", "{tp: 4, dp: 8, ep: 1}", "{tp: 8, pp: 2, dp: 2}"}) {
        const Sets sets = {"cluster.gpu=b200-sxm-180gb", std::string("rollout.engine=") + engine,
                           std::string("rollout.layout=") + layout};
        const auto of = [&](const char* dtype) -> std::optional<RolloutPrice> {
          Sets with = sets;
          with.push_back(std::string("rollout.dtype=") + dtype);
          const auto s = narrow_scenario(model, with);
          if (!s) return std::nullopt;
          const auto p = ScenarioPricer::make(*s, catalog_root());
          if (!p || !(*p)->rl().divides((*p)->point().rollout)) return std::nullopt;
          return rollout_of(**p);
        };
        INFO(model << " " << engine << " " << layout);
        const auto wide = of("bf16");
        for (const char* dtype : {"fp8", "mxfp8", "nvfp4"})
          if (const auto narrow = of(dtype)) {
            CHECK(narrow->weight_bytes < wide->weight_bytes);
            // Of stages the fullest counts, and with narrow weights that may be another one.
            if (std::string(layout).find("pp") == std::string::npos)
              CHECK(narrow->kv_bytes_per_token == wide->kv_bytes_per_token);
            CHECK(narrow->lacking_bytes <= wide->lacking_bytes);
          }
      }
}

TEST_CASE("worked: a narrow decode step of one sequence reads half the bytes of its layers") {
  const auto narrow = narrow_pricer("qwen2.5-7b"), wide = narrow_pricer("qwen2.5-7b", {"rollout.dtype=bf16"});
  const RolloutStage whole{28, 0, true, true};
  const auto step = [&](const ScenarioPricer& p, double n) {
    return EngineStep(p.rl(), p.point().rollout).decode<StepParts>(whole, n, 1000);
  };
  const StepParts a = step(*narrow, 1), b = step(*wide, 1);
  double less = 0, more = 0;
  for (const StepPart part : {StepPart::qkv, StepPart::output, StepPart::mlp})
    less += a.of(part).seconds, more += b.of(part).seconds;
  CHECK(less / more == Approx(0.5).epsilon(0.01));
  // Head, attention and what ranks exchange are as they were; four kernels a layer more quantise.
  for (const StepPart part : {StepPart::head, StepPart::attention, StepPart::reduce, StepPart::streams}) {
    CHECK(a.of(part).seconds > 0);
    CHECK(a.of(part).seconds == b.of(part).seconds);
  }
  CHECK(a.of(StepPart::kernels).calls == b.of(StepPart::kernels).calls + 4 * 28);
  CHECK(a.total < b.total);
  // Of 64 sequences: Q, K and V of half the heads, from the fp8 rate and bytes of the operands with their scales.
  const CostModel& c = narrow->train().cost();
  const double n = 64, h = 3584, wide_row = 2, row = 1 + 4.0 / 128, peak = c.peak_flops("fp8");
  REQUIRE(peak == 1978.9e12);
  const auto product = [&](double out, double in) {
    return c.gemm_seconds(n, out, in, peak, row * n * in + fp8 * out * in + wide_row * n * out);
  };
  const StepParts d = step(*narrow, n);
  CHECK(d.of(StepPart::qkv).seconds == Approx(28 * product(1792 + 512, h)));
  CHECK(d.of(StepPart::mlp).seconds == Approx(28 * (product(2 * 9472, h) + product(h, 9472))));
  CHECK(d.of(StepPart::mlp).bytes == Approx(28 * 3 * h * 9472 * fp8));
  // Quantised: what enters Q, K, V, the output's product, the MLP and its last product.
  CHECK(d.of(StepPart::quantize).bytes == Approx(28 * n * (2 * h + 1792 + 9472) * (wide_row + row)));
  CHECK(d.of(StepPart::quantize).seconds == Approx(c.memory_seconds(d.of(StepPart::quantize).bytes)));
  // Prompts are bound by arithmetic: faster at twice the rate, not twice as fast.
  CHECK(rollout_of(*narrow).prefill_seconds < rollout_of(*wide).prefill_seconds);
}

TEST_CASE("experts are read narrow, the router wide") {
  const auto narrow = narrow_pricer("mixtral-8x7b", {"rollout.layout={tp: 4, dp: 8}"}),
             wide = narrow_pricer("mixtral-8x7b", {"rollout.layout={tp: 4, dp: 8}", "rollout.dtype=bf16"});
  const RolloutStage whole{32, 32, true, true};
  const auto read = [&](const ScenarioPricer& p) {
    return EngineStep(p.rl(), p.point().rollout).decode<StepParts>(whole, 4096, 100).of(StepPart::experts).bytes;
  };
  // So many tokens touch every expert: 32 x 8 x 3 x 4096 x 14336, beside them router, norms and the final norm.
  const double experts = 32.0 * 8 * 176'160'768, rest = 32.0 * (8 * 4096 + 2 * 4096) + 4096;
  CHECK(read(*wide) == Approx((experts + rest) * 2 / 4));
  CHECK(read(*narrow) == Approx((experts * fp8 + rest * 2) / 4).epsilon(1e-6));
}

TEST_CASE("who quantises: sglang is handed narrow tensors, vllm wide ones") {
  const Sets apart = {"placement=disaggregated", "train.layout={dp: 16}", "rollout.layout={tp: 2, dp: 8}"};
  const auto at = [&](const char* engine, const char* dtype, Sets more = {}) {
    more.insert(more.begin(), apart.begin(), apart.end());
    more.push_back(std::string("rollout.engine=") + engine), more.push_back(std::string("rollout.dtype=") + dtype);
    return narrow_pricer("qwen2.5-7b", more);
  };
  const auto sglang = at("sglang", "fp8"), vllm = at("vllm", "fp8"), wide = at("sglang", "bf16");
  const auto job = [](const ScenarioPricer& p) { return p.rl().sync_job(p.point()); };
  const double handed = qwen_products * fp8 + (qwen - qwen_products) * 2;
  CHECK(job(*sglang).model_bytes == qwen * 2);
  CHECK(job(*sglang).handed() == Approx(handed));
  CHECK(job(*sglang).scale_tensors == 28 * 7);
  CHECK(job(*vllm).handed() == qwen * 2);
  CHECK(job(*vllm).scale_tensors == 0);
  // What crosses the network to the engines, in a pipeline over 32 ranks of 4 nodes.
  const double sent = wire(explain(*wide), "buckets to the engines");
  REQUIRE(sent > 0);
  CHECK(wire(explain(*vllm), "buckets to the engines") == Approx(sent));
  CHECK(wire(explain(*sglang), "buckets to the engines") == Approx(sent * handed / (qwen * 2)));
  // Either reads two bytes and writes one of every weight of a product.
  const double seconds = sglang->train().cost().memory_seconds(qwen_products * (2 + fp8));
  const SyncPrice a = sglang->rl().sync_price(sglang->point()), b = vllm->rl().sync_price(vllm->point()),
                  c = wide->rl().sync_price(wide->point());
  CHECK(a.quantizing == Approx(seconds));
  CHECK(b.quantizing == Approx(seconds));
  CHECK(c.quantizing == 0);
  CHECK(b.moving == c.moving);
  CHECK(a.moving < c.moving);
  CHECK(a.buckets < b.buckets);
  // Shard to shard wide values travel; a rank quantises its slice.
  const auto direct = at("sglang", "fp8", {"sync.mode=direct"}), plain = at("sglang", "bf16", {"sync.mode=direct"});
  CHECK(direct->rl().sync_price(direct->point()).bytes_received ==
        plain->rl().sync_price(plain->point()).bytes_received);
  CHECK(direct->rl().sync_price(direct->point()).quantizing == Approx(seconds / 2));
  // On shared GPUs the gather stays wide and so do its bytes.
  const auto shared = narrow_pricer("qwen2.5-7b"), before = narrow_pricer("qwen2.5-7b", {"rollout.dtype=bf16"});
  CHECK(wire(explain(*shared), "gathered buckets") == Approx(wire(explain(*before), "gathered buckets")));
}

TEST_CASE("explain says what is narrow, who makes it, and that nothing calibrated it") {
  const auto p = narrow_pricer("qwen2.5-7b"), v = narrow_pricer("qwen2.5-7b", {"rollout.engine=vllm"}),
             wide = narrow_pricer("qwen2.5-7b", {"rollout.dtype=bf16"});
  const Explanation e = explain(*p);
  CHECK_FALSE(e.calibrated);
  CHECK_THAT(e.hardware, Catch::Contains("fp8 products from the datasheet, uncalibrated"));
  CHECK(explain(*wide).calibrated);
  const CostNode *products = find(e.memory, "of products"), *rest = find(e.memory, "other weights"),
                 *weights = find(e.memory, "weights");
  REQUIRE((products && rest && weights));
  CHECK(products->bytes + rest->bytes == Approx(weights->bytes));
  CHECK_THAT(products->why, Catch::Contains("fp8, 1.0002 B"));
  CHECK_THAT(find(*find(e.time, "sync"), "quantisation")->why, Catch::Contains("by the trainers"));
  CHECK_THAT(find(*find(explain(*v).time, "sync"), "quantisation")->why, Catch::Contains("by the engines"));
  CHECK(find(*find(e.time, "tail"), "quantisation") != nullptr);
  CHECK(find(explain(*wide).time, "quantisation") == nullptr);
}

TEST_CASE("narrow products are refused where nothing has them") {
  const auto refused = [](const Sets& sets) {
    const auto s = narrow_scenario("qwen2.5-7b", sets);
    if (!s) return s.error();
    const auto p = ScenarioPricer::make(*s, catalog_root());
    return p ? Diagnostics{} : p.error();
  };
  for (const auto& [gpu, dtype] :
       {std::pair{"a100-sxm-80gb", "fp8"}, {"h100-sxm-80gb", "mxfp8"}, {"h200-sxm-141gb", "nvfp4"}}) {
    const Diagnostics d = refused({std::string("cluster.gpu=") + gpu, std::string("rollout.dtype=") + dtype});
    REQUIRE(d.size() == 1);
    CHECK(d[0].code == "E260");
    CHECK_THAT(d[0].message, Catch::Contains(std::string(dtype) + " products, which rollout.dtype asks for"));
  }
  for (const char* gpu : {"b200-sxm-180gb", "b300-sxm-288gb", "gb200-nvl72", "gb300-nvl72"})
    for (const char* dtype : {"fp8", "mxfp8", "nvfp4"}) {
      INFO(gpu << " " << dtype);
      CHECK(
          refused({std::string("cluster.gpu=") + gpu, "cluster.gpus_per_node=8", std::string("rollout.dtype=") + dtype})
              .empty());
    }
  const Diagnostics own = refused({"rollout.engine=hotbunk"});
  REQUIRE(own.size() == 1);
  CHECK(own[0].code == "E214");
  CHECK_THAT(own[0].message, Catch::Contains("hotbunk's engine has no products in fp8"));
  // SFT samples nothing.
  CHECK(refused({"rollout.engine=hotbunk", "algorithm={name: sft}"}).empty());
}

TEST_CASE("a rank's slice is whole blocks of weights that share a scale") {
  const auto why = [](const char* layout, const char* dtype) {
    const auto p = narrow_pricer(
        "qwen3-30b-a3b",
        {"cluster.gpu=b200-sxm-180gb", std::string("rollout.layout=") + layout, std::string("rollout.dtype=") + dtype});
    return p->why_unpriced(p->point());
  };
  // Experts of 768 columns: 96 on each of 8 ranks.
  const auto cut = why("{tp: 8, dp: 4}", "fp8");
  REQUIRE(cut.has_value());
  CHECK(cut->code == "E263");
  CHECK_THAT(cut->message, Catch::Contains("whole blocks of 128 in fp8"));
  CHECK_FALSE(why("{tp: 8, dp: 4}", "bf16").has_value());
  CHECK_FALSE(why("{tp: 8, dp: 4}", "mxfp8").has_value());  // blocks of 32
  CHECK_FALSE(why("{tp: 8, ep: 8, dp: 4}", "fp8").has_value());
  CHECK_FALSE(why("{tp: 2, dp: 16}", "fp8").has_value());
}

}  // namespace hotbunk
