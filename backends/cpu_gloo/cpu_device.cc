#include "backends/cpu_gloo/cpu_device.h"

#include <fmt/format.h>

#include <cstring>
#include <exception>
#include <utility>

#include "backends/cpu_gloo/kernels/elementwise.h"
#include "backends/cpu_gloo/section_pieces.h"
#include "base/check.h"
#include "runtime/guarded.h"
#include "trace/capacity.h"

namespace hotbunk {
namespace {

ArenaOptions arena_options(const Plan& plan, const Program& program, Space space) {
  const ArenaExtent extent = arena_extent(plan, program, space);
  return {.name = std::string(name_of(space)),
          .reserve_bytes = extent.reserve_bytes,
          .capacity_bytes = extent.capacity_bytes};
}

std::shared_ptr<Arena> device_arena(const Plan& plan, const Program& program, const MovingCopies& moving, bool shared) {
  ArenaOptions options = arena_options(plan, program, Space::device);
  if (shared) {
    options.shared = true;
    options.pieces = section_pieces(plan, program, moving);
  }
  return std::make_shared<Arena>(options);
}

std::shared_ptr<Arena> host_arena(const Plan& plan, const Program& program, const MovingCopies& moving) {
  auto out = std::make_shared<Arena>(arena_options(plan, program, Space::host));
  const std::vector<std::int64_t> bases = section_bases(program);
  for (const SectionId id : moving.host_sections()) {
    const std::int64_t base = bases[static_cast<std::size_t>(id)];
    out->fill_later(base, base + program.section(id).bytes);
  }
  return out;
}

/// Peers' weights are read in place whatever carries the collectives (sync.transport ipc).
int shared_region(const Plan& plan, CpuWorld& world, const CpuOptions& options, const Arena& arena) {
  return world.size() > 1 && (options.transport != Transport::gloo || reads_peers(plan)) ? world.share(arena) : -1;
}

FindNonFinite find_nonfinite(kernels::KernelContext& context) {
  return [&context](const OpCall& call, const Tensor& t) {
    const auto found = kernels::find_nonfinite(context, {call.addresses.address(t), t.dtype}, t.elements(call.sizes));
    return NonFinite{found.count, found.first};
  };
}

}  // namespace

struct CpuDevice::Stream {
  Stream(std::string name, int threads, const kernels::ProductPaths& paths, StreamThread::Mode mode)
      : context(threads, paths), queue(std::move(name), mode) {}
  kernels::KernelContext context;  // before the queue: the queue's thread ends first
  StreamThread queue;
};

CpuDevice::CpuDevice(const Plan& plan, Rank rank, CpuWorld& world, Driver* driver, const CpuOptions& options)
    : plan_(plan),
      program_(plan.program(rank)),
      rank_(rank),
      places_(places_of(plan, rank)),
      world_(world),
      driver_(driver),
      options_(options),
      moving_(program_),
      arena_(device_arena(plan, program_, moving_, world.size() > 1)),
      host_arena_(host_arena(plan, program_, moving_)),
      memory_(program_, arena_, host_arena_),
      region_(shared_region(plan, world, options, *arena_)),
      communicators_(plan, rank, options.span_steps, options.scope,
                     [&](std::span<const int> ranks, const std::string& name, StreamId) {
                       return options.transport && ranks.size() > 1
                                  ? world.communicator(ranks, name, *options.transport)
                                  : world.communicator(ranks, name);
                     }),
      record_(plan, rank, {options.span_steps, options.measure_cpu}, opened_ns(world, options.scope)),
      events_(static_cast<std::size_t>(program_.num_events)) {
  const auto mode = world.size() > 1 ? StreamThread::Mode::threaded : StreamThread::Mode::inlined;
  const auto need = [&](StreamId id) {
    auto& s = streams_[static_cast<std::size_t>(id)];
    const bool computes = id == lead_stream || plan.stream(id).kind == StreamKind::host;
    if (!s)
      s = std::make_unique<Stream>(plan.stream(id).name, computes ? options.compute_threads : 1, options.product_paths,
                                   mode);
  };
  for (const Body& body : program_.bodies)
    for (const Op& op : body.ops) need(op.stream);
  for (const auto& blocks : program_.phases)  // one may record or wait where it has no op
    for (const Block& block : blocks)
      for (const Call& call : block.calls)
        for (const Mark& m : call.marks) need(m.stream);
  if (options.check_order) order_.emplace(plan, program_);
  if (options.poison) poison_.emplace([this](StreamId id) -> StreamThread& { return stream(id).queue; });
}

CpuDevice::~CpuDevice() = default;

void CpuDevice::enter(std::int32_t step, std::int16_t phase) {
  memory_.enter(step, phase);
  record_.enter(step, phase);
  world_.watch().set_phase(plan_.phases[static_cast<std::size_t>(phase)].name);
}

void CpuDevice::leave(std::int64_t blocks) {
  record_.leave(blocks);
  communicators_.fold_traffic(record_.where().step);
  if (!options_.check_resident) return;
  const std::int64_t resident = arena_->resident_bytes(), mapped = arena_->counters().mapped;
  HB_CHECK(std::abs(resident - mapped) <= plan_.chunk_bytes,
           "after phase {} {} bytes of the device arena are resident, {} are mapped",
           plan_.phases[static_cast<std::size_t>(record_.where().phase)].name, resident, mapped);
}

// Memory is booked when the call comes, in program order (DESIGN: one total program order per rank). Mapping touches
// fresh ranges only, so it can happen at once; unmapping waits until nothing runs.

Status CpuDevice::alloc(StreamId id, const BoundOp& op) {
  record_.note_call();
  return guarded(op, [&] {
    const BoundBuffer b = op.allocated();
    record_.note_live(id, b, memory_.alloc(b));
    if (poison_ && b.bytes() > 0)
      poison_->poison(id, b, [this, b] {
        const Arena& arena = b.space() == Space::device ? *arena_ : *host_arena_;
        const std::int64_t begin = memory_.address(b.section(), b.offset) - arena.base();
        arena.each_present(begin, begin + b.bytes(), [&](std::int64_t from, std::int64_t to) {
          std::memset(arena.at(from), 0xff, static_cast<std::size_t>(to - from));  // NaN
        });
      });
  });
}

Status CpuDevice::free(StreamId id, const BoundOp& op) {
  record_.note_call();
  return guarded(op, [&] { record_.note_live(id, op.allocated(), memory_.free(op.allocated())); });
}

Status CpuDevice::map(StreamId, const BoundOp& op) {
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
  });
}

