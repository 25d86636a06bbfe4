#include "sim/rank_classes.h"

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <set>
#include <tuple>
#include <utility>

#include "base/check.h"
#include "base/numbers.h"
#include "graph/catalogue.h"
#include "sim/op_cost.h"
#include "trace/traffic_rules.h"

namespace hotbunk {
namespace {

/// As much of everything as there is room for: what differs between ranks shows there too.
constexpr Sizes largest() {
  constexpr std::int64_t most = std::int64_t{1} << 30;
  return {most, most, most};
}
/// Evaluations of moves by rank up to which it is worth while to look.
constexpr std::int64_t most_moves = std::int64_t{1} << 24;

using Signature = std::vector<std::int64_t>;
using Colours = std::vector<std::int32_t>;  // by rank

class Folder {
 public:
  Folder(const Plan& plan, const OpCost& cost, std::span<const std::int32_t> data,
         std::span<const std::int64_t> neighbours)
      : plan_(plan), cost_(cost), neighbours_(neighbours), colours_(static_cast<std::size_t>(plan.num_ranks())) {
    HB_CHECK(data.size() == colours_.size(), "data of {} ranks, {} ranks", data.size(), colours_.size());
    look_at_ops();
    Numbers<Signature> numbers;
    for (Rank r = 0; r < plan.num_ranks(); ++r)
      colours_[static_cast<std::size_t>(r)] =
          numbers({plan.program_of_rank[static_cast<std::size_t>(r)], data[static_cast<std::size_t>(r)],
                   cost.rank_class(r), plan.role_of(r)});
    num_colours_ = numbers.size();
  }

  /// False: too much would have to be looked at.
  bool split_by_moves() {
    if (evaluations() > most_moves) return false;
    if (moving_.empty()) return true;
    const std::vector<Places> places = all_places(plan_);
    // What an op moves depends on the rank's places in the families that its moves name; few sets of them are named.
    std::map<std::vector<GroupId>, std::vector<std::size_t>> by_families;
    for (std::size_t i = 0; i < moving_.size(); ++i) by_families[moving_[i].families].push_back(i);
    std::vector<Signature> of_rank(colours_.size());
    for (const auto& [families, ops] : by_families) {
      Numbers<Places> seats;
      Numbers<Signature> answers;
      std::vector<std::int64_t> of_seat;  // the number of what all of the ops move there
      for (Rank r = 0; r < plan_.num_ranks(); ++r) {
        const Places& mine = places[static_cast<std::size_t>(r)];
        Places seat{plan_.program_of_rank[static_cast<std::size_t>(r)]};
        for (const GroupId family : families) seat.push_back(mine[static_cast<std::size_t>(family)]);
        const auto number = static_cast<std::size_t>(seats(std::move(seat)));
        if (number == of_seat.size()) of_seat.push_back(answers(moved_by_all(r, ops, mine)));
        of_rank[static_cast<std::size_t>(r)].push_back(of_seat[number]);
      }
    }
    split([&](Rank r) { return of_rank[static_cast<std::size_t>(r)]; });
    return true;
  }

  /// Until nothing splits any more.
  void refine() {
    price_groups();
    for (std::int64_t before = 0; before != num_colours_;) {
      before = num_colours_;
      std::vector<Signature> of_rank(colours_.size());
      Numbers<Signature> neighbourhoods;
      for (std::size_t f = 0; f < plan_.groups.size(); ++f) {
        const bool by_place = asked_by_place_.contains(static_cast<GroupId>(f));
        for (std::size_t g = 0; g < plan_.groups[f].groups.size(); ++g) {
          const std::vector<Rank>& members = plan_.groups[f].groups[g];
          Signature met;
          for (const Rank r : members) met.push_back(colours_[static_cast<std::size_t>(r)]);
          if (!by_place) std::ranges::sort(met);
          met.push_back(group_prices_[f][g]);
          const std::int64_t number = neighbourhoods(std::move(met));
          for (std::size_t place = 0; place < members.size(); ++place) {
            Signature& mine = of_rank[static_cast<std::size_t>(members[place])];
            mine.insert(mine.end(), {static_cast<std::int64_t>(f), number});
            if (by_place) mine.push_back(static_cast<std::int64_t>(place));
            else send_by_place(static_cast<GroupId>(f), std::ssize(members), static_cast<std::int64_t>(place), mine);
          }
        }
      }
      for (const std::int64_t together : neighbours_)
        for (std::size_t begin = 0; begin < colours_.size(); begin += static_cast<std::size_t>(together)) {
          const std::size_t end = std::min(colours_.size(), begin + static_cast<std::size_t>(together));
          Signature met(colours_.begin() + static_cast<std::ptrdiff_t>(begin),
                        colours_.begin() + static_cast<std::ptrdiff_t>(end));
          std::ranges::sort(met);
          const std::int64_t number = neighbourhoods(std::move(met));
          for (std::size_t r = begin; r < end; ++r) of_rank[r].push_back(number);
        }
      split([&](Rank r) { return of_rank[static_cast<std::size_t>(r)]; });
    }
  }

