#include "backends/cuda/machine.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>

#include "base/file.h"

namespace hotbunk::cuda {
namespace {

int attribute(const Driver& d, CUdevice device, CUdevice_attribute which) {
  int value = 0;
  return d.cuDeviceGetAttribute(&value, which, device) == CUDA_SUCCESS ? value : 0;
}

std::string first_line(const std::filesystem::path& file) {
  const std::string text = read_file(file).value_or("?");
  return text.substr(0, text.find('\n'));
}

std::vector<std::filesystem::path> entries(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> out;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(folder, none)) out.push_back(entry.path());
  std::ranges::sort(out);
  return out;
}

}  // namespace

std::vector<std::string> device_lines(const Driver& d) {
  int n = 0;
  if (d.cuInit(0) != CUDA_SUCCESS || d.cuDeviceGetCount(&n) != CUDA_SUCCESS) return {"the driver finds no device"};
  std::vector<std::string> out;
  for (int i = 0; i < n; ++i) {
    CUdevice device = 0;
    std::array<char, 256> name{};
    std::size_t bytes = 0;
    if (d.cuDeviceGet(&device, i) != CUDA_SUCCESS ||
        d.cuDeviceGetName(name.data(), static_cast<int>(name.size()), device) != CUDA_SUCCESS ||
        d.cuDeviceTotalMem(&bytes, device) != CUDA_SUCCESS) {
      out.push_back(fmt::format("{}: the driver does not say", i));
      continue;
    }
    std::string line = fmt::format("{}: {}, {:.1f} GiB, sm_{}{}, {} SMs", i, name.data(),
                                   static_cast<double>(bytes) / (std::int64_t{1} << 30),
                                   attribute(d, device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
                                   attribute(d, device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
                                   attribute(d, device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT));
    if (const int khz = attribute(d, device, CU_DEVICE_ATTRIBUTE_CLOCK_RATE); khz > 0)
      line += fmt::format(", up to {} MHz (memory {} MHz)", khz / 1000,
                          attribute(d, device, CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE) / 1000);
    out.push_back(std::move(line));
  }
  return out;
}

std::string peer_access_text(const Driver& d) {
  int n = 0;
  if (d.cuInit(0) != CUDA_SUCCESS || d.cuDeviceGetCount(&n) != CUDA_SUCCESS || n < 2) return "";
  std::vector<std::string> apart;
  for (int a = 0; a < n; ++a)
    for (int b = 0; b < n; ++b) {
      CUdevice from = 0, to = 0;
      int reaches = 0;
      if (a == b || d.cuDeviceGet(&from, a) != CUDA_SUCCESS || d.cuDeviceGet(&to, b) != CUDA_SUCCESS) continue;
      if (d.cuDeviceCanAccessPeer(&reaches, from, to) != CUDA_SUCCESS || reaches == 0)
        apart.push_back(fmt::format("{} does not reach {}", a, b));
    }
  if (apart.empty()) return fmt::format("all {} reach one another", n);
  return fmt::format("{}: sync.transport collective there", fmt::join(apart, ", "));
}

std::string infiniband_text(const std::filesystem::path& root) {
  std::vector<std::string> ports;
  for (const auto& device : entries(root))
    for (const auto& port : entries(device / "ports"))
      ports.push_back(fmt::format("{} port {}: {}, {}", device.filename().string(), port.filename().string(),
                                  first_line(port / "state"), first_line(port / "rate")));
  return ports.empty() ? "none" : fmt::format("{}", fmt::join(ports, "; "));
}

}  // namespace hotbunk::cuda
