#include "graph/verify.h"

#include <rapidcheck.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <functional>

#include "graph/passes.h"
#include "programs.h"
#include "tests/moves.h"

using namespace hotbunk;
using namespace hotbunk::test;

namespace {

/// Two buffers, written on gather, read on compute: correct. Ops of "work" by index:
///   0 alloc a, 1 zero a (gather), 2 record 0, 3 wait 0 (compute), 4 alloc b, 5 copy a -> b, 6 free a, 7 free b,
///   8 record 1, 9 wait 1 (gather)
Plan good_plan() {
  Program p = test::empty_program();
  p.buffers = {scratch("a", 16, 0), scratch("b", 16, 64)};
  p.num_events = 2;
  const Tensor a = whole(p, 0), b = whole(p, 1);
  return plan_of(
      p,
      {memory(OpKind::alloc, 0, streams::gather), op(OpKind::zero, {}, {a}, streams::gather),
       event(OpKind::record, streams::gather, 0), event(OpKind::wait, streams::compute, 0), memory(OpKind::alloc, 1),
       op(OpKind::copy, {a}, {b}), memory(OpKind::free, 0), memory(OpKind::free, 1),
       event(OpKind::record, streams::compute, 1), event(OpKind::wait, streams::gather, 1)},
      4096);
}

/// good_plan with the map's own order made known to the gather stream.
Plan base() {
  Plan plan = good_plan();
  EditedOps load(plan.programs[0], plan.programs[0].phases[0][0]);
  load.push_back(event(OpKind::record, streams::compute, 1));
  load.push_back(event(OpKind::wait, streams::gather, 1));
  return plan;
}

void erase(Plan& plan, std::size_t i) { work(plan).remove(i); }

void swap(Plan& plan, std::size_t i, std::size_t j) {
  EditedOps ops = work(plan);
  std::swap(ops[i], ops[j]);
}

std::string faults_after(const std::function<void(Plan&)>& spoil) {
  Plan plan = base();
  spoil(plan);
  return faults_of(plan);
}

}  // namespace

using Catch::Matchers::Contains;

TEST_CASE("A correct plan verifies") {
  CHECK(verify(base()) == std::vector<std::string>{});
  CHECK(verify(two_ranks()) == std::vector<std::string>{});
}

TEST_CASE("Memory: overlap, not alive, asleep, unbalanced") {
  CHECK_THAT(faults_after([](Plan& p) { p.programs[0].buffers[1].offset = 0; }), Contains("'b' overlaps 'a'"));
  CHECK_THAT(faults_after([](Plan& p) { p.programs[0].buffers[1].offset = 4096 - 32; }),
             Contains("buffer 'b' takes bytes 4064..4128 of section transient, which has 4096"));
  CHECK_THAT(faults_after([](Plan& p) { erase(p, 4); }),
             Contains("phase work, block work, op 2 (copy ''): touches 'b', which is not alive"));
  CHECK_THAT(faults_after([](Plan& p) { swap(p, 5, 6); }), Contains("touches 'a', which is not alive"));
  CHECK_THAT(faults_after([](Plan& p) { work(p).push_back(memory(OpKind::free, 0)); }),
             Contains("frees 'a', which is not alive"));
  CHECK_THAT(faults_after([](Plan& p) { erase(p, 7); }),
             Contains("buffer 'b' is still alive after an iteration that allocated it") &&
                 Contains("allocates 'b', which is alive"));
  CHECK_THAT(faults_after([](Plan& p) {
               EditedOps(p.programs[0], p.programs[0].phases[0][0]).push_back(memory(OpKind::alloc, 1));
               erase(p, 4);
             }),
             Contains("buffer 'b' was alive before an iteration that freed it"));
  // Only half of what 'b' takes is mapped.
  CHECK_THAT(faults_after([](Plan& p) { EditedOps(p.programs[0], p.programs[0].phases[0][0]).remove(0); }),
             Contains("'a' is allocated where nothing is mapped (section transient asleep?)"));
}

