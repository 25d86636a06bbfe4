// cvt: every pair of types, each with the rounding that the instruction names.
#include <fmt/format.h>

#include <cfenv>
#include <cmath>
#include <limits>

#include "backends/cuda/ptx/warp.h"

namespace hotbunk::ptx {
namespace {

double towards_integer(double x, Round round) {
  switch (round) {
    case Round::rmi:
    case Round::rm:
      return std::floor(x);
    case Round::rpi:
    case Round::rp:
      return std::ceil(x);
    case Round::rni:
    case Round::rn:
      return std::nearbyint(x);
    case Round::rna:
      return std::round(x);
    default:
      return std::trunc(x);
  }
}

/// Rounds a double to a float format of `precision` bits and exponents down to `lowest`; to the nearest, ties to even,
/// where no rounding is named.
double round_to(double x, int precision, int lowest, Round round) {
  if (x == 0 || !std::isfinite(x)) return x;
  const int exponent = std::max(std::ilogb(x), lowest);
  const double unit = std::ldexp(1.0, exponent - precision + 1);
  return towards_integer(x / unit, round == Round::none ? Round::rn : round) * unit;
}

bool is_float(Type t) {
  return t == Type::f16 || t == Type::bf16 || t == Type::f32 || t == Type::f64 || t == Type::tf32;
}

/// The bits of an integer of that type, as 64 bits of its value.
std::int64_t integer_value(Type t, std::uint64_t bits) {
  switch (t) {
    case Type::s8:
      return static_cast<std::int8_t>(bits);
    case Type::s16:
      return static_cast<std::int16_t>(bits);
    case Type::s32:
      return static_cast<std::int32_t>(bits);
    case Type::u8:
    case Type::b8:
      return static_cast<std::uint8_t>(bits);
    case Type::u16:
    case Type::b16:
      return static_cast<std::uint16_t>(bits);
    case Type::u32:
    case Type::b32:
      return static_cast<std::uint32_t>(bits);
    default:
      return static_cast<std::int64_t>(bits);
  }
}

double float_value(Type t, std::uint64_t bits) {
  switch (t) {
    case Type::f16:
      return from_f16(static_cast<std::uint16_t>(bits));
    case Type::bf16:
      return from_bf16(static_cast<std::uint16_t>(bits));
    case Type::f64:
      return std::bit_cast<double>(bits);
    default:
      return std::bit_cast<float>(static_cast<std::uint32_t>(bits));
  }
}

/// A double as an integer of type t, clamped to its range; NaN is 0.
std::uint64_t to_integer(Type t, double x, Round round) {
  if (std::isnan(x)) return 0;
  x = towards_integer(x, round);
  const bool is_signed = t == Type::s8 || t == Type::s16 || t == Type::s32 || t == Type::s64;
  const int bits = 8 * bytes_of(t);
  const double low = is_signed ? -std::ldexp(1.0, bits - 1) : 0.0, end = std::ldexp(1.0, is_signed ? bits - 1 : bits);
  const std::uint64_t kept = bits == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << bits) - 1;
  if (x < low) return (is_signed ? std::uint64_t{1} << (bits - 1) : 0) & kept;
  if (x >= end) return is_signed ? kept >> 1 : kept;
  return (is_signed ? static_cast<std::uint64_t>(static_cast<std::int64_t>(x)) : static_cast<std::uint64_t>(x)) & kept;
}

/// Clamped to +0, which -0 becomes too; NaN stays.
double rectified(double x) { return x <= 0 ? 0.0 : x; }

std::uint64_t to_float(const Instruction& i, double x) {
  if (i.saturate) x = x >= 1.0 ? 1.0 : x > 0.0 ? x : 0.0;
  if (i.mode == Mode::relu) x = rectified(x);
  switch (i.type) {
    case Type::f16:
      return to_f16(x, i.round);
    case Type::bf16:
      return to_bf16(x, i.round);
    case Type::f64:
      return std::bit_cast<std::uint64_t>(x);
    case Type::tf32:
      return std::bit_cast<std::uint32_t>(static_cast<float>(round_to(x, 11, -126, i.round)));
    default:
      break;
  }
  if (i.round == Round::none || i.round == Round::rn || i.from == Type::f16 || i.from == Type::bf16)
    return std::bit_cast<std::uint32_t>(static_cast<float>(x));
  if (i.round == Round::rni || i.round == Round::rzi || i.round == Round::rmi || i.round == Round::rpi)
    return std::bit_cast<std::uint32_t>(static_cast<float>(towards_integer(x, i.round)));
  const int before = std::fegetround();
  std::fesetround(i.round == Round::rz ? FE_TOWARDZERO : i.round == Round::rm ? FE_DOWNWARD : FE_UPWARD);
  volatile float out = static_cast<float>(x);
  std::fesetround(before);
  return std::bit_cast<std::uint32_t>(static_cast<float>(out));
}

std::uint64_t converted(const Instruction& i, std::uint64_t bits) {
  if (is_float(i.from)) {
    double x = float_value(i.from, bits);
    if (i.flush && i.from == Type::f32 && std::abs(x) < static_cast<double>(std::numeric_limits<float>::min()))
      x = std::copysign(0.0, x);
    return is_float(i.type) ? to_float(i, x) : to_integer(i.type, x, i.round);
  }
  const std::int64_t value = integer_value(i.from, bits);
  if (is_float(i.type)) {
    // 64-bit integers do not fit a double: to f32 they round once, from the integer.
    if (i.type == Type::f32 && i.round == Round::rn)
      return std::bit_cast<std::uint32_t>(i.from == Type::u64 ? static_cast<float>(static_cast<std::uint64_t>(value))
                                                              : static_cast<float>(value));
    return to_float(
        i, i.from == Type::u64 ? static_cast<double>(static_cast<std::uint64_t>(value)) : static_cast<double>(value));
  }
  if (i.saturate) return to_integer(i.type, static_cast<double>(value), Round::rzi);
  const int width = 8 * bytes_of(i.type);
  // A register holds a narrower integer extended by the type's sign.
  return width == 64 ? static_cast<std::uint64_t>(value)
                     : static_cast<std::uint64_t>(integer_value(i.type, static_cast<std::uint64_t>(value))) &
                           (width == 8 ? 0xffffu : (std::uint64_t{1} << width) - 1);
}

}  // namespace

