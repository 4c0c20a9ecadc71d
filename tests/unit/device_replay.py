"""A device whose host runs ahead of it, in the replay: rounds as Model Runner V2 runs them.

The host launches work on one stream and goes on; it loses time only where it waits for a result. A round is decided
ahead, every row of the batch runs every draft step, and outcomes reach the policy `READBACK_DELAY` steps late.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_eesd.policy import DraftLengthPolicy
from vllm_eesd.round.ngram import NgramDrafter, NgramRates
from vllm_eesd.round.outcome import READBACK_DELAY
from vllm_eesd.round.step import Known, Step
from vllm_eesd.simulate.replay import Batch, PolicyDrafter
from vllm_eesd.simulate.world import World


@dataclass(frozen=True)
class HostTimes:
    """What the host and small operators cost, ms; estimates, not yet measured on a GPU.

    Attributes:
        step_ms, request_ms: of the host for a step (reading an answer, scheduling, launching the target), and for each
            of its requests.
        inputs_host_ms, inputs_device_ms: preparing a round's draft inputs.
        launch_ms: of the host for a draft step.
        decide_ms: of the host to wake up after a wait, and to ask the policy.
        tail_ms: of the device after each draft step's model.
    """

    step_ms: float = 1.0
    request_ms: float = 0.012
    inputs_host_ms: float = 0.03
    inputs_device_ms: float = 0.01
    launch_ms: float = 0.03
    decide_ms: float = 0.08
    tail_ms: float = 0.005


class Device(World):
    """True costs of a host and the one stream of its device.

    Args:
        costs: see `World`.
        host: what the host needs.
        seed: of the noise.
    Attributes:
        verify_seen_ms: from the end of the drafting before the last step of the target to that step's end, as a clock
            on the stream shows it: where the host is late, drafting fills the gap.
    """

    def __init__(self, costs: dict[str, Any], host: HostTimes, seed: int = 0) -> None:
        super().__init__(costs, seed=seed)
        self.host = host
        self._host_ms = self._device_ms = self._last_end = self.verify_seen_ms = 0.0
        #: When the last two steps of the target end.
        self._ends = deque([0.0, 0.0], maxlen=2)
        device_ms = self.plain_ms
        self.plain_ms = lambda num_reqs: max(device_ms(num_reqs), self._step_ms(num_reqs))

    def _step_ms(self, num_reqs: int) -> float:
        return self.host.step_ms + self.host.request_ms * num_reqs

    def launch(self, host_ms: float, device_ms: float) -> float:
        """Launch work, which the device does after all before it; return when it ends."""
        self._host_ms += host_ms
        self._device_ms = max(self._device_ms, self._host_ms) + device_ms
        return self._device_ms

    def wait(self, end: float) -> None:
        """Let the host sleep until a draft step's end, and decide."""
        self._host_ms = max(self._host_ms, end) + self.host.decide_ms

    def prepare(self) -> None:
        """Launch what prepares a round's draft inputs."""
        self.launch(self.host.inputs_host_ms, self.host.inputs_device_ms)

    def draft_ms(self, num_reqs: int) -> float:
        """Return the device's time for a draft step of all rows."""
        return self.draft_step_ms(num_reqs) + self.host.tail_ms

    def round_ms(self, num_reqs: int, num_drafted: np.ndarray, num_verified: np.ndarray) -> float:
        """Launch the target's step; return the time from the end of the one before to its end."""
        # An engine with asynchronous scheduling schedules a step once it has answered the last but one.
        self._host_ms = max(self._host_ms, self._ends[0])
        drafted = self._device_ms
        end = self.launch(self._step_ms(num_reqs), self.verify_ms(num_reqs, int(num_verified.sum())))
        self._ends.append(end)
        self.verify_seen_ms = end - drafted
        ms, self._last_end = end - self._last_end, end
        return ms


