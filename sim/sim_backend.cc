#include "sim/sim_backend.h"

#include <algorithm>
#include <set>

#include "base/check.h"
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
  void count(const Op& op, const Sizes& sizes, std::int64_t ranks, const Places& places) {
    const TrafficCount c = traffic_of(op, sizes, ranks, places);
    TrafficCount& cell = cells_[static_cast<std::size_t>(
        op.group * num_communication_kinds + static_cast<int>(op.kind) - static_cast<int>(OpKind::all_gather))];
    cell.calls += c.calls;
    cell.payload_bytes += c.payload_bytes;
    cell.padding_bytes += c.padding_bytes;
    cell.wire_bytes += c.wire_bytes;
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

std::vector<ProgramIndex> index_programs(const Plan& plan) {
  std::vector<ProgramIndex> out;
  out.reserve(plan.programs.size());
  for (const Program& p : plan.programs) out.emplace_back(plan, p);
  return out;
}

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
        programs(index_programs(p)),
        timeline(p, options.timeline),
        engine(p, programs, timeline, engine_opts) {
    for (Rank r = 0; r < p.num_ranks(); ++r) {
      memory.emplace_back(p, r, options.enforce_capacity);
      traffic.emplace_back(p.groups.size(), KeptSteps{.head = options.timeline.last_step},
                           p.most_steps_back(p.role_of(r)));
    }
  }
  SimWorld(const SimWorld&) = delete;
  SimWorld& operator=(const SimWorld&) = delete;

  /// Bounds the memory of a long run.
  Status called() { return ++calls % calls_between_advances == 0 ? engine.advance() : Status{}; }

  const Plan& plan;
  const OpCost& cost;
  const std::vector<ProgramIndex> programs;
  Timeline timeline;
  Engine engine;
  std::vector<MemoryBook> memory;    // by rank
  std::vector<TrafficBook> traffic;  // by rank
  std::int64_t calls = 0;
};

namespace {

class SimDevice final : public Device {
 public:
  SimDevice(std::shared_ptr<SimWorld> world, Rank rank)
      : world_(std::move(world)),
        rank_(rank),
        index_(
            world_->programs[static_cast<std::size_t>(world_->plan.program_of_rank[static_cast<std::size_t>(rank)])]),
        prices_(index_.size()) {
    for (std::size_t f = 0; f < world_->plan.groups.size(); ++f)
      group_sizes_.push_back(std::ssize(world_->plan.group_of(static_cast<GroupId>(f), rank)));
  }

  Rank rank() const override { return rank_; }

  void enter(std::int32_t step, std::int16_t phase) override {
    HB_CHECK(phase >= 0 && static_cast<std::size_t>(phase) < world_->plan.phases.size(), "no phase {}", phase);
    phase_ = phase;
    block_ = -1;
    memory().enter(step, phase);
    traffic().enter(step, phase);
    world_->engine.enqueue_enter(rank_, world_->timeline.enter(rank_, step, phase));
  }
  void leave(std::int64_t blocks) override { world_->timeline.leave(rank_, blocks); }

