// Drawn cases of ops, each kind with what it may be given: long because every kind of op that has numbers has some.
#include "tests/conformance/drawn_cases.h"

#include <algorithm>
#include <cmath>

#include "base/rng.h"
#include "tests/moves.h"

namespace hotbunk::conformance {
namespace {

using Attrs = std::vector<std::pair<Attr, AttrValue>>;
using Extents = std::vector<std::int64_t>;
constexpr DType f32 = DType::f32, i32 = DType::i32;

/// A seed's shapes: T tokens in S sequences, rows of H, K inputs and I outputs of products, V vocabulary, a query heads
/// and k KV heads of d, E experts of which each token takes C.
struct Shapes {
  std::int64_t T, S, H, K, I, V, k, a, d, E, C;
};

/// Cases of one seed, one after another.
class Drawn {
 public:
  Drawn(std::uint64_t seed, DType activations) : seed_(seed), x_(activations) {
    // Under the first seed, gradients of several parts and rows wider than 256; heads for tiles (multiples of 8) in
    // half.
    n_.T = seed == 1 ? between(65, 72) : between(3, 30), n_.S = 2,
    n_.H = seed == 1 ? between(257, 270) : between(1, 90);
    n_.K = between(1, 40), n_.I = between(1, 40), n_.V = between(4, 90);
    n_.k = between(1, 2), n_.a = n_.k * between(1, 2),
    n_.d = seed % 2 == 0 ? 8 * between(1, 5) : 2 * between(2, seed == 1 ? 6 : 20);
    n_.E = between(3, 7), n_.C = 1 + static_cast<std::int64_t>(seed % 2);
    first_ = between(1, n_.T - 1);
    route();
  }

  std::vector<OpCase> all() {
    add_data(), add_products(), add_norms(), add_rotations(), add_attention(), add_around_attention(), add_paged();
    add_activations(), add_routing(), add_rows_of_experts(), add_latents(), add_loss(), add_optimizer(),
        add_adapters_of_experts(), add_prepacked();
    return std::move(out_);
  }
  /// Of ranks that hold parts: of every sequence's keys, of a vocabulary, of the experts.
  std::vector<OpCase> all_held(std::int64_t ranks) {
    add_paged(ranks), add_merged(ranks), add_context(ranks, ranks, 0), add_context(ranks, 1, 1);
    const std::int64_t stride = between(4, 30);
    add_part_of_vocabulary(ranks * stride - 2, stride, ranks), add_shared_experts(ranks);
    return std::move(out_);
  }
  Sizes sizes() const { return {n_.T, n_.S, n_.T * n_.T}; }

 private:
  std::int64_t between(std::int64_t low, std::int64_t high) {
    return low + random_words(seed_, RngPurpose::test, 1, next_++)[0] % (high - low + 1);
  }
  /// In [-1, 1), its own for each operand.
  std::function<double(std::int64_t)> numbers() {
    return [seed = seed_, stream = ++streams_](std::int64_t i) {
      return 2.0 * uniform24(random_words(seed, RngPurpose::test, stream, static_cast<std::uint64_t>(i))[0]) - 1.0;
    };
  }
  Operand in(DType dtype, Extents shape) { return {"", dtype, std::move(shape), numbers()}; }
  Operand in(Extents shape) { return in(x_, std::move(shape)); }
  /// In [0.5, 1.5): of weights, deviations, log-sum-exps.
  Operand positive(DType dtype, Extents shape) {
    return {"", dtype, std::move(shape), [of = numbers()](std::int64_t i) { return 1.0 + of(i) / 2; }};
  }
  static Operand made(DType dtype, Extents shape) { return {"", dtype, std::move(shape), {}}; }
  Operand made(Extents shape) const { return made(x_, std::move(shape)); }
  static Operand integers(Extents shape, std::function<double(std::int64_t)> value) {
    return {"", i32, std::move(shape), std::move(value)};
  }
  static Operand listed(Extents shape, std::vector<std::int64_t> values) {
    return integers(std::move(shape), [v = std::move(values)](std::int64_t i) {
      return static_cast<double>(v.at(static_cast<std::size_t>(i)));
    });
  }
  /// Two sequences, of first_ tokens and the others.
  Operand cu_seqlens() const { return listed({n_.S + 1}, {0, first_, n_.T}); }
  Operand ids(std::int64_t n) {
    return integers({n}, [of = numbers(), V = n_.V](std::int64_t i) {
      return static_cast<double>(std::min(V - 1, static_cast<std::int64_t>((of(i) + 1) / 2 * static_cast<double>(V))));
    });
  }
  /// Of log-probs; one row has none.
  Operand targets() {
    return integers({n_.T}, [of = ids(n_.T).value, none = first_](std::int64_t t) { return t == none ? -1.0 : of(t); });
  }
  static Operand positions(std::int64_t n) {
    return integers({n}, [](std::int64_t i) { return static_cast<double>(i * 5 % 97); });
  }
  /// Of a gradient of bf16 weights: bf16 under every other seed.
  Operand gradient(Extents shape) { return {"", seed_ % 2 == 0 ? x_ : f32, std::move(shape), numbers()}; }
  Attrs heads(Attrs more = {}) const {
    more.insert(more.end(), {{Attr::heads, n_.a}, {Attr::kv_heads, n_.k}, {Attr::head_dim, n_.d}});
    return more;
  }
  static Attrs accumulate(Attrs more = {}) {
    more.emplace_back(Attr::accumulate, std::int64_t{1});
    return more;
  }

