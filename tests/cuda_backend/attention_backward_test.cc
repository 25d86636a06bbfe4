// Attention's backward by cuDNN, on its double, which plays whatever graph it is given: the numbers of fp64 and of our
// kernels over drawn shapes, what is declined and why, and graphs put together wrongly, seen.
#include <fmt/format.h>

#include <catch2/catch.hpp>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <map>
#include <sstream>

#include "backends/cuda/attention_variant.h"
#include "backends/cuda/dnn_attention.h"
#include "backends/cuda/fake/fake_dnn.h"
#include "lowering/lower.h"
#include "tests/conformance/oracle.h"
#include "tests/cuda_backend/device_bench.h"
#include "tests/cuda_backend/iteration.h"
#include "tests/drawn_numbers.h"

using namespace hotbunk;
using namespace hotbunk::cuda;
using namespace hotbunk::test;

namespace attention_backward_test {
namespace {

constexpr std::int64_t workspace = std::int64_t{64} << 20;

struct Shape {
  AttentionHeads heads;
  std::vector<std::int32_t> cu;
  int window = 0;

  std::int64_t T() const { return cu.back(); }
  std::int64_t S() const { return std::ssize(cu) - 1; }
  std::int64_t out() const { return std::int64_t{heads.a} * heads.v; }
  std::int64_t width() const { return std::int64_t{heads.a} * heads.d + std::int64_t{heads.k} * (heads.d + heads.v); }
  std::int64_t pairs() const {
    std::int64_t all = 0;
    for (std::size_t s = 1; s < cu.size(); ++s) {
      const std::int64_t n = cu[s] - cu[s - 1];
      all += n * (n + 1) / 2;
    }
    return all;
  }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(heads.d)); }
  AttentionBackward op() const { return {DType::bf16, heads, {scale(), 0.0f, window}, T(), S(), pairs()}; }
  std::string text() const {
    return fmt::format("{} heads over {} of {} and {}, window {}, {} sequences, {} rows", heads.a, heads.k, heads.d,
                       heads.v, window, S(), T());
  }
};

/// Inputs on the device, o and lse by our forward kernel.
struct Bench : cuda::test::DeviceBench {
  FakeDnn dnn{fake};
  Shape s;
  AttentionBackwardAddresses at;
  std::vector<float> x, d_o, o, lse;

  explicit Bench(Shape shape, int capability = 90)
      : DeviceBench({.modules = cuda::test::parsed_kernels(), .compute_capability = capability}), s(std::move(shape)) {
    CUdeviceptr next = memory.address();
    const auto room = [&](std::int64_t bytes) {
      const CUdeviceptr here = next;
      next += static_cast<CUdeviceptr>((bytes + 255) / 256 * 256);
      REQUIRE(next <= memory.address() + static_cast<CUdeviceptr>(memory.bytes()));
      return here;
    };
    at = {.d_o = room(2 * s.T() * s.out()),
          .x = room(2 * s.T() * s.width()),
          .o = room(2 * s.T() * s.out()),
          .lse = room(4 * s.T() * s.heads.a),
          .cu_seqlens = room(4 * (s.S() + 1)),
          .dx = room(2 * s.T() * s.width()),
          .delta = room(4 * s.T() * s.heads.a)};
    x = cuda::test::bf16_numbers(s.T() * s.width(), 1), d_o = cuda::test::bf16_numbers(s.T() * s.out(), 2);
    write(at.x, x, DType::bf16), write(at.d_o, d_o, DType::bf16);
    std::byte* here = staging.take(static_cast<std::int64_t>(4 * s.cu.size()));
    std::memcpy(here, s.cu.data(), 4 * s.cu.size());
    HB_CUDA(context.driver(), cuMemcpyHtoDAsync(at.cu_seqlens, here, 4 * s.cu.size(), stream.handle()));
    staging.in_use();
    own("attention", at.x, at.cu_seqlens, at.o, at.lse);
    o = read(at.o, static_cast<std::size_t>(s.T() * s.out()), DType::bf16);
    lse = read(at.lse, static_cast<std::size_t>(s.T() * s.heads.a), DType::f32);
  }

