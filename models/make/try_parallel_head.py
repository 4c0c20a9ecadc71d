"""Does a parallel exit head accept enough? Teacher-forced on the embedded target, against its sequential head.

    python models/make/try_parallel_head.py prepare --work build/parallel      # texts and the target's states on them
    python models/make/try_parallel_head.py train --work build/parallel --name mlp --correction mlp

Slot 1 is the sequential head's: the input token through the first N layers. Slots 2 to 8 enter only the exit layers, as
one learned vector, an offset each, the projected last hidden state of the newest verified token and the projected state
of the last slot that was real. What token stands before a slot is told to it afterwards, by a correction:

- low_rank: logits += U V[token] (DSpark's Markov head, arXiv 2607.05147);
- gru: the same with the state of a GRU over the tokens and outputs of the block (Domino);
- mlp: an MLP of the slot's output and the target's own embedding of the token, added before the norm.

Starts from the shipped head; blocks of 8, loss weighted by exp(-slot / 4), Muon and AdamW.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_eesd.distill.data import random_windows, stacked
from vllm_eesd.distill.generate import continue_windows, own_held_out
from vllm_eesd.distill.model import DeepLayer, _plain_layer, block_mask, load_head
from vllm_eesd.distill.muon import Muon
from vllm_eesd.distill.target import Target, load_target

MODEL, HEAD, EXIT_LAYER = "models/eesd-code-10m", "models/eesd-code-10m/eesd", 2
SEQ_LEN, SLOTS, CANDIDATES = 512, 8, 64
DRAWN_TEMPERATURE = 0.8


@torch.no_grad()
def prepare(args: argparse.Namespace) -> None:
    """Write windows of text and of the target's own, held-out text of its own, and h_N and the last state of all."""
    target = load_target(MODEL, EXIT_LAYER, "cpu")
    text, held_out = (
        [np.memmap(args.text / name, dtype=np.uint16, mode="r")] for name in ("train.bin", "held_out.bin")
    )
    rng = np.random.default_rng(1)
    windows = [stacked(random_windows(text, 1024, SEQ_LEN, rng))]
    for part in range(4):
        prompts = stacked(random_windows(text, 160, int(rng.integers(64, 200)), rng))
        windows.append(continue_windows(target, prompts, SEQ_LEN, torch.tensor([0.0, 1.0, 0.0, 0.7] * 40), part))
    ids = torch.cat(windows)[torch.from_numpy(rng.permutation(1024 + 640))]
    states = torch.empty(*ids.shape, 2, target.config.hidden_size, dtype=torch.bfloat16)
    for some in torch.arange(len(ids)).split(16):
        states[some, :, 0], states[some, :, 1], _ = (*target(ids[some])[:2], None)
    args.work.mkdir(parents=True, exist_ok=True)
    greedy, first = own_held_out(target, held_out, 32, SEQ_LEN)
    drawn, _ = own_held_out(target, held_out, 32, SEQ_LEN, DRAWN_TEMPERATURE)
    torch.save({"ids": ids, "greedy": greedy, "drawn": drawn, "first": first}, args.work / "ids.pt")
    torch.save(states, args.work / "states.pt")


