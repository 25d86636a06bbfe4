// Plans of every kind of layout as people read them, with what evaluation says of them: tests/planner/plans/*.test hold
// a scenario and what to show of its plan, `----`, and the text (golden_text.h).
//
//   plan FILE [key=value]...   of scenarios/FILE.yaml with these settings: lowered, or else of priced blocks; then a
//                              line each:
//   groups                     programs, their ranks, and who communicates
//   tasks                      phases, and the roles that play them: what several play is the order between their tasks
//   schedule N                 of a pipeline: which blocks its stages run, in which order, for N micro-batches
//   calls PHASE [PROGRAM]      the calls of its blocks: body, name, and what they send over which group; six and more
//                              of a kind that follow one another in one line
//   memory                     the peak of each phase, with the categories alive then, of each program's fullest rank
//   traffic                    what a rank of each program sends in an iteration: calls and payload by phase and group
//
// What stands under `traffic` of a lowered plan is of one iteration with mean lengths (expected_runs).
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <map>
#include <optional>
#include <sstream>

#include "graph/print.h"
#include "layout/pipeline_turns.h"
#include "lowering/lower.h"
#include "planner/answers/answers.h"
#include "planner/answers/plan_answer.h"
#include "planner/price/evaluate.h"
#include "planner/priced/priced_plan.h"
#include "planner/rl/rl_model.h"
#include "spec/catalog.h"
#include "spec/loader.h"
#include "tests/golden_text.h"
#include "tests/paths.h"
#include "trace/static_memory.h"

using namespace hotbunk;