Status CpuDevice::unmap(StreamId, const BoundOp& op) {
  record_.note_call();
  if (auto s = drain(); !s) return s;
  return guarded(op, [&] {
    const auto start = record_.now();
    memory_.unmap(*op);
    if (op.section().space == Space::device) world_.forget_peers();  // what they unmap is not to stay here
    record_.note_mapping(op, start);
  });
}

Sizes CpuDevice::sizes_before(const BoundOp& op, const Sizes& said) const {
  Sizes sizes = said;
  if (op->has(Attr::count))
    for (const ExtentId e : plan_.counted_extents(*op)) sizes[e] = uncounted;
  return sizes;
}

Sizes CpuDevice::sizes_now(const BoundOp& op, const Addresses& addresses, Sizes sizes) const {
  if (!op->has(Attr::count)) return sizes;
  const Tensor* input = &op->inputs[op->num_operands()];
  for (const ExtentId e : plan_.counted_extents(*op)) {
    std::memcpy(&sizes[e], addresses.address(*input++), sizeof sizes[e]);
    const Extent& extent = plan_.extent(e);
    if (sizes[e] < 0 || sizes[e] > extent.capacity)
      throw RuntimeFailure(
          fmt::format("the count of '{}' is {}, its capacity {}", extent.name, sizes[e], extent.capacity));
  }
  return sizes;
}

Status CpuDevice::enqueue(StreamId id, const BoundOp& op, const Args& args, Work work) {
  record_.note_enqueued(id);
  const Sizes before = sizes_before(op, args.sizes);
  if (auto s = check_order(op, before); !s) return s;
  if (poison_) poison_->touch(op, before);
  Stream& s = stream(id);
  s.queue.enqueue([this, id, &s, op, sizes = before, where = record_.where(), work = std::move(work),
                   place = watch_.next(rank_, op)]() mutable {
    world_.watch().set_op(op.call->name, op->name);
    const BoundAddresses addresses(memory_, op);
    const KernelCall call{{addresses, *op, sizes, places_, op}, s.context};
    const bool timed = record_.keeps(where);
    const auto start = timed ? record_.now() : DeviceRecord::Moment{};
    std::int64_t bytes = -1;
    naming(op, [&] {
      sizes = sizes_now(op, addresses, sizes);
      bytes = work(call);
      if (options_.check_finite)
        if (const std::string bad = bad_output(call, find_nonfinite(s.context)); !bad.empty())
          throw RuntimeFailure(bad);
      if (place) watch_.look(*place, call, find_nonfinite(s.context));
    });
    if (timed) record_.note_op(id, op, where, start, sizes, bytes);
    world_.watch().note_finished();
  });
  return {};
}

Status CpuDevice::compute(StreamId id, const BoundOp& op, const Args& args) {
  const OpKernel kernel = op_kernel(op->kind);
  HB_CHECK(kernel, "no kernel for {}", name_of(op->kind));
  return enqueue(id, op, args, [kernel](const KernelCall& call) {
    kernel(call);
    return std::int64_t{-1};
  });
}

