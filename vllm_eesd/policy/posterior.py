"""The acceptance posterior: one Beta distribution per request slot, fed with censored outcomes."""

from __future__ import annotations

import numpy as np


class BetaPosterior:
    """Beta(alpha, beta) over the probability that a draft token is accepted, one per request slot.

    Of k verified drafts with a accepted, tokens 1..a are successes, token a + 1 (if a < k) is one failure and the
    rest are unobserved: a rejection says nothing of the tokens behind it.

    Args:
        max_num_reqs: request slots.
        prior_alpha, prior_beta: pseudo-counts every request starts from, > 0.
    Raises:
        ValueError: a prior pseudo-count is not positive.
    Source: arXiv 2406.03853, section 3.3 (Thompson sampling control).
    """

    def __init__(self, max_num_reqs: int, prior_alpha: float = 1.0, prior_beta: float = 1.0) -> None:
        if not (prior_alpha > 0 and prior_beta > 0):
            raise ValueError(f"eesd: prior ({prior_alpha}, {prior_beta}) is not valid: both pseudo-counts must be > 0")
        self.prior = (float(prior_alpha), float(prior_beta))
        self.alpha = np.full(max_num_reqs, self.prior[0])
        self.beta = np.full(max_num_reqs, self.prior[1])

    def reset(self, slots: np.ndarray) -> None:
        """Start these slots from the prior: a new request took them over."""
        self.alpha[slots], self.beta[slots] = self.prior

    def observe(self, slots: np.ndarray, num_verified: np.ndarray, num_accepted: np.ndarray) -> None:
        """Count the outcome of one round.

        Args:
            slots: [num_rows] int64, distinct.
            num_verified: [num_rows] draft tokens the target judged (cut and placeholder drafts do not count).
            num_accepted: [num_rows] of those, the leading ones accepted.
        """
        self.alpha[slots] += num_accepted
        self.beta[slots] += num_accepted < num_verified

    def draw(self, slots: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Return one Thompson draw per slot, [num_rows] float64 in [0, 1]."""
        return generator.beta(self.alpha[slots], self.beta[slots])
