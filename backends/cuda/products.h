// Which library forms matrix products: cuBLASLt where the policy and the product allow it, else kernels/matmul*.cu,
// which are also what cuBLASLt is compared with.
//
// cuBLASLt chooses a kernel by the whole shape, so a row's bits may depend on how many rows there are: log-probs of
// rollout and training would no longer be equal to the bit (P5). Gradients have no counterpart in a rollout: backward
// products are two thirds of training's. Forward products are cuBLASLt's too where it was found to give our kernels'
// bits, as it does on Hopper where it does not cut K: for each shape its first result is compared with ours.
#pragma once
#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "backends/cuda/blas_table.h"
#include "backends/cuda/launch.h"
#include "graph/op.h"
#include "runtime/rank_backend.h"

namespace hotbunk::cuda {

/// Of which products cuBLASLt forms: none; backward ones; those, and forward ones of many rows in which it gives our
/// kernels' bits; all.
enum class ProductPolicy : std::uint8_t { own, backward, equal, all };
std::string_view name_of(ProductPolicy);
std::optional<ProductPolicy> product_policy_from(std::string_view);
/// Forward products that are compared under `equal`: smaller ones stay ours.
struct ComparedProducts {
  std::int64_t rows = 256;  // fewer are bounded by what they read, and ours read no slower
  // Of less too little is compared. Where cuBLASLt cut K = 8,192 in parts on an H100, 0.4 % of a result in bf16 had
  // other bits: hundreds of the elements compared here.
  std::int64_t columns = 256, depth = 512;
};

/// Whether cuBLASLt forms products of ops of this kind.
bool takes_products(ProductPolicy, OpKind);

/// C[M,N] (+)= op(A) op(B) (+ bias[N]), row by row without gaps. Form: nt A[M,K] B[N,K]', nn A[M,K] B[K,N],
/// tn A[K,M]' B[K,N].
struct Product {
  enum class Form : std::uint8_t { nt, nn, tn };
  Form form = Form::nt;
  DType operands = DType::f32, result = DType::f32;
  std::int64_t m = 0, n = 0, k = 0;
  bool accumulate = false, bias = false;
  friend auto operator<=>(const Product&, const Product&) = default;
};
struct ProductAddresses {
  CUdeviceptr a = 0, b = 0, bias = 0, c = 0;
};

/// cuBLASLt on one stream, for its thread. What it chose for a shape it keeps: the same shape, the same kernel.
class BlasProducts {
 public:
  /// Of what a product may need beside its operands, on each stream that has some. NVIDIA's documentation recommends
  /// 32 MiB on Hopper and later, less before.
  static constexpr std::int64_t workspace_bytes = std::int64_t{32} << 20;
  /// Micro-batches of many lengths have many shapes: beyond so many, all are chosen and compared anew.
  static constexpr std::size_t most_chosen = 4096;

  /// Bytes that the device has at an address, behind what the stream has done.
  using Read = std::function<const std::byte*(CUdeviceptr, std::int64_t bytes)>;
  /// So many rows of a product by our kernels, of A's rows at `a`, to `c`.
  using OwnRows = std::function<void(CUdeviceptr a, CUdeviceptr c, std::int64_t rows)>;

  /// `read`: for the policy `equal`. RuntimeFailure when the device has no memory for the workspace.
  BlasProducts(const BlasLt&, ProductPolicy, const Launcher&, Read read = {}, ComparedProducts compared = {});
  ~BlasProducts();
  BlasProducts(const BlasProducts&) = delete;
  BlasProducts& operator=(const BlasProducts&) = delete;

  /// Enqueues it and returns true; or false: our kernels' turn. `own`: with which a forward product's first result of a
  /// shape is compared, for which the host waits.
  /// RuntimeFailure names the call and cuBLASLt's reason.
  bool take(const Product&, const ProductAddresses&, OpKind, const OwnRows& own = {});

  struct Counts {
    std::int64_t taken = 0, declined = 0, searched = 0, compared = 0;
  };
  Counts counts() const { return counts_; }
  /// Who formed which products: by op and weight, whatever the rows.
  std::vector<LibraryChoice> choices() const;

 private:
  struct Key {
    Product product;
    std::int64_t alignment = 0;  // of the addresses, at most 256
    bool whole_sums = false;     // K is not cut into parts
    friend auto operator<=>(const Key&, const Key&) = default;
  };
  struct Chosen {
    BlasDesc desc = nullptr;
    BlasLayout first = nullptr, second = nullptr, result = nullptr;
    BlasAlgo algo{};
    bool none = false;          // cuBLASLt has no kernel for it
    std::optional<bool> equal;  // our bits, where that was asked
  };
  Chosen& choose(const Key&);
  void forget_chosen();
  /// Nothing where the result says nothing.
  std::optional<bool> has_our_bits(const Product&, const ProductAddresses&, const OwnRows&) const;
  void check(BlasStatus, const char* call) const;
  /// Of an op; `why`: of ours.
  bool note(const Product&, OpKind, std::string_view why);

  const BlasLt blas_;
  const ProductPolicy policy_;
  const Launcher& launch_;
  const Read read_;
  const ComparedProducts compared_;
  BlasHandle handle_ = nullptr;
  const DeviceBlock workspace_;
  std::map<Key, Chosen> chosen_;
  Counts counts_;
  /// By op, rows and columns of its weight, dtypes, and why it is ours ("": it is not).
  std::map<std::tuple<OpKind, std::int64_t, std::int64_t, DType, DType, std::string_view>, std::int64_t> noted_;
};

}  // namespace hotbunk::cuda
