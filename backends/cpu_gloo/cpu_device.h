// One rank on the CPU: the Device calls, turned into work on stream threads. Internal to the backend.
#pragma once
#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "backends/cpu_gloo/arena.h"
#include "backends/cpu_gloo/cpu_backend.h"
#include "backends/cpu_gloo/moving_copies.h"
#include "backends/cpu_gloo/op_kernels.h"
#include "backends/cpu_gloo/poison_order.h"
#include "runtime/access_order.h"
#include "runtime/device_record.h"
#include "runtime/number_watch.h"
#include "runtime/plan_communicators.h"
#include "runtime/program_memory.h"
#include "runtime/stream_thread.h"

namespace hotbunk {

class CpuDevice final : public Device {
 public:
  CpuDevice(const Plan&, Rank, CpuWorld&, Driver*, const CpuOptions&);
  ~CpuDevice() override;

  Rank rank() const override { return rank_; }
  void enter(std::int32_t step, std::int16_t phase) override;
  void leave(std::int64_t blocks) override;
  Status alloc(StreamId, const BoundOp&) override;
  Status free(StreamId, const BoundOp&) override;
  Status map(StreamId, const BoundOp&) override;
  Status unmap(StreamId, const BoundOp&) override;
  Status compute(StreamId, const BoundOp&, const Args&) override;
  Status copy(StreamId, const BoundOp&, const Args&) override;
  Status collective(StreamId, const BoundOp&, const Args&) override;
  Status record(StreamId, EventId) override;
  Status wait(StreamId, EventId) override;
  Status sync() override;
  void watch_numbers(std::int64_t block) override { watch_.begin(block); }
  std::optional<BadOutput> first_bad_output() override;

  const Program& program() const { return program_; }
  const ProgramMemory& memory() const { return memory_; }
  ProgramMemory& memory() { return memory_; }
  /// Shared with the backend: peers and the world know the device arena until the world is left.
  const std::shared_ptr<Arena>& arena() const { return arena_; }
  const DeviceRecord& measured() const { return record_; }
  Trace take_trace();

 private:
  struct Stream;
  using Work = std::function<std::int64_t(const KernelCall&)>;  // returns bytes for the span; < 0: the catalogue's

  Stream& stream(StreamId id) { return *streams_[static_cast<std::size_t>(id)]; }
  Status enqueue(StreamId, const BoundOp&, const Args&, Work);
  /// What is known when the op is asked for: nothing of what the device counts, whatever the driver expects.
  Sizes sizes_before(const BoundOp&, const Sizes&) const;
  /// When the op runs, on its stream's thread: with the counts that are its inputs. Throws RuntimeFailure.
  Sizes sizes_now(const BoundOp&, const Addresses&, Sizes) const;
  Status drain();
  /// One of moving_: pages change their arena (arena.h).
  void move(const KernelCall& call);
  /// Bytes that came from other ranks.
  std::int64_t peer_copy(const KernelCall&, std::int16_t phase);
  /// With CpuOptions::check_order: E612 where two accesses have no order.
  Status check_order(const BoundOp&, const Sizes&);

  const Plan& plan_;
  const Program& program_;
  const Rank rank_;
  const Places places_;
  CpuWorld& world_;
  Driver* driver_;
  const CpuOptions options_;
  const MovingCopies moving_;
  const std::shared_ptr<Arena> arena_;  // of the device
  const std::shared_ptr<Arena> host_arena_;
  ProgramMemory memory_;
  int region_ = -1;  // CpuWorld::share index of the device arena
  PlanCommunicators communicators_;
  DeviceRecord record_;
  NumberWatch watch_;
  std::vector<StreamEvent> events_;
  std::optional<AccessOrder> order_;                          // with check_order
  std::optional<PoisonOrder> poison_;                         // with poison
  std::array<std::unique_ptr<Stream>, max_streams> streams_;  // last: their threads end before what they work on
};

}  // namespace hotbunk
