#include "backends/cpu_gloo/kernels/embedding.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "backends/cpu_gloo/kernels/parallel.h"
#include "backends/cpu_gloo/kernels/simd.h"

namespace hotbunk::kernels {

void embedding_forward(KernelContext& ctx, const std::int32_t* ids, ConstMatrix table, VocabRange range, Matrix out,
                       std::int64_t T, std::int64_t h, float factor) {
  with_float_type(table.dtype, [&](auto in_tag) {
    with_float_type(out.dtype, [&](auto out_tag) {
      const float times = as_f32(from_f32<decltype(out_tag)>(factor));
      parallel_for(ctx, T, rows_grain(2 * h), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t t = begin; t < end; ++t) {
          auto* y = row<decltype(out_tag)>(out, t);
          const bool mine = ids[t] >= range.begin && ids[t] < range.end;
          if (!mine) {
            std::fill_n(y, h, decltype(out_tag){});
            continue;
          }
          const auto* x = row<decltype(in_tag)>(table, ids[t] - range.begin);
          for_vectors(h, [&](std::int64_t j, auto ld, auto st) HB_FORCE_INLINE { st(y + j, ld(x + j) * times); });
        }
      });
    });
  });
}

namespace {

/// Tokens of one id follow one another, so that what they add is summed in fp32 and rounded once.
void add_rows_to_bf16(KernelContext& ctx, const std::int32_t* ids, ConstMatrix dy, VocabRange range, Matrix dtable,
                      std::int64_t T, std::int64_t h, float factor) {
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(T));
  std::iota(tokens.begin(), tokens.end(), std::int64_t{0});
  std::erase_if(tokens, [&](std::int64_t t) { return ids[t] < range.begin || ids[t] >= range.end; });
  std::ranges::stable_sort(tokens, {}, [&](std::int64_t t) { return ids[t]; });
  with_float_type(dy.dtype, [&](auto tag) {
    const float times = as_f32(from_f32<decltype(tag)>(factor));
    parallel_for(ctx, h, T > 0 ? 16384 / T : h, [&](std::int64_t begin, std::int64_t end) {
      for (auto first = tokens.begin(); first != tokens.end();) {
        const std::int32_t id = ids[*first];
        const auto last = std::find_if(first, tokens.end(), [&](std::int64_t t) { return ids[t] != id; });
        bf16* w = row<bf16>(dtable, id - range.begin) + begin;
        for_vectors(end - begin, [&](std::int64_t j, auto ld, auto st) HB_FORCE_INLINE {
          Vf sum = ld(w + j);
          for (auto t = first; t != last; ++t) sum += ld(row<decltype(tag)>(dy, *t) + begin + j) * times;
          st(w + j, sum);
        });
        first = last;
      }
    });
  });
}

}  // namespace

void embedding_backward(KernelContext& ctx, const std::int32_t* ids, ConstMatrix dy, VocabRange range, Matrix dtable,
                        std::int64_t T, std::int64_t h, float factor) {
  if (dtable.dtype == DType::bf16) return add_rows_to_bf16(ctx, ids, dy, range, dtable, T, h, factor);
  with_float_type(dy.dtype, [&](auto tag) {
    const float times = as_f32(from_f32<decltype(tag)>(factor));
    // Columns are split over threads, each walks all tokens in order: no two threads share an element.
    parallel_for(ctx, h, T > 0 ? 16384 / T : h, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = 0; t < T; ++t) {
        if (ids[t] < range.begin || ids[t] >= range.end) continue;
        const auto* g = row<decltype(tag)>(dy, t) + begin;
        float* w = row<float>(dtable, ids[t] - range.begin) + begin;
        for_vectors(end - begin, [&](std::int64_t j, auto ld, auto st)
                                     HB_FORCE_INLINE { st(w + j, ld(w + j) + ld(g + j) * times); });
      }
    });
  });
}

}  // namespace hotbunk::kernels