  /// Operands as inputs, then as outputs. What is written in place is an output alone, or with `both` the first input
  /// too.
  void add(OpKind kind, std::vector<Operand> inputs, std::vector<Operand> outputs, Attrs attrs = {},
           bool both = false) {
    OpCase c{kind, {}, {}, {}, std::move(attrs)};
    for (Operand& o : outputs) c.outputs.push_back(c.operands.size()), c.operands.push_back(std::move(o));
    if (both) c.inputs.push_back(0);
    for (Operand& o : inputs) c.inputs.push_back(c.operands.size()), c.operands.push_back(std::move(o));
    for (std::size_t i = 0; i < c.operands.size(); ++i)
      c.operands[i].name = std::string(name_of(kind)) + std::to_string(out_.size()) + "." + std::to_string(i);
    out_.push_back(std::move(c));
  }

  /// Choices of experts, and where they come to: rows of each choice by expert, then token, then choice.
  void route() {
    const std::int64_t R = n_.T * n_.C;
    for (std::int64_t t = 0; t < n_.T; ++t) {
      const std::int64_t from = between(0, n_.E - 1);
      for (std::int64_t j = 0; j < n_.C; ++j) chosen_.push_back((from + j) % n_.E);
    }
    rows_.resize(static_cast<std::size_t>(R)), token_of_row_.resize(static_cast<std::size_t>(R));
    offsets_ = {0};
    std::int64_t row = 0;
    for (std::int64_t e = 0; e < n_.E; ++e) {
      for (std::int64_t i = 0; i < R; ++i)
        if (chosen_[static_cast<std::size_t>(i)] == e) {
          token_of_row_[static_cast<std::size_t>(row)] = i / n_.C;
          rows_[static_cast<std::size_t>(i)] = row++;
        }
      offsets_.push_back(row);
    }
  }

  void add_data() {
    const auto [T, S, H, K, I, V, k, a, d, E, C] = n_;
    const DType other = x_ == f32 ? DType::bf16 : f32;
    add(OpKind::zero, {}, {made({T, H})});
    add(OpKind::copy, {in({T * H})}, {made({T * H})});
    add(OpKind::cast, {in({T, H})}, {made(other, {T, H})});
    add(OpKind::add, {in({T, H}), in(other, {T, H})}, {made({T, H})});
    add(OpKind::gather_rows, {in({T, H}), listed({S}, {T - 1, first_})}, {made({S, H})});
    const Box box{.src_offset = 1, .src_pitch = H + 2, .dst_offset = 0, .dst_pitch = H, .rows = T, .cols = H};
    const Box all = {.src_pitch = H, .dst_offset = T * H, .dst_pitch = H, .rows = T, .cols = H, .input = 1};
    add(OpKind::copy_boxes, {in({T, H + 2}), in(other, {T, H})}, {made(other, {2 * T, H})});
    out_.back().moves = test::moves_of({box, all});
    add(OpKind::hash_boxes, {in({T, H + 2})}, {{"", DType::i64, {1}, [](std::int64_t) { return 0.0; }}},
        {{Attr::as_dtype, static_cast<std::int64_t>(x_)}});
    out_.back().moves = test::moves_of({box});
  }

  void add_products() {
    const auto [T, S, H, K, I, V, k, a, d, E, C] = n_;
    const std::int64_t R = between(1, 16), column = between(0, 5), N = I + column + 3;
    add(OpKind::linear, {in({T, K}), in({I, K}), in({I})}, {made({T, I})});
    add(OpKind::linear_dgrad, {in({T, I}), in({I, K})}, {in({T, K})}, accumulate());
    add(OpKind::linear_wgrad, {in({T, I}), in({T, K})}, {gradient({I, K}), gradient({I})}, accumulate());
    add(OpKind::linear, {in({T, K}), in({I, K})}, {made({T, I})});
    add(OpKind::linear_wgrad, {in({T, I}), in({T, K})}, {made(f32, {I, K})});
    const Attrs of = {{Attr::column, column}, {Attr::factor, 0.5}};
    add(OpKind::lora_down, {in({T, K}), in({R, K})}, {made({T, R})}, of);
    add(OpKind::lora_up, {in({T, R}), in({I, R})}, {in({T, N})}, of);
    add(OpKind::lora_up_dgrad, {in({T, N}), in({I, R})}, {made({T, R})}, of);
    add(OpKind::lora_up_wgrad, {in({T, N}), in({T, R})}, {gradient({I, R})}, accumulate(of));
    add(OpKind::lora_merge, {in({I, K}), in({I, R}), in({R, K})}, {made({I, K})}, of);
  }

