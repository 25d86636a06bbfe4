#include "planner/rl/weight_format.h"

namespace hotbunk {

WeightFormat weight_format_of(const RolloutSpec& r) {
  const auto wide = static_cast<double>(size_of(r.dtype));
  if (r.quantization == "fp8")
    return {.products = "fp8",
            .stored_bytes = 1.0 + 4.0 / (128.0 * 128.0),
            .operand_bytes = 1.0 + 4.0 / 128.0,
            .scales = 1,
            .block = 128,
            .narrow = true};
  if (r.quantization == "mxfp8")
    return {.products = "mxfp8",
            .stored_bytes = 1.0 + 1.0 / 32.0,
            .operand_bytes = 1.0 + 1.0 / 32.0,
            .scales = 1,
            .block = 32,
            .narrow = true};
  if (r.quantization == "nvfp4")
    return {.products = "nvfp4",
            .stored_bytes = 0.5 + 1.0 / 16.0,
            .operand_bytes = 0.5 + 1.0 / 16.0,
            .scales = 2,
            .block = 16,
            .narrow = true};
  return {.products = std::string(name_of(r.dtype)), .stored_bytes = wide, .operand_bytes = wide};
}

}  // namespace hotbunk
