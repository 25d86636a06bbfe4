// A mixture of experts: routing, sorting, rows there and back, and the experts' products, against plain loops in fp64.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>

#include "tests/cuda_kernels/kernel_device.h"

using namespace hotbunk;
using namespace hotbunk::ptx;

namespace {

struct Route {
  int experts, choices, renormalise, sigmoid, groups, taken;
  bool bias;
};

/// Weights of a token by its logits and the experts that it takes, in fp64.
std::vector<double> weights_of(const Route& r, const std::vector<double>& logits, const std::vector<int>& chosen,
                               double factor) {
  const auto part = [&](int e) {
    const double x = logits[static_cast<std::size_t>(e)];
    return r.sigmoid != 0 ? 1.0 / (1.0 + std::exp(-x)) : std::exp(x);
  };
  double sum = r.sigmoid != 0 && r.renormalise == 0 ? 1.0 : 0.0;
  if (r.renormalise != 0)
    for (const int e : chosen) sum += part(e);
  else if (r.sigmoid == 0)
    for (int e = 0; e < r.experts; ++e) sum += part(e);
  std::vector<double> out;
  for (const int e : chosen) out.push_back(factor * part(e) / sum);
  return out;
}

/// The experts that a token takes: the best groups' best ones, of equal ones the first.
std::vector<int> chosen_of(const Route& r, const std::vector<double>& logits, const std::vector<float>& bias) {
  std::vector<std::pair<double, int>> scores, groups;
  for (int e = 0; e < r.experts; ++e) {
    const double x = logits[static_cast<std::size_t>(e)];
    const float score = static_cast<float>(r.sigmoid != 0 ? 1.0 / (1.0 + std::exp(-x)) : x);
    scores.emplace_back(-(score + (r.bias ? bias[static_cast<std::size_t>(e)] : 0.0f)), e);
  }
  const int each = r.experts / r.groups;
  for (int g = 0; g < r.groups; ++g) {
    std::vector<std::pair<double, int>> mine(scores.begin() + g * each, scores.begin() + (g + 1) * each);
    std::sort(mine.begin(), mine.end());
    groups.emplace_back(mine[0].first + (r.bias && r.groups > 1 ? mine[1].first : 0.0), g);
  }
  std::sort(groups.begin(), groups.end());
  std::vector<std::pair<double, int>> open;
  for (const auto& s : scores)
    for (int j = 0; j < r.taken; ++j)
      if (groups[static_cast<std::size_t>(j)].second == s.second / each) open.push_back(s);
  std::sort(open.begin(), open.end());
  std::vector<int> out;
  for (int j = 0; j < r.choices; ++j) out.push_back(open[static_cast<std::size_t>(j)].second);
  return out;
}

}  // namespace

