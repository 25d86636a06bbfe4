// A double of the CUDA driver: the entry points of driver.h over host memory. It runs the kernels' own PTX (ptx/) and
// checks what the host side did with them.
//
//   addresses  device memory is reserved without access and mapped from memfds: a pointer that is not mapped, or the
//              host's own, is no device memory; a capacity is a capacity
//   streams    nothing runs when it is enqueued. A seeded scheduler picks among what streams and events allow, as late
//              as it can: what only works by luck of timing fails by some seed
//   order      every copy, fill and kernel has a vector clock; two that touch the same bytes, one of them writing, must
//              be ordered by streams, events or the waiting of a host thread, whatever order they ran in. Each host
//              thread knows what it has waited for, and what another one has told it (Driver::host_knows); what it does
//              with the host's memory itself it says (Driver::host_touches), and that is ordered likewise
//   processes  memory that another process exported is its memory file: an owner that unmaps it while a reader has it
//              mapped, and a reader that still uses it then, are findings
//   graphs     a stream that captures runs nothing; a graph's launch enqueues what was captured, in its order, and is
//              checked when it runs as all else is: memory that was unmapped meanwhile is no device memory
//   faults     a chosen call of an entry point returns an error, or never returns
//
// A finding makes the call that met it return CUDA_ERROR_LAUNCH_FAILED, and every later one: errors of a context stick.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "backends/cuda/driver.h"
#include "backends/cuda/fake/touched_bytes.h"
#include "backends/cuda/ptx/machine.h"

namespace hotbunk::cuda {

/// Parsed PTX by its text, for doubles that load the same. Thread-safe.
class PtxModules {
 public:
  /// Throws ptx::UnknownPtx.
  std::shared_ptr<const ptx::Module> parsed(const std::string& text);

 private:
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<const ptx::Module>> modules_;
};

struct FakeOptions {
  std::int64_t memory_bytes = std::int64_t{256} << 20;
  std::uint64_t seed = 1;
  /// Of physical memory. 2 MiB on every GPU so far; smaller ones tell neighbours in a small arena apart.
  std::int64_t granularity_bytes = std::int64_t{2} << 20;
  std::shared_ptr<PtxModules> modules = std::make_shared<PtxModules>();
  /// 90 of sm_90.
  int compute_capability = 90;
  /// Whether memory can be made that network adapters reach (GPUDirect RDMA).
  bool rdma = true;
  /// Whether bytes, sectors and passes over banks are counted, which takes time (kernel_counts).
  bool count_traffic = false;
};

class FakeDriver {
 public:
  /// C entry points know no object: at most one double per process is alive at a time.
  explicit FakeDriver(FakeOptions = {});
  ~FakeDriver();
  FakeDriver(const FakeDriver&) = delete;
  FakeDriver& operator=(const FakeDriver&) = delete;

  Driver table() const;
  /// Whether the table has an entry point of this name.
  static bool has_entry(const std::string& name);
  /// What was found so far, oldest first; each names the tasks or the call.
  std::vector<std::string> findings() const;
  /// The nth call from now on (1: the next) of that entry point returns `error`; `never_returns`: it does not, until
  /// the double is gone.
  void fail_call(const std::string& entry, std::int64_t nth, CUresult error);
  void hang_call(const std::string& entry, std::int64_t nth);
  /// Of NCCL's calls: that one returns as if all were well, and its communicator has an asynchronous error from then
  /// on.
  void fail_call_later(const std::string& entry, std::int64_t nth);
  /// How many of those calls came.
  std::int64_t faults_met() const;
  /// How often each entry point was called.
  std::map<std::string, std::int64_t> calls() const;
  std::int64_t mapped_bytes() const;
  std::int64_t tasks_run() const { return tasks_run_; }
  /// What a kernel's launches asked for so far, and the bytes that they touched, in words of four, each once a launch.
  struct KernelCounts {
    std::int64_t launches = 0, touched_bytes = 0;
    ptx::Counters counters;
  };
  std::map<std::string, KernelCounts> kernel_counts() const;
  /// A host thread is inside of a call that returns only when a stream has come to its end. For the double of NCCL,
  /// under this one's lock.
  bool host_blocks() const { return blocking_ > 0; }

  struct Entries;  // the entry points (fake_entries.cc)

