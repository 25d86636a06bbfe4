#include "planner/price/stream_seconds.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <map>

#include "base/check.h"
#include "graph/bound.h"
#include "graph/clock.h"
#include "trace/traffic_rules.h"

namespace hotbunk {

double StreamSeconds::slowed() const {
  double known = busy[at(lead_stream)];
  for (const double s : waited) known += s;
  return std::max(0.0, elapsed - known);
}

StreamSeconds& StreamSeconds::add(const StreamSeconds& more, double times) {
  for (std::size_t s = 0; s < max_streams; ++s) busy[s] += times * more.busy[s], waited[s] += times * more.waited[s];
  for (std::size_t k = 0; k < kinds.size(); ++k) kinds[k] += times * more.kinds[k];
  elapsed += times * more.elapsed, launched += times * more.launched, paced += times * more.paced;
  return *this;
}

DeviceSharing device_sharing(const CostModel& cost, const ClusterSpec& cluster) {
  const Hardware& h = cost.hardware();
  const auto ranks = static_cast<double>(std::max<std::int64_t>(1, cluster.ranks_per_device));
  if (h.cores.value >= 1.0) return {.slots = h.cores.value / ranks, .threads = true};
  if (ranks > 1.0) return {};
  return {.slowdown = h.overlap_slowdown.value, .launch_s = h.launch.value, .links = true};
}

/// Cuts calls into items, calls of one body with marks at the same places once.
class BlockStreams::Writer {
 public:
  Writer(BlockStreams& out, std::int32_t num_events, std::size_t num_bodies)
      : out_(out), last_record_(static_cast<std::size_t>(num_events), -1), cuts_(num_bodies) {}

  /// `marks`: those of the call, whose `before` counts the ops alone.
  void call(std::int32_t body, std::span<const Op> ops, std::span<const Mark> marks) {
    const Cut& cut = cut_of(body, ops, marks);
    out_.launches_ += cut.launches;
    for (const std::int32_t item : cut.items) {
      if (item >= 0) {
        const auto number = static_cast<std::uint32_t>(item);
        ++out_.segments_[number].uses;
        items_of(out_.segments_[number].stream).push_back({What::work, number});
        continue;
      }
      const Mark& m = marks[static_cast<std::size_t>(-1 - item)];
      std::int32_t& last = last_record_[static_cast<std::size_t>(m.event)];
      if (m.kind == OpKind::record) {
        last = static_cast<std::int32_t>(out_.recorded_by_.size());
        out_.recorded_by_.push_back(m.stream);
        items_of(m.stream).push_back({What::record, static_cast<std::uint32_t>(last)});
      } else if (last >= 0) {  // what was recorded before the block is done
        items_of(m.stream).push_back({What::wait, static_cast<std::uint32_t>(last)});
      }
    }
  }

 private:
  std::vector<Item>& items_of(StreamId s) { return out_.items_[at(s)]; }

  static bool same_places(std::span<const Mark> a, std::span<const Mark> b) {
    return std::ranges::equal(a, b, [](const Mark& x, const Mark& y) {
      return x.before == y.before && x.kind == y.kind && x.stream == y.stream;
    });
  }

  const Cut& cut_of(std::int32_t body, std::span<const Op> ops, std::span<const Mark> marks) {
    std::vector<Cut>& known = cuts_[static_cast<std::size_t>(body)];
    for (const Cut& c : known)
      if (same_places(c.marks, marks)) return c;
    Cut& cut = known.emplace_back();
    cut.marks.assign(marks.begin(), marks.end());
    std::array<std::int32_t, max_streams> open;  // the segment that a stream's next op may join
    open.fill(-1);
    std::size_t mark = 0;
    for (std::size_t i = 0; i <= ops.size(); ++i) {
      for (; mark < marks.size() && marks[mark].before <= static_cast<std::int32_t>(i); ++mark) {
        open[at(marks[mark].stream)] = -1;
        cut.items.push_back(-1 - static_cast<std::int32_t>(mark));
      }
      if (i < ops.size()) add(ops[i], open, cut);
    }
    return cut;
  }

