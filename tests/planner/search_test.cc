// The joint search beside brute force over the same space. Long for the spaces and objectives, which share what
// compares.
#include "planner/search/search.h"

#include <rapidcheck.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <map>
#include <random>

#include "planner/answers/answers.h"
#include "planner/answers/choices.h"
#include "planner/answers/lowered_space.h"
#include "planner/answers/plan_answer.h"
#include "planner/answers/plan_shifts.h"
#include "spec/catalog.h"
#include "spec/loader.h"
#include "tests/paths.h"
#include "tests/planner/pricers.h"

namespace hotbunk {
namespace {

Scenario searched(const std::vector<std::string>& sets = {}) {
  const char* text =
      "name: qwen\nmodel: qwen2.5-7b\ncluster: {gpu: {base: h100-sxm-80gb, price_per_hour: 2}, nodes: 1, "
      "gpus_per_node: 8}\n"
      "train: {engine: fsdp2, layout: {dp: 8}, recompute: full, micro_batch_tokens: 16384}\n"
      "rollout: {engine: sglang, layout: {tp: 4, dp: 2}, memory_fraction: 0.8}\n"
      "algorithm: {name: grpo, prompts: 64, samples_per_prompt: 8, reference: true}\n"
      "workload: {prompt_tokens: {mean: 512, max: 1024}, response_tokens: {mean: 1536, max: 4096}}\n";
  return scenario_of_text(text, sets);
}

/// Small enough to price by hand-written loops, with every kind of knob in it.
RlSpace small_space(const Scenario& s) {
  RlSpace out = default_rl_space(s);
  out.train.cp = {1, 2};
  out.train.ulysses = {1};
  out.train.tp = {1, 2};
  out.train.shard = {-1, 2, 4};
  out.train.optimizer_on_host = {false, true};
  out.train.micro_batch = {3, 6};
  out.rollout_tp = {2, 4};
  out.rollout_pp = {1, 2}, out.stage_ranks = 0;
  out.memory_fraction = {0.6, 0.8};
  out.placement = {
      {PlacementMode::colocated, 8, 8}, {PlacementMode::disaggregated, 4, 4}, {PlacementMode::disaggregated, 6, 2}};
  out.bucket_bytes = {512.0 * 1024 * 1024, 2048.0 * 1024 * 1024};
  return out;
}

/// Every point of a space with its price, whatever is looked for: nested loops and RlModel::price, nothing shared with
/// the search. With `plans`, what has none of them is left out.
struct EveryPoint {
  RlModel model;
  PlanPrices plans;
  std::vector<RlCandidate> all;

  EveryPoint(RlModel given, const RlSpace& s, PlanPrices plan_prices = {})
      : model(std::move(given)), plans(std::move(plan_prices)) {
    for (const PlacementChoice& place : s.placement) {
      for (auto cp : s.train.cp)
        for (auto ulysses : s.train.ulysses)
          for (auto tp : s.train.tp)
            for (auto b : s.train.micro_batch)
              for (Recompute recompute : s.train.recompute) {
                if (place.train_ranks % (tp * cp * ulysses) != 0) continue;
                RlPoint p;
                p.placement = place.mode;
                p.train = {.dp = place.train_ranks / (tp * cp * ulysses), .cp = cp, .ulysses = ulysses, .tp = tp};
                p.train.sharding = Sharding::fsdp;
                p.train.recompute = recompute;
                p.train.micro_batch = b;
                p.train.set_sequences((s.train.batch + p.train.dp - 1) / p.train.dp);
                for (bool sp : s.train.sp)
                  for (auto group : s.train.shard)
                    for (bool reshard : s.train.reshard)
                      for (bool on_host : s.train.optimizer_on_host) {
                        const std::int64_t data = p.train.data_ranks();
                        p.train.sp = sp, p.train.fsdp = group;
                        p.train.reshard_after_forward = reshard, p.train.optimizer_on_host = on_host;
                        if ((group > 0 && (data % group != 0 || group >= data)) || (data == 1 && !reshard)) continue;
                        if (model.train().divides(p.train)) add_rollouts(s, p, place);
                      }
              }
    }
  }

