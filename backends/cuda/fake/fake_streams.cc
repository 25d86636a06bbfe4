// When tasks of the double run, and whether those that touch the same bytes were ordered.
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>

#include "backends/cuda/fake/fake_driver.h"
#include "backends/cuda/naps.h"
#include "base/rng.h"

namespace hotbunk::cuda {
namespace {

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

/// The stream has come so far.
void note_issued(Clock& clock, std::int32_t stream, std::int64_t sequence) {
  const auto at = static_cast<std::size_t>(stream);
  if (clock.size() <= at) clock.resize(at + 1);
  clock[at] = sequence;
}

}  // namespace

FakeDriver::Stream* FakeDriver::stream(CUstream handle) {
  const auto it = streams_.find(reinterpret_cast<std::int64_t>(handle));
  return it == streams_.end() ? nullptr : &it->second;
}

CUresult FakeDriver::enqueue_exchange(CUstream handle, const std::string& name, std::function<bool()> ready,
                                      std::function<std::vector<Touch>()> run) {
  const std::lock_guard lock(mutex_);
  if (sticky_ != CUDA_SUCCESS) return sticky_;
  if (const Stream* s = stream(handle); s != nullptr && captures(*s, name.c_str())) return sticky_;
  return enqueue(handle, name, std::move(run), std::move(ready));
}

CUresult FakeDriver::enqueue_work(CUstream handle, const std::string& name, std::function<std::vector<Touch>()> run) {
  const std::lock_guard lock(mutex_);
  return sticky_ != CUDA_SUCCESS ? sticky_ : enqueue(handle, name, std::move(run));
}

void FakeDriver::give_up() {
  const std::lock_guard lock(mutex_);
  gave_up_ = true;
}

CUresult FakeDriver::enqueue(CUstream handle, const std::string& name, std::function<std::vector<Touch>()> run,
                             std::function<bool()> ready) {
  Stream* s = stream(handle);
  if (s == nullptr) return found(fmt::format("{}: no such stream", name));
  if (s->captures != 0) {
    graphs_.at(s->captures).push_back({name, std::move(run)});
    return sticky_;
  }
  Task t;
  t.name = touched_.number_of(name);
  t.run = std::move(run);
  t.ready = std::move(ready);
  merge(s->clock, host());  // the thread issues it after all that it has seen
  t.sequence = ++s->issued;
  t.clock = s->clock;
  note_issued(s->clock, s->number, t.sequence);
  s->queue.push_back(std::move(t));
  let_some_run();
  return sticky_;
}

CUresult FakeDriver::record(CUevent event, CUstream handle) {
  Stream* s = stream(handle);
  const auto it = events_.find(reinterpret_cast<std::int64_t>(event));
  if (s == nullptr || it == events_.end()) return found("cuEventRecord: no such event or stream");
  if (captures(*s, "cuEventRecord")) return sticky_;
  Event& e = it->second;
  merge(s->clock, host());
  e.clock = s->clock;
  Task t;
  t.event = it->first;
  t.version = ++e.issued;
  s->queue.push_back(std::move(t));
  let_some_run();
  return sticky_;
}

CUresult FakeDriver::wait(CUstream handle, CUevent event) {
  Stream* s = stream(handle);
  const auto it = events_.find(reinterpret_cast<std::int64_t>(event));
  if (s == nullptr || it == events_.end()) return found("cuStreamWaitEvent: no such event or stream");
  if (captures(*s, "cuStreamWaitEvent")) return sticky_;
  const Event& e = it->second;
  if (e.issued == 0) return sticky_;  // never recorded: no wait, as CUDA has it
  merge(s->clock, e.clock);
  Task t;
  t.event = it->first;
  t.version = e.issued;
  t.waits = true;
  s->queue.push_back(std::move(t));
  let_some_run();
  return sticky_;
}

bool FakeDriver::ready(const Stream& s) {
  if (s.queue.empty()) return false;
  const Task& t = s.queue.front();
  if (t.ready && !gave_up_) {
    try {
      return t.ready();
    } catch (const std::exception& e) {
      found(fmt::format("{}: {}", touched_.name_of(t.name), e.what()));
      return false;
    }
  }
  if (!t.waits) return true;
  const auto it = events_.find(t.event);
  return it == events_.end() || it->second.done >= t.version;  // a destroyed event has been recorded or never will
}

bool FakeDriver::run_one() {
  // A context with an error runs nothing more. The rank that met it is on its way out: what it has given back, the
  // host's memory too, is gone, whatever another rank's thread still waits for.
  if (sticky_ != CUDA_SUCCESS) return false;
  std::vector<Stream*> could;
  for (auto& [id, s] : streams_)
    if (ready(s)) could.push_back(&s);
  if (could.empty()) return false;
  const std::uint32_t draw = random_words(options_.seed, RngPurpose::test, 0, draws_++)[0];
  Stream& s = *could[draw % could.size()];
  Task t = std::move(s.queue.front());
  s.queue.pop_front();
  if (t.run && gave_up_) return true;
  if (t.run) {
    try {
      note(s, t, t.run());
    } catch (const std::exception& e) {
      found(fmt::format("{}: {}", touched_.name_of(t.name), e.what()));
    }
    ++tasks_run_;
  } else if (!t.waits) {
    if (const auto it = events_.find(t.event); it != events_.end() && t.version > it->second.done) {
      it->second.done = t.version;
      it->second.done_ns = now_ns();
    }
  }
  return true;
}

void FakeDriver::let_some_run() {
  // Mostly nothing: what is late is what hurts.
  const std::uint32_t draw = random_words(options_.seed, RngPurpose::test, 1, draws_++)[0];
  for (std::uint32_t n = draw % 8 == 0 ? draw / 8 % 4 : 0; n > 0 && run_one(); --n) {
  }
}

CUresult FakeDriver::drain(const std::function<bool()>& done) {
  const auto waits_for_others = [](const auto& s) { return !s.second.queue.empty() && s.second.queue.front().ready; };
  struct Blocking {
    std::int64_t& n;
    explicit Blocking(std::int64_t& count) : n(count) { ++n; }
    ~Blocking() { --n; }
  } const blocking(blocking_);
  Naps naps;
  while (!done()) {
    if (run_one()) {
      naps = {};
      continue;
    }
    if (sticky_ != CUDA_SUCCESS) break;
    if (!std::ranges::any_of(streams_, waits_for_others))
      return found("the host waits for what can never run: a wait for an event whose record is behind it");
    // Other processes go on meanwhile, and so do other threads of this one.
    mutex_.unlock();
    naps.nap();
    mutex_.lock();
    if (going_) return CUDA_ERROR_DEINITIALIZED;
  }
  return sticky_;
}

CUresult FakeDriver::synchronize(std::int64_t id) {
  if (captures(streams_.at(id), "cuStreamSynchronize")) return sticky_;
  const CUresult result = drain([&] { return streams_.at(id).queue.empty(); });
  merge(host(), streams_.at(id).clock);
  return result;
}

CUresult FakeDriver::query(std::int64_t id) {
  Stream& s = streams_.at(id);
  if (captures(s, "cuStreamQuery")) return sticky_;
  // The device has been going on since it was asked last: mostly as far as it can.
  while (!s.queue.empty() && run_one() && random_words(options_.seed, RngPurpose::test, 2, draws_++)[0] % 32 != 0) {
  }
  if (sticky_ != CUDA_SUCCESS) return sticky_;
  if (!s.queue.empty()) return CUDA_ERROR_NOT_READY;
  merge(host(), s.clock);
  return CUDA_SUCCESS;
}

CUresult FakeDriver::synchronize_event(std::int64_t id) {
  Event& e = events_.at(id);
  if (e.issued == 0) return sticky_;
  const CUresult result = drain([&] { return e.done >= e.issued; });
  merge(host(), e.clock);
  return result;
}

void FakeDriver::note(const Stream& s, const Task& t, const std::vector<Touch>& touches) {
  const TouchedBytes::Toucher me{s.number, t.sequence, t.name};
  if (const std::string why = why_stale(touches); !why.empty())
    found(fmt::format("'{}' on stream {} {}", touched_.name_of(t.name), s.number, why));
  for (const Touch& touch : touches)
    if (const auto c = touched_.touch(touch.begin, touch.end, touch.write, me, t.clock); c)
      found(fmt::format("{} and {} touch [{:#x}, {:#x}) with no order between them", said(c->earlier), said(me),
                        std::max(touch.begin, c->begin), std::min(touch.end, c->end)));
}

std::string FakeDriver::said(const TouchedBytes::Toucher& t) const {
  const std::string& name = touched_.name_of(t.name);
  return host_numbers_.contains(t.stream) ? fmt::format("'{}' of the host", name)
                                          : fmt::format("'{}' on stream {}", name, t.stream);
}

std::int64_t FakeDriver::this_thread() {
  static std::atomic<std::int64_t> threads{0};
  thread_local const std::int64_t mine = threads++;
  return mine;
}

void FakeDriver::host_touches(const std::string& name, std::uint64_t begin, std::uint64_t end, bool write) {
  HostThread& h = hosts_[this_thread()];
  if (h.number < 0) host_numbers_.insert(h.number = num_streams_++);
  const TouchedBytes::Toucher me{h.number, ++h.touches, touched_.number_of(name)};
  if (const auto c = touched_.touch(begin, end, write, me, h.clock); c)
    found(fmt::format("{} and {} touch [{:#x}, {:#x}) with no order between them", said(c->earlier), said(me),
                      std::max(begin, c->begin), std::min(end, c->end)));
  note_issued(h.clock, h.number, h.touches);
}

}  // namespace hotbunk::cuda
