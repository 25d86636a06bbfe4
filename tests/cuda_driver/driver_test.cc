// One small program over the driver's table: numbers go to the device on one stream, are doubled on a second, come back
// on a third, the memory sleeps and wakes. Right, it gives the same under every schedule; with one bug each, the double
// finds it.
#include "backends/cuda/driver.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <vector>

#include "backends/cuda/fake/fake_driver.h"

using namespace hotbunk;
using namespace hotbunk::cuda;

namespace {

constexpr std::size_t chunk = std::size_t{2} << 20;
constexpr int n = 1000;

const char* const doubling = R"(.version 9.0
.target sm_80
.address_size 64
.visible .entry doubling(.param .u64 p_x, .param .u64 p_y, .param .u32 p_n)
{
.reg .pred %p<2>; .reg .b32 %r<6>; .reg .f32 %f<3>; .reg .b64 %rd<6>;
ld.param.u64 %rd0, [p_x]; ld.param.u64 %rd1, [p_y]; ld.param.u32 %r0, [p_n];
mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x;
mad.lo.s32 %r4, %r1, %r2, %r3;
setp.ge.s32 %p1, %r4, %r0;
@%p1 bra $end;
mul.wide.s32 %rd2, %r4, 4;
add.s64 %rd3, %rd0, %rd2; add.s64 %rd4, %rd1, %rd2;
ld.global.f32 %f1, [%rd3]; add.f32 %f2, %f1, %f1; st.global.f32 [%rd4], %f2;
$end:
ret;
})";

/// What can be wrong with the program.
enum class Bug {
  none,
  no_event_before_kernel,
  no_event_before_copy,
  event_on_the_wrong_stream,
  early_unmap,
  wake_without_copy,
  double_map,
  host_pointer,
  unpinned_copy,
  stale_stream,
  stale_event,
  unloaded_library,
  staging_reused,
  address_freed_while_mapped,
  capacity
};

class Program {
 public:
  explicit Program(const Driver& driver, Bug bug) : d_(driver), bug_(bug) {}

  /// The first error of a call, or success with the result in out().
  CUresult run() {
    CUdeviceptr x = 0;
    void *in = nullptr, *out = nullptr;
    CUstream copies = nullptr, work = nullptr, back = nullptr;
    CUevent copied = nullptr, worked = nullptr;
    CUlibrary library = nullptr;
    CUkernel kernel = nullptr;
    const bool wrong_event = bug_ == Bug::event_on_the_wrong_stream;
    check(d_.cuInit(0));
    check(d_.cuMemAddressReserve(&x, 2 * chunk, 0, 0, 0));
    map(x);
    map(x + chunk);
    if (bug_ == Bug::double_map) map(x);
    if (bug_ == Bug::capacity) check(d_.cuMemCreate(&more_, 64 * chunk, nullptr, 0));
    const CUdeviceptr y = x + chunk;
    check(d_.cuMemHostAlloc(&in, n * sizeof(float), 0));
    check(d_.cuMemHostAlloc(&out, n * sizeof(float), 0));
    for (CUstream* s : {&copies, &work, &back}) check(d_.cuStreamCreate(s, CU_STREAM_NON_BLOCKING));
    for (CUevent* e : {&copied, &worked}) check(d_.cuEventCreate(e, CU_EVENT_DISABLE_TIMING));
    check(d_.cuLibraryLoadData(&library, doubling, nullptr, nullptr, 0, nullptr, nullptr, 0));
    check(d_.cuLibraryGetKernel(&kernel, library, "doubling"));
    if (status_ != CUDA_SUCCESS) return status_;

    auto* numbers = static_cast<float*>(in);
    std::iota(numbers, numbers + n, 1.0f);
    std::vector<float> pageable(numbers, numbers + n);
    check(d_.cuMemcpyHtoDAsync(x, bug_ == Bug::unpinned_copy ? pageable.data() : in, n * sizeof(float), copies));
    if (bug_ == Bug::staging_reused) std::fill_n(numbers, n, -1.0f);  // before the copy has been waited for
    check(d_.cuEventRecord(copied, wrong_event ? back : copies));
    if (bug_ == Bug::stale_event) check(d_.cuEventDestroy(copied));
    if (bug_ != Bug::no_event_before_kernel) check(d_.cuStreamWaitEvent(work, copied, 0));
    if (bug_ == Bug::unloaded_library) check(d_.cuLibraryUnload(library));
    if (bug_ == Bug::stale_stream) check(d_.cuStreamDestroy(work));
    CUdeviceptr from = bug_ == Bug::host_pointer ? reinterpret_cast<CUdeviceptr>(in) : x, to = y;
    int count = n;
    void* parameters[] = {&from, &to, &count};
    check(d_.cuLaunchKernel(reinterpret_cast<CUfunction>(kernel), (n + 127) / 128, 1, 1, 128, 1, 1, 0, work, parameters,
                            nullptr));
    check(d_.cuEventRecord(worked, work));
    if (bug_ != Bug::no_event_before_copy) check(d_.cuStreamWaitEvent(back, worked, 0));
    if (bug_ == Bug::early_unmap) check(d_.cuMemUnmap(x, chunk));
    check(d_.cuMemcpyDtoHAsync(out, y, n * sizeof(float), back));
    check(d_.cuStreamSynchronize(back));
    if (status_ != CUDA_SUCCESS) return status_;
    out_.assign(static_cast<float*>(out), static_cast<float*>(out) + n);
    sleep_and_wake(y, out, back);
    check(d_.cuCtxSynchronize());
    if (bug_ == Bug::address_freed_while_mapped) check(d_.cuMemAddressFree(x, 2 * chunk));
    return status_;
  }

