// Collectives between processes, each with a device of its own, over NCCL. NCCL moves the bytes; sums are this
// backend's, in rank order (rank_sums.h), so that a run has the same bits over any transport: reductions are grouped
// sends and receives and one kernel, and what NCCL's own reductions could gain (trees, switches that add) is not taken.
//
// Nothing blocks inside NCCL: a communicator is made with blocking = 0, what is in progress is asked for, and while
// this rank waits it looks for errors of its communicators and for ranks that died. Then it aborts all of them: kernels
// that wait for the dead end, and so does the run.
#pragma once
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "backends/cuda/launch.h"
#include "backends/cuda/nccl_table.h"
#include "backends/cuda/registered_memory.h"
#include "backends/cuda/store_communicator.h"
#include "runtime/communicator.h"
#include "runtime/death_watch.h"

namespace hotbunk::cuda {

class NcclHandle;

/// What a call of NCCL's, or the first of several that failed, came to.
struct NcclCall {
  const char* entry;
  NcclResult result;
};

/// The communicators of one rank. Thread-safe.
class NcclRank {
 public:
  NcclRank(const Nccl& nccl, DeathWatch& watch) : nccl_(nccl), watch_(watch), memory_(nccl) {}
  ~NcclRank() { close(false); }
  NcclRank(const NcclRank&) = delete;
  NcclRank& operator=(const NcclRank&) = delete;

  const Nccl& nccl() const { return nccl_; }
  DeathWatch& watch() const { return watch_; }
  RegisteredMemory& memory() { return memory_; }
  /// Nothing, or aborts all communicators and throws RuntimeFailure: one of them has failed, or a rank has died.
  void look(std::string_view during);
  void abort_all();
  /// A communicator of these ranks; each of them calls it at the same time. From the second of the same ranks on it is
  /// split off the first. `say`: to them.
  std::shared_ptr<NcclHandle> communicator(const std::string& name, const std::vector<int>& ranks, int rank,
                                           const SayToGroup& say);
  /// The end: all of them wait for each other, or, unless all went well, give up.
  void close(bool all_well);

 private:
  const Nccl nccl_;
  DeathWatch& watch_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<NcclHandle>> handles_;
  RegisteredMemory memory_;
};

/// One communicator of NCCL. Calls come from one thread; abort() and error() from any.
class NcclHandle {
 public:
  /// Every rank of `ranks` calls it with the same id, or splits the same parent. RuntimeFailure when they do not come
  /// together; the parent outlives the split.
  NcclHandle(NcclRank&, std::string name, std::vector<int> ranks, int rank, const NcclId&);
  NcclHandle(NcclRank&, std::string name, NcclHandle& parent);
  /// It was closed or aborted.
  ~NcclHandle();
  NcclHandle(const NcclHandle&) = delete;
  NcclHandle& operator=(const NcclHandle&) = delete;

  /// Calls `enqueue` with the communicator, inside a group of NCCL, and waits until NCCL has taken it. RuntimeFailure
  /// names `what`, the group, the entry point and NCCL's reason. A call that does not return is a wait for the others.
  void call(const std::string& what, const std::function<NcclCall(NcclComm)>& enqueue);
  /// "" or why it cannot go on.
  std::string error();
  void abort();
  /// Or closed: whatever it had is gone.
  bool is_aborted();
  /// All of the group do so.
  void close();

  /// "WHAT of group fsdp (ranks 0, 1)"
  std::string of_group(const char* what) const;
  const std::vector<int>& ranks() const { return ranks_; }
  NcclRank& owner() const { return owner_; }

 private:
  /// Waits while a call is in progress. With what the call returned.
  void settle(NcclCall, const std::string& what);
  std::vector<int> others() const;
  std::string text_of(NcclResult) const;

  NcclRank& owner_;
  const std::string name_;
  const std::vector<int> ranks_;  // of the world
  const int rank_;                // in the group
  std::mutex mutex_;
  NcclComm comm_ = nullptr;
  bool aborted_ = false;
};

struct NcclOptions {
  std::function<void()> wait_for_stream;
  SayToGroup check{};  // where given: op, count and dtype are compared across the group before each collective
  /// Of parts that are to be summed, device memory beside the plan's; beyond, a sum goes in pieces. Which is best was
  /// never measured.
  std::int64_t most_scratch_bytes = std::int64_t{32} << 20;
};

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(std::string name, std::vector<int> ranks, int rank, std::shared_ptr<NcclHandle>, const Launcher&,
                   NcclOptions);
  ~NcclCommunicator() override;

  Transport transport() const override { return Transport::nccl; }

 private:
  struct Part {
    std::byte* data;
    std::int64_t bytes;
  };
  /// `send` and `recv` by rank of the group; own parts and empty ones stay out.
  void exchange(const std::string& what, std::span<const Part> send, std::span<const Part> recv);
  /// recv[count] = the reduction of all ranks' send + begin, of `ranges` [begin, end) by rank, this rank's.
  void reduce_own(const Call&, const std::byte* send, std::byte* recv, std::span<const ChunkRange> ranges);
  std::byte* scratch(std::int64_t bytes);
  void drop_scratch();
  void agree(const Call&);
  /// NCCL is about to read or write it (registered_memory.h).
  void in_place(const std::byte* at, std::int64_t bytes);
  void copy(std::byte* to, const std::byte* from, std::int64_t bytes) const;

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

  const std::shared_ptr<NcclHandle> handle_;
  const Launcher launch_;
  const NcclOptions options_;
  std::optional<DeviceBlock> scratch_;  // parts that are to be summed; never unmapped, so it may be registered
  void* registered_ = nullptr;
};

}  // namespace hotbunk::cuda
