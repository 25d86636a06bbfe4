// Session: one role's walk over a plan, a block at a time, so that who drives it may do something else in between:
// suspend a job, play another one's blocks, and go on.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "exec/backend.h"
#include "graph/section_states.h"

namespace hotbunk {

/// Counts the sessions of one process that are done with an iteration: the last one says so to driver and options.
class IterationEnds {
 public:
  explicit IterationEnds(std::size_t sessions = 1) : sessions_(sessions) {}
  /// Whether this was the last of them.
  bool arrive(std::int32_t step);

 private:
  std::size_t sessions_;
  std::map<std::int32_t, std::size_t> arrived_;  // of iterations that some are done with and others are not
};

/// A role walks the prologue's phases that it plays, in each iteration s those of iteration s - steps_back each
/// (graph/plan.h: Player), as far as there is such an iteration, and the epilogue's. So a role that comes behind goes
/// on behind the last iteration until all parts of all iterations are played.
class Session {
 public:
  /// Plays the ranks of the devices, which are a backend's of this plan and all of one role. Plan, driver and `ends`,
  /// where the process has sessions of several roles, outlive it.
  Session(const Plan&, Driver&, std::vector<std::unique_ptr<Device>>, const RunOptions&, IterationEnds* ends = nullptr);

  Session(const Session&) = delete;  // nor moved: it may refer to its own count of ends
  Session& operator=(const Session&) = delete;

  /// Plays one block of one rank, or what stands between two phases. Ranks take turns, a block each (where no driver
  /// decides, a phase's blocks in one turn), so that a simulator's ranks advance together. False: the walk is over. A
  /// failure carries rank, phase and block, and ends it.
  Result<bool> advance();

  /// Waits until all that was played is done: behind it a suspended job has nothing running on its devices.
  Status settle();

  /// Where it is: the next block is of this step and phase; phase -1: before the first, between two, or over.
  std::int32_t step() const { return in_phase_ ? step_of(plan_.phases[static_cast<std::size_t>(phase_)]) : step_; }
  /// The iteration of its own walk, which step() may be some steps back of. Sessions of one process are played so that
  /// none is ahead by more than one.
  std::int32_t walk_step() const { return step_; }
  bool over() const { return over_; }
  std::int16_t phase() const { return in_phase_ ? phase_ : std::int16_t{-1}; }

 private:
  /// One device and how far it is in the phase at hand.
  struct Seat {
    std::unique_ptr<Device> device;
    SectionStates states;
    std::optional<Args> args;  // of a phase that no driver drives: its next block
    bool done = false;
    std::int64_t blocks_run = 0;
  };

  bool runs(const PhaseInfo&) const;
  /// The iteration as whose part the role plays the phase now.
  std::int32_t step_of(const PhaseInfo&) const;
  Result<bool> next_phase();
  Status end_iteration();
  void enter_phase();
  Status leave_phase();
  Result<bool> play_on();
  Status play_turn();
  Status driven_turn(Seat&);
  Status undriven_turn(Seat&);
  Status block(Seat&, const Args&);
  void end_turn(Seat&, bool done);

  const Plan& plan_;
  Driver& driver_;
  RunOptions options_;  // steps: until the driver ends the run before
  IterationEnds alone_;
  IterationEnds& ends_;
  std::int32_t role_ = 0, most_back_ = 0;
  std::vector<Seat> seats_;
  std::vector<std::vector<std::vector<bool>>> fetches_;  // [program][phase][block]
  When when_ = When::prologue;
  std::int32_t step_ = 0;  // of the walk
  std::int16_t phase_ = -1;
  bool in_phase_ = false, over_ = false;
  std::size_t turn_ = 0, left_ = 0;  // whose it is; who is not done with the phase
};

}  // namespace hotbunk
