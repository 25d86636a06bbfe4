// What one call of a communication op counts on one rank: payload, padding, wire (DESIGN, contracts).
//
// n = bytes of the full tensor of this call (actual sizes, padding included), W = ranks of the group.
//   kind             n                      wire: bytes this rank sends, direct or ring (the same volume)
//   all_gather       output                 n / W * (W-1)
//   reduce_scatter   input                  n / W * (W-1)
//   all_reduce       input                  n + (W-2) * own chunk; chunks of ⌈elements / W⌉, the last ones shorter:
//                                           2(W-1)/W n where W divides the elements; 0 for W = 1
//   broadcast        input                  n; 0 for the last of the chain root, root+1, …
//   all_to_all       what this rank sends,  n / W * (W-1)
//                    own part included
//   of rows          its own tokens' rows,  n / W * (W-1) where every expert gets as many; what a rank does send is its
//                    there or back; of      routers' affair, and a measured count of it no equal of this one. Nor is n
//                    those that tp ranks    of rows which tp ranks share, but all ranks' together
//                    share, an even part
//   send             what it sends          n
//   send_recv        what it sends          n; 0 to itself, in a ring of one
//   recv, barrier    0                      0
//   peer_copy        bytes read from        0: the owner does nothing
//                    other ranks
// payload = n - Attr::padding_bytes. n / W is exact where the op's shapes hold (the catalogue asks for [W n]).
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "base/check.h"
#include "graph/catalogue.h"
#include "trace/trace.h"

namespace hotbunk {

/// Bytes of the full tensor, n of the table above, of kinds whose ranks agree on it; 0 for others.
inline std::int64_t communication_bytes(const Op& op, const Sizes& sizes) {
  if (has_priced_payload(op)) return std::llround(op.price(sizes).payload_bytes);
  switch (op.kind) {
    case OpKind::all_gather:
      return op.outputs.at(0).bytes(sizes);
    case OpKind::reduce_scatter:
    case OpKind::all_reduce:
    case OpKind::broadcast:
    case OpKind::send:
    case OpKind::send_recv:
      return op.inputs.at(0).bytes(sizes);
    case OpKind::all_to_all:
      return is_routed(op) ? own_rows_bytes(op, sizes) : op.inputs.at(0).bytes(sizes);
    default:
      return 0;
  }
}

/// Bytes that this rank sends of those n.
inline std::int64_t wire_bytes(const Op& op, std::int64_t n, std::int64_t ranks, std::int64_t index) {
  switch (op.kind) {
    case OpKind::all_gather:
    case OpKind::reduce_scatter:
    case OpKind::all_to_all:
      return n % ranks == 0 ? n / ranks * (ranks - 1) : n * (ranks - 1) / ranks;
    case OpKind::all_reduce: {
      if (op.is_priced()) return ranks > 0 ? 2 * n * (ranks - 1) / ranks : 0;  // of many collectives together
      const std::int64_t element = size_of(op.inputs.at(0).dtype), count = n / element;
      const std::int64_t chunk = (count + ranks - 1) / ranks;
      const std::int64_t own = std::min(count, (index + 1) * chunk) - std::min(count, index * chunk);
      return n + (ranks - 2) * own * element;
    }
    case OpKind::broadcast: {
      const std::int64_t root = op.integer(Attr::src_rank);
      return (index + 1) % ranks == root ? 0 : n;
    }
    case OpKind::send:
      return n;
    case OpKind::send_recv:
      return partners_of(op, ranks, index).to == index ? 0 : n;
    default:
      return 0;
  }
}

/// One call, on a rank with these places; none where a peer_copy has nothing to read, not even of its own.
inline TrafficCount traffic_of(const Op& op, const Sizes& sizes, std::int64_t ranks, const Places& places) {
  const auto nothing = [&](const Move& move) { return moved_elements(move, places).all == 0; };
  if (op.kind == OpKind::peer_copy && std::ranges::all_of(op.moves, nothing)) return {};
  const std::int64_t index = places.at(static_cast<std::size_t>(op.group));
  const std::int64_t n =
      op.kind == OpKind::peer_copy ? payload_bytes(op, sizes, places) : communication_bytes(op, sizes);
  const std::int64_t padding = n > 0 ? op.integer(Attr::padding_bytes, 0) : 0;
  HB_CHECK(padding >= 0 && padding <= n, "{} '{}' has {} B of padding in {} B", name_of(op.kind), op.name, padding, n);
  return {1, n - padding, padding, wire_bytes(op, n, ranks, index)};
}

}  // namespace hotbunk
