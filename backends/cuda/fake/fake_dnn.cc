#include "backends/cuda/fake/fake_dnn.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <optional>

#include "backends/cuda/fake/dnn_player.h"
#include "base/check.h"

namespace hotbunk::cuda {

namespace {

std::atomic<FakeDnn*> alive_dnn{nullptr};

/// Which attributes a descriptor has, of which kind of value, and which it needs.
struct Attribute {
  int owner, name, type;
  bool needed;
};
constexpr std::array attributes = {
    Attribute{dnn::pointwise, dnn::pointwise_mode, dnn::of_pointwise_mode, true},
    Attribute{dnn::pointwise, dnn::pointwise_compute_type, dnn::of_data_type, true},
    Attribute{dnn::pointwise, dnn::pointwise_axis, dnn::of_int64, false},
    Attribute{dnn::matmul, dnn::matmul_compute_type, dnn::of_data_type, true},
    Attribute{dnn::reduction, dnn::reduction_operator, dnn::of_reduction_operator, true},
    Attribute{dnn::reduction, dnn::reduction_compute_type, dnn::of_data_type, true},
    Attribute{dnn::tensor, dnn::tensor_data_type, dnn::of_data_type, true},
    Attribute{dnn::tensor, dnn::tensor_dimensions, dnn::of_int64, true},
    Attribute{dnn::tensor, dnn::tensor_strides, dnn::of_int64, true},
    Attribute{dnn::tensor, dnn::tensor_id, dnn::of_int64, true},
    Attribute{dnn::tensor, dnn::tensor_alignment_bytes, dnn::of_int64, true},
    Attribute{dnn::tensor, dnn::tensor_is_virtual, dnn::of_boolean, false},
    Attribute{dnn::tensor, dnn::tensor_is_by_value, dnn::of_boolean, false},
    Attribute{dnn::tensor, dnn::tensor_ragged_offset, dnn::of_descriptor, false},
    Attribute{dnn::pointwise_op, dnn::pointwise_op_descriptor, dnn::of_descriptor, true},
    Attribute{dnn::pointwise_op, dnn::pointwise_op_x, dnn::of_descriptor, true},
    Attribute{dnn::pointwise_op, dnn::pointwise_op_b, dnn::of_descriptor, false},
    Attribute{dnn::pointwise_op, dnn::pointwise_op_t, dnn::of_descriptor, false},
    Attribute{dnn::pointwise_op, dnn::pointwise_op_y, dnn::of_descriptor, true},
    Attribute{dnn::matmul_op, dnn::matmul_op_descriptor, dnn::of_descriptor, true},
    Attribute{dnn::matmul_op, dnn::matmul_op_a, dnn::of_descriptor, true},
    Attribute{dnn::matmul_op, dnn::matmul_op_b, dnn::of_descriptor, true},
    Attribute{dnn::matmul_op, dnn::matmul_op_c, dnn::of_descriptor, true},
    Attribute{dnn::matmul_op, dnn::matmul_op_rows, dnn::of_descriptor, false},
    Attribute{dnn::matmul_op, dnn::matmul_op_columns, dnn::of_descriptor, false},
    Attribute{dnn::matmul_op, dnn::matmul_op_depth, dnn::of_descriptor, false},
    Attribute{dnn::reduction_op, dnn::reduction_op_descriptor, dnn::of_descriptor, true},
    Attribute{dnn::reduction_op, dnn::reduction_op_x, dnn::of_descriptor, true},
    Attribute{dnn::reduction_op, dnn::reduction_op_y, dnn::of_descriptor, true},
    Attribute{dnn::reshape_op, dnn::reshape_op_x, dnn::of_descriptor, true},
    Attribute{dnn::reshape_op, dnn::reshape_op_y, dnn::of_descriptor, true},
    Attribute{dnn::operation_graph, dnn::graph_handle, dnn::of_handle, false},
    Attribute{dnn::operation_graph, dnn::graph_ops, dnn::of_descriptor, true},
    Attribute{dnn::engine_search, dnn::search_graph, dnn::of_descriptor, true},
    Attribute{dnn::engine_search, dnn::search_mode, dnn::of_search_mode, true},
    Attribute{dnn::execution_plan, dnn::plan_handle, dnn::of_handle, false},
    Attribute{dnn::execution_plan, dnn::plan_config, dnn::of_descriptor, true},
    Attribute{dnn::variant_pack, dnn::pack_ids, dnn::of_int64, true},
    Attribute{dnn::variant_pack, dnn::pack_pointers, dnn::of_pointer, true},
    Attribute{dnn::variant_pack, dnn::pack_workspace, dnn::of_pointer, true},
};
constexpr std::array described = {dnn::pointwise,      dnn::engine,       dnn::engine_config,   dnn::engine_search,
                                  dnn::execution_plan, dnn::pointwise_op, dnn::operation_graph, dnn::variant_pack,
                                  dnn::tensor,         dnn::matmul,       dnn::matmul_op,       dnn::reduction,
                                  dnn::reduction_op,   dnn::reshape_op};

std::size_t bytes_of_value(int type) {
  return type == dnn::of_boolean                                                                                    ? 1
         : type == dnn::of_int64 || type == dnn::of_pointer || type == dnn::of_descriptor || type == dnn::of_handle ? 8
                                                                                                                    : 4;
}

}  // namespace

struct DnnDouble {
  struct Value {
    std::int64_t count = 0;
    std::vector<std::byte> bytes{};
  };
  int type = 0;
  bool finalised = false;
  std::map<int, Value> values{};
  // Once it is finalised:
  std::vector<DnnTensorDouble> tensors{};  // of a tensor itself and its offsets, of an op all
  DnnOpDouble op{};
  std::shared_ptr<const DnnGraphDouble> graph{};  // of a graph, a search, a config, an engine, a plan
  bool other_bits = false;                        // of a config, an engine, a plan

