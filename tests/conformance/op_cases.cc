// Cases of ops for every backend: long because every kind of op has one.
#include "tests/conformance/op_cases.h"

#include <array>
#include <cmath>

#include "base/dtype.h"
#include "tests/moves.h"

namespace hotbunk::conformance {
namespace {

// T tokens, S sequences, H hidden, I intermediate, V vocabulary; a query heads and k KV heads of d.
constexpr std::int64_t T = 5, S = 2, H = 12, I = 6, V = 11, a = 4, k = 2, d = 8, Q = (a + 2 * k) * d;
constexpr std::int64_t blocks = 4, block_tokens = 4, max_blocks = 2;

/// Small integers, exact in every dtype, and so are short sums of their products.
double whole(std::int64_t i) { return static_cast<double>(i * 7 % 11) - 5.0; }
double wave(std::int64_t i) { return std::sin(1.7 * static_cast<double>(i) + 0.3); }
double one(std::int64_t) { return 1.0; }
double none(std::int64_t) { return 0.0; }
double itself(std::int64_t i) { return static_cast<double>(i); }
double ids(std::int64_t i) { return static_cast<double>(i * 3 % V); }
double offsets(std::int64_t i) { return i == 0 ? 0.0 : i == 1 ? 3.0 : 5.0; }

Operand to_write(const char* name, DType dtype, std::vector<std::int64_t> shape) {
  return {name, dtype, std::move(shape), {}};
}

std::vector<std::pair<Attr, AttrValue>> heads(std::vector<std::pair<Attr, AttrValue>> more = {}) {
  more.insert(more.end(), {{Attr::heads, a}, {Attr::kv_heads, k}, {Attr::head_dim, d}});
  return more;
}

void add_data(std::vector<OpCase>& out, DType x) {
  const auto same = [](const Values& v, std::int64_t i) { return v[0][static_cast<std::size_t>(i)]; };
  out.push_back(
      {OpKind::zero, {to_write("x", x, {7, 3})}, {}, {0}, {}, [](const Values&, std::int64_t) { return 0.0; }});
  out.push_back({OpKind::copy, {{"x", x, {13}, whole}, to_write("y", x, {13})}, {0}, {1}, {}, same});
  const DType other = x == DType::f32 ? DType::bf16 : DType::f32;
  out.push_back({OpKind::cast, {{"x", x, {9}, wave}, to_write("y", other, {9})}, {0}, {1}, {}, {}});
  out.push_back({OpKind::add,
                 {{"x", x, {T, H}, whole}, {"y", x, {T, H}, itself}, to_write("z", x, {T, H})},
                 {0, 1},
                 {2},
                 {},
                 [](const Values& v, std::int64_t i) {
                   return v[0][static_cast<std::size_t>(i)] + v[1][static_cast<std::size_t>(i)];
                 }});
  out.push_back(
      {OpKind::gather_rows,
       {{"x", x, {T, H}, whole},
        {"rows", DType::i32, {S}, [](std::int64_t i) { return i == 0 ? 4.0 : 1.0; }},
        to_write("y", x, {S, H})},
       {0, 1},
       {2},
       {},
       [](const Values& v, std::int64_t i) { return v[0][static_cast<std::size_t>((i < H ? 4 : 1) * H + i % H)]; }});
  const Box box{.src_offset = 1, .src_pitch = 6, .dst_offset = 0, .dst_pitch = 5, .rows = 3, .cols = 5};
  out.push_back({OpKind::copy_boxes,
                 {{"x", x, {4, 6}, whole}, to_write("y", other, {3, 5})},
                 {0},
                 {1},
                 {},
                 [](const Values& v, std::int64_t i) { return v[0][static_cast<std::size_t>(i / 5 * 6 + 1 + i % 5)]; },
                 test::moves_of({box})});
  out.push_back({OpKind::hash_boxes,
                 {{"x", x, {4, 6}, whole}, {"sum", DType::i64, {1}, none}},
                 {0},
                 {1},
                 {{Attr::as_dtype, static_cast<std::int64_t>(x)}},
                 {},
                 test::moves_of({box})});
}

/// Of matrices smaller and larger than what a product reads at once.
void add_prepacked(std::vector<OpCase>& out, DType x) {
  out.push_back({OpKind::prepack, {{"w", x, {I, H}, itself}}, {0}, {0}, {}, {}});
  for (const auto& [N, K] : {std::pair<std::int64_t, std::int64_t>{I, H}, {37, 50}, {192, 128}})
    out.push_back({OpKind::linear,
                   {{"x", x, {T, K}, whole}, {"w", x, {N, K}, whole}, {"b", x, {N}, itself}, to_write("y", x, {T, N})},
                   {0, 1, 2},
                   {3},
                   {{Attr::prepacked, std::int64_t{1}}},
                   [N = N, K = K](const Values& v, std::int64_t i) {
                     double sum = v[2][static_cast<std::size_t>(i % N)];
                     for (std::int64_t j = 0; j < K; ++j)
                       sum += v[0][static_cast<std::size_t>(i / N * K + j)] *
                              v[1][static_cast<std::size_t>(i % N * K + j)];
                     return sum;
                   }});
}

/// A product of small integers and what is added to it are exact; so is what a norm adds up in front of one.
void add_fused(std::vector<OpCase>& out, DType x) {
  const auto cell = [](const std::vector<double>& of, std::int64_t row, std::int64_t cols, std::int64_t col) {
    return of[static_cast<std::size_t>(row * cols + col)];
  };
  out.push_back({OpKind::fused_linear,
                 {{"x", x, {T, H}, whole},
                  {"w", x, {I, H}, whole},
                  {"b", x, {I}, itself},
                  {"residual", x, {T, I}, itself},
                  to_write("y", x, {T, I})},
                 {0, 1, 2, 3},
                 {4},
                 {{Attr::residual, std::int64_t{1}}},
                 [cell, x](const Values& v, std::int64_t i) {
                   double sum = v[2][static_cast<std::size_t>(i % I)];
                   for (std::int64_t j = 0; j < H; ++j) sum += cell(v[0], i / I, H, j) * cell(v[1], i % I, H, j);
                   return stored(x, sum) + v[3][static_cast<std::size_t>(i)];
                 }});
  std::vector<double> sums;
  for (std::int64_t i = 0; i < T * H; ++i) sums.push_back(whole(i) + itself(i));
  out.push_back({OpKind::fused_linear,
                 {{"x", x, {T, H}, whole},
                  {"w", x, {2 * I, H}, wave},
                  {"norm", x, {H}, one},
                  {"delta", x, {T, H}, itself},
                  to_write("act", x, {T, I}),
                  to_write("sum", x, {T, H})},
                 {0, 1, 2, 3},
                 {4, 5},
                 {{Attr::eps, 1e-5}, {Attr::gate, std::int64_t{1}}},
                 {},
                 {},
                 {sums}});
}

void add_linear(std::vector<OpCase>& out, DType x) {
  const auto product = [](const Values& v, std::int64_t i) {  // y = x wᵀ + b
    double sum = v[2][static_cast<std::size_t>(i % I)];
    for (std::int64_t j = 0; j < H; ++j)
      sum += v[0][static_cast<std::size_t>(i / I * H + j)] * v[1][static_cast<std::size_t>(i % I * H + j)];
    return sum;
  };
  out.push_back({OpKind::linear,
                 {{"x", x, {T, H}, whole}, {"w", x, {I, H}, whole}, {"b", x, {I}, itself}, to_write("y", x, {T, I})},
                 {0, 1, 2},
                 {3},
                 {},
                 product});
  out.push_back({OpKind::linear_dgrad,
                 {{"dy", x, {T, I}, whole}, {"w", x, {I, H}, whole}, to_write("dx", x, {T, H})},
                 {0, 1},
                 {2},
                 {},
                 {}});
  out.push_back({OpKind::linear_wgrad,
                 {{"dy", x, {T, I}, whole},
                  {"x", x, {T, H}, whole},
                  to_write("dw", DType::f32, {I, H}),
                  to_write("db", DType::f32, {I})},
                 {0, 1},
                 {2, 3},
                 {},
                 {}});
}

/// An adapter of rank R beside a matrix whose I columns of a wider activation begin at the third.
void add_lora(std::vector<OpCase>& out, DType x) {
  constexpr std::int64_t R = 2, W = I + 5, begin = 3;
  const std::pair<Attr, AttrValue> column{Attr::column, begin}, factor{Attr::factor, 0.5};
  const auto at = [](const std::vector<double>& m, std::int64_t row, std::int64_t cols, std::int64_t col) {
    return m[static_cast<std::size_t>(row * cols + col)];
  };
  out.push_back({OpKind::lora_down,
                 {{"x", x, {T, H}, whole}, {"a", x, {R, H}, whole}, to_write("u", x, {T, R})},
                 {0, 1},
                 {2},
                 {factor},
                 [at, x](const Values& v, std::int64_t i) {
                   double sum = 0;
                   for (std::int64_t j = 0; j < H; ++j) sum += at(v[0], i / R, H, j) * at(v[1], i % R, H, j);
                   return 0.5 * (x == DType::f32 ? sum : static_cast<double>(to_f32(to_bf16(static_cast<float>(sum)))));
                 }});
  out.push_back({OpKind::lora_up,
                 {{"u", x, {T, R}, whole}, {"b", x, {I, R}, whole}, {"y", x, {T, W}, itself}},
                 {0, 1},
                 {2},
                 {column},
                 [at](const Values& v, std::int64_t i) {
                   const std::int64_t t = i / W, c = i % W - begin;
                   double y = v[2][static_cast<std::size_t>(i)];
                   for (std::int64_t r = 0; c >= 0 && c < I && r < R; ++r) y += at(v[0], t, R, r) * at(v[1], c, R, r);
                   return y;
                 }});
  out.push_back({OpKind::lora_up_dgrad,
                 {{"dy", x, {T, W}, whole}, {"b", x, {I, R}, whole}, to_write("du", x, {T, R})},
                 {0, 1},
                 {2},
                 {column, factor},
                 [at, x](const Values& v, std::int64_t i) {
                   double sum = 0;
                   for (std::int64_t c = 0; c < I; ++c) sum += at(v[0], i / R, W, begin + c) * at(v[1], c, R, i % R);
                   return 0.5 * (x == DType::f32 ? sum : static_cast<double>(to_f32(to_bf16(static_cast<float>(sum)))));
                 }});
  out.push_back({OpKind::lora_up_wgrad,
                 {{"dy", x, {T, W}, whole}, {"u", x, {T, R}, whole}, to_write("db", DType::f32, {I, R})},
                 {0, 1},
                 {2},
                 {column},
                 [at](const Values& v, std::int64_t i) {
                   double sum = 0;
                   for (std::int64_t t = 0; t < T; ++t) sum += at(v[0], t, W, begin + i / R) * at(v[1], t, R, i % R);
                   return sum;
                 }});
  out.push_back({OpKind::lora_merge,
                 {{"w", x, {I, H}, itself}, {"b", x, {I, R}, whole}, {"a", x, {R, H}, whole}, to_write("y", x, {I, H})},
                 {0, 1, 2},
                 {3},
                 {factor},
                 [at](const Values& v, std::int64_t i) {
                   double sum = 0;
                   for (std::int64_t r = 0; r < R; ++r) sum += at(v[1], i / H, R, r) * at(v[2], r, H, i % H);
                   return v[0][static_cast<std::size_t>(i)] + 0.5 * sum;
                 }});
}

/// Heads of 1 element, so that a column is a head: 4 query heads, then KV heads, in parts.
void add_head_parts(std::vector<OpCase>& out, DType x) {
  struct Way {
    std::int64_t kv, parts;
    std::vector<std::vector<std::int64_t>> columns;  // of each part
  };
  for (const Way& way : {Way{2, 2, {{0, 1, 4, 6}, {2, 3, 5, 7}}},
                         {2, 4, {{0, 4, 6}, {1, 4, 6}, {2, 5, 7}, {3, 5, 7}}},
                         {4, 2, {{0, 1, 4, 5, 8, 9}, {2, 3, 6, 7, 10, 11}}},
                         {0, 2, {{0, 1}, {2, 3}}}}) {
    const std::int64_t columns_of_all = a + 2 * way.kv, of_part = std::ssize(way.columns.front());
    const std::vector<std::pair<Attr, AttrValue>> attrs = {
        {Attr::heads, a}, {Attr::kv_heads, way.kv}, {Attr::head_dim, std::int64_t{1}}};
    const auto column = [way, of_part](std::int64_t part, std::int64_t c) {
      return way.columns[static_cast<std::size_t>(part)][static_cast<std::size_t>(c)];
    };
    out.push_back({OpKind::split_heads,
                   {{"x", x, {T, columns_of_all}, whole}, to_write("y", x, {way.parts, T, of_part})},
                   {0},
                   {1},
                   attrs,
                   [=](const Values& v, std::int64_t i) {
                     const std::int64_t c = column(i / of_part / T, i % of_part);
                     return v[0][static_cast<std::size_t>(i / of_part % T * columns_of_all + c)];
                   }});
    out.push_back({OpKind::merge_heads,
                   {{"y", x, {way.parts, T, of_part}, whole}, to_write("x", x, {T, columns_of_all})},
                   {0},
                   {1},
                   attrs,
                   [=](const Values& v, std::int64_t i) {
                     double sum = 0;
                     for (std::int64_t part = 0; part < way.parts; ++part)
                       for (std::int64_t c = 0; c < of_part; ++c)
                         if (column(part, c) == i % columns_of_all)
                           sum += v[0][static_cast<std::size_t>((part * T + i / columns_of_all) * of_part + c)];
                     return sum;
                   }});
  }
}

void add_norms(std::vector<OpCase>& out, DType x) {
  out.push_back(
      {OpKind::rms_norm,
       {{"x", x, {T, H}, wave}, {"w", x, {H}, one}, to_write("y", x, {T, H}), to_write("rstd", DType::f32, {T})},
       {0, 1},
       {2, 3},
       {{Attr::eps, 1e-5}},
       {}});
  out.push_back({OpKind::rms_norm,
                 {{"x", x, {T, H}, whole},
                  {"w", x, {H}, one},
                  {"r", x, {T, H}, itself},
                  to_write("y", x, {T, H}),
                  to_write("rstd", DType::f32, {T}),
                  to_write("sum", x, {T, H})},
                 {0, 1, 2},
                 {3, 4, 5},
                 {{Attr::eps, 1e-5}},
                 {}});
  out.push_back({OpKind::rms_norm_backward,
                 {{"dy", x, {T, H}, wave},
                  {"x", x, {T, H}, whole},
                  {"w", x, {H}, one},
                  {"rstd", DType::f32, {T}, one},
                  to_write("dx", x, {T, H}),
                  to_write("dw", DType::f32, {H})},
                 {0, 1, 2, 3},
                 {4, 5},
                 {},
                 {}});
  // Of a frozen weight there is no gradient.
  out.push_back({OpKind::rms_norm_backward,
                 {{"dy", x, {T, H}, wave},
                  {"x", x, {T, H}, whole},
                  {"w", x, {H}, one},
                  {"rstd", DType::f32, {T}, one},
                  to_write("dx", x, {T, H})},
                 {0, 1, 2, 3},
                 {4},
                 {},
                 {}});
  out.push_back({OpKind::qk_norm_backward,
                 {{"dy", x, {T, Q}, wave},
                  {"x", x, {T, Q}, whole},
                  {"qw", x, {d}, one},
                  {"kw", x, {d}, one},
                  {"rstd", DType::f32, {T, a + k}, one},
                  to_write("dx", x, {T, Q})},
                 {0, 1, 2, 3, 4},
                 {5},
                 heads(),
                 {}});
  // By w + 1.
  out.push_back(
      {OpKind::rms_norm,
       {{"x", x, {T, H}, one}, {"w", x, {H}, whole}, to_write("y", x, {T, H}), to_write("rstd", DType::f32, {T})},
       {0, 1},
       {2, 3},
       {{Attr::eps, 0.0}, {Attr::offset, 1.0}},
       [](const Values& v, std::int64_t i) { return v[1][static_cast<std::size_t>(i % H)] + 1.0; }});
  const Operand of_norm{"w", x, {H}, one}, bias{"b", x, {H}, itself};
  out.push_back({OpKind::layer_norm,
                 {{"x", x, {T, H}, wave}, of_norm, bias, to_write("y", x, {T, H}), to_write("rstd", DType::f32, {T})},
                 {0, 1, 2},
                 {3, 4},
                 {{Attr::eps, 1e-5}},
                 {}});
  out.push_back({OpKind::layer_norm,
                 {{"x", x, {T, H}, whole},
                  of_norm,
                  bias,
                  {"r", x, {T, H}, itself},
                  to_write("y", x, {T, H}),
                  to_write("rstd", DType::f32, {T}),
                  to_write("sum", x, {T, H})},
                 {0, 1, 2, 3},
                 {4, 5, 6},
                 {{Attr::eps, 1e-5}},
                 {}});
  out.push_back({OpKind::layer_norm_backward,
                 {{"dy", x, {T, H}, wave},
                  {"x", x, {T, H}, whole},
                  of_norm,
                  {"rstd", DType::f32, {T}, one},
                  to_write("dx", x, {T, H}),
                  to_write("dw", DType::f32, {H}),
                  to_write("db", DType::f32, {H})},
                 {0, 1, 2, 3},
                 {4, 5, 6},
                 {},
                 {}});
  out.push_back({OpKind::layer_norm_backward,
                 {{"dy", x, {T, H}, wave},
                  {"x", x, {T, H}, whole},
                  of_norm,
                  {"rstd", DType::f32, {T}, one},
                  to_write("dx", x, {T, H})},
                 {0, 1, 2, 3},
                 {4},
                 {},
                 {}});
  out.push_back({OpKind::qk_norm,
                 {{"x", x, {T, Q}, wave},
                  {"qw", x, {d}, one},
                  {"kw", x, {d}, one},
                  to_write("y", x, {T, Q}),
                  to_write("rstd", DType::f32, {T, a + k})},
                 {0, 1, 2},
                 {3, 4},
                 heads({{Attr::eps, 1e-5}}),
                 {}});
  out.push_back({OpKind::qk_norm_backward,
                 {{"dy", x, {T, Q}, wave},
                  {"x", x, {T, Q}, whole},
                  {"qw", x, {d}, one},
                  {"kw", x, {d}, one},
                  {"rstd", DType::f32, {T, a + k}, one},
                  to_write("dx", x, {T, Q}),
                  to_write("dqw", DType::f32, {d}),
                  to_write("dkw", DType::f32, {d})},
                 {0, 1, 2, 3, 4},
                 {5, 6, 7},
                 heads(),
                 {}});
}

void add_attention(std::vector<OpCase>& out, DType x) {
  const Operand qkv{"x", x, {T, Q}, wave}, cu{"cu_seqlens", DType::i32, {S + 1}, offsets};
  for (const OpKind kind : {OpKind::rope, OpKind::rope_backward})
    out.push_back(
        {kind, {qkv, {"positions", DType::i32, {T}, itself}}, {0, 1}, {0}, heads({{Attr::rope_theta, 1e4}}), {}});
  for (const OpKind kind : {OpKind::rope, OpKind::rope_backward})
    out.push_back({kind,
                   {qkv, {"positions", DType::i32, {T}, itself}},
                   {0, 1},
                   {0},
                   heads({{Attr::rope_theta, 1e4}, {Attr::rope_first, std::int64_t{2}}}),
                   {}});
  out.push_back({OpKind::attention,
                 {qkv, cu, to_write("o", x, {T, a * d}), to_write("lse", DType::f32, {T, a})},
                 {0, 1},
                 {2, 3},
                 heads(),
                 {}});
  out.push_back({OpKind::attention_backward,
                 {{"do", x, {T, a * d}, wave},
                  qkv,
                  {"o", x, {T, a * d}, wave},
                  {"lse", DType::f32, {T, a}, one},
                  cu,
                  to_write("dx", x, {T, Q})},
                 {0, 1, 2, 3, 4},
                 {5},
                 heads(),
                 {}});
  // Of one key alone, itself: its value.
  out.push_back({OpKind::attention,
                 {qkv, cu, to_write("o", x, {T, a * d}), to_write("lse", DType::f32, {T, a})},
                 {0, 1},
                 {2, 3},
                 heads({{Attr::window, std::int64_t{1}}, {Attr::scale, 0.25}, {Attr::softcap, 2.0}}),
                 [](const Values& v, std::int64_t i) {
                   const std::int64_t head = i % (a * d) / d / (a / k);
                   return v[0][static_cast<std::size_t>(i / (a * d) * Q + (a + k + head) * d + i % d)];
                 }});
  out.push_back({OpKind::attention_backward,
                 {{"do", x, {T, a * d}, wave},
                  qkv,
                  {"o", x, {T, a * d}, wave},
                  {"lse", DType::f32, {T, a}, one},
                  cu,
                  to_write("dx", x, {T, Q})},
                 {0, 1, 2, 3, 4},
                 {5},
                 heads({{Attr::window, std::int64_t{2}}, {Attr::scale, 0.25}, {Attr::softcap, 2.0}}),
                 {}});
  out.push_back({OpKind::attention_sinks,
                 {{"o", x, {T, a * d}, wave}, {"lse", DType::f32, {T, a}, one}, {"sinks", x, {a}, wave}},
                 {0, 1, 2},
                 {0, 1},
                 {},
                 {}});
  // Of a rank alone in its group, whose keys are all of them.
  out.push_back({OpKind::attention_sinks,
                 {{"o", x, {T, a * d}, wave}, {"lse", DType::f32, {T, a}, one}, {"lses", DType::f32, {1, T, a}, one}},
                 {0, 1, 2},
                 {0, 1},
                 {{Attr::ranks, std::int64_t{1}}},
                 {}});
  out.push_back({OpKind::attention_sinks_backward,
                 {{"do", x, {T, a * d}, wave},
                  {"o", x, {T, a * d}, wave},
                  {"lse", DType::f32, {T, a}, one},
                  {"sinks", x, {a}, wave},
                  to_write("dsinks", DType::f32, {a})},
                 {0, 1, 2, 3},
                 {4},
                 {},
                 {}});
  // Of a rank alone in its group: it has both halves of its sequences, of 2 tokens each.
  constexpr std::int64_t shared = 4;
  const Operand part{"x", x, {shared, Q}, wave}, kv{"kv", x, {1, shared, 2 * k * d}, wave},
      halves{"cu_seqlens", DType::i32, {S + 1}, [](std::int64_t i) { return 2.0 * static_cast<double>(i); }};
  const auto alone = heads({{Attr::ranks, std::int64_t{1}}});
  out.push_back({OpKind::take_kv,
                 {{"x", x, {T, Q}, whole}, to_write("kv", x, {T, 2 * k * d})},
                 {0},
                 {1},
                 heads(),
                 [](const Values& v, std::int64_t i) {
                   return v[0][static_cast<std::size_t>(i / (2 * k * d) * Q + a * d + i % (2 * k * d))];
                 }});
  for (const bool more : {false, true})
    out.push_back({OpKind::merge_qkv,
                   {{"dq", DType::f32, {T, a * d}, whole},
                    {"dkv", DType::f32, {T, 2 * k * d}, whole},
                    {"more", DType::f32, {T, 2 * k * d}, whole},
                    to_write("dx", x, {T, Q})},
                   more ? std::vector<std::size_t>{0, 1, 2} : std::vector<std::size_t>{0, 1},
                   {3},
                   heads(),
                   [more](const Values& v, std::int64_t i) {
                     const std::int64_t t = i / Q, c = i % Q;
                     if (c < a * d) return v[0][static_cast<std::size_t>(t * a * d + c)];
                     const auto at = static_cast<std::size_t>(t * 2 * k * d + c - a * d);
                     return v[1][at] + (more ? v[2][at] : 0.0);
                   }});
  out.push_back(
      {OpKind::context_attention,
       {part, kv, halves, to_write("o", DType::f32, {shared, a * d}), to_write("lse", DType::f32, {shared, a})},
       {0, 1, 2},
       {3, 4},
       alone,
       {}});
  out.push_back({OpKind::context_attention_backward,
                 {{"do", x, {shared, a * d}, wave},
                  part,
                  kv,
                  {"o", x, {shared, a * d}, wave},
                  {"lse", DType::f32, {shared, a}, one},
                  halves,
                  to_write("dq", DType::f32, {shared, a * d}),
                  to_write("dkv", DType::f32, {1, shared, 2 * k * d})},
                 {0, 1, 2, 3, 4, 5},
                 {6, 7},
                 alone,
                 {}});
  const std::vector<std::int64_t> pool = {blocks, 2 * k, block_tokens * d};
  out.push_back({OpKind::kv_write,
                 {qkv, {"kv_slots", DType::i32, {T}, itself}, {"pool", x, pool, none}},
                 {0, 1},
                 {2},
                 heads({{Attr::block_tokens, block_tokens}}),
                 {}});
  out.push_back({OpKind::paged_attention,
                 {qkv,
                  {"pool", x, pool, wave},
                  cu,
                  {"tables", DType::i32, {S, max_blocks}, itself},
                  {"lengths", DType::i32, {S}, [](std::int64_t i) { return i == 0 ? 3.0 : 2.0; }},
                  to_write("o", x, {T, a * d})},
                 {0, 1, 2, 3, 4},
                 {5},
                 heads({{Attr::block_tokens, block_tokens}, {Attr::max_blocks, max_blocks}}),
                 {}});
  // Of each row's own key alone, with log-sum-exps.
  out.push_back(
      {OpKind::paged_attention,
       {qkv,
        {"pool", x, pool, wave},
        cu,
        {"tables", DType::i32, {S, max_blocks}, itself},
        {"lengths", DType::i32, {S}, [](std::int64_t i) { return i == 0 ? 3.0 : 2.0; }},
        to_write("o", x, {T, a * d}),
        to_write("lse", DType::f32, {T, a})},
       {0, 1, 2, 3, 4},
       {5, 6},
       heads({{Attr::block_tokens, block_tokens}, {Attr::max_blocks, max_blocks}, {Attr::window, std::int64_t{1}}}),
       [](const Values& v, std::int64_t i) {
         const std::int64_t t = i / (a * d), head = i % (a * d) / d / (a / k);
         const std::int64_t position = t < 3 ? t : t - 3, block = t < 3 ? 0 : max_blocks;
         const std::int64_t row = ((2 * block + 1) * k + head) * block_tokens + position;
         return v[1][static_cast<std::size_t>(row * d + i % d)];
       }});
  // The same where sequences have two rows each, and the last row is nobody's.
  out.push_back(
      {OpKind::paged_attention,
       {qkv,
        {"pool", x, pool, wave},
        {"cu_seqlens", DType::i32, {S + 1}, [](std::int64_t i) { return 2.0 * static_cast<double>(i); }},
        {"tables", DType::i32, {S, max_blocks}, itself},
        {"lengths", DType::i32, {S}, [](std::int64_t) { return 2.0; }},
        to_write("o", x, {T, a * d})},
       {0, 1, 2, 3, 4},
       {5},
       heads({{Attr::block_tokens, block_tokens}, {Attr::max_blocks, max_blocks}, {Attr::window, std::int64_t{1}}}),
       [](const Values& v, std::int64_t i) {
         const std::int64_t t = i / (a * d), head = i % (a * d) / d / (a / k);
         if (t >= 2 * S) return 0.0;
         const std::int64_t row = ((2 * (t / 2 * max_blocks) + 1) * k + head) * block_tokens + t % 2;
         return v[1][static_cast<std::size_t>(row * d + i % d)];
       }});
}

void add_activations(std::vector<OpCase>& out, DType x) {
  const std::vector<std::pair<Attr, AttrValue>> vocabulary = {{Attr::vocab_begin, std::int64_t{0}},
                                                              {Attr::vocab_end, V}};
  out.push_back({OpKind::swiglu, {{"gate_up", x, {T, 2 * I}, wave}, to_write("act", x, {T, I})}, {0}, {1}, {}, {}});
  out.push_back({OpKind::swiglu_backward,
                 {{"dact", x, {T, I}, wave}, {"gate_up", x, {T, 2 * I}, wave}, to_write("dgate_up", x, {T, 2 * I})},
                 {0, 1},
                 {2},
                 {},
                 {}});
  const std::vector<std::pair<Attr, AttrValue>> clamps = {{Attr::limit, 0.5}, {Attr::alpha, 1.702}};
  out.push_back(
      {OpKind::clamped_swiglu, {{"gate_up", x, {T, 2 * I}, wave}, to_write("act", x, {T, I})}, {0}, {1}, clamps, {}});
  out.push_back({OpKind::clamped_swiglu_backward,
                 {{"dact", x, {T, I}, wave}, {"gate_up", x, {T, 2 * I}, wave}, to_write("dgate_up", x, {T, 2 * I})},
                 {0, 1},
                 {2},
                 clamps,
                 {}});
  out.push_back({OpKind::geglu, {{"gate_up", x, {T, 2 * I}, wave}, to_write("act", x, {T, I})}, {0}, {1}, {}, {}});
  out.push_back({OpKind::geglu_backward,
                 {{"dact", x, {T, I}, wave}, {"gate_up", x, {T, 2 * I}, wave}, to_write("dgate_up", x, {T, 2 * I})},
                 {0, 1},
                 {2},
                 {},
                 {}});
  out.push_back({OpKind::gelu, {{"x", x, {T, I}, wave}, to_write("y", x, {T, I})}, {0}, {1}, {}, {}});
  out.push_back({OpKind::gelu_backward,
                 {{"dy", x, {T, I}, wave}, {"x", x, {T, I}, wave}, to_write("dx", x, {T, I})},
                 {0, 1},
                 {2},
                 {},
                 {}});
  out.push_back({OpKind::add_bias,
                 {{"x", x, {T, H}, whole}, {"b", x, {H}, itself}},
                 {0, 1},
                 {0},
                 {},
                 [](const Values& v, std::int64_t i) {
                   return v[0][static_cast<std::size_t>(i)] + v[1][static_cast<std::size_t>(i % H)];
                 }});
  out.push_back({OpKind::softcap, {{"x", DType::f32, {T, V}, wave}}, {0}, {0}, {{Attr::softcap, 2.0}}, {}});
  out.push_back({OpKind::embedding,
                 {{"table", x, {V, H}, whole}, {"ids", DType::i32, {T}, ids}, to_write("y", x, {T, H})},
                 {0, 1},
                 {2},
                 vocabulary,
                 [](const Values& v, std::int64_t i) {
                   return v[0][static_cast<std::size_t>(v[1][static_cast<std::size_t>(i / H)]) * H + i % H];
                 }});
  std::vector<std::pair<Attr, AttrValue>> times = vocabulary;
  times.emplace_back(Attr::factor, 3.0);
  out.push_back({OpKind::embedding,
                 {{"table", x, {V, H}, whole}, {"ids", DType::i32, {T}, ids}, to_write("y", x, {T, H})},
                 {0, 1},
                 {2},
                 times,
                 [](const Values& v, std::int64_t i) {
                   return 3.0 * v[0][static_cast<std::size_t>(v[1][static_cast<std::size_t>(i / H)]) * H + i % H];
                 }});
  out.push_back({OpKind::embedding_backward,
                 {{"ids", DType::i32, {T}, ids}, {"dy", x, {T, H}, whole}, {"dtable", DType::f32, {V, H}, none}},
                 {0, 1},
                 {2},
                 vocabulary,
                 {}});
}

// E experts, of which each token takes C: R rows.
constexpr std::int64_t E = 3, C = 2, R = T * C;
/// A permutation of the rows: where choice i's row lies.
double row_of(std::int64_t i) { return static_cast<double>(i * 3 % R); }
std::int64_t choice_at(std::int64_t row) { return row * 7 % R; }  // 3 · 7 = 1 (mod 10)
/// Three rows of expert 0, none of expert 1, the others of expert 2.
double bounds(std::int64_t i) { return i == 0 ? 0.0 : i == E ? static_cast<double>(R) : 3.0; }

void add_routing(std::vector<OpCase>& out) {
  constexpr DType f = DType::f32, n = DType::i32;
  const Operand chosen{"experts", n, {T, C}, [](std::int64_t i) { return static_cast<double>((i + i / C) % E); }};
  for (const std::int64_t renormalise : {0, 1}) {
    out.push_back({OpKind::route,
                   {{"logits", f, {T, E}, wave}, to_write("weights", f, {T, C}), to_write("experts", n, {T, C})},
                   {0},
                   {1, 2},
                   {{Attr::renormalise, renormalise}},
                   {}});
    out.push_back({OpKind::route_backward,
                   {{"dweights", f, {T, C}, wave}, {"logits", f, {T, E}, wave}, chosen, to_write("dlogits", f, {T, E})},
                   {0, 1, 2},
                   {3},
                   {{Attr::renormalise, renormalise}},
                   {}});
  }
  // As DeepSeek-V2 and V3 route: of six experts in three groups, of which two are taken.
  constexpr std::int64_t six = 6;
  const Operand logits_of_six{"logits", f, {T, six}, wave};
  const Operand chosen_of_six{
      "experts", n, {T, C}, [](std::int64_t i) { return static_cast<double>((i + i / C) % six); }};
  for (const std::int64_t sigmoid : {0, 1}) {
    const std::vector<std::pair<Attr, AttrValue>> attrs = {{Attr::renormalise, sigmoid},
                                                           {Attr::sigmoid, sigmoid},
                                                           {Attr::groups, std::int64_t{3}},
                                                           {Attr::taken_groups, std::int64_t{2}},
                                                           {Attr::factor, 2.5}};
    out.push_back(
        {OpKind::route,
         {logits_of_six, {"bias", f, {six}, wave}, to_write("weights", f, {T, C}), to_write("experts", n, {T, C})},
         sigmoid != 0 ? std::vector<std::size_t>{0, 1} : std::vector<std::size_t>{0},
         {2, 3},
         attrs,
         {}});
    out.push_back({OpKind::route_backward,
                   {{"dweights", f, {T, C}, wave}, logits_of_six, chosen_of_six, to_write("dlogits", f, {T, six})},
                   {0, 1, 2},
                   {3},
                   attrs,
                   {}});
  }
  out.push_back({OpKind::expert_sort,
                 {chosen, to_write("rows", n, {T, C}), to_write("offsets", n, {E + 1})},
                 {0},
                 {1, 2},
                 {},
                 [](const Values& v, std::int64_t i) {  // those of earlier experts, and earlier ones of the same
                   double row = 0;
                   for (std::size_t j = 0; j < v[0].size(); ++j)
                     if (const double of = v[0][static_cast<std::size_t>(i)];
                         v[0][j] < of || (v[0][j] == of && j < static_cast<std::size_t>(i)))
                       ++row;
                   return row;
                 },
                 {},
                 {{0, 5, 10, 10}}});  // of each token one choice is expert 0, and one expert 1
}

/// Two sequences, and a token of none.
void add_router_losses(std::vector<OpCase>& out, DType x) {
  constexpr DType f = DType::f32, n = DType::i32;
  const Operand sequences{"sequences", n, {T}, [](std::int64_t t) { return t + 1 == T ? -1.0 : t < 2 ? 0.0 : 1.0; }};
  const auto chosen = [](std::int64_t i) { return static_cast<double>((i + i / C) % E); };
  out.push_back({OpKind::expert_counts,
                 {{"experts", n, {T, C}, chosen}, sequences, to_write("counts", f, {S, E})},
                 {0, 1},
                 {2},
                 {},
                 [](const Values& v, std::int64_t i) {
                   double count = 0;
                   for (std::size_t c = 0; c < v[0].size(); ++c)
                     if (v[1][c / C] == static_cast<double>(i / E) && v[0][c] == static_cast<double>(i % E)) ++count;
                   return count;
                 }});
  // Equal logits, of which each token's expert e gets the gradient w (count - mean of counts).
  for (const std::int64_t sigmoid : {0, 1})
    out.push_back({OpKind::router_loss,
                   {{"dlogits", x, {T, E}, whole},
                    {"logits", f, {T, E}, none},
                    {"counts", f, {S, E}, [](std::int64_t i) { return static_cast<double>(i % E + i / E) + 1.0; }},
                    sequences,
                    {"weights", f, {T}, [](std::int64_t t) { return static_cast<double>(2 * t); }},
                    {"metrics", f, {16}, none}},
                   {0, 1, 2, 3, 4},
                   {0, 5},
                   {{Attr::factor, 1.0}, {Attr::z_factor, 0.0}, {Attr::top_k, C}, {Attr::sigmoid, sigmoid}},
                   [sigmoid](const Values& v, std::int64_t i) {
                     const std::int64_t t = i / E;
                     const double slope = sigmoid != 0 ? 0.5 : 1.0, before = v[0][static_cast<std::size_t>(i)];
                     return t + 1 == T ? before : before + slope * static_cast<double>(2 * t * (i % E - 1));
                   }});
}

/// To three ranks, with an expert each; and of one rank, whose tokens have two rows each.
void add_copies(std::vector<OpCase>& out) {
  constexpr DType n = DType::i32;
  constexpr std::int64_t W = 3;
  // Rows below 3 are for the first rank, the others for the third: of five tokens three have some for both.
  out.push_back({OpKind::copy_sort,
                 {{"rows", n, {T, C}, row_of},
                  {"sent", n, {E + 1}, bounds},
                  to_write("tokens", n, {T * C}),
                  to_write("copies", n, {T, C}),
                  to_write("slots", n, {T, C, 1}),
                  to_write("blocks", n, {W + 1}),
                  to_write("count", DType::i64, {1})},
                 {0, 1},
                 {2, 3, 4, 5, 6},
                 {},
                 [](const Values&, std::int64_t i) {
                   return std::array{0., 2., 3., 0., 1., 2., 3., 4., -1., -1.}[static_cast<std::size_t>(i)];
                 },
                 {},
                 // Copies of each token in the order of its rows, 0 3 | 6 9 | 2 5 | 8 1 | 4 7; and of each row, which
                 // of its rank's copies it is of.
                 {{0, 3, 4, -1, 1, 5, 6, 2, 7, -1}, {0, 2, 1, 0, 4, 2, 1, 4, 3, 1}, {0, 3, 3, 8}, {8}}});
  const auto slot = [](std::int64_t i) {
    return std::array{0., 1., 2., 4., 1., 3., 0., 2., 3., 4.}[static_cast<std::size_t>(i)];
  };
  const auto segment = [](std::int64_t i) { return std::array{0., 4., 6., 10.}[static_cast<std::size_t>(i)]; };
  out.push_back({OpKind::copy_arrivals,
                 {{"blocks", n, {1, 2}, [](std::int64_t i) { return i == 0 ? 0.0 : static_cast<double>(T); }},
                  {"slots", n, {R, 1}, slot},
                  {"arrivals", n, {E + 1}, segment},
                  to_write("sources", n, {R}),
                  to_write("rows", n, {T, C}),
                  to_write("count", DType::i64, {1})},
                 {0, 1, 2},
                 {3, 4, 5},
                 {},
                 [](const Values& v, std::int64_t i) { return v[1][static_cast<std::size_t>(i)]; },
                 {},
                 {{0, 6, 1, 4, 2, 7, 5, 8, 3, 9}, {5}}});  // each token's rows
}

/// Of one rank: what it sends is what comes.
void add_arrivals(std::vector<OpCase>& out) {
  out.push_back({OpKind::expert_arrivals,
                 {{"offsets", DType::i32, {1, E + 1}, bounds},
                  to_write("arrivals", DType::i32, {E + 1}),
                  to_write("count", DType::i64, {1})},
                 {0},
                 {1, 2},
                 {},
                 [](const Values& v, std::int64_t i) { return v[0][static_cast<std::size_t>(i)]; },
                 {},
                 {{R}}});
}

void add_experts(std::vector<OpCase>& out, DType x) {
  const Operand rows{"rows", DType::i32, {T, C}, row_of}, offsets_of{"offsets", DType::i32, {E + 1}, bounds};
  const Operand weights{"weights", DType::f32, {T, C}, whole};
  out.push_back({OpKind::dispatch,
                 {{"x", x, {T, H}, whole}, rows, to_write("y", x, {T, C, H})},
                 {0, 1},
                 {2},
                 {},
                 [](const Values& v, std::int64_t i) {
                   return v[0][static_cast<std::size_t>(choice_at(i / H) / C * H + i % H)];
                 }});
  out.push_back({OpKind::dispatch_backward,
                 {{"dy", x, {T, C, H}, whole}, rows, to_write("dx", x, {T, H})},
                 {0, 1},
                 {2},
                 {},
                 [](const Values& v, std::int64_t i) {
                   double sum = 0;
                   for (std::int64_t j = 0; j < C; ++j)
                     sum += v[0][static_cast<std::size_t>(row_of(i / H * C + j)) * H + static_cast<std::size_t>(i % H)];
                   return sum;
                 }});
  // Rows of any number, of which some take one.
  out.push_back({OpKind::dispatch_backward,
                 {{"dy", x, {R, H}, whole},
                  {"rows", DType::i32, {T, C}, [](std::int64_t i) { return i % 4 == 3 ? -1.0 : row_of(i); }},
                  {"dx", x, {T, H}, whole}},
                 {0, 1},
                 {2},
                 {{Attr::accumulate, std::int64_t{1}}},
                 [](const Values& v, std::int64_t i) {
                   double sum = v[2][static_cast<std::size_t>(i)];
                   for (std::int64_t j = 0; j < C; ++j)
                     if (const double row = v[1][static_cast<std::size_t>(i / H * C + j)]; row >= 0)
                       sum += v[0][static_cast<std::size_t>(row) * H + static_cast<std::size_t>(i % H)];
                   return sum;
                 }});
  for (const bool on_base : {false, true})
    out.push_back({OpKind::combine,
                   {{"y", x, {T, C, H}, whole}, rows, weights, {"base", x, {T, H}, itself}, to_write("z", x, {T, H})},
                   on_base ? std::vector<std::size_t>{0, 1, 2, 3} : std::vector<std::size_t>{0, 1, 2},
                   {4},
                   {},
                   [on_base](const Values& v, std::int64_t i) {
                     double sum = on_base ? v[3][static_cast<std::size_t>(i)] : 0.0;
                     for (std::int64_t j = i / H * C; j < (i / H + 1) * C; ++j)
                       sum += v[2][static_cast<std::size_t>(j)] *
                              v[0][static_cast<std::size_t>(row_of(j)) * H + static_cast<std::size_t>(i % H)];
                     return sum;
                   }});
  out.push_back({OpKind::combine_backward,
                 {{"dz", x, {T, H}, whole},
                  {"y", x, {T, C, H}, wave},
                  rows,
                  weights,
                  to_write("dy", x, {T, C, H}),
                  to_write("dweights", DType::f32, {T, C})},
                 {0, 1, 2, 3},
                 {4, 5},
                 {},
                 [](const Values& v, std::int64_t i) {
                   const std::int64_t choice = choice_at(i / H);
                   return v[3][static_cast<std::size_t>(choice)] *
                          v[0][static_cast<std::size_t>(choice / C * H + i % H)];
                 }});
  // Between them, over rows of two dimensions.
  out.push_back({OpKind::swiglu,
                 {{"gate_up", x, {T, C, 2 * I}, [](std::int64_t i) { return i % (2 * I) < I ? 0.0 : whole(i); }},
                  to_write("act", x, {T, C, I})},
                 {0},
                 {1},
                 {},
                 [](const Values&, std::int64_t) { return 0.0; }});
  out.push_back(
      {OpKind::swiglu_backward,
       {{"dact", x, {T, C, I}, whole}, {"gate_up", x, {T, C, 2 * I}, wave}, to_write("dgate_up", x, {T, C, 2 * I})},
       {0, 1},
       {2},
       {},
       {}});
  out.push_back({OpKind::grouped_linear,
                 {{"x", x, {T, C, H}, whole}, {"w", x, {E * I, H}, whole}, offsets_of, to_write("y", x, {T, C, I})},
                 {0, 1, 2},
                 {3},
                 {},
                 [](const Values& v, std::int64_t i) {
                   const std::int64_t row = i / I, expert = row < 3 ? 0 : 2;
                   double sum = 0;
                   for (std::int64_t h = 0; h < H; ++h)
                     sum += v[0][static_cast<std::size_t>(row * H + h)] *
                            v[1][static_cast<std::size_t>((expert * I + i % I) * H + h)];
                   return sum;
                 }});
  out.push_back({OpKind::grouped_linear,
                 {{"x", x, {T, C, H}, whole},
                  {"w", x, {E * I, H}, whole},
                  offsets_of,
                  {"b", x, {E * I}, whole},
                  to_write("y", x, {T, C, I})},
                 {0, 1, 2, 3},
                 {4},
                 {},
                 [](const Values& v, std::int64_t i) {
                   const std::int64_t row = i / I, expert = row < 3 ? 0 : 2;
                   double sum = v[3][static_cast<std::size_t>(expert * I + i % I)];
                   for (std::int64_t h = 0; h < H; ++h)
                     sum += v[0][static_cast<std::size_t>(row * H + h)] *
                            v[1][static_cast<std::size_t>((expert * I + i % I) * H + h)];
                   return sum;
                 }});
  out.push_back({OpKind::grouped_linear_dgrad,
                 {{"dy", x, {T, C, I}, whole}, {"w", x, {E * I, H}, whole}, offsets_of, to_write("dx", x, {T, C, H})},
                 {0, 1, 2},
                 {3},
                 {},
                 {}});
  out.push_back(
      {OpKind::grouped_linear_wgrad,
       {{"dy", x, {T, C, I}, whole}, {"x", x, {T, C, H}, whole}, offsets_of, to_write("dw", DType::f32, {E * I, H})},
       {0, 1, 2},
       {3},
       {},
       {}});
}

/// Latents of r numbers and a rotated part of t, heads of d whose last t numbers turn, values of v.
void add_latent(std::vector<OpCase>& out, DType x) {
  static constexpr std::int64_t r = 6, t = 2, v = 4, of_kv = a * (d - t + v), packed = a * (2 * d + v);
  const auto latent = [](std::vector<std::pair<Attr, AttrValue>> more = {}) {
    more.insert(
        more.end(),
        {{Attr::heads, a}, {Attr::kv_heads, a}, {Attr::head_dim, d}, {Attr::value_dim, v}, {Attr::rope_dim, t}});
    return more;
  };
  const auto rotary = latent({{Attr::eps, 1e-6}, {Attr::rope_theta, 1e4}});
  const Operand positions{"positions", DType::i32, {T}, itself}, w{"w", x, {r}, one}, kv_a{"x", x, {T, r + t}, wave};
  for (const OpKind kind : {OpKind::rope, OpKind::rope_backward})
    out.push_back({kind, {{"q", x, {T, a * d}, wave}, positions}, {0, 1}, {0}, rotary, {}});
  out.push_back(
      {OpKind::latent_norm,
       {kv_a, w, positions, to_write("c", x, {T, r}), to_write("s", x, {T, t}), to_write("rstd", DType::f32, {T})},
       {0, 1, 2},
       {3, 4, 5},
       rotary,
       {}});
  OpCase backward{OpKind::latent_norm_backward,
                  {{"dc", x, {T, r}, wave},
                   {"ds", x, {T, t}, wave},
                   kv_a,
                   w,
                   {"rstd", DType::f32, {T}, one},
                   positions,
                   to_write("dx", x, {T, r + t})},
                  {0, 1, 2, 3, 4, 5},
                  {6},
                  rotary,
                  {}};
  out.push_back(backward);  // of a frozen weight, which has no gradient
  backward.operands.push_back(to_write("dw", DType::f32, {r}));
  backward.outputs.push_back(7);
  out.push_back(std::move(backward));
  out.push_back({OpKind::latent_heads,
                 {{"q", x, {T, a * d}, whole},
                  {"kv", x, {T, of_kv}, whole},
                  {"s", x, {T, t}, whole},
                  to_write("x", x, {T, packed})},
                 {0, 1, 2},
                 {3},
                 latent(),
                 [](const Values& in, std::int64_t i) {
                   const std::int64_t row = i / packed, c = i % packed, key = c - a * d, value = key - a * d;
                   if (key < 0) return in[0][static_cast<std::size_t>(row * a * d + c)];
                   if (value >= 0)
                     return in[1][static_cast<std::size_t>(row * of_kv + value / v * (d - t + v) + d - t + value % v)];
                   if (key % d >= d - t) return in[2][static_cast<std::size_t>(row * t + key % d - (d - t))];
                   return in[1][static_cast<std::size_t>(row * of_kv + key / d * (d - t + v) + key % d)];
                 }});
  out.push_back({OpKind::latent_heads_backward,
                 {{"dx", x, {T, packed}, whole},
                  to_write("ds", x, {T, t}),
                  to_write("dq", x, {T, a * d}),
                  to_write("dkv", x, {T, of_kv})},
                 {0},
                 {2, 3, 1},
                 latent(),
                 [](const Values& in, std::int64_t i) {
                   return in[0][static_cast<std::size_t>(i / (a * d) * packed + i % (a * d))];
                 }});
  for (const std::int64_t v_dim : {v, 3 * d / 2}) {  // values narrower than keys, and wider
    const std::vector<std::pair<Attr, AttrValue>> attrs = {
        {Attr::heads, a}, {Attr::kv_heads, k}, {Attr::head_dim, d}, {Attr::value_dim, v_dim}};
    const Operand qkv{"x", x, {T, (a + k) * d + k * v_dim}, wave}, cu{"cu_seqlens", DType::i32, {S + 1}, offsets};
    out.push_back({OpKind::attention,
                   {qkv, cu, to_write("o", x, {T, a * v_dim}), to_write("lse", DType::f32, {T, a})},
                   {0, 1},
                   {2, 3},
                   attrs,
                   {}});
    out.push_back({OpKind::attention_backward,
                   {{"do", x, {T, a * v_dim}, wave},
                    qkv,
                    {"o", x, {T, a * v_dim}, wave},
                    {"lse", DType::f32, {T, a}, one},
                    cu,
                    to_write("dx", x, {T, (a + k) * d + k * v_dim})},
                   {0, 1, 2, 3, 4},
                   {5},
                   attrs,
                   {}});
  }
  const Operand pool{"pool", x, {blocks, block_tokens, r + t}, wave};
  out.push_back(
      {OpKind::latent_write,
       {{"c", x, {T, r}, whole},
        {"s", x, {T, t}, whole},
        {"kv_slots", DType::i32, {T}, [](std::int64_t i) { return i == 2 ? -1.0 : static_cast<double>(3 * i); }},
        pool},
       {0, 1, 2},
       {3},
       {{Attr::block_tokens, block_tokens}},
       [](const Values& in, std::int64_t i) {
         const std::int64_t slot = i / (r + t), c = i % (r + t), token = slot / 3;
         if (slot % 3 != 0 || token >= T || token == 2) return in[3][static_cast<std::size_t>(i)];
         return c < r ? in[0][static_cast<std::size_t>(token * r + c)]
                      : in[1][static_cast<std::size_t>(token * t + c - r)];
       }});
  out.push_back({OpKind::latent_attention,
                 {{"q", x, {T, a * d}, wave},
                  pool,
                  {"w", x, {of_kv, r}, wave},
                  {"cu_seqlens", DType::i32, {S + 1}, offsets},
                  {"tables", DType::i32, {S, max_blocks}, itself},
                  {"lengths", DType::i32, {S}, [](std::int64_t i) { return i == 0 ? 4.0 : 6.0; }},
                  to_write("o", x, {T, a * v})},
                 {0, 1, 2, 3, 4, 5},
                 {6},
                 latent({{Attr::block_tokens, block_tokens}}),
                 {}});
  // The same of two rows each, behind which one is nobody's.
  out.push_back({OpKind::latent_attention,
                 {{"q", x, {T, a * d}, wave},
                  pool,
                  {"w", x, {of_kv, r}, wave},
                  {"cu_seqlens", DType::i32, {S + 1}, [](std::int64_t i) { return 2.0 * static_cast<double>(i); }},
                  {"tables", DType::i32, {S, max_blocks}, itself},
                  {"lengths", DType::i32, {S}, [](std::int64_t i) { return i == 0 ? 4.0 : 6.0; }},
                  to_write("o", x, {T, a * v})},
                 {0, 1, 2, 3, 4, 5},
                 {6},
                 latent({{Attr::block_tokens, block_tokens}}),
                 {}});
  // Of contexts so long that a backend which makes keys and values of them may take one sequence after another.
  constexpr std::int64_t far = 100000;
  out.push_back({OpKind::latent_attention,
                 {{"q", x, {T, a * d}, wave},
                  pool,
                  {"w", x, {of_kv, r}, wave},
                  {"cu_seqlens", DType::i32, {S + 1}, offsets},
                  {"tables", DType::i32, {S, far}, [](std::int64_t i) { return static_cast<double>(i % blocks); }},
                  {"lengths", DType::i32, {S}, [](std::int64_t i) { return i == 0 ? 4.0 : 6.0; }},
                  to_write("o", x, {T, a * v})},
                 {0, 1, 2, 3, 4, 5},
                 {6},
                 latent({{Attr::block_tokens, block_tokens}}),
                 {}});
}

void add_loss_and_optimizer(std::vector<OpCase>& out) {
  constexpr DType f = DType::f32;
  const Operand logits{"logits", f, {T, V}, wave}, targets{"targets", DType::i32, {T}, ids};
  const std::vector<std::pair<Attr, AttrValue>> softmax = {{Attr::vocab, V}, {Attr::temperature, 1.0}};
  out.push_back({OpKind::log_prob,
                 {logits, targets, to_write("logp", f, {T}), to_write("lse", f, {T}), to_write("entropy", f, {T})},
                 {0, 1},
                 {2, 3, 4},
                 softmax,
                 {}});
  out.push_back({OpKind::log_prob_backward,
                 {logits, {"lse", f, {T}, one}, targets, {"dlogp", f, {T}, wave}, to_write("dlogits", f, {T, V})},
                 {0, 1, 2, 3},
                 {4},
                 softmax,
                 {}});
  std::vector<std::pair<Attr, AttrValue>> capped = softmax;
  capped.emplace_back(Attr::softcap, 2.0);
  out.push_back({OpKind::log_prob_backward,
                 {logits, {"lse", f, {T}, one}, targets, {"dlogp", f, {T}, wave}, to_write("dlogits", f, {T, V})},
                 {0, 1, 2, 3},
                 {4},
                 capped,
                 {}});
  std::vector<std::pair<Attr, AttrValue>> part = softmax;
  part.insert(part.end(),
              {{Attr::vocab_begin, std::int64_t{0}}, {Attr::vocab_end, V}, {Attr::vocab_stride, std::int64_t{V}}});
  out.push_back({OpKind::vocab_stats, {logits, targets, to_write("stats", f, {T, 4})}, {0, 1}, {2}, part, {}});
  out.push_back({OpKind::log_prob_backward,
                 {logits, {"lse", f, {T}, one}, targets, {"dlogp", f, {T}, wave}, to_write("dlogits", f, {T, V})},
                 {0, 1, 2, 3},
                 {4},
                 part,
                 {}});
  out.push_back({OpKind::vocab_log_prob,
                 {{"stats", f, {2, T, 4}, one},
                  targets,
                  to_write("logp", f, {T}),
                  to_write("lse", f, {T}),
                  to_write("entropy", f, {T})},
                 {0, 1},
                 {2, 3, 4},
                 {{Attr::temperature, 1.0}},
                 {}});
  out.push_back({OpKind::token_loss,
                 {{"new", f, {T}, wave},
                  {"old", f, {T}, wave},
                  {"ref", f, {T}, wave},
                  {"advantage", f, {T}, whole},
                  {"weight", f, {T}, one},
                  {"entropy", f, {T}, one},
                  to_write("dlogp", f, {T}),
                  {"metrics", f, {16}, none}},
                 {0, 1, 2, 3, 4, 5},
                 {6, 7},
                 {{Attr::clip_low, 0.2}, {Attr::clip_high, 0.2}, {Attr::kl_coef, 0.0}, {Attr::sft, std::int64_t{0}}},
                 {}});
  out.push_back({OpKind::sum_squares,
                 {{"x", f, {T * H}, whole}, to_write("s", f, {1})},
                 {0},
                 {1},
                 {},
                 [](const Values& v, std::int64_t) {
                   double sum = 0;
                   for (const double x : v[0]) sum += x * x;
                   return sum;
                 }});
  out.push_back({OpKind::clip_coefficient,
                 {{"s", f, {1}, [](std::int64_t) { return 16.0; }}, to_write("c", f, {1}), {"metrics", f, {16}, none}},
                 {0},
                 {1, 2},
                 {{Attr::max_norm, 8.0}},
                 [](const Values&, std::int64_t) { return 1.0; }});  // √16 is below 8
  out.push_back({OpKind::adamw,
                 {{"g", f, {H}, wave},
                  {"lr", f, {2}, [](std::int64_t i) { return i == 0 ? 1e-3 : 1.0; }},
                  {"c", f, {1}, one},
                  {"p", f, {H}, whole},
                  {"m", f, {H}, none},
                  {"v", f, {H}, none}},
                 {0, 1, 2},
                 {3, 4, 5},
                 {{Attr::beta1, 0.9}, {Attr::beta2, 0.999}, {Attr::eps, 1e-8}, {Attr::weight_decay, 0.0}},
                 {}});
  out.push_back({OpKind::sample,
                 {{"logits", f, {1, S, V}, wave},
                  {"uniforms", f, {S}, [](std::int64_t) { return 0.5; }},
                  to_write("ids", DType::i32, {S}),
                  to_write("logp", f, {S})},
                 {0, 1},
                 {2, 3},
                 {{Attr::vocab, V},
                  {Attr::tp, std::int64_t{1}},
                  {Attr::temperature, 1.0},
                  {Attr::top_k, std::int64_t{0}},
                  {Attr::top_p, 1.0}},
                 {}});
}

/// Operands that are gradients of weights, of ops that make or read them.
std::vector<std::size_t> gradients_of(const OpCase& c) {
  const std::size_t first = c.outputs.empty() ? 0 : c.outputs.front();
  switch (c.kind) {
    case OpKind::adamw:
    case OpKind::sum_squares:
      return {c.inputs.front()};
    case OpKind::linear_wgrad:
    case OpKind::lora_up_wgrad:
    case OpKind::grouped_linear_wgrad:
    case OpKind::embedding_backward:
    case OpKind::attention_sinks_backward:
      return c.outputs;
    case OpKind::rms_norm_backward:
    case OpKind::layer_norm_backward:
    case OpKind::qk_norm_backward:
    case OpKind::latent_norm_backward: {
      std::vector<std::size_t> weights = c.outputs;
      std::erase(weights, first);
      return weights;
    }
    default:
      return {};
  }
}

/// The same cases once more where gradients of bf16 weights are bf16.
void add_bf16_gradients(std::vector<OpCase>& out) {
  std::vector<OpCase> more;
  for (const OpCase& c : out) {
    const std::vector<std::size_t> gradients = gradients_of(c);
    if (gradients.empty()) continue;
    more.push_back(c);
    for (const std::size_t i : gradients) more.back().operands[i].dtype = DType::bf16;
  }
  out.insert(out.end(), more.begin(), more.end());
}

}  // namespace

double stored(DType dtype, double x) {
  const auto f = static_cast<float>(x);
  return dtype == DType::bf16 ? to_f32(to_bf16(f)) : f;
}

std::optional<std::size_t> prepacked_operand(const OpCase& c) {
  for (const auto& [attr, value] : c.attrs)
    if (attr == Attr::prepacked) return c.inputs.at(1);
  return std::nullopt;
}

std::vector<OpCase> op_cases(DType activations) {
  std::vector<OpCase> out;
  add_data(out, activations);
  add_linear(out, activations);
  add_prepacked(out, activations);
  add_fused(out, activations);
  add_lora(out, activations);
  add_head_parts(out, activations);
  add_norms(out, activations);
  add_attention(out, activations);
  add_activations(out, activations);
  add_routing(out);
  add_copies(out);
  add_router_losses(out, activations);
  add_arrivals(out);
  add_experts(out, activations);
  add_latent(out, activations);
  add_loss_and_optimizer(out);
  if (activations == DType::bf16) add_bf16_gradients(out);
  return out;
}

}  // namespace hotbunk::conformance
