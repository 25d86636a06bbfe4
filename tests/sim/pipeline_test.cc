// Pipelines in virtual time, where nothing takes any but each layer's attention: 1 us forward and 2 us backward.
#include <fmt/format.h>

#include <array>
#include <catch2/catch.hpp>
#include <numeric>
#include <random>

#include "exec/length_driver.h"
#include "lowering/lower.h"
#include "sim/sim_backend.h"
#include "spec/loader.h"
#include "tests/drawn_numbers.h"
#include "trace/trace.h"

using namespace hotbunk;

namespace {

constexpr std::int64_t forward_ns = 1000, backward_ns = 2000;  // of a layer, of any micro-batch

struct AttentionAlone final : OpCost {
  std::int64_t nanoseconds(const Plan&, Rank, const Op& op, const Args&) const override {
    if (op.kind == OpKind::attention) return forward_ns;
    return op.kind == OpKind::attention_backward ? backward_ns : 0;
  }
};

/// The same time for forward, for gradients of activations and for those of weights, of which a layer has four
/// products.
struct ThreeEqualParts final : OpCost {
  std::int64_t nanoseconds(const Plan&, Rank, const Op& op, const Args&) const override {
    if (op.kind == OpKind::attention || op.kind == OpKind::attention_backward) return forward_ns;
    return op.kind == OpKind::linear_wgrad && !op.name.ends_with("lm_head.wgrad") ? forward_ns / 4 : 0;
  }
};

struct Trained {
  Trace trace;
  std::int16_t phase = 0;  // of training
};

/// Any time for anything, another one on each rank: up to 5 us.
struct DrawnTimes final : OpCost {
  explicit DrawnTimes(std::uint64_t seed) : seed_(seed) {}
  std::int64_t nanoseconds(const Plan&, Rank rank, const Op& op, const Args&) const override {
    const std::uint64_t mixed = (std::hash<std::string>{}(op.name) ^ seed_) * 0x9E3779B97F4A7C15ULL +
                                static_cast<std::uint64_t>(rank) * 0xD1B54A32D192ED03ULL;
    return static_cast<std::int64_t>((mixed >> 33) % 5000);
  }

 private:
  std::uint64_t seed_;
};

/// Beside the stages: ranks that share each of them, and how.
struct Beside {
  const char* engine = "ddp";
  std::int64_t dp = 1, tp = 1;
};

/// Stages of `layers` layers in each of their chunks, and a mini-batch of so many micro-batches.
Trained train(const char* schedule, std::int64_t stages, std::int64_t layers, std::int64_t micro_batches,
              std::int64_t chunks = 1, const OpCost& cost = AttentionAlone(), const Beside& beside = {}) {
  const std::int64_t ranks = stages * beside.dp * beside.tp;
  const auto scenario = load_scenario_text(
      fmt::format("name: stages\n"
                  "model: {{model_type: llama, hidden_size: 8, intermediate_size: 8, num_hidden_layers: {}, "
                  "num_attention_heads: 2, num_key_value_heads: 2, vocab_size: 16, max_position_embeddings: 64}}\n"
                  "cluster: {{gpu: h100-sxm-80gb, nodes: 1, gpus_per_node: {}}}\n"
                  "train: {{engine: {}, layout: {{dp: {}, tp: {}, sp: {}, pp: {}, vpp: {}}}, pipeline_schedule: {}, "
                  "micro_batch_tokens: 8}}\n"
                  "rollout: {{engine: hotbunk, layout: {{tp: 1, dp: {}}}, kv_cache_tokens: 64}}\n"
                  "algorithm: {{name: grpo, prompts: {}, samples_per_prompt: 1, old_logprobs: false}}\n"
                  "workload: {{prompt_tokens: {{mean: 4, max: 4, distribution: fixed}}, "
                  "response_tokens: {{mean: 4, max: 4, distribution: fixed}}}}\nsteps: 1\n",
                  stages * layers * chunks, ranks, beside.engine, beside.dp, beside.tp, beside.tp > 1, stages, chunks,
                  schedule, ranks, micro_batches * beside.dp),
      "stages.yaml");
  if (!scenario) throw std::runtime_error(render(scenario.error()));
  const auto plan = lower(*scenario);
  if (!plan) throw std::runtime_error(render(plan.error()));
  auto driver = LengthDriver::create(*plan, *scenario);
  if (!driver) throw std::runtime_error(render(driver.error()));
  SimBackend backend(scenario->cluster, cost);
  std::vector<Rank> all(static_cast<std::size_t>(ranks));
  std::iota(all.begin(), all.end(), 0);
  auto trace = execute(*plan, backend, **driver, {.steps = 1, .local_ranks = all});
  if (!trace) throw std::runtime_error(render(trace.error()));
  return {std::move(*trace), static_cast<std::int16_t>(plan->phase_index("train"))};
}

}  // namespace

