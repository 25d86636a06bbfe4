// The entry points of the double, as C calls them: handles become objects, faults are injected, errors stick.
#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <cstring>

#include "backends/cuda/fake/fake_driver.h"
#include "base/check.h"

namespace hotbunk::cuda {
namespace {

std::atomic<FakeDriver*> alive{nullptr};

template <class Handle>
Handle handle_of(std::int64_t id) {
  return reinterpret_cast<Handle>(id);
}
template <class Handle>
std::int64_t id_of(Handle handle) {
  return reinterpret_cast<std::int64_t>(handle);
}

}  // namespace

struct FakeDriver::Entries {
  static std::uint64_t address(const void* p) { return reinterpret_cast<std::uint64_t>(p); }
  /// Runs the body of one entry point under the lock, unless a fault or an earlier finding says otherwise.
  template <class Body>
  static CUresult call(const char* name, Body&& body) {
    FakeDriver* d = alive.load();
    if (d == nullptr) return CUDA_ERROR_DEINITIALIZED;
    std::unique_lock lock(d->mutex_);
    if (const CUresult r = d->met(name, lock); r != CUDA_SUCCESS) return r;
    return body(*d);
  }

  static CUresult init(unsigned) {
    return call("cuInit", [](auto&) { return CUDA_SUCCESS; });
  }
  static CUresult driver_version(int* v) {
    *v = CUDA_VERSION;
    return CUDA_SUCCESS;
  }
  static CUresult error_name(CUresult e, const char** out) {
    *out = e == CUDA_SUCCESS                 ? "CUDA_SUCCESS"
           : e == CUDA_ERROR_INVALID_VALUE   ? "CUDA_ERROR_INVALID_VALUE"
           : e == CUDA_ERROR_OUT_OF_MEMORY   ? "CUDA_ERROR_OUT_OF_MEMORY"
           : e == CUDA_ERROR_INVALID_HANDLE  ? "CUDA_ERROR_INVALID_HANDLE"
           : e == CUDA_ERROR_NOT_FOUND       ? "CUDA_ERROR_NOT_FOUND"
           : e == CUDA_ERROR_LAUNCH_FAILED   ? "CUDA_ERROR_LAUNCH_FAILED"
           : e == CUDA_ERROR_INVALID_PTX     ? "CUDA_ERROR_INVALID_PTX"
           : e == CUDA_ERROR_ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS"
                                             : "CUDA_ERROR_UNKNOWN";
    return CUDA_SUCCESS;
  }
  static CUresult error_string(CUresult e, const char** out) { return error_name(e, out); }

  static CUresult device_count(int* n) {
    *n = 1;
    return CUDA_SUCCESS;
  }
  static CUresult device_get(CUdevice* d, int ordinal) {
    *d = 0;
    return ordinal == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
  }
  static CUresult device_name(char* out, int n, CUdevice) {
    std::snprintf(out, static_cast<std::size_t>(n), "hotbunk driver double");
    return CUDA_SUCCESS;
  }
  /// Each process has a device of its own.
  static CUresult device_uuid(CUuuid* out, CUdevice) {
    const auto process = static_cast<std::int64_t>(::getpid());
    std::memset(out->bytes, 0, sizeof out->bytes);
    std::memcpy(out->bytes, &process, sizeof process);
    return CUDA_SUCCESS;
  }
  static CUresult device_attribute(int* out, CUdevice_attribute which, CUdevice) {
    switch (which) {
      case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
        return call("cuDeviceGetAttribute", [&](auto& d) {
          const int both = d.options_.compute_capability;
          *out = which == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? both / 10 : both % 10;
          return CUDA_SUCCESS;
        });
      case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
      case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
      case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        *out = 1;
        return CUDA_SUCCESS;
      case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED:
        return call("cuDeviceGetAttribute", [&](auto& d) {
          *out = d.options_.rdma ? 1 : 0;
          return CUDA_SUCCESS;
        });
      default:
        return CUDA_ERROR_INVALID_VALUE;  // what nobody asked for yet is not made up
    }
  }
  /// There is one device.
  static CUresult can_access_peer(int*, CUdevice, CUdevice) { return CUDA_ERROR_INVALID_DEVICE; }
  static CUresult total_memory(std::size_t* bytes, CUdevice) {
    return call("cuDeviceTotalMem", [&](auto& d) {
      *bytes = static_cast<std::size_t>(d.options_.memory_bytes);
      return CUDA_SUCCESS;
    });
  }
  static CUresult retain(CUcontext* c, CUdevice) {
    return call("cuDevicePrimaryCtxRetain", [&](auto&) {
      *c = handle_of<CUcontext>(1);
      return CUDA_SUCCESS;
    });
  }
  static CUresult release_context(CUdevice) { return CUDA_SUCCESS; }
  static CUresult set_current(CUcontext) { return CUDA_SUCCESS; }
  static CUresult synchronize_all() {
    return call("cuCtxSynchronize", [](auto& d) {
      for (const auto& [id, s] : d.streams_)
        if (const CUresult r = d.synchronize(id); r != CUDA_SUCCESS) return r;
      return d.sticky_;
    });
  }

