// Whether ranks that send to one another ever come to an end. Each block that sends or receives is walked on all ranks
// at once, without time and without data: a stream stands at what it waits for until that has come. A send waits for
// its recv, as if nothing were buffered in between: what only a buffer saves is found as well.
//
// A block is walked by itself, because it ends for all its ranks or for none: streams are in order, and what is sent in
// a block is received in it (check_pairs).
//
// The same walk says in which order ranks may launch what they meet each other by (program_order.h).
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <tuple>

#include "graph/catalogue.h"
#include "graph/program_order.h"
#include "graph/verify_parts.h"

namespace hotbunk {
namespace {

/// What a stream waits for: an op that communicates, the record of an event, or the place of that record itself.
struct Stop {
  BoundOp op;                // none: an event
  bool records = false;      // or waits
  std::int32_t ticket = -1;  // of the record, the block's first is 0
};
/// A program's part of the blocks of one name: what its streams come to, in order, and how many events are recorded.
struct StreamStops {
  std::map<StreamId, std::vector<Stop>> streams;
  std::int32_t num_tickets = 0;
};

void append(StreamStops& out, const Program& program, const Block& block) {
  std::map<EventId, std::int32_t> last;
  each_step(
      program, block,
      [&](const BoundOp& op) {
        if (meets_others(*op)) out.streams[op->stream].push_back({op});
      },
      [&](const Mark& m) {
        if (m.kind == OpKind::record) last[m.event] = out.num_tickets++;
        if (const auto at = last.find(m.event); at != last.end())  // else: of a block that is over
          out.streams[m.stream].push_back({.op = {}, .records = m.kind == OpKind::record, .ticket = at->second});
      });
}

/// Each rank's group of each family. Plan::group_of looks through them all.
class Memberships {
 public:
  explicit Memberships(const Plan& plan) : groups_(plan.groups.size()) {
    for (std::size_t f = 0; f < plan.groups.size(); ++f) {
      groups_[f].assign(static_cast<std::size_t>(plan.num_ranks()), &none_);
      for (const std::vector<Rank>& members : plan.groups[f].groups)
        for (const Rank r : members)
          if (groups_[f][static_cast<std::size_t>(r)] == &none_) groups_[f][static_cast<std::size_t>(r)] = &members;
    }
  }
  Memberships(const Memberships&) = delete;
  Memberships& operator=(const Memberships&) = delete;
  const std::vector<Rank>& of(GroupId family, Rank r) const {
    return *groups_[static_cast<std::size_t>(family)][static_cast<std::size_t>(r)];
  }

 private:
  const std::vector<Rank> none_;
  std::vector<std::vector<const std::vector<Rank>*>> groups_;  // [family][rank]
};

class Walk {
 public:
  /// Called with each op that has met whom it meets, of all ranks in one order.
  using Passed = std::function<void(Rank, const BoundOp&)>;
  /// The part of each rank; none: it is left out, with all whom it meets.
  Walk(const Plan& plan, const Memberships& memberships, const std::vector<const StreamStops*>& parts,
       Passed passed = {})
      : plan_(plan), memberships_(memberships), passed_(std::move(passed)) {
    const StreamStops nothing;
    for (Rank r = 0; r < plan.num_ranks(); ++r) {
      const StreamStops& part = parts[static_cast<std::size_t>(r)] ? *parts[static_cast<std::size_t>(r)] : nothing;
      fired_.emplace_back(static_cast<std::size_t>(part.num_tickets));
      first_.push_back(heads_.size());
      for (const auto& [stream, stops] : part.streams) heads_.push_back({r, stream, &stops});
    }
    first_.push_back(heads_.size());
  }

  /// "" when it comes to its end; else who waits for whom.
  std::string run() {
    for (std::size_t q = 0; q < heads_.size(); ++q) ready_.push_back(q);
    while (!ready_.empty()) {
      const std::size_t q = ready_.front();
      ready_.pop_front();
      step(q);
    }
    const auto stands = std::ranges::find_if(heads_, [](const Head& head) { return !head.over(); });
    return stands == heads_.end() ? "" : describe(static_cast<std::size_t>(stands - heads_.begin()));
  }

