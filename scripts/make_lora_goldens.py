#!/usr/bin/env python3
"""Golden data of adapters: the tiny models of make_goldens.py with LoRA beside some of their matrices, trained by PEFT.

    make_lora_goldens.py --out tests/golden            write every folder
    make_lora_goldens.py --out tests/golden --check    compute again and compare; exit 1 on a difference

A folder lora-NAME has what PEFT saved before training (adapter_config.json, adapter_model.safetensors: neither A nor B is
zero) and golden.json and golden.safetensors as make_goldens.py's, but of the adapters alone: `grad.<p>` and `after5.<p>`
by their names in PEFT's file, and `merged.<p>`: the model's matrices after five steps with their adapters in them
(merge_and_unload). The model itself is that of the folder NAME. golden.json says of floors.updates how far fp32's update
is from fp64's, of y = x (W + alpha/r B A)^T written out.

PEFT adapts modules, and transformers has the matrices of all experts of a layer in one tensor: where experts are adapted,
each of them is three linears first (SplitExperts), by the names that files have for them.
"""

import argparse
import json
import shutil
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import peft
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file

import make_goldens as base

MAX_UPDATE_FLOOR = base.MAX_UPDATE_FLOOR
A_STD, B_STD = 0.15, 0.1


@dataclass(frozen=True)
class Case:
    """Of a model that has goldens. Ranks are odd, so that Shard(0) of A is uneven."""

    model: str
    rank: int
    alpha: float
    targets: tuple[str, ...]
    suffix: str = ""

    @property
    def name(self):
        return f"lora-{self.model}{self.suffix}"

    @property
    def of_experts(self):
        """gate, up and down of an expert, if some of its matrices have adapters; else none."""
        names = EXPERTS.get(self.model, ())
        return names if set(names) & set(self.targets) else ()


