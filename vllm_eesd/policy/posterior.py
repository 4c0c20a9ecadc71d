"""The acceptance posterior: one Beta distribution per request slot, fed with censored outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np

#: Learned priors kept (LoRA adapters, tenants); keys beyond that share the first one.
MAX_PRIOR_KEYS = 64
DEFAULT_KEY = ""
#: No posterior remembers so many outcomes: larger ones in a file are damage, and their sum might overflow.
MAX_COUNT = 1e9


class BetaPosterior:
    """Beta(alpha, beta) over the probability that a draft token is accepted, one per request slot.

    Of k verified drafts with a accepted, tokens 1..a are successes, token a + 1 (if a < k) is one failure and the
    rest are unobserved: a rejection says nothing of the tokens after it.

    `fade` lets counts fade, `learn_priors` lets requests start from what others taught; without them it is the paper's.

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
        self.max_num_reqs = max_num_reqs
        self.prior = (float(prior_alpha), float(prior_beta))
        self._discount = 1.0
        self._memory = 0.0
        self._weight = sum(self.prior)
        self._counts = np.zeros((2, max_num_reqs))  # successes, failures
        self._key = np.zeros(max_num_reqs, dtype=np.int64)
        self._key_index = {DEFAULT_KEY: 0}
        self._shared = np.zeros((2, MAX_PRIOR_KEYS))
        self._refresh_priors()
        no_rows = np.zeros(0, dtype=np.int64)  # compiles: no request waits for that
        _learn(no_rows, no_rows, no_rows, 1.0, self._given, self._shared, self._priors)

    def fade(self, discount: float) -> None:
        """Multiply a request's counts by `discount` in every round in which its drafts are judged."""
        self._discount = discount

    def learn_priors(self, memory: float, weight: float) -> None:
        """Learn the mean of each key's prior from the last `memory` outcomes of requests that share.

        Args:
            weight: alpha + beta of these priors.
        """
        self._memory, self._weight = memory, weight
        self._refresh_priors()

    def reset(self, slots: np.ndarray, keys: Sequence[str] | None = None) -> None:
        """Start these slots from the prior of their key: a new request took them over."""
        self._counts[:, slots] = 0
        self._key[slots] = 0 if keys is None else [self._index_of(key) for key in keys]

    def _index_of(self, key: str) -> int:
        if key not in self._key_index and len(self._key_index) < MAX_PRIOR_KEYS:
            self._key_index[key] = len(self._key_index)
        return self._key_index.get(key, 0)

    def parameters(self, slots: np.ndarray) -> np.ndarray:
        """Return alpha and beta of these slots, [2, num_rows] float64, both > 0."""
        return self._counts[:, slots] + self._priors[:, self._key[slots]]

    def mean(self, slots: np.ndarray) -> np.ndarray:
        """Return the expected acceptance of these slots, [num_rows] float64."""
        alpha, beta = self.parameters(slots)
        return alpha / (alpha + beta)

    def _refresh_priors(self) -> None:
        # The given prior counts for as much as a request's own does: outcomes of others soon outweigh it.
        self._given = np.array(self.prior) * (self._weight / sum(self.prior))
        learned = self._shared + self._given[:, None]
        #: Alpha and beta a request of each key starts from, [2, MAX_PRIOR_KEYS].
        self._priors = learned * (self._weight / learned.sum(axis=0))

    def observe(
        self,
        slots: np.ndarray,
        num_verified: np.ndarray,
        num_accepted: np.ndarray,
        updates_shared_prior: np.ndarray | None = None,
    ) -> None:
        """Count the outcome of one round.

        Args:
            slots: [num_rows] int64, distinct.
            num_verified: [num_rows] draft tokens the target judged (cut and placeholder drafts do not count).
            num_accepted: [num_rows] of those, the leading ones accepted.
            updates_shared_prior: [num_rows] bool, which rows teach their key's prior; None: all.
        """
        num_verified = np.asarray(num_verified, dtype=np.int64)
        num_accepted = np.asarray(num_accepted, dtype=np.int64)
        judged = num_verified > 0
        faded = self._counts[:, slots[judged]] * self._discount
        outcomes = num_accepted[judged], num_accepted[judged] < num_verified[judged]
        self._counts[:, slots[judged]] = faded + outcomes
        if self._memory:
            shared = num_verified if updates_shared_prior is None else num_verified * updates_shared_prior
            kept = 1 - 1 / self._memory
            _learn(self._key[slots], shared, num_accepted, kept, self._given, self._shared, self._priors)

    def draw(self, slots: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Return one Thompson draw per slot, [num_rows] float64 in [0, 1]."""
        return generator.beta(*self.parameters(slots))

    def state(self) -> dict[str, Any]:
        """Return the learned priors, by key, as JSON takes them."""
        return {key: self._shared[:, index].tolist() for key, index in self._key_index.items()}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over learned priors that `state` gave.

        Raises:
            ValueError: not two counts from 0 to `MAX_COUNT` for every key.
        """
        restored = {key: np.array(counts, dtype=np.float64) for key, counts in state.items()}
        for key, counts in restored.items():
            if counts.shape != (2,) or not ((counts >= 0) & (counts <= MAX_COUNT)).all():
                shown = f"{counts.tolist()}"
                raise ValueError(f"prior of key {key!r:.80} is {shown:.80}, must be two counts from 0 to {MAX_COUNT:g}")
        for key, counts in restored.items():
            if self._index_of(key) or key == DEFAULT_KEY:  # keys beyond those kept would overwrite the first
                self._shared[:, self._index_of(key)] = counts
        self._refresh_priors()


@numba.njit(cache=True)
def _learn(
    keys: np.ndarray,
    num_verified: np.ndarray,
    num_accepted: np.ndarray,
    memory_kept: float,
    given: np.ndarray,
    shared: np.ndarray,
    priors: np.ndarray,
) -> None:
    """Update `shared` and `priors` [2, MAX_PRIOR_KEYS] with the outcomes of requests of these keys, [num_rows] int64.

    Rows without judged drafts teach nothing. `memory_kept` is what older outcomes of a key are worth after one more;
    `given` [2] the prior before any.
    """
    weight = given[0] + given[1]
    for row, key in enumerate(keys):
        if num_verified[row] == 0:
            continue
        failed = 1 if num_accepted[row] < num_verified[row] else 0
        faded = memory_kept ** (num_accepted[row] + failed)
        shared[0, key] = shared[0, key] * faded + num_accepted[row]
        shared[1, key] = shared[1, key] * faded + failed
        alpha, beta = shared[0, key] + given[0], shared[1, key] + given[1]
        priors[0, key] = alpha * weight / (alpha + beta)
        priors[1, key] = beta * weight / (alpha + beta)
