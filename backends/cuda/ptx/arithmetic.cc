// Floating-point, comparing and bit-moving instructions, lane by lane; integers.cc has the integers.
#include <fmt/format.h>

#include <cfenv>
#include <cmath>
#include <limits>

#include "backends/cuda/ptx/operands.h"

namespace hotbunk::ptx {
namespace {

[[noreturn]] void no_such(const Warp& w, const Instruction& i) {
  throw UnknownPtx(fmt::format("{}: this type is not implemented", w.block->at(i)));
}

/// float or double result of an instruction's rounding and saturation.
template <class T>
T finished(const Instruction& i, T x) {
  if (i.flush && std::fpclassify(x) == FP_SUBNORMAL) x = std::copysign(T{0}, x);
  if (i.saturate) x = x >= T{1} ? T{1} : x > T{0} ? x : T{0};  // NaN -> 0
  if (i.mode == Mode::relu) x = x > T{0} || std::isnan(x) ? x : T{0};
  return x;
}

/// Rounds to nearest and changes nothing of a result: the instruction is its operation, lane by lane.
bool is_plain(const Instruction& i) {
  return (i.round == Round::none || i.round == Round::rn) && !i.flush && !i.saturate && i.mode != Mode::relu;
}

/// While it lives, the rounding mode that an instruction names.
class Rounding {
 public:
  explicit Rounding(Round round) : before_(std::fegetround()) {
    if (round != Round::none && round != Round::rn)
      std::fesetround(round == Round::rz ? FE_TOWARDZERO : round == Round::rm ? FE_DOWNWARD : FE_UPWARD);
  }
  ~Rounding() { std::fesetround(before_); }
  Rounding(const Rounding&) = delete;
  Rounding& operator=(const Rounding&) = delete;

 private:
  int before_;
};

/// An operation on two or three floats, with rounding, flushing and saturation where the instruction has them.
template <class T, class F>
void rounded_binary(Warp& w, const Instruction& i, std::uint32_t mask, F f) {
  if (is_plain(i)) return binary<T>(w, i, mask, f);
  const Rounding rounding(i.round);
  binary<T>(w, i, mask, [&](T a, T b) {
    const volatile T x = a;  // in its place: not moved out of the rounding mode's scope
    const volatile T y = f(x, b);
    return finished(i, static_cast<T>(y));
  });
}
template <class T, class F>
void rounded_ternary(Warp& w, const Instruction& i, std::uint32_t mask, F f) {
  if (is_plain(i)) return ternary<T>(w, i, mask, f);
  const Rounding rounding(i.round);
  ternary<T>(w, i, mask, [&](T a, T b, T c) {
    const volatile T x = a;
    const volatile T y = f(x, b, c);
    return finished(i, static_cast<T>(y));
  });
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
      rounded_binary<T>(w, i, mask, [](T a, T b) { return a + b; });
      return true;
    case Opcode::sub:
      rounded_binary<T>(w, i, mask, [](T a, T b) { return a - b; });
      return true;
    case Opcode::mul:
      rounded_binary<T>(w, i, mask, [](T a, T b) { return a * b; });
      return true;
    case Opcode::div:
      rounded_binary<T>(w, i, mask, [](T a, T b) { return a / b; });
      return true;
    case Opcode::fma:
    case Opcode::mad:
      rounded_ternary<T>(w, i, mask, [](T a, T b, T c) { return std::fma(a, b, c); });
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
  if (!run_integer(w, i, mask)) no_such(w, i);
}

}  // namespace hotbunk::ptx
