#include "graph/plan_json.h"

#include "base/hash.h"
#include "graph/json_text.h"

namespace hotbunk {
namespace {

template <class Range, class Append>
void append_array(std::string& out, const Range& range, Append append) {
  out += '[';
  Commas commas;
  for (const auto& element : range) commas.before(out), append(element);
  out += ']';
}

void append_key(std::string& out, std::string_view key) {
  append_json(out, key);
  out += ':';
}

/// What the ids in ops, buffers and calls are called.
struct Names {
  const Plan& plan;
  const Program& program;
  std::string_view of(StreamId id) const { return plan.stream(id).name; }
  std::string_view of(SectionId id) const { return program.section(id).name; }
  std::string_view of(ExtentId id) const {
    if (id == fixed_extent) return "fixed";
    return plan.extent(id).name;
  }
};

void append(std::string& out, const Names& names, const Tensor& t) {
  out += '[';
  append_json(out, t.buffer), out += ',';
  append_json(out, t.offset_bytes), out += ',';
  append_json(out, name_of(t.dtype));
  for (int d = 0; d < t.rank; ++d) {
    const Dim& dim = t.shape[static_cast<std::size_t>(d)];
    out += ',';
    if (dim.extent == fixed_extent && dim.begin == 0) {
      append_json(out, dim.size);
      continue;
    }
    out += '[';
    append_json(out, dim.size), out += ',';
    append_json(out, names.of(dim.extent)), out += ',';
    append_json(out, dim.begin);
    out += ']';
  }
  out += ']';
}

/// [tensor, row_begin, row_end, col_begin, col_end, offset, pitch], and of a tensor in parts
/// [who, family, count, repeat, rows, cols, pitch, last_row] behind them, and there of parts within a piece
/// [family, count, repeat, rows, cols, last_row], or of runs [begin, elements, step].
void append(std::string& out, const Side& side) {
  const Piece& p = side.piece;
  const Parts& parts = side.parts;
  append_array(out,
               std::initializer_list<std::int64_t>{side.tensor, p.row_begin, p.row_end, p.col_begin, p.col_end,
                                                   p.offset, p.pitch},
               [&](std::int64_t v) { append_json(out, v); });
  if (parts == Parts{}) return;
  out.back() = ',';
  out += '[';
  append_json(out, name_of(parts.who));
  for (std::int64_t v : {std::int64_t{parts.family}, std::int64_t{parts.count}, std::int64_t{parts.repeat}, parts.rows,
                         parts.cols, parts.pitch, parts.last_row})
    out += ',', append_json(out, v);
  if (const Within& in = parts.within; in.family >= 0) {
    out += ',';
    append_array(out,
                 std::initializer_list<std::int64_t>{in.family, in.count, in.repeat, in.rows, in.cols, in.last_row},
                 [&](std::int64_t v) { append_json(out, v); });
  }
  if (const Run& run = parts.run; run.elements > 0) {
    out += ',';
    append_array(out, std::initializer_list<std::int64_t>{run.begin, run.elements, run.step},
                 [&](std::int64_t v) { append_json(out, v); });
  }
  out += "]]";
}

void append(std::string& out, const Move& m) {
  out += '[';
  append(out, m.from), out += ',', append(out, m.to);
  out += ']';
}

/// What an op has beyond kind, stream, name and tensors; nothing when all of it is default.
void append_rest(std::string& out, const Names& names, const Op& op) {
  const Op otherwise;
  std::string rest;
  Commas commas;
  const auto key = [&](std::string_view name) { commas.before(rest), append_key(rest, name); };
  const auto index = [&](std::string_view name, std::int32_t value, std::int32_t usual) {
    if (value != usual) key(name), append_json(rest, value);
  };
  if (!op.attrs.empty()) {
    key("attrs");
    append_array(rest, op.attrs, [&](const auto& attr) {
      rest += '[';
      append_json(rest, name_of(attr.first)), rest += ',';
      std::visit([&](auto value) { append_json(rest, value); }, attr.second);
      rest += ']';
    });
  }
  if (!op.moves.empty()) key("moves"), append_array(rest, op.moves, [&](const Move& m) { append(rest, m); });
  if (op.is_priced())
    key("prices"), append_array(rest, op.prices, [&](const PricePoint& p) {
      rest += '[';
      append_json(rest, p.tokens);
      for (const double v : {p.seconds, p.seconds_per_pair, p.payload_bytes}) rest += ',', append_json(rest, v);
      rest += ']';
    });
  index("group", op.group, otherwise.group);
  index("buffer", op.buffer, otherwise.buffer);
  if (op.section != otherwise.section) key("section"), append_json(rest, names.of(op.section));
  if (op.map_begin != 0 || op.map_end != 0) {
    key("map");
    append_array(rest, std::initializer_list<std::int64_t>{op.map_begin, op.map_end},
                 [&](std::int64_t v) { append_json(rest, v); });
  }
  if (!rest.empty()) out += ",{", out += rest, out += '}';
}

void append(std::string& out, const Names& names, const Op& op) {
  out += '[';
  append_json(out, name_of(op.kind)), out += ',';
  append_json(out, names.of(op.stream)), out += ',';
  append_json(out, op.name), out += ',';
  append_array(out, op.inputs, [&](const Tensor& t) { append(out, names, t); }), out += ',';
  append_array(out, op.outputs, [&](const Tensor& t) { append(out, names, t); });
  append_rest(out, names, op);
  out += ']';
}

void append(std::string& out, const Names& names, const Buffer& b) {
  out += '[';
  append_json(out, b.name), out += ',';
  append_json(out, name_of(b.dtype)), out += ',';
  append_json(out, b.elements), out += ',';
  append_json(out, name_of(b.category)), out += ',';
  append_json(out, names.of(b.section)), out += ',';
  append_json(out, b.offset);
  out += ']';
}

void append(std::string& out, const SlotLimit& limit) {
  out += '[';
  append_json(out, limit.name), out += ',';
  append_json(out, limit.slots), out += ',';
  append_array(out, limit.turns, [&](const std::vector<BufferId>& turn) {
    append_array(out, turn, [&](BufferId id) { append_json(out, id); });
  });
  out += ']';
}

void append(std::string& out, const Names& names, const Body& b) {
  out += "{\"name\":", append_json(out, b.name);
  out += ",\"ports\":", append_json(out, b.num_ports);
  out += ",\"locals\":", append_array(out, b.locals, [&](const Buffer& local) { append(out, names, local); });
  out += ",\"ops\":", append_array(out, b.ops, [&](const Op& op) { append(out, names, op); });
  out += '}';
}

void append(std::string& out, const Names& names, const Call& c) {
  out += '[';
  append_json(out, c.body), out += ',';
  append_json(out, c.name), out += ',';
  append_array(out, c.ports, [&](const Port& port) {
    if (port.offset_bytes == 0) return append_json(out, port.buffer);
    out += '[';
    append_json(out, port.buffer), out += ',', append_json(out, port.offset_bytes);
    out += ']';
  });
  out += ',', append_array(out, c.locals, [&](std::int64_t offset) { append_json(out, offset); }), out += ',';
  append_array(out, c.marks, [&](const Mark& m) {
    out += '[';
    append_json(out, m.before), out += ',', append_json(out, name_of(m.kind));
    out += ',', append_json(out, names.of(m.stream)), out += ',', append_json(out, m.event);
    out += ']';
  });
  out += ']';
}

void append(std::string& out, const Plan& plan, const Program& p) {
  const Names names{plan, p};
  out += '{';
  append_key(out, "sections");
  append_array(out, p.sections, [&](const Section& s) {
    out += '[';
    append_json(out, s.name), out += ',', append_json(out, name_of(s.space)), out += ',', append_json(out, s.bytes);
    out += ']';
  });
  out += ",\"num_events\":", append_json(out, p.num_events);
  if (p.role != 0) out += ",\"role\":", append_json(out, p.role);
  out += ",\"buffers\":", append_array(out, p.buffers, [&](const Buffer& b) { append(out, names, b); });
  if (!p.slot_limits.empty())
    out += ",\"slot_limits\":", append_array(out, p.slot_limits, [&](const SlotLimit& limit) { append(out, limit); });
  out += ",\"bodies\":", append_array(out, p.bodies, [&](const Body& b) { append(out, names, b); });
  out += ",\"phases\":";
  append_array(out, p.phases, [&](const std::vector<Block>& blocks) {
    append_array(out, blocks, [&](const Block& block) {
      out += "{\"name\":", append_json(out, block.name);
      if (block.enters != Enters::nothing) {
        out += ",\"enters\":", append_json(out, name_of(block.enters));
        out += ",\"section\":", append_json(out, names.of(block.section));
      }
      out += ",\"calls\":", append_array(out, block.calls, [&](const Call& call) { append(out, names, call); });
      out += '}';
    });
  });
  out += '}';
}

std::string_view name_of_when(When when) {
  return when == When::prologue ? "prologue" : when == When::iteration ? "iteration" : "epilogue";
}

}  // namespace

std::string facts_hash(const PlanFacts& facts) {
  Hasher hasher;
  for (const auto& [name, value] : facts) {
    hasher.add(std::string_view(name));
    hasher.add(std::string_view(value));
  }
  return hasher.hex();
}

std::string plan_to_json(const Plan& plan, const PlanFacts& made_from) {
  std::string out = "{\"schema\":\"hotbunk.plan-file/4\"";
  out += ",\"hash\":", append_json(out, plan_hash(plan));
  out += ",\"scenario\":", append_json(out, plan.scenario);
  if (!made_from.empty()) {
    out += ",\"made_from\":{\"hash\":", append_json(out, facts_hash(made_from));
    out += ",\"facts\":{";
    for (bool first = true; const auto& [name, value] : made_from) {
      if (!first) out += ',';
      first = false;
      append_json(out, name), out += ':', append_json(out, value);
    }
    out += "}}";
  }
  out += ",\"chunk_bytes\":", append_json(out, plan.chunk_bytes);
  out += ",\"device_capacity_bytes\":", append_json(out, plan.device_capacity_bytes);
  out += ",\"host_capacity_bytes\":", append_json(out, plan.host_capacity_bytes);
  out += ",\"overhead_bytes\":", append_json(out, plan.overhead_bytes);
  out += ",\"streams\":", append_array(out, plan.streams, [&](const Stream& s) {
    out += '[';
    append_json(out, s.name), out += ',', append_json(out, name_of(s.kind));
    out += ']';
  });
  if (plan.extents != Plan{}.extents)
    out += ",\"extents\":", append_array(out, plan.extents, [&](const Extent& e) {
      out += '[';
      append_json(out, e.name), out += ',', append_json(out, e.capacity);
      out += ',', append_json(out, name_of(e.counted_by));
      out += ']';
    });
  out += ",\"groups\":", append_array(out, plan.groups, [&](const GroupFamily& family) {
    out += "{\"name\":", append_json(out, family.name);
    out += ",\"groups\":", append_array(out, family.groups, [&](const std::vector<Rank>& members) {
      append_array(out, members, [&](Rank r) { append_json(out, r); });
    });
    out += '}';
  });
  if (plan.roles != Plan{}.roles)
    out += ",\"roles\":", append_array(out, plan.roles, [&](const std::string& role) { append_json(out, role); });
  out += ",\"phases\":", append_array(out, plan.phases, [&](const PhaseInfo& phase) {
    out += "{\"name\":", append_json(out, phase.name);
    out += ",\"when\":", append_json(out, name_of_when(phase.when));
    out += phase.driven ? ",\"driven\":true" : ",\"driven\":false";
    if (phase.every != 1) out += ",\"every\":", append_json(out, phase.every);
    if (phase.players != PhaseInfo{}.players)
      out += ",\"players\":", append_array(out, phase.players, [&](const Player& p) {
        append_array(out, std::array{p.role, p.steps_back}, [&](std::int32_t n) { append_json(out, n); });
      });
    out += '}';
  });
  out += ",\"program_of_rank\":", append_array(out, plan.program_of_rank, [&](auto c) { append_json(out, c); });
  out += ",\"programs\":", append_array(out, plan.programs, [&](const Program& p) { append(out, plan, p); });
  out += "}\n";
  return out;
}

}  // namespace hotbunk
