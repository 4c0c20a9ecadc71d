"""The adapter for vLLM's Model Runner V1 (the CPU's runner): batch rows in, ragged drafts out."""

from __future__ import annotations

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
from vllm_eesd.host.v1.batch import BatchRequests, V1Step, has_unknown_processors
from vllm_eesd.host.v1.cost_profile import profile_costs
from vllm_eesd.host.v1.draft_rows import DraftRows
from vllm_eesd.host.v1.draft_sampling import DraftSampling
from vllm_eesd.host.v1.step_output import with_drafts
from vllm_eesd.policy import DraftLengthPolicy, Outcome
from vllm_eesd.round.counters import DraftStats
from vllm_eesd.round.draft import DraftRound, draft_tokens
from vllm_eesd.round.idle import MAY_NOT_DRAFT, IdleBackoff
from vllm_eesd.round.ngram import NgramDrafter
from vllm_eesd.round.outcome import Learner, StepTimes
from vllm_eesd.round.slots import PendingDrafts
from vllm_eesd.traces.dense import DenseRecorder
from vllm_eesd.traces.rounds import Drafts, Judged

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

logger = init_logger("vllm.eesd")


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
        kind_of = None if self.sampling is None else self.sampling.kind_of
        size = self.max_num_reqs, self.num_speculative_tokens
        self._requests = BatchRequests(*size, policy, self._ngrams, kind_of)
        self._pending = PendingDrafts(self.max_num_reqs)
        self._learner = Learner(policy, self.stats, agree_on_times(every=1))
        self._forget_round()

    def _forget_round(self) -> None:
        self._idle = IdleBackoff()
        #: When the last round ended, and what its drafting took.
        self._round_ended, self._drafting = 0.0, {}

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
        self._requests.forget()
        self._pending.clear()
        if self.sampling is not None:
            self.sampling.forget(request_ids)
        self._rows = None
        self._forget_round()

    def _skips(self, step: V1Step) -> bool:
        """Return whether this round's draft decision is skipped, counted if it is."""
        if not self._idle.goes_on(step.req_ids, step.only_decoded()):
            return False
        self.stats.count_lengths(0, 0, num_rounds=len(step))
        self._round_ended = time.perf_counter()
        return True

    def _learn_and_draft(self, step: V1Step, hidden_states: torch.Tensor) -> list[list[int]]:
        """See `propose_round`."""
        began = time.perf_counter()
        if self.sampling is not None:
            self.sampling.meet(step)
        num_skipped = self._idle.take()
        if num_skipped:
            self.policy.skipped(self._requests.last_slots, num_skipped)
        slots, num_tokens = self._requests.slots_of(step), step.num_tokens()
        num_decoded = self._learn_outcome(step, slots)
        limits = self._requests.draft_limits(slots, num_tokens, step.emitted)
        ngrams = self._find_ngrams(step, slots, num_tokens, limits)
        drafting_began = time.perf_counter()
        self._learn_times(step, drafting_began, num_decoded, num_skipped)
        round_ = self._begin_round(step, slots, num_tokens, limits, ngrams)
        drafts = self._draft(step, round_, num_tokens, hidden_states)
        self._end_round(step, round_, drafts, (began, drafting_began))
        return self._verified(step, round_, drafts)

    def _learn_outcome(self, step: V1Step, slots: np.ndarray) -> int:
        """Learn from the round just verified and return its requests; prompts, run again or not, are none."""
        drafts = step.judged_drafts()
        rows = np.flatnonzero(step.decoded()).tolist()
        judged = [Judged(step.req_ids[row], drafts[row], step.emitted[row]) for row in rows]
        if not rows:
            return 0
        decoding = slots if len(rows) == len(slots) else slots[rows]
        num_verified = np.array([len(row.draft) for row in judged])
        num_accepted = np.array([len(row.emitted) - 1 for row in judged])
        confidences, from_ngrams = self._pending.confidences[decoding], self._pending.from_ngrams[decoding]
        for row in judged:
            self.stats.count(*row)
        if from_ngrams.any():
            self.stats.count_ngrams(int(num_verified[from_ngrams].sum()), int(num_accepted[from_ngrams].sum()))
        if self.round_trace is not None:
            steps_ms = [ms for _, ms in self._drafting.get("draft_steps", ())]
            rest_ms = self._drafting.get("draft_round", (0, 0.0))[1]
            made = Drafts(decoding, confidences, from_ngrams)
            self.round_trace.add(judged, made, self.policy, self._round_ended, steps_ms, rest_ms)
        shared = self._requests.updates_shared_prior[decoding]
        self._learner.learn(Outcome(decoding, num_verified, num_accepted, confidences, from_ngrams, shared))
        return len(rows)

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
        shared = self._requests.updates_shared_prior[drafting]
        self._ngrams.update(drafting, step.texts(), rows, num_tokens[rows], shared)
        return self._ngrams

    def _learn_times(self, step: V1Step, now: float, num_decoded: int, num_skipped: int) -> None:
        """Learn what the last round's drafting and this step took; the `num_skipped` steps before took as long.

        A step counts only if every request in it decoded: prompt chunks cost something else, and requests that begin
        may have been waited for.
        """
        timed = num_decoded == len(step) and self._round_ended
        verify_ms = (now - self._round_ended) * 1e3 if timed else None
        sizes = len(step), step.num_scheduled_tokens, sum(map(len, step.emitted))
        self._learner.learn_times(StepTimes(*sizes, verify_ms, num_skipped=num_skipped, **self._drafting))
        self._learner.report()

    def _begin_round(
        self, step: V1Step, slots: np.ndarray, num_tokens: np.ndarray, limits: np.ndarray, ngrams: NgramDrafter | None
    ) -> DraftRound:
        """Return the round of this batch, its first token decided."""
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
        self._may_draft = bool((limits if ngrams is not None else limits[~adapted]).any())
        return DraftRound(self.policy, slots, head_limits, ngrams, ngram_limits)

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
        self._pending.keep(round_)
        return drafts

    def _end_round(self, step: V1Step, round_: DraftRound, drafts: list[list[int]], began: tuple[float, float]) -> None:
        """Note what the round took, and decide whether to skip the next ones.

        Args:
            began: before learning, and before drafting.
        """
        assert self._rows is not None
        now = self._round_ended = time.perf_counter()
        steps, self._drafting = self._rows.step_times, {}
        if steps:
            rest_ms = (now - began[1]) * 1e3 - sum(ms for _, ms in steps)
            self._drafting = {"draft_steps": steps, "draft_round": (len(step), rest_ms)}
        elif not self._may_draft:
            self._idle.begin(self._may_skip(MAY_NOT_DRAFT, step), step.req_ids)
        elif not any(drafts):
            self._drafting = {"decision": (len(step), (now - began[0]) * 1e3)}
            self._idle.begin(self._may_skip(self.policy.idle_rounds(round_.slots), step), step.req_ids)

    def _may_skip(self, num_rounds: int, step: V1Step) -> int:
        """Return for how many of these rounds the decision is skipped: none if rounds are watched, or a prompt runs."""
        watched = self.recorder is not None or is_watched(self.config, self.stats)
        return 0 if watched or not all(step.emitted) else num_rounds

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
        return self.policy.metrics(self._requests.slots)
