// The program's command line: commands, their options, and what was typed. CLI11 reads it, and is behind this header
// because its own takes a unit 5 s to compile.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/diagnostic.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace hotbunk {

/// What a command does; returns the exit code.
using Action = std::function<int()>;

/// What the text of a value must be.
struct ValueRule {
  std::string form;                                      // for --help; "" adds nothing there
  std::function<std::string(const std::string&)> fault;  // of a text: what is wrong with it, "" = nothing
};
/// A whole number from low up.
ValueRule whole_from(std::int64_t low);
ValueRule whole_in(std::int64_t low, std::int64_t high);
/// A number from low to high, which NaN is not.
ValueRule finite_in(double low, double high);
ValueRule one_of(const std::vector<std::string>& texts);
/// As an option of whole numbers reads it; none where the text is no such number.
std::optional<std::int64_t> whole_number(const std::string& text);

/// One option of a command; copies are the same option. Its setters return it.
class Option {
 public:
  explicit Option(CLI::Option* option) : option_(option) {}
  Option required(bool is = true) const;
  Option check(const ValueRule&) const;
  Option needs(Option other) const;
  Option excludes(Option other) const;
  /// Of a vector: one value each time the option is given, not all words that follow.
  Option one_each_time() const;
  /// Of a vector: values with commas between them, as "0,3".
  Option with_commas() const;

 private:
  CLI::Option* option_;
};

/// One command; copies are the same command.
class Command {
 public:
  Command(CLI::App* app, Action* chosen) : app_(app), chosen_(chosen) {}
  /// "--name", or "name" for a place on the command line. T: std::string, std::int32_t, std::int64_t, std::size_t,
  /// double, an optional of the numbers, a vector of strings or of whole numbers. `value` must outlive the reading; it
  /// keeps what it has where the option is not given.
  template <class T>
  Option option(const std::string& name, T& value, const std::string& help) const;
  Option flag(const std::string& name, bool& value, const std::string& help) const;
  Option find(const std::string& name) const;
  /// What this command does. `missing` names an argument that is required after all, given the others; "" = none.
  void action(Action, std::function<std::string()> missing = {}) const;

 private:
  CLI::App* app_;
  Action* chosen_;  // of the command line
};

class CommandLine {
 public:
  CommandLine();
  ~CommandLine();
  CommandLine(const CommandLine&) = delete;
  CommandLine& operator=(const CommandLine&) = delete;

  Command add_command(const std::string& name, const std::string& help);
  /// What to do: the command's action, or to print what --help or --version ask for. Errors: cli/usage.h.
  Result<Action> read(int argc, const char* const* argv);

 private:
  std::unique_ptr<CLI::App> app_;
  Action chosen_;
};

}  // namespace hotbunk
