// PyTorch's CUDA caching allocator as a model: what `memory_allocated` and `memory_reserved` show for a sequence of
// allocations. Sizes and rules after c10/cuda/CUDACachingAllocator (one stream, default settings):
//   sizes are rounded up to 512 B; up to 1 MiB they come from 2 MiB segments, below 10 MiB from 20 MiB segments, larger
//   ones from a segment of their own, rounded up to 2 MiB; best fit; a rest is split off when it is at least 512 B in
//   the small pool, more than 1 MiB in the large one; neighbours that are free merge; segments stay reserved.
#pragma once
#include <cstdint>
#include <map>
#include <set>
#include <vector>

namespace hotbunk {

class CachingAllocator {
 public:
  /// A handle for free(); never reused.
  using Handle = std::int64_t;

  Handle allocate(std::int64_t bytes);
  void free(Handle);
  /// Returns whole free segments to the device, as torch.cuda.empty_cache does.
  void empty_cache();

  std::int64_t allocated_bytes() const { return allocated_; }  // rounded sizes, memory_allocated
  std::int64_t reserved_bytes() const { return reserved_; }
  std::int64_t peak_allocated_bytes() const { return peak_allocated_; }
  std::int64_t peak_reserved_bytes() const { return peak_reserved_; }

 private:
  /// A stretch of a segment: in use, or free and listed in its pool.
  struct Block {
    std::int64_t segment = 0, begin = 0, bytes = 0;
    bool small = false, used = false;
  };
  using Place = std::pair<std::int64_t, std::int64_t>;  // (segment, begin), the order of addresses
  static constexpr Place nowhere{-1, -1};
  struct FreeKey {
    std::int64_t bytes;
    Place place;
    auto operator<=>(const FreeKey&) const = default;
  };
  std::set<FreeKey>& pool(bool small) { return small ? small_ : large_; }
  void merge_with_neighbours(Place);

  std::map<Place, Block> blocks_;
  std::set<FreeKey> small_, large_;
  std::map<std::int64_t, std::int64_t> segments_;  // id -> bytes
  std::vector<Place> live_;                        // by handle; freed: nowhere
  std::int64_t next_segment_ = 0;
  std::int64_t allocated_ = 0, reserved_ = 0, peak_allocated_ = 0, peak_reserved_ = 0;
};

}  // namespace hotbunk