  static CUresult memory_info(std::size_t* free, std::size_t* total) {
    return call("cuMemGetInfo", [&](auto& d) {
      *total = static_cast<std::size_t>(d.options_.memory_bytes);
      *free = *total - static_cast<std::size_t>(d.own_bytes());
      return CUDA_SUCCESS;
    });
  }
  static CUresult granularity(std::size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
    return call("cuMemGetAllocationGranularity", [&](auto& d) {
      *bytes = static_cast<std::size_t>(d.options_.granularity_bytes);
      return CUDA_SUCCESS;
    });
  }
  static CUresult reserve(CUdeviceptr* out, std::size_t bytes, std::size_t, CUdeviceptr, unsigned long long) {
    return call("cuMemAddressReserve", [&](auto& d) { return d.reserve(out, bytes); });
  }
  static CUresult free_address(CUdeviceptr at, std::size_t bytes) {
    return call("cuMemAddressFree", [&](auto& d) { return d.free_address(at, bytes); });
  }
  static CUresult create(CUmemGenericAllocationHandle* out, std::size_t bytes, const CUmemAllocationProp* p,
                         unsigned long long) {
    const bool shareable = p != nullptr && p->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    const bool rdma = p != nullptr && p->allocFlags.gpuDirectRDMACapable != 0;
    return call("cuMemCreate", [&](auto& d) { return d.create(out, bytes, shareable, rdma); });
  }
  static CUresult retain_handle(CUmemGenericAllocationHandle* out, void* at) {
    return call("cuMemRetainAllocationHandle", [&](auto& d) { return d.retain_handle(out, address(at)); });
  }
  static CUresult export_handle(void* out, CUmemGenericAllocationHandle h, CUmemAllocationHandleType,
                                unsigned long long) {
    return call("cuMemExportToShareableHandle", [&](auto& d) { return d.export_handle(static_cast<int*>(out), h); });
  }
  static CUresult import_handle(CUmemGenericAllocationHandle* out, void* file, CUmemAllocationHandleType) {
    return call("cuMemImportFromShareableHandle",
                [&](auto& d) { return d.import_handle(out, static_cast<int>(reinterpret_cast<std::intptr_t>(file))); });
  }
  static CUresult release(CUmemGenericAllocationHandle h) {
    return call("cuMemRelease", [&](auto& d) { return d.release(h); });
  }
  static CUresult map(CUdeviceptr at, std::size_t bytes, std::size_t offset, CUmemGenericAllocationHandle h,
                      unsigned long long) {
    return call("cuMemMap", [&](auto& d) { return d.map(at, bytes, offset, h); });
  }
  static CUresult unmap(CUdeviceptr at, std::size_t bytes) {
    return call("cuMemUnmap", [&](auto& d) { return d.unmap(at, bytes); });
  }
  static CUresult set_access(CUdeviceptr at, std::size_t bytes, const CUmemAccessDesc*, std::size_t) {
    return call("cuMemSetAccess", [&](auto& d) { return d.set_access(at, bytes); });
  }
  static CUresult host_alloc(void** out, std::size_t bytes, unsigned) {
    return call("cuMemHostAlloc", [&](auto& d) { return d.host_alloc(out, bytes); });
  }
  static CUresult host_free(void* p) {
    return call("cuMemFreeHost", [&](auto& d) { return d.host_free(p); });
  }

