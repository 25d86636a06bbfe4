#include "layout/mesh.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "base/check.h"

namespace hotbunk {
namespace {

std::string describe(const Mesh& mesh) {
  std::string factors;
  for (const MeshAxis& axis : mesh.axes()) {
    factors += fmt::format("{}{} {}", factors.empty() ? "" : " x ", axis.name, axis.size);
  }
  return fmt::format("{} = {} ranks", factors, mesh.size());
}

}  // namespace

Mesh::Mesh(std::vector<MeshAxis> fastest_first) : axes_(std::move(fastest_first)) {
  std::set<std::string> names;
  for (const MeshAxis& axis : axes_) {
    HB_CHECK(axis.size >= 1, "mesh axis {} of size {}", axis.name, axis.size);
    HB_CHECK(names.insert(axis.name).second, "mesh axis {} twice", axis.name);
    strides_.push_back(size_);
    size_ *= axis.size;
  }
}

Mesh::Mesh(std::vector<MeshAxis> fastest_first, std::vector<std::int64_t> ranks) : Mesh(std::move(fastest_first)) {
  HB_CHECK(std::ssize(ranks) == size_, "{} ranks of the mesh {}", ranks.size(), describe(*this));
  ranks_ = std::move(ranks);
  places_.assign(ranks_.size(), -1);
  for (std::size_t place = 0; place < ranks_.size(); ++place) {
    HB_CHECK(ranks_[place] >= 0 && ranks_[place] < size_ && places_[static_cast<std::size_t>(ranks_[place])] < 0,
             "rank {} at place {} of the mesh {}", ranks_[place], place, describe(*this));
    places_[static_cast<std::size_t>(ranks_[place])] = static_cast<std::int64_t>(place);
  }
}

std::int64_t Mesh::place_of(std::int64_t rank) const {
  return places_.empty() ? rank : places_[static_cast<std::size_t>(rank)];
}
std::int64_t Mesh::rank_at(std::int64_t place) const {
  return ranks_.empty() ? place : ranks_[static_cast<std::size_t>(place)];
}

std::size_t Mesh::index(std::string_view axis) const {
  const auto found = std::find_if(axes_.begin(), axes_.end(), [&](const MeshAxis& a) { return a.name == axis; });
  HB_CHECK(found != axes_.end(), "mesh {} has no axis {}", describe(*this), axis);
  return static_cast<std::size_t>(found - axes_.begin());
}

bool Mesh::has(std::string_view axis) const {
  return std::any_of(axes_.begin(), axes_.end(), [&](const MeshAxis& a) { return a.name == axis; });
}

std::int64_t Mesh::extent(std::string_view axis) const { return axes_[index(axis)].size; }

std::int64_t Mesh::coordinate(std::int64_t rank, std::string_view axis) const {
  HB_CHECK(rank >= 0 && rank < size_, "rank {} outside the mesh {}", rank, describe(*this));
  const std::size_t i = index(axis);
  return place_of(rank) / strides_[i] % axes_[i].size;
}

std::vector<std::int64_t> Mesh::group_of(std::int64_t rank, const std::vector<std::string>& axes) const {
  // The member with coordinate 0 on every one of the axes, then all combinations of steps along them.
  std::int64_t origin = place_of(rank);
  for (const std::string& axis : axes) origin -= coordinate(rank, axis) * strides_[index(axis)];
  std::vector<std::int64_t> members = {origin};
  for (const std::string& axis : axes) {
    const std::size_t i = index(axis);
    const std::size_t before = members.size();
    for (std::int64_t step = 1; step < axes_[i].size; ++step) {
      for (std::size_t m = 0; m < before; ++m) members.push_back(members[m] + step * strides_[i]);
    }
  }
  for (std::int64_t& member : members) member = rank_at(member);
  std::sort(members.begin(), members.end());
  return members;
}

std::vector<std::vector<std::int64_t>> Mesh::groups(const std::vector<std::string>& axes) const {
  std::vector<std::vector<std::int64_t>> all;
  for (std::int64_t rank = 0; rank < size_; ++rank) {
    std::vector<std::int64_t> group = group_of(rank, axes);
    if (group.front() == rank) all.push_back(std::move(group));
  }
  return all;
}

Result<Mesh> mesh_from_order(std::string_view order, const std::map<std::string, std::int64_t>& sizes) {
  Diagnostics errors;
  std::vector<MeshAxis> axes;
  std::set<std::string> names;
  for (std::size_t begin = 0; begin <= order.size();) {
    const std::size_t end = std::min(order.find('-', begin), order.size());
    const std::string name(order.substr(begin, end - begin));
    begin = end + 1;
    if (!names.insert(name).second) {
      errors.push_back({"E240", fmt::format("rank order '{}' names the axis '{}' twice", order, name), {}, {}, {}});
      continue;
    }
    const auto size = sizes.find(name);
    axes.push_back({name, size == sizes.end() ? 1 : size->second});
    if (axes.back().size < 1) {
      errors.push_back(
          {"E240", fmt::format("axis '{}' has size {}", name, axes.back().size), {}, {}, "sizes start at 1"});
    }
  }
  for (const auto& [name, size] : sizes) {
    if (size == 1 || names.count(name)) continue;
    errors.push_back({"E241",
                      fmt::format("rank order '{}' does not place the axis '{}' of size {}", order, name, size),
                      {},
                      {},
                      fmt::format("add '{}' to the order, fastest axis first", name)});
  }
  if (!errors.empty()) return fail(std::move(errors));
  return Mesh(std::move(axes));
}

Status check_expert_mesh(const Mesh& dense, const Mesh& expert) {
  if (dense.size() != expert.size()) {
    return fail({"E242",
                 "the dense and the expert mesh cover different numbers of ranks",
                 {},
                 {fmt::format("dense: {}", describe(dense)), fmt::format("expert: {}", describe(expert))},
                 "ranks / (etp x ep x pp) is the expert data parallelism"});
  }
  const auto stage = [](const Mesh& mesh, std::int64_t rank) {
    return mesh.has("pp") ? mesh.coordinate(rank, "pp") : 0;
  };
  for (std::int64_t rank = 0; rank < dense.size(); ++rank) {
    if (stage(dense, rank) == stage(expert, rank)) continue;
    return fail({"E243",
                 "a rank is in different pipeline stages for dense and expert parts",
                 {},
                 {fmt::format("rank {}: stage {} of {}, stage {} of {}", rank, stage(dense, rank), describe(dense),
                              stage(expert, rank), describe(expert))},
                 "give pp the same size and the same place (slowest) in both orders"});
  }
  return {};
}

}  // namespace hotbunk
