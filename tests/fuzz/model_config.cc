// config.json: whatever the bytes, a ModelSpec that its writer reproduces, or diagnostics.
#include "spec/model_config.h"

#include <cstdint>
#include <string_view>

#include "base/check.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto model = hotbunk::model_from_text(text, "config.json", "fuzz");
  if (!model) {
    HB_CHECK(!hotbunk::render(model.error()).empty(), "an error without a message");
    return 0;
  }
  HB_CHECK(hotbunk::parameter_count(*model) > 0, "a model without parameters");
  const auto again =
      hotbunk::model_from_text(hotbunk::config_text(*model, hotbunk::DType::bf16), "config.json", "fuzz");
  HB_CHECK(again.has_value() && *again == *model, "the writer does not reproduce the model");
  return 0;
}
