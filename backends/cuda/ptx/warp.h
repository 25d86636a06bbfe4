// A warp and its block while they run: registers, positions, shared memory and its shadow.
#pragma once
#include <bit>
#include <cstring>
#include <deque>
#include <limits>
#include <span>

#include "backends/cuda/ptx/machine.h"

namespace hotbunk::ptx {

inline constexpr int lanes = 32;
inline constexpr std::uint32_t all_lanes = 0xffffffffu;
/// Windows of generic addresses that no host pointer has.
inline constexpr std::uint64_t shared_window = 0x0100'0000'0000'0000u, local_window = 0x0200'0000'0000'0000u;
inline constexpr std::uint64_t window_mask = 0xff00'0000'0000'0000u;
inline constexpr std::int64_t max_shared_bytes = 227 * 1024;  // of a block, sm_90 and sm_100

/// Who touched a pair of bytes of shared memory last. Order between threads: the block's barriers, and inside a warp
/// its synchronising instructions.
struct SharedShadow {
  struct Touch {
    std::int32_t thread = -1, barrier = -1, warp_sync = -1, line = 0;
  };
  Touch writer, reader, other_reader;  // readers: two that differ, if there are
  bool written = false, in_flight = false;
  std::uint32_t block = 0;  // the number of the block that all this is of
};

struct AsyncCopy {
  std::int64_t shared = 0;  // offset
  std::uint64_t global = 0;
  std::int32_t bytes = 0, source_bytes = 0;  // what is beyond source_bytes is zero
  std::int32_t lane = 0, line = 0;
};

struct Block;

constexpr std::int32_t nobody_waits = std::numeric_limits<std::int32_t>::max();

struct Warp {
  Block* block = nullptr;
  std::int32_t index = 0;     // in the block
  std::uint32_t present = 0;  // lanes that are threads of the block
  std::uint32_t exited = 0;
  std::uint32_t active = 0;  // lanes at pc
  std::int32_t pc = 0;
  std::array<std::int32_t, lanes> lane_pc{};   // of present, unexited lanes that are not active
  std::int32_t lowest_waiting = nobody_waits;  // of those positions
  bool at_barrier = false;
  std::int32_t barrier_line = 0, barrier_id = 0;
  std::int32_t syncs = 0;                     // synchronising instructions so far
  std::vector<std::uint64_t> registers;       // [slot][lane]
  std::vector<std::uint8_t> local;            // [lane][local_bytes]
  std::deque<std::vector<AsyncCopy>> copies;  // committed groups, oldest first
  std::vector<AsyncCopy> open_copies;

  std::uint64_t* slot(Slot s) { return &registers[static_cast<std::size_t>(s) * lanes]; }
  std::uint32_t live() const { return present & ~exited; }
};

struct Block {
  const Kernel* kernel = nullptr;
  const Module* module = nullptr;
  DeviceMemory* memory = nullptr;
  Counters* counters = nullptr;
  bool count_traffic = true;
  const std::byte* parameters = nullptr;
  Dim3 grid, dim, index;
  std::vector<std::uint8_t> shared;
  std::vector<SharedShadow> shadow;  // of two bytes each, or more than there are
  std::vector<Warp> all_warps;       // of the widest block so far
  std::span<Warp> warps;
  std::int32_t barriers = 0;
  std::uint32_t number = 0;  // counts blocks

  /// Of the k-th two bytes; as new where another block left it.
  SharedShadow& shadow_of(std::size_t k) {
    SharedShadow& s = shadow[k];
    if (s.block != number) s = SharedShadow{}, s.block = number;
    return s;
  }

  /// "kernel k, line 12 'ld.shared…', block (0,0,0)".
  std::string at(const Instruction&) const;
  std::string thread_name(std::int32_t thread) const;
};

/// Calls f(lane) for each lane of the mask.
template <class F>
void each_lane(std::uint32_t mask, F&& f) {
  if (mask == all_lanes) {
    for (int l = 0; l < lanes; ++l) f(l);
  } else {
    for (std::uint32_t left = mask; left != 0; left &= left - 1) f(std::countr_zero(left));
  }
}

template <class T>
T get(const std::uint64_t* slot, int lane) {
  T value;
  std::memcpy(&value, &slot[lane], sizeof(T));
  return value;
}
template <class T>
void put(std::uint64_t* slot, int lane, T value) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  slot[lane] = bits;
}

// Each runs one instruction on the active lanes whose guard holds (`mask`).
void run_arithmetic(Warp&, const Instruction&, std::uint32_t mask);  // arithmetic.cc
void run_convert(Warp&, const Instruction&, std::uint32_t mask);     // convert.cc
void run_memory(Warp&, const Instruction&, std::uint32_t mask);      // memory.cc
void run_warp(Warp&, const Instruction&, std::uint32_t mask);        // exchange.cc
void run_matrix(Warp&, const Instruction&, std::uint32_t mask);      // matrix.cc

/// Reads and writes of shared memory, checked. `thread` is the index in the block.
void touch_shared(Warp&, const Instruction&, int lane, std::uint64_t offset, int bytes, bool write, bool atomic);

// Half precision, rounded to nearest even where nothing else is said.
float from_bf16(std::uint16_t);
float from_f16(std::uint16_t);
std::uint16_t to_bf16(double, Round = Round::rn);
std::uint16_t to_f16(double, Round = Round::rn);

}  // namespace hotbunk::ptx
