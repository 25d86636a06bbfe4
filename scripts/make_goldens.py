#!/usr/bin/env python3
"""Golden data for promise P3: tiny random models run by Hugging Face transformers on torch's CPU path.

Long for the families: each has its config, its formulas in fp64 and its draw of weights, and they share the rest.

One folder per model under --out. tests/golden/README.md says what each file holds, with shapes.

    make_goldens.py --out tests/golden            write every folder (the same bytes each time on one machine)
    make_goldens.py --out tests/golden --check    reload every folder, recompute, compare; exit 1 on a difference

Two references stand side by side:
  * transformers itself, fp32, eager attention, one thread: what the tests compare hotbunk with;
  * `plain_logits`, the same mathematics in fp64, written from the formulas. transformers cannot serve as an fp64
    reference: it normalises (RMSNorm), takes softmax and rotates in fp32 whatever the model's dtype is. The distance
    between the two is the rounding floor below which no tolerance makes sense; it is recorded in golden.json.

Shape suffixes: T tokens of all sequences packed, L tokens of one sequence, S sequences, V vocabulary, D hidden,
H query heads, K key-value heads, E head_dim, X experts.
"""

import argparse
import fnmatch
import json
import math
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (AutoModelForCausalLM, DeepseekV2Config, DeepseekV3Config, Gemma2Config, Gemma3TextConfig,
                          GPT2Config, Glm4MoeConfig, GptOssConfig, LlamaConfig, MistralConfig, MixtralConfig, Phi3Config, Qwen2Config, Qwen3Config,
                          Qwen3MoeConfig)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

SCHEMA = "hotbunk.golden/1"
NUM_STEPS = 5
NUM_NEW_TOKENS = 12
PROMPT_LENGTHS = (3, 7, 12)
# A seed is drawn again unless rounding is far from deciding what the tests compare:
MIN_MARGIN = 1e-3  # top-1 minus top-2 logit of every generated token, at least
MAX_UPDATE_FLOOR = 5e-5  # relative distance of fp32's and fp64's update of any tensor; the tests allow 1e-3 (P3)
MIN_ROUTING_MARGIN = 2e-4  # last expert's router logit that a token takes minus the next one's, in every forward pass;
# of DeepSeek's score with its bias, and of groups as of experts
OPTIMIZER = {"name": "adamw", "lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01,
             "max_grad_norm": 1.0}
SHARDED = "llama-gqa-sharded"  # llama-gqa's weights once more, in several files
MAX_SHARD_SIZE = "50KB"

# Standard deviations of the random weights. Linear maps keep the scale of their input (0.15 * sqrt(40) ~ 1), so
# attention is neither flat nor one-hot; norm weights and biases are far from 1 and 0, so that a forgotten one shows.
LINEAR_STD, EMBEDDING_STD, NORM_STD, BIAS_STD = 0.15, 0.2, 0.2, 0.1


@dataclass(frozen=True)
class Case:
    """One tiny model. Vocabularies are odd, so Shard(0) over 2 and 4 ranks is uneven; heads and intermediate_size
    divide by 2 everywhere and by 4 in all but llama3-rope, so TP 2 and TP 4 cut them; kv heads 2 under TP 4 and
    kv heads 1 are the cases where key-value heads must be replicated. Each model keeps near 30,000 parameters."""

    name: str
    config: transformers.PreTrainedConfig
    lengths: tuple[int, ...]
    precisions: bool = False  # also store logits of the bf16 model and fp64 logits
    config_v4: bool = False  # also store config.json in transformers 4's spelling
    eps: float = OPTIMIZER["eps"]
    update_floor: float = MAX_UPDATE_FLOOR  # less where sums in another order decide what the tests compare, too

    @property
    def optimizer(self):
        return OPTIMIZER | {"eps": self.eps}


def common(**keys):
    """No special tokens: nothing stops generation early."""
    return dict(bos_token_id=None, eos_token_id=None, pad_token_id=None, use_cache=True, **keys)


