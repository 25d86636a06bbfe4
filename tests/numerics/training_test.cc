// P3: what one rank computes agrees with Hugging Face transformers, and every way of computing it agrees as well.
// Long for the layouts, which are held to the same goldens by the same few helpers.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <catch2/catch.hpp>
#include <cstdlib>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <set>

#include "layout/sequence.h"
#include "layout/shard.h"
#include "layout/train_weights.h"
#include "spec/expert_mesh.h"
#include "spec/expert_rounds.h"
#include "spec/names.h"
#include "spec/shard_over.h"
#include "tests/numerics/drawn_layout.h"
#include "tests/numerics/golden_checks.h"

using namespace hotbunk;
using namespace hotbunk::test;

TEST_CASE("logits, log-probs, loss, gradients and five AdamW steps agree with transformers") {
  for (const std::string& name : golden_models()) {
    CAPTURE(name);
    const Golden g = Golden::load(name);
    const TrainingResult r = train(g, golden_scenario(g, 1));
    CHECK(r.losses.at(0) == Approx(g.loss).epsilon(1e-6));
    check_forward(g, r);
    check_training(g, r);
  }
}

TEST_CASE("recomputation, logits in chunks and gradient accumulation compute the same") {
  for (const std::string& name : golden_models()) {
    const Golden g = Golden::load(name);
    const Scenario plain = golden_scenario(g, 1);
    std::vector<std::pair<std::string, Scenario>> variants(5, {"", plain});
    variants[0].first = "recompute selective", variants[0].second.train.recompute = Recompute::selective;
    variants[1].first = "recompute full", variants[1].second.train.recompute = Recompute::full;
    variants[2].first = "chunks of 17 tokens", variants[2].second.train.loss_chunk_tokens = 17;
    variants[3].first = "several micro-batches", variants[3].second.train.micro_batch_tokens = g.longest_sequence();
    variants[4] = variants[3];
    variants[4].first = "micro-batches, chunks and recompute full";
    variants[4].second.train.recompute = Recompute::full, variants[4].second.train.loss_chunk_tokens = 7;
    for (const auto& [what, scenario] : variants) {
      CAPTURE(name, what);
      const TrainingResult r = train(g, scenario);
      // Several micro-batches come in another order than the golden's sequences.
      if (scenario.train.micro_batch_tokens == plain.train.micro_batch_tokens) check_forward(g, r);
      check_training(g, r);
    }
  }
}

TEST_CASE("FSDP over 2 and 4 ranks computes what one rank does") {
  std::size_t number = 0;
  for (const std::string& name : golden_models()) {
    const Golden g = Golden::load(name);
    const TrainingResult one = train(g, golden_scenario(g, 1));
    ++number;
    for (const std::int64_t ranks : {2, 4})
      for (const bool reshard : {true, false}) {
        if (reshard == ((number + static_cast<std::size_t>(ranks) / 2) % 2 == 0)) continue;  // each golden two of four
        CAPTURE(name, ranks, reshard);
        Scenario s = golden_scenario(g, ranks);
        s.train.reshard_after_forward = reshard;
        const TrainingResult r = train(g, s);
        check_training(g, r);
        for (const auto& [parameter, value] : r.after5) {
          if (parameter.ends_with("e_score_correction_bias")) continue;  // nothing moves it
          CAPTURE(parameter);
          CHECK(update_error(value, one.after5.at(parameter), g.initial(parameter)) <= update_bound / 5);
        }
      }
  }
}

TEST_CASE("DDP, ZeRO and FSDP over copies of the shards compute what one rank does") {
  for (const char* name : {"qwen3-norm", "qwen3-moe-tiny"}) {
    const Golden g = Golden::load(name);
    const TrainingResult one = train(g, golden_scenario(g, 1));
    struct Way {
      TrainEngine engine;
      std::int64_t group;
    };
    for (const Way way : {Way{TrainEngine::ddp, -1},
                          {TrainEngine::zero1, -1},
                          {TrainEngine::zero1, 2},
                          {TrainEngine::zero2, -1},
                          {TrainEngine::zero2, 2},
                          {TrainEngine::fsdp2, 2},
                          {TrainEngine::fsdp2, 1},
                          {TrainEngine::fsdp1, -1},
                          {TrainEngine::fsdp1, 2},
                          {TrainEngine::fsdp1, 1}})
      for (const bool several : {false, true}) {
        CAPTURE(static_cast<int>(way.engine), way.group, several);
        Scenario s = golden_scenario(g, 4);
        s.train.engine = way.engine, s.train.layout.fsdp = way.group;
        if (several) s.train.micro_batch_tokens = g.longest_sequence();
        const TrainingResult r = train(g, s);
        check_training(g, r);
        for (const auto& [parameter, value] : r.after5) {
          CAPTURE(parameter);
          CHECK(update_error(value, one.after5.at(parameter), g.initial(parameter)) <= update_bound / 5);
        }
      }
  }
}

TEST_CASE("FSDP2 that reshards to a smaller mesh computes what transformers does") {
  // Units that few ranks keep among them between their passes: parts that end inside a matrix, and padding behind some;
  // beside hybrid shards, tensor and sequence parallelism, Ulysses, rings, adapters and state on the host.
  struct Way {
    const char* model;
    std::int64_t few, dp, tp = 1, group = -1, ulysses = 1, cp = 1;
    Offload offload = Offload::none;
  };
  for (const Way& way : {Way{"llama-gqa", 2, 4},
                         {"llama-tied", 3, 6},
                         {"qwen2-bias", 2, 4, 2},
                         {"qwen3-norm", 2, 8, 1, 4},
                         {"gemma3-tiny", 4, 8},
                         {"gpt2-tiny", 2, 2, 1, -1, 2},
                         {"mha-one-kv", 2, 2, 1, -1, 1, 2},
                         {"mixtral-tiny", 2, 4, 2},
                         {"deepseek-v3-tiny", 2, 4},
                         {"llama-gqa", 2, 4, 1, -1, 1, 1, Offload::layerwise},
                         {"phi3-tiny", 2, 4, 2}})
    for (const bool several : {false, true}) {
      CAPTURE(way.model, way.few, way.dp, way.tp, way.group, way.ulysses, way.cp, several);
      const Golden g = Golden::load(way.model);
      Scenario s = golden_scenario(g, way.dp * way.tp * way.ulysses * way.cp);
      s.train.engine = TrainEngine::fsdp2, s.train.reshard_ranks = way.few, s.train.offload = way.offload;
      TrainLayout& l = s.train.layout;
      l.dp = way.dp, l.tp = way.tp, l.fsdp = way.group, l.ulysses = way.ulysses, l.cp = way.cp;
      l.etp = g.model.moe ? way.tp : 1, l.sp = several && way.tp > 1;
      s.train.prefetch = several ? 1 : 0;
      s.train.recompute = several ? Recompute::full : Recompute::none;
      s.train.micro_batch_tokens = l.share_of(several ? g.longest_sequence() : g.num_tokens());
      check_training(g, train(g, s));
    }
}

