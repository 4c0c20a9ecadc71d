"""Read device results a fixed number of steps late, so that the host never blocks on the GPU."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import torch

from vllm_eesd.round.draft import DraftRound
from vllm_eesd.round.outcome import StepTimes


class CopyStream:
    """What values travel to the host on, while the device's own stream computes the next ones.

    Source: vllm/v1/worker/gpu/spec_decode/adaptive_verification.py has such a stream and two slots in pinned memory;
    here torch's pool of pinned memory has a slot free again once its copy is over and read.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, source: torch.Tensor) -> HostCopy:
        """Begin to copy what the device's stream will have computed by now; see `before_writing`."""
        return HostCopy(source, self._stream)

    def before_writing(self) -> None:
        """Have the device's stream, not the host, wait for the copies begun: their sources are about to be written."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


class HostCopy:
    """The values of a device's tensor, on their way to the host since this object was made.

    Args:
        stream: what the copy is launched on; None on a CPU.
    """

    def __init__(self, source: torch.Tensor, stream: torch.cuda.Stream | None = None) -> None:
        self._copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
        self._event: torch.cuda.Event | None = None
        if stream is None:
            self._copy.copy_(source)
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._copy.copy_(source, non_blocking=True)
            # Blocking: the host sleeps where it must wait at all.
            self._event = torch.cuda.Event(blocking=True)
            self._event.record()
        source.record_stream(stream)  # the caller may drop it before it is copied

    def is_done(self) -> bool:
        """Return whether the values have arrived; what the device's stream did before has ended by then."""
        if self._event is not None and self._event.query():
            self._event = None
        return self._event is None

    def numpy(self) -> np.ndarray:
        """Return the values; waits for them."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy.numpy()


class Timestamps:
    """Moments on the device: CUDA events, or on a CPU, which does one thing after the other, the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._moments: list = []

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


class RoundTimes(Timestamps):
    """Moments of one round: its beginning, its inputs ready, and the end of every draft step.

    Args:
        num_reqs: of the round.
    """

    def __init__(self, device: torch.device, num_reqs: int) -> None:
        super().__init__(device)
        self.num_reqs = num_reqs

    def drafting_ms(self) -> tuple[float, list[float]]:
        """Return the time of the round's inputs, and that of each draft step."""
        steps = [self.ms(self, i, i + 1) for i in range(1, len(self) - 1)]
        return self.ms(self, 0, 1) if len(self) > 1 else 0.0, steps


class Drafted(NamedTuple):
    """What one round drafted.

    Attributes:
        round: its rows and their lengths.
        generations: [num_reqs] int64, which of a slot's requests each row was.
        confidences: [num_reqs, K] float32; the device writes them before the counts of the step that judges the drafts.
    """

    round: DraftRound
    generations: np.ndarray
    confidences: HostCopy

    def num_not_finite(self) -> int:
        """Return how many tokens of submitted drafts have a confidence that is NaN."""
        confidences = self.confidences.numpy()
        lengths = np.where(self.round.from_ngrams, 0, self.round.lengths)
        return int((np.isnan(confidences) & (np.arange(confidences.shape[1]) < lengths[:, None])).sum())

    def known_confidences(self) -> np.ndarray:
        """Return those of the steps that ran, [num_reqs, K] float32, for every row ran every step; NaN of the rest."""
        confidences = self.confidences.numpy()
        return np.where(np.arange(confidences.shape[1]) < self.round.num_steps, confidences, np.nan)


class PendingStep(NamedTuple):
    """A step of the target whose outcome is still on the device.

    Attributes:
        slots: [num_reqs] int64, the requests' state indices.
        generations: [num_reqs] int64, which of a slot's requests it was.
        decoded: [num_reqs] bool, False for prompt chunks.
        num_verified: [num_reqs] int64, draft tokens the target judged.
        source: [num_reqs] int8, how their drafts were made, see `vllm_eesd.policy.source`.
        matched: [num_reqs] int64, `NgramRates.matched` when the n-gram draft that this step judges was found; negative
            if none was.
        num_tokens: tokens of the target's forward.
        counts: [num_reqs, 1 or 3] int32, tokens emitted, and where n-gram drafts are found what `find_ngrams` returns.
        before: the round before the step; None after a pause, when the time in between says nothing.
        after: the round that began when the step ended. What the host asks of both is over once `counts` are known.
        drafted: by the round before; None if nothing was.
        decision: see `StepTimes`, of the round before.
        num_skipped: see `StepTimes`.
    """

    slots: np.ndarray
    generations: np.ndarray
    decoded: np.ndarray
    num_verified: np.ndarray
    source: np.ndarray
    matched: np.ndarray
    num_tokens: int
    counts: HostCopy
    before: RoundTimes | None
    after: RoundTimes
    drafted: Drafted | None
    decision: tuple[int, float] | None = None
    num_skipped: int = 0

    def verify_ms(self) -> float | None:
        """Return the time from the end of the round before to the beginning of the one after."""
        return None if self.before is None else self.after.ms(self.before, -1, 0)

    def times(self, num_emitted: int, all_decoded: bool) -> StepTimes:
        """Return what the step and the round before it took, once both are over.

        Args:
            num_emitted: tokens of all rows.
            all_decoded: whether each of them emitted some.
        """
        verify_ms = self.verify_ms() if all_decoded else None
        times = StepTimes(len(self.slots), self.num_tokens, num_emitted, verify_ms, num_skipped=self.num_skipped)
        inputs_ms, steps_ms = (0.0, []) if self.before is None else self.before.drafting_ms()
        if not steps_ms:
            return times._replace(decision=self.decision)
        num_rows = self.before.num_reqs
        return times._replace(draft_steps=[(num_rows, ms) for ms in steps_ms], draft_round=(num_rows, inputs_ms))
