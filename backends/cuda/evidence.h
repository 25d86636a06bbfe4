// What of this backend ran on hardware, and when: hardware_evidence.json, compiled in.
#pragma once
#include <optional>
#include <string>
#include <vector>

namespace hotbunk::cuda {

/// The last run of what a claim is about, on a GPU.
struct HardwareRun {
  std::string date, machine, command;
};
struct Evidence {
  std::string claim;  // "conformance suite", "kernels/norm.cu"
  std::optional<HardwareRun> last_run;
};

std::vector<Evidence> hardware_evidence();
/// "2 of 13 claims ran on hardware, the last on 2026-12-01", or "never ran on hardware".
std::string evidence_text();

}  // namespace hotbunk::cuda