  bool has(int name) const { return values.contains(name); }
  template <class T>
  std::vector<T> all(int name) const {
    const auto at = values.find(name);
    if (at == values.end()) return {};
    std::vector<T> out(static_cast<std::size_t>(at->second.count));
    std::memcpy(out.data(), at->second.bytes.data(), out.size() * sizeof(T));
    return out;
  }
  template <class T>
  T one(int name, T otherwise = {}) const {
    const auto values_here = all<T>(name);
    return values_here.empty() ? otherwise : values_here.front();
  }
};

struct FakeDnn::Entries {
  static constexpr DnnStatus success = 0, not_initialised = 1001, bad_param = 2000, not_finalised = 2004,
                             not_supported = 3000, internal_error = 4000, execution_failed = 5000;

  /// A call of the double that is alive, under its lock; what `body` throws is a status with its reason.
  struct Refused {
    DnnStatus status;
    std::string why;
  };
  template <class Body>
  static DnnStatus call(const char* name, Body&& body) {
    FakeDnn* d = alive_dnn.load();
    if (d == nullptr) return not_initialised;
    if (d->driver_.other_call(name) != CUDA_SUCCESS) {
      const std::lock_guard lock(d->mutex_);
      d->last_error_ = "the driver failed";
      return internal_error;
    }
    const std::lock_guard lock(d->mutex_);
    try {
      body(*d);
      return success;
    } catch (const Refused& r) {
      d->last_error_ = r.why;
      return r.status;
    }
  }
  static void need(bool well, const std::string& why, DnnStatus status = bad_param) {
    if (!well) throw Refused{status, why};
  }
  static DnnDouble& known(FakeDnn& d, DnnDescriptor handle) {
    const auto at = d.descriptors_.find(handle);
    need(at != d.descriptors_.end(), "no such descriptor, or one that was destroyed");
    return *at->second;
  }
  static DnnDouble& finalised(FakeDnn& d, DnnDescriptor handle, int type) {
    DnnDouble& out = known(d, handle);
    need(out.type == type, fmt::format("a descriptor of type {} where {} is wanted", out.type, type));
    need(out.finalised, fmt::format("a descriptor of type {} that was not finalised", type), not_finalised);
    return out;
  }