  template <class... A>
  void own(const char* kernel, const A&... addresses) {
    const AttentionHeads& h = s.heads;
    const std::string name = fmt::format("tiled_{}_{}", kernel, std::max(h.d, h.v) <= 64 ? 64 : 128);
    const bool of_keys = std::string_view(kernel) == "attention_key_backward";
    launch(name, {blocks_of(s.T() * (of_keys ? 1 : h.a / h.k), 64) + s.S(), h.k}, 128, addresses...,
           static_cast<int>(s.S()), h, ScoreOptions{s.scale(), 0.0f, s.window});
  }
  std::vector<float> by_own_kernels() {
    own("attention_query_backward", at.d_o, at.x, at.o, at.lse, at.cu_seqlens, at.dx, at.delta);
    own("attention_key_backward", at.d_o, at.x, at.lse, at.delta, at.cu_seqlens, at.dx);
    return gradient();
  }
  std::vector<float> gradient() { return read(at.dx, static_cast<std::size_t>(s.T() * s.width()), DType::bf16); }

  /// In fp64, with how far a kernel may be from it.
  std::vector<conformance::Bounded> exact() const {
    const auto wide = [](DType t, std::vector<std::int64_t> shape, const auto& v) {
      return conformance::Numbers(t, std::move(shape), std::vector<double>(v.begin(), v.end()));
    };
    conformance::OpCase c{OpKind::attention_backward, {}, {}, {}, {}};
    c.attrs = {{Attr::heads, std::int64_t{s.heads.a}},       {Attr::kv_heads, std::int64_t{s.heads.k}},
               {Attr::head_dim, std::int64_t{s.heads.d}},    {Attr::value_dim, std::int64_t{s.heads.v}},
               {Attr::window, std::int64_t{s.window}},       {Attr::softcap, 0.0},
               {Attr::scale, static_cast<double>(s.scale())}};
    std::vector<conformance::Numbers> given = {
        wide(DType::bf16, {s.T(), s.out()}, d_o), wide(DType::bf16, {s.T(), s.width()}, x),
        wide(DType::bf16, {s.T(), s.out()}, o), wide(DType::f32, {s.T(), s.heads.a}, lse),
        wide(DType::i32, {s.S() + 1}, s.cu)};
    for (std::size_t i = 0; i < given.size(); ++i)
      c.inputs.push_back(i), c.operands.push_back({"", given[i].dtype(), {}, {}});
    c.outputs.push_back(c.operands.size()), c.operands.push_back({"", DType::bf16, {s.T(), s.width()}, {}});
    given.push_back(wide(DType::bf16, {s.T(), s.width()}, x));
    return conformance::expected(c, given, 0).front().numbers;
  }
  void check_clean() {
    HB_CUDA(context.driver(), cuStreamSynchronize(stream.handle()));
    CHECK(fake.findings() == std::vector<std::string>{});
  }
};

/// How many elements are farther from fp64 than a kernel may be. A library rounds the parts of heads that share keys
/// before it adds them: each term once more, so at most as much again.
std::int64_t wrong(const std::vector<float>& got, const std::vector<conformance::Bounded>& exact, double allowed) {
  REQUIRE(got.size() == exact.size());
  std::int64_t out = 0;
  for (std::size_t i = 0; i < got.size(); ++i) out += !(std::abs(got[i] - exact[i].value) <= allowed * exact[i].error);
  return out;
}

std::vector<Shape> drawn_shapes(std::int64_t count) {
  DrawnNumbers draw(11);
  std::vector<Shape> out;
  while (std::ssize(out) < count) {
    const auto k = static_cast<int>(draw.in(1, 3)), group = static_cast<int>(draw.in(1, 3));
    Shape s{{k * group, k, static_cast<int>(16 * draw.in(1, 4)), static_cast<int>(16 * draw.in(1, 4))}, {0}, 0};
    for (std::int64_t n = draw.in(1, 5); n > 0; --n)
      s.cu.push_back(s.cu.back() + static_cast<std::int32_t>(draw.in(0, 2) == 0 ? draw.in(60, 140) : draw.in(0, 20)));
    if (draw.in(0, 1) == 1) s.window = static_cast<int>(draw.in(1, 70));
    if (s.T() > 0 && s.T() * s.width() < 150'000) out.push_back(std::move(s));
  }
  return out;
}

}  // namespace

