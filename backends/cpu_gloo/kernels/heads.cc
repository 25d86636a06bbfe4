#include "backends/cpu_gloo/kernels/heads.h"

#include <cstring>

#include "backends/cpu_gloo/kernels/parallel.h"
#include "backends/cpu_gloo/kernels/simd.h"

namespace hotbunk::kernels {
namespace {

std::int64_t grain_of(HeadShape shape) { return rows_grain(shape.width()); }

template <class E>
void copy_heads(const E* from, E* to, std::int64_t heads, std::int64_t head_dim) {
  std::memcpy(static_cast<void*>(to), from, static_cast<std::size_t>(heads * head_dim) * sizeof(E));
}

/// to = the sum over `count` rows `pitch` elements apart.
template <class E>
void sum_rows(const E* from, std::int64_t pitch, std::int64_t count, E* to, std::int64_t n) {
  for_vectors(n, [&](std::int64_t i, auto ld, auto st) {
    auto sum = ld(from + i);
    for (std::int64_t r = 1; r < count; ++r) sum += ld(from + r * pitch + i);
    st(to + i, sum);
  });
}

}  // namespace

void split_heads(KernelContext& ctx, ConstMatrix x, HeadShape shape, std::int64_t parts, Matrix y, std::int64_t T) {
  HB_CHECK(x.dtype == y.dtype, "split_heads: {} to {}", name_of(x.dtype), name_of(y.dtype));
  const HeadShape part = shape.part(parts);
  const std::int64_t d = shape.head_dim, dv = shape.dv();
  with_float_type(x.dtype, [&](auto tag) {
    using E = decltype(tag);
    parallel_for(ctx, parts * T, grain_of(part), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t r = i / T, kv = r * shape.num_kv_heads / parts;  // the part's first KV head
        const E* from = row<E>(x, i % T);
        E* to = row<E>(y, i);
        copy_heads(from + r * part.num_heads * d, to, part.num_heads, d);
        copy_heads(from + shape.k_offset() + kv * d, to + part.k_offset(), part.num_kv_heads, d);
        copy_heads(from + shape.v_offset() + kv * dv, to + part.v_offset(), part.num_kv_heads, dv);
      }
    });
  });
}

void merge_heads(KernelContext& ctx, ConstMatrix y, HeadShape shape, std::int64_t parts, Matrix x, std::int64_t T) {
  HB_CHECK(x.dtype == y.dtype, "merge_heads: {} to {}", name_of(y.dtype), name_of(x.dtype));
  const HeadShape part = shape.part(parts);
  const std::int64_t d = shape.head_dim, dv = shape.dv(), k = shape.num_kv_heads;
  const std::int64_t sharers = k > 0 && k < parts ? parts / k : 1;  // parts that have the same KV heads
  with_float_type(x.dtype, [&](auto tag) {
    using E = decltype(tag);
    parallel_for(ctx, T, grain_of(shape), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t) {
        E* to = row<E>(x, t);
        for (std::int64_t r = 0; r < parts; ++r)
          copy_heads(row<E>(y, r * T + t), to + r * part.num_heads * d, part.num_heads, d);
        for (std::int64_t r = 0; k > 0 && r < parts; r += sharers) {
          const E* from = row<E>(y, r * T + t);
          const std::int64_t kv = r * k / parts, n = part.num_kv_heads;
          sum_rows(from + part.k_offset(), T * y.ld, sharers, to + shape.k_offset() + kv * d, n * d);
          sum_rows(from + part.v_offset(), T * y.ld, sharers, to + shape.v_offset() + kv * dv, n * dv);
        }
      }
    });
  });
}

void take_kv(KernelContext& ctx, ConstMatrix x, HeadShape shape, Matrix kv, std::int64_t T) {
  HB_CHECK(x.dtype == kv.dtype, "take_kv: {} to {}", name_of(x.dtype), name_of(kv.dtype));
  with_float_type(x.dtype, [&](auto tag) {
    using E = decltype(tag);
    parallel_for(ctx, T, grain_of(shape), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t)
        copy_heads(row<E>(x, t) + shape.k_offset(), row<E>(kv, t), 1, shape.width() - shape.k_offset());
    });
  });
}

void merge_qkv(KernelContext& ctx, ConstMatrix q, ConstMatrix kv, ConstMatrix more, HeadShape shape, Matrix x,
               std::int64_t T) {
  HB_CHECK(q.dtype == DType::f32 && kv.dtype == DType::f32 && (more.data == nullptr || more.dtype == DType::f32),
           "merge_qkv: gradients that are not fp32");
  const std::int64_t of_queries = shape.k_offset(), of_keys = shape.width() - of_queries;
  with_float_type(x.dtype, [&](auto tag) {
    using E = decltype(tag);
    parallel_for(ctx, T, grain_of(shape), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t) {
        E* to = row<E>(x, t);
        const float *queries = row<float>(q, t), *keys = row<float>(kv, t),
                    *others = more.data != nullptr ? row<float>(more, t) : nullptr;
        for_vectors(of_queries, [&](std::int64_t i, auto ld, auto st) { st(to + i, ld(queries + i)); });
        for_vectors(of_keys, [&](std::int64_t i, auto ld, auto st) {
          auto sum = ld(keys + i);
          if (others != nullptr) sum += ld(others + i);
          st(to + of_queries + i, sum);
        });
      }
    });
  });
}

}  // namespace hotbunk::kernels
