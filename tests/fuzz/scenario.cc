// Scenario YAML and --set: whatever the bytes, a Scenario or diagnostics; and a scenario that loads also survives
// `plan --resolved`. A first line "--set a.b=c" (NUL-free) is given as an override.
#include <cstdint>
#include <string>

#include "base/check.h"
#include "spec/loader.h"
#include "spec/validate.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::string text(reinterpret_cast<const char*>(data), size);
  std::vector<std::string> overrides;
  if (text.starts_with("--set ")) {
    const auto end = std::min(text.find('\n'), text.size());
    overrides.push_back(text.substr(6, end - 6));
    text.erase(0, std::min(end + 1, text.size()));
  }
  const auto scenario = hotbunk::load_scenario_text(text, "fuzz.yaml", overrides);
  if (!scenario) {
    HB_CHECK(!hotbunk::render(scenario.error()).empty(), "an error without a message");
    return 0;
  }
  (void)hotbunk::unsupported_to_execute(*scenario);
  HB_CHECK(hotbunk::parameter_count(scenario->model) > 0, "a model without parameters");
  const auto again = hotbunk::load_scenario_text(hotbunk::resolved_yaml(*scenario), "fuzz.yaml");
  HB_CHECK(again.has_value(), "the resolved scenario does not load: {}", hotbunk::render(again.error()));
  return 0;
}
