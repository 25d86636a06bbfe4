// ldmatrix and mma.sync: how the fragments of a 16 x n x k product lie in the lanes of a warp (PTX ISA, "Matrix
// Fragments for mma.m16n8k16 / m16n8k8"). g = lane / 4 is a fragment's row group, t = lane % 4 the thread in it.
#include <fmt/format.h>

#include <algorithm>

#include "backends/cuda/ptx/warp.h"

namespace hotbunk::ptx {
namespace {

void need_whole_warp(Warp& w, const Instruction& i, std::uint32_t mask) {
  if (mask != all_lanes)
    throw Finding(Check::warp_operation, fmt::format("{}: {}, warp {}: all 32 lanes must be here, not {:#010x}",
                                                     name_of(Check::warp_operation), w.block->at(i), w.index, mask));
}

/// Each of the matrices has eight rows of 16 bytes; lane 8 j + r holds the address of row r of matrix j.
void load_matrices(Warp& w, const Instruction& i) {
  const std::uint64_t* address = w.slot(i.source[0]);
  std::array<std::array<std::array<std::uint16_t, 8>, 8>, 4> m{};  // [matrix][row][column]
  std::array<std::uint64_t, lanes> rows{};
  for (int l = 0; l < 8 * i.vector; ++l) {
    std::uint64_t at = address[l] + static_cast<std::uint64_t>(i.offset);
    if ((at & window_mask) == shared_window) at &= ~window_mask;
    if (at % 16 != 0)
      throw Finding(Check::misaligned, fmt::format("{}: {}, lane {}: a row at shared memory + {}",
                                                   name_of(Check::misaligned), w.block->at(i), l, at));
    touch_shared(w, i, l, at, 16, false, false);
    std::memcpy(m[static_cast<std::size_t>(l / 8)][static_cast<std::size_t>(l % 8)].data(), w.block->shared.data() + at,
                16);
    rows[static_cast<std::size_t>(l)] = at;
  }
  for (int j = 0; j < i.vector; ++j) {
    // A row is four banks: eight rows are one pass where they meet no bank twice.
    std::array<int, 8> depth{};
    for (int r = 0; r < 8; ++r) ++depth[(rows[static_cast<std::size_t>(8 * j + r)] / 16) % 8];
    w.block->counters->shared_wavefronts += *std::max_element(depth.begin(), depth.end());
    std::uint64_t* d = w.slot(i.destination[static_cast<std::size_t>(j)]);
    const auto& x = m[static_cast<std::size_t>(j)];
    for (std::size_t l = 0; l < lanes; ++l) {
      const std::size_t g = l / 4, t = 2 * (l % 4);
      d[l] = i.transposed ? static_cast<std::uint64_t>(x[t][g]) | static_cast<std::uint64_t>(x[t + 1][g]) << 16
                          : static_cast<std::uint64_t>(x[g][t]) | static_cast<std::uint64_t>(x[g][t + 1]) << 16;
    }
  }
  ++w.block->counters->shared_requests;
  ++w.syncs;
}

/// Element `part` of a register of two halves, or of one tf32.
double element(const Instruction& i, std::uint64_t bits, int part) {
  if (i.from == Type::tf32) return std::bit_cast<float>(static_cast<std::uint32_t>(bits) & 0xffffe000u);
  const auto half = static_cast<std::uint16_t>(bits >> (16 * part));
  return i.from == Type::bf16 ? from_bf16(half) : from_f16(half);
}

void multiply(Warp& w, const Instruction& i) {
  const int k = i.shape_k, per = i.from == Type::tf32 ? 1 : 2;  // elements in a register
  const int a_registers = 16 * k / lanes / per, b_registers = 8 * k / lanes / per;
  std::array<std::array<double, 16>, 16> a{};  // [row][k]
  std::array<std::array<double, 8>, 16> b{};   // [k][column]
  const int block = 4 * per;                   // columns of k that one register of all lanes covers
  for (int l = 0; l < lanes; ++l) {
    const int g = l / 4, t = l % 4;
    for (int r = 0; r < a_registers; ++r)
      for (int e = 0; e < per; ++e)
        a[static_cast<std::size_t>(g + 8 * (r % 2))][static_cast<std::size_t>(block * (r / 2) + t * per + e)] =
            element(i, w.slot(i.source[static_cast<std::size_t>(r)])[l], e);
    for (int r = 0; r < b_registers; ++r)
      for (int e = 0; e < per; ++e)
        b[static_cast<std::size_t>(block * r + t * per + e)][static_cast<std::size_t>(g)] =
            element(i, w.slot(i.source[static_cast<std::size_t>(a_registers + r)])[l], e);
  }
  const int c_begin = a_registers + b_registers;
  for (int l = 0; l < lanes; ++l)
    for (int r = 0; r < 4; ++r) {
      const auto row = static_cast<std::size_t>(l / 4 + 8 * (r / 2)),
                 column = static_cast<std::size_t>(2 * (l % 4) + r % 2);
      double sum = get<float>(w.slot(i.source[static_cast<std::size_t>(c_begin + r)]), l);
      for (std::size_t x = 0; x < static_cast<std::size_t>(k); ++x) sum += a[row][x] * b[x][column];
      put(w.slot(i.destination[static_cast<std::size_t>(r)]), l, static_cast<float>(sum));
    }
  w.block->counters->flops += std::int64_t{2} * 16 * 8 * k;
  ++w.syncs;
}

}  // namespace

void run_matrix(Warp& w, const Instruction& i, std::uint32_t mask) {
  need_whole_warp(w, i, mask);
  if (i.opcode == Opcode::ldmatrix) load_matrices(w, i);
  else multiply(w, i);
}

}  // namespace hotbunk::ptx
