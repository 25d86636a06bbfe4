// The simulator as a Backend: long for its devices and their shared book of virtual time, which know one another.
#include "sim/sim_backend.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <utility>

#include "base/check.h"
#include "sim/affine_sum.h"
#include "sim/memory_book.h"
#include "sim/program_index.h"
#include "trace/traffic_rules.h"

namespace hotbunk {
namespace {

constexpr int num_communication_kinds = static_cast<int>(OpKind::peer_copy) - static_cast<int>(OpKind::all_gather) + 1;
constexpr std::int64_t calls_between_advances = 1 << 14;

/// The traffic of one rank, summed per phase before it goes into the map.
class TrafficBook {
 public:
  TrafficBook(std::size_t num_families, KeptSteps kept, std::int32_t ahead)
      : cells_(num_families * num_communication_kinds), fold_(kept, ahead) {}
  void enter(std::int32_t step, std::int16_t phase) {
    flush();
    step_ = step;
    phase_ = phase;
  }
  void count(const Op& op, const TrafficCount& c, std::int64_t times) {
    TrafficCount& cell = cells_[static_cast<std::size_t>(
        op.group * num_communication_kinds + static_cast<int>(op.kind) - static_cast<int>(OpKind::all_gather))];
    cell.calls += times * c.calls;
    cell.payload_bytes += times * c.payload_bytes;
    cell.padding_bytes += times * c.padding_bytes;
    cell.wire_bytes += times * c.wire_bytes;
  }
  const TrafficFold& finish() {
    flush();
    return fold_;
  }

 private:
  void flush() {
    for (std::size_t i = 0; i < cells_.size(); ++i) {
      if (cells_[i].calls == 0) continue;
      const auto group = static_cast<std::int16_t>(i / num_communication_kinds);
      const auto kind = static_cast<OpKind>(static_cast<std::size_t>(OpKind::all_gather) + i % num_communication_kinds);
      fold_.add({step_, phase_, group, kind}, cells_[i]);
      cells_[i] = {};
    }
  }

  std::int32_t step_ = 0;
  std::int16_t phase_ = 0;
  std::vector<TrafficCount> cells_;  // [family][kind] of the current phase
  TrafficFold fold_;
};

/// What the communication ops of a block count together, where they are not looked at one by one.
struct Communication {
  const Op* op = nullptr;
  std::int64_t calls = 0;
};
std::vector<Communication> communication_of(const Program& program, const Block& block) {
  std::vector<Communication> out;
  std::map<const Op*, std::size_t> known;
  each_op(program, block, [&](const BoundOp& op) {
    if (!is_communication(op->kind)) return;
    const auto [at, is_new] = known.try_emplace(op.op, out.size());
    if (is_new) out.push_back({op.op, 0});
    ++out[at->second].calls;
  });
  return out;
}

/// What a device launches, or is asked for, of a block.
std::int64_t launches_of(const Program& program, const Block& block) {
  std::int64_t out = 0;
  each_op(program, block, [&](const BoundOp& op) { out += is_memory(op->kind) || is_event(op->kind) ? 0 : 1; });
  return out;
}

/// A program, cut as finely as it is played.
struct PlayedProgram {
  PlayedProgram(const Plan& plan, const Program& program, Granularity granularity) : index(plan, program, granularity) {
    for (const auto& blocks : program.phases) {
      auto& of_phase = memory.emplace_back();
      auto& communicates = communication.emplace_back();
      auto& spans = num_spans.emplace_back();
      auto& launched = launches.emplace_back();
      for (const Block& block : blocks) {
        of_phase.emplace_back(program, block);
        communicates.push_back(communication_of(program, block));
        launched.push_back(launches_of(program, block));
        spans.push_back(index.num_ops(static_cast<std::int16_t>(std::ssize(memory) - 1),
                                      static_cast<std::int32_t>(std::ssize(of_phase) - 1)));
      }
    }
  }
  ProgramIndex index;
  std::vector<std::vector<std::int64_t>> num_spans;                    // [phase][block]: at most
  std::vector<std::vector<std::int64_t>> launches;                     // [phase][block]
  std::vector<std::vector<BlockMemory>> memory;                        // [phase][block]
  std::vector<std::vector<std::vector<Communication>>> communication;  // [phase][block]
};

EngineOptions engine_options(const ClusterSpec& cluster, const OpCost& cost, const SimOptions& options) {
  EngineOptions out;
  out.ranks_per_device = std::max<std::int64_t>(1, cluster.ranks_per_device);
  out.device_slots = options.device_slots > 0 ? options.device_slots : out.ranks_per_device;
  out.link_slots = out.ranks_per_device;
  out.queue_depth = options.queue_depth;
  out.threads = cost.threads();
  return out;
}

}  // namespace

/// What all devices of one run share.
class SimWorld {
 public:
  SimWorld(const Plan& p, const OpCost& c, const EngineOptions& engine_opts, const SimOptions& options)
      : plan(p),
        cost(c),
        classes(options.classes.value_or(RankClasses::unfolded(p.num_ranks()))),
        programs(cut(p, options)),
        timeline(p, classes, options.timeline),
        engine(p, classes, indices(), timeline, engine_opts),
        memory(programs.size()),
        traffic(programs.size()) {
    for (const Rank r : classes.players()) {
      memory[static_cast<std::size_t>(r)] = std::make_unique<MemoryBook>(p, r, options.enforce_capacity);
      traffic[static_cast<std::size_t>(r)] = std::make_unique<TrafficBook>(
          p.groups.size(), KeptSteps::of(std::ssize(classes.players()), options.timeline.last_step),
          p.most_steps_back(p.role_of(r)));
    }
  }
  SimWorld(const SimWorld&) = delete;
  SimWorld& operator=(const SimWorld&) = delete;