def cases():
    return [
        Case("llama-gqa", LlamaConfig(**common(
            vocab_size=97, hidden_size=40, intermediate_size=52, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, rms_norm_eps=1e-5, max_position_embeddings=128,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0})),
            lengths=(5, 23, 11, 17, 8), precisions=True, config_v4=True),
        # Wavelengths 6.3, 21.8, 75, 262, 906: the first is kept (< 32/4), the second blended, the rest divided (> 32/1).
        Case("llama3-rope", LlamaConfig(**common(
            vocab_size=83, hidden_size=42, intermediate_size=46, num_hidden_layers=2, num_attention_heads=6,
            num_key_value_heads=2, head_dim=10, rms_norm_eps=1e-5, max_position_embeddings=256,
            rope_parameters={"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
                             "high_freq_factor": 4.0, "original_max_position_embeddings": 32})),
            lengths=(19, 6, 23, 13), config_v4=True),
        # head_dim 4 on purpose. Softmax ignores what a key bias adds alike to every key, so its gradient lives only on
        # the rotation: with theta 1e6 the slowest pair of head_dim 8 turns 6e-4 rad in 20 tokens, its gradient drowns
        # in fp32's rounding, and AdamW (g / |g|) makes of that an update of full size and random sign.
        Case("qwen2-bias", Qwen2Config(**common(
            vocab_size=101, hidden_size=32, intermediate_size=44, num_hidden_layers=3, num_attention_heads=8,
            num_key_value_heads=2, rms_norm_eps=1e-6, max_position_embeddings=128,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000.0})),
            lengths=(9, 21, 5, 14, 16), precisions=True),
        Case("qwen3-norm", Qwen3Config(**common(
            vocab_size=79, hidden_size=37, intermediate_size=52, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=12, rms_norm_eps=1e-6, max_position_embeddings=128,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000.0})),
            lengths=(23, 7, 12, 5, 10, 6)),
        Case("llama-tied", LlamaConfig(**common(
            vocab_size=73, hidden_size=48, intermediate_size=52, num_hidden_layers=2, num_attention_heads=8,
            num_key_value_heads=4, rms_norm_eps=1e-5, max_position_embeddings=128, tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0})),
            lengths=(15, 5, 22, 20)),
        Case("mha-one-kv", LlamaConfig(**common(
            vocab_size=67, hidden_size=32, intermediate_size=60, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=1, rms_norm_eps=1e-6, max_position_embeddings=128,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0})),
            lengths=(8, 18, 5, 23, 13)),
        # Weights are a softmax over the two chosen of four.
        Case("mixtral-tiny", MixtralConfig(**common(
            vocab_size=67, hidden_size=32, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, rms_norm_eps=1e-5,
            max_position_embeddings=128, sliding_window=None,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0})),
            lengths=(9, 20, 5, 17, 12)),
        # Weights are a softmax over all eight, of which three are chosen: they add up to less than 1.
        Case("qwen3-moe-tiny", Qwen3MoeConfig(**common(
            vocab_size=71, hidden_size=32, intermediate_size=36, moe_intermediate_size=12, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=8, num_experts_per_tok=3,
            norm_topk_prob=False, rms_norm_eps=1e-6, max_position_embeddings=128,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000.0})),
            lengths=(14, 6, 22, 19)),
        # A bias behind o_proj too. Of five pairs of a head the first keeps its frequency and the last three are divided;
        # cosines and sines are times 0.1 ln 4 + 1.
        Case("llama-yarn-bias", LlamaConfig(**common(
            vocab_size=89, hidden_size=40, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=10, rms_norm_eps=1e-5, max_position_embeddings=128, attention_bias=True,
            rope_parameters={"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 4.0,
                             "beta_slow": 1.0, "original_max_position_embeddings": 32})),
            lengths=(12, 21, 6, 17, 9), config_v4=True),
        # Half of the sequences are longer than the window, which every layer has.
        Case("mistral-window", MistralConfig(**common(
            vocab_size=77, hidden_size=32, intermediate_size=52, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-5, max_position_embeddings=128, sliding_window=9,
            rope_parameters={"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0})),
            lengths=(23, 7, 14, 5, 18)),
        # As Mistral 0.2 and later: no window.
        Case("mistral-full", MistralConfig(**common(
            vocab_size=63, hidden_size=28, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6,
            num_key_value_heads=3, head_dim=6, rms_norm_eps=1e-5, max_position_embeddings=128, sliding_window=None,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000.0})),
            lengths=(22, 6, 13, 17)),
        # The window in the first layer and in the third; caps low enough to bend scores and logits.
        Case("gemma2-tiny", Gemma2Config(**common(
            vocab_size=71, hidden_size=32, intermediate_size=36, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, head_dim=10, rms_norm_eps=1e-6, max_position_embeddings=128, sliding_window=8,
            query_pre_attn_scalar=6, attn_logit_softcapping=4.0, final_logit_softcapping=6.0,
            tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})),
            lengths=(19, 6, 22, 11)),
        # The window in the first two layers, which turn by a table of their own; the third one's is divided. No caps.
        Case("gemma3-tiny", Gemma3TextConfig(**common(
            vocab_size=69, hidden_size=32, intermediate_size=36, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, head_dim=10, rms_norm_eps=1e-6, max_position_embeddings=128, sliding_window=7,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"], query_pre_attn_scalar=6,
            tie_word_embeddings=True, rope_parameters={
                "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 30.0}})),
            lengths=(18, 6, 21, 13), update_floor=5e-6),
        # Queries straight from the stream, as in V2-Lite; values wider than keys; the first layer is dense. Four experts in
        # two groups of which the best expert's is taken; weights are softmax over all six, times 1.5. Scores are
        # scaled by (0.0707 ln 4 + 1)^2, cosines and sines by (0.1 ln 4 + 1) / (0.0707 ln 4 + 1).
        Case("deepseek-v2-tiny", DeepseekV2Config(**common(
            vocab_size=71, hidden_size=32, intermediate_size=36, moe_intermediate_size=12, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=4, n_shared_experts=2, n_routed_experts=6,
            routed_scaling_factor=1.5, kv_lora_rank=10, q_lora_rank=None, qk_rope_head_dim=4, v_head_dim=11,
            qk_nope_head_dim=6, topk_method="group_limited_greedy", n_group=3, topk_group=2, num_experts_per_tok=2,
            first_k_dense_replace=1, rms_norm_eps=1e-5, max_position_embeddings=128,
            rope_parameters={"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 4.0,
                             "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.707,
                             "original_max_position_embeddings": 32})),
            lengths=(13, 21, 6, 18), config_v4=True),
        # Queries from a latent of their own; values narrower than keys. Eight experts in four groups, of which two are
        # taken by their two best ones with the bias; weights are sigmoids over their sum, times 2.5.
        Case("deepseek-v3-tiny", DeepseekV3Config(**common(
            vocab_size=73, hidden_size=32, intermediate_size=44, moe_intermediate_size=12, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=8,
            routed_scaling_factor=2.5, kv_lora_rank=12, q_lora_rank=14, qk_rope_head_dim=6, v_head_dim=8,
            qk_nope_head_dim=7, n_group=4, topk_group=2, num_experts_per_tok=3, first_k_dense_replace=1,
            norm_topk_prob=True, rms_norm_eps=1e-5, max_position_embeddings=128, num_mtp_layers=0,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0})),
            lengths=(9, 22, 5, 16, 11)),
        # Half of a head turns; biases of q, k and v and none behind o_proj; queries and keys are normed. Experts as in
        # DeepSeek-V3, behind a first dense layer.
        Case("glm4-moe-tiny", Glm4MoeConfig(**common(
            vocab_size=73, hidden_size=32, intermediate_size=44, moe_intermediate_size=12, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, head_dim=12, attention_bias=True, use_qk_norm=True,
            n_shared_experts=1, n_routed_experts=8, routed_scaling_factor=1.5, n_group=4, topk_group=2,
            num_experts_per_tok=3, first_k_dense_replace=1, norm_topk_prob=True, rms_norm_eps=1e-5,
            max_position_embeddings=128, num_mtp_layers=0,
            rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5})),
            lengths=(10, 21, 6, 17, 8), config_v4=True),
        # The window in the first layer; sinks; biases everywhere; gates and ups that are clamped. Of five pairs of a head one
        # keeps its frequency, and where the others begin to be divided is no whole pair.
        Case("gpt-oss-tiny", GptOssConfig(**common(
            vocab_size=75, hidden_size=32, intermediate_size=12, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=10, num_local_experts=4, num_experts_per_tok=2, swiglu_limit=0.9,
            sliding_window=8, rms_norm_eps=1e-5, max_position_embeddings=128,
            rope_parameters={"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 4.0,
                             "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 32})),
            lengths=(11, 20, 7, 18), config_v4=True),
        # q, k and v in one matrix, gate and up in another; three quarters of a head turn, and a window in every layer.
        Case("phi3-tiny", Phi3Config(**common(
            vocab_size=77, hidden_size=32, intermediate_size=44, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, sliding_window=9, rms_norm_eps=1e-5, max_position_embeddings=128,
            original_max_position_embeddings=128,
            rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.75})),
            lengths=(12, 19, 8, 15), config_v4=True),
        # Without a rotation softmax ignores a key's bias altogether: its gradient is rounding alone. An eps far above
        # that keeps AdamW from making steps of it.
        Case("gpt2-tiny", GPT2Config(**common(
            vocab_size=69, n_embd=36, n_inner=44, n_layer=3, n_head=4, n_positions=45)),
            lengths=(17, 5, 21, 14), eps=1e-3),
    ]


# ---- random weights and tokens -------------------------------------------------------------------------------------

def build(config, rng):
    """A transformers model whose every parameter is drawn from `rng` (numpy's: the same numbers on any CPU)."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager",
                                             experts_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.from_numpy(rng.standard_normal(tuple(parameter.shape)).astype(np.float32))
            if "norm" in name or (".ln_" in name and name.endswith(".weight")):  # Gemma's multiply by 1 + weight
                parameter.copy_((0.0 if config.model_type.startswith("gemma") else 1.0) + NORM_STD * noise)
            elif name.endswith((".bias", "_bias")):
                parameter.copy_(BIAS_STD * noise)
            elif name.endswith(".sinks"):
                parameter.copy_(noise)  # as a score
            else:
                parameter.copy_((EMBEDDING_STD if any(t in name for t in ("embed_tokens", ".wte.", ".wpe.")) else LINEAR_STD) * noise)
        for name, buffer in stored_buffers(model).items():
            buffer.copy_(BIAS_STD * torch.from_numpy(rng.standard_normal(tuple(buffer.shape)).astype(np.float32)))
    return model


def stored_buffers(model):
    """What files hold beside parameters and no optimizer steps: DeepSeek-V3's biases of router scores."""
    kept = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def rotary_of(model):
    """None: positions are learned."""
    return model.model.rotary_emb if hasattr(model, "model") else None


def turning_of(rotary, layer_type):
    """The table of a layer's rotation (Gemma-3 has one for each type of layer), and what its cosines and sines are times."""
    prefix = layer_type + "_" if hasattr(rotary, layer_type + "_inv_freq") else ""
    return getattr(rotary, prefix + "inv_freq"), getattr(rotary, prefix + "attention_scaling")


def load(folder, dtype=torch.float32):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager",
                                                 experts_implementation="eager").eval()
    if rotary_of(model) and turning_of(rotary_of(model), "full_attention")[0].dtype != torch.float32:
        raise RuntimeError("transformers no longer keeps inv_freq in fp32; the bf16 goldens would mean something else")
    return model


def as_in_files(tensors, config):
    """By the names that files have: transformers stacks a layer's experts in memory, gate above up in one matrix."""
    if config.model_type in ("gpt_oss", "phi3"):  # as in memory
        return tensors
    mixtral = config.model_type == "mixtral"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    out = {}
    for name, tensor in tensors.items():
        block, expert, what = name.partition(".mlp.experts.")
        experts = block + (".block_sparse_moe.experts." if mixtral else ".mlp.experts.")
        if not expert:
            out[name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name] = tensor
        for i, one in enumerate(tensor if expert else []):
            parts = {gate: one.chunk(2)[0], up: one.chunk(2)[1]} if what == "gate_up_proj" else {down: one}
            out |= {f"{experts}{i}.{part}.weight": t.clone() for part, t in parts.items()}
    return out


def draw_tokens(rng, vocab_size, lengths):
    """Uniform ids; the first and the last id of the vocabulary are always among them."""
    tokens = rng.integers(0, vocab_size, size=sum(lengths))
    tokens[1], tokens[-2] = 0, vocab_size - 1
    return torch.from_numpy(tokens.astype(np.int32)), torch.tensor(np.cumsum((0,) + lengths), dtype=torch.int32)


def split(packed, cu_seqlens):
    return [packed[a:b] for a, b in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist())]


# ---- forward, loss, training, generation ---------------------------------------------------------------------------

def hf_logits(model, sequences):
    """(T, V): every sequence run on its own, positions from 0."""
    return torch.cat([model(input_ids=ids[None].long(), use_cache=False).logits[0] for ids in sequences])


def phi3_parts(weights, config):
    """By Llama's names: rows of queries, keys, values; of gates, ups."""
    head = config.hidden_size // config.num_attention_heads
    queries, keys = head * config.num_attention_heads, head * config.num_key_value_heads
    out = {}
    for i in range(config.num_hidden_layers):
        attention, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        qkv = weights[attention + "qkv_proj.weight"].split((queries, keys, keys))
        gate_up = weights[mlp + "gate_up_proj.weight"].chunk(2)
        out |= {f"{attention}{part}_proj.weight": t for part, t in zip("qkv", qkv)}
        out |= {f"{mlp}{part}_proj.weight": t for part, t in zip(("gate", "up"), gate_up)}
    return out


def plain_logits(weights, config, rotary, sequences, margins):
    """(T, V): the same model in the dtype of `weights`, every operation of it, from the formulas.

    `rotary` has transformers' fp32 tables, here widened: the angles belong to the model's definition, as does the amplitude
    of their cosines and sines. What decides a token's experts is added to `margins`.
    """
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    gemma = config.model_type.startswith("gemma")
    turning = {kind: (table.double(), amplitude) for kind in ("full_attention", "sliding_attention")
               for table, amplitude in [turning_of(rotary, kind)]}
    types = getattr(config, "layer_types", None) or [
        "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    ] * config.num_hidden_layers
    if config.model_type == "phi3":
        weights = weights | phi3_parts(weights, config)
    projection = weights.get("model.layers.0.self_attn.q_proj.weight")  # DeepSeek has a scale of its own
    divisor = config.query_pre_attn_scalar if gemma else None if projection is None else projection.shape[0] / heads

    def norm(x, name):
        weight = weights[name + ".weight"] + (1.0 if gemma else 0.0)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps) * weight

    def capped(x, cap):
        return x if cap is None else cap * torch.tanh(x / cap)

    def activated(gate):
        if not gemma:
            return torch.nn.functional.silu(gate)
        return 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))

    def linear(x, name):
        y = x @ weights[name + ".weight"].T
        return y + weights[name + ".bias"] if name + ".bias" in weights else y

    def rotate(x_LHE, kind):
        inv_freq, amplitude = turning[kind]
        angle_LE = torch.arange(len(x_LHE), dtype=inv_freq.dtype)[:, None] * torch.cat((inv_freq, inv_freq))[None]
        part_LHE, rest_LHE = x_LHE[..., :2 * len(inv_freq)], x_LHE[..., 2 * len(inv_freq):]  # of GLM a part turns
        first, second = part_LHE.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)  # halves, not even-odd pairs
        part_LHE = amplitude * (part_LHE * angle_LE.cos()[:, None] + turned * angle_LE.sin()[:, None])
        return torch.cat((part_LHE, rest_LHE), dim=-1)

    def mlp_of(h_LD, mlp):
        gate, up = linear(h_LD, mlp + ".gate_proj"), linear(h_LD, mlp + ".up_proj")
        return linear(activated(gate) * up, mlp + ".down_proj")

    def experts_of(h_LD, mlp):
        chosen = config.num_experts_per_tok
        scores_LX = linear(h_LD, mlp + ".gate")
        sorted_LX = scores_LX.detach().sort(descending=True).values
        margins.append((sorted_LX[:, chosen - 1] - sorted_LX[:, chosen]).min().item())
        share_LX = scores_LX.softmax(-1)
        kept_LX = torch.zeros_like(share_LX).scatter(-1, scores_LX.topk(chosen).indices, 1.0)
        share_LX = share_LX * kept_LX
        if getattr(config, "norm_topk_prob", True):  # Mixtral has no such key
            share_LX = share_LX / share_LX.sum(-1, keepdim=True)
        gate_up, down = weights[mlp + ".experts.gate_up_proj"], weights[mlp + ".experts.down_proj"]
        out_LD = torch.zeros_like(h_LD)
        for x in range(len(down)):  # every token through every expert
            gate, up = (h_LD @ gate_up[x].T).chunk(2, dim=-1)
            out_LD = out_LD + share_LX[:, x, None] * ((torch.nn.functional.silu(gate) * up) @ down[x].T)
        return out_LD

    def gpt_oss_experts_of(h_LD, mlp):
        logits_LX = linear(h_LD, mlp + ".router")
        kept_LX = best(logits_LX, config.num_experts_per_tok)
        share_LX = logits_LX.masked_fill(kept_LX == 0, -math.inf).softmax(-1)
        out_LD = torch.zeros_like(h_LD)
        for x in range(config.num_local_experts):  # matrices are stored (in, out), gates in even columns
            both = h_LD @ weights[mlp + ".experts.gate_up_proj"][x] + weights[mlp + ".experts.gate_up_proj_bias"][x]
            gate, up = both[:, 0::2].clamp(max=config.swiglu_limit), both[:, 1::2].clamp(-config.swiglu_limit, config.swiglu_limit)
            inner = (up + 1) * gate * torch.sigmoid(config.swiglu_alpha * gate)
            y_LD = inner @ weights[mlp + ".experts.down_proj"][x] + weights[mlp + ".experts.down_proj_bias"][x]
            out_LD = out_LD + share_LX[:, x, None] * y_LD
        return out_LD

    def best(score, count, margin=True):
        """The `count` best of each row as a mask; the distance to the next one is added to margins."""
        order = score.detach().sort(descending=True, dim=-1).values
        if margin and count < score.shape[-1]:
            margins.append((order[:, count - 1] - order[:, count]).min().item())
        return torch.zeros_like(score).scatter(-1, score.topk(count, dim=-1).indices, 1.0).detach()

    def deepseek_experts_of(h_LD, mlp):
        v3 = config.model_type in ("deepseek_v3", "glm4_moe")
        logits_LX = linear(h_LD, mlp + ".gate")
        share_LX = logits_LX.sigmoid() if v3 else logits_LX.softmax(-1)
        score_LX = share_LX + weights[mlp + ".gate.e_score_correction_bias"] if v3 else share_LX
        groups = config.n_group if v3 or config.topk_method == "group_limited_greedy" else 1
        by_group = score_LX.unflatten(-1, (groups, -1))  # (L, groups, experts of one)
        rating = by_group.topk(2, dim=-1).values.sum(-1) if v3 else by_group.amax(-1)
        open_LX = best(rating, config.topk_group)[:, :, None].expand_as(by_group).flatten(1)
        kept_LX = best(score_LX.masked_fill(open_LX == 0, -math.inf), config.num_experts_per_tok)
        share_LX = share_LX * kept_LX
        if v3 and config.norm_topk_prob:
            share_LX = share_LX / (share_LX.sum(-1, keepdim=True) + 1e-20)
        share_LX = share_LX * config.routed_scaling_factor
        gate_up, down = weights[mlp + ".experts.gate_up_proj"], weights[mlp + ".experts.down_proj"]
        out_LD = mlp_of(h_LD, mlp + ".shared_experts")
        for x in range(len(down)):
            gate, up = (h_LD @ gate_up[x].T).chunk(2, dim=-1)
            out_LD = out_LD + share_LX[:, x, None] * ((torch.nn.functional.silu(gate) * up) @ down[x].T)
        return out_LD

    def latent_attention_of(h_LD, attention, future_LL):
        """Every number of a rotated part turns with its neighbour: (x0, x1) by the first angle, and so on."""
        nope, turned, eps = config.qk_nope_head_dim, config.qk_rope_head_dim, 1e-6  # DeepseekV2RMSNorm's default
        inv_freq, amplitude = turning["full_attention"]
        angle_LE = torch.arange(len(h_LD), dtype=inv_freq.dtype)[:, None] * inv_freq[None]

        def latent_norm(x, name):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weights[name + ".weight"]

        def turn(x_LHE):
            first, second = x_LHE[..., 0::2], x_LHE[..., 1::2]
            angle = angle_LE[:, None]
            pair = (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin())
            return amplitude * torch.stack(pair, dim=-1).flatten(-2)

        if attention + ".q_proj.weight" in weights:
            q = linear(h_LD, attention + ".q_proj")
        else:
            q = linear(latent_norm(linear(h_LD, attention + ".q_a_proj"), attention + ".q_a_layernorm"),
                       attention + ".q_b_proj")
        q_LHE = q.unflatten(-1, (heads, -1))
        q_LHE = torch.cat((q_LHE[..., :nope], turn(q_LHE[..., nope:])), dim=-1)
        kept = linear(h_LD, attention + ".kv_a_proj_with_mqa")
        latent = latent_norm(kept[:, :-turned], attention + ".kv_a_layernorm")
        key_LHE = turn(kept[:, None, -turned:]).expand(-1, heads, -1)  # one for all heads
        kv_LHE = linear(latent, attention + ".kv_b_proj").unflatten(-1, (heads, -1))
        k_LHE, v_LHE = torch.cat((kv_LHE[..., :nope], key_LHE), dim=-1), kv_LHE[..., nope:]
        rope = config.rope_parameters
        scale = (nope + turned) ** -0.5
        if rope["rope_type"] != "default" and rope.get("mscale_all_dim"):
            scale = scale * (0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1.0) ** 2
        scores_HLL = torch.einsum("qhe,khe->hqk", q_LHE, k_LHE) * scale
        weights_HLL = scores_HLL.masked_fill(future_LL, -math.inf).softmax(-1)
        return linear(torch.einsum("hqk,khe->qhe", weights_HLL, v_LHE).flatten(1), attention + ".o_proj")

    deepseek = config.model_type.startswith("deepseek")

    def forward(ids_L):
        length = len(ids_L)
        future_LL = torch.ones(length, length, dtype=torch.bool).triu(1)
        x_LD = weights["model.embed_tokens.weight"][ids_L.long()]
        if gemma:
            x_LD = x_LD * math.sqrt(config.hidden_size)
        for i in range(config.num_hidden_layers):
            layer, attention, mlp = f"model.layers.{i}", f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
            h_LD = norm(x_LD, layer + ".input_layernorm")
            if deepseek:
                x_LD = x_LD + latent_attention_of(h_LD, attention, future_LL)
                h_LD = norm(x_LD, layer + ".post_attention_layernorm")
                x_LD = x_LD + (deepseek_experts_of if mlp + ".gate.weight" in weights else mlp_of)(h_LD, mlp)
                continue
            q_LHE = linear(h_LD, attention + ".q_proj").unflatten(-1, (heads, -1))
            k_LKE = linear(h_LD, attention + ".k_proj").unflatten(-1, (kv_heads, -1))
            v_LKE = linear(h_LD, attention + ".v_proj").unflatten(-1, (kv_heads, -1))
            if attention + ".q_norm.weight" in weights:  # Qwen3: per head, before the rotation
                q_LHE, k_LKE = norm(q_LHE, attention + ".q_norm"), norm(k_LKE, attention + ".k_norm")
            q_LHE, k_LKE = rotate(q_LHE, types[i]), rotate(k_LKE, types[i])
            # Query head h reads key-value head h // (H / K).
            k_LHE, v_LHE = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k_LKE, v_LKE))
            scores_HLL = torch.einsum("qhe,khe->hqk", q_LHE, k_LHE) / math.sqrt(divisor)
            scores_HLL = capped(scores_HLL, getattr(config, "attn_logit_softcapping", None))
            unseen_LL = future_LL
            if types[i] == "sliding_attention":  # itself and the tokens before it, as many as the window has
                unseen_LL = future_LL | torch.ones(length, length, dtype=torch.bool).tril(-config.sliding_window)
            scores_HLL = scores_HLL.masked_fill(unseen_LL, -math.inf)
            sinks = weights.get(attention + ".sinks")  # one more score of each query head, with a value of zeros
            if sinks is not None:
                scores_HLL = torch.cat((scores_HLL, sinks[:, None, None].expand(-1, length, 1)), dim=-1)
            weights_HLL = scores_HLL.softmax(-1)[..., :length]
            y_LD = linear(torch.einsum("hqk,khe->qhe", weights_HLL, v_LHE).flatten(1), attention + ".o_proj")
            if gemma:
                x_LD = x_LD + norm(y_LD, layer + ".post_attention_layernorm")
                y_LD = mlp_of(norm(x_LD, layer + ".pre_feedforward_layernorm"), mlp)
                x_LD = x_LD + norm(y_LD, layer + ".post_feedforward_layernorm")
                continue
            x_LD = x_LD + y_LD
            h_LD = norm(x_LD, layer + ".post_attention_layernorm")
            if mlp + ".router.weight" in weights:
                x_LD = x_LD + gpt_oss_experts_of(h_LD, mlp)
                continue
            routed = deepseek_experts_of if config.model_type == "glm4_moe" else experts_of
            x_LD = x_LD + (routed if mlp + ".gate.weight" in weights else mlp_of)(h_LD, mlp)
        tied = "lm_head.weight" not in weights
        logits_LV = norm(x_LD, "model.norm") @ weights["model.embed_tokens.weight" if tied else "lm_head.weight"].T
        return capped(logits_LV, getattr(config, "final_logit_softcapping", None))

    return torch.cat([forward(ids) for ids in sequences])


