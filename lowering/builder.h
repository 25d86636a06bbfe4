// ProgramBuilder: what the lowering writes a program with. Buffers by name, ops in order; lifetimes, offsets and
// events are passes of graph/ that run afterwards.
#pragma once
#include <any>
#include <array>
#include <cmath>
#include <initializer_list>
#include <map>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/rounding.h"
#include "graph/draft.h"
#include "graph/slots.h"
#include "lowering/phases.h"
#include "lowering/places.h"
#include "spec/expert_mesh.h"

namespace hotbunk {

/// The group families of a colocated plan; indices into Plan::groups.
///   fsdp      the ranks that share one copy of what is sharded
///   tp        the ranks of one engine
///   world     all
///   replicas  those that hold the same shard; in plans with more than one copy (HSDP), or with what follows
/// and with tensor parallelism in training:
///   train_tp  the ranks that each have a part of a layer
///   holders   the ranks that hold one copy of everything: shard by shard, and of each one tensor-parallel rank by rank
///   data      the ranks of one tensor-parallel place
/// and where these are more than the model has KV heads:
///   kv_sharers  those of train_tp that hold the same head
///   kv_parts    those of train_tp that hold one each
/// and with a pipeline, where all of the above but tp and world are a stage's own:
///   train_pp    the ranks of one place in all stages, stage by stage
///   tied        of these the first and the last, which have the same table
/// and with Ulysses:
///   ulysses     the ranks of a stage that have each a part of the same sequences' tokens, in the order of the parts
/// and with context parallelism:
///   context     the ranks of a stage that have each two chunks of every one of the same sequences, in the order of the
///               first chunks; with Ulysses those of one part
/// and with experts over data ranks, or over several blocks of those of train_tp (spec/expert_mesh.h):
///   experts          neighbouring blocks that have other experts each, of each the rank at one place
///   expert_places    these blocks, place by place: who together have every expert
///   expert_shards    of those that share one copy of what is sharded, the ones with the same experts
///   expert_replicas  the ranks that hold the same shard of the same experts
/// and where engines have a pipeline:
///   engine_stages    the ranks of one place in all stages of an engine, stage by stage
///   engines          all ranks of an engine, stage by stage; with context parallelism too
/// and where units are resharded to a smaller mesh after forward:
///   reshard          neighbours among the ranks of fsdp, with the same experts, that keep a unit among them until its
///                    backward
/// and where engines have context parallelism:
///   engine_context   the ranks of one tensor-parallel place of a stage, of which each holds its part of every sequence
/// and with several blocks:
///   expert_block     the ranks of one
///   expert_holders   who together have everything where nothing is sharded and blocks have other experts each
///   expert_peers     of those of train_tp one of each block, at the same place
/// and where several groups of an engine's ranks attend to sequences of their own (rollout.layout.attention_dp):
///   engine_attention  the ranks of one group
///   engine_peers      of those of tp one of each group, at the same place
/// and where experts have adapters and ranks share their columns:
///   expert_sharers    the ranks that share an expert
///   expert_columns    those with the same columns of some expert, of the ranks that hold one copy of everything
enum class Family : GroupId {
  fsdp = 0,
  tp = 1,
  world = 2,
  replicas = 3,
  train_tp = 4,
  holders = 5,
  data = 6,
  kv_sharers = 7,
  kv_parts = 8,
  train_pp = 9,
  tied = 10,
  ulysses = 11,
  context = 12,
  experts = 13,
  expert_places = 14,
  expert_shards = 15,
  expert_replicas = 16,
  engine_stages = 17,
  engines = 18,
  reshard = 19,
  engine_context = 20,
  expert_copies = 21,  // of the same ranks as `experts`: where copies of tokens go
  expert_block = 22,
  expert_holders = 23,
  expert_peers = 24,
  engine_attention = 25,
  engine_peers = 26,
  expert_sharers = 27,
  expert_columns = 28
};
inline constexpr std::size_t num_families = 29;

inline Dim fixed(std::int64_t size) { return {size, fixed_extent, 0}; }
inline Dim tokens(std::int64_t capacity, std::int64_t begin = 0) { return {capacity, tokens_extent, begin}; }
inline Dim seqs(std::int64_t capacity) { return {capacity, seqs_extent, 0}; }

/// With sequence parallelism in training: the tokens of a micro-batch that one tensor-parallel rank has in the residual
/// stream. A micro-batch is filled up to a multiple of their ranks.
inline constexpr ExtentId sequence_extent{2};
/// In a pipeline: the tokens of the gradient that goes back while the output of another micro-batch goes forward.
inline constexpr ExtentId returned_extent{3};

/// With Ulysses: the tokens of a micro-batch on all the ranks of its group.
inline constexpr ExtentId gathered_extent{4};

/// With experts over data ranks: the rows that have come to a rank's own. The device counts them; expected are as many
/// as the rank's own tokens send.
inline constexpr ExtentId routed_extent{5};
/// And the copies of tokens that go to ranks, and that come from them, where these travel.
inline constexpr ExtentId copies_sent_extent{6}, copies_came_extent{7};
/// And where none do and experts are computed by several blocks of a tensor-parallel rank's neighbours, each of more
/// than one: the tokens of a micro-batch that a block has.
inline constexpr ExtentId block_extent{6};

/// A rank's part of a micro-batch of padded sequences, which is filled up so that all that share it have as much
/// (TrainLayout::token_multiple); samples and pairs are those of all. `rows_sent`: of a token, to the ranks that have
/// its experts; 0: they are here. `copies`: expected of a token, to ranks; 0: none travel.
inline Sizes filled_up(const Sizes& micro, const TrainLayout& l, const ExpertMesh& experts = {},
                       std::int64_t rows_sent = 0, double copies = 0.0) {
  Sizes out = micro;
  const std::int64_t all = round_up(micro.tokens, l.token_multiple()), filling = all - micro.tokens;
  out.tokens = all / l.sharers();
  if (filling > 0) ++out.seqs, out.attention_pairs += filling * (filling + 1) / 2;
  out[sequence_extent] = out.tokens / (l.sp ? l.tp : 1);
  if (l.ulysses > 1) out[gathered_extent] = out.tokens * l.ulysses;
  const std::int64_t of_block = out.tokens / experts.blocks;
  if (experts.counts_tokens()) out[block_extent] = of_block;
  if (rows_sent > 0) out[routed_extent] = rows_sent * of_block / experts.wholes;  // a place gets its share
  if (copies > 0.0)
    out[copies_sent_extent] = out[copies_came_extent] = std::llround(copies * static_cast<double>(of_block));
  return out;
}

using SlotLimitId = std::size_t;  // index into Draft::slot_limits

/// A buffer that a call works on, and the byte of it at which the body's tensors begin to count.
struct Input : Port {
  explicit(false) Input(BufferId id) : Port{id, 0} {}
  explicit(false) Input(const Tensor& t) : Port{t.buffer, t.offset_bytes} {}
};

/// What a call may return (ProgramBuilder::call): tensors, or what each_tensor() finds tensors in.
template <class F>
void each_tensor(Tensor& t, F&& visit) {
  visit(t);
}
template <class F>
void each_tensor(std::vector<Tensor>& tensors, F&& visit) {
  for (Tensor& t : tensors) visit(t);
}
template <std::size_t N, class F>
void each_tensor(std::array<Tensor, N>& tensors, F&& visit) {
  for (Tensor& t : tensors) visit(t);
}

class ProgramBuilder {
 public:
  /// `shares`: whether calls reuse what others wrote; without, the same plan comes of it more slowly (lower.h).
  explicit ProgramBuilder(const std::vector<PhaseInfo>& phases, bool shares = true) : phases_(phases), shares_(shares) {
    draft_.sections = program_sections();
    draft_.phases.resize(phases.size());
  }

