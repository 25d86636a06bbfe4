#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "base/file.h"
#include "base/format.h"
#include "base/json.h"
#include "base/parallel.h"
#include "base/printable.h"
#include "cli/command.h"
#include "cli/run_folder.h"
#include "cli/step_lines.h"
#include "cli/streams.h"
#include "reports/metrics_jsonl.h"
#include "spec/validate.h"
#include "trace/spread.h"
#include "trace/summary.h"

namespace hotbunk {
namespace {

struct SimulateArguments {
  ScenarioOptions scenario;
  std::string out, lengths;
  std::int32_t span_steps = 2, seeds = 1;
  std::vector<Rank> ops;
  bool all_lengths = false;
};

/// Of a simulation's lengths.jsonl unless --all-lengths: some dozen iterations of 16,384 prompts. What is left out is
/// drawn again from the folder's scenario.
constexpr std::int64_t most_length_bytes = std::int64_t{4} << 20;

/// E143: there is no such rank.
Status check_ranks(const std::vector<Rank>& ranks, const Plan& plan) {
  for (const Rank r : ranks)
    if (r < 0 || r >= plan.num_ranks())
      return fail(Diagnostic{.code = "E143",
                             .message = fmt::format("--ops {}: the plan has no such rank", r),
                             .where = {},
                             .notes = {},
                             .help = fmt::format("give ranks from 0 to {}", plan.num_ranks() - 1)});
  return {};
}

/// Replayed, or nothing: then they are drawn.
Result<std::optional<StepLengths>> lengths_of(const SimulateArguments& o, const Job& job) {
  if (o.lengths.empty()) return std::optional<StepLengths>();
  auto recorded = recorded_lengths(o.lengths, job.scenario);
  if (!recorded) return fail(std::move(recorded.error()));
  return std::optional(std::move(*recorded));
}

struct WrittenLengths {
  std::int32_t steps = 0;  // the first ones, that lengths.jsonl has
  LengthCounts responses;  // of all
};

/// The files of lines that a simulation has: the metrics of the iterations that the trace has rows of, and lengths that
/// belong to the trace, where something is rolled out or they were given; as many as `most_bytes` have room for.
Result<std::optional<WrittenLengths>> write_lines(const RunFolder& folder, const Job& job, const Trace& trace,
                                                  const std::optional<StepLengths>& replayed, std::int64_t most_bytes) {
  if (auto s = write_file_atomic(folder.metrics(), metrics_jsonl(job.plan, job.scenario, trace)); !s)
    return fail(std::move(s.error()));
  if (!replayed && job.plan.phase_index("rollout") < 0) return std::optional<WrittenLengths>();
  auto lines = StepLines::create(folder.lengths());
  if (!lines) return fail(std::move(lines.error()));
  WrittenLengths out;
  for (std::int32_t step = 1; step <= job.scenario.steps; ++step) {
    const SampleLengths lengths = replayed ? (*replayed)(step) : draw_lengths(job.scenario, step);
    count_responses(lengths, out.responses);
    if (out.steps < step - 1) continue;
    const std::string line = lengths_line(step, lengths);
    if (step > 1 && lines->bytes() + std::ssize(line) > most_bytes) continue;
    if (auto s = lines->add(line); !s) return fail(std::move(s.error()));
    out.steps = step;
  }
  return std::optional(std::move(out));
}

/// Of which iterations the folder has lengths; "" where it has all.
std::string kept_lengths_text(const Job& job, const std::optional<WrittenLengths>& lengths) {
  if (!lengths || lengths->steps == job.scenario.steps) return "";
  return fmt::format(
      "lengths.jsonl has those of the first {} of {} iterations (4 MiB); the scenario and its seed draw them all "
      "again. "
      "--all-lengths keeps them.\n",
      format_count(lengths->steps), format_count(job.scenario.steps));
}

/// Plays the draws behind the first, whose summary is there, and says how far they scatter. What a draw costs is its
/// summary's figures: traces are let go one by one.
Result<nlohmann::ordered_json> spread_of(const Job& job, const Hardware& hardware, std::int32_t seeds,
                                         const nlohmann::ordered_json& first) {
  std::vector<Result<DrawnFigures>> draws(static_cast<std::size_t>(seeds), figures_of(first));
  in_parallel(static_cast<std::size_t>(seeds - 1), [&](std::size_t i) {
    const auto trace = simulate_job(job, hardware,
                                    {.lengths = {},
                                     .span_steps = 0,
                                     .enforce_capacity = false,
                                     .disturbed = true,
                                     .shows_progress = false,
                                     .seed_offset = static_cast<std::int64_t>(i) + 1});
    if (trace) draws[i + 1] = figures_of(summarize(job.plan, job.scenario, *trace));
    else draws[i + 1] = fail(trace.error());
  });
  std::vector<DrawnFigures> figures;
  for (auto& draw : draws) {
    if (!draw) return fail(std::move(draw.error()));
    figures.push_back(std::move(*draw));
  }
  return spread_json(figures, job.scenario.seed);
}

/// How far one draw may be off: what the rollout's seconds are in proportion to, beside that of other draws. null where
/// nothing is drawn.
nlohmann::ordered_json one_draw_json(const Job& job, const nlohmann::ordered_json& summary) {
  const auto longest = longest_responses(job.scenario);
  if (!longest || job.plan.phase_index("rollout") < 0) return nullptr;
  double rollout = 0.0, own = 0.0;
  for (const auto& phase : summary.at("phase_totals"))
    if (phase.at("name") == "rollout") rollout = phase.at("mean").get<double>();
  for (const auto& row : summary.at("metrics")) own = std::max(own, row.value("response_length/max", 0.0));
  const double steps = static_cast<double>(std::max<std::int64_t>(1, job.scenario.steps));
  const double share = longest->deviation / std::max(longest->mean, 1.0) / std::sqrt(steps);
  return {{"longest_response", own},
          {"others", {{"draws", longest->draws}, {"mean", longest->mean}, {"standard_deviation", longest->deviation}}},
          {"rollout_seconds", rollout},
          {"may_be_off_seconds", share * rollout}};
}

std::string one_draw_text(const nlohmann::ordered_json& draw) {
  if (draw.is_null()) return "";
  const auto& others = draw.at("others");
  const double rollout = draw.at("rollout_seconds").get<double>(), off = draw.at("may_be_off_seconds").get<double>();
  return fmt::format(
      "\nLengths are one draw, whose longest response has {:.0f} tokens; that of other iterations has {:.0f} ± {:.0f}. "
      "An "
      "engine decodes until its longest is done:\nthe rollout may be off by some ± {} ({:.1f} %). --seeds 16 plays as "
      "many "
      "draws.\n",
      draw.at("longest_response").get<double>(), others.at("mean").get<double>(),
      others.at("standard_deviation").get<double>(), format_seconds(off), rollout > 0.0 ? 100.0 * off / rollout : 0.0);
}

/// Of whom the folder has more than sums; "" where it is everybody that was played.
std::string kept_ranks_text(const Plan& plan, const Trace& trace) {
  std::set<Rank> drawn;
  for (const Span& s : trace.spans) drawn.insert(s.rank);
  std::int64_t played = 0;
  for (Rank r = 0; r < plan.num_ranks(); ++r) played += trace.plays(r) ? 1 : 0;
  if (drawn.empty() || std::ssize(drawn) >= played) return "";
  return fmt::format(
      "Operations and memory over time are kept of {} of {} ranks no two of which are alike; of the others phases, "
      "peaks "
      "and traffic. --ops RANK keeps a rank whole.\n",
      format_count(std::ssize(drawn)), format_count(played));
}

/// Says so where engines are played less far ahead than the scenario lets them be.
void note_less_ahead(const Scenario& s) {
  const std::int64_t asked = s.algorithm.max_staleness, most = max_steps_back + 1;
  const std::int64_t played = s.sync.every > 1 ? 1 : most;
  if (s.placement != PlacementMode::disaggregated || s.algorithm.name == AlgorithmName::sft || asked <= played) return;
  fmt::print(stderr, "note: algorithm.max_staleness {}: engines are played {} ahead{}\n", asked,
             played == 1 ? "one iteration" : fmt::format("{} iterations", played),
             s.sync.every > 1 ? fmt::format(", as sync.every is {}", s.sync.every) : ", the most that a plan can say");
}

int run(const SimulateArguments& o) {
  int code = exit_done;
  const auto job = load_simulated_job(o.scenario, code);
  if (!job) return code;
  note_auto(job->scenario, job->exchange);
  note_less_ahead(job->scenario);
  const RunFolder folder{o.out};
  std::optional<ClaimedFolder> claimed;
  if (!o.out.empty()) {
    auto claim = claim_for_simulation(o.out, *job);
    if (!claim) return report_errors(claim.error());
    claimed = std::move(*claim);
  }
  const auto hardware = hardware_of(job->scenario);
  if (!hardware) return report_errors(hardware.error());
  if (Status known = check_ranks(o.ops, job->plan); !known) return report_errors(known.error());
  const auto error = fit_error(*job);
  auto lengths = lengths_of(o, *job);
  if (!lengths) return report_errors(lengths.error());
  const auto trace = simulate_job(
      *job, *hardware,
      {.lengths = *lengths, .span_steps = o.span_steps, .enforce_capacity = false, .by_op = o.ops, .disturbed = true});
  if (!trace) return report_errors(trace.error());
  auto summary = summarize(job->plan, job->scenario, *trace);
  if (!o.scenario.json) fmt::print("{}", render_summary(summary, use_colour()));
  if (o.seeds == 1 && !*lengths) {
    summary["one_draw"] = one_draw_json(*job, summary);
    if (!o.scenario.json) fmt::print("{}", one_draw_text(summary["one_draw"]));
  }
  if (o.seeds > 1) {
    auto spread = spread_of(*job, *hardware, o.seeds, summary);
    if (!spread) return report_errors(spread.error());
    if (!o.scenario.json) fmt::print("{}", render_spread(*spread, use_colour()));
    summary["seeds"] = std::move(*spread);
  }
  if (o.scenario.json) print_document(json_text(summary, 1));
  flush_output();
  if (!o.out.empty()) {
    if (auto s = begin_in_folder(folder, *job, "simulated", Takes::overwrite); !s) return report_errors(s.error());
    const auto written_lengths = write_lines(
        folder, *job, *trace, *lengths, o.all_lengths ? std::numeric_limits<std::int64_t>::max() : most_length_bytes);
    if (!written_lengths) return report_errors(written_lengths.error());
    RunRecord record{.trace = *trace, .predicted = nullptr, .calibration = hardware->source};
    if (*written_lengths) record.responses = (*written_lengths)->responses;
    const Status written = write_run_folder(folder, *job, record), ended = end_in_folder(folder);
    for (const Status* s : {&written, &ended})
      if (!*s) return report_errors(s->error());
    if (!o.scenario.json)
      fmt::print("{}{}Report: {}/report.html\n", kept_ranks_text(job->plan, *trace),
                 kept_lengths_text(*job, *written_lengths), printable_line(o.out));
  }
  if (error) {
    report_errors({*error});
    return exit_no;
  }
  const bool runs = unsupported_to_execute(job->scenario).empty() && on_this_machine(job->scenario, false);
  say_next(runs ? "run" : "explain", o.scenario);
  return exit_done;
}

}  // namespace

void add_simulate(CommandLine& line) {
  auto o = std::make_shared<SimulateArguments>();
  const Command sub =
      line.add_command("simulate", "execute the plan in virtual time: memory to the byte, traffic, timeline");
  add_scenario_options(sub, o->scenario);
  sub.option("--out", o->out, "write a run folder (plan, trace, summary, report) there");
  const Option lengths = sub.option("--lengths", o->lengths, "replay a run's lengths.jsonl instead of drawing lengths");
  sub.option("--seeds", o->seeds, "draw lengths with so many seeds, from the scenario's on: mean and deviation of all")
      .check(whole_in(1, 1 << 20))
      .excludes(lengths);
  sub.option("--trace-steps", o->span_steps, "iterations whose ops are kept in the trace").check(whole_from(0));
  sub.option("--ops", o->ops, "ranks whose ops and buffers are kept one by one: 0 or 0,3").with_commas();
  sub.flag("--all-lengths", o->all_lengths, "keep the lengths of every iteration in the run folder, not 4 MiB of them");
  sub.action([o] { return run(*o); });
}

}  // namespace hotbunk
