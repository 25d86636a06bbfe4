// NCCL's communicators on its double: how they come to be, which calls they make, sums in pieces, and what happens when
// something fails. What they carry is the conformance suite's.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <pthread.h>

#include <catch2/catch.hpp>
#include <filesystem>
#include <numeric>
#include <thread>

#include "backends/cuda/cuda_backend.h"
#include "backends/cuda/device_arena.h"
#include "backends/cuda/launch_order.h"
#include "backends/cuda/nccl_communicator.h"
#include "graph/program_order.h"
#include "lowering/lower.h"
#include "rl/sft_driver.h"
#include "tests/cuda_backend/iteration.h"
#include "tests/cuda_backend/processes.h"
#include "tests/toy_plan.h"

using namespace hotbunk;
using namespace hotbunk::cuda;
using namespace hotbunk::cuda::test;

namespace {

const std::vector<int> two = {0, 1};

}  // namespace

TEST_CASE("a second communicator of the same ranks is split off the first, and all are finalized at the end") {
  const auto said = in_ranks(2, [](NcclProcess& p) {
    const auto a = p.world.communicator(two, "a", p.launch.stream()),
               b = p.world.communicator(two, "b", p.launch.stream());
    DeviceNumbers x(p, {1.0f, 2.0f});
    for (Communicator* c : {a.get(), b.get()}) c->all_reduce(x.data(), x.data(), 2, DType::f32);
    const std::vector<float> sum = x.read();
    const auto calls = p.nccl.calls();
    return fmt::format("{}|{} ids, {} made, {} split, {} aborted: {}", ::getpid(),
                       calls.contains("ncclGetUniqueId") ? 1 : 0, calls.at("ncclCommInitRankConfig"),
                       calls.at("ncclCommSplit"), calls.contains("ncclCommAbort"), fmt::join(sum, " "));
  });
  const auto behind = [](const std::string& s) { return s.substr(s.find('|') + 1); };
  CHECK(behind(said[0]) == "1 ids, 1 made, 1 split, false aborted: 4 8");
  CHECK(behind(said[1]) == "0 ids, 1 made, 1 split, false aborted: 4 8");
  // The last one out removes the files, whose names begin with the process that made the id.
  const std::string files = "hotbunk-nccl-" + said[0].substr(0, said[0].find('|')) + "-";
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm"))
    CHECK(entry.path().string().find(files) == std::string::npos);
}

TEST_CASE("sums go in pieces where the scratch is small, in rank order, to the bit") {
  // Three numbers whose sum depends on the order: (1 + 1e8) - 1e8 = 0 in fp32, (-1e8 + 1e8) + 1 = 1.
  const std::vector<int> three = {0, 1, 2};
  const auto said = in_ranks(3, [&](NcclProcess& p) {
    const int me = p.world.rank();
    constexpr int n = 3 * 192 + 1;  // pieces of 64 elements, the last of one
    std::vector<float> values(n, me == 0 ? 1.0f : me == 1 ? 1e8f : -1e8f);
    NcclRank rank(p.nccl.table(), p.world.watch());
    const SayToGroup say = [&](const std::string& key, const std::string& text) { return p.world.gather(key, text); };
    NcclCommunicator c("sums", three, me, rank.communicator("sums", three, me, say), p.launch,
                       {.wait_for_stream = [&] { p.world.synchronize(p.launch.stream()); }, .most_scratch_bytes = 768});
    DeviceNumbers x(p, values), part(p, std::vector<float>(192));
    c.reduce_scatter(x.data(), part.data(), 192, DType::f32);
    c.all_reduce(x.data(), x.data(), n, DType::f32);
    c.barrier();
    const std::vector<float> all = x.read(), own = part.read();
    const bool zeros = std::ranges::all_of(all, [](float v) { return v == 0.0f; }) &&
                       std::ranges::all_of(own, [](float v) { return v == 0.0f; });
    const auto calls = p.nccl.calls();
    // 3 pieces; 4, of a chunk of 193, and the sums' exchange.
    const std::string out = fmt::format("{} in {} groups, {} registered", zeros ? "zeros" : "other bits",
                                        calls.at("ncclGroupEnd"), calls.at("ncclCommRegister"));
    rank.close(true);
    return out;
  });
  for (const std::string& s : said) CHECK(s == "zeros in 8 groups, 1 registered");
}