  /// Of matrices that may be larger than what a product reads at once.
  void add_prepacked() {
    const auto [T, S, H, K, I, V, k, a, d, E, C] = n_;
    const bool by_blocks = seed_ % 2 == 0;  // of 32, which products in bf16 read packed; others rarely
    const auto draw = [&] { return by_blocks ? 32 * between(1, 6) : between(1, 200); };
    const std::int64_t wide = draw(), deep = draw();
    const Attrs prepacked = {{Attr::prepacked, std::int64_t{1}}};
    add(OpKind::linear, {in({T, deep}), in({wide, deep})}, {made({T, wide})}, prepacked);
    add(OpKind::linear, {in({T, K}), in({I, K}), in({I})}, {made({T, I})}, prepacked);
    // What stands beside a product: a norm, of a sum or not, a gate, a residual stream; on rows and on what is packed.
    const auto also = [&](Attrs attrs) {
      if (seed_ % 2 != 0) attrs.emplace_back(Attr::prepacked, std::int64_t{1});
      return attrs;
    };
    const std::pair<Attr, AttrValue> eps{Attr::eps, 1e-4}, gate{Attr::gate, std::int64_t{1}},
        residual{Attr::residual, std::int64_t{1}};
    add(OpKind::fused_linear, {in({T, deep}), in({wide, deep}), in({wide}), positive(x_, {deep}), in({T, deep})},
        {made({T, wide}), made({T, deep})}, also({eps}));
    add(OpKind::fused_linear, {in({T, deep}), in({2 * wide, deep}), in({deep})}, {made({T, wide})},
        also({eps, {Attr::offset, 1.0}, gate}));
    add(OpKind::fused_linear, {in({T, K}), in({I, K}), in({T, I})}, {made({T, I})}, also({residual}));
    add(OpKind::fused_linear, {in({T, K}), in({I, K}), positive(x_, {K})}, {made(f32, {T, I})},
        {eps, {Attr::prepacked, std::int64_t{1}}});
  }

  void add_norms() {
    const auto [T, S, H, K, I, V, k, a, d, E, C] = n_;
    const std::int64_t Q = (a + 2 * k) * d;
    const Attrs eps = {{Attr::eps, 1e-4}}, onto = accumulate({{Attr::residual, std::int64_t{1}}});
    add(OpKind::rms_norm, {in({T, H}), positive(x_, {H}), in({T, H})}, {made({T, H}), made(f32, {T}), made({T, H})},
        eps);
    const Attrs offset = {{Attr::eps, 1e-4}, {Attr::offset, 1.0}};
    add(OpKind::rms_norm, {in({T, H}), in({H})}, {made({T, H}), made(f32, {T})}, offset);
    add(OpKind::rms_norm_backward, {in({T, H}), in({T, H}), positive(x_, {H}), positive(f32, {T})},
        {in({T, H}), gradient({H})}, onto);
    add(OpKind::rms_norm_backward, {in({T, H}), in({T, H}), in({H}), positive(f32, {T})}, {made({T, H})},
        {{Attr::offset, 1.0}});
    add(OpKind::layer_norm, {in({T, H}), positive(x_, {H}), in({H}), in({T, H})},
        {made({T, H}), made(f32, {T}), made({T, H})}, eps);
    add(OpKind::layer_norm_backward, {in({T, H}), in({T, H}), positive(x_, {H}), positive(f32, {T})},
        {in({T, H}), gradient({H}), gradient({H})}, onto);
    const auto around_one = [this](Attrs attrs) {
      if (seed_ % 2 == 0) attrs.emplace_back(Attr::offset, 1.0);
      return attrs;
    };
    add(OpKind::qk_norm, {in({T, Q}), positive(x_, {d}), positive(x_, {d})}, {made({T, Q}), made(f32, {T, a + k})},
        heads(around_one(eps)));
    add(OpKind::qk_norm_backward,
        {in({T, Q}), in({T, Q}), positive(x_, {d}), positive(x_, {d}), positive(f32, {T, a + k})},
        {made({T, Q}), gradient({d}), gradient({d})}, accumulate(heads(around_one({}))));
  }

  void add_rotations() {
    const auto [T, S, H, K, I, V, k, a, d, E, C] = n_;
    const std::int64_t Q = (a + 2 * k) * d, part = 2 * between(1, d / 2);
    for (const OpKind kind : {OpKind::rope, OpKind::rope_backward}) {
      add(kind, {positions(T)}, {in({T, Q})}, heads({{Attr::rope_theta, 1e4}}), true);
      add(kind, {positions(T)}, {in({T, Q})}, heads({{Attr::rope_theta, 500.0}, {Attr::rope_first, part}}), true);
      add(kind, {positions(T)}, {in({T, a * d})},
          heads({{Attr::rope_theta, 500.0}, {Attr::rope_dim, part}, {Attr::rope_amplitude, 1.25}}), true);
    }
    // To parts with KV heads of their own, and to one for each query head, of which neighbours have the same KV head.
    for (const std::int64_t W : {k, a}) {
      const std::int64_t of_part = (a / W + 2 * std::max<std::int64_t>(1, k / W)) * d;
      add(OpKind::split_heads, {in({T, Q})}, {made({W, T, of_part})}, heads());
      add(OpKind::merge_heads, {in({W, T, of_part})}, {made({T, Q})}, heads());
      // Of values that are narrower than keys, and wider.
      for (const std::int64_t v : {d - 1, d + 3}) {
        const std::int64_t whole = (a + k) * d + k * v, own = a / W * d + std::max<std::int64_t>(1, k / W) * (d + v);
        add(OpKind::split_heads, {in({T, whole})}, {made({W, T, own})}, heads({{Attr::value_dim, v}}));
        add(OpKind::merge_heads, {in({W, T, own})}, {made({T, whole})}, heads({{Attr::value_dim, v}}));
      }
    }
    // Query heads alone, as what attention gives has them.
    const Attrs queries = {{Attr::heads, a}, {Attr::kv_heads, std::int64_t{0}}, {Attr::head_dim, d}};
    add(OpKind::split_heads, {in({T, a * d})}, {made({a, T, d})}, queries);
    add(OpKind::merge_heads, {in({a, T, d})}, {made({T, a * d})}, queries);
    add(OpKind::take_kv, {in({T, Q})}, {made({T, 2 * k * d})}, heads());
    add(OpKind::merge_qkv, {in(f32, {T, a * d}), in(f32, {T, 2 * k * d})}, {made({T, Q})}, heads());
    add(OpKind::merge_qkv, {in(f32, {T, a * d}), in(f32, {T, 2 * k * d}), in(f32, {T, 2 * k * d})}, {made({T, Q})},
        heads());
  }

