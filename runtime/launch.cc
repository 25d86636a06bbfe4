#include "runtime/launch.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/limits.h"
#include "runtime/rank_status.h"

namespace hotbunk {
namespace {

using SteadyClock = std::chrono::steady_clock;

struct Listener {
  int fd = -1;
  int port = 0;
};

Listener listen_on_loopback() {
  Listener l;
  l.fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  if (l.fd < 0 || bind(l.fd, reinterpret_cast<sockaddr*>(&address), length) != 0 || listen(l.fd, 1024) != 0 ||
      getsockname(l.fd, reinterpret_cast<sockaddr*>(&address), &length) != 0)
    throw RuntimeFailure(fmt::format("cannot listen on 127.0.0.1 for the local ranks: {}", system_error_text(errno)));
  l.port = ntohs(address.sin_port);
  return l;
}

/// 128 random bits as hex digits.
std::string new_token() {
  unsigned char bytes[16];
  if (getrandom(bytes, sizeof bytes, 0) != sizeof bytes)
    throw RuntimeFailure(fmt::format("no random numbers for the run's token: {}", std::strerror(errno)));
  std::string out;
  for (const unsigned char b : bytes) out += fmt::format("{:02x}", b);
  return out;
}

LaunchEnv local_env(int rank, int n, const Listener& listener, const std::string& token) {
  LaunchEnv env;
  env.rank = env.local_rank = rank;
  env.world_size = n;
  env.master_port = listener.port;
  env.token = token;
  env.source = "local";
  if (rank == 0) env.listen_fd = listener.fd;
  return env;
}

[[noreturn]] void run_child(const LaunchEnv& env, int parent_pid, const sigset_t& signals,
                            const std::function<int(const LaunchEnv&)>& body) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent_pid) _exit(3);                    // the parent died before prctl
  for (int s : {SIGINT, SIGTERM}) std::signal(s, SIG_DFL);  // a handler of the parent is not ours
  pthread_sigmask(SIG_SETMASK, &signals, nullptr);
  int code = 3;
  try {
    code = body(env);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "rank %d: %s\n", env.rank, e.what());
  }
  std::fflush(nullptr);
  _exit(code);  // not exit(): the parent's atexit handlers and static destructors are not ours to run
}

std::string describe(const RankExit& e) {
  if (e.stopped)
    return fmt::format("rank {} (pid {}) was stopped (SIGSTOP, job control or a debugger) and did not come back",
                       e.rank, e.pid);
  if (e.signal != 0) {
    const std::string killed =
        fmt::format("rank {} (pid {}) was killed by signal {} ({})", e.rank, e.pid, e.signal, strsignal(e.signal));
    // oneDNN's code generator, for one, writes to where it was given nothing.
    const std::string limit = e.signal == SIGSEGV || e.signal == SIGBUS ? address_limit_text() : "";
    return limit.empty() ? killed : fmt::format("{}: {}, and libraries that get no more end so", killed, limit);
  }
  return fmt::format("rank {} (pid {}) ended with exit code {}", e.rank, e.pid, e.exit_code);
}

/// The children of one launch, and what became of them.
class Children {
 public:
  explicit Children(int n) : running_(n) { result_.ranks.resize(n); }

  void add(int rank, int pid) { result_.ranks[rank] = {rank, pid, 0, 0}; }

  void kill_all(int signal) const {
    for (const RankExit& e : result_.ranks)
      if (e.pid > 0 && !ended(e)) kill(e.pid, signal);
  }

  /// Ends who is still there after the grace. A stopped one explains why the others gave up; our own signal nothing.
  void end_all() {
    for (RankExit& e : result_.ranks)
      if (const auto p = e.pid > 0 && !ended(e) ? process_state(e.pid) : std::nullopt; p && p->stopped()) {
        e.stopped = true;
        note_failure(e);
      }
    kill_rest();
  }
  void kill_rest() {
    killing_ = true;
    kill_all(SIGKILL);
  }

