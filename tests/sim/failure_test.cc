#include <catch2/catch.hpp>

#include "base/check.h"
#include "tests/blocks.h"
#include "tests/sim/toy.h"

using namespace hotbunk;
using namespace hotbunk::toy;

namespace {

/// The failure as a user reads it, "" when there is none.
std::string failure(Plan plan, SimOptions options = {}, Sizes sizes = {}) {
  const auto trace = simulate(plan, Prices{{"a", 10}}, 1, 1, options, {}, sizes);
  return trace ? "" : render(trace.error());
}

/// A 4 KiB-chunked plan of one rank with these buffers (fp32, all in `transient` unless said).
Plan with_buffers(std::vector<Op> ops, std::vector<Buffer> buffers) {
  Plan plan = plan_of({std::move(ops)});
  plan.programs[0].buffers = std::move(buffers);
  return plan;
}

Buffer buffer(std::string name, std::int64_t elements, std::int64_t offset = 0,
              SectionId section = sections::transient) {
  return {std::move(name), DType::f32, elements, Category::activations, section, offset};
}

}  // namespace

TEST_CASE("two ranks whose streams meet in another order: the cycle, word for word") {
  // Rank 0 issues x then y on one stream, rank 1 x on `reduce`, but y first on `tensor`, which its reduce stream
  // awaits.
  Plan plan = plan_of({{all_reduce("x", {8}), record(0, streams::reduce), wait(0, streams::tensor),
                        all_reduce("y", {4}, 0, streams::tensor)},
                       {all_reduce("y", {4}, 0, streams::tensor), record(0, streams::tensor), wait(0, streams::reduce),
                        all_reduce("x", {8})}});
  CHECK(failure(plan) ==
        "error[E611]: deadlock after 0 ns: 4 streams wait for each other\n"
        "   = note: rank 1, phase work\n"
        "   = note: rank 0 stream reduce: all_reduce 'x' #1 of group world (ranks 0, 1), 32 B, waits for rank 1\n"
        "   = note: rank 1 stream reduce: wait for event 0, recorded behind the head of rank 1 stream tensor\n"
        "   = note: rank 1 stream tensor: all_reduce 'y' #1 of group world (ranks 0, 1), 16 B, waits for rank 0\n"
        "   = note: rank 0 stream tensor: wait for event 0, recorded behind the head of rank 0 stream reduce\n"
        "   = help: every rank must issue the collectives of a stream, and streams that wait for each other, in one "
        "order\n");
}

TEST_CASE("a collective that one rank never issues") {
  const std::string text = failure(plan_of({{kernel("a"), all_reduce("x", {8})}, {kernel("a")}}));
  CHECK_THAT(text,
             Catch::Contains("error[E611]: deadlock after 10 ns: rank 0 stream reduce waits for what never comes"));
  CHECK_THAT(text, Catch::Contains("rank 0 stream reduce: all_reduce 'x' #1 of group world (ranks 0, 1), 32 B, waits "
                                   "for rank 1, which has nothing left on stream reduce"));
}

TEST_CASE("a send that nobody receives") {
  const std::string text = failure(plan_of({{transfer(OpKind::send, "x", {4}, 1)}, {}}));
  CHECK_THAT(text, Catch::Contains("rank 0 stream control: send 'x' of group world (ranks 0, 1), 16 B, waits for rank "
                                   "1, which has nothing left on stream control"));
}

TEST_CASE("neighbours that all send first wait for each other; with send_recv they do not") {
  const Op send = transfer(OpKind::send, "x", {4}, 1), recv = transfer(OpKind::recv, "y", {4}, -1);
  const auto relative = [](Op o) {
    o.attrs.emplace_back(Attr::relative, std::int64_t{1});
    return o;
  };
  const std::vector<Op> sends_first = {relative(send), relative(recv)};
  CHECK_THAT(failure(plan_of({sends_first, sends_first, sends_first})),
             Catch::Contains("deadlock after 0 ns: 3 streams wait for each other") &&
                 Catch::Contains("rank 2 stream control: send 'x' of group world (ranks 0, 1, 2), 16 B, waits for rank "
                                 "0"));
  const std::vector<Op> both = {exchange("x", {4}, {4}, 1, -1)};
  CHECK(failure(plan_of({both, both, both})).empty());
}