TEST_CASE("Mapping: alignment, twice, not there, still in use") {
  const auto add = [](std::size_t at, Op o) { return faults_after([&](Plan& p) { work(p).add(at, o); }); };
  CHECK_THAT(add(0, mapping(OpKind::map, sections::kv_cache, 0, 100)), Contains("is not made of chunks of 4096"));
  CHECK_THAT(add(0, mapping(OpKind::map, sections::transient, 0, 8192)), Contains("part of which is mapped"));
  CHECK_THAT(add(0, mapping(OpKind::unmap, sections::transient, 0, 8192)), Contains("part of which is not mapped"));
  CHECK_THAT(add(6, mapping(OpKind::unmap, sections::transient, 0, 4096)), Contains("unmaps 'a', which is alive"));
  // Neighbouring maps are one range: taking both back at once is fine.
  Plan plan = base();
  for (const Op& o :
       {mapping(OpKind::map, sections::kv_cache, 4096, 8192), mapping(OpKind::map, sections::kv_cache, 0, 4096),
        mapping(OpKind::unmap, sections::kv_cache, 0, 8192)})
    work(plan).push_back(o);
  CHECK(verify(plan) == std::vector<std::string>{});
}

namespace {

/// A section of one buffer that wakes and sleeps, each in a block of its own; sleeping and waking as often as `blocks`
/// says.
Plan sleeper(const std::vector<Enters>& blocks) {
  Program p = test::empty_program();
  p.buffers = {{"kv", DType::f32, 16, Category::kv_cache, sections::kv_cache, 0}};
  p.section(sections::kv_cache).bytes = 4096;
  Plan plan = plan_of(p, {}, 4096);
  plan.programs[0].phases[1].clear();
  for (Enters enters : blocks) {
    std::vector<Op> ops = {mapping(OpKind::map, sections::kv_cache, 0, 4096), memory(OpKind::alloc, 0)};
    if (enters == Enters::asleep) ops = {memory(OpKind::free, 0), mapping(OpKind::unmap, sections::kv_cache, 0, 4096)};
    Block block = block_of(plan.programs[0], "turn", ops);
    block.enters = enters;
    block.section = sections::kv_cache;
    plan.programs[0].phases[1].push_back(std::move(block));
  }
  return plan;
}

}  // namespace

TEST_CASE("Sleeping and waking twice is harmless where the block says so, and whole") {
  using enum Enters;
  CHECK(verify(sleeper({awake, asleep})) == std::vector<std::string>{});
  CHECK(verify(sleeper({asleep, awake, awake, asleep, asleep})) == std::vector<std::string>{});
  const auto first_fault = [](Plan plan, const std::function<void(std::vector<Block>&)>& spoil) {
    spoil(plan.programs[0].phases[1]);
    const auto faults = verify(plan);
    return faults.empty() ? "" : faults[0];
  };
  // The same ops in a block that does not say what it enters are two allocations and two frees.
  CHECK_THAT(first_fault(sleeper({awake, awake, asleep}), [](auto& b) { b[1].enters = nothing; }),
             Contains("maps 0..4096 of kv_cache, part of which is mapped"));
  CHECK_THAT(first_fault(sleeper({awake, asleep, asleep}), [](auto& b) { b[2].enters = nothing; }),
             Contains("frees 'kv', which is not alive"));
  const auto first_fault_with = [](Plan plan, std::size_t block, const std::function<void(EditedOps&)>& spoil) {
    {
      EditedOps ops(plan.programs[0], plan.programs[0].phases[1][block]);
      spoil(ops);
    }
    return verify(plan).at(0);
  };
  CHECK_THAT(first_fault_with(sleeper({awake, asleep}), 0, [](auto& ops) { ops.pop_back(); }),
             Contains("block turn: leaves kv_cache awake, but 'kv' is not alive"));
  CHECK_THAT(first_fault_with(sleeper({awake, asleep}), 1, [](auto& ops) { ops.clear(); }),
             Contains("leaves kv_cache asleep, but 'kv' is alive"));
  CHECK_THAT(first_fault_with(sleeper({awake, asleep}), 1, [](auto& ops) { ops.pop_back(); }),
             Contains("leaves kv_cache asleep, but part of it is mapped"));
  // Touched while asleep.
  const Op touch = op(OpKind::zero, {}, {tensor(0, DType::f32, {fixed(16)})});
  Plan touched = sleeper({awake, asleep, asleep});
  touched.programs[0].phases[1].push_back(block_of(touched.programs[0], "step", {touch}));
  CHECK_THAT(verify(touched).at(0), Contains("block step, op 0 (zero ''): touches 'kv', which is not alive"));
  Plan talks = sleeper({awake, asleep});
  talks.groups = {{"world", {{0}}}};
  Op barrier = op(OpKind::barrier, {}, {});
  barrier.group = 0;
  EditedOps(talks.programs[0], talks.programs[0].phases[1][0]).push_back(barrier);
  CHECK_THAT(verify(talks)[0], Contains("communicates (barrier '') in a block that a rank may skip"));
}

