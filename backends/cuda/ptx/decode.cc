#include "backends/cuda/ptx/decode.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace hotbunk::ptx {
namespace {

template <class Value, std::size_t n>
using Names = std::array<std::pair<std::string_view, Value>, n>;

constexpr Names<Type, 20> type_names = {
    {{"pred", Type::pred},   {"b8", Type::b8},         {"b16", Type::b16},   {"b32", Type::b32}, {"b64", Type::b64},
     {"u8", Type::u8},       {"u16", Type::u16},       {"u32", Type::u32},   {"u64", Type::u64}, {"s8", Type::s8},
     {"s16", Type::s16},     {"s32", Type::s32},       {"s64", Type::s64},   {"f16", Type::f16}, {"bf16", Type::bf16},
     {"f16x2", Type::f16x2}, {"bf16x2", Type::bf16x2}, {"tf32", Type::tf32}, {"f32", Type::f32}, {"f64", Type::f64}}};

constexpr Names<Space, 7> space_names = {{{"global", Space::global},
                                          {"shared", Space::shared},
                                          {"shared::cta", Space::shared},
                                          {"local", Space::local},
                                          {"param", Space::param},
                                          {"param::entry", Space::param},
                                          {"const", Space::constant}}};

constexpr Names<Round, 9> round_names = {{{"rn", Round::rn},
                                          {"rz", Round::rz},
                                          {"rm", Round::rm},
                                          {"rp", Round::rp},
                                          {"rna", Round::rna},
                                          {"rni", Round::rni},
                                          {"rzi", Round::rzi},
                                          {"rmi", Round::rmi},
                                          {"rpi", Round::rpi}}};

constexpr Names<Compare, 18> compare_names = {{{"eq", Compare::eq},
                                               {"ne", Compare::ne},
                                               {"lt", Compare::lt},
                                               {"le", Compare::le},
                                               {"gt", Compare::gt},
                                               {"ge", Compare::ge},
                                               {"lo", Compare::lo},
                                               {"ls", Compare::ls},
                                               {"hi", Compare::hi},
                                               {"hs", Compare::hs},
                                               {"equ", Compare::equ},
                                               {"neu", Compare::neu},
                                               {"ltu", Compare::ltu},
                                               {"leu", Compare::leu},
                                               {"gtu", Compare::gtu},
                                               {"geu", Compare::geu},
                                               {"num", Compare::num},
                                               {"nan", Compare::nan}}};

constexpr Names<Combine, 3> combine_names = {{{"and", Combine::and_}, {"or", Combine::or_}, {"xor", Combine::xor_}}};

constexpr Names<Mode, 18> mode_names = {{{"bfly", Mode::bfly},
                                         {"up", Mode::up},
                                         {"down", Mode::down},
                                         {"idx", Mode::idx},
                                         {"all", Mode::all},
                                         {"any", Mode::any},
                                         {"uni", Mode::uni},
                                         {"ballot", Mode::ballot},
                                         {"add", Mode::add},
                                         {"min", Mode::min},
                                         {"max", Mode::max},
                                         {"inc", Mode::inc},
                                         {"dec", Mode::dec},
                                         {"cas", Mode::cas},
                                         {"exch", Mode::exch},
                                         {"and", Mode::and_},
                                         {"or", Mode::or_},
                                         {"xor", Mode::xor_}}};

template <class Value, std::size_t n>
std::optional<Value> find(const Names<Value, n>& names, std::string_view word) {
  for (const auto& [name, value] : names)
    if (name == word) return value;
  return std::nullopt;
}

/// The words of a mnemonic behind its name, taken one after another; what is left at the end is unknown.
class Words {
 public:
  explicit Words(std::string_view mnemonic) : mnemonic_(mnemonic) {
    std::vector<std::string_view> all;
    for (std::size_t at = 0; at <= mnemonic.size();) {
      const std::size_t dot = std::min(mnemonic.find('.', at), mnemonic.size());
      all.push_back(mnemonic.substr(at, dot - at));
      at = dot + 1;
    }
    name_ = all.front();
    rest_.assign(all.begin() + 1, all.end());
  }

