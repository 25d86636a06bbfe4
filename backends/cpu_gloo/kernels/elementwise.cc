#include "backends/cpu_gloo/kernels/elementwise.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <mutex>
#include <type_traits>
#include <vector>

#include "backends/cpu_gloo/kernels/parallel.h"
#include "backends/cpu_gloo/kernels/simd.h"
#include "base/hash.h"

namespace hotbunk::kernels {
namespace {

constexpr std::int64_t kGrain = 16384;  // elements; see rows_grain

template <class S, class D>
HB_INLINE void convert(const S* src, D* dst, std::int64_t n) {
  if constexpr (std::is_same_v<S, D>)
    std::memcpy(static_cast<void*>(dst), src, static_cast<std::size_t>(n) * sizeof(S));
  else for_vectors(n, [&](std::int64_t i, auto ld, auto st) HB_FORCE_INLINE { st(dst + i, ld(src + i)); });
}

/// The rows of all boxes as one range [0, total): so that many small boxes and few large ones split evenly.
class BoxRows {
 public:
  explicit BoxRows(std::span<const Box> boxes) : boxes_(boxes), first_(boxes.size() + 1) {
    for (std::size_t b = 0; b < boxes.size(); ++b) {
      const bool empty = boxes[b].rows <= 0 || boxes[b].cols <= 0;
      first_[b + 1] = first_[b] + (empty ? 0 : boxes[b].rows);
      elements_ += empty ? 0 : boxes[b].rows * boxes[b].cols;
    }
  }
  std::int64_t total() const { return first_.back(); }
  std::int64_t elements() const { return elements_; }
  /// f(box, row of box) for rows [begin, end) of the range.
  template <class F>
  void visit(std::int64_t begin, std::int64_t end, F&& f) const {
    auto b = static_cast<std::size_t>(std::upper_bound(first_.begin(), first_.end(), begin) - first_.begin() - 1);
    for (; begin < end; ++b)
      for (; begin < std::min(end, first_[b + 1]); ++begin) f(boxes_[b], begin - first_[b]);
  }

