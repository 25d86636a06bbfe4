// What the seconds of an engine's steps are spent on. A price needs their sum alone, `explain` each of them: the same
// code books either, so that parts and price cannot drift apart and the search pays for the sum only.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

namespace hotbunk {

enum class StepPart : std::uint8_t {
  qkv,     // products with the weights: queries, keys and values
  output,  // of attention
  latent,  // MLA: all projections of attention
  mlp,     // dense layers'
  experts,
  head,
  attention,
  streams,   // passes over activations: norms, positions, gates
  quantize,  // activations, for narrow products
  sampling,  // fp32 logits
  reduce,    // over tp
  dispatch,  // all-to-all of experts, there and back
  experts_reduce,
  context,  // over cp
  logits,   // gathered over tp
  arrival,  // gathered over tp behind a hop
  hops,
  filling,  // prompts' first steps through the stages
  kernels,  // the device's start and drain
  feeds,    // ids up, tokens down
  launches,
  held,  // no faster beside training than alone
  count
};
inline constexpr std::size_t num_step_parts = static_cast<std::size_t>(StepPart::count);

/// The sum alone.
struct StepSeconds {
  double total = 0;
  void add(StepPart, double seconds, double /*calls*/ = 0, double /*bytes*/ = 0) { total += seconds; }
  void add(const StepSeconds& step, double times) { total += times * step.total; }
  void count(double /*steps*/, double /*tokens*/) {}
};

/// Each part. On one rank; bytes: of weights, cache or activations that a part reads, or the payload of a collective.
struct StepParts {
  struct Share {
    double seconds = 0, calls = 0, bytes = 0;
  };
  std::array<Share, num_step_parts> shares{};
  double total = 0;              // seconds
  double steps = 0, tokens = 0;  // that were taken; that passed the layers in them
  const Share& of(StepPart p) const { return shares[static_cast<std::size_t>(p)]; }
  void add(StepPart p, double seconds, double calls = 0, double bytes = 0) {
    Share& s = shares[static_cast<std::size_t>(p)];
    s.seconds += seconds, s.calls += calls, s.bytes += bytes;
    total += seconds;
  }
  void add(const StepParts& step, double times) {
    for (std::size_t i = 0; i < num_step_parts; ++i) {
      const Share& s = step.shares[i];
      shares[i].seconds += times * s.seconds, shares[i].calls += times * s.calls, shares[i].bytes += times * s.bytes;
    }
    total += times * step.total;
  }
  void count(double taken, double passed) { steps += taken, tokens += passed; }
};

}  // namespace hotbunk
