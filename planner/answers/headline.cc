#include "planner/answers/headline.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <utility>

#include "base/format.h"
#include "planner/answers/stated_error.h"
#include "planner/answers/verdict.h"
#include "trace/text_table.h"

namespace hotbunk {
namespace {

const ChoiceRow* own_row(const Choices& c) {
  const auto at = std::ranges::find_if(c.rows, &ChoiceRow::own);
  return at == c.rows.end() ? nullptr : &*at;
}

std::string cut_off(std::string line) {
  if (line.size() > headline_columns) line.resize(headline_columns - 3), line += "...";
  return line;
}

std::string verdict_line(const ScenarioPricer& s, const ChoiceRow& own, bool colour) {
  const RlSetting& set = s.rl().setting();
  const bool host = own.moment == "host";
  const char* const paints[] = {"1;32", "1;33", "1;31"};  // green, yellow, red
  std::string out =
      "Verdict: " + paint(std::string(name_of(own.verdict)), paints[static_cast<int>(own.verdict)], colour);
  out += fmt::format("; a GPU holds {} of {} at its fullest ({})", format_bytes(own.price.peak_bytes()),
                     format_bytes(set.device_bytes), host ? "the host is what lacks" : own.moment);
  if (own.price.host_bytes > 0)
    out += fmt::format(", a rank {} of {} in host memory", format_bytes(own.price.host_bytes),
                       format_bytes(set.host_bytes));
  if (own.bytes_over > 0) out += fmt::format(": {} too much", format_bytes(own.bytes_over));
  return out;
}

/// The longest phases, each with its error; the rest in one.
std::string seconds_line(const ScenarioPricer& s, const Choices& c, const ChoiceRow& own) {
  std::vector<std::pair<double, RlPhase>> phases;
  for (std::size_t i = 0; i < num_rl_phases; ++i)
    if (own.price.seconds[i] > 0) phases.emplace_back(own.price.seconds[i], static_cast<RlPhase>(i));
  std::ranges::stable_sort(phases, std::greater<>(), &std::pair<double, RlPhase>::first);
  std::vector<std::string> parts;
  double rest = 0.0;
  for (const auto& [seconds, phase] : phases)
    if (parts.size() < 4)
      parts.push_back(
          fmt::format("{} {} {}", name_of(phase), format_seconds(seconds),
                      error_text(phase_error(phase, s.scenario().cluster.gpu.name, c.framework, own.point.sync))));
    else rest += seconds;
  if (rest > 0) parts.push_back(fmt::format("the rest {}", format_seconds(rest)));
  return fmt::format("Iteration: {} {}; {}", format_seconds(own.price.iteration_seconds), error_text(c.seconds_error),
                     fmt::join(parts, ", "));
}

/// The best row, and what selects it.
std::vector<std::string> best_lines(const Choices& c, const ChoiceRow* own, bool colour) {
  const auto best = std::ranges::find_if(c.rows, [](const ChoiceRow& r) { return r.price.fits; });
  if (best == c.rows.end())
    return {cut_off("No layout of these GPUs fits" + (c.reason.empty() ? "" : ": " + c.reason))};
  if (best->own) return {fmt::format("Yours is the best of {} layouts that fit", format_count(c.feasible))};
  std::string gain;
  if (own != nullptr && own->price.fits && c.options.objective == Objective::seconds &&
      own->price.iteration_seconds > 0)
    gain = fmt::format(" ({:.0f} % less time than yours)",
                       100.0 * (1.0 - best->price.iteration_seconds / own->price.iteration_seconds));
  std::string flags;
  for (const std::string& f : best->flags) flags += fmt::format(" --set '{}'", f);
  return {cut_off(fmt::format("Best by {}: {}{}, {}", name_of(c.options.objective),
                              format_seconds(best->price.iteration_seconds), gain, describe(*best))),
          paint("  take it:", "1", colour) + flags};
}

std::string findings_line(const std::vector<Finding>& findings) {
  std::vector<std::string> named;
  for (const Finding& f : findings) {
    std::string one = fmt::format("{} {}", f.code, name_of(f.level));
    if (std::ranges::find(named, one) == named.end()) named.push_back(std::move(one));
  }
  return cut_off(fmt::format("lint: {}; its notes are below", fmt::join(named, ", ")));
}

constexpr std::array<std::pair<const char*, const char*>, 15> abbreviations{
    {{"dp", "data"},
     {"tp", "tensor"},
     {"pp", "pipeline stages"},
     {"vpp", "chunks a stage"},
     {"cp", "context"},
     {"ulysses", "sequences by heads"},
     {"ep", "experts"},
     {"etp", "inside experts"},
     {"sp", "norms cut by tokens"},
     {"replicated", "all state on every data rank (DDP)"},
     {"zero1", "optimizer sharded"},
     {"zero2", "and gradients"},
     {"zero3", "and parameters"},
     {"fsdp", "parameters, gradients, optimizer sharded"},
     {"memory", "the engine's share of a GPU"}}};

}  // namespace

std::string shorthand_of(const std::string& described) {
  std::vector<std::string> words;
  std::string word;
  for (const char c : described + " ") {
    if (std::isalnum(static_cast<unsigned char>(c)) != 0) {
      word += c;
      continue;
    }
    if (!word.empty() && std::ranges::find(words, word) == words.end()) words.push_back(word);
    word.clear();
  }
  std::vector<std::string> out;
  for (const auto& [shorthand, meaning] : abbreviations)
    if (std::ranges::find(words, shorthand) != words.end()) out.push_back(fmt::format("{} {}", shorthand, meaning));
  if (described.find(" sequences") != std::string::npos) out.emplace_back("8 x 2: micro-batches a step x sequences");
  return fmt::format("{}", fmt::join(out, "; "));
}

std::string headline(const ScenarioPricer& s, const Choices& c, const std::vector<Finding>& findings, bool colour) {
  const Scenario& scenario = s.scenario();
  const ChoiceRow* const own = own_row(c);
  std::string named;
  std::vector<std::string> lines;
  if (own != nullptr) {
    named = describe(own->point);
    std::string apart;
    for (const auto& [is_apart, model] : {std::pair(s.rl().setting().critic_apart, "critic"),
                                          std::pair(s.rl().setting().reference_apart, "reference model")})
      if (is_apart) apart += fmt::format(" and {} more of the {}", own->point.train.ranks(), model);
    lines = {cut_off(fmt::format("{} on {} {}{}: {}", scenario.name, scenario.cluster.ranks(),
                                 scenario.cluster.gpu.name, apart, named)),
             verdict_line(s, *own, colour), seconds_line(s, c, *own)};
  } else {
    lines = {fmt::format("{} on {} {}", scenario.name, scenario.cluster.ranks(), scenario.cluster.gpu.name),
             "Verdict: " + paint("no", "1;31", colour) + "; this layout has no price, the error says why"};
  }
  for (std::string& line : best_lines(c, own, colour)) lines.push_back(std::move(line));
  if (!c.rows.empty() && !c.rows.front().own) named += " " + describe(c.rows.front().point);
  if (!findings.empty()) lines.push_back(findings_line(findings));
  if (!named.empty()) lines.push_back(paint(cut_off(shorthand_of(named)), "2", colour));
  return fmt::format("{}\n", fmt::join(lines, "\n"));
}

std::vector<Finding> lint_beside(const ScenarioPricer& s, const Choices& c) {
  Explanation e;
  e.point = s.point();
  e.capacity_bytes = s.rl().setting().device_bytes, e.host_capacity_bytes = s.rl().setting().host_bytes;
  if (const ChoiceRow* const own = own_row(c)) {
    e.point = own->point, e.price = own->price;
    e.verdict = verdict_of(s, own->point, own->price, {}, c.lowered);
  } else {
    e.unpriced = s.why_unpriced(e.point);
    if (!e.unpriced) return {};
  }
  return lint_beside(s, e);
}

}  // namespace hotbunk
