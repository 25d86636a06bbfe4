// assemble: which calls share a body, what is local to one, and that nothing of what was written is lost.
#include <fmt/format.h>
#include <rapidcheck.h>

#include <catch2/catch.hpp>
#include <map>

#include "graph/clock.h"
#include "graph/passes.h"
#include "programs.h"

using namespace hotbunk;
using namespace hotbunk::test;

namespace {

Op named(Op o, std::string name) {
  o.name = std::move(name);
  return o;
}

/// Layers that each make h from the h of the layer before, through a temporary, with weights of their own: calls
/// "layers.0." and so on, over buffers h0, w0, layers.0.t, h1, … `change` is asked for the second layer's add.
Draft layers(int count, const std::function<void(Op&, Draft&)>& change = {}) {
  Draft draft = test::empty_draft();
  const auto add = [&](std::string name) {
    draft.buffers.push_back(scratch(std::move(name), 16));
    return static_cast<BufferId>(draft.buffers.size()) - 1;
  };
  const auto t = [](BufferId id) { return tensor(id, DType::f32, {fixed(16)}); };
  BufferId h = add("h0");
  draft.transients = {h};
  add_block(draft, "work", {op(OpKind::zero, {}, {t(h)})});
  for (int l = 0; l < count; ++l) {
    const std::string at = fmt::format("layers.{}.", l);
    const BufferId w = add(fmt::format("w{}", l)), middle = add(at + "t"), out = add(fmt::format("h{}", l + 1));
    draft.buffers[static_cast<std::size_t>(w)].section = sections::train_params;
    draft.transients.insert(draft.transients.end(), {middle, out});
    std::vector<Op> ops = {named(op(OpKind::add, {t(h), t(w)}, {t(middle)}), at + "add"),
                           named(op(OpKind::copy, {t(middle)}, {t(out)}), at + "copy")};
    if (l == 1 && change) change(ops[0], draft);
    draft.phases[0][0].calls.push_back(written_call(draft, "layer", at, std::move(ops)));
    h = out;
  }
  return draft;
}

/// A block's ops with names for buffers, as it was written or as its calls spell it.
std::vector<std::string> text_of(const std::vector<Op>& ops, const std::vector<Buffer>& buffers) {
  std::vector<std::string> out;
  const auto name = [&](BufferId id) { return id < 0 ? "" : buffers[static_cast<std::size_t>(id)].name; };
  for (const Op& o : ops) {
    const bool nameless = o.kind == OpKind::alloc || o.kind == OpKind::free;
    std::string line = fmt::format("{} {} {} {} {}", name_of(o.kind), plan_streams()[at(o.stream)].name,
                                   nameless ? "" : o.name, name(o.buffer), o.event);
    for (const auto* side : {&o.inputs, &o.outputs})
      for (const Tensor& t : *side) line += fmt::format(" {}+{}:{}", name(t.buffer), t.offset_bytes, t.capacity());
    out.push_back(std::move(line));
  }
  return out;
}

std::vector<std::string> text_of(Program program) {
  const EditedOps ops(program, program.phases[0][0]);  // its locals are buffers of the program now
  return text_of(ops, program.buffers);
}

}  // namespace

TEST_CASE("Calls that do the same with other buffers share a body; a temporary is local") {
  Draft draft = layers(4);
  insert_lifetimes(draft);
  const std::vector<std::string> written = text_of(ops_of(draft), draft.buffers);
  const Program p = assemble(draft);
  const std::vector<Call>& calls = p.phases[0][0].calls;
  REQUIRE(calls.size() == 5);
  // begin; a layer whose h0 ends in it, as each layer's does; the last, whose result nobody reads, ends it as well.
  REQUIRE(p.bodies.size() == 3);
  CHECK(calls[1].body == calls[2].body);
  CHECK(calls[2].body == calls[3].body);
  CHECK(calls[4].body != calls[3].body);
  CHECK(p.bodies[1].name == "layer");
  CHECK(p.bodies[2].name == "layer/2");
  CHECK(calls[2].name == "layers.1.");
  CHECK(p.bodies[1].ops[1].name == "add");
  REQUIRE(p.bodies[1].locals.size() == 1);
  CHECK(p.bodies[1].locals[0].name == "t");
  for (const Buffer& b : p.buffers) CHECK(b.name.find(".t") == std::string::npos);
  CHECK(text_of(p) == written);
}

