#include "backends/cuda/registered_memory.h"

#include <iterator>
#include <utility>

#include "backends/cuda/nccl_communicator.h"

namespace hotbunk::cuda {

RegisteredMemory::RegisteredMemory(const Nccl& nccl) : nccl_(nccl) {}

void RegisteredMemory::mapped(CUdeviceptr begin, std::int64_t bytes) {
  const std::lock_guard lock(mutex_);
  Piece& p = pieces_[begin];
  p.end = begin + static_cast<CUdeviceptr>(bytes);
  p.mapped = true;
}

void RegisteredMemory::unmapping(CUdeviceptr begin) {
  std::map<std::shared_ptr<NcclHandle>, void*> registrations;
  {
    const std::lock_guard lock(mutex_);
    Piece& p = pieces_.at(begin);
    p.mapped = false;
    registrations = std::exchange(p.registrations, {});
  }
  for (const auto& [handle, registration] : registrations) {
    if (registration == nullptr || handle->is_aborted()) continue;  // it went with the communicator
    try {
      handle->call(handle->of_group("ncclCommDeregister"), [&](NcclComm comm) {
        return NcclCall{"ncclCommDeregister", nccl_.ncclCommDeregister(comm, registration)};
      });
    } catch (const RuntimeFailure&) {
      handle->abort();  // with it go its registrations: whoever unmaps all the same leaves nothing registered
      throw;
    }
  }
}

CUdeviceptr RegisteredMemory::to_register(const std::shared_ptr<NcclHandle>& handle, CUdeviceptr at,
                                          std::int64_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto behind = pieces_.upper_bound(at);
  if (behind == pieces_.begin()) return 0;
  auto& [begin, piece] = *std::prev(behind);
  const bool inside = piece.mapped && at + static_cast<CUdeviceptr>(bytes) <= piece.end;
  return inside && piece.registrations.try_emplace(handle, nullptr).second ? begin : 0;
}

void RegisteredMemory::use(const std::shared_ptr<NcclHandle>& handle, const std::byte* at, std::int64_t bytes) {
  if (nccl_.ncclCommRegister == nullptr || nccl_.ncclCommDeregister == nullptr || bytes == 0) return;
  const CUdeviceptr begin = to_register(handle, reinterpret_cast<CUdeviceptr>(at), bytes);
  if (begin == 0) return;
  const auto piece = [&]() -> Piece& { return pieces_.at(begin); };
  const std::size_t whole = [&] {
    const std::lock_guard lock(mutex_);
    return static_cast<std::size_t>(piece().end - begin);
  }();
  void* registration = nullptr;
  handle->call(handle->of_group("ncclCommRegister"), [&](NcclComm comm) {
    return NcclCall{"ncclCommRegister",
                    nccl_.ncclCommRegister(comm, reinterpret_cast<void*>(begin), whole, &registration)};
  });
  const std::lock_guard lock(mutex_);
  piece().registrations[handle] = registration;
}

}  // namespace hotbunk::cuda