  /// Collects whoever ended. True when nobody is left.
  bool reap() {
    for (RankExit& e : result_.ranks) {
      int status = 0;
      if (e.pid <= 0 || ended(e) || waitpid(e.pid, &status, WNOHANG) != e.pid) continue;
      ended_.push_back(e.rank);
      --running_;
      if (WIFSIGNALED(status)) e.signal = WTERMSIG(status);
      if (WIFEXITED(status)) e.exit_code = WEXITSTATUS(status);
      if (e.signal != 0 || e.exit_code != 0) note_failure(e);
    }
    return running_ == 0;
  }

  /// Lines about children that have been stopped for `after` seconds and longer; `elapsed`: since the last call.
  std::vector<std::string> stopped_ones(double elapsed, double after) {
    std::vector<std::string> out;
    stops_.resize(result_.ranks.size());
    for (const RankExit& e : result_.ranks) {
      Stop& stop = stops_[static_cast<std::size_t>(e.rank)];
      const auto p = e.pid > 0 && !ended(e) ? process_state(e.pid) : std::nullopt;
      if (!p || !p->stopped()) {
        stop = {};
        continue;
      }
      stop.seconds += elapsed;
      if (stop.seconds < std::max(after, stop.next_report)) continue;
      out.push_back(
          fmt::format("rank {} (pid {}) has been stopped (SIGSTOP, job control or a debugger) for {:.0f} s: "
                      "kill -CONT {} lets it go on",
                      e.rank, e.pid, stop.seconds, e.pid));
      stop.next_report = 3 * stop.seconds;
    }
    return out;
  }

  bool failed() const { return result_.first_failure.has_value(); }

  LaunchResult finish() {
    if (failed()) {
      const RankExit& f = *result_.first_failure;
      result_.exit_code = f.signal == 0 && !f.stopped && (f.exit_code == 1 || f.exit_code == 2) ? f.exit_code : 3;
      result_.message = describe(f);
    }
    return std::move(result_);
  }

 private:
  bool ended(const RankExit& e) const {
    for (int r : ended_)
      if (r == e.rank) return true;
    return false;
  }

  /// The end nearer the cause is kept: a signal explains more than an exit code, and exit code 3 is what a rank says
  /// that saw another one die. Which of them is collected first is chance.
  static int strength(const RankExit& e) { return e.stopped ? 3 : e.signal != 0 ? 2 : e.exit_code != 3 ? 1 : 0; }

  void note_failure(const RankExit& e) {
    if (!failed() || (!killing_ && strength(e) > strength(*result_.first_failure))) result_.first_failure = e;
  }

  struct Stop {
    double seconds = 0.0, next_report = 0.0;
  };
  std::vector<Stop> stops_;  // by rank
  bool killing_ = false;     // we kill the rest ourselves: their ends explain nothing
  int running_;
  LaunchResult result_;
  std::vector<int> ended_;
};

LaunchResult wait_for(Children& children, const sigset_t& watched, const LaunchOptions& options) {
  std::optional<SteadyClock::time_point> kill_at;
  int stopped_by = 0;
  bool interrupted = false;
  const auto grace =
      std::chrono::duration_cast<SteadyClock::duration>(std::chrono::duration<double>(options.grace_seconds));
  SteadyClock::time_point looked = SteadyClock::now();
  while (!children.reap()) {
    if (children.failed() && !kill_at) kill_at = SteadyClock::now() + grace;
    if (kill_at && SteadyClock::now() >= *kill_at) children.end_all();
    // A second at most: what was longer we were stopped ourselves, with the whole job.
    const SteadyClock::time_point now = SteadyClock::now(), before = std::exchange(looked, now);
    const double elapsed = std::min(1.0, std::chrono::duration<double>(now - before).count());
    for (const std::string& line : children.stopped_ones(elapsed, options.say_after_seconds))
      if (options.say) options.say(line);
      else std::fprintf(stderr, "hotbunk: %s\n", line.c_str());
    const timespec slice{0, 200'000'000};  // only as long as a lost SIGCHLD (taken by another thread) may cost
    const int signal = sigtimedwait(&watched, nullptr, &slice);
    if (signal != SIGINT && signal != SIGTERM) continue;
    if (stopped_by == 0) {
      stopped_by = signal;
      if (options.on_stop) options.on_stop(signal);
      children.kill_all(signal);
    } else if (signal == SIGINT) {
      interrupted = true;
      children.kill_rest();
    }
  }
  LaunchResult result = children.finish();
  constexpr int exit_interrupted = 128 + SIGINT;
  // What the ranks say when they are killed by their user's wish is no failure.
  if (interrupted) result.message.clear();
  if (interrupted || (stopped_by == SIGINT && result.exit_code == 0)) result.exit_code = exit_interrupted;
  return result;
}

}  // namespace

