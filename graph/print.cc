#include "graph/print.h"

#include <fmt/format.h>

#include "base/format.h"

namespace hotbunk {
namespace {

std::string print_dim(const Dim& d) {
  if (d.sym == Sym::fixed) return fmt::format("{}", d.size);
  const char* what = d.sym == Sym::tokens ? "tokens" : "seqs";
  return d.begin == 0 ? fmt::format("{}<={}", what, d.size) : fmt::format("{}-{}<={}", what, d.begin, d.size);
}

std::string print_tensors(const Program& program, const std::vector<Tensor>& tensors) {
  std::string out;
  for (const Tensor& t : tensors) out += (out.empty() ? "" : ", ") + print_tensor(program, t);
  return out;
}

std::string print_attrs(const Op& op) {
  std::string out;
  for (const auto& [key, value] : op.attrs)
    out += fmt::format("  {}={}", name_of(key), std::visit([](auto v) { return fmt::format("{}", v); }, value));
  return out;
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

std::string print_enters(const Block& block) {
  if (block.enters == Enters::nothing) return "";
  return fmt::format(", unless {} is {}", name_of(block.section), name_of(block.enters));
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
                       name_of(b.category), name_of(b.section), b.offset);
  return out;
}

std::string print_program(const Plan& plan, std::size_t index, const PrintOptions& options) {
  const Program& program = plan.programs[index];
  std::vector<Rank> ranks;
  for (Rank r = 0; r < plan.num_ranks(); ++r)
    if (plan.program_of_rank[static_cast<std::size_t>(r)] == static_cast<std::int32_t>(index)) ranks.push_back(r);
  std::string out = fmt::format("program {} (ranks {}): {} buffers, {} events\n", index, print_runs(ranks),
                                program.buffers.size(), program.num_events);
  for (int s = 0; s < num_sections; ++s)
    if (const std::int64_t bytes = program.section_bytes[static_cast<std::size_t>(s)]; bytes > 0)
      out += fmt::format("    section {:<16} {:>12}  {}\n", name_of(static_cast<Section>(s)),
                         format_bytes(static_cast<double>(bytes)), name_of(space_of(static_cast<Section>(s))));
  for (const SlotLimit& limit : program.slot_limits)
    out += fmt::format("    slots {:<18} {} for {} turns\n", limit.name, limit.slots, limit.turns.size());
  if (options.buffers) out += print_buffers(program);
  for (std::size_t p = 0; p < program.phases.size(); ++p) {
    const PhaseInfo& phase = plan.phases[p];
    if (!options.phase.empty() && phase.name != options.phase) continue;
    out += fmt::format("  phase {} ({}{})\n", phase.name, print_when(phase), phase.driven ? ", driven" : "");
    for (const Block& block : program.phases[p]) {
      out += fmt::format("    block {}: {} ops{}\n", block.name.empty() ? "-" : block.name, block.ops.size(),
                         print_enters(block));
      if (!options.ops) continue;
      for (const Op& op : block.ops) out += "      " + print_op(plan, program, op) + '\n';
    }
  }
  return out;
}

}  // namespace

std::string print_tensor(const Program& program, const Tensor& t) {
  const Buffer& buffer = program.buffers[static_cast<std::size_t>(t.buffer)];
  std::string out = buffer.name;
  if (t.offset_bytes != 0) out += fmt::format("+{}", t.offset_bytes);
  out += fmt::format(" {}[", name_of(t.dtype));
  for (std::size_t d = 0; d < t.rank; ++d) out += (d ? ", " : "") + print_dim(t.shape[d]);
  return out + ']';
}

std::string label_of(const Program& program, const Op& op) {
  if (!op.name.empty()) return op.name;
  if (op.buffer >= 0 && static_cast<std::size_t>(op.buffer) < program.buffers.size())
    return program.buffers[static_cast<std::size_t>(op.buffer)].name;
  if (op.kind == OpKind::map || op.kind == OpKind::unmap) return std::string(name_of(op.section));
  return op.event >= 0 ? fmt::format("event {}", op.event) : "";
}

std::string print_op(const Plan& plan, const Program& program, const Op& op) {
  std::string out = fmt::format("{:<8} {:<18} {}", name_of(op.stream), name_of(op.kind), op.name);
  if (op.group >= 0) out += fmt::format("  over {}", plan.groups[static_cast<std::size_t>(op.group)].name);
  if (op.buffer >= 0) {
    const Buffer& b = program.buffers[static_cast<std::size_t>(op.buffer)];
    if (b.name != op.name) out += "  " + b.name;
    out += fmt::format("  {} {} at {}+{}", format_bytes(static_cast<double>(b.bytes())), name_of(b.category),
                       name_of(b.section), b.offset);
  }
  if (op.event >= 0) out += fmt::format("  event {}", op.event);
  if (op.kind == OpKind::map || op.kind == OpKind::unmap)
    out += fmt::format("  {} [{}, {})", name_of(op.section), op.map_begin, op.map_end);
  if (!op.inputs.empty()) out += "  " + print_tensors(program, op.inputs);
  if (!op.outputs.empty()) out += " -> " + print_tensors(program, op.outputs);
  out += print_attrs(op);
  if (!op.moves.empty()) out += fmt::format("  {} move{}", op.moves.size(), op.moves.size() == 1 ? "" : "s");
  return out;
}

std::string print_plan(const Plan& plan, const PrintOptions& options) {
  std::string out = print_header(plan);
  for (std::size_t i = 0; i < plan.programs.size(); ++i) out += print_program(plan, i, options);
  return out;
}

}  // namespace hotbunk
