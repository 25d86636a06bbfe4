#include "cli/run_cuda.h"

#include <fmt/format.h>

#include <cstdio>
#include <optional>

#include "base/check.h"
#include "base/parse.h"
#include "cli/command.h"
#ifdef HOTBUNK_CUDA
#include "backends/cuda/cuda_backend.h"
#include "backends/cuda/evidence.h"
#include "backends/cuda/fake/fake_driver.h"
#endif

namespace hotbunk {

#ifdef HOTBUNK_CUDA
namespace {

/// "ENTRY:N" or "ENTRY:N:hang".
Status set_fault(cuda::FakeDriver& fake, const std::string& text) {
  if (text.empty()) return {};
  const auto first = text.find(':');
  const std::string entry = text.substr(0, first);
  std::string rest = first == std::string::npos ? "" : text.substr(first + 1);
  const bool hangs = rest.ends_with(":hang");
  if (hangs) rest.resize(rest.size() - 5);
  const auto nth = parse_integer(rest);
  if (!fake.has_entry(entry) || !nth || *nth < 1)
    return fail(Diagnostic{.code = "E708",
                           .message = fmt::format("--fake-fault '{}' names no call of the driver", text),
                           .where = {},
                           .notes = {},
                           .help = "write ENTRY:N or ENTRY:N:hang, as in cuLaunchKernel:100"});
  if (hangs) fake.hang_call(entry, *nth);
  else fake.fail_call(entry, *nth, entry == "cuMemCreate" ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_LAUNCH_FAILED);
  return {};
}

int run_ranks(const CudaRun& run, const cuda::Driver& driver,
              const std::function<int(World&, const MakeBackend&)>& rank) {
  const auto context = std::make_shared<cuda::Context>(driver);
  const auto local = std::make_shared<cuda::LocalRanks>();
  const std::vector<int> codes = thread_ranks(run.ranks, [&](const LaunchEnv& env) {
    context->make_current();
    cuda::CudaWorld world(context, local, env, run.world);
    return rank(world, [&](Driver& plan_driver, std::int32_t span_steps) {
      return std::make_unique<cuda::CudaBackend>(
          world, plan_driver, cuda::CudaOptions{.span_steps = span_steps, .check_order = run.check_order, .scope = ""});
    });
  });
  for (const int code : codes)
    if (code != exit_done) return code;
  return exit_done;
}

}  // namespace

std::string hardware_evidence_line() { return "the CUDA backend " + cuda::evidence_text(); }

Result<int> run_on_cuda(const CudaRun& run, const std::function<int(World&, const MakeBackend&)>& rank) {
  try {
    if (!run.fake) {
      auto driver = cuda::open_driver();
      if (!driver) return fail(std::move(driver.error()));
      return run_ranks(run, *driver, rank);
    }
    // Granules as small as the chunks of a plan for the CPU: then a byte of a sleeping section is mapped for nobody.
    cuda::FakeDriver fake({.memory_bytes = run.fake_bytes, .seed = run.fake_seed, .granularity_bytes = 4096});
    if (auto s = set_fault(fake, run.fake_fault); !s) return fail(std::move(s.error()));
    const int code = run_ranks(run, fake.table(), rank);
    for (const std::string& finding : fake.findings()) fmt::print(stderr, "the driver's double found: {}\n", finding);
    return fake.findings().empty() || code != exit_done ? code : static_cast<int>(exit_runtime);
  } catch (const RuntimeFailure& e) {
    return fail(Diagnostic{.code = "E602",
                           .message = e.what(),
                           .where = {},
                           .notes = {"while opening the device"},
                           .help = "`hotbunk doctor` says what the driver is"});
  }
}

#else

std::string hardware_evidence_line() { return ""; }

Result<int> run_on_cuda(const CudaRun&, const std::function<int(World&, const MakeBackend&)>&) {
  return fail(Diagnostic{.code = "E641",
                         .message = "this program was built without CUDA",
                         .where = {},
                         .notes = {},
                         .help = "build it where nvcc is found, or run on CPU ranks"});
}

#endif

}  // namespace hotbunk