  static CUresult host_register(void* p, std::size_t bytes, unsigned) {
    return call("cuMemHostRegister", [&](auto& d) { return d.host_register(p, bytes); });
  }
  static CUresult host_unregister(void* p) {
    return call("cuMemHostUnregister", [&](auto& d) { return d.host_unregister(p); });
  }

  /// A copy or fill, checked when it runs: what was mapped when it was enqueued may be gone by then.
  static std::vector<Touch> copy(FakeDriver& d, CUdeviceptr to, CUdeviceptr from, std::size_t bytes, bool to_device,
                                 bool from_device) {
    for (const auto& [device, at] : {std::pair{to_device, to}, std::pair{from_device, from}}) {
      if (!device && !d.is_pinned(reinterpret_cast<const void*>(at), bytes))
        throw RuntimeFailure(fmt::format("{:#x} of the host is no longer pinned when the copy runs", at));
      if (!device) continue;
      if (const std::string why = d.why_no_device_memory(at, bytes); !why.empty()) throw RuntimeFailure(why);
    }
    std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
    if (to_device) d.mark_written(to, bytes);
    return {{from, from + bytes, false}, {to, to + bytes, true}};
  }
  static CUresult host_to_device(CUdeviceptr to, const void* from, std::size_t bytes, CUstream s) {
    return call("cuMemcpyHtoDAsync", [&](auto& d) {
      if (!d.is_pinned(from, bytes))
        return d.found("cuMemcpyHtoDAsync: the source is not pinned: the copy would not be asynchronous");
      return d.enqueue(s, "copy to the device",
                       [&d, to, from, bytes] { return copy(d, to, address(from), bytes, true, false); });
    });
  }
  static CUresult device_to_host(void* to, CUdeviceptr from, std::size_t bytes, CUstream s) {
    return call("cuMemcpyDtoHAsync", [&](auto& d) {
      if (!d.is_pinned(to, bytes))
        return d.found("cuMemcpyDtoHAsync: the target is not pinned: the copy would not be asynchronous");
      return d.enqueue(s, "copy to the host",
                       [&d, to, from, bytes] { return copy(d, address(to), from, bytes, false, true); });
    });
  }
  static CUresult device_to_device(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream s) {
    return call("cuMemcpyDtoDAsync", [&](auto& d) {
      return d.enqueue(s, "copy on the device", [&d, to, from, bytes] { return copy(d, to, from, bytes, true, true); });
    });
  }
  static CUresult fill(CUdeviceptr to, unsigned char value, std::size_t bytes, CUstream s) {
    return call("cuMemsetD8Async", [&](auto& d) {
      return d.enqueue(s, "fill", [&d, to, value, bytes]() -> std::vector<Touch> {
        if (const std::string why = d.why_no_device_memory(to, bytes); !why.empty()) throw RuntimeFailure(why);
        std::memset(reinterpret_cast<void*>(to), value, bytes);
        d.mark_written(to, bytes);
        return {{to, to + bytes, true}};
      });
    });
  }

