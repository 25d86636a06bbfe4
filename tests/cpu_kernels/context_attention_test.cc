#include "backends/cpu_gloo/kernels/context_attention.h"

#include <rapidcheck.h>

#include "backends/cpu_gloo/kernels/attention.h"
#include "tests/cpu_kernels/dense.h"

using namespace hotbunk;
using namespace hotbunk::kernels;
using namespace hotbunk::kernels::test;

namespace {

struct SharedSequences {
  HeadShape shape;
  std::int64_t ranks = 1;
  std::vector<std::int64_t> chunks;  // tokens of each sequence's
  float softcap = 0.0f;
  std::int64_t window = 0;
  std::int64_t tokens() const {
    std::int64_t n = 0;
    for (const std::int64_t chunk : chunks) n += 2 * chunk;
    return n;  // of a rank
  }
  std::vector<std::int32_t> offsets(std::int64_t times) const {
    std::vector<std::int32_t> out{0};
    for (const std::int64_t chunk : chunks) out.push_back(out.back() + static_cast<std::int32_t>(2 * chunk * times));
    return out;
  }
  /// The rows of all sequences that a rank has, in order.
  std::vector<std::int64_t> rows(std::int64_t rank) const {
    std::vector<std::int64_t> out;
    std::int64_t begin = 0;
    for (const std::int64_t chunk : chunks) {
      for (const std::int64_t which : {rank, 2 * ranks - 1 - rank})
        for (std::int64_t t = 0; t < chunk; ++t) out.push_back(begin + which * chunk + t);
      begin += 2 * ranks * chunk;
    }
    return out;
  }
};

/// Those rows of a tensor, in its dtype.
kernels::test::Tensor rows_of(const kernels::test::Tensor& all, const std::vector<std::int64_t>& rows) {
  kernels::test::Tensor out(all.dtype(), std::ssize(rows), all.cols());
  for (std::int64_t r = 0; r < out.rows(); ++r)
    for (std::int64_t c = 0; c < all.cols(); ++c) out.set(r, c, all.at(rows[static_cast<std::size_t>(r)], c));
  return out;
}

/// Errors of o, log-sum-exps and gradients on all ranks, against attention of whole sequences by one of them.
/// `gathered`: with the keys and values of all ranks at once, else from one rank after the other.
std::array<double, 3> errors(const SharedSequences& c, DType dtype, bool gathered, std::uint64_t seed) {
  using T = kernels::test::Tensor;
  Random rng(seed);
  KernelContext ctx(2);
  const HeadShape& shape = c.shape;
  const std::int64_t own = c.tokens(), all = own * c.ranks, width = shape.width(), of_q = shape.k_offset(),
                     out = shape.num_heads * shape.dv(), of_kv = width - of_q;
  const Scores scores{static_cast<float>(1.0 / std::sqrt(static_cast<double>(shape.head_dim))), c.softcap, c.window};
  const T qkv = T::random(dtype, all, width, 0, rng, 1.5), d_o = T::random(dtype, all, out, 0, rng);
  T o(dtype, all, out), lse(DType::f32, all, shape.num_heads), d_qkv(dtype, all, width);
  const std::vector<std::int32_t> whole = c.offsets(c.ranks), local = c.offsets(1);
  attention_forward(ctx, qkv.matrix(), shape, whole, scores, o.matrix(), lse.f32());
  attention_backward(ctx, qkv.matrix(), o.matrix(), d_o.matrix(), lse.f32(), shape, whole, scores, d_qkv.matrix());

  std::vector<T> queries, kv, d_kv;  // by rank
  for (std::int64_t r = 0; r < c.ranks; ++r) {
    queries.push_back(rows_of(qkv, c.rows(r)));
    kv.emplace_back(dtype, own, of_kv);
    take_kv(ctx, queries.back().matrix(), shape, kv.back().matrix(), own);
    d_kv.push_back(T::filled(DType::f32, own, of_kv, 0, 0.0));
  }
  T kv_all(dtype, all, of_kv);
  for (std::int64_t r = 0; r < all; ++r)
    for (std::int64_t j = 0; j < of_kv; ++j) kv_all.set(r, j, kv[static_cast<std::size_t>(r / own)].at(r % own, j));

  std::array<double, 3> worst{};
  std::vector<T> d_q;
  for (std::int64_t r = 0; r < c.ranks; ++r) {
    const auto at = static_cast<std::size_t>(r);
    const std::vector<std::int64_t> rows = c.rows(r);
    // What is not overwritten would be seen.
    T merged = T::filled(DType::f32, own, out, out + 3, NAN), found_lse(DType::f32, own, shape.num_heads);
    d_q.push_back(T::filled(DType::f32, own, of_q, of_q + 1, NAN));
    const T exact_o = rows_of(o, rows), exact_d = rows_of(d_o, rows), exact_lse = rows_of(lse, rows);
    const auto pass = [&](const ContextShare& share, const T& keys, Write write, T& found) {
      context_attention_forward(ctx, queries[at].matrix(), keys.matrix(), shape, local, share, scores, merged.matrix(),
                                found_lse.f32(), write);
      context_attention_backward(ctx, queries[at].matrix(), keys.matrix(), exact_o.matrix(), exact_d.matrix(),
                                 exact_lse.f32(), shape, local, share, scores, d_q.back().matrix(), write,
                                 found.matrix());
    };
    for (std::int64_t step = 0; step < (gathered ? 1 : c.ranks); ++step) {
      const std::int64_t source = (r - step + c.ranks) % c.ranks;
      T found = T::filled(DType::f32, gathered ? all : own, of_kv, of_kv + 2, NAN);
      pass({c.ranks, r, source, gathered, own}, gathered ? kv_all : kv[static_cast<std::size_t>(source)],
           step == 0 ? Write::overwrite : Write::accumulate, found);
      CHECK(found.padding_intact());
      for (std::int64_t t = 0; t < found.rows(); ++t) {
        T& sum = d_kv[static_cast<std::size_t>(gathered ? t / own : source)];
        for (std::int64_t j = 0; j < of_kv; ++j) sum.set(t % own, j, sum.at(t % own, j) + found.at(t, j));
      }
    }
    CHECK((merged.padding_intact() && d_q.back().padding_intact()));
    worst[0] = std::max(worst[0], error_of(merged, [&](auto t, auto j) { return exact_o.at(t, j); }));
    worst[1] = std::max(worst[1], error_of(found_lse, [&](auto t, auto j) { return exact_lse.at(t, j); }));
  }
  for (std::int64_t r = 0; r < c.ranks; ++r) {
    const auto at = static_cast<std::size_t>(r);
    T d_x(dtype, own, width, width + 1);
    const T zeros = T::filled(DType::f32, own, of_kv, 0, 0.0);
    merge_qkv(ctx, d_q[at].matrix(), d_kv[at].matrix(), r % 2 == 0 ? zeros.matrix() : ConstMatrix{}, shape,
              d_x.matrix(), own);
    const T exact = rows_of(d_qkv, c.rows(r));
    worst[2] = std::max(worst[2], error_of(d_x, [&](auto t, auto j) { return exact.at(t, j); }));
    CHECK(d_x.padding_intact());
  }
  return worst;
}

/// bf16: the whole sequence's output, weights and their gradients may be rounded on their way, these are not.
double shared_tolerance(DType dtype, std::size_t what) {
  if (dtype == DType::f32) return 1e-5;
  return what == 1 ? 1e-5 : 2e-2;
}

}  // namespace

