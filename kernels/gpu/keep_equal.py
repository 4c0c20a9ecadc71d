"""Verification by equality, where the target's tokens are drawn already: one launch, a program for each request."""

import torch
import triton
import triton.language as tl

__all__ = ["keep_equal"]


@triton.jit
def _keep_equal_kernel(
    sampled_ptr,  # [num_reqs, K + 1]
    sampled_stride,
    num_sampled_ptr,
    tokens_ptr,
    draft_sampled_ptr,
    cu_num_logits_ptr,
    chosen_ptr,  # [num_reqs] bool or None
    width,
    WIDTH_PADDED: tl.constexpr,
):
    request = tl.program_id(0)
    if chosen_ptr is not None:
        if tl.load(chosen_ptr + request) == 0:
            return
    start = tl.load(cu_num_logits_ptr + request).to(tl.int64)
    num_drafts = (tl.load(cu_num_logits_ptr + request + 1) - start - 1).to(tl.int32)
    steps = tl.arange(0, WIDTH_PADDED)
    is_draft = steps < num_drafts
    tokens = tl.load(tokens_ptr + start + steps, mask=steps <= num_drafts, other=-1)
    drafts = tl.load(draft_sampled_ptr + start + steps + 1, mask=is_draft, other=-1).to(tl.int64)
    accepted = tl.min(tl.where(is_draft & (tokens != drafts), steps, num_drafts), axis=0)
    row = sampled_ptr + request.to(tl.int64) * sampled_stride
    tl.store(row + steps, tl.where(steps <= accepted, tokens, -1), mask=steps < width)
    tl.store(num_sampled_ptr + request, accepted + 1)


def keep_equal(
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
    tokens: torch.Tensor,
    draft_sampled: torch.Tensor,
    cu_num_logits: torch.Tensor,
    chosen: torch.Tensor | None = None,
) -> None:
    """Write what requests emit; see `reference.keep_equal.keep_equal`."""
    num_reqs, width = sampled.shape
    _keep_equal_kernel[(num_reqs,)](
        sampled,
        sampled.stride(0),
        num_sampled,
        tokens,
        draft_sampled,
        cu_num_logits,
        chosen,
        width,
        WIDTH_PADDED=triton.next_power_of_2(width),
        num_warps=1,
    )
