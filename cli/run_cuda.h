// Ranks of `run` on CUDA devices or on the driver's double: threads of this process on one device, or, where torchrun,
// Slurm or MPI launched several, this process's rank on a device of its own.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "base/diagnostic.h"
#include "cli/command.h"
#include "exec/driver.h"
#include "graph/plan.h"
#include "runtime/launch.h"
#include "runtime/rank_backend.h"
#include "runtime/world.h"
#include "trace/trace.h"

namespace hotbunk {

/// Makes a rank's backend in its world; the iterations up to span_steps keep their spans, and so many threads compute
/// what it computes on the host.
using MakeBackend = std::function<std::unique_ptr<RankBackend>(Driver&, std::int32_t span_steps, int threads)>;

struct CudaRun {
  bool fake = false;
  std::uint64_t fake_seed = 1;
  std::string fake_fault{};     // of the double (backends/cuda/fake/fake_fault.h)
  std::int64_t fake_bytes = 0;  // of the double's device
  bool check_order = false;
  bool keep_timings = false;
  std::string products{};   // own, backward, equal, all; "": the default (cuda_products)
  std::string attention{};  // of its backward: own, cudnn; "": own
  int ranks = 1;
  std::optional<LaunchEnv> env;  // of this process, where several were launched
  WorldOptions world;
};

/// Of the double's device: as much as all ranks on it may map, and what tables, scratch and staging take.
std::int64_t fake_device_bytes(const Job&, bool processes);

/// What of the backend ever ran on a GPU, in a line; "" where it was not built.
std::string hardware_evidence_line();

/// The bodies that a run executed, by kind, with the ops that they are of and where these ran on a GPU, null where at
/// least one never did: as summary.json has them.
struct BodiesRanBy {
  std::string backend, products, attention;  // as in CudaRun
  bool processes = false;                    // over NCCL
};
nlohmann::ordered_json hardware_evidence_of_bodies(const Plan&, const Trace&, const BodiesRanBy&);
/// That in a line: how many of them never ran on hardware, and which, where it is not all.
std::string hardware_evidence_line(const nlohmann::ordered_json& bodies);

/// What forms matrix products on that backend: "own kernels", or which of them cuBLASLt does, and its version. Without
/// a wish, cuda takes cuBLASLt for backward products where the library is, and the double our kernels, which it is
/// there to execute. E643 where cuBLASLt is asked for and is not there.
Result<std::string> cuda_products(const std::string& backend, const std::string& asked);

/// What forms attention's gradients: "own kernels", or cuDNN what it takes, and its version. E644 where cuDNN is asked
/// for and is not there.
Result<std::string> cuda_attention(const std::string& backend, const std::string& asked);

/// Runs `rank` for every rank of this process, each on a thread and in a world of its own, and returns the exit code of
/// the first one, by rank, that is not 0. E640 without a driver, E642 without NCCL where it is needed, E641 when the
/// program was built without CUDA, E708 for a fault that nothing can meet, E602 when the device is not what the backend
/// needs.
Result<int> run_on_cuda(const CudaRun&, const std::function<int(World&, const MakeBackend&)>& rank);

}  // namespace hotbunk