def plain_gpt2_logits(weights, config, sequences):
    """As plain_logits, of GPT-2. Matrices are stored (in, out), those of q, k and v as one."""

    def norm(x, name):
        centred = x - x.mean(-1, keepdim=True)
        deviation = (centred.pow(2).mean(-1, keepdim=True) + config.layer_norm_epsilon).sqrt()
        return centred / deviation * weights[name + ".weight"] + weights[name + ".bias"]

    def linear(x, name):
        return x @ weights[name + ".weight"] + weights[name + ".bias"]

    def gelu(x):
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    def forward(ids_L):
        length = len(ids_L)
        future_LL = torch.ones(length, length, dtype=torch.bool).triu(1)
        x_LD = weights["transformer.wte.weight"][ids_L.long()] + weights["transformer.wpe.weight"][:length]
        for i in range(config.n_layer):
            layer = f"transformer.h.{i}"
            qkv = linear(norm(x_LD, layer + ".ln_1"), layer + ".attn.c_attn").chunk(3, dim=-1)
            q_LHE, k_LHE, v_LHE = (t.unflatten(-1, (config.n_head, -1)) for t in qkv)
            scores_HLL = torch.einsum("qhe,khe->hqk", q_LHE, k_LHE) / math.sqrt(config.n_embd / config.n_head)
            weights_HLL = scores_HLL.masked_fill(future_LL, -math.inf).softmax(-1)
            x_LD = x_LD + linear(torch.einsum("hqk,khe->qhe", weights_HLL, v_LHE).flatten(1), layer + ".attn.c_proj")
            inner = gelu(linear(norm(x_LD, layer + ".ln_2"), layer + ".mlp.c_fc"))
            x_LD = x_LD + linear(inner, layer + ".mlp.c_proj")
        return norm(x_LD, "transformer.ln_f") @ weights["transformer.wte.weight"].T

    return torch.cat([forward(ids) for ids in sequences])


