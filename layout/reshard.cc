#include "layout/reshard.h"

#include <algorithm>
#include <optional>
#include <tuple>

#include "base/check.h"

namespace hotbunk {
namespace {

using Cuts = std::vector<std::int64_t>;  // ascending; cell i is [cuts[i], cuts[i + 1])

std::size_t cell_at(const Cuts& cuts, std::int64_t position) {
  return static_cast<std::size_t>(std::lower_bound(cuts.begin(), cuts.end(), position) - cuts.begin());
}

// The grid of all edges of a tensor's rectangles: inside one of its cells every rank holds all or nothing, and needs
// all or nothing.
class Grid {
 public:
  explicit Grid(const TensorMove& move) {
    for (const RankBoxes* side : {&move.have, &move.need}) {
      for (const std::vector<Rectangle>& boxes : *side) {
        for (const Rectangle& box : boxes) {
          if (box.elements() == 0) continue;
          rows_.insert(rows_.end(), {box.rows.begin, box.rows.end});
          cols_.insert(cols_.end(), {box.cols.begin, box.cols.end});
        }
      }
    }
    for (Cuts* cuts : {&rows_, &cols_}) {
      std::sort(cuts->begin(), cuts->end());
      cuts->erase(std::unique(cuts->begin(), cuts->end()), cuts->end());
    }
  }

  std::size_t num_rows() const { return rows_.empty() ? 0 : rows_.size() - 1; }
  std::size_t num_cols() const { return cols_.empty() ? 0 : cols_.size() - 1; }
  Rectangle cell(std::size_t row, std::size_t col) const {
    return {{rows_[row], rows_[row + 1]}, {cols_[col], cols_[col + 1]}};
  }

  // For each cell, row by row, whether the boxes cover it.
  std::vector<char> covered(const std::vector<Rectangle>& boxes) const {
    std::vector<char> cells(num_rows() * num_cols(), 0);
    for (const Rectangle& box : boxes) {
      if (box.elements() == 0) continue;
      const std::size_t col_begin = cell_at(cols_, box.cols.begin), col_end = cell_at(cols_, box.cols.end);
      for (std::size_t row = cell_at(rows_, box.rows.begin); row < cell_at(rows_, box.rows.end); ++row) {
        for (std::size_t col = col_begin; col < col_end; ++col) cells[row * num_cols() + col] = 1;
      }
    }
    return cells;
  }

 private:
  Cuts rows_, cols_;
};

class Resharder {
 public:
  Resharder(std::size_t ranks, std::int64_t ranks_per_node)
      : ranks_(ranks), ranks_per_node_(ranks_per_node), sent_(ranks, 0), received_(ranks, 0) {}

  TensorTransfers move(const TensorMove& tensor) {
    HB_CHECK(tensor.have.size() == ranks_ && tensor.need.size() == ranks_, "{}: {} ranks have, {} need, of {}",
             tensor.name, tensor.have.size(), tensor.need.size(), ranks_);
    const Grid grid(tensor);
    std::vector<std::vector<char>> have(ranks_), need(ranks_);
    for (std::size_t rank = 0; rank < ranks_; ++rank) {
      have[rank] = grid.covered(tensor.have[rank]);
      need[rank] = grid.covered(tensor.need[rank]);
    }
    TensorTransfers result{tensor.name, {}};
    std::vector<std::vector<std::size_t>> last(ranks_);  // by destination: transfers of the row of cells above
    for (std::size_t row = 0; row < grid.num_rows(); ++row) {
      std::vector<std::vector<Transfer>> strips(ranks_);
      for (std::size_t col = 0; col < grid.num_cols(); ++col) {
        const std::size_t cell = row * grid.num_cols() + col;
        const Rectangle box = grid.cell(row, col);
        for (std::size_t rank = 0; rank < ranks_; ++rank) {
          if (!need[rank][cell] || have[rank][cell]) continue;
          const std::size_t source = source_for(rank, cell, have, tensor.name);
          sent_[source] += box.elements();
          received_[rank] += box.elements();
          extend(strips[rank], {static_cast<std::int64_t>(source), static_cast<std::int64_t>(rank), box});
        }
      }
      for (std::size_t rank = 0; rank < ranks_; ++rank) last[rank] = stack(result.transfers, strips[rank], last[rank]);
    }
    return result;
  }

  /// What all moves so far sent and received, by rank: the last thing asked.
  struct Traffic {
    std::vector<std::int64_t> sent, received;
  };
  Traffic traffic() && { return {std::move(sent_), std::move(received_)}; }

 private:
  std::int64_t node(std::size_t rank) const {
    return ranks_per_node_ > 0 ? static_cast<std::int64_t>(rank) / ranks_per_node_ : 0;
  }

  std::size_t source_for(std::size_t destination, std::size_t cell, const std::vector<std::vector<char>>& have,
                         const std::string& name) const {
    std::optional<std::size_t> best;
    const auto cost = [&](std::size_t rank) { return std::tuple(node(rank) != node(destination), sent_[rank], rank); };
    for (std::size_t rank = 0; rank < ranks_; ++rank) {
      if (have[rank][cell] && (!best || cost(rank) < cost(*best))) best = rank;
    }
    HB_CHECK(best, "rank {} needs a part of {} that no rank holds", destination, name);
    return *best;
  }

  // Cells side by side from one source become one rectangle …
  static void extend(std::vector<Transfer>& strip, const Transfer& next) {
    if (!strip.empty() && strip.back().source == next.source && strip.back().box.cols.end == next.box.cols.begin) {
      strip.back().box.cols.end = next.box.cols.end;
    } else {
      strip.push_back(next);
    }
  }

  // … and such strips of equal width below one another one more. Returns the indices of this row's transfers.
  static std::vector<std::size_t> stack(std::vector<Transfer>& all, const std::vector<Transfer>& strip,
                                        const std::vector<std::size_t>& above) {
    std::vector<std::size_t> indices;
    for (const Transfer& next : strip) {
      const auto grows = std::find_if(above.begin(), above.end(), [&](std::size_t i) {
        return all[i].source == next.source && all[i].box.cols == next.box.cols &&
               all[i].box.rows.end == next.box.rows.begin;
      });
      if (grows != above.end()) {
        all[*grows].box.rows.end = next.box.rows.end;
        indices.push_back(*grows);
      } else {
        indices.push_back(all.size());
        all.push_back(next);
      }
    }
    return indices;
  }

  std::size_t ranks_;
  std::int64_t ranks_per_node_;
  std::vector<std::int64_t> sent_, received_;
};

}  // namespace

Reshard reshard(std::span<const TensorMove> moves, std::int64_t ranks_per_node) {
  Resharder resharder(moves.empty() ? 0 : moves.front().have.size(), ranks_per_node);
  Reshard result;
  for (const TensorMove& move : moves) result.tensors.push_back(resharder.move(move));
  auto [sent, received] = std::move(resharder).traffic();
  result.sent = std::move(sent);
  result.received = std::move(received);
  return result;
}

Piece cut(const Piece& piece, const Rectangle& box) {
  HB_CHECK(piece.row_begin <= box.rows.begin && box.rows.end <= piece.row_end && piece.col_begin <= box.cols.begin &&
               box.cols.end <= piece.col_end,
           "rectangle outside its piece");
  const std::int64_t offset =
      piece.offset + (box.rows.begin - piece.row_begin) * piece.pitch + (box.cols.begin - piece.col_begin);
  return {box.rows.begin, box.rows.end, box.cols.begin, box.cols.end, offset, piece.pitch};
}

}  // namespace hotbunk
