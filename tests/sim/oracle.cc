#include "tests/sim/oracle.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <map>

#include "tests/blocks.h"

namespace hotbunk::toy {
namespace {

/// One direction of a send, recv or send_recv.
struct Half {
  bool sends = false;
  std::size_t peer = 0;
  double left = 0.0, start = -1.0, end = -1.0;
};

struct Step {
  const Op* op = nullptr;
  double left = 0.0;         // of its price
  std::int64_t record = -1;  // wait: the call it waits for, -1: none
  OracleSpan span;
  std::vector<Half> halves;  // of a transfer
  bool done() const { return span.end >= 0; }
  bool started() const { return span.start >= 0; }
};

struct Oracle {
  const Plan& plan;
  std::int64_t ranks_per_device, slots;
  std::deque<std::vector<Op>> ops;       // by rank
  std::vector<std::vector<Step>> calls;  // by rank, in program order
  double now = 0.0;

  /// Everything before it on its stream is done.
  bool is_head(std::size_t r, std::size_t i) const {
    for (std::size_t k = 0; k < i; ++k)
      if (calls[r][k].op->stream == calls[r][i].op->stream && !calls[r][k].done()) return false;
    return !calls[r][i].done();
  }

  /// The n-th call of this kind on this stream among those that a collective is matched with.
  std::int64_t ordinal(std::size_t r, std::size_t i, OpKind kind) const {
    std::int64_t n = 0;
    for (std::size_t k = 0; k < i; ++k) n += matches(*calls[r][k].op, kind, calls[r][i].op->stream);
    return n;
  }
  static bool matches(const Op& op, OpKind kind, StreamId stream) { return op.kind == kind && op.stream == stream; }

  /// The places that it names are ranks: there is one group, of all.
  std::vector<Half> halves_of(std::size_t r, const Op& op) const {
    const auto rank = [&](Attr attr) {
      const std::int64_t n = std::ssize(ops), said = op.integer(attr);
      return static_cast<std::size_t>(
          op.integer(Attr::relative, 0) != 0 ? (static_cast<std::int64_t>(r) + said + 100 * n) % n : said);
    };
    if (op.kind == OpKind::send) return {{.sends = true, .peer = rank(Attr::peer)}};
    if (op.kind == OpKind::recv) return {{.sends = false, .peer = rank(Attr::peer)}};
    if (op.kind != OpKind::send_recv) return {};
    return {{.sends = true, .peer = rank(Attr::peer)}, {.sends = false, .peer = rank(Attr::source)}};
  }

  /// The n-th half of rank r's calls that goes this way between r and `peer` on a stream: its call and itself.
  std::pair<Step*, Half*> half_at(std::size_t r, StreamId stream, bool sends, std::size_t peer, std::int64_t n) {
    for (Step& c : calls[r])
      for (Half& h : c.halves)
        if (c.op->stream == stream && h.sends == sends && h.peer == peer && n-- == 0) return {&c, &h};
    return {nullptr, nullptr};
  }

  /// Every half whose two ends are heads now, and which has not begun, begins.
  bool start_halves() {
    bool moved = false;
    for (std::size_t r = 0; r < calls.size(); ++r) {
      std::map<std::pair<StreamId, std::size_t>, std::int64_t> sent;  // so far: to a rank, on a stream
      for (std::size_t i = 0; i < calls[r].size(); ++i)
        for (Half& out : calls[r][i].halves) {
          if (!out.sends) continue;
          Step& c = calls[r][i];
          const std::int64_t n = sent[{c.op->stream, out.peer}]++;
          if (out.start >= 0 || !is_head(r, i)) continue;
          const auto [theirs, in] = half_at(out.peer, c.op->stream, false, r, n);
          if (theirs == nullptr || !is_head(out.peer, static_cast<std::size_t>(theirs - calls[out.peer].data())))
            continue;
          const double price = std::max(c.left, theirs->left);
          for (auto [step, half] : {std::pair{&c, &out}, std::pair{theirs, in}}) {
            half->start = now, half->left = price;
            if (!step->started()) step->span.start = now;
            if (price == 0.0) half->end = now;
            end_of(*step);
          }
          moved = true;
        }
    }
    return moved;
  }
  /// A transfer is over when its halves are.
  void end_of(Step& c) const {
    if (std::ranges::all_of(c.halves, [](const Half& h) { return h.end >= 0; })) c.span.end = now;
  }

  /// The calls that start together with this one, itself included; empty when one of them is no head yet.
  std::vector<std::pair<std::size_t, std::size_t>> together(std::size_t r, std::size_t i) const {
    const Op& op = *calls[r][i].op;
    std::vector<std::pair<std::size_t, std::size_t>> out;
    const auto join = [&](std::size_t rank, OpKind kind, std::int64_t n) {
      for (std::size_t k = 0; k < calls[rank].size(); ++k)
        if (matches(*calls[rank][k].op, kind, op.stream) && ordinal(rank, k, kind) == n)
          if (is_head(rank, k)) out.emplace_back(rank, k);
    };
    if (op.kind == OpKind::all_reduce) {
      const std::int64_t n = ordinal(r, i, op.kind);
      for (std::size_t rank = 0; rank < calls.size(); ++rank) join(rank, op.kind, n);
      return out.size() == calls.size() ? out : decltype(out){};
    }
    return {{r, i}};
  }

