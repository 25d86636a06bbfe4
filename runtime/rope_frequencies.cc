#include "runtime/rope_frequencies.h"

#include "base/rope.h"

namespace hotbunk {

std::vector<float> rope_frequencies(const Op& op) {
  RopeScalingRule scaling;
  if (op.has(Attr::rope_low))
    scaling = Llama3RopeScaling{op.real(Attr::rope_factor), op.real(Attr::rope_low), op.real(Attr::rope_high),
                                op.real(Attr::rope_original)};
  else if (op.has(Attr::rope_factor))
    scaling = RampRopeScaling{op.real(Attr::rope_factor), op.real(Attr::rope_ramp_begin), op.real(Attr::rope_ramp_end)};
  const std::int64_t whole = op.integer(Attr::head_dim, 0);
  return rope_inv_freq(op.integer(Attr::rope_dim, op.integer(Attr::rope_first, whole)), op.real(Attr::rope_theta),
                       scaling);
}

}  // namespace hotbunk