Status CpuDevice::copy(StreamId id, const BoundOp& op, const Args& args) {
  switch (op->kind) {
    case OpKind::feed:
      return enqueue(id, op, args, [this, args](const KernelCall& call) {
        const Tensor& t = call.op.outputs[0];
        driver_->feed(rank_, call.bound, args,
                      {call.addresses.address(t), static_cast<std::size_t>(t.bytes(call.sizes))});
        return std::int64_t{-1};
      });
    case OpKind::fetch:
      return enqueue(id, op, args, [this, args](const KernelCall& call) {
        const Tensor& t = call.op.inputs[0];
        driver_->fetch(rank_, call.bound, args,
                       {call.addresses.address(t), static_cast<std::size_t>(t.bytes(call.sizes))});
        return std::int64_t{-1};
      });
    case OpKind::peer_copy:
      return enqueue(id, op, args,
                     [this, phase = record_.where().phase](const KernelCall& call) { return peer_copy(call, phase); });
    default:
      return enqueue(id, op, args, [this](const KernelCall& call) {
        if (moving_.contains(call.bound)) {
          move(call);
          return std::int64_t{-1};
        }
        const Tensor& from = call.op.inputs[0];
        kernels::copy(call.context, call.addresses.address(from), call.addresses.address(call.op.outputs[0]),
                      from.bytes(call.sizes));
        return std::int64_t{-1};
      });
  }
}

void CpuDevice::move(const KernelCall& call) {
  const Tensor &from = call.op.inputs[0], &to = call.op.outputs[0];
  const std::byte *at = call.addresses.address(from), *there = call.addresses.address(to);
  const std::int64_t bytes = from.bytes(call.sizes);
  const CopyBytes copy = [&](std::byte* t, const std::byte* f, std::int64_t n) {
    kernels::copy(call.context, f, t, n);
  };
  if (call.bound.buffer(from).space() == Space::device)
    arena_->lend(at - arena_->base(), bytes, *host_arena_, there - host_arena_->base(), copy);
  else arena_->take_back(there - arena_->base(), bytes, *host_arena_, at - host_arena_->base(), copy);
}

std::int64_t CpuDevice::peer_copy(const KernelCall& call, std::int16_t phase) {
  const DType dtype = call.op.inputs[0].dtype;
  return communicators_.peer_copy(
      call, phase,
      [this](int peer, std::int64_t offset, std::int64_t) { return world_.peer_pointer(peer, region_, offset); },
      [&](const std::byte* from, const Box& b) {
        const Tensor& to = call.op.outputs[static_cast<std::size_t>(b.output)];
        const kernels::Box box{b.src_offset, b.src_pitch, b.dst_offset, b.dst_pitch, b.rows, b.cols};
        kernels::copy_boxes(call.context, {from, dtype}, call.addresses.address(to), to.dtype, {&box, 1});
      });
}

Status CpuDevice::collective(StreamId id, const BoundOp& op, const Args& args) {
  return enqueue(id, op, args, [this, phase = record_.where().phase](const KernelCall& call) {
    communicators_.collective(call, phase);
    return std::int64_t{-1};
  });
}

Status CpuDevice::record(StreamId id, EventId event) {
  record_.note_record(id, event);
  if (order_) order_->record(id, event);
  stream(id).queue.record(events_[static_cast<std::size_t>(event)]);
  return {};
}

Status CpuDevice::wait(StreamId id, EventId event) {
  record_.note_wait(id, event);
  if (order_) order_->wait(id, event);
  stream(id).queue.wait(events_[static_cast<std::size_t>(event)]);
  return {};
}

Status CpuDevice::drain() {
  return guarded([] { return std::string("waiting for the streams"); },
                 [&] {
                   for (auto& s : streams_)
                     if (s) s->queue.sync();
                   if (order_) order_->join();
                   if (poison_) poison_->join();
                 });
}

Status CpuDevice::check_order(const BoundOp& op, const Sizes& sizes) {
  if (!order_) return {};
  auto race = order_->touch(op, sizes);
  if (!race) return {};
  return fail(Diagnostic{.code = "E612",
                         .message = *race,
                         .where = {},
                         .notes = {"an order of threads exists in which the one reads or writes what the other writes"},
                         .help = "this is a fault of the plan; please report it with the scenario"});
}

Status CpuDevice::sync() {
  record_.note_sync_begins();
  auto s = drain();
  record_.note_sync_ends();
  if (!s) s.error().front().notes.clear();  // the op that failed is named in the message itself
  return s;
}

std::optional<BadOutput> CpuDevice::first_bad_output() {
  return watch_.first(world_, options_.scope + "first bad output");
}

Trace CpuDevice::take_trace() {
  return record_.take_trace(static_cast<std::size_t>(plan_.num_ranks()), memory_.measured(), communicators_.traffic());
}

}  // namespace hotbunk