TEMPLATE_TEST_CASE("tokens take the best experts of the best groups, and weights have their gradients",
                   "[kernels][experts]", float, Bf16) {
  using E = TestType;
  const std::string name = suffix<E>;
  Device d("experts");
  const int T = 5;
  for (const Route& r : {Route{3, 2, 0, 0, 1, 1, false},
                         {40, 4, 1, 0, 1, 1, false},
                         {12, 3, 1, 1, 4, 2, true},
                         {64, 8, 0, 1, 8, 3, true},
                         {8, 2, 0, 0, 2, 1, false}}) {
    INFO(r.experts << " experts in " << r.groups << " groups" << (r.sigmoid != 0 ? ", sigmoid" : ""));
    Draw draw(static_cast<std::uint64_t>(r.experts));
    const float factor = 2.5f;
    const auto n = static_cast<std::size_t>(T * r.choices), all = static_cast<std::size_t>(T * r.experts);
    Array<float> logits(d.memory, "logits", draw.numbers<float>(all, 3.0));
    if (!r.bias) logits[1] = logits[0];  // equal ones
    Array<E> bias(d.memory, "bias", draw.numbers<E>(static_cast<std::size_t>(r.experts), 0.5));
    Array<float> weights(d.memory, "weights", n), d_weights(d.memory, "dweights", draw.numbers<float>(n));
    Array<std::int32_t> chosen(d.memory, "experts", n);
    Array<E> d_logits(d.memory, "dlogits", all);
    d.run("route_" + name, {2}, 96, logits.begin(), r.bias ? bias.begin() : nullptr, weights.begin(), chosen.begin(), T,
          r.experts, r.choices, r.renormalise, r.sigmoid, r.groups, r.taken, factor);
    d.run("route_backward_" + name, {2}, 96, d_weights.begin(), logits.begin(), chosen.begin(), d_logits.begin(), T,
          r.experts, r.choices, r.renormalise, r.sigmoid, r.groups, r.taken, factor);
    std::vector<float> biases;
    for (const E b : bias.values()) biases.push_back(static_cast<float>(value(b)));
    for (int t = 0; t < T; ++t) {
      std::vector<double> x;
      for (int e = 0; e < r.experts; ++e) x.push_back(logits[static_cast<std::size_t>(t * r.experts + e)]);
      const std::vector<int> should = chosen_of(r, x, biases);
      const std::vector<double> w = weights_of(r, x, should, factor);
      for (int j = 0; j < r.choices; ++j) {
        const auto at = static_cast<std::size_t>(t * r.choices + j);
        REQUIRE(chosen[at] == should[static_cast<std::size_t>(j)]);
        REQUIRE(weights[at] == Approx(w[static_cast<std::size_t>(j)]).epsilon(1e-6));
      }
      for (int e = 0; e < r.experts; ++e) {  // differences of what the weights are
        const auto moved = [&](double by) {
          std::vector<double> y = x;
          y[static_cast<std::size_t>(e)] += by;
          const std::vector<double> v = weights_of(r, y, should, factor);
          double sum = 0;
          for (int j = 0; j < r.choices; ++j)
            sum += d_weights[static_cast<std::size_t>(t * r.choices + j)] * v[static_cast<std::size_t>(j)];
          return sum;
        };
        const double slope = (moved(1e-5) - moved(-1e-5)) / 2e-5;
        const double is = value(d_logits[static_cast<std::size_t>(t * r.experts + e)]);
        INFO("token " << t << ", expert " << e << ": " << is << ", not " << slope);
        REQUIRE(std::abs(is - slope) <= (1e-5 + unit<E>)*std::abs(slope) + 1e-6);
      }
    }
  }
}

TEST_CASE("choices are sorted by own expert, then in order", "[kernels][experts]") {
  Device d("experts");
  struct Own {
    int all, groups, ranks, place, choices, parts = 1;  // all: parts of experts
  };
  for (const Own& own : {Own{5, 1, 1, 0, 301},
                         {8, 1, 2, 1, 77},
                         {12, 3, 2, 1, 200},
                         {4, 1, 1, 0, 1},
                         {12, 2, 1, 0, 90, 2},
                         {18, 3, 2, 1, 120, 3}}) {
    Draw draw(static_cast<std::uint64_t>(own.choices));
    std::vector<std::int32_t> choice;
    for (int i = 0; i < own.choices; ++i) choice.push_back(draw.between(0, own.all / own.parts - 1));
    const int group = own.all / own.groups, each = group / own.ranks, count = each * own.groups,
              first = own.place * each;
    const auto parts = static_cast<std::size_t>(own.parts);
    std::vector<std::int32_t> rows(choice.size() * parts, -1), offsets;
    int next = 0;
    for (int e = 0; e < own.all; ++e) {
      if (e % group < first || e % group >= first + each) continue;
      offsets.push_back(next);
      for (std::size_t i = 0; i < choice.size(); ++i)
        for (std::size_t p = 0; p < parts; ++p)
          if ((choice[i] / each * own.parts + static_cast<int>(p)) * each + choice[i] % each == e)
            rows[i * parts + p] = next++;
    }
    offsets.push_back(next);
    Array<std::int32_t> chosen(d.memory, "experts", choice),
        got(d.memory, "rows", std::vector<std::int32_t>(rows.size(), -1)), begins(d.memory, "offsets", offsets.size()),
        here(d.memory, "own", 1);
    const auto blocks = static_cast<std::uint32_t>(count);
    d.run("expert_rows", {blocks}, 64, chosen.begin(), got.begin(), begins.begin(), own.choices, each, group, first,
          own.parts);
    CHECK(got.values() == rows);
    CHECK(begins.values() == offsets);
    d.run("own_rows", {1}, 64, got.begin(), here.begin(), own.choices * own.parts);
    CHECK(here[0] == next);
  }
}

