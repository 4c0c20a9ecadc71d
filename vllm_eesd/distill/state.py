"""A training run's state on disk: written in one step, resumed from only by the same run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import nn

from vllm_eesd.distill.model import Target

# May differ between the parts of one run: how far it goes, and how a step is computed.
FREE_FIELDS = {"steps", "minutes", "compile", "accumulate"}


def _identity(config: BaseModel, target: Target) -> dict[str, Any]:
    """What must be the same for a checkpoint to be of this run."""
    fields = config.model_dump(exclude=FREE_FIELDS)
    weights = round(target.model.model.norm.weight.double().sum().item(), 6)
    return fields | {"exit_layer": target.exit_layer, "target_weights": weights}


def save(
    checkpoint: Path | None,
    head: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    config: BaseModel,
    target: Target,
    run: dict[str, Any],
) -> None:
    """Write what `resume` needs, in one step; None writes nothing."""
    if checkpoint is None:
        return
    state = {
        "head": head.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "identity": _identity(config, target),
        "run": run,
    }
    temporary = checkpoint.with_suffix(".tmp")
    torch.save(state, temporary)
    os.replace(temporary, checkpoint)


def resume(
    checkpoint: Path,
    head: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    config: BaseModel,
    target: Target,
) -> dict[str, Any]:
    """Load a checkpoint into the head and the optimizers and return the run's counters.

    Raises:
        ValueError: it is damaged, or of another run.
    """
    try:
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)
        saved, run = state["identity"], state["run"]
    except Exception as error:  # torch.load raises many kinds for a damaged file
        reason = " ".join(str(error).split())[:120]
        raise ValueError(f"work: {checkpoint} is damaged ({reason}); remove it to start again") from None
    for field, value in _identity(config, target).items():
        if saved.get(field) != value:
            raise ValueError(
                f"work: {checkpoint} has {field} {saved.get(field)!r}, this run {value!r}; use another --work"
            )
    head.load_state_dict(state["head"])
    for optimizer, saved_state in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved_state)
    return run
