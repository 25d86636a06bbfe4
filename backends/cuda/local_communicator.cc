#include "backends/cuda/local_communicator.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "backends/cuda/rank_sums.h"
#include "base/check.h"

namespace hotbunk::cuda {
namespace {

constexpr std::chrono::milliseconds slice{100};  // how late a death may be noticed here

CUdeviceptr device(const std::byte* p) { return reinterpret_cast<CUdeviceptr>(p); }

}  // namespace

/// One rank's part of a meeting.
struct LocalCommunicator::Post {
  Call call;
  const std::byte* send = nullptr;
  std::byte* recv = nullptr;
  std::vector<CommPart> send_parts{}, recv_parts{};  // all_to_all
};

/// Events and posts are by meeting: even and odd ones in turn. Whoever comes to meeting n + 1 has taken all it needs of
/// meeting n, so at n + 2 both may be written again.
class LocalCommunicator::Group {
 public:
  Group(const Driver& driver, std::size_t ranks) : driver_(driver), ranks_(ranks), mails_(ranks * ranks) {}
  ~Group() {
    for (const CUevent e : events_) driver_.cuEventDestroy(e);
  }

  struct Rank {
    std::uint64_t arrived = 0;  // its last meeting
    Post posts[2];
    CUevent enqueued[2] = {};
  };
  struct Mail {
    std::uint64_t posted = 0, taken = 0;
    const std::byte* data = nullptr;
    std::int64_t bytes = 0, expected = 0;
    CUevent enqueued = nullptr, received = nullptr;
  };

  /// Made where it is first needed, under the lock.
  CUevent event(CUevent& e) {
    if (e != nullptr) return e;
    HB_CUDA(driver_, cuEventCreate(&e, CU_EVENT_DISABLE_TIMING));
    events_.push_back(e);
    return e;
  }
  Mail& mail(int from, int to) {
    return mails_[static_cast<std::size_t>(from) * ranks_.size() + static_cast<std::size_t>(to)];
  }

  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Rank>& ranks() { return ranks_; }

