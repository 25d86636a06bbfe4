#!/usr/bin/env python3
"""Times hotbunk beside PyTorch and llama.cpp on the CPU: a training step, decoding and prefill of a 46M Llama-like model.

The same model, batch, threads and dtype on all sides; rounds of hotbunk and of the others take turns, so that a load that
comes and goes meets both, and the figure is the median of the ratios of the pairs. Two ratios: by wall time, and by CPU
time (user + system of the process), which a shared machine disturbs less.

    bench_torch.py BUILD_DIR [--rounds 7] [--threads 2] [--only train,decode,prefill] [--dtypes fp32,bf16]
                   [--batches 1,8,32] [--modes eager,compile,llama]

torch runs eager and compiled (inductor), and where jemalloc is there (Debian's libjemalloc2, or --jemalloc FILE) both
with it too; the fastest counts. llama.cpp (bench/llama_step.cc, built by scripts/bench --llama) decodes and prefills, with
flash attention and without; it has a ratio of its own. At batch 1 the weights' rate stands beside what reading memory reaches. bf16: autocast over fp32 weights in training, as hotbunk
computes with fp32 masters; weights in bf16 in decoding.
"""
import argparse
import ctypes.util
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time

VOCAB, HIDDEN, FFN, LAYERS, HEADS, HEAD_DIM, EPS = 8192, 512, 1376, 12, 8, 64, 1e-5
SEQUENCES, SEQUENCE_TOKENS = 8, 512
PROMPT_TOKENS, NEW_TOKENS, STEPS_PER_ROUND = 128, 257, 16
PREFILL_TOKENS = 512
# Matrices that a decode step reads: all of each layer's, and the head; of the embedding one row.
WEIGHTS = LAYERS * HIDDEN * (4 * HEADS * HEAD_DIM + 3 * FFN) + VOCAB * HIDDEN
WARM_UP_STEPS = 2


# --- the torch side: a child process that speaks the turns of bench/rounds.h -------------------------------------------


class Turns:
    def ready(self):
        print(json.dumps({"ready": True}), flush=True)
        self._take()

    def done(self, tokens):
        wall, cpu = time.monotonic() - self.wall, time.process_time() - self.cpu
        print(json.dumps({"tokens": tokens, "seconds": wall, "cpu_seconds": cpu}), flush=True)
        self._take()

    def _take(self):
        if not sys.stdin.readline():
            sys.stdout.flush()
            os._exit(0)  # nobody says go: the comparison is over
        self.wall, self.cpu = time.monotonic(), time.process_time()


def make_model(torch):
    nn, F = torch.nn, torch.nn.functional

    def rotate(x, cos, sin):  # x: (batch, heads, tokens, head_dim)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.input_norm = nn.RMSNorm(HIDDEN, EPS)
            self.post_norm = nn.RMSNorm(HIDDEN, EPS)
            self.qkv = nn.Linear(HIDDEN, 3 * HEADS * HEAD_DIM, bias=False)
            self.o = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
            self.gate_up = nn.Linear(HIDDEN, 2 * FFN, bias=False)
            self.down = nn.Linear(FFN, HIDDEN, bias=False)

        def forward(self, x, cos, sin, cache=None, position=0):
            batch, tokens, _ = x.shape
            qkv = self.qkv(self.input_norm(x)).view(batch, tokens, 3, HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4)
            q, k, v = rotate(qkv[0], cos, sin).to(qkv.dtype), rotate(qkv[1], cos, sin).to(qkv.dtype), qkv[2]
            if cache is not None:  # (2, batch, heads, capacity, head_dim)
                cache[0, :, :, position : position + tokens] = k
                cache[1, :, :, position : position + tokens] = v
                k, v = cache[0, :, :, : position + tokens], cache[1, :, :, : position + tokens]
            y = F.scaled_dot_product_attention(q, k, v, is_causal=tokens > 1)
            x = x + self.o(y.transpose(1, 2).reshape(batch, tokens, HEADS * HEAD_DIM))
            gate, up = self.gate_up(self.post_norm(x)).chunk(2, -1)
            return x + self.down(F.silu(gate) * up)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(VOCAB, HIDDEN)
            self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
            self.norm = nn.RMSNorm(HIDDEN, EPS)
            self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
            for p in self.parameters():
                if p.dim() > 1:
                    nn.init.normal_(p, std=0.02)
            inverse = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
            angles = torch.outer(torch.arange(2048.0), inverse)
            self.register_buffer("cos", angles.cos())
            self.register_buffer("sin", angles.sin())

        def forward(self, tokens, caches=None, position=0, last_only=False):
            x = self.embedding(tokens)
            rows = slice(position, position + tokens.shape[1])
            cos, sin = self.cos[rows], self.sin[rows]
            for i, layer in enumerate(self.layers):
                x = layer(x, cos, sin, None if caches is None else caches[i], position)
            return self.head(self.norm(x[:, -1:] if last_only else x))

    return Model()


