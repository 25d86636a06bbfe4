#include "planner/search.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "base/format.h"

namespace hotbunk {

std::vector<std::int64_t> divisors(std::int64_t n) {
  std::vector<std::int64_t> out;
  for (std::int64_t d = 1; d <= n / d; ++d)
    if (n % d == 0) {
      out.push_back(d);
      if (d != n / d) out.push_back(n / d);
    }
  std::sort(out.begin(), out.end());
  return out;
}

namespace {

std::vector<std::int64_t> at_most(std::vector<std::int64_t> values, std::int64_t limit) {
  std::erase_if(values, [&](std::int64_t v) { return v > limit; });
  return values;
}

/// What decides the layer costs: points that share it share one computation of them.
struct Key {
  std::int64_t tp, cp, ulysses, ep, etp, micro_batch;
  bool sp;
};

/// A bounded list of the best, ordered by (value, sequence number in the space): independent of threads.
struct Ranked {
  double value;
  std::int64_t order;
  TrainCandidate candidate;
  bool operator<(const Ranked& o) const { return value != o.value ? value < o.value : order < o.order; }
};
class BestList {
 public:
  explicit BestList(std::size_t keep) : keep_(keep) { list_.reserve(keep + 1); }
  double bound() const { return list_.size() < keep_ ? 1e300 : list_.back().value; }
  void offer(double value, std::int64_t order, const TrainCandidate& c) {
    if (keep_ == 0 || (list_.size() == keep_ && !(Ranked{value, order, {}} < list_.back()))) return;
    const Ranked r{value, order, c};
    list_.insert(std::upper_bound(list_.begin(), list_.end(), r), r);
    if (list_.size() > keep_) list_.pop_back();
  }
  void merge(const BestList& o) {
    for (const Ranked& r : o.list_) offer(r.value, r.order, r.candidate);
  }
  std::vector<TrainCandidate> take() const {
    std::vector<TrainCandidate> out;
    for (const Ranked& r : list_) out.push_back(r.candidate);
    return out;
  }

 private:
  std::size_t keep_;
  std::vector<Ranked> list_;
};

/// Pareto front of seconds against bytes, exact: a dominated point never enters, an entering point removes what it
/// dominates. Sorted by seconds; bytes then fall strictly.
class Front {
 public:
  Front() { list_.reserve(4096); }
  void offer(double seconds, double bytes, std::int64_t order, const TrainCandidate& c) {
    auto at =
        std::lower_bound(list_.begin(), list_.end(), seconds, [](const Item& i, double s) { return i.seconds < s; });
    if (at != list_.begin() && std::prev(at)->bytes <= bytes) return;
    if (at != list_.end() && at->seconds == seconds && (at->bytes < bytes || (at->bytes == bytes && at->order < order)))
      return;
    auto end = at;
    while (end != list_.end() && end->bytes >= bytes) ++end;
    at = list_.erase(at, end);
    list_.insert(at, {seconds, bytes, order, c});
  }
  void merge(const Front& o) {
    for (const Item& i : o.list_) offer(i.seconds, i.bytes, i.order, i.candidate);
  }
  std::vector<TrainCandidate> take() const {
    std::vector<TrainCandidate> out;
    for (const Item& i : list_) out.push_back(i.candidate);
    return out;
  }

