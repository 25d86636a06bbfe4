#include "reports/chrome_trace.h"

#include <fmt/format.h>

#include <bitset>
#include <map>
#include <set>

#include "graph/json_text.h"
#include "trace/critical_path.h"
#include "trace/meetings.h"
#include "trace/memory_in_time.h"

namespace hotbunk {
namespace {

class Writer {
 public:
  explicit Writer(const Plan& plan, const Trace& trace) : plan_(plan), trace_(trace) {
    for (const Span& s : trace.spans) ranks_with_spans_.insert(s.rank), steps_with_spans_.insert(s.step);
  }

  std::string write() {
    out_ = "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"source\":";
    append_json(out_, trace_.source);
    out_ += ",\"scenario\":", append_json(out_, plan_.scenario);
    out_ += ",\"plan_hash\":", append_json(out_, plan_hash(plan_));
    out_ += "},\"traceEvents\":[";
    names();
    phases();
    spans();
    counters();
    flows();
    critical();
    out_ += "\n]}\n";
    return std::move(out_);
  }

 private:
  /// Opens an event; what follows are its other keys, then end().
  void begin(char type, std::string_view name, Rank pid, int tid) {
    commas_.before(out_);
    fmt::format_to(std::back_inserter(out_), "\n{{\"ph\":\"{}\",\"pid\":{},\"tid\":{},\"name\":", type, pid, tid);
    append_json(out_, name);
  }
  void end() { out_ += '}'; }
  /// Microseconds with the nanoseconds behind the point.
  void time(const char* key, std::int64_t ns) {
    fmt::format_to(std::back_inserter(out_), ",\"{}\":{}.{:03}", key, ns / 1000, ns % 1000);
  }
  template <class... T>
  void raw(fmt::format_string<T...> format, T&&... values) {
    fmt::format_to(std::back_inserter(out_), format, std::forward<T>(values)...);
  }
  static int tid_of(StreamId stream) { return 1 + static_cast<int>(stream); }
  const std::string& phase_name(std::int16_t phase) const { return plan_.phases[static_cast<std::size_t>(phase)].name; }

  void metadata(const char* what, Rank pid, int tid, std::string_view value) {
    begin('M', what, pid, tid);
    out_ += ",\"args\":{\"name\":", append_json(out_, value), out_ += '}';
    end();
  }

  void names() {
    std::map<Rank, std::int64_t> alike;  // how many do the same
    for (Rank r = 0; r < plan_.num_ranks(); ++r) ++alike[trace_.player_of(r)];
    for (const auto& [r, ranks] : alike) {
      metadata("process_name", r, 0,
               ranks == 1 ? fmt::format("rank {}", r) : fmt::format("rank {} and {} like it", r, ranks - 1));
      begin('M', "process_sort_index", r, 0), raw(",\"args\":{{\"sort_index\":{}}}", r), end();
      metadata("thread_name", r, 0, "phases");
      if (!ranks_with_spans_.contains(r)) continue;
      for (int tid = 1; const Stream& s : plan_.streams) metadata("thread_name", r, tid++, s.name);
    }
  }

  /// Of ranks without spans those of the steps that the others' spans are of: such ranks may be a thousand.
  void phases() {
    for (const PhaseSpan& p : trace_.phases) {
      if (!trace_.plays(p.rank)) continue;
      if (!ranks_with_spans_.empty() && !ranks_with_spans_.contains(p.rank) && !steps_with_spans_.contains(p.step))
        continue;
      begin('X', phase_name(p.phase), p.rank, 0);
      time("ts", p.start_ns), time("dur", p.end_ns - p.start_ns);
      raw(",\"cat\":\"phase\",\"args\":{{\"step\":{},\"blocks\":{}}}", p.step, p.blocks);
      end();
    }
  }

  void spans() {
    for (const Span& s : trace_.spans) {
      begin('X', trace_.names[static_cast<std::size_t>(s.name)], s.rank, tid_of(s.stream));
      time("ts", s.start_ns), time("dur", s.end_ns - s.start_ns);
      raw(",\"cat\":\"{}\",\"args\":{{\"step\":{},\"phase\":", name_of(s.kind), s.step);
      append_json(out_, phase_name(s.phase));
      const auto ns = static_cast<double>(s.end_ns - s.start_ns);
      if (s.bytes > 0) raw(",\"bytes\":{}", s.bytes);
      if (s.bytes > 0 && ns > 0) raw(",\"GB/s\":{:.3f}", static_cast<double>(s.bytes) / ns);
      if (s.flops > 0) raw(",\"flops\":{:.0f}", s.flops);
      if (s.flops > 0 && ns > 0) raw(",\"GFLOP/s\":{:.3f}", s.flops / ns);
      out_ += '}';
      end();
    }
  }

