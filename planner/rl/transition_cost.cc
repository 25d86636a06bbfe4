#include "planner/rl/transition_cost.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>

namespace hotbunk {
namespace {

using enum TransitionStep;

/// Walks the order; visit(step, state before, state after, after the rollout).
template <class Visit>
void walk(const TransitionOrder& order, Visit visit) {
  OnDevice state = start_of(order);
  for (TransitionStep s : order) {
    const OnDevice before = state;
    state.take(s);
    visit(s, before, state);
  }
}

/// A moment as a set of parts (moments and reference are one: it is there as long as either is); a larger set is never
/// smaller in bytes.
enum Part : std::uint8_t { params = 1, optimizer = 2, weights = 4, kv = 8, staging = 16, host_staging = 32 };
std::uint8_t parts_of(const OnDevice& d) {
  return static_cast<std::uint8_t>((d.params ? params : 0) | (d.optimizer() ? optimizer : 0) |
                                   (d.weights ? weights : 0) | (d.kv ? kv : 0));
}

struct Footprint {
  std::vector<std::uint8_t> moments;  // on the device
  std::vector<std::uint8_t> host;     // asleep
  std::uint8_t during_rollout = 0;    // on the device
  int params_down = 0, params_up = 0, optimizer_down = 0, optimizer_up = 0, host_sync = 0;
  auto operator<=>(const Footprint&) const = default;
};

/// Only the sets that no other contains, sorted: equal footprints are then equal lists.
void reduce(std::vector<std::uint8_t>& sets) {
  std::sort(sets.begin(), sets.end());
  sets.erase(std::unique(sets.begin(), sets.end()), sets.end());
  const std::vector<std::uint8_t> all = sets;
  std::erase_if(sets, [&](std::uint8_t m) {
    return std::any_of(all.begin(), all.end(), [&](std::uint8_t other) { return other != m && (m & other) == m; });
  });
}

Footprint footprint(const TransitionOrder& order, bool keeps_weights) {
  Footprint f;
  walk(order, [&](TransitionStep s, const OnDevice& a, const OnDevice& b) {
    auto moment = static_cast<std::uint8_t>(parts_of(a) | parts_of(b));
    if (s == sync) moment |= a.params ? staging : staging | host_staging;
    if (s == rollout) f.during_rollout = moment;
    f.moments.push_back(moment);
    f.host.push_back(static_cast<std::uint8_t>((a.params && b.params ? 0 : params) |
                                               (a.optimizer() && b.optimizer() ? 0 : optimizer) |
                                               (keeps_weights && !(a.weights && b.weights) ? weights : 0)));
    f.params_down += a.params && !b.params ? 1 : 0;
    f.params_up += !a.params && b.params ? 1 : 0;
    f.optimizer_down += a.optimizer() && !b.optimizer() ? 1 : 0;
    f.optimizer_up += !a.optimizer() && b.optimizer() ? 1 : 0;
    f.host_sync += s == sync && !a.params ? 1 : 0;
  });
  reduce(f.moments);
  reduce(f.host);
  return f;
}

bool covered(const std::vector<std::uint8_t>& a, const std::vector<std::uint8_t>& b) {
  return std::all_of(a.begin(), a.end(), [&](std::uint8_t m) {
    return std::any_of(b.begin(), b.end(), [&](std::uint8_t other) { return (m & other) == m; });
  });
}

/// Never worse in any moment or copy.
bool no_worse(const Footprint& a, const Footprint& b) {
  return covered(a.moments, b.moments) && covered(a.host, b.host) &&
         (a.during_rollout & b.during_rollout) == a.during_rollout && a.params_down <= b.params_down &&
         a.params_up <= b.params_up && a.optimizer_down <= b.optimizer_down && a.optimizer_up <= b.optimizer_up &&
         a.host_sync <= b.host_sync;
}

ShiftMoment moment_of(TransitionStep s, const OnDevice& a, const OnDevice& b, const ShiftBytes& z) {
  ShiftMoment m;
  if (a.params || b.params) m.params = z.params;
  if (a.params || b.params || s == sync) m.communicators = z.communicators;
  if (a.optimizer() || b.optimizer()) m.optimizer = z.optimizer;
  if (a.weights || b.weights) m.weights = z.weights;
  if (a.kv || b.kv) m.kv = z.kv, m.graphs = z.graphs;
  if (s == sync) m.staging = z.staging + (a.params ? 0.0 : z.host_staging);
  return m;
}

}  // namespace

ShiftMoment fullest_moment(const TransitionOrder& order, const ShiftBytes& z, bool after_rollout) {
  ShiftMoment fullest;
  walk(order, [&](TransitionStep s, const OnDevice& a, const OnDevice& b) {
    if (s == rollout || a.rolled_out != after_rollout) return;
    if (const ShiftMoment m = moment_of(s, a, b, z); m.total() > fullest.total()) fullest = m, fullest.at = s;
  });
  return fullest;
}

ShiftPrice price_shift(const TransitionOrder& order, const ShiftBytes& z) {
  ShiftPrice out;
  const auto on_host = [&](bool p, bool o, bool w) {
    return (p ? z.params : 0.0) + (o ? z.optimizer : 0.0) + (w ? z.weights : 0.0);
  };
  const auto on_device = [&](bool p, bool o, bool w, bool k) {
    return (p ? z.with_params() : 0.0) + (o ? z.optimizer : 0.0) + (w ? z.weights : 0.0) + (k ? z.with_kv() : 0.0);
  };
  walk(order, [&](TransitionStep s, const OnDevice& a, const OnDevice& b) {
    const double moment = moment_of(s, a, b, z).total();
    if (s == sync) out.sync_from_host = !a.params;
    if (s == rollout) out.rollout_rest = on_device(a.params, a.optimizer(), false, false);
    else
      (a.rolled_out ? out.wake_bytes : out.sync_bytes) =
          std::max(a.rolled_out ? out.wake_bytes : out.sync_bytes, moment);
    const bool kept = z.keeps_weights;
    out.asleep = std::max(out.asleep, on_host(!a.params || !b.params, !a.optimizer() || !b.optimizer(),
                                              kept && !(a.weights && b.weights)));
    const bool p_down = a.params && !b.params, o_down = a.optimizer() && !b.optimizer(),
               w_down = a.weights && !b.weights;
    const bool p_up = !a.params && b.params, o_up = !a.optimizer() && b.optimizer(), w_up = !a.weights && b.weights;
    out.down += on_host(p_down, o_down, kept && w_down);
    out.up += on_host(p_up, o_up, kept && w_up);
    out.unmapped += on_device(p_down, o_down, w_down, a.kv && !b.kv);
    out.mapped += on_device(p_up, o_up, w_up, !a.kv && b.kv);
  });
  const OnDevice start = start_of(order);
  out.train_rest = on_device(false, false, start.weights, start.kv);
  return out;
}

void ShiftShape::Sets::add_uncontained(std::uint8_t set) {
  std::uint8_t kept = 0;
  for (std::uint8_t other : *this) {
    if ((other & set) == set) return;  // none was dropped yet: what `set` contains, `other` does
    if ((other & set) != other) sets_[kept++] = other;
  }
  sets_[kept++] = set;
  count_ = kept;
}

ShiftShape::ShiftShape(const TransitionOrder& order) {
  const auto add_move = [](Sets& moves, std::uint8_t parts) {
    if (parts != 0) moves.add(parts);
  };
  walk(order, [&](TransitionStep s, const OnDevice& a, const OnDevice& b) {
    const std::uint8_t before = parts_of(a), after = parts_of(b);
    auto moment = static_cast<std::uint8_t>(before | after);
    if (s == sync) {
      moment |= a.params ? staging : staging | host_staging;
      sync_from_host_ = !a.params;
    }
    if (s == rollout) rollout_rest_ = before & (params | optimizer);
    else (a.rolled_out ? to_wake_ : to_sync_).add_uncontained(moment);
    constexpr std::uint8_t sleeps = params | optimizer | weights;
    asleep_.add_uncontained(sleeps & ~(before & after));
    const auto left = static_cast<std::uint8_t>(before & ~after), came = static_cast<std::uint8_t>(after & ~before);
    add_move(down_, left & sleeps), add_move(unmapped_, left);
    add_move(up_, came & sleeps), add_move(mapped_, came);
  });
  train_rest_ = parts_of(start_of(order)) & (weights | kv);
  for (const WorkPlan plan : {WorkPlan::lowered, WorkPlan::priced})
    levels_[static_cast<std::size_t>(plan)] = Levels(order, plan);
}

ShiftShape::Levels::Levels(const TransitionOrder& order, WorkPlan plan) {
  bool rolled_out = false, wakes = false;
  // What training works in may want a phase of its own.
  const auto train = [&] {
    if (plan == WorkPlan::priced && rolled_out && !wakes) each[count++] = {.of = &WorkMoves::wake}, wakes = true;
    return count > 0 ? &each[count - 1] : nullptr;
  };
  for (const TransitionStep s : order) {
    if (s == rollout) {
      if (count > 0) each[count - 1].rollout = true;
      rolled_out = true;
    } else if (s == reference || s == old_logprobs) {
      if (Level* const l = train()) (s == reference ? l->reference : l->old_logprobs) = true;
    } else {
      const bool sleeps = is_sleep(s);
      each[count++] = {.of = s == sync ? &WorkMoves::sync
                             : sleeps  ? &WorkMoves::sleep
                                       : &WorkMoves::wake,
                       .sync = s == sync};
      wakes |= rolled_out && (s == wake_train || s == wake_params || s == wake_moments || s == wake_reference);
    }
  }
  if (Level* const last = train()) {  // behind it training begins
    last->train = true;
    last->reference |= !order.has(reference), last->old_logprobs |= !order.has(old_logprobs);
  }
}

double ShiftShape::Level::bytes(const WorkBytes& w) const {
  return std::max({sync ? w.sync : 0.0, rollout ? w.rollout : 0.0, reference ? w.reference : 0.0,
                   old_logprobs ? w.old_logprobs : 0.0, train ? w.train : 0.0});
}

WorkMoves ShiftShape::moves(const WorkBytes& work, WorkPlan plan) const {
  const Levels& levels = levels_[static_cast<std::size_t>(plan)];
  std::array<double, TransitionOrder::most + 1> bytes{};
  for (std::size_t i = 0; i < levels.count; ++i) bytes[i] = levels.each[i].bytes(work);
  WorkMoves out;
  if (levels.count < 2) return out;
  double& last = bytes[levels.count - 1];
  // Where training works in least, what it could give back is kept: else less of its work would move more.
  if (plan == WorkPlan::lowered) last = std::max(last, std::min(bytes[levels.count - 2], bytes[0]));
  double at = last;
  for (std::size_t i = 0; i < levels.count; ++i) {
    WorkMoves::Moved& of = out.*levels.each[i].of;
    (bytes[i] > at ? of.mapped : of.unmapped) += std::abs(bytes[i] - at);
    at = bytes[i];
  }
  return out;
}

ShiftPrice ShiftShape::price(const ShiftBytes& z) const {
  std::array<double, 16> bytes{}, copies{};  // of each set: on the device, asleep on the host
  for (const auto& [of, with_params] : {std::pair(&bytes, z.with_params()), std::pair(&copies, z.params)}) {
    *of = {0.0, with_params, z.optimizer, with_params + z.optimizer};
    for (std::size_t i = 0; i < 4; ++i) (*of)[i | weights] = (*of)[i] + z.weights;
    for (std::size_t i = 0; i < 8; ++i) (*of)[i | kv] = (*of)[i] + z.with_kv();
  }
  const std::uint8_t to_host = z.keeps_weights ? params | optimizer | weights : params | optimizer;
  const auto staged = [&](std::uint8_t set) {
    if ((set & staging) == 0) return bytes[set];
    return bytes[set & 15] + ((set & host_staging) == 0 ? z.staging : z.staged_from_host());
  };
  ShiftPrice out;
  for (std::uint8_t set : to_sync_) out.sync_bytes = std::max(out.sync_bytes, staged(set));
  for (std::uint8_t set : to_wake_) out.wake_bytes = std::max(out.wake_bytes, staged(set));
  for (std::uint8_t set : asleep_) out.asleep = std::max(out.asleep, copies[set & to_host]);
  for (std::uint8_t set : down_) out.down += copies[set & to_host];
  for (std::uint8_t set : up_) out.up += copies[set & to_host];
  for (std::uint8_t set : unmapped_) out.unmapped += bytes[set];
  for (std::uint8_t set : mapped_) out.mapped += bytes[set];
  out.rollout_rest = bytes[rollout_rest_];
  out.train_rest = bytes[train_rest_];
  out.sync_from_host = sync_from_host_;
  return out;
}

std::vector<TransitionOrder> undominated(std::vector<TransitionOrder> orders, bool keeps_weights) {
  std::sort(orders.begin(), orders.end());
  // Many orders have one footprint; the first stands for them.
  std::map<Footprint, TransitionOrder> distinct;
  for (const TransitionOrder& o : orders) distinct.try_emplace(footprint(o, keeps_weights), o);
  std::vector<TransitionOrder> out;
  for (const auto& [print, order] : distinct)
    if (std::none_of(distinct.begin(), distinct.end(),
                     [&, &own = print](const auto& other) { return other.first != own && no_worse(other.first, own); }))
      out.push_back(order);
  std::sort(out.begin(), out.end());
  return out;
}

}  // namespace hotbunk