  static std::size_t version() { return 91900; }
  static const char* error_string(DnnStatus s) {
    return s == success            ? "CUDNN_STATUS_SUCCESS"
           : s == not_initialised  ? "CUDNN_STATUS_NOT_INITIALIZED"
           : s == bad_param        ? "CUDNN_STATUS_BAD_PARAM"
           : s == not_finalised    ? "CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED"
           : s == not_supported    ? "CUDNN_STATUS_NOT_SUPPORTED"
           : s == execution_failed ? "CUDNN_STATUS_EXECUTION_FAILED"
                                   : "CUDNN_STATUS_INTERNAL_ERROR";
  }
  static void last_error_string(char* out, std::size_t most) {
    FakeDnn* d = alive_dnn.load();
    if (d == nullptr || most == 0) return;
    const std::lock_guard lock(d->mutex_);
    std::snprintf(out, most, "%s", d->last_error_.c_str());
  }
  static DnnStatus create(DnnHandle* out) {
    return call("cudnnCreate", [&](FakeDnn& d) {
      *out = reinterpret_cast<DnnHandle>(++d.made_);
      d.handles_[*out] = nullptr;
    });
  }
  static DnnStatus destroy(DnnHandle h) {
    return call("cudnnDestroy", [&](FakeDnn& d) { need(d.handles_.erase(h) == 1, "no such handle"); });
  }
  static DnnStatus set_stream(DnnHandle h, CUstream stream) {
    return call("cudnnSetStream", [&](FakeDnn& d) {
      need(d.handles_.contains(h), "no such handle");
      d.handles_[h] = stream;
    });
  }
  static DnnStatus create_descriptor(int type, DnnDescriptor* out) {
    return call("cudnnBackendCreateDescriptor", [&](FakeDnn& d) {
      need(std::ranges::find(described, type) != described.end(), fmt::format("descriptors of type {}", type),
           not_supported);
      *out = reinterpret_cast<DnnDescriptor>(++d.made_ << 4);
      d.descriptors_[*out] = std::make_unique<DnnDouble>(DnnDouble{.type = type});
    });
  }
  /// Not counted, and without faults: what goes at the end of a run goes.
  static DnnStatus destroy_descriptor(DnnDescriptor handle) {
    FakeDnn* d = alive_dnn.load();
    if (d == nullptr) return not_initialised;
    const std::lock_guard lock(d->mutex_);
    return d->descriptors_.erase(handle) == 1 ? success : bad_param;
  }
  static DnnStatus set(DnnDescriptor handle, int name, int type, std::int64_t count, const void* values) {
    return call("cudnnBackendSetAttribute", [&](FakeDnn& d) {
      DnnDouble& to = known(d, handle);
      need(!to.finalised, "an attribute of a descriptor that was finalised");
      const auto a =
          std::ranges::find_if(attributes, [&](const Attribute& x) { return x.owner == to.type && x.name == name; });
      need(a != attributes.end(), fmt::format("a descriptor of type {} has no attribute {}", to.type, name));
      need(a->type == type && count > 0 && values != nullptr,
           fmt::format("attribute {} is of type {}, not {}", name, a->type, type));
      const auto bytes = static_cast<std::size_t>(count) * bytes_of_value(type);
      DnnDouble::Value v{.count = count};
      v.bytes.resize(bytes);
      std::memcpy(v.bytes.data(), values, bytes);
      to.values[name] = std::move(v);
    });
  }

