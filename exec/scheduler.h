// One rollout engine's scheduler: admission, continuous batching, chunked prefill, paged KV blocks and preemption
// (BACKGROUND D4). Its decisions depend on lengths and counts only, never on wall time, so that every rank of an engine
// and the simulator replicate them.
//
// Policy. Requests are admitted in order. A step is a prefill when some request can be admitted or is half prefilled,
// else one token for each running request. When a decode step finds no free block, the youngest request gives up all of
// its blocks and returns to the head of the queue; its prompt and the tokens generated so far are prefilled again
// later. The oldest is never preempted and every request fits the pool alone, so all of them finish.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/diagnostic.h"
#include "graph/tensor.h"

namespace hotbunk {

struct SchedulerConfig {
  std::int64_t max_running_requests = 1;  // slots
  std::int64_t max_prefill_tokens = 1;    // of one prefill step
  std::int64_t block_tokens = 16;
  std::int64_t num_kv_blocks = 1;
};

/// `max_response_tokens` ends a response that no EOS ended; the simulator passes the length it has drawn.
struct RolloutRequest {
  std::int64_t sample = 0;  // index in the iteration
  std::int64_t prompt_tokens = 1;
  std::int64_t max_response_tokens = 1;
};

/// Tokens [first, first + count) of a request's prompt + response go through the model.
struct Chunk {
  std::int32_t request = 0;  // index within this engine
  std::int64_t first = 0, count = 1;
  bool samples = true;  // its last row samples the next token: always in a decode step, else only the last chunk
};

struct ScheduledStep {
  bool prefill = false;
  std::int64_t times = 1;  // decode steps that this one stands for; each has `seqs` attention_pairs more than the last
  std::vector<Chunk> chunks;  // in request order
  Sizes sizes;                // tokens, seqs = chunks, attention_pairs
};

/// What the feeds of one step hold (graph/slots.h), T tokens and S chunks.
struct StepTables {
  std::vector<std::int32_t> positions;        // [T]
  std::vector<std::int32_t> cu_seqlens;       // [S + 1]
  std::vector<std::int32_t> kv_slots;         // [T] block * block_tokens + offset
  std::vector<std::int32_t> context_lengths;  // [S]
  std::vector<std::int32_t> last_rows;        // [S]
  std::vector<std::int32_t> block_tables;     // [S, max_blocks], row-major, 0 beyond the context
  std::int64_t max_blocks = 0;
};

struct SchedulerStatistics {
  std::int64_t prefill_steps = 0, decode_steps = 0;
  std::int64_t preemptions = 0;
  std::int64_t max_blocks_used = 0;
  std::int64_t recomputed_tokens = 0;  // prefilled again after a preemption
};

class Scheduler {
 public:
  /// E310 when a request can never fit the pool, E311 when a setting or a request makes no sense.
  static Result<Scheduler> create(const SchedulerConfig&, std::vector<RolloutRequest>);

  /// The next step, or nothing when every request has finished. The previous step must have been completed. A decode
  /// step may stand for up to `most_times` of them: as many as pass until one of them finishes a request or finds no
  /// free block. Who asks for more than one lets no sequence end early.
  std::optional<ScheduledStep> next(std::int64_t most_times = 1);
  /// The feeds of the step that next() has just returned.
  StepTables tables(const ScheduledStep&, std::int64_t max_blocks) const;
  /// `ended[i]`: the token that chunk i sampled was the end of its sequence. Empty: no sequence ends early. Ignored for
  /// chunks that sample nothing.
  void completed(const ScheduledStep&, std::span<const std::uint8_t> ended = {});

  const std::vector<RolloutRequest>& requests() const { return requests_; }
  std::int64_t response_tokens(std::int32_t request) const {
    return states_[static_cast<std::size_t>(request)].generated;
  }
  bool finished(std::int32_t request) const { return states_[static_cast<std::size_t>(request)].finished; }
  /// Requests that hold a slot, oldest first, and the blocks they hold.
  std::span<const std::int32_t> running() const { return running_; }
  std::span<const std::int32_t> blocks(std::int32_t request) const {
    return states_[static_cast<std::size_t>(request)].blocks;
  }
  std::int64_t free_blocks() const { return std::ssize(free_) + config_.num_kv_blocks - unused_; }
  const SchedulerStatistics& statistics() const { return statistics_; }

 private:
  struct State {
    std::int64_t generated = 0;  // response tokens sampled so far
    std::int64_t cached = 0;     // tokens whose K and V are in the pool
    std::int64_t ever_cached = 0;
    bool finished = false;
    std::vector<std::int32_t> blocks;
  };
  Scheduler(const SchedulerConfig&, std::vector<RolloutRequest>);
  State& state(std::int32_t r) { return states_[static_cast<std::size_t>(r)]; }
  const State& state(std::int32_t r) const { return states_[static_cast<std::size_t>(r)]; }
  std::int64_t known_tokens(std::int32_t r) const;
  bool prefilled(std::int32_t r) const;
  bool try_admit();
  std::int32_t take_block();
  void grow(std::int32_t r, std::int64_t tokens);
  void release(std::int32_t r);
  void preempt_youngest();
  void make_room_for_decode();
  ScheduledStep prefill_step();
  std::int64_t alike_decode_steps(std::int64_t most_times) const;
  ScheduledStep decode_step(std::int64_t most_times);

  SchedulerConfig config_;
  std::vector<RolloutRequest> requests_;
  std::vector<State> states_;
  std::vector<std::int32_t> running_;  // ascending; every waiting request is younger than every running one
  std::int32_t next_waiting_ = 0;      // the oldest request that waits; all after it wait too or have finished
  std::vector<std::int32_t> free_;     // a stack: the block freed last is used first,
  std::int32_t unused_ = 0;            // and where there is none, the first that nobody has used yet
  bool step_open_ = false;
  SchedulerStatistics statistics_;
};

/// Which samples each engine generates, in ascending order. Engines get the same number of samples (one more for the
/// first ones where it does not divide). Whole prompts go to the engine with the fewest prompt tokens so far, longest
/// prompt first, ties to the lower index; samples of the prompts that do not divide evenly are dealt one by one.
/// prompt_tokens: one per prompt.
std::vector<std::vector<std::int64_t>> route_samples(std::span<const std::int64_t> prompt_tokens,
                                                     std::int64_t samples_per_prompt, std::int64_t engines);

}  // namespace hotbunk
