// What a test cannot go on without.
#pragma once
#include <stdexcept>
#include <utility>

#include "base/diagnostic.h"

namespace hotbunk {

/// Throws what was wrong.
template <class T>
T value(Result<T> result) {
  if (!result) throw std::runtime_error(render(result.error()));
  return std::move(*result);
}

}  // namespace hotbunk
