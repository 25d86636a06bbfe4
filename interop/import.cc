#include "interop/import.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "spec/loader.h"
#include "spec/scenario_keys.h"

namespace hotbunk {
namespace {

std::string place(const SourceLocation& where) {
  const std::string file = std::filesystem::path(where.file).filename().string();
  return where.line > 0 && where.file != "command line" ? fmt::format(" ({}:{})", file, where.line) : "";
}

/// A word of a table's pairs; "*" is any other. Pairs of a key of numbers name those that mean something else.
std::optional<std::string> translated(const WordPairs& words, const std::string& value, bool of_numbers = false) {
  if (words.empty()) return value;
  for (const auto& [theirs, ours] : words)
    if (theirs == value) return ours;
  if (of_numbers && number_of(value)) return value;
  for (const auto& [theirs, ours] : words)
    if (theirs == "*") return ours;
  return std::nullopt;
}

class Importer {
 public:
  Importer(const LaunchTable& table, const LaunchSettings& launch) : table_(table), launch_(launch) {}

  Result<ImportedScenario> run(const std::string& name, const std::string& folder,
                               const std::vector<std::string>& sets) {
    in_.folder = folder, in_.launch = name;
    for (const std::string& text : sets)
      if (const auto equals = text.find('='); equals != std::string::npos)
        in_.chosen[text.substr(0, equals)] = text.substr(equals + 1);
    out_.system = table_.system, out_.release = table_.release, out_.name = name;
    out_.notes = launch_.notes, out_.expandable = launch_.expandable;
    for (const auto& [key, value] : table_.scenario) in_.set(key, value, fmt::format("what {} is", table_.title));
    for (const LaunchKey& row : table_.keys) take(row);
    for (const Setting& setting : launch_.settings) leave(setting);
    if (in_.problems.empty())
      for (const LaunchRule& rule : launch_rules()) rule.read(in_);
    for (Diagnostic& problem : in_.problems)
      if (problem.code == "E153")
        for (const std::string& variable : out_.undefined)
          problem.notes.push_back(fmt::format("{} is not set in the script: --var NAME=VALUE sets it", variable));
    if (!in_.problems.empty()) return fail(std::move(in_.problems));
    for (const std::string& text : sets) {
      const auto equals = text.find('=');
      if (equals == std::string::npos || text.substr(0, equals) == "model" || text.starts_with("model.")) continue;
      std::erase_if(in_.lines, [&](const ScenarioLine& line) { return line.key == text.substr(0, equals); });
      in_.lines.push_back({text.substr(0, equals), text.substr(equals + 1), "--set", {}});
    }
    write();
    if (!in_.problems.empty()) return fail(std::move(in_.problems));
    return load();
  }

 private:
  const Setting* given(const std::string& key) const {
    const auto at = std::ranges::find(launch_.settings, key, &Setting::key);
    return at == launch_.settings.end() || at->value == "null" ? nullptr : &*at;
  }

  struct Effective {
    std::string value, said;
    SourceLocation where;
    const Setting* setting = nullptr;  // null: the default
  };

  std::string spoken(const std::string& key, const std::string& value, const SourceLocation& where,
                     bool bare = false) const {
    if (table_.form == LaunchForm::hydra || key.find('.') != std::string::npos)
      return fmt::format("{}={}{}", key, value, place(where));
    return fmt::format("--{}{}{}", key, bare ? "" : " " + value, place(where));
  }

  /// The row's value: given under its name or another spelling, else the release's default.
  std::optional<Effective> effective(const LaunchKey& row, bool reports) {
    std::optional<Effective> found;
    const auto add = [&](const std::string& key, const WordPairs& words) {
      const Setting* const setting = given(key);
      if (setting == nullptr) return;
      // The end of a path to a model says which it is.
      const bool end_is_known =
          row.role == "model" && setting->value.substr(setting->value.rfind('/') + 1).find('$') == std::string::npos;
      if (!setting->undefined.empty() && !end_is_known) {
        if (reports) unknown_value(*setting);
        return;
      }
      const auto value = translated(words, setting->value);
      if (!value) return;
      if (found && found->value != *value && reports)
        in_.problems.push_back({.code = "E151",
                                .message = fmt::format("{} and {} are one key and differ", found->setting->key, key),
                                .where = setting->where,
                                .notes = {found->said, spoken(key, setting->value, setting->where)},
                                .help = "keep one of them"});
      if (!found) found = {*value, spoken(key, setting->value, setting->where, setting->bare), setting->where, setting};
    };
    add(row.key, {});
    for (const auto& [key, words] : row.also) add(key, words);
    if (!found && row.default_value && *row.default_value != "null")
      found = {*row.default_value,
               fmt::format("{}'s default: {}", table_.title, spoken(row.key, *row.default_value, {})),
               {},
               nullptr};
    return found;
  }

