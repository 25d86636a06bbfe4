#include "trace/critical_path.h"

#include <algorithm>
#include <array>
#include <boost/graph/adjacency_list.hpp>
#include <boost/graph/dag_shortest_paths.hpp>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <tuple>

#include "base/check.h"
#include "graph/bound.h"
#include "trace/meetings.h"
#include "trace/span_name.h"

namespace hotbunk {
namespace {

using Weight = boost::property<boost::edge_weight_t, std::int64_t>;
using Graph = boost::adjacency_list<boost::vecS, boost::vecS, boost::directedS, boost::no_property, Weight>;
using Vertex = std::size_t;
constexpr Vertex none = SIZE_MAX;

class Builder {
 public:
  Builder(const Plan& plan, const Trace& trace, std::int32_t step) : plan_(plan), trace_(trace), step_(step) {
    for (std::size_t i = 0; i < trace.spans.size(); ++i)
      if (trace.spans[i].step == step) spans_.push_back(i);
    vertex_of_.assign(trace.spans.size(), none);
    std::stable_sort(spans_.begin(), spans_.end(),
                     [&](std::size_t a, std::size_t b) { return trace.spans[a].start_ns < trace.spans[b].start_ns; });
    for (const std::size_t i : spans_) own_ns_.push_back(trace.spans[i].end_ns - trace.spans[i].start_ns);
    for (std::size_t v = 0; v < spans_.size(); ++v) vertex_of_[spans_[v]] = v;
    num_vertices_ = spans_.size();
  }

  CriticalPath find() {
    CriticalPath out;
    out.step = step_;
    if (spans_.empty()) return out;
    const std::vector<std::pair<Vertex, Vertex>> before = order_edges();
    collectives();
    together();
    if (!trace_.links.empty()) no_sooner();
    events();
    for (const auto& [from, to] : before) edge(from, to);
    longest(out);
    phases(out);
    return out;
  }

 private:
  const Span& span(Vertex v) const { return trace_.spans[spans_[v]]; }
  const std::string& name(const Span& s) const { return trace_.names[static_cast<std::size_t>(s.name)]; }

  /// Into a collective leads only what leads to all its members.
  void edge(Vertex from, Vertex to) {
    if (to < spans_.size() && meeting_of_.count(to)) to = meeting_of_[to];
    edges_.emplace_back(from, to);
  }

  /// Streams in order; a phase of a rank after its phase before. Vertices of their own: the start of each visit.
  std::vector<std::pair<Vertex, Vertex>> order_edges() {
    std::vector<std::pair<Vertex, Vertex>> out;
    std::map<std::tuple<Rank, std::int16_t, StreamId>, std::vector<Vertex>> streams;
    for (Vertex v = 0; v < spans_.size(); ++v) streams[{span(v).rank, span(v).phase, span(v).stream}].push_back(v);
    source_ = num_vertices_++;
    std::map<Rank, std::vector<const PhaseSpan*>> visits;
    for (const PhaseSpan& p : trace_.phases)
      if (p.step == step_) visits[p.rank].push_back(&p);
    for (auto& [rank, list] : visits) {
      std::stable_sort(list.begin(), list.end(), [](auto* a, auto* b) { return a->start_ns < b->start_ns; });
      Vertex enter = num_vertices_++;
      out.emplace_back(source_, enter);
      for (const PhaseSpan* p : list) {
        const Vertex leave = num_vertices_++;
        out.emplace_back(enter, leave);
        for (std::size_t s = 0; s < plan_.streams.size(); ++s) {
          const auto stream = streams.find({rank, p->phase, static_cast<StreamId>(s)});
          if (stream == streams.end()) continue;
          const std::vector<Vertex>& line = stream->second;
          out.emplace_back(enter, line.front());
          for (std::size_t i = 1; i < line.size(); ++i) out.emplace_back(line[i - 1], line[i]);
          out.emplace_back(line.back(), leave);
        }
        enter = leave;
      }
    }
    return out;
  }