  void add(const Op& op, std::array<std::int32_t, max_streams>& open, Cut& cut) {
    if (op.kind == OpKind::alloc || op.kind == OpKind::free) return;
    if (!is_memory(op.kind)) ++cut.launches;
    if (op.kind == OpKind::fetch) out_.fetches_ = true;
    if ((op.kind == OpKind::map || op.kind == OpKind::unmap) && op.section == transient_section) return;
    const Occupies occupies = occupies_of(*out_.plan_, op);
    const bool alone = is_communication(op.kind) || is_memory(op.kind);
    std::int32_t& segment = open[at(op.stream)];
    if (alone || segment < 0 || out_.segments_[static_cast<std::size_t>(segment)].occupies != occupies) {
      segment = static_cast<std::int32_t>(out_.segments_.size());
      cut.items.push_back(segment);
      out_.segments_.push_back({.occupies = occupies, .stream = op.stream, .ops = {}});
    }
    out_.segments_[static_cast<std::size_t>(segment)].ops.push_back(&op);
    if (alone) segment = -1;
  }

  BlockStreams& out_;
  std::vector<std::int32_t> last_record_;  // by event; -1: none yet
  std::vector<std::vector<Cut>> cuts_;     // by body
};

BlockStreams::BlockStreams(const Plan& plan, const Program& program, const Block& block) : plan_(&plan) {
  Writer writer(*this, program.num_events, program.bodies.size());
  for (const Call& call : block.calls)
    writer.call(call.body, program.bodies[static_cast<std::size_t>(call.body)].ops, call.marks);
}

BlockStreams::BlockStreams(const Plan& plan, const Draft& draft, const DraftBlock& block) : plan_(&plan) {
  Writer writer(*this, draft.num_events, draft.bodies.size());
  std::vector<Mark> marks;
  for (const DraftCall& call : block.calls) {
    const DraftBody& body = draft.body_of(call);
    // Marks count what allocates and frees as well.
    marks = call.marks;
    auto mark = marks.begin();
    std::int32_t steps = 0, ops = 0;
    const auto pass = [&](bool op) {
      for (; mark != marks.end() && mark->before <= steps; ++mark) mark->before = ops;
      ++steps, ops += op ? 1 : 0;
    };
    each_step(
        body, call, [&](const DraftMemory&, StreamId) { pass(false); }, [&](const Op&, std::size_t) { pass(true); });
    for (; mark != marks.end(); ++mark) mark->before = ops;
    writer.call(call.body, body.ops, marks);
  }
}

std::vector<BlockStreams::Price> BlockStreams::segment_prices(const CostModel& cost, std::span<const RankPlace> ranks,
                                                              const Sizes& sizes,
                                                              std::array<double, num_op_kinds>& kinds) const {
  std::vector<Price> out;
  out.reserve(segments_.size());
  for (const Segment& segment : segments_) {
    std::int64_t ns = 0;
    for (const Op* op : segment.ops) {
      std::int64_t longest = cost.op_nanoseconds(*plan_, ranks[0], *op, sizes);
      if (op->kind == OpKind::peer_copy)
        for (const RankPlace& rank : ranks.subspan(1))
          longest = std::max(longest, cost.op_nanoseconds(*plan_, rank, *op, sizes));
      ns += longest;
      if (segment.stream == lead_stream)
        kinds[static_cast<std::size_t>(op->kind)] += 1e-9 * static_cast<double>(segment.uses * longest);
    }
    Price& price = out.emplace_back(Price{.nanoseconds = static_cast<double>(ns)});
    if (segment.occupies != Occupies::meeting || ns <= 0) continue;
    const Op& op = *segment.ops[0];
    const GroupShape& group = ranks[0].groups.at(static_cast<std::size_t>(op.group));
    if (group.ranks <= 1) continue;
    const CostModel::LinkSeconds busy =
        cost.link_seconds(op.kind, group, static_cast<double>(communication_bytes(op, sizes)));
    price.links = {std::min(1.0, 1e9 * busy.inside / price.nanoseconds),
                   std::min(1.0, 1e9 * busy.port / price.nanoseconds)};
  }
  return out;
}

/// Streams in virtual time. Kernels share the device: one number, the service that each of them has had since it came,
/// says when it is done. Collectives share the rank's links: where those under way want more than there is of one, all
/// of them that use it slow down alike. Everything else takes its price.
class BlockStreams::Replay {
 public:
  Replay(const BlockStreams& block, const DeviceSharing& sharing, std::span<const Price> prices)
      : block_(block), sharing_(sharing), prices_(prices), fired_(block.recorded_by_.size(), 0) {}

