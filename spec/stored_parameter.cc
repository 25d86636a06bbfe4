#include "spec/stored_parameter.h"

#include "spec/family.h"

namespace hotbunk {

StoredParameter stored(const ModelSpec& model, const ParamSpec& p) {
  StoredParameter out{.tensor = p.name, .shape = p.shape};
  if (p.shape.size() == 2) out.cols = out.row_step = p.shape[1];
  if (const auto store = family_of(model).store; store != nullptr) store(model, p, out);
  return out;
}

}  // namespace hotbunk
