"""Does a parallel exit head accept enough? Teacher-forced on the embedded target, beside its sequential head.

    python models/make/try_parallel_head.py --name mlp --correction mlp --steps 1500 --batch 64 --json out/mlp.json
    python models/make/try_parallel_head.py --name sequential --real 8 --steps 1500 --batch 64

Wants a GPU, the token files of pack_text.py and the generated windows of train_drafters.py. All start from the shipped
head (N = 1, M = 2, auxiliary layers) and are trained equally long, the sequential one (`--real 8`) too. Slots up to
`--real` are the sequential head's. The others enter only the exit layers, as one learned vector, an offset each, the
projected last hidden state of the newest verified token and the projected state of the last slot that was real. What
token stands before a slot is told to it afterwards, by a correction:

- low_rank: logits += U V[token] (DSpark's Markov head, arXiv 2607.05147);
- mlp: an MLP of the slot's output and the target's own embedding of the token, added before the norm.

Blocks of 8, the loss weighted by exp(-slot / 4), Muon and AdamW.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_eesd.distill.data import TokenData
from vllm_eesd.distill.generate import OwnText, own_held_out
from vllm_eesd.distill.model import block_mask, load_head
from vllm_eesd.distill.muon import Muon
from vllm_eesd.distill.target import Target, load_target
from vllm_eesd.distill.train import TrainConfig, learning_rate_scale, place_weights
from vllm_eesd.exit_head.checkpoint import ExitHeadConfig

MODEL = "models/eesd-code-10m"
HEAD = f"{MODEL}/eesd"
SEQ_LEN, SLOTS, CANDIDATES = 512, 8, 64
DRAWN_TEMPERATURE = 0.8
#: Windows that exist as logits at one time.
AT_ONCE = 16


class Slots(nn.Module):
    """The shipped head, whose slots from `real` on are drafted in one pass; `real` = 8 is the sequential head."""

    def __init__(self, target: Target, real: int, correction: str, rank: int = 128) -> None:
        super().__init__()
        size, vocab_size = target.config.hidden_size, target.config.vocab_size
        self.head, self.real, self.correction = load_head(target, HEAD).requires_grad_(True), real, correction
        self.num_aux, self.eps = len(target.aux_layers), target.config.rms_norm_eps
        self.embedding = (target.lm_head.weight.detach(),)
        self.mask, self.offsets = nn.Parameter(torch.zeros(size)), nn.Parameter(torch.zeros(SLOTS, size))
        self.verified, self.anchor = (nn.Linear(size, size, bias=False) for _ in range(2))
        self.verified.weight.data.copy_(self.head.deep.inject.weight.data)
        nn.init.zeros_(self.anchor.weight)
        if correction == "mlp":
            self.told_norm, self.inner, self.outer = (
                nn.RMSNorm(size),
                nn.Linear(2 * size, 2 * size),
                nn.Linear(2 * size, size),
            )
            nn.init.zeros_(self.outer.weight)
            nn.init.zeros_(self.outer.bias)
        elif correction == "low_rank":
            self.tokens, self.biases = nn.Embedding(vocab_size, rank), nn.Linear(rank, vocab_size, bias=False)
            nn.init.normal_(self.tokens.weight, std=rank**-0.5)
            nn.init.zeros_(self.biases.weight)

    def forward(self, ids: Tensor, exit_states: Tensor, target_hidden: Tensor, rotary: tuple, starts: Tensor) -> tuple:
        """Return (logits without correction, logits), [num_windows, seq_len, vocab_size]; as `ExitHead.forward`."""
        exit_hidden, *aux = exit_states.chunk(1 + self.num_aux, dim=-1)
        aux = [F.rms_norm(state.float(), state.shape[-1:], eps=self.eps).to(state.dtype) for state in aux]
        context = torch.cat([target_hidden, self.head.layer.input_layernorm(exit_hidden), *aux], dim=-1)
        slot = torch.arange(SEQ_LEN, device=ids.device) - starts
        produced = target_hidden[:, (starts - 1).clamp(min=0)] * (starts > 0)[None, :, None]
        last_real = exit_hidden[:, (starts + self.real - 1).clamp(max=SEQ_LEN - 1)]
        made_up = self.mask + self.offsets[slot.clamp(max=SLOTS - 1)] + self.verified(produced) + self.anchor(last_real)
        is_real = (slot < self.real)[None, :, None]
        hidden = torch.where(is_real, exit_hidden + self.head.deep.inject(produced), made_up)
        mask = block_mask(starts)
        for layer in (self.head, *self.head.upper):
            hidden = layer.run(hidden, context, rotary, mask)
        weight, normed = self.embedding[0], self.head.norm(hidden)
        plain = normed @ weight.T
        if self.correction == "none" or self.real >= SLOTS:
            return plain, plain
        if self.correction == "mlp":
            told = torch.cat([normed, self.told_norm(weight[ids])], dim=-1)
            more = self.outer(F.silu(self.inner(told))).masked_fill(is_real, 0.0)
            return plain, self.head.norm(hidden + more) @ weight.T
        return plain, plain + self.biases(self.tokens(ids).masked_fill(is_real, 0.0))


def grid(first: int, device: str) -> Tensor:
    """Return where each position's block starts, [seq_len] int64: blocks of 8 from `first` on."""
    positions = torch.arange(SEQ_LEN, device=device)
    return torch.where(positions < first, 0, positions - (positions - first) % SLOTS)