  std::vector<Rank> representatives() const {
    std::map<std::int32_t, Rank> first;
    std::vector<Rank> out;
    for (Rank r = 0; r < plan_.num_ranks(); ++r)
      out.push_back(first.try_emplace(colours_[static_cast<std::size_t>(r)], r).first->second);
    return out;
  }

 private:
  template <class SignatureOf>
  void split(SignatureOf signature_of) {
    Numbers<std::pair<std::int32_t, Signature>> numbers;
    for (Rank r = 0; r < plan_.num_ranks(); ++r) {
      std::int32_t& mine = colours_[static_cast<std::size_t>(r)];
      mine = numbers({mine, signature_of(r)});
    }
    num_colours_ = numbers.size();
  }

  std::int64_t evaluations() const {
    std::vector<std::int64_t> ranks(plan_.programs.size());
    for (const std::int32_t p : plan_.program_of_rank) ++ranks[static_cast<std::size_t>(p)];
    std::int64_t out = 0;
    for (const Moving& m : moving_) out += ranks[static_cast<std::size_t>(m.program)];
    return out;
  }

  /// What those of the rank's program move. Of several that feed one place in memory, of which a rank has one (of the
  /// experts that share it its own), it does not matter which: they follow one another on a stream, and what they take
  /// adds up.
  Signature moved_by_all(Rank r, std::span<const std::size_t> ops, const Places& places) const {
    Signature out;
    std::map<std::int64_t, std::vector<Signature>> fed;  // by place
    for (const std::size_t i : ops) {
      if (moving_[i].program != plan_.program_of_rank[static_cast<std::size_t>(r)]) continue;
      Signature moved = moved_by(r, *moving_[i].op, places);
      if (moving_[i].fed < 0) out.insert(out.end(), moved.begin(), moved.end());
      else fed[moving_[i].fed].push_back(std::move(moved));
    }
    for (auto& [place, all] : fed) {
      std::ranges::sort(all);
      for (const Signature& moved : all) out.insert(out.end(), moved.begin(), moved.end());
    }
    return out;
  }

  Signature moved_by(Rank r, const Op& op, const Places& places) const {
    const Args args{.block = 0, .step = 0, .sizes = largest(), .payload = {}};
    Signature out = {cost_.nanoseconds(plan_, r, op, args), op_bytes(op, largest(), places)};
    if (is_communication(op.kind)) {
      const TrafficCount t = traffic_of(op, largest(), group_size(op.group, r), places);
      out.insert(out.end(), {t.calls, t.payload_bytes, t.padding_bytes, t.wire_bytes});
    }
    return out;
  }

  /// The families on which it depends what an op moves.
  static std::vector<GroupId> families_of(const Op& op) {
    std::set<GroupId> out;
    for (const Move& move : op.moves)
      for (const Parts* parts : {&move.from.parts, &move.to.parts})
        if (parts->who == Holds::mine || parts->who == Holds::peers) {
          out.insert(parts->family);
          if (parts->within.family >= 0) out.insert(parts->within.family);
        }
    if (is_communication(op.kind)) out.insert(op.group);
    return {out.begin(), out.end()};
  }

  std::int64_t group_size(GroupId family, Rank r) const { return std::ssize(plan_.group_of(family, r)); }

