// Virtual addresses, physical memory and pinned host memory of the double.
#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>

#include "backends/cuda/fake/fake_driver.h"
#include "base/check.h"

namespace hotbunk::cuda {
namespace {

constexpr std::int64_t state_bytes = 4096;  // of SharedState, a page

void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

}  // namespace

struct FakeDriver::SharedState {
  std::atomic<bool> gone;                              // its owner has unmapped it
  std::array<std::atomic<std::int32_t>, 256> readers;  // processes that have it mapped; 0: none

  bool put(std::int32_t from, std::int32_t to) {
    for (auto& r : readers)
      if (std::int32_t expected = from; r.compare_exchange_strong(expected, to)) return true;
    return false;
  }
  /// One that lives; 0: none.
  std::int32_t reader() const {
    for (const auto& r : readers)
      if (const std::int32_t pid = r.load(); pid != 0 && ::kill(pid, 0) == 0) return pid;
    return 0;
  }
};

std::int64_t FakeDriver::own_bytes() const {
  std::int64_t bytes = 0;
  for (const auto& [handle, p] : physical_) bytes += p.imported ? 0 : p.bytes;
  return bytes;
}

std::int64_t FakeDriver::mapped_bytes() const {
  const std::lock_guard lock(mutex_);
  std::int64_t bytes = 0;
  for (const auto& [address, m] : mappings_) bytes += m.bytes;
  return bytes;
}

CUresult FakeDriver::reserve(CUdeviceptr* out, std::size_t bytes) {
  const auto granularity = static_cast<std::size_t>(options_.granularity_bytes);
  if (bytes == 0 || bytes % granularity != 0) return CUDA_ERROR_INVALID_VALUE;
  // One granule more, so that the range begins on a granule's boundary.
  void* at = ::mmap(nullptr, bytes + granularity, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  const auto raw = reinterpret_cast<CUdeviceptr>(at), begin = (raw + granularity - 1) / granularity * granularity;
  if (begin > raw) ::munmap(at, begin - raw);
  ::munmap(pointer(begin + bytes), raw + granularity - begin);
  reserved_[begin] = static_cast<std::int64_t>(bytes);
  *out = begin;
  return CUDA_SUCCESS;
}

CUresult FakeDriver::free_address(CUdeviceptr begin, std::size_t bytes) {
  const auto it = reserved_.find(begin);
  if (it == reserved_.end() || it->second != static_cast<std::int64_t>(bytes)) return CUDA_ERROR_INVALID_VALUE;
  for (const auto& [at, m] : mappings_)
    if (at >= begin && at < begin + bytes) return found(fmt::format("cuMemAddressFree: {:#x} is still mapped", at));
  ::munmap(pointer(begin), bytes);
  reserved_.erase(it);
  return CUDA_SUCCESS;
}

CUresult FakeDriver::create(CUmemGenericAllocationHandle* out, std::size_t bytes, bool shareable, bool rdma) {
  static_assert(sizeof(SharedState) <= state_bytes);
  if (rdma && !options_.rdma) return CUDA_ERROR_NOT_SUPPORTED;
  if (bytes == 0 || bytes % static_cast<std::size_t>(options_.granularity_bytes) != 0) return CUDA_ERROR_INVALID_VALUE;
  if (own_bytes() + static_cast<std::int64_t>(bytes) > options_.memory_bytes) return CUDA_ERROR_OUT_OF_MEMORY;
  const int file = ::memfd_create("hotbunk-fake-device", MFD_CLOEXEC);
  const std::int64_t all = static_cast<std::int64_t>(bytes) + (shareable ? state_bytes : 0);
  if (file < 0 || ::ftruncate(file, static_cast<off_t>(all)) != 0) {
    if (file >= 0) ::close(file);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *out = static_cast<CUmemGenericAllocationHandle>(next_handle_++);
  Physical p;
  p.file = file, p.bytes = static_cast<std::int64_t>(bytes), p.rdma = rdma;
  if (shareable) p.shared = shared_state(file, p.bytes);
  physical_[*out] = p;
  return CUDA_SUCCESS;
}

FakeDriver::SharedState* FakeDriver::shared_state(int file, std::int64_t bytes) {
  void* at = ::mmap(nullptr, state_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, static_cast<off_t>(bytes));
  HB_CHECK(at != MAP_FAILED, "the fake device cannot share {} B: errno {}", bytes, errno);
  return static_cast<SharedState*>(at);  // of zeros
}

CUresult FakeDriver::retain_handle(CUmemGenericAllocationHandle* out, CUdeviceptr at) {
  const auto it = mappings_.find(at);
  if (it == mappings_.end()) return CUDA_ERROR_INVALID_VALUE;
  *out = it->second.physical;
  ++physical_.at(*out).retained;
  return CUDA_SUCCESS;
}

CUresult FakeDriver::export_handle(int* out, CUmemGenericAllocationHandle handle) {
  const auto it = physical_.find(handle);
  if (it == physical_.end()) return CUDA_ERROR_INVALID_HANDLE;
  if (it->second.shared == nullptr || it->second.imported) return CUDA_ERROR_INVALID_VALUE;  // not asked for when made
  *out = ::fcntl(it->second.file, F_DUPFD_CLOEXEC, 0);
  return *out < 0 ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
}

CUresult FakeDriver::import_handle(CUmemGenericAllocationHandle* out, int file) {
  struct stat is {};
  const int own = ::fcntl(file, F_DUPFD_CLOEXEC, 0);  // the caller closes his
  if (own < 0 || ::fstat(own, &is) != 0 || is.st_size <= state_bytes) {
    if (own >= 0) ::close(own);
    return CUDA_ERROR_INVALID_VALUE;
  }
  Physical p;
  p.file = own, p.bytes = static_cast<std::int64_t>(is.st_size) - state_bytes, p.imported = true;
  p.shared = shared_state(own, p.bytes);
  *out = static_cast<CUmemGenericAllocationHandle>(next_handle_++);
  physical_[*out] = p;
  return CUDA_SUCCESS;
}

std::string FakeDriver::why_stale(const std::vector<Touch>& touches) const {
  for (const Touch& t : touches) {
    auto it = mappings_.upper_bound(t.begin);
    if (it != mappings_.begin()) --it;
    for (; it != mappings_.end() && it->first < t.end; ++it) {
      const Physical& p = physical_.at(it->second.physical);
      if (it->first + static_cast<CUdeviceptr>(it->second.bytes) > t.begin && p.imported && p.shared->gone)
        return fmt::format("touches [{:#x}, {:#x}) of another process, which has unmapped it: a stale handle", t.begin,
                           t.end);
    }
  }
  return "";
}

void FakeDriver::destroy_if_unused(CUmemGenericAllocationHandle handle) {
  const auto it = physical_.find(handle);
  if (it == physical_.end() || !it->second.released || it->second.retained > 0 || it->second.maps > 0) return;
  if (it->second.shared != nullptr) ::munmap(it->second.shared, state_bytes);
  ::close(it->second.file);
  physical_.erase(it);
}

CUresult FakeDriver::release(CUmemGenericAllocationHandle handle) {
  const auto it = physical_.find(handle);
  if (it != physical_.end() && it->second.retained > 0) {
    --it->second.retained;
    destroy_if_unused(handle);
    return CUDA_SUCCESS;
  }
  if (it == physical_.end() || it->second.released)
    return found(fmt::format("cuMemRelease: {} is no handle, or released already", handle));
  it->second.released = true;  // the memory stays while it is mapped
  destroy_if_unused(handle);
  return CUDA_SUCCESS;
}

CUresult FakeDriver::map(CUdeviceptr begin, std::size_t bytes, std::size_t offset,
                         CUmemGenericAllocationHandle handle) {
  const auto p = physical_.find(handle);
  if (p == physical_.end() || offset != 0 || static_cast<std::int64_t>(bytes) != p->second.bytes)
    return CUDA_ERROR_INVALID_VALUE;
  auto r = reserved_.upper_bound(begin);
  if (r == reserved_.begin() || begin + bytes > std::prev(r)->first + static_cast<CUdeviceptr>(std::prev(r)->second))
    return found(fmt::format("cuMemMap: [{:#x}, +{}) is not reserved", begin, bytes));
  for (const auto& [at, m] : mappings_)
    if (at < begin + bytes && begin < at + static_cast<CUdeviceptr>(m.bytes))
      return found(fmt::format("cuMemMap: [{:#x}, +{}) is mapped already", begin, bytes));
  if (::mmap(pointer(begin), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, p->second.file, 0) == MAP_FAILED)
    return CUDA_ERROR_OUT_OF_MEMORY;
  if (p->second.imported && !p->second.shared->put(0, ::getpid())) return CUDA_ERROR_OUT_OF_MEMORY;
  ++p->second.maps;
  mappings_[begin] = {static_cast<std::int64_t>(bytes), handle, false};
  return CUDA_SUCCESS;
}

CUresult FakeDriver::unmap(CUdeviceptr begin, std::size_t bytes) {
  const CUdeviceptr end = begin + bytes;
  // A driver unmaps at once, streams or not. Tasks that have not run meet a hole; of those that have, by luck, the host
  // must have known.
  if (const auto c = touched_.pending(begin, end, host()); c)
    return found(fmt::format("cuMemUnmap: the host has not waited for {}, which uses [{:#x}, {:#x})", said(c->earlier),
                             c->begin, c->end));
  CUresult result = CUDA_SUCCESS;
  if (const std::string who = before_unmap_ && !going_ ? before_unmap_(begin, end) : ""; !who.empty())
    result = found(fmt::format("cuMemUnmap: {}", who));
  for (CUdeviceptr at = begin; at < end;) {
    const auto it = mappings_.find(at);
    if (it == mappings_.end() || at + static_cast<CUdeviceptr>(it->second.bytes) > end)
      return found(fmt::format("cuMemUnmap: [{:#x}, +{}) is not what was mapped", begin, bytes));
    Physical& p = physical_.at(it->second.physical);
    if (p.shared != nullptr && !p.imported) {
      p.shared->gone = true;
      if (const std::int32_t reader = p.shared->reader(); reader != 0 && !going_)
        result =
            found(fmt::format("cuMemUnmap: process {} still has [{:#x}, {:#x}) mapped: its memory does not come back",
                              reader, begin, end));
    }
    if (p.imported) p.shared->put(::getpid(), 0);
    if (it->second.accessible) memory_.remove(at);
    const void* const hidden = ::mmap(pointer(at), static_cast<std::size_t>(it->second.bytes), PROT_NONE,
                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    HB_CHECK(hidden != MAP_FAILED, "the fake device cannot unmap {} B: errno {}", it->second.bytes, errno);
    --p.maps;
    const auto handle = it->second.physical;
    at += static_cast<CUdeviceptr>(it->second.bytes);
    mappings_.erase(it);
    destroy_if_unused(handle);
  }
  touched_.forget(begin, end);
  return result;
}

CUresult FakeDriver::set_access(CUdeviceptr begin, std::size_t bytes) {
  for (CUdeviceptr at = begin; at < begin + bytes;) {
    const auto it = mappings_.find(at);
    if (it == mappings_.end()) return found(fmt::format("cuMemSetAccess: {:#x} is not mapped", at));
    if (!it->second.accessible) {
      ::mprotect(pointer(at), static_cast<std::size_t>(it->second.bytes), PROT_READ | PROT_WRITE);
      // Which bytes of another process's memory were written, that process knows.
      memory_.add(at, it->second.bytes, fmt::format("mapping at {:#x}", at),
                  physical_.at(it->second.physical).imported);
      it->second.accessible = true;
    }
    at += static_cast<CUdeviceptr>(it->second.bytes);
  }
  return CUDA_SUCCESS;
}

CUresult FakeDriver::host_alloc(void** out, std::size_t bytes) {
  *out = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (*out == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  pinned_[reinterpret_cast<std::uint64_t>(*out)] = {static_cast<std::int64_t>(bytes), true};
  return CUDA_SUCCESS;
}

CUresult FakeDriver::host_register(void* at, std::size_t bytes) {
  const auto begin = reinterpret_cast<std::uint64_t>(at);
  for (const auto& [other, p] : pinned_)
    if (other < begin + bytes && begin < other + static_cast<std::uint64_t>(p.bytes))
      return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  pinned_[begin] = {static_cast<std::int64_t>(bytes), false};
  return CUDA_SUCCESS;
}

CUresult FakeDriver::host_unregister(void* at) {
  const auto it = pinned_.find(reinterpret_cast<std::uint64_t>(at));
  if (it == pinned_.end() || it->second.owned)
    return found("cuMemHostUnregister: not what cuMemHostRegister was given");
  // As with unmapping: a copy that has not been waited for may still use it.
  const std::uint64_t begin = it->first, end = begin + static_cast<std::uint64_t>(it->second.bytes);
  if (const auto c = touched_.pending(begin, end, host()); c)
    return found(fmt::format("cuMemHostUnregister: the host has not waited for {}", said(c->earlier)));
  touched_.forget(begin, end);
  pinned_.erase(it);
  return CUDA_SUCCESS;
}

CUresult FakeDriver::host_free(void* at) {
  const auto it = pinned_.find(reinterpret_cast<std::uint64_t>(at));
  if (it == pinned_.end() || !it->second.owned) return found("cuMemFreeHost: not what cuMemHostAlloc gave");
  touched_.forget(it->first, it->first + static_cast<std::uint64_t>(it->second.bytes));
  ::munmap(at, static_cast<std::size_t>(it->second.bytes));
  pinned_.erase(it);
  return CUDA_SUCCESS;
}

bool FakeDriver::is_pinned(const void* p, std::size_t bytes) const {
  const auto at = reinterpret_cast<std::uint64_t>(p);
  const auto it = pinned_.upper_bound(at);
  return it != pinned_.begin() &&
         at + bytes <= std::prev(it)->first + static_cast<std::uint64_t>(std::prev(it)->second.bytes);
}

void FakeDriver::ask_before_unmap(std::function<std::string(CUdeviceptr, CUdeviceptr)> ask) {
  const std::lock_guard lock(mutex_);
  before_unmap_ = std::move(ask);
}

std::string FakeDriver::why_no_device_memory(CUdeviceptr begin, std::size_t bytes) {
  for (CUdeviceptr at = begin; at < begin + bytes;) {
    const auto* r = memory_.find(at);
    if (r == nullptr) return fmt::format("{:#x} is not mapped device memory ({})", at, memory_.describe(at));
    at = r->begin + static_cast<CUdeviceptr>(r->bytes);
  }
  return "";
}

CUresult FakeDriver::check_registered(CUdeviceptr begin, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  if (const std::string why = why_no_device_memory(begin, bytes); !why.empty())
    return found("ncclCommRegister: " + why);
  for (auto it = std::prev(mappings_.upper_bound(begin)); it != mappings_.end() && it->first < begin + bytes; ++it)
    if (options_.rdma && !physical_.at(it->second.physical).rdma)
      return found(
          fmt::format("ncclCommRegister: {:#x} was made without gpuDirectRDMACapable, which the device has: no network "
                      "adapter reaches it",
                      it->first));
  return CUDA_SUCCESS;
}

void FakeDriver::mark_written(CUdeviceptr begin, std::size_t bytes) {
  for (CUdeviceptr at = begin; at < begin + bytes;) {
    const auto* r = memory_.find(at);
    const CUdeviceptr stop = std::min<CUdeviceptr>(begin + bytes, r->begin + static_cast<CUdeviceptr>(r->bytes));
    memory_.mark_written(at, static_cast<std::int64_t>(stop - at));
    at = stop;
  }
}

bool FakeDriver::was_written(CUdeviceptr begin, std::size_t bytes) {
  for (CUdeviceptr at = begin; at < begin + bytes;) {
    const auto* r = memory_.find(at);
    const CUdeviceptr stop = std::min<CUdeviceptr>(begin + bytes, r->begin + static_cast<CUdeviceptr>(r->bytes));
    if (!r->is_written(at - r->begin, stop - at)) return false;
    at = stop;
  }
  return true;
}

}  // namespace hotbunk::cuda
