#include "graph/catalogue.h"

#include <catch2/catch.hpp>
#include <limits>

#include "programs.h"
#include "tests/moves.h"

using namespace hotbunk;
using namespace hotbunk::test;

namespace {

// Capacity 8 tokens and 4 sequences; a run with 5 tokens in 2 sequences of 2 and 3: pairs 1+2 + 1+2+3 = 9.
const Sizes run{.tokens = 5, .seqs = 2, .attention_pairs = 9};
const Places here = {0};  // the first of its group
constexpr DType bf16_type = DType::bf16, fp32_type = DType::f32, int32_type = DType::i32;

Op with_heads(Op o) {  // 4 query heads, 2 KV heads of 6: Q = (4 + 2*2) * 6 = 48
  o.attrs = {{Attr::heads, std::int64_t{4}}, {Attr::kv_heads, std::int64_t{2}}, {Attr::head_dim, std::int64_t{6}}};
  return o;
}

Program one_buffer(std::int64_t elements) {
  Program p = test::empty_program();
  p.buffers = {scratch("x", elements)};
  return p;
}

}  // namespace

TEST_CASE("A dimension's extent follows the sizes of the run from its begin on") {
  CHECK(fixed(7).actual(run) == 7);
  CHECK(tokens(8).actual(run) == 5);
  CHECK(tokens(3).actual(run) == 3);     // never more than the capacity
  CHECK(tokens(4, 4).actual(run) == 1);  // the chunk 4..7 holds token 4
  CHECK(tokens(4, 8).actual(run) == 0);  // a chunk past the end is empty, not negative
  CHECK(seqs(4).actual(run) == 2);
  const Tensor t = tensor(0, bf16_type, {tokens(8), fixed(3)});
  CHECK(t.capacity_bytes() == 8 * 3 * 2);
  CHECK(t.bytes(run) == 5 * 3 * 2);
}

TEST_CASE("GEMMs: 2 T N K in all three directions, each tensor's bytes once") {
  const std::int64_t K = 3, N = 7;
  const Tensor x = tensor(0, bf16_type, {tokens(8), fixed(K)}), w = tensor(1, bf16_type, {fixed(N), fixed(K)}),
               y = tensor(2, bf16_type, {tokens(8), fixed(N)}), b = tensor(3, bf16_type, {fixed(N)}),
               dw = tensor(4, fp32_type, {fixed(N), fixed(K)}), db = tensor(5, fp32_type, {fixed(N)});
  const Op forward = op(OpKind::linear, {x, w, b}, {y}), dgrad = op(OpKind::linear_dgrad, {y, w}, {x}),
           wgrad = op(OpKind::linear_wgrad, {y, x}, {dw, db});
  for (const Op& o : {forward, dgrad, wgrad}) CHECK(op_flops(o, run) == 2 * 5 * 3 * 7);
  CHECK(op_bytes(forward, run, here) == 2 * (5 * 3 + 7 * 3 + 7 + 5 * 7));
  CHECK(op_bytes(dgrad, run, here) == 2 * (5 * 7 + 7 * 3 + 5 * 3));
  CHECK(op_bytes(wgrad, run, here) == 2 * (5 * 7 + 5 * 3) + 4 * (7 * 3 + 7));
  CHECK(op_flops(forward, Sizes{}) == 0);
}

TEST_CASE("A matrix is prepacked in place, at its bytes read and written, for a linear that says so") {
  const Tensor x = tensor(0, bf16_type, {tokens(8), fixed(3)}), w = tensor(1, bf16_type, {fixed(7), fixed(3)}),
               y = tensor(2, bf16_type, {tokens(8), fixed(7)});
  const Op prepack = op(OpKind::prepack, {w}, {w});
  CHECK(check_op(prepack).empty());
  CHECK(op_flops(prepack, run) == 0);
  CHECK(op_bytes(prepack, run, here) == 2 * 2 * 7 * 3);
  CHECK(check_op(op(OpKind::prepack, {w}, {tensor(3, bf16_type, {fixed(7), fixed(3)})})) == "is no op in place");
  const Tensor flat = tensor(1, bf16_type, {fixed(21)});
  CHECK(check_op(op(OpKind::prepack, {flat}, {flat})) == "needs a matrix");
  const auto prepacked = [](Op op, std::int64_t how) { return check_op(with(op, Attr::prepacked, how)); };
  const Op linear = op(OpKind::linear, {x, w}, {y});
  CHECK(prepacked(linear, 1).empty());
  CHECK_THAT(prepacked(linear, 0), Catch::Contains("reads no prepacked weights"));
  CHECK_THAT(prepacked(op(OpKind::linear_dgrad, {y, w}, {x}), 1), Catch::Contains("reads no prepacked weights"));
}

