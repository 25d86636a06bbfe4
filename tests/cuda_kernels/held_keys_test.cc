// Engines whose ranks hold every sequence's keys in parts: what each attends to, by rows and in tiles, merged by the
// log-sum-exps is attention of whole sequences in fp64.
#include <catch2/catch.hpp>
#include <cmath>

#include "tests/cuda_kernels/attention_reference.h"

using namespace hotbunk;
using namespace hotbunk::ptx;

namespace {

/// A file's kernels on a memory that others share.
struct File {
  File(std::string_view name, DeviceMemory& memory) : module(parse(kernel_ptx(name))), machine(module, memory) {}
  template <class... T>
  void run(const std::string& kernel, Dim3 grid, std::uint32_t threads, const T&... values) {
    machine.launch(kernel, {grid, {threads}, 0, Arguments(values...).bytes()});
  }
  Module module;
  Machine machine;
};

struct Kernels {
  DeviceMemory memory;
  File rows{"attention", memory}, tiles{"attention_tiled", memory}, sinks{"sinks", memory};
};

std::uint32_t warps_of_two(int n) { return static_cast<std::uint32_t>((n + 1) / 2); }  // blocks of 64 threads

constexpr int tokens_of_block = 4;

/// Blocks of all ranks together, ranks tokens_of_block tokens each, in no order.
struct Tables {
  int ranks, each;
  std::vector<std::int32_t> numbers;
  Tables(const Shape& s, int of) : ranks(of), each(0) {
    for (std::size_t q = 0; q + 1 < s.cu.size(); ++q)
      each = std::max(each, (s.cu[q + 1] - s.cu[q] + ranks * tokens_of_block - 1) / (ranks * tokens_of_block));
    const int all = each * s.S();
    for (int i = 0; i < all; ++i) numbers.push_back(all - 1 - i);
  }
  /// As the host feeds it: position p of sequence q.
  std::int32_t slot(int q, int p) const {
    const int in_block = ranks * tokens_of_block;
    return numbers[static_cast<std::size_t>(q * each + p / in_block)] * in_block + p % in_block;
  }
};

/// Every row of the sequences a query, as in a prefill of all of them, or the last of each alone, as in decoding.
template <class E>
void check_parts(Kernels& k, const Shape& s, int ranks, bool tiled) {
  const std::string name = suffix<E>, D = std::max(s.d, s.of_value()) <= 64 ? "64" : "128";
  const float scale = 1.0f / std::sqrt(static_cast<float>(s.d));
  Draw draw(static_cast<std::uint64_t>(s.d + ranks));
  const auto ad = static_cast<std::size_t>(s.a * s.of_value()), a = static_cast<std::size_t>(s.a);
  const std::vector<E> x = draw.numbers<E>(static_cast<std::size_t>(s.T() * s.width()), 2.0);
  const auto wanted = attention_of(s, x, scale);
  const Tables blocks(s, ranks);
  std::vector<std::int32_t> slots, lengths, last{0}, rows_of_last;
  for (int q = 0; q < s.S(); ++q) {
    const int n = s.cu[static_cast<std::size_t>(q) + 1] - s.cu[static_cast<std::size_t>(q)];
    for (int p = 0; p < n; ++p) slots.push_back(blocks.slot(q, p));
    lengths.push_back(n), last.push_back(last.back() + (n > 0 ? 1 : 0));
    if (n > 0) rows_of_last.push_back(s.cu[static_cast<std::size_t>(q) + 1] - 1);
  }
  slots[0] = -1;  // nobody's, though somebody has it
  Array<E> all(k.memory, "x", x);
  Array<std::int32_t> where(k.memory, "slots", slots), table(k.memory, "tables", blocks.numbers),
      length(k.memory, "lengths", lengths), first_slot(k.memory, "slot", std::vector<std::int32_t>{blocks.slot(0, 0)});
  for (const bool decode : {false, true}) {
    const std::vector<std::int32_t> cu_of = decode ? last : s.cu;
    std::vector<E> queries;
    std::vector<std::size_t> row_of;
    for (int t = 0; t < cu_of.back(); ++t) {
      row_of.push_back(static_cast<std::size_t>(decode ? rows_of_last[static_cast<std::size_t>(t)] : t));
      const E* from = x.data() + row_of.back() * static_cast<std::size_t>(s.width());
      queries.insert(queries.end(), from, from + s.width());
    }
    const int T = cu_of.back();
    const auto n = static_cast<std::size_t>(T);
    Array<E> q(k.memory, "q", queries);
    Array<std::int32_t> cu(k.memory, "cu_seqlens", cu_of);
    std::vector<std::vector<E>> parts;
    std::vector<float> lses;
    for (int rank = 0; rank < ranks; ++rank) {
      const KeyShare share{ranks, rank};
      Array<E> pool(k.memory, "pool", blocks.numbers.size() * static_cast<std::size_t>(tokens_of_block * s.of_keys())),
          o(k.memory, "o", n * ad);
      Array<float> lse(k.memory, "lse", n * a);
      k.rows.run("kv_write_" + name, {static_cast<std::uint32_t>(s.T())}, 32, all.begin(), where.begin(), pool.begin(),
                 s.heads(), tokens_of_block, share);
      k.rows.run("kv_write_" + name, {1}, 32, all.begin(), first_slot.begin(), pool.begin(), s.heads(), tokens_of_block,
                 share);
      if (tiled)
        k.tiles.run("tiled_paged_attention_" + D,
                    {static_cast<std::uint32_t>((T * s.a / s.k + 63) / 64 + s.S()), static_cast<std::uint32_t>(s.k)},
                    128, q.begin(), s.width(), pool.begin(), cu.begin(), table.begin(), length.begin(), o.begin(),
                    lse.begin(), s.S(), s.heads(), tokens_of_block, blocks.each, s.scores(scale), share);
      else
        k.rows.run("paged_attention_" + name, {warps_of_two(T * s.a)}, 64, q.begin(), s.width(), pool.begin(),
                   cu.begin(), table.begin(), length.begin(), o.begin(), lse.begin(), T, s.S(), s.heads(),
                   tokens_of_block, blocks.each, s.scores(scale), share);
      parts.push_back(o.values());
      for (const float v : lse.values()) lses.push_back(v);
    }
    // What each rank then makes of its own: its part of all keys'.
    Array<float> everyone(k.memory, "lses", lses);
    std::vector<double> sums(n * ad), errors = sums;
    constexpr DType dtype = std::is_same_v<E, Bf16> ? DType::bf16 : DType::f32;
    for (int rank = 0; rank < ranks; ++rank) {
      Array<E> o(k.memory, "o", parts[static_cast<std::size_t>(rank)]);
      const auto own = lses.begin() + rank * T * s.a;
      Array<float> lse(k.memory, "lse", std::vector<float>(own, own + T * s.a));
      k.sinks.run("attention_sinks_part_" + name, {warps_of_two(T * s.a)}, 64, o.begin(), lse.begin(), everyone.begin(),
                  ranks, T, s.a, s.of_value());
      for (std::size_t i = 0; i < sums.size(); ++i) {
        sums[i] += value(o[i]);
        // What was stored of these keys alone, times their share in the softmax of all, and stored again: log-sum-exps
        // of parts are as exact as the whole one.
        const std::size_t row = i / ad, head = i % ad / static_cast<std::size_t>(s.of_value());
        const conformance::Bounded& of_all = wanted.lse.numbers[row_of[row] * a + head];
        const conformance::Bounded of_part(own[static_cast<std::ptrdiff_t>(row * a + head)], of_all.error);
        const conformance::Bounded stored =
            conformance::rounded(value(parts[static_cast<std::size_t>(rank)][i]), dtype);
        errors[i] += conformance::rounded(stored * exp(of_part - of_all), dtype).error;
      }
      for (std::size_t i = 0; i < n * a; ++i)
        REQUIRE(lse[i] == Approx(wanted.lse.numbers[row_of[i / a] * a + i % a].value).epsilon(1e-5).margin(1e-5));
    }
    for (std::size_t i = 0; i < sums.size(); ++i) {
      const std::size_t at = row_of[i / ad] * ad + i % ad;
      // As far off as whole attention, and what parts are by being parts.
      const conformance::Bounded& o = wanted.o.numbers[at];
      if (std::abs(sums[i] - o.value) <= o.error + errors[i]) continue;
      FAIL((decode ? "decoding, " : "") << "element " << i << ": " << sums[i] << ", not " << o.value);
    }
  }
}

// Sequences of one token, of which one rank has all, of none, and of more than a tile of every rank's; values of other
// widths; windows narrower than the ranks are many, and wider; capped scores.
const std::vector<Shape> held_shapes = {
    {4, 2, 16, {0, 1, 1, 24}}, {2, 1, 8, {0, 9, 13}, 24, 2}, {2, 2, 24, {0, 3, 40}, 16, 11, 1.5f}, {1, 1, 8, {0, 140}}};

}  // namespace

TEMPLATE_TEST_CASE("keys of every sequence in parts: attention by rows", "[kernels][held]", float, Bf16) {
  Kernels k;
  for (const Shape& s : held_shapes)
    for (const int ranks : {2, 3})
      if (s.T() < 100) {  // the long one is for tiles
        INFO(s.d << " numbers of a head, " << ranks << " ranks");
        check_parts<TestType>(k, s, ranks, false);
      }
}

TEST_CASE("keys of every sequence in parts: attention in tiles", "[kernels][held]") {
  Kernels k;
  for (const Shape& s : held_shapes)
    for (const int ranks : {2, 3}) {
      INFO(s.d << " numbers of a head, " << ranks << " ranks");
      check_parts<Bf16>(k, s, ranks, true);
    }
}