@torch.no_grad()
def measure(model: Slots, target: Target, texts: dict[str, Tensor], first: int) -> dict[str, list[float] | float]:
    """Return leading matches on greedy text and sum min(p, q) on drawn text, by slot, and the tokens a round of each."""
    weight, results = model.embedding[0], {}
    positions = torch.arange(SEQ_LEN, device=weight.device)
    for name, ids in texts.items():
        reached, num_rounds = torch.zeros(SLOTS, dtype=torch.float64), 0
        for some_ids in ids.to(weight.device).split(AT_ONCE):
            exit_states, target_hidden, rotary = target(some_ids)
            wanted = target_hidden @ weight.T
            for start in range(first, first + SLOTS, 2):
                starts = grid(start, weight.device)
                plain, logits = model(some_ids, exit_states, target_hidden, rotary, starts)
                if plain is not logits:
                    kept = torch.zeros_like(plain, dtype=torch.bool).scatter_(-1, plain.topk(CANDIDATES).indices, True)
                    kept |= (positions - starts < model.real)[None, :, None]
                    logits = logits.masked_fill(~kept, -torch.inf)
                some = slice(start, start + (SEQ_LEN - start) // SLOTS * SLOTS)
                if name == "greedy":
                    accepted = (wanted.argmax(-1) == logits.argmax(-1))[:, some].double()
                else:
                    p, q = ((x[:, some].float() / DRAWN_TEMPERATURE).softmax(-1) for x in (wanted, logits))
                    accepted = torch.minimum(p, q).sum(-1).double()
                rounds = accepted.unflatten(1, (-1, SLOTS)).cumprod(-1)
                reached += rounds.sum((0, 1)).cpu()
                num_rounds += rounds.shape[0] * rounds.shape[1]
        results[name] = [round(share, 3) for share in (reached / num_rounds).tolist()]
        results[f"{name}_tokens_a_round"] = round(1 + float((reached / num_rounds).sum()), 3)
    return results


def optimizers_of(model: Slots, lr: float) -> list[tuple[torch.optim.Optimizer, float]]:
    """Return what trains the head and the new parts, each with its learning rate."""
    fresh = {"mask", "offsets", "tokens.weight", "biases.weight"}
    named = dict(model.named_parameters())
    others = [p for name, p in named.items() if name not in fresh]
    return [
        (Muon([p for p in others if p.ndim == 2], lr=lr, weight_decay=0.01), lr),
        (torch.optim.AdamW([p for p in others if p.ndim != 2], betas=(0.9, 0.95), weight_decay=0.0), lr),
        (torch.optim.AdamW([p for n, p in named.items() if n in fresh], betas=(0.9, 0.95), weight_decay=0.0), 0.003),
    ]


def main() -> None:
    """Train, and print what was measured as lines of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", required=True)
    parser.add_argument("--data", type=Path, default=Path("build/target"), help="of pack_text.py")
    parser.add_argument("--own", type=Path, default=Path("build/own"), help="with generated.bin of train_drafters.py")
    parser.add_argument("--self-generate", type=int, default=1024)
    parser.add_argument("--correction", default="mlp", choices=("none", "low_rank", "mlp"))
    parser.add_argument("--real", type=int, default=1, help="slots drafted one after the other; 8: the sequential head")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.00875, help="half of eesd distill's")
    parser.add_argument("--windows", type=int, default=32, help="held out")
    parser.add_argument("--measure-every", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shipped = ExitHeadConfig.load(HEAD)
    target = load_target(MODEL, shipped.exit_layer, "cpu", shipped.aux_layers).to(device)
    text, held_out = (
        [np.memmap(args.data / f"{name}.bin", dtype=np.uint16, mode="r")] for name in ("train", "held_out")
    )
    own = OwnText(args.own, target, args.self_generate, SEQ_LEN, [1.0, 0.7], 0)
    data, config = TokenData(text, own.windows()), TrainConfig(steps=args.steps, batch=args.batch, seq_len=SEQ_LEN)
    greedy, first = own_held_out(target, held_out, args.windows, SEQ_LEN)
    drawn, _ = own_held_out(target, held_out, args.windows, SEQ_LEN, DRAWN_TEMPERATURE)
    texts = {"greedy": greedy, "drawn": drawn}
    model = Slots(target, args.real, args.correction).to(device)
    model.embedding = (model.embedding[0].to(device),)
    optimizers, weight, began, seen = optimizers_of(model, args.lr), model.embedding[0], time.monotonic(), []

    def tell(step: int) -> None:
        about = {"name": args.name, "seed": args.seed, "step": step, "tokens": step * args.batch * SEQ_LEN}
        seen.append(about | {"s": round(time.monotonic() - began)} | measure(model, target, texts, first))
        print(json.dumps(seen[-1]), flush=True)

    tell(0)
    generator = torch.Generator().manual_seed(args.seed)
    for step in range(args.steps):
        ids = data.batch_at(step, args.batch, SEQ_LEN, args.seed).to(device)
        starts = grid(int(torch.randint(1, SLOTS + 1, (), generator=generator)), device)
        weights = place_weights(starts, 4.0)
        weights = weights / weights.mean()
        for some in ids.split(AT_ONCE):
            with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
                with torch.no_grad():
                    exit_states, target_hidden, rotary = target(some)
                    wanted = (target_hidden @ weight.T).float().softmax(-1)
                logits = model(some, exit_states, target_hidden, rotary, starts)[1].float()
            loss = (logits.logsumexp(-1) - (wanted * logits).sum(-1)) * weights
            (loss.mean() * len(some) / len(ids)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scale = learning_rate_scale(step, 0.0, config)
        for optimizer, lr in optimizers:
            optimizer.param_groups[0]["lr"] = lr * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if (step + 1) % args.measure_every == 0 or step + 1 == args.steps:
            tell(step + 1)
    if args.json is not None:
        args.json.write_text(json.dumps(seen, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