class Slots(nn.Module):
    """A head of `layers` layers whose slots from `real` on are drafted in one pass; `real` = 8 is the sequential head."""

    def __init__(self, target: Target, layers: int, real: int, correction: str, rank: int = 128) -> None:
        super().__init__()
        size, vocab_size = target.config.hidden_size, target.config.vocab_size
        self.head, self.real, self.correction = load_head(target, HEAD).requires_grad_(True), real, correction
        for _ in range(layers - 1):  # which say nothing at first
            layer = DeepLayer(_plain_layer(target.model.model.layers[-1], target.config))
            nn.init.zeros_(layer.layer.self_attn.o_proj.weight)
            nn.init.zeros_(layer.layer.mlp.down_proj.weight)
            self.head.upper.append(layer)
        self.embedding = (target.lm_head.weight.detach(),)
        self.mask, self.offsets = nn.Parameter(torch.zeros(size)), nn.Parameter(torch.zeros(SLOTS, size))
        self.verified, self.anchor = (nn.Linear(size, size, bias=False) for _ in range(2))
        self.verified.weight.data.copy_(self.head.deep.inject.weight.data)
        nn.init.zeros_(self.anchor.weight)
        if correction == "mlp":
            self.norm, self.inner, self.outer = (
                nn.RMSNorm(size), nn.Linear(2 * size, 2 * size), nn.Linear(2 * size, size),
            )  # fmt: skip
            nn.init.zeros_(self.outer.weight)
            nn.init.zeros_(self.outer.bias)
        elif correction != "none":
            self.tokens, self.biases = nn.Embedding(vocab_size, rank), nn.Linear(rank, vocab_size, bias=False)
            nn.init.normal_(self.tokens.weight, std=rank**-0.5)
            nn.init.zeros_(self.biases.weight)
        if correction == "gru":
            self.gru = nn.GRUCell(rank + size, rank)

    def forward(self, ids: Tensor, exit_hidden: Tensor, target_hidden: Tensor, rotary: tuple, starts: Tensor) -> tuple:
        """Return (logits without correction, logits), [num_windows, seq_len, vocab_size]; as `ExitHead.forward`."""
        slot = torch.arange(SEQ_LEN) - starts
        produced = target_hidden[:, (starts - 1).clamp(min=0)] * (starts > 0)[None, :, None]
        last_real = exit_hidden[:, (starts + self.real - 1).clamp(max=SEQ_LEN - 1)]
        made_up = self.mask + self.offsets[slot.clamp(max=SLOTS - 1)] + self.verified(produced) + self.anchor(last_real)
        is_real = (slot < self.real)[None, :, None]
        hidden = torch.where(is_real, exit_hidden + self.head.deep.inject(produced), made_up)
        mask = block_mask(starts)
        for layer in (self.head, *self.head.upper):
            hidden = layer.run(hidden, target_hidden, rotary, mask)
        weight, normed = self.embedding[0], self.head.norm(hidden)
        plain = normed @ weight.T
        if self.correction == "none":
            return plain, plain
        if self.correction == "mlp":
            told = torch.cat([normed, self.norm(weight[ids])], dim=-1)
            more = self.outer(F.silu(self.inner(told))).masked_fill(is_real, 0.0)
            return plain, self.head.norm(hidden + more) @ weight.T
        read = self.tokens(ids) if self.correction == "low_rank" else self._recurrent(ids, normed, starts, slot)
        return plain, plain + self.biases(read.masked_fill(is_real, 0.0))

    def _recurrent(self, ids: Tensor, normed: Tensor, starts: Tensor, slot: Tensor) -> Tensor:
        told = torch.cat([self.tokens(ids), normed], dim=-1)
        first = torch.nonzero(slot == 0)[:, 0]
        state = told.new_zeros(len(ids) * len(first), self.tokens.embedding_dim)
        read = told.new_zeros(*ids.shape, self.tokens.embedding_dim)
        for k in range(SLOTS):
            at = (first + k).clamp(max=SEQ_LEN - 1)
            state = self.gru(told[:, at].flatten(0, 1), state)
            here = (first + k < SEQ_LEN) & (starts[at] == first)
            read = read.index_copy(1, at[here], state.view(len(ids), len(first), -1)[:, here])
        return read


def grid(first: int) -> Tensor:
    """Return where each position's block starts, [seq_len] int64: blocks of 8 from `first` on."""
    positions = torch.arange(SEQ_LEN)
    return torch.where(positions < first, 0, positions - (positions - first) % SLOTS)


