// NCCL's communicators on its double: how they come to be, which calls they make, sums in pieces, and what happens when
// something fails. What they carry is the conformance suite's.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <catch2/catch.hpp>
#include <chrono>
#include <cstring>
#include <exception>
#include <filesystem>
#include <numeric>

#include "backends/cuda/cuda_world.h"
#include "backends/cuda/fake/fake_nccl.h"
#include "backends/cuda/nccl_communicator.h"
#include "backends/cuda/staging.h"
#include "base/check.h"
#include "base/file.h"
#include "runtime/launch.h"

using namespace hotbunk;
using namespace hotbunk::cuda;

namespace {

/// One rank, with a device of its own, and a stream.
struct NcclProcess {
  FakeDriver& fake;
  FakeNccl& nccl;
  CudaWorld& world;
  Launcher launch;
};

/// What each of the ranks, processes, says; what it throws; or what the double found.
std::vector<std::string> in_ranks(int ranks, const std::function<std::string(NcclProcess&)>& work) {
  namespace fs = std::filesystem;
  const fs::path folder = fs::temp_directory_path() / fmt::format("hotbunk_nccl_test.{}", ::getpid());
  fs::create_directories(folder);
  fork_ranks(ranks, [&](const LaunchEnv& env) {
    std::string said;
    FakeDriver fake({.seed = static_cast<std::uint64_t>(env.rank) + 1});
    FakeNccl nccl(fake);
    try {
      CudaWorld world(std::make_shared<Context>(fake.table()), nccl.table(), env);
      const OwnedStream stream(world.context());
      NcclProcess process{fake, nccl, world, Launcher(world.context(), stream.handle())};
      try {
        said = work(process);
        world.leave();
      } catch (const RuntimeFailure& e) {
        said = e.what();
        world.watch().announce_failure(said);
      }
    } catch (const RuntimeFailure& e) {
      said = e.what();
    }
    for (const std::string& finding : fake.findings()) said = "found: " + finding;
    return write_file_atomic(folder / std::to_string(env.rank), said) ? 0 : 4;
  });
  std::vector<std::string> out;
  for (int r = 0; r < ranks; ++r) out.push_back(read_file(folder / std::to_string(r)).value_or("lost"));
  fs::remove_all(folder);
  return out;
}

/// Numbers of a rank on its device.
class DeviceNumbers {
 public:
  DeviceNumbers(NcclProcess& p, const std::vector<float>& values)
      : p_(p),
        n_(values.size()),
        block_(p.world.context(), static_cast<std::int64_t>(n_ * sizeof(float))),
        staging_(p.world.context(), p.launch.stream()) {
    std::byte* here = staging_.take(block_.bytes());
    std::memcpy(here, values.data(), n_ * sizeof(float));
    HB_CUDA(p.launch.driver(), cuMemcpyHtoDAsync(block_.address(), here, n_ * sizeof(float), p.launch.stream()));
    staging_.in_use();
  }
  /// What uses it is over, or given up, as where a device ends.
  ~DeviceNumbers() {
    if (std::uncaught_exceptions() > 0) p_.world.device_ends(false);
    p_.launch.driver().cuStreamSynchronize(p_.launch.stream());
  }
  DeviceNumbers(const DeviceNumbers&) = delete;
  DeviceNumbers& operator=(const DeviceNumbers&) = delete;
  std::byte* data() const { return reinterpret_cast<std::byte*>(block_.address()); }
  std::vector<float> read() {
    std::byte* here = staging_.take(block_.bytes());
    HB_CUDA(p_.launch.driver(), cuMemcpyDtoHAsync(here, block_.address(), n_ * sizeof(float), p_.launch.stream()));
    p_.world.synchronize(p_.launch.stream());
    std::vector<float> out(n_);
    std::memcpy(out.data(), here, n_ * sizeof(float));
    return out;
  }

 private:
  NcclProcess& p_;
  std::size_t n_;
  DeviceBlock block_;
  Staging staging_;
};

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

TEST_CASE("an asynchronous error is polled for: the communicators are aborted, and every rank ends with it by name") {
  const auto begin = std::chrono::steady_clock::now();
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
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(10));
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