  void add_attention() {
    const auto [T, S, H, K, I, V, k, a, d, E, C] = n_;
    // Values as wide as keys, in tiles or not; and of another width.
    const std::int64_t wide = seed_ % 2 == 0 ? 8 * between(1, 4) : between(1, 20);
    for (const Attrs& more : {Attrs{},
                              {{Attr::window, between(1, T)}, {Attr::softcap, 2.0}, {Attr::scale, 0.25}},
                              {{Attr::value_dim, wide}}}) {
      const std::int64_t v = more.size() == 1 ? wide : d, Q = (a + k) * d + k * v;
      add(OpKind::attention, {in({T, Q}), cu_seqlens()}, {made({T, a * v}), made(f32, {T, a})}, heads(more));
      add(OpKind::attention_backward, {in({T, a * v}), in({T, Q}), in({T, a * v}), positive(f32, {T, a}), cu_seqlens()},
          {made({T, Q})}, heads(more));
    }
    add_context(1, 1, 0);  // a rank alone in its group has both halves of its sequences
  }

  /// A rank's queries against the keys of `parts` of `ranks` ranks: all, or those of the one `source` further around.
  void add_context(std::int64_t ranks, std::int64_t parts, std::int64_t source) {
    const auto [T, S, H, K, I, V, k, a, d, E, C] = n_;
    const std::int64_t Q = (a + 2 * k) * d, first = between(1, 12), other = between(1, 12), rows = 2 * (first + other);
    Attrs attrs = accumulate(heads({{Attr::ranks, ranks}}));
    if (source > 0)
      attrs.insert(attrs.end(), {{Attr::source, source}, {Attr::window, 3 * first}, {Attr::softcap, 2.0}});
    const auto halves = [&] { return listed({S + 1}, {0, 2 * first, rows}); };
    add(OpKind::context_attention, {in({rows, Q}), in({parts, rows, 2 * k * d}), halves()},
        {in(f32, {rows, a * d}), positive(f32, {rows, a})}, attrs);
    add(OpKind::context_attention_backward,
        {in({rows, a * d}), in({rows, Q}), in({parts, rows, 2 * k * d}), in({rows, a * d}), positive(f32, {rows, a}),
         halves()},
        {in(f32, {rows, a * d}), made(f32, {parts, rows, 2 * k * d})}, attrs);
  }

  void add_around_attention() {
    const auto [T, S, H, K, I, V, k, a, d, E, C] = n_;
    OpCase c{OpKind::attention_sinks, {in({T, a * d}), positive(f32, {T, a}), in({a})}, {0, 1, 2}, {0, 1}, {}};
    for (std::size_t i = 0; i < c.operands.size(); ++i) c.operands[i].name = "sinks." + std::to_string(i);
    out_.push_back(std::move(c));
    add(OpKind::attention_sinks_backward, {in({T, a * d}), in({T, a * d}), positive(f32, {T, a}), in({a})},
        {gradient({a})}, accumulate());
  }

  /// ranks: of which each holds every so-manieth token. Where they are several, the first rows of a sequence see keys
  /// of some of them alone, under an odd seed.
  void add_paged(std::int64_t ranks = 1) {
    const auto [T, S, H, K, I, V, k, a, d, E, C] = n_;
    const std::int64_t Q = (a + 2 * k) * d, block = 1 << between(1, ranks == 1 ? 4 : 2),
                       before = ranks > 1 && seed_ % 2 != 0 ? 0 : between(0, 9);
    const std::int64_t each = (T + before + ranks * block - 1) / (ranks * block), blocks = 2 * each;
    Attrs pool = {{Attr::block_tokens, block}}, seeing = {{Attr::window, between(1, T)}, {Attr::softcap, 2.0}};
    if (ranks > 1) pool.emplace_back(Attr::ranks, ranks);
    const Attrs write = pool;
    pool.emplace_back(Attr::max_blocks, each);
    const auto tables = [&] {  // the pool's blocks backwards
      return integers({S, each}, [blocks](std::int64_t i) { return static_cast<double>(blocks - 1 - i); });
    };
    const auto lengths = [&] { return listed({S}, {first_ + before, T - first_ + before}); };
    const auto slots = [&] {  // one token goes nowhere
      return integers({T}, [first = first_, all = blocks * block * ranks](std::int64_t i) {
        return i == first ? -1.0 : static_cast<double>(all - 1 - i);
      });
    };
    add(OpKind::kv_write, {in({T, Q}), slots()}, {in({blocks, 2 * k, block * d})}, heads(pool));
    add(OpKind::paged_attention, {in({T, Q}), in({blocks, 2 * k, block * d}), cu_seqlens(), tables(), lengths()},
        {made({T, a * d}), made(f32, {T, a})}, heads(pool));
    seeing.insert(seeing.end(), pool.begin(), pool.end());
    if (ranks > 1 || seed_ % 2 != 0)
      add(OpKind::paged_attention, {in({T, Q}), in({blocks, 2 * k, block * d}), cu_seqlens(), tables(), lengths()},
          {made({T, a * d}), made(f32, {T, a})}, heads(seeing));
    const std::int64_t r = between(2, 40), t = 2 * between(1, d / 4), v = between(1, 24);
    Attrs latent = {
        {Attr::heads, a}, {Attr::kv_heads, a}, {Attr::head_dim, d}, {Attr::value_dim, v}, {Attr::rope_dim, t}};
    latent.insert(latent.end(), write.begin(), write.end());
    if (seed_ % 2 == 0) latent.emplace_back(Attr::scale, 0.25);
    add(OpKind::latent_write, {in({T, r}), in({T, t}), slots()}, {in({blocks, block, r + t})}, write);
    add(OpKind::latent_attention,
        {in({T, a * d}), in({blocks, block, r + t}), in({a * (d - t + v), r}), cu_seqlens(), tables(), lengths()},
        {made({T, a * v}), made(f32, {T, a})}, latent);
  }