  StreamSeconds run() {
    for (std::size_t s = 0; s < max_streams; ++s)
      if (!block_.items_[s].empty()) go_on(s);
    while ((on_device_ | timed_ | on_links_) != 0) advance();
    for (std::size_t s = 0; s < max_streams; ++s)
      HB_CHECK(head_[s] == block_.items_[s].size(), "stream {} of a block waits for ever", s);
    for (std::size_t s = 0; s < max_streams; ++s) out_.busy[s] *= 1e-9, out_.waited[s] *= 1e-9;
    out_.elapsed = 1e-9 * now_;
    const double launched = sharing_.launch_s * static_cast<double>(block_.launches_);
    if (block_.fetches_) out_.paced = std::max(0.0, launched - out_.elapsed);
    else out_.launched = launched;
    return out_;
  }

 private:
  using Set = std::uint32_t;  // of streams
  static constexpr Set bit(std::size_t s) { return Set{1} << s; }
  template <class Visit>
  static void each(Set set, Visit visit) {
    for (; set != 0; set &= set - 1) visit(static_cast<std::size_t>(std::countr_zero(set)));
  }

  /// Moves a stream on until its head takes time or waits.
  void go_on(std::size_t s) {
    const std::vector<Item>& items = block_.items_[s];
    for (std::size_t& head = head_[s]; head < items.size(); ++head) {
      const Item item = items[head];
      if (item.what == What::record) {
        fired_[item.number] = 1;
        const auto by = at(block_.recorded_by_[item.number]);
        each(waiting_, [&](std::size_t w) {
          if (block_.items_[w][head_[w]].number != item.number) return;
          waiting_ &= ~bit(w), ready_ |= bit(w);
          if (w == at(lead_stream)) out_.waited[by] += now_ - since_;
        });
      } else if (item.what == What::wait) {
        if (fired_[item.number] != 0) continue;
        waiting_ |= bit(s);
        if (s == at(lead_stream)) since_ = now_;
        break;
      } else if (begin(s, item.number)) {
        break;
      }
    }
    while (ready_ != 0) {
      const auto next = static_cast<std::size_t>(std::countr_zero(ready_));
      ready_ &= ready_ - 1;
      ++head_[next];
      go_on(next);
    }
  }

  /// False where the work takes no time.
  bool begin(std::size_t s, std::uint32_t segment) {
    const double ns = prices_[segment].nanoseconds;
    out_.busy[s] += ns;
    if (ns <= 0.0) return false;
    const Occupies occupies = block_.segments_[segment].occupies;
    const bool meets = occupies == Occupies::meeting || occupies == Occupies::transfer;
    if (occupies == Occupies::device || (meets && sharing_.threads)) {
      if (on_device_ == 0) service_ = 0.0;  // keeps the sum far from its range
      on_device_ |= bit(s);
      end_[s] = service_ + ns;
      return true;
    }
    if (meets) communicating_ |= bit(s);
    if (meets && sharing_.links) {
      on_links_ |= bit(s);
      left_[s] = ns, demand_[s] = prices_[segment].links;
      share_links();
      return true;
    }
    timed_ |= bit(s);
    end_[s] = now_ + ns;
    return true;
  }

