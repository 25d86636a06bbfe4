// Attention over packed sequences and over a paged pool, by rows and in tiles, against fp64; and bit for bit the same
// for training, prefill and decode (P5).
#include <catch2/catch.hpp>
#include <cmath>

#include "tests/cuda_kernels/attention_reference.h"

using namespace hotbunk;
using namespace hotbunk::ptx;

namespace {

// The last ones with values narrower than keys and wider, a window, and capped scores.
const std::vector<Shape> shapes = {{2, 1, 8, {0, 5}},
                                   {4, 2, 40, {0, 1, 7, 12}},
                                   {3, 3, 64, {0, 4, 4, 9}},
                                   {2, 2, 24, {0, 6}, 10},
                                   {4, 2, 8, {0, 9, 12}, 40, 3},
                                   {2, 1, 16, {0, 8}, 0, 1, 2.0f},
                                   {2, 1, 16, {0, 8}, 0, 0, 1.5f}};

std::uint32_t blocks_of(std::int64_t warps) { return static_cast<std::uint32_t>((warps + 1) / 2); }  // of 64 threads

}  // namespace

TEMPLATE_TEST_CASE("attention of packed sequences, and its backward", "[kernels]", float, Bf16) {
  using E = TestType;
  const std::string name = suffix<E>;
  Device d("attention");
  for (const Shape& s : shapes) {
    Draw draw(static_cast<std::uint64_t>(s.d));
    const float scale = 1.0f / std::sqrt(static_cast<float>(s.d));
    const auto T = static_cast<std::size_t>(s.T()), a = static_cast<std::size_t>(s.a),
               ad = a * static_cast<std::size_t>(s.of_value());
    Array<E> x(d.memory, "x", draw.numbers<E>(T * static_cast<std::size_t>(s.width()), 2.0)),
        g(d.memory, "do", draw.numbers<E>(T * ad));
    Array<E> o(d.memory, "o", T * ad), dx(d.memory, "dx", x.size());
    Array<float> lse(d.memory, "lse", T * a), delta(d.memory, "delta", T * a);
    Array<std::int32_t> cu(d.memory, "cu_seqlens", s.cu);
    d.run("attention_" + name, {blocks_of(s.T() * s.a)}, 64, x.begin(), cu.begin(), o.begin(), lse.begin(), s.T(),
          s.S(), s.heads(), s.scores(scale));
    d.run("attention_query_backward_" + name, {blocks_of(s.T() * s.a)}, 64, g.begin(), x.begin(), o.begin(),
          lse.begin(), cu.begin(), dx.begin(), delta.begin(), s.T(), s.S(), s.heads(), s.scores(scale));
    d.run("attention_key_backward_" + name, {blocks_of(s.T() * s.k)}, 64, g.begin(), x.begin(), lse.begin(),
          delta.begin(), cu.begin(), dx.begin(), s.T(), s.S(), s.heads(), s.scores(scale));
    const auto wanted = attention_of(s, x.values(), scale);
    near(o.values(), wanted.o);
    near(lse.values(), wanted.lse);
    near(dx.values(), attention_gradient_of(s, x.values(), g.values(), o.values(), lse.values(), scale));
  }
}

TEMPLATE_TEST_CASE("prefill in chunks and decode give the bits of the whole sequence", "[kernels]", float, Bf16) {
  using E = TestType;
  const std::string name = suffix<E>;
  Device d("attention");
  // The second with values of another width, a window and capped scores.
  const Shape s = GENERATE(Shape{4, 2, 24, {0, 9}}, Shape{4, 2, 24, {0, 9}, 10, 4, 1.5f});
  const int block_tokens = 4, max_blocks = 4;
  const float scale = 0.2f;
  Draw draw(1);
  const auto ad = static_cast<std::size_t>(s.a * s.of_value()), width = static_cast<std::size_t>(s.width());
  Array<E> x(d.memory, "x", draw.numbers<E>(9 * width)), whole(d.memory, "o", 9 * ad);
  Array<float> lse(d.memory, "lse", 9 * 4);
  Array<std::int32_t> cu(d.memory, "cu_seqlens", s.cu);
  d.run("attention_" + name, {18}, 64, x.begin(), cu.begin(), whole.begin(), lse.begin(), 9, 1, s.heads(),
        s.scores(scale));
  // The pool's blocks in no order; chunks of 4 and 3 rows, then two decode steps of one.
  Array<E> pool(d.memory, "pool", static_cast<std::size_t>(5 * block_tokens * s.of_keys()));
  Array<std::int32_t> table(d.memory, "table", std::vector<std::int32_t>{3, 0, 4, 1});
  std::vector<E> got;
  float* const no_lse = nullptr;
  for (const auto& [from, rows] : std::vector<std::pair<int, int>>{{0, 4}, {4, 3}, {7, 1}, {8, 1}}) {
    std::vector<std::int32_t> slots;
    for (int t = from; t < from + rows; ++t)
      slots.push_back(table[static_cast<std::size_t>(t / block_tokens)] * block_tokens + t % block_tokens);
    Array<std::int32_t> where(d.memory, "slots", slots), chunk(d.memory, "cu", std::vector<std::int32_t>{0, rows}),
        length(d.memory, "lengths", std::vector<std::int32_t>{from + rows});
    Array<E> part(d.memory, "part",
                  std::vector<E>(x.begin() + from * s.width(), x.begin() + (from + rows) * s.width())),
        o(d.memory, "o", static_cast<std::size_t>(rows) * ad);
    d.run("kv_write_" + name, {static_cast<std::uint32_t>(rows)}, 32, part.begin(), where.begin(), pool.begin(),
          s.heads(), block_tokens, KeyShare{});
    d.run("paged_attention_" + name, {blocks_of(rows * s.a)}, 64, part.begin(), s.width(), pool.begin(), chunk.begin(),
          table.begin(), length.begin(), o.begin(), no_lse, rows, 1, s.heads(), block_tokens, max_blocks,
          s.scores(scale), KeyShare{});
    const auto values = o.values();
    got.insert(got.end(), values.begin(), values.end());
  }
  CHECK(got == whole.values());
}