  /// What a rank attended to, as a part of what all did.
  void add_merged(std::int64_t ranks) {
    const auto [T, S, H, K, I, V, k, a, d, E, C] = n_;
    OpCase c{OpKind::attention_sinks,
             {in({T, a * d}), positive(f32, {T, a}), positive(f32, {ranks, T, a})},
             {0, 1, 2},
             {0, 1},
             {{Attr::ranks, ranks}}};
    for (std::size_t i = 0; i < c.operands.size(); ++i) c.operands[i].name = "part." + std::to_string(i);
    out_.push_back(std::move(c));
  }

  void add_activations() {
    const auto [T, S, H, K, I, V, k, a, d, E, C] = n_;
    const Attrs clamps = {{Attr::limit, 0.5}, {Attr::alpha, 1.702}},
                vocabulary = {{Attr::vocab_begin, std::int64_t{1}}, {Attr::vocab_end, V - 1}, {Attr::factor, 1.5}};
    for (const OpKind kind : {OpKind::swiglu, OpKind::geglu, OpKind::clamped_swiglu})
      add(kind, {in({T, 2 * I})}, {made({T, I})}, kind == OpKind::clamped_swiglu ? clamps : Attrs{});
    for (const OpKind kind : {OpKind::swiglu_backward, OpKind::geglu_backward, OpKind::clamped_swiglu_backward})
      add(kind, {in({T, I}), in({T, 2 * I})}, {made({T, 2 * I})},
          kind == OpKind::clamped_swiglu_backward ? clamps : Attrs{});
    add(OpKind::gelu, {in({T, I})}, {made({T, I})});
    add(OpKind::gelu_backward, {in({T, I}), in({T, I})}, {made({T, I})});
    add(OpKind::add_bias, {in({H})}, {in({T, H})}, {}, true);
    add(OpKind::softcap, {}, {in(f32, {T, V})}, {{Attr::softcap, 2.0}}, true);
    // Rows outside the part of the vocabulary are zeros.
    add(OpKind::embedding, {in({V - 2, H}), ids(T)}, {made({T, H})}, vocabulary);
    add(OpKind::embedding_backward, {ids(T), in({T, H})}, {gradient({V - 2, H})}, accumulate(vocabulary));
  }

  void add_routing() {
    const auto [T, S, H, K, I, V, k, a, d, E, C] = n_;
    const std::int64_t R = T * C;
    for (const std::int64_t sigmoid : {0, 1})
      for (const std::int64_t renormalise : {0, 1}) {
        const Attrs attrs = {{Attr::renormalise, renormalise}, {Attr::sigmoid, sigmoid}, {Attr::factor, 2.5}};
        std::vector<Operand> logits = {in(f32, {T, E})};
        if (sigmoid != 0) logits.push_back(in(f32, {E}));  // with a bias
        add(OpKind::route, logits, {made(f32, {T, C}), made(i32, {T, C})}, attrs);
        add(OpKind::route_backward, {in(f32, {T, C}), in(f32, {T, E}), listed({T, C}, chosen_)}, {made({T, E})}, attrs);
        // Of the best two of four groups.
        Attrs grouped = attrs;
        grouped.insert(grouped.end(), {{Attr::groups, std::int64_t{4}}, {Attr::taken_groups, std::int64_t{2}}});
        logits.front() = in(f32, {T, 12});
        if (sigmoid != 0) logits.back() = in(f32, {12});
        add(OpKind::route, logits, {made(f32, {T, C}), made(i32, {T, C})}, grouped);
      }
    const auto sequences = [&] {  // the last token is of none
      return integers({n_.T}, [T = n_.T, first = first_](std::int64_t t) {
        return t + 1 == T ? -1.0 : t < first ? 0.0 : 1.0;
      });
    };
    add(OpKind::expert_counts, {listed({T, C}, chosen_), sequences()}, {made(f32, {S, E})});
    for (const std::int64_t sigmoid : {0, 1}) {
      const Operand counts{"", f32, {S, E}, [of = numbers()](std::int64_t i) { return std::round(9 * of(i) + 9); }};
      add(OpKind::router_loss, {in(f32, {T, E}), counts, sequences(), positive(f32, {T})}, {in({T, E}), in(f32, {16})},
          {{Attr::factor, 0.5},
           {Attr::z_factor, 0.25},
           {Attr::top_k, C},
           {Attr::sigmoid, sigmoid},
           {Attr::tp, 1 + sigmoid}},
          true);
    }
    add(OpKind::expert_sort, {listed({T, C}, chosen_)}, {made(i32, {T, C}), made(i32, {E + 1})});
    add(OpKind::expert_sort, {listed({T, C}, chosen_)}, {made(i32, {T, 3 * C}), made(i32, {3 * E + 1})},
        {{Attr::groups, std::int64_t{3}}});  // each expert in three parts
    add(OpKind::expert_arrivals, {listed({1, E + 1}, offsets_)}, {made(i32, {E + 1}), made(DType::i64, {1})});
    // Of one rank: a copy of each token, in order; and to each expert's rank.
    for (const std::int64_t W : {std::int64_t{1}, E})
      add(OpKind::copy_sort, {listed({T, C}, rows_), listed({E + 1}, offsets_)},
          {made(i32, {R}), made(i32, {T, std::min(C, W)}), made(i32, {T, C, 1}), made(i32, {W + 1}),
           made(DType::i64, {1})});
    add(OpKind::copy_arrivals, {listed({1, 2}, {0, T}), listed({R, 1}, token_of_row_), listed({E + 1}, offsets_)},
        {made(i32, {R}), made(i32, {T, C}), made(DType::i64, {1})});
  }