  const std::vector<float>& out() const { return out_; }
  const std::vector<float>& awake() const { return awake_; }

 private:
  void check(CUresult r) {
    if (status_ == CUDA_SUCCESS) status_ = r;
  }

  void map(CUdeviceptr at) {
    CUmemGenericAllocationHandle physical{};
    check(d_.cuMemCreate(&physical, chunk, nullptr, 0));
    check(d_.cuMemMap(at, chunk, 0, physical, 0));
    check(d_.cuMemRelease(physical));  // it lives as long as it is mapped
    check(d_.cuMemSetAccess(at, chunk, nullptr, 0));
  }

  /// y goes away and comes back at its address, from the copy that the host holds.
  void sleep_and_wake(CUdeviceptr y, void* host, CUstream s) {
    std::size_t before = 0, asleep = 0, total = 0;
    check(d_.cuMemGetInfo(&before, &total));
    check(d_.cuMemUnmap(y, chunk));
    check(d_.cuMemGetInfo(&asleep, &total));
    REQUIRE((status_ != CUDA_SUCCESS || asleep == before + chunk));
    map(y);
    if (bug_ != Bug::wake_without_copy) check(d_.cuMemcpyHtoDAsync(y, host, n * sizeof(float), s));
    CUlibrary library = nullptr;
    CUkernel kernel = nullptr;
    check(d_.cuLibraryLoadData(&library, doubling, nullptr, nullptr, 0, nullptr, nullptr, 0));
    check(d_.cuLibraryGetKernel(&kernel, library, "doubling"));
    int count = n;
    void* parameters[] = {&y, &y, &count};
    check(d_.cuLaunchKernel(reinterpret_cast<CUfunction>(kernel), (n + 127) / 128, 1, 1, 128, 1, 1, 0, s, parameters,
                            nullptr));
    check(d_.cuMemcpyDtoHAsync(host, y, n * sizeof(float), s));
    check(d_.cuStreamSynchronize(s));
    if (status_ == CUDA_SUCCESS) awake_.assign(static_cast<float*>(host), static_cast<float*>(host) + n);
  }

  Driver d_;
  Bug bug_;
  CUresult status_ = CUDA_SUCCESS;
  CUmemGenericAllocationHandle more_{};
  std::vector<float> out_, awake_;
};

FakeOptions with_seed(std::uint64_t seed) { return {.memory_bytes = std::int64_t{64} << 20, .seed = seed}; }

}  // namespace

