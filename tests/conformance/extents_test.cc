// Dimensions that the device counts: how many rows there are is known where the ops run, and nowhere else.
#include <fmt/format.h>

#include <catch2/catch.hpp>
#include <cstring>

#include "graph/verify.h"
#include "tests/conformance/play.h"

namespace hotbunk::conformance {
namespace {

constexpr ExtentId routed_extent{2}, kept_extent{3};
constexpr std::int64_t capacity = 8, width = 4;  // of "routed"; of a row
constexpr auto untouched = std::byte{0xa5};
constexpr auto guard = static_cast<std::size_t>(RankProgram::guard);

/// A whole buffer: sentinels, but for these values from the tensor's first element on.
template <class T>
Bytes image(const RankProgram& p, const Tensor& t, const std::vector<T>& values) {
  Bytes bytes(static_cast<std::size_t>(p.buffer_of(t).elements), untouched);
  if (!values.empty()) std::memcpy(bytes.data() + guard, values.data(), values.size() * sizeof(T));
  return bytes;
}

template <class F>
auto numbers(std::int64_t n, F&& value) {
  std::vector<decltype(value(n))> out;
  for (std::int64_t i = 0; i < n; ++i) out.push_back(value(i));
  return out;
}

/// Two ranks. The first says how many rows there are: the host is told 99 on the second, whose device hears the number
/// by broadcast, on stream gather. Rows are then cleared, cast and added on compute, copied on h2d, gathered on gather.
struct Routing {
  RankProgram p;
  Tensor n = p.tensor("n", DType::i64, {1}), x = rows("x", DType::f32), a = rows("a", DType::f32),
         cleared = rows("cleared", DType::f32), cast = rows("cast", DType::bf16), sum = rows("sum", DType::f32),
         copied = rows("copied", DType::f32), all = p.tensor("all", DType::f32, {2, capacity, width});
  std::vector<Tensor> results = {cleared, cast, sum, copied, all};

  Tensor rows(const std::string& name, DType dtype) {
    Tensor t = p.tensor(name, dtype, {capacity, width});
    t.shape[0].extent = routed_extent;
    return t;
  }
  void add(OpKind kind, StreamId stream, const std::string& name, std::vector<Tensor> in, const Tensor& out) {
    Op o = toy::op(kind, stream, name);
    o.inputs = std::move(in), o.outputs = {out};
    if (is_communication(kind)) o.group = 0;
    p.add(toy::counted(std::move(o), {n}));
  }
  /// What `to` does next comes behind what `from` has done.
  void order(EventId event, StreamId from, StreamId to) {
    p.add(toy::record(event, from));
    p.add(toy::wait(event, to));
  }

  Plan plan() {
    all.shape[1].extent = routed_extent, results.back() = all;
    order(0, streams::compute, streams::host);
    p.feed(n, streams::host);
    for (const Tensor& t : {x, a}) p.feed(t);
    for (const Tensor& t : results) p.feed(t);
    order(1, streams::host, streams::gather);
    Op tell = toy::op(OpKind::broadcast, streams::gather, "tell");
    tell.inputs = tell.outputs = {n}, tell.group = 0, tell.attrs = {{Attr::src_rank, std::int64_t{0}}};
    p.add(tell);
    order(2, streams::gather, streams::compute);
    add(OpKind::zero, streams::compute, "clear", {}, cleared);
    add(OpKind::cast, streams::compute, "cast", {x}, cast);
    add(OpKind::add, streams::compute, "add", {x, a}, sum);
    order(3, streams::compute, streams::h2d);
    p.add(toy::wait(3, streams::gather));
    add(OpKind::copy, streams::h2d, "copy", {sum}, copied);
    add(OpKind::all_gather, streams::gather, "gather", {sum}, all);
    for (const Tensor& t : {cleared, cast, sum}) p.fetch(t);
    order(4, streams::h2d, streams::compute);
    p.fetch(copied);
    order(5, streams::gather, streams::compute);
    p.fetch(all);
    Plan plan = on_two_ranks(p);
    plan.extents.push_back({"routed", capacity, CountedBy::device});
    for (Program& program : plan.programs) end_in_a_block(program);
    return plan;
  }
  /// An unmap waits for the streams: it comes in a block of its own, which the host asks for later.
  static void end_in_a_block(Program& program) {
    std::vector<Block>& blocks = program.phases[0];
    std::vector<Op> ops = test::ops_of(program, blocks[0]);
    const std::vector<Op> last = {ops.back()};
    ops.pop_back();
    blocks[0] = test::block_of(program, "only", ops);
    blocks.push_back(test::block_of(program, "end", last));
  }