TEMPLATE_TEST_CASE("rows go to their experts and come back, weighted", "[kernels][experts]", float, Bf16) {
  using E = TestType;
  const std::string name = suffix<E>;
  Device d("experts");
  Draw draw(7);
  const int T = 4, c = 3, H = 37, n = T * c;
  const auto h = static_cast<std::size_t>(H);
  // Seven of twelve choices are here; rows behind those are zeros.
  const std::vector<std::int32_t> where = {3, -1, 0, 6, -1, -1, 1, 2, -1, 5, 4, -1};
  Array<std::int32_t> rows(d.memory, "rows", where), own(d.memory, "own", std::vector<std::int32_t>{7});
  Array<E> x(d.memory, "x", draw.numbers<E>(static_cast<std::size_t>(T) * h)),
      y(d.memory, "y", static_cast<std::size_t>(n) * h), dx(d.memory, "dx", x.values()), z(d.memory, "z", x.size()),
      dy(d.memory, "dy", y.size());
  Array<float> weights(d.memory, "weights", draw.numbers<float>(static_cast<std::size_t>(n))),
      d_weights(d.memory, "dweights", static_cast<std::size_t>(n));
  d.run("dispatch_" + name, {static_cast<std::uint32_t>(n)}, 64, x.begin(), rows.begin(), own.begin(), y.begin(), c, H);
  std::vector<double> y_wanted(y.size()), dx_wanted(x.size()), z_wanted(x.size()), dy_wanted(y.size()),
      dw(weights.size());
  for (int i = 0; i < n; ++i)
    for (std::size_t j = 0; where[static_cast<std::size_t>(i)] >= 0 && j < h; ++j)
      y_wanted[static_cast<std::size_t>(where[static_cast<std::size_t>(i)]) * h + j] =
          value(x[static_cast<std::size_t>(i / c) * h + j]);
  near(y.values(), y_wanted, 0.0, 0.0);
  for (std::size_t i = 0; i < x.size(); ++i) dx_wanted[i] = z_wanted[i] = value(x[i]);
  for (int i = 0; i < n; ++i)
    for (std::size_t j = 0; where[static_cast<std::size_t>(i)] >= 0 && j < h; ++j) {
      const std::size_t row = static_cast<std::size_t>(where[static_cast<std::size_t>(i)]) * h + j,
                        token = static_cast<std::size_t>(i / c) * h + j, k = static_cast<std::size_t>(i);
      dx_wanted[token] += value(y[row]);
      z_wanted[token] += weights[k] * value(y[row]);
      dy_wanted[row] = weights[k] * value(x[token]);
      dw[k] += value(x[token]) * value(y[row]);
    }
  d.run("dispatch_backward_" + name, {T}, 64, y.begin(), rows.begin(), dx.begin(), c, H, 1);
  near(dx.values(), dx_wanted, 1e-6 + unit<E>, 1e-6);
  d.run("combine_" + name, {T}, 64, y.begin(), rows.begin(), weights.begin(), x.begin(), z.begin(), c, 1, H);
  near(z.values(), z_wanted, 1e-6 + unit<E>, 1e-6);
  d.run("combine_backward_" + name, {static_cast<std::uint32_t>(n)}, 64, x.begin(), y.begin(), rows.begin(),
        weights.begin(), own.begin(), dy.begin(), d_weights.begin(), c, 1, H);
  near(dy.values(), dy_wanted, 1e-6 + unit<E>, 1e-7);
  near(d_weights.values(), dw, 1e-5, 1e-5);
}