  void counters() {
    std::map<std::pair<Rank, Space>, CategoryBytes> live;
    std::map<std::pair<Rank, Space>, std::bitset<num_categories>> drawn;
    const std::vector<MemoryEvent> events = memory_in_time(trace_);
    for (std::size_t i = 0; i < events.size(); ++i) {
      const MemoryEvent& e = events[i];
      CategoryBytes& bytes = live[{e.rank, e.space}];
      bytes[static_cast<std::size_t>(e.category)] += e.delta_bytes;
      const MemoryEvent* next = i + 1 < events.size() ? &events[i + 1] : nullptr;
      if (next && next->rank == e.rank && next->space == e.space && next->time_ns == e.time_ns) continue;
      auto& seen = drawn[{e.rank, e.space}];
      begin('C', fmt::format("{} memory (bytes)", name_of(e.space)), e.rank, 0);
      time("ts", e.time_ns);
      out_ += ",\"args\":{";
      Commas commas;
      for (int c = 0; c < num_categories; ++c) {
        if (bytes[static_cast<std::size_t>(c)] != 0) seen.set(static_cast<std::size_t>(c));
        if (!seen.test(static_cast<std::size_t>(c))) continue;  // of a category that was never there yet
        commas.before(out_);
        raw("\"{}\":{}", name_of(static_cast<Category>(c)), bytes[static_cast<std::size_t>(c)]);
      }
      out_ += '}';
      end();
    }
  }

  void flows() {
    std::int64_t id = 0;
    for (const std::vector<std::size_t>& meeting : meetings_of(plan_, trace_)) {
      const Span* last = &trace_.spans[meeting.front()];
      for (const std::size_t i : meeting)
        if (trace_.spans[i].start_ns > last->start_ns) last = &trace_.spans[i];
      for (const std::size_t i : meeting)
        if (&trace_.spans[i] != last) arrow(*last, trace_.spans[i], ++id);
    }
  }

  /// A process behind the ranks' with the critical path of the last recorded step, each op for its own time.
  void critical() {
    const CriticalPath path = critical_path(plan_, trace_, last_recorded_step(plan_, trace_));
    if (path.spans.empty()) return;
    const Rank pid = plan_.num_ranks();
    metadata("process_name", pid, 0, fmt::format("critical path of step {}", path.step));
    begin('M', "process_sort_index", pid, 0), raw(",\"args\":{{\"sort_index\":{}}}", pid), end();
    for (std::size_t i = 0; i < path.spans.size(); ++i) {
      const Span& s = trace_.spans[path.spans[i]];
      begin('X', trace_.names[static_cast<std::size_t>(s.name)], pid, 0);
      time("ts", s.end_ns - path.own_ns[i]), time("dur", path.own_ns[i]);
      raw(",\"cat\":\"critical\",\"args\":{{\"rank\":{},\"stream\":", s.rank);
      append_json(out_, plan_.stream(s.stream).name), out_ += ",\"phase\":";
      append_json(out_, phase_name(s.phase));
      out_ += '}';
      end();
    }
  }

  void arrow(const Span& from, const Span& to, std::int64_t id) {
    const std::string& name = trace_.names[static_cast<std::size_t>(from.name)];
    begin('s', name, from.rank, tid_of(from.stream));
    time("ts", from.start_ns), raw(",\"cat\":\"collective\",\"id\":{}", id), end();
    begin('f', name, to.rank, tid_of(to.stream));
    // Inside the waiting span, which the viewers need to tie the arrow to it.
    time("ts", std::max(to.start_ns, to.end_ns - 1)), raw(",\"bp\":\"e\",\"cat\":\"collective\",\"id\":{}", id), end();
  }

  const Plan& plan_;
  const Trace& trace_;
  std::set<Rank> ranks_with_spans_;
  std::set<std::int32_t> steps_with_spans_;
  std::string out_;
  Commas commas_;
};

}  // namespace

std::string chrome_trace(const Plan& plan, const Trace& trace) { return Writer(plan, trace).write(); }

}  // namespace hotbunk
