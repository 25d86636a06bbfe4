// A device of this process and its kernels: what every rank on it shares.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "backends/cuda/driver.h"

namespace hotbunk::cuda {

/// The files of kernels/ that a context loads, each once.
std::vector<std::string> kernel_file_names();

/// Throws RuntimeFailure "EXPRESSION: CUDA_ERROR_… (…)" unless the call went well.
void check(const Driver&, CUresult, const char* expression);
#define HB_CUDA(driver, call) ::hotbunk::cuda::check(driver, (driver).call, #call)

/// The primary context of one device with all kernels of kernels/ loaded. Thread-safe.
class Context {
 public:
  /// RuntimeFailure when the device or its memory management is not what the backend needs.
  explicit Context(Driver, int ordinal = 0);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  const Driver& driver() const { return driver_; }
  CUdevice device() const { return device_; }
  std::string device_name() const;
  /// For the calling thread; each thread that calls the driver does so once.
  void make_current() const;
  /// Smallest piece of physical memory, bytes.
  std::int64_t granularity_bytes() const { return granularity_bytes_; }
  int multiprocessors() const { return multiprocessors_; }
  /// 90 of sm_90.
  int compute_capability() const { return compute_capability_; }
  /// Whether other processes can be given its memory.
  bool exports_memory() const { return exports_memory_; }
  /// Whether network adapters can read and write its memory where it lies, if it was made for that.
  bool reaches_network() const { return reaches_network_; }
  /// InternalError where no kernel has this name.
  CUkernel kernel(std::string_view name) const;

 private:
  void load_kernels();

  Driver driver_;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  std::int64_t granularity_bytes_ = 0;
  bool exports_memory_ = false, reaches_network_ = false;
  int multiprocessors_ = 0, compute_capability_ = 0;
  std::map<std::string, CUlibrary> libraries_;  // by file
  mutable std::mutex mutex_;
  mutable std::map<std::string, CUkernel, std::less<>> kernels_;
};

/// A stream of the driver. Not copyable.
class OwnedStream {
 public:
  explicit OwnedStream(const Context&);
  /// What was enqueued has been waited for.
  ~OwnedStream();
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;

  CUstream handle() const { return handle_; }

 private:
  const Context& context_;
  CUstream handle_ = nullptr;
};

/// Physical memory at addresses of its own, outside of any plan: scratch and tables. Not copyable.
class DeviceBlock {
 public:
  /// RuntimeFailure when the device has no such memory left. 0 bytes: no memory, address 0.
  /// `shareable`: as of map_memory.
  DeviceBlock(const Context&, std::int64_t bytes, bool shareable = false);
  /// All that uses it has been waited for.
  ~DeviceBlock();
  DeviceBlock(const DeviceBlock&) = delete;
  DeviceBlock& operator=(const DeviceBlock&) = delete;

  CUdeviceptr address() const { return address_; }
  std::int64_t bytes() const { return bytes_; }

 private:
  const Context& context_;
  std::int64_t bytes_;
  CUdeviceptr address_ = 0;
};

/// Physical memory for [address, address + bytes) of a reserved range, in whole granules, readable and writable by the
/// device. RuntimeFailure when there is none; then nothing is mapped. `shareable`: other processes may be given it,
/// and network adapters may read and write it,
/// where the device exports memory.
void map_memory(const Context&, CUdeviceptr address, std::int64_t bytes, bool shareable = false);
/// The same of physical memory that is there; the handle is released at any rate, the memory lives while it is mapped.
void map_handle(const Context&, CUdeviceptr address, std::int64_t bytes, CUmemGenericAllocationHandle);
/// What one map_memory mapped.
void unmap_memory(const Context&, CUdeviceptr address, std::int64_t bytes);

}  // namespace hotbunk::cuda