  /// Bounds the memory of a long run.
  Status called(std::int64_t items = 1) {
    calls += items;
    if (calls < calls_between_advances) return {};
    calls = 0;
    return engine.advance();
  }

  const Plan& plan;
  const OpCost& cost;
  const RankClasses classes;
  std::vector<std::shared_ptr<const PlayedProgram>> programs;  // by rank; none for ranks that are not played
  Timeline timeline;
  Engine engine;
  std::vector<std::unique_ptr<MemoryBook>> memory;    // by rank
  std::vector<std::unique_ptr<TrafficBook>> traffic;  // by rank
  std::int64_t calls = 0;                             // since the engine last advanced

 private:
  static std::vector<std::shared_ptr<const PlayedProgram>> cut(const Plan& plan, const SimOptions& options) {
    const RankClasses all = options.classes.value_or(RankClasses::unfolded(plan.num_ranks()));
    std::map<std::pair<std::int32_t, Granularity>, std::shared_ptr<const PlayedProgram>> known;
    std::vector<std::shared_ptr<const PlayedProgram>> out(static_cast<std::size_t>(plan.num_ranks()));
    for (const Rank r : all.players()) {
      const bool by_op = std::ranges::find(options.by_op, r) != options.by_op.end();
      const Granularity granularity = by_op ? Granularity::ops : options.granularity;
      const std::int32_t program = plan.program_of_rank[static_cast<std::size_t>(r)];
      auto& played = known[{program, granularity}];
      if (!played)
        played =
            std::make_shared<const PlayedProgram>(plan, plan.programs[static_cast<std::size_t>(program)], granularity);
      out[static_cast<std::size_t>(r)] = played;
    }
    return out;
  }
  std::vector<const ProgramIndex*> indices() const {
    std::vector<const ProgramIndex*> out;
    for (const auto& program : programs) out.push_back(program ? &program->index : nullptr);
    return out;
  }
};

namespace {

class SimDevice final : public Device {
 public:
  SimDevice(std::shared_ptr<SimWorld> world, Rank rank)
      : world_(std::move(world)),
        rank_(rank),
        program_(*world_->programs.at(static_cast<std::size_t>(rank))),
        index_(program_.index),
        memory_(*world_->memory[static_cast<std::size_t>(rank)]),
        traffic_(*world_->traffic[static_cast<std::size_t>(rank)]),
        prices_(index_.granularity() == Granularity::ops ? index_.size() : index_.segments().size()) {
    for (std::size_t f = 0; f < world_->plan.groups.size(); ++f)
      group_sizes_.push_back(std::ssize(world_->plan.group_of(static_cast<GroupId>(f), rank)));
  }

