#include "base/limits.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <vector>

namespace hotbunk {
namespace {

std::string limit_text(decltype(RLIMIT_NOFILE) which) {
  rlimit limit{};
  if (getrlimit(which, &limit) != 0) return "an unknown number";
  return limit.rlim_cur == RLIM_INFINITY ? "any number" : fmt::format("{}", limit.rlim_cur);
}

}  // namespace

std::string address_limit_text() {
  const std::string addresses = limit_text(RLIMIT_AS);
  return addresses == "any number" ? "" : fmt::format("this process may have {} B of addresses (ulimit -v)", addresses);
}

std::string system_error_text(int error) {
  std::string text = std::strerror(error);
  if (error == EMFILE) text += fmt::format(": this process may have {} (ulimit -n)", limit_text(RLIMIT_NOFILE));
  if (error == EAGAIN)
    text += fmt::format(
        ": this user may have {} processes and threads (ulimit -u), and the container may have fewer (cgroup pids.max)",
        limit_text(RLIMIT_NPROC));
  if (error == EFBIG)
    text += fmt::format(": a file of this process may have {} B (ulimit -f)", limit_text(RLIMIT_FSIZE));
  // A thread has a stack: without addresses for it the system says EAGAIN too.
  if (const std::string addresses = address_limit_text(); (error == EAGAIN || error == ENOMEM) && !addresses.empty())
    text += (error == EAGAIN ? "; " : ": ") + addresses;
  return text;
}

void check_threads(int count) {
  std::mutex mutex;
  std::condition_variable wake;
  bool over = false;
  std::vector<std::thread> threads;
  const auto end = [&] {
    {
      std::lock_guard lock(mutex);
      over = true;
    }
    wake.notify_all();
    for (std::thread& t : threads) t.join();
  };
  try {
    for (int i = 0; i < count; ++i)
      threads.push_back(start_thread([&] {
        std::unique_lock lock(mutex);
        wake.wait(lock, [&] { return over; });
      }));
  } catch (...) {
    end();
    throw;
  }
  end();
}

void check_open_files(long needed) {
  rlimit limit{};
  if (needed < 0 || getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const auto wanted = static_cast<rlim_t>(needed);
  if (limit.rlim_cur < limit.rlim_max) {
    const rlim_t before = limit.rlim_cur;
    limit.rlim_cur = limit.rlim_max == RLIM_INFINITY ? std::max(before, wanted) : limit.rlim_max;
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0) limit.rlim_cur = before;
  }
  if (limit.rlim_cur < wanted)
    throw RuntimeFailure(fmt::format("this rank needs at least {} open files, {}", needed, system_error_text(EMFILE)));
}

}  // namespace hotbunk
