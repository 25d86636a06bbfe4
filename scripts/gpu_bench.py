#!/usr/bin/env python3
"""Measures the CUDA backend on one GPU; a row of the table of scripts/gpu per figure.

    gpu_bench.py --hotbunk build/hotbunk --gpu h100-sxm-80gb --work DIR [--backend cuda] [--shapes 1b,8b] [--seconds 360]

  training step    tokens/s of phase `train` of the last of three GRPO iterations, beside torch.compile with the same
                   shape, tokens, AdamW and precision (scripts/gpu_torch_step.py; left out where torch is not there)
  decode           bytes of weights and KV that the rollout's decode steps read, per second of the phase, as a fraction
                   of the device's memory bandwidth (catalogue: datasheet)
  sleep, wake      12 B a parameter (fp32 master and moments) per second of the phases that move them, as a fraction of
                   what the fastest host copy of the calibration reaches
  P6               mean error of the phases that a simulation with the calibration's profile predicts

8b is the shape of Llama-3.1-8B with 4 of its 32 layers: state of the whole is 128 GB. tiny is for the driver's double
(--backend cuda-fake), which plays the logic: its figures are an interpreter's and mean nothing.
"""
import argparse
import json
import os
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# model config (catalogue), what differs from it, sequences, tokens of a response, tokens of a micro-batch
SHAPES = {
    "1b": ("llama-3.2-1b", {}, 32, 507, 8192),
    "8b": ("llama-3.1-8b", {"num_hidden_layers": 4}, 32, 507, 8192),
    "tiny": (None, {}, 4, 4, 64),
}
TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 32,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "initializer_range": 0.08,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}
PROMPT_TOKENS = 5  # of the task
BYTES_OF_STATE = 12  # per parameter that sleeps: fp32 master and two moments
STEPS = 3
# of the issue: what each figure is to reach
GOALS = {"training": 1.1, "decode": 0.85, "sleep": 0.95, "wake": 0.95, "P6": 0.05}


def parameters(c):
    q = c["num_attention_heads"] * c["head_dim"]
    kv = c["num_key_value_heads"] * c["head_dim"]
    layer = c["hidden_size"] * (2 * q + 2 * kv + 3 * c["intermediate_size"] + 2)
    heads = 1 if c["tie_word_embeddings"] else 2
    return c["num_hidden_layers"] * layer + c["hidden_size"] * (heads * c["vocab_size"] + 1)


def decode_bytes(c, sequences, response):
    """Read by the decode steps of one iteration: bf16 weights (the embedding's rows aside) once a step, and each
    sequence's KV cache so far."""
    weights = 2 * (parameters(c) - (0 if c["tie_word_embeddings"] else c["vocab_size"] * c["hidden_size"]))
    kv = 2 * 2 * c["num_hidden_layers"] * c["num_key_value_heads"] * c["head_dim"]
    steps = response - 1
    context = PROMPT_TOKENS + response / 2
    return steps * (weights + sequences * context * kv)