TEST_CASE("Driven blocks come in any order: each begins and ends joined, and leaves nothing behind") {
  Plan plan = base();
  plan.phases[1].driven = true;  // visited twice per iteration now
  // gather knows what is behind it from the wait at its end: of the block that was walked, not of any.
  CHECK_THAT(faults_of(plan), Contains("op 1 (zero ''): its stream does not wait for what came before the block"));
  for (Op mark : {event(OpKind::wait, streams::gather, 1), event(OpKind::record, streams::compute, 1)}) {
    work(plan).pop_back();
    work(plan).add(0, mark);
  }
  CHECK(verify(plan) == std::vector<std::string>{});
  Plan open_end = plan;
  open_end.groups = {{"world", {{0, 1}}}};
  open_end.program_of_rank = {0, 0};
  Op barrier = op(OpKind::barrier, {}, {}, streams::gather);
  barrier.group = 0;
  work(open_end).push_back(barrier);
  CHECK_THAT(faults_of(open_end), Contains("the block ends without waiting for it"));
  open_end.phases[1].driven = false;
  CHECK(verify(open_end) == std::vector<std::string>{});
}

TEST_CASE("Order: missing events, events nobody recorded") {
  CHECK_THAT(
      faults_after([](Plan& p) { erase(p, 3); }),
      Contains("op 3 (copy ''): bytes 0..64 of transient are also touched on stream gather with no event between"));
  CHECK_THAT(faults_after([](Plan& p) { swap(p, 2, 3); }), Contains("waits for event 0, which nobody recorded"));
  CHECK_THAT(faults_after([](Plan& p) { work(p)[3].event = 2; }), Contains("names event 2"));
  CHECK_THAT(faults_after([](Plan& p) { work(p)[3].event = -1; }), Contains("names event -1"));
}

namespace {

/// Units a, b, c, written on gather and read on compute, two slots for them; everything placed apart.
Plan units() {
  Program p = test::empty_program();
  p.buffers = {scratch("a", 16, 0), scratch("b", 16, 64), scratch("c", 16, 128), scratch("sum", 16, 192)};
  const Tensor sum = whole(p, 3);
  std::vector<Op> ops = {op(OpKind::zero, {}, {sum})};
  for (BufferId id : {0, 1, 2}) {
    ops.push_back(op(OpKind::zero, {}, {whole(p, id)}, streams::gather));
    ops.push_back(op(OpKind::add, {sum, whole(p, id)}, {sum}));
    ops[ops.size() - 2].name = std::string("gather ") + "abc"[id];
    ops.back().name = std::string("use ") + "abc"[id];
  }
  Draft draft = draft_of(p.buffers, ops);
  draft.slot_limits = {{"units", 2, {{0}, {1}, {2}}}};
  draft.transients = {0, 1, 2, 3};
  insert_lifetimes(draft);
  insert_dependencies(draft);
  p.slot_limits = draft.slot_limits;
  p.num_events = draft.num_events;
  return plan_of(p, ops_of(draft), 4096);
}

std::size_t index_of(Plan& plan, std::string_view name) {
  const EditedOps ops = work(plan);
  return static_cast<std::size_t>(std::ranges::find(ops, name, &Op::name) - ops.begin());
}

}  // namespace

TEST_CASE("Slots: a turn that does not wait, a turn that goes on, names that are none") {
  CHECK(faults_of(units()) == "");
  Plan plan = units();
  const std::size_t taker = index_of(plan, "gather c");
  REQUIRE(work(plan)[taker - 2].kind == OpKind::wait);  // then the alloc of c
  erase(plan, taker - 2);
  CHECK_THAT(faults_of(plan), Contains("takes a slot of 'units', which has 2, without waiting for add 'use a'") &&
                                  Contains("(zero 'gather c')"));
  plan = units();
  plan.programs[0].slot_limits[0].slots = 1;
  CHECK_THAT(faults_of(plan), Contains("(zero 'gather b')") && Contains("without waiting for add 'use a'"));
  // a is read again when c has its slot.
  plan = units();
  const Op late =
      op(OpKind::add, {whole(plan.programs[0], 3), whole(plan.programs[0], 0)}, {whole(plan.programs[0], 3)});
  work(plan).add(index_of(plan, "use c") + 1, late);
  CHECK_THAT(faults_of(plan), Contains("touches 'a', which is not alive"));
  const auto declare = [](const SlotLimit& limit) {
    Plan spoilt = units();
    spoilt.programs[0].slot_limits.push_back(limit);
    return faults_of(spoilt);
  };
  CHECK_THAT(declare({"more", 0, {{3}}}), Contains("'more' has 0 slots"));
  CHECK_THAT(declare({"more", 1, {{4}}}), Contains("slots 'more' name buffer 4"));
  CHECK_THAT(declare({"more", 1, {{1}}}), Contains("slots 'more' name 'b' twice"));
  plan = units();
  plan.programs[0].buffers[2].section = sections::kv_cache;
  plan.programs[0].section(sections::kv_cache).bytes = 4096;
  CHECK_THAT(faults_of(plan), Contains("slots 'units' name 'c', which is in section kv_cache"));
}

