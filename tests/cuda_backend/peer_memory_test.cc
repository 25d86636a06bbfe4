// Memory of a rank that is another process: read where it lies, let go of before it is unmapped, and what the doubles
// find where that is left out.
#include "backends/cuda/peer_memory.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <catch2/catch.hpp>

#include "backends/cuda/device_arena.h"
#include "tests/cuda_backend/processes.h"

using namespace hotbunk;
using namespace hotbunk::cuda;
using namespace hotbunk::cuda::test;

namespace peer_memory_test {
namespace {

constexpr std::int64_t granule = std::int64_t{2} << 20;

/// Rank 0 owns an arena of three pieces and rank 1 reads it; both go from one barrier to the next.
struct Pair {
  NcclProcess& p;
  PeerMemory& peers = p.world.share_memory();
  DeviceArena arena{
      p.world.context(),
      {.name = "device", .reserve_bytes = 3 * granule, .capacity_bytes = 3 * granule, .chunk_bytes = 4096},
      {.cuts = {granule, 2 * granule}},
      {.peers = &peers, .scope = "plan."}};
  int meetings = 0;

  bool owns() const { return p.world.rank() == 0; }
  void meet() { p.world.barrier(fmt::format("meeting {}", meetings++)); }
  void fill(std::int64_t begin, std::int64_t bytes, unsigned char value) {
    p.launch.fill(reinterpret_cast<CUdeviceptr>(arena.base() + begin), value, bytes);
    p.world.synchronize(p.launch.stream());
  }
  /// What rank 0 has in [begin, begin + 8), as numbers.
  std::string read(std::int64_t begin) {
    Staging staging(p.world.context(), p.launch.stream());
    std::byte* const here = staging.take(8);
    const DeviceBlock own(p.world.context(), granule);
    const CUdeviceptr there = peers.begin_reading("plan.", 0, begin, 8, p.launch.stream());
    p.launch.copy(own.address(), there, 8);
    peers.done_reading(p.launch.stream());
    HB_CUDA(p.launch.driver(), cuMemcpyDtoHAsync(here, own.address(), 8, p.launch.stream()));
    p.world.synchronize(p.launch.stream());
    std::string out;
    for (int i = 0; i < 8; ++i) out += fmt::format("{}", static_cast<int>(here[i]));
    return out;
  }
};

std::vector<std::string> played(const std::function<std::string(Pair&)>& work,
                                const std::function<void(cuda::Driver&, int rank)>& tamper = {}) {
  return in_ranks(
      2,
      [&](NcclProcess& p) {
        Pair pair{p};
        return work(pair);
      },
      tamper);
}

}  // namespace

TEST_CASE("a peer's memory is read where it lies, over the border of two pieces, and imported once") {
  const auto said = played([](Pair& t) {
    if (t.owns()) {
      t.arena.map(0, 2 * granule, "the test");
      t.fill(0, granule, 1), t.fill(granule, granule, 2);
    }
    t.meet();
    std::string out = t.owns() ? "owner" : t.read(granule - 4) + " " + t.read(granule - 4);
    if (!t.owns())
      out += fmt::format(", {} pieces, {} imports", t.peers.pieces_mapped(),
                         t.p.fake.calls().at("cuMemImportFromShareableHandle"));
    t.meet();
    return out;
  });
  CHECK(said[0] == "owner");
  CHECK(said[1] == "11112222 11112222, 2 pieces, 2 imports");
}

TEST_CASE("before memory is unmapped its readers let go of it, and behind the next wake they read the new bytes") {
  const auto said = played([](Pair& t) {
    std::string out;
    const auto look = [&] {
      t.meet();
      out += t.owns() ? fmt::format("{} ", t.arena.physical_bytes() / granule) : t.read(8) + " ";
      t.meet();
    };
    for (const unsigned char value : {3, 4}) {
      if (t.owns()) t.arena.map(0, granule, "the test"), t.fill(0, granule, value);
      look();
      if (t.owns()) t.arena.unmap(0, granule);
      t.meet();
      if (!t.owns()) out += fmt::format("({} pieces) ", t.peers.pieces_mapped());
    }
    if (!t.owns()) try {
        t.read(8);
      } catch (const RuntimeFailure& e) {
        out += e.what();
      }
    t.meet();
    return out;
  });
  CHECK(said[0] == "1 1 ");
  CHECK(said[1] ==
        "33333333 (0 pieces) 44444444 (0 pieces) memory of rank 0 cannot be read: rank 0 has nothing mapped at byte 8 "
        "of its arena");
}

TEST_CASE(
    "a reader that keeps what its owner unmaps is found, by the owner's memory that stays and by the stale read") {
  static cuda::Driver real;
  static CUdeviceptr kept = 0;
  const auto said = played(
      [&](Pair& t) {
        if (t.owns()) t.arena.map(0, granule, "the test"), t.fill(0, granule, 5);
        t.meet();
        if (!t.owns()) {
          t.read(0);
          kept = t.peers.begin_reading("plan.", 0, 0, 8, t.p.launch.stream());
          t.peers.done_reading(t.p.launch.stream());
        }
        t.meet();
        std::string out = "nothing";
        if (t.owns()) try {
            t.arena.unmap(0, granule);
          } catch (const RuntimeFailure& e) {
            out = e.what();
          }
        t.meet();
        if (!t.owns()) {
          const DeviceBlock own(t.p.world.context(), granule);
          t.p.launch.copy(own.address(), kept, 8);
          t.p.launch.driver().cuStreamSynchronize(t.p.launch.stream());
        }
        t.meet();
        return out;
      },
      [](cuda::Driver& table, int rank) {
        real = table;
        if (rank == 1)
          table.cuMemUnmap = [](CUdeviceptr at, std::size_t bytes) {
            return at == kept ? CUDA_SUCCESS : real.cuMemUnmap(at, bytes);
          };
      });
  CHECK_THAT(said[0], Catch::Contains("still has") && Catch::Contains("its memory does not come back"));
  CHECK_THAT(said[1], Catch::Contains("of another process, which has unmapped it: a stale handle"));
}

}  // namespace peer_memory_test
