// Vectors of fp32 in GCC's and clang's portable vector extension: the widest the build's instruction set has, with the
// same source everywhere. Internal to the kernels.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "base/dtype.h"

namespace hotbunk::kernels {

#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
#else
inline constexpr int kLanes = 8;
#endif

using Vf = float __attribute__((vector_size(4 * kLanes)));
using Vi = std::int32_t __attribute__((vector_size(4 * kLanes)));
using Vu = std::uint32_t __attribute__((vector_size(4 * kLanes)));
using Vh = std::uint16_t __attribute__((vector_size(2 * kLanes)));

#define HB_INLINE inline __attribute__((always_inline))
#define HB_FORCE_INLINE __attribute__((always_inline))

/// x − 0 is x for every x (x + 0 is not, for −0), so that this compiles to one broadcast.
HB_INLINE Vf splat(float x) { return x - Vf{}; }

HB_INLINE Vf widen(Vh bits) {
#if defined(__AVX512F__)  // GCC 12 makes two halves of it, and puts them together
  return std::bit_cast<Vf>(std::bit_cast<Vu>(_mm512_maskz_cvtepu16_epi32(0xffff, std::bit_cast<__m256i>(bits))) << 16);
#elif defined(__AVX2__)
  return std::bit_cast<Vf>(std::bit_cast<Vu>(_mm256_cvtepu16_epi32(std::bit_cast<__m128i>(bits))) << 16);
#else
  return std::bit_cast<Vf>(__builtin_convertvector(bits, Vu) << 16);
#endif
}
/// to_bf16 of every lane.
HB_INLINE Vh narrow(Vf x) {
  const Vu u = std::bit_cast<Vu>(x);
  const Vu rounded = u + 0x7fffu + ((u >> 16) & 1u), quiet = u | 0x400000u;
  const Vu high = (x != x ? quiet : rounded) >> 16;
#if defined(__AVX2__) && !defined(__AVX512F__)  // GCC 12 masks what the shift has cleared, and packs across halves
  const auto halves = std::bit_cast<__m256i>(high);
  return std::bit_cast<Vh>(_mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
#else
  return __builtin_convertvector(high, Vh);
#endif
}

HB_INLINE Vf load(const float* p) {
  Vf v;
  std::memcpy(&v, static_cast<const void*>(p), sizeof v);
  return v;
}
HB_INLINE Vf load(const bf16* p) {
  Vh v;
  std::memcpy(&v, static_cast<const void*>(p), sizeof v);
  return widen(v);
}
HB_INLINE void store(float* p, Vf v) { std::memcpy(p, &v, sizeof v); }
HB_INLINE void store(bf16* p, Vf v) {
  const Vh h = narrow(v);
  std::memcpy(static_cast<void*>(p), &h, sizeof h);
}

HB_INLINE float as_f32(float x) { return x; }
HB_INLINE float as_f32(bf16 x) { return to_f32(x); }
template <class T>
HB_INLINE T from_f32(float x) {
  if constexpr (sizeof(T) == 4) return x;
  else return to_bf16(x);
}

/// x as a T holds it.
template <class T>
HB_INLINE Vf rounded(Vf x) {
  if constexpr (sizeof(T) == 4) return x;
  else return widen(narrow(x));
}

/// The first n < kLanes elements; the other lanes are `fill` / not written.
template <class T>
HB_INLINE Vf load_n(const T* p, std::int64_t n, float fill = 0.0f) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  const auto mask = static_cast<__mmask16>((1u << n) - 1u);
  if constexpr (sizeof(T) == 4) return std::bit_cast<Vf>(_mm512_mask_loadu_ps(_mm512_set1_ps(fill), mask, p));
  else {
    const Vf wide = widen(std::bit_cast<Vh>(_mm256_maskz_loadu_epi16(mask, p)));
    return std::bit_cast<Vf>(_mm512_mask_mov_ps(_mm512_set1_ps(fill), mask, std::bit_cast<__m512>(wide)));
  }
#else
  Vf v = splat(fill);
  for (std::int64_t i = 0; i < n; ++i) v[i] = as_f32(p[i]);
  return v;
#endif
}
template <class T>
HB_INLINE void store_n(T* p, Vf v, std::int64_t n) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  const auto mask = static_cast<__mmask16>((1u << n) - 1u);
  if constexpr (sizeof(T) == 4) _mm512_mask_storeu_ps(p, mask, std::bit_cast<__m512>(v));
  else _mm256_mask_storeu_epi16(p, mask, std::bit_cast<__m256i>(narrow(v)));
#else
  for (std::int64_t i = 0; i < n; ++i) p[i] = from_f32<T>(v[i]);
#endif
}

