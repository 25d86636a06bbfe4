// The parts of the verifier (verify.h). Those of one program walk it as a rank would (access.h:
// walk_turns); their programs have passed the checks of every op's shape.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "graph/plan.h"

namespace hotbunk {

/// What is wrong, the first `limit` of it.
class Faults {
 public:
  explicit Faults(std::size_t limit) : limit_(limit) {}
  bool full() const { return lines_.size() >= limit_; }
  bool any() const { return !lines_.empty(); }
  void add(std::string line) {
    if (!full()) lines_.push_back(std::move(line));
  }
  std::vector<std::string> take() { return std::move(lines_); }

 private:
  std::size_t limit_;
  std::vector<std::string> lines_;
};

// verify_meetings.cc: between ranks.
/// Roles, what they play, and that none waits for itself through another (before programs are known to be whole).
void check_roles(const Plan&, Faults&);
/// That the members of a group issue the same collectives in the same order.
void check_conversations(const Plan&, Faults&);
/// That what is sent is received: between two ranks the same bytes in the same order, over the same streams, in
/// the same phases and blocks.
void check_pairs(const Plan&, Faults&);
/// That ranks which send to one another do not wait for each other for ever (verify_deadlock.cc). Of plans that pass
/// both checks above.
void check_deadlock(const Plan&, Faults&);

/// What is alive and mapped, and the order between streams.
void check_memory_and_order(const Plan&, std::size_t program, Faults&);

/// Of each block: a turn of a slot limit waits for the one whose slot it takes, and no stream waits for an op with
/// which the waiting one shares no buffer and no slot; blocks that come in any order join all streams at their borders
/// (verify_order.cc).
void check_waits(const Plan&, std::size_t program, Faults&);

/// That an op reads only bytes that were written, on every rank of the program.
void check_written(const Plan&, std::size_t program, Faults&);

}  // namespace hotbunk
