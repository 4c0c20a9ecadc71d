"""Ragged verification on Model Runner V2: what the scheduler scheduled, trimmed to what each request drafted.

Under asynchronous scheduling vLLM schedules the longest draft for everybody and takes back what was not accepted. Its
adaptive verification trims that on the worker; this object stands in its place, with its interface. It knows every
draft's length on the host, so nothing about the batch is an estimate.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, get_args

import numpy as np
import torch

from vllm_eesd.host.compat import init_logger
from vllm_eesd.host.v2.batch import RequestStates
from vllm_eesd.host.v2.compat import (
    AdaptiveVerificationManager,
    CUDAGraphMode,
    async_tensor_h2d,
    get_varlen_cudagraph_unsupported_backend,
    sort_batch_req_ids,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
    from vllm.v1.worker.utils import AttentionGroup

logger = init_logger("vllm.eesd")


class RaggedVerification:
    """Trims every scheduled draft to the length its request drafted, 0 included.

    Args:
        states: the runner's.
        query_start_loc: [max_num_reqs + 1] int32, the runner's own input buffer.
        num_drafted: [max_num_reqs] int64, shared with the speculator: length of each request's draft.
        reallocate: vLLM's own `reallocate_drafts`, whose annotation says how many values the runner unpacks.
        names_logprobs: [max_num_reqs] bool, shared too: whose requests name the token ids of their logprobs.
    Source: vllm/v1/worker/gpu/spec_decode/adaptive_verification.py.
    """

    def __init__(
        self,
        states: RequestStates,
        query_start_loc: torch.Tensor,
        num_drafted: np.ndarray,
        reallocate: Callable[..., tuple] = AdaptiveVerificationManager.reallocate_drafts,
        names_logprobs: np.ndarray | None = None,
    ) -> None:
        self._names_logprobs = np.zeros(len(num_drafted), dtype=bool) if names_logprobs is None else names_logprobs
        self._num_values = _num_values(reallocate)
        self._states, self._query_start_loc, self._num_drafted = states, query_start_loc, num_drafted
        self._decode_query_len = states.longest_draft + 1
        #: Of the step being prepared, in batch order: [num_reqs] int32 draft tokens that are verified.
        self._num_verified = np.zeros(0, dtype=np.int32)
        self._cu_num_logits = np.zeros(1, dtype=np.int32)
        self._prepared = False

    def add_request(self, req_idx: int) -> None:
        """A request starts: it has drafted nothing, whatever placeholders the scheduler gives it."""
        self._num_drafted[req_idx] = 0

    def get_num_tokens(self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]) -> int:
        """Return the tokens of the step once its drafts are trimmed, and keep the lengths for the calls that follow.

        Args:
            num_tokens_per_req: scheduled, drafts included.
            draft_tokens: the scheduled drafts (or as many placeholders) of those that have any.
        """
        req_ids = sort_batch_req_ids(num_tokens_per_req, draft_tokens, self._decode_query_len)
        num_scheduled = np.array([len(draft_tokens.get(req_id, ())) for req_id in req_ids], dtype=np.int32)
        slots = self._states.slots_of(req_ids)
        if self._names_logprobs[slots].any():
            # vLLM's rejection sampler gives the likeliest tokens' logprobs to who named others (vLLM issue 42592); a
            # step without drafts is its plain sampler's.
            self._num_drafted[slots] = 0
        self._num_verified = np.minimum(num_scheduled, self._num_drafted[slots]).astype(np.int32)
        return sum(num_tokens_per_req.values()) - int((num_scheduled - self._num_verified).sum())

    def compact_batch(
        self, num_draft_tokens_per_req: np.ndarray, num_scheduled_tokens: np.ndarray, cu_num_logits_np: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return each request's trimmed token count, [num_reqs], and where its logits start, [num_reqs + 1].

        `num_scheduled_tokens` becomes the trimmed count: the runner keeps it as an upper bound and maps tokens to LoRA
        adapters by it.
        """
        self._cu_num_logits = np.zeros_like(cu_num_logits_np)
        np.cumsum(self._num_verified + 1, out=self._cu_num_logits[1:])
        num_scheduled_tokens -= num_draft_tokens_per_req - self._num_verified
        self._prepared = True
        return num_scheduled_tokens, self._cu_num_logits

    def take_num_logits(self, num_reqs: int) -> np.ndarray:
        """Return how many rows of logits each request has in the step just prepared, [num_reqs] int32; once a step."""
        prepared, self._prepared = self._prepared, False
        return np.diff(self._cu_num_logits) if prepared else np.ones(num_reqs, dtype=np.int32)

    def num_verified(self) -> list[int]:
        """Return how many drafts each row of the last step that had any was to verify, in batch order."""
        return self._num_verified.tolist()

    def reallocate_drafts(self, req_ids: list[str], idx_mapping: torch.Tensor) -> tuple:
        """Return where logits and queries start, on the device, and the drafts' sum; in vLLM 0.33 None as well.

        Queries: the runner has just filled query_start_loc from `compact_batch`. None: the host's counts are exact.
        """
        cu_num_logits = async_tensor_h2d(self._cu_num_logits, device=idx_mapping.device)
        values = cu_num_logits, self._query_start_loc, int(self._num_verified.sum()), None
        return values[: self._num_values]

    def record_confidences(self, confidence_probs: torch.Tensor, input_batch: object) -> None:
        """Nothing: lengths are the policy's."""

    def batches_to_profile(self, capture_sizes: list[int]) -> Iterator[dict[str, int]]:
        """Return no batches: costs are learned while serving."""
        return iter(())

    def set_initial_cost_curves(self, samples: list) -> None:
        """Nothing, for the same reason."""