TEST_CASE("500 schedules of the right program: the same result, no finding", "[driver]") {
  for (std::uint64_t seed = 1; seed <= 500; ++seed) {
    FakeDriver fake(with_seed(seed));
    Program program(fake.table(), Bug::none);
    INFO("seed " << seed << (fake.findings().empty() ? "" : ": " + fake.findings().front()));
    REQUIRE(program.run() == CUDA_SUCCESS);
    REQUIRE(fake.findings().empty());
    for (std::size_t i = 0; i < n; ++i) {
      REQUIRE(program.out()[i] == 2.0f * static_cast<float>(i + 1));
      REQUIRE(program.awake()[i] == 4.0f * static_cast<float>(i + 1));
    }
  }
}

TEST_CASE("host-side bugs are found under every schedule, and named", "[driver]") {
  const auto [bug, says] = GENERATE(table<Bug, std::vector<const char*>>({
      {Bug::no_event_before_kernel, {"with no order between them", "uninitialised"}},
      {Bug::no_event_before_copy, {"with no order between them"}},
      {Bug::event_on_the_wrong_stream, {"with no order between them", "uninitialised"}},
      {Bug::early_unmap, {"the host has not waited for", "out of bounds", "is not mapped device memory"}},
      {Bug::wake_without_copy, {"uninitialised"}},
      {Bug::double_map, {"is mapped already"}},
      {Bug::host_pointer, {"out of bounds"}},
      {Bug::unpinned_copy, {"is not pinned"}},
      {Bug::stale_stream, {"no such stream"}},
      {Bug::stale_event, {"no such event"}},
      {Bug::unloaded_library, {"was unloaded"}},
      {Bug::address_freed_while_mapped, {"is still mapped"}},
  }));
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    FakeDriver fake(with_seed(seed));
    Program program(fake.table(), bug);
    CHECK(program.run() == CUDA_ERROR_LAUNCH_FAILED);
    INFO("bug " << static_cast<int>(bug) << ", seed " << seed);
    REQUIRE(!fake.findings().empty());
    // What is too early shows in one of several ways, whichever the schedule brings first: as an unordered pair, as a
    // read of what nothing wrote yet, as a hole.
    const std::string first = fake.findings().front();
    INFO(first);
    CHECK(std::ranges::any_of(says, [&](const char* words) { return first.find(words) != std::string::npos; }));
  }
}

TEST_CASE("a staging buffer that is written again too early gives other numbers under some schedule", "[driver]") {
  int wrong = 0;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    FakeDriver fake(with_seed(seed));
    Program program(fake.table(), Bug::staging_reused);
    REQUIRE(program.run() == CUDA_SUCCESS);  // nothing that the driver could know
    wrong += program.out()[0] != 2.0f;
  }
  CHECK(wrong > 10);
}

