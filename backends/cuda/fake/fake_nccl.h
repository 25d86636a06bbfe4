// A double of NCCL for processes that each have a double of the driver: the entry points of nccl_table.h. What a rank
// sends are files in a folder that all of them see (/dev/shm), one per message; a message waits at the head of its
// stream until those that it needs have come, as a kernel of NCCL does.
//
// It holds the callers to NCCL's rules: one rank per device, ids of one communicator, ranks that make the same calls in
// the same order with the same sizes, also of several communicators (two ranks launch what they share in one order),
// memory that is mapped when the stream comes to it, and that is unmapped only when no communicator has it registered.
// What breaks one is a finding of the driver's double. Calls are in progress first, as of a communicator that does not
// block. An asynchronous error can be asked for; the messages behind it come only when the communicator is aborted. The
// driver's double has the faults of these calls too (FakeDriver::fail_call, hang_call, fail_call_later): one that fails
// returns a system error.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "backends/cuda/fake/fake_driver.h"
#include "backends/cuda/nccl_table.h"

namespace hotbunk::cuda {

class FakeNccl {
 public:
  /// C entry points know no object: at most one per process is alive at a time. The driver's double outlives it.
  explicit FakeNccl(FakeDriver&);
  ~FakeNccl();
  FakeNccl(const FakeNccl&) = delete;
  FakeNccl& operator=(const FakeNccl&) = delete;

  Nccl table() const;
  static bool has_entry(const std::string& name);
  /// Whether a call of that entry point can fail later, when it has returned: it has a communicator.
  static bool may_fail_later(const std::string& name);
  /// The nth exchange from now on (1: the next) meets an asynchronous error.
  void fail_exchange(std::int64_t nth, NcclResult);
  /// How often each entry point was called.
  std::map<std::string, std::int64_t> calls() const;

  struct Entries;  // the entry points

 private:
  friend struct Entries;
  struct Comm;
  struct Message {
    int peer = 0;
    CUdeviceptr data = 0;
    std::size_t bytes = 0;
  };
  /// What is enqueued as one: a collective, or a group of sends and receives.
  struct Exchange {
    std::string name;
    Comm* comm = nullptr;
    CUstream stream = nullptr;
    std::vector<Message> sends, receives;
    std::vector<std::int64_t> sent, received;  // their numbers between the two ranks
    std::map<int, std::int64_t> launch;        // by peer: the how manieth with its process, of all comms
    std::vector<std::pair<std::string, std::string>> arrived;  // by receive: what the sender calls, and the bytes
    bool posted = false;
    NcclResult fault = NcclResult::success;  // that it meets
  };

  NcclResult init(NcclComm*, int size, const std::string& id, int rank);
  NcclResult split(Comm&, NcclComm*);
  NcclResult state(Comm&);
  void leave(Comm&);
  static void remove_files(const Comm&);
  NcclResult enqueue(Exchange);
  bool ready(Exchange&);
  std::vector<FakeDriver::Touch> run(Exchange&);
  /// Where rank's file of this kind is.
  static std::string file(const Comm&, const std::string& suffix);
  void check_memory(const Message&) const;
  /// "" or which communicator has memory of that range registered.
  std::string why_not_unmapped(CUdeviceptr begin, CUdeviceptr end) const;
  Comm* find(NcclComm);

  FakeDriver& driver_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Comm>> comms_;
  std::map<std::string, std::int64_t> calls_;
  std::int64_t exchanges_ = 0;
  std::map<int, std::int64_t> launches_;       // by process: exchanges with it, of all communicators
  std::map<std::int64_t, NcclResult> faults_;  // exchange -> what it meets
};

}  // namespace hotbunk::cuda
