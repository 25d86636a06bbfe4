#include "backends/cuda/fake/fake_nccl.h"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <system_error>
#include <tuple>
#include <utility>

#include "base/check.h"

namespace hotbunk::cuda {
namespace {

namespace fs = std::filesystem;

std::atomic<FakeNccl*> alive_nccl{nullptr};

/// Of this thread's call at hand: the error that its communicator has when it has returned.
thread_local NcclResult error_behind_call = NcclResult::success;

/// Whole when it is there under its name.
void write_whole(const std::string& path, const std::string& header, const void* data, std::size_t bytes) {
  const std::string draft = fmt::format("{}.draft{}", path, ::getpid());
  std::ofstream out(draft, std::ios::binary);
  out << header << '\n';
  out.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
  out.close();
  if (!out) throw RuntimeFailure(fmt::format("the double of NCCL cannot write {}", draft));
  std::error_code failed;
  fs::rename(draft, path, failed);
  // A rank that aborts removes all files, drafts too: then nobody reads this one.
  if (failed && failed != std::errc::no_such_file_or_directory)
    throw RuntimeFailure(fmt::format("the double of NCCL cannot write {}: {}", path, failed.message()));
}

/// Its header, and what is behind it.
std::pair<std::string, std::string> read_whole(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::string header;
  std::getline(in, header);
  return {header, std::string(std::istreambuf_iterator<char>(in), {})};
}

}  // namespace

struct FakeNccl::Comm {
  std::string id;  // of the files
  int size = 0, rank = 0;
  bool complete = false, aborted = false, gone = false;
  int in_progress = 0;  // so many looks at its state say so
  NcclResult error = NcclResult::success;
  std::int64_t splits = 0, pending = 0;
  Comm* child = nullptr;  // a split that is not complete
  NcclComm* child_out = nullptr;
  std::vector<int> processes;                // by rank
  std::vector<std::int64_t> sent, received;  // messages, by peer
  std::map<void*, std::size_t> registered;
};

FakeNccl::FakeNccl(FakeDriver& driver) : driver_(driver) {
  driver_.ask_before_unmap([this](CUdeviceptr begin, CUdeviceptr end) {
    const std::lock_guard lock(mutex_);
    return why_not_unmapped(begin, end);
  });
  FakeNccl* none = nullptr;
  HB_CHECK(alive_nccl.compare_exchange_strong(none, this), "a double of NCCL is alive already");
}

FakeNccl::~FakeNccl() {
  for (const auto& comm : comms_)
    if (!comm->gone) leave(*comm);
  driver_.ask_before_unmap({});
  alive_nccl.store(nullptr);
}

std::string FakeNccl::file(const Comm& comm, const std::string& suffix) {
  return fmt::format("/dev/shm/hotbunk-nccl-{}.{}", comm.id, suffix);
}

std::string FakeNccl::why_not_unmapped(CUdeviceptr begin, CUdeviceptr end) const {
  for (const auto& comm : comms_) {
    if (comm->gone) continue;
    for (const auto& [data, bytes] : comm->registered) {
      const auto at = reinterpret_cast<CUdeviceptr>(data);
      if (at < end && begin < at + bytes)
        return fmt::format("a communicator of {} ranks still has [{:#x}, +{}) registered", comm->size, at, bytes);
    }
  }
  return "";
}

FakeNccl::Comm* FakeNccl::find(NcclComm handle) {
  for (const auto& comm : comms_)
    if (comm.get() == reinterpret_cast<Comm*>(handle)) return comm.get();
  return nullptr;
}

NcclResult FakeNccl::init(NcclComm* out, int size, const std::string& id, int rank) {
  if (size < 1 || rank < 0 || rank >= size) return NcclResult::invalid_argument;
  auto comm = std::make_unique<Comm>();
  comm->id = id, comm->size = size, comm->rank = rank;
  comm->sent.resize(static_cast<std::size_t>(size)), comm->received = comm->sent;
  if (fs::exists(file(*comm, fmt::format("r{}", rank)))) return NcclResult::invalid_usage;  // that rank is taken
  write_whole(file(*comm, fmt::format("r{}", rank)), fmt::format("{} {}", size, ::getpid()), nullptr, 0);
  *out = reinterpret_cast<NcclComm>(comm.get());
  comms_.push_back(std::move(comm));
  return NcclResult::in_progress;
}

NcclResult FakeNccl::split(Comm& parent, NcclComm* out) {
  NcclComm made = nullptr;
  const NcclResult r = init(&made, parent.size, fmt::format("{}s{}", parent.id, ++parent.splits), parent.rank);
  parent.child = find(made), parent.child_out = out;
  return r;
}

NcclResult FakeNccl::state(Comm& comm) {
  if (comm.error != NcclResult::success) return comm.error;
  if (!comm.complete) {
    std::vector<std::string> seen;
    for (int r = 0; r < comm.size; ++r) {
      const std::string path = file(comm, fmt::format("r{}", r));
      if (!fs::exists(path)) return NcclResult::in_progress;
      seen.push_back(read_whole(path).first);
    }
    for (std::size_t r = 0; r < seen.size(); ++r) {
      // As NCCL says it: "Duplicate GPU detected".
      for (std::size_t before = 0; before < r; ++before)
        if (seen[before] == seen[r]) return comm.error = NcclResult::invalid_usage;
      if (std::stoi(seen[r]) != comm.size) return comm.error = NcclResult::invalid_usage;
    }
    for (const std::string& s : seen) comm.processes.push_back(std::stoi(s.substr(s.find(' '))));
    comm.complete = true;
  }
  if (comm.child != nullptr) {
    const NcclResult child = state(*comm.child);
    if (child != NcclResult::success) return child;
    *comm.child_out = reinterpret_cast<NcclComm>(std::exchange(comm.child, nullptr));
  }
  if (comm.in_progress > 0) {
    --comm.in_progress;
    return NcclResult::in_progress;
  }
  return NcclResult::success;
}

void FakeNccl::leave(Comm& comm) {
  comm.gone = true;
  write_whole(file(comm, fmt::format("d{}", comm.rank)), "", nullptr, 0);
  for (int r = 0; r < comm.size; ++r) {
    if (fs::exists(file(comm, fmt::format("d{}", r)))) continue;
    const std::string present = read_whole(file(comm, fmt::format("r{}", r))).first;
    const auto space = present.find(' ');
    if (space == std::string::npos || ::kill(std::stoi(present.substr(space)), 0) == 0) return;  // it comes, or lives
  }
  remove_files(comm);  // the last one out
}

void FakeNccl::remove_files(const Comm& comm) {
  const std::string prefix = fs::path(file(comm, "")).filename().string();
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator("/dev/shm", ignored))
    if (entry.path().filename().string().starts_with(prefix)) fs::remove(entry.path(), ignored);
}

