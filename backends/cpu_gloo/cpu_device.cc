#include "backends/cpu_gloo/cpu_device.h"

#include <fmt/format.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <unordered_map>
#include <utility>

#include "backends/cpu_gloo/kernels/elementwise.h"
#include "backends/cpu_gloo/world.h"
#include "base/check.h"
#include "graph/catalogue.h"
#include "graph/print.h"

namespace hotbunk {
namespace {

std::int64_t monotonic_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::int64_t thread_cpu_ns() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return t.tv_sec * 1'000'000'000 + t.tv_nsec;
}

std::int64_t space_bytes(const Program& p, Space space) {
  std::int64_t bytes = 0;
  for (int s = 0; s < num_sections; ++s)
    if (space_of(static_cast<Section>(s)) == space) bytes += p.section_bytes[static_cast<std::size_t>(s)];
  return std::max<std::int64_t>(bytes, arena_chunk_bytes);
}

ArenaOptions arena_options(const Plan& plan, const Program& program, Space space, bool shared) {
  ArenaOptions o;
  o.name = std::string(name_of(space));
  o.reserve_bytes = space_bytes(program, space);
  const std::int64_t capacity =
      space == Space::device ? plan.device_capacity_bytes - plan.overhead_bytes : plan.host_capacity_bytes;
  o.capacity_bytes = capacity > 0 ? capacity : o.reserve_bytes;
  o.shared = shared;
  return o;
}

/// Traffic tags carry step and phase through the communicator's counters.
constexpr int tag_of(std::int32_t step, std::int16_t phase) { return step * 256 + phase; }

OpKind kind_of(CommOp op) {
  switch (op) {
    case CommOp::all_gather:
      return OpKind::all_gather;
    case CommOp::reduce_scatter:
      return OpKind::reduce_scatter;
    case CommOp::all_reduce:
      return OpKind::all_reduce;
    case CommOp::broadcast:
      return OpKind::broadcast;
    case CommOp::all_to_all:
      return OpKind::all_to_all;
    case CommOp::send:
      return OpKind::send;
    case CommOp::recv:
      return OpKind::recv;
    case CommOp::peer_read:
      return OpKind::peer_copy;
    case CommOp::barrier:
      return OpKind::barrier;
  }
  return OpKind::barrier;
}

}  // namespace

struct CpuDevice::Stream {
  Stream(StreamId id_, int threads, StreamThread::Mode mode)
      : id(id_), context(threads), queue(std::string(name_of(id_)), mode) {}
  struct Timed {
    const Op* op;
    Where where;
    std::int64_t start_ns, end_ns, cpu_start_ns, cpu_end_ns;
    std::int64_t bytes;  // < 0: the catalogue's
    Sizes sizes;
  };
  const StreamId id;
  kernels::KernelContext context;  // before the queue: the queue's thread ends first
  std::vector<Timed> timed;
  StreamThread queue;
};

std::array<std::int64_t, num_sections> section_bases(const Program& program) {
  std::array<std::int64_t, num_sections> bases{};
  std::int64_t device = 0, host = 0;
  for (int s = 0; s < num_sections; ++s) {
    std::int64_t& end = space_of(static_cast<Section>(s)) == Space::device ? device : host;
    bases[static_cast<std::size_t>(s)] = end;
    end += program.section_bytes[static_cast<std::size_t>(s)];
  }
  return bases;
}

CpuDevice::CpuDevice(const Plan& plan, Rank rank, World& world, Driver* driver, const CpuOptions& options)
    : plan_(plan),
      program_(plan.program(rank)),
      rank_(rank),
      world_(world),
      driver_(driver),
      options_(options),
      bases_(section_bases(program_)),
      device_memory_(std::make_shared<Arena>(arena_options(plan, program_, Space::device, world.size() > 1))),
      device_(*device_memory_),
      host_(arena_options(plan, program_, Space::host, false)),
      events_(static_cast<std::size_t>(program_.num_events)) {
  const auto mode = world.size() > 1 ? StreamThread::Mode::threaded : StreamThread::Mode::inlined;
  for (const auto& blocks : program_.phases)
    for (const Block& block : blocks)
      for (const Op& op : block.ops) {
        auto& s = streams_[static_cast<std::size_t>(op.stream)];
        if (!s)
          s = std::make_unique<Stream>(op.stream, op.stream == StreamId::compute ? options.compute_threads : 1, mode);
      }
  if (world.size() > 1 && options.transport != Transport::gloo) region_ = world.share(device_);
  open_communicators();
  if (world.size() > 1) world.barrier(options.scope + "plan opened");
  epoch_ns_ = common_epoch_ns();
  trace_.source = "measured";
}

