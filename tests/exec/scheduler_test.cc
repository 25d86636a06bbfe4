#include "exec/scheduler.h"

#include <rapidcheck.h>

#include <catch2/catch.hpp>
#include <numeric>
#include <set>

#include "layout/shard.h"

using namespace hotbunk;

namespace {

/// A small engine, so that pools fill and prompts are chunked often.
struct Case {
  SchedulerConfig config;
  std::vector<RolloutRequest> requests;
  std::vector<std::int64_t> real_lengths;  // EOS after so many tokens, at most the cap
};

Case draw_case() {
  Case c;
  c.config = {*rc::gen::inRange<std::int64_t>(1, 5), *rc::gen::inRange<std::int64_t>(1, 9),
              *rc::gen::inRange<std::int64_t>(1, 5), 0};
  const auto count = *rc::gen::inRange<std::int64_t>(1, 12);
  std::int64_t longest = 1;
  for (std::int64_t i = 0; i < count; ++i) {
    c.requests.push_back({i, *rc::gen::inRange<std::int64_t>(1, 14), *rc::gen::inRange<std::int64_t>(1, 14)});
    c.real_lengths.push_back(*rc::gen::inRange<std::int64_t>(1, c.requests.back().max_response_tokens + 1));
    longest = std::max(longest, c.requests.back().prompt_tokens + c.requests.back().max_response_tokens);
  }
  // Between a pool that holds just the longest sequence and one that holds two of them.
  const std::int64_t least = ceil_div(longest, c.config.block_tokens);
  c.config.num_kv_blocks = *rc::gen::inRange<std::int64_t>(least, 2 * least + 1);
  return c;
}

std::vector<std::uint8_t> ended_flags(const Scheduler& s, const ScheduledStep& step, const Case& c) {
  std::vector<std::uint8_t> flags;
  for (const Chunk& chunk : step.chunks)
    flags.push_back(s.response_tokens(chunk.request) + 1 == c.real_lengths[static_cast<std::size_t>(chunk.request)]);
  return flags;
}

/// What a model with a KV pool would see: which token of which request each slot holds.
struct Pool {
  std::vector<std::pair<std::int32_t, std::int64_t>> slots;

  /// Writes the step's tokens, then checks that every chunk's whole context is there through its block table.
  void run(const ScheduledStep& step, const StepTables& t, std::int64_t block_tokens) {
    for (std::size_t i = 0; i < step.chunks.size(); ++i)
      for (std::int64_t k = 0; k < step.chunks[i].count; ++k) {
        const auto row = static_cast<std::size_t>(t.cu_seqlens[i] + k);
        RC_ASSERT(t.positions[row] == step.chunks[i].first + k);
        slots.at(static_cast<std::size_t>(t.kv_slots[row])) = {step.chunks[i].request, t.positions[row]};
      }
    for (std::size_t i = 0; i < step.chunks.size(); ++i) {
      RC_ASSERT(t.last_rows[i] == t.cu_seqlens[i + 1] - 1);
      RC_ASSERT(t.context_lengths[i] == step.chunks[i].first + step.chunks[i].count);
      for (std::int64_t p = 0; p < t.context_lengths[i]; ++p) {
        const auto block =
            t.block_tables[i * static_cast<std::size_t>(t.max_blocks) + static_cast<std::size_t>(p / block_tokens)];
        const auto slot = static_cast<std::size_t>(block * block_tokens + p % block_tokens);
        RC_ASSERT(slots.at(slot) == std::make_pair(step.chunks[i].request, p));
      }
    }
  }
};

void check_blocks(const Scheduler& s, const SchedulerConfig& config) {
  std::set<std::int32_t> used;
  std::int64_t held = 0;
  for (std::int32_t r : s.running())
    for (std::int32_t block : s.blocks(r)) {
      RC_ASSERT(block >= 0 && block < config.num_kv_blocks);
      RC_ASSERT(used.insert(block).second);
      ++held;
    }
  RC_ASSERT(held + s.free_blocks() == config.num_kv_blocks);
  RC_ASSERT(static_cast<std::int64_t>(s.running().size()) <= config.max_running_requests);
}

}  // namespace