void FakeNccl::check_memory(const Message& m) const {
  if (const std::string why = driver_.why_no_device_memory(m.data, m.bytes); !why.empty()) throw RuntimeFailure(why);
}

NcclResult FakeNccl::enqueue(Exchange made) {
  Comm& comm = *made.comm;
  if (comm.gone || comm.aborted || !comm.complete) return NcclResult::invalid_usage;
  for (const Message& m : made.sends) made.sent.push_back(comm.sent[static_cast<std::size_t>(m.peer)]++);
  for (const Message& m : made.receives) made.received.push_back(comm.received[static_cast<std::size_t>(m.peer)]++);
  for (const auto* side : {&made.sends, &made.receives})
    for (const Message& m : *side) made.launch.try_emplace(m.peer, 0);
  for (auto& [peer, number] : made.launch) number = ++launches_[comm.processes[static_cast<std::size_t>(peer)]];
  comm.in_progress = 1;
  ++comm.pending;
  if (const auto fault = faults_.find(++exchanges_); fault != faults_.end()) made.fault = fault->second;
  if (error_behind_call != NcclResult::success) made.fault = std::exchange(error_behind_call, NcclResult::success);
  const auto exchange = std::make_shared<Exchange>(std::move(made));
  const std::string name = fmt::format("{} of rank {} of {}", exchange->name, comm.rank, comm.size);
  const CUstream stream = exchange->stream;
  // Of the driver, which calls back with its own lock held: not under this one.
  mutex_.unlock();
  const CUresult r = driver_.enqueue_exchange(
      stream, name,
      [this, exchange] {
        const std::lock_guard lock(mutex_);
        return ready(*exchange);
      },
      [this, exchange] {
        const std::lock_guard lock(mutex_);
        return run(*exchange);
      });
  mutex_.lock();
  return r == CUDA_SUCCESS ? NcclResult::in_progress : NcclResult::unhandled_cuda_error;
}

