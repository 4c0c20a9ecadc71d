"""The goodput policy: draft as long as a token more is expected to be worth the time it takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import vllm_eesd.policy.expected_gain as expected_gain
from vllm_eesd.config import MAX_SPECULATIVE_TOKENS
from vllm_eesd.policy.calibration import Calibration
from vllm_eesd.policy.costs import CostModel
from vllm_eesd.policy.guard import Guard
from vllm_eesd.policy.posterior import BetaPosterior
from vllm_eesd.policy.protocol import DraftLengthPolicy, Outcome

#: What a request's outcomes count for after one more round with and without drafts: memories of 14 and 33 rounds.
DISCOUNT, IDLE_DISCOUNT = 0.93, 0.97
#: Outcomes from which the prior of new requests is learned, and the pseudo-counts that prior weighs.
PRIOR_MEMORY, PRIOR_WEIGHT = 100.0, 5.0
#: Share of a Thompson draw's distance from the posterior's mean that is kept: enough to leave a wrong belief soon, and
#: half the noise in decisions.
TEMPER = 0.5
#: Lower bound on theta; it keeps theta to the power of a longest draft from underflowing.
LEAST_THETA = 0.02
#: How much a request's own log-odds of acceptance, relative to the average, move those its confidences show.
REQUEST_WEIGHT = 0.5
#: An exploratory draft takes the most promising rows, their mean plus so many standard deviations, and at most so many.
OPTIMISM, MAX_EXPLORED = 1.5, 8
#: Memory of the measured speed-up, in rounds: short, for a token gained saves time at the rate of the current text.
SPEEDUP_ROUNDS = 10
#: A draft step also buys its token's confidence, with which the next decision is better than the plan assumed here. It
#: is worth so much of the time; with n rows drafting, whose sum varies less, an n-th of that.
OPTION_VALUE = 0.2
#: After so many rounds without drafts, deciding whether to draft may take `probe_budget` of the time: the decision is
#: skipped for some rounds, at most so many.
QUIET_ROUNDS, MOST_IDLE_ROUNDS = 8, 8
#: One round in so many is a plain one, and every other while too few were timed: the unit of all comparisons.
PLAIN_EVERY = 256


class Goodput(DraftLengthPolicy):
    """Maximise emitted tokens per ms.

    By the renewal-reward theorem the best stopping rule at throughput rho compares marginal tokens with rho times
    marginal time. Each request draws one theta a round from its posterior; the chance that its next j tokens are all
    accepted is the product of the calibrated confidences of those drafted, times theta to the power of how much harder
    those positions are than the average one. The batch goes on if, for some number of further steps, the tokens
    expected of the rows worth their own verification exceed rho times the time all of it takes; looking ahead matters
    because the first token carries the round's fixed cost and padded batch sizes make costs a staircase.
    Drafting nothing falls out by itself where it is best; `Guard` bounds what being wrong can cost.

    A request whose text goes on as it did before need not draft with the exit head: by the same exchange of tokens for
    time it takes the n-gram draft where that is worth more than drafting is expected to be.

    Args:
        probe_budget, ngram: see `vllm_eesd.policy_args.GoodputArgs`.
    Source: for Thompson sampling arXiv 2406.03853, section 3.3; the objective and its batch form are this project's.
    """

    needs_confidence = True

    def __init__(
        self,
        posterior: BetaPosterior,
        seed: int,
        costs: CostModel | None = None,
        calibration: Calibration | None = None,
        *,
        probe_budget: float,
        ngram: bool,
    ) -> None:
        super().__init__(posterior, seed, costs, calibration)
        self.uses_ngrams = ngram
        posterior.fade(DISCOUNT, IDLE_DISCOUNT)
        posterior.learn_priors(PRIOR_MEMORY, PRIOR_WEIGHT)
        self.guard = Guard(probe_budget)
        self.speedup = 1.0
        self._rounds = self._quiet_rounds = 0
        max_num_reqs = posterior.max_num_reqs
        self._limits = np.zeros(max_num_reqs, dtype=np.int64)
        self._survival = np.ones(max_num_reqs)
        #: Odds of a request's draft tokens relative to those of all requests with the same confidence.
        self._own_odds = np.ones(max_num_reqs)
        #: chain[slot, j]: the chance, seen from the round's start, that tokens 1..j are all accepted.
        self._chain = np.ones((max_num_reqs, MAX_SPECULATIVE_TOKENS + 1))
        self._compile()

    def _compile(self) -> None:
        """Call the compiled functions with no rows, so that no request waits for their compilation."""
        no_rows = np.zeros(0, dtype=np.int64)
        self.begin(no_rows, no_rows)
        self._rounds = 0
        self._ngrams_to_take(no_rows, np.zeros((0, 2)), no_rows)
        self._draw(no_rows)
        self._survive(no_rows, 1, no_rows.astype(np.float32))
        self._rows_to_extend(no_rows, 0)
        self._round_cost(1, np.ones(1, dtype=np.int64), np.zeros(1, dtype=bool))

    def reset(self, slots: np.ndarray, keys: Sequence[str] | None = None) -> None:
        super().reset(slots, keys)
        self.guard.admit(len(slots))
        self._quiet_rounds = 0

    def begin(self, slots: np.ndarray, limits: np.ndarray) -> None:
        self._num_reqs = num_rows = len(slots)
        longest = int(limits.max(initial=0))
        self._rounds += 1
        self._num_drafts = 0
        self._limits[slots], self._survival[slots] = limits, 1.0
        self._longest = longest
        self._verify, self._draft = self._curves(num_rows)
        self._rate = num_rows / self._verify[0] * max(self.speedup, 1.0)
        self._wants_plain = self._rounds % (2 if self.costs.lacks_plain(num_rows) else PLAIN_EVERY) == 0
        if longest and not self._wants_plain:
            self._draw(slots)

    def _draw(self, slots: np.ndarray) -> None:
        """Draw each row's theta, and with it the chances of its drafts."""
        average = self.calibration.mean_rate
        parameters = self.posterior.parameters(slots)
        expected_gain.begin(
            slots,
            parameters,
            self._generator.beta(*parameters),
            TEMPER,
            LEAST_THETA,
            average / (1 - average),
            REQUEST_WEIGHT,
            self.calibration.exponents[: self._longest],
            self._chain,
            self._own_odds,
        )

    def _curves(self, num_reqs: int) -> tuple[np.ndarray, np.ndarray]:
        """Times of verification by drafts and of a draft step by rows; two tokens a row more than can be drafted."""
        most = num_reqs * (MAX_SPECULATIVE_TOKENS + 2)
        return self.costs.verify_curve(num_reqs, most), self.costs.draft_curve(num_reqs)

    def take_ngrams(self, slots: np.ndarray, chances: np.ndarray, limits: np.ndarray) -> np.ndarray:
        if not (self.uses_ngrams and self.guard.may_draft()) or self._wants_plain:
            return np.zeros(len(slots), dtype=np.int64)
        taken = self._ngrams_to_take(slots, chances, limits)
        self._num_drafts = int(taken.sum())
        return taken

    def _ngrams_to_take(self, slots: np.ndarray, chances: np.ndarray, limits: np.ndarray) -> np.ndarray:
        return expected_gain.ngrams_to_take(
            slots,
            chances,
            limits,
            self._limits,
            self._chain,
            self._verify,
            self._draft,
            self.costs.round_ms(len(slots)),
            self._rate,
        )

    def more(self, slots: np.ndarray, num_drafted: int, confidence: np.ndarray | None) -> np.ndarray:
        if num_drafted == 0:
            return self._first_token(slots)
        self._num_drafts += len(slots)
        if num_drafted >= self._longest:
            return np.zeros(len(slots), dtype=bool)
        if confidence is None:
            self._survival[slots] = self._chain[slots, num_drafted]
        else:
            self._survive(slots, num_drafted, confidence)
        return self._rows_to_extend(slots, num_drafted)

    def _survive(self, slots: np.ndarray, num_drafted: int, confidence: np.ndarray) -> None:
        rates = self.calibration.rates[num_drafted - 1]
        expected_gain.survive(slots, confidence, self.calibration.edges, rates, self._own_odds, self._survival)

    def _first_token(self, slots: np.ndarray) -> np.ndarray:
        no_rows = np.zeros(len(slots), dtype=bool)
        if not self._longest or self._wants_plain:
            return no_rows
        if self.guard.may_draft():
            rows = self._rows_to_extend(slots, 0)
            if rows.any():
                self.guard.paid()
                return rows
        return self._explore(slots) if self.guard.may_explore() else no_rows

    def _explore(self, slots: np.ndarray) -> np.ndarray:
        """Return the rows that draft a first token only to learn: the most promising few whose loss is affordable."""
        num_rows = self._num_reqs
        alpha, beta = self.posterior.parameters(slots)
        mean = alpha / (alpha + beta)
        hope = mean + OPTIMISM * np.sqrt(mean * (1 - mean) / (alpha + beta + 1))
        rows = np.argsort(-np.where(self._limits[slots] > 0, hope, -1.0), kind="stable")
        rows = rows[: min(MAX_EXPLORED, int((self._limits[slots] > 0).sum()))]
        many = np.arange(1, len(rows) + 1)
        cost = num_rows * ((self._verify[many] + self._draft[many]) / self._verify[0] - 1)
        loss = cost - np.cumsum(mean[rows])
        affordable = np.flatnonzero(cost <= self.guard.credit)
        explored = np.zeros(len(slots), dtype=bool)
        if len(affordable):
            explored[rows[: affordable[-1] + 1]] = True
            self.guard.explored(num_rows, loss[affordable[-1]])
        else:
            self.guard.postpone()
        return explored

    def _rows_to_extend(self, slots: np.ndarray, num_drafted: int) -> np.ndarray:
        """Return the rows that draft one more, none if no number of further steps pays for itself."""
        return expected_gain.rows_to_extend(
            slots,
            num_drafted,
            self._longest,
            self._limits,
            self._survival,
            self._chain,
            self._num_drafts,
            self._verify,
            self._draft,
            self._rate * (1 - OPTION_VALUE / max(len(slots), 1)),
            # Beside n-gram drafts alone, the first draft step also costs what any drafted round does.
            self.costs.round_ms(self._num_reqs) if num_drafted == 0 < self._num_drafts else 0.0,
        )

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        num_reqs = len(outcome.slots)
        num_tokens = num_reqs + int(outcome.num_accepted.sum())
        cost, gain_of_drafts = 1.0, 0.0
        self._quiet_rounds += 1
        if outcome.num_verified.any():
            self._quiet_rounds = 0
            cost, cost_of_drafts = self._round_cost(num_reqs, outcome.num_verified, outcome.from_ngrams)
            gain_of_drafts = int(outcome.num_accepted[~outcome.from_ngrams].sum()) - num_reqs * cost_of_drafts
        self.guard.settle(num_reqs, cost, num_tokens, gain_of_drafts)
        self.speedup += (num_tokens / (num_reqs * cost) - self.speedup) / SPEEDUP_ROUNDS

    def idle_rounds(self, slots: np.ndarray) -> int:
        if self._quiet_rounds < QUIET_ROUNDS:
            return 0
        num_reqs = len(slots)
        plain_ms = self._curves(num_reqs)[0][0]
        return int(min(self.costs.decision_ms(num_reqs) / (self.guard.probe_budget * plain_ms), MOST_IDLE_ROUNDS))

    def skipped(self, slots: np.ndarray, num_rounds: int) -> None:
        super().skipped(slots, num_rounds)
        self.guard.skipped(len(slots), num_rounds)
        self.speedup = 1 + (self.speedup - 1) * (1 - 1 / SPEEDUP_ROUNDS) ** num_rounds
        self._rounds += num_rounds

    def _round_cost(self, num_reqs: int, num_verified: np.ndarray, from_ngrams: np.ndarray) -> tuple[float, float]:
        """See `expected_gain.round_cost`."""
        curves = self._curves(num_reqs)
        return expected_gain.round_cost(num_verified, from_ngrams, *curves, self.costs.round_ms(num_reqs))
