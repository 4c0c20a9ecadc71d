"""Train the embedded target: a small Llama-architecture code model. Made for a busy machine, stopped at any time.

    python models/make/pack_text.py --work build/target                                     # tokenizer + token files
    python models/make/train_target.py train  --work build/target --run shallow --layers 6
    python models/make/train_target.py train  --work build/target --run deep --grow-from build/target/shallow.pt
    python models/make/train_target.py train  --work build/target --run deep --decay-tokens 8000000       # the end
    python models/make/train_target.py export --work build/target --run deep -o models/eesd-code-10m

A run has no planned length: its rate warms up and stays, until `--decay-tokens` takes it down to nothing over that
many more tokens. SIGTERM and SIGINT save and stop it; the same command goes on from there, to the same weights.
A step's microbatches are shared out among `--threads` threads of one core each: they wait for one another once a step,
not at every operation, so that other work on the machine costs only the time it takes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from vllm_eesd.distill.muon import Muon

sys.path.insert(0, str(Path(__file__).resolve().parent))
from target_model import Shape, Weights, loss_of, new_weights, stacked, to_transformers  # noqa: E402

SEQ_LEN = 512
WARMUP_TOKENS = 400_000
LOG_EVERY = 10


def windows_at(tokens: np.ndarray, first: int, count: int, seq_len: int, seed: int) -> torch.Tensor:
    """Return windows number `first` to `first + count` of an endless shuffled reading, [count, seq_len + 1] int64.

    Every window of the text is read once before any is read again; which one comes when depends on the seed alone.
    That is what makes a resumed run exact.
    """
    per_epoch = (len(tokens) - 1) // seq_len
    orders = {}
    rows = []
    for number in range(first, first + count):
        epoch, index = divmod(number, per_epoch)
        if epoch not in orders:
            orders[epoch] = np.random.default_rng((seed, epoch)).permutation(per_epoch)
        start = int(orders[epoch][index]) * seq_len
        rows.append(tokens[start : start + seq_len + 1])
    return torch.from_numpy(np.stack(rows).astype(np.int64))


def rate_scale(seen: int, warm_from: int, decay_from: int | None, decay_tokens: int) -> float:
    """Return the learning rate as a share of its peak: warm up, stay, then go down linearly to 0.

    Args:
        seen: tokens seen before the step.
        warm_from: tokens seen when the run began; more than 0 for one that grew from another.
        decay_from: tokens seen when the decay began; None while it has not.
    """
    warm = min(1.0, (seen - warm_from + 1) / WARMUP_TOKENS)
    if decay_from is None:
        return warm
    return warm * max(0.0, 1 - (seen - decay_from) / decay_tokens)


class Trainer:
    """Weights, optimizers and how far they are."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.shape = Shape(**{name: getattr(args, name) for name in asdict(Shape())})
        self.path = args.work / f"{args.run}.pt"
        self.seen, self.warm_from, self.decay_from = 0, 0, None
        saved = torch.load(self.path, map_location="cpu", weights_only=True) if self.path.exists() else None
        weights = saved["model"] if saved else self._first_weights()
        self.weights: Weights = {n: w.to(self.device, torch.float32).requires_grad_() for n, w in weights.items()}
        self.optimizers = self._make_optimizers()
        if saved:
            self._resume(saved)
        if args.decay_tokens and self.decay_from is None:
            self.decay_from = self.seen
        if self.decay_from is not None and not args.decay_tokens:
            raise ValueError(f"decay_tokens=0: {self.path} decays since token {self.decay_from}; say over how many")
        self.pool = ThreadPoolExecutor(args.threads, initializer=lambda: torch.set_num_threads(1))

    def _first_weights(self) -> Weights:
        if self.args.grow_from is None:
            return new_weights(self.shape, self.args.seed)
        shallow = torch.load(self.args.grow_from, map_location="cpu", weights_only=True)
        self.seen = self.warm_from = shallow["seen"]
        return stacked(shallow["model"], self.shape.layers)

    def _make_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return Muon for the layers' matrices, in as many parts as there are threads, and AdamW for the rest."""
        inner = {name for name, w in self.weights.items() if w.ndim == 2 and "embed" not in name}
        matrices = [w for name, w in self.weights.items() if name in inner]
        others = [w for name, w in self.weights.items() if name not in inner]
        parts = [matrices[i :: self.args.threads] for i in range(self.args.threads)]
        lr = self.args.lr
        muons = [Muon(p, lr=lr, weight_decay=0.05) for p in parts]
        return [*muons, torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)]

    def _resume(self, saved: dict) -> None:
        if saved["shape"] != asdict(self.shape) or len(saved["optimizers"]) != len(self.optimizers):
            raise ValueError(f"{self.path}: was trained as {saved['shape']} in {len(saved['optimizers']) - 1} threads")
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.seen, self.warm_from, self.decay_from = saved["seen"], saved["warm_from"], saved["decay_from"]
        print(f"resumed after {self.seen} tokens", flush=True)

    @property
    def finished(self) -> bool:
        return self.decay_from is not None and self.seen >= self.decay_from + self.args.decay_tokens

    def _gradients(self, ids: torch.Tensor) -> tuple[float, list[torch.Tensor]]:
        loss = loss_of(self.shape, self.weights, ids.to(self.device), torch.bfloat16)
        return loss.item(), list(torch.autograd.grad(loss, list(self.weights.values())))

    def step(self, tokens: np.ndarray) -> float:
        """Learn from the next batch; return its loss."""
        args = self.args
        ids = windows_at(tokens, self.seen // args.seq_len, args.batch, args.seq_len, args.seed)
        chunks = ids.split(args.microbatch)
        losses: list[float] = []
        # The sum's order is the chunks' order, not that of the threads: the same weights every time.
        for loss, gradients in self.pool.map(self._gradients, chunks):
            for weight, gradient in zip(self.weights.values(), gradients, strict=True):
                weight.grad = gradient if not losses else weight.grad.add_(gradient)
            losses.append(loss)
        torch._foreach_div_([w.grad for w in self.weights.values()], len(chunks))
        torch.nn.utils.clip_grad_norm_(self.weights.values(), 1.0)
        scale = rate_scale(self.seen, self.warm_from, self.decay_from, args.decay_tokens)
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = args.lr * scale
        list(self.pool.map(lambda optimizer: optimizer.step(), self.optimizers))
        self.seen += args.batch * args.seq_len
        return sum(losses) / len(losses)

    @torch.no_grad()
    def held_out_loss(self, tokens: np.ndarray, windows: int = 64) -> float:
        """Return the mean loss in nats per token over evenly spaced windows of the held-out tokens."""
        starts = np.linspace(0, len(tokens) - self.args.seq_len - 2, windows).astype(int)
        rows = np.stack([tokens[s : s + self.args.seq_len + 1] for s in starts]).astype(np.int64)
        chunks = torch.from_numpy(rows).to(self.device).split(4)
        with torch.no_grad():
            return sum(loss_of(self.shape, self.weights, ids, torch.bfloat16).item() for ids in chunks) / len(chunks)

    def save(self) -> None:
        """Write the checkpoint whole or not at all, and a copy of it into `--copy-to`."""
        state = {
            "model": {name: weight.detach() for name, weight in self.weights.items()},
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "shape": asdict(self.shape),
            "seen": self.seen,
            "warm_from": self.warm_from,
            "decay_from": self.decay_from,
        }
        torch.save(state, self.path.with_suffix(".tmp"))
        os.replace(self.path.with_suffix(".tmp"), self.path)
        if self.args.copy_to is not None:
            copy = self.args.copy_to / self.path.name
            shutil.copyfile(self.path, copy.with_suffix(".tmp"))
            os.replace(copy.with_suffix(".tmp"), copy)


def train(args: argparse.Namespace) -> None:
    """Train until a signal, `--tokens`, `--minutes` or the decay's end; log to `<work>/<run>.jsonl`."""
    torch.set_num_threads(1)
    tokens = np.memmap(args.work / "train.bin", dtype=np.uint16, mode="r")
    held_out = np.fromfile(args.work / "held_out.bin", dtype=np.uint16)
    sizes = json.loads((args.work / "data.json").read_text())["held_out"]
    trainer = Trainer(args)
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, frame: stopped.append(received))
    began = saved = time.monotonic()
    deadline = began + 60 * args.minutes
    with open(args.work / f"{args.run}.jsonl", "a") as log:

        def write(**row) -> None:
            print(json.dumps({"tokens": trainer.seen, **row}), file=log, flush=True)

        losses, tick = [], began
        while not (stopped or trainer.finished or trainer.seen >= args.tokens or time.monotonic() > deadline):
            losses.append(trainer.step(tokens))
            now = time.monotonic()
            if len(losses) == LOG_EVERY:
                speed = LOG_EVERY * args.batch * args.seq_len / (now - tick)
                write(loss=round(sum(losses) / LOG_EVERY, 4), tokens_per_s=round(speed), cpu_s=int(time.process_time()))
                losses, tick = [], now
            if now - saved > 60 * args.save_minutes:
                trainer.save()
                nats = trainer.held_out_loss(held_out)
                bits = nats / np.log(2) * sizes["tokens"] / sizes["bytes"]
                write(held_out=round(nats, 4), bits_per_byte=round(bits, 4), hours=round((now - began) / 3600, 3))
                saved = tick = time.monotonic()
        trainer.save()
        write(saved=True, signal=stopped)