TEST_CASE("FSDP1's flat parameters compute what transformers does, whatever modules have them") {
  // Ranks that hold the end of one parameter and the beginning of another, or nothing but padding; layers in several
  // units, several layers in one, all in one, parameters of layers in the root beside layers that are units.
  const WrapSpec layer, all_in_one{WrapPolicy::size, 1 << 30, ""}, by_size{WrapPolicy::size, 900, ""},
      tiny{WrapPolicy::size, 1, ""}, some{WrapPolicy::names, 1, "*.1-*embed*-lm_head"},
      inside{WrapPolicy::names, 1, "*attn*-*.mlp-*wte"};
  struct Way {
    const char* model;
    std::int64_t dp, group = -1, ulysses = 1, cp = 1;
  };
  std::size_t entry = 0;
  for (const Way& way : {Way{"llama-gqa", 3},
                         {"llama-tied", 4, 2},
                         {"qwen2-bias", 5},
                         {"qwen3-norm", 2, -1, 2},
                         {"gemma2-tiny", 2, -1, 1, 2},
                         {"gpt2-tiny", 8},
                         {"mixtral-tiny", 3},
                         {"gpt-oss-tiny", 3},
                         {"phi3-tiny", 3}})
    for (const WrapSpec& wrap : {layer, all_in_one, by_size, tiny, some, inside})
      for (const bool several : turns(entry / 6 + entry % 6)) {
        ++entry;
        CAPTURE(way.model, way.dp, way.group, static_cast<int>(wrap.policy), wrap.min_parameters, wrap.names, several);
        const Golden g = Golden::load(way.model);
        Scenario s = golden_scenario(g, way.dp * way.ulysses * way.cp);
        s.train.engine = TrainEngine::fsdp1, s.train.wrap = wrap;
        TrainLayout& l = s.train.layout;
        l.dp = way.dp, l.fsdp = way.group, l.ulysses = way.ulysses, l.cp = way.cp;
        s.train.reshard_after_forward = several, s.train.prefetch = several ? 1 : 0;
        s.train.recompute = several ? Recompute::full : Recompute::none;
        s.train.micro_batch_tokens = l.share_of(several ? g.longest_sequence() : g.num_tokens());
        check_training(g, train(g, s));
      }
}

TEST_CASE("Tensor and sequence parallelism compute what one rank does") {
  // Vocabularies that do not divide, tied tables, biases, also behind a sum over ranks, QK norms, norms of what goes
  // back into the stream, and KV heads that ranks share.
  struct Way {
    const char* model;
    std::int64_t tp, dp;
    TrainEngine engine = TrainEngine::fsdp2;
    std::int64_t group = -1;
    std::int64_t ep = 1;  // tp: whole experts on each rank
  };
  std::size_t entry = 0;
  for (const Way way : {Way{"llama-gqa", 2, 1},
                        {"llama-tied", 4, 1},
                        {"llama-tied", 2, 2, TrainEngine::zero1},
                        {"qwen2-bias", 2, 2},
                        {"qwen2-bias", 4, 1},
                        {"mha-one-kv", 4, 1},
                        {"mha-one-kv", 2, 2, TrainEngine::ddp},
                        {"qwen3-norm", 2, 2, TrainEngine::zero2},
                        {"qwen3-norm", 4, 1},
                        {"llama3-rope", 2, 2, TrainEngine::fsdp2, 1},
                        {"llama-yarn-bias", 2, 1},
                        {"llama-yarn-bias", 2, 2, TrainEngine::zero1},
                        {"llama-yarn-bias", 4, 1},
                        {"mistral-window", 2, 2},
                        {"gemma2-tiny", 2, 2},
                        {"gemma2-tiny", 4, 1, TrainEngine::ddp},
                        {"gemma3-tiny", 4, 2},
                        {"gpt2-tiny", 2, 1},
                        {"gpt2-tiny", 2, 2, TrainEngine::zero1},
                        {"gpt2-tiny", 4, 1},
                        {"mixtral-tiny", 2, 1},
                        {"mixtral-tiny", 4, 1, TrainEngine::ddp},
                        {"qwen3-moe-tiny", 2, 2},
                        {"qwen3-moe-tiny", 2, 2, TrainEngine::zero1},
                        {"mixtral-tiny", 2, 1, TrainEngine::fsdp2, -1, 2},
                        {"mixtral-tiny", 4, 1, TrainEngine::ddp, -1, 4},
                        {"mixtral-tiny", 2, 2, TrainEngine::zero1, 1, 2},
                        {"qwen3-moe-tiny", 2, 2, TrainEngine::fsdp2, -1, 2},
                        {"qwen3-moe-tiny", 4, 2, TrainEngine::zero2, -1, 4},
                        {"deepseek-v2-tiny", 2, 1},
                        {"deepseek-v2-tiny", 4, 2, TrainEngine::zero1},
                        {"deepseek-v2-tiny", 2, 2, TrainEngine::fsdp2, -1, 2},
                        {"deepseek-v3-tiny", 2, 2},
                        {"deepseek-v3-tiny", 4, 1, TrainEngine::ddp},
                        {"deepseek-v3-tiny", 4, 2, TrainEngine::zero2, -1, 4},
                        {"glm4-moe-tiny", 2, 2},
                        {"glm4-moe-tiny", 4, 1, TrainEngine::ddp},
                        {"glm4-moe-tiny", 4, 2, TrainEngine::zero2, -1, 4},
                        {"gpt-oss-tiny", 2, 2},
                        {"gpt-oss-tiny", 4, 1, TrainEngine::ddp},
                        {"gpt-oss-tiny", 2, 2, TrainEngine::zero1, 1, 2},
                        {"gpt-oss-tiny", 4, 2, TrainEngine::zero2, -1, 4},
                        {"phi3-tiny", 2, 2},
                        {"phi3-tiny", 4, 1, TrainEngine::ddp}})
    for (const bool sequence : turns(entry++)) {
      CAPTURE(way.model, way.tp, way.dp, way.ep, static_cast<int>(way.engine), sequence);
      const Golden g = Golden::load(way.model);
      Scenario s = golden_scenario(g, way.tp * way.dp);
      s.train.engine = way.engine;
      s.train.layout.tp = way.tp, s.train.layout.dp = way.dp, s.train.layout.fsdp = way.group;
      s.train.layout.sp = sequence;
      if (g.model.moe) s.train.layout.ep = way.ep, s.train.layout.etp = way.tp / way.ep;
      s.train.recompute = sequence ? Recompute::full : Recompute::selective;
      s.train.loss_chunk_tokens = sequence ? 9 : 0;
      s.train.micro_batch_tokens = round_up(g.longest_sequence(), way.tp);
      check_training(g, train(g, s));
    }
}

