#include "backends/cpu_gloo/tcp_store.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <iterator>
#include <optional>

#include "base/check.h"
#include "base/parse.h"

namespace hotbunk {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t header_bytes = 9;               // type, key bytes, value bytes
constexpr std::uint32_t max_field_bytes = 16u << 20;  // set-up values are small; more than this is garbage

Clock::time_point deadline_after(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

/// A host that vanishes sends no FIN: the kernel asks after 10 s of silence, 5 times, so 20 s is the longest it can
/// hide.
void set_keepalive(int fd) {
  const int on = 1, idle_s = 10, interval_s = 2, probes = 5;
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

int try_connect(const std::string& host, int port, std::string& error) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int rc = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found); rc != 0) {
    error = gai_strerror(rc);
    return -1;
  }
  int fd = -1;
  for (addrinfo* a = found; a != nullptr && fd < 0; a = a->ai_next) {
    fd = socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, a->ai_protocol);
    if (fd >= 0 && connect(fd, a->ai_addr, a->ai_addrlen) == 0) break;
    error = std::strerror(errno);
    if (fd >= 0) close(fd);
    fd = -1;
  }
  freeaddrinfo(found);
  return fd;
}

int listen_on(int port) {
  const int fd = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int off = 0, on = 1;
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  address.sin6_addr = in6addr_any;
  address.sin6_port = htons(static_cast<std::uint16_t>(port));
  if (fd >= 0) {
    setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);  // IPv4 comes in as mapped addresses
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0 && listen(fd, 1024) == 0) return fd;
  }
  const int error = errno;
  if (fd >= 0) close(fd);
  throw RuntimeFailure(fmt::format("rank 0 cannot listen on port {} (MASTER_PORT): {}", port, std::strerror(error)));
}

}  // namespace