TEST_CASE("A fused product has beside it what its attributes and outputs say, at the FLOPs of ops of their own") {
  const std::int64_t K = 3, N = 8;
  const Tensor x = tensor(0, bf16_type, {tokens(8), fixed(K)}), w = tensor(1, bf16_type, {fixed(N), fixed(K)}),
               b = tensor(2, bf16_type, {fixed(N)}), norm = tensor(3, bf16_type, {fixed(K)}),
               delta = tensor(4, bf16_type, {tokens(8), fixed(K)}),
               residual = tensor(5, bf16_type, {tokens(8), fixed(N)}), y = tensor(6, bf16_type, {tokens(8), fixed(N)}),
               act = tensor(7, bf16_type, {tokens(8), fixed(N / 2)}), sum = tensor(8, bf16_type, {tokens(8), fixed(K)}),
               wide = tensor(9, fp32_type, {tokens(8), fixed(N)});
  const auto fused = [](std::vector<Tensor> in, std::vector<Tensor> out, const std::vector<Attr>& attrs) {
    Op o = op(OpKind::fused_linear, std::move(in), std::move(out));
    for (const Attr a : attrs) a == Attr::eps || a == Attr::offset ? with(o, a, 1e-5) : with(o, a, std::int64_t{1});
    return o;
  };
  const Op gated = fused({x, w, b, norm, delta}, {act, sum}, {Attr::eps, Attr::offset, Attr::gate, Attr::prepacked}),
           onto = fused({x, w, residual}, {y}, {Attr::residual}), normed = fused({x, w, norm}, {wide}, {Attr::eps});
  for (const Op& o : {gated, onto, normed}) CHECK_THAT(check_op(o), Catch::Equals(""));
  const ProductSides of = product_sides(gated), of_onto = product_sides(onto), of_normed = product_sides(normed);
  CHECK((of.bias == 2 && of.norm == 3 && of.delta == 4 && of.residual == -1 && of.gate));
  CHECK((of_onto.bias == -1 && of_onto.norm == -1 && of_onto.delta == -1 && of_onto.residual == 2 && !of_onto.gate));
  CHECK((of_normed.bias == -1 && of_normed.norm == 2 && of_normed.delta == -1 && of_normed.residual == -1));
  const double product = 2.0 * 5 * 3 * 8;  // of 5 tokens
  CHECK(op_flops(gated, run) == product + 5.0 * (5 * 3) + 4.0 * (5 * 4));
  CHECK(op_flops(onto, run) == product + 5 * 8);
  CHECK(op_bytes(onto, run, here) == 2 * (5 * 3 + 8 * 3 + 5 * 8 + 5 * 8));

  const auto complaint = [&](std::vector<Tensor> in, std::vector<Tensor> out, const std::vector<Attr>& attrs) {
    return check_op(fused(std::move(in), std::move(out), attrs));
  };
  using Catch::Contains;
  CHECK_THAT(complaint({x, w, b, norm}, {y}, {}), Contains("has 4 inputs, where its attributes and outputs say 2"));
  CHECK_THAT(complaint({x, w, norm}, {y}, {Attr::offset}), Contains("offsets the weights of no norm"));
  CHECK_THAT(complaint({x, w, delta}, {y, sum}, {}), Contains("has a sum that nothing norms"));
  CHECK_THAT(complaint({x, w, residual}, {act}, {Attr::residual, Attr::gate}), Contains("or to a gate as well"));
  CHECK_THAT(complaint({x, w, norm}, {y}, {Attr::eps, Attr::gate}), Contains("do not multiply"));
  Op ungated = op(OpKind::fused_linear, {x, w}, {y});
  CHECK_THAT(check_op(with(ungated, Attr::gate, std::int64_t{0})), Contains("has gate 0: 1 where it is there"));
  const std::string beside = "has tensors beside its product that do not fit it";
  CHECK(complaint({x, w, norm, b}, {y}, {Attr::eps}) == beside);
  CHECK(complaint({x, w, norm, residual}, {y, sum}, {Attr::eps}) == beside);
  CHECK(complaint({x, w, delta}, {y}, {Attr::residual}) == beside);
  CHECK(complaint({x, w, residual}, {wide}, {Attr::residual}) == beside);
  const Tensor odd = tensor(1, bf16_type, {fixed(7), fixed(K)}), three = tensor(6, bf16_type, {tokens(8), fixed(3)});
  CHECK(complaint({x, odd}, {three}, {Attr::gate}) == "gates 7 columns");
}