float from_bf16(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

float from_f16(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 0x1f, mantissa = bits & 0x3ff;
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  if (exponent == 31)
    return mantissa != 0 ? std::numeric_limits<float>::quiet_NaN()
                         : static_cast<float>(sign * std::numeric_limits<double>::infinity());
  return static_cast<float>(sign *
                            (exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25)));
}

std::uint16_t to_bf16(double x, Round round) {
  if (std::isnan(x)) return 0x7fff;
  const double r = round_to(x, 8, -126, round);
  return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(static_cast<float>(r)) >> 16);
}

std::uint16_t to_f16(double x, Round round) {
  if (std::isnan(x)) return 0x7fff;
  const auto sign = static_cast<std::uint16_t>(std::signbit(x) ? 0x8000 : 0);
  const double r = std::abs(round_to(x, 11, -14, round));
  const bool inward = round == Round::rz || round == (sign != 0 ? Round::rp : Round::rm);  // then no number overflows
  if (r >= 65536.0) return sign | (inward && std::isfinite(x) ? 0x7bff : 0x7c00);
  if (r == 0) return sign;
  const int exponent = std::ilogb(r);
  if (exponent < -14) return sign | static_cast<std::uint16_t>(std::ldexp(r, 24));
  return sign |
         static_cast<std::uint16_t>(((exponent + 15) << 10) | (static_cast<int>(std::ldexp(r, 10 - exponent)) & 0x3ff));
}

void run_convert(Warp& w, const Instruction& i, std::uint32_t mask) {
  std::uint64_t* d = w.slot(i.destination[0]);
  const std::uint64_t* a = w.slot(i.source[0]);
  if (i.opcode == Opcode::cvt) {
    each_lane(mask, [&](int l) { d[l] = converted(i, a[l]); });
    return;
  }
  const std::uint64_t* b = w.slot(i.source[1]);  // the lower half
  const bool brain = i.type == Type::bf16x2;
  each_lane(mask, [&](int l) {
    const auto half = [&](std::uint64_t bits) -> std::uint64_t {
      double x = float_value(Type::f32, bits);
      if (i.mode == Mode::relu) x = rectified(x);
      return brain ? to_bf16(x, i.round) : to_f16(x, i.round);
    };
    d[l] = half(a[l]) << 16 | half(b[l]);
  });
}

}  // namespace hotbunk::ptx
