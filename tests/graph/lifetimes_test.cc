#include <rapidcheck.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <set>

#include "graph/passes.h"
#include "programs.h"

using namespace hotbunk;
using namespace hotbunk::test;

namespace {

constexpr auto transient = static_cast<std::size_t>(sections::transient);

std::int64_t rounded(std::int64_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

TEST_CASE("A transient is allocated before its first use and freed behind its last, on their streams") {
  Program p = test::empty_program();
  p.buffers = {scratch("a", 4), scratch("b", 4), scratch("kept", 4), scratch("by hand", 4)};
  const Tensor a = whole(p, 0), b = whole(p, 1), kept = whole(p, 2), by_hand = whole(p, 3);
  Draft draft = draft_of(p.buffers, {op(OpKind::zero, {}, {a}, streams::gather), memory(OpKind::alloc, 3),
                                     op(OpKind::add, {a, kept}, {b}), op(OpKind::copy, {b}, {by_hand}, streams::d2h)});
  draft.transients = {0, 1, 3};  // "kept" belongs to the lowering; "by hand" is allocated in the block
  insert_lifetimes(draft);
  const std::vector<Op> expected = {memory(OpKind::alloc, 0, streams::gather),
                                    op(OpKind::zero, {}, {a}, streams::gather),
                                    memory(OpKind::alloc, 3),
                                    memory(OpKind::alloc, 1),
                                    op(OpKind::add, {a, kept}, {b}),
                                    memory(OpKind::free, 0),
                                    op(OpKind::copy, {b}, {by_hand}, streams::d2h),
                                    memory(OpKind::free, 1, streams::d2h)};
  CHECK(ops_of(draft) == expected);
}

TEST_CASE("Best fit by hand") {
  Plan plan = test::empty_plan();
  plan.chunk_bytes = 4096;
  Program p = test::empty_program();
  std::vector<Op> ops;
  const auto alloc = [&](std::int64_t bytes) {
    p.buffers.push_back(scratch("b", bytes / 4));
    ops.push_back(memory(OpKind::alloc, static_cast<BufferId>(p.buffers.size()) - 1));
  };
  const auto free = [&](BufferId id) { ops.push_back(memory(OpKind::free, id)); };
  alloc(128), alloc(60), alloc(256), alloc(64);  // at 0, 128, 192 (60 takes 64), 448
  free(0), free(2);                              // holes [0, 128) and [192, 448)
  alloc(64);                                     // 4: the smaller hole, at 0; [64, 128) is left
  alloc(128);                                    // 5: fits only the larger, at 192; [320, 448) is left
  alloc(256);                                    // 6: fits nowhere: at the end, 512
  free(3), free(6);                              // [320, 768) in one piece
  alloc(640);                                    // 7: too large, but the free end grows: at 320
  alloc(64);                                     // 8: the hole at 64
  Draft draft = draft_of(p.buffers, ops);
  place_transients(plan, draft);
  std::vector<std::int64_t> offsets;
  for (const Buffer& b : draft.buffers) offsets.push_back(b.offset);
  CHECK(offsets == std::vector<std::int64_t>{0, 128, 192, 448, 0, 192, 512, 320, 64});
  CHECK(draft.section(transient_section).bytes == 4096);  // 960 in whole chunks
  CHECK(draft.transient_bytes == std::vector<std::int64_t>{320 + 640});
}

TEST_CASE("A range passes to another stream only where order implies that its uses are over") {
  // compute works in a (128 B) and from a in b; gather works in d, then from b in c; compute works in e (128 B).
  Program p = test::empty_program();
  p.buffers = {scratch("a", 32), scratch("b", 16), scratch("c", 16), scratch("d", 16), scratch("e", 32)};
  const auto t = [&](BufferId id) { return whole(p, id); };
  constexpr StreamId gather = streams::gather;
  const std::vector<Op> ops = {op(OpKind::zero, {}, {t(0)}), op(OpKind::copy, {t(0)}, {t(1)}),
                               op(OpKind::zero, {}, {t(3)}, gather), op(OpKind::copy, {t(1)}, {t(2)}, gather),
                               op(OpKind::zero, {}, {t(4)})};
  const auto offsets = [&](const std::vector<SlotLimit>& limits) {
    Plan plan = test::empty_plan();
    Draft draft = draft_of(p.buffers, ops);
    draft.slot_limits = limits;
    draft.transients = {0, 1, 2, 3, 4};
    insert_lifetimes(draft);
    insert_dependencies(draft);
    place_transients(plan, draft);
    std::vector<std::int64_t> out;
    for (const Buffer& b : draft.buffers) out.push_back(b.offset);
    return out;
  };
  // Where d begins gather does not know that a is over: it lies behind b. c has waited for b and so for a, but the
  // range of d is the smaller one; e lies where a lay, on the same stream.
  CHECK(offsets({}) == std::vector<std::int64_t>{0, 128, 192, 192, 0});
  // d takes the slot of a: it waits for it, and may lie there. c follows it; of neither does compute know when e
  // begins.
  CHECK(offsets({{"one", 1, {{0}, {3}}}}) == std::vector<std::int64_t>{0, 128, 0, 0, 192});
}

TEST_CASE("A buffer is over with its last use in a call, not with its first") {
  // compute, in one call: writes a, writes c, reads a. gather copies c to e: it knows of the second op, not of the
  // third.
  Program p = test::empty_program();
  p.buffers = {scratch("a", 32), scratch("c", 16), scratch("d", 16), scratch("e", 32)};
  const auto t = [&](BufferId id) { return whole(p, id); };
  Draft draft = draft_of(
      p.buffers, {op(OpKind::zero, {}, {t(0)}), op(OpKind::zero, {}, {t(1)}), op(OpKind::copy_boxes, {t(0)}, {t(2)}),
                  op(OpKind::copy_boxes, {t(1)}, {t(3)}, streams::gather)});
  draft.transients = {0, 1, 2, 3};
  insert_lifetimes(draft);
  insert_dependencies(draft);
  place_transients({}, draft);
  CHECK(draft.buffers[0].offset == 0);
  CHECK(draft.buffers[3].offset == 256);  // behind a, c and d: not where a lay
}

TEST_CASE("At a block's border every range is free for every stream, and where nothing is alive all begins anew") {
  Program p = test::empty_program();
  p.buffers = {scratch("a", 16), scratch("b", 16), scratch("c", 32), scratch("kept", 16), scratch("d", 16)};
  const auto t = [&](BufferId id) { return whole(p, id); };
  constexpr StreamId gather = streams::gather;
  const std::vector<Op> one = {op(OpKind::zero, {}, {t(0)}), op(OpKind::zero, {}, {t(1)}, gather)};
  const std::vector<Op> two = {op(OpKind::zero, {}, {t(2)}, gather), memory(OpKind::alloc, 3),
                               op(OpKind::zero, {}, {t(3)})};
  const std::vector<Op> three = {op(OpKind::zero, {}, {t(4)}, gather), memory(OpKind::free, 3)};
  Draft draft = test::empty_draft();
  draft.buffers = p.buffers;
  draft.transients = {0, 1, 2, 4};
  add_block(draft, "one", one), add_block(draft, "two", two), add_block(draft, "three", three);
  insert_lifetimes(draft);
  insert_dependencies(draft);
  Plan plan = test::empty_plan();
  place_transients(plan, draft);
  const std::vector<Buffer>& placed = draft.buffers;
  CHECK(placed[0].offset == 0);
  CHECK(placed[1].offset == 64);   // gather does not know that compute is done
  CHECK(placed[2].offset == 0);    // all of it
  CHECK(placed[3].offset == 128);  // not the range that gather may still write
  CHECK(placed[4].offset == 0);
}

TEST_CASE("Other sections are laid out back to back in the order of ids") {
  Plan plan = test::empty_plan();
  plan.chunk_bytes = 256;
  Draft p = test::empty_draft();
  p.buffers = {scratch("p0", 3), scratch("t", 1), scratch("p1", 65), scratch("k", 1)};
  for (std::size_t b : {0u, 2u}) p.buffers[b].section = sections::train_params;
  p.buffers[3].section = sections::kv_cache;
  p.phases = {{}};
  lay_out_sections(plan, p);
  CHECK(p.buffers[0].offset == 0);
  CHECK(p.buffers[2].offset == 64);
  CHECK(p.buffers[3].offset == 0);
  CHECK(p.section(sections::train_params).bytes == 512);  // 64 + 320 = 384 in chunks of 256
  CHECK(p.section(sections::kv_cache).bytes == 256);
  CHECK(p.section(transient_section).bytes == 0);
}

TEST_CASE("Whatever is alive together never overlaps") {
  CHECK(rc::check("random allocs and frees", [] {
    Plan plan = test::empty_plan();
    Program p = test::empty_program();
    std::vector<Op> ops;
    std::vector<BufferId> alive;
    std::int64_t live = 0, most = 0;
    const int steps = *rc::gen::inRange(1, 80);
    for (int i = 0; i < steps; ++i) {
      if (alive.empty() || *rc::gen::inRange(0, 5) < 3) {
        p.buffers.push_back(scratch("b", *rc::gen::inRange<std::int64_t>(0, 300)));
        alive.push_back(static_cast<BufferId>(p.buffers.size()) - 1);
        ops.push_back(memory(OpKind::alloc, alive.back()));
        live += rounded(p.buffers.back().bytes());
        most = std::max(most, live);
      } else {
        const auto which = alive.begin() + *rc::gen::inRange<std::ptrdiff_t>(0, std::ssize(alive));
        ops.push_back(memory(OpKind::free, *which));
        live -= rounded(p.buffers[static_cast<std::size_t>(*which)].bytes());
        alive.erase(which);
      }
    }
    Draft draft = draft_of(p.buffers, ops);
    place_transients(plan, draft);
    std::set<BufferId> now;
    std::int64_t high = 0;
    for (const Op& o : ops) {
      if (o.kind == OpKind::free) {
        now.erase(o.buffer);
        continue;
      }
      const Buffer& b = draft.buffers[static_cast<std::size_t>(o.buffer)];
      RC_ASSERT(b.offset % 64 == 0);
      if (b.bytes() > 0) high = std::max(high, b.offset + rounded(b.bytes()));
      for (BufferId other : now) {
        const Buffer& c = draft.buffers[static_cast<std::size_t>(other)];
        if (b.bytes() > 0 && c.bytes() > 0)
          RC_ASSERT(b.offset + b.bytes() <= c.offset || c.offset + c.bytes() <= b.offset);
      }
      now.insert(o.buffer);
    }
    RC_ASSERT(high >= most);
    RC_ASSERT(draft.section(transient_section).bytes >= high);
    RC_ASSERT(draft.section(transient_section).bytes < high + plan.chunk_bytes);
  }));
}