 private:
  struct Item {
    double seconds, bytes;
    std::int64_t order;
    TrainCandidate candidate;
  };
  std::vector<Item> list_;
};

struct Partial {
  BestList best, infeasible;
  Front front;
  std::int64_t priced = 0, rejected = 0, feasible = 0;
  double least_bytes = 1e300;
  explicit Partial(std::size_t keep) : best(keep), infeasible(3) {}
};

/// All points of one key. `order` numbers the points of the space, key by key.
void search_key(const TrainModel& model, const TrainSpace& space, const SearchOptions& options, const Key& key,
                std::int64_t order, Partial& out) {
  TrainPoint p{.cp = key.cp,
               .ulysses = key.ulysses,
               .tp = key.tp,
               .ep = key.ep,
               .etp = key.etp,
               .sp = key.sp,
               .micro_batch = key.micro_batch};
  const TrainModel::Layers layers = model.layers(p);
  const double limit = options.device_bytes * (1.0 - options.headroom);
  for (std::int64_t pp : space.pp) {
    const std::int64_t used = key.tp * key.cp * key.ulysses * pp;
    if (space.ranks % used != 0) continue;
    p.pp = pp;
    p.dp = space.ranks / used;
    if (space.batch % (p.dp * key.micro_batch) != 0) continue;
    p.micro_batches = space.batch / (p.dp * key.micro_batch);
    for (std::int64_t vpp : space.vpp) {
      p.vpp = vpp;
      if (!model.divides(p)) {
        ++out.rejected;
        continue;
      }
      for (Recompute recompute : space.recompute)
        for (Sharding sharding : space.sharding) {
          // Pipelines reuse parameters over many micro-batches: gathering them each time is no layout anyone runs.
          if (pp > 1 && (sharding == Sharding::zero2 || sharding == Sharding::zero3 || sharding == Sharding::fsdp))
            continue;
          for (bool on_host : space.optimizer_on_host) {
            p.recompute = recompute;
            p.sharding = sharding;
            p.optimizer_on_host = on_host;
            const TrainCandidate c{p, model.price(p, layers)};
            ++out.priced;
            ++order;
            const double bytes = c.price.total_bytes();
            const double value = options.objective == Objective::seconds ? c.price.step_seconds : bytes;
            out.least_bytes = std::min(out.least_bytes, bytes);
            if (bytes > limit || c.price.host_bytes > options.host_bytes) {
              out.infeasible.offer(value, order, c);
              continue;
            }
            ++out.feasible;
            out.best.offer(value, order, c);
            out.front.offer(c.price.step_seconds, bytes, order, c);
          }
        }
    }
  }
}

std::vector<Key> keys_of(const TrainSpace& s) {
  std::vector<Key> keys;
  for (auto tp : s.tp)
    for (auto cp : s.cp)
      for (auto ulysses : s.ulysses)
        for (auto ep : s.ep)
          for (auto etp : s.etp)
            for (auto b : s.micro_batch)
              for (bool sp : s.sp)
                if (s.ranks % (tp * cp * ulysses) == 0 && (tp > 1 || !sp))
                  keys.push_back({tp, cp, ulysses, ep, etp, b, sp});
  return keys;
}

int thread_count(const SearchOptions& o) {
  return o.threads > 0 ? o.threads : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace

TrainSpace default_train_space(const ModelSpec& m, std::int64_t ranks, std::int64_t per_node, std::int64_t batch,
                               TrainEngine engine) {
  TrainSpace s;
  s.ranks = ranks;
  s.batch = std::max<std::int64_t>(batch, 1);
  s.tp = at_most(divisors(ranks), std::min<std::int64_t>(std::max<std::int64_t>(per_node, 1), m.heads));
  const bool megatron = engine == TrainEngine::megatron;
  s.pp = megatron ? at_most(divisors(ranks), m.layers) : std::vector<std::int64_t>{1};
  s.vpp = megatron ? std::vector<std::int64_t>{1, 2, 3, 4, 6, 8} : std::vector<std::int64_t>{1};
  s.cp = at_most(divisors(ranks), 8);
  s.ulysses = megatron ? std::vector<std::int64_t>{1} : at_most(divisors(ranks), 8);
  s.micro_batch = at_most(divisors(s.batch), 16);
  if (m.moe && m.moe->experts > 0) s.ep = at_most(divisors(m.moe->experts), ranks);
  switch (engine) {
    case TrainEngine::ddp:
      s.sharding = {Sharding::replicated};
      break;
    case TrainEngine::zero2:
      s.sharding = {Sharding::zero2};
      break;
    case TrainEngine::fsdp1:
    case TrainEngine::fsdp2:
      s.sharding = {Sharding::fsdp};
      s.tp = {1};
      break;
    default:
      s.sharding = {Sharding::replicated, Sharding::zero1};
  }
  return s;
}

TrainSearch search_train(const TrainModel& model, const TrainSpace& space, const SearchOptions& options) {
  const std::vector<Key> keys = keys_of(space);
  // Numbers of the points: a key has at most this many.
  const auto stride = static_cast<std::int64_t>(space.pp.size() * space.vpp.size() * space.recompute.size() *
                                                space.sharding.size() * space.optimizer_on_host.size());
  const int threads = std::min<int>(thread_count(options), static_cast<int>(std::max<std::size_t>(keys.size(), 1)));
  std::vector<Partial> partials(static_cast<std::size_t>(threads), Partial(options.keep));
  std::atomic<std::size_t> next{0};
  std::atomic<std::int64_t> priced{0};
  std::atomic<bool> stopped{false};
  const auto work = [&](Partial& out) {
    for (std::size_t i = next++; i < keys.size(); i = next++) {
      if (options.most_points > 0 && priced >= options.most_points) {
        stopped = true;
        return;
      }
      const std::int64_t before = out.priced;
      search_key(model, space, options, keys[i], static_cast<std::int64_t>(i) * stride, out);
      priced += out.priced - before;
    }
  };
  std::vector<std::thread> helpers;
  for (int t = 1; t < threads; ++t) helpers.emplace_back(work, std::ref(partials[static_cast<std::size_t>(t)]));
  work(partials[0]);
  for (std::thread& t : helpers) t.join();
  Partial all(options.keep);
  for (const Partial& p : partials) {
    all.best.merge(p.best);
    all.infeasible.merge(p.infeasible);
    all.front.merge(p.front);
    all.priced += p.priced;
    all.rejected += p.rejected;
    all.feasible += p.feasible;
    all.least_bytes = std::min(all.least_bytes, p.least_bytes);
  }
  TrainSearch out;
  out.best = all.best.take();
  const double bound = out.best.empty()                          ? 1e300
                       : options.objective == Objective::seconds ? out.best[0].price.step_seconds
                                                                 : out.best[0].price.total_bytes();
  for (const TrainCandidate& c : all.infeasible.take())
    if ((options.objective == Objective::seconds ? c.price.step_seconds : c.price.total_bytes()) < bound)
      out.infeasible.push_back(c);
  out.pareto = all.front.take();
  out.priced = all.priced;
  out.rejected = all.rejected;
  out.feasible = all.feasible;
  out.complete = !stopped;
  if (out.best.empty())
    out.reason = all.priced == 0 ? fmt::format("no layout of {} ranks divides {} heads, {} layers and a batch of {}",
                                               space.ranks, model.model().heads, model.model().layers, space.batch)
                                 : fmt::format("none of {} layouts fits: the smallest needs {}, a device has {}",
                                               all.priced, format_bytes(all.least_bytes),
                                               format_bytes(options.device_bytes * (1.0 - options.headroom)));
  return out;
}

}  // namespace hotbunk
