// Every op at drawn shapes, on every backend, beside what its definition comes to in fp64 (oracle.h).
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>
#include <sstream>

#include "base/dtype.h"
#include "base/file.h"
#include "graph/catalogue.h"
#include "tests/conformance/drawn_cases.h"
#include "tests/conformance/oracle.h"
#include "tests/conformance/play.h"
#include "tests/paths.h"

namespace hotbunk::conformance {
namespace {

constexpr auto guard_byte = std::byte{0x5a};

bool has_wholes(DType t) { return t == DType::i32 || t == DType::i64; }

template <class T>
T element_at(const Bytes& bytes, std::int64_t i) {
  T value;
  std::memcpy(&value, bytes.data() + RankProgram::guard + i * static_cast<std::int64_t>(sizeof value), sizeof value);
  return value;
}
double number_at(const Bytes& bytes, DType dtype, std::int64_t i) {
  if (dtype == DType::bf16) return to_f32(bf16{element_at<std::uint16_t>(bytes, i)});
  return element_at<float>(bytes, i);
}
/// Two's complement.
std::uint64_t whole_at(const Bytes& bytes, DType dtype, std::int64_t i) {
  if (dtype == DType::i32) return static_cast<std::uint64_t>(std::int64_t{element_at<std::int32_t>(bytes, i)});
  return element_at<std::uint64_t>(bytes, i);
}

/// Guards, the operand's numbers (NaN or an impossible integer of one that the op must write), guards.
Bytes image_of(const Operand& o, const Tensor& t) {
  Bytes bytes(static_cast<std::size_t>(t.capacity_bytes() + 2 * RankProgram::guard), guard_byte);
  std::byte* at = bytes.data() + RankProgram::guard;
  if (!has_wholes(o.dtype)) std::memset(at, 0xff, static_cast<std::size_t>(t.capacity_bytes()));
  const auto put = [&at](auto value) { std::memcpy(at, &value, sizeof value), at += sizeof value; };
  for (std::int64_t i = 0; o.value && i < t.capacity(); ++i) {
    const double v = o.value(i);
    if (o.dtype == DType::i32) put(static_cast<std::int32_t>(v));
    else if (o.dtype == DType::i64) put(static_cast<std::int64_t>(v));
    else if (o.dtype == DType::bf16) put(to_bf16(static_cast<float>(v)).bits);
    else put(static_cast<float>(v));
  }
  return bytes;
}
/// What an op finds in such an image, exactly.
Numbers numbers_of(const Operand& o, const Bytes& image) {
  std::int64_t n = 1;
  for (const std::int64_t extent : o.shape) n *= extent;
  std::vector<double> values;
  for (std::int64_t i = 0; i < n; ++i)
    values.push_back(has_wholes(o.dtype) ? static_cast<double>(static_cast<std::int64_t>(whole_at(image, o.dtype, i)))
                                         : number_at(image, o.dtype, i));
  return {o.dtype, o.shape, std::move(values)};
}

/// All cases in one program: each fed, computed and fetched, by as many ranks.
struct DrawnPlan {
  explicit DrawnPlan(const DrawnCases& drawn, std::size_t ranks = 1) {
    script.sizes = drawn.sizes;
    for (const OpCase& c : drawn.cases) {
      std::vector<Tensor> of;
      for (const Operand& o : c.operands) {
        of.push_back(program.tensor(o.name, o.dtype, o.shape));
        program.feed(of.back());
        script.feeds["feed " + o.name] = image_of(o, of.back());
      }
      Op op = toy::op(c.kind, streams::compute, c.operands.front().name);
      for (const std::size_t i : c.inputs) op.inputs.push_back(of[i]);
      for (const std::size_t i : c.outputs) op.outputs.push_back(of[i]);
      op.attrs = c.attrs, op.moves = c.moves;
      if (op.has(Attr::vocab_stride) || op.has(Attr::ranks) || op.has(Attr::tp) || c.kind == OpKind::expert_arrivals ||
          c.kind == OpKind::copy_arrivals)
        op.group = 0;
      INFO(op.name);
      REQUIRE_THAT(check_op(op), Catch::Equals(""));
      if (const auto w = prepacked_operand(c)) {
        Op prepack = toy::op(OpKind::prepack, streams::compute, op.name + ".prepack");
        prepack.inputs = prepack.outputs = {of[*w]};
        program.add(prepack);
      }
      program.add(op);
      for (const Tensor& t : of) program.fetch(t);
    }
    plan = plan_of(std::vector<Program>(ranks, program.program()));
  }
  RankProgram program;
  Plan plan;
  Script script;
};

/// A tolerance beyond this part of a tensor's largest number would let pass what is wrong. It is reached where sums
/// cancel: a thousandth in fp32, whose bounds of 300 terms are 4e-5 of their magnitudes, an eighth where keys were made
/// in bf16 of latents.
double widest(DType result, DType activations) {
  return result == DType::bf16 || activations == DType::bf16 ? 0x1p-3 : 0x1p-10;
}

void check_numbers(const Wanted& wanted, const Bytes& got, DType activations) {
  double largest = 0.0, error = 0.0;
  const auto n = std::ssize(wanted.numbers);
  for (std::int64_t i = 0; i < n; ++i) {
    const Bounded& b = wanted.numbers[static_cast<std::size_t>(i)];
    const double x = number_at(got, wanted.dtype, i);
    if (std::isfinite(b.value)) largest = std::max(largest, std::abs(b.value)), error = std::max(error, b.error);
    // Of no key the log-sum-exp is -inf. Below the smallest normal number kernels may leave zero.
    if (x == b.value || std::abs(x - b.value) <= b.error + 0x1p-126) continue;
    INFO("element " << i << " of " << n << ": " << x << ", not " << b.value << " to within " << b.error);
    CHECK(false);
    return;
  }
  INFO("a tolerance of " << error << " beside numbers of up to " << largest);
  CHECK(error <= widest(wanted.dtype, activations) * largest);
}

void check_wholes(const Wanted& wanted, const Bytes& got) {
  for (std::int64_t i = 0; i < std::ssize(wanted.wholes); ++i) {
    const std::uint64_t x = whole_at(got, wanted.dtype, i), w = wanted.wholes[static_cast<std::size_t>(i)];
    if (x == w) continue;
    INFO("element " << i << " of " << wanted.wholes.size());
    CHECK(static_cast<std::int64_t>(x) == static_cast<std::int64_t>(w));
    return;
  }
}

/// A case's outputs on one rank, in fp64.
std::vector<Wanted> wanted_of(const OpCase& c, const DrawnPlan& p, Rank rank) {
  std::vector<Numbers> given;
  for (const Operand& o : c.operands) given.push_back(numbers_of(o, p.script.feeds.at("feed " + o.name)));
  return expected(c, given, rank);
}

/// Those of a backend are these; all else is as it was fed.
void check_case(const OpCase& c, const std::vector<Wanted>& wanted, const DrawnPlan& p, DType activations,
                const Played& played, Rank rank) {
  for (std::size_t i = 0; i < c.operands.size(); ++i) {
    const Operand& o = c.operands[i];
    INFO("operand " << i << " of " << name_of(o.dtype));
    const Bytes &was = p.script.feeds.at("feed " + o.name),
                &is = played.fetched.at("fetch " + o.name + "@" + std::to_string(rank));
    REQUIRE(is.size() == was.size());
    const auto same = [&](std::ptrdiff_t begin, std::ptrdiff_t end) {
      return std::equal(is.begin() + begin, is.begin() + end, was.begin() + begin);
    };
    const bool written = std::ranges::find(c.outputs, i) != c.outputs.end();
    const std::ptrdiff_t guard = RankProgram::guard, size = std::ssize(was);
    CHECK((written || prepacked_operand(c) == i ? same(0, guard) && same(size - guard, size) : same(0, size)));
  }
  for (std::size_t k = 0; k < wanted.size(); ++k) {
    const Operand& o = c.operands[c.outputs[k]];
    INFO("output " << k << " of " << name_of(o.dtype));
    const Bytes& got = played.fetched.at("fetch " + o.name + "@" + std::to_string(rank));
    if (has_wholes(o.dtype)) check_wholes(wanted[k], got);
    else check_numbers(wanted[k], got, activations);
  }
}

/// Each case on every backend.
void check_drawn(std::uint64_t seed, const DrawnCases& drawn, DType dtype, int ranks = 1) {
  const DrawnPlan p(drawn, static_cast<std::size_t>(ranks));
  std::vector<std::vector<Wanted>> wanted;  // by rank and there by case
  for (Rank rank = 0; rank < ranks; ++rank)
    for (const OpCase& c : drawn.cases) {
      INFO("seed " << seed << ", rank " << rank << ", " << name_of(c.kind) << " in " << name_of(dtype));
      wanted.push_back(wanted_of(c, p, rank));
    }
  for (const auto& subject : subjects()) {
    // Another transport of the CPU backend computes by the same kernels.
    if (!subject->has_values() || subject->name() == "cpu_gloo over gloo") continue;
    const Played got = play(*subject, p.plan, p.script);
    REQUIRE_THAT(got.failure(), Catch::Equals(""));
    auto of = wanted.begin();
    for (Rank rank = 0; rank < ranks; ++rank)
      for (const OpCase& c : drawn.cases) {
        INFO(subject->name() << ", seed " << seed << ", rank " << rank << ", " << name_of(c.kind) << " in "
                             << name_of(dtype));
        check_case(c, *of++, p, dtype, got, rank);
      }
  }
}

/// What graph/catalogue.h says that kinds take: names of attributes in the lines of each.
using Taken = std::set<std::pair<OpKind, Attr>>;
Taken taken_by_catalogue() {
  std::map<std::string, OpKind> kinds;
  for (int k = 0; k < num_op_kinds; ++k) kinds[std::string(name_of(static_cast<OpKind>(k)))] = static_cast<OpKind>(k);
  const auto text = read_file(std::filesystem::path(source_folder) / "graph/catalogue.h");
  REQUIRE(text);
  Taken out;
  int kind = -1;
  std::istringstream lines(*text);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("//   ")) kind = -1;
    else if (const auto found = kinds.find(line.substr(5, line.find(' ', 5) - 5)); found != kinds.end())
      kind = static_cast<int>(found->second);
    if (kind < 0) continue;
    const auto says = [&](std::string_view word) {
      const auto letter = [](char c) { return c == '_' || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9'); };
      for (std::size_t at = line.find(word); at != std::string::npos; at = line.find(word, at + 1))
        if (!letter(line[at - 1]) && (at + word.size() == line.size() || !letter(line[at + word.size()]))) return true;
      return false;
    };
    for (int a = 0; a < num_attrs; ++a)
      if (const auto attr = static_cast<Attr>(a); says(name_of(attr)) ||
                                                  (says("rope_") && name_of(attr).starts_with("rope_")) ||
                                                  (attr == Attr::vocab_end && says("vocab_begin")))
        out.emplace(static_cast<OpKind>(kind), attr);
  }
  return out;
}

/// What need not be drawn, and why.
bool need_not_be_drawn(OpKind kind, Attr attr) {
  switch (attr) {
    case Attr::rope_factor:  // of a table of frequencies that both backends are given: cpu_kernels/tokens_test.cc
    case Attr::rope_low:
    case Attr::rope_high:
    case Attr::rope_original:
    case Attr::rope_ramp_begin:
    case Attr::rope_ramp_end:
      return true;
    case Attr::count:  // a tensor's name there; of extents that the device counts: extents_test.cc
      return true;
    case Attr::max_blocks:  // an extent of tables
      return kind == OpKind::latent_attention;
    case Attr::ranks:  // a word there
      return kind == OpKind::copy_sort || kind == OpKind::router_loss;
    case Attr::heads:  // a word there
      return kind == OpKind::attention_sinks || kind == OpKind::attention_sinks_backward;
    case Attr::rope_first:  // of whole heads
      return kind == OpKind::latent_norm || kind == OpKind::latent_norm_backward;
    case Attr::prepacked:  // a word there
      return kind == OpKind::prepack;
    case Attr::gate:  // a tensor or a word there
      return kind != OpKind::fused_linear;
    case Attr::sigmoid:  // a function there
      return kind == OpKind::clamped_swiglu;
    default:
      return false;
  }
}

}  // namespace