bool FakeNccl::ready(Exchange& e) {
  Comm& comm = *e.comm;
  if (e.fault != NcclResult::success) comm.error = e.fault;
  if (comm.error != NcclResult::success && driver_.host_blocks() && !comm.aborted)
    throw RuntimeFailure("the host waits for a stream whose communicator has failed and was not aborted");
  if (comm.error != NcclResult::success) return false;
  if (!std::exchange(e.posted, true))
    for (std::size_t i = 0; i < e.sends.size(); ++i) {
      const Message& m = e.sends[i];
      check_memory(m);
      write_whole(file(comm, fmt::format("{}.{}.{}", e.sent[i], comm.rank, m.peer)),
                  fmt::format("{} {}", e.launch.at(m.peer), e.name), reinterpret_cast<const void*>(m.data), m.bytes);
    }
  e.arrived.resize(e.receives.size());
  bool all = true;
  for (std::size_t i = 0; i < e.receives.size(); ++i) {
    auto& [name, data] = e.arrived[i];
    const std::string path = file(comm, fmt::format("{}.{}.{}", e.received[i], e.receives[i].peer, comm.rank));
    if (name.empty() && fs::exists(path)) {
      std::tie(name, data) = read_whole(path);  // "": another rank has aborted, and removed it
      std::error_code gone;
      fs::remove(path, gone);
    }
    all = all && !name.empty();
  }
  return all;
}

std::vector<FakeDriver::Touch> FakeNccl::run(Exchange& e) {
  Comm& comm = *e.comm;
  --comm.pending;
  std::vector<FakeDriver::Touch> touched;
  for (const Message& m : e.sends) touched.push_back({m.data, m.data + m.bytes, false});
  for (std::size_t i = 0; i < e.receives.size(); ++i) {
    const Message& m = e.receives[i];
    const auto& [header, data] = e.arrived[i];
    const auto space = header.find(' ');
    const std::string name = header.substr(space + 1);
    check_memory(m);
    if (name != e.name)
      throw RuntimeFailure(fmt::format("rank {} calls '{}' where rank {} calls '{}'", m.peer, name, comm.rank, e.name));
    if (const std::int64_t theirs = std::stoll(header), ours = e.launch.at(m.peer); theirs != ours)
      throw RuntimeFailure(
          fmt::format("rank {} launches '{}' as number {} of what it shares with rank {}, which launches it as number "
                      "{}: where several communicators are in use, all ranks must launch in one order",
                      m.peer, name, theirs, comm.rank, ours));
    if (data.size() != m.bytes)
      throw RuntimeFailure(
          fmt::format("rank {} sends {} B to rank {}, which expects {}", m.peer, data.size(), comm.rank, m.bytes));
    std::memcpy(reinterpret_cast<void*>(m.data), data.data(), data.size());
    driver_.mark_written(m.data, m.bytes);
    touched.push_back({m.data, m.data + m.bytes, true});
  }
  return touched;
}

void FakeNccl::fail_exchange(std::int64_t nth, NcclResult error) {
  const std::lock_guard lock(mutex_);
  faults_[exchanges_ + nth] = error;
}

std::map<std::string, std::int64_t> FakeNccl::calls() const {
  const std::lock_guard lock(mutex_);
  return calls_;
}

struct FakeNccl::Entries {
  /// Of the calling thread: groups nest.
  struct Group {
    int depth = 0;
    std::vector<Exchange> exchanges;
  };
  static Group& group() {
    static thread_local Group g;
    return g;
  }

  template <class Body>
  static NcclResult call(const char* name, Body&& body) {
    FakeNccl* n = alive_nccl.load();
    if (n == nullptr) return NcclResult::internal_error;
    // Before this double is locked, as the driver's is locked first elsewhere. One that has failed may be gone.
    const FakeDriver::Fate fate = n->driver_.fate_of_call(name);
    if (fate == FakeDriver::Fate::fails) return NcclResult::system_error;
    const std::lock_guard lock(n->mutex_);
    ++n->calls_[name];
    error_behind_call = fate == FakeDriver::Fate::fails_later ? NcclResult::remote_error : NcclResult::success;
    return body(*n);
  }
  /// With the communicator, or a refusal of one that is not, or is gone.
  template <class Body>
  static NcclResult on(const char* name, NcclComm handle, Body&& body) {
    return call(name, [&](FakeNccl& n) {
      Comm* comm = n.find(handle);
      if (comm == nullptr || comm->gone) return NcclResult::invalid_argument;
      const NcclResult r = body(n, *comm);
      if (error_behind_call != NcclResult::success) comm->error = error_behind_call;  // else an exchange has it
      return r;
    });
  }

