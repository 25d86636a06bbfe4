// Vector clocks: per stream, the last op known to be done. What order events make, in one comparison.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>

#include "graph/op.h"

namespace hotbunk {

/// [stream] -> index of an op; -1: none.
using Clock = std::array<std::int32_t, max_streams>;

constexpr std::size_t at(StreamId s) { return static_cast<std::size_t>(s); }

constexpr Clock clock_of(std::int32_t everywhere) {
  Clock c{};
  c.fill(everywhere);
  return c;
}
inline constexpr Clock before_all = clock_of(-1);

inline void merge(Clock& into, const Clock& from) {
  for (std::size_t s = 0; s < into.size(); ++s) into[s] = std::max(into[s], from[s]);
}

/// Whether who knows `known` knows all of `done`.
inline bool covers(const Clock& known, const Clock& done) {
  std::int32_t lacks = 0;  // without a branch: all streams at once
  for (std::size_t s = 0; s < known.size(); ++s) lacks |= known[s] < done[s] ? 1 : 0;
  return lacks == 0;
}

}  // namespace hotbunk
