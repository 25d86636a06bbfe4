#include "sim/run_queue.h"

#include <algorithm>

#include "base/check.h"

namespace hotbunk {

RunQueue::RunQueue(const ThreadModel& model)
    : wake_ns_(model.wake_ns), switch_ns_(model.switch_ns), slice_ns_(model.slice_ns) {
  HB_CHECK(model.cores > 0 && model.wake_ns >= 0 && model.switch_ns >= 0 && model.slice_ns > 0 && model.call_ns >= 0,
           "{} cores, wake-up in {} ns, switch in {} ns, slices of {} ns, calls of {} ns", model.cores, model.wake_ns,
           model.switch_ns, model.slice_ns, model.call_ns);
  cores_.resize(static_cast<std::size_t>(model.cores));
}

void RunQueue::run(Core& core, std::int64_t now_ns, std::int64_t work_ns) const {
  core.state = State::running;
  if (core.slice_end_ns <= now_ns) core.slice_end_ns = now_ns + slice_ns_;
  core.until_ns = std::min(now_ns + work_ns, core.slice_end_ns);
  core.left_ns = work_ns - (core.until_ns - now_ns);
}

void RunQueue::join(std::int64_t now_ns, std::uint32_t thread, std::int64_t work_ns) {
  for (Core& core : cores_)
    if (core.state == State::done && core.thread == thread) {
      if (core.slice_end_ns > now_ns || waiting_.empty()) return run(core, now_ns, work_ns);
      break;
    }
  waiting_.push_back({thread, work_ns});
}

void RunQueue::dispatch(std::int64_t now_ns) {
  // Idle cores first, as a kernel places what it wakes while the thread that woke it still runs.
  for (const bool just_left : {false, true})
    for (Core& core : cores_) {
      const bool left = core.state == State::done || core.until_ns == now_ns;
      if (core.state == State::running || left != just_left) continue;
      core.state = State::idle;
      if (waiting_.empty()) continue;
      core.thread = waiting_.front().thread;
      core.slice_end_ns = now_ns + slice_ns_;
      run(core, now_ns, waiting_.front().work_ns + (left ? switch_ns_ : wake_ns_));
      waiting_.pop_front();
    }
}

std::optional<std::uint32_t> RunQueue::take_done(std::int64_t now_ns) {
  for (Core& core : cores_) {
    if (core.state != State::running || core.until_ns > now_ns) continue;
    if (core.left_ns == 0) {
      core.state = State::done;
      return core.thread;
    }
    if (waiting_.empty()) {
      run(core, now_ns, core.left_ns);
    } else {
      waiting_.push_back({core.thread, core.left_ns});
      core.state = State::idle;  // until_ns stays: it was left now
    }
  }
  return std::nullopt;
}

std::optional<std::int64_t> RunQueue::next_ns() const {
  std::optional<std::int64_t> next;
  for (const Core& core : cores_)
    if (core.state == State::running && (!next || core.until_ns < *next)) next = core.until_ns;
  return next;
}

}  // namespace hotbunk