 private:
  Driver driver_;
  std::vector<Rank> ranks_;
  std::vector<Mail> mails_;  // [from][to]
  std::vector<CUevent> events_;
};

LocalCommunicator::LocalCommunicator(std::string name, std::vector<int> ranks, int rank, std::shared_ptr<Group> group,
                                     const DeathWatch& watch, const std::atomic<bool>& stopped,
                                     std::optional<Launcher> launch)
    : Communicator(std::move(name), std::move(ranks), rank),
      group_(std::move(group)),
      watch_(watch),
      stopped_(stopped),
      launch_(std::move(launch)) {
  if (size() > most_ranks)
    throw RuntimeFailure(
        fmt::format("group {} of {} ranks: the local transport takes {} at most", this->name(), size(), most_ranks));
}
LocalCommunicator::~LocalCommunicator() = default;

void LocalCommunicator::copy(std::byte* to, const std::byte* from, std::int64_t bytes) const {
  if (launch_) launch_->copy(device(to), device(from), bytes);
  else if (bytes > 0) std::memmove(to, from, static_cast<std::size_t>(bytes));
}

void LocalCommunicator::reduce(std::byte* to, std::span<const std::byte* const> from, std::int64_t count,
                               const Call& call) const {
  HB_CHECK(launch_, "group {} is over host memory, where nothing is reduced", name());
  reduce_ranks(*launch_, to, from, count, call.dtype, call.reduce);
}

void LocalCommunicator::record(CUevent e) const {
  if (launch_) HB_CUDA(launch_->driver(), cuEventRecord(e, launch_->stream()));
}
void LocalCommunicator::wait(CUevent e) const {
  if (launch_) HB_CUDA(launch_->driver(), cuStreamWaitEvent(launch_->stream(), e, 0));
}

template <class Ready>
void LocalCommunicator::until(const Ready& ready, const std::function<std::string()>& what,
                              const std::function<std::vector<int>()>& missing) {
  // The watch asks `missing` from its own thread, which takes the group's lock: it is told of the wait without it.
  std::optional<StallWatch::Wait> told;
  for (bool first = true;; first = false) {
    {
      std::unique_lock lock(group_->mutex);
      if (group_->changed.wait_for(lock, slice, ready)) return;
    }
    // Ranks that fail at the same time say so when their devices have ended: who waits in one must not wait for that.
    if (launch_ && stopped_.load()) throw RuntimeFailure(fmt::format("{}, when this rank had stopped", what()));
    if (watch_.any_dead()) watch_.check(fmt::format("{}, waiting for ranks {}", what(), fmt::join(missing(), ", ")));
    if (first) told.emplace(watch_.stalls(), what, missing);
  }
}

std::vector<LocalCommunicator::Post> LocalCommunicator::meet(const Post& mine) {
  const auto me = static_cast<std::size_t>(rank());
  const std::uint64_t meeting = ++meetings_;
  const auto turn = static_cast<std::size_t>(meeting & 1);
  auto& all = group_->ranks();
  if (size() == 1) return {mine};
  CUevent enqueued = nullptr;
  if (launch_) {
    const std::lock_guard lock(group_->mutex);
    enqueued = group_->event(all[me].enqueued[turn]);
  }
  record(enqueued);
  {
    const std::lock_guard lock(group_->mutex);
    all[me].posts[turn] = mine;
    all[me].arrived = meeting;
  }
  group_->changed.notify_all();
  until([&] { return std::ranges::all_of(all, [&](const Group::Rank& r) { return r.arrived >= meeting; }); },
        [&] { return describe(mine.call); },
        [&] {
          const std::lock_guard lock(group_->mutex);
          std::vector<int> late;
          for (std::size_t r = 0; r < all.size(); ++r)
            if (all[r].arrived < meeting) late.push_back(ranks()[r]);
          return late;
        });
  std::vector<Post> posts;
  std::vector<CUevent> others;
  {
    const std::lock_guard lock(group_->mutex);
    for (std::size_t r = 0; r < all.size(); ++r) {
      posts.push_back(all[r].posts[turn]);
      if (r != me) others.push_back(all[r].enqueued[turn]);
    }
  }
  for (const CUevent e : others) wait(e);
  std::vector<Call> calls;
  for (const Post& p : posts) calls.push_back(p.call);
  compare(mine.call, calls);
  return posts;
}

void LocalCommunicator::together(Post mine, const Work& work) {
  const std::vector<Post> posts = meet(mine);
  work(posts);
  meet(mine);
}

void LocalCommunicator::do_all_gather(const Call& call, const std::byte* send, std::byte* recv, std::int64_t bytes) {
  together({call, send, recv}, [&](std::span<const Post> posts) {
    for (int i = 0; i < size(); ++i) {
      const int r = (rank() + i) % size();  // not all from the same peer at once
      copy(recv + r * bytes, posts[static_cast<std::size_t>(r)].send, bytes);
    }
  });
}

void LocalCommunicator::do_reduce_scatter(const Call& call, const std::byte* send, std::byte* recv) {
  together({call, send, recv}, [&](std::span<const Post> posts) {
    std::vector<const std::byte*> parts;
    for (const Post& p : posts) parts.push_back(p.send + rank() * call.count * size_of(call.dtype));
    reduce(recv, parts, call.count, call);
  });
}

void LocalCommunicator::do_all_reduce(const Call& call, const std::byte* send, std::byte* recv) {
  const std::int64_t element = size_of(call.dtype);
  const auto chunk = [&](int r) { return all_reduce_chunk(size(), r, call.count); };
  // In place is safe: nobody else reads the chunk of `send` that this rank overwrites with its sum.
  const Post mine{call, send, recv};
  const std::vector<Post> posts = meet(mine);
  std::vector<const std::byte*> parts;
  const ChunkRange own = chunk(rank());
  for (const Post& p : posts) parts.push_back(p.send + own.begin * element);
  reduce(recv + own.begin * element, parts, own.end - own.begin, call);
  meet(mine);
  for (int i = 1; i < size(); ++i) {
    const int r = (rank() + i) % size();
    const ChunkRange theirs = chunk(r);
    copy(recv + theirs.begin * element, posts[static_cast<std::size_t>(r)].recv + theirs.begin * element,
         (theirs.end - theirs.begin) * element);
  }
  meet(mine);
}

void LocalCommunicator::do_broadcast(const Call& call, std::byte* data, std::int64_t bytes) {
  together({call, data, data},
           [&](std::span<const Post> posts) { copy(data, posts[static_cast<std::size_t>(call.root)].send, bytes); });
}

void LocalCommunicator::do_all_to_all(const Call& call, const std::byte* send, std::span<const CommPart> send_parts,
                                      std::byte* recv, std::span<const CommPart> recv_parts) {
  const Post mine{call, send, recv, {send_parts.begin(), send_parts.end()}, {recv_parts.begin(), recv_parts.end()}};
  together(mine, [&](std::span<const Post> posts) {
    std::vector<std::int64_t> sent, expected;
    for (const Post& p : posts) {
      for (const CommPart& part : p.send_parts) sent.push_back(part.bytes);
      for (const CommPart& part : p.recv_parts) expected.push_back(part.bytes);
    }
    compare_parts(call, sent, expected);
    for (std::size_t r = 0; r < posts.size(); ++r)
      copy(recv + recv_parts[r].begin, posts[r].send + posts[r].send_parts[static_cast<std::size_t>(rank())].begin,
           recv_parts[r].bytes);
  });
}

void LocalCommunicator::do_send_recv(int to, const std::byte* send_data, std::int64_t send_bytes, int from,
                                     std::byte* recv_data, std::int64_t recv_bytes) {
  const auto late = [&](int peer) { return std::vector<int>{ranks()[static_cast<std::size_t>(peer)]}; };
  const auto agree = [&](std::int64_t sent, int sender, std::int64_t expected, int receiver) {
    if (sent == expected) return;
    throw RuntimeFailure(
        fmt::format("rank {}: a transfer of group {} does not agree: rank {} sends {} B to rank {}, which expects {}",
                    ranks()[static_cast<std::size_t>(rank())], name(), ranks()[static_cast<std::size_t>(sender)], sent,
                    ranks()[static_cast<std::size_t>(receiver)], expected));
  };
  std::uint64_t letter = 0;
  if (to >= 0) {
    auto& mail = group_->mail(rank(), to);
    CUevent enqueued = nullptr;
    if (launch_) {
      const std::lock_guard lock(group_->mutex);
      enqueued = group_->event(mail.enqueued);
    }
    record(enqueued);
    const std::lock_guard lock(group_->mutex);
    mail.data = send_data, mail.bytes = send_bytes;
    letter = ++mail.posted;
    group_->changed.notify_all();
  }
  if (from >= 0) {
    auto& mail = group_->mail(from, rank());
    until([&] { return mail.posted > mail.taken; },
          [&] { return fmt::format("recv of {} B from rank {} in group {}", recv_bytes, late(from)[0], name()); },
          [&] { return late(from); });
    const std::byte* data = nullptr;
    std::int64_t sent = 0;
    CUevent enqueued = nullptr, received = nullptr;
    {
      const std::lock_guard lock(group_->mutex);
      data = mail.data, sent = mail.bytes, enqueued = mail.enqueued;
      if (launch_) received = group_->event(mail.received);
    }
    if (sent == recv_bytes) {
      wait(enqueued);
      copy(recv_data, data, recv_bytes);
    }
    record(received);
    {
      const std::lock_guard lock(group_->mutex);
      mail.expected = recv_bytes;
      ++mail.taken;
    }
    group_->changed.notify_all();
    agree(sent, from, recv_bytes, rank());
  }
  if (to < 0) return;
  auto& mail = group_->mail(rank(), to);
  until([&] { return mail.taken >= letter; },
        [&] { return fmt::format("send of {} B to rank {} in group {}", send_bytes, late(to)[0], name()); },
        [&] { return late(to); });
  CUevent received = nullptr;
  std::int64_t expected = 0;
  {
    const std::lock_guard lock(group_->mutex);
    received = mail.received, expected = mail.expected;
  }
  wait(received);
  agree(send_bytes, rank(), expected, to);
}

void LocalCommunicator::do_barrier(const Call& call) { meet({call}); }

std::shared_ptr<LocalCommunicator::Group> LocalRanks::group(const std::string& name, const std::vector<int>& ranks,
                                                            const Driver& driver) {
  const std::lock_guard lock(mutex_);
  auto& known = groups_[fmt::format("{}/{}", name, fmt::join(ranks, ","))];
  auto group = known.lock();
  if (!group) known = group = std::make_shared<LocalCommunicator::Group>(driver, ranks.size());
  return group;
}

void LocalRanks::set_arena(const std::string& scope, int rank, const std::byte* base) {
  const std::lock_guard lock(mutex_);
  arenas_[{scope, rank}] = base;
}

const std::byte* LocalRanks::arena(const std::string& scope, int rank) const {
  const std::lock_guard lock(mutex_);
  const auto it = arenas_.find({scope, rank});
  return it == arenas_.end() ? nullptr : it->second;
}

}  // namespace hotbunk::cuda
