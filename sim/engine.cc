#include "sim/engine.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/check.h"
#include "trace/traffic_rules.h"

namespace hotbunk {
namespace {

/// Do all members of a meeting have to name the same number of bytes? In an all-to-all each sends what it has.
bool must_agree(OpKind k) { return k != OpKind::all_to_all && k != OpKind::barrier; }

/// Of a recv or a send_recv. What has a priced payload sends as much as it receives.
std::int64_t received_bytes(const Op& op, const Sizes& sizes) {
  return has_priced_payload(op) ? communication_bytes(op, sizes) : op.outputs.at(0).bytes(sizes);
}

}  // namespace

Engine::Engine(const Plan& plan, const RankClasses& classes, std::vector<const ProgramIndex*> index, Timeline& timeline,
               const EngineOptions& options)
    : plan_(plan),
      classes_(classes),
      index_(std::move(index)),
      timeline_(timeline),
      options_(options),
      num_streams_(static_cast<std::uint32_t>(plan.streams.size())),
      streams_(static_cast<std::size_t>(plan.num_ranks()) * max_streams),
      hosts_(static_cast<std::size_t>(plan.num_ranks())),
      group_of_(plan.groups.size() * hosts_.size(), -1),
      members_(group_of_.size(), nullptr) {
  HB_CHECK(
      options.ranks_per_device > 0 && options.device_slots > 0 && options.link_slots > 0 && options.queue_depth > 0,
      "shares and depths must be positive");
  for (const Rank r : classes.players()) {
    const ProgramIndex* program = index_.at(static_cast<std::size_t>(r));
    HB_CHECK(program && program->size() < num_codes, "rank {} has no program, or one of too many ops", r);
  }
  for (std::size_t f = 0; f < plan.groups.size(); ++f) {
    std::map<std::vector<Rank>, std::int32_t> known;
    for (const std::vector<Rank>& members : plan.groups[f].groups) {
      std::vector<Rank> players;
      for (const Rank r : members) {
        players.push_back(classes.player_of(r));
        members_[f * hosts_.size() + static_cast<std::size_t>(r)] = &members;
      }
      std::ranges::sort(players);
      players.erase(std::unique(players.begin(), players.end()), players.end());
      const auto [group, is_new] = known.try_emplace(players, static_cast<std::int32_t>(groups_.size()));
      if (!is_new) continue;
      for (const Rank r : players) {
        std::int32_t& mine = group_of_[f * hosts_.size() + static_cast<std::size_t>(r)];
        HB_CHECK(mine < 0, "rank {} stands for ranks of groups that are not alike", r);
        mine = group->second;
      }
      const auto device = [&](Rank r) { return r / options.ranks_per_device; };
      const bool one_device =
          std::ranges::all_of(members, [&](Rank r) { return device(r) == device(members.front()); });
      groups_.push_back({static_cast<GroupId>(f), std::move(players), one_device});
    }
  }
  meetings_.resize(groups_.size() * max_streams);
  const auto devices = (plan.num_ranks() + options.ranks_per_device - 1) / options.ranks_per_device;
  for (std::int64_t d = 0; d < devices; ++d)
    for (std::int64_t slots : {options.device_slots, options.link_slots, options.link_slots})
      resources_.push_back({SharedResource(slots)});
  if (threaded()) cores_.assign(static_cast<std::size_t>(devices), {RunQueue(options.threads)});
  for (const Rank r : classes.players()) {
    Host& host = hosts_[static_cast<std::size_t>(r)];
    touched_.push_back(r);  // none has said yet what it does
    host.touched = true;
    host.last_ticket.resize(static_cast<std::size_t>(plan.program(r).num_events));
  }
}

void Engine::Fifo::pop() {
  ++head;
  if (head == items.size()) {
    items.clear();
    head = 0;
  } else if (head >= 4096 && head * 2 >= items.size()) {  // amortised: at most one move per pop
    items.erase(items.begin(), items.begin() + static_cast<std::ptrdiff_t>(head));
    head = 0;
  }
}

void Engine::enqueue(Rank r, const Entry& e) {
  Host& host = hosts_[static_cast<std::size_t>(r)];
  if (!host.touched) touched_.push_back(r);
  host.touched = true;
  if (!threaded() && host.calls.empty() && may_admit(host, e)) to_stream(r, host, e);
  else host.calls.push(e);
  peak_entries_ = std::max(peak_entries_, ++num_entries_);
}

void Engine::enqueue_op(Rank r, StreamId s, std::uint32_t op, std::uint32_t run, std::int64_t duration_ns) {
  enqueue(r, {static_cast<std::uint32_t>(s), op, run, duration_ns});
}

void Engine::enqueue_record(Rank r, StreamId s, EventId event) {
  Host& host = hosts_[static_cast<std::size_t>(r)];
  const std::uint32_t ticket = host.next_ticket++;
  host.last_ticket.at(static_cast<std::size_t>(event)) = ticket;
  host.fired.push_back(false);
  enqueue(r, {static_cast<std::uint32_t>(s), mark_record, static_cast<std::uint32_t>(event), ticket});
}

void Engine::enqueue_wait(Rank r, StreamId s, EventId event) {
  const std::uint32_t ticket = hosts_[static_cast<std::size_t>(r)].last_ticket.at(static_cast<std::size_t>(event));
  if (ticket == 0) return;
  enqueue(r, {static_cast<std::uint32_t>(s), mark_wait, static_cast<std::uint32_t>(event), ticket});
}

void Engine::enqueue_memory(Rank r, StreamId s, Timeline::OpenEvents events) {
  if (events.count > 0)
    enqueue(r, {static_cast<std::uint32_t>(s), mark_memory, static_cast<std::uint32_t>(events.count), events.first});
}

void Engine::enqueue_sync(Rank r) { enqueue(r, {0, mark_sync, 0, 0}); }

bool Engine::has_fired(const Host& host, std::uint32_t ticket) const {
  return ticket < host.first_ticket || host.fired[ticket - host.first_ticket];
}

void Engine::fire(Rank r, std::uint32_t ticket) {
  Host& host = hosts_[static_cast<std::size_t>(r)];
  host.fired[ticket - host.first_ticket] = true;
  const QueueId first = static_cast<QueueId>(r) * max_streams;
  for (QueueId q = first; q < first + num_streams_; ++q)
    if (streams_[q].at == At::event && streams_[q].queue.front().value == ticket) ready_.push_back(q);
}

/// Memory events are notes of ours: they take no place in the queue, and so cannot change the order of things.
bool Engine::may_admit(const Host& host, const Entry& e) const {
  if (e.code == mark_sync) return host.outstanding == 0;
  return e.code == mark_memory || host.outstanding < options_.queue_depth;
}

void Engine::to_stream(Rank r, Host& host, const Entry& e) {
  if (e.code == mark_sync) {
    --num_entries_;
    return;
  }
  if (e.code != mark_memory) ++host.outstanding;
  const QueueId q = static_cast<QueueId>(r) * max_streams + e.stream;
  if (streams_[q].queue.empty()) ready_.push_back(q);
  streams_[q].queue.push(e);
}

/// Moves calls from the host to the streams, as far as the queue depth and the next sync allow.
void Engine::admit(Rank r) {
  Host& host = hosts_[static_cast<std::size_t>(r)];
  if (threaded()) run_host(r);
  while (!threaded() && !host.calls.empty() && may_admit(host, host.calls.front())) {
    to_stream(r, host, host.calls.front());
    host.calls.pop();
  }
  if (host.outstanding == 0 && host.calls.empty()) {  // nobody waits for an old ticket any more
    host.first_ticket = host.next_ticket;
    host.fired.clear();
  }
  const bool dry = host.calls.empty() && host.outstanding < options_.queue_depth;
  num_dry_ += static_cast<int>(dry) - static_cast<int>(host.dry);
  host.dry = dry;
}

void Engine::retire(Rank r) {
  ++num_done_;
  --num_entries_;
  --hosts_[static_cast<std::size_t>(r)].outstanding;
  admit(r);
}

/// Moves a stream on until its head takes time or waits.
void Engine::step(QueueId q) {
  Stream& s = streams_[q];
  while ((s.at == At::idle || s.at == At::event) && !s.queue.empty() && failure_.empty()) {
    const Entry e = s.queue.front();
    if (e.code == mark_wait &&
        !has_fired(hosts_[static_cast<std::size_t>(rank_of(q))], static_cast<std::uint32_t>(e.value))) {
      s.at = At::event;
      return;
    }
    s.at = At::idle;
    if (e.code == mark_memory) {
      timeline_.set_memory_time(rank_of(q), e.value, e.run, now_);
      s.queue.pop();
      --num_entries_;
    } else if (e.code == mark_wait || e.code == mark_record) {
      s.queue.pop();
      if (e.code == mark_record) fire(rank_of(q), static_cast<std::uint32_t>(e.value));
      retire(rank_of(q));
    } else if (e.code == mark_host) {
      s.at = At::running;
      return events_.push(now_ + e.value, tag_stream | q), void();
    } else if (!start(q)) {
      return;
    }
  }
}

/// True when the op at the head took no time and is done.
bool Engine::start(QueueId q) {
  const Entry e = streams_[q].queue.front();
  const OpInfo& op = info(q, e);
  if (op.occupies == Occupies::meeting) return arrive(q), false;
  if (op.occupies == Occupies::transfer) return post(q), false;
  streams_[q].start = now_;
  if (e.value > 0) return begin_timed(q, e.value, op.occupies), false;
  finished(q, e, now_);
  streams_[q].queue.pop();
  retire(rank_of(q));
  return true;
}

void Engine::finished(QueueId q, const Entry& e, std::int64_t start_ns) {
  const Rank r = rank_of(q);
  timeline_.finished(r, stream_of(q), *index_[static_cast<std::size_t>(r)], info(q, e), e.run, start_ns, now_);
}

void Engine::count_busy(QueueId q, std::int32_t running, std::int32_t awaiting) {
  Host& host = hosts_[static_cast<std::size_t>(rank_of(q))];
  host.running += running, host.awaiting += awaiting;
  const bool waits = host.running == 0 && host.awaiting > 0;
  if (waits == (host.waits_since >= 0)) return;
  if (waits) {
    host.waits_since = now_, host.waits_run = streams_[q].queue.front().run;
  } else {
    timeline_.waited(rank_of(q), host.waits_run, now_ - host.waits_since);
    host.waits_since = -1;
  }
}

void Engine::begin_timed(QueueId q, std::int64_t duration, Occupies occupies) {
  streams_[q].at = At::running;
  count_busy(q, 1, 0);
  if (threaded()) return go_on(q, duration);
  if (occupies == Occupies::stream || occupies == Occupies::host) {
    events_.push(now_ + duration, tag_stream | q);
    return;
  }
  if (wiring_ && occupies != Occupies::device) return join_copy(q, occupies, duration);
  const auto device = static_cast<std::uint32_t>(rank_of(q) / options_.ranks_per_device);
  const std::uint32_t kind = occupies == Occupies::device ? 0 : occupies == Occupies::link_h2d ? 1 : 2;
  const std::uint32_t resource = device * resources_per_device + kind;
  resources_[resource].sharing.join(now_, q, duration);
  reschedule(resource);
}

void Engine::reschedule(std::uint32_t index) {
  Resource& resource = resources_[index];
  const auto next = resource.sharing.next_done_ns();
  if (!next) {
    resource.due = -1;
  } else if (*next != resource.due) {
    resource.due = *next;
    resource.due_sequence = events_.push(*next, tag_resource | index);
  }
}

void Engine::arrive(QueueId q) {
  const Entry e = streams_[q].queue.front();
  const Op& op = *info(q, e).op;
  const std::int32_t g = group_at(op.group, rank_of(q));
  const auto id = static_cast<std::uint32_t>(g) * max_streams + q % max_streams;
  if (op.hands_over()) return hand_over(q, id);
  Meeting& meeting = meetings_[id];
  const Group& group = groups_[static_cast<std::size_t>(g)];
  streams_[q].at = At::meeting;
  count_busy(q, 0, 1);

  const std::int64_t bytes = must_agree(op.kind) ? communication_bytes(op, sizes(q, e)) : 0;
  if (meeting.arrived == 0) {
    meeting.first = q;
    meeting.bytes = bytes;
    meeting.longest = 0;
  } else {
    const Op& first = *info(meeting.first, streams_[meeting.first].queue.front()).op;
    if (first.kind != op.kind || meeting.bytes != bytes) {
      failure_ = {mismatch(group, meeting, meeting.first, q)};
      return;
    }
  }
  meeting.longest = std::max(meeting.longest, e.value);
  if (++meeting.arrived < static_cast<std::int32_t>(group.players.size())) return;
  for (Rank member : group.players) {
    const QueueId theirs = static_cast<QueueId>(member) * max_streams + q % max_streams;
    streams_[theirs].at = At::running;
    streams_[theirs].start = now_;
    count_busy(theirs, 1, -1);
    communicates(member, 1);
  }
  if (threaded() && group.one_device) {  // each does its own part, when it gets a core
    for (Rank member : group.players) {
      const QueueId theirs = static_cast<QueueId>(member) * max_streams + q % max_streams;
      go_on(theirs, streams_[theirs].queue.front().value);
    }
    meeting.arrived = 0;
    ++meeting.sequence;
    return;
  }
  if (wiring_) return join_meeting(id, q, meeting.longest);
  events_.push(now_ + meeting.longest, tag_meeting | id);
}

Rank Engine::lacks(QueueId q, std::uint32_t id) const {
  const Handover& handover = handovers_.at(id);
  const auto times = [](const std::map<Rank, std::int64_t>& of, Rank r) {
    const auto at = of.find(r);
    return at == of.end() ? 0 : at->second;
  };
  const std::int64_t taken = times(handover.taken, rank_of(q));
  for (const Rank r : groups_[id / max_streams].players)
    if (plan_.role_of(r) != plan_.role_of(rank_of(q)) && times(handover.given, r) <= taken) return r;
  return -1;
}

/// Who gives is done with it; of those who wait to take all go on for whom everybody has given.
void Engine::hand_over(QueueId q, std::uint32_t id) {
  Handover& handover = handovers_[id];
  const auto takes_time = [&](QueueId each) {
    streams_[each].start = now_;
    begin_timed(each, streams_[each].queue.front().value, Occupies::stream);
  };
  if (info(q, streams_[q].queue.front()).op->integer(Attr::gives) != 0) {
    ++handover.given[rank_of(q)];
    takes_time(q);
  } else {
    streams_[q].at = At::meeting;
    count_busy(q, 0, 1);
    handover.waiting.push_back(q);
  }
  std::erase_if(handover.waiting, [&](QueueId waiting) {
    if (lacks(waiting, id) >= 0) return false;
    ++handover.taken[rank_of(waiting)];
    count_busy(waiting, 0, -1);
    takes_time(waiting);
    return true;
  });
}

Engine::Transfer Engine::transfer_of(QueueId q, const Op& op) const {
  const Rank me = rank_of(q);
  const std::vector<Rank>& members =
      *members_[static_cast<std::size_t>(op.group) * hosts_.size() + static_cast<std::size_t>(me)];
  const Partners at = partners_of(op, std::ssize(members), timeline_.places(me).at(static_cast<std::size_t>(op.group)));
  const auto rank = [&](std::int64_t peer) { return classes_.player_of(members.at(static_cast<std::size_t>(peer))); };
  Transfer out;
  if (op.kind != OpKind::recv) out.out = {op.group, stream_of(q), me, rank(at.to)};
  if (op.kind != OpKind::send) out.in = {op.group, stream_of(q), rank(at.from), me};
  return out;
}

/// What two ranks send each other over one stream matches in the order in which it comes to the head of their streams.
/// A send_recv posts both of its halves at once, and is done when both are: whoever it waits for in the one can have
/// the other.
void Engine::post(QueueId q) {
  Stream& s = streams_[q];
  const Transfer transfer = transfer_of(q, *info(q, s.queue.front()).op);
  s.at = At::partner;
  s.start = -1;
  s.unmet = s.unfinished = static_cast<std::int8_t>(transfer.out.has_value() + transfer.in.has_value());
  count_busy(q, 0, 1);
  if (transfer.out) postboxes_[*transfer.out].senders.push_back(q);
  if (transfer.in) postboxes_[*transfer.in].receivers.push_back(q);
  for (const auto& half : {transfer.out, transfer.in})
    if (half && failure_.empty()) match(*half);
}

/// Starts the oldest transfer of a pair, if both sides have come. It takes the slower side's price, which is, of a
/// send_recv, that of its larger half.
void Engine::match(const Pair& pair) {
  Postbox& box = postboxes_[pair];
  if (box.senders.empty() || box.receivers.empty()) return;
  const QueueId from = box.senders.front(), to = box.receivers.front();
  box.senders.pop_front(), box.receivers.pop_front();
  const Entry sent = streams_[from].queue.front(), received = streams_[to].queue.front();
  if (communication_bytes(*info(from, sent).op, sizes(from, sent)) !=
      received_bytes(*info(to, received).op, sizes(to, received))) {
    failure_ = {mismatch(groups_[static_cast<std::size_t>(group_at(std::get<0>(pair), rank_of(from)))], {}, from, to)};
    return;
  }
  streams_[from].partner = to;
  for (QueueId each : {from, to}) {
    Stream& s = streams_[each];
    if (--s.unmet == 0) s.at = At::running;
    if (s.start < 0) s.start = now_, count_busy(each, 1, -1);
    communicates(rank_of(each), 1);
  }
  const std::int64_t price = std::max(sent.value, received.value);
  if (wiring_) return join_pair(from, to, price);
  events_.push(now_ + price, tag_pair | from);
}

/// One half of the transfer at the head of a stream is over.
void Engine::end_half(QueueId q) {
  if (--streams_[q].unfinished == 0) complete(q);
}

/// The op at the head of a stream is done.
void Engine::complete(QueueId q) {
  Stream& s = streams_[q];
  const Entry e = s.queue.front();
  if (e.code == mark_host) {
    timeline_.launched(rank_of(q), e.run, now_);
  } else {
    count_busy(q, -1, 0);
    finished(q, e, s.start);
  }
  s.queue.pop();
  s.at = At::idle;
  if (!s.queue.empty()) ready_.push_back(q);
  retire(rank_of(q));
}

void Engine::handle(const SimEvent& event) {
  const std::uint32_t index = event.what & ~tag_bits;
  if ((event.what & tag_bits) != tag_resource) {
    now_ = event.time_ns;
    return end_timed(event.what);
  }
  // Somebody may have joined or left since: then another event stands for this one.
  const auto valid = [&](std::int64_t due, std::uint32_t sequence) {
    return due == event.time_ns && sequence == event.sequence;
  };
  if (index < resources_.size()) {
    Resource& resource = resources_[index];
    if (!valid(resource.due, resource.due_sequence)) return;
    now_ = event.time_ns;
    resource.due = -1;
    while (const auto job = resource.sharing.take_done(now_)) complete(*job);
    return reschedule(index);
  }
  if (wiring_) {
    if (!valid(links_due_, links_due_sequence_)) return;
    now_ = event.time_ns;
    return handle_links();
  }
  const auto device = static_cast<std::uint32_t>(index - resources_.size());
  if (!valid(cores_[device].due, cores_[device].due_sequence)) return;
  now_ = event.time_ns;
  handle_cores(device);
}

void Engine::end_timed(std::uint32_t what) {
  const std::uint32_t index = what & ~tag_bits;
  if ((what & tag_bits) == tag_stream) return complete(index);
  if ((what & tag_bits) == tag_pair) {
    const QueueId partner = streams_[index].partner;
    for (const QueueId each : {index, partner}) communicates(rank_of(each), -1);
    end_half(index);
    return end_half(partner);
  }
  Meeting& meeting = meetings_[index];
  meeting.arrived = 0;
  ++meeting.sequence;
  for (Rank member : groups_[index / max_streams].players) {
    communicates(member, -1);
    complete(static_cast<QueueId>(member) * max_streams + index % max_streams);
  }
}

bool Engine::work_left() const {
  return std::any_of(streams_.begin(), streams_.end(), [](const Stream& s) { return !s.queue.empty(); }) ||
         std::any_of(hosts_.begin(), hosts_.end(), [](const Host& h) { return !h.calls.empty(); });
}

Status Engine::run(bool final) {
  if (!failure_.empty()) return fail(failure_);
  std::sort(touched_.begin(), touched_.end());  // the order of the walk's calls must not show
  for (Rank r : std::exchange(touched_, {})) {
    hosts_[static_cast<std::size_t>(r)].touched = false;
    admit(r);
  }
  for (;;) {
    while (!ready_.empty() && failure_.empty()) {
      const QueueId q = ready_.back();
      ready_.pop_back();
      step(q);
    }
    if (!failure_.empty()) return fail(failure_);
    if (!final && num_dry_ > 0) return {};
    dispatch_cores();
    if (wiring_) reschedule_links();
    if (events_.empty()) break;
    handle(events_.pop());
  }
  if (work_left()) failure_ = {deadlock()};
  return failure_.empty() ? Status{} : fail(failure_);
}

}  // namespace hotbunk