TEST_CASE("A buffer is not touched any more when its slot is taken again") {
  Plan plan = units();
  Program& p = plan.programs[0];
  // All live to the end, and a is read there.
  std::vector<Op> ops = work(plan);
  std::vector<Op> frees;
  for (const Op& o : ops)
    if (o.kind == OpKind::free) frees.push_back(o);
  std::erase_if(ops, [](const Op& o) { return o.kind == OpKind::free; });
  ops.push_back(op(OpKind::add, {whole(p, 3), whole(p, 0)}, {whole(p, 3)}));
  for (Op& o : frees) o.stream = streams::compute, ops.push_back(o);
  work(plan).assign(ops.begin(), ops.end());
  CHECK_THAT(faults_of(plan), Contains("touches 'a' when its slot of 'units', which has 2, is taken again"));
}

TEST_CASE("A wait for an op with which the waiter shares nothing is refused, with both names") {
  // The events of a plan that waits for addresses: c lies where a lay, and no slot is declared.
  Plan plan = units();
  plan.programs[0].slot_limits.clear();
  plan.programs[0].buffers[2].offset = 0;
  CHECK(faults_of(plan).find("no event between") == std::string::npos);
  CHECK_THAT(faults_of(plan), Contains("(zero 'gather c'): false wait: shares no buffer with add 'use a', and no slot "
                                       "limit asks for it"));
}

TEST_CASE("An op reads only what was written since its buffer was allocated") {
  const std::string unwritten = "op 3 (copy ''): reads bytes of 'a' that nobody wrote since it was allocated";
  // A barrier names what it orders, and writes nothing.
  CHECK_THAT(faults_after([](Plan& p) {
               EditedOps ops = work(p);
               ops[1].kind = OpKind::barrier, ops[1].group = 0, p.groups = {{"one", {{0}}}};
             }),
             Contains(unwritten));
  CHECK_THAT(faults_after([](Plan& p) { work(p)[1].outputs[0].shape[0].size = 15; }), Contains(unwritten));
  CHECK_THAT(faults_after([](Plan& p) {
               work(p)[1].outputs[0].shape[0].size = 15;
               work(p)[1].outputs[0].offset_bytes = 4;
             }),
             Contains(unwritten));
  // What was written before the buffer was freed is forgotten; its neighbour's bytes are not its own.
  CHECK_THAT(faults_after([](Plan& p) {
               const std::vector<Op> again = {memory(OpKind::free, 0), memory(OpKind::alloc, 0)};
               EditedOps ops = work(p);
               ops.insert(ops.begin() + 2, again.begin(), again.end());
             }),
             Contains("op 5 (copy ''): reads bytes of 'a'"));
  // Boxes write what they say: two column halves of a 4 x 4 matrix make it whole, one does not.
  const auto halves = [](std::int64_t second_cols) {
    return faults_after([&](Plan& p) {
      EditedOps ops = work(p);
      Op& copy = ops[5];
      copy.kind = OpKind::copy_boxes;
      copy.moves = moves_of(
          {{.src_pitch = 2, .dst_pitch = 4, .rows = 4, .cols = 2},
           {.src_offset = 8, .src_pitch = 2, .dst_offset = 2, .dst_pitch = 4, .rows = 4, .cols = second_cols}});
      ops.add(6, op(OpKind::fetch, {copy.outputs[0]}, {}));
      ops[6].attrs = {{Attr::slot, std::int64_t{0}}};
    });
  };
  CHECK(halves(2).empty());
  CHECK_THAT(halves(1), Contains("op 4 (fetch ''): reads bytes of 'b'"));
}

