#define XXH_INLINE_ALL
#include "base/hash.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <bit>

namespace hotbunk {

struct Hasher::State {
  alignas(64) XXH3_state_t xxh;
};

Hasher::Hasher() : state_(std::make_unique<State>()) { XXH3_128bits_reset(&state_->xxh); }
Hasher::~Hasher() = default;

void Hasher::add(std::span<const std::byte> bytes) { XXH3_128bits_update(&state_->xxh, bytes.data(), bytes.size()); }

void Hasher::add(std::int64_t value) { add(std::as_bytes(std::span{&value, 1})); }
void Hasher::add(double value) { add(std::bit_cast<std::int64_t>(value)); }

void Hasher::add(std::string_view text) {
  add(static_cast<std::int64_t>(text.size()));
  add(std::as_bytes(std::span{text.data(), text.size()}));
}

std::string Hasher::hex() const {
  const XXH128_hash_t h = XXH3_128bits_digest(&state_->xxh);
  return fmt::format("{:016x}{:016x}", h.high64, h.low64);
}

std::string hash_bytes(std::span<const std::byte> bytes) {
  Hasher h;
  h.add(bytes);
  return h.hex();
}

std::string hash_text(std::string_view text) { return hash_bytes(std::as_bytes(std::span{text.data(), text.size()})); }

}  // namespace hotbunk
