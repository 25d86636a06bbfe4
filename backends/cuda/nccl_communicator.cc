#include "backends/cuda/nccl_communicator.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <sstream>
#include <utility>

#include "backends/cuda/naps.h"
#include "backends/cuda/rank_sums.h"
#include "base/check.h"

namespace hotbunk::cuda {
namespace {

constexpr std::int64_t piece_alignment = 256;  // bytes, of what cudaMalloc gives

}  // namespace

void NcclRank::look(std::string_view during) {
  std::string why;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& h : handles_)
      if (why.empty()) why = h->error();
  }
  if (why.empty() && !watch_.any_dead()) return;
  abort_all();
  // A peer that is gone shows as an error of NCCL first: who it was, the watch is about to know.
  if (!why.empty()) watch_.wait_for_death(1.0);
  watch_.check(during);
  throw RuntimeFailure(fmt::format("{}: {}", during, why));
}

void NcclRank::abort_all() {
  const std::lock_guard lock(mutex_);
  for (const auto& h : handles_) h->abort();
}

std::shared_ptr<NcclHandle> NcclRank::communicator(const std::string& name, const std::vector<int>& ranks, int rank,
                                                   const SayToGroup& say) {
  NcclHandle* parent = nullptr;
  if (nccl_.ncclCommSplit != nullptr) {
    const std::lock_guard lock(mutex_);
    const auto first = std::ranges::find(handles_, ranks, [](const auto& h) { return h->ranks(); });
    if (first != handles_.end()) parent = first->get();
  }
  std::shared_ptr<NcclHandle> made;
  if (parent != nullptr) {
    made = std::make_shared<NcclHandle>(*this, name, *parent);
  } else {
    NcclId id{};
    if (rank == 0)
      if (const NcclResult r = nccl_.ncclGetUniqueId(&id); r != NcclResult::success)
        throw RuntimeFailure(fmt::format("ncclGetUniqueId for group {}: {}", name, nccl_.ncclGetErrorString(r)));
    const std::string said = say(fmt::format("nccl/id/{}/{}", name, fmt::join(ranks, ",")),
                                 rank == 0 ? std::string(id.bytes, sizeof id.bytes) : "")
                                 .front();
    HB_CHECK(said.size() == sizeof id.bytes, "an NCCL id of {} B", said.size());
    std::memcpy(id.bytes, said.data(), sizeof id.bytes);
    made = std::make_shared<NcclHandle>(*this, name, ranks, rank, id);
  }
  const std::lock_guard lock(mutex_);
  return handles_.emplace_back(std::move(made));
}

void NcclRank::close(bool all_well) {
  std::vector<std::shared_ptr<NcclHandle>> handles;
  {
    const std::lock_guard lock(mutex_);
    handles.swap(handles_);
  }
  std::ranges::reverse(handles);  // what was split off goes first
  for (const auto& h : handles) all_well ? h->close() : h->abort();
}

NcclHandle::NcclHandle(NcclRank& owner, std::string name, std::vector<int> ranks, int rank, const NcclId& id)
    : owner_(owner), name_(std::move(name)), ranks_(std::move(ranks)), rank_(rank) {
  NcclConfig config;
  config.blocking = 0;
  const NcclResult r =
      owner_.nccl().ncclCommInitRankConfig(&comm_, static_cast<int>(ranks_.size()), id, rank_, &config);
  try {
    settle({"ncclCommInitRankConfig", r}, of_group("ncclCommInitRankConfig"));
  } catch (...) {
    abort();
    throw;
  }
}

NcclHandle::NcclHandle(NcclRank& owner, std::string name, NcclHandle& parent)
    : owner_(owner), name_(std::move(name)), ranks_(parent.ranks_), rank_(parent.rank_) {
  NcclConfig config;
  config.blocking = 0;
  // The child is there when the parent has settled.
  parent.call(of_group("ncclCommSplit"), [&](NcclComm comm) {
    return NcclCall{"ncclCommSplit", owner_.nccl().ncclCommSplit(comm, 0, rank_, &comm_, &config)};
  });
}

NcclHandle::~NcclHandle() { abort(); }

void NcclHandle::close() {
  try {
    if (!error().empty() || owner_.watch().any_dead()) return abort();
    NcclResult r = NcclResult::success;
    {
      const std::lock_guard lock(mutex_);
      r = owner_.nccl().ncclCommFinalize(comm_);
    }
    settle({"ncclCommFinalize", r}, of_group("ncclCommFinalize"));
  } catch (const std::exception&) {
    return abort();  // all had said goodbye: nobody needs it
  }
  const std::lock_guard lock(mutex_);
  aborted_ = true;  // gone, at any rate
  owner_.nccl().ncclCommDestroy(comm_);
}

