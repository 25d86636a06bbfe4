#include "backends/cuda/peer_memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <sstream>

#include "base/check.h"

namespace hotbunk::cuda {
namespace {

constexpr auto handle_type = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

}  // namespace

PeerMemory::PeerMemory(const Context& context, int rank, DeathWatch& watch, const SayToAll& say)
    : context_(context), rank_(rank), watch_(watch), events_(context) {
  if (!context_.exports_memory())
    throw RuntimeFailure("the device's memory cannot be exported to other processes; set sync.transport to collective");
  server_ = std::make_unique<DescriptorServer>([this] { context_.make_current(); },
                                               [this](const std::string& question) { return answer(question); });
  addresses_ = say(server_->address());
}

PeerMemory::~PeerMemory() {
  {
    const std::lock_guard lock(arenas_mutex_);
    for (auto& [place, arena] : arenas_) {
      bool empty = true;
      while (!arena.pieces.empty() && empty) try {
          drop(arena, arena.pieces.begin());
        } catch (const RuntimeFailure&) {
          empty = false;  // an error of the device, which has been said; addresses at which memory stayed are not freed
        }
      if (empty) context_.driver().cuMemAddressFree(arena.base, static_cast<std::size_t>(arena.reserved_bytes));
    }
    arenas_.clear();
  }
  server_.reset();
}

bool PeerMemory::keep_waiting(std::string_view during) const {
  watch_.check(during);
  return true;
}

DescriptorMessage PeerMemory::answer(const std::string& question) {
  std::istringstream in(question);
  std::string what, scope;
  int who = -1;
  std::int64_t offset = 0;
  in >> what >> who >> offset;
  in.get();
  std::getline(in, scope);
  try {
    if (what == "get") return export_piece(who, offset, scope);
    HB_CHECK(what == "let-go", "a question of a rank: '{}'", question);
    let_go(who, offset, scope);
    return {"gone"};
  } catch (const std::exception& e) {
    return {fmt::format("no {}", e.what())};
  }
}

// --- of an owner ----------------------------------------------------------------------------------------------------

void PeerMemory::offer(const std::string& scope, CUdeviceptr base, std::int64_t reserved_bytes, std::int64_t begin,
                       std::int64_t end) {
  const std::lock_guard lock(offers_mutex_);
  offers_[{scope, begin}] = {base, reserved_bytes, end, {}};
}

DescriptorMessage PeerMemory::export_piece(int reader, std::int64_t offset, const std::string& scope) {
  const std::lock_guard lock(offers_mutex_);
  auto it = offers_.upper_bound({scope, offset});
  if (it != offers_.begin()) --it;
  if (it == offers_.end() || it->first.first != scope || offset < it->first.second || offset >= it->second.end)
    return {fmt::format("no rank {} has nothing mapped at byte {} of its arena", rank_, offset)};
  Offer& piece = it->second;
  const std::int64_t begin = it->first.second;
  const Driver& d = context_.driver();
  CUmemGenericAllocationHandle handle{};
  HB_CUDA(d,
          cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(piece.base + static_cast<CUdeviceptr>(begin))));
  int fd = -1;
  const CUresult exported = d.cuMemExportToShareableHandle(&fd, handle, handle_type, 0);
  d.cuMemRelease(handle);
  check(d, exported, "cuMemExportToShareableHandle(&fd, handle, handle_type, 0)");
  piece.readers.insert(reader);
  return {fmt::format("piece {} {} {}", begin, piece.end, piece.reserved_bytes), OwnedDescriptor(fd)};
}

void PeerMemory::take_back(const std::string& scope, std::int64_t begin) {
  std::set<int> readers;
  {
    const std::lock_guard lock(offers_mutex_);
    const auto it = offers_.find({scope, begin});
    if (it == offers_.end()) return;
    readers = std::move(it->second.readers);
    offers_.erase(it);
  }
  for (const int reader : readers) {
    const auto what = [&] { return fmt::format("rank {} to let go of memory that is to be unmapped", reader); };
    const StallWatch::Wait wait(watch_.stalls(), what, [reader] { return std::vector<int>{reader}; });
    DescriptorMessage said;
    try {
      said = ask(addresses_[static_cast<std::size_t>(reader)], fmt::format("let-go {} {} {}", rank_, begin, scope),
                 [&] { return keep_waiting(what()); });
    } catch (const RuntimeFailure&) {
      watch_.check(what());  // who died has let go of all
      continue;              // so has who has left
    }
    if (said.text != "gone")
      throw RuntimeFailure(fmt::format("rank {} does not let go of rank {}'s memory: {}", reader, rank_,
                                       said.text.substr(said.text.find(' ') + 1)));
  }
}

// --- of a reader ----------------------------------------------------------------------------------------------------