def scenario(shape, gpu):
    name, changes, sequences, response, micro = SHAPES[shape]
    config = dict(TINY)
    if name:
        with open(os.path.join(ROOT, "scenarios/catalog/models", name + ".json")) as f:
            config = json.load(f)
    config.update(changes)
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    config.setdefault("tie_word_embeddings", False)
    cluster = {"gpu": gpu, "nodes": 1, "gpus_per_node": 1}
    if gpu == "local-cpu":
        cluster.update({"ranks_per_device": 1, "device_memory_mib": 64})
    return config, {
        "name": "gpu-" + shape, "seed": 0, "steps": STEPS, "model": config, "cluster": cluster,
        "train": {"engine": "fsdp2", "layout": {"dp": 1}, "micro_batch_tokens": micro, "offload": "sleep",
                  "precision": {"params": "bf16", "grads": "fp32", "master": "fp32", "moments": "fp32"}},
        "optimizer": {"lr": 1e-6},
        "rollout": {"engine": "hotbunk", "layout": {"tp": 1, "dp": 1}, "dtype": "bf16",
                    "max_running_requests": sequences, "max_prefill_tokens": max(64, sequences * PROMPT_TOKENS),
                    "block_tokens": 16},
        "sync": {"transport": "ipc", "verify": False},
        "algorithm": {"name": "grpo", "prompts": sequences // 4, "samples_per_prompt": 4, "mini_batches": 1},
        "workload": {"prompt_tokens": {"mean": PROMPT_TOKENS, "max": PROMPT_TOKENS, "distribution": "fixed"},
                     "response_tokens": {"mean": response, "max": response, "distribution": "fixed"}},
        "task": {"name": "parity", "digits": 3},  # random weights earn different rewards, so there are gradients
    }


class Bench:
    def __init__(self, args):
        self.args = args
        self.end = time.monotonic() + args.seconds
        self.failed = False
        gpus = os.path.join(ROOT, "scenarios/catalog/gpus", args.gpu + ".yaml")
        self.bandwidth = 0.0
        for line in open(gpus):
            if line.strip().startswith("memory_gb_per_s:"):
                self.bandwidth = float(line.split("value:")[1].split(",")[0]) * 1e9 if "value:" in line else 0.0

    def row(self, what, figure, ratio=None, goal=None):
        text = "" if ratio is None else f"{ratio:6.2f}"
        if goal is not None and ratio is not None:
            good = ratio <= GOALS[goal] if goal == "P6" else ratio >= GOALS[goal]
            text += f" (goal {GOALS[goal]}: {'met' if good else 'not met'})"
        print(f"{what:<44} {figure:<34} {text}", flush=True)

    def run(self, what, command):
        left = self.end - time.monotonic()
        if left < 10:
            self.row(what, "left out: no time left")
            return None
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=left)
        except subprocess.TimeoutExpired:
            self.row(what, "stopped: no time left")
            return None
        if done.returncode not in (0, 1):  # 1: prices are off
            sys.stderr.write(done.stderr)
            self.row(what, f"FAILED with {done.returncode}")
            self.failed = True
            return None
        return done

    def hotbunk(self, what, *command):
        return self.run(what, [self.args.hotbunk, *command])

    def shape(self, shape):
        config, text = scenario(shape, self.args.gpu)
        _, _, sequences, response, micro = SHAPES[shape]
        path = os.path.join(self.args.work, shape + ".yaml")
        with open(path, "w") as f:
            json.dump(text, f)  # JSON is YAML
        folder = os.path.join(self.args.work, shape)
        if not self.hotbunk(f"{shape}: run", "run", path, "--backend", self.args.backend, "--out", folder,
                            "--overwrite", "--trace-steps", "0", "--no-fit-check"):
            return
        with open(os.path.join(folder, "metrics.jsonl")) as f:
            last = json.loads(f.read().strip().splitlines()[-1])
        tokens = last["perf/total_num_tokens"]
        ours = tokens / last["timing_s/update_actor"]
        self.torch_row(shape, config, sequences, response, micro, ours)
        if last.get("actor/grad_norm") == 0:
            self.row(f"{shape}: training step", "all gradients were zero: some reads were spared")
        mean = last["response_length/mean"]
        rate = decode_bytes(config, sequences, mean) / last["timing_s/gen"]
        self.row(f"{shape}: decode, {sequences} sequences", f"{rate / 1e9:.3g} GB/s",
                 rate / self.bandwidth if self.bandwidth else None, "decode")
        self.host_rows(shape, path, parameters(config) * BYTES_OF_STATE, last)

    def torch_row(self, shape, config, sequences, response, micro, ours):
        what = f"{shape}: training step"
        torch = self.run(what, [self.args.python, os.path.join(ROOT, "scripts/gpu_torch_step.py"), json.dumps(config),
                                str(sequences), str(PROMPT_TOKENS + response), str(micro)])
        theirs = json.loads(torch.stdout.strip().splitlines()[-1]) if torch and torch.stdout.strip() else {}
        if theirs.get("tokens_per_s"):
            self.row(what, f"{ours:.4g} tok/s, torch {theirs['tokens_per_s']:.4g}", ours / theirs["tokens_per_s"],
                     "training")
        else:
            self.row(what, f"{ours:.4g} tok/s; {theirs.get('why', 'no torch')}")

    def host_rows(self, shape, path, state, last):
        ending = ".double.yaml" if self.args.backend == "cuda-fake" else ".yaml"
        profile = os.path.join(self.args.work, shape + "-profile" + ending)
        done = self.hotbunk(f"{shape}: calibrate", "calibrate", path, "--backend", self.args.backend, "--out", profile,
                            "--steps", "3", "--json")
        if not done:
            return
        said = json.loads(done.stdout)
        fastest = 0.0
        for line in open(profile):
            if "op: h2d" in line or "op: d2h" in line:
                fields = dict(part.split(": ", 1) for part in line.strip()[3:-1].split(", "))
                fastest = max(fastest, float(fields["bytes"]) / float(fields["seconds"]))
        sleeping = last.get("timing_s/sleep_optimizer", 0.0) + last.get("timing_s/sleep_train", 0.0)
        for what, seconds in (("sleep", sleeping), ("wake", last.get("timing_s/wake_train", 0.0))):
            if seconds > 0 and fastest > 0:
                rate = state / seconds
                self.row(f"{shape}: {what} of training's state", f"{rate / 1e9:.3g} of {fastest / 1e9:.3g} GB/s",
                         rate / fastest, what)
        self.row(f"{shape}: P6, simulated beside measured", f"{said['measurements']} sizes timed", said["mean_error"],
                 "P6")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--hotbunk", required=True)
    p.add_argument("--gpu", required=True, help="catalogue name; local-cpu on the double")
    p.add_argument("--work", required=True)
    p.add_argument("--backend", default="cuda")
    p.add_argument("--shapes", default="1b,8b")
    p.add_argument("--seconds", type=float, default=360)
    p.add_argument("--python", default=sys.executable, help="with torch")
    bench = Bench(p.parse_args())
    for shape in bench.args.shapes.split(","):
        bench.shape(shape)
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())
