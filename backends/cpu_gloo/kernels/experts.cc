#include "backends/cpu_gloo/kernels/experts.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <type_traits>
#include <utility>
#include <vector>

#include "backends/cpu_gloo/kernels/elementwise.h"
#include "backends/cpu_gloo/kernels/gemm.h"
#include "backends/cpu_gloo/kernels/parallel.h"
#include "backends/cpu_gloo/kernels/simd.h"

namespace hotbunk::kernels {
namespace {

/// The sum of e^(x - largest) over n logits, of all of them or of those chosen.
template <class Logit>
double exp_sum(std::int64_t n, double largest, Logit&& logit) {
  double sum = 0.0;
  for (std::int64_t i = 0; i < n; ++i) sum += std::exp(logit(i) - largest);
  return sum;
}

/// What a thread routes its tokens with, one after the other.
struct RoutedToken {
  std::vector<char> barred;   // [E] of a group that is not taken, or taken already
  std::vector<double> score;  // [E] where experts are chosen
  std::vector<double> group;  // [G]
};

double sigmoid_of(double x) { return 1.0 / (1.0 + std::exp(-x)); }

/// The best that is not barred; of equal ones the first.
template <class Score>
std::int64_t best_of(std::int64_t begin, std::int64_t end, const std::vector<char>& barred, const Score* score) {
  std::int64_t best = -1;
  for (std::int64_t e = begin; e < end; ++e)
    if (!barred[static_cast<std::size_t>(e)] && (best < 0 || score[e] > score[best])) best = e;
  return best;
}

/// Bars the experts of all groups but the best ones.
void take_groups(const Routing& r, RoutedToken& t) {
  if (r.groups == 1) return;
  const std::int64_t each = r.experts / r.groups;
  t.group.clear();
  for (std::int64_t g = 0; g < r.groups; ++g) {
    const std::int64_t first = best_of(g * each, (g + 1) * each, t.barred, t.score.data());
    double sum = t.score[static_cast<std::size_t>(first)];
    if (r.bias.data != nullptr) {
      t.barred[static_cast<std::size_t>(first)] = 1;
      sum += t.score[static_cast<std::size_t>(best_of(g * each, (g + 1) * each, t.barred, t.score.data()))];
      t.barred[static_cast<std::size_t>(first)] = 0;
    }
    t.group.push_back(sum);
  }
  std::vector<char> taken(static_cast<std::size_t>(r.groups), 0);
  for (std::int64_t j = 0; j < r.taken; ++j)
    taken[static_cast<std::size_t>(best_of(0, r.groups, taken, t.group.data()))] = 1;
  for (std::int64_t e = 0; e < r.experts; ++e)
    t.barred[static_cast<std::size_t>(e)] = taken[static_cast<std::size_t>(e / each)] ? 0 : 1;
}

/// Scores as fp32, of which the choice is made: transformers' order where two lie close together.
void choose(const Routing& r, const float* logits, std::int32_t* chosen, RoutedToken& t) {
  t.barred.assign(static_cast<std::size_t>(r.experts), 0);
  t.score.resize(static_cast<std::size_t>(r.experts));
  for (std::int64_t e = 0; e < r.experts; ++e) {
    double score = r.sigmoid ? static_cast<float>(sigmoid_of(logits[e])) : logits[e];
    if (r.bias.data != nullptr)
      score =
          static_cast<float>(score) + (r.bias.dtype == DType::f32 ? static_cast<const float*>(r.bias.data)[e]
                                                                  : as_f32(static_cast<const bf16*>(r.bias.data)[e]));
    t.score[static_cast<std::size_t>(e)] = score;
  }
  take_groups(r, t);
  for (std::int64_t j = 0; j < r.choices; ++j) {
    const std::int64_t best = best_of(0, r.experts, t.barred, t.score.data());
    t.barred[static_cast<std::size_t>(best)] = 1;
    chosen[j] = static_cast<std::int32_t>(best);
  }
}

/// What the weights of a token are formed from. Softmax: e^(logit - largest), and the sum over those it is over;
/// renormalised, the sum over all experts cancels out. Sigmoid: the scores, and their sum or 1.
struct Shares {
  double largest = 0.0, sum = 1.0;
  Shares(const Routing& r, const float* logits, const std::int32_t* chosen) {
    if (r.sigmoid) {
      if (!r.renormalise) return;
      sum = 1e-20;  // transformers'
      for (std::int64_t j = 0; j < r.choices; ++j) sum += sigmoid_of(logits[chosen[j]]);
      return;
    }
    largest = logits[chosen[0]];  // in the best group, too
    sum = r.renormalise ? exp_sum(r.choices, largest, [&](std::int64_t j) { return logits[chosen[j]]; })
                        : exp_sum(r.experts, largest, [&](std::int64_t e) { return logits[e]; });
  }
  double of(const Routing& r, double logit) const {
    return (r.sigmoid ? sigmoid_of(logit) : std::exp(logit - largest)) / sum;
  }
};

void route_token(const Routing& r, const float* logits, float* weights, std::int32_t* chosen, RoutedToken& t) {
  choose(r, logits, chosen, t);
  const Shares shares(r, logits, chosen);
  for (std::int64_t j = 0; j < r.choices; ++j)
    weights[j] = static_cast<float>(r.factor * shares.of(r, logits[chosen[j]]));
}

/// Softmax: dlogit_e = p_e (d_e - Σ_i p_i d_i) over those that it is over, d being 0 where an expert was not chosen.
/// Sigmoid: of the chosen ones, with p = s / Σ s, (1 - s_e) p_e (d_e - Σ_i p_i d_i), or without renormalising (1 - s_e)
/// s_e d_e. Group and bias have no part in it.
void route_token_backward(const Routing& r, const float* d_weights, const float* logits, const std::int32_t* chosen,
                          std::vector<double>& d) {
  d.assign(static_cast<std::size_t>(r.experts), 0.0);
  const Shares shares(r, logits, chosen);
  double mean = 0.0;
  if (!r.sigmoid || r.renormalise)
    for (std::int64_t j = 0; j < r.choices; ++j) mean += shares.of(r, logits[chosen[j]]) * d_weights[j];
  if (!r.sigmoid && !r.renormalise)
    for (std::int64_t e = 0; e < r.experts; ++e) d[static_cast<std::size_t>(e)] = -shares.of(r, logits[e]) * mean;
  for (std::int64_t j = 0; j < r.choices; ++j) {
    const double slope = r.sigmoid ? 1.0 - sigmoid_of(logits[chosen[j]]) : 1.0;
    d[static_cast<std::size_t>(chosen[j])] = slope * shares.of(r, logits[chosen[j]]) * (d_weights[j] - mean);
  }
  for (double& x : d) x *= r.factor;
}

/// Choices that have a row here: rows are numbered from 0 without a gap.
std::int64_t own_rows(const std::int32_t* rows, std::int64_t choices) {
  return choices - std::count(rows, rows + choices, -1);
}

}  // namespace

void zero_rows(KernelContext& ctx, Matrix m, std::int64_t begin, std::int64_t end, std::int64_t cols) {
  parallel_for(ctx, end - begin, rows_grain(cols), [&](std::int64_t from, std::int64_t to) {
    for (std::int64_t r = begin + from; r < begin + to; ++r)
      std::memset(from_row(m, r).data, 0, static_cast<std::size_t>(cols * size_of(m.dtype)));
  });
}

void route(KernelContext& ctx, const Routing& r, const float* logits, float* weights, std::int32_t* chosen) {
  parallel_for(ctx, r.tokens, rows_grain(r.experts * r.choices), [&](std::int64_t begin, std::int64_t end) {
    RoutedToken token;
    for (std::int64_t t = begin; t < end; ++t)
      route_token(r, logits + t * r.experts, weights + t * r.choices, chosen + t * r.choices, token);
  });
}

void route_backward(KernelContext& ctx, const Routing& r, const float* d_weights, const float* logits,
                    const std::int32_t* chosen, Matrix d_logits) {
  with_float_type(d_logits.dtype, [&](auto tag) {
    using E = decltype(tag);
    parallel_for(ctx, r.tokens, rows_grain(4 * r.experts), [&](std::int64_t begin, std::int64_t end) {
      std::vector<double> d;
      for (std::int64_t t = begin; t < end; ++t) {
        route_token_backward(r, d_weights + t * r.choices, logits + t * r.experts, chosen + t * r.choices, d);
        E* out = row<E>(d_logits, t);
        for (std::int64_t e = 0; e < r.experts; ++e)
          out[e] = from_f32<E>(static_cast<float>(d[static_cast<std::size_t>(e)]));
      }
    });
  });
}

void expert_counts(std::span<const std::int32_t> chosen, std::span<const std::int32_t> sequences, std::int64_t choices,
                   std::int64_t experts, std::span<float> counts) {
  std::ranges::fill(counts, 0.0f);
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    const std::int64_t sequence = sequences[i / static_cast<std::size_t>(choices)], e = chosen[i];
    if (sequence < 0) continue;
    HB_CHECK(e >= 0 && e < experts && (sequence + 1) * experts <= std::ssize(counts), "expert {} of sequence {}", e,
             sequence);
    counts[static_cast<std::size_t>(sequence * experts + e)] += 1.0f;
  }
}