  void collectives() {
    for (const std::vector<std::size_t>& meeting : meetings_of(plan_, trace_)) {
      if (trace_.spans[meeting.front()].step != step_) continue;
      const Vertex all = num_vertices_++;
      std::int64_t last_ns = 0;
      for (const std::size_t i : meeting) last_ns = std::max(last_ns, trace_.spans[i].start_ns);
      for (const std::size_t i : meeting) {
        const Vertex member = vertex_of_[i];
        own_ns_[member] = std::max<std::int64_t>(0, trace_.spans[i].end_ns - last_ns);
        meeting_of_[member] = all;
        edges_.emplace_back(all, member);
      }
    }
  }

  /// Whether a span stands for a run of a block or for several: "decode", "decode x 137", "train: further blocks".
  bool of_several(const Span& s) const {
    const std::string_view name = this->name(s);
    const auto phase = static_cast<std::size_t>(s.phase);
    if (name.ends_with(": further blocks")) return true;
    const std::string_view block = name.substr(0, std::min(name.find(" x "), name.size()));
    for (const Program& program : plan_.programs)
      if (std::ranges::any_of(program.phases[phase], [&](const Block& b) { return !block.empty() && b.name == block; }))
        return true;
    return false;
  }

  /// Of the spans of one rank and phase that stand for whole runs, those of several streams lie over one another: what
  /// ends later counts from where the other ends.
  void together() {
    std::map<std::int32_t, bool> known;  // by name; a name is of one phase
    std::map<std::pair<Rank, std::int16_t>, std::vector<std::pair<std::int64_t, Vertex>>> by_visit;  // end
    for (Vertex v = 0; v < spans_.size(); ++v) {
      const auto [at, is_new] = known.try_emplace(span(v).name);
      if (is_new) at->second = of_several(span(v));
      if (at->second) by_visit[{span(v).rank, span(v).phase}].emplace_back(span(v).end_ns, v);
    }
    for (auto& [visit, mine] : by_visit) {
      std::sort(mine.begin(), mine.end());
      for (std::size_t i = 1; i < mine.size(); ++i) {
        const auto& [before_ns, before] = mine[i - 1];
        const auto& [end_ns, v] = mine[i];
        if (span(v).start_ns >= before_ns) continue;
        edge(before, v);
        own_ns_[v] = end_ns - before_ns;
      }
    }
  }

  /// Where every rank has a device to itself, nothing waits for a core or a host: an op of a simulation begins at the
  /// nanosecond at which what it waited for ends, on its own rank or, of what communicates, on another one.
  void no_sooner() {
    using Ending = std::multimap<std::int64_t, Vertex>;
    std::map<std::pair<Rank, std::int16_t>, Ending> own;
    std::map<std::int16_t, Ending> all;
    for (Vertex v = 0; v < spans_.size(); ++v) {
      own[{span(v).rank, span(v).phase}].emplace(span(v).end_ns, v);
      all[span(v).phase].emplace(span(v).end_ns, v);
    }
    for (Vertex v = 0; v < spans_.size(); ++v) {
      const auto after = [&](const Ending& ending) {
        const auto [first, last] = ending.equal_range(span(v).start_ns);
        for (auto it = first; it != last; ++it) edge(it->second, v);
        return first != last;
      };
      if (!after(own[{span(v).rank, span(v).phase}]) && is_communication(span(v).kind)) after(all[span(v).phase]);
    }
  }

