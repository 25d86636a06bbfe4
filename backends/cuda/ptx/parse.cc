// Text -> Module. Statements end with ';'; '{' at the start of one opens a scope of registers (inline assembly does).
#include <fmt/format.h>

#include <bit>
#include <charconv>
#include <cstdlib>
#include <optional>
#include <utility>

#include "backends/cuda/ptx/decode.h"

namespace hotbunk::ptx {
namespace {

bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

std::string_view trim(std::string_view s) {
  while (!s.empty() && is_space(s.front())) s.remove_prefix(1);
  while (!s.empty() && is_space(s.back())) s.remove_suffix(1);
  return s;
}

/// The first word of a statement, cut off it.
std::string_view take_word(std::string_view& s) {
  s = trim(s);
  std::size_t n = 0;
  while (n < s.size() && !is_space(s[n])) ++n;
  const std::string_view word = s.substr(0, n);
  s = trim(s.substr(n));
  return word;
}

/// Comments become blanks: lines keep their numbers.
std::string without_comments(std::string_view text) {
  std::string out(text);
  for (std::size_t i = 0; i + 1 < out.size(); ++i) {
    if (out[i] != '/') continue;
    const bool line = out[i + 1] == '/', block = out[i + 1] == '*';
    if (!line && !block) continue;
    std::size_t end = line ? out.find('\n', i) : out.find("*/", i + 2);
    end = end == std::string::npos ? out.size() : line ? end : end + 2;
    for (; i < end; ++i)
      if (out[i] != '\n') out[i] = ' ';
    --i;
  }
  return out;
}

std::vector<std::string_view> split_operands(std::string_view s) {
  std::vector<std::string_view> out;
  int depth = 0;
  std::size_t begin = 0;
  for (std::size_t i = 0; i < s.size(); ++i) {
    if (s[i] == '{' || s[i] == '[') ++depth;
    if (s[i] == '}' || s[i] == ']') --depth;
    if (s[i] == ',' && depth == 0) {
      out.push_back(trim(s.substr(begin, i - begin)));
      begin = i + 1;
    }
  }
  if (!trim(s.substr(begin)).empty()) out.push_back(trim(s.substr(begin)));
  return out;
}

std::optional<std::int64_t> integer(std::string_view s) {
  bool negative = false;
  if (!s.empty() && s.front() == '-') negative = true, s.remove_prefix(1);
  if (!s.empty() && s.back() == 'U') s.remove_suffix(1);
  int base = 10;
  if (s.starts_with("0x") || s.starts_with("0X")) base = 16, s.remove_prefix(2);
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(s.data(), s.data() + s.size(), value, base);
  if (s.empty() || error != std::errc() || end != s.data() + s.size()) return std::nullopt;
  return static_cast<std::int64_t>(negative ? ~value + 1 : value);
}

/// A literal as the bits of a slot. Integers are sign-extended; 0f and 0d are the bits of a float and a double.
std::optional<std::uint64_t> literal(std::string_view s) {
  if (s.starts_with("0f") || s.starts_with("0F") || s.starts_with("0d") || s.starts_with("0D")) {
    std::uint64_t bits = 0;
    const auto [end, error] = std::from_chars(s.data() + 2, s.data() + s.size(), bits, 16);
    if (error == std::errc() && end == s.data() + s.size()) return bits;
    return std::nullopt;
  }
  if (const auto value = integer(s)) return static_cast<std::uint64_t>(*value);
  return std::nullopt;
}

constexpr std::array<std::pair<std::string_view, Special>, 21> special_names = {{{"%tid.x", Special::tid_x},
                                                                                 {"%tid.y", Special::tid_y},
                                                                                 {"%tid.z", Special::tid_z},
                                                                                 {"%ntid.x", Special::ntid_x},
                                                                                 {"%ntid.y", Special::ntid_y},
                                                                                 {"%ntid.z", Special::ntid_z},
                                                                                 {"%ctaid.x", Special::ctaid_x},
                                                                                 {"%ctaid.y", Special::ctaid_y},
                                                                                 {"%ctaid.z", Special::ctaid_z},
                                                                                 {"%nctaid.x", Special::nctaid_x},
                                                                                 {"%nctaid.y", Special::nctaid_y},
                                                                                 {"%nctaid.z", Special::nctaid_z},
                                                                                 {"%laneid", Special::laneid},
                                                                                 {"%warpid", Special::warpid},
                                                                                 {"%lanemask_eq", Special::lanemask_eq},
                                                                                 {"%lanemask_lt", Special::lanemask_lt},
                                                                                 {"%lanemask_le", Special::lanemask_le},
                                                                                 {"%lanemask_gt", Special::lanemask_gt},
                                                                                 {"%lanemask_ge", Special::lanemask_ge},
                                                                                 {"%clock", Special::clock},
                                                                                 {"%clock64", Special::clock}}};

std::int64_t aligned(std::int64_t bytes, std::int64_t to) { return (bytes + to - 1) / to * to; }

/// One variable's declaration: ".align 4 .b8 name[128] = {…}" behind its state space.
struct Declaration {
  std::string name;
  std::int64_t bytes = 0, alignment = 1;
  std::vector<std::uint8_t> initial;
};

Type element_type(std::string_view word) {
  if (word.starts_with('.')) word.remove_prefix(1);
  for (int t = 0; t <= static_cast<int>(Type::f64); ++t)
    if (name_of(static_cast<Type>(t)) == word && static_cast<Type>(t) != Type::none) return static_cast<Type>(t);
  throw UnknownPtx(fmt::format("type '{}' is not known here", word));
}

Declaration parse_declaration(std::string_view s) {
  Declaration d;
  std::string_view word = take_word(s);
  if (word == ".align") {
    d.alignment = integer(take_word(s)).value_or(1);
    word = take_word(s);
  }
  const std::int64_t element = bytes_of(element_type(word));
  d.alignment = std::max(d.alignment, element);
  std::string_view values;
  if (const auto equals = s.find('='); equals != std::string_view::npos) {
    values = trim(s.substr(equals + 1));
    s = trim(s.substr(0, equals));
  }
  std::int64_t count = 1;
  if (const auto bracket = s.find('['); bracket != std::string_view::npos) {
    const std::string_view size = trim(s.substr(bracket + 1, s.find(']') - bracket - 1));
    count = size.empty() ? 0 : integer(size).value_or(0);
    s = trim(s.substr(0, bracket));
  }
  d.name = std::string(s);
  d.bytes = count * element;
  if (!values.empty() && values.front() == '{') values = trim(values.substr(1, values.size() - 2));
  for (const std::string_view v : split_operands(values)) {
    const auto bits = literal(v);
    if (!bits) throw UnknownPtx(fmt::format("the initial value '{}' of '{}' is not known here", v, d.name));
    for (std::int64_t b = 0; b < element; ++b) d.initial.push_back(static_cast<std::uint8_t>(*bits >> (8 * b)));
  }
  d.initial.resize(static_cast<std::size_t>(d.bytes));
  return d;
}

/// The body of one kernel, statement by statement.
class KernelParser {
 public:
  KernelParser(Kernel& kernel, const std::map<std::string, Variable, std::less<>>& module_variables)
      : kernel_(kernel), variables_(module_variables) {
    scopes_.emplace_back();
    for (const Parameter& p : kernel.parameters) variables_[p.name] = {Space::param, p.offset, p.bytes, 1};
    for (auto& [name, v] : variables_)
      if (v.space == Space::shared && v.bytes > 0) place_shared(v);
  }