  Status alloc(StreamId stream, const BoundOp& op) override {
    const BoundBuffer buffer = op.allocated();
    memory().alloc(op, buffer);
    return note_memory(stream, buffer, buffer.bytes());
  }
  Status free(StreamId stream, const BoundOp& op) override {
    const BoundBuffer buffer = op.allocated();
    memory().free(op, buffer);
    return note_memory(stream, buffer, -buffer.bytes());
  }
  Status map(StreamId stream, const BoundOp& op) override {
    if (Status mapped = memory().map(op); !mapped) return mapped;
    return enqueue(stream, op, unsized());
  }
  Status unmap(StreamId stream, const BoundOp& op) override {
    memory().unmap(op);
    return enqueue(stream, op, unsized());
  }
  Status compute(StreamId stream, const BoundOp& op, const Args& args) override { return enqueue(stream, op, args); }
  Status copy(StreamId stream, const BoundOp& op, const Args& args) override {
    if (is_communication(op->kind)) return collective(stream, op, args);
    return enqueue(stream, op, args);
  }
  Status collective(StreamId stream, const BoundOp& op, const Args& args) override {
    HB_CHECK(op->group >= 0 && static_cast<std::size_t>(op->group) < group_sizes_.size(), "{} '{}' names no group",
             name_of(op->kind), op.name());
    const std::int64_t ranks = group_sizes_[static_cast<std::size_t>(op->group)];
    HB_CHECK(ranks > 0, "rank {} is in no group of family {}: {} '{}'", rank_,
             world_->plan.groups[static_cast<std::size_t>(op->group)].name, name_of(op->kind), op.name());
    traffic().count(*op, args.sizes, ranks, world_->timeline.places(rank_));
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
  struct Price {
    Sizes sizes{-1, -1, -1};  // of no run
    std::int64_t nanoseconds = 0;
  };
  /// map and unmap come without sizes.
  static Args unsized() {
    Args args;
    args.block = -1;
    return args;
  }
  MemoryBook& memory() { return world_->memory[static_cast<std::size_t>(rank_)]; }
  TrafficBook& traffic() { return world_->traffic[static_cast<std::size_t>(rank_)]; }

  Status note_memory(StreamId stream, const BoundBuffer& buffer, std::int64_t delta_bytes) {
    const std::int64_t event = world_->timeline.open_memory_event(rank_, buffer, delta_bytes);
    if (event < 0) return {};
    world_->engine.enqueue_memory(rank_, stream, event);
    return world_->called();
  }

  Status enqueue(StreamId stream, const BoundOp& op, const Args& args) {
    if (op.call != call_) {  // the ops of a call come one after another
      const ProgramIndex::Place first = index_.find_call(op, phase_);
      call_ = op.call, call_op_ = first.op, call_block_ = first.block, call_ops_ = op.body().ops.data();
    }
    const std::uint32_t code = call_op_ + static_cast<std::uint32_t>(op.op - call_ops_);
    const std::int32_t block = call_block_;
    // A block runs through its ops once, in order; another block, or an op at or before the last one, is a new run.
    const bool knows_sizes = args.block >= 0;
    if (block != block_ || code <= last_op_) {
      block_ = block;
      run_ = world_->timeline.begin_run(rank_, args.sizes, block);
      sized_ = knows_sizes;
      world_->engine.enqueue_host_work(rank_, world_->cost.decision_nanoseconds());
    } else if (knows_sizes && !sized_) {
      world_->timeline.set_sizes(rank_, run_, args.sizes);
      sized_ = true;
    }
    last_op_ = code;
    world_->engine.enqueue_op(rank_, stream, code, run_, price(code, *op, args));
    return world_->called();
  }

  std::int64_t price(std::uint32_t code, const Op& op, const Args& args) {
    Price& known = prices_[code];
    Sizes key = args.sizes;
    const DependsOn depends = index_[code].depends_on;
    if (depends != DependsOn::pairs) key.attention_pairs = 0;
    if (depends == DependsOn::nothing) key = {};
    if (key != known.sizes) {
      known = {key, world_->cost.nanoseconds(world_->plan, rank_, op, args)};
      HB_CHECK(known.nanoseconds >= 0, "{} '{}' costs {} ns", name_of(op.kind), op.name, known.nanoseconds);
      const OpCost::FirstUse first = world_->cost.first_use(op, args);
      if (first.nanoseconds > 0 && used_.insert(first.key).second) return known.nanoseconds + first.nanoseconds;
    }
    return known.nanoseconds;
  }

  std::shared_ptr<SimWorld> world_;
  Rank rank_;
  const ProgramIndex& index_;
  std::vector<Price> prices_;                   // by op: the last one
  std::vector<std::int64_t> group_sizes_;       // by family
  std::set<std::array<std::int64_t, 5>> used_;  // OpCost::FirstUse
  std::int16_t phase_ = -1;
  std::int32_t block_ = -1;
  std::uint32_t last_op_ = 0, run_ = 0;
  const Call* call_ = nullptr;  // the last op's, with its first op's number, its block and its body's ops
  std::uint32_t call_op_ = 0;
  std::int32_t call_block_ = 0;
  const Op* call_ops_ = nullptr;
  bool sized_ = false;
};

}  // namespace

SimBackend::SimBackend(const ClusterSpec& cluster, const OpCost& cost, SimOptions options)
    : cluster_(cluster), cost_(cost), options_(options) {}
SimBackend::~SimBackend() = default;

Result<std::vector<std::unique_ptr<Device>>> SimBackend::open(const Plan& plan, std::span<const Rank> local) {
  HB_CHECK(static_cast<Rank>(local.size()) == plan.num_ranks(), "the simulator plays all {} ranks, asked for {}",
           plan.num_ranks(), local.size());
  world_ = std::make_shared<SimWorld>(plan, cost_, engine_options(cluster_, cost_, options_), options_);
  std::vector<std::unique_ptr<Device>> devices;
  for (Rank r : local) devices.push_back(std::make_unique<SimDevice>(world_, r));
  return devices;
}

Result<Trace> SimBackend::take_trace() {
  HB_CHECK(world_, "take_trace before open");
  if (Status done = world_->engine.finish(); !done) return fail(done.error());
  Trace trace;
  trace.source = "simulated";
  world_->timeline.write(trace);
  for (const MemoryBook& book : world_->memory) trace.memory.push_back(book.result());
  for (TrafficBook& book : world_->traffic) {
    const TrafficFold& fold = book.finish();
    trace.traffic.push_back(fold.rows());
    trace.traffic_totals.push_back(fold.totals());
  }
  return trace;
}

const Engine& SimBackend::engine() const {
  HB_CHECK(world_, "no world is open");
  return world_->engine;
}

}  // namespace hotbunk
