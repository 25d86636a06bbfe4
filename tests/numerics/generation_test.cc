// P3: greedy generation equals transformers' token for token, and decoding over a paged KV cache equals the full
// forward pass, whatever the batching and the tensor parallelism.
#include <catch2/catch.hpp>
#include <cmath>
#include <map>
#include <set>

#include "tests/numerics/inference_run.h"

using namespace hotbunk;
using namespace hotbunk::test;

namespace {

/// What P3 allows to logits; log-probs are differences of them.
constexpr double logp_bound = 1e-5;
constexpr std::int64_t new_tokens = 12;

Scenario greedy(const Golden& g, std::int64_t tp = 1) {
  return generate_scenario(
      g.model, prompts_of(g.prompts),
      {.max_new_tokens = new_tokens, .temperature = 0.0, .seed = 0, .tp = tp, .dtype = DType::f32});
}

/// 3 requests of at most 24 tokens share 8 blocks of 4: they cannot all finish without one giving way.
void shrink_pool(Scenario& s) {
  s.rollout.block_tokens = 4;
  s.rollout.kv_cache_tokens = 32;
}

}  // namespace

TEST_CASE("log-probs of whole sequences agree with transformers") {
  for (const std::string& name : golden_models()) {
    CAPTURE(name);
    const Golden g = Golden::load(name);
    CHECK(relative_error(score(g.model, g.sequences), g.tensor("logprobs")) <= logp_bound);
  }
}

TEST_CASE("greedy generation equals transformers' token for token, and the full forward pass") {
  for (const std::string& name : golden_models()) {
    CAPTURE(name);
    const Golden g = Golden::load(name);
    const Generated out = generate(greedy(g), prompts_of(g.prompts));
    CHECK(out.new_tokens() == g.new_tokens);
    CHECK(relative_error(out.logps(), score(g.model, out.sequences)) <= logp_bound);
  }
}

TEST_CASE("chunked prefill, preemption and small batches generate the same") {
  for (const std::string& name : golden_models()) {
    CAPTURE(name);
    const Golden g = Golden::load(name);
    const auto prompts = prompts_of(g.prompts);
    const Generated plain = generate(greedy(g), prompts);
    const auto same = [&](const Generated& out) {
      CHECK(out.new_tokens() == g.new_tokens);
      CHECK(relative_error(out.logps(), plain.logps()) <= logp_bound);
    };
    Scenario chunked = greedy(g);
    chunked.rollout.max_prefill_tokens = 5;
    const Generated in_chunks = generate(chunked, prompts);
    CHECK(in_chunks.prefill_steps > plain.prefill_steps);
    same(in_chunks);

    Scenario tight = greedy(g);
    shrink_pool(tight);
    const Generated preempted = generate(tight, prompts);
    CHECK(preempted.preemptions > 0);
    same(preempted);

    tight.rollout.max_prefill_tokens = 5;  // what a preemption lost is prefilled again in chunks
    same(generate(tight, prompts));

    Scenario alone = greedy(g);
    alone.rollout.max_running_requests = 1;
    same(generate(alone, prompts));
  }
}

TEST_CASE("tensor parallelism generates the same, with fewer key-value heads than ranks too") {
  // Key-value heads are 1, 2 or 4; DeepSeeks keep latents.
  for (const std::string& name : golden_models()) {
    const Golden g = Golden::load(name);
    const auto prompts = prompts_of(g.prompts);
    const std::vector<float> one = generate(greedy(g), prompts).logps();
    for (const std::int64_t tp : {2, 4})
      for (const std::int64_t ep : {1, 2}) {  // columns of all experts, or of those that a group of ranks has
        const std::int64_t kv = g.model.kv_heads;
        if (g.model.heads % tp != 0 || (kv % tp != 0 && tp % kv != 0)) continue;  // refused
        if (ep > 1 && (!g.model.moe || tp == ep)) continue;
        CAPTURE(name, tp, ep);
        Scenario s = greedy(g, tp);
        s.rollout.layout.ep = ep;
        if (tp == 4) shrink_pool(s);
        s.sync.transport = tp == 2 ? SyncTransport::collective : SyncTransport::ipc;
        const Generated out = generate(s, prompts);
        CHECK(out.new_tokens() == g.new_tokens);
        CHECK(relative_error(out.logps(), one) <= logp_bound);
      }
  }
}