TEST_CASE("Prepacked bytes are read as such, until they are written again, and packed once") {
  // A matrix w, a copy of it, what a linear reads and writes, and another matrix right behind w.
  const auto faults = [](const std::vector<std::string>& steps) {
    Program p = test::empty_program();
    for (const char* name : {"w", "copy", "x", "y"})
      p.buffers.push_back(scratch(name, name == std::string("w") ? 32 : 16, 128 * std::ssize(p.buffers)));
    std::vector<Tensor> t;
    for (BufferId b = 0; b < 4; ++b) t.push_back(tensor(b, DType::f32, {fixed(4), fixed(4)}));
    const auto of_w = [](std::int64_t rows, std::int64_t cols, std::int64_t offset_bytes = 0) {
      return tensor(0, DType::f32, {fixed(rows), fixed(cols)}, offset_bytes);
    };
    const Tensor next = of_w(4, 4, 64);
    const auto flat = [](BufferId b, std::int64_t elements, std::int64_t offset_bytes = 0) {
      return tensor(b, DType::f32, {fixed(elements)}, offset_bytes);
    };
    std::vector<Op> ops;
    for (BufferId b = 0; b < 4; ++b) ops.push_back(memory(OpKind::alloc, b));
    for (const Tensor& read : {of_w(8, 4), t[2]}) ops.push_back(op(OpKind::zero, {}, {read}));
    const auto product = [&](const Tensor& w, bool prepacked) {
      Tensor x = t[2], y = t[3];
      x.shape = {fixed(1), w.shape[1]}, y.shape = {fixed(1), w.shape[0]};
      ops.push_back(op(OpKind::linear, {x, w}, {y}));
      if (prepacked) with(ops.back(), Attr::prepacked, std::int64_t{1});
    };
    const auto boxes = [&](std::int64_t rows) {
      ops.push_back(op(OpKind::copy_boxes, {t[2]}, {t[0]}));
      ops.back().moves = moves_of({{.src_pitch = 4, .dst_pitch = 4, .rows = rows, .cols = 4}});
    };
    for (const std::string& step : steps) {
      if (step == "prepack") ops.push_back(op(OpKind::prepack, {t[0]}, {t[0]}));
      else if (step == "prepack next") ops.push_back(op(OpKind::prepack, {next}, {next}));
      else if (step == "linear") product(t[0], true);
      else if (step == "linear of next") product(next, true);
      else if (step == "linear of half") product(of_w(2, 4), true);
      else if (step == "linear of the other half") product(of_w(2, 4, 32), true);
      else if (step == "linear across both") product(of_w(4, 4, 32), true);
      else if (step == "linear of two as one") product(of_w(8, 4), true);
      else if (step == "linear of other rows") product(of_w(2, 8), true);
      else if (step == "copy half") ops.push_back(op(OpKind::copy, {flat(0, 8)}, {flat(1, 8)}));
      else if (step == "copy the other half") ops.push_back(op(OpKind::copy, {flat(0, 8, 32)}, {flat(1, 8, 32)}));
      else if (step == "linear of half the copy") product(tensor(1, DType::f32, {fixed(2), fixed(4)}), true);
      else if (step == "linear of rows") product(t[0], false);
      else if (step == "linear of the copy") product(t[1], true);
      else if (step == "write") boxes(4);
      else if (step == "write some rows") boxes(3);
      else if (step == "copy") ops.push_back(op(OpKind::copy, {t[0]}, {t[1]}));
      else if (step == "copy back") ops.push_back(op(OpKind::copy, {t[1]}, {t[0]}));
      else if (step == "anew") ops.push_back(memory(OpKind::free, 0)), ops.push_back(memory(OpKind::alloc, 0));
      else if (step == "fetch") with(ops.emplace_back(op(OpKind::fetch, {t[0]}, {})), Attr::slot, std::int64_t{0});
    }
    for (BufferId b = 0; b < 4; ++b) ops.push_back(memory(OpKind::free, b));
    return faults_of(plan_of(p, ops, 4096));
  };
  using Steps = std::vector<std::string>;
  const std::string as_rows = "reads bytes of 'w' that are prepacked, as rows",
                    not_yet = "reads bytes of 'w' that are not prepacked since they were written";
  CHECK(faults({"linear of rows", "prepack", "linear", "linear", "write", "linear of rows", "prepack", "linear"}) ==
        "");
  CHECK_THAT(faults({"linear"}), Contains("(linear ''): " + not_yet));
  for (const char* reader : {"linear of rows", "fetch"}) CHECK_THAT(faults({"prepack", reader}), Contains(as_rows));
  // Packed twice; some rows are as they were packed, the others are not.
  for (const Steps& steps : {Steps{"prepack", "prepack"}, {"prepack", "write some rows", "prepack"}})
    CHECK_THAT(faults(steps), Contains("(prepack ''): " + as_rows));
  for (const char* write : {"write", "write some rows"})
    CHECK_THAT(faults({"prepack", write, "linear"}), Contains(not_yet));
  // Bytes sleep and wake as they are, and what is allocated anew is nobody's.
  CHECK(faults({"prepack", "copy", "linear of the copy", "anew", "copy back", "linear"}) == "");
  CHECK_THAT(faults({"copy", "linear of the copy"}), Contains("reads bytes of 'copy' that are not prepacked"));
  CHECK_THAT(faults({"copy", "prepack", "copy back", "linear"}), Contains(not_yet));
  CHECK_THAT(faults({"prepack", "anew", "write", "linear"}), Contains(not_yet));
  // A matrix is read as the one that was packed: not a part of it, not as many bytes of other rows, not two as one.
  const std::string other = "that are prepacked, but not as this matrix";
  CHECK(faults({"prepack", "prepack next", "linear", "linear of next"}) == "");
  for (const char* reader : {"linear of half", "linear of the other half", "linear across both", "linear of two as one",
                             "linear of other rows"})
    CHECK_THAT(faults({"prepack", "prepack next", reader}), Contains("reads bytes of 'w' " + other));
  CHECK_THAT(faults({"prepack", "linear of two as one"}), Contains(not_yet));
  for (const Steps& steps : {Steps{"prepack", "copy half", "linear of half the copy"},
                             {"prepack", "copy half", "copy the other half", "linear of the copy"}})
    CHECK_THAT(faults(steps), Contains("reads bytes of 'copy' " + other));
  CHECK_THAT(faults({"prepack", "copy", "copy half", "linear of the copy"}),
             Contains("reads bytes of 'copy' " + other));
  CHECK(faults({"prepack", "prepack next", "write", "linear of next"}) == "");
}

