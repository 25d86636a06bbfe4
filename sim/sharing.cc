#include "sim/sharing.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace hotbunk {

void SharedResource::advance(std::int64_t now_ns) {
  HB_CHECK(now_ns >= now_ns_, "time runs backwards: {} after {}", now_ns, now_ns_);
  const std::int64_t elapsed = (now_ns - now_ns_) * rate_;
  service_ += running() > slots_ ? elapsed * slots_ / running() : elapsed;
  now_ns_ = now_ns;
}

void SharedResource::join(std::int64_t now_ns, std::uint32_t job, std::int64_t work_ns) {
  advance(now_ns);
  if (jobs_.empty()) service_ = 0;  // keeps the count far from its range
  jobs_.push_back({service_ + work_ns * units_per_ns, job});
}

void SharedResource::slow_down(std::int64_t now_ns, double by) {
  HB_CHECK(by >= 0.0 && by < 1.0, "slower by {}", by);
  advance(now_ns);
  rate_ = std::max<std::int64_t>(1, std::llround((1.0 - by) * static_cast<double>(units_per_ns)));
}

std::size_t SharedResource::earliest() const {
  const auto at =
      std::min_element(jobs_.begin(), jobs_.end(), [](const Job& a, const Job& b) { return a.done_at < b.done_at; });
  return static_cast<std::size_t>(at - jobs_.begin());
}

std::optional<std::uint32_t> SharedResource::take_done(std::int64_t now_ns) {
  advance(now_ns);
  if (jobs_.empty()) return std::nullopt;
  const std::size_t i = earliest();
  if (jobs_[i].done_at > service_) return std::nullopt;
  const std::uint32_t job = jobs_[i].job;
  jobs_.erase(jobs_.begin() + static_cast<std::ptrdiff_t>(i));
  return job;
}

std::optional<std::int64_t> SharedResource::next_done_ns() const {
  if (jobs_.empty()) return std::nullopt;
  const std::int64_t left = std::max<std::int64_t>(0, jobs_[earliest()].done_at - service_);
  // Rounded up: then the service reached at that time, rounded down, covers what is left.
  if (running() <= slots_) return now_ns_ + (left + rate_ - 1) / rate_;
  const std::int64_t per_ns = slots_ * rate_;
  return now_ns_ + (left * running() + per_ns - 1) / per_ns;
}

}  // namespace hotbunk
