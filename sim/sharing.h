// Processor sharing: what happens when several ops want one device or one link at the same time.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

namespace hotbunk {

/// A resource that runs `slots` jobs at full rate; with k > slots jobs each one progresses at slots / k.
///
/// All jobs progress equally, so one number describes them: the service S(t) that a job present all the time has had.
/// A job that joins at S with work w is done when S reaches S + w. S advances by dt * min(1, slots / k), counted in
/// 1/1024 ns and rounded down, so a completion is late by less than 1 ns + 1/1024 ns per change of k meanwhile.
class SharedResource {
 public:
  explicit SharedResource(std::int64_t slots) : slots_(slots) {}

  /// Times must not decrease from call to call.
  void join(std::int64_t now_ns, std::uint32_t job, std::int64_t work_ns);
  /// From now on all jobs progress at 1 - by of that, to 1/1024.
  void slow_down(std::int64_t now_ns, double by);
  /// Removes a job that is done at `now_ns`, the earliest first, ties in the order of joining.
  std::optional<std::uint32_t> take_done(std::int64_t now_ns);
  /// When the next job is done if nobody joins or leaves; nothing when idle.
  std::optional<std::int64_t> next_done_ns() const;
  std::int64_t running() const { return static_cast<std::int64_t>(jobs_.size()); }

 private:
  static constexpr std::int64_t units_per_ns = 1024;
  struct Job {
    std::int64_t done_at;  // service
    std::uint32_t job;
  };
  void advance(std::int64_t now_ns);
  std::size_t earliest() const;

  std::int64_t slots_;
  std::int64_t rate_ = units_per_ns;  // of service in a nanosecond
  std::int64_t now_ns_ = 0, service_ = 0;
  std::vector<Job> jobs_;  // a handful: one per stream and rank of the device
};

}  // namespace hotbunk
