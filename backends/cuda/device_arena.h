// The device memory of one rank: addresses reserved once, physical memory mapped at them while the plan maps them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "backends/cuda/context.h"
#include "backends/cuda/peer_memory.h"
#include "backends/cuda/registered_memory.h"
#include "runtime/arena_books.h"

namespace hotbunk::cuda {

/// A plan's chunks may be smaller than the device's granules (a plan for CPU ranks has 4 KiB, a device 2 MiB): a
/// granule is mapped while any chunk in it is. The books count chunks, the device has up to a granule more at each end
/// of a range. The driver unmaps only what it mapped as a whole, so between two places where the plan maps or unmaps
/// lies one piece of physical memory.
class DeviceArena final : public ArenaBooks {
 public:
  /// What the plan maps and unmaps, in bytes from the base. `cuts`: where any such range begins or ends. `sleeping`:
  /// ranges that go while the run goes on, so that they are mapped anew.
  struct Ranges {
    std::vector<std::int64_t> cuts;
    std::vector<std::pair<std::int64_t, std::int64_t>> sleeping{};
  };
  /// Who else is to know what is mapped; they outlive the arena.
  struct Users {
    PeerMemory* peers = nullptr;  // where ranks of other processes read it, under `scope`
    std::string scope{};
    RegisteredMemory* registered = nullptr;  // where NCCL carries it; told of what stays mapped
  };
  /// RuntimeFailure when the range cannot be reserved.
  DeviceArena(const Context&, BookOptions, const Ranges&, Users);
  ~DeviceArena() override;

  /// A device address: the host never reads it.
  std::byte* base() const override { return reinterpret_cast<std::byte*>(base_); }
  /// Physical bytes that the device holds for it.
  std::int64_t physical_bytes() const;

 private:
  struct Piece {
    std::int64_t begin = 0, end = 0;  // in granules' bytes
    std::int64_t used = 0;            // bytes of it that the books call mapped
    bool sleeps = false;
  };
  void provide(std::int64_t begin, std::int64_t end, std::string_view who) override;
  void withdraw(std::int64_t begin, std::int64_t end) override;
  /// Calls visit(piece, bytes of [begin, end) in it).
  template <class F>
  void each_piece(std::int64_t begin, std::int64_t end, F&& visit);
  /// One whole piece, with whoever else has it mapped.
  void map_piece(const Piece&);
  void unmap_piece(const Piece&);
  CUdeviceptr at(std::int64_t offset) const { return base_ + static_cast<CUdeviceptr>(offset); }

  const Context& context_;
  const Users users_;
  CUdeviceptr base_ = 0;
  std::int64_t reserved_bytes_ = 0;
  std::vector<Piece> pieces_;  // ascending, without holes
};

}  // namespace hotbunk::cuda