 private:
  /// A stream of a rank, and how far it has come.
  struct Head {
    Rank rank;
    StreamId stream;
    const std::vector<Stop>* stops;
    std::size_t at = 0;
    bool waits = false;  // has said what for
    int halves = 0;      // of a transfer: that have met nobody yet
    bool over() const { return at == stops->size(); }
    const Stop& stop() const { return (*stops)[at]; }
  };
  using Pair = std::tuple<GroupId, StreamId, Rank, Rank>;  // from, to
  struct Postbox {
    std::deque<std::size_t> senders, receivers;
  };
  struct Transfer {
    std::optional<Pair> out, in;
  };

  void next(std::size_t q) {
    if (passed_ && heads_[q].stop().op.op != nullptr) passed_(heads_[q].rank, heads_[q].stop().op);
    ++heads_[q].at, heads_[q].waits = false;
    ready_.push_back(q);
  }

  void step(std::size_t q) {
    Head& head = heads_[q];
    if (head.over() || head.waits) return;
    const Stop& stop = head.stop();
    const auto rank = static_cast<std::size_t>(head.rank);
    if (stop.op.op != nullptr) {
      head.waits = true;
      return is_pairwise(stop.op->kind) ? post(q) : arrive(q);
    }
    const auto ticket = static_cast<std::size_t>(stop.ticket);
    if (stop.records) {
      fired_[rank][ticket] = true;
      for (std::size_t other = first_[rank]; other < first_[rank + 1]; ++other) ready_.push_back(other);
    }
    if (fired_[rank][ticket]) next(q);
  }

  const std::vector<Rank>& members_of(const Head& head) const {
    return memberships_.of(head.stop().op->group, head.rank);
  }

  void arrive(std::size_t q) {
    const Head& head = heads_[q];
    const std::vector<Rank>& members = members_of(head);
    if (members.empty()) return next(q);
    auto& here = meetings_[{head.stop().op->group, members.front(), head.stop().op->stream}];
    here.push_back(q);
    if (here.size() < members.size()) return;
    for (const std::size_t each : std::exchange(here, {})) next(each);
  }

  Transfer transfer_of(const Head& head) const {
    const Op& op = *head.stop().op.op;
    const std::vector<Rank>& members = members_of(head);
    Transfer out;
    if (members.empty()) return out;
    const auto place = std::ranges::find(members, head.rank) - members.begin();
    const Partners at = partners_of(op, std::ssize(members), place);
    const auto rank = [&](std::int64_t peer) { return members[static_cast<std::size_t>(peer)]; };
    if (at.to >= 0) out.out = {op.group, op.stream, head.rank, rank(at.to)};
    if (at.from >= 0) out.in = {op.group, op.stream, rank(at.from), head.rank};
    return out;
  }

  void post(std::size_t q) {
    const Transfer transfer = transfer_of(heads_[q]);
    heads_[q].halves = transfer.out.has_value() + transfer.in.has_value();
    if (heads_[q].halves == 0) return next(q);
    if (transfer.out) boxes_[*transfer.out].senders.push_back(q);
    if (transfer.in) boxes_[*transfer.in].receivers.push_back(q);
    for (const auto& half : {transfer.out, transfer.in})
      if (half) match(boxes_[*half]);
  }

  void match(Postbox& box) {
    if (box.senders.empty() || box.receivers.empty()) return;
    for (auto* side : {&box.senders, &box.receivers}) {
      const std::size_t met = side->front();
      side->pop_front();
      if (--heads_[met].halves == 0) next(met);
    }
  }