  Script script(std::int64_t count, std::int64_t said_by_driver) const {
    Script s{.held_feed = "feed n"};
    for (const int rank : {0, 1}) {
      s.feeds[fmt::format("feed x@{}", rank)] =
          image(p, x, numbers(capacity * width, [&](std::int64_t i) { return static_cast<float>(100 * rank + i); }));
      s.feeds[fmt::format("feed n@{}", rank)] = image<std::int64_t>(p, n, {rank == 0 ? count : 99});
    }
    s.feeds["feed a"] = image(p, a, std::vector<float>(capacity * width, 1000.0F));
    for (const Tensor& t : results) s.feeds["feed " + p.buffer_of(t).name] = image<float>(p, t, {});
    s.sizes[routed_extent] = said_by_driver;
    return s;
  }
};

void check_values(const Routing& r, const Played& played, std::int64_t count) {
  for (const int rank : {0, 1}) {
    INFO("rank " << rank);
    const auto is = [&](const Tensor& t) {
      return played.fetched.at(fmt::format("fetch {}@{}", r.p.buffer_of(t).name, rank));
    };
    const std::int64_t n = count * width;
    const auto x_of = [](int who, std::int64_t i) { return static_cast<float>(100 * who + i); };
    const auto sum = numbers(n, [&](std::int64_t i) { return x_of(rank, i) + 1000.0F; });
    CHECK(is(r.cleared) == image(r.p, r.cleared, std::vector<float>(static_cast<std::size_t>(n))));
    CHECK(is(r.cast) == image(r.p, r.cast, numbers(n, [&](std::int64_t i) { return to_bf16(x_of(rank, i)).bits; })));
    CHECK(is(r.sum) == image(r.p, r.sum, sum));
    CHECK(is(r.copied) == image(r.p, r.copied, sum));
    CHECK(is(r.all) ==
          image(r.p, r.all, numbers(2 * n, [&](std::int64_t i) { return x_of(i < n ? 0 : 1, i % n) + 1000.0F; })));
  }
}

/// The bytes of an op's span on rank 0.
std::int64_t bytes_of(const Played& played, const std::string& name) {
  for (const Span& s : played.trace.spans)
    if (s.rank == 0 && played.trace.names[static_cast<std::size_t>(s.name)] == name) return s.bytes;
  return -1;
}

}  // namespace

TEST_CASE(
    "ops on several streams do what a count of the device says, and the host has asked for all before it is made") {
  Routing r;
  const Plan plan = r.plan();
  REQUIRE(verify(plan) == std::vector<std::string>{});
  for (const std::int64_t count : {0, 3, 8})
    for (const std::int64_t said : {count, uncounted, std::int64_t{5}}) {
      const Script script = r.script(count, said);
      for (const auto& subject : subjects()) {
        INFO(subject->name() << ", " << count << " rows, the driver says " << said);
        const Played played = play(*subject, plan, script);
        REQUIRE_THAT(played.failure(), Catch::Equals(""));
        // The simulator believes the driver, and plays the capacity where it says nothing.
        const std::int64_t rows = subject->has_values() ? count : std::min(said, capacity), row = 4 * width;
        for (const std::size_t rank : {0, 1}) {
          CHECK(played.trace.traffic[rank] ==
                RankTraffic{{{1, 0, 0, OpKind::all_gather}, {1, 2 * rows * row, 0, rows * row}},
                            {{1, 0, 0, OpKind::broadcast}, {1, 8, 0, rank == 0 ? 8 : 0}}});
          std::int64_t live = 0;  // of the capacity, whatever the count
          for (const Buffer& b : plan.programs[rank].buffers) live += b.bytes();
          CHECK(played.trace.memory[rank].device.peak_bytes == live);
        }
        CHECK(bytes_of(played, "cast") == rows * (row + row / 2) + 8);  // and the count
        if (subject->has_values()) check_values(r, played, count);
      }
    }
}

TEST_CASE("a count that is negative or above the capacity is a failure with op, count and capacity") {
  Routing r;
  const Plan plan = r.plan();
  for (const std::int64_t count : {-1, 9})
    for (const auto& subject : subjects()) {
      if (!subject->has_values()) continue;  // nobody counts there
      const Played played = play(*subject, plan, r.script(count, uncounted));
      REQUIRE(played.failures.size() == 2);
      for (std::size_t rank : {0, 1}) {
        INFO(subject->name() << ": " << played.failures[rank]);
        CHECK_THAT(
            played.failures[rank],
            Catch::Contains(fmt::format("the count of 'routed' is {}, its capacity 8 (op zero 'clear')", count)) &&
                Catch::Contains(fmt::format("rank {}, phase work", rank)));
      }
    }
}

TEST_CASE("who checks order while it runs goes by the capacity, whatever the driver expects of the count") {
  // Rows 0..7 as far as there are, on compute, and rows 4..7, on h2d, with nothing between them. The driver expects 2.
  RankProgram p;
  const Tensor n = p.tensor("n", DType::i64, {1});
  Tensor y = p.tensor("y", DType::f32, {capacity, width});
  y.shape[0].extent = routed_extent;
  p.feed(n);
  Op clear = toy::op(OpKind::zero, streams::compute, "clear");
  clear.outputs = {y};
  p.add(toy::counted(clear, {n}));
  y.shape[0] = {4}, y.offset_bytes += 4 * width * 4;
  Op behind = toy::op(OpKind::zero, streams::h2d, "behind");
  behind.outputs = {y};
  p.add(behind);
  Plan plan = on_two_ranks(p);
  plan.extents.push_back({"routed", capacity, CountedBy::device});
  Script script{.feeds = {{"feed n", image<std::int64_t>(p, n, {2})}}};
  script.sizes[routed_extent] = 2;
  for (const auto& subject : subjects()) {
    if (!subject->has_values()) continue;
    const Played played = play(*subject, plan, script);
    INFO(subject->name());
    CHECK_THAT(played.failure(), Catch::Contains("zero 'clear' on stream compute") && Catch::Contains("race"));
  }
}

TEST_CASE("an op of two counts takes each for its own dimension") {
  RankProgram p;
  const Tensor n = p.tensor("n", DType::i64, {1}), m = p.tensor("m", DType::i64, {1});
  Tensor y = p.tensor("y", DType::f32, {4, capacity});
  y.shape[0].extent = kept_extent, y.shape[1].extent = routed_extent;
  for (const Tensor& t : {n, m, y}) p.feed(t);
  Op clear = toy::op(OpKind::zero, streams::compute, "clear");
  clear.outputs = {y};
  p.add(toy::counted(clear, {n, m}));
  p.fetch(y);
  Plan plan = plan_of(p);
  plan.extents.push_back({"routed", capacity, CountedBy::device});
  plan.extents.push_back({"kept", 4, CountedBy::device});
  REQUIRE(verify(plan) == std::vector<std::string>{});
  const Script script{.feeds = {{"feed n", image<std::int64_t>(p, n, {5})},  // above what the other may be
                                {"feed m", image<std::int64_t>(p, m, {3})},
                                {"feed y", image<float>(p, y, {})}}};
  for (const auto& subject : subjects()) {
    INFO(subject->name());
    const Played played = play(*subject, plan, script);
    REQUIRE_THAT(played.failure(), Catch::Equals(""));
    if (subject->has_values()) CHECK(played.fetched.at("fetch y@0") == image(p, y, std::vector<float>(3 * 5)));
  }
}

}  // namespace hotbunk::conformance
