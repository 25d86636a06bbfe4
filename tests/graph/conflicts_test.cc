#include "graph/conflicts.h"

#include <rapidcheck.h>

#include <catch2/catch.hpp>
#include <set>
#include <utility>

#include "lowering/places.h"

using namespace hotbunk;

namespace {

using Earlier = std::set<std::pair<StreamId, std::int32_t>>;

/// The same question answered byte by byte.
class ByteMap {
 public:
  Earlier touch(const Access& a, StreamId stream, std::int32_t index) {
    Earlier out;
    for (std::int64_t at = a.begin; at < a.end; ++at) {
      Byte& byte = bytes_[{a.section, at}];
      if (byte.writer >= 0) out.insert({byte.writer_stream, byte.writer});
      if (a.write) {
        for (const auto& [s, reader] : byte.readers) out.insert({s, reader});
        byte = {index, stream, {}};
      } else {
        byte.readers[stream] = index;
      }
    }
    return out;
  }

 private:
  struct Byte {
    std::int32_t writer = -1;
    StreamId writer_stream = streams::compute;
    std::map<StreamId, std::int32_t> readers;
  };
  std::map<std::pair<SectionId, std::int64_t>, Byte> bytes_;
};

Earlier touch(ConflictMap& map, const Access& a, StreamId stream, std::int32_t index) {
  Earlier out;
  map.touch(a, stream, index, [&](StreamId s, std::int32_t i) { out.insert({s, i}); });
  return out;
}

}  // namespace

TEST_CASE("A write follows the last write and every reader since; a read follows the last write") {
  ConflictMap map;
  const auto on = [](std::int64_t begin, std::int64_t end, bool write) {
    return Access{sections::transient, begin, end, write};
  };
  using namespace streams;
  CHECK(touch(map, on(0, 100, true), compute, 0).empty());
  CHECK(touch(map, on(50, 150, false), gather, 1) == Earlier{{compute, 0}});
  CHECK(touch(map, on(90, 120, false), reduce, 2) == Earlier{{compute, 0}});
  CHECK(touch(map, on(100, 110, true), h2d, 3) == Earlier{{gather, 1}, {reduce, 2}});  // nobody wrote there
  CHECK(touch(map, on(105, 115, false), compute, 4) == Earlier{{h2d, 3}});
  CHECK(touch(map, on(7, 7, true), compute, 5).empty());
  CHECK(touch(map, Access{sections::kv_cache, 0, 100, true}, compute, 6).empty());
}

TEST_CASE("Intervals say what bytes say") {
  CHECK(rc::check("conflict map = brute force", [] {
    ConflictMap map;
    ByteMap oracle;
    const int count = *rc::gen::inRange(1, 60);
    for (std::int32_t i = 0; i < count; ++i) {
      const std::int64_t begin = *rc::gen::inRange(0, 40);
      const Access a{*rc::gen::arbitrary<bool>() ? sections::transient : sections::kv_cache, begin,
                     begin + *rc::gen::inRange(0, 20), *rc::gen::arbitrary<bool>()};
      const auto stream = static_cast<StreamId>(*rc::gen::inRange(0, max_streams));
      RC_ASSERT(touch(map, a, stream, i) == oracle.touch(a, stream, i));
    }
  }));
}
