// A mixture of experts around its products (grouped.cuh): which experts a token takes, where its rows lie among those
// sorted by expert, and the rows there and back. T tokens, E experts, c of them for each token: T c choices, each with
// a row of its own. Deterministic: no order is left to atomics.
#include "routing.cuh"

namespace {

// --- routing: a warp per token --------------------------------------------------------------------------------------

// A lane's experts are lane, lane + 32, …, one bit each of those that are out: 1024 experts and 32 groups at most
// (op_launches.cc refuses more).

/// How the experts' scores become choices and weights (op catalogue: route).
struct Routing {
  int experts, choices, renormalise, sigmoid, groups, taken;
  float factor;
};

struct Best {
  double score;
  int index;  // -1: none
};
/// Of all lanes' the largest, the lower index among equals; the same in every lane, whatever NaNs there are.
HB_DEVICE Best best_of_warp(Best mine) {
#pragma unroll
  for (int m = 16; m > 0; m >>= 1) {
    const Best other = {__shfl_xor_sync(0xffffffffu, mine.score, m), __shfl_xor_sync(0xffffffffu, mine.index, m)};
    if (other.index >= 0 && (mine.index < 0 || other.score > mine.score ||
                             (other.score == mine.score && other.index < mine.index)))
      mine = other;
  }
  return {__shfl_sync(0xffffffffu, mine.score, 0), __shfl_sync(0xffffffffu, mine.index, 0)};
}

/// A token's scores of which experts are chosen, fp32 as transformers has them, and which of them are out.
template <class Bias>
struct Scores {
  const float* logits;
  Bias bias;
  const Routing& r;
  uint32_t barred = 0;  // bit i: expert lane + 32 i
  HB_DEVICE float score(int e) const {
    return (r.sigmoid ? float(sigmoid_of(logits[e])) : logits[e]) + bias(e);
  }
  HB_DEVICE void bar(int e, bool out) {
    if (e % 32 == int(threadIdx.x & 31)) barred = out ? barred | 1u << (e / 32) : barred & ~(1u << (e / 32));
  }
  /// The best of experts [begin, end) that is not out.
  HB_DEVICE Best best(int begin, int end) const {
    Best mine = {0.0, -1};
    for (int i = 0, e = threadIdx.x & 31; e < r.experts; ++i, e += 32) {
      if (e < begin || e >= end || (barred >> i & 1u)) continue;
      const float x = score(e);
      if (mine.index < 0 || x > mine.score) mine = {x, e};
    }
    return best_of_warp(mine);
  }
};

/// Bars the experts of all groups but the best ones: a group is as good as its best expert, with a bias as its two best.
/// Lane g holds group g.
template <class Bias>
HB_DEVICE void take_groups(Scores<Bias>& s, bool two) {
  const Routing& r = s.r;
  if (r.groups == 1) return;
  const int lane = threadIdx.x & 31, each = r.experts / r.groups;
  double mine = 0;
  for (int g = 0; g < r.groups; ++g) {
    const Best first = s.best(g * each, (g + 1) * each);
    double sum = first.score;
    if (two) {
      s.bar(first.index, true);
      sum += s.best(g * each, (g + 1) * each).score;
      s.bar(first.index, false);
    }
    if (lane == g) mine = sum;
  }
  bool taken = false;
  for (int j = 0; j < r.taken; ++j) {
    const Best best = best_of_warp({mine, lane < r.groups && !taken ? lane : -1});
    if (lane == best.index) taken = true;
  }
  const unsigned in = __ballot_sync(0xffffffffu, taken);
  for (int i = 0, e = lane; e < r.experts; ++i, e += 32)
    if (!(in >> (e / each) & 1u)) s.barred |= 1u << i;
}

/// What the weights of a token are formed from: e^(logit - largest) or sigmoids, and the sum over those it is over.
struct Shares {
  double largest, sum;
  const Routing& r;
  HB_DEVICE Shares(const Routing& routing, const float* logits, const int32_t* chosen)
      : largest(routing.sigmoid ? 0.0 : logits[chosen[0]]), sum(1.0), r(routing) {
    if (r.renormalise) {
      sum = r.sigmoid ? 1e-20 : 0.0;  // transformers'
      for (int j = 0; j < r.choices; ++j) sum += part(logits[chosen[j]]);
    } else if (!r.sigmoid) {
      double mine = 0;
      for (int e = threadIdx.x & 31; e < r.experts; e += 32) mine += part(logits[e]);
      sum = warp_sum(mine);
    }
  }
  HB_DEVICE double part(double logit) const { return r.sigmoid ? sigmoid_of(logit) : exp(logit - largest); }
  HB_DEVICE double of(double logit) const { return part(logit) / sum; }
};

template <class Bias>
HB_DEVICE void route(const float* logits, Bias bias, float* weights, int32_t* chosen, int T, const Routing& r,
                     bool biased) {
  const int64_t t = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  if (t >= T) return;
  Scores<Bias> s{logits + t * r.experts, bias, r};
  take_groups(s, biased);
  for (int j = 0; j < r.choices; ++j) {
    const Best best = s.best(0, r.experts);
    s.bar(best.index, true);
    if ((threadIdx.x & 31) == 0) chosen[t * r.choices + j] = best.index;
  }
  __syncwarp();
  const Shares shares(r, s.logits, chosen + t * r.choices);
  for (int j = threadIdx.x & 31; j < r.choices; j += 32)
    weights[t * r.choices + j] = float(r.factor * shares.of(s.logits[chosen[t * r.choices + j]]));
}

/// Softmax: dlogit_e = p_e (d_e - sum p d) over those that it is over, d being 0 where an expert was not chosen. Sigmoid:
/// of the chosen ones, with another factor 1 - s_e.
template <class E>
HB_DEVICE void route_backward(const float* d_weights, const float* logits, const int32_t* chosen, E* d_logits, int T,
                              const Routing& r) {
  const int64_t t = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  if (t >= T) return;
  const float *x = logits + t * r.experts, *d = d_weights + t * r.choices;
  const int32_t* mine = chosen + t * r.choices;
  const Shares shares(r, x, mine);
  double mean = 0;
  if (!r.sigmoid || r.renormalise)
    for (int j = 0; j < r.choices; ++j) mean += shares.of(x[mine[j]]) * d[j];
  for (int e = threadIdx.x & 31; e < r.experts; e += 32) {
    double out = !r.sigmoid && !r.renormalise ? -shares.of(x[e]) * mean : 0.0;
    for (int j = 0; j < r.choices; ++j)
      if (mine[j] == e) out = (r.sigmoid ? 1.0 - sigmoid_of(x[e]) : 1.0) * shares.of(x[e]) * (d[j] - mean);
    store(d_logits + t * r.experts + e, float(out * r.factor));
  }
}

struct NoBias {
  HB_DEVICE float operator()(int) const { return 0.0f; }
};
template <class E>
struct BiasOf {
  const E* values;
  HB_DEVICE float operator()(int e) const { return load(values + e); }
};

// --- where rows lie -------------------------------------------------------------------------------------------------

/// Of `group` experts in each group of all those, a rank has `each` from `first` on: the global number of its p-th.
/// Where each expert is in `parts`, these are numbered: those of a rank's experts next to each other, part by part.
struct OwnExperts {
  int count, each, group, first, parts;
  HB_DEVICE int number(int p) const { return p / each * group + p % each + first; }
  HB_DEVICE int expert(int p) const { return number(p) / (each * parts) * each + number(p) % each; }
  HB_DEVICE int part(int p) const { return number(p) / each % parts; }
  /// How many rows a choice of expert e has with those before the p-th.
  HB_DEVICE int rows_before(int p, int e) const {
    if (parts == 1 && count == each) return e >= first && e < first + p ? 1 : 0;  // they follow one another
    int rows = 0;
    for (int q = 0; q < parts; ++q) {
      const int at = (e / each * parts + q) * each + e % each;
      rows += at >= first && (at - first) % group < each && at < number(p) ? 1 : 0;
    }
    return rows;
  }
};

/// The number of true ones before this thread, and in the block; all call it, `part` is free again when all returned.
HB_DEVICE int count_before(bool here, int* part, int& all) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const unsigned votes = __ballot_sync(0xffffffffu, here);
  if (lane == 0) part[warp] = __popc(votes);
  __syncthreads();
  int before = __popc(votes & ((1u << lane) - 1u));
  all = 0;
  for (int w = 0; w < int(blockDim.x >> 5); ++w) {
    if (w < warp) before += part[w];
    all += part[w];
  }
  __syncthreads();
  return before;
}

}  // namespace