CpuDevice::~CpuDevice() = default;

/// Ranks of one host read one clock, so their spans line up when they count from one moment; other hosts' start when
/// the plan opened there.
std::int64_t CpuDevice::common_epoch_ns() {
  const std::int64_t own = monotonic_ns();
  if (world_.size() == 1) return own;
  const std::string key = options_.scope + "epoch";
  if (rank_ == 0) world_.set(key, fmt::format("{}", own));
  return world_.same_host(0) ? std::stoll(world_.get(key)) : own;
}

/// One communicator per family and stream that any program uses, made in the same order by every rank.
void CpuDevice::open_communicators() {
  std::map<std::pair<GroupId, StreamId>, bool> used;
  peer_buffers_.resize(plan_.programs.size());
  for (std::size_t p = 0; p < plan_.programs.size(); ++p)
    for (const auto& blocks : plan_.programs[p].phases)
      for (const Block& block : blocks)
        for (const Op& op : block.ops) {
          if (!is_communication(op.kind)) continue;
          used[{op.group, op.stream}] = true;
          if (op.kind == OpKind::peer_copy || op.kind == OpKind::barrier)
            for (const Tensor& t : op.inputs) {
              const Buffer& b = plan_.programs[p].buffers[static_cast<std::size_t>(t.buffer)];
              peer_buffers_[p].emplace(b.name, &b);
            }
        }
  for (const auto& [key, yes] : used) {
    const auto& members = plan_.group_of(key.first, rank_);
    if (members.empty()) continue;
    const std::vector<int> ranks(members.begin(), members.end());
    const std::string name = fmt::format("{}{}/{}", options_.scope,
                                         plan_.groups[static_cast<std::size_t>(key.first)].name, name_of(key.second));
    communicators_[key] = options_.transport && ranks.size() > 1 ? world_.communicator(ranks, name, *options_.transport)
                                                                 : world_.communicator(ranks, name);
  }
}

CpuDevice::Stream& CpuDevice::stream(StreamId id) { return *streams_[static_cast<std::size_t>(id)]; }

Communicator& CpuDevice::communicator(GroupId group, StreamId id) {
  const auto it = communicators_.find({group, id});
  HB_CHECK(it != communicators_.end(), "rank {} has no communicator of family {}", rank_, group);
  return *it->second;
}

std::int64_t CpuDevice::now_ns() const { return monotonic_ns() - epoch_ns_; }
std::int64_t CpuDevice::cpu_ns() const { return options_.measure_cpu ? thread_cpu_ns() : 0; }

/// The first call after a sync ends the driver's decision.
void CpuDevice::note_call(bool enqueues) {
  stretch_.calls += enqueues ? 1 : 0;
  if (std::exchange(decided_, true) || !options_.measure_cpu) return;
  const std::int64_t now = cpu_ns();
  stretch_.decide_ns = now - host_mark_ns_;
  host_mark_ns_ = now;
}

void CpuDevice::note_mapping(const Op& op, std::int64_t start_ns, std::int64_t start_cpu_ns) {
  const std::int64_t end_cpu_ns = cpu_ns();
  stretch_.issue_ns -= end_cpu_ns - start_cpu_ns;
  if (where_.step <= options_.span_steps)
    host_timed_.push_back(
        {&op, op.stream, where_.step, where_.phase, {}, start_ns, now_ns(), start_cpu_ns, end_cpu_ns});
}

