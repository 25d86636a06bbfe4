#include "cli/usage.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <vector>

namespace hotbunk {
namespace {

/// The command that was being read: the subcommand, or the program itself.
const CLI::App& command_of(const CLI::App& app) {
  const auto chosen = app.get_subcommands();
  return chosen.empty() ? app : *chosen.back();
}

std::string name_of(const CLI::App& app, const CLI::App& command) {
  return &command == &app ? app.get_name() : app.get_name() + " " + command.get_name();
}

std::vector<std::string> options_of(const CLI::App& command) {
  std::vector<std::string> names;
  for (const CLI::Option* option : command.get_options())
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  return names;
}

std::vector<std::string> commands_of(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands({})) names.push_back(command->get_name());
  return names;
}

/// What no option and no place took, in this command or before it.
std::vector<std::string> left_over(const CLI::App& app, const CLI::App& command) {
  std::vector<std::string> words = command.remaining();
  if (&command != &app)
    for (const std::string& word : app.remaining()) words.push_back(word);
  return words;
}

/// A word may say more than the option: --jsn=1.
std::string nearest_option(const std::string& word, const CLI::App& command) {
  return word.starts_with("-") ? nearest_name(word.substr(0, word.find('=')), options_of(command)) : "";
}

std::string nearest_help(const std::string& nearest, const std::string& command) {
  return nearest.empty() ? fmt::format("{} --help lists what it takes", command)
                         : fmt::format("did you mean {}?", nearest);
}

}  // namespace

Diagnostic no_such_command(const CLI::App& app, const std::string& word) {
  const std::vector<std::string> names = commands_of(app);
  const std::string nearest = nearest_name(word, names);
  return {.code = "E126",
          .message = fmt::format("there is no command '{}'", word),
          .where = {app.get_name()},
          .notes = {fmt::format("commands: {}", fmt::join(names, ", "))},
          .help = nearest_help(nearest, app.get_name())};
}

Diagnostic usage_error(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App& command = command_of(app);
  const std::string name = name_of(app, command);
  Diagnostic d{.code = "E143",
               .message = error.what(),
               .where = {name},
               .notes = {},
               .help = fmt::format("{} --help says what its options take", name)};
  const auto kind = static_cast<CLI::ExitCodes>(error.get_exit_code());
  if (kind == CLI::ExitCodes::ExtrasError) {
    const auto words = left_over(app, command);
    d.code = "E141";
    if (!words.empty()) {
      d.message = fmt::format("nothing takes '{}'", fmt::join(words, "' '"));
      d.help = nearest_help(nearest_option(words.front(), command), name);
    }
  } else if (kind == CLI::ExitCodes::RequiredError) {
    d.code = "E142";
    if (&command == &app) {
      d.message = "no command is given";
      d.notes = {fmt::format("commands: {}", fmt::join(commands_of(app), ", "))};
    }
    d.help = nearest_help("", name);
  } else if (kind == CLI::ExitCodes::RequiresError || kind == CLI::ExitCodes::ExcludesError) {
    d.code = "E144";
    d.message = fmt::format("options that {} each other: {}",
                            kind == CLI::ExitCodes::RequiresError ? "need" : "exclude", error.what());
  }
  return d;
}

}  // namespace hotbunk
