// What doctor says of a machine's devices and ports.
#include "backends/cuda/machine.h"

#include <unistd.h>

#include <catch2/catch.hpp>
#include <filesystem>

#include "backends/cuda/blas_table.h"
#include "backends/cuda/dnn_table.h"
#include "backends/cuda/fake/fake_driver.h"
#include "base/file.h"
#if __has_include(<cudnn.h>)
#include <cudnn.h>
#endif
#if __has_include(<cublasLt.h>)
#include <cublasLt.h>
#endif

using namespace hotbunk;
using namespace hotbunk::cuda;
namespace fs = std::filesystem;

TEST_CASE("devices are listed with memory, architecture and clocks where the driver knows them") {
  FakeDriver fake({.memory_bytes = std::int64_t{3} << 30});
  cuda::Driver table = fake.table();
  CHECK(device_lines(table) == std::vector<std::string>{"0: hotbunk driver double, 3.0 GiB, sm_90, 1 SMs"});
  CHECK(peer_access_text(table).empty());
  table.cuDeviceGetCount = [](int* n) {
    *n = 3;
    return CUDA_SUCCESS;
  };
  table.cuDeviceGet = [](CUdevice* d, int i) {
    *d = i;
    return CUDA_SUCCESS;
  };
  table.cuDeviceCanAccessPeer = [](int* yes, CUdevice a, CUdevice b) {
    *yes = a != 2 || b != 0;
    return CUDA_SUCCESS;
  };
  CHECK(peer_access_text(table) == "2 does not reach 0: sync.transport collective there");
  table.cuDeviceCanAccessPeer = [](int* yes, CUdevice, CUdevice) {
    *yes = 1;
    return CUDA_SUCCESS;
  };
  CHECK(peer_access_text(table) == "all 3 reach one another");
}

TEST_CASE("ports of InfiniBand are read from sysfs") {
  const fs::path root = fs::temp_directory_path() / ("hotbunk-ib-test." + std::to_string(::getpid()));
  CHECK(infiniband_text(root) == "none");
  fs::create_directories(root / "mlx5_0" / "ports" / "1");
  REQUIRE(write_file_atomic(root / "mlx5_0" / "ports" / "1" / "state", "4: ACTIVE\n"));
  REQUIRE(write_file_atomic(root / "mlx5_0" / "ports" / "1" / "rate", "400 Gb/sec (4X NDR)\n"));
  CHECK(infiniband_text(root) == "mlx5_0 port 1: 4: ACTIVE, 400 Gb/sec (4X NDR)");
  fs::remove_all(root);
}

TEST_CASE("a machine without cuBLASLt says so") {
  const auto none = open_blas("libhotbunk-no-such-blas.so");
  REQUIRE(!none);
  CHECK(none.error().front().code == "E643");
  const auto other = open_blas("libm.so.6");  // there, and not cuBLASLt
  REQUIRE(!other);
  CHECK_THAT(other.error().front().message, Catch::Contains("lacks cublasLtGetVersion"));
}

#if __has_include(<cublasLt.h>)
// The numbers of blas_table.h are the header's.
static_assert(blas::compute_32f == CUBLAS_COMPUTE_32F && blas::type_f32 == CUDA_R_32F &&
              blas::type_bf16 == CUDA_R_16BF);
static_assert(blas::op_n == CUBLAS_OP_N && blas::op_t == CUBLAS_OP_T);
static_assert(blas::desc_transa == CUBLASLT_MATMUL_DESC_TRANSA && blas::desc_transb == CUBLASLT_MATMUL_DESC_TRANSB);
static_assert(blas::desc_epilogue == CUBLASLT_MATMUL_DESC_EPILOGUE &&
              blas::desc_bias_pointer == CUBLASLT_MATMUL_DESC_BIAS_POINTER &&
              blas::epilogue_bias == CUBLASLT_EPILOGUE_BIAS);
static_assert(blas::pref_max_workspace_bytes == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES &&
              blas::pref_reduction_scheme_mask == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK &&
              blas::pref_min_alignment_a_bytes == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES &&
              blas::pref_min_alignment_b_bytes == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES &&
              blas::pref_min_alignment_c_bytes == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES &&
              blas::pref_min_alignment_d_bytes == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);
static_assert(blas::reduction_compute_type == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE &&
              blas::reduction_none == CUBLASLT_REDUCTION_SCHEME_NONE);
