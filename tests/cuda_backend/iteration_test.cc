// One iteration of a tiny job, two ranks: under many schedules, with an event left out, with faults, with bugs of the
// host side.
#include "tests/cuda_backend/iteration.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <cstddef>
#include <cstring>
#include <functional>
#include <mutex>
#include <set>
#include <utility>

#include "base/rng.h"
#include "graph/bound.h"
#include "graph/verify.h"
#include "lowering/lower.h"
#include "tests/cuda_backend/left_out.h"

using namespace hotbunk;
using namespace hotbunk::test;

namespace {

struct Job {
  Scenario scenario;
  Plan plan;
};

Job job_of(const std::vector<std::string>& sets = {}) {
  Job job{tiny_job(sets), {}};
  auto plan = lower(job.scenario);
  REQUIRE(plan);
  job.plan = std::move(*plan);
  return job;
}

}  // namespace

TEST_CASE("an iteration under 500 schedules: no finding, the same numbers") {
  const Job job = job_of();
  const Iteration first = run_iteration(job.plan, job.scenario);
  REQUIRE_THAT(first.text(), Catch::Equals(""));
  REQUIRE_THAT(first.numbers, Catch::Contains("loss"));
  for (std::uint64_t seed = 2; seed <= 500; ++seed) {
    INFO("seed " << seed);
    const Iteration it = run_iteration(job.plan, job.scenario, {.seed = seed});
    REQUIRE_THAT(it.text(), Catch::Equals(""));
    REQUIRE(it.numbers == first.numbers);
  }
}

TEST_CASE("log-probs of sampled tokens are equal to the bit in rollout and training (P5)") {
  // One rank per engine: the same kernels over the same rows.
  const std::vector<std::string> own = {"rollout.layout.tp=1", "rollout.layout.dp=2"};
  std::vector<std::string> tiled = own;  // heads of eight numbers in bf16
  for (const char* set :
       {"model.hidden_size=16", "model.head_dim=8", "train.precision.params=bf16", "rollout.dtype=bf16"})
    tiled.emplace_back(set);
  for (const auto& sets : {own, tiled}) {
    const Job job = job_of(sets);
    const Iteration it = run_iteration(job.plan, job.scenario);
    REQUIRE_THAT(it.text(), Catch::Equals(""));
    CHECK_THAT(it.numbers, Catch::Contains("rollout/logprob_gap_max 0x0p+0"));
  }
}

TEST_CASE("all layers of a rank step in one launch, and their squares are summed in one") {
  const Job job = job_of({"model.num_hidden_layers=3"});
  std::int64_t steps = 0, sums = 0;
  for (const Program& program : job.plan.programs)
    for (const auto& blocks : program.phases)
      for (const Block& block : blocks)
        each_op(program, block, [&](const BoundOp& op) {
          steps += op->kind == OpKind::adamw, sums += op->kind == OpKind::sum_squares;
        });
  CHECK(steps >= 4);  // of what is of no layer, too
  CHECK(sums >= 4);
  const Iteration it = run_iteration(job.plan, job.scenario);
  REQUIRE_THAT(it.text(), Catch::Equals(""));
  CHECK(it.launches.at("adamw_f32") == 2);
  CHECK(it.launches.at("sum_squares_partial_f32") == 2);
  CHECK(it.launches.at("sum_squares_finish") == 2);
}

TEST_CASE("decode steps are graphs from their second time on, and the numbers are the same to the bit") {
  // 6 tokens of each of 4 samples: a prefill, then 5 decode steps of the same sizes, of which the second is captured.
  const std::vector<std::string> longer = {"workload.response_tokens.mean=6", "workload.response_tokens.max=6"};
  const auto with = [&](std::vector<std::string> sets) {
    sets.insert(sets.end(), longer.begin(), longer.end());
    return job_of(sets);
  };
  // Where three slots serve four samples, the fourth decodes alone: other sizes, other graphs.
  // Both sides sleep between two iterations: graphs of the first are launched in the second.
  for (const Job& job :
       {with({"steps=2", "rollout.max_running_requests=3"}), with({"rollout.layout.tp=1", "rollout.layout.dp=2"})}) {
    const Iteration plain = run_iteration(job.plan, job.scenario, {.graphs = false});
    REQUIRE_THAT(plain.text(), Catch::Equals(""));
    CHECK(!plain.calls.contains("cuGraphLaunch"));
    for (std::uint64_t seed = 1; seed <= 5; ++seed) {
      const Iteration it = run_iteration(job.plan, job.scenario, {.seed = seed});
      REQUIRE_THAT(it.text(), Catch::Equals(""));
      CHECK(it.numbers == plain.numbers);
      // Every launch that is left out is in a graph.
      CHECK(it.calls.at("cuLaunchKernel") < plain.calls.at("cuLaunchKernel"));
      CHECK(it.calls.at("cuGraphLaunch") > it.calls.at("cuGraphInstantiate"));
      CHECK(it.calls.at("cuGraphExecDestroy") == it.calls.at("cuGraphInstantiate"));
      CHECK(it.calls.at("cuGraphDestroy") == it.calls.at("cuGraphInstantiate"));
    }
  }
}

