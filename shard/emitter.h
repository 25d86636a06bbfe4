// What the rules of shard/ write with: whoever lowers says where tensors and parameters are.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "graph/op.h"
#include "model/forward.h"

namespace hotbunk {

struct TensorSharding;  // tensor_parallel.h

/// What latent attention attends with: queries [T,ad], latents [T,r] and the rotated part of keys [T,t].
struct LatentInputs {
  Tensor queries, latent, shared_key;
};

/// What losses of routers take, where a training pass has such (router_loss.h).
struct RouterLossFeeds {
  Tensor sequence_ids, sequence_weights;  // [T], graph/slots.h
  Tensor metrics;
  std::int64_t num_sequences = 0;  // of a micro-batch, at most
  double balance = 0.0, z = 0.0;   // coefficients, each of one layer
};

class Emitter {
 public:
  Emitter() = default;
  Emitter(const Emitter&) = delete;
  Emitter& operator=(const Emitter&) = delete;
  virtual ~Emitter() = default;

  /// A tensor that lives as long as it is used. Names count from where the piece stands in the model.
  virtual Tensor make(const std::string& name, DType, std::initializer_list<Dim> shape) = 0;
  virtual Op& emit(OpKind, StreamId, const std::string& name, std::vector<Tensor> inputs,
                   std::vector<Tensor> outputs) = 0;
  /// This rank's part of parameters as a matrix [rows, cols] or, of 1-D parameters, a vector.
  virtual Tensor weight(const Weight&) = 0;

  /// Feeds: token ids and positions, [T] int32.
  virtual Tensor ids() = 0;
  virtual Tensor positions() = 0;
  /// Attention over packed sequences, or over what an engine keeps of earlier tokens. Returns the log-sum-exps [T,a]
  /// where a backward will read them, or sinks change them.
  virtual Tensor attend(const TensorSharding&, const ForwardOp&, const Tensor& qkv, const Tensor& attended) = 0;
  /// Of latent attention, of what is kept of tokens: latents and the parts of keys that all heads share. Whether that
  /// was written; else attend() takes all heads' keys and values.
  virtual bool attend_latents(const TensorSharding&, const ForwardOp&, const LatentInputs&, const Tensor& attended);
};

class BackwardEmitter : public Emitter {
 public:
  /// Where the gradients of parameters go.
  virtual Tensor gradient(const Weight&) = 0;
  virtual void attend_backward(const TensorSharding&, const ForwardOp&, const Tensor& d_attended, const Tensor& qkv,
                               const Tensor& attended, const Tensor& lse, const Tensor& d_qkv) = 0;
  /// Nothing: routers add nothing to the loss.
  virtual const RouterLossFeeds* router_loss() const { return nullptr; }
};

}  // namespace hotbunk
