#!/usr/bin/env python3
"""An oracle from outside for GRPO: two steps that hotbunk ran, computed again by transformers and a plain torch loop.

    check_grpo.py [--hotbunk build/hotbunk] [LAYOUT ...]      exit 1 when something differs

From a run folder's own samples: problems, draws, rewards, advantages, log-probs (rollout, old, reference), loss, clipped
gradient norm, AdamW, weights after each step. Two mini-batches a step, so that the second one's ratios are not 1; in the
second step the reference is no longer the policy. Needs scripts/requirements-goldens.txt in a virtual environment.
"""
import argparse
import fnmatch
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.utils import logging

SEED, STEPS, PROMPTS, GROUP, MINI_BATCHES, DIGITS = 3, 2, 2, 4, 2, 3
LR, BETAS, EPS, DECAY, MAX_NORM, TEMPERATURE = 1e-2, (0.9, 0.99), 1e-8, 0.01, 0.5, 0.9
KL, CLIP_LOW, CLIP_HIGH = 0.1, 0.05, 0.08  # narrow, so that some tokens are clipped
SCENARIO = f"""
name: oracle
seed: {SEED}
steps: {STEPS}
checkpoint_every: 1
model: MODEL
cluster: {{gpu: local-cpu, nodes: 1, gpus_per_node: 1, ranks_per_device: 4, device_memory_mib: 64}}
placement: colocated
train: {{micro_batch_tokens: 16, precision: {{params: fp32, grads: fp32, master: fp32, moments: fp32}}, offload: sleep}}
optimizer: {{lr: {LR}, beta1: {BETAS[0]}, beta2: {BETAS[1]}, eps: {EPS}, weight_decay: {DECAY}, max_grad_norm: {MAX_NORM}, warmup_steps: 0}}
rollout: {{engine: hotbunk, layout: {{tp: 2, dp: 2}}, dtype: fp32, max_running_requests: 8, block_tokens: 4, temperature: {TEMPERATURE}}}
sync: {{mode: bucketed, bucket_mib: 1, transport: ipc, verify: true}}
algorithm: {{name: grpo, prompts: {PROMPTS}, samples_per_prompt: {GROUP}, mini_batches: {MINI_BATCHES}, reference: true,
            kl_coef: {KL}, clip_low: {CLIP_LOW}, clip_high: {CLIP_HIGH}}}
workload: {{prompt_tokens: {{mean: {DIGITS + 2}, max: {DIGITS + 2}, distribution: fixed}},
           response_tokens: {{mean: {DIGITS + 1}, max: {DIGITS + 1}, distribution: fixed}}}}
task: {{name: reverse, digits: {DIGITS}}}
"""
LAYOUTS = {
    "fsdp": {"train.engine": "fsdp2", "train.layout.dp": 4},
    "tp-sp": {"train.engine": "ddp", "train.layout.dp": 2, "train.layout.tp": 2, "train.layout.sp": "true"},
    "pipeline": {"train.engine": "zero1", "train.layout.dp": 2, "train.layout.pp": 2},
    "context": {"train.engine": "fsdp2", "train.layout.dp": 2, "train.layout.cp": 2},
    "ulysses": {"train.engine": "zero2", "train.layout.dp": 2, "train.layout.ulysses": 2},
    "smaller-mesh": {"train.engine": "fsdp2", "train.layout.dp": 4, "train.reshard_after_forward": 2},
    # As scenarios/frozen-cpu.yaml: some parameters have no gradient.
    "frozen": {"train.engine": "fsdp2", "train.layout.dp": 2, "train.layout.tp": 2, "train.layout.sp": "true",
               "train.frozen": "[model.embed_tokens.*, model.layers.0.*, '*.mlp.*']"},
    "zero-bubble": {"train.engine": "fsdp2", "train.layout.dp": 2, "train.layout.pp": 2, "train.pipeline_schedule": "zero-bubble"},
    # Of a mixture: experts over data ranks, and whole ones over tensor-parallel ones. An expert of few tokens has gradients
    # that are rounding alone, of which AdamW's eps keeps steps away.
    "moe-data": {"train.engine": "fsdp2", "train.layout.dp": 4, "train.layout.ep": 2, "optimizer.eps": 1e-5},
    "moe-tensor": {"train.engine": "zero1", "train.layout.dp": 2, "train.layout.tp": 2, "train.layout.ep": 2, "rollout.layout.ep": 2,
                   "optimizer.eps": 1e-5},
}