namespace {

/// Tiles of so many items at most.
std::uint32_t tiles(int items, int S) { return static_cast<std::uint32_t>((items + 63) / 64 + S); }

}  // namespace

TEST_CASE("attention in tiles, and its backward", "[kernels][tiled]") {
  Device d("attention_tiled");
  // Sequences of one row, of none, of a tile and one row more; heads that fill a tile's columns and that do not;
  // groups.
  const std::vector<Shape> tiled = {{2, 1, 8, {0, 5}},
                                    {6, 2, 40, {0, 1, 7, 12}},
                                    {3, 3, 64, {0, 4, 4, 69}},
                                    {4, 1, 128, {0, 3, 20}},
                                    {2, 1, 96, {0, 66}},
                                    // Values of other widths; windows within a tile, of more than one, and of a key;
                                    // capped scores.
                                    {2, 2, 24, {0, 9}, 72},
                                    {2, 1, 8, {0, 3, 135}, 0, 5},
                                    {1, 1, 16, {0, 140}, 8, 66, 2.0f},
                                    {2, 1, 128, {0, 7}, 64, 1},
                                    {4, 2, 16, {0, 20}, 0, 0, 1.5f}};
  for (const Shape& s : tiled) {
    INFO(s.a << " heads over " << s.k << " of " << s.d << ", " << s.T() << " rows");
    Draw draw(static_cast<std::uint64_t>(s.d));
    const std::string D = std::max(s.d, s.of_value()) <= 64 ? "64" : "128";
    const float scale = 1.0f / std::sqrt(static_cast<float>(s.d));
    const auto T = static_cast<std::size_t>(s.T()), a = static_cast<std::size_t>(s.a),
               ad = a * static_cast<std::size_t>(s.of_value());
    const auto k = static_cast<std::uint32_t>(s.k);
    Array<Bf16> x(d.memory, "x", draw.numbers<Bf16>(T * static_cast<std::size_t>(s.width()), 2.0)),
        g(d.memory, "do", draw.numbers<Bf16>(T * ad));
    Array<Bf16> o(d.memory, "o", T * ad), dx(d.memory, "dx", x.size());
    Array<float> lse(d.memory, "lse", T * a), delta(d.memory, "delta", T * a);
    Array<std::int32_t> cu(d.memory, "cu_seqlens", s.cu);
    d.run("tiled_attention_" + D, {tiles(s.T() * s.a / s.k, s.S()), k}, 128, x.begin(), cu.begin(), o.begin(),
          lse.begin(), s.S(), s.heads(), s.scores(scale));
    const auto wanted = attention_of(s, x.values(), scale);
    near(o.values(), wanted.o);
    near(lse.values(), wanted.lse);
    d.run("tiled_attention_query_backward_" + D, {tiles(s.T() * s.a / s.k, s.S()), k}, 128, g.begin(), x.begin(),
          o.begin(), lse.begin(), cu.begin(), dx.begin(), delta.begin(), s.S(), s.heads(), s.scores(scale));
    d.run("tiled_attention_key_backward_" + D, {tiles(s.T(), s.S()), k}, 128, g.begin(), x.begin(), lse.begin(),
          delta.begin(), cu.begin(), dx.begin(), s.S(), s.heads(), s.scores(scale));
    near(dx.values(), attention_gradient_of(s, x.values(), g.values(), o.values(), lse.values(), scale));
  }
}

