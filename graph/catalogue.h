// The op catalogue: for each kind, once, what its tensors are, its FLOPs and its bytes. Backends register kernels
// against it; the cost model, the simulator and the reports read it.
//
// Shape legend: T packed tokens, S sequences or slots, H hidden, a query heads, k KV heads, d head dim, Q = (a + 2k) d,
// I MLP intermediate, E experts, c experts of a token, V vocabulary rows held here, W ranks of the group, n elements.
//
// clang-format off
//   kind               inputs -> outputs                                                   attributes
//   feed               -> x                                                                slot
//   fetch              x ->                                                                slot
//   copy               x -> y                    same bytes; device or host on either side
//   copy_boxes         x... -> y...              moves; casts between dtypes
//   hash_boxes         x... -> sum[1]            moves; int64 += element_hash of each element cast  as_dtype
//   zero               -> x
//   cast               x -> y
//   all_gather         x[n] -> y[W n]            part r of y is rank r's x                 padding_bytes
//   reduce_scatter     x[W n] -> y[n]            sum in rank order, fp32                   padding_bytes
//   all_reduce         x -> x                    in place, sum in rank order               reduce_max, padding_bytes
//   broadcast          x -> x                                                              src_rank (index in group)
//   all_to_all         x[W n] -> y[W n]          part r of y is rank r's part for this one  padding_bytes
//                      x[T,c,H], offsets[W,E+1] -> y[R,H]   rows of actual sizes (is_routed): of rank r's rows, sorted
//                                                by expert, those of experts w E/W … go to rank w, where they lie behind
//                                                those of ranks before r; from y[R,H] to x[T,c,H] the way back
//   send               x[n] ->                   to the rank at place `peer` of the group   peer, relative, padding_bytes
//   recv               -> y[n]                   from the rank at place `peer`              peer, relative
//   send_recv          x[n] -> y[m]              x to `peer` and y from `source` at the same time   peer, source, relative, padding_bytes
//   barrier            (x) -> (x)               no bytes; x names what it orders
//                                                gives: between roles, a hand-over. Who gives (1) goes on at once; who takes (0)
//                                                waits until all of the group's other roles have given as often as it takes
//   peer_copy          x[remote] -> y            moves; a peer's tensor of the same buffer name
//   embedding          table[V,H], ids[T] -> y[T,H]   ids outside [vocab_begin, vocab_end) give zero rows   vocab_stride: see vocab_rows
//                                                factor: y is a row times that, in y's dtype
//   embedding_backward ids[T], dy[T,H] -> dtable[V,H]  scatter-add                          accumulate, vocab_begin/end, factor
//   linear             x[T,K], w[N,K], (b[N]) -> y[T,N]                                    prepacked: w is as prepack left it
//   linear_dgrad       dy[T,N], w[N,K] -> dx[T,K]                                          accumulate
//   linear_wgrad       dy[T,N], x[T,K] -> dw[N,K], (db[N])                                 accumulate
//   rms_norm           x[T,H], w[H], (r[T,H]) -> y[T,H], rstd[T], (sum[T,H] = x + r)       eps; offset: by w + that
//   rms_norm_backward  dy[T,H], x[T,H], w[H], rstd[T] -> dx[T,H], (dw[H])                 residual: dx +=; accumulate: dw +=; offset
//   qk_norm            x[T,Q], qw[d], kw[d] -> y[T,Q], rstd[T,a+k]    v is copied         eps, heads, kv_heads, head_dim; offset: as rms_norm
//   qk_norm_backward   dy[T,Q], x[T,Q], qw, kw, rstd -> dx[T,Q] (may be dy), (dqw[d], dkw[d])  accumulate, heads, …
//   rope               x[T,Q], positions[T] -> x                                          heads, kv_heads, head_dim, rope_* (runtime/rope_frequencies.h)
//                                                rope_first: only the first so many numbers of a head
//                                                rope_dim: only the last so many numbers of a head, neighbours as pairs
//   rope_backward      dx[T,Q], positions[T] -> dx
//   attention          x[T,Q], cu_seqlens[S+1] -> o[T,ad], lse[T,a]                       heads, kv_heads, head_dim
//                                                value_dim: of a head's values, v in the place of d in Q = (a + k) d + k v and in o
//                                                window: a query sees that many tokens, itself the last; scale: of
//                                                scores, in the place of 1/sqrt(d); softcap: c tanh(score / c)
//   attention_backward do[T,ad], x[T,Q], o, lse, cu_seqlens -> dx[T,Q]
//   kv_write           x[T,Q], kv_slots[T] -> pool[blocks, 2 k, block_tokens d]           block_tokens, heads, …
//                                                ranks: of op.group hold a sequence in parts, as do latent_write and what attends;
//                                                token p lies at the place p mod ranks, and slots and tables are of blocks of
//                                                ranks block_tokens
//   paged_attention    x[T,Q], pool, cu_seqlens[S+1], tables[S,max_blocks], lengths[S] -> o[T,ad], (lse[T,a])
//   swiglu             gate_up[T,2I] -> act[T,I]
//   swiglu_backward    dact[T,I], gate_up[T,2I] -> dgate_up[T,2I]
//   route              logits[T,E], (bias[E]) -> weights[T,c], experts[T,c]   the c largest, equal ones by number; softmax over all
//                                                of them, or over the chosen ones                renormalise
//                                                sigmoid: of logits in the place of their softmax; renormalise divides by the chosen ones' sum
//                                                groups, taken_groups: only of the best of so many equal groups, by their best expert, with a
//                                                bias by their two best ones. bias: of scores, for the choice alone. factor: of weights
//   route_backward     dweights[T,c], logits[T,E], experts[T,c] -> dlogits[T,E]                  renormalise
//   expert_sort        experts[T,c] -> rows[T,c n], offsets[E n+1]   the row of each choice by expert, then token, then choice;
//                                                where each expert's rows begin   tp: ranks of the group share the
//                                                experts, E each, by place; choices of others have row -1. groups: they
//                                                share each of so many equal groups. ranks: so many neighbours have the same
//                                                Where n > 1, each expert is in n parts and a choice has a row for each: parts
//                                                count as E n experts, those of one rank's next to each other, part by part
//   dispatch           x[T,H], rows[T,c] -> y[T,c,H]     row rows[t,j] of T c is x[t]; behind a rank's own rows zeros, here
//                                                and in what follows
//   dispatch_backward  dy[T,c,H] or [R,H], rows[T,c] -> dx[T,H]   sums over j                   accumulate
//   grouped_linear     x[T,c,K], w[E N,K], offsets[E+1], (b[E n]) -> y[T,c,N]   rows offsets[e] … offsets[e+1] - 1 by rows e N … of w   tp: as expert_sort
//                                                b: added to n columns, all, or those at the rank's place in op.group,
//                                                whose first N / n share N, as the next ones do
//                                                of x[R,K] with several offsets for each expert, one for each rank that
//                                                rows came from (expert_arrivals): offsets[W E + 1]; here and in what follows
//   grouped_linear_dgrad  dy[T,c,N], w[E N,K], offsets[E+1] -> dx[T,c,K]                        accumulate: dx +=
//   grouped_linear_wgrad  dy[T,c,N], x[T,c,K], offsets[E+1] -> dw[E N,K], (db[E n])             accumulate
//   combine            y[T,c,H], rows[T,c], weights[T,c / n], (base[T,H]) -> z[T,H]   base and the sum over j, in order, of weights[t,j / n] y[rows[t,j]]
//   combine_backward   dz[T,H], y[T,c,H], rows[T,c], weights[T,c / n] -> dy[T,c,H], dweights[T,c / n]
//   add                x, y -> z                 z may be x
//   gather_rows        x[T,H], rows[S] -> y[S,H]
//   log_prob           logits[T,V], targets[T] -> logp[T], lse[T], entropy[T]             vocab, temperature
//   log_prob_backward  logits[T,V], lse[T], targets[T], dlogp[T] -> dlogits[T,V]          vocab, temperature; of a part: as vocab_stats; softcap: what logits were capped at, dlogits are of what was
//   vocab_stats        logits[T,V], targets[T] -> stats[T,4]   of this rank's part of a vocabulary: largest logit, sum of exp
//                                                above it, that sum weighted, target's logit   vocab, vocab_begin/end/stride, temperature
//   vocab_log_prob     stats[W,T,4], targets[T] -> logp[T], lse[T], entropy[T]            temperature
//   token_loss         new[T], old[T], ref[T], advantage[T], weight[T], entropy[T] -> dlogp[T], metrics[16] +=  clip_low, clip_high, kl_coef, sft
//   sum_squares        x[n] -> s[1]                                                       accumulate
//   clip_coefficient   s[1] -> c[1], metrics[16]   c is NaN where s or the loss is        max_norm
//   adamw              g[n], lr[2], c[1] -> p[n], m[n], v[n]  in place; nothing if c is NaN  beta1, beta2, eps, weight_decay
//   sample             logits[tp, S, V], uniforms[S] -> ids[S], logp[S]                   vocab, tp, temperature, top_k, top_p
//   add_bias           x[T,N], b[N] -> x         to every row
//   geglu              gate_up[T,2I] -> act[T,I] gelu(gate) up, gelu by tanh
//   geglu_backward     dact[T,I], gate_up[T,2I] -> dgate_up[T,2I]
//   softcap            x[T,V] -> x               c tanh(x / c)                             softcap: c
//   layer_norm         x[T,H], w[H], b[H], (r[T,H]) -> y[T,H], rstd[T], (sum[T,H] = x + r)   eps; mean and deviation are of
//                                                the row that is normed
//   layer_norm_backward  dy[T,H], x[T,H], w[H], rstd[T] -> dx[T,H], (dw[H], db[H])        residual: dx +=; accumulate: dw, db +=
//   gelu               x[T,I] -> y[T,I]          by tanh
//   gelu_backward      dy[T,I], x[T,I] -> dx[T,I]
//   split_heads        x[T,Q] -> y[W,T,Q']       Q' = (a/W + 2 max(1, k/W)) d: part r has the r-th of a and k; where
//                                                k < W, W/k neighbours have the same KV head   heads, kv_heads (0: none), head_dim;
//                                                value_dim: of values, v in the place of one d
//   merge_heads        y[W,T,Q'] -> x[T,Q]       split_heads backwards; KV heads that several parts have are summed, fp32
//   take_kv            x[T,Q] -> kv[T,2kd]       the columns of keys, then those of values      heads, kv_heads, head_dim
//   merge_qkv          dq[T,ad], dkv[T,2kd], (dkv[T,2kd]) -> dx[T,Q]   take_kv backwards, of queries too; two of keys and values are summed   heads, …
//   context_attention  x[T,Q], kv[n,T,2kd], cu_seqlens[S+1] -> o[T,ad], lse[T,a]   a context-parallel rank's queries, and the keys and
//                                                values of all `ranks` of op.group (n = ranks) or of one of them, `source` further
//                                                around (n = 1). Of each sequence, cut into 2 ranks chunks, rank r has the r-th and the
//                                                r-th from the end; cu_seqlens counts what a rank has. accumulate: merged with what o and
//                                                lse are of other keys, by the log-sum-exps; else of no key: o 0, lse -inf
//                                                ranks, source, accumulate; heads, … as attention
//   context_attention_backward  do[T,ad], x[T,Q], kv[n,T,2kd], o, lse, cu_seqlens -> dq[T,ad], dkv[n,T,2kd]   o and lse: of all
//                                                keys                    accumulate: dq +=; ranks, source, …
//   expert_arrivals    offsets[W,E+1] -> arrivals[E+1], count[1]   of what each rank of the group sends, as an
//                                                expert_sort says it: where the rows begin that come to this one, by rank
//                                                and there by expert (E/W of them), and how many they are, int64
//   copy_sort          rows[T,c], sent[E+1] -> tokens[S], copies[T,min(c,W)], slots[T,c,1], blocks[W+1], count[1]   what goes
//                                                where a token goes once to each of W ranks that have E/W experts each, one behind
//                                                the other; rows and sent: of an expert_sort. tokens: of each copy, those for rank
//                                                0 in order, then those for rank 1; copies: of each token, in the order of its
//                                                choices; slots: of each row its copy among those for its rank; blocks: where each
//                                                rank's begin; count: of copies, int64. -1 behind what there is of tokens, copies
//   copy_arrivals      blocks[W,W+1], slots[R,1], arrivals[E+1] -> sources[R], rows[U,m], count[1]   of rows that come, their slots in
//                                                the order of an expert_arrivals' arrivals, their copies among those that come,
//                                                rank by rank; of each copy its rows in order (m ≤ c, then -1; -1 behind all copies);
//                                                and how many copies come, int64. In a segment slots grow
//   expert_counts      experts[T,c], sequences[T] -> counts[S,E]   of each sequence, how many of its tokens' choices are of each
//                                                expert; a token of no sequence has -1
//   router_loss        dlogits[T,E], logits[T,E], counts[S,E], sequences[T], weights[T] -> dlogits, metrics[16] +=   of a router,
//                                                with shares p[T,E] of the experts in a token's scores (softmax; sigmoid: over
//                                                their sum) and q = weights[t], that of its sequence in the loss over the square
//                                                of its length L = Σ counts / top_k:
//                                                Σ over t of q (factor E Σ over e of counts[s,e] p[t,e] + z_factor L lse(logits[t])²)
//                                                tp: so many ranks find the same, and each adds that part of the gradient
//   lora_down          x[T,K], a[r,K] -> u[T,r]  times factor
//   lora_up            u[T,r], b[n,r] -> y[T,N]  added to columns [column, column + n)          column
//   lora_up_dgrad      dy[T,N], b[n,r] -> du[T,r]   of those columns, times factor              column, factor
//   lora_up_wgrad      dy[T,N], u[T,r] -> db[n,r]                                              column, accumulate
//                      With offsets behind these (adapts_experts) all four are of rows of experts, as in
//                      grouped_linear, and of each expert's matrices, one below the other; ranks: rows came from so
//                      many
//   lora_merge         w[n,K], b[n,r], a[r,K] -> y[n,K]   w + factor b a in fp32, rounded once: the same bits whichever
//                                                rows an op has                              factor
//   latent_norm        x[T,r+t], w[r], positions[T] -> c[T,r], s[T,t], rstd[T]   c: rms_norm of the first r columns; s: the last t,
//                                                rotated as neighbours                   eps, rope_dim: t; rope_*
//   latent_norm_backward  dc[T,r], ds[T,t], x[T,r+t], w[r], rstd[T], positions[T] -> dx[T,r+t], (dw[r])   accumulate: dw +=; rope_dim, rope_*
//   latent_heads       q[T,ad], kv[T,a(d-t+v)], s[T,t] -> x[T,Q]   packs: of each head d - t numbers of kv and all of s are its key, the
//                                                other v its value; Q = a (2d + v)       heads, head_dim: d, value_dim: v, rope_dim: t
//   latent_heads_backward  dx[T,Q] -> dq[T,ad], dkv[T,a(d-t+v)], ds[T,t]   ds: summed over heads, fp32
//   latent_write       c[T,r], s[T,t], kv_slots[T] -> pool[blocks, block_tokens, r+t]     block_tokens
//   latent_attention   q[T,ad], pool, w[a(d-t+v),r], cu_seqlens[S+1], tables[S,max_blocks], lengths[S] -> o[T,av], (lse[T,a])   w makes keys and values
//                                                of what the pool keeps, for each sequence anew   block_tokens, heads, …, scale
//   attention_sinks    o[T,ad], lse[T,a], sinks[W a] -> o, lse   in place: as if softmax had counted one more score of each
//                                                head, with a value of zeros. W: 1, or ranks of op.group, of which each has a heads
//                                                of lses[W,T,a]: those of all ranks' keys, of which this one's are at its place: o becomes
//                                                what its keys are of attention over all, lse that of all
//   attention_sinks_backward  do[T,ad], o[T,ad], lse[T,a], sinks[W a] -> dsinks[W a]   of o and lse behind that; zeros of others' heads   accumulate
//   clamped_swiglu     gate_up[T,2I] -> act[T,I]   g = min(gate, limit): g sigmoid(alpha g) (clamp(up, ±limit) + 1)   limit, alpha
//   clamped_swiglu_backward  dact[T,I], gate_up[T,2I] -> dgate_up[T,2I]                    limit, alpha
//   prepack            w[N,K] -> w               in place, as many bytes: the elements in the order in which products read
//                                                them here, which is the device's affair and may be the one they had. Until
//                                                they are written again none but a linear or fused_linear with prepacked, over the
//                                                whole of w, reads them as a matrix; copies of all of w are prepacked too
//   fused_linear       x[T,K], w[N,K], (b[N]), (norm[K]), (r[T,K or N]) -> y[T,N or N/2], (sum[T,K])   a linear and what stands beside it:
//                                                eps: x is RMS-normed by `norm` in front of it, and with a sum x + r is, which is
//                                                the sum. gate: y is the SwiGLU of the product. residual: y is the product + r
//                                                prepacked, offset: as above (product_sides)
//   priced             x... -> y...             whatever a framework does there: Op::prices; never executed
// An op with dimensions that the device counts has their counts behind these inputs (Op::num_operands).
// Any compute or collective may have prices; its tensors then only say what it orders.
// clang-format on
#pragma once
#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "graph/bound.h"
#include "graph/boxes.h"

