#include "backends/cpu_gloo/shm_mailbox.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

namespace hotbunk {

ShmOutgoing::ShmOutgoing(ShmMailbox& box, std::byte* staging, const SharedRegions& regions, int world_rank_of_receiver,
                         const ShmWaiter& wait, std::string what, const std::byte* data, std::int64_t bytes)
    : box_(box),
      staging_(staging),
      receiver_(world_rank_of_receiver),
      wait_(wait),
      what_(std::move(what)),
      data_(data),
      bytes_(bytes) {
  if (bytes_ > mail_piece_bytes)  // below that a copy is cheaper than waiting for the receiver
    if (const auto found = regions.locate(data, bytes)) direct_ = *found;
}

void ShmOutgoing::step() {
  const std::uint32_t posted = box_.posted.load(std::memory_order_relaxed);
  wait_.until(
      box_.consumed, [&](std::uint32_t consumed) { return posted - consumed < 2; }, [&] { return what_; },
      [&] { return std::vector{receiver_}; });
  ShmMailbox::Slot& slot = box_.slots[posted % 2];
  const bool direct = direct_.region >= 0;
  const std::int64_t piece = direct ? bytes_ : std::min(mail_piece_bytes, bytes_ - sent_);
  if (!direct && piece > 0)
    std::memcpy(staging_ + (posted % 2) * mail_piece_bytes, data_ + sent_, static_cast<std::size_t>(piece));
  slot = {bytes_, piece, direct_.offset, direct_.region};
  sent_ += piece;
  done_ = sent_ == bytes_;
  box_.posted.store(posted + 1, std::memory_order_release);
  futex_wake_all(box_.posted);
}

void ShmOutgoing::finish() {
  if (direct_.region < 0) return;  // our data were copied
  const std::uint32_t posted = box_.posted.load(std::memory_order_relaxed);
  wait_.until(
      box_.consumed, [&](std::uint32_t consumed) { return consumed == posted; }, [&] { return what_; },
      [&] { return std::vector{receiver_}; });
}

ShmIncoming::ShmIncoming(ShmMailbox& box, const std::byte* staging, const SharedRegions& regions,
                         int world_rank_of_sender, const ShmWaiter& wait, std::string what, std::byte* data,
                         std::int64_t bytes)
    : box_(box),
      staging_(staging),
      regions_(regions),
      sender_(world_rank_of_sender),
      wait_(wait),
      what_(std::move(what)),
      data_(data),
      bytes_(bytes) {}

void ShmIncoming::step() {
  const std::uint32_t consumed = box_.consumed.load(std::memory_order_relaxed);
  wait_.until(
      box_.posted, [&](std::uint32_t posted) { return posted != consumed; }, [&] { return what_; },
      [&] { return std::vector{sender_}; });
  const ShmMailbox::Slot slot = box_.slots[consumed % 2];
  if (slot.total_bytes != bytes_)
    throw RuntimeFailure(fmt::format("{}: {} B expected, but {} B are sent", what_, bytes_, slot.total_bytes));
  const std::byte* from = slot.region < 0 ? staging_ + (consumed % 2) * mail_piece_bytes
                                          : regions_.peer(sender_, slot.region, slot.region_offset);
  HB_CHECK(from != nullptr, "{}: region {} of rank {} is not open here", what_, slot.region, sender_);
  if (slot.piece_bytes > 0) std::memcpy(data_ + received_, from, static_cast<std::size_t>(slot.piece_bytes));
  received_ += slot.piece_bytes;
  done_ = received_ == bytes_;
  box_.consumed.store(consumed + 1, std::memory_order_release);
  futex_wake_all(box_.consumed);
}

}  // namespace hotbunk
