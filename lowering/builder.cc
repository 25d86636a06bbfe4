#include "lowering/builder.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "graph/passes.h"
#include "layout/shard.h"

namespace hotbunk {

BufferId ProgramBuilder::managed(std::string name, DType dtype, std::int64_t elements, Category category,
                                 SectionId section) {
  draft_.buffers.push_back({std::move(name), dtype, elements, category, section, 0});
  return static_cast<BufferId>(draft_.buffers.size()) - 1;
}

BufferId ProgramBuilder::transient(std::string name, DType dtype, std::int64_t elements, Category category) {
  const BufferId id = managed(std::move(name), dtype, elements, category, sections::transient);
  draft_.transients.push_back(id);
  return id;
}

Tensor ProgramBuilder::transient(std::string name, DType dtype, std::initializer_list<Dim> shape, Category category) {
  std::int64_t elements = 1;
  for (const Dim& d : shape) elements *= d.size;
  return view(transient(std::move(name), dtype, elements, category), dtype, shape);
}

void ProgramBuilder::keep(BufferId id) {
  if (is_kept_.size() <= static_cast<std::size_t>(id)) is_kept_.resize(draft_.buffers.size(), false);
  if (is_kept_[static_cast<std::size_t>(id)]) return;
  is_kept_[static_cast<std::size_t>(id)] = true;
  draft_.kept.push_back(id);
}

SlotLimitId ProgramBuilder::limit_slots(std::string name, std::int64_t slots) {
  draft_.slot_limits.push_back({std::move(name), static_cast<std::int32_t>(slots), {}});
  return draft_.slot_limits.size() - 1;
}

void ProgramBuilder::take_turn(SlotLimitId limit, std::span<const BufferId> buffers) {
  std::vector<BufferId>& turn = draft_.slot_limits[limit].turns.emplace_back();
  for (BufferId id : buffers)
    if (buffer(id).section == sections::transient && !std::ranges::count(turn, id)) turn.push_back(id);
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
  end_call();
  auto& blocks = draft_.phases[static_cast<std::size_t>(phase)];
  block_ = &blocks.emplace_back();
  const std::string& of = phases_[static_cast<std::size_t>(phase)].name;
  open_body_ = of == name ? name : of + '.' + name, open_name_.clear();
  block_->name = std::move(name);
}

void ProgramBuilder::begin_call(std::string body, std::string name) {
  HB_CHECK(block_, "a call before the first block");
  end_call();
  open_body_ = std::move(body), open_name_ = std::move(name);
}

void ProgramBuilder::end_call() {
  if (!open_.empty()) {  // else it came to nothing
    const std::vector<Port> inputs(open_inputs_.begin(), open_inputs_.end());
    block_->calls.push_back(
        written_call(draft_, std::move(open_body_), std::move(open_name_), std::exchange(open_, {}), inputs));
  }
  open_body_.clear(), open_name_.clear(), open_inputs_.clear();
}

Draft& ProgramBuilder::draft() {
  end_call();
  return draft_;
}

std::vector<std::int64_t> ProgramBuilder::signature_of(const std::vector<Input>& inputs) const {
  std::vector<std::int64_t> out;
  out.reserve(4 * inputs.size());
  for (const Input& input : inputs) {
    const auto same = std::ranges::find(inputs, input.buffer, &Input::buffer);  // the first of the same buffer
    out.push_back(same - inputs.begin());
    out.push_back(input.offset_bytes - same->offset_bytes);
    out.push_back(static_cast<std::int64_t>(buffer(input.buffer).dtype));
    out.push_back(buffer(input.buffer).elements);
  }
  return out;
}

const ProgramBuilder::SharedBody* ProgramBuilder::find_shared(const std::string& body, std::int64_t variant,
                                                              const std::vector<Input>& inputs) const {
  const auto found = shared_.find({body, variant});
  if (found == shared_.end() || !shares_) return nullptr;
  const std::vector<std::int64_t> signature = signature_of(inputs);
  const auto at = std::ranges::find(found->second, signature, &SharedBody::signature);
  return at == found->second.end() ? nullptr : &*at;
}

void ProgramBuilder::keep_shared(std::string body, std::int64_t variant, const std::string& name,
                                 std::vector<Input> inputs, BufferId first, std::any result) {
  HB_CHECK(open_name_ == name, "call '{}' begins another, '{}'", name, open_name_);
  if (open_.empty()) return;
  open_inputs_ = inputs;
  end_call();
  const DraftCall& call = block_->calls.back();
  SharedBody shared;
  shared.signature = signature_of(inputs), shared.inputs = std::move(inputs);
  shared.body = call.body, shared.slots = call.slots;
  shared.first_transient = first;
  shared.result = std::move(result);
  for (BufferId id = first; id < next_buffer(); ++id) {
    const Buffer& made = buffer(id);
    HB_CHECK(made.section == sections::transient && made.name.starts_with(name), "'{}' made in call '{}'", made.name,
             name);
    shared.transient_names.push_back(made.name.substr(name.size()));
  }
  shared_[{std::move(body), variant}].push_back(std::move(shared));
}

void ProgramBuilder::call_again(const SharedBody& shared, std::string name, const std::vector<Input>& inputs) {
  end_call();
  const BufferId first = next_buffer();
  DraftCall call;
  call.body = shared.body;
  call.slots = shared.slots;
  for (std::size_t s = 0; s < call.slots.size(); ++s) {
    Port& slot = call.slots[s];
    if (s < inputs.size()) slot = inputs[s];
    else if (shared.is_its_own(slot.buffer)) slot.buffer += first - shared.first_transient;
    else
      HB_CHECK(!std::ranges::count(inputs, slot.buffer, &Input::buffer), "call '{}' has '{}' for input and without",
               name, buffer(slot.buffer).name);
  }
  for (std::size_t i = 0; i < shared.transient_names.size(); ++i) {
    const Buffer& like = draft_.buffers[static_cast<std::size_t>(shared.first_transient) + i];
    transient(shared.transient_names[i], like.dtype, like.elements, like.category);
  }
  call.first_unnamed = first, call.num_unnamed = static_cast<std::int32_t>(shared.transient_names.size());
  call.name = std::move(name);
  block_->calls.push_back(std::move(call));
}

void ProgramBuilder::rebind(const SharedBody& shared, const std::vector<Input>& inputs, BufferId first, Tensor& t) {
  if (t.buffer < 0) return;
  if (shared.is_its_own(t.buffer)) {
    t.buffer += first - shared.first_transient;
    return;
  }
  const auto at = std::ranges::find(shared.inputs, t.buffer, &Input::buffer);
  if (at == shared.inputs.end()) return;
  const Input& now = inputs[static_cast<std::size_t>(at - shared.inputs.begin())];
  t.buffer = now.buffer, t.offset_bytes += now.offset_bytes - at->offset_bytes;
}

void ProgramBuilder::begin_transition(std::int32_t phase, std::string name, Enters enters, SectionId section) {
  begin_block(phase, std::move(name));
  block_->enters = enters;
  block_->section = section;
}

Op& ProgramBuilder::push(OpKind kind, StreamId stream) {
  HB_CHECK(!open_body_.empty(), "an op of no call");
  Op& op = open_.emplace_back();
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

void ProgramBuilder::map(SectionId section, StreamId stream) {
  Op& op = push(OpKind::map, stream);
  op.section = section;
  op.map_end = whole_section;
}

void ProgramBuilder::unmap(SectionId section, StreamId stream) {
  Op& op = push(OpKind::unmap, stream);
  op.section = section;
  op.map_end = whole_section;
}

Op& ProgramBuilder::feed(const Tensor& t, Slot slot) {
  const StreamId stream = is_on_host(t.buffer) ? streams::host : streams::h2d;
  return with(emit(OpKind::feed, stream, buffer(t.buffer).name, {}, {t}), Attr::slot, static_cast<std::int64_t>(slot));
}

Op& ProgramBuilder::fetch(const Tensor& t, Slot slot) {
  return with(emit(OpKind::fetch, streams::d2h, buffer(t.buffer).name, {t}, {}), Attr::slot,
              static_cast<std::int64_t>(slot));
}

/// A driven phase loops, and one that skips iterations leaves the map as whichever phase came before it.
TransientUse transient_use(const PhaseInfo& phase, std::int64_t bytes) {
  return {phase.when, !phase.driven && phase.every == 1, bytes};
}
TransientUse transient_use(const JobPhase& p, std::int64_t bytes) {
  return {when_of(p.phase), !is_driven(p.phase) && p.every == 1, bytes};
}

std::vector<std::int64_t> transient_levels(std::span<const TransientUse> phases, bool keep_mapped) {
  const std::size_t n = phases.size();
  std::vector<std::int64_t> level(n, 0);
  if (keep_mapped) {
    std::int64_t most = 0;
    for (const TransientUse& p : phases) most = std::max(most, p.bytes);
    level.assign(n, most);
    return level;
  }
  // Backwards, so that such a phase's need reaches the phase before it; an iteration's first ones belong to the last
  // phase of the iteration that maps (the loop) and to the prologue.
  std::int64_t carried = 0, iteration_entry = 0;
  for (std::size_t p = n; p-- > 0;) {
    carried = std::max(carried, phases[p].bytes);
    level[p] = carried;
    if (phases[p].maps) carried = 0;
    if (phases[p].when == When::iteration && (p == 0 || phases[p - 1].when != When::iteration))
      iteration_entry = carried;
  }
  std::ptrdiff_t last = -1;
  for (std::size_t p = 0; p < n; ++p)
    if (phases[p].when == When::iteration && phases[p].maps) last = static_cast<std::ptrdiff_t>(p);
  std::int64_t entry = iteration_entry;
  if (last >= 0) {
    // The first iteration finds what the prologue left, and later ones must find as much.
    std::int64_t left = 0;
    for (std::size_t p = 0; p < n && phases[p].when == When::prologue; ++p)
      if (phases[p].maps) left = level[p];
    entry = std::max({level[static_cast<std::size_t>(last)], iteration_entry, left});
    for (auto p = static_cast<std::size_t>(last); p < n && phases[p].when == When::iteration; ++p) level[p] = entry;
  }
  for (std::size_t p = 0; p < n && phases[p].when == When::prologue; ++p) level[p] = std::max(level[p], entry);
  return level;
}

std::vector<TransientMap> transient_maps(std::span<const TransientUse> phases, std::span<const MappedBeside> beside,
                                         bool keep_mapped) {
  const std::vector<std::int64_t> level = transient_levels(phases, keep_mapped);
  std::vector<TransientMap> out;
  std::int64_t mapped = 0, peak = 0;
  for (std::size_t p = 0; p < phases.size(); ++p) {
    TransientMap at{mapped, mapped};
    if (phases[p].maps) {
      at.last = level[p];
      at.first = beside[p].gives_back ? std::min(level[p], std::max(mapped, phases[p].bytes)) : level[p];
    }
    mapped = at.last;
    peak = std::max({peak, beside[p].most + at.first, beside[p].end + at.last});
    out.push_back(at);
  }
  for (std::size_t p = 0; p < phases.size(); ++p)
    if (beside[p].most + out[p].last <= peak) out[p].first = out[p].last;
  return out;
}

namespace {

void fill_section_extents(Draft& draft) {
  for (DraftBody& body : draft.bodies) {
    if (!body.maps) continue;
    for (Op& op : body.ops)
      if ((op.kind == OpKind::map || op.kind == OpKind::unmap) && op.map_end == whole_section)
        op.map_end = draft.section(op.section).bytes;
    std::erase_if(body.ops, [](const Op& op) {
      return (op.kind == OpKind::map || op.kind == OpKind::unmap) && op.map_begin == op.map_end;
    });
    body.note_slots(body.slots.size());
  }
}

/// Of each phase, sections of the device other than transients; `stream`: on which it gives memory back last.
struct PhaseMaps {
  std::vector<MappedBeside> beside;
  std::vector<StreamId> stream;
};
PhaseMaps maps_of(const Program& program) {
  PhaseMaps out;
  std::int64_t mapped = 0;
  for (const auto& blocks : program.phases) {
    MappedBeside& phase = out.beside.emplace_back(MappedBeside{.most = mapped});
    StreamId& stream = out.stream.emplace_back();
    for (const Block& block : blocks)
      for (const Call& call : block.calls)
        for (const Op& op : program.bodies[static_cast<std::size_t>(call.body)].ops) {
          if (op.kind != OpKind::map && op.kind != OpKind::unmap) continue;
          if (program.section(op.section).space != Space::device) continue;
          const std::int64_t bytes = op.map_end - op.map_begin;
          mapped += op.kind == OpKind::map ? bytes : -bytes;
          phase.most = std::max(phase.most, mapped);
          if (op.kind == OpKind::unmap) phase.gives_back = true, stream = op.stream;
        }
    phase.end = mapped;
  }
  return out;
}

/// `bytes`: that each phase needs.
void insert_transient_maps(const Plan& plan, Program& program, const std::vector<std::int64_t>& bytes,
                           bool keep_mapped) {
  std::vector<TransientUse> uses;
  for (std::size_t p = 0; p < plan.phases.size(); ++p)
    uses.push_back(transient_use(plan.phases[p], round_up(bytes[p], plan.chunk_bytes)));
  const PhaseMaps own = maps_of(program);
  const std::vector<TransientMap> maps = transient_maps(uses, own.beside, keep_mapped);
  std::int64_t mapped = 0;
  for (std::size_t p = 0; p < plan.phases.size(); ++p) {
    auto& blocks = program.phases[p];
    const auto change_to = [&](std::int64_t to, bool first) {
      if (to == mapped || !uses[p].maps || blocks.empty()) return;
      Op op;
      op.kind = to > mapped ? OpKind::map : OpKind::unmap;
      if (!first) op.stream = own.stream[p];
      op.section = sections::transient;
      op.map_begin = std::min(mapped, to);
      op.map_end = std::max(mapped, to);
      // A block that a rank may skip cannot hold it: transients are mapped for all that follows.
      if ((first ? blocks.front() : blocks.back()).enters != Enters::nothing)
        blocks.insert(first ? blocks.begin() : blocks.end(), Block{.name = "transients", .calls = {}});
      Body body;
      body.name = fmt::format("{}.{}.transients", name_of(op.kind), plan.phases[p].name);
      body.ops = {std::move(op)};
      Call call;
      call.body = static_cast<std::int32_t>(program.bodies.size());
      program.bodies.push_back(std::move(body));
      auto& calls = (first ? blocks.front() : blocks.back()).calls;
      calls.insert(first ? calls.begin() : calls.end(), std::move(call));
      mapped = to;
    };
    change_to(maps[p].first, true);
    change_to(maps[p].last, false);
  }
}

}  // namespace

void run_passes(const Plan& plan, Draft& draft) {
  std::erase_if(draft.slot_limits, [](const SlotLimit& limit) { return limit.turns.empty(); });
  lay_out_sections(plan, draft);
  fill_section_extents(draft);
  insert_lifetimes(draft);
  insert_dependencies(draft);
  place_transients(plan, draft);
}

Program finish(const Plan& plan, Draft draft, bool keep_mapped) {
  const std::vector<std::int64_t> bytes = draft.transient_bytes;
  Program program = assemble(std::move(draft));
  insert_transient_maps(plan, program, bytes, keep_mapped);  // in front of all that the block's first event joins
  return program;
}

}  // namespace hotbunk