namespace {

/// x doubled by a graph of two kernels, which is launched behind a copy; with one of these between the launches.
enum class Between { nothing, sleep, unmap, destroy, another_stream };

struct Replayed {
  CUresult status = CUDA_SUCCESS;
  float first = 0;
  std::int64_t kernels = 0;  // that were launched, not captured
};

Replayed replay(FakeDriver& fake, Between between) {
  const Driver d = fake.table();
  Replayed out;
  const auto check = [&](CUresult r) {
    if (out.status == CUDA_SUCCESS) out.status = r;
  };
  CUdeviceptr x = 0;
  void* host = nullptr;
  CUstream s = nullptr, other = nullptr;
  CUlibrary library = nullptr;
  CUkernel kernel = nullptr;
  CUgraph graph = nullptr;
  CUgraphExec exec = nullptr;
  const auto map = [&] {
    CUmemGenericAllocationHandle physical{};
    check(d.cuMemCreate(&physical, chunk, nullptr, 0));
    check(d.cuMemMap(x, chunk, 0, physical, 0));
    check(d.cuMemRelease(physical));
    check(d.cuMemSetAccess(x, chunk, nullptr, 0));
  };
  check(d.cuMemAddressReserve(&x, chunk, 0, 0, 0));
  map();
  check(d.cuMemHostAlloc(&host, n * sizeof(float), 0));
  auto* const numbers = static_cast<float*>(host);
  for (CUstream* made : {&s, &other}) check(d.cuStreamCreate(made, CU_STREAM_NON_BLOCKING));
  check(d.cuLibraryLoadData(&library, doubling, nullptr, nullptr, 0, nullptr, nullptr, 0));
  check(d.cuLibraryGetKernel(&kernel, library, "doubling"));
  check(d.cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
  for (int twice = 0; twice < 2; ++twice) {
    int count = n;
    void* parameters[] = {&x, &x, &count};
    check(d.cuLaunchKernel(reinterpret_cast<CUfunction>(kernel), 8, 1, 1, 128, 1, 1, 0, s, parameters, nullptr));
  }
  check(d.cuStreamEndCapture(s, &graph));
  check(d.cuGraphInstantiate(&exec, graph, 0));
  check(d.cuGraphDestroy(graph));
  CHECK(fake.tasks_run() == 0);  // what is captured does not run
  const auto launch = [&] {
    std::fill_n(numbers, n, 1.0f);
    check(d.cuMemcpyHtoDAsync(x, host, n * sizeof(float), s));
    check(d.cuGraphLaunch(exec, s));
  };
  launch();
  check(d.cuStreamSynchronize(s));
  if (between == Between::sleep || between == Between::unmap) check(d.cuMemUnmap(x, chunk));
  if (between == Between::sleep) map();
  if (between == Between::unmap) {
    check(d.cuGraphLaunch(exec, s));
    check(d.cuStreamSynchronize(s));
    return out;
  }
  if (between == Between::destroy) check(d.cuGraphExecDestroy(exec));
  launch();
  if (between == Between::another_stream) check(d.cuGraphLaunch(exec, other));
  check(d.cuMemcpyDtoHAsync(host, x, n * sizeof(float), s));
  check(d.cuCtxSynchronize());
  out.first = numbers[0];
  out.kernels = fake.tasks_run();
  return out;
}

}  // namespace

TEST_CASE("a graph is launched again and again, asleep in between or not", "[driver]") {
  for (const Between between : {Between::nothing, Between::sleep})
    for (std::uint64_t seed = 1; seed <= 20; ++seed) {
      FakeDriver fake(with_seed(seed));
      const Replayed r = replay(fake, between);
      INFO(seed << (fake.findings().empty() ? "" : ": " + fake.findings().front()));
      CHECK(r.status == CUDA_SUCCESS);
      CHECK(r.first == 4.0f);  // twice doubled
      CHECK(r.kernels == 7);   // two copies to the device, two kernels each time, a copy back
    }
}

TEST_CASE("a graph launched wrongly is found: after an unmap, when it is gone, beside itself", "[driver]") {
  const auto [between, says] = GENERATE(table<Between, const char*>({
      {Between::unmap, "doubling (of a graph, 1 of 2)"},
      {Between::destroy, "cuGraphLaunch: no such graph, or it was destroyed"},
      {Between::another_stream, "with no order between them"},
  }));
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    FakeDriver fake(with_seed(seed));
    CHECK(replay(fake, between).status == CUDA_ERROR_LAUNCH_FAILED);
    REQUIRE(!fake.findings().empty());
    CHECK_THAT(fake.findings().front(), Catch::Contains(says));
  }
}