TEST_CASE("What ranks write differently is proven for each kind of rank") {
  // Two ranks read the parts of 'a' that are theirs: 8 elements each, or 10 of 16 by the first and 6 by the second.
  const auto parts = [](std::int64_t part, std::int64_t wanted, bool zeroed) {
    Program p = test::empty_program();
    p.buffers = {scratch("a", 16, 0), scratch("b", 16, 64)};
    const Tensor a = whole(p, 0), b = whole(p, 1);
    Op copy = op(OpKind::copy_boxes, {a}, {b});
    copy.moves = {
        {{0, {0, 16, 0, 1, 0, 1}, {}},
         {0, {0, part, 0, 1, 0, 1}, {.who = Holds::mine, .count = 2, .rows = part, .last_row = 16, .within = {}}}}};
    copy.moves[0].to.parts.family = 0;
    Op fetch = op(OpKind::fetch, {tensor(1, DType::f32, {fixed(wanted)})}, {});
    fetch.attrs = {{Attr::slot, std::int64_t{0}}};
    std::vector<Op> ops = {memory(OpKind::alloc, 0), op(OpKind::zero, {}, {a}), memory(OpKind::alloc, 1), copy, fetch,
                           memory(OpKind::free, 0),  memory(OpKind::free, 1)};
    if (zeroed) ops.insert(ops.begin() + 3, op(OpKind::zero, {}, {b}));
    Plan plan = plan_of(p, ops, 4096);
    plan.groups = {{"tp", {{0, 1}}}};
    plan.program_of_rank = {0, 0};
    const auto faults = verify(plan);
    return faults.empty() ? "" : faults[0];
  };
  CHECK(parts(8, 8, false).empty());
  CHECK_THAT(parts(8, 9, false), Contains("reads bytes of 'b' that nobody wrote since it was allocated"));
  CHECK(parts(10, 6, false).empty());
  CHECK_THAT(parts(10, 7, false), Contains("op 4 (fetch ''): reads bytes of 'b'") && Contains("at place 1 of tp"));
  CHECK(parts(10, 10, true).empty());
}

TEST_CASE("A fault of any program is found") {
  const auto verdict = [](const std::function<void(Plan&)>& spoil) {
    Plan plan = base();
    plan.programs.push_back(plan.programs[0]);
    plan.program_of_rank = {0, 1};
    spoil(plan);
    std::string all;
    for (const std::string& line : verify(plan)) all += line + '\n';
    return all;
  };
  CHECK(verdict([](Plan& p) { work(p, 1)[5].name = "copied"; }).empty());
  CHECK_THAT(verdict([](Plan& p) { p.programs[1].buffers[1].offset = 0; }), Contains("program 1: phase work"));
  CHECK_THAT(verdict([](Plan& p) { work(p, 1)[5].stream = streams::reduce; }), Contains("program 1: phase work"));
  CHECK_THAT(verdict([](Plan& p) { work(p, 1)[1].outputs[0].shape[0].size = 15; }), Contains("program 1: phase work"));
}

