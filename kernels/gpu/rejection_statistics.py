"""First launch of `rejection.py`: what the drafts' rows sum up to, and how later launches read it.

`statistics_kernel`, grid (requests * K, vocabulary blocks), writes one number per plane and block; `log_ratios` merges
the blocks of one request. `mass_kernel`, of the same grid, runs for block verification with full draft distributions.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

# Logits per program: as in vLLM, so that sums are added in the same order and equal seeds give equal tokens.
STATISTICS_BLOCK = 8192
# Planes of the float32 workspace [5, num_reqs, K, blocks].
TARGET_MAX, TARGET_SUM, DRAFT_MAX, DRAFT_SUM, MASS = (tl.constexpr(i) for i in range(5))


class Inputs(NamedTuple):
    """What all launches read; Triton takes it as one argument.

    Attributes:
        target_logits_ptr: [num_logits, vocab_size].
        draft_logits_ptr: [max_num_reqs, K, vocab_size], or None.
        draft_sampled_ptr: [num_logits], each row's input token.
        cu_num_logits_ptr: [num_reqs + 1].
        idx_mapping_ptr: [num_reqs].
        temperature_ptr, seeds_ptr: [max_num_reqs].
        positions_ptr: [num_logits].
        num_blocks: of `STATISTICS_BLOCK` logits.
    """

    target_logits_ptr: torch.Tensor
    target_stride: int
    draft_logits_ptr: torch.Tensor | None
    draft_stride_0: int
    draft_stride_1: int
    draft_sampled_ptr: torch.Tensor
    cu_num_logits_ptr: torch.Tensor
    idx_mapping_ptr: torch.Tensor
    temperature_ptr: torch.Tensor
    positions_ptr: torch.Tensor
    seeds_ptr: torch.Tensor
    vocab_size: int
    num_reqs: int
    K: int
    num_blocks: int


@triton.jit
def finite_max(x):
    return tl.max(tl.where(x == x, x, float("-inf")), axis=0, return_indices=True)


@triton.jit
def _sum_exp(logits, maximum):
    """Sum of exponentials; NaN if a logit is."""
    return tl.where(maximum > float("-inf"), tl.sum(tl.exp(logits - maximum), axis=0), 0.0)


@triton.jit
def statistics_kernel(
    inputs,
    blocks_ptr,  # [5, num_reqs, K, num_blocks] float32
    argmax_ptr,  # [num_reqs, K, num_blocks] int32
    arrived_ptr,  # [num_reqs] int32, zeroed here for launch 3
    BLOCK: tl.constexpr,
):
    K, num_blocks = inputs.K, inputs.num_blocks
    request, step = tl.program_id(0) // K, tl.program_id(0) % K
    block = tl.program_id(1)
    if (step == 0) & (block == 0):
        tl.store(arrived_ptr + request, 0)
    start = tl.load(inputs.cu_num_logits_ptr + request).to(tl.int64)
    if step >= tl.load(inputs.cu_num_logits_ptr + request + 1) - start - 1:
        return
    state = tl.load(inputs.idx_mapping_ptr + request).to(tl.int64)
    temperature = tl.load(inputs.temperature_ptr + state).to(tl.float32)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    mask = columns < inputs.vocab_size
    cell = tl.program_id(0).to(tl.int64) * num_blocks + block
    plane = inputs.num_reqs * K * num_blocks
    row = inputs.target_logits_ptr + (start + step) * inputs.target_stride
    logits = tl.load(row + columns, mask=mask, other=float("-inf")).to(tl.float32)
    if temperature == 0.0:
        maximum, index = finite_max(logits)
        tl.store(blocks_ptr + TARGET_MAX * plane + cell, maximum)
        tl.store(argmax_ptr + cell, block * BLOCK + index)
    else:
        logits = logits / temperature
        maximum, _ = finite_max(logits)
        tl.store(blocks_ptr + TARGET_MAX * plane + cell, maximum)
        tl.store(blocks_ptr + TARGET_SUM * plane + cell, _sum_exp(logits, maximum))
        if inputs.draft_logits_ptr is not None:
            row = inputs.draft_logits_ptr + state * inputs.draft_stride_0 + step * inputs.draft_stride_1
            logits = tl.load(row + columns, mask=mask, other=float("-inf")).to(tl.float32) / temperature
            maximum, _ = finite_max(logits)
            tl.store(blocks_ptr + DRAFT_MAX * plane + cell, maximum)
            tl.store(blocks_ptr + DRAFT_SUM * plane + cell, _sum_exp(logits, maximum))


@triton.jit
def _log_sum_exp(max_ptr, sum_ptr, offsets, mask):
    """[K_PADDED] logsumexp of rows whose blocks are the second axis of `offsets`."""
    maximum = tl.load(max_ptr + offsets, mask=mask, other=float("-inf"))
    sums = tl.load(sum_ptr + offsets, mask=mask, other=0.0)
    top = tl.max(maximum, axis=1)
    return top + tl.log(tl.sum(sums * tl.exp(maximum - top[:, None]), axis=1))


@triton.jit
def log_ratios(
    inputs,
    blocks_ptr,
    request,
    state,
    start,
    temperature,
    drafts,  # [K_PADDED] int64
    valid,
    K_PADDED: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr,
):
    """([K_PADDED] log p of the drafts, log q, target's logsumexp, draft's) of one sampled request."""
    K, num_blocks = inputs.K, inputs.num_blocks
    steps, blocks = tl.arange(0, K_PADDED), tl.arange(0, BLOCKS_PADDED)
    plane = inputs.num_reqs * K * num_blocks
    offsets = (request.to(tl.int64) * K + steps[:, None]) * num_blocks + blocks[None, :]
    mask = valid[:, None] & (blocks < num_blocks)[None, :]
    target_lse = _log_sum_exp(blocks_ptr + TARGET_MAX * plane, blocks_ptr + TARGET_SUM * plane, offsets, mask)
    rows = inputs.target_logits_ptr + (start + steps) * inputs.target_stride
    log_p = tl.load(rows + drafts, mask=valid, other=0.0).to(tl.float32) / temperature - target_lse
    if inputs.draft_logits_ptr is not None:
        draft_lse = _log_sum_exp(blocks_ptr + DRAFT_MAX * plane, blocks_ptr + DRAFT_SUM * plane, offsets, mask)
        rows = inputs.draft_logits_ptr + state * inputs.draft_stride_0 + steps.to(tl.int64) * inputs.draft_stride_1
        log_q = tl.load(rows + drafts, mask=valid, other=0.0).to(tl.float32) / temperature - draft_lse
    else:
        draft_lse = target_lse * 0.0
        log_q = draft_lse
    return log_p, log_q, target_lse, draft_lse


@triton.jit
def cumulative(log_ratio, valid, K_PADDED: tl.constexpr):
    """[K_PADDED] log p_i of block verification, p_i = min(p_{i-1} * ratio_i, 1): a walk reflected at 0."""
    steps = tl.arange(0, K_PADDED)
    before = (steps[None, :] <= steps[:, None]) & valid[None, :]
    walk = tl.sum(tl.where(before, log_ratio[None, :], 0.0), axis=1)
    highest = tl.max(tl.where(before, walk[None, :], 0.0), axis=1)
    return walk - tl.maximum(highest, 0.0)


@triton.jit
def judge_block(
    log_p, log_q, valid, tests, mass_ptr, offsets, offsets_mask, ONE_HOT: tl.constexpr, K_PADDED: tl.constexpr
):
    """(accepted drafts, [K_PADDED] log p_i) by block verification; arXiv 2403.10444, algorithm 2."""
    steps = tl.arange(0, K_PADDED)
    joint = cumulative(log_p - log_q, valid, K_PADDED)
    p = tl.exp(joint)
    is_next = steps[None, :] == steps[:, None] + 1
    if ONE_HOT:
        # A certain draft leaves p without its token.
        mass = p * (1.0 - tl.exp(tl.sum(tl.where(is_next, log_p[None, :], 0.0), axis=1)))
    else:
        mass = tl.sum(tl.load(mass_ptr + offsets, mask=offsets_mask, other=0.0), axis=1)
    next_valid = tl.sum(tl.where(is_next & valid[None, :], 1, 0), axis=1) > 0
    share = tl.where(mass + 1.0 - p > 0.0, mass / (mass + 1.0 - p), 1.0)
    threshold = tl.where(next_valid, share, p)
    return tl.max(tl.where(valid & (tests <= threshold), steps + 1, 0), axis=0), joint


@triton.jit
def load_drafts(draft_sampled_ptr, start, num_drafts, K_PADDED: tl.constexpr):
    """([K_PADDED] drafts, whether the target judges them: in the draft, no placeholder before or at)."""
    steps = tl.arange(0, K_PADDED)
    drafts = tl.load(draft_sampled_ptr + start + steps + 1, mask=steps < num_drafts, other=-1).to(tl.int64)
    first_gap = tl.min(tl.where(drafts < 0, steps, K_PADDED), axis=0)
    return drafts, steps < first_gap


@triton.jit
def mass_kernel(
    inputs,
    blocks_ptr,
    K_PADDED: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a block's share of sum max(p_i p - q, 0) at step i + 1, which decides about stopping at i."""
    K, num_blocks = inputs.K, inputs.num_blocks
    request, step = tl.program_id(0) // K, tl.program_id(0) % K
    start = tl.load(inputs.cu_num_logits_ptr + request).to(tl.int64)
    num_drafts = tl.load(inputs.cu_num_logits_ptr + request + 1) - start - 1
    state = tl.load(inputs.idx_mapping_ptr + request).to(tl.int64)
    temperature = tl.load(inputs.temperature_ptr + state).to(tl.float32)
    if (step == 0) | (step >= num_drafts) | (temperature == 0.0):
        return
    drafts, valid = load_drafts(inputs.draft_sampled_ptr, start, num_drafts, K_PADDED)
    log_p, log_q, target_lse, draft_lse = log_ratios(
        inputs, blocks_ptr, request, state, start, temperature, drafts, valid, K_PADDED, BLOCKS_PADDED
    )
    steps = tl.arange(0, K_PADDED)
    joint = cumulative(log_p - log_q, valid, K_PADDED)
    shift = tl.sum(tl.where(steps == step - 1, joint, 0.0), axis=0)
    shift -= tl.sum(tl.where(steps == step, target_lse, 0.0), axis=0)
    draft_shift = tl.sum(tl.where(steps == step, draft_lse, 0.0), axis=0)
    block = tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    mask = columns < inputs.vocab_size
    row = inputs.target_logits_ptr + (start + step) * inputs.target_stride
    p = tl.exp(tl.load(row + columns, mask=mask, other=float("-inf")).to(tl.float32) / temperature + shift)
    row = inputs.draft_logits_ptr + state * inputs.draft_stride_0 + step * inputs.draft_stride_1
    q = tl.exp(tl.load(row + columns, mask=mask, other=float("-inf")).to(tl.float32) / temperature - draft_shift)
    cell = tl.program_id(0).to(tl.int64) * num_blocks + block
    plane = inputs.num_reqs * K * num_blocks
    tl.store(blocks_ptr + MASS * plane + cell, tl.sum(tl.maximum(p - q, 0.0), axis=0))
