// What every real run shares: parameters in and out, feeds and fetches by slot, packed micro-batches, the learning
// rate, metrics. RlDriver and SftDriver add where the sequences come from.
#pragma once
#include <filesystem>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "exec/iteration_driver.h"
#include "rl/checkpoint.h"
#include "rl/checkpoint_parts.h"
#include "rl/passes.h"
#include "rl/sample_records.h"
#include "rl/sync_hashes.h"
#include "rl/weights.h"

namespace hotbunk {

struct DriverOptions {
  /// Where checkpoints are written: "step_N" where one is due, "final" at the end. Empty: nowhere. An absolute path;
  /// the first rank's holds for all.
  std::filesystem::path checkpoints;
  /// Into each of them; the first rank's. Read with all else that is read, before a run that is overwritten goes.
  std::vector<CarriedFile> carried;
  /// What ranks of other processes tell each other beside the plan, a key once: World::set and World::await. Empty:
  /// no other rank than the first writes a part of a checkpoint.
  SayToRanks say;
  HearFromRank hear;
  /// On the first rank's host, whose sync of a file is of what this rank has written too.
  bool beside_first = true;
  /// Into each checkpoint's state.
  Arithmetic arithmetic;
  /// The checkpoint that the run goes on from.
  std::optional<SavedCheckpoint> resume;
  /// Files of weights and moments are this driver's to open: not where another rank reads them (train.load: rank0).
  bool opens_files = true;
  /// That make what is fed when the plan loads. What is fed does not depend on it.
  int threads = 1;
  /// Whether this process has been asked to stop; on a stream's thread. May be empty.
  std::function<bool()> stop_requested;
  /// Called on the driver's thread when a step's last optimizer step is done; may be empty.
  std::function<void(const StepMetrics&)> on_step;
  /// Likewise when a step's samples are known, and after each verified sync.
  std::function<void(std::int32_t step, const SampleLengths&)> on_samples;
  std::function<void(std::int32_t step, const TensorHashes&)> on_sync;
};

class TrainingDriver : public IterationDriver {
 public:
  bool wants_results() const final { return true; }
  void feed(Rank, const BoundOp&, const Args&, std::span<std::byte> destination) final;
  bool feeds_zeros(Rank, const BoundOp&) const final;
  void fetch(Rank, const BoundOp&, const Args&, std::span<const std::byte> source) final;
  /// Weights come from the checkpoint to resume, the reference from the scenario's own start.
  /// Throws DriverFailure when a checkpoint could not be written (E631, E632), Diverged when a mini-batch's loss or
  /// gradient norm is not finite, RuntimeFailure when a verified sync found a tensor that differs.
  void completed(Rank, const Args&, std::int16_t phase) override;
  /// The checkpoint of the step takes its place: on_step_end has written what is known of the step. E632, also of an
  /// earlier one that was put on disk meanwhile.
  Status step_ended(std::int32_t step) final;
  /// Why the last checkpoint was not written; empty when it was.
  const Diagnostics& finish_problems() const { return finish_problems_; }
  /// Samples of the latest step, once it is trained (chosen_samples); with the log-probs that `rank` computed.
  std::vector<SampleRecord> sample_records(std::int32_t step, Rank rank, std::size_t most);

 protected:
  TrainingDriver(const Plan&, const Scenario&, LoadSources, DriverOptions);

  /// One iteration's sequences, complete before training starts.
  struct Samples {
    std::vector<TokenSequence> sequences;
    std::vector<float> advantages;  // per sequence
    std::vector<double> rewards;    // likewise; empty where there are none
  };
  virtual const Samples& samples(std::int32_t step) = 0;
  /// For people; "" where tokens have no text.
  virtual std::string text(std::span<const std::int32_t>) const { return ""; }

  SampleLengths sample_lengths(std::int32_t step) final;
  void samples_known(std::int32_t step, const SampleLengths&) final;
  std::shared_ptr<Payload> micro_payload(Iteration&, const MicroId&, const MicroBatch&) final;
  std::shared_ptr<Payload> sync_payload(std::int32_t step, Rank) final;
  std::shared_ptr<Payload> begin_payload(Iteration&, Rank, std::int64_t mini) final;
  std::shared_ptr<Payload> step_payload(Iteration&, Rank, std::int64_t mini) final;
  std::shared_ptr<Payload> weights_payload(PhaseRole, std::int32_t step, Rank) final;

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
  /// E631, E632: why a checkpoint was not written, with the step.
  Diagnostics failed_checkpoint(std::int32_t step, Diagnostics) const;
  /// Before training: whether all ranks see the first one's folder. RuntimeFailure when one does not.
  void look_for_folder(Rank);
  /// exported_by, found once.
  const ExportedParts& written_by(std::int16_t phase, Rank);
  CheckpointContent content(bool merged) const;
  void not_written(PhaseRole, std::int32_t step, Diagnostics);
  Diagnostics place_checkpoint();
  /// Puts the checkpoint on disk and in its place while others go on; one at a time.
  void place_meanwhile(std::int32_t step);
  /// Waits for it. Why it was not written, with its step.
  Status meanwhile_placed();
  bool places_meanwhile(PhaseRole role) const {
    return scenario().run.checkpoint_async && role != PhaseRole::export_weights;
  }
  void check_sync(std::int32_t step, const SyncPayload&);
  std::map<std::int64_t, std::vector<float>> training_logps(std::int32_t step, Rank);
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
  std::shared_ptr<const std::filesystem::path> probe_;  // a file that other ranks look for; it goes with the driver
  std::map<std::pair<std::int16_t, Rank>, ExportedParts> written_by_;
  const SyncHashes hashes_;
  std::unique_ptr<CheckpointWriter> unplaced_;  // whole, of a step whose lines are still to be written
  std::future<Status> placing_;                 // of placed_step_, by place_meanwhile
  std::int32_t placed_step_ = 0;
  Diagnostics finish_problems_;
  std::int32_t logps_step_ = -1;                  // what logps_ and gaps_ are of
  std::map<PassKey, std::vector<float>> logps_;   // fetched by the log-prob passes, fed to training
  std::map<Rank, Gap> gaps_;                      // rollout against training log-probs, of each rank's samples
  std::vector<std::vector<float>> step_metrics_;  // of the mini-batches of this step so far
};

}  // namespace hotbunk
