#include "runtime/plan_communicators.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>
#include <vector>

#include "base/check.h"
#include "graph/catalogue.h"
#include "runtime/program_memory.h"

namespace hotbunk {
namespace {

OpKind kind_of(CommOp op) {
  switch (op) {
    case CommOp::all_gather:
      return OpKind::all_gather;
    case CommOp::reduce_scatter:
      return OpKind::reduce_scatter;
    case CommOp::all_reduce:
      return OpKind::all_reduce;
    case CommOp::broadcast:
      return OpKind::broadcast;
    case CommOp::all_to_all:
      return OpKind::all_to_all;
    case CommOp::send:
      return OpKind::send;
    case CommOp::recv:
      return OpKind::recv;
    case CommOp::send_recv:
      return OpKind::send_recv;
    case CommOp::peer_read:
      return OpKind::peer_copy;
    case CommOp::barrier:
      return OpKind::barrier;
  }
  return OpKind::barrier;
}

/// send, recv and send_recv.
void transfer(Communicator& c, const OpCall& call, std::int64_t padding) {
  const Op& op = call.op;
  const Partners at = partners_of(op, c.size(), c.rank());
  const int to = static_cast<int>(at.to), from = static_cast<int>(at.from);
  const auto address = [&](const Tensor& t) { return call.addresses.address(t); };
  const auto bytes = [&](const Tensor& t) { return t.bytes(call.sizes); };
  if (op.kind == OpKind::send) return c.send(to, address(op.inputs[0]), bytes(op.inputs[0]), padding);
  if (op.kind == OpKind::recv) return c.recv(from, address(op.outputs[0]), bytes(op.outputs[0]));
  c.send_recv(to, address(op.inputs[0]), bytes(op.inputs[0]), from, address(op.outputs[0]), bytes(op.outputs[0]),
              padding);
}

/// What all ranks of a group have said of the rows that they send to one another's experts (graph/catalogue.h).
class SentRows {
 public:
  SentRows(const OpCall& call, const Tensor& sent, const ReadRows& read)
      : ranks_(sent.shape[0].size),
        experts_(sent.shape[1].size - 1),
        offsets_(static_cast<std::size_t>(ranks_ * (experts_ + 1))) {
    const std::size_t bytes = offsets_.size() * sizeof(std::int32_t);
    std::memcpy(offsets_.data(), read(call.addresses.address(sent), static_cast<std::int64_t>(bytes)), bytes);
  }
  std::int64_t ranks() const { return ranks_; }

  /// Of `from`'s rows those for `to`, as they lie there.
  Range at_sender(std::int64_t from, std::int64_t to) const {
    const std::int32_t* const of = &offsets_[static_cast<std::size_t>(from * (experts_ + 1))];
    return {of[to * experts_ / ranks_], of[(to + 1) * experts_ / ranks_]};
  }
  /// The same as they lie among all that come to `to`, whose ranks' follow one another.
  Range at_receiver(std::int64_t from, std::int64_t to) const {
    std::int64_t begin = 0;
    for (std::int64_t r = 0; r < from; ++r) begin += at_sender(r, to).size();
    return {begin, begin + at_sender(from, to).size()};
  }
  std::int64_t most_received() const {
    std::int64_t most = 0;
    for (std::int64_t r = 0; r < ranks_; ++r) most = std::max(most, at_receiver(ranks_ - 1, r).end);
    return most;
  }

