#include "backends/cuda/fake/fake_blas.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <vector>

#include "base/check.h"

namespace hotbunk::cuda {
namespace {

std::atomic<FakeBlasLt*> alive_blas{nullptr};
using blas::not_supported;
constexpr BlasStatus success = 0, invalid_value = 7, internal_error = 14;

struct Desc {
  std::int32_t transa = blas::op_n, transb = blas::op_n, epilogue = 1;
  CUdeviceptr bias = 0;
};
struct Layout {
  int type = 0;
  std::int64_t rows = 0, cols = 0, ld = 0;
  std::int64_t element() const { return type == blas::type_f32 ? 4 : 2; }
  std::int64_t bytes() const { return ld * cols * element(); }
};
struct Preference {
  std::uint32_t alignment[4] = {256, 256, 256, 256};
  std::uint32_t reductions = ~std::uint32_t{0};
  std::uint64_t workspace = 0;
};
/// What a search found: the smallest alignment that its kernel takes.
struct Algo {
  std::uint32_t magic, alignment;
};
constexpr std::uint32_t algo_magic = 0x4c740001;

float read(const std::byte* at, int type, std::int64_t i) {
  if (type == blas::type_f32) {
    float v;
    std::memcpy(&v, at + 4 * i, 4);
    return v;
  }
  std::uint16_t half;
  std::memcpy(&half, at + 2 * i, 2);
  return std::bit_cast<float>(static_cast<std::uint32_t>(half) << 16);
}

void write(std::byte* at, int type, std::int64_t i, float v) {
  if (type == blas::type_f32) {
    std::memcpy(at + 4 * i, &v, 4);
    return;
  }
  const auto bits = std::bit_cast<std::uint32_t>(v);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const std::uint16_t half = static_cast<std::uint16_t>(
      nan ? (bits >> 16 | 0x40u) : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);  // to nearest, ties to even
  std::memcpy(at + 2 * i, &half, 2);
}

struct Task {
  Desc desc;
  Layout a, b, d;
  const std::byte *from_a, *from_b;
  std::byte* to;
  float alpha, beta;
  bool as_ours;
};

/// Column by column, as cuBLASLt has it.
void multiply(const Task& t) {
  const bool ta = t.desc.transa == blas::op_t, tb = t.desc.transb == blas::op_t;
  const std::int64_t m = t.d.rows, n = t.d.cols, k = ta ? t.a.rows : t.a.cols;
  for (std::int64_t j = 0; j < n; ++j)
    for (std::int64_t i = 0; i < m; ++i) {
      const auto product = [&](std::int64_t x) {
        return static_cast<double>(read(t.from_a, t.a.type, ta ? i * t.a.ld + x : x * t.a.ld + i)) *
               read(t.from_b, t.b.type, tb ? x * t.b.ld + j : j * t.b.ld + x);
      };
      float sum = 0.0f;
      if (t.as_ours) {
        for (std::int64_t x = 0; x < k; x += 16) {
          double step = sum;
          for (std::int64_t y = x; y < std::min(k, x + 16); ++y) step += product(y);
          sum = static_cast<float>(step);
        }
      } else {  // two halves of K: an order of its own, as a library's kernels have
        float halves[2] = {0.0f, 0.0f};
        for (std::int64_t x = 0; x < k; ++x) halves[x * 2 >= k] += static_cast<float>(product(x));
        sum = halves[0] + halves[1];
      }
      float v = t.alpha * sum;
      if (t.beta != 0.0f) v += t.beta * read(t.to, t.d.type, j * t.d.ld + i);
      if (t.desc.epilogue == blas::epilogue_bias)
        v += read(reinterpret_cast<const std::byte*>(t.desc.bias), t.d.type, i);
      write(t.to, t.d.type, j * t.d.ld + i, v);
    }
}

}  // namespace

struct FakeBlasLt::Entries {
  template <class Body>
  static BlasStatus call(const char* name, Body&& body) {
    FakeBlasLt* b = alive_blas.load();
    if (b == nullptr || b->driver_.other_call(name) != CUDA_SUCCESS) return internal_error;
    return body(*b);
  }
  template <class T>
  static T& as(void* handle) {
    return *static_cast<T*>(handle);
  }

