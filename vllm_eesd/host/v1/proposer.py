"""The adapter for vLLM's Model Runner V1 (the CPU's runner): batch rows in, ragged drafts out."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from vllm_eesd.host.circuit_breaker import CircuitBreaker
from vllm_eesd.host.compat import VllmConfig, get_tp_group, init_logger, set_model_tag
from vllm_eesd.host.metrics import publish
from vllm_eesd.host.model.draft_step import DraftStep, compile_draft_step
from vllm_eesd.host.model.exit_head import load_head
from vllm_eesd.host.model.new_weights import follow_new_weights
from vllm_eesd.host.round_setup import agree_on_times, build_policy_of, is_watched, open_trace
from vllm_eesd.host.speculative import EESDSpeculativeConfig
from vllm_eesd.host.v1 import block_verification, gumbel
from vllm_eesd.host.v1.batch import BatchSlots, V1Step, has_unknown_processors
from vllm_eesd.host.v1.cost_profile import profile_costs
from vllm_eesd.host.v1.draft_rows import DraftRows
from vllm_eesd.host.v1.draft_sampling import DraftSampling
from vllm_eesd.host.v1.step_output import with_drafts
from vllm_eesd.policy import DraftLengthPolicy
from vllm_eesd.round.counters import DraftStats, Round
from vllm_eesd.round.draft import DraftRound, draft_tokens
from vllm_eesd.round.ngram import NgramDrafter
from vllm_eesd.round.outcome import StepTimes
from vllm_eesd.round.session import Session
from vllm_eesd.round.step import Known, Step
from vllm_eesd.traces.dense import DenseRecorder
from vllm_eesd.traces.rounds import Drafts, Judged

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

logger = init_logger("vllm.eesd")
#: Of a round without draft steps, before its step of the target is known.
NO_DRAFTING = StepTimes(0, 0, 0, None)


class EarlyExitProposer:
    """What the runner calls its `drafter`: loads the exit head, and after every step drafts for every request.

    Args:
        vllm_config: with an `EESDSpeculativeConfig`.
    Source: vllm/v1/spec_decode/custom_class_proposer.py.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        config = vllm_config.speculative_config
        assert isinstance(config, EESDSpeculativeConfig)
        self.vllm_config, self.config = vllm_config, config
        config.engine_index = vllm_config.parallel_config.data_parallel_index
        self.max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self.num_speculative_tokens = config.num_speculative_tokens
        self.stats, self.breaker = DraftStats(config.num_speculative_tokens), CircuitBreaker()
        self._seeds_every_request = config.eesd.unseeded_verification == "shared_noise"
        #: None drafts greedily.
        self.sampling = DraftSampling(self._seeds_every_request) if config.eesd.draws_drafts else None
        if get_tp_group().rank_in_group == 0:
            publish(config.metrics_directory, config.engine_index, self.stats, self.breaker)
        #: While set, drafts are recorded instead of verified.
        self.recorder: DenseRecorder | None = None
        self.round_trace = open_trace(config)
        self._rows: DraftRows | None = None
        self._has_unknown_processors: bool | None = None
        self._ngrams = NgramDrafter(self.max_num_reqs, self.num_speculative_tokens)
        block_verification.compile_now()
        gumbel.compile_now()
        self.use_policy(build_policy_of(config, self.max_num_reqs))

    def use_policy(self, policy: DraftLengthPolicy) -> None:
        """Choose draft lengths by this policy from now on; requests that run start from its prior."""
        self.policy = policy
        self._slots = BatchSlots(self.max_num_reqs)
        self.session = Session(
            policy,
            self.stats,
            self.num_speculative_tokens,
            ngrams=self._ngrams,
            kind_of=None if self.sampling is None else self.sampling.kind_of,
            agree=agree_on_times(every=1),
        )
        self._forget_times()

    def _forget_times(self) -> None:
        #: When the last round ended, and what its drafting took: its step's fields are filled in once that has run.
        self._round_ended, self._drafting = 0.0, NO_DRAFTING

    def load_model(self, target: nn.Module) -> None:
        """Build the exit head, hook its KV fill into the target and compile the draft step.

        Called by the runner right after the target is loaded, inside `set_current_vllm_config`.
        """
        config = self.config.exit_head
        head = load_head(self.vllm_config, target, config, self.config.head_directory)
        self._target_and_head = target, head
        with set_model_tag("eesd_draft"):
            self._step = DraftStep(vllm_config=self.vllm_config, target=target, exit_layer=config.exit_layer, head=head)
        self._layer_names = [layer.self_attn.attn.layer_name for layer in target.model.layers[: config.exit_layer]]
        if head is not None:
            self._layer_names += head.attention_names
        compile_draft_step(self._step, self.vllm_config, torch.device("cpu"))

    def target_changed(self) -> None:
        """Take in that the target has other weights: what was derived of them, and learned of its drafts, begins anew.

        Called between two steps, inside `set_current_vllm_config`.
        """
        follow_new_weights(*self._target_and_head)
        self.use_policy(build_policy_of(self.config, self.max_num_reqs, costs=self.policy.costs))

    def profile_costs(self, runner: GPUModelRunner) -> None:
        """Time steps of a few sizes, so that the first requests are not the ones to learn from. Called at start-up."""
        profile_costs(runner, self._step, self.policy.costs)

    def sample_tokens(
        self, sample: Callable[[], ModelRunnerOutput | None], runner: GPUModelRunner
    ) -> ModelRunnerOutput | None:
        """Return what `sample` does, which verifies a step's drafts and has `propose_round` called, with the drafts."""
        return with_drafts(sample, runner, self._seeds_every_request)

    def propose(self, *args: object, **kwargs: object) -> list[list[int]]:
        """Refuse: without its seam the runner gives a proposer too little to draft with."""
        raise RuntimeError(
            "eesd: the seam at GPUModelRunner.propose_draft_token_ids is not installed; run `eesd doctor`"
        )

    def propose_round(
        self,
        runner: GPUModelRunner,
        scheduler_output: SchedulerOutput,
        sampled_token_ids: list[list[int]],
        sample_hidden_states: torch.Tensor,
    ) -> list[list[int]]:
        """Return each batch row's draft, after learning from what became of the last one; nothing after a fault.

        Args:
            runner: vLLM's GPUModelRunner (CPUModelRunner on a CPU), bookkeeping done.
            scheduler_output: of the step just run.
            sampled_token_ids: per row the tokens emitted; empty for a prompt chunk.
            sample_hidden_states: [sum of (drafts + 1), hidden_size], the target's normed output at every position it
                judged or sampled, in row order.
        Returns:
            num_reqs lists of token ids.
        """
        nothing: list[list[int]] = [[] for _ in sampled_token_ids]
        if self.breaker.is_open or self._drafts_nothing(runner):
            return nothing
        step = V1Step(runner, scheduler_output, sampled_token_ids)
        try:
            if self._skips(step):
                return nothing
            drafts = self._learn_and_draft(step, sample_hidden_states)
        except Exception as error:
            self._start_afresh(step.req_ids)
            self.breaker.fault(error)
            return nothing
        self.breaker.passed()
        return drafts

    def _drafts_nothing(self, runner: GPUModelRunner) -> bool:
        """Return whether no request may draft in this engine, which is said once."""
        if self._has_unknown_processors is None:
            self._has_unknown_processors = has_unknown_processors(runner)
            if self._has_unknown_processors:
                logger.warning("eesd: with custom logits processors nothing is drafted: requests go on without it")
        return self._has_unknown_processors

    def _start_afresh(self, request_ids: list[str]) -> None:
        """Drop what a failed round may have left half written; the next one admits its requests anew.

        Args:
            request_ids: the batch's, none of which has a draft now; one that the scheduler passed over may have.
        """
        self._slots.forget()
        self.session.start_afresh()
        if self.sampling is not None:
            self.sampling.forget(request_ids)
        self._rows = None
        self._forget_times()

    def _skips(self, step: V1Step) -> bool:
        """Return whether this round's draft decision is skipped."""
        skips = self.session.skips(step.req_ids, step.only_decoded())
        if skips:
            self._round_ended = time.perf_counter()
        return skips

    def _learn_and_draft(self, step: V1Step, hidden_states: torch.Tensor) -> list[list[int]]:
        """See `propose_round`: admit, learn from the verdict, draft, end."""
        began = time.perf_counter()
        if self.sampling is not None:
            self.sampling.meet(step)
        slots, num_tokens = self._slots.of(step, self.session.admit), step.num_tokens()
        judged = self._judged(step, slots)
        limits = self.session.requests.draft_limits(slots, num_tokens, step.emitted)
        ngrams = self._find_ngrams(step, slots, num_tokens, limits)
        self.session.verdict(judged)
        self.session.learner.report()
        drafting_began = time.perf_counter()
        round_, may_draft = self._begin_round(step, slots, num_tokens, limits, ngrams)
        drafts = self._draft(step, round_, num_tokens, hidden_states)
        now = self._round_ended = time.perf_counter()
        self._drafting = self._drafting_took((now - drafting_began) * 1e3, len(step))
        may_skip = self.recorder is None and not is_watched(self.config, self.stats) and all(step.emitted)
        self.session.back_off(step.req_ids, (now - began) * 1e3, may_skip, may_draft)
        return self._verified(step, round_, drafts)

    def _judged(self, step: V1Step, slots: np.ndarray) -> Step:
        """Return what became of the last round's drafts; prompts, run again or not, had none."""
        drafts, decoded = step.judged_drafts(), step.decoded()
        self._note_rounds(step, slots, drafts, np.flatnonzero(decoded))
        num_verified = np.array([len(draft) for draft in drafts], dtype=np.int64)
        num_emitted = np.array([[len(tokens)] for tokens in step.emitted], dtype=np.int64).reshape(-1, 1)
        return Step(slots, decoded, num_verified, Known(num_emitted), functools.partial(self._times_of, step))

    def _note_rounds(self, step: V1Step, slots: np.ndarray, drafts: list[list[int]], rows: np.ndarray) -> None:
        """Write these rows' rounds to the trace, and record them, where that is asked for."""
        if not len(rows) or self.round_trace is None and not self.stats.recording:
            return
        judged = [Judged(step.req_ids[row], drafts[row], step.emitted[row]) for row in rows.tolist()]
        rounds = [Round(name, draft, len(emitted) - 1, list(emitted)) for name, draft, emitted in judged]
        self.stats.record(lambda: rounds)
        if self.round_trace is not None:
            pending, decoding, took = self.session.drafts, slots[rows], self._drafting
            made = Drafts(decoding, pending.confidences[decoding], pending.source[decoding])
            steps_ms, rest_ms = [ms for _, ms in took.draft_steps], took.draft_round[1] if took.draft_round else 0.0
            self.round_trace.add(judged, made, self.policy, self._round_ended, steps_ms, rest_ms)

    def _times_of(self, step: V1Step, num_emitted: int, all_decoded: bool) -> StepTimes:
        """Return what the last round's drafting and this step took, learning aside that is under way.

        A step counts only if every request in it decoded: prompt chunks cost something else, and requests that begin
        may have been waited for.
        """
        verify_ms = (time.perf_counter() - self._round_ended) * 1e3 if all_decoded and self._round_ended else None
        sizes = {"num_reqs": len(step), "num_tokens": step.num_scheduled_tokens, "num_emitted": num_emitted}
        return self._drafting._replace(**sizes, verify_ms=verify_ms)

    def _find_ngrams(
        self, step: V1Step, slots: np.ndarray, num_tokens: np.ndarray, limits: np.ndarray
    ) -> NgramDrafter | None:
        """Find the n-gram drafts of the rows that may draft; None if no policy wants any.

        None while drafts are recorded: a dense trace is about the exit head.
        """
        if not self.policy.uses_ngrams or self.recorder is not None:
            return None
        rows = np.flatnonzero(limits)
        drafting = slots[rows]
        shared = self.session.requests.updates_shared_prior[drafting]
        self._ngrams.update(drafting, step.texts(), rows, num_tokens[rows], shared)
        return self._ngrams

    def _begin_round(
        self, step: V1Step, slots: np.ndarray, num_tokens: np.ndarray, limits: np.ndarray, ngrams: NgramDrafter | None
    ) -> tuple[DraftRound, bool]:
        """Return the round of this batch, its first token decided, and whether any request may draft at all."""
        if self._rows is None:
            self._rows = DraftRows(step.runner, self._step, self._layer_names, self.sampling)
        if self.sampling is not None:
            self.sampling.begin_round(step)
        # Whatever the scheduler reserved: a draft may never write into a block that is not its request's.
        room = np.maximum(self._rows.allocated_tokens(len(slots)) - num_tokens + 1, 0)
        ngram_limits = np.minimum(limits, room)
        # The draft step knows no adapters; an n-gram draft needs none.
        adapted = step.has_adapter()
        head_limits = np.where(adapted, 0, ngram_limits)
        may_draft = bool((limits if ngrams is not None else limits[~adapted]).any())
        return self.session.begin(slots, head_limits, ngrams, ngram_limits), may_draft

    def _draft(
        self, step: V1Step, round_: DraftRound, num_tokens: np.ndarray, hidden_states: torch.Tensor
    ) -> list[list[int]]:
        """Return the draft of every row."""
        assert self._rows is not None

        def input_hidden_states() -> torch.Tensor:
            return hidden_states[step.input_hidden_rows()]

        with self._rows.round(num_tokens - 1, input_hidden_states):
            drafts = draft_tokens(round_, self._rows, step.input_token_ids())
        self.stats.count_not_finite(self._rows.num_not_finite)
        self.session.end()
        return drafts

    def _drafting_took(self, ms: float, num_reqs: int) -> StepTimes:
        """Return the times of a round that took so many ms from its first decision on, its step's left out."""
        assert self._rows is not None
        steps = self._rows.step_times
        if not steps:
            return NO_DRAFTING
        return NO_DRAFTING._replace(draft_steps=steps, draft_round=(num_reqs, ms - sum(ms for _, ms in steps)))

    def _verified(self, step: V1Step, round_: DraftRound, drafts: list[list[int]]) -> list[list[int]]:
        """Return the drafts to verify; while they are recorded, none."""
        if self.recorder is None:
            return drafts
        for row, request_id in enumerate(step.req_ids):
            if request_id not in self.recorder:
                self.recorder.begin(request_id, step.prompt(row))
        self.recorder.add(step.req_ids, step.emitted, drafts, round_.confidences)
        return [[] for _ in drafts]

    def policy_metrics(self) -> dict[str, object]:
        """Return what the policy believes of the running requests, `DraftLengthPolicy.metrics`."""
        return self.policy.metrics(self._slots.in_use())
