// Integer and floating-point instructions, lane by lane.
#include <fmt/format.h>

#include <cfenv>
#include <cmath>
#include <limits>
#include <type_traits>

#include "backends/cuda/ptx/warp.h"

namespace hotbunk::ptx {
namespace {

[[noreturn]] void no_such(const Warp& w, const Instruction& i) {
  throw UnknownPtx(fmt::format("{}: this type is not implemented", w.block->at(i)));
}

template <class T, class F>
void unary(Warp& w, const Instruction& i, std::uint32_t mask, F&& f) {
  std::uint64_t* d = w.slot(i.destination[0]);
  const std::uint64_t* a = w.slot(i.source[0]);
  each_lane(mask, [&](int l) { put(d, l, f(get<T>(a, l))); });
}

template <class T, class F>
void binary(Warp& w, const Instruction& i, std::uint32_t mask, F&& f) {
  std::uint64_t* d = w.slot(i.destination[0]);
  const std::uint64_t *a = w.slot(i.source[0]), *b = w.slot(i.source[1]);
  each_lane(mask, [&](int l) { put(d, l, f(get<T>(a, l), get<T>(b, l))); });
}

template <class T, class F>
void ternary(Warp& w, const Instruction& i, std::uint32_t mask, F&& f) {
  std::uint64_t* d = w.slot(i.destination[0]);
  const std::uint64_t *a = w.slot(i.source[0]), *b = w.slot(i.source[1]), *c = w.slot(i.source[2]);
  each_lane(mask, [&](int l) { put(d, l, f(get<T>(a, l), get<T>(b, l), get<T>(c, l))); });
}

/// Calls f with a value of the C++ type that an integer type means.
template <class F>
bool with_integer(Type type, F&& f) {
  switch (type) {
    case Type::u16:
    case Type::b16:
      f(std::uint16_t{});
      return true;
    case Type::u32:
    case Type::b32:
      f(std::uint32_t{});
      return true;
    case Type::u64:
    case Type::b64:
      f(std::uint64_t{});
      return true;
    case Type::s16:
      f(std::int16_t{});
      return true;
    case Type::s32:
      f(std::int32_t{});
      return true;
    case Type::s64:
      f(std::int64_t{});
      return true;
    default:
      return false;
  }
}

template <class T>
using Unsigned = std::make_unsigned_t<T>;

/// The high half of a product.
template <class T>
T high(T a, T b) {
  if constexpr (sizeof(T) == 8) {
    using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
    return static_cast<T>((static_cast<Wide>(a) * b) >> 64);
  } else {
    const auto p = static_cast<std::int64_t>(a) * static_cast<std::int64_t>(b);
    return static_cast<T>((std::is_signed_v<T> ? p : static_cast<std::int64_t>(static_cast<std::uint64_t>(a) * b)) >>
                          (8 * sizeof(T)));
  }
}

template <class T>
T wrapped_add(T a, T b) {
  return static_cast<T>(static_cast<Unsigned<T>>(a) + static_cast<Unsigned<T>>(b));
}
template <class T>
T wrapped_sub(T a, T b) {
  return static_cast<T>(static_cast<Unsigned<T>>(a) - static_cast<Unsigned<T>>(b));
}
template <class T>
T wrapped_mul(T a, T b) {
  return static_cast<T>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
}

template <class T>
bool integer_pair(Warp& w, const Instruction& i, std::uint32_t mask) {
  switch (i.opcode) {
    case Opcode::add:
      binary<T>(w, i, mask, wrapped_add<T>);
      return true;
    case Opcode::sub:
      binary<T>(w, i, mask, wrapped_sub<T>);
      return true;
    case Opcode::mul:
      binary<T>(w, i, mask, wrapped_mul<T>);
      return true;
    case Opcode::mul_hi:
      binary<T>(w, i, mask, high<T>);
      return true;
    case Opcode::div:  // by zero: unspecified on hardware; all ones here
      binary<T>(w, i, mask, [](T a, T b) {
        return b == 0                                           ? static_cast<T>(~T{0})
               : b == static_cast<T>(-1) && std::is_signed_v<T> ? wrapped_sub<T>(0, a)
                                                                : static_cast<T>(a / b);
      });
      return true;
    case Opcode::rem:
      binary<T>(w, i, mask, [](T a, T b) {
        return b == 0 ? a : b == static_cast<T>(-1) && std::is_signed_v<T> ? T{0} : static_cast<T>(a % b);
      });
      return true;
    case Opcode::min:
      binary<T>(w, i, mask, [](T a, T b) { return std::min(a, b); });
      return true;
    case Opcode::max:
      binary<T>(w, i, mask, [](T a, T b) { return std::max(a, b); });
      return true;
    case Opcode::and_:
      binary<T>(w, i, mask, [](T a, T b) { return static_cast<T>(a & b); });
      return true;
    case Opcode::or_:
      binary<T>(w, i, mask, [](T a, T b) { return static_cast<T>(a | b); });
      return true;
    case Opcode::xor_:
      binary<T>(w, i, mask, [](T a, T b) { return static_cast<T>(a ^ b); });
      return true;
    default:
      return false;
  }
}

template <class T>
bool integer_shift(Warp& w, const Instruction& i, std::uint32_t mask) {
  if (i.opcode != Opcode::shl && i.opcode != Opcode::shr) return false;
  std::uint64_t* d = w.slot(i.destination[0]);
  const std::uint64_t *a = w.slot(i.source[0]), *b = w.slot(i.source[1]);
  constexpr unsigned width = 8 * sizeof(T);
  each_lane(mask, [&](int l) {
    const T x = get<T>(a, l);
    const auto n = get<std::uint32_t>(b, l);  // clamped to the width
    if (i.opcode == Opcode::shl) put(d, l, n >= width ? T{0} : static_cast<T>(static_cast<Unsigned<T>>(x) << n));
    else put(d, l, static_cast<T>(n >= width ? (std::is_signed_v<T> && x < 0 ? -1 : 0) : x >> n));
  });
  return true;
}

template <class T>
bool integer_single(Warp& w, const Instruction& i, std::uint32_t mask) {
  std::uint64_t* d = w.slot(i.destination[0]);
  switch (i.opcode) {
    case Opcode::neg:
      unary<T>(w, i, mask, [](T a) { return wrapped_sub<T>(0, a); });
      return true;
    case Opcode::not_:
      unary<T>(w, i, mask, [](T a) { return static_cast<T>(~a); });
      return true;
    case Opcode::abs:
      unary<T>(w, i, mask, [](T a) { return std::is_signed_v<T> && a < 0 ? wrapped_sub<T>(0, a) : a; });
      return true;
    case Opcode::popc:
      unary<T>(w, i, mask, [](T a) { return static_cast<std::uint32_t>(std::popcount(static_cast<Unsigned<T>>(a))); });
      return true;
    case Opcode::clz:
      unary<T>(w, i, mask,
               [](T a) { return static_cast<std::uint32_t>(std::countl_zero(static_cast<Unsigned<T>>(a))); });
      return true;
    case Opcode::bfind:
      unary<T>(w, i, mask, [](T a) {
        const auto u = static_cast<Unsigned<T>>(std::is_signed_v<T> && a < 0 ? ~a : a);
        return u == 0 ? 0xffffffffu
                      : static_cast<std::uint32_t>(8 * sizeof(T) - 1) - static_cast<std::uint32_t>(std::countl_zero(u));
      });
      return true;
    case Opcode::brev:
      unary<T>(w, i, mask, [](T a) {
        Unsigned<T> out = 0;
        for (unsigned b = 0; b < 8 * sizeof(T); ++b)
          out = static_cast<Unsigned<T>>(out << 1) | ((static_cast<Unsigned<T>>(a) >> b) & 1u);
        return out;
      });
      return true;
    case Opcode::mad:
      ternary<T>(w, i, mask, [](T a, T b, T c) { return wrapped_add<T>(wrapped_mul<T>(a, b), c); });
      return true;
    case Opcode::mad_hi:
      ternary<T>(w, i, mask, [](T a, T b, T c) { return wrapped_add<T>(high<T>(a, b), c); });
      return true;
    case Opcode::mul_wide:
    case Opcode::mad_wide: {
      using Wide =
          std::conditional_t<sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, std::int32_t, std::uint32_t>,
                             std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>>;
      const std::uint64_t *a = w.slot(i.source[0]), *b = w.slot(i.source[1]);
      const std::uint64_t* c = i.opcode == Opcode::mad_wide ? w.slot(i.source[2]) : nullptr;
      each_lane(mask, [&](int l) {
        const Wide p = wrapped_mul<Wide>(get<T>(a, l), get<T>(b, l));
        put(d, l, c == nullptr ? p : wrapped_add<Wide>(p, get<Wide>(c, l)));
      });
      return true;
    }
    case Opcode::bfe: {
      const std::uint64_t *a = w.slot(i.source[0]), *b = w.slot(i.source[1]), *c = w.slot(i.source[2]);
      each_lane(mask, [&](int l) {
        const unsigned width = 8 * sizeof(T), from = get<std::uint32_t>(b, l) & 0xffu,
                       length = get<std::uint32_t>(c, l) & 0xffu;
        const T x = get<T>(a, l);
        const auto bits = static_cast<std::uint64_t>(static_cast<Unsigned<T>>(x));
        std::uint64_t field = from >= width ? 0 : bits >> from;
        const unsigned kept = std::min(length, width - std::min(from, width));
        if (kept < 64) field &= (std::uint64_t{1} << kept) - 1;
        if (std::is_signed_v<T> && length > 0) {
          const unsigned top = std::min(from + length - 1, width - 1);
          if ((bits >> top) & 1u)
            for (unsigned k = kept; k < width; ++k) field |= std::uint64_t{1} << k;
        }
        put(d, l, static_cast<T>(field));
      });
      return true;
    }
    case Opcode::bfi: {
      const std::uint64_t *a = w.slot(i.source[0]), *b = w.slot(i.source[1]), *c = w.slot(i.source[2]),
                          *e = w.slot(i.source[3]);
      each_lane(mask, [&](int l) {
        const unsigned width = 8 * sizeof(T), from = get<std::uint32_t>(c, l) & 0xffu,
                       length = get<std::uint32_t>(e, l) & 0xffu;
        auto out = static_cast<std::uint64_t>(get<Unsigned<T>>(b, l));
        const auto in = static_cast<std::uint64_t>(get<Unsigned<T>>(a, l));
        for (unsigned k = 0; k < length && from + k < width; ++k)
          out = (out & ~(std::uint64_t{1} << (from + k))) | (((in >> k) & 1u) << (from + k));
        put(d, l, static_cast<T>(out));
      });
      return true;
    }
    default:
      return false;
  }
}

/// float or double result of an instruction's rounding and saturation.
template <class T>
T finished(const Instruction& i, T x) {
  if (i.flush && std::fpclassify(x) == FP_SUBNORMAL) x = std::copysign(T{0}, x);
  if (i.saturate) x = x >= T{1} ? T{1} : x > T{0} ? x : T{0};  // NaN -> 0
  if (i.mode == Mode::relu) x = x > T{0} || std::isnan(x) ? x : T{0};
  return x;
}

/// Runs f under the rounding mode that the instruction names.
template <class F>
auto rounded(Round round, F&& f) {
  if (round == Round::none || round == Round::rn) return f();
  const int before = std::fegetround();
  std::fesetround(round == Round::rz ? FE_TOWARDZERO : round == Round::rm ? FE_DOWNWARD : FE_UPWARD);
  volatile auto value = f();
  std::fesetround(before);
  return static_cast<decltype(f())>(value);
}

template <class T>
T smaller(const Instruction& i, T a, T b) {
  if (std::isnan(a) || std::isnan(b))
    return i.mode == Mode::notanumber || (std::isnan(a) && std::isnan(b)) ? std::numeric_limits<T>::quiet_NaN()
           : std::isnan(a)                                                ? b
                                                                          : a;
  if (a == b) return std::signbit(a) ? a : b;
  return a < b ? a : b;
}
template <class T>
T larger(const Instruction& i, T a, T b) {
  if (std::isnan(a) || std::isnan(b))
    return i.mode == Mode::notanumber || (std::isnan(a) && std::isnan(b)) ? std::numeric_limits<T>::quiet_NaN()
           : std::isnan(a)                                                ? b
                                                                          : a;
  if (a == b) return std::signbit(a) ? b : a;
  return a > b ? a : b;
}

template <class T>
bool floating(Warp& w, const Instruction& i, std::uint32_t mask) {
  // The exact result of a function in double, rounded once: what .approx means here.
  const auto function = [&](auto f) {
    unary<T>(w, i, mask, [&](T a) {
      if (i.flush && std::fpclassify(a) == FP_SUBNORMAL) a = std::copysign(T{0}, a);
      return finished(i, static_cast<T>(f(static_cast<double>(a))));
    });
    return true;
  };
  switch (i.opcode) {
    case Opcode::add:
      binary<T>(w, i, mask, [&](T a, T b) { return finished(i, rounded(i.round, [&] { return a + b; })); });
      return true;
    case Opcode::sub:
      binary<T>(w, i, mask, [&](T a, T b) { return finished(i, rounded(i.round, [&] { return a - b; })); });
      return true;
    case Opcode::mul:
      binary<T>(w, i, mask, [&](T a, T b) { return finished(i, rounded(i.round, [&] { return a * b; })); });
      return true;
    case Opcode::div:
      binary<T>(w, i, mask, [&](T a, T b) { return finished(i, rounded(i.round, [&] { return a / b; })); });
      return true;
    case Opcode::fma:
    case Opcode::mad:
      ternary<T>(w, i, mask,
                 [&](T a, T b, T c) { return finished(i, rounded(i.round, [&] { return std::fma(a, b, c); })); });
      return true;
    case Opcode::neg:
      unary<T>(w, i, mask, [](T a) { return -a; });
      return true;
    case Opcode::abs:
      unary<T>(w, i, mask, [](T a) { return std::abs(a); });
      return true;
    case Opcode::min:
      binary<T>(w, i, mask, [&](T a, T b) { return smaller(i, a, b); });
      return true;
    case Opcode::max:
      binary<T>(w, i, mask, [&](T a, T b) { return larger(i, a, b); });
      return true;
    case Opcode::copysign:  // the sign of a, the rest of b
      binary<T>(w, i, mask, [](T a, T b) { return std::copysign(b, a); });
      return true;
    case Opcode::rcp:
      return function([](double a) { return 1.0 / a; });
    case Opcode::sqrt:
      return function([](double a) { return std::sqrt(a); });
    case Opcode::rsqrt:
      return function([](double a) { return 1.0 / std::sqrt(a); });
    case Opcode::ex2:
      return function([](double a) { return std::exp2(a); });
    case Opcode::lg2:
      return function([](double a) { return std::log2(a); });
    case Opcode::sin:
      return function([](double a) { return std::sin(a); });
    case Opcode::cos:
      return function([](double a) { return std::cos(a); });
    case Opcode::tanh:
      return function([](double a) { return std::tanh(a); });
    default:
      return false;
  }
}

/// Half-precision arithmetic, one or two to a register: exact in double, rounded once.
bool half(Warp& w, const Instruction& i, std::uint32_t mask) {
  const bool brain = i.type == Type::bf16 || i.type == Type::bf16x2;
  const bool two = i.type == Type::bf16x2 || i.type == Type::f16x2;
  if (!brain && !two && i.type != Type::f16) return false;
  const auto read = [&](int source, int l, int part) {
    const auto bits = static_cast<std::uint16_t>(w.slot(i.source[static_cast<std::size_t>(source)])[l] >> (16 * part));
    return static_cast<double>(brain ? from_bf16(bits) : from_f16(bits));
  };
  const auto value = [&](int l, int part) -> double {
    const double a = read(0, l, part);
    switch (i.opcode) {
      case Opcode::add:
        return a + read(1, l, part);
      case Opcode::sub:
        return a - read(1, l, part);
      case Opcode::mul:
        return a * read(1, l, part);
      case Opcode::fma:
        return std::fma(a, read(1, l, part), read(2, l, part));
      case Opcode::neg:
        return -a;
      case Opcode::abs:
        return std::abs(a);
      case Opcode::min:
        return smaller(i, a, read(1, l, part));
      case Opcode::max:
        return larger(i, a, read(1, l, part));
      default:
        no_such(w, i);
    }
  };
  each_lane(mask, [&](int l) {
    std::uint64_t out = 0;
    for (int part = 0; part < (two ? 2 : 1); ++part) {
      const double x = finished(i, value(l, part));
      out |= static_cast<std::uint64_t>(brain ? to_bf16(x) : to_f16(x)) << (16 * part);
    }
    w.slot(i.destination[0])[l] = out;
  });
  return true;
}

template <class T>
bool compared(Compare c, T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    const bool unordered = std::isnan(a) || std::isnan(b);
    switch (c) {
      case Compare::num:
        return !unordered;
      case Compare::nan:
        return unordered;
      case Compare::equ:
      case Compare::neu:
      case Compare::ltu:
      case Compare::leu:
      case Compare::gtu:
      case Compare::geu:
        if (unordered) return true;
        break;
      default:
        if (unordered) return false;
        break;
    }
  }
  switch (c) {
    case Compare::eq:
    case Compare::equ:
      return a == b;
    case Compare::ne:
    case Compare::neu:
      return a != b;
    case Compare::lt:
    case Compare::lo:
    case Compare::ltu:
      return a < b;
    case Compare::le:
    case Compare::ls:
    case Compare::leu:
      return a <= b;
    case Compare::gt:
    case Compare::hi:
    case Compare::gtu:
      return a > b;
    default:
      return a >= b;
  }
}

template <class T>
void set_predicate(Warp& w, const Instruction& i, std::uint32_t mask) {
  const std::uint64_t *a = w.slot(i.source[0]), *b = w.slot(i.source[1]);
  const std::uint64_t* c = i.combine != Combine::none ? w.slot(i.source[2]) : nullptr;
  each_lane(mask, [&](int l) {
    const bool result = compared(i.compare, get<T>(a, l), get<T>(b, l));
    const auto with = [&](bool r) {
      if (c == nullptr) return r;
      const bool other = (c[l] != 0) != i.source_negated;
      return i.combine == Combine::and_ ? r && other : i.combine == Combine::or_ ? r || other : r != other;
    };
    if (i.destination[0] != no_slot) w.slot(i.destination[0])[l] = with(result) ? 1 : 0;
    if (i.num_destinations > 1 && i.destination[1] != no_slot) w.slot(i.destination[1])[l] = with(!result) ? 1 : 0;
  });
}

void compare(Warp& w, const Instruction& i, std::uint32_t mask) {
  const auto run = [&]<class T>(T) {
    if (i.opcode == Opcode::setp) return set_predicate<T>(w, i, mask);
    const std::uint64_t *a = w.slot(i.source[0]), *b = w.slot(i.source[1]);
    std::uint64_t* d = w.slot(i.destination[0]);
    each_lane(mask, [&](int l) {
      const bool r = compared(i.compare, get<T>(a, l), get<T>(b, l));
      if (i.type == Type::f32) put(d, l, r ? 1.0f : 0.0f);
      else d[l] = r ? (bytes_of(i.type) == 2 ? 0xffffu : 0xffffffffu) : 0;
    });
  };
  const Type type = i.opcode == Opcode::setp ? i.type : i.from;
  if (type == Type::f32) run(float{});
  else if (type == Type::f64) run(double{});
  else if (type == Type::bf16 || type == Type::f16) {
    // Compared as floats: widened into slots of their own.
    const auto widened = [&](Slot s) {
      std::array<float, lanes> out{};
      each_lane(mask, [&](int l) {
        const auto bits = get<std::uint16_t>(w.slot(s), l);
        out[static_cast<std::size_t>(l)] = type == Type::bf16 ? from_bf16(bits) : from_f16(bits);
      });
      return out;
    };
    const auto a = widened(i.source[0]), b = widened(i.source[1]);
    if (i.opcode != Opcode::setp || i.combine != Combine::none) no_such(w, i);
    each_lane(mask, [&](int l) {
      const auto k = static_cast<std::size_t>(l);
      w.slot(i.destination[0])[l] = compared(i.compare, a[k], b[k]) ? 1 : 0;
    });
  } else if (type == Type::pred || !with_integer(type, run)) {
    no_such(w, i);
  }
}

/// Bits of three words by a truth table.
std::uint32_t table_logic(std::uint32_t a, std::uint32_t b, std::uint32_t c, unsigned table) {
  std::uint32_t out = 0;
  for (unsigned k = 0; k < 8; ++k)
    if ((table >> k) & 1u) out |= (k & 4u ? a : ~a) & (k & 2u ? b : ~b) & (k & 1u ? c : ~c);
  return out;
}

std::uint32_t permuted(std::uint32_t a, std::uint32_t b, std::uint32_t selector) {
  const std::uint64_t both = (static_cast<std::uint64_t>(b) << 32) | a;
  std::uint32_t out = 0;
  for (unsigned k = 0; k < 4; ++k) {
    const unsigned s = (selector >> (4 * k)) & 0xfu;
    auto byte = static_cast<std::uint32_t>((both >> (8 * (s & 7u))) & 0xffu);
    if (s & 8u) byte = byte & 0x80u ? 0xffu : 0u;  // replicate the sign
    out |= byte << (8 * k);
  }
  return out;
}

bool words(Warp& w, const Instruction& i, std::uint32_t mask) {
  std::uint64_t* d = w.slot(i.destination[0]);
  switch (i.opcode) {
    case Opcode::lop3:
      ternary<std::uint32_t>(
          w, i, mask, [&](auto a, auto b, auto c) { return table_logic(a, b, c, static_cast<unsigned>(i.immediate)); });
      return true;
    case Opcode::prmt:
      ternary<std::uint32_t>(w, i, mask, [](auto a, auto b, auto c) { return permuted(a, b, c); });
      return true;
    case Opcode::shf:
      ternary<std::uint32_t>(w, i, mask, [&](std::uint32_t a, std::uint32_t b, std::uint32_t c) {
        const std::uint64_t both = (static_cast<std::uint64_t>(b) << 32) | a;
        const unsigned n = i.saturate ? std::min(c, 32u) : c & 31u;
        return static_cast<std::uint32_t>(i.mode == Mode::left ? (both << n) >> 32 : both >> n);
      });
      return true;
    case Opcode::selp: {
      const std::uint64_t *a = w.slot(i.source[0]), *b = w.slot(i.source[1]), *p = w.slot(i.source[2]);
      each_lane(mask, [&](int l) { d[l] = p[l] != 0 ? a[l] : b[l]; });
      return true;
    }
    case Opcode::mov: {
      const std::uint64_t* a = w.slot(i.source[0]);
      const int bits = i.type == Type::pred ? 64 : 8 * bytes_of(i.type);
      const std::uint64_t kept = bits == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << bits) - 1;
      each_lane(mask, [&](int l) { d[l] = a[l] & kept; });
      return true;
    }
    case Opcode::pack: {
      const int part = 8 * bytes_of(i.type) / i.num_sources;
      const std::uint64_t kept = (std::uint64_t{1} << part) - 1;
      each_lane(mask, [&](int l) {
        std::uint64_t out = 0;
        for (int k = 0; k < i.num_sources; ++k)
          out |= (w.slot(i.source[static_cast<std::size_t>(k)])[l] & kept) << (part * k);
        d[l] = out;
      });
      return true;
    }
    case Opcode::unpack: {
      const int part = 8 * bytes_of(i.type) / i.num_destinations;
      const std::uint64_t kept = (std::uint64_t{1} << part) - 1;
      const std::uint64_t* a = w.slot(i.source[0]);
      each_lane(mask, [&](int l) {
        const std::uint64_t in = a[l];
        for (int k = 0; k < i.num_destinations; ++k)
          if (const Slot s = i.destination[static_cast<std::size_t>(k)]; s != no_slot)
            w.slot(s)[l] = (in >> (part * k)) & kept;
      });
      return true;
    }
    default:
      return false;
  }
}