  void add_rows_of_experts() {
    const auto [T, S, H, K, I, V, k, a, d, E, C] = n_;
    const auto rows = [&] { return listed({n_.T, n_.C}, rows_); };
    const auto offsets = [&] { return listed({n_.E + 1}, offsets_); };
    add(OpKind::dispatch, {in({T, H}), rows()}, {made({T, C, H})});
    add(OpKind::dispatch_backward, {in({T, C, H}), rows()}, {in({T, H})}, accumulate());
    add(OpKind::combine, {in({T, C, H}), rows(), in(f32, {T, C}), in({T, H})}, {made({T, H})});
    add(OpKind::combine_backward, {in({T, H}), in({T, C, H}), rows(), in(f32, {T, C})},
        {made({T, C, H}), made(f32, {T, C})});
    // One choice of each token, in as many parts.
    add(OpKind::combine, {in({T, C, H}), rows(), in(f32, {T, 1}), in({T, H})}, {made({T, H})});
    add(OpKind::combine_backward, {in({T, H}), in({T, C, H}), rows(), in(f32, {T, 1})},
        {made({T, C, H}), made(f32, {T, 1})});
    add(OpKind::grouped_linear, {in({T, C, K}), in({E * I, K}), offsets(), in({E * I})}, {made({T, C, I})});
    add(OpKind::grouped_linear_dgrad, {in({T, C, I}), in({E * I, K}), offsets()}, {made({T, C, K})});
    add(OpKind::grouped_linear_wgrad, {in({T, C, I}), in({T, C, K}), offsets()},
        {gradient({E * I, K}), gradient({E * I})}, accumulate());
  }

  /// Each expert's adapter, beside columns of a wider activation: of rows of this rank, or of those that came from two,
  /// behind which there is room for more. What A leaves of a gradient is added.
  void add_adapters_of_experts() {
    const auto [T, S, H, K, I, V, k, a, d, E, C] = n_;
    const std::int64_t r = between(1, 16), column = between(0, 5), N = I + column + 3;
    for (const std::int64_t ranks : {1, 2}) {
      const Extents of = ranks == 1 ? Extents{T, C} : Extents{2 * T * C + between(1, 9)};
      const auto rows = [&](std::int64_t row_width) {
        Extents shape = of;
        shape.push_back(row_width);
        return shape;
      };
      std::vector<std::int64_t> begins = offsets_;
      for (std::size_t e = 1; ranks > 1 && e < offsets_.size(); ++e) begins.push_back(T * C + offsets_[e]);
      const Operand offsets = listed({std::ssize(begins)}, begins);
      const Attrs attrs = {{Attr::column, column}, {Attr::factor, 0.5}, {Attr::ranks, ranks}};
      add(OpKind::lora_down, {in(rows(K)), in({E * r, K}), offsets}, {made(rows(r))}, attrs);
      add(OpKind::lora_up, {in(rows(r)), in({E * I, r}), offsets}, {in(rows(N))}, attrs);
      add(OpKind::lora_up_dgrad, {in(rows(N)), in({E * I, r}), offsets}, {made(rows(r))}, attrs);
      add(OpKind::lora_up_wgrad, {in(rows(N)), in(rows(r)), offsets}, {gradient({E * I, r})}, accumulate(attrs));
      if (ranks == 1)
        add(OpKind::grouped_linear_dgrad, {in(rows(r)), in({E * r, K}), offsets}, {in(rows(K))}, accumulate());
    }
  }