  static void finish_tensor(FakeDnn& d, DnnDouble& x) {
    DnnTensorDouble t{.id = x.one<std::int64_t>(dnn::tensor_id),
                      .type = x.one<int>(dnn::tensor_data_type),
                      .alignment = x.one<std::int64_t>(dnn::tensor_alignment_bytes)};
    const auto dims = x.all<std::int64_t>(dnn::tensor_dimensions), strides = x.all<std::int64_t>(dnn::tensor_strides);
    need(dims.size() == 4 && strides.size() == 4 && t.id > 0, "a tensor of four dimensions and an id is played");
    std::ranges::copy(dims, t.dims.begin());
    std::ranges::copy(strides, t.strides.begin());
    need(std::ranges::all_of(dims, [](std::int64_t n) { return n > 0; }), "a tensor without elements");
    t.is_virtual = x.one<char>(dnn::tensor_is_virtual) != 0, t.by_value = x.one<char>(dnn::tensor_is_by_value) != 0;
    need(!(t.is_virtual && t.by_value), "a number on the host that is between two ops");
    need(t.type == dnn::type_f32 || t.type == dnn::type_bf16 || t.type == dnn::type_int32 ||
             (t.type == dnn::type_boolean && t.is_virtual),
         "a data type that is not played", not_supported);
    if (x.has(dnn::tensor_ragged_offset)) {
      const DnnDouble& offsets = finalised(d, x.one<DnnDescriptor>(dnn::tensor_ragged_offset), dnn::tensor);
      const DnnTensorDouble& o = offsets.tensors.front();
      need(o.type == dnn::type_int32 && o.dims == std::array<std::int64_t, 4>{t.dims[0] + 1, 1, 1, 1},
           "ragged offsets are a list, one more than there are parts");
      t.ragged = o.id;
      x.tensors = {t, o};
    } else {
      x.tensors = {t};
    }
  }

  static void finish_op(FakeDnn& d, DnnDouble& x) {
    x.op.kind = x.type;
    const auto take = [&](int name) -> std::int64_t {
      if (!x.has(name)) return 0;
      const DnnDouble& t = finalised(d, x.one<DnnDescriptor>(name), dnn::tensor);
      x.tensors.insert(x.tensors.end(), t.tensors.begin(), t.tensors.end());
      return t.tensors.front().id;
    };
    const auto parameters = [&](int name, int type) -> const DnnDouble& {
      return finalised(d, x.one<DnnDescriptor>(name), type);
    };
    if (x.type == dnn::pointwise_op) {
      const DnnDouble& how = parameters(dnn::pointwise_op_descriptor, dnn::pointwise);
      x.op.mode = how.one<int>(dnn::pointwise_mode);
      x.op.axis = how.one<std::int64_t>(dnn::pointwise_axis, -1);
      x.op.x = take(dnn::pointwise_op_x), x.op.b = take(dnn::pointwise_op_b), x.op.t = take(dnn::pointwise_op_t);
      x.op.y = take(dnn::pointwise_op_y);
    } else if (x.type == dnn::matmul_op) {
      need(parameters(dnn::matmul_op_descriptor, dnn::matmul).one<int>(dnn::matmul_compute_type) == dnn::type_f32,
           "products are summed in fp32", not_supported);
      x.op.x = take(dnn::matmul_op_a), x.op.b = take(dnn::matmul_op_b), x.op.y = take(dnn::matmul_op_c);
      x.op.rows = take(dnn::matmul_op_rows), x.op.columns = take(dnn::matmul_op_columns);
      x.op.depth = take(dnn::matmul_op_depth);
    } else if (x.type == dnn::reduction_op) {
      need(
          parameters(dnn::reduction_op_descriptor, dnn::reduction).one<int>(dnn::reduction_operator) == dnn::reduce_add,
          "sums are played", not_supported);
      x.op.x = take(dnn::reduction_op_x), x.op.y = take(dnn::reduction_op_y);
    } else {
      x.op.x = take(dnn::reshape_op_x), x.op.y = take(dnn::reshape_op_y);
    }
  }

