#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/json.h"
#include "base/printable.h"
#include "base/shell_quoted.h"
#include "cli/command.h"
#include "cli/run_folder.h"
#include "cli/streams.h"
#include "reports/memory_snapshot.h"
#include "trace/summary.h"

namespace hotbunk {
namespace {

struct ReportArguments {
  std::string folder, snapshot;
  bool json = false;
};

int run(const ReportArguments& o) {
  const RunFolder folder{o.folder};
  auto loaded = read_run_folder(folder);
  if (!loaded) return report_errors(loaded.error());
  for (const std::filesystem::path& target : {folder.report(), std::filesystem::path(o.snapshot)})
    if (!target.empty())
      if (auto s = check_writable(target); !s) return report_errors(s.error());
  const auto hardware = hardware_of(loaded->job.scenario);
  if (!hardware) return report_errors(hardware.error());
  if (!o.snapshot.empty() && ranks_with_buffers(loaded->job.plan, loaded->trace).empty())
    return report_errors(
        {Diagnostic{.code = "E135",
                    .message = "the trace of this simulation keeps the memory of calls, not of buffers",
                    .where = {folder.trace().string()},
                    .notes = {},
                    .help = "simulate again with --ops and the ranks that you want to look at"}});
  const nlohmann::ordered_json facts = facts_of_run(folder);
  const RunRecord record{.trace = loaded->trace,
                         .predicted = loaded->predicted ? &*loaded->predicted : nullptr,
                         .calibration = hardware->source,
                         .walked = loaded->walked,
                         .facts = &facts};
  const Status written = write_run_folder(folder, loaded->job, record), ended = end_in_folder(folder);
  for (const Status* s : {&written, &ended})
    if (!*s) return report_errors(s->error());
  if (!o.snapshot.empty())
    if (auto s = write_file_atomic(o.snapshot, to_pickle(memory_snapshot(loaded->job.plan, loaded->trace))); !s)
      return report_errors(s.error());
  auto summary = summarize(loaded->job.plan, loaded->job.scenario, loaded->trace);
  summary.update(facts);
  if (o.json) {
    print_document(json_text(summary, 1));
    return exit_done;
  }
  fmt::print("{}Report: {}\n", render_summary(summary, use_colour()), printable_line(folder.report().string()));
  flush_output();
  if (loaded->trace.source == "measured") say_next("compare " + shell_quoted(o.folder));
  return exit_done;
}

}  // namespace

void add_report(CommandLine& line) {
  auto o = std::make_shared<ReportArguments>();
  const Command sub =
      line.add_command("report", "write the HTML report, Perfetto trace and summary of a run folder again");
  sub.option("folder", o->folder, "run folder of `run` or `simulate --out`").required();
  sub.option("--memory-snapshot", o->snapshot, "also write a pickle for PyTorch's memory viewer there");
  sub.flag("--json", o->json, "one JSON document on stdout, nothing else there");
  sub.action([o] { return run(*o); });
}

}  // namespace hotbunk
