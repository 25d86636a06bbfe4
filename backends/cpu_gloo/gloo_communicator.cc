#include "backends/cpu_gloo/gloo_communicator.h"

#include <gloo/common/error.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/store.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstring>
#include <map>
#include <utility>

#include "backends/cpu_gloo/communicator_reduce.h"
#include "base/check.h"
#include "runtime/death_watch.h"
#include "runtime/tcp_store.h"

namespace hotbunk {
namespace {

using UnboundBuffer = gloo::transport::UnboundBuffer;

/// Point-to-point messages of a pair come in order, so one slot number serves them all; collectives count from 1.
constexpr std::uint64_t p2p_slot = std::uint64_t{1} << 62;
constexpr std::int64_t piece_bytes = 1 << 20;  // of a message: at most two are under way per pair
constexpr std::int64_t warm_up_bytes = 4 << 20;
/// Of gloo's own waits: the watch ends them long before (a week; a timeout of gloo breaks the connection).
constexpr std::chrono::hours gloo_timeout{7 * 24};
/// How long until a broken connection's cause is known: a host that is gone shows on the watch within 20 s and a bit.
constexpr double cause_seconds = 30.0;
/// What strerror says of one; gloo hands its text on.
constexpr const char* connection_words[] = {"Connection", "connection", "unreachable", "Broken pipe", "No route"};

/// gloo's rendezvous over our store, under a prefix.
class GlooStore final : public gloo::rendezvous::Store {
 public:
  GlooStore(TcpStore& store, std::string prefix) : store_(store), prefix_(std::move(prefix)) {}
  void set(const std::string& key, const std::vector<char>& data) override {
    store_.set(prefix_ + key, std::string_view(data.data(), data.size()));
  }
  std::vector<char> get(const std::string& key) override {
    const std::string value = store_.get(prefix_ + key, std::chrono::duration<double>(gloo_timeout).count());
    return {value.begin(), value.end()};
  }
  void wait(const std::vector<std::string>& keys) override {
    for (const std::string& key : keys) get(key);
  }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds&) override { wait(keys); }

 private:
  TcpStore& store_;
  std::string prefix_;
};

}  // namespace

std::shared_ptr<gloo::transport::Device> make_gloo_device(const std::string& address) {
  // gloo writes to sockets without MSG_NOSIGNAL: when a peer dies, an error is wanted here, not a signal that ends us
  // too.
  std::signal(SIGPIPE, SIG_IGN);
  try {
    return gloo::transport::tcp::CreateDevice(gloo::transport::tcp::attr(address.c_str()));
  } catch (const std::exception& e) {
    throw RuntimeFailure(fmt::format("gloo cannot listen on {}: {}", address, e.what()));
  }
}

/// Operations under way on one piece of memory, a buffer of gloo's for each peer: of a buffer that serves several, gloo
/// does not reliably say whose operation has ended, and so not whose has not.
class GlooCommunicator::Pending {
 public:
  Pending(GlooCommunicator& owner, std::string what, const void* data, std::int64_t bytes)
      : owner_(owner),
        what_(std::move(what)),
        data_(const_cast<void*>(data)),
        bytes_(static_cast<std::size_t>(bytes)) {}
  ~Pending() {
    std::lock_guard lock(owner_.waits_mutex_);
    for (const auto& [peer, c] : channels_) std::erase(owner_.waits_, c.buffer.get());
  }
  Pending(const Pending&) = delete;
  Pending& operator=(const Pending&) = delete;

  void send(int peer, std::uint64_t slot, std::int64_t offset, std::int64_t bytes) {
    Channel& c = channel(peer);
    guarded([&] { c.buffer->send(peer, slot, static_cast<std::size_t>(offset), static_cast<std::size_t>(bytes)); });
    ++c.sends;
  }
  void recv(int peer, std::uint64_t slot, std::int64_t offset, std::int64_t bytes) {
    Channel& c = channel(peer);
    guarded([&] { c.buffer->recv(peer, slot, static_cast<std::size_t>(offset), static_cast<std::size_t>(bytes)); });
    ++c.recvs;
  }
  void wait_recv() {
    for (auto& entry : channels_) {
      Channel& c = entry.second;
      if (c.recvs == 0) continue;
      const auto wait = waiting_for(entry.first);
      for (; c.recvs > 0; --c.recvs) guarded([&] { return c.buffer->waitRecv(gloo_timeout); });
    }
  }
  void wait_send() {
    for (auto& entry : channels_) {
      Channel& c = entry.second;
      if (c.sends == 0) continue;
      const auto wait = waiting_for(entry.first);
      for (; c.sends > 0; --c.sends) guarded([&] { return c.buffer->waitSend(gloo_timeout); });
    }
  }

