#include "backends/cpu_gloo/shm_communicator.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "backends/cpu_gloo/communicator_reduce.h"
#include "base/check.h"
#include "base/cores.h"
#include "base/pages.h"
#include "base/rounding.h"

namespace hotbunk {
namespace {

constexpr std::int64_t staging_bytes = 1 << 20;  // per rank and parity; larger data in ordinary memory goes in pieces
/// Up to this a copy into staging costs less than the second meeting it saves (about 20 us when ranks share cores).
constexpr std::int64_t eager_bytes = 64 << 10;
constexpr std::int64_t line = 64, page = 4096;

/// Copies unless source and target are the same memory (in-place calls).
void copy(std::byte* to, const std::byte* from, std::int64_t bytes) {
  if (to != from && bytes > 0) std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

/// The same into a peer's memory, whose pages its owner has: had many at once, for a fault to write has one.
void write_for_peer(std::byte* to, const std::byte* from, std::int64_t bytes) {
  const auto into_page = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(to) % page);
  map_present_pages(to - into_page, bytes + into_page, 1);  // where that fails, faults do it
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

int spins_for(int size) { return size <= local_cores() ? 64 : 0; }

}  // namespace

/// Addresses inside one rank's segment:
///   gate | posting, parts [W] (twice) | mailbox to each peer [W] | staging (twice) | mail staging to each peer [W][2]
struct ShmCommunicator::Segment {
  struct Gate {
    alignas(64) std::atomic<std::uint32_t> arrivals;    // of the current meeting; only rank 0's gate counts
    alignas(64) std::atomic<std::uint32_t> generation;  // meetings completed
    alignas(64) std::atomic<std::uint64_t> arrived_at;  // the owner's last meeting, for diagnosis
  };

  std::byte* base;
  int size;

  static std::int64_t posting_stride(int size) {
    return round_up(static_cast<std::int64_t>(sizeof(Posting)) + size * static_cast<std::int64_t>(sizeof(Part)), line);
  }
  static std::int64_t mailboxes_at(int size) {
    return static_cast<std::int64_t>(sizeof(Gate)) + 2 * posting_stride(size);
  }
  static std::int64_t staging_at(int size) {
    return round_up(mailboxes_at(size) + size * static_cast<std::int64_t>(sizeof(ShmMailbox)), page);
  }
  static std::int64_t mail_staging_at(int size) { return staging_at(size) + 2 * staging_bytes; }
  static std::int64_t total(int size) { return mail_staging_at(size) + size * 2 * mail_piece_bytes; }