namespace {

/// Of one token: adds its gradient over `weight` to d[E], returns its loss over the same.
double router_loss_of_token(const RouterLoss& r, const float* logits, const float* counts, std::vector<double>& d) {
  const auto E = static_cast<std::size_t>(r.experts);
  const double largest = *std::max_element(logits, logits + E);
  double sum = 0.0, scores = 0.0, length = 0.0, mean = 0.0;
  const auto score = [&](std::size_t e) { return r.sigmoid ? sigmoid_of(logits[e]) : std::exp(logits[e] - largest); };
  for (std::size_t e = 0; e < E; ++e) {
    sum += std::exp(logits[e] - largest), scores += score(e);
    length += counts[e] / static_cast<double>(r.choices);
  }
  for (std::size_t e = 0; e < E; ++e) mean += score(e) / scores * counts[e];
  const double lse = largest + std::log(sum), balance = r.balance * static_cast<double>(r.experts);
  for (std::size_t e = 0; e < E; ++e) {
    const double slope = r.sigmoid ? 1.0 - sigmoid_of(logits[e]) : 1.0;
    d[e] = balance * slope * score(e) / scores * (counts[e] - mean) +
           2.0 * r.z * length * lse * std::exp(logits[e] - largest) / sum;
  }
  return balance * mean + r.z * length * lse * lse;
}

}  // namespace