  std::string_view name() const { return name_; }
  /// Whether the word is there, anywhere; then it is taken.
  bool take(std::string_view word) {
    const auto it = std::ranges::find(rest_, word);
    if (it == rest_.end()) return false;
    rest_.erase(it);
    return true;
  }
  /// The next word, if it is one of these names.
  template <class Value, std::size_t n>
  std::optional<Value> next(const Names<Value, n>& names) {
    if (rest_.empty()) return std::nullopt;
    const auto value = find(names, rest_.front());
    if (value) rest_.erase(rest_.begin());
    return value;
  }
  template <class Value, std::size_t n>
  Value need(const Names<Value, n>& names, const char* what) {
    const auto value = next(names);
    if (!value) throw UnknownPtx(fmt::format("'{}' has no {} that is known here", mnemonic_, what));
    return *value;
  }
  Type type() { return need(type_names, "type"); }
  /// Words that say how caches behave: nothing that a result depends on.
  void ignore_cache_hints() {
    std::erase_if(rest_, [](std::string_view w) {
      return w.starts_with("L1::") || w.starts_with("L2::") || w == "ca" || w == "cg" || w == "cs" || w == "lu" ||
             w == "cv" || w == "wb" || w == "wt" || w == "nc";
    });
  }
  /// Memory order and scope. All accesses of this executor are sequentially consistent within a block and blocks run
  /// one after another.
  void ignore_order() {
    for (const std::string_view w :
         {"weak", "relaxed", "acquire", "release", "acq_rel", "volatile", "sc", "cta", "gpu", "sys", "gl", "noftz"})
      take(w);
  }
  void end() const {
    if (!rest_.empty()) throw UnknownPtx(fmt::format("'{}': '.{}' is not known here", mnemonic_, rest_.front()));
  }
  [[noreturn]] void unknown() const { throw UnknownPtx(fmt::format("'{}' is not known here", mnemonic_)); }

