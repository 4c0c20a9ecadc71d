"""The never-slower guard: a ledger of what drafting gained and lost against plain decoding."""

from __future__ import annotations

#: Tokens' worth of time that drafting may lose for every new request before it must have earned something: half as
#: much each time if the ones before earned nothing, down to the least.
REQUEST_ALLOWANCE, LEAST_ALLOWANCE = 2.0, 0.5
#: The most credit kept, in tokens per request of the batch: gains of an easy hour do not pay for a long losing streak.
MAX_CREDIT = 8.0
#: From one round on the wait for the next exploratory draft doubles after each fruitless one, up to this many times
#: what the budget allows.
MAX_BACKOFF = 8.0
#: Rounds for which fewer requests must have decoded before the others are taken to have ended: the scheduler passes
#: over running ones too.
PATIENCE = 32


class Guard:
    """Says whether drafting is affordable, so that its losses stay within a share of plain decoding's time.

    Unit: tokens, the time in which plain decoding would have emitted one. A round of a batch of n that took C times a
    plain step and emitted t tokens lost n C - t. Whatever the policy believes, it drafts only while the account is
    positive; when it believes that drafting does not pay, the income (`probe_budget` of the time) buys exploratory
    drafts. So all losses together stay below that share of the time, half a token to two a request and one round, as
    far as costs are right. A request that ends takes its share of a debt along: the last one of 64 does not go without
    drafts for all of them.

    Args:
        probe_budget: share of the time that may be lost in the long run.
    """

    def __init__(self, probe_budget: float) -> None:
        self.probe_budget = probe_budget
        self.credit = 0.0
        self._allowance = REQUEST_ALLOWANCE
        #: The requests a debt is shared among, and the rounds since fewer than these have decoded.
        self._debtors = self._fewer_for = 0
        self._wait = 0.0
        self._next_wait = 1.0

    def admit(self, num_reqs: int) -> None:
        """Count new requests: each brings its allowance, and is worth an exploratory draft."""
        self.credit += self._allowance * num_reqs
        self._allowance = max(self._allowance / 2, LEAST_ALLOWANCE)
        self._wait = 0.0

    def may_draft(self) -> bool:
        """Return whether drafting may go on."""
        return self.credit > 0.0

    def may_lose(self, num_reqs: int, at_stake: float) -> float:
        """Return what one round may lose, in tokens: what the account has, and the least allowance of each request.

        A debt is paid off at `probe_budget` of the time, a hundred rounds a token, in which nothing is drafted.

        Args:
            num_reqs: of the batch.
            at_stake: what rounds that are not entered yet may lose.
        """
        return max(self.credit - at_stake, 0.0) + LEAST_ALLOWANCE * num_reqs

    def may_explore(self) -> bool:
        """Return whether the last exploratory draft lies far enough back."""
        return self._wait <= 0.0

    def explored(self, num_reqs: int, loss: float) -> None:
        """Start the wait for the next exploratory draft; `loss` is what this one is expected to cost, in tokens."""
        self._wait = self._next_wait
        longest = MAX_BACKOFF * max(loss, 0.0) / (self.probe_budget * num_reqs)
        self._next_wait = max(1.0, min(2 * self._next_wait, longest))

    def paid(self) -> None:
        """Drafting gained something, or is believed to: explore again at once, and eagerly from then on."""
        self._wait, self._next_wait = 0.0, 1.0

    def charge_anew(self, num_tokens: float) -> None:
        """Correct the account: rounds already entered took so many tokens' time less than was believed."""
        self.credit += num_tokens

    def settle(self, num_reqs: int, cost: float, num_tokens: int, gain_of_drafts: float) -> None:
        """Enter one round.

        Args:
            num_reqs: requests that decoded.
            cost: the round's time relative to a plain step of the same batch.
            num_tokens: tokens emitted.
            gain_of_drafts: tokens that drafting gained over n-gram drafts alone; without any, the whole gain.
        """
        gain = num_tokens - num_reqs * cost
        self._wait -= 1.0
        if gain > 0:
            self._allowance = REQUEST_ALLOWANCE
        if gain_of_drafts > 0:
            self.paid()
        self._fewer_for = self._fewer_for + 1 if num_reqs < self._debtors else 0
        if self._fewer_for >= PATIENCE and self.credit < 0:
            self.credit *= num_reqs / self._debtors
        if self._fewer_for in (0, PATIENCE):
            self._debtors, self._fewer_for = num_reqs, 0
        self.credit = min(self.credit + gain + self.probe_budget * num_reqs, MAX_CREDIT * num_reqs)
