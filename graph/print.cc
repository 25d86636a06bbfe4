#include "graph/print.h"

#include <fmt/format.h>

#include "base/format.h"

namespace hotbunk {
namespace {

std::string print_dim(const Plan& plan, const Dim& d) {
  if (d.extent == fixed_extent) return fmt::format("{}", d.size);
  const std::string& what = plan.extent(d.extent).name;
  return d.begin == 0 ? fmt::format("{}<={}", what, d.size) : fmt::format("{}-{}<={}", what, d.begin, d.size);
}

/// "port2" or the local's name.
std::string slot_name(const Body& body, BufferId slot) {
  if (slot < body.num_ports) return fmt::format("port{}", slot);
  return body.locals[static_cast<std::size_t>(slot - body.num_ports)].name;
}

/// "hidden bf16[tokens<=4096, 512]", with "+N" bytes when the window does not start where the slot does.
std::string print_tensor(const Plan& plan, const Body& body, const Tensor& t) {
  std::string out = slot_name(body, t.buffer);
  if (t.offset_bytes != 0) out += fmt::format("+{}", t.offset_bytes);
  out += fmt::format(" {}[", name_of(t.dtype));
  for (std::size_t d = 0; d < t.rank; ++d) out += (d ? ", " : "") + print_dim(plan, t.shape[d]);
  return out + ']';
}

std::string print_tensors(const Plan& plan, const Body& body, const std::vector<Tensor>& tensors) {
  std::string out;
  for (const Tensor& t : tensors) out += (out.empty() ? "" : ", ") + print_tensor(plan, body, t);
  return out;
}

std::string print_attrs(const Op& op) {
  std::string out;
  for (const auto& [key, value] : op.attrs)
    out += fmt::format("  {}={}", name_of(key), std::visit([](auto v) { return fmt::format("{}", v); }, value));
  return out;
}

/// "  priced block: 1.2 ms" or "  priced block: 1.2 ms at 1 tokens to 30 ms at 256".
std::string print_prices(const Op& op) {
  const PricePoint &first = op.prices.front(), &last = op.prices.back();
  std::string out = fmt::format("  priced block: {}", format_seconds(first.seconds));
  if (op.prices.size() == 1) return out;
  return out + fmt::format(" at {} tokens to {} at {}", first.tokens, format_seconds(last.seconds), last.tokens);
}

/// "0-3,6": ranks or other numbers, runs joined.
template <class Numbers>
std::string print_runs(const Numbers& numbers) {
  std::string out;
  for (std::size_t i = 0; i < numbers.size();) {
    std::size_t last = i;
    while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1) ++last;
    out += fmt::format("{}{}", out.empty() ? "" : ",", numbers[i]);
    if (last > i) out += fmt::format("-{}", numbers[last]);
    i = last + 1;
  }
  return out;
}

std::string print_when(const PhaseInfo& phase) {
  if (phase.when != When::iteration) return phase.when == When::prologue ? "prologue" : "epilogue";
  return phase.every == 1 ? "iteration" : fmt::format("every {} iterations", phase.every);
}

/// "; trainer, engines 1 iteration back"; "" where one role, "job", plays it.
std::string print_players(const Plan& plan, const PhaseInfo& phase) {
  if (plan.roles == Plan{}.roles && phase.players == PhaseInfo{}.players) return "";
  std::string out = phase.players.empty() ? "; nobody" : "";
  for (const Player& p : phase.players) {
    out += fmt::format("{}{}", out.empty() ? "; " : ", ", plan.roles[static_cast<std::size_t>(p.role)]);
    if (p.steps_back > 0) out += fmt::format(" {} iteration{} back", p.steps_back, p.steps_back == 1 ? "" : "s");
  }
  return out;
}

std::string print_enters(const Program& program, const Block& block) {
  if (block.enters == Enters::nothing) return "";
  return fmt::format(", unless {} is {}", program.section(block.section).name, name_of(block.enters));
}

std::string print_header(const Plan& plan) {
  std::string out = fmt::format("plan {}\n  scenario {}: {} ranks, {} program{}\n", plan_hash(plan), plan.scenario,
                                plan.num_ranks(), plan.programs.size(), plan.programs.size() == 1 ? "" : "s");
  const auto capacity = [](std::int64_t bytes) {
    return bytes == 0 ? std::string("unlimited") : format_bytes(static_cast<double>(bytes));
  };
  out +=
      fmt::format("  per rank: device {}, host {}, overhead {}, chunks of {}\n", capacity(plan.device_capacity_bytes),
                  capacity(plan.host_capacity_bytes), format_bytes(static_cast<double>(plan.overhead_bytes)),
                  format_bytes(static_cast<double>(plan.chunk_bytes)));
  for (std::size_t i = Plan{}.extents.size(); i < plan.extents.size(); ++i)
    out += fmt::format("  extent {}: {}\n", plan.extents[i].name, print_extent(plan.extents[i]));
  for (const GroupFamily& family : plan.groups) {
    out += fmt::format("  group {}:", family.name);
    for (const auto& members : family.groups) out += fmt::format(" [{}]", print_runs(members));
    out += '\n';
  }
  return out;
}

std::string print_buffers(const Program& program) {
  std::string out;
  for (const Buffer& b : program.buffers)
    out += fmt::format("    buffer {:<40} {:>12}  {:<13} {}+{}\n", b.name, format_bytes(static_cast<double>(b.bytes())),
                       name_of(b.category), program.section(b.section).name, b.offset);
  return out;
}

std::string bytes_text(std::int64_t bytes) { return format_bytes(static_cast<double>(bytes)); }

/// How often each body is called in a phase, or in all ("").
std::vector<std::int64_t> calls_of(const Plan& plan, const Program& program, const std::string& phase) {
  std::vector<std::int64_t> out(program.bodies.size(), 0);
  for (std::size_t p = 0; p < program.phases.size(); ++p)
    if (phase.empty() || plan.phases[p].name == phase)
      for (const Block& block : program.phases[p])
        for (const Call& call : block.calls) ++out[static_cast<std::size_t>(call.body)];
  return out;
}

std::string print_bodies(const Plan& plan, const Program& program, const std::string& phase) {
  std::string out;
  const std::vector<std::int64_t> calls = calls_of(plan, program, phase);
  for (std::size_t i = 0; i < program.bodies.size(); ++i) {
    const Body& body = program.bodies[i];
    if (calls[i] == 0) continue;
    out += fmt::format("  body {}: {} port{}, ", body.name.empty() ? "-" : body.name, body.num_ports,
                       body.num_ports == 1 ? "" : "s");
    if (!body.locals.empty())
      out += fmt::format("{} local{}, ", body.locals.size(), body.locals.size() == 1 ? "" : "s");
    out += fmt::format("{} op{}, {} call{}\n", body.ops.size(), body.ops.size() == 1 ? "" : "s", calls[i],
                       calls[i] == 1 ? "" : "s");
    for (const Op& op : body.ops) out += "      " + print_op(plan, program, body, op) + '\n';
  }
  return out;
}

std::size_t num_ops(const Program& program, const Block& block) {
  std::size_t n = 0;
  for (const Call& call : block.calls) n += program.bodies[static_cast<std::size_t>(call.body)].ops.size();
  return n;
}

std::string print_program(const Plan& plan, std::size_t index, const PrintOptions& options) {
  const Program& program = plan.programs[index];
  std::vector<Rank> ranks;
  for (Rank r = 0; r < plan.num_ranks(); ++r)
    if (plan.program_of_rank[static_cast<std::size_t>(r)] == static_cast<std::int32_t>(index)) ranks.push_back(r);
  const std::string role = plan.roles == Plan{}.roles ? "" : plan.roles[static_cast<std::size_t>(program.role)] + ", ";
  std::string out = fmt::format("program {} ({}ranks {}): {} buffers, {} bodies, {} events\n", index, role,
                                print_runs(ranks), program.buffers.size(), program.bodies.size(), program.num_events);
  for (const Section& s : program.sections)
    if (s.bytes > 0)
      out += fmt::format("    section {:<16} {:>12}  {}\n", s.name, bytes_text(s.bytes), name_of(s.space));
  for (const SlotLimit& limit : program.slot_limits)
    out += fmt::format("    slots {:<18} {} for {} turns\n", limit.name, limit.slots, limit.turns.size());
  if (options.buffers) out += print_buffers(program);
  if (options.ops) out += print_bodies(plan, program, options.phase);
  for (std::size_t p = 0; p < program.phases.size(); ++p) {
    const PhaseInfo& phase = plan.phases[p];
    if (!options.phase.empty() && phase.name != options.phase) continue;
    if (phase.player(program.role) == nullptr && program.phases[p].empty()) continue;
    out += fmt::format("  phase {} ({}{}{})\n", phase.name, print_when(phase), phase.driven ? ", driven" : "",
                       print_players(plan, phase));
    for (const Block& block : program.phases[p]) {
      out +=
          fmt::format("    block {}: {} call{}, {} ops{}\n", block.name.empty() ? "-" : block.name, block.calls.size(),
                      block.calls.size() == 1 ? "" : "s", num_ops(program, block), print_enters(program, block));
      if (!options.ops) continue;
      for (const Call& call : block.calls) out += "      " + print_call(plan, program, call) + '\n';
    }
  }
  return out;
}

}  // namespace