std::string NcclHandle::of_group(const char* what) const {
  return fmt::format("{} of group {} (ranks {})", what, name_, fmt::join(ranks_, ", "));
}

std::string NcclHandle::text_of(NcclResult r) const {
  const char* reason = owner_.nccl().ncclGetErrorString(r);
  const char* last = owner_.nccl().ncclGetLastError(comm_);
  std::string out = reason != nullptr ? reason : fmt::format("NCCL error {}", static_cast<int>(r));
  if (last != nullptr && *last != 0) out += fmt::format(" ({})", last);
  return out;
}

std::string NcclHandle::error() {
  const std::lock_guard lock(mutex_);
  if (aborted_) return of_group("aborted, the communicator");
  NcclResult state = NcclResult::success;
  const NcclResult asked = comm_ == nullptr ? NcclResult::success : owner_.nccl().ncclCommGetAsyncError(comm_, &state);
  const auto failed = [](NcclResult r) { return r != NcclResult::success && r != NcclResult::in_progress; };
  if (failed(asked))
    return fmt::format("{}: {}", of_group("ncclCommGetAsyncError of the communicator"), text_of(asked));
  if (failed(state)) return fmt::format("{}: {}", of_group("NCCL failed, in the communicator"), text_of(state));
  return "";
}

void NcclHandle::abort() {
  const std::lock_guard lock(mutex_);
  if (!std::exchange(aborted_, true) && comm_ != nullptr) owner_.nccl().ncclCommAbort(comm_);
}

bool NcclHandle::is_aborted() {
  const std::lock_guard lock(mutex_);
  return aborted_;
}

std::vector<int> NcclHandle::others() const {
  std::vector<int> out = ranks_;
  std::erase(out, ranks_[static_cast<std::size_t>(rank_)]);
  return out;
}

void NcclHandle::settle(NcclCall called, const std::string& what) {
  const auto where = [&] { return what; };
  NcclResult r = called.result;
  std::optional<StallWatch::Wait> told;
  for (Naps naps; r == NcclResult::in_progress;) {
    naps.nap();
    if (owner_.watch().any_dead()) {
      owner_.abort_all();
      owner_.watch().check(where());
    }
    {
      const std::lock_guard lock(mutex_);
      if (aborted_) throw RuntimeFailure(fmt::format("{}: its communicator was aborted", what));
      const NcclResult asked = owner_.nccl().ncclCommGetAsyncError(comm_, &r);
      if (asked != NcclResult::success) r = asked, called.entry = "ncclCommGetAsyncError";
    }
    if (!told && naps.is_long()) told.emplace(owner_.watch().stalls(), where, [this] { return others(); });
  }
  if (r == NcclResult::success) return;
  const std::string at = what.starts_with(called.entry) ? "" : fmt::format("{}: ", called.entry);
  throw RuntimeFailure(fmt::format("{}: {}NCCL says: {}", what, at, text_of(r)));
}

void NcclHandle::call(const std::string& what, const std::function<NcclCall(NcclComm)>& enqueue) {
  NcclCall called{};
  {
    const std::lock_guard lock(mutex_);
    if (aborted_) throw RuntimeFailure(fmt::format("{}: its communicator was aborted", what));
    const StallWatch::Wait told(
        owner_.watch().stalls(), [&] { return what; }, [this] { return others(); });
    called = enqueue(comm_);
  }
  settle(called, what);
}

NcclCommunicator::NcclCommunicator(std::string name, std::vector<int> ranks, int rank,
                                   std::shared_ptr<NcclHandle> handle, const Launcher& launch, NcclOptions options)
    : Communicator(std::move(name), std::move(ranks), rank),
      handle_(std::move(handle)),
      launch_(launch),
      options_(std::move(options)) {}

NcclCommunicator::~NcclCommunicator() {
  try {
    drop_scratch();
  } catch (const RuntimeFailure&) {  // its communicator is aborted, and no call needs it any more
  }
}

void NcclCommunicator::drop_scratch() {
  if (registered_ != nullptr) try {
      handle_->call(handle_->of_group("ncclCommDeregister"), [&](NcclComm comm) {
        return NcclCall{"ncclCommDeregister", handle_->owner().nccl().ncclCommDeregister(comm, registered_)};
      });
    } catch (const RuntimeFailure&) {
      handle_->abort();  // with it go its registrations: what is registered must not be unmapped
      registered_ = nullptr;
      scratch_.reset();
      throw;
    }
  registered_ = nullptr;
  scratch_.reset();
}

