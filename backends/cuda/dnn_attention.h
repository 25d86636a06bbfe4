// Attention's backward by cuDNN where that is asked for and can, else by kernels/attention*.cu, which are also what
// cuDNN is compared with.
//
// Gradients have no counterpart in a rollout, so log-probs of rollout and training stay equal to the bit (P5) whoever
// forms them. The same run has the same bits again (P7): only a form without atomics is taken, which on Hopper keeps
// the gradients of all scores in memory, sequences x heads x longest² numbers. So a few sequences at a time go through
// a workspace of a size that is known before the run.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "backends/cuda/dnn_graph.h"
#include "backends/cuda/kernels/attention.h"
#include "backends/cuda/launch.h"
#include "runtime/rank_backend.h"

namespace hotbunk::cuda {

/// Who forms attention's gradients: our kernels; cuDNN those that it takes.
enum class AttentionPolicy : std::uint8_t { own, cudnn };
std::string_view name_of(AttentionPolicy);
std::optional<AttentionPolicy> attention_policy_from(std::string_view name);

/// Of packed sequences, each causal by itself. Rows of x [T, width] are [a queries | k keys | k values].
struct AttentionBackward {
  DType dtype = DType::f32;
  AttentionHeads heads{};
  ScoreOptions scores{};
  std::int64_t tokens = 0, sequences = 0;
  std::int64_t pairs = 0;  // sum over sequences of n (n + 1) / 2
};
/// d_o, o [T, a v]; x, dx [T, width]; lse, delta [T, a] in fp32; cu_seqlens [S + 1] in int32. `delta`: for cuDNN to
/// write.
struct AttentionBackwardAddresses {
  CUdeviceptr d_o = 0, x = 0, o = 0, lse = 0, cu_seqlens = 0, dx = 0, delta = 0;
};

/// No sequence is longer, by how many there are, their tokens and their pairs (Samuelson's inequality: the largest of n
/// numbers is at most sqrt(n - 1) standard deviations above their mean); where these do not fit together, all tokens.
std::int64_t longest_at_most(const AttentionBackward&);

/// What one graph is for: `sequences` of them at once, none longer than `longest`.
struct AttentionGraphKey {
  AttentionHeads heads{};
  int window = 0;
  std::int64_t sequences = 0, longest = 0;
};
/// The graph and its tensors.
struct AttentionGraph {
  using Id = DnnGraph::Id;
  DnnGraph graph;
  Id row_offsets = DnnGraph::none, output_offsets = DnnGraph::none, head_offsets = DnnGraph::none;  // int32 [b + 1]
  Id query_lengths = DnnGraph::none, key_lengths = DnnGraph::none;                                  // int32 [b]
  Id q = DnnGraph::none, k = DnnGraph::none, v = DnnGraph::none, o = DnnGraph::none, d_o = DnnGraph::none;
  Id lse = DnnGraph::none, delta = DnnGraph::none;
  Id dq = DnnGraph::none, dk = DnnGraph::none, dv = DnnGraph::none;
  Id scale = DnnGraph::none, one = DnnGraph::none, masked = DnnGraph::none;  // numbers: the scale, 1, -inf
  Id window = DnnGraph::none;                                                // where there is one
};
AttentionGraph attention_backward_graph(const Dnn&, const AttentionGraphKey&);

/// cuDNN on one stream, for its thread. What it chose for a shape it keeps: the same shape, the same kernel.
class DnnAttention {
 public:
  /// Of what an op may need beside its operands, on each stream that has one: enough for a sequence of 4,096 and 32
  /// heads (1,088 MiB with cuDNN 9.19 on Hopper, eight key-value heads of 128).
  static constexpr std::int64_t usual_workspace_bytes = std::int64_t{1152} << 20;
  /// Lengths and offsets of sequences, beside that.
  static constexpr std::int64_t lengths_bytes = std::int64_t{1} << 20;

  /// RuntimeFailure when the device has no memory for the workspace.
  DnnAttention(const Dnn&, const Launcher&, std::int64_t workspace_bytes = usual_workspace_bytes);
  ~DnnAttention();
  DnnAttention(const DnnAttention&) = delete;
  DnnAttention& operator=(const DnnAttention&) = delete;

  /// Enqueues it and returns true; or false: our kernels' turn. RuntimeFailure names the call and cuDNN's reason.
  bool take(const AttentionBackward&, const AttentionBackwardAddresses&);

  struct Counts {
    std::int64_t taken = 0, declined = 0, searched = 0, executed = 0;
    std::map<std::string, std::int64_t> reasons{};  // why ops were declined, and how many
  };
  const Counts& counts() const { return counts_; }
  /// Who formed them, and why.
  std::vector<LibraryChoice> choices() const;

 private:
  struct Chosen {
    AttentionGraph graph;
    DnnGraph::Found found;
  };
  const Chosen& choose(const AttentionGraphKey&);
  /// "" or why none of cuDNN's forms is asked.
  std::string why_not(const AttentionBackward&) const;
  /// The graphs that take all sequences, so many at a time; or why there is none.
  struct Pieces {
    std::vector<const Chosen*> graphs{};
    std::vector<std::int64_t> sequences{};
    std::string why_none{};
  };
  Pieces pieces(const AttentionBackward&, std::int64_t longest);
  void execute(const Chosen&, const AttentionBackward&, const AttentionBackwardAddresses&, std::int64_t first);

  const Dnn dnn_;
  const Launcher& launch_;
  DnnHandle handle_ = nullptr;
  const std::int64_t workspace_bytes_;
  const DeviceBlock workspace_, lengths_;
  const int capability_;  // of the device, 90 of sm_90
  std::map<std::vector<std::int64_t>, std::unique_ptr<Chosen>> chosen_;
  Counts counts_;
};

}  // namespace hotbunk::cuda