TEST_CASE("scratch that grows and cannot be deregistered ends the run with that call's name and NCCL's reason") {
  const auto said = in_ranks(2,
                             [](NcclProcess& p) {
                               const auto a = p.world.communicator(two, "a", p.launch.stream());
                               DeviceNumbers few(p, {1.0f, 2.0f}), many(p, std::vector<float>(4096, 1.0f));
                               a->all_reduce(few.data(), few.data(), 2, DType::f32);
                               if (p.world.rank() == 1)
                                 p.fake.fail_call("ncclCommDeregister", 1, CUDA_ERROR_LAUNCH_FAILED);
                               a->all_reduce(many.data(), many.data(), 4096, DType::f32);
                               return fmt::format("{}", many.read().front());
                             },
                             {}, {}, {.granularity_bytes = 4096, .modules = parsed_kernels()});
  CHECK_THAT(said[1],
             Catch::StartsWith("ncclCommDeregister of group a (ranks 0, 1): NCCL says: unhandled system error"));
  CHECK_THAT(said[0], Catch::Contains("rank 1") && Catch::Contains("ncclCommDeregister of group a (ranks 0, 1)"));
}

TEST_CASE("a rank that gets no thread for the watch over its end ends all the same") {
  const auto said = in_ranks(2, [](NcclProcess& p) {
    const auto a = p.world.communicator(two, "a", p.launch.stream());
    a->barrier();
    p.world.synchronize(p.launch.stream());
    pthread_attr_t large;  // of stacks that no machine has
    pthread_attr_init(&large);
    pthread_attr_setstacksize(&large, std::size_t{1} << 60);
    if (pthread_setattr_default_np(&large) != 0) return std::string("as before");
    return std::string("left");
  });
  for (const std::string& s : said) CHECK(s == "left");
}

TEST_CASE("an asynchronous error is polled for: the communicators are aborted, and every rank ends with it by name") {
  const auto said = in_ranks(2, [](NcclProcess& p) {
    const auto a = p.world.communicator(two, "a", p.launch.stream()),
               b = p.world.communicator(two, "b", p.launch.stream());
    DeviceNumbers x(p, {1.0f, 2.0f});
    if (p.world.rank() == 1) p.nccl.fail_exchange(1, NcclResult::remote_error);
    a->all_reduce(x.data(), x.data(), 2, DType::f32);
    return fmt::format("{}", fmt::join(x.read(), " "));
  });
  CHECK_THAT(said[1],
             Catch::Contains("NCCL failed, in the communicator of group a (ranks 0, 1): remote process exited"));
  CHECK_THAT(said[0], Catch::Contains("rank 1") && Catch::Contains("NCCL failed, in the communicator of group a"));
  for (const std::string& s : said) CHECK_THAT(s, !Catch::Contains("run.timeout_s"));  // it was not waited for
}

TEST_CASE("a communicator that has failed and is not aborted is found where the host waits for its stream") {
  const auto said = in_ranks(
      2,
      [](NcclProcess& p) {
        const auto a = p.world.communicator(two, "a", p.launch.stream());
        DeviceNumbers x(p, {1.0f, 2.0f});
        if (p.world.rank() == 1) p.nccl.fail_exchange(1, NcclResult::remote_error);
        a->all_reduce(x.data(), x.data(), 2, DType::f32);
        return fmt::format("{}", fmt::join(x.read(), " "));
      },
      {}, [](Nccl& table) { table.ncclCommAbort = [](NcclComm) { return NcclResult::success; }; });
  CHECK_THAT(said[1], Catch::Contains("whose communicator has failed and was not aborted"));
}

TEST_CASE("what breaks NCCL's rules is found: other calls, other sizes, memory that is gone") {
  const auto play = [](const std::function<void(NcclProcess&, Communicator&, DeviceNumbers&)>& wrong) {
    return in_ranks(2, [&](NcclProcess& p) {
      const auto c = p.world.communicator(two, "c", p.launch.stream());
      DeviceNumbers x(p, {1.0f, 2.0f, 3.0f, 4.0f});
      wrong(p, *c, x);
      x.read();
      return std::string("went well");
    });
  };
  const auto any_says = [](const std::vector<std::string>& said, const char* text) {
    INFO(fmt::format("{}", fmt::join(said, "\n")));
    CHECK(std::ranges::any_of(said, [&](const std::string& s) { return s.find(text) != std::string::npos; }));
  };
  any_says(play([](NcclProcess& p, Communicator& c, DeviceNumbers& x) {
             if (p.world.rank() == 0) c.broadcast(x.data(), 8, 0);
             else c.recv(0, x.data(), 8);
           }),
           "rank 0 calls 'ncclBroadcast from 0' where rank 1 calls 'a group of sends and receives'");
  any_says(play([](NcclProcess& p, Communicator& c, DeviceNumbers& x) {
             if (p.world.rank() == 0) c.send(1, x.data(), 8);
             else c.recv(0, x.data(), 12);
           }),
           "rank 0 sends 8 B to rank 1, which expects 12");
  any_says(play([](NcclProcess& p, Communicator& c, DeviceNumbers& x) {
             DeviceBlock gone(p.world.context(), 8);
             if (p.world.rank() == 0) c.send(1, reinterpret_cast<void*>(gone.address()), 8);
             else c.recv(0, x.data(), 8);
           }),
           "is not mapped device memory");
}

