// Integer instructions, lane by lane.
#include <algorithm>
#include <type_traits>

#include "backends/cuda/ptx/operands.h"

namespace hotbunk::ptx {
namespace {

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
      binary<T>(w, i, mask, [](T a, T b) { return wrapped_add<T>(a, b); });
      return true;
    case Opcode::sub:
      binary<T>(w, i, mask, [](T a, T b) { return wrapped_sub<T>(a, b); });
      return true;
    case Opcode::mul:
      binary<T>(w, i, mask, [](T a, T b) { return wrapped_mul<T>(a, b); });
      return true;
    case Opcode::mul_hi:
      binary<T>(w, i, mask, [](T a, T b) { return high<T>(a, b); });
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
    case Opcode::bfind_shift:  // how far left that bit would be shifted to stand first
      unary<T>(w, i, mask, [](T a) {
        const auto u = static_cast<Unsigned<T>>(std::is_signed_v<T> && a < 0 ? ~a : a);
        return u == 0 ? 0xffffffffu : static_cast<std::uint32_t>(std::countl_zero(u));
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

}  // namespace

bool run_integer(Warp& w, const Instruction& i, std::uint32_t mask) {
  bool done = false;
  with_integer(i.type, [&]<class T>(T) {
    done = integer_pair<T>(w, i, mask) || integer_shift<T>(w, i, mask) || integer_single<T>(w, i, mask);
  });
  return done;
}

}  // namespace hotbunk::ptx
