// Ranks as processes of this test, each with a driver's double and NCCL's: what a test does in them, and numbers on
// their devices.
#pragma once
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <cstring>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backends/cuda/cuda_world.h"
#include "backends/cuda/fake/fake_nccl.h"
#include "backends/cuda/kernels/kernels.h"
#include "backends/cuda/staging.h"
#include "base/check.h"
#include "base/file.h"
#include "runtime/launch.h"

namespace hotbunk::cuda::test {

/// One rank, with a device of its own, and a stream.
struct NcclProcess {
  FakeDriver& fake;
  FakeNccl& nccl;
  CudaWorld& world;
  Launcher launch;
};

/// All kernels, parsed once in the process that forks ranks.
inline std::shared_ptr<PtxModules> parsed_kernels() {
  static const auto all = [] {
    auto modules = std::make_shared<PtxModules>();
    for (const std::string& file : kernel_file_names()) modules->parsed(std::string(kernel_ptx(file)));
    return modules;
  }();
  return all;
}

/// What each of the ranks, processes, says; what it throws; or what the double found. `tamper`: with a rank's table.
/// `device`: of each, but for its seed.
inline std::vector<std::string> in_ranks(int ranks, const std::function<std::string(NcclProcess&)>& work,
                                         const std::function<void(cuda::Driver&, int rank)>& tamper = {},
                                         const std::function<void(Nccl&)>& tamper_nccl = {},
                                         FakeOptions device = {.modules = parsed_kernels()}) {
  namespace fs = std::filesystem;
  const fs::path folder = fs::temp_directory_path() / fmt::format("hotbunk_nccl_test.{}", ::getpid());
  fs::create_directories(folder);
  fork_ranks(ranks, [&](const LaunchEnv& env) {
    std::string said;
    device.seed = static_cast<std::uint64_t>(env.rank) + 1;
    FakeDriver fake(device);
    FakeNccl nccl(fake);
    cuda::Driver table = fake.table();
    Nccl nccl_table = nccl.table();
    if (tamper) tamper(table, env.rank);
    if (tamper_nccl) tamper_nccl(nccl_table);
    try {
      CudaWorld world(std::make_shared<Context>(table), nccl_table, env);
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
    if (const auto findings = fake.findings(); !findings.empty())
      said = fmt::format("found: {}", fmt::join(findings, "; "));
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

}  // namespace hotbunk::cuda::test
