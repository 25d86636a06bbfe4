#include "planner/allocator/caching_allocator.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/check.h"

namespace hotbunk {
namespace {

constexpr std::int64_t min_block = 512, small_limit = 1 << 20, small_segment = 2 << 20, mid_limit = 10 << 20,
                       mid_segment = 20 << 20, large_round = 2 << 20;

std::int64_t round_to(std::int64_t n, std::int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

std::int64_t segment_size(std::int64_t bytes) {
  if (bytes <= small_limit) return small_segment;
  return bytes < mid_limit ? mid_segment : round_to(bytes, large_round);
}

}  // namespace

CachingAllocator::Handle CachingAllocator::allocate(std::int64_t asked) {
  HB_CHECK(asked >= 0, "allocation of {} bytes", asked);
  const std::int64_t bytes = std::max(min_block, round_to(asked, min_block));
  const bool small = bytes <= small_limit;
  auto& free_blocks = pool(small);
  auto fit = free_blocks.lower_bound({bytes, {-1, -1}});
  Place place;
  if (fit != free_blocks.end()) {
    place = fit->place;
    free_blocks.erase(fit);
  } else {
    const std::int64_t size = segment_size(bytes);
    place = {next_segment_, 0};
    blocks_[place] = {next_segment_, 0, size, small, false};
    segments_[next_segment_++] = size;
    reserved_ += size;
    peak_reserved_ = std::max(peak_reserved_, reserved_);
  }
  Block& block = blocks_[place];
  const std::int64_t rest = block.bytes - bytes;
  if (small ? rest >= min_block : rest > small_limit) {
    const Place after{block.segment, block.begin + bytes};
    blocks_[after] = {block.segment, after.second, rest, small, false};
    free_blocks.insert({rest, after});
    block.bytes = bytes;
  }
  block.used = true;
  allocated_ += block.bytes;
  peak_allocated_ = std::max(peak_allocated_, allocated_);
  live_.push_back(place);
  return std::ssize(live_) - 1;
}

void CachingAllocator::free(Handle handle) {
  HB_CHECK(handle >= 0 && handle < std::ssize(live_) && live_[static_cast<std::size_t>(handle)] != nowhere,
           "handle {} is not allocated", handle);
  const Place place = std::exchange(live_[static_cast<std::size_t>(handle)], nowhere);
  Block& block = blocks_[place];
  block.used = false;
  allocated_ -= block.bytes;
  merge_with_neighbours(place);
}

void CachingAllocator::merge_with_neighbours(Place place) {
  auto at = blocks_.find(place);
  auto& free_blocks = pool(at->second.small);
  if (auto next = std::next(at);
      next != blocks_.end() && next->second.segment == at->second.segment && !next->second.used) {
    free_blocks.erase({next->second.bytes, next->first});
    at->second.bytes += next->second.bytes;
    blocks_.erase(next);
  }
  if (at != blocks_.begin()) {
    auto before = std::prev(at);
    if (before->second.segment == at->second.segment && !before->second.used) {
      free_blocks.erase({before->second.bytes, before->first});
      before->second.bytes += at->second.bytes;
      blocks_.erase(at);
      at = before;
    }
  }
  free_blocks.insert({at->second.bytes, at->first});
}

void CachingAllocator::empty_cache() {
  for (auto at = segments_.begin(); at != segments_.end();) {
    const Place whole{at->first, 0};
    const Block& block = blocks_[whole];
    if (block.used || block.bytes != at->second) {
      ++at;
      continue;
    }
    pool(block.small).erase({block.bytes, whole});
    reserved_ -= at->second;
    blocks_.erase(whole);
    at = segments_.erase(at);
  }
}

}  // namespace hotbunk
