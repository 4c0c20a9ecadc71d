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
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, reduce
from torch import Tensor, nn
from tqdm import tqdm

from vllm_eesd.config import LONGEST_DRAFT
from vllm_eesd.distill.config import TrainConfig
from vllm_eesd.distill.data import TokenData
from vllm_eesd.distill.losses import build_loss, distillation_loss
from vllm_eesd.distill.muon import Muon
from vllm_eesd.distill.precision import autocast, uses_bfloat16
from vllm_eesd.distill.rows import Batch, Batches
from vllm_eesd.distill.states import KeptStates, fits, kept_bytes
from vllm_eesd.distill.target import Rotary, Target
from vllm_eesd.distill.vocabulary import draft_token_ids
from vllm_eesd.files import replacing

# Of a batch: (exit states, normed output, rotary), see `Target.forward`.
StatesOf = Callable[[Batch], tuple[Tensor, Tensor, Rotary]]

# A warm start needs only a short warm-up: it keeps the first, badly scaled steps small.
WARMUP_STEPS = 30
# Times 1 / sqrt(hidden_size), as weights shrink with width: 0.0175 at 256, where half and twice it were compared.
DEFAULT_LR = 0.28
# Times that for a head that goes on learning: a high rate would first undo what it knows.
CONTINUED_LR_SHARE = 0.125
FINAL_LR_SHARE = 0.01
SAVE_EVERY_S = 120
# May differ between the parts of one run: how far it goes, and how a step is computed.
FREE_FIELDS = {"steps", "minutes", "compile", "accumulate", "keep_states"}


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
    state = PartialState()
    state.wait_for_everyone()
    batches = Batches(data, config)
    keep = partial(_save, checkpoint if state.is_main_process else None, head, optimizers, run, this_run)
    gradients = _gradients_of(target, head, config, _states_of(target, batches, config, checkpoint))
    limit_s = math.inf if config.minutes is None else 60 * config.minutes
    began, saved_at, whole_step = time.monotonic() - run["elapsed_s"], time.monotonic(), True
    shown = {"desc": "distilling", "unit": "step", "disable": not state.is_main_process}
    total = config.last_step if math.isfinite(config.last_step) else None
    with tqdm(total=total, initial=run["step"], **shown) as progress:
        try:
            while run["step"] < config.last_step and run["elapsed_s"] < limit_s:
                batch = batches.at(run["step"])
                loss = gradients(batch, random_block_starts(batch.ids.shape[1], (config.seed, run["step"], 1)))
                torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
                whole_step = False
                _update(optimizers, lr * learning_rate_scale(run["step"], run["elapsed_s"], config))
                run["step"] += 1
                run["tokens"] += batch.num_tokens
                (run["elapsed_s"],) = broadcast_object_list([time.monotonic() - began])
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
    return _summary(run)


def _states_of(target: Target, batches: Batches, config: TrainConfig, checkpoint: Path | None) -> StatesOf:
    """Return what gives the target's states of a batch: kept on disk where they fit there, else computed."""
    if batches.rows is not None and checkpoint is not None and PartialState().num_processes == 1:
        needed = kept_bytes(target, sum(batches.rows.lengths))
        wanted = needed <= config.keep_states * 2**30 and batches.sees_again(config.last_step)
        if wanted and fits(checkpoint.parent, needed):
            return KeptStates(checkpoint.parent, target, batches.rows)
    return lambda batch: target(batch.ids.to(target.lm_head.weight.device))