TEST_CASE("cuDNN's gradients of attention are those of fp64, and of our kernels, over drawn shapes") {
  std::int64_t sharing = 0, windowed = 0, packed = 0;
  for (const Shape& s : drawn_shapes(12)) {
    INFO(s.text());
    Bench t(s);
    const auto exact = t.exact();
    DnnAttention attention(t.dnn.table(), t.launch, workspace);
    REQUIRE(attention.take(s.op(), t.at));
    const auto theirs = t.gradient(), ours = t.by_own_kernels();
    CHECK(wrong(ours, exact, 1.0) == 0);
    CHECK(wrong(theirs, exact, s.heads.a == s.heads.k ? 1.0 : 2.0) == 0);
    sharing += s.heads.a != s.heads.k, windowed += s.window > 0, packed += s.S() > 1;
    t.check_clean();
  }
  CHECK((sharing > 2 && windowed > 2 && packed > 2));
}

TEST_CASE("a graph put together wrongly gives other gradients, or is refused") {
  const Shape s{{4, 2, 16, 32}, {0, 40, 57, 121}, 30};
  Bench t(s);
  const auto exact = t.exact();
  const auto mistaken = [&](const std::function<void(Dnn&)>& tamper) {
    Dnn table = t.dnn.table();
    tamper(table);
    DnnAttention attention(table, t.launch, workspace);
    t.launch.fill(t.at.dx, 0, 2 * s.T() * s.width());
    if (!attention.take(s.op(), t.at)) return std::int64_t{-1};
    return wrong(t.gradient(), exact, 2.0);
  };
  CHECK(mistaken([](Dnn&) {}) == 0);
  static Dnn real;
  real = t.dnn.table();
  /// The nth pointwise mode that is set to `from` becomes `to`.
  static int from, to, nth;
  const auto changed = [&](int mode, int into, int which) {
    from = mode, to = into, nth = which;
    return mistaken([](Dnn& d) {
      d.cudnnBackendSetAttribute = [](DnnDescriptor x, int name, int type, std::int64_t count, const void* value) {
        if (name == dnn::pointwise_mode && *static_cast<const int*>(value) == from && --nth == 0) value = &to;
        return real.cudnnBackendSetAttribute(x, name, type, count, value);
      };
    });
  };
  const std::int64_t all = s.T() * s.width();
  CHECK(changed(dnn::mode_greater_equal, dnn::mode_less, 1) > all / 10);     // the causal mask the other way round
  CHECK(changed(dnn::mode_greater, dnn::mode_greater_equal, 1) > all / 40);  // a window of a key more
  CHECK(changed(dnn::mode_sub, dnn::mode_add, 2) > all / 10);                // delta is added
  /// An attribute of a tensor, or an address, by the place at which it is given.
  static std::function<void(std::vector<std::uint64_t>&)> edit;
  const auto moved = [&](std::function<void(std::vector<std::uint64_t>&)> how) {
    edit = std::move(how);
    return mistaken([](Dnn& d) {
      d.cudnnBackendSetAttribute = [](DnnDescriptor x, int name, int type, std::int64_t count, const void* values) {
        if (name != dnn::pack_pointers) return real.cudnnBackendSetAttribute(x, name, type, count, values);
        const auto* first = static_cast<const std::uint64_t*>(values);
        std::vector<std::uint64_t> pointers(first, first + count);
        edit(pointers);
        return real.cudnnBackendSetAttribute(x, name, type, count, pointers.data());
      };
    });
  };
  const AttentionGraph g = attention_backward_graph(real, {s.heads, s.window, 1, 128});
  const auto place = [&](AttentionGraph::Id id) {  // stored tensors and numbers come first, in order of their ids
    return static_cast<std::size_t>(id - 1);
  };
  static float twice = 2.0f * s.scale();
  CHECK(moved([&](auto& p) { p[place(g.scale)] = reinterpret_cast<std::uint64_t>(&twice); }) > all / 10);
  CHECK(moved([&](auto& p) { std::swap(p[place(g.dk)], p[place(g.dv)]); }) > all / 10);
  CHECK(moved([&](auto& p) { p[place(g.k)] += 2 * 16; }) > all / 10);  // another head's keys
  t.check_clean();
}

