// A mixture of experts against sums over all experts in double.
#include "backends/cpu_gloo/kernels/experts.h"

#include <set>

#include "tests/cpu_kernels/drawn_routing.h"

using namespace hotbunk;
using namespace hotbunk::kernels;
using namespace hotbunk::kernels::test;

TEST_CASE("a sort by expert is a permutation: experts in order, and of each its tokens in order") {
  KernelContext ctx(1);
  Random rng(73);
  for (const Routing& routing : routings()) {
    const DrawnRouting d(ctx, routing, rng);
    CHECK(d.offsets.front() == 0);
    CHECK(d.offsets.back() == static_cast<std::int32_t>(d.rows.size()));
    std::vector<std::int32_t> choice_at(d.rows.size(), -1);
    for (std::size_t i = 0; i < d.rows.size(); ++i) {
      const auto row = static_cast<std::size_t>(d.rows[i]), e = static_cast<std::size_t>(d.chosen[i]);
      REQUIRE(choice_at.at(row) == -1);
      choice_at[row] = static_cast<std::int32_t>(i);
      CHECK((d.rows[i] >= d.offsets[e] && d.rows[i] < d.offsets[e + 1]));
    }
    for (std::size_t e = 0; e + 1 < d.offsets.size(); ++e)
      CHECK(std::is_sorted(choice_at.begin() + d.offsets[e], choice_at.begin() + d.offsets[e + 1]));
  }
}

TEST_CASE("a token goes once to each rank that has some of its experts, and its rows there are of that copy") {
  // W ranks with 2 experts each; every rank's tokens take c of them. Whatever is drawn, the row of every choice is
  // found to be of the copy of its own token, and no token goes twice to a rank.
  constexpr std::int64_t each = 2;
  struct Rank {
    std::vector<std::int32_t> chosen, rows, sent, tokens, copies, slots, blocks;
  };
  KernelContext ctx(2);
  Random rng(76);
  const auto at = [](std::int64_t i) { return static_cast<std::size_t>(i); };
  for (const std::int64_t W : {1, 2, 4})
    for (const std::int64_t c : {1, 2, 3}) {
      const std::int64_t E = W * each, most = std::min(W, c);
      if (c > E) continue;
      CAPTURE(W, c);
      std::vector<Rank> ranks(at(W));
      std::vector<std::int32_t> all_sent, all_blocks;
      for (Rank& r : ranks) {
        const std::int64_t T = 3 + (&r - ranks.data());
        DrawnRouting d(ctx, {.tokens = T, .experts = E, .choices = c}, rng);
        r = {d.chosen,
             d.rows,
             d.offsets,
             std::vector<std::int32_t>(at(T * most + 1), -7),
             std::vector<std::int32_t>(at(T * most), -7),
             std::vector<std::int32_t>(at(T * c), -7),
             std::vector<std::int32_t>(at(W + 1), -7)};
        CHECK(copy_sort(r.rows, c, r.sent, W, {r.tokens, r.copies.data(), r.slots.data(), r.blocks.data()}) ==
              r.blocks.back());
        std::set<std::pair<std::int64_t, std::int32_t>> expected;  // rank, token
        for (std::int64_t i = 0; i < T * c; ++i)
          expected.emplace(r.chosen[at(i)] / each, static_cast<std::int32_t>(i / c));
        std::vector<std::pair<std::int64_t, std::int32_t>> found;
        for (std::int64_t w = 0; w < W; ++w)
          for (std::int32_t i = r.blocks[at(w)]; i < r.blocks[at(w + 1)]; ++i) found.emplace_back(w, r.tokens[at(i)]);
        CHECK(found == std::vector(expected.begin(), expected.end()));
        CHECK(std::all_of(r.tokens.begin() + r.blocks.back(), r.tokens.end(), [](auto t) { return t == -1; }));
        // Each token's copies, in the order of its choices, behind them -1.
        for (std::int64_t t = 0; t < T; ++t) {
          std::vector<std::int32_t> of_token;
          for (std::int64_t i = t * c; i < (t + 1) * c; ++i) {
            const std::int32_t copy = r.blocks[at(r.chosen[at(i)] / each)] + r.slots[at(r.rows[at(i)])];
            CHECK(r.tokens[at(copy)] == t);
            if (std::ranges::find(of_token, copy) == of_token.end()) of_token.push_back(copy);
          }
          of_token.resize(at(most), -1);
          CHECK(std::equal(of_token.begin(), of_token.end(), r.copies.begin() + t * most));
        }
        all_sent.insert(all_sent.end(), r.sent.begin(), r.sent.end());
        all_blocks.insert(all_blocks.end(), r.blocks.begin(), r.blocks.end());
      }
      for (std::int64_t place = 0; place < W; ++place) {
        std::vector<std::int32_t> arrivals(at(W * each + 1)), slots, token_of_row, came;
        const std::int64_t R = expert_arrivals(all_sent, W, place, arrivals.data());
        for (std::int64_t w = 0; w < W; ++w) {  // what each sends here, as an exchange puts it
          const Rank& r = ranks[at(w)];
          const auto named = [&](std::int64_t token) { return static_cast<std::int32_t>(token + 100 * w); };
          std::vector<std::int32_t> token_at(r.rows.size());
          for (std::size_t i = 0; i < r.rows.size(); ++i)
            token_at[at(r.rows[i])] = named(static_cast<std::int64_t>(i) / c);
          for (std::int32_t row = r.sent[at(place * each)]; row < r.sent[at((place + 1) * each)]; ++row)
            slots.push_back(r.slots[at(row)]), token_of_row.push_back(token_at[at(row)]);
          for (std::int32_t i = r.blocks[at(place)]; i < r.blocks[at(place + 1)]; ++i)
            came.push_back(named(r.tokens[at(i)]));
        }
        REQUIRE(R == std::ssize(slots));
        const std::int64_t rows_each = std::min(c, each), room = std::ssize(came) + 1;
        std::vector<std::int32_t> sources(slots.size(), -7), rows(at(room * rows_each), -7);
        CHECK(copy_arrivals(all_blocks, W, place, arrivals, slots.data(), sources.data(), rows, rows_each) ==
              std::ssize(came));
        std::vector<std::int32_t> expected(rows.size(), -1);
        for (std::int64_t row = 0; row < R; ++row) {
          CHECK(came.at(at(sources[at(row)])) == token_of_row[at(row)]);
          const auto of = expected.begin() + sources[at(row)] * rows_each;
          *std::find(of, of + rows_each, -1) = static_cast<std::int32_t>(row);
        }
        CHECK(rows == expected);
      }
    }
}

