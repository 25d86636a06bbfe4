// A device of the driver's double to try a library's ops on: numbers in and out, in fp32 or bf16.
#pragma once
#include <bit>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "backends/cuda/fake/fake_driver.h"
#include "backends/cuda/launch.h"
#include "backends/cuda/staging.h"
#include "base/rng.h"
#include "tests/cuda_backend/processes.h"

namespace hotbunk::cuda::test {

/// Of 255 numbers within (-bound, bound), all of which bf16 has where bound is a power of two.
inline std::vector<float> bf16_numbers(std::int64_t n, std::uint64_t seed, float bound = 1.0f) {
  std::vector<float> v;
  for (std::int64_t i = 0; i < n; ++i)
    v.push_back(
        (static_cast<float>(random_words(seed, RngPurpose::test, 7, static_cast<std::uint64_t>(i))[0] % 255) - 127.0f) /
        128.0f * bound);
  return v;
}

/// A device of the driver's double, one stream, and memory to compute in.
struct DeviceBench {
  explicit DeviceBench(FakeOptions options = {.modules = parsed_kernels()}) : fake(std::move(options)) {}

  FakeDriver fake;
  Context context{fake.table()};
  OwnedStream stream{context};
  Launcher launch{context, stream.handle()};
  Staging staging{context, stream.handle()};
  DeviceBlock memory{context, std::int64_t{1} << 21};

  void write(CUdeviceptr to, const std::vector<float>& v, DType dtype) {
    std::byte* here = staging.take(static_cast<std::int64_t>(4 * v.size()));
    for (std::size_t i = 0; i < v.size(); ++i) {
      if (dtype == DType::f32) std::memcpy(here + 4 * i, &v[i], 4);
      else {
        const auto half = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(v[i]) >> 16);
        std::memcpy(here + 2 * i, &half, 2);
      }
    }
    HB_CUDA(context.driver(),
            cuMemcpyHtoDAsync(to, here, v.size() * static_cast<std::size_t>(size_of(dtype)), stream.handle()));
    staging.in_use();
  }
  std::vector<float> read(CUdeviceptr from, std::size_t n, DType dtype) {
    std::byte* here = staging.take(static_cast<std::int64_t>(4 * n));
    HB_CUDA(context.driver(),
            cuMemcpyDtoHAsync(here, from, n * static_cast<std::size_t>(size_of(dtype)), stream.handle()));
    HB_CUDA(context.driver(), cuStreamSynchronize(stream.handle()));
    std::vector<float> out(n);
    for (std::size_t i = 0; i < n; ++i) {
      if (dtype == DType::f32) std::memcpy(&out[i], here + 4 * i, 4);
      else {
        std::uint16_t half;
        std::memcpy(&half, here + 2 * i, 2);
        out[i] = std::bit_cast<float>(static_cast<std::uint32_t>(half) << 16);
      }
    }
    return out;
  }
};

}  // namespace hotbunk::cuda::test
