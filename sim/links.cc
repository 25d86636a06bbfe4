#include "sim/links.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace hotbunk {

LinkId SharedLinks::add_link(std::string name) {
  links_.push_back({});
  links_.back().name = std::move(name);
  return static_cast<LinkId>(links_.size() - 1);
}

/// What changed at the instant before is solved there.
void SharedLinks::go_to(std::int64_t now_ns) {
  HB_CHECK(now_ns >= now_ns_, "time runs backwards: {} after {}", now_ns, now_ns_);
  if (now_ns > now_ns_) solve();
  now_ns_ = now_ns;
}

/// A job's rate on a link rises, or falls, from now on.
void SharedLinks::use(const Use& by, std::int64_t more_rate) {
  constexpr double full = static_cast<double>(full_link) * static_cast<double>(full_rate);
  Link& link = links_[by.link];
  if (link.since_ns < now_ns_ && link.used > 0) {
    link.load.busy_ns += now_ns_ - link.since_ns;
    link.load.peak = std::max(link.load.peak, std::min(1.0, static_cast<double>(link.used) / full));
  }
  link.since_ns = now_ns_;
  link.used += static_cast<Wide>(by.amount) * more_rate;
}

void SharedLinks::mark(LinkId link) {
  if (links_[link].changed) return;
  links_[link].changed = true;
  changed_.push_back(link);
}

void SharedLinks::join(std::int64_t now_ns, std::uint32_t number, std::int64_t price_ns,
                       std::span<const Demand> demands) {
  go_to(now_ns);
  HB_CHECK(price_ns >= 0 && price_ns <= INT64_MAX - now_ns, "a job takes {} ns", price_ns);
  if (unused_.empty()) {
    unused_.push_back(static_cast<Slot>(jobs_.size()));
    jobs_.emplace_back();
  }
  const Slot slot = unused_.back();
  unused_.pop_back();
  ++num_running_;
  Job& job = jobs_[slot];
  job.number = number, job.order = num_joined_++;
  job.left = static_cast<Wide>(price_ns) << rate_bits, job.since_ns = now_ns, job.rate = 0;
  bool contends = false;
  for (const Demand& demand : demands) {
    HB_CHECK(demand.fraction >= 0.0 && demand.fraction <= 1.0 && demand.times >= 0 && demand.times <= 1 << 20,
             "a job takes {} x {} of link {}", demand.times, demand.fraction, links_.at(demand.link).name);
    const std::int64_t amount = static_cast<std::int64_t>(demand.fraction * static_cast<double>(full_link));
    if (amount * demand.times == 0) continue;
    Link& link = links_[demand.link];
    const auto place = static_cast<std::uint32_t>(job.uses.size());
    job.uses.push_back({demand.link, static_cast<std::uint32_t>(link.users.size()), amount * demand.times});
    link.users.push_back({slot, place});
    link.wanted += amount * demand.times;
    HB_CHECK(link.wanted < full_rate, "link {} is wanted too often", link.name);
    link.load.bytes += demand.bytes * demand.times;
    link.load.full_ns += static_cast<double>(price_ns) * static_cast<double>(job.uses.back().amount) / full_link;
    if (!link.overfull()) continue;
    contends = true;
    mark(demand.link);
  }
  if (!contends) {
    job.rate = full_rate;
    for (const Use& u : job.uses) use(u, full_rate);
  }
  if (!contends || price_ns == 0) schedule(slot, now_ns + price_ns);
}

void SharedLinks::leave(Slot slot) {
  Job& job = jobs_[slot];
  for (const Use& taken : job.uses) {
    Link& link = links_[taken.link];
    use(taken, -job.rate);
    if (link.overfull()) mark(taken.link);
    link.wanted -= taken.amount;
    const User last = link.users.back();
    link.users[taken.at] = last;
    jobs_[last.job].uses[last.use].at = taken.at;
    link.users.pop_back();
  }
  job.uses.clear();
  ++job.version;
  unused_.push_back(slot);
  --num_running_;
}

std::optional<std::uint32_t> SharedLinks::take_done(std::int64_t now_ns) {
  go_to(now_ns);
  drop_stale();
  if (heap_.empty() || heap_.front().time_ns > now_ns) return std::nullopt;
  const Slot slot = heap_.front().job;
  const std::uint32_t number = jobs_[slot].number;
  leave(slot);
  return number;
}