TEST_CASE("every wait that the plan needs is missed where it is left out") {
  const Job job = job_of();
  const LeftOut out = leave_out_waits(job.plan, job.scenario, [](const Program&, const Mark&) { return true; });
  CHECK(out.needed >= 10);
}

namespace {

/// What a rank's failure says of where it was.
struct Said {
  bool noticed = false;      // it heard of another rank's failure
  bool opening = false;      // of the context, before any rank, or of what a rank opens before its first phase
  bool between_ops = false;  // events of the plan, and the host's waits for all streams
  bool between_phases = false;
  bool rank = false, phase = false, op = false;
};

Said said_of(const std::string& failure, bool nothing_ran) {
  const auto has = [&](const char* text) { return failure.find(text) != std::string::npos; };
  return {.noticed = has("noticed it in"),
          .opening = (nothing_ran && !failure.starts_with("error[")) || has("while opening the plan's arenas"),
          .between_ops = has("(recording event ") || has("(waiting for event ") || has("(waiting for the streams)") ||
                         has("note: recording an event"),
          .between_phases = has(", between two phases"),
          .rank = has("note: rank "),
          .phase = has(", phase ") || has(", between two phases"),
          .op = has("(op ") || has("op map '") || has("op unmap '")};
}

}  // namespace

TEST_CASE("a fault at any call: the run ends with rank, phase and op, and nobody is left waiting") {
  // 4 tokens a sample: the third decode step is launched as graphs.
  const Job job = job_of({"workload.response_tokens.mean=4", "workload.response_tokens.max=4"});
  const Iteration whole = run_iteration(job.plan, job.scenario);
  REQUIRE_THAT(whole.text(), Catch::Equals(""));
  REQUIRE(whole.calls.contains("cuGraphLaunch"));
  CHECK(!whole.calls.contains("cuCtxSynchronize"));  // the host waits for streams, never for the whole device
  std::vector<std::pair<std::string, std::int64_t>> entries(whole.calls.begin(), whole.calls.end());
  std::set<std::string> failed_at;
  int met = 0, in_phases = 0, named = 0;
  for (std::uint64_t i = 0; i < 200; ++i) {
    // Entries in turn, so that rare ones are met too; the call at random.
    const auto& [entry, calls] = entries[i % entries.size()];
    const auto nth =
        static_cast<std::int64_t>(random_words(7, RngPurpose::test, 0, i)[0] % static_cast<std::uint32_t>(calls)) + 1;
    const auto error = i % 2 == 0 ? CUDA_ERROR_LAUNCH_FAILED : CUDA_ERROR_OUT_OF_MEMORY;
    const Iteration it =
        run_iteration(job.plan, job.scenario,
                      {.seed = i + 1, .prepare = [&](cuda::FakeDriver& fake) { fake.fail_call(entry, nth, error); }});
    INFO("fault " << i << ": " << entry << " call " << nth << "\n" << it.text());
    CHECK(it.seconds < hangs_after_seconds(whole.seconds));
    if (it.faults_met == 0) continue;  // how often an event is asked for depends on the schedule
    ++met;
    const bool failed = std::ranges::any_of(it.failures, [](const std::string& f) { return !f.empty(); });
    if (!failed) {  // what is given back at the end, or asked again
      CHECK(it.numbers == whole.numbers);
      CHECK((entry.find("Destroy") != std::string::npos || entry.find("Free") != std::string::npos ||
             entry.find("Unmap") != std::string::npos || entry.find("Release") != std::string::npos ||
             entry.find("Unload") != std::string::npos || entry.find("Unregister") != std::string::npos ||
             entry == "cuStreamSynchronize"));
      continue;
    }
    failed_at.insert(entry);
    bool names_call = false;
    for (std::size_t rank = 0; rank < it.failures.size(); ++rank) {
      const std::string& f = it.failures[rank];
      if (f.empty()) continue;
      const Said said = said_of(f, it.launches.empty());
      const bool is_its_call = !said.noticed && f.find(entry) != std::string::npos;
      names_call = names_call || is_its_call;
      // Every rank says who it is and in which phase, but before there are any.
      if (said.opening) continue;
      if (is_its_call) ++in_phases, named += said.rank && said.phase && said.op ? 1 : 0;
      CHECK_THAT(f, Catch::Contains(fmt::format("rank {}, ", rank)));
      CHECK(said.phase);
      // Whose call failed names the op, but where none was at work. The context is both ranks', and its error stays:
      // the other one may meet it at any call of its own.
      if (!said.noticed) CHECK((said.op || said.between_ops || (!is_its_call && said.between_phases)));
    }
    CHECK(names_call);
  }
  CAPTURE(in_phases, named);
  CHECK(in_phases >= 110);
  CHECK(named * 10 >= in_phases * 7);
  CHECK(met >= 180);
  CHECK(failed_at.size() >= 15);
}

