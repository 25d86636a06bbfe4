// Trains a golden's model on its sequences through the whole line: Scenario -> lower -> execute on CPU ranks, with the
// SFT driver and data file that a user's run has. Probes (fetch ops added to the plan) bring out what no driver asks
// for.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "exec/backend.h"
#include "exec/driver.h"
#include "graph/plan.h"
#include "runtime/world.h"
#include "tests/numerics/golden.h"

namespace hotbunk::test {

/// A folder that goes when this does.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

/// SFT on all of the golden's sequences in one micro-batch: fp32 throughout, `ranks` ranks, the golden's optimizer.
/// Six steps: the sixth's loss is the loss after five.
Scenario golden_scenario(const Golden&, std::int64_t ranks);

struct TrainingResult {
  std::vector<double> losses, grad_norms;            // by step
  std::map<std::string, std::vector<float>> after5;  // every tensor of the model's file after five steps
  std::map<std::string, std::vector<float>> at_end;  // of the whole run, the same; without adapters
  std::map<std::string, std::vector<float>> merged;  // with adapters: the model at the end of the run, these in it
  /// Of the first step: "grad.<tensor of the file>" as the optimizer takes it, put together from what the ranks have;
  /// of one rank also "logits" and "logps".
  std::map<std::string, std::vector<float>> probes;
  std::string unlike_plan;  // of Against::reference_and_plan: the first difference; "" where nothing differs
};

/// What a run is held to: besides what it computes, that its memory and traffic are to the byte and the call what the
/// simulator says of the same plan (P1, P2).
enum class Against : std::uint8_t { reference, reference_and_plan };

/// One rank's part of a run, on the backend that it is given the means to make.
using MakeTestBackend = std::function<std::unique_ptr<Backend>(Driver&)>;
using PlayRank = std::function<void(World&, const MakeTestBackend&)>;
/// Starts so many ranks, each of which plays its part, and throws std::runtime_error where one of them fails.
using StartRanks = std::function<void(int ranks, const PlayRank&)>;
/// CPU ranks: forked children, or, of one, this process.
void start_cpu_ranks(int ranks, const PlayRank&);

/// Throws std::runtime_error with what went wrong, also where ranks differ in a gradient that each of them has.
TrainingResult train(const Golden&, const Scenario&, Against = Against::reference, const StartRanks& = start_cpu_ranks);

/// The same after so many steps as `first` says, from the checkpoint that these left: losses and norms are those of the
/// other steps.
TrainingResult train_on(const Golden&, const Scenario& first, const Scenario& then, std::int64_t steps);

}  // namespace hotbunk::test
