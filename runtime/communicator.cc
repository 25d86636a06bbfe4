#include "runtime/communicator.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"

namespace hotbunk {
namespace {

const std::byte* in(const void* p) { return static_cast<const std::byte*>(p); }
std::byte* out(void* p) { return static_cast<std::byte*>(p); }

void check_reducible(DType dtype) {
  HB_CHECK(dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::i32, "no reduction of {}", name_of(dtype));
}

void check_count(std::int64_t count, std::int64_t padding_bytes, std::int64_t payload_bytes) {
  HB_CHECK(count >= 0 && padding_bytes >= 0 && padding_bytes <= payload_bytes,
           "a collective of {} with padding of {} B in {} B", count, padding_bytes, payload_bytes);
}

}  // namespace

std::string_view name_of(CommOp op) {
  constexpr std::array<std::string_view, num_comm_ops> names = {
      "all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all",
      "send",       "recv",           "send_recv",  "peer_read", "barrier"};
  return names[static_cast<std::size_t>(op)];
}

std::string_view name_of(Transport t) {
  constexpr std::array<std::string_view, 5> names = {"solo", "shm", "gloo", "local", "nccl"};
  return names[static_cast<std::size_t>(t)];
}

ChunkRange all_reduce_chunk(int size, int rank, std::int64_t count) {
  const std::int64_t chunk = (count + size - 1) / size;
  return {std::min(count, rank * chunk), std::min(count, (rank + 1) * chunk)};
}

std::int64_t all_reduce_wire_bytes(int size, int rank, std::int64_t count, std::int64_t element_bytes) {
  if (size == 1) return 0;
  const ChunkRange own = all_reduce_chunk(size, rank, count);
  const std::int64_t chunk = own.end - own.begin;
  return ((count - chunk) + (size - 1) * chunk) * element_bytes;  // others' chunks out, the reduced own one to each
}

Communicator::Communicator(std::string name, std::vector<int> ranks, int rank)
    : name_(std::move(name)), ranks_(std::move(ranks)), rank_(rank) {
  HB_CHECK(rank_ >= 0 && rank_ < size(), "rank {} in group {} of {}", rank_, name_, size());
}

std::string Communicator::describe(const Call& call) const {
  return fmt::format("{} #{} of group {} (ranks {})", name_of(call.op), call.sequence, name_, fmt::join(ranks_, ", "));
}

void Communicator::compare(const Call& ours, std::span<const Call> all) const {
  const auto same = [&](const Call& c) {
    return c.op == ours.op && c.dtype == ours.dtype && c.reduce == ours.reduce && c.root == ours.root &&
           c.count == ours.count && c.sequence == ours.sequence;
  };
  if (std::all_of(all.begin(), all.end(), same)) return;
  std::string text = fmt::format("rank {}: {} does not agree across the group:", ranks_[rank_], describe(ours));
  for (int r = 0; r < size(); ++r) {
    const Call& c = all[r];
    text += fmt::format("{} rank {} calls {} #{} of {} {}", r == 0 ? "" : ";", ranks_[r], name_of(c.op), c.sequence,
                        c.count, name_of(c.dtype));
    if (c.op == CommOp::all_reduce) text += c.reduce == ReduceOp::sum ? " (sum)" : " (max)";
    if (c.op == CommOp::broadcast) text += fmt::format(" from root {}", c.root);
  }
  throw RuntimeFailure(text);
}

void Communicator::compare_parts(const Call& call, std::span<const std::int64_t> sent,
                                 std::span<const std::int64_t> expected) const {
  for (int from = 0; from < size(); ++from)
    for (int to = 0; to < size(); ++to)
      if (const std::int64_t s = sent[from * size() + to], e = expected[to * size() + from]; s != e)
        throw RuntimeFailure(
            fmt::format("rank {}: {} does not agree across the group: rank {} sends {} B to rank {}, which expects {}",
                        ranks_[rank_], describe(call), ranks_[from], s, ranks_[to], e));
}

Communicator::Call Communicator::next_call(CommOp op, DType dtype, std::int64_t count) {
  Call call;
  call.op = op;
  call.dtype = dtype;
  call.count = count;
  call.sequence = ++sequence_;
  return call;
}

void Communicator::count(CommOp op, std::int64_t payload, std::int64_t padding, std::int64_t wire) {
  const int tag = tag_.load(std::memory_order_relaxed);
  std::lock_guard lock(counters_mutex_);
  Cell& cell = counters_[tag][static_cast<std::size_t>(op)];
  cell.calls += 1;
  cell.payload += payload - padding;
  cell.padding += padding;
  cell.wire += wire;
}

std::vector<CommTraffic> Communicator::take_traffic() {
  std::lock_guard lock(counters_mutex_);
  std::vector<CommTraffic> rows;
  for (const auto& [tag, cells] : counters_)
    for (int op = 0; op < num_comm_ops; ++op)
      if (const Cell& c = cells[op]; c.calls > 0)
        rows.push_back({tag, static_cast<CommOp>(op), c.calls, c.payload, c.padding, c.wire});
  counters_.clear();
  return rows;
}

void Communicator::check_peer(int peer, const char* what) const {
  HB_CHECK(peer >= 0 && peer < size(), "{} peer {} in group {} of {}", what, peer, name_, size());
}

void Communicator::all_gather(const void* send, void* recv, std::int64_t bytes_per_rank, std::int64_t padding_bytes) {
  const std::int64_t n = size() * bytes_per_rank;
  check_count(bytes_per_rank, padding_bytes, n);
  do_all_gather(next_call(CommOp::all_gather, DType::u8, bytes_per_rank), in(send), out(recv), bytes_per_rank);
  count(CommOp::all_gather, n, padding_bytes, n - bytes_per_rank);
}

void Communicator::reduce_scatter(const void* send, void* recv, std::int64_t count_per_rank, DType dtype,
                                  std::int64_t padding_bytes) {
  check_reducible(dtype);
  const std::int64_t part = count_per_rank * size_of(dtype), n = size() * part;
  check_count(count_per_rank, padding_bytes, n);
  do_reduce_scatter(next_call(CommOp::reduce_scatter, dtype, count_per_rank), in(send), out(recv));
  count(CommOp::reduce_scatter, n, padding_bytes, n - part);
}

void Communicator::all_reduce(const void* send, void* recv, std::int64_t num_elements, DType dtype, ReduceOp op,
                              std::int64_t padding_bytes) {
  check_reducible(dtype);
  const std::int64_t n = num_elements * size_of(dtype);
  check_count(num_elements, padding_bytes, n);
  Call call = next_call(CommOp::all_reduce, dtype, num_elements);
  call.reduce = op;
  do_all_reduce(call, in(send), out(recv));
  count(CommOp::all_reduce, n, padding_bytes, all_reduce_wire_bytes(size(), rank_, num_elements, size_of(dtype)));
}

void Communicator::broadcast(void* data, std::int64_t bytes, int root) {
  check_peer(root, "root");
  check_count(bytes, 0, bytes);
  Call call = next_call(CommOp::broadcast, DType::u8, bytes);
  call.root = root;
  do_broadcast(call, out(data), bytes);
  const bool last_of_chain = (rank_ - root + size()) % size() == size() - 1;
  count(CommOp::broadcast, bytes, 0, last_of_chain ? 0 : bytes);
}

void Communicator::all_to_all(const void* send, void* recv, std::int64_t bytes_per_rank) {
  const std::vector<std::int64_t> bytes(static_cast<std::size_t>(size()), bytes_per_rank);
  all_to_all_v(send, bytes, recv, bytes);
}

void Communicator::all_to_all_v(const void* send, std::span<const std::int64_t> send_bytes, void* recv,
                                std::span<const std::int64_t> recv_bytes, bool back) {
  const auto behind_one_another = [](std::span<const std::int64_t> bytes) {
    std::vector<CommPart> parts;
    std::int64_t begin = 0;
    for (const std::int64_t n : bytes) parts.push_back({begin, n}), begin += n;
    return parts;
  };
  all_to_all_v(send, behind_one_another(send_bytes), recv, behind_one_another(recv_bytes), back);
}

void Communicator::all_to_all_v(const void* send, std::span<const CommPart> send_parts, void* recv,
                                std::span<const CommPart> recv_parts, bool back) {
  HB_CHECK(std::ssize(send_parts) == size() && std::ssize(recv_parts) == size(),
           "all_to_all of {} and {} parts in {} ranks", send_parts.size(), recv_parts.size(), size());
  for (int r = 0; r < size(); ++r) check_count(std::min(send_parts[r].bytes, recv_parts[r].bytes), 0, 0);
  HB_CHECK(send_parts[rank_].bytes == recv_parts[rank_].bytes,
           "all_to_all: rank {} sends {} B to itself and expects {}", rank_, send_parts[rank_].bytes,
           recv_parts[rank_].bytes);
  do_all_to_all(next_call(CommOp::all_to_all, DType::u8, 0), in(send), send_parts, out(recv), recv_parts);
  const auto sum = [](std::span<const CommPart> parts) {
    std::int64_t bytes = 0;
    for (const CommPart& p : parts) bytes += p.bytes;
    return bytes;
  };
  count(CommOp::all_to_all, sum(back ? recv_parts : send_parts), 0, sum(send_parts) - send_parts[rank_].bytes);
}

void Communicator::send(int peer, const void* data, std::int64_t bytes, std::int64_t padding_bytes) {
  check_peer(peer, "send to");
  HB_CHECK(peer != rank_ && bytes >= 0, "send of {} B from rank {} to rank {}", bytes, rank_, peer);
  check_count(bytes, padding_bytes, bytes);
  do_send_recv(peer, in(data), bytes, -1, nullptr, 0);
  count(CommOp::send, bytes, padding_bytes, bytes);
}

void Communicator::recv(int peer, void* data, std::int64_t bytes) {
  check_peer(peer, "receive from");
  HB_CHECK(peer != rank_ && bytes >= 0, "receive of {} B at rank {} from rank {}", bytes, rank_, peer);
  do_send_recv(-1, nullptr, 0, peer, out(data), bytes);
  count(CommOp::recv, 0, 0, 0);
}

void Communicator::send_recv(int to, const void* send_data, std::int64_t send_bytes, int from, void* recv_data,
                             std::int64_t recv_bytes, std::int64_t padding_bytes) {
  check_peer(to, "send to");
  check_peer(from, "receive from");
  HB_CHECK((to == rank_) == (from == rank_) && send_bytes >= 0 && recv_bytes >= 0,
           "send_recv of rank {} to rank {} and from rank {}", rank_, to, from);
  check_count(send_bytes, padding_bytes, send_bytes);
  if (to == rank_) {
    HB_CHECK(send_bytes == recv_bytes, "send_recv with itself: {} B sent, {} expected", send_bytes, recv_bytes);
    do_keep(out(recv_data), in(send_data), send_bytes);
  } else {
    do_send_recv(to, in(send_data), send_bytes, from, out(recv_data), recv_bytes);
  }
  count(CommOp::send_recv, send_bytes, padding_bytes, to == rank_ ? 0 : send_bytes);
}

void Communicator::barrier() {
  do_barrier(next_call(CommOp::barrier, DType::u8, 0));
  count(CommOp::barrier, 0, 0, 0);
}

void Communicator::do_keep(std::byte* to, const std::byte* from, std::int64_t bytes) {
  if (bytes > 0) std::memmove(to, from, static_cast<std::size_t>(bytes));
}

const std::byte* Communicator::peer_pointer(int, int, std::int64_t) const { return nullptr; }

void Communicator::peer_read(int peer, int region, std::int64_t offset, void* dst, std::int64_t bytes) {
  check_peer(peer, "read from");
  const std::byte* src = peer_pointer(peer, region, offset);
  if (src == nullptr)
    throw RuntimeFailure(fmt::format("peer_read in group {}: rank {} has no shared region {} of rank {} ({} transport)",
                                     name_, ranks_[rank_], region, ranks_[peer], name_of(transport())));
  if (bytes > 0) std::memcpy(dst, src, static_cast<std::size_t>(bytes));
  count(CommOp::peer_read, bytes, 0, 0);
}

}  // namespace hotbunk
