// Plan: everything one RL iteration does, on every rank, as data. The simulator and the backends interpret it.
//
//   Plan ── phases (names and order, the same for all ranks), and which roles play them
//     └── programs, one per rank class ── buffers, bodies ── ops in one total order
//           └── per phase: blocks ── calls: a body, and what its ports are bound to
//
// A body is a piece of work that calls share: a layer's forward, a unit's gather. A phase has one or more blocks. They
// run once, in order, or the Driver picks the next block and its actual sizes until it says done (exec/driver.h).
// Allocation and mapping are ops too, and events stand between ops: live bytes are the walk of both, for everybody.
#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "graph/op.h"

namespace hotbunk {

enum class Space : std::uint8_t { device, host };
enum class Category : std::uint8_t {
  params,
  grads,
  optimizer,
  activations,
  kv_cache,
  communication,
  workspace,
  overhead
};
inline constexpr int num_categories = 8;
std::string_view name_of(Category);
std::string_view name_of(Space);

/// What a program's memory is divided into, one behind another. A section is mapped and unmapped, and so sleeps and
/// wakes, by itself.
struct Section {
  std::string name;  // "train_params"
  Space space = Space::device;
  std::int64_t bytes = 0;  // virtual extent, chunk-aligned
  friend bool operator==(const Section&, const Section&) = default;
};

/// A tensor's memory on one rank. `offset` counts from the base of its section and is fixed by the plan.
struct Buffer {
  std::string name;
  DType dtype = DType::f32;
  std::int64_t elements = 0;  // capacity
  Category category = Category::activations;
  SectionId section = transient_section;
  std::int64_t offset = 0;  // bytes, a multiple of 64
  std::int64_t bytes() const { return elements * size_of(dtype); }
  friend bool operator==(const Buffer&, const Buffer&) = default;
};

/// Where running a block brings a section as a whole. A rank on which the section is there already skips the block
/// (section_states.h): sleeping twice and waking twice are harmless.
enum class Enters : std::uint8_t { nothing, asleep, awake };
inline constexpr int num_enters = 3;
std::string_view name_of(Enters);

/// A straight piece of work. Where its ops say `buffer` they mean a *slot*: first come the ports, which every call
/// binds to buffers of the program, then the locals, transients that live and die inside of a call. Each call has a
/// place for each of them: they lie wherever there is room while it runs, and not side by side in one frame
/// (docs/plan.md).
struct Body {
  std::string name;  // "train.layer.forward"
  std::int32_t num_ports = 0;
  std::vector<Buffer> locals;  // `offset` is each call's to say
  std::vector<Op> ops;         // no record and no wait: events are the calls'
  std::int32_t num_slots() const { return num_ports + static_cast<std::int32_t>(locals.size()); }
  friend bool operator==(const Body&, const Body&) = default;
};

/// What a port is bound to: the buffer, and the byte of it at which the body's tensors begin to count.
struct Port {
  BufferId buffer = -1;
  std::int64_t offset_bytes = 0;
  friend bool operator==(const Port&, const Port&) = default;
};

/// An event that a call records, or that one of its streams waits for, before an op of its body (or behind the last).
struct Mark {
  std::int32_t before = 0;       // index of the op; their number: behind the last
  OpKind kind = OpKind::record;  // or wait
  StreamId stream = lead_stream;
  EventId event = -1;
  friend bool operator==(const Mark&, const Mark&) = default;
};

/// One use of a body. What its ops and locals are called begins with its name: "train.layers.3." + "attention".
struct Call {
  std::int32_t body = 0;  // index into Program::bodies
  std::string name;
  std::vector<Port> ports;
  std::vector<std::int64_t> locals;  // where each lies, in bytes from the base of the transient section
  std::vector<Mark> marks;           // ascending by `before`
  friend bool operator==(const Call&, const Call&) = default;
};

struct Block {
  std::string name;
  std::vector<Call> calls;
  Enters enters = Enters::nothing;
  SectionId section = transient_section;  // the one that sleeps or wakes
  friend bool operator==(const Block&, const Block&) = default;
};

/// A role's part in a phase. In iteration s of its walk it plays the phase of iteration s - steps_back: an engine that
/// is a step ahead of the trainer receives in its iteration s the weights that the trainer sends in iteration s - 1.
inline constexpr std::int32_t max_steps_back = 64;
struct Player {
  std::int32_t role = 0;        // index into Plan::roles
  std::int32_t steps_back = 0;  // only in phases of iterations; at most max_steps_back
  friend bool operator==(const Player&, const Player&) = default;
};

/// When a phase runs: once before the first iteration, in the iterations, or once after the last.
enum class When : std::uint8_t { prologue, iteration, epilogue };

struct PhaseInfo {
  std::string name;
  When when = When::iteration;
  bool driven = false;  // false: its blocks once, in order; true: the Driver picks blocks until done
  /// Of an iteration's phase: it runs in the first iteration of a walk and in iterations 1, 1 + every, 1 + 2 every, …
  /// All phases of a plan that do not run each time share one such number.
  std::int32_t every = 1;
  /// The roles that play it, ascending. Where they are several they meet in it, through what it communicates, and in
  /// nothing else: a phase of one iteration is a task, and what roles play together is the order between their tasks.
  std::vector<Player> players = {{}};
  const Player* player(std::int32_t role) const;  // nullptr: the role takes no part
  bool runs_in(std::int32_t step, std::int32_t first_step) const {
    return every == 1 || step == first_step || (step - 1) % every == 0;
  }
  friend bool operator==(const PhaseInfo&, const PhaseInfo&) = default;
};

/// How many of a row of buffers may be in use at once, whatever memory there is: the units that FSDP holds whole, the
/// buckets of a sync. Turns follow one another in program order; turn i + slots waits until every use of turn i is
/// over.
struct SlotLimit {
  std::string name;
  std::int32_t slots = 1;
  std::vector<std::vector<BufferId>> turns;  // transients of one block; each in one turn of one limit
  friend bool operator==(const SlotLimit&, const SlotLimit&) = default;
};

/// The work of one class of ranks: phases[phase][block]. A phase that its role does not play is empty.
struct Program {
  std::int32_t role = 0;  // index into Plan::roles
  std::vector<Buffer> buffers;
  std::vector<SlotLimit> slot_limits;
  std::vector<Body> bodies;
  std::vector<std::vector<Block>> phases;
  std::vector<Section> sections = {{"transient"}};  // the first is that (transient_section)
  std::int32_t num_events = 0;

