#include "backends/cuda/products.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "base/check.h"

namespace hotbunk::cuda {
namespace {

constexpr std::array product_policy_names = {std::string_view("own"), std::string_view("backward"),
                                             std::string_view("equal"), std::string_view("all")};

/// Rows compared at the beginning, in the middle and at the end of a product.
constexpr std::int64_t compared_rows = 128;

int type_of(DType t) { return t == DType::f32 ? blas::type_f32 : blas::type_bf16; }

std::int64_t alignment_of(const ProductAddresses& p) {
  const CUdeviceptr all = p.a | p.b | p.bias | p.c | 256;
  return static_cast<std::int64_t>(all & (~all + 1));
}

}  // namespace

std::string_view name_of(ProductPolicy p) { return product_policy_names[static_cast<std::size_t>(p)]; }
std::optional<ProductPolicy> product_policy_from(std::string_view name) {
  const auto at = std::ranges::find(product_policy_names, name);
  if (at == product_policy_names.end()) return std::nullopt;
  return static_cast<ProductPolicy>(at - product_policy_names.begin());
}

bool takes_products(ProductPolicy policy, OpKind kind) {
  switch (kind) {
    case OpKind::linear:
    case OpKind::fused_linear:
      return policy == ProductPolicy::all || policy == ProductPolicy::equal;
    case OpKind::linear_dgrad:
    case OpKind::linear_wgrad:
      return policy != ProductPolicy::own;
    default:
      return false;
  }
}

BlasProducts::BlasProducts(const BlasLt& blas, ProductPolicy policy, const Launcher& launch, Read read,
                           ComparedProducts compared)
    : blas_(blas),
      policy_(policy),
      launch_(launch),
      read_(std::move(read)),
      compared_(compared),
      workspace_(launch.context(), workspace_bytes) {
  check(blas_.cublasLtCreate(&handle_), "cublasLtCreate");
}

BlasProducts::~BlasProducts() {
  forget_chosen();
  blas_.cublasLtDestroy(handle_);
}

void BlasProducts::forget_chosen() {
  for (const auto& [key, c] : chosen_) {
    if (c.desc != nullptr) blas_.cublasLtMatmulDescDestroy(c.desc);
    for (const BlasLayout layout : {c.first, c.second, c.result})
      if (layout != nullptr) blas_.cublasLtMatrixLayoutDestroy(layout);
  }
  chosen_.clear();
}

void BlasProducts::check(BlasStatus status, const char* call) const {
  if (status == 0) return;
  const char* why = blas_.cublasLtGetStatusString(status);
  throw RuntimeFailure(fmt::format("{}: {}", call, why != nullptr ? why : fmt::format("status {}", status)));
}

BlasProducts::Chosen& BlasProducts::choose(const Key& key) {
  if (chosen_.size() >= most_chosen && !chosen_.contains(key)) forget_chosen();
  const auto [at, is_new] = chosen_.try_emplace(key);
  Chosen& c = at->second;
  if (!is_new) return c;
  ++counts_.searched;
  const Product& p = key.product;
  check(blas_.cublasLtMatmulDescCreate(&c.desc, blas::compute_32f, blas::type_f32), "cublasLtMatmulDescCreate");
  const auto describe = [&](int attribute, auto value) {
    check(blas_.cublasLtMatmulDescSetAttribute(c.desc, attribute, &value, sizeof value),
          "cublasLtMatmulDescSetAttribute");
  };
  // Its matrices are column by column: what lies row by row is the transposed one. So C' = op(B)' op(A)', B comes
  // first.
  const bool b_transposed = p.form == Product::Form::nt, a_transposed = p.form == Product::Form::tn;
  describe(blas::desc_transa, std::int32_t{b_transposed ? blas::op_t : blas::op_n});
  describe(blas::desc_transb, std::int32_t{a_transposed ? blas::op_t : blas::op_n});
  if (p.bias) describe(blas::desc_epilogue, blas::epilogue_bias);
  const auto layout = [&](BlasLayout& out, DType type, std::int64_t rows, std::int64_t cols) {
    check(blas_.cublasLtMatrixLayoutCreate(&out, type_of(type), static_cast<std::uint64_t>(rows),
                                           static_cast<std::uint64_t>(cols), rows),
          "cublasLtMatrixLayoutCreate");
  };
  layout(c.first, p.operands, b_transposed ? p.k : p.n, b_transposed ? p.n : p.k);
  layout(c.second, p.operands, a_transposed ? p.m : p.k, a_transposed ? p.k : p.m);
  layout(c.result, p.result, p.n, p.m);
  BlasPreference preference = nullptr;
  check(blas_.cublasLtMatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
  const auto prefer = [&](int attribute, auto value) {
    return blas_.cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value);
  };
  BlasStatus status = prefer(blas::pref_max_workspace_bytes, static_cast<std::uint64_t>(workspace_bytes));
  if (status == 0)
    status =
        prefer(blas::pref_reduction_scheme_mask, key.whole_sums ? blas::reduction_none : blas::reduction_compute_type);
  for (const int attribute : {blas::pref_min_alignment_a_bytes, blas::pref_min_alignment_b_bytes,
                              blas::pref_min_alignment_c_bytes, blas::pref_min_alignment_d_bytes})
    if (status == 0) status = prefer(attribute, static_cast<std::uint32_t>(key.alignment));
  BlasHeuristic best{};
  int found = 0;
  BlasStatus searched = status;
  if (status == 0)
    searched = blas_.cublasLtMatmulAlgoGetHeuristic(handle_, c.desc, c.first, c.second, c.result, c.result, preference,
                                                    1, &best, &found);
  blas_.cublasLtMatmulPreferenceDestroy(preference);
  check(status, "cublasLtMatmulPreferenceSetAttribute");
  // Nothing but "not supported" says that there is no kernel: of a handle or a device that has failed ours would go on
  // with what it leaves.
  if (searched == 0 && found > 0) searched = best.state;
  if (searched != blas::not_supported)
    check(searched, fmt::format("cublasLtMatmulAlgoGetHeuristic of {} x {} x {}", p.m, p.n, p.k).c_str());
  c.none = searched == blas::not_supported || found < 1;
  c.algo = best.algo;
  return c;
}

std::optional<bool> BlasProducts::has_our_bits(const Product& p, const ProductAddresses& at, const OwnRows& own) const {
  constexpr std::int64_t count_bytes = 256;  // the counts, behind the rows
  const std::int64_t row = p.n * size_of(p.result),
                     rows = std::min({compared_rows, p.m, (workspace_bytes - count_bytes) / row});
  if (rows < 1) return false;
  const CUdeviceptr theirs = workspace_.address(), count = theirs + workspace_bytes - count_bytes;
  std::array<std::int32_t, 2> counts{};  // words that differ, and words of ours that are not 0
  launch_.fill(count, 0, sizeof counts);
  for (const std::int64_t first : {std::int64_t{0}, (p.m - rows) / 2, p.m - rows}) {
    own(at.a + static_cast<CUdeviceptr>(first * p.k * size_of(p.operands)), theirs, rows);
    const std::int64_t halves = rows * row / 2;
    launch_("differing_halves", {walking_blocks_of(halves, 256)}, 256, theirs,
            at.c + static_cast<CUdeviceptr>(first * row), halves, count);
  }
  std::memcpy(counts.data(), read_(count, sizeof counts), sizeof counts);
  const auto [different, set] = counts;
  if (different != 0) return false;
  if (set < 3 * rows * p.n * size_of(p.result) / 2 / 2) return {};  // zeros are equal whatever the order of their sums
  return true;
}

bool BlasProducts::note(const Product& p, OpKind kind, std::string_view why) {
  // The weight: of a forward product the second matrix, of the gradient of its input too, of its own the result.
  const std::int64_t rows = p.form == Product::Form::nt   ? p.n
                            : p.form == Product::Form::nn ? p.k
                                                          : p.m,
                     columns = p.form == Product::Form::nt ? p.k : p.n;
  ++noted_[{kind, rows, columns, p.operands, p.result, why}];
  ++(why.empty() ? counts_.taken : counts_.declined);
  return why.empty();
}

std::vector<LibraryChoice> BlasProducts::choices() const {
  std::vector<LibraryChoice> out;
  for (const auto& [of, times] : noted_) {
    const auto& [kind, rows, columns, operands, result, why] = of;
    std::string dtypes(name_of(operands));
    if (result != operands) dtypes += fmt::format("/{}", name_of(result));
    out.push_back({fmt::format("{} {} x {} {}", name_of(kind), rows, columns, dtypes), why.empty() ? "cuBLASLt" : "own",
                   std::string(why), times});
  }
  return out;
}

bool BlasProducts::take(const Product& p, const ProductAddresses& at, OpKind kind, const OwnRows& own) {
  const bool compares = policy_ == ProductPolicy::equal && is_linear(kind);
  if (!takes_products(policy_, kind)) return note(p, kind, "not asked for");
  if (p.m == 0 || p.n == 0 || p.k == 0) return note(p, kind, "no rows");
  if (compares && p.m < compared_.rows) return note(p, kind, "few rows");
  if (compares && (p.n < compared_.columns || p.k < compared_.depth || p.accumulate))
    return note(p, kind, "too small to compare");
  // A bias has the operands' dtype here, the result's there.
  if (p.bias && p.operands != p.result) return note(p, kind, "a bias of another dtype");
  Chosen* c = &choose({p, alignment_of(at), compares});
  if (c->none) return note(p, kind, "no kernel there");
  if (compares && c->equal == false) return note(p, kind, "other bits there");
  if (p.bias)
    check(blas_.cublasLtMatmulDescSetAttribute(c->desc, blas::desc_bias_pointer, &at.bias, sizeof at.bias),
          "cublasLtMatmulDescSetAttribute");
  const float one = 1.0f, beta = p.accumulate ? 1.0f : 0.0f;
  const auto pointer = [](CUdeviceptr address) { return reinterpret_cast<void*>(address); };
  check(
      blas_.cublasLtMatmul(handle_, c->desc, &one, pointer(at.b), c->first, pointer(at.a), c->second, &beta,
                           pointer(at.c), c->result, pointer(at.c), c->result, &c->algo, pointer(workspace_.address()),
                           static_cast<std::size_t>(workspace_bytes), launch_.stream()),
      fmt::format("cublasLtMatmul of {} x {} x {}", p.m, p.n, p.k).c_str());
  if (compares && !c->equal) {
    ++counts_.compared;
    c->equal = has_our_bits(p, at, own);
    // Ours are written over it.
    if (c->equal != true) return note(p, kind, c->equal ? "other bits there" : "zeros, of which nothing can be said");
  }
  return note(p, kind, "");
}

}  // namespace hotbunk::cuda
