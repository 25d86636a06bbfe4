// CUDA graphs of what a device does again and again: runs of ops of one call that need nothing of the host.
//
// A decode step is a few hundred kernels of a few microseconds each, and a launch takes about as long. What a run of
// ops launches depends on the call (its addresses), on the sizes of the block and on nothing else, so its second time
// is captured and every later one is one launch of the graph. A graph is never made anew: addresses stay while a
// section sleeps.
#pragma once
#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <vector>

#include "backends/cuda/launch.h"
#include "graph/bound.h"

namespace hotbunk::cuda {

/// Ops [begin, end) of a body, launches on one stream with at most allocs and frees between them.
struct GraphRun {
  std::size_t begin = 0, end = 0;
  friend bool operator==(const GraphRun&, const GraphRun&) = default;
};

/// The runs of a call, ascending; each has two launches at least. A collective, a feed or fetch, an op that the device
/// sizes, another stream and an event of the call end a run.
std::vector<GraphRun> graph_runs(const Program&, const Call&);

/// Of one stream, for its thread.
class OpGraphs {
 public:
  explicit OpGraphs(const Launcher& launch) : launch_(launch) {}
  /// The stream has been waited for.
  ~OpGraphs();
  OpGraphs(const OpGraphs&) = delete;
  OpGraphs& operator=(const OpGraphs&) = delete;

  struct Key {
    const Call* call = nullptr;
    std::size_t begin = 0;
    std::int64_t tokens = 0, seqs = 0;
    decltype(Sizes::further) further{};
    friend auto operator<=>(const Key&, const Key&) = default;
  };
  static Key key_of(const Call&, const GraphRun&, const Sizes&);

  /// `enqueue` puts a run's launches on the stream, for the same key the same ones; what it throws comes through. The
  /// first time for a key it is called, the second time its launches become a graph, then only the graph is launched.
  /// RuntimeFailure of the graph itself names `first`, the run's first op.
  void run(const Key&, const BoundOp& first, const std::function<void()>& enqueue);

 private:
  /// Of one stream. Beyond, runs are launched op by op: engines decode few sizes more than their slots, each layer in
  /// some runs, and what a driver keeps of a graph was never measured here.
  static constexpr std::size_t most_graphs = 4096;
  /// That wait for their second time; beyond, all are forgotten. Prompts' sizes hardly come again.
  static constexpr std::size_t most_seen = 4 * most_graphs;

  CUgraphExec capture(const BoundOp& first, const std::function<void()>& enqueue) const;

  const Launcher& launch_;
  std::map<Key, CUgraphExec> graphs_;
  std::set<Key> seen_;  // once
};

}  // namespace hotbunk::cuda