  std::optional<SectionId> section_index(std::string_view name) const;
  Section& section(SectionId id) { return sections[static_cast<std::size_t>(id)]; }
  const Section& section(SectionId id) const { return sections[static_cast<std::size_t>(id)]; }
  friend bool operator==(const Program&, const Program&) = default;
};

/// What a stream does, which says what its ops get in the way of.
enum class StreamKind : std::uint8_t {
  compute,        // kernels, on the device
  communication,  // between ranks
  to_device,      // copies from host memory
  to_host,        // copies to it
  host            // work of the host itself
};
inline constexpr int num_stream_kinds = 5;
std::string_view name_of(StreamKind);

struct Stream {
  std::string name;  // "gather"
  StreamKind kind = StreamKind::compute;
  friend bool operator==(const Stream&, const Stream&) = default;
};

/// What dimensions follow at run time (Dim::extent), and who counts it. What the Driver counts it says with each run of
/// a block (Sizes). A count of the device lies in a buffer, made by an op of the block: whoever needs it has it as an
/// input (Attr::count), and no host waits for it.
enum class CountedBy : std::uint8_t { driver, device };
std::string_view name_of(CountedBy);
struct Extent {
  std::string name;           // "routed"
  std::int64_t capacity = 0;  // the most there can be; 0: each dimension has its own
  CountedBy counted_by = CountedBy::driver;
  friend bool operator==(const Extent&, const Extent&) = default;
};

/// A partition of (some of) the ranks into groups that communicate: "fsdp", "tp", "world".
struct GroupFamily {
  std::string name;
  std::vector<std::vector<Rank>> groups;
  friend bool operator==(const GroupFamily&, const GroupFamily&) = default;
};

struct Plan {
  std::string scenario;                                             // its name
  std::int64_t chunk_bytes = 4096;                                  // of the arenas
  std::int64_t device_capacity_bytes = 0, host_capacity_bytes = 0;  // of one rank; 0: unlimited
  std::int64_t overhead_bytes = 0;                                  // of one rank, outside the arena (profile)
  std::vector<Stream> streams = {{"compute"}};           // the first computes (lead_stream); the same on all ranks
  std::vector<Extent> extents = {{"tokens"}, {"seqs"}};  // these two first (tokens_extent, seqs_extent)
  std::vector<GroupFamily> groups;
  /// Who works: "trainer", "engines"; one, where all ranks do everything by turns. Each walks the phases that it plays,
  /// in the plan's order, at its own pace (exec/session.h).
  std::vector<std::string> roles = {"job"};
  std::vector<PhaseInfo> phases;
  std::vector<Program> programs;
  std::vector<std::int32_t> program_of_rank;

  Rank num_ranks() const { return static_cast<Rank>(program_of_rank.size()); }
  const Program& program(Rank r) const {
    return programs[static_cast<std::size_t>(program_of_rank[static_cast<std::size_t>(r)])];
  }
  const Stream& stream(StreamId id) const { return streams[static_cast<std::size_t>(id)]; }
  const Extent& extent(ExtentId id) const { return extents[static_cast<std::size_t>(id)]; }
  /// The extents that an op's dimensions name and the device counts, ascending.
  std::vector<ExtentId> counted_extents(const Op&) const;
  /// A copy between device and host.
  bool crosses_spaces(const Op& op) const {
    const StreamKind k = stream(op.stream).kind;
    return op.kind == OpKind::copy && (k == StreamKind::to_device || k == StreamKind::to_host);
  }
  std::int32_t role_of(Rank r) const { return program(r).role; }
  /// By how many iterations a role's last task of an iteration may come behind its first: Player::steps_back, the most.
  std::int32_t most_steps_back(std::int32_t role) const;
  /// The members of r's group in a family, in order; empty when r takes no part.
  const std::vector<Rank>& group_of(GroupId, Rank r) const;
  // Whoever means a thing by its name asks for its number here: in another plan it has another. -1, or nullopt: the
  // plan has none of that name.
  std::int32_t phase_index(std::string_view name) const;
  GroupId family_index(std::string_view name) const;
  std::optional<StreamId> stream_index(std::string_view name) const;
  /// The members of r's group of the family of that name; empty where there is none, too.
  const std::vector<Rank>& group_of(std::string_view family, Rank r) const;
  friend bool operator==(const Plan&, const Plan&) = default;
};

/// Content hash over ops, bytes, order and the device's capacity (P7): the same on any host, whatever memory it has.
/// Measured times are never part of a plan.
std::string plan_hash(const Plan&);

}  // namespace hotbunk