  /// From the program's text to the spans: the op before a record is the latest of its name that was done before the op
  /// after the wait started.
  void events() {
    std::map<std::string_view, std::int32_t> numbers;  // of names: the first that says so
    std::vector<std::int32_t> number_of;               // by Trace::names
    for (const std::string& text : trace_.names)
      number_of.push_back(numbers.emplace(text, static_cast<std::int32_t>(number_of.size())).first->second);
    using Key = std::tuple<std::int16_t, std::int32_t>;  // phase, name
    // By rank that has spans; in order of start, which is that of end on a stream.
    std::map<Rank, std::map<Key, std::vector<Vertex>>> by_name;
    for (Vertex v = 0; v < spans_.size(); ++v)
      by_name[span(v).rank][{span(v).phase, number_of[static_cast<std::size_t>(span(v).name)]}].push_back(v);
    std::vector<std::vector<std::vector<NumberedPairs>>> pairs;  // [program][phase][block]
    for (const Program& program : plan_.programs) {
      auto& of_program = pairs.emplace_back();
      for (const auto& blocks : program.phases) {
        auto& of_phase = of_program.emplace_back();
        for (const Block& block : blocks) of_phase.push_back(numbered(event_pairs(program, block), numbers));
      }
    }
    for (const auto& [rank, named] : by_name) {
      const Program& program = plan_.program(rank);
      const auto which = static_cast<std::size_t>(plan_.program_of_rank[static_cast<std::size_t>(rank)]);
      for (std::size_t p = 0; p < program.phases.size(); ++p)
        for (std::size_t b = 0; b < program.phases[p].size(); ++b)
          for (const auto& [from, to] : pairs[which][p][b]) {
            const auto phase = static_cast<std::int16_t>(p);
            const auto found = [&, &named = named](const NameNumbers& names) {
              const auto alone = named.find({phase, names[0]});
              return alone != named.end() ? alone : named.find({phase, names[1]});
            };
            const auto sources = found(from), targets = found(to);
            if (sources == named.end() || targets == named.end()) continue;
            for (const Vertex target : targets->second) {
              Vertex latest = none;
              for (const Vertex v : sources->second)
                if (span(v).end_ns <= span(target).start_ns) latest = v;
              if (latest != none) edge(latest, target);
            }
          }
    }
  }

  /// What an op's span may be called: by itself, and with its neighbours.
  using Names = std::array<std::string, 2>;
  /// Those of the ops on both sides of each event of a block.
  using EventPairs = std::vector<std::pair<Names, Names>>;
  /// The same by number; -1: nothing in the trace has that name.
  using NameNumbers = std::array<std::int32_t, 2>;
  using NumberedPairs = std::vector<std::pair<NameNumbers, NameNumbers>>;
  /// Without those of which one side has none.
  static NumberedPairs numbered(const EventPairs& pairs, const std::map<std::string_view, std::int32_t>& numbers) {
    const auto numbers_of = [&](const Names& names) {
      NameNumbers out{-1, -1};
      for (std::size_t i = 0; i < names.size(); ++i)
        if (const auto known = numbers.find(names[i]); known != numbers.end()) out[i] = known->second;
      return out;
    };
    NumberedPairs out;
    for (const auto& [from, to] : pairs) {
      const NameNumbers source = numbers_of(from), target = numbers_of(to);
      if (std::ranges::max(source) >= 0 && std::ranges::max(target) >= 0) out.emplace_back(source, target);
    }
    return out;
  }

  static EventPairs event_pairs(const Program& program, const Block& block) {
    EventPairs out;
    std::array<Names, max_streams> last;
    std::array<std::vector<Names>, max_streams> awaited;
    std::map<EventId, Names> recorded;
    each_step(
        program, block,
        [&](const BoundOp& op) {
          if (op->kind == OpKind::alloc || op->kind == OpKind::free) return;  // they leave no spans
          const auto stream = static_cast<std::size_t>(op->stream);
          const bool maps = is_memory(op->kind);  // leaves one in a simulation only: what is behind it waits as well
          const std::string name = span_name(op);
          for (const Names& from : awaited[stream])
            if (!from[0].empty()) out.emplace_back(from, Names{name, maps ? name : op.name_with_neighbours()});
          if (!maps) awaited[stream].clear();
          last[stream] = {name, maps ? last[stream][0] : op.name_with_neighbours()};
        },
        [&](const Mark& m) {
          const auto stream = static_cast<std::size_t>(m.stream);
          if (m.kind == OpKind::record) recorded[m.event] = last[stream];
          else if (const auto from = recorded.find(m.event); from != recorded.end())
            awaited[stream].push_back(from->second);
        });
    return out;
  }