 private:
  struct Channel {
    std::unique_ptr<UnboundBuffer> buffer;
    int sends = 0, recvs = 0;  // under way
  };

  Channel& channel(int peer) {
    Channel& c = channels_[peer];
    if (c.buffer) return c;
    c.buffer = owner_.context_->createUnboundBuffer(data_, bytes_);
    std::lock_guard lock(owner_.waits_mutex_);
    owner_.waits_.push_back(c.buffer.get());
    return c;
  }

  StallWatch::Wait waiting_for(int peer) {
    const int rank = owner_.ranks()[peer];
    return {owner_.watch_.stalls(), [this] { return what_; }, [rank] { return std::vector{rank}; }};
  }

  /// gloo's exceptions stop here. A broken connection is most often a dead rank: the watch knows a moment later.
  template <class Work>
  void guarded(const Work& work) {
    if (owner_.watch_.any_dead()) owner_.watch_.check(what_);
    try {
      if constexpr (std::is_same_v<decltype(work()), bool>) {
        if (work()) return;
      } else {
        return work();
      }
    } catch (const std::exception& e) {
      owner_.fail(what_, e.what());
    }
    owner_.fail(what_, "aborted");
  }

  GlooCommunicator& owner_;
  std::string what_;
  void* data_;
  std::size_t bytes_;
  std::map<int, Channel> channels_;  // by group rank
};

GlooCommunicator::GlooCommunicator(std::string name, std::vector<int> ranks, int rank,
                                   std::shared_ptr<gloo::transport::Device> device, TcpStore& store, DeathWatch& watch,
                                   const GlooOptions& options)
    : Communicator(std::move(name), std::move(ranks), rank), options_(options), watch_(watch) {
  std::string what =
      fmt::format("connecting group {} (ranks {}) over gloo", this->name(), fmt::join(this->ranks(), ", "));
  try {
    auto context = std::make_shared<gloo::rendezvous::Context>(this->rank(), size());
    context->setTimeout(gloo_timeout);
    GlooStore gloo_store(store, fmt::format("gloo/{}/{}/", this->name(), fmt::join(this->ranks(), ",")));
    const StallWatch::Wait wait(
        watch_.stalls(), [&] { return what; }, [this] { return this->ranks(); });
    context->connectFullMesh(gloo_store, device);
    context_ = std::move(context);
  } catch (const std::exception& e) {
    fail(what, e.what());
  }
  death_token_ = watch_.on_death([this] { abort_waits(); });
  try {
    warm_up();
  } catch (...) {
    watch_.remove_on_death(death_token_);
    throw;
  }
}

GlooCommunicator::~GlooCommunicator() { watch_.remove_on_death(death_token_); }

void GlooCommunicator::abort_waits() {
  std::lock_guard lock(waits_mutex_);
  for (UnboundBuffer* b : waits_) {
    b->abortWaitRecv();
    b->abortWaitSend();
  }
}

void GlooCommunicator::fail(const std::string& what, const std::string& why) {
  const bool connection = std::any_of(std::begin(connection_words), std::end(connection_words),
                                      [&](const char* word) { return why.find(word) != std::string::npos; });
  if (watch_.wait_for_death(connection ? cause_seconds : 2.0)) watch_.check(what);
  throw RuntimeFailure(fmt::format("{}: {}", what, why));
}