double router_loss(KernelContext& ctx, const RouterLoss& r, const float* logits, const float* counts,
                   const std::int32_t* sequences, const float* weights, Matrix d_logits) {
  std::vector<double> losses(static_cast<std::size_t>(r.tokens), 0.0);
  with_float_type(d_logits.dtype, [&](auto tag) {
    using E = decltype(tag);
    parallel_for(ctx, r.tokens, rows_grain(8 * r.experts), [&](std::int64_t begin, std::int64_t end) {
      std::vector<double> d(static_cast<std::size_t>(r.experts));
      for (std::int64_t t = begin; t < end; ++t) {
        const double weight = weights[t];
        if (sequences[t] < 0 || weight == 0.0) continue;
        losses[static_cast<std::size_t>(t)] =
            weight * router_loss_of_token(r, logits + t * r.experts, counts + sequences[t] * r.experts, d);
        E* out = row<E>(d_logits, t);
        for (std::int64_t e = 0; e < r.experts; ++e)
          out[e] = from_f32<E>(static_cast<float>(as_f32(out[e]) + weight * d[static_cast<std::size_t>(e)] /
                                                                       static_cast<double>(r.sharers)));
      }
    });
  });
  return std::accumulate(losses.begin(), losses.end(), 0.0);
}

void expert_sort(std::span<const std::int32_t> chosen, const OwnExperts& own, std::int32_t* rows,
                 std::int32_t* offsets) {
  std::vector<std::int32_t> next(static_cast<std::size_t>(own.count) + 1);
  const std::int64_t group = own.all / own.groups, each = own.count / own.groups;
  const auto is_own = [&](std::int64_t e) { return e % group >= own.first && e % group < own.first + each; };
  const auto place = [&](std::int64_t e) { return static_cast<std::size_t>(e / group * each + e % group - own.first); };
  const auto part_of = [&](std::int64_t e, std::int64_t part) {
    return own.parts == 1 ? e : (e / each * own.parts + part) * each + e % each;
  };
  for (const std::int64_t e : chosen) {
    HB_CHECK(e >= 0 && e < own.all / own.parts, "expert {} of {}", e, own.all / own.parts);
    for (std::int64_t p = 0; p < own.parts; ++p)
      if (const std::int64_t of = part_of(e, p); is_own(of)) ++next[place(of) + 1];
  }
  for (std::size_t e = 0; e < static_cast<std::size_t>(own.count); ++e) next[e + 1] += next[e];
  std::copy(next.begin(), next.end(), offsets);
  for (const std::int64_t e : chosen)
    for (std::int64_t p = 0; p < own.parts; ++p) {
      const std::int64_t of = part_of(e, p);
      *rows++ = is_own(of) ? next[place(of)]++ : -1;
    }
}

