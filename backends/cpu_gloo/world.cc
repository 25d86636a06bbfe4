#include "backends/cpu_gloo/world.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <utility>

#include "backends/cpu_gloo/arena.h"
#include "backends/cpu_gloo/gloo_communicator.h"
#include "backends/cpu_gloo/shm_communicator.h"
#include "backends/cpu_gloo/store_server.h"
#include "backends/cpu_gloo/tcp_store.h"
#include "base/check.h"
#include "base/limits.h"

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
  void do_all_to_all(const Call&, const std::byte* send, std::span<const std::int64_t> bytes, std::byte* recv,
                     std::span<const std::int64_t>) override {
    copy(recv, send, bytes[0]);
  }
  void do_send_recv(int, const std::byte*, std::int64_t, int, std::byte*, std::int64_t) override {
    HB_CHECK(false, "group {} has one rank: nobody to send to", name());
  }
  void do_barrier(const Call&) override {}
};

/// "pid fd bytes": where a peer finds a shared segment.
std::string handle_text(int fd, std::int64_t bytes) { return fmt::format("{} {} {}", getpid(), fd, bytes); }

SharedMapping open_handle(const std::string& text, bool writable) {
  std::int64_t numbers[3] = {};
  const char *at = text.data(), *last = text.data() + text.size();
  for (std::int64_t& n : numbers) {
    const auto [end, error] = std::from_chars(at, last, n);
    HB_CHECK(error == std::errc(), "shared-memory handle \"{}\"", text);
    at = std::min(end + 1, last);
  }
  return SharedMapping::open(static_cast<int>(numbers[0]), static_cast<int>(numbers[1]), numbers[2], writable);
}

}  // namespace

/// The status pages of the ranks of this host.
struct World::Status {
  std::vector<SharedMapping> pages;  // by world rank, empty for other hosts
};

World::World(const WorldOptions& options)
    : options_(options),
      watch_(std::make_unique<DeathWatch>(DeathWatchOptions{})),
      regions_(std::make_unique<SharedRegions>()) {
  hosts_ = {host_identity()};
}

World::World(const LaunchEnv& env, const WorldOptions& options) : World(options) {
  if (env.world_size == 1) return;
  rank_ = env.rank;
  size_ = env.world_size;
  HB_CHECK(rank_ >= 0 && rank_ < size_, "rank {} of {}", rank_, size_);
  // Two connections, two pages and an arena, what standard streams and libraries hold; rank 0: everybody's connections.
  check_open_files(16 + (rank_ == 0 ? 2 * size_ : 0));
  const Meeting at = {env.master_addr, env.master_port, env.token};
  if (rank_ == 0) {
    StoreOptions store;
    store.listen_fd = env.listen_fd;
    store.at = at;
    store.world_size = size_;
    server_ = std::make_unique<TcpStoreServer>(std::move(store));
  }
  store_ = std::make_unique<TcpStore>(at, options_.connect_seconds);
  DeathWatchOptions watch;
  watch.rank = rank_;
  watch.world_size = size_;
  watch.socket = join(at, options_.connect_seconds);
  watch.unwind_seconds = options_.unwind_seconds;
  watch.say_after_seconds = options_.say_after_seconds;
  watch.timeout_seconds = options_.timeout_seconds;
  watch_ = std::make_unique<DeathWatch>(watch);
  store_->set_interrupt([this](bool broken) {
    if (broken) watch_->wait_for_death(2.0);  // rank 0 went because of another one: its watcher told us before
    watch_->check("the rendezvous");
  });
  meet_hosts();
}

World::~World() {
  // Shared pages go last: the watch may still read them.
  store_.reset();
  watch_.reset();
  server_.reset();
}

void World::set(std::string_view key, std::string_view value) { store_->set(key, value); }
std::string World::get(std::string_view key, int from) {
  const StallWatch::Wait wait(
      watch_->stalls(), [&] { return fmt::format("the rendezvous, for \"{}\"", key); },
      [from] { return from < 0 ? std::vector<int>{} : std::vector{from}; });
  return store_->get(key, options_.connect_seconds);
}

std::vector<std::string> World::gather(const std::string& key, const std::string& value) {
  return gather(key, value, everyone());
}

std::vector<int> World::everyone() const {
  std::vector<int> all(static_cast<std::size_t>(size_));
  for (int r = 0; r < size_; ++r) all[r] = r;
  return all;
}

std::vector<std::string> World::gather(const std::string& key, const std::string& value, std::span<const int> ranks) {
  set(fmt::format("{}/{}", key, rank_), value);
  std::vector<std::string> values;
  for (int r : ranks) values.push_back(r == rank_ ? value : get(fmt::format("{}/{}", key, r), r));
  return values;
}

