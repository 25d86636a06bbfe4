// Calls of ranks that are processes, of NCCL's among them, that fail, fail later or never return: every rank ends soon,
// with exit code 3, rank, phase and op.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <map>
#include <set>

#include "backends/cuda/fake/fake_nccl.h"
#include "base/rng.h"
#include "lowering/lower.h"
#include "tests/cuda_backend/iteration.h"

namespace hotbunk::nccl_faults_test {
namespace {

using namespace test;

struct Job {
  Scenario scenario;
  Plan plan;
  Processes whole;  // without a fault
  std::vector<std::pair<std::string, std::int64_t>> nccl,
      driver;  // entry points, with how often rank 0 and 1 call them
};

Job job_of(const std::vector<std::string>& sets) {
  Job job{tiny_job(sets), {}, {}, {}, {}};
  auto plan = lower(job.scenario);
  REQUIRE(plan);
  job.plan = std::move(*plan);
  job.whole = run_over_nccl(job.plan, job.scenario, {}, 60);
  REQUIRE_THAT(job.whole.text(), Catch::Equals(""));
  for (const auto& [entry, calls] : job.whole.calls[0]) {
    const auto also = job.whole.calls[1].find(entry);
    const std::int64_t both = also == job.whole.calls[1].end() ? 0 : std::min(calls, also->second);
    if (both > 0) (entry.starts_with("nccl") ? job.nccl : job.driver).emplace_back(entry, both);
  }
  return job;
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

/// Before ranks have met, nobody can tell the others.
bool is_before_ranks_meet(const std::string& entry) {
  return entry == "cuInit" || entry == "cuCtxSetCurrent" || entry.starts_with("cuDevice") ||
         entry.starts_with("cuMemGet");
}

/// What a process says of a failure, beside why.
bool names_phase_and_op(const std::string& text) {
  return (has(text, "phase ") && (has(text, "(op ") || has(text, ", op ") || has(text, "op map '") ||
                                  has(text, "op unmap '") || has(text, "(waiting for the streams)"))) ||
         has(text, "between two phases");
}

}  // namespace

TEST_CASE("a fault at any call of ranks that are processes, NCCL's too: all of them end, with rank, phase and op") {
  const std::vector<Job> jobs = {job_of({"sync.transport=collective"}),
                                 job_of({"cluster.ranks_per_device=4", "train.layout={dp: 4}",
                                         "rollout.layout={tp: 2, dp: 2}", "sync.transport=collective"})};
  CHECK(jobs[0].nccl.size() >= 10);
  std::map<cuda::FakeFault::Kind, int> ended;
  std::set<std::string> ended_at;
  int met = 0, of_nccl = 0, after_opening = 0, named = 0;
  for (std::uint64_t i = 0; i < 120; ++i) {
    const Job& job = jobs[i % 4 == 3 ? 1 : 0];
    const auto words = random_words(11, RngPurpose::test, 0, i);
    // Of NCCL in two cases of three; entries in turn, so that rare ones are met too; the call at random.
    const bool nccl = i % 3 != 2;
    const auto& entries = nccl ? job.nccl : job.driver;
    const auto& [entry, calls] = entries[(nccl ? i - i / 3 : i / 3) % entries.size()];
    cuda::FakeFault fault{
        .entry = entry, .nth = 1 + static_cast<std::int64_t>(words[0]) % calls, .rank = static_cast<int>(words[1] % 2)};
    if (i % 6 == 4) fault.kind = cuda::FakeFault::Kind::hangs;
    else if (words[2] % 2 == 1 && cuda::FakeNccl::may_fail_later(entry))
      fault.kind = cuda::FakeFault::Kind::fails_later;
    const Processes p = run_over_nccl(job.plan, job.scenario, fault, 1.5, i + 1);
    INFO("fault " << i << ": " << cuda::text_of(fault) << " of " << p.codes.size() << " ranks, "
                  << fmt::format("codes {}", fmt::join(p.codes, " ")) << "\n"
                  << p.text());
    CHECK(p.seconds < hangs_after_seconds(job.whole.seconds));
    CHECK(!has(p.text(), "found: "));
    if (p.faults_met == 0) continue;  // how often a stream is asked for depends on the schedule
    ++met, of_nccl += nccl ? 1 : 0;
    if (p.went_well()) {  // what is given back at the end, or asked again
      CHECK(p.numbers == job.whole.numbers);
      CHECK(fault.kind != cuda::FakeFault::Kind::hangs);
      continue;
    }
    ++ended[fault.kind], ended_at.insert(entry);
    const auto faulty = static_cast<std::size_t>(*fault.rank);
    const bool opening = is_before_ranks_meet(entry);
    CHECK(p.codes[faulty] == 3);
    for (std::size_t rank = 0; rank < p.codes.size(); ++rank)
      CHECK((p.codes[rank] == 3 || (opening ? p.codes[rank] == -1 : p.codes[rank] == 0)));
    // Why: the call, NCCL's reason behind it, or who did nothing any more.
    // What cannot be deregistered at the end goes with its communicator: whoever was not done says that nobody came.
    // These jobs deregister only there; scratch that grows is nccl_test.cc's.
    if (fault.kind == cuda::FakeFault::Kind::fails)
      // A copy on the device may be the double's own, inside of a collective.
      CHECK((has(p.text(), entry) || (entry == "ncclCommDeregister" && has(p.text(), "run.timeout_s")) ||
             (entry == "cuMemcpyDtoDAsync" && has(p.text(), "ncclAllGather"))));
    if (fault.kind == cuda::FakeFault::Kind::fails_later) CHECK(has(p.text(), "remote process exited or there was"));
    if (fault.kind == cuda::FakeFault::Kind::hangs) CHECK(has(p.text(), "run.timeout_s"));
    if (!opening) CHECK(has(p.text(), fmt::format("rank {}", faulty)));
    if (opening || has(p.text(), "while opening the plan's") || has(p.text(), "giving communicators")) continue;
    ++after_opening, named += names_phase_and_op(p.text()) ? 1 : 0;
  }
  CAPTURE(met, of_nccl, after_opening, named, ended_at.size(), ended[cuda::FakeFault::Kind::fails],
          ended[cuda::FakeFault::Kind::hangs], ended[cuda::FakeFault::Kind::fails_later]);
  CHECK(met >= 110);
  CHECK(of_nccl >= 70);
  CHECK(ended_at.size() >= 30);
  CHECK(ended.size() == 3);
  CHECK(after_opening >= 50);
  CHECK(named * 10 >= after_opening * 9);
}

TEST_CASE("a fault is drawn by its seed, and is what its text says") {
  const std::vector<std::string> entries = cuda::entries_with_faults(true);
  std::set<std::string> texts;
  std::map<cuda::FakeFault::Kind, int> kinds;
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    const cuda::FakeFault f = cuda::drawn_fault(seed, entries, 4);
    const std::string text = cuda::text_of(f);
    INFO(text);
    texts.insert(text), ++kinds[f.kind];
    CHECK(text == cuda::text_of(cuda::drawn_fault(seed, entries, 4)));
    const auto read = cuda::fake_fault_from(text);
    REQUIRE(read);
    CHECK(cuda::text_of(*read) == text);
    CHECK((f.nth >= 1 && f.nth <= 64 && f.rank.value_or(-1) >= 0 && *f.rank < 4));
  }
  CHECK(texts.size() >= 190);
  CHECK(kinds.size() == 3);
  for (const char* wrong :
       {"cuLaunchKernel", "cuLaunchKernel:0", "cuLaunchKernel:1:late", "cuNothing:1", "cuLaunchKernel:1:async",
        "ncclGetUniqueId:1:async", "ncclSend:1@", "ncclSend:1@-1", "ncclSend:1@4294967296"})
    CHECK(!cuda::fake_fault_from(wrong));
  const auto said = [](const char* wrong) { return render(cuda::fake_fault_from(wrong).error()); };
  CHECK_THAT(said("cuNothing:1"), Catch::Contains("names no call of"));
  CHECK_THAT(said("cuLaunchKernel:1:async"), Catch::Contains("cannot fail later") && !Catch::Contains("names no call"));
  CHECK_THAT(said("ncclSend:1@4294967296"), Catch::Contains("names no rank"));
}

}  // namespace hotbunk::nccl_faults_test
