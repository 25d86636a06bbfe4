#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string_view>
#include <utility>

#include "backends/cpu_gloo/cpu_backend.h"
#include "base/check.h"
#include "base/file.h"
#include "runtime/launch.h"
#include "sim/sim_backend.h"
#include "tests/conformance/subject.h"
#ifdef HOTBUNK_CUDA
#include "backends/cuda/cuda_backend.h"
#include "backends/cuda/fake/fake_driver.h"
#include "backends/cuda/fake/fake_nccl.h"
#endif

namespace hotbunk::conformance {
namespace {

/// Every op takes a microsecond, in virtual time.
struct Microsecond final : OpCost {
  std::int64_t nanoseconds(const Plan&, Rank, const Op&, const Args&) const override { return 1000; }
};

/// All ranks in this process.
class Simulator final : public Subject {
 public:
  std::string name() const override { return "sim"; }
  bool has_values() const override { return false; }
  std::vector<std::string> run(int ranks, const std::function<std::string(Process&)>& work) const override {
    const Microsecond cost;
    std::vector<std::unique_ptr<SimBackend>> kept;
    Process process;
    for (Rank r = 0; r < ranks; ++r) process.ranks.push_back(r);
    process.backend = [&](Driver&) -> Backend& {
      return *kept.emplace_back(std::make_unique<SimBackend>(ClusterSpec{}, cost));
    };
    return {work(process)};
  }
};

/// A rank that failed says no goodbye.
void leave(World& world) {
  try {
    world.leave();
  } catch (const RuntimeFailure&) {
  }
}

/// Runs `rank` in a process of its own for each; what it returns, by rank, "lost: …" of one that came to no end.
std::vector<std::string> in_processes(int ranks, const std::function<std::string(const LaunchEnv&)>& rank) {
  namespace fs = std::filesystem;
  static int runs = 0;
  const fs::path folder = fs::temp_directory_path() / fmt::format("hotbunk-conformance-{}-{}", getpid(), runs++);
  fs::create_directories(folder);
  const auto file_of = [&](int r) { return folder / fmt::format("{}", r); };
  const LaunchResult ended =
      fork_ranks(ranks, [&](const LaunchEnv& env) { return write_file_atomic(file_of(env.rank), rank(env)) ? 0 : 4; });
  std::vector<std::string> out;
  for (int r = 0; r < ranks; ++r) {
    const auto said = read_file(file_of(r));
    out.push_back(said ? *said : "lost: " + ended.message);
  }
  fs::remove_all(folder);
  return out;
}

/// A process per rank.
class CpuGloo final : public Subject {
 public:
  explicit CpuGloo(Transport transport) : transport_(transport) {}
  std::string name() const override { return fmt::format("cpu_gloo over {}", hotbunk::name_of(transport_)); }
  bool has_values() const override { return true; }

  std::vector<std::string> run(int ranks, const std::function<std::string(Process&)>& work) const override {
    return in_processes(ranks, [&](const LaunchEnv& env) {
      std::vector<std::unique_ptr<CpuBackend>> kept;  // the world's communicators know their arenas
      CpuWorld world(env, {.check_collectives = true});
      Process process{.ranks = {env.rank}, .backend = [&](Driver& driver) -> Backend& {
                        CpuOptions options;
                        options.compute_threads = 2, options.check_resident = true, options.check_order = true;
                        options.scope = fmt::format("{}.", kept.size());
                        if (ranks > 1) options.transport = transport_;
                        return *kept.emplace_back(std::make_unique<CpuBackend>(world, driver, options));
                      }};
      std::string said = work(process);
      leave(world);
      return said;
    });
  }

 private:
  Transport transport_;
};

#ifdef HOTBUNK_CUDA
/// Kernels as the doubles execute them, parsed once for all cases; a process that is forked has those of its parent.
std::shared_ptr<cuda::PtxModules> modules() {
  static const auto all = std::make_shared<cuda::PtxModules>();
  return all;
}

/// Ranks as threads of this process on one device.
class Cuda : public Subject {
 public:
  bool has_values() const override { return true; }

