// Collectives of one group on one stream. Blocking: overlap comes from streams, which are threads.
//
// The same results, bit for bit, whatever the transport (P7): every sum runs over ranks 0 … W-1 in this order, in fp32
// for fp32 and bf16 (rounded once at the end), in int32 (wrapping) for i32.
// Two communicators of the same group never interfere, so each stream has its own. One thread at a time per
// communicator.
//
// Counters are kept here, from the arguments of the calls, independently of any plan (P2). n = bytes of the full
// tensor:
// clang-format off
//   operation       payload                              wire: bytes this rank sends (direct or ring: the same volume)
//   all_gather      n = W * bytes_per_rank (output)      (W-1) * bytes_per_rank                = (W-1)/W n
//   reduce_scatter  n = W * count * size (input)         (W-1) * count * size                  = (W-1)/W n
//   all_reduce      n                                    n + (W-2) * own chunk, chunk = ⌈count/W⌉ elements, the last
//                                                        ones shorter                          = 2(W-1)/W n if W | count
//   broadcast       n                                    n; 0 for the last of the chain root, root+1, … (a pipelined ring)
//   all_to_all      whole send buffer, own part included send buffer without the own part
//   … back          whole receive buffer                 likewise
//   send            bytes sent                           bytes sent
//   send_recv       bytes sent                           bytes sent; 0 to itself
//   recv, barrier   0                                    0
//   peer_read       bytes read                           0 (the owner does nothing)
// clang-format on
// padding_bytes is the part of the payload that is padding: it is counted apart and taken off the payload, not off the
// wire.
#pragma once
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"

