#include "backends/cuda/dnn_attention.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "base/check.h"
#include "graph/op.h"

namespace hotbunk::cuda {
namespace {

constexpr std::array policy_names = {std::string_view("own"), std::string_view("cudnn")};

/// Longest sequences are rounded up to a power of two, at least this: so that there are few graphs.
constexpr std::int64_t shortest = 128;
constexpr std::size_t most_graphs = 256;  // kept
constexpr int lengths_threads = 128;

}  // namespace

std::string_view name_of(AttentionPolicy p) { return policy_names[static_cast<std::size_t>(p)]; }
std::optional<AttentionPolicy> attention_policy_from(std::string_view name) {
  const auto at = std::ranges::find(policy_names, name);
  if (at == policy_names.end()) return std::nullopt;
  return static_cast<AttentionPolicy>(at - policy_names.begin());
}

std::int64_t longest_at_most(const AttentionBackward& a) {
  if (a.sequences <= 1) return a.tokens;
  const auto n = static_cast<double>(a.sequences), sum = static_cast<double>(a.tokens);
  const double squares = 2.0 * static_cast<double>(a.pairs) - sum;  // n (n + 1) / 2 each
  const double deviations = squares - sum * sum / n;                // n times the variance
  if (deviations < 0.0) return a.tokens;
  const double most = sum / n + std::sqrt((n - 1.0) / n * deviations);
  return std::min(a.tokens, static_cast<std::int64_t>(std::floor(most + 1e-6)) + 1);
}

// With p = exp(scale q k' - lse), masked, and delta = sum of d_o o:
//   dv = p' d_o,  ds = scale p (d_o v' - delta),  dq = ds k,  dk = ds' q
// written as cuDNN knows it: the order of ops and what is stored are those of NVIDIA's cudnn-frontend, by which cuDNN
// tells that this is attention. dq is stored by its product itself: that is the form with the same bits each time.
AttentionGraph attention_backward_graph(const Dnn& dnn, const AttentionGraphKey& key) {
  const std::int64_t a = key.heads.a, k = key.heads.k, d = key.heads.d, v = key.heads.v;
  const std::int64_t b = key.sequences, s = key.longest;
  const std::int64_t row = std::int64_t{a} * d + std::int64_t{k} * (d + v), out = std::int64_t{a} * v;
  using namespace dnn;
  AttentionGraph r{.graph = DnnGraph(dnn)};
  DnnGraph& g = r.graph;
  // Sequences are found by offsets; heads lie side by side in a row.
  const DnnShape per_sequence{b, 1, 1, 1}, ends{b + 1, 1, 1, 1}, ones{1, 1, 1, 1};
  r.row_offsets = g.stored(ends, ones, type_int32);
  r.output_offsets = g.stored(ends, ones, type_int32);
  r.head_offsets = g.stored(ends, ones, type_int32);
  r.query_lengths = g.stored(per_sequence, ones, type_int32);
  r.key_lengths = g.stored(per_sequence, ones, type_int32);
  const auto columns = [&](std::int64_t heads, std::int64_t numbers) {
    return g.stored({b, heads, s, numbers}, {s * row, numbers, row, 1}, type_bf16, r.row_offsets);
  };
  const auto transposed = [&](std::int64_t heads, std::int64_t numbers) {
    return g.stored({b, heads, numbers, s}, {s * row, numbers, 1, row}, type_bf16, r.row_offsets);
  };
  const auto outputs = [&] { return g.stored({b, a, s, v}, {s * out, v, out, 1}, type_bf16, r.output_offsets); };
  const auto number_of_head = [&] { return g.stored({b, a, s, 1}, {s * a, 1, a, 1}, type_f32, r.head_offsets); };
  r.q = columns(a, d), r.k = transposed(k, d), r.v = transposed(k, v);
  r.o = outputs(), r.d_o = outputs();
  r.lse = number_of_head(), r.delta = number_of_head();
  r.dq = columns(a, d), r.dk = columns(k, d), r.dv = columns(k, v);
  r.scale = g.value(type_f32), r.one = g.value(type_f32), r.masked = g.value(type_f32);

  const DnnShape scores{b, a, s, s}, scores_by_key{b, a, s, s}, by_key{s * s * a, s * s, 1, s};
  const auto number = [&] { return g.between(scores, type_f32); };
  const auto compute = [&](int mode, DnnGraph::Id x, DnnGraph::Id by) {
    const DnnGraph::Id y = number();
    g.pointwise(mode, type_f32, x, by, y);
    return y;
  };
  const auto index = [&](DnnGraph::Id of, std::int64_t axis, int compute_type) {
    const DnnGraph::Id y = g.between(scores, type_int32);
    g.pointwise(mode_index, compute_type, of, DnnGraph::none, y, DnnGraph::none, axis);
    return y;
  };
  const auto compare = [&](int mode, DnnGraph::Id x, DnnGraph::Id by) {
    const DnnGraph::Id y = g.between(scores, type_boolean);
    g.pointwise(mode, type_boolean, x, by, y);
    return y;
  };
  const auto keep = [&](DnnGraph::Id x, DnnGraph::Id where) {  // elsewhere -inf
    const DnnGraph::Id y = number();
    g.pointwise(mode_select, type_f32, x, r.masked, y, where);
    return y;
  };

  // delta
  const DnnGraph::Id weighed = g.between({b, a, s, v}, {s * out, s * v, out, 1}, type_f32);
  g.pointwise(mode_mul, type_f32, r.d_o, r.o, weighed);
  const DnnGraph::Id summed = g.between({b, a, s, 1}, type_f32);
  g.sum(weighed, summed);
  g.pointwise(mode_mul, type_f32, summed, r.one, r.delta);

  // p: no key and no query beyond a sequence's end; no key behind the query, or as far before it as the window is wide
  DnnGraph::Id p = number();
  g.matmul(r.q, r.k, p, r.query_lengths, r.key_lengths, DnnGraph::none);
  p = compute(mode_mul, p, r.scale);
  const DnnGraph::Id query = index(p, 2, type_int32), place = index(p, 3, type_int32);
  const DnnGraph::Id is_query = compare(mode_less, query, r.query_lengths),
                     is_key = compare(mode_less, place, r.key_lengths);
  p = keep(p, compare(mode_and, is_query, is_key));
  p = compute(mode_sub, p, r.lse);
  const DnnGraph::Id before_causal = p;
  const DnnGraph::Id at_query = index(before_causal, 2, type_f32), at_key = index(before_causal, 3, type_f32);
  p = keep(before_causal, compare(mode_greater_equal, at_query, at_key));
  if (key.window > 0) {
    const DnnGraph::Id windowed = p, from = index(windowed, 2, type_f32), to = index(windowed, 3, type_f32);
    r.window = g.value(type_f32);
    const DnnGraph::Id last = number();
    g.pointwise(mode_add, type_f32, to, r.window, last);
    p = keep(windowed, compare(mode_greater, last, from));
  }
  const DnnGraph::Id probabilities = number();
  g.pointwise(mode_exp, type_f32, p, DnnGraph::none, probabilities);

  // dv = p' d_o; of heads that share keys and values the sum
  const auto for_keys = [&](DnnGraph::Id weights, DnnGraph::Id of, DnnGraph::Id result, std::int64_t numbers) {
    const DnnGraph::Id turned = g.between(scores_by_key, by_key, type_bf16);
    g.reshape(weights, turned);
    if (a == k) return g.matmul(turned, of, result, r.key_lengths, DnnGraph::none, r.query_lengths);
    const DnnGraph::Id of_each_head = g.between({b, a, s, numbers}, type_bf16);
    g.matmul(turned, of, of_each_head, r.key_lengths, DnnGraph::none, r.query_lengths);
    g.sum(of_each_head, result);
  };
  for_keys(probabilities, r.d_o, r.dv, v);

  // ds
  DnnGraph::Id ds = number();
  g.matmul(r.d_o, r.v, ds, r.query_lengths, r.key_lengths, DnnGraph::none);
  ds = compute(mode_sub, ds, r.delta);
  ds = compute(mode_mul, ds, probabilities);
  ds = compute(mode_mul, ds, r.scale);

  for_keys(ds, r.q, r.dk, d);
  const DnnGraph::Id keys = g.between({b, k, s, d}, {s * row, d, row, 1}, type_bf16, r.row_offsets);
  g.reshape(r.k, keys);
  g.matmul(ds, keys, r.dq, r.query_lengths, DnnGraph::none, r.key_lengths);
  return r;
}

DnnAttention::DnnAttention(const Dnn& dnn, const Launcher& launch, std::int64_t workspace_bytes)
    : dnn_(dnn),
      launch_(launch),
      workspace_bytes_(workspace_bytes),
      workspace_(launch.context(), workspace_bytes),
      lengths_(launch.context(), lengths_bytes),
      capability_(launch.context().compute_capability()) {
  check(dnn_, dnn_.cudnnCreate(&handle_), "cudnnCreate");
}

DnnAttention::~DnnAttention() {
  chosen_.clear();
  if (handle_ != nullptr) dnn_.cudnnDestroy(handle_);
}

const DnnAttention::Chosen& DnnAttention::choose(const AttentionGraphKey& key) {
  const auto& h = key.heads;
  auto& known = chosen_[{h.a, h.k, h.d, h.v, key.window, key.sequences, key.longest}];
  if (known) return *known;
  ++counts_.searched;
  AttentionGraph graph = attention_backward_graph(dnn_, key);
  DnnGraph::Found found = graph.graph.find_plan({.handle = handle_}, workspace_bytes_);
  known = std::make_unique<Chosen>(Chosen{std::move(graph), std::move(found)});
  return *known;
}

std::string DnnAttention::why_not(const AttentionBackward& a) const {
  const auto& h = a.heads;
  const std::int64_t width = std::int64_t{h.a} * h.d + std::int64_t{h.k} * (h.d + h.v);
  if (a.tokens == 0 || a.sequences == 0) return "no rows";
  if (a.dtype != DType::bf16) return fmt::format("{} operands", name_of(a.dtype));
  // NVIDIA's cudnn-frontend names a fault of packed heads that are no multiple of 16.
  if ((h.d | h.v) % 16 != 0 || std::max(h.d, h.v) > 128)
    return fmt::format("heads of {} and {} numbers: multiples of 16 up to 128 are taken", h.d, h.v);
  if (a.scores.softcap > 0.0f) return "capped scores";
  if (capability_ / 10 != 9)
    return fmt::format("sm_{}: the form with the same bits each time is known of sm_90", capability_);
  if (a.tokens * width > std::numeric_limits<std::int32_t>::max()) return "offsets beyond 32 bits";
  if (4 * a.sequences + 3 > lengths_bytes / std::int64_t{sizeof(std::int32_t)}) return "too many sequences";
  return "";
}

DnnAttention::Pieces DnnAttention::pieces(const AttentionBackward& a, std::int64_t longest) {
  // What the gradients of scores take, where cuDNN stores them: larger graphs are not asked for.
  const std::int64_t scores_bytes = 2 * a.heads.a * longest * longest;
  const std::int64_t at_once = std::max<std::int64_t>(1, workspace_bytes_ / scores_bytes);
  Pieces out;
  for (std::int64_t most = at_once, left = a.sequences; left > 0;) {
    const auto n = static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(std::min(left, most))));
    const Chosen& c = choose({a.heads, a.scores.window, n, longest});
    if (c.found.plan) {
      out.graphs.push_back(&c), out.sequences.push_back(n);
      left -= n;
    } else if (n == 1) {
      return {{}, {}, c.found.why_none};
    } else {
      most = n / 2;
    }
  }
  return out;
}