/// Debian's gloo stalls for tens of ms at the first larger messages after many small ones (TCP's windows are small
/// then); one exchange of a few MiB per pair right after connecting avoids it.
void GlooCommunicator::warm_up() {
  std::vector<std::byte> memory(2 * warm_up_bytes);
  for (int distance = 1; distance < size(); ++distance) {
    const Transfer to = {(rank() + distance) % size(), 0, warm_up_bytes};
    const Transfer from = {(rank() - distance + size()) % size(), warm_up_bytes, warm_up_bytes};
    transfer(fmt::format("warming up group {}", name()), next_slot(), memory.data(), {&to, 1}, memory.data(),
             {&from, 1});
  }
}

void GlooCommunicator::transfer(const std::string& what, std::uint64_t slot, const std::byte* send,
                                std::span<const Transfer> sends, std::byte* recv, std::span<const Transfer> recvs) {
  const auto extent = [](std::span<const Transfer> all) {
    std::int64_t end = 0;
    for (const Transfer& t : all) end = std::max(end, t.offset + t.bytes);
    return end;
  };
  std::int64_t longest = 0;
  for (const auto& all : {sends, recvs})
    for (const Transfer& t : all) longest = std::max(longest, t.bytes);
  const std::int64_t num_pieces = (longest + piece_bytes - 1) / piece_bytes;

  // gloo sends what its receiver has asked for, so asking for two pieces at a time bounds what is under way. Whole
  // messages overrun TCP's window when ranks share cores, and every persist timer then costs 200 ms and more: 128 MiB
  // once took 15 s.
  Pending even(*this, what, recv, extent(recvs)), odd(*this, what, recv, extent(recvs));
  Pending out(*this, what, send, extent(sends));
  const auto start = [&](std::int64_t piece) {
    const std::int64_t begin = piece * piece_bytes;
    const auto length = [&](const Transfer& t) { return std::clamp<std::int64_t>(t.bytes - begin, 0, piece_bytes); };
    Pending& in = piece % 2 == 0 ? even : odd;
    for (const Transfer& t : recvs)
      if (length(t) > 0) in.recv(t.peer, slot, t.offset + begin, length(t));
    for (const Transfer& t : sends)
      if (length(t) > 0) out.send(t.peer, slot, t.offset + begin, length(t));
  };
  if (num_pieces > 0) start(0);
  for (std::int64_t piece = 0; piece < num_pieces; ++piece) {
    if (piece + 1 < num_pieces) start(piece + 1);
    (piece % 2 == 0 ? even : odd).wait_recv();
  }
  out.wait_send();
}

void GlooCommunicator::check_agreement(const Call& call) {
  if (!options_.check_collectives) return;
  static_assert(std::is_trivially_copyable_v<Call>);
  std::vector<Call> calls(static_cast<std::size_t>(size()), call);
  constexpr auto bytes = static_cast<std::int64_t>(sizeof(Call));
  std::vector<Transfer> sends, recvs;
  for (int r = 0; r < size(); ++r) {
    if (r == rank()) continue;
    sends.push_back({r, rank() * bytes, bytes});
    recvs.push_back({r, r * bytes, bytes});
  }
  auto* memory = reinterpret_cast<std::byte*>(calls.data());
  transfer(describe(call) + ", comparing arguments", next_slot(), memory, sends, memory, recvs);
  compare(call, calls);
}

void GlooCommunicator::do_all_gather(const Call& call, const std::byte* send, std::byte* recv, std::int64_t bytes) {
  check_agreement(call);
  std::byte* own = recv + rank() * bytes;
  if (own != send && bytes > 0) std::memcpy(own, send, static_cast<std::size_t>(bytes));
  std::vector<Transfer> sends, recvs;
  for (int i = 1; i < size(); ++i) {
    sends.push_back({(rank() + i) % size(), 0, bytes});
    const int from = (rank() - i + size()) % size();
    recvs.push_back({from, from * bytes, bytes});
  }
  transfer(describe(call), next_slot(), send, sends, recv, recvs);
}

