"""What the frozen target makes of each conversation, kept on disk: from the second epoch on the target is not run.

A head of two layers costs less to train than its target's forward: of a step of SmolLM2-135M's head on two cores the
target is half.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vllm_eesd.distill.rows import Batch, Rows
from vllm_eesd.distill.target import Rotary, Target


class KeptStates:
    """The target's hidden states of whole conversations, in a file, in bfloat16.

    A run that goes on finds what it kept; files of other conversations or another target are removed.

    Args:
        work: directory of the file, which grows as conversations are met.
        target: frozen; what is kept is what its forward returns.
        rows: the conversations.
    """

    def __init__(self, work: Path, target: Target, rows: Rows) -> None:
        self._target, self._width = target, state_width(target)
        self._starts = np.concatenate([[0], np.cumsum(rows.lengths)])
        layers = (target.exit_layer, *target.aux_layers)
        name = f"states-{hashlib.sha256(f'{rows.digest} {target.fingerprint} {layers}'.encode()).hexdigest()[:16]}"
        work.mkdir(parents=True, exist_ok=True)
        for stale in work.glob("states-*"):
            if stale.stem != name:
                stale.unlink()
        states, known = work / f"{name}.bin", work / f"{name}.known"
        shape = int(self._starts[-1]), self._width
        if not _has_size(states, np.int16, shape):
            known.unlink(missing_ok=True)  # says of another file what is in it
        # int16: numpy has no bfloat16.
        self._file = _mapped(states, np.int16, shape)
        self._known = _mapped(known, np.bool_, (len(rows.lengths),))

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor, Rotary]:
        """Return what `Target.forward` does; positions of padding are zero.

        Args:
            batch: of whole conversations, on the CPU.
        """
        weight, hidden_size = self._target.lm_head.weight, self._target.config.hidden_size
        if not self._known[batch.rows].all():
            exit_hidden, output, rotary = self._target(batch.ids.to(weight.device))
            self._keep(batch, torch.cat([exit_hidden, output], dim=-1).to("cpu", torch.bfloat16).contiguous())
        states = torch.zeros(*batch.ids.shape, self._width, dtype=torch.bfloat16)
        for at, row in enumerate(batch.rows):
            kept = torch.from_numpy(self._file[self._starts[row] : self._starts[row + 1]])
            states[at, : len(kept)] = kept.view(torch.bfloat16)
        states = states.to(weight.device, weight.dtype)
        exit_hidden, output = states.split([self._width - hidden_size, hidden_size], dim=-1)
        return exit_hidden, output, self._target.rotary(output)

    def _keep(self, batch: Batch, states: Tensor) -> None:
        for at, row in enumerate(batch.rows):
            first, last = self._starts[row], self._starts[row + 1]
            self._file[first:last] = states[at, : last - first].view(torch.int16).numpy()
            self._known[row] = True  # after it: a run that is killed in between computes it again


def _mapped(path: Path, dtype: type, shape: tuple[int, ...]) -> np.memmap:
    """Return a file as an array, of zeros where there is none of this size; it takes room as it is written."""
    return np.memmap(path, dtype, "r+" if _has_size(path, dtype, shape) else "w+", shape=shape)


def _has_size(path: Path, dtype: type, shape: tuple[int, ...]) -> bool:
    return path.exists() and path.stat().st_size == math.prod(shape) * np.dtype(dtype).itemsize


def fits(work: Path, num_bytes: int) -> bool:
    """Return whether a directory's disk has room for so many bytes of states, those that are there already included.

    A process that writes to a mapped file where there is no room is ended by the system, without a word.
    """
    work.mkdir(parents=True, exist_ok=True)
    there = sum(512 * path.stat().st_blocks for path in work.glob("states-*"))
    return num_bytes <= shutil.disk_usage(work).free + there


def state_width(target: Target) -> int:
    """Return how many values are kept of a token: h_N, each auxiliary state, and the output."""
    return (2 + len(target.aux_layers)) * target.config.hidden_size


def kept_bytes(target: Target, num_tokens: int) -> int:
    """Return what so many tokens take on disk."""
    return 2 * state_width(target) * num_tokens