TEST_CASE("every request finishes, no KV slot is shared, limits hold") {
  CHECK(rc::check("scheduler invariants", [] {
    const Case c = draw_case();
    auto s = Scheduler::create(c.config, c.requests);
    RC_ASSERT(s.has_value());
    Pool pool{std::vector<std::pair<std::int32_t, std::int64_t>>(
        static_cast<std::size_t>(c.config.num_kv_blocks * c.config.block_tokens), {-1, -1})};
    std::vector<std::int64_t> sampled(c.requests.size(), 0);
    std::int64_t steps = 0, prefilled = 0;
    while (const auto step = s->next()) {
      RC_ASSERT(++steps < 100000);
      RC_ASSERT(!step->chunks.empty());
      check_blocks(*s, c.config);
      std::int64_t tokens = 0, pairs = 0;
      for (const Chunk& chunk : step->chunks) {
        tokens += chunk.count;
        for (std::int64_t p = chunk.first; p < chunk.first + chunk.count; ++p) pairs += p + 1;
        const auto r = static_cast<std::size_t>(chunk.request);
        const std::int64_t known = c.requests[r].prompt_tokens + sampled[r];
        RC_ASSERT(chunk.samples == (chunk.first + chunk.count == known));
        if (chunk.samples) ++sampled[r];
      }
      RC_ASSERT(step->sizes.tokens == tokens);
      RC_ASSERT(step->sizes.seqs == static_cast<std::int64_t>(step->chunks.size()));
      RC_ASSERT(step->sizes.attention_pairs == pairs);
      RC_ASSERT(tokens <= (step->prefill ? c.config.max_prefill_tokens : c.config.max_running_requests));
      if (step->prefill) prefilled += tokens;
      pool.run(*step, s->tables(*step, c.config.num_kv_blocks), c.config.block_tokens);
      s->completed(*step, ended_flags(*s, *step, c));
    }
    std::int64_t prompts = 0;
    for (std::size_t r = 0; r < c.requests.size(); ++r) {
      prompts += c.requests[r].prompt_tokens;
      RC_ASSERT(s->finished(static_cast<std::int32_t>(r)));
      RC_ASSERT(s->response_tokens(static_cast<std::int32_t>(r)) == c.real_lengths[r]);
      RC_ASSERT(sampled[r] == c.real_lengths[r]);
    }
    // Tokens are conserved: what is prefilled beyond the prompts was dropped by a preemption, plus, for each
    // preemption, the newest token, which had not been in the pool yet (and which a decode step feeds when it is all
    // that is left).
    const SchedulerStatistics& statistics = s->statistics();
    RC_ASSERT(s->free_blocks() == c.config.num_kv_blocks);
    RC_ASSERT(prefilled - prompts >= statistics.recomputed_tokens);
    RC_ASSERT(prefilled - prompts <= statistics.recomputed_tokens + statistics.preemptions);
    RC_ASSERT(statistics.max_blocks_used <= c.config.num_kv_blocks);
  }));
}

TEST_CASE("decode steps taken together are the steps one by one") {
  CHECK(rc::check("steps together", [] {
    const Case c = draw_case();
    auto single = Scheduler::create(c.config, c.requests), several = Scheduler::create(c.config, c.requests);
    RC_ASSERT(single.has_value());
    const std::int64_t most = *rc::gen::inRange<std::int64_t>(2, 40);
    std::int64_t taken = 0, steps = 0;
    while (const auto together = several->next(most)) {
      ++taken;
      RC_ASSERT(together->times >= 1);
      RC_ASSERT(together->times <= (together->prefill ? 1 : most));
      for (std::int64_t i = 0; i < together->times; ++i, ++steps) {
        const auto step = single->next();
        RC_ASSERT(step.has_value());
        RC_ASSERT(step->prefill == together->prefill);
        RC_ASSERT(step->chunks.size() == together->chunks.size());
        Sizes expected = together->sizes;
        expected.attention_pairs += i * together->sizes.seqs;
        RC_ASSERT(step->sizes == expected);
        single->completed(*step);
      }
      several->completed(*together);
      RC_ASSERT(single->free_blocks() == several->free_blocks());
    }
    RC_ASSERT(!single->next());
    const SchedulerStatistics &a = single->statistics(), &b = several->statistics();
    RC_ASSERT(a.decode_steps == b.decode_steps && a.prefill_steps == b.prefill_steps);
    RC_ASSERT(a.preemptions == b.preemptions && a.recomputed_tokens == b.recomputed_tokens);
    RC_ASSERT(a.max_blocks_used == b.max_blocks_used);
    RC_CLASSIFY(taken < steps, "fewer decisions than steps");
  }));
}

TEST_CASE("a schedule replayed with the lengths that came out is the same schedule") {
  CHECK(rc::check("replay", [] {
    const Case c = draw_case();
    std::vector<RolloutRequest> capped = c.requests;
    for (std::size_t i = 0; i < capped.size(); ++i) capped[i].max_response_tokens = c.real_lengths[i];
    auto run = Scheduler::create(c.config, c.requests), replay = Scheduler::create(c.config, capped);
    while (const auto step = run->next()) {
      const auto again = replay->next();
      RC_ASSERT(again.has_value());
      RC_ASSERT(again->prefill == step->prefill);
      RC_ASSERT(run->tables(*step, 64).kv_slots == replay->tables(*again, 64).kv_slots);
      RC_ASSERT(again->sizes.attention_pairs == step->sizes.attention_pairs);
      run->completed(*step, ended_flags(*run, *step, c));
      replay->completed(*again);
    }
    RC_ASSERT(!replay->next().has_value());
  }));
}