TEMPLATE_TEST_CASE("experts multiply their rows by their matrices", "[kernels][experts]", float, Bf16) {
  using E = TestType;
  constexpr bool f32 = std::is_same_v<E, float>;
  const std::string name = suffix<E>;
  Device d(f32 ? "grouped_f32" : "grouped");
  struct Case {
    int experts, N, K, bias_first, bias_count;
    std::vector<int> rows;  // of each segment
    int behind;
  };
  for (const Case& c :
       {Case{3, 9, 16, 0, 9, {3, 0, 5}, 2}, {2, 70, 24, 8, 33, {66, 1, 0, 4}, 65}, {2, 5, 3, 0, 5, {0, 0}, 0}}) {
    std::vector<std::int32_t> begins{0};
    for (const int n : c.rows) begins.push_back(begins.back() + n);
    const int R = begins.back() + c.behind, segments = static_cast<int>(c.rows.size());
    const int each = f32 ? 32 : 64, threads = f32 ? 32 : 128;
    INFO(R << " rows of " << c.K << " to " << c.N);
    Draw draw(static_cast<std::uint64_t>(R));
    const auto size = [](int m, int n) { return static_cast<std::size_t>(m * n); };
    Array<std::int32_t> offsets(d.memory, "offsets", begins);
    Array<E> x(d.memory, "x", draw.numbers<E>(size(R, c.K))),
        w(d.memory, "w", draw.numbers<E>(size(c.experts * c.N, c.K))),
        bias(d.memory, "b", draw.numbers<E>(size(c.experts, c.bias_count))), y(d.memory, "y", size(R, c.N)),
        dy(d.memory, "dy", draw.numbers<E>(size(R, c.N))), dx(d.memory, "dx", size(R, c.K));
    Array<float> dw(d.memory, "dw", std::vector<float>(w.size(), 1.0f)),
        db(d.memory, "db", std::vector<float>(bias.size(), 2.0f));
    const auto up = [](int n, int by) { return static_cast<std::uint32_t>((n + by - 1) / by); };
    const std::uint32_t tiles = up(R, each) + static_cast<std::uint32_t>(segments) + 1;
    std::vector<double> y_wanted(y.size()), dx_wanted(dx.size()), dw_wanted(dw.size(), 1.0), db_wanted(db.size(), 2.0);
    for (int s = 0; s < segments; ++s)
      for (int r = begins[static_cast<std::size_t>(s)]; r < begins[static_cast<std::size_t>(s) + 1]; ++r) {
        const int e = s % c.experts;
        for (int j = 0; j < c.N; ++j) {
          const double g = value(dy[size(r, c.N) + static_cast<std::size_t>(j)]);
          double& to = y_wanted[size(r, c.N) + static_cast<std::size_t>(j)];
          const int b = j - c.bias_first;
          if (b >= 0 && b < c.bias_count) {
            const std::size_t at = size(e, c.bias_count) + static_cast<std::size_t>(b);
            to += value(bias[at]), db_wanted[at] += g;
          }
          for (int i = 0; i < c.K; ++i) {
            const std::size_t wi = size(e * c.N + j, c.K) + static_cast<std::size_t>(i),
                              xi = size(r, c.K) + static_cast<std::size_t>(i);
            to += value(x[xi]) * value(w[wi]);
            dx_wanted[xi] += g * value(w[wi]);
            dw_wanted[wi] += g * value(x[xi]);
          }
        }
      }
    const auto threads_of = static_cast<std::uint32_t>(threads);
    // All rows at once, or, as ranks send more than there is room for, in two rounds.
    for (const int half : {R, R / 2}) {
      for (std::size_t i = 0; i < dw.size(); ++i) dw[i] = 1.0f;
      for (std::size_t i = 0; i < db.size(); ++i) db[i] = 2.0f;
      for (const auto& [first, count] : {std::pair{0, half}, std::pair{half, R - half}}) {
        if (first == R && R > 0) continue;
        const auto from = [first = first](Array<E>& of, int width) { return of.begin() + first * width; };
        if (count > 0) {
          d.run("grouped_matmul_nt_" + name, {up(c.N, 64), tiles}, threads_of, from(x, c.K), w.begin(), offsets.begin(),
                bias.begin(), from(y, c.N), c.N, count, first, c.N, c.K, segments, c.experts, c.bias_first,
                c.bias_count, 0);
          d.run("grouped_matmul_nn_" + name, {up(c.K, 64), tiles}, threads_of, from(dy, c.N), c.N, w.begin(),
                offsets.begin(), from(dx, c.K), count, first, c.N, c.K, segments, c.experts, 0);
        }
        d.run("grouped_matmul_tn_" + name + "_f32",
              {up(c.K, 64), up(c.N, each) * static_cast<std::uint32_t>(c.experts)}, threads_of, from(dy, c.N), c.N,
              from(x, c.K), offsets.begin(), dw.begin(), count, first, c.N, c.K, segments, c.experts, 1);
        d.run("grouped_bias_" + name + "_f32", {1, static_cast<std::uint32_t>(c.experts)}, 128, from(dy, c.N),
              offsets.begin(), db.begin(), count, first, segments, c.experts, c.N, c.bias_first, c.bias_count, 1);
      }
      near(y.values(), y_wanted, 1e-6 + unit<E>, 1e-5);
      near(dx.values(), dx_wanted, 1e-6 + unit<E>, 1e-5);
      near(dw.values(), dw_wanted, 1e-5, 1e-5);
      near(db.values(), db_wanted, 1e-6, 1e-6);
    }
  }
}

