// Where several want the same link: copies, collectives and sends as jobs on the cluster's links.
#include <algorithm>
#include <cmath>
#include <utility>

#include "base/check.h"
#include "graph/catalogue.h"
#include "sim/engine.h"
#include "trace/traffic_rules.h"

namespace hotbunk {

void Engine::use_links(const CostModel& model, const ClusterSpec& cluster, std::span<const RankFactors> slow) {
  HB_CHECK(!threaded(), "threads share cores, not links");
  wiring_ = std::make_unique<Wiring>(model, cluster, plan_.num_ranks(), slow);
  std::vector<std::vector<Rank>> alike(hosts_.size());
  for (Rank r = 0; r < plan_.num_ranks(); ++r) alike[static_cast<std::size_t>(classes_.player_of(r))].push_back(r);
  wiring_->ranks.resize(hosts_.size());
  for (const Rank r : classes_.players())
    wiring_->ranks[static_cast<std::size_t>(r)] = wiring_->cluster.links_of(r, alike[static_cast<std::size_t>(r)]);
  std::vector<std::vector<std::vector<Rank>>> groups_alike(groups_.size());
  for (std::size_t f = 0; f < plan_.groups.size(); ++f)
    for (const std::vector<Rank>& members : plan_.groups[f].groups)
      if (!members.empty())
        groups_alike[static_cast<std::size_t>(group_at(static_cast<GroupId>(f), classes_.player_of(members.front())))]
            .push_back(members);
  const bool priced = std::ranges::any_of(plan_.programs, [](const Program& p) {
    return std::ranges::any_of(p.bodies, [](const Body& b) { return std::ranges::any_of(b.ops, &Op::is_priced); });
  });
  if (!priced) {
    wiring_->slowdown = model.hardware().overlap_slowdown.value;
    wiring_->launch_ns = 1e9 * model.hardware().launch.value;
  }
  const std::int64_t ranks_per_device = options_.ranks_per_device;
  wiring_->communicating.assign(hosts_.size() / static_cast<std::size_t>(ranks_per_device) + 1, 0);
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const std::vector<std::vector<Rank>>& all = groups_alike[g];
    ClusterLinks::GroupLinks links = wiring_->cluster.links_of(all.front(), all);
    // What the others' links carry, these carry too.
    std::erase_if(links.devices, [&](const auto& d) {
      return std::ranges::none_of(groups_[g].players, [&](Rank r) { return r / ranks_per_device == d.device; });
    });
    wiring_->groups.push_back(std::move(links));
  }
}

void Engine::join_links(std::uint32_t job, std::int64_t price_ns) {
  wiring_->links.join(now_, job, price_ns, wiring_->demands);
  links_changed_ = true;
}

void Engine::enqueue_launches(Rank r, std::uint32_t run, std::int64_t ops) {
  if (!wiring_ || num_streams_ >= max_streams) return;
  const std::int64_t ns = std::llround(wiring_->launch_ns * static_cast<double>(ops));
  if (ns > 0) enqueue(r, {num_streams_, mark_host, run, ns});  // on a stream of its own, behind the plan's
}

void Engine::communicates(Rank r, std::int32_t more) {
  if (!wiring_ || wiring_->slowdown <= 0.0) return;
  const auto device = static_cast<std::uint32_t>(r / options_.ranks_per_device);
  std::int32_t& under_way = wiring_->communicating[device];
  const bool before = under_way > 0;
  under_way += more;
  if (before == (under_way > 0)) return;
  const std::uint32_t compute = device * resources_per_device;
  resources_[compute].sharing.slow_down(now_, before ? 0.0 : wiring_->slowdown);
  reschedule(compute);
}

/// A copy over its device's link, at the head of a stream.
void Engine::join_copy(QueueId q, Occupies direction, std::int64_t price_ns) {
  const Entry& e = streams_[q].queue.front();
  const BlockRun& run = timeline_.run(rank_of(q), e.run);
  double bytes = 0.0;
  index_[static_cast<std::size_t>(rank_of(q))]->each_op(info(q, e), [&](const BoundOp& op) {
    const bool copies = op->kind == OpKind::copy && !op->outputs.empty();
    bytes += static_cast<double>(copies ? op->outputs[0].bytes(run.sizes)
                                        : op_bytes(*op, run.sizes, timeline_.places(rank_of(q))));
  });
  wiring_->demands.clear();
  wiring_->cluster.copy(wiring_->ranks[static_cast<std::size_t>(rank_of(q))],
                        direction == Occupies::link_h2d ? CopyDirection::to_device : CopyDirection::to_host,
                        bytes * static_cast<double>(run.times), price_ns, wiring_->demands);
  join_links(tag_stream | q, price_ns);
}

/// A collective all of whose members have come.
void Engine::join_meeting(std::uint32_t id, QueueId any, std::int64_t price_ns) {
  const Entry& e = streams_[any].queue.front();
  const Op& op = *info(any, e).op;
  const BlockRun& run = timeline_.run(rank_of(any), e.run);
  const double payload = static_cast<double>(communication_bytes(op, run.sizes)) * static_cast<double>(run.times);
  wiring_->demands.clear();
  wiring_->cluster.collective(wiring_->groups[id / max_streams], op.kind, payload, price_ns, wiring_->demands);
  join_links(tag_meeting | id, price_ns);
}

void Engine::join_pair(QueueId from, QueueId to, std::int64_t price_ns) {
  const Entry& e = streams_[from].queue.front();
  const BlockRun& run = timeline_.run(rank_of(from), e.run);
  const double bytes =
      static_cast<double>(communication_bytes(*info(from, e).op, run.sizes)) * static_cast<double>(run.times);
  wiring_->demands.clear();
  wiring_->cluster.send(rank_of(from), rank_of(to), bytes, price_ns, wiring_->demands);
  join_links(tag_pair | from, price_ns);
}

/// When all that happens at this instant has happened.
void Engine::reschedule_links() {
  if (!std::exchange(links_changed_, false)) return;
  const auto next = wiring_->links.next_done_ns();
  if (!next) {
    links_due_ = -1;
  } else if (*next != links_due_) {
    links_due_ = *next;
    links_due_sequence_ = events_.push(*next, tag_resource | static_cast<std::uint32_t>(resources_.size()));
  }
}

void Engine::handle_links() {
  links_due_ = -1, links_changed_ = true;
  while (const auto job = wiring_->links.take_done(now_)) end_timed(*job);
}

}  // namespace hotbunk
