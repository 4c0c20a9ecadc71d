"""The never-slower guard: a ledger of what drafting gained and lost against plain decoding."""

from __future__ import annotations

import numpy as np

#: Tokens' worth of time that drafting may lose for every new request before it must have earned something.
REQUEST_ALLOWANCE = 2.0
#: The most credit kept, in tokens per request of the batch: gains of an easy hour do not pay for a long losing streak.
MAX_CREDIT = 8.0
#: Each fruitless probe makes the next one wait longer, by this factor and up to this many times its first wait.
BACKOFF, MAX_BACKOFF = 2.0, 8.0


class Guard:
    """Says whether drafting is affordable, so that its losses stay within a share of plain decoding's time.

    Unit: tokens, the time in which plain decoding would have emitted one. A round of a batch of n that took C times a
    plain step and emitted t tokens lost n C - t. Whatever the policy believes, it drafts only while the account is
    positive; when it believes that drafting does not pay, the income (`probe_budget` of the time) buys probes.

    Args:
        probe_budget: share of the time that may be lost in the long run.
    """

    def __init__(self, probe_budget: float) -> None:
        self.probe_budget = probe_budget
        self.credit = 0.0
        self._backoff = 1.0
        self._wait = 0.0

    def admit(self, num_reqs: int) -> None:
        """Count new requests: each brings its allowance."""
        self.credit += REQUEST_ALLOWANCE * num_reqs

    def may_draft(self) -> bool:
        return self.credit > 0.0

    def may_probe(self, cost: float) -> bool:
        """Return whether a probe that may lose `cost` tokens is due."""
        return self.credit >= cost and self._wait <= 0.0

    def probed(self, cost: float) -> None:
        """Start the wait for the next probe: the time in which the budget earns this one, longer while none pays."""
        self._wait = self._backoff * cost / self.probe_budget
        self._backoff = min(self._backoff * BACKOFF, MAX_BACKOFF)

    def paid(self) -> None:
        """The policy drafts of its own accord: the next dry spell starts with eager probes."""
        self._backoff = 1.0

    def settle(self, num_reqs: int, cost: float, num_tokens: int) -> None:
        """Enter one round.

        Args:
            num_reqs: requests that decoded.
            cost: the round's time relative to a plain step of the same batch.
            num_tokens: tokens emitted.
        """
        income = self.probe_budget * num_reqs
        self._wait -= num_reqs
        self.credit = float(
            np.clip(self.credit + income - (num_reqs * cost - num_tokens), -np.inf, MAX_CREDIT * num_reqs)
        )
