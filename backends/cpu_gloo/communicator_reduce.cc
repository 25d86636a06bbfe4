#include "backends/cpu_gloo/communicator_reduce.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/max.h"

namespace hotbunk {
namespace {

constexpr std::int64_t block = 2048;  // accumulators: 8 KiB, stay in L1 while the sources stream through

struct F32 {
  using Element = float;
  using Wide = float;
  static Wide widen(Element x) { return x; }
  static Element narrow(Wide x) { return x; }
};
struct Bf16 {
  using Element = bf16;
  using Wide = float;
  static Wide widen(Element x) { return to_f32(x); }
  static Element narrow(Wide x) { return to_bf16(x); }
};
struct I32 {  // unsigned inside, so that overflow wraps instead of being undefined
  using Element = std::int32_t;
  using Wide = std::uint32_t;
  static Wide widen(Element x) { return static_cast<Wide>(x); }
  static Element narrow(Wide x) { return static_cast<Element>(x); }
};

template <class T>
struct Add {
  static auto apply(typename T::Wide a, typename T::Wide b) { return a + b; }
};
template <class T>
struct Max {
  static auto apply(typename T::Wide a, typename T::Wide b) {
    if constexpr (std::is_same_v<T, I32>) return static_cast<std::int32_t>(a) < static_cast<std::int32_t>(b) ? b : a;
    else return max_or_nan(a, b);
  }
};

/// The sources in order, one pass over memory each but the first two, which are one, and the last, whose results are
/// the target's. The target may be one of the sources: elements that are read are written by the same step or later,
/// which the compiler cannot know.
template <class T, class Op>
void reduce(std::byte* dst_bytes, std::span<const std::byte* const> sources, std::int64_t count) {
  using Element = typename T::Element;
  using Wide = typename T::Wide;
  const auto source = [&](std::size_t r) { return reinterpret_cast<const Element*>(sources[r]); };
  auto* dst = reinterpret_cast<Element*>(dst_bytes);
  if (sources.size() == 1) {
    if (dst != source(0)) std::memcpy(dst, source(0), static_cast<std::size_t>(count) * sizeof(Element));
    return;
  }
  if (sources.size() == 2) {
    const Element *first = source(0), *last = source(1);
#pragma GCC ivdep
    for (std::int64_t i = 0; i < count; ++i) dst[i] = T::narrow(Op::apply(T::widen(first[i]), T::widen(last[i])));
    return;
  }
  Wide sum[block];
  for (std::int64_t begin = 0; begin < count; begin += block) {
    const std::int64_t n = std::min(block, count - begin);
    const Element *first = source(0) + begin, *second = source(1) + begin;
    for (std::int64_t i = 0; i < n; ++i) sum[i] = Op::apply(T::widen(first[i]), T::widen(second[i]));
    for (std::size_t r = 2; r + 1 < sources.size(); ++r) {
      const Element* next = source(r) + begin;
      for (std::int64_t i = 0; i < n; ++i) sum[i] = Op::apply(sum[i], T::widen(next[i]));
    }
    const Element* last = source(sources.size() - 1) + begin;
    Element* to = dst + begin;
#pragma GCC ivdep
    for (std::int64_t i = 0; i < n; ++i) to[i] = T::narrow(Op::apply(sum[i], T::widen(last[i])));
  }
}

template <class T>
void reduce_as(std::byte* dst, std::span<const std::byte* const> sources, std::int64_t count, ReduceOp op) {
  op == ReduceOp::sum ? reduce<T, Add<T>>(dst, sources, count) : reduce<T, Max<T>>(dst, sources, count);
}

}  // namespace

void reduce_in_rank_order(std::byte* dst, std::span<const std::byte* const> sources, std::int64_t count, DType dtype,
                          ReduceOp op) {
  switch (dtype) {
    case DType::f32:
      return reduce_as<F32>(dst, sources, count, op);
    case DType::bf16:
      return reduce_as<Bf16>(dst, sources, count, op);
    case DType::i32:
      return reduce_as<I32>(dst, sources, count, op);
    default:
      HB_CHECK(false, "no reduction of {}", name_of(dtype));
  }
}

}  // namespace hotbunk
