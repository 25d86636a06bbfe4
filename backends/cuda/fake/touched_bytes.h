// The last tasks that touched each byte of the double's device, as disjoint intervals: what a next access must be
// behind.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace hotbunk::cuda {

/// [stream] -> the last of its tasks that is known to be done; shorter ones know nothing of later streams.
using Clock = std::vector<std::int64_t>;

void merge(Clock& into, const Clock& from);
/// Whether who knows this knows task `sequence` of a stream to be done.
inline bool knows(const Clock& clock, std::int32_t stream, std::int64_t sequence) {
  return static_cast<std::size_t>(stream) < clock.size() && clock[static_cast<std::size_t>(stream)] >= sequence;
}

class TouchedBytes {
 public:
  struct Toucher {
    std::int32_t stream = -1;  // -1: nobody
    std::int64_t sequence = 0;
    std::int32_t name = 0;
  };
  struct Conflict {
    Toucher earlier;
    std::uint64_t begin = 0, end = 0;
  };

  /// A number for a name, and back.
  std::int32_t number_of(const std::string& name);
  const std::string& name_of(std::int32_t number) const { return names_[static_cast<std::size_t>(number)]; }

  /// Notes that a task reads or writes [begin, end). Returns an access of the same bytes, one of both writing, that
  /// `known` (and the task's own stream) does not put before it.
  std::optional<Conflict> touch(std::uint64_t begin, std::uint64_t end, bool write, const Toucher&, const Clock& known);
  /// An access of these bytes that `known` does not hold to be done.
  std::optional<Conflict> pending(std::uint64_t begin, std::uint64_t end, const Clock& known) const;
  void forget(std::uint64_t begin, std::uint64_t end);
  void clear() { intervals_.clear(); }

 private:
  struct Interval {
    std::uint64_t end = 0;
    Toucher writer;
    std::vector<Toucher> readers;  // since the write, one per stream
  };
  using Intervals = std::map<std::uint64_t, Interval>;  // by begin

  /// Cuts at this byte where an interval lies across it.
  void cut(std::uint64_t at);

  Intervals intervals_;
  std::vector<std::string> names_;
  std::unordered_map<std::string, std::int32_t> numbers_;
};

}  // namespace hotbunk::cuda
