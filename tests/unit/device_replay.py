"""A device whose host runs ahead of it, in the replay: rounds as Model Runner V2 runs them.

The host launches work on one stream and goes on; it loses time only where it waits for a result. A round is decided
ahead, every row of the batch runs every draft step, and outcomes reach the policy `READBACK_DELAY` steps late.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_eesd.config import MAX_SPECULATIVE_TOKENS
from vllm_eesd.policy import DraftLengthPolicy, Outcome
from vllm_eesd.round.draft import DraftRound
from vllm_eesd.round.ngram import NgramDrafter, NgramRates
from vllm_eesd.round.outcome import READBACK_DELAY
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


class DeviceNgrams:
    """The device's n-gram drafts, found in the text as it is, and what the host knows of them `READBACK_DELAY` later.

    Args:
        num_slots, longest: see `NgramDrafter`.
    Attributes:
        rates: the host's.
        tokens: [num_slots, longest] int64, the device's drafts.
    """

    def __init__(self, num_slots: int, longest: int) -> None:
        self.rates = NgramRates(num_slots, longest, delayed=True)
        self._finder = NgramDrafter(num_slots, longest)
        self.tokens = self._finder.tokens
        self._judged: deque[tuple[np.ndarray, ...]] = deque()
        self._matched: deque[tuple[np.ndarray, np.ndarray]] = deque()

    def find(self, batch: Batch) -> None:
        """Find the drafts of these texts, and let the host know what is old enough by now."""
        slots, new = batch.slots, batch.slots[batch.new]
        if len(new):
            self._finder.reset(new)
            self.rates.reset(new)
        shared = np.ones(len(slots), dtype=bool)
        self._finder.update(slots, batch.texts, slots, batch.num_tokens, shared)
        self._matched.append((slots, self._finder.matched[slots]))
        if len(self._judged) > READBACK_DELAY:
            self.rates.learn(*self._judged.popleft(), shared)
        if len(self._matched) > READBACK_DELAY:
            self.rates.see(*self._matched.popleft())

    def judge(self, batch: Batch, num_emitted: np.ndarray) -> None:
        """Compare every draft with what its text goes on with, of which the step emitted so many tokens."""
        slots = batch.slots
        num_judged = np.minimum(num_emitted, self.tokens.shape[1])
        drafts = [self.tokens[slot, :judged] for slot, judged in zip(slots, num_judged, strict=True)]
        num_right = np.array([batch.num_right(row, draft) for row, draft in enumerate(drafts)])
        self._judged.append((slots, self.rates.matched[slots], num_judged, num_right))


class DeviceDrafter(PolicyDrafter):
    """A policy on such a device, in rounds decided ahead.

    Args:
        policy: fresh.
    """

    def __init__(self, policy: DraftLengthPolicy) -> None:
        super().__init__(policy)
        policy.costs.all_rows_draft = True
        self._device_ngrams: DeviceNgrams | None = None
        num_slots = policy.posterior.max_num_reqs
        self._known = np.full((num_slots, MAX_SPECULATIVE_TOKENS), np.nan, dtype=np.float32)
        #: What became of the last steps, not read yet, of requests that still run.
        self._pending: deque[Outcome] = deque()

    def draft(self, batch: Batch, world: Device) -> tuple[np.ndarray, np.ndarray]:
        new = batch.slots[batch.new]
        if len(new):
            self.policy.reset(new)
            self._known[new] = np.nan
            self._pending = deque(_rows(outcome, ~np.isin(outcome.slots, new)) for outcome in self._pending)
        if len(self._pending) > READBACK_DELAY:
            self._learn(self._pending.popleft())
        num_reqs, costs = len(batch.slots), self.policy.costs
        if world.verify_seen_ms:
            costs.observe_verify(self._num_reqs, self._num_tokens, world.measured(world.verify_seen_ms))
        self._from_ngrams = np.zeros(num_reqs, dtype=bool)
        num_verified, self._num_steps = self._round_of(batch, world)
        for _ in range(self._num_steps):
            costs.observe_draft_step(num_reqs, world.measured(world.draft_ms(num_reqs)))
        self._num_reqs, self._num_tokens = num_reqs, num_reqs + int(num_verified.sum())
        return num_verified, num_verified

    def _round_of(self, batch: Batch, world: Device) -> tuple[np.ndarray, int]:
        """Run a round's draft steps; return the tokens each row submits and the number of steps."""
        ngrams = self._find_on_device(batch)
        round_ = DraftRound(self.policy, batch.slots, batch.limits, None if ngrams is None else ngrams.rates)
        round_.decide_ahead(self._known[batch.slots])
        self._from_ngrams, num_steps = round_.from_ngrams, round_.num_steps
        for row in np.flatnonzero(self._from_ngrams).tolist():
            batch.matches[row] = batch.num_right(row, ngrams.tokens[batch.slots[row], : round_.lengths[row]])
        if num_steps:
            self._prepare(world, len(batch.slots))
        for _ in range(num_steps):
            world.launch(world.host.launch_ms, world.draft_ms(len(batch.slots)))
        return round_.lengths, num_steps

    def _find_on_device(self, batch: Batch) -> DeviceNgrams | None:
        """Find the rows' n-gram drafts; None if the policy uses none or no text is known."""
        if not self.policy.uses_ngrams or not batch.num_tokens.all():
            return None
        if self._device_ngrams is None:
            self._device_ngrams = DeviceNgrams(self.policy.posterior.max_num_reqs, batch.confidences.shape[1])
        self._device_ngrams.find(batch)
        return self._device_ngrams

    def _prepare(self, world: Device, num_reqs: int) -> None:
        world.prepare()
        self.policy.costs.observe_draft_round(num_reqs, world.measured(world.host.inputs_device_ms))

    def observe(self, batch: Batch, num_verified: np.ndarray, num_accepted: np.ndarray) -> None:
        width = batch.confidences.shape[1]
        confidences = np.full((len(batch.slots), MAX_SPECULATIVE_TOKENS), np.nan, dtype=np.float32)
        drafted = np.arange(width) < self._num_steps
        confidences[:, :width] = np.where(drafted, batch.confidences, np.nan)
        shared = np.ones(len(batch.slots), dtype=bool)
        made = confidences, self._from_ngrams, shared
        outcome = Outcome(batch.slots, num_verified, num_accepted, *made, self._num_steps)
        if self._device_ngrams is not None:
            self._device_ngrams.judge(batch, num_accepted + 1)
        self._pending.append(outcome)

    def _learn(self, outcome: Outcome) -> None:
        if outcome.num_steps:
            self._known[outcome.slots] = outcome.confidences
        if len(outcome.slots):
            self.policy.observe(outcome)


def _rows(outcome: Outcome, chosen: np.ndarray) -> Outcome:
    """Return what became of some rows, [num_rows] bool."""
    *columns, num_steps = outcome
    return Outcome(*(column[chosen] for column in columns), num_steps)
