#include "backends/cpu_gloo/cpu_world.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "backends/cpu_gloo/arena.h"
#include "backends/cpu_gloo/gloo_communicator.h"
#include "backends/cpu_gloo/shm_communicator.h"
#include "base/check.h"
#include "runtime/shm_region.h"
#include "runtime/tcp_store.h"

namespace hotbunk {
namespace {

/// A group of one: everything stays where it is.
class SoloCommunicator final : public Communicator {
 public:
  SoloCommunicator(std::string name, int world_rank) : Communicator(std::move(name), {world_rank}, 0) {}
  Transport transport() const override { return Transport::solo; }

 private:
  static void copy(std::byte* to, const std::byte* from, std::int64_t bytes) {
    if (to != from && bytes > 0) std::memmove(to, from, static_cast<std::size_t>(bytes));
  }
  void do_all_gather(const Call&, const std::byte* send, std::byte* recv, std::int64_t bytes) override {
    copy(recv, send, bytes);
  }
  void do_reduce_scatter(const Call& c, const std::byte* send, std::byte* recv) override {
    copy(recv, send, c.count * size_of(c.dtype));
  }
  void do_all_reduce(const Call& c, const std::byte* send, std::byte* recv) override {
    copy(recv, send, c.count * size_of(c.dtype));
  }
  void do_broadcast(const Call&, std::byte*, std::int64_t) override {}
  void do_all_to_all(const Call&, const std::byte* send, std::span<const CommPart> send_parts, std::byte* recv,
                     std::span<const CommPart> recv_parts) override {
    copy(recv + recv_parts[0].begin, send + send_parts[0].begin, send_parts[0].bytes);
  }
  void do_send_recv(int, const std::byte*, std::int64_t, int, std::byte*, std::int64_t) override {
    HB_CHECK(false, "group {} has one rank: nobody to send to", name());
  }
  void do_barrier(const Call&) override {}
};

}  // namespace

CpuWorld::CpuWorld(const WorldOptions& options) : World(options), regions_(std::make_unique<SharedRegions>()) {}
CpuWorld::CpuWorld(const LaunchEnv& env, const WorldOptions& options)
    : World(env, options), regions_(std::make_unique<SharedRegions>()) {}
CpuWorld::~CpuWorld() = default;

int CpuWorld::share(const Arena& arena) {
  HB_CHECK(arena.fd() >= 0, "arena {} is not shared memory", arena.options().name);
  std::vector<SharedMapping> peers(static_cast<std::size_t>(size()));
  if (size() > 1) {
    const std::int64_t bytes = arena.options().reserve_bytes;
    const auto handles =
        gather(fmt::format("region/{}", num_regions_), shared_handle(arena.fd(), bytes, arena.options().pieces));
    for (int r = 0; r < size(); ++r)
      if (r != rank() && same_host(r)) peers[r] = open_shared(handles[r], true);
    barrier(fmt::format("region/{}/open", num_regions_));  // the descriptors may be closed from here on
  }
  ++num_regions_;
  return regions_->add(arena.base(), arena.options().reserve_bytes, std::move(peers));
}

const std::byte* CpuWorld::peer_pointer(int rank, int region, std::int64_t offset) const {
  return regions_->peer(rank, region, offset);
}

void CpuWorld::forget_peers() { regions_->forget_peers(); }

std::unique_ptr<Communicator> CpuWorld::communicator(std::span<const int> ranks, std::string_view name) {
  const Transport transport = ranks.size() == 1               ? Transport::solo
                              : why_no_sharing(ranks).empty() ? Transport::shm
                                                              : Transport::gloo;
  return communicator(ranks, name, transport);
}

std::unique_ptr<Communicator> CpuWorld::communicator(std::span<const int> ranks, std::string_view name,
                                                     Transport transport) {
  const std::vector<int> group(ranks.begin(), ranks.end());
  const auto me = std::find(group.begin(), group.end(), rank());
  HB_CHECK(me != group.end(), "rank {} is not in group {} (ranks {})", rank(), name, fmt::join(group, ", "));
  if (group.size() == 1) return std::make_unique<SoloCommunicator>(std::string(name), rank());
  const int mine = static_cast<int>(me - group.begin());
  if (transport == Transport::gloo) {
    if (!gloo_device_) gloo_device_ = make_gloo_device(local_address(store().fd()));
    return std::make_unique<GlooCommunicator>(std::string(name), group, mine, gloo_device_, store(), watch(),
                                              GlooOptions{options().check_collectives});
  }
  HB_CHECK(transport == Transport::shm, "group {} of {} ranks over transport {}", name, group.size(),
           name_of(transport));
  if (const std::string reason = why_no_sharing(group); !reason.empty())
    throw RuntimeFailure(fmt::format("group {} cannot use shared memory: {}", name, reason));
  const std::string key = fmt::format("comm/{}/{}", name, fmt::join(group, ","));
  std::vector<SharedMapping> segments(group.size());
  segments[mine] =
      SharedMapping::create(std::string(name), ShmCommunicator::segment_bytes(static_cast<int>(group.size())));
  const auto handles = gather(key, shared_handle(segments[mine].fd(), segments[mine].bytes()), group);
  for (std::size_t r = 0; r < group.size(); ++r)
    if (static_cast<int>(r) != mine) segments[r] = open_shared(handles[r], true);
  // A barrier of the group, or a rank could be gone (its descriptor closed) before the last one has opened it.
  meet(key, group);
  return std::make_unique<ShmCommunicator>(std::string(name), group, mine, std::move(segments), *regions_, watch());
}

}  // namespace hotbunk