  static NcclResult version(int* v) {
    *v = 22800;
    return NcclResult::success;
  }
  static const char* error_string(NcclResult r) {
    switch (r) {
      case NcclResult::success:
        return "no error";
      case NcclResult::remote_error:
        return "remote process exited or there was a network error";
      case NcclResult::invalid_usage:
        return "invalid usage";
      case NcclResult::system_error:
        return "unhandled system error";
      default:
        return "an error of the double of NCCL";
    }
  }
  static const char* last_error(NcclComm) { return ""; }
  static NcclResult unique_id(NcclId* out) {
    return call("ncclGetUniqueId", [&](FakeNccl&) {
      std::random_device random;
      std::memset(out->bytes, 0, sizeof out->bytes);
      std::snprintf(out->bytes, sizeof out->bytes, "%d-%08x%08x", ::getpid(), random(), random());
      return NcclResult::success;
    });
  }
  static NcclResult init_rank(NcclComm* out, int size, NcclId id, int rank, NcclConfig* config) {
    return call("ncclCommInitRankConfig", [&](FakeNccl& n) {
      if (config == nullptr || config->blocking != 0) return NcclResult::invalid_usage;  // the double never blocks
      const NcclResult r = n.init(out, size, id.bytes, rank);
      if (Comm* comm = n.find(*out); comm != nullptr && error_behind_call != NcclResult::success)
        comm->error = error_behind_call;
      return r;
    });
  }
  static NcclResult comm_split(NcclComm c, int color, int, NcclComm* out, NcclConfig*) {
    return on("ncclCommSplit", c, [&](FakeNccl& n, Comm& comm) {
      if (color != 0 || comm.child != nullptr) return NcclResult::invalid_usage;
      return n.split(comm, out);
    });
  }
  static NcclResult async_error(NcclComm c, NcclResult* out) {
    return on("ncclCommGetAsyncError", c, [&](FakeNccl& n, Comm& comm) {
      *out = n.state(comm);
      return NcclResult::success;
    });
  }
  static NcclResult finalize(NcclComm c) {
    return on("ncclCommFinalize", c, [](FakeNccl&, Comm& comm) {
      return comm.pending == 0 ? NcclResult::success : NcclResult::invalid_usage;
    });
  }
  static NcclResult destroy(NcclComm c) {
    return on("ncclCommDestroy", c, [](FakeNccl& n, Comm& comm) {
      n.leave(comm);
      return NcclResult::success;
    });
  }
  static NcclResult abort(NcclComm c) {
    return on("ncclCommAbort", c, [](FakeNccl& n, Comm& comm) {
      comm.aborted = comm.gone = true;
      remove_files(comm);  // nobody goes on with it
      n.mutex_.unlock();
      n.driver_.give_up();
      n.mutex_.lock();
      return NcclResult::success;
    });
  }
  static NcclResult group_start() {
    ++group().depth;
    return call("ncclGroupStart", [](FakeNccl&) { return NcclResult::success; });
  }
  static NcclResult group_end() {
    return call("ncclGroupEnd", [](FakeNccl& n) {
      Group& g = group();
      if (g.depth == 0) return NcclResult::invalid_usage;
      if (--g.depth > 0) return NcclResult::success;
      NcclResult first = NcclResult::success;
      for (Exchange& e : std::exchange(g.exchanges, {}))
        if (const NcclResult r = n.enqueue(std::move(e)); first == NcclResult::success) first = r;
      return first;
    });
  }

  /// The exchange of this group that sends and receives of this communicator and stream go into.
  static Exchange& open_exchange(Comm& comm, CUstream stream) {
    for (Exchange& e : group().exchanges)
      if (e.comm == &comm && e.stream == stream) return e;
    Exchange e;
    e.name = "a group of sends and receives", e.comm = &comm, e.stream = stream;
    return group().exchanges.emplace_back(std::move(e));
  }
  static NcclResult alone_or_grouped(FakeNccl& n, Exchange e) {
    if (group().depth == 0) return n.enqueue(std::move(e));
    group().exchanges.push_back(std::move(e));
    return NcclResult::success;
  }
  static CUdeviceptr at(const void* p, std::size_t offset = 0) { return reinterpret_cast<CUdeviceptr>(p) + offset; }
  static bool is_peer(const Comm& comm, int peer) { return peer >= 0 && peer < comm.size && peer != comm.rank; }

