#include "graph/boxes.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "base/check.h"
#include "graph/written.h"

namespace hotbunk {
namespace {

/// One part of a side: a rectangle and where it lies.
struct PlacedPart {
  Range rows, cols;
  std::int64_t offset = 0, pitch = 0;
  std::int32_t place = 0;
};

Range common(const Range& a, const Range& b) { return {std::max(a.begin, b.begin), std::min(a.end, b.end)}; }

/// The member that has part h of piece w, of a group of all of them.
std::int64_t member_of(const Parts& parts, std::int64_t h, std::int64_t w) {
  const Within& in = parts.within;
  return in.family < 0 ? h : (h * in.count + w) * in.repeat;
}

/// Part h of piece w.
PlacedPart part(const Side& side, std::int64_t h, std::int64_t w) {
  const Piece& p = side.piece;
  const Parts& parts = side.parts;
  const Within& in = parts.within;
  const std::int64_t down = h * parts.rows, below = w * in.rows, right = h * parts.cols + w * in.cols;
  const std::int64_t last = in.family < 0 ? parts.last_row : std::min(parts.last_row + below, in.last_row);
  const std::int64_t member = member_of(parts, h, w);
  return {.rows = {p.row_begin + down + below, std::min(p.row_end + down + below, last)},
          .cols = {p.col_begin + right, p.col_end + right},
          .offset = p.offset + member * parts.pitch,
          .pitch = p.pitch,
          .place = static_cast<std::int32_t>(member)};
}

/// The elements of a run's part h that piece w has, counted from its first: of the last piece those in front of the
/// tensor's end.
Range elements_of(const Side& side, std::int64_t h, std::int64_t w) {
  const Run& run = side.parts.run;
  const Piece& p = side.piece;
  const Within& in = side.parts.within;
  std::int64_t last = p.row_end;
  if (in.family >= 0) last = std::clamp(in.last_row - w * in.rows, p.row_begin, p.row_end);
  const std::int64_t first = run.begin + h * run.step, begin = std::max<std::int64_t>(first, 0);
  return {begin, std::max(begin, std::min(first + run.elements, (last - p.row_begin) * (p.col_end - p.col_begin)))};
}

template <class F>
void each_rectangle_of_run(const Side& side, std::int64_t h, std::int64_t w, F&& f) {
  const Piece& p = side.piece;
  const std::int64_t cols = p.col_end - p.col_begin, member = member_of(side.parts, h, w),
                     base = p.offset + member * side.parts.pitch - side.parts.run.begin - h * side.parts.run.step,
                     below = p.row_begin + w * side.parts.within.rows,
                     beside = p.col_begin + w * side.parts.within.cols;
  each_rectangle(elements_of(side, h, w), cols, [&](const Range& rows, const Range& columns, std::int64_t first) {
    f(PlacedPart{.rows = {below + rows.begin, below + rows.end},
                 .cols = {beside + columns.begin, beside + columns.end},
                 .offset = base + first,
                 .pitch = cols,
                 .place = static_cast<std::int32_t>(member)});
  });
}

PlacedPart whole(const Piece& p) { return {{p.row_begin, p.row_end}, {p.col_begin, p.col_end}, p.offset, p.pitch, 0}; }

std::int32_t place_in(GroupId family, const Places& places) {
  HB_CHECK(family >= 0 && static_cast<std::size_t>(family) < places.size(), "family {} of {}", family, places.size());
  return places[static_cast<std::size_t>(family)];
}

/// This rank's part, where it has one.
std::optional<PlacedPart> own_part(const Side& side, const Places& places) {
  const Within& in = side.parts.within;
  const std::int32_t h = place_in(side.parts.family, places), w = in.family < 0 ? 0 : place_in(in.family, places);
  if (h < 0 || w < 0) return std::nullopt;
  return part(side, h / side.parts.repeat, w / in.repeat);
}

/// Those of a run that may have an element of the wanted rows.
Range runs_near(const Side& side, const Range& wanted) {
  const Run& run = side.parts.run;
  const std::int64_t cols = side.piece.col_end - side.piece.col_begin;
  const std::int64_t begin = (wanted.begin - side.piece.row_begin) * cols - run.begin,
                     end = (wanted.end - side.piece.row_begin) * cols - run.begin;
  if (end <= 0) return {0, 0};
  const std::int64_t first = std::clamp<std::int64_t>((begin - run.elements) / run.step, 0, side.parts.count);
  return {first, std::clamp<std::int64_t>(end / run.step + 1, first, side.parts.count)};
}

/// Whether a rank has one rectangle of the side at most.
bool is_single(const Side& side) {
  return side.parts.run.elements == 0 && (side.parts.who == Holds::whole || side.parts.who == Holds::mine);
}

/// The one rectangle of such a side, where this rank has it.
std::optional<PlacedPart> single_part(const Side& side, const Places& places) {
  return side.parts.who == Holds::whole ? whole(side.piece) : own_part(side, places);
}

std::int64_t common_elements(const PlacedPart& a, const PlacedPart& b) {
  const Range rows = common(a.rows, b.rows), cols = common(a.cols, b.cols);
  return rows.size() > 0 && cols.size() > 0 ? rows.size() * cols.size() : 0;
}

/// The parts in order of which some may have a row of `wanted`, counted from where their piece begins.
Range parts_near(const Side& side, const Range& wanted) {
  const Parts& parts = side.parts;
  if (parts.run.elements > 0) return runs_near(side, wanted);
  Range near{0, parts.count};
  if (parts.rows <= 0) return near;
  const Piece& p = side.piece;
  near.begin = std::clamp<std::int64_t>((wanted.begin - p.row_end) / parts.rows, 0, parts.count);
  if (wanted.end <= p.row_begin) return {0, 0};
  near.end = std::clamp<std::int64_t>((wanted.end - p.row_begin) / parts.rows + 1, near.begin, parts.count);
  return near;
}

template <class F>
void each_part(const Side& side, const Places& places, const Range& wanted, F&& f) {
  switch (side.parts.who) {
    case Holds::whole:
      return f(whole(side.piece));
    case Holds::mine:
      if (side.parts.run.elements > 0) {
        const Within& in = side.parts.within;
        const std::int32_t h = place_in(side.parts.family, places), w = in.family < 0 ? 0 : place_in(in.family, places);
        if (h >= 0 && w >= 0) each_rectangle_of_run(side, h / side.parts.repeat, w / in.repeat, f);
      } else if (const std::optional<PlacedPart> own = own_part(side, places)) {
        f(*own);
      }
      return;
    case Holds::every:
    case Holds::peers:
      for (std::int64_t w = 0; w < side.parts.within.count; ++w) {
        const std::int64_t below = w * side.parts.within.rows;
        const Range near = parts_near(side, {wanted.begin - below, wanted.end - below});
        for (std::int64_t h = near.begin; h < near.end; ++h) {
          if (side.parts.run.elements > 0) each_rectangle_of_run(side, h, w, f);
          else f(part(side, h, w));
        }
      }
  }
}

/// The rows that a side has on the rank, or around all its parts.
Range rows_around(const Side& side, const Places& places) {
  const Parts& parts = side.parts;
  if (parts.who == Holds::whole || (parts.run.elements > 0 && parts.within.family < 0))
    return {side.piece.row_begin, side.piece.row_end};
  if (parts.run.elements > 0) {  // of this rank's piece, or of all of them
    const bool one = parts.who == Holds::mine;
    const std::int64_t w = one ? place_in(parts.within.family, places) / parts.within.repeat : 0,
                       last = one ? w : parts.within.count - 1;
    return {side.piece.row_begin + w * parts.within.rows, side.piece.row_end + last * parts.within.rows};
  }
  if (parts.who == Holds::mine) {
    const std::optional<PlacedPart> own = own_part(side, places);
    return own ? own->rows : Range{};
  }
  return {side.piece.row_begin, part(side, parts.count - 1, parts.within.count - 1).rows.end};
}

std::int64_t at(const PlacedPart& p, const Range& rows, const Range& cols) {
  return p.offset + (rows.begin - p.rows.begin) * p.pitch + cols.begin - p.cols.begin;
}

/// Calls f(from part, to part, rows, cols) for what the two sides have in common.
template <class F>
void each_meeting(const Move& move, const Places& places, F&& f) {
  const Range around = common(rows_around(move.from, places), rows_around(move.to, places));
  if (around.size() <= 0) return;
  each_part(move.from, places, around, [&](const PlacedPart& from) {
    each_part(move.to, places, common(from.rows, around), [&](const PlacedPart& to) {
      const Range rows = common(from.rows, to.rows), cols = common(from.cols, to.cols);
      if (rows.size() > 0 && cols.size() > 0) f(from, to, rows, cols);
    });
  });
}

/// Whether all parts are there, rectangles without a gap between them.
bool are_rows_joined(const Side& side) {
  const Parts& parts = side.parts;
  return (parts.who == Holds::every || parts.who == Holds::peers) && parts.run.elements == 0 && parts.cols == 0 &&
         parts.rows == side.piece.row_end - side.piece.row_begin;
}

/// What the parts of piece w make then: one rectangle.
PlacedPart joined_piece(const Side& side, std::int64_t w) {
  PlacedPart out = part(side, 0, w);
  const PlacedPart last = part(side, side.parts.count - 1, w);
  out.rows.end = std::max(out.rows.end, last.rows.end);
  return out;
}

/// Of parts without a gap between them in the tensor, where it does not matter whose they are: the one that they make.
Side joined(const Side& side) {
  const Parts& parts = side.parts;
  const bool shards = parts.who == Holds::every || parts.who == Holds::peers;
  if (const Run& run = parts.run; shards && run.elements > 0) {
    if (parts.within.family >= 0) return side;
    Side out = side;
    if (run.elements == run.step && run.begin <= 0 && run.begin + parts.count * run.step >= side.piece.elements())
      out.parts = {};
    return out;
  }
  if (parts.within.family >= 0 || !are_rows_joined(side)) return side;
  Side out = side;
  out.piece.row_end = std::min(side.piece.row_begin + parts.count * parts.rows, parts.last_row);
  out.parts = {};
  return out;
}

/// Parts of the same columns, none of which shares a row with another.
bool are_rows_apart(const Side& side) {
  const Parts& parts = side.parts;
  return (parts.who == Holds::every || parts.who == Holds::peers) && parts.within.family < 0 && parts.cols == 0 &&
         parts.run.elements == 0 && parts.rows > 0 && parts.rows >= side.piece.row_end - side.piece.row_begin;
}

/// Rows that such parts have in a range, all together.
std::int64_t rows_within(const Side& side, const Range& range) {
  const Piece& p = side.piece;
  const Parts& parts = side.parts;
  const std::int64_t each = p.row_end - p.row_begin;
  const auto before = [&](std::int64_t row) {
    const std::int64_t above = std::min(row, parts.last_row) - p.row_begin;
    if (above <= 0) return std::int64_t{0};
    const std::int64_t done = std::min<std::int64_t>(above / parts.rows, parts.count);
    return done * each + (done < parts.count ? std::min(above - done * parts.rows, each) : 0);
  };
  return std::max<std::int64_t>(0, before(range.end) - before(range.begin));
}

/// "" or where one side of a move lies outside of its tensor. Part 0 has the most rows; of parts in one tensor the last
/// that has any ends last, or the one before it, which is whole.
std::string check_side(const Side& side, const std::vector<Tensor>& tensors, bool in_plan, std::size_t num_families) {
  const Parts& parts = side.parts;
  const Piece& p = side.piece;
  if (p.row_begin < 0 || p.row_end < p.row_begin || p.col_begin < 0 || p.col_end < p.col_begin || p.offset < 0 ||
      p.pitch < 0)
    return "a piece of no rectangle";
  const Within& in = parts.within;
  if (parts.count < 1 || parts.repeat < 1 || parts.rows < 0 || parts.cols < 0 || parts.pitch < 0 ||
      parts.last_row < 0 || in.count < 1 || in.repeat < 1 || in.rows < 0 || in.cols < 0 || in.last_row < 0)
    return "no parts";
  const Run& run = parts.run;
  if (run.elements < 0 || (run.elements > 0 && (parts.who == Holds::whole || run.step < 1 || parts.rows != 0 ||
                                                parts.cols != 0 || p.col_end == p.col_begin)))
    return "no runs";
  if (in.family >= static_cast<GroupId>(num_families)) return fmt::format("pieces over family {}", in.family);
  const bool by_place = parts.who == Holds::mine || parts.who == Holds::peers;
  if (parts.who != Holds::whole &&
      ((by_place && parts.family < 0) || parts.family >= static_cast<GroupId>(num_families)))
    return fmt::format("parts over family {}", parts.family);
  if (!in_plan) return "";
  if (side.tensor < 0 || static_cast<std::size_t>(side.tensor) >= tensors.size()) return "no tensor";
  const std::int64_t elements = tensors[static_cast<std::size_t>(side.tensor)].capacity();
  const auto inside = [&](const PlacedPart& one) {
    if (one.rows.size() <= 0 || one.cols.size() <= 0) return true;
    return one.offset + (one.rows.size() - 1) * one.pitch + one.cols.size() <= elements;
  };
  if (run.elements > 0) {
    const std::int64_t last =
        parts.who == Holds::every ? member_of(parts, parts.count - 1, in.count - 1) * parts.pitch : 0;
    return p.offset + last + run.elements <= elements ? "" : fmt::format("what is outside of tensor {}", side.tensor);
  }
  bool good = inside(parts.who == Holds::whole ? whole(p) : part(side, 0, 0));
  if (parts.who == Holds::every && good)
    for (std::int64_t w = 0; w < parts.within.count; ++w) {
      std::int64_t last = parts.count - 1;
      if (parts.rows > 0)
        last = std::clamp<std::int64_t>((parts.last_row - 1 - p.row_begin) / parts.rows, 0, parts.count - 1);
      good = good && inside(part(side, last, w)) && inside(part(side, std::max<std::int64_t>(last - 1, 0), w));
    }
  return good ? "" : fmt::format("what is outside of tensor {}", side.tensor);
}

bool reads_plan(OpKind k) { return k != OpKind::feed; }
bool writes_plan(OpKind k) { return k != OpKind::fetch && k != OpKind::hash_boxes; }

}  // namespace

std::string_view name_of(Holds h) {
  return h == Holds::whole ? "whole" : h == Holds::mine ? "mine" : h == Holds::every ? "every" : "peers";
}

Places places_of(const Plan& plan, Rank rank) {
  Places places;
  for (const GroupFamily& family : plan.groups) {
    std::int32_t place = -1;
    for (const auto& members : family.groups)
      if (const auto found = std::ranges::find(members, rank); found != members.end()) {
        place = static_cast<std::int32_t>(found - members.begin());
        break;
      }
    places.push_back(place);
  }
  return places;
}

std::vector<Places> all_places(const Plan& plan) {
  std::vector<Places> all(static_cast<std::size_t>(plan.num_ranks()), Places(plan.groups.size(), -1));
  for (std::size_t f = 0; f < plan.groups.size(); ++f)
    for (const auto& members : plan.groups[f].groups)
      for (std::size_t place = 0; place < members.size(); ++place)
        all[static_cast<std::size_t>(members[place])][f] = static_cast<std::int32_t>(place);
  return all;
}

std::vector<Box> boxes_of(const Op& op, const Places& places) {
  std::vector<Box> out;
  for (const Move& move : op.moves)
    each_meeting(move, places, [&](const PlacedPart& from, const PlacedPart& to, const Range& rows, const Range& cols) {
      Box box{.src_offset = at(from, rows, cols),
              .src_pitch = from.pitch,
              .dst_offset = at(to, rows, cols),
              .dst_pitch = to.pitch,
              .rows = rows.size(),
              .cols = cols.size(),
              .peer = -1,
              .input = move.from.tensor,
              .output = move.to.tensor};
      if (move.from.parts.who == Holds::peers && from.place != place_in(move.from.parts.family, places))
        box.peer = from.place;
      if (from.pitch == box.cols && to.pitch == box.cols)
        box.cols *= box.rows, box.src_pitch = box.dst_pitch = box.cols, box.rows = 1;
      out.push_back(box);
    });
  return out;
}

MovedElements moved_elements(const Move& move, const Places& places) {
  const Side to = joined(move.to);
  // The only rectangle on the other side, as of most moves.
  const std::optional<PlacedPart> only = is_single(to) ? single_part(to, places) : std::nullopt;
  const auto one = [](const Side& side) { return side.parts.who == Holds::whole || side.parts.who == Holds::mine; };
  const auto count = [&](const Side& from) {
    if (is_single(from) && is_single(to)) {
      const std::optional<PlacedPart> own = only ? single_part(from, places) : std::nullopt;
      return own ? common_elements(*own, *only) : std::int64_t{0};
    }
    std::int64_t elements = 0;
    if (is_single(to) && from.parts.within.family >= 0 && are_rows_joined(from)) {
      for (std::int64_t w = 0; only && w < from.parts.within.count; ++w)
        elements += common_elements(joined_piece(from, w), *only);
      return elements;
    }
    // Of many parts and one: in one look, however many there are.
    const Side* const many = are_rows_apart(from) && one(to) ? &from : are_rows_apart(to) && one(from) ? &to : nullptr;
    if (many) {
      each_part(many == &from ? to : from, places, rows_around(*many, places), [&](const PlacedPart& single) {
        const Range cols = common({many->piece.col_begin, many->piece.col_end}, single.cols);
        if (single.rows.size() > 0 && cols.size() > 0) elements += rows_within(*many, single.rows) * cols.size();
      });
      return elements;
    }
    each_meeting({from, to}, places, [&](const PlacedPart&, const PlacedPart&, const Range& rows, const Range& cols) {
      elements += rows.size() * cols.size();
    });
    return elements;
  };
  MovedElements out{.all = count(joined(move.from)), .of_peers = 0};
  if (move.from.parts.who != Holds::peers) return out;
  const std::int32_t place = place_in(move.from.parts.family, places);
  if (move.from.parts.within.family < 0) {
    const bool has_part = place >= 0 && place < move.from.parts.count;
    if (move.from.parts.run.elements == 0 && is_single(to)) {
      if (has_part && only) out.of_peers = out.all - common_elements(part(move.from, place, 0), *only);
      else out.of_peers = out.all;
      return out;
    }
    Side own = move.from;
    own.parts.who = Holds::mine, own.parts.repeat = 1;
    out.of_peers = out.all - (has_part ? count(own) : 0);
    return out;
  }
  // Its own part is the one that lies at its place.
  out.of_peers = out.all;
  if (move.from.parts.run.elements == 0 && is_single(to)) {
    const Within& in = move.from.parts.within;
    const std::int64_t own = place / in.repeat, h = own / in.count;
    if (only && place >= 0 && place % in.repeat == 0 && h < move.from.parts.count)
      out.of_peers -= common_elements(part(move.from, h, own % in.count), *only);
    return out;
  }
  each_meeting({move.from, to}, places,
               [&](const PlacedPart& from, const PlacedPart&, const Range& rows, const Range& cols) {
                 if (from.place == place) out.of_peers -= rows.size() * cols.size();
               });
  return out;
}

std::vector<Box> written_boxes(const Op& op, const Places& places) {
  std::vector<Box> out;
  for (const Move& move : op.moves)
    each_meeting({joined(move.from), move.to}, places,
                 [&](const PlacedPart&, const PlacedPart& to, const Range& rows, const Range& cols) {
                   out.push_back({.dst_offset = at(to, rows, cols),
                                  .dst_pitch = to.pitch,
                                  .rows = rows.size(),
                                  .cols = cols.size(),
                                  .output = move.to.tensor});
                 });
  return out;
}

namespace {

/// One of each place that ranks of the program have in a family in which it broadcasts.
std::vector<Places> broadcasters_of(const Plan& plan, const Program& program) {
  std::set<std::size_t> families;
  for (const Body& body : program.bodies)
    for (const Op& op : body.ops)
      if (op.kind == OpKind::broadcast && op.group >= 0) families.insert(static_cast<std::size_t>(op.group));
  std::vector<Places> out = {Places(plan.groups.size(), 0)};
  if (families.empty()) return out;
  const std::vector<Places> all = all_places(plan);
  std::set<std::vector<std::int32_t>> seen;
  for (Rank r = 0; r < plan.num_ranks(); ++r) {
    if (&plan.program(r) != &program) continue;
    const Places& places = all[static_cast<std::size_t>(r)];
    std::vector<std::int32_t> there;
    for (const std::size_t f : families) there.push_back(places[f]);
    seen.insert(there);
  }
  out.clear();
  for (const std::vector<std::int32_t>& there : seen) {
    Places& places = out.emplace_back(Places(plan.groups.size(), 0));
    for (auto place = there.begin(); const std::size_t f : families) places[f] = *place++;
  }
  return out;
}

}  // namespace

std::vector<Places> writers_of(const Plan& plan, const Program& program) {
  const std::size_t families = plan.groups.size();
  std::vector<Places> out = broadcasters_of(plan, program);
  std::vector<std::vector<const Side*>> sides(families);  // that are written at the rank's place
  for (const Body& body : program.bodies)
    for (const Op& op : body.ops)
      for (const Move& move : op.moves)
        if (WrittenBytes::writes_boxes(op.kind) && move.to.parts.who == Holds::mine)
          for (GroupId family : {move.to.parts.family, move.to.parts.within.family})
            if (family >= 0) sides[static_cast<std::size_t>(family)].push_back(&move.to);
  for (std::size_t f = 0; f < families; ++f) {
    if (sides[f].empty() || plan.groups[f].groups.empty()) continue;
    std::map<std::vector<std::int64_t>, std::int32_t> kinds;  // rows that each side writes, and the first who does
    for (std::size_t place = 0; place < plan.groups[f].groups.front().size(); ++place) {
      std::vector<std::int64_t> rows;
      const auto at = static_cast<std::int32_t>(place);
      const auto add = [&](const Side& side, std::int64_t h, std::int64_t w) {
        if (side.parts.run.elements > 0) {
          const Range has = elements_of(side, h, w);
          const std::int64_t first = side.parts.run.begin + h * side.parts.run.step;
          return rows.insert(rows.end(), {has.begin - first, has.size()}), void();
        }
        rows.push_back(std::max<std::int64_t>(part(side, h, w).rows.size(), 0));
      };
      for (const Side* side : sides[f]) {
        const Parts& parts = side->parts;
        if (parts.family == static_cast<GroupId>(f))
          for (std::int64_t w = 0; w < parts.within.count; ++w) add(*side, at / parts.repeat, w);
        else
          for (std::int64_t h = 0; h < parts.count; ++h) add(*side, h, at / parts.within.repeat);
      }
      kinds.emplace(std::move(rows), at);
    }
    std::vector<Places> with;
    for (const Places& places : out)
      for (const auto& [rows, place] : kinds) with.push_back(places), with.back()[f] = place;
    out = std::move(with);
  }
  return out;
}

std::string check_moves(const Op& op, std::size_t num_families) {
  for (std::size_t i = 0; i < op.moves.size(); ++i) {
    const Move& move = op.moves[i];
    // A box names its peer by the place in the op's group.
    const bool peers = move.from.parts.who == Holds::peers;
    if (move.to.parts.who == Holds::peers || (peers && op.kind != OpKind::peer_copy))
      return fmt::format("takes peers' memory for its own with move {}", i);
    if (peers && move.from.parts.family != op.group)
      return fmt::format("reads peers of family {} with move {}, over group {}", move.from.parts.family, i, op.group);
    if (const std::string bad = check_side(move.from, op.inputs, reads_plan(op.kind), num_families); !bad.empty())
      return fmt::format("reads {} with move {}", bad, i);
    if (const std::string bad = check_side(move.to, op.outputs, writes_plan(op.kind), num_families); !bad.empty())
      return fmt::format("writes {} with move {}", bad, i);
  }
  return "";
}

}  // namespace hotbunk