  /// Whose stream the one at q waits for.
  std::pair<Rank, StreamId> awaited(std::size_t q) const {
    const Head& head = heads_[q];
    const Stop& stop = head.stop();
    if (stop.op.op == nullptr) {
      const auto rank = static_cast<std::size_t>(head.rank);
      for (std::size_t other = first_[rank]; other < first_[rank + 1]; ++other)
        for (const Stop& s : *heads_[other].stops)
          if (s.records && s.ticket == stop.ticket) return {head.rank, heads_[other].stream};
    } else if (is_pairwise(stop.op->kind)) {
      const Transfer transfer = transfer_of(head);
      const bool out = transfer.out && std::ranges::count(boxes_.at(*transfer.out).senders, q) > 0;
      return {out ? std::get<3>(*transfer.out) : std::get<2>(*transfer.in), head.stream};
    } else {
      const std::vector<Rank>& members = members_of(head);
      const auto& here = meetings_.at({stop.op->group, members.front(), stop.op->stream});
      for (const Rank member : members)
        if (std::ranges::none_of(here, [&](std::size_t other) { return heads_[other].rank == member; }))
          return {member, head.stream};
    }
    return {head.rank, head.stream};
  }

  /// From one that stands to whom it waits for, and on: into a ring, or to one that has nothing left to do.
  std::string describe(std::size_t q) const {
    std::vector<std::size_t> path;
    std::vector<std::string> texts;
    for (;;) {
      if (const auto seen = std::ranges::find(path, q); seen != path.end()) {
        texts.erase(texts.begin(), texts.begin() + (seen - path.begin()));
        return fmt::format("wait for one another for ever: {}", fmt::join(texts, "; "));
      }
      const Stop& stop = heads_[q].stop();
      const auto [rank, stream] = awaited(q);
      path.push_back(q);
      texts.push_back(fmt::format(
          "rank {} stream {}, {}, for rank {} stream {}", heads_[q].rank, plan_.stream(heads_[q].stream).name,
          stop.op.op == nullptr ? "an event" : fmt::format("{} '{}'", name_of(stop.op->kind), stop.op.name()), rank,
          plan_.stream(stream).name));
      const auto r = static_cast<std::size_t>(rank);
      for (q = first_[r]; q < first_[r + 1] && heads_[q].stream != stream;) ++q;
      if (q == first_[r + 1] || heads_[q].over())
        return fmt::format("wait for what never comes: {}", fmt::join(texts, "; "));
    }
  }

