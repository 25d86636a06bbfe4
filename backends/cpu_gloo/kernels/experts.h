// A mixture of experts: who goes where, there and back, and the experts' products. T tokens, E experts, c of them for
// each token, so T·c rows (choices), which lie sorted by expert: what each expert computes is one block of rows.
//
// Deterministic, and row-invariant where training and rollout must agree to the bit: a token's routing, its rows'
// products (gemm.h) and their sum depend on nothing but that token.
#pragma once
#include <span>
#include <type_traits>

#include "backends/cpu_gloo/kernels/context.h"
#include "base/check.h"

namespace hotbunk::kernels {

/// Which of E experts a token takes, and with which weight. Its weights are the chosen ones' scores, divided by their
/// sum if they are renormalised, times `factor`.
struct Routing {
  std::int64_t tokens = 0, experts = 0, choices = 0;
  bool renormalise = false;
  bool sigmoid = false;  // scores: sigmoid of logits, or their softmax over all experts
  /// The experts lie in so many equal groups; those chosen are in the best `taken` of them. A group is as good as its
  /// best expert, with a bias as its two best ones together.
  std::int64_t groups = 1, taken = 1;
  float factor = 1.0f;
  ConstVector bias = {};  // [E], added to scores where experts are chosen, and only there
};
/// logits[T,E] -> weights[T,c], chosen[T,c], the largest first; of equal ones the lower number. NaNs are never larger.
/// Without sigmoid and bias the order is that of logits.
/// Source: transformers, DeepseekV2TopkRouter (softmax, best expert) and DeepseekV3TopkRouter (sigmoid, two best ones).
void route(KernelContext&, const Routing&, const float* logits, float* weights, std::int32_t* chosen);
/// ∂/∂logits [T,E], in fp32 or bf16.
void route_backward(KernelContext&, const Routing&, const float* d_weights, const float* logits,
                    const std::int32_t* chosen, Matrix d_logits);

/// counts[S,E]: of each sequence, how many choices of its tokens are of each expert. chosen[T,c]; sequences[T], -1: of
/// none. One thread, as the sort is.
void expert_counts(std::span<const std::int32_t> chosen, std::span<const std::int32_t> sequences, std::int64_t choices,
                   std::int64_t experts, std::span<float> counts);

/// What a router adds to the loss beside its weights: for each sequence, whose weights[t] is its part of the loss over
/// the square of its length L,
///   balance · E · Σ_e counts[s,e] · Σ_t p[t,e] + z · L · Σ_t lse(logits[t])²
/// p: an expert's share of a token's scores. With f = counts / L the first is E · Σ_e f_e · mean p_e.
/// Source: transformers, load_balancing_loss_func; of sigmoids DeepSeek-V3's report, section 2.1.2; the second
/// ST-MoE's z-loss.
struct RouterLoss {
  std::int64_t tokens = 0, experts = 0, choices = 0;
  double balance = 0.0, z = 0.0;
  bool sigmoid = false;
  std::int64_t sharers = 1;  // ranks that find the same: each adds that part of the gradient
};
/// Adds the gradient to d_logits [T,E], fp32 or bf16, of logits[T,E], and returns the loss: a sum in the order of
/// tokens.
double router_loss(KernelContext&, const RouterLoss&, const float* logits, const float* counts,
                   const std::int32_t* sequences, const float* weights, Matrix d_logits);

/// Of `all` experts, in so many equal groups, those of this rank, `count`: in each group as many, from the `first` on.
/// Where each is in `parts`, these count as experts: expert e of n on a rank is (e / n · parts + part) · n + e % n.
struct OwnExperts {
  std::int64_t first = 0, count = 0, all = 0, groups = 1, parts = 1;
};
/// rows[i · parts + part] of choice i (of T·c, tokens in order): its place when those of own experts are sorted by
/// expert, of one expert in order; -1 for a choice of another. offsets[e]: where the e-th own expert's begin;
/// offsets[count]: how many there are. One thread: a pass over T·c integers. Whoever writes rows below writes zeros
/// behind them, up to T·c.
void expert_sort(std::span<const std::int32_t> chosen, const OwnExperts&, std::int32_t* rows, std::int32_t* offsets);

/// offsets[W,E+1] of all ranks, as expert_sort says them -> arrivals[E+1]: where the rows begin that come to rank
/// `place`, which has experts place·E/W on: those of rank 0 by expert, then those of rank 1, …; returns how many.
std::int32_t expert_arrivals(std::span<const std::int32_t> offsets, std::int64_t ranks, std::int64_t place,
                             std::int32_t* arrivals);

/// What copy_sort finds, where a token goes once to each rank that has some of its experts.
struct Copies {
  std::span<std::int32_t> tokens;  // of each copy: those for rank 0 in order, then those for rank 1, …; behind them -1
  std::int32_t* copies = nullptr;  // [T, min(ranks, choices)]: of each token, in the order of its choices; then -1
  std::int32_t* slots = nullptr;   // of each row of choices, as it is sorted: its copy among those for its rank
  std::int32_t* blocks = nullptr;  // [ranks + 1]: where each rank's copies begin
};
/// rows[T,choices], and where each segment of them begins, as an expert_sort leaves both; `ranks` have equally many
/// segments one behind the other; row -1: no choice of theirs. Returns how many copies there are. One thread, as the
/// sort is.
std::int64_t copy_sort(std::span<const std::int32_t> rows, std::int64_t choices, std::span<const std::int32_t> sent,
                       std::int64_t ranks, const Copies&);
/// blocks[W,W+1] of all ranks; slots of rows as they come to rank `place`, by rank and there by expert, of which
/// `arrivals` says where each segment begins -> sources: of each row its copy, among all that come, rank by rank;
/// rows[.,most]: of each copy its rows, then -1. Returns how many copies come.
std::int64_t copy_arrivals(std::span<const std::int32_t> blocks, std::int64_t ranks, std::int64_t place,
                           std::span<const std::int32_t> arrivals, const std::int32_t* slots, std::int32_t* sources,
                           std::span<std::int32_t> rows, std::int64_t most);

/// y[rows[t·c + j]] = x[t]; x: [T,h].
void dispatch(KernelContext&, ConstMatrix x, const std::int32_t* rows, Matrix y, std::int64_t T, std::int64_t c,
              std::int64_t h);
/// dx[t] (+)= Σ_j dy[rows[t·c + j]], summed in fp32; of choices that have a row, here and below.
void dispatch_backward(KernelContext&, ConstMatrix dy, const std::int32_t* rows, Matrix dx, std::int64_t T,
                       std::int64_t c, std::int64_t h, Write);

/// z[t] = base[t] + Σ_j weights[(t·c + j) / parts] · y[rows[t·c + j]], in the order of j, summed in fp32. No data: no
/// base.
void combine(KernelContext&, ConstMatrix y, const std::int32_t* rows, const float* weights, std::int64_t parts,
             ConstMatrix base, Matrix z, std::int64_t T, std::int64_t c, std::int64_t h);
/// dy[rows[i]] = weights[i / parts] · dz[t], d_weights[i / parts] = Σ dz[t] · y[rows[i]], of the rows i = t·c + j.
void combine_backward(KernelContext&, ConstMatrix dz, ConstMatrix y, const std::int32_t* rows, const float* weights,
                      std::int64_t parts, Matrix dy, float* d_weights, std::int64_t T, std::int64_t c, std::int64_t h);

/// Expert e multiplies rows [offsets[s], offsets[s+1]) by its matrix [N,K], e·N rows into w (gemm.h's products), of
/// each segment s = e, e + E, e + 2 E, …: one for each rank that rows came from.
struct Experts {
  std::span<const std::int32_t> offsets;  // of all segments, and the end of the last
  std::int64_t experts = 0;               // E
  std::int64_t N = 0, K = 0;
  std::int64_t rows = 0;  // that there is room for: of y or dx, zeros behind the last expert's
};
/// product(e, first row, rows, whether they are its first) of each segment.
template <class Product>
void each_segment(const Experts& experts, Product&& product) {
  for (std::size_t s = 0; s + 1 < experts.offsets.size(); ++s) {
    const std::int64_t begin = experts.offsets[s], rows = experts.offsets[s + 1] - begin;
    HB_CHECK(begin >= 0 && rows >= 0, "segment {} has {} rows from row {}", s, rows, begin);
    const auto segment = static_cast<std::int64_t>(s);
    product(segment % experts.experts, begin, rows, segment < experts.experts);
  }
}
/// Rows [begin, begin + …) of a matrix.
template <class M>
M from_row(M m, std::int64_t begin) {
  const std::int64_t bytes = begin * m.ld * size_of(m.dtype);
  if constexpr (std::is_same_v<M, Matrix>) m.data = static_cast<char*>(m.data) + bytes;
  else m.data = static_cast<const char*>(m.data) + bytes;
  return m;
}
/// Zeros in the first `cols` columns of rows [begin, end).
void zero_rows(KernelContext&, Matrix, std::int64_t begin, std::int64_t end, std::int64_t cols);

/// Of each expert a bias of `count` numbers, added to the columns from `first` on, or its gradient. No data: none.
struct ExpertBias {
  ConstVector values = {};    // [E·count]
  float* gradient = nullptr;  // likewise
  std::int64_t first = 0, count = 0;
};
void grouped_linear(KernelContext&, const Experts&, ConstMatrix x, ConstMatrix w, Matrix y, const ExpertBias& = {});
void grouped_linear_dgrad(KernelContext&, const Experts&, ConstMatrix dy, ConstMatrix w, Matrix dx,
                          Write = Write::overwrite);
/// An expert without rows has a gradient of zeros.
void grouped_linear_wgrad(KernelContext&, const Experts&, ConstMatrix dy, ConstMatrix x, Matrix dw, Write,
                          const ExpertBias& = {});

}  // namespace hotbunk::kernels
