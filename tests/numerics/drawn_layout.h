// Layouts of a golden's model drawn at random, for tests of P3.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "tests/numerics/golden.h"

namespace hotbunk::test {

/// A layout of 1 to 8 ranks that this model can have, and how it is trained in it. Of a golden's two or three layers no
/// stage has several chunks; of a deep model's, each.
std::optional<Scenario> draw_layout(const Golden&, std::mt19937_64& random);
std::string text_of(const Scenario&);

/// A whole number that the environment has for whoever wants more: HOTBUNK_LAYOUT_ROUNDS, HOTBUNK_LAYOUT_SEED.
std::uint64_t number_of_environment(const char* variable, std::uint64_t otherwise);

/// Of the two variants of a table's entry `number` that the tests train: every second entry's one and the others'
/// other, so that both meet most models and layouts; with HOTBUNK_LAYOUT_ALL both of each.
std::vector<bool> turns(std::size_t number);

/// check(golden, scenario) for so many layouts of goldens drawn among these, or HOTBUNK_LAYOUT_ROUNDS. `salt`: a prime
/// of the test's own, so that tests draw different ones.
void for_drawn_layouts(const std::vector<std::string>& goldens, std::uint64_t rounds, std::uint64_t salt,
                       const std::function<void(const Golden&, const Scenario&)>& check);
/// The same with two layouts of one golden: check(golden, first, then).
void for_drawn_pairs(const std::vector<std::string>& goldens, std::uint64_t rounds, std::uint64_t salt,
                     const std::function<void(const Golden&, const Scenario&, const Scenario&)>& check);

}  // namespace hotbunk::test