  static void finish_graph(FakeDnn& d, DnnDouble& x) {
    auto graph = std::make_shared<DnnGraphDouble>();
    for (const DnnDescriptor handle : x.all<DnnDescriptor>(dnn::graph_ops)) {
      const DnnDouble& op = known(d, handle);
      need(op.finalised && op.op.kind != 0, "what is no op of a graph", not_finalised);
      graph->ops.push_back(op.op);
      for (const DnnTensorDouble& t : op.tensors) graph->tensors.emplace(t.id, t);
    }
    const std::string why = graph->why_wrong();
    need(why.empty(), why);
    x.graph = std::move(graph);
  }

  static DnnStatus finalize(DnnDescriptor handle) {
    return call("cudnnBackendFinalize", [&](FakeDnn& d) {
      DnnDouble& x = known(d, handle);
      for (const Attribute& a : attributes)
        need(a.owner != x.type || !a.needed || x.has(a.name), fmt::format("attribute {} is not set", a.name));
      switch (x.type) {
        case dnn::tensor:
          finish_tensor(d, x);
          break;
        case dnn::pointwise_op:
        case dnn::matmul_op:
        case dnn::reduction_op:
        case dnn::reshape_op:
          finish_op(d, x);
          break;
        case dnn::operation_graph:
          finish_graph(d, x);
          break;
        case dnn::engine_search:
          x.graph = finalised(d, x.one<DnnDescriptor>(dnn::search_graph), dnn::operation_graph).graph;
          break;
        case dnn::execution_plan: {
          const DnnDouble& config = known(d, x.one<DnnDescriptor>(dnn::plan_config));
          need(config.graph != nullptr, "a config that no search has filled");
          x.graph = config.graph, x.other_bits = config.other_bits;
          break;
        }
        case dnn::variant_pack:
          need(x.all<std::int64_t>(dnn::pack_ids).size() == x.all<std::uint64_t>(dnn::pack_pointers).size(),
               "as many pointers as tensors");
          break;
        default:
          break;
      }
      x.finalised = true;
    });
  }

  static DnnStatus get(DnnDescriptor handle, int name, int type, std::int64_t asked, std::int64_t* count, void* out) {
    return call("cudnnBackendGetAttribute", [&](FakeDnn& d) {
      DnnDouble& from = known(d, handle);
      need(asked > 0 && count != nullptr && out != nullptr, "room for what is asked");
      if (from.type == dnn::engine_search && name == dnn::search_results && type == dnn::of_descriptor) {
        need(from.finalised, "a search that was not finalised", not_finalised);
        const std::size_t found = d.known_ == Known::nothing ? 0 : d.known_ == Known::other_bits ? 1 : 2;
        *count = static_cast<std::int64_t>(found);
        auto* const configs = static_cast<DnnDescriptor*>(out);
        for (std::size_t i = 0; i < std::min(found, static_cast<std::size_t>(asked)); ++i) {
          DnnDouble& config = known(d, configs[i]);
          need(config.type == dnn::engine_config, "results are configs");
          config.graph = from.graph, config.other_bits = i == 0, config.finalised = true;
        }
      } else if (from.type == dnn::engine_config && name == dnn::config_engine && type == dnn::of_descriptor) {
        DnnDouble& engine = known(d, *static_cast<DnnDescriptor*>(out));
        need(engine.type == dnn::engine && from.finalised, "a config's engine");
        engine.graph = from.graph, engine.other_bits = from.other_bits, engine.finalised = true;
        *count = 1;
      } else if (from.type == dnn::engine && name == dnn::engine_numerical_notes && type == dnn::of_numerical_note) {
        *count = from.other_bits ? 1 : 0;
        if (from.other_bits) *static_cast<int*>(out) = dnn::note_nondeterministic;
      } else if (from.type == dnn::execution_plan && name == dnn::plan_workspace_bytes && type == dnn::of_int64) {
        need(from.finalised, "a plan that was not finalised", not_finalised);
        *static_cast<std::int64_t*>(out) = from.graph->workspace_bytes();
        *count = 1;
      } else {
        need(false, fmt::format("attribute {} of a descriptor of type {} is not asked for here", name, from.type),
             not_supported);
      }
    });
  }