#define HB_ROUTE_ARGUMENTS int T, int experts, int choices, int renormalise, int sigmoid, int groups, int taken, float factor
#define HB_ROUTING Routing{experts, choices, renormalise, sigmoid, groups, taken, factor}

/// Grid: T warps. bias: null or [E].
#define HB_ROUTE(E, name)                                                                                            \
  extern "C" __global__ void route_##name(const float* logits, const E* bias, float* weights, int32_t* chosen,       \
                                          HB_ROUTE_ARGUMENTS) {                                                      \
    const Routing r = HB_ROUTING;                                                                                    \
    if (bias != nullptr) route(logits, BiasOf<E>{bias}, weights, chosen, T, r, true);                                \
    else route(logits, NoBias{}, weights, chosen, T, r, false);                                                      \
  }                                                                                                                  \
  extern "C" __global__ void route_backward_##name(const float* d_weights, const float* logits,                      \
                                                   const int32_t* chosen, E* d_logits, HB_ROUTE_ARGUMENTS) {         \
    const Routing r = HB_ROUTING;                                                                                    \
    route_backward(d_weights, logits, chosen, d_logits, T, r);                                                       \
  }
HB_ROUTE(float, f32)
HB_ROUTE(bf16, bf16)

/// rows[i parts + part] of own expert p's choices, in order, from offsets[p] on, behind all rows of those before it; rows
/// of others' choices are -1 already. A block per own expert, or part of one.
extern "C" __global__ void expert_rows(const int32_t* chosen, int32_t* rows, int32_t* offsets, int n, int each,
                                       int group, int first, int parts) {
  __shared__ int part[32];
  const OwnExperts own{int(gridDim.x), each, group, first, parts};
  const int p = blockIdx.x, e = own.expert(p), of_choice = own.part(p);
  int before = 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) before += own.rows_before(p, chosen[i]);
  int next = block_sum(before, part);
  if (threadIdx.x == 0) offsets[p] = next;
  for (int i0 = 0; i0 < n; i0 += blockDim.x) {
    const int i = i0 + threadIdx.x;
    const bool here = i < n && chosen[i] == e;
    int all;
    const int at = count_before(here, part, all);
    if (here) rows[i * parts + of_choice] = next + at;
    next += all;
  }
  if (threadIdx.x == 0 && p + 1 == gridDim.x) offsets[p + 1] = next;
}

