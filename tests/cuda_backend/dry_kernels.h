// Hot kernels at one size, and what each may ask for: docs/dry-performance.md.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "graph/op.h"

namespace hotbunk::dry_test {

constexpr std::int64_t T = 64, H = 512, I = 256, V = 1024;

struct Operand {
  DType dtype;
  std::vector<std::int64_t> shape;
  std::function<std::int64_t(std::int64_t)> integer{};  // of i32; else small numbers
};

/// What a kernel may ask for beside the catalogue's bytes and FLOPs.
struct Limits {
  double touched = 1.05;  // bytes that its launches touch, each once a launch
  double asked = 1.05;    // the same of bytes asked for, those that the cache has the second time too
  double sectors = 0.95;  // least share of the sectors' bytes that is asked for
  double flops = 0.0;     // operations of float instructions and mma; 0: of no account
};

struct Hot {
  const char* name;
  OpKind kind;
  std::vector<Operand> inputs, outputs;
  std::vector<std::pair<Attr, AttrValue>> attrs{};
  bool reads_outputs = false;
  std::vector<Move> moves{};
};

/// Of activations in this dtype, one after another.
std::vector<Hot> hot_kernels(DType activations);

/// Of a kernel that streams, or what is beyond that, and why.
const Limits& limits_of(const std::string& name);

}  // namespace hotbunk::dry_test