namespace {

cuda::Driver real;                 // what tampered entries call
CUstream idle = nullptr;           // of their own
thread_local bool reads = false;   // this thread has asked for a copy to the host
std::atomic<std::int64_t> nth{0};  // counts calls of the tampered entry

struct HostBug {
  const char* what;
  void (*tamper)(cuda::Driver&);
  /// One of these, in the double's first finding, or, where it has none, in what the run itself says.
  std::vector<const char*> says;
};

const std::vector<HostBug>& host_bugs() {
  static const std::vector<HostBug> bugs = {
      {"an event's wait is dropped",
       [](cuda::Driver& d) { d.cuStreamWaitEvent = [](CUstream, CUevent, unsigned) { return CUDA_SUCCESS; }; },
       {"with no order between them", "uninitialised"}},
      {"events are recorded on a stream where nothing runs",
       [](cuda::Driver& d) {
         d.cuEventRecord = [](CUevent e, CUstream) {
           static std::mutex mutex;
           const std::lock_guard lock(mutex);
           if (idle == nullptr) real.cuStreamCreate(&idle, CU_STREAM_NON_BLOCKING);
           return real.cuEventRecord(e, idle);
         };
       },
       {"with no order between them", "uninitialised", "the host has not waited for"}},
      {"some kernels go to a stream that nobody orders",
       [](cuda::Driver& d) {
         d.cuLaunchKernel = [](CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                               unsigned bz, unsigned shared, CUstream s, void** p, void** x) {
           CUstream other = s;
           if (++nth % 50 == 0) real.cuStreamCreate(&other, CU_STREAM_NON_BLOCKING);
           return real.cuLaunchKernel(f, gx, gy, gz, bx, by, bz, shared, other, p, x);
         };
       },
       {"with no order between them", "uninitialised"}},
      {"memory goes back before the streams are done with it",
       [](cuda::Driver& d) {  // only what the host is about to read is waited for
         d.cuMemcpyDtoHAsync = [](void* to, CUdeviceptr from, std::size_t n, CUstream s) {
           reads = true;
           return real.cuMemcpyDtoHAsync(to, from, n, s);
         };
         d.cuStreamSynchronize = [](CUstream s) {
           return std::exchange(reads, false) ? real.cuStreamSynchronize(s) : CUDA_SUCCESS;
         };
         d.cuEventElapsedTime = [](float* ms, CUevent, CUevent) {
           *ms = 0;
           return CUDA_SUCCESS;
         };
       },
       {"the host has not waited for", "no longer pinned"}},
      {"a section is mapped twice",
       [](cuda::Driver& d) {
         d.cuMemMap = [](CUdeviceptr at, std::size_t n, std::size_t o, CUmemGenericAllocationHandle h,
                         unsigned long long f) {
           const CUresult r = real.cuMemMap(at, n, o, h, f);
           return r == CUDA_SUCCESS && ++nth == 9 ? real.cuMemMap(at, n, o, h, f) : r;
         };
       },
       {"is mapped already"}},
      {"a section is not mapped",
       [](cuda::Driver& d) {
         d.cuMemMap = [](CUdeviceptr at, std::size_t n, std::size_t o, CUmemGenericAllocationHandle h,
                         unsigned long long f) { return ++nth == 9 ? CUDA_SUCCESS : real.cuMemMap(at, n, o, h, f); };
       },
       {"is not mapped"}},
      // From the seventh on: which section a call is of depends on ranks' threads, and one alone may be of no use.
      {"a section is mapped and not made accessible",
       [](cuda::Driver& d) {
         d.cuMemSetAccess = [](CUdeviceptr at, std::size_t n, const CUmemAccessDesc* a, std::size_t c) {
           return ++nth >= 7 ? CUDA_SUCCESS : real.cuMemSetAccess(at, n, a, c);
         };
       },
       {"out of bounds", "is not mapped device memory"}},
      {"pieces have another capacity than is mapped of them: a granule less",
       [](cuda::Driver& d) {
         d.cuMemCreate = [](CUmemGenericAllocationHandle* out, std::size_t n, const CUmemAllocationProp* prop,
                            unsigned long long f) { return real.cuMemCreate(out, n > 4096 ? n - 4096 : n, prop, f); };
       },
       {"cuMemMap("}},
      {"a released handle is released again",
       [](cuda::Driver& d) {
         d.cuMemRelease = [](CUmemGenericAllocationHandle h) {
           const CUresult r = real.cuMemRelease(h);
           return r == CUDA_SUCCESS && ++nth == 5 ? real.cuMemRelease(h) : r;
         };
       },
       {"released already"}},
      {"staging is not pinned",
       [](cuda::Driver& d) {
         d.cuMemHostAlloc = [](void** out, std::size_t n, unsigned) {
           static std::vector<std::byte> pageable(std::size_t{1} << 20);
           *out = ++nth > 3 && n <= pageable.size() ? pageable.data() : nullptr;
           return *out != nullptr ? CUDA_SUCCESS : real.cuMemHostAlloc(out, n, 0);
         };
       },
       {"is not pinned", "not what cuMemHostAlloc gave"}},
      {"the host's sections are not registered",
       [](cuda::Driver& d) { d.cuMemHostRegister = [](void*, std::size_t, unsigned) { return CUDA_SUCCESS; }; },
       {"is not pinned"}},
      {"a copy to the device is short of its last bytes",
       [](cuda::Driver& d) {
         d.cuMemcpyHtoDAsync = [](CUdeviceptr to, const void* from, std::size_t n, CUstream s) {
           return real.cuMemcpyHtoDAsync(to, from, n > 16 ? n - 16 : n, s);
         };
       },
       {"uninitialised"}},
      {"a fill is left out (of bytes that something else wrote before: the verified sync finds it)",
       [](cuda::Driver& d) {
         d.cuMemsetD8Async = [](CUdeviceptr, unsigned char, std::size_t, CUstream) { return CUDA_SUCCESS; };
       },
       {"the rollout does not hold the training weights"}},
      {"a kernel is launched over one block less than its rows",
       [](cuda::Driver& d) {
         d.cuLaunchKernel = [](CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                               unsigned bz, unsigned shared, CUstream s, void** p, void** x) {
           return real.cuLaunchKernel(f, gx > 1 ? gx - 1 : gx, gy, gz, bx, by, bz, shared, s, p, x);
         };
       },
       {"uninitialised"}},
      {"an event is destroyed while it is in use",
       [](cuda::Driver& d) { d.cuEventQuery = [](CUevent e) { return real.cuEventDestroy(e); }; },
       {"no such event"}},
  };
  return bugs;
}

}  // namespace

