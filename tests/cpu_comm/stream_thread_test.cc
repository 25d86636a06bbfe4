// Streams: order within, events between, failures that travel, nothing that hangs.
#include "runtime/stream_thread.h"

#include <atomic>
#include <catch2/catch.hpp>
#include <chrono>
#include <future>
#include <stdexcept>
#include <vector>

namespace hotbunk {
namespace {

using Mode = StreamThread::Mode;

TEST_CASE("work runs in order, sync waits for all of it", "[stream]") {
  const Mode mode = GENERATE(Mode::threaded, Mode::inlined);
  StreamThread s("compute", mode);
  std::vector<int> seen;
  for (int i = 0; i < 1000; ++i) s.enqueue([&seen, i] { seen.push_back(i); });
  s.sync();
  REQUIRE(seen.size() == 1000);
  for (int i = 0; i < 1000; ++i) CHECK(seen[i] == i);
  s.sync();  // of an idle stream: returns
}

TEST_CASE("a wait is for the most recent record at the time it is enqueued", "[stream]") {
  StreamThread a("a"), b("b");
  StreamEvent e;
  std::atomic<int> step{0};
  std::promise<void> first, second;
  auto first_open = first.get_future().share(), second_open = second.get_future().share();
  a.enqueue([&] {
    first_open.wait();
    step = 1;
  });
  a.record(e);
  int seen_by_b = -1;
  b.wait(e);  // for the first record
  b.enqueue([&] { seen_by_b = step; });
  a.enqueue([&] {
    second_open.wait();
    step = 2;
  });
  a.record(e);  // later than b's wait: b must not wait for it
  CHECK(seen_by_b == -1);
  first.set_value();
  b.sync();  // would hang if b waited for the second record
  CHECK(seen_by_b == 1);
  second.set_value();
  b.wait(e);
  b.enqueue([&] { seen_by_b = step; });
  b.sync();
  CHECK(seen_by_b == 2);
}

TEST_CASE("an event that was never recorded stops nobody", "[stream]") {
  StreamThread s("s");
  s.wait(StreamEvent());
  bool ran = false;
  s.enqueue([&] { ran = true; });
  s.sync();
  CHECK(ran);
}

TEST_CASE("streams overlap: neither waits for the other without an event", "[stream]") {
  StreamThread a("a"), b("b");
  std::promise<void> from_a, from_b;
  // Each needs the other one to be running: in one thread this would hang.
  a.enqueue([&] {
    from_a.set_value();
    from_b.get_future().wait();
  });
  b.enqueue([&] {
    from_b.set_value();
    from_a.get_future().wait();
  });
  a.sync();
  b.sync();
}

TEST_CASE("an exception comes out at sync, later work is skipped, waiting streams fail too", "[stream]") {
  const Mode mode = GENERATE(Mode::threaded, Mode::inlined);
  StreamThread a("a", mode), b("b", mode), c("c", mode);
  StreamEvent before, after;
  bool later = false, downstream = false, independent = false;
  a.record(before);
  a.enqueue([] { throw std::runtime_error("kernel 7 failed"); });
  a.enqueue([&] { later = true; });
  a.record(after);
  b.wait(after);
  b.enqueue([&] { downstream = true; });
  c.wait(before);
  c.enqueue([&] { independent = true; });
  CHECK_THROWS_WITH(a.sync(), "kernel 7 failed");
  CHECK_THROWS_WITH(a.sync(), "kernel 7 failed");
  CHECK_THROWS_WITH(b.sync(), "kernel 7 failed");
  c.sync();
  CHECK(a.failed());
  CHECK_FALSE(later);
  CHECK_FALSE(downstream);
  CHECK(independent);
}

TEST_CASE("a stream that is destroyed releases who waits for it", "[stream]") {
  StreamThread b("b");
  {
    StreamThread a("a");
    StreamEvent e;
    std::promise<void> started;
    a.enqueue([&] {
      started.set_value();
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    });
    a.enqueue([] {});
    a.record(e);
    b.wait(e);
    started.get_future().wait();
  }
  // The record was reached (fine) or skipped (then b failed); either way b comes to an end.
  try {
    b.sync();
  } catch (const std::runtime_error& error) {
    CHECK_THAT(error.what(), Catch::Contains("stream a was destroyed"));
  }
}

}  // namespace
}  // namespace hotbunk
