// Tensors of one rank as the plan sees them: a typed window into a buffer, with sizes that may be known only at run
// time.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <limits>

#include "base/dtype.h"

namespace hotbunk {

using BufferId = std::int32_t;

/// One of Plan::extents, which says what it is called and who counts it: what a dimension's actual size follows at run
/// time. Its capacity is fixed in the plan.
enum class ExtentId : std::int8_t {};
inline constexpr ExtentId fixed_extent{-1};  // none: as large as it can be
inline constexpr ExtentId tokens_extent{0};  // packed tokens of this block
inline constexpr ExtentId seqs_extent{1};    // sequences (prefill, training) or running slots (decode) of this block
inline constexpr int max_extents = 8;        // of a plan
/// How much there is of what nobody has counted: as much as there is room for.
inline constexpr std::int64_t uncounted = std::numeric_limits<std::int64_t>::max();

/// The actual sizes of one run of a block, as far as the Driver knows them. Of what the device counts it may say what
/// it expects: a simulator has nothing else to go by, and a backend looks at the count itself.
struct Sizes {
  std::int64_t tokens = 0;           // packed tokens
  std::int64_t seqs = 0;             // sequences or slots
  std::int64_t attention_pairs = 0;  // sum over query tokens of the keys each one sees
  /// Extents 2, 3, …
  std::array<std::int64_t, max_extents - 2> further = {uncounted, uncounted, uncounted,
                                                       uncounted, uncounted, uncounted};

  constexpr std::int64_t& operator[](ExtentId e) {
    return e == tokens_extent ? tokens : e == seqs_extent ? seqs : further[static_cast<std::size_t>(e) - 2];
  }
  constexpr const std::int64_t& operator[](ExtentId e) const {
    return e == tokens_extent ? tokens : e == seqs_extent ? seqs : further[static_cast<std::size_t>(e) - 2];
  }
  friend bool operator==(const Sizes&, const Sizes&) = default;
};
static_assert(Sizes{}.further.back() == uncounted, "as many as there are");

/// One dimension. Capacity `size`; the actual extent is `size` when fixed, else clamp(sizes[extent] - begin, 0, size):
/// `begin` lets a chunk of a longer dimension (say tokens 4096..8191) know how much of it is there.
struct Dim {
  std::int64_t size = 1;
  ExtentId extent = fixed_extent;
  std::int64_t begin = 0;  // >= 0

  constexpr std::int64_t actual(const Sizes& s) const {
    return extent == fixed_extent ? size : std::clamp<std::int64_t>(s[extent] - begin, 0, size);
  }
  friend bool operator==(const Dim&, const Dim&) = default;
};

/// A row-major window into a buffer: at most three dimensions.
struct Tensor {
  BufferId buffer = -1;
  std::int64_t offset_bytes = 0;  // from the buffer's start
  DType dtype = DType::f32;
  std::uint8_t rank = 0;
  std::array<Dim, 3> shape{};

  std::int64_t capacity() const {  // elements
    std::int64_t n = 1;
    for (int d = 0; d < rank; ++d) n *= shape[static_cast<std::size_t>(d)].size;
    return n;
  }
  std::int64_t elements(const Sizes& s) const {
    std::int64_t n = 1;
    for (int d = 0; d < rank; ++d) n *= shape[static_cast<std::size_t>(d)].actual(s);
    return n;
  }
  std::int64_t capacity_bytes() const { return capacity() * size_of(dtype); }
  std::int64_t bytes(const Sizes& s) const { return elements(s) * size_of(dtype); }
  friend bool operator==(const Tensor&, const Tensor&) = default;
};

}  // namespace hotbunk
