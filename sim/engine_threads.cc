// Where streams are threads: ranks' hosts and streams take the cores of their device in turn.
#include <algorithm>
#include <utility>

#include "sim/engine.h"

namespace hotbunk {

void Engine::enqueue_host_work(Rank r, std::int64_t duration_ns) {
  if (threaded() && duration_ns > 0) enqueue(r, {0, mark_host, 0, duration_ns});
}

void Engine::enqueue_enter(Rank r, std::uint32_t visit) {
  if (threaded()) enqueue(r, {0, mark_enter, visit, 0});
}

/// A thread, a stream's or a host's, has work to do.
void Engine::go_on(std::uint32_t thread, std::int64_t work_ns) {
  const auto hosts_begin = static_cast<std::uint32_t>(streams_.size());
  const Rank rank = thread < hosts_begin ? rank_of(thread) : static_cast<Rank>(thread - hosts_begin);
  const auto device = static_cast<std::uint32_t>(rank / options_.ranks_per_device);
  cores_[device].queue.join(now_, thread, work_ns);
  if (!cores_[device].changed) changed_.push_back(device);
  cores_[device].changed = true;
}

void Engine::dispatch_cores() {
  for (const std::uint32_t device : changed_) {
    Cores& cores = cores_[device];
    cores.changed = false;
    cores.queue.dispatch(now_);
    const auto next = cores.queue.next_ns();
    if (!next) {
      cores.due = -1;
    } else if (*next != cores.due) {
      cores.due = *next;
      cores.due_sequence = events_.push(*next, tag_resource | static_cast<std::uint32_t>(resources_.size() + device));
    }
  }
  changed_.clear();
}

void Engine::handle_cores(std::uint32_t device) {
  Cores& cores = cores_[device];
  cores.due = -1;
  if (!cores.changed) changed_.push_back(device);
  cores.changed = true;
  const auto hosts_begin = static_cast<std::uint32_t>(streams_.size());
  while (const auto thread = cores.queue.take_done(now_)) {
    if (*thread < hosts_begin) complete(*thread);
    else host_done(static_cast<Rank>(*thread - hosts_begin));
  }
}

bool Engine::is_unmap(Rank r, const Entry& e) const {
  return e.code < num_codes && info(static_cast<QueueId>(r) * max_streams, e).op->kind == OpKind::unmap;
}

std::int64_t Engine::host_cost(Rank r, const Entry& e) const {
  if (e.code == mark_memory) return 0;  // a note of ours, no call
  if (e.code == mark_host) return e.value;
  if (e.code >= num_codes) return options_.threads.call_ns;
  const bool on_host = info(static_cast<QueueId>(r) * max_streams, e).occupies == Occupies::host;
  return options_.threads.call_ns + (on_host ? e.value : 0);
}

/// Starts the host's next calls. Calls are paid for together until they cost as much as a wake-up: nobody can tell when
/// within that time each of them came. A sync, and unmap, which waits until nothing runs, end such a stretch.
void Engine::run_host(Rank r) {
  Host& host = hosts_[static_cast<std::size_t>(r)];
  while (host.issuing == 0 && !host.calls.empty()) {
    if (host.calls.front().code == mark_sync) {
      if (host.outstanding > 0) return;
      to_stream(r, host, host.calls.front());
      host.calls.pop();
      continue;
    }
    if (is_unmap(r, host.calls.front()) && host.outstanding > 0) return;
    std::int64_t cost = 0;
    const std::int64_t room = options_.queue_depth - host.outstanding;
    std::size_t num = 0;
    for (std::size_t i = host.calls.head; i < host.calls.items.size(); ++i) {
      const Entry& e = host.calls.items[i];
      if (e.code == mark_sync || static_cast<std::int64_t>(num) >= room || (num > 0 && is_unmap(r, e))) break;
      cost += host_cost(r, e);
      ++num;
      if (e.code == mark_enter || cost >= std::max<std::int64_t>(options_.threads.wake_ns, 1)) break;
    }
    if (num == 0) return;
    host.issuing = num;
    if (cost == 0) host_done(r);
    else go_on(static_cast<std::uint32_t>(streams_.size()) + static_cast<std::uint32_t>(r), cost);
  }
}

void Engine::take_effect(Rank r, Host& host, const Entry& e) {
  if (e.code == mark_enter) timeline_.entered(r, e.run, now_);
  const bool note = e.code == mark_enter || e.code == mark_host;
  const QueueId any = static_cast<QueueId>(r) * max_streams;
  const bool on_host = e.code < num_codes && info(any, e).occupies == Occupies::host;
  if (!note && !on_host) return to_stream(r, host, e);
  --num_entries_;
  if (note) return;
  ++num_done_;
  timeline_.finished(r, static_cast<StreamId>(e.stream), *index_[static_cast<std::size_t>(r)], info(any, e), e.run,
                     now_ - e.value, now_);
}

/// What the host paid for takes effect.
void Engine::host_done(Rank r) {
  Host& host = hosts_[static_cast<std::size_t>(r)];
  for (std::size_t left = std::exchange(host.issuing, 0); left > 0; --left) {
    const Entry e = host.calls.front();
    host.calls.pop();
    take_effect(r, host, e);
  }
  admit(r);
}

}  // namespace hotbunk
