// Ulysses: between the two ways in which N ranks share packed sequences, each its own tokens or all tokens and its part
// of the heads. Everything but attention has the first, attention the second.
//
//   tokens  [T,Q]      all heads of the rank's own T tokens
//   parts   [N,T,Q']   the same rows, for each rank its heads: what an all-to-all sends or has received
//   heads   [N T,Q']   its heads of the tokens of all ranks, rank by rank: the parts of the others, as they arrive
//
// Where there are fewer KV heads than ranks, N/k neighbours compute with the same one, and its gradients are summed on
// the way back.
#pragma once
#include <string>

#include "shard/tensor_parallel.h"

namespace hotbunk {

/// How attention computes: over all tokens, with a part of the heads. The same where no tokens are shared.
TensorSharding in_attention(const TensorSharding&);

/// Which heads a row has.
enum class HeadsOf : std::uint8_t { qkv, attended };

/// A tensor by tokens [T,Q] by heads, or itself where one rank has both.
Tensor by_heads(Emitter&, const TensorSharding&, HeadsOf, const std::string& name, const Tensor&);
/// A tensor for attention to write that comes back into `y` [T,Q] by by_tokens(): that one itself, or one by heads.
Tensor make_by_heads(Emitter&, const TensorSharding&, HeadsOf, const std::string& name, const Tensor& y);
void by_tokens(Emitter&, const TensorSharding&, HeadsOf, const std::string& name, const Tensor& heads, const Tensor& y);

}  // namespace hotbunk
