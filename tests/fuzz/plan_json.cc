// Plan files. The hash is checked last, so that every reader behind it is reached; a plan that is accepted is printed
// (which follows every index in it) and must survive being written and read again.
#include "graph/plan_json.h"

#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "graph/print.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto plan = hotbunk::plan_from_json({reinterpret_cast<const char*>(data), size}, "fuzz.json");
  if (!plan) {
    HB_CHECK(!hotbunk::render(plan.error()).empty(), "an error without a message");
    return 0;
  }
  HB_CHECK(!hotbunk::print_plan(*plan, {.phase = "", .ops = true, .buffers = true}).empty(), "nothing to print");
  const auto again = hotbunk::plan_from_json(hotbunk::plan_to_json(*plan), "again.json");
  HB_CHECK(again.has_value() && *again == *plan, "the writer does not reproduce the plan");
  return 0;
}
