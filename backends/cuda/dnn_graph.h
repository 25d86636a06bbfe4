// Operation graphs of cuDNN: tensors, the ops between them, and the plan that cuDNN has for them. Nothing here knows
// what is computed.
#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backends/cuda/dnn_table.h"

namespace hotbunk::cuda {

/// RuntimeFailure "CALL: …" with cuDNN's reason unless the call went well.
void check(const Dnn&, DnnStatus, const std::string& call);

/// A descriptor of cuDNN's; attributes are set, then it is finalised.
class DnnObject {
 public:
  DnnObject(const Dnn&, int type);
  ~DnnObject();
  DnnObject(const DnnObject&) = delete;
  DnnObject& operator=(const DnnObject&) = delete;
  DnnObject(DnnObject&& other) noexcept : dnn_(other.dnn_), handle_(std::exchange(other.handle_, nullptr)) {}
  DnnObject& operator=(DnnObject&&) = delete;

  void set(int name, int type, std::int64_t count, const void* values);
  template <class T>
  void set(int name, int type, const T& value) {
    set(name, type, 1, &value);
  }
  void finalize();
  /// The same of what cuDNN may not support: "" or its reason.
  std::string why_not_finalized();
  DnnDescriptor get() const { return handle_; }

 private:
  const Dnn* dnn_;
  DnnDescriptor handle_ = nullptr;
};

/// For whom a plan is sought: a handle on a device, or, without one, a device that is described (device_properties).
struct DnnTarget {
  DnnHandle handle = nullptr;
  DnnDescriptor device = nullptr;
};

/// Tensors have four dimensions; of a result the strides say where it lies.
using DnnShape = std::array<std::int64_t, 4>;

/// Row by row, the last dimension side by side.
DnnShape packed_strides(const DnnShape&);

class DnnGraph {
 public:
  using Id = std::int64_t;
  static constexpr Id none = 0;

  explicit DnnGraph(const Dnn& dnn) : dnn_(dnn) {}

  /// In memory: its address is given when the plan runs. `ragged`: an int32 tensor {n + 1, 1, 1, 1} of elements at
  /// which each of the n parts of the first dimension begins, and the last one ends; its stride of dimension 0 is not
  /// used.
  Id stored(const DnnShape&, const DnnShape& strides, int type, Id ragged = none);
  /// One number on the host, given when the plan runs.
  Id value(int type);
  /// Between two ops: nowhere in memory.
  Id between(const DnnShape&, int type);
  Id between(const DnnShape&, const DnnShape& strides, int type, Id ragged = none);

  /// y = mode(x, b), or of x alone; a select is t ? x : b. `axis`: whose index mode_index gives.
  void pointwise(int mode, int compute_type, Id x, Id b, Id y, Id t = none, std::optional<std::int64_t> axis = {});
  /// c = a b of the last two dimensions, in fp32. Of each part (dimension 0) only so many rows, columns and terms as
  /// the int32 tensors {n, 1, 1, 1} say count. Heads (dimension 1) of b that are fewer are shared by neighbours.
  void matmul(Id a, Id b, Id c, Id rows, Id columns, Id depth);
  /// y = sums of x over the dimensions in which y is shorter, in fp32; of heads, of neighbours.
  void sum(Id x, Id y);
  /// The same numbers, seen with y's dimensions and strides.
  void reshape(Id x, Id y);

  /// What cuDNN has for this graph.
  struct Plan {
    DnnObject config, plan;
    std::int64_t workspace_bytes = 0;
  };
  struct Found {
    std::optional<Plan> plan;
    std::string why_none{};  // in a line, where there is none
  };
  /// The first by cuDNN's heuristics that gives the same bits each time and needs at most so much workspace.
  /// RuntimeFailure when a call fails otherwise than by what cuDNN does not support.
  Found find_plan(const DnnTarget&, std::int64_t most_workspace_bytes);

 private:
  Id add(const DnnShape&, const DnnShape& strides, int type, bool is_virtual, bool by_value, Id ragged);
  DnnDescriptor descriptor(Id id) const { return tensors_[static_cast<std::size_t>(id - 1)].get(); }

  const Dnn& dnn_;
  std::vector<DnnObject> tensors_, parameters_, ops_;
};

/// Runs a plan on the handle's stream. Addresses by tensor: of the device, of `value` tensors of the host.
void run_plan(const Dnn&, DnnHandle, const DnnGraph::Plan&, const std::map<DnnGraph::Id, const void*>& addresses,
              CUdeviceptr workspace);

}  // namespace hotbunk::cuda
