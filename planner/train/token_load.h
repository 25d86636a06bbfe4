// What a micro-batch holds: a random sum of sequence lengths, not sequences times the longest.
#pragma once

namespace hotbunk {

/// One sequence, prompt and response: tokens, tokens^2, tokens.
struct SequenceLengths {
  double mean = 0, variance = 0, longest = 0;
};

/// The sum of `count` sequences drawn independently. By its first two moments as a lognormal (Fenton and Wilkinson's
/// approximation: the lengths that scenarios draw are lognormal or narrower), ending at count x longest;
/// tests/planner/token_load_test.cc holds it to 5 % of drawn sums at 1 in 1,000.
class TokenLoad {
 public:
  TokenLoad(const SequenceLengths& lengths, double count);
  double mean() const { return mean_; }
  double most() const { return most_; }
  /// P(sum > tokens).
  double exceeds(double tokens) const;
  /// The tokens that a sum exceeds with this probability, 0 < probability <= 1/2.
  double exceeded_with(double probability) const;

 private:
  double mean_, most_;
  double log_variance_;  // of the sum's logarithm
};

}  // namespace hotbunk
