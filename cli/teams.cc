#include "cli/teams.h"

#include <fmt/format.h>

#include <algorithm>

namespace hotbunk {

std::int64_t threads_of_rank(std::int64_t ranks, std::int64_t threads, std::int64_t cores) {
  return threads > 0 ? threads : std::max<std::int64_t>(cores / std::max<std::int64_t>(ranks, 1), 1);
}

Status check_thread_limit(std::int64_t threads, std::int64_t most) {
  if (threads <= most) return {};
  return fail(Diagnostic{
      .code = "E710",
      .message = fmt::format("OMP_THREAD_LIMIT allows a team of {}, and a rank computes on {} threads", most, threads),
      .where = {},
      .notes = {},
      .help = fmt::format("unset OMP_THREAD_LIMIT, or run with --threads {}", most)});
}

std::vector<std::pair<std::string, std::string>> team_waits(std::int64_t ranks, std::int64_t threads,
                                                            std::int64_t cores) {
  std::vector<std::pair<std::string, std::string>> out = {{"OMP_WAIT_POLICY", "passive"}};
  if (ranks * threads_of_rank(ranks, threads, cores) <= cores) out.emplace_back("GOMP_SPINCOUNT", "2000");
  return out;
}

}  // namespace hotbunk
