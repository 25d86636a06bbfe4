// Attention of context-parallel ranks, around a ring and gathered, against attention of whole sequences in fp64.
#include <catch2/catch.hpp>
#include <cmath>

#include "tests/cuda_kernels/attention_reference.h"

using namespace hotbunk;
using namespace hotbunk::ptx;

namespace {

/// How `ranks` share sequences of so many times 2 ranks tokens.
struct Ring {
  int ranks, a, k, d;
  std::vector<int> chunks;  // tokens of a chunk, by sequence
  int v = 0, window = 0;    // as Shape has them
  float softcap = 0.0f;
  Shape whole() const {
    Shape s{a, k, d, {0}, v, window, softcap};
    for (const int c : chunks) s.cu.push_back(s.cu.back() + 2 * ranks * c);
    return s;
  }
  std::vector<std::int32_t> cu() const {
    std::vector<std::int32_t> out{0};
    for (const int c : chunks) out.push_back(out.back() + 2 * c);
    return out;
  }
  int rows() const { return cu().back(); }
  /// Which row of the whole a rank's rows are.
  std::vector<int> rows_of(int rank) const {
    std::vector<int> out;
    const Shape s = whole();
    for (std::size_t i = 0; i < chunks.size(); ++i)
      for (const int chunk : {rank, 2 * ranks - 1 - rank})
        for (int t = 0; t < chunks[i]; ++t) out.push_back(s.cu[i] + chunk * chunks[i] + t);
    return out;
  }
};

template <class E>
std::vector<E> taken(const std::vector<E>& from, const std::vector<int>& rows, int width, int begin, int count) {
  std::vector<E> out;
  for (const int r : rows)
    for (int j = 0; j < count; ++j) out.push_back(from[static_cast<std::size_t>(r * width + begin + j)]);
  return out;
}

std::uint32_t blocks_of(int warps) { return static_cast<std::uint32_t>((warps + 1) / 2); }  // of 64 threads

}  // namespace

