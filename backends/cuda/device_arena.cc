#include "backends/cuda/device_arena.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <utility>

#include "base/check.h"

namespace hotbunk::cuda {

DeviceArena::DeviceArena(const Context& context, BookOptions options, const Ranges& ranges, Users users)
    : ArenaBooks(std::move(options)), context_(context), users_(std::move(users)) {
  const std::int64_t granule = context.granularity_bytes();
  reserved_bytes_ = (book().reserve_bytes + granule - 1) / granule * granule;
  if (reserved_bytes_ == 0) return;
  std::set<std::int64_t> ends = {0, reserved_bytes_};
  for (const std::int64_t cut : ranges.cuts)
    for (const std::int64_t at : {cut / granule * granule, (cut + granule - 1) / granule * granule})
      if (at > 0 && at < reserved_bytes_) ends.insert(at);
  for (auto it = ends.begin(); std::next(it) != ends.end(); ++it) {
    const bool sleeps = std::ranges::any_of(
        ranges.sleeping, [&](const auto& range) { return range.first < *std::next(it) && *it < range.second; });
    pieces_.push_back({*it, *std::next(it), 0, sleeps});
  }
  HB_CUDA(context.driver(), cuMemAddressReserve(&base_, static_cast<std::size_t>(reserved_bytes_), 0, 0, 0));
}

DeviceArena::~DeviceArena() {
  if (base_ == 0) return;
  const Driver& d = context_.driver();
  bool empty = true;
  for (const Piece& p : pieces_) try {
      if (p.used > 0) unmap_piece(p);
    } catch (const RuntimeFailure&) {
      empty = false;  // an error of the device or the death of a rank, which has been said
    }
  // Addresses at which memory stayed are not given back: freeing them is an error of the whole context.
  if (empty) d.cuMemAddressFree(base_, static_cast<std::size_t>(reserved_bytes_));
}

std::int64_t DeviceArena::physical_bytes() const {
  std::int64_t bytes = 0;
  for (const Piece& p : pieces_) bytes += p.used > 0 ? p.end - p.begin : 0;
  return bytes;
}

template <class F>
void DeviceArena::each_piece(std::int64_t begin, std::int64_t end, F&& visit) {
  auto it = std::ranges::upper_bound(pieces_, begin, {}, &Piece::end);
  for (; it != pieces_.end() && it->begin < end; ++it) visit(*it, std::min(end, it->end) - std::max(begin, it->begin));
}

void DeviceArena::map_piece(const Piece& p) {
  // NCCL, too, gives what it registers to other processes.
  map_memory(context_, at(p.begin), p.end - p.begin, users_.peers != nullptr || users_.registered != nullptr);
  if (users_.peers != nullptr) users_.peers->offer(users_.scope, base_, reserved_bytes_, p.begin, p.end);
  if (users_.registered != nullptr && !p.sleeps) users_.registered->mapped(at(p.begin), p.end - p.begin);
}

void DeviceArena::unmap_piece(const Piece& p) {
  if (users_.registered != nullptr && !p.sleeps) users_.registered->unmapping(at(p.begin));
  if (users_.peers != nullptr) users_.peers->take_back(users_.scope, p.begin);
  unmap_memory(context_, at(p.begin), p.end - p.begin);
}

void DeviceArena::provide(std::int64_t begin, std::int64_t end, std::string_view who) {
  std::vector<Piece*> mapped;
  try {
    each_piece(begin, end, [&](Piece& p, std::int64_t) {
      if (p.used > 0) return;
      map_piece(p);
      mapped.push_back(&p);
    });
  } catch (const RuntimeFailure& e) {
    for (const Piece* p : mapped) unmap_piece(*p);
    throw RuntimeFailure(fmt::format("arena {}: the device gives no {} for {} (mapped now: {}): {}", book().name,
                                     bytes_text(end - begin), who, bytes_text(mapped_now()), e.what()));
  }
  each_piece(begin, end, [](Piece& p, std::int64_t bytes) { p.used += bytes; });
}

void DeviceArena::withdraw(std::int64_t begin, std::int64_t end) {
  each_piece(begin, end, [&](Piece& p, std::int64_t bytes) {
    if (p.used == bytes) unmap_piece(p);
    p.used -= bytes;
  });
}

}  // namespace hotbunk::cuda
