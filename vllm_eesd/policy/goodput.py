"""The goodput policy: draft as long as a token more is expected to be worth the time it takes."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np

import vllm_eesd.policy.expected_gain as expected_gain
from vllm_eesd.config import MAX_SPECULATIVE_TOKENS
from vllm_eesd.policy.calibration import Calibration
from vllm_eesd.policy.costs import WINDOW, CostModel
from vllm_eesd.policy.guard import Guard
from vllm_eesd.policy.posterior import BetaPosterior
from vllm_eesd.policy.protocol import DraftLengthPolicy, Outcome
from vllm_eesd.policy.source import NGRAM
from vllm_eesd.policy_args import GoodputArgs

#: What a request's outcomes count for after one more round with drafts: a memory of 14 rounds.
DISCOUNT = 0.93
#: Outcomes from which the prior of new requests is learned, and the pseudo-counts that prior weighs.
PRIOR_MEMORY, PRIOR_WEIGHT = 100.0, 5.0
#: Share of a Thompson draw's distance from the posterior's mean that is kept: enough to leave a wrong belief soon, and
#: half the noise in decisions.
TEMPER = 0.5
#: An exploratory draft takes the rows with the highest mean, at most so many: more of them spend a large batch's credit
#: at once.
MAX_EXPLORED = 8
#: Memory of the measured speed-up, in rounds: short, for a token gained saves time at the rate of the current text.
SPEEDUP_ROUNDS = 10
#: After so many rounds without drafts, deciding whether to draft may take `probe_budget` of the time: the decision is
#: skipped for some rounds.
QUIET_ROUNDS = 8
#: Rounds decided whose outcome is not known yet, at most: two on Model Runner V2 (`READBACK_DELAY`), and the next one.
MOST_UNDER_WAY = 3
#: Once in so many rounds some are plain, and half of them while too few were timed: the unit of all comparisons. Two in
#: a row, because only the second is a plain step as usual. A window of plain times is as old as so many of the others.
PLAIN_EVERY, PLAIN_ROUNDS = WINDOW * WINDOW, 2


class Charge(NamedTuple):
    """A round with drafts as it was entered in the guard's account.

    Attributes:
        num_reqs: requests that decoded.
        drafted: `num_verified`, `from_ngrams`, `num_steps` of `expected_gain.round_cost`.
        cost: the round's time in plain steps, as believed then.
    """

    num_reqs: int
    drafted: tuple[np.ndarray, np.ndarray, int]
    cost: float


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

    Source: for Thompson sampling arXiv 2406.03853, section 3.3; the objective and its batch form are this project's.
    """

    needs_confidence = True
    plans_ahead = True

    settings: GoodputArgs

    def __init__(
        self,
        posterior: BetaPosterior,
        seed: int,
        costs: CostModel | None,
        calibration: Calibration | None,
        settings: GoodputArgs,
        state_file: str | None = None,
    ) -> None:
        super().__init__(posterior, seed, costs, calibration, settings, state_file)
        posterior.fade(DISCOUNT)
        posterior.learn_priors(PRIOR_MEMORY, PRIOR_WEIGHT)
        self.guard = Guard(settings.probe_budget)
        self.speedup = 1.0
        self._rounds = self._quiet_rounds = 0
        self._charges: deque[Charge] = deque(maxlen=WINDOW)
        #: What each round under way loses if nothing of it is accepted, tokens; the one being decided is the last.
        self._at_stake: deque[float] = deque(maxlen=MOST_UNDER_WAY)
        self._beliefs = np.zeros(posterior.max_num_reqs, expected_gain.BELIEFS)
        self._beliefs["chain"] = 1.0
        self._compile()

    def _compile(self) -> None:
        """Call the compiled functions with no rows, so that no request waits for their compilation."""
        no_rows = np.zeros(0, dtype=np.int64)
        self.begin(no_rows, no_rows)
        self._rounds = 0
        for together in (False, True):
            given = self._rate, self._times, self._beliefs, together
            expected_gain.ngrams_to_take(no_rows, np.zeros((0, 2)), no_rows, *given)
        self._draw(no_rows)
        self._longest = self._most_steps = 2
        self.more(no_rows, 1, no_rows.astype(np.float32))
        expected_gain.round_cost(np.ones(1, dtype=np.int64), np.zeros(1, dtype=bool), 0, self._times_of(1))
        self._at_stake.clear()

    def reset(self, slots: np.ndarray, *asked: Any) -> None:
        super().reset(slots, *asked)
        self._beliefs["kind"][slots] = self.kinds[slots]
        self.guard.admit(len(slots))
        self._quiet_rounds = 0

    def begin(self, slots: np.ndarray, limits: np.ndarray) -> None:
        self._num_reqs = num_rows = len(slots)
        self._rounds += 1
        self._num_drafts, self._draft_ms = 0, 0.0
        self._beliefs["limit"][slots], self._beliefs["survival"][slots] = limits, 1.0
        self._times = self._times_of(num_rows)
        self._longest = int(limits.max(initial=0))
        self._most_steps = self._affordable(num_rows)
        self._at_stake.append(0.0)
        self._rate = num_rows / self._times.verify[0] * max(self.speedup, 1.0)
        every = 2 * PLAIN_ROUNDS if self.costs.lacks_plain(num_rows) else PLAIN_EVERY
        self._wants_plain = self._rounds % every >= every - PLAIN_ROUNDS
        if self._longest and not self._wants_plain:
            self._draw(slots)

    def _affordable(self, num_rows: int) -> int:
        """Return how many draft steps there may be: the account could all but pay if all rows took them in vain."""
        verify, draft, _ = self._times
        left = self.guard.may_lose(num_rows, sum(self._at_stake))
        steps = self._longest
        while steps > 1 and num_rows * ((verify[num_rows * steps] + draft[num_rows] * steps) / verify[0] - 1) > left:
            steps -= 1
        return steps

    def _stake(self) -> None:
        """Note what the round being decided loses if nothing is accepted."""
        verify = self._times.verify
        self._at_stake[-1] = self._num_reqs * ((verify[self._num_drafts] + self._draft_ms) / verify[0] - 1)

    def _draw(self, slots: np.ndarray) -> None:
        """Draw each row's theta, and with it the chances of its drafts."""
        mean = self.posterior.mean(slots)
        theta = mean + TEMPER * (self.posterior.draw(slots, self._generator) - mean)
        expected_gain.begin(slots, theta, self.calibration.exponents, self._longest, self._beliefs)

    def _times_of(self, num_reqs: int) -> expected_gain.Times:
        """What the steps of so many requests cost, for two tokens a row more than can be drafted."""
        verify = self.costs.verify_curve(num_reqs, num_reqs * (MAX_SPECULATIVE_TOKENS + 2))
        return expected_gain.Times(verify, self.costs.draft_curve(num_reqs), self.costs.round_ms(num_reqs))

    def take_ngrams(self, slots: np.ndarray, chances: np.ndarray, limits: np.ndarray) -> np.ndarray:
        if not (self.uses_ngrams and self.guard.may_draft()) or self._wants_plain:
            return np.zeros(len(slots), dtype=np.int64)
        given = self._rate, self._times, self._beliefs, self.costs.all_rows_draft
        taken = expected_gain.ngrams_to_take(slots, chances, limits, *given)
        self._num_drafts = int(taken.sum())
        self._stake()
        return taken

    def more(self, slots: np.ndarray, num_drafted: int, confidence: np.ndarray | None) -> np.ndarray:
        if num_drafted == 0:
            return self._first_token(slots)
        self._num_drafts += len(slots)
        self._draft_ms += self._times.draft[len(slots)]
        self._stake()
        if num_drafted >= self._most_steps:
            return np.zeros(len(slots), dtype=bool)
        if confidence is None:
            self._beliefs["survival"][slots] = self._beliefs["chain"][slots, num_drafted]
        else:
            rates = self.calibration.rates[:, num_drafted - 1]
            expected_gain.survive(slots, confidence, self.calibration.edges, rates, self._beliefs)
        return self._rows_to_extend(slots, num_drafted)

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
        mean = self.posterior.mean(slots)
        may = self._beliefs["limit"][slots] > 0
        rows = np.argsort(-np.where(may, mean, -1.0), kind="stable")[: min(MAX_EXPLORED, int(may.sum()))]
        many = np.arange(1, len(rows) + 1)
        verify, draft, _ = self._times
        cost = num_rows * ((verify[many] + draft[many]) / verify[0] - 1)
        loss = cost - np.cumsum(mean[rows])
        affordable = np.flatnonzero(cost <= self.guard.credit)
        explored = np.zeros(len(slots), dtype=bool)
        if len(affordable):
            explored[rows[: affordable[-1] + 1]] = True
            self.guard.explored(num_rows, loss[affordable[-1]])
        return explored

    def _rows_to_extend(self, slots: np.ndarray, num_drafted: int) -> np.ndarray:
        """Return the rows that draft one more, none if no number of further steps pays for itself."""
        known = self._num_drafts, self._rate, self._times, self._beliefs
        return expected_gain.rows_to_extend(slots, num_drafted, self._most_steps, *known)

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        if self._at_stake:
            self._at_stake.popleft()
        num_reqs, cost, gain_of_drafts = len(outcome.slots), 1.0, 0.0
        num_tokens = num_reqs + int(outcome.num_accepted.sum())
        self._quiet_rounds += 1
        if outcome.num_verified.any():
            self._quiet_rounds = 0
            from_ngrams = outcome.source == NGRAM
            drafted = outcome.num_verified, from_ngrams, outcome.num_steps
            cost, cost_of_drafts = expected_gain.round_cost(*drafted, self._times_of(num_reqs))
            self._charges.append(Charge(num_reqs, drafted, cost))
            gain_of_drafts = int(outcome.num_accepted[~from_ngrams].sum()) - num_reqs * cost_of_drafts
        elif self._quiet_rounds % QUIET_ROUNDS == 0 and not self.guard.may_draft():
            self._charge_anew()
        self.guard.settle(num_reqs, cost, num_tokens, gain_of_drafts)
        self.speedup += (num_tokens / (num_reqs * cost) - self.speedup) / SPEEDUP_ROUNDS

    def _charge_anew(self) -> None:
        """Enter the last rounds with drafts at the costs known today: a debt may come of one time measured wrongly."""
        for index, (num_reqs, drafted, before) in enumerate(self._charges):
            cost, _ = expected_gain.round_cost(*drafted, self._times_of(num_reqs))
            self.guard.charge_anew(num_reqs * (before - cost))
            self._charges[index] = Charge(num_reqs, drafted, cost)

    def idle_rounds(self, slots: np.ndarray) -> int:
        if self._quiet_rounds < QUIET_ROUNDS:
            return 0
        num_reqs = len(slots)
        plain_ms = self._times_of(num_reqs).verify[0]
        return int(self.costs.decision_ms(num_reqs) / (self.guard.probe_budget * plain_ms))

    def skipped(self, slots: np.ndarray, num_rounds: int) -> None:
        for _ in range(num_rounds):
            self.guard.settle(len(slots), 1.0, len(slots), 0.0)
        self.speedup = 1 + (self.speedup - 1) * (1 - 1 / SPEEDUP_ROUNDS) ** num_rounds
        self._rounds += num_rounds