namespace {

/// An arena of two pieces, in each of which the ranks gather a byte of each: the first is mapped throughout, the second
/// goes and comes back, as is said beforehand.
std::string gathered_in_two_pieces(NcclProcess& p, bool tells) {
  const auto c = p.world.communicator(two, "c", p.launch.stream());
  const std::int64_t piece = p.world.context().granularity_bytes();
  const BookOptions book{.reserve_bytes = 2 * piece, .capacity_bytes = 2 * piece, .chunk_bytes = piece};
  // Without the communicators' books, as a backend that forgets them.
  RegisteredMemory forgets(p.nccl.table());
  DeviceArena arena(p.world.context(), book, {.cuts = {piece}, .sleeping = {{piece, 2 * piece}}},
                    {.registered = tells ? p.world.registered_memory() : &forgets});
  if (!tells) p.world.registered_memory()->mapped(reinterpret_cast<CUdeviceptr>(arena.base()), 2 * piece);
  const auto gather = [&](std::int64_t at, std::int64_t bytes) {
    std::byte* const all = arena.base() + at;
    std::byte* const own = all + p.world.rank() * bytes;
    p.launch.fill(reinterpret_cast<CUdeviceptr>(own), 7, bytes);
    c->all_gather(own, all, bytes);
    p.world.synchronize(p.launch.stream());
  };
  const auto registered = [&] {
    const auto calls = p.nccl.calls();
    const auto count = [&](const char* entry) { return calls.contains(entry) ? calls.at(entry) : 0; };
    return fmt::format("{}-{}", count("ncclCommRegister"), count("ncclCommDeregister"));
  };
  arena.map(0, 2 * piece, "test");
  gather(0, 8), gather(16, 8), gather(piece, 8);
  std::string said = registered();
  gather(piece - 8, 8);  // over the border
  said += " " + registered();
  arena.unmap(piece, 2 * piece);
  said += " " + registered();
  arena.map(piece, 2 * piece, "test");
  gather(piece, 8), gather(0, 8);
  said += " " + registered();
  arena.unmap(0, 2 * piece);
  return said + " " + registered();
}

}  // namespace

TEST_CASE("pieces that stay mapped are registered with NCCL, once, and given back before they are unmapped") {
  for (const std::string& said : in_ranks(2, [](NcclProcess& p) { return gathered_in_two_pieces(p, true); }))
    CHECK(said == "1-0 1-0 1-0 1-0 1-1");
  // Whoever is slower may see the other end instead.
  const auto forgot = in_ranks(2, [](NcclProcess& p) { return gathered_in_two_pieces(p, false); });
  CHECK_THAT(fmt::format("{}", fmt::join(forgot, "\n")),
             Catch::Contains("cuMemUnmap: a communicator of 2 ranks still has"));
  // Made as other memory is, no network adapter reaches it; on a device that cannot make such memory nothing is asked.
  static cuda::Driver real;
  const auto plain = [](cuda::Driver& d, int) {
    real = d;
    d.cuMemCreate = [](CUmemGenericAllocationHandle* out, std::size_t n, const CUmemAllocationProp* prop,
                       unsigned long long flags) {
      CUmemAllocationProp without = *prop;
      without.allocFlags.gpuDirectRDMACapable = 0;
      return real.cuMemCreate(out, n, &without, flags);
    };
  };
  CHECK_THAT(fmt::format("{}", fmt::join(in_ranks(
                                             2, [](NcclProcess& p) { return gathered_in_two_pieces(p, true); }, plain),
                                         "\n")),
             Catch::Contains("was made without gpuDirectRDMACapable"));
  for (const std::string& said : in_ranks(2, [](NcclProcess& p) { return gathered_in_two_pieces(p, true); }, {}, {},
                                          {.modules = parsed_kernels(), .rdma = false}))
    CHECK(said == "1-0 1-0 1-0 1-0 1-1");
  // An older NCCL has no such calls.
  const auto older = [](Nccl& table) { table.ncclCommRegister = nullptr, table.ncclCommDeregister = nullptr; };
  for (const std::string& said : in_ranks(
           2, [](NcclProcess& p) { return gathered_in_two_pieces(p, true); }, {}, older))
    CHECK(said == "0-0 0-0 0-0 0-0 0-0");
}

