"""The host's side of drafting on Model Runner V2: who drafts how far, and what became of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vllm_eesd.host.round_setup import agree_on_times, build_policy_of, open_trace
from vllm_eesd.host.speculative import EESDSpeculativeConfig
from vllm_eesd.host.v2.batch import V2Batch
from vllm_eesd.host.v2.readback import ConfidenceCopies, Drafted, Judged, Lagged, RoundTimes
from vllm_eesd.host.v2.trace import pending_verdict
from vllm_eesd.policy import DraftLengthPolicy, Outcome
from vllm_eesd.round.counters import DraftStats
from vllm_eesd.round.draft import DraftRound
from vllm_eesd.round.outcome import Learner, StepTimes
from vllm_eesd.round.requests import NewRequest, RunningRequests
from vllm_eesd.round.slots import PendingDrafts
from vllm_eesd.traces.rounds import Drafts

#: With tensor parallelism rank 0's times go to all ranks once in so many steps, a message on the host each time.
SHARE_TIMES_EVERY = 16


class Rounds:
    """Asks the policy for each round's draft lengths, and feeds it with outcomes and times a fixed lag later.

    A request's slot is its index in vLLM's request states. A preempted request comes back as a new one, from the prior.

    Args:
        config: EESD's.
        max_num_reqs, max_model_len: the engine's.
        device: where the model runs.
    """

    def __init__(
        self, config: EESDSpeculativeConfig, max_num_reqs: int, max_model_len: int, device: torch.device
    ) -> None:
        self._config, self._max_num_reqs = config, max_num_reqs
        self.stats = DraftStats(config.num_speculative_tokens)
        self._pending = PendingDrafts(max_num_reqs)
        #: [max_num_reqs] int64, length of each slot's current draft.
        self.num_drafted = self._pending.lengths
        self._agree_on_times = agree_on_times(SHARE_TIMES_EVERY)
        self._device = device
        #: vLLM may shorten it until its KV cache is allocated.
        self.max_model_len = max_model_len
        self._samples_drafts = config.eesd.draft_sample_method == "probabilistic"
        self._num_tokens = np.zeros(max_num_reqs, dtype=np.int64)
        self._generation = np.zeros(max_num_reqs, dtype=np.int64)
        self._has_grammar = np.zeros(max_num_reqs, dtype=bool)
        self.round_trace = open_trace(config)
        #: False while the worker warms up: its requests are made up, and its steps wait for compilers.
        self.learns = True
        self._began_s = time.perf_counter()
        self.forget_requests()

    def forget_requests(self) -> None:
        """Begin with a new policy that has met no request: those of the worker's warm-up are made up."""
        #: What the requests of all slots ever used asked for, and the slots whose policy does not know it yet.
        self._requested: dict[int, NewRequest] = {}
        self.use_policy(build_policy_of(self._config, self._max_num_reqs))

    def use_policy(self, policy: DraftLengthPolicy) -> None:
        """Choose draft lengths by this policy from now on; requests that run start from its prior."""
        self.policy = policy
        self.requests = RunningRequests(self._max_num_reqs, self._config.num_speculative_tokens, policy)
        self._learner = Learner(policy, self.stats, self._agree_on_times)
        self.start_afresh()

    def admit(self, slots: Sequence[int], new_requests: Sequence[Any]) -> None:
        """Take in requests that start or come back from preemption.

        Args:
            new_requests: vLLM's NewRequestData.
        """
        for slot, request in zip(slots, new_requests, strict=True):
            params = request.sampling_params
            self._requested[slot] = NewRequest(params, len(request.prompt_token_ids or ()), "")
            self._not_admitted.add(slot)
            self._generation[slot] += 1
            self._pending.clear(slot)
            self._num_tokens[slot] = len(request.prefill_token_ids)
            self._has_grammar[slot] = params.structured_outputs is not None
        self._admit()

    def _admit(self) -> None:
        slots = sorted(self._not_admitted)
        self.requests.admit(np.array(slots), [self._requested[slot] for slot in slots], self.max_model_len)
        self._not_admitted.clear()

    def start_afresh(self) -> None:
        """Drop what a failed round may have left half written: no request has a draft, the next round admits all anew.

        Outcomes under way are dropped with it. What is known of a request's length then lags by their tokens,
        so its last draft may be longer than it needs to be; it is never verified past the request's end.
        """
        self._pending.clear()
        self._not_admitted = set(self._requested)
        self._forget_steps()

    def _forget_steps(self) -> None:
        self._lagged = Lagged(len(self.num_drafted), self._device)
        self._copies = ConfidenceCopies((len(self.num_drafted), self._config.num_speculative_tokens), self._device)
        self._drafted: Drafted | None = None
        self._times: RoundTimes | None = None

    def begin(
        self,
        batch: V2Batch,
        num_sampled: torch.Tensor,
        asynchronous: bool,
        tokens: torch.Tensor | None = None,
        longest: int | None = None,
    ) -> RoundTimes:
        """Learn from the step that is now old enough, and ask which rows draft a first token.

        Args:
            batch: of the step just run.
            num_sampled: [num_reqs] int32 on the device.
            asynchronous: whether vLLM schedules a step before the one before has ended.
            tokens: of `trace.tokens_of_step`, where rounds are traced.
            longest: the longest draft of this round, for all requests; None is K.
        Returns:
            The new round's clock, at its beginning.
        """
        if self._not_admitted:
            self._admit()
        slots = batch.slots()
        self._times = times = RoundTimes(self._device, len(slots), self._times)
        times.moments.mark()
        judged = self._judged(batch, slots, times)
        if tokens is not None and self.learns and times.previous is not None and judged.decoded.any():
            self._trace(batch.req_ids, judged, tokens, asynchronous)
        self._began_s = time.perf_counter()
        old = self._lagged.push(judged, num_sampled)
        if old is not None:
            self._observe(old, asynchronous)
        self._choose(slots, self._limits(batch, slots, longest))
        self._learner.report()
        return times

    def _judged(self, batch: V2Batch, slots: np.ndarray, times: RoundTimes) -> Judged:
        """Return the outcome of the step just run, as far as the host knows it: not how many tokens it emitted."""
        verified = np.minimum(self.num_drafted[slots], batch.num_scheduled_drafts())
        drafted, self._drafted = self._drafted, None
        return Judged(
            slots,
            self._generation[slots],
            batch.decoded(),
            verified,
            self._pending.confidences[slots],
            np.zeros(0, dtype=np.int64),
            batch.num_tokens,
            times,
            drafted,
        )

    def _limits(self, batch: V2Batch, slots: np.ndarray, longest: int | None) -> np.ndarray:
        """Return the longest draft each row may have, [num_reqs] int64; see `begin`."""
        at_least = self._num_tokens[slots] + self._lagged.num_emitted_at_least(slots, self._generation[slots])
        limits = self.requests.longest_drafts(slots, at_least)
        limits[~batch.reaches_end_of_prompt()] = 0
        if longest is not None:
            limits = np.minimum(limits, longest)
        if self._samples_drafts:
            # A grammar cuts a draft because of what it is; vLLM then samples anew, which is right for one-hot drafts.
            limits[self._has_grammar[slots]] = 0
        return limits

    def _choose(self, slots: np.ndarray, limits: np.ndarray) -> None:
        """Start a round; a policy that looks at no confidence is asked for all its tokens at once."""
        self.waits_for_confidence = self.policy.needs_confidence
        self._round = DraftRound(self.policy, slots, limits)
        while not self.waits_for_confidence and len(self._round.rows):
            self._round.tell(None)
        self._pending.keep(self._round)

    @property
    def lengths(self) -> np.ndarray:
        """Length of each row's draft as decided so far, [num_reqs] int64."""
        return self._round.lengths

    def wants_step(self, step: int) -> bool:
        """Return whether draft step `step` (from 1) should run: a row drafts that token, or may yet."""
        if not self.waits_for_confidence:
            return step <= self._round.lengths.max(initial=0)
        return bool((self._round.limits[self._round.rows] >= step).any())

    def decide(self, confidence: np.ndarray) -> None:
        """Ask which rows draft one more token, given the confidence of the last one decided on.

        Args:
            confidence: [num_reqs] float32, of the whole batch.
        """
        self._round.tell(confidence[self._round.rows])
        self._pending.keep(self._round)

    def end(self, confidences: torch.Tensor) -> None:
        """The round's draft steps are on their way: have their confidences copied, to be read with the verdict.

        Args:
            confidences: [num_reqs, K] float32 on the device.
        """
        copied = self._copies.copy(confidences)
        slots = self._round.slots
        self._drafted = Drafted(slots, self._generation[slots], self.lengths, copied, self.waits_for_confidence)

    def pause(self) -> None:
        """A step ran that was not a round: the time around it says nothing."""
        self._times = None

    def policy_metrics(self, slots: np.ndarray) -> dict[str, Any]:
        """Return what the policy believes of these running requests, `DraftLengthPolicy.metrics`."""
        return self.policy.metrics(slots)

    def _observe(self, judged: Judged, asynchronous: bool) -> None:
        here = self._generation[judged.slots] == judged.generations  # their slots have not changed hands since
        self._num_tokens[judged.slots[here]] += judged.num_sampled[here]
        if not self.learns:
            return
        if judged.drafted is not None:
            self.stats.count_not_finite(judged.drafted.num_not_finite())
        decoded = judged.decoded & (judged.num_sampled > 0)
        for row in np.flatnonzero(decoded):
            self.stats.count_lengths(int(judged.num_verified[row]), int(judged.num_sampled[row]) - 1)
        # Under asynchronous scheduling the host does not learn which drafts a grammar cut: it calls them unobserved.
        unknown = self._has_grammar[judged.slots] if asynchronous else False
        verified = np.where(unknown, 0, judged.num_verified)
        rows = np.flatnonzero(decoded & here)
        if len(rows):
            accepted = np.minimum(judged.num_sampled - 1, verified)[rows]
            slots = judged.slots[rows]
            no_ngrams = np.zeros(len(rows), dtype=bool)
            shared = self.requests.updates_shared_prior[slots]
            confidences = judged.known_confidences()[rows]
            self._learner.learn(Outcome(slots, verified[rows], accepted, confidences, no_ngrams, shared))
        self._learn_costs(judged, all_decoded=bool(decoded.all()))

    def _trace(
        self,
        request_ids: Sequence[str],
        judged: Judged,
        tokens: torch.Tensor,
        asynchronous: bool,
    ) -> None:
        assert self.round_trace is not None and self._times is not None
        rows, verified = np.flatnonzero(judged.decoded), judged.num_verified
        if asynchronous:
            verified = np.where(self._has_grammar[judged.slots], -1, verified)
        drafts = Drafts(judged.slots, judged.confidences, self._pending.from_ngrams[judged.slots])
        verdict = pending_verdict(request_ids, rows, verified[rows], tokens, self._times)
        self.round_trace.add_pending(drafts, self.policy, self._began_s, len(rows), verdict)

    def _learn_costs(self, judged: Judged, all_decoded: bool) -> None:
        """Learn what a step and the round before it took, `LAG` steps ago."""
        num_rows, inputs_ms, steps_ms = judged.times.drafting_ms()
        sizes = len(judged.slots), judged.num_tokens, int(judged.num_sampled.sum())
        verify_ms = judged.times.verify_ms() if all_decoded else None
        drafting = {}
        if steps_ms:
            drafting = {"draft_steps": [(num_rows, ms) for ms in steps_ms], "draft_round": (num_rows, inputs_ms)}
        self._learner.learn_times(StepTimes(*sizes, verify_ms, **drafting))
