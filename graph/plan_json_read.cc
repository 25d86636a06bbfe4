// Plan files, read: each function takes one kind of value and checks whatever could later be used as an index or
// multiplied.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "graph/catalogue.h"
#include "graph/json_decode.h"
#include "graph/plan_json.h"
#include "spec/json_read.h"

namespace hotbunk {
namespace {

using decode::Value;

constexpr decode::Codes codes{"E502", "E503"};
constexpr std::int64_t largest = std::int64_t{1} << 60;      // bytes or elements: sums of two still fit 64 bits
constexpr std::int64_t most_ranks = std::int64_t{1} << 20;   // of a plan
constexpr std::size_t most_roles = 64;                       // of a plan
constexpr std::int64_t most_steps = 1'000'000'000;           // of a run
constexpr std::int64_t most_events = std::int64_t{1} << 24;  // of a program; interpreters allocate them all
constexpr std::int64_t most_slots = std::int64_t{1} << 20;   // of a body
constexpr std::int64_t most_ops = std::int64_t{1} << 27;     // that calls of a program run, for they are numbered
constexpr JsonLimits limits{.max_depth = 16, .max_values = 100'000'000};

/// What the ops of a body may refer to.
struct Scope {
  const Plan& plan;
  const Program& program;
  const Body& body;
};

/// a*b for a, b in [0, largest], or a fault.
std::int64_t product(const Value& v, std::int64_t a, std::int64_t b) {
  if (a != 0 && b > largest / a) v.out_of_range("more than 2^60 bytes");
  return a * b;
}

DType read_dtype(const Value& v) {
  const auto dtype = dtype_from(v.text());
  if (!dtype) v.out_of_range(fmt::format("unknown dtype \"{}\"", v.text().substr(0, 60)));
  return *dtype;
}

/// A name that none of these has.
template <class Named>
std::string new_name(const Value& v, const std::vector<Named>& others) {
  if (std::ranges::count(others, v.text(), &Named::name) > 0) v.out_of_range("a name that is there already");
  return v.text();
}

/// The index of the one so called.
template <class Id, class Named>
Id read_id(const Value& v, const std::vector<Named>& all) {
  const auto found = std::ranges::find(all, v.text(), &Named::name);
  if (found == all.end()) v.unknown_name(v.text());
  return static_cast<Id>(found - all.begin());
}
StreamId read_stream_id(const Value& v, const Plan& plan) { return read_id<StreamId>(v, plan.streams); }
SectionId read_section_id(const Value& v, const Program& program) { return read_id<SectionId>(v, program.sections); }

Dim read_dim(const Value& v, const Plan& plan) {
  if (v.is_integer()) return {.size = v.integer(0, largest)};
  v.array(3, 3);
  Dim dim{.size = v.at(0).integer(0, largest), .begin = v.at(2).integer(0, largest)};
  if (v.at(1).text() != "fixed") dim.extent = read_id<ExtentId>(v.at(1), plan.extents);
  return dim;
}

Tensor read_tensor(const Value& v, const Scope& scope) {
  const std::size_t n = v.array(3, 6);
  Tensor t;
  t.buffer = v.at(0).int32(0, scope.body.num_slots() - 1);
  t.offset_bytes = v.at(1).integer(0, largest);
  t.dtype = read_dtype(v.at(2));
  t.rank = static_cast<std::uint8_t>(n - 3);
  std::int64_t bytes = size_of(t.dtype);
  for (std::size_t d = 0; d < t.rank; ++d) {
    t.shape[d] = read_dim(v.at(d + 3), scope.plan);
    bytes = product(v, bytes, t.shape[d].size);
  }
  if (bytes > largest - t.offset_bytes) v.out_of_range("more than 2^60 bytes");
  return t;
}

std::vector<Tensor> read_tensors(const Value& v, const Scope& scope) {
  std::vector<Tensor> tensors(v.array());
  for (std::size_t i = 0; i < tensors.size(); ++i) tensors[i] = read_tensor(v.at(i), scope);
  return tensors;
}

/// An operand's number. A side of a feed or fetch lies outside the plan, so 0 needs no operand.
std::int32_t read_operand(const Value& v, const std::vector<Tensor>& operands) {
  return v.int32(0, std::max<std::int64_t>(static_cast<std::int64_t>(operands.size()) - 1, 0));
}

Within read_within(const Value& v, const Plan& plan) {
  v.array(6, 6);
  Within in;
  in.family = v.at(0).int32(0, static_cast<std::int64_t>(plan.groups.size()) - 1);
  in.count = v.at(1).int32(1, most_ranks);
  in.repeat = v.at(2).int32(1, most_ranks);
  std::int64_t* const fields[] = {&in.rows, &in.cols, &in.last_row};
  for (std::size_t i = 0; i < std::size(fields); ++i) *fields[i] = v.at(i + 3).integer(0, largest);
  for (const std::int64_t further : {in.rows, in.cols}) product(v, further, in.count);
  return in;
}

Run read_run(const Value& v) {
  v.array(3, 3);
  return {v.at(0).integer(-largest, largest), v.at(1).integer(1, largest), v.at(2).integer(1, largest)};
}

Parts read_parts(const Value& v, const Plan& plan) {
  const std::size_t n = v.array(8, 10);
  Parts parts;
  parts.who = v.at(0).name<Holds>(num_holds);
  parts.family = v.at(1).int32(-1, static_cast<std::int64_t>(plan.groups.size()) - 1);
  parts.count = v.at(2).int32(1, most_ranks);
  parts.repeat = v.at(3).int32(1, most_ranks);
  std::int64_t* const fields[] = {&parts.rows, &parts.cols, &parts.pitch, &parts.last_row};
  for (std::size_t i = 0; i < std::size(fields); ++i) *fields[i] = v.at(i + 4).integer(0, largest);
  for (const std::int64_t further : {parts.rows, parts.cols, parts.pitch}) product(v, further, parts.count);
  // Pieces within the tensor, runs, or those and then these.
  std::size_t next = 8;
  if (n > 9 || (n > 8 && v.at(8).array() != 3)) {
    parts.within = read_within(v.at(next++), plan);
    product(v, parts.pitch, std::int64_t{parts.count} * parts.within.count * parts.within.repeat);
  }
  if (next < n) {
    parts.run = read_run(v.at(next));
    product(v, parts.run.step, parts.count);
  }
  return parts;
}

Side read_side(const Value& v, const std::vector<Tensor>& operands, const Plan& plan) {
  const std::size_t n = v.array(7, 8);
  Side side;
  Piece& p = side.piece;
  side.tensor = read_operand(v.at(0), operands);
  std::int64_t* const fields[] = {&p.row_begin, &p.row_end, &p.col_begin, &p.col_end, &p.offset, &p.pitch};
  for (std::size_t i = 0; i < std::size(fields); ++i) *fields[i] = v.at(i + 1).integer(0, largest);
  if (p.row_end < p.row_begin || p.col_end < p.col_begin) v.out_of_range("a rectangle that ends before it begins");
  for (const std::int64_t width : {p.pitch, p.col_end}) product(v, width, p.row_end - p.row_begin);
  if (n == 8) side.parts = read_parts(v.at(7), plan);
  return side;
}

Move read_move(const Value& v, const Op& op, const Plan& plan) {
  v.array(2, 2);
  return {read_side(v.at(0), op.inputs, plan), read_side(v.at(1), op.outputs, plan)};
}

std::pair<Attr, AttrValue> read_attr(const Value& v) {
  v.array(2, 2);
  const auto attr = v.at(0).name<Attr>(num_attrs);
  const Value value = v.at(1);
  if (value.is_integer())
    return {attr, value.integer(std::numeric_limits<std::int64_t>::min(), std::numeric_limits<std::int64_t>::max())};
  const double real = value.real();
  if (std::isnan(real)) value.out_of_range("not a number");  // a plan equals itself
  return {attr, real};
}

void read_rest(const Value& v, const Scope& scope, Op& op) {
  const auto index = [&](std::string_view key, std::int64_t count, std::int32_t& to) {
    if (v.has(key)) to = v[key].int32(0, count - 1);
  };
  if (v.has("attrs")) {
    const Value attrs = v["attrs"];
    for (std::size_t i = 0; i < attrs.array(); ++i) op.attrs.push_back(read_attr(attrs.at(i)));
  }
  if (v.has("moves")) {
    const Value moves = v["moves"];
    for (std::size_t i = 0; i < moves.array(); ++i) op.moves.push_back(read_move(moves.at(i), op, scope.plan));
  }
  if (v.has("prices")) {
    const Value prices = v["prices"];
    for (std::size_t i = 0; i < prices.array(); ++i) {
      const Value point = prices.at(i);
      point.array(4, 4);
      op.prices.push_back(
          {point.at(0).integer(0, largest), point.at(1).real(), point.at(2).real(), point.at(3).real()});
    }
    if (const std::string bad = check_prices(op); !bad.empty()) prices.out_of_range(bad);
  }
  index("group", static_cast<std::int64_t>(scope.plan.groups.size()), op.group);
  index("buffer", scope.body.num_slots(), op.buffer);
  if (v.has("section")) op.section = read_section_id(v["section"], scope.program);
  if (v.has("map")) {
    const Value map = v["map"];
    map.array(2, 2);
    op.map_begin = map.at(0).integer(0, largest);
    op.map_end = map.at(1).integer(op.map_begin, scope.program.section(op.section).bytes);
  }
}

/// An op without the index that its kind cannot do without would be used as one.
void check_indices(const Value& v, const Op& op) {
  const bool memory = op.kind == OpKind::alloc || op.kind == OpKind::free;
  if (memory && op.buffer < 0) v.out_of_range(fmt::format("{} without a buffer", name_of(op.kind)));
  if (op.kind == OpKind::record || op.kind == OpKind::wait)
    v.out_of_range(fmt::format("{} in a body: calls have the events", name_of(op.kind)));
  if (op.kind == OpKind::priced && !op.is_priced()) v.out_of_range("a priced op without a price");
  if (is_communication(op.kind) && op.group < 0) v.out_of_range(fmt::format("{} without a group", name_of(op.kind)));
}

Op read_op(const Value& v, const Scope& scope) {
  const std::size_t n = v.array(5, 6);
  Op op;
  op.kind = v.at(0).name<OpKind>(num_op_kinds);
  op.stream = read_stream_id(v.at(1), scope.plan);
  op.name = v.at(2).text();
  op.inputs = read_tensors(v.at(3), scope);
  op.outputs = read_tensors(v.at(4), scope);
  if (n == 6) read_rest(v.at(5), scope, op);
  check_indices(v, op);
  return op;
}

Buffer read_buffer(const Value& v, const Program& program) {
  v.array(6, 6);
  Buffer b;
  b.name = v.at(0).text();
  b.dtype = read_dtype(v.at(1));
  b.elements = v.at(2).integer(0, largest / size_of(b.dtype));
  b.category = v.at(3).name<Category>(num_categories);
  b.section = read_section_id(v.at(4), program);
  b.offset = v.at(5).integer(0, largest);
  return b;
}

SlotLimit read_slot_limit(const Value& v, std::size_t num_buffers) {
  v.array(3, 3);
  SlotLimit limit{v.at(0).text(), v.at(1).int32(1, std::numeric_limits<std::int32_t>::max()), {}};
  const Value turns = v.at(2);
  limit.turns.resize(turns.array());
  for (std::size_t t = 0; t < turns.size(); ++t) {
    const Value turn = turns.at(t);
    for (std::size_t i = 0; i < turn.array(); ++i)
      limit.turns[t].push_back(turn.at(i).int32(0, static_cast<std::int64_t>(num_buffers) - 1));
  }
  return limit;
}

Body read_body(const Value& v, const Plan& plan, const Program& program) {
  Body body;
  const Value locals = v["locals"], ops = v["ops"];
  body.name = v["name"].text();
  body.num_ports = v["ports"].int32(0, most_slots);
  body.locals.reserve(locals.array(0, most_slots));
  for (std::size_t i = 0; i < locals.size(); ++i) {
    const Buffer& b = body.locals.emplace_back(read_buffer(locals.at(i), program));
    if (b.section != transient_section || b.offset != 0) locals.at(i).out_of_range("a local with a place of its own");
  }
  body.ops.reserve(ops.array());
  for (std::size_t i = 0; i < ops.size(); ++i) body.ops.push_back(read_op(ops.at(i), {plan, program, body}));
  return body;
}

Call read_call(const Value& v, const Plan& plan, const Program& program) {
  v.array(5, 5);
  Call call;
  call.body = v.at(0).int32(0, static_cast<std::int64_t>(program.bodies.size()) - 1);
  const Body& body = program.bodies[static_cast<std::size_t>(call.body)];
  call.name = v.at(1).text();
  const Value ports = v.at(2), marks = v.at(4);
  const auto num_ports = static_cast<std::size_t>(body.num_ports);
  ports.array(num_ports, num_ports);
  for (std::size_t i = 0; i < num_ports; ++i) {
    const Value port = ports.at(i);
    const bool plain = port.is_integer();
    if (!plain) port.array(2, 2);
    call.ports.push_back({(plain ? port : port.at(0)).int32(0, static_cast<std::int64_t>(program.buffers.size()) - 1),
                          plain ? 0 : port.at(1).integer(0, largest)});
  }
  const Value locals = v.at(3);
  locals.array(body.locals.size(), body.locals.size());
  for (std::size_t i = 0; i < body.locals.size(); ++i) call.locals.push_back(locals.at(i).integer(0, largest));
  std::int32_t before = 0;
  for (std::size_t i = 0; i < marks.array(); ++i) {
    const Value mark = marks.at(i);
    mark.array(4, 4);
    before = mark.at(0).int32(before, static_cast<std::int64_t>(body.ops.size()));
    const auto kind = mark.at(1).name<OpKind>(num_op_kinds);
    if (kind != OpKind::record && kind != OpKind::wait) mark.at(1).out_of_range("should be \"record\" or \"wait\"");
    call.marks.push_back(
        {before, kind, read_stream_id(mark.at(2), plan), mark.at(3).int32(0, std::int64_t{program.num_events} - 1)});
  }
  return call;
}

std::vector<Block> read_blocks(const Value& v, const Plan& plan, const Program& program,
                               const std::vector<SlotWindows>& windows, std::int64_t& num_ops) {
  std::vector<Block> blocks(v.array());
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const Value block = v.at(i);
    const Value calls = block["calls"];
    blocks[i].name = block["name"].text();
    if (block.has("enters")) {
      blocks[i].enters = block["enters"].name<Enters>(num_enters);
      blocks[i].section = read_section_id(block["section"], program);
    }
    blocks[i].calls.reserve(calls.array());
    for (std::size_t k = 0; k < calls.size(); ++k) {
      blocks[i].calls.push_back(read_call(calls.at(k), plan, program));
      const Call& call = blocks[i].calls.back();
      const auto body = static_cast<std::size_t>(call.body);
      if (const std::string bad = check_windows(program, call, windows[body]); !bad.empty())
        calls.at(k).out_of_range(bad.substr(0, 200));
      num_ops += std::ssize(program.bodies[body].ops);
      if (num_ops > most_ops) calls.at(k).out_of_range(fmt::format("more than {} ops in one program", most_ops));
    }
  }
  return blocks;
}

Program read_program(const Value& v, const Plan& plan) {
  Program p;
  const Value sections = v["sections"], buffers = v["buffers"], phases = v["phases"];
  p.sections.clear();
  for (std::size_t s = 0; s < sections.array(1, max_sections); ++s) {
    const Value section = sections.at(s);
    section.array(3, 3);
    p.sections.push_back(
        {new_name(section.at(0), p.sections), section.at(1).name<Space>(2), section.at(2).integer(0, largest)});
  }
  p.num_events = v["num_events"].int32(0, most_events);
  if (v.has("role")) p.role = v["role"].int32(0, static_cast<std::int32_t>(plan.roles.size()) - 1);
  p.buffers.reserve(buffers.array());
  for (std::size_t b = 0; b < buffers.size(); ++b) p.buffers.push_back(read_buffer(buffers.at(b), p));
  if (v.has("slot_limits")) {
    const Value slots = v["slot_limits"];
    for (std::size_t l = 0; l < slots.array(); ++l)
      p.slot_limits.push_back(read_slot_limit(slots.at(l), p.buffers.size()));
  }
  const Value bodies = v["bodies"];
  p.bodies.reserve(bodies.array());
  for (std::size_t b = 0; b < bodies.size(); ++b) p.bodies.push_back(read_body(bodies.at(b), plan, p));
  phases.array(plan.phases.size(), plan.phases.size());
  std::vector<SlotWindows> windows;
  for (const Body& body : p.bodies) windows.push_back(windows_of(body));
  std::int64_t num_ops = 0;
  for (std::size_t i = 0; i < phases.size(); ++i)
    p.phases.push_back(read_blocks(phases.at(i), plan, p, windows, num_ops));
  return p;
}

GroupFamily read_family(const Value& v, Rank num_ranks) {
  const Value groups = v["groups"];
  GroupFamily family{v["name"].text(), std::vector<std::vector<Rank>>(groups.array())};
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const Value members = groups.at(g);
    for (std::size_t i = 0; i < members.array(); ++i) family.groups[g].push_back(members.at(i).int32(0, num_ranks - 1));
  }
  return family;
}

