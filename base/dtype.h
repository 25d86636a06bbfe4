// Element types of tensors, and bf16 <-> fp32 as the hardware rounds it.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string_view>

namespace hotbunk {

enum class DType : std::uint8_t { f32, bf16, f16, f64, i32, i64, u8 };

/// Bytes of one element.
constexpr std::int64_t size_of(DType t) {
  switch (t) {
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::bf16:
    case DType::f16:
      return 2;
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::u8:
      return 1;
  }
  return 0;
}

/// "fp32", "bf16", … as scenario files spell them.
constexpr std::string_view name_of(DType t) {
  switch (t) {
    case DType::f32:
      return "fp32";
    case DType::bf16:
      return "bf16";
    case DType::f16:
      return "fp16";
    case DType::f64:
      return "fp64";
    case DType::i32:
      return "int32";
    case DType::i64:
      return "int64";
    case DType::u8:
      return "uint8";
  }
  return "?";
}

/// The inverse of name_of; nullopt for an unknown name.
constexpr std::optional<DType> dtype_from(std::string_view name) {
  for (DType t : {DType::f32, DType::bf16, DType::f16, DType::f64, DType::i32, DType::i64, DType::u8})
    if (name == name_of(t)) return t;
  return std::nullopt;
}

/// A bf16 value in memory: the upper half of an IEEE fp32.
struct bf16 {
  std::uint16_t bits = 0;
};

constexpr float to_f32(bf16 x) { return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16); }

/// Round to nearest, ties to even; NaN stays a (quiet) NaN. Same as PyTorch's and the AVX512_BF16 instruction's
/// rounding.
constexpr bf16 to_bf16(float x) {
  const auto u = std::bit_cast<std::uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<std::uint16_t>((u >> 16) | 0x40u)};
  return {static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

}  // namespace hotbunk
