#include "backends/cuda/descriptor_socket.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <random>
#include <utility>

#include "base/check.h"
#include "base/limits.h"

namespace hotbunk::cuda {
namespace {

constexpr std::size_t most_bytes = 4096;
constexpr int poll_ms = 100;

[[noreturn]] void fails(const char* what) {
  throw RuntimeFailure(fmt::format("a unix socket between ranks: {}: {}", what, system_error_text(errno)));
}

OwnedDescriptor new_socket() {
  OwnedDescriptor s(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!s) fails("socket");
  return s;
}

struct Address {
  sockaddr_un at{};
  socklen_t bytes = 0;
};
/// In the abstract namespace: the first byte is 0.
Address address_of(const std::string& name) {
  Address a;
  a.at.sun_family = AF_UNIX;
  HB_CHECK(name.size() + 1 < sizeof a.at.sun_path, "a socket's name of {} bytes", name.size());
  std::memcpy(a.at.sun_path + 1, name.data(), name.size());
  a.bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return a;
}

bool send(int socket, const std::string& text, int descriptor) {
  HB_CHECK(text.size() <= most_bytes, "a message of {} bytes", text.size());
  iovec data{const_cast<char*>(text.data()), text.size()};
  msghdr m{};
  m.msg_iov = &data, m.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  if (descriptor >= 0) {
    m.msg_control = control.data(), m.msg_controllen = control.size();
    cmsghdr* const c = CMSG_FIRSTHDR(&m);
    c->cmsg_level = SOL_SOCKET, c->cmsg_type = SCM_RIGHTS, c->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(c), &descriptor, sizeof(int));
  }
  return ::sendmsg(socket, &m, MSG_NOSIGNAL) == static_cast<ssize_t>(text.size());
}

/// Empty text: the other end is gone.
DescriptorMessage receive(int socket) {
  std::array<char, most_bytes> text{};
  iovec data{text.data(), text.size()};
  msghdr m{};
  m.msg_iov = &data, m.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  m.msg_control = control.data(), m.msg_controllen = control.size();
  const ssize_t bytes = ::recvmsg(socket, &m, MSG_CMSG_CLOEXEC);
  DescriptorMessage out;
  if (bytes <= 0) return out;
  out.text.assign(text.data(), static_cast<std::size_t>(bytes));
  for (cmsghdr* c = CMSG_FIRSTHDR(&m); c != nullptr; c = CMSG_NXTHDR(&m, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(c), sizeof fd);
    out.descriptor = OwnedDescriptor(fd);
  }
  return out;
}

/// Abstract names know no permissions: who asks is asked for.
bool is_this_user(int socket) {
  ucred who{};
  socklen_t bytes = sizeof who;
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &who, &bytes) == 0 && who.uid == ::geteuid();
}

bool readable(int fd, int milliseconds) {
  pollfd p{fd, POLLIN, 0};
  return ::poll(&p, 1, milliseconds) > 0;
}

}  // namespace

OwnedDescriptor::~OwnedDescriptor() {
  if (fd_ >= 0) ::close(fd_);
}
OwnedDescriptor::OwnedDescriptor(OwnedDescriptor&& o) noexcept : fd_(std::exchange(o.fd_, -1)) {}
OwnedDescriptor& OwnedDescriptor::operator=(OwnedDescriptor&& o) noexcept {
  std::swap(fd_, o.fd_);
  return *this;
}

DescriptorServer::DescriptorServer(std::function<void()> begin, Answer answer)
    : listen_(new_socket()), stop_(::eventfd(0, EFD_CLOEXEC)) {
  if (!stop_) fails("eventfd");
  std::random_device random;
  address_ = fmt::format("hotbunk-{}-{:08x}{:08x}", ::getpid(), random(), random());
  const Address at = address_of(address_);
  if (::bind(listen_.get(), reinterpret_cast<const sockaddr*>(&at.at), at.bytes) != 0) fails("bind");
  if (::listen(listen_.get(), SOMAXCONN) != 0) fails("listen");
  thread_ = std::thread([this, begin = std::move(begin), answer = std::move(answer)] {
    try {
      begin();
    } catch (const RuntimeFailure&) {
      // The first question meets the same, and its answer says so.
    }
    serve(answer);
  });
}

DescriptorServer::~DescriptorServer() {
  const std::uint64_t one = 1;
  if (::write(stop_.get(), &one, sizeof one) == sizeof one) thread_.join();
  else thread_.detach();
}

void DescriptorServer::serve(const Answer& answer) const {
  for (;;) {
    std::array<pollfd, 2> wait{pollfd{listen_.get(), POLLIN, 0}, pollfd{stop_.get(), POLLIN, 0}};
    if (::poll(wait.data(), wait.size(), -1) < 0 && errno != EINTR) return;
    if (wait[1].revents != 0) return;
    if (wait[0].revents == 0) continue;
    const OwnedDescriptor peer(::accept4(listen_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!peer || !is_this_user(peer.get()) || !readable(peer.get(), 10 * poll_ms)) continue;
    const DescriptorMessage question = receive(peer.get());
    if (question.text.empty()) continue;
    const DescriptorMessage said = answer(question.text);
    send(peer.get(), said.text, said.descriptor.get());  // who no longer listens needs no answer
  }
}

DescriptorMessage ask(const std::string& address, const std::string& question,
                      const std::function<bool()>& keep_waiting) {
  const OwnedDescriptor s = new_socket();
  const Address at = address_of(address);
  if (::connect(s.get(), reinterpret_cast<const sockaddr*>(&at.at), at.bytes) != 0) fails("connect");
  if (!send(s.get(), question, -1)) fails("sendmsg");
  while (!readable(s.get(), poll_ms))
    if (!keep_waiting()) throw RuntimeFailure("a unix socket between ranks: no answer came");
  DescriptorMessage said = receive(s.get());
  if (said.text.empty()) throw RuntimeFailure("a unix socket between ranks: its other end is gone");
  return said;
}

}  // namespace hotbunk::cuda