/// Calls body(i, ld, st) for i = 0, kLanes, 2·kLanes, … < n: whole vectors, then the tail, with the same code.
/// Write the body as `[&](std::int64_t i, auto ld, auto st) HB_FORCE_INLINE {…}`. `ld(p)` loads and `st(p, v)` stores
/// one vector at p (already offset by i).
template <class Body>
HB_INLINE void for_vectors(std::int64_t n, Body&& body) {
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    body(
        i, [](const auto* p) HB_FORCE_INLINE { return load(p); }, [](auto* p, Vf v) HB_FORCE_INLINE { store(p, v); });
  if (i < n) {
    const std::int64_t rest = n - i;
    body(
        i, [rest](const auto* p) HB_FORCE_INLINE { return load_n(p, rest); },
        [rest](auto* p, Vf v) HB_FORCE_INLINE { store_n(p, v, rest); });
  }
}

/// The same body for `vectors` of them at once while there are as many: body(i, count, ld, st), where `count` is a
/// std::integral_constant, handles vectors i, i + kLanes, …. For chains of operations that wait for each other
/// (in_step).
template <int vectors, class Body>
HB_INLINE void for_groups_of_vectors(std::int64_t n, Body&& body) {
  const std::int64_t whole = n / (vectors * kLanes) * (vectors * kLanes);
  for (std::int64_t i = 0; i < whole; i += vectors * kLanes)
    body(
        i, std::integral_constant<int, vectors>{}, [](const auto* p) HB_FORCE_INLINE { return load(p); },
        [](auto* p, Vf v) HB_FORCE_INLINE { store(p, v); });
  for_vectors(n - whole, [&](std::int64_t i, auto ld, auto st)
                             HB_FORCE_INLINE { body(whole + i, std::integral_constant<int, 1>{}, ld, st); });
}

/// Where either is NaN, b: what the x86 instruction does (which GCC 12 does not see in the comparison).
HB_INLINE Vf max(Vf a, Vf b) {
#if defined(__AVX512F__)
  return std::bit_cast<Vf>(_mm512_maskz_max_ps(0xffff, std::bit_cast<__m512>(a), std::bit_cast<__m512>(b)));
#elif defined(__AVX2__)
  return std::bit_cast<Vf>(_mm256_max_ps(std::bit_cast<__m256>(a), std::bit_cast<__m256>(b)));
#else
  return a > b ? a : b;
#endif
}
HB_INLINE Vf min(Vf a, Vf b) {
#if defined(__AVX512F__)
  return std::bit_cast<Vf>(_mm512_maskz_min_ps(0xffff, std::bit_cast<__m512>(a), std::bit_cast<__m512>(b)));
#elif defined(__AVX2__)
  return std::bit_cast<Vf>(_mm256_min_ps(std::bit_cast<__m256>(a), std::bit_cast<__m256>(b)));
#else
  return a < b ? a : b;
#endif
}

/// Sum of the lanes as a tree: upper half onto lower half, always in the same order.
HB_INLINE float sum_lanes(Vf v) {
#if defined(__AVX512F__)
  const auto h = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
                 __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
#else
  const auto h = v;
#endif
  const auto q = __builtin_shufflevector(h, h, 0, 1, 2, 3) + __builtin_shufflevector(h, h, 4, 5, 6, 7);
  const auto d = q + __builtin_shufflevector(q, q, 2, 3, 2, 3);
  return d[0] + d[1];
}
HB_INLINE float max_lanes(Vf v) {
#if defined(__AVX512F__)
  v = max(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = max(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  v = max(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  v = max(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
#else
  v = max(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3));
  v = max(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5));
  v = max(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6));
#endif
  return v[0];
}

constexpr int kQuads = kLanes / 4;

/// Quad c of rows[q] becomes quad q of rows[c].
HB_INLINE void transpose_quads(Vf (&rows)[kQuads]) {
#if defined(__AVX512F__)
  const auto low = [](Vf a, Vf b) HB_FORCE_INLINE {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
  };
  const auto high = [](Vf a, Vf b) HB_FORCE_INLINE {
    return __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  };
  const auto even = [](Vf a, Vf b) HB_FORCE_INLINE {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
  };
  const auto odd = [](Vf a, Vf b) HB_FORCE_INLINE {
    return __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  };
  const Vf ab = low(rows[0], rows[1]), cd = low(rows[2], rows[3]);
  const Vf ab2 = high(rows[0], rows[1]), cd2 = high(rows[2], rows[3]);
  rows[0] = even(ab, cd), rows[1] = odd(ab, cd), rows[2] = even(ab2, cd2), rows[3] = odd(ab2, cd2);
#else
  const Vf a = rows[0], b = rows[1];
  rows[0] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11);
  rows[1] = __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
#endif
}