TEST_CASE("Shape: windows, counts, groups, buffers, phases, programs") {
  CHECK_THAT(faults_after([](Plan& p) { work(p)[5].outputs[0].offset_bytes = 4; }),
             Contains("phase work, block work, call '': copy '' takes bytes 4..68 of 'b', which has 64"));
  CHECK_THAT(faults_after([](Plan& p) { work(p)[5].inputs.clear(); }), Contains("has 0 inputs, expected 1"));
  CHECK_THAT(faults_after([](Plan& p) { work(p)[0].buffer = 2; }), Contains("names buffer 2"));
  CHECK_THAT(faults_after([](Plan& p) { p.programs[0].phases.pop_back(); }), Contains("has 1 phases, the plan 2"));
  CHECK_THAT(faults_after([](Plan& p) { p.program_of_rank = {1}; }), Contains("a rank names program 1"));
  Plan plan = two_ranks();
  work(plan)[2].group = 1;
  REQUIRE_FALSE(verify(plan).empty());
  CHECK_THAT(verify(plan)[0], Contains("names group 1"));
}

namespace {

/// One body, b = a through a local, called twice with the buffers the other way round: a -> b, b -> a.
Plan two_calls() {
  Program p = test::empty_program();
  p.buffers = {scratch("a", 16, 0), scratch("b", 16, 64)};
  Body body;
  body.name = "through";
  body.num_ports = 2;
  body.locals = {scratch("between", 16)};
  const auto t = [](BufferId slot) { return tensor(slot, DType::f32, {fixed(16)}); };
  body.ops = {memory(OpKind::alloc, 2), op(OpKind::copy, {t(0)}, {t(2)}), op(OpKind::copy, {t(2)}, {t(1)}),
              memory(OpKind::free, 2)};
  Plan plan = plan_of(p, {memory(OpKind::alloc, 0), op(OpKind::zero, {}, {t(0)}), memory(OpKind::alloc, 1)}, 4096);
  Program& program = plan.programs[0];
  Block& work = program.phases[1][0];
  Call call;
  call.body = static_cast<std::int32_t>(program.bodies.size());
  program.bodies.push_back(body);
  call.name = "first.", call.ports = {{0, 0}, {1, 0}}, call.locals = {128};
  work.calls.push_back(call);
  call.name = "second.", call.ports = {{1, 0}, {0, 0}}, call.locals = {192};
  work.calls.push_back(call);
  Block end = block_of(program, "end", {memory(OpKind::free, 0), memory(OpKind::free, 1)});
  work.calls.push_back(end.calls[0]);
  return plan;
}

std::string faults_of_calls(const std::function<void(Program&, std::vector<Call>&)>& spoil) {
  Plan plan = two_calls();
  spoil(plan.programs[0], plan.programs[0].phases[1][0].calls);
  std::string all;
  for (const std::string& line : verify(plan)) all += line + '\n';
  return all;
}

}  // namespace