  const Plan& plan_;
  const Memberships& memberships_;
  const Passed passed_;
  std::vector<Head> heads_;
  std::vector<std::size_t> first_;        // of each rank's heads; one more at the end
  std::vector<std::vector<bool>> fired_;  // [rank][ticket]
  std::deque<std::size_t> ready_;
  std::map<std::tuple<GroupId, Rank, StreamId>, std::vector<std::size_t>> meetings_;  // of a group, by its first member
  std::map<Pair, Postbox> boxes_;
};

bool sends_or_receives(const Program& program) {
  return std::ranges::any_of(program.bodies,
                             [](const Body& b) { return std::ranges::any_of(b.ops, is_pairwise, &Op::kind); });
}

/// Of ranks that meet one another over some families, and nobody else, those of the first of several that are alike: as
/// many ranks of the same programs, in the same places of groups that lie in the same way among them.
std::vector<bool> unlike(const Plan& plan, const Memberships& memberships, const std::set<GroupId>& families) {
  const auto ranks = static_cast<std::size_t>(plan.num_ranks());
  std::vector<std::size_t> first(ranks);  // whoever they meet, the lowest of them
  std::iota(first.begin(), first.end(), std::size_t{0});
  const auto root = [&](std::size_t r) {
    while (first[r] != r) r = first[r] = first[first[r]];
    return r;
  };
  for (const GroupId f : families)
    for (const std::vector<Rank>& members : plan.groups[static_cast<std::size_t>(f)].groups)
      for (const Rank r : members) {
        const std::size_t a = root(static_cast<std::size_t>(r)), b = root(static_cast<std::size_t>(members.front()));
        first[std::max(a, b)] = std::min(a, b);
      }
  std::map<std::size_t, std::vector<Rank>> parties;  // by the lowest
  for (std::size_t r = 0; r < ranks; ++r) parties[root(r)].push_back(static_cast<Rank>(r));
  std::set<std::vector<std::int64_t>> seen;
  std::vector<bool> out(ranks, false);
  for (const auto& [lowest, party] : parties) {
    std::vector<std::int64_t> looks;
    for (const Rank r : party) {
      looks.push_back(plan.program_of_rank[static_cast<std::size_t>(r)]);
      for (const GroupId f : families) {
        const std::vector<Rank>& members = memberships.of(f, r);
        looks.push_back(std::ssize(members));
        if (members.empty()) continue;
        looks.push_back(std::ranges::find(members, r) - members.begin());
        looks.push_back(std::ranges::lower_bound(party, members.front()) - party.begin());
      }
    }
    if (!seen.insert(std::move(looks)).second) continue;
    for (const Rank r : party) out[static_cast<std::size_t>(r)] = true;
  }
  return out;
}

}  // namespace

void check_deadlock(const Plan& plan, Faults& faults) {
  if (std::ranges::none_of(plan.programs, sends_or_receives)) return;
  const Memberships memberships(plan);
  std::map<std::set<GroupId>, std::vector<bool>> looked_at;
  for (std::size_t p = 0; p < plan.phases.size(); ++p) {
    std::map<std::string_view, std::vector<StreamStops>> blocks;  // by name, of each program
    std::set<std::string_view> talk;
    for (std::size_t i = 0; i < plan.programs.size(); ++i)
      for (const Block& block : plan.programs[i].phases[p]) {
        auto& parts = blocks[block.name];
        parts.resize(plan.programs.size());
        append(parts[i], plan.programs[i], block);
        for (const auto& [stream, stops] : parts[i].streams)
          for (const Stop& stop : stops)
            if (stop.op.op != nullptr && is_pairwise(stop.op->kind)) talk.insert(block.name);
      }
    for (const std::string_view name : talk) {
      const std::vector<StreamStops>& parts = blocks.at(name);
      std::set<GroupId> families;
      for (const StreamStops& part : parts)
        for (const auto& [stream, stops] : part.streams)
          for (const Stop& stop : stops)
            if (stop.op.op != nullptr) families.insert(stop.op->group);
      auto [walked, is_new] = looked_at.try_emplace(families);
      if (is_new) walked->second = unlike(plan, memberships, families);
      std::vector<const StreamStops*> of_rank;
      for (std::size_t r = 0; r < plan.program_of_rank.size(); ++r)
        of_rank.push_back(walked->second[r] ? &parts[static_cast<std::size_t>(plan.program_of_rank[r])] : nullptr);
      if (const std::string bad = Walk(plan, memberships, of_rank).run(); !bad.empty())
        faults.add(fmt::format("phase {}, block {}: ranks {}", plan.phases[p].name, name, bad));
    }
  }
}

bool meets_others(const Op& op) { return is_communication(op.kind) && op.kind != OpKind::peer_copy && op.group >= 0; }

namespace {

/// Meetings of a rank's part of the blocks of one name, block by block.
using Meetings = std::vector<std::vector<BoundOp>>;

Meetings meetings_of(const Program& program, std::size_t phase, std::string_view name) {
  Meetings out;
  for (const Block& block : program.phases[phase]) {
    if (block.name != name) continue;
    out.emplace_back();
    each_op(program, block, [&](const BoundOp& op) {
      if (meets_others(*op)) out.back().push_back(op);
    });
  }
  return out;
}

/// When the ops of one rank were passed, the first is 0. An op is known by its call and itself.
using Passes = std::map<std::pair<const Call*, const Op*>, std::int32_t>;

std::int32_t pass_of(const Passes& passes, const BoundOp& op) { return passes.at({op.call, op.op}); }

/// Of one rank, one after another: block by block, and in a block in program order, or as they were passed.
StreamStops one_stream(Meetings blocks, const Passes* passes) {
  StreamStops out;
  for (std::vector<BoundOp>& block : blocks) {
    if (passes) std::ranges::sort(block, {}, [&](const BoundOp& op) { return pass_of(*passes, op); });
    for (const BoundOp& op : block) out.streams[lead_stream].push_back({op});
  }
  return out;
}

/// The blocks of one name in a phase, on all ranks.
class NamedBlocks {
 public:
  NamedBlocks(const Plan& plan, const Memberships& memberships, std::size_t phase, std::string_view name)
      : plan_(plan), memberships_(memberships) {
    for (const Program& program : plan.programs) {
      meetings_.push_back(meetings_of(program, phase, name));
      streams_.emplace_back();
      for (const Block& block : program.phases[phase])
        if (block.name == name) append(streams_.back(), program, block);
    }
  }