TEST_CASE("Adapters: 2 rows depth columns, and of a wider activation the columns that are the adapter's") {
  // T = 5 tokens, K = 3, r = 2, n = 4 columns of N = 9 from the third on
  const Tensor x = tensor(0, bf16_type, {tokens(8), fixed(3)}), a = tensor(1, bf16_type, {fixed(2), fixed(3)}),
               u = tensor(2, bf16_type, {tokens(8), fixed(2)}), b = tensor(3, bf16_type, {fixed(4), fixed(2)}),
               y = tensor(4, bf16_type, {tokens(8), fixed(9)}), db = tensor(5, fp32_type, {fixed(4), fixed(2)}),
               w = tensor(6, bf16_type, {fixed(4), fixed(3)});
  Op down = op(OpKind::lora_down, {x, a}, {u}), up = op(OpKind::lora_up, {u, b}, {y}),
     dgrad = op(OpKind::lora_up_dgrad, {y, b}, {u}), wgrad = op(OpKind::lora_up_wgrad, {y, u}, {db}),
     merge = op(OpKind::lora_merge, {w, b, a}, {w});
  for (Op* o : {&down, &dgrad, &merge}) CHECK(check_op(*o) == "lacks attribute factor");
  for (Op* o : {&down, &dgrad, &merge}) o->attrs.emplace_back(Attr::factor, 0.5);
  for (Op* o : {&up, &dgrad, &wgrad}) o->attrs.emplace_back(Attr::column, std::int64_t{2});
  for (const Op& o : {down, up, dgrad, wgrad, merge}) CHECK(check_op(o).empty());
  CHECK(op_flops(down, run) == 2 * 5 * 3 * 2);
  for (const Op& o : {up, dgrad, wgrad}) CHECK(op_flops(o, run) == 2 * 5 * 2 * 4);
  CHECK(op_flops(merge, run) == 2 * 4 * 2 * 3);
  CHECK(op_bytes(up, run, here) == 2 * (5 * 2 + 4 * 2 + 5 * 4));
  CHECK(op_bytes(dgrad, run, here) == 2 * (5 * 4 + 4 * 2 + 5 * 2));
  CHECK(op_bytes(wgrad, run, here) == 2 * (5 * 4 + 5 * 2) + 4 * (4 * 2));
  for (Op* o : {&up, &dgrad, &wgrad}) o->attrs.back().second = std::int64_t{6};  // columns 6 … 9 of 9
  for (const Op& o : {up, dgrad, wgrad}) CHECK(check_op(o) == "has matrices of an adapter that do not multiply");
}

TEST_CASE("neighbours that share an expert have the same ones, and each its columns of a bias") {
  Op sort = op(OpKind::expert_sort, {tensor(0, int32_type, {tokens(8), fixed(2)})},
               {tensor(1, int32_type, {tokens(8), fixed(2)}), tensor(2, int32_type, {fixed(5)})});
  sort.group = 0;
  sort.attrs = {{Attr::tp, std::int64_t{2}}, {Attr::ranks, std::int64_t{2}}};  // 4 ranks, two and two
  const auto first = [&](std::int32_t place) { return own_experts(sort, Places{place}).first; };
  CHECK((first(0) == 0 && first(1) == 0 && first(2) == 4 && first(3) == 4));
  CHECK(check_op(sort).empty());
  sort.attrs.back().second = std::int64_t{0};
  CHECK(!check_op(sort).empty());
  // 3 experts of 10 columns, of whose biases a rank has 5 each.
  Op down = op(OpKind::grouped_linear,
               {tensor(0, fp32_type, {tokens(8), fixed(2), fixed(6)}), tensor(1, fp32_type, {fixed(30), fixed(6)}),
                tensor(2, int32_type, {fixed(4)}), tensor(3, fp32_type, {fixed(15)})},
               {tensor(4, fp32_type, {tokens(8), fixed(2), fixed(10)})});
  down.group = 0;
  for (const std::int32_t place : {0, 1, 2, 3})
    CHECK(bias_columns(down, Places{place}) == (place % 2 == 0 ? Range{0, 5} : Range{5, 10}));
}

TEST_CASE("Attention counts visible pairs: two products forward, five backward") {
  const Tensor x = tensor(0, bf16_type, {tokens(8), fixed(48)}), cu = tensor(1, int32_type, {fixed(5)}),
               o = tensor(2, bf16_type, {tokens(8), fixed(24)}), lse = tensor(3, fp32_type, {tokens(8), fixed(4)});
  const Op forward = with_heads(op(OpKind::attention, {x, cu}, {o, lse}));
  const Op backward = with_heads(op(OpKind::attention_backward, {o, x, o, lse, cu}, {x}));
  CHECK(op_flops(forward, run) == 2 * 2 * 9 * 24);  // pairs * heads * head_dim = 9 * 24
  CHECK(op_flops(backward, run) == 5 * 2 * 9 * 24);
  CHECK(op_bytes(forward, run, here) == 2 * 5 * 48 + 4 * 5 + 2 * 5 * 24 + 4 * 5 * 4);
}

