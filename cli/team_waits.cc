#include "cli/team_waits.h"

#include <algorithm>

namespace hotbunk {

std::vector<std::pair<std::string, std::string>> team_waits(std::int64_t ranks, std::int64_t threads,
                                                            std::int64_t cores) {
  std::vector<std::pair<std::string, std::string>> out = {{"OMP_WAIT_POLICY", "passive"}};
  const std::int64_t each = threads > 0 ? threads : std::max<std::int64_t>(cores / std::max<std::int64_t>(ranks, 1), 1);
  if (ranks * each <= cores) out.emplace_back("GOMP_SPINCOUNT", "2000");
  return out;
}

}  // namespace hotbunk