def _summary(run: dict[str, Any]) -> dict[str, Any]:
    return {
        "steps": run["step"],
        "tokens": run["tokens"],
        "minutes": run["elapsed_s"] / 60,
        "tokens_per_s": run["tokens"] / max(run["elapsed_s"], 1e-9),
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
        return {"step": 0, "elapsed_s": 0.0, "tokens": 0, "losses": []}
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


def _gradients_of(
    target: Target, head: nn.Module, config: TrainConfig, states_of: StatesOf
) -> Callable[[Batch, Tensor], float]:
    """Return a function that leaves the whole batch's gradient in the head's parameters and returns its loss."""
    device = target.lm_head.weight.device
    loss_of, state = _loss_of(target, head, config, device.type), PartialState()

    def gradients(batch: Batch, block_starts: Tensor) -> float:
        total = 0.0
        for part, share in batch.shares(state.process_index, state.num_processes, config.accumulate):
            with torch.no_grad(), autocast(device.type, uses_bfloat16(device.type)):
                states = states_of(part)
            loss = loss_of(*states, part.ids.to(device), block_starts.to(device), _on(part.weights, device)) * share
            loss.backward()
            total += loss.item()
        if state.num_processes == 1:
            return total
        for parameter in head.parameters():
            parameter.grad = reduce(parameter.grad)  # the mean over all processes
        return reduce(torch.tensor(total, device=device)).item()

    return gradients


def _on(weights: Tensor | None, device: torch.device) -> Tensor | None:
    return None if weights is None else weights.to(device)


def learning_rate_scale(step: int, elapsed_s: float, config: TrainConfig) -> float:
    """Return the share of `lr` for a step; with a time limit, whichever of steps and time is further on counts."""
    done = step / config.last_step
    if config.minutes is not None:
        done = max(done, elapsed_s / (60 * config.minutes))
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return warmup * (FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * cosine)


def random_block_starts(seq_len: int, seed: tuple[int, ...]) -> Tensor:
    """Return for each position the start of its draft block, [seq_len] int64; blocks are 1 to LONGEST_DRAFT long."""
    lengths = np.random.default_rng(seed).integers(1, LONGEST_DRAFT + 1, size=seq_len)
    return torch.from_numpy(np.repeat(lengths.cumsum() - lengths, lengths)[:seq_len])


def _loss_of(target: Target, head: nn.Module, config: TrainConfig, device: str) -> Callable[..., Tensor]:
    """Return the loss of (exit states, output, rotary, ids, block starts, weights); see `Target.forward`, `Batch`."""
    loss, on_text = build_loss(config.loss, config.jsd_beta), config.loss == "ce_text"
    knows_places = head.kind.reads_target_output and config.position_decay > 0
    decay = config.position_decay if knows_places else math.inf
    weight, bias = target.lm_head.weight, target.lm_head.bias
    if (token_ids := draft_token_ids(head)) is not None:
        # Both distributions within the draft vocabulary: of what the target says beyond it nothing can be learned.
        weight, bias = weight[token_ids], None if bias is None else bias[token_ids]
    if uses_bfloat16(device):
        weight = weight.bfloat16()  # once, instead of in every product of every step
    compiled = torch.compile(head, dynamic=False) if config.compile else head

    def loss_of(
        exit_hidden: Tensor, output: Tensor, rotary: Rotary, ids: Tensor, block_starts: Tensor, weights: Tensor | None
    ) -> Tensor:
        with autocast(device, uses_bfloat16(device)):
            # Shorter rows run as they are: each length would be compiled anew, which takes longer than it wins.
            run_head = compiled if ids.shape[1] == config.seq_len else head
            hidden = run_head(exit_hidden, output, rotary, block_starts)
            counts = place_weights(block_starts, decay).expand(ids.shape)
            counts = counts if weights is None else counts * weights
            labels = None
            if on_text:  # the last position's next token is not in the window
                hidden, output, counts, labels = hidden[:, :-1], output[:, :-1], counts[:, :-1], ids[:, 1:].flatten()
            flat = [states.flatten(0, 1) for states in (hidden, output, counts)]
            if weights is not None:  # what counts for nothing is not computed
                (chosen,) = flat[2].nonzero(as_tuple=True)
                flat = [states[chosen] for states in flat]
                labels = None if labels is None else labels[chosen]
            return distillation_loss(loss, flat[0], flat[1], weight, bias, labels, flat[2])

    return loss_of


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
