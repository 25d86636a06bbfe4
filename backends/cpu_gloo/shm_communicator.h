// Collectives between processes of one host, through shared memory.
//
// Each rank of the group owns one segment, open to all: a posting board, mailboxes and staging memory. A collective is
//   1. post what I send, and where: "direct" when it lies in a shared arena (peers read it in place, one copy in all),
//      else copied into my staging memory, in pieces;
//   2. meet (a counter, a futex): now every posting is readable; compare them;
//   3. read what I need from each peer, in rank order;
//   4. meet again if anything was read or written in place: its owner may overwrite it on return, or read it.
//      Postings and staging exist twice, by parity of the meeting, so that staged pieces need no second meeting.
// The root of a broadcast has nothing to read. Where its data is read in place it writes a share of what each other
// rank receives in a shared arena, so that all ranks copy as much. Ranks share cores, so waiting sleeps (shm_wait.h).
#pragma once
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "backends/cpu_gloo/shm_mailbox.h"
#include "backends/cpu_gloo/shm_wait.h"
#include "runtime/communicator.h"
#include "runtime/shm_region.h"

namespace hotbunk {

class ShmCommunicator final : public Communicator {
 public:
  /// Size of each rank's segment in a group of `size`.
  static std::int64_t segment_bytes(int size);
  /// segments: by group rank, all open for writing. Regions and watch must outlive this.
  ShmCommunicator(std::string name, std::vector<int> ranks, int rank, std::vector<SharedMapping> segments,
                  const SharedRegions&, const DeathWatch&);

  Transport transport() const override { return Transport::shm; }
  const std::byte* peer_pointer(int peer, int region, std::int64_t offset) const override;

 private:
  /// Bytes of the send buffer that one peer (or, when there is one part only, every peer) reads; all_to_all also says
  /// how many bytes it expects from that peer.
  struct Part {
    std::int64_t offset, bytes, expected = 0;
  };
  enum class Mode : std::uint8_t { nothing, staged, direct };
  struct Posting {
    Call call;
    Mode mode;
    int region;
    std::int64_t region_offset;
    std::int64_t longest_part;
    SharedRegions::Location receive;  // where the call's root may write, none: region -1
  };
  struct Segment;
  /// What a peer has for me in this exchange.
  struct Source {
    Mode mode;
    Part part;
    const std::byte* data;  // direct: the part's first byte
  };
  using Pieces = std::vector<std::span<const std::byte>>;
  /// Called with the offset within the parts and each rank's piece from there (by group rank).
  using Consume = std::function<void(std::int64_t begin, const Pieces&)>;

  Segment segment(int rank) const;
  void meet(const Call&);
  /// World ranks that have not come to this rank's current meeting.
  std::vector<int> missing() const;
  Mode post(const Call&, const std::byte* base, std::span<const Part>, SharedRegions::Location receive);
  void stage(const std::byte* base, std::span<const Part>, std::int64_t begin, std::int64_t piece_bytes);
  void check_agreement(const Call&) const;
  /// Makes parts[r] of my buffer readable for rank r (parts[0] for everyone if it is the only one) and consumes theirs.
  /// receive: where the call's root may write meanwhile.
  void exchange(const Call&, const std::byte* base, std::span<const Part> parts, const Consume&,
                SharedRegions::Location receive = {});
  void reduce_pieces(std::byte* dst, const Pieces&, const Call&) const;

  void do_all_gather(const Call&, const std::byte* send, std::byte* recv, std::int64_t bytes) override;
  void do_reduce_scatter(const Call&, const std::byte* send, std::byte* recv) override;
  void do_all_reduce(const Call&, const std::byte* send, std::byte* recv) override;
  void do_broadcast(const Call&, std::byte* data, std::int64_t bytes) override;
  void do_all_to_all(const Call&, const std::byte* send, std::span<const CommPart> send_parts, std::byte* recv,
                     std::span<const CommPart> recv_parts) override;
  void do_send_recv(int to, const std::byte* send_data, std::int64_t send_bytes, int from, std::byte* recv_data,
                    std::int64_t recv_bytes) override;
  void do_barrier(const Call&) override;

  std::vector<SharedMapping> segments_;
  const SharedRegions& regions_;
  ShmWaiter wait_;
  std::uint64_t meetings_ = 0;  // so far; the same on every rank
};

}  // namespace hotbunk
