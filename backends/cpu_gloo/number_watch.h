// Which op made a number that is not finite: looked at after every op, on the threads of the streams.
#pragma once
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

#include "backends/cpu_gloo/op_kernels.h"
#include "exec/divergence.h"
#include "runtime/world.h"

namespace hotbunk {

/// "3 NaN or infinite elements, the first at index 7 of 'train.x'" of the op's fp32 and bf16 outputs; "" when all are
/// finite, and for ops that make no numbers but move them (they may fill their output in parts).
std::string bad_output(const KernelCall&);

class NumberWatch {
 public:
  /// What is enqueued from here on is of this block. For the calling thread, with nothing running.
  void begin(std::int64_t block) { watching_ = true, block_ = block, ops_ = 0; }
  /// The next op's place in program order; nothing while nobody watches. For the calling thread.
  std::optional<BadOutput> next(Rank, const BoundOp&);
  /// The op of that place has run. For its stream's thread.
  void look(BadOutput place, const KernelCall&);
  /// The earliest of all ranks: every rank of the world calls it, with nothing running. `name` is used once.
  std::optional<BadOutput> first(World&, const std::string& name) const;

 private:
  bool watching_ = false;
  std::int64_t block_ = 0, ops_ = 0;
  std::mutex mutex_;
  std::optional<BadOutput> first_;
};

}  // namespace hotbunk