TEST_CASE("what cuDNN is not asked for, or cannot, stays with our kernels, and the reason is kept") {
  const Shape s{{2, 2, 16, 16}, {0, 9, 20}, 0};
  Bench t(s);
  DnnAttention attention(t.dnn.table(), t.launch, workspace);
  const auto why = [&](const AttentionBackward& op, DnnAttention& by) {
    const auto before = by.counts().reasons;
    CHECK_FALSE(by.take(op, t.at));
    for (const auto& [reason, n] : by.counts().reasons)
      if (!before.contains(reason) || before.at(reason) < n) return reason;
    return std::string();
  };
  AttentionBackward op = s.op();
  op.dtype = DType::f32;
  CHECK(why(op, attention) == "fp32 operands");
  op = s.op(), op.heads.d = 24;
  CHECK_THAT(why(op, attention), Catch::Contains("heads of 24 and 16 numbers"));
  op = s.op(), op.heads.d = op.heads.v = 144;
  CHECK_THAT(why(op, attention), Catch::Contains("heads of 144"));
  op = s.op(), op.scores.softcap = 30.0f;
  CHECK(why(op, attention) == "capped scores");
  op = s.op(), op.tokens = 0;
  CHECK(why(op, attention) == "no rows");
  op = s.op(), op.tokens = std::int64_t{1} << 26;
  CHECK(why(op, attention) == "offsets beyond 32 bits");
  CHECK(attention.counts().searched == 0);
  // One sequence of at most 2,048 rows and two heads: 2 x 2,048² x 2 B = 16 MiB, and four bytes a number between ops.
  DnnAttention narrow(t.dnn.table(), t.launch, std::int64_t{8} << 20);
  op = s.op(), op.sequences = 1, op.tokens = 2048, op.pairs = 2048 * 2049 / 2;
  CHECK(why(op, narrow) == "a workspace of 16 MiB, more than 8");
  CHECK(narrow.counts().searched == 1);
  CHECK(why(op, narrow) == "a workspace of 16 MiB, more than 8");
  CHECK(narrow.counts().searched == 1);
  t.dnn.know_other_bits_only();
  DnnAttention restless(t.dnn.table(), t.launch, workspace);
  CHECK(why(s.op(), restless) == "other bits each time");
  t.dnn.know_nothing();
  DnnAttention idle(t.dnn.table(), t.launch, workspace);
  CHECK(why(s.op(), idle) == "cuDNN has no engine for it");
  CHECK(idle.counts().declined == 1);
  CHECK(idle.counts().taken == 0);
  t.check_clean();
}

TEST_CASE("on another architecture than sm_90 nothing is taken") {
  const Shape s{{2, 2, 16, 16}, {0, 9, 20}, 0};
  Bench t(s, 80);
  DnnAttention attention(t.dnn.table(), t.launch, workspace);
  CHECK_FALSE(attention.take(s.op(), t.at));
  CHECK(attention.counts().reasons ==
        std::map<std::string, std::int64_t>{{"sm_80: the form with the same bits each time is known of sm_90", 1}});
}

TEST_CASE("sequences go through the workspace a few at a time, and few graphs are made") {
  Shape s{{2, 1, 16, 16}, {0}, 0};
  for (int n = 0; n < 11; ++n) s.cu.push_back(s.cu.back() + 7 + n);
  Bench t(s);
  const auto exact = t.exact();
  // Between ops are 2 x 128² numbers of each sequence, 64 KiB in 16 bits: four sequences at once.
  DnnAttention attention(t.dnn.table(), t.launch, std::int64_t{256} << 10);
  REQUIRE(attention.take(s.op(), t.at));
  CHECK(wrong(t.gradient(), exact, 2.0) == 0);
  CHECK(attention.counts().executed == 4);  // 4, 4, 2 and 1
  CHECK(attention.counts().searched == 3);
  REQUIRE(attention.take(s.op(), t.at));
  CHECK(attention.counts().searched == 3);
  CHECK(attention.counts().taken == 2);
  t.check_clean();
}