TEST_CASE("where rows come to, by rank and there by expert, and how many", "[kernels][experts]") {
  Device d("experts");
  for (const auto& [E, ranks] : {std::pair{6, 3}, std::pair{70, 2}, std::pair{4, 1}}) {
    Draw draw(static_cast<std::uint64_t>(E));
    std::vector<std::int32_t> sent;
    for (int r = 0; r < ranks; ++r) {
      sent.push_back(0);
      for (int e = 0; e < E; ++e) sent.push_back(sent.back() + draw.between(0, 5));
    }
    Array<std::int32_t> offsets(d.memory, "offsets", sent),
        arrivals(d.memory, "arrivals", static_cast<std::size_t>(E) + 1);
    Array<std::int64_t> count(d.memory, "count", 1);
    const int own = E / ranks;
    for (int place = 0; place < ranks; ++place) {
      d.run("expert_arrivals", {1}, 32, offsets.begin(), arrivals.begin(), count.begin(), E, ranks, place);
      std::vector<std::int32_t> wanted{0};
      for (int r = 0; r < ranks; ++r)
        for (int e = place * own; e < (place + 1) * own; ++e) {
          const auto at = static_cast<std::size_t>(r * (E + 1) + e);
          wanted.push_back(wanted.back() + sent[at + 1] - sent[at]);
        }
      CHECK(arrivals.values() == wanted);
      CHECK(count[0] == wanted.back());
    }
  }
}

namespace {

/// Of three ranks with two experts each: what the kernels of copy_sort say of tokens that take three experts.
constexpr int copy_ranks = 3, copy_experts_each = 2, copy_choices = 3;
struct SortedCopies {
  std::vector<std::int32_t> rows;          // of each choice, sorted by expert
  std::vector<std::int32_t> token_of_row;  // and back
  std::vector<std::int32_t> sent = {0};    // where each expert's rows begin
  std::vector<std::int32_t> tokens, copies, slots, blocks;
  std::int64_t count = 0;
};
SortedCopies sort_copies(const std::vector<std::int32_t>& chosen) {
  constexpr int W = copy_ranks, each = copy_experts_each, c = copy_choices, most = 3;
  const int T = static_cast<int>(chosen.size()) / c;
  SortedCopies s;
  s.rows.resize(chosen.size());
  for (int e = 0; e < W * each; ++e) {
    for (std::size_t i = 0; i < chosen.size(); ++i)
      if (chosen[i] == e) {
        s.rows[i] = static_cast<std::int32_t>(s.token_of_row.size());
        s.token_of_row.push_back(static_cast<std::int32_t>(i) / c);
      }
    s.sent.push_back(static_cast<std::int32_t>(s.token_of_row.size()));
  }
  const auto size = static_cast<std::size_t>(T);
  Device d("experts");
  Array<std::int32_t> rows(d.memory, "rows", s.rows), sent(d.memory, "sent", s.sent),
      tokens(d.memory, "tokens", size * most), blocks(d.memory, "blocks", W + 1),
      copies(d.memory, "copies", size * most), slots(d.memory, "slots", size * c);
  Array<std::int64_t> count(d.memory, "count", 1);
  d.run("copy_sort", {W}, 32, rows.begin(), sent.begin(), tokens.begin(), copies.begin(), slots.begin(), blocks.begin(),
        count.begin(), T, c, each, T * most, most);
  s.tokens = tokens.values(), s.copies = copies.values(), s.slots = slots.values(), s.blocks = blocks.values();
  s.count = count[0];
  return s;
}

/// Three experts in a row for each token, the first of them one of [0, last].
std::vector<std::int32_t> draw_choices(Draw& draw, int tokens, int last) {
  std::vector<std::int32_t> chosen;
  for (int t = 0; t < tokens; ++t)
    for (int j = 0, first = draw.between(0, last); j < copy_choices; ++j)
      chosen.push_back((first + j) % (copy_ranks * copy_experts_each));
  return chosen;
}

}  // namespace

