#include "trace/meter.h"

#include <algorithm>
#include <numeric>

namespace hotbunk {

void MemoryMeter::enter(std::int32_t step, std::int16_t phase) {
  step_ = step;
  phase_ = phase;
  for (Side* s : {&device_, &host_}) {
    s->phase = &s->memory.phase_peaks[phase];  // map nodes are stable
    note_peak(*s);
    s->phase->mapped_peak_bytes = std::max(s->phase->mapped_peak_bytes, s->mapped);
  }
}

void MemoryMeter::note_peak(Side& s) {
  if (s.live_total > s.memory.peak_bytes) {
    s.memory.peak_bytes = s.live_total;
    s.memory.at_peak = s.live;
    s.memory.peak_step = step_;
    s.memory.peak_phase = phase_;
  }
  if (s.phase && s.live_total > s.phase->peak_bytes) {
    s.phase->peak_bytes = s.live_total;
    s.phase->by_category = s.live;
  }
}

void MemoryMeter::add_live(Space space, Category category, std::int64_t delta_bytes) {
  Side& s = side(space);
  std::int64_t& live = s.live[static_cast<std::size_t>(category)];
  live += delta_bytes;
  s.live_total += delta_bytes;
  std::int64_t& peak = s.memory.category_peaks[static_cast<std::size_t>(category)];
  peak = std::max(peak, live);
  if (delta_bytes > 0) note_peak(s);
}

void LiveProfile::add(Space space, Category category, std::int64_t delta_bytes) {
  Side& s = side(space);
  const auto c = static_cast<std::size_t>(category);
  s.net[c] += delta_bytes;
  s.category_peaks[c] = std::max(s.category_peaks[c], s.net[c]);
  const std::int64_t total = std::accumulate(s.net.begin(), s.net.end(), std::int64_t{0});
  if (total > s.peak_bytes) s.peak_bytes = total, s.at_peak = s.net;
}

void MemoryMeter::add_live(const LiveProfile& profile) {
  for (const Space space : {Space::device, Space::host}) {
    const LiveProfile::Side& change = profile.side(space);
    if (!change.changes()) continue;
    Side& s = side(space);
    const CategoryBytes before = s.live;
    const std::int64_t total_before = s.live_total;
    for (std::size_t c = 0; c < before.size(); ++c) {
      std::int64_t& peak = s.memory.category_peaks[c];
      peak = std::max(peak, before[c] + change.category_peaks[c]);
    }
    if (change.peak_bytes > 0) {
      for (std::size_t c = 0; c < before.size(); ++c) s.live[c] = before[c] + change.at_peak[c];
      s.live_total = total_before + change.peak_bytes;
      note_peak(s);
    }
    s.live_total = total_before;
    for (std::size_t c = 0; c < before.size(); ++c)
      s.live[c] = before[c] + change.net[c], s.live_total += change.net[c];
  }
}

void MemoryMeter::add_mapped(Space space, std::int64_t delta_bytes) {
  Side& s = side(space);
  s.mapped += delta_bytes;
  s.memory.mapped_peak_bytes = std::max(s.memory.mapped_peak_bytes, s.mapped);
  if (s.phase) s.phase->mapped_peak_bytes = std::max(s.phase->mapped_peak_bytes, s.mapped);
}

RankMemory MemoryMeter::result() const {
  RankMemory out{device_.memory, host_.memory};
  out.device.end_live_bytes = device_.live_total;
  out.device.end_mapped_bytes = device_.mapped;
  out.host.end_live_bytes = host_.live_total;
  out.host.end_mapped_bytes = host_.mapped;
  return out;
}

}  // namespace hotbunk
