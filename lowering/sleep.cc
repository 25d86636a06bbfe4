// Sleep and wake as plan ops: what moves to the host, what is dropped, which chunks are given back and in which order.
// Each section sleeps and wakes as a whole, in a block of its own (graph/plan.h: Enters).
#include "lowering/sleep.h"

namespace hotbunk {
namespace {

/// Device -> host, buffer by buffer, each freed as soon as it has moved; then the section goes.
void put_to_sleep(ProgramBuilder& b, std::int32_t phase, std::string block, const std::vector<Backup>& moves,
                  SectionId device, SectionId host, bool keeps_host) {
  b.begin_transition(phase, std::move(block), Enters::asleep, device);
  if (!keeps_host) b.map(host);
  for (const Backup& m : moves) {
    const std::string name = b.buffer(m.device).name;
    b.call("sleep", 0, name + ".", {m.device, m.host}, [&] {
      b.alloc(m.host, streams::d2h);
      b.emit(OpKind::copy, streams::d2h, name + ".sleep", {b.whole(m.device)}, {b.whole(m.host)});
      b.free(m.device, streams::d2h);
    });
  }
  b.begin_call("sleep.done", "");
  b.unmap(device);
}

void wake_up(ProgramBuilder& b, std::int32_t phase, std::string block, const std::vector<Backup>& moves,
             SectionId device, SectionId host, bool keeps_host) {
  b.begin_transition(phase, std::move(block), Enters::awake, device);
  b.map(device);
  for (const Backup& m : moves) {
    const std::string name = b.buffer(m.device).name;
    b.call("wake", 0, name + ".", {m.device, m.host}, [&] {
      b.alloc(m.device, streams::h2d);
      b.emit(OpKind::copy, streams::h2d, name + ".wake", {b.whole(m.host)}, {b.whole(m.device)});
      b.free(m.host, streams::h2d);
    });
  }
  b.begin_call("wake.done", "");
  if (!keeps_host) b.unmap(host);
}

/// Wakes without its former contents.
void wake_empty(ProgramBuilder& b, std::int32_t phase, std::string block, const std::vector<BufferId>& buffers,
                SectionId section) {
  b.begin_transition(phase, std::move(block), Enters::awake, section);
  b.map(section);
  for (BufferId id : buffers) b.alloc(id);
}

/// What it holds is dropped.
void drop(ProgramBuilder& b, std::int32_t phase, std::string block, const std::vector<BufferId>& buffers,
          SectionId section) {
  b.begin_transition(phase, std::move(block), Enters::asleep, section);
  for (BufferId id : buffers) b.free(id);
  b.unmap(section);
}

std::vector<BufferId> on_device(const std::vector<Backup>& backups) {
  std::vector<BufferId> out;
  for (const Backup& b : backups) out.push_back(b.device);
  return out;
}

}  // namespace

// Going down, what the sync does not need goes first, the pool before the weights; coming back, what computes first
// comes first.
void lower_transition(ProgramBuilder& b, const ShiftBuffers& all, const JobPhase& p, std::int32_t phase) {
  if (p.sleeps.moments)
    put_to_sleep(b, phase, "moments", all.moments, sections::train_optimizer, sections::host_optimizer, all.keeps_host);
  if (p.sleeps.reference)
    put_to_sleep(b, phase, "reference", all.reference, sections::train_reference, sections::host_reference,
                 all.keeps_host);
  if (p.sleeps.params && all.communicators >= 0)
    drop(b, phase, "communicators", {all.communicators}, b.buffer(all.communicators).section);
  if (p.sleeps.params)
    put_to_sleep(b, phase, "params", all.params, sections::train_params, sections::host_params, all.keeps_host);
  if (p.wakes.params)
    wake_up(b, phase, "params", all.params, sections::train_params, sections::host_params, all.keeps_host);
  if (p.wakes.params && all.communicators >= 0)
    wake_empty(b, phase, "communicators", {all.communicators}, b.buffer(all.communicators).section);
  if (p.wakes.reference)
    wake_up(b, phase, "reference", all.reference, sections::train_reference, sections::host_reference, all.keeps_host);
  if (p.wakes.moments)
    wake_up(b, phase, "moments", all.moments, sections::train_optimizer, sections::host_optimizer, all.keeps_host);
  if (all.kv < 0) return;
  const bool backed_up = !all.weights.empty() && all.weights[0].host >= 0;
  if (p.sleeps.kv) {
    drop(b, phase, "kv", {all.kv}, sections::kv_cache);
    if (all.graphs >= 0) drop(b, phase, "graphs", {all.graphs}, b.buffer(all.graphs).section);
  }
  if (p.sleeps.weights) {
    if (backed_up)
      put_to_sleep(b, phase, "weights", all.weights, sections::rollout_weights, sections::host_weights, all.keeps_host);
    else drop(b, phase, "weights", on_device(all.weights), sections::rollout_weights);
  }
  if (p.wakes.weights) {
    // Level 1 brings the weights back from the host, whether a sync overwrites them or not. There is nothing to bring
    // before the first sleep: the host copy is made zero in the prologue.
    if (backed_up)
      wake_up(b, phase, "weights", all.weights, sections::rollout_weights, sections::host_weights, all.keeps_host);
    else wake_empty(b, phase, "weights", on_device(all.weights), sections::rollout_weights);
  }
  if (p.wakes.kv) {
    wake_empty(b, phase, "kv", {all.kv}, sections::kv_cache);
    if (all.graphs >= 0) wake_empty(b, phase, "graphs", {all.graphs}, b.buffer(all.graphs).section);
  }
  if (p.phase == PlanPhase::flush) {
    // New where it lies: what it held is nobody's to read, and no memory moves.
    b.begin_block(phase, "kv");
    b.free(all.kv);
    b.alloc(all.kv);
  }
  if (p.phase == PlanPhase::start_rollout && backed_up) {
    b.begin_block(phase, "host_weights");
    if (!all.keeps_host) b.map(sections::host_weights);
    for (const Backup& m : all.weights) {
      const std::string name = b.buffer(m.host).name;
      b.call("host.zero", 0, name, {m.host}, [&] {
        b.alloc(m.host, streams::host);
        b.emit(OpKind::zero, streams::host, name, {}, {b.whole(m.host)});
      });
    }
  }
}

}  // namespace hotbunk
