// What threads read from memory: the rate that decoding at batch 1 is held against.
//   bench_read_memory [--threads 2]
// Speaks the turns of bench/rounds.h, whose "tokens" are bytes here: 256 MiB of huge pages, four times a round.
#include <sys/mman.h>

#include <array>
#include <cstring>
#include <thread>

#include "base/check.h"
#include "bench/rounds.h"

namespace hotbunk::bench {
namespace {

/// 16 numbers, summed in chains beside each other: one number at a time, the additions would be the limit.
using Pair = std::uint64_t __attribute__((vector_size(16)));
using Line = std::array<Pair, 8>;

Pair sum_of(const Line* from, const Line* to) {
  Line sums{};
  for (; from < to; ++from)
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += (*from)[i];
  for (std::size_t i = 1; i < sums.size(); ++i) sums[0] += sums[i];
  return sums[0];
}

void run(int threads) {
  constexpr std::size_t bytes = std::size_t{256} << 20, passes = 4;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  HB_CHECK(memory != MAP_FAILED, "no {} bytes of memory", bytes);
  madvise(memory, bytes, MADV_HUGEPAGE);
  std::memset(memory, 1, bytes);
  const auto count = static_cast<std::size_t>(threads), lines = bytes / sizeof(Line);
  const auto* from = static_cast<const Line*>(memory);
  std::vector<Pair> sums(count);
  Rounds rounds;
  for (bool warm = false;; warm = true) {
    {
      std::vector<std::jthread> readers;
      for (std::size_t t = 0; t < count; ++t)
        readers.emplace_back([&, t] {
          for (std::size_t pass = 0; pass < passes; ++pass)
            sums[t] += sum_of(from + lines * t / count, from + lines * (t + 1) / count);
        });
    }
    HB_CHECK(sums[0][0] != 0, "read zeros where ones were written");
    if (warm) rounds.done(static_cast<std::int64_t>(bytes * passes));
    else rounds.ready();
  }
}

}  // namespace
}  // namespace hotbunk::bench

int main(int argc, char** argv) {
  hotbunk::bench::run(std::stoi(hotbunk::bench::option(argc, argv, "--threads", "2")));
}
