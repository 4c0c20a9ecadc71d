"""The adapter for vLLM's Model Runner V1 (the CPU's runner): batch rows in, ragged drafts out."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from vllm_eesd.drafting import RequestSlots, draft_round
from vllm_eesd.host.compat import (
    CommonAttentionMetadata,
    VllmConfig,
    create_forward_context,
    init_logger,
    override_forward_context,
    set_model_tag,
)
from vllm_eesd.host.exit_layer import HEAD_CLASSES, DraftStep, ExitHead
from vllm_eesd.host.speculative import EESDSpeculativeConfig
from vllm_eesd.policy import BetaPosterior, build_policy
from vllm_eesd.stats import DraftStats

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
        max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self.num_speculative_tokens = config.num_speculative_tokens
        prior = config.exit_head.prior
        posterior = BetaPosterior(max_num_reqs, prior.alpha, prior.beta)
        self.policy = build_policy(config.eesd.policy, posterior, config.eesd.seed, config.eesd.policy_args)
        self.stats = DraftStats(config.num_speculative_tokens)
        self._slots = RequestSlots(max_num_reqs)
        # Per slot, fixed at a request's first round: the most tokens it may hold, and what ends it.
        self._token_budget = np.zeros(max_num_reqs, dtype=np.int64)
        self._stop_token_ids: list[frozenset[int]] = [frozenset()] * max_num_reqs
        self._rows: DraftRows | None = None

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
            self._step = DraftStep(vllm_config=self.vllm_config, target=target, exit_layer=config.exit_layer, head=head)
        self._layer_names = [layer.self_attn.attn.layer_name for layer in target.model.layers[: config.exit_layer]]
        if head is not None:
            self._layer_names.append(head.attention_name)
        self._head = head
        self._warm_up()
        logger.info("EESD drafts with layers 0..%d and a %s exit head", config.exit_layer - 1, config.head_type)

    def _warm_up(self) -> None:
        """Compile the draft step; two rows, because a batch of one would be compiled for one only."""
        if self._step.do_not_compile:
            return
        rows = torch.zeros(2, dtype=torch.int64)
        model_config = self.vllm_config.model_config
        hidden_states = torch.zeros(2, model_config.get_hidden_size(), dtype=model_config.dtype)
        context = create_forward_context(None, self.vllm_config)
        with torch.inference_mode(), override_forward_context(context):
            self._step(rows, rows.clone(), self._round_context(hidden_states))

    def _round_context(self, target_hidden_states: torch.Tensor) -> torch.Tensor | None:
        return None if self._head is None else self._head.round_context(target_hidden_states)

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """Refuse: without its seam the runner gives a proposer too little to draft with."""
        raise RuntimeError(
            "eesd: the seam at GPUModelRunner.propose_draft_token_ids is not installed; run `eesd doctor`"
        )

    def propose_round(
        self,
        runner: Any,
        scheduler_output: Any,
        sampled_token_ids: list[list[int]],
        sample_hidden_states: torch.Tensor,
    ) -> list[list[int]]:
        """Return each batch row's draft, after learning from what became of the last one.

        Args:
            runner: vLLM's GPUModelRunner (CPUModelRunner on a CPU), bookkeeping done.
            scheduler_output: of the step just run.
            sampled_token_ids: per row the tokens emitted; empty for a prompt chunk.
            sample_hidden_states: [sum of (drafts + 1), hidden_size], the target's normed output at every position it
                judged or sampled, in row order.
        Returns:
            num_reqs lists of token ids.
        """
        batch = runner.input_batch
        self._slots.release(scheduler_output.finished_req_ids)
        slots = self._assign_slots(runner, batch.req_ids)
        num_tokens = batch.num_tokens_no_spec[: len(slots)].astype(np.int64)
        self._observe(batch, scheduler_output, slots, num_tokens, sampled_token_ids)
        limits = self._draft_limits(runner, slots, num_tokens, sampled_token_ids)
        bonus_token_ids = np.array([ids[-1] if ids else 0 for ids in sampled_token_ids], dtype=np.int64)
        if self._rows is None:
            self._rows = DraftRows(runner, self._step, self._layer_names)
        # Whatever the scheduler reserved: a draft may never write into a block that is not its request's.
        limits = np.minimum(limits, self._rows.allocated_tokens(len(slots)) - num_tokens + 1).clip(min=0)
        produced_bonus = self._produced_bonus(batch.req_ids, scheduler_output, sampled_token_ids)
        with self._rows.round(num_tokens - 1, self._round_context(sample_hidden_states[produced_bonus])):
            return draft_round(self._rows, self.policy, slots, bonus_token_ids, limits)

    @staticmethod
    def _produced_bonus(request_ids: list[str], scheduler_output: Any, emitted: list[list[int]]) -> torch.Tensor:
        """Return which row of `sample_hidden_states` each batch row's bonus token came from, [num_reqs] int64.

        A row has one for every scheduled draft, placeholders included, and one more.
        """
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        num_judged = np.array([len(scheduled.get(request_id, ())) + 1 for request_id in request_ids])
        num_emitted = np.array([len(tokens) for tokens in emitted])
        return torch.from_numpy(num_judged.cumsum() - num_judged + (num_emitted - 1).clip(min=0))

    def _assign_slots(self, runner: Any, request_ids: list[str]) -> np.ndarray:
        slots, new = self._slots.assign(request_ids)
        if new.any():
            self.policy.posterior.reset(slots[new])
        for row in np.flatnonzero(new).tolist():
            request, slot = runner.requests[request_ids[row]], slots[row]
            params = request.sampling_params
            budget = (
                params.max_tokens + request.num_prompt_tokens if params.max_tokens is not None else runner.max_model_len
            )
            self._token_budget[slot] = min(budget, runner.max_model_len)
            self._stop_token_ids[slot] = frozenset(params.all_stop_token_ids)
        return slots

    def _observe(
        self, batch: Any, scheduler_output: Any, slots: np.ndarray, num_tokens: np.ndarray, emitted: list
    ) -> None:
        """Count the round the target just verified; prompt chunks and first tokens are no rounds."""
        verified, accepted, rows = [], [], []
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        num_prompt_tokens = batch.num_prompt_tokens
        for row, request_id in enumerate(batch.req_ids):
            tokens = emitted[row]
            if not tokens or num_tokens[row] - len(tokens) <= num_prompt_tokens[row]:
                continue
            # vLLM marks placeholders, and drafts a grammar cut, with -1: the target did not judge those.
            draft = [token for token in scheduled.get(request_id, ()) if token >= 0]
            self.stats.count(request_id, draft, tokens)
            rows.append(row)
            verified.append(len(draft))
            accepted.append(len(tokens) - 1)
        if rows:
            self.policy.posterior.observe(slots[rows], np.array(verified), np.array(accepted))

    def _draft_limits(self, runner: Any, slots: np.ndarray, num_tokens: np.ndarray, emitted: list) -> np.ndarray:
        """Return the longest draft each row may have, [num_rows] int64.

        A round emits up to k + 1 tokens, which must fit the request's budget; a row that emitted nothing (a prompt
        chunk) or its last token drafts nothing, nor does one with a LoRA adapter (the draft step knows no adapters).
        """
        limits = np.minimum(self.num_speculative_tokens, self._token_budget[slots] - num_tokens - 1).clip(min=0)
        for row, tokens in enumerate(emitted):
            if not tokens or tokens[-1] in self._stop_token_ids[slots[row]]:
                limits[row] = 0
        if runner.lora_config and runner.input_batch.request_lora_mapping[: len(slots)].any():
            limits[:] = 0
        return limits


class DraftRows:
    """Runs draft steps for rows of the runner's batch on the target's own KV slots.

    The forward context and the input buffers are kept and updated in place; the attention metadata, which holds the
    kernel's own schedule, is built anew for every step.

    Args:
        runner: vLLM's GPUModelRunner, its KV cache initialised.
        step: the compiled draft step.
        layer_names: the attention layers a draft step runs through.
    """

    def __init__(self, runner: Any, step: DraftStep, layer_names: list[str]) -> None:
        self._step, self._layer_names = step, layer_names
        group_id, group = _attention_group(runner, layer_names)
        self._builder = group.get_metadata_builder()
        self._runner = runner
        self._block_table = runner.input_batch.block_table[group_id]
        max_num_reqs = runner.max_num_reqs
        self._input_ids = torch.zeros(max_num_reqs, dtype=torch.int64)
        self._positions = torch.zeros(max_num_reqs, dtype=torch.int64)
        self._slot_mapping = torch.zeros(max_num_reqs, dtype=torch.int64)
        self._seq_lens = torch.zeros(max_num_reqs, dtype=torch.int32)
        self._query_start_loc = torch.arange(max_num_reqs + 1, dtype=torch.int32)
        self._context = create_forward_context(None, runner.vllm_config)

    def allocated_tokens(self, num_rows: int) -> np.ndarray:
        """Return how many tokens the KV blocks of each row can hold, [num_rows] int64."""
        return self._block_table.num_blocks_per_row[:num_rows].astype(np.int64) * self._block_table.block_size

    def round(self, bonus_positions: np.ndarray, context: torch.Tensor | None) -> Any:
        """Prepare a round and return the context manager its steps run in.

        Args:
            bonus_positions: [num_rows] int64, where each row's bonus token stands.
            context: [num_rows, hidden_size], see `ExitHead.round_context`.
        """
        self._bonus_positions, self._round_context = bonus_positions, context
        return override_forward_context(self._context)

    def step(self, rows: np.ndarray, offset: int, token_ids: np.ndarray) -> tuple[np.ndarray, None]:
        """Return the next draft token of `rows`; see `vllm_eesd.drafting.DraftModel`."""
        num_rows = len(rows)
        positions = self._bonus_positions[rows] + offset
        block_size = self._block_table.block_size
        blocks = self._block_table.block_table.np
        self._input_ids[:num_rows].numpy()[:] = token_ids
        self._positions[:num_rows].numpy()[:] = positions
        self._seq_lens[:num_rows].numpy()[:] = positions + 1
        slot_mapping = self._slot_mapping[:num_rows]
        slot_mapping.numpy()[:] = blocks[rows, positions // block_size] * block_size + positions % block_size
        common = CommonAttentionMetadata(
            query_start_loc=self._query_start_loc[: num_rows + 1],
            query_start_loc_cpu=self._query_start_loc[: num_rows + 1],
            seq_lens=self._seq_lens[:num_rows],
            num_reqs=num_rows,
            num_actual_tokens=num_rows,
            max_query_len=1,
            max_seq_len=int(positions.max()) + 1,
            block_table_tensor=torch.from_numpy(blocks[rows]),
            slot_mapping=slot_mapping,
        )
        if self._runner.lora_config:
            # The target's last forward left its own token-to-adapter mapping; drafting rows have no adapter.
            self._runner._set_active_loras((0,) * num_rows, (0,) * num_rows, set())
        metadata = self._builder.build(0, common)
        self._context.attn_metadata = dict.fromkeys(self._layer_names, metadata)
        self._context.slot_mapping = dict.fromkeys(self._layer_names, slot_mapping)
        context = None if self._round_context is None else self._round_context[torch.from_numpy(rows)]
        drafted = self._step(self._input_ids[:num_rows], self._positions[:num_rows], context)
        return drafted.numpy(), None


def _attention_group(runner: Any, layer_names: list[str]) -> tuple[int, Any]:
    """Return (KV-cache group id, attention group) holding all these layers.

    Raises:
        ValueError: they are spread over several groups, so that one block table would not do.
    """
    for group_id, groups in enumerate(runner.attn_groups):
        for group in groups:
            if set(layer_names) <= set(group.layer_names):
                return group_id, group
    raise ValueError("eesd: the drafted layers are in different KV-cache groups (mixed attention kinds); not supported")
