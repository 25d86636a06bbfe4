// Content hashes that are printed and compared (P7): XXH3-128, as 32 hex digits.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace hotbunk {

class Hasher {
 public:
  Hasher();
  ~Hasher();
  Hasher(const Hasher&) = delete;
  Hasher& operator=(const Hasher&) = delete;

  void add(std::span<const std::byte> bytes);
  /// Length-prefixed, so that ("ab","c") and ("a","bc") differ.
  void add(std::string_view text);
  void add(std::int64_t value);
  void add(double value);  // by bit pattern
  std::string hex() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

std::string hash_bytes(std::span<const std::byte> bytes);
std::string hash_text(std::string_view text);

}  // namespace hotbunk