def torch_train(torch, dtype, compiled):
    F = torch.nn.functional
    model = make_model(torch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    tokens = torch.randint(VOCAB, (SEQUENCES, SEQUENCE_TOKENS), generator=torch.Generator().manual_seed(0))

    def loss_of(tokens):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            logits = model(tokens)
        return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB).float(), tokens[:, 1:].reshape(-1))

    if compiled:
        loss_of = torch.compile(loss_of)
    turns = Turns()
    step = 0
    while True:
        loss = loss_of(tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not math.isfinite(loss.item()):
            sys.exit("the loss is not finite")
        step += 1
        if step == WARM_UP_STEPS:
            turns.ready()
        elif step > WARM_UP_STEPS:
            turns.done(tokens.numel())


def torch_decode(torch, dtype, compiled, batch):
    torch.set_grad_enabled(False)
    dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
    model = make_model(torch).to(dtype).eval()
    model.cos, model.sin = model.cos.to(dtype), model.sin.to(dtype)
    step = model
    if compiled:
        torch._inductor.config.freezing = True  # packs the weights
        step = torch.compile(model, dynamic=True)
    prompt = torch.randint(VOCAB, (batch, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))

    def generate(count, on_step):
        caches = [torch.zeros(2, batch, HEADS, PROMPT_TOKENS + NEW_TOKENS, HEAD_DIM, dtype=dtype) for _ in range(LAYERS)]
        token = model(prompt, caches)[:, -1:].argmax(-1)
        for i in range(count):
            token = step(token, caches, PROMPT_TOKENS + i)[:, -1:].argmax(-1)
            on_step(i + 1)

    if compiled:  # compilation is no part of any round
        generate(4, lambda i: None)
    turns = Turns()

    def on_step(done):
        if done == STEPS_PER_ROUND:
            turns.ready()
        elif done % STEPS_PER_ROUND == 0:
            turns.done(batch * STEPS_PER_ROUND)

    generate(NEW_TOKENS - 1, on_step)


def torch_prefill(torch, dtype, compiled, batch):
    torch.set_grad_enabled(False)
    dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
    model = make_model(torch).to(dtype).eval()
    model.cos, model.sin = model.cos.to(dtype), model.sin.to(dtype)
    prompt = torch.randint(VOCAB, (batch, PREFILL_TOKENS), generator=torch.Generator().manual_seed(0))
    caches = [torch.zeros(2, batch, HEADS, PREFILL_TOKENS, HEAD_DIM, dtype=dtype) for _ in range(LAYERS)]

    def step(tokens):  # logits of the last token are all that sampling needs
        return model(tokens, caches, last_only=True).argmax(-1)

    if compiled:
        torch._inductor.config.freezing = True  # packs the weights
        step = torch.compile(step)
    step(prompt)
    turns = Turns()
    turns.ready()
    while True:
        step(prompt)
        turns.done(prompt.numel())


def torch_child(options):
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    import torch

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    compiled = options.mode == "compile"
    if options.child == "train":
        torch_train(torch, options.dtype, compiled)
    elif options.child == "prefill":
        torch_prefill(torch, options.dtype, compiled, options.batch)
    else:
        torch_decode(torch, options.dtype, compiled, options.batch)


# --- the comparison ---------------------------------------------------------------------------------------------------


class Player:
    """A process that works when it is told to."""

    def __init__(self, command, preload=None):
        environment = {**os.environ, "OMP_NUM_THREADS": command[command.index("--threads") + 1]}
        if preload:
            environment["LD_PRELOAD"] = preload
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        env=environment)
        if not self._read().get("ready"):
            raise SystemExit(f"{command[0]}: no sign of being ready")

    def _read(self):
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args[0]} ended with {self.process.wait()}")
        return json.loads(line)

    def round(self):
        time.sleep(0.03)  # until who worked before has stopped spinning at its barriers
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._read()

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def compare(name, hotbunk, others, rounds, jemalloc):
    """Median tokens/s of hotbunk and of the fastest way of each of the `others` ({"torch": {way: command}, …}), and the
    median over pairs of hotbunk's speed by theirs."""
    commands = {(kind, way): (command, None) for kind, ways in others.items() for way, command in ways.items()}
    if jemalloc:
        commands |= {(kind, f"{way}, jemalloc"): (command, jemalloc) for (kind, way), (command, _) in commands.items()
                     if kind == "torch"}
    commands = {"hotbunk": (hotbunk, None)} | commands
    players, results = {}, {player: [] for player in commands}
    try:
        for player, command in commands.items():
            players[player] = Player(*command)
        for i in range(rounds):
            order = list(players)
            random.Random(i).shuffle(order)
            for player in order:
                results[player].append(players[player].round())
        for player in players.values():
            player.end()
    finally:  # where one fails, the others do not stay behind
        for player in players.values():
            player.process.kill()

    def speed(player, clock):
        return statistics.median(r["tokens"] / r[clock] for r in results[player])

    row = {"case": name, "rounds": rounds}
    for clock, label in (("seconds", "wall"), ("cpu_seconds", "cpu")):
        row[f"hotbunk_tokens_per_{label}_second"] = speed("hotbunk", clock)
        for kind in others:
            best = max((key for key in commands if key[0] == kind), key=lambda key: speed(key, "seconds"))
            row[f"{kind}_mode"] = best[1]
            row[f"{kind}_tokens_per_{label}_second"] = speed(best, clock)
            pairs = zip(results["hotbunk"], results[best])
            row[f"{kind}_ratio_{label}"] = statistics.median(t[clock] / h[clock] for h, t in pairs)
    return row


