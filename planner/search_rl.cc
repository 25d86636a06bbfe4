// Joint search: training x rollout x sync x sleep. The parts are priced once each; their combinations all are, except
// those whose training and rollout alone already take longer than the worst kept one.
#include <fmt/format.h>

#include <algorithm>
#include <thread>

#include "base/format.h"
#include "planner/search.h"

namespace hotbunk {
namespace {

struct Item {
  double value = 0;
  std::int64_t order = 0;
  RlCandidate candidate;
  bool operator<(const Item& o) const { return value != o.value ? value < o.value : order < o.order; }
};

/// The best by (value, order), one per price: layouts that cost the same to the last bit (a bucket size that a direct
/// sync does not use) are one answer, the first of them.
class Best {
 public:
  explicit Best(std::size_t keep) : keep_(keep) { list_.reserve(keep + 1); }
  double bound() const { return list_.size() < keep_ ? 1e300 : list_.back().value; }
  bool enters(double value, double bytes, std::int64_t order) const {
    for (const Item& i : list_)
      if (i.value == value && i.candidate.price.peak_bytes() == bytes) return order < i.order;
    return keep_ > 0 && (list_.size() < keep_ || value < list_.back().value ||
                         (value == list_.back().value && order < list_.back().order));
  }
  void add(const Item& item) {
    std::erase_if(list_, [&](const Item& i) {
      return i.value == item.value && i.candidate.price.peak_bytes() == item.candidate.price.peak_bytes();
    });
    list_.insert(std::upper_bound(list_.begin(), list_.end(), item), item);
    if (list_.size() > keep_) list_.pop_back();
  }
  void merge(const Best& o) {
    for (const Item& i : o.list_)
      if (enters(i.value, i.candidate.price.peak_bytes(), i.order)) add(i);
  }
  std::vector<RlCandidate> take() const {
    std::vector<RlCandidate> out;
    for (const Item& i : list_) out.push_back(i.candidate);
    return out;
  }

