#include "planner/train/train_model.h"

#include <rapidcheck.h>

#include <catch2/catch.hpp>
#include <cmath>
#include <numeric>

#include "planner/search/search.h"
#include "planner/validate/validate_tables.h"
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

TEST_CASE("what a stage rebuilds is of the kinds of layers that it has") {
  // One layer a stage, the first three dense: no stage of dense layers pays for a MoE layer's recomputation.
  const TrainModel model = model_of(dense_first_moe(), 16);
  TrainPoint p{.pp = 13, .recompute = Recompute::full, .micro_batches = 1};
  const auto l = model.layers(p);
  const auto rebuilt = [&](std::int64_t stage) {
    return model.peak_bytes(p, l, stage)[static_cast<std::size_t>(PeakTensor::rebuilt)];
  };
  CHECK(l.dense.kept_bytes != l.moe.kept_bytes);
  CHECK(rebuilt(1) == l.dense.kept_bytes - l.dense.kept_full_bytes);
  CHECK(rebuilt(5) == l.moe.kept_bytes - l.moe.kept_full_bytes);
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

TEST_CASE("the bubble is (pp - 1) / (vpp m) of the stage's time") {
  FrameworkProfile f = plain_frame();
  ModelSpec m = gpt_model(32, 1024, 16, 64, 2048);  // next to no embedding or head
  const TrainModel model = model_of(m, 8, f);
  const auto price = model.price({.pp = 4, .micro_batches = 8});
  const auto at = [](const TrainPrice& p, Term t) { return p.seconds[static_cast<std::size_t>(t)]; };
  CHECK(at(price, Term::bubble) / at(price, Term::compute) == Approx(3.0 / 8).epsilon(0.03));
  const auto interleaved = model.price({.pp = 4, .vpp = 2, .micro_batches = 8});
  CHECK(at(interleaved, Term::bubble) == Approx(at(price, Term::bubble) / 2).epsilon(0.03));
}

TEST_CASE(
    "schedules: zero-bubble saves two weight-gradient passes per stage of bubble, GPipe keeps every micro-batch") {
  const ModelSpec m = gpt_model(32, 1024, 16, 64, 2048);
  const ClusterSpec c = cluster_of(8);
  const auto of = [&](PipelineSchedule s) {
    return TrainModel(m, {.sequence = 2048, .schedule = s}, CostModel(hardware_from_datasheet(c), c), plain_frame());
  };
  const TrainPoint p{.pp = 4, .micro_batches = 8};
  const auto bubble = [&](PipelineSchedule s) {
    return of(s).price(p).seconds[static_cast<std::size_t>(Term::bubble)];
  };
  // 1F1B: 3 (F + B + W); ZB-H1: 3 (F + B - W), W of 8 layers.
  const double weight_grad = 8 * of(PipelineSchedule::one_f_one_b).dense_layer(p).weight_grad;
  CHECK(bubble(PipelineSchedule::one_f_one_b) - bubble(PipelineSchedule::zero_bubble) == Approx(6 * weight_grad));
  CHECK(bubble(PipelineSchedule::zero_bubble) > 0.0);
  // Of two micro-batches no more than their two weight gradients can wait.
  TrainPoint few = p;
  few.micro_batches = 2;
  const auto saved = [&](const TrainModel& a, const TrainModel& b, const TrainPoint& at) {
    return a.price(at).step_seconds - b.price(at).step_seconds;
  };
  CHECK(saved(of(PipelineSchedule::one_f_one_b), of(PipelineSchedule::zero_bubble), few) == Approx(2 * weight_grad));
  // Those that a TP collective hides behind stay where they are.
  FrameworkProfile overlapping = plain_frame();
  overlapping.overlap_tensor = true;
  const auto with_tp = [&](PipelineSchedule s) {
    return TrainModel(m, {.sequence = 2048, .schedule = s}, CostModel(hardware_from_datasheet(c), c), overlapping);
  };
  TrainPoint cut = p;
  cut.tp = 2;
  const LayerCost layer = with_tp(PipelineSchedule::one_f_one_b).dense_layer(cut);
  REQUIRE(layer.hidden_tensor > 0.1 * layer.weight_grad);
  CHECK(saved(with_tp(PipelineSchedule::one_f_one_b), with_tp(PipelineSchedule::zero_bubble), cut) ==
        Approx(6 * 8 * (layer.weight_grad - layer.hidden_tensor)));
  // 1F1B holds 4 micro-batches on the first stage, GPipe all 8.
  const auto kept = [&](PipelineSchedule s) {
    for (const PeakPart& part : of(s).peak_parts(p, of(s).layers(p)))
      if (part.tensor == PeakTensor::kept) return part.bytes;
    return 0.0;
  };
  CHECK(kept(PipelineSchedule::gpipe) == Approx(2 * kept(PipelineSchedule::one_f_one_b)));
  CHECK(kept(PipelineSchedule::zero_bubble) == kept(PipelineSchedule::one_f_one_b));
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

namespace {

/// Layers of every chunk, longer ones in the middle, as the search cuts where none are given.
std::vector<std::int64_t> even_split(std::int64_t layers, std::int64_t chunks) {
  std::vector<std::int64_t> out(static_cast<std::size_t>(chunks), layers / chunks);
  const std::int64_t extra = layers % chunks, first = (chunks - extra + 1) / 2;
  for (std::int64_t i = first; i < first + extra; ++i) ++out[static_cast<std::size_t>(i)];
  return out;
}

}  // namespace

TEST_CASE("an even pipeline costs what it costs when its split is written down, stage by stage") {
  const ClusterSpec c = cluster_of(64);
  int uneven = 0, interleaved = 0;
  for (const auto& [layers, first] : {std::pair{13, 0}, {13, 1}, {13, 3}, {13, 6}, {13, 13}, {22, 3}, {22, 5}})
    for (std::int64_t pp = 1; pp <= 13; ++pp)
      for (std::int64_t vpp : {1, 2, 3, 4})  // 22 layers and both ends make 24
        for (const auto schedule : {PipelineSchedule::one_f_one_b, PipelineSchedule::gpipe}) {
          ModelSpec m = dense_first_moe();
          m.layers = layers, m.moe->first_dense_layers = first;
          TrainSetting even{.sequence = 2048, .schedule = schedule};
          TrainSetting given = even;
          given.pipeline_split = even_split(layers, pp * vpp);
          const CostModel cost(hardware_from_datasheet(c), c);
          FrameworkProfile any_cut = plain_frame();
          any_cut.uneven_chunks = true;
          const TrainModel a(m, even, cost, any_cut), b(m, given, cost, plain_frame());
          for (const Recompute r : {Recompute::none, Recompute::full}) {
            const TrainPoint p{.dp = 2, .pp = pp, .vpp = vpp, .ep = 2, .recompute = r, .micro_batches = pp * 2};
            if (!a.divides(p)) continue;
            INFO(layers << " layers, first " << first << " pp " << pp << " vpp " << vpp);
            const TrainPrice x = a.price(p), y = b.price(p);
            CHECK(x.step_seconds == Approx(y.step_seconds).epsilon(1e-12));
            CHECK(x.peak_bytes == Approx(y.peak_bytes).epsilon(1e-12));
            CHECK(x.expert_payload == Approx(y.expert_payload).epsilon(1e-12));
            CHECK(x.data_reduce_payload == Approx(y.data_reduce_payload).epsilon(1e-12));
            CHECK(a.fullest_stage(p, a.layers(p)) == b.fullest_stage(p, b.layers(p)));
            uneven += layers % pp != 0, interleaved += vpp > 1 && layers % (pp * vpp) != 0;
          }
        }
  CHECK(uneven > 100);
  CHECK(interleaved > 100);
}

TEST_CASE("interleaving 61 layers: where the framework cuts unevenly, equal chunks only elsewhere") {
  // DeepSeek-V3's 61 layers over 4 stages of 4 chunks: 13 of the 16 chunks hold 4 layers, the outer three 3.
  ModelSpec m = dense_first_moe();
  m.layers = 61;
  FrameworkProfile any_cut = plain_frame();
  any_cut.uneven_chunks = true;
  const TrainPoint p{.pp = 4, .vpp = 4, .micro_batches = 8};
  const TrainModel model = model_of(m, 16, any_cut), equal = model_of(m, 16);
  REQUIRE(model.divides(p));
  std::int64_t layers = 0, least = 61, most = 0;
  for (std::int64_t stage = 0; stage < 4; ++stage) {
    const std::int64_t own = model.layers_of(p, stage, false) + model.layers_of(p, stage, true);
    layers += own, least = std::min(least, own), most = std::max(most, own);
  }
  CHECK(layers == 61);
  CHECK(least == 15);  // 16 chunks of stages 0 to 3 in turn: the short ones are the first two and the last, 0, 1 and 3
  CHECK(most == 16);
  CHECK(model.price(p).step_seconds > 0);
  CHECK_FALSE(equal.divides(p));
  CHECK_THAT(equal.why_invalid(p), Catch::Contains("61 layers do not divide by pp 4 x vpp 4"));
}

TEST_CASE("leading dense layers: the first full MoE stage is the fullest, and the bubble waits for all of them") {
  const ModelSpec m = dense_first_moe();
  const TrainModel model = model_of(m, 16);
  // One layer a stage: 0 to 2 dense, 3 to 12 MoE. A MoE layer's 16 experts are 3 x 1024 x 512 x 16 = 25.2e6 elements, a
  // dense layer's MLP 3 x 1024 x 4096 = 12.6e6, embedding and head 32000 x 1024 = 32.8e6: stage 12 is the fullest.
  const TrainPoint p{.pp = 13, .sharding = Sharding::replicated, .micro_batches = 1};
  const auto l = model.layers(p);
  CHECK(model.fullest_stage(p, l) == 12);
  CHECK(model.price(p, l).state_bytes == Approx(18.0 * (l.moe.parameters + l.head.parameters)));
  // With a vocabulary of 64 it is stage 3, the first MoE one: of 13 micro-batches 13 - 3 = 10 are in flight there,
  // fewer behind it, and layer inputs of 2048 x 1024 x 2 B = 4.2 MB weigh less than what dense layers lack.
  ModelSpec narrow = m;
  narrow.vocab = 64;
  const TrainModel bare = model_of(narrow, 16);
  TrainPoint many = p;
  many.recompute = Recompute::full, many.micro_batches = 13;
  const auto n = bare.layers(many);
  CHECK(bare.fullest_stage(many, n) == 3);
  CHECK(bare.price(many, n).state_bytes == Approx(18.0 * n.moe.parameters));
  CHECK(bare.peak_bytes(many, n, 3)[static_cast<std::size_t>(PeakTensor::kept)] == Approx(10.0 * 2048 * 1024 * 2));
  // Bubble: the stage that is through last waits for all others, 3 dense and 10 MoE layers, embedding and head. Of one
  // micro-batch all stages are through at once, and stage 12 has most to step. Compute alone: tp, ep and cp are 1, and
  // launches hide (kernel counts are not in the profile).
  FrameworkProfile quiet = plain_frame();
  quiet.launch_seconds.value = 1e-12;
  const TrainModel calm = model_of(narrow, 16, quiet);
  const auto q = calm.layers(p);
  const auto of = [](const LayerCost& c) { return c.forward + c.backward; };
  const double whole = of(q.embedding) + 3 * of(q.dense) + 10 * of(q.moe) + of(q.head);
  const double last = of(q.moe) + of(q.head);
  CHECK(of(q.embedding) + of(q.dense) > last);
  const TrainPrice price = calm.price(p, q);
  CHECK(price.seconds[static_cast<std::size_t>(Term::compute)] == Approx(last));
  CHECK(price.seconds[static_cast<std::size_t>(Term::bubble)] == Approx(whole - last));
  // Of many, the one that computes longest: its optimizer is shorter by less.
  many.recompute = Recompute::none, many.micro_batches = 1000;
  const TrainPrice long_step = calm.price(many, q);
  const auto each = [&](const LayerCost& c) { return of(c) + 0.999 * c.accumulate; };
  CHECK(long_step.seconds[static_cast<std::size_t>(Term::compute)] ==
        Approx(1000 * (each(q.embedding) + each(q.dense))));
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

TEST_CASE("traffic and the end of the step are those of the stage with most, not of the first") {
  ModelSpec m = dense_first_moe();
  m.vocab = 64;
  const TrainModel model = model_of(m, 64);
  // One layer a stage, the first three dense: all expert traffic is on the others, forward and backward of 4
  // micro-batches. The last also holds the head, and a MoE layer's experts (25.2e6) outweigh a dense MLP (12.6e6).
  const TrainPoint p{.dp = 2, .pp = 13, .ep = 1, .micro_batches = 4};
  const auto l = model.layers(p);
  const double held = l.moe.parameters + l.head.parameters;
  const TrainPrice price = model.price(p, l);
  CHECK(price.data_reduce_payload == Approx(4 * held));
  CHECK(price.data_gather_payload == Approx(2 * held));
  // Adam on half of it: gradient 4 B, master and moments 12 B read and written, parameter 2 B; and every gradient read
  // for the norm and zeroed.
  CHECK(price.seconds[static_cast<std::size_t>(Term::optimizer)] ==
        Approx(model.framework().step_seconds.value +
               model.cost().memory_seconds(held / 2 * (4 + 24 + 2) + held * 2 * 4)));
  TrainPoint spread = p;
  spread.ep = 2;
  const auto k = model.layers(spread);
  CHECK(k.moe.expert_payload > 0);
  CHECK(model.price(spread, k).expert_payload == Approx(4 * k.moe.expert_payload));
}

TEST_CASE("a tied embedding at both ends of a pipeline: its gradients are added up over the two") {
  ModelSpec tied = small_gpt(), own = tied;
  own.tie_embeddings = false;
  const TrainPoint p{.tp = 2, .pp = 2, .micro_batches = 4}, flat{.tp = 2, .micro_batches = 4};
  const auto data = [](const ModelSpec& m, const TrainPoint& q) {
    return model_of(m, 8).price(q).seconds[static_cast<std::size_t>(Term::data)];
  };
  // 32000 x 1024 elements over tp 2, 4 B each, between two ranks of the node.
  const double seconds =
      model_of(tied, 8).cost().collective_seconds(OpKind::all_reduce, {2, 1, 1}, 32000.0 * 1024 / 2 * 4);
  CHECK(data(tied, p) - data(own, p) == Approx(seconds));
  CHECK(data(tied, flat) == data(own, flat));
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
  for (const TrainPoint& p : {TrainPoint{.tp = 3}, TrainPoint{.pp = 9}, TrainPoint{.tp = 0}, TrainPoint{.ep = 2},
                              TrainPoint{.sp = true}, TrainPoint{.pp = 2, .vpp = 2, .micro_batches = 3}}) {
    CHECK_FALSE(model.price(p).valid);
    CHECK_FALSE(model.why_invalid(p).empty());
  }
}

TEST_CASE("the search finds what brute force finds, whatever the number of threads") {
  for (const ModelSpec& spec : {small_gpt(), small_moe()}) {
    const TrainModel model = model_of(spec, 16);
    TrainSpace space = default_train_space(spec, 16, 8, 32, TrainEngine::megatron);
    space.ulysses = {1, 2, 4, 8};  // by default fewer on several nodes
    space.shard = {-1, 2, 4, 8};
    SearchOptions options{.keep = 5, .device_bytes = 12e9, .threads = 1};
    const TrainSearch found = search_train(model, space, options);
    // Brute force: every combination, straight from the model.
    double best = 1e300;
    std::int64_t feasible = 0, priced = 0;
    for (auto tp : space.tp)
      for (auto cp : space.cp)
        for (auto ep : space.ep)
          for (auto b : space.micro_batch)
            for (bool sp : space.sp)
              for (auto pp : space.pp)
                for (auto vpp : space.vpp)
                  for (Recompute r : space.recompute)
                    for (auto ulysses : space.ulysses)
                      for (std::int64_t shard : space.shard) {
                        if (16 % (tp * cp * ulysses * pp) != 0 || (sp && tp == 1)) continue;
                        const std::int64_t dp = 16 / (tp * cp * ulysses * pp), data = dp * cp * ulysses;
                        if (32 % (dp * b) != 0 || (shard > 0 && (data % shard != 0 || shard == data))) continue;
                        TrainPoint p{.dp = dp,
                                     .cp = cp,
                                     .ulysses = ulysses,
                                     .tp = tp,
                                     .pp = pp,
                                     .vpp = vpp,
                                     .ep = ep,
                                     .fsdp = shard,
                                     .sp = sp,
                                     .recompute = r,
                                     .micro_batch = b,
                                     .micro_batches = 32 / (dp * b)};
                        const TrainPrice price = model.price(p);
                        if (!price.valid) continue;
                        // Under fused attention selective recomputation drops nothing: one point, not two.
                        p.recompute = Recompute::none;
                        const TrainPrice none = model.price(p);
                        if (r == Recompute::selective && price.step_seconds == none.step_seconds &&
                            price.peak_bytes == none.peak_bytes)
                          continue;
                        ++priced;
                        if (price.total_bytes() > options.device_bytes) continue;
                        ++feasible;
                        best = std::min(best, price.step_seconds);
                      }
    REQUIRE(!found.best.empty());
    CHECK(found.priced == priced);
    CHECK(found.feasible == feasible);
    CHECK(found.best[0].price.step_seconds == best);
    options.threads = 3;
    const TrainSearch again = search_train(model, space, options);
    REQUIRE(again.best.size() == found.best.size());
    for (std::size_t i = 0; i < found.best.size(); ++i) CHECK(again.best[i].point == found.best[i].point);
    REQUIRE(again.pareto.size() == found.pareto.size());
    for (std::size_t i = 1; i < found.pareto.size(); ++i)
      CHECK(found.pareto[i].price.total_bytes() < found.pareto[i - 1].price.total_bytes());
    // More memory is never infeasible.
    options.device_bytes *= 2;
    CHECK(search_train(model, space, options).feasible >= found.feasible);
  }
}

TEST_CASE("an impossible space says why") {
  const TrainModel model = model_of(small_gpt(), 8);
  TrainSpace space = default_train_space(small_gpt(), 8, 8, 8, TrainEngine::megatron);
  const TrainSearch tight = search_train(model, space, {.device_bytes = 1e6});
  CHECK(tight.best.empty());
  CHECK_THAT(tight.reason, Catch::Contains("none of"));
  space.ranks = 7;
  space.tp = {7};
  const TrainSearch odd = search_train(model, space, {});
  CHECK_THAT(odd.reason, Catch::Contains("divides"));
}

}  // namespace hotbunk
