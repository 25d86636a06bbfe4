// hotbunk import: a launch of another system as a scenario, and whether it fits.
#include "interop/import.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/format.h"
#include "base/json.h"
#include "base/printable.h"
#include "base/shell_quoted.h"
#include "cli/command.h"
#include "cli/output.h"
#include "cli/streams.h"
#include "planner/answers/answers.h"
#include "planner/answers/lint.h"
#include "planner/answers/stated_error.h"
#include "spec/catalog.h"
#include "spec/loader.h"

namespace hotbunk {
namespace {

using Json = nlohmann::ordered_json;

struct ImportArguments {
  std::string system, launch, out;
  std::vector<std::string> words, variables, sets;
  bool json = false, overwrite = false;
};

/// The first word is a file where it is one, or is called as one; the others are the launch's own.
Result<LaunchSource> source_of(const ImportArguments& o) {
  LaunchSource source;
  source.words = o.words;
  const std::string extension = std::filesystem::path(o.launch).extension().string();
  std::error_code ignored;
  const bool is_named = extension == ".sh" || extension == ".yaml" || extension == ".yml" || extension == ".toml";
  if (o.launch.find('=') == std::string::npos && (is_named || std::filesystem::is_regular_file(o.launch, ignored)))
    source.file = o.launch;
  else source.words.insert(source.words.begin(), o.launch);
  for (const std::string& text : o.variables) {
    const auto equals = text.find('=');
    if (equals == std::string::npos || equals == 0)
      return fail(Diagnostic{.code = "E143",
                             .message = fmt::format("--var {}: NAME=VALUE is expected", text),
                             .where = {},
                             .notes = {},
                             .help = "for example --var NNODES=4"});
    source.variables[text.substr(0, equals)] = text.substr(equals + 1);
  }
  return source;
}

Json keys_document(const ImportedScenario& imported) {
  Json out = Json::array();
  for (const ImportedKey& key : imported.keys) {
    Json entry = {{"key", key.key}, {"fate", name_of(key.fate)}};
    // What is left out may be a secret.
    if (key.fate == KeyFate::taken || key.fate == KeyFate::defaulted) entry["value"] = key.value, entry["to"] = key.to;
    else entry["why"] = key.why;
    if (key.where.line > 0) entry["where"] = {{"file", key.where.file}, {"line", key.where.line}};
    out.push_back(std::move(entry));
  }
  return out;
}

/// "Assumed, …: KEY VALUE, …", a line; nothing where the launch and --set say all of it.
std::string assumptions(const ImportedScenario& imported) {
  std::vector<std::string> out;
  for (const ScenarioLine& line : imported.lines)
    if (line.comment.starts_with("assumed")) out.push_back(fmt::format("{} {}", line.key, line.value));
  return out.empty()
             ? ""
             : fmt::format("Assumed, as the launch does not say it (--set KEY=VALUE does): {}\n", fmt::join(out, ", "));
}

/// The answer before where it comes from.
std::string answer(const Explanation& e, const ImportedScenario& imported) {
  if (e.unpriced) return fmt::format("Verdict: no\n{}\n{}", assumptions(imported), render(e));
  const std::string host = e.host_capacity_bytes > 0 ? fmt::format(", host {} of {}", format_bytes(e.price.host_bytes),
                                                                   format_bytes(e.host_capacity_bytes))
                                                     : "";
  return fmt::format("Verdict: {}; of a rank's device {} of {}{}; {} an iteration, {}\n{}\n{}",
                     name_of(e.verdict.verdict), format_bytes(e.price.peak_bytes()), format_bytes(e.capacity_bytes),
                     host, format_seconds(e.price.iteration_seconds), error_text(e.seconds_error),
                     assumptions(imported), render(e));
}

/// The same import, which writes its scenario to a file that other commands read.
std::string with_file(const ImportArguments& o, const std::string& name) {
  const bool is_file = std::filesystem::is_regular_file(o.launch);
  std::string out = fmt::format("import {}{}", o.system, is_file ? " " + shell_quoted(o.launch) : "");
  for (const std::string& variable : o.variables) out += " --var " + shell_quoted(variable);
  for (const std::string& set : o.sets) out += " --set " + shell_quoted(set);
  // A name that no file has: the launch itself may be a YAML file here.
  std::string file = name + ".yaml";
  for (int i = 1; std::filesystem::exists(file); ++i)
    file = fmt::format("{}-scenario{}.yaml", name, i == 1 ? "" : fmt::format("-{}", i));
  out += " --out " + shell_quoted(file);
  std::vector<std::string> words = o.words;
  if (!is_file && !o.launch.empty()) words.insert(words.begin(), o.launch);
  for (std::size_t i = 0; i < words.size(); ++i) out += (i == 0 ? " -- " : " ") + shell_quoted(words[i]);
  return out;
}

Status write_scenario(const ImportArguments& o, const std::string& text) {
  std::error_code ignored;
  if (std::filesystem::exists(o.out, ignored) && !o.overwrite)
    return fail(Diagnostic{.code = "E154",
                           .message = fmt::format("{} is there already", o.out),
                           .where = {},
                           .notes = {},
                           .help = "another --out, or --overwrite"});
  return write_file_atomic(o.out, text);
}

int run(const ImportArguments& o) {
  const auto table = read_launch_table(o.system);
  if (!table) return report_errors(table.error());
  const auto source = source_of(o);
  if (!source) return report_errors(source.error());
  const auto imported = import_launch(*table, *source, o.sets);
  if (!imported) return report_errors(imported.error());
  if (!o.out.empty())
    if (auto s = write_scenario(o, imported->text); !s) return report_errors(s.error());
  const auto pricer = ScenarioPricer::make(imported->scenario, catalog_root());
  if (!pricer) {  // the scenario is read all the same
    if (!o.json && o.out.empty()) print_result(imported->text);
    flush_output();
    return report_errors(pricer.error());
  }
  const Explanation e = explain(**pricer);
  std::vector<Finding> findings = lint_beside(**pricer, e);
  std::ranges::move(lint_launch(**pricer, {imported->expandable}), std::back_inserter(findings));
  if (o.json) {
    Json doc = {{"schema", "hotbunk.import/1"},
                {"system", imported->system},
                {"release", imported->release},
                {"scenario_text", imported->text},
                {"scenario", json_from<Json>(resolved_json(imported->scenario))},
                {"keys", keys_document(*imported)},
                {"undefined", imported->undefined},
                {"notes", imported->notes},
                {"explanation", json_from<Json>(to_json(e))},
                {"findings", json_from<Json>(to_json(imported->scenario.name, findings))["findings"]}};
    print_document(json_text(doc, 2));
  } else if (o.out.empty()) {
    print_result(imported->text);  // the scenario alone, to be written to a file
    flush_output();
    fmt::print(stderr, "\n{}", printable(answer(e, *imported)));
  } else {
    print_result(printable(answer(e, *imported)));
    flush_output();
  }
  for (const std::string& name : imported->undefined)
    if (!o.json)
      fmt::print(stderr, "{} is not set in the script: --var {}=VALUE says it\n", printable_line(name),
                 printable_line(name.starts_with('$') ? name.substr(1) : "NAME"));
  if (!o.json) fmt::print(stderr, "{}", printable(render_beside(findings)));
  if (e.unpriced) return report_errors({*e.unpriced});
  if (o.out.empty() && !o.json) say_next(with_file(o, imported->name));
  if (!o.out.empty()) say_cure("plan", {.path = o.out, .sets = {}, .json = o.json}, e.remedy_flags);
  return e.price.fits ? exit_done : exit_no;
}

}  // namespace

void add_import(CommandLine& line) {
  auto o = std::make_shared<ImportArguments>();
  const Command sub =
      line.add_command("import", "a launch of verl, slime, NeMo-RL, OpenRLHF, Megatron or torchtitan as a scenario");
  sub.option("system", o->system, "whose launch it is").required().check(one_of(launch_systems()));
  sub.option("launch", o->launch, "a script, YAML or TOML").required();
  sub.option("words", o->words, "behind --: a command line's, as the shell expands them; over the file, or alone");
  sub.option("--var", o->variables, "NAME=VALUE of the script's shell").one_each_time();
  sub.option("--set", o->sets, "a scenario's key=value over what the launch says").one_each_time();
  sub.option("--out", o->out, "write the scenario there, and print the answer alone");
  sub.flag("--overwrite", o->overwrite, "of --out: a file that is there");
  sub.flag("--json", o->json, "one JSON document on stdout, nothing else there");
  sub.action([o] { return run(*o); });
}

}  // namespace hotbunk