def next_token_logprobs(logits, tokens, cu_seqlens):
    """(T - S): log p(token t+1 | tokens <= t) for every position but the last of each sequence, in packed order."""
    last = cu_seqlens[1:].long() - 1
    keep = torch.ones(len(tokens), dtype=torch.bool).index_fill(0, last, False)
    targets = tokens.long().roll(-1)
    return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0][keep]


def train(parameters, logits_of, tokens, cu_seqlens, o, added=lambda: 0.0):
    """NUM_STEPS AdamW steps on one batch. Returns the first step's gradients, losses and pre-clip norms per step, and
    the loss after the last step. `parameters` (name → tensor) are updated in place by the optimizer `o`; decay applies to
    all of them. `added`: to the loss, behind a call of `logits_of`."""
    optimizer = torch.optim.AdamW(parameters.values(), lr=o["lr"], betas=(o["beta1"], o["beta2"]), eps=o["eps"],
                                  weight_decay=o["weight_decay"], foreach=False)
    sequences, losses, norms, first_grads = split(tokens, cu_seqlens), [], [], None
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = -next_token_logprobs(logits_of(sequences), tokens, cu_seqlens).mean() + added()
        loss.backward()
        if first_grads is None:
            first_grads = {name: p.grad.clone() for name, p in parameters.items()}
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), o["max_grad_norm"], foreach=False)
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
    with torch.no_grad():
        final = (-next_token_logprobs(logits_of(sequences), tokens, cu_seqlens).mean() + added()).item()
    return first_grads, losses, norms, final


