#include "reports/sweep_svg.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "base/check.h"
#include "base/format.h"

namespace hotbunk {
namespace {

// Okabe and Ito's colours, as in the report.
constexpr const char *const blue = "#0072B2", *const vermilion = "#D55E00";
/// Dark to light, even steps of lightness for any colour vision: five stops of matplotlib's viridis.
constexpr std::array<std::array<int, 3>, 5> viridis = {
    {{68, 1, 84}, {59, 82, 139}, {33, 145, 140}, {94, 201, 98}, {253, 231, 37}}};

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text)
    if (c == '&') out += "&amp;";
    else if (c == '<') out += "&lt;";
    else if (c == '>') out += "&gt;";
    else if (c == '"') out += "&quot;";
    else out += c;
  return out;
}

struct Colour {
  std::string hex;
  bool dark = false;
};
/// `at` in [0, 1].
Colour colour_at(double at) {
  const double place = std::clamp(at, 0.0, 1.0) * (viridis.size() - 1);
  const auto low = std::min(static_cast<std::size_t>(place), viridis.size() - 2);
  std::array<double, 3> rgb{};
  for (std::size_t i = 0; i < 3; ++i)
    rgb[i] = viridis[low][i] + (place - static_cast<double>(low)) * (viridis[low + 1][i] - viridis[low][i]);
  return {fmt::format("#{:02X}{:02X}{:02X}", std::lround(rgb[0]), std::lround(rgb[1]), std::lround(rgb[2])), at < 0.55};
}

class Svg {
 public:
  void text(double x, double y, const std::string& content, const char* attributes = "") {
    body_ += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" {}>{}</text>\n", x, y, attributes, escaped(content));
  }
  void line(double x1, double y1, double x2, double y2, const std::string& stroke, const char* attributes = "") {
    body_ += fmt::format("<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"{}\" {}/>\n", x1, y1,
                         x2, y2, stroke, attributes);
  }
  void rect(double x, double y, double w, double h, const std::string& fill, const char* attributes = "") {
    body_ += fmt::format("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" fill=\"{}\" {}/>\n", x, y,
                         w, h, fill, attributes);
  }
  /// What follows shows `title` under the pointer, until close().
  void open(const std::string& title) { body_ += fmt::format("<g><title>{}</title>\n", escaped(title)); }
  void close() { body_ += "</g>\n"; }
  void circle(double x, double y, const std::string& fill, const std::string& title) {
    open(title);
    body_ += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"4\" fill=\"{}\"/>\n", x, y, fill);
    close();
  }
  void cross(double x, double y, double size, const char* stroke) {
    line(x - size, y - size, x + size, y + size, stroke, "stroke-width=\"2\" class=\"misfit\"");
    line(x - size, y + size, x + size, y - size, stroke, "stroke-width=\"2\" class=\"misfit\"");
  }
  std::string finish(double width, double height) const {
    return fmt::format(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} "
        "{1:.0f}\" "
        "font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" "
        "fill=\"white\"/>\n{2}</svg>\n",
        width, height, body_);
  }

 private:
  std::string body_;
};

std::string what(const SweepRow& r) {
  if (!r.valid) return "no layout: " + r.why;
  return fmt::format("{}, {} of {}{}", format_seconds(r.iteration_seconds), format_bytes(r.peak_bytes),
                     format_bytes(r.capacity_bytes), r.fits ? "" : ": does not fit");
}

/// Round values from 0 to above `most`, about four.
std::vector<double> ticks(double most) {
  const double power = std::pow(10.0, std::floor(std::log10(most / 4)));
  double step = 10 * power;
  for (const double m : {5.0, 2.0, 1.0})
    if (m * power >= most / 4) step = m * power;
  std::vector<double> out;
  for (int i = 0; out.empty() || out.back() < most; ++i) out.push_back(i * step);
  return out;
}

/// The fastest that fits, or none.
const SweepRow* best_of(std::span<const SweepRow> rows) {
  const SweepRow* best = nullptr;
  for (const SweepRow& r : rows)
    if (r.valid && r.fits && (!best || r.iteration_seconds < best->iteration_seconds)) best = &r;
  return best;
}

constexpr double left = 90.0, plot_width = 640.0, plot_height = 190.0;

