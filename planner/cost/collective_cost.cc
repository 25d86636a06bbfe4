// Seconds of a collective: its algorithm's steps and bytes over the links inside a node and between nodes.
#include <algorithm>
#include <cmath>

#include "planner/cost/cost_model.h"

namespace hotbunk {
namespace {

/// NCCL picks the fastest of three protocols by message size. Against the first (4 B of flag beside 4 B of data):
/// seconds more to start, factors on the latency of a hop inside a node and between nodes, and the share of the link's
/// rate. Source: NCCL's tuning model, src/graph/tuning.cc: ring latencies 3.6, 10.0, 8.4 us; NVLink hops 0.47, 1.9, 3.4
/// us; network hops 2.7, 4.0, 9.6 us; rates 1/4, 0.92, 1.
struct Protocol {
  double start, intra_hop, inter_hop, rate;
};
constexpr Protocol protocols[] = {
    {0.0, 1.0, 1.0, 0.25}, {6.4e-6, 1.9 / 0.47, 4.0 / 2.7, 0.92}, {4.8e-6, 3.4 / 0.47, 9.6 / 2.7, 1.0}};

/// Steps one after the other in a collective.
struct Hops {
  double intra, inter;
};
Hops hops_of(OpKind kind, const GroupShape& g) {
  const auto local = static_cast<double>(g.per_node - 1), nodes = static_cast<double>(g.nodes),
             ranks = static_cast<double>(g.ranks);
  const double levels = std::ceil(std::log2(std::max(nodes, 1.0)));
  switch (kind) {
    case OpKind::all_reduce:  // inside one node; else all_reduce_across_nodes
      return {2.0 * local, 0.0};
    case OpKind::broadcast:
    case OpKind::barrier:
      return {local, levels};
    case OpKind::all_to_all:  // every peer in turn, those of the node over its links
      return {local, nodes - 1.0};
    case OpKind::send:
    case OpKind::recv:
    case OpKind::send_recv:  // both directions of the links at the same time
    case OpKind::peer_copy:
      return {g.nodes > 1 ? 0.0 : 1.0, g.nodes > 1 ? 1.0 : 0.0};
    default:
      // A ring passes every rank: all but nodes - 1 of its steps stay inside a node.
      return {ranks - nodes, nodes - 1.0};
  }
}

}  // namespace

GroupShape GroupShape::strided(std::int64_t ranks, std::int64_t stride, std::int64_t node) {
  const std::int64_t per_node = std::clamp<std::int64_t>(node / std::max<std::int64_t>(stride, 1), 1, ranks);
  return {ranks, (ranks + per_node - 1) / per_node, per_node,
          std::max<std::int64_t>(1, (ranks - 1) * stride / node + 1),
          stride % node == 0 || node % std::max<std::int64_t>(stride, 1) == 0};
}

double CostModel::wire_bytes(OpKind kind, std::int64_t ranks, double payload) {
  const auto w = static_cast<double>(std::max<std::int64_t>(ranks, 1));
  switch (kind) {
    case OpKind::all_reduce:
      return 2.0 * (w - 1.0) / w * payload;
    case OpKind::all_gather:
    case OpKind::reduce_scatter:
    case OpKind::broadcast:
      return (w - 1.0) / w * payload;
    case OpKind::barrier:
      return 0.0;
    default:
      return payload;  // all-to-all and P2P: the payload is what leaves the rank
  }
}

/// Latency and movement under the protocol that is fastest; through host memory there is none to choose.
double CostModel::protocol_seconds(const GroupShape& g, double intra_hops, double inter_hops, double moving) const {
  const double intra = intra_hops * hardware_.intra.hop_latency.value,
               inter = inter_hops * hardware_.inter.hop_latency.value,
               start = (g.nodes > 1 ? hardware_.inter : hardware_.intra).latency.value;
  if (hardware_.shared_transport) return start + intra + inter + moving;
  double best = 1e300;
  for (const Protocol& p : protocols)
    best = std::min(best, start + p.start + intra * p.intra_hop + inter * p.inter_hop + moving / p.rate);
  return best;
}

/// Rings leave a node through the network ports of all their members there, each on its own rail. What goes to another
/// rail crosses the spine, or passes NVLink to the GPU whose rail it is first (NCCL's PXN); without a spine it must.
CostModel::Moving CostModel::across_nodes(OpKind kind, const GroupShape& g, double inside_wire,
                                          double port_wire) const {
  const LinkModel &intra = hardware_.intra, &inter = hardware_.inter;
  const bool spineless = topology_ == NetworkTopology::rail_only;
  const bool leaves_pod = !spineless && std::max(g.span, g.nodes) > pod_nodes_;
  const double spine = spineless ? 1.0 : oversubscription_, members = static_cast<double>(g.per_node);
  // Through host memory every rank of the node copies over the same bus.
  const double bus = hardware_.shared_transport ? members : 1.0;
  const bool point_to_point = is_pairwise(kind) || kind == OpKind::peer_copy;
  double away = 1.0, stays = inside_wire, other_rail = g.aligned ? 0.0 : 1.0;
  Moving out;
  if (kind == OpKind::all_to_all) {  // what is for the own node stays on the fast links
    away = static_cast<double>(g.ranks - g.per_node) / static_cast<double>(g.ranks - 1);
    stays = inside_wire * (1.0 - away);
    other_rail = std::max(other_rail, (members - 1.0) / members);
  } else if (point_to_point) {
    stays = 0.0;
  } else {
    away = 1.0 / members;
  }
  out.inside = stays * bus / intra.bandwidth.value;
  const double port = port_wire * away / inter.bandwidth.value;
  out.outside = port * (leaves_pod ? spine : 1.0);
  out.port = port;
  if (topology_ == NetworkTopology::leaf || other_rail == 0.0) return out;
  Moving forwarded = out, crossing = out;
  forwarded.inside += port_wire * away * other_rail * bus / intra.bandwidth.value;
  forwarded.more_hops = 1.0;
  crossing.outside = leaves_pod ? out.outside : port * (1.0 - other_rail + other_rail * spine);
  crossing.crosses = other_rail;
  const double hop = hardware_.intra.hop_latency.value;
  return spineless || forwarded.seconds() + hop < crossing.seconds() ? forwarded : crossing;
}

/// The fastest of three. A ring over all ranks. Two levels: reduce-scatter in each node, a ring per rail, all-gather.
/// Double binary trees over the nodes (NCCL): a node sends its half up in both and, at its two children, half of the
/// data down twice where it is inner; two nodes are each other's child. They reach 0.92 of the links' rate
/// (src/graph/tuning.cc). Chunks pipeline the levels.
CostModel::Priced CostModel::all_reduce_across_nodes(const GroupShape& g, double payload) const {
  const auto local = static_cast<double>(g.per_node), nodes = static_cast<double>(g.nodes),
             ranks = static_cast<double>(g.ranks);
  const auto moving = [&](double inside_share, double port_share) {
    return across_nodes(OpKind::all_reduce, g, 2.0 * payload * inside_share, 2.0 * payload * port_share);
  };
  const double ring = (ranks - 1.0) / ranks, inner = (local - 1.0) / local;
  const double levels = std::ceil(std::log2(nodes)), tree = nodes > 2.0 ? 1.0 : 0.5;
  const auto priced = [&](double intra_hops, double inter_hops, const Moving& m, double rate) {
    return Priced{protocol_seconds(g, intra_hops, inter_hops, m.seconds() / rate), m};
  };
  const Priced flat = priced(2.0 * (ranks - nodes), 2.0 * (nodes - 1.0), moving(ring, ring), 1.0);
  const Priced rails = priced(2.0 * (local - 1.0), 2.0 * (nodes - 1.0), moving(inner, (nodes - 1.0) / nodes), 1.0);
  const Priced trees = priced(2.0 * (local - 1.0), 2.0 * levels, moving(inner, tree), 0.92);
  return std::min({flat, rails, trees}, [](const Priced& a, const Priced& b) { return a.seconds < b.seconds; });
}

CostModel::Priced CostModel::price_collective(OpKind kind, const GroupShape& g, double payload) const {
  if (g.ranks <= 1) return {};
  const double wire = wire_bytes(kind, g.ranks, payload);
  const Hops hops = hops_of(kind, g);
  if (g.nodes <= 1) {
    const double bus = hardware_.shared_transport ? static_cast<double>(g.per_node) : 1.0;
    const double gain = kind == OpKind::all_reduce ? hardware_.nvls_gain.value : 1.0;
    const Moving m{.inside = wire * bus / hardware_.intra.bandwidth.value / gain};
    return {protocol_seconds(g, hops.intra, hops.inter, m.inside), m};
  }
  if (kind == OpKind::all_reduce) return all_reduce_across_nodes(g, payload);
  const Moving m = across_nodes(kind, g, wire, wire);
  return {protocol_seconds(g, hops.intra + m.more_hops, hops.inter, m.seconds()), m};
}

double CostModel::collective_seconds(OpKind kind, const GroupShape& g, double payload) const {
  if (g.ranks <= 1) return 0.0;
  return price_collective(kind, g, payload).seconds *
         correction(kind, DType::u8,
                    {static_cast<double>(g.ranks), static_cast<double>(g.nodes), std::max(payload, 1.0)});
}

CostModel::LinkSeconds CostModel::link_seconds(OpKind kind, const GroupShape& g, double payload) const {
  const Moving m = price_collective(kind, g, payload).moving;
  const bool alone_in_node = g.per_node <= 1 && m.more_hops == 0.0;
  return {alone_in_node ? 0.0 : m.inside, m.port, m.crosses};
}

double CostModel::exchange_seconds(const GroupShape& g, double network, double node) const {
  if (g.ranks <= 1) return 0.0;
  const LinkModel &intra = hardware_.intra, &inter = hardware_.inter;
  const double inside =
      node / intra.bandwidth.value * (hardware_.shared_transport ? static_cast<double>(g.per_node) : 1.0);
  double outside = g.nodes > 1 ? network / inter.bandwidth.value : 0.0;
  if (topology_ != NetworkTopology::rail_only && std::max(g.span, g.nodes) > pod_nodes_) outside *= oversubscription_;
  const Hops hops = hops_of(OpKind::all_to_all, g);
  return protocol_seconds(g, hops.intra, hops.inter, std::max(inside, outside)) *
         correction(OpKind::all_to_all, DType::u8,
                    {static_cast<double>(g.ranks), static_cast<double>(g.nodes), std::max(network + node, 1.0)});
}

GroupShape CostModel::shape_of(const std::vector<Rank>& members) const {
  GroupShape shape{static_cast<std::int64_t>(members.size()), 0, 0};
  std::vector<std::int64_t> nodes;
  nodes.reserve(members.size());
  for (Rank r : members) nodes.push_back(r / ranks_per_node_);
  std::sort(nodes.begin(), nodes.end());
  std::int64_t run = 0;
  if (!nodes.empty()) shape.span = nodes.back() - nodes.front() + 1;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    const bool fresh = i == 0 || nodes[i] != nodes[i - 1];
    shape.nodes += fresh ? 1 : 0;
    run = fresh ? 1 : run + 1;
    shape.per_node = std::max(shape.per_node, run);
  }
  // Every member has one in the same place of the group's first node, and all nodes have as many.
  shape.aligned = shape.per_node * shape.nodes == shape.ranks;
  const auto place = [&](Rank r) { return r % ranks_per_node_; };
  for (Rank r : members) {
    if (!shape.aligned || shape.nodes <= 1) break;
    shape.aligned = std::any_of(members.begin(), members.end(),
                                [&](Rank o) { return o / ranks_per_node_ == nodes.front() && place(o) == place(r); });
  }
  return shape;
}

}  // namespace hotbunk