@torch.no_grad()
def generate(model, prompts):
    """Greedy continuation by recomputing the whole sequence; must agree with transformers' cached `generate`.
    Returns the new ids per prompt and the smallest top-1 to top-2 distance of any choice."""
    generated, margin = [], math.inf
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(NUM_NEW_TOKENS):
            top = hf_logits(model, [torch.tensor(ids)])[-1].topk(2)
            margin = min(margin, (top.values[0] - top.values[1]).item())
            ids.append(top.indices[0].item())
        cached = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                                do_sample=False, max_new_tokens=NUM_NEW_TOKENS)
        if cached[0].tolist() != ids and margin >= MIN_MARGIN:
            raise RuntimeError(f"cached generation differs from recomputation for prompt {prompt}")
        generated.append(ids[len(prompt):])
    return generated, margin


# ---- one case ------------------------------------------------------------------------------------------------------

def gap(value, reference):
    """max|Δ| / max|reference|, the measure of DESIGN.md's tolerances on logits and gradients."""
    return ((value.double() - reference.double()).abs().max() / reference.double().abs().max()).item()


def compute(case, folder, tokens, cu_seqlens, prompts):
    """Everything golden about the model saved in `folder`: (tensors for golden.safetensors, values for golden.json)."""
    model, sequences = load(folder), split(tokens, cu_seqlens)
    rotary = rotary_of(model)
    tables = {kind: turning_of(rotary, kind)[0].clone() for kind in ("full_attention", "sliding_attention")} if rotary else {}
    generated, margin = generate(model, prompts)
    with torch.no_grad():
        logits = hf_logits(model, sequences)
        logprobs = next_token_logprobs(logits, tokens, cu_seqlens)
    parameters = dict(model.named_parameters())  # a tied tensor comes once, as model.embed_tokens.weight
    start = {name: p.detach().clone() for name, p in parameters.items()}
    grads, losses, norms, final = train(parameters, lambda s: hf_logits(model, s), tokens, cu_seqlens, case.optimizer)

    wide = {name: p.double().requires_grad_() for name, p in start.items()}
    fixed = {name: buffer.double() for name, buffer in stored_buffers(model).items()}
    margins = []
    plain = lambda s: (plain_logits(wide | fixed, model.config, rotary, s, margins)
                       if rotary else plain_gpt2_logits(wide, model.config, s))
    with torch.no_grad():
        logits_f64 = plain(sequences)
        plain([torch.tensor(p + g) for p, g in zip(prompts, generated)])
    grads_f64, losses_f64, norms_f64, final_f64 = train(wide, plain, tokens, cu_seqlens, case.optimizer)

    tensors = {"input_ids": tokens, "cu_seqlens": cu_seqlens, "logits": logits, "logprobs": logprobs}
    tensors |= {"inv_freq": tables["full_attention"]} if rotary else {}
    if tables and not torch.equal(tables["full_attention"], tables["sliding_attention"]):
        tensors["inv_freq_window"] = tables["sliding_attention"]
    files = lambda named: as_in_files({name: t.detach() for name, t in named.items()}, model.config)
    grads, grads_f64, after, after_f64, start = map(files, (grads, grads_f64, parameters, wide, start))
    tensors |= {f"grad.{name}": g for name, g in grads.items()}
    tensors |= {f"after5.{name}": p.clone() for name, p in after.items()}
    floors = {"logits": gap(logits, logits_f64), "grads": max(gap(grads[n], grads_f64[n]) for n in grads)}
    moved = {n: (after_f64[n] - start[n].double()) for n in start}  # fp64 update of each tensor
    floors["updates"] = {n: ((after[n].double() - after_f64[n]).norm() / moved[n].norm()).item() for n in start}
    if case.precisions:
        with torch.no_grad():
            tensors["logits_bf16"] = hf_logits(load(folder, torch.bfloat16), sequences).float()
        tensors["logits_f64"] = logits_f64
        floors["logits_bf16"] = gap(tensors["logits_bf16"], logits_f64)
        narrow = files(bf16_gradients(folder, sequences, tokens, cu_seqlens))
        floors["grads_bf16"] = max(gap(narrow[n].float(), grads_f64[n]) for n in narrow)
    values = {
        "loss": losses[0],
        "steps": {"losses": losses, "grad_norms": norms, "final_loss": final, "losses_f64": losses_f64,
                  "grad_norms_f64": norms_f64, "final_loss_f64": final_f64},
        "generation": {"num_new_tokens": NUM_NEW_TOKENS, "prompts": prompts, "new_tokens": generated,
                       "min_margin": margin},
        "floors": floors,
    }
    if margins:
        values["routing"] = {"min_margin": min(margins)}
    return tensors, values


