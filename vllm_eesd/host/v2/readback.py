"""Read device results a fixed number of steps late, so that the host never blocks on the GPU."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import torch

#: Steps until a verdict is read. vLLM keeps two batches in flight under asynchronous scheduling: when the host drafts
#: for step t, step t - 2 is the last one whose output it has certainly had.
LAG = 2


class Drafted(NamedTuple):
    """What one round drafted.

    Attributes:
        slots: [num_reqs] int64, the requests' state indices.
        generations: [num_reqs] int64, which of a slot's requests it was.
        lengths: [num_reqs] int64, tokens drafted.
        confidences: [num_reqs, K] float32 on the host, of the first `lengths`; the device writes them before the
            counts of the step that judges the drafts.
        asked: whether the policy looks at confidences at all.
    """

    slots: np.ndarray
    generations: np.ndarray
    lengths: np.ndarray
    confidences: torch.Tensor
    asked: bool

    def num_not_finite(self) -> int:
        """Return how many drafted tokens came from hidden states with infinities or NaN: their confidence is NaN."""
        confidences = self.confidences.numpy()
        return int((np.isnan(confidences) & (np.arange(confidences.shape[1]) < self.lengths[:, None])).sum())


class Judged(NamedTuple):
    """The outcome of one step.

    Attributes:
        slots: [num_reqs] int64, the requests' state indices.
        generations: [num_reqs] int64, which of a slot's requests it was.
        decoded: [num_reqs] bool, False for prompt chunks.
        num_verified: [num_reqs] int64, draft tokens the target judged.
        confidences: [num_reqs, MAX_SPECULATIVE_TOKENS] float32, of those.
        num_sampled: [num_reqs] int64, tokens emitted.
        num_tokens: tokens of the target's forward.
        times: of the round that began when this step ended.
        drafted: by the round before this step; None if nothing was.
    """

    slots: np.ndarray
    generations: np.ndarray
    decoded: np.ndarray
    num_verified: np.ndarray
    confidences: np.ndarray
    num_sampled: np.ndarray
    num_tokens: int
    times: RoundTimes
    drafted: Drafted | None = None

    def known_confidences(self) -> np.ndarray:
        """Return `confidences` with those that came too late to be decided on: of the last draft steps of a round."""
        drafted, confidences = self.drafted, self.confidences.copy()
        if drafted is None or not drafted.asked:
            return confidences
        here, there = np.nonzero(self.slots[:, None] == drafted.slots[None])
        same = self.generations[here] == drafted.generations[there]
        here, late = here[same], drafted.confidences.numpy()[there[same]]
        known, columns = confidences[here, : late.shape[1]], np.arange(late.shape[1])
        missing = np.isnan(known) & (columns < self.num_verified[here, None])
        confidences[here, : late.shape[1]] = np.where(missing, late, known)
        return confidences


class Timestamps:
    """Moments on the device: CUDA events, or on a CPU, which does one thing after the other, the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._moments: list[Any] = []

    def mark(self) -> None:
        """Note this moment of the device's stream."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._moments.append(event)
        else:
            self._moments.append(time.perf_counter())

    def ms(self, first: Timestamps, i: int, j: int) -> float:
        """Return the time from `first`'s moment i to this object's moment j; both must be over."""
        begin, end = first._moments[i], self._moments[j]
        return begin.elapsed_time(end) if self._on_gpu else (end - begin) * 1e3

    def __len__(self) -> int:
        return len(self._moments)


class RoundTimes:
    """Moments of one round: its beginning, its inputs ready, and the end of every draft step.

    What it tells is over when the outcome of the step before this round is known: the round before and that step.

    Args:
        num_rows: requests of this round.
        previous: the round before; None after a pause, when the time in between says nothing.
    """

    def __init__(self, device: torch.device, num_rows: int, previous: RoundTimes | None) -> None:
        self.moments, self.num_rows = Timestamps(device), num_rows
        self.previous = None if previous is None else (previous.moments, previous.num_rows)

    def verify_ms(self) -> float | None:
        """Return the time from the end of the round before to the beginning of this one."""
        return None if self.previous is None else self.moments.ms(self.previous[0], -1, 0)

    def drafting_ms(self) -> tuple[int, float, list[float]]:
        """Return of the round before: its requests, the time of its inputs, and that of each draft step."""
        if self.previous is None:
            return 0, 0.0, []
        moments, num_rows = self.previous
        steps = [moments.ms(moments, i, i + 1) for i in range(1, len(moments) - 1)]
        return num_rows, moments.ms(moments, 0, 1) if len(moments) > 1 else 0.0, steps


class Lagged:
    """Outcomes of steps under way: counts are copied to the host after each step and read `LAG` steps later.

    Args:
        max_num_reqs: the most requests of a step.
    """

    def __init__(self, max_num_reqs: int, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._buffers = deque(
            torch.zeros(max_num_reqs, dtype=torch.int32, pin_memory=self._on_gpu) for _ in range(LAG + 1)
        )
        self._waiting: deque[tuple[Judged, torch.Tensor, Any]] = deque()

    def push(self, judged: Judged, num_sampled: torch.Tensor) -> Judged | None:
        """Copy this step's counts to the host and return the outcome that is now `LAG` steps old, if there is one.

        Args:
            judged: without its `num_sampled`.
            num_sampled: [num_reqs] int32, on the device.
        """
        buffer = self._buffers[0]
        self._buffers.rotate(-1)
        event = copy_to_host(num_sampled, buffer[: len(num_sampled)])
        self._waiting.append((judged, buffer[: len(num_sampled)], event))
        if len(self._waiting) <= LAG:
            return None
        judged, counts, event = self._waiting.popleft()
        if event is not None:
            event.synchronize()  # long over
        return judged._replace(num_sampled=counts.numpy().astype(np.int64))

    def num_emitted_at_least(self, slots: np.ndarray, generations: np.ndarray) -> np.ndarray:
        """Return how many tokens these requests have at least emitted in the steps not read yet, [num_reqs] int64."""
        emitted = np.zeros(len(slots), dtype=np.int64)
        for judged, _, _ in self._waiting:
            here, there = np.nonzero(slots[:, None] == judged.slots[None])
            same = generations[here] == judged.generations[there]
            # A decoding request emits one token or more; a prompt's last chunk is counted late, which costs a draft.
            emitted[here[same]] += judged.decoded[there[same]]
        return emitted


class ConfidenceCopies:
    """Confidences of the last rounds, on the host; a round's are overwritten once the verdict on it has been read.

    Args:
        size: (the most requests of a round, K).
    """

    def __init__(self, size: tuple[int, int], device: torch.device) -> None:
        self._buffers = deque(torch.zeros(size, pin_memory=device.type == "cuda") for _ in range(LAG + 1))

    def copy(self, confidences: torch.Tensor) -> torch.Tensor:
        """Begin to copy, [num_reqs, K] float32, and return where to; what the stream does next comes after it."""
        self._buffers.rotate(-1)
        return self._buffers[0][: len(confidences)].copy_(confidences, non_blocking=True)


def copy_to_host(source: torch.Tensor, target: torch.Tensor) -> Any:
    """Copy on the device's own stream and return the event that says when it is done; None on a CPU, where it is."""
    target.copy_(source, non_blocking=True)
    if not source.is_cuda:
        return None
    # Blocking: the host sleeps where it must wait at all.
    event = torch.cuda.Event(blocking=True)
    event.record()
    return event