def uniform_word(purpose, a, b):
    """The first of Philox4x32-10's words at counter (a, b) (docs/rl.md)."""
    low = 0xFFFFFFFF
    mixed = (SEED ^ (0x9E3779B97F4A7C15 * purpose)) & 0xFFFFFFFFFFFFFFFF
    key, c = [mixed & low, mixed >> 32], [a & low, a >> 32, b & low, b >> 32]
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ key[0], p1 & low, (p0 >> 32) ^ c[3] ^ key[1], p0 & low]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    return c[0]


class Check:
    def __init__(self):
        self.worst, self.failed = {}, False

    def near(self, what, ours, theirs, tolerance):
        """By the largest difference, in units of the largest reference."""
        ours, theirs = torch.as_tensor(ours, dtype=torch.float64), torch.as_tensor(theirs, dtype=torch.float64)
        self.at_most(what, ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-6)).item(), tolerance)

    def at_most(self, what, error, tolerance):
        self.worst[what] = (max(error, self.worst.get(what, (0, 0, 0))[0]), tolerance, self.worst.get(what, (0, 0, 0))[2] + 1)
        self.failed |= not error <= tolerance

    def report(self):
        return "".join(f"  {what:<24} {n:>4} compared, worst {error:.2e}, allowed {allowed:.0e}{'' if error <= allowed else '   DIFFERS'}\n"
                       for what, (error, allowed, n) in self.worst.items())


def log_probs(model, sample):
    """[response tokens] and the entropy of what each was drawn from."""
    prompt, response = sample["tokens"]["prompt"], sample["tokens"]["response"]
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1:-1].float() / TEMPERATURE
    table = logits.log_softmax(-1)
    return table.gather(1, torch.tensor(response)[:, None])[:, 0], table


def check_samples(check, step, samples, policy):
    for s in samples:
        prompt, response = s["tokens"]["prompt"], s["tokens"]["response"]
        digits = [uniform_word(3, step << 32 | s["sample"] // GROUP, i) * 10 >> 32 for i in range(DIGITS)]
        check.at_most("problems", 0.0 if prompt == [1] + [5 + d for d in digits] + [3] else 1.0, 0)
        answer = [5 + d for d in reversed(digits)] + [2]
        right = sum(a == b for a, b in zip(response, answer))
        check.near("rewards", s["reward"], 0.8 * right / len(answer) + (0.2 if response == answer else 0.0), 1e-6)
        with torch.no_grad():
            logps, table = log_probs(policy, s)
        check.near("rollout log-probs", s["logprobs"]["rollout"], logps, 1e-5)
        if "training" in s["logprobs"]:
            check.near("training log-probs", s["logprobs"]["training"], logps, 1e-5)
        for i, token in enumerate(response):
            u = (uniform_word(2, step << 32 | s["sample"], len(prompt) + i) >> 8) * 2.0**-24
            ends = table[i].double().exp().cumsum(0)
            begin = ends[token - 1].item() if token > 0 else 0.0
            check.at_most("draws", max(0.0, begin - u, u - ends[token].item()), 1e-6)
    for g in range(PROMPTS):
        rewards = torch.tensor([s["reward"] for s in samples[g * GROUP:(g + 1) * GROUP]], dtype=torch.float64)
        check.near("advantages", [s["advantage"] for s in samples[g * GROUP:(g + 1) * GROUP]],
                   (rewards - rewards.mean()) / (rewards.std() + 1e-6), 1e-5)


def train(samples, policy, reference, optimizer):
    """One step; what hotbunk's metrics say of it, as means over the mini-batches."""
    with torch.no_grad():
        old = {s["sample"]: log_probs(policy, s)[0] for s in samples}
        ref = {s["sample"]: log_probs(reference, s)[0] for s in samples}
    share, metrics = len(samples) // MINI_BATCHES, []
    for mini in (samples[i * share:(i + 1) * share] for i in range(MINI_BATCHES)):
        tokens = sum(s["response_tokens"] for s in mini)
        policy_loss = kl = clipped = 0.0
        for s in mini:
            new, advantage = log_probs(policy, s)[0], s["advantage"]
            ratio = (new - old[s["sample"]]).exp()
            plain, bounded = -advantage * ratio, -advantage * ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
            k3 = (ref[s["sample"]] - new).exp() - (ref[s["sample"]] - new) - 1
            policy_loss = policy_loss + torch.maximum(plain, bounded).sum() / tokens
            kl = kl + k3.sum() / tokens
            clipped += (bounded > plain).sum().item()
        loss = policy_loss + KL * kl
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), MAX_NORM)
        optimizer.step()
        metrics.append({"loss": loss.item(), "actor/grad_norm": norm.item(), "actor/pg_loss": policy_loss.item(),
                        "actor/kl_loss": kl.item(), "clipped": clipped, "tokens": tokens})
    means = {name: sum(m[name] for m in metrics) / len(metrics) for name in metrics[0]}
    means["actor/pg_clipfrac"] = means.pop("clipped") / means.pop("tokens")
    return means


