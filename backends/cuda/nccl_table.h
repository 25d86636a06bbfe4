// NCCL as one table of entry points, opened at run time as the driver is: neither its header nor its library is needed
// to build. The double of fake/ fills the same table.
//
// Types are NCCL's by layout (nccl.h, stable since 2.14): results are ints, an id is 128 bytes passed by value, a
// communicator is a pointer.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include "backends/cuda/driver.h"
#include "base/diagnostic.h"

namespace hotbunk::cuda {

enum class NcclResult : int {
  success = 0,
  unhandled_cuda_error = 1,
  system_error = 2,
  internal_error = 3,
  invalid_argument = 4,
  invalid_usage = 5,
  remote_error = 6,
  in_progress = 7
};

inline constexpr std::size_t nccl_id_bytes = 128;
struct NcclId {
  char bytes[nccl_id_bytes];
};
using NcclComm = struct NcclCommOpaque*;

inline constexpr int nccl_undefined = INT32_MIN;
/// Of NCCL 2.18; later ones read as much of it as `version` says there is.
struct NcclConfig {
  std::size_t size = sizeof(NcclConfig);
  unsigned int magic = 0xcafebeef;
  unsigned int version = 21800;
  int blocking = nccl_undefined;
  int cga_cluster_size = nccl_undefined, min_ctas = nccl_undefined, max_ctas = nccl_undefined;
  const char* net_name = nullptr;
  int split_share = nccl_undefined;
};

// What moves is bytes: ncclUint8.
inline constexpr int nccl_bytes = 1;

// clang-format off
#define HB_NCCL_ENTRIES(X)                                                                                    \
  X(ncclGetVersion, NcclResult(int*))                                                                         \
  X(ncclGetErrorString, const char*(NcclResult))                                                              \
  X(ncclGetLastError, const char*(NcclComm))                                                                  \
  X(ncclGetUniqueId, NcclResult(NcclId*))                                                                     \
  X(ncclCommInitRankConfig, NcclResult(NcclComm*, int size, NcclId, int rank, NcclConfig*))                   \
  X(ncclCommGetAsyncError, NcclResult(NcclComm, NcclResult*))                                                 \
  X(ncclCommFinalize, NcclResult(NcclComm))                                                                   \
  X(ncclCommDestroy, NcclResult(NcclComm))                                                                    \
  X(ncclCommAbort, NcclResult(NcclComm))                                                                      \
  X(ncclGroupStart, NcclResult())                                                                             \
  X(ncclGroupEnd, NcclResult())                                                                               \
  X(ncclSend, NcclResult(const void*, std::size_t count, int type, int peer, NcclComm, CUstream))             \
  X(ncclRecv, NcclResult(void*, std::size_t count, int type, int peer, NcclComm, CUstream))                   \
  X(ncclAllGather, NcclResult(const void* send, void* recv, std::size_t count, int type, NcclComm, CUstream)) \
  X(ncclBroadcast, NcclResult(const void* send, void* recv, std::size_t count, int type, int root, NcclComm, CUstream))
// Not in every version: the pointer is null where it is not.
#define HB_NCCL_OPTIONAL_ENTRIES(X)                                                                 \
  X(ncclCommSplit, NcclResult(NcclComm, int color, int key, NcclComm*, NcclConfig*))   /* 2.18 */    \
  X(ncclCommRegister, NcclResult(NcclComm, void*, std::size_t bytes, void** handle))   /* 2.19 */    \
  X(ncclCommDeregister, NcclResult(NcclComm, void* handle))
// clang-format on

struct Nccl {
#define HB_NCCL_POINTER(name, ...) \
  using name##_type = __VA_ARGS__; \
  name##_type* name = nullptr;
  HB_NCCL_ENTRIES(HB_NCCL_POINTER)
  HB_NCCL_OPTIONAL_ENTRIES(HB_NCCL_POINTER)
#undef HB_NCCL_POINTER
};

/// "2.28.3"
std::string nccl_version_text(int version);

/// NCCL of this machine. E642 with the reason when the library or one of its entry points is not there, or when it is
/// older than 2.14: before, a call could not be given up.
Result<Nccl> open_nccl(const std::string& library = "libnccl.so.2");

}  // namespace hotbunk::cuda