std::byte* NcclCommunicator::scratch(std::int64_t bytes) {
  if (!scratch_ || scratch_->bytes() < bytes) {
    if (scratch_) {
      options_.wait_for_stream();
      drop_scratch();
    }
    const Nccl& nccl = handle_->owner().nccl();
    const bool registers = nccl.ncclCommRegister != nullptr && nccl.ncclCommDeregister != nullptr;
    scratch_.emplace(launch_.context(), bytes, registers);  // NCCL gives what it registers to other processes
    if (registers)
      handle_->call(handle_->of_group("ncclCommRegister"), [&](NcclComm comm) {
        return NcclCall{"ncclCommRegister",
                        nccl.ncclCommRegister(comm, reinterpret_cast<void*>(scratch_->address()),
                                              static_cast<std::size_t>(scratch_->bytes()), &registered_)};
      });
  }
  return reinterpret_cast<std::byte*>(scratch_->address());
}

void NcclCommunicator::copy(std::byte* to, const std::byte* from, std::int64_t bytes) const {
  launch_.copy(reinterpret_cast<CUdeviceptr>(to), reinterpret_cast<CUdeviceptr>(from), bytes);
}

void NcclCommunicator::in_place(const std::byte* at, std::int64_t bytes) {
  handle_->owner().memory().use(handle_, at, bytes);
}

void NcclCommunicator::agree(const Call& mine) {
  if (!options_.check) return;
  const std::string text = fmt::format("{} {} {} {} {} {}", static_cast<int>(mine.op), static_cast<int>(mine.dtype),
                                       static_cast<int>(mine.reduce), mine.root, mine.count, mine.sequence);
  std::vector<Call> all;
  for (const std::string& said : options_.check(fmt::format("nccl/call/{}/{}", name(), mine.sequence), text)) {
    std::istringstream in(said);
    int op = 0, dtype = 0, reduce = 0;
    Call call;
    in >> op >> dtype >> reduce >> call.root >> call.count >> call.sequence;
    call.op = static_cast<CommOp>(op), call.dtype = static_cast<DType>(dtype);
    call.reduce = static_cast<ReduceOp>(reduce);
    all.push_back(call);
  }
  compare(mine, all);
}

void NcclCommunicator::exchange(const std::string& what, std::span<const Part> send, std::span<const Part> recv) {
  const Nccl& nccl = handle_->owner().nccl();
  for (const std::span<const Part> side : {send, recv})
    for (const Part& p : side) in_place(p.data, p.bytes);
  handle_->call(what, [&](NcclComm comm) {
    NcclCall first{"ncclGroupStart", nccl.ncclGroupStart()};
    const auto keep = [&](const char* entry, NcclResult r) {
      if (first.result == NcclResult::success && r != NcclResult::in_progress) first = {entry, r};
    };
    for (int i = 1; i < size(); ++i) {
      const int to = (rank() + i) % size(), from = (rank() + size() - i) % size();  // not all the same peer at once
      if (const Part& p = send[static_cast<std::size_t>(to)]; p.bytes > 0)
        keep("ncclSend",
             nccl.ncclSend(p.data, static_cast<std::size_t>(p.bytes), nccl_bytes, to, comm, launch_.stream()));
      if (const Part& p = recv[static_cast<std::size_t>(from)]; p.bytes > 0)
        keep("ncclRecv",
             nccl.ncclRecv(p.data, static_cast<std::size_t>(p.bytes), nccl_bytes, from, comm, launch_.stream()));
    }
    const NcclResult end = nccl.ncclGroupEnd();
    return first.result == NcclResult::success ? NcclCall{"ncclGroupEnd", end} : first;
  });
}

void NcclCommunicator::do_all_gather(const Call& call, const std::byte* send, std::byte* recv, std::int64_t bytes) {
  agree(call);
  if (bytes == 0) return;
  in_place(send, bytes), in_place(recv, size() * bytes);
  handle_->call(describe(call), [&](NcclComm comm) {
    return NcclCall{"ncclAllGather", handle_->owner().nccl().ncclAllGather(send, recv, static_cast<std::size_t>(bytes),
                                                                           nccl_bytes, comm, launch_.stream())};
  });
}

