#include "backends/cuda/fake/touched_bytes.h"

#include <algorithm>

namespace hotbunk::cuda {

void merge(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (std::size_t s = 0; s < from.size(); ++s) into[s] = std::max(into[s], from[s]);
}

std::int32_t TouchedBytes::number_of(const std::string& name) {
  const auto [it, added] = numbers_.try_emplace(name, static_cast<std::int32_t>(names_.size()));
  if (added) names_.push_back(name);
  return it->second;
}

void TouchedBytes::cut(std::uint64_t at) {
  auto it = intervals_.lower_bound(at);
  if (it == intervals_.begin()) return;
  --it;
  if (it->second.end <= at) return;
  Interval right = it->second;
  it->second.end = at;
  intervals_.emplace_hint(std::next(it), at, std::move(right));
}

std::optional<TouchedBytes::Conflict> TouchedBytes::touch(std::uint64_t begin, std::uint64_t end, bool write,
                                                          const Toucher& task, const Clock& known) {
  if (begin >= end) return {};
  std::optional<Conflict> found;
  const auto look = [&](const Toucher& earlier, std::uint64_t from, std::uint64_t to) {
    if (found || earlier.stream < 0 || earlier.stream == task.stream || knows(known, earlier.stream, earlier.sequence))
      return;
    found = {earlier, from, to};
  };
  cut(begin), cut(end);
  auto it = intervals_.lower_bound(begin);
  if (write) {
    for (auto other = it; other != intervals_.end() && other->first < end; ++other) {
      look(other->second.writer, other->first, other->second.end);
      for (const Toucher& reader : other->second.readers) look(reader, other->first, other->second.end);
    }
    while (it != intervals_.end() && it->first < end) it = intervals_.erase(it);
    intervals_.emplace_hint(it, begin, Interval{end, task, {}});
    return found;
  }
  for (std::uint64_t at = begin; at < end;) {
    if (it == intervals_.end() || it->first > at) {  // a hole: nobody touched it yet
      const std::uint64_t stop = it == intervals_.end() ? end : std::min(end, it->first);
      it = intervals_.emplace_hint(it, at, Interval{stop, {}, {}});
    }
    Interval& here = it->second;
    look(here.writer, it->first, here.end);
    const auto same = std::ranges::find(here.readers, task.stream, &Toucher::stream);
    if (same == here.readers.end()) here.readers.push_back(task);
    else *same = task;
    at = here.end;
    ++it;
  }
  return found;
}

std::optional<TouchedBytes::Conflict> TouchedBytes::pending(std::uint64_t begin, std::uint64_t end,
                                                            const Clock& known) const {
  auto it = intervals_.upper_bound(begin);
  if (it != intervals_.begin()) --it;
  for (; it != intervals_.end() && it->first < end; ++it) {
    if (it->second.end <= begin) continue;
    const auto waited_for = [&](const Toucher& t) { return t.stream < 0 || knows(known, t.stream, t.sequence); };
    if (!waited_for(it->second.writer)) return Conflict{it->second.writer, it->first, it->second.end};
    for (const Toucher& reader : it->second.readers)
      if (!waited_for(reader)) return Conflict{reader, it->first, it->second.end};
  }
  return {};
}

void TouchedBytes::forget(std::uint64_t begin, std::uint64_t end) {
  cut(begin), cut(end);
  intervals_.erase(intervals_.lower_bound(begin), intervals_.lower_bound(end));
}

}  // namespace hotbunk::cuda