TEST_CASE("What tells bodies apart: sizes, streams, attributes, where a tensor lies in its port") {
  const auto bodies = [](const std::function<void(Op&, Draft&)>& change) {
    Draft draft = layers(3, change);
    insert_lifetimes(draft);
    return assemble(std::move(draft)).bodies.size();
  };
  CHECK(bodies([](Op&, Draft&) {}) == 3);
  CHECK(bodies([](Op& o, Draft&) { o.stream = streams::reduce; }) == 4);
  CHECK(bodies([](Op& o, Draft&) { o.attrs = {{Attr::accumulate, std::int64_t{1}}}; }) == 4);
  CHECK(bodies([](Op& o, Draft&) { o.inputs[1].shape[0].size = 8; }) == 4);
  // A port begins where the call's first tensor of it does: another layer of one large buffer is the same work.
  CHECK(bodies([](Op& o, Draft& draft) {
          draft.buffers[static_cast<std::size_t>(o.inputs[1].buffer)].elements = 64;
          o.inputs[1].offset_bytes = 128;
        }) == 3);
  // Events are the call's.
  Draft waits = layers(3);
  insert_lifetimes(waits);
  waits.phases[0][0].calls[2].marks = {{0, OpKind::wait, streams::compute, 0}};
  CHECK(assemble(waits).bodies.size() == 3);
}

TEST_CASE("A call of a written body is the call that writes it again") {
  Draft written = layers(4), shared = layers(4);
  std::vector<DraftCall>& calls = shared.phases[0][0].calls;
  for (std::size_t i = 2; i < calls.size(); ++i) calls[i].body = calls[1].body;
  shared.bodies.resize(2);
  for (Draft* draft : {&written, &shared}) insert_lifetimes(*draft);
  CHECK(ops_of(written) == ops_of(shared));
  CHECK(assemble(written) == assemble(shared));
}

TEST_CASE("No local: what takes a turn of a slot limit, what two calls touch, what is not named for its call") {
  const auto locals = [](const std::function<void(Draft&)>& change) {
    Draft draft = layers(1);
    change(draft);
    insert_lifetimes(draft);
    const Program p = assemble(std::move(draft));
    return p.bodies[1].locals.size();
  };
  CHECK(locals([](Draft&) {}) == 1);
  CHECK(locals([](Draft& d) { d.slot_limits = {{"one", 1, {{2}}}}; }) == 0);
  CHECK(locals([](Draft& d) { d.buffers[2].name = "t"; }) == 0);
  CHECK(locals([](Draft& d) { d.phases[0].push_back(d.phases[0][0]); }) == 0);  // of a second block too
}

TEST_CASE("Random drafts: spelled out again, a program is what was written") {
  std::int64_t calls = 0, bodies = 0, locals = 0;
  CHECK(rc::check("assemble loses nothing", [&] {
    Draft draft = test::empty_draft();
    DraftBlock block{.name = "work", .calls = {}};
    const int count = *rc::gen::inRange(1, 8);
    for (int i = 0; i < 3; ++i) draft.buffers.push_back(scratch(fmt::format("shared{}", i), 32));
    struct Copy {
      int from, to;  // shared buffers, then the call's own two
      std::int64_t from_offset, to_offset;
      StreamId stream;
    };
    std::map<std::string, std::vector<Copy>> patterns;  // what calls of a name do
    for (const char* name : {"f", "g"})
      for (int k = *rc::gen::inRange(1, 4); k > 0; --k)
        patterns[name].push_back({*rc::gen::inRange(0, 5), *rc::gen::inRange(0, 5), 32 * *rc::gen::inRange(0, 4),
                                  32 * *rc::gen::inRange(0, 4), static_cast<StreamId>(*rc::gen::inRange(0, 3))});
    for (int c = 0; c < count; ++c) {
      const std::string at = fmt::format("c{}.", c), body = *rc::gen::element<std::string>("f", "g");
      const auto first = static_cast<BufferId>(draft.buffers.size());
      for (int i = 0; i < 2; ++i) draft.buffers.push_back(scratch(fmt::format("{}t{}", at, i), 32));
      const auto t = [&](int which, std::int64_t offset) {
        return tensor(which < 3 ? which : first + which - 3, DType::f32, {fixed(8)}, offset);
      };
      std::vector<Op> ops;
      for (const Copy& k : patterns[body])
        ops.push_back(named(op(OpKind::copy, {t(k.from, k.from_offset)}, {t(k.to, k.to_offset)}, k.stream), at + "op"));
      block.calls.push_back(written_call(draft, body, at, std::move(ops)));
    }
    for (std::size_t i = 0; i < draft.buffers.size(); ++i) draft.transients.push_back(static_cast<BufferId>(i));
    draft.phases = {{std::move(block)}};
    insert_lifetimes(draft);
    insert_dependencies(draft);
    const std::vector<std::string> written = text_of(ops_of(draft), draft.buffers);
    const Program p = assemble(draft);
    RC_ASSERT(text_of(p) == written);
    calls += std::ssize(p.phases[0][0].calls), bodies += std::ssize(p.bodies);
    for (const Body& b : p.bodies) locals += std::ssize(b.locals);
  }));
  CHECK(bodies < calls);
  CHECK(locals > 20);
}
