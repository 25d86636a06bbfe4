// The list of families: a new one has a file beside this one, a line here and its name in ModelFamily (spec/model.h).
#include <algorithm>

#include "base/check.h"
#include "spec/family.h"

namespace hotbunk {

// clang-format off
#define HB_EACH_FAMILY(x) \
  x(llama) \
  x(qwen2) \
  x(qwen3) \
  x(mistral) \
  x(mixtral) \
  x(qwen3_moe) \
  x(deepseek_v3) \
  x(deepseek_v2) \
  x(gpt2) \
  x(gemma2) \
  x(gemma3) \
  x(glm4_moe) \
  x(gpt_oss) \
  x(qwen3_5)
// clang-format on

#define HB_DECLARED(name) extern const FamilySpec name##_family;
HB_EACH_FAMILY(HB_DECLARED)

std::span<const FamilySpec* const> families() {
#define HB_LISTED(name) &name##_family,
  static constexpr const FamilySpec* all[] = {HB_EACH_FAMILY(HB_LISTED)};
  return all;
}

const FamilySpec& family_of(ModelFamily id) {
  const auto at = std::ranges::find(families(), id, [](const FamilySpec* f) { return f->id; });
  HB_CHECK(at != families().end(), "no family {}", static_cast<int>(id));
  return **at;
}

}  // namespace hotbunk
