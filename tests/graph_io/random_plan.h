// Random plans for property tests: structurally whole (every index points somewhere), otherwise anything goes.
#pragma once
#include <algorithm>
#include <optional>
#include <string>

#include "base/rng.h"
#include "graph/catalogue.h"

namespace hotbunk::test {

class PlanMaker {
 public:
  explicit PlanMaker(std::uint64_t seed) : seed_(seed) {}

  Plan plan() {
    Plan p;
    for (std::int64_t i = 1, n = 1 + below(max_streams); i < n; ++i)
      p.streams.push_back({fmt::format("{}{}", name(), i), static_cast<StreamKind>(below(num_stream_kinds))});
    for (std::int64_t i = 0, n = below(max_extents - 1); i < n; ++i)
      p.extents.push_back({fmt::format("{}{}", name(), i), 1 + below(1 << 20), static_cast<CountedBy>(below(2))});
    num_extents_ = std::ssize(p.extents);
    p.scenario = name();
    p.chunk_bytes = std::int64_t{1} << below(22);
    p.device_capacity_bytes = below(std::int64_t{1} << 40);
    p.host_capacity_bytes = below(std::int64_t{1} << 40);
    p.overhead_bytes = below(std::int64_t{1} << 32);
    const Rank ranks = static_cast<Rank>(1 + below(6));
    const auto programs = 1 + below(3);
    for (Rank r = 0; r < ranks; ++r) p.program_of_rank.push_back(static_cast<std::int32_t>(below(programs)));
    for (int f = 0, n = static_cast<int>(1 + below(3)); f < n; ++f) p.groups.push_back(family(ranks));
    for (int i = 0, n = static_cast<int>(1 + below(4)); i < n; ++i)
      p.phases.push_back({name(), static_cast<When>(below(3)), below(2) == 1,
                          below(2) == 1 ? 1 : static_cast<std::int32_t>(2 + below(9))});
    for (int i = 0; i < programs; ++i) p.programs.push_back(program(p));
    if (below(2) == 1) take_roles(p);
    return p;
  }

 private:
  void take_roles(Plan& p) {
    p.roles.clear();
    for (std::int64_t i = 0, n = 1 + below(3); i < n; ++i) p.roles.push_back(name());
    for (Program& program : p.programs) program.role = static_cast<std::int32_t>(below(std::ssize(p.roles)));
    for (PhaseInfo& phase : p.phases) {
      phase.players.clear();
      for (std::int32_t r = 0; r < std::ssize(p.roles); ++r)
        if (below(2) == 1) phase.players.push_back({r, static_cast<std::int32_t>(below(max_steps_back + 1))});
    }
  }

  std::int64_t below(std::int64_t n) {
    const Philox4 words = random_words(seed_, RngPurpose::test, counter_++, 0);
    return static_cast<std::int64_t>(((std::uint64_t{words[0]} << 32 | words[1]) >> 1) % static_cast<std::uint64_t>(n));
  }

  std::string name() {
    static const char* const pieces[] = {"layers.", "q_proj", "\"",   "\\",        "\n", "é",
                                         "漢",      "🚢",      "\x01", "</script>", "/",  " "};
    std::string out;
    for (std::int64_t i = 0, n = below(5); i < n; ++i) out += pieces[below(std::size(pieces))];
    return out;
  }

  GroupFamily family(Rank ranks) {
    GroupFamily f{name(), {}};
    for (Rank r = 0; r < ranks; ++r) {
      if (f.groups.empty() || below(2)) f.groups.emplace_back();
      f.groups.back().push_back(r);
    }
    return f;
  }

