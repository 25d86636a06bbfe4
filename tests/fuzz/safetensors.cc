// safetensors: every view that the reader gives out lies inside the input and is readable.
#include "spec/safetensors.h"

#include <cstdint>
#include <span>
#include <vector>

#include "base/check.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto tensors = hotbunk::parse_safetensors(std::as_bytes(std::span(data, size)), "fuzz.safetensors");
  if (!tensors) {
    HB_CHECK(!hotbunk::render(tensors.error()).empty(), "an error without a message");
    return 0;
  }
  std::size_t covered = 0;
  for (const auto& tensor : *tensors) {
    covered += tensor.data.size();
    (void)hotbunk::check_finite(tensor);  // reads every byte
  }
  HB_CHECK(covered <= size, "tensors of {} bytes in {}", covered, size);
  return 0;
}