def bf16_gradients(folder, sequences, tokens, cu_seqlens):
    """Of the first step, as autograd leaves them for a model in bf16: in bf16."""
    model = load(folder, torch.bfloat16)
    (-next_token_logprobs(hf_logits(model, sequences).float(), tokens, cu_seqlens).mean()).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def to_v4(config):
    """config.json as transformers 4 spelled it: rope_theta and rope_scaling on the top level, torch_dtype for dtype."""
    old = dict(config)
    rope = dict(old.pop("rope_parameters"))
    old["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        old["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    old["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    old["torch_dtype"] = old.pop("dtype")
    del old["transformers_version"]  # no version 4 wrote this file
    return dict(sorted(old.items()))


def save_model(model, folder, **options):
    model.save_pretrained(folder, **options)
    (folder / "generation_config.json").unlink()  # holds no more than the library's version


def write_json(path, document):
    path.write_text(json.dumps(document, indent=1) + "\n")


def write_case(case, out):
    folder = out / case.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for seed in range(100):
        rng = np.random.default_rng([seed, *case.name.encode()])
        model = build(case.config, rng)
        tokens, cu_seqlens = draw_tokens(rng, case.config.vocab_size, case.lengths)
        prompts = [rng.integers(0, case.config.vocab_size, size=n).tolist() for n in PROMPT_LENGTHS]
        save_model(model, folder)
        tensors, values = compute(case, folder, tokens, cu_seqlens, prompts)
        taken = all((t.flatten(1).any(1).all() if ".experts." in name else t.any())  # by each expert some token
                    for name, t in tensors.items() if name.startswith("grad."))
        if (taken and values["generation"]["min_margin"] >= MIN_MARGIN
                and max(values["floors"]["updates"].values()) <= case.update_floor
                and values.get("routing", {"min_margin": math.inf})["min_margin"] >= MIN_ROUTING_MARGIN):
            break
    else:
        raise RuntimeError(f"{case.name}: no seed gives clear choices and clear updates")
    parameters = {name: list(p.shape) for name, p in
                  as_in_files(dict(model.named_parameters()) | stored_buffers(model), case.config).items()}
    if set(load_file(folder / "model.safetensors")) != set(parameters):
        raise RuntimeError(f"{case.name}: model.safetensors does not hold each parameter exactly once")
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "golden.safetensors")
    write_json(folder / "golden.json", {
        "schema": SCHEMA, "model": case.name, "seed": seed, "versions": versions(),
        "num_parameters": sum(math.prod(s) for s in parameters.values()), "parameters": parameters,
        "input": {"lengths": case.lengths, "num_tokens": sum(case.lengths),
                  "num_predicted": sum(case.lengths) - len(case.lengths)},
        "optimizer": case.optimizer | {"num_steps": NUM_STEPS, "decay_applies_to": "all parameters",
                                  "clip": "global L2 norm: every gradient times min(1, max_grad_norm / (norm + 1e-6))"},
        **values})
    if case.config_v4:
        write_json(folder / "config.v4.json", to_v4(json.loads((folder / "config.json").read_text())))
    if case.name + "-sharded" == SHARDED:
        shutil.rmtree(out / SHARDED, ignore_errors=True)
        save_model(model, out / SHARDED, max_shard_size=MAX_SHARD_SIZE)


def versions():
    return {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
            "safetensors": safetensors.__version__, "numpy": np.__version__}


# ---- parameters that do not train ----------------------------------------------------------------------------------

# Of a case's model, patterns (of the names that files have) of parameters with requires_grad=False.
FROZEN = {
    "llama-gqa": ["model.embed_tokens.*", "model.layers.0.*", "model.norm.weight"],
    "llama-tied": ["model.embed_tokens.weight", "*.mlp.*"],  # the head, too
    "qwen3-norm": ["lm_head.weight", "*.self_attn.*"],
    "mixtral-tiny": ["*.experts.*", "*.1.input_layernorm.weight"],
    "deepseek-v3-tiny": ["*.kv_b_proj.*", "*.1.self_attn.q_a_*", "*.2.self_attn.kv_a_layernorm.weight", "*.shared_experts.*"],
    "gpt2-tiny": ["transformer.w?e.weight", "*.0.ln_1.*", "*.1.*"],
}


def compute_frozen(case, folder, tokens, cu_seqlens):
    """What five steps make of the model in `folder` where some of its parameters do not train: of the others gradients and
    values; losses and norms."""
    model = load(folder)
    rotary, named = rotary_of(model), dict(model.named_parameters())

    def trains(name):
        in_files = as_in_files({name: named[name].detach()}, model.config)
        return not all(any(fnmatch.fnmatchcase(n, p) for p in FROZEN[case.name]) for n in in_files)

    trained = {name: p for name, p in named.items() if trains(name)}
    start = {name: p.detach().clone() for name, p in named.items()}
    for name, p in named.items():
        p.requires_grad_(name in trained)
    grads, losses, norms, final = train(trained, lambda s: hf_logits(model, s), tokens, cu_seqlens, case.optimizer)
    wide = {name: p.double().requires_grad_(name in trained) for name, p in start.items()}
    wide_trained = {name: wide[name] for name in trained}
    fixed = {name: buffer.double() for name, buffer in stored_buffers(model).items()}
    plain = lambda s: (plain_logits(wide | fixed, model.config, rotary, s, [])
                       if rotary else plain_gpt2_logits(wide, model.config, s))
    _, losses_f64, norms_f64, final_f64 = train(wide_trained, plain, tokens, cu_seqlens, case.optimizer)
    moved = {n: wide[n].detach() - start[n].double() for n in trained}
    floors = {"updates": {n: ((trained[n].detach() - wide[n].detach()).norm() / moved[n].norm()).item() for n in trained}}
    files = lambda tensors: as_in_files({name: t.detach() for name, t in tensors.items()}, model.config)
    tensors = {"input_ids": tokens, "cu_seqlens": cu_seqlens}
    tensors |= {f"grad.{name}": g for name, g in files(grads).items()}
    tensors |= {f"after5.{name}": p.clone() for name, p in files(trained).items()}
    return tensors, {"loss": losses[0], "floors": floors,
                     "steps": {"losses": losses, "grad_norms": norms, "final_loss": final, "losses_f64": losses_f64,
                               "grad_norms_f64": norms_f64, "final_loss_f64": final_f64}}


def frozen_case(case, out, check):
    """Writes frozen-NAME, or returns complaints about it."""
    base, folder = out / case.name, out / f"frozen-{case.name}"
    stored = load_file(base / "golden.safetensors")
    tensors, values = compute_frozen(case, base, stored["input_ids"], stored["cu_seqlens"])
    floor = max(values["floors"]["updates"].values())
    if floor > MAX_UPDATE_FLOOR:
        raise RuntimeError(f"frozen-{case.name}: rounding decides updates ({floor:.1e})")
    if not check:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "golden.safetensors")
        write_json(folder / "golden.json", {"schema": SCHEMA, "model": case.name, "frozen": FROZEN[case.name],
                                            "versions": versions(), "optimizer": case.optimizer | {"num_steps": NUM_STEPS}}
                   | values)
        return []
    kept, golden = load_file(folder / "golden.safetensors"), json.loads((folder / "golden.json").read_text())
    complaints = [] if set(kept) == set(tensors) else [f"frozen-{case.name}: names differ"]
    for name in set(kept) & set(tensors):
        if gap(tensors[name], kept[name]) > 1e-4:
            complaints.append(f"frozen-{case.name}: {name} differs")
    if any(abs(a - b) > 1e-5 * abs(b) for a, b in zip(values["steps"]["losses"], golden["steps"]["losses"], strict=True)):
        complaints.append(f"frozen-{case.name}: losses differ")
    return complaints


