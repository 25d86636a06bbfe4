#include "backends/cuda/cuda_device.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <utility>

#include "backends/cuda/cuda_device_stream.h"
#include "backends/cuda/many_tensors.h"
#include "backends/cuda/pinned_arena.h"
#include "base/check.h"
#include "runtime/guarded.h"
#include "trace/capacity.h"

namespace hotbunk::cuda {
namespace {

BookOptions book_options(const Plan& plan, const Program& program, Space space) {
  const ArenaExtent extent = arena_extent(plan, program, space);
  return {.name = std::string(name_of(space)),
          .reserve_bytes = extent.reserve_bytes,
          .capacity_bytes = extent.capacity_bytes,
          .chunk_bytes = plan.chunk_bytes};
}

/// What is mapped and unmapped of device sections, from the arena's base.
DeviceArena::Ranges ranges_of(const Plan& plan, const Program& program) {
  const std::vector<std::int64_t> bases = section_bases(program);
  const auto range_of = [&](const Op& op) -> std::optional<std::pair<std::int64_t, std::int64_t>> {
    if (op.kind != OpKind::map && op.kind != OpKind::unmap) return {};
    if (program.section(op.section).space != Space::device) return {};
    const std::int64_t base = bases[static_cast<std::size_t>(op.section)];
    return std::pair{base + op.map_begin, base + op.map_end};
  };
  DeviceArena::Ranges out;
  for (const Body& body : program.bodies)
    for (const Op& op : body.ops)
      if (const auto range = range_of(op)) out.cuts.insert(out.cuts.end(), {range->first, range->second});
  for (std::size_t phase = 0; phase < program.phases.size(); ++phase) {
    if (plan.phases[phase].when == When::epilogue) continue;
    for (const Block& block : program.phases[phase])
      each_op(program, block, [&](const BoundOp& op) {
        if (const auto range = range_of(*op); range && op->kind == OpKind::unmap) out.sleeping.push_back(*range);
      });
  }
  return out;
}

std::shared_ptr<DeviceArena> make_arena(const Plan& plan, const Program& program, CudaWorld& world,
                                        const CudaOptions& options, PeerMemory* peers) {
  auto arena = std::make_shared<DeviceArena>(world.context(), book_options(plan, program, Space::device),
                                             ranges_of(plan, program),
                                             DeviceArena::Users{peers, options.scope, world.registered_memory()});
  world.local().set_arena(options.scope, world.rank(), arena->base());
  return arena;
}

}  // namespace

CudaDevice::CudaDevice(const Plan& plan, Rank rank, CudaWorld& world, hotbunk::Driver* driver,
                       const CudaOptions& options, PeerMemory* peers)
    : plan_(plan),
      program_(plan.program(rank)),
      rank_(rank),
      places_(places_of(plan, rank)),
      world_(world),
      context_(world.context()),
      driver_(driver),
      options_(options),
      peers_(peers),
      arena_(make_arena(plan, program_, world, options, peers)),
      memory_(program_, arena_,
              std::make_unique<PinnedArena>(context_, book_options(plan, program_, Space::host), options.host_threads)),
      tables_(context_, program_, places_),
      events_(context_),
      record_(plan, rank, {options.span_steps, false}, opened_ns(world, options.scope)),
      issued_(static_cast<std::size_t>(program_.num_events)),
      latest_(static_cast<std::size_t>(program_.num_events)) {
  world_.device_begins();
  make_streams();
  set_base();
  communicators_.emplace(plan, rank, options.span_steps, options.scope,
                         [&](std::span<const int> ranks, const std::string& name, StreamId id) {
                           return world.communicator(ranks, name, stream(id).launch.stream());
                         });
  if (world.over_processes() && world.size() > 1) launch_places_ = launch_places(plan, rank);
  if (launch_places_) launch_order_ = std::make_shared<LaunchOrder>();
  if (options.check_order) order_.emplace(plan, program_);
}

CudaDevice::~CudaDevice() {
  if (launch_order_) launch_order_->give_up();
  world_.device_ends(drained_);
}

void CudaDevice::make_streams() {
  std::array<std::int64_t, max_streams> scratch{};
  std::array<bool, max_streams> used{};
  std::array<Stream::Libraries, max_streams> libraries{};
  used[static_cast<std::size_t>(lead_stream)] = true;
  for (const Body& body : program_.bodies)
    for (const Op& op : body.ops) {
      const auto s = static_cast<std::size_t>(op.stream);
      used[s] = true;
      scratch[s] = std::max(scratch[s], scratch_bytes(op));
      libraries[s].products |= options_.blas && takes_products(options_.products, op.kind);
      libraries[s].attention |= options_.dnn && op.kind == OpKind::attention_backward;
    }
  for (const auto& blocks : program_.phases)  // one may record or wait where it has no op
    for (const Block& block : blocks)
      for (const Call& call : block.calls)
        for (const Mark& m : call.marks) used[static_cast<std::size_t>(m.stream)] = true;
  for (const Program& program : plan_.programs)  // a group's communicator is made by all its ranks, whoever uses it
    for (const Body& body : program.bodies)
      for (const Op& op : body.ops)
        if (is_communication(op.kind) && !plan_.group_of(op.group, rank_).empty())
          used[static_cast<std::size_t>(op.stream)] = true;
  for (std::size_t s = 0; s < used.size(); ++s) {
    if (!used[s]) continue;
    const auto& info = plan_.stream(static_cast<StreamId>(s));
    const int host_threads = info.kind == StreamKind::host ? options_.host_threads : 1;
    streams_[s] = std::make_unique<Stream>(world_, info.name, scratch[s], options_, libraries[s], host_threads);
  }
}

void CudaDevice::enter(std::int32_t step, std::int16_t phase) {
  memory_.enter(step, phase);
  record_.enter(step, phase);
  phase_range_.emplace(plan_.phases[static_cast<std::size_t>(phase)].name.c_str());
  world_.watch().set_phase(plan_.phases[static_cast<std::size_t>(phase)].name);
}

void CudaDevice::leave(std::int64_t blocks) {
  launch_joined();
  record_.leave(blocks);
  phase_range_.reset();
  communicators_->fold_traffic(record_.where().step);
}

// Memory is booked when the call comes, in program order (DESIGN: one total program order per rank). Mapping touches
// fresh ranges only, so it can happen at once; unmapping waits until nothing runs.

Status CudaDevice::alloc(StreamId id, const BoundOp& op) {
  record_.note_call();
  return guarded(op, [&] { record_.note_live(id, op.allocated(), memory_.alloc(op.allocated())); });
}

Status CudaDevice::free(StreamId id, const BoundOp& op) {
  record_.note_call();
  return guarded(op, [&] { record_.note_live(id, op.allocated(), memory_.free(op.allocated())); });
}

Status CudaDevice::map(StreamId, const BoundOp& op) {
  record_.note_call();
  const auto& where = record_.where();
  if (!memory_.fits(*op))
    return fail(does_not_fit(plan_,
                             {.rank = rank_,
                              .step = where.step,
                              .phase = where.phase,
                              .op = op,
                              .mapped_bytes = memory_.mapped_bytes(op.section().space)},
                             [this](const Buffer& b) { return memory_.is_live(b); }));
  return guarded(op, [&] {
    const auto start = record_.now();
    const auto& phase = plan_.phases[static_cast<std::size_t>(where.phase)].name;
    memory_.map(*op, fmt::format("section {} in phase {}", op.section().name, phase));
    record_.note_mapping(op, start);
    keep_timing(op, {}, record_.where(), record_.now().ns - start.ns);
  });
}

Status CudaDevice::unmap(StreamId, const BoundOp& op) {
  record_.note_call();
  if (auto s = drain(); !s) {  // an op before it, which is then named in the message, or this wait
    s.error().front().notes.push_back(fmt::format("before op {} '{}'", name_of(op->kind), label_of(op)));
    return s;
  }
  return guarded(op, [&] {
    const auto start = record_.now();
    memory_.unmap(*op);
    record_.note_mapping(op, start);
    keep_timing(op, {}, record_.where(), record_.now().ns - start.ns);
  });
}

Sizes CudaDevice::sizes_before(const BoundOp& op, const Sizes& said) const {
  Sizes sizes = said;
  if (op->has(Attr::count))
    for (const ExtentId e : plan_.counted_extents(*op)) sizes[e] = uncounted;
  return sizes;
}

Sizes CudaDevice::sizes_now(Stream& s, const BoundOp& op, const Addresses& addresses, Sizes sizes) const {
  if (!op->has(Attr::count)) return sizes;
  const Tensor* input = &op->inputs[op->num_operands()];
  for (const ExtentId e : plan_.counted_extents(*op)) {
    const Tensor& count = *input++;
    const std::byte* at = addresses.address(count);
    if (space_of(op, count) == Space::device) {
      at = s.read(at, sizeof sizes[e]);
    } else {
      s.synchronize();
      s.touch(op, at, sizeof sizes[e], false);
    }
    std::memcpy(&sizes[e], at, sizeof sizes[e]);
    const Extent& extent = plan_.extent(e);
    if (sizes[e] < 0 || sizes[e] > extent.capacity)
      throw RuntimeFailure(
          fmt::format("the count of '{}' is {}, its capacity {}", extent.name, sizes[e], extent.capacity));
  }
  return sizes;
}

Status CudaDevice::enqueue(StreamId id, const BoundOp& op, const Args& args, Work work) {
  launch_joined();
  drained_ = false;
  record_.note_enqueued(id);
  const Sizes before = sizes_before(op, args.sizes);
  if (auto s = check_order(op, before); !s) return s;
  Stream& s = stream(id);
  s.queue->enqueue([this, &s, op, sizes = before, where = record_.where(), work = std::move(work),
                    place = watch_.next(rank_, op)]() mutable {
    world_.watch().set_op(op.call->name, op->name);
    const NvtxRange range(op.body().name.c_str());
    const BoundAddresses addresses(memory_, op);
    const CudaCall call = s.call({addresses, *op, sizes, places_, op}, tables_);
    std::optional<Timed> timed;
    naming(op, [&] {
      sizes = sizes_now(s, op, addresses, sizes);
      if (record_.keeps(where)) {
        timed = {op, where, sizes, -1, events_.take(true), events_.take(true)};
        HB_CUDA(s.launch.driver(), cuEventRecord(timed->start.get(), s.launch.stream()));
      }
      const std::int64_t bytes = work(s, call);
      if (timed) {
        HB_CUDA(s.launch.driver(), cuEventRecord(timed->end.get(), s.launch.stream()));
        timed->bytes = bytes;
        s.timed.push_back(std::move(*timed));
      }
      if (place) watch_.look(*place, call, [&](const OpCall& c, const Tensor& t) { return nonfinite_in(s, c, t); });
    });
    world_.watch().note_finished();
  });
  return {};
}

Status CudaDevice::compute(StreamId id, const BoundOp& op, const Args& args) {
  if (space_of(op) == Space::host)
    return enqueue(id, op, args, [this](Stream& s, const CudaCall& call) { return on_host(s, call); });
  const OpLaunch launch = op_launch(op->kind);
  HB_CHECK(launch, "no launch for {}", name_of(op->kind));
  // Where every op has a span or its numbers are looked at, each is launched by itself.
  if (is_joined(op->kind) && !op->has(Attr::count) && !record_.keeps(record_.where()) && !watch_.watching())
    return join(id, op, args);
  return enqueue(id, op, args, [launch](Stream&, const CudaCall& call) {
    launch(call);
    return std::int64_t{-1};
  });
}

Status CudaDevice::collective(StreamId id, const BoundOp& op, const Args& args) {
  std::shared_ptr<LaunchOrder::Turn> turn;
  if (launch_order_ && meets_others(*op))
    turn = LaunchOrder::take(launch_order_, turns_.first + turns_.places->at(turns_.asked++));
  return enqueue(id, op, args,
                 [this, phase = record_.where().phase, turn = std::move(turn)](Stream& s, const CudaCall& call) {
                   if (turn) turn->await([&] { world_.watch().check("waiting to launch " + call.bound.name()); });
                   communicators_->collective(
                       call, phase, [&s](const std::byte* from, std::int64_t bytes) { return s.read(from, bytes); });
                   if (turn) turn->done();
                   return std::int64_t{-1};
                 });
}

Status CudaDevice::record(StreamId id, EventId event) {
  launch_joined();
  record_.note_record(id, event);
  if (order_) order_->record(id, event);
  return guarded([] { return std::string("recording an event"); },
                 [&] {
                   const auto at = static_cast<std::size_t>(event);
                   Stream& s = stream(id);
                   const PooledEvent e = latest_[at] = events_.take();
                   s.queue->enqueue([&s, e, event] {
                     naming([&] { return fmt::format("recording event {} on stream {}", event, s.name); },
                            [&] { HB_CUDA(s.launch.driver(), cuEventRecord(e.get(), s.launch.stream())); });
                   });
                   s.queue->record(issued_[at]);
                 });
}

Status CudaDevice::wait(StreamId id, EventId event) {
  launch_joined();
  record_.note_wait(id, event);
  if (order_) order_->wait(id, event);
  const auto at = static_cast<std::size_t>(event);
  if (latest_[at] == nullptr) return {};  // never recorded
  Stream& s = stream(id);
  s.queue->wait(issued_[at]);
  s.queue->enqueue([&s, e = latest_[at], event] {
    naming([&] { return fmt::format("waiting for event {} on stream {}", event, s.name); },
           [&] { HB_CUDA(s.launch.driver(), cuStreamWaitEvent(s.launch.stream(), e.get(), 0)); });
  });
  return {};
}

Status CudaDevice::drain() {
  return guarded([] { return std::string("waiting for the streams"); },
                 [&] {
                   launch_joined();
                   for (auto& s : streams_)
                     if (s) s->queue->sync();
                   naming([] { return std::string("waiting for the streams"); },
                          [&] {
                            for (auto& s : streams_)
                              if (s) s->synchronize(), s->learn();
                            note_timed();
                          });
                   drained_ = true;
                   if (order_) order_->join();
                   const Driver& d = context_.driver();
                   if (d.host_knows == nullptr) return;
                   for (auto& s : streams_)
                     if (s) s->queue->enqueue([&d, known = d.host_knows()] { d.host_learns(known); });
                 });
}

void CudaDevice::note_timed() {
  for (std::size_t id = 0; id < streams_.size(); ++id) {
    if (!streams_[id]) continue;
    for (const Timed& t : streams_[id]->timed) {
      const std::int64_t start = since_base(base_, base_ns_, t.start), end = since_base(base_, base_ns_, t.end);
      record_.note_op(static_cast<StreamId>(id), t.op, t.where, start, end, t.sizes, t.bytes);
      keep_timing(t.op, t.sizes, t.where, end - start);
    }
    streams_[id]->timed.clear();
  }
  if (record_.keeps(record_.where())) set_base();
}

void CudaDevice::keep_timing(const BoundOp& op, const Sizes& sizes, const DeviceRecord::Where& where,
                             std::int64_t nanoseconds) {
  if (options_.keep_timings && record_.keeps(where)) timings_.push_back({op, sizes, where.step, nanoseconds});
}

void CudaDevice::set_base() {
  const Stream& lead = *streams_[static_cast<std::size_t>(lead_stream)];
  const PooledEvent before = std::exchange(base_, events_.take(true));
  HB_CUDA(context_.driver(), cuEventRecord(base_.get(), lead.launch.stream()));
  HB_CUDA(context_.driver(), cuEventSynchronize(base_.get()));
  const std::int64_t now_ns = record_.now().ns;
  // This thread may have learnt late of the base before and at once of this one: what ran between the two must not lie
  // behind what comes.
  base_ns_ = before == nullptr ? now_ns : std::max(now_ns, since_base(before, base_ns_, base_));
}

std::int64_t CudaDevice::since_base(const PooledEvent& base, std::int64_t base_ns, const PooledEvent& event) const {
  float milliseconds = 0;
  HB_CUDA(context_.driver(), cuEventElapsedTime(&milliseconds, base.get(), event.get()));
  return base_ns + std::llround(static_cast<double>(milliseconds) * 1e6);
}

Status CudaDevice::check_order(const BoundOp& op, const Sizes& sizes) {
  if (!order_) return {};
  auto race = order_->touch(op, sizes);
  if (!race) return {};
  return fail(Diagnostic{.code = "E612",
                         .message = *race,
                         .where = {},
                         .notes = {"an order of threads exists in which the one reads or writes what the other writes"},
                         .help = "this is a fault of the plan; please report it with the scenario"});
}

Status CudaDevice::sync() {
  record_.note_sync_begins();
  auto s = drain();
  record_.note_sync_ends();
  if (!s) s.error().front().notes.clear();  // the op that failed is named in the message itself
  return s;
}

std::optional<BadOutput> CudaDevice::first_bad_output() {
  return watch_.first(world_, options_.scope + "first bad output");
}

std::vector<LibraryChoice> CudaDevice::library_choices() const {
  std::map<std::tuple<std::string, std::string, std::string>, std::int64_t> all;
  const auto add = [&](const std::vector<LibraryChoice>& some) {
    for (const LibraryChoice& c : some) all[{c.op, c.by, c.why}] += c.times;
  };
  for (const auto& s : streams_) {
    if (s && s->products) add(s->products->choices());
    if (s && s->attention) add(s->attention->choices());
  }
  std::vector<LibraryChoice> out;
  for (const auto& [of, times] : all) out.push_back({std::get<0>(of), std::get<1>(of), std::get<2>(of), times});
  return out;
}

Trace CudaDevice::take_trace() {
  return record_.take_trace(static_cast<std::size_t>(plan_.num_ranks()), memory_.measured(), communicators_->traffic());
}

}  // namespace hotbunk::cuda
