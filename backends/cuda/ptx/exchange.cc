// Instructions in which the lanes of a warp take part together.
#include <fmt/format.h>

#include <utility>

#include "backends/cuda/ptx/warp.h"

namespace hotbunk::ptx {
namespace {

/// The lanes that an instruction names must be the ones that are here.
std::uint32_t members(Warp& w, const Instruction& i, std::uint32_t mask, Slot named) {
  const int first = std::countr_zero(mask);
  const auto wanted = get<std::uint32_t>(w.slot(named), first);
  each_lane(mask, [&](int l) {
    if (get<std::uint32_t>(w.slot(named), l) != wanted)
      throw Finding(Check::warp_operation, fmt::format("{}: {}: lanes {} and {} name different members ({:#x}, {:#x})",
                                                       name_of(Check::warp_operation), w.block->at(i), first, l, wanted,
                                                       get<std::uint32_t>(w.slot(named), l)));
  });
  if (((wanted & w.present) & ~mask) != 0 || (mask & ~wanted) != 0)
    throw Finding(Check::warp_operation,
                  fmt::format("{}: {}, warp {}: lanes {:#010x} are named, lanes {:#010x} are here",
                              name_of(Check::warp_operation), w.block->at(i), w.index, wanted & w.present, mask));
  ++w.syncs;
  return wanted & w.present;
}

void shuffle(Warp& w, const Instruction& i, std::uint32_t mask) {
  members(w, i, mask, i.source[3]);
  const std::uint64_t *a = w.slot(i.source[0]), *b = w.slot(i.source[1]), *c = w.slot(i.source[2]);
  std::array<std::uint64_t, lanes> before;
  std::copy(a, a + lanes, before.begin());
  std::uint32_t in_range = 0;
  std::array<std::uint64_t, lanes> out{};
  each_lane(mask, [&](int l) {
    const auto amount = static_cast<int>(b[l] & 31u);
    const auto control = static_cast<std::uint32_t>(c[l]);
    const int clamp = static_cast<int>(control & 31u), segment = static_cast<int>((control >> 8) & 31u);
    const int low = l & segment, high = low | (clamp & ~segment);
    int from = l;
    bool inside = true;
    switch (i.mode) {
      case Mode::up:
        from = l - amount;
        inside = from >= high;  // for up the clamp is a lower end
        break;
      case Mode::down:
        from = l + amount;
        inside = from <= high;
        break;
      case Mode::bfly:
        from = l ^ amount;
        inside = from <= high;
        break;
      default:
        from = low | (amount & ~segment);
        inside = from <= high;
        break;
    }
    if (!inside) from = l;
    else in_range |= 1u << l;
    if (!((mask >> from) & 1u))
      throw Finding(Check::warp_operation, fmt::format("{}: {}: lane {} reads from lane {}, which takes no part",
                                                       name_of(Check::warp_operation), w.block->at(i), l, from));
    out[static_cast<std::size_t>(l)] = before[static_cast<std::size_t>(from)] & 0xffffffffu;
  });
  each_lane(mask, [&](int l) {
    if (i.destination[0] != no_slot) w.slot(i.destination[0])[l] = out[static_cast<std::size_t>(l)];
    if (i.num_destinations > 1 && i.destination[1] != no_slot) w.slot(i.destination[1])[l] = (in_range >> l) & 1u;
  });
}

void vote(Warp& w, const Instruction& i, std::uint32_t mask) {
  const std::uint32_t named = members(w, i, mask, i.source[1]);
  const std::uint64_t* p = w.slot(i.source[0]);
  std::uint32_t yes = 0;
  each_lane(mask, [&](int l) {
    if ((p[l] != 0) != i.source_negated) yes |= 1u << l;
  });
  std::uint64_t result = yes;
  if (i.mode == Mode::all) result = yes == named;
  if (i.mode == Mode::any) result = yes != 0;
  if (i.mode == Mode::uni) result = yes == named || yes == 0;
  each_lane(mask, [&](int l) { w.slot(i.destination[0])[l] = result; });
}

void match(Warp& w, const Instruction& i, std::uint32_t mask) {
  members(w, i, mask, i.source[1]);
  if (i.mode != Mode::any) throw UnknownPtx(fmt::format("{}: only match.any is implemented", w.block->at(i)));
  const std::uint64_t* a = w.slot(i.source[0]);
  std::array<std::uint32_t, lanes> out{};
  each_lane(mask, [&](int l) {
    each_lane(mask, [&](int o) {
      if (a[o] == a[l]) out[static_cast<std::size_t>(l)] |= 1u << o;
    });
  });
  each_lane(mask, [&](int l) { put(w.slot(i.destination[0]), l, out[static_cast<std::size_t>(l)]); });
}

template <class T>
void reduce(Warp& w, const Instruction& i, std::uint32_t mask) {
  const std::uint64_t* a = w.slot(i.source[0]);
  T total = get<T>(a, std::countr_zero(mask));
  bool first = true;
  each_lane(mask, [&](int l) {
    const T x = get<T>(a, l);
    if (std::exchange(first, false)) return;
    switch (i.mode) {
      case Mode::add:
        total = static_cast<T>(static_cast<std::uint32_t>(total) + static_cast<std::uint32_t>(x));
        break;
      case Mode::min:
        total = std::min(total, x);
        break;
      case Mode::max:
        total = std::max(total, x);
        break;
      case Mode::and_:
        total = total & x;
        break;
      case Mode::or_:
        total = total | x;
        break;
      case Mode::xor_:
        total = total ^ x;
        break;
      default:
        throw UnknownPtx(fmt::format("{}: this reduction is not implemented", w.block->at(i)));
    }
  });
  each_lane(mask, [&](int l) { put(w.slot(i.destination[0]), l, total); });
}

}  // namespace

void run_warp(Warp& w, const Instruction& i, std::uint32_t mask) {
  switch (i.opcode) {
    case Opcode::shfl:
      return shuffle(w, i, mask);
    case Opcode::vote:
      return vote(w, i, mask);
    case Opcode::match:
      return match(w, i, mask);
    case Opcode::redux:
      members(w, i, mask, i.source[1]);
      return i.type == Type::s32 ? reduce<std::int32_t>(w, i, mask) : reduce<std::uint32_t>(w, i, mask);
    case Opcode::bar_warp:
      members(w, i, mask, i.source[0]);
      return;
    case Opcode::activemask:
      each_lane(mask, [&](int l) { w.slot(i.destination[0])[l] = mask; });
      return;
    default:
      throw UnknownPtx(fmt::format("{}: not implemented", w.block->at(i)));
  }
}

}  // namespace hotbunk::ptx
