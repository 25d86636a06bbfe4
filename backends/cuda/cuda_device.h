// One rank on a CUDA device: the Device calls, turned into work of a host thread per stream, which enqueues it on the
// driver's stream of the same name. Internal to the backend.
//
// Host threads, because some ops need the host when their turn comes: a feed asks the driver, a fetch gives it data, a
// count that the device made sizes the next launch, ranks of a collective meet, an op works on the host's memory. A
// host thread waits only for its own stream; streams wait for each other by events on the device, and what a host
// thread does itself is between two things that it enqueues: behind all before, before all behind.
#pragma once
#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "backends/cuda/cuda_backend.h"
#include "backends/cuda/device_arena.h"
#include "backends/cuda/event_pool.h"
#include "backends/cuda/launch_order.h"
#include "backends/cuda/nvtx.h"
#include "backends/cuda/op_graphs.h"
#include "backends/cuda/op_launches.h"
#include "backends/cuda/staging.h"
#include "graph/program_order.h"
#include "runtime/access_order.h"
#include "runtime/device_record.h"
#include "runtime/number_watch.h"
#include "runtime/plan_communicators.h"
#include "runtime/program_memory.h"
#include "runtime/stream_thread.h"

namespace hotbunk::cuda {

/// Whether ops of the program compute on the host, by where their tensors lie. E601 for one that has some there and
/// others on the device, or that the kernels of where they lie do not compute.
Result<bool> computes_on_host(const Program&, const Backend&);

class CudaDevice final : public Device {
 public:
  /// `peers`: where the plan reads ranks of other processes.
  CudaDevice(const Plan&, Rank, CudaWorld&, hotbunk::Driver*, const CudaOptions&, PeerMemory* peers);
  ~CudaDevice() override;

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
  Status play(const Program&, const Block&, const Args&) override;
  Status sync() override;
  void watch_numbers(std::int64_t block) override { watch_.begin(block); }
  std::optional<BadOutput> first_bad_output() override;

  const Program& program() const { return program_; }
  ProgramMemory& memory() { return memory_; }
  /// Shared with the backend: peers read it until the world is left.
  const std::shared_ptr<DeviceArena>& arena() const { return arena_; }
  const DeviceRecord& measured() const { return record_; }
  Trace take_trace();
  const std::vector<DeviceTiming>& timings() const { return timings_; }
  /// Of all streams, with nothing running.
  std::vector<LibraryChoice> library_choices() const;

 private:
  struct Stream;  // cuda_device_stream.h
  struct Timed;
  using Work = std::function<std::int64_t(Stream&, const CudaCall&)>;  // bytes for the span; < 0: the catalogue's

  Stream& stream(StreamId id) { return *streams_[static_cast<std::size_t>(id)]; }
  void make_streams();
  Status enqueue(StreamId, const BoundOp&, const Args&, Work);
  Status play_ops(const Program&, const Block&, const Args&);
  /// Numbers the turns of the block's meetings.
  void begin_turns(const Block&);
  /// Launches of one run of ops (graph_runs), as a graph from the second time on.
  void enqueue_run(const Call&, const GraphRun&, std::vector<BoundOp>, const Sizes&);
  /// Puts the op with those that wait to be one launch, or launches them first (many_tensors.h).
  Status join(StreamId, const BoundOp&, const Args&);
  /// Launches those that wait. Whatever else is enqueued comes behind them.
  void launch_joined();
  /// What is known when the op is asked for: nothing of what the device counts, whatever the driver expects.
  Sizes sizes_before(const BoundOp&, const Sizes&) const;
  /// When the op's turn comes: with the counts that are its inputs. Throws RuntimeFailure.
  Sizes sizes_now(Stream&, const BoundOp&, const Addresses&, Sizes) const;
  std::int64_t feed(Stream&, const CudaCall&, const Args&);
  std::int64_t fetch(Stream&, const CudaCall&, const Args&);
  std::int64_t copy_between(Stream&, const CudaCall&);
  /// Bytes that came from other ranks.
  std::int64_t peer_copy(Stream&, const CudaCall&, std::int16_t phase);
  /// An op on tensors in the host's memory, behind what the stream has done, for which the host waits.
  std::int64_t on_host(Stream&, const CudaCall&);
  /// Looks at a tensor's numbers on the host, behind what the stream has done.
  NonFinite nonfinite_in(Stream&, const OpCall&, const Tensor&) const;
  Space space_of(const BoundOp& op, const Tensor& t) const { return op.buffer(t).space(); }
  /// Where all of its tensors lie. An op without tensors is the device's.
  Space space_of(const BoundOp& op) const;
  Status drain();
  /// Spans of what ran since the last time, by the device's clock; nothing runs.
  void note_timed();
  /// The device's clock and the host's at one moment, with nothing running.
  void set_base();
  /// When the event was, on the host's clock; `base`: when that one was is known.
  std::int64_t since_base(const PooledEvent& base, std::int64_t base_ns, const PooledEvent& event) const;
  void keep_timing(const BoundOp&, const Sizes&, const DeviceRecord::Where&, std::int64_t nanoseconds);
  Status check_order(const BoundOp&, const Sizes&);

  const Plan& plan_;
  const Program& program_;
  const Rank rank_;
  const Places places_;
  CudaWorld& world_;
  const Context& context_;
  hotbunk::Driver* driver_;
  const CudaOptions options_;
  PeerMemory* const peers_;
  const std::shared_ptr<DeviceArena> arena_;
  ProgramMemory memory_;
  const OpTables tables_;
  EventPool events_;
  DeviceRecord record_;
  std::optional<PlanCommunicators> communicators_;  // made on the streams
  std::optional<NvtxRange> phase_range_;            // from enter() to leave()
  std::optional<LaunchPlaces> launch_places_;       // of collectives over NCCL, where they have an order
  std::shared_ptr<LaunchOrder> launch_order_;       // likewise
  /// Of the block that is played: the number of its first turn, its meetings' places, and how many were asked for.
  struct BlockTurns {
    std::int64_t first = 0;
    const std::vector<std::int32_t>* places = nullptr;
    std::size_t asked = 0;
  } turns_;
  std::vector<StreamEvent> issued_;  // by event: its latest record has been enqueued on the device
  std::vector<PooledEvent> latest_;  // likewise: the device's event of that record
  std::map<const Call*, std::vector<GraphRun>> graph_runs_;
  std::vector<BoundOp> joined_;  // wait to be one launch, of one stream
  Sizes joined_sizes_;
  NumberWatch watch_;
  std::optional<AccessOrder> order_;                          // with check_order
  PooledEvent base_;                                          // of the device's clock since the last sync
  std::vector<DeviceTiming> timings_;                         // with keep_timings; of the calling thread
  bool drained_ = true;                                       // nothing was enqueued since all streams were waited for
  std::int64_t base_ns_ = 0;                                  // the same moment on the host's
  std::array<std::unique_ptr<Stream>, max_streams> streams_;  // last: their threads end before what they work on
};

}  // namespace hotbunk::cuda
