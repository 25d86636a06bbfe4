// A mixture of experts: who goes where, there and back, and the experts' products; and those of adapters.
#include <algorithm>
#include <functional>
#include <vector>

#include "base/check.h"
#include "graph/slots.h"
#include "tests/conformance/oracle.h"

namespace hotbunk::conformance {
namespace {

std::int64_t index_of_row(const Numbers& rows, std::int64_t t, std::int64_t j) {
  return rows.whole(t * rows.cols() + j);
}

// --- routers: in fp64 -----------------------------------------------------------------------------------------------

/// A token's scores: softmax of its logits, or a sigmoid of each.
std::vector<double> scores_of(const OracleCall& c, const Numbers& logits, std::int64_t t) {
  std::vector<double> out;
  double sum = 0.0;
  for (std::int64_t e = 0; e < logits.cols(); ++e) {
    const double x = std::exp(logits(t, e));
    out.push_back(c.asks(Attr::sigmoid) ? x / (1 + x) : x), sum += x;
  }
  if (!c.asks(Attr::sigmoid))
    for (double& x : out) x /= sum;
  return out;
}
/// The weight of each choice, before the factor, and what the choices' scores are divided by.
struct Weights {
  std::vector<double> of;
  double divisor = 1.0;
};
Weights weights_of(const OracleCall& c, const std::vector<double>& scores, const std::vector<std::int64_t>& chosen) {
  Weights w;
  if (c.asks(Attr::renormalise)) {
    w.divisor = 0.0;
    for (const std::int64_t e : chosen) w.divisor += scores[static_cast<std::size_t>(e)];
  }
  for (const std::int64_t e : chosen) w.of.push_back(scores[static_cast<std::size_t>(e)] / w.divisor);
  return w;
}
/// A kernel that exponentiates in fp32 is as far off as a handful of roundings of the weight's size.
Bounded in_fp32(double x, double size) { return {x, 32 * fp32 * std::abs(size)}; }

/// Leaves of experts in order, the best first, those of the best groups: as good as their `counted` best ones together.
template <class Good>
void keep_best_groups(const OracleCall& c, std::vector<std::int64_t>& order, std::int64_t experts, std::size_t counted,
                      Good&& good) {
  const std::int64_t groups = c.op.integer(Attr::groups, 1), taken = c.op.integer(Attr::taken_groups, 1);
  if (groups == 1) return;
  const auto group_of = [&](std::int64_t e) { return static_cast<std::size_t>(e / (experts / groups)); };
  std::vector<double> sums(static_cast<std::size_t>(groups));
  std::vector<std::size_t> summed(sums.size());
  for (const std::int64_t e : order)
    if (summed[group_of(e)]++ < counted) sums[group_of(e)] += good(e);
  std::vector<double> best = sums;
  std::ranges::sort(best, std::greater<>());
  const double least = best[static_cast<std::size_t>(taken - 1)];
  HB_CHECK(taken == groups || least - best[static_cast<std::size_t>(taken)] > 4 * fp32, "two groups are as good");
  std::erase_if(order, [&](std::int64_t e) { return sums[group_of(e)] < least; });
}

void route_formula(OracleCall& c) {
  const Numbers& logits = c.inputs[0];
  const std::int64_t E = logits.cols(), C = c.outputs[0].cols();
  for (std::int64_t t = 0; t < logits.rows(); ++t) {
    std::vector<std::int64_t> order;
    for (std::int64_t e = 0; e < E; ++e) order.push_back(e);
    const std::vector<double> scores = scores_of(c, logits, t);
    const bool biased = c.inputs.size() > 1;
    HB_CHECK(!biased || c.asks(Attr::sigmoid), "a bias of a softmax's scores has no formula");
    const auto good = [&](std::int64_t e) {
      return scores[static_cast<std::size_t>(e)] + (biased ? c.inputs[1](e) : 0.0);
    };
    std::ranges::stable_sort(order, [&](auto a, auto b) { return good(a) > good(b); });
    keep_best_groups(c, order, E, biased ? 2 : 1, good);
    for (std::size_t j = 0; j + 1 < order.size() && j < static_cast<std::size_t>(C); ++j)
      HB_CHECK(good(order[j]) - good(order[j + 1]) > 4 * fp32, "experts {} and {} are as good", order[j], order[j + 1]);
    order.resize(static_cast<std::size_t>(C));
    const Weights w = weights_of(c, scores, order);
    for (std::int64_t j = 0; j < C; ++j) {
      const double x = c.op.real(Attr::factor, 1.0) * w.of[static_cast<std::size_t>(j)];
      c.outputs[0].put(t, j, in_fp32(x, x));
      c.outputs[1].put_whole(t * C + j, order[static_cast<std::size_t>(j)]);
    }
  }
}
void route_backward_formula(OracleCall& c) {
  const Numbers &dw = c.inputs[0], &logits = c.inputs[1];
  const std::int64_t E = logits.cols(), C = dw.cols();
  for (std::int64_t t = 0; t < logits.rows(); ++t) {
    const std::vector<double> scores = scores_of(c, logits, t);
    std::vector<std::int64_t> chosen;
    for (std::int64_t j = 0; j < C; ++j) chosen.push_back(index_of_row(c.inputs[2], t, j));
    const Weights w = weights_of(c, scores, chosen);
    // By a score s_e: dw_e / divisor of a choice, less what a divisor loses; by logits through sigmoid or softmax.
    double along = 0.0, size = 0.0;
    std::vector<double> by_score(static_cast<std::size_t>(E));
    for (std::size_t j = 0; j < chosen.size(); ++j) {
      const double d = dw(t, static_cast<std::int64_t>(j));
      along += w.of[j] * d, size += std::abs(d);
    }
    if (chosen.size() == 1 && c.asks(Attr::renormalise)) size = 0.0;  // its weight is 1 whatever the score
    for (std::size_t j = 0; j < chosen.size(); ++j)
      by_score[static_cast<std::size_t>(chosen[j])] =
          (dw(t, static_cast<std::int64_t>(j)) - (c.asks(Attr::renormalise) ? along : 0.0)) / w.divisor;
    double mean = 0.0;
    for (std::size_t e = 0; e < scores.size(); ++e) mean += scores[e] * by_score[e];
    for (std::int64_t e = 0; e < E; ++e) {
      const double s = scores[static_cast<std::size_t>(e)], by = by_score[static_cast<std::size_t>(e)];
      const double d = s * (c.asks(Attr::sigmoid) ? by * (1 - s) : by - mean), factor = c.op.real(Attr::factor, 1.0);
      c.outputs[0].put(t, e, in_fp32(factor * d, factor * s * size / w.divisor));
    }
  }
}
void expert_counts_formula(OracleCall& c) {
  const std::int64_t C = c.inputs[0].cols(), E = c.outputs[0].cols();
  std::vector<double> counts(c.outputs[0].numbers.size());
  for (std::int64_t i = 0; i < c.inputs[0].size(); ++i)
    if (const std::int64_t s = c.inputs[1].whole(i / C); s >= 0)
      ++counts[static_cast<std::size_t>(s * E + c.inputs[0].whole(i))];
  for (std::size_t i = 0; i < counts.size(); ++i) c.outputs[0](static_cast<std::int64_t>(i)) = counts[i];
}
void router_loss_formula(OracleCall& c) {
  const Numbers &logits = c.inputs[1], &counts = c.inputs[2], &sequences = c.inputs[3], &weights = c.inputs[4];
  const auto E = static_cast<double>(logits.cols());
  const double factor = c.op.real(Attr::factor), z = c.op.real(Attr::z_factor);
  const auto top_k = static_cast<double>(c.op.integer(Attr::top_k)),
             sharers = static_cast<double>(c.op.integer(Attr::tp, 1));
  double loss = 0.0;
  for (std::int64_t t = 0; t < logits.rows(); ++t) {
    const std::int64_t s = sequences.whole(t);
    if (s < 0) continue;
    const std::vector<double> score = scores_of(c, logits, t);
    double sum = 0.0, exps = 0.0, length = 0.0, balance = 0.0;
    for (std::int64_t e = 0; e < logits.cols(); ++e) {
      sum += score[static_cast<std::size_t>(e)], exps += std::exp(logits(t, e)), length += counts(s, e) / top_k;
      balance += factor * E * counts(s, e) * score[static_cast<std::size_t>(e)];
    }
    const double lse = std::log(exps), q = weights(t);
    balance /= sum;
    loss += q * (balance + z * length * lse * lse);
    for (std::int64_t e = 0; e < logits.cols(); ++e) {
      const double p = score[static_cast<std::size_t>(e)] / sum, own = factor * E * counts(s, e);
      const double by_score = p * (c.asks(Attr::sigmoid) ? 1 - score[static_cast<std::size_t>(e)] : 1.0);
      const double d = by_score * (own - balance) + 2 * z * length * lse * std::exp(logits(t, e)) / exps;
      const double size = by_score * (own + balance) + 2 * z * length * std::abs(lse);
      c.outputs[0].put(t, e, Bounded(c.outputs[0](t, e)) + Bounded(q * d / sharers, fp32 * q * size / sharers));
    }
  }
  for (const Metric m : {Metric::loss, Metric::router_loss}) {
    const auto at = static_cast<std::int64_t>(m);
    c.outputs[1].put(at, Bounded(c.outputs[1](at)) + constant(loss));
  }
}

// --- who goes where -------------------------------------------------------------------------------------------------

/// All experts are this rank's; or `tp` ranks share each group of them, by place, neighbours having the same. Where
/// they are in parts, as many follow one another for each of a rank's experts.
void expert_sort_formula(OracleCall& c) {
  const std::int64_t n = c.inputs[0].size(), E = std::ssize(c.outputs[1].wholes) - 1,
                     parts = c.outputs[0].cols() / c.inputs[0].cols(), sharers = c.op.integer(Attr::tp, 1),
                     each = E / c.op.integer(Attr::groups, 1),
                     place = c.op.has(Attr::tp) ? c.place / c.op.integer(Attr::ranks, 1) : 0;
  for (std::uint64_t& row : c.outputs[0].wholes) row = static_cast<std::uint64_t>(-1);
  std::int64_t row = 0;
  for (std::int64_t p = 0; p < E; ++p) {
    const std::int64_t e = (p / each * sharers + place) * each + p % each;
    c.outputs[1].put_whole(p, row);
    for (std::int64_t i = 0; i < n; ++i)
      if (c.inputs[0].whole(i) == e / (each * parts) * each + e % each)
        c.outputs[0].put_whole(i * parts + e / each % parts, row++);
  }
  c.outputs[1].put_whole(E, row);
}
void expert_arrivals_formula(OracleCall& c) {
  const Numbers& sent = c.inputs[0];
  const std::int64_t ranks = sent.rows(), each = (sent.cols() - 1) / ranks;
  std::int64_t row = 0, segment = 0;
  for (std::int64_t r = 0; r < ranks; ++r)
    for (std::int64_t e = c.place * each; e < (c.place + 1) * each; ++e) {
      c.outputs[0].put_whole(segment++, row);
      row += sent.whole(r * sent.cols() + e + 1) - sent.whole(r * sent.cols() + e);
    }
  c.outputs[0].put_whole(segment, row);
  c.outputs[1].put_whole(0, row);
}
void copy_sort_formula(OracleCall& c) {
  const Numbers &rows = c.inputs[0], &sent = c.inputs[1];
  const std::int64_t T = rows.rows(), C = rows.cols(), W = std::ssize(c.outputs[3].wholes) - 1, E = sent.size() - 1;
  for (const std::size_t o : {std::size_t{0}, std::size_t{1}})
    for (std::uint64_t& x : c.outputs[o].wholes) x = static_cast<std::uint64_t>(-1);
  // The rank that a row goes to: that of its expert.
  const auto rank_of = [&](std::int64_t row) {
    std::int64_t e = 0;
    while (sent.whole(e + 1) <= row) ++e;
    return e / (E / W);
  };
  std::int64_t copy = 0;
  for (std::int64_t w = 0; w < W; ++w) {
    const std::int64_t first = copy;
    c.outputs[3].put_whole(w, first);
    for (std::int64_t t = 0; t < T; ++t) {
      bool goes = false;
      for (std::int64_t j = 0; j < C; ++j) {
        const std::int64_t row = index_of_row(rows, t, j);
        if (row < 0 || rank_of(row) != w) continue;
        c.outputs[2].put_whole(row, copy - first), goes = true;
      }
      if (goes) c.outputs[0].put_whole(copy++, t);
    }
  }
  c.outputs[3].put_whole(W, copy);
  c.outputs[4].put_whole(0, copy);
  // Of each token, in the order of its choices.
  const std::int64_t most = c.outputs[1].cols();
  for (std::int64_t t = 0; t < T; ++t) {
    std::vector<std::uint64_t> of;
    for (std::int64_t j = 0; j < C; ++j) {
      const std::int64_t row = index_of_row(rows, t, j);
      if (row < 0) continue;
      const std::uint64_t at = c.outputs[3].wholes[static_cast<std::size_t>(rank_of(row))] +
                               c.outputs[2].wholes[static_cast<std::size_t>(row)];
      if (std::ranges::find(of, at) == of.end()) of.push_back(at);
    }
    std::ranges::copy(of, c.outputs[1].wholes.begin() + t * most);
  }
}
void copy_arrivals_formula(OracleCall& c) {
  const Numbers &blocks = c.inputs[0], &slots = c.inputs[1], &arrivals = c.inputs[2];
  const std::int64_t W = blocks.rows(), each = (arrivals.size() - 1) / W, most = c.outputs[1].cols();
  for (std::uint64_t& x : c.outputs[1].wholes) x = static_cast<std::uint64_t>(-1);
  std::int64_t before = 0;
  for (std::int64_t w = 0; w < W; ++w) {
    for (std::int64_t row = arrivals.whole(w * each); row < arrivals.whole((w + 1) * each); ++row) {
      const std::int64_t copy = before + slots.whole(row);
      c.outputs[0].put_whole(row, copy);
      std::int64_t j = 0;
      while (c.outputs[1].wholes.at(static_cast<std::size_t>(copy * most + j)) != static_cast<std::uint64_t>(-1)) ++j;
      c.outputs[1].put_whole(copy * most + j, row);
    }
    const std::int64_t line = w * blocks.cols() + c.place;
    before += blocks.whole(line + 1) - blocks.whole(line);
  }
  c.outputs[2].put_whole(0, before);
}

// --- there and back -------------------------------------------------------------------------------------------------

void dispatch_formula(OracleCall& c) {
  const Numbers &x = c.inputs[0], &rows = c.inputs[1];
  for (Bounded& y : c.outputs[0].numbers) y = 0.0;
  for (std::int64_t t = 0; t < rows.rows(); ++t)
    for (std::int64_t j = 0; j < rows.cols(); ++j)
      for (std::int64_t h = 0; h < x.cols(); ++h) c.outputs[0](index_of_row(rows, t, j), h) = x(t, h);
}
void dispatch_backward_formula(OracleCall& c) {
  const Numbers &dy = c.inputs[0], &rows = c.inputs[1];
  for (std::int64_t t = 0; t < rows.rows(); ++t)
    for (std::int64_t h = 0; h < dy.cols(); ++h) {
      Sum sum;
      sum += c.before(0, t * dy.cols() + h);
      for (std::int64_t j = 0; j < rows.cols(); ++j) sum += dy(index_of_row(rows, t, j), h);
      c.outputs[0].put(t, h, sum);
    }
}
void combine_formula(OracleCall& c) {
  const Numbers &y = c.inputs[0], &rows = c.inputs[1], &weights = c.inputs[2];
  for (std::int64_t t = 0; t < rows.rows(); ++t)
    for (std::int64_t h = 0; h < y.cols(); ++h) {
      Sum sum;
      sum += c.inputs.size() > 3 ? c.inputs[3](t, h) : 0.0;
      for (std::int64_t j = 0; j < rows.cols(); ++j)
        sum += Bounded(weights(t, j * weights.cols() / rows.cols())) * y(index_of_row(rows, t, j), h);
      c.outputs[0].put(t, h, sum);
    }
}
void combine_backward_formula(OracleCall& c) {
  const Numbers &dz = c.inputs[0], &y = c.inputs[1], &rows = c.inputs[2], &weights = c.inputs[3];
  for (std::int64_t t = 0; t < rows.rows(); ++t)
    for (std::int64_t w = 0; w < weights.cols(); ++w) {  // of a choice, and of each part of it
      const std::int64_t parts = rows.cols() / weights.cols();
      Sum sum;
      for (std::int64_t j = w * parts; j < (w + 1) * parts; ++j) {
        const std::int64_t row = index_of_row(rows, t, j);
        for (std::int64_t h = 0; h < y.cols(); ++h) {
          c.outputs[0].put(row, h, Bounded(weights(t, w)) * dz(t, h));
          sum += Bounded(dz(t, h)) * y(row, h);
        }
      }
      c.outputs[1].put(t, w, sum);
    }
}

// --- products: segment s has rows offsets[s] … offsets[s + 1] - 1, of expert s modulo experts ------------------------

/// The columns that a bias (or its gradient) of all experts has: all, or a rank's by its place in the group.
struct Biased {
  std::int64_t begin, count;
  Biased(const OracleCall& c, std::int64_t size, std::int64_t experts, std::int64_t columns)
      : begin(0), count(size / experts) {
    if (count > 0) begin = c.place % (columns / count) * count;
  }
  bool has(std::int64_t n) const { return n >= begin && n < begin + count; }
};
void grouped_linear_formula(OracleCall& c) {
  const Numbers &x = c.inputs[0], &w = c.inputs[1], &offsets = c.inputs[2];
  const std::int64_t N = c.outputs[0].cols(), E = w.rows() / N;
  const Biased biased(c, c.inputs.size() > 3 ? c.inputs[3].size() : 0, E, N);
  for (std::int64_t s = 0; s + 1 < offsets.size(); ++s)
    for (std::int64_t row = offsets.whole(s); row < offsets.whole(s + 1); ++row)
      for (std::int64_t n = 0; n < N; ++n) {
        const std::int64_t e = s % E;
        Sum sum;
        for (std::int64_t k = 0; k < x.cols(); ++k) sum += Bounded(x(row, k)) * w(e * N + n, k);
        if (biased.has(n)) {
          // A kernel may store products before it adds a bias of some columns.
          const Bounded product = biased.count < N ? rounded(sum, c.outputs[0].dtype) : Bounded(sum);
          sum = Sum();
          sum += product, sum += c.inputs[3](e * biased.count + n - biased.begin);
        }
        c.outputs[0].put(row, n, sum);
      }
}
void grouped_linear_dgrad_formula(OracleCall& c) {
  const Numbers &dy = c.inputs[0], &w = c.inputs[1], &offsets = c.inputs[2];
  const std::int64_t E = w.rows() / dy.cols();
  for (std::int64_t s = 0; s + 1 < offsets.size(); ++s)
    for (std::int64_t row = offsets.whole(s); row < offsets.whole(s + 1); ++row)
      for (std::int64_t k = 0; k < w.cols(); ++k) {
        const std::int64_t e = s % E;
        Sum sum;
        sum += c.before(0, row * w.cols() + k);
        for (std::int64_t n = 0; n < dy.cols(); ++n) sum += Bounded(dy(row, n)) * w(e * dy.cols() + n, k);
        c.outputs[0].put(row, k, sum);
      }
}
void grouped_linear_wgrad_formula(OracleCall& c) {
  const Numbers &dy = c.inputs[0], &x = c.inputs[1], &offsets = c.inputs[2];
  const std::int64_t N = dy.cols(), K = x.cols(), E = c.outputs[0].rows() / N;
  const Biased biased(c, c.outputs.size() > 1 ? std::ssize(c.outputs[1].numbers) : 0, E, N);
  for (std::int64_t e = 0; e < E; ++e) {
    std::vector<std::int64_t> rows;
    for (std::int64_t s = e; s + 1 < offsets.size(); s += E)
      for (std::int64_t row = offsets.whole(s); row < offsets.whole(s + 1); ++row) rows.push_back(row);
    for (std::int64_t n = 0; n < N; ++n) {
      for (std::int64_t k = 0; k < K; ++k) {
        // A kernel may store what it has behind each segment.
        Bounded sofar = c.before(0, (e * N + n) * K + k);
        for (std::int64_t s = e; s + 1 < offsets.size(); s += E) {
          Sum sum;
          sum += s == e ? sofar : rounded(sofar, c.outputs[0].dtype);
          for (std::int64_t row = offsets.whole(s); row < offsets.whole(s + 1); ++row)
            sum += Bounded(dy(row, n)) * x(row, k);
          sofar = sum;
        }
        c.outputs[0].put(e * N + n, k, sofar);
      }
      if (!biased.has(n)) continue;
      const std::int64_t at = e * biased.count + n - biased.begin;
      Sum bias;
      bias += c.before(1, at);
      for (const std::int64_t row : rows) bias += dy(row, n);
      c.outputs[1].put(at, bias);
    }
  }
}

// --- adapters: one for all rows, or of each expert its own ----------------------------------------------------------

/// Rows by an adapter's matrix: all by the only one, or, with offsets, segments of them by each expert's, which lie one
/// below the other.
struct Adapted {
  std::int64_t matrix, begin, end;
};
std::vector<Adapted> adapted(const OracleCall& c) {
  if (c.inputs.size() < 3) return {{0, 0, c.inputs[0].rows()}};
  const Numbers& offsets = c.inputs[2];
  const std::int64_t segments = offsets.size() - 1, experts = segments / c.op.integer(Attr::ranks);
  std::vector<Adapted> out;
  for (std::int64_t s = 0; s < segments; ++s) out.push_back({s % experts, offsets.whole(s), offsets.whole(s + 1)});
  return out;
}
/// How many rows a matrix has of those that lie one below the other.
std::int64_t rows_of_matrix(const std::vector<Adapted>& all, std::int64_t rows) {
  std::int64_t matrices = 0;
  for (const Adapted& s : all) matrices = std::max(matrices, s.matrix + 1);
  return rows / matrices;
}
/// The product is stored, then scaled where it lies.
Bounded scaled(const OracleCall& c, Bounded product) {
  return constant(c.op.real(Attr::factor, 1.0)) * rounded(product, c.outputs[0].dtype);
}
/// Behind the last expert's rows are zeros.
void lora_down_formula(OracleCall& c) {
  const Numbers &x = c.inputs[0], &a = c.inputs[1];
  const std::int64_t R = c.outputs[0].cols();
  for (Bounded& u : c.outputs[0].numbers) u = 0.0;
  for (const Adapted& s : adapted(c))
    for (std::int64_t t = s.begin; t < s.end; ++t)
      for (std::int64_t r = 0; r < R; ++r) {
        Sum u;
        for (std::int64_t j = 0; j < x.cols(); ++j) u += Bounded(x(t, j)) * a(s.matrix * R + r, j);
        c.outputs[0].put(t, r, scaled(c, u));
      }
}
void lora_up_formula(OracleCall& c) {
  const Numbers &u = c.inputs[0], &b = c.inputs[1];
  const std::vector<Adapted> all = adapted(c);
  const std::int64_t column = c.op.integer(Attr::column), N = rows_of_matrix(all, b.rows());
  for (const Adapted& s : all)
    for (std::int64_t t = s.begin; t < s.end; ++t)
      for (std::int64_t n = 0; n < N; ++n) {
        Sum y;
        y += c.outputs[0](t, column + n);
        for (std::int64_t r = 0; r < u.cols(); ++r) y += Bounded(u(t, r)) * b(s.matrix * N + n, r);
        c.outputs[0].put(t, column + n, y);
      }
}
void lora_up_dgrad_formula(OracleCall& c) {
  const Numbers &dy = c.inputs[0], &b = c.inputs[1];
  const std::vector<Adapted> all = adapted(c);
  const std::int64_t column = c.op.integer(Attr::column), N = rows_of_matrix(all, b.rows());
  for (Bounded& du : c.outputs[0].numbers) du = 0.0;
  for (const Adapted& s : all)
    for (std::int64_t t = s.begin; t < s.end; ++t)
      for (std::int64_t r = 0; r < b.cols(); ++r) {
        Sum du;
        for (std::int64_t n = 0; n < N; ++n) du += Bounded(dy(t, column + n)) * b(s.matrix * N + n, r);
        c.outputs[0].put(t, r, scaled(c, du));
      }
}
/// Of a matrix's rows in all segments, each of which a kernel may add to what is stored.
void lora_up_wgrad_formula(OracleCall& c) {
  const Numbers &dy = c.inputs[0], &u = c.inputs[1];
  const std::vector<Adapted> all = adapted(c);
  const std::int64_t column = c.op.integer(Attr::column), N = rows_of_matrix(all, c.outputs[0].rows());
  for (std::int64_t row = 0; row < c.outputs[0].rows(); ++row)
    for (std::int64_t r = 0; r < u.cols(); ++r) {
      Bounded db = c.before(0, row * u.cols() + r);
      for (const Adapted& s : all) {
        if (s.matrix != row / N) continue;
        Sum sum;
        sum += db;
        for (std::int64_t t = s.begin; t < s.end; ++t) sum += Bounded(dy(t, column + row % N)) * u(t, r);
        db = rounded(sum, c.outputs[0].dtype);
      }
      c.outputs[0](row, r) = db;
    }
}

}  // namespace

std::span<const NamedFormula> expert_formulas() {
  static constexpr NamedFormula all[] = {{OpKind::route, route_formula},
                                         {OpKind::route_backward, route_backward_formula},
                                         {OpKind::expert_counts, expert_counts_formula},
                                         {OpKind::router_loss, router_loss_formula},
                                         {OpKind::expert_sort, expert_sort_formula},
                                         {OpKind::expert_arrivals, expert_arrivals_formula},
                                         {OpKind::copy_sort, copy_sort_formula},
                                         {OpKind::copy_arrivals, copy_arrivals_formula},
                                         {OpKind::dispatch, dispatch_formula},
                                         {OpKind::dispatch_backward, dispatch_backward_formula},
                                         {OpKind::combine, combine_formula},
                                         {OpKind::combine_backward, combine_backward_formula},
                                         {OpKind::grouped_linear, grouped_linear_formula},
                                         {OpKind::grouped_linear_dgrad, grouped_linear_dgrad_formula},
                                         {OpKind::grouped_linear_wgrad, grouped_linear_wgrad_formula},
                                         {OpKind::lora_down, lora_down_formula},
                                         {OpKind::lora_up, lora_up_formula},
                                         {OpKind::lora_up_dgrad, lora_up_dgrad_formula},
                                         {OpKind::lora_up_wgrad, lora_up_wgrad_formula}};
  return all;
}

}  // namespace hotbunk::conformance
