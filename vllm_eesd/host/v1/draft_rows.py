"""Draft steps for rows of Model Runner V1's batch, on the target's own KV slots."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_eesd.host.adapters import without_adapters
from vllm_eesd.host.compat import CommonAttentionMetadata, create_forward_context, override_forward_context
from vllm_eesd.host.model.draft_step import DraftStep
from vllm_eesd.host.v1.batch import block_table_of
from vllm_eesd.host.v1.draft_sampling import DraftSampling

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.utils import AttentionGroup


class DraftRows:
    """Runs draft steps for rows of the runner's batch on the target's own KV slots.

    The forward context and the input buffers are kept and updated in place; the attention metadata, which holds the
    kernel's own schedule, is built anew for every step.

    Args:
        runner: vLLM's GPUModelRunner, its KV cache initialised.
        step: the compiled draft step.
        layer_names: the attention layers a draft step runs through.
        sampling: draws the tokens; None takes the most probable ones.
    """

    def __init__(
        self, runner: GPUModelRunner, step: DraftStep, layer_names: list[str], sampling: DraftSampling | None = None
    ) -> None:
        self._step, self._layer_names, self._sampling = step, layer_names, sampling
        #: (rows, ms) of the draft steps of the last round, each with the decision before it (the first's belongs to
        #: the round), because that is what one step more costs.
        self.step_times: list[tuple[int, float]] = []
        self._step_ended = 0.0
        #: Tokens of the last round drafted from hidden states that held infinities or NaN.
        self.num_not_finite = 0
        group_id, group = _attention_group(runner, layer_names)
        self._builder = group.get_metadata_builder()
        self._runner = runner
        self._block_table = block_table_of(runner, group_id)
        self._vocab_size = runner.model_config.get_vocab_size()
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

    def round(
        self, input_positions: np.ndarray, input_hidden_states: Callable[[], torch.Tensor]
    ) -> AbstractContextManager[None]:
        """Prepare a round and return the context manager its steps run in.

        Args:
            input_positions: [num_rows] int64, where each row's input token stands.
            input_hidden_states: returns [num_rows, hidden_size], see `ExitHead.round_context`; called if the head
                wants it.
        """
        self._input_positions, self._input_hidden_states = input_positions, input_hidden_states
        self.step_times, self.num_not_finite = [], 0
        return override_forward_context(self._context)

    def step(self, rows: np.ndarray, offset: int, token_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the next draft token of `rows` and its confidence; see `vllm_eesd.round.draft.DraftModel`."""
        round_context = self._context_of(rows, offset)
        began = self._step_ended if offset else time.perf_counter()
        num_rows = len(rows)
        positions = self._input_positions[rows] + offset
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
        without_adapters(self._runner, num_rows)
        metadata = self._builder.build(0, common)
        self._context.attn_metadata = dict.fromkeys(self._layer_names, metadata)
        self._context.slot_mapping = dict.fromkeys(self._layer_names, slot_mapping)
        best, confidence, logits = self._step(self._input_ids[:num_rows], self._positions[:num_rows], round_context)
        # argmax over NaNs is unspecified; clamp it so that the embedding lookup stays in range.
        drafted, confidence = best.numpy().clip(0, self._vocab_size - 1), confidence.numpy()
        self.num_not_finite += int(np.isnan(confidence).sum())
        if self._sampling is not None:
            drafted, confidence = self._sampling.draw(rows, logits, drafted, confidence, self._step.whole)
        self._step_ended = time.perf_counter()
        self.step_times.append((num_rows, (self._step_ended - began) * 1e3))
        return drafted, confidence

    def _context_of(self, rows: np.ndarray, offset: int) -> torch.Tensor | None:
        if not self._step.reads_target_output:
            return None
        if offset == 0:
            self._round_context = self._step.round_context(self._input_hidden_states())
        if self._round_context is None or len(rows) == len(self._input_positions):
            return self._round_context
        return self._round_context[torch.from_numpy(rows)]


def _attention_group(runner: GPUModelRunner, layer_names: list[str]) -> tuple[int, AttentionGroup]:
    """Return (KV-cache group id, attention group) holding all these layers.

    Raises:
        ValueError: they are spread over several groups, so that one block table would not do.
    """
    for group_id, groups in enumerate(runner.attn_groups):
        for group in groups:
            if set(layer_names) <= set(group.layer_names):
                return group_id, group
    raise ValueError("eesd: the drafted layers are in different KV-cache groups (mixed attention kinds); not supported")
