#include "exec/batching.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>

namespace hotbunk {
namespace {

Status check(std::span<const std::int64_t> tokens, const BatchConfig& c) {
  const std::int64_t settings = std::min({c.ranks, c.mini_batches, c.micro_batch_tokens, c.max_seqs});
  if (settings < 1)
    return fail(
        {.code = "E312",
         .message = fmt::format("training batches need at least 1 of everything, not {} ranks, {} mini-batches, "
                                "{} tokens and {} sequences per micro-batch",
                                c.ranks, c.mini_batches, c.micro_batch_tokens, c.max_seqs),
         .where = {},
         .notes = {},
         .help = {}});
  const auto samples = static_cast<std::int64_t>(tokens.size());
  if (c.mini_batches > samples)
    return fail({.code = "E312",
                 .message = fmt::format("{} samples cannot be cut into {} mini-batches", samples, c.mini_batches),
                 .where = {},
                 .notes = {},
                 .help = "lower algorithm.mini_batches"});
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 1)
      return fail({.code = "E312",
                   .message = fmt::format("sample {} has {} tokens", i, tokens[i]),
                   .where = {},
                   .notes = {},
                   .help = {}});
    if (tokens[i] > c.micro_batch_tokens)
      return fail(
          {.code = "E312",
           .message = fmt::format("sample {} does not fit a micro-batch", i),
           .where = {},
           .notes = {fmt::format("it has {} tokens, train.micro_batch_tokens is {}", tokens[i], c.micro_batch_tokens)},
           .help = fmt::format("set train.micro_batch_tokens to at least {}", tokens[i])});
  }
  return {};
}

/// Samples [begin, end), longest first, ties by index.
std::vector<std::int64_t> longest_first(std::span<const std::int64_t> tokens, std::int64_t begin, std::int64_t end) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(end - begin));
  std::iota(order.begin(), order.end(), begin);
  std::ranges::stable_sort(order, std::greater{}, [&](std::int64_t i) { return tokens[static_cast<std::size_t>(i)]; });
  return order;
}

void pack(std::vector<MicroBatch>& batches, std::int64_t sample, std::int64_t tokens, const BatchConfig& c) {
  auto fit = std::ranges::find_if(batches, [&](const MicroBatch& m) {
    return m.sizes.tokens + tokens <= c.micro_batch_tokens && m.sizes.seqs < c.max_seqs;
  });
  if (fit == batches.end()) fit = batches.emplace(batches.end());
  fit->samples.push_back(sample);
  fit->sizes.tokens += tokens;
  fit->sizes.seqs += 1;
  fit->sizes.attention_pairs += tokens * (tokens + 1) / 2;
}

}  // namespace

Result<std::vector<MiniBatch>> make_mini_batches(std::span<const std::int64_t> tokens, const BatchConfig& c) {
  if (Status ok = check(tokens, c); !ok) return fail(std::move(ok.error()));
  const auto samples = static_cast<std::int64_t>(tokens.size());
  std::vector<MiniBatch> mini_batches;
  for (std::int64_t m = 0; m < c.mini_batches; ++m) {
    // Split as evenly as integers allow: none is empty, since there are at least as many samples as mini-batches.
    MiniBatch mini{.first_sample = samples * m / c.mini_batches,
                   .end_sample = samples * (m + 1) / c.mini_batches,
                   .ranks = std::vector<std::vector<MicroBatch>>(static_cast<std::size_t>(c.ranks))};
    using Load = std::pair<std::int64_t, std::size_t>;  // tokens, rank: the least first, ties to the lower rank
    std::priority_queue<Load, std::vector<Load>, std::greater<>> loads;
    for (std::size_t rank = 0; rank < mini.ranks.size(); ++rank) loads.emplace(0, rank);
    for (std::int64_t sample : longest_first(tokens, mini.first_sample, mini.end_sample)) {
      const auto [load, rank] = loads.top();
      const std::int64_t length = tokens[static_cast<std::size_t>(sample)];
      loads.pop();
      loads.emplace(load + length, rank);
      pack(mini.ranks[rank], sample, length, c);
    }
    std::size_t most = 0;
    for (const auto& batches : mini.ranks) most = std::max(most, batches.size());
    for (auto& batches : mini.ranks) {
      for (MicroBatch& batch : batches) std::ranges::sort(batch.samples);
      batches.resize(most);
    }
    mini_batches.push_back(std::move(mini));
  }
  return mini_batches;
}

}  // namespace hotbunk
