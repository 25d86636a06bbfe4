#!/usr/bin/env python3
"""Fits the constants of the catalogue's profiles on published rows, and says what to expect on rows never seen.

  scripts/fit_profiles.py [build/hotbunk [WORD]] [--write]      WORD: only the fits whose name has it
Every fit is coordinate descent on the mean relative error of `hotbunk validate`, on a copy of the catalogue. Each is made
on all of its rows and then with parts left out: all rows of a model, in all of its tables, single rows where there is
one model, or of weight updates all rows of a configuration (a model on so many ranks). Prints a Markdown table: error on the rows fitted, and of each left-out row predicted by a fit without it.
--write also puts the rows' predictions into scenarios/catalog/left_out.csv, which `hotbunk validate` shows beside the
fitted errors: those of the fits that were made, in place of what stood there of the same tables.
"""
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
A100, H100 = (f"profiles/{gpu}.yaml" for gpu in ("a100-sxm-80gb", "h100-sxm-80gb"))
BLACKWELL = "profiles/blackwell-te.yaml"
NEMO, VLLM = "frameworks/nemo-megatron.yaml", "engines/vllm.yaml"
SYNC = "sync.yaml"
VTRAIN, TE, ZERO, BRIDGE, TITAN, COMPILED = (
    f"frameworks/{name}.yaml" for name in
    ("megatron-vtrain", "megatron-te", "deepspeed-zero3", "megatron-bridge", "torchtitan", "torchtitan-compile"))
# name, constants (file, key or keys that have one value, joined by +; least, most), rows (table, range or None for all), how rows are left out
FITS = [
    ("A100: GEMM, memory, overlap", [(A100, "gemm.efficiency", .5, .95), (A100, "gemm.half_k", 8, 512),
                                     (A100, "memory_efficiency", .5, .95), (A100, "overlap_slowdown", .01, .6)],
     [("korthikanti_a100", None), ("korthikanti_a100_layer", None), ("megatron_sc21_weak_scaling", None),
      ("vtrain_a100_multi_node", None)], "models"),
    ("host of vTrain's machine", [(VTRAIN, "forward_kernels", 1, 200), (VTRAIN, "kernel_seconds", 1e-6, 2e-5),
                                  (VTRAIN, "backward_kernels", .2, 4), (VTRAIN, "launch_seconds", 2e-6, 4e-5),
                                  (VTRAIN, "step_seconds", 1e-4, .05), (VTRAIN, "collective_kernels", .2, 40),
                                  (VTRAIN, "softmax_kernels", 1, 60)],
     [("vtrain_a100_single_node", None)], "models"),
    ("DeepSpeed's share of the link", [(ZERO, "data_rate", .02, 1)], [("megatron_sc21_zero3_vs_ptd", range(3))], "singly"),
    ("H100: clock of whole steps", [(H100, "sustained_clock", .5, 1)],
     [("megatron_readme_h100", None), ("llama3_405b", None)], "models"),
    ("B200: unfused passes, host of a step", [(TE, "elementwise_passes", 1, 8), (TE, "step_seconds", 1e-4, .05)],
     [("simumax_b200", None)], "models"),
    ("torchtitan: unfused passes, eager and compiled", [(TITAN, "elementwise_passes", 1, 8),
                                                        (COMPILED, "elementwise_passes", 1, 8)],
     [("torchtitan", None)], "singly"),
    ("Blackwell in narrow formats: clock, unfused passes", [(BLACKWELL, "sustained_clock", .4, 1),
                                                            (BRIDGE, "elementwise_passes", 1, 5)],
     [("megatron_bridge", None)], "models"),
    ("NeMo-RL: an iteration's own time, the engine's host and nodes", [(NEMO, "iteration_seconds", .5, 120),
                                                                       (VLLM, "decode_sequence_seconds", 1e-6, 1e-3),
                                                                       (VLLM, "decode_node_seconds", 1e-6, 3e-3)],
     [("rl_iterations", None)], "models"),
    ("checkpoint-engine: starts, a bucket, a node's host copies",
     [(SYNC, "broadcast.start", .05, 5), (SYNC, "point-to-point.start", .05, 5),
      (SYNC, "broadcast.per_bucket+point-to-point.per_bucket", 1e-5, .05),
      (SYNC, "broadcast.bandwidth+point-to-point.bandwidth", 2e10, 4e11)],
     [("weight_sync_configurations", range(8))], "configurations"),
    ("NeMo-RL's reshards: start, a tensor", [(SYNC, "direct.start", .02, 2), (SYNC, "direct.per_tensor", 1e-6, 1e-3)],
     [("weight_sync_configurations", range(8, 11))], "configurations"),
]
# slime measured four mechanisms, each of one configuration: without it nothing is left to fit a mechanism on. Each is
# predicted by the next one of slime's own history, the last by what another system says of it (`elsewhere`).
# row of weight_sync_configurations: {key: key, or number, that stands in}
NEXT_MECHANISM = {11: {"per-tensor-ipc.per_tensor": "stream.per_tensor"},
                  12: {"stream.per_tensor": "per-tensor-ipc.per_tensor"},
                  13: {"handles-per-tensor.per_tensor": "bucketed.per_tensor"},
                  14: {"bucketed.per_tensor": .385e-3, "bucketed.per_bucket": 0}}


