// One suite for every backend: its cases (the *_test.cc here) are written once against Backend, Device and Driver. To
// put a backend under it, add a Subject to subjects() in subjects.cc.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "exec/backend.h"

namespace hotbunk::conformance {

/// A process that plays some ranks of a plan.
struct Process {
  std::vector<Rank> ranks;
  /// Lives as long as the process.
  std::function<Backend&(Driver&)> backend;
};

class Subject {
 public:
  virtual ~Subject() = default;
  virtual std::string name() const = 0;
  /// Whether buffers hold data: feeds fill them, ops compute, fetches read. If not (the simulator), bytes, calls, order
  /// and refusals are asked all the same.
  virtual bool has_values() const = 0;
  /// Runs `work` in as many processes as the backend needs for so many ranks. What each returned, process by process;
  /// "lost: …" of one that came to no end.
  virtual std::vector<std::string> run(int ranks, const std::function<std::string(Process&)>& work) const = 0;
};

const std::vector<std::unique_ptr<Subject>>& subjects();
/// Those, and transports that differ from one of them in nothing but collectives.
std::vector<const Subject*> subjects_of_collectives();

}  // namespace hotbunk::conformance