/// 4 × 4 in the quads of four rows: quad q of row c becomes column 4·q + c of all of them. Shuffles that move lanes
/// anywhere cost more.
HB_INLINE void transpose_inside_quads(Vf& r0, Vf& r1, Vf& r2, Vf& r3) {
#if defined(__AVX512F__)
  const auto low = [](Vf a, Vf b) HB_FORCE_INLINE {
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
  };
  const auto high = [](Vf a, Vf b) HB_FORCE_INLINE {
    return __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  };
  const auto firsts = [](Vf a, Vf b) HB_FORCE_INLINE {
    return __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
  };
  const auto seconds = [](Vf a, Vf b) HB_FORCE_INLINE {
    return __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  };
#else
  const auto low = [](Vf a, Vf b) HB_FORCE_INLINE { return __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13); };
  const auto high = [](Vf a, Vf b)
                        HB_FORCE_INLINE { return __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15); };
  const auto firsts = [](Vf a, Vf b)
                          HB_FORCE_INLINE { return __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13); };
  const auto seconds = [](Vf a, Vf b)
                           HB_FORCE_INLINE { return __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15); };
#endif
  const Vf a = low(r0, r1), b = low(r2, r3), c = high(r0, r1), d = high(r2, r3);
  r0 = firsts(a, b), r1 = seconds(a, b), r2 = firsts(c, d), r3 = seconds(c, d);
}

/// Transposes kLanes × kLanes.
HB_INLINE void transpose(Vf (&rows)[kLanes]) {
#pragma GCC unroll 4
  for (int r = 0; r < kLanes; r += 4) transpose_inside_quads(rows[r], rows[r + 1], rows[r + 2], rows[r + 3]);
#pragma GCC unroll 4
  for (int m = 0; m < 4; ++m) {  // quad i of rows[4·g + m] becomes quad g of rows[4·i + m]
    Vf quads[kQuads];
    for (int g = 0; g < kQuads; ++g) quads[g] = rows[4 * g + m];
    transpose_quads(quads);
    for (int g = 0; g < kQuads; ++g) rows[4 * g + m] = quads[g];
  }
}

/// kLanes elements from rows[r] + at, of kLanes rows: to[c] has element c of each.
template <class T>
HB_INLINE void load_columns(const T* const* rows, std::int64_t at, Vf (&to)[kLanes]) {
#pragma GCC unroll 16
  for (int r = 0; r < kLanes; ++r) to[r] = load(rows[r] + at);
  transpose(to);
}
#if defined(__AVX2__) && !defined(__AVX512F__)
/// Half as many shuffles: elements are moved while they are narrow, and the last move puts the zeros below them.
HB_INLINE void load_columns(const bf16* const* rows, std::int64_t at, Vf (&to)[kLanes]) {
  const auto half = [&](int r)
                        HB_FORCE_INLINE { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[r] + at)); };
  const auto both = [&](int r) HB_FORCE_INLINE { return _mm256_set_m128i(half(r + 4), half(r)); };
  const __m256i r0 = both(0), r1 = both(1), r2 = both(2), r3 = both(3), zeros = _mm256_setzero_si256();
  const __m256i a = _mm256_unpacklo_epi16(r0, r1), b = _mm256_unpacklo_epi16(r2, r3), c = _mm256_unpackhi_epi16(r0, r1),
                d = _mm256_unpackhi_epi16(r2, r3);
  const __m256i columns[] = {_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b), _mm256_unpacklo_epi32(c, d),
                             _mm256_unpackhi_epi32(c, d)};
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    to[2 * i] = std::bit_cast<Vf>(_mm256_unpacklo_epi16(zeros, columns[i]));
    to[2 * i + 1] = std::bit_cast<Vf>(_mm256_unpackhi_epi16(zeros, columns[i]));
  }
}
#endif