TEST_CASE("A mini-batch of a uniform pipeline takes (m + p - 1) passes both ways, the first p - 1 of them a bubble") {
  for (const char* schedule : {"1f1b", "gpipe"})
    for (const std::int64_t stages : {2, 3, 4})
      for (const std::int64_t micros : {1, 2, 4, 9}) {
        CAPTURE(schedule, stages, micros);
        const auto [trace, phase] = train(schedule, stages, 2, micros);
        const std::int64_t pass = 2 * (forward_ns + backward_ns);
        // BACKGROUND B6: bubble / ideal = (p - 1) / m.
        for (const PhaseSpan& span : trace.phases)
          if (span.phase == phase) CHECK(span.end_ns - span.start_ns == (micros + stages - 1) * pass);
      }
}

TEST_CASE("Chunks make the bubble of an interleaved pipeline smaller: (p - 1) / (m v) of the ideal time") {
  for (const std::int64_t stages : {2, 3, 4})
    for (const std::int64_t chunks : {2, 3})
      for (const std::int64_t rows : {1, 2, 3}) {
        const std::int64_t micros = rows * stages;
        CAPTURE(stages, chunks, micros);
        const auto [trace, phase] = train("interleaved", stages, 1, micros, chunks);
        // BACKGROUND B6: m v + p - 1 passes through one chunk, both ways.
        for (const PhaseSpan& span : trace.phases)
          if (span.phase == phase)
            CHECK(span.end_ns - span.start_ns == (micros * chunks + stages - 1) * (forward_ns + backward_ns));
      }
  // Any number that divides: 92 layers over 4 stages are 23 chunks of one.
  const auto [trace, phase] = train("interleaved", 4, 1, 8, 23);
  for (const PhaseSpan& span : trace.phases)
    if (span.phase == phase) CHECK(span.end_ns - span.start_ns == (8 * 23 + 3) * (forward_ns + backward_ns));
}

TEST_CASE("Zero-bubble fills the end with gradients of weights: of (p - 1) passes both ways, p - 1 units are left") {
  for (const std::int64_t stages : {2, 3, 4})
    for (const std::int64_t micros : {stages, stages + 1, 3 * stages}) {
      CAPTURE(stages, micros);
      const auto seconds = [&](const char* schedule) {
        const auto [trace, phase] = train(schedule, stages, 1, micros, 1, ThreeEqualParts());
        std::int64_t out = 0;
        for (const PhaseSpan& span : trace.phases)
          if (span.phase == phase) out = std::max(out, span.end_ns - span.start_ns);
        return out;
      };
      CHECK(seconds("1f1b") == 3 * (micros + stages - 1) * forward_ns);
      // Qi et al., table 2: (p - 1) (F + B - W).
      CHECK(seconds("zero-bubble") == (3 * micros + stages - 1) * forward_ns);
    }
  // Of chunks, which take turns in full rows, as many passes of a v-th each.
  for (const std::int64_t stages : {2, 3, 4})
    for (const std::int64_t chunks : {2, 3})
      for (const std::int64_t rows : {1, 2}) {
        const std::int64_t micros = rows * stages;
        CAPTURE(stages, chunks, micros);
        const auto [trace, phase] = train("zero-bubble", stages, 1, micros, chunks, ThreeEqualParts());
        for (const PhaseSpan& span : trace.phases)
          if (span.phase == phase)
            CHECK(span.end_ns - span.start_ns == (3 * micros * chunks + stages - 1) * forward_ns);
      }
}

