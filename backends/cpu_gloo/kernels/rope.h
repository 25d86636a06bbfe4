// Rotary position embedding in Hugging Face's rotate-half convention: dimension j of a head pairs with j + d/2.
#pragma once
#include <cstdint>

#include "backends/cpu_gloo/kernels/context.h"
#include "backends/cpu_gloo/kernels/heads.h"
#include "base/rope.h"

namespace hotbunk::kernels {

enum class RopeDirection : bool { forward, backward };

/// Rotates the q and k heads of qkv[T, (a+2k)·d] in place by positions[t]·inv_freq; `backward` rotates the other way,
/// which is the gradient. positions: [T], ≥ 0. inv_freq: [d/2]. `amplitude`: of cosines and sines.
void rope(KernelContext&, Matrix qkv, const std::int32_t* positions, const float* inv_freq, std::int64_t T, HeadShape,
          RopeDirection, float amplitude = 1.0f);

}  // namespace hotbunk::kernels
