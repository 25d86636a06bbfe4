#include "graph/written.h"

#include <rapidcheck.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <set>

#include "programs.h"
#include "tests/moves.h"

using namespace hotbunk;
using namespace hotbunk::test;

namespace {

/// The obvious version: one flag per element of each buffer of one section.
class WrittenElements {
 public:
  void alloc(const Buffer& b) {
    for (std::int64_t i = 0; i < b.elements; ++i) written_.erase(b.offset / 4 + i);
  }
  bool run(const Program& p, const Op& op) {
    bool good = true;
    const auto first = [&](const Tensor& t) {
      return (p.buffers[static_cast<std::size_t>(t.buffer)].offset + t.offset_bytes) / 4;
    };
    if (op.kind == OpKind::copy_boxes) {
      each(op, [&](const Box& b, std::int64_t i, std::int64_t j) {
        good = good && written_.contains(first(op.inputs[0]) + b.src_offset + i * b.src_pitch + j);
      });
      each(op, [&](const Box& b, std::int64_t i, std::int64_t j) {
        written_.insert(first(op.outputs[0]) + b.dst_offset + i * b.dst_pitch + j);
      });
      return good;
    }
    for (const Tensor& t : op.inputs)
      for (std::int64_t i = 0; i < t.capacity(); ++i) good = good && written_.contains(first(t) + i);
    for (const Tensor& t : op.outputs)
      for (std::int64_t i = 0; i < t.capacity(); ++i) written_.insert(first(t) + i);
    return good;
  }

 private:
  template <class F>
  static void each(const Op& op, F&& call) {
    for (const Box& b : boxes_of(op, {}))
      for (std::int64_t i = 0; i < b.rows; ++i)
        for (std::int64_t j = 0; j < b.cols; ++j) call(b, i, j);
  }
  std::set<std::int64_t> written_;
};

/// A box of up to 3 x 3 inside of 16 elements on both sides.
Box any_box() {
  Box b;
  b.rows = *rc::gen::inRange(0, 4), b.cols = *rc::gen::inRange(0, 4);
  b.src_pitch = *rc::gen::inRange(3, 6), b.dst_pitch = b.cols + *rc::gen::inRange(0, 3);
  b.src_offset = *rc::gen::inRange(0, 3), b.dst_offset = *rc::gen::inRange(0, 4);
  return b;
}

}  // namespace

TEST_CASE("Written bytes are those of a flag per element") {
  int whole_reads = 0, faults = 0;
  CHECK(rc::check("as brute force", [&] {
    Program p = test::empty_program();
    for (int i = 0; i < 3; ++i) p.buffers.push_back(scratch("b", 16, 64 * i));  // back to back: intervals meet
    WrittenBytes fast;
    WrittenElements slow;
    const auto any_tensor = [&] {
      const auto elements = *rc::gen::inRange(1, 17);
      return tensor(*rc::gen::inRange(0, 3), DType::f32, {fixed(elements)}, 4 * *rc::gen::inRange(0, 17 - elements));
    };
    for (int i = *rc::gen::inRange(1, 60); i > 0; --i) {
      if (const int what = *rc::gen::inRange(0, 8); what == 0) {
        const Buffer& b = p.buffers[static_cast<std::size_t>(*rc::gen::inRange(0, 3))];
        fast.alloc({&p, &b, b.offset, {}, 0});
        slow.alloc(b);
        continue;
      }
      Op o = *rc::gen::arbitrary<bool>() ? op(OpKind::zero, {}, {any_tensor()}) : op(OpKind::fetch, {any_tensor()}, {});
      if (*rc::gen::inRange(0, 3) == 0) {
        o = op(OpKind::copy_boxes, {whole(p, *rc::gen::inRange(0, 3))}, {whole(p, *rc::gen::inRange(0, 3))});
        for (int k = *rc::gen::inRange(0, 4); k > 0; --k) o.moves.push_back(move_of(any_box()));
      }
      const Block block = block_of(p, "work", {o});
      const BoundOp bound{&p, &block, &block.calls[0], &p.bodies.back().ops[0]};
      const bool good = fast.unwritten(bound, {}).empty();
      fast.write(bound, {});
      RC_ASSERT(good == slow.run(p, o));
      ++(good ? whole_reads : faults);
    }
  }));
  CHECK(std::min(whole_reads, faults) > 100);  // both answers were asked for
}
