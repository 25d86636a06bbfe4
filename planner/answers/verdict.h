// Whether a layout fits, in three words, and how sure that is.
#pragma once
#include <cstdint>
#include <string_view>

#include "planner/allocator/allocator_replay.h"

namespace hotbunk {

class ScenarioPricer;
struct RlPoint;
struct RlPrice;

/// no:    what tensors take, beside context and communicators, is more than the device or the host has.
/// tight: it is not, but what PyTorch reserves of the device at training's peak (or what another moment takes), raised
///        by the stated error of predicted memory, is; or what the device holds in the rollout, beside a trainer that
///        sleeps, with the most that PyTorch was seen to keep reserved of it (framework's asleep_reserved_bytes). The
///        caching allocator gives blocks back and tries again, so such a launch may run. On the host: with what its
///        node holds beside its ranks and the error it is more than the share at which Ray kills.
/// fits:  that, too, is there.
enum class Verdict : std::uint8_t { fits, tight, no };
std::string_view name_of(Verdict);

/// Tokens of a training micro-batch, on the cp and ulysses ranks that share it.
struct MicroBatchLoad {
  double mean = 0;       // expected: what prices of seconds take
  double charged = 0;    // the most of 1,000 iterations: what memory takes
  double fitting = 0;    // of which a rank's device holds the activations
  double overflows = 0;  // iterations of 1,000 in which some micro-batch, on any data rank, holds more than `fitting`
};

struct FitVerdict {
  Verdict verdict = Verdict::fits;
  double error = 0;  // of the predicted bytes, as a share: framework's memory_error; 0 where a plan counts them
  double reserved_bytes =
      0;  // device bytes of the fullest moment with what PyTorch's allocator reserves and nobody uses
  // Device bytes of the rollout, beside a trainer that sleeps, with the most that its allocator keeps; 0: nothing.
  double asleep_bytes = 0;
  // Host bytes of a rank with its part of what its node holds besides, raised by the error; and what of the host may be
  // in use before workers are killed. Both 0 where no profile says it.
  double host_bytes = 0, host_limit_bytes = 0;
  bool random = false;  // micro-batches hold what comes: `load` says how much
  MicroBatchLoad load{};
};

/// `torch`: the replay of training under PyTorch's allocator, nothing where there is none. `by_plan`: the price's bytes
/// are a plan's.
FitVerdict verdict_of(const ScenarioPricer&, const RlPoint&, const RlPrice&, const ReservedMemory& torch, bool by_plan);

}  // namespace hotbunk
