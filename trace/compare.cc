#include "trace/compare.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "base/check.h"
#include "graph/catalogue.h"
#include "trace/kept_steps.h"

namespace hotbunk {
namespace {

/// Steps whose rows must be the same: those that both traces keep. What either has let go is in its totals.
class CommonSteps {
 public:
  CommonSteps(const Trace& a, const Trace& b) {
    for (std::size_t side = 0; side < 2; ++side)
      for (const PhaseSpan& p : (side == 0 ? a : b).phases) {
        rows_[side].insert(p.step);
        latest_[side] = std::max(latest_[side], p.step);
      }
    kept_ = {KeptSteps::of(a.num_players()), KeptSteps::of(b.num_players())};
  }
  bool contains(std::int32_t step) const {
    return (kept_[0].keeps(step, latest_[0]) && kept_[1].keeps(step, latest_[1])) ||
           (rows_[0].contains(step) && rows_[1].contains(step));
  }

 private:
  std::array<KeptSteps, 2> kept_;
  std::array<std::set<std::int32_t>, 2> rows_;
  std::array<std::int32_t, 2> latest_{};
};

/// Collects the differences of one rank.
class Comparer {
 public:
  Comparer(const Plan& plan, Comparison& out) : plan_(plan), out_(out) {
    for (const Program& program : plan.programs)
      for (const Body& body : program.bodies)
        for (const Op& op : body.ops)
          if (is_routed(op)) {
            routing_.insert(op.group);
            if (op.has(Attr::tp)) shared_.insert(op.group);
            if (sends_copies(op)) {
              std::int64_t& most = most_copied_[op.group];
              most = std::max(most, own_tokens_rows(op).capacity_bytes());
            }
          }
  }

  void memory(Rank rank, const RankMemory& a, const RankMemory& b) {
    rank_ = rank;
    space("device", a.device, b.device);
    space("host", a.host, b.host);
  }

  /// common: of rows by step; null for totals.
  void traffic(Rank rank, const RankTraffic& a, const RankTraffic& b, const CommonSteps* common) {
    rank_ = rank;
    std::set<TrafficKey> keys;
    for (const auto* side : {&a, &b})
      for (const auto& row : *side)
        if (!common || common->contains(row.first.step)) keys.insert(row.first);
    for (const TrafficKey& key : keys) {
      step_ = common ? key.step : -1;
      phase_ = name_of_phase(key.phase);
      const auto find = [&](const RankTraffic& side) {
        const auto it = side.find(key);
        return it == side.end() ? TrafficCount{} : it->second;
      };
      const TrafficCount x = find(a), y = find(b);
      const std::string& group = plan_.groups[static_cast<std::size_t>(key.group)].name;
      const auto line = [&](const char* unit, std::int64_t va, std::int64_t vb) {
        same([&] { return fmt::format("{} over {}: {}", name_of(key.op), group, unit); }, va, vb);
      };
      line("calls", x.calls, y.calls);
      // Of rows that tensor-parallel ranks share, all ranks' together are known.
      if (routes(key) && shared_.contains(static_cast<GroupId>(key.group))) {
        auto& [in_a, in_b] = payloads_of_all_[{common != nullptr, key}];
        in_a += x.payload_bytes, in_b += y.payload_bytes;
      } else if (const auto most = most_copied_.find(static_cast<GroupId>(key.group));
                 routes(key) && most != most_copied_.end()) {
        copies(group, out_.a_source, x, most->second);
        copies(group, out_.b_source, y, most->second);
      } else {
        line("payload bytes", x.payload_bytes, y.payload_bytes);
      }
      line("padding bytes", x.padding_bytes, y.padding_bytes);
      // Which rows of experts stay where they are is the routers' affair.
      if (!routes(key)) line("wire bytes", x.wire_bytes, y.wire_bytes);
    }
  }