TEST_CASE("Context-parallel ranks count each pair once, all ranks and steps of a ring as many") {
  // Sequences of 4 and 6 chunks' tokens, cut for W ranks: N (N + 1) / 2 pairs of each.
  for (const std::int64_t ranks : {1, 2, 3, 4}) {
    std::int64_t all = 0, own = 0;
    for (const std::int64_t chunk : {2, 5}) {
      const std::int64_t length = 2 * ranks * chunk;
      all += length * (length + 1) / 2, own += 2 * chunk;
    }
    const Sizes sizes{.tokens = own, .seqs = 2, .attention_pairs = all};
    const Tensor x = tensor(0, bf16_type, {tokens(99), fixed(48)}), cu = tensor(2, int32_type, {fixed(5)}),
                 o = tensor(3, bf16_type, {tokens(99), fixed(24)}), lse = tensor(4, fp32_type, {tokens(99), fixed(4)});
    const auto of = [&](std::int64_t parts, std::int64_t step) {
      const Tensor kv = tensor(1, bf16_type, {fixed(parts), tokens(99), fixed(24)});
      Op attends = with_heads(op(OpKind::context_attention, {x, kv, cu}, {o, lse}));
      with(with(attends, Attr::ranks, ranks), Attr::source, -step).group = 0;
      REQUIRE_THAT(check_op(attends), Catch::Equals(""));
      Op back = with_heads(op(OpKind::context_attention_backward, {o, x, kv, o, lse, cu}, {o, kv}));
      with(with(back, Attr::ranks, ranks), Attr::source, -step).group = 0;
      REQUIRE_THAT(check_op(back), Catch::Equals(""));
      CHECK(attention_pairs(back, sizes) == attention_pairs(attends, sizes));
      CHECK(op_flops(back, sizes) * 2 == op_flops(attends, sizes) * 5);
      return attention_pairs(attends, sizes);
    };
    std::int64_t around = 0;
    for (std::int64_t step = 0; step < ranks; ++step) around += of(1, step);
    CHECK(around * ranks == all);
    CHECK(of(ranks, 0) * ranks == all);
    // Chunks of 2 and 5 tokens: 2 h^2 with another rank's keys, and h more with its own.
    if (ranks > 1) CHECK(of(1, 1) == 2 * 4 + 2 * 25);
    CHECK((ranks == 1 || of(1, 0) == of(1, 1) + 7));
  }
  // From place 1 of 3, one place back and two.
  Op attends;
  attends.kind = OpKind::context_attention, attends.group = 0;
  attends.inputs = {{}, tensor(1, bf16_type, {fixed(1), tokens(9), fixed(24)})};
  with(attends, Attr::ranks, std::int64_t{3});
  Places second;
  second.push_back(1);
  for (const std::int64_t back : {0, 1, 2}) {
    Op step = attends;
    with(step, Attr::source, -back);
    CHECK(context_parts(step, second).source == (1 - back + 3) % 3);
    CHECK_FALSE(context_parts(step, second).all);
  }
}

TEST_CASE("Paged attention reads every sequence's context once") {
  const Tensor x = tensor(0, bf16_type, {tokens(8), fixed(48)}),
               pool = tensor(1, bf16_type, {fixed(6), fixed(4), fixed(24)}), cu = tensor(2, int32_type, {fixed(5)}),
               tables = tensor(3, int32_type, {seqs(4), fixed(3)}), lengths = tensor(4, int32_type, {seqs(4)}),
               o = tensor(5, bf16_type, {tokens(8), fixed(24)});
  const Op paged = with_heads(op(OpKind::paged_attention, {x, pool, cu, tables, lengths}, {o}));
  const std::int64_t kv_row = 2 * 2 * 6 * 2;  // K and V, 2 heads of 6, bf16
  // Decode: 2 sequences, one query each, contexts 10 and 7 -> 17 rows.
  const Sizes decode{.tokens = 2, .seqs = 2, .attention_pairs = 17};
  CHECK(op_flops(paged, decode) == 4 * 17 * 24);
  CHECK(op_bytes(paged, decode, here) == 2 * 2 * (48 + 24) + 17 * kv_row);
  // Prefill: 6 tokens in 2 prompts, 12 pairs: a query sees 2 rows on average, for each of 2 sequences.
  const Sizes prefill{.tokens = 6, .seqs = 2, .attention_pairs = 12};
  CHECK(op_bytes(paged, prefill, here) == 6 * 2 * (48 + 24) + 2 * 2 * kv_row);
  // kv_write: the new rows read and written, and where they go.
  const Op write = with_heads(op(OpKind::kv_write, {x, tensor(6, int32_type, {tokens(8)})}, {pool}));
  CHECK(op_bytes(write, decode, here) == 2 * (2 * kv_row) + 2 * 4);
}