# ---- losses of routers ---------------------------------------------------------------------------------------------

# Of a case's model: coefficients of what its routers add to the loss.
ROUTER_LOSSES = {"mixtral-tiny": (0.3, 0.0), "qwen3-moe-tiny": (0.3, 0.02), "deepseek-v3-tiny": (0.3, 0.02)}


def router_logits_and_losses(model, sequences, balance, z):
    """Logits as hf_logits, and what routers add: a mean over layers with experts, in each a mean over sequences by the
    tokens that they predict. Of softmax routers transformers' own load_balancing_loss_func, of one layer and one
    sequence; of sigmoids DeepSeek-V3's report, section 2.1.2, in the same units."""
    routed, found, logits = [], 0.0, []
    hooks = [m.register_forward_hook(lambda m, args, out: routed.append((out[0], out[2])))  # logits, choices
             for name, m in model.named_modules() if name.endswith((".gate", ".router"))]
    top_k = model.config.num_experts_per_tok
    predicted = sum(len(ids) - 1 for ids in sequences)
    for ids in sequences:
        routed.clear()
        logits.append(model(input_ids=ids[None].long(), use_cache=False).logits[0])
        for scores, chosen in routed:
            if model.config.model_type == "deepseek_v3":
                share = scores.sigmoid() / scores.sigmoid().sum(-1, keepdim=True)
                counts = torch.bincount(chosen.reshape(-1), minlength=scores.shape[1]) / len(ids)
                spread = scores.shape[1] * (counts * share.mean(0)).sum()
            else:
                spread = load_balancing_loss_func((scores,), scores.shape[1], top_k)
            each = balance * spread + z * scores.float().logsumexp(-1).square().mean()
            found = found + each * (len(ids) - 1) / predicted / len(routed)
    for hook in hooks:
        hook.remove()
    return torch.cat(logits), found


