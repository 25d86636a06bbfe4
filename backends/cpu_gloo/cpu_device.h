// One rank on the CPU: the Device calls, turned into work on stream threads. Internal to the backend.
#pragma once
#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <vector>

#include "backends/cpu_gloo/arena.h"
#include "backends/cpu_gloo/cpu_backend.h"
#include "backends/cpu_gloo/op_kernels.h"
#include "backends/cpu_gloo/stream_thread.h"
#include "trace/meter.h"

namespace hotbunk {

/// Where each section of a program begins in its arena.
std::array<std::int64_t, num_sections> section_bases(const Program&);

class CpuDevice final : public Device, public Addresses {
 public:
  CpuDevice(const Plan&, Rank, World&, Driver*, const CpuOptions&);
  ~CpuDevice() override;

  Rank rank() const override { return rank_; }
  void enter(std::int32_t step, std::int16_t phase) override;
  void leave() override;
  Status alloc(StreamId, const Op&, const Buffer&) override;
  Status free(StreamId, const Op&, const Buffer&) override;
  Status map(StreamId, const Op&) override;
  Status unmap(StreamId, const Op&) override;
  Status compute(StreamId, const Op&, const Args&) override;
  Status copy(StreamId, const Op&, const Args&) override;
  Status collective(StreamId, const Op&, const Args&) override;
  Status record(StreamId, EventId) override;
  Status wait(StreamId, EventId) override;
  Status sync() override;

  std::byte* address(const Tensor&) const override;
  const std::shared_ptr<Arena>& device_arena() const { return device_memory_; }
  const Program& program() const { return program_; }
  std::byte* buffer_address(const Buffer&) const;
  bool is_mapped(const Buffer&) const;
  Trace take_trace();
  /// Every timed op of the kept steps, for calibration; call before take_trace.
  std::vector<TimedOp> timings() const;
  /// Likewise: what the calling thread spent, from the second phase on.
  const std::vector<HostStretch>& host_times() const { return host_times_; }

 private:
  struct Stream;
  struct Where {
    std::int32_t step = 0;
    std::int16_t phase = 0;
  };
  using Work = std::function<std::int64_t(Stream&)>;  // returns bytes for the span; < 0: the catalogue's

  Arena& arena(Section s) { return space_of(s) == Space::device ? device_ : host_; }
  const Arena& arena(Section s) const { return space_of(s) == Space::device ? device_ : host_; }
  Stream& stream(StreamId);
  Communicator& communicator(GroupId, StreamId);
  void open_communicators();
  std::int64_t common_epoch_ns();
  Status enqueue(StreamId, const Op&, const Args&, Work);
  Status drain();
  void run_collective(Stream&, const Op&, const Sizes&);
  std::int64_t run_peer_copy(Stream&, const Op&, const Sizes&);
  void check_outputs(Stream&, const Op&, const Sizes&) const;
  std::int64_t now_ns() const;
  std::int64_t cpu_ns() const;
  void note_call(bool enqueues);
  void note_mapping(const Op&, std::int64_t start_ns, std::int64_t start_cpu_ns);
  RankTraffic traffic() const;
  template <class F>
  Status guarded(const Op&, F&&);

  const Plan& plan_;
  const Program& program_;
  const Rank rank_;
  World& world_;
  Driver* driver_;
  const CpuOptions options_;
  const std::array<std::int64_t, num_sections> bases_;
  /// Shared with the backend: peers and the world know the device arena until the world is left.
  const std::shared_ptr<Arena> device_memory_;
  Arena& device_;
  Arena host_;
  int region_ = -1;  // World::share index of the device arena
  std::array<std::unique_ptr<Stream>, num_streams> streams_;
  std::map<std::pair<GroupId, StreamId>, std::unique_ptr<Communicator>> communicators_;
  std::vector<StreamEvent> events_;
  std::vector<std::map<std::string, const Buffer*>> peer_buffers_;  // [program] by name; only what peer_copy reads
  MemoryMeter meter_;
  std::int64_t epoch_ns_ = 0;
  Where where_;
  std::vector<TimedOp> host_timed_;      // map and unmap, which run on the calling thread
  std::vector<HostStretch> host_times_;  // with options_.measure_cpu
  HostStretch stretch_;                  // since the last sync
  bool decided_ = false;                 // a call has come since then
  std::int64_t host_mark_ns_ = 0;        // the calling thread's CPU time at the last sync, then at the first call
  Trace trace_;
};

}  // namespace hotbunk
