// What the engine says when nothing moves any more, or when ranks disagree.
#include <algorithm>
#include <utility>

#include "base/check.h"
#include "sim/engine.h"
#include "trace/traffic_rules.h"

namespace hotbunk {

std::string Engine::where(QueueId q) const {
  return fmt::format("rank {} stream {}", rank_of(q), stream_name(stream_of(q)));
}

/// The head of a stream: "rank 0 stream gather: all_gather 'layers.0' #3 of group fsdp (ranks 0, 1), 64 B".
std::string Engine::describe(QueueId q) const {
  const Stream& s = streams_[q];
  if (s.queue.empty()) return where(q) + ": nothing";
  const Entry& e = s.queue.front();
  if (e.code == mark_wait) return fmt::format("{}: wait for event {}", where(q), e.run);
  const Op& op = *info(q, e).op;
  std::string text = fmt::format("{}: {} '{}'", where(q), name_of(op.kind), info(q, e).op.name());
  if (!is_communication(op.kind)) return text;
  const std::int32_t g = group_at(op.group, rank_of(q));
  const Group& group = groups_[static_cast<std::size_t>(g)];
  if (info(q, e).occupies == Occupies::meeting)
    text += fmt::format(" #{}", meetings_[static_cast<std::size_t>(g) * max_streams + q % max_streams].sequence);
  const std::int64_t bytes =
      op.kind == OpKind::recv ? op.outputs.at(0).bytes(sizes(q, e)) : communication_bytes(op, sizes(q, e));
  text += fmt::format(
      " of group {} (ranks {}), {} B", plan_.groups[static_cast<std::size_t>(group.family)].name,
      fmt::join(
          *members_[static_cast<std::size_t>(group.family) * hosts_.size() + static_cast<std::size_t>(rank_of(q))],
          ", "),
      bytes);
  if (op.kind != OpKind::send_recv) return text;
  const Transfer transfer = transfer_of(q, op);
  return text + fmt::format(" to rank {} and {} B from rank {}", std::get<3>(*transfer.out),
                            op.outputs.at(0).bytes(sizes(q, e)), std::get<2>(*transfer.in));
}

bool Engine::waits_for(QueueId q, QueueId& next, std::string& why) const {
  const Stream& s = streams_[q];
  if (s.queue.empty()) return false;
  const Entry& e = s.queue.front();
  Rank rank = rank_of(q);  // of the queue that q waits for
  StreamId stream = stream_of(q);
  if (s.at == At::event) {
    const QueueId first = static_cast<QueueId>(rank) * max_streams;
    for (QueueId other = first; other < first + num_streams_; ++other) {
      const Fifo& queue = streams_[other].queue;
      for (std::size_t i = queue.head; i < queue.items.size(); ++i)
        if (queue.items[i].code == mark_record && queue.items[i].value == e.value) {
          why = fmt::format("recorded behind the head of {}", where(other));
          next = other;
          return true;
        }
    }
    why = fmt::format("which the host of rank {} has not enqueued yet", rank);
  } else if (s.at == At::meeting) {
    const std::int32_t g = group_at(info(q, e).op->group, rank);
    const auto id = static_cast<std::uint32_t>(g) * max_streams + q % max_streams;
    if (info(q, e).op->hands_over()) {
      rank = lacks(q, id);
      why = fmt::format("takes what rank {} has not given", rank);
    } else {
      for (Rank member : groups_[static_cast<std::size_t>(g)].players) {
        const QueueId theirs = static_cast<QueueId>(member) * max_streams + q % max_streams;
        const Stream& t = streams_[theirs];
        if (t.at == At::meeting && group_at(info(theirs, t.queue.front()).op->group, member) == g) continue;
        rank = member;
        break;
      }
      why = fmt::format("waits for rank {}", rank);
    }
  } else if (s.at == At::partner) {
    const Transfer transfer = transfer_of(q, *info(q, e).op);
    const auto unmet = [&](const Pair& pair) { return std::ranges::count(postboxes_.at(pair).senders, q) > 0; };
    rank = transfer.out && unmet(*transfer.out) ? std::get<3>(*transfer.out) : std::get<2>(*transfer.in);
    why = fmt::format("waits for rank {}", rank);
  } else {
    return false;
  }
  next = static_cast<QueueId>(rank) * max_streams + static_cast<QueueId>(stream);
  if (next != q && streams_[next].at != At::idle) return true;
  // Not on its stream: the rank's host may hold it back behind another stream.
  const QueueId first = static_cast<QueueId>(rank) * max_streams;
  if (!hosts_[static_cast<std::size_t>(rank)].calls.empty())
    for (next = first; next < first + num_streams_; ++next)
      if (next != q && streams_[next].at != At::idle) {
        why += fmt::format(", whose host waits for stream {}", stream_name(stream_of(next)));
        return true;
      }
  why += fmt::format(", which has nothing left on stream {}", stream_name(stream));
  return false;
}

Diagnostic Engine::deadlock() const {
  const auto blocked = std::find_if(streams_.begin(), streams_.end(), [](const Stream& s) { return s.at != At::idle; });
  HB_CHECK(blocked != streams_.end(), "work is left, but no stream waits");
  std::vector<QueueId> path{static_cast<QueueId>(blocked - streams_.begin())};
  std::vector<std::string> reasons;
  std::size_t cycle_begin = 0;
  bool cycle = false;
  for (;;) {
    QueueId next = 0;
    std::string why;
    const bool goes_on = waits_for(path.back(), next, why);
    reasons.push_back(why);
    if (!goes_on) break;
    const auto seen = std::find(path.begin(), path.end(), next);
    if (seen != path.end()) {
      cycle = true;
      cycle_begin = static_cast<std::size_t>(seen - path.begin());
      break;
    }
    path.push_back(next);
  }
  Diagnostic d;
  d.code = "E611";
  d.message = cycle
                  ? fmt::format("deadlock after {} ns: {} streams wait for each other", now_, path.size() - cycle_begin)
                  : fmt::format("deadlock after {} ns: {} waits for what never comes", now_, where(path.front()));
  for (std::size_t i = cycle_begin; i < path.size(); ++i)
    d.notes.push_back(fmt::format("{}, {}", describe(path[i]), reasons[i]));
  d.help = cycle
               ? "every rank must issue the collectives of a stream, and streams that wait for each other, in one order"
               : "a collective needs every rank of its group, a recv its send";
  return d;
}

Diagnostic Engine::mismatch(const Group& group, const Meeting& meeting, QueueId a, QueueId b) const {
  if (rank_of(b) < rank_of(a)) std::swap(a, b);  // who came first is of no interest
  Diagnostic d;
  d.code = "E610";
  const bool pair = meeting.arrived == 0;
  d.message = fmt::format("ranks {} and {} disagree about {} of group {}", rank_of(a), rank_of(b),
                          pair ? std::string("a transfer") : fmt::format("collective #{}", meeting.sequence),
                          plan_.groups[static_cast<std::size_t>(group.family)].name);
  for (QueueId q : {a, b}) {
    const BlockRun& run = timeline_.run(rank_of(q), streams_[q].queue.front().run);
    d.notes.push_back(fmt::format("{} (step {}, block {}; {} tokens, {} sequences)", describe(q), run.step, run.block,
                                  run.sizes.tokens, run.sizes.seqs));
  }
  d.help = "every rank of a group must issue the same operation with the same sizes";
  return d;
}

}  // namespace hotbunk
