// Text -> Module. Statements end with ';'; '{' at the start of one opens a scope of registers (inline assembly does).
#include <fmt/format.h>

#include <utility>

#include "backends/cuda/ptx/kernel_parser.h"

namespace hotbunk::ptx {
namespace {

/// The module: directives, variables, kernels.
class ModuleParser {
 public:
  explicit ModuleParser(std::string_view text) : text_(without_comments(text)) {
    for (std::size_t at = 0; at < text.size();) {
      const std::size_t end = std::min(text.find('\n', at), text.size());
      module_.lines.emplace_back(text.substr(at, end - at));
      at = end + 1;
    }
  }

  Module run() {
    try {
      while (skip_blanks()) top_level();
    } catch (const UnknownPtx& e) {
      const auto at = static_cast<std::size_t>(std::max(0, line_ - 1));
      throw UnknownPtx(
          fmt::format("line {}: {}: {}", line_, e.what(), at < module_.lines.size() ? trim(module_.lines[at]) : ""));
    }
    return std::move(module_);
  }

 private:
  bool skip_blanks() {
    while (at_ < text_.size() && is_space(text_[at_])) step();
    return at_ < text_.size();
  }
  void step() {
    if (text_[at_] == '\n') ++line_;
    ++at_;
  }
  /// Everything up to one of these characters, which stays.
  std::string_view until(std::string_view stops) {
    const std::size_t begin = at_;
    while (at_ < text_.size() && stops.find(text_[at_]) == std::string_view::npos) step();
    return trim(std::string_view(text_).substr(begin, at_ - begin));
  }

  void top_level() {
    std::string_view peek = std::string_view(text_).substr(at_);
    for (const std::string_view whole_line : {".version", ".target", ".address_size"})
      if (peek.starts_with(whole_line)) {
        const std::string_view s = until("\n");
        if (whole_line == ".target") module_.target = std::string(trim(s.substr(whole_line.size())));
        return;
      }
    const std::int32_t begins = line_;
    const std::string_view head = until(";({=");
    if (head.find(".entry") != std::string_view::npos) return kernel(head);
    if (head.find(".func") != std::string_view::npos) throw UnknownPtx("a function that was not inlined");
    std::string_view rest = head;
    if (at_ < text_.size() && text_[at_] != ';') {
      const std::size_t from = static_cast<std::size_t>(head.data() - text_.data());
      until(";");
      rest = std::string_view(text_).substr(from, at_ - from);
    }
    if (at_ < text_.size()) step();
    const std::int32_t ends = std::exchange(line_, begins);
    variable(rest);
    line_ = ends;
  }

  void variable(std::string_view s) {
    bool is_extern = false;
    for (std::string_view word = take_word(s); !word.empty(); word = take_word(s)) {
      if (word == ".extern") is_extern = true;
      if (word == ".shared") {
        const Declaration d = parse_declaration(s);
        variables_[d.name] = {Space::shared, 0, is_extern ? 0 : d.bytes, d.alignment};
        return;
      }
      if (word == ".global" || word == ".const") {
        const Declaration d = parse_declaration(s);
        const std::int64_t offset = aligned(static_cast<std::int64_t>(module_.data.size()), d.alignment);
        module_.data.resize(static_cast<std::size_t>(offset));
        module_.data.insert(module_.data.end(), d.initial.begin(), d.initial.end());
        variables_[d.name] = {Space::global, offset, d.bytes, d.alignment};
        return;
      }
      if (word == ".visible" || word == ".extern" || word == ".weak") continue;
      throw UnknownPtx(fmt::format("'{}' is not known here", word));
    }
  }

  void kernel(std::string_view head) {
    Kernel kernel;
    while (!head.empty()) kernel.name = std::string(take_word(head));
    if (text_[at_] == '(') {
      step();
      const std::string_view parameters = until(")");
      step();
      for (std::string_view p : split_operands(parameters)) {
        if (take_word(p) != ".param") throw UnknownPtx("a parameter without .param");
        if (p.starts_with(".u64 .ptr")) {  // hints about what the pointer points at
          const auto last = p.find_last_of(" \t");
          const std::string name(p.substr(last + 1));
          add_parameter(kernel, {name, 8, 8, {}});
          continue;
        }
        add_parameter(kernel, parse_declaration(p));
      }
    }
    for (std::string_view d = until("{"); !d.empty();)
      if (take_word(d) == ".maxntid")
        kernel.max_threads = static_cast<std::int32_t>(integer(take_word(d)).value_or(1024));
    body(kernel);
    module_.kernels.emplace(kernel.name, std::move(kernel));
  }

  static void add_parameter(Kernel& kernel, const Declaration& d) {
    const std::int64_t offset = aligned(kernel.parameter_bytes, d.alignment);
    kernel.parameters.push_back({d.name, offset, d.bytes});
    kernel.parameter_bytes = offset + d.bytes;
  }

  void body(Kernel& kernel) {
    KernelParser parser(kernel, variables_);
    step();  // {
    for (int depth = 1; skip_blanks();) {
      if (text_[at_] == '{') {
        ++depth;
        parser.open();
        step();
        continue;
      }
      if (text_[at_] == '}') {
        step();
        parser.close();
        if (--depth == 0) break;
        continue;
      }
      if (text_[at_] == ';') {
        step();
        continue;
      }
      const std::int32_t line = line_;
      statement(parser, line);
    }
    parser.finish();
  }

  void statement(KernelParser& parser, std::int32_t line) {
    const std::size_t begin = at_;
    // A label is a name and a colon; modifiers like shared::cta have two.
    while (at_ < text_.size() && text_[at_] != ';') {
      if (text_[at_] == ':' && text_[at_ + 1] != ':' && text_[at_ - 1] != ':') {
        parser.label(trim(std::string_view(text_).substr(begin, at_ - begin)));
        step();
        return;
      }
      step();
    }
    const std::string_view s = trim(std::string_view(text_).substr(begin, at_ - begin));
    const std::int32_t ends = std::exchange(line_, line);
    parser.statement(s, line);
    line_ = ends;
    step();
  }

  std::string text_;
  std::size_t at_ = 0;
  std::int32_t line_ = 1;
  Module module_;
  std::map<std::string, Variable, std::less<>> variables_;
};

}  // namespace

Module parse(std::string_view text) { return ModuleParser(text).run(); }

}  // namespace hotbunk::ptx
