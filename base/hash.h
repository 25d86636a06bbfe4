// Content hashes that are printed and compared (P7): XXH3-128, as 32 hex digits.
#pragma once
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
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
  /// A plan is millions of these: they gather here and are hashed many at a time.
  void add(std::int64_t value) {
    if (used_ + sizeof value > waiting_.size()) flush();
    std::memcpy(waiting_.data() + used_, &value, sizeof value);
    used_ += sizeof value;
  }
  void add(double value) { add(std::bit_cast<std::int64_t>(value)); }  // by bit pattern
  std::string hex();

 private:
  void flush();

  struct State;
  std::unique_ptr<State> state_;
  std::array<std::byte, 4096> waiting_;
  std::size_t used_ = 0;
};

/// One element's part of a tensor's hash: the sum of all parts, modulo 2^64, names the tensor's content however it is
/// cut, since each shard adds the parts of its own elements. `index`: row-major in the whole tensor; `bits`: the
/// element's, zero-extended. Any one changed element changes the sum: for a fixed index this is a bijection of the
/// bits. Source: the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
constexpr std::uint64_t element_hash(std::uint64_t index, std::uint64_t bits) {
  std::uint64_t z = (index + 1) * 0x9e3779b97f4a7c15u + bits;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

std::string hash_bytes(std::span<const std::byte> bytes);
std::string hash_text(std::string_view text);

}  // namespace hotbunk
