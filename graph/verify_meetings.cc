// What ranks have with one another: roles that play phases together, collectives of groups, sends and receives.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <tuple>

#include "graph/catalogue.h"
#include "graph/verify_parts.h"

namespace hotbunk {
namespace {

/// One task behind another: `to` of an iteration waits for `from` of the iteration that is `steps` before it. A task is
/// a phase, numbered as such; of a phase in which roles hand over, it is who gives, and who takes is a task behind
/// those.
struct Behind {
  std::int32_t role = 0;
  std::size_t from = 0, to = 0;
  std::int64_t steps = 0;
};

/// What a role does in a phase with others.
enum class Handing : std::uint8_t { nothing, gives, takes, both };
Handing operator|(Handing a, Handing b) { return static_cast<Handing>(static_cast<int>(a) | static_cast<int>(b)); }

/// The ops of a block of a program that may not be whole yet.
template <class Visit>
void each_listed_op(const Program& program, const Block& block, Visit&& visit) {
  for (const Call& call : block.calls)
    if (call.body >= 0 && call.body < std::ssize(program.bodies))
      std::ranges::for_each(program.bodies[static_cast<std::size_t>(call.body)].ops, visit);
}

std::vector<std::vector<Handing>> handings_of(const Plan& plan, Faults& faults) {
  std::vector out(plan.phases.size(), std::vector<Handing>(plan.roles.size(), Handing::nothing));
  for (const Program& program : plan.programs)
    for (std::size_t p = 0; p < std::min(plan.phases.size(), program.phases.size()); ++p)
      for (const Block& block : program.phases[p])
        each_listed_op(program, block, [&, &mine = out[p][static_cast<std::size_t>(program.role)]](const Op& op) {
          if (!op.hands_over()) return;
          const std::int64_t gives = op.integer(Attr::gives);
          if (gives != 0 && gives != 1)
            faults.add(
                fmt::format("phase {}: barrier '{}': gives is 0 or 1, not {}", plan.phases[p].name, op.name, gives));
          mine = mine | (gives != 0 ? Handing::gives : Handing::takes);
        });
  return out;
}

/// Whether ranks of several roles are in one group of a family.
bool joins_roles(const Plan& plan, GroupId family) {
  if (family < 0 || family >= std::ssize(plan.groups)) return false;
  return std::ranges::any_of(plan.groups[static_cast<std::size_t>(family)].groups, [&](const auto& members) {
    return std::ranges::any_of(members, [&](Rank r) {
      return r >= 0 && r < plan.num_ranks() && members[0] >= 0 && members[0] < plan.num_ranks() &&
             plan.role_of(r) != plan.role_of(members[0]);
    });
  });
}

/// Where a role hands over, all do, each in one direction, and they have nothing else with one another there.
void check_handings(const Plan& plan, const std::vector<std::vector<Handing>>& handings, Faults& faults) {
  std::map<std::tuple<std::int32_t, GroupId, StreamId>, std::size_t> phase_of;  // giver, family, stream
  for (std::size_t p = 0; p < plan.phases.size(); ++p) {
    const auto& of_roles = handings[p];
    if (std::ranges::count(of_roles, Handing::nothing) == std::ssize(of_roles)) continue;
    const auto fault = [&](const std::string& text) {
      faults.add(fmt::format("phase {}: roles hand over, {}", plan.phases[p].name, text));
    };
    for (const Handing direction : {Handing::gives, Handing::takes})
      if (std::ranges::count(of_roles, direction) == 0)
        fault(fmt::format("and none {}", direction == Handing::gives ? "gives" : "takes"));
    for (const Player& player : plan.phases[p].players)
      if (const Handing does = of_roles[static_cast<std::size_t>(player.role)];
          does == Handing::nothing || does == Handing::both)
        fault(fmt::format("and {} {}", plan.roles[static_cast<std::size_t>(player.role)],
                          does == Handing::both ? "gives and takes" : "does neither"));
    for (const Program& program : plan.programs)
      for (const Block& block : program.phases[p])
        each_listed_op(program, block, [&](const Op& op) {
          if (op.hands_over() && op.integer(Attr::gives) == 1) {
            const auto at = phase_of.try_emplace(std::tuple(program.role, op.group, op.stream), p).first;
            if (at->second != p)  // what is given is told apart by how often
              fault(fmt::format("and so does phase {}, over the same group and stream", plan.phases[at->second].name));
          }
          if (is_communication(op.kind) && !op.hands_over() && joins_roles(plan, op.group))
            fault(fmt::format("and meet in {} '{}'", name_of(op.kind), op.name));
        });
  }
}

/// Tasks and what follows what in the walks of all roles; behind an iteration's last task comes the next one's first.
struct Tasks {
  std::vector<std::size_t> phase;  // by task
  std::vector<Behind> orders;
};
Tasks tasks_of_roles(const Plan& plan, const std::vector<std::vector<Handing>>& handings) {
  Tasks all;
  for (std::size_t p = 0; p < plan.phases.size(); ++p) all.phase.push_back(p);
  std::vector<std::vector<std::pair<std::size_t, std::int64_t>>> tasks_of(plan.roles.size());  // task, steps back
  std::vector<Behind>& out = all.orders;
  for (std::size_t p = 0; p < plan.phases.size(); ++p) {
    if (plan.phases[p].when != When::iteration) continue;
    std::optional<std::size_t> taken;
    for (const Player& player : plan.phases[p].players) {
      const bool takes = handings[p][static_cast<std::size_t>(player.role)] == Handing::takes;
      if (takes && !taken) {
        taken = all.phase.size();
        all.phase.push_back(p);
      }
      tasks_of[static_cast<std::size_t>(player.role)].emplace_back(takes ? *taken : p, player.steps_back);
    }
    for (const Player& player : plan.phases[p].players)
      if (taken && handings[p][static_cast<std::size_t>(player.role)] == Handing::gives)
        out.push_back({player.role, p, *taken, 0});
  }
  for (std::int32_t role = 0; role < std::ssize(plan.roles); ++role) {
    const auto& tasks = tasks_of[static_cast<std::size_t>(role)];
    for (std::size_t i = 0; i < tasks.size(); ++i) {
      const bool last = i + 1 == tasks.size();
      const auto& [from, back] = tasks[i];
      const auto& [to, next_back] = tasks[last ? 0 : i + 1];
      out.push_back({role, from, to, back - next_back + (last ? 1 : 0)});
    }
  }
  return all;
}

/// Tasks that come behind themselves: a ring of orders that leads to the same iteration or a later one; empty: none.
std::vector<Behind> ring_of(const std::vector<Behind>& orders, std::size_t tasks) {
  // A ring of s steps and n orders weighs s (tasks + 1) - n: below zero only where s <= 0.
  const auto weight = [&](const Behind& b) { return b.steps * (static_cast<std::int64_t>(tasks) + 1) - 1; };
  std::vector<std::int64_t> least(tasks, 0);
  std::vector<const Behind*> by(tasks, nullptr);
  std::size_t changed = tasks;
  for (std::size_t round = 0; round <= tasks; ++round) {
    changed = tasks;
    for (const Behind& b : orders)
      if (least[b.from] + weight(b) < least[b.to]) {
        least[b.to] = least[b.from] + weight(b), by[b.to] = &b;
        changed = b.to;
      }
    if (changed == tasks) return {};
  }
  for (std::size_t i = 0; i < tasks; ++i) changed = by[changed]->from;  // into the ring, whatever led there
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

std::string describe(const Plan& plan, const std::vector<std::size_t>& phase_of, const std::vector<Behind>& ring) {
  std::string out;
  for (const Behind& b : ring)
    out +=
        fmt::format("{}{} plays {} before {}{}", out.empty() ? "" : ", ", plan.roles[static_cast<std::size_t>(b.role)],
                    plan.phases[phase_of[b.from]].name, plan.phases[phase_of[b.to]].name, iteration_text(b.steps));
  return out;
}

/// One collective as its group must agree on it: where, what and how many bytes.
struct Said {
  std::size_t phase;
  std::string_view block;
  StreamId stream;
  OpKind kind;
  std::int64_t bytes;
  bool priced;  // no backend runs it
  friend bool operator==(const Said&, const Said&) = default;
};

/// What a rank says to each group family, per phase, block and stream in order.
std::vector<std::vector<Said>> conversations(const Plan& plan, const Program& program) {
  std::vector<std::vector<Said>> out(plan.groups.size());
  for (std::size_t p = 0; p < program.phases.size(); ++p)
    for (const Block& block : program.phases[p])
      each_op(program, block, [&](const BoundOp& op) {
        if (is_communication(op->kind) && op->kind != OpKind::peer_copy && !is_pairwise(op->kind) && op->group >= 0)
          out[static_cast<std::size_t>(op->group)].push_back({p, block.name, op->stream, op->kind,
                                                              op->inputs.empty() ? 0 : op->inputs[0].capacity_bytes(),
                                                              !op->prices.empty()});
      });
  const auto place = [](const Said& s) { return std::tuple(s.phase, s.block, s.stream); };
  for (auto& said : out) std::ranges::stable_sort(said, {}, place);
  return out;
}

/// What one rank sends another, or expects of it, over one stream.
struct Message {
  std::size_t phase = 0;
  std::string_view block;
  std::int64_t bytes = 0;
  std::int64_t number = 0;  // how many of its program's come before it
  bool like(const Message& m) const { return phase == m.phase && block == m.block && bytes == m.bytes; }
};
using Messages = std::vector<Message>;

/// The messages of a program that go to the same place, or come from it, wherever the rank is.
struct Letters {
  const Op* op = nullptr;  // the first of them
  Messages messages;
};
/// By family, stream, whether they are sent, kind, peer, source, relative.
using Mail = std::map<std::tuple<GroupId, StreamId, bool, OpKind, std::int64_t, std::int64_t, bool>, Letters>;

Mail mail_of(const Plan& plan, const Program& program, Faults& faults) {
  Mail out;
  if (std::ranges::none_of(program.bodies,
                           [](const Body& b) { return std::ranges::any_of(b.ops, is_pairwise, &Op::kind); }))
    return out;
  std::int64_t number = 0;
  for (std::size_t p = 0; p < program.phases.size(); ++p)
    for (const Block& block : program.phases[p])
      each_op(program, block, [&](const BoundOp& op) {
        if (!is_pairwise(op->kind) || op->group < 0) return;
        const auto post = [&](bool sends, const Tensor& t) {
          Letters& letters = out[{op->group, op->stream, sends, op->kind, op->integer(Attr::peer),
                                  op->integer(Attr::source, 0), op->integer(Attr::relative, 0) != 0}];
          letters.op = op.op;
          letters.messages.push_back({p, block.name, t.capacity_bytes(), number++});
        };
        if (op->kind != OpKind::recv) post(true, op->inputs[0]);
        if (op->kind != OpKind::send) post(false, op->outputs[0]);
        if (op->kind != OpKind::send_recv) return;
        const Tensor &x = op->inputs[0], &y = op->outputs[0];
        const std::int64_t sent = op.begin_of(x), received = op.begin_of(y);
        if (op.buffer(x).section() == op.buffer(y).section() && sent < received + y.capacity_bytes() &&
            received < sent + x.capacity_bytes())
          faults.add(fmt::format("phase {}, block {}: send_recv '{}' receives into what it sends", plan.phases[p].name,
                                 block.name, op.name()));
      });
  return out;
}

/// Several lists of one program as one, in its order.
Messages merged(const std::vector<const Messages*>& lists) {
  Messages out;
  for (const Messages* list : lists) out.insert(out.end(), list->begin(), list->end());
  std::ranges::sort(out, {}, &Message::number);
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
  const auto handings = handings_of(plan, faults);
  check_handings(plan, handings, faults);
  if (faults.any()) return;
  const Tasks tasks = tasks_of_roles(plan, handings);
  if (const auto ring = ring_of(tasks.orders, tasks.phase.size()); !ring.empty())
    faults.add("roles wait for one another for ever: " + describe(plan, tasks.phase, ring));
}

void check_conversations(const Plan& plan, Faults& faults) {
  std::vector<std::vector<std::vector<Said>>> said;  // of each program, to each family
  for (const Program& program : plan.programs) said.push_back(conversations(plan, program));
  const auto of = [&](Rank r) { return static_cast<std::size_t>(plan.program_of_rank[static_cast<std::size_t>(r)]); };
  for (std::size_t f = 0; f < plan.groups.size(); ++f)
    for (const auto& members : plan.groups[f].groups) {
      // A price may stand for what an engine of one rank takes from elsewhere; a backend would have nobody to meet.
      const auto& first = said[of(members[0])][f];
      if (const auto run = std::ranges::find(first, false, &Said::priced); members.size() == 1 && run != first.end())
        faults.add(fmt::format("group {}: rank {} issues {} with nobody: leave it out where a group has one rank",
                               plan.groups[f].name, members[0], name_of(run->kind)));
      std::set<std::size_t> seen;
      for (Rank r : members)
        if (seen.insert(of(r)).second && said[of(r)][f] != said[of(members[0])][f])
          faults.add(fmt::format("group {}: ranks {} and {} do not issue the same collectives in the same order",
                                 plan.groups[f].name, members[0], r));
    }
}

void check_pairs(const Plan& plan, Faults& faults) {
  std::vector<Mail> mail;  // of each program
  for (const Program& program : plan.programs) mail.push_back(mail_of(plan, program, faults));
  if (std::ranges::all_of(mail, &Mail::empty)) return;
  const auto text = [&](const auto& at, const Messages& all) {
    if (at == all.end()) return std::string("nothing");
    return fmt::format("{} B in phase {}, block {}", at->bytes, plan.phases[at->phase].name, at->block);
  };
  struct Talk {
    std::vector<const Messages*> sent, expected;
  };
  std::set<std::pair<const Messages*, const Messages*>> agreed;  // ranks of a program say the same to all their peers
  for (std::size_t f = 0; f < plan.groups.size(); ++f)
    for (const auto& members : plan.groups[f].groups) {
      std::map<std::tuple<std::size_t, std::size_t, StreamId>, Talk> talks;  // from one place to another
      for (std::size_t i = 0; i < members.size(); ++i)
        for (const auto& [address, letters] :
             mail[static_cast<std::size_t>(plan.program_of_rank[static_cast<std::size_t>(members[i])])]) {
          const auto& [family, stream, sends, kind, peer, source, relative] = address;
          if (family != static_cast<GroupId>(f)) continue;
          const auto fault = [&](const std::string& what) {
            faults.add(fmt::format("group {}: rank {} {}", plan.groups[f].name, members[i], what));
          };
          const Partners at = partners_of(*letters.op, std::ssize(members), static_cast<std::int64_t>(i));
          const std::int64_t other = sends ? at.to : at.from;
          if (other < 0 || other >= std::ssize(members))
            fault(fmt::format("{} place {} of {}", sends ? "sends to" : "receives from", other, members.size()));
          else if ((at.to == static_cast<std::int64_t>(i)) != (at.from == static_cast<std::int64_t>(i)))
            fault(fmt::format("is on one side only of {} '{}' with itself", name_of(kind), letters.op->name));
          else if (const auto o = static_cast<std::size_t>(other); sends)
            talks[{i, o, stream}].sent.push_back(&letters.messages);
          else talks[{o, i, stream}].expected.push_back(&letters.messages);
        }
      for (const auto& [pair, talk] : talks) {
        const bool one_each = talk.sent.size() == 1 && talk.expected.size() == 1;
        if (one_each && agreed.contains({talk.sent[0], talk.expected[0]})) continue;
        const Messages sent = merged(talk.sent), expected = merged(talk.expected);
        const auto [a, b] =
            std::ranges::mismatch(sent, expected, [](const Message& m, const Message& n) { return m.like(n); });
        const auto [from, to, stream] = pair;
        if (a != sent.end() || b != expected.end())
          faults.add(fmt::format("group {}: rank {} sends rank {} {}, which expects {}, on stream {}",
                                 plan.groups[f].name, members[from], members[to], text(a, sent), text(b, expected),
                                 plan.stream(stream).name));
        else if (one_each) agreed.insert({talk.sent[0], talk.expected[0]});
      }
    }
}

}  // namespace hotbunk
