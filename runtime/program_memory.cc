#include "runtime/program_memory.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/rounding.h"
#include "trace/capacity.h"

namespace hotbunk {
namespace {

static_assert(arena_num_categories == num_categories);

void add_totals(SpaceMemory& memory, const ArenaCounters& books) {
  HB_CHECK(books.live_peak == memory.peak_bytes, "peak of live bytes: {} in all, {} over phases", books.live_peak,
           memory.peak_bytes);
  memory.at_peak = books.at_peak;
  memory.category_peaks = books.peak_by_category;
  memory.mapped_peak_bytes = books.mapped_peak;
  memory.end_live_bytes = books.live;
  memory.end_mapped_bytes = books.mapped;
}

}  // namespace

std::vector<std::int64_t> section_bases(const Program& program) {
  std::vector<std::int64_t> bases;
  std::int64_t device = 0, host = 0;
  for (const Section& s : program.sections) {
    std::int64_t& end = s.space == Space::device ? device : host;
    bases.push_back(end);
    end += round_up(s.bytes, section_alignment);
  }
  return bases;
}

ArenaExtent arena_extent(const Plan& plan, const Program& program, Space space) {
  std::int64_t bytes = 0;
  for (const Section& s : program.sections)
    if (s.space == space) bytes += round_up(s.bytes, section_alignment);
  bytes = std::max(bytes, plan.chunk_bytes);
  const std::int64_t most = mappable_bytes(plan, space);
  return {.reserve_bytes = bytes, .capacity_bytes = most < 0 ? bytes : most};
}

ProgramMemory::ProgramMemory(const Program& program, std::shared_ptr<ArenaBooks> device,
                             std::shared_ptr<ArenaBooks> host)
    : program_(program), bases_(section_bases(program)), device_(std::move(device)), host_(std::move(host)) {}

std::byte* ProgramMemory::address(SectionId section, std::int64_t offset) const {
  return arena(section).at(base(section) + offset);
}

bool ProgramMemory::is_mapped(const Buffer& b) const {
  const std::int64_t begin = base(b.section) + b.offset;
  return b.bytes() > 0 && arena(b.section).is_mapped(begin, begin + b.bytes());
}

bool ProgramMemory::is_live(const Buffer& b) const {
  return arena(b.section).is_live(base(b.section) + b.offset, b.name);
}

std::int64_t ProgramMemory::alloc(const BoundBuffer& b) {
  return arena(b.section())
      .alloc(base(b.section()) + b.offset, b.bytes(), static_cast<int>(b.category()), b.buffer->name, b.prefix);
}

std::int64_t ProgramMemory::free(const BoundBuffer& b) {
  return arena(b.section()).free(base(b.section()) + b.offset, b.bytes());
}

bool ProgramMemory::fits(const Op& op) const {
  const ArenaBooks& a = arena(op.section);
  return a.counters().mapped + op.map_end - op.map_begin <= a.capacity_bytes();
}

void ProgramMemory::map(const Op& op, std::string_view who) {
  arena(op.section).map(base(op.section) + op.map_begin, base(op.section) + op.map_end, who);
}

void ProgramMemory::unmap(const Op& op) {
  arena(op.section).unmap(base(op.section) + op.map_begin, base(op.section) + op.map_end);
}

void ProgramMemory::close_window(SpaceMemory& memory, ArenaBooks& a) {
  const ArenaCounters window = a.take_window();
  if (phase_ < 0) return;
  if (window.live_peak > memory.peak_bytes) {
    memory.peak_bytes = window.live_peak;
    memory.peak_step = step_;
    memory.peak_phase = phase_;
  }
  SpaceMemory::PhasePeak& phase = memory.phase_peaks[phase_];
  if (window.live_peak > phase.peak_bytes) {  // the first step in which it was
    phase.peak_bytes = window.live_peak;
    phase.by_category = window.at_peak;
  }
  phase.mapped_peak_bytes = std::max(phase.mapped_peak_bytes, window.mapped_peak);
}

void ProgramMemory::enter(std::int32_t step, std::int16_t phase) {
  close_window(windows_.device, *device_);
  close_window(windows_.host, *host_);
  step_ = step;
  phase_ = phase;
}

RankMemory ProgramMemory::measured() {
  enter(step_, phase_);  // the same phase goes on
  RankMemory out = windows_;
  add_totals(out.device, device_->counters());
  add_totals(out.host, host_->counters());
  return out;
}

}  // namespace hotbunk