bool DnnAttention::take(const AttentionBackward& a, const AttentionBackwardAddresses& at) {
  std::string why = why_not(a);
  Pieces parts;
  const auto longest =
      static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(std::max(shortest, longest_at_most(a)))));
  if (why.empty()) {
    if (chosen_.size() >= most_graphs) {  // none goes while what is enqueued executes it
      HB_CUDA(launch_.driver(), cuStreamSynchronize(launch_.stream()));
      chosen_.clear();
    }
    parts = pieces(a, longest);
    why = parts.why_none;
  }
  if (!why.empty()) {
    ++counts_.declined, ++counts_.reasons[why];
    return false;
  }
  check(dnn_, dnn_.cudnnSetStream(handle_, launch_.stream()), "cudnnSetStream");
  const auto& h = a.heads;
  const auto sequences = static_cast<int>(a.sequences);
  launch_("attention_lengths", {blocks_of(a.sequences + 1, lengths_threads)}, lengths_threads, at.cu_seqlens,
          lengths_.address(), sequences, h, static_cast<int>(longest));
  std::int64_t first = 0;
  for (std::size_t i = 0; i < parts.graphs.size(); ++i) {
    execute(*parts.graphs[i], a, at, first);
    first += parts.sequences[i];
  }
  ++counts_.taken;
  return true;
}

