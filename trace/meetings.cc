#include "trace/meetings.h"

#include <map>
#include <string_view>
#include <tuple>

#include "graph/bound.h"

namespace hotbunk {
namespace {

/// The group family of each collective, by phase and the op's name.
using Families = std::map<std::pair<std::int16_t, std::string>, GroupId>;

Families families_of(const Plan& plan) {
  Families out;
  for (const Program& program : plan.programs)
    for (std::size_t phase = 0; phase < program.phases.size(); ++phase)
      for (const Block& block : program.phases[phase])
        each_op(program, block, [&](const BoundOp& op) {
          if (is_communication(op->kind) && !op->hands_over())
            out[{static_cast<std::int16_t>(phase), op.name()}] = op->group;
        });
  return out;
}

}  // namespace

std::vector<std::vector<std::size_t>> meetings_of(const Plan& plan, const Trace& trace) {
  using Meeting = std::tuple<std::int32_t, std::int16_t, std::string_view, Rank, std::int64_t>;
  const Families family_of = families_of(plan);
  std::map<Meeting, std::vector<std::size_t>> found;
  std::map<std::tuple<Rank, std::int32_t, std::int16_t, std::string_view>, std::int64_t> times;
  for (std::size_t i = 0; i < trace.spans.size(); ++i) {
    const Span& s = trace.spans[i];
    if (!is_communication(s.kind) || is_pairwise(s.kind) || s.kind == OpKind::peer_copy) continue;
    const std::string& name = trace.names[static_cast<std::size_t>(s.name)];
    const auto family = family_of.find({s.phase, name});
    if (family == family_of.end()) continue;
    const auto& members = plan.group_of(family->second, s.rank);
    if (members.size() < 2) continue;
    const std::int64_t n = times[{s.rank, s.step, s.phase, name}]++;
    found[{s.step, s.phase, name, members.front(), n}].push_back(i);
  }
  std::vector<std::vector<std::size_t>> out;
  for (auto& [key, spans] : found) out.push_back(std::move(spans));
  return out;
}

}  // namespace hotbunk
