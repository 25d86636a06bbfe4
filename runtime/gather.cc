#include "runtime/gather.h"

#include <algorithm>

namespace hotbunk {

std::vector<std::string> gather_strings(World& world, std::string_view name, const std::string& mine) {
  if (world.size() == 1) return {mine};
  std::vector<int> all;
  for (int r = 0; r < world.size(); ++r) all.push_back(r);
  auto c = world.communicator(all, name);
  std::vector<std::int64_t> sizes(all.size());
  const auto size = static_cast<std::int64_t>(mine.size());
  c->all_gather(&size, sizes.data(), sizeof size);
  const std::int64_t largest = *std::max_element(sizes.begin(), sizes.end());
  std::string padded = mine;
  padded.resize(static_cast<std::size_t>(largest));
  std::string joined(static_cast<std::size_t>(largest) * all.size(), '\0');
  c->all_gather(padded.data(), joined.data(), largest);
  std::vector<std::string> out;
  for (std::size_t r = 0; r < all.size(); ++r)
    out.push_back(joined.substr(r * static_cast<std::size_t>(largest), static_cast<std::size_t>(sizes[r])));
  return out;
}

}  // namespace hotbunk
