// Every op at drawn shapes, beside the CPU backend, whose kernels tests/cpu_kernels holds to fp64 sums.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <set>

#include "base/dtype.h"
#include "graph/catalogue.h"
#include "tests/conformance/drawn_cases.h"
#include "tests/conformance/play.h"
#ifdef HOTBUNK_CUDA
#include "backends/cuda/op_launches.h"
#endif

namespace hotbunk::conformance {
namespace {

constexpr auto guard_byte = std::byte{0x5a};

double element_of(const Bytes& bytes, DType dtype, std::int64_t i) {
  const std::byte* at = bytes.data() + RankProgram::guard + i * size_of(dtype);
  const auto as = [at]<class T>(T value) {
    std::memcpy(&value, at, sizeof value);
    return value;
  };
  if (dtype == DType::i32) return as(std::int32_t{});
  if (dtype == DType::i64) return static_cast<double>(as(std::int64_t{}));
  if (dtype == DType::bf16) return to_f32(bf16{as(std::uint16_t{})});
  return as(0.0f);
}

/// Guards, the operand's numbers (NaN or an impossible integer of one that the op must write), guards.
Bytes image_of(const Operand& o, const Tensor& t) {
  Bytes bytes(static_cast<std::size_t>(t.capacity_bytes() + 2 * RankProgram::guard), guard_byte);
  std::byte* at = bytes.data() + RankProgram::guard;
  std::memset(at, 0xff, static_cast<std::size_t>(t.capacity_bytes()));
  const auto put = [&at](auto value) { std::memcpy(at, &value, sizeof value), at += sizeof value; };
  for (std::int64_t i = 0; o.value && i < t.capacity(); ++i) {
    const double v = o.value(i);
    if (o.dtype == DType::i32) put(static_cast<std::int32_t>(v));
    else if (o.dtype == DType::i64) put(static_cast<std::int64_t>(v));
    else if (o.dtype == DType::bf16) put(to_bf16(static_cast<float>(v)).bits);
    else put(static_cast<float>(v));
  }
  return bytes;
}

/// All cases in one program: each fed, computed and fetched, by as many ranks.
struct DrawnPlan {
  explicit DrawnPlan(const DrawnCases& drawn, std::size_t ranks = 1) {
    script.sizes = drawn.sizes;
    for (const OpCase& c : drawn.cases) {
      std::vector<Tensor>& of = tensors.emplace_back();
      for (const Operand& o : c.operands) {
        of.push_back(program.tensor(o.name, o.dtype, o.shape));
        program.feed(of.back());
        script.feeds["feed " + o.name] = image_of(o, of.back());
      }
      Op op = toy::op(c.kind, streams::compute, c.operands.front().name);
      for (const std::size_t i : c.inputs) op.inputs.push_back(of[i]);
      for (const std::size_t i : c.outputs) op.outputs.push_back(of[i]);
      op.attrs = c.attrs, op.moves = c.moves;
      if (op.has(Attr::vocab_stride) || op.has(Attr::ranks) || c.kind == OpKind::expert_arrivals ||
          c.kind == OpKind::copy_arrivals)
        op.group = 0;
      INFO(op.name);
      REQUIRE_THAT(check_op(op), Catch::Equals(""));
      program.add(op);
      for (const Tensor& t : of) program.fetch(t);
    }
    plan = plan_of(std::vector<Program>(ranks, program.program()));
  }
  RankProgram program;
  Plan plan;
  std::vector<std::vector<Tensor>> tensors;
  Script script;
};

/// How far two backends may be apart, as a fraction of a tensor's largest number: each rounds results to 8 bits once
/// (half of 2^-8), and bf16 attention its scores and their gradients before a product. fp32: 2^-24 for each of the
/// longest sums' 320 terms, of either, by the square root of their number in practice.
double apart(DType result, DType activations) {
  return result == DType::bf16 || activations == DType::bf16 ? 0x1p-7 : 1e-5;
}

void compare(const OpCase& c, const std::vector<Tensor>& tensors, DType activations, const Played& wanted,
             const Played& got, Rank rank) {
  for (const std::size_t k : c.outputs) {
    const Operand& o = c.operands[k];
    const std::string fetch = "fetch " + o.name + "@" + std::to_string(rank);
    const Bytes &theirs = wanted.fetched.at(fetch), &ours = got.fetched.at(fetch);
    INFO("operand " << o.name << " of " << name_of(o.dtype));
    const auto guards = [](const Bytes& b) {
      const auto is_guard = [](std::byte x) { return x == guard_byte; };
      return std::all_of(b.begin(), b.begin() + RankProgram::guard, is_guard) &&
             std::all_of(b.end() - RankProgram::guard, b.end(), is_guard);
    };
    CHECK(guards(ours));
    double largest = 0;
    const std::int64_t n = tensors[k].capacity();
    for (std::int64_t i = 0; i < n; ++i)
      if (const double x = std::abs(element_of(theirs, o.dtype, i)); !std::isinf(x)) largest = std::max(largest, x);
    const bool exact = o.dtype == DType::i32 || o.dtype == DType::i64;
    const double most = exact ? 0.0 : apart(o.dtype, activations) * largest;
    for (std::int64_t i = 0; i < n; ++i) {
      const double a = element_of(ours, o.dtype, i), b = element_of(theirs, o.dtype, i);
      if (a == b || std::abs(a - b) <= most) continue;  // of no key both log-sum-exps are -inf
      INFO("element " << i << " of " << n << ": " << a << ", not " << b << "; at most " << most << " apart");
      CHECK(false);
      break;
    }
  }
}

/// Each case on every backend beside the CPU's.
void check_drawn(std::uint64_t seed, const DrawnCases& drawn, DType dtype, int ranks = 1) {
  const DrawnPlan p(drawn, static_cast<std::size_t>(ranks));
  const Played wanted = play(reference(), p.plan, p.script);
  REQUIRE_THAT(wanted.failure(), Catch::Equals(""));
  for (const auto& subject : subjects()) {
    // Another transport of the CPU backend computes by the same kernels.
    if (!subject->has_values() || subject->name().starts_with("cpu_gloo")) continue;
    const Played got = play(*subject, p.plan, p.script);
    REQUIRE_THAT(got.failure(), Catch::Equals(""));
    for (Rank rank = 0; rank < ranks; ++rank)
      for (std::size_t i = 0; i < drawn.cases.size(); ++i) {
        INFO(subject->name() << ", seed " << seed << ", rank " << rank << ", " << name_of(drawn.cases[i].kind) << " in "
                             << name_of(dtype));
        compare(drawn.cases[i], p.tensors[i], dtype, wanted, got, rank);
      }
  }
}

}  // namespace

TEST_CASE("ops of drawn shapes come to what the CPU backend computes") {
  std::set<OpKind> kinds;
  for (const std::uint64_t seed : {1, 2, 3})
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const DrawnCases drawn = drawn_cases(seed, dtype);
      check_drawn(seed, drawn, dtype);
      for (const OpCase& c : drawn.cases) kinds.insert(c.kind);
    }
  for (int kind = 0; kind < num_op_kinds; ++kind) {
    const auto of = static_cast<OpKind>(kind);
    bool computed = of >= OpKind::embedding && of != OpKind::priced;
#ifdef HOTBUNK_CUDA
    computed = computed || cuda::op_launch(of) != nullptr;
#endif
    INFO(name_of(of) << " is computed, and never drawn");
    if (computed) CHECK(kinds.contains(of));
  }
}

TEST_CASE("sequences that ranks hold in parts are written and attended to as the CPU backend does") {
  for (const std::uint64_t seed : {1, 2, 3})
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const int ranks = seed == 2 ? 2 : 3;
      check_drawn(seed, held_cases(seed, dtype, ranks), dtype, ranks);
    }
}

}  // namespace hotbunk::conformance
