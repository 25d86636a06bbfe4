// Experts over data ranks with room for fewer rows than may come: these come in rounds, so many of them at a time, in
// the order in which they would all lie (expert_parallel.h).
//
//   choices [T,c,H] ──┬─ all-to-all ─► x₀ [R,H] ─ gate and up ─ activation ─ down ─► [R,H] ─ all-to-all ─► y [T,c,H]
//                     ├─ all-to-all ─► x₁ [R,H] ─ …                                        its own rows ─┘
//                     └─ …
//
// Every rank plays as many rounds as the fullest one needs: all know who sends how many. A round that nobody has rows
// in has no exchange and no rows to compute. Nothing of a round is kept. Backward plays them again from the choices,
// which the sender keeps, and adds up the matrices' gradients round by round.
#pragma once
#include "shard/expert_parallel.h"

namespace hotbunk {

inline bool in_rounds(const TensorSharding& s) { return s.ep.ranks > 1 && s.ep.rounds() > 1; }

/// The ops of a layer whose rows come in rounds.
struct RoutedOps {
  const ForwardOp &dispatch, &gate_up, &activation, &down;
};
RoutedOps routed_ops(const Forward&);

/// Whether an op works on rows that came, so that nothing of it outlives its round.
bool is_of_a_round(const Forward&, const ForwardOp&);

/// What a round has of the rows that come in it, up to what `down` takes.
struct Round {
  Tensor x, gate_up, activated;
};
/// Sends `choices` to their experts and computes on those of the round. `suffix`: of all its names.
Round play_round(Emitter&, const Forward&, const TensorSharding&, const RoutedOps&, const Values&, std::int64_t round,
                 const std::string& suffix);

}  // namespace hotbunk