TEST_CASE("Pipelines compute what one rank does") {
  // Tables that the first and the last stage both have, uneven stages, and every engine beside them.
  struct Way {
    const char* model;
    std::vector<std::int64_t> split;
    std::int64_t tp, dp;
    TrainEngine engine = TrainEngine::fsdp2;
    const char* schedule = "1f1b";
    std::int64_t group = -1;
  };
  std::size_t entry = 0;
  for (const Way& way : {Way{"llama-gqa", {1, 1}, 1, 1},
                         {"llama-tied", {1, 1}, 1, 2},
                         {"llama-tied", {1, 1}, 2, 2, TrainEngine::zero1},
                         {"qwen2-bias", {2, 1}, 1, 2, TrainEngine::zero2, "gpipe"},
                         {"qwen2-bias", {1, 1, 1}, 2, 1},
                         {"mha-one-kv", {1, 2}, 4, 1, TrainEngine::ddp},
                         {"mha-one-kv", {1, 1, 1}, 1, 2, TrainEngine::ddp, "gpipe"},
                         {"qwen3-norm", {1, 1}, 2, 2, TrainEngine::zero2},
                         {"llama3-rope", {1, 1}, 1, 4, TrainEngine::fsdp2, "gpipe", 2},
                         {"llama-yarn-bias", {1, 1}, 2, 1},
                         {"mistral-window", {1, 1}, 1, 2},
                         {"gemma3-tiny", {1, 2}, 1, 2},
                         {"gemma2-tiny", {1, 1, 1}, 2, 1, TrainEngine::zero1},
                         {"gpt2-tiny", {2, 1}, 1, 2},
                         {"gpt2-tiny", {1, 2}, 2, 1},
                         {"deepseek-v2-tiny", {2, 1}, 2, 1},
                         {"deepseek-v3-tiny", {1, 1, 1}, 1, 2, TrainEngine::zero1},
                         {"glm4-moe-tiny", {1, 2}, 2, 1},
                         {"gpt-oss-tiny", {1, 1}, 2, 1, TrainEngine::zero1},
                         {"phi3-tiny", {1, 2}, 2, 1}})
    for (const bool several : turns(entry++)) {
      CAPTURE(way.model, way.split, way.tp, way.dp, static_cast<int>(way.engine), way.schedule, several);
      const Golden g = Golden::load(way.model);
      const auto stages = std::ssize(way.split);
      Scenario s = golden_scenario(g, stages * way.tp * way.dp);
      s.train.engine = way.engine, s.train.pipeline_schedule = way.schedule, s.train.pipeline_split = way.split;
      TrainLayout& l = s.train.layout;
      l.pp = stages, l.tp = way.tp, l.dp = way.dp, l.fsdp = way.group;
      l.sp = several && way.tp > 1;
      if (g.model.moe) l.etp = way.tp;
      s.train.recompute = several ? Recompute::full : Recompute::selective;
      s.train.loss_chunk_tokens = several ? 9 : 0;
      s.train.micro_batch_tokens = round_up(several ? g.longest_sequence() : g.num_tokens(), way.tp);
      check_training(g, train(g, s));
    }
}

namespace {

/// A golden's model with more layers, drawn anew, and what one rank makes of it: goldens are too shallow for stages of
/// several chunks.
struct DeepModel {
  Golden golden;
  TrainingResult by_one_rank;
};
const DeepModel& deep_model(const std::string& name, std::int64_t layers) {
  static std::map<std::pair<std::string, std::int64_t>, DeepModel> known;
  const auto found = known.find({name, layers});
  if (found != known.end()) return found->second;
  Golden g = Golden::load(name);
  g.model.layers = layers;
  g.model.weights_path.clear();
  g.model.init_range = 0.15;                                                       // of the goldens' own linear maps
  g.optimizer.lr = 8e-3 / static_cast<double>(std::max<std::int64_t>(layers, 4));  // deeper, rounding grows faster
  TrainingResult one = train(g, golden_scenario(g, 1));
  return known.emplace(std::pair(name, layers), DeepModel{std::move(g), std::move(one)}).first->second;
}

/// Both begin with the same weights, of 0.15 or so; five steps of AdamW change them by 5 lr = 0.01.
void check_weights(const TrainingResult& r, const TrainingResult& one) {
  for (const auto& [name, value] : one.after5) {
    CAPTURE(name);
    CHECK(update_error(r.after5.at(name), value, std::vector<float>(value.size(), 0.0f)) <= update_bound / 15);
  }
}

void check_same(const TrainingResult& r, const TrainingResult& one) {
  REQUIRE(r.losses.size() == one.losses.size());
  for (const auto& [name, value] : one.probes)
    if (name.starts_with("grad.")) {
      CAPTURE(name);
      CHECK(relative_error(r.probes.at(name), value) <= gradient_bound);
    }
  for (std::size_t i = 0; i < one.losses.size(); ++i) {
    CAPTURE(i);
    CHECK(r.losses[i] == Approx(one.losses[i]).epsilon(scalar_bound));
    CHECK(r.grad_norms[i] == Approx(one.grad_norms[i]).epsilon(scalar_bound));
  }
  CHECK(r.losses.front() != Approx(r.losses.back()).epsilon(0.01));
  check_weights(r, one);
}

}  // namespace

TEST_CASE("interleaved stages compute what one rank does") {
  // Chunks of as many layers and of others, tied tables, experts; beside every engine, tensor and sequence parallelism
  // and Ulysses; micro-batches that do not divide by the stages.
  struct Way {
    const char* model;
    std::vector<std::int64_t> split;  // of the chunks, in model order
    std::int64_t pp, tp, dp;
    TrainEngine engine = TrainEngine::fsdp2;
    const char* schedule = "interleaved";
    std::int64_t group = -1, ulysses = 1, ep = 1;
  };
  std::size_t entry = 0;
  for (const Way& way : {Way{"llama-gqa", {1, 1, 1, 1}, 2, 1, 1},
                         {"llama-gqa", {1, 1, 1, 1, 1, 1}, 2, 1, 1, TrainEngine::ddp},
                         {"llama-gqa", {1, 1, 1, 1, 1, 1}, 3, 1, 1, TrainEngine::zero1},
                         {"llama-tied", {2, 1, 1, 1}, 2, 1, 2},
                         {"llama-tied", {1, 1, 2, 1}, 2, 2, 2, TrainEngine::zero1, "1f1b"},
                         {"llama-gqa", {1, 1, 1, 1}, 2, 2, 1, TrainEngine::zero2, "gpipe"},
                         {"llama-gqa", {1, 1, 1, 1, 1, 1, 1, 1}, 4, 1, 1},
                         {"llama-gqa", {1, 1, 1, 1, 1, 1, 1, 1}, 8, 1, 1, TrainEngine::fsdp2, "1f1b"},
                         {"llama-gqa", {1, 1, 1, 1, 1, 1, 1, 1}, 8, 1, 1, TrainEngine::ddp, "zero-bubble"},
                         {"llama-gqa", {1, 1, 1, 1, 1, 1}, 3, 1, 1, TrainEngine::ddp, "zero-bubble"},
                         {"llama-tied", {2, 1, 1, 1}, 2, 1, 2, TrainEngine::fsdp2, "zero-bubble"},
                         {"llama-gqa", {1, 1, 1, 1}, 2, 2, 1, TrainEngine::zero1, "zero-bubble"},
                         {"mixtral-tiny", {1, 1, 1, 1}, 2, 1, 2, TrainEngine::zero2, "zero-bubble", -1, 1, 2},
                         {"llama-gqa", {1, 1, 1, 1}, 2, 1, 4, TrainEngine::fsdp2, "interleaved", 2},
                         {"llama-gqa", {1, 2, 1, 1}, 2, 1, 1, TrainEngine::fsdp2, "interleaved", -1, 2},
                         {"mixtral-tiny", {1, 1, 1, 1}, 2, 2, 1, TrainEngine::fsdp2, "interleaved", -1, 1, 2}})
    for (const bool several : turns(entry++)) {
      CAPTURE(way.model, way.split, way.pp, way.tp, way.dp, static_cast<int>(way.engine), way.schedule, several);
      const auto& [g, one] =
          deep_model(way.model, std::accumulate(way.split.begin(), way.split.end(), std::int64_t{0}));
      Scenario s = golden_scenario(g, way.pp * way.tp * way.dp * way.ulysses);
      s.train.engine = way.engine, s.train.pipeline_schedule = way.schedule, s.train.pipeline_split = way.split;
      TrainLayout& l = s.train.layout;
      l.pp = way.pp, l.vpp = std::ssize(way.split) / way.pp, l.tp = way.tp, l.dp = way.dp, l.fsdp = way.group;
      l.ulysses = way.ulysses, l.ep = way.ep, l.etp = g.model.moe ? std::max<std::int64_t>(1, way.tp / way.ep) : 1;
      l.sp = several && way.tp > 1;
      s.train.recompute = several ? Recompute::full : Recompute::selective;
      s.train.loss_chunk_tokens = several ? 9 : 0;
      s.train.micro_batch_tokens =
          round_up(ceil_div(several ? g.longest_sequence() : g.num_tokens(), way.ulysses), way.tp);
      check_same(train(g, s), one);
    }
}

