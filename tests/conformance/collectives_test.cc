// Collectives of two ranks: calls, payload, padding and wire as the rules say; sums in rank order; and ranks that fail.
#include <fmt/format.h>

#include <catch2/catch.hpp>
#include <cstring>

#include "tests/conformance/play.h"

namespace hotbunk::conformance {
namespace {

Bytes floats(const RankProgram& p, const Tensor& t, const std::vector<float>& values) {
  Bytes bytes(static_cast<std::size_t>(p.buffer_of(t).elements), std::byte{0xa5});
  std::memcpy(bytes.data() + RankProgram::guard, values.data(), values.size() * sizeof(float));
  return bytes;
}

std::vector<float> floats_of(const Bytes& bytes) {
  std::vector<float> values((bytes.size() - 2 * RankProgram::guard) / sizeof(float));
  std::memcpy(values.data(), bytes.data() + RankProgram::guard, values.size() * sizeof(float));
  return values;
}

Op collective(OpKind kind, std::string name, const Tensor& in, const Tensor& out) {
  Op o = toy::op(kind, streams::compute, std::move(name));
  o.inputs = {in}, o.outputs = {out};
  o.group = 0;
  return o;
}

/// All of a tensor's guards as they were fed.
bool guarded(const Bytes& is) {
  const auto untouched = [](std::byte b) { return b == std::byte{0xa5}; };
  return std::all_of(is.begin(), is.begin() + RankProgram::guard, untouched) &&
         std::all_of(is.end() - RankProgram::guard, is.end(), untouched);
}

struct Expected {
  std::vector<float> rank0, rank1;
};

/// Plays `op` over x (fed by rank) into y, and checks y and the one row of traffic.
void check(OpKind kind, std::vector<std::pair<Attr, AttrValue>> attrs, std::int64_t x_size, std::int64_t y_size,
           const Expected& x_values, const Expected& y_values, const std::vector<TrafficCount>& traffic) {
  const bool in_place = kind == OpKind::all_reduce || kind == OpKind::broadcast;
  RankProgram p;
  const Tensor x = p.tensor("x", DType::f32, {x_size});
  const Tensor y = in_place ? x : p.tensor("y", DType::f32, {y_size});
  p.feed(x);
  if (!in_place) p.feed(y);
  Op op = collective(kind, "together", x, y);
  op.attrs = std::move(attrs);
  p.add(op);
  p.fetch(y);
  const Script script{.feeds = {{"feed x@0", floats(p, x, x_values.rank0)},
                                {"feed x@1", floats(p, x, x_values.rank1)},
                                {"feed y", floats(p, y, std::vector<float>(static_cast<std::size_t>(y_size)))}}};
  for (const auto& subject : subjects()) {
    INFO(subject->name() << ", " << name_of(kind));
    const Played played = play(*subject, on_two_ranks(p), script);
    REQUIRE_THAT(played.failure(), Catch::Equals(""));
    REQUIRE(played.trace.traffic.size() == 2);
    for (std::size_t rank = 0; rank < 2; ++rank)
      CHECK(played.trace.traffic[rank] == RankTraffic{{{1, 0, 0, kind}, traffic[rank]}});
    if (!subject->has_values()) continue;
    const std::string name = fmt::format("fetch {}", in_place ? "x" : "y");
    for (const int rank : {0, 1}) {
      const Bytes& is = played.fetched.at(fmt::format("{}@{}", name, rank));
      CHECK(guarded(is));
      CHECK(floats_of(is) == (rank == 0 ? y_values.rank0 : y_values.rank1));
    }
  }
}

}  // namespace

TEST_CASE("all_gather: the ranks' parts, in order; padding counts apart") {
  // 3 fp32 of each of 2 ranks, the last one padding: 24 B, 20 payload, 4 padding, half of it on the wire.
  check(OpKind::all_gather, {{Attr::padding_bytes, std::int64_t{4}}}, 3, 6, {{1, 2, 3}, {4, 5, 6}},
        {{1, 2, 3, 4, 5, 6}, {1, 2, 3, 4, 5, 6}}, {{1, 20, 4, 12}, {1, 20, 4, 12}});
}

TEST_CASE("reduce_scatter: each rank its part of the sum") {
  check(OpKind::reduce_scatter, {}, 4, 2, {{1, 2, 3, 4}, {10, 20, 30, 40}}, {{11, 22}, {33, 44}},
        {{1, 16, 0, 8}, {1, 16, 0, 8}});
}

TEST_CASE("all_reduce: sum and maximum, everywhere the same") {
  // 3 fp32 over 2 ranks, chunks of 2 and 1: rank 0 sends the other's chunk and its own, 12 B, and so does rank 1.
  check(OpKind::all_reduce, {}, 3, 3, {{1, 2, 3}, {10, -20, 30}}, {{11, -18, 33}, {11, -18, 33}},
        {{1, 12, 0, 12}, {1, 12, 0, 12}});
  check(OpKind::all_reduce, {{Attr::reduce_max, std::int64_t{1}}}, 3, 3, {{1, 2, 3}, {10, -20, 30}},
        {{10, 2, 30}, {10, 2, 30}}, {{1, 12, 0, 12}, {1, 12, 0, 12}});
}

TEST_CASE("broadcast: the root's values; the last of the chain sends nothing") {
  check(OpKind::broadcast, {{Attr::src_rank, std::int64_t{1}}}, 2, 2, {{1, 2}, {3, 4}}, {{3, 4}, {3, 4}},
        {{1, 8, 0, 0}, {1, 8, 0, 8}});
}

TEST_CASE("traffic is counted by step, phase, family and kind, by the sizes of the run") {
  // As many fp32 as tokens, 6: 24 B each way.
  RankProgram p;
  const Tensor x = p.tensor("x", DType::f32, {100});
  Op op = collective(OpKind::all_reduce, "grads", x, x);
  op.inputs[0].shape[0] = op.outputs[0].shape[0] = {100, Sym::tokens};
  p.feed(x);
  p.add(op);
  p.add(op);
  const Script script{.feeds = {{"feed x", floats(p, x, std::vector<float>(100, 1.0F))}},
                      .sizes = {.tokens = 6, .seqs = 0, .attention_pairs = 0},
                      .steps = 2};
  for (const auto& subject : subjects()) {
    INFO(subject->name());
    const Played played = play(*subject, on_two_ranks(p), script);
    REQUIRE_THAT(played.failure(), Catch::Equals(""));
    REQUIRE(played.trace.traffic.size() == 2);
    const RankTraffic expected = {{{1, 0, 0, OpKind::all_reduce}, {2, 48, 0, 48}},
                                  {{2, 0, 0, OpKind::all_reduce}, {2, 48, 0, 48}}};
    CHECK(played.trace.traffic[0] == expected);
    CHECK(played.trace.traffic[1] == expected);
  }
}

TEST_CASE("ranks that disagree about a collective all learn of it, with op and sizes") {
  RankProgram p;
  const Tensor x = p.tensor("x", DType::f32, {8});
  p.feed(x);
  RankProgram other = p;
  Op op = collective(OpKind::all_reduce, "grads", x, x);
  p.add(op);
  op.inputs[0].shape[0] = op.outputs[0].shape[0] = {6};
  other.add(op);
  const Script script{.feeds = {{"feed x", floats(p, x, std::vector<float>(8, 1.0F))}}};
  for (const auto& subject : subjects()) {
    const Played played = play(*subject, plan_of({p.program(), other.program()}), script);
    for (const std::string& failure : played.failures) {
      INFO(subject->name() << ": " << failure);
      CHECK_THAT(failure, Catch::Contains("phase work") && Catch::Contains("all_reduce") && Catch::Contains("grads") &&
                              Catch::Contains("agree"));
    }
  }
}

TEST_CASE("an op that fails comes back from sync, with rank, phase and op, and the other rank is not left waiting") {
  RankProgram p;
  const Tensor x = p.tensor("x", DType::f32, {8});
  p.feed(x);
  p.fetch(x);
  const Script script{.feeds = {}, .failing_feed = "feed x"};
  for (const auto& subject : subjects()) {
    if (!subject->has_values()) continue;  // nothing that a driver does can fail there
    const Played played = play(*subject, on_two_ranks(p), script);
    REQUIRE(played.failures.size() == 2);
    for (std::size_t rank = 0; rank < 2; ++rank) {
      INFO(subject->name() << ": " << played.failures[rank]);
      CHECK_THAT(played.failures[rank], Catch::Contains("the driver has no data") && Catch::Contains("feed x") &&
                                            Catch::Contains(fmt::format("rank {}, phase work", rank)));
    }
  }
}

}  // namespace hotbunk::conformance