TEST_CASE("two ranks that launch what they share of two communicators in different orders are found") {
  const auto play = [](bool crossed) {
    return in_ranks(2, [&](NcclProcess& p) {
      const OwnedStream other(p.world.context());
      const auto a = p.world.communicator(two, "a", p.launch.stream()),
                 b = p.world.communicator(two, "b", other.handle());
      DeviceNumbers x(p, {1.0f, 2.0f}), y(p, {3.0f, 4.0f});
      x.read(), y.read();
      const bool b_first = crossed && p.world.rank() == 1;
      for (const bool second : {false, true})
        (second != b_first ? *b : *a).broadcast((second != b_first ? y : x).data(), 8, 0);
      p.world.synchronize(other.handle());
      x.read();
      return std::string("went well");
    });
  };
  for (const std::string& said : play(false)) CHECK(said == "went well");
  const auto said = play(true);
  INFO(fmt::format("{}", fmt::join(said, "\n")));
  CHECK(std::ranges::any_of(said, [](const std::string& s) {
    return s.find("where several communicators are in use, all ranks must launch in one order") != std::string::npos;
  }));
}

namespace {

/// Places of the only block's meetings, by rank; "none" where there is no order.
std::string places_of(const Plan& plan) {
  std::vector<std::string> out;
  for (Rank r = 0; r < plan.num_ranks(); ++r) {
    const auto places = launch_places(plan, r);
    out.push_back(places ? fmt::format("{}", fmt::join((*places)[0][0], " ")) : "none");
  }
  return fmt::format("{}", fmt::join(out, " | "));
}

}  // namespace

TEST_CASE("meetings have one order on all ranks: the program's, or the one in which streams come by them") {
  const auto gather = toy::all_gather("gather", Dim{2}, Dim{4}, 0, streams::gather);
  const auto sum = toy::all_reduce("sum", Dim{4}, 0, streams::reduce);
  CHECK(places_of(toy::plan_of({{gather, sum}, {gather, sum}})) == "0 1 | 0 1");
  // One rank's program has to give way.
  const std::string crossed = places_of(toy::plan_of({{gather, sum}, {sum, gather}}));
  CHECK((crossed == "0 1 | 1 0" || crossed == "1 0 | 0 1"));
  // Of one stream, there is no other order.
  const auto other_sum = toy::all_reduce("sum", Dim{4}, 0, streams::gather);
  CHECK(places_of(toy::plan_of({{gather, other_sum}, {other_sum, gather}})).find("none") == std::string::npos);
  const auto to = [](std::int64_t peer, StreamId s) { return toy::transfer(OpKind::send, "to", Dim{4}, peer, s); };
  const auto from = [](std::int64_t peer, StreamId s) { return toy::transfer(OpKind::recv, "from", Dim{4}, peer, s); };
  // A rank sends on one stream and its neighbour on the other, both before they receive.
  const std::string sends = places_of(toy::plan_of(
      {{to(1, streams::control), from(1, streams::gather)}, {to(0, streams::gather), from(0, streams::control)}}));
  CHECK((sends == "0 1 | 1 0" || sends == "1 0 | 0 1"));
  // What an event puts in order stays so: rank 0 may not send before it has received.
  const auto first = toy::wait(0, streams::control), then = toy::record(0, streams::gather);
  CHECK(places_of(toy::plan_of({{from(1, streams::gather), then, first, to(1, streams::control)},
                                {from(0, streams::control), to(0, streams::gather)}})) == "0 1 | 1 0");
  // On one stream both would send for ever, if nothing were buffered.
  CHECK(places_of(toy::plan_of({{to(1, streams::control), from(1, streams::control)},
                                {to(0, streams::control), from(0, streams::control)}})) == "none | none");
  // What we lower ourselves: pipelines, too.
  for (const std::vector<std::string>& sets :
       {std::vector<std::string>{},
        {"train.layout.dp=1", "train.layout.tp=2"},
        {"rollout.layout.tp=1", "rollout.layout.dp=2"},
        {"sync.transport=collective"},
        {"train.layout.dp=1", "train.layout.pp=2", "model.num_hidden_layers=2"}}) {
    INFO(fmt::format("{}", fmt::join(sets, " ")));
    const auto plan = lower(hotbunk::test::tiny_job(sets));
    REQUIRE(plan);
    for (Rank r = 0; r < plan->num_ranks(); ++r) CHECK(launch_places(*plan, r));
  }
}

