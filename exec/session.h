// Session: one walk over a plan, a block at a time, so that who drives it may do something else in between: suspend a
// job, play another one's blocks, and go on.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "exec/backend.h"
#include "graph/section_states.h"

namespace hotbunk {

class Session {
 public:
  /// Plays the ranks of the devices, which are a backend's of this plan. Plan and driver outlive it.
  Session(const Plan&, Driver&, std::vector<std::unique_ptr<Device>>, const RunOptions&);

  /// Plays one block of one rank, or what stands between two phases. Ranks take turns, a block each (where no driver
  /// decides, a phase's blocks in one turn), so that a simulator's ranks advance together. False: the walk is over. A
  /// failure carries rank, phase and block, and ends it.
  Result<bool> advance();

  /// Waits until all that was played is done: behind it a suspended job has nothing running on its devices.
  Status settle();

  /// Where it is: the next block is of this step and phase; phase -1: before the first, between two, or over.
  std::int32_t step() const { return step_; }
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
  const RunOptions options_;
  std::vector<Seat> seats_;
  std::vector<std::vector<std::vector<bool>>> fetches_;  // [program][phase][block]
  When when_ = When::prologue;
  std::int32_t step_ = 0;
  std::int16_t phase_ = -1;
  bool in_phase_ = false, over_ = false;
  std::size_t turn_ = 0, left_ = 0;  // whose it is; who is not done with the phase
};

}  // namespace hotbunk