 private:
  std::size_t keep_;
  std::vector<Item> list_;
};

/// Rollout layouts with their prices; those that cannot hold the weights are dropped here.
struct RolloutChoice {
  RolloutPoint point;
  RolloutPrice price;
};

std::vector<RolloutChoice> rollouts(const RlModel& model, const RlSpace& s) {
  std::vector<RolloutChoice> out;
  for (std::int64_t tp : s.rollout_tp) {
    if (tp < 1 || s.train.ranks % tp != 0) continue;
    for (bool strided : s.strided)
      for (double fraction : s.memory_fraction) {
        const RolloutPoint p{.tp = tp, .engines = s.train.ranks / tp, .strided = strided, .memory_fraction = fraction};
        const RolloutPrice price = model.price_rollout(p);
        if (price.fits) out.push_back({p, price});
      }
  }
  return out;
}

struct TrainChoice {
  TrainPoint point;
  TrainPrice price;
  std::size_t layers = 0;
};

/// Every training point of the space with its price, in the space's order.
void training(const RlModel& model, const RlSpace& s, std::vector<TrainChoice>& points,
              std::vector<TrainModel::Layers>& layers, std::int64_t& rejected) {
  const TrainSpace& t = s.train;
  for (auto tp : t.tp)
    for (auto cp : t.cp)
      for (auto ulysses : t.ulysses)
        for (auto ep : t.ep)
          for (auto etp : t.etp)
            for (auto b : t.micro_batch)
              for (bool sp : t.sp) {
                if (t.ranks % (tp * cp * ulysses) != 0 || (sp && tp == 1)) continue;
                TrainPoint p{.cp = cp, .ulysses = ulysses, .tp = tp, .ep = ep, .etp = etp, .sp = sp, .micro_batch = b};
                std::size_t at = static_cast<std::size_t>(-1);
                for (auto pp : t.pp) {
                  if (t.ranks % (tp * cp * ulysses * pp) != 0) continue;
                  p.pp = pp;
                  p.dp = t.ranks / (tp * cp * ulysses * pp);
                  if (t.batch % (p.dp * b) != 0) continue;
                  p.micro_batches = t.batch / (p.dp * b);
                  for (auto vpp : t.vpp) {
                    p.vpp = vpp;
                    if (!model.train().divides(p)) {
                      ++rejected;
                      continue;
                    }
                    if (at == static_cast<std::size_t>(-1)) {
                      at = layers.size();
                      layers.push_back(model.train().layers(p));
                    }
                    for (Recompute r : t.recompute)
                      for (Sharding sharding : t.sharding)
                        for (bool on_host : t.optimizer_on_host) {
                          p.recompute = r;
                          p.sharding = sharding;
                          p.optimizer_on_host = on_host;
                          points.push_back({p, model.train().price(p, layers[at]), at});
                        }
                  }
                }
              }
}

struct Partial {
  Best best, infeasible;
  std::int64_t priced = 0, pruned = 0, feasible = 0;
  double least = 1e300;
  explicit Partial(std::size_t keep) : best(keep), infeasible(3) {}
};

}  // namespace

RlSpace default_rl_space(const Scenario& s) {
  RlSpace out;
  const std::int64_t ranks = s.cluster.ranks(), node = s.cluster.ranks_per_node();
  const auto samples = static_cast<std::int64_t>(s.algorithm.prompts * s.algorithm.samples_per_prompt);
  out.train = default_train_space(
      s.model, ranks, node, std::max<std::int64_t>(1, samples / std::max<std::int64_t>(1, s.algorithm.mini_batches)),
      s.train.engine);
  out.rollout_tp = divisors(ranks);
  std::erase_if(out.rollout_tp, [&](std::int64_t tp) { return s.model.heads % tp != 0 || tp > 4 * node; });
  out.memory_fraction = {0.6, 0.7, 0.8, 0.9};
  return out;
}

RlSearch search_rl(const RlModel& given, const RlSpace& space, const SearchOptions& options) {
  RlSearch out;
  RlModel model = given;
  std::vector<TrainChoice> points;
  std::vector<TrainModel::Layers> layers;
  training(model, space, points, layers, out.rejected);
  const std::vector<RolloutChoice> engines = rollouts(model, space);
  for (const RolloutChoice& e : engines)
    model.learn_reshard({.dp = space.train.ranks, .sharding = Sharding::fsdp}, e.point);
  const auto variants = static_cast<std::int64_t>(space.offload.size() * space.sync.size() * space.bucket_bytes.size());
  const auto per_point = static_cast<std::int64_t>(engines.size()) * variants;
  const double limit = options.device_bytes * (1.0 - options.headroom);
  const int threads =
      options.threads > 0 ? options.threads : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  std::vector<Partial> partials(static_cast<std::size_t>(threads), Partial(options.keep));
  const double passes = model.setting().mini_batches;
  const auto work = [&](std::size_t first) {
    Partial& mine = partials[first];
    for (std::size_t i = first; i < points.size(); i += static_cast<std::size_t>(threads)) {
      const TrainChoice& t = points[i];
      for (std::size_t e = 0; e < engines.size(); ++e) {
        std::int64_t order = static_cast<std::int64_t>(i) * per_point + static_cast<std::int64_t>(e) * variants;
        const double least = passes * t.price.step_seconds + engines[e].price.seconds();
        if (options.prune && options.objective == Objective::seconds && least > mine.best.bound()) {
          mine.pruned += variants;
          continue;
        }
        for (Offload offload : space.offload)
          for (SyncMechanism sync : space.sync)
            for (double bucket : space.bucket_bytes) {
              const RlPoint p{t.point, engines[e].point, offload, sync, bucket};
              RlPrice price = model.combine(p, t.price, layers[t.layers], engines[e].price);
              ++mine.priced;
              ++order;
              const bool fits = price.peak_bytes() <= limit && price.host_bytes <= options.host_bytes;
              price.fits = fits;
              const double value =
                  options.objective == Objective::seconds ? price.iteration_seconds : price.peak_bytes();
              mine.least = std::min(mine.least, price.peak_bytes());
              mine.feasible += fits ? 1 : 0;
              Best& list = fits ? mine.best : mine.infeasible;
              if (list.enters(value, price.peak_bytes(), order))
                list.add({value, order, {p, price, t.price, engines[e].price}});
            }
      }
    }
  };
  std::vector<std::thread> helpers;
  for (std::size_t t = 1; t < static_cast<std::size_t>(threads); ++t) helpers.emplace_back(work, t);
  work(0);
  for (std::thread& t : helpers) t.join();
  Best best(options.keep), infeasible(3);
  double least = 1e300;
  for (const Partial& p : partials) {
    best.merge(p.best);
    infeasible.merge(p.infeasible);
    out.priced += p.priced;
    out.pruned += p.pruned;
    out.feasible += p.feasible;
    least = std::min(least, p.least);
  }
  out.limit_bytes = limit;
  out.best = best.take();
  for (const RlCandidate& c : infeasible.take())
    if (out.best.empty() ||
        (options.objective == Objective::seconds ? c.price.iteration_seconds < out.best[0].price.iteration_seconds
                                                 : c.price.peak_bytes() < out.best[0].price.peak_bytes()))
      out.infeasible.push_back(c);
  // The front among the kept: iteration seconds against the fullest moment.
  double lowest = 1e300;
  for (const RlCandidate& c : out.best)
    if (c.price.peak_bytes() < lowest) {
      lowest = c.price.peak_bytes();
      out.pareto.push_back(c);
    }
  if (out.best.empty())
    out.reason = points.empty() ? fmt::format("no training layout of {} ranks divides the model and the batch of {}",
                                              space.train.ranks, space.train.batch)
                 : engines.empty()
                     ? fmt::format("no rollout layout holds the weights and one sequence of the longest length in {}",
                                   format_bytes(model.setting().device_bytes))
                     : fmt::format("none of {} combinations fits: the smallest needs {}, a device has {}", out.priced,
                                   format_bytes(least), format_bytes(limit));
  return out;
}

}  // namespace hotbunk