namespace hotbunk {

enum class CommOp : std::uint8_t {
  all_gather,
  reduce_scatter,
  all_reduce,
  broadcast,
  all_to_all,
  send,
  recv,
  send_recv,
  peer_read,
  barrier
};
constexpr int num_comm_ops = 10;
std::string_view name_of(CommOp);

enum class ReduceOp : std::uint8_t { sum, max };  // max: a NaN in any rank gives NaN

enum class Transport : std::uint8_t { solo, shm, gloo, local, nccl };
std::string_view name_of(Transport);

/// What an all-to-all sends to, or has from, one rank: where it lies in the buffer, in bytes.
struct CommPart {
  std::int64_t begin = 0, bytes = 0;
};

/// One row of the traffic table: one operation under one tag (phase id), summed over calls.
struct CommTraffic {
  int tag = 0;
  CommOp op = CommOp::barrier;
  std::int64_t calls = 0;
  std::int64_t payload_bytes = 0;
  std::int64_t padding_bytes = 0;
  std::int64_t wire_bytes = 0;
  bool operator==(const CommTraffic&) const = default;
};

/// Bytes that `rank` of `size` sends in an all-reduce of count elements of element_bytes (table above).
std::int64_t all_reduce_wire_bytes(int size, int rank, std::int64_t count, std::int64_t element_bytes);

/// Elements [begin, end) of `count` that `rank` reduces in an all-reduce: chunks of ⌈count/size⌉, the last ones
/// shorter.
struct ChunkRange {
  std::int64_t begin, end;
};
ChunkRange all_reduce_chunk(int size, int rank, std::int64_t count);

/// Every call is made by all ranks of the group, in the same order, with agreeing arguments; a disagreement is found
/// before memory is touched (always over shm, with WorldOptions::check_collectives over gloo) and throws RuntimeFailure
/// that names op, sequence number and every rank's sizes. RuntimeFailure too when a rank dies or a wait times out.
/// Counts are elements or bytes as said, ≥ 0. Buffers do not overlap except where "in place" is said.
class Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }  // within the group
  int size() const { return static_cast<int>(ranks_.size()); }
  /// World ranks of the group, by group rank.
  const std::vector<int>& ranks() const { return ranks_; }
  const std::string& name() const { return name_; }
  virtual Transport transport() const = 0;

  /// recv: [W][bytes_per_rank]. In place: send == recv + rank * bytes_per_rank.
  void all_gather(const void* send, void* recv, std::int64_t bytes_per_rank, std::int64_t padding_bytes = 0);
  /// send: [W][count] elements, recv: [count] = sum over ranks of their send[rank]. In place: recv == send[rank].
  /// dtype: f32, bf16, i32.
  void reduce_scatter(const void* send, void* recv, std::int64_t count, DType dtype, std::int64_t padding_bytes = 0);
  /// In place when send == recv.
  void all_reduce(const void* send, void* recv, std::int64_t count, DType dtype, ReduceOp op = ReduceOp::sum,
                  std::int64_t padding_bytes = 0);
  void broadcast(void* data, std::int64_t bytes, int root);
  /// send: [W][bytes_per_rank], recv: [W][bytes_per_rank].
  void all_to_all(const void* send, void* recv, std::int64_t bytes_per_rank);
  /// A part for each peer (W each), wherever they lie; those of recv do not overlap. What is sent to p must be as much
  /// as p expects from here. `back`: what once was sent comes back, and counts as payload where it returns to: what is
  /// received.
  void all_to_all_v(const void* send, std::span<const CommPart> send_parts, void* recv,
                    std::span<const CommPart> recv_parts, bool back = false);
  /// The same of byte counts: parts lie one behind the other in rank order.
  void all_to_all_v(const void* send, std::span<const std::int64_t> send_bytes, void* recv,
                    std::span<const std::int64_t> recv_bytes, bool back = false);
  /// Counts an all-to-all in which no rank has anything to send, as all know without meeting.
  void note_empty_all_to_all() { count(CommOp::all_to_all, 0, 0, 0); }
  /// Blocks until the bytes may be overwritten, which may be when the peer has received them.
  void send(int peer, const void* data, std::int64_t bytes, std::int64_t padding_bytes = 0);
  void recv(int peer, void* data, std::int64_t bytes);
  /// Both at once, as rings need it: never deadlocks against the neighbours' send_recv. Either half meets a send, recv
  /// or send_recv of its peer. A rank that is its own peer, alone in its ring, copies.
  void send_recv(int to, const void* send_data, std::int64_t send_bytes, int from, void* recv_data,
                 std::int64_t recv_bytes, std::int64_t padding_bytes = 0);
  void barrier();

  /// The CUDA-IPC analogue: memory of shared region `region` (the index World::share gave, the same on every rank) of a
  /// peer, read without its help; the caller orders reads after the peer's writes (a barrier). nullptr where no memory
  /// is shared (gloo).
  virtual const std::byte* peer_pointer(int peer, int region, std::int64_t offset) const;
  /// Copies from there; RuntimeFailure where no memory is shared.
  void peer_read(int peer, int region, std::int64_t offset, void* dst, std::int64_t bytes);
  /// Counts one peer_read of `bytes` that the caller made itself through peer_pointer (strided reads).
  void note_peer_read(std::int64_t bytes) { count(CommOp::peer_read, bytes, 0, 0); }

  /// Calls from now on count under this tag (a phase id of the caller).
  void set_tag(int tag) { tag_.store(tag, std::memory_order_relaxed); }
  /// Rows in order of (tag, op), counted since the last call. From any thread.
  std::vector<CommTraffic> take_traffic();

 protected:
  Communicator(std::string name, std::vector<int> ranks, int rank);

  /// One call as the ranks must agree on it. Sizes of all_to_all may differ by rank and are not compared.
  struct Call {
    CommOp op;
    DType dtype = DType::u8;
    ReduceOp reduce = ReduceOp::sum;
    int root = -1;
    std::int64_t count = 0;      // elements of dtype
    std::uint64_t sequence = 0;  // per communicator, from 1; send and recv count per peer
  };
  /// "all_gather #17 of group fsdp (ranks 0, 1)"
  std::string describe(const Call&) const;
  /// RuntimeFailure, naming what each rank asked for, unless all calls (by group rank) agree with ours.
  void compare(const Call& ours, std::span<const Call> all) const;
  /// RuntimeFailure unless every rank is sent what it expects: W * W bytes each, sent [from][to] and expected
  /// [to][from].
  void compare_parts(const Call&, std::span<const std::int64_t> sent, std::span<const std::int64_t> expected) const;

  virtual void do_all_gather(const Call&, const std::byte* send, std::byte* recv, std::int64_t bytes) = 0;
  virtual void do_reduce_scatter(const Call&, const std::byte* send, std::byte* recv) = 0;
  virtual void do_all_reduce(const Call&, const std::byte* send, std::byte* recv) = 0;
  virtual void do_broadcast(const Call&, std::byte* data, std::int64_t bytes) = 0;
  virtual void do_all_to_all(const Call&, const std::byte* send, std::span<const CommPart> send_parts, std::byte* recv,
                             std::span<const CommPart> recv_parts) = 0;
  /// Either side may be absent: peer -1.
  virtual void do_send_recv(int to, const std::byte* send_data, std::int64_t send_bytes, int from, std::byte* recv_data,
                            std::int64_t recv_bytes) = 0;
  virtual void do_barrier(const Call&) = 0;
  /// What a rank sends to itself. Host memory, unless a communicator says otherwise.
  virtual void do_keep(std::byte* to, const std::byte* from, std::int64_t bytes);

 private:
  struct Cell {
    std::int64_t calls = 0, payload = 0, padding = 0, wire = 0;
  };
  Call next_call(CommOp op, DType dtype, std::int64_t count);
  void count(CommOp op, std::int64_t payload, std::int64_t padding, std::int64_t wire);
  void check_peer(int peer, const char* what) const;

  std::string name_;
  std::vector<int> ranks_;
  int rank_;
  std::uint64_t sequence_ = 0;
  std::atomic<int> tag_{0};
  std::mutex counters_mutex_;
  std::map<int, std::array<Cell, num_comm_ops>> counters_;
};

}  // namespace hotbunk