TEST_CASE("in tiles, too, prefill in chunks and decode give the bits of the whole sequence", "[kernels][tiled]") {
  Device d("attention_tiled");
  const Shape s = GENERATE(Shape{4, 2, 24, {0, 71}}, Shape{4, 2, 24, {0, 71}, 40, 66, 1.5f}, Shape{4, 2, 128, {0, 71}});
  const std::string D = s.d > 64 ? "128" : "64";
  const int block_tokens = 8, max_blocks = 9, rows = s.T();
  const float scale = 0.2f;
  Draw draw(1);
  const auto ad = static_cast<std::size_t>(s.a * s.of_value());
  const std::vector<Bf16> all = draw.numbers<Bf16>(static_cast<std::size_t>(rows * s.width()));
  // In the batch, the sequence stands behind another one, and its tiles are other blocks'.
  std::vector<Bf16> batch = draw.numbers<Bf16>(static_cast<std::size_t>(3 * s.width()));
  batch.insert(batch.end(), all.begin(), all.end());
  Array<Bf16> x(d.memory, "x", batch), whole(d.memory, "o", static_cast<std::size_t>(rows + 3) * ad);
  Array<float> lse(d.memory, "lse", static_cast<std::size_t>((rows + 3) * s.a));
  Array<std::int32_t> cu(d.memory, "cu_seqlens", std::vector<std::int32_t>{0, 3, 3 + rows});
  d.run("tiled_attention_" + D, {tiles(2 * (rows + 3), 2), 2}, 128, x.begin(), cu.begin(), whole.begin(), lse.begin(),
        2, s.heads(), s.scores(scale));
  // The pool's blocks in no order, and all of it as decode finds it: what is not there yet is unwritten.
  Array<Bf16> pool(d.memory, "pool", static_cast<std::size_t>(9 * block_tokens * s.of_keys()));
  Array<std::int32_t> table(d.memory, "table", std::vector<std::int32_t>{3, 0, 4, 1, 8, 7, 2, 6, 5});
  std::vector<Bf16> got;
  int from = 0;
  for (const int count : {40, 28, 1, 1, 1}) {
    const auto n = static_cast<std::size_t>(count);
    for (int t = from; t < from + count; ++t) {  // kv_write
      const int slot = table[static_cast<std::size_t>(t / block_tokens)] * block_tokens + t % block_tokens;
      const int of_keys = s.k * s.d, v = s.of_value();
      const int block = slot / block_tokens * block_tokens * s.of_keys(), at = slot % block_tokens;
      for (int j = 0; j < s.of_keys(); ++j) {
        const int key = (j / s.d * block_tokens + at) * s.d + j % s.d, i = j - of_keys,
                  value = block_tokens * of_keys + (i / v * block_tokens + at) * v + i % v;
        const auto to = static_cast<std::size_t>(block + (j < of_keys ? key : value));
        pool[to] = all[static_cast<std::size_t>(t * s.width() + s.a * s.d + j)];
        d.memory.mark_written(reinterpret_cast<std::uint64_t>(pool.begin() + to), sizeof(Bf16));
      }
    }
    Array<std::int32_t> chunk(d.memory, "cu", std::vector<std::int32_t>{0, count}),
        length(d.memory, "lengths", std::vector<std::int32_t>{from + count});
    Array<Bf16> part(d.memory, "part",
                     std::vector<Bf16>(all.begin() + from * s.width(), all.begin() + (from + count) * s.width())),
        o(d.memory, "o", n * ad);
    Array<float> part_lse(d.memory, "lse", n * static_cast<std::size_t>(s.a));
    d.run("tiled_paged_attention_" + D, {tiles(2 * count, 1), 2}, 128, part.begin(), s.width(), pool.begin(),
          chunk.begin(), table.begin(), length.begin(), o.begin(), part_lse.begin(), 1, s.heads(), block_tokens,
          max_blocks, s.scores(scale), KeyShare{});
    const auto values = o.values();
    got.insert(got.end(), values.begin(), values.end());
    for (int i = 0; i < count * s.a; ++i)
      CHECK(part_lse[static_cast<std::size_t>(i)] == lse[static_cast<std::size_t>((3 + from) * s.a + i)]);
    from += count;
  }
  const std::vector<Bf16> trained = whole.values();
  CHECK(got == std::vector<Bf16>(trained.begin() + static_cast<std::ptrdiff_t>(3 * ad), trained.end()));
  // A slot that has no sequence.
  Array<std::int32_t> one(d.memory, "cu", std::vector<std::int32_t>{0, 1}),
      none(d.memory, "lengths", std::vector<std::int32_t>{0});
  Array<Bf16> o(d.memory, "o", ad);
  Array<float> of_none(d.memory, "lse", static_cast<std::size_t>(s.a));
  d.run("tiled_paged_attention_" + D, {2, 2}, 128, x.begin(), s.width(), pool.begin(), one.begin(), table.begin(),
        none.begin(), o.begin(), of_none.begin(), 1, s.heads(), block_tokens, max_blocks, s.scores(scale), KeyShare{});
  CHECK(o.values() == std::vector<Bf16>(ad, Bf16{0}));
  CHECK(of_none.values() == std::vector<float>(static_cast<std::size_t>(s.a), -INFINITY));
}
