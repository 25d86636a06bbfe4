#include "runtime/gather.h"

#include <algorithm>

namespace hotbunk {
namespace {

constexpr std::int64_t piece_bytes = std::int64_t{1} << 20;  // of every rank at once: no rank holds all texts padded

/// All meet; who does not keep has an empty list.
std::vector<std::string> gathered(World& world, std::string_view name, const std::string& mine, bool keep) {
  if (world.size() == 1) return {mine};
  std::vector<int> all;
  for (int r = 0; r < world.size(); ++r) all.push_back(r);
  auto c = world.communicator(all, name);
  std::vector<std::int64_t> sizes(all.size());
  const auto size = static_cast<std::int64_t>(mine.size());
  c->all_gather(&size, sizes.data(), sizeof size);
  const std::int64_t largest = *std::max_element(sizes.begin(), sizes.end());
  std::vector<std::string> out(keep ? all.size() : 0);
  std::string piece, joined;
  for (std::int64_t at = 0; at < largest; at += piece_bytes) {
    const std::int64_t width = std::min(piece_bytes, largest - at);
    piece.assign(mine, static_cast<std::size_t>(std::min(at, size)), static_cast<std::size_t>(width));
    piece.resize(static_cast<std::size_t>(width));
    joined.resize(static_cast<std::size_t>(width) * all.size());
    c->all_gather(piece.data(), joined.data(), width);
    for (std::size_t r = 0; r < out.size(); ++r)
      if (at < sizes[r])
        out[r].append(joined, r * static_cast<std::size_t>(width),
                      static_cast<std::size_t>(std::min(width, sizes[r] - at)));
  }
  return out;
}

}  // namespace

std::vector<std::string> gather_strings(World& world, std::string_view name, const std::string& mine) {
  return gathered(world, name, mine, true);
}

std::vector<std::string> gather_strings_at_first(World& world, std::string_view name, const std::string& mine) {
  return gathered(world, name, mine, world.rank() == 0);
}

}  // namespace hotbunk
