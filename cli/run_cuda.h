// Ranks of `run` on CUDA devices or on the driver's double: threads of this process on one device, or, where torchrun,
// Slurm or MPI launched several, this process's rank on a device of its own.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/diagnostic.h"
#include "exec/driver.h"
#include "runtime/launch.h"
#include "runtime/rank_backend.h"
#include "runtime/world.h"

namespace hotbunk {

/// Makes a rank's backend in its world; the iterations up to span_steps keep their spans.
using MakeBackend = std::function<std::unique_ptr<RankBackend>(Driver&, std::int32_t span_steps)>;

struct CudaRun {
  bool fake = false;
  std::uint64_t fake_seed = 1;
  std::string fake_fault;       // "ENTRY:N" or "ENTRY:N:hang": what happens to the Nth call of an entry point
  std::int64_t fake_bytes = 0;  // of the double's device
  bool check_order = false;
  int ranks = 1;
  std::optional<LaunchEnv> env;  // of this process, where several were launched
  WorldOptions world;
};

/// What of the backend ever ran on a GPU, in a line; "" where it was not built.
std::string hardware_evidence_line();

/// Runs `rank` for every rank of this process, each on a thread and in a world of its own, and returns the exit code of
/// the first one, by rank, that is not 0. E640 without a driver, E642 without NCCL where it is needed, E641 when the
/// program was built without CUDA, E708 for a fault that names no call, E602 when the device is not what the backend
/// needs.
Result<int> run_on_cuda(const CudaRun&, const std::function<int(World&, const MakeBackend&)>& rank);

}  // namespace hotbunk
