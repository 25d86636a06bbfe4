#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>

#include "base/format.h"
#include "graph/print.h"

namespace hotbunk {
namespace {

class Differ {
 public:
  Differ(const Plan& a, const Plan& b) : a_(a), b_(b) {}

  std::string run() {
    scalar("scenario", a_.scenario, b_.scenario);
    scalar("chunk_bytes", a_.chunk_bytes, b_.chunk_bytes);
    scalar("device_capacity_bytes", a_.device_capacity_bytes, b_.device_capacity_bytes);
    scalar("host_capacity_bytes", a_.host_capacity_bytes, b_.host_capacity_bytes);
    scalar("overhead_bytes", a_.overhead_bytes, b_.overhead_bytes);
    scalar("ranks", a_.num_ranks(), b_.num_ranks());
    streams();
    extents();
    groups();
    if (a_.roles != b_.roles)
      line('~', fmt::format("roles: {} -> {}", fmt::join(a_.roles, ", "), fmt::join(b_.roles, ", ")));
    phases();
    scalar("programs", a_.programs.size(), b_.programs.size());
    if (a_.program_of_rank != b_.program_of_rank) line('~', "which rank runs which program");
    for (std::size_t i = 0; i < std::min(a_.programs.size(), b_.programs.size()); ++i) program(i);
    return std::move(out_);
  }

 private:
  void line(char sign, const std::string& text) { out_ += fmt::format("{} {}{}\n", sign, where_, text); }

  template <class T>
  void scalar(const char* what, const T& a, const T& b) {
    if (a != b) line('~', fmt::format("{}: {} -> {}", what, a, b));
  }

  void streams() {
    const auto text = [](const std::vector<Stream>& streams) {
      std::string out;
      for (const Stream& s : streams) out += fmt::format("{}{} ({})", out.empty() ? "" : ", ", s.name, name_of(s.kind));
      return out;
    };
    scalar("streams", text(a_.streams), text(b_.streams));
  }

  void extents() {
    const auto text = [](const std::vector<Extent>& extents) {
      std::string out;
      for (const Extent& e : extents) out += fmt::format("{}{} ({})", out.empty() ? "" : ", ", e.name, print_extent(e));
      return out;
    };
    scalar("extents", text(a_.extents), text(b_.extents));
  }

  void groups() {
    // Ops refer to families by number: same names in another order is a change too.
    for (std::size_t i = 0; i < std::max(a_.groups.size(), b_.groups.size()); ++i) {
      if (i >= b_.groups.size()) line('-', fmt::format("group {}", a_.groups[i].name));
      else if (i >= a_.groups.size()) line('+', fmt::format("group {}", b_.groups[i].name));
      else if (!(a_.groups[i] == b_.groups[i]))
        line('~', fmt::format("group {}: {} -> {}, {} -> {} groups", i, a_.groups[i].name, b_.groups[i].name,
                              a_.groups[i].groups.size(), b_.groups[i].groups.size()));
    }
  }

  void phases() {
    const std::size_t before = out_.size();
    for (const PhaseInfo& phase : a_.phases) {
      const std::int32_t in_b = b_.phase_index(phase.name);
      if (in_b < 0) line('-', fmt::format("phase {}", phase.name));
      else if (!(b_.phases[static_cast<std::size_t>(in_b)] == phase))
        line('~', fmt::format("phase {}: when it runs, who drives it or who plays it", phase.name));
    }
    for (const PhaseInfo& phase : b_.phases)
      if (a_.phase_index(phase.name) < 0) line('+', fmt::format("phase {}", phase.name));
    if (out_.size() == before && a_.phases != b_.phases) line('~', "order of phases");
  }