LaunchResult fork_ranks(int n, const std::function<int(const LaunchEnv&)>& body, const LaunchOptions& options) {
  HB_CHECK(n >= 1, "{} ranks", n);
  const Listener listener = listen_on_loopback();
  const std::string token = new_token();
  sigset_t watched, before;
  sigemptyset(&watched);
  for (int s : {SIGCHLD, SIGINT, SIGTERM}) sigaddset(&watched, s);
  pthread_sigmask(SIG_BLOCK, &watched, &before);
  std::fflush(nullptr);  // or the children print our buffers again

  Children children(n);
  const int parent = getpid();
  for (int rank = 0; rank < n; ++rank) {
    const int pid = fork();
    if (pid < 0) {
      const int error = errno;
      children.kill_all(SIGKILL);
      close(listener.fd);
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      throw RuntimeFailure(fmt::format("cannot start rank {} of {}: {}", rank, n, system_error_text(error)));
    }
    if (pid == 0) {
      if (rank != 0) close(listener.fd);
      run_child(local_env(rank, n, listener, token), parent, before, body);
    }
    children.add(rank, pid);
  }
  close(listener.fd);
  LaunchResult result = wait_for(children, watched, options);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return result;
}

LaunchResult spawn_local(int n, const std::vector<std::string>& argv, const LaunchOptions& options) {
  HB_CHECK(!argv.empty(), "no program to start");
  const auto run_program = [&argv](const LaunchEnv& env) -> int {
    const auto set = [](const char* name, const std::string& value) { setenv(name, value.c_str(), 1); };
    set("RANK", std::to_string(env.rank));
    set("WORLD_SIZE", std::to_string(env.world_size));
    set("LOCAL_RANK", std::to_string(env.local_rank));
    set("MASTER_ADDR", env.master_addr);
    set("MASTER_PORT", std::to_string(env.master_port));
    set(launcher_variable, std::to_string(getppid()));
    set("HOTBUNK_TOKEN", env.token);
    unsetenv("TORCHELASTIC_USE_AGENT_STORE");
    unsetenv("HOTBUNK_LISTEN_FD");
    if (env.listen_fd >= 0) {
      set("HOTBUNK_LISTEN_FD", std::to_string(env.listen_fd));
      fcntl(env.listen_fd, F_SETFD, 0);  // survives exec
    }
    std::vector<char*> args;
    for (const std::string& a : argv) args.push_back(const_cast<char*>(a.c_str()));
    args.push_back(nullptr);
    execv(args[0], args.data());
    std::fprintf(stderr, "cannot start %s: %s\n", args[0], std::strerror(errno));
    return 3;
  };
  return fork_ranks(n, run_program, options);
}

std::vector<int> thread_ranks(int n, const std::function<int(const LaunchEnv&)>& body) {
  HB_CHECK(n >= 1, "{} ranks", n);
  Listener listener;
  if (n > 1) listener = listen_on_loopback();  // rank 0's world closes it
  const std::string token = new_token();
  std::vector<int> codes(static_cast<std::size_t>(n), 3);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < n; ++rank)
    threads.push_back(start_thread([&, rank] {
      try {
        codes[static_cast<std::size_t>(rank)] = body(local_env(rank, n, listener, token));
      } catch (const std::exception& e) {
        std::fprintf(stderr, "rank %d: %s\n", rank, e.what());
      }
    }));
  for (std::thread& t : threads) t.join();
  return codes;
}

}  // namespace hotbunk
