// Sleep and wake as plan ops: what moves to the host, what is dropped, which chunks are given back and in which order.
#include "lowering/rollout.h"

namespace hotbunk {
namespace {

struct Move {
  BufferId device, host;
};

/// Device -> host, buffer by buffer, each freed as soon as it has moved; then the section goes.
void put_to_sleep(ProgramBuilder& b, const std::vector<Move>& moves, Section device, Section host) {
  b.map(host);
  for (const Move& m : moves) {
    b.alloc(m.host, StreamId::d2h);
    b.emit(OpKind::copy, StreamId::d2h, b.buffer(m.device).name + ".sleep", {b.whole(m.device)}, {b.whole(m.host)});
    b.free(m.device, StreamId::d2h);
  }
  b.unmap(device);
}

void wake_up(ProgramBuilder& b, const std::vector<Move>& moves, Section device, Section host) {
  b.map(device);
  for (const Move& m : moves) {
    b.alloc(m.device, StreamId::h2d);
    b.emit(OpKind::copy, StreamId::h2d, b.buffer(m.device).name + ".wake", {b.whole(m.host)}, {b.whole(m.device)});
    b.free(m.host, StreamId::h2d);
  }
  b.unmap(host);
}

std::vector<Move> parameter_moves(const TrainState& t) {
  std::vector<Move> out;
  for (const UnitState& u : t.units()) out.push_back({u.shard, u.host_shard});
  return out;
}

std::vector<Move> optimizer_moves(const TrainState& t) {
  std::vector<Move> out;
  for (const UnitState& u : t.units())
    out.push_back({u.exp_avg, u.host_exp_avg}), out.push_back({u.exp_avg_sq, u.host_exp_avg_sq});
  return out;
}

std::vector<Move> reference_moves(const TrainState& t) {
  std::vector<Move> out;
  for (const UnitState& u : t.units())
    if (u.reference >= 0) out.push_back({u.reference, u.host_reference});
  return out;
}

std::vector<Move> weight_moves(const RolloutState& r) {
  std::vector<Move> out;
  for (std::size_t i = 0; i < r.weights().size(); ++i) out.push_back({r.buffer(i), r.host_buffer(i)});
  return out;
}

}  // namespace

// The optimizer and the reference go before the sync, which needs the parameters only.
void lower_sleep_optimizer(ProgramBuilder& b, const TrainState& t, std::int32_t phase) {
  b.begin_block(phase, "sleep_optimizer");
  put_to_sleep(b, optimizer_moves(t), Section::train_optimizer, Section::host_optimizer);
  if (const auto moves = reference_moves(t); !moves.empty())
    put_to_sleep(b, moves, Section::train_reference, Section::host_reference);
}

void lower_sleep_params(ProgramBuilder& b, const TrainState& t, std::int32_t phase) {
  b.begin_block(phase, "sleep_train");
  put_to_sleep(b, parameter_moves(t), Section::train_params, Section::host_params);
}

void lower_wake_train(ProgramBuilder& b, const TrainState& t, std::int32_t phase) {
  b.begin_block(phase, "wake_train");
  wake_up(b, parameter_moves(t), Section::train_params, Section::host_params);
  if (const auto moves = reference_moves(t); !moves.empty())
    wake_up(b, moves, Section::train_reference, Section::host_reference);
  wake_up(b, optimizer_moves(t), Section::train_optimizer, Section::host_optimizer);
}

void lower_wake_rollout(const Scenario& s, ProgramBuilder& b, const RolloutState& r, std::int32_t phase) {
  b.begin_block(phase, "wake_rollout");
  b.map(Section::rollout_weights);
  // Level 1 brings the weights back from the host before the sync overwrites them, as engines do that cannot know
  // whether a sync follows. There is nothing to bring before the first sleep: the host copy is made zero in the
  // prologue.
  if (s.rollout.sleep_level == 1) {
    for (const Move& m : weight_moves(r)) {
      b.alloc(m.device, StreamId::h2d);
      b.emit(OpKind::copy, StreamId::h2d, b.buffer(m.device).name + ".wake", {b.whole(m.host)}, {b.whole(m.device)});
      b.free(m.host, StreamId::h2d);
    }
    b.unmap(Section::host_weights);
    return;
  }
  for (const Move& m : weight_moves(r)) b.alloc(m.device);
}

void lower_wake_kv(ProgramBuilder& b, const RolloutState& r, std::int32_t phase) {
  b.begin_block(phase, "wake_kv");
  b.map(Section::kv_cache);
  b.alloc(r.kv());
}

void lower_sleep_rollout(const Scenario& s, ProgramBuilder& b, const RolloutState& r, std::int32_t phase) {
  b.begin_block(phase, "sleep_rollout");
  b.free(r.kv());
  b.unmap(Section::kv_cache);
  if (s.rollout.sleep_level == 1) {
    put_to_sleep(b, weight_moves(r), Section::rollout_weights, Section::host_weights);
    return;
  }
  for (const Move& m : weight_moves(r)) b.free(m.device);
  b.unmap(Section::rollout_weights);
}

void lower_start_rollout(const Scenario& s, ProgramBuilder& b, const RolloutState& r, std::int32_t phase) {
  b.begin_block(phase, "start_rollout");
  if (s.rollout.sleep) {
    b.map(Section::host_weights);
    for (const Move& m : weight_moves(r)) {
      b.alloc(m.host, StreamId::host);
      b.emit(OpKind::zero, StreamId::host, b.buffer(m.host).name, {}, {b.whole(m.host)});
    }
    return;
  }
  b.map(Section::rollout_weights);
  for (const Move& m : weight_moves(r)) b.alloc(m.device);
  b.map(Section::kv_cache);
  b.alloc(r.kv());
}

}  // namespace hotbunk