std::string print_extent(const Extent& e) {
  const std::string most = e.capacity > 0 ? fmt::format("at most {}, ", e.capacity) : "";
  return fmt::format("{}counted by the {}", most, name_of(e.counted_by));
}

std::string label_of(const BoundOp& op) {
  if (op->buffer >= 0) return op.allocated().name();
  if (op->kind == OpKind::map || op->kind == OpKind::unmap) return op.section().name;
  return op.name();
}

std::string where_in_block(const BoundOp& op) {
  std::string at = fmt::format("op {} ({} '{}')", op.op - op.body().ops.data(), name_of(op->kind), op.name());
  if (op.block->calls.size() == 1) return at;
  return fmt::format("call {} '{}', {}", op.call - op.block->calls.data(), op.call->name, at);
}

std::string print_op(const Plan& plan, const Program& program, const Body& body, const Op& op) {
  std::string out = fmt::format("{:<8} {:<18} {}", plan.stream(op.stream).name, name_of(op.kind), op.name);
  if (op.group >= 0) out += fmt::format("  over {}", plan.groups[static_cast<std::size_t>(op.group)].name);
  if (op.buffer >= 0) {
    out += "  " + slot_name(body, op.buffer);
    if (op.buffer >= body.num_ports) {
      const Buffer& b = body.locals[static_cast<std::size_t>(op.buffer - body.num_ports)];
      out += fmt::format("  {} {}", bytes_text(b.bytes()), name_of(b.category));
    }
  }
  if (op.kind == OpKind::map || op.kind == OpKind::unmap)
    out += fmt::format("  {} [{}, {})", program.section(op.section).name, op.map_begin, op.map_end);
  if (!op.inputs.empty()) out += "  " + print_tensors(plan, body, op.inputs);
  if (!op.outputs.empty()) out += " -> " + print_tensors(plan, body, op.outputs);
  out += print_attrs(op);
  if (op.is_priced()) out += print_prices(op);
  if (!op.moves.empty()) out += fmt::format("  {} move{}", op.moves.size(), op.moves.size() == 1 ? "" : "s");
  return out;
}