TEST_CASE("rows of several ranks arrive by rank and there by expert, and meet the same experts") {
  // 3 ranks with 2 of 6 experts each; what they send, by expert.
  const std::vector<std::vector<std::int32_t>> sent = {{2, 0, 1, 3, 0, 1}, {0, 0, 4, 0, 2, 2}, {1, 1, 0, 5, 0, 0}};
  std::vector<std::int32_t> offsets;
  for (const auto& of_rank : sent) {
    offsets.push_back(0);
    for (const std::int32_t rows : of_rank) offsets.push_back(offsets.back() + rows);
  }
  KernelContext ctx(2);
  Random rng(75);
  constexpr std::int64_t N = 5, K = 4;
  for (std::size_t rank = 0; rank < 3; ++rank) {
    std::vector<std::int32_t> arrivals(7), begins = {0}, expert_of;
    for (const auto& of_rank : sent)
      for (std::size_t e = 0; e < 2; ++e) {
        begins.push_back(begins.back() + of_rank[2 * rank + e]);
        expert_of.insert(expert_of.end(), static_cast<std::size_t>(of_rank[2 * rank + e]),
                         static_cast<std::int32_t>(e));
      }
    const std::int64_t R = expert_arrivals(offsets, 3, static_cast<std::int64_t>(rank), arrivals.data());
    CHECK(arrivals == begins);
    REQUIRE(R == std::ssize(expert_of));
    const Experts experts{arrivals, 2, N, K, R};
    const Tensor x = Tensor::random(DType::f32, R, K, K, rng), w = Tensor::random(DType::f32, 2 * N, K, K, rng),
                 dy = Tensor::random(DType::f32, R, N, N, rng);
    Tensor y(DType::f32, R, N), dx(DType::f32, R, K), dw(DType::f32, 2 * N, K);
    const auto row_of = [&](auto r, auto n) { return expert_of[static_cast<std::size_t>(r)] * N + n; };
    grouped_linear(ctx, experts, x.matrix(), w.matrix(), y.matrix());
    check_close(
        y,
        [&](auto r, auto n) {
          double sum = 0;
          for (std::int64_t k = 0; k < K; ++k) sum += x.at(r, k) * w.at(row_of(r, n), k);
          return sum;
        },
        kF32Tolerance);
    grouped_linear_dgrad(ctx, experts, dy.matrix(), w.matrix(), dx.matrix());
    check_close(
        dx,
        [&](auto r, auto k) {
          double sum = 0;
          for (std::int64_t n = 0; n < N; ++n) sum += dy.at(r, n) * w.at(row_of(r, n), k);
          return sum;
        },
        kF32Tolerance);
    // A bias for all columns, and for some of them, as a rank of several adds it.
    for (const auto& [first, count] : {std::pair<std::int64_t, std::int64_t>{0, N}, {2, N - 3}}) {
      const Tensor bias = Tensor::random(DType::f32, 1, 2 * count, 2 * count, rng);
      Tensor more(DType::f32, R, N), d_bias(DType::f32, 1, 2 * count), ignored(DType::f32, 2 * N, K);
      grouped_linear(ctx, experts, x.matrix(), w.matrix(), more.matrix(),
                     {.values = bias.vector(), .first = first, .count = count});
      check_close(
          more,
          [&](auto r, auto n) {
            const bool has = n >= first && n < first + count;
            return y.at(r, n) + (has ? bias.at(0, expert_of[static_cast<std::size_t>(r)] * count + n - first) : 0.0);
          },
          kF32Tolerance);
      for (const Write write : {Write::overwrite, Write::accumulate}) {
        grouped_linear_wgrad(ctx, experts, dy.matrix(), x.matrix(), ignored.matrix(), write,
                             {.gradient = d_bias.f32(), .first = first, .count = count});
        check_close(
            d_bias,
            [&](auto, auto c) {
              double sum = 0;
              for (std::int64_t r = 0; r < R; ++r)
                if (expert_of[static_cast<std::size_t>(r)] == c / count) sum += dy.at(r, first + c % count);
              return write == Write::accumulate ? 2 * sum : sum;
            },
            kF32Tolerance);
      }
    }
    for (const Write write : {Write::overwrite, Write::accumulate}) {  // of all segments of an expert, once or twice
      grouped_linear_wgrad(ctx, experts, dy.matrix(), x.matrix(), dw.matrix(), write);
      check_close(
          dw,
          [&](auto n, auto k) {
            double sum = 0;
            for (std::int64_t r = 0; r < R; ++r)
              if (expert_of[static_cast<std::size_t>(r)] == n / N) sum += dy.at(r, n % N) * x.at(r, k);
            return write == Write::accumulate ? 2 * sum : sum;
          },
          kF32Tolerance);
    }
  }
}