  static CUresult stream_create(CUstream* out, unsigned) {
    return call("cuStreamCreate", [&](auto& d) {
      const std::int64_t id = d.next_handle_++;
      Stream& s = d.streams_[id];
      s.number = d.num_streams_++;
      s.clock = d.host();
      *out = handle_of<CUstream>(id);
      return CUDA_SUCCESS;
    });
  }
  static CUresult stream_destroy(CUstream s) {
    return call("cuStreamDestroy", [&](auto& d) {
      if (d.stream(s) == nullptr) return d.found("cuStreamDestroy: no such stream");
      const CUresult r = d.synchronize(id_of(s));
      d.streams_.erase(id_of(s));
      return r;
    });
  }
  static CUresult stream_synchronize(CUstream s) {
    return call("cuStreamSynchronize", [&](auto& d) {
      return d.stream(s) == nullptr ? d.found("cuStreamSynchronize: no such stream") : d.synchronize(id_of(s));
    });
  }
  static CUresult stream_query(CUstream s) {
    return call("cuStreamQuery", [&](auto& d) {
      return d.stream(s) == nullptr ? d.found("cuStreamQuery: no such stream") : d.query(id_of(s));
    });
  }
  static CUresult stream_wait(CUstream s, CUevent e, unsigned) {
    return call("cuStreamWaitEvent", [&](auto& d) { return d.wait(s, e); });
  }
  static CUresult event_create(CUevent* out, unsigned) {
    return call("cuEventCreate", [&](auto& d) {
      const std::int64_t id = d.next_handle_++;
      d.events_[id];
      *out = handle_of<CUevent>(id);
      return CUDA_SUCCESS;
    });
  }
  static CUresult event_destroy(CUevent e) {
    return call("cuEventDestroy", [&](auto& d) {
      return d.events_.erase(id_of(e)) == 1 ? CUDA_SUCCESS : d.found("cuEventDestroy: no such event");
    });
  }
  static CUresult event_record(CUevent e, CUstream s) {
    return call("cuEventRecord", [&](auto& d) { return d.record(e, s); });
  }
  static CUresult event_synchronize(CUevent e) {
    return call("cuEventSynchronize", [&](auto& d) {
      return d.events_.contains(id_of(e)) ? d.synchronize_event(id_of(e))
                                          : d.found("cuEventSynchronize: no such event");
    });
  }

  static CUresult event_query(CUevent e) {
    return call("cuEventQuery", [&](auto& d) {
      const auto it = d.events_.find(id_of(e));
      if (it == d.events_.end()) return d.found("cuEventQuery: no such event");
      if (it->second.done < it->second.issued) return CUDA_ERROR_NOT_READY;
      merge(d.host(), it->second.clock);
      return CUDA_SUCCESS;
    });
  }
  static CUresult event_elapsed(float* milliseconds, CUevent from, CUevent to) {
    return call("cuEventElapsedTime", [&](auto& d) {
      const auto a = d.events_.find(id_of(from)), b = d.events_.find(id_of(to));
      if (a == d.events_.end() || b == d.events_.end()) return d.found("cuEventElapsedTime: no such event");
      if (a->second.issued == 0 || b->second.issued == 0) return CUDA_ERROR_INVALID_HANDLE;
      if (a->second.done < a->second.issued || b->second.done < b->second.issued) return CUDA_ERROR_NOT_READY;
      *milliseconds = static_cast<float>(static_cast<double>(b->second.done_ns - a->second.done_ns) * 1e-6);
      return CUDA_SUCCESS;
    });
  }

  static HostKnowledge host_knows() {
    FakeDriver* d = alive.load();
    if (d == nullptr) return {};
    const std::lock_guard lock(d->mutex_);
    return std::make_shared<Clock>(d->host());
  }
  static void host_learns(const HostKnowledge& known) {
    FakeDriver* d = alive.load();
    if (d == nullptr || known == nullptr) return;
    const std::lock_guard lock(d->mutex_);
    merge(d->host(), *static_cast<const Clock*>(known.get()));
  }

  static void host_touches(const std::string& op, const void* at, std::size_t bytes, bool write) {
    FakeDriver* d = alive.load();
    if (d == nullptr) return;
    const std::lock_guard lock(d->mutex_);
    if (d->sticky_ == CUDA_SUCCESS) d->host_touches(op, address(at), address(at) + bytes, write);
  }

