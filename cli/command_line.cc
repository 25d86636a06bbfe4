#include "cli/command_line.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstddef>
#include <sstream>
#include <string_view>
#include <utility>

#include "cli/streams.h"
#include "cli/usage.h"

namespace hotbunk {
namespace {

ValueRule rule_of(const CLI::Validator& validator) {
  return {validator.get_description(), [validator](std::string text) { return validator(text); }};
}

}  // namespace

std::optional<std::int64_t> whole_number(const std::string& text) {
  std::int64_t value = 0;
  if (!CLI::detail::lexical_cast(text, value)) return std::nullopt;
  return value;
}

ValueRule whole_from(std::int64_t low) {
  return {fmt::format("INT >= {}", low), [=](const std::string& text) -> std::string {
            if (const auto value = whole_number(text); value && *value >= low) return {};
            return fmt::format("{} is not a whole number from {} up", text, low);
          }};
}

ValueRule whole_in(std::int64_t low, std::int64_t high) { return rule_of(CLI::Range(low, high)); }

ValueRule finite_in(double low, double high) {  // unlike CLI::Range, which NaN passes
  return {fmt::format("FLOAT in [{} - {}]", low, high), [=](const std::string& text) -> std::string {
            double value = 0.0;
            const bool number = CLI::detail::lexical_cast(text, value);
            if (number && value >= low && value <= high) return {};
            return fmt::format("{} is not a number from {} to {}", text, low, high);
          }};
}

ValueRule one_of(const std::vector<std::string>& texts) { return rule_of(CLI::IsMember(texts)); }

Option Option::required(bool is) const { return Option(option_->required(is)); }

Option Option::check(const ValueRule& rule) const {
  return Option(
      option_->check(CLI::Validator([fault = rule.fault](std::string& text) { return fault(text); }, rule.form)));
}

Option Option::needs(Option other) const { return Option(option_->needs(other.option_)); }
Option Option::excludes(Option other) const { return Option(option_->excludes(other.option_)); }
Option Option::one_each_time() const { return Option(option_->allow_extra_args(false)); }
Option Option::with_commas() const {
  option_->delimiter(',')->allow_extra_args(false);
  return *this;
}

template <class T>
Option Command::option(const std::string& name, T& value, const std::string& help) const {
  return Option(app_->add_option(name, value, help));
}

template Option Command::option(const std::string&, std::string&, const std::string&) const;
template Option Command::option(const std::string&, std::int32_t&, const std::string&) const;
template Option Command::option(const std::string&, std::int64_t&, const std::string&) const;
template Option Command::option(const std::string&, std::size_t&, const std::string&) const;
template Option Command::option(const std::string&, double&, const std::string&) const;
template Option Command::option(const std::string&, std::optional<std::int32_t>&, const std::string&) const;
template Option Command::option(const std::string&, std::optional<double>&, const std::string&) const;
template Option Command::option(const std::string&, std::vector<std::string>&, const std::string&) const;
template Option Command::option(const std::string&, std::vector<std::int32_t>&, const std::string&) const;

Option Command::flag(const std::string& name, bool& value, const std::string& help) const {
  return Option(app_->add_flag(name, value, help));
}

Option Command::find(const std::string& name) const { return Option(app_->get_option(name)); }

void Command::action(Action action, std::function<std::string()> missing) const {
  app_->callback([chosen = chosen_, action = std::move(action), missing = std::move(missing)] {
    if (const std::string name = missing ? missing() : ""; !name.empty()) throw CLI::RequiredError(name);
    *chosen = action;
  });
}

CommandLine::CommandLine()
    : app_(std::make_unique<CLI::App>("hotbunk plans, simulates and runs colocated RL post-training of LLMs",
                                      "hotbunk")) {
  app_->set_version_flag("--version", HOTBUNK_VERSION);
  app_->require_subcommand(1);
  app_->footer("Exit codes: 0 done, 1 the answer is no, 2 bad input, 3 failure at run time.");
}

CommandLine::~CommandLine() = default;

Command CommandLine::add_command(const std::string& name, const std::string& help) {
  return {app_->add_subcommand(name, help), &chosen_};
}

Result<Action> CommandLine::read(int argc, const char* const* argv) {
  const auto commands = app_->get_subcommands({});
  const auto is_first_word = [&](const CLI::App* command) { return command->get_name() == argv[1]; };
  if (argc > 1 && argv[1][0] != '-' && std::ranges::none_of(commands, is_first_word))
    return fail(no_such_command(*app_, argv[1]));
  try {
    app_->parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() != 0) return fail(usage_error(*app_, e));
    std::ostringstream text;  // --help, --version
    app_->exit(e, text, text);
    return Action([said = text.str()] {
      print_result(said);
      return 0;
    });
  }
  return chosen_;
}

}  // namespace hotbunk
