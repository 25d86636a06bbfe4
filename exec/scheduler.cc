#include "exec/scheduler.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>

#include "base/check.h"
#include "layout/shard.h"

namespace hotbunk {
namespace {

void check_positive(Diagnostics& problems, const char* what, std::int64_t value) {
  if (value < 1)
    problems.push_back({.code = "E311",
                        .message = fmt::format("{} must be at least 1, not {}", what, value),
                        .where = {},
                        .notes = {},
                        .help = {}});
}

/// Σ over query positions first … first + count - 1 of the keys they see: position p sees p + 1.
std::int64_t causal_pairs(std::int64_t first, std::int64_t count) { return count * first + count * (count + 1) / 2; }

}  // namespace

Result<Scheduler> Scheduler::create(const SchedulerConfig& config, std::vector<RolloutRequest> requests) {
  Diagnostics problems;
  check_positive(problems, "rollout.max_running_requests", config.max_running_requests);
  check_positive(problems, "rollout.max_prefill_tokens", config.max_prefill_tokens);
  check_positive(problems, "rollout.block_tokens", config.block_tokens);
  check_positive(problems, "the number of KV blocks", config.num_kv_blocks);
  for (const RolloutRequest& r : requests) {
    check_positive(problems, "the prompt of a sample", r.prompt_tokens);
    check_positive(problems, "the response cap of a sample", r.max_response_tokens);
    if (!problems.empty()) return fail(std::move(problems));
    const std::int64_t tokens = r.prompt_tokens + r.max_response_tokens;
    const std::int64_t needed = ceil_div(tokens, config.block_tokens);
    if (needed > config.num_kv_blocks)
      return fail({.code = "E310",
                   .message = fmt::format("sample {} can never fit the KV pool of its engine", r.sample),
                   .where = {},
                   .notes = {fmt::format("prompt {} + response {} = {} tokens = {} blocks of {}, but the pool has {}",
                                         r.prompt_tokens, r.max_response_tokens, tokens, needed, config.block_tokens,
                                         config.num_kv_blocks)},
                   .help = fmt::format("raise rollout.kv_cache_tokens to at least {}, or lower the longest response",
                                       needed * config.block_tokens)});
  }
  if (!problems.empty()) return fail(std::move(problems));
  return Scheduler(config, std::move(requests));
}

Scheduler::Scheduler(const SchedulerConfig& config, std::vector<RolloutRequest> requests)
    : config_(config), requests_(std::move(requests)), states_(requests_.size()) {}

std::int64_t Scheduler::known_tokens(std::int32_t r) const {
  return requests_[static_cast<std::size_t>(r)].prompt_tokens + state(r).generated;
}

/// All known tokens but the newest are in the pool: the next step feeds that one.
bool Scheduler::prefilled(std::int32_t r) const {
  return state(r).generated > 0 && state(r).cached == known_tokens(r) - 1;
}

std::int32_t Scheduler::take_block() {
  if (free_.empty()) return unused_++;
  const std::int32_t block = free_.back();
  free_.pop_back();
  return block;
}

void Scheduler::grow(std::int32_t r, std::int64_t tokens) {
  auto& blocks = state(r).blocks;
  const auto needed = static_cast<std::size_t>(ceil_div(tokens, config_.block_tokens));
  while (blocks.size() < needed) {
    HB_CHECK(free_blocks() > 0, "request {} needs {} blocks", r, needed);
    blocks.push_back(take_block());
  }
  statistics_.max_blocks_used = std::max(statistics_.max_blocks_used, config_.num_kv_blocks - free_blocks());
}

void Scheduler::release(std::int32_t r) {
  auto& blocks = state(r).blocks;
  free_.insert(free_.end(), blocks.rbegin(), blocks.rend());
  blocks.clear();
  state(r).cached = 0;
}

/// Admission asks for one block-slot more than the known tokens: a request that had to give way at its very next decode
/// step would be prefilled for nothing.
bool Scheduler::try_admit() {
  const auto count = static_cast<std::int32_t>(requests_.size());
  while (next_waiting_ < count && state(next_waiting_).finished) ++next_waiting_;
  if (next_waiting_ == count) return false;
  if (static_cast<std::int64_t>(running_.size()) == config_.max_running_requests) return false;
  const std::int64_t tokens = known_tokens(next_waiting_) + 1;
  if (ceil_div(tokens, config_.block_tokens) > free_blocks()) return false;
  grow(next_waiting_, tokens);
  running_.push_back(next_waiting_++);
  return true;
}

void Scheduler::preempt_youngest() {
  const std::int32_t youngest = running_.back();
  running_.pop_back();
  release(youngest);
  next_waiting_ = youngest;
  ++statistics_.preemptions;
}

void Scheduler::make_room_for_decode() {
  for (std::size_t i = 0; i < running_.size(); ++i) {  // oldest first: the young ones give way
    const std::int32_t r = running_[i];
    const std::int64_t needed = ceil_div(known_tokens(r), config_.block_tokens);
    while (i < running_.size() && needed - static_cast<std::int64_t>(state(r).blocks.size()) > free_blocks())
      preempt_youngest();
    if (i < running_.size()) grow(r, known_tokens(r));
  }
}

ScheduledStep Scheduler::prefill_step() {
  ScheduledStep step{.prefill = true, .chunks = {}, .sizes = {}};
  std::int64_t budget = config_.max_prefill_tokens;
  const auto add = [&](std::int32_t r) {
    const State& s = state(r);
    const std::int64_t count = std::min(budget, known_tokens(r) - s.cached);
    step.chunks.push_back({r, s.cached, count, s.cached + count == known_tokens(r)});
    step.sizes.tokens += count;
    step.sizes.attention_pairs += causal_pairs(s.cached, count);
    budget -= count;
  };
  // Only the youngest can be half prefilled: admission stops when the budget is spent.
  if (!running_.empty() && !prefilled(running_.back())) add(running_.back());
  while (budget > 0 && try_admit()) add(running_.back());
  return step;
}

/// With room for one step made. Nobody is admitted meanwhile: blocks and slots only become fewer.
std::int64_t Scheduler::alike_decode_steps(std::int64_t most_times) const {
  std::int64_t most = most_times;
  for (std::int32_t r : running_)
    most = std::min(most, requests_[static_cast<std::size_t>(r)].max_response_tokens - state(r).generated);
  const auto blocks_after = [&](std::int64_t times) {
    std::int64_t more = 0;
    for (std::int32_t r : running_)
      more += std::max<std::int64_t>(
          0, ceil_div(known_tokens(r) + times - 1, config_.block_tokens) - std::ssize(state(r).blocks));
    return more;
  };
  if (blocks_after(most) <= free_blocks()) return most;
  std::int64_t fits = 1;
  while (most - fits > 1) {
    const std::int64_t middle = fits + (most - fits) / 2;
    (blocks_after(middle) <= free_blocks() ? fits : most) = middle;
  }
  return fits;
}

ScheduledStep Scheduler::decode_step(std::int64_t most_times) {
  make_room_for_decode();
  ScheduledStep step;
  if (most_times > 1) {
    step.times = alike_decode_steps(most_times);
    for (std::int32_t r : running_) grow(r, known_tokens(r) + step.times - 1);
  }
  step.chunks.reserve(running_.size());
  for (std::int32_t r : running_) {
    step.chunks.push_back({r, state(r).cached, 1, true});
    step.sizes.attention_pairs += state(r).cached + 1;
  }
  step.sizes.tokens = static_cast<std::int64_t>(step.chunks.size());
  return step;
}

std::optional<ScheduledStep> Scheduler::next(std::int64_t most_times) {
  HB_CHECK(!step_open_, "next() before completed()");
  ScheduledStep step = prefill_step();
  if (step.chunks.empty()) {
    if (running_.empty()) return std::nullopt;
    step = decode_step(most_times);
  }
  step.sizes.seqs = static_cast<std::int64_t>(step.chunks.size());
  (step.prefill ? statistics_.prefill_steps : statistics_.decode_steps) += step.times;
  step_open_ = true;
  return step;
}

void Scheduler::completed(const ScheduledStep& step, std::span<const std::uint8_t> ended) {
  HB_CHECK(step_open_, "completed() without next()");
  HB_CHECK(step.times == 1 || ended.empty(), "a sequence ends in one of {} decode steps", step.times);
  HB_CHECK(ended.empty() || ended.size() == step.chunks.size(), "{} flags for {} chunks", ended.size(),
           step.chunks.size());
  step_open_ = false;
  for (std::size_t i = 0; i < step.chunks.size(); ++i) {
    const Chunk& c = step.chunks[i];
    State& s = state(c.request);
    s.cached = c.first + c.count + step.times - 1;
    statistics_.recomputed_tokens += std::max<std::int64_t>(0, std::min(s.cached, s.ever_cached) - c.first);
    s.ever_cached = std::max(s.ever_cached, s.cached);
    if (!c.samples) continue;
    s.generated += step.times;
    const bool end = !ended.empty() && ended[i] != 0;
    s.finished = end || s.generated == requests_[static_cast<std::size_t>(c.request)].max_response_tokens;
    if (s.finished) release(c.request);
  }
  std::erase_if(running_, [&](std::int32_t r) { return state(r).finished; });
}

StepTables Scheduler::tables(const ScheduledStep& step, std::int64_t max_blocks) const {
  HB_CHECK(step_open_ || step.chunks.empty(), "tables() of a step that is over");
  StepTables t;
  t.max_blocks = max_blocks;
  t.cu_seqlens = {0};
  t.block_tables.assign(step.chunks.size() * static_cast<std::size_t>(max_blocks), 0);
  for (std::size_t i = 0; i < step.chunks.size(); ++i) {
    const Chunk& c = step.chunks[i];
    const auto& blocks = state(c.request).blocks;
    for (std::int64_t p = c.first; p < c.first + c.count; ++p) {
      t.positions.push_back(static_cast<std::int32_t>(p));
      const std::int64_t block = blocks[static_cast<std::size_t>(p / config_.block_tokens)];
      t.kv_slots.push_back(static_cast<std::int32_t>(block * config_.block_tokens + p % config_.block_tokens));
    }
    t.cu_seqlens.push_back(static_cast<std::int32_t>(t.positions.size()));
    t.context_lengths.push_back(static_cast<std::int32_t>(c.first + c.count));
    t.last_rows.push_back(t.cu_seqlens.back() - 1);
    const auto used = static_cast<std::size_t>(ceil_div(c.first + c.count, config_.block_tokens));
    HB_CHECK(static_cast<std::int64_t>(used) <= max_blocks, "a context of {} blocks, tables of {}", used, max_blocks);
    std::copy_n(blocks.begin(), used, t.block_tables.begin() + static_cast<std::ptrdiff_t>(i) * max_blocks);
  }
  return t;
}

std::vector<std::vector<std::int64_t>> route_samples(std::span<const std::int64_t> prompt_tokens,
                                                     std::int64_t samples_per_prompt, std::int64_t engines) {
  HB_CHECK(samples_per_prompt >= 1 && engines >= 1, "{} samples on {} engines", samples_per_prompt, engines);
  const auto prompts = static_cast<std::int64_t>(prompt_tokens.size());
  std::vector<std::int64_t> order(prompt_tokens.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, std::greater{},
                           [&](std::int64_t p) { return prompt_tokens[static_cast<std::size_t>(p)]; });

  std::vector<std::vector<std::int64_t>> samples(static_cast<std::size_t>(engines));
  const std::int64_t whole = prompts / engines;       // prompts that each engine gets whole
  using Load = std::pair<std::int64_t, std::size_t>;  // prompt tokens, engine: the least first, ties to the lower index
  std::priority_queue<Load, std::vector<Load>, std::greater<>> loads;  // of engines that have room
  for (std::size_t e = 0; whole > 0 && e < samples.size(); ++e) loads.emplace(0, e);
  for (std::int64_t i = 0; i < whole * engines; ++i) {
    const std::int64_t prompt = order[static_cast<std::size_t>(i)];
    const auto [load, engine] = loads.top();
    loads.pop();
    for (std::int64_t k = 0; k < samples_per_prompt; ++k) samples[engine].push_back(prompt * samples_per_prompt + k);
    if (std::ssize(samples[engine]) < whole * samples_per_prompt)
      loads.emplace(load + prompt_tokens[static_cast<std::size_t>(prompt)], engine);
  }
  std::size_t engine = 0;
  for (std::int64_t i = whole * engines; i < prompts; ++i)
    for (std::int64_t k = 0; k < samples_per_prompt; ++k, engine = (engine + 1) % samples.size())
      samples[engine].push_back(order[static_cast<std::size_t>(i)] * samples_per_prompt + k);
  for (auto& s : samples) std::ranges::sort(s);
  return samples;
}

}  // namespace hotbunk
