"""Read device results a fixed number of steps late, so that the host never blocks on the GPU."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import torch

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


class StepClock(NamedTuple):
    """The rounds around a step of the target; what is asked of both is over once the step's counts are known.

    Attributes:
        before: None after a pause, when the time in between says nothing.
        after: began when the step ended; of as many requests.
        num_tokens: of the target's forward.
    """

    before: RoundTimes | None
    after: RoundTimes
    num_tokens: int

    def verify_ms(self) -> float | None:
        """Return the time from the end of the round before to the beginning of the one after."""
        return None if self.before is None else self.after.ms(self.before, -1, 0)

    def drafting_ms(self) -> tuple[float, list[float]]:
        """Return `RoundTimes.drafting_ms` of the round before."""
        return (0.0, []) if self.before is None else self.before.drafting_ms()

    def times(self, num_emitted: int, all_decoded: bool) -> StepTimes:
        """Return what the step and the round before it took, see `vllm_eesd.round.step.Step`."""
        verify_ms = self.verify_ms() if all_decoded else None
        times = StepTimes(self.after.num_reqs, self.num_tokens, num_emitted, verify_ms)
        inputs_ms, steps_ms = self.drafting_ms()
        if not steps_ms:
            return times
        num_rows = self.before.num_reqs
        return times._replace(draft_steps=[(num_rows, ms) for ms in steps_ms], draft_round=(num_rows, inputs_ms))
