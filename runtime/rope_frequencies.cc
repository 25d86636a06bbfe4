#include "runtime/rope_frequencies.h"

#include <optional>

#include "base/rope.h"

namespace hotbunk {

std::vector<float> rope_frequencies(const Op& op) {
  std::optional<Llama3RopeScaling> scaling;
  if (op.has(Attr::rope_factor))
    scaling = Llama3RopeScaling{op.real(Attr::rope_factor), op.real(Attr::rope_low), op.real(Attr::rope_high),
                                op.real(Attr::rope_original)};
  return rope_inv_freq(op.integer(Attr::head_dim), op.real(Attr::rope_theta), scaling);
}

}  // namespace hotbunk
