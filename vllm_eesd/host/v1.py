"""The adapter for vLLM's Model Runner V1 (the CPU's runner): batch rows in, ragged drafts out."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from vllm_eesd.continuations import NgramContinuations
from vllm_eesd.drafting import draft_round
from vllm_eesd.host import verification
from vllm_eesd.host.circuit_breaker import CircuitBreaker
from vllm_eesd.host.compat import (
    VllmConfig,
    get_tp_group,
    init_logger,
    set_model_tag,
)
from vllm_eesd.host.cost_profile import profile_costs
from vllm_eesd.host.draft_rows import DraftRows
from vllm_eesd.host.draft_sampling import DraftSampling
from vllm_eesd.host.draft_step import DraftStep, compile_draft_step
from vllm_eesd.host.exit_layer import HEAD_CLASSES, ExitHead
from vllm_eesd.host.metrics import publish
from vllm_eesd.host.resting import MAY_NOT_DRAFT, Rest
from vllm_eesd.host.running_requests import RunningRequests
from vllm_eesd.host.speculative import EESDSpeculativeConfig
from vllm_eesd.policy import BetaPosterior, Calibration, CostModel, Dispatch, DraftLengthPolicy, build_policy
from vllm_eesd.round_trace import Judged, RoundTrace
from vllm_eesd.stats import DraftStats
from vllm_eesd.trace import DenseRecorder

logger = init_logger("vllm.eesd")


class DraftTimes(NamedTuple):
    """What a round's drafting took, (rows, ms) each.

    Attributes:
        steps: its draft steps.
        overhead: everything else, in a round with draft steps.
        look: all of it, in a round in which nothing was found worth drafting.
    """

    steps: list[tuple[int, float]] = []
    overhead: tuple[int, float] | None = None
    look: tuple[int, float] | None = None


#: As often as vLLM logs its own statistics.
REPORT_EVERY_S = 10.0


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
        max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self.num_speculative_tokens = config.num_speculative_tokens
        self.policy = build_dispatch(config, max_num_reqs)
        self.stats = DraftStats(config.num_speculative_tokens)
        self.breaker = CircuitBreaker()
        #: None drafts greedily.
        self._sampling = DraftSampling() if config.eesd.draft_sample_method == "probabilistic" else None
        if get_tp_group().rank_in_group == 0:
            rank = vllm_config.parallel_config.data_parallel_rank
            publish(config.metrics_directory, rank, self.stats, self.breaker)
        self._continuations = NgramContinuations(max_num_reqs, config.num_speculative_tokens)
        self._requests = RunningRequests(max_num_reqs, config.num_speculative_tokens, self.policy, self._continuations)
        #: While set, drafts are recorded instead of verified.
        self.recorder: DenseRecorder | None = None
        self.round_trace = open_trace(config)
        self._rows: DraftRows | None = None
        #: When the last round ended, and what its drafting took.
        self._round_ended, self._times = 0.0, DraftTimes()
        self._rest = Rest()
        self._reported = time.perf_counter()
        #: A state file that cannot be written is worth one line, not one every REPORT_EVERY_S.
        self._state_saved = True

    def load_model(self, target: nn.Module) -> None:
        """Build the exit head, hook its KV fill into the target and compile the draft step.

        Called by the runner right after the target is loaded, inside `set_current_vllm_config`.
        """
        config = self.config.exit_head
        head: ExitHead | None = None
        if self.config.head_directory is not None:
            head = HEAD_CLASSES[config.head_type].load(self.vllm_config, target, config, self.config.head_directory)
            head.hook_kv_fill(target, config.exit_layer)
        with set_model_tag("eesd_draft"):
            self._step = DraftStep(
                vllm_config=self.vllm_config,
                target=target,
                exit_layer=config.exit_layer,
                head=head,
            )
        self._layer_names = [layer.self_attn.attn.layer_name for layer in target.model.layers[: config.exit_layer]]
        if head is not None and head.attention_name is not None:
            self._layer_names.append(head.attention_name)
        compile_draft_step(self._step, self.vllm_config, torch.device("cpu"))
        logger.info("EESD drafts with layers 0..%d and a %s exit head", config.exit_layer - 1, config.head_type)

    def profile_costs(self, runner: Any) -> None:
        """Time steps of a few sizes, so that the first requests are not the ones to learn from. Called at start-up."""
        profile_costs(runner, self._step, self.policy.costs)

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """Refuse: without its seam the runner gives a proposer too little to draft with."""
        raise RuntimeError(
            "eesd: the seam at GPUModelRunner.propose_draft_token_ids is not installed; run `eesd doctor`"
        )

    def sample(self, runner: Any, host_sample: Any, logits: torch.Tensor, metadata: Any) -> Any:
        """Return vLLM's SamplerOutput of a step, see `verification.sample`."""
        return verification.sample(runner, host_sample, logits, metadata, self._sampling)

    def propose_round(
        self,
        runner: Any,
        scheduler_output: Any,
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
        if self.breaker.is_open:
            return nothing
        try:
            if self._rests(runner, scheduler_output, sampled_token_ids):
                return nothing
            drafts = self._learn_and_draft(runner, scheduler_output, sampled_token_ids, sample_hidden_states)
        except Exception as error:
            self._start_afresh(runner.input_batch.req_ids)
            self.breaker.fault(error)
            return nothing
        self.breaker.passed()
        return drafts

    def _start_afresh(self, request_ids: list[str]) -> None:
        """Drop what a failed round may have left half written; the next one admits its requests anew.

        Args:
            request_ids: the batch's, none of which has a draft now; one that the scheduler passed over may have.
        """
        self._requests.forget()
        if self._sampling is not None:
            self._sampling.forget(request_ids)
        self._rows = None
        self._rest = Rest()
        self._round_ended, self._times = 0.0, DraftTimes()

    def _rests(self, runner: Any, scheduler_output: Any, emitted: list[list[int]]) -> bool:
        """Return whether this is a round that nobody looks at, counted if it is."""
        step = scheduler_output.finished_req_ids, scheduler_output.total_num_scheduled_tokens, emitted
        if not self._rest.goes_on(runner.input_batch.req_ids, *step):
            return False
        self.stats.count_lengths(0, 0, num_rounds=len(emitted))
        self._round_ended = time.perf_counter()
        return True

    def _learn_and_draft(
        self,
        runner: Any,
        scheduler_output: Any,
        sampled_token_ids: list[list[int]],
        sample_hidden_states: torch.Tensor,
    ) -> list[list[int]]:
        """See `propose_round`."""
        began_look = time.perf_counter()
        batch, finished = runner.input_batch, scheduler_output.finished_req_ids
        rested = self._rest.take()
        if rested:
            self.policy.rested(self._requests.last_slots, rested)
        slots = self._requests.slots_of(runner, finished)
        num_tokens = batch.num_tokens_no_spec[: len(slots)].astype(np.int64)
        decoded = self._observe(batch, scheduler_output, slots, num_tokens, sampled_token_ids)
        limits = self._requests.draft_limits(slots, num_tokens, sampled_token_ids)
        copy_limits = limits.copy()
        if runner.lora_config:  # the draft step knows no adapters; their text continues as any other
            limits[batch.request_lora_mapping[: len(slots)] != 0] = 0
        if self._rows is None:
            self._rows = DraftRows(runner, self._step, self._layer_names, self._sampling)
        if self._sampling is not None:
            self._sampling.begin_round(runner, finished)
        continuations = self._continue_texts(batch, slots, num_tokens, copy_limits)
        began = time.perf_counter()
        self._learn_costs(began, decoded, sampled_token_ids, scheduler_output.total_num_scheduled_tokens, rested)
        self._report(began)
        if not (limits if continuations is None else copy_limits).any():
            self._round_ended, self._times = time.perf_counter(), DraftTimes()
            self._rest.begin(self._may_rest(MAY_NOT_DRAFT, sampled_token_ids), batch.req_ids)
            return self._kept(batch, sampled_token_ids, [[] for _ in sampled_token_ids], slots)
        # Whatever the scheduler reserved: a draft may never write into a block that is not its request's.
        room = np.maximum(self._rows.allocated_tokens(len(slots)) - num_tokens + 1, 0)
        limits, copy_limits = np.minimum(limits, room), np.minimum(copy_limits, room)
        bonus_token_ids = np.array([ids[-1] if ids else 0 for ids in sampled_token_ids], dtype=np.int64)

        def produced_bonus() -> torch.Tensor:
            return sample_hidden_states[self._produced_bonus(batch.req_ids, scheduler_output, sampled_token_ids)]

        with self._rows.round(num_tokens - 1, produced_bonus):
            drafts = draft_round(self._rows, self.policy, slots, bonus_token_ids, limits, continuations, copy_limits)
        if self._sampling is not None:
            for row in np.flatnonzero(self.policy.copied_of(slots)).tolist():
                self._sampling.keep_certain(row, drafts[row], runner.model_config.get_vocab_size())
        self._round_ended = time.perf_counter()
        self.stats.count_not_finite(self._rows.num_not_finite)
        steps = self._rows.step_times
        if steps:
            overhead_ms = (self._round_ended - began) * 1e3 - sum(ms for _, ms in steps)
            self._times = DraftTimes(steps, overhead=(len(slots), overhead_ms))
        elif any(drafts):
            self._times = DraftTimes()
        else:
            self._times = DraftTimes(look=(len(slots), (self._round_ended - began_look) * 1e3))
            self._rest.begin(self._may_rest(self.policy.rest(slots), sampled_token_ids), batch.req_ids)
        return self._kept(batch, sampled_token_ids, drafts, slots)

    def _continue_texts(
        self, batch: Any, slots: np.ndarray, num_tokens: np.ndarray, limits: np.ndarray
    ) -> NgramContinuations | None:
        """Return what the texts of the rows that may copy suggest; None if no policy wants it.

        Not while drafts are recorded: a dense trace is about the exit head.
        """
        if not self.policy.copies_text or self.recorder is not None:
            return None
        rows = np.flatnonzero(limits)
        drafting = slots[rows]
        shares = self._requests.shares[drafting]
        self._continuations.update(drafting, batch.token_ids_cpu, rows, num_tokens[rows], shares)
        return self._continuations

    def _may_rest(self, num_rounds: int, emitted: list[list[int]]) -> int:
        """Return for how many of these rounds nobody looks: none where each is to be seen, or while a prompt runs."""
        watched = self.recorder is not None or self.round_trace is not None or self.stats.recording
        return 0 if watched or not all(emitted) else num_rounds

    def _kept(
        self, batch: Any, emitted: list[list[int]], drafts: list[list[int]], slots: np.ndarray
    ) -> list[list[int]]:
        """Return the drafts to verify; while they are recorded, none."""
        if self.recorder is None:
            return drafts
        for row, request_id in enumerate(batch.req_ids):
            if request_id not in self.recorder:
                prompt = batch.token_ids_cpu[row, : batch.num_prompt_tokens[row]]
                self.recorder.begin(request_id, prompt.tolist())
        self.recorder.add(batch.req_ids, emitted, drafts, self.policy.confidences_of(slots))
        return [[] for _ in drafts]

    @staticmethod
    def _produced_bonus(request_ids: list[str], scheduler_output: Any, emitted: list[list[int]]) -> torch.Tensor:
        """Return which row of `sample_hidden_states` each batch row's bonus token came from, [num_reqs] int64.

        A row has one for every scheduled draft, placeholders included, and one more.
        """
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        num_judged = np.array([len(scheduled.get(request_id, ())) + 1 for request_id in request_ids])
        num_emitted = np.array([len(tokens) for tokens in emitted])
        return torch.from_numpy(num_judged.cumsum() - num_judged + (num_emitted - 1).clip(min=0))

    def policy_metrics(self) -> dict[str, Any]:
        """Return what the policy believes of the running requests, `DraftLengthPolicy.metrics`."""
        return self.policy.metrics(self._requests.slots)

    def _observe(
        self, batch: Any, scheduler_output: Any, slots: np.ndarray, num_tokens: np.ndarray, emitted: list
    ) -> int:
        """Count the round the target just verified and return its requests; prompt chunks and first tokens are none."""
        verified, accepted, rows, judged = [], [], [], []
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        num_outputs = (num_tokens - batch.num_prompt_tokens[: len(slots)]).tolist()
        for row, (request_id, tokens) in enumerate(zip(batch.req_ids, emitted, strict=True)):
            if not tokens or num_outputs[row] <= len(tokens):
                continue
            # vLLM marks placeholders, and drafts a grammar cut, with -1: the target did not judge those.
            draft = [token for token in scheduled.get(request_id, ()) if token >= 0]
            self.stats.count(request_id, draft, tokens)
            rows.append(row)
            verified.append(len(draft))
            accepted.append(len(tokens) - 1)
            if self.round_trace is not None:
                judged.append(Judged(request_id, draft, tokens))
        if rows:
            decoding = slots if len(rows) == len(slots) else slots[rows]
            if self.round_trace is not None:
                self.round_trace.add(
                    judged, decoding, self.policy, self._round_ended, self._times.steps, self._times.overhead
                )
            num_verified, num_accepted = np.array(verified), np.array(accepted)
            copied = self.policy.copied_of(decoding) > 0
            if copied.any():
                self.stats.count_copied(int(num_verified[copied].sum()), int(num_accepted[copied].sum()))
            self.policy.observe(decoding, num_verified, num_accepted, self._requests.shares[decoding])
        return len(rows)

    def _learn_costs(
        self, now: float, num_decoded: int, emitted: list[list[int]], num_tokens: int, rested: int
    ) -> None:
        """Tell the cost model what the last round's drafting and this step took; the `rested` ones before took as long.

        A step counts only if every request in it decoded: prompt chunks cost something else, and requests that begin
        may have been waited for.
        """
        num_reqs = len(emitted)
        times = self._times
        verify_ms = (now - self._round_ended) * 1e3 if num_decoded == num_reqs and self._round_ended else None
        group = get_tp_group()
        if group.world_size > 1:
            # Every rank must choose the same lengths, so all learn rank 0's times.
            times, verify_ms = group.broadcast_object((times, verify_ms), src=0)
        costs = self.policy.costs
        for num_rows, ms in times.steps:
            costs.observe_draft_step(num_rows, ms)
        if times.overhead is not None:
            costs.observe_draft_round(*times.overhead)
        if times.look is not None:
            costs.observe_look(*times.look)
        if verify_ms is not None:
            costs.observe_verify(num_reqs, num_tokens, verify_ms)
            draft_ms = sum(ms for _, ms in times.steps) + (times.overhead[1] if times.overhead is not None else 0.0)
            plain_ms = float(costs.verify_curve(num_reqs, 0)[0]) * sum(map(len, emitted)) / num_reqs
            self.stats.count_time((verify_ms + draft_ms) * (1 + rested), plain_ms * (1 + rested))

    def _report(self, now: float) -> None:
        """Log one line and save what was learned, every REPORT_EVERY_S while requests run."""
        if 0 <= now - self._reported < REPORT_EVERY_S:
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


def open_trace(config: EESDSpeculativeConfig) -> RoundTrace | None:
    """Return the writer of `policy_args.trace_file` on the rank that has it, None elsewhere and where none is named."""
    path = config.eesd.policy_args.get("trace_file")
    if path is None or get_tp_group().rank_in_group:  # every rank sees the same rounds
        return None
    settings = {"policy": config.eesd.policy, "num_speculative_tokens": config.num_speculative_tokens}
    return RoundTrace(path, settings | {"exit_layer": config.exit_head.exit_layer})


def build_dispatch(config: EESDSpeculativeConfig, max_num_reqs: int) -> Dispatch:
    """Return the policies of an engine that runs `max_num_reqs` requests at once."""
    head, eesd = config.exit_head, config.eesd
    # Until measured: a draft step takes its layers' share of a plain step.
    costs = CostModel((head.exit_layer + (head.head_type != "headless")) / head.verifier.num_hidden_layers)
    calibration = Calibration() if config.head_directory is None else Calibration.load(config.head_directory)

    def build(name: str) -> DraftLengthPolicy:
        posterior = BetaPosterior(max_num_reqs, head.prior.alpha, head.prior.beta)
        args = eesd.policy_args if name == eesd.policy else {}
        return build_policy(name, posterior, eesd.seed, args, costs, calibration)

    return Dispatch(eesd.policy, build)