TEST_CASE("ops of drawn shapes come to what their definitions do in fp64") {
  std::set<OpKind> kinds;
  Taken taken;
  const auto note = [&](const DrawnCases& drawn) {
    for (const OpCase& c : drawn.cases) {
      kinds.insert(c.kind);
      for (const auto& [attr, value] : c.attrs) taken.emplace(c.kind, attr);
    }
  };
  for (const std::uint64_t seed : {1, 2, 3})
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const DrawnCases drawn = drawn_cases(seed, dtype);
      check_drawn(seed, drawn, dtype);
      note(drawn), note(held_cases(seed, dtype, 2));
    }
  // What computes nothing: memory, order, feeds and fetches; what collectives move and add is exact in their own cases.
  // What a prepack leaves has no meaning but what linear makes of it, which is drawn with prepacked.
  const std::set<OpKind> aside = {OpKind::feed, OpKind::fetch, OpKind::priced, OpKind::prepack};
  for (int kind = 0; kind < num_op_kinds; ++kind) {
    const auto of = static_cast<OpKind>(kind);
    if (is_memory(of) || is_event(of) || is_communication(of) || aside.contains(of)) continue;
    INFO(name_of(of) << " is never drawn, or has no formula");
    CHECK(kinds.contains(of));
    CHECK(formula_of(of) != nullptr);
  }
  std::size_t looked_at = 0;
  for (const auto& [kind, attr] : taken_by_catalogue()) {
    if (!kinds.contains(kind) || need_not_be_drawn(kind, attr)) continue;
    ++looked_at;
    INFO(name_of(kind) << " is never drawn with " << name_of(attr));
    CHECK(taken.contains({kind, attr}));
  }
  CHECK(looked_at > 100);
}

TEST_CASE("so do ops on what ranks hold in parts: sequences, vocabularies, experts") {
  for (const std::uint64_t seed : {1, 2, 3})
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const int ranks = seed == 2 ? 2 : 3;
      check_drawn(seed, held_cases(seed, dtype, ranks), dtype, ranks);
    }
}

}  // namespace hotbunk::conformance
