#include "reports/html.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

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

}  // namespace

std::string html_report(const ReportInput& input) {
  std::string out = "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n";
  out += "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n";
  out += fmt::format("<title>hotbunk: {}</title>\n<style>\n{}</style>\n</head>\n<body>\n",
                     escape_html(input.scenario.name), assets::style_css());
  out +=
      "<main id=\"report\"><noscript>This report draws itself with its own script; please allow scripts for this "
      "file.</noscript></main>\n";
  out += "<script type=\"application/json\" id=\"data\">" + script_json(report_data(input)) + "</script>\n";
  // Classic scripts, in order: each sees what the ones before it declared.
  for (const std::string_view script : {assets::charts_js(), assets::memory_js(), assets::report_js()})
    out += fmt::format("<script>\n{}</script>\n", script);
  out += "</body>\n</html>\n";
  return out;
}

}  // namespace hotbunk