  void open() { scopes_.emplace_back(); }
  void close() { scopes_.pop_back(); }
  void label(std::string_view name) { labels_[std::string(name)] = static_cast<std::int32_t>(kernel_.code.size()); }

  void statement(std::string_view s, std::int32_t line) {
    if (s.starts_with('.')) return directive(s);
    Instruction i;
    std::string_view guard;
    if (s.front() == '@') guard = take_word(s);
    const std::string_view mnemonic = take_word(s);
    i = decode(mnemonic);
    i.line = line;
    if (!guard.empty()) {
      guard.remove_prefix(1);
      i.guarded = true;
      i.guard_negated = guard.starts_with('!');
      i.guard = slot(i.guard_negated ? guard.substr(1) : guard);
    }
    operands(i, split_operands(s));
    kernel_.code.push_back(i);
  }

  void finish() {
    kernel_.code.push_back({.opcode = Opcode::ret});
    for (const auto& [index, label] : branches_) {
      const auto it = labels_.find(label);
      if (it == labels_.end()) throw UnknownPtx(fmt::format("no label '{}'", label));
      kernel_.code[index].target = it->second;
    }
    const std::int64_t dynamic = aligned(kernel_.shared_bytes, 16);
    for (const auto& [s, added] : dynamic_shared_)
      kernel_.constants.emplace_back(s, static_cast<std::uint64_t>(dynamic + added));
    kernel_.num_slots = next_;
  }

