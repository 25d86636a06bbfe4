// What kernels of attention are told of heads and scores: parameters of theirs, as host and device see them.
#pragma once

namespace hotbunk {

/// a query heads over k key-value heads; d numbers of a query or key, v of a value. A row of qkv is
/// [a queries | k keys | k values].
struct AttentionHeads {
  int a, k, d, v;
};

/// score = scale q k; where softcap > 0, softcap tanh(score / softcap) in its place. A query sees `window` keys, itself
/// the last; 0: all keys before it.
struct ScoreOptions {
  float scale, softcap;
  int window;
};

/// Which tokens of a sequence a rank's pool has, where `ranks` hold it in parts: those at positions p with p mod ranks
/// = place, as its tokens 0, 1, 2, … .
struct KeyShare {
  int ranks = 1, place = 0;
};

}  // namespace hotbunk
