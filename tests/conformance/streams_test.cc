// Streams run in order with themselves; between them only record and wait give an order.
#include <fmt/format.h>

#include <bit>
#include <catch2/catch.hpp>
#include <cstring>
#include <vector>

#include "tests/conformance/play.h"

namespace hotbunk::conformance {
namespace {

using toy::record;
using toy::wait;

Bytes filled(const RankProgram& p, const Tensor& t, int value) {
  return Bytes(static_cast<std::size_t>(p.buffer_of(t).elements), static_cast<std::byte>(value));
}

Op copy(const std::string& name, StreamId stream, const Tensor& from, const Tensor& to) {
  Op o = toy::op(OpKind::copy, stream, name);
  o.inputs = {from}, o.outputs = {to};
  return o;
}

/// The span of an op on a rank.
Span span_of(const Played& played, const std::string& name, Rank rank) {
  for (const Span& s : played.trace.spans)
    if (s.rank == rank && played.trace.names[static_cast<std::size_t>(s.name)] == name) return s;
  FAIL("no span of " << name);
  return {};
}

void check_order(const Played& played, const std::string& first, const std::string& then) {
  for (const Rank rank : {0, 1}) {
    INFO(first << " before " << then << " on rank " << rank);
    CHECK(span_of(played, first, rank).end_ns <= span_of(played, then, rank).start_ns);
  }
}

/// Two ranks play it; the feed of x takes a while.
Played with_slow_x(const Subject& subject, const RankProgram& p, const Tensor& x, std::int32_t steps = 1) {
  Played played = play(subject, on_two_ranks(p),
                       {.feeds = {{"feed x", filled(p, x, 7)}}, .slow_feeds = {{"feed x", 30}}, .steps = steps});
  REQUIRE_THAT(played.failure(), Catch::Equals(""));
  return played;
}

}  // namespace

TEST_CASE("what waits for an event sees what was done before its record") {
  RankProgram p;
  const Tensor x = p.tensor("x", DType::u8, {256}), y = p.tensor("y", DType::u8, {256});
  p.feed(x);  // takes a while
  p.add(record(3, streams::compute));
  p.add(wait(3, streams::h2d));
  p.add(copy("copy", streams::h2d, x, y));
  p.add(record(4, streams::h2d));
  p.add(wait(4, streams::d2h));
  p.fetch(y, streams::d2h);
  for (const auto& subject : subjects()) {
    INFO(subject->name());
    const Played played = with_slow_x(*subject, p, x);
    check_order(played, "feed x", "copy");
    check_order(played, "copy", "fetch y");
    if (subject->has_values())
      for (const char* name : {"fetch y@0", "fetch y@1"})
        CHECK(played.fetched.at(name)[RankProgram::guard + 17] == std::byte{7});
  }
}

TEST_CASE("what the host computes in its own memory is ordered with copies by events, before and behind") {
  RankProgram p;
  const Tensor x = p.tensor("x", DType::f32, {64}), y = p.tensor("y", DType::f32, {64}),
               below = p.tensor("below", DType::f32, {64}, Space::host),
               twice = p.tensor("twice", DType::f32, {64}, Space::host);
  p.feed(x);  // takes a while
  p.add(record(3, streams::compute));
  p.add(wait(3, streams::d2h));
  p.add(copy("down", streams::d2h, x, below));
  p.add(record(4, streams::d2h));
  p.add(wait(4, streams::host));
  Op add = toy::op(OpKind::add, streams::host, "add");
  add.inputs = {below, below}, add.outputs = {twice};
  p.add(add);
  p.add(record(5, streams::host));
  p.add(wait(5, streams::h2d));
  p.add(copy("up", streams::h2d, twice, y));
  p.add(record(6, streams::h2d));
  // The host writes again what was copied from, and what was copied to is fetched.
  Op zero = toy::op(OpKind::zero, streams::host, "zero");
  zero.outputs = {twice};
  p.add(wait(6, streams::host));
  p.add(zero);
  p.add(wait(6, streams::compute));
  p.fetch(y);
  p.fetch(twice, streams::host);
  for (const auto& subject : subjects()) {
    INFO(subject->name());
    // In the third step nothing is timed, so nothing follows the host's last op when its memory goes back.
    const Played played = with_slow_x(*subject, p, x, 3);
    const std::vector<const char*> order = {"feed x", "down", "add", "up", "zero"};
    for (std::size_t i = 0; i + 1 < order.size(); ++i) check_order(played, order[i], order[i + 1]);
    check_order(played, "up", "fetch y");
    if (!subject->has_values()) continue;
    const auto first_of = [&](const char* fetch) {
      float value = -1;
      std::memcpy(&value, played.fetched.at(fetch).data() + RankProgram::guard, sizeof value);
      return value;
    };
    const float fed = std::bit_cast<float>(0x07070707);  // of bytes 7
    for (const char* rank : {"@0", "@1"}) {
      CHECK(first_of(fmt::format("fetch y{}", rank).c_str()) == 2 * fed);
      CHECK(first_of(fmt::format("fetch twice{}", rank).c_str()) == 0);
    }
  }
}

TEST_CASE("a wait is for the most recent record, and a later record does not move it") {
  RankProgram p;
  const Tensor x = p.tensor("x", DType::u8, {64}), y = p.tensor("y", DType::u8, {64}),
               z = p.tensor("z", DType::u8, {64});
  p.feed(x);
  p.add(record(0, streams::compute));
  p.feed(y);  // takes a while
  p.add(record(0, streams::compute));
  p.add(wait(0, streams::h2d));  // for the second: x and y are there
  p.add(copy("y to z", streams::h2d, y, z));
  // A wait that a later record moved would wait for ever here: compute waits for what follows on h2d.
  p.add(record(1, streams::h2d));
  p.add(wait(1, streams::compute));
  p.feed(x);
  p.add(record(0, streams::compute));
  p.add(wait(0, streams::d2h));
  p.fetch(z, streams::d2h);
  for (const auto& subject : subjects()) {
    INFO(subject->name());
    const Played played =
        play(*subject, on_two_ranks(p),
             {.feeds = {{"feed x", filled(p, x, 1)}, {"feed y", filled(p, y, 2)}}, .slow_feeds = {{"feed y", 30}}});
    REQUIRE_THAT(played.failure(), Catch::Equals(""));
    check_order(played, "feed y", "y to z");
    check_order(played, "y to z", "fetch z");
    if (subject->has_values()) CHECK(played.fetched.at("fetch z@1")[RankProgram::guard] == std::byte{2});
  }
}

TEST_CASE("a wait for an event that nobody recorded does nothing") {
  RankProgram p;
  const Tensor x = p.tensor("x", DType::u8, {64});
  p.add(wait(9, streams::compute));
  p.feed(x);
  p.fetch(x);
  for (const auto& subject : subjects()) {
    INFO(subject->name());
    CHECK_THAT(play(*subject, on_two_ranks(p), {.feeds = {{"feed x", filled(p, x, 1)}}}).failure(), Catch::Equals(""));
  }
}

TEST_CASE("a stream that only records and waits hands order on") {
  RankProgram p;
  const Tensor x = p.tensor("x", DType::u8, {256}), y = p.tensor("y", DType::u8, {256});
  p.feed(x);  // on compute
  p.add(record(3, streams::compute));
  p.add(wait(3, streams::reduce));  // which has no op
  p.add(record(4, streams::reduce));
  p.add(wait(4, streams::h2d));
  p.add(copy("copy", streams::h2d, x, y));
  for (const auto& subject : subjects()) {
    INFO(subject->name());
    const Played played = with_slow_x(*subject, p, x);
    check_order(played, "feed x", "copy");
  }
}

TEST_CASE("a stream runs in order, step after step") {
  RankProgram p;
  const Tensor x = p.tensor("x", DType::u8, {64}), y = p.tensor("y", DType::u8, {64}),
               z = p.tensor("z", DType::u8, {64});
  p.feed(x);
  p.add(copy("x to y", streams::compute, x, y));
  p.add(copy("y to z", streams::compute, y, z));
  p.fetch(z);
  for (const auto& subject : subjects()) {
    INFO(subject->name());
    const Played played = play(*subject, on_two_ranks(p),
                               {.feeds = {{"feed x", filled(p, x, 5)}}, .slow_feeds = {{"feed x", 10}}, .steps = 2});
    REQUIRE_THAT(played.failure(), Catch::Equals(""));
    check_order(played, "feed x", "x to y");
    check_order(played, "x to y", "y to z");
    check_order(played, "y to z", "fetch z");
    if (subject->has_values()) CHECK(played.fetched.at("fetch z@0")[RankProgram::guard] == std::byte{5});
    int copies = 0;
    for (const Span& s : played.trace.spans)
      copies += played.trace.names[static_cast<std::size_t>(s.name)] == "x to y" ? 1 : 0;
    CHECK(copies == 2 * 2);  // ranks, steps
  }
}

}  // namespace hotbunk::conformance
