// Dry performance: what each hot kernel asks for, counted by the executor, beside what the op catalogue says that the
// op moves and computes. docs/dry-performance.md has the table that this prints with -s.
#include <fmt/format.h>

#include <bit>
#include <catch2/catch.hpp>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "backends/cuda/fake/fake_driver.h"
#include "backends/cuda/op_launches.h"
#include "backends/cuda/staging.h"
#include "graph/catalogue.h"
#include "tests/toy_plan.h"

using namespace hotbunk;
using namespace hotbunk::cuda;

namespace dry_test {
namespace {

constexpr std::int64_t T = 64, H = 512, I = 256, V = 1024;

struct Operand {
  DType dtype;
  std::vector<std::int64_t> shape;
  std::function<std::int64_t(std::int64_t)> integer{};  // of i32; else small numbers
};
struct Hot {
  const char* name;
  OpKind kind;
  std::vector<Operand> inputs, outputs;
  std::vector<std::pair<Attr, AttrValue>> attrs{};
  bool reads_outputs = false;
  /// Most bytes that its launches may touch, each once a launch, beside the catalogue's.
  double most_touched = 1.05;
  /// The same of bytes asked for, those that the cache has the second time too.
  double most_asked = 1.05;
  /// Most operations of float instructions and mma beside the catalogue's; 0: of no account.
  double most_flops = 0.0;
  /// Least share of the sectors' bytes that is asked for.
  double least_sectors = 0.95;
};

class Placed final : public Addresses {
 public:
  std::byte* address(const Tensor& t) const override { return reinterpret_cast<std::byte*>(at.at(t.buffer)); }
  std::map<BufferId, CUdeviceptr> at;
};

struct Row {
  double asked, touched, catalogue, flops, catalogue_flops, sectors, banks;
};

Row measure(const Hot& hot) {
  static const auto modules = std::make_shared<PtxModules>();  // parsed once for all kernels
  FakeDriver fake({.memory_bytes = std::int64_t{256} << 20, .modules = modules});
  const Context context(fake.table());
  const OwnedStream stream(context);
  const Launcher launch(context, stream.handle());
  Staging staging(context, stream.handle());
  Program program;
  Op op = toy::op(hot.kind, streams::compute, hot.name);
  op.attrs = hot.attrs;
  Placed placed;
  std::vector<std::unique_ptr<DeviceBlock>> blocks;
  const auto place = [&](const Operand& o, bool fill) {
    Tensor t;
    t.buffer = static_cast<BufferId>(placed.at.size());
    t.dtype = o.dtype, t.rank = static_cast<int>(o.shape.size());
    std::int64_t n = 1;
    for (std::size_t i = 0; i < o.shape.size(); ++i) t.shape[i] = Dim{o.shape[i]}, n *= o.shape[i];
    blocks.push_back(std::make_unique<DeviceBlock>(context, std::max<std::int64_t>(n * size_of(o.dtype), 1)));
    placed.at[t.buffer] = blocks.back()->address();
    if (!fill) return t;
    std::byte* here = staging.take(n * size_of(o.dtype));
    for (std::int64_t i = 0; i < n; ++i) {
      if (o.dtype == DType::i32) {
        const auto v = static_cast<std::int32_t>(o.integer ? o.integer(i) : i % 7);
        std::memcpy(here + 4 * i, &v, 4);
      } else {
        const float v = static_cast<float>(i * 7 % 11 - 5) / 8;
        const auto bits = std::bit_cast<std::uint32_t>(v);
        const auto half = static_cast<std::uint16_t>(bits >> 16);
        if (o.dtype == DType::bf16) std::memcpy(here + 2 * i, &half, 2);
        else std::memcpy(here + 4 * i, &bits, 4);
      }
    }
    HB_CUDA(context.driver(), cuMemcpyHtoDAsync(blocks.back()->address(), here,
                                                static_cast<std::size_t>(n * size_of(o.dtype)), stream.handle()));
    staging.in_use();
    return t;
  };
  for (const Operand& o : hot.inputs) op.inputs.push_back(place(o, true));
  for (const Operand& o : hot.outputs) op.outputs.push_back(place(o, hot.reads_outputs));
  Body body;
  body.ops = {op};
  program.bodies = {body};
  const Op& placed_op = program.bodies[0].ops[0];
  const OpTables tables(context, program, {});
  const DeviceBlock scratch(context, std::max<std::int64_t>(scratch_bytes(placed_op), 1));
  const Sizes sizes{T, 1, T * T};
  const Places places;
  const Call call;
  const BoundOp bound{&program, nullptr, &call, &placed_op};
  const auto before = fake.kernel_counts();
  op_launch(hot.kind)({{placed, placed_op, sizes, places, bound}, launch, tables, scratch.address()});
  HB_CUDA(context.driver(), cuStreamSynchronize(stream.handle()));
  REQUIRE(fake.findings().empty());
  Row r{};
  std::int64_t requests = 0, wavefronts = 0, sectors = 0, asked = 0;
  for (const auto& [name, c] : fake.kernel_counts()) {
    REQUIRE(!before.contains(name));
    r.touched += static_cast<double>(c.touched_bytes);
    r.flops += static_cast<double>(c.counters.flops);
    asked += c.counters.global_read_bytes + c.counters.global_written_bytes;
    sectors += c.counters.global_sectors;
    requests += c.counters.shared_requests, wavefronts += c.counters.shared_wavefronts;
  }
  r.asked = static_cast<double>(asked);
  r.catalogue = static_cast<double>(op_bytes(placed_op, sizes, places));
  r.catalogue_flops = op_flops(placed_op, sizes);
  r.sectors = sectors > 0 ? r.asked / (32.0 * static_cast<double>(sectors)) : 1.0;
  r.banks = requests > 0 ? static_cast<double>(wavefronts) / static_cast<double>(requests) : 0.0;
  return r;
}

/// Of a mixture of experts: two for each token, and as many rows of each expert as a tile has.
std::vector<Hot> expert_kernels(DType x) {
  constexpr std::int64_t C = 2, E = 2;
  const Operand rows{DType::i32, {T, C}, [](std::int64_t i) { return i * 37 % (T * C); }}, weights{DType::f32, {T, C}},
      offsets{DType::i32, {E + 1}, [](std::int64_t i) { return i * T; }}, tokens{x, {T, H}}, sorted{x, {T, C, H}};
  return {
      // Every lane asks for its choices' rows and weights; a token is read once for each of its rows.
      {"dispatch", OpKind::dispatch, {tokens, rows}, {sorted}, {}, false, 1.05, 4.0},
      {"combine", OpKind::combine, {sorted, rows, weights}, {tokens}, {}, false, 1.05, 8.0},
      {"grouped_linear",
       OpKind::grouped_linear,
       {sorted, {x, {E * I, H}}, offsets},
       {{x, {T, C, I}}},
       {},
       false,
       1.05,
       8.0,
       1.2,
       0.70},
  };
}

/// Attention in tiles, of one sequence; products over whole tiles, so with masked pairs too.
std::vector<Hot> tiled_kernels() {
  constexpr std::int64_t a = 8, k = 2, d = 64, Q = (a + 2 * k) * d, block_tokens = 16, blocks = T / block_tokens;
  constexpr DType x = DType::bf16;
  const std::vector<std::pair<Attr, AttrValue>> heads = {{Attr::heads, a}, {Attr::kv_heads, k}, {Attr::head_dim, d}};
  std::vector<std::pair<Attr, AttrValue>> paged = heads;
  paged.insert(paged.end(), {{Attr::block_tokens, block_tokens}, {Attr::max_blocks, blocks}});
  const Operand qkv{x, {T, Q}}, o{x, {T, a * d}}, lse{DType::f32, {T, a}},
      cu{DType::i32, {2}, [](std::int64_t i) { return i * T; }};
  return {
      // Keys and values come once for each tile of queries, from the cache all but the first time.
      {"attention", OpKind::attention, {qkv, cu}, {o, lse}, heads, false, 1.05, 2.0, 1.2, 0.88},
      {"paged_attention",
       OpKind::paged_attention,
       {qkv,
        {x, {blocks, 2 * block_tokens, k * d}},
        cu,
        {DType::i32, {1, blocks}, [](std::int64_t i) { return i; }},
        {DType::i32, {1}, [](std::int64_t) { return T; }}},
       {o},
       paged,
       false,
       1.05,
       4.0,
       1.2},
      // Two launches, of which each reads what both need: dq over keys, dk and dv over queries. Scores and dp are
      // formed
      // in both, seven products in place of five. A lane stores one lse or delta of a row's heads.
      {"attention_backward",
       OpKind::attention_backward,
       {o, qkv, o, lse, cu},
       {qkv},
       heads,
       false,
       1.6,
       2.0,
       1.6,
       0.88},
      {"take_kv", OpKind::take_kv, {qkv}, {{x, {T, 2 * k * d}}}, heads, false, 1.05},
      {"merge_qkv", OpKind::merge_qkv, {{DType::f32, {T, a * d}}, {DType::f32, {T, 2 * k * d}}}, {qkv}, heads},
  };
}

std::vector<Hot> hot_kernels(DType x) {
  const auto token = [](std::int64_t i) { return i * 37 % V; };
  const Operand tokens{DType::i32, {T}, token}, positions{DType::i32, {T}, [](std::int64_t i) { return i; }};
  const Operand rows{x, {T, H}}, f32_rows{DType::f32, {T, 1}};
  std::vector<Hot> all = {
      {"add", OpKind::add, {rows, rows}, {rows}},
      {"cast", OpKind::cast, {{DType::f32, {T, H}}}, {{DType::bf16, {T, H}}}},
      {"swiglu", OpKind::swiglu, {{x, {T, 2 * I}}}, {{x, {T, I}}}},
      {"swiglu_backward", OpKind::swiglu_backward, {{x, {T, I}}, {x, {T, 2 * I}}}, {{x, {T, 2 * I}}}},
      // Every lane asks for its row's id, which the cache has for all but the first.
      {"embedding",
       OpKind::embedding,
       {{x, {V, H}}, tokens},
       {rows},
       {{Attr::vocab_begin, std::int64_t{0}}, {Attr::vocab_end, V}},
       false,
       1.05,
       1.6},
      // Reads and writes p, m and v (28 B an element, of which the catalogue, each tensor once, counts 16); every lane
      // asks for the rate and the clip coefficient too.
      {"adamw",
       OpKind::adamw,
       {{DType::f32, {T * H}}, {DType::f32, {2}}, {DType::f32, {1}}},
       {{DType::f32, {T * H}}, {DType::f32, {T * H}}, {DType::f32, {T * H}}},
       {{Attr::beta1, 0.9}, {Attr::beta2, 0.99}, {Attr::eps, 1e-8}, {Attr::weight_decay, 0.0}},
       true,
       1.05,
       2.6},
      {"sum_squares", OpKind::sum_squares, {{DType::f32, {T * H}}}, {{DType::f32, {1}}}},
      // Whole tiles of 64 x 64: operands come once per tile of the result, from the cache all but the first time.
      // It stores 16 B of a sector at a time.
      {"linear", OpKind::linear, {rows, {x, {I, H}}}, {{x, {T, I}}}, {}, false, 1.05, 8.0, 1.2, 0.70},
      // Twice over its rows, the second time from L1: a row is as long as the model is wide, 16 KiB at most.
      {"rms_norm", OpKind::rms_norm, {rows, {x, {H}}}, {rows, {DType::f32, {T}}}, {{Attr::eps, 1e-5}}, false, 1.6, 2.1},
  };
  for (Hot& hot : expert_kernels(x)) all.push_back(std::move(hot));
  if (x == DType::bf16)
    for (Hot& hot : tiled_kernels()) all.push_back(std::move(hot));
  return all;
}

}  // namespace

TEST_CASE("streaming kernels touch what the catalogue says, in whole sectors", "[dry]") {
  std::string table = fmt::format("{:<20} {:<5} {:>9} {:>9} {:>9} {:>8} {:>9} {:>9}\n", "op", "dtype", "asked",
                                  "touched", "catalogue", "sectors", "banks", "flops");
  for (const DType x : {DType::f32, DType::bf16})
    for (const Hot& hot : hot_kernels(x)) {
      INFO(hot.name << " in " << name_of(x));
      const Row r = measure(hot);
      table += fmt::format("{:<20} {:<5} {:>9.0f} {:>9.0f} {:>9.0f} {:>8.2f} {:>9.2f} {:>9.2f}\n", hot.name, name_of(x),
                           r.asked, r.touched, r.catalogue, r.sectors, r.banks,
                           r.catalogue_flops > 0 ? r.flops / r.catalogue_flops : 0.0);
      CHECK(r.touched <= hot.most_touched * r.catalogue);
      CHECK(r.asked <= hot.most_asked * r.catalogue);
      CHECK(r.sectors >= hot.least_sectors);
      if (hot.most_flops > 0.0) CHECK(r.flops <= hot.most_flops * r.catalogue_flops);
    }
  INFO(table);
  SUCCEED();
}

}  // namespace dry_test
