// What a user asks of one scenario before a cluster is booked: where bytes and seconds come from, which lever buys
// what, how sure it is, how small the cluster may be. Structured results; text and JSON renderings beside them.
#pragma once
#include <algorithm>
#include <filesystem>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "planner/allocator/allocator_replay.h"
#include "planner/answers/link_bytes.h"
#include "planner/answers/verdict.h"
#include "planner/price/stream_seconds.h"
#include "planner/search/search.h"

namespace hotbunk {

/// A scenario's models, whole: hardware, framework, training and rollout closed forms.
class ScenarioPricer {
 public:
  /// E209, E205 from profiles; E260, E264 as hardware_for.
  static Result<std::unique_ptr<ScenarioPricer>> make(const Scenario&, const std::filesystem::path& catalogue);

  const Scenario& scenario() const { return scenario_; }
  const TrainModel& train() const { return train_; }
  const RlModel& rl() const { return rl_; }
  /// The scenario's layout; an automatic rank order becomes the faster one.
  RlPoint point() const;
  /// SFT: the optimizer steps alone; else the whole iteration.
  RlPrice price(const RlPoint&) const;
  /// Trained in an iteration, without padding.
  double tokens() const;
  /// Why the point has no price, with the arithmetic. E263: it does not divide; E301: the rollout does not hold the
  /// weights and one sequence; what would help is remedy_text's to say (remedies.h). nullopt: it has one.
  std::optional<Diagnostic> why_unpriced(const RlPoint&) const;