 private:
  std::span<const Box> boxes_;
  std::vector<std::int64_t> first_;
  std::int64_t elements_ = 0;
};

/// A single row (a flat copy) is worth splitting too: cuts wide rows into pieces of at most kGrain columns.
std::vector<Box> split_wide(std::span<const Box> boxes) {
  std::vector<Box> out;
  for (const Box& b : boxes) {
    if (b.rows > 16 || b.cols <= 2 * kGrain) {
      out.push_back(b);
      continue;
    }
    for (std::int64_t c = 0; c < b.cols; c += kGrain) {
      Box piece = b;
      piece.src_off += c;
      piece.dst_off += c;
      piece.cols = std::min(kGrain, b.cols - c);
      out.push_back(piece);
    }
  }
  return out;
}

std::int64_t box_grain(const BoxRows& rows) {
  return rows.total() == 0 ? 1 : rows_grain(std::max<std::int64_t>(1, rows.elements() / rows.total()));
}

template <class T>
bool is_nonfinite(T x) {
  if constexpr (sizeof(T) == 4) return (std::bit_cast<std::uint32_t>(x) & 0x7f800000u) == 0x7f800000u;
  else return (x.bits & 0x7f80u) == 0x7f80u;
}

}  // namespace

namespace {

/// An activation function of a gate, and its slope there.
struct Activated {
  Vf value, slope;
};
/// Those here are made of a sigmoid: argument(g) is what it is of, at(g, s) the function once that sigmoid is known.
struct Silu {
  HB_INLINE Vf argument(Vf g) const { return g; }
  HB_INLINE Activated at(Vf g, Vf s) const {
    const Vf value = g * s;
    return {value, s + value * (1.0f - s)};  // s + g·s·(1 − s)
  }
};
/// 1/2 (1 + tanh u) is the sigmoid of 2u.
struct Gelu {
  static constexpr float kTwice = 1.5957691216057308f, kCubic = 0.044715f;  // 2·√(2/π)
  HB_INLINE Vf argument(Vf g) const { return kTwice * g * (1.0f + kCubic * (g * g)); }
  HB_INLINE Activated at(Vf g, Vf s) const {
    const Vf square = g * g, value = g * s;
    return {value, s + value * (1.0f - s) * kTwice * (1.0f + 3.0f * kCubic * square)};
  }
};
/// What a limit clamps has no slope.
struct ClampedSilu {
  ClampedGate by;
  HB_INLINE Vf argument(Vf g) const { return by.alpha * min(g, splat(by.limit)); }
  HB_INLINE Activated at(Vf g, Vf s) const {
    const Vf limit = splat(by.limit), value = min(g, limit) * s;
    return {value, g > limit ? Vf{} : s + by.alpha * value * (1.0f - s)};  // s + g·alpha·s·(1 − s)
  }
};

/// What stands beside a gate, as it is.
constexpr auto as_beside = [](Vf u) HB_FORCE_INLINE { return Activated{u, splat(1.0f)}; };

constexpr int kInStep = 4;  // vectors of an activation; of one vector alone its steps wait for each other

/// The sigmoids that `function` takes at `count` vectors from `gate` on.
template <int count, class F, class E, class Load>
HB_INLINE void load_gates(const F& function, const E* gate, const Load& ld, Vf (&g)[count], Vf (&s)[count]) {
  for (int v = 0; v < count; ++v) g[v] = ld(gate + v * kLanes);
  for (int v = 0; v < count; ++v) s[v] = function.argument(g[v]);
  sigmoid_in_step(s);
}

template <class F, class G>
void gated_forward(KernelContext& ctx, ConstMatrix gate_up, Matrix act, std::int64_t T, std::int64_t i,
                   const F& function, G&& beside) {
  HB_CHECK(gate_up.dtype == act.dtype, "gated: {} to {}", name_of(gate_up.dtype), name_of(act.dtype));
  with_float_type(act.dtype, [&](auto tag) {
    using E = decltype(tag);
    parallel_for(ctx, T, rows_grain(3 * i), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t) {
        const E* gate = row<E>(gate_up, t);
        const E* up = gate + i;
        E* out = row<E>(act, t);
        for_groups_of_vectors<kInStep>(i, [&](std::int64_t j, auto count, auto ld, auto st) HB_FORCE_INLINE {
          Vf g[count], s[count];
          load_gates(function, gate + j, ld, g, s);
          for (int v = 0; v < count; ++v)
            st(out + j + v * kLanes, function.at(g[v], s[v]).value * beside(ld(up + j + v * kLanes)).value);
        });
      }
    });
  });
}

template <class F, class G>
void gated_backward(KernelContext& ctx, ConstMatrix dact, ConstMatrix gate_up, Matrix dgate_up, std::int64_t T,
                    std::int64_t i, const F& function, G&& beside) {
  HB_CHECK(gate_up.dtype == dact.dtype && gate_up.dtype == dgate_up.dtype, "gated backward: mixed dtypes");
  with_float_type(dact.dtype, [&](auto tag) {
    using E = decltype(tag);
    parallel_for(ctx, T, rows_grain(5 * i), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t) {
        const E* d = row<E>(dact, t);
        const E* gate = row<E>(gate_up, t);
        E* dgate = row<E>(dgate_up, t);
        for_groups_of_vectors<kInStep>(i, [&](std::int64_t j, auto count, auto ld, auto st) HB_FORCE_INLINE {
          Vf g[count], s[count];
          load_gates(function, gate + j, ld, g, s);
          for (int v = 0; v < count; ++v) {
            const std::int64_t at = j + v * kLanes;
            const Vf dy = ld(d + at);
            const Activated u = beside(ld(gate + i + at)), a = function.at(g[v], s[v]);
            st(dgate + at, dy * u.value * a.slope);
            st(dgate + i + at, dy * a.value * u.slope);
          }
        });
      }
    });
  });
}

}  // namespace