EXPERTS = {"mixtral-tiny": ("w1", "w3", "w2")} | dict.fromkeys(
    ("qwen3-moe-tiny", "deepseek-v3-tiny", "glm4-moe-tiny"), ("gate_proj", "up_proj", "down_proj"))


ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CASES = [
    Case("llama-gqa", 3, 6, ALL),
    Case("qwen2-bias", 5, 2, ("q_proj", "v_proj")),  # beside a matrix without one, in one packed product
    Case("qwen3-norm", 5, 16, ALL),
    Case("mha-one-kv", 3, 3, ("k_proj", "v_proj", "o_proj", "down_proj")),  # KV heads that ranks share
    Case("gemma2-tiny", 3, 4, ("q_proj", "o_proj", "up_proj")),
    Case("mixtral-tiny", 3, 6, ("q_proj", "k_proj", "v_proj", "o_proj")),
    Case("deepseek-v3-tiny", 3, 6, ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")),
    Case("deepseek-v2-tiny", 5, 4, ("q_proj", "kv_b_proj")),  # queries of no latent; a latent whose matrix has none
    Case("qwen3-moe-tiny", 3, 6, ("q_proj", "gate_proj", "up_proj", "down_proj")),
    Case("mixtral-tiny", 5, 4, ("w1", "w2"), "-experts"),  # beside a matrix without one, in one packed product
    Case("deepseek-v3-tiny", 3, 6, ("o_proj", "gate_proj", "up_proj", "down_proj"), "-experts"),  # dense, shared, routed
    # Heads that turn in part, normed behind q and k; dense, shared and routed experts.
    Case("glm4-moe-tiny", 5, 4, ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj")),
    Case("gpt2-tiny", 3, 6, ("c_attn", "c_proj", "c_fc")),  # one adapter of q, k and v; c_proj twice in a layer
]


class SplitExperts(torch.nn.ModuleList):
    """Of the tensors of a layer's experts [X, 2I, H] and [X, H, I] three linears for each expert."""

    def __init__(self, stacked, names):
        super().__init__()
        self.names = names
        for gate_up, down in zip(stacked.gate_up_proj, stacked.down_proj):
            one = torch.nn.Module()
            for name, w in zip(names, (*gate_up.chunk(2), down)):
                linear = torch.nn.Linear(w.shape[1], w.shape[0], bias=False)
                linear.weight = torch.nn.Parameter(w.detach().clone())
                one.add_module(name, linear)
            self.append(one)

    def forward(self, h_LD, kept_LC, share_LC):
        out_LD = torch.zeros_like(h_LD)
        for x, expert in enumerate(self):
            gate, up, down = (getattr(expert, name) for name in self.names)
            token, place = torch.where(kept_LC == x)
            y = down(torch.nn.functional.silu(gate(h_LD[token])) * up(h_LD[token]))
            out_LD = out_LD.index_add(0, token, share_LC[token, place, None] * y)
        return out_LD


def split_experts(model, names):
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts = SplitExperts(layer.mlp.experts, names)
    return model


def stacked(weights, names):
    """Split experts' matrices as transformers has them."""
    out = {}
    for name, w in weights.items():
        block, expert, rest = name.partition(".mlp.experts.")
        if not expert:
            out[name] = w
        elif rest == f"0.{names[0]}.weight":
            each = lambda what: [weights[f"{block}{expert}{x}.{what}.weight"]
                                 for x in range(sum(n.startswith(block + expert) for n in weights) // 3)]
            gate, up, down = map(each, names)
            out[f"{block}{expert}gate_up_proj"] = torch.stack([torch.cat(both) for both in zip(gate, up)])
            out[f"{block}{expert}down_proj"] = torch.stack(down)
    return out


@contextmanager
def as_split(config, split):
    """PEFT takes a model by its type, and of those that transformers stacks it would adapt the stacks."""
    kind = config.model_type
    if split:
        config.model_type = "split"
    yield
    config.model_type = kind


def adapted(case, folder, rng):
    model = base.load(folder)
    if case.of_experts:
        model = split_experts(model, case.of_experts)
    with as_split(model.config, case.of_experts):
        model = get_peft_model(model, LoraConfig(
            r=case.rank, lora_alpha=case.alpha, target_modules=list(case.targets), lora_dropout=0.0, bias="none",
            task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                std = A_STD if "lora_A" in name else B_STD
                p.copy_(std * torch.from_numpy(rng.standard_normal(tuple(p.shape)).astype(np.float32)))
    return model.eval()


def in_file(case, name):
    """In PEFT's file; of Mixtral's experts as its files name their modules."""
    name = name.replace(".default.", ".")
    return name.replace(".mlp.experts.", ".block_sparse_moe.experts.") if case.model == "mixtral-tiny" else name


def compute(case, model, tokens, cu_seqlens, optimizer):
    sequences = base.split(tokens, cu_seqlens)
    inner = model.get_base_model()
    rotary, config = base.rotary_of(inner), inner.config
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    start = {n: p.detach().clone() for n, p in parameters.items()}
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    with torch.no_grad():
        logits = base.hf_logits(inner, sequences)
        logprobs = base.next_token_logprobs(logits, tokens, cu_seqlens)
    grads, losses, norms, final = base.train(parameters, lambda s: base.hf_logits(inner, s), tokens, cu_seqlens, optimizer)

    wide = {n: p.double().requires_grad_() for n, p in start.items()}
    prefix, margins = "base_model.model.", []

    def merged():
        weights = {}
        for name, w in frozen.items():
            module = name.removesuffix(".base_layer.weight")
            if module + ".lora_A.default.weight" in wide:
                change = wide[module + ".lora_B.default.weight"] @ wide[module + ".lora_A.default.weight"]
                w = w.double() + case.alpha / case.rank * (change if rotary else change.T)  # GPT-2's are (in, out)
            weights[name.removeprefix(prefix).replace(".base_layer.", ".")] = w.double()
        return stacked(weights, case.of_experts) if case.of_experts else weights

    fixed = {name: buffer.double() for name, buffer in base.stored_buffers(inner).items()}
    plain = lambda s: (base.plain_logits(merged() | fixed, config, rotary, s, margins)
                       if rotary else base.plain_gpt2_logits(merged(), config, s))
    with torch.no_grad():
        logits_f64 = plain(sequences)
    base.train(wide, plain, tokens, cu_seqlens, optimizer)

    tensors = {"input_ids": tokens, "cu_seqlens": cu_seqlens, "logits": logits, "logprobs": logprobs}
    tensors |= {f"grad.{in_file(case, n)}": g for n, g in grads.items()}
    tensors |= {f"after5.{in_file(case, n)}": p.detach().clone() for n, p in parameters.items()}
    floors = {"logits": base.gap(logits, logits_f64),
              "updates": {in_file(case, n): ((p.detach().double() - wide[n].detach()).norm()
                                       / (wide[n].detach() - start[n].double()).norm()).item()
                          for n, p in parameters.items()}}
    unloaded = model.merge_and_unload()
    parameters = dict(unloaded.named_parameters())
    if case.of_experts:
        parameters = stacked(parameters, case.of_experts)
    for name, p in base.as_in_files(parameters, config).items():
        if any(f".{t}.weight" in name for t in case.targets):
            tensors[f"merged.{name}"] = p.detach().clone()
    values = {"loss": losses[0], "steps": {"losses": losses, "grad_norms": norms, "final_loss": final}, "floors": floors}
    if margins:
        values["routing"] = {"min_margin": min(margins)}
    return tensors, values


def golden(case, out, seed):
    """Tensors, values and the model as it was before training."""
    rng = np.random.default_rng([seed, *case.name.encode()])
    of_model = json.loads((out / case.model / "golden.json").read_text())
    kept = load_file(out / case.model / "golden.safetensors")
    model = adapted(case, out / case.model, rng)
    with as_split(model.get_base_model().config, case.of_experts):
        saved = {in_file(case, k): v.clone() for k, v in get_peft_model_state_dict(model).items()}
        model.save_pretrained(out / case.name)
    save_file(saved, out / case.name / "adapter_model.safetensors", metadata={"format": "pt"})
    optimizer = {k: of_model["optimizer"][k] for k in base.OPTIMIZER}
    tensors, values = compute(case, model, kept["input_ids"], kept["cu_seqlens"], optimizer)
    return tensors, values, saved, of_model


def write_case(case, out):
    folder = out / case.name
    shutil.rmtree(folder, ignore_errors=True)
    for seed in range(100):
        tensors, values, _, of_model = golden(case, out, seed)
        if (max(values["floors"]["updates"].values()) <= MAX_UPDATE_FLOOR
                and values.get("routing", {"min_margin": 1.0})["min_margin"] >= base.MIN_ROUTING_MARGIN):
            break
    else:
        raise RuntimeError(f"{case.name}: no seed gives clear updates")
    for extra in ("README.md",):
        (folder / extra).unlink(missing_ok=True)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = f"../{case.model}"
    config["target_modules"] = sorted(config["target_modules"])
    base.write_json(folder / "adapter_config.json", config)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "golden.safetensors")
    base.write_json(folder / "golden.json", {
        "schema": base.SCHEMA, "model": case.model, "seed": seed, "versions": base.versions() | {"peft": peft.__version__},
        "lora": {"rank": case.rank, "alpha": case.alpha, "targets": list(case.targets)},
        "optimizer": of_model["optimizer"], **values})


def check_case(case, out, scratch):
    kept, said = load_file(out / case.name / "golden.safetensors"), json.loads((out / case.name / "golden.json").read_text())
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    for name in (case.model,):
        (scratch / name).symlink_to((out / name).resolve())
    tensors, values, saved, _ = golden(case, scratch, said["seed"])
    problems = []
    for name, t in load_file(out / case.name / "adapter_model.safetensors").items():
        if not torch.equal(t, saved[name]):
            problems.append(f"{name} differs")
    for name, t in tensors.items():
        bound = 1e-3 if name.startswith(("after5", "merged")) else 1e-4 if name.startswith("grad") else 1e-5
        if t.is_floating_point() and base.gap(t, kept[name]) > bound:
            problems.append(f"{name}: {base.gap(t, kept[name]):.1e}")
    return problems


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--only", help="one folder")
    args = parser.parse_args()
    torch.set_num_threads(1)
    failed = False
    for case in CASES:
        if args.only not in (None, case.name):
            continue
        if not args.check:
            write_case(case, args.out)
            print(f"{case.name}: written")
            continue
        problems = check_case(case, args.out, Path("/tmp") / f"hotbunk-{case.name}")
        failed = failed or bool(problems)
        print(f"{case.name}: {'; '.join(problems) if problems else 'as kept'}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
