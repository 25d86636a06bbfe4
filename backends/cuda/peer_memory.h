// Device memory of ranks that are processes of one host, read where it lies (weight sync over sync.transport: ipc).
//
// cuIpcGetMemHandle takes no memory of cuMemCreate, so a piece of an arena goes by cuMemExportToShareableHandle: its
// owner answers who asks with a file descriptor, and the reader maps what is behind it at the piece's offset in a range
// of its own. A reader keeps a piece from its first read until the owner is about to unmap it. The owner then asks
// every reader to let go, and waits: a mapping that stayed would hold the physical memory that sleep is to give back,
// and after the next wake its bytes would be the old ones.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "backends/cuda/context.h"
#include "backends/cuda/descriptor_socket.h"
#include "backends/cuda/event_pool.h"
#include "runtime/death_watch.h"

namespace hotbunk::cuda {

/// Of one rank, for all of its arenas; each is known by its scope. Thread-safe. Offsets are bytes from an arena's base.
class PeerMemory {
 public:
  /// Everyone says a text; returns what they said, by rank.
  using SayToAll = std::function<std::vector<std::string>(const std::string& mine)>;

  /// Every rank of the world makes one at the same time. RuntimeFailure when the device's memory cannot be exported.
  PeerMemory(const Context&, int rank, DeathWatch&, const SayToAll&);
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  // --- of an owner
  /// [begin, end) was mapped as a whole, as shareable memory: peers may ask for it.
  void offer(const std::string& scope, CUdeviceptr base, std::int64_t reserved_bytes, std::int64_t begin,
             std::int64_t end);
  /// It is about to be unmapped: nobody gets it any more, and on return no reader has it mapped. RuntimeFailure when a
  /// reader neither lets go nor is gone. Nothing for what was not offered.
  void take_back(const std::string& scope, std::int64_t begin);

  // --- of a reader
  /// Where this process has [offset, offset + bytes) of that rank's arena mapped, for copies that are enqueued on the
  /// stream before done_reading(). RuntimeFailure when the owner has it not mapped, or it cannot be mapped here.
  CUdeviceptr begin_reading(const std::string& scope, int peer, std::int64_t offset, std::int64_t bytes, CUstream);
  /// The copies from all that begin_reading() gave for this stream are enqueued. RuntimeFailure of the driver; then it
  /// has let go all the same.
  void done_reading(CUstream);

  /// Pieces of peers that are mapped here now.
  std::int64_t pieces_mapped() const;

 private:
  using Place = std::pair<std::string, int>;  // scope, rank
  struct Offer {
    CUdeviceptr base = 0;
    std::int64_t reserved_bytes = 0, end = 0;
    std::set<int> readers;
  };
  struct Piece {
    std::int64_t end = 0;
    std::set<CUstream> being_read;          // between begin_reading and done_reading
    std::map<CUstream, PooledEvent> reads;  // the last copies from there
  };
  struct Arena {
    CUdeviceptr base = 0;
    std::int64_t reserved_bytes = 0;
    std::map<std::int64_t, Piece> pieces;  // by begin
  };

  DescriptorMessage answer(const std::string& question);
  DescriptorMessage export_piece(int reader, std::int64_t offset, const std::string& scope);
  /// The owner is about to unmap it.
  void let_go(int owner, std::int64_t begin, const std::string& scope);
  void drop(Arena&, std::map<std::int64_t, Piece>::iterator);
  std::map<std::int64_t, Piece>::iterator import_piece(Arena&, const Place&, std::int64_t offset);
  void map_import(const Arena&, std::int64_t begin, std::int64_t end, int descriptor) const;
  bool keep_waiting(std::string_view during) const;

  const Context& context_;
  const int rank_;
  DeathWatch& watch_;
  EventPool events_;
  std::vector<std::string> addresses_;  // by rank
  std::mutex offers_mutex_;
  std::map<std::pair<std::string, std::int64_t>, Offer> offers_;  // by scope and begin
  mutable std::mutex arenas_mutex_;
  std::condition_variable read_;  // somebody is done reading
  std::map<Place, Arena> arenas_;
  std::unique_ptr<DescriptorServer> server_;  // last: its thread ends before what it works on
};

}  // namespace hotbunk::cuda