/// Of what `ranks` ranks send, offsets[ranks, E + 1], where those rows begin here that come to the rank at this place, by
/// rank and there by expert; and how many come. A warp.
extern "C" __global__ void expert_arrivals(const int32_t* offsets, int32_t* arrivals, int64_t* count, int E, int ranks,
                                           int place) {
  const int lane = threadIdx.x & 31, own = E / ranks;
  int begin = 0;
  for (int i0 = 0; i0 < E; i0 += 32) {
    const int i = i0 + lane, e = i % own;
    const int32_t* of = offsets + size_t(i / own) * (E + 1) + place * own + e;
    const int rows = i < E ? of[1] - of[0] : 0;
    int upto = rows;
#pragma unroll
    for (int m = 1; m < 32; m <<= 1) {
      const int further = __shfl_up_sync(0xffffffffu, upto, m);
      if (lane >= m) upto += further;
    }
    if (i < E) arrivals[i] = begin + upto - rows;
    begin += __shfl_sync(0xffffffffu, upto, 31);
  }
  if (lane == 0) arrivals[E] = begin, count[0] = begin;
}

namespace {

/// Where rows of W ranks begin among those that are sent, sorted by rank; `each` experts a rank.
struct SentRows {
  const int32_t* offsets;
  int each;
  HB_DEVICE int begin(int rank) const { return offsets[rank * each]; }
  HB_DEVICE bool has(int rank, int row) const { return row >= begin(rank) && row < begin(rank + 1); }
  /// The rank that a row goes to, of W.
  HB_DEVICE int rank_of(int row, int W) const {
    int low = 0, high = W;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (begin(middle) <= row) low = middle;
      else high = middle;
    }
    return low;
  }
  /// The rank that choice j of these goes to, if none before it does; else -1.
  HB_DEVICE int first_to(const int32_t* rows, int j, int W) const {
    if (rows[j] < 0) return -1;
    const int rank = rank_of(rows[j], W);
    for (int i = 0; i < j; ++i)
      if (has(rank, rows[i])) return -1;
    return rank;
  }
};

}  // namespace