TEST_CASE("the longest sequence is bounded by tokens and pairs, and one that is longer ends the launch") {
  DrawnNumbers draw(5);
  for (int n = 0; n < 200; ++n) {
    AttentionBackward a;
    a.sequences = draw.in(1, 40);
    std::int64_t longest = 0;
    for (std::int64_t i = 0; i < a.sequences; ++i) {
      const std::int64_t rows = draw.in(0, 3) == 0 ? draw.in(0, 3000) : draw.in(0, 50);
      a.tokens += rows, a.pairs += rows * (rows + 1) / 2, longest = std::max(longest, rows);
    }
    CHECK(longest_at_most(a) >= longest);
    CHECK(longest_at_most(a) <= a.tokens);
  }
  AttentionBackward equal{.tokens = 80, .sequences = 8, .pairs = 8 * 55};
  CHECK(longest_at_most(equal) == 11);  // 10, and a row for roundings
  equal.pairs = 0;                      // nobody counted them
  CHECK(longest_at_most(equal) == 80);

  const Shape s{{1, 1, 16, 16}, {0, 140, 150}, 0};
  Bench t(s);
  AttentionBackward op = s.op();
  op.pairs = 2 * 75 * 76 / 2;  // of two sequences of 75: none of 140
  DnnAttention attention(t.dnn.table(), t.launch, workspace);
  attention.take(op, t.at);
  t.context.driver().cuStreamSynchronize(t.stream.handle());
  REQUIRE(!t.fake.findings().empty());
  CHECK_THAT(t.fake.findings().front(), Catch::Contains("trap") && Catch::Contains("attention_lengths"));
}

namespace {

/// The tiny job in bf16, its heads as cuDNN takes them, engines of one rank.
Scenario in_halves(std::vector<std::string> sets = {}) {
  for (const char* set : {"steps=2", "train.precision.params=bf16", "rollout.dtype=bf16", "model.head_dim=16",
                          "rollout.layout.tp=1", "rollout.layout.dp=2"})
    sets.emplace_back(set);
  return tiny_job(sets);
}
constexpr std::int64_t roomy = std::int64_t{512} << 20;

std::map<std::string, double> figures(const Iteration& it) {
  std::map<std::string, double> out;
  std::istringstream lines(it.numbers);
  for (std::string line; std::getline(lines, line);)
    if (const auto space = line.find(' '); line.find(':') == std::string::npos && space != std::string::npos)
      out[line.substr(0, space)] = std::strtod(line.c_str() + space, nullptr);  // of the last step
  return out;
}

}  // namespace

TEST_CASE(
    "an iteration whose gradients of attention are cuDNN's: log-probs equal to the bit, every schedule the same") {
  const Scenario scenario = in_halves();
  const auto plan = lower(scenario);
  REQUIRE(plan);
  const Iteration own = run_iteration(*plan, scenario, {.memory_bytes = roomy});
  REQUIRE_THAT(own.text(), Catch::Equals(""));
  CHECK(own.choices.empty());
  Setting by_library{.memory_bytes = roomy, .dnn_attention = true};
  const Iteration first = run_iteration(*plan, scenario, by_library);
  REQUIRE_THAT(first.text(), Catch::Equals(""));
  CHECK(first.calls.at("cudnnBackendExecute") > 0);
  CHECK(!first.launches.contains("tiled_attention_key_backward_64"));
  CHECK(own.launches.contains("tiled_attention_key_backward_64"));
  REQUIRE(first.choices.size() == 1);
  CHECK(first.choices[0].op == "attention_backward");
  CHECK(first.choices[0].by == "cuDNN");
  CHECK(first.choices[0].times > 0);
  // P5: rollout and training agree to the bit; gradients to roundings of bf16, of a sum over all parameters.
  const auto theirs = figures(first), ours = figures(own);
  CHECK(theirs.at("rollout/logprob_gap_max") == 0.0);
  CHECK(std::abs(theirs.at("actor/grad_norm") - ours.at("actor/grad_norm")) <= 0.01 * ours.at("actor/grad_norm"));
  for (std::uint64_t seed = 2; seed <= 6; ++seed) {  // P7
    by_library.seed = seed;
    CHECK(run_iteration(*plan, scenario, by_library).numbers == first.numbers);
  }
  // In fp32 there is nothing for cuDNN: the run without it, and the reason.
  const Scenario wide = tiny_job({"model.head_dim=16"});
  const auto in_full = lower(wide);
  REQUIRE(in_full);
  by_library.seed = 1;
  const Iteration declined = run_iteration(*in_full, wide, by_library);
  REQUIRE_THAT(declined.text(), Catch::Equals(""));
  CHECK(declined.numbers == run_iteration(*in_full, wide, {.memory_bytes = roomy}).numbers);
  REQUIRE(declined.choices.size() == 1);
  CHECK(declined.choices[0].by == "own");
  CHECK(declined.choices[0].why == "fp32 operands");
}

