"""Policies that stop after a token whose score lies below a threshold: `confidence`, `draft_verify` and `adaedl`."""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_eesd.policy.posterior import BetaPosterior
from vllm_eesd.policy.protocol import DraftLengthPolicy, Outcome
from vllm_eesd.policy_args import ConfidenceArgs

#: Draft & Verify's values: acceptance aimed at, step of the threshold, and what a new acceptance or threshold weighs.
TARGET_ACCEPTANCE, STEP = 0.9, 0.01
ACCEPTANCE_WEIGHT, THRESHOLD_WEIGHT = 0.5, 0.1
#: AdaEDL's factor between entropy and the squared total variation distance it bounds.
ENTROPY_FACTOR = 0.2
#: Over how many tokens the draft distribution is taken to spread what its first does not have.
OTHER_TOKENS = 32
_TINY = 1e-6


class Confidence(DraftLengthPolicy):
    """Draft while the last drafted token's confidence is at least `settings.threshold`; the first token always.

    Source: Hugging Face transformers' assisted generation (assistant_confidence_threshold, whose default this is).
    """

    needs_confidence = True
    settings: ConfidenceArgs

    def more(self, slots: np.ndarray, num_drafted: int, confidence: np.ndarray | None) -> np.ndarray:
        if confidence is None:
            return np.ones(len(slots), dtype=bool)
        return confidence >= self.settings.threshold


class DraftVerify(DraftLengthPolicy):
    """Stop after a token whose confidence is below the request's threshold; the first token is always drafted.

    After every round with drafts the request's acceptance m becomes 0.5 m + 0.5 accepted / drafted; the threshold moves
    by 0.01 up if m is at most 0.9, else down, smoothed 0.9 to 0.1.
    Source: arXiv 2309.08168, section 3.3 (adaptive draft exiting).
    """

    needs_confidence = True
    #: Where a request's threshold starts.
    initial_threshold = 0.6

    def __init__(self, posterior: BetaPosterior, *args: Any) -> None:
        super().__init__(posterior, *args)
        self.threshold = np.full(posterior.max_num_reqs, self.initial_threshold)
        self._acceptance = np.full(posterior.max_num_reqs, TARGET_ACCEPTANCE)

    def reset(self, slots: np.ndarray, *asked: Any) -> None:
        super().reset(slots, *asked)
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


class AdaEDL(DraftVerify):
    """Stop after a token where 1 - sqrt(0.2 H) is below the request's threshold, which adapts as in `draft_verify`.

    H is the draft distribution's entropy in nats. A round carries its largest probability c only, so the entropy of a
    distribution with c on one token and the rest spread evenly over `OTHER_TOKENS` stands in for it.
    Source: arXiv 2410.18351, section 3.
    """

    initial_threshold = 0.4

    def score(self, confidence: np.ndarray) -> np.ndarray:
        chance = np.clip(confidence.astype(np.float64), _TINY, 1 - _TINY)
        entropy = -chance * np.log(chance) - (1 - chance) * (np.log1p(-chance) - np.log(OTHER_TOKENS))
        return 1 - np.sqrt(ENTROPY_FACTOR * entropy)
