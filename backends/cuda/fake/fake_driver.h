// A double of the CUDA driver: the entry points of driver.h over host memory. It runs the kernels' own PTX (ptx/) and
// checks what the host side did with them.
//
//   addresses  device memory is reserved without access and mapped from memfds: a pointer that is not mapped, or the
//              host's own, is no device memory; a capacity is a capacity
//   streams    nothing runs when it is enqueued. A seeded scheduler picks among what streams and events allow, as late
//              as it can: what only works by luck of timing fails by some seed
//   order      every copy, fill and kernel has a vector clock; two that touch the same bytes, one of them writing, must
//              be ordered by streams, events or the host's waiting, whatever order they ran in
//   faults     a chosen call of an entry point returns an error
//
// A finding makes the call that met it return CUDA_ERROR_LAUNCH_FAILED, and every later one: errors of a context stick.
#pragma once
#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backends/cuda/driver.h"
#include "backends/cuda/ptx/machine.h"

namespace hotbunk::cuda {

struct FakeOptions {
  std::int64_t memory_bytes = std::int64_t{256} << 20;
  std::uint64_t seed = 1;
};

/// What is known to be done: the last task of each stream.
using Clock = std::map<std::int32_t, std::int64_t>;

class FakeDriver {
 public:
  /// C entry points know no object: at most one double per process is alive at a time.
  explicit FakeDriver(FakeOptions = {});
  ~FakeDriver();
  FakeDriver(const FakeDriver&) = delete;
  FakeDriver& operator=(const FakeDriver&) = delete;

  Driver table() const;
  /// What was found so far, oldest first; each names the tasks or the call.
  const std::vector<std::string>& findings() const { return findings_; }
  /// The nth call from now on (1: the next) of that entry point returns `error`.
  void fail_call(const std::string& entry, std::int64_t nth, CUresult error);
  std::int64_t mapped_bytes() const;
  std::int64_t tasks_run() const { return tasks_run_; }

  struct Entries;  // the entry points (fake_entries.cc)

 private:
  friend struct Entries;

  /// Bytes that a task reads or writes.
  struct Touch {
    std::uint64_t begin = 0, end = 0;
    bool write = false;
  };
  struct Task {
    std::string name;
    std::function<std::vector<Touch>()> run;  // none: an event's record or wait
    std::int64_t sequence = 0;                // in its stream
    Clock clock;                              // what is done before it
    std::int64_t event = 0, version = 0;      // of a record or a wait
    bool waits = false;
  };
  struct Stream {
    std::deque<Task> queue;
    std::int64_t issued = 0;
    Clock clock;  // of the next task
  };
  struct Event {
    std::int64_t issued = 0, done = 0;     // records
    std::map<std::int64_t, Clock> clocks;  // by record
  };
  struct Physical {
    int file = -1;
    std::int64_t bytes = 0, maps = 0;
    bool released = false;
  };
  struct Mapping {
    std::int64_t bytes = 0;
    CUmemGenericAllocationHandle physical = 0;
    bool accessible = false;
  };
  /// The last tasks that touched some bytes.
  struct Access {
    std::uint64_t end = 0;
    std::int32_t stream = 0;
    std::int64_t sequence = 0;
    std::string name;
    bool write = false;
  };
  struct Library {
    ptx::Module module;
    std::unique_ptr<ptx::Machine> machine;
  };
  struct KernelHandle {
    std::int64_t library = 0;
    std::string name;
  };

  CUresult found(std::string what);
  // memory (fake_memory.cc)
  CUresult reserve(CUdeviceptr*, std::size_t);
  CUresult free_address(CUdeviceptr, std::size_t);
  CUresult create(CUmemGenericAllocationHandle*, std::size_t);
  CUresult release(CUmemGenericAllocationHandle);
  CUresult map(CUdeviceptr, std::size_t, std::size_t offset, CUmemGenericAllocationHandle);
  CUresult unmap(CUdeviceptr, std::size_t);
  CUresult set_access(CUdeviceptr, std::size_t);
  CUresult host_alloc(void**, std::size_t);
  CUresult host_free(void*);
  void destroy_if_unused(CUmemGenericAllocationHandle);
  bool is_pinned(const void*, std::size_t) const;
  /// Empty when [begin, begin + bytes) is mapped device memory.
  std::string why_no_device_memory(CUdeviceptr begin, std::size_t bytes);
  // streams (fake_streams.cc)
  Stream* stream(CUstream);
  CUresult enqueue(CUstream, std::string name, std::function<std::vector<Touch>()> run);
  CUresult record(CUevent, CUstream);
  CUresult wait(CUstream, CUevent);
  CUresult drain(const std::function<bool()>& done);
  bool run_one();
  bool ready(const Stream&) const;
  void note(std::int32_t stream, const Task&, const std::vector<Touch>&);
  void host_saw(const Clock&);
  CUresult synchronize(std::int64_t stream);
  CUresult synchronize_event(std::int64_t event);
  /// Runs a random few of what could run: a driver may begin at any time.
  void let_some_run();
  std::vector<Touch> launched(const KernelHandle&, const ptx::Launch&);

  FakeOptions options_;
  std::mutex mutex_;
  std::uint64_t draws_ = 0;
  CUresult sticky_ = CUDA_SUCCESS;
  std::vector<std::string> findings_;
  std::map<std::string, std::map<std::int64_t, CUresult>> faults_;  // entry -> call -> error
  std::map<std::string, std::int64_t> calls_;
  std::int64_t next_handle_ = 1, tasks_run_ = 0;
  ptx::DeviceMemory memory_;
  std::map<CUdeviceptr, std::int64_t> reserved_;
  std::map<CUmemGenericAllocationHandle, Physical> physical_;
  std::map<CUdeviceptr, Mapping> mappings_;
  std::map<std::uint64_t, std::int64_t> pinned_;
  std::map<std::int64_t, Stream> streams_;
  std::map<std::int64_t, Event> events_;
  std::map<std::int64_t, Library> libraries_;
  std::map<std::int64_t, KernelHandle> kernels_;
  std::multimap<std::uint64_t, Access> accesses_;  // by begin
  Clock host_;
};

}  // namespace hotbunk::cuda