void NcclCommunicator::reduce_own(const Call& call, const std::byte* send, std::byte* recv,
                                  std::span<const ChunkRange> ranges) {
  const std::int64_t element = size_of(call.dtype);
  const ChunkRange own = ranges[static_cast<std::size_t>(rank())];
  std::int64_t longest = 0;
  for (const ChunkRange& r : ranges) longest = std::max(longest, r.end - r.begin);
  if (longest == 0) return;
  const std::int64_t most_piece =
      std::max(options_.most_scratch_bytes / size() / piece_alignment * piece_alignment, piece_alignment);
  const std::int64_t piece = std::min(longest * element, most_piece) / element;  // elements
  std::byte* const parts = scratch(size() * piece * element);
  for (std::int64_t done = 0; done < longest; done += piece) {
    const auto in_piece = [&](const ChunkRange& r) {
      return std::clamp<std::int64_t>(r.end - r.begin - done, 0, piece);
    };
    const std::int64_t count = in_piece(own);
    std::vector<Part> to, from;
    std::vector<const std::byte*> sources;
    for (int r = 0; r < size(); ++r) {
      const ChunkRange& theirs = ranges[static_cast<std::size_t>(r)];
      to.push_back({const_cast<std::byte*>(send) + (theirs.begin + done) * element, in_piece(theirs) * element});
      from.push_back({parts + r * piece * element, count * element});
      sources.push_back(r == rank() ? send + (own.begin + done) * element : from.back().data);
    }
    exchange(describe(call), to, from);
    if (count > 0) reduce_ranks(launch_, recv + done * element, sources, count, call.dtype, call.reduce);
  }
}

void NcclCommunicator::do_reduce_scatter(const Call& call, const std::byte* send, std::byte* recv) {
  agree(call);
  std::vector<ChunkRange> ranges;
  for (int r = 0; r < size(); ++r) ranges.push_back({r * call.count, (r + 1) * call.count});
  reduce_own(call, send, recv, ranges);
}

void NcclCommunicator::do_all_reduce(const Call& call, const std::byte* send, std::byte* recv) {
  agree(call);
  const std::int64_t element = size_of(call.dtype);
  std::vector<ChunkRange> ranges;
  std::vector<Part> own, all;
  for (int r = 0; r < size(); ++r) ranges.push_back(all_reduce_chunk(size(), r, call.count));
  const auto part = [&](const ChunkRange& c) { return Part{recv + c.begin * element, (c.end - c.begin) * element}; };
  // In place is safe: the chunk that this rank overwrites with the sum goes to nobody before it is summed.
  reduce_own(call, send, part(ranges[static_cast<std::size_t>(rank())]).data, ranges);
  for (const ChunkRange& c : ranges) {
    own.push_back(part(ranges[static_cast<std::size_t>(rank())]));
    all.push_back(part(c));
  }
  exchange(describe(call), own, all);
}

void NcclCommunicator::do_broadcast(const Call& call, std::byte* data, std::int64_t bytes) {
  agree(call);
  if (bytes == 0) return;
  in_place(data, bytes);
  handle_->call(describe(call), [&](NcclComm comm) {
    return NcclCall{"ncclBroadcast",
                    handle_->owner().nccl().ncclBroadcast(data, data, static_cast<std::size_t>(bytes), nccl_bytes,
                                                          call.root, comm, launch_.stream())};
  });
}

void NcclCommunicator::do_all_to_all(const Call& call, const std::byte* send, std::span<const CommPart> send_parts,
                                     std::byte* recv, std::span<const CommPart> recv_parts) {
  agree(call);
  std::vector<Part> to, from;
  for (std::size_t r = 0; r < send_parts.size(); ++r) {
    to.push_back({const_cast<std::byte*>(send) + send_parts[r].begin, send_parts[r].bytes});
    from.push_back({recv + recv_parts[r].begin, recv_parts[r].bytes});
  }
  const auto me = static_cast<std::size_t>(rank());
  copy(from[me].data, to[me].data, recv_parts[me].bytes);
  exchange(describe(call), to, from);
}

void NcclCommunicator::do_send_recv(int to, const std::byte* send_data, std::int64_t send_bytes, int from,
                                    std::byte* recv_data, std::int64_t recv_bytes) {
  std::vector<Part> send(static_cast<std::size_t>(size()), Part{nullptr, 0}), recv = send;
  if (to >= 0) send[static_cast<std::size_t>(to)] = {const_cast<std::byte*>(send_data), send_bytes};
  if (from >= 0) recv[static_cast<std::size_t>(from)] = {recv_data, recv_bytes};
  exchange(handle_->of_group(fmt::format("send of {} and recv of {} B", send_bytes, recv_bytes).c_str()), send, recv);
}

void NcclCommunicator::do_barrier(const Call& call) {
  agree(call);
  // A byte of each: what this stream does next comes behind what the others' have done so far.
  std::byte* const bytes = scratch(size());
  launch_.fill(reinterpret_cast<CUdeviceptr>(bytes), 0, size());
  handle_->call(describe(call), [&](NcclComm comm) {
    return NcclCall{"ncclAllGather", handle_->owner().nccl().ncclAllGather(bytes + rank(), bytes, 1, nccl_bytes, comm,
                                                                           launch_.stream())};
  });
}

}  // namespace hotbunk::cuda