  void program(std::size_t index) {
    const Program &a = a_.programs[index], &b = b_.programs[index];
    if (a == b) return;
    where_ = fmt::format("program {}: ", index);
    scalar("events", a.num_events, b.num_events);
    scalar("role", a.role, b.role);
    by_name(
        "section", a.sections, b.sections, [](const Section& x, bool) { return fmt::format(" of {} bytes", x.bytes); },
        [&](const Section& x, const Section& y) {
          line('~', fmt::format("section {}: {} -> {} bytes{}", x.name, x.bytes, y.bytes,
                                x.space == y.space ? "" : ", in another space"));
        });
    if (std::ranges::is_permutation(a.sections, b.sections, {}, &Section::name, &Section::name) &&
        !std::ranges::equal(a.sections, b.sections, {}, &Section::name, &Section::name))
      line('~', "order of sections");
    slot_limits(a, b);
    buffers(a, b);
    bodies(a, b);
    for (std::size_t p = 0; p < a_.phases.size(); ++p) {
      const std::int32_t in_b = b_.phase_index(a_.phases[p].name);
      if (in_b >= 0) blocks(a_.phases[p].name, a, a.phases[p], b, b.phases[static_cast<std::size_t>(in_b)]);
    }
    where_.clear();
  }

  void slot_limits(const Program& a, const Program& b) {
    const auto text = [](const Program& p, std::size_t i) {
      if (i >= p.slot_limits.size()) return std::string("none");
      const SlotLimit& limit = p.slot_limits[i];
      return fmt::format("{}, {} for {} turns", limit.name, limit.slots, limit.turns.size());
    };
    for (std::size_t i = 0; i < std::max(a.slot_limits.size(), b.slot_limits.size()); ++i)
      if (const std::string was = text(a, i), is = text(b, i); was != is)
        line('~', fmt::format("slots: {} -> {}", was, is));
  }

  static std::string describe(const Program& p, const Buffer& b) {
    return fmt::format("{} {} {} at {}+{}", format_bytes(static_cast<double>(b.bytes())), name_of(b.dtype),
                       name_of(b.category), p.section(b.section).name, b.offset);
  }

  /// Things with names, the n-th of a name with the n-th: describe_one(thing, whether it is of the former plan) for
  /// those that only one side has, on_change(a, b) for those that both have and that differ.
  template <class Thing, class Describe, class OnChange>
  void by_name(const char* what, const std::vector<Thing>& a, const std::vector<Thing>& b, Describe&& describe_one,
               OnChange&& on_change) {
    std::multimap<std::string, const Thing*> in_b;
    for (const Thing& thing : b) in_b.emplace(thing.name, &thing);
    for (const Thing& thing : a) {
      const auto it = in_b.find(thing.name);
      if (it == in_b.end()) {
        line('-', fmt::format("{} {}{}", what, thing.name, describe_one(thing, true)));
        continue;
      }
      if (!(*it->second == thing)) on_change(thing, *it->second);
      in_b.erase(it);
    }
    for (const auto& [name, thing] : in_b) line('+', fmt::format("{} {}{}", what, name, describe_one(*thing, false)));
  }

  void buffers(const Program& a, const Program& b) {
    by_name(
        "buffer", a.buffers, b.buffers,
        [&](const Buffer& x, bool former) { return ": " + describe(former ? a : b, x); },
        [&](const Buffer& x, const Buffer& y) {
          line('~', fmt::format("buffer {}: {} -> {}", x.name, describe(a, x), describe(b, y)));
        });
  }

  void bodies(const Program& a, const Program& b) {
    by_name(
        "body", a.bodies, b.bodies, [](const Body& x, bool) { return fmt::format(" of {} ops", x.ops.size()); },
        [&](const Body& x, const Body& y) { one_body(a, x, b, y); });
  }

  void one_body(const Program& pa, const Body& a, const Program& pb, const Body& b) {
    const std::string outer = where_;
    where_ += fmt::format("body {}: ", a.name);
    scalar("ports", a.num_ports, b.num_ports);
    if (a.locals != b.locals) line('~', fmt::format("locals: {} -> {}", locals_text(a), locals_text(b)));
    ops(pa, a, pb, b);
    where_ = outer;
  }

  static std::string locals_text(const Body& body) {
    std::string out;
    for (const Buffer& b : body.locals)
      out += fmt::format("{}{} {}[{}]", out.empty() ? "" : ", ", b.name, name_of(b.dtype), b.elements);
    return out.empty() ? "none" : out;
  }