LEFT_OUT = ROOT / "scenarios/catalog/left_out.csv"
HEAD = "table,row,without,fitted,predicted"


# The same model by its parameters (Korthikanti, SC'21) and by its layers and hidden size (vTrain).
SIZES = {"1.7B": "24x2304", "7.5B": "36x4096", "22B": "48x6144", "39.1B": "48x8192", "174.6B": "96x12288", "175B": "96x12288",
         "529.6B": "105x20480", "530B": "105x20480", "1T": "128x25600"}


def model_of(row):
    """The model in a row's label: "0.4 grpo Qwen3-32B On policy", "70B tp8 pp2 on 768", "deepseekv2_tp1_ep4",
    "llama3_70b_l12_tp8", "26.04 pre-training GPT OSS 120B DGX-B200 BF16", "48x8192 tp2 dp32"."""
    words = row.split()
    if bridge := re.match(r"[\d.]+ (?:pre-training|sft) (.+) DGX-", row):
        return bridge[1]
    if words[0][0] == "0" and len(words) > 2:
        return words[2]
    return SIZES.get(words[0]) or re.match(r"\d+x\d+|[a-z]+v?\d(?:_\d+b)?|[^ ]+", words[0])[0]


def configuration_of(row):
    """A weight update's, from its label: "checkpoint-engine broadcast GLM-4.5-Air to 8" -> "GLM-4.5-Air to 8". Of
    slime's the source leaves the ranks open."""
    return re.search(r"\S+( to \d+)?$", row)[0]


def write(lines, tables=()):
    """In place of what stands there of the same rows, and of all rows of `tables`."""
    made = {tuple(line.split(",")[:2]) for line in lines}
    stands = [line.split(",") for line in LEFT_OUT.read_text().splitlines()[1:]] if LEFT_OUT.exists() else []
    kept = [",".join(cells) for cells in stands if tuple(cells[:2]) not in made and cells[0] not in tables]
    LEFT_OUT.write_text("\n".join([HEAD, *sorted(kept + lines)]) + "\n")


class Catalogue:
    """A copy whose constants can be set."""

    def __init__(self, folder, hotbunk):
        self.root, self.hotbunk = pathlib.Path(folder) / "catalog", hotbunk
        shutil.copytree(ROOT / "scenarios/catalog", self.root)

    def pattern(self, key):
        group, _, last = key.rpartition(".")
        head = rf"^{group}:\n(?:  .*\n)*?  " if group else "^"
        return re.compile(rf"(?m)({head}{last}: {{value: )([^,]+)(,)")

    def get(self, file, key):
        return float(self.pattern(key.split("+")[0]).search((self.root / file).read_text())[2])

    def set(self, file, key, value):
        path = self.root / file
        for one in key.split("+"):
            path.write_text(self.pattern(one).sub(rf"\g<1>{value:.6g}\g<3>", path.read_text(), count=1))

    def errors(self, rows):
        """Signed relative error by (table, row)."""
        data = self.root.parent / "data"  # of the tables asked for: the others would only take time
        if not data.exists():
            data.mkdir()
            for csv in (ROOT / "data/published").glob("*.csv"):
                if any(table.startswith(csv.stem) for table, _ in rows):
                    shutil.copy(csv, data)
        out = subprocess.run([self.hotbunk, "validate", "--json", "--data", data], check=True,
                             stdout=subprocess.PIPE, env=dict(os.environ, HOTBUNK_CATALOG=str(self.root))).stdout
        tables = {t["name"]: t["predictions"] for t in json.loads(out)["tables"]}
        self.labels = {(name, i): p["row"] for name, rows_ in tables.items() for i, p in enumerate(rows_)}
        self.values = {(name, i): p["predicted"] for name, rows_ in tables.items() for i, p in enumerate(rows_)}
        return {(name, i): tables[name][i]["predicted"] / tables[name][i]["measured"] - 1
                for name, some in rows for i in (some if some is not None else range(len(tables[name])))}


def mean(errors, chosen):
    """Mean absolute error, every table with the same weight; those of a few rows count as one."""
    tables = {}
    for row in chosen:
        tables.setdefault("" if len(errors) < 8 else row[0], []).append(abs(errors[row]))
    return sum(sum(t) / len(t) for t in tables.values()) / max(1, len(tables))