  /// A buffer that the lowering allocates and frees itself (weights, optimizer state, gradients, the KV pool).
  BufferId managed(std::string name, DType, std::int64_t elements, Category, SectionId);
  /// A buffer that lives from its first to its last use inside a block.
  BufferId transient(std::string name, DType, std::int64_t elements, Category);
  /// The same, with the tensor that covers it.
  Tensor transient(std::string name, DType, std::initializer_list<Dim> shape, Category);

  /// A transient that a later block of the phase reads again. It lives from the first of its blocks to the last.
  void keep(BufferId);

  /// Declares that of the turns to come, `slots` at most are in use at once (graph/plan.h).
  SlotLimitId limit_slots(std::string name, std::int64_t slots);
  /// The next turn is that of these buffers; those that are no transients are there anyway.
  void take_turn(SlotLimitId, std::span<const BufferId>);
  void take_turn(SlotLimitId limit, std::initializer_list<BufferId> buffers) {
    take_turn(limit, std::span(buffers.begin(), buffers.size()));
  }

  /// A window into a buffer, from `element` on (in elements of the window's dtype).
  Tensor view(BufferId, DType, std::initializer_list<Dim> shape, std::int64_t element = 0) const;
  Tensor whole(BufferId) const;
  bool is_on_host(BufferId id) const {
    return draft_.sections[static_cast<std::size_t>(buffer(id).section)].space == Space::host;
  }
  const Buffer& buffer(BufferId id) const { return draft_.buffers[static_cast<std::size_t>(id)]; }

