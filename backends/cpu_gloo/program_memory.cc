#include "backends/cpu_gloo/program_memory.h"

#include <algorithm>
#include <string>

namespace hotbunk {
namespace {

std::int64_t space_bytes(const Program& p, Space space) {
  std::int64_t bytes = 0;
  for (int s = 0; s < num_sections; ++s)
    if (space_of(static_cast<Section>(s)) == space) bytes += p.section_bytes[static_cast<std::size_t>(s)];
  return std::max<std::int64_t>(bytes, arena_chunk_bytes);
}

ArenaOptions arena_options(const Plan& plan, const Program& program, Space space, bool shared) {
  ArenaOptions o;
  o.name = std::string(name_of(space));
  o.reserve_bytes = space_bytes(program, space);
  const std::int64_t capacity =
      space == Space::device ? plan.device_capacity_bytes - plan.overhead_bytes : plan.host_capacity_bytes;
  o.capacity_bytes = capacity > 0 ? capacity : o.reserve_bytes;
  o.shared = shared;
  return o;
}

}  // namespace

std::array<std::int64_t, num_sections> section_bases(const Program& program) {
  std::array<std::int64_t, num_sections> bases{};
  std::int64_t device = 0, host = 0;
  for (int s = 0; s < num_sections; ++s) {
    std::int64_t& end = space_of(static_cast<Section>(s)) == Space::device ? device : host;
    bases[static_cast<std::size_t>(s)] = end;
    end += program.section_bytes[static_cast<std::size_t>(s)];
  }
  return bases;
}

ProgramMemory::ProgramMemory(const Plan& plan, const Program& program, bool shared)
    : program_(program),
      bases_(section_bases(program)),
      device_(std::make_shared<Arena>(arena_options(plan, program, Space::device, shared))),
      host_(std::make_unique<Arena>(arena_options(plan, program, Space::host, false))) {}

std::byte* ProgramMemory::address(const Buffer& b) const { return arena(b.section).at(base(b.section) + b.offset); }

std::byte* ProgramMemory::address(const Tensor& t) const {
  return address(program_.buffers[static_cast<std::size_t>(t.buffer)]) + t.offset_bytes;
}

bool ProgramMemory::is_mapped(const Buffer& b) const { return device_->counters().mapped > 0 && b.bytes() > 0; }

void ProgramMemory::alloc(const Buffer& b) {
  arena(b.section).alloc(base(b.section) + b.offset, b.bytes(), static_cast<int>(b.category), b.name);
}

void ProgramMemory::free(const Buffer& b) { arena(b.section).free(base(b.section) + b.offset, b.bytes()); }

void ProgramMemory::poison(const Buffer& b) { arena(b.section).poison(base(b.section) + b.offset, b.bytes()); }

std::int64_t ProgramMemory::map(const Op& op, std::string_view who) {
  Arena& a = arena(op.section);
  const std::int64_t before = a.counters().mapped;
  a.map(base(op.section) + op.map_begin, base(op.section) + op.map_end, who);
  return a.counters().mapped - before;
}

std::int64_t ProgramMemory::unmap(const Op& op) {
  Arena& a = arena(op.section);
  const std::int64_t before = a.counters().mapped;
  a.unmap(base(op.section) + op.map_begin, base(op.section) + op.map_end);
  return a.counters().mapped - before;
}

}  // namespace hotbunk
