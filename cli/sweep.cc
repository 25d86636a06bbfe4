#include <fmt/format.h>

#include <cstdio>
#include <filesystem>
#include <memory>

#include "base/file.h"
#include "base/printable.h"
#include "cli/command.h"
#include "planner/answers/answers.h"
#include "reports/sweep_svg.h"
#include "spec/catalog.h"

namespace hotbunk {
namespace {

struct SweepArguments {
  ScenarioOptions scenario;
  std::vector<std::string> vary;
  std::string out, svg;
};

int run(const SweepArguments& o) {
  std::vector<SweepAxis> axes;
  Diagnostics errors;
  for (const std::string& text : o.vary) {
    auto axis = parse_axis(text);
    if (axis) axes.push_back(std::move(*axis));
    else errors.insert(errors.end(), axis.error().begin(), axis.error().end());
  }
  for (const std::string& file : {o.out, o.svg})
    if (auto folder = folder_of_exists(file); !folder)
      errors.insert(errors.end(), folder.error().begin(), folder.error().end());
  if (!errors.empty()) return report_errors(errors);
  const auto rows = sweep(o.scenario.path, o.scenario.sets, axes, catalog_root());
  if (!rows) return report_errors(rows.error());
  const std::string text = o.scenario.json ? to_json(axes, *rows) : to_csv(axes, *rows);
  if (!o.out.empty()) {
    if (auto written = write_file_atomic(o.out, o.scenario.json ? text + "\n" : text); !written)
      return report_errors(written.error());
  } else if (o.scenario.json) {
    print_document(text);
  } else {
    fmt::print("{}", printable(text));
  }
  if (!o.svg.empty()) {
    const std::string title = std::filesystem::path(o.scenario.path).stem().string();
    if (auto written = write_file_atomic(o.svg, sweep_svg(title, axes, *rows)); !written)
      return report_errors(written.error());
  }
  if (const std::string note = standing_note(*rows); !note.empty()) fmt::print(stderr, "note: {}", note);
  for (const SweepRow& row : *rows)
    if (row.valid && row.fits) return exit_done;
  fmt::print(stderr, "none of the {} points fits\n", rows->size());
  return exit_no;
}

}  // namespace

void add_sweep(CommandLine& line) {
  auto o = std::make_shared<SweepArguments>();
  const Command sub = line.add_command("sweep", "price a grid of scenarios: one line per point, as CSV or JSON");
  add_scenario_options(sub, o->scenario);
  sub.option("--vary", o->vary,
             "key=a,b,c or key=first..last:step (repeatable: the grid); key,key=a:b,c:d moves keys together")
      .required()
      .one_each_time();
  sub.option("--out", o->out, "write to this file instead of stdout");
  sub.option("--svg", o->svg, "also draw the sweep: lines over one axis, a heat map over several");
  sub.action([o] { return run(*o); });
}

}  // namespace hotbunk
