// Collectives of two ranks: calls, payload, padding and wire as the rules say; sums in rank order; and ranks that fail.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <catch2/catch.hpp>
#include <cstring>
#include <span>

#include "tests/conformance/play.h"

namespace hotbunk::conformance {
namespace {

Bytes floats(const RankProgram& p, const Tensor& t, const std::vector<float>& values) {
  Bytes bytes(static_cast<std::size_t>(p.buffer_of(t).elements), std::byte{0xa5});
  std::ranges::copy(std::as_bytes(std::span(values)), bytes.begin() + RankProgram::guard);  // of none, too
  return bytes;
}

std::vector<float> floats_of(const Bytes& bytes) {
  std::vector<float> values((bytes.size() - 2 * RankProgram::guard) / sizeof(float));
  if (!values.empty()) std::memcpy(values.data(), bytes.data() + RankProgram::guard, values.size() * sizeof(float));
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
  for (const auto& subject : subjects_of_collectives()) {
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

TEST_CASE("all_to_all: part r of each rank goes to rank r; half of it is the rank's own") {
  check(OpKind::all_to_all, {}, 4, 4, {{1, 2, 3, 4}, {10, 20, 30, 40}}, {{1, 2, 10, 20}, {3, 4, 30, 40}},
        {{1, 16, 0, 8}, {1, 16, 0, 8}});
}

TEST_CASE(
    "all_to_all of rows: to the rank of each row's expert, rank by rank, and back; the payload is the own tokens'") {
  // 3 rows of 2 fp32 on each rank, sorted by 2 experts, of which each rank has one. Rank 0 sends its first to itself
  // and two to rank 1, which sends all of its to rank 0: there come 4 and 2, of 6 at most.
  for (const bool back : {false, true}) {
    RankProgram p;
    const Tensor own = p.tensor("own", DType::f32, {3, 1, 2}), came = p.tensor("came", DType::f32, {6, 2}),
                 offsets = p.tensor("offsets", DType::i32, {2, 3});
    for (const Tensor& t : {own, came, offsets}) p.feed(t);
    Op op = collective(OpKind::all_to_all, "together", back ? came : own, back ? own : came);
    op.inputs.push_back(offsets);
    p.add(op);
    p.fetch(back ? own : came);
    Bytes sent = floats(p, offsets, {});
    const std::array<std::int32_t, 6> of_both = {0, 1, 3, 0, 3, 3};
    std::memcpy(sent.data() + RankProgram::guard, of_both.data(), sizeof of_both);
    const std::vector<float> own0 = {1, 2, 3, 4, 5, 6}, own1 = {10, 20, 30, 40, 50, 60},
                             came0 = {1, 2, 10, 20, 30, 40, 50, 60, 0, 0, 0, 0},
                             came1 = {3, 4, 5, 6, 0, 0, 0, 0, 0, 0, 0, 0}, nothing(12, 0.0F);
    const Script script{.feeds = {{"feed offsets", sent},
                                  {"feed own@0", floats(p, own, back ? std::vector<float>(6) : own0)},
                                  {"feed own@1", floats(p, own, back ? std::vector<float>(6) : own1)},
                                  {"feed came@0", floats(p, came, back ? came0 : nothing)},
                                  {"feed came@1", floats(p, came, back ? came1 : nothing)}}};
    for (const auto& subject : subjects_of_collectives()) {
      INFO(subject->name() << ", " << (back ? "back" : "there"));
      const Played played = play(*subject, on_two_ranks(p), script);
      REQUIRE_THAT(played.failure(), Catch::Equals(""));
      for (std::size_t rank = 0; rank < 2; ++rank) {
        // The simulator sends half of them, as routers are trained to.
        const std::int64_t moved = !subject->has_values() ? 12 : back ? (rank == 0 ? 24 : 16) : (rank == 0 ? 16 : 24);
        CHECK(played.trace.traffic[rank] == RankTraffic{{{1, 0, 0, OpKind::all_to_all}, {1, 24, 0, moved}}});
      }
      if (!subject->has_values()) continue;
      for (const int rank : {0, 1}) {
        const Bytes& is = played.fetched.at(fmt::format("fetch {}@{}", back ? "own" : "came", rank));
        CHECK(guarded(is));
        CHECK(floats_of(is) == (back ? (rank == 0 ? own0 : own1) : (rank == 0 ? came0 : came1)));
      }
    }
  }
}

TEST_CASE("broadcast: the root's values; the last of the chain sends nothing") {
  check(OpKind::broadcast, {{Attr::src_rank, std::int64_t{1}}}, 2, 2, {{1, 2}, {3, 4}}, {{3, 4}, {3, 4}},
        {{1, 8, 0, 0}, {1, 8, 0, 8}});
}

namespace {

/// A program that receives `received` fp32 in y and sends `sent` of x, by these places; -1 elements: it does not.
RankProgram messages(std::int64_t sent, std::int64_t received, std::vector<std::pair<Attr, AttrValue>> attrs,
                     std::int64_t padding_bytes = 0) {
  RankProgram p;
  Op op = toy::op(received < 0 ? OpKind::send
                  : sent < 0   ? OpKind::recv
                               : OpKind::send_recv,
                  streams::compute, "message");
  op.attrs = std::move(attrs);
  op.group = 0;
  if (padding_bytes > 0) op.attrs.emplace_back(Attr::padding_bytes, padding_bytes);
  if (sent >= 0) {
    op.inputs = {p.tensor("x", DType::f32, {sent})};
    p.feed(op.inputs[0]);
  }
  if (received >= 0) {
    op.outputs = {p.tensor("y", DType::f32, {received})};
    p.feed(op.outputs[0]);
  }
  p.add(op);
  if (sent >= 0) p.fetch(op.inputs[0]);
  if (received >= 0) p.fetch(op.outputs[0]);
  return p;
}

std::vector<std::pair<Attr, AttrValue>> places(std::int64_t peer, std::int64_t source) {
  return {{Attr::peer, peer}, {Attr::source, source}};
}
std::vector<std::pair<Attr, AttrValue>> steps(std::int64_t peer, std::int64_t source) {
  return {{Attr::peer, peer}, {Attr::source, source}, {Attr::relative, std::int64_t{1}}};
}

/// Rank r feeds x with 10 r, 10 r + 1, …; what a rank receives is `from`'s, and it counts `traffic`.
struct Receives {
  RankProgram program;
  std::int64_t sent, received;
  int from;
  RankTraffic traffic;
};

void check_messages(const std::vector<Receives>& ranks) {
  Script script;
  std::vector<Program> programs;
  const auto values = [](int rank, std::int64_t n) {
    std::vector<float> out;
    for (std::int64_t i = 0; i < n; ++i) out.push_back(static_cast<float>(10 * rank + i));
    return out;
  };
  const auto bytes = [](const std::vector<float>& v) {
    Bytes out(v.size() * sizeof(float) + 2 * RankProgram::guard, std::byte{0xa5});
    if (!v.empty()) std::memcpy(out.data() + RankProgram::guard, v.data(), v.size() * sizeof(float));
    return out;
  };
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    programs.push_back(ranks[r].program.program());
    if (ranks[r].sent >= 0)
      script.feeds[fmt::format("feed x@{}", r)] = bytes(values(static_cast<int>(r), ranks[r].sent));
    if (ranks[r].received >= 0)
      script.feeds[fmt::format("feed y@{}", r)] =
          bytes(std::vector<float>(static_cast<std::size_t>(ranks[r].received), -1.0F));
  }
  const Plan plan = plan_of(programs);
  for (const auto& subject : subjects_of_collectives()) {
    INFO(subject->name());
    const Played played = play(*subject, plan, script);
    REQUIRE_THAT(played.failure(), Catch::Equals(""));
    REQUIRE(played.trace.traffic.size() == ranks.size());
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      INFO("rank " << r);
      CHECK(played.trace.traffic[r] == ranks[r].traffic);
      if (!subject->has_values()) continue;
      if (ranks[r].sent >= 0) {
        const Bytes& x = played.fetched.at(fmt::format("fetch x@{}", r));
        CHECK(guarded(x));
        CHECK(floats_of(x) == values(static_cast<int>(r), ranks[r].sent));
      }
      if (ranks[r].received >= 0) {
        const Bytes& y = played.fetched.at(fmt::format("fetch y@{}", r));
        CHECK(guarded(y));
        CHECK(floats_of(y) == values(ranks[r].from, ranks[r].received));
      }
    }
  }
}

RankTraffic message_counts(OpKind kind, TrafficCount count) { return {{{1, 0, 0, kind}, count}}; }

}  // namespace

TEST_CASE("send and recv: what one rank has goes to the other, by its place or relative to one's own") {
  // 5 fp32, the last of them padding: 20 B on the wire, 16 of them payload; the receiver counts the call alone.
  for (const bool relative : {false, true}) {
    const auto to = relative ? steps(1, 0) : places(1, 0), from = relative ? steps(-1, 0) : places(0, 0);
    check_messages({{messages(5, -1, to, 4), 5, -1, -1, message_counts(OpKind::send, {1, 16, 4, 20})},
                    {messages(-1, 5, from), -1, 5, 0, message_counts(OpKind::recv, {1, 0, 0, 0})}});
  }
}

TEST_CASE("send_recv: two ranks swap what they have, of different sizes") {
  // Rank 0 sends 3 fp32 and receives 5: 12 B and 20 B.
  check_messages({{messages(3, 5, places(1, 1)), 3, 5, 1, message_counts(OpKind::send_recv, {1, 12, 0, 12})},
                  {messages(5, 3, places(0, 0)), 5, 3, 0, message_counts(OpKind::send_recv, {1, 20, 0, 20})}});
}

TEST_CASE("send_recv: one program on a ring of ranks, to the next and to the previous one") {
  // 100 000 fp32 are 400 000 B: more than any transport holds on the way, so ranks that send before they receive would
  // wait for each other.
  for (const std::int64_t n : {0, 7, 100'000})
    for (const std::int64_t next : {1, -1}) {
      const TrafficCount count{1, 4 * n, 0, 4 * n};
      std::vector<Receives> ranks;
      for (int r = 0; r < 3; ++r)
        ranks.push_back({messages(n, n, steps(next, -next)), n, n, (r + (next == 1 ? 2 : 1)) % 3,
                         message_counts(OpKind::send_recv, count)});
      check_messages(ranks);
    }
}

TEST_CASE("send_recv: its halves meet a send and a recv") {
  // 0 sends to 1, which sends to 2 at the same time.
  check_messages({{messages(4, -1, places(1, 0)), 4, -1, -1, message_counts(OpKind::send, {1, 16, 0, 16})},
                  {messages(6, 4, places(2, 0)), 6, 4, 0, message_counts(OpKind::send_recv, {1, 24, 0, 24})},
                  {messages(-1, 6, places(1, 0)), -1, 6, 1, message_counts(OpKind::recv, {1, 0, 0, 0})}});
}

TEST_CASE("send_recv: alone in its ring a rank keeps what it has, and nothing goes over a wire") {
  check_messages({{messages(6, 6, steps(1, -1)), 6, 6, 0, message_counts(OpKind::send_recv, {1, 24, 0, 0})}});
}

TEST_CASE("send_recv: rounds follow each other in order, on two streams at once") {
  // Three ranks hand on what they got three times: everybody has its own again. On another stream the other way, once:
  // what rank r + 1 has.
  RankProgram p;
  const Tensor x = p.tensor("x", DType::f32, {3}), y = p.tensor("y", DType::f32, {3}),
               back = p.tensor("back", DType::f32, {3}), own = p.tensor("own", DType::f32, {3});
  for (const Tensor& t : {x, y}) p.feed(t);
  for (const Tensor& t : {back, own}) p.feed(t, streams::gather);
  const auto round = [&](const Tensor& from, const Tensor& to, std::int64_t next, StreamId stream) {
    Op op = toy::op(OpKind::send_recv, stream, "round");
    op.inputs = {from}, op.outputs = {to}, op.attrs = steps(next, -next), op.group = 0;
    p.add(op);
  };
  round(x, y, 1, streams::compute);
  round(own, back, -1, streams::gather);
  round(y, x, 1, streams::compute);
  round(x, y, 1, streams::compute);
  p.fetch(y);
  p.fetch(back, streams::gather);
  // The gather stream begins behind compute, which maps and allocates, and compute ends behind it.
  Program program = p.program();
  Call& call = program.phases[0][0].calls[0];
  const auto& ops = program.bodies[0].ops;
  const auto first = std::ranges::find(ops, streams::gather, &Op::stream) - ops.begin();
  const auto last = std::ranges::find(ops, OpKind::free, &Op::kind) - ops.begin();
  call.marks = {{static_cast<std::int32_t>(first), OpKind::record, streams::compute, 0},
                {static_cast<std::int32_t>(first), OpKind::wait, streams::gather, 0},
                {static_cast<std::int32_t>(last), OpKind::record, streams::gather, 1},
                {static_cast<std::int32_t>(last), OpKind::wait, streams::compute, 1}};
  Script script{.feeds = {{"feed y", floats(p, y, {0, 0, 0})}, {"feed back", floats(p, back, {0, 0, 0})}}};
  for (int r = 0; r < 3; ++r)
    for (const char* name : {"x", "own"}) {
      const auto v = static_cast<float>(10 * r);
      script.feeds[fmt::format("feed {}@{}", name, r)] = floats(p, x, {v, v + 1, v + 2});
    }
  for (const auto& subject : subjects_of_collectives()) {
    INFO(subject->name());
    const Played played = play(*subject, plan_of({program, program, program}), script);
    REQUIRE_THAT(played.failure(), Catch::Equals(""));
    for (int r = 0; r < 3; ++r) {
      CHECK(played.trace.traffic[static_cast<std::size_t>(r)] == message_counts(OpKind::send_recv, {4, 48, 0, 48}));
      if (!subject->has_values()) continue;
      const auto v = static_cast<float>(10 * r), n = static_cast<float>(10 * ((r + 1) % 3));
      CHECK(floats_of(played.fetched.at(fmt::format("fetch y@{}", r))) == std::vector<float>{v, v + 1, v + 2});
      CHECK(floats_of(played.fetched.at(fmt::format("fetch back@{}", r))) == std::vector<float>{n, n + 1, n + 2});
    }
  }
}

TEST_CASE("traffic is counted by step, phase, family and kind, by the sizes of the run") {
  // As many fp32 as tokens, 6: 24 B each way.
  RankProgram p;
  const Tensor x = p.tensor("x", DType::f32, {100});
  Op op = collective(OpKind::all_reduce, "grads", x, x);
  op.inputs[0].shape[0] = op.outputs[0].shape[0] = {100, tokens_extent};
  p.feed(x);
  p.add(op);
  p.add(op);
  const Script script{.feeds = {{"feed x", floats(p, x, std::vector<float>(100, 1.0F))}},
                      .sizes = {.tokens = 6, .seqs = 0, .attention_pairs = 0},
                      .steps = 2};
  for (const auto& subject : subjects_of_collectives()) {
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
  for (const auto& subject : subjects_of_collectives()) {
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
  for (const auto& subject : subjects_of_collectives()) {
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

TEST_CASE("meetings on two streams that ranks' programs name in other orders are held all the same") {
  // Several of them: which thread of a rank is first is luck, and must not matter.
  const auto program = [](bool crossed) {
    RankProgram p;
    const Tensor a = p.tensor("a", DType::f32, {3}), b = p.tensor("b", DType::f32, {3});
    p.feed(a, streams::gather), p.feed(b, streams::reduce);
    for (int i = 0; i < 6; ++i)
      for (const bool second : {false, true}) {
        const bool is_b = second != (crossed && i % 2 == 0);
        Op op = collective(OpKind::all_reduce, fmt::format("{} {}", is_b ? "b" : "a", i), is_b ? b : a, is_b ? b : a);
        op.stream = is_b ? streams::reduce : streams::gather;
        p.add(op);
      }
    p.fetch(a, streams::gather), p.fetch(b, streams::reduce);
    return p;
  };
  const RankProgram straight = program(false);
  Bytes image(3 * sizeof(float) + 2 * RankProgram::guard, std::byte{0xa5});
  const std::vector<float> values = {1.0f, -2.0f, 3.0f};
  std::memcpy(image.data() + RankProgram::guard, values.data(), values.size() * sizeof(float));
  const Script script{.feeds = {{"feed a", image}, {"feed b", image}}};
  for (const auto& subject : subjects_of_collectives()) {
    INFO(subject->name());
    const Played played = play(*subject, plan_of({straight.program(), program(true).program()}), script);
    REQUIRE_THAT(played.failure(), Catch::Equals(""));
    if (!subject->has_values()) continue;
    for (const char* name : {"fetch a@0", "fetch b@0", "fetch a@1", "fetch b@1"})
      CHECK(floats_of(played.fetched.at(name)) == std::vector<float>{64.0f, -128.0f, 192.0f});  // doubled six times
  }
}

}  // namespace hotbunk::conformance
