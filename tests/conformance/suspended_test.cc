// Jobs that take turns on the same devices: one is suspended, another has them from its beginning to its end, and the
// first goes on with what it had in memory.
#include <catch2/catch.hpp>

#include "tests/conformance/play.h"

namespace hotbunk::conformance {
namespace {

/// Phase 0 maps x, has it fed and leaves it there; phase 1 makes y of it on another stream, fetches it and unmaps all.
Plan two_phases(int ranks) {
  RankProgram p;
  const Tensor x = p.tensor("x", DType::u8, {8192}), y = p.tensor("y", DType::u8, {8192});
  p.feed(x);
  p.end_phase();
  Op copy = toy::op(OpKind::copy, streams::d2h, "copy");
  copy.inputs = {p.whole(x)}, copy.outputs = {p.whole(y)};
  p.add(copy);
  p.fetch(y, streams::d2h);
  return plan_of(std::vector<Program>(static_cast<std::size_t>(ranks), p.program()));
}

Script script_of(int value) {
  return {.feeds = {{"feed x", Bytes(8192 + 2 * RankProgram::guard, static_cast<std::byte>(value))}}, .steps = 3};
}

void check_like_alone(const Subject& subject, const Played& played, int value, const Played& alone) {
  REQUIRE_THAT(played.failure(), Catch::Equals(""));
  CHECK(played.fetched == alone.fetched);
  if (subject.has_values()) CHECK(played.fetched.at("fetch y@0").front() == static_cast<std::byte>(value));
  REQUIRE(played.trace.memory.size() == alone.trace.memory.size());
  for (std::size_t r = 0; r < alone.trace.memory.size(); ++r) {
    CHECK(played.trace.memory[r].device.mapped_peak_bytes == alone.trace.memory[r].device.mapped_peak_bytes);
    CHECK(played.trace.memory[r].device.peak_bytes == alone.trace.memory[r].device.peak_bytes);
    CHECK(played.trace.memory[r].device.end_mapped_bytes == 0);
  }
}

}  // namespace

TEST_CASE("a job that is suspended while another one has its devices goes on with what it had") {
  for (const auto& subject : subjects())
    for (const int ranks : {1, 2}) {
      INFO(subject->name() << ", " << ranks << " ranks");
      const Plan plan = two_phases(ranks);
      const Played alone = play(*subject, plan, script_of(7)), other_alone = play(*subject, plan, script_of(9));
      const TwoPlayed both = play_suspended(*subject, plan, script_of(7), 1, plan, script_of(9));
      check_like_alone(*subject, both.suspended, 7, alone);
      check_like_alone(*subject, both.other, 9, other_alone);
    }
}

}  // namespace hotbunk::conformance