PhaseInfo read_phase(const Value& v, std::int32_t num_roles) {
  const Value when = v["when"];
  PhaseInfo phase{v["name"].text(), When::iteration, v["driven"].boolean()};
  if (when.text() == "prologue") phase.when = When::prologue;
  else if (when.text() == "epilogue") phase.when = When::epilogue;
  else if (when.text() != "iteration") when.out_of_range("should be \"prologue\", \"iteration\" or \"epilogue\"");
  if (v.has("every")) phase.every = v["every"].int32(2, most_steps);
  if (!v.has("players")) return phase;
  const Value players = v["players"];
  phase.players.resize(players.array(0, static_cast<std::size_t>(num_roles)));
  for (std::size_t i = 0; i < phase.players.size(); ++i) {
    const Value player = players.at(i);
    player.array(2, 2);
    phase.players[i] = {player.at(0).int32(0, num_roles - 1), player.at(1).int32(0, max_steps_back)};
  }
  return phase;
}

Plan read_plan(const Value& document) {
  Plan plan;
  plan.scenario = document["scenario"].text();
  plan.chunk_bytes = document["chunk_bytes"].integer(1, largest);
  plan.device_capacity_bytes = document["device_capacity_bytes"].integer(0, largest);
  plan.host_capacity_bytes = document["host_capacity_bytes"].integer(0, largest);
  plan.overhead_bytes = document["overhead_bytes"].integer(0, largest);
  const Value streams = document["streams"], groups = document["groups"], phases = document["phases"],
              ranks = document["program_of_rank"], programs = document["programs"];
  const auto num_programs = static_cast<std::int64_t>(programs.array());
  ranks.array(0, most_ranks);
  for (std::size_t r = 0; r < ranks.size(); ++r) plan.program_of_rank.push_back(ranks.at(r).int32(0, num_programs - 1));
  plan.streams.clear();
  for (std::size_t i = 0; i < streams.array(1, max_streams); ++i) {
    const Value stream = streams.at(i);
    stream.array(2, 2);
    plan.streams.push_back({new_name(stream.at(0), plan.streams), stream.at(1).name<StreamKind>(num_stream_kinds)});
  }
  if (document.has("extents")) {
    const Value extents = document["extents"];
    plan.extents.clear();
    for (std::size_t i = 0; i < extents.array(2, max_extents); ++i) {
      const Value extent = extents.at(i);
      extent.array(3, 3);
      plan.extents.push_back(
          {new_name(extent.at(0), plan.extents), extent.at(1).integer(0, largest), extent.at(2).name<CountedBy>(2)});
    }
  }
  for (std::size_t g = 0; g < groups.array(0, std::numeric_limits<std::int16_t>::max()); ++g)
    plan.groups.push_back(read_family(groups.at(g), plan.num_ranks()));
  if (document.has("roles")) {
    const Value roles = document["roles"];
    plan.roles.resize(roles.array(1, most_roles));
    for (std::size_t i = 0; i < plan.roles.size(); ++i) plan.roles[i] = roles.at(i).text();
  }
  for (std::size_t i = 0; i < phases.array(0, std::numeric_limits<std::int16_t>::max()); ++i)
    plan.phases.push_back(read_phase(phases.at(i), static_cast<std::int32_t>(plan.roles.size())));
  for (std::size_t i = 0; i < programs.size(); ++i) plan.programs.push_back(read_program(programs.at(i), plan));
  return plan;
}

