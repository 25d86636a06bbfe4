#include "backends/cuda/launch.h"

#include <fmt/format.h>

#include "base/check.h"

namespace hotbunk::cuda {

std::string kernel_dtype(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "f32";
    case DType::bf16:
      return "bf16";
    case DType::i32:
      return "i32";
    default:
      HB_CHECK(false, "no kernel is written for {}", name_of(dtype));
  }
  return {};
}

void Launcher::enqueue(const std::string& kernel, Grid grid, int threads, void** parameters) const {
  constexpr std::int64_t most_y = 65535;  // CUDA C++ Programming Guide, technical specifications
  HB_CHECK(grid.x < (std::int64_t{1} << 31) && grid.y <= most_y, "{}: a grid of {} x {}", kernel, grid.x, grid.y);
  const auto function = reinterpret_cast<CUfunction>(context_.kernel(kernel));
  const auto r = driver().cuLaunchKernel(function, static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y), 1,
                                         static_cast<unsigned>(threads), 1, 1, 0, stream_, parameters, nullptr);
  if (r != CUDA_SUCCESS)
    check(driver(), r,
          fmt::format("cuLaunchKernel({}, {} x {} blocks of {})", kernel, grid.x, grid.y, threads).c_str());
}

void Launcher::copy(CUdeviceptr to, CUdeviceptr from, std::int64_t bytes) const {
  if (bytes > 0 && to != from) HB_CUDA(driver(), cuMemcpyDtoDAsync(to, from, static_cast<std::size_t>(bytes), stream_));
}

void Launcher::fill(CUdeviceptr to, unsigned char value, std::int64_t bytes) const {
  if (bytes > 0) HB_CUDA(driver(), cuMemsetD8Async(to, value, static_cast<std::size_t>(bytes), stream_));
}

}  // namespace hotbunk::cuda
