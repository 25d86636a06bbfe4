#include "runtime/death_watch.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <utility>

#include "base/check.h"
#include "base/limits.h"
#include "base/parse.h"
#include "runtime/stuck.h"
#include "runtime/wire.h"

namespace hotbunk {
namespace {

std::chrono::duration<double> seconds_of(double s) { return std::chrono::duration<double>(s); }

/// What is asked of another host and not answered for so long will not be.
constexpr double answer_seconds = 5.0;
/// The others wait for rank 0 to write its files: not worth a word before.
constexpr double leaving_seconds = 60.0;

}  // namespace

/// What a rank of another host said last.
struct DeathWatch::Answer {
  std::optional<RankReport> report;
  std::chrono::steady_clock::time_point asked;
  bool open = false;  // asked and not answered
};

DeathWatch::DeathWatch(DeathWatchOptions options)
    : options_(options),
      own_status_(std::make_unique<RankStatus>()),
      stalls_({options.rank, options.world_size, options.say_after_seconds, options.timeout_seconds}) {
  own_status_->set_pid(getpid());
  mine_ = own_status_.get();
  if (options_.socket < 0 && !options_.alone) return;
  stop_fd_ = eventfd(0, EFD_CLOEXEC);
  if (stop_fd_ < 0) throw RuntimeFailure("no eventfd for the watch: " + system_error_text(errno));
  if (options_.socket >= 0) {
    watcher_address_ = peer_address(options_.socket);
    send_frame(options_.socket, Message::hello, std::to_string(options_.rank), std::to_string(getpid()));
  }
  thread_ = start_thread([this] { run(); });
}

DeathWatch::~DeathWatch() { stop(); }

void DeathWatch::stop() {
  if (!thread_.joinable()) return;
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = write(stop_fd_, &one, sizeof one);
  thread_.join();
  if (options_.socket >= 0) close(options_.socket);
  close(stop_fd_);
  options_.socket = -1;
}

void DeathWatch::use_status(std::vector<RankStatus*> slots) {
  std::lock_guard lock(mutex_);
  status_ = std::move(slots);
  if (RankStatus* mine = status_.at(options_.rank)) {
    mine->set_pid(getpid());
    mine_ = mine;
  }
}

void DeathWatch::set_phase(std::string_view phase) {
  mine_.load()->set_phase(phase);
  if (options_.socket < 0) return;
  std::lock_guard lock(mutex_);
  send_frame(options_.socket, Message::phase, "", phase.substr(0, RankStatus::text_bytes - 1));
}

void DeathWatch::set_op(std::string_view call, std::string_view op) {
  mine_.load(std::memory_order_relaxed)->set_op(call, op);
}

const RankStatus* DeathWatch::status_slot(int rank) const {
  std::lock_guard lock(mutex_);
  if (rank == options_.rank) return mine_.load();
  return rank >= 0 && rank < static_cast<int>(status_.size()) ? status_[rank] : nullptr;
}

std::string DeathWatch::status_of(int rank) const {
  const RankStatus* s = status_slot(rank);
  if (s == nullptr) return "";
  const RankMoment m = s->read();
  if (m.phase.empty() && m.op.empty()) return "";
  return fmt::format("phase {}, op {}", m.phase.empty() ? "(none)" : m.phase, m.op.empty() ? "(none)" : m.op);
}

bool DeathWatch::all_left() const {
  std::lock_guard lock(mutex_);
  return all_left_;
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
  if (options_.socket < 0 || any_dead()) return;
  std::lock_guard lock(mutex_);
  send_frame(options_.socket, Message::failure, "", reason.substr(0, 4096));
}

void DeathWatch::leave() {
  if (options_.socket < 0) return;
  {
    std::unique_lock lock(mutex_);
    if (!left_) send_frame(options_.socket, Message::goodbye, "", "");
    left_ = true;
    mine_.load()->set_left();
  }
  std::vector<int> others;  // those of this host that have left are known to have (RankMoment::left)
  for (int r = 0; r < options_.world_size; ++r)
    if (r != options_.rank) others.push_back(r);
  const StallWatch::Wait wait(
      stalls_, [] { return std::string("leaving the run"); }, [others] { return others; }, leaving_seconds);
  {
    std::unique_lock lock(mutex_);
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
  switch (frame.type) {
    case Message::all_left: {
      std::lock_guard lock(mutex_);
      all_left_ = true;
      changed_.notify_all();
      return;
    }
    case Message::died:
      return handle_death(frame);
    case Message::refused:
      return note_death("rank 0 refuses this rank: " + frame.value);
    case Message::ask: {
      const std::string report = report_text(own_report());
      std::lock_guard lock(mutex_);
      send_frame(options_.socket, Message::state, frame.key, report);
      return;
    }
    case Message::state:
      return handle_answer(frame);
    default:
      return;
  }
}

void DeathWatch::handle_death(const Frame& frame) {
  // value: pid, phase as the watcher knows it, how, reason; the op is known where the rank's status is shared memory.
  std::string parts[4];  // the last one may have lines of its own
  std::size_t from = 0;
  for (int i = 0; i < 4; ++i) {
    const auto end = i < 3 ? frame.value.find('\n', from) : frame.value.size();
    if (end == frame.value.npos) throw RuntimeFailure("a death of nobody");
    parts[i] = frame.value.substr(from, end - from);
    from = end + 1;
  }
  const auto& [pid, phase, how, reason] = parts;
  const auto rank = parse_integer(frame.key);
  if (!rank || *rank < 0 || *rank >= options_.world_size) throw RuntimeFailure("a death of nobody");
  std::string status = status_of(static_cast<int>(*rank));
  if (status.empty() && !phase.empty()) status = "phase " + phase;
  note_death(fmt::format("rank {} (pid {}) {}{}{}", frame.key, pid, how, status.empty() ? "" : " while in " + status,
                         reason.empty() ? "" : ": " + reason));
}

void DeathWatch::handle_answer(const Frame& frame) {
  const auto rank = parse_integer(frame.key);
  auto report = parse_report(frame.value);
  if (!rank || !report) throw RuntimeFailure("a report of nobody");
  const auto it = answers_.find(static_cast<int>(*rank));
  if (it == answers_.end()) return;
  it->second.report = std::move(report);
  it->second.open = false;
}

std::string DeathWatch::watcher_died(int error) const {
  const RankStatus* s = status_slot(0);
  const std::string pid = s ? fmt::format(" (pid {})", s->read().pid) : "", status = status_of(0);
  if (const std::string gone = host_gone(error, watcher_address_); !gone.empty())
    return fmt::format("rank 0{} is gone, and with it all ranks beyond: {}", pid, gone);
  return "rank 0" + pid + " died" + (status.empty() ? "" : " while in " + status);
}

RankReport DeathWatch::own_report() const {
  timespec used{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
  return {mine_.load()->read(), static_cast<double>(used.tv_sec) + static_cast<double>(used.tv_nsec) * 1e-9};
}

std::optional<RankLook> DeathWatch::look_at(int rank) {
  RankLook look;
  if (const RankStatus* s = status_slot(rank)) {
    look.moment = s->read();
    look.process = process_state(look.moment.pid);
    if (look.process) look.cpu_seconds = look.process->cpu_seconds;
    return look;
  }
  {
    std::lock_guard lock(mutex_);
    if (status_.empty()) return std::nullopt;  // the ranks have not met yet: nobody could answer
  }
  Answer& a = answers_[rank];
  const auto now = std::chrono::steady_clock::now();
  look.here = false;
  look.answers = !(a.open && now - a.asked > seconds_of(answer_seconds));
  if (!a.open) {  // one question at a time: a stopped process must not find thousands of them
    a.open = true;
    a.asked = now;
    std::lock_guard lock(mutex_);
    send_frame(options_.socket, Message::ask, std::to_string(rank), "");
  }
  if (a.report) {
    look.moment = a.report->moment;
    look.cpu_seconds = a.report->cpu_seconds;
  } else if (look.answers) {
    return std::nullopt;
  }
  return look;
}

void DeathWatch::look_for_stalls() {
  const auto stall = stalls_.tick(
      std::chrono::steady_clock::now(), [this](int rank) { return look_at(rank); },
      [](const std::string& line) { std::fprintf(stderr, "%s\n", line.c_str()); });
  mine_.load()->set_wait(stalls_.waiting_in(), stalls_.waiting_for());
  if (!stall || any_dead()) return;
  if (options_.socket >= 0) {
    std::lock_guard lock(mutex_);
    send_frame(options_.socket, Message::failure, stall->blamed < 0 ? "" : std::to_string(stall->blamed),
               stall->text.substr(0, 4096));
  }
  note_death(stall->text);
}

/// A thread of this rank that does not see the death (it computes, or waits where nothing wakes it) cannot hold up the
/// end for ever.
void DeathWatch::end_if_stuck() {
  if (!any_dead()) return;
  const auto now = std::chrono::steady_clock::now();
  if (!stuck_at_)
    stuck_at_ =
        now + std::chrono::duration_cast<std::chrono::steady_clock::duration>(seconds_of(options_.unwind_seconds));
  if (now < *stuck_at_) return;
  const std::string status = status_of(options_.rank);
  end_stuck(fmt::format("{}; rank {} does not come back{}{} and ends", message(), options_.rank,
                        status.empty() ? "" : " from ", status));
}

bool DeathWatch::receive() {
  char buffer[4096];
  const ssize_t n = recv(options_.socket, buffer, sizeof buffer, 0);
  if (n < 0 && errno == EINTR) return true;
  if (n <= 0) {
    note_death(watcher_died(n < 0 ? errno : 0));
    return false;
  }
  input_.append(buffer, static_cast<std::size_t>(n));
  try {
    for (Frame frame; take_frame(input_, frame);) handle(frame);
  } catch (const std::exception& e) {  // whoever speaks there, it is not rank 0's watcher
    note_death(fmt::format("the connection to rank 0's watch of deaths carries garbage ({})", e.what()));
    return false;
  }
  return true;
}

void DeathWatch::run() {
  bool connected = options_.socket >= 0;
  const int look_ms = static_cast<int>(stalls_.interval_seconds() * 1e3);
  auto next_look = std::chrono::steady_clock::now();
  for (;;) {
    pollfd polled[2] = {{stop_fd_, POLLIN, 0}, {connected ? options_.socket : -1, POLLIN, 0}};
    poll(polled, 2, any_dead() ? std::min(100, look_ms) : look_ms);
    if (polled[0].revents != 0) return;
    end_if_stuck();
    if (polled[1].revents != 0) connected = receive();
    if (const auto now = std::chrono::steady_clock::now(); now >= next_look && !any_dead()) {
      look_for_stalls();
      next_look = now + std::chrono::milliseconds(look_ms);
    }
  }
}

}  // namespace hotbunk