  static CUresult library_load(CUlibrary* out, const void* code, CUjit_option*, void**, unsigned, CUlibraryOption*,
                               void**, unsigned) {
    return call("cuLibraryLoadData", [&](auto& d) {
      const std::int64_t id = d.next_handle_++;
      d.libraries_[id] = {static_cast<const char*>(code)};
      *out = handle_of<CUlibrary>(id);
      return CUDA_SUCCESS;
    });
  }
  static CUresult library_unload(CUlibrary l) {
    return call("cuLibraryUnload", [&](auto& d) {
      return d.libraries_.erase(id_of(l)) == 1 ? CUDA_SUCCESS : d.found("cuLibraryUnload: no such library");
    });
  }
  static CUresult get_kernel(CUkernel* out, CUlibrary l, const char* name) {
    return call("cuLibraryGetKernel", [&](auto& d) {
      const auto it = d.libraries_.find(id_of(l));
      if (it == d.libraries_.end()) return d.found("cuLibraryGetKernel: no such library");
      Library& library = it->second;
      if (!library.module) try {
          library.module = d.options_.modules->parsed(library.text);
          library.machine = std::make_unique<ptx::Machine>(*library.module, d.memory_);
        } catch (const ptx::UnknownPtx& e) {
          d.findings_.emplace_back(e.what());
          return CUDA_ERROR_INVALID_PTX;
        }
      if (!library.module->kernels.contains(name)) return CUDA_ERROR_NOT_FOUND;
      const std::int64_t id = d.next_handle_++;
      d.kernels_[id] = {id_of(l), name};
      *out = handle_of<CUkernel>(id);
      return CUDA_SUCCESS;
    });
  }
  static CUresult launch(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                         unsigned shared, CUstream s, void** parameters, void**) {
    return call("cuLaunchKernel", [&](auto& d) {
      const auto it = d.kernels_.find(id_of(f));
      if (it == d.kernels_.end()) return d.found("cuLaunchKernel: no such kernel");
      const KernelHandle kernel = it->second;
      const auto library = d.libraries_.find(kernel.library);
      if (library == d.libraries_.end())
        return d.found(fmt::format("cuLaunchKernel: the library of '{}' was unloaded", kernel.name));
      const ptx::Kernel& k = library->second.module->kernels.find(kernel.name)->second;
      std::vector<std::byte> bytes(static_cast<std::size_t>(k.parameter_bytes));  // copied now, as a driver does
      for (std::size_t p = 0; p < k.parameters.size(); ++p)
        std::memcpy(bytes.data() + k.parameters[p].offset, parameters[p],
                    static_cast<std::size_t>(k.parameters[p].bytes));
      const ptx::Dim3 grid{gx, gy, gz}, block{bx, by, bz};
      return d.enqueue(s, kernel.name, [&d, kernel, grid, block, shared, bytes = std::move(bytes)] {
        return d.launched(kernel, {grid, block, shared, bytes, d.options_.count_traffic});
      });
    });
  }