  void unknown_value(const Setting& setting) {
    for (const std::string& name : setting.undefined)
      if (std::ranges::find(out_.undefined, name) == out_.undefined.end()) out_.undefined.push_back(name);
    if (!spoken_for_.insert(setting.key).second) return;
    out_.keys.push_back(
        {setting.key, setting.value, setting.where, KeyFate::ignored, "",
         fmt::format("{} is not set in the script: the release's default stands (--var NAME=VALUE sets it)",
                     fmt::join(setting.undefined, ", "))});
  }

  /// Whether the row is read at all, given what stands under the key that decides it.
  bool applies(const LaunchKey& row) {
    if (row.when_key.empty()) return true;
    const LaunchKey* const decides = table_.find(row.when_key);
    const auto value = decides == nullptr ? std::nullopt : effective(*decides, false);
    return value && std::ranges::find(row.when_values, value->value) != row.when_values.end();
  }

  void take(const LaunchKey& row) {
    if (row.key.ends_with('*') || (row.to.empty() && row.role.empty()) || !row.ignored.empty())
      return;  // what is left out is told with the settings
    if (!applies(row)) return;
    const auto value = effective(row, true);
    if (!value) return;
    std::vector<std::string> to;
    if (!row.role.empty()) {
      const auto word = translated(row.words, value->value);
      if (!word) return wrong_word(row, *value, row.words);
      // A default never takes the place of what another key of the role gives.
      const bool was_given = in_.roles.contains(row.role) && in_.roles[row.role].given;
      if (value->setting != nullptr || !was_given)
        in_.roles[row.role] = {*word, value->said, value->where, value->setting != nullptr};
      to.push_back(row.role);
    }
    for (const KeyTarget& target : row.to) {
      const KeyType type = find_scenario_key(target.scenario_key)->type;
      const auto word = translated(target.words, value->value, type == KeyType::integer || type == KeyType::real);
      if (!word) return wrong_word(row, *value, target.words);
      if (*word == "null") continue;
      in_.set(target.scenario_key, scaled(row, *word, *value), value->said, value->where);
      to.push_back(target.scenario_key);
    }
    const bool is_given = value->setting != nullptr;
    const std::string key = is_given ? value->setting->key : row.key;
    spoken_for_.insert(key);
    out_.keys.push_back({key, is_given ? value->setting->value : value->value, value->where,
                         is_given ? KeyFate::taken : KeyFate::defaulted, fmt::format("{}", fmt::join(to, ", ")), ""});
  }

  std::string scaled(const LaunchKey& row, const std::string& text, const Effective& value) {
    if (row.factor == 1.0) return text;
    if (const auto number = number_of(text)) return fmt::format("{}", *number * row.factor);
    in_.problems.push_back({.code = "E152",
                            .message = fmt::format("{} is no number", value.said),
                            .where = value.where,
                            .notes = {},
                            .help = {}});
    return "0";
  }

  void wrong_word(const LaunchKey& row, const Effective& value, const WordPairs& words) {
    std::vector<std::string> known;
    for (const auto& [theirs, ours] : words) known.push_back(theirs);
    in_.problems.push_back({.code = "E152",
                            .message = fmt::format("{}: {} is not planned", row.key, value.value),
                            .where = value.where,
                            .notes = {fmt::format("known are {}", fmt::join(known, ", "))},
                            .help = "change it in the launch, or with a word behind --"});
  }

  /// What no row took.
  void leave(const Setting& setting) {
    if (spoken_for_.contains(setting.key)) return;
    const LaunchKey* const row = table_.find(setting.key);
    ImportedKey key{setting.key, setting.value, setting.where, KeyFate::ignored, "", ""};
    if (row == nullptr) {
      key.fate = KeyFate::unknown;
      key.why = "not known here: nothing is made of it";
    } else if (setting.value == "null") {
      key.why = "null: as if it were not there";
    } else if (!row->ignored.empty()) {
      key.why = row->ignored;
    } else if (!applies(*row)) {
      key.why = fmt::format("read only where {} is {}", row->when_key, fmt::join(row->when_values, " or "));
    } else {
      key.why = "another spelling of it is given";
    }
    out_.keys.push_back(std::move(key));
  }

  // ---- the file ----------------------------------------------------------------------------------------------------