TEST_CASE("a send_recv of which one half meets nobody says whom it waits for") {
  // Rank 1 receives what rank 0 sends, and sends nothing back.
  const std::string lost =
      failure(plan_of({{exchange("x", {4}, {5}, 1, 1, false)}, {transfer(OpKind::recv, "y", {4}, 0)}}));
  CHECK_THAT(lost, Catch::Contains("rank 0 stream control: send_recv 'x' of group world (ranks 0, 1), 16 B to rank 1 "
                                   "and 20 B from rank 1, waits for rank 1, which has nothing left on stream control"));
  // Rank 2 sends, rank 1 does not receive: the half of rank 0 that is left is the one to rank 1.
  const std::string half =
      failure(plan_of({{exchange("x", {4}, {5}, 1, 2, false)}, {}, {transfer(OpKind::send, "y", {5}, 0)}}));
  CHECK_THAT(half, Catch::Contains("from rank 2, waits for rank 1, which has nothing left"));
  // Rank 1 receives, rank 2 does not send.
  const std::string other =
      failure(plan_of({{exchange("x", {4}, {5}, 1, 2, false)}, {transfer(OpKind::recv, "y", {4}, 0)}, {}}));
  CHECK_THAT(other, Catch::Contains("from rank 2, waits for rank 2, which has nothing left"));
  CHECK_THAT(failure(plan_of({{exchange("x", {4}, {5}, 1, 1, false)}, {exchange("y", {6}, {4}, 0, 0, false)}})),
             Catch::Contains("ranks 0 and 1 disagree about a transfer of group world") &&
                 Catch::Contains("send_recv 'x' of group world (ranks 0, 1), 16 B to rank 1 and 20 B from rank 1") &&
                 Catch::Contains("send_recv 'y' of group world (ranks 0, 1), 24 B to rank 0 and 16 B from rank 0"));
}

TEST_CASE("ranks that disagree about a collective are named with op and sizes, before it starts") {
  CHECK(
      failure(plan_of({{all_reduce("x", {8}), all_reduce("y", {8})}, {all_reduce("x", {8}), all_reduce("y", {6})}})) ==
      "error[E610]: ranks 0 and 1 disagree about collective #2 of group world\n"
      "   = note: rank 1, phase work\n"
      "   = note: rank 0 stream reduce: all_reduce 'y' #2 of group world (ranks 0, 1), 32 B (step 1, block 0; 0 "
      "tokens, 0 sequences)\n"
      "   = note: rank 1 stream reduce: all_reduce 'y' #2 of group world (ranks 0, 1), 24 B (step 1, block 0; 0 "
      "tokens, 0 sequences)\n"
      "   = help: every rank of a group must issue the same operation with the same sizes\n");
  // Another kind with the same bytes.
  CHECK_THAT(failure(plan_of({{all_reduce("x", {8})}, {all_gather("x", {4}, {8}, 0, streams::reduce)}})),
             Catch::Contains("error[E610]"));
  CHECK_THAT(failure(plan_of({{transfer(OpKind::send, "x", {4}, 1)}, {transfer(OpKind::recv, "x", {5}, 0)}})),
             Catch::Contains("ranks 0 and 1 disagree about a transfer of group world"));
}

TEST_CASE("a plan that does not fit says who, where and by how much") {
  const std::vector<Op> ops = {mapping(OpKind::map, sections::train_params, 0, 8192, "weights"),
                               memory(OpKind::alloc, 0, "w"),
                               mapping(OpKind::map, sections::transient, 0, 12288, "scratch")};
  const std::vector<Buffer> buffers = {buffer("w", 2000, 0, sections::train_params), buffer("logits", 3000)};
  Plan plan = with_buffers(ops, buffers);
  plan.overhead_bytes = 1000;
  plan.device_capacity_bytes = 8192 + 12288 + 1000;
  CHECK(failure(plan).empty());
  --plan.device_capacity_bytes;
  CHECK(failure(plan) ==
        "error[E301]: the plan does not fit: rank 0 needs 21.0 KiB of 21.0 KiB on the device in phase work\n"
        "   = note: rank 0, phase work, block only\n"
        "   = note: step 1, op 'scratch' maps 12.0 KiB (12288 B) of transient\n"
        "   = note: mapped 8192 + asked 12288 + overhead 1000 = 21480 B, capacity 21479 B: 1 B too much\n"
        "   = note: large: 'logits' (activations, transient) 11.7 KiB (12000 B)\n"
        "   = note: large: 'w' (activations, train_params) 7.8 KiB (8000 B)\n"
        "   = help: make those smaller (train.micro_batch_tokens, train.recompute, rollout.memory_fraction, "
        "sync.bucket_mib) or let the other side sleep (train.offload, rollout.sleep)\n");
  SimOptions unlimited;
  unlimited.enforce_capacity = false;
  CHECK(failure(plan, unlimited).empty());

  // The host has a capacity of its own, without the device's overhead.
  Plan host = with_buffers({mapping(OpKind::map, sections::host_params, 0, 8192)}, {});
  host.overhead_bytes = 1 << 20;
  host.host_capacity_bytes = 8192;
  CHECK(failure(host).empty());
  host.host_capacity_bytes = 8191;
  CHECK_THAT(failure(host), Catch::Contains("on the host"));
}

TEST_CASE("a rank outside the family, an op outside the plan") {
  Plan plan = plan_of({{all_reduce("x", {8})}, {}});
  plan.groups[0].groups = {{1}};
  CHECK_THROWS_WITH(failure(plan), Catch::Contains("rank 0 is in no group of family world: all_reduce 'x'"));

  Plan one = plan_of({{kernel("a")}});
  const Prices cost{};
  SimBackend backend({}, cost);
  const Rank rank = 0;
  auto devices = backend.open(one, {&rank, 1});
  REQUIRE(devices);
  (*devices)[0]->enter(1, 0);
  CHECK_THROWS_WITH((*devices)[0]->compute(streams::compute, *test::LoneOp(kernel("stranger")), {}),
                    Catch::Contains("'stranger' is no op of phase 0"));
}
