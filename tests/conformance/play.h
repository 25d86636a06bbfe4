// A plan, played by a subject through `execute`, with data fed by op name; and what every rank saw.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tests/conformance/subject.h"
#include "tests/toy_plan.h"

namespace hotbunk::conformance {

using Bytes = std::vector<std::byte>;

struct Script {
  std::map<std::string, Bytes> feeds{};     // by the feed's name, or "name@rank" where ranks differ
  std::map<std::string, int> slow_feeds{};  // milliseconds that a feed takes
  std::string held_feed{};     // ends when the host has asked for all of the first block; after 10 s it throws
  std::string failing_feed{};  // throws RuntimeFailure("the driver has no data")
  Sizes sizes{};
  std::int32_t steps = 1;
};

struct Played {
  std::vector<std::string> failures;     // by process, as a user reads them; "" where all went well
  std::map<std::string, Bytes> fetched;  // "name@rank"; of subjects with values
  Trace trace;                           // of all ranks; empty where a process failed

  bool went_well() const;
  /// Of all processes, joined.
  std::string failure() const;
};

Played play(const Subject&, const Plan&, const Script& = {});

/// A job, and another one on the same devices that has them to itself in between.
struct TwoPlayed {
  Played suspended, other;
};
/// The plan is suspended when its phase number `before` is about to begin for the first time; then `other` is played
/// from its beginning to its end, by another backend of the same process, and the first goes on.
TwoPlayed play_suspended(const Subject&, const Plan&, const Script&, std::int16_t before, const Plan& other,
                         const Script& other_script);

/// The program of one rank, op by op, over buffers that lie between guards: `guard` bytes before and after each.
class RankProgram {
 public:
  static constexpr std::int64_t guard = 64;

  /// A window of dtype and shape (at most three dimensions) in a buffer of its own, on the device or in host memory.
  Tensor tensor(const std::string& name, DType, const std::vector<std::int64_t>& shape, Space = Space::device);
  /// The whole buffer of a tensor, guards included, as bytes.
  Tensor whole(const Tensor&) const;
  const Buffer& buffer_of(const Tensor& t) const { return buffers_[static_cast<std::size_t>(t.buffer)]; }

  void add(Op op) { ops_.push_back(std::move(op)); }
  /// "feed NAME" and "fetch NAME" of a tensor's whole buffer.
  void feed(const Tensor&, StreamId = streams::compute);
  void fetch(const Tensor&, StreamId = streams::compute);

  /// What is added from here on is of another phase.
  void end_phase() { phases_.push_back(ops_.size()); }

  /// All buffers mapped and allocated, the ops, all of it freed and unmapped.
  Program program() const;

 private:
  std::vector<Buffer> buffers_;
  std::vector<Op> ops_;
  std::vector<std::size_t> phases_;  // the ends of all but the last, in ops_
  std::int64_t end_[2] = {0, 0};     // by space
};

/// Phase "work", or "work 0" and so on of each iteration; group family 0, "world", is all ranks.
Plan plan_of(std::vector<Program>);
inline Plan plan_of(const RankProgram& p) { return plan_of(std::vector<Program>{p.program()}); }
/// The same program on two ranks.
inline Plan on_two_ranks(const RankProgram& p) { return plan_of({p.program(), p.program()}); }

}  // namespace hotbunk::conformance