 private:
  ScenarioPricer(const Scenario&, const CostModel&, const FrameworkProfile&);
  Scenario scenario_;
  TrainModel train_;
  RlModel rl_;
};

/// A tree of parts; `bytes` and `seconds` of a parent are the sum of its children's where it has any.
struct CostNode {
  std::string name, why;
  double bytes = 0, seconds = 0;
  std::vector<CostNode> children;
};

struct Lever {
  std::string change;
  RlPoint point;
  double seconds = 0;  // of an iteration, against the layout explained
  double bytes = 0;    // of the fullest moment
  bool fits = false;
  std::vector<std::string> flags;  // that select it, for --set
};

/// What the prices of a scenario stand on.
struct Standing {
  std::string hardware;
  bool calibrated = false;  // rates were fitted to measurements; narrow products never were
};
Standing standing_of(const ScenarioPricer&);

/// A full micro-batch of training on a rank's streams, from its plan (stream_seconds.h).
struct MicroBatchStreams {
  std::int64_t sequences = 0, tokens = 0;
  std::vector<Stream> streams;  // of the plan
  StreamSeconds seconds;
  /// Of the stream that is busy longest, what the plan's order adds to it: exposed communication.
  double exposed() const { return seconds.elapsed - std::ranges::max(seconds.busy); }
};

struct Explanation {
  std::string scenario, hardware, framework;
  std::optional<Sourced> seconds_error;  // of an iteration, by what was measured; nullopt: nothing was
  bool calibrated = false;  // rates were fitted to measurements; else all are the datasheet's and stated efficiencies
  RlPoint point;
  std::optional<Diagnostic> unpriced;  // why the layout has no price; then all below is empty
  RlPrice price;
  double capacity_bytes = 0, host_capacity_bytes = 0;  // of a rank
  double mapped_bytes = 0, host_mapped_bytes = 0;      // of a lowered scenario, what must fit; 0: not lowered
  FitVerdict verdict;
  CostNode memory, time;
  CostNode host;               // of a rank's share of a node; nothing where a plan counts it
  ReservedMemory torch;        // training under PyTorch's caching allocator; nothing under profile hotbunk
  std::vector<LinkUse> links;  // of one rank and iteration
  std::optional<MicroBatchStreams> micro_batch;  // of a lowered scenario's training
  std::vector<Lever> levers;                     // what can be changed by one step, best time first
  std::string remedy;                            // where it does not fit: what does, tried, or that nothing near does
  std::vector<std::string> remedy_flags;         // that select it, for --set; empty: nothing near does
  std::vector<std::string> notes;                // what a user of other systems would stumble over
};
Explanation explain(const ScenarioPricer&);
std::string render(const Explanation&);
std::string to_json(const Explanation&);

/// Iteration seconds under ±10 % of one number, the others and the layout fixed: every number of the hardware profile
/// (numbers_of), the peaks, the memories, and what the workload asks for. Sorted by effect. What is counted moves by
/// whole ones, at least one, and a fraction stays below 1: the changes say by how much it was.
struct Sensitivity {
  std::string number;
  double minus = 0, plus = 0;                     // relative change of the iteration's seconds
  double minus_change = -0.1, plus_change = 0.1;  // relative change of the number
  bool minus_fits = true, plus_fits = true;
};
Result<std::vector<Sensitivity>> sensitivity(const Scenario&, const std::filesystem::path& catalogue);
std::string render(const std::vector<Sensitivity>&);
std::string to_json(const std::vector<Sensitivity>&);

/// Every layout of the space, by `options`: training alone for SFT, else training and rollout together (search_rl).
RlSearch search_layouts(const ScenarioPricer&, const RlSpace&, const SearchOptions& options);

/// E262 when money is asked for and no price of the scenario's GPU is known.
Status price_known(const Scenario&, Objective);

/// The fewest GPUs of the scenario's kind on which some layout fits, and the best layouts there: parts of one node,
/// then whole nodes up to `most`. Every smaller count was searched, or provably holds no layout.
struct SmallestCluster {
  std::int64_t nodes = 0, gpus = 0;  // 0: none up to most_nodes
  std::int64_t most_nodes = 0;
  double within = std::numeric_limits<double>::infinity();  // seconds that an iteration there takes at most
  bool exact = true;              // false: options.most_points ended the search of a smaller count
  bool executes = false;          // the scenario is lowered: `search` has layouts that execute, by their plans' bytes
  RlSearch search;                // on those GPUs, on the fastest, or on the most when none hold it
  std::int64_t fastest_gpus = 0;  // where some fit and none is as fast as asked
  std::int64_t priced_gpus = 0;   // fewer, where layouts that are only priced fit by estimate; 0: none
  RlSearch priced;
};
/// The memories in `options` are the cluster's. `within`: of those that fit only clusters on which an iteration takes
/// so many seconds at most, by the objective `seconds`. E262 as price_known.
Result<SmallestCluster> smallest_cluster(const Scenario&, const std::filesystem::path& catalogue,
                                         const SearchOptions& options = {.keep = 3}, std::int64_t most = 1024,
                                         double within = std::numeric_limits<double>::infinity());
std::string render(const SmallestCluster&);
std::string to_json(const SmallestCluster&);

std::string render(const RlSearch&);
std::string to_json(const RlSearch&);
std::string describe(const RlPoint&);
std::string describe(const TrainPoint&);

/// One axis of a sweep: a scenario key and its values, "train.micro_batch_tokens=4096,8192" or "cluster.nodes=1..8:1",
/// or keys that move together, "cluster.nodes,train.layout.dp=1:8,2:16".
struct SweepAxis {
  std::vector<std::string> keys;
  std::vector<std::vector<std::string>> points;  // in each a value of every key
  std::string name() const;
  std::string label(std::size_t point) const;
};
/// E261: malformed, or not as many values in a point as keys.
Result<SweepAxis> parse_axis(const std::string& text);

struct SweepRow {
  std::vector<std::string> values;  // of the axes' keys, in order
  bool valid = false, fits = false;
  std::string why;  // not valid
  double iteration_seconds = 0, tokens_per_second = 0, peak_bytes = 0, host_bytes = 0;
  double capacity_bytes = 0;  // of a device
  std::string gpu, hardware;  // and what its rates stand on
  bool calibrated = false;
};
/// What to know before rows of different GPUs are compared: whose efficiencies were fitted and whose were not. Empty
/// where all are of one standing.
std::string standing_note(const std::vector<SweepRow>&);
/// The product of the axes in order, each point a scenario of its own. E261 above 100,000 points.
Result<std::vector<SweepRow>> sweep(const std::filesystem::path& scenario, const std::vector<std::string>& overrides,
                                    const std::vector<SweepAxis>& axes, const std::filesystem::path& catalogue);
std::string to_csv(const std::vector<SweepAxis>&, const std::vector<SweepRow>&);
std::string to_json(const std::vector<SweepAxis>&, const std::vector<SweepRow>&);

}  // namespace hotbunk
