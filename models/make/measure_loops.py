"""Measure a model of held-out code: bits per byte, and how often greedy text ends in a loop.

    python models/make/measure_loops.py models/eesd-code-10m --prompts models/prompts/held_out_code.jsonl
    python models/make/measure_loops.py models/eesd-code-10m --work build/target --windows 256 --seq-len 512

A continuation loops when its last 32 tokens repeat with a period of at most 16 tokens. Bits per byte need the
held-out tokens of `pack_text.py`, made with this model's tokenizer.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from vllm_eesd.bench.loops import in_loops


@torch.no_grad()
def continuations(model, prompts: list[list[int]], num_tokens: int, batch: int = 20) -> list[list[int]]:
    """Return each prompt's greedy continuation of at most `num_tokens` tokens, up to the end of the text."""
    end = model.config.eos_token_id
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    found: dict[int, list[int]] = {}
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        longest = max(len(prompts[i]) for i in chosen)
        ids = torch.tensor([[end] * (longest - len(prompts[i])) + prompts[i] for i in chosen])
        mask = torch.tensor([[0] * (longest - len(prompts[i])) + [1] * len(prompts[i]) for i in chosen])
        out = model.generate(ids, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False, pad_token_id=end)
        for i, row in zip(chosen, out[:, longest:].tolist(), strict=True):
            found[i] = row[: row.index(end)] if end in row else row
    return [found[i] for i in range(len(prompts))]


@torch.no_grad()
def held_out_nats(model, tokens: np.ndarray, windows: int, seq_len: int) -> float:
    """Return the mean loss in nats per token over evenly spaced windows."""
    starts = np.linspace(0, len(tokens) - seq_len - 2, windows).astype(int)
    total = 0.0
    for start in starts:
        ids = torch.from_numpy(tokens[start : start + seq_len + 1].astype(np.int64))[None]
        logits = model(ids[:, :-1]).logits.float()
        total += torch.nn.functional.cross_entropy(logits[0], ids[0, 1:]).item()
    return total / windows


def bits_per_byte(model, work: Path, windows: int, seq_len: int) -> dict[str, float]:
    held_out = np.fromfile(work / "held_out.bin", dtype=np.uint16)
    sizes = json.loads((work / "data.json").read_text())["held_out"]
    nats = held_out_nats(model, held_out, windows, seq_len)
    bits = nats / math.log(2) * sizes["tokens"] / sizes["bytes"]
    return {"nats_per_token": round(nats, 4), "bits_per_byte": round(bits, 4)}


def loops(model, tokenizer, prompts: list[str], num_tokens: int) -> dict:
    """Return how many prompts' greedy continuations loop, and which, by their place in the list."""
    texts = continuations(model, [tokenizer(text)["input_ids"] for text in prompts], num_tokens)
    looping = [i for i, text in enumerate(texts) if text and in_loops(text)[-1]]
    ended = sum(len(text) < num_tokens for text in texts)
    return {"prompts": len(prompts), "share": round(len(looping) / len(prompts), 3), "looping": looping, "ended": ended}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=Path, help="JSON lines with a field `prompt`")
    parser.add_argument("--tokens", type=int, default=128, help="length of a continuation")
    parser.add_argument("--work", type=Path, help="folder with held_out.bin and data.json")
    parser.add_argument("--windows", type=int, default=256)
    parser.add_argument("--seq-len", type=int, default=512, help="tokens in a window")
    args = parser.parse_args()
    model = LlamaForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    if args.prompts is not None:
        prompts = [json.loads(line)["prompt"] for line in args.prompts.read_text().splitlines()]
        tokenizer = PreTrainedTokenizerFast.from_pretrained(args.model)
        print(json.dumps(loops(model, tokenizer, prompts, args.tokens)))
    if args.work is not None:
        print(json.dumps(bits_per_byte(model, args.work, args.windows, args.seq_len)))


if __name__ == "__main__":
    main()
