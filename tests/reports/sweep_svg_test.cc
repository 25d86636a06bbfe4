#include "reports/sweep_svg.h"

#include <catch2/catch.hpp>

using namespace hotbunk;

namespace {

std::size_t num_of(const std::string& text, const std::string& part) {
  std::size_t n = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

SweepRow row(std::vector<std::string> values, double seconds, double gib, bool fits = true) {
  SweepRow r;
  r.values = std::move(values);
  r.valid = true;
  r.fits = fits;
  r.iteration_seconds = seconds;
  r.peak_bytes = gib * (1 << 30);
  r.capacity_bytes = 80.0 * (1 << 30);
  return r;
}

SweepRow invalid(std::vector<std::string> values) {
  SweepRow r;
  r.values = std::move(values);
  r.why = "12 heads over 8 ranks";
  return r;
}

}  // namespace

TEST_CASE("one axis: lines, the capacity, crosses where it does not fit, grey where it is no layout") {
  const std::vector<SweepAxis> axes = {{{"train.micro_batch_tokens"}, {{"1"}, {"2"}, {"4"}, {"8"}}}};
  const std::vector<SweepRow> rows = {row({"1"}, 9, 40), row({"2"}, 5, 60), row({"4"}, 4, 90, false), invalid({"8"})};
  const std::string svg = sweep_svg("a <b> & c", axes, rows);
  CHECK(svg.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\""));
  CHECK(svg.find("a &lt;b&gt; &amp; c") != std::string::npos);
  // Two panels: a circle for each of two points that fit, two strokes for the cross, a grey column, a frame; the
  // capacity under each of three layouts, in the panel of memory only.
  CHECK(num_of(svg, "<circle") == 2 * 2);
  CHECK(num_of(svg, "class=\"misfit\"") == 2 * 2);
  CHECK(num_of(svg, "class=\"invalid\"") == 2);
  CHECK(num_of(svg, "class=\"best\"") == 2);
  CHECK(num_of(svg, "class=\"capacity\"") == 3);
  CHECK(num_of(svg, "<text") == num_of(svg, "</text>"));
}

TEST_CASE("two axes: a heat map, the fastest that fits is framed, a faster one that does not is crossed out") {
  const std::vector<SweepAxis> axes = {{{"tp"}, {{"1"}, {"2"}}}, {{"dp"}, {{"1"}, {"2"}, {"4"}}}};
  const std::vector<SweepRow> rows = {row({"1", "1"}, 8, 70), row({"1", "2"}, 2, 90, false), row({"1", "4"}, 4, 50),
                                      row({"2", "1"}, 6, 30), invalid({"2", "2"}),           row({"2", "4"}, 5, 20)};
  const std::string svg = sweep_svg("s", axes, rows);
  CHECK(num_of(svg, "class=\"misfit\"") == 2);
  CHECK(num_of(svg, "class=\"invalid\"") == 1);
  CHECK(num_of(svg, "class=\"best\"") == 1);
  CHECK(svg.find("capacity 80") != std::string::npos);
  // The fastest cell, 2 s, is the lightest colour; the slowest, 8 s, the darkest. 4 s is in the middle: log scale.
  CHECK(svg.find("#FDE725") < svg.find(">2.00 s<"));
  CHECK(svg.find("#440154") < svg.find(">8.00 s<"));
  CHECK(num_of(svg, "#21918C") == 1);
  // The frame comes right behind the texts of the 4 s cell.
  CHECK(svg.find("class=\"best\"") > svg.find(">4.00 s<"));
  CHECK(svg.find("class=\"best\"") < svg.find(">tp 2<"));
}

TEST_CASE("keys that move together are one axis, and all are named") {
  const SweepAxis linked{{"nodes", "dp"}, {{"1", "8"}, {"2", "16"}}};
  const std::vector<SweepRow> two = {row({"1", "8"}, 9, 40), row({"2", "16"}, 5, 60)};
  const std::string lines = sweep_svg("s", std::vector{linked}, two);
  CHECK(lines.find(">nodes, dp<") != std::string::npos);
  CHECK(lines.find(">2:16<") != std::string::npos);
  const std::vector<SweepRow> four = {row({"1", "8", "1"}, 9, 40), row({"1", "8", "2"}, 5, 60),
                                      row({"2", "16", "1"}, 9, 40), row({"2", "16", "2"}, 5, 60)};
  const std::string map = sweep_svg("s", std::vector<SweepAxis>{linked, {{"tp"}, {{"1"}, {"2"}}}}, four);
  CHECK(map.find(">nodes 2, dp 16<") != std::string::npos);
}
