#include "graph/plan.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <span>
#include <unordered_map>

#include "base/hash.h"
#include "base/parallel.h"

namespace hotbunk {
namespace {

constexpr std::array<std::string_view, num_categories> category_names = {
    "params", "grads", "optimizer", "activations", "kv_cache", "communication", "workspace", "overhead"};
constexpr std::array<std::string_view, num_stream_kinds> stream_kind_names = {"compute", "communication", "to_device",
                                                                              "to_host", "host"};

void add(Hasher& h, const Tensor& t) {
  h.add(static_cast<std::int64_t>(t.buffer));
  h.add(t.offset_bytes);
  h.add(static_cast<std::int64_t>(t.dtype));
  h.add(static_cast<std::int64_t>(t.rank));
  for (int d = 0; d < t.rank; ++d) {
    const Dim& dim = t.shape[static_cast<std::size_t>(d)];
    h.add(dim.size), h.add(static_cast<std::int64_t>(dim.extent) + 1), h.add(dim.begin);
  }
}

void add(Hasher& h, const Op& op) {
  for (std::int64_t v :
       {static_cast<std::int64_t>(op.kind), static_cast<std::int64_t>(op.stream), static_cast<std::int64_t>(op.group),
        static_cast<std::int64_t>(op.buffer), static_cast<std::int64_t>(op.event),
        static_cast<std::int64_t>(op.section), op.map_begin, op.map_end, static_cast<std::int64_t>(op.inputs.size()),
        static_cast<std::int64_t>(op.outputs.size()), static_cast<std::int64_t>(op.attrs.size()),
        static_cast<std::int64_t>(op.moves.size())})
    h.add(v);
  h.add(std::string_view(op.name));
  for (const Tensor& t : op.inputs) add(h, t);
  for (const Tensor& t : op.outputs) add(h, t);
  for (const auto& [key, value] : op.attrs) {
    h.add(static_cast<std::int64_t>(key) * 2 + static_cast<std::int64_t>(value.index()));
    std::visit([&](auto v) { h.add(v); }, value);
  }
  for (const PricePoint& p : op.prices) h.add(p.tokens), h.add(p.payload_bytes);  // seconds may be measured ones
  for (const Move& m : op.moves)
    for (const Side* side : {&m.from, &m.to}) {
      const Piece& p = side->piece;
      const Parts& parts = side->parts;
      for (std::int64_t v :
           {std::int64_t{side->tensor}, p.row_begin, p.row_end, p.col_begin, p.col_end, p.offset, p.pitch,
            static_cast<std::int64_t>(parts.who), std::int64_t{parts.family}, std::int64_t{parts.count},
            std::int64_t{parts.repeat}, parts.rows, parts.cols, parts.pitch, parts.last_row})
        h.add(v);
      if (const Within& in = parts.within; in.family >= 0)
        for (std::int64_t v :
             {std::int64_t{in.family}, std::int64_t{in.count}, std::int64_t{in.repeat}, in.rows, in.cols, in.last_row})
          h.add(v);
      if (const Run& run = parts.run; run.elements > 0)
        for (std::int64_t v : {run.begin, run.elements, run.step}) h.add(v);
    }
}

void add(Hasher& h, const Buffer& b) {
  h.add(std::string_view(b.name));
  for (std::int64_t v : {static_cast<std::int64_t>(b.dtype), b.elements, static_cast<std::int64_t>(b.category),
                         static_cast<std::int64_t>(b.section), b.offset})
    h.add(v);
}

void add(Hasher& h, const Body& b) {
  h.add(std::string_view(b.name));
  for (std::int64_t v :
       {std::int64_t{b.num_ports}, static_cast<std::int64_t>(b.locals.size()), static_cast<std::int64_t>(b.ops.size())})
    h.add(v);
  for (const Buffer& local : b.locals) add(h, local);
  for (const Op& op : b.ops) add(h, op);
}

void add(Hasher& h, const Call& c) {
  h.add(std::int64_t{c.body});
  h.add(std::string_view(c.name));
  for (std::int64_t v : {static_cast<std::int64_t>(c.locals.size()), static_cast<std::int64_t>(c.ports.size()),
                         static_cast<std::int64_t>(c.marks.size())})
    h.add(v);
  for (std::int64_t offset : c.locals) h.add(offset);
  for (const Port& port : c.ports) h.add(std::int64_t{port.buffer}), h.add(port.offset_bytes);
  for (const Mark& m : c.marks)
    for (std::int64_t v : {std::int64_t{m.before}, static_cast<std::int64_t>(m.kind),
                           static_cast<std::int64_t>(m.stream), std::int64_t{m.event}})
      h.add(v);
}

void add(Hasher& h, const Program& p) {
  if (p.role != 0) h.add(std::int64_t{p.role});
  h.add(static_cast<std::int64_t>(p.buffers.size()));
  for (const Buffer& b : p.buffers) add(h, b);
  h.add(static_cast<std::int64_t>(p.sections.size()));
  for (const Section& section : p.sections) {
    h.add(std::string_view(section.name));
    h.add(static_cast<std::int64_t>(section.space)), h.add(section.bytes);
  }
  h.add(static_cast<std::int64_t>(p.num_events));
  h.add(static_cast<std::int64_t>(p.slot_limits.size()));
  for (const SlotLimit& limit : p.slot_limits) {
    h.add(std::string_view(limit.name));
    h.add(std::int64_t{limit.slots}), h.add(static_cast<std::int64_t>(limit.turns.size()));
    for (const auto& turn : limit.turns) {
      h.add(static_cast<std::int64_t>(turn.size()));
      for (BufferId id : turn) h.add(std::int64_t{id});
    }
  }
  h.add(static_cast<std::int64_t>(p.bodies.size()));
  for (const Body& body : p.bodies) add(h, body);
  for (const auto& blocks : p.phases) {
    h.add(static_cast<std::int64_t>(blocks.size()));
    for (const Block& block : blocks) {
      h.add(std::string_view(block.name));
      h.add(static_cast<std::int64_t>(block.enters)), h.add(static_cast<std::int64_t>(block.section));
      h.add(static_cast<std::int64_t>(block.calls.size()));
      for (const Call& call : block.calls) add(h, call);
    }
  }
}

}  // namespace

std::string_view name_of(Category c) { return category_names[static_cast<std::size_t>(c)]; }
std::string_view name_of(Enters e) {
  return e == Enters::nothing ? "nothing" : e == Enters::asleep ? "asleep" : "awake";
}
std::string_view name_of(CountedBy c) { return c == CountedBy::driver ? "driver" : "device"; }
std::string_view name_of(StreamKind k) { return stream_kind_names[static_cast<std::size_t>(k)]; }
std::string_view name_of(Space s) { return s == Space::device ? "device" : "host"; }

const std::vector<Rank>& Plan::group_of(GroupId family, Rank r) const {
  static const std::vector<Rank> none;
  for (const auto& members : groups[static_cast<std::size_t>(family)].groups)
    if (std::find(members.begin(), members.end(), r) != members.end()) return members;
  return none;
}

std::vector<ExtentId> Plan::counted_extents(const Op& op) const {
  std::vector<ExtentId> out;
  for (const auto* side : {&op.inputs, &op.outputs})
    for (const Tensor& t : *side)
      for (const Dim& d : std::span(t.shape).first(t.rank))
        if (d.extent != fixed_extent && extent(d.extent).counted_by == CountedBy::device) out.push_back(d.extent);
  std::ranges::sort(out);
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

const Player* PhaseInfo::player(std::int32_t role) const {
  const auto found = std::ranges::find(players, role, &Player::role);
  return found == players.end() ? nullptr : &*found;
}

std::int32_t Plan::most_steps_back(std::int32_t role) const {
  std::int32_t most = 0;
  for (const PhaseInfo& phase : phases)
    if (const Player* p = phase.player(role)) most = std::max(most, p->steps_back);
  return most;
}

namespace {

/// Of the one of that name, -1 when there is none.
template <class Named>
std::int32_t index_of(const std::vector<Named>& all, std::string_view name) {
  const auto at = std::ranges::find(all, name, &Named::name);
  return at == all.end() ? -1 : static_cast<std::int32_t>(at - all.begin());
}

}  // namespace

std::int32_t Plan::phase_index(std::string_view name) const { return index_of(phases, name); }
GroupId Plan::family_index(std::string_view name) const { return index_of(groups, name); }
std::optional<StreamId> Plan::stream_index(std::string_view name) const {
  const std::int32_t i = index_of(streams, name);
  return i < 0 ? std::nullopt : std::optional(static_cast<StreamId>(i));
}
std::optional<SectionId> Program::section_index(std::string_view name) const {
  const std::int32_t i = index_of(sections, name);
  return i < 0 ? std::nullopt : std::optional(static_cast<SectionId>(i));
}

const std::vector<Rank>& Plan::group_of(std::string_view family, Rank r) const {
  static const std::vector<Rank> none;
  const GroupId id = family_index(family);
  return id < 0 ? none : group_of(id, r);
}

std::string plan_hash(const Plan& plan) {
  Hasher h;
  h.add(std::string_view(plan.scenario));
  // Not the host's capacity: the scenario may leave it to the machine, and a plan is the same on any (P7).
  for (std::int64_t v : {plan.chunk_bytes, plan.device_capacity_bytes, plan.overhead_bytes}) h.add(v);
  h.add(static_cast<std::int64_t>(plan.streams.size()));
  for (const Stream& stream : plan.streams)
    h.add(std::string_view(stream.name)), h.add(static_cast<std::int64_t>(stream.kind));
  if (plan.extents != Plan{}.extents)
    for (const Extent& e : plan.extents)
      h.add(std::string_view(e.name)), h.add(e.capacity), h.add(static_cast<std::int64_t>(e.counted_by));
  for (const GroupFamily& family : plan.groups) {
    h.add(std::string_view(family.name));
    for (const auto& members : family.groups) {
      h.add(static_cast<std::int64_t>(members.size()));
      for (Rank r : members) h.add(std::int64_t{r});
    }
  }
  for (const PhaseInfo& phase : plan.phases) {
    h.add(std::string_view(phase.name));
    h.add(static_cast<std::int64_t>(phase.when) * 2 + (phase.driven ? 1 : 0));
    if (phase.every != 1) h.add(std::int64_t{phase.every});
    if (phase.players == PhaseInfo{}.players) continue;
    h.add(static_cast<std::int64_t>(phase.players.size()));
    for (const Player& p : phase.players) h.add(std::int64_t{p.role}), h.add(std::int64_t{p.steps_back});
  }
  if (plan.roles != Plan{}.roles) h.add(static_cast<std::int64_t>(plan.roles.size()));
  if (plan.roles != Plan{}.roles)
    for (const std::string& role : plan.roles) h.add(std::string_view(role));
  std::vector<std::string> programs(plan.programs.size());
  in_parallel(programs.size(), [&](std::size_t i) {
    Hasher one;
    add(one, plan.programs[i]);
    programs[i] = one.hex();
  });
  for (const std::string& p : programs) h.add(std::string_view(p));
  for (std::int32_t c : plan.program_of_rank) h.add(std::int64_t{c});
  return h.hex();
}

}  // namespace hotbunk