std::optional<std::int64_t> SharedLinks::next_done_ns() {
  solve();
  drop_stale();
  if (heap_.empty()) return std::nullopt;
  return heap_.front().time_ns;
}

void SharedLinks::schedule(Slot slot, std::int64_t time_ns) {
  heap_.push_back({time_ns, jobs_[slot].order, slot, ++jobs_[slot].version});
  std::push_heap(heap_.begin(), heap_.end(), Later{});
}

/// From the front; from everywhere when most of it is stale.
void SharedLinks::drop_stale() {
  const auto stale = [this](const Due& due) { return jobs_[due.job].version != due.version; };
  if (heap_.size() > 64 + 4 * num_running_) {
    std::erase_if(heap_, stale);
    std::make_heap(heap_.begin(), heap_.end(), Later{});
  }
  while (!heap_.empty() && stale(heap_.front())) {
    std::pop_heap(heap_.begin(), heap_.end(), Later{});
    heap_.pop_back();
  }
}

void SharedLinks::set_rate(Slot slot, std::int64_t rate) {
  Job& job = jobs_[slot];
  if (rate == job.rate) return;
  for (const Use& u : job.uses) use(u, rate - job.rate);
  job.left -= static_cast<Wide>(now_ns_ - job.since_ns) * job.rate;
  job.left = std::max<Wide>(job.left, 0);
  job.since_ns = now_ns_, job.rate = rate;
  const Wide takes = (std::max<Wide>(job.left - done_work, 0) + rate - 1) / rate;  // rounded up: then it is done
  HB_CHECK(takes <= INT64_MAX - now_ns_, "job {} never ends", job.number);
  schedule(slot, now_ns_ + static_cast<std::int64_t>(takes));
}

void SharedLinks::solve() {
  if (changed_.empty()) return;
  ++solution_;
  for (const LinkId link : changed_) {
    links_[link].changed = false;
    if (links_[link].seen == solution_) continue;
    collect(link);
    raise();
    for (const Slot slot : members_) set_rate(slot, jobs_[slot].next_rate);
  }
  changed_.clear();
}

/// The links and jobs that this link's jobs share with, over overfull links.
void SharedLinks::collect(LinkId first) {
  component_.assign(1, first), members_.clear();
  links_[first].seen = solution_;
  for (std::size_t i = 0; i < component_.size(); ++i) {
    Link& link = links_[component_[i]];
    link.rising = link.wanted, link.free = static_cast<Wide>(full_link) << rate_bits;
    link.level = link.rising > 0 ? static_cast<std::int64_t>(std::min<Wide>(link.free / link.rising, full_rate)) : 0;
    for (const User& user : link.users) {
      Job& job = jobs_[user.job];
      if (job.seen == solution_) continue;
      job.seen = solution_, job.next_rate = -1;
      members_.push_back(user.job);
      for (const Use& use : job.uses) {
        Link& next = links_[use.link];
        if (next.seen == solution_ || !next.overfull()) continue;
        next.seen = solution_;
        component_.push_back(use.link);
      }
    }
  }
}

/// Rates rise until the first links are full; their jobs stay there, and what they take is theirs. Links that are full
/// at the same rate stop their jobs together, so that their order does not show.
void SharedLinks::raise() {
  for (;;) {
    std::erase_if(component_, [this](LinkId l) { return links_[l].rising == 0; });
    std::int64_t level = full_rate;
    for (const LinkId link : component_) level = std::min(level, links_[link].level);
    if (level == full_rate) break;
    full_.clear();
    for (const LinkId link : component_)
      if (links_[link].level == level) full_.push_back(link);
    for (const LinkId link : full_)
      for (const User& user : links_[link].users)
        if (jobs_[user.job].next_rate < 0) stop(user.job, level);
    for (const LinkId id : component_) {
      Link& link = links_[id];
      if (link.rising > 0) link.level = static_cast<std::int64_t>(std::min<Wide>(link.free / link.rising, full_rate));
    }
  }
  for (const Slot slot : members_)
    if (jobs_[slot].next_rate < 0) jobs_[slot].next_rate = full_rate;
}

void SharedLinks::stop(Slot slot, std::int64_t rate) {
  jobs_[slot].next_rate = rate;
  for (const Use& use : jobs_[slot].uses) {
    Link& link = links_[use.link];
    if (link.seen != solution_) continue;
    link.rising -= use.amount;
    link.free -= static_cast<Wide>(use.amount) * rate;
  }
}

}  // namespace hotbunk