TEST_CASE("Of a sequence that ranks hold in parts each reads its own, and weighs what it found among all") {
  const Tensor x = tensor(0, bf16_type, {tokens(8), fixed(48)}),
               pool = tensor(1, bf16_type, {fixed(6), fixed(4), fixed(24)}), cu = tensor(2, int32_type, {fixed(5)}),
               tables = tensor(3, int32_type, {seqs(4), fixed(3)}), lengths = tensor(4, int32_type, {seqs(4)}),
               o = tensor(5, bf16_type, {tokens(8), fixed(24)}), lse = tensor(6, fp32_type, {tokens(8), fixed(4)}),
               all = tensor(7, fp32_type, {fixed(3), tokens(8), fixed(4)});
  const auto shared = [](Op op, std::int64_t ranks) {
    with(op, Attr::ranks, ranks).group = 0;
    return op;
  };
  const Op paged = with_heads(op(OpKind::paged_attention, {x, pool, cu, tables, lengths}, {o, lse})),
           write = with_heads(op(OpKind::kv_write, {x, tensor(8, int32_type, {tokens(8)})}, {pool}));
  // 17 keys over 3 ranks: 6 on the fullest; with a window of 5 the 2 queries see 10, of which that has 4.
  const Sizes decode{.tokens = 2, .seqs = 2, .attention_pairs = 17};
  CHECK(op_flops(shared(paged, 3), decode) == 4 * 6 * 24);
  CHECK(op_bytes(shared(paged, 3), decode, here) == 2 * 2 * (48 + 24) + 6 * 2 * 2 * 6 * 2);
  Op windowed = shared(paged, 3);
  CHECK(op_flops(with(windowed, Attr::window, std::int64_t{5}), decode) == 4 * 4 * 24);
  CHECK(op_bytes(shared(write, 2), decode, here) == 2 * (2 * 2 * 6 * 2) + 2 * 4);  // one of 2 rows
  for (const Op& good : {shared(paged, 3), shared(write, 2)}) CHECK_THAT(check_op(good), Catch::Equals(""));
  Op alone = shared(paged, 3);
  alone.group = -1;
  CHECK(!check_op(alone).empty());
  CHECK(!check_op(shared(paged, 0)).empty());
  Op weighs = op(OpKind::attention_sinks, {o, lse, all}, {o, lse});
  CHECK(!check_op(weighs).empty());  // no group
  weighs.group = 0;
  CHECK_THAT(check_op(weighs), Catch::Equals(""));
  weighs.inputs[2] = tensor(7, fp32_type, {fixed(3), tokens(8), fixed(5)});
  CHECK(!check_op(weighs).empty());
}

TEST_CASE("With a window attention counts at most as many pairs as fit there") {
  const Tensor x = tensor(0, bf16_type, {tokens(8), fixed(48)}),
               pool = tensor(1, bf16_type, {fixed(6), fixed(4), fixed(24)}), cu = tensor(2, int32_type, {fixed(5)}),
               tables = tensor(3, int32_type, {seqs(4), fixed(3)}), lengths = tensor(4, int32_type, {seqs(4)}),
               o = tensor(5, bf16_type, {tokens(8), fixed(24)}), lse = tensor(6, fp32_type, {tokens(8), fixed(4)});
  const auto windowed = [](Op op, std::int64_t window) { return with(op, Attr::window, window); };
  const Op paged = with_heads(op(OpKind::paged_attention, {x, pool, cu, tables, lengths}, {o})),
           back = with_heads(op(OpKind::attention_backward, {o, x, o, lse, cu}, {x}));
  const Sizes decode{.tokens = 2, .seqs = 2, .attention_pairs = 17};
  CHECK(op_flops(windowed(paged, 5), decode) == 4 * 10 * 24);  // 2 queries of 5 keys
  CHECK(op_bytes(windowed(paged, 5), decode, here) == 2 * 2 * (48 + 24) + 10 * 2 * 2 * 6 * 2);
  CHECK(op_flops(windowed(paged, 9), decode) == 4 * 17 * 24);  // the contexts are no longer
  CHECK(op_flops(windowed(back, 1), run) == 5 * 2 * 5 * 24);   // 5 tokens see themselves
  CHECK(!check_op(windowed(back, 0)).empty());
}