TEST_CASE("context parallelism of an engine generates the same, beside tensor parallelism and in stages too") {
  struct Way {
    std::int64_t tp, cp, pp = 1;
  };
  // Windows, sinks, caps, latents and experts; key-value heads as above: tp 4 has more ranks than llama-gqa has of
  // them.
  const std::map<std::string, std::vector<Way>> cases = {
      {"llama-gqa", {{1, 2}, {4, 2}, {1, 3}}}, {"mistral-window", {{1, 4}}}, {"gemma2-tiny", {{2, 2}}},
      {"phi3-tiny", {{1, 3}, {4, 2}}},         {"gemma3-tiny", {{2, 2}}},    {"gpt-oss-tiny", {{1, 3}, {2, 2}}},
      {"deepseek-v3-tiny", {{1, 2}, {2, 2}}},  {"gpt2-tiny", {{1, 2}}}};
  for (const auto& [name, ways] : cases) {
    const Golden g = Golden::load(name);
    const auto prompts = prompts_of(g.prompts);
    const std::vector<float> one = generate(greedy(g), prompts).logps();
    for (const Way& way : ways) {
      CAPTURE(name, way.tp, way.cp, way.pp);
      Scenario s = greedy(g, way.tp * way.cp * way.pp);
      s.rollout.layout.tp = way.tp, s.rollout.layout.cp = way.cp, s.rollout.layout.pp = way.pp;
      s.rollout.max_prefill_tokens = 7;  // chunks, whose context the ranks share
      if (way.cp == 2) s.rollout.block_tokens = 2, s.rollout.kv_cache_tokens = 32;  // preemptions
      const Generated out = generate(s, prompts);
      CHECK(out.new_tokens() == g.new_tokens);
      CHECK(relative_error(out.logps(), one) <= logp_bound);
    }
  }
}

TEST_CASE("ranks of an engine that attend to sequences of their own and share the MLP generate the same") {
  struct Way {
    std::int64_t tp, groups, pp = 1, cp = 1;
  };
  // Groups of one rank, and of two that share attention; on each stage of a pipeline, and beside ranks that hold parts
  // of the groups' sequences.
  const std::map<std::string, std::vector<Way>> cases = {
      {"llama-gqa", {{2, 2}, {4, 4}, {4, 2}, {2, 2, 2}, {2, 2, 1, 2}}},
      {"gemma2-tiny", {{2, 2}, {4, 2}, {2, 2, 1, 2}}},
      {"gemma3-tiny", {{4, 2}}},
      {"phi3-tiny", {{2, 2}, {4, 2}, {2, 2, 3}}},
      {"gpt2-tiny", {{2, 2}, {4, 2}, {2, 2, 3}}},
      {"mixtral-tiny", {{2, 2}, {2, 2, 2, 2}}},
      {"mha-one-kv", {{4, 2}}},
      {"deepseek-v3-tiny", {{2, 2}, {4, 2}, {2, 2, 3}, {4, 2, 1, 2}}},
      {"gpt-oss-tiny", {{2, 2}, {4, 2}, {4, 2, 2}, {2, 2, 1, 2}}},
      {"glm4-moe-tiny", {{4, 2}}}};
  for (const auto& [name, ways] : cases) {
    const Golden g = Golden::load(name);
    const auto prompts = prompts_of(g.prompts);
    const std::vector<float> one = generate(greedy(g), prompts).logps();
    for (const auto [tp, groups, pp, cp] : ways)
      for (const bool tight : {false, true}) {
        CAPTURE(name, tp, groups, pp, cp, tight);
        Scenario s = greedy(g, tp * pp * cp);
        s.rollout.layout.tp = tp, s.rollout.layout.pp = pp, s.rollout.layout.cp = cp;
        s.rollout.layout.attention_dp = groups;
        if (g.model.moe && !tight) s.rollout.layout.ep = groups;
        if (tight) {  // few slots, chunks and preemptions, at other times in each group
          s.rollout.block_tokens = 4, s.rollout.kv_cache_tokens = 32 * groups;
          s.rollout.max_prefill_tokens = 5 * groups, s.rollout.max_running_requests = 3 * groups;
        }
        const Generated out = generate(s, prompts);
        CHECK(out.new_tokens() == g.new_tokens);
        CHECK(relative_error(out.logps(), one) <= logp_bound);
      }
  }
}

