#include "trace/capacity.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/format.h"
#include "graph/print.h"

namespace hotbunk {
namespace {

std::string bytes_text(std::int64_t bytes) {
  return fmt::format("{} ({} B)", format_bytes(static_cast<double>(bytes)), bytes);
}

struct Large {
  std::string name;
  const Buffer* buffer;
};

/// The locals of bodies, each named as in its body's first call.
void add_locals(const Program& program, std::vector<Large>& large) {
  std::vector<bool> named(program.bodies.size());
  for (const auto& blocks : program.phases)
    for (const Block& block : blocks)
      for (const Call& call : block.calls) {
        const auto body = static_cast<std::size_t>(call.body);
        if (named[body]) continue;
        named[body] = true;
        for (const Buffer& local : program.bodies[body].locals) large.push_back({call.name + local.name, &local});
      }
}

}  // namespace

std::int64_t mappable_bytes(const Plan& plan, Space space) {
  const std::int64_t capacity = space == Space::device ? plan.device_capacity_bytes : plan.host_capacity_bytes;
  if (capacity <= 0) return -1;
  return space == Space::device ? std::max<std::int64_t>(capacity - plan.overhead_bytes, 0) : capacity;
}

Diagnostic does_not_fit(const Plan& plan, const RefusedMap& refused,
                        const std::function<bool(const Buffer&)>& is_live) {
  const Program& program = plan.program(refused.rank);
  const Op& op = *refused.op;
  const Space space = refused.op.section().space;
  const std::int64_t asked = op.map_end - op.map_begin;
  const std::int64_t overhead = space == Space::device ? plan.overhead_bytes : 0;
  const std::int64_t capacity = space == Space::device ? plan.device_capacity_bytes : plan.host_capacity_bytes;
  const std::int64_t needed = refused.mapped_bytes + asked + overhead;
  Diagnostic d{
      .code = "E301",
      .message = fmt::format("the plan does not fit: rank {} needs {} of {} on the {} in phase {}", refused.rank,
                             format_bytes(static_cast<double>(needed)), format_bytes(static_cast<double>(capacity)),
                             name_of(space), plan.phases[static_cast<std::size_t>(refused.phase)].name),
      .where = {},
      .notes = {},
      .help = {}};
  d.notes.push_back(fmt::format("step {}, op '{}' maps {} of {}", refused.step,
                                refused.op.name().empty() ? label_of(refused.op) : refused.op.name(), bytes_text(asked),
                                refused.op.section().name));
  d.notes.push_back(fmt::format("mapped {} + asked {} + overhead {} = {} B, capacity {} B: {} B too much",
                                refused.mapped_bytes, asked, overhead, needed, capacity, needed - capacity));

  // What lives there now, and what the section that is being mapped is for.
  std::vector<Large> largest;
  for (const Buffer& b : program.buffers)
    if (program.section(b.section).space == space && (b.section == op.section || is_live(b)))
      largest.push_back({b.name, &b});
  if (op.section == transient_section) add_locals(program, largest);
  std::ranges::stable_sort(largest, std::ranges::greater{}, [](const Large& l) { return l.buffer->bytes(); });
  for (std::size_t i = 0; i < std::min<std::size_t>(3, largest.size()); ++i)
    d.notes.push_back(fmt::format("large: '{}' ({}, {}) {}", largest[i].name, name_of(largest[i].buffer->category),
                                  program.section(largest[i].buffer->section).name,
                                  bytes_text(largest[i].buffer->bytes())));
  d.help = space == Space::host
               ? "raise cluster.host_memory_gib, or set train.offload to none"
               : "make those smaller (train.micro_batch_tokens, train.recompute, rollout.memory_fraction, "
                 "sync.bucket_mib) or let the other side sleep (train.offload, rollout.sleep)";
  return d;
}

}  // namespace hotbunk