def machine():
    """The processor's name, and what of it multiplies bf16."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        said = dict([part.strip() for part in line.split(":", 1)] for line in file if ":" in line)
    units = [unit for unit in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if unit in said.get("flags", "").split()]
    return f"{said.get('model name', 'unknown processor')}, {os.cpu_count()} cores, {' '.join(units) or 'no AVX2'}"


def show(row):
    for kind in ("torch", "llama.cpp"):
        if f"{kind}_mode" in row:
            print(f"{row['case']:<24} {row['hotbunk_tokens_per_wall_second']:>9.0f} tok/s  {kind} ({row[f'{kind}_mode']}) "
                  f"{row[f'{kind}_tokens_per_wall_second']:>9.0f} tok/s  ratio {row[f'{kind}_ratio_wall']:.2f} by wall "
                  f"time, {row[f'{kind}_ratio_cpu']:.2f} by CPU time", flush=True)


def show_weight_stream(row, dtype):
    """At batch 1 a step reads every weight once: that rate, and which share it is of what as many threads read."""
    rate = row["hotbunk_tokens_per_wall_second"] * WEIGHTS * (2 if dtype == "bf16" else 4)
    row["weights_bytes_per_second"], read = rate, row["memory_tokens_per_wall_second"]
    print(f"{'':<24} weights at {rate / 1e9:.1f} GB/s, {rate / read:.0%} of the {read / 1e9:.1f} GB/s that as many threads "
          "read", flush=True)


def ways(what, options, common):
    """The commands to compare with, by kind and way."""
    asked = options.modes.split(",")
    found = {}
    torch_ways = {mode: [sys.executable, os.path.abspath(__file__), "--child", what, "--mode", mode] + common
                  for mode in asked if mode != "llama"}
    if torch_ways:
        found["torch"] = torch_ways
    if "llama" in asked and options.llama_step and what != "train":
        model = os.path.join(os.path.dirname(options.llama_step), f"llama-46m-{common[common.index('--dtype') + 1]}.gguf")
        prefill = ["--prefill", "1"] if what == "prefill" else []
        cache = ["--cache", options.llama_cache]
        found["llama.cpp"] = {way: [options.llama_step, model] + common + prefill + cache + ["--flash", flash]
                              for way, flash in (("flash attention", "1"), ("no flash attention", "0"))}
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", nargs="?", default="build")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="train,decode,prefill")
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--modes", default="eager,compile,llama")
    parser.add_argument("--llama-step", metavar="PROGRAM", help="bench/llama_step.cc, compiled (scripts/bench --llama)")
    parser.add_argument("--cache", default="auto", choices=["auto", "fp32", "bf16"],
                        help="hotbunk's rollout.kv_cache_dtype; auto: the weights' type, as torch has it")
    parser.add_argument("--llama-cache", default="fp16", choices=["fp16", "fp32"], help="llama.cpp's; its default is fp16")
    parser.add_argument("--jemalloc", metavar="FILE", default=ctypes.util.find_library("jemalloc"))
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--child", choices=["train", "decode", "prefill"], help=argparse.SUPPRESS)
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    parser.add_argument("--dtype", help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return torch_child(options)

    cases = []
    for dtype in options.dtypes.split(","):
        if "train" in options.only.split(","):
            cases.append(("train", dtype, 0))
        if "decode" in options.only.split(","):
            cases += [("decode", dtype, int(batch)) for batch in options.batches.split(",")]
        if "prefill" in options.only.split(","):
            cases.append(("prefill", dtype, 1))
    print(machine(), flush=True)
    if not options.jemalloc:
        print("torch without jemalloc: it is not installed here (libjemalloc2)", file=sys.stderr)
    if not options.llama_step:
        print("no comparison with llama.cpp: name its sources (scripts/bench --llama DIR)", file=sys.stderr)
    rows = []
    for what, dtype, batch in cases:
        common = ["--dtype", dtype, "--threads", str(options.threads)] + (["--batch", str(batch)] if batch else [])
        others = ways(what, options, common)
        if not others:
            continue
        name = f"{what} {dtype}" + (f" batch {batch}" if batch else "")
        if what != "train" and options.cache != "auto":
            name += f", cache {options.cache}"
        # Decoding is 15 rounds long: from a context of 128 + 16 to 384. Prefill is 16.
        rounds = options.rounds if what == "train" else min(2 * options.rounds, 15)
        program = "bench_train_step" if what == "train" else "bench_decode_step"
        hotbunk = [os.path.join(options.build, "bench", program)] + common
        if what != "train":
            hotbunk += ["--cache", options.cache]
        if what == "prefill":
            hotbunk += ["--prefill", "1"]
        if what == "decode" and batch == 1:
            others["memory"] = {"reading": [os.path.join(options.build, "bench", "bench_read_memory")] + common}
        rows.append(compare(name, hotbunk, others, rounds, options.jemalloc))
        show(rows[-1])
        if "memory" in others:
            show_weight_stream(rows[-1], dtype)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"schema": "hotbunk.bench/2", "machine": machine(), "threads": options.threads, "cases": rows}, file, indent=1)


if __name__ == "__main__":
    main()
