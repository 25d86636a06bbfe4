// What every real run shares: parameters in and out, feeds and fetches by slot, packed micro-batches, the learning
// rate, metrics. RlDriver and SftDriver add where the sequences come from.
#pragma once
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "exec/iteration_driver.h"
#include "rl/checkpoint.h"
#include "rl/passes.h"
#include "rl/sync_hashes.h"
#include "rl/weights.h"

namespace hotbunk {

struct DriverOptions {
  /// Where rank 0 writes checkpoints: "step_N" where one is due, "final" at the end. Empty: nowhere.
  std::filesystem::path checkpoints;
  /// The checkpoint that the run goes on from.
  std::optional<SavedCheckpoint> resume;
  /// Whether this process has been asked to stop; on a stream's thread. May be empty.
  std::function<bool()> stop_requested;
  /// Called on the driver's thread when a step's last optimizer step is done; may be empty.
  std::function<void(const StepMetrics&)> on_step;
};

class TrainingDriver : public IterationDriver {
 public:
  bool wants_results() const final { return true; }
  void feed(Rank, const Op&, const Args&, std::span<std::byte> destination) final;
  void fetch(Rank, const Op&, const Args&, std::span<const std::byte> source) final;
  /// Weights come from the checkpoint to resume, the reference from the scenario's own start.
  /// Throws DriverFailure when a checkpoint could not be written (E631, E632), Diverged when a mini-batch's loss or
  /// gradient norm is not finite, RuntimeFailure when a verified sync found a tensor that differs.
  void completed(Rank, const Args&, std::int16_t phase) override;
  void report(Trace&) const final;
  /// What lengths.jsonl holds.
  using IterationDriver::trained_lengths;
  /// Why the last checkpoint was not written; empty when it was.
  const Diagnostics& finish_problems() const { return finish_problems_; }
  /// What sync_hashes.jsonl holds: by step; empty without sync.verify.
  const std::map<std::int32_t, TensorHashes>& sync_hashes() const { return tensor_hashes_; }

 protected:
  TrainingDriver(const Plan&, const Scenario&, LoadSources, DriverOptions);

  /// One iteration's sequences, complete before training starts.
  struct Samples {
    std::vector<TokenSequence> sequences;
    std::vector<float> advantages;  // per sequence
  };
  virtual const Samples& samples(std::int32_t step) = 0;

  SampleLengths sample_lengths(std::int32_t step) final;
  std::shared_ptr<Payload> micro_payload(Iteration&, const MicroId&, const MicroBatch&) final;
  std::shared_ptr<Payload> sync_payload(std::int32_t step, Rank) final;
  std::shared_ptr<Payload> begin_payload(Iteration&, Rank, std::int64_t mini) final;
  std::shared_ptr<Payload> step_payload(Iteration&, Rank, std::int64_t mini) final;
  std::shared_ptr<Payload> weights_payload(PhaseRole, std::int32_t step, Rank) final;

  /// A figure of this step, for metrics.jsonl.
  void note(std::int32_t step, const std::string& name, double value) { metrics_[step][name] = value; }

 private:
  struct PassKey {
    Rank rank = 0;
    PhaseRole role = PhaseRole::reference;
    std::int64_t mini = 0, micro = 0;
    friend auto operator<=>(const PassKey&, const PassKey&) = default;
  };
  struct Gap {
    double sum = 0.0, max = 0.0;
    std::int64_t tokens = 0;
  };
  void not_written(PhaseRole, std::int32_t step, Diagnostics);
  void check_sync(std::int32_t step, const SyncPayload&);
  void keep_logps(Rank, std::int32_t step, PhaseRole, MicroPayload&);
  void add_step_metrics(std::int32_t step, const StepPayload&);
  void finish_step(std::int32_t step);
  TrainingState state_after(std::int32_t step) const;
  /// Optimizer steps of the iterations up to this one.
  std::int64_t optimizer_steps(std::int32_t step) const { return step * scenario().algorithm.mini_batches; }

  const LoadSources sources_;
  const DriverOptions options_;
  TrainingState started_;           // what a checkpoint says that does not change on the way; empty without them
  std::int64_t moments_begin_ = 0;  // optimizer steps that were done when the moments were zero
  const SyncHashes hashes_;
  Diagnostics finish_problems_;
  std::map<std::int32_t, TensorHashes> tensor_hashes_;
  std::int32_t logps_step_ = -1;                  // what logps_ and gaps_ are of
  std::map<PassKey, std::vector<float>> logps_;   // fetched by the log-prob passes, fed to training
  std::map<Rank, Gap> gaps_;                      // rollout against training log-probs, of each rank's samples
  std::vector<std::vector<float>> step_metrics_;  // of the mini-batches of this step so far
  std::map<std::int32_t, std::map<std::string, double>> metrics_;
};

}  // namespace hotbunk
