// Collectives between ranks that are threads of one process on one device: copies and reduction kernels on each rank's
// own stream, ordered by events. NCCL refuses two ranks on one device; here every layout of several ranks runs on one.
//
// A call returns when all ranks of the group have enqueued their part; what it moves is done when the stream is. It
// meets the others on the host (who is late is known by name), and on the device waits for what the others enqueued.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "backends/cuda/launch.h"
#include "runtime/communicator.h"
#include "runtime/death_watch.h"

namespace hotbunk::cuda {

class LocalCommunicator final : public Communicator {
 public:
  class Group;
  static constexpr int most_ranks = 32;  // of one device

  /// Over device memory on this stream; without a launcher over host memory, done on return, and nothing is reduced.
  /// `stopped`: this rank's device ends, so that its streams wait for nobody any more.
  LocalCommunicator(std::string name, std::vector<int> ranks, int rank, std::shared_ptr<Group>, const DeathWatch&,
                    const std::atomic<bool>& stopped, std::optional<Launcher>);
  ~LocalCommunicator() override;

  Transport transport() const override { return size() == 1 ? Transport::solo : Transport::local; }

 private:
  struct Post;
  using Work = std::function<void(std::span<const Post>)>;

  void do_all_gather(const Call&, const std::byte* send, std::byte* recv, std::int64_t bytes) override;
  void do_reduce_scatter(const Call&, const std::byte* send, std::byte* recv) override;
  void do_all_reduce(const Call&, const std::byte* send, std::byte* recv) override;
  void do_broadcast(const Call&, std::byte* data, std::int64_t bytes) override;
  void do_all_to_all(const Call&, const std::byte* send, std::span<const CommPart> send_parts, std::byte* recv,
                     std::span<const CommPart> recv_parts) override;
  void do_send_recv(int to, const std::byte* send_data, std::int64_t send_bytes, int from, std::byte* recv_data,
                    std::int64_t recv_bytes) override;
  void do_barrier(const Call&) override;
  void do_keep(std::byte* to, const std::byte* from, std::int64_t bytes) override { copy(to, from, bytes); }

  /// All post, each works behind what all had enqueued before; nobody goes on before all have worked.
  void together(Post, const Work&);
  /// What this rank has enqueued so far is known to all; what it enqueues next comes behind theirs.
  std::vector<Post> meet(const Post&);
  void copy(std::byte* to, const std::byte* from, std::int64_t bytes) const;
  /// to[count] = the sum (or maximum) over ranks of from[rank], in rank order.
  void reduce(std::byte* to, std::span<const std::byte* const> from, std::int64_t count, const Call&) const;
  void record(CUevent) const;
  void wait(CUevent) const;
  template <class Ready>
  void until(const Ready&, const std::function<std::string()>& what, const std::function<std::vector<int>()>& missing);

  std::shared_ptr<Group> group_;
  const DeathWatch& watch_;
  const std::atomic<bool>& stopped_;
  std::optional<Launcher> launch_;
  std::uint64_t meetings_ = 0;
};

/// What the ranks of one process share: their groups, and where each keeps its device memory. Thread-safe.
class LocalRanks {
 public:
  /// The same object for all who name the same group.
  std::shared_ptr<LocalCommunicator::Group> group(const std::string& name, const std::vector<int>& ranks,
                                                  const Driver&);
  /// `scope` tells apart the plans that these ranks execute in turn.
  void set_arena(const std::string& scope, int rank, const std::byte* base);
  /// nullptr where that rank has none here.
  const std::byte* arena(const std::string& scope, int rank) const;

 private:
  mutable std::mutex mutex_;
  std::map<std::string, std::weak_ptr<LocalCommunicator::Group>> groups_;
  std::map<std::pair<std::string, int>, const std::byte*> arenas_;
};

}  // namespace hotbunk::cuda