TEST_CASE("attention of chunks, merged over ranks, is attention of whole sequences") {
  const SharedSequences cases[] = {
      {{2, 2, 8}, 1, {3}},                 // one rank
      {{4, 2, 16}, 2, {1, 1}},             // chunks of one token
      {{3, 1, 20}, 3, {0, 5, 33}},         // an empty sequence, tails
      {{4, 2, 16}, 2, {64, 128}},          // whole tiles
      {{2, 1, 32}, 4, {70}},               // several tiles of a chunk
      {{4, 2, 16}, 2, {5, 70}, 0.0f, 10},  // a window within a chunk
      {{2, 2, 12}, 4, {9, 2}, 0.0f, 20},   // over several, so that some ranks see nothing of others
      {{2, 1, 20}, 3, {70}, 0.0f, 130},    // over several tiles
      {{2, 2, 16}, 2, {9}, 0.0f, 1},       // a token sees itself alone
      {{4, 2, 24}, 3, {7, 40}, 0.8f, 0},   // a cap
      {{3, 1, 24}, 2, {7, 66}, 1.5f, 33},
      {{2, 2, 20, 12}, 3, {5, 70}},  // values narrower than keys, and wider
      {{4, 2, 8, 19}, 2, {66, 1}},
  };
  for (const SharedSequences& c : cases)
    for (const DType dtype : kFloatTypes)
      for (const bool gathered : {false, true}) {
        CAPTURE(name_of(dtype), c.ranks, c.chunks, c.window, c.softcap, gathered);
        const auto found = errors(c, dtype, gathered, 41);
        for (std::size_t i = 0; i < found.size(); ++i) CHECK(found[i] <= shared_tolerance(dtype, i));
      }
}

