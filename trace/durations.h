// How long something took, over and over, in bounded memory: exact number, sum and extremes; quantiles to 1.1 %.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>

namespace hotbunk {

struct Durations {
  static constexpr double per_octave = 32.0;  // classes of the counts: quantiles are right to 2^(1/64) - 1 = 1.1 %

  std::int64_t times = 0, total_ns = 0, shortest_ns = 0, longest_ns = 0;
  std::int32_t longest_step = 0;
  std::map<std::int32_t, std::int64_t> counts;  // by class: 0 is no time at all, then 1 + floor(32 log2 ns)

  void add(std::int64_t ns, std::int32_t step) {
    shortest_ns = times == 0 ? ns : std::min(shortest_ns, ns);
    if (times == 0 || ns > longest_ns) longest_ns = ns, longest_step = step;
    ++times, total_ns += ns;
    ++counts[class_of(ns)];
  }
  /// Of another rank, say.
  void add(const Durations& other) {
    if (other.times == 0) return;
    shortest_ns = times == 0 ? other.shortest_ns : std::min(shortest_ns, other.shortest_ns);
    if (times == 0 || other.longest_ns > longest_ns) longest_ns = other.longest_ns, longest_step = other.longest_step;
    times += other.times, total_ns += other.total_ns;
    for (const auto& [which, count] : other.counts) counts[which] += count;
  }
  /// The time that a share q of all do not exceed; within [shortest, longest].
  double quantile_ns(double q) const {
    const auto rank = std::max<std::int64_t>(1, static_cast<std::int64_t>(std::ceil(q * static_cast<double>(times))));
    std::int64_t seen = 0;
    for (const auto& [which, count] : counts)
      if ((seen += count) >= rank)
        return std::clamp(which == 0 ? 0.0 : std::exp2((which - 0.5) / per_octave), static_cast<double>(shortest_ns),
                          static_cast<double>(longest_ns));
    return 0.0;
  }

  friend bool operator==(const Durations&, const Durations&) = default;

 private:
  static std::int32_t class_of(std::int64_t ns) {
    return ns <= 0 ? 0 : 1 + static_cast<std::int32_t>(std::floor(per_octave * std::log2(static_cast<double>(ns))));
  }
};

}  // namespace hotbunk