std::int32_t expert_arrivals(std::span<const std::int32_t> offsets, std::int64_t ranks, std::int64_t place,
                             std::int32_t* arrivals) {
  const std::int64_t all = std::ssize(offsets) / ranks - 1, own = all / ranks;
  std::int32_t begin = 0;
  for (std::int64_t r = 0; r < ranks; ++r)
    for (std::int64_t e = place * own; e < (place + 1) * own; ++e) {
      *arrivals++ = begin;
      const auto at = static_cast<std::size_t>(r * (all + 1) + e);
      begin += offsets[at + 1] - offsets[at];
    }
  *arrivals = begin;
  return begin;
}

std::int64_t copy_sort(std::span<const std::int32_t> rows, std::int64_t choices, std::span<const std::int32_t> sent,
                       std::int64_t ranks, const Copies& out) {
  const std::int64_t segments = (std::ssize(sent) - 1) / ranks, T = std::ssize(rows) / choices;
  const std::int64_t most = std::min(ranks, choices);  // copies of a token
  const auto rank_of = [&](std::int32_t row) {
    std::int64_t rank = 0;
    while (row >= sent[static_cast<std::size_t>((rank + 1) * segments)]) ++rank;
    return static_cast<std::size_t>(rank);
  };
  std::vector<std::int32_t> begin(static_cast<std::size_t>(ranks) + 1), last(static_cast<std::size_t>(ranks), -1);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (rows[i] < 0) continue;
    const auto t = static_cast<std::int32_t>(static_cast<std::int64_t>(i) / choices);
    if (const std::size_t rank = rank_of(rows[i]); std::exchange(last[rank], t) != t) ++begin[rank + 1];
  }
  std::partial_sum(begin.begin(), begin.end(), begin.begin());
  std::ranges::copy(begin, out.blocks);
  const std::int32_t all = begin.back();
  HB_CHECK(all <= std::ssize(out.tokens), "{} copies, room for {}", all, out.tokens.size());
  std::ranges::fill(out.tokens.subspan(static_cast<std::size_t>(all)), -1);
  std::fill_n(out.copies, T * most, -1);
  std::ranges::fill(last, -1);
  for (std::int64_t t = 0, found = 0; t < T; ++t, found = 0)
    for (std::int64_t i = t * choices; i < (t + 1) * choices; ++i) {
      const std::int32_t row = rows[static_cast<std::size_t>(i)];
      if (row < 0) continue;
      const std::size_t rank = rank_of(row);
      if (std::exchange(last[rank], static_cast<std::int32_t>(t)) != t) {
        out.copies[t * most + found++] = begin[rank];
        out.tokens[static_cast<std::size_t>(begin[rank]++)] = static_cast<std::int32_t>(t);
      }
      out.slots[row] = begin[rank] - 1 - out.blocks[rank];
    }
  return all;
}

