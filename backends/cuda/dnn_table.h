// cuDNN as a table of the entry points of its graph API, opened at run time as the driver, NCCL and cuBLASLt are:
// neither its headers nor its library are needed to build. The double of fake/ fills the same table.
//
// Types and numbers are cuDNN's (cudnn_graph.h of cuDNN 9; tests/cuda_backend compares them where the header is).
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include "backends/cuda/driver.h"
#include "base/diagnostic.h"

namespace hotbunk::cuda {

using DnnStatus = int;  // 0: success
using DnnHandle = struct DnnHandleOpaque*;
using DnnDescriptor = void*;

namespace dnn {
// data types of tensors
inline constexpr int type_f32 = 0, type_int32 = 4, type_bf16 = 9, type_boolean = 11;

// what a descriptor describes
inline constexpr int pointwise = 0, engine = 2, engine_config = 3, engine_search = 4, execution_plan = 5,
                     pointwise_op = 13, operation_graph = 15, variant_pack = 16, tensor = 17, matmul = 18,
                     matmul_op = 19, reduction = 21, reduction_op = 22, reshape_op = 31, device_properties = 38;

// kinds of attribute values
inline constexpr int of_handle = 0, of_data_type = 1, of_boolean = 2, of_int64 = 3, of_pointer = 6, of_search_mode = 8,
                     of_numerical_note = 11, of_pointwise_mode = 14, of_descriptor = 15, of_reduction_operator = 18,
                     of_char = 24;

// attributes
inline constexpr int pointwise_mode = 0, pointwise_compute_type = 1, pointwise_axis = 9;
inline constexpr int search_mode = 200, search_graph = 201, search_results = 202, search_device = 204;
inline constexpr int config_engine = 300;
inline constexpr int plan_handle = 400, plan_config = 401, plan_workspace_bytes = 402, plan_device = 407;
inline constexpr int pointwise_op_descriptor = 750, pointwise_op_x = 751, pointwise_op_b = 752, pointwise_op_y = 753,
                     pointwise_op_t = 758;
inline constexpr int graph_handle = 800, graph_ops = 801;
inline constexpr int tensor_alignment_bytes = 900, tensor_data_type = 901, tensor_dimensions = 902,
                     tensor_strides = 903, tensor_id = 906, tensor_is_virtual = 907, tensor_is_by_value = 908,
                     tensor_ragged_offset = 913;
inline constexpr int pack_ids = 1000, pack_pointers = 1001, pack_workspace = 1003;
inline constexpr int engine_numerical_notes = 1303;
inline constexpr int matmul_compute_type = 1500;
inline constexpr int matmul_op_a = 1520, matmul_op_b = 1521, matmul_op_c = 1522, matmul_op_descriptor = 1523,
                     matmul_op_rows = 1525, matmul_op_columns = 1526, matmul_op_depth = 1527;
inline constexpr int reduction_operator = 1600, reduction_compute_type = 1601;
inline constexpr int reduction_op_x = 1610, reduction_op_y = 1611, reduction_op_descriptor = 1612;
inline constexpr int reshape_op_x = 2200, reshape_op_y = 2201;
inline constexpr int device_json = 2702;

// values
inline constexpr int mode_add = 0, mode_mul = 1, mode_sub = 9, mode_exp = 13, mode_greater = 302,
                     mode_greater_equal = 303, mode_less = 304, mode_and = 400, mode_index = 501, mode_select = 601;
inline constexpr int reduce_add = 0;
inline constexpr int search_heuristics = 3;  // mode A
inline constexpr int note_nondeterministic = 4, num_notes = 16;
}  // namespace dnn

// clang-format off
#define HB_DNN_ENTRIES(X)                                                                                           \
  X(cudnnGetVersion, std::size_t())                                                                                 \
  X(cudnnGetErrorString, const char*(DnnStatus))                                                                    \
  X(cudnnGetLastErrorString, void(char* message, std::size_t most))                                                 \
  X(cudnnCreate, DnnStatus(DnnHandle*))                                                                             \
  X(cudnnDestroy, DnnStatus(DnnHandle))                                                                             \
  X(cudnnSetStream, DnnStatus(DnnHandle, CUstream))                                                                 \
  X(cudnnBackendCreateDescriptor, DnnStatus(int type, DnnDescriptor*))                                              \
  X(cudnnBackendDestroyDescriptor, DnnStatus(DnnDescriptor))                                                        \
  X(cudnnBackendFinalize, DnnStatus(DnnDescriptor))                                                                 \
  X(cudnnBackendSetAttribute, DnnStatus(DnnDescriptor, int name, int type, std::int64_t count, const void*))        \
  X(cudnnBackendGetAttribute, DnnStatus(DnnDescriptor, int name, int type, std::int64_t asked, std::int64_t* count, \
                                        void*))                                                                     \
  X(cudnnBackendExecute, DnnStatus(DnnHandle, DnnDescriptor plan, DnnDescriptor variant_pack))
// clang-format on

struct Dnn {
#define HB_DNN_POINTER(name, ...)  \
  using name##_type = __VA_ARGS__; \
  name##_type* name = nullptr;
  HB_DNN_ENTRIES(HB_DNN_POINTER)
#undef HB_DNN_POINTER
};

/// "9.19.0" of 91900.
std::string dnn_version_text(std::size_t version);

/// cuDNN 9 of this machine. E644 with the reason when the library or one of its entry points is not there, or when it
/// is older than 9.11: what came before has faults in attention's backward. `library`: that one alone.
Result<Dnn> open_dnn(const std::string& library = "libcudnn.so.9");

}  // namespace hotbunk::cuda
