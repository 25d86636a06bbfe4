#include "runtime/device_record.h"

#include <fmt/format.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <map>

#include "base/check.h"
#include "base/parse.h"
#include "graph/catalogue.h"
#include "runtime/world.h"

namespace hotbunk {
namespace {

std::int64_t thread_cpu_ns() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return t.tv_sec * 1'000'000'000 + t.tv_nsec;
}

}  // namespace

std::int64_t monotonic_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::int64_t opened_ns(World& world, const std::string& scope) {
  if (world.size() > 1) world.barrier(scope + "plan opened");
  const std::int64_t own = monotonic_ns();
  if (world.size() == 1) return own;
  const std::string key = scope + "epoch";
  if (world.rank() == 0) world.set(key, fmt::format("{}", own));
  if (!world.same_host(0)) return own;
  const auto epoch = parse_integer(world.get(key));
  if (!epoch) throw RuntimeFailure("rank 0 tells no moment at which it opened the plan");
  return *epoch;
}

DeviceRecord::DeviceRecord(const Plan& plan, Rank rank, const RecordOptions& options, std::int64_t epoch_ns)
    : rank_(rank),
      places_(places_of(plan, rank)),
      span_steps_(options.span_steps),
      measure_cpu_(options.measure_cpu),
      epoch_ns_(epoch_ns),
      stays_(plan, rank, KeptSteps::of(plan.num_ranks(), options.span_steps)) {
  trace_.source = "measured";
  for (const Stream& s : plan.streams) trace_.streams.push_back(s.name);
}

std::int64_t DeviceRecord::clock_ns() const { return monotonic_ns() - epoch_ns_; }
std::int64_t DeviceRecord::cpu_ns() const { return measure_cpu_ ? thread_cpu_ns() : 0; }

DeviceRecord::Moment DeviceRecord::now() const {
  const std::int64_t ns = clock_ns();
  return {ns, cpu_ns()};
}

void DeviceRecord::enter(std::int32_t step, std::int16_t phase) {
  where_ = {step, phase};
  stay_ = {.rank = rank_, .step = step, .phase = phase, .start_ns = clock_ns(), .end_ns = 0, .blocks = 0};
}

void DeviceRecord::leave(std::int64_t blocks) {
  stay_.end_ns = clock_ns();
  stay_.blocks = blocks;
  stays_.add(stay_);
}

void DeviceRecord::mark(Mark::Kind kind, StreamId stream, std::int32_t what) {
  if (keeps(where_)) marks_.push_back({kind, stream, enqueued_[static_cast<std::size_t>(stream)], what});
}

void DeviceRecord::note_live(StreamId stream, const BoundBuffer& b, std::int64_t delta_bytes) {
  if (!keeps(where_)) return;
  mark(Mark::Kind::memory, stream, static_cast<std::int32_t>(trace_.memory_events.size()));
  const auto [name, added] = names_.try_emplace({b.buffer, b.prefix}, static_cast<std::int32_t>(trace_.names.size()));
  if (added) trace_.names.push_back(b.name());
  trace_.memory_events.push_back({.rank = rank_,
                                  .space = b.space(),
                                  .category = b.category(),
                                  .phase = where_.phase,
                                  .step = where_.step,
                                  .name = name->second,
                                  .time_ns = clock_ns(),
                                  .delta_bytes = delta_bytes});
}

void DeviceRecord::note_mapping(const BoundOp& op, const Moment& start) {
  const Moment end = now();
  stretch_.issue_ns -= end.cpu_ns - start.cpu_ns;
  if (keeps(where_))
    host_timed_.push_back({op, op->stream, where_.step, where_.phase, {}, start.ns, end.ns, start.cpu_ns, end.cpu_ns});
}

void DeviceRecord::note_enqueued(StreamId stream) {
  note_call();
  ++stretch_.calls;
  if (keeps(where_)) ++enqueued_[static_cast<std::size_t>(stream)];
}

void DeviceRecord::note_record(StreamId stream, EventId event) {
  note_call();
  ++stretch_.calls;
  mark(Mark::Kind::record, stream, event);
}

void DeviceRecord::note_wait(StreamId stream, EventId event) {
  note_call();
  ++stretch_.calls;
  mark(Mark::Kind::wait, stream, event);
}

