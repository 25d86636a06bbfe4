// train.context_exchange: auto is the way whose plan costs less, of those that fit.
#include "planner/answers/context_exchange.h"

#include <fmt/format.h>

#include <catch2/catch.hpp>

#include "base/format.h"
#include "planner/answers/plan_answer.h"
#include "tests/json.h"
#include "tests/planner/pricers.h"

using namespace hotbunk;

namespace {

/// H = 512, 8 heads and 8 of keys of 64, 2 layers, over cp 4 of 4 GPUs; so many tokens on each, in sequences of four
/// times that.
Scenario over_context(std::int64_t tokens, const std::vector<std::string>& sets = {}) {
  return scenario_of_text(
      fmt::format("name: context\n"
                  "model: {{model_type: llama, hidden_size: 512, intermediate_size: 1024, num_hidden_layers: 2,"
                  " num_attention_heads: 8, num_key_value_heads: 8, head_dim: 64, vocab_size: 1000,"
                  " max_position_embeddings: 1000000, tie_word_embeddings: false}}\n"
                  "cluster: {{gpu: h100-sxm-80gb, nodes: 1, gpus_per_node: 4}}\n"
                  "train: {{engine: fsdp2, layout: {{cp: 4, dp: 1}}, micro_batch_tokens: {0}}}\n"
                  "algorithm: {{name: sft, prompts: 4}}\n"
                  "workload: {{prompt_tokens: {{mean: {1}, max: {1}, distribution: fixed}}, response_tokens:"
                  " {{mean: {1}, max: {1}, distribution: fixed}}}}\n",
                  tokens, 2 * tokens),
      sets);
}

ExchangeChoice chosen(const Scenario& s) {
  const auto choice = choose_context_exchange(s, catalog_root());
  REQUIRE(choice.has_value());
  return *choice;
}

}  // namespace

TEST_CASE(
    "Keys and values come the way that takes less: gathered where sequences are short, around a ring where long") {
  const ExchangeChoice few = chosen(over_context(256)), many = chosen(over_context(65536));
  INFO(render(few) << "; " << render(many));
  CHECK((few.ring.fits && few.all_gather.fits && many.ring.fits && many.all_gather.fits));
  CHECK(few.chosen == ContextExchange::all_gather);
  CHECK(few.all_gather.seconds < few.ring.seconds);
  CHECK(many.chosen == ContextExchange::ring);
  CHECK(many.ring.seconds < many.all_gather.seconds);
  CHECK_THAT(render(few), Catch::StartsWith("all-gather, ") && Catch::Contains("(ring: "));
}

TEST_CASE("Of two ways the one that fits is taken, whatever it costs") {
  // What gathered keys and values add to the peak of a sequence of 4,096 is between the two.
  const auto peak = [](const char* exchange) {
    const auto plan = plan_answer_of(over_context(1024, {fmt::format("train.context_exchange={}", exchange)}));
    REQUIRE(plan.has_value());
    return plan->memory.device.whole.mapped_bytes;
  };
  const std::int64_t ring = peak("ring"), gathered = peak("all-gather");
  REQUIRE(gathered > ring);
  const ExchangeChoice tight = chosen(
      over_context(1024, {fmt::format("cluster.device_memory_mib={}", (ring + gathered) / 2.0 / (1024 * 1024))}));
  CHECK((tight.ring.fits && !tight.all_gather.fits));
  CHECK(tight.all_gather.seconds < tight.ring.seconds);
  CHECK(tight.chosen == ContextExchange::ring);
  CHECK_THAT(render(tight), Catch::StartsWith("ring, ") && Catch::EndsWith(", which does not fit)"));
  // Where neither fits it is the one that takes less memory, and both seconds stand as they are.
  const ExchangeChoice neither =
      chosen(over_context(1024, {fmt::format("cluster.device_memory_mib={}", ring / 2.0 / (1024 * 1024))}));
  CHECK((!neither.ring.fits && !neither.all_gather.fits));
  CHECK(neither.chosen == ContextExchange::ring);
  CHECK(render(neither) == fmt::format("ring, {} of an iteration's training (all-gather: {}); neither fits",
                                       format_seconds(neither.ring.seconds.value()),
                                       format_seconds(neither.all_gather.seconds.value())));
}

TEST_CASE("A way without a plan is said to have none, and takes no 0 seconds") {
  const ExchangeChoice one{
      .chosen = ContextExchange::all_gather, .ring = {}, .all_gather = {.seconds = 0.25, .fits = true}};
  CHECK(render(one) == "all-gather, 250.00 ms of an iteration's training (ring: no plan)");
  CHECK(json_from<nlohmann::ordered_json>(to_json(one)) ==
        nlohmann::ordered_json{{"chosen", "all-gather"},
                               {"ring", {{"training_s", nullptr}, {"fits", false}}},
                               {"all_gather", {{"training_s", 0.25}, {"fits", true}}}});
}

TEST_CASE("Nothing is chosen where the scenario says it, has no context parallelism, or has no plan") {
  for (const char* set : {"train.context_exchange=ring", "train.context_exchange=all-gather",
                          "train.layout={ulysses: 4, dp: 1}", "optimizer.name=muon"})
    CHECK_FALSE(choose_context_exchange(over_context(1024, {set}), catalog_root()).has_value());
}