  void blocks(const std::string& phase, const Program& pa, const std::vector<Block>& a, const Program& pb,
              const std::vector<Block>& b) {
    const std::string outer = where_;
    for (std::size_t i = 0; i < std::max(a.size(), b.size()); ++i) {
      where_ = fmt::format("{}{}[{}] ", outer, phase, i);
      if (i >= b.size()) line('-', fmt::format("block {} of {} calls", a[i].name, a[i].calls.size()));
      else if (i >= a.size()) line('+', fmt::format("block {} of {} calls", b[i].name, b[i].calls.size()));
      else calls(pa, a[i], pb, b[i]);
    }
    where_ = outer;
  }

  /// Calls are matched by name and body, the n-th with the n-th; then by their text, so that a buffer that only has
  /// another number is no change. Where only locals lie elsewhere, or events have other numbers, one line says so.
  void calls(const Program& pa, const Block& a, const Program& pb, const Block& b) {
    if (a == b && pa.buffers == pb.buffers) return;
    scalar("name of the block", a.name, b.name);
    scalar("enters", name_of(a.enters), name_of(b.enters));
    scalar("its section", pa.section(a.section).name, pb.section(b.section).name);
    const auto key = [](const Program& p, const Call& c) {
      return std::pair(c.name, p.bodies[static_cast<std::size_t>(c.body)].name);
    };
    std::multimap<std::pair<std::string, std::string>, const Call*> in_b;
    for (const Call& call : b.calls) in_b.emplace(key(pb, call), &call);
    bool same_set = true;
    std::int64_t renumbered = 0;
    for (const Call& call : a.calls) {
      const auto it = in_b.find(key(pa, call));
      const std::string text = print_call(a_, pa, call, false);
      if (it == in_b.end()) {
        line('-', text), same_set = false;
        continue;
      }
      if (const std::string other = print_call(b_, pb, *it->second, false); other != text)
        line('-', text), line('+', other), same_set = false;
      else if (print_call(a_, pa, call) != print_call(b_, pb, *it->second)) ++renumbered;
      in_b.erase(it);
    }
    for (const auto& [name, call] : in_b) line('+', print_call(b_, pb, *call, false)), same_set = false;
    if (renumbered > 0) line('~', fmt::format("{} calls with locals elsewhere, or other events", renumbered));
    if (!same_set) return;
    for (std::size_t i = 0; i < a.calls.size(); ++i)
      if (key(pa, a.calls[i]) != key(pb, b.calls[i]))
        return line('~',
                    fmt::format("order of calls from number {}: '{}' -> '{}'", i, a.calls[i].name, b.calls[i].name));
  }

  /// Ops are matched by kind and name, the n-th with the n-th; then by their text; then exactly.
  void ops(const Program& pa, const Body& a, const Program& pb, const Body& b) {
    std::multimap<std::pair<OpKind, std::string>, const Op*> in_b;
    for (const Op& op : b.ops) in_b.emplace(std::pair(op.kind, op.name), &op);
    bool same_set = true;
    for (const Op& op : a.ops) {
      const auto it = in_b.find({op.kind, op.name});
      const std::string text = print_op(a_, pa, a, op);
      if (it == in_b.end()) {
        line('-', text), same_set = false;
        continue;
      }
      if (const std::string other = print_op(b_, pb, b, *it->second); other != text)
        line('-', text), line('+', other), same_set = false;
      else if (op.moves != it->second->moves) line('~', fmt::format("{}: other moves", text)), same_set = false;
      in_b.erase(it);
    }
    for (const auto& [key, op] : in_b) line('+', print_op(b_, pb, b, *op)), same_set = false;
    if (!same_set) return;
    for (std::size_t i = 0; i < a.ops.size(); ++i)
      if (a.ops[i].kind != b.ops[i].kind || a.ops[i].name != b.ops[i].name)
        return line('~', fmt::format("order of ops from number {}: {} '{}' -> {} '{}'", i, name_of(a.ops[i].kind),
                                     a.ops[i].name, name_of(b.ops[i].kind), b.ops[i].name));
  }

  const Plan &a_, &b_;
  std::string where_, out_;
};

}  // namespace

std::string diff_plans(const Plan& a, const Plan& b) {
  if (a == b) return "";
  const std::string out = Differ(a, b).run();
  // Whatever the lines above do not name (numbering of buffers or events) still is a difference.
  return out.empty() ? fmt::format("~ numbering only: hash {} -> {}\n", plan_hash(a), plan_hash(b)) : out;
}

}  // namespace hotbunk
