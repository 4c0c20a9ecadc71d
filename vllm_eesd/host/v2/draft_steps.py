"""Draft steps on Model Runner V2: a token for every row of the batch, from a CUDA graph if there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from vllm_eesd.host.compat import VllmConfig, init_logger
from vllm_eesd.host.v2.batch import TargetStep
from vllm_eesd.host.v2.compat import (
    AttentionCGSupport,
    BatchDescriptor,
    CUDAGraphMode,
    DraftModelSpeculator,
    SpeculatorCudaGraphManager,
    build_slot_mappings_by_layer,
    gumbel_sample,
    init_attn_backend,
    set_forward_context,
)
from vllm_eesd.kernels.gpu.draft_inputs import advance_draft_inputs, prepare_draft_inputs
from vllm_eesd.kernels.gpu.shared_draw import shared_draw
from vllm_eesd.kernels.reference.draft_inputs import DraftInputs, Drafts
from vllm_eesd.kernels.reference.noise import draw_counters
from vllm_eesd.policy import DRAWN, GREEDY, SHARED_NOISE

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.gpu.block_table import BlockTables
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
    from vllm.v1.worker.gpu.model_states.interface import ModelState

logger = init_logger("vllm.eesd")
Metadata = dict[str, object] | None
KINDS = {GREEDY: "greedy", DRAWN: "drawn", SHARED_NOISE: "seeded"}


class DraftSteps(DraftModelSpeculator):
    """The device's side of a speculator whose draft model is the head of the target.

    Rounds with a drawn draft have draft steps, and CUDA graphs, of their own: only they make noise and keep logits. So
    have those with a draft that is drawn by the target's noise.
    Every draft step runs all rows of the batch; a row that may not write (a prompt chunk, a dummy, one at the end of
    its KV blocks) has request index -1, for which vLLM maps tokens to no slot.

    Args:
        vllm_config, device: of the engine.
    Attributes:
        shared_layer_names: attention layers of the target that a draft step runs through; set while loading.
        kernel_step, kernel_rows: the greedy draft step that batches of up to so many rows run instead of `model`.
        draws: the draft steps of this round, see `Drawing.kind`.
    Source: vllm/v1/worker/gpu/spec_decode/target_dependent_ar/speculator.py.
    """

    shared_layer_names: set[str]
    kernel_step: nn.Module | None = None
    kernel_rows = 0
    draws = GREEDY

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)

        def longs() -> torch.Tensor:
            return torch.zeros(self.max_num_reqs, dtype=torch.int64, device=device)

        buffers = self.input_buffers
        #: Read and written by CUDA graphs, so they never move.
        self._inputs = DraftInputs(
            buffers.input_ids,
            buffers.positions,
            buffers.seq_lens,
            buffers.query_start_loc,
            self.idx_mapping,
            position_limit=longs(),
            columns=longs(),
            last_rows=longs(),
        )
        self._drafts = Drafts(self.draft_tokens, self.draft_token_confidence_probs)
        #: KV blocks by request state, of a step that writes nothing.
        self._no_blocks = torch.zeros(self.max_num_reqs, dtype=torch.int32, device=device)
        #: [max_num_reqs, hidden_size], see `ExitHead.round_context`; None if the head wants none.
        self._round_context: torch.Tensor | None = None
        #: By `draws`; none until memory is profiled.
        self._graphs: dict[int, SpeculatorCudaGraphManager] = {}
        #: [max_num_reqs], by request state: whether its drafts are drawn by the target's noise.
        self.shares_noise = torch.zeros(self.max_num_reqs, dtype=torch.bool, device=device)
        #: Has the next forward, of so many tokens, run without LoRA adapters.
        self._without_adapters: Callable[[int], None] = lambda num_tokens: None
        #: vLLM's, from `set_attn` on; the run that profiles memory comes before there is a KV cache.
        self.block_tables: BlockTables | None = None

    def set_attn(
        self, model_state: ModelState, kv_cache_config: KVCacheConfig, block_tables: BlockTables, *target: object
    ) -> None:
        """As vLLM's, with metadata for the target layers that drafting runs through as well."""
        super().set_attn(model_state, kv_cache_config, block_tables, *target)
        self.attn_groups, self.attn_cg_support, _ = init_attn_backend(
            kv_cache_config,
            self.attn_vllm_config,
            self.device,
            active_layer_names=self.draft_attn_layer_names | self.shared_layer_names,
        )
        self._configure_decode_metadata_update()
        used = [index for index, groups in enumerate(self.attn_groups) if groups]
        if len(used) != 1:
            raise ValueError(
                "eesd: the drafted layers are in different KV-cache groups (mixed attention kinds); not supported"
            )
        self._kv_group = used[0]

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Plan full graphs of a draft step wherever the engine uses graphs at all and the backend can replay them."""
        support = self.attn_cg_support.min_cg_support.value
        able = cudagraph_mode and support >= AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE.value
        mode = CUDAGraphMode.FULL_DECODE_ONLY if able else CUDAGraphMode.NONE
        for draws in (GREEDY,) if self.draft_logits is None else (GREEDY, DRAWN, SHARED_NOISE):
            self._graphs[draws] = SpeculatorCudaGraphManager(self.vllm_config, self.device, mode, decode_query_len=1)
        logger.info("EESD: CUDA graphs of verification: %s; of draft steps: %s", cudagraph_mode.name, mode.name)

    def capture(self) -> None:
        """Record a draft step for every batch size; while recording, no row may write."""
        self.idx_mapping.fill_(-1)
        self._inputs.position_limit.zero_()
        self._without_adapters(self.max_num_reqs)
        for draws, graphs in self._graphs.items():
            self.draws = draws
            graphs.capture(
                self._draft,
                self.model_state,
                self.input_buffers,
                self.block_tables,
                self.attn_groups,
                self.kv_cache_config,
                progress_bar_desc=f"Capturing EESD draft steps ({KINDS[draws]} drafts)",
            )
        self.draws = GREEDY

    @torch.inference_mode()
    def warm_up_noise(self) -> None:
        """Have the kernel compiled that draws by the target's noise: for no request, with arguments as serving's."""
        rows = torch.zeros(1, self.hidden_size, dtype=self.dtype, device=self.device)
        head = self.model.target if self.model.vocabulary is None else self.model.vocabulary
        logits, positions = self.model.whole(head.compute_logits(rows)), self._inputs.positions[:1]
        no_request = torch.full((1,), -1, dtype=self.idx_mapping.dtype, device=self.device)
        sampling = self.temperature, self.seeds, positions, self.shares_noise
        shared_draw(logits, no_request, *sampling, positions, self.draft_token_confidence_probs[:1, 0])

    def _prepare(
        self, step: TargetStep, temperature: torch.Tensor, seeds: torch.Tensor, dummy_run: bool = False
    ) -> None:
        """Fill the device's buffers for the first draft step, without asking the device anything.

        Args:
            temperature, seeds: [max_num_reqs], by request state; wanted where drafts are drawn.
            dummy_run: no row may write.
        """
        if self.draws:
            self.temperature.copy_(temperature)
            self.seeds.copy_(seeds)
        blocks = self.block_tables
        # The block size is passed in dummy runs too: Triton compiles a kernel anew where a number is 1, or divisible
        # by 16.
        block_size = 1 if blocks is None else blocks.block_sizes[self._kv_group]
        num_blocks = self._no_blocks if dummy_run or blocks is None else blocks.num_blocks.gpu[self._kv_group]
        prepare_draft_inputs(self._inputs, step.outputs(), num_blocks, block_size, self.max_model_len)
        if self._round_context is not None:
            rows = step.last_hidden_states[self._inputs.last_rows[: step.num_reqs]]
            self._round_context[: step.num_reqs] = self.model.round_context(rows)

    def _run_step(
        self, step: int, num_reqs: int, graph: BatchExecutionDescriptor, seq_lens: torch.Tensor, skip_attn: bool
    ) -> None:
        """Run one draft step: replay its graph if it has one, after bringing up to date what is not in the graph."""
        in_full_graph = graph.cg_mode == CUDAGraphMode.FULL
        if not skip_attn and (not self.supports_decode_metadata_update or step == 1 and not in_full_graph):
            self._map_slots(num_reqs, graph.num_tokens)
            self._metadata = self._build_uniform_attn_metadata(
                batch_desc=graph, num_reqs=num_reqs, num_query_per_req=1, seq_lens_cpu_upper_bound=seq_lens, step=step
            )
        elif not skip_attn and step == 1:
            for group in self.attn_groups[self._kv_group]:
                group.map_to_kernel_block_table(self.block_tables.input_block_tables[self._kv_group])
        if in_full_graph:
            self._graphs[self.draws].run_fullgraph(graph)
            return
        metadata, slot_mappings = (None, None) if skip_attn else (self._metadata, self._slot_mappings)
        self._draft(num_reqs, graph.num_tokens, metadata, slot_mappings, None, graph.cg_mode)

    def _map_slots(self, num_reqs: int, num_tokens: int) -> None:
        mapped = self.block_tables.compute_slot_mappings(
            self.idx_mapping[:num_reqs],
            self.input_buffers.query_start_loc[: num_reqs + 1],
            self.input_buffers.positions[:num_reqs],
            num_tokens,
        )
        self._slot_mappings = build_slot_mappings_by_layer(mapped, self.kv_cache_config)

    def _draft(
        self,
        num_reqs: int,
        num_tokens: int,
        attn_metadata: Metadata,
        slot_mappings: dict[str, torch.Tensor] | None,
        num_tokens_across_dp: torch.Tensor | None,
        cudagraph_runtime_mode: CUDAGraphMode,
        num_speculative_steps: int = 0,
    ) -> None:
        """Draft one token for every row and make it the next input; this is what a CUDA graph holds."""
        inputs = self._inputs
        if self.supports_decode_metadata_update and attn_metadata is not None:
            self._map_slots(num_reqs, num_tokens)
            self._update_draft_decode_metadata(attn_metadata, num_reqs)
        with set_forward_context(
            attn_metadata,
            self.vllm_config,
            num_tokens=num_tokens,
            cudagraph_runtime_mode=cudagraph_runtime_mode,
            num_tokens_across_dp=num_tokens_across_dp,
            slot_mapping=slot_mappings,
            batch_descriptor=BatchDescriptor(num_tokens=num_tokens),
        ):
            context = None if self._round_context is None else self._round_context[:num_tokens]
            draft_step = self.model if self.draws or num_tokens > self.kernel_rows else self.kernel_step
            best, confidence, *logits = draft_step(
                inputs.input_ids[:num_tokens], inputs.positions[:num_tokens], context
            )
        drafted, confidence = best[:num_reqs], confidence[:num_reqs]
        if self.draws:
            drafted, confidence = self._sample(self.model.whole(logits[0][:num_reqs]), confidence)
        advance_draft_inputs(inputs, self._drafts, drafted, confidence, self.max_model_len)

    def _sample(self, logits: torch.Tensor, confidence: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens drawn at their requests' temperatures, [num_reqs] int64, and keep the logits for verification.

        With them come their confidences, [num_reqs] float32: these look at the noise of drafts drawn by the target's.

        Args:
            logits: [num_reqs, vocab_size].
            confidence: [num_reqs] float32, of the most probable tokens.
        """
        num_reqs, inputs = len(logits), self._inputs
        slots, positions = self.idx_mapping[:num_reqs], inputs.positions[:num_reqs]
        sampling = self.temperature, self.seeds
        tokens = gumbel_sample(
            logits,
            slots,
            *sampling,
            draw_counters(positions, inputs.columns[:num_reqs]),
            apply_temperature=True,
            is_drafting=True,
            logits_cache=self.draft_logits,
            logits_cache_col=inputs.columns[0],
            use_fp64=self.use_fp64_gumbel,
        )
        if self.draws != SHARED_NOISE:
            return tokens, confidence
        # By the noise of the plain step that will choose the target's token there.
        if not self.use_fp64_gumbel:
            return shared_draw(logits, slots, *sampling, positions, self.shares_noise, tokens, confidence)
        noise = {"apply_temperature": True, "is_drafting": False, "use_fp64": True}
        as_the_target = gumbel_sample(logits, slots, *sampling, positions, **noise)
        return torch.where(self.shares_noise[slots.clamp(min=0)], as_the_target, tokens), confidence
