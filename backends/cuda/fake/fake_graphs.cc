// Graphs of the double: captured from one stream, launched again and again. The backend captures kernels, copies and
// fills; an event inside of a capture would join streams, which nothing here asks for, so it is a finding.
#include <fmt/format.h>

#include <utility>

#include "backends/cuda/fake/fake_driver.h"

namespace hotbunk::cuda {

bool FakeDriver::captures(const Stream& s, const char* call) {
  if (s.captures == 0) return false;
  found(fmt::format("{}: stream {} is capturing a graph", call, s.number));
  return true;
}

CUresult FakeDriver::begin_capture(CUstream handle) {
  Stream* s = stream(handle);
  if (s == nullptr) return found("cuStreamBeginCapture: no such stream");
  if (captures(*s, "cuStreamBeginCapture")) return sticky_;
  s->captures = next_handle_++;
  graphs_[s->captures];
  return sticky_;
}

CUresult FakeDriver::end_capture(CUstream handle, CUgraph* out) {
  Stream* s = stream(handle);
  if (s == nullptr || s->captures == 0) return found("cuStreamEndCapture: no such stream, or it captures nothing");
  *out = reinterpret_cast<CUgraph>(std::exchange(s->captures, 0));
  return sticky_;
}

CUresult FakeDriver::instantiate(CUgraphExec* out, CUgraph graph) {
  const auto it = graphs_.find(reinterpret_cast<std::int64_t>(graph));
  if (it == graphs_.end()) return found("cuGraphInstantiate: no such graph");
  const std::int64_t id = next_handle_++;
  instances_[id] = it->second;
  *out = reinterpret_cast<CUgraphExec>(id);
  return sticky_;
}

CUresult FakeDriver::launch_graph(CUgraphExec instance, CUstream handle) {
  const auto it = instances_.find(reinterpret_cast<std::int64_t>(instance));
  if (it == instances_.end()) return found("cuGraphLaunch: no such graph, or it was destroyed");
  Stream* s = stream(handle);
  if (s == nullptr) return found("cuGraphLaunch: no such stream");
  if (captures(*s, "cuGraphLaunch")) return sticky_;
  const Graph& nodes = it->second;
  for (std::size_t n = 0; n < nodes.size() && sticky_ == CUDA_SUCCESS; ++n)
    enqueue(handle, fmt::format("{} (of a graph, {} of {})", nodes[n].name, n + 1, nodes.size()), nodes[n].run);
  return sticky_;
}

}  // namespace hotbunk::cuda