  Rank rank() const override { return rank_; }

  void enter(std::int32_t step, std::int16_t phase) override {
    HB_CHECK(phase >= 0 && static_cast<std::size_t>(phase) < world_->plan.phases.size(), "no phase {}", phase);
    phase_ = phase;
    block_ = -1;
    memory_.enter(step, phase);
    traffic_.enter(step, phase);
    world_->engine.enqueue_enter(rank_, world_->timeline.enter(rank_, step, phase));
  }
  void leave(std::int64_t blocks) override { world_->timeline.leave(rank_, blocks); }

  /// Op by op as every device does it; call by call from what is known of the block.
  Status play(const Program& program, const Block& block, const Args& args) override {
    const auto phase = static_cast<std::size_t>(phase_), number = static_cast<std::size_t>(args.block);
    begin_run(args, args.block, program_.num_spans[phase][number]);
    world_->engine.enqueue_launches(rank_, run_, args.times * program_.launches[phase][number]);
    const BlockMemory& memory = program_.memory[phase][number];
    detail_ = world_->timeline.run(rank_, run_).detail;
    const bool changes = memory.whole.device.net != CategoryBytes{} || memory.whole.host.net != CategoryBytes{};
    const bool together = detail_ == Detail::run ||
                          (detail_ == Detail::stay && (world_->timeline.draws_memory(rank_, args.block) || changes));
    if (together) draw(lead_stream, block.name, memory.whole, true);
    Status played;
    if (index_.granularity() == Granularity::ops) {
      played = Device::play(program, block, args);
    } else if (played = keep_books(program, block, memory); played) {
      for (const Communication& c : program_.communication[phase][number]) count(*c.op, args, c.calls * args.times);
      played = enqueue_items(block, memory, args);
    }
    if (together) draw(lead_stream, block.name, memory.whole, false);
    detail_.reset();
    return played;
  }

  Status alloc(StreamId stream, const BoundOp& op) override {
    const BoundBuffer buffer = op.allocated();
    memory_.alloc(op, buffer);
    return note_memory(stream, buffer, buffer.bytes());
  }
  Status free(StreamId stream, const BoundOp& op) override {
    const BoundBuffer buffer = op.allocated();
    memory_.free(op, buffer);
    return note_memory(stream, buffer, -buffer.bytes());
  }
  Status map(StreamId stream, const BoundOp& op) override {
    if (Status mapped = memory_.map(op); !mapped) return mapped;
    return enqueue(stream, op, unsized());
  }
  Status unmap(StreamId stream, const BoundOp& op) override {
    memory_.unmap(op);
    return enqueue(stream, op, unsized());
  }
  Status compute(StreamId stream, const BoundOp& op, const Args& args) override { return enqueue(stream, op, args); }
  Status copy(StreamId stream, const BoundOp& op, const Args& args) override {
    if (is_communication(op->kind)) return collective(stream, op, args);
    return enqueue(stream, op, args);
  }
  Status collective(StreamId stream, const BoundOp& op, const Args& args) override {
    count(*op, args, 1);
    return enqueue(stream, op, args);
  }
  Status record(StreamId stream, EventId event) override {
    world_->engine.enqueue_record(rank_, stream, event);
    return world_->called();
  }
  Status wait(StreamId stream, EventId event) override {
    world_->engine.enqueue_wait(rank_, stream, event);
    return world_->called();
  }
  Status sync() override {
    world_->engine.enqueue_sync(rank_);
    return world_->engine.advance();
  }

