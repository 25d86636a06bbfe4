// Token embedding over a range of the vocabulary (vocabulary-parallel).
#pragma once
#include "backends/cpu_gloo/kernels/context.h"

namespace hotbunk::kernels {

/// The rows [v0, v1) of the vocabulary that this rank's table holds.
struct VocabRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

/// out[t] = factor · table[ids[t] − v0], or zeros where ids[t] is outside the range. table: [v1−v0, h]; out: [T, h].
/// The factor is rounded to out's dtype first, here and below.
void embedding_forward(KernelContext&, const std::int32_t* ids, ConstMatrix table, VocabRange, Matrix out,
                       std::int64_t T, std::int64_t h, float factor = 1.0f);

/// dtable[ids[t] − v0] += factor · dy[t] for ids in the range; [v1−v0, h], in token order: same bits for every number
/// of threads. A table of bf16 is rounded once for all tokens of an id. Rows of absent ids are not touched: zero the
/// table first where it is new.
void embedding_backward(KernelContext&, const std::int32_t* ids, ConstMatrix dy, VocabRange, Matrix dtable,
                        std::int64_t T, std::int64_t h, float factor = 1.0f);

}  // namespace hotbunk::kernels