  /// The longest path is the shortest one under negated lengths: the graph has no cycle.
  void longest(CriticalPath& out) const {
    Graph graph(num_vertices_);
    for (const auto& [from, to] : edges_)
      boost::add_edge(from, to, Weight(to < spans_.size() ? -own_ns_[to] : 0), graph);
    std::vector<std::int64_t> distance(num_vertices_);
    std::vector<Vertex> previous(num_vertices_);
    boost::dag_shortest_paths(graph, source_,
                              boost::distance_map(distance.data())
                                  .predecessor_map(previous.data())
                                  .distance_inf(std::numeric_limits<std::int64_t>::max()));
    Vertex v = static_cast<Vertex>(std::min_element(distance.begin(), distance.end()) - distance.begin());
    out.busy_ns = -distance[v];
    for (; v != source_; v = previous[v]) {
      HB_CHECK(previous[v] != v, "span {} is not reached from the step's start", v);
      if (v < spans_.size() && own_ns_[v] > 0) out.spans.push_back(spans_[v]), out.own_ns.push_back(own_ns_[v]);
    }
    std::reverse(out.spans.begin(), out.spans.end());
    std::reverse(out.own_ns.begin(), out.own_ns.end());
  }

  /// Where the path's time is, and what lies between its ops.
  void phases(CriticalPath& out) const {
    std::map<std::int16_t, std::int64_t> ends;
    std::int64_t begin_ns = INT64_MAX;
    for (const PhaseSpan& p : trace_.phases) {
      if (p.step != step_) continue;
      ends[p.phase] = std::max(ends[p.phase], p.end_ns);
      begin_ns = std::min(begin_ns, p.start_ns);
    }
    std::vector<std::pair<std::int64_t, std::int16_t>> order;
    for (const auto& [phase, end_ns] : ends) order.emplace_back(end_ns, phase);
    std::sort(order.begin(), order.end());
    const std::int64_t end_ns = order.empty() ? 0 : order.back().first;
    for (std::int64_t before_ns = begin_ns; const auto& [until_ns, phase] : order) {
      out.phases.push_back({phase, until_ns - before_ns, 0});
      before_ns = until_ns;
    }
    // A measured op may end a little behind its phase; the path has no nanosecond twice.
    out.elapsed_ns = order.empty() ? 0 : end_ns - begin_ns;
    out.busy_ns = 0;
    std::int64_t now_ns = begin_ns;
    for (std::size_t i = 0; i < out.spans.size(); ++i) {
      const std::int64_t to_ns = std::min(trace_.spans[out.spans[i]].end_ns, end_ns),
                         from_ns = std::clamp(to_ns - out.own_ns[i], std::min(now_ns, to_ns), to_ns);
      const std::int64_t starts_ns = std::max(from_ns, now_ns), stops_ns = std::max(to_ns, now_ns);
      out.idle_ns.push_back(starts_ns - now_ns);
      out.own_ns[i] = stops_ns - starts_ns;
      out.busy_ns += out.own_ns[i];
      now_ns = stops_ns;
      std::int64_t before_ns = begin_ns;
      for (CriticalPath::PhaseShare& share : out.phases) {
        const std::int64_t until_ns = before_ns + share.elapsed_ns;
        share.busy_ns += std::max<std::int64_t>(0, std::min(stops_ns, until_ns) - std::max(starts_ns, before_ns));
        before_ns = until_ns;
      }
    }
    out.idle_after_ns = end_ns - now_ns;
  }

  const Plan& plan_;
  const Trace& trace_;
  std::int32_t step_;
  std::vector<std::size_t> spans_;       // vertices, in order of start; indices into Trace::spans
  std::vector<Vertex> vertex_of_;        // the other way
  std::vector<std::int64_t> own_ns_;     // by vertex of a span
  std::map<Vertex, Vertex> meeting_of_;  // the collective that a span is part of
  std::vector<std::pair<Vertex, Vertex>> edges_;
  std::size_t num_vertices_ = 0;
  Vertex source_ = 0;
};

}  // namespace

std::int32_t last_recorded_step(const Plan& plan, const Trace& trace) {
  std::int32_t last = 0;
  for (const Span& s : trace.spans)
    if (plan.phases[static_cast<std::size_t>(s.phase)].when == When::iteration) last = std::max(last, s.step);
  return last;
}

CriticalPath critical_path(const Plan& plan, const Trace& trace, std::int32_t step) {
  return Builder(plan, trace, step).find();
}

}  // namespace hotbunk