TEST_CASE("dozens of drawn pipelines of eight ranks come to their end and compute what one rank does") {
  // Of 2, 4 and 8 stages, most of them in 1F1B, beside ranks that share the stages; of few micro-batches and many.
  const std::uint64_t rounds = number_of_environment("HOTBUNK_LAYOUT_ROUNDS", 36),
                      seed = number_of_environment("HOTBUNK_LAYOUT_SEED", 1);
  std::uint64_t one_forward_one_backward = 0, of_eight_stages = 0;
  for (std::uint64_t i = 0; i < rounds; ++i) {
    std::mt19937_64 random(seed * 11'000'027 + i);
    const auto one_of = [&](std::initializer_list<std::int64_t> values) {
      return *(values.begin() + static_cast<std::ptrdiff_t>(random() % values.size()));
    };
    const auto& [g, one] = deep_model("llama-gqa", 8);
    Scenario s = golden_scenario(g, 8);
    TrainLayout& l = s.train.layout;
    l.pp = one_of({8, 8, 4, 4, 2}), l.tp = l.pp < 8 ? one_of({1, 2}) : 1, l.dp = 8 / l.pp / l.tp;
    l.sp = l.tp > 1 && one_of({0, 1}) == 1;
    if (i % 3 == 0) {  // the others
      s.train.pipeline_schedule = std::array{"gpipe", "interleaved", "zero-bubble"}[i / 3 % 3];
      if (l.pp < 8) l.vpp = s.train.pipeline_schedule == "interleaved" ? 8 / l.pp : one_of({1, 8 / l.pp});
      else if (s.train.pipeline_schedule == "interleaved") s.train.pipeline_schedule = "1f1b";
    }
    s.train.pipeline_split.assign(static_cast<std::size_t>(l.pp * l.vpp), 1);
    for (std::int64_t rest = 8 - l.pp * l.vpp; rest > 0; --rest)
      ++s.train.pipeline_split[random() % s.train.pipeline_split.size()];
    s.train.engine = std::array{TrainEngine::ddp, TrainEngine::zero1, TrainEngine::zero2, TrainEngine::fsdp1,
                                TrainEngine::fsdp2}[random() % 5];
    s.train.recompute = static_cast<Recompute>(one_of({0, 1, 2}));
    s.train.micro_batch_tokens =
        l.share_of(std::max(g.longest_sequence(), one_of({1, g.num_tokens() / 2, g.num_tokens()})));
    CAPTURE(i, text_of(s));
    one_forward_one_backward += s.train.pipeline_schedule == "1f1b" ? 1 : 0, of_eight_stages += l.pp == 8 ? 1 : 0;
    const TrainingResult r = train(g, s, Against::reference_and_plan);
    check_same(r, one);
    CHECK(r.unlike_plan == "");
  }
  CHECK(2 * one_forward_one_backward > rounds);
  CHECK(4 * of_eight_stages > rounds);
}

TEST_CASE("zero-bubble schedules compute what transformers does") {
  struct Way {
    const char* model;
    std::vector<std::int64_t> split;
    std::int64_t tp, dp;
    TrainEngine engine = TrainEngine::ddp;
    std::int64_t ulysses = 1, ep = 1, group = -1;
  };
  std::size_t entry = 0;
  for (const Way& way : {Way{"llama-gqa", {1, 1}, 1, 1},
                         // Whole gradients that are reduced when those of matrices are there.
                         {"llama-gqa", {1, 1}, 1, 2, TrainEngine::fsdp2},
                         {"llama-tied", {1, 1}, 1, 2, TrainEngine::fsdp1},
                         {"qwen2-bias", {1, 1, 1}, 1, 2, TrainEngine::zero2},
                         {"qwen3-norm", {1, 1}, 2, 2, TrainEngine::fsdp2},
                         {"llama-tied", {1, 1}, 1, 4, TrainEngine::fsdp2, 1, 1, 2},
                         {"gpt2-tiny", {2, 1}, 2, 2, TrainEngine::fsdp2},
                         {"mha-one-kv", {2, 1}, 1, 1, TrainEngine::fsdp2, 2},
                         {"mixtral-tiny", {1, 1}, 1, 2, TrainEngine::fsdp2, 1, 2},
                         {"deepseek-v3-tiny", {1, 2}, 1, 2, TrainEngine::fsdp2},
                         {"llama-tied", {1, 1}, 2, 2},
                         {"qwen2-bias", {1, 1, 1}, 1, 2, TrainEngine::zero1},
                         {"mha-one-kv", {2, 1}, 2, 1, TrainEngine::zero1},
                         {"qwen3-norm", {1, 1}, 2, 1, TrainEngine::ddp, 2},
                         {"mixtral-tiny", {1, 1}, 2, 1, TrainEngine::zero1, 1, 2},
                         {"deepseek-v3-tiny", {1, 2}, 2, 1, TrainEngine::zero1},
                         {"gpt-oss-tiny", {1, 1}, 2, 1},
                         {"phi3-tiny", {2, 1}, 1, 2}})
    for (const Recompute recompute : {Recompute::none, Recompute::selective, Recompute::full})
      for (const bool several : turns(entry++)) {
        if (static_cast<std::size_t>(recompute) == entry / 3 % 3 && turns(0).size() == 1) continue;
        CAPTURE(way.model, way.split, way.tp, way.dp, static_cast<int>(way.engine), static_cast<int>(recompute),
                several);
        const Golden g = Golden::load(way.model);
        const auto stages = std::ssize(way.split);
        Scenario s = golden_scenario(g, stages * way.tp * way.dp * way.ulysses);
        s.train.engine = way.engine, s.train.pipeline_schedule = "zero-bubble", s.train.pipeline_split = way.split;
        TrainLayout& l = s.train.layout;
        l.pp = stages, l.tp = way.tp, l.dp = way.dp, l.ulysses = way.ulysses, l.fsdp = way.group;
        l.ep = way.ep, l.etp = g.model.moe ? std::max<std::int64_t>(1, way.tp / way.ep) : 1;
        l.sp = several && way.tp > 1;
        s.train.recompute = recompute;
        s.train.micro_batch_tokens =
            round_up(ceil_div(several ? g.longest_sequence() : g.num_tokens(), way.ulysses), way.tp);
        check_training(g, train(g, s));
      }
}