  static DnnStatus execute(DnnHandle h, DnnDescriptor plan_handle, DnnDescriptor pack_handle) {
    CUstream stream = nullptr;
    std::shared_ptr<const DnnGraphDouble> graph;
    std::map<std::int64_t, CUdeviceptr> addresses;
    std::map<std::int64_t, float> values;
    FakeDriver* driver = nullptr;
    std::uint64_t workspace = 0;
    const DnnStatus s = call("cudnnBackendExecute", [&](FakeDnn& d) {
      need(d.handles_.contains(h), "no such handle");
      stream = d.handles_.at(h), driver = &d.driver_;
      graph = finalised(d, plan_handle, dnn::execution_plan).graph;
      const DnnDouble& pack = finalised(d, pack_handle, dnn::variant_pack);
      const auto ids = pack.all<std::int64_t>(dnn::pack_ids);
      const auto pointers = pack.all<std::uint64_t>(dnn::pack_pointers);
      workspace = pack.one<std::uint64_t>(dnn::pack_workspace);
      for (std::size_t i = 0; i < ids.size(); ++i) {
        const auto t = graph->tensors.find(ids[i]);
        need(t != graph->tensors.end() && !t->second.is_virtual, fmt::format("no tensor {} in memory", ids[i]));
        need(t->second.by_value || pointers[i] % static_cast<std::uint64_t>(t->second.alignment) == 0,
             fmt::format("tensor {} is aligned worse than was said", ids[i]));
        if (t->second.by_value) std::memcpy(&values[ids[i]], reinterpret_cast<const void*>(pointers[i]), sizeof(float));
        else addresses[ids[i]] = pointers[i];
      }
      for (const auto& [id, t] : graph->tensors)
        need(t.is_virtual || addresses.contains(id) || values.contains(id), fmt::format("tensor {} lies nowhere", id));
    });
    if (s != success) return s;
    const CUresult r = driver->enqueue_work(
        stream, fmt::format("cudnnBackendExecute of {} ops", graph->ops.size()),
        [driver, graph, addresses, values, workspace] {
          const std::int64_t bytes = graph->workspace_bytes();
          if (const std::string why = driver->why_no_device_memory(workspace, static_cast<std::size_t>(bytes));
              !why.empty())
            throw RuntimeFailure(why);
          auto touched = play_graph(*driver, *graph, addresses, values);
          touched.push_back({workspace, workspace + static_cast<CUdeviceptr>(bytes), true});
          return touched;
        });
    return r == CUDA_SUCCESS ? success : execution_failed;
  }
};

FakeDnn::FakeDnn(FakeDriver& driver) : driver_(driver) {
  FakeDnn* none = nullptr;
  HB_CHECK(alive_dnn.compare_exchange_strong(none, this), "a double of cuDNN is alive already");
}
FakeDnn::~FakeDnn() { alive_dnn.store(nullptr); }

std::size_t FakeDnn::alive() const {
  const std::lock_guard lock(mutex_);
  return descriptors_.size();
}

bool FakeDnn::has_entry(const std::string& name) {
#define HB_DNN_NAMED(entry, ...) \
  if (name == #entry) return true;
  HB_DNN_ENTRIES(HB_DNN_NAMED)
#undef HB_DNN_NAMED
  return false;
}

Dnn FakeDnn::table() {
  using E = Entries;
  Dnn t;
  t.cudnnGetVersion = E::version, t.cudnnGetErrorString = E::error_string;
  t.cudnnGetLastErrorString = E::last_error_string;
  t.cudnnCreate = E::create, t.cudnnDestroy = E::destroy, t.cudnnSetStream = E::set_stream;
  t.cudnnBackendCreateDescriptor = E::create_descriptor, t.cudnnBackendDestroyDescriptor = E::destroy_descriptor;
  t.cudnnBackendFinalize = E::finalize;
  t.cudnnBackendSetAttribute = E::set, t.cudnnBackendGetAttribute = E::get, t.cudnnBackendExecute = E::execute;
  return t;
}

}  // namespace hotbunk::cuda