void GlooCommunicator::reduce_chunks(const Call& call, const std::byte* send, std::span<const ChunkRange> chunks,
                                     std::byte* own) {
  const std::int64_t element = size_of(call.dtype);
  const ChunkRange mine = chunks[rank()];
  const std::string what = describe(call);
  const std::uint64_t slot = next_slot();
  const int peers = size() - 1;
  std::int64_t end = 0, longest = 0;
  for (const ChunkRange& c : chunks) {
    end = std::max(end, c.end * element);
    longest = std::max(longest, c.end - c.begin);
  }
  const std::int64_t step = piece_bytes / element;
  staging_.resize(static_cast<std::size_t>(2 * peers * std::min(piece_bytes, (mine.end - mine.begin) * element)));
  const std::int64_t stride = std::ssize(staging_) / std::max(2 * peers, 1);
  const auto staged = [&](std::int64_t piece, int r) {  // r's elements, in the half of this piece
    return ((piece % 2) * peers + (r < rank() ? r : r - 1)) * stride;
  };
  const auto length = [&](const ChunkRange& c, std::int64_t piece) {
    return std::clamp<std::int64_t>(c.end - c.begin - piece * step, 0, step);
  };

  Pending in(*this, what, staging_.data(), std::ssize(staging_)), out(*this, what, send, end);
  const auto start = [&](std::int64_t piece) {
    for (int r = 0; r < size(); ++r) {
      if (r == rank()) continue;
      if (const auto n = length(mine, piece); n > 0) in.recv(r, slot, staged(piece, r), n * element);
      if (const auto n = length(chunks[r], piece); n > 0)
        out.send(r, slot, (chunks[r].begin + piece * step) * element, n * element);
    }
  };
  const std::int64_t num_pieces = (longest + step - 1) / step;
  std::vector<const std::byte*> sources(static_cast<std::size_t>(size()));
  if (num_pieces > 0) start(0);
  for (std::int64_t piece = 0; piece < num_pieces; ++piece) {
    if (const auto n = length(mine, piece); n > 0) {
      in.wait_recv();  // before the next piece is asked for: completions do not say which piece they are of
      if (piece + 1 < num_pieces) start(piece + 1);
      for (int r = 0; r < size(); ++r)
        sources[r] = r == rank() ? send + (mine.begin + piece * step) * element : staging_.data() + staged(piece, r);
      reduce_in_rank_order(own + piece * step * element, sources, n, call.dtype, call.reduce);
    } else if (piece + 1 < num_pieces) {
      start(piece + 1);
    }
  }
  out.wait_send();
}

void GlooCommunicator::do_reduce_scatter(const Call& call, const std::byte* send, std::byte* recv) {
  check_agreement(call);
  std::vector<ChunkRange> chunks;
  for (int r = 0; r < size(); ++r) chunks.push_back({r * call.count, (r + 1) * call.count});
  reduce_chunks(call, send, chunks, recv);
}

void GlooCommunicator::do_all_reduce(const Call& call, const std::byte* send, std::byte* recv) {
  check_agreement(call);
  const std::int64_t element = size_of(call.dtype);
  std::vector<ChunkRange> chunks;
  for (int r = 0; r < size(); ++r) chunks.push_back(all_reduce_chunk(size(), r, call.count));
  const std::int64_t own_at = chunks[rank()].begin * element, own_bytes = (chunks[rank()].end * element) - own_at;
  reduce_chunks(call, send, chunks, recv + own_at);  // in place is safe: a rank's own chunk of `send` goes nowhere
  std::vector<Transfer> sends, recvs;
  for (int i = 1; i < size(); ++i) {
    const int to = (rank() + i) % size(), from = (rank() - i + size()) % size();
    sends.push_back({to, own_at, own_bytes});
    recvs.push_back({from, chunks[from].begin * element, (chunks[from].end - chunks[from].begin) * element});
  }
  transfer(describe(call), next_slot(), recv, sends, recv, recvs);
}

