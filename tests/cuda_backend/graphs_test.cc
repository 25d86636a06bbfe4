// Which runs of ops become graphs, on the driver's double. What graphs compute is iteration_test.cc's.
#include <catch2/catch.hpp>

#include "backends/cuda/fake/fake_driver.h"
#include "backends/cuda/op_graphs.h"
#include "backends/cuda/staging.h"

using namespace hotbunk;
using namespace hotbunk::cuda;

TEST_CASE("sizes that come once, as prompts' do, leave room for graphs of those that come again") {
  FakeDriver fake;
  const Context context(fake.table());
  context.make_current();
  const OwnedStream stream(context);
  const Launcher launch(context, stream.handle());
  const DeviceBlock block(context, 64);
  int enqueued = 0;
  {
    OpGraphs graphs(launch);
    const Call call;
    Op first;
    first.name = "first";
    const BoundOp op{nullptr, nullptr, &call, &first};
    const auto run = [&](std::int64_t tokens, int times) {
      for (int i = 0; i < times; ++i)
        graphs.run({.call = &call, .tokens = tokens}, op, [&] {
          ++enqueued;
          launch.fill(block.address(), 7, 64);
        });
    };
    // More than a stream keeps graphs of, and more than it remembers.
    constexpr int prompts = 20'000;
    for (int tokens = 1; tokens <= prompts; ++tokens)
      graphs.run({.call = &call, .tokens = tokens}, op, [&] { ++enqueued; });
    CHECK(enqueued == prompts);
    run(prompts + 1, 4);
    CHECK(enqueued == prompts + 2);  // op by op, then captured
    CHECK(fake.calls()["cuGraphLaunch"] == 3);
    launch.driver().cuStreamSynchronize(stream.handle());
  }
  CHECK(fake.findings().empty());
}
