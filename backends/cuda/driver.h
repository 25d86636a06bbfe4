// The CUDA driver as one table of entry points, opened at run time: a machine without a driver starts all the same. The
// double of fake/ fills the same table.
#pragma once
#include <cuda.h>

#include <memory>
#include <string>

#include "base/diagnostic.h"

namespace hotbunk::cuda {

// clang-format off
#define HB_CUDA_ENTRIES(X)                                                                                           \
  X(cuInit) X(cuDriverGetVersion) X(cuGetErrorName) X(cuGetErrorString)                                              \
  X(cuDeviceGetCount) X(cuDeviceGet) X(cuDeviceGetName) X(cuDeviceGetUuid) X(cuDeviceGetAttribute) X(cuDeviceTotalMem) \
  X(cuDeviceCanAccessPeer)                                                                                            \
  X(cuDevicePrimaryCtxRetain) X(cuDevicePrimaryCtxRelease) X(cuCtxSetCurrent) X(cuCtxSynchronize)                    \
  X(cuMemGetInfo) X(cuMemGetAllocationGranularity) X(cuMemAddressReserve) X(cuMemAddressFree)                        \
  X(cuMemCreate) X(cuMemRelease) X(cuMemRetainAllocationHandle) X(cuMemExportToShareableHandle)                      \
  X(cuMemImportFromShareableHandle) X(cuMemMap) X(cuMemUnmap) X(cuMemSetAccess) X(cuMemHostAlloc) X(cuMemFreeHost)      \
  X(cuMemHostRegister) X(cuMemHostUnregister)                                                                        \
  X(cuMemcpyHtoDAsync) X(cuMemcpyDtoHAsync) X(cuMemcpyDtoDAsync) X(cuMemsetD8Async)                                  \
  X(cuStreamCreate) X(cuStreamDestroy) X(cuStreamSynchronize) X(cuStreamQuery) X(cuStreamWaitEvent)                               \
  X(cuEventCreate) X(cuEventDestroy) X(cuEventRecord) X(cuEventSynchronize) X(cuEventQuery) X(cuEventElapsedTime)    \
  X(cuLibraryLoadData) X(cuLibraryUnload) X(cuLibraryGetKernel) X(cuLaunchKernel)                                    \
  X(cuStreamBeginCapture) X(cuStreamEndCapture)                                                                      \
  X(cuGraphInstantiate) X(cuGraphLaunch) X(cuGraphDestroy) X(cuGraphExecDestroy)
// clang-format on

/// What a host thread has seen to be done on the device.
using HostKnowledge = std::shared_ptr<const void>;

struct Driver {
#define HB_CUDA_POINTER(name) decltype(&::name) name = nullptr;  // NOLINT(bugprone-macro-parentheses): declares it
  HB_CUDA_ENTRIES(HB_CUDA_POINTER)
#undef HB_CUDA_POINTER
  /// What the calling thread has waited for; another thread that goes on from there learns it. The double checks order
  /// by what each thread knows. A driver's table has neither: the pointers are null.
  HostKnowledge (*host_knows)() = nullptr;
  void (*host_learns)(const HostKnowledge&) = nullptr;
  /// The calling thread is about to read or write so many bytes of the host's memory itself, for `op`. The double holds
  /// it to the order that it holds the device to. Null in a driver's table, too.
  void (*host_touches)(const std::string& op, const void* at, std::size_t bytes, bool write) = nullptr;
};

/// The driver of this machine. E640 with the reason when the library or one of its entry points is not there.
Result<Driver> open_driver(const std::string& library = "libcuda.so.1");

}  // namespace hotbunk::cuda