  void add_rollouts(const RlSpace& s, RlPoint p, const PlacementChoice& place) {
    const bool shared = place.mode == PlacementMode::colocated;
    for (auto tp : s.rollout_tp)
      for (auto pp : s.rollout_pp)
        for (bool strided : s.strided)
          for (double fraction : s.memory_fraction) {
            if (place.rollout_ranks % (tp * pp) != 0) continue;
            p.rollout = {.tp = tp,
                         .engines = place.rollout_ranks / (tp * pp),
                         .strided = strided,
                         .memory_fraction = fraction,
                         .pp = pp};
            if (!s.has_engine(tp, 1, pp) || !model.divides(p.rollout)) continue;
            add_variants(s, p, shared);
          }
  }

  void add_variants(const RlSpace& s, RlPoint p, bool shared) {
    const std::vector<TransitionOrder> none = {TransitionOrder{}};
    for (SyncMechanism sync : shared ? s.sync : s.sync_apart)
      for (double bucket : s.bucket_bytes)
        for (const TransitionOrder& order : shared ? s.transition : none) {
          p.sync = sync, p.bucket_bytes = bucket, p.transition = order;
          if (p.train.optimizer_on_host && p.sleeps()) continue;
          RlPrice price = model.price(p);
          if (price.iteration_seconds <= 0) continue;
          if (plans && !plans(p, price)) continue;
          all.push_back({p, price});
        }
  }
};

/// The slow obvious search: all points, sorted.
struct Brute {
  struct Item {
    double value = 0, second = 0, over = 0;
    RlCandidate c;
  };
  std::vector<Item> all;

  Brute(const EveryPoint& every, const SearchOptions& o) {
    for (RlCandidate c : every.all) {
      const double bytes = c.price.peak_bytes(), seconds = c.price.iteration_seconds;
      const double over = std::max(0.0, bytes - o.limit_bytes()) + std::max(0.0, c.price.host_bytes - o.host_bytes);
      c.price.fits = over <= 0;
      const double value = objective_of(o.objective, every.model, c.point, c.price);
      const bool by_time = o.objective == Objective::memory || o.objective == Objective::gpus;
      all.push_back({value, by_time ? seconds : bytes, over, c});
    }
  }

  std::vector<Item> best(std::size_t keep) const {
    std::vector<Item> fit;
    for (const Item& i : all)
      if (i.over <= 0) fit.push_back(i);
    std::sort(fit.begin(), fit.end(), [](const Item& a, const Item& b) {
      if (a.value != b.value) return a.value < b.value;
      if (a.second != b.second) return a.second < b.second;
      return a.c.point < b.c.point;
    });
    std::vector<Item> out;
    for (const Item& i : fit) {
      if (std::any_of(out.begin(), out.end(), [&](const Item& x) { return same_layout(x.c.point, i.c.point); }))
        continue;
      out.push_back(i);
      if (out.size() == keep) break;
    }
    return out;
  }

  /// (seconds, bytes) that nothing feasible beats, by comparison of all with all after sorting.
  std::vector<std::pair<double, double>> front() const {
    std::map<double, double> least;  // bytes by seconds
    for (const Item& i : all)
      if (i.over <= 0) {
        const double seconds = i.c.price.iteration_seconds, bytes = i.c.price.peak_bytes();
        const auto at = least.try_emplace(seconds, bytes).first;
        at->second = std::min(at->second, bytes);
      }
    std::vector<std::pair<double, double>> out;
    for (const auto& [seconds, bytes] : least)
      if (out.empty() || bytes < out.back().second) out.emplace_back(seconds, bytes);
    return out;
  }

