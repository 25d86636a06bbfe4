#include "tests/sim/oracle.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <map>

#include "tests/blocks.h"

namespace hotbunk::toy {
namespace {

struct Step {
  const Op* op = nullptr;
  double left = 0.0;         // of its price
  std::int64_t record = -1;  // wait: the call it waits for, -1: none
  OracleSpan span;
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

  /// The n-th call of this kind on this stream among those that a collective or transfer is matched with.
  std::int64_t ordinal(std::size_t r, std::size_t i, OpKind kind, std::int64_t peer) const {
    std::int64_t n = 0;
    for (std::size_t k = 0; k < i; ++k) n += matches(*calls[r][k].op, kind, calls[r][i].op->stream, peer);
    return n;
  }
  static bool matches(const Op& op, OpKind kind, StreamId stream, std::int64_t peer) {
    if (op.kind != kind) return false;
    return peer >= 0 ? op.integer(Attr::peer) == peer : op.stream == stream;
  }

  /// The calls that start together with this one, itself included; empty when one of them is no head yet.
  std::vector<std::pair<std::size_t, std::size_t>> together(std::size_t r, std::size_t i) const {
    const Op& op = *calls[r][i].op;
    std::vector<std::pair<std::size_t, std::size_t>> out;
    const auto join = [&](std::size_t rank, OpKind kind, std::int64_t peer, std::int64_t n) {
      for (std::size_t k = 0; k < calls[rank].size(); ++k)
        if (matches(*calls[rank][k].op, kind, op.stream, peer) && ordinal(rank, k, kind, peer) == n)
          if (is_head(rank, k)) out.emplace_back(rank, k);
    };
    if (op.kind == OpKind::all_reduce) {
      const std::int64_t n = ordinal(r, i, op.kind, -1);
      for (std::size_t rank = 0; rank < calls.size(); ++rank) join(rank, op.kind, -1, n);
      return out.size() == calls.size() ? out : decltype(out){};
    }
    if (op.kind == OpKind::send || op.kind == OpKind::recv) {
      const auto peer = op.integer(Attr::peer);
      const std::int64_t n = ordinal(r, i, op.kind, peer);
      out.emplace_back(r, i);
      join(static_cast<std::size_t>(peer), op.kind == OpKind::send ? OpKind::recv : OpKind::send,
           static_cast<std::int64_t>(r), n);
      return out.size() == 2 ? out : decltype(out){};
    }
    return {{r, i}};
  }

  bool start_some() {
    bool moved = false;
    for (std::size_t r = 0; r < calls.size(); ++r)
      for (std::size_t i = 0; i < calls[r].size(); ++i) {
        Step& c = calls[r][i];
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
        if (c.started() && !c.done()) ++running[resource(r, *c.op)];
    const auto rate = [&](std::size_t r, const Step& c) {
      const std::int64_t id = resource(r, *c.op);
      if (id < 0) return 1.0;
      const std::int64_t limit = id % 3 == 0 ? slots : ranks_per_device;
      return std::min(1.0, static_cast<double>(limit) / static_cast<double>(running[id]));
    };
    double step = std::numeric_limits<double>::infinity();
    for (std::size_t r = 0; r < calls.size(); ++r)
      for (const Step& c : calls[r])
        if (c.started() && !c.done()) step = std::min(step, c.left / rate(r, c));
    if (step == std::numeric_limits<double>::infinity()) return false;
    now += step;
    for (std::size_t r = 0; r < calls.size(); ++r)
      for (Step& c : calls[r])
        if (c.started() && !c.done()) {
          c.left -= step * rate(r, c);
          if (c.left < 1e-6) c.left = 0.0;
        }
    for (auto& rank : calls)
      for (Step& c : rank)
        if (c.started() && !c.done() && c.left == 0.0) c.span.end = now;
    return true;
  }
};

}  // namespace

std::vector<std::vector<OracleSpan>> oracle(const Plan& plan, const std::vector<std::vector<std::int64_t>>& cost,
                                            std::int64_t runs, std::int64_t ranks_per_device, std::int64_t slots) {
  Oracle o{plan, ranks_per_device, slots, {}, {}};
  for (Rank r = 0; r < plan.num_ranks(); ++r) {
    const std::vector<Op>& ops = o.ops.emplace_back(test::ops_of(plan.program(r), plan.program(r).phases[0][0]));
    std::map<EventId, std::int64_t> recorded;
    auto& mine = o.calls.emplace_back();
    for (std::int64_t run = 0; run < runs; ++run)
      for (std::size_t i = 0; i < ops.size(); ++i) {
        Step c;
        c.op = &ops[i];
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