void swiglu_forward(KernelContext& ctx, ConstMatrix gate_up, Matrix act, std::int64_t T, std::int64_t i) {
  gated_forward(ctx, gate_up, act, T, i, Silu{}, as_beside);
}
void swiglu_backward(KernelContext& ctx, ConstMatrix dact, ConstMatrix gate_up, Matrix dgate_up, std::int64_t T,
                     std::int64_t i) {
  gated_backward(ctx, dact, gate_up, dgate_up, T, i, Silu{}, as_beside);
}
void geglu_forward(KernelContext& ctx, ConstMatrix gate_up, Matrix act, std::int64_t T, std::int64_t i) {
  gated_forward(ctx, gate_up, act, T, i, Gelu{}, as_beside);
}
void geglu_backward(KernelContext& ctx, ConstMatrix dact, ConstMatrix gate_up, Matrix dgate_up, std::int64_t T,
                    std::int64_t i) {
  gated_backward(ctx, dact, gate_up, dgate_up, T, i, Gelu{}, as_beside);
}

namespace {

HB_INLINE Activated clamped_up(Vf u, ClampedGate by) {
  const Vf limit = splat(by.limit), bent = max(min(u, limit), -limit);
  return {bent + 1.0f, u > limit ? Vf{} : u < -limit ? Vf{} : splat(1.0f)};
}

}  // namespace

void clamped_swiglu_forward(KernelContext& ctx, ConstMatrix gate_up, Matrix act, std::int64_t T, std::int64_t i,
                            ClampedGate by) {
  gated_forward(ctx, gate_up, act, T, i, ClampedSilu{by}, [by](Vf u) HB_FORCE_INLINE { return clamped_up(u, by); });
}
void clamped_swiglu_backward(KernelContext& ctx, ConstMatrix dact, ConstMatrix gate_up, Matrix dgate_up, std::int64_t T,
                             std::int64_t i, ClampedGate by) {
  gated_backward(ctx, dact, gate_up, dgate_up, T, i, ClampedSilu{by},
                 [by](Vf u) HB_FORCE_INLINE { return clamped_up(u, by); });
}

void gelu_forward(KernelContext& ctx, ConstMatrix x, Matrix y, std::int64_t T, std::int64_t i) {
  HB_CHECK(x.dtype == y.dtype, "gelu: {} to {}", name_of(x.dtype), name_of(y.dtype));
  with_float_type(x.dtype, [&](auto tag) {
    using E = decltype(tag);
    parallel_for(ctx, T, rows_grain(2 * i), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t) {
        const E* from = row<E>(x, t);
        E* to = row<E>(y, t);
        for_groups_of_vectors<kInStep>(i, [&](std::int64_t j, auto count, auto ld, auto st) HB_FORCE_INLINE {
          Vf g[count], s[count];
          load_gates(Gelu{}, from + j, ld, g, s);
          for (int v = 0; v < count; ++v) st(to + j + v * kLanes, Gelu{}.at(g[v], s[v]).value);
        });
      }
    });
  });
}
void gelu_backward(KernelContext& ctx, ConstMatrix dy, ConstMatrix x, Matrix dx, std::int64_t T, std::int64_t i) {
  HB_CHECK(x.dtype == dy.dtype && x.dtype == dx.dtype, "gelu_backward: mixed dtypes");
  with_float_type(x.dtype, [&](auto tag) {
    using E = decltype(tag);
    parallel_for(ctx, T, rows_grain(3 * i), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t) {
        const E *at = row<E>(x, t), *d = row<E>(dy, t);
        E* to = row<E>(dx, t);
        for_groups_of_vectors<kInStep>(i, [&](std::int64_t j, auto count, auto ld, auto st) HB_FORCE_INLINE {
          Vf g[count], s[count];
          load_gates(Gelu{}, at + j, ld, g, s);
          for (int v = 0; v < count; ++v) st(to + j + v * kLanes, ld(d + j + v * kLanes) * Gelu{}.at(g[v], s[v]).slope);
        });
      }
    });
  });
}