PlanFacts read_facts(const Value& document) {
  PlanFacts facts;
  if (!document.has("made_from")) return facts;
  const Value made_from = document["made_from"], all = made_from["facts"];
  for (const std::string& name : all.keys()) facts[name] = all[name].text();
  return facts;
}

}  // namespace

Result<Plan> plan_from_json(std::string_view text, const std::string& file) {
  auto read = plan_file_from_json(text, file);
  if (!read) return tl::unexpected(read.error());
  return std::move(read->plan);
}

Result<PlanFile> plan_file_from_json(std::string_view text, const std::string& file) {
  auto json = parse_json(text, file, limits, "E501");
  if (!json) {
    json.error().front().help = "the file is damaged or cut short: save the plan again";
    return fail(json.error());
  }
  try {
    const Value document(*json, file, codes);
    const std::string schema = document["schema"].text();
    if (schema != "hotbunk.plan-file/4")
      return fail(
          Diagnostic{.code = "E505",
                     .message = fmt::format("schema is \"{}\", not \"hotbunk.plan-file/4\"", schema.substr(0, 60)),
                     .where = {file},
                     .notes = {},
                     .help = "give the file that `hotbunk plan --out` wrote"});
    const std::string stated = document["hash"].text();
    const auto edited = [&](const char* what, const std::string& states, const std::string& actual) {
      return fail(Diagnostic{
          .code = "E504",
          .message = fmt::format("{} not what was saved: the hash differs", what),
          .where = {file},
          .notes = {fmt::format("the file states {}", states.substr(0, 60)), fmt::format("its content has {}", actual)},
          .help = "save the plan again; a plan file is not to be edited"});
    };
    PlanFile read{.plan = read_plan(document), .made_from = read_facts(document)};
    if (const std::string actual = plan_hash(read.plan); actual != stated) return edited("the plan is", stated, actual);
    if (!read.made_from.empty())
      if (const std::string actual = facts_hash(read.made_from), states = document["made_from"]["hash"].text();
          actual != states)
        return edited("what the plan was made from is", states, actual);
    return read;
  } catch (const decode::Fault& fault) {
    return fail(fault.diagnostic);
  }
}

}  // namespace hotbunk
