#include "graph/boxes.h"

#include <rapidcheck.h>

#include <catch2/catch.hpp>
#include <set>
#include <tuple>

#include "programs.h"

using namespace hotbunk;
using namespace hotbunk::test;

namespace {

/// Where one element of the logical tensor lies on one side.
struct At {
  std::int64_t row, col, element;
  int part;
};

/// The obvious version: every element of every part that the rank with these places sees.
std::vector<At> elements_of(const Side& s, const Places& places) {
  const Parts& parts = s.parts;
  const Within& in = parts.within;
  std::vector<At> out;
  const bool cut = parts.who != Holds::whole, inside = cut && in.family >= 0;
  for (int h = 0; h < (cut ? parts.count : 1); ++h)
    for (int w = 0; w < (inside ? in.count : 1); ++w) {
      if (parts.who == Holds::mine && h != places[static_cast<std::size_t>(parts.family)] / parts.repeat) continue;
      if (parts.who == Holds::mine && inside && w != places[static_cast<std::size_t>(in.family)] / in.repeat) continue;
      const int member = inside ? h * in.count * in.repeat + w * in.repeat : h;
      if (cut && parts.run.elements > 0) {
        const std::int64_t cols = s.piece.col_end - s.piece.col_begin;
        for (std::int64_t e = 0; e < parts.run.elements; ++e) {
          const std::int64_t i = parts.run.begin + h * parts.run.step + e;
          if (i < 0 || i >= s.piece.elements()) continue;
          const std::int64_t row = s.piece.row_begin + i / cols + (inside ? w * in.rows : 0),
                             col = s.piece.col_begin + i % cols + (inside ? w * in.cols : 0);
          if (!inside || row < in.last_row)
            out.push_back({row, col, s.piece.offset + member * parts.pitch + e, member});
        }
        continue;
      }
      for (std::int64_t r = s.piece.row_begin; r < s.piece.row_end; ++r)
        for (std::int64_t c = s.piece.col_begin; c < s.piece.col_end; ++c) {
          const std::int64_t row_in_piece = r + (cut ? h * parts.rows : 0);
          const std::int64_t row = row_in_piece + (inside ? w * in.rows : 0);
          const std::int64_t col = c + (cut ? h * parts.cols : 0) + (inside ? w * in.cols : 0);
          if (cut && row_in_piece >= parts.last_row) continue;
          if (inside && row >= in.last_row) continue;
          const std::int64_t first = s.piece.offset + (cut ? member * parts.pitch : 0);
          out.push_back({row, col, first + (r - s.piece.row_begin) * s.piece.pitch + c - s.piece.col_begin, member});
        }
    }
  return out;
}

Side any_side(bool source) {
  const auto to = [](int n) { return *rc::gen::inRange(0, n); };
  Side s;
  s.piece.row_begin = to(2), s.piece.row_end = s.piece.row_begin + 1 + to(4);
  s.piece.col_begin = to(2), s.piece.col_end = s.piece.col_begin + 1 + to(3);
  s.piece.offset = to(5), s.piece.pitch = s.piece.col_end - s.piece.col_begin + to(2);
  s.parts.who = static_cast<Holds>(to(source ? num_holds : 3));
  if (s.parts.who == Holds::whole) return s;
  s.parts = {s.parts.who, 0, 4, 1, to(5), to(2), 100, 3 + to(12), {}};
  if (to(2)) s.parts.rows = s.piece.row_end - s.piece.row_begin, s.parts.cols = 0;  // one adjoins the other
  if (to(3) == 0) {
    s.parts.rows = s.parts.cols = s.parts.last_row = 0;
    const std::int64_t step = 1 + to(8);
    s.parts.run = {to(12) - 6, to(2) ? step : 1 + to(8), step};
  }
  if (to(2)) s.parts.within = {1, 2, 1 + to(2), to(12), to(3), 3 + to(20)};
  if (s.parts.who == Holds::mine && to(2)) s.parts.repeat = 2, s.parts.count = 2;
  return s;
}

}  // namespace

TEST_CASE("Boxes are what both sides have, element by element") {
  std::int64_t moved = 0, empty = 0;
  CHECK(rc::check("as brute force", [&] {
    Op o = op(OpKind::copy_boxes, {tensor(0, DType::f32, {fixed(1)})}, {tensor(1, DType::f32, {fixed(1)})});
    o.moves = {{any_side(true), any_side(false)}};
    const Places places = {*rc::gen::inRange(0, 4), *rc::gen::inRange(0, 2)};
    using Pair = std::tuple<std::int64_t, std::int64_t, int>;  // element read, element written, whose
    std::multiset<Pair> expected, found;
    std::set<std::int64_t> written, said;
    for (const At& from : elements_of(o.moves[0].from, places))
      for (const At& to : elements_of(o.moves[0].to, places))
        if (from.row == to.row && from.col == to.col) {
          const bool others = o.moves[0].from.parts.who == Holds::peers && from.part != places[0];
          expected.insert({from.element, to.element, others ? from.part : -1});
          written.insert(to.element);
        }
    for (const Box& b : boxes_of(o, places)) {
      RC_ASSERT(b.rows > 0 && b.cols > 0);
      for (std::int64_t i = 0; i < b.rows; ++i)
        for (std::int64_t j = 0; j < b.cols; ++j)
          found.insert({b.src_offset + i * b.src_pitch + j, b.dst_offset + i * b.dst_pitch + j, b.peer});
    }
    RC_ASSERT(found == expected);
    const MovedElements counted = moved_elements(o.moves[0], places);
    RC_ASSERT(counted.all == std::ssize(expected));
    RC_ASSERT(counted.of_peers ==
              std::ranges::count_if(expected, [](const Pair& pair) { return std::get<2>(pair) >= 0; }));
    for (const Box& b : written_boxes(o, places))
      for (std::int64_t i = 0; i < b.rows; ++i)
        for (std::int64_t j = 0; j < b.cols; ++j) said.insert(b.dst_offset + i * b.dst_pitch + j);
    // Parts with a gap in front of them are not joined, so that nothing is said to be written that is not.
    RC_ASSERT(said == written);
    ++(expected.empty() ? empty : moved);
  }));
  CHECK(std::min(moved, empty) > 5);
}

TEST_CASE("Parts that adjoin are written as one, whoever holds them") {
  Op o = op(OpKind::copy_boxes, {tensor(0, DType::f32, {fixed(30)})}, {tensor(1, DType::f32, {fixed(30)})});
  // Rows 0..9 in four parts of three, each with a place for a fourth row behind it.
  o.moves = {{{0, {0, 3, 0, 3, 0, 3}, {Holds::every, 0, 4, 1, 3, 0, 12, 10, {}}}, {0, {0, 10, 0, 3, 0, 3}, {}}}};
  CHECK(boxes_of(o, {0}).size() == 4);
  const std::vector<Box> written = written_boxes(o, {0});
  REQUIRE(written.size() == 1);
  CHECK(written[0].elements() == 30);
}

TEST_CASE("Places: a rank's in each family, -1 in none") {
  Plan plan = test::empty_plan();
  plan.groups = {{"fsdp", {{0, 1, 2, 3}}}, {"tp", {{2, 0}, {1, 3}}}, {"some", {{1}}}};
  plan.program_of_rank = {0, 0, 0, 0};
  CHECK(places_of(plan, 0) == Places{0, 1, -1});
  CHECK(places_of(plan, 1) == Places{1, 0, 0});
  CHECK(places_of(plan, 3) == Places{3, 1, -1});
}