TEST_CASE("Drawn pipelines of up to 8 ranks come to their end, however long anything takes on anyone") {
  // HOTBUNK_PIPELINE_SHAPES says how many of them in 1F1B, with the others' beside. A stage that waited for ever would
  // be an error with its wait cycle.
  std::mt19937_64 random(static_cast<std::uint64_t>(test::number_asked("HOTBUNK_PROPERTY_SEED", 1)));
  const auto in = [&](std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(high - low + 1));
  };
  const std::int64_t shapes = test::number_asked("HOTBUNK_PIPELINE_SHAPES", 250);
  for (std::int64_t in_1f1b = 0; in_1f1b < shapes;) {
    const char* const schedule =
        std::array{"1f1b", "1f1b", "1f1b", "1f1b", "gpipe", "interleaved", "zero-bubble"}[in(0, 6)];
    in_1f1b += std::string_view(schedule) == "1f1b" ? 1 : 0;
    const std::int64_t stages = in(2, 8), chunks = in(0, 1) == 0 ? 1 : in(1, 4), micros = in(1, 20);
    Beside beside{std::array{"ddp", "zero1", "zero2", "fsdp2"}[in(0, 3)], in(1, 8 / stages)};
    if (stages * beside.dp <= 4) beside.tp = in(1, 2);
    CAPTURE(schedule, stages, chunks, micros, beside.engine, beside.dp, beside.tp);
    const auto [trace, phase] = train(schedule, stages, 1, micros, chunks, DrawnTimes(random()), beside);
    std::int64_t trained = 0;
    for (const PhaseSpan& span : trace.phases) trained += span.phase == phase && span.end_ns > span.start_ns ? 1 : 0;
    CHECK(trained == stages * beside.dp * beside.tp);
  }
}

TEST_CASE("A stage keeps the activations of min(m, p - s) micro-batches in 1F1B, of all m in GPipe") {
  // What a second one adds: the stage between two ends keeps nothing but its layers'.
  const auto activations = [](const char* schedule, std::int64_t micros, Rank rank, std::int64_t chunks = 1) {
    const auto [trace, phase] = train(schedule, 4, 1, micros, chunks);
    const auto& peak = trace.memory[static_cast<std::size_t>(rank)].device.phase_peaks.at(phase);
    return peak.by_category[static_cast<std::size_t>(Category::activations)];
  };
  for (const Rank stage : {1, 2}) {
    const std::int64_t one = activations("1f1b", 1, stage), each = activations("gpipe", 2, stage) - one;
    CHECK(each > 0);
    for (const std::int64_t micros : {1, 2, 3, 4, 6}) {
      CAPTURE(stage, micros);
      CHECK(activations("gpipe", micros, stage) - one == (micros - 1) * each);
      CHECK(activations("1f1b", micros, stage) - one == (std::min<std::int64_t>(micros, 4 - stage) - 1) * each);
    }
    // Interleaved, those of chunks: its warm-up of 2 (p - 1 - s) + (v - 1) p passes, and one more.
    for (const std::int64_t micros : {4, 8, 12}) {
      CAPTURE(stage, micros);
      const std::int64_t passes = std::min<std::int64_t>(2 * micros, 2 * (3 - stage) + 4 + 1);
      CHECK(activations("interleaved", micros, stage, 2) - one == (passes - 1) * each);
    }
  }
}