def export(args: argparse.Namespace) -> None:
    """Write a transformers directory, weights rounded to bfloat16 (half the bytes)."""
    state = torch.load(args.work / f"{args.run}.pt", map_location="cpu", weights_only=True)
    model = to_transformers(replace(Shape(), **state["shape"]), state["model"])
    model.to(torch.bfloat16).save_pretrained(args.output)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.work / "tokenizer")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    tokenizer.save_pretrained(args.output)
    print(f"wrote {args.output}, trained on {state['seen']} tokens")


def add_training_flags(sub: argparse.ArgumentParser) -> None:
    for name, value in asdict(Shape()).items():
        sub.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    sub.add_argument("--seed", type=int, default=0)
    sub.add_argument("--grow-from", type=Path, help="checkpoint of a shallower run, whose layers are stacked")
    sub.add_argument("--tokens", type=float, default=float("inf"), help="stop after this many tokens seen")
    sub.add_argument("--minutes", type=float, default=float("inf"), help="stop this call after this long")
    sub.add_argument("--decay-tokens", type=int, default=0, help="begin the decay now, over this many tokens")
    sub.add_argument("--batch", type=int, default=16, help="windows a step")
    sub.add_argument("--microbatch", type=int, default=2, help="windows a thread takes at a time")
    sub.add_argument("--threads", type=int, default=2)
    sub.add_argument("--seq-len", type=int, default=SEQ_LEN)
    sub.add_argument("--lr", type=float, default=4e-3)
    sub.add_argument("--save-minutes", type=float, default=8)
    sub.add_argument("--copy-to", type=Path, help="folder that gets a copy of every checkpoint")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("train", "export"):
        sub = commands.add_parser(name)
        sub.add_argument("--work", type=Path, default=Path("build/target"))
        sub.add_argument("--run", default="deep", help="name of the checkpoint and log in --work")
    commands.choices["export"].add_argument("-o", "--output", type=Path, required=True)
    add_training_flags(commands.choices["train"])
    args = parser.parse_args()
    {"train": train, "export": export}[args.command](args)


if __name__ == "__main__":
    main()