  Program program(const Plan& p) {
    Program out;
    for (std::int64_t i = 1, n = 1 + below(max_sections); i < n; ++i)
      out.sections.push_back({fmt::format("{}{}", name(), i), below(2) ? Space::device : Space::host});
    out.num_events = static_cast<std::int32_t>(1 + below(4));
    for (Section& section : out.sections) section.bytes = least_section_bytes + below(std::int64_t{1} << 36);
    for (std::int64_t i = 0, n = 1 + below(5); i < n; ++i)
      out.buffers.push_back({name(), static_cast<DType>(below(7)), below(std::int64_t{1} << 30),
                             static_cast<Category>(below(num_categories)), section(out), 64 * below(1 << 20)});
    for (std::int64_t i = 0, n = below(3); i < n; ++i) {
      SlotLimit limit{name(), static_cast<std::int32_t>(1 + below(3)), {}};
      for (std::int64_t t = 0, m = below(4); t < m; ++t) {
        auto& turn = limit.turns.emplace_back();
        for (std::int64_t k = below(3); k > 0; --k)
          turn.push_back(static_cast<BufferId>(below(static_cast<std::int64_t>(out.buffers.size()))));
      }
      out.slot_limits.push_back(std::move(limit));
    }
    for (std::int64_t i = 0, n = 1 + below(4); i < n; ++i) out.bodies.push_back(body(p, out));
    for (std::size_t i = 0; i < p.phases.size(); ++i) {
      std::vector<Block> blocks;
      for (std::int64_t b = 0, n = below(3); b < n; ++b) {
        Block block{name(), {}};
        block.enters = static_cast<Enters>(below(num_enters));
        if (block.enters != Enters::nothing) block.section = section(out);
        for (std::int64_t k = 0, m = below(6); k < m; ++k)
          if (std::optional<Call> c = call(p, out)) block.calls.push_back(std::move(*c));
        blocks.push_back(std::move(block));
      }
      out.phases.push_back(std::move(blocks));
    }
    return out;
  }

  SectionId section(const Program& program) { return static_cast<SectionId>(below(std::ssize(program.sections))); }
  StreamId stream(const Plan& p) { return static_cast<StreamId>(below(std::ssize(p.streams))); }

  Body body(const Plan& p, const Program& program) {
    Body out;
    out.name = name();
    out.num_ports = static_cast<std::int32_t>(below(3));
    for (std::int64_t i = 0, n = below(3) + (out.num_ports == 0 ? 1 : 0); i < n; ++i)
      out.locals.push_back({name(), static_cast<DType>(below(7)), below(std::int64_t{1} << 20),
                            static_cast<Category>(below(num_categories)), transient_section, 0});
    for (std::int64_t k = 0, m = below(6); k < m; ++k) out.ops.push_back(op(p, program, out));
    return out;
  }

  /// Of a body whose windows fit what its ports are bound to; nothing if the buffers drawn are too small.
  std::optional<Call> call(const Plan& p, const Program& program) {
    Call out;
    out.body = static_cast<std::int32_t>(below(static_cast<std::int64_t>(program.bodies.size())));
    const Body& b = program.bodies[static_cast<std::size_t>(out.body)];
    out.name = name();
    for (std::int32_t i = 0; i < b.num_ports; ++i)
      out.ports.push_back({static_cast<BufferId>(below(static_cast<std::int64_t>(program.buffers.size()))),
                           below(2) ? 0 : 64 * below(100)});
    for (std::size_t i = 0; i < b.locals.size(); ++i) out.locals.push_back(64 * below(1 << 20));
    std::int32_t before = 0;
    for (std::int64_t i = 0, n = below(4); i < n; ++i) {
      before += static_cast<std::int32_t>(below(static_cast<std::int64_t>(b.ops.size()) + 1 - before));
      out.marks.push_back({before, below(2) ? OpKind::record : OpKind::wait, stream(p),
                           static_cast<EventId>(below(program.num_events))});
    }
    if (!check_windows(program, out, windows_of(b)).empty()) return std::nullopt;
    return out;
  }