  /// How fast the collectives under way are, of their prices.
  void share_links() {
    std::array<double, 2> wanted{};
    each(on_links_, [&](std::size_t s) {
      for (std::size_t i = 0; i < wanted.size(); ++i) wanted[i] += demand_[s][i];
    });
    each(on_links_, [&](std::size_t s) {
      rate_[s] = 1.0;
      for (std::size_t i = 0; i < wanted.size(); ++i)
        if (wanted[i] > 1.0 && demand_[s][i] > 0.0) rate_[s] = std::min(rate_[s], 1.0 / wanted[i]);
    });
  }

  /// To when the next work is done.
  void advance() {
    double next = std::numeric_limits<double>::infinity(), least = next;
    each(timed_, [&](std::size_t s) { next = std::min(next, end_[s]); });
    Set last = 0;  // of the links' users: those that are done first
    double soonest = std::numeric_limits<double>::infinity();
    each(on_links_, [&](std::size_t s) {
      const double left = left_[s] / rate_[s];
      if (left < soonest) soonest = left, last = 0;
      if (left <= soonest) last |= bit(s);
    });
    next = std::min(next, now_ + soonest);
    each(on_device_, [&](std::size_t s) { least = std::min(least, end_[s]); });
    const double rate = on_device_ == 0 ? 0.0 : device_rate();
    const double device_next = on_device_ == 0 ? next : now_ + std::max(0.0, least - service_) / rate;
    Set done = 0;
    const double before = now_;
    if (on_device_ != 0 && device_next <= next) {
      now_ = device_next, service_ = least;
      each(on_device_, [&](std::size_t s) { done |= end_[s] <= service_ ? bit(s) : 0; });
      on_device_ &= ~done;
    } else {
      service_ += rate * (next - now_), now_ = next;
    }
    each(timed_, [&](std::size_t s) { done |= end_[s] <= now_ ? bit(s) : 0; });
    if (on_links_ != 0) {
      each(on_links_, [&](std::size_t s) { left_[s] -= rate_[s] * (now_ - before); });
      const Set through = now_ >= before + soonest ? last : 0;
      done |= through, on_links_ &= ~through;
      if (through != 0) share_links();
    }
    timed_ &= ~done, communicating_ &= ~done;
    each(done, [&](std::size_t s) {
      ++head_[s];
      go_on(s);
    });
  }

  double device_rate() const {
    const double alone = communicating_ != 0 ? 1.0 - sharing_.slowdown : 1.0;
    return alone * std::min(1.0, sharing_.slots / static_cast<double>(std::popcount(on_device_)));
  }

  const BlockStreams& block_;
  const DeviceSharing& sharing_;
  std::span<const Price> prices_;
  std::vector<std::uint8_t> fired_;  // by record
  std::array<std::size_t, max_streams> head_{};
  std::array<double, max_streams> end_{};                    // of the head: a time, or on the device a service
  std::array<double, max_streams> left_{}, rate_{};          // of collectives: nanoseconds of their price
  std::array<std::array<double, 2>, max_streams> demand_{};  // Price::links
  Set on_device_ = 0, timed_ = 0, on_links_ = 0, communicating_ = 0, waiting_ = 0, ready_ = 0;
  double now_ = 0.0, service_ = 0.0, since_ = 0.0;  // since: the leading stream waits
  StreamSeconds out_;
};

StreamSeconds BlockStreams::seconds(const CostModel& cost, const DeviceSharing& sharing,
                                    std::span<const RankPlace> ranks, const Sizes& sizes) const {
  std::array<double, num_op_kinds> kinds{};
  const std::vector<Price> prices = segment_prices(cost, ranks, sizes, kinds);
  StreamSeconds out = Replay(*this, sharing, prices).run();
  out.kinds = kinds;
  return out;
}

}  // namespace hotbunk
