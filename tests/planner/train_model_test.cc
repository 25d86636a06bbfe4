#include "planner/train/train_model.h"

#include <rapidcheck.h>

#include <catch2/catch.hpp>
#include <cmath>
#include <numeric>

#include "planner/answers/answers.h"
#include "planner/validate/validate_tables.h"
#include "spec/catalog.h"
#include "spec/loader.h"
#include "tests/planner/small_models.h"

namespace hotbunk {
namespace {

rc::Gen<TrainPoint> points(std::int64_t ranks) {
  return rc::gen::exec([ranks] {
    TrainPoint p;
    p.tp = std::int64_t{1} << *rc::gen::inRange(0, 4);
    p.pp = std::int64_t{1} << *rc::gen::inRange(0, 3);
    p.cp = std::int64_t{1} << *rc::gen::inRange(0, 2);
    p.dp = std::max<std::int64_t>(1, ranks / (p.tp * p.pp * p.cp));
    p.sp = p.tp > 1 && *rc::gen::arbitrary<bool>();
    p.micro_batch = *rc::gen::inRange<std::int64_t>(1, 5);
    p.micro_batches = std::int64_t{4} << *rc::gen::inRange(0, 3);
    p.recompute = *rc::gen::element(Recompute::none, Recompute::selective, Recompute::full);
    p.sharding =
        *rc::gen::element(Sharding::replicated, Sharding::zero1, Sharding::zero2, Sharding::zero3, Sharding::fsdp);
    return p;
  });
}

}  // namespace

TEST_CASE("activations are Korthikanti's formulas") {
  // Table 2 of 2205.05198, bytes per layer: sbh (10 + 24/t + 5as/(ht)); SP: sbh/t (34 + 5as/h); SP + selective: 34
  // sbh/t; full: 2 sbh (2 sbh / t with SP). Here s 2048, b 2, h 1024, a 16, t 4.
  FrameworkProfile f = plain_frame();
  f.fused_attention = false;
  f.dropout = true;
  const TrainModel model = model_of(small_gpt(), 8, f);
  const double sbh = 2048.0 * 2 * 1024, scores = 5.0 * 16 * 2048 / 1024, t = 4;
  TrainPoint p{.tp = 4, .micro_batch = 2};
  CHECK(model.dense_layer(p).kept_bytes == Approx(sbh * (10 + 24 / t + scores / t)));
  CHECK(model.dense_layer(p).kept_selective_bytes == Approx(sbh * (10 + 24 / t)));
  CHECK(model.dense_layer(p).input_bytes == Approx(2 * sbh));
  p.sp = true;
  CHECK(model.dense_layer(p).kept_bytes == Approx(sbh / t * (34 + scores)));
  CHECK(model.dense_layer(p).kept_selective_bytes == Approx(34 * sbh / t));
}

TEST_CASE("parameters on the ranks add up to the model") {
  for (const ModelSpec& spec : {small_gpt(), small_moe()}) {
    const TrainModel model = model_of(spec, 8);
    const TrainPoint one;
    const auto l = model.layers(one);
    const double moe = spec.moe ? 7 : 0, dense = 8 - moe;
    double expected = static_cast<double>(parameter_count(spec));
    const double tied = spec.tie_embeddings ? static_cast<double>(spec.vocab * spec.hidden) : 0.0;
    CHECK(l.dense.parameters * dense + l.moe.parameters * moe + l.embedding.parameters + l.head.parameters - tied ==
          Approx(expected).epsilon(0.002));
  }
}

TEST_CASE("states of each sharding") {
  // 16 bytes of parameters (2), gradients (4... with fp32) and optimizer (12) per element: 18 in all.
  const TrainModel model = model_of(small_gpt(), 8);
  const double n = static_cast<double>(parameter_count(small_gpt()));
  const auto states = [&](Sharding s) { return model.price({.dp = 8, .sharding = s, .micro_batches = 1}).state_bytes; };
  CHECK(states(Sharding::replicated) == Approx(18 * n).epsilon(0.002));
  CHECK(states(Sharding::zero1) == Approx((6 + 12.0 / 8) * n).epsilon(0.002));
  CHECK(states(Sharding::zero2) == Approx((2 + 16.0 / 8) * n).epsilon(0.002));
  CHECK(states(Sharding::zero3) == Approx(18.0 / 8 * n).epsilon(0.002));
  CHECK(states(Sharding::fsdp) == Approx(16.0 / 8 * n).epsilon(0.002));
}

TEST_CASE("FSDP2 as PyTorch does it: flat buffers beside the unit's tensors, the root whole all through backward") {
  FrameworkProfile flat = plain_frame();
  flat.flat_units = true;
  const auto gathered = [&](const ModelSpec& m, const TrainPoint& p) {
    const TrainModel model = model_of(m, 8, flat);
    return model.peak_bytes(p, model.layers(p), 0)[static_cast<std::size_t>(PeakTensor::gathered)];
  };
  TrainPoint p{.dp = 8, .sharding = Sharding::fsdp, .micro_batches = 1};
  // Large vocabulary: the peak is at the loss. Embedding and head are one tensor, whole, with its gradient and the flat
  // output of the last layer's gather: 2 B each.
  const ModelSpec wide = small_gpt();
  const TrainModel model = model_of(wide, 8, flat);
  const auto l = model.layers(p);
  const double ends = model.end_parameters(p, l, 0), head = l.head.parameters, unit = l.dense.parameters;
  CHECK(gathered(wide, p) == Approx(2 * (ends + head + unit)));
  // Small vocabulary: in a layer's backward. Three times the unit in 2 B (parameters, the next one's flat output,
  // gradients) and the flat input of the reduction before in 4 B, less what the layer before it no longer keeps: its
  // input under full recomputation, 2048 x 1024 x 2 B.
  ModelSpec narrow = wide;
  narrow.vocab = 64, narrow.max_position = 64;
  p.recompute = Recompute::full;
  const TrainModel few = model_of(narrow, 8, flat);
  const auto k = few.layers(p);
  const double root = few.end_parameters(p, k, 0) + k.head.parameters;
  CHECK(gathered(narrow, p) == Approx(2 * root + 3 * 2 * unit + 4 * unit - 2048 * 1024 * 2));
  // Kept whole between forward and backward: all parameters, and the head's gradient.
  p.reshard_after_forward = false;
  const double all = 8 * unit + few.end_parameters(p, k, 0);
  CHECK(gathered(narrow, p) == Approx(2 * (all + k.head.parameters) + 2 * unit + 4 * unit - 2048 * 1024 * 2));
}

TEST_CASE("traffic follows BACKGROUND A's table") {
  const TrainModel model = model_of(small_gpt(), 8);
  const double n = static_cast<double>(parameter_count(small_gpt()));
  const auto price = [&](Sharding s, std::int64_t m) {
    return model.price({.dp = 8, .sharding = s, .micro_batches = m});
  };
  CHECK(price(Sharding::zero1, 4).data_reduce_payload == Approx(4 * n).epsilon(0.002));
  CHECK(price(Sharding::zero2, 4).data_reduce_payload == Approx(4 * 4 * n).epsilon(0.002));  // after every micro-batch
  CHECK(price(Sharding::zero3, 4).data_gather_payload == Approx(4 * 2 * 2 * n).epsilon(0.002));
  CHECK(price(Sharding::replicated, 4).data_gather_payload == 0.0);
  CHECK(model.price({.tp = 4, .micro_batches = 1}).tensor_payload > 0.0);
  CHECK(model.price({.dp = 8, .micro_batches = 1}).tensor_payload == 0.0);
}

TEST_CASE("eager front ends: launches beyond the layer's own, Megatron's fused softmax that refuses odd shapes") {
  FrameworkProfile f = plain_frame();
  f.fused_attention = false;
  f.softmax_kernels.value = 40;
  const auto kernels = [&](const FrameworkProfile& frame, std::int64_t tp, std::int64_t b) {
    return model_of(small_gpt(), 8, frame).dense_layer({.tp = tp, .micro_batch = b}).kernels_forward;
  };
  // 16 heads over 8 ranks are 2: with one sequence no multiple of 4, with two one.
  CHECK(kernels(f, 8, 1) == kernels(f, 8, 2) + 40);
  CHECK(kernels(f, 4, 1) == kernels(f, 4, 2));
  // Uncounted kernels: 10 forward, 15 backward, 5 us each on the device.
  FrameworkProfile busy = plain_frame();
  busy.forward_kernels.value = 10, busy.backward_kernels.value = 1.5, busy.kernel_seconds.value = 5e-6;
  const LayerCost none = model_of(small_gpt(), 8).dense_layer({}),
                  some = model_of(small_gpt(), 8, busy).dense_layer({});
  CHECK(some.forward - none.forward == Approx(50e-6));
  CHECK(some.backward - none.backward == Approx(75e-6));
  CHECK(some.kernels_backward - none.kernels_backward == Approx(15));
}

TEST_CASE("the loss moves the bytes that its profile counts, however many passes other kernels take") {
  FrameworkProfile eager = plain_frame();
  eager.elementwise_passes.value = 4.0;
  const auto head = [](const FrameworkProfile& f) { return model_of(small_gpt(), 8, f).head({}); };
  const auto seconds = [&](const FrameworkProfile& f) { return head(f).forward + head(f).backward; };
  const CostModel cost = model_of(small_gpt(), 8).cost();
  // 2048 tokens x 32000 logits x 28 B more, once; the final norm alone takes four passes instead of one.
  FrameworkProfile busy = eager;
  busy.loss_traffic.value += 28.0;
  CHECK(seconds(busy) - seconds(eager) == Approx(cost.memory_seconds(2048.0 * 32000 * 28)));
  const double norm = cost.memory_seconds((2 + 3.5) * 2 * 2048 * 1024);
  CHECK(seconds(eager) - seconds(plain_frame()) == Approx(3 * norm));
}

TEST_CASE("a step's short last micro-batch takes the time of its tokens, and none is longer than all sequences") {
  const TrainModel model = model_of(small_gpt(), 8);
  TrainPoint p{.micro_batch = 12};
  p.set_sequences(256);  // 21 x 12 + 4
  CHECK(p.micro_batches == 22);
  CHECK(p.last_micro_batch == 4);
  CHECK(p.sequences() == 256);
  CHECK(model.price(p).tokens == Approx(256.0 * 2048).epsilon(1e-12));
  const auto compute = [&](const TrainPoint& q) {
    return model.price(q).seconds[static_cast<std::size_t>(Term::compute)];
  };
  const TrainPoint one{.micro_batch = 12, .micro_batches = 1}, full{.micro_batch = 12, .micro_batches = 22};
  CHECK(compute(p) == Approx(compute(one) * (21 + 4.0 / 12)));
  CHECK(model.price(p).peak_bytes == model.price(full).peak_bytes);
  // Sharded parameters are gathered for it all the same: 2 x 22 times 2 B, the gradients reduced 22 times.
  const auto sharded = [&](TrainPoint q) {
    q.dp = 8, q.sharding = Sharding::fsdp;
    return model.price(q);
  };
  CHECK(sharded(p).data_gather_payload == sharded(full).data_gather_payload);
  CHECK(sharded(p).data_reduce_payload == sharded(full).data_reduce_payload);
  TrainPoint few{.micro_batch = 12};
  few.set_sequences(2);
  CHECK(few == TrainPoint{.micro_batch = 2, .micro_batches = 1});
  TrainPoint even{.micro_batch = 4};
  even.set_sequences(16);
  CHECK(even == TrainPoint{.micro_batch = 4, .micro_batches = 4});
}

TEST_CASE("experts that exist once are stepped whole: their optimizer divides by their own replicas") {
  // dp 2, ep 2: two halves of the experts, one replica each; everything else is halved. 3 dense and 10 MoE layers.
  const TrainModel model = model_of(dense_first_moe(), 8);
  TrainPoint p{.dp = 2, .ep = 2, .micro_batches = 1};
  const auto l = model.layers(p);
  const double expert = 10 * l.moe.expert_parameters;
  const double rest = 3 * l.dense.parameters + 10 * l.moe.parameters - expert + model.end_parameters(p, l, 0);
  const double own = rest / 2 + expert;
  CHECK(model.price(p, l).seconds[static_cast<std::size_t>(Term::optimizer)] ==
        Approx(model.framework().step_seconds.value +
               model.cost().memory_seconds(own * (4 + 24 + 2) + (rest + expert) * 2 * 4)));
  p.optimizer_on_host = true;  // master 4, moments 8, gradients 4
  CHECK(model.price(p, l).host_bytes == Approx(own * 16));
}

TEST_CASE("properties of any layout") {
  const TrainModel model = model_of(small_gpt(), 64), faster = model_of(small_gpt(), 64, plain_frame(), 2.0);
  CHECK(rc::check("terms sum to the step, categories to the peak, bandwidth helps, recomputation trades", [&] {
    TrainPoint p = *points(64);
    RC_PRE(model.divides(p));
    const TrainPrice a = model.price(p);
    RC_ASSERT(a.valid);
    RC_ASSERT(std::isfinite(a.step_seconds) && a.step_seconds > 0);
    RC_ASSERT(std::abs(std::accumulate(a.seconds.begin(), a.seconds.end(), 0.0) - a.step_seconds) <
              1e-9 * a.step_seconds);
    double bytes = 0;
    for (int c = 0; c < num_categories; ++c)
      if (static_cast<Category>(c) != Category::overhead) bytes += a.bytes[static_cast<std::size_t>(c)];
    RC_ASSERT(std::abs(bytes - a.peak_bytes) < 1e-6 * a.peak_bytes);
    RC_ASSERT(faster.price(p).step_seconds <= a.step_seconds * (1 + 1e-12));
    TrainPoint more = p;
    more.recompute = Recompute::full;
    p.recompute = Recompute::none;
    RC_ASSERT(model.price(more).step_seconds >= model.price(p).step_seconds);
    TrainPoint wider = p;
    wider.micro_batch *= 2;
    RC_ASSERT(model.price(wider).activation_bytes >= model.price(p).activation_bytes);
  }));
}

TEST_CASE("a layout that does not divide is invalid with a reason") {
  const TrainModel model = model_of(small_gpt(), 8);
  for (const TrainPoint& p :
       {TrainPoint{.tp = 3}, TrainPoint{.pp = 9}, TrainPoint{.tp = 0}, TrainPoint{.ep = 2}, TrainPoint{.sp = true}}) {
    CHECK_FALSE(model.price(p).valid);
    CHECK_FALSE(model.why_invalid(p).empty());
  }
  // A last row of interleaved micro-batches is short where ops are lowered, and nowhere else.
  const TrainPoint short_row{.pp = 2, .vpp = 2, .micro_batches = 3};
  FrameworkProfile lowered, other;
  lowered.lowered_ops = true;
  CHECK(model_of(small_gpt(), 8, lowered).divides(short_row));
  CHECK_FALSE(model_of(small_gpt(), 8, other).divides(short_row));
}

TEST_CASE("logits in chunks: those of one chunk, and the stream's gradient whole") {
  auto s = load_scenario_text(
      "model: qwen2.5-7b\ncluster: {gpu: h100-sxm-80gb, gpus_per_node: 8}\ntrain: {layout: {dp: 4, cp: 2}, "
      "micro_batch_tokens: 16384, loss_chunk_tokens: 1024}\nrollout: {layout: {tp: 4, dp: 2}}\n",
      "t.yaml");
  REQUIRE(s.has_value());
  const auto at_loss = [&](std::int64_t chunk) {
    s->train.loss_chunk_tokens = chunk;
    const auto pricer = ScenarioPricer::make(*s, catalog_root());
    REQUIRE(pricer.has_value());
    return (*pricer)->train().head((*pricer)->point().train).transient_bytes;
  };
  // Profile hotbunk: fp32 logits and bf16 gradient, 6 B each of 152,064; 3,584 columns of 2 B.
  const double tokens = 16384, vocabulary = 152064 * 6.0, stream = tokens * 3584 * 2;
  CHECK(at_loss(0) == Approx(tokens * vocabulary));
  CHECK(at_loss(1024) == Approx(1024 * vocabulary + stream));
  CHECK(at_loss(16384) == at_loss(0));
  CHECK(at_loss(100'000) == at_loss(0));
}

}  // namespace hotbunk
