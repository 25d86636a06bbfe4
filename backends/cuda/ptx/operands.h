// What the files of arithmetic share: a lambda over the lanes of one, two or three operands, and C++ types of PTX
// types.
#pragma once
#include "backends/cuda/ptx/warp.h"

namespace hotbunk::ptx {

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

/// Runs an integer instruction; false when it is none (integers.cc).
bool run_integer(Warp&, const Instruction&, std::uint32_t mask);

}  // namespace hotbunk::ptx
