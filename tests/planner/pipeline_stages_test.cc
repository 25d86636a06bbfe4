// Stages of a training pipeline: bubbles, schedules, splits, and which stage is fullest or busiest.
#include <catch2/catch.hpp>

#include "planner/train/train_model.h"
#include "planner/validate/validate_tables.h"
#include "tests/planner/small_models.h"

namespace hotbunk {

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
  const TrainModel model(m, {.sequence = 2048}, CostModel(hardware_from_datasheet(c), c), plain_frame());
  const auto of = [](PipelineSchedule s) { return TrainPoint{.pp = 4, .schedule = s, .micro_batches = 8}; };
  const auto bubble = [&](PipelineSchedule s) {
    return model.price(of(s)).seconds[static_cast<std::size_t>(Term::bubble)];
  };
  // 1F1B: 3 (F + B + W); ZB-H1: 3 (F + B - W), of 8 layers. A stage is through with its last B when the passes of those
  // behind it have gone by; where W takes longer than F, the first stage, which puts off none, is last: 3 B.
  const LayerCost one = model.dense_layer(of(PipelineSchedule::one_f_one_b));
  const double weight_grad = 8 * one.weight_grad, forward = 8 * one.forward;
  CHECK(bubble(PipelineSchedule::zero_bubble) > 0.0);
  // But for messages, of which 1F1B hides none.
  const auto saved = [](const TrainModel& by, TrainPoint at) {
    constexpr auto messages = static_cast<std::size_t>(Term::pipeline);
    const TrainPrice plain = by.price(at);
    at.schedule = PipelineSchedule::zero_bubble;
    const TrainPrice deferring = by.price(at);
    CHECK(deferring.seconds[messages] < plain.seconds[messages]);
    return plain.step_seconds - plain.seconds[messages] - deferring.step_seconds + deferring.seconds[messages];
  };
  CHECK(saved(model, of(PipelineSchedule::one_f_one_b)) ==
        Approx(6 * weight_grad - 3 * std::max(0.0, weight_grad - forward)).epsilon(0.01));
  // Of two micro-batches: 3 F, 2 (F + B) on the last stage, which puts off both W, 3 B, and one W on the first: 5 (F +
  // B)
  // + W, where 1F1B takes 5 (F + B + W).
  TrainPoint few = of(PipelineSchedule::one_f_one_b);
  few.micro_batches = 2;
  CHECK(saved(model, few) == Approx(4 * weight_grad).epsilon(0.01));
  // A single one goes down and up: 4 (F + B), and one W on the first stage.
  few.micro_batches = 1;
  CHECK(saved(model, few) == Approx(3 * weight_grad).epsilon(0.01));
  // Those that a TP collective hides behind stay where they are.
  FrameworkProfile overlapping = plain_frame();
  overlapping.overlap_tensor = true;
  const TrainModel with_tp(m, {.sequence = 2048}, CostModel(hardware_from_datasheet(c), c), overlapping);
  TrainPoint cut = of(PipelineSchedule::one_f_one_b);
  cut.tp = 2;
  const LayerCost layer = with_tp.dense_layer(cut);
  REQUIRE(layer.hidden_tensor > 0.1 * layer.weight_grad);
  // Here the head's collectives make the last stage the longest.
  CHECK(saved(with_tp, cut) == Approx(6 * 8 * (layer.weight_grad - layer.hidden_tensor)).epsilon(0.03));
  // 1F1B holds 4 micro-batches on the first stage, GPipe all 8.
  const auto kept = [&](PipelineSchedule s) {
    for (const PeakPart& part : model.peak_parts(of(s), model.layers(of(s))))
      if (part.tensor == PeakTensor::kept) return part.bytes;
    return 0.0;
  };
  CHECK(kept(PipelineSchedule::gpipe) == Approx(2 * kept(PipelineSchedule::one_f_one_b)));
  CHECK(kept(PipelineSchedule::zero_bubble) == kept(PipelineSchedule::one_f_one_b));
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
          TrainSetting even{.sequence = 2048};
          TrainSetting given = even;
          given.pipeline_split = even_split(layers, pp * vpp);
          const CostModel cost(hardware_from_datasheet(c), c);
          FrameworkProfile any_cut = plain_frame();
          any_cut.uneven_chunks = true;
          const TrainModel a(m, even, cost, any_cut), b(m, given, cost, plain_frame());
          for (const Recompute r : {Recompute::none, Recompute::full}) {
            const TrainPoint p{
                .dp = 2, .pp = pp, .vpp = vpp, .ep = 2, .schedule = schedule, .recompute = r, .micro_batches = pp * 2};
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

}  // namespace hotbunk
