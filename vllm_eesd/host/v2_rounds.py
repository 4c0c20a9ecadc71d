"""The host's side of drafting on Model Runner V2: who drafts how far, and what became of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vllm_eesd.host.compat import get_tp_group, init_logger
from vllm_eesd.host.running_requests import NewRequest, RunningRequests
from vllm_eesd.host.speculative import EESDSpeculativeConfig
from vllm_eesd.host.v1 import REPORT_EVERY_S, build_dispatch, open_trace
from vllm_eesd.host.v2_lag import ConfidenceCopies, Drafted, Judged, Lagged, RoundTimes
from vllm_eesd.host.v2_trace import pending_outcome
from vllm_eesd.stats import DraftStats

logger = init_logger("vllm.eesd")
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
        #: [max_num_reqs] int64, length of each slot's current draft.
        self.num_drafted = np.zeros(max_num_reqs, dtype=np.int64)
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
        self._num_shared = 0
        self._reported = self._began_s = time.perf_counter()
        self._state_saved = True
        self.forget_requests()

    def forget_requests(self) -> None:
        """Begin with a new policy that has met no request: those of the worker's warm-up are made up."""
        self.policy = build_dispatch(self._config, self._max_num_reqs)
        self.requests = RunningRequests(self._max_num_reqs, self._config.num_speculative_tokens, self.policy)
        #: What the requests of all slots ever used asked for, and the slots whose policy does not know it yet.
        self._requested: dict[int, NewRequest] = {}
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
            self.num_drafted[slot] = 0
            self._num_tokens[slot] = len(request.prefill_token_ids)
            self._has_grammar[slot] = params.structured_outputs is not None
        self._admit()

    def _admit(self) -> None:
        slots = sorted(self._not_admitted)
        self.requests.admit(np.array(slots), [self._requested[slot] for slot in slots], self.max_model_len)
        self._not_admitted.clear()

    def start_afresh(self) -> None:
        """Drop what a failed round may have left half written: nobody has a draft, the next round admits all anew.

        Outcomes under way are dropped with it. What is known of a request's length then lags behind by their tokens,
        so its last draft may be longer than it needs to be; it is never verified past the request's end.
        """
        self.num_drafted.fill(0)
        self._not_admitted = set(self._requested)
        self._forget_steps()

    def _forget_steps(self) -> None:
        self._lagged = Lagged(len(self.num_drafted), self._device)
        self._copies = ConfidenceCopies((len(self.num_drafted), self._config.num_speculative_tokens), self._device)
        self._drafted: Drafted | None = None
        self._times: RoundTimes | None = None
        self._measured: list[tuple[str, tuple[int, ...], float]] = []

    def begin(
        self,
        input_batch: Any,
        num_sampled: torch.Tensor,
        asynchronous: bool,
        tokens: torch.Tensor | None = None,
        longest: int | None = None,
    ) -> RoundTimes:
        """Learn from the step that is now old enough, and ask who drafts a first token.

        Args:
            input_batch: vLLM's InputBatch of the step just run.
            num_sampled: [num_reqs] int32 on the device.
            asynchronous: whether vLLM schedules a step before the one before has ended.
            tokens: of `v2_trace.tokens_of_step`, where rounds are traced.
            longest: the longest draft of this round, for all requests; None is K.
        Returns:
            The new round's clock, at its beginning.
        """
        if self._not_admitted:
            self._admit()
        slots = input_batch.idx_mapping_np.astype(np.int64)
        self._times = times = RoundTimes(self._device, len(slots), self._times)
        times.moments.mark()
        scheduled = input_batch.num_draft_tokens_per_req
        verified = np.zeros(len(slots), dtype=np.int64)
        if scheduled is not None:
            verified = np.minimum(self.num_drafted[slots], scheduled)
        decoded = ~input_batch.is_prefilling_np
        if tokens is not None and self.learns and times.previous is not None and decoded.any():
            self._trace(input_batch.req_ids, slots, decoded, verified, tokens, asynchronous)
        self._began_s = time.perf_counter()
        generations = self._generation[slots]
        confidences = self.policy.confidences_of(slots)
        self.policy.recall(slots, np.nan)
        nobody = np.zeros(0, dtype=np.int64)
        drafted, self._drafted = self._drafted, None
        num_tokens = input_batch.num_tokens
        judged = Judged(slots, generations, decoded, verified, confidences, nobody, num_tokens, times, drafted)
        old = self._lagged.push(judged, num_sampled)
        if old is not None:
            self._observe(old, asynchronous)
        at_least = self._num_tokens[slots] + self._lagged.num_emitted_at_least(slots, generations)
        limits = self.requests.longest_drafts(slots, at_least)
        num_new = input_batch.num_scheduled_tokens - (0 if scheduled is None else scheduled)
        reaches_end = input_batch.num_computed_prefill_tokens_np + num_new >= input_batch.prefill_len_np
        limits[~reaches_end] = 0
        if longest is not None:
            limits = np.minimum(limits, longest)
        if self._samples_drafts:
            # A grammar cuts a draft because of what it is; vLLM then samples anew, which is right for one-hot drafts.
            limits[self._has_grammar[slots]] = 0
        self._choose(slots, limits)
        self._report()
        return times

    def _choose(self, slots: np.ndarray, limits: np.ndarray) -> None:
        """Start a round; a policy that looks at no confidence is asked for all its tokens at once."""
        self._slots, self._limits, self._asked = slots, limits, 0
        self.lengths = np.zeros(len(slots), dtype=np.int64)
        self._rows = np.arange(len(slots))
        self.waits_for_confidence = self.policy.needs_confidence
        if not limits.any():
            self._rows = self._rows[:0]
            self.num_drafted[slots] = 0
            return
        self.policy.begin_round(slots, limits)
        self._ask(None)
        while not self.waits_for_confidence and len(self._rows):
            self._ask(None)
        self.num_drafted[slots] = self.lengths

    def wants_step(self, step: int) -> bool:
        """Return whether draft step `step` (from 1) should run: somebody drafts that token, or may yet."""
        if not self.waits_for_confidence:
            return step <= self.lengths.max(initial=0)
        return bool((self._limits[self._rows] >= step).any())

    def decide(self, confidence: np.ndarray) -> None:
        """Ask who drafts one more token, given the confidence of the last one decided on.

        Args:
            confidence: [num_reqs] float32, of the whole batch.
        """
        self._ask(confidence[self._rows])
        self.num_drafted[self._slots] = self.lengths

    def _ask(self, confidence: np.ndarray | None) -> None:
        slots = self._slots[self._rows]
        more = self.policy.draft_more(slots, self._asked, confidence) & (self._limits[self._rows] > self._asked)
        self._rows = self._rows[more]
        self._asked += 1
        self.lengths[self._rows] = self._asked

    def end(self, confidences: torch.Tensor) -> None:
        """The round's draft steps are on their way: have their confidences copied, to be read with the verdict.

        Args:
            confidences: [num_reqs, K] float32 on the device.
        """
        copied = self._copies.copy(confidences)
        generations = self._generation[self._slots]
        self._drafted = Drafted(self._slots, generations, self.lengths, copied, self.waits_for_confidence)

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
            current = self.policy.confidences_of(slots)
            self.policy.recall(slots, judged.known_confidences()[rows])
            self.policy.observe(slots, verified[rows], accepted, self.requests.shares[slots])
            self.policy.recall(slots, current)
        self._learn_costs(judged, all_decoded=bool(decoded.all()))

    def _trace(
        self,
        request_ids: Sequence[str],
        slots: np.ndarray,
        decoded: np.ndarray,
        verified: np.ndarray,
        tokens: torch.Tensor,
        asynchronous: bool,
    ) -> None:
        assert self.round_trace is not None and self._times is not None
        rows = np.flatnonzero(decoded)
        verified = np.where(self._has_grammar[slots], -1, verified) if asynchronous else verified
        outcome = pending_outcome(request_ids, rows, verified[rows], tokens, self._times)
        self.round_trace.add_pending(slots, self.policy, self._began_s, len(rows), outcome)

    def _learn_costs(self, judged: Judged, all_decoded: bool) -> None:
        """Tell the cost model what a step and the round before it took, `LAG` steps ago."""
        num_reqs = len(judged.slots)
        num_rows, inputs_ms, steps_ms = judged.times.drafting_ms()
        measured = [("draft_step", (num_rows,), ms) for ms in steps_ms]
        if measured:
            measured.append(("draft_round", (num_rows,), inputs_ms))
        verify_ms = judged.times.verify_ms() if all_decoded else None
        if verify_ms is not None:
            measured.append(("verify", (num_reqs, judged.num_tokens), verify_ms))
        self._measured += measured
        self._observe_costs()
        if verify_ms is not None:
            draft_ms = sum(steps_ms) + inputs_ms
            plain_ms = float(self.policy.costs.verify_curve(num_reqs, 0)[0]) * int(judged.num_sampled.sum()) / num_reqs
            self.stats.count_time(verify_ms + draft_ms, plain_ms)

    def _observe_costs(self) -> None:
        """Pass on what was measured; with several ranks now and then, and rank 0's to all: they choose alike."""
        group = get_tp_group()
        if group.world_size > 1:
            self._num_shared += 1
            if self._num_shared % SHARE_TIMES_EVERY:
                return
            self._measured = group.broadcast_object(self._measured, src=0)
        observe = {
            "draft_step": self.policy.costs.observe_draft_step,
            "draft_round": self.policy.costs.observe_draft_round,
            "verify": self.policy.costs.observe_verify,
        }
        for what, sizes, ms in self._measured:
            observe[what](*sizes, ms)
        self._measured = []

    def _report(self) -> None:
        """Log one line and save what was learned, every REPORT_EVERY_S while requests run."""
        now = time.perf_counter()
        if now - self._reported < REPORT_EVERY_S:
            return
        self._reported = now
        try:
            self.policy.save_state()
            self._state_saved = True
        except OSError as error:
            if self._state_saved:
                logger.warning("eesd: policy_args.state_file cannot be written, nothing is kept: %s", error)
            self._state_saved = False
        if self.stats.rounds:
            logger.info("EESD: %s", self.stats.summary())
