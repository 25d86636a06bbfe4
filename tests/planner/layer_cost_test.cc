// What a layer costs: recomputed modules, precisions, collectives of experts. Shapes: T = 2048 tokens, e = 2 bytes.
#include <algorithm>
#include <catch2/catch.hpp>
#include <string>

#include "planner/train/expert_dispatch.h"
#include "spec/catalog.h"
#include "spec/family.h"
#include "tests/planner/small_models.h"

namespace hotbunk {
namespace {

FrameworkProfile frame_with(const std::string& keys) {
  auto f = parse_framework("schema: hotbunk.framework/1\n" + keys, "test.yaml");
  if (!f) FAIL(render(f.error()));
  f->forward_kernels.value = 0;
  return *f;
}

ModelSpec small_mla() {
  ModelSpec m = small_moe();
  m.family = find_family("deepseek_v3");
  m.mla = MlaSpec{
      .q_lora_rank = 256, .kv_lora_rank = 128, .qk_nope_head_dim = 64, .qk_rope_head_dim = 32, .v_head_dim = 64};
  return m;
}

double dropped(const LayerCost& c) { return c.kept_bytes - c.kept_selective_bytes; }

}  // namespace

TEST_CASE("selective recomputation under hotbunk is what its lowering runs again: norms and the activation") {
  auto hotbunk = framework_named("hotbunk", catalog_root());
  REQUIRE(hotbunk.has_value());
  const TrainModel model = model_of(small_moe(), 8, *hotbunk);
  const LayerCost c = model.dense_layer({});
  // docs/memory.md: K - S of cp T (2H + I), H 1024 and I 4096 (its fp32 statistics are not in the estimate).
  CHECK(dropped(c) == Approx(2.0 * 2048 * (2 * 1024 + 4096)));
  // Two norms read and write T x H; SwiGLU reads T x 2I and writes T x I.
  const CostModel& cost = model.cost();
  const double kernel = cost.hardware().kernel_overhead.value;
  CHECK(c.recompute_core == Approx(2 * cost.memory_seconds(2.0 * 2 * 2048 * 1024) +
                                   cost.memory_seconds(2.0 * 2048 * 3 * 4096) + 3 * kernel));
  const auto recompute = [&](Recompute r) {
    return model.price({.recompute = r, .micro_batches = 3}).seconds[static_cast<std::size_t>(Term::recompute)];
  };
  const LayerCost moe = model.moe_layer({});
  CHECK(recompute(Recompute::none) == 0.0);
  CHECK(recompute(Recompute::selective) == Approx(3 * (c.recompute_core + 7 * moe.recompute_core)));
}

TEST_CASE("selective recomputation of Megatron's core attention repeats attention and drops its statistics") {
  const TrainModel model = model_of(small_gpt(), 8);
  const LayerCost c = model.dense_layer({});
  CHECK(c.recompute_core == Approx(c.attention_forward));
  CHECK(c.attention_forward > 0);
  CHECK(dropped(c) == Approx(4.0 * 2048 * 16));  // fp32 log-sum-exp of 16 heads; q, k, v and the output stay
  // A ring of K and V runs again with it.
  const LayerCost ring = model_of(small_gpt(), 8).dense_layer({.cp = 2});
  CHECK(ring.recompute_context == ring.context_forward);
}

TEST_CASE("each module of selective recomputation drops its own tensors and repeats its own work") {
  const auto of = [](const std::string& modules, const ModelSpec& m = small_moe(), const TrainPoint& p = {}) {
    return model_of(m, 8, frame_with("recompute_modules: [" + modules + "]\n")).moe_layer(p);
  };
  CHECK(dropped(of("")) == 0.0);
  CHECK(of("").recompute_core == 0.0);
  const double T = 2048, h = 1024, i = 512, rows = 2 * T;  // top 2 of 16 experts of width 512, one shared
  CHECK(dropped(of("layernorm")) == Approx(2 * T * 2 * h));
  CHECK(dropped(of("moe_act")) == Approx(2 * rows * i));
  CHECK(dropped(of("shared_experts")) == Approx(2 * T * 3 * i));
  // Scores of 16 experts (8 B), permuted inputs and outputs, gate, up and activation; the shared expert's three.
  const double moe = T * 16 * 8 + 2 * (2 * rows * h + 3 * rows * i + 3 * T * i);
  CHECK(dropped(of("moe")) == Approx(moe));
  CHECK(dropped(of("mlp")) == 0.0);  // of dense layers only
  // A module inside another adds nothing, two beside each other add up.
  CHECK(dropped(of("moe, moe_act, shared_experts")) == Approx(moe));
  CHECK(of("moe, moe_act").recompute_core == of("moe").recompute_core);
  CHECK(of("moe_act").recompute_core > 0);
  CHECK(of("moe").recompute_core > of("moe_act").recompute_core + of("shared_experts").recompute_core);
  CHECK(of("moe_act, layernorm").recompute_core ==
        Approx(of("moe_act").recompute_core + of("layernorm").recompute_core));
  // Experts that are elsewhere are sent to once more.
  const TrainPoint spread{.dp = 4, .ep = 4};
  CHECK(of("moe", small_moe(), spread).recompute_expert == of("moe", small_moe(), spread).expert_forward);
  CHECK(of("moe_act", small_moe(), spread).recompute_expert == 0.0);
  // Latent attention: q and k of 16 heads x 96, v of 16 x 64, from the latents that stay.
  CHECK(dropped(of("mla_up_proj", small_mla())) == Approx(2 * T * 16 * (2 * 96 + 64)));
  const TrainModel dense = model_of(small_moe(), 8, frame_with("recompute_modules: [mlp]\n"));
  CHECK(dropped(dense.dense_layer({})) == Approx(2 * T * 3 * 4096));
  const auto wrong = parse_framework("schema: hotbunk.framework/1\nrecompute_modules: [attention]\n", "f.yaml");
  REQUIRE_FALSE(wrong.has_value());
  CHECK_THAT(wrong.error()[0].help, Catch::Contains("core_attn"));
}

TEST_CASE("FP8 speeds up the layers' products alone: attention, head and router run in 16 bits") {
  ClusterSpec c = cluster_of(8);
  c.gpu.flops["fp8"] = c.gpu.flops["mxfp8"] = {6e14, "test"};
  c.gpu.flops["nvfp4"] = {1.2e15, "test"};
  const CostModel cost(hardware_from_datasheet(c), c);
  const auto model = [&](const std::string& precision) {
    return TrainModel(small_moe(), {.sequence = 2048, .precision = precision}, cost, plain_frame());
  };
  const TrainModel bf16 = model("bf16"), fp8 = model("fp8");
  CHECK(fp8.head({}).forward == bf16.head({}).forward);
  CHECK(fp8.head({}).backward == bf16.head({}).backward);
  const LayerCost wide = bf16.dense_layer({}), narrow = fp8.dense_layer({});
  CHECK(narrow.attention_forward == Approx(wide.attention_forward));
  CHECK(narrow.attention_backward == Approx(wide.attention_backward));
  // Four products of 2048 tokens: qkv 1024 -> 3072, o 1024 -> 1024, gate and up 1024 -> 8192, down 4096 -> 1024. Their
  // inputs are cast in forward (6 B moved each: maximum, reading, two copies), their gradients in backward.
  const double T = 2048, kernel = cost.hardware().kernel_overhead.value;
  const double widths[4][2] = {{3072, 1024}, {1024, 1024}, {8192, 1024}, {1024, 4096}};
  double faster = 0.0, casts = 0.0;
  for (const auto& [n, k] : widths) {
    faster += cost.gemm_seconds(T, n, k, 3e14, 0.0) - cost.gemm_seconds(T, n, k, 6e14, 0.0);
    casts += cost.memory_seconds(6.0 * T * k) + kernel;
  }
  CHECK(narrow.forward == Approx(wide.forward - faster + casts));
  CHECK(narrow.kernels_forward == wide.kernels_forward + 4);
  CHECK(narrow.kernels_backward == wide.kernels_backward + 4);
  // The weights of all layers are cast once per step, however many micro-batches.
  const auto optimizer = [](const TrainModel& m, std::int64_t micro_batches) {
    return m.price({.micro_batches = micro_batches}).seconds[static_cast<std::size_t>(Term::optimizer)];
  };
  const double layers = narrow.parameters + 7 * fp8.moe_layer({}).parameters;
  CHECK(optimizer(fp8, 4) - optimizer(bf16, 4) == Approx(cost.memory_seconds(6.0 * layers)));
  CHECK(optimizer(fp8, 1) == optimizer(fp8, 4));
}

TEST_CASE("what backward needs of quantised products is kept quantised, with its scales") {
  const auto model = [&](const std::string& precision) {
    const ClusterSpec c = [] {
      ClusterSpec with = cluster_of(8);
      with.gpu.flops["fp8"] = with.gpu.flops["mxfp8"] = with.gpu.flops["nvfp4"] = {6e14, "test"};
      return with;
    }();
    return TrainModel(small_moe(), {.sequence = 2048, .precision = precision}, CostModel(hardware_from_datasheet(c), c),
                      plain_frame());
  };
  // Inputs of products: two norms' outputs (h each) and the activation (4096); attention's output (h) is kept in 16
  // bits for attention's backward and quantised for its projection. Everything else as in bf16.
  const double T = 2048, h = 1024, i = 4096, bf16 = model("bf16").dense_layer({}).kept_bytes;
  for (const auto& [precision, stored] : {std::pair{"fp8", 1.0}, {"mxfp8", 1.0 + 1.0 / 32}, {"nvfp4", 0.5625}})
    CHECK(model(precision).dense_layer({}).kept_bytes - bf16 == Approx(T * ((stored - 2) * (2 * h + i) + stored * h)));
  // Experts: the router keeps the norm's output as it is, the shared expert a copy; attention's norm and output as
  // above; 2 x T rows of permuted inputs and activations of 512, the shared activation of 512.
  const double rows = 2 * T;
  CHECK(model("fp8").moe_layer({}).kept_bytes - model("bf16").moe_layer({}).kept_bytes ==
        Approx(-T * h + T * h + T * h - rows * h - rows * 512 - T * 512));
}

TEST_CASE("tensor parallelism of latent attention moves the latents and the rotary key, not the hidden state") {
  const TrainModel model = model_of(small_mla(), 8);
  const TrainPoint p{.tp = 4, .sp = true};
  // Latents 256 + 128 and rotary key 32 in, hidden 1024 out: 3 x in + 2 x out; the MLP 5 x hidden.
  const double T = 2048;
  CHECK(model.dense_layer(p).tensor_payload == Approx(2 * T * (3 * (256 + 128 + 32) + 2 * 1024 + 5 * 1024)));
  CHECK(model.dense_layer({.tp = 4}).tensor_payload == Approx(2 * T * (256 + 128 + 32 + 1024 + 2 * 1024)));
  const GroupShape four{4, 1, 4};
  const auto seconds = [&](OpKind kind, double width) {
    return model.cost().collective_seconds(kind, four, 2 * T * width);
  };
  CHECK(model.dense_layer(p).tensor_forward ==
        Approx(seconds(OpKind::all_gather, 416) + seconds(OpKind::all_gather, 1024) +
               2 * seconds(OpKind::reduce_scatter, 1024)));
  // Queries without a latent come from the hidden state.
  ModelSpec plain = small_mla();
  plain.mla->q_lora_rank = 0;
  CHECK(model_of(plain, 8).dense_layer({.tp = 4}).tensor_payload ==
        Approx(2 * T * (1024 + 128 + 32 + 1024 + 2 * 1024)));
}

TEST_CASE("expert tensor parallelism gathers tokens and scatters outputs; TP without SP gathers the outputs") {
  const TrainModel model = model_of(small_moe(), 8);
  const double T = 2048, h = 1024, top = 2;
  const auto seconds = [&](OpKind kind, std::int64_t ranks, double bytes) {
    return model.cost().collective_seconds(kind, {ranks, 1, ranks}, bytes);
  };
  // tp 4 with SP, etp 4: each rank routes T / 4 tokens to two experts each; the group's four gather e T top h.
  const LayerCost c = model.moe_layer({.dp = 2, .tp = 4, .etp = 4, .sp = true});
  const double rows = 2 * T * top * h;
  CHECK(c.expert_payload == Approx(4 * rows));
  CHECK(c.expert_forward == Approx(seconds(OpKind::all_gather, 4, rows) + seconds(OpKind::reduce_scatter, 4, rows)));
  CHECK(c.expert_backward == Approx(c.expert_forward));
  // Without SP or etp: T x h once each way.
  const LayerCost plain = model.moe_layer({.dp = 2, .tp = 4});
  CHECK(plain.expert_payload == Approx(2 * 2 * T * h));
  CHECK(plain.expert_forward == Approx(seconds(OpKind::all_gather, 4, 2 * T * h)));
  CHECK(model.moe_layer({.dp = 2, .tp = 4, .sp = true}).expert_payload == 0.0);
}

TEST_CASE("expected places of a token's experts: counted by hand, and one of each where all are chosen") {
  MoeSpec m{
      .experts = 4, .experts_per_token = 2, .expert_intermediate = 1, .shared_experts = 0, .first_dense_layers = 0};
  // Two of four experts, two parts of two: of 6 pairs 2 lie in one part, 4 in both. 4/6 x 2 + 2/6 x 1 = 5/3.
  CHECK(expected_parts(m, 2) == Approx(5.0 / 3));
  CHECK(expected_parts(m, 4) == Approx(2.0));
  CHECK(expected_parts(m, 1) == Approx(1.0));
  // Only one of two groups may be chosen: both experts are in one part of two, in two of four.
  m.groups = 2, m.topk_groups = 1;
  CHECK(expected_parts(m, 2) == Approx(1.0));
  CHECK(expected_parts(m, 4) == Approx(2.0));
  // DeepSeek-V3: 8 of 256 experts in 4 of 8 groups. Every open group of 32 is missed by 8 of its pool of 128 with
  // C(96, 8) / C(128, 8) = 0.0927: 4 x 0.9073 nodes of eight.
  const MoeSpec v3{.experts = 256,
                   .experts_per_token = 8,
                   .expert_intermediate = 1,
                   .shared_experts = 1,
                   .first_dense_layers = 3,
                   .groups = 8,
                   .topk_groups = 4};
  double missed = 1.0;
  for (int i = 0; i < 8; ++i) missed *= (96.0 - i) / (128.0 - i);
  CHECK(expected_parts(v3, 8) == Approx(4 * (1 - missed)));
  CHECK(expected_parts(v3, 8) < 4.0);
  CHECK(expected_parts(v3, 256) == Approx(8.0));
  // Four nodes of two groups each: a node has none, one or two of the four open groups.
  const double one = 2.0 * 20 / 70, two = 15.0 / 70;  // C(2,1) C(6,3) / C(8,4), C(6,2) / C(8,4)
  double missed_two = 1.0;
  for (int i = 0; i < 8; ++i) missed_two *= (64.0 - i) / (128.0 - i);
  CHECK(expected_parts(v3, 4) == Approx(4 * (one * (1 - missed) + two * (1 - missed_two))));
}

TEST_CASE("dispatch once per place sends less over the network than once per expert, and in fewer bytes where told") {
  // 32 ranks on four nodes of eight.
  const GroupShape g = GroupShape::strided(32, 1, 8);
  MoeSpec m = *small_moe().moe;
  m.experts = 256, m.experts_per_token = 8;
  const Copies each = copies_per_expert(m, g), place = copies_per_place(m, g);
  CHECK(each.network == Approx(8 * 24.0 / 32));
  CHECK(each.node == Approx(8 * 7.0 / 32));
  CHECK(place.network == Approx(expected_parts(m, 4) * 3 / 4));
  CHECK(place.network < 3.0);  // at most the three other nodes
  CHECK(place.node == Approx(expected_parts(m, 32) * 7 / 8));
  const auto layer = [&](const std::string& keys) {
    ModelSpec spec = small_moe();
    spec.moe = m;
    return model_of(spec, 32, frame_with(keys)).moe_layer({.dp = 32, .ep = 32});
  };
  const LayerCost plain = layer(""), distinct = layer("distinct_dispatch: true\n"),
                  fp8 = layer("distinct_dispatch: true\ndispatch_bytes: {value: 1, source: test}\n");
  const double values = 2048.0 * 1024;
  CHECK(plain.expert_payload == Approx(4 * 2 * values * 8 * 31 / 32));
  CHECK(distinct.expert_payload == Approx(4 * 2 * values * (place.network + place.node)));
  CHECK(fp8.expert_payload == Approx(7 * values * (place.network + place.node)));
  CHECK(distinct.expert_forward < 0.6 * plain.expert_forward);
  CHECK(fp8.expert_forward < distinct.expert_forward);
  CHECK(fp8.expert_backward == distinct.expert_backward);
}

TEST_CASE("experts' exchanges run beside another micro-batch's other pass, where a step has one") {
  ModelSpec m = small_moe();
  m.moe->experts = 32, m.moe->experts_per_token = 8, m.moe->first_dense_layers = 0;
  const auto step = [&](bool overlap, std::int64_t micro_batches, Recompute recompute) {
    const TrainModel model = model_of(m, 32, frame_with(overlap ? "overlap_expert: true\n" : ""));
    const TrainPoint p{.dp = 32, .ep = 32, .recompute = recompute, .micro_batches = micro_batches};
    return std::pair(model.price(p), model.layers(p));
  };
  const auto expert = [](const TrainPrice& p) { return p.seconds[static_cast<std::size_t>(Term::expert)]; };
  for (const Recompute recompute : {Recompute::none, Recompute::full}) {
    const bool again = recompute == Recompute::full;
    const auto [one, l] = step(true, 1, recompute);
    const LayerCost& c = l.moe;
    const double layers = static_cast<double>(m.layers);
    const double sent = c.expert_forward, sent_back = c.expert_backward + (again ? c.expert_forward : 0.0);
    // A single micro-batch finds no other.
    CHECK(expert(one) == Approx(layers * (sent + sent_back)));
    CHECK(one.hidden_seconds == Approx(step(false, 1, recompute).first.hidden_seconds));
    // Of four, three forward passes run beside a backward one, which computes forward once more where it recomputes.
    const double adds = 0.75 * c.accumulate,
                 beside_backward = std::min(sent, c.backward + adds + (again ? c.recompute_layer : 0.0)),
                 beside_forward = std::min(sent_back, c.forward);
    const TrainPrice four = step(true, 4, recompute).first, apart = step(false, 4, recompute).first;
    CHECK(expert(apart) == Approx(4 * layers * (sent + sent_back)));
    CHECK(expert(apart) - expert(four) == Approx(3 * layers * (beside_backward + beside_forward)));
    CHECK(four.hidden_seconds - apart.hidden_seconds == Approx(expert(apart) - expert(four)));
    CHECK(expert(four) > 0.0);
  }
}

TEST_CASE("modules that run op by op keep 8 bytes of a norm and four intermediates of a gated MLP") {
  const auto kept = [](const std::string& keys, const ModelSpec& m) {
    return model_of(m, 8, frame_with(keys)).dense_layer({}).kept_bytes;
  };
  // Two norms: fp32 input, normalised copy and output, 4 + 2 + 2 B instead of 2 + 2. SiLU: gate, silu(gate), up and
  // their product, 4 x 2 B instead of 3. A GPT's MLP has no gate.
  const double T = 2048, h = 1024, i = 4096;
  const std::string eager = "eager_activations: true\n";
  CHECK(kept(eager, small_moe()) - kept("", small_moe()) == Approx(T * (2 * 4 * h + 2 * i)));
  CHECK(kept(eager, small_gpt()) - kept("", small_gpt()) == Approx(T * 2 * 4 * h));
}

}  // namespace hotbunk
