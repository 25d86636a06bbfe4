// Collectives over TCP with gloo, for ranks of several hosts and as the cross-check of the shared-memory transport.
//
// Debian's gloo has no reduce-scatter, and its all-reduce adds in ring order. Here every collective is built from
// gloo's unbound buffers: each rank sends each peer exactly what that peer needs (the ring's volume, in one hop), and
// sums are taken in rank order. Broadcast is a pipelined chain. Waits end when the watch knows of a death, or that
// nobody works any more (stall.h), and aborts them: gloo's own timeouts are never reached.
#pragma once
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "runtime/communicator.h"

namespace gloo {
class Context;
namespace transport {
class UnboundBuffer;
class Device;
}  // namespace transport
}  // namespace gloo

namespace hotbunk {

class DeathWatch;
class TcpStore;

struct GlooOptions {
  bool check_collectives = false;  // compare op, count and dtype across the group before each collective
};

/// The device of this process: listens on `address` (our own, numeric). Throws RuntimeFailure.
std::shared_ptr<gloo::transport::Device> make_gloo_device(const std::string& address);

class GlooCommunicator final : public Communicator {
 public:
  /// Connects to the others through the store (keys under `name` and the ranks) and warms the connections up.
  GlooCommunicator(std::string name, std::vector<int> ranks, int rank, std::shared_ptr<gloo::transport::Device>,
                   TcpStore&, DeathWatch&, const GlooOptions&);
  ~GlooCommunicator() override;

  Transport transport() const override { return Transport::gloo; }

 private:
  /// `bytes` at `data`, to or from a group rank.
  struct Transfer {
    int peer;
    std::int64_t offset, bytes;
  };
  class Pending;

  /// Sends and receives all of them at once and waits. Transfers of 0 bytes are left out on both sides.
  void transfer(const std::string& what, std::uint64_t slot, const std::byte* send, std::span<const Transfer> sends,
                std::byte* recv, std::span<const Transfer> recvs);
  void warm_up();
  void check_agreement(const Call&);
  void check_parts(const Call&, std::span<const std::int64_t> send_bytes, std::span<const std::int64_t> recv_bytes);
  /// own [chunk of this rank] = sum over ranks of the same chunk; chunks: by group rank, element ranges of `send`.
  void reduce_chunks(const Call&, const std::byte* send, std::span<const ChunkRange> chunks, std::byte* own);
  [[noreturn]] void fail(const std::string& what, const std::string& why);
  void abort_waits();
  std::uint64_t next_slot() { return ++slot_; }

  void do_all_gather(const Call&, const std::byte* send, std::byte* recv, std::int64_t bytes) override;
  void do_reduce_scatter(const Call&, const std::byte* send, std::byte* recv) override;
  void do_all_reduce(const Call&, const std::byte* send, std::byte* recv) override;
  void do_broadcast(const Call&, std::byte* data, std::int64_t bytes) override;
  void do_all_to_all(const Call&, const std::byte* send, std::span<const CommPart> send_parts, std::byte* recv,
                     std::span<const CommPart> recv_parts) override;
  void do_send_recv(int to, const std::byte* send_data, std::int64_t send_bytes, int from, std::byte* recv_data,
                    std::int64_t recv_bytes) override;
  void do_barrier(const Call&) override;

  GlooOptions options_;
  DeathWatch& watch_;
  std::shared_ptr<gloo::Context> context_;
  std::uint64_t slot_ = 0;  // of collectives: the same on every rank
  std::mutex waits_mutex_;
  std::vector<gloo::transport::UnboundBuffer*> waits_;  // buffers that this rank may be waiting on
  int death_token_ = 0;
  std::vector<std::byte> staging_;
};

}  // namespace hotbunk
