// The PTX text of this folder's kernels, compiled in where nvcc was there.
#pragma once
#include <string_view>

namespace hotbunk {

/// Of kernels/NAME.cu; "" where there is no such file.
std::string_view kernel_ptx(std::string_view name);

}  // namespace hotbunk