  /// The least bytes over, among what is better than the best.
  double nearest(double best_value) const {
    double least = 1e300;
    for (const Item& i : all)
      if (i.over > 0 && i.value < best_value) least = std::min(least, i.over);
    return least;
  }
};

void check_equal(const RlSearch& a, const RlSearch& b) {
  REQUIRE(a.best.size() == b.best.size());
  for (std::size_t i = 0; i < a.best.size(); ++i) CHECK(a.best[i].point == b.best[i].point);
  REQUIRE(a.pareto.size() == b.pareto.size());
  for (std::size_t i = 0; i < a.pareto.size(); ++i) CHECK(a.pareto[i].point == b.pareto[i].point);
  REQUIRE(a.infeasible.size() == b.infeasible.size());
  for (std::size_t i = 0; i < a.infeasible.size(); ++i) CHECK(a.infeasible[i].point == b.infeasible[i].point);
}

/// On one to three threads, pruning or not: the same answer as the brute force's, which has its own `options`.
void check_search(const RlModel& model, const RlSpace& space, SearchOptions options, const Brute& brute) {
  const auto best = brute.best(options.keep);
  const auto front = brute.front();
  REQUIRE(!best.empty());
  RlSearch first;
  for (const int threads : {1, 2, 3})
    for (const bool prune : {true, false}) {  // what is priced does not depend on threads either
      INFO(name_of(options.objective) << ", " << options.device_bytes << " bytes, " << threads << " threads, prune "
                                      << prune);
      options.threads = threads;
      options.prune = prune;
      const RlSearch found = search_rl(model, space, options);
      CHECK(found.complete);
      CHECK(found.gap == 0.0);
      CHECK(found.points == static_cast<std::int64_t>(brute.all.size()));
      CHECK((prune ? found.priced <= found.points : found.priced == found.points));
      if (!prune) CHECK(found.feasible == std::ranges::count_if(brute.all, [](const auto& i) { return i.over <= 0; }));
      REQUIRE(found.best.size() == best.size());
      for (std::size_t i = 0; i < best.size(); ++i) {
        CHECK(found.best[i].point == best[i].c.point);
        CHECK(found.best[i].price.iteration_seconds == best[i].c.price.iteration_seconds);
        CHECK(found.best[i].price.peak_bytes() == best[i].c.price.peak_bytes());
      }
      REQUIRE(found.pareto.size() == front.size());
      for (std::size_t i = 0; i < front.size(); ++i) {
        CHECK(found.pareto[i].price.iteration_seconds == front[i].first);
        CHECK(found.pareto[i].price.peak_bytes() == front[i].second);
      }
      const double nearest = brute.nearest(best[0].value);
      REQUIRE(found.infeasible.empty() == (nearest >= 1e300));
      if (!found.infeasible.empty()) {
        const RlPrice& price = found.infeasible[0].price;
        CHECK(std::max(0.0, price.peak_bytes() - options.limit_bytes()) +
                  std::max(0.0, price.host_bytes - options.host_bytes) ==
              nearest);
      }
      if (threads == 1 && prune) first = found;
      else check_equal(first, found);
      if (prune) CHECK(found.priced == first.priced);
    }
  // Without the front the rest of the answer stands.
  options.prune = true, options.front = false;
  RlSearch narrow = search_rl(model, space, options);
  CHECK(narrow.pareto.empty());
  narrow.pareto = first.pareto;
  check_equal(narrow, first);
}

}  // namespace

TEST_CASE("joint search = brute force for every objective, on one to three threads") {
  const auto pricer = pricer_for(searched({"algorithm.max_staleness=1"}));
  const RlSpace space = small_space(pricer->scenario());
  const EveryPoint every(pricer->rl(), space);
  for (std::size_t o = 0; o < num_objectives; ++o)
    for (const double device : {80e9, 60e9}) {
      const SearchOptions options{
          .keep = 6, .objective = static_cast<Objective>(o), .device_bytes = device, .headroom = 0.05};
      const Brute brute(every, options);
      REQUIRE(brute.all.size() > 2000);
      REQUIRE(brute.best(options.keep).size() == options.keep);
      check_search(pricer->rl(), space, options, brute);
    }
}

TEST_CASE("joint search = brute force without log-prob passes, which tell the same of micro-batches as training") {
  const auto pricer = pricer_for(searched({"algorithm.reference=false", "algorithm.old_logprobs=false"}));
  const RlSpace space = small_space(pricer->scenario());
  const EveryPoint every(pricer->rl(), space);
  for (const double device : {80e9, 60e9}) {
    const SearchOptions options{.keep = 6, .device_bytes = device};
    check_search(pricer->rl(), space, options, Brute(every, options));
  }
}

TEST_CASE("joint search = brute force under our own engine by estimates, and with narrow weights") {
  for (const std::vector<std::string>& sets :
       {std::vector<std::string>{"rollout.engine=hotbunk"}, {"rollout.dtype=fp8"}, {"rollout.engine=vllm"}}) {
    const auto pricer = pricer_for(searched(sets));
    RlSpace space = small_space(pricer->scenario());
    space.placement.resize(1);  // where shifts are
    if (sets[0] == "rollout.engine=hotbunk") space.rollout_pp = {1};
    INFO(sets[0]);
    const SearchOptions options{.keep = 6};
    check_search(pricer->rl(), space, options, Brute(EveryPoint(pricer->rl(), space), options));
  }
}

TEST_CASE("where plans are lowered, experts are spread over data ranks too, and only as it is executed") {
  const auto with = [](std::vector<std::string> sets) {
    sets.emplace_back("cluster.device_memory_mib=64");
    auto s = load_scenario(std::string(source_folder) + "/scenarios/expert-parallel-cpu.yaml", sets);
    REQUIRE(s);
    return std::move(*s);
  };
  const Scenario s = with({});
  const auto pricer = pricer_for(s);
  RlSpace space = default_rl_space(s);
  keep_what_executes(space, s, pricer->point().sync);
  CHECK(space.train.ep == std::vector<std::int64_t>{1, 2, 4});
  const PlanPrices prices = plan_prices(s, pricer->train().cost());
  const auto is_priced = [&](const std::vector<std::string>& sets) {
    RlPrice price;
    return prices.use(rl_point_of(with(sets)), price);
  };
  CHECK(is_priced({}));
  CHECK(is_priced({"train.layout.ep=4"}));
  CHECK(is_priced({"train.layout.dp=2", "train.layout.tp=2", "train.layout.etp=2"}));
  CHECK(!is_priced({"train.layout.dp=2", "train.layout.tp=2", "train.layout.ep=4"}));  // over both
  CHECK(!is_priced({"train.layout.ep=4", "train.layout.fsdp=2"}));                     // over more than share shards
}

TEST_CASE("where plans are lowered, those put together of parts answer as each by itself") {
  const Scenario s = searched({"rollout.engine=hotbunk"});
  const auto pricer = pricer_for(s);
  RlSpace space = default_rl_space(s);
  keep_what_executes(space, s, pricer->point().sync);
  space.train.micro_batch = {3, 6};
  space.memory_fraction = {0.8};
  // Each point is lowered whole: two values of a knob at most, so that it takes seconds.
  const auto two = [](auto& values) { values.resize(std::min<std::size_t>(values.size(), 2)); };
  two(space.train.cp), two(space.train.ulysses), two(space.train.tp), two(space.train.recompute);
  two(space.rollout_tp), two(space.transition);
  const CostModel& cost = pricer->train().cost();
  const PlanPrices each{.use = [&](const RlPoint& p, RlPrice& price) {
    const auto plan = plan_answer_of(with_point(s, p));
    if (!plan) return false;
    use_mapped_bytes(mapped_bytes(plan->memory), price);
    use_plan_seconds(ComputedSeconds::of(with_point(s, p), plan_seconds(with_point(s, p), p.train, plan->plan, cost)),
                     shifts_seconds(plan->shifts, cost), price);
    return true;
  }};
  const EveryPoint every(pricer->rl(), space, each);
  const PlanPrices of_parts = plan_prices(s, cost);  // each lowered once, by the first search that needs it
  for (const RlCandidate& c : every.all) {           // what spares a plan is less than it takes, if not by much
    const double least = of_parts.least_seconds(c.point);
    INFO(describe(c.point));
    CHECK(least <= c.price.iteration_seconds * (1 + 1e-12));
    CHECK(least >= 0.5 * c.price.iteration_seconds);
  }
  for (std::size_t o = 0; o < num_objectives; ++o)
    for (const double device : {80e9, 50e9}) {
      SearchOptions options{.keep = 4, .objective = static_cast<Objective>(o), .device_bytes = device};
      const Brute brute(every, options);
      REQUIRE(brute.all.size() > 200);
      REQUIRE(brute.nearest(1e300) < 1e300);  // some do not fit
      options.plan_prices = of_parts;
      check_search(pricer->rl(), space, options, brute);
    }
}

TEST_CASE("where plans are lowered, what is spared changes no row, and training that nothing lowers is none") {
  // Of experts over data ranks that shard among fewer, and of odd micro-batches under sequence parallelism.
  for (const char* name : {"deepseek-v2-cpu", "expert-columns-cpu"}) {
    INFO(name);
    const auto s = load_scenario(fmt::format("{}/scenarios/{}.yaml", source_folder, name));
    REQUIRE(s);
    const auto pricer = pricer_for(*s);
    const auto all = choose(*pricer, {.budget = 2'000'000, .front = true}),
               some = choose(*pricer, {.budget = 2'000'000, .front = false});
    REQUIRE(all);
    REQUIRE(some);
    CHECK(some->priced < all->priced / 2);
    for (const auto& [mine, theirs] : {std::pair(&some->rows, &all->rows), {&some->infeasible, &all->infeasible}}) {
      REQUIRE(mine->size() == theirs->size());
      for (std::size_t i = 0; i < mine->size(); ++i) {
        CHECK((*mine)[i].point == (*theirs)[i].point);
        CHECK((*mine)[i].price.iteration_seconds == (*theirs)[i].price.iteration_seconds);
        CHECK((*mine)[i].price.peak_bytes() == (*theirs)[i].price.peak_bytes());
      }
    }
  }
}

TEST_CASE("an engine's experts are spread over the groups of ranks that the engine can have") {
  RlSpace space;
  using Groups = std::vector<std::int64_t>;
  CHECK(space.expert_groups(RolloutEngine::hotbunk, 8, 1) == Groups{1});  // a dense model's
  space.spreads_experts = true;
  CHECK(space.expert_groups(RolloutEngine::hotbunk, 8, 2) == Groups{1, 2, 4, 8});
  CHECK(space.expert_groups(RolloutEngine::sglang, 6, 1) == Groups{1, 2, 3, 6});
  CHECK(space.expert_groups(RolloutEngine::sglang, 4, 2) == Groups{1, 2, 4, 8});
  CHECK(space.expert_groups(RolloutEngine::vllm, 8, 1) == Groups{1, 8});  // whole ones, or none are spread
  CHECK(space.expert_groups(RolloutEngine::vllm, 1, 1) == Groups{1});
}

TEST_CASE("the order in which knobs list their values changes nothing") {
  const auto pricer = pricer_for(searched());
  const RlSpace space = small_space(pricer->scenario());
  SearchOptions options{.keep = 8, .threads = 2};
  const RlSearch straight = search_rl(pricer->rl(), space, options);
  std::mt19937 random(7);
  for (int round = 0; round < 4; ++round) {
    RlSpace mixed = space;
    const auto mix = [&](auto& values) { std::shuffle(values.begin(), values.end(), random); };
    mix(mixed.train.cp), mix(mixed.train.ulysses), mix(mixed.train.micro_batch), mix(mixed.train.recompute);
    mix(mixed.placement), mix(mixed.rollout_tp), mix(mixed.rollout_pp), mix(mixed.memory_fraction),
        mix(mixed.transition);
    mix(mixed.sync), mix(mixed.bucket_bytes);
    std::reverse(mixed.strided.begin(), mixed.strided.end());
    mixed.train.cp.push_back(mixed.train.cp[0]);  // twice in the list is once in the space
    check_equal(straight, search_rl(pricer->rl(), mixed, options));
  }
}

TEST_CASE("any-time: a budget leaves a gap that is proven, shrinks and ends at zero") {
  const auto pricer = pricer_for(searched());
  const RlSpace space = small_space(pricer->scenario());
  for (const Objective objective : {Objective::seconds, Objective::memory, Objective::money}) {
    SearchOptions options{.keep = 3, .objective = objective, .threads = 2};
    const RlSearch whole = search_rl(pricer->rl(), space, options);
    const auto value = [&](const RlSearch& s) {
      return objective_of(objective, pricer->rl(), s.best[0].point, s.best[0].price);
    };
    double gap = 2.0;
    bool was_short = false;
    for (std::int64_t budget : {1, 100, 1'000, 3'000, 10'000, 100'000, 10'000'000}) {
      options.most_points = budget;
      const RlSearch part = search_rl(pricer->rl(), space, options);
      INFO(name_of(objective) << ", budget " << budget << ", gap " << part.gap << ", priced " << part.priced);
      CHECK(part.gap <= gap);
      gap = part.gap;
      if (!part.best.empty()) {
        CHECK(value(part) >= value(whole));                                    // nothing is better than the best
        CHECK(value(part) * (1.0 - part.gap) <= value(whole) * (1.0 + 1e-9));  // and the gap is never too small
      }
      if (part.complete) CHECK(part.gap == 0.0);
      was_short |= !part.complete;
    }
    CHECK(was_short);
    CHECK(gap == 0.0);
    options.threads = 1;
    options.most_points = 1'000;
    const RlSearch alone = search_rl(pricer->rl(), space, options);
    options.threads = 3;
    check_equal(alone, search_rl(pricer->rl(), space, options));
  }
}

TEST_CASE("a space beyond a billion points is answered with a proven gap") {
  const auto pricer = pricer_for(searched());
  RlSpace space = default_rl_space(pricer->scenario());
  space.memory_fraction.clear(), space.bucket_bytes.clear();
  for (int i = 0; i < 400; ++i) space.memory_fraction.push_back(0.5 + 0.001 * i);
  for (int i = 0; i < 400; ++i) space.bucket_bytes.push_back(1e8 + 1e7 * i);
  const RlSearch found = search_rl(pricer->rl(), space, {.keep = 3, .threads = 2, .most_points = 300'000});
  CHECK(found.points > 1'000'000'000);
  CHECK_FALSE(found.complete);
  REQUIRE(!found.best.empty());
  CHECK(found.gap >= 0.0);
  CHECK(found.gap < 0.2);
  CHECK(found.priced < 2'000'000);
}

std::vector<TransitionOrder> orders_in_which_the_rollout_sleeps() {
  std::vector<TransitionOrder> all;
  for (const bool params : {false, true})
    for (const bool optimizer : {false, true})
      for (const TransitionOrder& o : legal_transitions(params, optimizer, true, true)) all.push_back(o);
  return all;
}

TEST_CASE("transition orders: one walked once has the prices of one walked each time, bit for bit") {
  std::vector<TransitionOrder> all = orders_in_which_the_rollout_sleeps();
  for (const TransitionOrder& o : legal_transitions(true, true, false, true)) all.push_back(o);
  all.emplace_back();
  CHECK(rc::check([&] {
    // Thirds: sums are rounded, so their order shows.
    const auto size = [] { return static_cast<double>(*rc::gen::inRange(0, 1000)) / 3.0; };
    const ShiftBytes z{.params = size(),
                       .optimizer = size(),
                       .weights = size(),
                       .kv = size(),
                       .keeps_weights = *rc::gen::arbitrary<bool>(),
                       .staging = size(),
                       .host_staging = size()};
    for (const TransitionOrder& o : all) RC_ASSERT(ShiftShape(o).price(z) == price_shift(o, z));
  }));
}

TEST_CASE("transition orders: what is not beaten is enough, whatever the sizes") {
  const std::vector<TransitionOrder> all = orders_in_which_the_rollout_sleeps();
  const bool level_1 = GENERATE(false, true);
  const std::vector<TransitionOrder> kept = undominated(all, level_1);
  CHECK(kept.size() < all.size() / 10);
  CHECK(kept.size() >= 4);
  CHECK(rc::check([&] {
    const auto size = [] { return static_cast<double>(*rc::gen::inRange(0, 1000)); };
    const ShiftBytes z{.params = size(),
                       .optimizer = size(),
                       .weights = size(),
                       .kv = size(),
                       .keeps_weights = level_1,
                       .staging = size(),
                       .host_staging = size()};
    // For every weight of bytes against copies, the best of all is among the kept.
    for (const double copies : {0.0, 0.01, 0.3, 10.0}) {
      const auto cost = [&](const TransitionOrder& o) {
        const ShiftPrice s = price_shift(o, z);
        return std::max({s.sync_bytes, s.wake_bytes, z.weights + z.kv + s.rollout_rest}) +
               copies * (s.down + s.up + s.asleep + (s.sync_from_host ? z.params : 0.0));
      };
      double best = 1e300, best_kept = 1e300;
      for (const TransitionOrder& o : all) best = std::min(best, cost(o));
      for (const TransitionOrder& o : kept) best_kept = std::min(best_kept, cost(o));
      RC_ASSERT(best == best_kept);
    }
  }));
}

TEST_CASE("transition orders of the systems, moment by moment") {
  // P 10, O 30, W 20, K 40, buckets 2, from the host 1 more.
  const ShiftBytes z{.params = 10, .optimizer = 30, .weights = 20, .kv = 40, .staging = 2, .host_staging = 1};
  const auto price = [&](const char* name) { return price_shift(*transition_from(name, true, true), z); };
  // hotbunk: P+O, P+W, P+W+2, P+W, W+K | W+K, then P+O. The fullest before the rollout: W+K = 60; after it 60.
  CHECK(price("hotbunk").sync_bytes == 60);
  CHECK(price("hotbunk").wake_bytes == 60);
  CHECK(price("hotbunk").rollout_rest == 0);
  CHECK(price("hotbunk").down == 40);
  CHECK(price("hotbunk").up == 40);
  CHECK(price("hotbunk").asleep == 40);
  // slime syncs from the host; verl loads the parameters once more and offloads them again.
  CHECK(price("slime").sync_from_host);
  CHECK_FALSE(price("verl").sync_from_host);
  CHECK(price("verl").down == 50);
  CHECK(price("verl").up == 50);
  // Both awake, the dangerous moment: training wakes before the rollout slept: P+O+W+K = 100.
  const auto late = transition_from(
      "sleep_optimizer-wake_rollout-sync-sleep_train-wake_kv-rollout-wake_train-sleep_rollout", true, true);
  REQUIRE(late.has_value());
  CHECK(price_shift(*late, z).wake_bytes == 100);
  // KV before the parameters left: P+W+K = 70.
  const auto early = transition_from(
      "sleep_optimizer-wake_rollout-wake_kv-sync-sleep_train-rollout-sleep_rollout-wake_train", true, true);
  CHECK(price_shift(*early, z).sync_bytes == 72);
  // Nothing sleeps: P+O besides W+K all the time.
  CHECK(price_shift(*transition_from("hotbunk", false, false), z).sync_bytes == 102);
  CHECK(price_shift(*transition_from("hotbunk", false, false), z).train_rest == 60);
  // What sleeps is given back and mapped again: P+O, W+K. verl's parameters once more.
  CHECK(price("hotbunk").unmapped == 100);
  CHECK(price("hotbunk").mapped == 100);
  CHECK(price("verl").mapped == 110);
  CHECK(price_shift(*transition_from("hotbunk", false, false), z).mapped == 0);
  // Level 1: the weights go to the host beside P+O when the rollout sleeps, and come back for the next sync.
  ShiftBytes kept = z;
  kept.keeps_weights = true;
  const ShiftPrice level_1 = price_shift(*transition_from("hotbunk", true, true), kept);
  CHECK(level_1.down == 60);
  CHECK(level_1.up == 60);
  CHECK(level_1.asleep == 60);
  CHECK(level_1.mapped == 100);
  // A rollout that never sleeps keeps nothing.
  CHECK(price_shift(*transition_from("hotbunk", true, false), kept).down == 40);
}

}  // namespace hotbunk