  /// Experts of which each rank has some of each of two groups; a bias that a group's ranks share by columns; and what
  /// comes to a rank from all.
  void add_shared_experts(std::int64_t ranks) {
    const auto [T, S, H, K, I, V, k, a, d, E, C] = n_;
    const std::int64_t own = 2 * between(1, 2), all = ranks * own, N = ranks * I;
    std::vector<std::int64_t> chosen;
    for (std::int64_t t = 0; t < T; ++t)
      for (std::int64_t j = 0, from = between(0, all - 1); j < C; ++j) chosen.push_back((from + j) % all);
    add(OpKind::expert_sort, {listed({T, C}, chosen)}, {made(i32, {T, C}), made(i32, {own + 1})},
        {{Attr::tp, ranks}, {Attr::groups, std::int64_t{2}}});
    // One rank's experts, as if each two neighbours had the same.
    add(OpKind::expert_sort, {listed({T, C}, chosen)}, {made(i32, {T, C}), made(i32, {own + 1})},
        {{Attr::tp, ranks}, {Attr::ranks, std::int64_t{2}}});
    const auto rows = [&] { return listed({n_.E + 1}, offsets_); };
    add(OpKind::grouped_linear, {in({T, C, K}), in({E * N, K}), rows(), in({E * I})}, {made({T, C, N})},
        {{Attr::tp, ranks}});
    add(OpKind::grouped_linear_wgrad, {in({T, C, N}), in({T, C, K}), rows()}, {gradient({E * N, K}), gradient({E * I})},
        accumulate({{Attr::tp, ranks}}));

    // Every rank sends all others as much: of each of its copies a row to every second of their experts, and to one.
    std::vector<std::int64_t> sent, blocks, slots, arrivals = {0};
    const std::int64_t each = between(2, 3);
    std::int64_t copies = 0;
    for (std::int64_t w = 0; w < ranks; ++w) {
      const std::int64_t n = between(1, 9);
      copies += n;
      for (std::int64_t place = 0; place <= ranks; ++place) blocks.push_back(place * n);
      for (std::int64_t e = 0; e < each; ++e) {
        for (std::int64_t i = 0; i < n; ++i)
          if ((i + e) % 2 == 0 || e == i % each) slots.push_back(i);
        arrivals.push_back(std::ssize(slots));
      }
      // As many rows of each of this rank's experts as it happens.
      sent.push_back(0);
      for (std::int64_t e = 0; e < ranks * each; ++e) sent.push_back(sent.back() + between(0, 5));
    }
    const std::int64_t R = std::ssize(slots), line = ranks * each + 1;
    add(OpKind::expert_arrivals, {listed({ranks, line}, sent)}, {made(i32, {line}), made(DType::i64, {1})});
    add(OpKind::copy_arrivals, {listed({ranks, ranks + 1}, blocks), listed({R, 1}, slots), listed({line}, arrivals)},
        {made(i32, {R}), made(i32, {copies, each}), made(DType::i64, {1})});
    // Products of such rows: several segments of each expert.
    const auto segments = [&] { return listed({line}, arrivals); };
    add(OpKind::grouped_linear, {in({R, K}), in({each * I, K}), segments(), in({each * I})}, {made({R, I})});
    add(OpKind::grouped_linear_dgrad, {in({R, I}), in({each * I, K}), segments()}, {made({R, K})});
    add(OpKind::grouped_linear_wgrad, {in({R, I}), in({R, K}), segments()},
        {gradient({each * I, K}), gradient({each * I})}, accumulate());
  }

  void add_latents() {
    const auto [T, S, H, K, I, V, k, a, d, E, C] = n_;
    const std::int64_t r = H, t = 2 * between(1, d / 4), v = between(1, 24), of_kv = a * (d - t + v),
                       Q = a * (2 * d + v);
    Attrs attrs = {{Attr::heads, a},    {Attr::kv_heads, a}, {Attr::head_dim, d},    {Attr::value_dim, v},
                   {Attr::rope_dim, t}, {Attr::eps, 1e-4},   {Attr::rope_theta, 1e4}};
    if (seed_ % 2 == 0) attrs.emplace_back(Attr::rope_amplitude, 1.25);
    add(OpKind::latent_norm, {in({T, r + t}), positive(x_, {r}), positions(T)},
        {made({T, r}), made({T, t}), made(f32, {T})}, attrs);
    add(OpKind::latent_norm_backward,
        {in({T, r}), in({T, t}), in({T, r + t}), positive(x_, {r}), positive(f32, {T}), positions(T)},
        {made({T, r + t}), gradient({r})}, accumulate(attrs));
    add(OpKind::latent_heads, {in({T, a * d}), in({T, of_kv}), in({T, t})}, {made({T, Q})}, attrs);
    add(OpKind::latent_heads_backward, {in({T, Q})}, {made({T, a * d}), made({T, of_kv}), made({T, t})}, attrs);
  }