  static std::size_t version() { return 130100; }
  static const char* status_string(BlasStatus s) {
    return s == success         ? "CUBLAS_STATUS_SUCCESS"
           : s == not_supported ? "CUBLAS_STATUS_NOT_SUPPORTED"
           : s == invalid_value ? "CUBLAS_STATUS_INVALID_VALUE"
                                : "CUBLAS_STATUS_INTERNAL_ERROR";
  }
  static BlasStatus create(BlasHandle* out) {
    return call("cublasLtCreate", [&](FakeBlasLt& b) {
      *out = reinterpret_cast<BlasHandle>(&b);
      return success;
    });
  }
  static BlasStatus destroy(BlasHandle) { return success; }
  static BlasStatus desc_create(BlasDesc* out, int compute, int scale) {
    return call("cublasLtMatmulDescCreate", [&](FakeBlasLt&) {
      if (compute != blas::compute_32f || scale != blas::type_f32) return not_supported;
      *out = reinterpret_cast<BlasDesc>(new Desc);
      return success;
    });
  }
  static BlasStatus desc_destroy(BlasDesc d) {
    delete &as<Desc>(d);
    return success;
  }
  static BlasStatus desc_set(BlasDesc handle, int attribute, const void* value, std::size_t bytes) {
    return call("cublasLtMatmulDescSetAttribute", [&](FakeBlasLt&) {
      Desc& d = as<Desc>(handle);
      void* const to = attribute == blas::desc_transa         ? static_cast<void*>(&d.transa)
                       : attribute == blas::desc_transb       ? &d.transb
                       : attribute == blas::desc_epilogue     ? &d.epilogue
                       : attribute == blas::desc_bias_pointer ? static_cast<void*>(&d.bias)
                                                              : nullptr;
      if (to == nullptr || bytes != (attribute == blas::desc_bias_pointer ? 8 : 4)) return invalid_value;
      std::memcpy(to, value, bytes);
      return success;
    });
  }
  static BlasStatus layout_create(BlasLayout* out, int type, std::uint64_t rows, std::uint64_t cols, std::int64_t ld) {
    return call("cublasLtMatrixLayoutCreate", [&](FakeBlasLt&) {
      if ((type != blas::type_f32 && type != blas::type_bf16) || ld < static_cast<std::int64_t>(rows))
        return invalid_value;
      *out = reinterpret_cast<BlasLayout>(
          new Layout{type, static_cast<std::int64_t>(rows), static_cast<std::int64_t>(cols), ld});
      return success;
    });
  }
  static BlasStatus layout_destroy(BlasLayout l) {
    delete &as<Layout>(l);
    return success;
  }
  static BlasStatus preference_create(BlasPreference* out) {
    *out = reinterpret_cast<BlasPreference>(new Preference);
    return success;
  }
  static BlasStatus preference_destroy(BlasPreference p) {
    delete &as<Preference>(p);
    return success;
  }
  static BlasStatus preference_set(BlasPreference handle, int attribute, const void* value, std::size_t bytes) {
    return call("cublasLtMatmulPreferenceSetAttribute", [&](FakeBlasLt&) {
      Preference& p = as<Preference>(handle);
      const int a = attribute - blas::pref_min_alignment_a_bytes;
      void* const to = attribute == blas::pref_max_workspace_bytes     ? static_cast<void*>(&p.workspace)
                       : attribute == blas::pref_reduction_scheme_mask ? static_cast<void*>(&p.reductions)
                       : a >= 0 && a < 4                               ? static_cast<void*>(&p.alignment[a])
                                                                       : nullptr;
      if (to == nullptr || bytes != (attribute == blas::pref_max_workspace_bytes ? 8 : 4)) return invalid_value;
      std::memcpy(to, value, bytes);
      return success;
    });
  }
  /// The matrices of a product belong together.
  static bool fit(const Desc& d, const Layout& a, const Layout& b, const Layout& c) {
    const bool ta = d.transa == blas::op_t, tb = d.transb == blas::op_t;
    return a.type == b.type && (ta ? a.cols : a.rows) == c.rows && (tb ? b.rows : b.cols) == c.cols &&
           (ta ? a.rows : a.cols) == (tb ? b.cols : b.rows);
  }
  static BlasStatus heuristic(BlasHandle, BlasDesc d, BlasLayout a, BlasLayout b, BlasLayout c, BlasLayout,
                              BlasPreference p, int asked, BlasHeuristic* out, int* found) {
    return call("cublasLtMatmulAlgoGetHeuristic", [&](FakeBlasLt& blas) {
      *found = 0;
      if (asked < 1 || !fit(as<Desc>(d), as<Layout>(a), as<Layout>(b), as<Layout>(c))) return invalid_value;
      const Preference& preference = as<Preference>(p);
      if (blas.search_ != success) return blas.search_;
      // A sum by atomics has no fixed order: nobody here may allow it.
      if (preference.reductions != blas::reduction_compute_type && preference.reductions != blas::reduction_none)
        return not_supported;
      *out = {};
      out->state = blas.kernel_;
      if (*found = 1; out->state != success) return success;
      const Algo algo{algo_magic, *std::min_element(preference.alignment, preference.alignment + 4)};
      std::memcpy(&out->algo, &algo, sizeof algo);
      out->workspace_bytes = 0, out->waves = 1.0f;
      return success;
    });
  }
  static BlasStatus matmul(BlasHandle, BlasDesc desc, const void* alpha, const void* a, BlasLayout la, const void* b,
                           BlasLayout lb, const void* beta, const void* c, BlasLayout lc, void* d, BlasLayout ld,
                           const BlasAlgo* chosen, void* workspace, std::size_t workspace_bytes, CUstream stream) {
    return call("cublasLtMatmul", [&](FakeBlasLt& blas) {
      Algo algo{};
      std::memcpy(&algo, chosen, sizeof algo);
      Task t{as<Desc>(desc),
             as<Layout>(la),
             as<Layout>(lb),
             as<Layout>(ld),
             static_cast<const std::byte*>(a),
             static_cast<const std::byte*>(b),
             static_cast<std::byte*>(d),
             *static_cast<const float*>(alpha),
             *static_cast<const float*>(beta),
             blas.as_ours_};
      const auto all = reinterpret_cast<std::uint64_t>(a) | reinterpret_cast<std::uint64_t>(b) |
                       reinterpret_cast<std::uint64_t>(c) | reinterpret_cast<std::uint64_t>(d);
      if (algo.magic != algo_magic || !fit(t.desc, t.a, t.b, t.d) || all % algo.alignment != 0 || c != d || lc != ld ||
          (workspace_bytes > 0 && workspace == nullptr))
        return invalid_value;
      const CUresult r = blas.driver_.enqueue_work(
          stream, fmt::format("cublasLtMatmul {} x {}", t.d.rows, t.d.cols), [&driver = blas.driver_, t] {
            std::vector<FakeDriver::Touch> touched;
            const auto at = [](const void* p) { return reinterpret_cast<CUdeviceptr>(p); };
            const auto touch = [&](const void* p, std::int64_t bytes, bool write) {
              if (const std::string why = driver.why_no_device_memory(at(p), static_cast<std::size_t>(bytes));
                  !why.empty())
                throw RuntimeFailure(why);
              if (!write && !driver.was_written(at(p), static_cast<std::size_t>(bytes)))
                throw RuntimeFailure(fmt::format("reads {} B at {:#x}, not all of which were written", bytes, at(p)));
              touched.push_back({at(p), at(p) + static_cast<CUdeviceptr>(bytes), write});
            };
            touch(t.from_a, t.a.bytes(), false);
            touch(t.from_b, t.b.bytes(), false);
            if (t.beta != 0.0f) touch(t.to, t.d.bytes(), false);
            if (t.desc.epilogue == blas::epilogue_bias)
              touch(reinterpret_cast<const void*>(t.desc.bias), t.d.rows * t.d.element(), false);
            touch(t.to, t.d.bytes(), true);
            multiply(t);
            driver.mark_written(at(t.to), static_cast<std::size_t>(t.d.bytes()));
            return touched;
          });
      return r == CUDA_SUCCESS ? success : internal_error;
    });
  }
};

FakeBlasLt::FakeBlasLt(FakeDriver& driver) : driver_(driver) {
  FakeBlasLt* none = nullptr;
  HB_CHECK(alive_blas.compare_exchange_strong(none, this), "a double of cuBLASLt is alive already");
}
FakeBlasLt::~FakeBlasLt() { alive_blas.store(nullptr); }

bool FakeBlasLt::has_entry(const std::string& name) {
#define HB_BLAS_NAMED(entry, ...) \
  if (name == #entry) return true;
  HB_BLAS_ENTRIES(HB_BLAS_NAMED)
#undef HB_BLAS_NAMED
  return false;
}

BlasLt FakeBlasLt::table() {
  using E = Entries;
  BlasLt t;
  t.cublasLtGetVersion = E::version, t.cublasLtGetStatusString = E::status_string;
  t.cublasLtCreate = E::create, t.cublasLtDestroy = E::destroy;
  t.cublasLtMatmulDescCreate = E::desc_create, t.cublasLtMatmulDescDestroy = E::desc_destroy;
  t.cublasLtMatmulDescSetAttribute = E::desc_set, t.cublasLtMatrixLayoutCreate = E::layout_create;
  t.cublasLtMatrixLayoutDestroy = E::layout_destroy, t.cublasLtMatmulPreferenceCreate = E::preference_create;
  t.cublasLtMatmulPreferenceDestroy = E::preference_destroy;
  t.cublasLtMatmulPreferenceSetAttribute = E::preference_set;
  t.cublasLtMatmulAlgoGetHeuristic = E::heuristic, t.cublasLtMatmul = E::matmul;
  return t;
}

}  // namespace hotbunk::cuda