std::byte* CpuDevice::buffer_address(const Buffer& b) const {
  return arena(b.section).at(bases_[static_cast<std::size_t>(b.section)] + b.offset);
}

std::byte* CpuDevice::address(const Tensor& t) const {
  return buffer_address(program_.buffers[static_cast<std::size_t>(t.buffer)]) + t.offset_bytes;
}

/// Turns what a call throws into what the user reads: which op, and what happened.
template <class F>
Status CpuDevice::guarded(const Op& op, F&& call) {
  try {
    call();
    return {};
  } catch (const InternalError& e) {
    return fail(Diagnostic{.code = "E699",
                           .message = e.what(),
                           .where = {},
                           .notes = {fmt::format("op {} '{}'", name_of(op.kind), label_of(program_, op))},
                           .help = "this is a fault of hotbunk; please report it with the scenario"});
  } catch (const std::exception& e) {
    return fail(Diagnostic{.code = "E602",
                           .message = e.what(),
                           .where = {},
                           .notes = {fmt::format("op {} '{}'", name_of(op.kind), label_of(program_, op))},
                           .help = ""});
  }
}

void CpuDevice::enter(std::int32_t step, std::int16_t phase) {
  where_ = {step, phase};
  meter_.enter(step, phase);
  world_.watch().set_phase(plan_.phases[static_cast<std::size_t>(phase)].name);
  trace_.phases.push_back(
      {.rank = rank_, .step = step, .phase = phase, .start_ns = now_ns(), .end_ns = 0, .blocks = 0});
}

void CpuDevice::leave() {
  trace_.phases.back().end_ns = now_ns();
  if (!options_.check_resident) return;
  const std::int64_t resident = device_.resident_bytes(), mapped = device_.counters().mapped;
  HB_CHECK(std::abs(resident - mapped) <= plan_.chunk_bytes,
           "after phase {} {} bytes of the device arena are resident, {} are mapped",
           plan_.phases[static_cast<std::size_t>(where_.phase)].name, resident, mapped);
}

// Memory is booked when the call comes, in program order (DESIGN: one total program order per rank). Mapping touches
// fresh ranges only, so it can happen at once; unmapping waits until nothing runs.

Status CpuDevice::alloc(StreamId id, const Op& op, const Buffer& b) {
  note_call(false);
  return guarded(op, [&] {
    const std::int64_t offset = bases_[static_cast<std::size_t>(b.section)] + b.offset;
    arena(b.section).alloc(offset, b.bytes(), static_cast<int>(b.category), b.name);
    meter_.add_live(space_of(b.section), b.category, b.bytes());
    if (where_.step <= options_.span_steps)
      trace_.memory_events.push_back({.rank = rank_,
                                      .space = space_of(b.section),
                                      .category = b.category,
                                      .phase = where_.phase,
                                      .step = where_.step,
                                      .name = static_cast<std::int32_t>(&b - program_.buffers.data()),
                                      .time_ns = now_ns(),
                                      .delta_bytes = b.bytes()});
    if (options_.poison && b.bytes() > 0)
      stream(id).queue.enqueue([this, offset, &b] { arena(b.section).poison(offset, b.bytes()); });
  });
}

Status CpuDevice::free(StreamId, const Op& op, const Buffer& b) {
  note_call(false);
  return guarded(op, [&] {
    arena(b.section).free(bases_[static_cast<std::size_t>(b.section)] + b.offset, b.bytes());
    meter_.add_live(space_of(b.section), b.category, -b.bytes());
    if (where_.step <= options_.span_steps)
      trace_.memory_events.push_back({.rank = rank_,
                                      .space = space_of(b.section),
                                      .category = b.category,
                                      .phase = where_.phase,
                                      .step = where_.step,
                                      .name = static_cast<std::int32_t>(&b - program_.buffers.data()),
                                      .time_ns = now_ns(),
                                      .delta_bytes = -b.bytes()});
  });
}