TEST_CASE("LayerNorm has a weight and a bias as wide as its rows, and a sum where it adds") {
  const Tensor x = tensor(0, bf16_type, {tokens(8), fixed(12)}), w = tensor(1, bf16_type, {fixed(12)}),
               rstd = tensor(2, fp32_type, {tokens(8)}), narrow = tensor(3, bf16_type, {fixed(11)}),
               dw = tensor(4, fp32_type, {fixed(12)});
  const Op alone = op(OpKind::layer_norm, {x, w, w}, {x, rstd}),
           adds = op(OpKind::layer_norm, {x, w, w, x}, {x, rstd, x}),
           back = op(OpKind::layer_norm_backward, {x, x, w, rstd}, {x, dw, dw});
  for (const Op& good : {alone, adds, back}) CHECK(check_op(good).empty());
  CHECK(op_bytes(adds, run, here) == 4 * (5 * 12 * 2) + 2 * (12 * 2) + 5 * 4);  // 5 tokens: x, r, y and their sum
  CHECK(op_flops(back, run) == 14 * 5 * 12);
  CHECK(!check_op(op(OpKind::layer_norm, {x, w, narrow}, {x, rstd})).empty());
  CHECK(!check_op(op(OpKind::layer_norm, {x, w, w, x}, {x, rstd})).empty());
  CHECK(!check_op(op(OpKind::layer_norm_backward, {x, x, w, rstd}, {x, dw, rstd})).empty());
  // An activation reads and writes its rows.
  CHECK(op_bytes(op(OpKind::gelu_backward, {x, x}, {x}), run, here) == 3 * (5 * 12 * 2));
}

TEST_CASE("Lookups move the rows they touch, not the table") {
  const Tensor table = tensor(0, fp32_type, {fixed(1000), fixed(3)}), ids = tensor(1, int32_type, {tokens(8)}),
               y = tensor(2, fp32_type, {tokens(8), fixed(3)});
  const std::int64_t rows = 5 * 3 * 4, index = 5 * 4;
  CHECK(op_bytes(op(OpKind::embedding, {table, ids}, {y}), run, here) == 2 * rows + index);
  // Scatter-add: the gradient read, the table's rows read and written.
  CHECK(op_bytes(op(OpKind::embedding_backward, {ids, y}, {table}), run, here) == 3 * rows + index);
  CHECK(op_flops(op(OpKind::embedding, {table, ids}, {y}), run) == 0);
}

TEST_CASE("Boxes count what they copy, in each side's dtype") {
  Op copy = op(OpKind::copy_boxes, {tensor(0, fp32_type, {fixed(100)})}, {tensor(1, bf16_type, {fixed(100)})});
  copy.moves = moves_of({{.rows = 2, .cols = 5}, {.rows = 1, .cols = 3}});
  CHECK(op_bytes(copy, run, here) == 13 * (4 + 2));
  Op hash = op(OpKind::hash_boxes, {tensor(0, fp32_type, {fixed(100)}), tensor(1, bf16_type, {fixed(100)})},
               {tensor(2, DType::i64, {fixed(1)})});
  hash.moves = moves_of({{.rows = 2, .cols = 5, .input = 1}, {.rows = 1, .cols = 3}});
  CHECK(op_bytes(hash, run, here) == 10 * 2 + 3 * 4);  // it reads only
}

TEST_CASE("Payload is the logical tensor without padding") {
  const Tensor part = tensor(0, bf16_type, {fixed(10)}), all = tensor(1, bf16_type, {fixed(30)});  // three ranks
  const auto padded = [](Op o) {
    o.attrs = {{Attr::padding_bytes, std::int64_t{8}}};
    return o;
  };
  CHECK(payload_bytes(padded(op(OpKind::all_gather, {part}, {all})), run, here) == 60 - 8);
  CHECK(payload_bytes(padded(op(OpKind::reduce_scatter, {all}, {part})), run, here) == 60 - 8);
  CHECK(payload_bytes(op(OpKind::all_reduce, {part}, {part}), run, here) == 20);
  CHECK(payload_bytes(op(OpKind::barrier, {part}, {part}), run, here) == 0);
  CHECK(payload_bytes(op(OpKind::copy, {part}, {part}), run, here) == 0);
  // Of what goes and what comes at the same time: what goes.
  CHECK(payload_bytes(padded(op(OpKind::send_recv, {part}, {all})), run, here) == 20 - 8);
  CHECK(op_bytes(op(OpKind::send_recv, {all}, {part}), run, here) == 60);
  CHECK(op_flops(op(OpKind::send_recv, {all}, {part}), run) == 0);
  CHECK(op_bytes(op(OpKind::all_reduce, {part}, {part}), run, here) == 20);
  // A peer copy: only what a peer gives; its own rectangle crosses nothing.
  Op peer = op(OpKind::peer_copy, {part}, {all});
  peer.moves = moves_of({{.rows = 2, .cols = 3, .peer = 1}, {.rows = 4, .cols = 1, .peer = -1}});
  CHECK(payload_bytes(peer, run, here) == 6 * 2);
}

