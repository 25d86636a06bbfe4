#include "runtime/store_server.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <optional>
#include <utility>

#include "base/check.h"
#include "base/limits.h"
#include "base/parse.h"

namespace hotbunk {
namespace {

/// Takes as long for a wrong token as for a right one.
bool same_token(const std::string& a, const std::string& b) {
  unsigned char differs = a.size() == b.size() ? 0 : 1;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i)
    differs = static_cast<unsigned char>(differs | (a[i] ^ b[i]));
  return differs == 0;
}

}  // namespace

TcpStoreServer::TcpStoreServer(StoreOptions options)
    : options_(std::move(options)),
      listen_fd_(options_.listen_fd >= 0 ? options_.listen_fd : listen_on(options_.at.host, options_.at.port)),
      stop_fd_(eventfd(0, EFD_CLOEXEC)),
      ranks_(static_cast<std::size_t>(options_.world_size)) {
  if (options_.at.token.empty() && is_public(listen_fd_))
    std::fprintf(stderr, "hotbunk: HOTBUNK_TOKEN is not set: whoever reaches %s:%d can join this run\n",
                 options_.at.host.c_str(), options_.at.port);
  thread_ = start_thread([this] { run(); });
}

TcpStoreServer::~TcpStoreServer() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = write(stop_fd_, &one, sizeof one);
  thread_.join();
  for (const Connection& c : connections_) close(c.fd);
  close(listen_fd_);
  close(stop_fd_);
}

void TcpStoreServer::run() {
  std::vector<pollfd> polled;
  for (;;) {
    polled.assign({{stop_fd_, POLLIN, 0}, {out_of_files_ ? -1 : listen_fd_, POLLIN, 0}});
    for (const Connection& c : connections_) polled.push_back({c.fd, POLLIN, 0});
    const bool strangers = std::any_of(connections_.begin(), connections_.end(), [](auto& c) { return !c.admitted; });
    if (poll(polled.data(), polled.size(), strangers || out_of_files_ ? 500 : -1) < 0) continue;  // EINTR
    out_of_files_ = false;
    for (std::size_t i = 2; i < polled.size(); ++i)
      if (polled[i].revents != 0) serve(connections_[i - 2]);
    drop_silent();
    std::erase_if(connections_, [](const Connection& c) { return c.fd < 0; });
    // Last: what our own rank has said before it ended, its reason above all, still reaches the others.
    if (polled[0].revents != 0) return;
    if (polled[1].revents != 0) accept_one();
  }
}

