#include "runtime/world.h"

#include <fmt/format.h>

#include <utility>

#include "base/check.h"
#include "base/cores.h"
#include "base/limits.h"
#include "runtime/shm_region.h"
#include "runtime/store_server.h"
#include "runtime/tcp_store.h"

namespace hotbunk {
/// The status pages of the ranks of this host.
struct World::Status {
  std::vector<SharedMapping> pages;  // by world rank, empty for other hosts
};

World::World(const WorldOptions& options)
    : options_(options), watch_(std::make_unique<DeathWatch>(DeathWatchOptions{})) {
  hosts_ = {host_identity()};
}

void World::watch_alone() {
  HB_CHECK(size_ == 1, "{} ranks watch each other", size_);
  DeathWatchOptions watch;
  watch.alone = true;
  watch.unwind_seconds = options_.unwind_seconds;
  watch.timeout_seconds = options_.timeout_seconds;
  watch_ = std::make_unique<DeathWatch>(watch);
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
std::string World::get(std::string_view key, std::vector<int> from) {
  return get(key, std::move(from), options_.connect_seconds);
}
std::string World::await(std::string_view key, int from) {
  constexpr double ever = 1e9;  // whether it takes too long the watch says
  return get(key, {from}, ever);
}
std::string World::get(std::string_view key, std::vector<int> from, double seconds) {
  const StallWatch::Wait wait(
      watch_->stalls(), [&] { return fmt::format("the rendezvous, for \"{}\"", key); }, [&] { return from; });
  return store_->get(key, seconds);
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
  for (int r : ranks) values.push_back(r == rank_ ? value : get(fmt::format("{}/{}", key, r), {r}));
  return values;
}

void World::meet_hosts() {
  hosts_ = gather("host", host_identity());

  status_ = std::make_unique<Status>();
  status_->pages.resize(static_cast<std::size_t>(size_));
  status_->pages[rank_] = SharedMapping::create("status", sizeof(RankStatus));
  const auto handles = gather("status", shared_handle(status_->pages[rank_].fd(), sizeof(RankStatus)));
  std::string reason;  // why memory of this host cannot be shared; empty when it can
  for (int r = 0; r < size_; ++r) {
    if (r == rank_ || hosts_[r] != hosts_[rank_]) continue;
    try {
      status_->pages[r] = open_shared(handles[r], false);
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

std::int64_t World::cores() {
  if (size_ == 1) return local_cores();
  const std::string mine = allowed_cores();
  const std::vector<std::string> all = gather("cores", mine);
  std::vector<std::string> of_host;
  for (int r = 0; r < size_; ++r)
    if (same_host(r)) of_host.push_back(all[static_cast<std::size_t>(r)]);
  return cores_of_rank(mine, of_host, local_cores());
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

void World::meet(const std::string& key, std::span<const int> ranks) {
  if (store_->add(key + "/arrived", 1) == std::ssize(ranks)) set(key + "/all", "");
  get(key + "/all", {ranks.begin(), ranks.end()});  // whoever is there already waits too, and says so
}

void World::barrier(std::string_view name) {
  if (size_ > 1) meet(fmt::format("barrier/{}", name), everyone());
}

void World::leave() { watch_->leave(); }

}  // namespace hotbunk
