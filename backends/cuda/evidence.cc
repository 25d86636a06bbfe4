#include "backends/cuda/evidence.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>

#include "base/check.h"
#include "base/json.h"

namespace hotbunk {
std::string_view hardware_evidence_text(std::string_view name);  // generated: cmake/embed.cmake
}

namespace hotbunk::cuda {

std::vector<Evidence> hardware_evidence() {
  const auto document = json_from<nlohmann::json>(std::string(hardware_evidence_text("hardware_evidence")));
  std::vector<Evidence> out;
  for (const auto& row : document.at("claims")) {
    Evidence e{.claim = row.at("claim"), .last_run = {}};
    if (const auto& run = row.at("last_run"); !run.is_null())
      e.last_run = HardwareRun{.date = run.at("date"), .machine = run.at("machine"), .command = run.at("command")};
    out.push_back(std::move(e));
  }
  return out;
}

std::string evidence_text() {
  const std::vector<Evidence> all = hardware_evidence();
  const auto ran = std::ranges::count_if(all, [](const Evidence& e) { return e.last_run.has_value(); });
  if (ran == 0) return "never ran on hardware";
  std::string last;
  for (const Evidence& e : all)
    if (e.last_run) last = std::max(last, e.last_run->date);
  return fmt::format("{} of {} claims ran on hardware, the last on {}", ran, all.size(), last);
}

}  // namespace hotbunk::cuda
