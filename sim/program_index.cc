#include "sim/program_index.h"

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <span>
#include <utility>

#include "base/check.h"

namespace hotbunk {
namespace {

DependsOn depends_on(const Op& op) {
  if (op.is_priced())
    return op.prices.size() > 1 || op.prices[0].seconds_per_pair > 0 ? DependsOn::pairs : DependsOn::nothing;
  if (op.kind == OpKind::attention || op.kind == OpKind::attention_backward || op.kind == OpKind::context_attention ||
      op.kind == OpKind::context_attention_backward || op.kind == OpKind::paged_attention ||
      op.kind == OpKind::latent_attention)
    return DependsOn::pairs;
  const auto varies = [](const Tensor& t) {
    return std::any_of(t.shape.begin(), t.shape.begin() + t.rank,
                       [](const Dim& d) { return d.extent != fixed_extent; });
  };
  // They move as many rows as there are tokens, whatever their pool's shape.
  if (op.kind == OpKind::kv_write || op.kind == OpKind::latent_write ||
      std::any_of(op.inputs.begin(), op.inputs.end(), varies) ||
      std::any_of(op.outputs.begin(), op.outputs.end(), varies))
    return DependsOn::shapes;
  return DependsOn::nothing;
}

/// What stays an item of its own: what meets others, and what maps.
bool stands_alone(const Op& op) { return is_communication(op.kind) || is_memory(op.kind); }

}  // namespace

/// Cuts calls into items. Segments of the same ops are one, in whatever calls they are.
class ProgramIndex::Cut {
 public:
  Cut(const Plan& plan, ProgramIndex& index) : plan_(plan), index_(index) {}

  void call(const Block& block, std::int32_t block_number, std::uint32_t call_number, std::vector<BlockItem>& items) {
    const Call& call = block.calls[call_number];
    std::array<std::int32_t, max_streams> open;  // what a stream's next op may join: an index into pieces_
    open.fill(-1);
    pieces_.clear();
    constexpr StreamId none{max_streams};
    StreamId first = none, last = none;
    const std::size_t begin = items.size();
    const auto op_of = [&](const BoundOp& op) {
      const auto stream = static_cast<std::size_t>(op->stream);
      if (first == none) first = op->stream;
      last = op->stream;
      if (op->kind == OpKind::alloc || op->kind == OpKind::free) return;
      const auto number = static_cast<std::int32_t>(op.op - op.body().ops.data());
      const Occupies occupies = occupies_of(plan_, *op);
      const bool alone = stands_alone(*op);
      if (!alone && open[stream] >= 0 && pieces_[static_cast<std::size_t>(open[stream])].occupies == occupies) {
        pieces_[static_cast<std::size_t>(open[stream])].ops.push_back(number);
        return;
      }
      open[stream] = alone ? -1 : static_cast<std::int32_t>(pieces_.size());
      items.push_back({BlockItem::Kind::op, op->stream, static_cast<std::uint32_t>(pieces_.size())});
      pieces_.push_back({op, occupies, {number}});
    };
    const auto mark_of = [&](const Mark& m) {
      open[static_cast<std::size_t>(m.stream)] = -1;
      items.push_back({m.kind == OpKind::record ? BlockItem::Kind::record : BlockItem::Kind::wait, m.stream,
                       static_cast<std::uint32_t>(m.event)});
    };
    each_step(*index_.program_, block, call, op_of, mark_of);
    const std::uint32_t numbered = index_.size();
    for (std::size_t i = begin; i < items.size(); ++i)
      if (items[i].kind == BlockItem::Kind::op) items[i].number += numbered;
    for (const Piece& piece : pieces_) {
      const std::int32_t segment = segment_of(call.body, piece.ops);
      index_.ops_.push_back({piece.first, piece.occupies,
                             index_.segments_[static_cast<std::size_t>(segment)].depends_on, block_number, segment});
    }
    if (first == none) return;
    items.insert(items.begin() + static_cast<std::ptrdiff_t>(begin),
                 {BlockItem::Kind::call_begins, first, call_number});
    items.push_back({BlockItem::Kind::call_ends, last, call_number});
  }

  /// The items of a block with its chains.
  std::vector<BlockItem> chained(const std::vector<BlockItem>& items, std::int32_t block_number) {
    std::vector<BlockItem> out;
    const bool one_stream = kernels_on_one_stream(items);
    for (std::size_t i = 0; i < items.size();) {
      const std::size_t end = one_stream ? end_of_chain(items, i) : i;
      if (items[i].kind != BlockItem::Kind::call_begins && items[i].kind != BlockItem::Kind::call_ends)
        out.push_back(end > i ? chain_of(std::span(items).subspan(i, end - i), block_number) : items[i]);
      i = std::max(end, i + 1);
    }
    return out;
  }

 private:
  const OpInfo& info(const BlockItem& item) const { return index_[item.number]; }
  static bool marks_call(const BlockItem& item) {
    return item.kind == BlockItem::Kind::call_begins || item.kind == BlockItem::Kind::call_ends;
  }

