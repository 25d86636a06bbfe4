// Rotary position embedding in Hugging Face's rotate-half convention: dimension j of a head pairs with j + d/2.
// GLM's turns the first numbers of a head alone. DeepSeek's turns neighbours, of a part of a head.
#pragma once
#include <cstdint>

#include "backends/cpu_gloo/kernels/context.h"
#include "backends/cpu_gloo/kernels/heads.h"
#include "base/rope.h"

namespace hotbunk::kernels {

enum class RopeDirection : bool { forward, backward };

/// Rotates the q and k heads of qkv[T, (a+2k)·d] in place by positions[t]·inv_freq; `backward` rotates the other way,
/// which is the gradient. positions: [T], ≥ 0. inv_freq: [turned/2]. `amplitude`: of cosines and sines. `turned`: of a
/// head's dimensions the first so many, j with j + turned/2; 0: all of them.
void rope(KernelContext&, Matrix qkv, const std::int32_t* positions, const float* inv_freq, std::int64_t T, HeadShape,
          RopeDirection, float amplitude = 1.0f, std::int64_t turned = 0);

/// Rotates the last `turned` dimensions of each of `heads` heads of x[T, heads·head_dim] in place, dimension 2j with
/// 2j + 1 by positions[t]·inv_freq[j]. inv_freq: [turned/2].
void rope_neighbours(KernelContext&, Matrix x, const std::int32_t* positions, const float* inv_freq, std::int64_t T,
                     std::int64_t heads, std::int64_t head_dim, std::int64_t turned, RopeDirection,
                     float amplitude = 1.0f);

}  // namespace hotbunk::kernels