void softcap(KernelContext& ctx, float* x, std::int64_t n, float cap) {
  const float inverse = 1.0f / cap;
  parallel_for(ctx, n, kGrain, [&](std::int64_t begin, std::int64_t end) {
    for_vectors(end - begin, [&](std::int64_t j, auto ld, auto st)
                                 HB_FORCE_INLINE { st(x + begin + j, cap * tanh(ld(x + begin + j) * inverse)); });
  });
}

void add(KernelContext& ctx, Matrix dst, ConstMatrix src, std::int64_t rows, std::int64_t cols) {
  if (dst.ld == cols && src.ld == cols && rows > 0) {  // dense: as one long row, cut below
    const std::int64_t n = rows * cols;
    rows = (n + kGrain - 1) / kGrain;
    with_float_type(dst.dtype, [&](auto d_tag) {
      with_float_type(src.dtype, [&](auto s_tag) {
        auto* d = static_cast<decltype(d_tag)*>(dst.data);
        const auto* s = static_cast<const decltype(s_tag)*>(src.data);
        parallel_for(ctx, rows, 1, [&](std::int64_t begin, std::int64_t end) {
          const std::int64_t first = begin * kGrain;
          for_vectors(std::min(n, end * kGrain) - first, [&](std::int64_t i, auto ld, auto st) HB_FORCE_INLINE {
            st(d + first + i, ld(d + first + i) + ld(s + first + i));
          });
        });
      });
    });
    return;
  }
  with_float_type(dst.dtype, [&](auto d_tag) {
    with_float_type(src.dtype, [&](auto s_tag) {
      parallel_for(ctx, rows, rows_grain(cols), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t r = begin; r < end; ++r) {
          auto* d = row<decltype(d_tag)>(dst, r);
          const auto* s = row<decltype(s_tag)>(src, r);
          for_vectors(cols,
                      [&](std::int64_t c, auto ld, auto st) HB_FORCE_INLINE { st(d + c, ld(d + c) + ld(s + c)); });
        }
      });
    });
  });
}

void add_bias(KernelContext& ctx, Matrix dst, ConstVector bias, std::int64_t rows, std::int64_t cols) {
  add(ctx, dst, {bias.data, bias.dtype, 0}, rows, cols);  // a matrix whose rows are all the same
}

void scale(KernelContext& ctx, void* data, DType dtype, std::int64_t n, float factor) {
  with_float_type(dtype, [&](auto tag) {
    auto* x = static_cast<decltype(tag)*>(data);
    parallel_for(ctx, n, kGrain, [&](std::int64_t begin, std::int64_t end) {
      auto* p = x + begin;
      for_vectors(end - begin,
                  [&](std::int64_t i, auto ld, auto st) HB_FORCE_INLINE { st(p + i, ld(p + i) * factor); });
    });
  });
}

void zero(KernelContext& ctx, void* data, std::int64_t bytes) {
  parallel_for(ctx, bytes, 4 * kGrain, [&](std::int64_t begin, std::int64_t end) {
    std::memset(static_cast<char*>(data) + begin, 0, static_cast<std::size_t>(end - begin));
  });
}

void copy(KernelContext& ctx, const void* src, void* dst, std::int64_t bytes) {
  parallel_for(ctx, bytes, 4 * kGrain, [&](std::int64_t begin, std::int64_t end) {
    std::memcpy(static_cast<char*>(dst) + begin, static_cast<const char*>(src) + begin,
                static_cast<std::size_t>(end - begin));
  });
}

void cast(KernelContext& ctx, ConstVector src, void* dst, DType dst_dtype, std::int64_t n) {
  if (src.dtype == dst_dtype) return copy(ctx, src.data, dst, n * size_of(dst_dtype));
  with_float_type(src.dtype, [&](auto s_tag) {
    with_float_type(dst_dtype, [&](auto d_tag) {
      const auto* s = static_cast<const decltype(s_tag)*>(src.data);
      auto* d = static_cast<decltype(d_tag)*>(dst);
      parallel_for(ctx, n, kGrain,
                   [&](std::int64_t begin, std::int64_t end) { convert(s + begin, d + begin, end - begin); });
    });
  });
}