  bool start_some() {
    bool moved = start_halves();
    for (std::size_t r = 0; r < calls.size(); ++r)
      for (std::size_t i = 0; i < calls[r].size(); ++i) {
        Step& c = calls[r][i];
        if (!c.halves.empty()) continue;
        if (c.started() || !is_head(r, i)) continue;
        if (c.op->kind == OpKind::wait && c.record >= 0 && !calls[r][static_cast<std::size_t>(c.record)].done())
          continue;
        const auto group = together(r, i);
        double longest = 0.0;
        for (const auto& [rank, k] : group) longest = std::max(longest, calls[rank][k].left);
        for (const auto& [rank, k] : group) {
          Step& member = calls[rank][k];
          member.span.start = now;
          member.left = longest;
          if (longest == 0.0) member.span.end = now;
          moved = true;
        }
      }
    return moved;
  }

  /// What it shares, -1: nothing. Numbered by device and kind.
  std::int64_t resource(std::size_t r, const Op& op) const {
    if (is_communication(op.kind) || op.stream == streams::host) return -1;
    const std::int64_t kind = op.stream == streams::h2d ? 1 : op.stream == streams::d2h ? 2 : 0;
    return static_cast<std::int64_t>(r) / ranks_per_device * 3 + kind;
  }

  /// To the next end of an op; false when nothing runs.
  bool advance() {
    std::map<std::int64_t, std::int64_t> running;
    for (std::size_t r = 0; r < calls.size(); ++r)
      for (const Step& c : calls[r])
        if (c.halves.empty() && c.started() && !c.done()) ++running[resource(r, *c.op)];
    const auto rate = [&](std::size_t r, const Step& c) {
      const std::int64_t id = resource(r, *c.op);
      if (id < 0) return 1.0;
      const std::int64_t limit = id % 3 == 0 ? slots : ranks_per_device;
      return std::min(1.0, static_cast<double>(limit) / static_cast<double>(running[id]));
    };
    double step = std::numeric_limits<double>::infinity();
    for (std::size_t r = 0; r < calls.size(); ++r)
      for (const Step& c : calls[r]) {
        if (c.halves.empty() && c.started() && !c.done()) step = std::min(step, c.left / rate(r, c));
        for (const Half& h : c.halves)
          if (h.start >= 0 && h.end < 0) step = std::min(step, h.left);
      }
    if (step == std::numeric_limits<double>::infinity()) return false;
    now += step;
    for (std::size_t r = 0; r < calls.size(); ++r)
      for (Step& c : calls[r])
        if (c.halves.empty() && c.started() && !c.done()) {
          c.left -= step * rate(r, c);
          if (c.left < 1e-6) c.left = 0.0;
        }
    for (auto& rank : calls)
      for (Step& c : rank) {
        if (c.halves.empty() && c.started() && !c.done() && c.left == 0.0) c.span.end = now;
        for (Half& h : c.halves)
          if (h.start >= 0 && h.end < 0 && (h.left -= step) < 1e-6) h.end = now;
        if (!c.halves.empty() && !c.done()) end_of(c);
      }
    return true;
  }
};

}  // namespace

std::vector<std::vector<OracleSpan>> oracle(const Plan& plan, const std::vector<std::vector<std::int64_t>>& cost,
                                            std::int64_t runs, std::int64_t ranks_per_device, std::int64_t slots) {
  Oracle o{plan, ranks_per_device, slots, {}, {}};
  for (Rank r = 0; r < plan.num_ranks(); ++r)
    o.ops.push_back(test::ops_of(plan.program(r), plan.program(r).phases[0][0]));
  for (Rank r = 0; r < plan.num_ranks(); ++r) {
    const std::vector<Op>& ops = o.ops[static_cast<std::size_t>(r)];
    std::map<EventId, std::int64_t> recorded;
    auto& mine = o.calls.emplace_back();
    for (std::int64_t run = 0; run < runs; ++run)
      for (std::size_t i = 0; i < ops.size(); ++i) {
        Step c;
        c.op = &ops[i];
        c.halves = o.halves_of(static_cast<std::size_t>(r), ops[i]);
        c.left = static_cast<double>(cost[static_cast<std::size_t>(r)][i]);
        if (ops[i].kind == OpKind::wait && recorded.count(ops[i].event)) c.record = recorded[ops[i].event];
        if (ops[i].kind == OpKind::record) recorded[ops[i].event] = static_cast<std::int64_t>(mine.size());
        mine.push_back(c);
      }
  }
  do {
    while (o.start_some()) {
    }
  } while (o.advance());
  std::vector<std::vector<OracleSpan>> out;
  for (const auto& rank : o.calls) {
    auto& spans = out.emplace_back();
    for (const Step& c : rank) {
      if (!c.done()) return {};
      spans.push_back(c.span);
    }
  }
  return out;
}

}  // namespace hotbunk::toy