  Gate& gate() const { return *reinterpret_cast<Gate*>(base); }
  Posting& posting(std::uint64_t meeting) const {
    return *reinterpret_cast<Posting*>(base + sizeof(Gate) + (meeting & 1) * posting_stride(size));
  }
  Part* parts(std::uint64_t meeting) const { return reinterpret_cast<Part*>(&posting(meeting) + 1); }
  std::byte* staging(std::uint64_t meeting) const { return base + staging_at(size) + (meeting & 1) * staging_bytes; }
  ShmMailbox& mailbox(int to) const { return reinterpret_cast<ShmMailbox*>(base + mailboxes_at(size))[to]; }
  std::byte* mail_staging(int to) const { return base + mail_staging_at(size) + to * 2 * mail_piece_bytes; }
};

std::int64_t ShmCommunicator::segment_bytes(int size) { return Segment::total(size); }

ShmCommunicator::ShmCommunicator(std::string name, std::vector<int> ranks, int rank,
                                 std::vector<SharedMapping> segments, const SharedRegions& regions,
                                 const DeathWatch& watch)
    : Communicator(std::move(name), std::move(ranks), rank),
      segments_(std::move(segments)),
      regions_(regions),
      wait_(watch, spins_for(size())) {
  HB_CHECK(std::ssize(segments_) == size() && staging_bytes / size() >= line, "{} segments for {} ranks",
           segments_.size(), size());
}

const std::byte* ShmCommunicator::peer_pointer(int peer, int region, std::int64_t offset) const {
  return regions_.peer(ranks().at(peer), region, offset);
}

ShmCommunicator::Segment ShmCommunicator::segment(int rank) const { return {segments_[rank].base(), size()}; }

void ShmCommunicator::meet(const Call& call) {
  ++meetings_;
  segment(rank()).gate().arrived_at.store(meetings_, std::memory_order_relaxed);
  Segment::Gate& gate = segment(0).gate();
  const auto generation = static_cast<std::uint32_t>(meetings_);
  if (gate.arrivals.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<std::uint32_t>(size())) {
    gate.arrivals.store(0, std::memory_order_relaxed);  // nobody arrives again before the generation below
    gate.generation.store(generation, std::memory_order_release);
    futex_wake_all(gate.generation);
    return;
  }
  wait_.until(
      gate.generation, [&](std::uint32_t g) { return g == generation; }, [&] { return describe(call); },
      [&] { return missing(); });
}

std::vector<int> ShmCommunicator::missing() const {
  std::vector<int> late;
  for (int r = 0; r < size(); ++r)
    if (segment(r).gate().arrived_at.load(std::memory_order_relaxed) < meetings_) late.push_back(ranks()[r]);
  return late;
}

ShmCommunicator::Mode ShmCommunicator::post(const Call& call, const std::byte* base, std::span<const Part> parts,
                                            SharedRegions::Location receive) {
  std::int64_t end = 0, longest = 0;
  for (const Part& p : parts) {
    end = std::max(end, p.offset + p.bytes);
    longest = std::max(longest, p.bytes);
  }
  SharedRegions::Location where;
  Mode mode = longest == 0 ? Mode::nothing : Mode::staged;
  if (end > eager_bytes)
    if (const auto found = regions_.locate(base, end)) {
      where = *found;
      mode = Mode::direct;
    }
  const Segment mine = segment(rank());
  mine.posting(meetings_ + 1) = {call, mode, where.region, where.offset, longest, receive};
  std::copy(parts.begin(), parts.end(), mine.parts(meetings_ + 1));
  return mode;
}

void ShmCommunicator::stage(const std::byte* base, std::span<const Part> parts, std::int64_t begin,
                            std::int64_t piece_bytes) {
  std::byte* to = segment(rank()).staging(meetings_ + 1);
  for (const Part& p : parts) {
    copy(to, base + p.offset + begin, std::clamp<std::int64_t>(p.bytes - begin, 0, piece_bytes));
    to += piece_bytes;
  }
}

void ShmCommunicator::check_agreement(const Call& call) const {
  std::vector<Call> calls;
  for (int r = 0; r < size(); ++r) calls.push_back(segment(r).posting(meetings_).call);
  compare(call, calls);
  if (call.op != CommOp::all_to_all) return;
  std::vector<std::int64_t> sent, expected;
  for (int r = 0; r < size(); ++r)
    for (const Part& p : std::span(segment(r).parts(meetings_), static_cast<std::size_t>(size()))) {
      sent.push_back(p.bytes);
      expected.push_back(p.expected);
    }
  compare_parts(call, sent, expected);
}

void ShmCommunicator::exchange(const Call& call, const std::byte* base, std::span<const Part> parts,
                               const Consume& consume, SharedRegions::Location receive) {
  const std::int64_t piece_bytes = staging_bytes / std::ssize(parts) / line * line;
  const Mode mode = post(call, base, parts, receive);
  if (mode == Mode::staged) stage(base, parts, 0, piece_bytes);
  meet(call);
  check_agreement(call);

  // The postings may be overwritten after the next meeting: take what we need of them now.
  std::vector<Source> sources(static_cast<std::size_t>(size()));
  const std::size_t index = parts.size() == 1 ? 0 : static_cast<std::size_t>(rank());
  std::int64_t longest_staged = 0, longest = 0;
  bool any_direct = false;
  for (int r = 0; r < size(); ++r) {
    const Posting& p = segment(r).posting(meetings_);
    Source& s = sources[r];
    s = {p.mode, segment(r).parts(meetings_)[index], nullptr};
    longest = std::max(longest, p.longest_part);
    any_direct |= p.mode == Mode::direct;
    if (p.mode == Mode::staged) longest_staged = std::max(longest_staged, p.longest_part);
    if (p.mode == Mode::direct) {
      s.data = r == rank() ? base : regions_.peer(ranks()[r], p.region, p.region_offset);
      HB_CHECK(s.data != nullptr, "{}: region {} of rank {} is not open here", describe(call), p.region, ranks()[r]);
      s.data += s.part.offset;
    }
  }

  // One round when all is read in place; as many pieces as the longest part needs when anything is staged.
  const std::int64_t step = longest_staged > 0 ? piece_bytes : std::max<std::int64_t>(longest, 1);
  Pieces pieces(sources.size());
  for (std::int64_t begin = 0; begin == 0 || begin < longest; begin += step) {
    if (begin > 0) {
      if (mode == Mode::staged) stage(base, parts, begin, piece_bytes);
      meet(call);
    }
    for (int r = 0; r < size(); ++r) {
      const Source& s = sources[r];
      const auto bytes = static_cast<std::size_t>(std::clamp<std::int64_t>(s.part.bytes - begin, 0, step));
      const std::byte* data = s.mode == Mode::direct
                                  ? s.data + begin
                                  : segment(r).staging(meetings_) + static_cast<std::int64_t>(index) * piece_bytes;
      pieces[r] = {data, bytes};
    }
    consume(begin, pieces);
  }
  if (any_direct) meet(call);
}

void ShmCommunicator::reduce_pieces(std::byte* dst, const Pieces& pieces, const Call& call) const {
  std::vector<const std::byte*> sources;
  for (const auto& p : pieces) sources.push_back(p.data());
  reduce_in_rank_order(dst, sources, std::ssize(pieces[0]) / size_of(call.dtype), call.dtype, call.reduce);
}

void ShmCommunicator::do_all_gather(const Call& call, const std::byte* send, std::byte* recv, std::int64_t bytes) {
  const Part whole[] = {{0, bytes}};
  copy(recv + rank() * bytes, send, bytes);
  exchange(call, send, whole, [&](std::int64_t begin, const Pieces& pieces) {
    for (int i = 1; i < size(); ++i) {
      const int r = (rank() + i) % size();  // not all from the same peer at once
      copy(recv + r * bytes + begin, pieces[r].data(), std::ssize(pieces[r]));
    }
  });
}

void ShmCommunicator::do_reduce_scatter(const Call& call, const std::byte* send, std::byte* recv) {
  const std::int64_t bytes = call.count * size_of(call.dtype);
  std::vector<Part> parts;
  for (int r = 0; r < size(); ++r) parts.push_back({r * bytes, bytes});
  exchange(call, send, parts,
           [&](std::int64_t begin, const Pieces& pieces) { reduce_pieces(recv + begin, pieces, call); });
}

void ShmCommunicator::do_all_reduce(const Call& call, const std::byte* send, std::byte* recv) {
  const std::int64_t element = size_of(call.dtype);
  if (call.count * element <= eager_bytes) {  // one meeting; every rank computes the same sum in the same order
    const Part whole[] = {{0, call.count * element}};
    exchange(call, send, whole,
             [&](std::int64_t begin, const Pieces& pieces) { reduce_pieces(recv + begin, pieces, call); });
    return;
  }
  // In place is safe: nobody else reads the chunk of `send` that this rank overwrites with its sum.
  std::vector<Part> chunks;
  for (int r = 0; r < size(); ++r) {
    const ChunkRange c = all_reduce_chunk(size(), r, call.count);
    chunks.push_back({c.begin * element, (c.end - c.begin) * element});
  }
  std::byte* own = recv + chunks[rank()].offset;
  exchange(call, send, chunks,
           [&](std::int64_t begin, const Pieces& pieces) { reduce_pieces(own + begin, pieces, call); });
  const Part sum[] = {{0, chunks[rank()].bytes}};
  exchange(call, own, sum, [&](std::int64_t begin, const Pieces& pieces) {
    for (int i = 1; i < size(); ++i) {
      const int r = (rank() + i) % size();
      copy(recv + chunks[r].offset + begin, pieces[r].data(), std::ssize(pieces[r]));
    }
  });
}

void ShmCommunicator::do_broadcast(const Call& call, std::byte* data, std::int64_t bytes) {
  const bool root = rank() == call.root;
  const Part part[] = {{0, root ? bytes : 0}};
  const auto receive = root ? std::nullopt : regions_.locate(data, bytes);
  const auto consume = [&](std::int64_t begin, const Pieces& pieces) {
    // How many of the last bytes in rank r's buffer the root writes. What it stages comes in pieces, and of those from
    // the second on this meeting's postings are another exchange's.
    const auto written_by_root = [&](int r) -> std::int64_t {
      const bool in_place = begin == 0 && segment(call.root).posting(meetings_).mode == Mode::direct &&
                            segment(r).posting(meetings_).receive.region >= 0;
      return in_place ? bytes / size() / line * line : 0;  // of W - 1 copies each of W ranks makes as much
    };
    if (!root)
      return copy(data + begin, pieces[call.root].data(), std::ssize(pieces[call.root]) - written_by_root(rank()));
    for (int i = 1; i < size(); ++i) {
      const int r = (rank() + i) % size();
      const std::int64_t share = written_by_root(r);
      if (share == 0) continue;
      const SharedRegions::Location to = segment(r).posting(meetings_).receive;
      std::byte* buffer = regions_.peer(ranks()[r], to.region, to.offset);
      HB_CHECK(buffer != nullptr, "{}: region {} of rank {} is not open here", describe(call), to.region, ranks()[r]);
      write_for_peer(buffer + bytes - share, data + bytes - share, share);
    }
  };
  exchange(call, data, part, consume, receive.value_or(SharedRegions::Location{}));
}

void ShmCommunicator::do_all_to_all(const Call& call, const std::byte* send, std::span<const CommPart> send_parts,
                                    std::byte* recv, std::span<const CommPart> recv_parts) {
  std::vector<Part> parts;
  for (int r = 0; r < size(); ++r) parts.push_back({send_parts[r].begin, send_parts[r].bytes, recv_parts[r].bytes});
  exchange(call, send, parts, [&](std::int64_t begin, const Pieces& pieces) {
    for (int i = 0; i < size(); ++i) {
      const int r = (rank() + i) % size();
      copy(recv + recv_parts[r].begin + begin, pieces[r].data(), std::ssize(pieces[r]));
    }
  });
}

void ShmCommunicator::do_send_recv(int to, const std::byte* send_data, std::int64_t send_bytes, int from,
                                   std::byte* recv_data, std::int64_t recv_bytes) {
  std::optional<ShmOutgoing> outgoing;
  std::optional<ShmIncoming> incoming;
  if (to >= 0)
    outgoing.emplace(segment(rank()).mailbox(to), segment(rank()).mail_staging(to), regions_, ranks()[to], wait_,
                     fmt::format("send of {} B to rank {} in group {}", send_bytes, ranks()[to], name()), send_data,
                     send_bytes);
  if (from >= 0)
    incoming.emplace(segment(from).mailbox(rank()), segment(from).mail_staging(rank()), regions_, ranks()[from], wait_,
                     fmt::format("recv of {} B from rank {} in group {}", recv_bytes, ranks()[from], name()), recv_data,
                     recv_bytes);
  // Piece by piece in turn: with two slots per pair no ring of send_recvs can block itself.
  while ((outgoing && !outgoing->done()) || (incoming && !incoming->done())) {
    if (outgoing && !outgoing->done()) outgoing->step();
    if (incoming && !incoming->done()) incoming->step();
  }
  if (outgoing) outgoing->finish();
}

void ShmCommunicator::do_barrier(const Call& call) {
  const Part nothing[] = {{0, 0}};
  exchange(call, nullptr, nothing, [](std::int64_t, const Pieces&) {});
}

}  // namespace hotbunk
