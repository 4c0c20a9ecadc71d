"""Placeholder drafts (-1) on a CPU: rejected, as vLLM's own GPU kernels reject them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def reject_placeholders(
    rejection_sample: Callable[..., torch.Tensor],
    draft_token_ids: torch.Tensor,
    num_draft_tokens: list[int],
    max_spec_len: int,
    cu_num_draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Return what vLLM's `rejection_sample` returns, with every draft of -1 rejected.

    vLLM 0.32 pads a request that joins a decoding batch with one token by K drafts of -1. Its CPU kernel looks up the
    probability of token -1, which is that of the row before's last token, and accepts by it.
    Token 0 stands in for a row's first placeholder: one-hot verification of any token leaves the target's distribution
    as it is. What follows was computed after a token that was not drafted, and is cut.

    Args:
        rejection_sample: vLLM's own; the other arguments are its.
        draft_token_ids: [num_tokens] int32.
        cu_num_draft_tokens: [num_reqs] int32, inclusive.
        draft_probs: [num_tokens, vocab_size] float32; None verifies one-hot.
    Returns:
        [num_reqs, max_spec_len + 1] int32, -1 after the tokens emitted.
    Source: vllm/v1/core/sched/scheduler.py, pad_spec_decode; rejection_random_sample_kernel in
        vllm/v1/sample/rejection_sampler.py.
    """
    placeholder = draft_token_ids < 0
    judged = num_draft_tokens, max_spec_len, cu_num_draft_tokens
    if not placeholder.any():
        return rejection_sample(draft_token_ids, *judged, draft_probs, *args, **kwargs)
    if draft_probs is not None:
        one_hot = (torch.arange(draft_probs.shape[-1]) == 0).to(draft_probs.dtype)
        draft_probs = draft_probs.where(~placeholder[:, None], one_hot)
    output_token_ids = rejection_sample(draft_token_ids.clamp(min=0), *judged, draft_probs, *args, **kwargs)
    num_drafts = torch.tensor(num_draft_tokens)
    rows = torch.arange(len(num_drafts)).repeat_interleave(num_drafts)
    columns = torch.arange(len(rows)) - (num_drafts.cumsum(0) - num_drafts)[rows]
    last = torch.full_like(num_drafts, max_spec_len)
    last.scatter_reduce_(0, rows[placeholder], columns[placeholder], "amin")
    return output_token_ids.masked_fill(torch.arange(max_spec_len + 1) > last[:, None], -1)
