#include "spec/cluster.h"

namespace hotbunk {

double GpuSpec::peak_flops(const std::string& precision) const {
  const auto at = flops.find(precision);
  return at == flops.end() ? 0.0 : at->second.value;
}

}  // namespace hotbunk
