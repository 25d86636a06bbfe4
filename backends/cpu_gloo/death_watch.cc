#include "backends/cpu_gloo/death_watch.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <utility>

#include "backends/cpu_gloo/tcp_store.h"
#include "base/check.h"
#include "base/parse.h"

namespace hotbunk {
namespace {

using Words = std::atomic<std::uint64_t>[RankStatus::text_words];
constexpr std::size_t text_bytes = RankStatus::text_words * 8;

void store_text(Words& words, std::string_view text) {
  std::uint64_t plain[RankStatus::text_words] = {};
  std::memcpy(plain, text.data(), std::min(text.size(), text_bytes - 1));
  for (int i = 0; i < RankStatus::text_words; ++i) words[i].store(plain[i], std::memory_order_relaxed);
}

/// A reader may see two texts mixed for a moment; a dead rank's stays what it was.
std::string load_text(const Words& words) {
  std::uint64_t plain[RankStatus::text_words];
  for (int i = 0; i < RankStatus::text_words; ++i) plain[i] = words[i].load(std::memory_order_relaxed);
  char text[text_bytes];
  std::memcpy(text, plain, sizeof text);
  return {text, strnlen(text, sizeof text - 1)};
}

std::chrono::duration<double> seconds_of(double s) { return std::chrono::duration<double>(s); }

}  // namespace

DeathWatch::DeathWatch(DeathWatchOptions options) : options_(options), own_status_(std::make_unique<RankStatus>()) {
  mine_ = own_status_.get();
  if (options_.socket < 0) return;
  stop_fd_ = eventfd(0, EFD_CLOEXEC);
  send_frame(options_.socket, Message::hello, std::to_string(options_.rank), std::to_string(getpid()));
  thread_ = std::thread([this] { run(); });
}

DeathWatch::~DeathWatch() { stop(); }

void DeathWatch::stop() {
  if (options_.socket < 0) return;
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = write(stop_fd_, &one, sizeof one);
  thread_.join();
  close(options_.socket);
  close(stop_fd_);
  options_.socket = -1;
}

void DeathWatch::use_status(std::vector<RankStatus*> slots) {
  std::lock_guard lock(mutex_);
  status_ = std::move(slots);
  if (RankStatus* mine = status_.at(options_.rank)) {
    mine->pid = getpid();
    mine_ = mine;
  }
}

void DeathWatch::set_phase(std::string_view phase) {
  store_text(mine_.load()->phase, phase);
  if (options_.socket < 0) return;
  std::lock_guard lock(mutex_);
  send_frame(options_.socket, Message::phase, "", phase.substr(0, text_bytes - 1));
}

void DeathWatch::set_op(std::string_view op) { store_text(mine_.load(std::memory_order_relaxed)->op, op); }

std::string DeathWatch::status_of(int rank) const {
  std::lock_guard lock(mutex_);
  const RankStatus* s = rank == options_.rank                     ? mine_.load()
                        : rank < static_cast<int>(status_.size()) ? status_[rank]
                                                                  : nullptr;
  if (s == nullptr) return "";
  const std::string phase = load_text(s->phase), op = load_text(s->op);
  if (phase.empty() && op.empty()) return "";
  return fmt::format("phase {}, op {}", phase.empty() ? "(none)" : phase, op.empty() ? "(none)" : op);
}

std::string DeathWatch::message() const {
  std::lock_guard lock(mutex_);
  return message_;
}

void DeathWatch::check(std::string_view during) const {
  if (any_dead()) throw RuntimeFailure(fmt::format("{}; rank {} noticed it in {}", message(), options_.rank, during));
}

bool DeathWatch::wait_for_death(double seconds) const {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, seconds_of(seconds), [&] { return any_dead(); });
}

int DeathWatch::on_death(std::function<void()> callback) {
  std::unique_lock lock(mutex_);
  const int token = next_token_++;
  if (any_dead()) {
    lock.unlock();
    callback();
  } else {
    callbacks_.emplace_back(token, std::move(callback));
  }
  return token;
}

void DeathWatch::remove_on_death(int token) {
  std::lock_guard lock(mutex_);
  std::erase_if(callbacks_, [&](const auto& c) { return c.first == token; });
}