TEMPLATE_TEST_CASE("attention around a ring, and gathered, is that of whole sequences", "[kernels][context]", float,
                   Bf16) {
  using E = TestType;
  const std::string name = suffix<E>, merged = name + "_f32";
  Device device("context");
  for (const Ring& ring :
       {Ring{1, 2, 1, 8, {3}}, {2, 4, 2, 40, {1, 2}}, {3, 3, 3, 16, {2, 0, 1}}, {2, 2, 1, 16, {2, 1}, 24, 3, 1.5f}})
    for (const int all : {0, 1}) {
      INFO(ring.ranks << " ranks, " << (all ? "gathered" : "around"));
      const Shape s = ring.whole();
      const float scale = 1.0f / std::sqrt(static_cast<float>(s.d));
      Draw draw(static_cast<std::uint64_t>(ring.ranks));
      const int T = ring.rows(), S = static_cast<int>(ring.chunks.size()), ad = s.a * s.of_value(),
                kv_width = s.of_keys(), queries = s.a * s.d;
      const auto n = static_cast<std::size_t>(T);
      const std::vector<E> x = draw.numbers<E>(static_cast<std::size_t>(s.T() * s.width()), 2.0),
                           g = draw.numbers<E>(static_cast<std::size_t>(s.T() * ad));
      const Attended attended = attention_of(s, x, scale);
      const std::vector<double> whole_o = values_of(attended.o), whole_lse = values_of(attended.lse),
                                whole_dx = values_of(attention_gradient_of(s, x, g, whole_o, whole_lse, scale));
      Array<std::int32_t> cu(device.memory, "cu_seqlens", ring.cu());
      // Gradients of keys and values by row of the whole: what each rank finds of them is added up.
      std::vector<double> d_kv(static_cast<std::size_t>(s.T() * kv_width));
      for (int rank = 0; rank < ring.ranks; ++rank) {
        const std::vector<int> rows = ring.rows_of(rank);
        Array<E> own(device.memory, "x", taken(x, rows, s.width(), 0, s.width())),
            d_o(device.memory, "do", taken(g, rows, ad, 0, ad));
        Array<float> o(device.memory, "o", n * static_cast<std::size_t>(ad)),
            lse(device.memory, "lse", n * static_cast<std::size_t>(s.a)),
            delta(device.memory, "delta", n * static_cast<std::size_t>(s.a)),
            dq(device.memory, "dq", n * static_cast<std::size_t>(queries));
        const auto kv_of = [&](int owner) { return taken(x, ring.rows_of(owner), s.width(), queries, kv_width); };
        std::vector<E> gathered;
        for (int r = 0; r < ring.ranks; ++r) {
          const std::vector<E> part = kv_of(r);
          gathered.insert(gathered.end(), part.begin(), part.end());
        }
        const int steps = all ? 1 : ring.ranks;
        for (int step = 0; step < steps; ++step) {
          const int source = (rank - step + ring.ranks) % ring.ranks;
          Array<E> kv(device.memory, "kv", all ? gathered : kv_of(source));
          device.run("context_attention_" + merged, {blocks_of(T * s.a)}, 64, own.begin(), kv.begin(), cu.begin(),
                     o.begin(), lse.begin(), T, S, s.heads(), ring.ranks, rank, source, all, s.scores(scale),
                     step > 0 ? 1 : 0);
        }
        std::vector<double> o_wanted, lse_wanted, dq_wanted;
        for (const int r : rows) {
          for (int j = 0; j < ad; ++j) o_wanted.push_back(whole_o[static_cast<std::size_t>(r * ad + j)]);
          for (int j = 0; j < s.a; ++j) lse_wanted.push_back(whole_lse[static_cast<std::size_t>(r * s.a + j)]);
          for (int j = 0; j < queries; ++j) dq_wanted.push_back(whole_dx[static_cast<std::size_t>(r * s.width() + j)]);
        }
        near(o.values(), o_wanted, 1e-5, 1e-5);
        near(lse.values(), lse_wanted, 1e-5, 1e-5);
        std::vector<E> rounded_o;
        for (const float v : o.values()) rounded_o.push_back(rounded<E>(v));
        Array<E> o_read(device.memory, "o", rounded_o);
        for (int step = 0; step < steps; ++step) {
          const int source = (rank - step + ring.ranks) % ring.ranks, parts = all ? ring.ranks : 1;
          Array<E> kv(device.memory, "kv", all ? gathered : kv_of(source));
          Array<float> found(device.memory, "dkv", static_cast<std::size_t>(parts * T * kv_width));
          device.run("context_attention_query_backward_" + name, {blocks_of(T * s.a)}, 64, d_o.begin(), own.begin(),
                     kv.begin(), o_read.begin(), lse.begin(), cu.begin(), dq.begin(), delta.begin(), T, S, s.heads(),
                     ring.ranks, rank, source, all, s.scores(scale), step > 0 ? 1 : 0);
          device.run("context_attention_key_backward_" + name, {blocks_of(parts * T * s.k)}, 64, d_o.begin(),
                     own.begin(), kv.begin(), lse.begin(), delta.begin(), cu.begin(), found.begin(), T, S, s.heads(),
                     ring.ranks, rank, source, all, s.scores(scale));
          for (int part = 0; part < parts; ++part) {
            const std::vector<int> theirs = ring.rows_of(all ? part : source);
            for (int t = 0; t < T; ++t)
              for (int j = 0; j < kv_width; ++j)
                d_kv[static_cast<std::size_t>(theirs[static_cast<std::size_t>(t)] * kv_width + j)] +=
                    found[static_cast<std::size_t>((part * T + t) * kv_width + j)];
          }
        }
        // delta is formed from the rounded o: a rounding of it, times |do| |v| d, on top.
        near(dq.values(), dq_wanted, 2e-5, 2e-5 + 4 * unit<E>);
      }
      for (int t = 0; t < s.T(); ++t)
        for (int j = 0; j < kv_width; ++j) {
          const double is = d_kv[static_cast<std::size_t>(t * kv_width + j)],
                       should = whole_dx[static_cast<std::size_t>(t * s.width() + s.a * s.d + j)];
          INFO("row " << t << ", column " << j << ": " << is << ", not " << should);
          REQUIRE(std::abs(is - should) <= 2e-5 * std::abs(should) + 2e-5 + 4 * unit<E>);
        }
    }
}

TEMPLATE_TEST_CASE("keys and values are taken from packed rows, and put back", "[kernels][context]", float, Bf16) {
  using E = TestType;
  const std::string name = suffix<E>;
  Device device("context");
  Draw draw(3);
  const int T = 3, queries = 10, keys = 37, width = queries + keys;
  Array<E> x(device.memory, "x", draw.numbers<E>(static_cast<std::size_t>(T * width))),
      kv(device.memory, "kv", static_cast<std::size_t>(T * keys)), dx(device.memory, "dx", x.size());
  device.run("take_kv_" + name, {T}, 32, x.begin(), kv.begin(), queries, keys);
  CHECK(kv.values() == taken(x.values(), {0, 1, 2}, width, queries, keys));
  Array<float> dq(device.memory, "dq", draw.numbers<float>(static_cast<std::size_t>(T * queries))),
      dkv(device.memory, "dkv", draw.numbers<float>(kv.size())),
      more(device.memory, "more", draw.numbers<float>(kv.size()));
  for (const bool two : {false, true}) {
    device.run("merge_qkv_" + name, {T}, 32, dq.begin(), dkv.begin(), two ? more.begin() : nullptr, dx.begin(), queries,
               keys);
    for (int t = 0; t < T; ++t)
      for (int j = 0; j < width; ++j) {
        const auto q = static_cast<std::size_t>(t * queries + j), i = static_cast<std::size_t>(t * keys + j - queries);
        const float wanted = j < queries ? dq[q] : dkv[i] + (two ? more[i] : 0.0f);
        CHECK(dx[static_cast<std::size_t>(t * width + j)] == rounded<E>(wanted));
      }
  }
}