/// Of the tokens that go to rank r, in order: where they begin (blocks), behind all that go to ranks before it, which they
/// are (tokens[S], then -1), and which copies their rows are of (slots[row], of those for r). copies[T, most]: of each
/// token its copies in the order of its choices, then -1. count: of all. A block per rank.
extern "C" __global__ void copy_sort(const int32_t* rows, const int32_t* sent, int32_t* tokens, int32_t* copies,
                                     int32_t* slots, int32_t* blocks, int64_t* count, int T, int c, int each, int S,
                                     int most) {
  __shared__ int part[32];
  const int rank = blockIdx.x, W = gridDim.x;
  const SentRows to{sent, each};
  int before = 0;
  for (int t = threadIdx.x; t < T; t += blockDim.x) {
    int found = 0;
    for (int j = 0; j < c; ++j) {
      const int r = to.first_to(rows + size_t(t) * c, j, W);
      before += r >= 0 && r < rank ? 1 : 0;
      found += r >= 0 ? 1 : 0;
    }
    if (rank > 0) continue;
    for (; found < most; ++found) copies[size_t(t) * most + found] = -1;
  }
  int next = block_sum(before, part);
  const int begin = next;
  if (threadIdx.x == 0) blocks[rank] = begin;
  for (int t0 = 0; t0 < T; t0 += blockDim.x) {
    const int t = t0 + threadIdx.x;
    const int32_t* mine = rows + size_t(t) * c;
    int j = 0, found = 0;  // its first row for this rank, and how many copies it has before
    for (; t < T && j < c && !to.has(rank, mine[j]); ++j) found += to.first_to(mine, j, W) >= 0 ? 1 : 0;
    const bool goes = t < T && j < c;
    int all;
    const int copy = next + count_before(goes, part, all);
    next += all;
    if (!goes) continue;
    tokens[copy] = t, copies[size_t(t) * most + found] = copy;
    for (; j < c; ++j)
      if (to.has(rank, mine[j])) slots[mine[j]] = copy - begin;
  }
  if (rank + 1 < W) return;
  if (threadIdx.x == 0) blocks[W] = next, count[0] = next;
  for (int i = next + threadIdx.x; i < S; i += blockDim.x) tokens[i] = -1;
}

namespace {

/// Where the copies that come from each rank begin, and how many they are, for the rank at `place` of W.
struct ArrivingCopies {
  const int32_t* blocks;
  int W, place;
  HB_DEVICE int of(int rank) const {
    const int32_t* sent = blocks + size_t(rank) * (W + 1) + place;
    return sent[1] - sent[0];
  }
};

}  // namespace

/// sources[row]: the copy that each row is of that comes from a rank (block y < W). count: of all copies.
/// rows[U, most] (block y = W): of each copy its rows in order, then -1. In a segment slots grow, so each has one row of
/// it at most.
extern "C" __global__ void copy_arrivals(const int32_t* blocks, const int32_t* slots, const int32_t* arrivals,
                                         int32_t* sources, int32_t* rows, int64_t* count, int U, int W, int place,
                                         int segments, int most) {
  const ArrivingCopies copies{blocks, W, place};
  const int thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
  if (int(blockIdx.y) < W) {
    const int rank = blockIdx.y;
    int begin = 0;
    for (int r = 0; r < rank; ++r) begin += copies.of(r);
    if (rank + 1 == W && thread == 0) count[0] = begin + copies.of(rank);
    const int end = arrivals[(rank + 1) * segments];
    for (int row = arrivals[rank * segments] + thread; row < end; row += threads) sources[row] = begin + slots[row];
    return;
  }
  for (int copy = thread; copy < U; copy += threads) {
    int rank = 0, slot = copy;
    while (rank < W && slot >= copies.of(rank)) slot -= copies.of(rank++);
    int found = 0;
    for (int s = rank * segments; rank < W && s < (rank + 1) * segments; ++s) {
      int low = arrivals[s], high = arrivals[s + 1];
      while (low < high) {
        const int middle = (low + high) / 2;
        if (slots[middle] < slot) low = middle + 1;
        else high = middle;
      }
      if (low < arrivals[s + 1] && slots[low] == slot) rows[size_t(copy) * most + found++] = low;
    }
    for (; found < most; ++found) rows[size_t(copy) * most + found] = -1;
  }
}

/// own[0] = choices that have a row: all that are not -1. One block.
extern "C" __global__ void own_rows(const int32_t* rows, int32_t* own, int n) {
  __shared__ int part[32];
  int mine = 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) mine += rows[i] >= 0 ? 1 : 0;
  mine = block_sum(mine, part);
  if (threadIdx.x == 0) own[0] = mine;
}

