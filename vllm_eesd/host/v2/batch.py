"""What EESD reads of a step of Model Runner V2 and of its requests: the only reader of their attributes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_eesd.kernels.reference.draft_inputs import TargetOutputs

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.states import RequestState


class RequestStates:
    """The runner's state of every running request, by its index there.

    Args:
        states: vLLM's.
    Source: vllm/v1/worker/gpu/states.py.
    """

    def __init__(self, states: RequestState) -> None:
        self._states = states

    @property
    def longest_draft(self) -> int:
        """K: draft tokens there is room for."""
        return self._states.num_speculative_steps

    def slots(self) -> np.ndarray:
        """Return the indices of all running requests, [num_requests] int64."""
        return np.array(list(self._states.req_id_to_index.values()), dtype=np.int64)

    def slot_of(self, req_id: str) -> int | None:
        """Return a request's index; None once it has ended."""
        return self._states.req_id_to_index.get(req_id)

    def slots_of(self, req_ids: Iterable[str]) -> list[int]:
        """Return the indices of running requests."""
        return [self._states.req_id_to_index[req_id] for req_id in req_ids]

    # On the device.

    @property
    def prefill_lens(self) -> torch.Tensor:
        """[max_num_reqs] int32, tokens of each request that come before its first draft."""
        return self._states.prefill_len.gpu

    @property
    def draft_tokens(self) -> torch.Tensor:
        """[max_num_reqs, K] int64, the drafts under verification."""
        return self._states.draft_tokens

    def texts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return every request's text, [max_num_reqs, max_model_len] int32, and its length, [max_num_reqs] int32."""
        return self._states.all_token_ids.gpu, self._states.total_len.gpu


@dataclass
class TargetStep:
    """The target's step that has just run.

    Attributes:
        last_hidden_states: [num_tokens, hidden_size], the target's normed output.
        num_sampled, num_rejected: [num_reqs] int32.
        last_sampled: [max_num_reqs, 1] int64, by request state.
    Source: vllm/v1/worker/gpu/input_batch.py.
    """

    _batch: InputBatch
    last_hidden_states: torch.Tensor
    num_sampled: torch.Tensor
    num_rejected: torch.Tensor
    last_sampled: torch.Tensor

    @property
    def num_reqs(self) -> int:
        """Rows of the batch."""
        return self._batch.num_reqs

    @property
    def num_tokens(self) -> int:
        """Tokens of the step's forward."""
        return self._batch.num_tokens

    @property
    def req_ids(self) -> list[str]:
        """Of the rows."""
        return self._batch.req_ids

    # On the host.

    def slots(self) -> np.ndarray:
        """Return each row's request state, [num_reqs] int64."""
        return self._batch.idx_mapping_np.astype(np.int64)

    def num_scheduled_drafts(self) -> np.ndarray:
        """Return how many draft tokens were scheduled for each row, [num_reqs]."""
        scheduled = self._batch.num_draft_tokens_per_req
        return np.zeros(len(self._batch.idx_mapping_np), dtype=np.int64) if scheduled is None else scheduled

    def decoded(self) -> np.ndarray:
        """Return which rows were no prompt chunks, [num_reqs] bool."""
        return ~self._batch.is_prefilling_np

    def only_decoded(self) -> bool:
        """Return whether every row ran one token, and emitted one: `decoded`, without drafts."""
        return self.num_tokens == self.num_reqs and bool(self.decoded().all())

    def reaches_end_of_prompt(self) -> np.ndarray:
        """Return which rows have run their whole prompt after this step, [num_reqs] bool.

        No prompt chunk has drafts: `RaggedVerification.compact_batch` has trimmed the placeholders of those.
        """
        num_computed = self._batch.num_computed_prefill_tokens_np + self._batch.num_scheduled_tokens
        return num_computed >= self._batch.prefill_len_np

    @property
    def seq_lens_upper_bound(self) -> torch.Tensor:
        """[at least num_reqs] int32 on the host, no less than each sequence's length."""
        return self._batch.seq_lens_cpu_upper_bound

    # On the device.

    @property
    def idx_mapping(self) -> torch.Tensor:
        """[num_reqs], each row's request state."""
        return self._batch.idx_mapping

    @property
    def seq_lens(self) -> torch.Tensor:
        """[num_reqs] int32, of each sequence with all drafts of the step."""
        return self._batch.seq_lens[: self.num_reqs]

    def outputs(self) -> TargetOutputs:
        """Return what the next round begins with, on the device."""
        query_start_loc = self._batch.query_start_loc[: self.num_reqs + 1]
        counts = self.num_sampled, self.num_rejected
        return TargetOutputs(self.idx_mapping, self.seq_lens, query_start_loc, *counts, self.last_sampled)
