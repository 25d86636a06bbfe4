#include <rapidcheck.h>

#include <catch2/catch.hpp>
#include <map>
#include <set>

#include "graph/access.h"
#include "graph/passes.h"
#include "graph/verify.h"
#include "programs.h"

using namespace hotbunk;
using namespace hotbunk::test;

namespace {

/// Buffers of 16 fp32 each, back to back.
Program buffers(int count) {
  Program p;
  for (int i = 0; i < count; ++i) p.buffers.push_back(scratch("b", 16, 64 * i));
  return p;
}

/// The events of one block by their ends: "gather 0 -> compute 1" says that compute, before op 1, waits for op 0 of
/// gather. Ops count without records, waits, allocs and frees; -1 and `end` are the block's borders.
std::vector<std::string> order_of(Program p, std::vector<Op> ops) {
  p.phases = {{{"work", std::move(ops)}}};
  insert_dependencies(p);
  std::map<EventId, std::string> recorded;
  std::vector<std::string> out;
  int index = -1;
  for (const Op& o : p.phases[0][0].ops) {
    if (o.kind == OpKind::record) recorded[o.event] = std::string(name_of(o.stream)) + " " + std::to_string(index);
    else if (o.kind == OpKind::wait)
      out.push_back(recorded.at(o.event) + " -> " + std::string(name_of(o.stream)) + " " + std::to_string(index + 1));
    else if (o.kind != OpKind::alloc && o.kind != OpKind::free) ++index;
  }
  return out;
}

using Lines = std::vector<std::string>;
constexpr StreamId gather = StreamId::gather, reduce = StreamId::reduce;

std::vector<Access> accesses_of(const Program& p, const Op& o) {
  std::vector<Access> out;
  each_access(p, o, [&](const Access& a) { out.push_back(a); });
  return out;
}

/// Conflicting accesses that no chain of stream order and events orders, by transitive closure over all ops of prologue
/// and two iterations: the slow obvious version of what verify's clocks do.
bool all_ordered(const Plan& plan) {
  const Program& p = plan.programs[0];
  std::vector<Op> ops = p.phases[0][0].ops;
  for (int turn = 0; turn < 2; ++turn) ops.insert(ops.end(), p.phases[1][0].ops.begin(), p.phases[1][0].ops.end());
  const std::size_t n = ops.size();
  std::vector<std::vector<bool>> before(n, std::vector<bool>(n));  // before[j][i]: i happens before j
  std::map<StreamId, std::size_t> last;
  std::map<EventId, std::size_t> recorded;
  for (std::size_t j = 0; j < n; ++j) {
    const auto follow = [&](std::size_t i) {
      for (std::size_t k = 0; k < n; ++k) before[j][k] = before[j][k] || before[i][k];
      before[j][i] = true;
    };
    if (auto it = last.find(ops[j].stream); it != last.end()) follow(it->second);
    if (ops[j].kind == OpKind::wait) follow(recorded.at(ops[j].event));
    if (ops[j].kind == OpKind::record) recorded[ops[j].event] = j;
    last[ops[j].stream] = j;
    if (ops[j].kind == OpKind::alloc || ops[j].kind == OpKind::free) continue;
    for (std::size_t i = 0; i < j; ++i) {
      if (before[j][i] || ops[i].kind == OpKind::alloc || ops[i].kind == OpKind::free) continue;
      for (const Access& a : accesses_of(p, ops[i]))
        for (const Access& b : accesses_of(p, ops[j]))
          if ((a.write || b.write) && a.section == b.section && a.begin < b.end && b.begin < a.end) return false;
    }
  }
  return true;
}

}  // namespace

TEST_CASE("Read after write, write after read and write after write are ordered across streams") {
  const Program p = buffers(3);
  const Tensor a = whole(p, 0), b = whole(p, 1), c = whole(p, 2);
  // gather begins behind the block's start; compute reads what it wrote.
  CHECK(order_of(p, {op(OpKind::zero, {}, {a}, gather), op(OpKind::copy, {a}, {b})}) ==
        Lines{"compute -1 -> gather 0", "gather 0 -> compute 1"});
  // gather overwrites what compute still reads; its own end is joined.
  CHECK(order_of(p, {op(OpKind::copy, {a}, {b}), op(OpKind::zero, {}, {a}, gather)}) ==
        Lines{"compute -1 -> gather 0", "compute 0 -> gather 1", "gather 1 -> compute 2"});
  CHECK(order_of(p, {op(OpKind::zero, {}, {a}), op(OpKind::zero, {}, {a}, gather)}) ==
        Lines{"compute -1 -> gather 0", "compute 0 -> gather 1", "gather 1 -> compute 2"});
  // Two reads conflict in nothing.
  CHECK(order_of(p, {op(OpKind::copy, {a}, {b}), op(OpKind::copy, {a}, {c}, gather)}) ==
        Lines{"compute -1 -> gather 0", "gather 1 -> compute 2"});
  // One stream needs no event at all, other streams absent.
  CHECK(order_of(p, {op(OpKind::zero, {}, {a}), op(OpKind::copy, {a}, {b})}).empty());
}