 private:
  std::string_view mnemonic_, name_;
  std::vector<std::string_view> rest_;
};

void take_float_modifiers(Words& w, Instruction& i) {
  if (const auto r = w.next(round_names)) i.round = *r;
  i.approximate = w.take("approx") || w.take("full");
  i.flush = w.take("ftz");
  i.saturate = w.take("sat");
  if (w.take("relu")) i.mode = Mode::relu;
  if (w.take("NaN")) i.mode = Mode::notanumber;
}

void decode_arithmetic(Words& w, Instruction& i, Opcode low, Opcode high, Opcode wide) {
  i.opcode = low;
  if (w.take("hi")) i.opcode = high;
  if (w.take("wide")) i.opcode = wide;
  w.take("lo");
  take_float_modifiers(w, i);
  i.type = w.type();
}

void decode_convert(Words& w, Instruction& i) {
  i.opcode = Opcode::cvt;
  take_float_modifiers(w, i);
  i.type = w.type();
  i.from = w.type();
  if (i.type == Type::bf16x2 || i.type == Type::f16x2) {
    if (i.from != Type::f32) w.unknown();
    i.opcode = Opcode::cvt_pack;
  }
}

void decode_memory(Words& w, Instruction& i, Opcode opcode) {
  i.opcode = opcode;
  w.ignore_cache_hints();
  w.ignore_order();
  if (const auto space = w.next(space_names)) i.space = *space;
  if (w.take("v2")) i.vector = 2;
  if (w.take("v4")) i.vector = 4;
  if (w.take("v8")) i.vector = 8;
  if (opcode == Opcode::atom || opcode == Opcode::red) i.mode = w.need(mode_names, "operation");
  i.type = w.type();
}

void decode_async_copy(Words& w, Instruction& i) {
  if (!w.take("async")) w.unknown();
  if (w.take("commit_group")) {
    i.opcode = Opcode::cp_async_commit;
  } else if (w.take("wait_all") || w.take("wait_group")) {
    i.opcode = Opcode::cp_async_wait;
  } else {
    i.opcode = Opcode::cp_async;
    w.ignore_cache_hints();
    if (!(w.take("shared") || w.take("shared::cta")) || !w.take("global")) w.unknown();
  }
}

void decode_matrix_product(Words& w, Instruction& i) {
  i.opcode = Opcode::mma;
  if (!w.take("sync") || !w.take("aligned")) w.unknown();
  if (w.take("m16n8k16")) i.shape_k = 16;
  else if (w.take("m16n8k8")) i.shape_k = 8;
  else w.unknown();
  if (!w.take("row") || !w.take("col")) w.unknown();
  i.type = w.type();  // of the result
  i.from = w.type();  // of both factors
  if (w.type() != i.from || w.type() != i.type || i.type != Type::f32) w.unknown();
  const bool half = i.from == Type::bf16 || i.from == Type::f16;
  if (!half && !(i.from == Type::tf32 && i.shape_k == 8)) w.unknown();
}

void decode_load_matrix(Words& w, Instruction& i) {
  i.opcode = Opcode::ldmatrix;
  if (!w.take("sync") || !w.take("aligned") || !w.take("m8n8")) w.unknown();
  i.vector = w.take("x4") ? 4 : w.take("x2") ? 2 : w.take("x1") ? 1 : 0;
  if (i.vector == 0) w.unknown();
  i.transposed = w.take("trans");
  if (!(w.take("shared") || w.take("shared::cta"))) w.unknown();
  i.space = Space::shared;
  i.type = w.type();
}

void decode_barrier(Words& w, Instruction& i) {
  if (w.take("warp")) {
    i.opcode = Opcode::bar_warp;
    if (!w.take("sync")) w.unknown();
    return;
  }
  i.opcode = Opcode::bar_sync;
  w.take("cta");
  w.take("aligned");
  if (!w.take("sync")) w.unknown();
}

bool decode_warp(Words& w, Instruction& i) {
  const std::string_view name = w.name();
  if (name == "shfl" || name == "vote" || name == "match" || name == "redux") {
    if (!w.take("sync")) w.unknown();
    i.opcode = name == "shfl"    ? Opcode::shfl
               : name == "vote"  ? Opcode::vote
               : name == "match" ? Opcode::match
                                 : Opcode::redux;
    i.mode = w.need(mode_names, "mode");
    if (name == "match") w.take("sync");
    i.type = w.type();
    return true;
  }
  if (name == "activemask") {
    i.opcode = Opcode::activemask;
    i.type = w.type();
    return true;
  }
  return false;
}

bool decode_comparison(Words& w, Instruction& i) {
  if (w.name() != "setp" && w.name() != "set") return false;
  i.opcode = w.name() == "setp" ? Opcode::setp : Opcode::set;
  i.compare = w.need(compare_names, "comparison");
  if (const auto c = w.next(combine_names)) i.combine = *c;
  i.flush = w.take("ftz");
  i.type = w.type();
  if (i.opcode == Opcode::set) i.from = w.type();
  return true;
}

bool decode_shift(Words& w, Instruction& i) {
  if (w.name() != "shf") return false;
  i.opcode = Opcode::shf;
  i.mode = w.take("l") ? Mode::left : w.take("r") ? Mode::right : Mode::none;
  i.saturate = w.take("clamp");
  w.take("wrap");
  if (i.mode == Mode::none) w.unknown();
  i.type = w.type();
  return true;
}

/// Instructions that are a name, float modifiers and a type.
constexpr Names<Opcode, 34> plain_names = {{{"add", Opcode::add},     {"sub", Opcode::sub},
                                            {"fma", Opcode::fma},     {"div", Opcode::div},
                                            {"rem", Opcode::rem},     {"neg", Opcode::neg},
                                            {"abs", Opcode::abs},     {"min", Opcode::min},
                                            {"max", Opcode::max},     {"copysign", Opcode::copysign},
                                            {"and", Opcode::and_},    {"or", Opcode::or_},
                                            {"xor", Opcode::xor_},    {"not", Opcode::not_},
                                            {"shl", Opcode::shl},     {"shr", Opcode::shr},
                                            {"bfe", Opcode::bfe},     {"bfi", Opcode::bfi},
                                            {"prmt", Opcode::prmt},   {"lop3", Opcode::lop3},
                                            {"popc", Opcode::popc},   {"clz", Opcode::clz},
                                            {"brev", Opcode::brev},   {"bfind", Opcode::bfind},
                                            {"rcp", Opcode::rcp},     {"sqrt", Opcode::sqrt},
                                            {"rsqrt", Opcode::rsqrt}, {"ex2", Opcode::ex2},
                                            {"lg2", Opcode::lg2},     {"sin", Opcode::sin},
                                            {"cos", Opcode::cos},     {"tanh", Opcode::tanh},
                                            {"selp", Opcode::selp},   {"mov", Opcode::mov}}};

bool decode_control(Words& w, Instruction& i) {
  const std::string_view name = w.name();
  if (name == "bra") i.opcode = Opcode::bra, w.take("uni");
  else if (name == "ret" || name == "exit") i.opcode = Opcode::ret, w.take("uni");
  else if (name == "trap") i.opcode = Opcode::trap;
  else if (name == "bar" || name == "barrier") decode_barrier(w, i);
  else if (name == "membar" || name == "fence") i.opcode = Opcode::fence, w.ignore_order();
  else return false;
  return true;
}

bool decode_access(Words& w, Instruction& i) {
  const std::string_view name = w.name();
  if (name == "ld" || name == "ldu") decode_memory(w, i, Opcode::ld);
  else if (name == "st") decode_memory(w, i, Opcode::st);
  else if (name == "atom") decode_memory(w, i, Opcode::atom);
  else if (name == "red") decode_memory(w, i, Opcode::red);
  else if (name == "cp") decode_async_copy(w, i);
  else if (name == "ldmatrix") decode_load_matrix(w, i);
  else if (name == "cvta") {
    i.opcode = w.take("to") ? Opcode::cvta_to : Opcode::cvta;
    i.space = w.need(space_names, "space");
    i.type = w.type();
  } else {
    return false;
  }
  return true;
}

}  // namespace

std::string_view name_of(Type type) {
  for (const auto& [name, value] : type_names)
    if (value == type) return name;
  return "none";
}

Instruction decode(std::string_view mnemonic) {
  Words w(mnemonic);
  Instruction i;
  const std::string_view name = w.name();
  if (decode_control(w, i) || decode_access(w, i) || decode_warp(w, i) || decode_comparison(w, i) ||
      decode_shift(w, i)) {
  } else if (name == "mul") {
    decode_arithmetic(w, i, Opcode::mul, Opcode::mul_hi, Opcode::mul_wide);
  } else if (name == "mad") {
    decode_arithmetic(w, i, Opcode::mad, Opcode::mad_hi, Opcode::mad_wide);
  } else if (name == "bfind" && w.take("shiftamt")) {
    i.opcode = Opcode::bfind_shift;
    i.type = w.type();
  } else if (name == "cvt") {
    decode_convert(w, i);
  } else if (name == "mma") {
    decode_matrix_product(w, i);
  } else if (const auto opcode = find(plain_names, name)) {
    i.opcode = *opcode;
    take_float_modifiers(w, i);
    i.type = w.type();
  } else {
    w.unknown();
  }
  w.end();
  return i;
}

}  // namespace hotbunk::ptx
