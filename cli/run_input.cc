#include "cli/run_input.h"

namespace hotbunk {

bool rank_0_spoke(const LaunchResult& result) { return !result.ranks.empty() && result.ranks.front().signal == 0; }

Status readable_by_every_rank(const std::string& scenario) {
  if (scenario != "-") return {};
  return fail(Diagnostic{.code = "E101",
                         .message = "every rank of a run reads the scenario, and standard input can be read once",
                         .where = {"stdin"},
                         .notes = {},
                         .help = "write it to a file; plan, simulate, explain and sweep take -"});
}

Diagnostics with_file(Diagnostics errors, const std::string& scenario) {
  for (Diagnostic& d : errors)
    if (d.where.file.empty()) d.where.file = scenario;
  return errors;
}

}  // namespace hotbunk