  Op op(const Plan& p, const Program& program, const Body& in) {
    Op out;
    do out.kind = static_cast<OpKind>(below(num_op_kinds));
    while (out.kind == OpKind::record || out.kind == OpKind::wait);
    out.stream = stream(p);
    out.name = name();
    for (std::int64_t i = 0, n = below(3); i < n; ++i) out.inputs.push_back(tensor(in));
    for (std::int64_t i = 0, n = below(3); i < n; ++i) out.outputs.push_back(tensor(in));
    for (std::int64_t i = 0, n = below(4); i < n; ++i) out.attrs.push_back(attr());
    for (std::int64_t i = 0, n = below(3); i < n; ++i) out.moves.push_back({side(p, out.inputs), side(p, out.outputs)});
    if (out.kind == OpKind::priced || below(8) == 0)
      for (std::int64_t i = 0, tokens = below(3), n = 1 + below(3); i < n; ++i, tokens += 1 + below(9))
        out.prices.push_back({tokens, 1e-6 * static_cast<double>(below(1000)), 1e-12 * static_cast<double>(below(7)),
                              static_cast<double>(below(1 << 20))});
    out.group = static_cast<GroupId>(below(static_cast<std::int64_t>(p.groups.size())));
    out.buffer = static_cast<BufferId>(below(in.num_slots()));
    if (below(2)) {
      out.section = section(program);
      out.map_end = below(least_section_bytes);
      out.map_begin = below(out.map_end + 1);
    }
    return out;
  }

  Tensor tensor(const Body& in) {
    Tensor t;
    t.buffer = static_cast<BufferId>(below(in.num_slots()));
    t.dtype = static_cast<DType>(below(7));
    t.rank = static_cast<std::uint8_t>(below(4));
    const std::int64_t bytes =
        t.buffer < in.num_ports ? 4096 : in.locals[static_cast<std::size_t>(t.buffer - in.num_ports)].bytes();
    std::int64_t room = bytes / size_of(t.dtype);
    if (room == 0 && t.rank == 0) t.rank = 1;
    for (std::size_t d = 0; d < t.rank; ++d) {
      t.shape[d] = {below(room + 1), static_cast<ExtentId>(below(num_extents_ + 1) - 1), below(3) * below(1000)};
      room = t.shape[d].size == 0 ? room : room / t.shape[d].size;
    }
    const std::int64_t width = size_of(t.dtype);
    t.offset_bytes = width * below((bytes - t.capacity_bytes()) / width + 1);
    return t;
  }

  std::pair<Attr, AttrValue> attr() {
    const auto key = static_cast<Attr>(below(num_attrs));
    switch (below(4)) {
      case 0:
        return {key, below(std::int64_t{1} << 62) * (below(2) ? 1 : -1)};
      case 1:
        return {key, std::numeric_limits<double>::infinity()};
      case 2:
        return {key, static_cast<double>(below(7)) - 3.0};  // whole: must come back as a double
      default:
        return {key, static_cast<double>(below(std::int64_t{1} << 62)) * 1e-23};
    }
  }

  Side side(const Plan& p, const std::vector<Tensor>& tensors) {
    Side out;
    if (!tensors.empty()) out.tensor = static_cast<std::int32_t>(below(static_cast<std::int64_t>(tensors.size())));
    const std::int64_t most = std::int64_t{1} << 29;
    Piece& piece = out.piece;
    piece = {below(most), 0, below(most), 0, below(most), below(most)};
    piece.row_end = piece.row_begin + below(most), piece.col_end = piece.col_begin + below(most);
    if (below(2) == 0) return out;
    out.parts = {static_cast<Holds>(below(num_holds)),
                 static_cast<GroupId>(below(static_cast<std::int64_t>(p.groups.size()) + 1)) - 1,
                 static_cast<std::int32_t>(1 + below(1000)),
                 static_cast<std::int32_t>(1 + below(9)),
                 below(most),
                 below(most),
                 below(most),
                 below(most),
                 {}};
    if (!p.groups.empty() && below(3) == 0)
      out.parts.within = {static_cast<GroupId>(below(static_cast<std::int64_t>(p.groups.size()))),
                          static_cast<std::int32_t>(1 + below(100)),
                          static_cast<std::int32_t>(1 + below(3)),
                          below(most),
                          below(most),
                          below(most)};
    return out;
  }

  static constexpr std::int64_t least_section_bytes = 1 << 20;
  std::uint64_t seed_, counter_ = 0;
  std::int64_t num_extents_ = 0;  // of the plan
};

inline Plan random_plan(std::uint64_t seed) { return PlanMaker(seed).plan(); }

}  // namespace hotbunk::test