TEST_CASE("a call of cuDNN's that fails ends the run with rank, phase and op") {
  const Scenario scenario = in_halves({"steps=1"});
  const auto plan = lower(scenario);
  REQUIRE(plan);
  const Iteration whole = run_iteration(*plan, scenario, {.memory_bytes = roomy, .dnn_attention = true});
  REQUIRE_THAT(whole.text(), Catch::Equals(""));
  int entries = 0;
  for (const auto& [entry, calls] : whole.calls) {
    if (!entry.starts_with("cudnn") || entry == "cudnnDestroy") continue;
    ++entries;
    for (const std::int64_t nth : {std::int64_t{1}, calls / 2 + 1}) {
      const Iteration it =
          run_iteration(*plan, scenario, {.memory_bytes = roomy, .dnn_attention = true, .prepare = [&](FakeDriver& f) {
                                            f.fail_call(entry, nth, CUDA_ERROR_LAUNCH_FAILED);
                                          }});
      INFO(entry << ", call " << nth << " of " << calls << "\n" << it.text());
      CHECK(it.faults_met == 1);
      CHECK_THAT(it.text(), Catch::Contains(entry) && Catch::Contains("CUDNN_STATUS_INTERNAL_ERROR"));
      if (entry != "cudnnCreate")
        CHECK_THAT(it.text(), Catch::Contains("rank ") && Catch::Contains("phase train") && Catch::Contains("(op ") &&
                                  Catch::Contains("attention"));
    }
  }
  CHECK(entries == 7);
}

TEST_CASE("cuDNN of this machine takes the graph for a device that is described to it") {
  const auto dnn = open_dnn();
  if (!dnn) return;  // not here
  // An H100, as CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION has it.
  const std::string device = R"({"maxGridSize": [2147483647, 65535, 65535], "maxBlockSize": [1024, 1024, 64],
    "deviceVer": 900, "driverVer": 13000, "multiProcessorCount": 132, "smClockRateKHz": 1980000,
    "memClockRateKHz": 2619000, "l2CacheSize": 52428800, "warpSize": 32, "maxSharedMemoryPerBlock": 49152,
    "maxSharedMemoryPerBlockOptin": 232448, "reservedSharedMemoryPerBlock": 1024, "maxRegistersPerSM": 65536,
    "regsPerBlock": 65536, "pciDeviceId": 9008, "maxCtasPerSM": 32, "maxThreadsPerBlock": 1024,
    "maxThreadsPerSM": 2048, "isTccDriver": 0, "supportCoopLaunch": 1, "totalGlobalMem": 85000000000,
    "cudaDeviceId": 0, "deviceName": "NVIDIA H100 80GB HBM3"})";
  DnnObject properties(*dnn, dnn::device_properties);
  properties.set(dnn::device_json, dnn::of_char, std::ssize(device), device.data());
  properties.finalize();
  for (const int window : {0, 512}) {
    AttentionGraph g = attention_backward_graph(*dnn, {{32, 8, 128, 128}, window, 2, 2048});
    const DnnGraph::Found found = g.graph.find_plan({.device = properties.get()}, DnnAttention::usual_workspace_bytes);
    // Engines load their kernels when they are asked: without a driver none is found. A graph that cuDNN would not
    // know fails before.
    INFO(found.why_none);
    CHECK((found.plan || found.why_none == "cuDNN has no engine for it" || found.why_none.starts_with("no plan")));
  }
}

TEST_CASE("descriptors of cuDNN's are given back") {
  const Shape s{{2, 2, 16, 16}, {0, 9, 20}, 0};
  Bench t(s);
  {
    DnnAttention attention(t.dnn.table(), t.launch, workspace);
    CHECK(attention.take(s.op(), t.at));
    t.check_clean();
  }
  CHECK(t.dnn.alive() == 0);
}

}  // namespace attention_backward_test