Status CpuDevice::map(StreamId, const Op& op) {
  note_call(false);
  return guarded(op, [&] {
    const std::int64_t base = bases_[static_cast<std::size_t>(op.section)];
    Arena& a = arena(op.section);
    const std::int64_t before = a.counters().mapped, start = now_ns(), cpu = cpu_ns();
    a.map(base + op.map_begin, base + op.map_end,
          fmt::format("section {} in phase {}", name_of(op.section),
                      plan_.phases[static_cast<std::size_t>(where_.phase)].name));
    meter_.add_mapped(space_of(op.section), a.counters().mapped - before);
    note_mapping(op, start, cpu);
  });
}

Status CpuDevice::unmap(StreamId, const Op& op) {
  note_call(false);
  if (auto s = drain(); !s) return s;
  return guarded(op, [&] {
    const std::int64_t base = bases_[static_cast<std::size_t>(op.section)];
    Arena& a = arena(op.section);
    const std::int64_t before = a.counters().mapped, start = now_ns(), cpu = cpu_ns();
    a.unmap(base + op.map_begin, base + op.map_end);
    meter_.add_mapped(space_of(op.section), a.counters().mapped - before);
    note_mapping(op, start, cpu);
  });
}

Status CpuDevice::enqueue(StreamId id, const Op& op, const Args& args, Work work) {
  note_call(true);
  Stream& s = stream(id);
  s.queue.enqueue([this, &s, &op, args, where = where_, work = std::move(work)] {
    world_.watch().set_op(op.name);
    const bool timed = where.step <= options_.span_steps;
    const std::int64_t start = timed ? now_ns() : 0, cpu = timed ? cpu_ns() : 0;
    std::int64_t bytes = -1;
    try {
      bytes = work(s);
      if (options_.check_finite) check_outputs(s, op, args.sizes);
    } catch (const InternalError& e) {
      throw InternalError(fmt::format("{} (op {} '{}')", e.what(), name_of(op.kind), op.name));
    } catch (const std::exception& e) {
      throw RuntimeFailure(fmt::format("{} (op {} '{}')", e.what(), name_of(op.kind), op.name));
    }
    if (timed) s.timed.push_back({&op, where, start, now_ns(), cpu, cpu_ns(), bytes, args.sizes});
  });
  return {};
}

Status CpuDevice::compute(StreamId id, const Op& op, const Args& args) {
  const OpKernel kernel = op_kernel(op.kind);
  HB_CHECK(kernel, "no kernel for {}", name_of(op.kind));
  return enqueue(id, op, args, [this, &op, kernel, sizes = args.sizes](Stream& s) {
    kernel({s.context, *this, op, sizes});
    return std::int64_t{-1};
  });
}

Status CpuDevice::copy(StreamId id, const Op& op, const Args& args) {
  switch (op.kind) {
    case OpKind::feed:
      return enqueue(id, op, args, [this, &op, args](Stream&) {
        const Tensor& t = op.outputs[0];
        driver_->feed(rank_, op, args, {address(t), static_cast<std::size_t>(t.bytes(args.sizes))});
        return std::int64_t{-1};
      });
    case OpKind::fetch:
      return enqueue(id, op, args, [this, &op, args](Stream&) {
        const Tensor& t = op.inputs[0];
        driver_->fetch(rank_, op, args, {address(t), static_cast<std::size_t>(t.bytes(args.sizes))});
        return std::int64_t{-1};
      });
    case OpKind::peer_copy:
      return enqueue(id, op, args, [this, &op, sizes = args.sizes](Stream& s) { return run_peer_copy(s, op, sizes); });
    default:
      return enqueue(id, op, args, [this, &op, sizes = args.sizes](Stream& s) {
        kernels::copy(s.context, address(op.inputs[0]), address(op.outputs[0]), op.inputs[0].bytes(sizes));
        return std::int64_t{-1};
      });
  }
}

Status CpuDevice::collective(StreamId id, const Op& op, const Args& args) {
  return enqueue(id, op, args, [this, &op, sizes = args.sizes](Stream& s) {
    run_collective(s, op, sizes);
    return std::int64_t{-1};
  });
}

