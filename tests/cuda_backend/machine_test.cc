// What doctor says of a machine's devices and ports.
#include "backends/cuda/machine.h"

#include <unistd.h>

#include <catch2/catch.hpp>
#include <filesystem>

#include "backends/cuda/blas_table.h"
#include "backends/cuda/fake/fake_driver.h"
#include "base/file.h"
#if __has_include(<cublasLt.h>)
#include <cublasLt.h>
#endif

using namespace hotbunk;
using namespace hotbunk::cuda;
namespace fs = std::filesystem;

TEST_CASE("devices are listed with memory, architecture and clocks where the driver knows them") {
  FakeDriver fake({.memory_bytes = std::int64_t{3} << 30});
  cuda::Driver table = fake.table();
  CHECK(device_lines(table) == std::vector<std::string>{"0: hotbunk driver double, 3.0 GiB, sm_80, 1 SMs"});
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
