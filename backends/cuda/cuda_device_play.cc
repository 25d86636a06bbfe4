// Blocks as a CudaDevice plays them: turns of what meets other ranks, runs of ops that become graphs, and ops that are
// launched together.
#include <utility>

#include "backends/cuda/cuda_device.h"
#include "backends/cuda/cuda_device_stream.h"
#include "backends/cuda/many_tensors.h"
#include "base/check.h"
#include "runtime/guarded.h"

namespace hotbunk::cuda {
namespace {

/// OpCalls of bound ops, with what they refer to.
class BoundCalls {
 public:
  BoundCalls(const ProgramMemory& memory, std::span<const BoundOp> ops, const Sizes& sizes, const Places& places) {
    addresses_.reserve(ops.size());
    for (const BoundOp& op : ops) {
      addresses_.emplace_back(memory, op);
      calls_.push_back({addresses_.back(), *op, sizes, places, op});
    }
  }
  std::span<const OpCall> calls() const { return calls_; }

 private:
  std::vector<BoundAddresses> addresses_;
  std::vector<OpCall> calls_;
};

}  // namespace

void CudaDevice::begin_turns(const Block& block) {
  const std::size_t phase = static_cast<std::size_t>(record_.where().phase);
  const std::vector<Block>& blocks = program_.phases[phase];
  const auto at = static_cast<std::size_t>(&block - blocks.data());
  HB_CHECK(at < blocks.size(), "block '{}' is none of the phase's", block.name);
  turns_.places = &(*launch_places_)[phase][at];
  turns_.asked = 0;
  turns_.first = launch_order_->reserve(std::ssize(*turns_.places));
}

Status CudaDevice::play(const Program& program, const Block& block, const Args& args) {
  if (!launch_order_) return play_ops(program, block, args);
  begin_turns(block);
  Status done = play_ops(program, block, args);
  if (!done) launch_order_->give_up();
  return done;
}

Status CudaDevice::play_ops(const Program& program, const Block& block, const Args& args) {
  const auto& where = record_.where();
  // Where every op has a span or its numbers are looked at, each is launched by itself.
  if (!options_.graphs || !plan_.phases[static_cast<std::size_t>(where.phase)].driven || record_.keeps(where) ||
      watch_.watching())
    return Device::play(program, block, args);
  HB_CHECK(args.times == 1, "this device plays a block once, not {} times together", args.times);
  Status done;
  for (const Call& call : block.calls) {
    const auto [known, first] = graph_runs_.try_emplace(&call);
    if (first) known->second = graph_runs(program, call);
    auto run = known->second.begin();
    const auto runs_end = known->second.end();
    std::size_t index = 0;
    std::vector<BoundOp> launches;
    each_step(
        program, block, call,
        [&](const BoundOp& op) {
          const std::size_t i = index++;
          if (!done) return;
          if (run == runs_end || i < run->begin || op->kind == OpKind::alloc || op->kind == OpKind::free) {
            done = dispatch(*this, op, args);
            return;
          }
          record_.note_enqueued(op->stream);
          done = check_order(op, args.sizes);
          launches.push_back(op);
          if (i + 1 < run->end) return;
          if (done) enqueue_run(call, *run, std::exchange(launches, {}), args.sizes);
          ++run;
        },
        [&](const Mark& m) {
          if (done) done = m.kind == OpKind::record ? record(m.stream, m.event) : wait(m.stream, m.event);
        });
  }
  return done;
}

void CudaDevice::enqueue_run(const Call& call, const GraphRun& run, std::vector<BoundOp> ops, const Sizes& sizes) {
  launch_joined();
  drained_ = false;
  Stream& s = stream(ops.front()->stream);
  s.queue->enqueue([this, &s, key = OpGraphs::key_of(call, run, sizes), ops = std::move(ops), sizes] {
    const auto launch_all = [&] {
      for (const BoundOp& op : ops) {
        world_.watch().set_op(op.call->name, op->name);
        const BoundAddresses addresses(memory_, op);
        naming(op, [&] { op_launch(op->kind)(s.call({addresses, *op, sizes, places_, op}, tables_)); });
      }
    };
    world_.watch().set_op(ops.front().call->name, ops.front()->name);
    const NvtxRange range(ops.front().body().name.c_str());
    s.graphs.run(key, ops.front(), launch_all);
    for (std::size_t op = 0; op < ops.size(); ++op) world_.watch().note_finished();
  });
}

Status CudaDevice::join(StreamId id, const BoundOp& op, const Args& args) {
  record_.note_enqueued(id);
  if (auto s = check_order(op, args.sizes); !s) return s;
  if (!joined_.empty()) {
    const BoundCalls waiting(memory_, joined_, joined_sizes_, places_), next(memory_, {&op, 1}, args.sizes, places_);
    if (joined_.front()->stream != id || joined_sizes_ != args.sizes || !joins(waiting.calls(), next.calls().front()))
      launch_joined();
  }
  drained_ = false;
  joined_.push_back(op);
  joined_sizes_ = args.sizes;
  return {};
}

void CudaDevice::launch_joined() {
  if (joined_.empty()) return;
  Stream& s = stream(joined_.front()->stream);
  s.queue->enqueue([this, &s, ops = std::exchange(joined_, {}), sizes = joined_sizes_] {
    const BoundOp& first = ops.front();
    world_.watch().set_op(first.call->name, first->name);
    const NvtxRange range(first.body().name.c_str());
    const BoundCalls calls(memory_, ops, sizes, places_);
    naming(first, [&] { launch_together(calls.calls(), s.launch, s.scratch.address()); });
    for (std::size_t op = 0; op < ops.size(); ++op) world_.watch().note_finished();
  });
}

}  // namespace hotbunk::cuda