namespace {

struct Shown {
  Scenario scenario;
  Plan plan;
  RlPoint point;
  bool lowered = false;
};

Shown plan_of(const std::string& line) {
  std::istringstream words(line);
  std::string word, file;
  words >> word >> file;
  REQUIRE(word == "plan");
  std::vector<std::string> sets;
  while (words >> word) sets.push_back(word);
  auto s = load_scenario(fmt::format("{}/scenarios/{}.yaml", source_folder, file), sets);
  if (!s) FAIL(render(s.error()));
  const auto pricer = ScenarioPricer::make(*s, catalog_root());
  if (!pricer) FAIL(render(pricer.error()));
  Shown out{.scenario = *s, .plan = {}, .point = (*pricer)->point(), .lowered = why_not_lowered(*s).empty()};
  if (out.lowered) {
    out.plan = lower(*s).value();
    return out;
  }
  auto job = priced_job(**pricer);
  if (!job) FAIL(render(job.error()));
  out.scenario = std::move(job->scenario), out.plan = std::move(job->plan);
  return out;
}

Rank first_rank(const Plan& plan, std::size_t program) {
  return static_cast<Rank>(std::ranges::find(plan.program_of_rank, static_cast<std::int32_t>(program)) -
                           plan.program_of_rank.begin());
}

std::string groups_text(const Plan& plan) {
  std::string out;
  for (std::size_t p = 0; p < plan.programs.size(); ++p) {
    std::vector<Rank> ranks;
    for (Rank r = 0; r < plan.num_ranks(); ++r)
      if (plan.program_of_rank[static_cast<std::size_t>(r)] == static_cast<std::int32_t>(p)) ranks.push_back(r);
    out += fmt::format("program {} of {}: ranks {}\n", p, plan.roles[static_cast<std::size_t>(plan.programs[p].role)],
                       fmt::join(ranks, " "));
  }
  for (const GroupFamily& family : plan.groups) {
    std::string members;
    for (const std::vector<Rank>& group : family.groups)
      if (group.size() > 1) members += fmt::format(" [{}]", fmt::join(group, " "));
    if (!members.empty()) out += fmt::format("{}:{}\n", family.name, members);
  }
  return out;
}

std::string tasks_text(const Plan& plan) {
  std::string out;
  for (const PhaseInfo& phase : plan.phases) {
    std::vector<std::string> players;
    for (const Player& p : phase.players)
      players.push_back(plan.roles[static_cast<std::size_t>(p.role)] +
                        (p.steps_back > 0 ? fmt::format(" {} back", p.steps_back) : ""));
    out += fmt::format("{:<16} {:<10} {}\n", phase.name,
                       phase.when == When::prologue   ? "before"
                       : phase.when == When::epilogue ? "after"
                                                      : "iteration",
                       fmt::join(players, " with "));
  }
  return out;
}

std::string schedule_text(const Shown& shown, std::int64_t micro_batches) {
  std::string out;
  const auto turns = pipeline_turns(pipeline_of(shown.scenario), micro_batches);
  for (std::size_t stage = 0; stage < turns.size(); ++stage) {
    const std::size_t train = static_cast<std::size_t>(shown.plan.phase_index("train"));
    std::map<std::string, std::int32_t> numbers;
    for (const Block& b : shown.plan.programs[stage].phases[train]) numbers.emplace(b.name, 0);
    const StageBlocks blocks(numbers);
    std::vector<std::string> names;
    for (const StageTurn& t : turns[stage]) names.push_back(blocks.name_of(t));
    out += fmt::format("stage {}: {}\n", stage, fmt::join(names, " "));
  }
  return out;
}

/// " all_gather over fsdp, 2 all_reduce over train_tp"
std::string sent_by(const Plan& plan, const Body& body) {
  std::vector<std::pair<std::string, int>> kinds;
  for (const Op& op : body.ops) {
    if (!is_communication(op.kind)) continue;
    const std::string what =
        fmt::format("{} over {}", name_of(op.kind), plan.groups[static_cast<std::size_t>(op.group)].name);
    const auto at = std::ranges::find(kinds, what, [](const auto& k) { return k.first; });
    if (at == kinds.end()) kinds.emplace_back(what, 1);
    else ++at->second;
  }
  std::vector<std::string> words;
  for (const auto& [what, count] : kinds) words.push_back(count > 1 ? fmt::format("{} {}", count, what) : what);
  return words.empty() ? "" : fmt::format("  {}", fmt::join(words, ", "));
}

std::string calls_text(const Plan& plan, const std::string& phase, std::size_t of_program) {
  const std::int32_t index = plan.phase_index(phase);
  if (index < 0) return fmt::format("no phase '{}'\n", phase);
  const Program& program = plan.programs[of_program];
  std::string out = fmt::format("{} of program {}\n", phase, of_program);
  for (const Block& block : program.phases[static_cast<std::size_t>(index)]) {
    out += fmt::format("  {}:\n", block.name);
    const auto body_of = [&](const Call& call) -> const Body& {
      return program.bodies[static_cast<std::size_t>(call.body)];
    };
    const auto alike = [&](const Call& a, const Call& b) {
      const auto stem = [](const std::string& name) { return name.substr(0, name.find('/')); };
      return stem(body_of(a).name) == stem(body_of(b).name) && sent_by(plan, body_of(a)) == sent_by(plan, body_of(b));
    };
    for (std::size_t c = 0, last; c < block.calls.size(); c = last) {
      for (last = c + 1; last < block.calls.size() && alike(block.calls[c], block.calls[last]);) ++last;
      if (last - c < 6) last = c + 1;
      const Call& call = block.calls[c];
      std::string name = call.name.empty() ? "-" : call.name;
      if (last > c + 1) name += fmt::format(" and {} more", last - c - 1);
      out += fmt::format("    {:<26} {:<24}{}", body_of(call).name, name, sent_by(plan, body_of(call)));
      out.erase(out.find_last_not_of(' ') + 1);
      out += '\n';
    }
  }
  return out;
}

std::string memory_text(const Plan& plan) {
  std::string out;
  for (std::size_t program = 0; program < plan.programs.size(); ++program) {
    const RankMemory m = static_memory(plan, first_rank(plan, program));
    out += fmt::format("memory of program {}: {} live, {} mapped\n", program, m.device.peak_bytes,
                       m.device.mapped_peak_bytes);
    for (std::size_t p = 0; p < plan.phases.size(); ++p) {
      const auto at = m.device.phase_peaks.find(static_cast<std::int16_t>(p));
      if (at == m.device.phase_peaks.end() || at->second.peak_bytes == 0) continue;
      out += fmt::format("  {:<16} {:>12}", plan.phases[p].name, at->second.peak_bytes);
      for (std::size_t c = 0; c < num_categories; ++c)
        if (const std::int64_t bytes = at->second.by_category[c]; bytes > 0)
          out += fmt::format("  {} {}", name_of(static_cast<Category>(c)), bytes);
      out += '\n';
    }
  }
  return out;
}

std::string traffic_text(const Shown& shown) {
  std::string out;
  const PlanRuns runs = expected_runs(shown.scenario, shown.point);
  for (std::size_t program = 0; program < shown.plan.programs.size(); ++program) {
    const Rank rank = first_rank(shown.plan, program);
    out += fmt::format("traffic of rank {} in an iteration\n", rank);
    for (const PlanTraffic& t : traffic_of(shown.plan, rank, runs)) {
      if (shown.plan.group_of(t.group, rank).size() < 2) continue;
      out += fmt::format("  {:<14} {:<14} {:<16} {:>5} calls {:>10} B", name_of(t.phase), t.group, name_of(t.op),
                         t.calls, t.payload_bytes);
      if (t.padding_bytes > 0) out += fmt::format(" and {} of padding", t.padding_bytes);
      out += '\n';
    }
  }
  return out;
}

std::string shown_text(const Shown& shown, const std::string& line) {
  std::istringstream words(line);
  std::string what, word;
  words >> what >> word;
  std::size_t program = 0;
  words >> program;
  if (what == "groups") return groups_text(shown.plan);
  if (what == "tasks") return tasks_text(shown.plan);
  if (what == "schedule") return schedule_text(shown, std::stoll(word));
  if (what == "calls") return calls_text(shown.plan, word, program);
  if (what == "memory") return memory_text(shown.plan);
  if (what == "traffic") return traffic_text(shown);
  FAIL("unknown request '" << line << "'");
  return "";
}

std::string run_case(const std::string& input) {
  std::istringstream in(input);
  std::string line, out;
  std::getline(in, line);
  const Shown shown = plan_of(line);
  while (std::getline(in, line)) out += shown_text(shown, line);
  return out;
}

}  // namespace

TEST_CASE("plans of pipelines, tensor-parallel ranks, experts, roles and engines as text") {
  const auto texts =
      hotbunk::test::check_golden_texts(std::filesystem::path(source_folder) / "tests/planner/plans", run_case);
  for (const auto& [file, text] : texts) {
    INFO(file);
    CHECK(std::ranges::count(text, '\n') > 10);
    CHECK(std::ranges::count(text, '\n') < 120);  // short enough to be read
  }
  CHECK(texts.size() >= 5);
}