static_assert(sizeof(BlasHeuristic) == sizeof(cublasLtMatmulHeuristicResult_t) &&
              offsetof(BlasHeuristic, state) == offsetof(cublasLtMatmulHeuristicResult_t, state));
#endif

TEST_CASE("a machine without cuDNN says so") {
  const auto none = open_dnn("libhotbunk-no-such-dnn.so");
  REQUIRE(!none);
  CHECK(none.error().front().code == "E644");
  const auto other = open_dnn("libm.so.6");  // there, and not cuDNN
  REQUIRE(!other);
  CHECK_THAT(other.error().front().message, Catch::Contains("lacks cudnnGetVersion"));
  CHECK(dnn_version_text(91900) == "9.19.0");
}

#if __has_include(<cudnn.h>)
#if CUDNN_VERSION >= 91100
// The numbers of dnn_table.h are the header's.
static_assert(dnn::type_f32 == CUDNN_DATA_FLOAT && dnn::type_int32 == CUDNN_DATA_INT32 &&
              dnn::type_bf16 == CUDNN_DATA_BFLOAT16 && dnn::type_boolean == CUDNN_DATA_BOOLEAN);
static_assert(dnn::pointwise == CUDNN_BACKEND_POINTWISE_DESCRIPTOR && dnn::engine == CUDNN_BACKEND_ENGINE_DESCRIPTOR &&
              dnn::engine_config == CUDNN_BACKEND_ENGINECFG_DESCRIPTOR &&
              dnn::engine_search == CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR &&
              dnn::execution_plan == CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR &&
              dnn::pointwise_op == CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR &&
              dnn::operation_graph == CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR &&
              dnn::variant_pack == CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR &&
              dnn::tensor == CUDNN_BACKEND_TENSOR_DESCRIPTOR && dnn::matmul == CUDNN_BACKEND_MATMUL_DESCRIPTOR &&
              dnn::matmul_op == CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR &&
              dnn::reduction == CUDNN_BACKEND_REDUCTION_DESCRIPTOR &&
              dnn::reduction_op == CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR &&
              dnn::reshape_op == CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR &&
              dnn::device_properties == CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR);
static_assert(dnn::of_handle == CUDNN_TYPE_HANDLE && dnn::of_data_type == CUDNN_TYPE_DATA_TYPE &&
              dnn::of_boolean == CUDNN_TYPE_BOOLEAN && dnn::of_int64 == CUDNN_TYPE_INT64 &&
              dnn::of_pointer == CUDNN_TYPE_VOID_PTR && dnn::of_search_mode == CUDNN_TYPE_HEUR_MODE &&
              dnn::of_numerical_note == CUDNN_TYPE_NUMERICAL_NOTE &&
              dnn::of_pointwise_mode == CUDNN_TYPE_POINTWISE_MODE &&
              dnn::of_descriptor == CUDNN_TYPE_BACKEND_DESCRIPTOR &&
              dnn::of_reduction_operator == CUDNN_TYPE_REDUCTION_OPERATOR_TYPE && dnn::of_char == CUDNN_TYPE_CHAR);
static_assert(dnn::pointwise_mode == CUDNN_ATTR_POINTWISE_MODE &&
              dnn::pointwise_compute_type == CUDNN_ATTR_POINTWISE_MATH_PREC &&
              dnn::pointwise_axis == CUDNN_ATTR_POINTWISE_AXIS);
static_assert(dnn::search_mode == CUDNN_ATTR_ENGINEHEUR_MODE &&
              dnn::search_graph == CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH &&
              dnn::search_results == CUDNN_ATTR_ENGINEHEUR_RESULTS &&
              dnn::search_device == CUDNN_ATTR_ENGINEHEUR_DEVICEPROP &&
              dnn::config_engine == CUDNN_ATTR_ENGINECFG_ENGINE);
static_assert(dnn::plan_handle == CUDNN_ATTR_EXECUTION_PLAN_HANDLE &&
              dnn::plan_config == CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG &&
              dnn::plan_workspace_bytes == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE &&
              dnn::plan_device == CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP);
static_assert(dnn::pointwise_op_descriptor == CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR &&
              dnn::pointwise_op_x == CUDNN_ATTR_OPERATION_POINTWISE_XDESC &&
              dnn::pointwise_op_b == CUDNN_ATTR_OPERATION_POINTWISE_BDESC &&
              dnn::pointwise_op_y == CUDNN_ATTR_OPERATION_POINTWISE_YDESC &&
              dnn::pointwise_op_t == CUDNN_ATTR_OPERATION_POINTWISE_TDESC);