def router_loss_case(case, out, check):
    """Writes aux-NAME, or returns complaints about it."""
    base, folder = out / case.name, out / f"aux-{case.name}"
    stored = load_file(base / "golden.safetensors")
    tokens, cu_seqlens, coefficients = stored["input_ids"], stored["cu_seqlens"], ROUTER_LOSSES[case.name]
    model, added = load(base), []

    def logits_of(sequences):
        logits, loss = router_logits_and_losses(model, sequences, *coefficients)
        added.append(loss)
        return logits

    parameters = {name: p for name, p in model.named_parameters()}
    grads, losses, norms, final = train(parameters, logits_of, tokens, cu_seqlens, case.optimizer, lambda: added[-1])
    files = lambda named: as_in_files({name: t.detach() for name, t in named.items()}, model.config)
    tensors = {"input_ids": tokens, "cu_seqlens": cu_seqlens}
    tensors |= {f"grad.{name}": g for name, g in files(grads).items()}
    tensors |= {f"after5.{name}": p.clone() for name, p in files(parameters).items()}
    steps = {"losses": losses, "grad_norms": norms, "final_loss": final}
    if not check:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "golden.safetensors")
        write_json(folder / "golden.json", {
            "schema": SCHEMA, "model": case.name, "versions": versions(), "loss": losses[0], "floors": {},
            "router_losses": {"aux": coefficients[0], "z": coefficients[1], "first": added[0].item()},
            "optimizer": case.optimizer | {"num_steps": NUM_STEPS}, "steps": steps})
        return []
    kept, golden = load_file(folder / "golden.safetensors"), json.loads((folder / "golden.json").read_text())
    complaints = [] if set(kept) == set(tensors) else [f"aux-{case.name}: names differ"]
    for name in set(kept) & set(tensors):
        if gap(tensors[name], kept[name]) > 1e-4:
            complaints.append(f"aux-{case.name}: {name} differs")
    if any(abs(a - b) > 1e-5 * abs(b) for a, b in zip(losses, golden["steps"]["losses"], strict=True)):
        complaints.append(f"aux-{case.name}: losses differ")
    return complaints


# ---- check ---------------------------------------------------------------------------------------------------------

def check_case(case, out):
    """Recomputes from the files alone. Returns complaints; other CPUs round differently, so floats get a tolerance."""
    folder, complaints = out / case.name, []
    stored, golden = load_file(folder / "golden.safetensors"), json.loads((folder / "golden.json").read_text())
    tensors, values = compute(case, folder, stored["input_ids"], stored["cu_seqlens"], golden["generation"]["prompts"])
    if set(tensors) != set(stored):
        complaints.append(f"names differ: {sorted(set(tensors) ^ set(stored))}")
    start = load_file(folder / "model.safetensors")
    worst, identical = {}, True
    for name in sorted(set(tensors) & set(stored)):
        kind = name.split(".")[0]
        if kind == "after5":  # compared by update, relative norm, as DESIGN.md's P3 asks
            base = start[name.removeprefix("after5.")]
            distance = ((tensors[name] - stored[name]).norm() / (stored[name] - base).norm()).item()
        else:
            distance = gap(tensors[name], stored[name])
        identical &= torch.equal(tensors[name], stored[name])
        worst[kind] = max(worst.get(kind, 0.0), distance)
    bounds = {"input_ids": 0.0, "cu_seqlens": 0.0, "grad": 1e-4, "after5": 1e-3, "logits_bf16": 5e-2}
    complaints += [f"{kind}: off by {d:.2e}" for kind, d in worst.items() if d > bounds.get(kind, 1e-5)]
    if values["generation"]["new_tokens"] != golden["generation"]["new_tokens"]:
        complaints.append("generated tokens differ")
    for key, bound in (("losses", 1e-5), ("losses_f64", 1e-9), ("grad_norms", 1e-4), ("grad_norms_f64", 1e-9)):
        for a, b in zip(values["steps"][key], golden["steps"][key], strict=True):
            if abs(a - b) > bound * abs(b):
                complaints.append(f"steps.{key}: {a!r} is not {b!r}")
    if case.config_v4:
        v4 = type(case.config)(**json.loads((folder / "config.v4.json").read_text()))
        if v4.rope_parameters != case.config.rope_parameters:
            complaints.append("config.v4.json reads back as another rope")
    if case.name + "-sharded" == SHARDED:
        index = json.loads((out / SHARDED / "model.safetensors.index.json").read_text())
        for name, file in index["weight_map"].items():
            if not torch.equal(load_file(out / SHARDED / file)[name], start[name]):
                complaints.append(f"{SHARDED}: {name} differs")
        if set(index["weight_map"]) != set(start):
            complaints.append(f"{SHARDED}: names differ")
    floors = values["floors"]
    print(f"{case.name}: {'bit-identical' if identical else 'not bit-identical'}; "
          f"loss {values['loss']:.4f} -> {values['steps']['final_loss']:.4f}, "
          f"margin {values['generation']['min_margin']:.1e}; fp32 floor: logits {floors['logits']:.1e}, "
          f"grads {floors['grads']:.1e}, updates {max(floors['updates'].values()):.1e}")
    return [f"{case.name}: {c}" for c in complaints]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the goldens, tests/golden in the repository")
    parser.add_argument("--check", action="store_true", help="write nothing; recompute and compare")
    parser.add_argument("--only", help="this model alone")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    complaints = []
    for case in cases():
        if arguments.only not in (None, case.name):
            continue
        if not arguments.check:
            write_case(case, arguments.out)
        complaints += check_case(case, arguments.out)
        if case.name in FROZEN:
            complaints += frozen_case(case, arguments.out, arguments.check)
        if case.name in ROUTER_LOSSES:
            complaints += router_loss_case(case, arguments.out, arguments.check)
    for complaint in complaints:
        print("error: " + complaint, file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
