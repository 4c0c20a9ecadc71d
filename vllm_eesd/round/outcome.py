"""What is learned from a round: posterior, calibration, costs, counters and a report, for every runner alike."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from vllm_eesd.policy import DraftLengthPolicy, Outcome
from vllm_eesd.round.counters import DraftStats

#: Steps until a verdict is read where the host runs ahead of the device (Model Runner V2). vLLM keeps two
#: batches in flight under asynchronous scheduling: when the host drafts for step t, step t - 2 is the last one whose
#: output it has certainly had.
READBACK_DELAY = 2
#: As often as vLLM logs its own statistics.
REPORT_EVERY_S = 10.0

#: A step that takes so many times what its like do was none: the engine was paused, or its process stopped. If the next
#: one takes as long it is no pause: so long are steps now.
STALLED = 10.0

logger = logging.getLogger("vllm.eesd")


class StepTimes(NamedTuple):
    """What one step of the target took, and the drafting before it.

    Attributes:
        num_reqs, num_tokens: requests of the step, and tokens of its forward.
        num_emitted: tokens it emitted.
        verify_ms: the step outside drafting; None where a request of it did not decode or no clock saw its beginning.
        draft_steps: (rows, ms) of each draft step.
        draft_round: (rows, ms) of drafting outside its steps; None without draft steps.
        decision: (requests, ms) of a round in which nothing was found worth drafting; None in others.
        num_skipped: steps before this one in which the draft decision was skipped; they took as long.
    """

    num_reqs: int
    num_tokens: int
    num_emitted: int
    verify_ms: float | None
    draft_steps: Sequence[tuple[int, float]] = ()
    draft_round: tuple[int, float] | None = None
    decision: tuple[int, float] | None = None
    num_skipped: int = 0

    @property
    def draft_ms(self) -> float:
        """Time of the drafting before the step."""
        return sum(ms for _, ms in self.draft_steps) + (0.0 if self.draft_round is None else self.draft_round[1])


class Learner:
    """Takes in what became of rounds and what they took.

    Args:
        policy: learns.
        counters: count.
        agree: returns the times to learn from now, given those of a step: with several ranks all must learn the same,
            for their draft lengths follow from it. None: the step's own.
    """

    def __init__(
        self,
        policy: DraftLengthPolicy,
        counters: DraftStats,
        agree: Callable[[StepTimes], list[StepTimes]] | None = None,
    ) -> None:
        self.policy, self.counters = policy, counters
        self._agree = agree
        self._reported = time.perf_counter()
        self._drafted = self._stalled = False
        #: A state file that cannot be written is worth one line, not one every REPORT_EVERY_S.
        self._state_saved = True

    def learn(self, outcome: Outcome) -> None:
        """Learn from the outcome of one step's drafts."""
        if len(outcome.slots):
            self.policy.observe(outcome)

    def learn_times(self, times: StepTimes) -> None:
        """Tell the cost model what a step and the drafting before it took, and count its time."""
        for step in [times] if self._agree is None else self._agree(times):
            self._learn_times(step)

    def _learn_times(self, times: StepTimes) -> None:
        costs = self.policy.costs
        for num_rows, ms in times.draft_steps:
            costs.observe_draft_step(num_rows, ms)
        if times.draft_round is not None:
            costs.observe_draft_round(*times.draft_round)
        if times.decision is not None:
            costs.observe_decision(*times.decision)
        # Right after a drafted step, a plain one runs on cold caches: up to a quarter more than among its like.
        as_usual, self._drafted = not self._drafted, times.num_tokens > times.num_reqs
        if times.verify_ms is None or not times.num_reqs or self._is_pause(times):
            return
        if as_usual or self._drafted:
            costs.observe_verify(times.num_reqs, times.num_tokens, times.verify_ms)
        if not costs.is_settled(times.num_reqs):  # the few there were may have waited for a compiler
            return
        if self._stalled:
            return
        plain_ms = float(costs.verify_curve(times.num_reqs, 0)[0]) * times.num_emitted / times.num_reqs
        num_steps = 1 + times.num_skipped
        self.counters.count_time((times.verify_ms + times.draft_ms) * num_steps, plain_ms * num_steps)

    def _is_pause(self, times: StepTimes) -> bool:
        """Return whether a step waited, which says nothing of what it costs: a time like no other, and the first."""
        costs, num_drafts = self.policy.costs, max(times.num_tokens - times.num_reqs, 0)
        if not costs.in_ms:
            return False
        before, expected_ms = self._stalled, float(costs.verify_curve(times.num_reqs, num_drafts)[num_drafts])
        self._stalled = times.verify_ms > STALLED * expected_ms
        return self._stalled and not before

    def report(self) -> None:
        """Log one line and save what was learned, every REPORT_EVERY_S; call it while requests run."""
        now = time.perf_counter()
        if 0 <= now - self._reported < REPORT_EVERY_S:
            return
        self._reported = now
        try:
            self.policy.save_state()
            self._state_saved = True
        except OSError as error:
            if self._state_saved:
                logger.warning("eesd: state_file cannot be written, nothing is kept: %s", error)
            self._state_saved = False
        if self.counters.rounds:
            logger.info("EESD: %s", self.counters.summary())