bool send_frame(int fd, Message type, std::string_view key, std::string_view value) {
  std::string out(header_bytes, '\0');
  out[0] = static_cast<char>(type);
  const std::uint32_t sizes[2] = {htonl(static_cast<std::uint32_t>(key.size())),
                                  htonl(static_cast<std::uint32_t>(value.size()))};
  std::memcpy(out.data() + 1, sizes, sizeof sizes);
  out.append(key).append(value);
  for (std::size_t sent = 0; sent < out.size();) {
    const ssize_t n = send(fd, out.data() + sent, out.size() - sent, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    sent += static_cast<std::size_t>(n);
  }
  return true;
}

bool take_frame(std::string& input, Frame& frame) {
  if (input.size() < header_bytes) return false;
  std::uint32_t sizes[2];
  std::memcpy(sizes, input.data() + 1, sizeof sizes);
  const std::size_t key = ntohl(sizes[0]), value = ntohl(sizes[1]);
  if (key > max_field_bytes || value > max_field_bytes)
    throw RuntimeFailure("the rendezvous connection carries something else than hotbunk's messages");
  if (input.size() < header_bytes + key + value) return false;
  frame.type = static_cast<Message>(input[0]);
  frame.key = input.substr(header_bytes, key);
  frame.value = input.substr(header_bytes + key, value);
  input.erase(0, header_bytes + key + value);
  return true;
}

int connect_to(const std::string& host, int port, double seconds) {
  const auto deadline = deadline_after(seconds);
  std::string error;
  for (auto pause = std::chrono::milliseconds(2);; pause = std::min(2 * pause, std::chrono::milliseconds(250))) {
    const int fd = try_connect(host, port, error);
    if (fd >= 0) {
      set_keepalive(fd);
      return fd;
    }
    if (Clock::now() >= deadline)
      throw RuntimeFailure(
          fmt::format("no connection to rank 0 at {}:{} within {:.0f} s: {}", host, port, seconds, error));
    std::this_thread::sleep_for(pause);
  }
}

std::string local_address(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  char text[NI_MAXHOST] = "127.0.0.1";
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0)
    getnameinfo(reinterpret_cast<sockaddr*>(&address), length, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
  return text;
}

TcpStoreServer::TcpStoreServer(int listen_fd, int port, int world_size)
    : listen_fd_(listen_fd >= 0 ? listen_fd : listen_on(port)), stop_fd_(eventfd(0, EFD_CLOEXEC)), ranks_(world_size) {
  thread_ = std::thread([this] { run(); });
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
    polled.assign({{stop_fd_, POLLIN, 0}, {listen_fd_, POLLIN, 0}});
    for (const Connection& c : connections_) polled.push_back({c.fd, POLLIN, 0});
    if (poll(polled.data(), polled.size(), -1) < 0) continue;  // EINTR
    if (polled[0].revents != 0) return;
    for (std::size_t i = 2; i < polled.size(); ++i) {
      Connection& c = connections_[i - 2];
      if (polled[i].revents == 0 || read_from(c)) continue;
      close(c.fd);
      std::erase_if(waiting_, [&](const auto& w) { return w.second == c.fd; });
      c.fd = -1;
      if (c.watched_rank >= 0 && !ranks_[c.watched_rank].left) note_death(c.watched_rank, "");
    }
    std::erase_if(connections_, [](const Connection& c) { return c.fd < 0; });
    if (polled[1].revents != 0) {
      Connection c;
      c.fd = accept4(listen_fd_, nullptr, nullptr, SOCK_CLOEXEC);
      if (c.fd < 0) continue;
      set_keepalive(c.fd);
      const timeval patience{5, 0};  // a rank that reads nothing for so long must not stop the others' service
      setsockopt(c.fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
      connections_.push_back(std::move(c));
    }
  }
}

bool TcpStoreServer::read_from(Connection& c) {
  char buffer[16 << 10];
  const ssize_t n = recv(c.fd, buffer, sizeof buffer, MSG_DONTWAIT);
  if (n < 0 && (errno == EINTR || errno == EAGAIN)) return true;
  if (n <= 0) return false;
  c.input.append(buffer, static_cast<std::size_t>(n));
  try {
    for (Frame frame; take_frame(c.input, frame);) handle(c, frame);
  } catch (const std::exception&) {  // a stranger on our port: hang up on it
    return false;
  }
  return true;
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
    case Message::add: {
      const auto known = values_.find(frame.key);
      const auto delta = parse_integer(frame.value);
      const auto before = known == values_.end() ? std::optional<std::int64_t>(0) : parse_integer(known->second);
      std::int64_t after = 0;
      if (!delta || !before || __builtin_add_overflow(*before, *delta, &after)) throw RuntimeFailure("no counter");
      const std::string& sum = values_[frame.key] = std::to_string(after);
      send_frame(c.fd, Message::value, frame.key, sum);
      return;
    }
    case Message::hello: {
      const auto named = parse_integer(frame.key);
      if (!named || *named < 0 || *named >= std::ssize(ranks_) || !parse_integer(frame.value))
        throw RuntimeFailure("no such rank");
      const int rank = static_cast<int>(*named);
      for (const Connection& other : connections_)  // or a stranger's hanging up would pass for the rank's death
        if (other.watched_rank == rank) throw RuntimeFailure("this rank is here already");
      c.watched_rank = rank;
      ranks_[rank].pid = frame.value;
      for (std::size_t r = 0; r < ranks_.size(); ++r)  // who says hello late still learns of a death before
        if (ranks_[r].dead)
          send_frame(c.fd, Message::died, std::to_string(r), ranks_[r].pid + "\n" + ranks_[r].phase + "\n");
      return;
    }
    case Message::phase:
      if (c.watched_rank >= 0) ranks_[c.watched_rank].phase = frame.value;
      return;
    case Message::failure:
      if (c.watched_rank >= 0) note_death(c.watched_rank, frame.value);
      return;
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

void TcpStoreServer::put(const std::string& key, std::string value) {
  const auto [first, last] = waiting_.equal_range(key);
  for (auto it = first; it != last; ++it) send_frame(it->second, Message::value, key, value);
  waiting_.erase(first, last);
  values_[key] = std::move(value);
}

void TcpStoreServer::note_death(int rank, const std::string& reason) {
  Watched& w = ranks_[rank];
  if (w.dead) return;
  w.dead = true;
  for (const Connection& c : connections_)
    if (c.fd >= 0 && c.watched_rank >= 0 && c.watched_rank != rank)
      send_frame(c.fd, Message::died, std::to_string(rank), w.pid + "\n" + w.phase + "\n" + reason);
}

TcpStore::TcpStore(const std::string& host, int port, double connect_seconds)
    : fd_(connect_to(host, port, connect_seconds)) {}

TcpStore::~TcpStore() { close(fd_); }

void TcpStore::fail_broken() {
  if (interrupt_) interrupt_(true);
  throw RuntimeFailure("the rendezvous connection to rank 0 is broken");
}

void TcpStore::send(Message type, std::string_view key, std::string_view value) {
  if (!send_frame(fd_, type, key, value)) fail_broken();
}

void TcpStore::set(std::string_view key, std::string_view value) {
  std::lock_guard lock(mutex_);
  send(Message::set, key, value);
}

std::string TcpStore::get(std::string_view key, double seconds) {
  std::lock_guard lock(mutex_);
  send(Message::get, key, "");
  return wait_value(key, seconds);
}

std::int64_t TcpStore::add(std::string_view key, std::int64_t delta) {
  std::lock_guard lock(mutex_);
  send(Message::add, key, std::to_string(delta));
  const std::string sum = wait_value(key, 60.0);
  const auto value = parse_integer(sum);
  if (!value) throw RuntimeFailure(fmt::format("\"{}\" is no counter: {}", key, sum.substr(0, 40)));
  return *value;
}

std::string TcpStore::wait_value(std::string_view key, double seconds) {
  const auto deadline = deadline_after(seconds);
  for (Frame frame;;) {
    // An answer to an earlier get that was given up may come first: keys tell them apart.
    while (take_frame(input_, frame))
      if (frame.key == key) return frame.value;
    pollfd p{fd_, POLLIN, 0};
    const int ready = poll(&p, 1, 100);
    if (interrupt_) interrupt_(false);
    if (ready <= 0) {
      if (Clock::now() >= deadline)
        throw RuntimeFailure(
            fmt::format("waited {:.0f} s for \"{}\", which another rank should have set", seconds, key));
      continue;
    }
    char buffer[16 << 10];
    const ssize_t n = recv(fd_, buffer, sizeof buffer, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fail_broken();
    input_.append(buffer, static_cast<std::size_t>(n));
  }
}

}  // namespace hotbunk