std::vector<LibraryChoice> DnnAttention::choices() const {
  const std::string op(name_of(OpKind::attention_backward));
  std::vector<LibraryChoice> out;
  if (counts_.taken > 0) out.push_back({op, "cuDNN", "", counts_.taken});
  for (const auto& [why, times] : counts_.reasons) out.push_back({op, "own", why, times});
  return out;
}

void DnnAttention::execute(const Chosen& chosen, const AttentionBackward& a, const AttentionBackwardAddresses& at,
                           std::int64_t first) {
  const auto& h = a.heads;
  const AttentionGraph& g = chosen.graph;
  const auto of = [](CUdeviceptr p) { return reinterpret_cast<const void*>(p); };
  // As attention_lengths leaves them: lengths, then three lists of offsets.
  const auto list = [&](std::int64_t begin) {
    return of(lengths_.address() + static_cast<CUdeviceptr>((begin + first) * std::int64_t{sizeof(std::int32_t)}));
  };
  const std::int64_t count = a.sequences;
  const auto columns = [&](CUdeviceptr rows, std::int64_t column) {
    return of(rows + static_cast<CUdeviceptr>(column * size_of(DType::bf16)));
  };
  const std::int64_t keys = std::int64_t{h.a} * h.d, values = keys + std::int64_t{h.k} * h.d;
  const float scale = a.scores.scale, one = 1.0f, masked = -std::numeric_limits<float>::infinity(),
              window = static_cast<float>(a.scores.window);
  std::map<DnnGraph::Id, const void*> addresses = {{g.query_lengths, list(0)},
                                                   {g.key_lengths, list(0)},
                                                   {g.row_offsets, list(count)},
                                                   {g.output_offsets, list(2 * count + 1)},
                                                   {g.head_offsets, list(3 * count + 2)},
                                                   {g.q, of(at.x)},
                                                   {g.k, columns(at.x, keys)},
                                                   {g.v, columns(at.x, values)},
                                                   {g.o, of(at.o)},
                                                   {g.d_o, of(at.d_o)},
                                                   {g.lse, of(at.lse)},
                                                   {g.delta, of(at.delta)},
                                                   {g.dq, of(at.dx)},
                                                   {g.dk, columns(at.dx, keys)},
                                                   {g.dv, columns(at.dx, values)},
                                                   {g.scale, &scale},
                                                   {g.one, &one},
                                                   {g.masked, &masked}};
  if (g.window != DnnGraph::none) addresses[g.window] = &window;
  run_plan(dnn_, handle_, *chosen.found.plan, addresses, workspace_.address());
  ++counts_.executed;
}

}  // namespace hotbunk::cuda
