#include "runtime/stall.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>
#include <utility>

namespace hotbunk {
namespace {

constexpr double busy_cores = 0.01;          // of a core: what a process that only waits never uses
constexpr double longest_silence_s = 600.0;  // between two reports of one wait
constexpr std::size_t most_named = 4;        // ranks in one report

double seconds_between(StallWatch::Clock::time_point a, StallWatch::Clock::time_point b) {
  return std::chrono::duration<double>(b - a).count();
}

}  // namespace

StallWatch::Wait::Wait(StallWatch& watch, std::function<std::string()> what, std::function<std::vector<int>()> missing,
                       std::optional<double> say_after_seconds)
    : watch_(watch),
      what_(std::move(what)),
      missing_(std::move(missing)),
      began_(Clock::now()),
      next_report_s_(say_after_seconds.value_or(watch.options_.say_after_seconds)) {
  std::lock_guard lock(watch_.mutex_);
  watch_.waits_.push_back(this);
}

StallWatch::Wait::~Wait() {
  std::lock_guard lock(watch_.mutex_);
  std::erase(watch_.waits_, this);
}

double StallWatch::interval_seconds() const {
  double shortest = std::min(1.0, options_.say_after_seconds / 4);
  if (options_.timeout_seconds > 0) shortest = std::min(shortest, options_.timeout_seconds / 4);
  return std::max(shortest, 0.02);
}

const StallWatch::Seen* StallWatch::seen(int rank) const {
  const auto it = seen_.find(rank);
  return it != seen_.end() && it->second.known ? &it->second : nullptr;
}

void StallWatch::look_at_all(double elapsed, const std::function<std::optional<RankLook>(int)>& look) {
  std::set<int> wanted;
  std::vector<int> open;
  const auto want = [&](int rank) {
    if (is_beside_the_point(rank) || rank >= options_.world_size) return;
    if (rank >= 0 && wanted.insert(rank).second) open.push_back(rank);
    if (rank < 0)  // more than a status can name: anybody
      for (int r = 0; r < options_.world_size; ++r)
        if (r != options_.rank && wanted.insert(r).second) open.push_back(r);
  };
  for (const Wait* w : waits_)
    for (const int rank : w->missing_()) want(rank);
  while (!open.empty()) {
    const int rank = open.back();
    open.pop_back();
    auto now = look(rank);
    Seen& s = seen_[rank];
    if (!now) {
      s.known = false;
      continue;
    }
    const bool before = s.known;
    s.finished_some = before && now->moment.finished != s.look.moment.finished;
    s.cores =
        before && elapsed > 0 ? (now->cpu_seconds - s.look.cpu_seconds) / elapsed : 1.0;  // unknown yet: in doubt busy
    s.look = std::move(*now);
    s.known = true;
    for (const int r : s.look.moment.waiting_for) want(r);
  }
  std::erase_if(seen_, [&](const auto& entry) { return !wanted.contains(entry.first); });
}

std::vector<int> StallWatch::culprits(const std::vector<int>& missing) const {
  std::vector<int> out;
  const auto take = [&](int rank) {
    const Seen* s = seen(rank);
    if (rank < 0 || is_beside_the_point(rank) || (s && s->look.moment.left)) return;
    if (std::find(out.begin(), out.end(), rank) == out.end()) out.push_back(rank);
  };
  for (const int rank : missing) take(rank);
  for (std::size_t i = 0; i < out.size(); ++i)
    if (const Seen* s = seen(out[i]))
      for (const int rank : std::vector<int>(s->look.moment.waiting_for)) {
        take(rank);
        if (rank < 0)
          for (const auto& [any, unused] : seen_) take(any);
      }
  return out;
}

std::optional<Stall> StallWatch::tick(Clock::time_point now, const std::function<std::optional<RankLook>(int)>& look,
                                      const std::function<void(const std::string&)>& say) {
  std::lock_guard lock(mutex_);
  const double elapsed = last_tick_ ? seconds_between(*last_tick_, now) : 0.0;
  last_tick_ = now;
  waiting_in_.clear();
  waiting_for_.clear();
  std::vector<std::pair<Wait*, std::vector<int>>> old;
  for (Wait* w : waits_)
    if (seconds_between(w->began_, now) >= interval_seconds() / 2) old.emplace_back(w, w->missing_());
  if (old.empty()) {
    seen_.clear();
    return std::nullopt;
  }
  look_at_all(elapsed, look);
  for (auto& [w, missing] : old) {
    waiting_in_ = w->what_();
    waiting_for_.insert(waiting_for_.end(), missing.begin(), missing.end());
    const std::vector<int> ranks = culprits(missing);
    bool works = false;
    for (const int rank : ranks)
      if (const Seen* s = seen(rank)) {
        if (s->finished_some) w->idle_s_ = 0.0;
        works |= s->finished_some || s->cores >= busy_cores;
      }
    // Time in which this process did not run itself (stopped with the whole job) is nobody's fault.
    if (!works) w->idle_s_ += std::min(elapsed, 3 * interval_seconds());
    const double waited = seconds_between(w->began_, now);
    if (options_.timeout_seconds > 0 && w->idle_s_ >= options_.timeout_seconds) return stall_of(*w, ranks);
    if (waited < w->next_report_s_) continue;
    say(fmt::format("hotbunk: rank {} has waited {:.0f} s in {}{}", options_.rank, waited, w->what_(),
                    ranks.empty() ? "" : " for " + texts_of(ranks)));
    w->next_report_s_ = waited + std::min(2 * w->next_report_s_, longest_silence_s);
  }
  return std::nullopt;
}

std::string StallWatch::text_of(int rank) const {
  const Seen* s = seen(rank);
  if (!s) return fmt::format("rank {}: it has not come, or has not answered yet", rank);
  const RankMoment& m = s->look.moment;
  std::string does;
  if (s->look.here && !s->look.process) does = "its process is gone";
  else if (s->look.here && s->look.process->stopped()) does = "stopped (SIGSTOP, job control or a debugger)";
  else if (!s->look.answers)
    does = "on another host, which is there, but the process does not answer: stopped, or starved of CPU";
  else if (s->cores >= busy_cores) does = fmt::format("busy ({:.2f} cores)", s->cores);
  else if (!m.wait.empty())
    does = fmt::format("waits itself in {}{}", m.wait,
                       m.waiting_for.empty() ? "" : fmt::format(" for ranks {}", fmt::join(m.waiting_for, ", ")));
  else if (s->look.here && s->look.process->state == 'D') does = "in an uninterruptible wait, as for a disk";
  else does = "alive, but it uses no CPU";
  std::string last;
  if (!m.phase.empty()) last += ", last in phase " + m.phase;
  if (!m.op.empty()) last += (last.empty() ? ", last in op " : ", op ") + m.op;
  return fmt::format("rank {} (pid {}): {}{}", rank, m.pid, does, last);
}

std::string StallWatch::texts_of(const std::vector<int>& ranks) const {
  std::string out;
  for (std::size_t i = 0; i < std::min(ranks.size(), most_named); ++i) out += (i ? "; " : "") + text_of(ranks[i]);
  if (ranks.size() > most_named) out += fmt::format("; and {} more", ranks.size() - most_named);
  return out;
}

Stall StallWatch::stall_of(const Wait& wait, const std::vector<int>& ranks) const {
  // Who holds up the others: a stopped rank, else one that does not answer, else one that waits for nobody.
  const auto weight = [&](int rank) {
    const Seen* s = seen(rank);
    if (!s) return 0;
    if (s->look.here && s->look.process && s->look.process->stopped()) return 3;
    if (!s->look.answers) return 2;
    return s->look.moment.wait.empty() ? 1 : 0;
  };
  Stall out;
  int most = 0;
  for (const int rank : ranks)
    if (weight(rank) > most) most = weight(rank), out.blamed = rank;
  out.text = fmt::format(
      "rank {} waited in {} and for {:g} s nobody it waits for worked (run.timeout_s): {}", options_.rank, wait.what_(),
      options_.timeout_seconds,
      ranks.empty() ? "it is not known for whom" : texts_of(out.blamed < 0 ? ranks : std::vector{out.blamed}));
  return out;
}

}  // namespace hotbunk
