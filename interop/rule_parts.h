// The rules' functions, for rules*.cc only.
#pragma once
#include <string>
#include <vector>

#include "interop/rules.h"

namespace hotbunk::rules {

void read_task(RuleInput&);
void write_task(RuleOutput&);
void read_model_role(RuleInput&);
void write_model_role(RuleOutput&);
void read_cluster(RuleInput&);
void write_cluster(RuleOutput&);
void read_layout(RuleInput&);
void write_layout(RuleOutput&);
void read_lengths(RuleInput&);
void write_lengths(RuleOutput&);
void read_batches(RuleInput&);
void write_batches(RuleOutput&);
void read_micro_batches(RuleInput&);
void write_micro_batches(RuleOutput&);
void read_logprob_batches(RuleInput&);
void write_logprob_batches(RuleOutput&);
void read_recompute(RuleInput&);
void write_recompute(RuleOutput&);
void read_offload(RuleInput&);
void write_offload(RuleOutput&);
void read_adapters(RuleInput&);
void write_adapters(RuleOutput&);
/// The matrices with adapters of which Megatron-Bridge has no module: no list there says them, and an empty one is all.
std::vector<std::string> without_bridge_module(const ModelSpec&);
void read_cpu_optimizer(RuleInput&);
void write_cpu_optimizer(RuleOutput&);
void read_loss(RuleInput&);
void write_loss(RuleOutput&);
void read_critic(RuleInput&);
void write_critic(RuleOutput&);
void read_reference(RuleInput&);
void write_reference(RuleOutput&);
void read_padding(RuleInput&);
void write_padding(RuleOutput&);
void read_staleness(RuleInput&);
void write_staleness(RuleOutput&);

/// "[a, 'b']", "a b" and "a,b" as a, b.
std::vector<std::string> listed(std::string text);

/// Ranks of training that one data rank has: tp x cp x pp x ulysses.
double train_factor(const RuleInput&);

}  // namespace hotbunk::rules
