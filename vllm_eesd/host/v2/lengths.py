"""The host's side of drafting on Model Runner V2: who drafts how far, and what became of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_eesd.config import MAX_SPECULATIVE_TOKENS
from vllm_eesd.host.round_setup import agree_on_times, build_policy_of, is_watched, open_trace
from vllm_eesd.host.speculative import EESDSpeculativeConfig
from vllm_eesd.host.v2.batch import TargetStep
from vllm_eesd.host.v2.drawing import Drawing
from vllm_eesd.host.v2.readback import CopyStream, Drafted, PendingStep, RoundTimes
from vllm_eesd.host.v2.trace import pending_verdict, recorded_rounds
from vllm_eesd.policy import NGRAM, DraftLengthPolicy, Outcome
from vllm_eesd.round.counters import DraftStats
from vllm_eesd.round.draft import DraftRound
from vllm_eesd.round.idle import MAY_NOT_DRAFT, IdleBackoff
from vllm_eesd.round.ngram import NgramRates
from vllm_eesd.round.outcome import READBACK_DELAY, Learner
from vllm_eesd.round.requests import NewRequest, RunningRequests
from vllm_eesd.round.slots import PendingDrafts
from vllm_eesd.traces.rounds import Drafts

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData

#: With tensor parallelism rank 0's times go to all ranks once in so many steps, a message on the host each time.
SHARE_TIMES_EVERY = 16


class Rounds:
    """Asks the policy for each round's draft lengths, and feeds it with outcomes and times `READBACK_DELAY` later.

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
        self._to_host = CopyStream(device)
        #: vLLM may shorten it until its KV cache is allocated.
        self.max_model_len = max_model_len
        #: What the text of each slot's request has at least.
        self._num_tokens = np.zeros(max_num_reqs, dtype=np.int64)
        self._generation = np.zeros(max_num_reqs, dtype=np.int64)
        self._has_adapter = np.zeros(max_num_reqs, dtype=bool)
        unseeded_too = config.eesd.unseeded_verification == "shared_noise"
        self.drawing = Drawing(max_num_reqs, max_model_len, config.eesd.draws_drafts, unseeded_too)
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
        policy.costs.all_rows_draft = True
        size = self._max_num_reqs, self._config.num_speculative_tokens
        #: Of the device's n-gram drafts; None where the policy takes none.
        self.ngrams = NgramRates(*size, delayed=True) if policy.uses_ngrams else None
        self.requests = RunningRequests(*size, policy, self.ngrams, self._config.eesd.draws_drafts)
        self._learner = Learner(policy, self.stats, self._agree_on_times)
        self.start_afresh()

    def admit(self, slots: Sequence[int], new_requests: Sequence[NewRequestData]) -> None:
        """Take in requests that start or come back from preemption."""
        for slot, request in zip(slots, new_requests, strict=True):
            params = request.sampling_params
            lora_name = "" if request.lora_request is None else request.lora_request.lora_name
            self._requested[slot] = NewRequest(params, request.prompt_len, lora_name)
            self._has_adapter[slot] = request.lora_request is not None
            self._not_admitted.add(slot)
            self._generation[slot] += 1
            self._pending.clear(slot)
            self._confidences[slot] = np.nan
            self._num_tokens[slot] = len(request.prefill_token_ids)
            self.drawing.admit(slot, params)
        self._admit()

    def _admit(self) -> None:
        slots = sorted(self._not_admitted)
        self.requests.admit(np.array(slots), [self._requested[slot] for slot in slots], self.max_model_len)
        self._not_admitted.clear()

    def start_afresh(self) -> None:
        """Drop what a failed round may have left half written: no request has a draft, the next round admits all anew.

        Outcomes under way are dropped with it. What is known of a request's length then lacks their accepted drafts,
        so its last draft may be longer than it needs to be; it is never verified past the request's end.
        """
        self._pending.clear()
        self._not_admitted = set(self._requested)
        self._under_way: deque[PendingStep] = deque()
        #: [max_num_reqs, MAX_SPECULATIVE_TOKENS], of the last drafts that are known; NaN if unknown.
        self._confidences = np.full((self._max_num_reqs, MAX_SPECULATIVE_TOKENS), np.nan, dtype=np.float32)
        #: [max_num_reqs] int64, `NgramRates.matched` when the device found the n-gram drafts it has.
        self._matched = np.zeros(self._max_num_reqs, dtype=np.int64)
        self._drafted: Drafted | None = None
        self._times: RoundTimes | None = None
        self._idle, self._decision = IdleBackoff(), None

    def skips(self, step: TargetStep, asynchronous: bool) -> bool:
        """Return whether the round after this step is one more without a decision, counted if it is; see `begin`.

        Nothing is launched then: all that is left to do is to learn from the steps still under way.
        """
        if not self._idle.goes_on(step.req_ids, step.only_decoded()):
            return False
        slots = step.slots()
        self._num_tokens[slots] += 1
        self._matched[slots] = -1
        if self._under_way:
            self._observe(self._under_way.popleft(), asynchronous)
        self.stats.count_lengths(0, 0, num_rounds=len(slots))
        self._times = RoundTimes(self._device, len(slots))
        self._times.mark()
        return True

    def rest(self, step: TargetStep, decision_ms: float) -> None:
        """Skip the next rounds if this one, decided in `decision_ms`, drafts nothing, and nobody watches."""
        if is_watched(self._config, self.stats) or not self.learns or self.round.lengths.any():
            return
        num_rounds = MAY_NOT_DRAFT
        if self._may_draft:
            self._decision = len(self.round.slots), decision_ms
            num_rounds = self.policy.idle_rounds(self.round.slots)
        self._idle.begin(num_rounds, step.req_ids)

    def begin(
        self,
        step: TargetStep,
        asynchronous: bool,
        counts: torch.Tensor,
        tokens: torch.Tensor | None = None,
        longest: int | None = None,
    ) -> RoundTimes:
        """Learn from the step that is now old enough, and decide the next round.

        Args:
            asynchronous: whether vLLM schedules a step before the one before has ended.
            counts: of `PendingStep`, on the device.
            tokens: of `trace.tokens_of_step`, where rounds are traced or recorded.
            longest: the longest draft of this round, for all requests; None is K.
        Returns:
            The new round's clock, at its beginning.
        """
        if self._not_admitted:
            self._admit()
        self._to_host.before_writing()
        num_skipped = self._idle.take()
        if num_skipped:
            self.policy.skipped(self.round.slots, num_skipped)
        pending = self._pending_step(step, counts, num_skipped)
        if tokens is not None and self.learns and pending.before is not None and pending.decoded.any():
            self._note_rounds(pending, step.req_ids, tokens, asynchronous)
        self._began_s = time.perf_counter()
        # A decoding request emits one token or more; a prompt's last chunk is counted late, which costs a draft.
        self._num_tokens[pending.slots] += pending.decoded
        self._under_way.append(pending)
        if len(self._under_way) > READBACK_DELAY:
            self._observe(self._under_way.popleft(), asynchronous)
        self._choose(pending.slots, *self._limits(step, pending.slots, longest))
        self._learner.report()
        return pending.after

    def _pending_step(self, step: TargetStep, counts: torch.Tensor, num_skipped: int) -> PendingStep:
        """Return the step just run, as far as the host knows it, and start the clock of the round after it."""
        slots = step.slots()
        before, self._times = self._times, RoundTimes(self._device, len(slots))
        self._times.mark()
        made = self._drafted, self._decision, num_skipped
        self._drafted = self._decision = None
        return PendingStep(
            slots,
            self._generation[slots],
            step.decoded(),
            np.minimum(self.num_drafted[slots], step.num_scheduled_drafts()),
            self._pending.source[slots],
            self._matched[slots],
            step.num_tokens,
            self._to_host.copy(counts),
            before,
            self._times,
            *made,
        )

    def _limits(self, step: TargetStep, slots: np.ndarray, longest: int | None) -> tuple[np.ndarray, np.ndarray]:
        """Return the longest draft and the longest n-gram draft each row may have, [num_reqs] int64; see `begin`."""
        limits = self.requests.longest_drafts(slots, self._num_tokens[slots])
        # Beside such a request no draft is verified: see `RaggedVerification.get_num_tokens`.
        limits[~step.reaches_end_of_prompt() | self.drawing.names_logprobs[slots].any()] = 0
        limits = np.minimum(limits, MAX_SPECULATIVE_TOKENS if longest is None else longest)
        # The draft step knows no adapters; an n-gram draft needs none.
        return np.where(self._has_adapter[slots], 0, limits), limits

    def _choose(self, slots: np.ndarray, limits: np.ndarray, ngram_limits: np.ndarray) -> None:
        """Decide the round before its first draft step: the host waits for no value of a round under way."""
        self._may_draft = bool((limits if self.ngrams is None else ngram_limits).any())
        self.round = DraftRound(self.policy, slots, limits, self.ngrams, ngram_limits)
        self.round.decide_ahead(self._confidences[slots])
        self._pending.keep(self.round)
        if self.ngrams is not None:
            self._matched[slots] = self.ngrams.matched[slots]

    def end(self, confidences: torch.Tensor) -> None:
        """The round's draft steps are on their way: have their confidences copied, to be read with the verdict.

        Args:
            confidences: [num_reqs, K] float32 on the device.
        """
        self._drafted = Drafted(self.round, self._generation[self.round.slots], self._to_host.copy(confidences))

    def pause(self) -> None:
        """A step ran that was not a round: the time around it says nothing."""
        self._times = None

    def _observe(self, step: PendingStep, asynchronous: bool) -> None:
        """Learn from a step that is over."""
        counts = step.counts.numpy().astype(np.int64)
        num_sampled = counts[:, 0]
        here = self._generation[step.slots] == step.generations  # their slots have not changed hands since
        self._num_tokens[step.slots[here]] += (num_sampled - step.decoded)[here]
        if not self.learns:
            return
        if step.drafted is not None:
            self._take_confidences(step.drafted)
        decoded = step.decoded & (num_sampled > 0)
        for row in np.flatnonzero(decoded):
            self.stats.count_lengths(int(step.num_verified[row]), int(num_sampled[row]) - 1)
        # Under asynchronous scheduling the host does not learn which drafts a grammar cut: it calls them unobserved.
        unknown = self.drawing.has_grammar[step.slots] if asynchronous else False
        verified = np.where(unknown, 0, step.num_verified)
        rows = np.flatnonzero(decoded & here)
        if len(rows):
            slots, accepted = step.slots[rows], np.minimum(num_sampled - 1, verified)[rows]
            shared, source = self.requests.updates_shared_prior[slots], step.source[rows]
            from_ngrams = source == NGRAM
            self.stats.count_ngrams(int(verified[rows][from_ngrams].sum()), int(accepted[from_ngrams].sum()))
            num_steps = 0 if step.drafted is None else step.drafted.round.num_steps
            made = self._confidences[slots], source
            self._learner.learn(Outcome(slots, verified[rows], accepted, *made, shared, num_steps))
        if self.ngrams is not None and counts.shape[1] == 3:
            self._learn_ngrams(step, counts, rows, np.flatnonzero(here & (num_sampled > 0)))
        self._learner.learn_times(step.times(int(num_sampled.sum()), all_decoded=bool(decoded.all())))

    def _learn_ngrams(self, step: PendingStep, counts: np.ndarray, decoded: np.ndarray, emitted: np.ndarray) -> None:
        """Learn how much of the last n-gram drafts was emitted, and how far texts match now.

        Args:
            counts: [num_reqs, 3], see `PendingStep`.
            decoded, emitted: rows whose last draft was of the same request; rows whose text has grown.
        """
        assert self.ngrams is not None
        decoded = decoded[step.matched[decoded] >= 0]
        slots, (num_sampled, num_right, _) = step.slots[decoded], counts[decoded].T
        num_judged = np.minimum(num_sampled, self._config.num_speculative_tokens)
        shared = self.requests.updates_shared_prior[slots]
        self.ngrams.learn(slots, step.matched[decoded], num_judged, num_right, shared)
        self.ngrams.see(step.slots[emitted], counts[emitted, 2])

    def _take_confidences(self, drafted: Drafted) -> None:
        """Keep a round's confidences, and count those that are NaN: of hidden states with infinities or NaN."""
        self.stats.count_not_finite(drafted.num_not_finite())
        if self.policy.needs_confidence:
            slots, known = drafted.round.slots, drafted.known_confidences()
            same = self._generation[slots] == drafted.generations
            self._confidences[slots[same], : known.shape[1]] = known[same]

    def _note_rounds(
        self, step: PendingStep, request_ids: Sequence[str], tokens: torch.Tensor, asynchronous: bool
    ) -> None:
        """Have a step's rounds written to the trace, or recorded, once the device has emitted their tokens."""
        verified = step.num_verified
        if asynchronous:
            verified = np.where(self.drawing.has_grammar[step.slots], -1, verified)
        copy = self._to_host.copy(tokens)
        if self.stats.recording:
            self.stats.record(recorded_rounds(np.flatnonzero(step.decoded), request_ids, verified, copy))
        if self.round_trace is None:
            return
        drafts = Drafts(step.slots, self._pending.confidences[step.slots], self._pending.source[step.slots])
        verdict = pending_verdict(step, request_ids, verified, copy, self.policy.needs_confidence)
        self.round_trace.add_pending(drafts, self.policy, self._began_s, int(step.decoded.sum()), verdict)