TEST_CASE("Ulysses computes what one rank does") {
  // Fewer KV heads than ranks, head norms, biases, tied tables; beside every engine, tensor and sequence parallelism
  // and pipelines; tokens that do not divide.
  struct Way {
    const char* model;
    std::int64_t ulysses, tp, dp, pp = 1;
    TrainEngine engine = TrainEngine::fsdp2;
    std::int64_t group = -1;
    const char* order = "tp-cp-ep-dp-pp";
  };
  std::size_t entry = 0;
  for (const Way& way : {Way{"llama-gqa", 2, 1, 1},
                         {"llama-gqa", 4, 1, 1},
                         {"llama-tied", 8, 1, 1},
                         {"llama-tied", 2, 2, 2, 1, TrainEngine::zero1},
                         {"qwen2-bias", 4, 2, 1},
                         {"qwen2-bias", 2, 1, 3, 1, TrainEngine::zero2},
                         {"mha-one-kv", 4, 1, 1, 1, TrainEngine::ddp},
                         {"mha-one-kv", 2, 2, 1, 2, TrainEngine::fsdp2, -1, "pp-cp-tp-ep-dp"},
                         {"qwen3-norm", 2, 2, 2},
                         {"qwen3-norm", 2, 1, 2, 2, TrainEngine::fsdp2, 2},
                         {"llama3-rope", 2, 1, 2, 1, TrainEngine::fsdp2, 2, "tp-dp-cp-ep-pp"},
                         {"llama3-rope", 6, 1, 1},
                         {"llama-yarn-bias", 2, 2, 1},
                         {"mistral-window", 4, 1, 1},
                         {"gemma2-tiny", 2, 1, 2},
                         {"gemma2-tiny", 2, 2, 1, 2},
                         {"gpt2-tiny", 4, 1, 1},
                         {"deepseek-v2-tiny", 2, 1, 2},
                         {"deepseek-v3-tiny", 4, 1, 1},
                         {"deepseek-v3-tiny", 2, 2, 1, 1, TrainEngine::zero1},
                         {"gpt2-tiny", 2, 2, 1},
                         {"glm4-moe-tiny", 2, 1, 2},
                         {"gpt-oss-tiny", 4, 1, 1},
                         {"gpt-oss-tiny", 2, 2, 1},
                         {"gemma3-tiny", 2, 1, 2},
                         {"phi3-tiny", 4, 1, 1},
                         {"phi3-tiny", 2, 2, 1}})
    for (const bool several : turns(entry++)) {
      CAPTURE(way.model, way.ulysses, way.tp, way.dp, way.pp, static_cast<int>(way.engine), way.order, several);
      const Golden g = Golden::load(way.model);
      Scenario s = golden_scenario(g, way.ulysses * way.tp * way.dp * way.pp);
      s.train.engine = way.engine;
      TrainLayout& l = s.train.layout;
      l.ulysses = way.ulysses, l.tp = way.tp, l.dp = way.dp, l.pp = way.pp, l.fsdp = way.group, l.order = way.order;
      l.sp = several && way.tp > 1;
      if (g.model.moe) l.etp = way.tp;
      if (l.pp > 1) s.train.pipeline_split = {1, g.model.layers - 1};
      s.train.recompute = several ? Recompute::full : Recompute::selective;
      s.train.loss_chunk_tokens = several ? 5 : 0;
      s.train.micro_batch_tokens =
          round_up(ceil_div(several ? g.longest_sequence() : g.num_tokens(), way.ulysses), way.tp);
      check_training(g, train(g, s));
    }
}

TEST_CASE("context parallelism computes what one rank does") {
  // Ranks that share sequences of any length, fewer tokens than chunks included; every family's attention: windows,
  // caps, biases, learned positions, experts; beside every engine, tensor and sequence parallelism, pipelines and
  // Ulysses.
  struct Way {
    const char* model;
    std::int64_t cp, tp, dp, pp = 1;
    TrainEngine engine = TrainEngine::fsdp2;
    std::int64_t ulysses = 1, group = -1;
    const char* order = "tp-cp-ep-dp-pp";
  };
  std::size_t entry = 0;
  for (const Way& way : {Way{"llama-gqa", 2, 1, 1},
                         {"llama-gqa", 4, 1, 1},
                         {"llama-tied", 8, 1, 1},
                         {"llama-tied", 2, 2, 2, 1, TrainEngine::zero1},
                         {"qwen2-bias", 3, 2, 1},
                         {"qwen2-bias", 2, 1, 3, 1, TrainEngine::zero2},
                         {"mha-one-kv", 4, 1, 1, 1, TrainEngine::ddp},
                         {"mha-one-kv", 2, 2, 1, 2, TrainEngine::fsdp2, 1, -1, "pp-cp-tp-ep-dp"},
                         {"qwen3-norm", 2, 2, 2},
                         {"qwen3-norm", 2, 1, 2, 2, TrainEngine::fsdp2, 1, 2},
                         {"llama3-rope", 2, 1, 2, 1, TrainEngine::fsdp2, 1, 2, "tp-dp-cp-ep-pp"},
                         {"llama-gqa", 2, 1, 1, 1, TrainEngine::fsdp2, 2},
                         {"llama-gqa", 2, 2, 1, 1, TrainEngine::zero1, 2, -1, "tp-ulysses-cp-ep-dp-pp"},
                         {"qwen3-norm", 3, 1, 1, 1, TrainEngine::ddp, 2},
                         {"llama-yarn-bias", 3, 1, 1},
                         {"mistral-window", 4, 1, 1},
                         {"mistral-window", 2, 1, 2},
                         {"gemma2-tiny", 2, 2, 1},
                         {"gemma2-tiny", 2, 1, 1, 2},
                         {"gpt2-tiny", 4, 1, 1},
                         {"gpt2-tiny", 2, 2, 1},
                         {"mixtral-tiny", 2, 2, 1},
                         {"deepseek-v2-tiny", 2, 2, 1},
                         {"deepseek-v3-tiny", 3, 1, 1, 2},
                         {"deepseek-v3-tiny", 2, 1, 1, 1, TrainEngine::zero2, 2},
                         {"qwen3-moe-tiny", 3, 1, 2},
                         {"glm4-moe-tiny", 2, 2, 1},
                         {"gpt-oss-tiny", 4, 1, 1},
                         {"gpt-oss-tiny", 2, 2, 2},
                         {"gemma3-tiny", 2, 2, 1},
                         {"phi3-tiny", 4, 1, 1},
                         {"phi3-tiny", 2, 2, 1}})
    for (const bool gathers : turns(entry / 2))
      for (const bool several : turns(entry++)) {
        const ContextExchange exchange = gathers ? ContextExchange::all_gather : ContextExchange::ring;
        CAPTURE(way.model, way.cp, way.tp, way.dp, way.pp, way.ulysses, static_cast<int>(way.engine), way.order,
                name_of(exchange), several);
        const Golden g = Golden::load(way.model);
        Scenario s = golden_scenario(g, way.cp * way.ulysses * way.tp * way.dp * way.pp);
        s.train.engine = way.engine, s.train.context_exchange = exchange;
        TrainLayout& l = s.train.layout;
        l.cp = way.cp, l.ulysses = way.ulysses, l.tp = way.tp, l.dp = way.dp, l.pp = way.pp, l.fsdp = way.group;
        l.order = way.order;
        l.sp = several && way.tp > 1;
        if (g.model.moe) l.etp = way.tp;
        if (l.pp > 1) s.train.pipeline_split = {1, g.model.layers - 1};
        s.train.recompute = several ? Recompute::full : Recompute::selective;
        s.train.loss_chunk_tokens = several ? 5 : 0;
        s.train.micro_batch_tokens = l.share_of(several ? g.longest_sequence() : 2 * g.num_tokens());
        check_training(g, train(g, s));
      }
}