TEST_CASE("attention of chunks: random shapes and lengths") {
  CHECK(rc::check("as of whole sequences", [] {
    SharedSequences c;
    c.shape.num_kv_heads = *rc::gen::inRange(1, 4);
    c.shape.num_heads = c.shape.num_kv_heads * *rc::gen::inRange(1, 4);
    c.shape.head_dim = *rc::gen::inRange(1, 41);
    if (*rc::gen::arbitrary<bool>()) c.shape.value_dim = *rc::gen::inRange(1, 41);
    c.ranks = *rc::gen::inRange(1, 5);
    for (int chunk : *rc::gen::container<std::vector<int>>(2, rc::gen::inRange(0, 80))) c.chunks.push_back(chunk);
    if (*rc::gen::arbitrary<bool>()) c.softcap = 1.0f;
    if (*rc::gen::arbitrary<bool>()) c.window = *rc::gen::inRange(1, 200);
    const auto found = errors(c, DType::f32, *rc::gen::arbitrary<bool>(), 42);
    for (std::size_t i = 0; i < found.size(); ++i) RC_ASSERT(found[i] <= shared_tolerance(DType::f32, i));
  }));
}

TEST_CASE("a query that sees none of the keys gets nothing, and leaves what others found") {
  // Rank 0 of 2 has chunks 0 and 3 of 4, rank 1 the others: rank 0's first chunk comes before all that rank 1 has.
  KernelContext ctx(1);
  Random rng(43);
  const HeadShape shape{1, 1, 4};
  const std::vector<std::int32_t> cu{0, 6};
  using T = kernels::test::Tensor;
  const T qkv = T::random(DType::f32, 6, 12, 0, rng), kv = T::random(DType::f32, 6, 8, 0, rng);
  for (const Write write : {Write::overwrite, Write::accumulate}) {
    T o = T::filled(DType::f32, 6, 4, 0, 7.0), lse = T::filled(DType::f32, 6, 1, 0, 0.5);
    context_attention_forward(ctx, qkv.matrix(), kv.matrix(), shape, cu, {2, 0, 1, false, 6}, 0.5f, o.matrix(),
                              lse.f32(), write);
    for (std::int64_t t = 0; t < 3; ++t) {
      CHECK(o.at(t, 0) == (write == Write::overwrite ? 0.0 : 7.0));
      CHECK(lse.at(t, 0) == (write == Write::overwrite ? -INFINITY : 0.5));
    }
    for (std::int64_t t = 3; t < 6; ++t) CHECK((o.at(t, 0) != 7.0 && std::isfinite(lse.at(t, 0))));
  }
  T o(DType::f32, 6, 4), lse(DType::f32, 6, 1);
  CHECK_THROWS(context_attention_forward(ctx, qkv.matrix(), kv.matrix(), shape, std::vector<std::int32_t>{0, 5},
                                         {2, 0, 1, false, 6}, 0.5f, o.matrix(), lse.f32(), Write::overwrite));
}