@torch.no_grad()
def measure(model: Slots, texts: dict[str, tuple], first: int) -> dict[str, list[float] | float]:
    """Return leading matches on greedy text and sum min(p, q) on drawn text, by slot, and the tokens a round of each."""
    weight, results = model.embedding[0], {}
    for name, (ids, exit_hidden, target_hidden, rotary) in texts.items():
        reached, num_rounds = torch.zeros(SLOTS, dtype=torch.float64), 0
        for rows in torch.arange(len(ids)).split(16):
            wanted = target_hidden[rows] @ weight.T
            for start in range(first, first + SLOTS, 2):
                plain, logits = model(ids[rows], exit_hidden[rows], target_hidden[rows], rotary, grid(start))
                if plain is not logits:
                    kept = torch.zeros_like(plain, dtype=torch.bool).scatter_(-1, plain.topk(CANDIDATES).indices, True)
                    kept |= (torch.arange(SEQ_LEN) - grid(start) < model.real)[None, :, None]
                    logits = logits.masked_fill(~kept, -torch.inf)
                some = slice(start, start + (SEQ_LEN - start) // SLOTS * SLOTS)
                if name == "greedy":
                    accepted = (wanted.argmax(-1) == logits.argmax(-1))[:, some].double()
                else:
                    p, q = ((x[:, some] / DRAWN_TEMPERATURE).softmax(-1) for x in (wanted, logits))
                    accepted = torch.minimum(p, q).sum(-1).double()
                rounds = accepted.unflatten(1, (-1, SLOTS)).cumprod(-1)
                reached += rounds.sum((0, 1))
                num_rounds += rounds.shape[0] * rounds.shape[1]
        results[name] = [round(share, 3) for share in (reached / num_rounds).tolist()]
        results[f"{name}_tokens_a_round"] = round(1 + float((reached / num_rounds).sum()), 3)
    return results


def train(args: argparse.Namespace) -> None:
    """Train, and print what was measured as lines of JSON."""
    torch.manual_seed(args.seed)
    target = load_target(MODEL, EXIT_LAYER, "cpu")
    weight = target.lm_head.weight.detach()
    given, states = torch.load(args.work / "ids.pt"), torch.load(args.work / "states.pt", mmap=True)
    with torch.no_grad():
        texts = {name: (given[name], *target(given[name])) for name in ("greedy", "drawn")}
    model = Slots(target, args.layers, args.real, args.correction)
    model.mask.data = states[:64, :, 0].float().mean((0, 1))
    new = [p for name, p in model.named_parameters() if name in ("mask", "offsets", "tokens.weight", "biases.weight")]
    others = [p for p in model.parameters() if not any(p is fresh for fresh in new)]
    optimizers = [
        (Muon([p for p in others if p.ndim == 2], args.lr, 0.01, torch.float32), args.lr),
        (torch.optim.AdamW([p for p in others if p.ndim != 2], betas=(0.9, 0.95), weight_decay=0.0), args.lr),
        (torch.optim.AdamW(new, betas=(0.9, 0.95), weight_decay=0.0), 0.003),
    ]
    print(json.dumps({"step": 0, **measure(model, texts, given["first"])}), flush=True)
    began, generator = time.monotonic(), torch.Generator().manual_seed(args.seed)
    for step in range(args.steps):
        rows = torch.arange(step * args.batch, (step + 1) * args.batch) % len(given["ids"])
        starts = grid(int(torch.randint(1, SLOTS + 1, (), generator=generator)))
        weights = torch.exp(-(torch.arange(SEQ_LEN) - starts) / 4)
        for some in rows.split(4):
            exit_hidden, target_hidden = states[some].float().unbind(2)
            wanted = (target_hidden @ weight.T).softmax(-1)
            logits = model(given["ids"][some], exit_hidden, target_hidden, texts["greedy"][3], starts)[1]
            loss = (logits.logsumexp(-1) - (wanted * logits).sum(-1)) * weights / weights.mean()
            (loss.mean() * len(some) / len(rows)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scale = min(1.0, (step + 1) / 30) * (0.01 + 0.495 * (1 + math.cos(math.pi * step / args.steps)))
        for optimizer, lr in optimizers:
            optimizer.param_groups[0]["lr"] = lr * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if (step + 1) % args.measure_every == 0 or step + 1 == args.steps:
            seen = {"step": step + 1, "tokens": (step + 1) * args.batch * SEQ_LEN, "s": time.monotonic() - began}
            print(json.dumps({**seen, **measure(model, texts, given["first"])}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for function in (prepare, train):
        sub = commands.add_parser(function.__name__)
        sub.set_defaults(function=function)
        sub.add_argument("--work", type=Path, default=Path("build/parallel"))
    commands.choices["prepare"].add_argument("--text", type=Path, default=Path("build/target"))
    sub.add_argument("--correction", default="mlp", choices=("none", "low_rank", "gru", "mlp"))
    sub.add_argument("--layers", type=int, default=1)
    sub.add_argument("--real", type=int, default=1, help="slots drafted one after the other; 8 is the sequential head")
    sub.add_argument("--steps", type=int, default=300)
    sub.add_argument("--batch", type=int, default=8)
    sub.add_argument("--lr", type=float, default=0.004)
    sub.add_argument("--measure-every", type=int, default=150)
    sub.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.function(args)


if __name__ == "__main__":
    main()
