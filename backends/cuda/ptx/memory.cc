// Loads, stores, atomics and asynchronous copies, each access checked.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "backends/cuda/ptx/warp.h"

namespace hotbunk::ptx {
namespace {

[[noreturn]] void found(Check check, const Warp& w, const Instruction& i, int lane, const std::string& what) {
  throw Finding(check, fmt::format("{}: {}, thread {}: {}", name_of(check), w.block->at(i),
                                   w.block->thread_name(w.index * lanes + lane), what));
}

/// Where a lane's address points, as a pointer of the host; checked for bounds, alignment and, where read, for having
/// been written.
class Accessor {
 public:
  Accessor(Warp& w, const Instruction& i, bool write, bool atomic = false)
      : w_(w), i_(i), write_(write), atomic_(atomic) {}

  std::uint8_t* at(int lane, Space space, std::uint64_t address, int bytes) {
    if (space == Space::generic) {
      const std::uint64_t window = address & window_mask;
      space = window == shared_window ? Space::shared : window == local_window ? Space::local : Space::global;
      if (space != Space::global) address &= ~window_mask;
    }
    if (address % static_cast<std::uint64_t>(bytes) != 0)
      found(Check::misaligned, w_, i_, lane, fmt::format("address {:#x} of an access of {} bytes", address, bytes));
    switch (space) {
      case Space::shared:
        return shared(lane, address, bytes);
      case Space::local:
        return local(lane, address, bytes);
      default:
        return global(lane, address, bytes);
    }
  }

 private:
  std::uint8_t* shared(int lane, std::uint64_t offset, int bytes) {
    address_[static_cast<std::size_t>(lane)] = offset;
    is_shared_ |= 1u << lane;
    touch_shared(w_, i_, lane, offset, bytes, write_, atomic_);
    return w_.block->shared.data() + offset;
  }

  std::uint8_t* local(int lane, std::uint64_t offset, int bytes) {
    const std::int64_t each = w_.block->kernel->local_bytes;
    if (static_cast<std::int64_t>(offset) + bytes > each)
      found(Check::out_of_bounds, w_, i_, lane, fmt::format("local memory + {} of {} bytes", offset, each));
    return w_.local.data() + static_cast<std::size_t>(lane) * static_cast<std::size_t>(each) + offset;
  }

  std::uint8_t* global(int lane, std::uint64_t address, int bytes) {
    DeviceMemory::Range* r = range_;
    if (r == nullptr || address < r->begin || address >= r->begin + static_cast<std::uint64_t>(r->bytes))
      r = range_ = w_.block->memory->find(address);
    if (r == nullptr || address + static_cast<std::uint64_t>(bytes) > r->begin + static_cast<std::uint64_t>(r->bytes))
      found(Check::out_of_bounds, w_, i_, lane,
            fmt::format("{} of {} bytes at {}", write_ ? "write" : "read", bytes, w_.block->memory->describe(address)));
    const auto first = static_cast<std::size_t>(address - r->begin);
    if (write_) {
      if (!r->all_written) std::memset(r->written.data() + first, 1, static_cast<std::size_t>(bytes));
    } else if (!r->is_written(first, static_cast<std::size_t>(bytes))) {
      found(Check::uninitialised, w_, i_, lane,
            fmt::format("read of {} bytes at {}", bytes, w_.block->memory->describe(address)));
    }
    if (w_.block->memory->watching()) r->touch(first, bytes, write_);
    address_[static_cast<std::size_t>(lane)] = address;
    is_global_ |= 1u << lane;
    return reinterpret_cast<std::uint8_t*>(address);
  }

 public:
  /// Adds what the warp's lanes asked for together to the counters.
  void count(int bytes) {
    if (!w_.block->count_traffic) return;
    Counters& c = *w_.block->counters;
    if (is_global_ != 0) {
      const std::int64_t total = std::int64_t{bytes} * std::popcount(is_global_);
      (write_ ? c.global_written_bytes : c.global_read_bytes) += total;
      ++c.global_requests;
      c.global_sectors += sectors(bytes);
    }
    if (is_shared_ != 0) {
      ++c.shared_requests;
      c.shared_wavefronts += wavefronts(bytes);
    }
  }

 private:
  std::int64_t sectors(int bytes) const {
    std::array<std::uint64_t, 8 * lanes> touched{};
    std::size_t n = 0;
    each_lane(is_global_, [&](int l) {
      const std::uint64_t a = address_[static_cast<std::size_t>(l)];
      for (std::uint64_t s = a / 32; s <= (a + static_cast<std::uint64_t>(bytes) - 1) / 32; ++s) touched[n++] = s;
    });
    std::sort(touched.begin(), touched.begin() + static_cast<std::ptrdiff_t>(n));
    return std::unique(touched.begin(), touched.begin() + static_cast<std::ptrdiff_t>(n)) - touched.begin();
  }