  bool kernels_on_one_stream(const std::vector<BlockItem>& items) const {
    std::optional<StreamId> stream;
    for (const BlockItem& item : items) {
      if (item.kind != BlockItem::Kind::op || info(item).occupies != Occupies::device) continue;
      if (stream && *stream != item.stream) return false;
      stream = item.stream;
    }
    return true;
  }

  /// Behind the last collective of a chain that begins at `begin`; `begin`: none does.
  std::size_t end_of_chain(const std::vector<BlockItem>& items, std::size_t begin) const {
    const auto meets = [&](const BlockItem& item) {
      return item.kind == BlockItem::Kind::op && info(item).occupies == Occupies::meeting;
    };
    if (!meets(items[begin])) return begin;
    const auto alike = [&](const BlockItem& item) {
      if (marks_call(item)) return true;
      if (item.kind != BlockItem::Kind::op || item.stream != items[begin].stream) return false;
      if (meets(item)) return info(item).op->group == info(items[begin]).op->group;
      return info(item).occupies == Occupies::device;
    };
    std::size_t end = begin, met = 0;
    for (std::size_t i = begin; i < items.size() && alike(items[i]); ++i)
      if (meets(items[i])) end = i + 1, ++met;
    return met > 1 ? end : begin;
  }

  BlockItem chain_of(std::span<const BlockItem> items, std::int32_t block_number) {
    Chain chain;
    std::map<std::int32_t, std::size_t> known;  // by segment
    for (const BlockItem& item : items) {
      if (marks_call(item)) continue;
      const auto [at, is_new] = known.try_emplace(info(item).segment, chain.links.size());
      if (is_new) chain.links.push_back({item.number, 0});
      ++chain.links[at->second].times;
    }
    OpInfo all = info(items.front());
    all.block = block_number, all.segment = -1, all.chain = static_cast<std::int32_t>(index_.chains_.size());
    index_.chains_.push_back(std::move(chain));
    index_.ops_.push_back(all);
    return {BlockItem::Kind::op, items.front().stream, index_.size() - 1};
  }

  struct Piece {
    BoundOp first;
    Occupies occupies;
    std::vector<std::int32_t> ops;
  };

  std::int32_t segment_of(std::int32_t body, const std::vector<std::int32_t>& ops) {
    const auto [at, is_new] = known_.try_emplace({body, ops}, static_cast<std::int32_t>(known_.size()));
    if (!is_new) return at->second;
    const std::vector<Op>& all = index_.program_->bodies[static_cast<std::size_t>(body)].ops;
    Segment segment{body, ops, DependsOn::nothing};
    for (const std::int32_t i : ops)
      segment.depends_on = std::max(segment.depends_on, depends_on(all[static_cast<std::size_t>(i)]));
    index_.segments_.push_back(std::move(segment));
    return at->second;
  }

  const Plan& plan_;
  ProgramIndex& index_;
  std::vector<Piece> pieces_;  // of the call at hand
  std::map<std::pair<std::int32_t, std::vector<std::int32_t>>, std::int32_t> known_;
};

ProgramIndex::ProgramIndex(const Plan& plan, const Program& program, Granularity granularity)
    : program_(&program), granularity_(granularity) {
  Cut cut(plan, *this);
  for (const auto& blocks : program.phases) {
    auto& first = first_.emplace_back();
    auto& items = items_.emplace_back();
    auto& chained = chained_.emplace_back();
    auto& counts = num_ops_.emplace_back();
    for (std::size_t b = 0; b < blocks.size(); ++b) {
      auto& of_block = first.emplace_back();
      auto& enqueued = items.emplace_back();
      const std::uint32_t before = size();
      for (std::size_t c = 0; c < blocks[b].calls.size(); ++c) {
        if (granularity == Granularity::calls) {
          cut.call(blocks[b], static_cast<std::int32_t>(b), static_cast<std::uint32_t>(c), enqueued);
          continue;
        }
        of_block.push_back(size());
        each_step(
            program, blocks[b], blocks[b].calls[c],
            [&](const BoundOp& op) {
              ops_.push_back({op, occupies_of(plan, *op), depends_on(*op), static_cast<std::int32_t>(b)});
            },
            [](const Mark&) {});
      }
      counts.push_back(std::count_if(ops_.begin() + before, ops_.end(), [](const OpInfo& item) {
        return item.op->kind != OpKind::alloc && item.op->kind != OpKind::free;
      }));
      chained.push_back(cut.chained(enqueued, static_cast<std::int32_t>(b)));
    }
  }
}

ProgramIndex::Place ProgramIndex::find_call(const BoundOp& op, std::int16_t phase) const {
  const auto p = static_cast<std::size_t>(phase);
  HB_CHECK(granularity_ == Granularity::ops, "{} '{}' by itself, where calls are played", name_of(op->kind), op.name());
  HB_CHECK(phase >= 0 && p < first_.size(), "phase {} of {}", phase, first_.size());
  const auto block = static_cast<std::size_t>(op.block - program_->phases[p].data());
  HB_CHECK(op.program == program_ && block < first_[p].size(), "{} '{}' is no op of phase {} of this plan",
           name_of(op->kind), op.name(), phase);
  const auto call = static_cast<std::size_t>(op.call - op.block->calls.data());
  return {first_[p][block].at(call), static_cast<std::int32_t>(block)};
}

}  // namespace hotbunk
