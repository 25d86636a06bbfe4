// Extents: what dimensions follow at run time, and counts that the device makes.
#include <rapidcheck.h>

#include <catch2/catch.hpp>
#include <functional>

#include "graph/catalogue.h"
#include "graph/passes.h"
#include "graph/verify.h"
#include "programs.h"
#include "tests/toy_plan.h"

using namespace hotbunk;
using namespace hotbunk::test;
using Catch::Matchers::Contains;

namespace {

constexpr ExtentId routed{2}, kept{3};

/// "routed", at most 8, and "kept", at most 4, which the device counts. Buffers: 0 n, 1 m, the counts; 2 x, 3 y.
/// Ops of "work": 0..3 alloc, 4 feed n, 5 feed m, 6 zero x[routed], 7 copy x -> y[routed], 8 zero y[kept, routed],
/// 9..12 free.
Plan counting_plan() {
  Program p = test::empty_program();
  for (const char* name : {"n", "m"})
    p.buffers.push_back({name, DType::i64, 1, Category::activations, sections::transient, 64 * std::ssize(p.buffers)});
  for (const char* name : {"x", "y"}) p.buffers.push_back(scratch(name, 32, 128 * std::ssize(p.buffers)));
  const Tensor n = tensor(0, DType::i64, {fixed(1)}), m = tensor(1, DType::i64, {fixed(1)});
  const auto rows = [](BufferId b) { return tensor(b, DType::f32, {{8, routed}, fixed(4)}); };
  const auto feed = [](const Tensor& t, std::int64_t slot) {
    Op o = op(OpKind::feed, {}, {t});
    o.attrs = {{Attr::slot, slot}};
    return o;
  };
  std::vector<Op> ops;
  for (BufferId b = 0; b < 4; ++b) ops.push_back(memory(OpKind::alloc, b));
  ops.push_back(feed(n, 0));
  ops.push_back(feed(m, 1));
  ops.push_back(toy::counted(op(OpKind::zero, {}, {rows(2)}), {n}));
  ops.push_back(toy::counted(op(OpKind::copy, {rows(2)}, {rows(3)}), {n}));
  ops.push_back(toy::counted(op(OpKind::zero, {}, {tensor(3, DType::f32, {{4, kept}, {8, routed}})}), {n, m}));
  for (BufferId b = 0; b < 4; ++b) ops.push_back(memory(OpKind::free, b));
  Plan plan = plan_of(std::move(p), ops, 4096);
  plan.extents.push_back({"routed", 8, CountedBy::device});
  plan.extents.push_back({"kept", 4, CountedBy::device});
  return plan;
}

std::string counting_faults_after(const std::function<void(Plan&)>& spoil) {
  Plan plan = counting_plan();
  spoil(plan);
  return faults_of(plan);
}

/// What a dimension's size was when there were tokens and sequences, and no other extents.
std::int64_t actual_of_two(const Dim& d, const Sizes& s) {
  if (d.extent == fixed_extent) return d.size;
  const std::int64_t there = (d.extent == tokens_extent ? s.tokens : s.seqs) - d.begin;
  return there < 0 ? 0 : there < d.size ? there : d.size;
}

}  // namespace

TEST_CASE("Tokens and sequences are what they were; of what nobody counts there is as much as there is room for") {
  CHECK(rc::check("actual", [] {
    const auto in = [](std::int64_t least, std::int64_t most) { return *rc::gen::inRange(least, most); };
    Sizes s{.tokens = in(-2, 50), .seqs = in(-2, 50), .attention_pairs = in(0, 50)};
    const Dim d{in(0, 30), static_cast<ExtentId>(in(-1, 2)), in(0, 30)};
    RC_ASSERT(d.actual(s) == actual_of_two(d, s));
    const Dim further{d.size, static_cast<ExtentId>(in(2, max_extents)), d.begin};
    RC_ASSERT(further.actual(s) == d.size);
    s[further.extent] = in(0, 50);
    RC_ASSERT(further.actual(s) == actual_of_two({d.size, tokens_extent, d.begin}, {.tokens = s[further.extent]}));
    RC_ASSERT(d.actual(s) == actual_of_two(d, s));  // whatever the others are
  }));
}

TEST_CASE("An op's counts are inputs behind its operands, in the order of the extents, and bytes that it reads") {
  Plan plan = counting_plan();
  const EditedOps ops = work(plan);
  CHECK(ops[6].num_operands() == 0);
  CHECK(ops[7].num_operands() == 1);
  CHECK(plan.counted_extents(ops[5]).empty());
  CHECK(plan.counted_extents(ops[7]) == std::vector{routed});
  CHECK(plan.counted_extents(ops[8]) == std::vector{routed, kept});
  Sizes sizes;
  CHECK(op_bytes(ops[7], sizes, {}) == 2 * 8 * 4 * 4 + 8);
  sizes[routed] = 3;
  CHECK(op_bytes(ops[7], sizes, {}) == 2 * 3 * 4 * 4 + 8);
}