  /// Passes that 32 banks of 4 bytes need: 128 bytes at most in one, and a bank serves one word (to any number of
  /// lanes). Wide accesses are served in as many parts as they have words.
  std::int64_t wavefronts(int bytes) const {
    const int parts = std::max(1, bytes / 4), per = lanes / parts;
    std::int64_t total = 0;
    for (int part = 0; part < parts; ++part) {
      std::array<std::array<std::uint64_t, lanes>, 32> seen;
      std::array<int, 32> depth{};
      for (int l = part * per; l < (part + 1) * per; ++l) {
        if (!((is_shared_ >> l) & 1u)) continue;
        for (int word = 0; word < parts; ++word) {
          const std::uint64_t at = address_[static_cast<std::size_t>(l)] / 4 + static_cast<std::uint64_t>(word);
          const auto bank = static_cast<std::size_t>(at % 32);
          auto& list = seen[bank];
          if (std::find(list.begin(), list.begin() + depth[bank], at) == list.begin() + depth[bank])
            list[static_cast<std::size_t>(depth[bank]++)] = at;
        }
      }
      total += *std::max_element(depth.begin(), depth.end());
    }
    return total;
  }

  Warp& w_;
  const Instruction& i_;
  bool write_, atomic_;
  DeviceMemory::Range* range_ = nullptr;  // the last one
  std::uint32_t is_global_ = 0, is_shared_ = 0;
  std::array<std::uint64_t, lanes> address_{};
};

/// A register is as wide as it is declared, or wider than what is loaded: the value is extended by its type's sign (PTX
/// ISA, ld). What reads a narrow register takes its lower bits.
std::uint64_t extended(Type type, const std::uint8_t* from) {
  const auto as = [&](auto value) {
    std::memcpy(&value, from, sizeof value);
    return static_cast<std::uint64_t>(value);
  };
  switch (type) {
    case Type::s8:
      return as(std::int8_t{});
    case Type::s16:
      return as(std::int16_t{});
    case Type::s32:
      return as(std::int32_t{});
    default:
      break;
  }
  switch (bytes_of(type)) {
    case 1:
      return as(std::uint8_t{});
    case 2:
      return as(std::uint16_t{});
    case 4:
      return as(std::uint32_t{});
    default:
      return as(std::uint64_t{});
  }
}

/// The lower bytes of a register.
void put_lower(std::uint8_t* to, std::uint64_t value, int bytes) {
  const auto as = [&](auto lower) { std::memcpy(to, &lower, sizeof lower); };
  switch (bytes) {
    case 1:
      return as(static_cast<std::uint8_t>(value));
    case 2:
      return as(static_cast<std::uint16_t>(value));
    case 4:
      return as(static_cast<std::uint32_t>(value));
    default:
      return as(value);
  }
}

void load_parameter(Warp& w, const Instruction& i, std::uint32_t mask) {
  const int bytes = bytes_of(i.type);
  const auto* p = reinterpret_cast<const std::uint8_t*>(w.block->parameters);
  const std::uint64_t* base = w.slot(i.source[0]);
  each_lane(mask, [&](int l) {
    const auto at = static_cast<std::int64_t>(base[l]) + i.offset;
    if (at < 0 || at + bytes * i.vector > w.block->kernel->parameter_bytes)
      found(Check::out_of_bounds, w, i, l,
            fmt::format("parameters + {} of {} bytes", at, w.block->kernel->parameter_bytes));
    for (int k = 0; k < i.vector; ++k)
      w.slot(i.destination[static_cast<std::size_t>(k)])[l] = extended(i.type, p + at + k * bytes);
  });
}

void load(Warp& w, const Instruction& i, std::uint32_t mask) {
  if (i.space == Space::param) return load_parameter(w, i, mask);
  const int bytes = bytes_of(i.type);
  const std::uint64_t* base = w.slot(i.source[0]);
  Accessor access(w, i, false);
  each_lane(mask, [&](int l) {
    const std::uint8_t* from = access.at(l, i.space, base[l] + static_cast<std::uint64_t>(i.offset), bytes * i.vector);
    // The address register may be among the destinations: all bytes first.
    std::array<std::uint64_t, 8> values;
    for (int k = 0; k < i.vector; ++k) values[static_cast<std::size_t>(k)] = extended(i.type, from + k * bytes);
    for (int k = 0; k < i.vector; ++k)
      if (const Slot s = i.destination[static_cast<std::size_t>(k)]; s != no_slot)
        w.slot(s)[l] = values[static_cast<std::size_t>(k)];
  });
  access.count(bytes * i.vector);
}

void store(Warp& w, const Instruction& i, std::uint32_t mask) {
  const int bytes = bytes_of(i.type);
  const std::uint64_t* base = w.slot(i.source[0]);
  Accessor access(w, i, true);
  each_lane(mask, [&](int l) {
    std::uint8_t* to = access.at(l, i.space, base[l] + static_cast<std::uint64_t>(i.offset), bytes * i.vector);
    for (int k = 0; k < i.vector; ++k)
      put_lower(to + k * bytes, w.slot(i.source[static_cast<std::size_t>(1 + k)])[l], bytes);
  });
  access.count(bytes * i.vector);
}

template <class T>
T combined(Mode mode, T old, T value) {
  switch (mode) {
    case Mode::add:
      return static_cast<T>(old + value);
    case Mode::min:
      return std::min(old, value);
    case Mode::max:
      return std::max(old, value);
    case Mode::exch:
      return value;
    default:
      break;
  }
  if constexpr (std::is_integral_v<T>) {
    if (mode == Mode::and_) return old & value;
    if (mode == Mode::or_) return old | value;
    if (mode == Mode::xor_) return old ^ value;
    if (mode == Mode::inc) return old >= value ? T{0} : static_cast<T>(old + 1);
    if (mode == Mode::dec) return old == 0 || old > value ? value : static_cast<T>(old - 1);
  }
  throw UnknownPtx("this atomic operation is not implemented");
}

/// Lanes in order: one of the orders that hardware may take.
template <class T>
void atomic(Warp& w, const Instruction& i, std::uint32_t mask) {
  const std::uint64_t* base = w.slot(i.source[0]);
  Accessor access(w, i, true, true);
  each_lane(mask, [&](int l) {
    std::uint8_t* at = access.at(l, i.space, base[l] + static_cast<std::uint64_t>(i.offset), sizeof(T));
    T old;
    std::memcpy(&old, at, sizeof(T));
    const T value = get<T>(w.slot(i.source[1]), l);
    T next;
    if (i.mode == Mode::cas) next = old == value ? get<T>(w.slot(i.source[2]), l) : old;
    else next = combined(i.mode, old, value);
    std::memcpy(at, &next, sizeof(T));
    if (i.opcode == Opcode::atom && i.destination[0] != no_slot) put(w.slot(i.destination[0]), l, old);
  });
  access.count(sizeof(T));
}

void run_atomic(Warp& w, const Instruction& i, std::uint32_t mask) {
  switch (i.type) {
    case Type::f32:
      return atomic<float>(w, i, mask);
    case Type::f64:
      return atomic<double>(w, i, mask);
    case Type::s32:
      return atomic<std::int32_t>(w, i, mask);
    case Type::s64:
      return atomic<std::int64_t>(w, i, mask);
    case Type::u64:
    case Type::b64:
      return atomic<std::uint64_t>(w, i, mask);
    case Type::u32:
    case Type::b32:
      return atomic<std::uint32_t>(w, i, mask);
    default:
      throw UnknownPtx(fmt::format("{}: this type is not implemented", w.block->at(i)));
  }
}

/// The bytes arrive as late as PTX allows, when the group is waited for: who reads before finds them in flight.
void start_copy(Warp& w, const Instruction& i, std::uint32_t mask) {
  const std::uint64_t *to = w.slot(i.source[0]), *from = w.slot(i.source[1]);
  const std::uint64_t* source_bytes = i.num_sources > 2 ? w.slot(i.source[2]) : nullptr;
  Accessor write(w, i, true), read(w, i, false);
  each_lane(mask, [&](int l) {
    AsyncCopy c;
    c.shared = static_cast<std::int64_t>(to[l] & 0xffffffffu) + i.offset;
    c.global = from[l] + static_cast<std::uint64_t>(i.offset2);
    c.bytes = i.immediate;
    c.source_bytes = source_bytes == nullptr ? i.immediate : static_cast<std::int32_t>(source_bytes[l]);
    c.lane = l;
    c.line = i.line;
    write.at(l, Space::shared, static_cast<std::uint64_t>(c.shared), c.bytes);
    for (std::int32_t b = 0; b < c.source_bytes; b += 4)
      read.at(l, Space::global, c.global + static_cast<std::uint64_t>(b), 4);
    for (std::int64_t b = c.shared / 2; b < (c.shared + c.bytes) / 2; ++b)
      w.block->shadow_of(static_cast<std::size_t>(b)).in_flight = true;
    w.open_copies.push_back(c);
  });
  write.count(i.immediate);
  read.count(i.immediate);
}

void finish_copies(Warp& w, std::uint32_t mask, std::size_t groups_left) {
  // Groups are counted by thread; lanes of a warp commit together or not at all, which the mask check of the caller
  // ensures.
  (void)mask;
  while (w.copies.size() > groups_left) {
    for (const AsyncCopy& c : w.copies.front()) {
      std::uint8_t* to = w.block->shared.data() + c.shared;
      std::memset(to, 0, static_cast<std::size_t>(c.bytes));
      std::memcpy(to, reinterpret_cast<const void*>(c.global), static_cast<std::size_t>(c.source_bytes));
      for (std::int64_t b = c.shared / 2; b < (c.shared + c.bytes) / 2; ++b) {
        SharedShadow& s = w.block->shadow_of(static_cast<std::size_t>(b));
        s.in_flight = false;
        // Until the next barrier the bytes are this thread's own write.
        s.writer = {w.index * lanes + c.lane, w.block->barriers, w.syncs, c.line};
      }
    }
    w.copies.pop_front();
  }
}

}  // namespace

void touch_shared(Warp& w, const Instruction& i, int lane, std::uint64_t offset, int bytes, bool write, bool atomic) {
  Block& b = *w.block;
  if (offset + static_cast<std::uint64_t>(bytes) > b.shared.size())
    found(Check::out_of_bounds, w, i, lane,
          fmt::format("{} of {} bytes at shared memory + {} of {}", write ? "write" : "read", bytes, offset,
                      b.shared.size()));
  const SharedShadow::Touch now{w.index * lanes + lane, b.barriers, w.syncs, i.line};
  const auto unordered = [&](const SharedShadow::Touch& t) {
    if (t.thread < 0 || t.thread == now.thread || t.barrier != now.barrier) return false;
    return t.thread / lanes != w.index || t.warp_sync == now.warp_sync;
  };
  for (std::size_t k = offset / 2; k < (offset + static_cast<std::uint64_t>(bytes) + 1) / 2; ++k) {
    SharedShadow& s = b.shadow_of(k);
    if (s.in_flight && !write)
      found(Check::in_flight, w, i, lane, fmt::format("read of shared memory + {} before cp.async.wait_group", offset));
    if (!write && !s.written)
      found(Check::uninitialised, w, i, lane, fmt::format("read of shared memory + {}", offset));
    const SharedShadow::Touch* other = nullptr;
    const char* how = "";
    if (!atomic && unordered(s.writer)) other = &s.writer, how = write ? "both write" : "one writes, one reads";
    if (!atomic && write && unordered(s.reader)) other = &s.reader, how = "one reads, one writes";
    if (!atomic && write && unordered(s.other_reader)) other = &s.other_reader, how = "one reads, one writes";
    if (other != nullptr) {
      Instruction earlier;
      earlier.line = other->line;
      found(Check::shared_race, w, i, lane,
            fmt::format("shared memory + {}, also touched by thread {} at {} with no barrier between ({})", offset,
                        b.thread_name(other->thread), b.at(earlier), how));
    }
    if (write) {
      s.writer = now;
      s.written = true;
    } else if (s.reader.thread < 0 || s.reader.thread == now.thread || s.reader.barrier != now.barrier) {
      s.reader = now;
    } else {
      s.other_reader = now;
    }
  }
}

void run_memory(Warp& w, const Instruction& i, std::uint32_t mask) {
  switch (i.opcode) {
    case Opcode::ld:
      return load(w, i, mask);
    case Opcode::st:
      return store(w, i, mask);
    case Opcode::atom:
    case Opcode::red:
      return run_atomic(w, i, mask);
    case Opcode::cp_async:
      return start_copy(w, i, mask);
    case Opcode::cp_async_commit:
      w.copies.push_back(std::exchange(w.open_copies, {}));
      return;
    case Opcode::cp_async_wait:
      finish_copies(w, mask, static_cast<std::size_t>(i.immediate));
      return;
    case Opcode::cvta:
    case Opcode::cvta_to: {
      const std::uint64_t window = i.space == Space::shared  ? shared_window
                                   : i.space == Space::local ? local_window
                                                             : 0;
      std::uint64_t* d = w.slot(i.destination[0]);
      const std::uint64_t* a = w.slot(i.source[0]);
      each_lane(mask, [&](int l) { d[l] = i.opcode == Opcode::cvta ? a[l] | window : a[l] & ~window; });
      return;
    }
    default:
      return;  // fence, prefetch: order is there already
  }
}

}  // namespace hotbunk::ptx
