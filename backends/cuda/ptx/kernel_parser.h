// The body of one kernel: registers become slots, labels become indices of instructions. Part of parse.cc.
#pragma once
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "backends/cuda/ptx/decode.h"
#include "backends/cuda/ptx/text.h"

namespace hotbunk::ptx {

inline constexpr std::array<std::pair<std::string_view, Special>, 21> special_names = {
    {{"%tid.x", Special::tid_x},
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
    for (const Slot s : dynamic_shared_) kernel_.constants.emplace_back(s, static_cast<std::uint64_t>(dynamic));
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
    if (v.space == Space::shared && v.bytes == 0) dynamic_shared_.push_back(s);
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
      case Opcode::trap:
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
  std::vector<Slot> dynamic_shared_;  // slots that hold where it begins
  Slot next_ = 0;
};

}  // namespace hotbunk::ptx