TEST_CASE("Partners: places of the group, or steps around it from one's own") {
  const auto partners = [](OpKind kind, std::vector<std::pair<Attr, AttrValue>> attrs, std::int64_t place) {
    Op o = op(kind, {}, {});
    o.attrs = std::move(attrs);
    const Partners at = partners_of(o, 4, place);
    return std::pair{at.to, at.from};
  };
  const std::pair relative{Attr::relative, AttrValue{std::int64_t{1}}};
  const auto peer = [](std::int64_t n) { return std::pair{Attr::peer, AttrValue{n}}; };
  const auto source = [](std::int64_t n) { return std::pair{Attr::source, AttrValue{n}}; };
  using Pair = std::pair<std::int64_t, std::int64_t>;
  CHECK(partners(OpKind::send, {peer(2)}, 1) == Pair{2, -1});
  CHECK(partners(OpKind::recv, {peer(2)}, 1) == Pair{-1, 2});
  CHECK(partners(OpKind::send_recv, {peer(2), source(0)}, 1) == Pair{2, 0});
  CHECK(partners(OpKind::send, {peer(7)}, 1) == Pair{7, -1});  // of 4: the verifier refuses it
  CHECK(partners(OpKind::all_reduce, {}, 1) == Pair{-1, -1});
  // Next and previous, around the end of the group at both sides, and more than once around.
  CHECK(partners(OpKind::send_recv, {peer(1), source(-1), relative}, 1) == Pair{2, 0});
  CHECK(partners(OpKind::send_recv, {peer(1), source(-1), relative}, 3) == Pair{0, 2});
  CHECK(partners(OpKind::send_recv, {peer(1), source(-1), relative}, 0) == Pair{1, 3});
  CHECK(partners(OpKind::send, {peer(-9), relative}, 0) == Pair{3, -1});
  CHECK(partners(OpKind::recv, {peer(4), relative}, 2) == Pair{-1, 2});
}

TEST_CASE("check_op says what is wrong with an op") {
  const Program p = one_buffer(24);
  const auto complaint = [&](const Op& o) {
    if (std::string bad = check_op(o); !bad.empty()) return bad;
    Program with = p;
    const Block block = block_of(with, "work", {o});
    return check_windows(with, block.calls[0], windows_of(with.bodies[0]));
  };
  const Tensor x = tensor(0, fp32_type, {fixed(4), fixed(6)});
  CHECK(complaint(op(OpKind::zero, {}, {x})).empty());
  CHECK(complaint(op(OpKind::zero, {}, {})) == "has 0 outputs, expected 1");
  CHECK(complaint(op(OpKind::linear, {x}, {x})) == "has 1 inputs, expected 2 to 3");
  CHECK(complaint(op(OpKind::copy_boxes, {}, {x})) == "has 0 inputs, expected 1 or more");
  CHECK(complaint(op(OpKind::zero, {}, {tensor(0, fp32_type, {fixed(5), fixed(6)})})) ==
        "zero '' takes bytes 0..120 of 'x', which has 96");
  CHECK(complaint(op(OpKind::zero, {}, {tensor(0, fp32_type, {fixed(1)}, 96)})) ==
        "zero '' takes bytes 96..100 of 'x', which has 96");
  CHECK(complaint(op(OpKind::zero, {}, {tensor(0, fp32_type, {fixed(1)}, 2)})) ==
        "zero '' takes bytes 2..6 of 'x', which has 96");
  CHECK(complaint(op(OpKind::zero, {}, {tensor(0, fp32_type, {fixed(-1)})})) == "has a tensor of negative extent");
  CHECK(complaint(op(OpKind::all_reduce, {x}, {x})) == "has no group");
  CHECK(complaint(op(OpKind::feed, {}, {x})) == "has no slot");
  for (OpKind kind : {OpKind::send, OpKind::recv, OpKind::send_recv}) {
    Op message = op(kind, {}, {});
    if (kind != OpKind::recv) message.inputs = {x};
    if (kind != OpKind::send) message.outputs = {x};
    CHECK(complaint(message) == "has no group");
    message.group = 0;
    CHECK(complaint(message) == "has no peer");
    message.attrs = {{Attr::peer, std::int64_t{1}}};
    CHECK(complaint(message) == (kind == OpKind::send_recv ? "has no source" : ""));
    message.attrs.emplace_back(Attr::source, std::int64_t{1});
    CHECK(complaint(message).empty());
    message.outputs.push_back(x);
    message.outputs.push_back(x);
    CHECK_THAT(complaint(message), Catch::Contains("outputs, expected"));
  }
  CHECK(complaint(op(OpKind::attention, {x, x}, {x, x})) == "lacks attribute heads");
  CHECK(complaint(op(OpKind::linear, {x, tensor(0, fp32_type, {fixed(2), fixed(5)})}, {x})) ==
        "shapes do not multiply: 4x6, 2x5 -> 4x6");
  const Tensor w = tensor(0, fp32_type, {fixed(2), fixed(6)}), y = tensor(0, fp32_type, {fixed(4), fixed(2)});
  CHECK(complaint(op(OpKind::linear, {x, w}, {y})).empty());
  CHECK(complaint(op(OpKind::linear_dgrad, {y, w}, {x})).empty());
  CHECK(complaint(op(OpKind::linear_wgrad, {y, x}, {w})).empty());
  CHECK(complaint(op(OpKind::linear_wgrad, {x, y}, {w})) == "shapes do not multiply: 4x6, 4x2 -> 2x6");
  // A table that a group shares has each rank's rows at its place: without a group there is no place to ask for.
  Op lookup = op(OpKind::embedding, {x, tensor(0, DType::i32, {fixed(4)})}, {x});
  lookup.attrs = {{Attr::vocab_end, std::int64_t{4}}, {Attr::vocab_stride, std::int64_t{4}}};
  CHECK(complaint(lookup) == "shares its table with no group");
  lookup.group = 0;
  CHECK(complaint(lookup) == "shares its table with no group");  // nor without the rows of all
  lookup.attrs.emplace_back(Attr::vocab, std::int64_t{8});
  CHECK(complaint(lookup).empty());
  lookup.group = -1;
  CHECK(complaint(lookup) == "shares its table with no group");
}

