// Numbers things in the order in which they come: equal ones get the same number.
#pragma once
#include <cstdint>
#include <map>
#include <utility>

namespace hotbunk {

template <class T>
class Numbers {
 public:
  std::int32_t operator()(T thing) {
    return known_.try_emplace(std::move(thing), static_cast<std::int32_t>(known_.size())).first->second;
  }
  std::int64_t size() const { return static_cast<std::int64_t>(known_.size()); }

 private:
  std::map<T, std::int32_t> known_;
};

}  // namespace hotbunk