TEST_CASE("a full pool preempts the youngest, which is prefilled again with what it had generated") {
  // Two requests of 2 prompt + 4 response tokens, blocks of 1 token, 8 blocks.
  // Admission takes known + 1 = 3 blocks each: 6 used, 2 free. Prefill caches 2 + 2 and samples 1 each.
  // Decode 1 needs 3 each (held). Decode 2 needs 4 each: 8 used, none free. Decode 3 needs 5 for request 0: request 1
  // (prompt 2 + 3 generated, 4 blocks) gives way. Request 0 decodes alone and has its 4 tokens. Then request 1 prefills
  // 5 tokens, of which 4 had been in the pool, and samples its last.
  auto s = Scheduler::create({2, 16, 1, 8}, {{0, 2, 4}, {1, 2, 4}});
  REQUIRE(s);
  std::vector<std::string> seen;
  while (const auto step = s->next()) {
    seen.push_back((step->prefill ? "prefill " : "decode ") + std::to_string(step->sizes.tokens));
    s->completed(*step);
  }
  CHECK(seen == std::vector<std::string>{"prefill 4", "decode 2", "decode 2", "decode 1", "prefill 5"});
  CHECK(s->statistics().preemptions == 1);
  CHECK(s->statistics().recomputed_tokens == 4);
  CHECK(s->statistics().max_blocks_used == 8);
}

TEST_CASE("a request is not admitted when it would have to give way at its first decode step") {
  // Prompt 2, response 2, blocks of 1 token, 5 blocks: two prompts would fit (4), their first decode step (6) not.
  auto s = Scheduler::create({2, 16, 1, 5}, {{0, 2, 2}, {1, 2, 2}});
  REQUIRE(s);
  std::vector<std::int64_t> tokens;
  while (const auto step = s->next()) {
    tokens.push_back(step->sizes.tokens);
    s->completed(*step);
  }
  CHECK(tokens == std::vector<std::int64_t>{2, 1, 2, 1});
  CHECK(s->statistics().preemptions == 0);
}

TEST_CASE("a long prompt is prefilled in chunks and samples after the last") {
  auto s = Scheduler::create({4, 4, 4, 8}, {{0, 10, 1}, {1, 3, 1}});
  REQUIRE(s);
  std::vector<std::vector<std::int64_t>> counts;
  std::vector<bool> samples;
  while (const auto step = s->next()) {
    counts.emplace_back();
    for (const Chunk& c : step->chunks) counts.back().push_back(c.count), samples.push_back(c.samples);
    s->completed(*step);
  }
  // 10 = 4 + 4 + 2; the third step has room for 2 tokens of the second prompt.
  CHECK(counts == std::vector<std::vector<std::int64_t>>{{4}, {4}, {2, 2}, {1}});
  CHECK(samples == std::vector<bool>{false, false, true, false, true});
}

TEST_CASE("a request that can never fit is refused with the arithmetic") {
  const auto s = Scheduler::create({4, 4, 16, 3}, {{7, 20, 30}});
  REQUIRE_FALSE(s);
  CHECK(s.error().front().code == "E310");
  CHECK(s.error().front().notes.front() == "prompt 20 + response 30 = 50 tokens = 4 blocks of 16, but the pool has 3");
  CHECK(s.error().front().help.find("64") != std::string::npos);
  CHECK(Scheduler::create({0, 4, 16, 3}, {}).error().front().code == "E311");
}

TEST_CASE("routing covers every sample once, balances counts and keeps groups together") {
  CHECK(rc::check("router", [] {
    const auto prompts =
        *rc::gen::nonEmpty(rc::gen::container<std::vector<std::int64_t>>(rc::gen::inRange<std::int64_t>(1, 100)));
    const auto per_prompt = *rc::gen::inRange<std::int64_t>(1, 9);
    const auto engines = *rc::gen::inRange<std::int64_t>(1, 6);
    const auto routes = route_samples(prompts, per_prompt, engines);
    std::set<std::int64_t> all;
    std::size_t least = SIZE_MAX, most = 0;
    for (const auto& samples : routes) {
      RC_ASSERT(std::is_sorted(samples.begin(), samples.end()));
      for (std::int64_t i : samples) RC_ASSERT(all.insert(i).second);
      least = std::min(least, samples.size());
      most = std::max(most, samples.size());
    }
    const auto total = static_cast<std::int64_t>(prompts.size()) * per_prompt;
    RC_ASSERT(static_cast<std::int64_t>(all.size()) == total);
    RC_ASSERT(most - least <= 1);
    if (static_cast<std::int64_t>(prompts.size()) % engines == 0)
      for (const auto& samples : routes)
        for (std::size_t i = 0; i < samples.size(); ++i)
          RC_ASSERT(samples[i] % per_prompt == static_cast<std::int64_t>(i) % per_prompt);
  }));
  // Prompts of 9, 1, 8, 2 tokens on two engines: 9 -> e0, 8 -> e1, 2 -> e1 (8 < 9), 1 -> e0, both 10 tokens.
  const std::vector<std::int64_t> prompts{9, 1, 8, 2};
  CHECK(route_samples(prompts, 1, 2) == std::vector<std::vector<std::int64_t>>{{0, 1}, {2, 3}});
}
