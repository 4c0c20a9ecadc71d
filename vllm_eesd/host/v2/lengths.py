"""The host's side of drafting on Model Runner V2: who drafts how far, and what became of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_eesd.config import MAX_SPECULATIVE_TOKENS
from vllm_eesd.host.round_setup import agree_on_times, build_policy_of, is_watched, open_trace
from vllm_eesd.host.speculative import EESDSpeculativeConfig
from vllm_eesd.host.v2.batch import TargetStep
from vllm_eesd.host.v2.drawing import Drawing
from vllm_eesd.host.v2.readback import CopyStream, RoundTimes, StepClock
from vllm_eesd.host.v2.trace import pending_verdict, recorded_rounds
from vllm_eesd.policy import DraftLengthPolicy
from vllm_eesd.round.counters import DraftStats
from vllm_eesd.round.draft import DraftRound
from vllm_eesd.round.ngram import NgramRates
from vllm_eesd.round.outcome import READBACK_DELAY
from vllm_eesd.round.requests import NewRequest
from vllm_eesd.round.session import Session
from vllm_eesd.round.slots import PendingDrafts
from vllm_eesd.round.step import Grown, Step
from vllm_eesd.traces.rounds import Drafts

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData

#: With tensor parallelism rank 0's times go to all ranks once in so many steps, a message on the host each time.
SHARE_TIMES_EVERY = 16


class Rounds:
    """Drives a `Session` whose verdicts are read `READBACK_DELAY` steps late, with what the device tells by then.

    A request's slot is its index in vLLM's request states. A preempted request comes back as a new one, from the prior.

    Args:
        config: EESD's.
        max_num_reqs, max_model_len: the engine's.
        device: where the model runs.
    """

    def __init__(
        self, config: EESDSpeculativeConfig, max_num_reqs: int, max_model_len: int, device: torch.device
    ) -> None:
        self._config, self._device = config, device
        self.stats = DraftStats(config.num_speculative_tokens)
        self._drafts = PendingDrafts(max_num_reqs)
        self._to_host = CopyStream(device)
        #: vLLM may shorten it until its KV cache is allocated.
        self.max_model_len = max_model_len
        #: What the text of each slot's request has at least.
        self._num_tokens = np.zeros(max_num_reqs, dtype=np.int64)
        self._has_adapter = np.zeros(max_num_reqs, dtype=bool)
        unseeded_too = config.eesd.unseeded_verification == "shared_noise"
        self.drawing = Drawing(max_num_reqs, max_model_len, config.eesd.draws_drafts, unseeded_too)
        self.round_trace = open_trace(config)
        #: False while the worker warms up: its requests are made up, and its steps wait for compilers.
        self.learns = True
        self._began_s = time.perf_counter()
        self.forget_requests()

    @property
    def num_drafted(self) -> np.ndarray:
        """[max_num_reqs] int64, length of each slot's current draft; always the same array."""
        return self._drafts.lengths

    @property
    def policy(self) -> DraftLengthPolicy:
        return self.session.policy

    @property
    def round(self) -> DraftRound:
        """The last one begun."""
        return self.session.round

    def forget_requests(self) -> None:
        """Begin with a new policy that has met no request: those of the worker's warm-up are made up."""
        #: What the requests of all slots ever used asked for, and the slots whose policy does not know it yet.
        self._requested: dict[int, NewRequest] = {}
        self.use_policy(build_policy_of(self._config, len(self._num_tokens)))

    def use_policy(self, policy: DraftLengthPolicy) -> None:
        """Choose draft lengths by this policy from now on; requests that run start from its prior."""
        policy.costs.all_rows_draft = True
        longest = self._config.num_speculative_tokens
        ngrams = NgramRates(len(self._num_tokens), longest, delayed=True) if policy.uses_ngrams else None
        asked = ngrams, self.drawing.kind_of, agree_on_times(SHARE_TIMES_EVERY)
        self.session = Session(policy, self.stats, longest, READBACK_DELAY, *asked, self._drafts)
        self.start_afresh()

    def start_afresh(self) -> None:
        """Drop what a failed round may have left half written: no request has a draft, the next round admits all anew.

        Outcomes under way are dropped with it. What is known of a request's length then lacks their accepted drafts,
        so its last draft may be longer than it needs to be; it is never verified past the request's end.
        """
        self.session.start_afresh()
        self._not_admitted = set(self._requested)
        self._times: RoundTimes | None = None

    def admit(self, slots: Sequence[int], new_requests: Sequence[NewRequestData]) -> None:
        """Take in requests that start or come back from preemption."""
        for slot, request in zip(slots, new_requests, strict=True):
            params = request.sampling_params
            lora_name = "" if request.lora_request is None else request.lora_request.lora_name
            self._requested[slot] = NewRequest(params, request.prompt_len, lora_name)
            self._has_adapter[slot] = request.lora_request is not None
            self._not_admitted.add(slot)
            self._num_tokens[slot] = len(request.prefill_token_ids)
            self.drawing.admit(slot, params)
        self._admit()

    def _admit(self) -> None:
        slots = sorted(self._not_admitted)
        self.session.admit(np.array(slots), [self._requested[slot] for slot in slots], self.max_model_len)
        self._not_admitted.clear()

    def skips(self, step: TargetStep) -> bool:
        """Return whether the round after this step is one more without a decision; see `Session.back_off`.

        Nothing is launched then: all that is left to do is to learn from the steps still under way.
        """
        if not self.session.skips(step.req_ids, step.only_decoded()):
            return False
        slots = step.slots()
        self._num_tokens[slots] += 1
        self._take_lengths(self.session.learn_oldest(self.learns))
        self._times = RoundTimes(self._device, len(slots))
        self._times.mark()
        return True

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
            counts: of `Step`, on the device.
            tokens: of `trace.tokens_of_step`, where rounds are traced or recorded.
            longest: the longest draft of this round, for all requests; None is K.
        Returns:
            The new round's clock, at its beginning.
        """
        if self._not_admitted:
            self._admit()
        self._to_host.before_writing()
        clock = self._clock_of(step)
        judged = self._judged(step, asynchronous, counts, clock)
        if tokens is not None and self.learns and clock.before is not None and judged.decoded.any():
            self._note_rounds(judged, clock, step.req_ids, tokens)
        self._began_s = time.perf_counter()
        # A decoding request emits one token or more; a prompt's last chunk is counted late, which costs a draft.
        self._num_tokens[judged.slots] += judged.decoded
        self._take_lengths(self.session.verdict(judged, self.learns))
        self._choose(step, judged.slots, longest)
        self.session.learner.report()
        return clock.after

    def _clock_of(self, step: TargetStep) -> StepClock:
        """Start the clock of the round after this step; return it with that of the round before."""
        before, self._times = self._times, RoundTimes(self._device, len(step.slots()))
        self._times.mark()
        return StepClock(before, self._times, step.num_tokens)

    def _judged(self, step: TargetStep, asynchronous: bool, counts: torch.Tensor, clock: StepClock) -> Step:
        """Return the step just run, as far as the host knows it."""
        slots = step.slots()
        verified = np.minimum(self.num_drafted[slots], step.num_scheduled_drafts())
        # Under asynchronous scheduling the host does not learn which drafts a grammar cut: it calls them unobserved.
        unobserved = self.drawing.has_grammar[slots] if asynchronous else None
        return Step(slots, step.decoded(), verified, self._to_host.copy(counts), clock.times, unobserved)

    def _take_lengths(self, grown: Grown | None) -> None:
        if grown is not None:
            self._num_tokens[grown.slots] += grown.num_tokens

    def _choose(self, step: TargetStep, slots: np.ndarray, longest: int | None) -> None:
        """Decide the round before its first draft step: the host waits for no value of a round under way."""
        limits = self.session.requests.longest_drafts(slots, self._num_tokens[slots])
        # Beside such a request no draft is verified: see `RaggedVerification.get_num_tokens`.
        limits[~step.reaches_end_of_prompt() | self.drawing.names_logprobs[slots].any()] = 0
        limits = np.minimum(limits, MAX_SPECULATIVE_TOKENS if longest is None else longest)
        # The draft step knows no adapters; an n-gram draft needs none.
        self.session.begin(slots, np.where(self._has_adapter[slots], 0, limits), self.session.ngrams, limits)

    def end(self, confidences: torch.Tensor) -> None:
        """The round's draft steps are on their way: have their confidences copied, to be read with the verdict.

        Args:
            confidences: [num_reqs, K] float32 on the device.
        """
        self.session.end(self._to_host.copy(confidences))

    def back_off(self, step: TargetStep, decision_ms: float) -> None:
        """Skip the next decisions if this round, decided in `decision_ms`, drafts nothing, and no round is watched."""
        may_skip = self.learns and not is_watched(self._config, self.stats)
        self.session.back_off(step.req_ids, decision_ms, may_skip)

    def pause(self) -> None:
        """A step ran that was not a round: the time around it says nothing."""
        self._times = None

    def _note_rounds(self, step: Step, clock: StepClock, request_ids: Sequence[str], tokens: torch.Tensor) -> None:
        """Have a step's rounds written to the trace, or recorded, once the device has emitted their tokens."""
        verified = step.num_verified if step.unobserved is None else np.where(step.unobserved, -1, step.num_verified)
        copy = self._to_host.copy(tokens)
        if self.stats.recording:
            self.stats.record(recorded_rounds(np.flatnonzero(step.decoded), request_ids, verified, copy))
        if self.round_trace is None:
            return
        unknown = np.full((len(step.slots), MAX_SPECULATIVE_TOKENS), np.nan, dtype=np.float32)
        drafts = Drafts(step.slots, unknown, self._drafts.source[step.slots])
        drafted = self.session.drafted if self.policy.needs_confidence else None
        verdict = pending_verdict(step, clock, drafted, request_ids, verified, copy)
        self.round_trace.add_pending(drafts, self.policy, self._began_s, int(step.decoded.sum()), verdict)