  /// Ops from now on go to this phase's new block, to a call that has the names of both.
  void begin_block(std::int32_t phase, std::string name);
  /// The same; the block puts the section to sleep or wakes it, and is skipped where that has happened already.
  void begin_transition(std::int32_t phase, std::string name, Enters, SectionId);

  /// Ops from now on are a call of their own, until the next begin_call, call or begin_block. `body` says what it does;
  /// the names of its ops, and of the transients that are its own, begin with `name`.
  void begin_call(std::string body, std::string name);

  /// A call of a body that other calls may share: write() emits its ops, unless an earlier call of the same body, the
  /// same variant and inputs of the same sizes has written them. Then that body is called again, where
  ///   inputs      stand in the place of the earlier call's, in their order;
  ///   transients  that write() made are made anew, under this call's name;
  ///   the result  of write() is the earlier one's with both exchanged.
  /// Whatever else the ops touch must be the same in all these calls; whatever else they depend on belongs in
  /// `variant`.
  ///
  ///   const Tensor h = b.call("layer", kind, "layers.3.", {weights, x}, [&] {
  ///     const Tensor y = b.transient("layers.3.y", …);
  ///     b.emit(OpKind::linear, streams::compute, "layers.3.up", {x, b.whole(weights)}, {y});
  ///     return y;
  ///   });
  template <class Write>
  auto call(std::string body, std::int64_t variant, std::string name, std::vector<Input> inputs, Write&& write) {
    using Result = decltype(write());
    const BufferId first = next_buffer();
    if (const SharedBody* const shared = find_shared(body, variant, inputs)) {
      call_again(*shared, std::move(name), inputs);
      if constexpr (!std::is_void_v<Result>) {
        auto result = std::any_cast<Result>(shared->result);
        each_tensor(result, [&](Tensor& t) { rebind(*shared, inputs, first, t); });
        return result;
      }
    } else {
      begin_call(body, name);
      if constexpr (std::is_void_v<Result>) {
        write();
        keep_shared(std::move(body), variant, name, std::move(inputs), first, {});
      } else {
        Result result = write();
        keep_shared(std::move(body), variant, name, std::move(inputs), first, result);
        return result;
      }
    }
  }

  Op& emit(OpKind, StreamId, std::string name, std::vector<Tensor> inputs, std::vector<Tensor> outputs);
  Op& communicate(OpKind, StreamId, Family, std::string name, std::vector<Tensor> inputs, std::vector<Tensor> outputs);
  void alloc(BufferId, StreamId = streams::compute);
  void free(BufferId, StreamId = streams::compute);
  /// The whole section; its extent is filled in when offsets are known.
  void map(SectionId, StreamId = streams::compute);
  void unmap(SectionId, StreamId = streams::compute);
  Op& feed(const Tensor&, Slot);
  Op& fetch(const Tensor&, Slot);

