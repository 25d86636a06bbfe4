// One iteration of a tiny job on the driver's double: what came of it, and what the double found.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backends/cuda/fake/fake_driver.h"
#include "backends/cuda/fake/fake_fault.h"
#include "backends/cuda/products.h"
#include "base/diagnostic.h"
#include "exec/lengths.h"
#include "graph/plan.h"
#include "rl/checkpoint.h"
#include "runtime/rank_backend.h"
#include "spec/scenario.h"
#include "trace/trace.h"

namespace hotbunk::test {

/// GRPO on two ranks, both sides asleep in turn: one layer, eight wide, four samples. A scenario file's text.
extern const char* const tiny_job_text;
Result<Scenario> load_tiny_job(const std::vector<std::string>& sets);
/// The same; what the tests write loads.
Scenario tiny_job(const std::vector<std::string>& sets = {});

struct Iteration {
  std::vector<std::string> failures;  // by rank, as a user reads them; "" where all went well
  std::vector<std::string> findings;  // of the double
  std::string numbers;                // lengths of all samples, losses, rewards: what every schedule must agree on
  std::map<std::string, std::int64_t> calls;
  std::map<std::string, std::int64_t> launches;  // by kernel, of both ranks
  std::int64_t faults_met = 0;
  std::vector<LibraryChoice> choices;              // of rank 0, where all went well
  Trace trace;                                     // of all ranks, where all went well
  std::vector<SampleLengths> lengths;              // by step
  std::vector<std::vector<std::int32_t>> samples;  // tokens of the last step's, with their prompts

  double seconds = 0;  // by the clock, until the last rank had ended

  bool went_well() const;
  std::string text() const;  // failures and findings, joined
};

struct Setting {
  std::uint64_t seed = 1;
  std::int64_t memory_bytes = std::int64_t{64} << 20;
  bool check_order = false;
  bool graphs = true;
  cuda::ProductPolicy products = cuda::ProductPolicy::own;  // what cuBLASLt's double forms
  cuda::ComparedProducts compared{};
  bool blas_sums_as_ours = false;
  bool dnn_attention = false;  // cuDNN's double forms attention's gradients
  int host_threads = 1;
  std::filesystem::path checkpoints{};               // where they are written; empty: nowhere
  std::optional<SavedCheckpoint> resume{};           // which one the run goes on from
  std::function<void(cuda::FakeDriver&)> prepare{};  // before the first call
  std::function<void(cuda::Driver&)> tamper{};       // with the table
};

Iteration run_iteration(const Plan&, const Scenario&, const Setting& = {});

/// Seconds after which a run with a fault hangs: 10, and of a machine so busy that `whole` seconds go by in a run
/// without one, ten of those more.
constexpr double hangs_after_seconds(double whole) { return 10 + 10 * whole; }

/// The same of a plan for one rank on the CPU backend, in this process.
Iteration run_on_cpu(const Plan&, const Scenario&);

/// The same on ranks that are processes, over the double of NCCL: what each says, rank 0 its numbers, or any of them
/// why it failed.
std::vector<std::string> numbers_over_nccl(const Plan&, const Scenario&);

/// What ranks that are processes, over the double of NCCL, came to, each by rank.
struct Processes {
  std::vector<int> codes;         // 0, 3 after a failure; -1: it was killed
  std::vector<std::string> said;  // why it failed, and what it had on stderr; "" where all went well
  std::vector<std::map<std::string, std::int64_t>>
      calls;  // of the driver and NCCL; none of a rank that did not come back
  std::int64_t faults_met = 0;
  std::string numbers;  // of rank 0, where all went well
  double seconds = 0;   // until the last one had ended

  bool went_well() const;
  std::string text() const;
};
/// `fault`: met by the rank that it names, or by all. A wait for which nobody works ends after `timeout_s`, and who
/// does not come back from it as long after.
Processes run_over_nccl(const Plan&, const Scenario&, const std::optional<cuda::FakeFault>& fault = {},
                        double timeout_s = 1.5, std::uint64_t seed = 1);

}  // namespace hotbunk::test