  /// Bytes that a task reads or writes.
  struct Touch {
    std::uint64_t begin = 0, end = 0;
    bool write = false;
  };
  /// Enqueues what waits for other processes: `ready` is asked, at the head of the stream, until it says so; then `run`
  /// does the rest. For the double of NCCL. Both are called with this double locked; what they throw is a finding.
  CUresult enqueue_exchange(CUstream, const std::string& name, std::function<bool()> ready,
                            std::function<std::vector<Touch>()> run);
  /// Enqueues work of another library that runs at once when its turn comes; a stream that captures takes it into its
  /// graph. For the double of cuBLASLt. `run` is called with this double locked; what it throws is a finding.
  CUresult enqueue_work(CUstream, const std::string& name, std::function<std::vector<Touch>()> run);
  /// Another library's entry point is called: counted, and what was put there happens, as to the driver's own; the
  /// error that it returns, CUDA_SUCCESS to go on.
  CUresult other_call(const std::string& entry);
  /// The same of a library that goes on when the context has an error, since it must be closed then: the double of
  /// NCCL. Returns, or not at all, with what the call comes to.
  enum class Fate : std::uint8_t { goes_on, fails, fails_later };
  Fate fate_of_call(const std::string& entry);
  /// What was enqueued, or will be, is dropped when its turn comes: a collective was aborted, and what is behind it
  /// would compute with bytes that never came.
  void give_up();
  /// For them: "" or why [begin, begin + bytes) is no device memory; and the double knows that it was written.
  std::string why_no_device_memory(CUdeviceptr begin, std::size_t bytes);
  void mark_written(CUdeviceptr begin, std::size_t bytes);
  /// Memory is about to be registered with NCCL: a finding where it is none, or was not made for network adapters.
  CUresult check_registered(CUdeviceptr begin, std::size_t bytes);
  /// Asked, with this double locked, before [begin, end) is unmapped: "" or who still has it, which is a finding. For
  /// the double of NCCL.
  void ask_before_unmap(std::function<std::string(CUdeviceptr begin, CUdeviceptr end)>);
  /// Whether all of it, device memory, was written.
  bool was_written(CUdeviceptr begin, std::size_t bytes);

 private:
  friend struct Entries;
  struct Fault {
    CUresult error = CUDA_SUCCESS;
    bool hangs = false, later = false;
  };
  void put_fault(const std::string& entry, std::int64_t nth, Fault);
  /// What was put at this call, met: with one that hangs it does not return until the double is gone.
  std::optional<Fault> fault_at(const std::string& entry, std::unique_lock<std::mutex>&);
  CUresult met(const std::string& entry, std::unique_lock<std::mutex>&);

  struct Task {
    std::int32_t name = 0;
    std::function<std::vector<Touch>()> run;  // none: an event's record or wait
    std::function<bool()> ready;              // none: at once
    std::int64_t sequence = 0;                // in its stream
    Clock clock;                              // what is done before it
    std::int64_t event = 0, version = 0;      // of a record or a wait
    bool waits = false;
  };
  struct Stream {
    std::int32_t number = 0;  // its place in a clock
    std::deque<Task> queue;
    std::int64_t issued = 0;
    Clock clock;                // of the next task
    std::int64_t captures = 0;  // the graph that takes what is enqueued; 0: none, it will run
  };
  /// What was captured, in order. A kernel's parameters are those of the capture.
  struct Node {
    std::string name;
    std::function<std::vector<Touch>()> run;
  };
  using Graph = std::vector<Node>;
  struct Event {
    std::int64_t issued = 0, done = 0;  // records
    Clock clock;                        // of the last one
    std::int64_t done_ns = 0;           // when that one ran
  };
  /// What the processes that share a piece of memory say to each other, in a page behind it.
  struct SharedState;
  static SharedState* shared_state(int file, std::int64_t bytes);
  struct Physical {
    int file = -1;
    std::int64_t bytes = 0, maps = 0;
    bool released = false;
    std::int64_t retained = 0;      // handles beside the first
    SharedState* shared = nullptr;  // of memory that other processes may be given
    bool imported = false;          // it is another process's, and no memory of this device
    bool rdma = false;              // network adapters reach it
  };
  struct Mapping {
    std::int64_t bytes = 0;
    CUmemGenericAllocationHandle physical = 0;
    bool accessible = false;
  };
  /// Parsed when its first kernel is asked for.
  struct Library {
    std::string text;
    std::shared_ptr<const ptx::Module> module{};
    std::unique_ptr<ptx::Machine> machine{};
  };
  struct KernelHandle {
    std::int64_t library = 0;
    std::string name;
  };