  /// Behind the last rank.
  void finish() {
    rank_ = -1;
    for (const auto& [key, payloads] : payloads_of_all_) {
      step_ = key.first ? key.second.step : -1;
      phase_ = name_of_phase(key.second.phase);
      const std::string& group = plan_.groups[static_cast<std::size_t>(key.second.group)].name;
      same([&] { return fmt::format("{} over {}: payload bytes of all ranks", name_of(key.second.op), group); },
           payloads.first, payloads.second);
    }
  }

 private:
  bool routes(const TrafficKey& key) const {
    return key.op == OpKind::all_to_all && routing_.contains(static_cast<GroupId>(key.group));
  }
  /// Of copies nobody knows how many go, but no exchange sends more than there is room for: check_copies says more of
  /// steps that have spans.
  void copies(const std::string& group, const std::string& side, const TrafficCount& sent, std::int64_t most) {
    ++out_.numbers_compared;
    if (const std::int64_t room = sent.calls * most; sent.payload_bytes > room)
      out_.differences.push_back(
          {rank_, step_, phase_,
           fmt::format("all_to_all over {}: payload bytes in {}, and those of as many copies as may go", group, side),
           sent.payload_bytes, room});
  }
  std::string name_of_phase(std::int16_t phase) const {
    return phase < 0 ? "" : plan_.phases[static_cast<std::size_t>(phase)].name;
  }

  template <class What>
  void same(What what, std::int64_t a, std::int64_t b) {
    ++out_.numbers_compared;
    if (a != b) out_.differences.push_back({rank_, step_, phase_, what(), a, b});
  }

  void categories(const char* where, const char* what, const CategoryBytes& a, const CategoryBytes& b) {
    for (int c = 0; c < num_categories; ++c) {
      const auto category = static_cast<Category>(c);
      if (category == Category::overhead) continue;  // measured or from a profile: outside P1
      same([&] { return fmt::format("{}: {} of {}", where, what, name_of(category)); }, a[static_cast<std::size_t>(c)],
           b[static_cast<std::size_t>(c)]);
    }
  }

  void space(const char* where, const SpaceMemory& a, const SpaceMemory& b) {
    step_ = -1;
    phase_ = "";
    const auto line = [&](const char* what, std::int64_t va, std::int64_t vb) {
      same([&] { return fmt::format("{}: {}", where, what); }, va, vb);
    };
    line("live peak", a.peak_bytes, b.peak_bytes);
    line("mapped peak", a.mapped_peak_bytes, b.mapped_peak_bytes);
    line("live at the end", a.end_live_bytes, b.end_live_bytes);
    line("mapped at the end", a.end_mapped_bytes, b.end_mapped_bytes);
    line("step of the peak", a.peak_step, b.peak_step);
    line("phase of the peak", a.peak_phase, b.peak_phase);
    categories(where, "share of the peak", a.at_peak, b.at_peak);
    categories(where, "live peak", a.category_peaks, b.category_peaks);
    std::set<std::int16_t> phases;
    for (const auto* side : {&a, &b})
      for (const auto& row : side->phase_peaks) phases.insert(row.first);
    for (const std::int16_t phase : phases) {
      phase_ = name_of_phase(phase);
      const auto find = [&](const SpaceMemory& side) {
        const auto it = side.phase_peaks.find(phase);
        return it == side.phase_peaks.end() ? SpaceMemory::PhasePeak{} : it->second;
      };
      const auto x = find(a), y = find(b);
      line("visited", a.phase_peaks.count(phase) ? 1 : 0, b.phase_peaks.count(phase) ? 1 : 0);
      line("live peak", x.peak_bytes, y.peak_bytes);
      line("mapped peak", x.mapped_peak_bytes, y.mapped_peak_bytes);
      categories(where, "share of the phase's peak", x.by_category, y.by_category);
    }
  }