class DeviceDrafter(PolicyDrafter):
    """A policy on such a device, in rounds decided ahead.

    Args:
        policy: fresh.
    """

    def __init__(self, policy: DraftLengthPolicy) -> None:
        super().__init__(policy, READBACK_DELAY)
        policy.costs.all_rows_draft = True
        #: What the device finds in the texts as they are; the session knows of it later.
        self._finder: NgramDrafter | None = None
        #: The last step's rows: slots, tokens submitted and emitted, and the leading tokens of their n-gram drafts that
        #: were emitted, [num_rows] int64 each.
        self._judged = (np.zeros(0, dtype=np.int64),) * 4

    def draft(self, batch: Batch, world: Device) -> tuple[np.ndarray, np.ndarray]:
        num_reqs, costs = len(batch.slots), self.policy.costs
        if batch.new.any():
            self.session.admit(batch.slots[batch.new])
        self.session.verdict(self._last_step(batch, self._search(batch)))
        if world.verify_seen_ms:
            costs.observe_verify(self._num_reqs, self._num_tokens, world.measured(world.verify_seen_ms))
        num_verified, num_steps = self._round_of(batch, world)
        if num_steps:
            self.session.end(Known(batch.confidences), num_steps)
        for _ in range(num_steps):
            costs.observe_draft_step(num_reqs, world.measured(world.draft_ms(num_reqs)))
        self._num_reqs, self._num_tokens = num_reqs, num_reqs + int(num_verified.sum())
        return num_verified, num_verified

    def _search(self, batch: Batch) -> NgramDrafter | None:
        """Find the rows' n-gram drafts; None if the policy uses none or no text is known."""
        if not self.policy.uses_ngrams or not batch.num_tokens.all():
            return None
        size = self.policy.posterior.max_num_reqs, batch.confidences.shape[1]
        if self._finder is None:
            self._finder, self.session.ngrams = NgramDrafter(*size), NgramRates(*size, delayed=True)
        self._finder.reset(batch.slots[batch.new])
        shared = np.ones(len(batch.slots), dtype=bool)
        self._finder.update(batch.slots, batch.texts, batch.slots, batch.num_tokens, shared)
        return self._finder

    def _last_step(self, batch: Batch, finder: NgramDrafter | None) -> Step:
        """Return the step just run as the engine has it: rows that decoded, and prompts whose requests join."""
        new = batch.slots[batch.new]
        slots, num_verified, *counts = (column[~np.isin(self._judged[0], new)] for column in self._judged)
        decoded = np.arange(len(slots) + len(new)) < len(slots)
        slots, num_verified = np.append(slots, new), np.append(num_verified, 0 * new)
        counts = [np.append(counts[0], 0 * new + 1), np.append(counts[1], 0 * new)]
        if finder is None:
            del counts[1:]
        else:
            counts.append(finder.matched[slots])
        return Step(slots, decoded, num_verified, Known(np.stack(counts, axis=1)))

    def _round_of(self, batch: Batch, world: Device) -> tuple[np.ndarray, int]:
        """Run a round's draft steps; return the tokens each row submits and the number of steps."""
        ngrams = self.session.ngrams if batch.num_tokens.all() else None
        round_ = self.session.begin(batch.slots, batch.limits, ngrams)
        for row in np.flatnonzero(round_.from_ngrams).tolist():
            assert self._finder is not None
            batch.matches[row] = batch.num_right(row, self._finder.tokens[batch.slots[row], : round_.lengths[row]])
        if round_.num_steps:
            self._prepare(world, len(batch.slots))
        for _ in range(round_.num_steps):
            world.launch(world.host.launch_ms, world.draft_ms(len(batch.slots)))
        return round_.lengths, round_.num_steps

    def _prepare(self, world: Device, num_reqs: int) -> None:
        world.prepare()
        self.policy.costs.observe_draft_round(num_reqs, world.measured(world.host.inputs_device_ms))

    def observe(self, batch: Batch, num_verified: np.ndarray, num_accepted: np.ndarray) -> None:
        slots, num_emitted = batch.slots, num_accepted + 1
        num_right = np.zeros_like(slots)
        if self._finder is not None:
            drafts = zip(slots, np.minimum(num_emitted, self._finder.tokens.shape[1]), strict=True)
            num_right[:] = [
                batch.num_right(row, self._finder.tokens[slot, :judged]) for row, (slot, judged) in enumerate(drafts)
            ]
        self._judged = slots, num_verified, num_emitted, num_right