std::string print_call(const Plan& plan, const Program& program, const Call& call, bool numbers) {
  const Body& body = program.bodies[static_cast<std::size_t>(call.body)];
  std::string ports, marks;
  for (const Port& port : call.ports) {
    ports += (ports.empty() ? "" : ", ") + program.buffers[static_cast<std::size_t>(port.buffer)].name;
    if (port.offset_bytes != 0) ports += fmt::format("+{}", port.offset_bytes);
  }
  for (const Mark& m : call.marks)
    marks += fmt::format("  {} {} {}{}", m.before, plan.stream(m.stream).name,
                         m.kind == OpKind::wait ? "waits" : "records", numbers ? fmt::format(" {}", m.event) : "");
  std::string out = fmt::format("{}  {}", body.name.empty() ? "-" : body.name, call.name.empty() ? "-" : call.name);
  if (!ports.empty()) out += fmt::format("  ({})", ports);
  if (numbers && !call.locals.empty()) out += fmt::format("  locals at {}", fmt::join(call.locals, ", "));
  return marks.empty() ? out : out + "  |" + marks;
}

std::string print_plan(const Plan& plan, const PrintOptions& options) {
  std::string out = print_header(plan);
  for (std::size_t i = 0; i < plan.programs.size(); ++i) out += print_program(plan, i, options);
  return out;
}

}  // namespace hotbunk
