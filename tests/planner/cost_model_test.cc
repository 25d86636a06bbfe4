#include "planner/cost/cost_model.h"

#include <rapidcheck.h>

#include <catch2/catch.hpp>
#include <cmath>

#include "graph/catalogue.h"
#include "spec/catalog.h"
#include "spec/loader.h"
#include "tests/toy_plan.h"

namespace hotbunk {
namespace {

/// One node of 8 round-numbered GPUs: 1e15 FLOP/s, 4e12 bytes/s, 4e11 bytes/s of NVLink; 5e10 bytes/s of network each.
ClusterSpec cluster_of_nodes(std::int64_t nodes) {
  ClusterSpec c;
  c.gpu.name = "test-gpu";
  c.gpu.memory_bandwidth = {4e12, "test"};
  c.gpu.flops = {{"bf16", {1e15, "test"}}, {"fp32", {1e14, "test"}}};
  c.gpu.nvlink_bandwidth = {4e11, "test"};
  c.gpu.pcie_bandwidth = {5e10, "test"};
  c.network_bandwidth = {5e10, "test"};
  c.nodes = nodes;
  c.gpus_per_node = 8;
  return c;
}

CostModel model_of(const ClusterSpec& c) { return {hardware_from_datasheet(c), c}; }

}  // namespace

TEST_CASE("a group's shape follows its stride") {
  // tp 8 in a node of 8; dp 4 over ranks 8 apart: one per node; ep 16 contiguous: two nodes of 8.
  CHECK(GroupShape::strided(8, 1, 8).nodes == 1);
  CHECK(GroupShape::strided(4, 8, 8).nodes == 4);
  CHECK(GroupShape::strided(4, 8, 8).per_node == 1);
  CHECK(GroupShape::strided(16, 1, 8).nodes == 2);
  CHECK(GroupShape::strided(4, 2, 8).nodes == 1);
  CHECK(GroupShape::strided(8, 2, 8).per_node == 4);
}

TEST_CASE("large operations run at the stated rates") {
  const ClusterSpec c = cluster_of_nodes(4);
  const CostModel cost = model_of(c);
  // 2 * 16384^3 FLOPs at 80 % of 1e15 and K fill 16384 / (16384 + 128).
  const double flops = 2.0 * std::pow(16384.0, 3);
  CHECK(cost.gemm_seconds(16384, 16384, 16384, DType::bf16) == Approx(flops / 0.8e15 * (16512.0 / 16384.0)));
  // A product with one row reads the weight once: 2 bytes * 8192^2 at 78 % of 4e12.
  CHECK(cost.gemm_seconds(1, 8192, 8192, DType::bf16) == Approx(2.0 * 8192 * 8192 / (0.78 * 4e12)).epsilon(1e-3));
  // 8 GB all-gather in a node: 7/8 of it at 80 % of 4e11, latencies negligible.
  CHECK(cost.collective_seconds(OpKind::all_gather, {8, 1, 8}, 8e9) == Approx(7e9 / 3.2e11).epsilon(1e-2));
  // The same over 4 nodes x 8: leaves each node through 8 ports of 0.9 * 5e10.
  CHECK(cost.collective_seconds(OpKind::all_gather, {32, 4, 8}, 8e9) ==
        Approx(std::max(8e9 * 31 / 32 / 3.6e11, 8e9 * 31 / 32 / 3.2e11)).epsilon(1e-2));
  CHECK(cost.collective_seconds(OpKind::all_reduce, {1, 1, 1}, 8e9) == 0.0);
}

TEST_CASE("wire bytes follow DESIGN") {
  CHECK(CostModel::wire_bytes(OpKind::all_reduce, 4, 100) == 150.0);
  CHECK(CostModel::wire_bytes(OpKind::all_gather, 4, 100) == 75.0);
  CHECK(CostModel::wire_bytes(OpKind::send, 2, 100) == 100.0);
}

TEST_CASE("a send_recv takes the larger of its two directions, which pass each other") {
  const ClusterSpec c = cluster_of_nodes(4);
  const CostModel cost = model_of(c);
  // 8 GB out of a GPU at 80 % of 4e11, whatever comes in meanwhile.
  for (const OpKind kind : {OpKind::send, OpKind::recv, OpKind::send_recv})
    CHECK(cost.collective_seconds(kind, {2, 1, 2}, 8e9) == Approx(8e9 / 3.2e11).epsilon(1e-2));
  CHECK(CostModel::wire_bytes(OpKind::send_recv, 2, 100) == 100.0);
  Plan plan;
  plan.groups = {{"ring", {{0, 1}}}};
  plan.program_of_rank = {0, 0};
  const auto nanoseconds = [&](const Op& op) { return cost.op_nanoseconds(plan, 0, op, {}); };
  const auto sends = [](std::int64_t n) { return toy::transfer(OpKind::send, "x", {n}, 1); };
  const std::int64_t large = nanoseconds(sends(1 << 28)), small = nanoseconds(sends(1 << 20));
  CHECK(large > 10 * small);
  CHECK(nanoseconds(toy::transfer(OpKind::recv, "x", {1 << 28}, 1)) == large);
  CHECK(nanoseconds(toy::exchange("x", {1 << 28}, {1 << 28}, 1, -1)) == large);
  CHECK(nanoseconds(toy::exchange("x", {1 << 28}, {1 << 20}, 1, -1)) == large);
  CHECK(nanoseconds(toy::exchange("x", {1 << 20}, {1 << 28}, 1, -1)) == large);
  CHECK(nanoseconds(toy::exchange("x", {1 << 20}, {1 << 20}, 1, -1)) == small);
  // A measurement of it is of the size that its price is asked for.
  const auto m = cost.measurement_of(plan, 0, toy::exchange("x", {1 << 20}, {1 << 28}, 1, -1), {}, 1e-3);
  REQUIRE(m);
  CHECK(m->op == "send_recv");
  CHECK(m->at == std::array{2.0, 1.0, 4.0 * (1 << 28)});
}

TEST_CASE("what takes any time takes a nanosecond, so that it has a span; what takes none has none") {
  const ClusterSpec c = cluster_of_nodes(1);
  Hardware h = hardware_from_datasheet(c);
  h.kernel_overhead.value = 0.0;
  Plan plan;
  Op zero = toy::op(OpKind::zero, lead_stream, "x");
  Tensor x;
  x.rank = 1, x.shape[0].size = 3;  // 12 B at some TB/s
  zero.outputs = {x};
  CHECK(CostModel(h, c).op_nanoseconds(plan, 0, zero, {}) == 1);
  CHECK(CostModel(h, c).op_nanoseconds(plan, 0, toy::op(OpKind::record, lead_stream, "x"), {}) == 0);
}

TEST_CASE("a measurement is reproduced where it was taken and fades into its neighbours") {
  const ClusterSpec c = cluster_of_nodes(1);
  Hardware h = hardware_from_datasheet(c);
  h.kernel_overhead.value = 0.0;
  h.measurements = {{"linear", DType::bf16, {1024, 4096, 4096}, 1e-3},
                    {"linear", DType::bf16, {64, 4096, 4096}, 2e-4},
                    {"all_reduce", DType::u8, {8, 1, 1e6}, 5e-5}};
  const CostModel cost(h, c);
  CHECK(cost.gemm_seconds(1024, 4096, 4096, DType::bf16) == Approx(1e-3));
  CHECK(cost.gemm_seconds(64, 4096, 4096, DType::bf16) == Approx(2e-4));
  const double between = cost.gemm_seconds(256, 4096, 4096, DType::bf16);
  CHECK(between > 2e-4);
  CHECK(between < 1e-3);
  CHECK(cost.collective_seconds(OpKind::all_reduce, {8, 1, 8}, 1e6) == Approx(5e-5));
  // Two ranks that share the device take twice as long; the profile was measured with one.
  ClusterSpec shared = c;
  shared.ranks_per_device = 2;
  CHECK(CostModel(h, shared).gemm_seconds(1024, 4096, 4096, DType::bf16) == Approx(2e-3));
}

TEST_CASE("a product with others beside it takes what it was measured at, or else what a product took") {
  const auto dims = [](std::initializer_list<std::int64_t> sizes) {
    Tensor t;
    t.dtype = DType::bf16;
    for (const std::int64_t size : sizes) t.shape[t.rank++].size = size;
    return t;
  };
  const ClusterSpec c = cluster_of_nodes(1);
  Hardware h = hardware_from_datasheet(c);
  h.kernel_overhead.value = 0.0;
  Plan plan;
  plan.program_of_rank = {0};
  Op gated;
  gated.kind = OpKind::fused_linear;
  gated.inputs = {dims({64, 4096}), dims({8192, 4096}), dims({4096})}, gated.outputs = {dims({64, 4096})};
  with(with(gated, Attr::eps, 1e-5), Attr::gate, std::int64_t{1});
  CHECK(check_op(gated).empty());
  const auto nanoseconds = [&] { return CostModel(h, c).op_nanoseconds(plan, 0, gated, {}); };
  // Few rows: the bytes at 78 % of 4e12, half as much written as a product alone would write.
  CHECK(nanoseconds() == Approx(2e9 * (64 * 4096 + 8192 * 4096 + 4096 + 64 * 4096) / (0.78 * 4e12)).epsilon(1e-3));
  h.measurements = {{"linear", DType::bf16, {64, 8192, 4096}, 2e-4}};
  CHECK(nanoseconds() == Approx(2e5).epsilon(0.02));
  h.measurements.push_back({"fused_linear", DType::bf16, {64, 8192, 4096}, 3e-4});
  CHECK(nanoseconds() == Approx(3e5).epsilon(0.02));
  const auto m = CostModel(h, c).measurement_of(plan, 0, gated, {}, 1e-3);
  REQUIRE(m);
  CHECK((m->op == "fused_linear" && m->at == std::array{64.0, 8192.0, 4096.0} && m->dtype == DType::bf16));
}

TEST_CASE("a measured decode step's attention costs what it took, and more where heads share fewer keys") {
  const ClusterSpec c = cluster_of_nodes(1);
  Hardware h = hardware_from_datasheet(c);
  h.kernel_overhead.value = 0.0;
  // 32 sequences of 500 keys, 32 heads of 64 with 8 key-value heads: on an H100.
  h.measurements = {{"paged_attention", DType::bf16, {32, 500, 16}, 34e-6}};
  const auto dims = [](std::initializer_list<std::int64_t> sizes, DType dtype) {
    Tensor t;
    t.dtype = dtype;
    for (const std::int64_t size : sizes) t.shape[t.rank++].size = size;
    return t;
  };
  const auto op_of = [&](std::int64_t kv_heads) {
    Op op;
    op.kind = OpKind::paged_attention;
    with(op, Attr::heads, std::int64_t{32}), with(op, Attr::kv_heads, kv_heads);
    with(op, Attr::head_dim, std::int64_t{64}), with(op, Attr::block_tokens, std::int64_t{16});
    op.inputs = {dims({32, 64 * (32 + 2 * kv_heads)}, DType::bf16), dims({1024, 16, 2 * kv_heads * 64}, DType::bf16),
                 dims({32, 32}, DType::i32), dims({32}, DType::i32), dims({33}, DType::i32)};
    op.outputs = {dims({32, 2048}, DType::bf16)};
    return op;
  };
  Sizes sizes;
  sizes.tokens = sizes.seqs = 32, sizes.attention_pairs = 32 * 500;
  const CostModel cost(h, c);
  const Plan plan;
  const auto m = cost.measurement_of(plan, 0, op_of(8), sizes, 34e-6);
  REQUIRE(m);
  CHECK(m->at == std::array{32.0, 500.0, 16.0});
  // But for the columns of q that are keys and values.
  CHECK(static_cast<double>(cost.op_nanoseconds(plan, 0, op_of(8), sizes)) == Approx(34e3).epsilon(0.02));
  // Four times the key-value heads, none of them shared: four times the bytes.
  CHECK(static_cast<double>(cost.op_nanoseconds(plan, 0, op_of(32), sizes)) == Approx(4 * 34e3).epsilon(0.05));
}

TEST_CASE("memory of the host is taken and given back at a rate of its own, where that was measured") {
  const ClusterSpec c = cluster_of_nodes(1);
  Hardware h = hardware_from_datasheet(c);
  const double unmeasured = CostModel(h, c).map_seconds(1e10, OpKind::map, Space::host);
  CHECK(unmeasured == CostModel(h, c).map_seconds(1e10));
  h.measurements = {{"map", DType::f32, {1e10, 1, 1}, 1e-3},
                    {"map_host", DType::f32, {1e10, 1, 1}, 0.4},
                    {"unmap_host", DType::f32, {1e10, 1, 1}, 0.2}};
  const CostModel cost(h, c);
  CHECK(cost.map_seconds(1e10) == Approx(1e-3));
  CHECK(cost.map_seconds(1e10, OpKind::map, Space::host) == Approx(0.4));
  CHECK(cost.map_seconds(1e10, OpKind::unmap, Space::host) == Approx(0.2));
  // By the section that an op maps, as it is measured.
  Plan plan;
  Program program;
  program.sections.push_back({"weights"});
  program.sections.push_back({"host_weights"});
  program.sections.back().space = Space::host;
  plan.programs = {program};
  plan.program_of_rank = {0};
  for (const int section : {1, 2}) {
    Op map = toy::op(OpKind::map, lead_stream, "x");
    map.section = SectionId{static_cast<std::uint8_t>(section)}, map.map_end = 10'000'000'000;
    CHECK(static_cast<double>(cost.op_nanoseconds(plan, 0, map, {})) == Approx(section == 1 ? 1e6 : 4e8));
    CHECK(cost.measurement_of(plan, 0, map, {}, 1.0)->op == (section == 1 ? "map" : "map_host"));
  }
}

TEST_CASE("experts' products are priced as balanced ones, and read the weights of as many experts as there are rows") {
  constexpr std::int64_t E = 8, c = 2, N = 2048, K = 4096;
  const CostModel cost = model_of(cluster_of_nodes(1));
  const auto dims = [](std::initializer_list<std::int64_t> sizes, DType dtype) {
    Tensor t;
    t.dtype = dtype;
    for (const std::int64_t size : sizes) t.shape[t.rank++].size = size;
    return t;
  };
  const auto op_of = [&](OpKind kind, std::int64_t T, std::int64_t ranks) {
    Op op;
    op.kind = kind;
    const Tensor x = dims({T, c, K}, DType::bf16), w = dims({E * N, K}, DType::bf16), y = dims({T, c, N}, DType::bf16),
                 offsets = dims({E + 1}, DType::i32);
    if (kind == OpKind::grouped_linear) op.inputs = {x, w, offsets}, op.outputs = {y};
    else op.inputs = {y, x, offsets}, op.outputs = {w};
    if (ranks > 1) with(op, Attr::tp, ranks);
    CHECK(check_op(op).empty());
    return op;
  };
  // 8192 tokens: 16384 rows, 2048 for each of 8 experts; forward 2 · 16384 · 2048 · 4096 FLOPs, as many for the
  // weights.
  for (const OpKind kind : {OpKind::grouped_linear, OpKind::grouped_linear_wgrad}) {
    const Op op = op_of(kind, 8192, 1);
    const double flops = op_flops(op, {}), bytes = static_cast<double>(op_bytes(op, {}, {}));
    CHECK(flops == 2.0 * 16384 * N * K);
    const double one = kind == OpKind::grouped_linear ? cost.gemm_seconds(2048, N, K, DType::bf16)
                                                      : cost.gemm_seconds(N, K, 2048, DType::bf16);
    CHECK(cost.grouped_seconds(op, flops, bytes) == Approx(8 * one));
  }
  // One token's two rows read two matrices: 2 · 2 B · 2048 · 4096 at 78 % of 4e12.
  const Op one = op_of(OpKind::grouped_linear, 1, 1);
  const double bytes = static_cast<double>(op_bytes(one, {}, {}));
  CHECK(bytes == 2.0 * 2 * N * K + 2 * 2 * (K + N) + 4 * (E + 1));
  CHECK(cost.grouped_seconds(one, op_flops(one, {}), bytes) == Approx(bytes / (0.78 * 4e12)).epsilon(1e-3));
  // Two ranks with 8 experts each share the rows.
  CHECK(op_flops(op_of(OpKind::grouped_linear, 8192, 2), {}) == 16384.0 * N * K);
}

TEST_CASE("a profile survives writing and reading") {
  const ClusterSpec c = cluster_of_nodes(1);
  Hardware h = hardware_from_datasheet(c);
  h.source = "calibrated \"here\"";
  h.gemm.efficiency = {0.71, "measured: 16384^3"};
  h.measurements = {{"swiglu", DType::bf16, {1e8, 1, 1}, 3e-5},
                    {"all_gather", DType::f32, {4, 2, 1e7}, 1e-4},
                    {"fused_linear", DType::bf16, {8, 768, 256}, 2e-5}};
  const auto back = parse_hardware(to_yaml(h), "profile.yaml", c);
  REQUIRE(back.has_value());
  CHECK(back->source == h.source);
  CHECK(back->gemm.efficiency.value == 0.71);
  CHECK(back->gemm.efficiency.source == "measured: 16384^3");
  REQUIRE(back->measurements.size() == 3);
  for (std::size_t i = 1; i < 3; ++i) CHECK(back->measurements[i].at == h.measurements[i].at);
  CHECK(to_yaml(*back) == to_yaml(h));
}

TEST_CASE("a profile's mistakes name the key and the line") {
  const auto wrong = [](const std::string& body) {
    const auto h = parse_hardware("schema: hotbunk.hardware/1\n" + body, "p.yaml", cluster_of_nodes(1));
    REQUIRE(!h.has_value());
    CHECK(h.error()[0].code == "E205");
    CHECK(h.error()[0].where.line >= 2);
    return h.error()[0].message;
  };
  CHECK_THAT(wrong("gemm:\n  efficiency: {value: 1.5, source: x}\n"), Catch::Contains("outside of"));
  CHECK_THAT(wrong("gemm:\n  efficiency: {value: 0.5}\n"), Catch::Contains("no source"));
  CHECK_THAT(wrong("gemm:\n  eficiency: {value: 0.5, source: x}\n"), Catch::Contains("gemm.eficiency"));
  CHECK_THAT(wrong("measurements:\n  - {op: liner, m: 1, n: 1, k: 1, seconds: 1}\n"), Catch::Contains("no known op"));
  CHECK_THAT(wrong("measurements:\n  - {op: rms_norm, bytes: 778, seconds: 1e308}\n"),
             Catch::Contains("no time of an op"));
  CHECK_THAT(wrong("measurements:\n  - {op: linear_wgrad, m: 48, n: 9, k: 1e308, seconds: 7e-6}\n"),
             Catch::Contains("no op is larger"));
  CHECK_THAT(wrong("measurements:\n  - {op: linear, m: 1, n: 1, k: 1}\n"), Catch::Contains("no seconds"));
}

TEST_CASE("NCCL's protocols: all-reduce on 8 H200 at every size, and a ring across nodes") {
  // Measured bus bandwidth (wire bytes / s) of nccl-tests with NVLS: 1 MiB 40, 16 MiB 220, 64 MiB 347, 256 MiB 436,
  // 1 GiB 464 GB/s; nothing of the model is fitted on these but the ring's rate and the gain of NVLS.
  auto s = load_scenario_text(
      "model: qwen2.5-7b\ncluster: {gpu: h200-sxm-141gb, nodes: 1}\ntrain: {layout: {dp: 8}}\n"
      "rollout: {layout: {dp: 8}}\n",
      "h200");
  REQUIRE(s.has_value());
  const CostModel m(hardware_from_datasheet(s->cluster), s->cluster);
  const std::pair<double, double> measured[] = {{1, 40}, {16, 220}, {64, 347}, {256, 436}, {1024, 464}};
  for (const auto& [size, rate] : measured) {
    const double bytes = size * 1024 * 1024;
    const double seconds = CostModel::wire_bytes(OpKind::all_reduce, 8, bytes) / (rate * 1e9);
    INFO(size << " MiB");
    CHECK(m.collective_seconds(OpKind::all_reduce, {8, 1, 8}, bytes) ==
          Approx(seconds).epsilon(size < 16 ? 0.2 : 0.05));
  }
  // Small ones: 20 to 25 us.
  const double small = m.collective_seconds(OpKind::all_reduce, {8, 1, 8}, 1024);
  CHECK(small > 20e-6);
  CHECK(small < 25e-6);
  // All-gather of next to nothing over 4 nodes of 8: start, 28 hops inside, 3 between, in the first protocol.
  const Hardware& h = m.hardware();
  CHECK(m.collective_seconds(OpKind::all_gather, {32, 4, 8}, 1) ==
        Approx(h.inter.latency.value + 28 * h.intra.hop_latency.value + 3 * h.inter.hop_latency.value).epsilon(1e-3));
}

TEST_CASE("more bandwidth is never slower, more bytes never faster") {
  CHECK(rc::check("collectives", [] {
    const auto kind = *rc::gen::element(OpKind::all_gather, OpKind::reduce_scatter, OpKind::all_reduce,
                                        OpKind::all_to_all, OpKind::send, OpKind::broadcast);
    const auto nodes = *rc::gen::inRange<std::int64_t>(1, 9), per_node = *rc::gen::inRange<std::int64_t>(1, 9);
    const double bytes = *rc::gen::inRange<std::int64_t>(1, 1'000'000'000);
    const GroupShape shape{nodes * per_node, nodes, per_node};
    ClusterSpec slow = cluster_of_nodes(nodes), fast = slow;
    fast.network_bandwidth.value *= 2;
    fast.gpu.nvlink_bandwidth.value *= 2;
    const double before = model_of(slow).collective_seconds(kind, shape, bytes);
    RC_ASSERT(model_of(fast).collective_seconds(kind, shape, bytes) <= before);
    RC_ASSERT(model_of(slow).collective_seconds(kind, shape, bytes * 2) >= before);
  }));
}

TEST_CASE("products of few rows wait for the weights, on a chip with few FLOPs as on one with many") {
  for (const char* gpu : {"h100-sxm-80gb", "h20-sxm-96gb"}) {
    INFO(gpu);
    const auto cluster = catalogue_cluster(gpu);
    REQUIRE(cluster.has_value());
    const auto hardware = hardware_for(*cluster, catalog_root());
    REQUIRE(hardware.has_value());
    const CostModel cost(*hardware, *cluster);
    const double n = 14336, k = 4096, bytes = 2 * n * k;
    CHECK(cost.gemm_seconds(1, n, k, DType::bf16) == Approx(cost.memory_seconds(bytes)).epsilon(0.01));
    // A matrix instruction has sixteen rows, used or not.
    CHECK(cost.gemm_seconds(1, n, k, cost.peak_flops(DType::bf16), 0.0) ==
          cost.gemm_seconds(16, n, k, cost.peak_flops(DType::bf16), 0.0));
    double last = 0.0;
    for (double m = 1; m <= 600; ++m) {
      const double seconds = cost.gemm_seconds(m, n, k, DType::bf16);
      CHECK(seconds >= last * (1 - 1e-12));
      last = seconds;
    }
    // Nor do a few more rows than a tile cost another of them, whatever the columns: tiles are as wide as it takes.
    for (const double columns : {3584.0, 4608.0, 37888.0})
      for (const double m : {128.0, 256.0, 384.0}) {
        INFO(columns << " columns, " << m << " rows");
        CHECK(cost.gemm_seconds(m + 8, columns, k, DType::bf16) < 1.4 * cost.gemm_seconds(m, columns, k, DType::bf16));
      }
  }
}

TEST_CASE("products of 128 and 256 rows take what vLLM measured") {
  // torch-bf16 of vLLM's bench_fp8_gemm.py, TFLOP/s: pull requests 17126 and 49363 (H100), 18778 (B200). Efficiencies
  // are those of training, on which none of this is fitted.
  const struct {
    const char* gpu;
    double m, n, k, tflops;
  } rows[] = {{"h100-sxm-80gb", 128, 6144, 4096, 307.9},  {"h100-sxm-80gb", 256, 6144, 4096, 544.3},
              {"h100-sxm-80gb", 128, 43008, 5376, 364.7}, {"h100-sxm-80gb", 256, 43008, 5376, 593.3},
              {"b200-sxm-180gb", 128, 6144, 4096, 727.3}, {"b200-sxm-180gb", 256, 6144, 4096, 1111.9}};
  for (const auto& r : rows) {
    INFO(r.gpu << " " << r.m << " x " << r.n << " x " << r.k);
    const auto cluster = catalogue_cluster(r.gpu);
    REQUIRE(cluster.has_value());
    const auto hardware = hardware_for(*cluster, catalog_root());
    REQUIRE(hardware.has_value());
    const double measured = 2.0 * r.m * r.n * r.k / (r.tflops * 1e12);
    CHECK(CostModel(*hardware, *cluster).gemm_seconds(r.m, r.n, r.k, DType::bf16) == Approx(measured).epsilon(0.16));
  }
}

}  // namespace hotbunk