  void look_at_ops() {
    std::int64_t bodies = 0;
    Numbers<std::tuple<std::int64_t, BufferId, std::int64_t>> fed;  // a place in memory: body, buffer, first byte
    for (std::size_t p = 0; p < plan_.programs.size(); ++p)
      for (const Body& body : plan_.programs[p].bodies) {
        ++bodies;
        for (const Op& op : body.ops) {
          if (!op.moves.empty() || op.kind == OpKind::peer_copy) {
            const Tensor* const to = op.kind == OpKind::feed ? &op.outputs[0] : nullptr;
            moving_.push_back({static_cast<std::int32_t>(p), &op, families_of(op),
                               to ? std::int64_t{fed({bodies, to->buffer, to->offset_bytes})} : -1});
          } else if (is_communication(op.kind)) {
            meeting_[{op.group, static_cast<std::int32_t>(p)}].push_back(&op);
            if (is_pairwise(op.kind)) asked_by_place_.insert(op.group);
            if (op.kind == OpKind::broadcast || op.kind == OpKind::all_reduce) uneven_[op.group].push_back(&op);
          }
        }
      }
  }

  /// What the place in the group says about how much a rank sends: the root of a broadcast, the uneven parts of an
  /// all-reduce. Where actual sizes decide about the parts, the place itself.
  void send_by_place(GroupId family, std::int64_t ranks, std::int64_t place, Signature& out) const {
    const auto ops = uneven_.find(family);
    if (ops == uneven_.end()) return;
    for (const Op* op : ops->second) {
      std::int64_t fixed = 1;
      bool varies = false;
      if (op->is_priced()) continue;
      const Tensor& t = op->inputs.at(0);
      for (int d = 0; d < t.rank; ++d) {
        const Dim& dim = t.shape[static_cast<std::size_t>(d)];
        if (dim.extent == fixed_extent) fixed *= dim.size;
        else varies = true;
      }
      if (op->kind == OpKind::all_reduce && fixed % ranks == 0) continue;
      const bool by_size = op->kind == OpKind::all_reduce && varies;
      out.push_back(by_size ? place : wire_bytes(*op, communication_bytes(*op, largest()), ranks, place));
    }
  }

  /// What is paid in a group, for what its members' programs do there, is known of any of its members.
  void price_groups() {
    group_prices_.resize(plan_.groups.size());
    Numbers<Signature> numbers;
    for (std::size_t f = 0; f < plan_.groups.size(); ++f)
      for (const std::vector<Rank>& members : plan_.groups[f].groups) {
        Signature prices{std::ssize(members)};
        std::set<std::int32_t> programs;
        for (const Rank r : members) programs.insert(plan_.program_of_rank[static_cast<std::size_t>(r)]);
        for (const std::int32_t program : programs)
          if (const auto ops = meeting_.find({static_cast<GroupId>(f), program}); ops != meeting_.end())
            for (const Op* op : ops->second)
              prices.push_back(cost_.nanoseconds(plan_, members.front(), *op,
                                                 {.block = 0, .step = 0, .sizes = largest(), .payload = {}}));
        group_prices_[f].push_back(numbers(std::move(prices)));
      }
  }

  const Plan& plan_;
  const OpCost& cost_;
  const std::span<const std::int64_t> neighbours_;
  Colours colours_;
  std::int64_t num_colours_ = 0;
  struct Moving {
    std::int32_t program;
    const Op* op;
    std::vector<GroupId> families;
    std::int64_t fed = -1;  // of a feed: a number for the place in memory that it feeds
  };
  std::vector<Moving> moving_;  // what they do depends on where the rank stands
  std::map<std::pair<GroupId, std::int32_t>, std::vector<const Op*>> meeting_;  // by family and program
  std::map<GroupId, std::vector<const Op*>> uneven_;  // of those, who may send more or less by their place
  std::set<GroupId> asked_by_place_;
  std::vector<std::vector<std::int64_t>> group_prices_;  // [family][group]: a number for equal prices
};

}  // namespace

RankClasses::RankClasses(std::vector<Rank> representative) : representative_(std::move(representative)) {
  for (Rank r = 0; r < num_ranks(); ++r)
    if (plays(r)) players_.push_back(r);
}

RankClasses RankClasses::unfolded(Rank num_ranks) {
  std::vector<Rank> each(static_cast<std::size_t>(num_ranks));
  std::iota(each.begin(), each.end(), 0);
  return RankClasses(std::move(each));
}

RankClasses RankClasses::fold(const Plan& plan, const OpCost& cost, std::span<const std::int32_t> data,
                              std::span<const std::int64_t> neighbours) {
  Folder folder(plan, cost, data, neighbours);
  if (!folder.split_by_moves()) return unfolded(plan.num_ranks());
  folder.refine();
  return RankClasses(folder.representatives());
}

}  // namespace hotbunk