void GlooCommunicator::do_broadcast(const Call& call, std::byte* data, std::int64_t bytes) {
  check_agreement(call);
  const std::uint64_t slot = next_slot();
  const int place = (rank() - call.root + size()) % size();
  const int previous = place > 0 ? (rank() - 1 + size()) % size() : -1;
  const int next = place + 1 < size() ? (rank() + 1) % size() : -1;
  Pending in(*this, describe(call), data, bytes), out(*this, describe(call), data, bytes);
  const auto length = [&](std::int64_t at) { return std::min(piece_bytes, bytes - at); };
  if (previous >= 0 && bytes > 0) in.recv(previous, slot, 0, length(0));
  for (std::int64_t at = 0; at < bytes; at += piece_bytes) {
    if (previous >= 0) {
      in.wait_recv();
      if (at + piece_bytes < bytes) in.recv(previous, slot, at + piece_bytes, length(at + piece_bytes));
    }
    if (next >= 0) out.send(next, slot, at, length(at));
  }
  out.wait_send();
}

void GlooCommunicator::do_all_to_all(const Call& call, const std::byte* send, std::span<const CommPart> send_parts,
                                     std::byte* recv, std::span<const CommPart> recv_parts) {
  check_agreement(call);
  std::vector<Transfer> sends, recvs;
  std::vector<std::int64_t> send_bytes, recv_bytes;
  for (int r = 0; r < size(); ++r) {
    const CommPart &to = send_parts[r], &from = recv_parts[r];
    send_bytes.push_back(to.bytes), recv_bytes.push_back(from.bytes);
    if (r != rank()) {
      sends.push_back({r, to.begin, to.bytes});
      recvs.push_back({r, from.begin, from.bytes});
    } else if (to.bytes > 0) {
      std::memcpy(recv + from.begin, send + to.begin, static_cast<std::size_t>(to.bytes));
    }
  }
  if (options_.check_collectives) check_parts(call, send_bytes, recv_bytes);
  transfer(describe(call), next_slot(), send, sends, recv, recvs);
}

void GlooCommunicator::check_parts(const Call& call, std::span<const std::int64_t> send_bytes,
                                   std::span<const std::int64_t> recv_bytes) {
  const std::string what = describe(call) + ", comparing sizes";
  const auto gather_rows = [&](std::span<const std::int64_t> row) {
    const std::int64_t bytes = size() * static_cast<std::int64_t>(sizeof(std::int64_t));
    std::vector<std::int64_t> rows(static_cast<std::size_t>(size() * size()));
    std::copy(row.begin(), row.end(), rows.begin() + rank() * size());
    std::vector<Transfer> sends, recvs;
    for (int r = 0; r < size(); ++r) {
      if (r == rank()) continue;
      sends.push_back({r, rank() * bytes, bytes});
      recvs.push_back({r, r * bytes, bytes});
    }
    auto* memory = reinterpret_cast<std::byte*>(rows.data());
    transfer(what, next_slot(), memory, sends, memory, recvs);
    return rows;
  };
  const auto sent = gather_rows(send_bytes), expected = gather_rows(recv_bytes);
  compare_parts(call, sent, expected);
}

void GlooCommunicator::do_send_recv(int to, const std::byte* send_data, std::int64_t send_bytes, int from,
                                    std::byte* recv_data, std::int64_t recv_bytes) {
  const Transfer send = {to, 0, send_bytes}, recv = {from, 0, recv_bytes};
  const std::string what =
      to < 0     ? fmt::format("recv of {} B from rank {} in group {}", recv_bytes, ranks()[from], name())
      : from < 0 ? fmt::format("send of {} B to rank {} in group {}", send_bytes, ranks()[to], name())
                 : fmt::format("send_recv to rank {} and from rank {} in group {}", ranks()[to], ranks()[from], name());
  transfer(what, p2p_slot, send_data, {&send, to >= 0 ? 1u : 0u}, recv_data, {&recv, from >= 0 ? 1u : 0u});
}

void GlooCommunicator::do_barrier(const Call& call) {
  check_agreement(call);
  std::vector<std::byte> tokens(static_cast<std::size_t>(size()));
  std::vector<Transfer> sends, recvs;
  for (int r = 0; r < size(); ++r) {
    if (r == rank()) continue;
    sends.push_back({r, rank(), 1});
    recvs.push_back({r, r, 1});
  }
  transfer(describe(call), next_slot(), tokens.data(), sends, tokens.data(), recvs);
}

}  // namespace hotbunk
