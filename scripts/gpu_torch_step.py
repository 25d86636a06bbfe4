#!/usr/bin/env python3
"""A training step in torch on one GPU, for scripts/gpu_bench.py: a Llama-like model, bf16 autocast over fp32 weights,
fused AdamW, global norm clipped, compiled.

    gpu_torch_step.py CONFIG_JSON SEQUENCES TOKENS_PER_SEQUENCE MICRO_BATCH_TOKENS

Last line: {"tokens_per_s": …}, of the fastest of five steps, or {"why": …} where torch or a GPU is missing.
"""
import json
import sys
import time


def main():
    c, sequences, length, micro = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    try:
        import torch
        import torch.nn.functional as F
        from torch import nn
    except ImportError:
        return {"why": "torch is not installed"}
    if not torch.cuda.is_available():
        return {"why": "torch finds no GPU"}
    hidden, heads, kv, dim = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.before = nn.RMSNorm(hidden, c["rms_norm_eps"])
            self.between = nn.RMSNorm(hidden, c["rms_norm_eps"])
            self.qkv = nn.Linear(hidden, (heads + 2 * kv) * dim, bias=False)
            self.out = nn.Linear(heads * dim, hidden, bias=False)
            self.gate_up = nn.Linear(hidden, 2 * c["intermediate_size"], bias=False)
            self.down = nn.Linear(c["intermediate_size"], hidden, bias=False)

        def forward(self, x, cos, sin):
            b, t, _ = x.shape
            q, k, v = self.qkv(self.before(x)).split([heads * dim, kv * dim, kv * dim], -1)
            q, k, v = (y.view(b, t, -1, dim).transpose(1, 2) for y in (q, k, v))

            def turned(y):
                a, z = y.chunk(2, -1)
                return (y * cos + torch.cat([-z, a], -1) * sin).to(v.dtype)

            y = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True, enable_gqa=True)
            x = x + self.out(y.transpose(1, 2).reshape(b, t, -1))
            gate, up = self.gate_up(self.between(x)).chunk(2, -1)
            return x + self.down(F.silu(gate) * up)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(c["vocab_size"], hidden)
            self.blocks = nn.ModuleList(Block() for _ in range(c["num_hidden_layers"]))
            self.norm = nn.RMSNorm(hidden, c["rms_norm_eps"])
            self.head = nn.Linear(hidden, c["vocab_size"], bias=False)
            if c["tie_word_embeddings"]:
                self.head.weight = self.embedding.weight
            angles = torch.outer(torch.arange(length), c["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)).repeat(1, 2)
            self.register_buffer("cos", angles.cos(), persistent=False)
            self.register_buffer("sin", angles.sin(), persistent=False)

        def forward(self, ids):
            x = self.embedding(ids)
            for block in self.blocks:
                x = block(x, self.cos, self.sin)
            logits = self.head(self.norm(x))
            return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Model()
        ids = torch.randint(0, c["vocab_size"], (sequences, length))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    compiled = torch.compile(model)
    batch = max(1, micro // length)
    best = float("inf")
    for step in range(2 + 5):
        torch.cuda.synchronize()
        began = time.monotonic()
        for i in range(0, sequences, batch):
            with torch.autocast("cuda", torch.bfloat16):
                loss = compiled(ids[i:i + batch])
            (loss * len(ids[i:i + batch]) / sequences).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        if step >= 2:
            best = min(best, time.monotonic() - began)
    return {"tokens_per_s": sequences * length / best, "torch": torch.__version__}


if __name__ == "__main__":
    print(json.dumps(main()))
