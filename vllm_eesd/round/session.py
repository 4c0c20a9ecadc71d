"""What a runner remembers between rounds: who runs, what was drafted, and what became of it. No engine, no device.

A round, on either model runner and in a replay, in the order of arXiv 2406.03853, algorithm 1:

    session.admit(...)               requests start
    session.verdict(step)            learn from what the target made of the drafts
    round_ = session.begin(...)      the policy says who drafts how far
    ...                              the runner drafts
    session.end(...)                 the drafts wait for their verdict
    session.back_off(...)            where nothing was worth drafting, the next decisions are skipped (`skips`)

`delay` says how many steps late a verdict is read. With 0 (Model Runner V1) a verdict is known when the next round
begins, and a confidence before the next draft step: the policy is asked token by token. With 2 (Model Runner V2) the
host runs ahead of the device: `verdict` takes in the step just launched and learns from the one two steps before, and
a round is decided before its first draft step, by the confidences of the last drafts that are known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vllm_eesd.policy import NGRAM, DraftLengthPolicy, Outcome
from vllm_eesd.round.counters import DraftStats
from vllm_eesd.round.draft import DraftRound
from vllm_eesd.round.idle import MAY_NOT_DRAFT, IdleBackoff
from vllm_eesd.round.ngram import NgramRates
from vllm_eesd.round.outcome import Learner, StepTimes
from vllm_eesd.round.requests import NewRequest, RunningRequests
from vllm_eesd.round.second_drafter import DraftChances
from vllm_eesd.round.slots import PendingDrafts
from vllm_eesd.round.step import Drafted, Grown, Readable, Step, UnderWay


class Session:
    """Admits requests, learns from verdicts, decides rounds; the top of this file has the order of the calls.

    Args:
        policy: decides draft lengths, and learns.
        counters: count.
        num_speculative_tokens: the longest draft.
        delay: steps until a verdict is read; 0 reads it at once.
        ngrams: the second drafter, or what is known of its drafts; None where there is none.
        kind_of: see `RunningRequests`.
        agree: see `Learner`.
        drafts: kept by a runner that reads their lengths elsewhere; made here when None.
    Attributes:
        generations: [max_num_reqs] int64, which request of its slot each one is.
        round: the last one begun.
        drafted: what its draft steps made, if their confidences are read late; until the step that judges it.
    """

    def __init__(
        self,
        policy: DraftLengthPolicy,
        counters: DraftStats,
        num_speculative_tokens: int,
        delay: int = 0,
        ngrams: DraftChances | None = None,
        kind_of: Callable[[Any], int] | None = None,
        agree: Callable[[StepTimes], list[StepTimes]] | None = None,
        drafts: PendingDrafts | None = None,
    ) -> None:
        max_num_reqs = policy.posterior.max_num_reqs
        self.policy, self.counters, self.delay, self.ngrams = policy, counters, delay, ngrams
        self.learner = Learner(policy, counters, agree)
        self.requests = RunningRequests(max_num_reqs, num_speculative_tokens, policy, ngrams, kind_of)
        self.drafts = PendingDrafts(max_num_reqs) if drafts is None else drafts
        self.generations = np.zeros(max_num_reqs, dtype=np.int64)
        no_rows = np.zeros(0, dtype=np.int64)
        self.round = DraftRound(policy, no_rows, no_rows)
        self.start_afresh()

    def start_afresh(self) -> None:
        """Drop what a failed round may have left half written: no request has a draft, verdicts under way are lost."""
        self.drafts.clear()
        self.drafted: Drafted | None = None
        self._under_way: deque[UnderWay] = deque()
        self._idle = IdleBackoff()
        self._decision: tuple[int, float] | None = None

    def admit(
        self, slots: np.ndarray, requests: Sequence[NewRequest] | None = None, max_model_len: int | None = None
    ) -> None:
        """Take in requests that start, or start anew: of each no more is known than the prior.

        Args:
            slots: [num_requests] int64, distinct: where they now live.
            requests, max_model_len: see `RunningRequests.admit`; None in a replay, whose requests ask for nothing.
        """
        self.generations[slots] += 1
        self.drafts.clear(slots)
        if requests is not None:
            self.requests.admit(slots, requests, max_model_len)
            return
        self.policy.reset(slots)
        if self.ngrams is not None:
            self.ngrams.reset(slots)

    def skips(self, request_ids: list[str], only_decoded: bool) -> bool:
        """Return whether the round after a step is one more without a decision, counted if it is; see `back_off`.

        Args:
            request_ids, only_decoded: of the step, see `IdleBackoff.goes_on`.
        """
        if self._idle.goes_on(request_ids, only_decoded):
            self.counters.count_lengths(0, 0, num_rounds=len(request_ids))
            self.drafts.matched[self.round.slots] = -1  # the text grows without a search
            return True
        if self._idle.num_skipped:
            self.policy.skipped(self.round.slots, self._idle.num_skipped)
        return False

    def verdict(self, step: Step, learns: bool = True) -> Grown | None:
        """Take in a step of the target, and learn from the one that is old enough to be read.

        Args:
            learns: see `learn_oldest`.
        Returns:
            what `learn_oldest` does; None where no step is old enough.
        """
        slots = step.slots
        known = self.generations[slots], self.drafts.source[slots], self.drafts.matched[slots]
        self._under_way.append(UnderWay(step, *known, self.drafted, self._decision, self._idle.take()))
        self.drafted = self._decision = None
        return self.learn_oldest(learns) if len(self._under_way) > self.delay else None

    def learn_oldest(self, learns: bool = True) -> Grown | None:
        """Learn from the oldest step under way, which is over.

        Args:
            learns: False while requests are made up: then nothing is counted or learned.
        Returns:
            the requests whose texts are now known to be longer; None where no step is under way.
        """
        return self._observe(self._under_way.popleft(), learns) if self._under_way else None

    def _observe(self, judged: UnderWay, learns: bool) -> Grown:
        step = judged.step
        counts = step.counts.numpy().astype(np.int64)
        num_sampled = counts[:, 0]
        here = self.generations[step.slots] == judged.generations  # their slots have not changed hands since
        grown = Grown(step.slots[here], (num_sampled - step.decoded)[here])
        if not learns:
            return grown
        if judged.drafted is not None:
            self._take_confidences(judged.drafted)
        decoded = step.decoded & (num_sampled > 0)
        self._count(judged, num_sampled, np.flatnonzero(decoded))
        rows = np.flatnonzero(decoded & here)
        self.learner.learn(self._outcome(judged, num_sampled, rows))
        if self.ngrams is not None and counts.shape[1] == 3:
            self._learn_ngrams(judged, counts, rows, np.flatnonzero(here & (num_sampled > 0)))
        if step.times is not None:
            times = step.times(int(num_sampled.sum()), bool(decoded.all()))
            times = times._replace(decision=judged.decision, num_skipped=judged.num_skipped)
            self.learner.learn_times(times)
        return grown

    def _count(self, judged: UnderWay, num_sampled: np.ndarray, rows: np.ndarray) -> None:
        """Count the rounds of these rows."""
        num_verified, num_accepted = judged.step.num_verified[rows], num_sampled[rows] - 1
        for lengths in zip(num_verified.tolist(), num_accepted.tolist(), strict=True):
            self.counters.count_lengths(*lengths)
        from_ngrams = judged.source[rows] == NGRAM
        if from_ngrams.any():
            self.counters.count_ngrams(int(num_verified[from_ngrams].sum()), int(num_accepted[from_ngrams].sum()))

    def _outcome(self, judged: UnderWay, num_sampled: np.ndarray, rows: np.ndarray) -> Outcome:
        """Return what the policy learns of these rows, [any] int64."""
        step, slots = judged.step, judged.step.slots[rows]
        verified = step.num_verified if step.unobserved is None else np.where(step.unobserved, 0, step.num_verified)
        verified = verified[rows]
        accepted = np.minimum(num_sampled[rows] - 1, verified)
        made = self.drafts.confidences[slots], judged.source[rows], self.requests.updates_shared_prior[slots]
        return Outcome(slots, verified, accepted, *made, 0 if judged.drafted is None else judged.drafted.num_steps)

    def _take_confidences(self, drafted: Drafted) -> None:
        """Keep a round's confidences, and count those that are NaN: of hidden states with infinities or NaN."""
        self.counters.count_not_finite(drafted.num_not_finite())
        if self.policy.needs_confidence:
            slots, known = drafted.round.slots, drafted.known_confidences()
            same = self.generations[slots] == drafted.generations
            self.drafts.confidences[slots[same], : known.shape[1]] = known[same]

    def _learn_ngrams(self, judged: UnderWay, counts: np.ndarray, decoded: np.ndarray, emitted: np.ndarray) -> None:
        """Learn how much of the last n-gram drafts was emitted, and how far texts match now.

        Args:
            counts: of `Step`.
            decoded, emitted: rows whose last draft was of the same request; rows whose text has grown.
        """
        assert isinstance(self.ngrams, NgramRates)
        decoded = decoded[judged.matched[decoded] >= 0]
        slots, (num_sampled, num_right, _) = judged.step.slots[decoded], np.ascontiguousarray(counts[decoded].T)
        num_judged = np.minimum(num_sampled, self.ngrams.longest)
        shared = self.requests.updates_shared_prior[slots]
        self.ngrams.learn(slots, judged.matched[decoded], num_judged, num_right, shared)
        self.ngrams.see(judged.step.slots[emitted], counts[emitted, 2])

    def begin(
        self,
        slots: np.ndarray,
        limits: np.ndarray,
        ngrams: DraftChances | None = None,
        ngram_limits: np.ndarray | None = None,
    ) -> DraftRound:
        """Begin a round and return it: its first tokens are decided, or with a delay all of it.

        Args:
            slots: [num_rows] int64, distinct: the batch.
            limits, ngrams, ngram_limits: see `DraftRound`.
        """
        self.round = DraftRound(self.policy, slots, limits, ngrams, ngram_limits)
        if self.delay:
            self.round.decide_ahead(self.drafts.confidences[slots])
            self.drafts.keep(self.round)
            if ngrams is not None:
                self.drafts.matched[slots] = ngrams.matched[slots]
        return self.round

    def end(self, confidences: Readable | None = None, num_steps: int | None = None) -> None:
        """Keep the round's drafts until they are judged.

        Args:
            confidences: [num_rows, K] float32, to be read with the verdict; None: those told during the round.
            num_steps: draft steps that ran; the round's when None.
        """
        if confidences is None:
            self.drafts.keep(self.round, self.round.confidences)
            return
        generations = self.generations[self.round.slots]
        num_steps = self.round.num_steps if num_steps is None else num_steps
        self.drafted = Drafted(self.round, generations, confidences, num_steps)

    def back_off(
        self, request_ids: list[str], decision_ms: float, may_skip: bool, may_draft: bool | None = None
    ) -> None:
        """Where a round drafts nothing, skip the next decisions: deciding is itself the overhead.

        Args:
            request_ids: of the round's rows.
            decision_ms: time of the decision.
            may_skip: False where the next round must be decided.
            may_draft: whether any request may draft, now or soon; what is true of this round when None.
        """
        if self.round.lengths.any():
            return
        num_rounds = MAY_NOT_DRAFT
        if self.round.may_draft if may_draft is None else may_draft:
            self._decision = len(self.round.slots), decision_ms
            num_rounds = self.policy.idle_rounds(self.round.slots)
        self._idle.begin(num_rounds if may_skip else 0, request_ids)