void CpuDevice::run_collective(Stream& s, const Op& op, const Sizes& sizes) {
  Communicator& c = communicator(op.group, s.id);
  c.set_tag(tag_of(where_.step, where_.phase));
  const std::int64_t padding = op.integer(Attr::padding_bytes, 0);
  switch (op.kind) {
    case OpKind::all_gather:
      return c.all_gather(address(op.inputs[0]), address(op.outputs[0]), op.inputs[0].bytes(sizes), padding);
    case OpKind::reduce_scatter:
      return c.reduce_scatter(address(op.inputs[0]), address(op.outputs[0]), op.outputs[0].elements(sizes),
                              op.inputs[0].dtype, padding);
    case OpKind::all_reduce:
      return c.all_reduce(address(op.inputs[0]), address(op.outputs[0]), op.inputs[0].elements(sizes),
                          op.inputs[0].dtype, op.integer(Attr::reduce_max, 0) != 0 ? ReduceOp::max : ReduceOp::sum,
                          padding);
    case OpKind::broadcast:
      return c.broadcast(address(op.outputs[0]), op.outputs[0].bytes(sizes),
                         static_cast<int>(op.integer(Attr::src_rank, 0)));
    case OpKind::barrier:
      return c.barrier();
    default:
      HB_CHECK(false, "{} is no collective of this backend", name_of(op.kind));
  }
}

/// Strided reads of peers' memory: the same-named buffer of each peer, wherever its own program put it.
std::int64_t CpuDevice::run_peer_copy(Stream& s, const Op& op, const Sizes&) {
  Communicator& c = communicator(op.group, s.id);
  c.set_tag(tag_of(where_.step, where_.phase));
  const Buffer& mine = program_.buffers[static_cast<std::size_t>(op.inputs[0].buffer)];
  const auto& members = plan_.group_of(op.group, rank_);
  std::int64_t remote = 0;
  for (const Box& b : op.boxes) {
    const std::byte* from = address(op.inputs[0]);
    if (b.peer >= 0) {
      const auto program = static_cast<std::size_t>(
          plan_.program_of_rank[static_cast<std::size_t>(members[static_cast<std::size_t>(b.peer)])]);
      const Buffer* theirs = peer_buffers_[program].at(mine.name);
      const std::int64_t offset =
          section_bases(plan_.programs[program])[static_cast<std::size_t>(theirs->section)] + theirs->offset;
      from = c.peer_pointer(b.peer, region_, offset + op.inputs[0].offset_bytes);
      if (!from)
        throw RuntimeFailure(
            fmt::format("sync.transport ipc needs shared memory with rank {}, which is on another host; use collective",
                        members[static_cast<std::size_t>(b.peer)]));
      remote += b.rows * b.cols * size_of(op.inputs[0].dtype);
    }
    const Tensor& to = op.outputs[static_cast<std::size_t>(b.output)];
    const kernels::Box box{b.src_offset, b.src_pitch, b.dst_offset, b.dst_pitch, b.rows, b.cols};
    kernels::copy_boxes(s.context, {from, op.inputs[0].dtype}, address(to), to.dtype, {&box, 1});
  }
  c.note_peer_read(remote);
  return remote;
}

void CpuDevice::check_outputs(Stream& s, const Op& op, const Sizes& sizes) const {
  if (!is_compute(op.kind) || op.kind == OpKind::kv_write)
    return;  // what only moves data makes no NaN, and may fill its output in parts
  for (const Tensor& t : op.outputs) {
    if (t.dtype != DType::f32 && t.dtype != DType::bf16) continue;
    const auto found = kernels::find_nonfinite(s.context, {address(t), t.dtype}, t.elements(sizes));
    if (found.count > 0)
      throw RuntimeFailure(fmt::format("{} NaN or infinite elements, the first at index {} of '{}'", found.count,
                                       found.first, program_.buffers[static_cast<std::size_t>(t.buffer)].name));
  }
}

