// Tensors of one rank as the plan sees them: a typed window into a buffer, with sizes that may be known only at run
// time.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>

#include "base/dtype.h"

namespace hotbunk {

using BufferId = std::int32_t;

/// What a dimension's actual size follows at run time; its capacity is fixed in the plan.
enum class Sym : std::uint8_t {
  fixed,
  tokens,  // packed tokens of this block
  seqs,    // sequences (prefill, training) or running slots (decode) of this block
};

/// The actual sizes of one run of a block.
struct Sizes {
  std::int64_t tokens = 0;           // packed tokens
  std::int64_t seqs = 0;             // sequences or slots
  std::int64_t attention_pairs = 0;  // sum over query tokens of the keys each one sees
};

/// One dimension. Capacity `size`; the actual extent is `size` when fixed, else clamp(sizes[sym] - begin, 0, size):
/// `begin` lets a chunk of a longer dimension (say tokens 4096..8191) know how much of it is there.
struct Dim {
  std::int64_t size = 1;
  Sym sym = Sym::fixed;
  std::int64_t begin = 0;

  constexpr std::int64_t actual(const Sizes& s) const {
    switch (sym) {
      case Sym::fixed:
        return size;
      case Sym::tokens:
        return std::clamp<std::int64_t>(s.tokens - begin, 0, size);
      case Sym::seqs:
        return std::clamp<std::int64_t>(s.seqs - begin, 0, size);
    }
    return size;
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
