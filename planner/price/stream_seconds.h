// How long a block of a plan keeps the streams of a rank busy, and itself: its calls are replayed stream by stream,
// each op at the price that the simulator pays, with the waits of the plan's events and what streams of one device do
// to each other.
#pragma once
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "graph/draft.h"
#include "planner/cost/cost_model.h"
#include "planner/cost/occupies.h"

namespace hotbunk {

/// Of one run of a block, or the sum of several.
struct StreamSeconds {
  std::array<double, max_streams> busy{};    // [stream] of its ops at their prices
  std::array<double, max_streams> waited{};  // [stream] that the leading stream waits for it
  std::array<double, num_op_kinds> kinds{};  // of the leading stream's ops, at their prices
  double elapsed = 0.0;                      // from the first op to the last
  // What the host needs to launch all ops. A block that fetches is waited for before the next one is launched:
  double launched = 0.0;  // of the others, beside what elapses in the blocks before
  double paced = 0.0;     // of those that fetch, longer than they elapse
  double seconds() const { return paced + (elapsed > launched ? elapsed : launched); }
  /// What streams that share the device, and collectives beside kernels, cost the leading stream.
  double slowed() const;
  StreamSeconds& add(const StreamSeconds&, double times);
};

/// How a rank's streams share its device, as `simulate` plays it (sim/engine.h).
struct DeviceSharing {
  double slots = 1.0;     // ops of a rank that run at their price at once; k of them run at slots / k of it
  double slowdown = 0.0;  // of kernels while the device communicates
  double launch_s = 0.0;  // of the host, for an op
  bool threads = false;   // streams are threads on cores: a collective takes one like a kernel
  bool links = false;     // collectives that run at the same time share the rank's links
};
DeviceSharing device_sharing(const CostModel&, const ClusterSpec&);

/// A block's calls as the work of each stream, to be priced with any sizes. Points into the plan, which outlives it.
class BlockStreams {
 public:
  BlockStreams(const Plan&, const Program&, const Block&);
  /// The same of a program that is not made (write_phases): then of the plan only streams and groups count.
  BlockStreams(const Plan&, const Draft&, const DraftBlock&);

  /// `ranks`: whose prices count. One, or all of which each waits for the others, where they copy more or less from
  /// their peers: the slowest counts. Left out is what maps memory of the transient section: how much depends on the
  /// phases around.
  StreamSeconds seconds(const CostModel&, const DeviceSharing&, std::span<const RankPlace> ranks, const Sizes&) const;

 private:
  /// Ops of one call that follow one another on a stream and occupy the same.
  struct Segment {
    Occupies occupies = Occupies::stream;
    StreamId stream = lead_stream;
    std::vector<const Op*> ops;
    std::int64_t uses = 0;  // in the block
  };
  /// What a body is cut into by marks at these places.
  struct Cut {
    std::vector<Mark> marks;          // their events are the first call's
    std::vector<std::int32_t> items;  // in order: segments by number, marks by -1 - index
    std::int64_t launches = 0;
  };
  enum class What : std::uint8_t { work, record, wait };
  struct Item {
    What what = What::work;
    std::uint32_t number = 0;  // of the segment; of the record, counted over the block
  };
  class Writer;
  class Replay;
  /// What a segment takes alone, and the parts of the rank's links that a collective needs for that: inside its node,
  /// to others.
  struct Price {
    double nanoseconds = 0;
    std::array<double, 2> links{};
  };
  /// Of each segment; sets `kinds`.
  std::vector<Price> segment_prices(const CostModel&, std::span<const RankPlace>, const Sizes&,
                                    std::array<double, num_op_kinds>& kinds) const;

  const Plan* plan_;
  std::vector<Segment> segments_;
  std::array<std::vector<Item>, max_streams> items_;
  std::vector<StreamId> recorded_by_;  // by record
  std::int64_t launches_ = 0;
  bool fetches_ = false;
};

}  // namespace hotbunk
