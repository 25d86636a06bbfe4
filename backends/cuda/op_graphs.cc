#include "backends/cuda/op_graphs.h"

#include <algorithm>

#include "backends/cuda/op_launches.h"
#include "runtime/guarded.h"

namespace hotbunk::cuda {
namespace {

/// Whether the op is launches on device memory of sizes that the host knows.
bool is_launches(const Program& program, const Call& call, const Op& op) {
  if (op_launch(op.kind) == nullptr || op.has(Attr::count)) return false;
  const BoundOp bound{&program, nullptr, &call, &op};
  const auto on_device = [&](const Tensor& t) { return bound.buffer(t).space() == Space::device; };
  return std::ranges::all_of(op.inputs, on_device) && std::ranges::all_of(op.outputs, on_device);
}

}  // namespace

std::vector<GraphRun> graph_runs(const Program& program, const Call& call) {
  std::vector<GraphRun> runs;
  GraphRun run;
  int launches = 0;
  StreamId stream = lead_stream;
  const auto end_run = [&] {
    if (launches > 1) runs.push_back(run);
    launches = 0;
  };
  std::size_t index = 0;
  each_step(
      program, Block{}, call,
      [&](const BoundOp& op) {
        const std::size_t i = index++;
        if (op->kind == OpKind::alloc || op->kind == OpKind::free) return;  // the host's books only
        if (!is_launches(program, call, *op)) return end_run();
        if (launches > 0 && op->stream != stream) end_run();
        if (launches++ == 0) run.begin = i;
        run.end = i + 1;
        stream = op->stream;
      },
      [&](const Mark&) { end_run(); });
  end_run();
  return runs;
}

OpGraphs::~OpGraphs() {
  for (const auto& [key, graph] : graphs_) launch_.driver().cuGraphExecDestroy(graph);
}

OpGraphs::Key OpGraphs::key_of(const Call& call, const GraphRun& run, const Sizes& sizes) {
  return {&call, run.begin, sizes.tokens, sizes.seqs, sizes.further};
}

CUgraphExec OpGraphs::capture(const BoundOp& first, const std::function<void()>& enqueue) const {
  const Driver& d = launch_.driver();
  CUgraph graph = nullptr;
  // Of this thread: what others ask of the driver meanwhile is none of its business.
  naming(first, [&] { HB_CUDA(d, cuStreamBeginCapture(launch_.stream(), CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)); });
  try {
    enqueue();
  } catch (...) {
    if (d.cuStreamEndCapture(launch_.stream(), &graph) == CUDA_SUCCESS) d.cuGraphDestroy(graph);
    throw;
  }
  CUgraphExec out = nullptr;
  naming(first, [&] {
    HB_CUDA(d, cuStreamEndCapture(launch_.stream(), &graph));
    const CUresult made = d.cuGraphInstantiate(&out, graph, 0);
    const CUresult destroyed = d.cuGraphDestroy(graph);
    check(d, made, "cuGraphInstantiate(&out, graph, 0)");
    check(d, destroyed, "cuGraphDestroy(graph)");
  });
  return out;
}

void OpGraphs::run(const Key& key, const BoundOp& first, const std::function<void()>& enqueue) {
  auto it = graphs_.find(key);
  if (it == graphs_.end()) {
    if (!seen_.contains(key) || graphs_.size() >= most_graphs) {
      if (seen_.size() >= most_seen) seen_.clear();
      seen_.insert(key);
      return enqueue();
    }
    it = graphs_.emplace(key, capture(first, enqueue)).first;
    seen_.erase(key);
  }
  naming(first, [&] { HB_CUDA(launch_.driver(), cuGraphLaunch(it->second, launch_.stream())); });
}

}  // namespace hotbunk::cuda