TEST_CASE("experts over data ranks compute what transformers does") {
  // More choices than a rank has experts, all ranks its group or several groups, copies of what is sharded; beside
  // every engine, tensor and sequence parallelism, Ulysses and pipelines.
  struct Way {
    const char* model;
    std::int64_t ep, dp, tp = 1, ulysses = 1, pp = 1;
    TrainEngine engine = TrainEngine::fsdp2;
    std::int64_t group = -1;
    const char* order = "tp-cp-ep-dp-pp";
    bool whole = false;  // and over the tensor-parallel ranks
  };
  std::size_t entry = 0;
  int runs = 0, copied = 0, staged = 0;
  std::set<Recompute> recomputed;  // where copies travel
  for (const Way& way : {Way{"mixtral-tiny", 2, 2},
                         {"mixtral-tiny", 4, 4},
                         {"mixtral-tiny", 2, 4},
                         {"qwen3-moe-tiny", 2, 4, 1, 1, 1, TrainEngine::fsdp2, 2},
                         {"qwen3-moe-tiny", 2, 4, 1, 1, 1, TrainEngine::fsdp2, 1},
                         {"qwen3-moe-tiny", 2, 2, 1, 1, 1, TrainEngine::ddp},
                         {"mixtral-tiny", 2, 4, 1, 1, 1, TrainEngine::ddp},
                         {"mixtral-tiny", 2, 2, 1, 1, 1, TrainEngine::zero1},
                         {"mixtral-tiny", 2, 4, 1, 1, 1, TrainEngine::zero1, 2},
                         {"qwen3-moe-tiny", 4, 4, 1, 1, 1, TrainEngine::zero2},
                         {"mixtral-tiny", 2, 2, 2},
                         {"mixtral-tiny", 2, 4, 2},
                         {"mixtral-tiny", 2, 2, 2, 1, 1, TrainEngine::ddp},
                         {"qwen3-moe-tiny", 2, 2, 2, 1, 1, TrainEngine::zero1},
                         {"mixtral-tiny", 2, 1, 1, 2},
                         {"qwen3-moe-tiny", 4, 2, 1, 2},
                         {"mixtral-tiny", 2, 2, 1, 1, 2},
                         {"mixtral-tiny", 2, 2, 2, 1, 2, TrainEngine::fsdp2, -1, "pp-tp-cp-ep-dp"},
                         {"qwen3-moe-tiny", 2, 2, 1, 1, 2, TrainEngine::zero1},
                         {"mixtral-tiny", 2, 4, 1, 1, 1, TrainEngine::fsdp1},
                         {"qwen3-moe-tiny", 4, 4, 1, 1, 1, TrainEngine::fsdp1},
                         {"mixtral-tiny", 2, 4, 1, 1, 1, TrainEngine::fsdp1, 2},
                         {"gpt-oss-tiny", 2, 2, 2, 1, 2, TrainEngine::fsdp1},
                         {"deepseek-v2-tiny", 3, 3},
                         {"deepseek-v2-tiny", 2, 2, 2},
                         {"deepseek-v3-tiny", 4, 4, 1, 1, 1, TrainEngine::ddp},
                         {"deepseek-v3-tiny", 2, 4, 1, 1, 1, TrainEngine::zero1, 2},
                         {"deepseek-v3-tiny", 2, 2, 2, 1, 2},
                         {"glm4-moe-tiny", 4, 2, 1, 2},
                         {"gpt-oss-tiny", 2, 2, 2},
                         {"gpt-oss-tiny", 2, 4, 2, 1, 1, TrainEngine::ddp},
                         {"gpt-oss-tiny", 4, 4, 1, 1, 1, TrainEngine::zero1},
                         {"gpt-oss-tiny", 4, 2, 2, 1, 1, TrainEngine::fsdp2, -1, "tp-cp-ep-dp-pp", true},
                         {"mixtral-tiny", 4, 2, 2, 1, 1, TrainEngine::fsdp2, -1, "tp-cp-ep-dp-pp", true},
                         {"qwen3-moe-tiny", 4, 4, 2, 1, 1, TrainEngine::zero1, 2, "tp-cp-ep-dp-pp", true},
                         {"deepseek-v3-tiny", 4, 2, 2, 1, 2, TrainEngine::ddp, -1, "pp-tp-cp-ep-dp", true}})
    for (const Recompute recompute : {Recompute::none, Recompute::selective, Recompute::full}) {
      const std::size_t number = entry++ / 3;  // of the way
      const bool left_out = static_cast<std::size_t>(recompute) == number % 3;
      if (left_out && turns(0).size() == 1) continue;
      const bool several = recompute != Recompute::selective;
      // Every other time with room for less than a third of an even share: in four rounds at least; of one way the
      // first time, of the next one the second, so that either meets all that is recomputed.
      const bool in_rounds = (static_cast<std::size_t>(++runs) + number) % 2 == 0;
      CAPTURE(way.model, way.ep, way.dp, way.tp, way.ulysses, way.pp, static_cast<int>(way.engine), way.group,
              static_cast<int>(recompute), in_rounds);
      const Golden g = Golden::load(way.model);
      Scenario s = golden_scenario(g, way.ulysses * way.tp * way.dp * way.pp);
      s.train.engine = way.engine;
      TrainLayout& l = s.train.layout;
      l.ep = way.ep, l.etp = way.whole ? 1 : way.tp;
      l.ulysses = way.ulysses, l.tp = way.tp, l.dp = way.dp, l.pp = way.pp, l.fsdp = way.group, l.order = way.order;
      l.sp = (several || way.whole) && way.tp > 1;
      if (l.pp > 1) s.train.pipeline_split = {1, g.model.layers - 1};
      s.train.recompute = recompute;
      s.train.micro_batch_tokens =
          round_up(ceil_div(several ? g.longest_sequence() : g.num_tokens(), way.ulysses), way.tp);
      s.train.expert_capacity = in_rounds ? 0.3 : 0.0;
      // Of the others two ways of four send a token once to each rank.
      if (!in_rounds && !way.whole && number % 4 < 2) {
        s.train.expert_dispatch = ExpertDispatch::per_rank;
        ++copied, recomputed.insert(recompute), staged += several && way.pp > 1 ? 1 : 0;
      }
      CHECK((expert_rounds(s).rounds > 3) == in_rounds);
      check_training(g, train(g, s));
    }
  CHECK(5 * copied > runs);
  CHECK(recomputed.size() == 3);
  CHECK(staged > 0);
}

TEST_CASE("whether rows or copies of tokens travel to experts, the bits are the same where sums are of two") {
  // What comes back comes row by row, and is summed in the order of a token's choices: losses of the first step are
  // the same. Gradients of a token's rows on one rank are summed there: of two choices those bits are the same too.
  for (const char* model : {"mixtral-tiny", "qwen3-moe-tiny"}) {
    CAPTURE(model);
    const Golden g = Golden::load(model);
    Scenario s = golden_scenario(g, 4);
    s.train.layout.dp = s.train.layout.ep = 4;
    std::vector<TrainingResult> found;
    for (const ExpertDispatch dispatch : {ExpertDispatch::per_expert, ExpertDispatch::per_rank}) {
      s.train.expert_dispatch = dispatch;
      found.push_back(train(g, s));
    }
    CHECK(found[0].losses.front() == found[1].losses.front());
    if (g.model.moe->experts_per_token == 2) CHECK(found[0].losses == found[1].losses);
  }
}