TEST_CASE("a pipeline over NCCL's double takes turns, and has the numbers of ranks that are threads") {
  const Scenario scenario =
      hotbunk::test::tiny_job({"train.layout.dp=1", "train.layout.pp=2", "model.num_hidden_layers=2",
                               "train.micro_batch_tokens=5", "sync.transport=collective"});
  const auto plan = lower(scenario);
  REQUIRE(plan);
  const hotbunk::test::Iteration threads = hotbunk::test::run_iteration(*plan, scenario);
  REQUIRE_THAT(threads.text(), Catch::Equals(""));
  const auto said = hotbunk::test::numbers_over_nccl(*plan, scenario);
  CHECK(said[0] == threads.numbers);
  CHECK(said[1].empty());
}

TEST_CASE("launches take their turns, whichever thread comes first, and what is skipped holds up nobody") {
  for (int round = 0; round < 50; ++round) {
    const auto order = std::make_shared<LaunchOrder>();
    std::vector<std::shared_ptr<LaunchOrder::Turn>> turns;
    const std::int64_t numbered = order->reserve(6);
    for (int i = 0; i < 6; ++i) turns.push_back(LaunchOrder::take(order, numbered + i));
    std::vector<int> launched;  // in turn, so by one thread at a time
    const auto launch = [&](int i) {
      turns[static_cast<std::size_t>(i)]->await([] {});
      launched.push_back(i);
      turns[static_cast<std::size_t>(i)]->done();
    };
    turns[2].reset();  // of a stream that failed
    std::thread evens([&] {
      for (const int i : {0, 4}) launch(i);
    });
    for (const int i : {1, 3, 5}) launch(i);
    evens.join();
    REQUIRE(launched == std::vector<int>{0, 1, 3, 4, 5});
  }
  // A wait that is given up ends with the reason.
  const auto order = std::make_shared<LaunchOrder>();
  order->reserve(2);
  const auto second = LaunchOrder::take(order, 1);
  CHECK_THROWS_WITH(second->await([] { throw RuntimeFailure("rank 1 died"); }), "rank 1 died");
  order->give_up();  // the first is never asked for
  CHECK_THROWS_WITH(second->await([] {}), Catch::Contains("not asked for any more"));
}

TEST_CASE("two ranks on one device are refused, by name, and a machine without NCCL says so") {
  std::vector<std::string> said(2);
  FakeDriver fake;
  FakeNccl nccl(fake);
  const auto context = std::make_shared<Context>(fake.table());
  thread_ranks(2, [&](const LaunchEnv& env) {
    try {
      context->make_current();
      CudaWorld world(context, nccl.table(), env);
    } catch (const RuntimeFailure& e) {
      said[static_cast<std::size_t>(env.rank)] = e.what();
    }
    return 0;
  });
  // Both find it; whoever is first may be gone before the other has read what it needs to.
  const std::string why = "ranks 0 and 1 are on one device (hotbunk driver double): NCCL takes one rank";
  const auto says = [](const std::string& s, const std::string& what) { return s.find(what) != std::string::npos; };
  INFO(said[0] << '\n' << said[1]);
  CHECK((says(said[0], why) || says(said[1], why)));
  CHECK((says(said[0], why) || says(said[0], "rank 1 (pid")));
  CHECK((says(said[1], why) || says(said[1], "rank 0 (pid")));

  const auto none = open_nccl("libhotbunk-no-such-nccl.so.2");
  REQUIRE(!none);
  CHECK(none.error().front().code == "E642");
  const auto other = open_nccl("libm.so.6");  // there, and not NCCL
  REQUIRE(!other);
  CHECK_THAT(other.error().front().message, Catch::Contains("lacks ncclGetVersion"));
}