 private:
  /// What an op, or a segment, takes with these sizes.
  struct Price {
    Sizes sizes{-1, -1, -1};  // of no run
    std::int64_t times = 1, pairs_per_time = 0;
    std::int64_t nanoseconds = 0;
  };
  /// map and unmap come without sizes.
  static Args unsized() {
    Args args;
    args.block = -1;
    return args;
  }

  void count(const Op& op, const Args& args, std::int64_t times) {
    HB_CHECK(op.group >= 0 && static_cast<std::size_t>(op.group) < group_sizes_.size(), "{} '{}' names no group",
             name_of(op.kind), op.name);
    const std::int64_t ranks = group_sizes_[static_cast<std::size_t>(op.group)];
    HB_CHECK(ranks > 0, "rank {} is in no group of family {}: {} '{}'", rank_,
             world_->plan.groups[static_cast<std::size_t>(op.group)].name, name_of(op.kind), op.name);
    traffic_.count(op, traffic_of(op, args.sizes, ranks, world_->timeline.places(rank_)), times);
  }

  Status note_memory(StreamId stream, const BoundBuffer& buffer, std::int64_t delta_bytes) {
    if (detail_ && *detail_ != Detail::items) return {};  // the block's memory is drawn as a whole
    world_->engine.enqueue_memory(rank_, stream, world_->timeline.open_memory(rank_, buffer, delta_bytes));
    return world_->called();
  }

  /// The books of a block that is played call by call.
  Status keep_books(const Program& program, const Block& block, const BlockMemory& memory) {
    if (!memory.maps) return memory_.play(memory), Status{};
    Status kept;
    each_op(program, block, [&](const BoundOp& op) {
      if (!kept) return;
      if (op->kind == OpKind::alloc) memory_.alloc(op, op.allocated());
      else if (op->kind == OpKind::free) memory_.free(op, op.allocated());
      else if (op->kind == OpKind::map) kept = memory_.map(op);
      else if (op->kind == OpKind::unmap) memory_.unmap(op);
    });
    return kept;
  }

  Status enqueue_items(const Block& block, const BlockMemory& memory, const Args& args) {
    // Who meets in a block must have it cut alike, and how closely a rank is recorded is its own affair: that a block
    // runs several times together is said to all who meet in it.
    const std::span<const BlockItem> items =
        args.times > 1 ? index_.chained_items(phase_, args.block) : index_.items(phase_, args.block);
    for (const BlockItem& item : items) {
      switch (item.kind) {
        case BlockItem::Kind::op:
          world_->engine.enqueue_op(rank_, item.stream, item.number, run_, item_price(index_[item.number], args));
          break;
        case BlockItem::Kind::record:
          world_->engine.enqueue_record(rank_, item.stream, static_cast<EventId>(item.number));
          break;
        case BlockItem::Kind::wait:
          world_->engine.enqueue_wait(rank_, item.stream, static_cast<EventId>(item.number));
          break;
        case BlockItem::Kind::call_begins:
        case BlockItem::Kind::call_ends:
          if (detail_ == Detail::items)
            draw(item.stream, call_name(block.calls[item.number]), memory.calls[item.number],
                 item.kind == BlockItem::Kind::call_begins);
          break;
      }
    }
    return world_->called(std::ssize(items));
  }

  /// A stretch of work in the picture of memory: as it is at its peak from the beginning on, what is left of it behind.
  void draw(StreamId stream, std::string_view name, const LiveProfile& profile, bool begins) {
    std::array<CategoryBytes, 2> change = {profile.device.at_peak, profile.host.at_peak};
    if (!begins)
      for (std::size_t c = 0; c < change[0].size(); ++c) {
        change[0][c] = profile.device.net[c] - change[0][c];
        change[1][c] = profile.host.net[c] - change[1][c];
      }
    if (change[0] == CategoryBytes{} && change[1] == CategoryBytes{}) return;
    world_->engine.enqueue_memory(rank_, stream, world_->timeline.open_memory(rank_, name, change[0], change[1]));
  }

