// Optimizers other than AdamW: bytes of state, the step's time, what crosses links. Nothing executes them.
#include <catch2/catch.hpp>

#include "planner/answers/answers.h"
#include "planner/answers/choices.h"
#include "planner/train/optimizer_cost.h"
#include "spec/catalog.h"
#include "spec/loader.h"
#include "spec/validate.h"

namespace hotbunk {
namespace {

std::unique_ptr<ScenarioPricer> optimizer_pricer(std::vector<std::string> sets,
                                                 const std::string& model = "llama-3.1-8b") {
  auto s = load_scenario_text("model: " + model +
                                  "\ncluster: {gpu: h100-sxm-80gb, nodes: 2, gpus_per_node: 8}\n"
                                  "train: {layout: {dp: 16}, recompute: full, micro_batch_tokens: 2048}\n"
                                  "rollout: {layout: {tp: 2, dp: 8}}\n",
                              "optimizer.yaml", sets);
  if (!s) FAIL(render(s.error()));
  auto p = ScenarioPricer::make(*s, catalog_root());
  if (!p) FAIL(render(p.error()));
  return std::move(*p);
}

TrainPrice step_price(const ScenarioPricer& p) { return p.train().price(p.point().train); }
double optimizer_bytes(const ScenarioPricer& p) {
  return step_price(p).bytes[static_cast<std::size_t>(Category::optimizer)];
}
double step_seconds(const TrainPrice& t) { return t.seconds[static_cast<std::size_t>(Term::optimizer)]; }

// Llama-3.1-8B: 32 layers of q 4096x4096, k and v 1024x4096, o 4096x4096, gate and up 14336x4096, down 4096x14336;
// two norms of 4096 each, one at the end; embedding and head 128256x4096.
constexpr double layer_matrices = 2.0 * 4096 * 4096 + 2.0 * 1024 * 4096 + 3.0 * 14336 * 4096;
constexpr double matrices = 32 * layer_matrices, tables = 2.0 * 128256 * 4096, vectors = 65.0 * 4096;
constexpr double all_elements = matrices + tables + vectors;

// Adafactor's sides of these in fp32: rows 4096 + 2 x 1024 + 4096 + 2 x 14336 + 4096 of a layer, columns 6 x 4096 +
// 14336. A rank of 16 has its rows and all columns; vectors keep themselves.
constexpr double row_elements = 32.0 * (3 * 4096 + 2 * 1024 + 2 * 14336) + 2.0 * 128256;
constexpr double column_elements = 32.0 * (6 * 4096 + 14336) + 2 * 4096;
constexpr double sides = 4 * (row_elements + vectors) / 16 + 4 * column_elements;

}  // namespace

TEST_CASE("state of every optimizer, by hand") {
  // fp32 master 4 bytes each, then the optimizer's own; all of it over 16 ranks.
  const struct {
    std::vector<std::string> sets;
    double bytes;
  } cases[] = {
      {{}, (4 + 8) * all_elements},
      {{"train.precision.moments=bf16"}, (4 + 4) * all_elements},
      {{"train.precision.moments=bf16", "train.precision.master=bf16"}, (2 + 4) * all_elements},
      {{"optimizer.name=adamw-8bit"}, (4 + 2 + 2 * 4.0 / 256) * all_elements},
      {{"optimizer.name=adamw-4bit"}, (4 + 1 + 2 * 4.0 / 128) * all_elements},
      {{"optimizer.name=sgd"}, 4 * all_elements},
      {{"optimizer.name=sgd", "optimizer.momentum=0.9"}, (4 + 4) * all_elements},
      {{"optimizer.name=sgd", "optimizer.momentum=0.9", "train.precision.moments=bf16"}, (4 + 2) * all_elements},
      {{"optimizer.name=muon"}, 4 * all_elements + 4 * matrices + 8 * (tables + vectors)},
  };
  for (const auto& c : cases) {
    INFO((c.sets.empty() ? "adamw" : c.sets.back()));
    const auto p = optimizer_pricer(c.sets);
    CHECK(optimizer_bytes(*p) == Approx(c.bytes / 16).epsilon(1e-9));
    // What executes steps in fp32.
    const Precision& precision = p->scenario().train.precision;
    CHECK(unsupported_to_execute(p->scenario()).empty() ==
          (p->point().train.optimizer == OptimizerName::adamw && precision.master == DType::f32 &&
           precision.moments == DType::f32));
  }
}

TEST_CASE("Adafactor keeps a row and a column per matrix") {
  CHECK(optimizer_bytes(*optimizer_pricer({"optimizer.name=adafactor"})) ==
        Approx(4 * all_elements / 16 + sides).epsilon(1e-4));
  CHECK(optimizer_bytes(*optimizer_pricer({"optimizer.name=adafactor", "optimizer.momentum=0.9"})) ==
        Approx(8 * all_elements / 16 + sides).epsilon(1e-4));
}

TEST_CASE("a step's time follows the bytes that its optimizer moves") {
  const auto seconds = [](std::vector<std::string> sets) {
    return step_seconds(step_price(*optimizer_pricer(std::move(sets))));
  };
  const auto p = optimizer_pricer({});
  const CostModel& cost = p->train().cost();
  // AdamW: gradient 4, master and moments 12 in and out, parameter 2; the norm reads gradients and zeroing writes them.
  CHECK(seconds({}) == Approx(cost.memory_seconds(all_elements / 16 * (4 + 2 * 12 + 2 + 8))));
  CHECK(seconds({"optimizer.name=adamw-8bit"}) ==
        Approx(cost.memory_seconds(all_elements / 16 * (4 + 2 * 6.03125 + 2 + 8))));
  CHECK(seconds({"optimizer.name=sgd"}) == Approx(cost.memory_seconds(all_elements / 16 * (4 + 2 * 4 + 2 + 8))));
  CHECK(seconds({"optimizer.name=sgd"}) < seconds({"optimizer.name=adamw-4bit"}));
  // Adafactor: what SGD moves, its sides in and out; the gradient once more for them, and the fp32 update out and in.
  CHECK(seconds({"optimizer.name=adafactor"}) ==
        Approx(cost.memory_seconds(all_elements / 16 * (4 + 2 * 4 + 2 + 8 + 4 + 8) + 2 * sides)).epsilon(1e-4));
  CHECK(seconds({"optimizer.name=muon"}) > seconds({}));
}

TEST_CASE("Muon: products of five Newton-Schulz steps, and every matrix to its owner and back") {
  const auto muon = optimizer_pricer({"optimizer.name=muon"});
  const TrainPoint p = muon->point().train;
  const TrainModel::Layers l = muon->train().layers(p);
  const CostModel& cost = muon->train().cost();
  CHECK(l.dense.optimizer.ordinary_matrices == Approx(layer_matrices));
  CHECK(l.embedding.optimizer.ordinary_matrices == 0);
  CHECK(l.head.optimizer.ordinary_seconds == 0);
  // Of m x n with m <= n: A = X X^T, A A and their sum times X, three kernels, five times.
  const auto products = [&](double m, double n) {
    return 5 * (cost.gemm_seconds(m, m, n, DType::bf16) + cost.gemm_seconds(m, m, m, DType::bf16) +
                cost.gemm_seconds(m, n, m, DType::bf16) + 3 * cost.hardware().kernel_overhead.value);
  };
  const double longest = products(4096, 14336);
  CHECK(l.dense.optimizer.ordinary_seconds ==
        Approx(2 * products(4096, 4096) + 2 * products(1024, 4096) + 3 * longest));
  CHECK(l.dense.optimizer.longest_seconds == Approx(longest));
  // A sixteenth of 2 bytes of every matrix, there and back; none where whole matrices are given to ranks.
  const TrainPrice price = muon->train().price(p);
  CHECK(price.optimizer_payload == Approx(2 * 2 * matrices / 16));
  TrainPoint whole = p;
  whole.sharding = Sharding::zero1;
  CHECK(muon->train().price(whole).optimizer_payload == 0);
  const auto links = link_bytes(muon->rl(), muon->point(), price, muon->rl().price_rollout(muon->point()), true);
  const auto own =
      std::find_if(links.begin(), links.end(), [](const LinkUse& u) { return u.what == "optimizer's matrices"; });
  REQUIRE(own != links.end());
  // 8 of the other 15 ranks are on the other node.
  CHECK(own->network_wire == Approx(price.optimizer_payload * 8 / 15));
  // Nobody orthogonalizes less than one matrix, however many share the work. Beside that one: as AdamW, with a moment
  // of 4 bytes for matrices; and 2 bytes of the own part of every matrix packed, exchanged and unpacked, there and
  // back.
  TrainPoint wide = p;
  wide.dp = 1 << 14;
  const auto ranks = static_cast<double>(wide.dp);
  const double moments = (4 * matrices + 8 * (tables + vectors)) / ranks, sent = 2 * matrices / ranks;
  const double streamed = cost.memory_seconds(all_elements / ranks * (4 + 2 * 4 + 2 + 8) + 2 * moments);
  const double dealt = cost.memory_seconds(4 * sent) +
                       2 * cost.collective_seconds(OpKind::all_to_all, GroupShape::strided(wide.dp, 1, 8), sent);
  CHECK(step_seconds(muon->train().price(wide)) == Approx(streamed + longest + dealt));
}

TEST_CASE("experts' optimizers: Muon takes each expert for itself, states divide by its replicas") {
  const std::vector<std::string> layout = {"train.engine=megatron", "train.layout.dp=16", "train.layout.ep=8"};
  auto with = layout;
  with.emplace_back("optimizer.name=muon");
  const auto adam = optimizer_pricer(layout, "qwen3-30b-a3b"), muon = optimizer_pricer(with, "qwen3-30b-a3b");
  const TrainModel::Layers l = muon->train().layers(muon->point().train);
  // 128 experts over 8 ranks, each gate, up and down of 768 x 2048.
  CHECK(l.moe.optimizer.expert_matrices == Approx(16.0 * 3 * 768 * 2048));
  CHECK(l.moe.optimizer.expert_bytes == Approx(4.0 * l.moe.expert_parameters));
  CHECK(optimizer_bytes(*muon) < optimizer_bytes(*adam));
}

TEST_CASE("explain offers 8-bit states, and its flags select them") {
  // A pool of one sequence: training is the fullest moment.
  const auto p = optimizer_pricer({"rollout.kv_cache_tokens=2048", "rollout.max_running_requests=1"});
  const Explanation e = explain(*p);
  const auto lever = std::find_if(e.levers.begin(), e.levers.end(),
                                  [](const Lever& l) { return l.change == "optimizer.name = adamw-8bit"; });
  REQUIRE(lever != e.levers.end());
  CHECK(lever->flags == std::vector<std::string>{"optimizer.name=adamw-8bit"});
  // 8 bytes become 2.03 of every element's sixteenth, at the moment when training is fullest.
  CHECK(lever->bytes < 0);
  CHECK(lever->bytes >= -(8 - 2.03125) * all_elements / 16 * 1.0001);
  CHECK(lever->seconds < 0);
  CHECK_THAT(describe(optimizer_pricer({"optimizer.name=muon"})->point()), Catch::Contains(", muon"));
  // Searches keep the scenario's optimizer.
  const auto c = choose(*optimizer_pricer({"optimizer.name=sgd"}), {.top = 3, .budget = 20000});
  REQUIRE(c.has_value());
  REQUIRE_FALSE(c->rows.empty());
  for (const ChoiceRow& r : c->rows) CHECK(r.point.train.optimizer == OptimizerName::sgd);
}

}  // namespace hotbunk
