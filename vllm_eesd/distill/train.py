"""The training loop: a frozen target, one exit head, resumable to the bit."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from vllm_eesd.config import LONGEST_DRAFT
from vllm_eesd.distill import processes
from vllm_eesd.distill.config import TrainConfig
from vllm_eesd.distill.data import TokenData
from vllm_eesd.distill.losses import build_loss, distillation_loss
from vllm_eesd.distill.muon import Muon, uses_bfloat16
from vllm_eesd.distill.target import Target
from vllm_eesd.distill.vocabulary import draft_token_ids
from vllm_eesd.files import replacing

# A warm start needs only a short warm-up: it keeps the first, badly scaled steps small.
WARMUP_STEPS = 30
# Times 1 / sqrt(hidden_size), as weights shrink with width: 0.0175 at 256, where half and twice it were compared.
DEFAULT_LR = 0.28
# Times that for a head that goes on learning: a high rate would first undo what it knows.
CONTINUED_LR_SHARE = 0.125
FINAL_LR_SHARE = 0.01
SAVE_EVERY_S = 120
# May differ between the parts of one run: how far it goes, and how a step is computed.
FREE_FIELDS = {"steps", "minutes", "compile", "accumulate"}


def train(
    target: Target,
    head: nn.Module,
    data: TokenData,
    config: TrainConfig,
    checkpoint: Path | None = None,
    on_step: Callable[[int, float], None] | None = None,
) -> dict[str, Any]:
    """Train `head` in place and return {"steps", "tokens", "minutes", "tokens_per_s", "losses"}.

    Of several processes each takes its share of every batch; the first one writes.

    Args:
        checkpoint: resumed from if it exists; written every two minutes, at the end, and when interrupted.
        on_step: called with (steps done, loss) after every step.
    Raises:
        ValueError: the checkpoint belongs to another run.
    """
    lr = _default_lr(config, target.config.hidden_size) if config.lr is None else config.lr
    optimizers, this_run = _make_optimizers(head, lr), _identity(config, target)
    run = _resume(checkpoint, head, optimizers, this_run)
    processes.wait()
    keep = partial(_save, checkpoint if processes.is_first() else None, head, optimizers, run, this_run)
    gradients = _gradients_of(target, head, config)
    limit_s = math.inf if config.minutes is None else 60 * config.minutes
    began, saved_at, whole_step = time.monotonic() - run["elapsed_s"], time.monotonic(), True
    shown = {"desc": "distilling", "unit": "step", "disable": not processes.is_first()}
    with tqdm(total=config.steps, initial=run["step"], **shown) as progress:
        try:
            while run["step"] < config.steps and run["elapsed_s"] < limit_s:
                ids = data.batch_at(run["step"], config.batch, config.seq_len, config.seed)
                loss = gradients(ids, random_block_starts(config.seq_len, (config.seed, run["step"], 1)))
                torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
                whole_step = False
                _update(optimizers, lr * learning_rate_scale(run["step"], run["elapsed_s"], config))
                run["step"] += 1
                run["elapsed_s"] = processes.agree(time.monotonic() - began)
                run["losses"].append(round(loss, 5))
                whole_step = True
                _show(progress, run["losses"])
                if on_step is not None:
                    on_step(run["step"], run["losses"][-1])
                if time.monotonic() - saved_at > SAVE_EVERY_S:
                    keep()
                    saved_at = time.monotonic()
        finally:
            # Also when interrupted, unless within a step: half of one would make the resumed run another one.
            if whole_step:
                keep()
    return _summary(run, config)


def _summary(run: dict[str, Any], config: TrainConfig) -> dict[str, Any]:
    tokens = run["step"] * config.batch * config.seq_len
    return {
        "steps": run["step"],
        "tokens": tokens,
        "minutes": run["elapsed_s"] / 60,
        "tokens_per_s": tokens / max(run["elapsed_s"], 1e-9),
        "losses": run["losses"],
    }


def _show(progress: tqdm, losses: list[float]) -> None:
    progress.update()
    progress.set_postfix(loss=f"{statistics.fmean(losses[-20:]):.4f}", refresh=False)


def _default_lr(config: TrainConfig, hidden_size: int) -> float:
    share = 1.0 if config.init_head is None else CONTINUED_LR_SHARE
    return share * DEFAULT_LR / math.sqrt(hidden_size)


def _identity(config: TrainConfig, target: Target) -> dict[str, Any]:
    """Return what must be the same for a checkpoint to be of this run."""
    fields = config.model_dump(include=TrainConfig.model_fields.keys() - FREE_FIELDS)
    return fields | {"exit_layer": target.exit_layer, "target_weights": target.fingerprint}


def _save(
    checkpoint: Path | None,
    head: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    run: dict[str, Any],
    run_identity: dict[str, Any],
) -> None:
    """Write what `_resume` needs, in one step; None writes nothing."""
    if checkpoint is None:
        return
    states = [optimizer.state_dict() for optimizer in optimizers]
    with replacing(checkpoint) as file:
        torch.save({"head": head.state_dict(), "optimizers": states, "identity": run_identity, "run": run}, file)


def _resume(
    checkpoint: Path | None, head: nn.Module, optimizers: list[torch.optim.Optimizer], run_identity: dict[str, Any]
) -> dict[str, Any]:
    """Load a checkpoint, if there is one, into the head and the optimizers and return the run's counters.

    Raises:
        ValueError: it is damaged, or of another run.
    """
    if checkpoint is None or not checkpoint.exists():
        return {"step": 0, "elapsed_s": 0.0, "losses": []}
    try:
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)
        saved, run = state["identity"], state["run"]
    except Exception as error:  # torch.load raises many kinds for a damaged file
        reason = " ".join(str(error).split())[:120]
        raise ValueError(f"work: {checkpoint} is damaged ({reason}); remove it to start again") from None
    for field, value in run_identity.items():
        if saved.get(field) != value:
            raise ValueError(
                f"work: {checkpoint} has {field} {saved.get(field)!r}, this run {value!r}; use another --work"
            )
    head.load_state_dict(state["head"])
    for optimizer, saved_state in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved_state)
    return run


def _update(optimizers: list[torch.optim.Optimizer], lr: float) -> None:
    """Take one step of every optimizer, at this learning rate, and forget the gradients."""
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _gradients_of(target: Target, head: nn.Module, config: TrainConfig) -> Callable[[Tensor, Tensor], float]:
    """Return a function that leaves the whole batch's gradient in the head's parameters and returns its loss."""
    device = target.lm_head.weight.device
    step_loss = _step_loss(target, head, config, device.type)
    step_loss = torch.compile(step_loss) if config.compile else step_loss

    def gradients(ids: Tensor, block_starts: Tensor) -> float:
        total = 0.0
        for rows in processes.share_of(ids, processes.rank(), processes.count()).chunk(config.accumulate):
            loss = step_loss(rows.to(device), block_starts.to(device)) / config.accumulate
            loss.backward()
            total += loss.item()
        return processes.average(total, head.parameters())

    return gradients


def learning_rate_scale(step: int, elapsed_s: float, config: TrainConfig) -> float:
    """Return the share of `lr` for a step; with a time limit, whichever of steps and time is further on counts."""
    done = step / config.steps
    if config.minutes is not None:
        done = max(done, elapsed_s / (60 * config.minutes))
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return warmup * (FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * cosine)


def random_block_starts(seq_len: int, seed: tuple[int, ...]) -> Tensor:
    """Return for each position the start of its draft block, [seq_len] int64; blocks are 1 to LONGEST_DRAFT long."""
    lengths = np.random.default_rng(seed).integers(1, LONGEST_DRAFT + 1, size=seq_len)
    return torch.from_numpy(np.repeat(lengths.cumsum() - lengths, lengths)[:seq_len])


def _step_loss(target: Target, head: nn.Module, config: TrainConfig, device: str) -> Callable[[Tensor, Tensor], Tensor]:
    loss, on_text = build_loss(config.loss, config.jsd_beta), config.loss == "ce_text"
    knows_places = head.head_type == "deep_context" and config.position_decay > 0
    decay = config.position_decay if knows_places else math.inf
    weight, bias = target.lm_head.weight, target.lm_head.bias
    if (token_ids := draft_token_ids(head)) is not None:
        # Both distributions within the draft vocabulary: of what the target says beyond it nothing can be learned.
        weight, bias = weight[token_ids], None if bias is None else bias[token_ids]

    def step_loss(ids: Tensor, block_starts: Tensor) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=uses_bfloat16(device)):
            with torch.no_grad():
                exit_hidden, target_hidden, rotary = target(ids)
            hidden, labels = head(exit_hidden, target_hidden, rotary, block_starts), None
            weights = place_weights(block_starts, decay)
            if on_text:  # the last position's next token is not in the window
                hidden, target_hidden, labels = hidden[:, :-1], target_hidden[:, :-1], ids[:, 1:].flatten()
                weights = weights[:-1]
            flat = hidden.flatten(0, 1), target_hidden.flatten(0, 1)
            return distillation_loss(loss, *flat, weight, bias, labels, weights.repeat(len(ids)))

    return step_loss


def place_weights(block_starts: Tensor, decay: float) -> Tensor:
    """Return what each position weighs in the loss, exp(-place in its draft / decay), [..., seq_len] float32.

    A token late in a draft is verified only where all before it were right.

    Args:
        block_starts: [..., seq_len] int64, see `ExitHead.forward`.
        decay: places, above 0; infinite: all alike.
    Source: arXiv 2602.06036 (DFlash), whose blocks weigh so.
    """
    places = torch.arange(block_starts.shape[-1], device=block_starts.device) - block_starts
    return (-places / decay).exp()


def _make_optimizers(head: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    # In 300,000 tokens Muon brought agreement to 0.655 where AdamW, at its best rate, brought it to 0.632.
    matrices = [p for p in head.parameters() if p.ndim == 2]
    others = [p for p in head.parameters() if p.ndim != 2]
    return [
        Muon(matrices, lr=lr, weight_decay=0.01),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
