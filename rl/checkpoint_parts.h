// What a rank has to do with a checkpoint in the making: which parts are its own, and what ranks tell each other of
// them.
#pragma once
#include <array>
#include <filesystem>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "exec/driver.h"
#include "rl/checkpoint.h"

namespace hotbunk {

/// What ranks of other processes tell each other beside the plan, a key once; hearing waits.
using SayToRanks = std::function<void(const std::string& key, const std::string& value)>;
using HearFromRank = std::function<std::string(const std::string& key, Rank from)>;

/// Whether a fetch is of a checkpoint or export: of weights or moments.
bool is_exported(Slot);

/// The ranks that fetch something of a checkpoint in that phase, ascending.
std::vector<Rank> exporting_ranks(const Plan&, std::int16_t phase);

/// What a rank writes of it: parameters and slots of which it is the first of the ranks that hold the same elements.
using ExportedParts = std::set<std::pair<std::string, Slot>>;
ExportedParts exported_by(const Plan&, std::int16_t phase, Rank);

/// A checkpoint or export being written; where nothing is written the sink is empty.
struct WeightsPayload final : Payload {
  /// A folder being written; one that fails is removed, and the other goes on.
  struct Writing {
    std::string key;  // what ranks call it between them
    std::unique_ptr<CheckpointWriter> to;
    Diagnostics problems;  // of the first write that failed

    void begin(Result<std::unique_ptr<CheckpointWriter>> writer) {
      if (writer) to = std::move(*writer);
      else problems = std::move(writer.error());
    }
    void note(Status done) {
      if (done) return;
      problems = std::move(done.error());
      to.reset();  // the first rank's removes what has been written
    }
    void take(const BoundOp& op, const Places& places, std::span<const std::byte> source) {
      if (to && to->takes(op)) note(to->take(op, places, source));
    }
  };
  Writing sink, merged;                    // merged: of a model with adapters, these in it
  Places places;                           // of the rank
  const ExportedParts* written = nullptr;  // by it

  void take(const BoundOp&, std::span<const std::byte> source);
  /// On the first rank: what others say of their parts. Then everything must have been written.
  void hear(const HearFromRank&, const std::vector<Rank>& writers);
  /// On another rank: says of its parts what has become of them. `syncs`: they are on disk then.
  void say(const SayToRanks&, Rank, bool syncs);
  /// On the first rank. `on_disk`: all of it is, else only whole.
  void finish(bool on_disk);

 private:
  std::array<Writing*, 2> all() { return {&sink, &merged}; }
};

/// An empty file with a name that no other run's has: a folder of the same path may be each host's own. What a killed
/// process leaves of it goes with the run (base/partial_file.h). Throws RuntimeFailure where it cannot be made.
std::shared_ptr<const std::filesystem::path> make_probe(const std::filesystem::path& folder);
/// Whether it shows here; a shared folder does so after a while (a second at most).
bool appears(const std::filesystem::path&);

}  // namespace hotbunk
