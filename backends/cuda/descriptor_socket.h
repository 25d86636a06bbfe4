// Messages between processes of one host, with a file descriptor beside them where the receiver is to have it: a unix
// socket of an abstract name, so nothing lies in a folder when its owner is gone.
#pragma once
#include <functional>
#include <string>
#include <thread>

namespace hotbunk::cuda {

/// Not copyable; closes it.
class OwnedDescriptor {
 public:
  explicit OwnedDescriptor(int fd = -1) : fd_(fd) {}
  ~OwnedDescriptor();
  OwnedDescriptor(OwnedDescriptor&& o) noexcept;
  OwnedDescriptor& operator=(OwnedDescriptor&& o) noexcept;
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_;
};

struct DescriptorMessage {
  std::string text;  // 4 KiB at most
  OwnedDescriptor descriptor{};
};

/// Answers questions of this user's processes, one after another, on a thread of its own.
class DescriptorServer {
 public:
  using Answer = std::function<DescriptorMessage(const std::string& question)>;

  /// `begin` runs first on the thread. RuntimeFailure when the system gives no socket.
  DescriptorServer(std::function<void()> begin, Answer);
  /// What is being answered comes to its end.
  ~DescriptorServer();
  DescriptorServer(const DescriptorServer&) = delete;
  DescriptorServer& operator=(const DescriptorServer&) = delete;

  /// For ask().
  const std::string& address() const { return address_; }

 private:
  void serve(const Answer&) const;

  std::string address_;
  OwnedDescriptor listen_, stop_;
  std::thread thread_;
};

/// The answer of a server. `keep_waiting` is asked ten times a second while there is none; what it throws comes
/// through, and `false` ends the wait. RuntimeFailure when nobody listens there (any longer), or the wait is over.
DescriptorMessage ask(const std::string& address, const std::string& question,
                      const std::function<bool()>& keep_waiting);

}  // namespace hotbunk::cuda
