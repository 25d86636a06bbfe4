#include "backends/cuda/dnn_graph.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/check.h"

namespace hotbunk::cuda {
namespace {

/// Of every tensor in memory; lists of lengths and offsets may begin at any number.
std::int64_t alignment_bytes(int type) { return type == dnn::type_int32 ? 4 : 16; }
constexpr std::size_t most_configs = 8;  // of the heuristics' that are looked at

std::string reason(const Dnn& dnn, DnnStatus status) {
  const char* const name = dnn.cudnnGetErrorString(status);
  std::array<char, 512> last{};
  dnn.cudnnGetLastErrorString(last.data(), last.size() - 1);
  std::string out = name != nullptr ? name : fmt::format("status {}", status);
  if (last[0] != '\0') out += fmt::format(" ({})", last.data());
  std::ranges::replace(out, '\n', ' ');
  return out;
}

/// That cuDNN cannot: everything else that goes wrong is a failure.
bool cannot(DnnStatus status) { return status / 1000 == 3; }

}  // namespace

void check(const Dnn& dnn, DnnStatus status, const std::string& call) {
  if (status != 0) throw RuntimeFailure(fmt::format("{}: {}", call, reason(dnn, status)));
}

DnnObject::DnnObject(const Dnn& dnn, int type) : dnn_(&dnn) {
  check(dnn, dnn.cudnnBackendCreateDescriptor(type, &handle_), "cudnnBackendCreateDescriptor");
}
DnnObject::~DnnObject() {
  if (handle_ != nullptr) dnn_->cudnnBackendDestroyDescriptor(handle_);
}
void DnnObject::set(int name, int type, std::int64_t count, const void* values) {
  check(*dnn_, dnn_->cudnnBackendSetAttribute(handle_, name, type, count, values),
        fmt::format("cudnnBackendSetAttribute of attribute {}", name));
}
void DnnObject::finalize() { check(*dnn_, dnn_->cudnnBackendFinalize(handle_), "cudnnBackendFinalize"); }
std::string DnnObject::why_not_finalized() {
  const DnnStatus status = dnn_->cudnnBackendFinalize(handle_);
  if (!cannot(status)) check(*dnn_, status, "cudnnBackendFinalize");
  return status == 0 ? "" : reason(*dnn_, status);
}

DnnShape packed_strides(const DnnShape& s) { return {s[1] * s[2] * s[3], s[2] * s[3], s[3], 1}; }

DnnGraph::Id DnnGraph::add(const DnnShape& shape, const DnnShape& strides, int type, bool is_virtual, bool by_value,
                           Id ragged) {
  DnnObject& t = tensors_.emplace_back(dnn_, dnn::tensor);
  const Id id = std::ssize(tensors_);
  t.set(dnn::tensor_data_type, dnn::of_data_type, type);
  t.set(dnn::tensor_dimensions, dnn::of_int64, std::ssize(shape), shape.data());
  t.set(dnn::tensor_strides, dnn::of_int64, std::ssize(strides), strides.data());
  t.set(dnn::tensor_id, dnn::of_int64, id);
  t.set(dnn::tensor_alignment_bytes, dnn::of_int64, alignment_bytes(type));
  if (is_virtual) t.set(dnn::tensor_is_virtual, dnn::of_boolean, true);
  if (by_value) t.set(dnn::tensor_is_by_value, dnn::of_boolean, true);
  if (ragged != none) t.set(dnn::tensor_ragged_offset, dnn::of_descriptor, descriptor(ragged));
  t.finalize();
  return id;
}

DnnGraph::Id DnnGraph::stored(const DnnShape& shape, const DnnShape& strides, int type, Id ragged) {
  return add(shape, strides, type, false, false, ragged);
}
DnnGraph::Id DnnGraph::value(int type) { return add({1, 1, 1, 1}, {1, 1, 1, 1}, type, false, true, none); }
DnnGraph::Id DnnGraph::between(const DnnShape& shape, int type) {
  return add(shape, packed_strides(shape), type, true, false, none);
}
DnnGraph::Id DnnGraph::between(const DnnShape& shape, const DnnShape& strides, int type, Id ragged) {
  return add(shape, strides, type, true, false, ragged);
}

void DnnGraph::pointwise(int mode, int compute_type, Id x, Id b, Id y, Id t, std::optional<std::int64_t> axis) {
  DnnObject& how = parameters_.emplace_back(dnn_, dnn::pointwise);
  how.set(dnn::pointwise_mode, dnn::of_pointwise_mode, mode);
  how.set(dnn::pointwise_compute_type, dnn::of_data_type, compute_type);
  if (axis) how.set(dnn::pointwise_axis, dnn::of_int64, *axis);
  how.finalize();
  DnnObject& op = ops_.emplace_back(dnn_, dnn::pointwise_op);
  op.set(dnn::pointwise_op_descriptor, dnn::of_descriptor, how.get());
  op.set(dnn::pointwise_op_x, dnn::of_descriptor, descriptor(x));
  if (b != none) op.set(dnn::pointwise_op_b, dnn::of_descriptor, descriptor(b));
  if (t != none) op.set(dnn::pointwise_op_t, dnn::of_descriptor, descriptor(t));
  op.set(dnn::pointwise_op_y, dnn::of_descriptor, descriptor(y));
  op.finalize();
}

void DnnGraph::matmul(Id a, Id b, Id c, Id rows, Id columns, Id depth) {
  DnnObject& how = parameters_.emplace_back(dnn_, dnn::matmul);
  how.set(dnn::matmul_compute_type, dnn::of_data_type, dnn::type_f32);
  how.finalize();
  DnnObject& op = ops_.emplace_back(dnn_, dnn::matmul_op);
  op.set(dnn::matmul_op_descriptor, dnn::of_descriptor, how.get());
  op.set(dnn::matmul_op_a, dnn::of_descriptor, descriptor(a));
  op.set(dnn::matmul_op_b, dnn::of_descriptor, descriptor(b));
  op.set(dnn::matmul_op_c, dnn::of_descriptor, descriptor(c));
  if (rows != none) op.set(dnn::matmul_op_rows, dnn::of_descriptor, descriptor(rows));
  if (columns != none) op.set(dnn::matmul_op_columns, dnn::of_descriptor, descriptor(columns));
  if (depth != none) op.set(dnn::matmul_op_depth, dnn::of_descriptor, descriptor(depth));
  op.finalize();
}

void DnnGraph::sum(Id x, Id y) {
  DnnObject& how = parameters_.emplace_back(dnn_, dnn::reduction);
  how.set(dnn::reduction_compute_type, dnn::of_data_type, dnn::type_f32);
  how.set(dnn::reduction_operator, dnn::of_reduction_operator, dnn::reduce_add);
  how.finalize();
  DnnObject& op = ops_.emplace_back(dnn_, dnn::reduction_op);
  op.set(dnn::reduction_op_descriptor, dnn::of_descriptor, how.get());
  op.set(dnn::reduction_op_x, dnn::of_descriptor, descriptor(x));
  op.set(dnn::reduction_op_y, dnn::of_descriptor, descriptor(y));
  op.finalize();
}

void DnnGraph::reshape(Id x, Id y) {
  DnnObject& op = ops_.emplace_back(dnn_, dnn::reshape_op);
  op.set(dnn::reshape_op_x, dnn::of_descriptor, descriptor(x));
  op.set(dnn::reshape_op_y, dnn::of_descriptor, descriptor(y));
  op.finalize();
}

DnnGraph::Found DnnGraph::find_plan(const DnnTarget& target, std::int64_t most_workspace_bytes) {
  DnnObject graph(dnn_, dnn::operation_graph);
  std::vector<DnnDescriptor> ops;
  for (const DnnObject& op : ops_) ops.push_back(op.get());
  if (target.handle != nullptr) graph.set(dnn::graph_handle, dnn::of_handle, target.handle);
  graph.set(dnn::graph_ops, dnn::of_descriptor, std::ssize(ops), ops.data());
  if (const std::string why = graph.why_not_finalized(); !why.empty()) return {{}, "no graph: " + why};
  DnnObject search(dnn_, dnn::engine_search);
  search.set(dnn::search_graph, dnn::of_descriptor, graph.get());
  search.set(dnn::search_mode, dnn::of_search_mode, dnn::search_heuristics);
  if (target.device != nullptr) search.set(dnn::search_device, dnn::of_descriptor, target.device);
  if (const std::string why = search.why_not_finalized(); !why.empty()) return {{}, "no engine: " + why};
  std::vector<DnnObject> configs;
  std::vector<DnnDescriptor> filled;
  for (std::size_t i = 0; i < most_configs; ++i) filled.push_back(configs.emplace_back(dnn_, dnn::engine_config).get());
  std::int64_t found = 0;
  const DnnStatus searched = dnn_.cudnnBackendGetAttribute(search.get(), dnn::search_results, dnn::of_descriptor,
                                                           std::ssize(filled), &found, filled.data());
  if (cannot(searched)) return {{}, "no engine: " + reason(dnn_, searched)};
  check(dnn_, searched, "cudnnBackendGetAttribute of a search's results");
  std::string why = "cuDNN has no engine for it";
  for (std::int64_t i = 0; i < std::min<std::int64_t>(found, std::ssize(filled)); ++i) {
    DnnObject& config = configs[static_cast<std::size_t>(i)];
    DnnObject engine(dnn_, dnn::engine);
    DnnDescriptor engine_handle = engine.get();
    std::int64_t count = 0;
    check(
        dnn_,
        dnn_.cudnnBackendGetAttribute(config.get(), dnn::config_engine, dnn::of_descriptor, 1, &count, &engine_handle),
        "cudnnBackendGetAttribute of a config's engine");
    std::array<int, dnn::num_notes> notes{};
    check(dnn_,
          dnn_.cudnnBackendGetAttribute(engine_handle, dnn::engine_numerical_notes, dnn::of_numerical_note,
                                        std::ssize(notes), &count, notes.data()),
          "cudnnBackendGetAttribute of an engine's notes");
    const auto end = notes.begin() + std::min<std::int64_t>(count, std::ssize(notes));
    if (std::find(notes.begin(), end, dnn::note_nondeterministic) != end) {
      why = "other bits each time";
      continue;
    }
    DnnObject plan(dnn_, dnn::execution_plan);
    if (target.handle != nullptr) plan.set(dnn::plan_handle, dnn::of_handle, target.handle);
    if (target.device != nullptr) plan.set(dnn::plan_device, dnn::of_descriptor, target.device);
    plan.set(dnn::plan_config, dnn::of_descriptor, config.get());
    if (const std::string refused = plan.why_not_finalized(); !refused.empty()) {
      why = "no plan: " + refused;
      continue;
    }
    std::int64_t bytes = 0;
    check(dnn_, dnn_.cudnnBackendGetAttribute(plan.get(), dnn::plan_workspace_bytes, dnn::of_int64, 1, &count, &bytes),
          "cudnnBackendGetAttribute of a plan's workspace");
    if (bytes > most_workspace_bytes) {
      why = fmt::format("a workspace of {:.0f} MiB, more than {:.0f}", static_cast<double>(bytes) / (1 << 20),
                        static_cast<double>(most_workspace_bytes) / (1 << 20));
      continue;
    }
    return {Plan{std::move(config), std::move(plan), bytes}, ""};
  }
  return {{}, why};
}

void run_plan(const Dnn& dnn, DnnHandle handle, const DnnGraph::Plan& plan,
              const std::map<DnnGraph::Id, const void*>& addresses, CUdeviceptr workspace) {
  std::vector<std::int64_t> ids;
  std::vector<const void*> pointers;
  for (const auto& [id, address] : addresses) ids.push_back(id), pointers.push_back(address);
  DnnObject pack(dnn, dnn::variant_pack);
  pack.set(dnn::pack_ids, dnn::of_int64, std::ssize(ids), ids.data());
  pack.set(dnn::pack_pointers, dnn::of_pointer, std::ssize(pointers), pointers.data());
  pack.set(dnn::pack_workspace, dnn::of_pointer, reinterpret_cast<void*>(workspace));
  pack.finalize();
  check(dnn, dnn.cudnnBackendExecute(handle, plan.plan.get(), pack.get()), "cudnnBackendExecute");
}

}  // namespace hotbunk::cuda