/// One quantity over the axis' values; `bound` draws the capacity.
template <class Value, class Format>
void panel(Svg& svg, double top, const std::string& label, std::span<const SweepRow> rows, Value value, Format format,
           bool bound) {
  double most = 0.0;
  for (const SweepRow& r : rows)
    if (r.valid) most = std::max({most, value(r), bound ? r.capacity_bytes : 0.0});
  if (most <= 0.0) most = 1.0;
  const std::vector<double> marks = ticks(bound ? most / gib : most);
  const double scale = (bound ? gib : 1.0) * marks.back(), bottom = top + plot_height;
  const double step = plot_width / static_cast<double>(rows.size());
  const auto x = [&](std::size_t i) { return left + (static_cast<double>(i) + 0.5) * step; };
  const auto y = [&](double v) { return bottom - v / scale * plot_height; };
  svg.text(left, top - 8, label, "font-weight=\"bold\"");
  for (const double m : marks) {
    const double at = y(m / marks.back() * scale);
    svg.line(left, at, left + plot_width, at, "#DFE4EA");
    svg.text(left - 8, at + 4, format(m), "text-anchor=\"end\" fill=\"#5B6876\"");
  }
  for (std::size_t i = 0; i + 1 < rows.size(); ++i)
    if (rows[i].valid && rows[i + 1].valid)
      svg.line(x(i), y(value(rows[i])), x(i + 1), y(value(rows[i + 1])), blue, "stroke-width=\"2\"");
  const SweepRow* best = best_of(rows);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const SweepRow& r = rows[i];
    if (!r.valid) {
      svg.rect(left + static_cast<double>(i) * step, top, step, plot_height, "#EEEEEE", "class=\"invalid\"");
      continue;
    }
    if (bound)
      svg.line(x(i) - step / 2, y(r.capacity_bytes), x(i) + step / 2, y(r.capacity_bytes), vermilion,
               "stroke-width=\"1.5\" stroke-dasharray=\"6 4\" class=\"capacity\"");
    if (r.fits) svg.circle(x(i), y(value(r)), blue, what(r));
    else svg.cross(x(i), y(value(r)), 5, vermilion);
    if (&r == best)
      svg.rect(x(i) - 8, y(value(r)) - 8, 16, 16, "none", "stroke=\"black\" stroke-width=\"2\" class=\"best\"");
  }
}

std::string lines(const std::string& title, const SweepAxis& axis, std::span<const SweepRow> rows) {
  Svg svg;
  svg.text(left, 24, title, "font-size=\"15\" font-weight=\"bold\"");
  panel(
      svg, 66, "seconds of an iteration", rows, [](const SweepRow& r) { return r.iteration_seconds; },
      [](double s) { return fmt::format("{:g} s", s); }, false);
  panel(
      svg, 66 + plot_height + 48, "peak memory of a device", rows, [](const SweepRow& r) { return r.peak_bytes; },
      [](double g) { return fmt::format("{:g} GiB", g); }, true);
  const double bottom = 66 + 2 * plot_height + 48, step = plot_width / static_cast<double>(rows.size());
  const std::size_t every = (axis.points.size() + 15) / 16;  // labels that do not run into each other
  for (std::size_t i = 0; i < axis.points.size(); i += every)
    svg.text(left + (static_cast<double>(i) + 0.5) * step, bottom + 18, axis.label(i), "text-anchor=\"middle\"");
  svg.text(left + plot_width / 2, bottom + 38, axis.name(), "text-anchor=\"middle\"");
  svg.text(left, bottom + 62,
           "dashed: capacity; crossed out: does not fit; grey: no layout; framed: the fastest that fits",
           "fill=\"#5B6876\"");
  return svg.finish(left + plot_width + 20, bottom + 76);
}

