"""Draft & Verify's policy: a confidence threshold that follows the acceptance of its own drafts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_eesd.policy.calibration import Calibration
from vllm_eesd.policy.costs import CostModel
from vllm_eesd.policy.posterior import BetaPosterior
from vllm_eesd.policy.protocol import DraftLengthPolicy, Outcome

#: The source's values: acceptance aimed at, step of the threshold, and what a new acceptance or threshold weighs.
TARGET_ACCEPTANCE, STEP = 0.9, 0.01
ACCEPTANCE_WEIGHT, THRESHOLD_WEIGHT = 0.5, 0.1


class AdaptingThreshold(DraftLengthPolicy):
    """A threshold per request on a score of the last drafted token; drafting stops below it, the first token is free.

    After every round with drafts the request's acceptance m becomes 0.5 m + 0.5 accepted / drafted; the threshold moves
    by 0.01 up if m is at most 0.9, else down, smoothed 0.9 to 0.1.
    """

    needs_confidence = True
    #: Where a request's threshold starts.
    initial_threshold: float

    def __init__(
        self,
        posterior: BetaPosterior,
        seed: int,
        costs: CostModel | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        super().__init__(posterior, seed, costs, calibration)
        self.threshold = np.full(posterior.max_num_reqs, self.initial_threshold)
        self._acceptance = np.full(posterior.max_num_reqs, TARGET_ACCEPTANCE)

    def reset(self, slots: np.ndarray, keys: Sequence[str] | None = None) -> None:
        super().reset(slots, keys)
        self.threshold[slots], self._acceptance[slots] = self.initial_threshold, TARGET_ACCEPTANCE

    def score(self, confidence: np.ndarray) -> np.ndarray:
        """Return what is compared with the threshold, [num_rows], in [0, 1]."""
        return confidence

    def more(self, slots: np.ndarray, num_drafted: int, confidence: np.ndarray | None) -> np.ndarray:
        if confidence is None:
            return np.ones(len(slots), dtype=bool)
        return self.score(confidence) >= self.threshold[slots]

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        judged = outcome.num_verified > 0
        slots, share = outcome.slots[judged], outcome.num_accepted[judged] / outcome.num_verified[judged]
        self._acceptance[slots] += ACCEPTANCE_WEIGHT * (share - self._acceptance[slots])
        step = np.where(self._acceptance[slots] <= TARGET_ACCEPTANCE, STEP, -STEP)
        self.threshold[slots] = (self.threshold[slots] + THRESHOLD_WEIGHT * step).clip(0.0, 1.0)


class DraftVerify(AdaptingThreshold):
    """Stop after a token whose confidence is below the request's threshold, which starts at 0.6.

    Source: arXiv 2309.08168, section 3.3 (adaptive draft exiting).
    """

    initial_threshold = 0.6
