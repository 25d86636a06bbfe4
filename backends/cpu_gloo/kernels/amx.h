// Products of bf16 tiles on Intel's AMX units. Compiled only where the build's instruction set has them
// (HOTBUNK_HAS_AMX); whether the kernel lets this process use them is asked at run time. Internal to the kernels.
#pragma once
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__)
#define HOTBUNK_HAS_AMX 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

#include "backends/cpu_gloo/kernels/simd.h"

namespace hotbunk::kernels::amx {

/// Asks the kernel for the tile registers (once per process is enough, asking again is harmless); false = not granted.
inline bool request() {
  constexpr int kArchReqXcompPerm = 0x1023, kTileData = 18;  // Linux, asm/prctl.h
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kTileData) == 0;
}

/// Gives this thread eight tiles of 16 rows × 64 bytes for its life: four of C, two of A, two of B.
class Tiles {
 public:
  Tiles() {
    struct alignas(64) {
      std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
      std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    _tile_loadconfig(&config);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

using Pair = std::uint32_t;  // two bf16 that lie one after the other in the inner dimension, the first in the low half

HB_INLINE Vh load_bits(const bf16* p) {
  Vh v;
  std::memcpy(&v, static_cast<const void*>(p), sizeof v);
  return v;
}
HB_INLINE void store_pairs(Pair* p, Vh low, Vh high) {
  const Vu pairs = __builtin_convertvector(low, Vu) | (__builtin_convertvector(high, Vu) << 16);
  std::memcpy(p, &pairs, sizeof pairs);
}

/// c[M,N] (+)= a[M,K] · b[K,N], fp32 += bf16 · bf16.  a: row-major, lda elements; b: [K/2][N] pairs of rows, ldb pairs;
/// c: row-major. M and N multiples of 32, K a multiple of 32. The order of sums does not depend on M or N.
inline void gemm(std::int64_t M, std::int64_t N, std::int64_t K, const bf16* a, std::int64_t lda, const Pair* b,
                 std::int64_t ldb, float* c, std::int64_t ldc, bool accumulate) {
  const auto a_pitch = static_cast<std::size_t>(lda) * 2, b_pitch = static_cast<std::size_t>(ldb) * 4;
  const auto c_pitch = static_cast<std::size_t>(ldc) * 4;
  for (std::int64_t n = 0; n < N; n += 32)
    for (std::int64_t m = 0; m < M; m += 32) {
      float* c0 = c + m * ldc + n;
      float* c1 = c0 + 16 * ldc;
      if (accumulate) {
        _tile_loadd(0, c0, c_pitch);
        _tile_loadd(1, c0 + 16, c_pitch);
        _tile_loadd(2, c1, c_pitch);
        _tile_loadd(3, c1 + 16, c_pitch);
      } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
      }
      for (std::int64_t k = 0; k < K; k += 32) {
        const bf16* a0 = a + m * lda + k;
        const Pair* b0 = b + k / 2 * ldb + n;
        _tile_loadd(4, a0, a_pitch);
        _tile_loadd(5, a0 + 16 * lda, a_pitch);
        _tile_loadd(6, b0, b_pitch);
        _tile_loadd(7, b0 + 16, b_pitch);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(0, c0, c_pitch);
      _tile_stored(1, c0 + 16, c_pitch);
      _tile_stored(2, c1, c_pitch);
      _tile_stored(3, c1 + 16, c_pitch);
    }
}

/// dst[n][d] = src rows; rows [n, round_to) zero. d a multiple of 16.
inline void pack_rows(const bf16* src, std::int64_t ld, std::int64_t n, std::int64_t round_to, std::int64_t d,
                      bf16* dst) {
  for (std::int64_t r = 0; r < n; ++r) {
    for (std::int64_t c = 0; c < d; c += 32) __builtin_prefetch(src + (r + 8) * ld + c);
    std::memcpy(static_cast<void*>(dst + r * d), src + r * ld, static_cast<std::size_t>(d) * 2);
  }
  std::memset(static_cast<void*>(dst + n * d), 0, static_cast<std::size_t>((round_to - n) * d) * 2);
}

/// As the right operand with rows as inner dimension: dst[r/2][d] = (src[r], src[r+1]). src: dense [n][d], n even.
inline void pair_rows(const bf16* src, std::int64_t n, std::int64_t d, Pair* dst) {
  for (std::int64_t r = 0; r < n; r += 2)
    for (std::int64_t c = 0; c < d; c += 16)
      store_pairs(dst + r / 2 * d + c, load_bits(src + r * d + c), load_bits(src + (r + 1) * d + c));
}

/// As the right operand with columns as inner dimension: dst[c/2][r] = (src[r][c], src[r][c+1]), ldd pairs between
/// rows. src: dense [n][d], n a multiple of 16, d of 32.
inline void pair_columns(const bf16* src, std::int64_t n, std::int64_t d, Pair* dst, std::int64_t ldd) {
  for (std::int64_t r0 = 0; r0 < n; r0 += 16)
    for (std::int64_t c0 = 0; c0 < d; c0 += 32) {
      Vf rows[kLanes];
      for (int r = 0; r < 16; ++r) rows[r] = load(reinterpret_cast<const float*>(src + (r0 + r) * d + c0));
      transpose(rows);
      for (int c = 0; c < 16; ++c) store(reinterpret_cast<float*>(dst + (c0 / 2 + c) * ldd + r0), rows[c]);
    }
}

/// As the left operand, transposed: dst[c][r] = src[r][c], ldd elements between rows. src: dense [n][d], n a multiple
/// of 32, d of 16.
inline void transpose_rows(const bf16* src, std::int64_t n, std::int64_t d, bf16* dst, std::int64_t ldd) {
  for (std::int64_t r0 = 0; r0 < n; r0 += 16)
    for (std::int64_t c0 = 0; c0 < d; c0 += 16) {
      Vf rows[kLanes];
      for (int r = 0; r < 16; ++r) rows[r] = load(src + (r0 + r) * d + c0);
      transpose(rows);
      for (int c = 0; c < 16; ++c) store(dst + (c0 + c) * ldd + r0, rows[c]);  // exact: these were bf16
    }
}

}  // namespace hotbunk::kernels::amx
#endif