  void write() {
    const auto position = [](const std::string& key) {
      if (key == "model" || key.starts_with("model.")) return std::ptrdiff_t{-1};
      const auto& keys = scenario_keys();
      const auto at = std::ranges::find(keys, key, &ScenarioKey::path);
      if (at != keys.end()) return at - keys.begin();
      const auto in_section =
          std::ranges::find_if(keys, [&](const ScenarioKey& k) { return k.path.starts_with(key + "."); });
      return in_section - keys.begin();
    };
    std::ranges::stable_sort(in_.lines, {}, [&](const ScenarioLine& line) { return position(line.key); });
    std::vector<std::pair<std::string, std::string>> rows;  // text, comment
    std::vector<const ScenarioLine*> of_row;
    std::vector<std::string> open;
    for (const ScenarioLine& line : in_.lines) {
      std::vector<std::string> parts(1);
      for (const char c : line.key)
        if (c == '.') parts.emplace_back();
        else parts.back() += c;
      std::size_t same = 0;
      while (same < open.size() && same + 1 < parts.size() && open[same] == parts[same]) ++same;
      open.resize(same);
      for (; same + 1 < parts.size(); ++same) {
        rows.emplace_back(std::string(2 * same, ' ') + parts[same] + ":", "");
        of_row.push_back(nullptr);
        open.push_back(parts[same]);
      }
      rows.emplace_back(std::string(2 * same, ' ') + parts.back() + ": " + line.value, line.comment);
      of_row.push_back(&line);
    }
    std::string text = fmt::format("# Imported from {} by its release {}: what hotbunk read, and where it stood.\n",
                                   table_.title, table_.release);
    text += fmt::format("name: {}\n", yaml_text(out_.name));
    int line_number = 2;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const auto& [row, comment] = rows[i];
      text += comment.empty() ? row + "\n" : fmt::format("{:<44}  # {}\n", row, one_line(comment));
      ++line_number;
      if (of_row[i] != nullptr) origin_[line_number] = of_row[i]->where;
    }
    text += remarks();
    out_.text = std::move(text);
    out_.lines = in_.lines;
  }

  static std::string one_line(std::string text) {
    std::ranges::replace(text, '\n', ' ');
    std::ranges::replace(text, '\r', ' ');
    return text;
  }

  std::string remarks() const {
    std::string text;
    const auto section = [&](const std::string& title, KeyFate fate) {
      std::string out;
      for (const ImportedKey& key : out_.keys)
        if (key.fate == fate) out += fmt::format("#   {}{}: {}\n", key.key, place(key.where), one_line(key.why));
      if (!out.empty()) text += "# " + title + "\n" + out;
    };
    section("Left out, and why:", KeyFate::ignored);
    section("Not known:", KeyFate::unknown);
    if (!out_.notes.empty()) text += "# Of the script:\n";
    for (const std::string& note : out_.notes) text += "#   " + one_line(note) + "\n";
    return text;
  }

  Result<ImportedScenario> load() {
    const std::string file = (std::filesystem::path(in_.folder) / (out_.name + ".yaml")).string();
    auto scenario = load_scenario_text(out_.text, file);
    if (!scenario) {
      for (Diagnostic& d : scenario.error())
        if (const auto at = origin_.find(d.where.line);
            d.where.file == file && at != origin_.end() && !at->second.file.empty()) {
          d.where = at->second;
        } else {
          d.where.file = "the imported scenario";
        }
      return fail(scenario.error());
    }
    out_.scenario = std::move(*scenario);
    return std::move(out_);
  }

  const LaunchTable& table_;
  const LaunchSettings& launch_;
  RuleInput in_;
  ImportedScenario out_;
  std::set<std::string> spoken_for_;      // settings that became something
  std::map<int, SourceLocation> origin_;  // line of the scenario → place in the launch
};

}  // namespace

std::string_view name_of(KeyFate fate) {
  switch (fate) {
    case KeyFate::taken:
      return "taken";
    case KeyFate::defaulted:
      return "defaulted";
    case KeyFate::ignored:
      return "ignored";
    case KeyFate::unknown:
      return "unknown";
  }
  return "";
}

Result<ImportedScenario> import_settings(const LaunchTable& table, const LaunchSettings& launch,
                                         const std::string& name, const std::string& folder,
                                         const std::vector<std::string>& sets) {
  return Importer(table, launch).run(name, folder, sets);
}

Result<ImportedScenario> import_launch(const LaunchTable& table, const LaunchSource& source,
                                       const std::vector<std::string>& sets) {
  auto launch = read_launch(table, source);
  if (!launch) return fail(launch.error());
  const std::filesystem::path path = source.file;
  const std::string name = source.file.empty() ? table.system + "-launch" : path.stem().string();
  return import_settings(table, *launch, name, source.file.empty() ? "." : path.parent_path().string(), sets);
}

}  // namespace hotbunk
