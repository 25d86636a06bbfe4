#include "graph/byte_ranges.h"

#include <rapidcheck.h>

#include <bitset>
#include <catch2/catch.hpp>

using namespace hotbunk;

TEST_CASE("Byte ranges say what a flag per byte says") {
  int whole = 0, part = 0, none = 0;
  CHECK(rc::check("as brute force", [&] {
    ByteRanges ranges;
    std::bitset<48> flags;
    for (int i = *rc::gen::inRange(1, 80); i > 0; --i) {
      const int begin = *rc::gen::inRange(0, 40), end = begin + *rc::gen::inRange(0, 9);
      int in = 0;
      for (int at = begin; at < end; ++at) in += flags[static_cast<std::size_t>(at)] ? 1 : 0;
      RC_ASSERT(ranges.holds(begin, end) == (in == end - begin));
      RC_ASSERT(ranges.meets(begin, end) == (in > 0));
      std::bitset<48> told, seen;
      ranges.each_part(begin, end, [&](std::int64_t b, std::int64_t e, bool held) {
        RC_ASSERT(begin <= b && b < e && e <= end);
        for (std::int64_t at = b; at < e; ++at) {
          RC_ASSERT(!seen[static_cast<std::size_t>(at)]);
          seen[static_cast<std::size_t>(at)] = true, told[static_cast<std::size_t>(at)] = held;
        }
      });
      for (int at = begin; at < end; ++at) {
        const auto byte = static_cast<std::size_t>(at);
        RC_ASSERT(seen[byte] && told[byte] == flags[byte]);
      }
      ++(in == 0 ? none : in == end - begin ? whole : part);
      const bool add = *rc::gen::arbitrary<bool>();
      if (add) ranges.add(begin, end);
      else ranges.remove(begin, end);
      for (int at = begin; at < end; ++at) flags[static_cast<std::size_t>(at)] = add;
      RC_ASSERT(ranges.empty() == flags.none());
      RC_ASSERT(ranges.bytes() == static_cast<std::int64_t>(flags.count()));
      std::int64_t last = 0;
      for (std::int64_t at = 0; at < 48; ++at) last = flags[static_cast<std::size_t>(at)] ? at + 1 : last;
      RC_ASSERT(ranges.end() == last);
    }
  }));
  CHECK(std::min({whole, part, none}) > 100);  // every answer was asked for
}