 private:
  void place_shared(Variable& v) {
    v.offset = aligned(kernel_.shared_bytes, v.alignment);
    kernel_.shared_bytes = v.offset + v.bytes;
    kernel_.shared_alignment = std::max(kernel_.shared_alignment, v.alignment);
  }

  void directive(std::string_view s) {
    const std::string_view word = take_word(s);
    if (word == ".reg") return registers(s);
    if (word == ".shared" || word == ".local") {
      const Declaration d = parse_declaration(s);
      Variable v{word == ".shared" ? Space::shared : Space::local, 0, d.bytes, d.alignment};
      if (v.space == Space::shared) place_shared(v);
      else {
        v.offset = aligned(kernel_.local_bytes, d.alignment);
        kernel_.local_bytes = v.offset + d.bytes;
      }
      variables_[d.name] = v;
      return;
    }
    if (word == ".loc" || word == ".pragma" || word == ".file") return;
    throw UnknownPtx(fmt::format("directive '{}' is not known here", word));
  }

  void registers(std::string_view s) {
    take_word(s);  // the type: a slot holds any
    for (std::string_view name : split_operands(s)) {
      const auto angle = name.find('<');
      if (angle == std::string_view::npos) {
        scopes_.back()[std::string(name)] = next_++;
        continue;
      }
      const std::int64_t count = integer(name.substr(angle + 1, name.size() - angle - 2)).value_or(0);
      for (std::int64_t n = 0; n < count; ++n) scopes_.back()[fmt::format("{}{}", name.substr(0, angle), n)] = next_++;
    }
  }

  Slot constant(std::uint64_t bits) {
    const auto [it, added] = constants_.try_emplace(bits, next_);
    if (added) kernel_.constants.emplace_back(next_++, bits);
    return it->second;
  }

  /// The slot of a register, a special register, a literal or a variable's address.
  Slot slot(std::string_view name) {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope)
      if (const auto it = scope->find(name); it != scope->end()) return it->second;
    if (name == "_") return no_slot;
    for (const auto& [text, special] : special_names)
      if (text == name) {
        const auto [it, added] = specials_.try_emplace(special, next_);
        if (added) kernel_.specials.emplace_back(next_++, special);
        return it->second;
      }
    if (const auto it = variables_.find(name); it != variables_.end()) return address_of(it->first, it->second);
    if (const auto bits = literal(name)) return constant(*bits);
    if (name == "WARP_SZ") return constant(32);
    throw UnknownPtx(fmt::format("operand '{}' is not known here", name));
  }

  Slot address_of(const std::string& name, const Variable& v) {
    const auto [it, added] = addresses_.try_emplace(name, next_);
    if (!added) return it->second;
    const Slot s = next_++;
    if (v.space == Space::shared && v.bytes == 0) dynamic_shared_.emplace_back(s, 0);
    else if (v.space == Space::global || v.space == Space::constant) kernel_.globals.emplace_back(s, v.offset);
    else kernel_.constants.emplace_back(s, static_cast<std::uint64_t>(v.offset));
    return s;
  }

  /// "[%rd1+8]" or "[name]": base slot and offset.
  std::pair<Slot, std::int64_t> address(std::string_view s) {
    s = trim(s.substr(1, s.size() - 2));
    std::int64_t offset = 0;
    if (const auto plus = s.find('+'); plus != std::string_view::npos) {
      const auto value = integer(trim(s.substr(plus + 1)));
      if (!value) throw UnknownPtx(fmt::format("address '[{}]' is not known here", s));
      offset = *value;
      s = trim(s.substr(0, plus));
    }
    return {slot(s), offset};
  }

