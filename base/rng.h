// Counter-based random numbers: a pure function of (key, counter), so that every layout draws the same ones (P7).
// Philox4x32-10, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11.
#pragma once
#include <array>
#include <cstdint>
#include <string_view>

namespace hotbunk {

using Philox4 = std::array<std::uint32_t, 4>;

constexpr Philox4 philox(std::array<std::uint32_t, 2> key, Philox4 counter) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = std::uint64_t{0xD2511F53u} * counter[0];
    const std::uint64_t p1 = std::uint64_t{0xCD9E8D57u} * counter[2];
    counter = {static_cast<std::uint32_t>(p1 >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(p1),
               static_cast<std::uint32_t>(p0 >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(p0)};
    key = {key[0] + 0x9E3779B9u, key[1] + 0xBB67AE85u};
  }
  return counter;
}

/// What a stream of numbers is for; part of the key, so that two purposes never share numbers.
enum class RngPurpose : std::uint32_t {
  init = 1,
  sample = 2,
  task = 3,
  lengths = 4,
  test = 5,
  shuffle = 6,
  jitter = 7
};

/// Four 32-bit words for (seed, purpose) at counter (a, b): e.g. sampling uses a = step<<32 | sample, b = position.
constexpr Philox4 random_words(std::uint64_t seed, RngPurpose purpose, std::uint64_t a, std::uint64_t b) {
  const std::uint64_t mixed = seed ^ (0x9E3779B97F4A7C15ull * static_cast<std::uint64_t>(purpose));
  return philox({static_cast<std::uint32_t>(mixed), static_cast<std::uint32_t>(mixed >> 32)},
                {static_cast<std::uint32_t>(a), static_cast<std::uint32_t>(a >> 32), static_cast<std::uint32_t>(b),
                 static_cast<std::uint32_t>(b >> 32)});
}

/// Uniform in [0, 1) with 24 bits.
constexpr float uniform24(std::uint32_t word) { return static_cast<float>(word >> 8) * 0x1.0p-24f; }
/// Uniform in (0, 1) with 53 bits, from two words.
constexpr double uniform53(std::uint32_t hi, std::uint32_t lo) {
  const std::uint64_t bits = (static_cast<std::uint64_t>(hi) << 21) ^ (lo >> 11);
  return (static_cast<double>(bits) + 0.5) * 0x1.0p-53;
}

/// Two independent standard normals (Box-Muller in double) for (seed, purpose, a, b).
std::array<double, 2> normal2(std::uint64_t seed, RngPurpose purpose, std::uint64_t a, std::uint64_t b);

/// A stable 64-bit key for a name (FNV-1a), e.g. a parameter's, for (parameter name, global index) draws.
constexpr std::uint64_t name_key(std::string_view name) {
  std::uint64_t h = 0xcbf29ce484222325ull;
  for (char c : name) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  return h;
}

}  // namespace hotbunk
