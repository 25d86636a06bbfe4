#include "cli/run_cuda.h"

#include <fmt/format.h>

#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/check.h"
#include "base/parse.h"
#include "cli/command.h"
#include "runtime/deadline.h"
#ifdef HOTBUNK_CUDA
#include "backends/cuda/cuda_backend.h"
#include "backends/cuda/evidence.h"
#include "backends/cuda/fake/fake_blas.h"
#include "backends/cuda/fake/fake_dnn.h"
#include "backends/cuda/fake/fake_driver.h"
#include "backends/cuda/fake/fake_fault.h"
#include "backends/cuda/fake/fake_nccl.h"
#endif

namespace hotbunk {

std::string hardware_evidence_line(const nlohmann::ordered_json& bodies) {
  std::vector<std::string> never;
  for (const auto& b : bodies)
    if (b.at("last_run_on_hardware").is_null()) never.push_back(b.at("body"));
  if (never.empty())
    return fmt::format("all {} kinds of bodies of this run ran on hardware before this run", bodies.size());
  if (never.size() == bodies.size())
    return fmt::format("none of the {} kinds of bodies of this run ran on hardware before this run", bodies.size());
  return fmt::format("{} of the {} kinds of bodies of this run never ran on hardware before this run: {}", never.size(),
                     bodies.size(), fmt::join(never, ", "));
}

std::int64_t fake_device_bytes(const Job& job, bool processes) {
  // BlasProducts::workspace_bytes on some streams and DnnAttention's on one among it.
  constexpr std::int64_t beside = std::int64_t{128} << 20;
  return (processes ? 1 : job.plan.num_ranks()) * (job.plan.device_capacity_bytes + beside);
}

#ifdef HOTBUNK_CUDA
namespace {

/// The fault that was asked for, said where it was drawn; nothing where this rank's process does not meet it.
Result<std::optional<cuda::FakeFault>> fault_of(const CudaRun& run, bool processes) {
  if (run.fake_fault.empty()) return std::optional<cuda::FakeFault>();
  const auto refuse = [&](const std::string& why, const std::string& help) {
    return fail(cuda::wrong_fault(run.fake_fault, why, help));
  };
  constexpr std::string_view by_seed = "seed:";
  const bool drawn = run.fake_fault.starts_with(by_seed);
  const auto seed = drawn ? parse_integer(run.fake_fault.substr(by_seed.size())) : std::nullopt;
  const Result<cuda::FakeFault> fault =
      seed ? cuda::drawn_fault(static_cast<std::uint64_t>(*seed), cuda::entries_with_faults(processes),
                               processes ? run.env->world_size : 0)
           : cuda::fake_fault_from(run.fake_fault);
  if (!fault) return fail(fault.error());
  if (fault->rank && !processes)
    return refuse("is of one rank, and the ranks are threads", "leave @RANK out, or start a process per rank");
  if (fault->rank && *fault->rank >= run.env->world_size)
    return refuse(fmt::format("is of rank {}, and the ranks are 0 to {}", *fault->rank, run.env->world_size - 1),
                  "name one of them, or leave @RANK out");
  if (drawn && (!processes || run.env->rank == 0))
    fmt::print(stderr, "the double's fault of {} is {}\n", run.fake_fault, cuda::text_of(*fault));
  if (fault->rank && *fault->rank != run.env->rank) return std::optional<cuda::FakeFault>();
  return std::optional(*fault);
}

struct Products {
  std::optional<cuda::BlasLt> blas;
  cuda::ProductPolicy policy = cuda::ProductPolicy::own;
};
/// The libraries that take ops.
struct Libraries {
  Products products;
  std::optional<cuda::Dnn> dnn;
};

/// `fake`: the double's table, where that is the backend.
Result<Products> products_of(const std::string& asked, const std::optional<cuda::BlasLt>& fake) {
  const auto policy = cuda::product_policy_from(!asked.empty() ? asked
                                                : fake         ? "own"
                                                               : cuda::name_of(cuda::ProductPolicy::equal));
  HB_CHECK(policy.has_value(), "--products {}", asked);
  if (*policy == cuda::ProductPolicy::own) return Products{};
  if (fake) return Products{fake, *policy};
  const auto blas = cuda::open_blas();
  if (blas) return Products{*blas, *policy};
  if (!asked.empty()) return fail(blas.error());
  return Products{};
}

/// Nothing: our kernels form attention's gradients.
Result<std::optional<cuda::Dnn>> dnn_of(const std::string& asked, bool fake) {
  const auto policy = cuda::attention_policy_from(asked.empty() ? cuda::name_of(cuda::AttentionPolicy::own) : asked);
  HB_CHECK(policy.has_value(), "--attention-backward {}", asked);
  if (*policy == cuda::AttentionPolicy::own) return std::optional<cuda::Dnn>();
  if (fake) return std::optional(cuda::FakeDnn::table());
  const auto dnn = cuda::open_dnn();
  if (!dnn) return fail(dnn.error());
  return std::optional(*dnn);
}

Result<Libraries> libraries_of(const CudaRun& run) {
  const auto products = products_of(run.products, run.fake ? std::optional(cuda::FakeBlasLt::table()) : std::nullopt);
  if (!products) return fail(products.error());
  const auto dnn = dnn_of(run.attention, run.fake);
  if (!dnn) return fail(dnn.error());
  return Libraries{*products, *dnn};
}

/// Of the double, whose device is as large as the plan and little more.
constexpr std::int64_t fake_attention_workspace_bytes = std::int64_t{16} << 20;

using RunRank = std::function<int(World&, const MakeBackend&)>;

int run_rank_in(const CudaRun& run, const Libraries& libraries, cuda::CudaWorld& world, const RunRank& rank) {
  return rank(world, [&](Driver& plan_driver, std::int32_t span_steps, int threads) {
    return std::make_unique<cuda::CudaBackend>(
        world, plan_driver,
        cuda::CudaOptions{.span_steps = span_steps,
                          .keep_timings = run.keep_timings,
                          .host_threads = threads,
                          .check_order = run.check_order,
                          .blas = libraries.products.blas,
                          .dnn = libraries.dnn,
                          .attention_workspace_bytes =
                              run.fake ? fake_attention_workspace_bytes : cuda::DnnAttention::usual_workspace_bytes,
                          .products = libraries.products.policy,
                          .scope = ""});
  });
}

/// Before ranks have met nobody waits for one whose driver does not answer.
template <class Open>
auto opened(const CudaRun& run, const std::string& who, const Open& open) {
  const Deadline deadline(who + "opening the device,", run.world.timeout_seconds);
  return open();
}

/// All ranks, as threads on the first device.
int run_threads(const CudaRun& run, const Libraries& libraries, const cuda::Driver& driver, const RunRank& rank) {
  auto context = opened(run, "", [&] { return std::make_shared<cuda::Context>(driver); });
  const auto local = std::make_shared<cuda::LocalRanks>();
  const std::vector<int> codes = thread_ranks(run.ranks, [&](const LaunchEnv& env) {
    context->make_current();
    cuda::CudaWorld world(context, local, env, run.world);
    return run_rank_in(run, libraries, world, rank);
  });
  const Deadline deadline("giving the device back,", run.world.timeout_seconds);
  context.reset();
  for (const int code : codes)
    if (code != exit_done) return code;
  return exit_done;
}

/// This process's rank, on the device of its place among the ranks of this host; where the launcher shows each rank its
/// own device only, that is the first.
int run_process(const CudaRun& run, const Libraries& libraries, const cuda::Driver& driver, const cuda::Nccl& nccl,
                const RunRank& rank) {
  auto context = opened(run, fmt::format("rank {}, ", run.env->rank), [&] {
    int devices = 0;
    HB_CUDA(driver, cuInit(0));
    HB_CUDA(driver, cuDeviceGetCount(&devices));
    if (devices == 0) throw RuntimeFailure("the driver shows no device (CUDA_VISIBLE_DEVICES)");
    return std::make_shared<cuda::Context>(driver, run.env->local_rank % devices);
  });
  cuda::CudaWorld world(std::move(context), nccl, *run.env, run.world);
  return run_rank_in(run, libraries, world, rank);
}

bool in_processes(const CudaRun& run) { return run.env && run.env->world_size > 1; }

}  // namespace

std::string hardware_evidence_line() { return "the CUDA backend " + cuda::evidence_text(); }

nlohmann::ordered_json hardware_evidence_of_bodies(const Plan& plan, const Trace& trace, const BodiesRanBy& how) {
  const auto products =
      products_of(how.products, how.backend == "cuda-fake" ? std::optional(cuda::FakeBlasLt::table()) : std::nullopt);
  const cuda::RanBy by = {.transport = how.processes ? "nccl" : "local",
                          .products = products && products->blas ? products->policy : cuda::ProductPolicy::own,
                          .attention = how.attention.empty() ? cuda::AttentionPolicy::own
                                                             : cuda::attention_policy_from(how.attention).value()};
  const auto known = cuda::body_evidence();
  nlohmann::ordered_json out = nlohmann::ordered_json::array();
  for (const cuda::RunBody& b : cuda::bodies_that_ran(plan, trace.phase_totals, by)) {
    const auto run = cuda::ran_on_hardware(b, known);
    nlohmann::ordered_json last = nullptr;
    if (run)
      last = {{"date", run->date}, {"machine", run->machine}, {"command", run->command}, {"commit", run->commit}};
    out.push_back({{"body", b.body}, {"ops", b.ops}, {"last_run_on_hardware", std::move(last)}});
  }
  return out;
}

Result<std::string> cuda_products(const std::string& backend, const std::string& asked) {
  // The double's says its version without a device.
  const auto products =
      products_of(asked, backend == "cuda-fake" ? std::optional(cuda::FakeBlasLt::table()) : std::nullopt);
  if (!products) return fail(products.error());
  if (!products->blas) return std::string("own kernels");
  return fmt::format("cuBLASLt {}{}, {}", cuda::blas_version_text(products->blas->cublasLtGetVersion()),
                     backend == "cuda-fake" ? " (double)" : "",
                     products->policy == cuda::ProductPolicy::all     ? "all: rollout and training log-probs differ"
                     : products->policy == cuda::ProductPolicy::equal ? "backward, and forward where its bits are ours"
                                                                      : "backward alone");
}

Result<std::string> cuda_attention(const std::string& backend, const std::string& asked) {
  const auto dnn = dnn_of(asked, backend == "cuda-fake");
  if (!dnn) return fail(dnn.error());
  if (!*dnn) return std::string("own kernels");
  return fmt::format("cuDNN {}{}, what it takes", cuda::dnn_version_text((*dnn)->cudnnGetVersion()),
                     backend == "cuda-fake" ? " (double)" : "");
}

Result<int> run_on_cuda(const CudaRun& run, const std::function<int(World&, const MakeBackend&)>& rank) {
  try {
    if (!run.fake) {
      auto driver = cuda::open_driver();
      if (!driver) return fail(std::move(driver.error()));
      const auto libraries = libraries_of(run);
      if (!libraries) return fail(libraries.error());
      if (!in_processes(run)) return run_threads(run, *libraries, *driver, rank);
      const auto nccl = cuda::open_nccl();
      if (!nccl) return fail(nccl.error());
      return run_process(run, *libraries, *driver, *nccl, rank);
    }
    // Granules as small as the chunks of a plan for the CPU: then a byte of a sleeping section is mapped for nobody.
    cuda::FakeDriver fake({.memory_bytes = run.fake_bytes, .seed = run.fake_seed, .granularity_bytes = 4096});
    const auto fault = fault_of(run, in_processes(run));
    if (!fault) return fail(fault.error());
    if (*fault) cuda::put(fake, **fault);
    cuda::FakeBlasLt blas(fake);
    cuda::FakeDnn dnn(fake);
    const auto libraries = libraries_of(run);
    if (!libraries) return fail(libraries.error());
    int code = exit_done;
    if (in_processes(run)) {
      cuda::FakeNccl nccl(fake);
      code = run_process(run, *libraries, fake.table(), nccl.table(), rank);
    } else {
      code = run_threads(run, *libraries, fake.table(), rank);
    }
    if (*fault && fake.faults_met() == 0)
      fmt::print(stderr, "the double's fault {} was not met: there were fewer calls\n", cuda::text_of(**fault));
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

nlohmann::ordered_json hardware_evidence_of_bodies(const Plan&, const Trace&, const BodiesRanBy&) {
  return nlohmann::ordered_json::array();
}

Result<std::string> cuda_products(const std::string&, const std::string&) { return std::string("none"); }
Result<std::string> cuda_attention(const std::string&, const std::string&) { return std::string("none"); }

Result<int> run_on_cuda(const CudaRun&, const std::function<int(World&, const MakeBackend&)>&) {
  return fail(Diagnostic{.code = "E641",
                         .message = "this program was built without CUDA",
                         .where = {},
                         .notes = {},
                         .help = "build it where nvcc is found, or run on CPU ranks"});
}

#endif

}  // namespace hotbunk
