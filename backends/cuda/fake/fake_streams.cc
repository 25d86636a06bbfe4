// When tasks of the double run, and whether those that touch the same bytes were ordered.
#include <fmt/format.h>

#include <algorithm>

#include "backends/cuda/fake/fake_driver.h"
#include "base/rng.h"

namespace hotbunk::cuda {
namespace {

void merge(Clock& into, const Clock& from) {
  for (const auto& [stream, sequence] : from) into[stream] = std::max(into[stream], sequence);
}

}  // namespace

FakeDriver::Stream* FakeDriver::stream(CUstream handle) {
  const auto it = streams_.find(reinterpret_cast<std::int64_t>(handle));
  return it == streams_.end() ? nullptr : &it->second;
}

CUresult FakeDriver::enqueue(CUstream handle, std::string name, std::function<std::vector<Touch>()> run) {
  Stream* s = stream(handle);
  if (s == nullptr) return found(fmt::format("{}: no such stream", name));
  Task t;
  t.name = std::move(name);
  t.run = std::move(run);
  merge(s->clock, host_);  // the host issues it after all that it has seen
  t.sequence = ++s->issued;
  t.clock = s->clock;
  s->clock[static_cast<std::int32_t>(reinterpret_cast<std::int64_t>(handle))] = t.sequence;
  s->queue.push_back(std::move(t));
  let_some_run();
  return sticky_;
}

CUresult FakeDriver::record(CUevent event, CUstream handle) {
  Stream* s = stream(handle);
  const auto it = events_.find(reinterpret_cast<std::int64_t>(event));
  if (s == nullptr || it == events_.end()) return found("cuEventRecord: no such event or stream");
  Event& e = it->second;
  merge(s->clock, host_);
  e.clocks[++e.issued] = s->clock;
  Task t;
  t.name = "record";
  t.event = it->first;
  t.version = e.issued;
  s->queue.push_back(std::move(t));
  let_some_run();
  return sticky_;
}

CUresult FakeDriver::wait(CUstream handle, CUevent event) {
  Stream* s = stream(handle);
  const auto it = events_.find(reinterpret_cast<std::int64_t>(event));
  if (s == nullptr || it == events_.end()) return found("cuStreamWaitEvent: no such event or stream");
  const Event& e = it->second;
  if (e.issued == 0) return sticky_;  // never recorded: no wait, as CUDA has it
  merge(s->clock, e.clocks.at(e.issued));
  Task t;
  t.name = "wait";
  t.event = it->first;
  t.version = e.issued;
  t.waits = true;
  s->queue.push_back(std::move(t));
  let_some_run();
  return sticky_;
}

bool FakeDriver::ready(const Stream& s) const {
  if (s.queue.empty()) return false;
  const Task& t = s.queue.front();
  if (!t.waits) return true;
  const auto it = events_.find(t.event);
  return it == events_.end() || it->second.done >= t.version;  // a destroyed event has been recorded or never will
}

bool FakeDriver::run_one() {
  std::vector<std::int64_t> could;
  for (const auto& [id, s] : streams_)
    if (ready(s)) could.push_back(id);
  if (could.empty()) return false;
  const std::uint32_t draw = random_words(options_.seed, RngPurpose::test, 0, draws_++)[0];
  const std::int64_t id = could[draw % could.size()];
  Stream& s = streams_[id];
  Task t = std::move(s.queue.front());
  s.queue.pop_front();
  if (t.run) {
    try {
      note(static_cast<std::int32_t>(id), t, t.run());
    } catch (const std::exception& e) {
      found(fmt::format("{}: {}", t.name, e.what()));
    }
    ++tasks_run_;
  } else if (!t.waits) {
    if (const auto it = events_.find(t.event); it != events_.end())
      it->second.done = std::max(it->second.done, t.version);
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
  while (!done())
    if (!run_one())
      return found("the host waits for what can never run: a wait for an event whose record is behind it");
  return sticky_;
}

void FakeDriver::host_saw(const Clock& clock) {
  merge(host_, clock);
  // What the host and every task still to run know to be done is ordered before all that may come: forgotten.
  const auto knows = [](const Clock& c, const Access& a) {
    const auto it = c.find(a.stream);
    return it != c.end() && it->second >= a.sequence;
  };
  std::erase_if(accesses_, [&](const auto& entry) {
    return knows(host_, entry.second) && std::ranges::all_of(streams_, [&](const auto& s) {
             return std::ranges::all_of(s.second.queue,
                                        [&](const Task& t) { return !t.run || knows(t.clock, entry.second); });
           });
  });
}

CUresult FakeDriver::synchronize(std::int64_t id) {
  const CUresult result = drain([&] { return streams_.at(id).queue.empty(); });
  host_saw(streams_.at(id).clock);
  return result;
}

CUresult FakeDriver::synchronize_event(std::int64_t id) {
  Event& e = events_.at(id);
  if (e.issued == 0) return sticky_;
  const CUresult result = drain([&] { return e.done >= e.issued; });
  host_saw(e.clocks.at(e.issued));
  return result;
}

void FakeDriver::note(std::int32_t id, const Task& t, const std::vector<Touch>& touches) {
  const auto ordered = [&](const Access& a) {
    if (a.stream == id) return true;
    const auto it = t.clock.find(a.stream);
    return it != t.clock.end() && it->second >= a.sequence;
  };
  for (const Touch& touch : touches) {
    for (auto it = accesses_.begin(); it != accesses_.end() && it->first < touch.end;) {
      const Access& a = it->second;
      const bool overlaps = a.end > touch.begin;
      if (overlaps && (touch.write || a.write) && !ordered(a)) {
        found(fmt::format("'{}' on stream {} and '{}' on stream {} touch [{:#x}, {:#x}) with no order between them",
                          a.name, a.stream, t.name, id, std::max(it->first, touch.begin), std::min(a.end, touch.end)));
        return;
      }
      // Wholly covered by a later write that is ordered behind it: nobody needs it any more.
      if (overlaps && touch.write && it->first >= touch.begin && a.end <= touch.end) it = accesses_.erase(it);
      else ++it;
    }
    accesses_.emplace(touch.begin, Access{touch.end, id, t.sequence, t.name, touch.write});
  }
}

}  // namespace hotbunk::cuda