 private:
  std::int64_t ranks_, experts_;
  std::vector<std::int32_t> offsets_;
};

/// Rows of experts, to the ranks that have these or back: all of them, or those of the round whose rows `came` has.
void exchange_rows(Communicator& c, const OpCall& call, const ReadRows& read) {
  const Op& op = call.op;
  const Tensor& own = own_tokens_rows(op);
  const bool back = &own != &op.inputs[0];
  const Dim& came = (back ? op.inputs[0] : op.outputs[0]).shape[0];
  const SentRows rows(call, op.inputs[1], read);
  HB_CHECK(rows.ranks() == c.size(), "counts of {} ranks over {}", rows.ranks(), c.size());
  const std::int64_t row_bytes = own.shape[2].size * size_of(own.dtype), me = c.rank();
  std::vector<std::int64_t> sent, received;
  if (!op.has(Attr::rounds)) {
    for (std::int64_t r = 0; r < rows.ranks(); ++r)
      sent.push_back(rows.at_sender(me, r).size() * row_bytes),
          received.push_back(rows.at_sender(r, me).size() * row_bytes);
    if (back) std::swap(sent, received);
    return c.all_to_all_v(call.addresses.address(op.inputs[0]), sent, call.addresses.address(op.outputs[0]), received,
                          back);
  }
  if (rows.most_received() <= came.begin) return c.note_empty_all_to_all();  // all ranks find that
  const auto in_round = [&](const Range& all) {
    return Range{std::clamp(all.begin, came.begin, came.begin + came.size),
                 std::clamp(all.end, came.begin, came.begin + came.size)};
  };
  // A rank's own rows of a round lie where they always do, in as many parts as there are ranks; those that came behind
  // one another.
  std::vector<CommPart> here, there;
  std::int64_t begin = 0;
  for (std::int64_t r = 0; r < rows.ranks(); ++r) {
    const Range at_r = rows.at_receiver(me, r), part = in_round(at_r);
    const std::int64_t first = part.size() > 0 ? rows.at_sender(me, r).begin + part.begin - at_r.begin : 0;
    here.push_back({first * row_bytes, part.size() * row_bytes});
    there.push_back({begin, in_round(rows.at_receiver(r, me)).size() * row_bytes});
    begin += there.back().bytes;
  }
  c.all_to_all_v(call.addresses.address(op.inputs[0]), back ? there : here, call.addresses.address(op.outputs[0]),
                 back ? here : there, back);
}

}  // namespace

bool reads_peers(const Plan& plan) {
  for (const Program& program : plan.programs)
    for (const Body& body : program.bodies)
      for (const Op& op : body.ops)
        if (op.kind == OpKind::peer_copy) return true;
  return false;
}

PlanCommunicators::PlanCommunicators(const Plan& plan, Rank rank, std::int32_t span_steps, const std::string& scope,
                                     const Make& make)
    : plan_(plan),
      rank_(rank),
      traffic_(KeptSteps::of(plan.num_ranks(), span_steps), plan.most_steps_back(plan.role_of(rank))),
      peer_buffers_(plan.programs.size()) {
  std::set<std::pair<GroupId, StreamId>> used;
  for (std::size_t p = 0; p < plan.programs.size(); ++p)
    for (const auto& blocks : plan.programs[p].phases)
      for (const Block& block : blocks)
        each_op(plan.programs[p], block, [&](const BoundOp& op) {
          if (!is_communication(op->kind)) return;
          used.insert({op->group, op->stream});
          if (op->kind == OpKind::peer_copy || op->kind == OpKind::barrier)
            for (const Tensor& t : op->inputs) peer_buffers_[p].emplace(op.buffer(t).buffer->name, op.buffer(t).buffer);
        });
  for (const auto& key : used) {
    const auto& members = plan.group_of(key.first, rank);
    if (members.empty()) continue;
    const std::vector<int> ranks(members.begin(), members.end());
    communicators_[key] = make(ranks,
                               fmt::format("{}{}/{}", scope, plan.groups[static_cast<std::size_t>(key.first)].name,
                                           plan.stream(key.second).name),
                               key.second);
  }
}

Communicator& PlanCommunicators::communicator(const Op& op, std::int16_t phase) {
  const auto it = communicators_.find({op.group, op.stream});
  HB_CHECK(it != communicators_.end(), "rank {} has no communicator of family {}", rank_, op.group);
  it->second->set_tag(phase);
  return *it->second;
}

void PlanCommunicators::collective(const OpCall& call, std::int16_t phase, const ReadRows& read) {
  const auto& [memory, op, sizes, places, bound] = call;
  Communicator& c = communicator(op, phase);
  const std::int64_t padding = op.integer(Attr::padding_bytes, 0);
  switch (op.kind) {
    case OpKind::all_gather:
      return c.all_gather(memory.address(op.inputs[0]), memory.address(op.outputs[0]), op.inputs[0].bytes(sizes),
                          padding);
    case OpKind::reduce_scatter:
      return c.reduce_scatter(memory.address(op.inputs[0]), memory.address(op.outputs[0]),
                              op.outputs[0].elements(sizes), op.inputs[0].dtype, padding);
    case OpKind::all_reduce:
      return c.all_reduce(memory.address(op.inputs[0]), memory.address(op.outputs[0]), op.inputs[0].elements(sizes),
                          op.inputs[0].dtype, op.integer(Attr::reduce_max, 0) != 0 ? ReduceOp::max : ReduceOp::sum,
                          padding);
    case OpKind::broadcast:
      return c.broadcast(memory.address(op.outputs[0]), op.outputs[0].bytes(sizes),
                         static_cast<int>(op.integer(Attr::src_rank, 0)));
    case OpKind::all_to_all: {
      if (is_routed(op)) return exchange_rows(c, call, read);
      const std::int64_t bytes = op.inputs[0].bytes(sizes);
      HB_CHECK(bytes == op.outputs[0].bytes(sizes) && bytes % c.size() == 0, "all_to_all '{}' of {} B to {} B over {}",
               bound.name(), bytes, op.outputs[0].bytes(sizes), c.size());
      return c.all_to_all(memory.address(op.inputs[0]), memory.address(op.outputs[0]), bytes / c.size());
    }
    case OpKind::send:
    case OpKind::recv:
    case OpKind::send_recv:
      return transfer(c, call, padding);
    case OpKind::barrier:
      return c.barrier();
    default:
      HB_CHECK(false, "{} is no collective of this backend", name_of(op.kind));
  }
}

std::int64_t PlanCommunicators::peer_copy(const OpCall& call, std::int16_t phase, const PeerAddress& peer,
                                          const CopyBox& copy) {
  const auto& [memory, op, sizes, places, bound] = call;
  const std::vector<Box> boxes = boxes_of(op, places);
  if (boxes.empty()) return 0;  // nothing of this bucket is this rank's
  Communicator& c = communicator(op, phase);
  const Tensor& source = op.inputs[0];
  const Buffer& mine = *bound.buffer(source).buffer;
  const auto& members = plan_.group_of(op.group, rank_);
  std::int64_t remote = 0;
  for (const Box& b : boxes) {
    const std::byte* from = memory.address(source);
    if (b.peer >= 0) {
      const auto program = static_cast<std::size_t>(
          plan_.program_of_rank[static_cast<std::size_t>(members[static_cast<std::size_t>(b.peer)])]);
      const Buffer* theirs = peer_buffers_[program].at(mine.name);
      const std::int64_t offset =
          section_bases(plan_.programs[program])[static_cast<std::size_t>(theirs->section)] + theirs->offset;
      const std::int64_t skipped = bound.offset_in_buffer(source);
      from = peer(members[static_cast<std::size_t>(b.peer)], offset + skipped, theirs->bytes() - skipped);
      HB_CHECK(from, "no memory of rank {} is open here", members[static_cast<std::size_t>(b.peer)]);
      remote += b.rows * b.cols * size_of(source.dtype);
    }
    copy(from, b);
  }
  c.note_peer_read(remote);
  return remote;
}

void PlanCommunicators::fold_traffic(std::int32_t step) {
  for (const auto& [key, c] : communicators_)
    for (const CommTraffic& row : c->take_traffic())
      traffic_.add({.step = step,
                    .phase = static_cast<std::int16_t>(row.tag),
                    .group = static_cast<std::int16_t>(key.first),
                    .op = kind_of(row.op)},
                   {row.calls, row.payload_bytes, row.padding_bytes, row.wire_bytes});
}

}  // namespace hotbunk