std::int64_t copy_arrivals(std::span<const std::int32_t> blocks, std::int64_t ranks, std::int64_t place,
                           std::span<const std::int32_t> arrivals, const std::int32_t* slots, std::int32_t* sources,
                           std::span<std::int32_t> rows, std::int64_t most) {
  const std::int64_t segments = (std::ssize(arrivals) - 1) / ranks;  // of each rank
  std::int32_t begin = 0;
  std::ranges::fill(rows, -1);
  for (std::int64_t r = 0; r < ranks; ++r) {
    const auto first = static_cast<std::size_t>(r * segments), last = static_cast<std::size_t>((r + 1) * segments);
    for (std::int32_t row = arrivals[first]; row < arrivals[last]; ++row) {
      const std::int32_t copy = sources[row] = begin + slots[row];
      const auto of = rows.subspan(static_cast<std::size_t>(copy * most), static_cast<std::size_t>(most));
      const auto free = std::ranges::find(of, -1);
      HB_CHECK(free != of.end(), "copy {} has more rows than {}", copy, most);
      *free = row;
    }
    const auto of = static_cast<std::size_t>(r * (ranks + 1) + place);
    begin += blocks[of + 1] - blocks[of];
  }
  return begin;
}

void dispatch(KernelContext& ctx, ConstMatrix x, const std::int32_t* rows, Matrix y, std::int64_t T, std::int64_t c,
              std::int64_t h) {
  HB_CHECK(x.dtype == y.dtype, "dispatch: {} to {}", name_of(x.dtype), name_of(y.dtype));
  const auto bytes = static_cast<std::size_t>(h * size_of(x.dtype));
  parallel_for(ctx, T, rows_grain(c * h), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin * c; i < end * c; ++i)
      if (rows[i] >= 0) std::memcpy(from_row(y, rows[i]).data, from_row(x, i / c).data, bytes);
  });
  zero_rows(ctx, y, own_rows(rows, T * c), T * c, h);
}

void dispatch_backward(KernelContext& ctx, ConstMatrix dy, const std::int32_t* rows, Matrix dx, std::int64_t T,
                       std::int64_t c, std::int64_t h, Write write) {
  HB_CHECK(dy.dtype == dx.dtype, "dispatch_backward: {} to {}", name_of(dy.dtype), name_of(dx.dtype));
  with_float_type(dy.dtype, [&](auto tag) {
    using E = decltype(tag);
    parallel_for(ctx, T, rows_grain(c * h), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t) {
        E* out = row<E>(dx, t);
        for_vectors(h, [&](std::int64_t i, auto ld, auto st) HB_FORCE_INLINE {
          Vf sum = write == Write::accumulate ? ld(out + i) : Vf{};
          for (std::int64_t j = 0; j < c; ++j)
            if (rows[t * c + j] >= 0) sum += ld(row<E>(dy, rows[t * c + j]) + i);
          st(out + i, sum);
        });
      }
    });
  });
}

void combine(KernelContext& ctx, ConstMatrix y, const std::int32_t* rows, const float* weights, std::int64_t parts,
             ConstMatrix base, Matrix z, std::int64_t T, std::int64_t c, std::int64_t h) {
  HB_CHECK(y.dtype == z.dtype, "combine: {} to {}", name_of(y.dtype), name_of(z.dtype));
  HB_CHECK(base.data == nullptr || base.dtype == z.dtype, "combine: {} in {}", name_of(base.dtype), name_of(z.dtype));
  with_float_type(y.dtype, [&](auto tag) {
    using E = decltype(tag);
    parallel_for(ctx, T, rows_grain(c * h), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t) {
        E* out = row<E>(z, t);
        const E* in = base.data != nullptr ? row<E>(base, t) : nullptr;
        for_vectors(h, [&](std::int64_t i, auto ld, auto st) HB_FORCE_INLINE {
          Vf sum = in != nullptr ? ld(in + i) : Vf{};
          for (std::int64_t j = 0; j < c; ++j)
            if (rows[t * c + j] >= 0) sum += splat(weights[(t * c + j) / parts]) * ld(row<E>(y, rows[t * c + j]) + i);
          st(out + i, sum);
        });
      }
    });
  });
}