TEST_CASE("A range that is reused is ordered like one buffer") {
  Program p = buffers(2);
  p.buffers[1].offset = 0;  // lives where 0 lived
  // The wait stands in front of the alloc: from alloc on the range is the new buffer's.
  p.phases = {{{"work",
                {memory(OpKind::alloc, 0), op(OpKind::zero, {}, {whole(p, 0)}), memory(OpKind::free, 0),
                 memory(OpKind::alloc, 1, gather), op(OpKind::zero, {}, {whole(p, 1)}, gather),
                 memory(OpKind::free, 1, gather)}}}};
  insert_dependencies(p);
  std::vector<OpKind> kinds;
  for (const Op& o : p.phases[0][0].ops) kinds.push_back(o.kind);
  using enum OpKind;
  CHECK(kinds == std::vector<OpKind>{record, wait, alloc, zero, record, free, wait, alloc, zero, free, record, wait});
}

TEST_CASE("Parts of a buffer that do not meet are not ordered") {
  const Program p = buffers(2);
  const Tensor left = tensor(0, DType::f32, {fixed(8)}), right = tensor(0, DType::f32, {fixed(8)}, 32);
  CHECK(order_of(p, {op(OpKind::zero, {}, {left}), op(OpKind::zero, {}, {right}, gather)}) ==
        Lines{"compute -1 -> gather 0", "gather 1 -> compute 2"});
}

TEST_CASE("Order that others imply is not added again") {
  const Program p = buffers(3);
  const Tensor a = whole(p, 0), b = whole(p, 1), c = whole(p, 2);
  // reduce reads b (after gather) and a (after compute); gather's op already came behind compute's.
  CHECK(order_of(p, {op(OpKind::zero, {}, {a}), op(OpKind::copy, {a}, {b}, gather),
                     op(OpKind::add, {a, b}, {c}, reduce), op(OpKind::copy, {c}, {a})}) ==
        Lines{"compute -1 -> gather 0", "compute -1 -> reduce 0", "compute 0 -> gather 1", "gather 1 -> reduce 2",
              "reduce 2 -> compute 3"});  // which also covers gather at the end
  // A second read behind the same event waits no more.
  CHECK(order_of(p, {op(OpKind::zero, {}, {a}, gather), op(OpKind::copy, {a}, {b}), op(OpKind::copy, {a}, {c})}) ==
        Lines{"compute -1 -> gather 0", "gather 0 -> compute 1"});
}

TEST_CASE("Random programs: verified as inserted, and a wait may go only if nothing needed it") {
  int needed = 0, spare = 0;
  CHECK(rc::check("drop one wait", [&] {
    Program p;
    const int count = *rc::gen::inRange(2, 6);
    std::vector<BufferId> transients;
    for (int i = 0; i < count; ++i) p.buffers.push_back(scratch("t", 16 * *rc::gen::inRange(1, 3)));
    for (int i = 0; i < count; ++i) transients.push_back(i);
    const auto any_tensor = [&] {
      const BufferId id = *rc::gen::inRange(0, count);
      const Tensor t = whole(p, id);
      if (*rc::gen::arbitrary<bool>()) return t;
      return tensor(id, DType::f32, {fixed(8)}, *rc::gen::arbitrary<bool>() ? 0 : 32);
    };
    std::vector<Op> ops;
    const int num_ops = *rc::gen::inRange(1, 14);
    for (int i = 0; i < num_ops; ++i) {
      const auto stream = static_cast<StreamId>(*rc::gen::inRange(0, 4));
      std::vector<Tensor> in;
      for (int k = *rc::gen::inRange(0, 3); k > 0; --k) in.push_back(any_tensor());
      ops.push_back(in.empty() ? op(OpKind::zero, {}, {any_tensor()}, stream)
                               : op(OpKind::copy_boxes, std::move(in), {any_tensor()}, stream));
    }
    Plan plan = plan_of(p, ops, 4096);
    insert_lifetimes(plan.programs[0], transients);
    assign_offsets(plan, plan.programs[0]);
    plan.programs[0].section_bytes[static_cast<std::size_t>(Section::transient)] = 4096;
    insert_dependencies(plan.programs[0]);
    RC_ASSERT(verify(plan) == std::vector<std::string>{});
    RC_ASSERT(all_ordered(plan));
    for (std::size_t i = 0; i < work(plan).size(); ++i) {
      if (work(plan)[i].kind != OpKind::wait) continue;
      Plan without = plan;
      work(without).erase(work(without).begin() + static_cast<std::ptrdiff_t>(i));
      const bool ordered = all_ordered(without);
      RC_ASSERT(verify(without).empty() == ordered);
      ++(ordered ? spare : needed);
    }
  }));
  CHECK(needed > spare);  // the spare ones are borders that no access happened to need
}
