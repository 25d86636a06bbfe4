// From logits to losses, draws and the optimizer's step.
#include <algorithm>
#include <vector>

#include "base/check.h"
#include "graph/slots.h"
#include "tests/conformance/oracle.h"

namespace hotbunk::conformance {
namespace {

/// A row of logits over a temperature, less its largest one.
struct Softmax {
  double top = -INFINITY;  // the largest logit
  std::vector<Bounded> below;
  Sum sum, weighted;  // of e^below, and of that times below
};
Softmax softmax_of(const OracleCall& c, const Numbers& logits, std::int64_t row, std::int64_t begin, std::int64_t n) {
  Softmax s;
  const Bounded inverse = constant(1.0 / c.op.real(Attr::temperature));
  for (std::int64_t j = 0; j < n; ++j) s.top = std::max(s.top, logits(row, begin + j));
  for (std::int64_t j = 0; j < n; ++j) {
    s.below.push_back((Bounded(logits(row, begin + j)) - s.top) * inverse);
    const Bounded e = exp(s.below.back());
    s.sum += e, s.weighted += e * s.below.back();
  }
  return s;
}
void log_prob_formula(OracleCall& c) {
  const Numbers& logits = c.inputs[0];
  const Bounded inverse = constant(1.0 / c.op.real(Attr::temperature));
  for (std::int64_t t = 0; t < logits.rows(); ++t) {
    const std::int64_t target = c.inputs[1].whole(t);
    if (target < 0) {
      for (Wanted& o : c.outputs) o(t) = 0.0;
      continue;
    }
    const Softmax s = softmax_of(c, logits, t, 0, c.op.integer(Attr::vocab));
    const Bounded log_sum = log(s.sum);
    c.outputs[0].put(t, s.below[static_cast<std::size_t>(target)] - log_sum);
    c.outputs[1].put(t, Bounded(s.top) * inverse + log_sum);
    c.outputs[2].put(t, log_sum - Bounded(s.weighted) / s.sum);
  }
}
void log_prob_backward_formula(OracleCall& c) {
  const Numbers &logits = c.inputs[0], &lse = c.inputs[1], &targets = c.inputs[2], &dlogp = c.inputs[3];
  const Bounded inverse = constant(1.0 / c.op.real(Attr::temperature));
  const double cap = c.op.real(Attr::softcap, 0.0);
  const OracleCall::Ids here = c.op.has(Attr::vocab_stride) ? c.ids() : OracleCall::Ids{0, c.op.integer(Attr::vocab)};
  for (std::int64_t t = 0; t < logits.rows(); ++t)
    for (std::int64_t j = 0; j < logits.cols(); ++j) {
      if (targets.whole(t) < 0 || !here.has(here.begin + j)) {
        c.outputs[0](t, j) = 0.0;
        continue;
      }
      const Bounded p = exp(Bounded(logits(t, j)) * inverse - lse(t)), g = Bounded(dlogp(t)) * inverse;
      const Bounded bent = cap > 0 ? Bounded(logits(t, j)) / cap : Bounded(0.0);
      c.outputs[0].put(t, j,
                       g * (Bounded(here.begin + j == targets.whole(t) ? 1.0 : 0.0) - p) * (Bounded(1) - bent * bent));
    }
}
void vocab_stats_formula(OracleCall& c) {
  const Numbers& logits = c.inputs[0];
  const OracleCall::Ids here = c.ids();
  for (std::int64_t t = 0; t < logits.rows(); ++t) {
    const std::int64_t target = c.inputs[1].whole(t);
    for (std::int64_t j = 0; j < 4; ++j) c.outputs[0](t, j) = 0.0;
    if (target < 0) continue;
    const Softmax s = softmax_of(c, logits, t, 0, here.end - here.begin);
    c.outputs[0](t, 0) = s.top;
    c.outputs[0].put(t, 1, s.sum);
    c.outputs[0].put(t, 2, s.weighted);
    if (here.has(target)) c.outputs[0](t, 3) = logits(t, target - here.begin);
  }
}
void vocab_log_prob_formula(OracleCall& c) {
  const Numbers& stats = c.inputs[0];
  const std::int64_t parts = stats.extent(0), T = stats.extent(1);
  const Bounded inverse = constant(1.0 / c.op.real(Attr::temperature));
  for (std::int64_t t = 0; t < T; ++t) {
    for (Wanted& o : c.outputs) o(t) = 0.0;
    if (c.inputs[1].whole(t) < 0) continue;
    double top = -INFINITY;
    for (std::int64_t p = 0; p < parts; ++p) top = std::max(top, stats(p * T + t, 0));
    Sum sum, weighted, target;
    for (std::int64_t p = 0; p < parts; ++p) {
      const std::int64_t row = p * T + t;
      const Bounded below = (Bounded(stats(row, 0)) - top) * inverse, share = exp(below);
      sum += share * stats(row, 1);
      weighted += share * (Bounded(stats(row, 2)) + below * stats(row, 1));
      target += stats(row, 3);
    }
    const Bounded log_sum = log(sum);
    c.outputs[0].put(t, (Bounded(target) - top) * inverse - log_sum);
    c.outputs[1].put(t, Bounded(top) * inverse + log_sum);
    c.outputs[2].put(t, log_sum - Bounded(weighted) / sum);
  }
}

/// In fp64 until they are stored: a step's losses are sums over all of its tokens.
void token_loss_formula(OracleCall& c) {
  const bool sft = c.asks(Attr::sft), with_reference = c.asks(Attr::reference) && !sft;
  const double low = 1 - c.op.real(Attr::clip_low), high = 1 + c.op.real(Attr::clip_high),
               kl = c.op.real(Attr::kl_coef);
  std::vector<Sum> sums(16, Sum(DType::f64));
  double largest = 0.0;
  const auto metric = [&](Metric m, double x) {
    sums[static_cast<std::size_t>(m)] += Bounded(x, 16 * fp32 * std::abs(x));
  };
  for (std::int64_t t = 0; t < c.inputs[0].size(); ++t) {
    const double logp = c.inputs[0](t), gap = c.inputs[1](t) - logp, a = c.inputs[3](t), w = c.inputs[4](t);
    if (w == 0.0) {
      c.outputs[0](t) = 0.0;
      continue;
    }
    const double ratio = std::exp(-gap), free = -a * ratio, bounded = -a * std::clamp(ratio, low, high);
    HB_CHECK(sft || (std::abs(ratio - low) > 1e-6 && std::abs(ratio - high) > 1e-6), "a ratio at its bound, {}", ratio);
    const bool clipped = !sft && bounded > free;
    const double policy = sft ? -logp : std::max(free, bounded), d_policy = sft ? -1.0 : clipped ? 0.0 : free;
    const double ahead = with_reference ? c.inputs[2](t) - logp : 0.0, k3 = std::expm1(ahead) - ahead;
    const double d = w * (d_policy - kl * std::expm1(ahead));
    c.outputs[0].put(t, {d, 16 * fp32 * w * (std::abs(d_policy) + kl * std::abs(std::expm1(ahead)))});
    metric(Metric::loss, w * policy), metric(Metric::loss, w * kl * k3);
    metric(Metric::policy_loss, w * policy);
    sums[static_cast<std::size_t>(Metric::kl_ref)] += Bounded(w * k3, 16 * fp32 * w * (std::abs(ahead) + k3));
    metric(Metric::clipped, clipped ? 1.0 : 0.0), metric(Metric::tokens, 1.0);
    metric(Metric::entropy, w * c.inputs[5](t));
    if (sft) continue;
    metric(Metric::kl_old, w * gap), metric(Metric::sum_logp_gap, std::abs(gap));
    largest = std::max(largest, std::abs(gap));
  }
  for (std::size_t m = 0; m < sums.size(); ++m) {
    const auto at = static_cast<std::int64_t>(m);
    const Bounded before = c.outputs[1](at);
    if (m == static_cast<std::size_t>(Metric::max_logp_gap)) c.outputs[1].put(at, max(before, largest));
    else c.outputs[1].put(at, before + sums[m]);
  }
}

// --- the optimizer --------------------------------------------------------------------------------------------------

void sum_squares_formula(OracleCall& c) {
  Sum sum(DType::f64);  // a norm is of many numbers
  sum += c.before(0, 0);
  for (std::int64_t i = 0; i < c.inputs[0].size(); ++i) sum += c.inputs[0](i) * c.inputs[0](i);
  c.outputs[0].put(0, sum);
}
void clip_coefficient_formula(OracleCall& c) {
  const double most = c.op.real(Attr::max_norm), norm = std::sqrt(c.inputs[0](0));
  const double coefficient = most > 0 ? std::min(1.0, most / (norm + 1e-6)) : 1.0;
  c.outputs[0].put(0, constant(coefficient));
  c.outputs[1].put(static_cast<std::int64_t>(Metric::grad_norm), constant(norm));
  c.outputs[1].put(static_cast<std::int64_t>(Metric::clip_coefficient), constant(coefficient));
}
void adamw_formula(OracleCall& c) {
  const double rate = c.inputs[1](0), step = c.inputs[1](1), beta1 = c.op.real(Attr::beta1),
               beta2 = c.op.real(Attr::beta2);
  Wanted &p = c.outputs[0], &m = c.outputs[1], &v = c.outputs[2];
  // 1 - beta, beta being in fp32.
  const auto rest = [](double beta) { return Bounded(1) - constant(beta); };
  const Bounded correction1 = Bounded(1) - Bounded(std::pow(beta1, step), step * fp32),
                correction2 = Bounded(1) - Bounded(std::pow(beta2, step), step * fp32);
  for (std::int64_t i = 0; i < c.inputs[0].size(); ++i) {
    const Bounded g = Bounded(c.inputs[0](i)) * c.inputs[2](0);
    const Bounded m_new = constant(beta1) * m(i) + rest(beta1) * g,
                  v_new = constant(beta2) * v(i) + rest(beta2) * (g * g);
    const Bounded by = m_new / correction1 / (sqrt(v_new) / sqrt(correction2) + constant(c.op.real(Attr::eps)));
    p.put(i, p(i) - constant(rate) * (by + constant(c.op.real(Attr::weight_decay)) * p(i)));
    m.put(i, m_new), v.put(i, v_new);
  }
}

// --- draws ----------------------------------------------------------------------------------------------------------

/// The id at which the probabilities, in their order, sum to more than uniform times what all that may be drawn sum to:
/// all ids by number, or the top_k largest of them, as many as top_p of their mass takes, largest first. A sum nearer
/// to a threshold than roundings could move it would leave open which id it is.
std::int64_t drawn_id(const OracleCall& c, const Numbers& logits, const Softmax& s, std::int64_t row, double uniform) {
  const std::int64_t V = c.op.integer(Attr::vocab), top_k = c.op.integer(Attr::top_k);
  const double top_p = c.op.real(Attr::top_p);
  std::vector<std::int64_t> order;
  for (std::int64_t j = 0; j < V; ++j) order.push_back(j);
  const auto k = static_cast<std::size_t>(top_k > 0 ? std::min(top_k, V) : V);
  if (k < order.size() || top_p < 1) {
    std::ranges::stable_sort(order, [&](auto a, auto b) { return logits(row, a) > logits(row, b); });
    order.resize(k);
  }
  const auto probability = [&](std::int64_t id) { return std::exp(s.below[static_cast<std::size_t>(id)].value); };
  const auto beyond = [](double sum, double threshold) {
    HB_CHECK(std::abs(sum - threshold) > 1e-5 * threshold, "a draw at a threshold: {} and {}", sum, threshold);
    return sum > threshold;
  };
  double mass = 0.0;
  for (const std::int64_t id : order) mass += probability(id);
  if (top_p < 1) {
    const double wanted = top_p * mass;
    std::size_t kept = 0;
    for (mass = 0.0; kept < order.size() && (kept == 0 || !beyond(mass, wanted)); ++kept)
      mass += probability(order[kept]);
    order.resize(kept);
  }
  double sum = 0.0;
  for (const std::int64_t id : order)
    if (sum += probability(id); id == order.back() || beyond(sum, uniform * mass)) return id;
  return -1;
}
void sample_formula(OracleCall& c) {
  // [tp, S, V], behind the vocabulary nothing: a row of all.
  const std::int64_t rows = c.inputs[0].extent(1), columns = c.inputs[0].cols(), ids = c.op.integer(Attr::vocab);
  std::vector<double> all;
  for (std::int64_t row = 0; row < rows; ++row)
    for (std::int64_t id = 0; id < ids; ++id) all.push_back(c.inputs[0](id / columns * rows + row, id % columns));
  const Numbers logits(DType::f32, {rows, ids}, std::move(all));
  for (std::int64_t row = 0; row < logits.rows(); ++row) {
    const Softmax s = softmax_of(c, logits, row, 0, c.op.integer(Attr::vocab));
    const std::int64_t id = drawn_id(c, logits, s, row, c.inputs[1](row));
    c.outputs[0].put_whole(row, id);
    c.outputs[1].put(row, s.below[static_cast<std::size_t>(id)] - log(s.sum));
  }
}

}  // namespace

std::span<const NamedFormula> loss_formulas() {
  static constexpr NamedFormula all[] = {{OpKind::log_prob, log_prob_formula},
                                         {OpKind::log_prob_backward, log_prob_backward_formula},
                                         {OpKind::vocab_stats, vocab_stats_formula},
                                         {OpKind::vocab_log_prob, vocab_log_prob_formula},
                                         {OpKind::token_loss, token_loss_formula},
                                         {OpKind::sum_squares, sum_squares_formula},
                                         {OpKind::clip_coefficient, clip_coefficient_formula},
                                         {OpKind::adamw, adamw_formula},
                                         {OpKind::sample, sample_formula}};
  return all;
}

}  // namespace hotbunk::conformance
