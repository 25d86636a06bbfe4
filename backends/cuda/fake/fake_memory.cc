// Virtual addresses, physical memory and pinned host memory of the double.
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>

#include "backends/cuda/fake/fake_driver.h"
#include "base/check.h"

namespace hotbunk::cuda {
namespace {

void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

}  // namespace

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

CUresult FakeDriver::create(CUmemGenericAllocationHandle* out, std::size_t bytes) {
  if (bytes == 0 || bytes % static_cast<std::size_t>(options_.granularity_bytes) != 0) return CUDA_ERROR_INVALID_VALUE;
  std::int64_t used = 0;
  for (const auto& [handle, p] : physical_) used += p.bytes;
  if (used + static_cast<std::int64_t>(bytes) > options_.memory_bytes) return CUDA_ERROR_OUT_OF_MEMORY;
  const int file = ::memfd_create("hotbunk-fake-device", MFD_CLOEXEC);
  if (file < 0 || ::ftruncate(file, static_cast<off_t>(bytes)) != 0) {
    if (file >= 0) ::close(file);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *out = static_cast<CUmemGenericAllocationHandle>(next_handle_++);
  physical_[*out] = {file, static_cast<std::int64_t>(bytes), 0, false};
  return CUDA_SUCCESS;
}

void FakeDriver::destroy_if_unused(CUmemGenericAllocationHandle handle) {
  const auto it = physical_.find(handle);
  if (it == physical_.end() || !it->second.released || it->second.maps > 0) return;
  ::close(it->second.file);
  physical_.erase(it);
}

CUresult FakeDriver::release(CUmemGenericAllocationHandle handle) {
  const auto it = physical_.find(handle);
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
  ++p->second.maps;
  mappings_[begin] = {static_cast<std::int64_t>(bytes), handle, false};
  return CUDA_SUCCESS;
}

CUresult FakeDriver::unmap(CUdeviceptr begin, std::size_t bytes) {
  const CUdeviceptr end = begin + bytes;
  // A driver unmaps at once, streams or not. Tasks that have not run meet a hole; of those that have, by luck, the host
  // must have known.
  if (const auto c = touched_.pending(begin, end, host()); c)
    return found(fmt::format("cuMemUnmap: the host has not waited for '{}' on stream {}, which uses [{:#x}, {:#x})",
                             touched_.name_of(c->earlier.name), c->earlier.stream, c->begin, c->end));
  for (CUdeviceptr at = begin; at < end;) {
    const auto it = mappings_.find(at);
    if (it == mappings_.end() || at + static_cast<CUdeviceptr>(it->second.bytes) > end)
      return found(fmt::format("cuMemUnmap: [{:#x}, +{}) is not what was mapped", begin, bytes));
    if (it->second.accessible) memory_.remove(at);
    const void* const hidden = ::mmap(pointer(at), static_cast<std::size_t>(it->second.bytes), PROT_NONE,
                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    HB_CHECK(hidden != MAP_FAILED, "the fake device cannot unmap {} B: errno {}", it->second.bytes, errno);
    --physical_[it->second.physical].maps;
    const auto handle = it->second.physical;
    at += static_cast<CUdeviceptr>(it->second.bytes);
    mappings_.erase(it);
    destroy_if_unused(handle);
  }
  touched_.forget(begin, end);
  return CUDA_SUCCESS;
}

CUresult FakeDriver::set_access(CUdeviceptr begin, std::size_t bytes) {
  for (CUdeviceptr at = begin; at < begin + bytes;) {
    const auto it = mappings_.find(at);
    if (it == mappings_.end()) return found(fmt::format("cuMemSetAccess: {:#x} is not mapped", at));
    if (!it->second.accessible) {
      ::mprotect(pointer(at), static_cast<std::size_t>(it->second.bytes), PROT_READ | PROT_WRITE);
      memory_.add(at, it->second.bytes, fmt::format("mapping at {:#x}", at), false);
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
    return found(fmt::format("cuMemHostUnregister: the host has not waited for '{}' on stream {}",
                             touched_.name_of(c->earlier.name), c->earlier.stream));
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

std::string FakeDriver::why_no_device_memory(CUdeviceptr begin, std::size_t bytes) {
  for (CUdeviceptr at = begin; at < begin + bytes;) {
    const auto* r = memory_.find(at);
    if (r == nullptr) return fmt::format("{:#x} is not mapped device memory ({})", at, memory_.describe(at));
    at = r->begin + static_cast<CUdeviceptr>(r->bytes);
  }
  return "";
}

void FakeDriver::mark_written(CUdeviceptr begin, std::size_t bytes) {
  for (CUdeviceptr at = begin; at < begin + bytes;) {
    const auto* r = memory_.find(at);
    const CUdeviceptr stop = std::min<CUdeviceptr>(begin + bytes, r->begin + static_cast<CUdeviceptr>(r->bytes));
    memory_.mark_written(at, static_cast<std::int64_t>(stop - at));
    at = stop;
  }
}

}  // namespace hotbunk::cuda