  CUresult found(std::string what);
  /// "" or why what was read or written of another process's memory is no longer that process's.
  std::string why_stale(const std::vector<Touch>&) const;
  // memory (fake_memory.cc)
  CUresult reserve(CUdeviceptr*, std::size_t);
  CUresult free_address(CUdeviceptr, std::size_t);
  CUresult create(CUmemGenericAllocationHandle*, std::size_t, bool shareable, bool rdma);
  CUresult retain_handle(CUmemGenericAllocationHandle*, CUdeviceptr);
  CUresult export_handle(int*, CUmemGenericAllocationHandle);
  CUresult import_handle(CUmemGenericAllocationHandle*, int file);
  std::int64_t own_bytes() const;
  CUresult release(CUmemGenericAllocationHandle);
  CUresult map(CUdeviceptr, std::size_t, std::size_t offset, CUmemGenericAllocationHandle);
  CUresult unmap(CUdeviceptr, std::size_t);
  CUresult set_access(CUdeviceptr, std::size_t);
  CUresult host_alloc(void**, std::size_t);
  CUresult host_free(void*);
  CUresult host_register(void*, std::size_t);
  CUresult host_unregister(void*);
  void destroy_if_unused(CUmemGenericAllocationHandle);
  bool is_pinned(const void*, std::size_t) const;
  // streams (fake_streams.cc)
  Stream* stream(CUstream);
  /// Or into the graph that the stream captures.
  CUresult enqueue(CUstream, const std::string& name, std::function<std::vector<Touch>()> run,
                   std::function<bool()> ready = {});
  CUresult record(CUevent, CUstream);
  CUresult wait(CUstream, CUevent);
  CUresult drain(const std::function<bool()>& done);
  bool run_one();
  bool ready(const Stream&);
  void note(const Stream&, const Task&, const std::vector<Touch>&);
  Clock& host() { return hosts_[this_thread()].clock; }
  /// A number of the calling thread's own, which no later thread gets: an id may come again.
  static std::int64_t this_thread();
  /// A host thread's own access to the host's memory.
  void host_touches(const std::string& name, std::uint64_t begin, std::uint64_t end, bool write);
  /// 'name' and where it ran, of a finding.
  std::string said(const TouchedBytes::Toucher&) const;
  CUresult synchronize(std::int64_t stream);
  CUresult query(std::int64_t stream);
  CUresult synchronize_event(std::int64_t event);
  /// Runs a random few of what could run: a driver may begin at any time.
  void let_some_run();
  std::vector<Touch> launched(const KernelHandle&, const ptx::Launch&);
  // graphs (fake_graphs.cc)
  CUresult begin_capture(CUstream);
  CUresult end_capture(CUstream, CUgraph*);
  CUresult instantiate(CUgraphExec*, CUgraph);
  CUresult launch_graph(CUgraphExec, CUstream);
  /// A finding where the stream captures: what only a stream that runs can do.
  bool captures(const Stream&, const char* call);

  FakeOptions options_;
  mutable std::mutex mutex_;
  std::condition_variable gone_;  // for calls that never return
  bool going_ = false, gave_up_ = false;
  std::int64_t hanging_ = 0;
  std::uint64_t draws_ = 0;
  CUresult sticky_ = CUDA_SUCCESS;
  std::vector<std::string> findings_;
  std::int64_t faults_met_ = 0;
  std::map<std::string, std::map<std::int64_t, Fault>> faults_;  // entry -> call -> what happens
  std::map<std::string, std::int64_t> calls_;
  std::int64_t next_handle_ = 1, tasks_run_ = 0;
  ptx::DeviceMemory memory_;
  std::map<CUdeviceptr, std::int64_t> reserved_;
  std::map<CUmemGenericAllocationHandle, Physical> physical_;
  std::map<CUdeviceptr, Mapping> mappings_;
  struct Pinned {
    std::int64_t bytes = 0;
    bool owned = false;  // by the double: cuMemHostAlloc
  };
  std::map<std::uint64_t, Pinned> pinned_;
  std::map<std::int64_t, Stream> streams_;
  std::map<std::int64_t, Event> events_;
  std::map<std::int64_t, Library> libraries_;
  std::map<std::int64_t, KernelHandle> kernels_;
  std::map<std::int64_t, Graph> graphs_, instances_;
  TouchedBytes touched_;
  std::int32_t num_streams_ = 0;  // ever, and host threads that touched memory
  std::int64_t blocking_ = 0;
  std::map<std::string, KernelCounts> kernel_counts_;
  struct HostThread {
    Clock clock;               // what it knows to be done
    std::int32_t number = -1;  // its place in clocks, once it has touched the host's memory itself
    std::int64_t touches = 0;
  };
  std::map<std::int64_t, HostThread> hosts_;  // by this_thread()
  std::set<std::int32_t> host_numbers_;
  std::function<std::string(CUdeviceptr, CUdeviceptr)> before_unmap_;
};

}  // namespace hotbunk::cuda
