// The mnemonic of a PTX instruction ("cvt.rn.bf16x2.f32") as fields of an Instruction.
#pragma once
#include <string_view>

#include "backends/cuda/ptx/module.h"

namespace hotbunk::ptx {

/// Fills everything that the mnemonic says. UnknownPtx for a name or a modifier that is not implemented.
Instruction decode(std::string_view mnemonic);

}  // namespace hotbunk::ptx