TEST_CASE("sampling is a function of the seed, not of the batching") {
  const Golden g = Golden::load("qwen3-norm");
  const auto prompts = prompts_of(g.prompts);
  const auto sample = [&](std::int64_t seed, std::int64_t running) {
    Scenario s = greedy(g);
    s.rollout.temperature = 1.0;
    s.rollout.max_running_requests = running;
    s.seed = seed;
    return generate(s, prompts);
  };
  const Generated first = sample(1, 64);
  CHECK(first.new_tokens() == sample(1, 64).new_tokens());
  CHECK(first.new_tokens() == sample(1, 1).new_tokens());
  CHECK(first.new_tokens() != sample(2, 64).new_tokens());
  CHECK(relative_error(first.logps(), score(g.model, first.sequences)) <= logp_bound);
}

TEST_CASE("sampled tokens follow softmax(logits / temperature)") {
  const Golden g = Golden::load("llama-gqa");
  constexpr double temperature = 0.7;
  constexpr int draws = 4096;
  const auto& prompt = g.prompts[0];
  const std::vector<TokenSequence> prompts(draws, prompts_of({prompt})[0]);
  const Generated out = generate(
      generate_scenario(g.model, prompts,
                        {.max_new_tokens = 1, .temperature = temperature, .seed = 3, .tp = 1, .dtype = DType::f32}),
      prompts);
  // The whole distribution at temperature 1 by scoring every continuation; the temperature in double precision.
  std::vector<TokenSequence> continuations;
  for (std::int32_t v = 0; v < g.model.vocab; ++v) {
    TokenSequence s = prompts_of({prompt})[0];
    s.tokens.push_back(v);
    continuations.push_back(std::move(s));
  }
  const std::vector<float> logps = score(g.model, continuations);
  double sum = 0.0;
  for (const float l : logps) sum += std::exp(static_cast<double>(l) / temperature);
  std::vector<int> counts(logps.size(), 0);
  for (const TokenSequence& s : out.sequences) ++counts.at(static_cast<std::size_t>(s.tokens.back()));
  // Pearson's chi-squared over cells that expect at least 5 draws, the rest in one cell. Under the right distribution
  // it has mean k and variance 2k for k degrees of freedom; 5 standard deviations are exceeded with probability below
  // 1e-4 (the tail beyond the normal's 3e-7 comes from the skew sqrt(8/k)), and the seed is fixed: this does not
  // flicker.
  double statistic = 0.0, rest_expected = 0.0, rest_count = 0.0;
  int cells = 0;
  const auto add = [&](double expected, double count) {
    statistic += (count - expected) * (count - expected) / expected;
    ++cells;
  };
  for (std::size_t v = 0; v < logps.size(); ++v) {
    const double expected = draws * std::exp(static_cast<double>(logps[v]) / temperature) / sum;
    if (expected >= 5.0) add(expected, counts[v]);
    else rest_expected += expected, rest_count += counts[v];
  }
  if (rest_expected > 0.0) add(rest_expected, rest_count);
  REQUIRE(cells > 10);
  const double k = cells - 1;
  CHECK(statistic < k + 5.0 * std::sqrt(2.0 * k));
}
