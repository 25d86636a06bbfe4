// Whole numbers at random, the same for a seed on every machine.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <random>

namespace hotbunk::test {

class DrawnNumbers {
 public:
  explicit DrawnNumbers(std::uint64_t seed) : random_(seed) {}
  std::int64_t in(std::int64_t from, std::int64_t to) {
    return from + static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(to - from + 1));
  }

 private:
  std::mt19937_64 random_;
};

/// How many cases, or which seed, somebody asks for in the environment.
inline std::int64_t number_asked(const char* variable, std::int64_t otherwise) {
  const char* asked = std::getenv(variable);
  return asked ? std::max(1LL, std::atoll(asked)) : otherwise;
}

}  // namespace hotbunk::test