void DeviceRecord::note_call() {
  if (std::exchange(decided_, true) || !measure_cpu_) return;
  const std::int64_t now = cpu_ns();
  stretch_.decide_ns = now - host_mark_ns_;
  host_mark_ns_ = now;
}

void DeviceRecord::note_sync_begins() {
  if (!measure_cpu_ || !keeps(where_) || stretch_.calls == 0) return;
  stretch_.step = where_.step;
  stretch_.phase = where_.phase;
  stretch_.issue_ns += cpu_ns() - host_mark_ns_;
  host_times_.push_back(stretch_);
}

void DeviceRecord::note_sync_ends() {
  stretch_ = {};
  decided_ = false;
  if (measure_cpu_ && keeps(where_)) host_mark_ns_ = cpu_ns();
}

void DeviceRecord::note_op(StreamId id, const BoundOp& op, const Where& where, const Moment& start, const Sizes& sizes,
                           std::int64_t bytes) {
  const Moment end = now();
  timed_[static_cast<std::size_t>(id)].push_back(
      {{op, id, where.step, where.phase, sizes, start.ns, end.ns, start.cpu_ns, end.cpu_ns}, bytes});
}

void DeviceRecord::note_op(StreamId id, const BoundOp& op, const Where& where, std::int64_t start_ns,
                           std::int64_t end_ns, const Sizes& sizes, std::int64_t bytes) {
  timed_[static_cast<std::size_t>(id)].push_back(
      {{op, id, where.step, where.phase, sizes, start_ns, end_ns, 0, 0}, bytes});
}

std::vector<TimedOp> DeviceRecord::timings() const {
  std::vector<TimedOp> out = host_timed_;
  for (const auto& stream : timed_)
    for (const Timed& t : stream) out.push_back(t.op);
  return out;
}

/// A memory event happens when its stream comes to it: behind the ops and waits that were enqueued there before, and no
/// earlier than the program asked. So a range is free before its next buffer comes, whichever streams they are on.
void DeviceRecord::time_memory_events() {
  std::array<std::int64_t, max_streams> waited_until{};
  std::map<std::int32_t, std::int64_t> fired;  // by event
  for (const Mark& m : marks_) {
    const auto stream = static_cast<std::size_t>(m.stream);
    // Of a run that failed, what was enqueued may never have run.
    const auto ran = std::min<std::size_t>(static_cast<std::size_t>(m.ops_before), timed_[stream].size());
    const std::int64_t at = std::max(waited_until[stream], ran > 0 ? timed_[stream][ran - 1].op.end_ns : 0);
    switch (m.kind) {
      case Mark::Kind::memory: {
        std::int64_t& time_ns = trace_.memory_events[static_cast<std::size_t>(m.what)].time_ns;
        time_ns = std::max(time_ns, at);
        break;
      }
      case Mark::Kind::record:
        fired[m.what] = at;
        break;
      case Mark::Kind::wait:
        if (const auto event = fired.find(m.what); event != fired.end())
          waited_until[stream] = std::max(at, event->second);
    }
  }
}

Trace DeviceRecord::take_trace(std::size_t ranks, RankMemory memory, const TrafficFold& traffic) {
  const auto me = static_cast<std::size_t>(rank_);
  time_memory_events();
  trace_.memory.resize(ranks);
  trace_.traffic.resize(ranks);
  trace_.traffic_totals.resize(ranks);
  trace_.memory[me] = std::move(memory);
  trace_.traffic[me] = traffic.rows();
  trace_.traffic_totals[me] = traffic.totals();
  stays_.write(trace_);
  std::map<std::pair<const Call*, const Op*>, std::int32_t> ids;
  for (const auto& stream : timed_)
    for (const auto& [t, bytes] : stream) {
      auto [it, added] = ids.try_emplace({t.op.call, t.op.op}, static_cast<std::int32_t>(trace_.names.size()));
      if (added) trace_.names.push_back(t.op.name());
      trace_.spans.push_back({.rank = rank_,
                              .stream = t.stream,
                              .kind = t.op->kind,
                              .phase = t.phase,
                              .step = t.step,
                              .name = it->second,
                              .start_ns = t.start_ns,
                              .end_ns = t.end_ns,
                              .bytes = bytes >= 0 ? bytes : op_bytes(*t.op, t.sizes, places_),
                              .flops = op_flops(*t.op, t.sizes)});
    }
  return std::move(trace_);
}

}  // namespace hotbunk
