// Layouts of a golden's model drawn at random, for tests of P3.
#pragma once
#include <optional>
#include <random>
#include <string>

#include "tests/numerics/golden.h"

namespace hotbunk::test {

/// A layout of 1 to 8 ranks that this model can have, and how it is trained in it. Of a golden's two or three layers no
/// stage has several chunks; of a deep model's, each.
std::optional<Scenario> draw_layout(const Golden&, std::mt19937_64& random);
std::string text_of(const Scenario&);

}  // namespace hotbunk::test
