#include "spec/family.h"

#include <algorithm>

#include "base/check.h"

namespace hotbunk {

const FamilySpec* find_family(std::string_view model_type) {
  const auto at = std::ranges::find(families(), model_type, [](const FamilySpec* f) { return f->model_type; });
  return at == families().end() ? nullptr : *at;
}

const FamilySpec& family_of(const ModelSpec& model) {
  HB_CHECK(model.family != nullptr, "model {} is of no family", model.name);
  return *model.family;
}

}  // namespace hotbunk
