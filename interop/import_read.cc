// A launch's file and words → settings.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "interop/import.h"

namespace hotbunk {
namespace fs = std::filesystem;
namespace {

/// The word that names the system's program: "verl.trainer.main_ppo", "examples/run_grpo.py", "train.py".
std::size_t entry_of(const LaunchTable& table, const ShellCommand& command) {
  for (std::size_t i = 0; i < command.size(); ++i) {
    const std::string& word = command[i].text;
    const bool is_entry = std::ranges::any_of(table.entries, [&](const std::string& entry) {
      return word == entry || word.ends_with("/" + entry) || word.ends_with("." + entry);
    });
    if (is_entry) return i;
  }
  return command.size();
}

/// Options of torchrun before the program: --nnodes 4, --nproc_per_node=8; the last that stands directly before it.
Settings launcher_settings(const ShellCommand& command, std::size_t entry) {
  Settings out;
  for (Setting& s : flag_settings({command.begin(), command.begin() + static_cast<std::ptrdiff_t>(entry)})) {
    std::ranges::replace(s.key, '-', '_');
    if (s.key != "nnodes" && s.key != "nproc_per_node") continue;
    s.key = "torchrun." + s.key;
    if (const auto comma = s.value.find_first_of(", "); s.value.starts_with('[') && comma != std::string::npos)
      s.value = s.value.substr(1, comma - 1);  // the program's own words stood behind it
    out.push_back(std::move(s));
  }
  return out;
}

fs::path found_config(const std::string& name, const fs::path& beside) {
  std::error_code ignored;
  if (fs::path(name).is_absolute() || fs::exists(name, ignored)) return name;
  for (fs::path folder = fs::absolute(beside, ignored); !folder.empty(); folder = folder.parent_path()) {
    if (fs::exists(folder / name, ignored)) return folder / name;
    if (folder == folder.parent_path()) break;
  }
  return name;
}

/// What of the words asks for expandable segments: a variable, or a key or a JSON of the environment of workers.
std::string expandable_of(const std::vector<ShellWord>& words) {
  for (const ShellWord& word : words) {
    const auto at = word.text.find("expandable_segments:True");
    if (at == std::string::npos) continue;
    const std::string file = fs::path(word.where.file).filename().string();
    return word.where.line > 0 && word.where.file != "command line"
               ? fmt::format("expandable_segments:True ({}:{})", file, word.where.line)
               : "expandable_segments:True";
  }
  return "";
}

/// Settings of a command's words, with those of a configuration file that they name.
Result<LaunchSettings> of_command(const LaunchTable& table, const ShellCommand& command, const fs::path& beside) {
  const std::size_t entry = entry_of(table, command);
  LaunchSettings out;
  const bool known = entry < command.size();
  if (known) out.settings = launcher_settings(command, entry);
  const ShellCommand words(command.begin() + static_cast<std::ptrdiff_t>(known ? entry + 1 : 0), command.end());
  Settings own = flag_settings(words);
  const auto config =
      std::ranges::find_if(own, [](const Setting& s) { return s.key == "config" || s.key == "job.config_file"; });
  if (config != own.end() && config->undefined.empty()) {
    const std::string file =
        config->value.substr(config->value.starts_with('[') ? 1 : 0, config->value.find_first_of(",]"));
    if (file.ends_with(".yaml") || file.ends_with(".yml") || file.ends_with(".toml")) {
      const fs::path path = found_config(file, beside);
      auto base = file.ends_with(".toml") ? toml_settings(path) : yaml_settings(path);
      if (!base) return fail(base.error());
      override_settings(out.settings, *base);
    }
  }
  if (table.form == LaunchForm::hydra) own = hydra_settings(words);
  override_settings(out.settings, own);
  out.expandable = expandable_of(command);
  for (const ShellWord& word : words)
    if (is_unset_array(word))
      out.notes.push_back(fmt::format("{} is nowhere set: the words that it may hold are not read", word.text));
  return out;
}

/// The command of a script that launches the system: the last that names its program, else the last whose words are its
/// keys.
const ShellCommand* launch_of(const LaunchTable& table, const ShellScript& script) {
  const ShellCommand* found = nullptr;
  for (const ShellCommand& command : script.commands)
    if (entry_of(table, command) < command.size() && command.size() > 2) found = &command;
  if (found != nullptr) return found;
  std::ptrdiff_t most = 2;
  for (const ShellCommand& command : script.commands) {
    const Settings settings = table.form == LaunchForm::hydra ? hydra_settings(command) : flag_settings(command);
    const auto known = std::ranges::count_if(settings, [&](const Setting& s) {
      const LaunchKey* const row = table.find(s.key);
      return row != nullptr && row->ignored.empty();
    });
    if (known > most) most = known, found = &command;
  }
  return found;
}

Result<LaunchSettings> of_script(const LaunchTable& table, const LaunchSource& source) {
  auto script = read_shell_script(source.file, source.variables);
  if (!script) return fail(script.error());
  const ShellCommand* const command = launch_of(table, *script);
  if (command == nullptr)
    return fail(Diagnostic{.code = "E150",
                           .message = fmt::format("the script launches no {}", table.title),
                           .where = {source.file},
                           .notes = {fmt::format("looked for a command with {}", fmt::join(table.entries, " or ")),
                                     fmt::format("{} commands were read", script->commands.size())},
                           .help = fmt::format("hotbunk import {} -- WORDS, as the shell expands them", table.system)});
  auto out = of_command(table, *command, fs::path(source.file).parent_path());
  if (!out) return out;
  out->notes.insert(out->notes.begin(), script->notes.begin(), script->notes.end());
  if (out->expandable.empty()) out->expandable = expandable_of(script->assignments);
  return out;
}

}  // namespace

Result<LaunchSettings> read_launch(const LaunchTable& table, const LaunchSource& source) {
  LaunchSettings out;
  if (!source.file.empty()) {
    const std::string extension = fs::path(source.file).extension().string();
    if (extension == ".yaml" || extension == ".yml" || extension == ".toml") {
      auto settings = extension == ".toml" ? toml_settings(source.file) : yaml_settings(source.file);
      if (!settings) return fail(settings.error());
      out.settings = std::move(*settings);
    } else {
      auto launch = of_script(table, source);
      if (!launch) return launch;
      out = std::move(*launch);
    }
  }
  if (!source.words.empty()) {
    ShellCommand command;
    for (std::size_t i = 0; i < source.words.size(); ++i)
      command.push_back({source.words[i], {"command line", 1, static_cast<int>(i) + 1}, {}});
    auto launch = of_command(table, command, ".");
    if (!launch) return launch;
    override_settings(out.settings, launch->settings);
    if (!launch->expandable.empty()) out.expandable = launch->expandable;
  }
  resolve_interpolations(out.settings);
  return out;
}

}  // namespace hotbunk
