// The world of CPU ranks: arenas that ranks of one host share, and communicators over shared memory or TCP.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "runtime/world.h"

namespace gloo::transport {
class Device;
}

namespace hotbunk {

class Arena;
class SharedRegions;

class CpuWorld final : public World {
 public:
  /// A world of one rank: no sockets, no threads.
  explicit CpuWorld(const WorldOptions& = {});
  /// Meets the other ranks, as World does.
  explicit CpuWorld(const LaunchEnv&, const WorldOptions& = {});
  ~CpuWorld() override;

  /// Opens a shared arena to the ranks of this host, which read it, and write what a broadcast brings there. Every rank
  /// of the world calls it, in the same order; returns the region's index (0, 1, …, the same everywhere) for
  /// Communicator::peer_pointer. Pointers into it travel without staging in the shm transport. The arena must outlive
  /// the world. Throws RuntimeFailure with the reason when a peer's memory cannot be opened.
  int share(const Arena&);
  /// A region of shared index `region` of a rank of this host (nullptr for others).
  const std::byte* peer_pointer(int rank, int region, std::int64_t offset) const;
  /// Peers' pages that were read or written leave this process until they are again.
  void forget_peers();

  /// Automatic choice: solo for one rank, shm where all are on one host, else gloo.
  std::unique_ptr<Communicator> communicator(std::span<const int> ranks, std::string_view name) override;
  std::unique_ptr<Communicator> communicator(std::span<const int> ranks, std::string_view name, Transport);

 private:
  std::unique_ptr<SharedRegions> regions_;
  int num_regions_ = 0;
  std::shared_ptr<gloo::transport::Device> gloo_device_;
};

}  // namespace hotbunk
