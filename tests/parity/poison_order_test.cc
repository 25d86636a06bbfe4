// The checked mode's fill of fresh memory: behind the last reader of its bytes on another stream, before their first
// writer, whatever the timing. One of the streams is held back by hand.
#include "backends/cpu_gloo/poison_order.h"

#include <atomic>
#include <catch2/catch.hpp>
#include <chrono>
#include <thread>

#include "tests/blocks.h"

using namespace hotbunk;

namespace {

constexpr std::int64_t elements = 16;

Tensor whole(BufferId id) {
  return {.buffer = id, .offset_bytes = 0, .dtype = DType::f32, .rank = 1, .shape = {Dim{elements}}};
}

/// Reads buffer 0 on reduce; writes buffer 1, which lies in the same bytes, on reduce.
struct Reuse {
  Program program = test::empty_program();
  Block block;
  Reuse() {
    for (const char* name : {"old", "fresh"})
      program.buffers.push_back({name, DType::f32, elements, Category::activations, sections::transient, 0});
    Op read, write;
    read.kind = OpKind::fetch, write.kind = OpKind::zero;
    read.stream = write.stream = streams::reduce;
    read.inputs = {whole(0)}, write.outputs = {whole(1)};
    block = test::block_of(program, "only", {read, write});
  }
  BoundOp op(std::size_t i) const { return {&program, &block, &block.calls[0], &program.bodies[0].ops[i]}; }
  BoundBuffer fresh() const { return {&program, &program.buffers[1], 0, {}, 1}; }
};

void while_others_run() { std::this_thread::sleep_for(std::chrono::milliseconds(50)); }

}  // namespace

TEST_CASE("fresh memory is filled behind who still reads its bytes, and before who writes them") {
  const Reuse reuse;
  StreamThread compute("compute", StreamThread::Mode::threaded), reduce("reduce", StreamThread::Mode::threaded);
  PoisonOrder order([&](StreamId id) -> StreamThread& { return id == streams::compute ? compute : reduce; });
  std::atomic<bool> reader_is_done = false, fill_is_done = false, fill_came_behind = false, writer_came_behind = false;

  order.touch(reuse.op(0), {});
  reduce.enqueue([&] {
    while_others_run();
    reader_is_done = true;
  });
  order.poison(streams::compute, reuse.fresh(), [&] {
    fill_came_behind = reader_is_done.load();
    while_others_run();
    fill_is_done = true;
  });
  order.touch(reuse.op(1), {});
  reduce.enqueue([&] { writer_came_behind = fill_is_done.load(); });
  reduce.sync();
  compute.sync();
  CHECK(fill_came_behind);
  CHECK(writer_came_behind);
}