TEST_CASE("dispatched, multiplied and combined, tokens meet their experts, forward and backward") {
  KernelContext ctx(2);
  Random rng(74);
  constexpr std::int64_t H = 19, N = 13;
  for (const DType dtype : kFloatTypes)
    for (const Routing& routing : routings()) {
      const std::int64_t T = routing.tokens, c = routing.choices, R = T * c;
      CAPTURE(name_of(dtype), T, routing.experts, c);
      const DrawnRouting d(ctx, routing, rng);
      const auto row = [&](std::int64_t t, std::int64_t j) {
        return static_cast<std::int64_t>(d.rows[static_cast<std::size_t>(t * c + j)]);
      };
      const Experts experts{d.offsets, routing.experts, N, H, R};
      const Tensor x = Tensor::random(dtype, T, H, H, rng), w = Tensor::random(dtype, routing.experts * N, H, H, rng);
      Tensor routed(dtype, R, H), y(dtype, R, N), z(dtype, T, N);
      dispatch(ctx, x.matrix(), d.rows.data(), routed.matrix(), T, c, H);
      for (std::int64_t t = 0; t < T; ++t)
        for (std::int64_t j = 0; j < c; ++j)
          for (std::int64_t h = 0; h < H; ++h) CHECK(routed.at(row(t, j), h) == x.at(t, h));

      grouped_linear(ctx, experts, routed.matrix(), w.matrix(), y.matrix());
      const auto expert_of = [&](std::int64_t r) {
        return std::upper_bound(d.offsets.begin(), d.offsets.end(), r) - d.offsets.begin() - 1;
      };
      check_close(
          y,
          [&](auto r, auto n) {
            double sum = 0;
            for (std::int64_t h = 0; h < H; ++h) sum += routed.at(r, h) * w.at(expert_of(r) * N + n, h);
            return sum;
          },
          kF32Tolerance);
      combine(ctx, y.matrix(), d.rows.data(), d.weights.data(), 1, {}, z.matrix(), T, c, N);
      const auto weight = [&](std::int64_t t, std::int64_t j) {
        return static_cast<double>(d.weights[static_cast<std::size_t>(t * c + j)]);
      };
      check_close(
          z,
          [&](auto t, auto n) {
            double sum = 0;
            for (std::int64_t j = 0; j < c; ++j) sum += weight(t, j) * y.at(row(t, j), n);
            return sum;
          },
          kF32Tolerance);

      const Tensor dz = Tensor::random(dtype, T, N, N, rng);
      Tensor dy(dtype, R, N), d_weights(DType::f32, T, c), d_routed(dtype, R, H), dx(dtype, T, H),
          dw(DType::f32, routing.experts * N, H);
      combine_backward(ctx, dz.matrix(), y.matrix(), d.rows.data(), d.weights.data(), 1, dy.matrix(), d_weights.f32(),
                       T, c, N);
      for (std::int64_t t = 0; t < T; ++t)
        for (std::int64_t j = 0; j < c; ++j) {
          double sum = 0, size = 1e-3;
          for (std::int64_t n = 0; n < N; ++n) {
            sum += dz.at(t, n) * y.at(row(t, j), n), size += std::abs(dz.at(t, n) * y.at(row(t, j), n));
            CHECK(dy.at(row(t, j), n) == Approx(weight(t, j) * dz.at(t, n)).epsilon(1e-2));
          }
          CHECK(std::abs(d_weights.at(t, j) - sum) <= kF32Tolerance * size);
        }
      grouped_linear_dgrad(ctx, experts, dy.matrix(), w.matrix(), d_routed.matrix());
      check_close(
          d_routed,
          [&](auto r, auto h) {
            double sum = 0;
            for (std::int64_t n = 0; n < N; ++n) sum += dy.at(r, n) * w.at(expert_of(r) * N + n, h);
            return sum;
          },
          kF32Tolerance);
      grouped_linear_wgrad(ctx, experts, dy.matrix(), routed.matrix(), dw.matrix(), Write::overwrite);
      const auto gradient = [&](auto n, auto h) {  // zeros where no token came
        double sum = 0;
        for (std::int64_t r = 0; r < R; ++r)
          if (expert_of(r) == n / N) sum += dy.at(r, n % N) * routed.at(r, h);
        return sum;
      };
      check_close(dw, gradient, kF32Tolerance);
      grouped_linear_wgrad(ctx, experts, dy.matrix(), routed.matrix(), dw.matrix(), Write::accumulate);
      check_close(
          dw, [&](auto n, auto h) { return 2 * gradient(n, h); }, kF32Tolerance);
      for (const Write write : {Write::overwrite, Write::accumulate}) {
        const bool adds = write == Write::accumulate;
        const Tensor before = dx;
        dispatch_backward(ctx, d_routed.matrix(), d.rows.data(), dx.matrix(), T, c, H, write);
        check_close(
            dx,
            [&](auto t, auto h) {
              double sum = adds ? before.at(t, h) : 0.0;
              for (std::int64_t j = 0; j < c; ++j) sum += d_routed.at(row(t, j), h);
              return sum;
            },
            kF32Tolerance);
      }
    }
}