Status CpuDevice::record(StreamId id, EventId event) {
  note_call(true);
  stream(id).queue.record(events_[static_cast<std::size_t>(event)]);
  return {};
}

Status CpuDevice::wait(StreamId id, EventId event) {
  note_call(true);
  stream(id).queue.wait(events_[static_cast<std::size_t>(event)]);
  return {};
}

Status CpuDevice::drain() {
  static const Op synchronise{};
  return guarded(synchronise, [&] {
    for (auto& s : streams_)
      if (s) s->queue.sync();
  });
}

Status CpuDevice::sync() {
  const bool measure = options_.measure_cpu && where_.step <= options_.span_steps;
  if (measure && stretch_.calls > 0) {
    stretch_.step = where_.step;
    stretch_.phase = where_.phase;
    stretch_.issue_ns += cpu_ns() - host_mark_ns_;
    host_times_.push_back(stretch_);
  }
  auto s = drain();
  stretch_ = {};
  decided_ = false;
  if (measure) host_mark_ns_ = cpu_ns();
  if (!s) s.error().front().notes.clear();  // the op that failed is named in the message itself
  return s;
}

RankTraffic CpuDevice::traffic() const {
  RankTraffic out;
  for (const auto& [key, c] : communicators_)
    for (const CommTraffic& row : c->traffic()) {
      const TrafficKey at{.step = row.tag / 256,
                          .phase = static_cast<std::int16_t>(row.tag % 256),
                          .group = static_cast<std::int16_t>(key.first),
                          .op = kind_of(row.op)};
      TrafficCount& sum = out[at];
      sum.calls += row.calls;
      sum.payload_bytes += row.payload_bytes;
      sum.padding_bytes += row.padding_bytes;
      sum.wire_bytes += row.wire_bytes;
    }
  return out;
}

bool CpuDevice::is_mapped(const Buffer& b) const { return device_.counters().mapped > 0 && b.bytes() > 0; }

std::vector<TimedOp> CpuDevice::timings() const {
  std::vector<TimedOp> out = host_timed_;
  for (const auto& s : streams_)
    if (s)
      for (const Stream::Timed& t : s->timed)
        out.push_back(
            {t.op, s->id, t.where.step, t.where.phase, t.sizes, t.start_ns, t.end_ns, t.cpu_start_ns, t.cpu_end_ns});
  return out;
}

Trace CpuDevice::take_trace() {
  const auto ranks = static_cast<std::size_t>(plan_.num_ranks());
  trace_.memory.resize(ranks);
  trace_.traffic.resize(ranks);
  trace_.memory[static_cast<std::size_t>(rank_)] = meter_.result();
  trace_.traffic[static_cast<std::size_t>(rank_)] = traffic();
  HB_CHECK(device_.counters().live_peak == meter_.result().device.peak_bytes,
           "the arena's peak of live bytes {} is not the meter's {}", device_.counters().live_peak,
           meter_.result().device.peak_bytes);
  for (MemoryEvent& e : trace_.memory_events) {  // buffer ids become names
    trace_.names.push_back(program_.buffers[static_cast<std::size_t>(e.name)].name);
    e.name = static_cast<std::int32_t>(trace_.names.size()) - 1;
  }
  std::unordered_map<const Op*, std::int32_t> ids;
  for (auto& s : streams_) {
    if (!s) continue;
    for (const Stream::Timed& t : s->timed) {
      auto [it, added] = ids.try_emplace(t.op, static_cast<std::int32_t>(trace_.names.size()));
      if (added) trace_.names.push_back(t.op->name);
      trace_.spans.push_back({.rank = rank_,
                              .stream = s->id,
                              .kind = t.op->kind,
                              .phase = t.where.phase,
                              .step = t.where.step,
                              .name = it->second,
                              .start_ns = t.start_ns,
                              .end_ns = t.end_ns,
                              .bytes = t.bytes >= 0 ? t.bytes : op_bytes(*t.op, t.sizes),
                              .flops = op_flops(*t.op, t.sizes)});
    }
  }
  return std::move(trace_);
}

}  // namespace hotbunk