  std::string_view call_name(const Call& call) const {
    if (call.name.empty()) return index_.program().bodies[static_cast<std::size_t>(call.body)].name;
    return std::string_view(call.name).substr(0, call.name.size() - (call.name.back() == '.' ? 1 : 0));
  }

  void begin_run(const Args& args, std::int32_t block, std::int64_t num_items) {
    block_ = block;
    run_ = world_->timeline.begin_run(rank_, args, block, num_items);
    world_->engine.enqueue_host_work(rank_, world_->cost.decision_nanoseconds());
  }

  Status enqueue(StreamId stream, const BoundOp& op, const Args& args) {
    if (op.call != call_) {  // the ops of a call come one after another
      const ProgramIndex::Place first = index_.find_call(op, phase_);
      call_ = op.call, call_op_ = first.op, call_block_ = first.block, call_ops_ = op.body().ops.data();
    }
    const std::uint32_t code = call_op_ + static_cast<std::uint32_t>(op.op - call_ops_);
    // A block runs through its ops once, in order; another block, or an op at or before the last one, is a new run.
    const bool knows_sizes = args.block >= 0;
    if (!detail_ && (call_block_ != block_ || code <= last_op_)) {
      begin_run(args, call_block_, 0);
      sized_ = knows_sizes;
    } else if (!detail_ && knows_sizes && !sized_) {
      world_->timeline.set_sizes(rank_, run_, args.sizes);
      sized_ = true;
    }
    last_op_ = code;
    const OpInfo& info = index_[code];
    world_->engine.enqueue_op(
        rank_, stream, code, run_,
        world_->cost.jitters() ? jittered(info, args) : price(prices_[code], info.depends_on, args, info));
    return world_->called();
  }

  std::int64_t item_price(const OpInfo& item, const Args& args) {
    if (world_->cost.jitters()) return jittered(item, args);
    if (item.chain >= 0) {
      std::int64_t all = 0;
      for (const Chain::Link& link : index_.chain(item).links) all += link.times * item_price(index_[link.item], args);
      return all;
    }
    return price(prices_[static_cast<std::size_t>(item.segment)], item.depends_on, args, item);
  }

  std::int64_t price(Price& known, DependsOn depends, const Args& args, const OpInfo& item) {
    Sizes key = args.sizes;
    const std::int64_t pairs_per_time = depends == DependsOn::pairs ? args.pairs_per_time : 0;
    if (depends != DependsOn::pairs) key.attention_pairs = 0;
    if (depends == DependsOn::nothing) key = {};
    if (key == known.sizes && args.times == known.times && pairs_per_time == known.pairs_per_time)
      return known.nanoseconds;
    known = {key, args.times, pairs_per_time, 0};
    std::int64_t once = 0;  // what the first of its kind takes more
    index_.each_op(item, [&](const BoundOp& op) {
      known.nanoseconds += nanoseconds_of_all(*op, args, pairs_per_time);
      const OpCost::FirstUse first = world_->cost.first_use(*op, args);
      if (first.nanoseconds > 0 && used_.insert(first.key).second) once += first.nanoseconds;
    });
    return known.nanoseconds + once;
  }

  std::int64_t nanoseconds_of(const Op& op, const Args& args) const {
    const std::int64_t ns = world_->cost.nanoseconds(world_->plan, rank_, op, args);
    HB_CHECK(ns >= 0, "{} '{}' costs {} ns", name_of(op.kind), op.name, ns);
    return ns;
  }

  /// Each execution by itself.
  std::int64_t jittered(const OpInfo& item, const Args& args) {
    HB_CHECK(args.times == 1, "{} executions of one draw", args.times);
    double ns = 0.0;
    index_.each_op(item, [&](const BoundOp& op) {
      ns += static_cast<double>(nanoseconds_of(*op, args)) * world_->cost.jitter(rank_, *op, executions_++);
    });
    return std::llround(ns);
  }

