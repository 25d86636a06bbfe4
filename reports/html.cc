#include "reports/html.h"

#include <fmt/format.h>

#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string_view>

#include "base/json.h"
#include "reports/assets.h"
#include "reports/report_data.h"

namespace hotbunk {
namespace {

/// Text that may stand between tags.
std::string escape_html(std::string_view text) {
  std::string out;
  for (const char c : text) switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      default:
        out += c;
    }
  return out;
}

/// JSON that may stand inside <script>: "<" cannot end the element or open a comment in it.
std::string script_json(const nlohmann::ordered_json& data) {
  const std::string text = json_text(data, -1, NotUtf8::replaced);
  std::string out;
  out.reserve(text.size());
  for (const char c : text)
    if (c == '<') out += "\\u003c";
    else out += c;
  return out;
}

/// One file: the data, and classic scripts, in order: each sees what the ones before it declared.
std::string page(const std::string& title, const nlohmann::ordered_json& data,
                 std::initializer_list<std::string_view> scripts) {
  std::string out = "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n";
  out += "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n";
  out += fmt::format("<title>hotbunk: {}</title>\n<style>\n{}</style>\n</head>\n<body>\n", escape_html(title),
                     assets::style_css());
  out +=
      "<main id=\"report\"><noscript>This report draws itself with its own script; please allow scripts for this "
      "file.</noscript></main>\n";
  out += "<script type=\"application/json\" id=\"data\">" + script_json(data) + "</script>\n";
  for (const std::string_view script : scripts) out += fmt::format("<script>\n{}</script>\n", script);
  out += "</body>\n</html>\n";
  return out;
}

}  // namespace

std::string html_report(const ReportInput& input) {
  return page(input.scenario.name, report_data(input), {assets::charts_js(), assets::memory_js(), assets::report_js()});
}

std::string html_plan(const nlohmann::ordered_json& data) {
  return page(data.at("scenario"), data, {assets::charts_js(), assets::plan_js()});
}

}  // namespace hotbunk
