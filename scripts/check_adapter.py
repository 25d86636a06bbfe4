#!/usr/bin/env python3
"""Loads an adapter of `hotbunk run` with PEFT, and holds the merged model that the run left to PEFT's own merge.

    check_adapter.py BASE RUN/checkpoints/final RUN/checkpoints/merged

BASE: the frozen model's folder. Exit 1 where logits differ by more than fp32's rounding.
"""

import sys

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM


def main():
    base, adapter, merged = sys.argv[1:]
    load = lambda folder: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    ids = torch.arange(3, 13)[None]
    with torch.no_grad():
        plain = load(base)(input_ids=ids).logits
        ours = load(merged)(input_ids=ids).logits
        adapted = PeftModel.from_pretrained(load(base), adapter)
        beside = adapted(input_ids=ids).logits
        theirs = adapted.merge_and_unload()(input_ids=ids).logits
    gap = lambda a, b: ((a - b).abs().max() / b.abs().max()).item()
    print(f"merged by hotbunk and by PEFT: {gap(ours, theirs):.1e}; beside the matrices: {gap(ours, beside):.1e}; "
          f"without adapters: {gap(ours, plain):.1e}")
    sys.exit(0 if max(gap(ours, theirs), gap(ours, beside)) < 1e-5 < gap(ours, plain) else 1)


if __name__ == "__main__":
    main()