void cell(Svg& svg, double x, double y, double w, double h, const SweepRow& r, double low, double high, bool best) {
  if (!r.valid) {
    svg.rect(x, y, w, h, "#EEEEEE", "class=\"invalid\"");
    svg.text(x + w / 2, y + h / 2 + 4, "–", "text-anchor=\"middle\" fill=\"#5B6876\"");
    return;
  }
  const double span = std::log(high / low);  // fast is light
  const Colour colour = colour_at(span > 0.0 ? 1.0 - std::log(r.iteration_seconds / low) / span : 1.0);
  svg.rect(x, y, w, h, colour.hex, r.fits ? "" : "fill-opacity=\"0.35\"");
  const std::string fill = fmt::format("text-anchor=\"middle\" fill=\"{}\"", colour.dark && r.fits ? "white" : "black");
  svg.text(x + w / 2, y + h / 2 - 2, format_seconds(r.iteration_seconds), fill.c_str());
  svg.text(x + w / 2, y + h / 2 + 13, format_bytes(r.peak_bytes), (fill + " font-size=\"10\"").c_str());
  if (!r.fits) svg.cross(x + w - 11, y + 11, 5, vermilion);
  if (best) svg.rect(x + 1.5, y + 1.5, w - 3, h - 3, "none", "stroke=\"black\" stroke-width=\"3\" class=\"best\"");
}

std::string heat_map(const std::string& title, std::span<const SweepAxis> axes, std::span<const SweepRow> rows) {
  const std::size_t columns = axes.back().points.size(), num_rows = rows.size() / columns;
  const double w = std::max(64.0, plot_width / static_cast<double>(columns)), h = 44.0, top = 84.0;
  double low = INFINITY, high = 0.0, label = 0.0, least_capacity = INFINITY, most_capacity = 0.0;
  for (const SweepRow& r : rows)
    if (r.valid) {
      low = std::min(low, r.iteration_seconds), high = std::max(high, r.iteration_seconds);
      least_capacity = std::min(least_capacity, r.capacity_bytes);
      most_capacity = std::max(most_capacity, r.capacity_bytes);
    }
  std::vector<std::string> names;
  for (std::size_t i = 0; i < num_rows; ++i) {
    std::string name;
    auto value = rows[i * columns].values.begin();
    for (std::size_t a = 0; a + 1 < axes.size(); ++a)
      for (const std::string& key : axes[a].keys)
        name += fmt::format("{}{} {}", name.empty() ? "" : ", ", key, *value++);
    label = std::max(label, 7.0 * static_cast<double>(name.size()) + 20);
    names.push_back(std::move(name));
  }
  Svg svg;
  svg.text(20, 24, title, "font-size=\"15\" font-weight=\"bold\"");
  std::string capacity = "no point is a layout";
  if (most_capacity > 0.0)
    capacity = least_capacity == most_capacity
                   ? "capacity " + format_bytes(most_capacity)
                   : fmt::format("capacity {} to {}", format_bytes(least_capacity), format_bytes(most_capacity));
  svg.text(20, 44, fmt::format("seconds of an iteration and peak memory of a device; {}", capacity));
  const double right = label + w * static_cast<double>(columns);
  svg.text(label + (right - label) / 2, top - 20, axes.back().name(), "text-anchor=\"middle\"");
  const SweepRow* best = best_of(rows);
  for (std::size_t c = 0; c < columns; ++c)
    svg.text(label + (static_cast<double>(c) + 0.5) * w, top - 5, axes.back().label(c), "text-anchor=\"middle\"");
  for (std::size_t i = 0; i < num_rows; ++i) {
    const double y = top + static_cast<double>(i) * h;
    svg.text(label - 10, y + h / 2 + 4, names[i], "text-anchor=\"end\"");
    for (std::size_t c = 0; c < columns; ++c) {
      const SweepRow& r = rows[i * columns + c];
      svg.open(what(r));
      cell(svg, label + static_cast<double>(c) * w + 1, y + 1, w - 2, h - 2, r, low, high, &r == best);
      svg.close();
    }
  }
  const double bottom = top + static_cast<double>(num_rows) * h + 22;
  svg.text(20, bottom, "light: fast; crossed out: does not fit; grey: no layout; framed: the fastest that fits",
           "fill=\"#5B6876\"");
  return svg.finish(std::max(right + 20, 640.0), bottom + 16);
}

}  // namespace

std::string sweep_svg(const std::string& title, std::span<const SweepAxis> axes, std::span<const SweepRow> rows) {
  HB_CHECK(!axes.empty() && !rows.empty() && rows.size() % axes.back().points.size() == 0, "{} axes, {} rows",
           axes.size(), rows.size());
  return axes.size() == 1 ? lines(title, axes[0], rows) : heat_map(title, axes, rows);
}

}  // namespace hotbunk