TEST_CASE("a stream that captures is not waited for, and no event is recorded there", "[driver]") {
  for (const int wrong : {0, 1, 2}) {
    FakeDriver fake(with_seed(1));
    const Driver d = fake.table();
    CUstream s = nullptr;
    CUevent e = nullptr;
    REQUIRE(d.cuStreamCreate(&s, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
    REQUIRE(d.cuEventCreate(&e, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS);
    REQUIRE(d.cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL) == CUDA_SUCCESS);
    CHECK((wrong == 0   ? d.cuStreamSynchronize(s)
           : wrong == 1 ? d.cuEventRecord(e, s)
                        : d.cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)) == CUDA_ERROR_LAUNCH_FAILED);
    REQUIRE(fake.findings().size() == 1);
    CHECK_THAT(fake.findings().front(), Catch::Contains("stream 0 is capturing a graph"));
  }
}

TEST_CASE("more than the device has is refused, and errors stick", "[driver]") {
  FakeDriver fake(with_seed(1));
  Program program(fake.table(), Bug::capacity);
  CHECK(program.run() == CUDA_ERROR_OUT_OF_MEMORY);
  CHECK(fake.findings().empty());
}

TEST_CASE("a fault comes where it was asked for, and later calls go on unless it sticks", "[driver]") {
  for (const char* entry : {"cuMemCreate", "cuMemMap", "cuMemcpyHtoDAsync", "cuLaunchKernel", "cuEventRecord",
                            "cuStreamSynchronize", "cuLibraryLoadData"}) {
    FakeDriver fake(with_seed(3));
    fake.fail_call(entry, 1, CUDA_ERROR_OUT_OF_MEMORY);
    Program program(fake.table(), Bug::none);
    INFO(entry);
    CHECK(program.run() == CUDA_ERROR_OUT_OF_MEMORY);
  }
  FakeDriver fake(with_seed(3));
  const Driver d = fake.table();
  CHECK(d.cuMemUnmap(4096, chunk) == CUDA_ERROR_LAUNCH_FAILED);
  CUstream s = nullptr;
  CHECK(d.cuStreamCreate(&s, 0) == CUDA_ERROR_LAUNCH_FAILED);  // of the context, until it is gone
}

TEST_CASE("behind a finding nothing runs, whoever waits: what the failed rank gave back may be gone", "[driver]") {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    FakeDriver fake(with_seed(seed));
    const Driver d = fake.table();
    CUstream bad = nullptr, behind = nullptr;
    CUevent done = nullptr;
    for (CUstream* s : {&bad, &behind}) REQUIRE(d.cuStreamCreate(s, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
    REQUIRE(d.cuEventCreate(&done, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS);
    int first = 0, ran = 0;
    const auto work = [&](int& count) {
      return [&count] {
        ++count;
        return std::vector<FakeDriver::Touch>{};
      };
    };
    fake.enqueue_work(bad, "first", work(first));
    fake.enqueue_work(bad, "faulty", []() -> std::vector<FakeDriver::Touch> { throw std::runtime_error("a fault"); });
    d.cuEventRecord(done, bad);
    d.cuStreamWaitEvent(behind, done, 0);
    fake.enqueue_work(behind, "behind", work(ran));
    CHECK(d.cuStreamSynchronize(behind) == CUDA_ERROR_LAUNCH_FAILED);
    CHECK(d.cuCtxSynchronize() == CUDA_ERROR_LAUNCH_FAILED);
    CHECK(first == 1);
    CHECK(ran == 0);
    REQUIRE(fake.findings().size() == 1);
    CHECK_THAT(fake.findings().front(), Catch::Contains("faulty: a fault"));
  }
}

TEST_CASE("a thread that begins when another has ended knows nothing of what that one did", "[driver]") {
  FakeDriver fake(with_seed(1));
  const Driver d = fake.table();
  std::vector<std::byte> memory(64);
  for (const char* name : {"first", "second"})  // the second may get the first one's id
    std::thread([&] { d.host_touches(name, memory.data(), memory.size(), true); }).join();
  REQUIRE(fake.findings().size() == 1);
  CHECK_THAT(fake.findings().front(), Catch::Contains("'first' of the host and 'second' of the host touch"));
}

TEST_CASE("a machine without a driver says so", "[driver]") {
  const auto none = open_driver("libhotbunk-no-such-driver.so.1");
  REQUIRE(!none);
  CHECK(none.error().front().code == "E640");
  const auto other = open_driver("libm.so.6");  // there, and no driver
  REQUIRE(!other);
  CHECK_THAT(other.error().front().message, Catch::Contains("lacks cuInit"));
}
