#include "runtime/rank_status.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>

#include "base/parse.h"

namespace hotbunk {
namespace {

using Word = std::atomic<std::uint64_t>;

// Release and acquire on every word instead of fences: free on x86, and what the thread sanitizer understands.
template <std::size_t n>
void store_text(Word (&words)[n], std::string_view text, std::string_view rest = {}) {
  std::uint64_t plain[n] = {};
  char* const bytes = reinterpret_cast<char*>(plain);
  const std::size_t head = std::min(text.size(), n * 8 - 1);
  std::memcpy(bytes, text.data(), head);
  if (!rest.empty()) std::memcpy(bytes + head, rest.data(), std::min(rest.size(), n * 8 - 1 - head));
  for (std::size_t i = 0; i < n; ++i) words[i].store(plain[i], std::memory_order_release);
}

template <std::size_t n>
std::string load_text(const Word (&words)[n]) {
  std::uint64_t plain[n];
  for (std::size_t i = 0; i < n; ++i) plain[i] = words[i].load(std::memory_order_acquire);
  char text[n * 8];
  std::memcpy(text, plain, sizeof text);
  return {text, strnlen(text, sizeof text - 1)};
}

// Looks at one odd version before a reader takes what it gets: an owner that died while it wrote leaves it so for ever.
// After the first ones a millisecond each: a writer that others keep from its core comes back.
constexpr int quick_looks = 1000, slow_looks = 200;
constexpr int most_tries = 1'000'000;  // beside writers that never rest

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

}  // namespace

template <class Write>
void RankStatus::write(const Write& change) {
  for (std::uint32_t even = version_.load(std::memory_order_relaxed);;) {
    even &= ~1u;
    if (version_.compare_exchange_weak(even, even + 1, std::memory_order_acq_rel)) break;
    if (even & 1) std::this_thread::yield();  // another stream's thread is at it
  }
  change();
  version_.fetch_add(1, std::memory_order_release);
}

void RankStatus::set_phase(std::string_view phase) {
  write([&] {
    store_text(phase_, phase);
    store_text(op_, "");
  });
}

void RankStatus::set_op(std::string_view call, std::string_view op) {
  write([&] { store_text(op_, call, op); });
}

void RankStatus::set_wait(std::string_view wait, const std::vector<int>& ranks) {
  write([&] {
    store_text(wait_, wait);
    const int fit = std::min(static_cast<int>(ranks.size()), most_waited);
    for (int i = 0; i < fit; ++i) waiting_for_[i].store(ranks[i], std::memory_order_release);
    if (static_cast<int>(ranks.size()) > most_waited)
      waiting_for_[most_waited - 1].store(-1, std::memory_order_release);
    num_waiting_for_.store(fit, std::memory_order_release);
  });
}

RankMoment RankStatus::read() const {
  RankMoment m;
  std::uint32_t last = 0;
  int tries = 0;
  for (int looks = 0; looks < quick_looks + slow_looks && tries < most_tries; ++tries) {
    const std::uint32_t before = version_.load(std::memory_order_acquire);
    looks = before % 2 == 1 && before == last ? looks + 1 : 0;
    last = before;
    m.phase = load_text(phase_);
    m.op = load_text(op_);
    m.wait = load_text(wait_);
    m.waiting_for.clear();
    const int fit = std::clamp(num_waiting_for_.load(std::memory_order_acquire), 0, most_waited);
    for (int i = 0; i < fit; ++i) m.waiting_for.push_back(waiting_for_[i].load(std::memory_order_acquire));
    if (before % 2 == 0 && version_.load(std::memory_order_relaxed) == before) break;
    if (looks < quick_looks) std::this_thread::yield();
    else std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  m.finished = finished_.load(std::memory_order_relaxed);
  m.pid = pid_.load(std::memory_order_relaxed);
  m.left = left_.load(std::memory_order_relaxed) != 0;
  return m;
}

std::optional<ProcessState> process_state(int pid) {
  std::FILE* const file = std::fopen(fmt::format("/proc/{}/stat", pid).c_str(), "re");
  if (file == nullptr) return std::nullopt;
  char text[1024];
  const std::size_t n = std::fread(text, 1, sizeof text - 1, file);
  std::fclose(file);
  text[n] = '\0';
  // "pid (name) state …": the name may hold anything, so the fields are counted from its end. utime and stime are the
  // 14th and 15th, in clock ticks. Source: proc(5).
  const char* const name_end = std::strrchr(text, ')');
  ProcessState out;
  unsigned long user = 0, system = 0;
  if (name_end == nullptr ||
      std::sscanf(name_end + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", &out.state, &user, &system) != 3)
    return std::nullopt;
  out.cpu_seconds = static_cast<double>(user + system) / static_cast<double>(sysconf(_SC_CLK_TCK));
  return out;
}

std::string report_text(const RankReport& r) {
  return fmt::format("{}\n{}\n{}\n{}\n{}\n{}\n{}\n{}", r.moment.pid, r.moment.finished, r.moment.left ? 1 : 0,
                     static_cast<std::int64_t>(r.cpu_seconds * 1e3), one_line(r.moment.phase), one_line(r.moment.op),
                     one_line(r.moment.wait), fmt::join(r.moment.waiting_for, " "));
}

std::optional<RankReport> parse_report(std::string_view text) {
  std::vector<std::string> lines(1);
  for (const char c : text)
    if (c == '\n') lines.emplace_back();
    else lines.back() += c;
  if (lines.size() != 8) return std::nullopt;
  std::int64_t numbers[4];
  for (int i = 0; i < 4; ++i) {
    const auto n = parse_integer(lines[i]);
    if (!n || *n < 0) return std::nullopt;
    numbers[i] = *n;
  }
  RankReport r;
  r.moment = {
      lines[4],       lines[5], lines[6], {}, static_cast<std::uint64_t>(numbers[1]), static_cast<int>(numbers[0]),
      numbers[2] != 0};
  r.cpu_seconds = static_cast<double>(numbers[3]) / 1e3;
  std::string word;
  for (const char c : lines[7] + " ") {
    if (c != ' ') {
      word += c;
      continue;
    }
    if (word.empty()) continue;
    const auto rank = parse_integer(word);
    if (!rank) return std::nullopt;
    r.moment.waiting_for.push_back(static_cast<int>(*rank));
    word.clear();
  }
  return r;
}

}  // namespace hotbunk
