// One stream of a CudaDevice: the driver's, the host thread that enqueues there, and what it works with. Internal to
// cuda_device*.cc.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backends/cpu_gloo/op_kernels.h"
#include "backends/cuda/cuda_device.h"
#include "backends/cuda/op_graphs.h"

namespace hotbunk::cuda {

inline CUdeviceptr address_of(const std::byte* p) { return reinterpret_cast<CUdeviceptr>(p); }

/// An op between two events of the device.
struct CudaDevice::Timed {
  BoundOp op;
  DeviceRecord::Where where;
  Sizes sizes;
  std::int64_t bytes = -1;
  PooledEvent start, end;
};

struct CudaDevice::Stream {
  /// Which libraries its ops may be taken by.
  struct Libraries {
    bool products = false, attention = false;
  };
  /// `host_threads`: that compute what its ops have on the host.
  Stream(CudaWorld& in, std::string named, std::int64_t scratch_bytes, const CudaOptions& options, Libraries uses,
         int host_threads)
      : name(std::move(named)),
        world(in),
        owner(in.context()),
        launch(in.context(), owner.handle()),
        staging(in.context(), owner.handle()),
        scratch(in.context(), scratch_bytes),
        graphs(launch),
        on_host(host_threads) {
    if (uses.attention) attention.emplace(*options.dnn, launch, options.attention_workspace_bytes);
    if (uses.products)
      products.emplace(
          *options.blas, options.products, launch,
          [this](CUdeviceptr from, std::int64_t bytes) {
            return read(reinterpret_cast<const std::byte*>(from), bytes);
          },
          options.compared);
    queue = std::make_unique<StreamThread>(name);
    queue->enqueue([this] { world.context().make_current(); });
  }
  ~Stream() {
    queue.reset();
    learn();
    launch.driver().cuStreamSynchronize(owner.handle());  // an error has been said by now
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  CudaCall call(const OpCall& op, const OpTables& tables) {
    return {op, launch, tables, scratch.address(), products ? &*products : nullptr, attention ? &*attention : nullptr};
  }
  void synchronize() const { world.synchronize(launch.stream()); }
  /// Reads behind what the stream has done, for which the host waits.
  const std::byte* read(const std::byte* from, std::int64_t bytes) {
    std::byte* here = staging.take(bytes);
    HB_CUDA(launch.driver(),
            cuMemcpyDtoHAsync(here, address_of(from), static_cast<std::size_t>(bytes), launch.stream()));
    synchronize();
    return here;
  }

  /// The stream's thread reads or writes the host's memory itself, having waited for its stream. For the double's
  /// books, which a driver does not have.
  void touch(const BoundOp& op, const std::byte* at, std::int64_t bytes, bool write) {
    const Driver& d = launch.driver();
    if (d.host_touches == nullptr || bytes == 0) return;
    d.host_touches(op.name(), at, static_cast<std::size_t>(bytes), write);
    touched = d.host_knows();
  }
  /// The calling thread has waited for the stream's.
  void learn() const {
    if (touched != nullptr) launch.driver().host_learns(touched);
  }

  const std::string name;
  CudaWorld& world;
  OwnedStream owner;
  Launcher launch;
  Staging staging;
  DeviceBlock scratch;
  OpGraphs graphs;
  kernels::KernelContext on_host;
  HostKnowledge touched;  // what its thread knew when it last did
  std::optional<BlasProducts> products;
  std::optional<DnnAttention> attention;
  std::vector<Timed> timed;             // of the stream's thread; the calling thread's while nothing runs
  std::unique_ptr<StreamThread> queue;  // its thread finds no queue here while it is waited for at the end
};

}  // namespace hotbunk::cuda
