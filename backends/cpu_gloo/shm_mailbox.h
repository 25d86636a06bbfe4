// Point-to-point messages through shared memory: one mailbox per ordered pair of ranks, two slots deep.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "backends/cpu_gloo/shm_wait.h"
#include "runtime/shm_region.h"

namespace hotbunk {

/// Lies in zeroed shared memory. A message is one slot that points into a shared region (direct: read without a copy in
/// between), or a row of slots, each with a piece that was copied into the pair's staging memory.
struct ShmMailbox {
  struct Slot {
    std::int64_t total_bytes, piece_bytes;
    std::int64_t region_offset;
    int region;  // -1: staged
  };
  alignas(64) std::atomic<std::uint32_t> posted;    // slots filled by the sender, ever
  alignas(64) std::atomic<std::uint32_t> consumed;  // slots emptied by the receiver, ever
  alignas(64) Slot slots[2];
};

constexpr std::int64_t mail_piece_bytes = 256 << 10;  // half the staging memory of one pair

/// One message on its way out. step() moves one piece and may wait for room; finish() waits until the data may change.
class ShmOutgoing {
 public:
  ShmOutgoing(ShmMailbox&, std::byte* staging, const SharedRegions&, int world_rank_of_receiver, const ShmWaiter&,
              std::string what, const std::byte* data, std::int64_t bytes);
  bool done() const { return done_; }
  void step();
  void finish();

 private:
  ShmMailbox& box_;
  std::byte* staging_;
  int receiver_;
  const ShmWaiter& wait_;
  std::string what_;
  const std::byte* data_;
  std::int64_t bytes_, sent_ = 0;
  SharedRegions::Location direct_;
  bool done_ = false;
};

/// One message on its way in.
class ShmIncoming {
 public:
  ShmIncoming(ShmMailbox&, const std::byte* staging, const SharedRegions&, int world_rank_of_sender, const ShmWaiter&,
              std::string what, std::byte* data, std::int64_t bytes);
  bool done() const { return done_; }
  /// Waits for a piece and copies it. RuntimeFailure, before memory is touched, when the sender sends another size.
  void step();

 private:
  ShmMailbox& box_;
  const std::byte* staging_;
  const SharedRegions& regions_;
  int sender_;
  const ShmWaiter& wait_;
  std::string what_;
  std::byte* data_;
  std::int64_t bytes_, received_ = 0;
  bool done_ = false;
};

}  // namespace hotbunk
