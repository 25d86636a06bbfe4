// The engine's steps and the weight update as priced blocks.
#include <fmt/format.h>

#include <array>

#include "lowering/sample_rows.h"
#include "planner/priced/writer.h"
#include "planner/rl/engine_step.h"

namespace hotbunk {
namespace {

/// Batches at which a step of an engine is priced; between them prices are interpolated.
std::vector<std::int64_t> batches_up_to(std::int64_t most) {
  std::vector<std::int64_t> out;
  for (std::int64_t n = 1; n < most; n += n < 64 ? 1 : 8) out.push_back(n);
  out.push_back(std::max<std::int64_t>(most, 1));
  return out;
}

/// What an engine's ranks exchange in a step, of which kind, over which of their groups, and the parts of a step whose
/// seconds it takes.
struct Exchange {
  const char* name;
  OpKind kind;
  const char* group;
  double RolloutPayload::*payload;
  std::array<StepPart, 2> seconds;  // StepPart::count: none
};
constexpr std::array exchanges = {
    Exchange{"arrive",
             OpKind::all_gather,
             "engine_attention",
             &RolloutPayload::arriving,
             {StepPart::arrival, StepPart::count}},
    Exchange{"context_gather",
             OpKind::all_gather,
             "engine_cp",
             &RolloutPayload::context_gather,
             {StepPart::context, StepPart::count}},
    Exchange{"context_reduce",
             OpKind::all_reduce,
             "engine_cp",
             &RolloutPayload::context_reduce,
             {StepPart::count, StepPart::count}},
    Exchange{"reduce", OpKind::all_reduce, "engine_tp", &RolloutPayload::reduce, {StepPart::reduce, StepPart::logits}},
    Exchange{"dispatch",
             OpKind::all_to_all,
             "engine_experts",
             &RolloutPayload::dispatch,
             {StepPart::dispatch, StepPart::count}},
    Exchange{"experts_reduce",
             OpKind::all_reduce,
             "engine_tp_cp",
             &RolloutPayload::experts,
             {StepPart::experts_reduce, StepPart::count}}};

double seconds_of(const Exchange& x, const StepParts& parts) {
  double out = 0.0;
  for (const StepPart p : x.seconds)
    if (p != StepPart::count) out += parts.of(p).seconds;
  return out;
}

/// Of all of them, and the hops between stages.
double exchanged_seconds(const StepParts& parts) {
  double out = parts.of(StepPart::hops).seconds;
  for (const Exchange& x : exchanges) out += seconds_of(x, parts);
  return out;
}

}  // namespace

void PricedPlanWriter::rollout(std::int32_t phase) {
  const RolloutPoint& r = point_.rollout;
  const EngineStep engine(rl_, r);
  const double held = std::max(1.0, rl_.held_tokens());
  RolloutStage only;  // of an engine without stages
  each_stage(model_.model(), setting().engine, 1, [&](const RolloutStage& s, std::int64_t) { only = s; });
  const auto block = [&](const char* name, auto&& steps) {
    b().begin_block(phase, name);
    b().begin_call(fmt::format("rollout.{}", name), fmt::format("{}.", name));
    const BufferId work = b().transient(fmt::format("{}.activations", name), DType::u8,
                                        whole_bytes(rollout_.activation_bytes), Category::activations);
    const BufferId overhead = b().transient(fmt::format("{}.overhead", name), DType::u8,
                                            whole_bytes(rl_.engine_overhead(r)), Category::overhead);
    steps(std::vector<BufferId>{work, overhead});
  };
  // A token's pairs are the keys that it sees: a decode step of n sequences has n times the held ones.
  block("prefill", [&](const std::vector<BufferId>& work) {
    const double share = setting().prefix_shared ? 1.0 / std::max(setting().samples, 1.0) : 1.0;
    std::vector<PricePoint> computes;
    std::vector<EngineTraffic> sends;
    const std::int64_t most = prefill_budget(scenario_);
    for (std::int64_t n = std::min<std::int64_t>(64, most);; n = std::min(2 * n, most)) {
      const double tokens = std::max(1.0, static_cast<double>(n) * share);
      const double sequences = std::max(1.0, static_cast<double>(n) / std::max(setting().prompt_tokens, 1.0));
      StepParts slowest;
      each_stage(model_.model(), setting().engine, r.pp, [&](const RolloutStage& s, std::int64_t) {
        const StepParts parts = engine.prefill<StepParts>(s, tokens, sequences);
        if (parts.total > slowest.total) slowest = parts;
      });
      computes.push_back({.tokens = n, .seconds = std::max(0.0, slowest.total - exchanged_seconds(slowest))});
      sends.push_back({n, slowest, engine_payload(tokens, tokens / token_shares(setting().engine, r), tokens)});
      if (n >= most) break;
    }
    Op& op = priced(OpKind::priced, streams::compute, "prefill.layers", work, std::move(computes));
    op.inputs = all_of(shifts_.weights, &Backup::device);
    add_pool(op);
    exchange_in_engine("prefill", sends, work);
  });
  block("decode", [&](const std::vector<BufferId>& work) {
    std::vector<PricePoint> computes;
    std::vector<EngineTraffic> sends;
    for (const std::int64_t n : batches_up_to(std::llround(rollout_.slots))) {
      const auto sequences = static_cast<double>(n);
      const double near = 0.5 * held, far = 1.5 * held;
      const double at_near = rl_.decode_round(r, sequences, near).seconds(),
                   at_far = rl_.decode_round(r, sequences, far).seconds();
      // Where the host sets the pace keys cost nothing, and the difference of two sums may round below that.
      const double per_pair = std::max(0.0, at_far - at_near) / (sequences * (far - near));
      // With stages the slowest decides, with all that it exchanges in its seconds.
      const StepParts parts = r.pp == 1 ? engine.decode<StepParts>(only, sequences, held) : StepParts();
      computes.push_back({.tokens = n,
                          .seconds = std::max(0.0, at_near - per_pair * sequences * near - exchanged_seconds(parts)),
                          .seconds_per_pair = per_pair});
      sends.push_back({n, parts, engine_payload(sequences, sequences, 0.0)});
    }
    priced(OpKind::priced, streams::compute, "decode.layers", work, std::move(computes)).inputs =
        all_of(shifts_.weights, &Backup::device);
    exchange_in_engine("decode", sends, work);
  });
}

/// Of the stage that exchanges most of each kind, as the closed form has it.
RolloutPayload PricedPlanWriter::engine_payload(double whole, double local, double prompt) const {
  const EngineStep engine(rl_, point_.rollout);
  RolloutPayload out;
  each_stage(model_.model(), setting().engine, point_.rollout.pp,
             [&](const RolloutStage& s, std::int64_t) { out.raise_to(engine.payload(s, whole, local, prompt)); });
  return out;
}

/// The collectives of a step, each over its own group, and what goes on to the next stage.
void PricedPlanWriter::exchange_in_engine(std::string_view step, const std::vector<EngineTraffic>& sends,
                                          const std::vector<BufferId>& work) {
  for (const Exchange& x : exchanges) {
    std::vector<PricePoint> prices;
    for (const EngineTraffic& t : sends)
      prices.push_back({.tokens = t.tokens, .seconds = seconds_of(x, t.parts), .payload_bytes = t.payload.*x.payload});
    communicate(x.kind, streams::tensor, x.group, fmt::format("{}.{}", step, x.name), work, std::move(prices));
  }
  std::vector<PricePoint> hops;
  for (const EngineTraffic& t : sends)
    hops.push_back({.tokens = t.tokens, .seconds = t.parts.of(StepPart::hops).seconds});
  const EngineTraffic& most = sends.back();
  const auto width = static_cast<std::int64_t>(
      std::llround(most.payload.pipeline / static_cast<double>(std::max<std::int64_t>(most.tokens, 1))));
  if (width < 1) return;
  // Both lie in what a step works in.
  const std::int64_t half = b().buffer(work[0]).bytes() / 128 * 64, rows = std::min(most.tokens, half / width);
  if (rows < 1) return;
  const auto message = [&](std::int64_t at) {
    return b().view(work[0], DType::u8, {hotbunk::tokens(rows), fixed(width)}, at);
  };
  Op& op = b().emit(OpKind::send_recv, streams::tensor, fmt::format("{}.hop", step), {message(0)}, {message(half)});
  op.group = family("engine_pp");
  op.prices = std::move(hops);
  with(with(with(op, Attr::peer, std::int64_t{1}), Attr::source, std::int64_t{-1}), Attr::relative, std::int64_t{1});
}

/// The engine's pool as the scheduler counts it: blocks, and the bytes of one.
void PricedPlanWriter::add_pool(Op& op) {
  const double block = rollout_.kv_bytes_per_token * static_cast<double>(block_span(scenario_.rollout));
  const std::int64_t pool = b().buffer(shifts_.kv).bytes();
  const auto blocks = static_cast<std::int64_t>(static_cast<double>(pool) / std::max(block, 1.0) + 1e-6);
  op.outputs.push_back(
      b().view(shifts_.kv, DType::u8, {fixed(blocks), fixed(pool / std::max<std::int64_t>(blocks, 1))}));
}

/// Samples that all ranks learn, where our engine's come from many.
void PricedPlanWriter::exchange(std::int32_t phase) {
  b().begin_block(phase, "exchange");
  communicate(OpKind::all_gather, streams::control, "world", "exchange", {}, always(rollout_.exchange_seconds));
}

/// What a weight update holds beside the engine's weights while it goes on: the bucket that is brought up, where the
/// parameters sleep; that bucket's parameters gathered in full; the same flattened, to be handed over; of a rank that
/// hands over by itself its part. Together what RlModel::staging_bytes and the upload take; beside them the
/// communicators that are there for it alone.
std::vector<BufferId> PricedPlanWriter::sync_staging(bool from_host) {
  std::vector<BufferId> out;
  const auto add = [&](const char* name, double size, bool always = false) {
    if (size > 0.0 || always)
      out.push_back(b().transient(fmt::format("sync.{}", name), DType::u8, whole_bytes(size), Category::communication));
  };
  if (from_host) add("uploaded", std::min(point_.bucket_bytes, train_.params));
  if (from_host && train_.communicators > 0.0)  // rebuilt for as long as the update takes
    out.push_back(
        b().transient("sync.communicators", DType::u8, whole_bytes(train_.communicators), Category::overhead));
  double left = staging_;
  for (const char* name : {"gathered", "flattened"}) {
    const double bucket = sync_.peak_bytes / 2.0;
    if (left >= bucket) add(name, bucket), left -= bucket;
  }
  add("part", left, out.empty());
  return out;
}

/// Staging stands for the whole of it. Bytes move while requests and casts of other buckets run; the closed form adds
/// them up, and so do these ops, one behind the other. Where it is handed over, each side takes that long.
void PricedPlanWriter::sync(std::int32_t phase, bool from_host, Part part) {
  b().begin_block(phase, "sync");
  b().begin_call("sync", "sync.");
  const std::vector<BufferId> staging = sync_staging(from_host);
  if (hands_over() && part.serves) hand_over("sync.taken", staging, false);
  if (part.trains) {
    if (const double up = model_.cost().node_copy_seconds(train_.streamed_source); up > 0.0)
      priced(OpKind::priced, streams::h2d, "sync.stream_source", staging, always(up));
    if (from_host)
      priced(OpKind::priced, streams::h2d, "sync.upload", staging,
             always(model_.cost().host_copy_seconds(train_.params)));
  }
  // Where they meet, the engines wait meanwhile.
  if (part.trains || hands_over()) compute("sync.requests", staging, always(sync_.beside_moving()));
  communicate(OpKind::all_gather, streams::gather,
              !hands_over() ? "world"
              : part.trains ? "trainer"
                            : "engine",
              "sync.gather", staging, always(sync_.moving, sync_.bytes_received));
  if (hands_over() && part.trains) hand_over("sync.given", staging, true);
  Op& load = priced(OpKind::priced, streams::compute, "sync.load", staging, always(0.0));
  if (part.trains) load.inputs = all_of(shifts_.params, from_host ? &Backup::host : &Backup::device);
  if (part.serves)
    for (const Tensor& t : all_of(shifts_.weights, &Backup::device)) load.outputs.push_back(t);
}

}  // namespace hotbunk
