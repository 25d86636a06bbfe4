#include "trace/merge.h"

#include <algorithm>
#include <tuple>
#include <unordered_map>

#include "base/check.h"
#include "trace/folds.h"

namespace hotbunk {
namespace {

/// Adds b's rows to a where a has none for that rank; both having some means two processes played one rank.
template <class Row>
void take_ranks(std::vector<Row>& a, const std::vector<Row>& b, const char* what) {
  a.resize(std::max(a.size(), b.size()));
  for (std::size_t r = 0; r < b.size(); ++r) {
    if (b[r] == Row{}) continue;
    HB_CHECK(a[r] == Row{}, "two traces have {} of rank {}", what, r);
    a[r] = b[r];
  }
}

void take_metrics(std::vector<StepMetrics>& a, const std::vector<StepMetrics>& b) {
  for (const StepMetrics& m : b) {
    const auto same = std::find_if(a.begin(), a.end(), [&](const StepMetrics& x) { return x.step == m.step; });
    if (same == a.end()) a.push_back(m);
    else same->values.insert(m.values.begin(), m.values.end());  // what is there stays
  }
}

}  // namespace

Trace merge_traces(std::span<const Trace> parts) {
  Trace all;
  if (!parts.empty()) all.source = parts.front().source, all.streams = parts.front().streams;
  std::unordered_map<std::string, std::int32_t> numbers;
  for (const Trace& part : parts) {
    std::vector<std::int32_t> renumbered;
    for (const std::string& name : part.names) {
      const auto [it, is_new] = numbers.try_emplace(name, static_cast<std::int32_t>(all.names.size()));
      if (is_new) all.names.push_back(name);
      renumbered.push_back(it->second);
    }
    const auto join = [&](auto& to, const auto& from) {
      for (auto row : from) {
        HB_CHECK(row.name >= 0 && row.name < std::ssize(renumbered), "a row of rank {} has name {} of {}", row.rank,
                 row.name, renumbered.size());
        row.name = renumbered[static_cast<std::size_t>(row.name)];
        to.push_back(row);
      }
    };
    join(all.spans, part.spans);
    join(all.memory_events, part.memory_events);
    all.phases.insert(all.phases.end(), part.phases.begin(), part.phases.end());
    all.phase_totals.insert(all.phase_totals.end(), part.phase_totals.begin(), part.phase_totals.end());
    take_ranks(all.memory, part.memory, "memory");
    take_ranks(all.traffic, part.traffic, "traffic");
    take_ranks(all.traffic_totals, part.traffic_totals, "traffic totals");
    take_metrics(all.metrics, part.metrics);
    if (all.trained_tokens == 0) all.trained_tokens = part.trained_tokens;
    if (all.model_flops == 0.0) all.model_flops = part.model_flops;
  }
  const auto by_rank_and_start = [](const auto& a, const auto& b) {
    return std::tie(a.rank, a.start_ns) < std::tie(b.rank, b.start_ns);
  };
  std::stable_sort(all.spans.begin(), all.spans.end(), by_rank_and_start);
  drop_partial_steps(all);
  std::stable_sort(all.phases.begin(), all.phases.end(), by_rank_and_start);
  std::stable_sort(all.phase_totals.begin(), all.phase_totals.end(),
                   [](const PhaseTotal& a, const PhaseTotal& b) { return a.rank < b.rank; });
  // Memory events stay in program order of their rank: that order is what live bytes are the sum over.
  std::stable_sort(all.memory_events.begin(), all.memory_events.end(),
                   [](const MemoryEvent& a, const MemoryEvent& b) { return a.rank < b.rank; });
  std::sort(all.metrics.begin(), all.metrics.end(),
            [](const StepMetrics& a, const StepMetrics& b) { return a.step < b.step; });
  return all;
}

Trace merge_traces(std::span<const std::string> packed) {
  std::vector<Trace> parts;
  for (std::size_t rank = 0; rank < packed.size(); ++rank) {
    try {
      parts.push_back(unpack_trace(packed[rank]));
    } catch (const InternalError& e) {
      throw InternalError(fmt::format("the trace of rank {}: {}", rank, e.what()));
    }
  }
  return merge_traces(parts);
}

}  // namespace hotbunk
