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

/// One role's next task behind another: the phase `to` of an iteration waits for the phase `from` of the iteration that
/// is `steps` before it.
struct Behind {
  std::int32_t role = 0;
  std::size_t from = 0, to = 0;
  std::int64_t steps = 0;
};

/// What follows what in the walks of all roles; behind an iteration's last task comes the next one's first.
std::vector<Behind> orders_of_roles(const Plan& plan) {
  std::vector<std::vector<std::pair<std::size_t, std::int64_t>>> tasks_of(plan.roles.size());  // phase, steps back
  for (std::size_t p = 0; p < plan.phases.size(); ++p)
    if (plan.phases[p].when == When::iteration)
      for (const Player& player : plan.phases[p].players)
        tasks_of[static_cast<std::size_t>(player.role)].emplace_back(p, player.steps_back);
  std::vector<Behind> out;
  for (std::int32_t role = 0; role < std::ssize(plan.roles); ++role) {
    const auto& tasks = tasks_of[static_cast<std::size_t>(role)];
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
  for (std::size_t i = 0; i < plan.programs.size(); ++i) {
    const Program& program = plan.programs[i];
    if (program.role < 0 || program.role >= num_roles) {
      faults.add(fmt::format("program {}: names role {}", i, program.role));
      continue;
    }
    for (std::size_t p = 0; p < std::min(plan.phases.size(), program.phases.size()); ++p)
      if (!program.phases[p].empty() && plan.phases[p].player(program.role) == nullptr)
        faults.add(fmt::format("program {}: has blocks in phase {}, which {} does not play", i, plan.phases[p].name,
                               plan.roles[static_cast<std::size_t>(program.role)]));
  }
  std::set<std::int32_t> has_ranks, plays;
  for (const std::int32_t p : plan.program_of_rank) has_ranks.insert(plan.programs[static_cast<std::size_t>(p)].role);
  for (const PhaseInfo& phase : plan.phases)
    for (const Player& p : phase.players) plays.insert(p.role);
  for (std::int32_t role = 0; role < num_roles && !plan.programs.empty(); ++role) {
    const std::string& name = plan.roles[static_cast<std::size_t>(role)];
    if (!has_ranks.contains(role)) faults.add(fmt::format("role {}: no rank is of it", name));
    else if (!plays.contains(role)) faults.add(fmt::format("role {}: it plays no phase", name));
  }
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
  // What the ranks of a program send to and expect of each place of their group.
  using Message = std::tuple<std::size_t, std::string_view, std::int64_t>;  // phase, block, bytes
  using Messages = std::map<std::pair<GroupId, std::int64_t>, std::vector<Message>>;
  struct Mail {
    Messages sent, expected;
  };
  std::vector<Mail> mail(plan.programs.size());
  for (std::size_t i = 0; i < plan.programs.size(); ++i) {
    const Program& program = plan.programs[i];
    if (std::ranges::none_of(program.bodies,
                             [](const Body& b) { return std::ranges::any_of(b.ops, is_pairwise, &Op::kind); }))
      continue;
    for (std::size_t p = 0; p < program.phases.size(); ++p)
      for (const Block& block : program.phases[p])
        each_op(program, block, [&](const BoundOp& op) {
          if (!is_pairwise(op->kind) || op->group < 0) return;
          const bool sends = op->kind == OpKind::send;
          const auto& side = sends ? op->inputs : op->outputs;
          auto& messages = sends ? mail[i].sent : mail[i].expected;
          messages[{op->group, op->integer(Attr::peer, -1)}].emplace_back(p, block.name,
                                                                          side.empty() ? 0 : side[0].capacity_bytes());
        });
  }
  const auto of = [&](Rank r) -> const Mail& {
    return mail[static_cast<std::size_t>(plan.program_of_rank[static_cast<std::size_t>(r)])];
  };
  static const std::vector<Message> none;
  const auto found = [](const Messages& messages, GroupId family, std::size_t place) -> const std::vector<Message>& {
    const auto at = messages.find({family, static_cast<std::int64_t>(place)});
    return at == messages.end() ? none : at->second;
  };
  const auto text = [&](const auto& at, const std::vector<Message>& all) {
    if (at == all.end()) return std::string("nothing");
    const auto& [phase, block, bytes] = *at;
    return fmt::format("{} B in phase {}, block {}", bytes, plan.phases[phase].name, block);
  };
  for (std::size_t f = 0; f < plan.groups.size(); ++f)
    for (const auto& members : plan.groups[f].groups) {
      const auto family = static_cast<GroupId>(f);
      std::set<std::pair<std::size_t, std::size_t>> pairs;  // places: from, to
      for (std::size_t i = 0; i < members.size(); ++i)
        for (const bool sends : {true, false})
          for (const auto& [to, messages] : sends ? of(members[i]).sent : of(members[i]).expected) {
            if (to.first != family) continue;
            if (to.second < 0 || to.second >= std::ssize(members))
              faults.add(fmt::format("group {}: rank {} {} place {} of {}", plan.groups[f].name, members[i],
                                     sends ? "sends to" : "receives from", to.second, members.size()));
            else if (sends) pairs.emplace(i, static_cast<std::size_t>(to.second));
            else pairs.emplace(static_cast<std::size_t>(to.second), i);
          }
      for (const auto& [from, to] : pairs) {
        const auto &sent = found(of(members[from]).sent, family, to),
                   &expected = found(of(members[to]).expected, family, from);
        if (sent == expected) continue;
        const auto [a, b] = std::ranges::mismatch(sent, expected);
        faults.add(fmt::format("group {}: rank {} sends rank {} {}, which expects {}", plan.groups[f].name,
                               members[from], members[to], text(a, sent), text(b, expected)));
      }
    }
}

}  // namespace hotbunk