namespace {

// --- rows there and back --------------------------------------------------------------------------------------------

/// y[rows[i]] = x[i / c]; zeros behind the own rows. A block per choice, and per row of y.
template <class E>
HB_DEVICE void dispatch(const E* x, const int32_t* rows, const int32_t* own, E* y, int c, int H) {
  const int i = blockIdx.x, row = rows[i];
  const bool tail = i >= own[0];
  const E* from = x + size_t(i / c) * H;
  for (int j = threadIdx.x; j < H; j += blockDim.x) {
    if (row >= 0) y[size_t(row) * H + j] = from[j];
    if (tail) store(y + size_t(i) * H + j, 0.0f);
  }
}

/// dx[t] (+)= sum over j, in order, of dy[rows[t, j]]. A block per token.
template <class E>
HB_DEVICE void dispatch_backward(const E* dy, const int32_t* rows, E* dx, int c, int H, int accumulate) {
  const size_t t = blockIdx.x;
  for (int h = threadIdx.x; h < H; h += blockDim.x) {
    float sum = accumulate ? load(dx + t * H + h) : 0.0f;
    for (int j = 0; j < c; ++j)
      if (const int row = rows[t * c + j]; row >= 0) sum += load(dy + size_t(row) * H + h);
    store(dx + t * H + h, sum);
  }
}

/// z[t] = base[t] + sum over j, in order, of weights[t, j / parts] y[rows[t, j]]. A block per token.
template <class E>
HB_DEVICE void combine(const E* y, const int32_t* rows, const float* weights, const E* base, E* z, int c, int parts,
                       int H) {
  const size_t t = blockIdx.x;
  for (int h = threadIdx.x; h < H; h += blockDim.x) {
    float sum = base != nullptr ? load(base + t * H + h) : 0.0f;
    for (int j = 0; j < c; ++j)
      if (const int row = rows[t * c + j]; row >= 0) sum += weights[(t * c + j) / parts] * load(y + size_t(row) * H + h);
    store(z + t * H + h, sum);
  }
}

/// dy[rows[i]] = weights[w] dz[t], d_weights[w] = the sum of dz[t] y[rows[i]], of the `parts` rows i of choice w; zeros
/// behind the own rows. A block per choice, of which a token has c.
template <class E>
HB_DEVICE void combine_backward(const E* dz, const E* y, const int32_t* rows, const float* weights, const int32_t* own,
                                E* dy, float* d_weights, int c, int parts, int H) {
  __shared__ float part[32];
  const int w = blockIdx.x;
  const E* d = dz + size_t(w / c) * H;
  const float weight = weights[w];
  float sum = 0;
  for (int i = w * parts; i < (w + 1) * parts; ++i) {
    const int row = rows[i];
    const bool tail = i >= own[0];
    for (int h = threadIdx.x; h < H; h += blockDim.x) {
      if (row >= 0) {
        const float x = load(d + h);
        sum += x * load(y + size_t(row) * H + h);
        store(dy + size_t(row) * H + h, weight * x);
      }
      if (tail) store(dy + size_t(i) * H + h, 0.0f);
    }
  }
  sum = block_sum(sum, part);
  if (threadIdx.x == 0) d_weights[w] = sum;
}

}  // namespace

#define HB_EXPERTS(E, name)                                                                                           \
  extern "C" __global__ void dispatch_##name(const E* x, const int32_t* rows, const int32_t* own, E* y, int c,        \
                                             int H) {                                                                 \
    dispatch(x, rows, own, y, c, H);                                                                                  \
  }                                                                                                                   \
  extern "C" __global__ void dispatch_backward_##name(const E* dy, const int32_t* rows, E* dx, int c, int H,          \
                                                      int accumulate) {                                               \
    dispatch_backward(dy, rows, dx, c, H, accumulate);                                                                \
  }                                                                                                                   \
  extern "C" __global__ void combine_##name(const E* y, const int32_t* rows, const float* weights, const E* base,     \
                                            E* z, int c, int parts, int H) {                                          \
    combine(y, rows, weights, base, z, c, parts, H);                                                                  \
  }                                                                                                                   \
  extern "C" __global__ void combine_backward_##name(const E* dz, const E* y, const int32_t* rows,                    \
                                                     const float* weights, const int32_t* own, E* dy,                 \
                                                     float* d_weights, int c, int parts, int H) {                     \
    combine_backward(dz, y, rows, weights, own, dy, d_weights, c, parts, H);                                          \
  }
HB_EXPERTS(float, f32)
HB_EXPERTS(bf16, bf16)