def fit(catalogue, constants, rows, chosen):
    values = [catalogue.get(file, key) for file, key, _, _ in constants]
    steps, best = [0.2] * len(values), mean(catalogue.errors(rows), chosen)
    for i, (file, key, least, most) in enumerate(constants):
        # What no chosen row shows is not known: its least, not what a fit on other rows once said.
        catalogue.set(file, key, most if values[i] < (least * most) ** .5 else least)
        if abs(mean(catalogue.errors(rows), chosen) - best) < 1e-12:
            values[i] = least
        catalogue.set(file, key, values[i])
    while max(steps) > 0.01:
        for i, (file, key, least, most) in enumerate(constants):
            for factor in (1 + steps[i], 1 / (1 + steps[i])):
                value = min(max(values[i] * factor, least), most)
                catalogue.set(file, key, value)
                error = mean(catalogue.errors(rows), chosen)
                if error < best - 1e-7:
                    best, values[i] = error, value
                    break
            else:
                catalogue.set(file, key, values[i])
                steps[i] /= 2
    return values


def next_mechanisms(hotbunk):
    """Lines of left_out.csv, and the errors, of the weight updates that NEXT_MECHANISM says."""
    lines, errors = [], []
    for row, stands_in in NEXT_MECHANISM.items():
        with tempfile.TemporaryDirectory() as folder:
            catalogue, at = Catalogue(folder, hotbunk), ("weight_sync_configurations", row)
            catalogue.errors([(at[0], [row])])
            label, as_shipped = catalogue.labels[at], catalogue.values[at]
            for key, other in stands_in.items():
                catalogue.set(SYNC, key, catalogue.get(SYNC, other) if isinstance(other, str) else other)
            errors.append(abs(catalogue.errors([(at[0], [row])])[at]))
            lines.append(f"{at[0]},{label},the configuration {configuration_of(label)},{as_shipped:.6g},{catalogue.values[at]:.6g}")
    return lines, errors


def main():
    arguments = [a for a in sys.argv[1:] if a != "--write"]
    hotbunk = str(pathlib.Path(arguments[0] if arguments else ROOT / "build/hotbunk").resolve())
    print("| constants | rows | error, all fitted | error of rows left out | values |\n|---|---|---|---|---|")
    for name, constants, rows, how in FITS:
        if len(arguments) > 1 and arguments[1] not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            catalogue = Catalogue(folder, hotbunk)
            everything = list(catalogue.errors(rows))
            models = [model_of(catalogue.labels[r]) for r in everything]
            configurations = [configuration_of(catalogue.labels[r]) for r in everything]
            labels, as_shipped = catalogue.labels, catalogue.values
        splits = [(f"all rows of {model}", lambda k, model=model: models[k] == model) for model in dict.fromkeys(models)] \
            if how == "models" else \
            [(f"the configuration {one}", lambda k, one=one: configurations[k] == one) for one in dict.fromkeys(configurations)] \
            if how == "configurations" else [("the row", lambda k, out=out: k == out) for out in range(len(everything))]
        left_out, lines = {}, []
        for without, out in splits:
            with tempfile.TemporaryDirectory() as folder:
                catalogue = Catalogue(folder, hotbunk)
                fit(catalogue, constants, rows, [r for k, r in enumerate(everything) if not out(k)])
                errors = catalogue.errors(rows)
                for k, r in enumerate(everything):
                    if not out(k):
                        continue
                    left_out[r] = errors[r]
                    lines.append(f"{r[0]},{labels[r].replace(',', ';')},{without},{as_shipped[r]:.6g},{catalogue.values[r]:.6g}")
        with tempfile.TemporaryDirectory() as folder:
            catalogue = Catalogue(folder, hotbunk)
            values = fit(catalogue, constants, rows, everything)
            fitted = mean(catalogue.errors(rows), everything)
        shown = ", ".join(f"`{key}` {value:.3g}" for (_, key, _, _), value in zip(constants, values))
        print(f"| {name} | {len(everything)} | {100 * fitted:.2f} % | {100 * mean(left_out, everything):.2f} % | {shown} |",
              flush=True)
        if "--write" in sys.argv:
            write(lines, {table for table, some in rows if some is None})
    if len(arguments) < 2 or arguments[1] in "slime: a mechanism by the next one":
        lines, errors = next_mechanisms(hotbunk)
        print(f"| slime: a mechanism by the next one | {len(errors)} | | {100 * sum(errors) / len(errors):.2f} % | |")
        if "--write" in sys.argv:
            write(lines)


if __name__ == "__main__":
    main()
