#include "backends/cuda/store_communicator.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"

namespace hotbunk::cuda {
namespace {

constexpr std::int64_t piece_bytes = std::int64_t{1} << 20;  // of a value: the store takes 4 MiB at most (wire.h)

}  // namespace

StoreCommunicator::StoreCommunicator(std::string name, std::vector<int> ranks, int rank, SayToGroup say)
    : Communicator(std::move(name), std::move(ranks), rank), say_(std::move(say)) {}

void StoreCommunicator::refuse(const Call& call) const {
  throw RuntimeFailure(fmt::format("{}: over host memory ranks of several processes only gather", describe(call)));
}

void StoreCommunicator::do_all_gather(const Call& call, const std::byte* send, std::byte* recv, std::int64_t bytes) {
  for (std::int64_t at = 0; at < bytes; at += piece_bytes) {
    const auto size = static_cast<std::size_t>(std::min(piece_bytes, bytes - at));
    const auto all = say_(fmt::format("host/{}/{}/{}", name(), call.sequence, at),
                          std::string(reinterpret_cast<const char*>(send) + at, size));
    for (std::size_t r = 0; r < all.size(); ++r) {
      if (all[r].size() != size)
        throw RuntimeFailure(fmt::format("{}: rank {} gives {} B and rank {} {}", describe(call), ranks()[r],
                                         all[r].size(), ranks()[static_cast<std::size_t>(rank())], size));
      std::memcpy(recv + static_cast<std::int64_t>(r) * bytes + at, all[r].data(), size);
    }
  }
}

void StoreCommunicator::do_barrier(const Call& call) { say_(fmt::format("host/{}/{}", name(), call.sequence), ""); }
void StoreCommunicator::do_reduce_scatter(const Call& call, const std::byte*, std::byte*) { refuse(call); }
void StoreCommunicator::do_all_reduce(const Call& call, const std::byte*, std::byte*) { refuse(call); }
void StoreCommunicator::do_broadcast(const Call& call, std::byte*, std::int64_t) { refuse(call); }
void StoreCommunicator::do_all_to_all(const Call& call, const std::byte*, std::span<const CommPart>, std::byte*,
                                      std::span<const CommPart>) {
  refuse(call);
}
void StoreCommunicator::do_send_recv(int, const std::byte*, std::int64_t, int, std::byte*, std::int64_t) {
  refuse({.op = CommOp::send_recv});
}

}  // namespace hotbunk::cuda
