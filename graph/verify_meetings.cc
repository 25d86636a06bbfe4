// What ranks have with one another: roles that play phases together, collectives of groups, sends and receives.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "graph/bound.h"
#include "graph/verify_parts.h"

namespace hotbunk {
namespace {

bool is_pairwise(OpKind k) { return k == OpKind::send || k == OpKind::recv; }

/// One role's next task behind another: the phase `to` of iteration t waits for the phase `from` of iteration t -
/// steps.
struct Behind {
  std::int32_t role = 0;
  std::size_t from = 0, to = 0;
  std::int64_t steps = 0;
};

/// What follows what in the walks of all roles; behind an iteration's last task comes the next one's first.
std::vector<Behind> orders_of_roles(const Plan& plan) {
  std::vector<Behind> out;
  for (std::int32_t role = 0; role < std::ssize(plan.roles); ++role) {
    std::vector<std::pair<std::size_t, std::int64_t>> tasks;  // phase, steps back
    for (std::size_t p = 0; p < plan.phases.size(); ++p)
      if (const Player* player = plan.phases[p].player(role); player && plan.phases[p].when == When::iteration)
        tasks.emplace_back(p, player->steps_back);
    for (std::size_t i = 0; i < tasks.size(); ++i) {
      const bool last = i + 1 == tasks.size();
      const auto& [from, back] = tasks[i];
      const auto& [to, next_back] = tasks[last ? 0 : i + 1];
      out.push_back({role, from, to, back - next_back + (last ? 1 : 0)});
    }
  }
  return out;
}

/// Tasks that come behind themselves: a ring of orders that leads to the same iteration or a later one; empty: none.
std::vector<Behind> ring_of(const std::vector<Behind>& orders, std::size_t phases) {
  // A ring of s steps and n orders weighs s (phases + 1) - n: below zero only where s <= 0.
  const auto weight = [&](const Behind& b) { return b.steps * (static_cast<std::int64_t>(phases) + 1) - 1; };
  std::vector<std::int64_t> least(phases, 0);
  std::vector<const Behind*> by(phases, nullptr);
  std::size_t changed = phases;
  for (std::size_t round = 0; round <= phases; ++round) {
    changed = phases;
    for (const Behind& b : orders)
      if (least[b.from] + weight(b) < least[b.to]) {
        least[b.to] = least[b.from] + weight(b), by[b.to] = &b;
        changed = b.to;
      }
    if (changed == phases) return {};
  }
  for (std::size_t i = 0; i < phases; ++i) changed = by[changed]->from;  // into the ring, whatever led there
  std::vector<Behind> ring;
  for (std::size_t at = changed; ring.empty() || at != changed; at = by[at]->from) ring.push_back(*by[at]);
  std::ranges::reverse(ring);
  return ring;
}

/// " of the next iteration", say; "" for the same.
std::string iteration_text(std::int64_t steps) {
  if (steps == 0) return "";
  if (steps == 1) return " of the next iteration";
  if (steps == -1) return " of the iteration before";
  return fmt::format(" of the iteration {} {}", std::abs(steps), steps > 0 ? "later" : "before");
}

std::string describe(const Plan& plan, const std::vector<Behind>& ring) {
  std::string out;
  for (const Behind& b : ring)
    out +=
        fmt::format("{}{} plays {} before {}{}", out.empty() ? "" : ", ", plan.roles[static_cast<std::size_t>(b.role)],
                    plan.phases[b.from].name, plan.phases[b.to].name, iteration_text(b.steps));
  return out;
}

/// One collective as its group must agree on it: where, what and how many bytes.
struct Said {
  std::size_t phase;
  std::string_view block;
  StreamId stream;
  OpKind kind;
  std::int64_t bytes;
  friend bool operator==(const Said&, const Said&) = default;
};

/// What a rank says to each group family, per phase, block and stream in order.
std::vector<std::vector<Said>> conversations(const Plan& plan, const Program& program) {
  std::vector<std::vector<Said>> out(plan.groups.size());
  for (std::size_t p = 0; p < program.phases.size(); ++p)
    for (const Block& block : program.phases[p])
      each_op(program, block, [&](const BoundOp& op) {
        if (is_communication(op->kind) && op->kind != OpKind::peer_copy && !is_pairwise(op->kind) && op->group >= 0)
          out[static_cast<std::size_t>(op->group)].push_back(
              {p, block.name, op->stream, op->kind, op->inputs.empty() ? 0 : op->inputs[0].capacity_bytes()});
      });
  const auto place = [](const Said& s) { return std::tuple(s.phase, s.block, s.stream); };
  for (auto& said : out) std::ranges::stable_sort(said, {}, place);
  return out;
}

}  // namespace

void check_roles(const Plan& plan, Faults& faults) {
  const auto num_roles = std::ssize(plan.roles);
  for (const PhaseInfo& phase : plan.phases) {
    const auto fault = [&](const std::string& text) { faults.add(fmt::format("phase {}: {}", phase.name, text)); };
    if (phase.players.empty()) fault("no role plays it");
    for (std::size_t i = 0; i < phase.players.size(); ++i) {
      const Player& p = phase.players[i];
      if (p.role < 0 || p.role >= num_roles) fault(fmt::format("names role {}", p.role));
      if (i > 0 && p.role <= phase.players[i - 1].role) fault("its roles are not in ascending order");
      if (p.steps_back < 0 || p.steps_back > max_steps_back || (p.steps_back > 0 && phase.when != When::iteration))
        fault(fmt::format("is played {} iterations back: 0 to {} are possible, in phases of iterations", p.steps_back,
                          max_steps_back));
    }
  }
  std::set<std::int32_t> at_work;
  for (std::size_t i = 0; i < plan.programs.size(); ++i) {
    const Program& program = plan.programs[i];
    if (program.role < 0 || program.role >= num_roles) {
      faults.add(fmt::format("program {}: names role {}", i, program.role));
      continue;
    }
    at_work.insert(program.role);
    for (std::size_t p = 0; p < std::min(plan.phases.size(), program.phases.size()); ++p)
      if (!program.phases[p].empty() && plan.phases[p].player(program.role) == nullptr)
        faults.add(fmt::format("program {}: has blocks in phase {}, which {} does not play", i, plan.phases[p].name,
                               plan.roles[static_cast<std::size_t>(program.role)]));
  }
  for (std::int32_t role = 0; role < num_roles && !plan.programs.empty(); ++role)
    if (!at_work.contains(role))
      faults.add(fmt::format("role {}: no program is its", plan.roles[static_cast<std::size_t>(role)]));
  if (faults.any()) return;
  if (const auto ring = ring_of(orders_of_roles(plan), plan.phases.size()); !ring.empty())
    faults.add("roles wait for one another for ever: " + describe(plan, ring));
}

void check_conversations(const Plan& plan, Faults& faults) {
  std::vector<std::vector<std::vector<Said>>> said;  // of each program, to each family
  for (const Program& program : plan.programs) said.push_back(conversations(plan, program));
  const auto of = [&](Rank r) { return static_cast<std::size_t>(plan.program_of_rank[static_cast<std::size_t>(r)]); };
  for (std::size_t f = 0; f < plan.groups.size(); ++f)
    for (const auto& members : plan.groups[f].groups) {
      std::set<std::size_t> seen;
      for (Rank r : members)
        if (seen.insert(of(r)).second && said[of(r)][f] != said[of(members[0])][f])
          faults.add(fmt::format("group {}: ranks {} and {} do not issue the same collectives in the same order",
                                 plan.groups[f].name, members[0], r));
    }
}

void check_pairs(const Plan& plan, Faults& faults) {
  using Message = std::tuple<std::size_t, std::string_view, std::int64_t>;  // phase, block, bytes
  using Pair = std::tuple<GroupId, Rank, Rank>;                             // family, from, to
  std::map<Pair, std::vector<Message>> sent, received;
  std::vector<bool> talks;  // of programs: few do
  for (const Program& program : plan.programs)
    talks.push_back(std::ranges::any_of(program.bodies, [](const Body& body) {
      return std::ranges::any_of(body.ops, [](const Op& op) { return is_pairwise(op.kind); });
    }));
  for (Rank r = 0; r < plan.num_ranks(); ++r) {
    if (!talks[static_cast<std::size_t>(plan.program_of_rank[static_cast<std::size_t>(r)])]) continue;
    const Program& program = plan.program(r);
    for (std::size_t p = 0; p < program.phases.size(); ++p)
      for (const Block& block : program.phases[p])
        each_op(program, block, [&](const BoundOp& op) {
          if (!is_pairwise(op->kind) || op->group < 0) return;
          const bool sends = op->kind == OpKind::send;
          const auto& side = sends ? op->inputs : op->outputs;
          const std::vector<Rank>& group = plan.group_of(op->group, r);
          const std::int64_t peer = op->integer(Attr::peer, -1);
          if (side.empty() || peer < 0 || peer >= std::ssize(group))
            return faults.add(fmt::format("rank {}, phase {}, block {}: {} '{}' names place {} of a group of {}", r,
                                          plan.phases[p].name, block.name, name_of(op->kind), op.name(), peer,
                                          group.size()));
          const Rank partner = group[static_cast<std::size_t>(peer)];
          const Message message{p, block.name, side[0].capacity_bytes()};
          if (sends) sent[{op->group, r, partner}].push_back(message);
          else received[{op->group, partner, r}].push_back(message);
        });
  }
  std::set<Pair> pairs;
  for (const auto& [pair, messages] : sent) pairs.insert(pair);
  for (const auto& [pair, messages] : received) pairs.insert(pair);
  for (const Pair& pair : pairs) {
    const auto &out = sent[pair], &in = received[pair];
    if (out == in) continue;
    const auto [a, b] = std::ranges::mismatch(out, in);
    const auto text = [&](const auto& at, const auto& all) {
      if (at == all.end()) return std::string("nothing");
      return fmt::format("{} B in phase {}, block {}", std::get<2>(*at), plan.phases[std::get<0>(*at)].name,
                         std::get<1>(*at));
    };
    faults.add(fmt::format("group {}: rank {} sends rank {} {}, which expects {}",
                           plan.groups[static_cast<std::size_t>(std::get<0>(pair))].name, std::get<1>(pair),
                           std::get<2>(pair), text(a, out), text(b, in)));
  }
}

}  // namespace hotbunk
