#include "rl/passes.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "base/check.h"
#include "base/rng.h"
#include "layout/sequence.h"
#include "lowering/sample_rows.h"

namespace hotbunk {
namespace {

template <class T>
bool put(const std::vector<T>& values, T fill, std::span<std::byte> destination) {
  const std::size_t capacity = destination.size() / sizeof(T);
  HB_CHECK(values.size() <= capacity, "{} values for a tensor of {}", values.size(), capacity);
  if (!values.empty()) std::memcpy(destination.data(), values.data(), values.size() * sizeof(T));
  for (std::size_t i = values.size(); i < capacity; ++i)
    std::memcpy(destination.data() + i * sizeof(T), &fill, sizeof(T));
  return true;
}

/// The first `count` values.
template <class T>
bool get(std::span<const std::byte> source, std::size_t count, std::vector<T>& values) {
  HB_CHECK(source.size() >= count * sizeof(T), "{} bytes fetched for {} values", source.size(), count);
  values.resize(count);
  if (count > 0) std::memcpy(values.data(), source.data(), count * sizeof(T));
  return true;
}

}  // namespace

bool EnginePayload::feed(Slot slot, std::span<std::byte> d) const {
  switch (slot) {
    case Slot::token_ids:
      return put(token_ids, 0, d);
    case Slot::positions:
      return put(tables.positions, 0, d);
    case Slot::cu_seqlens:
      return put(tables.cu_seqlens, tables.cu_seqlens.back(), d);
    case Slot::kv_slots:
      return put(tables.kv_slots, -1, d);
    case Slot::block_tables:
      return put(tables.block_tables, 0, d);
    case Slot::context_lengths:
      return put(tables.context_lengths, 0, d);
    case Slot::last_rows:
      return put(tables.last_rows, 0, d);
    case Slot::uniforms:
      return put(uniforms, 0.0f, d);
    default:
      return false;
  }
}

bool EnginePayload::fetch(Slot slot, std::span<const std::byte> s) {
  if (slot == Slot::sampled_ids) return get(s, uniforms.size(), sampled_ids);
  if (slot == Slot::sampled_logps) return get(s, uniforms.size(), sampled_logps);
  return false;
}

bool JointPayload::feed(Slot slot, std::span<std::byte> d) const { return groups[own]->feed(slot, d); }

bool JointPayload::fetch(Slot slot, std::span<const std::byte> s) {
  const auto each = static_cast<std::size_t>(seqs) * sizeof(std::int32_t);  // ids and log-probs alike
  static_assert(sizeof(std::int32_t) == sizeof(float));
  bool taken = true;
  for (std::size_t g = 0; g < groups.size(); ++g) taken = taken && groups[g]->fetch(slot, s.subspan(g * each, each));
  return taken;
}

std::shared_ptr<Payload> joined(const std::vector<std::shared_ptr<Payload>>& groups, std::size_t own,
                                std::int64_t seqs) {
  auto out = std::make_shared<JointPayload>();
  for (const auto& g : groups) out->groups.push_back(std::dynamic_pointer_cast<EnginePayload>(g));
  out->own = own, out->seqs = seqs;
  return out;
}

bool ExchangePayload::feed(Slot slot, std::span<std::byte> d) const {
  if (slot == Slot::sample_rows) return put(rows, -1, d);
  if (slot == Slot::sample_logps) return put(logps, 0.0f, d);
  return false;
}

bool ExchangePayload::fetch(Slot slot, std::span<const std::byte> s) {
  if (slot == Slot::all_sample_rows) return get(s, s.size() / sizeof(std::int32_t), all_rows);
  if (slot == Slot::all_sample_logps) return get(s, s.size() / sizeof(float), all_logps);
  return false;
}

void MicroPayload::append(const TokenSequence& sequence, float weight, float advantage) {
  const auto length = static_cast<std::int64_t>(sequence.tokens.size());
  const std::int64_t predicted = length - std::max<std::int64_t>(sequence.prompt_tokens, 1);
  const auto of_sequence = static_cast<float>(static_cast<double>(weight) * static_cast<double>(predicted) /
                                              static_cast<double>(length * length));
  for (std::int64_t t = 0; t < length; ++t) {
    const bool predicts = t + 1 >= sequence.prompt_tokens && t + 1 < length;
    const auto response = static_cast<std::size_t>(t + 1 - sequence.prompt_tokens);
    token_ids.push_back(sequence.tokens[static_cast<std::size_t>(t)]);
    positions.push_back(static_cast<std::int32_t>(t));
    targets.push_back(predicts ? sequence.tokens[static_cast<std::size_t>(t + 1)] : -1);
    loss_weights.push_back(predicts ? weight : 0.0f);
    advantages.push_back(predicts ? advantage : 0.0f);
    old_logps.push_back(predicts && !sequence.rollout_logps.empty() ? sequence.rollout_logps[response] : 0.0f);
    sequence_ids.push_back(static_cast<std::int32_t>(cu_seqlens.size()) - 1), sequence_weights.push_back(of_sequence);
  }
  cu_seqlens.push_back(static_cast<std::int32_t>(token_ids.size()));
}

void MicroPayload::pad(std::int64_t tokens) {
  HB_CHECK(tokens == 0 || !positions.empty(), "{} tokens behind no sequence", tokens);
  for (std::int64_t i = 0; i < tokens; ++i) {
    token_ids.push_back(0), positions.push_back(positions.back() + 1), targets.push_back(-1);
    loss_weights.push_back(0.0f), advantages.push_back(0.0f), old_logps.push_back(0.0f);
    sequence_ids.push_back(-1), sequence_weights.push_back(0.0f);
  }
  cu_seqlens.back() = static_cast<std::int32_t>(token_ids.size());
}

void MicroPayload::take_chunks(std::int64_t ranks, std::int64_t rank) {
  if (ranks == 1) return;
  each_column([&](auto& values) {
    std::remove_reference_t<decltype(values)> kept;
    for (std::size_t i = 0; i + 1 < cu_seqlens.size(); ++i)
      for (const Range& chunk : zigzag_chunks(cu_seqlens[i + 1] - cu_seqlens[i], ranks, rank))
        kept.insert(kept.end(), values.begin() + cu_seqlens[i] + chunk.begin,
                    values.begin() + cu_seqlens[i] + chunk.end);
    values = std::move(kept);
  });
  for (std::int32_t& end : cu_seqlens) end /= static_cast<std::int32_t>(ranks);
}

void MicroPayload::cut(std::int64_t begin, std::int64_t end) {
  each_column([&](auto& values) {
    HB_CHECK(begin >= 0 && begin <= end && end <= std::ssize(values), "rows {} to {} of {}", begin, end, values.size());
    values.erase(values.begin() + end, values.end());
    values.erase(values.begin(), values.begin() + begin);
  });
}

bool MicroPayload::feed(Slot slot, std::span<std::byte> d) const {
  switch (slot) {
    case Slot::token_ids:
      return put(token_ids, 0, d);
    case Slot::positions:
      return put(positions, 0, d);
    case Slot::cu_seqlens:
      return put(cu_seqlens, cu_seqlens.back(), d);
    case Slot::targets:
      return put(targets, -1, d);
    case Slot::old_logps:
      return put(old_logps, 0.0f, d);
    case Slot::ref_logps:
      return put(ref_logps, 0.0f, d);
    case Slot::advantages:
      return put(advantages, 0.0f, d);
    case Slot::loss_weights:
      return put(loss_weights, 0.0f, d);
    case Slot::sequence_ids:
      return put(sequence_ids, -1, d);
    case Slot::sequence_weights:
      return put(sequence_weights, 0.0f, d);
    default:
      return false;
  }
}

bool MicroPayload::fetch(Slot slot, std::span<const std::byte> s) {
  return slot == Slot::logps && get(s, token_ids.size(), logps);
}

bool FirstMetricsPayload::feed(Slot slot, std::span<std::byte> d) const {
  return slot == Slot::first_metrics && put(metrics, 0.0f, d);
}

bool StepPayload::feed(Slot slot, std::span<std::byte> d) const {
  if (slot == Slot::stop_request)
    return put(std::vector<float>{stop_requested && stop_requested() ? 1.0f : 0.0f}, 0.0f, d);
  return slot == Slot::learning_rate &&
         put(std::vector<float>{learning_rate, static_cast<float>(optimizer_step)}, 0.0f, d);
}

bool StepPayload::fetch(Slot slot, std::span<const std::byte> s) {
  return slot == Slot::metrics && get(s, static_cast<std::size_t>(Metric::count), metrics);
}

std::shared_ptr<EnginePayload> feed_step(const Scheduler& scheduler, const ScheduledStep& step,
                                         std::span<const TokenSequence> sequences, std::int64_t seed,
                                         std::int32_t iteration, std::int64_t max_blocks) {
  auto payload = std::make_shared<EnginePayload>();
  payload->tables = scheduler.tables(step, max_blocks);
  for (const Chunk& c : step.chunks) {
    const std::int64_t sample = scheduler.requests()[static_cast<std::size_t>(c.request)].sample;
    const auto& tokens = sequences[static_cast<std::size_t>(sample)].tokens;
    payload->token_ids.insert(payload->token_ids.end(), tokens.begin() + c.first, tokens.begin() + c.first + c.count);
    const std::uint64_t counter = (static_cast<std::uint64_t>(iteration) << 32) | static_cast<std::uint64_t>(sample);
    const Philox4 words = random_words(static_cast<std::uint64_t>(seed), RngPurpose::sample, counter,
                                       static_cast<std::uint64_t>(c.first + c.count));
    payload->uniforms.push_back(uniform24(words[0]));
  }
  return payload;
}

std::vector<std::uint8_t> take_step(const Scheduler& scheduler, const ScheduledStep& step, const Args& args,
                                    std::span<TokenSequence> sequences, std::int32_t eos) {
  const auto* payload = dynamic_cast<const EnginePayload*>(args.payload.get());
  HB_CHECK(payload != nullptr && payload->sampled_ids.size() == step.chunks.size() &&
               payload->sampled_logps.size() == step.chunks.size(),
           "step {}: {} chunks, but their samples have not been fetched", args.step, step.chunks.size());
  std::vector<std::uint8_t> flags;
  for (std::size_t i = 0; i < step.chunks.size(); ++i) {
    const Chunk& c = step.chunks[i];
    flags.push_back(c.samples && payload->sampled_ids[i] == eos ? 1 : 0);
    if (!c.samples) continue;
    const std::int64_t sample = scheduler.requests()[static_cast<std::size_t>(c.request)].sample;
    TokenSequence& sequence = sequences[static_cast<std::size_t>(sample)];
    sequence.tokens.push_back(payload->sampled_ids[i]);
    sequence.rollout_logps.push_back(payload->sampled_logps[i]);
  }
  return flags;
}

void write_row(const TokenSequence& sequence, std::int64_t sample, std::span<std::int32_t> row,
               std::span<float> logps) {
  std::ranges::fill(row, -1);
  std::ranges::fill(logps, 0.0f);
  HB_CHECK(
      static_cast<std::int64_t>(sequence.tokens.size()) + row_header_ints <= static_cast<std::int64_t>(row.size()) &&
          sequence.rollout_logps.size() <= logps.size(),
      "sample {} of {} tokens does not fit its row", sample, sequence.tokens.size());
  row[0] = static_cast<std::int32_t>(sample);
  row[1] = static_cast<std::int32_t>(sequence.prompt_tokens);
  row[2] = static_cast<std::int32_t>(sequence.response_tokens());
  std::ranges::copy(sequence.tokens, row.begin() + row_header_ints);
  std::ranges::copy(sequence.rollout_logps, logps.begin());
}

std::int64_t read_row(std::span<const std::int32_t> row, std::span<const float> logps, TokenSequence& sequence) {
  if (row[0] < 0) return -1;
  const std::int64_t length = std::int64_t{row[1]} + row[2];
  HB_CHECK(row[1] >= 1 && row[2] >= 1 && length + row_header_ints <= static_cast<std::int64_t>(row.size()) &&
               row[2] <= static_cast<std::int64_t>(logps.size()),
           "row of sample {} holds {} + {} tokens", row[0], row[1], row[2]);
  sequence.prompt_tokens = row[1];
  sequence.tokens.assign(row.begin() + row_header_ints, row.begin() + row_header_ints + length);
  sequence.rollout_logps.assign(logps.begin(), logps.begin() + row[2]);
  return row[0];
}

}  // namespace hotbunk