/// e^x with at most 2 ulp (checked in tests/cpu_kernels/optimizer_test.cc), 0 for −∞ and what underflows, ∞ for what
/// overflows, NaN for NaN. Cody-Waite reduction by ln 2 in two parts, then a degree-7 polynomial on [−ln2/2, ln2/2]
/// (the minimax coefficients of Cephes' expf, Moshier 1989), then 2^m in two factors so that neither leaves the range
/// of fp32. Of several vectors step by step: in one, each step waits for the last.
template <int n>
HB_INLINE void exp_in_step(Vf (&x)[n]) {
  constexpr float kLog2e = 1.44269504088896341f;
  constexpr float kLn2Hi = 0.693359375f;     // 355/512: m·kLn2Hi is exact for |m| < 2^15
  constexpr float kLn2Lo = -2.12194440e-4f;  // ln 2 − kLn2Hi
  constexpr float kRound = 12582912.0f;      // 1.5·2^23: adding it rounds to an integer
  constexpr float kPolynomial[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                                   5.0000001201e-1f};
  Vf clamped[n], m[n], r[n], p[n];
  for (int i = 0; i < n; ++i) clamped[i] = min(splat(89.0f), max(splat(-104.0f), x[i]));  // in this order NaN passes
  for (int i = 0; i < n; ++i) m[i] = clamped[i] * kLog2e + kRound;
  for (int i = 0; i < n; ++i) m[i] = m[i] - kRound;
  for (int i = 0; i < n; ++i) r[i] = clamped[i] - m[i] * kLn2Hi - m[i] * kLn2Lo;
  for (int i = 0; i < n; ++i) p[i] = splat(1.9875691500e-4f);
#pragma GCC unroll 5
  for (const float coefficient : kPolynomial)
    for (int i = 0; i < n; ++i) p[i] = p[i] * r[i] + coefficient;
  for (int i = 0; i < n; ++i) p[i] = p[i] * r[i] * r[i] + (r[i] + 1.0f);
#if defined(__AVX512F__)
  for (int i = 0; i < n; ++i)
    x[i] = std::bit_cast<Vf>(_mm512_maskz_scalef_ps(0xffff, std::bit_cast<__m512>(p[i]), std::bit_cast<__m512>(m[i])));
#else
  Vi power[n], half[n];
  for (int i = 0; i < n; ++i) power[i] = __builtin_convertvector(m[i], Vi);
  for (int i = 0; i < n; ++i) half[i] = power[i] >> 1;  // two factors, so that neither leaves the range of fp32
  for (int i = 0; i < n; ++i)
    x[i] = p[i] * std::bit_cast<Vf>((half[i] + 127) << 23) * std::bit_cast<Vf>((power[i] - half[i] + 127) << 23);
#endif
}
HB_INLINE Vf exp(Vf x) {
  Vf one[] = {x};
  exp_in_step(one);
  return one[0];
}

template <int n>
HB_INLINE void sigmoid_in_step(Vf (&x)[n]) {
  for (int i = 0; i < n; ++i) x[i] = -x[i];
  exp_in_step(x);
  for (int i = 0; i < n; ++i) x[i] = 1.0f / (1.0f + x[i]);
}
HB_INLINE Vf sigmoid(Vf x) {
  Vf one[] = {x};
  sigmoid_in_step(one);
  return one[0];
}

/// tanh with at most 4 ulp (checked in tests/cpu_kernels/optimizer_test.cc): near 0, where 1 − 2/(e^2x + 1) cancels,
/// the odd polynomial of Cephes' tanhf (Moshier 1989).
HB_INLINE Vf tanh(Vf x) {
  const Vf square = x * x;
  Vf p = splat(-5.70498872745e-3f);
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  const Vf near = x + x * square * p, far = 1.0f - 2.0f / (exp(2.0f * x) + 1.0f);
  return square < 0.390625f ? near : far;  // |x| < 0.625
}

}  // namespace hotbunk::kernels
