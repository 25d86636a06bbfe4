#include "tests/cuda_backend/dry_kernels.h"

#include <map>

#include "tests/moves.h"

namespace hotbunk::dry_test {

const Limits& limits_of(const std::string& name) {
  static const Limits streams;
  static const std::map<std::string, Limits> others = {
      // Every lane asks for its row's id, slot, positions or bias, which the cache has for all but the first; what is
      // written in place counts twice in the catalogue.
      {"add_bias", {.asked = 1.52}},
      {"gather_rows", {.asked = 1.53}},
      {"embedding", {.asked = 1.53}},
      {"embedding_backward", {.asked = 3.15}},
      {"kv_write", {.asked = 1.52}},
      {"rope", {.asked = 1.62}},
      {"latent_write", {.asked = 2.03}},
      {"latent_heads", {.asked = 1.11}},
      {"log_prob_backward", {.asked = 1.91}},
      {"kv_write, of a part", {.asked = 2.03}},
      {"latent_write, of a part", {.asked = 3.02}},
      // Its box, 48 B.
      {"copy_boxes", {.asked = 13.3}},
      {"copy_boxes, cast", {.asked = 9.2}},
      {"hash_boxes", {.asked = 25.7}},
      // A pair of numbers each, 8 B apart; sixteen figures.
      {"rope, of neighbours", {.sectors = 0.67}},
      {"token_loss", {.asked = 1.08, .sectors = 0.73}},
      // Twice over its rows, or three times, from L1 but for the first: a row is as long as the model is wide, 16 KiB
      // at most.
      {"rms_norm", {.asked = 2.02}},
      {"rms_norm, of a sum", {.asked = 1.52}},
      {"layer_norm", {.asked = 3.01}},
      {"qk_norm", {.asked = 1.87}},
      {"latent_norm", {.asked = 2.01, .sectors = 0.89}},
      {"attention_sinks", {.asked = 1.75}},
      {"attention_sinks, of a part", {.asked = 3.38}},
      // The weights come anew for every row, and the parts of their gradients go out and in again.
      {"rms_norm_backward", {.asked = 1.86}},
      {"layer_norm_backward", {.asked = 1.86}},
      {"qk_norm_backward", {.asked = 1.83}},
      {"latent_norm_backward", {.asked = 1.78}},
      // Reads and writes p, m and v, each of which the catalogue counts once.
      {"adamw", {.asked = 1.9}},
      // A row of logits comes for its maximum, its sums and, of a sample, the stretch in which the token lies. A lane
      // of a stretch reads 4 B of a sector at a time.
      {"log_prob", {.asked = 2.3}},
      {"vocab_stats", {.asked = 2.29}},
      {"vocab_log_prob", {.asked = 1.5, .sectors = 0.34}},
      {"sample", {.asked = 3.06, .sectors = 0.49}},
      // Whole tiles of 64 x 64: operands come once per tile of the result, from the cache all but the first time.
      // Results are stored 8 or 16 B of a sector at a time; transposed fp32 operands read 8.
      {"linear", {.asked = 2.32, .sectors = 0.69, .flops = 1.02}},
      {"linear_dgrad", {.asked = 2.41, .sectors = 0.63, .flops = 1.02}},
      {"linear_wgrad", {.asked = 2.97, .sectors = 0.35, .flops = 1.04}},
      {"grouped_linear", {.asked = 2.33, .sectors = 0.69, .flops = 1.02}},
      {"grouped_linear_dgrad", {.asked = 2.42, .sectors = 0.63, .flops = 1.02}},
      {"grouped_linear_wgrad", {.asked = 2.99, .sectors = 0.36, .flops = 1.04}},
      // Tiles are wider than an adapter's rank of 16; its factor is a launch of its own, over few numbers. lora_merge
      // forms each element from a row and a column that the cache has.
      {"lora_down", {.asked = 1.27, .sectors = 0.75, .flops = 4.08}},
      {"lora_up", {.asked = 2.11, .sectors = 0.15, .flops = 4.15}},
      {"lora_up_dgrad", {.touched = 1.09, .asked = 1.34, .sectors = 0.73, .flops = 4.1}},
      {"lora_up_dgrad, of 1,024 columns", {.sectors = 0.79, .flops = 4.1}},
      {"lora_up_wgrad", {.asked = 1.34, .sectors = 0.49, .flops = 4.1}},
      {"lora_merge", {.asked = 16.57, .flops = 1.09}},
      // Every lane asks for its choices' rows and weights; a token is read once for each of its rows. Where rows lie is
      // a matter of few numbers, read once by each expert's block.
      {"dispatch", {.asked = 2.72}},
      {"dispatch_backward", {.asked = 2.38}},
      {"combine", {.asked = 3.73}},
      {"combine_backward", {.asked = 2.44}},
      {"route", {.asked = 4.91}},
      {"expert_counts", {.asked = 1.23}},
      {"router_loss", {.asked = 3.22}},
      {"route_backward", {.asked = 4.48}},
      {"expert_sort", {.asked = 52.68, .sectors = 0.88}},
      {"expert_arrivals", {.asked = 1.51, .sectors = 0.85}},
      {"copy_sort", {.asked = 8.71, .sectors = 0.71}},
      {"copy_arrivals", {.asked = 39.5}},
      {"attention_sinks_backward", {.sectors = 0.9}},
      // Keys and values come once for each tile of queries, from the cache all but the first time. The window is
      // narrower than the only tile.
      {"attention", {.asked = 1.38, .sectors = 0.88, .flops = 1.06}},
      {"attention, window of 16", {.asked = 1.38, .sectors = 0.88, .flops = 4.2}},
      {"attention, capped", {.asked = 1.38, .sectors = 0.88, .flops = 1.14}},
      {"paged_attention", {.asked = 1.63, .flops = 1.06}},
      // Half of a tile.
      {"paged_attention, of a part", {.asked = 1.49, .flops = 2.1}},
      // Two launches, of which each reads what both need: dq over keys, dk and dv over queries. Scores and dp are
      // formed in both, seven products in place of five. A lane stores one lse or delta of a row's heads.
      {"attention_backward", {.touched = 1.56, .asked = 1.76, .sectors = 0.89, .flops = 1.3}},
      // A warp per row: keys and values come anew for every query, which the cache must serve.
      {"context_attention", {.asked = 18.49, .flops = 5.0}},
      {"context_attention_backward", {.touched = 1.33, .asked = 30.1, .flops = 4.35}},
      // Keys and values are written and read again, of which the catalogue counts nothing.
      {"latent_attention", {.touched = 1.79, .asked = 3.28, .sectors = 0.82, .flops = 1.04}},
      {"latent_attention, of a part", {.touched = 1.43, .asked = 2.32, .sectors = 0.82}},
  };
  const auto it = others.find(name);
  return it == others.end() ? streams : it->second;
}

namespace {

using Attrs = std::vector<std::pair<Attr, AttrValue>>;

constexpr DType f32 = DType::f32;
/// Numbers by place: each token its own, or a run of them.
std::int64_t place(std::int64_t i) { return i; }
Operand i32(std::vector<std::int64_t> shape, std::function<std::int64_t(std::int64_t)> integer) {
  return {DType::i32, std::move(shape), std::move(integer)};
}

/// Of 64 experts, two for each token.
void add_routing(std::vector<Hot>& all) {
  constexpr std::int64_t C = 2, many = 64;
  const Operand rows = i32({T, C}, [](std::int64_t i) { return i * 37 % (T * C); }),
                chosen = i32({T, C}, [](std::int64_t i) { return (i + i / C) % many; });
  const Operand weights{f32, {T, C}}, logits{f32, {T, many}};
  all.push_back({"route", OpKind::route, {logits}, {weights, chosen}, {{Attr::renormalise, std::int64_t{1}}}});
  all.push_back({"route_backward",
                 OpKind::route_backward,
                 {weights, logits, chosen},
                 {logits},
                 {{Attr::renormalise, std::int64_t{1}}}});
  all.push_back({"expert_counts",
                 OpKind::expert_counts,
                 {chosen, i32({T}, [](std::int64_t t) { return t / (T / 2); })},
                 {{f32, {2, many}}}});
  all.push_back({"expert_sort", OpKind::expert_sort, {chosen}, {rows, i32({many + 1}, place)}, {}});
  // To four ranks, of 16 experts each.
  const Operand bounds = i32({many + 1}, [](std::int64_t i) { return T * C / many * i; }), count{DType::i64, {1}};
  all.push_back({"copy_sort",
                 OpKind::copy_sort,
                 {rows, bounds},
                 {i32({T * C}, place), rows, i32({T, C, 1}, place), i32({5}, place), count}});
  all.push_back({"copy_arrivals",
                 OpKind::copy_arrivals,
                 {i32({1, 2}, [](std::int64_t i) { return T * i; }),
                  i32({T * C, 1}, [](std::int64_t i) { return i % T; }), bounds},
                 {i32({T * C}, place), rows, count}});
  all.push_back({"expert_arrivals",
                 OpKind::expert_arrivals,
                 {i32({1, many + 1}, place)},
                 {i32({many + 1}, place), {DType::i64, {1}}}});
}

/// Of a mixture of experts: two for each token, and as many rows of each expert as a tile has.
void add_experts(std::vector<Hot>& all, DType x) {
  constexpr std::int64_t C = 2, E = 2;
  const Operand rows = i32({T, C}, [](std::int64_t i) { return i * 37 % (T * C); }),
                offsets = i32({E + 1}, [](std::int64_t i) { return i * T; });
  const Operand weights{f32, {T, C}}, tokens{x, {T, H}}, sorted{x, {T, C, H}}, up{x, {T, C, I}};
  all.push_back({"dispatch", OpKind::dispatch, {tokens, rows}, {sorted}, {}});
  all.push_back({"dispatch_backward", OpKind::dispatch_backward, {sorted, rows}, {tokens}, {}});
  all.push_back({"combine", OpKind::combine, {sorted, rows, weights}, {tokens}, {}});
  all.push_back({"combine_backward", OpKind::combine_backward, {tokens, sorted, rows, weights}, {sorted, weights}, {}});
  all.push_back({"grouped_linear", OpKind::grouped_linear, {sorted, {x, {E * I, H}}, offsets}, {up}, {}});
  all.push_back(
      {"router_loss",
       OpKind::router_loss,
       {{x, {T, 64}}, {f32, {T, 64}}, {f32, {2, 64}}, i32({T}, [](std::int64_t t) { return t % 2; }), {f32, {T}}},
       {{x, {T, 64}}, {f32, {16}}},
       {{Attr::factor, 0.5}, {Attr::z_factor, 0.25}, {Attr::top_k, C}},
       true});
  if (x == f32) return add_routing(all);
  all.push_back({"grouped_linear_dgrad", OpKind::grouped_linear_dgrad, {up, {x, {E * I, H}}, offsets}, {sorted}, {}});
  all.push_back({"grouped_linear_wgrad", OpKind::grouped_linear_wgrad, {up, sorted, offsets}, {{f32, {E * I, H}}}, {}});
}

/// Attention of one sequence, around it, and of latents; products over whole tiles, so with masked pairs too.
void add_attention(std::vector<Hot>& all, DType x) {
  constexpr std::int64_t a = 8, k = 2, d = 64, Q = (a + 2 * k) * d, block_tokens = 16, blocks = T / block_tokens;
  const Attrs heads = {{Attr::heads, a}, {Attr::kv_heads, k}, {Attr::head_dim, d}};
  const auto with = [](Attrs attrs, const Attrs& more) {
    attrs.insert(attrs.end(), more.begin(), more.end());
    return attrs;
  };
  const Operand qkv{x, {T, Q}}, o{x, {T, a * d}}, lse{f32, {T, a}},
      cu = i32({2}, [](std::int64_t i) { return i * T; }), table = i32({1, blocks}, place),
      length = i32({1}, [](std::int64_t) { return T; }), positions = i32({T}, place);
  const Operand kv{x, {1, T, 2 * k * d}}, pool{x, {blocks, 2 * k, block_tokens * d}};
  const Operand wide_q{f32, {T, a * d}}, wide_kv{f32, {1, T, 2 * k * d}}, stat{f32, {T, a + k}}, head{x, {d}};
  const Attrs rotary = with(heads, {{Attr::rope_theta, 1e4}}), norm = with(heads, {{Attr::eps, 1e-5}});
  all.push_back({"rope", OpKind::rope, {qkv, positions}, {qkv}, rotary, true});
  all.push_back({"qk_norm", OpKind::qk_norm, {qkv, head, head}, {qkv, stat}, norm});
  all.push_back({"qk_norm_backward",
                 OpKind::qk_norm_backward,
                 {qkv, qkv, head, head, stat},
                 {qkv, {f32, {d}}, {f32, {d}}},
                 heads});
  all.push_back(
      {"kv_write", OpKind::kv_write, {qkv, positions}, {pool}, with(heads, {{Attr::block_tokens, block_tokens}})});
  // Of a rank that holds every other token.
  const Attrs part = with(heads, {{Attr::block_tokens, block_tokens}, {Attr::ranks, std::int64_t{2}}});
  const Operand part_of_pool{x, {blocks / 2, 2 * k, block_tokens * d}};
  all.push_back({"kv_write, of a part", OpKind::kv_write, {qkv, positions}, {part_of_pool}, part});
  all.push_back({"attention_sinks, of a part",
                 OpKind::attention_sinks,
                 {o, lse, {f32, {2, T, a}}},
                 {o, lse},
                 {{Attr::ranks, std::int64_t{2}}},
                 true});
  all.push_back({"split_heads", OpKind::split_heads, {qkv}, {{x, {2, T, Q / 2}}}, heads});
  all.push_back({"merge_heads", OpKind::merge_heads, {{x, {2, T, Q / 2}}}, {qkv}, heads});
  all.push_back({"take_kv", OpKind::take_kv, {qkv}, {{x, {T, 2 * k * d}}}, heads});
  all.push_back({"merge_qkv", OpKind::merge_qkv, {wide_q, {f32, {T, 2 * k * d}}}, {qkv}, heads});
  all.push_back({"attention_sinks", OpKind::attention_sinks, {o, lse, {x, {a}}}, {o, lse}, {}, true});
  all.push_back({"attention_sinks_backward", OpKind::attention_sinks_backward, {o, o, lse, {x, {a}}}, {{f32, {a}}}});
  if (x == f32) return;
  // Keys and values come once for each tile of queries, from the cache all but the first time.
  all.push_back({"attention", OpKind::attention, {qkv, cu}, {o, lse}, heads});
  all.push_back({"attention, window of 16",
                 OpKind::attention,
                 {qkv, cu},
                 {o, lse},
                 with(heads, {{Attr::window, std::int64_t{16}}})});
  all.push_back({"attention, capped", OpKind::attention, {qkv, cu}, {o, lse}, with(heads, {{Attr::softcap, 30.0}})});
  all.push_back({"paged_attention",
                 OpKind::paged_attention,
                 {qkv, pool, cu, table, length},
                 {o},
                 with(heads, {{Attr::block_tokens, block_tokens}, {Attr::max_blocks, blocks}})});
  all.push_back({"paged_attention, of a part",
                 OpKind::paged_attention,
                 {qkv, part_of_pool, cu, i32({1, blocks / 2}, place), length},
                 {o, lse},
                 with(part, {{Attr::max_blocks, blocks / 2}})});
  // Two launches, of which each reads what both need: dq over keys, dk and dv over queries. Scores and dp are formed in
  // both, seven products in place of five. A lane stores one lse or delta of a row's heads.
  all.push_back({"attention_backward", OpKind::attention_backward, {o, qkv, o, lse, cu}, {qkv}, heads});
  // Rows are merged with what other keys gave: o is read and written.
  const Attrs merged = with(heads, {{Attr::ranks, std::int64_t{1}}, {Attr::accumulate, std::int64_t{1}}});
  all.push_back({"context_attention", OpKind::context_attention, {qkv, kv, cu}, {wide_q, lse}, merged, true});
  all.push_back({"context_attention_backward",
                 OpKind::context_attention_backward,
                 {o, qkv, kv, o, lse, cu},
                 {wide_q, wide_kv},
                 merged,
                 true});
}

/// Latents of 128 numbers and 32 that keys share.
void add_latents(std::vector<Hot>& all, DType x) {
  constexpr std::int64_t a = 8, d = 64, v = 64, r = 128, t = 32, of_kv = a * (d - t + v), packed = a * (2 * d + v),
                         block_tokens = 16, blocks = T / block_tokens;
  const Attrs heads = {
      {Attr::heads, a},    {Attr::kv_heads, a}, {Attr::head_dim, d},     {Attr::value_dim, v},
      {Attr::rope_dim, t}, {Attr::eps, 1e-6},   {Attr::rope_theta, 1e4}, {Attr::block_tokens, block_tokens}};
  const Operand both{x, {T, r + t}}, c{x, {T, r}}, s{x, {T, t}}, rstd{f32, {T}}, w{x, {r}}, positions = i32({T}, place);
  const Operand q{x, {T, a * d}}, kv{x, {T, of_kv}}, rows{x, {T, packed}}, pool{x, {blocks, block_tokens, r + t}};
  all.push_back({"latent_norm", OpKind::latent_norm, {both, w, positions}, {c, s, rstd}, heads});
  all.push_back({"latent_norm_backward",
                 OpKind::latent_norm_backward,
                 {c, s, both, w, rstd, positions},
                 {both, {f32, {r}}},
                 heads});
  all.push_back({"latent_heads", OpKind::latent_heads, {q, kv, s}, {rows}, heads});
  all.push_back({"latent_heads_backward", OpKind::latent_heads_backward, {rows}, {q, kv, s}, heads});
  all.push_back({"latent_write", OpKind::latent_write, {c, s, positions}, {pool}, heads});
  Attrs part = heads;
  part.emplace_back(Attr::ranks, std::int64_t{2});
  const Operand part_of_pool{x, {blocks / 2, block_tokens, r + t}};
  all.push_back({"latent_write, of a part", OpKind::latent_write, {c, s, positions}, {part_of_pool}, part});
  all.push_back({"rope, of neighbours", OpKind::rope, {q, positions}, {q}, heads, true});
  if (x == f32) return;
  all.push_back({"latent_attention",
                 OpKind::latent_attention,
                 {q,
                  pool,
                  {x, {of_kv, r}},
                  i32({2}, [](std::int64_t i) { return i * T; }),
                  i32({1, blocks}, place),
                  i32({1}, [](std::int64_t) { return T; })},
                 {{x, {T, a * v}}},
                 heads});
  all.push_back({"latent_attention, of a part",
                 OpKind::latent_attention,
                 {q,
                  part_of_pool,
                  {x, {of_kv, r}},
                  i32({2}, [](std::int64_t i) { return i * T; }),
                  i32({1, blocks / 2}, place),
                  i32({1}, [](std::int64_t) { return T; })},
                 {{x, {T, a * v}}, {f32, {T, a}}},
                 part});
}

/// Half of each row, as it is and in the other dtype, and its hash.
void add_boxes(std::vector<Hot>& all, DType x) {
  const Box half{.src_offset = 0, .src_pitch = H, .dst_offset = 0, .dst_pitch = H / 2, .rows = T, .cols = H / 2};
  const std::vector<Move> moves = hotbunk::test::moves_of({half});
  const Operand rows{x, {T, H}}, narrow{x, {T, H / 2}}, other{x == f32 ? DType::bf16 : f32, {T, H / 2}};
  all.push_back({"copy_boxes", OpKind::copy_boxes, {rows}, {narrow}, {}, false, moves});
  all.push_back({"copy_boxes, cast", OpKind::copy_boxes, {rows}, {other}, {}, false, moves});
  all.push_back({"hash_boxes",
                 OpKind::hash_boxes,
                 {rows},
                 {{DType::i64, {1}}},
                 {{Attr::as_dtype, static_cast<std::int64_t>(x)}},
                 true,
                 moves});
}

void add_products(std::vector<Hot>& all, DType x) {
  constexpr std::int64_t r = 16, column = 64;
  const Operand rows{x, {T, H}}, narrow{x, {T, I}}, w{x, {I, H}}, u{x, {T, r}}, b{x, {I - column, r}};
  // Whole tiles: operands come once per tile of the result, from the cache all but the first time. Results are stored
  // 16 B of a sector at a time.
  all.push_back({"linear", OpKind::linear, {rows, w}, {narrow}, {}});
  if (x == f32) return;  // its tiles are those of the first: seconds of the executor
  all.push_back({"linear_dgrad", OpKind::linear_dgrad, {narrow, w}, {rows}, {}});
  all.push_back({"linear_wgrad", OpKind::linear_wgrad, {narrow, rows}, {{f32, {I, H}}}, {}});
  const Attrs of_columns = {{Attr::column, column}, {Attr::factor, 2.0}};
  all.push_back({"lora_down", OpKind::lora_down, {rows, {x, {r, H}}}, {u}, of_columns});
  all.push_back({"lora_up", OpKind::lora_up, {u, b}, {narrow}, of_columns, true});
  all.push_back({"lora_up_dgrad", OpKind::lora_up_dgrad, {narrow, b}, {u}, of_columns});
  // The factor's launch reads and writes r numbers a row again, which weighs less the wider what is adapted is.
  const Operand wide{x, {T, 1024}}, b_of_wide{x, {1024, r}};
  all.push_back({"lora_up_dgrad, of 1,024 columns",
                 OpKind::lora_up_dgrad,
                 {wide, b_of_wide},
                 {u},
                 {{Attr::column, std::int64_t{0}}, {Attr::factor, 2.0}}});
  all.push_back({"lora_up_wgrad", OpKind::lora_up_wgrad, {narrow, u}, {{f32, {I - column, r}}}, of_columns});
  all.push_back({"lora_merge", OpKind::lora_merge, {w, {x, {I, r}}, {x, {r, H}}}, {w}, of_columns});
}

void add_loss(std::vector<Hot>& all, DType x) {
  const Operand logits{f32, {T, V}}, row{f32, {T}}, targets = i32({T}, [](std::int64_t i) { return i * 37 % V; });
  const Attrs softmax = {{Attr::vocab, V}, {Attr::temperature, 1.0}};
  Attrs part = softmax;
  part.insert(part.end(), {{Attr::vocab_begin, std::int64_t{0}}, {Attr::vocab_end, V}, {Attr::vocab_stride, V}});
  all.push_back({"log_prob_backward", OpKind::log_prob_backward, {logits, row, targets, row}, {{x, {T, V}}}, softmax});
  if (x != f32) return;
  all.push_back({"token_loss",
                 OpKind::token_loss,
                 {row, row, row, row, row, row},
                 {row, {f32, {16}}},
                 {{Attr::clip_low, 0.2},
                  {Attr::clip_high, 0.2},
                  {Attr::kl_coef, 0.1},
                  {Attr::sft, std::int64_t{0}},
                  {Attr::reference, std::int64_t{1}}},
                 true});
  all.push_back({"log_prob", OpKind::log_prob, {logits, targets}, {row, row, row}, softmax});
  all.push_back({"vocab_stats", OpKind::vocab_stats, {logits, targets}, {{f32, {T, 4}}}, part});
  all.push_back({"vocab_log_prob",
                 OpKind::vocab_log_prob,
                 {{f32, {2, T, 4}}, targets},
                 {row, row, row},
                 {{Attr::temperature, 1.0}}});
  all.push_back({"softcap", OpKind::softcap, {logits}, {logits}, {{Attr::softcap, 30.0}}, true});
  all.push_back({"sample",
                 OpKind::sample,
                 {{f32, {1, T, V}}, row},
                 {i32({T}, place), row},
                 {{Attr::vocab, V},
                  {Attr::tp, std::int64_t{1}},
                  {Attr::temperature, 1.0},
                  {Attr::top_k, std::int64_t{0}},
                  {Attr::top_p, 1.0}}});
}

}  // namespace

std::vector<Hot> hot_kernels(DType x) {
  const auto token = [](std::int64_t i) { return i * 37 % V; };
  const Operand tokens = i32({T}, token), rows{x, {T, H}}, narrow{x, {T, I}}, gated{x, {T, 2 * I}}, w{x, {H}},
                dw{f32, {H}}, rstd{f32, {T}}, step{f32, {T * H}};
  const Attrs vocabulary = {{Attr::vocab_begin, std::int64_t{0}}, {Attr::vocab_end, V}}, eps = {{Attr::eps, 1e-5}},
              limit = {{Attr::limit, 7.0}, {Attr::alpha, 1.7}};
  std::vector<Hot> all = {
      {"add", OpKind::add, {rows, rows}, {rows}},
      {"cast", OpKind::cast, {{f32, {T, H}}}, {{DType::bf16, {T, H}}}},
      {"add_bias", OpKind::add_bias, {rows, w}, {rows}, {}, true},
      {"gather_rows", OpKind::gather_rows, {rows, i32({T / 2}, place)}, {{x, {T / 2, H}}}},
      {"swiglu", OpKind::swiglu, {gated}, {narrow}},
      {"swiglu_backward", OpKind::swiglu_backward, {narrow, gated}, {gated}},
      {"geglu", OpKind::geglu, {gated}, {narrow}},
      {"geglu_backward", OpKind::geglu_backward, {narrow, gated}, {gated}},
      {"clamped_swiglu", OpKind::clamped_swiglu, {gated}, {narrow}, limit},
      {"clamped_swiglu_backward", OpKind::clamped_swiglu_backward, {narrow, gated}, {gated}, limit},
      {"gelu", OpKind::gelu, {narrow}, {narrow}},
      {"gelu_backward", OpKind::gelu_backward, {narrow, narrow}, {narrow}},
      // Every lane asks for its row's id, which the cache has for all but the first.
      {"embedding", OpKind::embedding, {{x, {V, H}}, tokens}, {rows}, vocabulary},
      {"embedding_backward", OpKind::embedding_backward, {tokens, rows}, {{f32, {V, H}}}, vocabulary, true},
      // Twice over its rows, the second time from L1: a row is as long as the model is wide, 16 KiB at most.
      {"rms_norm", OpKind::rms_norm, {rows, w}, {rows, rstd}, eps},
      {"rms_norm, of a sum", OpKind::rms_norm, {rows, w, rows}, {rows, rstd, rows}, eps},
      {"rms_norm_backward", OpKind::rms_norm_backward, {rows, rows, w, rstd}, {rows, dw}, {}},
      {"layer_norm", OpKind::layer_norm, {rows, w, w}, {rows, rstd}, eps},
      {"layer_norm_backward", OpKind::layer_norm_backward, {rows, rows, w, rstd}, {rows, dw, dw}, {}},
      // Reads and writes p, m and v (28 B an element, of which the catalogue, each tensor once, counts 16); every lane
      // asks for the rate and the clip coefficient too.
      {"adamw",
       OpKind::adamw,
       {{x, {T * H}}, {f32, {2}}, {f32, {1}}},
       {step, step, step},
       {{Attr::beta1, 0.9}, {Attr::beta2, 0.99}, {Attr::eps, 1e-8}, {Attr::weight_decay, 0.0}},
       true},
      {"sum_squares", OpKind::sum_squares, {{x, {T * H}}}, {{f32, {1}}}},
  };
  add_boxes(all, x);
  add_products(all, x);
  add_loss(all, x);
  add_attention(all, x);
  add_latents(all, x);
  add_experts(all, x);
  return all;
}

}  // namespace hotbunk::dry_test