  /// The ops of the call at hand so far, for a rewrite of them. Transients that no op names any more come to nothing.
  std::vector<Op>& open_ops() { return open_; }

  /// What was written; the last call ends.
  Draft& draft();

 private:
  /// A body that calls share, and the call that wrote it.
  struct SharedBody {
    std::vector<std::int64_t> signature;  // of the inputs
    std::vector<Input> inputs;
    std::int32_t body = 0;  // of the draft
    std::vector<Port> slots;
    BufferId first_transient = 0;              // of those that it made, which follow one another
    std::vector<std::string> transient_names;  // behind the call's
    std::any result;
    bool is_its_own(BufferId id) const {
      return id >= first_transient && id < first_transient + static_cast<BufferId>(transient_names.size());
    }
  };

  Op& push(OpKind, StreamId);
  void end_call();
  BufferId next_buffer() const { return static_cast<BufferId>(draft_.buffers.size()); }
  /// Which of them are windows of one buffer, and how far apart; dtypes and sizes.
  std::vector<std::int64_t> signature_of(const std::vector<Input>&) const;
  const SharedBody* find_shared(const std::string& body, std::int64_t variant, const std::vector<Input>&) const;
  void keep_shared(std::string body, std::int64_t variant, const std::string& name, std::vector<Input>, BufferId first,
                   std::any result);
  void call_again(const SharedBody&, std::string name, const std::vector<Input>&);
  /// A tensor of what the earlier call returned, as the one at hand has it, whose transients begin at `first`.
  static void rebind(const SharedBody&, const std::vector<Input>&, BufferId first, Tensor&);

  const std::vector<PhaseInfo>& phases_;
  bool shares_;
  Draft draft_;
  std::vector<bool> is_kept_;  // [buffer], of the first ones
  DraftBlock* block_ = nullptr;
  std::string open_body_, open_name_;  // the call that ops go to
  std::vector<Op> open_;
  std::vector<Input> open_inputs_;
  std::map<std::pair<std::string, std::int64_t>, std::vector<SharedBody>> shared_;  // by name and variant
};

/// Marks a whole-section map or unmap until finish() knows the extent.
inline constexpr std::int64_t whole_section = -1;

/// What a phase does to the map of the transient section.
struct TransientUse {
  When when = When::iteration;
  bool maps = false;       // it may change the map at its start: it is not driven and runs each time
  std::int64_t bytes = 0;  // that it needs, whole chunks
};
TransientUse transient_use(const PhaseInfo&, std::int64_t bytes);
TransientUse transient_use(const JobPhase&, std::int64_t bytes);
/// How much of the transient section is mapped from each phase's start on. A phase that can change it also provides for
/// those behind it that cannot. `keep_mapped`: nothing sleeps, so it is mapped once for the largest need.
std::vector<std::int64_t> transient_levels(std::span<const TransientUse>, bool keep_mapped);

/// What else is mapped on the device, bytes: the most while a phase goes on, and behind it.
struct MappedBeside {
  std::int64_t most = 0, end = 0;
  bool gives_back = false;  // it unmaps other sections
};
/// How much of the transient section a phase maps or leaves mapped at its beginning, and behind its other work.
struct TransientMap {
  std::int64_t first = 0, last = 0;
};
/// By phase; of one that cannot change the map, what it finds. A phase that gives other memory back (a sleep) takes
/// what only later ones need behind that, where both at once would be more than anything else needs.
std::vector<TransientMap> transient_maps(std::span<const TransientUse>, std::span<const MappedBeside>,
                                         bool keep_mapped);

/// Runs the passes over what was written: section extents, lifetimes, dependencies, offsets.
void run_passes(const Plan&, Draft&);
/// Of what the passes went over: bodies and calls, and the mapping of the transient section. `keep_mapped`: nothing
/// sleeps, so transients are mapped once for the largest need.
Program finish(const Plan&, Draft, bool keep_mapped);

}  // namespace hotbunk
