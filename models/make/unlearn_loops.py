"""Teach a trained target not to loop: sequence-level unlikelihood (arXiv 1908.04319, section 5.2) on its greedy text.

    python models/make/unlearn_loops.py build/target/exported --work build/target -o models/eesd-code-10m

Each step lowers the loss on a batch of the training text and, on greedy continuations of other training text, raises
the loss of every token of a loop: a run of at least 16 tokens, each equal to the one a period of at most 16 earlier.
Text is left alone where it merely repeats itself. Stopped at any time, the same command goes on from there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from vllm_eesd.bench.loops import MAX_PERIOD, in_loops

sys.path.insert(0, str(Path(__file__).resolve().parent))
from measure_loops import bits_per_byte  # noqa: E402
from train_target import windows_at  # noqa: E402

LEAST_RUN = 16
PROMPT_TOKENS = 64
TEXT_WINDOWS, TEXT_TOKENS = 16, 256


def loop_mask(ids: torch.Tensor) -> torch.Tensor:
    """Return which tokens of [rows, length] belong to a loop's repetitions, as bool of that shape."""
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for period in range(1, MAX_PERIOD + 1):
        same = torch.zeros_like(mask)
        same[:, period:] = ids[:, period:] == ids[:, :-period]
        # [rows, length - LEAST_RUN + 1]: whether a run of that length begins here; every token of such a run loops.
        begins = same.unfold(1, LEAST_RUN, 1).all(dim=-1)
        for offset in range(LEAST_RUN):
            mask[:, offset : offset + begins.shape[1]] |= begins
    return mask


def unlikelihood(logits: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean of -log(1 - p(token)) over the masked tokens; 0 if there are none.

    Args:
        logits: [rows, length, vocab_size], of the token after each place.
        ids, mask: [rows, length].
    """
    log_p = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    missed = -torch.log1p(-log_p.exp().clamp(max=1 - 1e-4))
    return (missed * mask[:, 1:]).sum() / mask[:, 1:].sum().clamp(min=1)


class Unlearning:
    """A model, its optimizer and how many steps it has made."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.path = args, args.work / "unlearn.pt"
        self.model = LlamaForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.step_number = 0
        if self.path.exists():
            saved = torch.load(self.path, weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.step_number = saved["step"]

    def save(self) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step_number}
        torch.save(state, self.path.with_suffix(".tmp"))
        os.replace(self.path.with_suffix(".tmp"), self.path)

    @torch.no_grad()
    def _greedy(self, tokens: np.ndarray) -> torch.Tensor:
        """Return training text continued greedily, [prompts, PROMPT_TOKENS + length]."""
        prompts = windows_at(tokens, self.step_number * self.args.prompts, self.args.prompts, PROMPT_TOKENS, seed=1)
        prompts = prompts[:, :PROMPT_TOKENS]
        end = PROMPT_TOKENS + self.args.length
        mask = torch.ones_like(prompts)
        # Text that ends is followed by the end-of-text token, which is no loop: such rows are cut below.
        return self.model.generate(prompts, attention_mask=mask, max_length=end, do_sample=False, pad_token_id=0)

    def step(self, tokens: np.ndarray) -> dict:
        """Make one step; return its two losses and the share of continuations that looped."""
        scale = min(1.0, (self.step_number + 1) / 10) * (1 - self.step_number / self.args.steps)
        self.optimizer.param_groups[0]["lr"] = self.args.lr * scale
        ids = self._greedy(tokens)
        mask = loop_mask(ids) & (ids != 0)
        mask[:, :PROMPT_TOKENS] = False
        looping = sum(bool(in_loops(row)[-1]) and 0 not in row for row in ids.tolist()) / len(ids)
        text = windows_at(tokens, self.step_number * TEXT_WINDOWS, TEXT_WINDOWS, TEXT_TOKENS, seed=2)
        self.optimizer.zero_grad()
        loss = 0.0
        for part in text.split(4):
            nats = cross_entropy(self.model(part[:, :-1]).logits.flatten(0, 1), part[:, 1:].flatten())
            (nats * len(part) / len(text)).backward()
            loss += nats.item() * len(part) / len(text)
        unlike, rows = 0.0, mask.any(dim=1).nonzero().flatten()
        for part in rows.split(8):
            missed = unlikelihood(self.model(ids[part]).logits, ids[part], mask[part]) * len(part) / len(rows)
            (self.args.weight * missed).backward()
            unlike += missed.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step_number += 1
        return {"step": self.step_number, "nats": round(loss, 3), "unlikelihood": round(unlike, 3), "looping": looping}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--work", type=Path, default=Path("build/target"), help="folder of the token files")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--prompts", type=int, default=32, help="continuations a step")
    parser.add_argument("--length", type=int, default=128, help="tokens of a continuation")
    parser.add_argument("--weight", type=float, default=0.5, help="of the unlikelihood loss")
    parser.add_argument("--lr", type=float, default=3e-4)
    args = parser.parse_args()
    tokens = np.memmap(args.work / "train.bin", dtype=np.uint16, mode="r")
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda received, frame: stopped.append(received))
    unlearning = Unlearning(args)
    saved = time.monotonic()
    with (args.work / "unlearn.jsonl").open("a") as log:
        while unlearning.step_number < args.steps and not stopped:
            print(json.dumps(unlearning.step(tokens)), file=log, flush=True)
            if time.monotonic() - saved > 240:
                unlearning.save()
                saved = time.monotonic()
        unlearning.save()
    unlearning.model.to(torch.bfloat16).save_pretrained(args.output)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.model)
    tokenizer.save_pretrained(args.output)
    print(json.dumps(bits_per_byte(unlearning.model.float(), args.work, 256, 512)))


if __name__ == "__main__":
    main()
