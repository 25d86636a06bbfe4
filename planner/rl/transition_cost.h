// What a transition order costs: the fullest moments of the device while the shifts change, and the bytes that cross
// the host link. Closed form: a walk over at most eleven steps.
#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "spec/transition.h"

namespace hotbunk {

/// Sizes of one rank in bytes.
struct ShiftBytes {
  double params = 0;     // what the sync reads: training's parameter shards
  double optimizer = 0;  // moments, master copies beside them, reference
  double weights = 0;    // of the rollout
  double kv = 0;
  double communicators = 0;    // of training, where they come and go with its parameters; no copy of them is kept
  double graphs = 0;           // of the engine, where they come and go with its cache
  bool keeps_weights = false;  // sleep level 1: the rollout's weights go to the host and come back
  double staging = 0;          // of the sync, from parameters on the device
  double host_staging = 0;     // more of it when the sync reads the parameters' host copy; communicators come beside it
  /// On the device, with and of what sleeps and wakes with them.
  double with_params() const { return params + communicators; }
  double with_kv() const { return kv + graphs; }
  double staged_from_host() const { return staging + host_staging + communicators; }
};

/// What is on the device at one moment of the shifts, in bytes.
struct ShiftMoment {
  double params = 0, optimizer = 0, weights = 0, kv = 0, staging = 0, communicators = 0, graphs = 0;
  TransitionStep at = TransitionStep::sync;  // the step that is under way
  double total() const { return params + optimizer + weights + kv + staging + communicators + graphs; }
};

struct ShiftPrice {
  double sync_bytes = 0;            // fullest moment up to the rollout: the step that is under way counts on both sides
  double wake_bytes = 0;            // fullest moment after the rollout
  double rollout_rest = 0;          // of training on the device while the rollout runs
  double train_rest = 0;            // of the rollout on the device while training runs
  double asleep = 0;                // most on the host at once
  double down = 0, up = 0;          // bytes to the host and back in a cycle, outside of the sync
  double mapped = 0, unmapped = 0;  // bytes of the device taken and given back
  bool sync_from_host = false;      // and params once more upwards, in the sync
  friend bool operator==(const ShiftPrice&, const ShiftPrice&) = default;
};
/// A step that moves a part counts it as on the device throughout: it leaves or arrives buffer by buffer. The obvious
/// walk, step by step; ShiftShape is held to it.
ShiftPrice price_shift(const TransitionOrder&, const ShiftBytes&);

/// What the steps between the shifts work in, bytes of a rank: the sync in its buckets, the engine in its activations,
/// the log-prob passes and training (critic's steps included) in theirs. One section holds it, mapped for what comes
/// next.
struct WorkBytes {
  double sync = 0, rollout = 0, reference = 0, old_logprobs = 0, train = 0;
};
/// Whose plan maps it: our lowered one, or a priced one, in which training's work is taken in a phase of its own where
/// nothing of training wakes behind the rollout (planner/priced).
enum class WorkPlan : std::uint8_t { lowered, priced };
/// Taken and given back of it in the steps of each kind.
struct WorkMoves {
  struct Moved {
    double mapped = 0, unmapped = 0;
  };
  Moved sync, sleep, wake;
};

/// An order walked once, for a search that prices it with thousands of sizes: which parts are somewhere together or
/// move together. Its prices are those of price_shift, bit for bit, where no size is negative.
class ShiftShape {
 public:
  explicit ShiftShape(const TransitionOrder&);
  ShiftPrice price(const ShiftBytes&) const;
  /// By the rule of lowering/builder.cc: before each step the section is mapped for the step itself and for what is
  /// driven right behind it. `lowered`: less work never moves more.
  WorkMoves moves(const WorkBytes&, WorkPlan = WorkPlan::lowered) const;

 private:
  /// Sets of parts, a bit each.
  class Sets {
   public:
    void add(std::uint8_t set) { sets_[count_++] = set; }
    /// Of sets of which the largest counts, those that others contain do not.
    void add_uncontained(std::uint8_t set);
    const std::uint8_t* begin() const { return sets_.data(); }
    const std::uint8_t* end() const { return sets_.data() + count_; }

   private:
    std::array<std::uint8_t, TransitionOrder::most> sets_{};
    std::uint8_t count_ = 0;
  };

  /// A step that the driver does not play: what of WorkBytes is mapped for it and for those behind it.
  struct Level {
    WorkMoves::Moved WorkMoves::*of = nullptr;
    bool sync = false, rollout = false, reference = false, old_logprobs = false, train = false;
    double bytes(const WorkBytes&) const;
  };
  struct Levels {
    std::array<Level, TransitionOrder::most + 1> each{};
    std::size_t count = 0;
    Levels() = default;
    Levels(const TransitionOrder&, WorkPlan);
  };

  std::array<Levels, 2> levels_{};      // by WorkPlan
  Sets to_sync_, to_wake_, asleep_;     // moments
  Sets down_, up_, unmapped_, mapped_;  // moves, in order
  std::uint8_t rollout_rest_ = 0, train_rest_ = 0;
  bool sync_from_host_ = false;
};

/// What makes up price_shift's sync_bytes or, `after_rollout`, its wake_bytes.
ShiftMoment fullest_moment(const TransitionOrder&, const ShiftBytes&, bool after_rollout);

/// The orders that are not beaten by another in every moment and every copy, whatever the sizes: only these can win a
/// search. Tests compare with all legal orders on random sizes.
/// `keeps_weights`: of a rollout that sleeps at level 1.
std::vector<TransitionOrder> undominated(std::vector<TransitionOrder>, bool keeps_weights = false);

}  // namespace hotbunk