  static CUresult capture_begin(CUstream s, CUstreamCaptureMode) {
    return call("cuStreamBeginCapture", [&](auto& d) { return d.begin_capture(s); });
  }
  static CUresult capture_end(CUstream s, CUgraph* out) {
    return call("cuStreamEndCapture", [&](auto& d) { return d.end_capture(s, out); });
  }
  static CUresult graph_instantiate(CUgraphExec* out, CUgraph g, unsigned long long) {
    return call("cuGraphInstantiate", [&](auto& d) { return d.instantiate(out, g); });
  }
  static CUresult graph_launch(CUgraphExec g, CUstream s) {
    return call("cuGraphLaunch", [&](auto& d) { return d.launch_graph(g, s); });
  }
  static CUresult graph_destroy(CUgraph g) {
    return call("cuGraphDestroy", [&](auto& d) {
      return d.graphs_.erase(id_of(g)) == 1 ? CUDA_SUCCESS : d.found("cuGraphDestroy: no such graph");
    });
  }
  static CUresult graph_exec_destroy(CUgraphExec g) {
    return call("cuGraphExecDestroy", [&](auto& d) {
      return d.instances_.erase(id_of(g)) == 1 ? CUDA_SUCCESS : d.found("cuGraphExecDestroy: no such graph");
    });
  }
};

FakeDriver::FakeDriver(FakeOptions options) : options_(std::move(options)) {
  FakeDriver* none = nullptr;
  HB_CHECK(alive.compare_exchange_strong(none, this), "a driver double is alive already");
  memory_.watch();
}

FakeDriver::~FakeDriver() {
  {
    std::unique_lock lock(mutex_);
    going_ = true;
    gone_.notify_all();
    gone_.wait(lock, [&] { return hanging_ == 0; });
  }
  touched_.clear();  // nobody is asked any more
  while (!mappings_.empty()) unmap(mappings_.begin()->first, static_cast<std::size_t>(mappings_.begin()->second.bytes));
  while (!reserved_.empty())
    free_address(reserved_.begin()->first, static_cast<std::size_t>(reserved_.begin()->second));
  while (!pinned_.empty()) {
    auto* const at = reinterpret_cast<void*>(pinned_.begin()->first);
    if (pinned_.begin()->second.owned) host_free(at);
    else host_unregister(at);
  }
  for (auto& [handle, p] : physical_) p.released = true;
  while (!physical_.empty()) destroy_if_unused(physical_.begin()->first);
  alive.store(nullptr);
}

Driver FakeDriver::table() const {
  using E = Entries;
  Driver t;
  t.cuInit = E::init, t.cuDriverGetVersion = E::driver_version, t.cuGetErrorName = E::error_name;
  t.cuGetErrorString = E::error_string, t.cuDeviceGetCount = E::device_count, t.cuDeviceGet = E::device_get;
  t.cuDeviceGetName = E::device_name, t.cuDeviceGetAttribute = E::device_attribute;
  t.cuDeviceCanAccessPeer = E::can_access_peer, t.cuDeviceTotalMem = E::total_memory,
  t.cuDevicePrimaryCtxRetain = E::retain;
  t.cuDevicePrimaryCtxRelease = E::release_context, t.cuCtxSetCurrent = E::set_current;
  t.cuCtxSynchronize = E::synchronize_all, t.cuMemGetInfo = E::memory_info;
  t.cuMemGetAllocationGranularity = E::granularity, t.cuMemAddressReserve = E::reserve;
  t.cuMemAddressFree = E::free_address, t.cuMemCreate = E::create, t.cuMemRelease = E::release;
  t.cuMemRetainAllocationHandle = E::retain_handle, t.cuMemExportToShareableHandle = E::export_handle;
  t.cuMemImportFromShareableHandle = E::import_handle;
  t.cuMemMap = E::map, t.cuMemUnmap = E::unmap, t.cuMemSetAccess = E::set_access;
  t.cuMemHostAlloc = E::host_alloc, t.cuMemFreeHost = E::host_free, t.cuMemcpyHtoDAsync = E::host_to_device;
  t.cuMemcpyDtoHAsync = E::device_to_host, t.cuMemcpyDtoDAsync = E::device_to_device;
  t.cuMemsetD8Async = E::fill, t.cuStreamCreate = E::stream_create, t.cuStreamDestroy = E::stream_destroy;
  t.cuStreamSynchronize = E::stream_synchronize, t.cuStreamWaitEvent = E::stream_wait;
  t.cuStreamQuery = E::stream_query, t.cuDeviceGetUuid = E::device_uuid;
  t.cuEventCreate = E::event_create, t.cuEventDestroy = E::event_destroy, t.cuEventRecord = E::event_record;
  t.cuEventSynchronize = E::event_synchronize, t.cuLibraryLoadData = E::library_load;
  t.cuLibraryUnload = E::library_unload, t.cuLibraryGetKernel = E::get_kernel, t.cuLaunchKernel = E::launch;
  t.cuEventQuery = E::event_query;
  t.cuEventElapsedTime = E::event_elapsed;
  t.cuMemHostRegister = E::host_register;
  t.cuMemHostUnregister = E::host_unregister;
  t.cuStreamBeginCapture = E::capture_begin, t.cuStreamEndCapture = E::capture_end;
  t.cuGraphInstantiate = E::graph_instantiate, t.cuGraphLaunch = E::graph_launch;
  t.cuGraphDestroy = E::graph_destroy, t.cuGraphExecDestroy = E::graph_exec_destroy;
  t.host_knows = E::host_knows, t.host_learns = E::host_learns, t.host_touches = E::host_touches;
#define HB_CUDA_IS_THERE(name) HB_CHECK(t.name != nullptr, "the double has no " #name);
  HB_CUDA_ENTRIES(HB_CUDA_IS_THERE)
#undef HB_CUDA_IS_THERE
  return t;
}

}  // namespace hotbunk::cuda
