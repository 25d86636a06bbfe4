// The memory of one rank's program: an arena for the device and one for the host, with the sections one after the
// other. What the arenas book is what the run measures: nothing here counts from the plan (P1).
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "runtime/arena_books.h"
#include "runtime/op_call.h"
#include "trace/trace.h"

namespace hotbunk {

/// Addresses cost nothing, and what lies equally far from a huge page's begin in two sections changes its place in huge
/// pages too.
inline constexpr std::int64_t section_alignment = 2 << 20;

/// Where each section of a program begins in its arena.
std::vector<std::int64_t> section_bases(const Program&);

/// What a program's arena of a space has to be: bytes of addresses (at least a chunk) and the most that may be mapped.
struct ArenaExtent {
  std::int64_t reserve_bytes = 0, capacity_bytes = 0;
};
ArenaExtent arena_extent(const Plan&, const Program&, Space);

class ProgramMemory {
 public:
  /// Both arenas are as large as arena_extent says.
  ProgramMemory(const Program&, std::shared_ptr<ArenaBooks> device, std::shared_ptr<ArenaBooks> host);

  /// So many bytes from the section's base.
  std::byte* address(SectionId, std::int64_t offset) const;
  std::byte* address(const Buffer& b) const { return address(b.section, b.offset); }
  /// Whether every byte of it may be touched now; false for an empty buffer.
  bool is_mapped(const Buffer&) const;
  bool is_live(const Buffer&) const;
  /// Both return how many more bytes the arena holds live than before.
  std::int64_t alloc(const BoundBuffer&);
  std::int64_t free(const BoundBuffer&);
  /// Whether the capacity allows a map; map() enforces it.
  bool fits(const Op&) const;
  /// `who` stands in the error.
  void map(const Op&, std::string_view who);
  std::int64_t mapped_bytes(Space s) const { return arena(s).counters().mapped; }
  void unmap(const Op&);

  /// What the arenas book from here on belongs to this step and phase.
  void enter(std::int32_t step, std::int16_t phase);
  /// What the arenas' books say, up to now.
  RankMemory measured();

 private:
  void close_window(SpaceMemory&, ArenaBooks&);
  ArenaBooks& arena(Space s) const { return s == Space::device ? *device_ : *host_; }
  ArenaBooks& arena(SectionId s) const { return arena(program_.section(s).space); }
  std::int64_t base(SectionId s) const { return bases_[static_cast<std::size_t>(s)]; }

  const Program& program_;
  const std::vector<std::int64_t> bases_;
  const std::shared_ptr<ArenaBooks> device_;
  const std::shared_ptr<ArenaBooks> host_;
  std::int32_t step_ = 0;
  std::int16_t phase_ = -1;  // none yet
  RankMemory windows_;       // by phase, and where the peak was; of the windows that are closed
};

/// Where an op's tensors are.
class BoundAddresses final : public Addresses {
 public:
  BoundAddresses(const ProgramMemory& memory, const BoundOp& op) : memory_(memory), op_(op) {}
  std::byte* address(const Tensor& t) const override {
    return memory_.address(op_.buffer(t).section(), op_.begin_of(t));
  }

 private:
  const ProgramMemory& memory_;
  const BoundOp& op_;
};

}  // namespace hotbunk