TEST_CASE("ranks that have some experts each make together what one makes that has all") {
  KernelContext ctx(2);
  Random rng(76);
  constexpr std::int64_t H = 12, N = 7, T = 19, E = 6, c = 3, R = T * c;
  const DrawnRouting d(ctx, {T, E, c, true}, rng);
  const Tensor x = Tensor::random(DType::f32, T, H, H, rng), w = Tensor::random(DType::f32, E * N, H, H, rng),
               dz = Tensor::random(DType::f32, T, N, N, rng);
  // Of experts [first, first + count): z and dx, both summands, and the gradients of weights and of matrices.
  struct Made {
    Tensor z, dx, d_weights, dw;
    std::int32_t rows;
  };
  const auto make = [&](std::int64_t first, std::int64_t count) {
    Index rows(static_cast<std::size_t>(R)), offsets(static_cast<std::size_t>(count) + 1);
    expert_sort(d.chosen, {first, count, E}, rows.data(), offsets.data());
    for (std::size_t i = 0; i < rows.size(); ++i)
      CHECK((rows[i] >= 0) == (d.chosen[i] >= first && d.chosen[i] < first + count));
    const Experts experts{offsets, count, N, H, R};
    ConstMatrix own = w.matrix();
    own.data = static_cast<const float*>(own.data) + first * N * H;
    Tensor routed(DType::f32, R, H), y(DType::f32, R, N), z(DType::f32, T, N), dy(DType::f32, R, N),
        d_weights(DType::f32, T, c), d_routed(DType::f32, R, H), dx(DType::f32, T, H), dw(DType::f32, count * N, H);
    dispatch(ctx, x.matrix(), rows.data(), routed.matrix(), T, c, H);
    grouped_linear(ctx, experts, routed.matrix(), own, y.matrix());
    combine(ctx, y.matrix(), rows.data(), d.weights.data(), 1, {}, z.matrix(), T, c, N);
    combine_backward(ctx, dz.matrix(), y.matrix(), rows.data(), d.weights.data(), 1, dy.matrix(), d_weights.f32(), T, c,
                     N);
    grouped_linear_dgrad(ctx, experts, dy.matrix(), own, d_routed.matrix());
    grouped_linear_wgrad(ctx, experts, dy.matrix(), routed.matrix(), dw.matrix(), Write::overwrite);
    dispatch_backward(ctx, d_routed.matrix(), rows.data(), dx.matrix(), T, c, H, Write::overwrite);
    for (std::int64_t r = offsets.back(); r < R; ++r) {  // room that nobody took
      CHECK((routed.at(r, 0) == 0.0 && y.at(r, N - 1) == 0.0 && dy.at(r, 0) == 0.0 && d_routed.at(r, H - 1) == 0.0));
    }
    return Made{z, dx, d_weights, dw, offsets.back()};
  };
  const Made all = make(0, E), low = make(0, 2), high = make(2, 4);
  CHECK(all.rows == R);
  CHECK(low.rows + high.rows == R);
  check_close(
      all.z, [&](auto t, auto n) { return low.z.at(t, n) + high.z.at(t, n); }, kF32Tolerance);
  check_close(
      all.dx, [&](auto t, auto h) { return low.dx.at(t, h) + high.dx.at(t, h); }, kF32Tolerance);
  check_close(
      all.d_weights, [&](auto t, auto j) { return low.d_weights.at(t, j) + high.d_weights.at(t, j); }, kF32Tolerance);
  check_close(
      all.dw, [&](auto n, auto h) { return n < 2 * N ? low.dw.at(n, h) : high.dw.at(n - 2 * N, h); }, kF32Tolerance);
}

TEST_CASE("an expert's rows have the same bits whatever other rows there are") {
  KernelContext one(1), two(2);
  Random rng(75);
  constexpr std::int64_t H = 40, N = 24, E = 3;
  const Tensor x = Tensor::random(DType::f32, 50, H, H, rng), w = Tensor::random(DType::f32, E * N, H, H, rng);
  Tensor all(DType::f32, 50, N), few(DType::f32, 50, N);
  grouped_linear(two, {Index{0, 20, 21, 50}, E, N, H, 50}, x.matrix(), w.matrix(), all.matrix());
  // Row 20, expert 1's, and rows 21 … 22, of expert 2.
  ConstMatrix from = x.matrix();
  from.data = static_cast<const float*>(from.data) + 20 * H;
  grouped_linear(one, {Index{0, 0, 1, 3}, E, N, H, 3}, from, w.matrix(), few.matrix());
  for (std::int64_t r = 0; r < 3; ++r)
    for (std::int64_t n = 0; n < N; ++n) CHECK(few.at(r, n) == all.at(20 + r, n));
}