  std::vector<Slot> list(std::string_view s) {
    std::vector<Slot> out;
    if (s.starts_with('{')) {
      for (const std::string_view one : split_operands(s.substr(1, s.size() - 2))) out.push_back(slot(one));
    } else if (const auto bar = s.find('|'); bar != std::string_view::npos) {
      out = {slot(trim(s.substr(0, bar))), slot(trim(s.substr(bar + 1)))};
    } else {
      out.push_back(slot(s));
    }
    return out;
  }

  void add_destinations(Instruction& i, std::string_view s) {
    for (const Slot d : list(s)) i.destination.at(i.num_destinations++) = d;
  }
  void add_sources(Instruction& i, std::string_view s) {
    for (const Slot d : list(s)) i.source.at(i.num_sources++) = d;
  }
  void add_address(Instruction& i, std::string_view s, std::int64_t Instruction::*offset) {
    const auto [base, bytes] = address(s);
    i.source.at(i.num_sources++) = base;
    i.*offset = bytes;
  }

  std::int32_t number(std::string_view s) {
    const auto value = integer(s);
    if (!value) throw UnknownPtx(fmt::format("'{}' is not a number", s));
    return static_cast<std::int32_t>(*value);
  }

  void operands(Instruction& i, const std::vector<std::string_view>& all) {
    const auto need = [&](std::size_t low, std::size_t high) {
      if (all.size() < low || all.size() > high)
        throw UnknownPtx(fmt::format("{} operands are not known here", all.size()));
    };
    switch (i.opcode) {
      case Opcode::bra:
        need(1, 1);
        branches_.emplace_back(kernel_.code.size(), std::string(all[0]));
        return;
      case Opcode::ret:
      case Opcode::fence:
      case Opcode::cp_async_commit:
        return;
      case Opcode::cp_async_wait:
        i.immediate = all.empty() ? 0 : number(all[0]);
        return;
      case Opcode::bar_sync:
        need(1, 2);
        i.immediate = number(all[0]);
        for (std::size_t k = 1; k < all.size(); ++k) add_sources(i, all[k]);
        return;
      case Opcode::bar_warp:
        need(1, 1);
        add_sources(i, all[0]);
        return;
      case Opcode::st:
      case Opcode::red:
        need(2, 2);
        add_address(i, all[0], &Instruction::offset);
        add_sources(i, all[1]);
        return;
      case Opcode::cp_async:
        need(3, 4);
        add_address(i, all[0], &Instruction::offset);
        add_address(i, all[1], &Instruction::offset2);
        i.immediate = number(all[2]);
        if (all.size() > 3) add_sources(i, all[3]);
        return;
      case Opcode::ld:
      case Opcode::ldmatrix:
      case Opcode::atom:
        need(2, 4);
        add_destinations(i, all[0]);
        add_address(i, all[1], &Instruction::offset);
        for (std::size_t k = 2; k < all.size(); ++k) add_sources(i, all[k]);
        return;
      case Opcode::lop3:
        need(5, 5);
        add_destinations(i, all[0]);
        for (std::size_t k = 1; k < 4; ++k) add_sources(i, all[k]);
        i.immediate = number(all[4]);
        return;
      default:
        break;
    }
    need(1, 6);
    add_destinations(i, all[0]);
    for (std::size_t k = 1; k < all.size(); ++k) {
      std::string_view s = all[k];
      if (s.starts_with('!')) i.source_negated = true, s.remove_prefix(1);
      add_sources(i, s);
    }
    if (i.opcode == Opcode::mov && i.num_destinations > 1) i.opcode = Opcode::unpack;
    if (i.opcode == Opcode::mov && i.num_sources > 1) i.opcode = Opcode::pack;
  }

  Kernel& kernel_;
  std::map<std::string, Variable, std::less<>> variables_;
  std::vector<std::map<std::string, Slot, std::less<>>> scopes_;
  std::map<std::string, std::int32_t, std::less<>> labels_;
  std::vector<std::pair<std::size_t, std::string>> branches_;
  std::map<std::uint64_t, Slot> constants_;
  std::map<Special, Slot> specials_;
  std::map<std::string, Slot> addresses_;
  std::vector<std::pair<Slot, std::int64_t>> dynamic_shared_;
  Slot next_ = 0;
};

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