TEST_CASE("Calls: what they bind, where their locals lie, what their bodies name") {
  using Calls = std::vector<Call>;
  CHECK(faults_of_calls([](Program&, Calls&) {}).empty());
  const auto with = [](auto&& spoil) { return faults_of_calls([&](Program&, Calls& calls) { spoil(calls); }); };
  CHECK_THAT(with([](Calls& c) { c[1].body = 9; }), Contains("call 'first.': names body 9"));
  CHECK_THAT(with([](Calls& c) { c[1].ports.pop_back(); }), Contains("binds 1 ports of 2"));
  CHECK_THAT(with([](Calls& c) { c[1].ports[0].buffer = 2; }), Contains("names buffer 2"));
  CHECK_THAT(with([](Calls& c) { c[2].ports[0].offset_bytes = 4; }),
             Contains("call 'second.': copy '' takes bytes 4..68 of 'b', which has 64"));
  CHECK_THAT(with([](Calls& c) { c[1].locals.clear(); }), Contains("has places for 0 locals of 1"));
  CHECK_THAT(with([](Calls& c) { c[1].locals = {4096}; }),
             Contains("has 'between' at bytes 4096..4160 of the transient section, which has 4096"));
  CHECK_THAT(with([](Calls& c) { c[1].locals = {32}; }), Contains("'first.between' overlaps 'a'"));
  CHECK_THAT(with([](Calls& c) {
               c[1].marks = {{5, OpKind::record, streams::compute, 0}};
             }),
             Contains("names event 0"));
  // Another buffer of the same size: b is read before anybody wrote it. A call less: likewise.
  CHECK_THAT(with([](Calls& c) { std::swap(c[1].ports[0], c[1].ports[1]); }),
             Contains("call 1 'first.', op 1 (copy 'first.'): reads bytes of 'b' that nobody wrote"));
  CHECK_THAT(with([](Calls& c) { c.erase(c.begin() + 1); }), Contains("reads bytes of 'b' that nobody wrote"));
  CHECK_THAT(with([](Calls& c) { c.pop_back(); }), Contains("'a' is still alive after an iteration"));
  // Bodies.
  const auto body = [](auto&& spoil) {
    return faults_of_calls([&](Program& p, Calls& calls) { spoil(p.bodies[static_cast<std::size_t>(calls[1].body)]); });
  };
  CHECK_THAT(body([](Body& b) { b.ops[1].inputs[0].buffer = 3; }), Contains("body through: copy '' names slot 3 of 3"));
  CHECK_THAT(body([](Body& b) { b.ops[1].inputs[0].buffer = -1; }), Contains("names slot -1 of 3"));
  CHECK_THAT(body([](Body& b) { b.ops[0].buffer = 3; }), Contains("alloc '' names slot 3 of 3"));
  CHECK_THAT(body([](Body& b) { b.ops.push_back(event(OpKind::wait, streams::compute, 0)); }),
             Contains("wait '' is for calls to say"));
  CHECK_THAT(body([](Body& b) { b.locals[0].section = sections::kv_cache; }),
             Contains("local 'between' has 16 elements in kv_cache"));
  CHECK_THAT(body([](Body& b) { b.ops.pop_back(); }), Contains("ends with 'first.between' alive"));
  CHECK_THAT(body([](Body& b) { b.ops[2].kind = OpKind::peer_copy, b.ops[2].group = 0; }),
             Contains("peer_copy '' reads a local of its peers"));
  CHECK_THAT(body([](Body& b) { b.ops[1].buffer = 3; }), Contains("copy '' names slot 3 of 3"));
  CHECK_THAT(body([](Body& b) { b.ops.erase(b.ops.begin()); }),
             Contains("touches 'first.between', which is not alive"));
  CHECK_THAT(body([](Body& b) { b.ops.push_back(b.ops[3]); }), Contains("frees 'first.between', which is not alive"));
  CHECK_THAT(body([](Body& b) { std::swap(b.ops[1], b.ops[2]); }),
             Contains("reads bytes of 'first.between' that nobody wrote"));
}

TEST_CASE("At most `limit` lines") {
  Plan plan = base();
  for (int i = 0; i < 30; ++i) work(plan).push_back(memory(OpKind::free, 0));
  CHECK(verify(plan, 3).size() == 3);
  CHECK(verify(plan).size() == 20);
}

TEST_CASE("Streams and sections: few, of different names, and whatever names one names one that is there") {
  const auto fault_of = [](auto&& change) {
    Plan plan = two_ranks();
    change(plan);
    const auto faults = verify(plan);
    return faults.empty() ? std::string() : faults.front();
  };
  CHECK(fault_of([](Plan&) {}).empty());
  CHECK(fault_of([](Plan& p) { p.streams.clear(); }) == "the plan has 0 streams, of 1 to 16");
  CHECK(fault_of([](Plan& p) {
          for (int i = 0; i < max_streams; ++i) p.streams.push_back({std::to_string(i)});
        }) == "the plan has 24 streams, of 1 to 16");
  CHECK(fault_of([](Plan& p) { p.streams[0].kind = StreamKind::host; }) ==
        "stream 'compute' comes first, where blocks begin and end, and does not compute");
  CHECK(fault_of([](Plan& p) { p.streams[2].name = "gather"; }) == "two streams of the plan have one name");
  CHECK(fault_of([](Plan& p) { work(p)[1].stream = StreamId{8}; }).ends_with("is on stream 8 of 8"));
  CHECK(fault_of([](Plan& p) { p.programs[1].sections.clear(); }) == "program 1: has 0 sections, of 1 to 24");
  CHECK(fault_of([](Plan& p) { p.programs[1].sections[0].space = Space::host; }) ==
        "program 1: has transients in section 'transient', which is the host's");
  CHECK(fault_of([](Plan& p) { p.programs[0].sections[3].name = "kv_cache"; }) ==
        "program 0: has two sections of one name");
  CHECK(fault_of([](Plan& p) {
          p.programs[0].buffers[0].section = SectionId{20};
        }).starts_with("program 0: buffer 'a' names section 20 of "));
  CHECK(fault_of([](Plan& p) {
          p.programs[0].phases[1][0].section = SectionId{20};
        }).starts_with("program 0: block 'work' names section 20 of "));
}
