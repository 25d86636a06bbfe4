// A group over host memory, through the store that the ranks met at: for what ranks tell each other at set-up and at
// the end (gather_strings). All of it passes through rank 0.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "runtime/communicator.h"

namespace hotbunk::cuda {

/// Everyone of a group says a text under a key that is used once; returns what they said, by rank of the group.
using SayToGroup = std::function<std::vector<std::string>(const std::string& key, const std::string& mine)>;

/// all_gather and barrier; RuntimeFailure for the rest, which nothing asks for over host memory.
class StoreCommunicator final : public Communicator {
 public:
  StoreCommunicator(std::string name, std::vector<int> ranks, int rank, SayToGroup);

  Transport transport() const override { return Transport::nccl; }

 private:
  void do_all_gather(const Call&, const std::byte* send, std::byte* recv, std::int64_t bytes) override;
  void do_reduce_scatter(const Call&, const std::byte* send, std::byte* recv) override;
  void do_all_reduce(const Call&, const std::byte* send, std::byte* recv) override;
  void do_broadcast(const Call&, std::byte* data, std::int64_t bytes) override;
  void do_all_to_all(const Call&, const std::byte* send, std::span<const CommPart> send_parts, std::byte* recv,
                     std::span<const CommPart> recv_parts) override;
  void do_send_recv(int to, const std::byte* send_data, std::int64_t send_bytes, int from, std::byte* recv_data,
                    std::int64_t recv_bytes) override;
  void do_barrier(const Call&) override;
  [[noreturn]] void refuse(const Call&) const;

  const SayToGroup say_;
};

}  // namespace hotbunk::cuda
