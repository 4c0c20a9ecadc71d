"""A training run's state on disk: written in one step, resumed from only by the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from vllm_eesd.distill.config import TrainConfig
from vllm_eesd.distill.model import Target
from vllm_eesd.files import replacing

# May differ between the parts of one run: how far it goes, and how a step is computed.
FREE_FIELDS = {"steps", "minutes", "compile", "accumulate"}


def identity(config: TrainConfig, target: Target) -> dict[str, Any]:
    """Return what must be the same for a checkpoint to be of this run."""
    fields = config.model_dump(include=TrainConfig.model_fields.keys() - FREE_FIELDS)
    return fields | {"exit_layer": target.exit_layer, "target_weights": target.fingerprint}


def save(
    checkpoint: Path | None,
    head: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    run: dict[str, Any],
    run_identity: dict[str, Any],
) -> None:
    """Write what `resume` needs, in one step; None writes nothing."""
    if checkpoint is None:
        return
    states = [optimizer.state_dict() for optimizer in optimizers]
    with replacing(checkpoint) as file:
        torch.save({"head": head.state_dict(), "optimizers": states, "identity": run_identity, "run": run}, file)


def resume(
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
