#include "backends/cpu_gloo/kernels/reduce.h"

#include <algorithm>

#include "backends/cpu_gloo/kernels/parallel.h"
#include "backends/cpu_gloo/kernels/simd.h"

namespace hotbunk::kernels {
namespace {

constexpr std::int64_t kGrain = 16384;  // elements; see rows_grain

template <class E>
void sum_floats(std::span<const void* const> inputs, E* out, std::int64_t begin, std::int64_t end, bool accumulate) {
  for_vectors(end - begin, [&](std::int64_t j, auto ld, auto st) HB_FORCE_INLINE {
    const std::int64_t i = begin + j;
    Vf sum = accumulate ? ld(out + i) : Vf{};
    bool first = !accumulate;
    for (const void* in : inputs) {
      const Vf x = ld(static_cast<const E*>(in) + i);
      sum = first ? x : sum + x;  // not 0 + x: −0 stays −0
      first = false;
    }
    st(out + i, sum);
  });
}

template <class E>
void sum_integers(std::span<const void* const> inputs, E* out, std::int64_t begin, std::int64_t end, bool accumulate) {
  using U = std::make_unsigned_t<E>;  // wraps, where signed overflow would be undefined
  for (std::int64_t i = begin; i < end; ++i) {
    U sum = accumulate ? static_cast<U>(out[i]) : U{0};
    for (const void* in : inputs) sum += static_cast<U>(static_cast<const E*>(in)[i]);
    out[i] = static_cast<E>(sum);
  }
}

template <class E>
void max_elements(std::span<const void* const> inputs, E* out, std::int64_t begin, std::int64_t end) {
  for (std::int64_t i = begin; i < end; ++i) {
    E best = static_cast<const E*>(inputs[0])[i];
    for (const void* in : inputs.subspan(1)) {
      const E x = static_cast<const E*>(in)[i];
      best = !(x <= best) && best == best ? x : best;  // also when x is NaN; once NaN, stays
    }
    out[i] = best;
  }
}

}  // namespace

void reduce_sum(KernelContext& ctx, std::span<const void* const> inputs, DType dtype, void* out, std::int64_t n,
                Write write) {
  HB_CHECK(dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::i32 || dtype == DType::i64,
           "reduce_sum of {}",
           name_of(dtype));  // here, not inside the team: an exception must not leave a parallel region
  const bool accumulate = write == Write::accumulate;
  parallel_for(ctx, n, kGrain, [&](std::int64_t begin, std::int64_t end) {
    switch (dtype) {
      case DType::i32:
        return sum_integers(inputs, static_cast<std::int32_t*>(out), begin, end, accumulate);
      case DType::i64:
        return sum_integers(inputs, static_cast<std::int64_t*>(out), begin, end, accumulate);
      default:
        return with_float_type(
            dtype, [&](auto tag) { sum_floats(inputs, static_cast<decltype(tag)*>(out), begin, end, accumulate); });
    }
  });
}

void reduce_max(KernelContext& ctx, std::span<const void* const> inputs, DType dtype, void* out, std::int64_t n) {
  HB_CHECK(!inputs.empty(), "maximum of nothing");
  HB_CHECK(dtype == DType::f32 || dtype == DType::i32, "reduce_max of {}", name_of(dtype));
  parallel_for(ctx, n, kGrain, [&](std::int64_t begin, std::int64_t end) {
    if (dtype == DType::i32) max_elements(inputs, static_cast<std::int32_t*>(out), begin, end);
    else max_elements(inputs, static_cast<float*>(out), begin, end);
  });
}

}  // namespace hotbunk::kernels