  static NcclResult send(const void* data, std::size_t count, int, int peer, NcclComm c, CUstream s) {
    return on("ncclSend", c, [&](FakeNccl&, Comm& comm) {
      if (group().depth == 0 || !is_peer(comm, peer)) return NcclResult::invalid_usage;
      open_exchange(comm, s).sends.push_back({peer, at(data), count});
      return NcclResult::success;
    });
  }
  static NcclResult recv(void* data, std::size_t count, int, int peer, NcclComm c, CUstream s) {
    return on("ncclRecv", c, [&](FakeNccl&, Comm& comm) {
      if (group().depth == 0 || !is_peer(comm, peer)) return NcclResult::invalid_usage;
      open_exchange(comm, s).receives.push_back({peer, at(data), count});
      return NcclResult::success;
    });
  }
  static NcclResult all_gather(const void* from, void* to, std::size_t count, int, NcclComm c, CUstream s) {
    return on("ncclAllGather", c, [&](FakeNccl& n, Comm& comm) {
      const CUdeviceptr own = at(to, static_cast<std::size_t>(comm.rank) * count);
      if (own != at(from)) {  // NCCL's kernel does it too
        const Driver d = n.driver_.table();
        n.mutex_.unlock();
        const CUresult copied = d.cuMemcpyDtoDAsync(own, at(from), count, s);
        n.mutex_.lock();
        if (copied != CUDA_SUCCESS) return NcclResult::unhandled_cuda_error;
      }
      Exchange e;
      e.name = "ncclAllGather", e.comm = &comm, e.stream = s;
      for (int r = 0; r < comm.size; ++r) {
        if (r == comm.rank) continue;
        e.sends.push_back({r, at(from), count});
        e.receives.push_back({r, at(to, static_cast<std::size_t>(r) * count), count});
      }
      return alone_or_grouped(n, std::move(e));
    });
  }
  static NcclResult broadcast(const void* from, void* to, std::size_t count, int, int root, NcclComm c, CUstream s) {
    return on("ncclBroadcast", c, [&](FakeNccl& n, Comm& comm) {
      if (root < 0 || root >= comm.size) return NcclResult::invalid_argument;
      Exchange e;
      e.name = fmt::format("ncclBroadcast from {}", root), e.comm = &comm, e.stream = s;
      for (int r = 0; r < comm.size && comm.rank == root; ++r)
        if (r != root) e.sends.push_back({r, at(from), count});
      if (comm.rank != root) e.receives.push_back({root, at(to), count});
      return alone_or_grouped(n, std::move(e));
    });
  }
  static NcclResult enroll(NcclComm c, void* data, std::size_t bytes, void** handle) {
    FakeNccl* const nccl = alive_nccl.load();
    if (nccl == nullptr) return NcclResult::internal_error;
    // Before this double is locked: the driver's calls back with its own lock held.
    const CUresult fit = nccl->driver_.check_registered(reinterpret_cast<CUdeviceptr>(data), bytes);
    return on("ncclCommRegister", c, [&](FakeNccl&, Comm& comm) {
      if (fit != CUDA_SUCCESS) return NcclResult::system_error;
      if (!comm.registered.try_emplace(data, bytes).second) return NcclResult::invalid_usage;
      *handle = data;
      return NcclResult::success;
    });
  }
  static NcclResult disenroll(NcclComm c, void* handle) {
    return on("ncclCommDeregister", c, [&](FakeNccl&, Comm& comm) {
      return comm.registered.erase(handle) == 1 ? NcclResult::success : NcclResult::invalid_argument;
    });
  }
};

bool FakeNccl::has_entry(const std::string& name) {
#define HB_NCCL_NAMED(entry, ...) \
  if (name == #entry) return true;
  HB_NCCL_ENTRIES(HB_NCCL_NAMED)
  HB_NCCL_OPTIONAL_ENTRIES(HB_NCCL_NAMED)
#undef HB_NCCL_NAMED
  return false;
}

bool FakeNccl::may_fail_later(const std::string& name) {
  return has_entry(name) && !name.starts_with("ncclGet") && name != "ncclGroupStart";
}

Nccl FakeNccl::table() const {
  using E = Entries;
  Nccl t;
  t.ncclGetVersion = E::version, t.ncclGetErrorString = E::error_string, t.ncclGetLastError = E::last_error;
  t.ncclGetUniqueId = E::unique_id, t.ncclCommInitRankConfig = E::init_rank, t.ncclCommSplit = E::comm_split;
  t.ncclCommGetAsyncError = E::async_error, t.ncclCommFinalize = E::finalize, t.ncclCommDestroy = E::destroy;
  t.ncclCommAbort = E::abort, t.ncclGroupStart = E::group_start, t.ncclGroupEnd = E::group_end;
  t.ncclSend = E::send, t.ncclRecv = E::recv, t.ncclAllGather = E::all_gather, t.ncclBroadcast = E::broadcast;
  t.ncclCommRegister = E::enroll, t.ncclCommDeregister = E::disenroll;
  return t;
}

}  // namespace hotbunk::cuda