void World::meet_hosts() {
  hosts_ = gather("host", host_identity());

  status_ = std::make_unique<Status>();
  status_->pages.resize(static_cast<std::size_t>(size_));
  status_->pages[rank_] = SharedMapping::create("status", sizeof(RankStatus));
  const auto handles = gather("status", handle_text(status_->pages[rank_].fd(), sizeof(RankStatus)));
  std::string reason;  // why memory of this host cannot be shared; empty when it can
  for (int r = 0; r < size_; ++r) {
    if (r == rank_ || hosts_[r] != hosts_[rank_]) continue;
    try {
      status_->pages[r] = open_handle(handles[r], false);
    } catch (const RuntimeFailure& e) {
      reason = e.what();
    }
  }
  // Everybody must draw the same conclusion, so everybody's answer counts.
  no_sharing_ = gather("sharing", reason);
  std::vector<RankStatus*> slots;
  for (const SharedMapping& m : status_->pages) slots.push_back(reinterpret_cast<RankStatus*>(m.base()));
  watch_->use_status(std::move(slots));
}

bool World::same_host(int rank) const { return hosts_.at(rank) == hosts_[rank_]; }

std::string World::why_no_sharing(std::span<const int> ranks) const {
  for (int r : ranks) {
    if (!same_host(r)) return fmt::format("rank {} is on another host", r);
    if (size_ > 1 && !no_sharing_[r].empty()) return fmt::format("rank {}: {}", r, no_sharing_[r]);
  }
  return "";
}

std::string World::why_no_sharing() const {
  for (int r = 1; r < size_; ++r)
    if (hosts_[r] != hosts_[0]) return fmt::format("rank {} is not on rank 0's host", r);
  return why_no_sharing(everyone());
}

int World::share(const Arena& arena) {
  HB_CHECK(arena.fd() >= 0, "arena {} is not shared memory", arena.options().name);
  std::vector<SharedMapping> peers(static_cast<std::size_t>(size_));
  if (size_ > 1) {
    const std::int64_t bytes = arena.options().reserve_bytes;
    const auto handles = gather(fmt::format("region/{}", num_regions_), handle_text(arena.fd(), bytes));
    for (int r = 0; r < size_; ++r)
      if (r != rank_ && same_host(r)) peers[r] = open_handle(handles[r], false);
    barrier(fmt::format("region/{}/open", num_regions_));  // the descriptors may be closed from here on
  }
  ++num_regions_;
  return regions_->add(arena.base(), arena.options().reserve_bytes, std::move(peers));
}

const std::byte* World::peer_pointer(int rank, int region, std::int64_t offset) const {
  return regions_->peer(rank, region, offset);
}

std::unique_ptr<Communicator> World::communicator(std::span<const int> ranks, std::string_view name) {
  const Transport transport = ranks.size() == 1               ? Transport::solo
                              : why_no_sharing(ranks).empty() ? Transport::shm
                                                              : Transport::gloo;
  return communicator(ranks, name, transport);
}

std::unique_ptr<Communicator> World::communicator(std::span<const int> ranks, std::string_view name,
                                                  Transport transport) {
  const std::vector<int> group(ranks.begin(), ranks.end());
  const auto me = std::find(group.begin(), group.end(), rank_);
  HB_CHECK(me != group.end(), "rank {} is not in group {} (ranks {})", rank_, name, fmt::join(group, ", "));
  if (group.size() == 1) return std::make_unique<SoloCommunicator>(std::string(name), rank_);
  const int rank = static_cast<int>(me - group.begin());
  if (transport == Transport::gloo) {
    if (!gloo_device_) gloo_device_ = make_gloo_device(local_address(store_->fd()));
    return std::make_unique<GlooCommunicator>(std::string(name), group, rank, gloo_device_, *store_, *watch_,
                                              GlooOptions{options_.check_collectives});
  }
  HB_CHECK(transport == Transport::shm, "group {} of {} ranks over transport {}", name, group.size(),
           name_of(transport));
  if (const std::string reason = why_no_sharing(group); !reason.empty())
    throw RuntimeFailure(fmt::format("group {} cannot use shared memory: {}", name, reason));
  const std::string key = fmt::format("comm/{}/{}", name, fmt::join(group, ","));
  std::vector<SharedMapping> segments(group.size());
  segments[rank] =
      SharedMapping::create(std::string(name), ShmCommunicator::segment_bytes(static_cast<int>(group.size())));
  const auto handles = gather(key, handle_text(segments[rank].fd(), segments[rank].bytes()), group);
  for (std::size_t r = 0; r < group.size(); ++r)
    if (static_cast<int>(r) != rank) segments[r] = open_handle(handles[r], true);
  // A barrier of the group, or a rank could be gone (its descriptor closed) before the last one has opened it.
  meet(key, static_cast<int>(group.size()));
  return std::make_unique<ShmCommunicator>(std::string(name), group, rank, std::move(segments), *regions_, *watch_);
}

void World::meet(const std::string& key, int num_ranks) {
  if (store_->add(key + "/arrived", 1) == num_ranks) set(key + "/all", "");
  get(key + "/all");
}

void World::barrier(std::string_view name) {
  if (size_ > 1) meet(fmt::format("barrier/{}", name), size_);
}

void World::leave() { watch_->leave(); }

}  // namespace hotbunk