// P3 over layouts. HOTBUNK_LAYOUT_ROUNDS draws more of them, HOTBUNK_LAYOUT_SEED others.
TEST_CASE("layouts drawn at random compute what transformers does") {
  std::uint64_t rounds = 0, cut = 0, staged = 0, shared = 0, chunked = 0, spread = 0, copied = 0, flat = 0,
                in_blocks = 0, apart = 0, flat_parts = 0, parted = 0;
  std::vector<std::string> goldens = golden_models();
  std::ranges::copy(golden_router_losses(), std::back_inserter(goldens));
  for_drawn_layouts(goldens, 60, 1'000'003, [&](const Golden& g, const Scenario& s) {
    const TrainLayout& l = s.train.layout;
    ++rounds, cut += l.tp > 1 ? 1 : 0, staged += l.pp > 1 ? 1 : 0;
    shared += l.ulysses > 1 ? 1 : 0, chunked += l.cp > 1 ? 1 : 0;
    flat += s.train.engine == TrainEngine::fsdp1 ? 1 : 0;
    flat_parts += s.train.engine == TrainEngine::fsdp1 && l.tp * l.pp > 1 && l.shard_ranks() > 1 ? 1 : 0;
    spread += expert_mesh(s).spread > 1 ? 1 : 0, in_blocks += expert_mesh(s).blocks > 1 ? 1 : 0;
    copied += s.train.expert_dispatch == ExpertDispatch::per_rank ? 1 : 0;
    apart += s.train.engine != TrainEngine::ddp && l.shard_ranks() > 1 && !shard_groups_follow(l) ? 1 : 0;
    // Ranks with other experts, or parts of one, between which others stand.
    parted += expert_mesh(s).lies_apart() && (l.order != TrainLayout().order || !shard_groups_follow(l)) ? 1 : 0;
    const TrainingResult r = train(g, s, Against::reference_and_plan);
    check_training(g, r);
    CHECK(r.unlike_plan == "");
  });
  CHECK(2 * cut > rounds / 2);
  CHECK(3 * staged > rounds / 2);
  CHECK(4 * shared > rounds / 2);
  CHECK(4 * chunked > rounds / 2);
  CHECK(40 * spread > rounds / 2);
  CHECK(40 * in_blocks > rounds / 2);
  CHECK(40 * copied > rounds / 2);
  CHECK(20 * flat > rounds / 2);
  CHECK(40 * apart > rounds / 2);
  CHECK(40 * flat_parts > rounds / 2);
  CHECK(40 * parted > rounds / 2);
}

TEST_CASE("and those with interleaved stages what one rank does") {
  const std::uint64_t rounds = number_of_environment("HOTBUNK_LAYOUT_ROUNDS", 24),
                      seed = number_of_environment("HOTBUNK_LAYOUT_SEED", 1);
  const std::array models = {"llama-gqa", "llama-tied", "mha-one-kv", "mixtral-tiny"};
  std::uint64_t drawn = 0;
  for (std::uint64_t i = 0; drawn < rounds; ++i) {
    std::mt19937_64 random(seed * 3'000'017 + i);
    const auto& [g, one] = deep_model(models[random() % models.size()], 4 + static_cast<std::int64_t>(random() % 4));
    const std::optional<Scenario> s = draw_layout(g, random);
    if (!s || s->train.layout.vpp == 1) continue;
    ++drawn;
    CAPTURE(i, text_of(*s));
    const TrainingResult r = train(g, *s, Against::reference_and_plan);
    check_same(r, one);
    CHECK(r.unlike_plan == "");
  }
}

// Shards, moments and steps go from any layout to any other: other worlds, stages, engines, orders of ranks.
TEST_CASE("a checkpoint of one layout goes on in another as if nothing had been") {
  const std::uint64_t rounds = number_of_environment("HOTBUNK_RESUME_ROUNDS", 12),
                      seed = number_of_environment("HOTBUNK_LAYOUT_SEED", 1);
  const std::vector<std::string>& models = golden_models();
  std::uint64_t drawn = 0;
  for (std::uint64_t i = 0; drawn < rounds; ++i) {
    std::mt19937_64 random(seed * 7'000'003 + i);
    const Golden g = Golden::load(models[random() % models.size()]);
    const std::optional<Scenario> first = draw_layout(g, random), then = draw_layout(g, random);
    if (!first || !then) continue;
    ++drawn;
    const std::int64_t steps = 1 + static_cast<std::int64_t>(random() % 4);
    CAPTURE(i, steps, text_of(*first), text_of(*then));
    const TrainingResult r = train_on(g, *first, *then, steps);
    REQUIRE(r.losses.size() + static_cast<std::size_t>(steps) == g.losses.size() + 1);
    for (std::size_t step = static_cast<std::size_t>(steps); step < g.losses.size(); ++step) {
      const std::size_t at = step - static_cast<std::size_t>(steps);
      CHECK(r.losses[at] == Approx(g.losses[step]).epsilon(scalar_bound));
      CHECK(r.grad_norms[at] == Approx(g.grad_norms[step]).epsilon(scalar_bound));
    }
    CHECK(r.losses.back() == Approx(g.final_loss).epsilon(scalar_bound));
    check_after(g, r);
  }
}

TEST_CASE("five steps in one layout and five in another are ten in the first, in the same one to the bit") {
  struct Way {
    const char* model;
    TrainEngine first_engine;
    TrainLayout first;
    TrainEngine then_engine;
    TrainLayout then;
  };
  const auto fsdp2 = TrainEngine::fsdp2;
  for (const Way& way : {Way{"qwen2-bias", fsdp2, {.dp = 2}, fsdp2, {.dp = 2}},
                         {"llama-gqa", TrainEngine::zero1, {.dp = 1, .tp = 2, .pp = 2}, fsdp2, {.dp = 1, .cp = 2}},
                         {"mixtral-tiny", TrainEngine::ddp, {.dp = 2, .ep = 2}, fsdp2, {.dp = 1, .tp = 2, .etp = 2}}}) {
    CAPTURE(way.model);
    const Golden g = Golden::load(way.model);
    const auto scenario = [&](TrainEngine engine, const TrainLayout& layout) {
      Scenario s = golden_scenario(g, layout.ranks());
      s.train.engine = engine, s.train.layout = layout, s.steps = 10;
      s.train.micro_batch_tokens = layout.share_of(g.longest_sequence());
      return s;
    };
    const Scenario first = scenario(way.first_engine, way.first), then = scenario(way.then_engine, way.then);
    const TrainingResult whole = train(g, first), parts = train_on(g, first, then, 5);
    REQUIRE((whole.losses.size() == 10 && parts.losses.size() == 5));
    const bool same = way.first_engine == way.then_engine && way.first == way.then;
    for (std::size_t i = 0; i < 5; ++i) {
      CHECK(parts.losses[i] == Approx(whole.losses[5 + i]).epsilon(same ? 0.0 : scalar_bound).margin(0.0));
      CHECK(parts.grad_norms[i] == Approx(whole.grad_norms[5 + i]).epsilon(same ? 0.0 : scalar_bound).margin(0.0));
    }
    for (const auto& [name, value] : whole.at_end) {
      CAPTURE(name);
      if (same) CHECK(parts.at_end.at(name) == value);
      else CHECK(update_error(parts.at_end.at(name), value, g.initial(name)) <= update_bound);
    }
  }
}