void DeathWatch::announce_failure(std::string_view reason) {
  if (options_.socket < 0) return;
  std::lock_guard lock(mutex_);
  send_frame(options_.socket, Message::failure, "", reason.substr(0, 4096));
}

void DeathWatch::leave() {
  if (options_.socket < 0) return;
  {
    std::unique_lock lock(mutex_);
    if (!left_) send_frame(options_.socket, Message::goodbye, "", "");
    left_ = true;
    changed_.wait(lock, [&] { return all_left_ || any_dead(); });
    if (all_left_) return;
  }
  check("leaving the world");
}

void DeathWatch::note_death(std::string message) {
  std::lock_guard lock(mutex_);
  if (any_dead() || all_left_) return;
  message_ = std::move(message);
  dead_.store(true, std::memory_order_release);
  for (auto& [token, callback] : callbacks_) callback();  // under the lock, so that remove_on_death waits for it
  callbacks_.clear();
  changed_.notify_all();
}

void DeathWatch::handle(const Frame& frame) {
  if (frame.type == Message::all_left) {
    std::lock_guard lock(mutex_);
    all_left_ = true;
    changed_.notify_all();
    return;
  }
  if (frame.type != Message::died) return;
  // value: pid, phase as the watcher knows it, reason; the op is known where the dead rank's status is shared memory.
  const auto first = frame.value.find('\n'), second = frame.value.find('\n', first + 1);
  const std::string pid = frame.value.substr(0, first), reason = frame.value.substr(second + 1);
  const auto rank = parse_integer(frame.key);
  if (!rank || *rank < 0 || *rank >= options_.world_size || first == frame.value.npos || second == frame.value.npos)
    throw RuntimeFailure("a death of nobody");
  std::string status = status_of(static_cast<int>(*rank));
  if (status.empty() && second > first + 1) status = "phase " + frame.value.substr(first + 1, second - first - 1);
  note_death(fmt::format("rank {} (pid {}) {}{}{}", frame.key, pid, reason.empty() ? "died" : "failed",
                         status.empty() ? "" : " while in " + status, reason.empty() ? "" : ": " + reason));
}

std::string DeathWatch::watcher_died() const {
  std::string pid;
  {
    std::lock_guard lock(mutex_);
    if (!status_.empty() && status_[0] != nullptr) pid = fmt::format(" (pid {})", status_[0]->pid.load());
  }
  const std::string status = status_of(0);
  return "rank 0" + pid + " died" + (status.empty() ? "" : " while in " + status);
}

void DeathWatch::run() {
  std::string input;
  bool connected = true;
  auto stuck_at = std::chrono::steady_clock::time_point::max();
  for (;;) {
    pollfd polled[2] = {{stop_fd_, POLLIN, 0}, {connected ? options_.socket : -1, POLLIN, 0}};
    const int wait_ms = any_dead() ? 100 : -1;
    poll(polled, 2, wait_ms);
    if (polled[0].revents != 0) return;
    if (any_dead()) {
      const auto now = std::chrono::steady_clock::now();
      if (stuck_at == std::chrono::steady_clock::time_point::max())
        stuck_at =
            now + std::chrono::duration_cast<std::chrono::steady_clock::duration>(seconds_of(options_.unwind_seconds));
      if (now >= stuck_at) {
        const std::string status = status_of(options_.rank);
        std::fprintf(stderr, "hotbunk: %s; rank %d does not come back%s%s and ends\n", message().c_str(), options_.rank,
                     status.empty() ? "" : " from ", status.c_str());
        _exit(3);
      }
    }
    if (polled[1].revents == 0) continue;
    char buffer[4096];
    const ssize_t n = recv(options_.socket, buffer, sizeof buffer, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      connected = false;
      note_death(watcher_died());
      continue;
    }
    input.append(buffer, static_cast<std::size_t>(n));
    try {
      for (Frame frame; take_frame(input, frame);) handle(frame);
    } catch (const std::exception& e) {  // whoever speaks there, it is not rank 0's watcher
      connected = false;
      note_death(fmt::format("the connection to rank 0's watch of deaths carries garbage ({})", e.what()));
    }
  }
}

}  // namespace hotbunk