void TcpStoreServer::accept_one() {
  Connection c;
  c.fd = accept4(listen_fd_, nullptr, nullptr, SOCK_CLOEXEC);
  if (c.fd < 0) {
    // Nobody else can come in: the ranks that are here learn why. The listener rests, or it would wake us for ever.
    out_of_files_ = errno == EMFILE || errno == ENFILE;
    if (out_of_files_) note_death(0, "failed", "no more connections: " + system_error_text(errno));
    return;
  }
  watch_host(c.fd);
  const timeval patience{5, 0};  // a rank that reads nothing for so long must not stop the others' service
  setsockopt(c.fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
  c.since = Clock::now();
  c.address = peer_address(c.fd);
  connections_.push_back(std::move(c));
}

/// Connections come in order of age: the first strangers are the oldest.
void TcpStoreServer::drop_silent() {
  const auto now = Clock::now();
  auto strangers = static_cast<std::size_t>(
      std::count_if(connections_.begin(), connections_.end(), [](auto& c) { return c.fd >= 0 && !c.admitted; }));
  for (Connection& c : connections_) {
    if (c.fd < 0 || c.admitted) continue;
    const std::chrono::duration<double> silent = now - c.since;
    if (strangers <= options_.most_strangers && silent.count() < options_.speak_seconds) break;
    refuse(c, strangers > options_.most_strangers
                  ? "too many connections have not said the run's token"
                  : fmt::format("the run's token was not said within {:.0f} s", options_.speak_seconds));
    --strangers;
  }
}

void TcpStoreServer::refuse(Connection& c, const std::string& why) {
  send_frame(c.fd, Message::refused, "", why);
  shutdown(c.fd, SHUT_WR);
  char rest[4096];  // unread bytes would turn the close into a reset, which overtakes the reason
  while (recv(c.fd, rest, sizeof rest, MSG_DONTWAIT) > 0) {
  }
  close(c.fd);
  std::erase_if(waiting_, [&](const auto& w) { return w.second == c.fd; });
  c.fd = -1;
}

void TcpStoreServer::serve(Connection& c) {
  int error = 0;
  try {
    if (read_from(c, error)) return;
  } catch (const std::exception& e) {
    refuse(c, e.what());
    if (c.watched_rank >= 0) note_death(c.watched_rank, "failed", e.what());
    return;
  }
  const std::string gone = host_gone(error, c.address);
  close(c.fd);
  std::erase_if(waiting_, [&](const auto& w) { return w.second == c.fd; });
  c.fd = -1;
  if (c.watched_rank >= 0 && !ranks_[c.watched_rank].left)
    note_death(c.watched_rank, gone.empty() ? "died" : "is gone", gone);
}

bool TcpStoreServer::read_from(Connection& c, int& error) {
  char buffer[16 << 10];
  const ssize_t n = recv(c.fd, buffer, sizeof buffer, MSG_DONTWAIT);
  if (n < 0 && (errno == EINTR || errno == EAGAIN)) return true;
  error = n < 0 ? errno : 0;
  if (n <= 0) return false;
  c.input.append(buffer, static_cast<std::size_t>(n));
  for (Frame frame; take_frame(c.input, frame, c.admitted ? FrameLimits{} : stranger_limits);)
    c.admitted ? handle(c, frame) : admit(c, frame);
  return true;
}

void TcpStoreServer::admit(Connection& c, const Frame& frame) {
  if (frame.type != Message::token || frame.key != "hotbunk")
    throw RuntimeFailure("the first message must say the run's token");
  if (!same_token(frame.value, options_.at.token)) {
    if (options_.at.token.empty()) throw RuntimeFailure("this rank has a HOTBUNK_TOKEN, rank 0 has none");
    throw RuntimeFailure(frame.value.empty() ? "rank 0 has a HOTBUNK_TOKEN, this rank has none"
                                             : "this rank's HOTBUNK_TOKEN is not rank 0's");
  }
  c.admitted = true;
  send_frame(c.fd, Message::welcome, "", "");
}

int TcpStoreServer::rank_named(const std::string& text) const {
  const auto named = parse_integer(text);
  if (!named || *named < 0 || *named >= std::ssize(ranks_))
    throw RuntimeFailure(fmt::format("there is no rank \"{}\" in a world of {}", text.substr(0, 20), ranks_.size()));
  return static_cast<int>(*named);
}

const TcpStoreServer::Connection* TcpStoreServer::watched(int rank) const {
  for (const Connection& c : connections_)
    if (c.fd >= 0 && c.watched_rank == rank) return &c;
  return nullptr;
}

void TcpStoreServer::handle(Connection& c, const Frame& frame) {
  switch (frame.type) {
    case Message::set:
      return put(frame.key, frame.value);
    case Message::get: {
      const auto found = values_.find(frame.key);
      if (found != values_.end()) send_frame(c.fd, Message::value, frame.key, found->second);
      else waiting_.emplace(frame.key, c.fd);
      return;
    }
    case Message::add:
      return add(c, frame);
    case Message::hello:
      return hello(c, frame);
    case Message::phase:
      if (c.watched_rank >= 0) ranks_[c.watched_rank].phase = frame.value;
      return;
    case Message::failure:
      if (c.watched_rank < 0) return;
      if (frame.key.empty()) return note_death(c.watched_rank, "failed", frame.value);
      return note_death(rank_named(frame.key), "makes no progress", frame.value);
    case Message::ask:
    case Message::state:
      return relay(c, frame);
    case Message::goodbye:
      if (c.watched_rank >= 0) ranks_[c.watched_rank].left = true;
      if (std::all_of(ranks_.begin(), ranks_.end(), [](const Watched& w) { return w.left; }))
        for (const Connection& other : connections_)
          if (other.watched_rank >= 0) send_frame(other.fd, Message::all_left, "", "");
      return;
    default:
      throw RuntimeFailure("unknown message");
  }
}

void TcpStoreServer::add(const Connection& c, const Frame& frame) {
  const auto known = values_.find(frame.key);
  const auto delta = parse_integer(frame.value);
  const auto before = known == values_.end() ? std::optional<std::int64_t>(0) : parse_integer(known->second);
  std::int64_t after = 0;
  if (!delta || !before || __builtin_add_overflow(*before, *delta, &after))
    throw RuntimeFailure(fmt::format("\"{}\" is no counter", frame.key));
  put(frame.key, std::to_string(after));
  send_frame(c.fd, Message::value, frame.key, values_[frame.key]);
}

void TcpStoreServer::hello(Connection& c, const Frame& frame) {
  const int rank = rank_named(frame.key);
  if (!parse_integer(frame.value)) throw RuntimeFailure("a hello without a process id");
  Watched& w = ranks_[rank];
  if (w.seen)  // or a stranger's hanging up would pass for the rank's death
    throw RuntimeFailure(fmt::format("rank {} (pid {}) {}", rank, w.pid,
                                     w.dead   ? "was here and is dead: a run is not joined again"
                                     : w.left ? "was here and has left"
                                              : "is here already: two processes were started with one rank"));
  if (c.watched_rank >= 0) throw RuntimeFailure(fmt::format("this connection is rank {}'s", c.watched_rank));
  c.watched_rank = rank;
  w.pid = frame.value;
  w.seen = true;
  for (std::size_t r = 0; r < ranks_.size(); ++r)  // who says hello late still learns of a death before
    if (ranks_[r].dead && static_cast<int>(r) != rank)
      send_frame(c.fd, Message::died, std::to_string(r), ranks_[r].pid + "\n" + ranks_[r].phase + "\ndied\n");
}

/// A question goes to the rank it names, the answer back to the one that asked.
void TcpStoreServer::relay(const Connection& from, const Frame& frame) {
  if (from.watched_rank < 0) return;
  if (const Connection* to = watched(rank_named(frame.key)))
    send_frame(to->fd, frame.type, std::to_string(from.watched_rank), frame.value);
}

void TcpStoreServer::put(const std::string& key, std::string value) {
  const auto known = values_.find(key);
  const std::size_t before = known == values_.end() ? 0 : key.size() + known->second.size();
  if (stored_bytes_ - before + key.size() + value.size() > options_.stored_bytes)
    throw RuntimeFailure(fmt::format("the store is full: {} B are the most", options_.stored_bytes));
  stored_bytes_ += key.size() + value.size() - before;
  const auto [first, last] = waiting_.equal_range(key);
  for (auto it = first; it != last; ++it) send_frame(it->second, Message::value, key, value);
  waiting_.erase(first, last);
  values_[key] = std::move(value);
}

void TcpStoreServer::note_death(int rank, const std::string& how, const std::string& reason) {
  Watched& w = ranks_[rank];
  if (w.dead) return;
  w.dead = true;
  for (const Connection& c : connections_)
    if (c.fd >= 0 && c.watched_rank >= 0 && c.watched_rank != rank)
      send_frame(c.fd, Message::died, std::to_string(rank), fmt::format("{}\n{}\n{}\n{}", w.pid, w.phase, how, reason));
}

}  // namespace hotbunk
