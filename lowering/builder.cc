#include "lowering/builder.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/check.h"
#include "graph/passes.h"

namespace hotbunk {

BufferId ProgramBuilder::managed(std::string name, DType dtype, std::int64_t elements, Category category,
                                 Section section) {
  draft_.buffers.push_back({std::move(name), dtype, elements, category, section, 0});
  return static_cast<BufferId>(draft_.buffers.size()) - 1;
}

BufferId ProgramBuilder::transient(std::string name, DType dtype, std::int64_t elements, Category category) {
  const BufferId id = managed(std::move(name), dtype, elements, category, Section::transient);
  draft_.transients.push_back(id);
  return id;
}

Tensor ProgramBuilder::transient(std::string name, DType dtype, std::initializer_list<Dim> shape, Category category) {
  std::int64_t elements = 1;
  for (const Dim& d : shape) elements *= d.size;
  return view(transient(std::move(name), dtype, elements, category), dtype, shape);
}

SlotLimitId ProgramBuilder::limit_slots(std::string name, std::int64_t slots) {
  draft_.slot_limits.push_back({std::move(name), static_cast<std::int32_t>(slots), {}});
  return draft_.slot_limits.size() - 1;
}

void ProgramBuilder::take_turn(SlotLimitId limit, std::initializer_list<BufferId> buffers) {
  std::vector<BufferId>& turn = draft_.slot_limits[limit].turns.emplace_back();
  for (BufferId id : buffers)
    if (buffer(id).section == Section::transient && !std::ranges::count(turn, id)) turn.push_back(id);
}

Tensor ProgramBuilder::view(BufferId id, DType dtype, std::initializer_list<Dim> shape, std::int64_t element) const {
  HB_CHECK(shape.size() <= 3, "{} dimensions", shape.size());
  Tensor t;
  t.buffer = id;
  t.dtype = dtype;
  t.offset_bytes = element * size_of(dtype);
  t.rank = static_cast<std::uint8_t>(shape.size());
  std::copy(shape.begin(), shape.end(), t.shape.begin());
  return t;
}

Tensor ProgramBuilder::whole(BufferId id) const {
  const Buffer& b = buffer(id);
  return view(id, b.dtype, {fixed(b.elements)});
}

void ProgramBuilder::begin_block(std::int32_t phase, std::string name) {
  auto& blocks = draft_.phases[static_cast<std::size_t>(phase)];
  block_ = &blocks.emplace_back();
  const std::string& of = phases_[static_cast<std::size_t>(phase)].name;
  block_->calls.back().body = of == name ? name : of + '.' + name;
  block_->name = std::move(name);
}

void ProgramBuilder::begin_call(std::string body, std::string name) {
  HB_CHECK(block_, "a call before the first block");
  DraftCall call{std::move(body), std::move(name)};
  if (block_->ops.empty() || block_->ops.back().call + 1 < static_cast<std::int32_t>(block_->calls.size()))
    block_->calls.back() = std::move(call);  // the call before it came to nothing
  else block_->calls.push_back(std::move(call));
}

void ProgramBuilder::begin_transition(std::int32_t phase, std::string name, Enters enters, Section section) {
  begin_block(phase, std::move(name));
  block_->enters = enters;
  block_->section = section;
}

Op& ProgramBuilder::push(OpKind kind, StreamId stream) {
  HB_CHECK(block_, "an op before the first block");
  DraftOp& op = block_->ops.emplace_back();
  op.call = static_cast<std::int32_t>(block_->calls.size()) - 1;
  op.kind = kind;
  op.stream = stream;
  return op;
}

Op& ProgramBuilder::emit(OpKind kind, StreamId stream, std::string name, std::vector<Tensor> inputs,
                         std::vector<Tensor> outputs) {
  Op& op = push(kind, stream);
  op.name = std::move(name);
  op.inputs = std::move(inputs);
  op.outputs = std::move(outputs);
  return op;
}

Op& ProgramBuilder::communicate(OpKind kind, StreamId stream, Family family, std::string name,
                                std::vector<Tensor> inputs, std::vector<Tensor> outputs) {
  Op& op = emit(kind, stream, std::move(name), std::move(inputs), std::move(outputs));
  op.group = static_cast<GroupId>(family);
  return op;
}

void ProgramBuilder::alloc(BufferId id, StreamId stream) { push(OpKind::alloc, stream).buffer = id; }
void ProgramBuilder::free(BufferId id, StreamId stream) { push(OpKind::free, stream).buffer = id; }

void ProgramBuilder::map(Section section, StreamId stream) {
  Op& op = push(OpKind::map, stream);
  op.section = section;
  op.map_end = whole_section;
}

void ProgramBuilder::unmap(Section section, StreamId stream) {
  Op& op = push(OpKind::unmap, stream);
  op.section = section;
  op.map_end = whole_section;
}

Op& ProgramBuilder::feed(const Tensor& t, Slot slot) {
  return with(emit(OpKind::feed, StreamId::h2d, buffer(t.buffer).name, {}, {t}), Attr::slot,
              static_cast<std::int64_t>(slot));
}

Op& ProgramBuilder::fetch(const Tensor& t, Slot slot) {
  return with(emit(OpKind::fetch, StreamId::d2h, buffer(t.buffer).name, {t}, {}), Attr::slot,
              static_cast<std::int64_t>(slot));
}

Op& with(Op& op, Attr attr, std::int64_t value) {
  op.attrs.emplace_back(attr, value);
  return op;
}
Op& with(Op& op, Attr attr, double value) {
  op.attrs.emplace_back(attr, value);
  return op;
}

namespace {

void fill_section_extents(Draft& draft) {
  for (auto& blocks : draft.phases)
    for (DraftBlock& block : blocks) {
      std::vector<DraftOp>& ops = block.ops;
      for (Op& op : ops)
        if ((op.kind == OpKind::map || op.kind == OpKind::unmap) && op.map_end == whole_section)
          op.map_end = draft.section_bytes[static_cast<std::size_t>(op.section)];
      std::erase_if(ops, [](const Op& op) {
        return (op.kind == OpKind::map || op.kind == OpKind::unmap) && op.map_begin == op.map_end;
      });
    }
}

/// A driven phase loops, and one that skips iterations leaves the map as whichever phase came before it.
bool maps_transients(const PhaseInfo& phase) { return !phase.driven && phase.every == 1; }

/// How much of the transient section is mapped from each phase's start on. A phase that can change it also provides for
/// those behind it that cannot.
std::vector<std::int64_t> transient_levels(const Plan& plan, const Program& program, bool keep_mapped) {
  const std::size_t n = plan.phases.size();
  std::vector<std::int64_t> need(n), level(n, 0);
  std::int64_t most = 0;
  for (std::size_t p = 0; p < n; ++p) {
    const std::int64_t high = transient_high_water(program, static_cast<std::int16_t>(p));
    need[p] = (high + plan.chunk_bytes - 1) / plan.chunk_bytes * plan.chunk_bytes;
    most = std::max(most, need[p]);
  }
  if (keep_mapped) return std::vector<std::int64_t>(n, most);
  // Backwards, so that such a phase's need reaches the phase before it; an iteration's first ones belong to the last
  // phase of the iteration that maps (the loop) and to the prologue.
  std::int64_t carried = 0, iteration_entry = 0;
  for (std::size_t p = n; p-- > 0;) {
    carried = std::max(carried, need[p]);
    level[p] = carried;
    if (maps_transients(plan.phases[p])) carried = 0;
    if (plan.phases[p].when == When::iteration && (p == 0 || plan.phases[p - 1].when != When::iteration))
      iteration_entry = carried;
  }
  std::int64_t last = -1;
  for (std::size_t p = 0; p < n; ++p)
    if (plan.phases[p].when == When::iteration && maps_transients(plan.phases[p])) last = static_cast<std::int64_t>(p);
  std::int64_t entry = iteration_entry;
  if (last >= 0) {
    entry = std::max(level[static_cast<std::size_t>(last)], iteration_entry);
    for (std::size_t p = static_cast<std::size_t>(last); p < n && plan.phases[p].when == When::iteration; ++p)
      level[p] = entry;
  }
  for (std::size_t p = 0; p < n && plan.phases[p].when == When::prologue; ++p) level[p] = std::max(level[p], entry);
  return level;
}

void insert_transient_maps(const Plan& plan, Program& program, bool keep_mapped) {
  const std::vector<std::int64_t> level = transient_levels(plan, program, keep_mapped);
  std::int64_t mapped = 0;
  for (std::size_t p = 0; p < plan.phases.size(); ++p) {
    if (!maps_transients(plan.phases[p]) || program.phases[p].empty() || level[p] == mapped) continue;
    Op op;
    op.kind = level[p] > mapped ? OpKind::map : OpKind::unmap;
    op.section = Section::transient;
    op.map_begin = std::min(mapped, level[p]);
    op.map_end = std::max(mapped, level[p]);
    // A block that a rank may skip cannot hold it: transients are mapped for all that follows.
    auto& blocks = program.phases[p];
    if (blocks.front().enters != Enters::nothing)
      blocks.insert(blocks.begin(), Block{.name = "transients", .calls = {}});
    Body body;
    body.name = fmt::format("{}.{}.transients", name_of(op.kind), plan.phases[p].name);
    body.ops = {std::move(op)};
    Call call;
    call.body = static_cast<std::int32_t>(program.bodies.size());
    program.bodies.push_back(std::move(body));
    blocks.front().calls.insert(blocks.front().calls.begin(), std::move(call));
    mapped = level[p];
  }
}

}  // namespace

Program finish(const Plan& plan, Draft draft, bool keep_mapped) {
  std::erase_if(draft.slot_limits, [](const SlotLimit& limit) { return limit.turns.empty(); });
  insert_lifetimes(draft);
  lay_out_sections(plan, draft);
  fill_section_extents(draft);
  insert_dependencies(draft);
  Program program = assemble(std::move(draft));
  place_transients(plan, program);
  insert_transient_maps(plan, program, keep_mapped);  // in front of all that the block's first event joins
  return program;
}

}  // namespace hotbunk
