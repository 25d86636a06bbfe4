#include <rapidcheck.h>

#include <catch2/catch.hpp>
#include <map>
#include <set>

#include "graph/access.h"
#include "graph/clock.h"
#include "graph/passes.h"
#include "graph/verify.h"
#include "programs.h"

using namespace hotbunk;
using namespace hotbunk::test;

namespace {

/// Buffers of 16 fp32 each, back to back.
Program buffers(int count) {
  Program p = test::empty_program();
  for (int i = 0; i < count; ++i) p.buffers.push_back(scratch("b", 16, 64 * i));
  return p;
}

/// The events of one block by their ends: "gather 0 -> compute 1" says that compute, before op 1, waits for op 0 of
/// gather. Ops count without records, waits, allocs and frees; -1 and `end` are the block's borders.
std::vector<std::string> order_of(const Program& p, const std::vector<Op>& ops) {
  Draft draft = draft_of(p.buffers, ops);
  draft.slot_limits = p.slot_limits;
  insert_dependencies(draft);
  std::map<EventId, std::string> recorded;
  std::vector<std::string> out;
  int index = -1;
  for (const Op& o : ops_of(draft)) {
    if (o.kind == OpKind::record) recorded[o.event] = plan_streams()[at(o.stream)].name + " " + std::to_string(index);
    else if (o.kind == OpKind::wait)
      out.push_back(recorded.at(o.event) + " -> " + plan_streams()[at(o.stream)].name + " " +
                    std::to_string(index + 1));
    else if (o.kind != OpKind::alloc && o.kind != OpKind::free) ++index;
  }
  return out;
}

using Lines = std::vector<std::string>;
constexpr StreamId gather = streams::gather, reduce = streams::reduce;

std::vector<Access> accesses_of(const Program& p, const Op& o) {
  std::vector<Access> out;
  each_access(p.buffers, o, [&](const Access& a) { out.push_back(a); });
  return out;
}

/// Conflicting accesses that no chain of stream order and events orders, by transitive closure over all ops of prologue
/// and two iterations: the slow obvious version of what verify's clocks do.
bool all_ordered(const Plan& plan) {
  const Program& p = plan.programs[0];
  std::vector<Op> ops = ops_of(p, p.phases[0][0]);
  const std::vector<Op> again = ops_of(p, p.phases[1][0]);
  for (int turn = 0; turn < 2; ++turn) ops.insert(ops.end(), again.begin(), again.end());
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

TEST_CASE("Buffers are strangers, wherever they lie; the wait for one stands in front of the alloc of another") {
  Program p = buffers(2);
  p.buffers[1].offset = 0;  // lies where 0 lies: no reason to wait
  CHECK(order_of(p, {op(OpKind::zero, {}, {whole(p, 0)}), op(OpKind::zero, {}, {whole(p, 1)}, gather)}) ==
        Lines{"compute -1 -> gather 0", "gather 1 -> compute 2"});
  Draft draft =
      draft_of(p.buffers, {memory(OpKind::alloc, 0), op(OpKind::zero, {}, {whole(p, 0)}),
                           memory(OpKind::alloc, 1, gather), op(OpKind::copy, {whole(p, 0)}, {whole(p, 1)}, gather),
                           memory(OpKind::free, 0, gather), memory(OpKind::free, 1, gather)});
  insert_dependencies(draft);
  std::vector<OpKind> kinds;
  for (const Op& o : ops_of(draft)) kinds.push_back(o.kind);
  using enum OpKind;
  CHECK(kinds == std::vector<OpKind>{record, wait, alloc, zero, record, wait, alloc, copy, free, free, record, wait});
}

TEST_CASE("A turn of a slot limit waits until the turn that has its slot is over, on all streams") {
  Program p = buffers(4);
  const Tensor a = whole(p, 0), b = whole(p, 1), c = whole(p, 2), d = whole(p, 3);
  // Three units a, b, c are written on gather and read on compute into d; reduce reads a, too.
  const std::vector<Op> ops = {op(OpKind::zero, {}, {a}, gather), op(OpKind::copy, {a}, {d}),
                               op(OpKind::hash_boxes, {a}, {}, reduce), op(OpKind::zero, {}, {b}, gather),
                               op(OpKind::zero, {}, {c}, gather)};
  const Lines begin = {"compute -1 -> gather 0", "compute -1 -> reduce 0", "gather 0 -> compute 1",
                       "gather 0 -> reduce 2"};
  const auto with = [&](Lines more) {
    more.insert(more.begin(), begin.begin(), begin.end());
    more.insert(more.end(), {"gather 4 -> compute 5", "reduce 4 -> compute 5"});
    return more;
  };
  CHECK(order_of(p, ops) == with({}));
  p.slot_limits = {{"units", 2, {{0}, {1}, {2}}}};  // c takes the slot of a
  CHECK(order_of(p, ops) == with({"reduce 2 -> gather 4", "compute 1 -> gather 4"}));
  p.slot_limits = {{"units", 1, {{0}, {1, 2}}}};  // b and c are one turn
  CHECK(order_of(p, ops) == with({"reduce 2 -> gather 3", "compute 1 -> gather 3"}));
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

namespace {

/// Buffers and ops at random, with lifetimes, events and places; up to three limits over the buffers that one block
/// uses one after another.
Plan random_plan() {
  Program p = test::empty_program();
  const int count = *rc::gen::inRange(2, 7);
  std::vector<BufferId> transients;
  for (int i = 0; i < count; ++i) p.buffers.push_back(scratch("t" + std::to_string(i), 16 * *rc::gen::inRange(1, 3)));
  for (int i = 0; i < count; ++i) transients.push_back(i);
  const auto any_tensor = [&](int from, int to) {
    const BufferId id = *rc::gen::inRange(from, to);
    const Tensor t = whole(p, id);
    if (*rc::gen::arbitrary<bool>()) return t;
    return tensor(id, DType::f32, {fixed(8)}, *rc::gen::arbitrary<bool>() ? 0 : 32);
  };
  std::vector<Op> ops;
  const int num_ops = *rc::gen::inRange(1, 14);
  for (int i = 0; i < num_ops; ++i) {
    // A window over the buffers that moves on, so that some are over before others begin.
    const int from = i * (count - 1) / num_ops, to = std::min(count, from + 2);
    const auto stream = static_cast<StreamId>(*rc::gen::inRange(0, 4));
    std::vector<Tensor> in;
    for (int k = *rc::gen::inRange(0, 3); k > 0; --k) in.push_back(any_tensor(from, to));
    ops.push_back(in.empty() ? op(OpKind::zero, {}, {any_tensor(from, to)}, stream)
                             : op(OpKind::copy_boxes, std::move(in), {any_tensor(from, to)}, stream));
  }
  if (*rc::gen::arbitrary<bool>()) {  // the buffers used, in order, two at a time at most
    SlotLimit limit{"units", 2, {}};
    for (int i = 0; i < count; ++i)
      if (std::ranges::any_of(ops, [&](const Op& o) {
            const auto of = [&](const Tensor& t) { return t.buffer == i; };
            return std::ranges::any_of(o.inputs, of) || std::ranges::any_of(o.outputs, of);
          }))
        limit.turns.push_back({i});
    p.slot_limits.push_back(std::move(limit));
  }
  Draft draft = test::empty_draft();
  draft.buffers = p.buffers;
  draft.slot_limits = p.slot_limits;
  draft.transients = transients;
  DraftBlock block{.name = "work", .calls = {}};
  for (std::size_t i = 0, end = 0; i < ops.size(); i = end) {  // calls of one op, or of some
    for (end = i + 1; end < ops.size() && *rc::gen::inRange(0, 3) > 0;) ++end;
    block.calls.push_back(
        written_call(draft, "work", "",
                     {ops.begin() + static_cast<std::ptrdiff_t>(i), ops.begin() + static_cast<std::ptrdiff_t>(end)}));
  }
  draft.phases = {{std::move(block)}};
  Plan plan = plan_of({}, {}, 4096);
  insert_lifetimes(draft);
  lay_out_sections(plan, draft);
  insert_dependencies(draft);
  place_transients(plan, draft);
  Program program = assemble(std::move(draft));
  program.section(sections::transient).bytes = 4096;
  Block load = block_of(program, "load", {mapping(OpKind::map, sections::transient, 0, 4096)});
  program.phases.insert(program.phases.begin(), {std::move(load)});
  plan.programs = {std::move(program)};
  return plan;
}

/// The same as one call of ops that name the program's buffers.
Plan spelled_out(Plan plan) {
  work(plan);
  return plan;
}

/// before[j][i] of the ops of a block that touch memory, in their order: what events and streams imply, and what the
/// buffers that ops share, the slots and the order of each stream ask for. Transitive closures, pair by pair.
using Before = std::vector<std::vector<bool>>;
struct Orders {
  Before by_events, by_needs;
};
void close_over(Before& before, std::size_t j, std::size_t i) {
  for (std::size_t k = 0; k < before.size(); ++k) before[j][k] = before[j][k] || before[i][k];
  before[j][i] = true;
}
bool conflict(const Program& p, const Op& a, const Op& b) {
  for (const Access& x : accesses_of(p, a))
    for (const Access& y : accesses_of(p, b))
      if ((x.write || y.write) && x.buffer == y.buffer && x.begin < y.end && y.begin < x.end) return true;
  return false;
}
bool touches(const Op& o, const std::vector<BufferId>& turn) {
  const auto in = [&](const Tensor& t) { return std::ranges::count(turn, t.buffer) > 0; };
  return std::ranges::any_of(o.inputs, in) || std::ranges::any_of(o.outputs, in);
}
bool slot_of(const Program& p, const Op& a, const Op& b) {
  for (const SlotLimit& limit : p.slot_limits)
    for (std::size_t t = static_cast<std::size_t>(limit.slots); t < limit.turns.size(); ++t)
      if (touches(a, limit.turns[t - static_cast<std::size_t>(limit.slots)]) && touches(b, limit.turns[t])) return true;
  return false;
}
Orders orders_of(const Program& p, const std::vector<Op>& ops) {
  std::vector<const Op*> work;
  for (const Op& o : ops)
    if (!o.inputs.empty() || !o.outputs.empty()) work.push_back(&o);
  Orders out{Before(ops.size(), std::vector<bool>(ops.size())), Before(work.size(), std::vector<bool>(work.size()))};
  for (std::size_t j = 0; j < work.size(); ++j)
    for (std::size_t i = 0; i < j; ++i)
      if (work[i]->stream == work[j]->stream || conflict(p, *work[i], *work[j]) || slot_of(p, *work[i], *work[j]))
        close_over(out.by_needs, j, i);
  std::map<StreamId, std::size_t> last;
  std::map<EventId, std::size_t> recorded;
  Before all = out.by_events;
  for (std::size_t j = 0; j < ops.size(); ++j) {
    if (const auto it = last.find(ops[j].stream); it != last.end()) close_over(all, j, it->second);
    if (ops[j].kind == OpKind::wait) close_over(all, j, recorded.at(ops[j].event));
    if (ops[j].kind == OpKind::record) recorded[ops[j].event] = j;
    last[ops[j].stream] = j;
  }
  out.by_events = Before(work.size(), std::vector<bool>(work.size()));
  for (std::size_t j = 0; j < work.size(); ++j)
    for (std::size_t i = 0; i < work.size(); ++i)
      out.by_events[j][i] =
          all[static_cast<std::size_t>(work[j] - ops.data())][static_cast<std::size_t>(work[i] - ops.data())];
  return out;
}

}  // namespace

TEST_CASE("Random programs: events order what buffers and slots ask for, no more and no less") {
  int crossing = 0;
  CHECK(rc::check("order by events = order by needs", [&] {
    const Plan plan = spelled_out(random_plan());
    const Orders orders = orders_of(plan.programs[0], ops_of(plan.programs[0], plan.programs[0].phases[1][0]));
    RC_ASSERT(orders.by_events == orders.by_needs);
    for (const auto& row : orders.by_needs) crossing += static_cast<int>(std::ranges::count(row, true));
  }));
  CHECK(crossing > 100);
}

TEST_CASE("Random programs: verified as inserted, and a wait may go only if nothing needed it") {
  int needed = 0, spare = 0;
  CHECK(rc::check("drop one wait", [&] {
    const Plan in_calls = random_plan();
    RC_ASSERT(verify(in_calls) == std::vector<std::string>{});
    const Plan plan = spelled_out(in_calls);
    RC_ASSERT(verify(plan) == std::vector<std::string>{});
    RC_ASSERT(all_ordered(plan));
    const Program& p = plan.programs[0];
    const std::vector<Op> ops = ops_of(p, p.phases[1][0]);
    const Before needs = orders_of(p, ops).by_needs;
    for (std::size_t i = 0; i < ops.size(); ++i) {
      if (ops[i].kind != OpKind::wait) continue;
      Plan without = plan;
      work(without).remove(i);
      const bool ordered =
          all_ordered(without) && (p.slot_limits.empty() || orders_of(p, work(without)).by_events == needs);
      RC_ASSERT(verify(without).empty() == ordered);
      ++(ordered ? spare : needed);
    }
  }));
  CHECK(needed > spare);  // the spare ones are borders that no access happened to need
}