TEST_CASE("bugs of the host side are found, and by which check is said") {
  const Job job = job_of();
  for (const HostBug& bug : host_bugs()) {
    nth = 0, idle = nullptr;
    const Iteration it = run_iteration(job.plan, job.scenario, {.tamper = [&](cuda::Driver& d) {
                                         real = d;
                                         bug.tamper(d);
                                       }});
    INFO(bug.what << ": " << it.text());
    const std::string first = it.findings.empty() ? it.text() : it.findings.front();
    CHECK(std::ranges::any_of(bug.says, [&](const char* s) { return first.find(s) != std::string::npos; }));
  }
}

TEST_CASE("a loss that is not finite ends the run with the op that made the first such number") {
  const Job job = job_of();
  nth = 0;
  const Iteration it =
      run_iteration(job.plan, job.scenario, {.tamper = [](cuda::Driver& d) {
                      real = d;
                      d.cuMemcpyHtoDAsync = [](CUdeviceptr to, const void* from, std::size_t n, CUstream s) {
                        const auto call = ++nth;  // behind each rank's tables come parameters
                        if (call > 2 && call < 7) std::memset(const_cast<void*>(from), 0xff, n);
                        return real.cuMemcpyHtoDAsync(to, from, n, s);
                      };
                    }});
  CHECK(it.findings.empty());
  CHECK_THAT(it.text(), Catch::Contains("E630") && Catch::Contains("NaN or infinite elements, the first at index "));
}

TEST_CASE("the device gives no more than it has: a plan that fits its books is refused by the device, by name") {
  const Job job = job_of();
  const Iteration it = run_iteration(job.plan, job.scenario, {.memory_bytes = std::int64_t{1} << 16});
  CHECK_THAT(it.text(), Catch::Contains("CUDA_ERROR_OUT_OF_MEMORY"));
}