TEST_CASE("Order against whoever makes the count follows from its buffer") {
  Plan plan = counting_plan();
  std::vector<Op> ops = work(plan);
  for (std::size_t i : {4, 5}) ops[i].stream = streams::host;
  std::erase_if(ops, [](const Op& o) { return o.kind == OpKind::alloc || o.kind == OpKind::free; });
  Draft draft = draft_of(plan.programs[0].buffers, {ops[0], ops[2]});  // feed n, zero x[routed]
  insert_dependencies(draft);
  std::vector<std::string> steps;
  for (const Op& o : ops_of(draft))
    if (o.kind != OpKind::alloc && o.kind != OpKind::free)
      steps.push_back(fmt::format("{} {}", plan.stream(o.stream).name, name_of(o.kind)));
  CHECK(steps == std::vector<std::string>{"compute record", "host wait", "host feed", "host record", "compute wait",
                                          "compute zero"});
}

TEST_CASE("The verifier asks for the count of what the device counts") {
  CHECK(counting_faults_after([](Plan&) {}) == "");
  const auto change = [](std::size_t at, const std::function<void(Op&)>& spoil) {
    return counting_faults_after([&](Plan& p) { spoil(work(p)[at]); });
  };
  CHECK_THAT(change(7, [](Op& o) { o.attrs.clear(), o.inputs.pop_back(); }),
             Contains("copy '' lacks the count of 'routed' among its inputs"));
  CHECK_THAT(change(7, [](Op& o) { o.inputs.pop_back(); }), Contains("takes 1 counts from input 1 of 1 on"));
  CHECK_THAT(change(7, [](Op& o) { o.attrs[0].second = std::int64_t{0}; }),
             Contains("takes 1 counts from input 0 of 2 on"));
  CHECK_THAT(change(7, [](Op& o) { o.attrs[0].second = std::int64_t{-1}; }),
             Contains("takes 1 counts from input -1 of 2"));
  CHECK_THAT(change(8, [](Op& o) { o.inputs.pop_back(); }), Contains("takes 2 counts from input 0 of 1 on"));
  CHECK_THAT(change(7, [](Op& o) { o.inputs[1].dtype = DType::i32; }),
             Contains("takes the count of 'routed' from 1 int32, not from one int64"));
  CHECK_THAT(change(7, [](Op& o) { o.inputs[1] = tensor(2, DType::i64, {fixed(2)}); }), Contains("from 2 int64"));
  CHECK_THAT(change(7, [](Op& o) { o.inputs[1].shape[0].extent = tokens_extent; }), Contains("not from one int64"));
  CHECK_THAT(change(7, [](Op& o) { o.inputs[0] = o.outputs[0] = tensor(2, DType::f32, {fixed(4)}); }),
             Contains("takes a count, and the device counts none of its dimensions"));
  CHECK_THAT(change(6, [](Op& o) { o.kind = OpKind::barrier; }), Contains("what it does depends on no size"));
  CHECK_THAT(counting_faults_after([](Plan& p) { work(p).remove(4); }), Contains("that nobody wrote"));
}

TEST_CASE("The verifier asks for extents with names of their own and a capacity that holds their dimensions") {
  const auto spoiled = [](const std::function<void(std::vector<Extent>&)>& spoil) {
    return counting_faults_after([&](Plan& p) { spoil(p.extents); });
  };
  CHECK_THAT(spoiled([](auto& e) { e.resize(1); }), Contains("the plan has 1 extents, of 2 to 8"));
  CHECK_THAT(spoiled([](auto& e) { e.resize(max_extents + 1); }),
             Contains(fmt::format("the plan has {} extents", max_extents + 1)));
  CHECK_THAT(spoiled([](auto& e) { std::swap(e[0], e[1]); }), Contains("are not 'tokens' and 'seqs'"));
  CHECK_THAT(spoiled([](auto& e) { e[0].counted_by = CountedBy::device; }), Contains("are not 'tokens' and 'seqs'"));
  CHECK_THAT(spoiled([](auto& e) { e[3].name = "routed"; }), Contains("two extents of the plan have one name"));
  CHECK_THAT(spoiled([](auto& e) { e[3].name = "fixed"; }), Contains("an extent is called 'fixed'"));
  CHECK_THAT(spoiled([](auto& e) { e[2].capacity = 0; }),
             Contains("extent 'routed', counted by the device, has a capacity of 0"));
  CHECK_THAT(spoiled([](auto& e) { e[2].capacity = 7; }), Contains("has 0..8 of 'routed', which has a capacity of 7"));
  CHECK_THAT(spoiled([](auto& e) { e.pop_back(); }), Contains("zero '' names extent 3 of 3"));
  const auto dimension = [](const Dim& d) {
    return counting_faults_after([&](Plan& p) { work(p)[8].outputs[0].shape[1] = d; });
  };
  CHECK(dimension({4, routed, 4}) == "");
  CHECK_THAT(dimension({4, routed, 5}), Contains("has 5..9 of 'routed'"));
  CHECK_THAT(dimension({4, routed, -1}), Contains("has a dimension that begins at -1"));
  CHECK_THAT(dimension({4, static_cast<ExtentId>(-2)}), Contains("names extent -2 of 4"));
}
