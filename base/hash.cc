#define XXH_INLINE_ALL
#include "base/hash.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>

namespace hotbunk {

struct Hasher::State {
  alignas(64) XXH3_state_t xxh;
};

Hasher::Hasher() : state_(std::make_unique<State>()) { XXH3_128bits_reset(&state_->xxh); }
Hasher::~Hasher() = default;

void Hasher::flush() {
  XXH3_128bits_update(&state_->xxh, waiting_.data(), used_);
  used_ = 0;
}

void Hasher::add(std::span<const std::byte> bytes) {
  if (used_ + bytes.size() > waiting_.size()) flush();
  if (bytes.size() > waiting_.size()) {
    XXH3_128bits_update(&state_->xxh, bytes.data(), bytes.size());
    return;
  }
  std::ranges::copy(bytes, waiting_.begin() + static_cast<std::ptrdiff_t>(used_));
  used_ += bytes.size();
}

void Hasher::add(std::string_view text) {
  add(static_cast<std::int64_t>(text.size()));
  add(std::as_bytes(std::span{text.data(), text.size()}));
}

std::string Hasher::hex() {
  flush();
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