void copy_boxes(KernelContext& ctx, ConstVector src, void* dst, DType dst_dtype, std::span<const Box> boxes) {
  const std::vector<Box> pieces = split_wide(boxes);
  const BoxRows rows(pieces);
  if (src.dtype == dst_dtype) {
    const std::int64_t size = size_of(dst_dtype);
    parallel_for(ctx, rows.total(), box_grain(rows), [&](std::int64_t begin, std::int64_t end) {
      rows.visit(begin, end, [&](const Box& b, std::int64_t r) {
        std::memcpy(static_cast<char*>(dst) + (b.dst_off + r * b.dst_pitch) * size,
                    static_cast<const char*>(src.data) + (b.src_off + r * b.src_pitch) * size,
                    static_cast<std::size_t>(b.cols * size));
      });
    });
    return;
  }
  with_float_type(src.dtype, [&](auto s_tag) {
    with_float_type(dst_dtype, [&](auto d_tag) {
      const auto* s = static_cast<const decltype(s_tag)*>(src.data);
      auto* d = static_cast<decltype(d_tag)*>(dst);
      parallel_for(ctx, rows.total(), box_grain(rows), [&](std::int64_t begin, std::int64_t end) {
        rows.visit(begin, end, [&](const Box& b, std::int64_t r) {
          convert(s + b.src_off + r * b.src_pitch, d + b.dst_off + r * b.dst_pitch, b.cols);
        });
      });
    });
  });
}

std::uint64_t hash_boxes(KernelContext& ctx, ConstVector src, DType as, std::span<const Box> boxes) {
  const std::vector<Box> pieces = split_wide(boxes);
  const BoxRows rows(pieces);
  std::uint64_t sum = 0;
  with_float_type(src.dtype, [&](auto s_tag) {
    with_float_type(as, [&](auto d_tag) {
      using S = decltype(s_tag);
      using D = decltype(d_tag);
      using Bits = std::conditional_t<sizeof(D) == 4, std::uint32_t, std::uint16_t>;
      const auto* s = static_cast<const S*>(src.data);
      parallel_for(ctx, rows.total(), box_grain(rows), [&](std::int64_t begin, std::int64_t end) {
        std::uint64_t mine = 0;
        rows.visit(begin, end, [&](const Box& b, std::int64_t r) {
          const S* sr = s + b.src_off + r * b.src_pitch;
          const auto first = static_cast<std::uint64_t>(b.dst_off + r * b.dst_pitch);
          for (std::int64_t c = 0; c < b.cols; ++c) {
            D element;
            // The same dtype is taken as it is: widening and narrowing again would quiet NaNs.
            if constexpr (std::is_same_v<D, S>) element = sr[c];
            else element = from_f32<D>(as_f32(sr[c]));
            mine += element_hash(first + static_cast<std::uint64_t>(c), std::bit_cast<Bits>(element));
          }
        });
#pragma omp atomic
        sum += mine;
      });
    });
  });
  return sum;
}

NonFinite find_nonfinite(KernelContext& ctx, ConstVector x, std::int64_t n) {
  NonFinite found;
  std::mutex merging;
  with_float_type(x.dtype, [&](auto tag) {
    const auto* p = static_cast<const decltype(tag)*>(x.data);
    parallel_for(ctx, n, kGrain, [&](std::int64_t begin, std::int64_t end) {
      NonFinite mine;
      for (std::int64_t i = begin; i < end; ++i) mine.count += is_nonfinite(p[i]);
      if (mine.count == 0) return;
      mine.first = begin;
      while (!is_nonfinite(p[mine.first])) ++mine.first;
      const std::lock_guard lock(merging);
      found.first = found.count == 0 ? mine.first : std::min(found.first, mine.first);
      found.count += mine.count;
    });
  });
  return found;
}

}  // namespace hotbunk::kernels