  bool ends_in_program_order() const {
    std::vector<StreamStops> parts;
    for (const Meetings& m : meetings_) parts.push_back(one_stream(m, nullptr));
    return ends([&](std::size_t r) { return &parts[program(r)]; });
  }

  /// In which order a walk of their streams passes each rank's ops; none: ranks that did so one after another would not
  /// come to an end.
  std::optional<std::vector<Passes>> passed() const {
    std::vector<Passes> out(ranks());
    const auto note = [&](Rank r, const BoundOp& op) {
      Passes& passes = out[static_cast<std::size_t>(r)];
      passes.emplace(std::pair{op.call, op.op}, static_cast<std::int32_t>(passes.size()));
    };
    if (!ends([&](std::size_t r) { return &streams_[program(r)]; }, note)) return std::nullopt;
    std::vector<StreamStops> parts;
    for (std::size_t r = 0; r < ranks(); ++r) parts.push_back(one_stream(meetings_[program(r)], &out[r]));
    if (!ends([&](std::size_t r) { return &parts[r]; })) return std::nullopt;
    return out;
  }

  const Meetings& meetings(Rank r) const { return meetings_[program(static_cast<std::size_t>(r))]; }

 private:
  std::size_t ranks() const { return plan_.program_of_rank.size(); }
  std::size_t program(std::size_t rank) const { return static_cast<std::size_t>(plan_.program_of_rank[rank]); }
  template <class Part>
  bool ends(Part&& part, Walk::Passed passed = {}) const {
    std::vector<const StreamStops*> of_rank;
    for (std::size_t r = 0; r < ranks(); ++r) of_rank.push_back(part(r));
    return Walk(plan_, memberships_, of_rank, std::move(passed)).run().empty();
  }

  const Plan& plan_;
  const Memberships& memberships_;
  std::vector<Meetings> meetings_;    // by program
  std::vector<StreamStops> streams_;  // likewise
};

}  // namespace

std::optional<LaunchPlaces> launch_places(const Plan& plan, Rank rank) {
  const Memberships memberships(plan);
  const Program& own = plan.program(rank);
  LaunchPlaces out(plan.phases.size());
  for (std::size_t p = 0; p < plan.phases.size(); ++p) {
    out[p].resize(own.phases[p].size());
    std::set<std::string_view> names;
    for (const Program& program : plan.programs)
      for (const Block& block : program.phases[p]) names.insert(block.name);
    for (const std::string_view name : names) {
      const NamedBlocks blocks(plan, memberships, p, name);
      std::optional<std::vector<Passes>> passes;
      if (!blocks.ends_in_program_order() && !(passes = blocks.passed())) return std::nullopt;
      auto meetings = blocks.meetings(rank).begin();
      for (std::size_t b = 0; b < own.phases[p].size(); ++b) {
        if (own.phases[p][b].name != name) continue;
        const std::vector<BoundOp>& ops = *meetings++;
        for (std::size_t i = 0; i < ops.size(); ++i) {
          const auto before = [&](const BoundOp& other) {
            const Passes& mine = (*passes)[static_cast<std::size_t>(rank)];
            return pass_of(mine, other) < pass_of(mine, ops[i]);
          };
          out[p][b].push_back(static_cast<std::int32_t>(passes ? std::ranges::count_if(ops, before) : i));
        }
      }
    }
  }
  return out;
}

}  // namespace hotbunk