namespace hotbunk {

/// Pairs of a query and a key that attention computes in one run. With a window at most as many as fit there: exact
/// where every query has as long a context (decoding), else too many by the windows that a sequence's start cuts off.
std::int64_t attention_pairs(const Op&, const Sizes&);

/// Floating point operations of one run; multiply and add count as two. Attention counts visible pairs only; its
/// backward counts five products (scores again, dV, dP, dQ, dK).
double op_flops(const Op&, const Sizes&);

/// What stands beside the product of a fused_linear, as indices of its inputs; -1: nothing.
struct ProductSides {
  int bias = -1, norm = -1;
  int delta = -1;     // is added to x, and the sum is normed and the second output
  int residual = -1;  // is added to the product
  bool gate = false;
};
ProductSides product_sides(const Op&);

/// Bytes read plus written, each tensor once; for communication the payload (DESIGN, contracts). `places`: of the rank;
/// what it moves depends on them (boxes.h).
std::int64_t op_bytes(const Op&, const Sizes&, const Places&);

/// Payload of a communication op, padding excluded; 0 for other kinds. W: ranks of the group.
std::int64_t payload_bytes(const Op&, const Sizes&, const Places&);

/// The ids that an embedding, or a part of the logits, answers for on a rank: [vocab_begin, vocab_end), `vocab_stride`
/// further for each place in op.group where a group shares the vocabulary, and none beyond `vocab`.
Range vocab_rows(const Op&, const Places&);

/// The ranks around which a context_attention finds the keys and values that it computes on, and which of them has
/// them; `all`: every one.
struct ContextParts {
  std::int64_t ranks = 1, place = 0;  // in op.group
  std::int64_t source = 0;            // its place
  bool all = false;
};
ContextParts context_parts(const Op&, const Places&);

/// A grouped product's matrices: one [n,k] for each expert. Its rows come in so many segments, of each rank that rows
/// came from one for each expert.
struct ExpertMatrices {
  std::int64_t experts = 0, n = 0, k = 0, segments = 0;
};
ExpertMatrices expert_matrices(const Op&);

/// The product of an adapter's op: rows x depth x columns, of an activation or matrix that may be wider; none of other
/// kinds. `fits`: its tensors multiply.
struct LoraProduct {
  Dim rows, depth, columns;
  bool fits = false;
};
std::optional<LoraProduct> lora_product(const Op&);
/// Whether it is a product of an adapter that each expert has: then expert_matrices() says of which.
bool adapts_experts(const Op&);

/// The experts whose rows an expert_sort sorts on a rank: `count`, in each of the groups that the experts lie in as
/// many from the `first` on: all, or those at its place in op.group, which shares each of these groups.
struct OwnPart {
  std::int64_t first = 0, count = 0, groups = 1;
};
OwnPart own_experts(const Op&, const Places&);

/// The columns of a grouped product that its bias is added to, or the bias's gradient is of: [begin, end) of N.
Range bias_columns(const Op&, const Places&);

/// Of all heads' sinks those of this rank's heads: [begin, end).
Range own_sinks(const Op&, const Places&);

/// An all-to-all of rows of experts, of as many as there are for each rank; and its tensor that has the rank's own
/// tokens' rows, there or back. Its payload is these: all ranks' together are what is sent, and no routing changes it.
/// With Attr::rounds it moves the rows that have their place, among all that come to a rank, in the dimension of the
/// rows that came: [begin, begin + size).
bool is_routed(const Op&);
const Tensor& own_tokens_rows(const Op&);
/// One of copies of tokens (Attr::ranks: to so many ranks, once to each; copy_sort): how many they are is the routers'
/// affair.
bool sends_copies(const Op&);
/// Their bytes; where a tensor-parallel group's ranks send those of some experts each (tp), a rank's share.
std::int64_t own_rows_bytes(const Op&, const Sizes&);

/// Whether an op belongs to a round of experts' rows in which, with these sizes, none come.
bool is_idle_round(const Op&, const Sizes&);

/// The places in its group that a rank sends to and receives from with a send, recv or send_recv; -1: it does not.
struct Partners {
  std::int64_t to = -1, from = -1;
  friend bool operator==(const Partners&, const Partners&) = default;
};
/// Of the rank at `place` of `ranks`. With Attr::relative, peer and source count from its own place, around the group:
/// 1 is the next rank and -1 the previous one, so that all ranks of a ring share one program.
Partners partners_of(const Op&, std::int64_t ranks, std::int64_t place);

/// Its price says how much it moves. A message between two ranks is as long as its tensors where its price says nothing
/// of bytes.
inline bool has_priced_payload(const Op& op) {
  return op.is_priced() && (!is_pairwise(op.kind) ||
                            std::ranges::any_of(op.prices, [](const PricePoint& p) { return p.payload_bytes > 0.0; }));
}

/// "" when the op has the tensors, attributes and shapes that its kind asks for; else what is wrong.
std::string check_op(const Op&);
/// The same of an op's prices: in order of tokens, none negative or endless.
std::string check_prices(const Op&);
/// What the tensors of a body take of one slot, from where it is bound: bytes [begin, end), and where they have to lie,
/// as remainders of the sizes of their elements.
struct SlotWindow {
  std::int64_t begin = 0, end = 0;
  std::vector<std::pair<std::int64_t, std::int64_t>> remainders;  // {size of an element, offset % size}, no two alike
};
using SlotWindows = std::vector<SlotWindow>;  // by slot
SlotWindows windows_of(const Body&);
/// "" when the tensors of the call's body lie inside of what its slots are bound to; else which does not. It costs a
/// look at each slot, whatever the number of ops.
std::string check_windows(const Program&, const Call&, const SlotWindows&);

}  // namespace hotbunk