def as_in_files(name, tensor):
    """transformers stacks the experts of a layer; Mixtral's files have each by itself."""
    block = name.rsplit(".experts.", 1)[0].replace(".mlp", ".block_sparse_moe") + ".experts"
    if name.endswith(".experts.gate_up_proj"):
        half = tensor.shape[1] // 2
        return [(f"{block}.{e}.{w}.weight", t) for e in range(len(tensor))
                for w, t in (("w1", tensor[e, :half]), ("w3", tensor[e, half:]))]
    if name.endswith(".experts.down_proj"):
        return [(f"{block}.{e}.w2.weight", tensor[e]) for e in range(len(tensor))]
    return [(name.replace(".mlp.gate.weight", ".block_sparse_moe.gate.weight"), tensor)]


def check_layout(hotbunk, folder, model_folder, sets):
    scenario, out = folder / "scenario.yaml", folder / "run"
    scenario.write_text(SCENARIO.replace("MODEL", str(model_folder)))
    flags = [x for key, value in sets.items() for x in ("--set", f"{key}={value}")]
    subprocess.run([hotbunk, "run", scenario, "--out", out, "--samples-every", "1", *flags], check=True,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lines = lambda name: [json.loads(line) for line in (out / name).read_text().splitlines()]
    reference, policy = (AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, experts_implementation="eager") for _ in range(2))
    frozen = [p.strip(" '") for p in sets.get("train.frozen", "[]").strip("[]").split(",")]
    for name, p in policy.named_parameters():
        p.requires_grad_(not any(fnmatch.fnmatchcase(name, pattern) for pattern in frozen))
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=LR, betas=BETAS,
                                  eps=sets.get("optimizer.eps", EPS), weight_decay=DECAY)
    check = Check()
    named = lambda: {n: t for name, t in policy.state_dict().items() for n, t in as_in_files(name, t)}
    for step in range(1, STEPS + 1):
        samples = [s for s in lines("samples.jsonl") if s["step"] == step]
        assert len(samples) == PROMPTS * GROUP, "samples.jsonl has not all samples"
        before = {name: p.detach().clone() for name, p in named().items()}
        check_samples(check, step, samples, policy)
        theirs = train(samples, policy, reference, optimizer)
        ours = next(m for m in lines("metrics.jsonl") if m["step"] == step)
        for name, value in theirs.items():
            check.at_most(name, abs(ours[name] - value) / max(abs(value), 1e-3), 1e-3)
        saved = load_file(out / "checkpoints" / ("final" if step == STEPS else f"step_{step}") / "model.safetensors")
        for name, weights in saved.items():
            now = named()[name]
            if (now == before[name]).all():  # it does not train
                check.at_most(f"frozen, step {step}", (weights - now).abs().max().item(), 0)
                continue
            # AdamW divides a gradient that nearly cancels by itself: a token that is hardly seen moves by its rounding.
            check.at_most(f"updates, step {step}", ((weights - now).abs().max() / (now - before[name]).abs().max()).item(), 2e-3)
    return check


def main():
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--hotbunk", default="build/hotbunk")
    arguments.add_argument("layouts", nargs="*", default=list(LAYOUTS), metavar="LAYOUT", help=", ".join(LAYOUTS))
    options = arguments.parse_args()
    torch.manual_seed(SEED), torch.set_num_threads(1), logging.disable_progress_bar()
    failed = False
    with tempfile.TemporaryDirectory() as root:
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.2,
            tie_word_embeddings=False, bos_token_id=1, eos_token_id=2))
        model.save_pretrained(Path(root) / "model")
        MixtralForCausalLM(MixtralConfig(
            vocab_size=16, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
            initializer_range=0.2, sliding_window=None, tie_word_embeddings=False, bos_token_id=1,
            eos_token_id=2)).save_pretrained(Path(root) / "moe")
        for name in options.layouts:
            folder = Path(root) / name
            folder.mkdir()
            check = check_layout(options.hotbunk, folder, Path(root) / ("moe" if name.startswith("moe") else "model"), LAYOUTS[name])
            print(f"{name}: {'differs' if check.failed else 'the same'}\n{check.report()}", end="")
            failed |= check.failed
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