TEST_CASE("a token's copies go once to each rank, in order, and its rows know them", "[kernels][experts]") {
  constexpr int T = 40, c = copy_choices, W = copy_ranks, each = copy_experts_each, most = 3;
  Draw draw(5);
  const std::vector<std::int32_t> chosen = draw_choices(draw, T, 5);
  const SortedCopies s = sort_copies(chosen);
  std::vector<std::int32_t> wanted, begins = {0}, wanted_copies;
  for (int r = 0; r < W; ++r) {
    for (int t = 0; t < T; ++t)
      if (std::any_of(chosen.begin() + t * c, chosen.begin() + (t + 1) * c, [&](int e) { return e / each == r; }))
        wanted.push_back(t);
    begins.push_back(static_cast<std::int32_t>(wanted.size()));
  }
  CHECK(s.count == begins.back());
  CHECK(s.blocks == begins);
  const auto copy_of = [&](int t, int rank) {
    const auto begin = wanted.begin() + begins[static_cast<std::size_t>(rank)];
    return static_cast<std::int32_t>(std::find(begin, wanted.end(), t) - wanted.begin());
  };
  for (int t = 0; t < T; ++t) {
    std::vector<std::int32_t> mine;
    for (int j = 0; j < c; ++j) {
      const auto i = static_cast<std::size_t>(t * c + j);
      const int rank = chosen[i] / each;
      const std::int32_t copy = copy_of(t, rank);
      CHECK(s.slots[static_cast<std::size_t>(s.rows[i])] == copy - begins[static_cast<std::size_t>(rank)]);
      if (std::find(mine.begin(), mine.end(), copy) == mine.end()) mine.push_back(copy);
    }
    mine.resize(most, -1);
    wanted_copies.insert(wanted_copies.end(), mine.begin(), mine.end());
  }
  wanted.resize(T * most, -1);
  CHECK(s.tokens == wanted);
  CHECK(s.copies == wanted_copies);
}

TEST_CASE("rows that come from three ranks find their copies, on each of them", "[kernels][experts]") {
  constexpr int W = copy_ranks, each = copy_experts_each, rows_each = 2;
  const auto at = [](auto i) { return static_cast<std::size_t>(i); };
  Draw draw(6);
  std::vector<SortedCopies> senders;
  std::vector<std::int32_t> all_blocks;
  for (int w = 0; w < W; ++w) {  // the second rank sends nothing to the third
    const SortedCopies& s = senders.emplace_back(sort_copies(draw_choices(draw, 25 + 9 * w, w == 1 ? 1 : 5)));
    all_blocks.insert(all_blocks.end(), s.blocks.begin(), s.blocks.end());
  }
  CHECK(senders[1].blocks[2] == senders[1].blocks[3]);
  for (int place = 0; place < W; ++place) {
    INFO("rank " << place);
    std::vector<std::int32_t> arrivals = {0}, slots, token_of_row, came;
    for (int w = 0; w < W; ++w) {  // what each sends here, as an exchange puts it
      const SortedCopies& s = senders[at(w)];
      for (int e = place * each; e < (place + 1) * each; ++e) {
        for (std::int32_t row = s.sent[at(e)]; row < s.sent[at(e + 1)]; ++row)
          slots.push_back(s.slots[at(row)]), token_of_row.push_back(1000 * w + s.token_of_row[at(row)]);
        arrivals.push_back(static_cast<std::int32_t>(slots.size()));
      }
      for (std::int32_t i = s.blocks[at(place)]; i < s.blocks[at(place + 1)]; ++i)
        came.push_back(1000 * w + s.tokens[at(i)]);
    }
    const auto U = static_cast<int>(came.size()) + 3;  // room for more than come
    Device d("experts");
    Array<std::int32_t> of_blocks(d.memory, "blocks", all_blocks), of_slots(d.memory, "slots", slots),
        begins(d.memory, "arrivals", arrivals), sources(d.memory, "sources", slots.size()),
        rows(d.memory, "rows", at(U * rows_each));
    Array<std::int64_t> count(d.memory, "count", 1);
    d.run("copy_arrivals", {2, W + 1}, 32, of_blocks.begin(), of_slots.begin(), begins.begin(), sources.begin(),
          rows.begin(), count.begin(), U, W, place, each, rows_each);
    CHECK(count[0] == static_cast<std::int64_t>(came.size()));
    std::vector<std::int32_t> wanted(at(U * rows_each), -1);
    for (std::size_t row = 0; row < slots.size(); ++row) {
      REQUIRE(at(sources[row]) < came.size());
      CHECK(came[at(sources[row])] == token_of_row[row]);
      const auto of = wanted.begin() + sources[row] * rows_each;
      *std::find(of, of + rows_each, -1) = static_cast<std::int32_t>(row);
    }
    CHECK(rows.values() == wanted);
  }
}
