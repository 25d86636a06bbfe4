// The books of one rank's arenas: what is live and what is mapped, in program order, as the executing arena keeps them.
#pragma once
#include <cstdint>
#include <map>
#include <vector>

#include "base/diagnostic.h"
#include "graph/bound.h"
#include "sim/block_memory.h"
#include "trace/meter.h"

namespace hotbunk {

class MemoryBook {
 public:
  /// enforce_capacity: mapping beyond the plan's capacity fails (E301), as it does in the executing backend.
  MemoryBook(const Plan&, Rank, bool enforce_capacity);

  void enter(std::int32_t step, std::int16_t phase);
  /// Internal fault when the buffer is live already or lies on bytes that are not mapped.
  void alloc(const BoundOp&, const BoundBuffer&);
  /// Internal fault unless live.
  void free(const BoundOp&, const BoundBuffer&);
  /// Internal fault when a byte is mapped already; E301 with the arithmetic when the capacity does not allow it.
  Status map(const BoundOp&);
  /// Internal fault when a byte is not mapped or a live buffer lies on it.
  void unmap(const BoundOp&);
  /// All of a block that maps nothing. Internal fault when a buffer that it leaves live was live, or one that it frees
  /// was not; what happens inside of it the verifier has proved.
  void play(const BlockMemory&);
  RankMemory result() const { return meter_.result(); }

 private:
  using Ranges = std::map<std::int64_t, std::int64_t>;  // begin -> end, disjoint, neighbours merged

  Ranges& ranges(SectionId s) { return mapped_[static_cast<std::size_t>(s)]; }
  std::string at(const BoundOp&) const;
  void check_range(const BoundOp&) const;

  const Plan& plan_;
  const Program& program_;
  Rank rank_;
  bool enforce_capacity_;
  std::int32_t step_ = 0;
  std::int16_t phase_ = -1;
  MemoryMeter meter_;
  std::vector<bool> live_;           // by buffer
  std::vector<BoundBuffer> locals_;  // alive: few at a time
  std::vector<Ranges> mapped_;
};

}  // namespace hotbunk