void combine_backward(KernelContext& ctx, ConstMatrix dz, ConstMatrix y, const std::int32_t* rows, const float* weights,
                      std::int64_t parts, Matrix dy, float* d_weights, std::int64_t T, std::int64_t c, std::int64_t h) {
  HB_CHECK(dz.dtype == y.dtype && y.dtype == dy.dtype, "combine_backward: mixed dtypes");
  with_float_type(y.dtype, [&](auto tag) {
    using E = decltype(tag);
    parallel_for(ctx, T, rows_grain(3 * c * h), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin * c; i < end * c; ++i) {
        if (i % parts == 0) d_weights[i / parts] = 0.0f;
        if (rows[i] < 0) continue;
        const E* d = row<E>(dz, i / c);
        const E* in = row<E>(y, rows[i]);
        E* out = row<E>(dy, rows[i]);
        const Vf weight = splat(weights[i / parts]);
        Vf sum{};
        for_vectors(h, [&](std::int64_t k, auto ld, auto st) HB_FORCE_INLINE {
          const Vf dk = ld(d + k);
          sum += dk * ld(in + k);
          st(out + k, weight * dk);
        });
        d_weights[i / parts] += sum_lanes(sum);
      }
    });
  });
  zero_rows(ctx, dy, own_rows(rows, T * c), T * c, h);
}

namespace {

ConstVector bias_of(const ExpertBias& bias, std::int64_t e) {
  const auto* data = static_cast<const std::byte*>(bias.values.data);
  return {data + e * bias.count * size_of(bias.values.dtype), bias.values.dtype};
}

/// Columns [first, …) of a matrix, whose rows stay as far apart.
template <class M>
M from_column(M x, std::int64_t first) {
  using Bytes = std::conditional_t<std::is_same_v<M, Matrix>, std::byte, const std::byte>;
  x.data = static_cast<Bytes*>(x.data) + first * size_of(x.dtype);
  return x;
}

}  // namespace

void grouped_linear(KernelContext& ctx, const Experts& experts, ConstMatrix x, ConstMatrix w, Matrix y,
                    const ExpertBias& bias) {
  const bool adds = bias.values.data != nullptr, to_all = adds && bias.count == experts.N;
  each_segment(experts, [&](std::int64_t e, std::int64_t begin, std::int64_t rows, bool) {
    linear_forward(ctx, from_row(x, begin), from_row(w, e * experts.N), to_all ? bias_of(bias, e) : ConstVector{},
                   from_row(y, begin), rows, experts.N, experts.K);
    if (adds && !to_all) add_bias(ctx, from_column(from_row(y, begin), bias.first), bias_of(bias, e), rows, bias.count);
  });
  zero_rows(ctx, y, experts.offsets.back(), experts.rows, experts.N);
}

void grouped_linear_dgrad(KernelContext& ctx, const Experts& experts, ConstMatrix dy, ConstMatrix w, Matrix dx,
                          Write write) {
  each_segment(experts, [&](std::int64_t e, std::int64_t begin, std::int64_t rows, bool) {
    linear_dgrad(ctx, from_row(dy, begin), from_row(w, e * experts.N), from_row(dx, begin), rows, experts.N, experts.K,
                 write);
  });
  if (write == Write::overwrite) zero_rows(ctx, dx, experts.offsets.back(), experts.rows, experts.K);
}

void grouped_linear_wgrad(KernelContext& ctx, const Experts& experts, ConstMatrix dy, ConstMatrix x, Matrix dw,
                          Write write, const ExpertBias& bias) {
  each_segment(experts, [&](std::int64_t e, std::int64_t begin, std::int64_t rows, bool first) {
    linear_wgrad(ctx, from_row(dy, begin), from_row(x, begin), from_row(dw, e * experts.N), rows, experts.N, experts.K,
                 first ? write : Write::accumulate);
    if (bias.gradient != nullptr)
      bias_grad(ctx, from_column(from_row(dy, begin), bias.first), bias.gradient + e * bias.count, rows, bias.count,
                first ? write : Write::accumulate);
  });
}

}  // namespace hotbunk::kernels