bool predicates(Warp& w, const Instruction& i, std::uint32_t mask) {
  if (i.type != Type::pred) return false;
  std::uint64_t* d = w.slot(i.destination[0]);
  const std::uint64_t* a = w.slot(i.source[0]);
  const std::uint64_t* b = i.num_sources > 1 ? w.slot(i.source[1]) : a;
  each_lane(mask, [&](int l) {
    const bool x = a[l] != 0, y = b[l] != 0;
    d[l] = i.opcode == Opcode::and_   ? x && y
           : i.opcode == Opcode::or_  ? x || y
           : i.opcode == Opcode::xor_ ? x != y
           : i.opcode == Opcode::not_ ? !x
                                      : x;
  });
  return true;
}

int flops_of(const Instruction& i) {
  const bool two = i.type == Type::bf16x2 || i.type == Type::f16x2;
  const bool is_float =
      two || i.type == Type::f32 || i.type == Type::f64 || i.type == Type::bf16 || i.type == Type::f16;
  if (!is_float) return 0;
  switch (i.opcode) {
    case Opcode::fma:
    case Opcode::mad:
      return two ? 4 : 2;
    case Opcode::add:
    case Opcode::sub:
    case Opcode::mul:
    case Opcode::div:
    case Opcode::rcp:
    case Opcode::sqrt:
    case Opcode::rsqrt:
    case Opcode::ex2:
    case Opcode::lg2:
    case Opcode::sin:
    case Opcode::cos:
    case Opcode::tanh:
      return two ? 2 : 1;
    default:
      return 0;
  }
}

}  // namespace

void run_arithmetic(Warp& w, const Instruction& i, std::uint32_t mask) {
  w.block->counters->flops += std::int64_t{flops_of(i)} * std::popcount(mask);
  if (i.opcode == Opcode::setp || i.opcode == Opcode::set) return compare(w, i, mask);
  if (words(w, i, mask) || predicates(w, i, mask) || half(w, i, mask)) return;
  if (i.type == Type::f32 && floating<float>(w, i, mask)) return;
  if (i.type == Type::f64 && floating<double>(w, i, mask)) return;
  bool done = false;
  const bool known = with_integer(i.type, [&]<class T>(T) {
    done = integer_pair<T>(w, i, mask) || integer_shift<T>(w, i, mask) || integer_single<T>(w, i, mask);
  });
  if (!known || !done) no_such(w, i);
}

}  // namespace hotbunk::ptx