def _num_values(reallocate: Callable[..., tuple]) -> int:
    """Return how many values `reallocate_drafts` returns by its annotation.

    Raises:
        RuntimeError: neither three (vLLM 0.32) nor four (0.33).
    """
    # Until vLLM 0.33: three. Then there is nothing to ask.
    annotation = inspect.signature(reallocate).return_annotation
    num_values = len(get_args(annotation))
    if num_values not in (3, 4):
        raise RuntimeError(
            f"eesd: vLLM's reallocate_drafts returns {annotation!r:.200}; this vllm-eesd knows tuples of 3 and 4 values"
        )
    return num_values


def use_graphs_for_ragged_batches(
    vllm_config: VllmConfig, attn_groups: list[list[AttentionGroup]], target_layer_names: set[str] | None
) -> None:
    """Have full CUDA graphs of verification replay ragged batches, or give them up where attention cannot.

    A full graph then holds one query length only, and EESD's batches have several.
    """
    compilation = vllm_config.compilation_config
    mode = compilation.cudagraph_mode
    if not (mode and mode.has_full_cudagraphs()):
        return
    longest = vllm_config.speculative_config.num_speculative_tokens + 1
    unsupported = get_varlen_cudagraph_unsupported_backend(
        attn_groups, vllm_config, longest, checked_layer_names=target_layer_names
    )
    if unsupported is not None:
        compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE
        logger.warning(
            "EESD: %s cannot replay batches of ragged drafts from full CUDA graphs; verification uses piecewise ones",
            unsupported[0],
        )
        return
    for group in (group for groups in attn_groups for group in groups):
        if target_layer_names is None or not target_layer_names.isdisjoint(group.layer_names):
            for builder in group.metadata_builders:
                plan_for_captured_queries(builder, longest)


def plan_for_captured_queries(builder: AttentionMetadataBuilder, longest: int) -> None:
    """Have attention that is planned ahead of a replay planned for the query length that its graph was captured with.

    FlashAttention 3 lays its plan out by `max_query_len`: for one token, and heads of up to 64 or more than 128, as
    attention without a mask, which a graph captured with drafts reads as something else. Its output is garbage then.

    Args:
        builder: of a group of the target's attention layers.
        longest: tokens of the longest query of a decoding request, with which full graphs are captured.
    Raises:
        RuntimeError: it is FlashAttention's and does not say whether it plans ahead.
    Source: vllm/v1/attention/backends/flash_attn.py; flash-attention, hopper/flash_api.cpp,
        mha_fwd_get_scheduler_metadata.
    """
    plans_ahead = getattr(builder, "aot_schedule", None)
    if plans_ahead is None and "flash_attn" in type(builder).__module__:
        raise RuntimeError(
            "eesd: this vLLM's FlashAttention does not say whether it plans steps ahead (aot_schedule), and full CUDA "
            'graphs could give wrong tokens; ask for "cudagraph_mode": "PIECEWISE", or install a newer vllm-eesd'
        )
    if not plans_ahead:
        return
    build = builder.build

    @functools.wraps(build)
    def build_as_captured(
        common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, *args: object, **kwargs: object
    ) -> object:
        if common_attn_metadata.max_query_len < longest:
            common_attn_metadata = dataclasses.replace(common_attn_metadata, max_query_len=longest)
        return build(common_prefix_len, common_attn_metadata, *args, **kwargs)

    builder.build = build_as_captured