  /// Of all times together.
  std::int64_t nanoseconds_of_all(const Op& op, const Args& args, std::int64_t pairs_per_time) const {
    if (args.times == 1 || pairs_per_time == 0) return args.times * nanoseconds_of(op, args);
    Args at = args;
    const auto one = [&](std::int64_t time) {
      at.sizes.attention_pairs = args.sizes.attention_pairs + time * pairs_per_time;
      return nanoseconds_of(op, at);
    };
    return sum_of_affine_pieces(one, args.times);
  }

  std::shared_ptr<SimWorld> world_;
  Rank rank_;
  const PlayedProgram& program_;
  const ProgramIndex& index_;
  MemoryBook& memory_;
  TrafficBook& traffic_;
  std::vector<Price> prices_;                   // by op or segment: the last one
  std::vector<std::int64_t> group_sizes_;       // by family
  std::set<std::array<std::int64_t, 5>> used_;  // OpCost::FirstUse
  std::uint64_t executions_ = 0;                // of ops whose times scatter
  std::int16_t phase_ = -1;
  std::int32_t block_ = -1;
  std::uint32_t last_op_ = 0, run_ = 0;
  const Call* call_ = nullptr;  // the last op's, with its first op's number, its block and its body's ops
  std::uint32_t call_op_ = 0;
  std::int32_t call_block_ = 0;
  const Op* call_ops_ = nullptr;
  bool sized_ = false;
  std::optional<Detail> detail_;  // of the run that play() is at; none: ops come one by one from elsewhere
};

}  // namespace

SimBackend::SimBackend(const ClusterSpec& cluster, const OpCost& cost, SimOptions options)
    : cluster_(cluster), cost_(cost), options_(std::move(options)) {}
SimBackend::~SimBackend() = default;

Result<std::vector<std::unique_ptr<Device>>> SimBackend::open(const Plan& plan, std::span<const Rank> local) {
  const auto played =
      options_.classes ? options_.classes->players() : RankClasses::unfolded(plan.num_ranks()).players();
  HB_CHECK(std::ranges::equal(local, played), "the simulator plays {} of {} ranks, asked for {}", played.size(),
           plan.num_ranks(), local.size());
  world_ = std::make_shared<SimWorld>(plan, cost_, engine_options(cluster_, cost_, options_), options_);
  if (options_.links) world_->engine.use_links(*options_.links, cluster_, options_.slow);
  std::vector<std::unique_ptr<Device>> devices;
  for (Rank r : local) devices.push_back(std::make_unique<SimDevice>(world_, r));
  return devices;
}

Result<Trace> SimBackend::take_trace() {
  HB_CHECK(world_, "take_trace before open");
  if (Status done = world_->engine.finish(); !done) return fail(done.error());
  Trace trace;
  trace.source = "simulated";
  const RankClasses& classes = world_->classes;
  if (classes.folds()) trace.players = classes.representatives();
  world_->timeline.write(trace);
  trace.links = world_->engine.link_traffic();
  for (auto* rows : {&trace.traffic, &trace.traffic_totals})
    rows->resize(static_cast<std::size_t>(classes.num_ranks()));
  trace.memory.resize(static_cast<std::size_t>(classes.num_ranks()));
  for (const Rank player : classes.players()) {
    const auto r = static_cast<std::size_t>(player);
    const TrafficFold& fold = world_->traffic[r]->finish();
    trace.memory[r] = world_->memory[r]->result();
    trace.traffic[r] = fold.rows(), trace.traffic_totals[r] = fold.totals();
  }
  stand_in(trace);
  return trace;
}

const Engine& SimBackend::engine() const {
  HB_CHECK(world_, "no world is open");
  return world_->engine;
}

}  // namespace hotbunk
