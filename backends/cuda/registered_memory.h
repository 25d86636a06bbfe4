// The plan's memory where NCCL carries from it or to it: a piece that stays mapped is registered with each communicator
// that uses it, so that NCCL may read and write it in place.
//
// A registration would hold the memory that sleep is to give back, and would have to be made anew at every wake, which
// costs each time what it is to save. So the arena tells of pieces alone that the plan leaves mapped until its end, and
// before that end they are given back to NCCL.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "backends/cuda/driver.h"
#include "backends/cuda/nccl_table.h"

namespace hotbunk::cuda {

class NcclHandle;

/// Of one rank. Thread-safe; the calls for one communicator come from one thread, and unmapping() comes when no
/// communicator works on the piece. Without NCCL's entry points (before 2.19) it does nothing.
class RegisteredMemory {
 public:
  explicit RegisteredMemory(const Nccl&);

  /// [begin, begin + bytes) was mapped as a whole.
  void mapped(CUdeviceptr begin, std::int64_t bytes);
  /// It is about to be unmapped: on return no communicator has it. RuntimeFailure with NCCL's reason.
  void unmapping(CUdeviceptr begin);
  /// The communicator is about to carry [at, at + bytes): registers the piece that it lies in, where it is one piece.
  /// RuntimeFailure with NCCL's reason.
  void use(const std::shared_ptr<NcclHandle>&, const std::byte* at, std::int64_t bytes);

 private:
  struct Piece {
    CUdeviceptr end = 0;
    bool mapped = false;
    std::map<std::shared_ptr<NcclHandle>, void*> registrations;
  };
  /// Where the piece with these bytes begins, which the communicator is to have registered; 0: none, or it has it. Then
  /// the place for its registration is there, empty.
  CUdeviceptr to_register(const std::shared_ptr<NcclHandle>&, CUdeviceptr at, std::int64_t bytes);

  const Nccl nccl_;
  std::mutex mutex_;
  std::map<CUdeviceptr, Piece> pieces_;  // by begin; the places stay when memory goes
};

}  // namespace hotbunk::cuda