static_assert(dnn::graph_handle == CUDNN_ATTR_OPERATIONGRAPH_HANDLE && dnn::graph_ops == CUDNN_ATTR_OPERATIONGRAPH_OPS);
static_assert(dnn::tensor_alignment_bytes == CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT &&
              dnn::tensor_data_type == CUDNN_ATTR_TENSOR_DATA_TYPE &&
              dnn::tensor_dimensions == CUDNN_ATTR_TENSOR_DIMENSIONS &&
              dnn::tensor_strides == CUDNN_ATTR_TENSOR_STRIDES && dnn::tensor_id == CUDNN_ATTR_TENSOR_UNIQUE_ID &&
              dnn::tensor_is_virtual == CUDNN_ATTR_TENSOR_IS_VIRTUAL &&
              dnn::tensor_is_by_value == CUDNN_ATTR_TENSOR_IS_BY_VALUE &&
              dnn::tensor_ragged_offset == CUDNN_ATTR_TENSOR_RAGGED_OFFSET_DESC);
static_assert(dnn::pack_ids == CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS &&
              dnn::pack_pointers == CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS &&
              dnn::pack_workspace == CUDNN_ATTR_VARIANT_PACK_WORKSPACE &&
              dnn::engine_numerical_notes == CUDNN_ATTR_ENGINE_NUMERICAL_NOTE);
static_assert(dnn::matmul_compute_type == CUDNN_ATTR_MATMUL_COMP_TYPE &&
              dnn::matmul_op_a == CUDNN_ATTR_OPERATION_MATMUL_ADESC &&
              dnn::matmul_op_b == CUDNN_ATTR_OPERATION_MATMUL_BDESC &&
              dnn::matmul_op_c == CUDNN_ATTR_OPERATION_MATMUL_CDESC &&
              dnn::matmul_op_descriptor == CUDNN_ATTR_OPERATION_MATMUL_DESC &&
              dnn::matmul_op_rows == CUDNN_ATTR_OPERATION_MATMUL_GEMM_M_OVERRIDE_DESC &&
              dnn::matmul_op_columns == CUDNN_ATTR_OPERATION_MATMUL_GEMM_N_OVERRIDE_DESC &&
              dnn::matmul_op_depth == CUDNN_ATTR_OPERATION_MATMUL_GEMM_K_OVERRIDE_DESC);
static_assert(dnn::reduction_operator == CUDNN_ATTR_REDUCTION_OPERATOR &&
              dnn::reduction_compute_type == CUDNN_ATTR_REDUCTION_COMP_TYPE &&
              dnn::reduction_op_x == CUDNN_ATTR_OPERATION_REDUCTION_XDESC &&
              dnn::reduction_op_y == CUDNN_ATTR_OPERATION_REDUCTION_YDESC &&
              dnn::reduction_op_descriptor == CUDNN_ATTR_OPERATION_REDUCTION_DESC &&
              dnn::reshape_op_x == CUDNN_ATTR_OPERATION_RESHAPE_XDESC &&
              dnn::reshape_op_y == CUDNN_ATTR_OPERATION_RESHAPE_YDESC &&
              dnn::device_json == CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION);
static_assert(dnn::mode_add == CUDNN_POINTWISE_ADD && dnn::mode_mul == CUDNN_POINTWISE_MUL &&
              dnn::mode_sub == CUDNN_POINTWISE_SUB && dnn::mode_exp == CUDNN_POINTWISE_EXP &&
              dnn::mode_greater == CUDNN_POINTWISE_CMP_GT && dnn::mode_greater_equal == CUDNN_POINTWISE_CMP_GE &&
              dnn::mode_less == CUDNN_POINTWISE_CMP_LT && dnn::mode_and == CUDNN_POINTWISE_LOGICAL_AND &&
              dnn::mode_index == CUDNN_POINTWISE_GEN_INDEX && dnn::mode_select == CUDNN_POINTWISE_BINARY_SELECT);
static_assert(dnn::reduce_add == CUDNN_REDUCE_TENSOR_ADD && dnn::search_heuristics == CUDNN_HEUR_MODE_A &&
              dnn::note_nondeterministic == CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC &&
              dnn::num_notes >= CUDNN_NUMERICAL_NOTE_TYPE_COUNT);
#endif
#endif
