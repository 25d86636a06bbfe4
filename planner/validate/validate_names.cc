// What the published tables call GPUs and models, and the catalogue's names for them.
#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <regex>

#include "planner/validate/validate_tables.h"
#include "spec/catalog.h"

namespace hotbunk {
namespace {

bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0; }
char upper(char c) { return static_cast<char>(std::toupper(static_cast<unsigned char>(c))); }

/// "DGX-GB200" -> DGX, GB200.
std::vector<std::string> words(const std::string& text) {
  std::vector<std::string> out(1);
  for (char c : text) {
    if (is_word(c)) out.back() += upper(c);
    else if (!out.back().empty()) out.emplace_back();
  }
  return out;
}

}  // namespace

std::string letters_of(const std::string& text) {
  std::string out;
  for (char c : text)
    if (is_word(c)) out += upper(c);
  return out;
}

std::string without_variant(const std::string& model) {
  // Words behind a model's size that change neither shapes nor what a pass costs. A format is the row's precision.
  static const std::regex variant("([-_ ](Instruct|Base|Chat|Thinking|it|FP8|BF16|NVFP4|INT4|Dynamic|[0-9]{4}))+$",
                                  std::regex::icase);
  return std::regex_replace(model, variant, "");
}

std::string ValidationContext::gpu_named(CellReader& cells, const std::string& cell) const {
  const std::vector<std::string> said = words(cell);
  const auto says = [&](const char* word) { return std::find(said.begin(), said.end(), word) != said.end(); };
  // PCIe cards of the same chips have other clocks, memories and links.
  const bool card = says("PCIE") || says("NVL") || says("SUPERCHIP");
  if (says("A100") && says("40GB") && !card) return "a100-sxm-40gb";
  for (const auto& [word, name] : {std::pair{"A100", "a100-sxm-80gb"},
                                   {"H100", "h100-sxm-80gb"},
                                   {"H200", "h200-sxm-141gb"},
                                   {"H800", "h800-sxm-80gb"},
                                   {"H20", "h20-sxm-96gb"},
                                   {"B200", "b200-sxm-180gb"},
                                   {"B300", "b300-sxm-288gb"},
                                   {"GB200", "gb200-nvl72"},
                                   {"GB300", "gb300-nvl72"}})
    if (says(word) && !card) return name;
  cells.refuse(fmt::format("hardware '{}' is not in the catalogue", cell));
  return "a100-sxm-80gb";
}

std::string ValidationContext::model_named(CellReader& cells, const std::string& cell) const {
  std::string said = letters_of(without_variant(cell.substr(0, cell.find(" ("))));
  // Releases of one architecture; what changed between them costs nothing.
  static const std::map<std::string, std::string> same = {{"LLAMA370B", "LLAMA3170B"},
                                                          {"LLAMA3405B", "LLAMA31405B"},
                                                          {"QWEN3235B", "QWEN3235BA22B"},
                                                          {"DEEPSEEKV31", "DEEPSEEKV3"},
                                                          {"DEEPSEEKR1", "DEEPSEEKV3"}};
  if (const auto other = same.find(said); other != same.end()) said = other->second;
  for (const std::string& name : catalog_names("models"))
    if (letters_of(name) == said) return name;
  cells.refuse(fmt::format("model '{}' is not in the catalogue", cell));
  return "llama-3.1-8b";
}

Degrees degrees(CellReader& cells, const std::string& text) {
  static const std::regex word("([A-Za-z]+) ?([0-9]{1,6})(?:x([0-9]{1,6}))?"), separators("[ ,+]*");
  Degrees out;
  std::string rest;
  auto from = text.begin();
  for (std::sregex_iterator at(text.begin(), text.end(), word), none; at != none; ++at) {
    rest.append(from, (*at)[0].first);
    from = (*at)[0].second;
    std::vector<std::int64_t>& sizes = out[(*at)[1]];
    sizes.push_back(std::stoll((*at)[2]));
    if ((*at)[3].matched) sizes.push_back(std::stoll((*at)[3]));
  }
  rest.append(from, text.end());
  if (out.empty() || !std::regex_match(rest, separators))
    cells.refuse(fmt::format("parallelism '{}' is not understood", text));
  return out;
}

TrainPrice price_of(CellReader& cells, ValidationContext& context, const TrainModel& model, const TrainPoint& p) {
  if (cells.usable() && !model.divides(p)) cells.refuse(model.why_invalid(p));
  if (!cells.usable()) return {};
  context.trained.push_back({model, p});
  return model.price(p);
}

void put(ValidationTable& table, const std::string& label, const CellReader& cells, double measured, double predicted) {
  if (!cells.usable()) table.skipped.push_back({label, cells.why()});
  else if (!(predicted > 0.0 && predicted < 1e18)) table.skipped.push_back({label, "the layout has no price"});
  else table.rows.push_back({label, measured, predicted});
}

void put(ValidationTable& table, const std::string& label, CellReader cells, const std::string& column,
         double predicted) {
  const double measured = cells.measured(column);
  put(table, label, static_cast<const CellReader&>(cells), measured, predicted);
}

}  // namespace hotbunk
