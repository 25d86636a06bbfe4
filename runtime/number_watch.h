// Which op made a number that is not finite: looked at after every op, on the threads of the streams.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>

#include "exec/divergence.h"
#include "runtime/op_call.h"
#include "runtime/world.h"

namespace hotbunk {

struct NonFinite {
  std::int64_t count = 0;
  std::int64_t first = -1;  // smallest index of a NaN or infinity; -1: none
};
/// NaN and infinity in n elements of fp32 or bf16 that the host can read.
NonFinite nonfinite_of(const std::byte* data, DType, std::int64_t n);

/// The same of a tensor of an op, fp32 or bf16, wherever its device keeps it.
using FindNonFinite = std::function<NonFinite(const OpCall&, const Tensor&)>;

/// "3 NaN or infinite elements, the first at index 7 of 'train.x'" of the op's fp32 and bf16 outputs; "" when all are
/// finite, and for ops that make no numbers but move them (they may fill their output in parts).
std::string bad_output(const OpCall&, const FindNonFinite&);

class NumberWatch {
 public:
  /// What is enqueued from here on is of this block. For the calling thread, with nothing running.
  void begin(std::int64_t block) { watching_ = true, block_ = block, ops_ = 0; }
  bool watching() const { return watching_; }
  /// The next op's place in program order; nothing while nobody watches. For the calling thread.
  std::optional<BadOutput> next(Rank, const BoundOp&);
  /// The op of that place has run. For its stream's thread.
  void look(BadOutput place, const OpCall&, const FindNonFinite&);
  /// The earliest of all ranks: every rank of the world calls it, with nothing running. `name` is used once.
  std::optional<BadOutput> first(World&, const std::string& name) const;

 private:
  bool watching_ = false;
  std::int64_t block_ = 0, ops_ = 0;
  std::mutex mutex_;
  std::optional<BadOutput> first_;
};

}  // namespace hotbunk
