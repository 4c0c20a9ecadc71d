"""The adapter for vLLM's Model Runner V2 (the GPU's runner): drafts stay on the device, their lengths on the host."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from vllm_eesd.host.adapters import without_adapters
from vllm_eesd.host.circuit_breaker import CircuitBreaker
from vllm_eesd.host.compat import VllmConfig, get_tp_group, set_model_tag
from vllm_eesd.host.metrics import publish
from vllm_eesd.host.model.draft_step import DraftStep, compile_draft_step
from vllm_eesd.host.model.exit_head import ExitHead, load_head
from vllm_eesd.host.model.new_weights import follow_new_weights
from vllm_eesd.host.round_setup import build_policy_of
from vllm_eesd.host.scheduler_seams import NUM_VERIFIED
from vllm_eesd.host.speculative import EESDSpeculativeConfig
from vllm_eesd.host.v2 import kernel_choice
from vllm_eesd.host.v2.batch import RequestStates, TargetStep
from vllm_eesd.host.v2.compat import async_tensor_h2d, dispatch_cg_and_sync_dp
from vllm_eesd.host.v2.cost_profile import profile_costs
from vllm_eesd.host.v2.draft_steps import DraftSteps
from vllm_eesd.host.v2.kernel_ops import KernelDraftStep, TiledDraftStep, exit_head_rows
from vllm_eesd.host.v2.kv_fill import use_kv_fill
from vllm_eesd.host.v2.lengths import Rounds
from vllm_eesd.host.v2.ngrams import DeviceNgrams
from vllm_eesd.host.v2.ragged import RaggedVerification, use_graphs_for_ragged_batches
from vllm_eesd.host.v2.readback import RoundTimes, Timestamps
from vllm_eesd.host.v2.trace import tokens_of_step
from vllm_eesd.host.v2.verification import Verification, emits_the_targets_tokens
from vllm_eesd.policy import GREEDY, DraftLengthPolicy
from vllm_eesd.round.counters import DraftStats

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.worker.gpu.async_utils import AsyncOutput
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.states import RequestState
    from vllm.v1.worker.utils import AttentionGroup


class EarlyExitSpeculator(DraftSteps):
    """Drafts with the target's layers [0, N) and the exit head, on the target's own KV slots.

    Args:
        vllm_config: with an `EESDSpeculativeConfig`.
        req_states: the runner's.
    Source: vllm/v1/worker/gpu/spec_decode/target_dependent_ar/speculator.py.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState) -> None:
        super().__init__(vllm_config, device)
        config = vllm_config.speculative_config
        assert isinstance(config, EESDSpeculativeConfig)
        self.config, self._states = config, RequestStates(req_states)
        config.engine_index = vllm_config.parallel_config.data_parallel_index
        self._asynchronous = vllm_config.scheduler_config.async_scheduling
        self.num_speculative_tokens = config.num_speculative_tokens
        self.rounds = Rounds(config, self.max_num_reqs, self.max_model_len, device)
        self.rounds.learns = False  # until `profile_costs`
        self.breaker = CircuitBreaker()
        self.verification = Verification(self.max_num_reqs, config.eesd.unseeded_verification == "shared_noise")
        self.ngrams = DeviceNgrams(self._states)
        if get_tp_group().rank_in_group == 0:
            publish(config.metrics_directory, config.engine_index, self.stats, self.breaker)
        #: While set, a dummy run is the target's alone.
        self.skips_dummy_runs = False
        #: Before and after the draft step of the last dummy run.
        self.dummy_times = Timestamps(device)

    # What `vllm_eesd.host.worker` asks for.

    @property
    def stats(self) -> DraftStats:
        return self.rounds.stats

    @property
    def policy(self) -> DraftLengthPolicy:
        return self.rounds.policy

    def use_policy(self, policy: DraftLengthPolicy) -> None:
        """Choose draft lengths by this policy from now on; requests that run start from its prior."""
        self.rounds.use_policy(policy)

    def policy_metrics(self) -> dict[str, object]:
        """Return what the policy believes of the running requests, `DraftLengthPolicy.metrics`."""
        return self.policy.metrics(self._states.slots())

    # Loading.

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        """Build the exit head, hook its KV fill into the target and compile the draft step: that is the draft model."""
        config = self.config.exit_head
        head = load_head(self.vllm_config, target_model, config, self.config.head_directory)
        self._target_and_head = target_model, head
        step = self._build_steps(target_model, head)
        drafted_layers = target_model.model.layers[: config.exit_layer]
        self.shared_layer_names = {layer.self_attn.attn.layer_name for layer in drafted_layers}
        if step.reads_target_output:
            size = self.max_num_reqs, self.hidden_size
            self._round_context = torch.zeros(size, dtype=self.dtype, device=self.device)
        return step

    def target_changed(self) -> None:
        """Take in that the target has other weights: what was derived of them, and learned of its drafts, begins anew.

        Called between two steps, inside `set_current_vllm_config`.
        """
        follow_new_weights(*self._target_and_head)
        self.use_policy(build_policy_of(self.config, self.max_num_reqs, costs=self.policy.costs))

    def _build_steps(self, target_model: nn.Module, head: ExitHead | None) -> DraftStep:
        """Choose the kernels, then compile the draft steps that the choice leaves in use; returns the one in torch."""
        compilation, config = self.vllm_config.compilation_config, self.config
        timer = kernel_choice.timer_for(self.device, in_graphs=bool(compilation.cudagraph_mode))
        parts = {"target": target_model, "exit_layer": config.exit_head.exit_layer, "head": head}
        with set_model_tag("eesd_draft"):
            kind = DraftStep if timer is None else TiledDraftStep
            step = kind(vllm_config=self.vllm_config, **parts)
        self.kernel_rows = exit_head_rows(step, self.vllm_config, timer)
        if use_kv_fill(head, self.vllm_config, timer):
            config.graph_kernels = "kv_fill"  # before anything is compiled
        token_dtype = self.input_buffers.input_ids.dtype
        if self.kernel_rows >= self.max_num_reqs:
            self.kernel_rows = self.max_num_tokens  # padding included
        if self.kernel_rows < self.max_num_reqs or self.draft_logits is not None:
            compile_draft_step(step, self.vllm_config, self.device, token_dtype)
        if self.kernel_rows:
            with set_model_tag("eesd_draft_kernel"):
                self.kernel_step = KernelDraftStep(vllm_config=self.vllm_config, **parts)
            compile_draft_step(self.kernel_step, self.vllm_config, self.device, token_dtype)
        return step

    def warm_up(self, runner: GPUModelRunner) -> None:
        """Have the kernels of verification and of n-gram drafts compiled.

        Called before the worker warms up: at the end of that vLLM begins to report, or refuse, what is compiled later.
        """
        self._without_adapters = functools.partial(without_adapters, runner)
        runner.lora_state.eesd_ragged = self._ragged  # it is given nothing else of the runner
        self.rounds.drawing.may_share = emits_the_targets_tokens(runner.rejection_sampler)
        self.rounds.drawing.has_margins = not self.use_fp64_gumbel
        self.verification.warm_up(runner, self.draft_logits)
        self.ngrams.warm_up(self.draft_tokens, self.draft_logits)
        if self.draft_logits is not None:
            self._without_adapters(1)
            self.warm_up_noise()

    def profile_costs(self, runner: GPUModelRunner) -> None:
        """Time steps of a few sizes, so that the first requests are not the ones to learn from; then serving begins.

        Called once the worker is warmed up, which vLLM does with requests and drafts of its own making.
        """
        self.warm_up(runner)
        self.rounds.forget_requests()
        # Until vLLM 0.33: no `suppress`. It counts the experts that forwards choose, of the dummy runs as well.
        suppress = getattr(getattr(runner, "eplb", None), "suppress", contextlib.nullcontext)
        with suppress():
            profile_costs(runner, self, self.policy.costs)
        self.rounds.learns = True

    def ragged_verification(
        self,
        query_start_loc: torch.Tensor,
        attn_groups: list[list[AttentionGroup]],
        target_layer_names: set[str] | None,
    ) -> RaggedVerification:
        """Return what trims scheduled drafts to this speculator's lengths, having seen to the graphs that replay them.

        Args:
            query_start_loc: see `RaggedVerification`.
            attn_groups, target_layer_names: of the target's attention.
        """
        use_graphs_for_ragged_batches(self.vllm_config, attn_groups, target_layer_names)
        self._ragged = RaggedVerification(
            self._states,
            query_start_loc,
            self.rounds.num_drafted,
            names_logprobs=self.rounds.drawing.names_logprobs,
        )
        return self._ragged

    # A round.

    def admit(self, new_requests: list[NewRequestData]) -> None:
        """Take in requests that start or come back from preemption."""
        if not new_requests:
            return
        slots = self._states.slots_of(request.req_id for request in new_requests)
        for slot, request in zip(slots, new_requests, strict=True):
            self.verification.admit(slot, request.sampling_params)
        self.shares_noise.copy_(async_tensor_h2d(self.verification.shares_noise, device=self.device))
        if self.breaker.is_open:
            return
        try:
            self.rounds.max_model_len = self.max_model_len
            self.rounds.admit(slots, new_requests)
        except Exception as error:
            self._survive(error)

    def draft_lengths(self, req_ids: list[str]) -> list[int]:
        """Return the length of each request's current draft; 0 for those that have ended."""
        slots = map(self._states.slot_of, req_ids)
        return [0 if slot is None else int(self.rounds.num_drafted[slot]) for slot in slots]

    def sample_tokens(
        self, sample: Callable[[], ModelRunnerOutput | AsyncOutput | None], runner: GPUModelRunner
    ) -> ModelRunnerOutput | AsyncOutput | None:
        """Return what `sample` does, a step's output; it says how many drafts each row had verified."""
        output = sample()
        if output is not None:  # what is not yet on the host waits in an object that holds the output
            setattr(getattr(output, "model_runner_output", output), NUM_VERIFIED, self._ragged.num_verified())
        return output

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: object,
        slot_mappings: object,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: object,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        dp_sync_state: object = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: object = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """Return the drafts, [num_reqs, K] int64; a row's own length is in `draft_lengths`.

        The parameters are BaseSpeculator.propose's, all of them: an argument that a new vLLM adds must fail here.

        Args:
            input_batch, last_hidden_states, num_sampled, num_rejected, last_sampled: read through `TargetStep`.
            dummy_run: a step without requests; it runs one draft step and writes nothing.
            num_speculative_tokens: the longest draft that vLLM schedules after this step; it overwrites what is longer.
                0 where no request can use a draft; None is K.
        Source: vllm/v1/worker/gpu/spec_decode/speculator.py, BaseSpeculator.propose.
        """
        step = TargetStep(input_batch, last_hidden_states, num_sampled, num_rejected, last_sampled)
        sampling = temperature, seeds
        if dummy_run:
            self.rounds.pause()
            self.draws = GREEDY
            if not self.skips_dummy_runs:
                self._prepare(step, *sampling, dummy_run=True)
                self._dummy_step(step, skip_attn_for_dummy_run, is_profile)
        elif not self.breaker.is_open:
            try:
                self._learn_and_draft(step, sampling, num_speculative_tokens)
                self.breaker.passed()
            except Exception as error:
                self._survive(error)
        return self.draft_tokens[: step.num_reqs]

    def _learn_and_draft(self, step: TargetStep, sampling: tuple, longest: int | None) -> None:
        """See `propose`; a round without drafts prepares nothing for draft steps."""
        if self.rounds.skips(step):
            return
        began, tokens = time.thread_time(), None  # without what the host waits for
        if self.rounds.round_trace is not None or self.stats.recording:
            # The drafts just verified: this round's take their place once it is over.
            tokens = tokens_of_step(step, self._states.draft_tokens[step.idx_mapping])
        counts = self.ngrams.find(step) if self.policy.uses_ngrams else step.num_sampled[:, None]
        times = self.rounds.begin(step, self._asynchronous, counts, tokens, longest)
        round_, drawing = self.rounds.round, self.rounds.drawing
        if round_.num_steps:
            self.draws = drawing.kind(round_)
            self._prepare(step, *sampling)
            certain = drawing.certain(round_)
            if self.draws and certain.any():
                self.temperature.index_fill_(0, async_tensor_h2d(step.slots()[certain], device=self.device), 0.0)
            graph = self._graph_for(step)
            self._without_adapters(graph.num_tokens)
            times.mark()
            self._run_round(step, graph, times)
            if certain.any():
                self.ngrams.make_certain(certain, step.idx_mapping, *self._made(step))
        if round_.from_ngrams.any():
            self.ngrams.put(round_.from_ngrams, step.idx_mapping, *self._made(step))
        self.rounds.back_off(step, (time.thread_time() - began) * 1e3)

    def _made(self, step: TargetStep) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the round's drafts, [num_reqs, K], and the logits they are verified against, if any are kept."""
        return self.draft_tokens[: step.num_reqs], self.draft_logits

    def _dummy_step(self, step: TargetStep, skip_attn: bool, is_profile: bool) -> None:
        """Run one draft step that writes nothing. A fault here is not survived: nothing is served yet."""
        graph = self._graph_for(step, need_eager=is_profile)
        self.dummy_times = Timestamps(self.device)
        self.dummy_times.mark()
        self._run_step(1, step.num_reqs, graph, step.seq_lens_upper_bound, skip_attn)
        self.dummy_times.mark()

    def _survive(self, error: Exception) -> None:
        """No request has a draft after a fault; what it left on the device is overwritten, see `CircuitBreaker`."""
        self.rounds.start_afresh()
        self.breaker.fault(error)

    def _graph_for(self, step: TargetStep, need_eager: bool = False) -> BatchExecutionDescriptor:
        """Return what this round's draft steps run, and the graph that replays them, if any."""
        longest = int(step.seq_lens_upper_bound[: step.num_reqs].numpy().max()) + self.num_speculative_tokens
        self.draft_max_seq_len = min(longest, self.max_model_len)
        sizes = {"uniform_token_count": 1, "dp_size": 1, "dp_rank": 0, "need_eager": need_eager}
        return dispatch_cg_and_sync_dp(self._graphs.get(self.draws), step.num_reqs, step.num_reqs, **sizes)[0]

    def _run_round(self, target_step: TargetStep, graph: BatchExecutionDescriptor, times: RoundTimes) -> None:
        """Launch the round's draft steps, decided ahead: the host goes on while they run."""
        num_reqs = target_step.num_reqs
        for step in range(1, self.rounds.round.num_steps + 1):
            self._run_step(step, num_reqs, graph, target_step.seq_lens_upper_bound, skip_attn=False)
            times.mark()
        self.rounds.end(self.draft_token_confidence_probs[:num_reqs])
