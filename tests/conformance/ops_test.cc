// Every op, with sentinels around each of its tensors.
#include <fmt/format.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstring>
#include <set>

#include "graph/catalogue.h"
#include "tests/conformance/op_cases.h"
#include "tests/conformance/play.h"

namespace hotbunk::conformance {
namespace {

constexpr Sizes sizes{5, 2, 9};
constexpr auto sentinel = std::byte{0xa5};

template <class T>
void put(Bytes& bytes, std::int64_t at, T value) {
  std::memcpy(bytes.data() + at, &value, sizeof value);
}
template <class T>
T get(const Bytes& bytes, std::int64_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

bool is_integer(DType dtype) { return dtype == DType::i32 || dtype == DType::i64; }
double element(const Bytes& bytes, DType dtype, std::int64_t i) {
  const std::int64_t at = RankProgram::guard + i * size_of(dtype);
  if (dtype == DType::i32) return get<std::int32_t>(bytes, at);
  if (dtype == DType::i64) return static_cast<double>(get<std::int64_t>(bytes, at));
  if (dtype == DType::bf16) return to_f32(bf16{get<std::uint16_t>(bytes, at)});
  return get<float>(bytes, at);
}
std::vector<double> sorted_elements(const Bytes& bytes, DType dtype, std::int64_t count) {
  std::vector<double> out;
  for (std::int64_t i = 0; i < count; ++i) out.push_back(element(bytes, dtype, i));
  std::ranges::sort(out);
  return out;
}

/// Sentinels, the operand's values (where it has none all bits set, NaN, or of integers, which may be -1, sentinels),
/// sentinels.
Bytes image(const Operand& o, const Tensor& t) {
  Bytes bytes(static_cast<std::size_t>(t.capacity_bytes() + 2 * RankProgram::guard), sentinel);
  if (!is_integer(o.dtype)) std::fill_n(bytes.begin() + RankProgram::guard, t.capacity_bytes(), std::byte{0xff});
  for (std::int64_t i = 0; o.value && i < t.capacity(); ++i) {
    const std::int64_t at = RankProgram::guard + i * size_of(o.dtype);
    if (o.dtype == DType::i32) put(bytes, at, static_cast<std::int32_t>(o.value(i)));
    else if (o.dtype == DType::i64) put(bytes, at, static_cast<std::int64_t>(o.value(i)));
    else if (o.dtype == DType::bf16) put(bytes, at, to_bf16(static_cast<float>(o.value(i))).bits);
    else put(bytes, at, static_cast<float>(o.value(i)));
  }
  return bytes;
}

struct Prepared {
  RankProgram program;
  std::vector<Tensor> tensors;
  Op op;
  Script script;
};

/// On the device's first stream, or on the host's with all tensors in host memory.
Prepared prepare(const OpCase& c, Space space) {
  const StreamId stream = space == Space::device ? streams::compute : streams::host;
  Prepared p;
  p.script.sizes = sizes;
  for (const Operand& o : c.operands) {
    p.tensors.push_back(p.program.tensor(o.name, o.dtype, o.shape, space));
    p.program.feed(p.tensors.back(), stream);
    p.script.feeds["feed " + o.name] = image(o, p.tensors.back());
  }
  p.op = toy::op(c.kind, stream, "the op");
  for (const std::size_t i : c.inputs) p.op.inputs.push_back(p.tensors[i]);
  for (const std::size_t i : c.outputs) p.op.outputs.push_back(p.tensors[i]);
  p.op.attrs = c.attrs;
  p.op.moves = c.moves;
  // The ranks that share the vocabulary, sequences or the experts.
  if (p.op.has(Attr::vocab_stride) || p.op.has(Attr::ranks) || c.kind == OpKind::expert_arrivals ||
      c.kind == OpKind::copy_arrivals)
    p.op.group = 0;
  if (const auto w = prepacked_operand(c)) {
    Op prepack = toy::op(OpKind::prepack, stream, "prepack");
    prepack.inputs = prepack.outputs = {p.tensors[*w]};
    p.program.add(prepack);
  }
  p.program.add(p.op);
  for (const Tensor& t : p.tensors) p.program.fetch(t, stream);
  return p;
}

void check_values(const OpCase& c, const Prepared& p, const Played& played) {
  Values before;
  for (std::size_t k = 0; k < c.operands.size(); ++k) {
    const Operand& o = c.operands[k];
    INFO("tensor " << o.name);
    const Bytes &was = p.script.feeds.at("feed " + o.name), &is = played.fetched.at("fetch " + o.name + "@0");
    REQUIRE(is.size() == was.size());
    const std::int64_t bytes = p.tensors[k].capacity_bytes();
    const auto same = [&](std::int64_t begin, std::int64_t n) {
      return std::equal(is.begin() + begin, is.begin() + begin + n, was.begin() + begin);
    };
    CHECK(same(0, RankProgram::guard));                           // nothing before it is written
    CHECK(same(RankProgram::guard + bytes, RankProgram::guard));  // nor after it
    const bool written = std::ranges::find(c.outputs, k) != c.outputs.end();
    if (c.kind == OpKind::prepack || prepacked_operand(c) == k)
      CHECK(sorted_elements(is, o.dtype, p.tensors[k].capacity()) ==
            sorted_elements(was, o.dtype, p.tensors[k].capacity()));
    else if (!written) CHECK(same(RankProgram::guard, bytes));
    if (written && !o.value)
      for (std::int64_t i = 0; i < p.tensors[k].capacity(); ++i) {
        INFO("element " << i);
        if (is_integer(o.dtype)) CHECK(element(is, o.dtype, i) != element(was, o.dtype, i));
        else CHECK(!std::isnan(element(is, o.dtype, i)));
      }
    before.emplace_back();
    for (std::int64_t i = 0; i < p.tensors[k].capacity(); ++i) before.back().push_back(element(was, o.dtype, i));
  }
  for (std::size_t output = 0; output < c.other_outputs.size(); ++output) {
    const std::size_t k = c.outputs.at(output + 1);
    INFO("tensor " << c.operands[k].name);
    std::vector<double> found;
    for (std::int64_t i = 0; i < p.tensors[k].capacity(); ++i)
      found.push_back(element(played.fetched.at("fetch " + c.operands[k].name + "@0"), c.operands[k].dtype, i));
    CHECK(found == c.other_outputs[output]);
  }
  if (!c.first_output) return;
  const std::size_t k = c.outputs.front();
  const Bytes& is = played.fetched.at("fetch " + c.operands[k].name + "@0");
  for (std::int64_t i = 0; i < p.tensors[k].capacity(); ++i) {
    INFO("element " << i);
    CHECK(element(is, c.operands[k].dtype, i) == stored(c.operands[k].dtype, c.first_output(before, i)));
  }
}

/// One that it executes: what it writes, what it costs, and that it ran once.
void check_case(const Subject& subject, const OpCase& c, const Prepared& p, const Plan& plan, const Played& played) {
  REQUIRE_THAT(played.failure(), Catch::Equals(""));
  if (subject.has_values()) check_values(c, p, played);
  int spans = 0;
  for (const Span& s : played.trace.spans)
    if (played.trace.names[static_cast<std::size_t>(s.name)] == "the op") {
      ++spans;
      CHECK(s.kind == c.kind);
      CHECK(s.bytes == op_bytes(p.op, sizes, places_of(plan, 0)));
      CHECK(s.flops == op_flops(p.op, sizes));
      CHECK(s.end_ns >= s.start_ns);
    }
  CHECK(spans == 1);
}

}  // namespace

TEST_CASE("an op writes its outputs, wholly, and nothing around them; it costs what the catalogue says") {
  for (const auto& subject : subjects()) {
    std::set<OpKind> kinds;
    for (const DType dtype : {DType::f32, DType::bf16})
      for (const OpCase& c : op_cases(dtype)) {
        kinds.insert(c.kind);
        INFO(subject->name() << ", " << name_of(c.kind) << " in " << name_of(dtype));
        const Prepared p = prepare(c, Space::device);
        const Plan plan = plan_of(p.program);
        REQUIRE_THAT(check_op(p.op), Catch::Equals(""));
        const Played played = play(*subject, plan, p.script);
        check_case(*subject, c, p, plan, played);
      }
    for (int kind = static_cast<int>(OpKind::embedding); kind < num_op_kinds; ++kind) {
      if (static_cast<OpKind>(kind) == OpKind::priced) continue;  // what it computes nobody knows; see below
      INFO(name_of(static_cast<OpKind>(kind)) << " has no case");
      CHECK(kinds.contains(static_cast<OpKind>(kind)));
    }
  }
}

TEST_CASE("so does an op of the host's stream, on tensors in host memory") {
  const std::set<OpKind> lowered_there = {OpKind::zero, OpKind::cast,        OpKind::copy,
                                          OpKind::add,  OpKind::sum_squares, OpKind::adamw};
  for (const auto& subject : subjects()) {
    std::set<OpKind> kinds;
    for (const DType dtype : {DType::f32, DType::bf16})
      for (const OpCase& c : op_cases(dtype)) {
        if (!lowered_there.contains(c.kind)) continue;
        kinds.insert(c.kind);
        INFO(subject->name() << ", " << name_of(c.kind) << " in " << name_of(dtype));
        const Prepared p = prepare(c, Space::host);
        const Plan plan = plan_of(p.program);
        check_case(*subject, c, p, plan, play(*subject, plan, p.script));
      }
    CHECK(kinds == lowered_there);
  }
}

TEST_CASE("an op that a backend does not execute is refused before anything runs, with the reason") {
  for (const auto& subject : subjects()) {
    RankProgram program;
    const Tensor x = program.tensor("x", DType::f32, {8}), y = program.tensor("y", DType::f32, {8});
    Op op = toy::op(OpKind::all_to_all, streams::tensor, "exchange");
    op.inputs = {x}, op.outputs = {y}, op.group = 0;
    program.add(op);
    const Played played = play(*subject, on_two_ranks(program));
    INFO(subject->name() << ": " << played.failure());
    if (!played.went_well())
      CHECK_THAT(played.failure(), Catch::Contains("does not execute all_to_all: ") && Catch::Contains("'exchange'"));
  }
}

TEST_CASE("a priced block is played where nothing computes, and refused where something does") {
  for (const auto& subject : subjects()) {
    INFO(subject->name());
    RankProgram program;
    Op op = toy::op(OpKind::priced, streams::compute, "the op");
    op.prices = {{.seconds = 1e-3}};
    program.add(op);
    const Played played = play(*subject, plan_of(program));
    if (!subject->has_values()) CHECK_THAT(played.failure(), Catch::Equals(""));
    else CHECK_THAT(played.failure(), Catch::Contains("E601") && Catch::Contains("it is a priced block"));
  }
}

}  // namespace hotbunk::conformance
