// ProgramBuilder::call: when a body is called again, and what of the earlier call is exchanged.
#include "lowering/builder.h"

#include <catch2/catch.hpp>

#include "base/diagnostic.h"

using namespace hotbunk;
using Catch::Matchers::Contains;

namespace {

const std::vector<PhaseInfo> one_phase = {{.name = "work"}};

/// A builder in its block, with buffers of so many fp32 each.
struct Bench {
  ProgramBuilder b{one_phase};
  int written = 0;

  Bench() { b.begin_block(0, "work"); }
  BufferId buffer(std::int64_t elements) {
    return b.managed("buffer", DType::f32, elements, Category::params, sections::train_params);
  }
  /// y = x w, where y is the call's own; returns y.
  Tensor layer(const std::string& name, const Tensor& x, const Tensor& w, std::int64_t variant = 0) {
    return b.call("layer", variant, name, {x, w}, [&] {
      ++written;
      const Tensor y = b.transient(name + "y", DType::f32, {fixed(4)}, Category::activations);
      b.emit(OpKind::add, streams::compute, name + "add", {x, w}, {y});
      return y;
    });
  }
  Tensor window(BufferId id, std::int64_t element) { return b.view(id, DType::f32, {fixed(4)}, element); }
};

}  // namespace

TEST_CASE("A body is written once; its calls have inputs, transients and results of their own") {
  Bench t;
  const BufferId x = t.buffer(4), w0 = t.buffer(4), w1 = t.buffer(4);
  const Tensor y0 = t.layer("layers.0.", t.b.whole(x), t.b.whole(w0));
  const Tensor y1 = t.layer("layers.1.", y0, t.b.whole(w1));
  CHECK(t.written == 1);
  const Draft& draft = t.b.draft();
  REQUIRE(draft.bodies.size() == 1);
  REQUIRE(draft.phases[0][0].calls.size() == 2);
  const DraftCall& second = draft.phases[0][0].calls[1];
  CHECK(second.name == "layers.1.");
  CHECK(second.slots == std::vector<Port>{{y0.buffer, 0}, {w1, 0}, {y1.buffer, 0}});
  CHECK(y1.buffer != y0.buffer);
  CHECK(draft.buffers[static_cast<std::size_t>(y1.buffer)].elements == 4);
}

TEST_CASE("Another body is written for another variant, other sizes, and inputs that are one buffer") {
  Bench t;
  const BufferId x = t.buffer(4), w = t.buffer(4), longer = t.buffer(8);
  t.layer("a.", t.b.whole(x), t.b.whole(w));
  t.layer("b.", t.b.whole(w), t.b.whole(x));
  CHECK(t.written == 1);
  t.layer("c.", t.b.whole(x), t.b.whole(w), 1);
  CHECK(t.written == 2);
  t.layer("d.", t.window(longer, 0), t.b.whole(w));
  CHECK(t.written == 3);
  t.layer("e.", t.b.whole(x), t.b.whole(x));
  CHECK(t.written == 4);
  t.layer("f.", t.window(longer, 0), t.window(longer, 4));
  CHECK(t.written == 5);
  t.layer("g.", t.window(longer, 4), t.window(longer, 0));  // the other way round
  CHECK(t.written == 6);
}

TEST_CASE("An input may be a window: ops and results count from where it begins") {
  Bench t;
  const BufferId pool = t.buffer(16), w = t.buffer(4);
  const auto inner = [&](const std::string& name, std::int64_t element) {
    const Tensor x = t.window(pool, element);
    return t.b.call("part", 0, name, {x, w}, [&] {
      ++t.written;
      t.b.emit(OpKind::add, streams::compute, name + "add", {x, t.b.whole(w)}, {x});
      return t.b.view(pool, DType::f32, {fixed(2)}, element + 2);
    });
  };
  CHECK(inner("a.", 0).offset_bytes == 8);
  const Tensor second = inner("b.", 12);
  CHECK(t.written == 1);
  CHECK(second.buffer == pool);
  CHECK(second.offset_bytes == 4 * (12 + 2));
  const Draft& draft = t.b.draft();
  CHECK(draft.phases[0][0].calls[1].slots[0] == Port{pool, 48});
  CHECK(draft.bodies[0].ops[0].inputs[0].offset_bytes == 0);
}

TEST_CASE("What a call may not do is a fault") {
  const auto fault = [](const std::function<void(Bench&)>& spoil) -> std::string {
    Bench t;
    try {
      spoil(t);
      t.b.draft();
    } catch (const std::exception& e) {
      return e.what();
    }
    return "none";
  };
  // An op behind a call that was called again, as behind one that was written.
  for (const int calls : {1, 2})
    CHECK_THAT(fault([&](Bench& t) {
                 const BufferId x = t.buffer(4);
                 for (int i = 0; i < calls; ++i)
                   t.layer(std::string(1, static_cast<char>('a' + i)) + ".", t.b.whole(x), t.b.whole(x));
                 t.b.emit(OpKind::zero, streams::compute, "stray", {}, {t.b.whole(x)});
               }),
               Contains("an op of no call"));
  CHECK_THAT(fault([](Bench& t) {
               const BufferId x = t.buffer(4);
               t.b.call("outer", 0, "outer.", {x}, [&] { t.b.begin_call("inner", "inner."); });
             }),
             Contains("begins another"));
  CHECK_THAT(fault([](Bench& t) {
               const BufferId x = t.buffer(4);
               t.b.call("outer", 0, "outer.", {x}, [&] {
                 const BufferId y = t.b.transient("another.y", DType::f32, 4, Category::activations);
                 t.b.emit(OpKind::copy, streams::compute, "outer.copy", {t.b.whole(x)}, {t.b.whole(y)});
               });
             }),
             Contains("'another.y' made in call 'outer.'"));
  // w is the same in every call, until it is an input too.
  CHECK_THAT(fault([](Bench& t) {
               const BufferId x = t.buffer(4), w = t.buffer(4);
               for (const auto& [name, input] : {std::pair("a.", x), {"b.", w}})
                 t.b.call("outer", 0, name, {input}, [&, id = input, at = std::string(name)] {
                   t.b.emit(OpKind::copy, streams::compute, at + "copy", {t.b.whole(w)}, {t.b.whole(id)});
                 });
             }),
             Contains("for input and without"));
}

TEST_CASE("A call that emits nothing is none, and is asked again") {
  Bench t;
  const BufferId x = t.buffer(4);
  for (int i = 0; i < 2; ++i) t.b.call("nothing", 0, "n.", {x}, [&] { ++t.written; });
  CHECK(t.written == 2);
  CHECK(t.b.draft().phases[0][0].calls.empty());
}