  void add_loss() {
    const auto [T, S, H, K, I, V, k, a, d, E, C] = n_;
    // Columns behind the vocabulary are padding.
    const Attrs softmax = {{Attr::vocab, V}, {Attr::temperature, 0.75}};
    const std::int64_t columns = V + between(0, 3);
    const auto row = [&] { return made(f32, {n_.T}); };
    add(OpKind::log_prob, {in(f32, {T, columns}), targets()}, {row(), row(), row()}, softmax);
    add(OpKind::log_prob_backward, {in(f32, {T, columns}), positive(f32, {T}), targets(), in(f32, {T})},
        {made({T, columns})}, softmax);
    Attrs capped = softmax;
    capped.emplace_back(Attr::softcap, 2.0);
    add(OpKind::log_prob_backward, {in(f32, {T, V}), positive(f32, {T}), targets(), in(f32, {T})}, {made({T, V})},
        capped);
    add_part_of_vocabulary(V, V), add_part_of_vocabulary(V, V - V / 2);
    add(OpKind::vocab_log_prob, {positive(f32, {2, T, 4}), targets()}, {row(), row(), row()},
        {{Attr::temperature, 0.75}});
    for (const auto& [sft, reference] : {std::pair{0, 0}, {0, 1}, {1, 0}}) {
      const Operand weights{
          "", f32, {T}, [of = numbers()](std::int64_t i) { return i % 5 == 3 ? 0.0 : 1.0 + of(i) / 2; }};
      add(OpKind::token_loss, {in(f32, {T}), in(f32, {T}), in(f32, {T}), in(f32, {T}), weights, positive(f32, {T})},
          {row(), in(f32, {16})},
          {{Attr::clip_low, 0.2},
           {Attr::clip_high, 0.3},
           {Attr::kl_coef, 0.1},
           {Attr::sft, std::int64_t{sft}},
           {Attr::reference, std::int64_t{reference}}});
    }
    // Of all logits, and of those of two ranks, the last of which has one column too many.
    for (const std::int64_t tp : {1, 2})
      add(OpKind::sample,
          {in(f32, {tp, T, V}), {"", f32, {T}, [of = numbers()](std::int64_t i) { return (of(i) + 1) / 2; }}},
          {made(i32, {T}), row()},
          {{Attr::vocab, tp * V - tp + 1},
           {Attr::tp, tp},
           {Attr::temperature, 0.75},
           {Attr::top_k, between(0, V)},
           {Attr::top_p, seed_ % 2 == 0 ? 1.0 : 0.8}});
  }

  /// Parts of a vocabulary of `ids`, each of `stride` ids: the rank's by its place; or, in a plan of one rank, the last
  /// one that begins inside.
  void add_part_of_vocabulary(std::int64_t ids, std::int64_t stride, std::int64_t ranks = 1) {
    const auto [T, S, H, K, I, V, k, a, d, E, C] = n_;
    const std::int64_t begin = ranks > 1 ? 0 : (ids - 1) / stride * stride;
    const Attrs part = {{Attr::vocab, ids},
                        {Attr::vocab_begin, begin},
                        {Attr::vocab_end, begin + stride},
                        {Attr::vocab_stride, stride}};
    Attrs softmax = part, rows = part;
    softmax.emplace_back(Attr::temperature, 0.75), rows.emplace_back(Attr::factor, 1.5);
    const auto of = [&] {  // one row has none
      return integers({T}, [at = numbers(), ids, none = first_](std::int64_t t) {
        return t == none ? -1.0 : std::min(std::floor((at(t) + 1) / 2 * static_cast<double>(ids)), ids - 1.0);
      });
    };
    add(OpKind::vocab_stats, {in(f32, {T, stride + 1}), of()}, {made(f32, {T, 4})}, softmax);
    add(OpKind::log_prob_backward, {in(f32, {T, stride + 1}), positive(f32, {T}), of(), in(f32, {T})},
        {made({T, stride + 1})}, softmax);
    add(OpKind::embedding, {in({stride, H}), of()}, {made({T, H})}, rows);
    add(OpKind::embedding_backward, {of(), in({T, H})}, {gradient({stride, H})}, accumulate(rows));
  }

  void add_optimizer() {
    const std::int64_t n = between(9, 3000);
    add(OpKind::sum_squares, {gradient({n})}, {in(f32, {1})}, accumulate());
    for (const double max_norm : {0.5, 2.0})  // beyond it, and nothing to clip
      add(OpKind::clip_coefficient, {positive(f32, {1})}, {made(f32, {1}), in(f32, {16})},
          {{Attr::max_norm, max_norm}});
    // The rate, and which step it is.
    const Operand rate{"", f32, {2}, [](std::int64_t i) { return i == 0 ? 0.01 : 3.0; }};
    // Of a parameter that no gradient reached yet, all are zeros; of another the step is by eps alone.
    const auto none = [](Operand o, std::int64_t every) {
      o.value = [of = o.value, every](std::int64_t i) { return i % every == 3 ? 0.0 : of(i); };
      return o;
    };
    add(OpKind::adamw, {none(gradient({n}), 4), rate, positive(f32, {1})},
        {in(f32, {n}), none(in(f32, {n}), 8), none(positive(f32, {n}), 4)},
        {{Attr::beta1, 0.9}, {Attr::beta2, 0.99}, {Attr::eps, 1e-3}, {Attr::weight_decay, 0.1}});
  }

  std::uint64_t seed_, next_ = 0, streams_ = 1;
  DType x_;
  Shapes n_{};
  std::int64_t first_ = 0;
  std::vector<std::int64_t> chosen_, rows_, token_of_row_, offsets_;
  std::vector<OpCase> out_;
};

}  // namespace

DrawnCases drawn_cases(std::uint64_t seed, DType activations) {
  Drawn drawn(seed, activations);
  const Sizes sizes = drawn.sizes();
  return {drawn.all(), sizes};
}

DrawnCases held_cases(std::uint64_t seed, DType activations, int ranks) {
  Drawn drawn(seed, activations);
  const Sizes sizes = drawn.sizes();
  return {drawn.all_held(ranks), sizes};
}

}  // namespace hotbunk::conformance