  const Plan& plan_;
  Comparison& out_;
  std::set<GroupId> routing_;  // over which rows of experts go
  std::set<GroupId> shared_;   // of these, where tensor-parallel ranks send those of some experts each
  std::map<GroupId, std::int64_t> most_copied_;  // over which copies of tokens go: bytes of an exchange at most
  std::map<std::pair<bool, TrafficKey>, std::pair<std::int64_t, std::int64_t>>
      payloads_of_all_;  // by step?, of all ranks
  Rank rank_ = 0;
  std::int32_t step_ = -1;
  std::string phase_;
};

/// PhaseStays of all ranks in one phase of one step.
struct PhaseStay {
  std::int64_t start_ns = INT64_MAX, total_ns = 0, ranks = 0;
  /// Mean over ranks: ranks enter and leave at different moments, and stays add up to the run where extents overlap.
  double seconds() const {
    return ranks == 0 ? 0.0 : 1e-9 * static_cast<double>(total_ns) / static_cast<double>(ranks);
  }
};
using PhaseStays = std::map<std::pair<std::int32_t, std::int16_t>, PhaseStay>;  // by step and phase

PhaseStays stays_of(const Trace& trace) {
  PhaseStays out;
  for (const PhaseSpan& p : trace.phases) {
    PhaseStay& stay = out[{p.step, p.phase}];
    stay.start_ns = std::min(stay.start_ns, p.start_ns);
    stay.total_ns += p.end_ns - p.start_ns;
    ++stay.ranks;
  }
  return out;
}

/// A rank's seconds in each phase over all steps, mean over ranks; and how often it was there.
std::map<std::int16_t, std::pair<double, std::int64_t>> visits_of(const Trace& trace) {
  std::map<std::int16_t, std::pair<double, std::int64_t>> out;
  std::map<std::int16_t, double> ranks;
  for (const PhaseTotal& t : trace.phase_totals) {
    if (t.phase == PhaseTotal::iteration) continue;
    auto& [seconds, times] = out[t.phase];
    seconds += 1e-9 * static_cast<double>(t.stays.total_ns);
    times = std::max(times, t.stays.times);
    ranks[t.phase] += 1.0;
  }
  for (auto& [phase, total] : out) total.first /= ranks[phase];
  return out;
}

void compare_totals(const Plan& plan, const Trace& a, const Trace& b, Comparison& out) {
  const auto in_a = visits_of(a), in_b = visits_of(b);
  double a_s = 0.0, b_s = 0.0, wrong_s = 0.0;
  for (const auto& [phase, total] : in_b) {  // in the plan's order, which is that of time
    const auto other = in_a.find(phase);
    if (other == in_a.end() || other->second.second == 0 || total.second == 0) continue;
    const double per_visit = other->second.first / static_cast<double>(other->second.second);
    out.totals.push_back({plan.phases[static_cast<std::size_t>(phase)].name, total.second,
                          per_visit * static_cast<double>(total.second), total.first});
    const TimeTotal& sum = out.totals.back();
    a_s += sum.a_s, b_s += sum.b_s, wrong_s += std::abs(sum.a_s - sum.b_s);
  }
  for (const TimeTotal& sum : out.totals)
    if (sum.b_s >= 0.01 * b_s && sum.b_s > 0.0)
      out.max_error = std::max(out.max_error, std::abs(sum.a_s - sum.b_s) / sum.b_s);
  if (b_s > 0.0) out.mean_error = wrong_s / b_s, out.iteration_error = (a_s - b_s) / b_s;
}

void compare_times(const Plan& plan, const Trace& a, const Trace& b, Comparison& out) {
  const PhaseStays in_a = stays_of(a);
  const PhaseStays in_b = stays_of(b);
  std::vector<std::pair<std::int64_t, TimeRow>> rows;
  for (const auto& [key, stay] : in_b) {
    const auto other = in_a.find(key);
    if (other == in_a.end()) continue;
    TimeRow row{key.first, plan.phases[static_cast<std::size_t>(key.second)].name, other->second.seconds(),
                stay.seconds(), 0.0};
    if (row.b_s > 0.0) row.error = (row.a_s - row.b_s) / row.b_s;
    rows.emplace_back(stay.start_ns, std::move(row));
  }
  std::stable_sort(rows.begin(), rows.end(), [](const auto& x, const auto& y) { return x.first < y.first; });
  for (auto& [start, row] : rows) out.times.push_back(std::move(row));
}

/// A phase that only one side ran cannot go unnoticed, even when it moved no byte.
void compare_visits(const Plan& plan, const Trace& a, const Trace& b, const CommonSteps& common, Comparison& out) {
  const auto name = [&](std::int16_t phase) {
    return phase == PhaseTotal::iteration ? "" : plan.phases[static_cast<std::size_t>(phase)].name;
  };
  std::map<std::tuple<Rank, std::int32_t, std::int16_t>, std::array<std::int64_t, 2>> blocks;
  std::map<std::pair<Rank, std::int16_t>, std::array<PhaseTotal, 2>> totals;
  for (std::size_t side = 0; side < 2; ++side) {
    for (const PhaseSpan& p : (side == 0 ? a : b).phases)
      if (common.contains(p.step)) blocks[{p.rank, p.step, p.phase}][side] += p.blocks + 1;
    for (const PhaseTotal& t : (side == 0 ? a : b).phase_totals) totals[{t.rank, t.phase}][side] = t;
  }
  const auto same = [&](Rank rank, std::int32_t step, std::int16_t phase, const char* what, std::int64_t x,
                        std::int64_t y) {
    ++out.numbers_compared;
    if (x != y) out.differences.push_back({rank, step, name(phase), what, x, y});
  };
  for (const auto& [key, count] : blocks)
    same(std::get<0>(key), std::get<1>(key), std::get<2>(key), "blocks run (-1: phase not entered)", count[0] - 1,
         count[1] - 1);
  for (const auto& [key, both] : totals) {
    same(key.first, -1, key.second, "times entered", both[0].stays.times, both[1].stays.times);
    same(key.first, -1, key.second, "blocks run", both[0].blocks, both[1].blocks);
  }
}

/// Kinds of ops that work on rows of experts: a rank's router sends them where it likes, and nowhere else.
std::set<OpKind> kinds_on_routed_rows(const Plan& plan) {
  std::set<OpKind> out;
  for (const Program& program : plan.programs)
    for (const Body& body : program.bodies)
      for (const Op& op : body.ops)
        if (op.has(Attr::count)) out.insert(op.kind);
  return out;
}

/// How many rounds rows come in follows from the routers too: a simulation, in which experts are balanced, may have no
/// spans of the last ones, and what a round reads beside its rows is read so much less often.
bool plays_rounds(const Plan& plan) {
  for (const Program& program : plan.programs)
    for (const Body& body : program.bodies)
      for (const Op& op : body.ops)
        if (op.has(Attr::rounds)) return true;
  return false;
}

/// What ops on copies of tokens are called, which routers make as many of as they like: one for each rank that has some
/// of a token's experts.
std::set<std::string> names_on_copies(const Plan& plan) {
  std::set<ExtentId> copies;
  for (const Program& program : plan.programs)
    for (const Body& body : program.bodies)
      for (const Op& op : body.ops)
        if (sends_copies(op)) copies.insert({op.inputs[0].shape[0].extent, op.outputs[0].shape[0].extent});
  std::set<std::string> out;
  if (copies.empty()) return out;
  for (const Program& program : plan.programs)
    for (const auto& blocks : program.phases)
      for (const Block& block : blocks)
        each_op(program, block, [&](const BoundOp& op) {
          if (op->has(Attr::count) &&
              std::ranges::any_of(plan.counted_extents(*op), [&](ExtentId e) { return copies.contains(e); }))
            out.insert(op.name());
        });
  return out;
}

/// How many copies go is no number of the plan. It is counted twice, though: by the op that sorts them, whose count
/// spans have, and by the transport that sends them. On each side by itself these are the same.
void check_copies(const Plan& plan, const Trace& trace, Comparison& out) {
  using Key = std::tuple<Rank, std::int32_t, std::int16_t>;
  std::map<Key, std::pair<std::int64_t, std::int64_t>> bytes;
  std::set<std::int32_t> steps;
  for (const Span& s : trace.spans) {
    steps.insert(s.step);
    if (s.kind == OpKind::all_to_all) bytes[{s.rank, s.step, s.phase}].first += s.bytes;
  }
  for (std::size_t r = 0; r < trace.traffic.size(); ++r)
    for (const auto& [key, count] : trace.traffic[r])
      if (key.op == OpKind::all_to_all && steps.contains(key.step))
        bytes[{static_cast<Rank>(r), key.step, key.phase}].second += count.payload_bytes;
  for (const auto& [key, both] : bytes) {
    ++out.numbers_compared;
    const auto& [rank, step, phase] = key;
    if (both.first != both.second)
      out.differences.push_back(
          {rank, step, plan.phases[static_cast<std::size_t>(phase)].name,
           fmt::format("all_to_all in {}: payload of what the device counted, and what was sent", trace.source),
           both.first, both.second});
  }
}

/// Every op that both sides kept spans of: how often each kind ran in each phase and what it read and wrote. What that
/// is of rows which the device counts, ranks make up together: as many as are sent are received.
void compare_ops(const Plan& plan, const Trace& a, const Trace& b, Comparison& out) {
  constexpr std::size_t cut = std::size_t{1} << 20;  // recording stops there (sim/timeline.h): counts mean nothing then
  if (a.spans.size() >= cut || b.spans.size() >= cut) return;
  const std::set<std::string> copies = names_on_copies(plan);
  if (!copies.empty()) check_copies(plan, a, out), check_copies(plan, b, out);
  using Key = std::tuple<Rank, std::int32_t, std::int16_t, OpKind>;
  struct Sums {
    std::array<std::int64_t, 2> runs{}, bytes{};  // of either side
    bool of_copies = false;                       // some of them, whose bytes are not here
  };
  std::map<Key, Sums> ops;
  const std::set<OpKind> routed = kinds_on_routed_rows(plan);
  const bool rounds = plays_rounds(plan);
  constexpr Rank all_ranks = -1;
  std::array<std::set<std::int32_t>, 2> steps;
  for (std::size_t side = 0; side < 2; ++side)
    for (const Span& s : (side == 0 ? a : b).spans) {
      steps[side].insert(s.step);
      if (s.kind == OpKind::map || s.kind == OpKind::unmap) continue;  // the memory tables speak of them
      Sums& sums = ops[{s.rank, s.step, s.phase, s.kind}];
      ++sums.runs[side];
      if (copies.contains((side == 0 ? a : b).names[static_cast<std::size_t>(s.name)])) {
        sums.of_copies = true;
        continue;
      }
      if (!routed.contains(s.kind)) sums.bytes[side] += s.bytes;
      else ops[{all_ranks, s.step, s.phase, s.kind}].bytes[side] += s.bytes;
    }
  for (const auto& [key, sums] : ops) {
    const auto& [rank, step, phase, kind] = key;
    // The simulator keeps no span of what takes no time: a copy from nobody. Traffic has counted its calls.
    if (rank != all_ranks && !sums.of_copies && (sums.runs[0] == 0 || sums.runs[1] == 0) && sums.bytes[0] == 0 &&
        sums.bytes[1] == 0)
      continue;
    if (!steps[0].contains(step) || !steps[1].contains(step)) continue;
    const auto line = [&, rank = rank, step = step, phase = phase, kind = kind](const char* unit, const auto& values) {
      ++out.numbers_compared;
      if (values[0] == values[1]) return;
      out.differences.push_back({rank, step, plan.phases[static_cast<std::size_t>(phase)].name,
                                 fmt::format("{}: {}", name_of(kind), unit), values[0], values[1]});
    };
    if (rounds && routed.contains(kind)) continue;
    if (rank != all_ranks) line("ops run", sums.runs);
    if (rank == all_ranks || !routed.contains(kind)) line("bytes read and written", sums.bytes);
  }
}

/// The exchanges of rounds, by what a trace calls them.
struct RoundOfRows {
  GroupId group = -1;
  std::int64_t rounds = 0;
  bool first = false;
};
std::map<std::string, RoundOfRows> rounds_of(const Plan& plan) {
  std::map<std::string, RoundOfRows> out;
  if (!plays_rounds(plan)) return out;
  for (const Program& program : plan.programs)
    for (const auto& blocks : program.phases)
      for (const Block& block : blocks)
        each_op(program, block, [&](const BoundOp& op) {
          if (!op->has(Attr::rounds)) return;
          const Tensor& own = own_tokens_rows(*op);
          const Dim& came = (&own == &op->inputs[0] ? op->outputs[0] : op->inputs[0]).shape[0];
          out[op.name()] = {op->group, op->integer(Attr::rounds), came.begin == 0};
        });
  return out;
}

/// A round was played where some rank of its group had rows in it: one that all others' rows go to sends none itself.
void compare_rounds(const Plan& plan, const Trace& a, const Trace& b, Comparison& out) {
  const std::map<std::string, RoundOfRows> exchanges = rounds_of(plan);
  std::map<std::int16_t, RoundsRow> rows;
  std::array<std::set<std::int32_t>, 2> steps;
  for (std::size_t side = 0; side < 2; ++side)
    for (const Span& s : (side == 0 ? a : b).spans) steps[side].insert(s.step);
  for (std::size_t side = 0; side < 2; ++side) {
    const Trace& trace = side == 0 ? a : b;
    std::map<std::tuple<Rank, std::int32_t, std::int16_t, std::int32_t>, std::int64_t> times;  // a name, on a rank
    std::set<std::tuple<std::int32_t, std::int16_t, Rank, std::int32_t, std::int64_t>> played;
    for (const Span& s : trace.spans) {
      if (s.kind != OpKind::all_to_all || !steps[0].contains(s.step) || !steps[1].contains(s.step)) continue;
      const auto at = exchanges.find(trace.names[static_cast<std::size_t>(s.name)]);
      if (at == exchanges.end()) continue;
      const std::int64_t time = times[{s.rank, s.step, s.phase, s.name}]++;
      const std::vector<Rank>& group = plan.group_of(at->second.group, s.rank);
      if (s.bytes == 0 || !played.emplace(s.step, s.phase, group.front(), s.name, time).second) continue;
      RoundsRow& row = rows[s.phase];
      row.planned = at->second.rounds;
      ++(side == 0 ? row.a : row.b);
      if (side == 1 && at->second.first) ++row.exchanges;
    }
  }
  for (auto& [phase, row] : rows) {
    row.phase = plan.phases[static_cast<std::size_t>(phase)].name;
    out.rounds.push_back(std::move(row));
  }
}

}  // namespace

Comparison compare_traces(const Plan& plan, const Trace& a, const Trace& b) {
  const auto ranks = static_cast<std::size_t>(plan.num_ranks());
  for (const Trace* t : {&a, &b})
    HB_CHECK(t->memory.size() == ranks && t->traffic.size() == ranks && t->traffic_totals.size() == ranks,
             "a trace of {} ranks, plan of {}", t->memory.size(), ranks);
  Comparison out;
  out.a_source = a.source, out.b_source = b.source;
  const CommonSteps common(a, b);
  Comparer comparer(plan, out);
  for (std::size_t r = 0; r < ranks; ++r) {
    comparer.memory(static_cast<Rank>(r), a.memory[r], b.memory[r]);
    comparer.traffic(static_cast<Rank>(r), a.traffic_totals[r], b.traffic_totals[r], nullptr);
    comparer.traffic(static_cast<Rank>(r), a.traffic[r], b.traffic[r], &common);
  }
  comparer.finish();
  compare_visits(plan, a, b, common, out);
  compare_ops(plan, a, b, out);
  compare_rounds(plan, a, b, out);
  compare_times(plan, a, b, out);
  compare_totals(plan, a, b, out);
  out.equal = out.differences.empty();
  return out;
}

}  // namespace hotbunk
