#include "cli/output.h"

#include <fmt/format.h>

#include <cstdio>
#include <mutex>
#include <nlohmann/json.hpp>

#include "base/json.h"
#include "base/printable.h"
#include "cli/command.h"
#include "cli/streams.h"

namespace hotbunk {
namespace {

using Json = nlohmann::ordered_json;

/// stdout belongs to the process, and so does what is known of it.
struct Stdout {
  std::mutex mutex;  // ranks may be threads of this process
  bool json = false, has_result = false;
  Diagnostics errors;
};
Stdout& standard_output() {
  static Stdout state;
  return state;
}

Json document_of(const Diagnostic& d) {
  return {{"code", d.code},
          {"message", d.message},
          {"where", {{"file", d.where.file}, {"line", d.where.line}, {"column", d.where.column}}},
          {"notes", d.notes},
          {"help", d.help}};
}

}  // namespace

void errors_as_json() { standard_output().json = true; }
void errors_stay_on_stderr() { standard_output().json = false; }

void print_document(std::string_view json) {
  const std::lock_guard lock(standard_output().mutex);
  standard_output().has_result = true;
  print_result(json);
  print_result("\n");
  flush_output();
}

int report_errors(const Diagnostics& errors) {
  const std::lock_guard lock(standard_output().mutex);
  flush_output();  // what was answered comes before what is wrong with it
  std::fputs(render(errors).c_str(), stderr);
  Diagnostics& all = standard_output().errors;
  all.insert(all.end(), errors.begin(), errors.end());
  if (errors.empty()) return exit_bad_input;
  const std::string& code = errors.front().code;
  if (code.starts_with("E6") && code != "E601") return exit_runtime;  // E601: asked of a backend that has it not
  return code == "E301" || code == "E302" || code == "E310" || code == "E312" ? exit_no : exit_bad_input;
}

namespace {

/// What is wrong, where stdout is to hold a document and has none; whether that was so.
bool print_errors(const Stdout& out, int exit_code) {
  if (!out.json || out.has_result || out.errors.empty()) return false;
  Json doc = {{"schema", "hotbunk.error/1"}, {"exit_code", exit_code}};
  doc.update(document_of(out.errors.front()));
  doc["errors"] = Json::array();
  for (const Diagnostic& d : out.errors) doc["errors"].push_back(document_of(d));
  // A path need not be UTF-8; JSON is.
  print_result(json_text(doc, 1, NotUtf8::replaced) + "\n");
  return true;
}

}  // namespace

void end_stuck_output(const std::string& why) {
  Stdout& out = standard_output();
  const std::unique_lock lock(out.mutex, std::try_to_lock);
  if (!lock || ftrylockfile(stdout) != 0) return;  // whoever has them may be who never returns
  out.errors.push_back(stopped(why));
  print_errors(out, exit_runtime);
  flush_output();
  funlockfile(stdout);
}

int end_process(int exit_code) {
  if (!print_errors(standard_output(), exit_code)) return exit_code;
  if (auto s = finish_output(); !s) std::fputs(render(s.error()).c_str(), stderr);  // what was wrong before decides
  return exit_code;
}

void say_next(std::string_view command) { fmt::print(stderr, "Next: hotbunk {}\n", printable_line(command)); }

}  // namespace hotbunk
