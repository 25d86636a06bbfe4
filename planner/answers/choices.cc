#include "planner/answers/choices.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <ranges>

#include "base/format.h"
#include "base/json.h"
#include "base/parallel.h"
#include "base/shell_quoted.h"
#include "lowering/lower.h"
#include "planner/answers/lowered_space.h"
#include "planner/answers/plan_answer.h"
#include "planner/answers/promising.h"
#include "planner/answers/stated_error.h"
#include "spec/catalog.h"
#include "spec/names.h"
#include "spec/pipeline_split.h"
#include "spec/scenario_keys.h"
#include "spec/validate.h"

namespace hotbunk {
namespace {

TrainEngine engine_of(Sharding sharding, TrainEngine own) {
  switch (sharding) {
    case Sharding::replicated:
      return TrainEngine::ddp;
    case Sharding::zero1:
      return own == TrainEngine::zero1 ? own : TrainEngine::megatron;
    case Sharding::zero2:
      return TrainEngine::zero2;
    default:
      return own == TrainEngine::fsdp1 ? own : TrainEngine::fsdp2;
  }
}

/// Layers of every stage and chunk as TrainModel splits them where they do not divide: empty when they do.
std::vector<std::int64_t> split_of(std::int64_t layers, std::int64_t pp, std::int64_t vpp) {
  return layers % (pp * vpp) == 0 ? std::vector<std::int64_t>{} : even_chunks(layers, pp * vpp);
}

/// Tokens that make the point's micro-batch: the scenario's own where they do.
std::int64_t micro_batch_tokens(const Scenario& s, const TrainPoint& p) {
  TrainPoint own{.dp = p.dp, .cp = p.cp, .ulysses = p.ulysses};
  fill_micro_batches(s, own);
  if (own.micro_batch == p.micro_batch) return s.train.micro_batch_tokens;
  const auto share = [&](double tokens) {
    return TrainLayout{.cp = p.cp, .ulysses = p.ulysses}.share_of(static_cast<std::int64_t>(std::ceil(tokens)));
  };
  // Cut by sequences, the tokens leave room for as many of the longest.
  if (s.train.micro_batch_sequences > 0) {
    const double most = static_cast<double>(p.micro_batch) * train_setting_of(s).longest;
    return std::max(s.train.micro_batch_tokens, share(most));
  }
  // One that holds all sequences of its rank may be shorter than the longest sequence, its buffer not (E217).
  const double longest = s.workload.longest();
  const double held =
      std::max(static_cast<double>(p.micro_batch) * static_cast<double>(train_setting_of(s).sequence), longest);
  return share(held);
}

/// The scenario's own name for it where that means it, another system's, or the steps.
std::string transition_text(const RlPoint& p, const std::string& own, bool rollout_sleeps) {
  // Only ours is legal beside layer-wise offload (E214).
  if (!p.train.optimizer_on_host && transition_from(own, p.sleeps(), rollout_sleeps) == p.transition) return own;
  for (const std::string_view name : transition_names())
    if (transition_from(name, p.sleeps(), rollout_sleeps) == p.transition) return std::string(name);
  return to_text(p.transition);
}

std::string fullest_moment(const RlPrice& p, const SearchOptions& o) {
  if (p.host_bytes > o.host_bytes) return "host";
  const double peak = p.peak_bytes();
  return peak == p.train_bytes ? "train" : peak == p.rollout_bytes ? "rollout" : peak == p.sync_bytes ? "sync" : "wake";
}

/// `own`: the scenario's point.
ChoiceRow row_of(const ScenarioPricer& s, const RlPoint& own, const RlPoint& point, const RlPrice& price,
                 const SearchOptions& o) {
  const RlSetting& set = s.rl().setting();
  ChoiceRow r;
  r.point = point;
  r.price = price;
  r.own = point == own;
  r.gpus = s.rl().gpus(point);
  const double gpus = static_cast<double>(r.gpus), seconds = std::max(price.iteration_seconds, 1e-300);
  r.tokens_per_gpu = s.tokens() / seconds / gpus;
  r.gpu_hours = objective_of(Objective::gpu_hours, s.rl(), point, price);
  r.money = r.gpu_hours * set.price_per_gpu_hour;
  r.flags = flags_of(s.scenario(), point);
  r.bytes_over = std::max({0.0, price.peak_bytes() - o.limit_bytes(), price.host_bytes - o.host_bytes});
  r.moment = fullest_moment(price, o);
  // Beside the error: what its allocator reserves `explain` says.
  const bool close = price.peak_bytes() * (1.0 + (o.plan_prices ? 0.0 : s.train().framework().memory_error.value)) >
                     s.rl().setting().device_bytes;
  r.verdict = !price.fits ? Verdict::no : close ? Verdict::tight : Verdict::fits;
  return r;
}

nlohmann::ordered_json row_json(const ChoiceRow& r) {
  nlohmann::ordered_json phases, moments;
  for (std::size_t i = 0; i < num_rl_phases; ++i)
    phases[std::string(name_of(static_cast<RlPhase>(i)))] = r.price.seconds[i];
  moments = {{"train", r.price.train_bytes},
             {"rollout", r.price.rollout_bytes},
             {"sync", r.price.sync_bytes},
             {"wake", r.price.wake_bytes}};
  nlohmann::ordered_json out = {{"layout", describe(r)},
                                {"own", r.own},
                                {"fits", r.price.fits},
                                {"verdict", name_of(r.verdict)},
                                {"gpus", r.gpus},
                                {"iteration_seconds", r.price.iteration_seconds},
                                {"tokens_per_second_per_gpu", r.tokens_per_gpu},
                                {"gpu_hours_per_million_samples", r.gpu_hours},
                                {"phases", phases},
                                {"overlapped_seconds", r.price.overlapped},
                                {"peak_bytes", r.price.peak_bytes()},
                                {"moments", moments},
                                {"host_bytes", r.price.host_bytes},
                                {"fullest", r.moment},
                                {"flags", r.flags}};
  if (!r.profile.empty()) out["profile"] = r.profile;
  if (r.money > 0) out["money_per_million_samples"] = r.money;
  if (!r.price.fits) out["bytes_over"] = r.bytes_over;
  return out;
}

/// "train -9.25 s, sync -1.34 s": what differs, the largest first.
std::string difference(const ChoiceRow& winner, const ChoiceRow& own) {
  std::vector<std::pair<double, std::string>> parts;
  for (std::size_t i = 0; i < num_rl_phases; ++i)
    parts.emplace_back(winner.price.seconds[i] - own.price.seconds[i], name_of(static_cast<RlPhase>(i)));
  parts.emplace_back(own.price.overlapped - winner.price.overlapped, "side by side");
  std::stable_sort(parts.begin(), parts.end(),
                   [](const auto& a, const auto& b) { return std::abs(a.first) > std::abs(b.first); });
  std::vector<std::string> seconds, bytes;
  for (const auto& [d, name] : parts)
    if (std::abs(d) >= 0.0005) seconds.push_back(fmt::format("{} {:+.3f} s", name, d));
  const std::pair<const char*, double> moments[] = {{"train", winner.price.train_bytes - own.price.train_bytes},
                                                    {"rollout", winner.price.rollout_bytes - own.price.rollout_bytes},
                                                    {"sync", winner.price.sync_bytes - own.price.sync_bytes},
                                                    {"wake", winner.price.wake_bytes - own.price.wake_bytes},
                                                    {"host", winner.price.host_bytes - own.price.host_bytes}};
  for (const auto& [name, d] : moments)
    if (std::abs(d) >= 0.001 * std::max(winner.price.peak_bytes(), own.price.peak_bytes()))
      bytes.push_back(fmt::format("{} {}{}", name, d < 0 ? "-" : "+", format_bytes(std::abs(d))));
  return fmt::format("  seconds: {}\n  bytes:   {}\n",
                     seconds.empty() ? "the same" : fmt::format("{}", fmt::join(seconds, ", ")),
                     bytes.empty() ? "the same" : fmt::format("{}", fmt::join(bytes, ", ")));
}

std::string flag_line(const ChoiceRow& r) {
  std::string out;
  for (const std::string& f : r.flags) out += " --set " + shell_quoted(f);
  return out;
}

}  // namespace

Scenario with_point(Scenario s, const RlPoint& p) {
  const RlPoint own = rl_point_of(s);
  return with_point(std::move(s), own, p);
}

Scenario with_point(Scenario s, const RlPoint& own, const RlPoint& p) {
  s.train.micro_batch_tokens = micro_batch_tokens(s, p.train);
  if (s.train.micro_batch_sequences > 0 && own.train.micro_batch != p.train.micro_batch)
    s.train.micro_batch_sequences = p.train.micro_batch;
  TrainLayout& t = s.train.layout;
  if (t.pp * t.vpp != p.train.pp * p.train.vpp || is_even(s.train))
    set_split(s.train, split_of(s.model.layers, p.train.pp, p.train.vpp));
  else if (t.pp != p.train.pp)  // layers of the first and the last stage mean others there
    set_split(s.train, split_layers(s));
  t.dp = p.train.dp, t.cp = p.train.cp, t.ulysses = p.train.ulysses, t.tp = p.train.tp;
  t.pp = p.train.pp, t.vpp = p.train.vpp, t.ep = p.train.ep, t.etp = p.train.etp;
  t.sp = p.train.sp;
  s.train.engine =
      p.train.sharding == own.train.sharding ? s.train.engine : engine_of(p.train.sharding, s.train.engine);
  // The scenario's word for all data ranks, their number or -1, stays where it still means that.
  const TrainPoint means = train_point_of(s);
  if (means.fsdp != p.train.fsdp || means.shard_over != p.train.shard_over ||
      (s.train.engine == TrainEngine::ddp && !t.shard_over.empty()) || (t.fsdp > 0 && t.shardable() % t.fsdp != 0))
    t.fsdp = p.train.fsdp, t.shard_over = text_of(p.train.shard_over);
  // "interleaved" and "1f1b" are one schedule, told apart by vpp.
  if (p.train.pp > 1 && schedule_named(s.train.pipeline_schedule) != p.train.schedule)
    s.train.pipeline_schedule = name_of(p.train.schedule);
  // FSDP keeps its optimizer where its shards are, and is priced so; where the master copy lies beside them the
  // scenario's own stays.
  if (s.optimizer.cpu_fraction > 0 && p.train.gathers_units() && !own.train.gathers_units()) {
    const auto frame = framework_named(s.profile, catalog_root());
    if (!frame || !frame->separate_master) s.optimizer.cpu_fraction = 0;
  }
  s.train.recompute = p.train.recompute;
  if (p.train.recompute != Recompute::selective) s.train.recompute_modules.clear();
  s.optimizer.name = p.train.optimizer;
  s.train.reshard_after_forward = p.train.reshard_after_forward, s.train.reshard_ranks = p.train.reshard_ranks;
  // On GPUs of its own training never sleeps, whatever its offload says; alone, it has nothing to sleep for.
  const bool shared = p.samples() && p.placement == PlacementMode::colocated;
  if (p.train.optimizer_on_host) s.train.offload = Offload::layerwise;
  else if (shared) s.train.offload = p.sleeps() ? Offload::sleep : Offload::none;
  else if (s.train.offload == Offload::layerwise) s.train.offload = Offload::none;
  if (p.train.optimizer_on_host) s.train.load = TrainSpec().load;  // E239
  if (!p.samples()) return s;
  s.placement = p.placement;
  if (shared && !(own.placement == p.placement && own.transition == p.transition && s.transition != "auto"))
    s.transition = transition_text(p, s.transition, s.rollout.sleep);
  RolloutLayout& r = s.rollout.layout;
  RolloutPoint dimensions = p.rollout;
  dimensions.strided = own.rollout.strided, dimensions.memory_fraction = own.rollout.memory_fraction;
  if (dimensions != own.rollout)
    r = {.tp = p.rollout.tp,
         .dp = p.rollout.engines,
         .ep = p.rollout.ep,
         .cp = p.rollout.cp,
         .pp = p.rollout.pp,
         .attention_dp = p.rollout.attention_dp,
         .order = r.order};
  if (r.order != RankOrder::automatic || p.rollout.strided != own.rollout.strided)
    r.order = p.rollout.strided ? RankOrder::strided : RankOrder::contiguous;
  s.rollout.memory_fraction = p.rollout.memory_fraction;
  if (mechanism_of(s.sync, p.placement) != p.sync) s.sync.mode = mode_of(p.sync);
  s.sync.bucket_bytes = std::llround(p.bucket_bytes);
  return s;
}

std::vector<std::string> flags_of(const Scenario& s, const RlPoint& p) { return flags_between(s, with_point(s, p)); }

std::vector<std::string> flags_between(const Scenario& s, const Scenario& chosen) {
  std::vector<std::string> out;
  for (const ScenarioKey& key : scenario_keys()) {
    if (!key.in_resolved) continue;
    const KeyValue value = key.get(chosen);
    if (!(value == key.get(s))) out.push_back(fmt::format("{}={}", key.path, yaml_of(value)));
  }
  return out;
}

namespace {

/// The best of the whole space by estimate that nothing executes: of what is lowered, the plan says whether it fits.
std::vector<ChoiceRow> better_beyond(const ScenarioPricer& s, const RlPoint& own, const RlSpace& space,
                                     SearchOptions options, const PlanPrices& lowered) {
  if (s.scenario().model.trains_in_part()) return {};  // estimates are of training everything
  options.keep = 4;
  options.nearest = options.front = false;
  for (const RlCandidate& c : search_layouts(s, space, options).best)
    if (RlPrice plan = c.price;
        !lowered(c.point, plan) && !unsupported_to_execute(with_point(s.scenario(), c.point)).empty())
      return {row_of(s, own, c.point, c.price, options)};
  return {};
}

}  // namespace

Result<Choices> choose(const ScenarioPricer& s, const ChoiceOptions& options) {
  if (auto known = price_known(s.scenario(), options.objective); !known) return fail(known.error());
  SearchOptions search{.keep = options.top,
                       .objective = options.objective,
                       .device_bytes = s.rl().setting().device_bytes,
                       .host_bytes = s.rl().setting().host_bytes,
                       .front = options.front,
                       .most_points = options.budget};
  const RlPoint own = s.point();
  Choices out;
  out.options = options;
  out.framework = s.train().framework().name;
  out.seconds_error = iteration_error(s.scenario());
  out.lowered = why_not_lowered(s.scenario()).empty();
  search.headroom = options.headroom.value_or(out.lowered ? 0.0 : s.train().framework().memory_error.value);
  out.options.headroom = search.headroom;
  RlSpace space = default_rl_space(s.scenario(), s.train().framework());
  RlSearch found;
  if (out.lowered) {
    const PlanPrices lowered = plan_prices(s.scenario(), s.train().cost());
    const RlSpace whole = space;
    const SearchOptions by_estimate = search;
    search.plan_prices = lowered;
    in_parallel(2, [&](std::size_t i) {
      if (i == 1) {
        out.beyond = better_beyond(s, own, whole, by_estimate, lowered);
        return;
      }
      keep_what_executes(space, s.scenario(), own.sync);
      if (options.budget > 0) {
        Promising promising = promising_training(s, own, space.train, by_estimate);
        out.cuts = space.train.cuts = std::move(promising.cuts);
        space.train.points = std::move(promising.points);
      }
      found = search_layouts(s, space, search);
    });
  } else {
    found = search_layouts(s, space, search);
  }
  for (const RlCandidate& c : found.best) out.rows.push_back(row_of(s, own, c.point, c.price, search));
  for (const RlCandidate& c : found.infeasible) {
    // Nearest first. More than twice the device is no near miss, and another micro-batch of a layout no news.
    ChoiceRow row = row_of(s, own, c.point, c.price, search);
    const bool far = row.bytes_over > (row.moment == "host" ? search.host_bytes : search.limit_bytes());
    if (!far && std::none_of(out.infeasible.begin(), out.infeasible.end(),
                             [&](const ChoiceRow& r) { return same_layout(r.point, c.point); }))
      out.infeasible.push_back(std::move(row));
  }
  for (const RlCandidate& c : found.pareto) out.pareto.push_back(row_of(s, own, c.point, c.price, search));
  out.points = found.points;
  out.priced = found.priced;
  out.feasible = found.feasible;
  out.complete = found.complete;
  out.gap = found.gap;
  out.limit_bytes = found.limit_bytes;
  out.reason = found.reason;
  RlPrice price = s.price(own);
  // What is put together of no parts, an engine in stages, is lowered whole.
  if (search.plan_prices && !search.plan_prices(own, price)) use_mapped_plan(s.scenario(), s.train().cost(), price);
  if (price.iteration_seconds > 0 &&
      std::none_of(out.rows.begin(), out.rows.end(), [](const auto& r) { return r.own; })) {
    // The headroom of a default refuses no layout that the scenario asks for: it is tight.
    const double limit = options.headroom ? search.limit_bytes() : search.device_bytes;
    price.fits = price.peak_bytes() <= limit && price.host_bytes <= search.host_bytes;
    const auto value = [&](const ChoiceRow& r) { return objective_of(options.objective, s.rl(), r.point, r.price); };
    ChoiceRow row = row_of(s, own, own, price, search);
    row.own = true;
    const auto at = std::find_if(out.rows.begin(), out.rows.end(),
                                 [&](const ChoiceRow& r) { return row.price.fits && value(row) < value(r); });
    out.rows.insert(at, std::move(row));
  }
  std::erase_if(out.beyond, [&](const ChoiceRow& r) {
    return !out.rows.empty() && out.rows[0].price.fits &&
           objective_of(options.objective, s.rl(), r.point, r.price) >=
               objective_of(options.objective, s.rl(), out.rows[0].point, out.rows[0].price);
  });
  return out;
}

std::string describe(const ChoiceRow& r) { return (r.profile.empty() ? "" : r.profile + ": ") + describe(r.point); }

std::string render(const Choices& c) {
  if (c.points == 0 && c.rows.empty()) return fmt::format("No layout to rank: {}\n", c.reason);
  std::string out = fmt::format("Best layouts{} by {}: {} of {} combinations priced{}, {} fit in {}\n",
                                c.lowered ? " that execute" : "", name_of(c.options.objective), format_count(c.priced),
                                format_count(c.points),
                                c.complete && c.priced == c.points ? ""
                                : c.complete                       ? ", the others of them are provably no better"
                                : c.gap <= 0 ? ", budget spent, none of the others is better than the first"
                                             : fmt::format(", budget spent, the best is within {:.2f} %", 100 * c.gap),
                                format_count(c.feasible), format_bytes(c.limit_bytes));
  if (c.options.objective == Objective::gpus)
    out += "All of them use the same GPUs, so the faster is better here; --gpus ? searches smaller clusters\n";
  // What was not tried is not said to be worse.
  if (!c.other_trainer.empty())
    out += fmt::format("Under {}, as the scenario says, and under {}\n", c.framework, c.other_trainer);
  out += fmt::format(
      "Not varied, as the scenario says: {}train.loss_chunk_tokens, the order of dimensions; "
      "docs/planner.md lists the values of the rest\n",
      c.other_trainer.empty() ? "train.engine, " : "");
  if (!c.cuts.empty())
    out += fmt::format("Training cut by: {}; yours, and the best by estimate (--budget 0: all)\n",
                       fmt::join(c.cuts | std::views::transform([](const TrainCut& t) { return describe(t); }), ", "));
  if (!c.reason.empty()) out += c.reason + "\n";
  out += fmt::format("Seconds of an iteration: {}\n", error_text(c.seconds_error));
  if (!c.rows.empty())
    out += fmt::format("  {:>5}  {:>11}  {:>12}  {:>10}  {:<8} {}\n", "", "iteration", "tokens/s/GPU", "fullest", "at",
                       "layout");
  int rank = 0;
  for (const ChoiceRow& r : c.rows) {
    rank += r.price.fits ? 1 : 0;
    out += fmt::format("  {:>5}  {:>11}  {:>12.0f}  {:>10}  {:<8} {}{}\n", r.own ? "yours" : fmt::format("{}", rank),
                       format_seconds(r.price.iteration_seconds), r.tokens_per_gpu, format_bytes(r.price.peak_bytes()),
                       r.moment, describe(r),
                       r.verdict == Verdict::tight ? "; tight"
                       : r.price.fits              ? ""
                                      : fmt::format("; does not fit, {} too much{}", format_bytes(r.bytes_over),
                                                    r.moment == "host" ? " host memory" : ""));
  }
  const auto own = std::find_if(c.rows.begin(), c.rows.end(), [](const ChoiceRow& r) { return r.own; });
  const bool differs = own != c.rows.end() && (own->price.iteration_seconds != c.rows.front().price.iteration_seconds ||
                                               own->price.peak_bytes() != c.rows.front().price.peak_bytes());
  if (differs && own != c.rows.begin() && c.rows.front().price.fits)
    out += fmt::format("Why 1 is better than yours (1 less yours)\n{}", difference(c.rows.front(), *own));
  const bool some = std::any_of(c.rows.begin(), c.rows.end(), [](const ChoiceRow& r) { return r.price.fits; });
  for (const ChoiceRow& r : c.infeasible)
    out += fmt::format("{}, but {} too much at {}: {} in {}\n", some ? "Better" : "Nearest", format_bytes(r.bytes_over),
                       r.moment, format_seconds(r.price.iteration_seconds), describe(r));
  for (const ChoiceRow& r : c.beyond)
    out += fmt::format("Better, but only priced, nothing executes it yet: {} in {}\n",
                       format_seconds(r.price.iteration_seconds), describe(r.point));
  rank = 0;
  for (const ChoiceRow& r : c.rows) {
    rank += r.price.fits ? 1 : 0;
    if (!r.own) out += fmt::format("To select {}:{}\n", rank, flag_line(r));
  }
  return out;
}

std::string to_json(const Choices& c) {
  auto cuts = nlohmann::ordered_json::array();
  for (const TrainCut& cut : c.cuts) cuts.push_back(describe(cut));
  nlohmann::ordered_json doc = {{"objective", name_of(c.options.objective)},
                                {"headroom", c.options.headroom.value_or(0.0)},
                                {"limit_bytes", c.limit_bytes},
                                {"points", c.points},
                                {"priced", c.priced},
                                {"feasible", c.feasible},
                                {"lowered", c.lowered},
                                {"cuts", cuts},
                                {"complete", c.complete},
                                {"gap", c.gap}};
  if (!c.reason.empty()) doc["reason"] = c.reason;
  const std::pair<const char*, const std::vector<ChoiceRow>*> lists[] = {
      {"best", &c.rows}, {"infeasible", &c.infeasible}, {"pareto", &c.pareto}, {"beyond", &c.beyond}};
  for (const auto& [name, rows] : lists) {
    doc[name] = nlohmann::ordered_json::array();
    for (const ChoiceRow& r : *rows) doc[name].push_back(row_json(r));
  }
  return json_text(doc, 2);
}

Result<Objective> objective_named(const std::string& text) {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < num_objectives; ++i) {
    names.emplace_back(name_of(static_cast<Objective>(i)));
    if (names.back() == text) return static_cast<Objective>(i);
  }
  return fail(
      Diagnostic{.code = "E262",
                 .message = fmt::format("'{}' is no objective", text),
                 .where = {},
                 .notes = {fmt::format("one of {}", fmt::join(names, ", "))},
                 .help = nearest_name(text, names).empty() ? "" : "did you mean " + nearest_name(text, names) + "?"});
}

}  // namespace hotbunk