TEST_CASE("of drawn layouts, too: ten steps are five and five in another one, and bit for bit in the same") {
  // HOTBUNK_RESUME_ROUNDS draws more.
  std::uint64_t rounds = 0, other_worlds = 0;
  for_drawn_pairs(golden_models(), number_of_environment("HOTBUNK_RESUME_ROUNDS", 12), 13'000'027,
                  [&](const Golden& g, const Scenario& drawn, const Scenario& other) {
                    Scenario first = drawn, then = other;
                    first.steps = then.steps = 10;
                    ++rounds, other_worlds += first.train.layout.ranks() != then.train.layout.ranks() ? 1 : 0;
                    const TrainingResult whole = train(g, first), same = train_on(g, first, first, 5),
                                         parts = train_on(g, first, then, 5);
                    REQUIRE((whole.losses.size() == 10 && same.losses.size() == 5 && parts.losses.size() == 5));
                    for (std::size_t i = 0; i < 5; ++i) {
                      CAPTURE(i);
                      CHECK(same.losses[i] == whole.losses[5 + i]);
                      CHECK(same.grad_norms[i] == whole.grad_norms[5 + i]);
                      CHECK(parts.losses[i] == Approx(whole.losses[5 + i]).epsilon(scalar_bound));
                      CHECK(parts.grad_norms[i] == Approx(whole.grad_norms[5 + i]).epsilon(scalar_bound));
                    }
                    CHECK(same.at_end == whole.at_end);
                    for (const auto& [name, value] : whole.at_end) {
                      CAPTURE(name);
                      if (name.ends_with("e_score_correction_bias")) CHECK(parts.at_end.at(name) == value);
                      else CHECK(update_error(parts.at_end.at(name), value, g.initial(name)) <= update_bound);
                    }
                  });
  CHECK(2 * other_worlds > rounds);
}

TEST_CASE("and so between FSDP1's flat units and other engines") {
  struct Way {
    const char* model;
    TrainEngine first, then;
    std::int64_t ranks_first, ranks_then;
  };
  for (const Way& way : {Way{"qwen2-bias", TrainEngine::fsdp1, TrainEngine::fsdp2, 3, 2},
                         {"llama-tied", TrainEngine::fsdp2, TrainEngine::fsdp1, 2, 5},
                         {"gpt2-tiny", TrainEngine::fsdp1, TrainEngine::ddp, 4, 2},
                         {"mixtral-tiny", TrainEngine::fsdp1, TrainEngine::fsdp1, 2, 3}}) {
    CAPTURE(way.model, static_cast<int>(way.first), static_cast<int>(way.then));
    const Golden g = Golden::load(way.model);
    Scenario first = golden_scenario(g, way.ranks_first), then = golden_scenario(g, way.ranks_then);
    first.train.engine = way.first, then.train.engine = way.then;
    if (way.first == TrainEngine::fsdp1) first.train.wrap = {WrapPolicy::size, 700, ""};
    if (way.then == TrainEngine::fsdp1) then.train.wrap = {WrapPolicy::size, 2000, ""};
    const TrainingResult r = train_on(g, first, then, 2);
    REQUIRE(r.losses.size() == g.losses.size() - 1);
    for (std::size_t step = 2; step < g.losses.size(); ++step) {
      CHECK(r.losses[step - 2] == Approx(g.losses[step]).epsilon(scalar_bound));
      CHECK(r.grad_norms[step - 2] == Approx(g.grad_norms[step]).epsilon(scalar_bound));
    }
    CHECK(r.losses.back() == Approx(g.final_loss).epsilon(scalar_bound));
    for (const auto& [name, value] : r.after5) {
      CAPTURE(name);
      CHECK(update_error(value, g.tensor("after5." + name), g.initial(name)) <= update_bound);
    }
  }
}

TEST_CASE("and so between layouts with interleaved stages and others") {
  const std::uint64_t rounds = number_of_environment("HOTBUNK_RESUME_ROUNDS", 6),
                      seed = number_of_environment("HOTBUNK_LAYOUT_SEED", 1);
  std::uint64_t drawn = 0, interleaved = 0;
  for (std::uint64_t i = 0; drawn < rounds; ++i) {
    std::mt19937_64 random(seed * 5'000'011 + i);
    const auto& [g, one] = deep_model(random() % 2 == 0 ? "llama-gqa" : "llama-tied", 6);
    const std::optional<Scenario> first = draw_layout(g, random), then = draw_layout(g, random);
    if (!first || !then || first->train.layout.vpp + then->train.layout.vpp == 2) continue;
    ++drawn, interleaved += first->train.layout.vpp > 1 ? 1 : 0;
    const std::int64_t steps = 1 + static_cast<std::int64_t>(random() % 4);
    CAPTURE(i, steps, text_of(*first), text_of(*then));
    const TrainingResult r = train_on(g, *first, *then, steps);
    REQUIRE(r.losses.size() + static_cast<std::size_t>(steps) == one.losses.size());
    for (std::size_t at = 0; at < r.losses.size(); ++at)
      CHECK(r.losses[at] == Approx(one.losses[at + static_cast<std::size_t>(steps)]).epsilon(scalar_bound));
    check_weights(r, one);
  }
  CHECK(interleaved > 0);
}

TEST_CASE("FSDP with everything else on computes what one rank does") {
  const Golden g = Golden::load("qwen3-norm");
  Scenario s = golden_scenario(g, 2);
  s.train.micro_batch_tokens = g.longest_sequence();
  s.train.loss_chunk_tokens = 5;
  for (const Recompute recompute : {Recompute::selective, Recompute::full})
    for (const std::int64_t prefetch : {0, 1}) {
      CAPTURE(static_cast<int>(recompute), prefetch);
      s.train.recompute = recompute;
      s.train.prefetch = prefetch;
      check_training(g, train(g, s));
    }
}

TEST_CASE("bf16 compute stays as near to exact arithmetic as transformers' bf16 does") {
  for (const char* name : {"llama-gqa", "qwen2-bias"}) {
    CAPTURE(name);
    const Golden g = Golden::load(name);
    Scenario s = golden_scenario(g, 1);
    s.train.precision.params = DType::bf16;
    const TrainingResult one = train(g, s);
    CHECK(relative_error(one.probes.at("logits"), g.tensor("logits_f64")) <= g.bf16_floor);
    // Masters are fp32: it learns, at the pace of fp32 to the 3 digits that bf16 has.
    CHECK(one.losses.back() == Approx(g.final_loss).epsilon(0.02));
    // Rows of a batch do not see each other, and gradients are summed in fp32: ranks do not add to bf16's error.
    s.train.layout.dp = s.cluster.gpus_per_node = 2;
    const TrainingResult two = train(g, s);
    CHECK(two.losses.at(0) == Approx(one.losses.at(0)).epsilon(1e-6));
    CHECK(two.losses.back() == Approx(one.losses.back()).epsilon(0.01));
    // Nor does what they merge of one another's keys: it is rounded once, behind all.
    s.train.layout.dp = 1, s.train.layout.cp = s.cluster.gpus_per_node = 3;
    for (const ContextExchange exchange : {ContextExchange::ring, ContextExchange::all_gather}) {
      s.train.context_exchange = exchange;
      const TrainingResult shared = train(g, s);
      CHECK(shared.losses.at(0) == Approx(one.losses.at(0)).epsilon(2e-3));
      CHECK(shared.losses.back() == Approx(one.losses.back()).epsilon(0.01));
    }
  }
}
