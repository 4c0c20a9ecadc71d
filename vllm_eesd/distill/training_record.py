"""How a head was made: `training.json` beside its weights."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic_core import PydanticUndefined

from vllm_eesd.distill.config import DistillConfig
from vllm_eesd.distill.data import CHUNK_TOKENS, Tokens
from vllm_eesd.distill.report import as_typed, command
from vllm_eesd.provenance import provenance

#: A curve has about so many points, each the mean of the steps before it.
CURVE_POINTS = 100
#: Fields that hold names of files.
FILE_FIELDS = {"data", "from_trace", "held_out"}


def record_of(config: DistillConfig, data: dict[str, Sequence[Tokens]], outcome: dict[str, Any]) -> dict[str, Any]:
    """Return what `training.json` says.

    Args:
        data: token ids by what they were for; hashed here.
        outcome: what `train` returned, and what was measured `before` and `after`.
    Returns:
        command: what trains it again.
        settings: all of its settings, seeds among them, those that were not given too.
        data: of each kind of text, how many tokens and a digest of their ids.
        steps, tokens, minutes: of training.
        loss: [[step, mean loss since the point before], ...].
        before, after: `evaluate` on held-out text.
        hardware, versions, git_sha: as in results.
    """
    record = {"command": again(config), "settings": config.model_dump(mode="json", by_alias=True)}
    record["data"] = {name: digest(tokens) for name, tokens in data.items()}
    record |= {name: outcome[name] for name in ("steps", "tokens", "minutes", "before", "after")}
    return record | {"loss": curve(outcome["losses"])} | provenance()


def again(config: DistillConfig) -> str:
    """Return the command line of these settings; many files stand there as the pattern they were, `as_typed`."""
    words: list[str] = []
    for name, field in DistillConfig.model_fields.items():
        value = getattr(config, name)
        default = None if field.default is PydanticUndefined else field.default
        if name == "model" or value == default:
            continue
        flag = "--" + (field.alias or name).replace("_", "-")
        values = value if isinstance(value, (list, tuple)) else [] if value is True else [value]
        words += [flag, *(as_typed(values) if name in FILE_FIELDS else map(str, values))]
    return command("eesd", "distill", config.model, *words)


def digest(tokens: Sequence[Tokens]) -> dict[str, Any]:
    """Return how many tokens there are, and the SHA-256 of their ids as little-endian uint32, in order."""
    found = hashlib.sha256()
    for ids in tokens:
        for first in range(0, len(ids), CHUNK_TOKENS):
            found.update(np.ascontiguousarray(ids[first : first + CHUNK_TOKENS], dtype="<u4"))
    return {"tokens": sum(map(len, tokens)), "sha256": found.hexdigest()}


def curve(losses: Sequence[float]) -> list[tuple[int, float]]:
    """Return (step, mean loss since the point before), a hundred points or fewer."""
    stride = max(1, len(losses) // CURVE_POINTS)
    ends = range(stride, len(losses) + 1, stride)
    return [(end, round(statistics.fmean(losses[end - stride : end]), 4)) for end in ends]