TEST_CASE("A price is read off its points: between two of them, and on as between the last") {
  Op op;
  op.kind = OpKind::priced;
  CHECK(check_op(op) == "has no price");
  op.prices = {{.tokens = 0, .seconds = 1.0}};
  CHECK(check_op(op).empty());
  CHECK(op.price({.tokens = 77}).seconds == 1.0);
  op.prices = {{10, 1.0, 0.5, 100.0}, {20, 2.0, 0.5, 300.0}, {40, 2.5, 0.0, 300.0}};
  CHECK(check_op(op).empty());
  CHECK(op.price({.tokens = 15}).seconds == 1.5);
  CHECK(op.price({.tokens = 15}).payload_bytes == 200.0);
  CHECK(op.price({.tokens = 20}).seconds_per_pair == 0.5);
  CHECK(op.price({.tokens = 30}).seconds_per_pair == 0.25);
  CHECK(op.price({.tokens = 60}).seconds == 3.0);           // 0.025 a token more
  CHECK(op.price({.tokens = 60}).seconds_per_pair == 0.0);  // not below
  CHECK(op.price({.tokens = 0}).seconds == 0.0);            // as between the first two: 1 - 10 * 0.1
  CHECK(payload_bytes(op, {.tokens = 15}, {}) == 200);
  op.prices[1].tokens = 10;
  CHECK(check_op(op) == "is priced at 10 tokens behind 10");
  op.prices[1] = {20, -1.0, 0.0, 0.0};
  CHECK(check_op(op) == "has a price of -1");
  op.prices[1].seconds = std::numeric_limits<double>::quiet_NaN();
  CHECK_FALSE(check_op(op).empty());
  op.prices.resize(1);
  op.kind = OpKind::all_reduce;
  CHECK(check_op(op) == "has no group");
  op.kind = OpKind::map;
  CHECK(check_op(op) == "is of a kind that has no price");
  op.kind = OpKind::send;  // its price may say nothing of bytes: then they are its tensor's
  op.group = 0;
  CHECK(check_op(op) == "has 0 inputs, expected 1");
  op.inputs = {tensor(0, DType::f32, {fixed(4)})};
  op.prices[0] = {.seconds = 1.0, .payload_bytes = 77.0};
  CHECK(check_op(op) == "has no peer");
  op.attrs = {{Attr::peer, std::int64_t{1}}};
  CHECK(check_op(op).empty());
  CHECK(payload_bytes(op, {}, {}) == 77);
  op.prices[0].payload_bytes = 0.0;
  CHECK(payload_bytes(op, {}, {}) == 16);
}