CUdeviceptr PeerMemory::begin_reading(const std::string& scope, int peer, std::int64_t offset, std::int64_t bytes,
                                      CUstream stream) {
  const Place place{scope, peer};
  const std::lock_guard lock(arenas_mutex_);
  Arena& arena = arenas_[place];
  for (std::int64_t at = offset; at < offset + std::max<std::int64_t>(bytes, 1);) {
    auto it = arena.pieces.upper_bound(at);
    if (it != arena.pieces.begin()) --it;
    if (it == arena.pieces.end() || at < it->first || at >= it->second.end) it = import_piece(arena, place, at);
    it->second.being_read.insert(stream);
    at = it->second.end;
  }
  return arena.base + static_cast<CUdeviceptr>(offset);
}

std::map<std::int64_t, PeerMemory::Piece>::iterator PeerMemory::import_piece(Arena& arena, const Place& place,
                                                                             std::int64_t offset) {
  const auto& [scope, peer] = place;
  const std::string asking = fmt::format("asking rank {} for its memory", peer);
  DescriptorMessage said;
  try {
    said = ask(addresses_[static_cast<std::size_t>(peer)], fmt::format("get {} {} {}", rank_, offset, scope),
               [&] { return keep_waiting(asking); });
  } catch (const RuntimeFailure&) {
    if (watch_.wait_for_death(2.0)) watch_.check(asking);  // whoever is gone was told why, or says it now
    throw;
  }
  std::istringstream in(said.text);
  std::string what;
  std::int64_t begin = 0, end = 0, reserved = 0;
  in >> what >> begin >> end >> reserved;
  if (what != "piece" || !said.descriptor)
    throw RuntimeFailure(fmt::format("memory of rank {} cannot be read: {}", peer,
                                     said.text.substr(std::min(said.text.size(), said.text.find(' ') + 1))));
  if (arena.base == 0) {
    HB_CUDA(context_.driver(), cuMemAddressReserve(&arena.base, static_cast<std::size_t>(reserved), 0, 0, 0));
    arena.reserved_bytes = reserved;
  }
  try {
    map_import(arena, begin, end, said.descriptor.get());
  } catch (const RuntimeFailure& e) {
    throw RuntimeFailure(fmt::format(
        "memory of rank {} cannot be mapped by rank {}: {}. Every process must see all devices of the host "
        "(CUDA_VISIBLE_DEVICES), and its own must reach the other (nvidia-smi topo -p2p r); else set sync.transport to "
        "collective",
        peer, rank_, e.what()));
  }
  return arena.pieces.emplace(begin, Piece{end, {}, {}}).first;
}

void PeerMemory::map_import(const Arena& arena, std::int64_t begin, std::int64_t end, int descriptor) const {
  const Driver& d = context_.driver();
  CUmemGenericAllocationHandle handle{};
  HB_CUDA(d, cuMemImportFromShareableHandle(&handle, reinterpret_cast<void*>(static_cast<std::intptr_t>(descriptor)),
                                            handle_type));
  map_handle(context_, arena.base + static_cast<CUdeviceptr>(begin), end - begin, handle);
}

void PeerMemory::done_reading(CUstream stream) {
  const std::lock_guard lock(arenas_mutex_);
  std::vector<Piece*> pieces;
  for (auto& [place, arena] : arenas_)
    for (auto& [begin, piece] : arena.pieces)
      if (piece.being_read.erase(stream) != 0) pieces.push_back(&piece);
  read_.notify_all();
  if (pieces.empty()) return;
  const PooledEvent enqueued = events_.take();
  HB_CUDA(context_.driver(), cuEventRecord(enqueued.get(), stream));
  for (Piece* piece : pieces) piece->reads[stream] = enqueued;
}

void PeerMemory::let_go(int owner, std::int64_t begin, const std::string& scope) {
  std::unique_lock lock(arenas_mutex_);
  const auto arena = arenas_.find({scope, owner});
  if (arena == arenas_.end()) return;
  auto& pieces = arena->second.pieces;
  const auto piece = [&] { return pieces.find(begin); };
  // The plan has barriers between reads and what the owner does next: as a rule neither of these waits.
  read_.wait(lock, [&] { return piece() == pieces.end() || piece()->second.being_read.empty(); });
  if (piece() != pieces.end()) drop(arena->second, piece());
}

void PeerMemory::drop(Arena& arena, std::map<std::int64_t, Piece>::iterator it) {
  for (const auto& [stream, read] : it->second.reads) HB_CUDA(context_.driver(), cuEventSynchronize(read.get()));
  unmap_memory(context_, arena.base + static_cast<CUdeviceptr>(it->first), it->second.end - it->first);
  arena.pieces.erase(it);
}

std::int64_t PeerMemory::pieces_mapped() const {
  const std::lock_guard lock(arenas_mutex_);
  std::int64_t n = 0;
  for (const auto& [place, arena] : arenas_) n += std::ssize(arena.pieces);
  return n;
}

}  // namespace hotbunk::cuda
