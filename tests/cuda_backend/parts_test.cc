// How many parts the gradient of a weight is made in (launch_operands.h).
#include <catch2/catch.hpp>

#include "backends/cuda/launch_operands.h"

namespace hotbunk::cuda {

TEST_CASE("parts of a gradient are as many as a grid has blocks in y, cover all rows, and fit their scratch") {
  for (const int least : {8, 64}) {
    CAPTURE(least);
    CHECK(rows_in_part(1, least) == least);
    CHECK(parts_of(0, least) == 0);
    CHECK(rows_in_part(std::int64_t{least} * 32'767, least) == least);  // as many parts as there may be
    CHECK(parts_of(std::int64_t{least} * 32'767, least) == 32'767);
    CHECK(rows_in_part(std::int64_t{least} * 32'767 + 1, least) == least + 1);
    for (const std::int64_t rows : {1, 7, 8, 65, 262'135, 262'136, 262'137, 262'144, 2'097'152, 5'000'000}) {
      CAPTURE(rows);
      const std::int64_t parts = parts_of(rows, least), each = rows_in_part(rows, least);
      CHECK(2 * parts <= 65'535);
      CHECK(parts * each >= rows);
      CHECK((parts - 1) * each < rows);
      // Scratch is for as many rows as there may be: what fewer rows need has room in it.
      for (const std::int64_t fewer : {rows, rows - 1, rows - 8, rows / 2})
        if (fewer >= 0) CHECK(parts_of(fewer, least) <= parts_at_most(rows, least));
    }
  }
  // 262,144 rows of 8 would be 32,768 parts, and two gradients' 65,536: one block too many.
  CHECK(rows_in_part(262'144, 8) == 9);
  CHECK(parts_of(262'144, 8) == 29'128);
  CHECK(parts_of(262'136, 8) == 32'767);
  CHECK(rows_in_part(5'000'000) == 153);
  CHECK(parts_of(5'000'000) == 32'680);
}

}  // namespace hotbunk::cuda
