#include "backends/cuda/launch_time.h"

#include <chrono>

#include "backends/cuda/launch.h"

namespace hotbunk::cuda {

double launch_seconds(const Context& context) {
  constexpr int warm_ups = 50, launches = 500;
  constexpr std::int64_t elements = 256;
  const OwnedStream stream(context);
  const Launcher launch(context, stream.handle());
  const DeviceBlock block(context, 2 * elements * static_cast<std::int64_t>(sizeof(float)));
  const CUdeviceptr from = block.address(), to = from + elements * sizeof(float);
  launch.fill(from, 0, elements * static_cast<std::int64_t>(sizeof(float)));
  const auto cast = [&] { launch("cast_f32_bf16", {1}, 256, from, to, elements); };
  for (int i = 0; i < warm_ups; ++i) cast();
  HB_CUDA(context.driver(), cuStreamSynchronize(stream.handle()));
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < launches; ++i) cast();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  HB_CUDA(context.driver(), cuStreamSynchronize(stream.handle()));
  return took.count() / launches;
}

}  // namespace hotbunk::cuda
