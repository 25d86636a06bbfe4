#include "planner/validate/validate.h"

#include <fmt/format.h>

#include <cstdio>
#include <memory>

#include "base/printable.h"
#include "base/shell_quoted.h"
#include "cli/command.h"
#include "cli/streams.h"
#include "spec/catalog.h"

namespace hotbunk {
namespace {

struct ValidateArguments {
  std::string data;
  bool json = false, rows = false;
};

int run(const ValidateArguments& o) {
  // data/published lies beside scenarios/ in the source tree and beside catalog/ where it is installed.
  std::filesystem::path data = o.data;
  if (data.empty()) {
    data = catalog_root().parent_path().parent_path() / "data" / "published";
    std::error_code ignored;
    if (!std::filesystem::exists(data, ignored)) data = catalog_root().parent_path() / "published";
  }
  const auto result = validate_published(data, catalog_root());
  if (!result) return report_errors(result.error());
  if (o.json) {
    print_document(to_json(*result));
    return result->unreadable.empty() ? exit_done : report_errors(result->unreadable);
  }
  fmt::print("{}", printable(render(*result, o.rows)));  // a table is anybody's
  fmt::print("\nWhich rows each constant was fitted on: docs/validation.md\n");
  flush_output();  // the tables first, then what is wrong with the others
  if (!result->unreadable.empty()) return report_errors(result->unreadable);
  if (!o.rows) say_next("validate --rows" + (o.data.empty() ? "" : " --data " + shell_quoted(o.data)));
  return exit_done;
}

}  // namespace

void add_validate(CommandLine& line) {
  auto o = std::make_shared<ValidateArguments>();
  const Command sub =
      line.add_command("validate", "predict published measurements and say how wrong the predictions are");
  sub.option("--data", o->data, "folder of tables with the names and columns of data/published");
  sub.flag("--json", o->json, "one JSON document on stdout, nothing else there");
  sub.flag("--rows", o->rows, "every row, not only the tables' figures");
  sub.action([o] { return run(*o); });
}

}  // namespace hotbunk