 protected:
  static std::vector<std::string> run_on(const cuda::Driver& table, int ranks,
                                         const std::function<std::string(Process&)>& work) {
    std::vector<std::string> out(static_cast<std::size_t>(ranks));
    {
      const auto context = std::make_shared<cuda::Context>(table);
      const auto local = std::make_shared<cuda::LocalRanks>();
      thread_ranks(ranks, [&](const LaunchEnv& env) {
        std::vector<std::unique_ptr<cuda::CudaBackend>> kept;  // peers read their arenas until the world is left
        cuda::CudaWorld world(context, local, env);
        Process process{.ranks = {env.rank}, .backend = [&](Driver& driver) -> Backend& {
                          cuda::CudaOptions options;
                          options.check_order = true;
                          options.scope = fmt::format("{}.", kept.size());
                          return *kept.emplace_back(std::make_unique<cuda::CudaBackend>(world, driver, options));
                        }};
        out[static_cast<std::size_t>(env.rank)] = work(process);
        world.leave();
        return 0;
      });
    }
    return out;
  }
};

class CudaFake final : public Cuda {
 public:
  std::string name() const override { return "cuda on the driver's double"; }
  std::vector<std::string> run(int ranks, const std::function<std::string(Process&)>& work) const override {
    static std::uint64_t seed = 0;
    cuda::FakeDriver fake({.seed = ++seed, .modules = modules()});
    std::vector<std::string> out = run_on(fake.table(), ranks, work);
    // Every case is right or refused before the device sees it: what the double found is a fault of the backend.
    for (const std::string& finding : fake.findings()) out.front() = "lost: " + finding;
    return out;
  }
};

/// A process per rank, each with a device of its own, over the double of NCCL.
class CudaFakeNccl final : public Cuda {
 public:
  std::string name() const override { return "cuda over NCCL's double"; }
  std::vector<std::string> run(int ranks, const std::function<std::string(Process&)>& work) const override {
    static std::uint64_t seed = 0;
    ++seed;
    return in_processes(ranks, [&](const LaunchEnv& env) {
      cuda::FakeDriver fake({.seed = seed + static_cast<std::uint64_t>(env.rank), .modules = modules()});
      cuda::FakeNccl nccl(fake);
      std::string said;
      {
        cuda::CudaWorld world(std::make_shared<cuda::Context>(fake.table()), nccl.table(), env,
                              {.check_collectives = true});
        std::vector<std::unique_ptr<cuda::CudaBackend>> kept;  // until the world is left; their arenas need its context
        Process process{.ranks = {env.rank}, .backend = [&](Driver& driver) -> Backend& {
                          cuda::CudaOptions options;
                          options.check_order = true;
                          options.scope = fmt::format("{}.", kept.size());
                          return *kept.emplace_back(std::make_unique<cuda::CudaBackend>(world, driver, options));
                        }};
        said = work(process);
        leave(world);
      }
      for (const std::string& finding : fake.findings()) said = "lost: " + finding;
      return said;
    });
  }
};

class CudaDriver final : public Cuda {
 public:
  explicit CudaDriver(const cuda::Driver& table) : table_(table) {}
  std::string name() const override { return "cuda"; }
  std::vector<std::string> run(int ranks, const std::function<std::string(Process&)>& work) const override {
    return run_on(table_, ranks, work);
  }

 private:
  const cuda::Driver table_;
};
#endif

}  // namespace

const std::vector<std::unique_ptr<Subject>>& subjects() {
  static const std::vector<std::unique_ptr<Subject>> all = [] {
    std::vector<std::unique_ptr<Subject>> list;
#ifdef HOTBUNK_CUDA
    if (const char* only = std::getenv("HOTBUNK_CONFORMANCE"); only != nullptr && only == std::string_view("cuda")) {
      const auto driver = cuda::open_driver();
      if (!driver) {
        fmt::print(stderr, "skipped: {}\n", driver.error().front().message);
        std::exit(4);  // CTest's SKIP_RETURN_CODE
      }
      list.push_back(std::make_unique<CudaDriver>(*driver));
      return list;
    }
#endif
    list.push_back(std::make_unique<Simulator>());
    list.push_back(std::make_unique<CpuGloo>(Transport::shm));
    list.push_back(std::make_unique<CpuGloo>(Transport::gloo));
#ifdef HOTBUNK_CUDA
    list.push_back(std::make_unique<CudaFake>());
#endif
    return list;
  }();
  return all;
}

std::vector<const Subject*> subjects_of_collectives() {
  std::vector<const Subject*> all;
  for (const auto& subject : subjects()) all.push_back(subject.get());
#ifdef HOTBUNK_CUDA
  static const CudaFakeNccl nccl;
  if (std::getenv("HOTBUNK_CONFORMANCE") == nullptr) all.push_back(&nccl);
#endif
  return all;
}

}  // namespace hotbunk::conformance
