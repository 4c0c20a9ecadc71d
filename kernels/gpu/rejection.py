"""Verification of ragged drafts: greedy and sampled requests, one-hot and full draft distributions, in three launches.

1. `statistics_kernel`, grid (requests * K, vocabulary blocks): per draft row and block, the maximum with its token
   (greedy) or the maximum and the sum of exponentials of target and draft (sampled). Rows after a draft are skipped.
2. `_accept_kernel`, grid (requests,): merges the blocks, compares, counts, and writes the accepted drafts, and the
   target's own token where a greedy request refused one.
3. `_resample_kernel`, grid (requests, vocabulary blocks): argmax(log residual + Gumbel noise), or of the bonus row;
   the request's last program to arrive writes the token.
Block verification with full draft distributions has one launch more, `mass_kernel`, between 1 and 2.

Bytes: every draft's logits once (target's, and the draft's where it is not one-hot), one row per request more.
A NaN makes a row's sum NaN, so that its draft is refused, as vLLM does; NaN itself is never chosen.
"""

import torch
import triton
import triton.language as tl

from ..reference.rejection import Verified
from .noise import gumbel, step_seed, uniform
from .rejection_statistics import (
    MASS,
    STATISTICS_BLOCK,
    TARGET_MAX,
    Inputs,
    finite_max,
    judge_block,
    load_drafts,
    log_ratios,
    mass_kernel,
    statistics_kernel,
)

__all__ = ["rejection"]

# Logits per program where noise is drawn for every one of them; vLLM's size.
RESAMPLE_BLOCK = 1024
# Rows of the float32 workspace [3, num_reqs] about the refused draft.
TARGET_LSE, DRAFT_LSE, LOG_P = (tl.constexpr(i) for i in range(3))


@triton.jit
def _log1p(x):
    """log(1 + x) for x in (-1, 0] without cancellation; W. Kahan's quotient, exact up to a few last places."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / (u - 1.0)))


@triton.jit
def _accept_kernel(
    sampled_ptr,  # [num_reqs, K + 1]
    num_sampled_ptr,  # [num_reqs]
    refused_ptr,  # [3, num_reqs] float32: TARGET_LSE, DRAFT_LSE, LOG_P at the refused draft, for launch 3
    inputs,
    blocks_ptr,
    argmax_ptr,
    BLOCK_VERIFICATION: tl.constexpr,
    K_PADDED: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr,
):
    num_reqs, K, num_blocks = inputs.num_reqs, inputs.K, inputs.num_blocks
    request = tl.program_id(0)
    start = tl.load(inputs.cu_num_logits_ptr + request).to(tl.int64)
    num_drafts = (tl.load(inputs.cu_num_logits_ptr + request + 1) - start - 1).to(tl.int32)
    state = tl.load(inputs.idx_mapping_ptr + request).to(tl.int64)
    steps, blocks = tl.arange(0, K_PADDED), tl.arange(0, BLOCKS_PADDED)
    is_draft = steps < num_drafts
    drafts, valid = load_drafts(inputs.draft_sampled_ptr, start, num_drafts, K_PADDED)
    plane = num_reqs * K * num_blocks
    offsets = (request.to(tl.int64) * K + steps[:, None]) * num_blocks + blocks[None, :]
    offsets_mask = is_draft[:, None] & (blocks < num_blocks)[None, :]
    temperature = tl.load(inputs.temperature_ptr + state).to(tl.float32)
    num_accepted = num_drafts
    best = tl.full([K_PADDED], -1, tl.int64)
    if temperature == 0.0:
        maximum = tl.load(blocks_ptr + TARGET_MAX * plane + offsets, mask=offsets_mask, other=float("-inf"))
        _, block = tl.max(maximum, axis=1, return_indices=True)
        tokens = tl.load(argmax_ptr + offsets, mask=offsets_mask, other=0)
        best = tl.sum(tl.where(blocks[None, :] == block[:, None], tokens, 0), axis=1).to(tl.int64)
        num_accepted = tl.min(tl.where(is_draft & (drafts != best), steps, num_drafts), axis=0)
    else:
        log_p, log_q, target_lse, draft_lse = log_ratios(
            inputs, blocks_ptr, request, state, start, temperature, drafts, valid, K_PADDED, BLOCKS_PADDED
        )
        counters = tl.load(inputs.positions_ptr + start + steps, mask=is_draft, other=0).to(tl.int64)
        seed = tl.load(inputs.seeds_ptr + state)
        if BLOCK_VERIFICATION:
            # Tests after the accepted drafts count too, and their positions come again in the next round.
            seed = step_seed(seed, steps)
        tests = uniform(seed, counters)
        if BLOCK_VERIFICATION:
            num_accepted, joint = judge_block(
                log_p,
                log_q,
                valid,
                tests,
                blocks_ptr + MASS * plane,
                offsets + num_blocks,
                (steps + 1 < num_drafts)[:, None] & (blocks < num_blocks)[None, :],
                inputs.draft_logits_ptr is None,
                K_PADDED,
            )
            log_tau = tl.sum(tl.where(steps == num_accepted - 1, joint, 0.0), axis=0)
        else:
            accepted = valid & (log_p > tl.log(tests) + log_q)
            num_accepted = tl.min(tl.where(is_draft & (accepted == 0), steps, num_drafts), axis=0)
            log_tau = 0.0
        refused = refused_ptr + request
        tl.store(refused + TARGET_LSE * num_reqs, tl.sum(tl.where(steps == num_accepted, target_lse, 0.0), axis=0))
        tl.store(refused + DRAFT_LSE * num_reqs, tl.sum(tl.where(steps == num_accepted, draft_lse, 0.0), axis=0))
        tl.store(refused + LOG_P * num_reqs, log_tau)

    row = sampled_ptr + request.to(tl.int64) * (K + 1)
    tokens = tl.where(steps < num_accepted, drafts, tl.where((steps == num_accepted) & is_draft, best, -1))
    tl.store(row + steps, tokens, mask=steps < K)
    tl.store(row + K, -1)
    tl.store(num_sampled_ptr + request, num_accepted + 1)


@triton.jit
def _resample_kernel(
    sampled_ptr,
    num_sampled_ptr,
    refused_ptr,
    local_score_ptr,  # [num_reqs, num_tiles] float32
    local_token_ptr,  # [num_reqs, num_tiles] int32
    arrived_ptr,  # [num_reqs] int32, zero
    inputs,
    num_tiles,
    TILES_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    num_reqs = inputs.num_reqs
    request, block = tl.program_id(0), tl.program_id(1)
    num_accepted = tl.load(num_sampled_ptr + request) - 1
    token_row = tl.load(inputs.cu_num_logits_ptr + request).to(tl.int64) + num_accepted
    is_bonus = token_row == tl.load(inputs.cu_num_logits_ptr + request + 1) - 1
    state = tl.load(inputs.idx_mapping_ptr + request).to(tl.int64)
    temperature = tl.load(inputs.temperature_ptr + state).to(tl.float32)
    if (temperature == 0.0) & (is_bonus == 0):
        return  # the argmax is in place
    columns = block * BLOCK + tl.arange(0, BLOCK)
    mask = columns < inputs.vocab_size
    row = inputs.target_logits_ptr + token_row * inputs.target_stride
    logits = tl.load(row + columns, mask=mask, other=float("-inf")).to(tl.float32)
    if temperature != 0.0:
        logits = logits / temperature
        refused = tl.load(inputs.draft_sampled_ptr + token_row + 1, mask=is_bonus == 0, other=-1)
        if refused >= 0:
            if inputs.draft_logits_ptr is not None:
                # log max(p - q, 0) = log p + log1p(-q / p)
                log_p = logits - tl.load(refused_ptr + TARGET_LSE * num_reqs + request)
                log_p += tl.load(refused_ptr + LOG_P * num_reqs + request)
                row = (
                    inputs.draft_logits_ptr
                    + state * inputs.draft_stride_0
                    + num_accepted.to(tl.int64) * inputs.draft_stride_1
                )
                log_q = tl.load(row + columns, mask=mask, other=float("-inf")).to(tl.float32) / temperature
                log_q -= tl.load(refused_ptr + DRAFT_LSE * num_reqs + request)
                ratio = tl.exp(log_q - log_p)
                logits = tl.where(ratio < 1.0, log_p + _log1p(-ratio), float("-inf"))
            else:
                logits = tl.where(columns == refused, float("-inf"), logits)
        position = tl.load(inputs.positions_ptr + token_row).to(tl.int64)
        noise = gumbel(tl.load(inputs.seeds_ptr + state), position, columns.to(tl.int64))
        logits = tl.where(mask, logits + noise, float("-inf"))
    score, index = finite_max(logits)
    cell = request.to(tl.int64) * num_tiles
    tl.store(local_score_ptr + cell + block, score)
    tl.store(local_token_ptr + cell + block, block * BLOCK + index)
    # The stores above must be visible to the program that arrives last.
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + request, 1, sem="acq_rel", scope="gpu") == num_tiles - 1:
        tiles = tl.arange(0, TILES_PADDED)
        scores = tl.load(
            local_score_ptr + cell + tiles, mask=tiles < num_tiles, other=float("-inf"), cache_modifier=".cg"
        )
        winner = tl.argmax(scores, axis=0)
        tokens = tl.load(local_token_ptr + cell + tiles, mask=tiles < num_tiles, other=0, cache_modifier=".cg")
        token = tl.sum(tl.where(tiles == winner, tokens, 0), axis=0)
        tl.store(sampled_ptr + request.to(tl.int64) * (inputs.K + 1) + num_accepted, token.to(tl.int64))


def rejection(
    target_logits: torch.Tensor,
    draft_sampled: torch.Tensor,
    cu_num_logits: torch.Tensor,
    num_speculative_tokens: int,
    *,
    temperature: torch.Tensor,
    draft_logits: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    idx_mapping: torch.Tensor | None = None,
    block_verification: bool = False,
) -> Verified:
    """Return the tokens the target emits; see `reference.rejection.rejection`.

    Raises:
        ValueError: no noise.
    """
    if seeds is None or positions is None:
        raise ValueError("seeds, positions: None; verification needs both")
    assert target_logits.stride(-1) == 1 and (draft_logits is None or draft_logits.stride(-1) == 1)
    num_reqs, K = cu_num_logits.shape[0] - 1, num_speculative_tokens
    vocab_size = target_logits.shape[1] if draft_logits is None else min(target_logits.shape[1], draft_logits.shape[2])
    if idx_mapping is None:
        idx_mapping = torch.arange(num_reqs, device=target_logits.device)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return target_logits.new_empty(shape, dtype=dtype)

    verified = Verified(empty(num_reqs, K + 1, dtype=torch.int64), empty(num_reqs, dtype=torch.int32))
    draft_strides = draft_logits.stride()[:2] if draft_logits is not None else (0, 0)
    num_blocks = triton.cdiv(vocab_size, STATISTICS_BLOCK)
    sizes = (num_reqs, K, num_blocks)
    logits = target_logits, target_logits.stride(0), draft_logits, *draft_strides
    requests = draft_sampled, cu_num_logits, idx_mapping, temperature, positions, seeds
    inputs = Inputs(*logits, *requests, vocab_size, *sizes)
    blocks, argmax = empty(5, *sizes), empty(*sizes, dtype=torch.int32)
    arrived, refused = empty(num_reqs, dtype=torch.int32), empty(3, num_reqs)
    padded = {"K_PADDED": triton.next_power_of_2(K), "BLOCKS_PADDED": triton.next_power_of_2(num_blocks)}
    rows_and_blocks = (num_reqs * K, num_blocks)
    statistics_kernel[rows_and_blocks](inputs, blocks, argmax, arrived, BLOCK=STATISTICS_BLOCK, num_warps=8)
    if block_verification and draft_logits is not None:
        mass_kernel[rows_and_blocks](inputs, blocks, **padded, BLOCK=STATISTICS_BLOCK, num_warps=8)
    _accept_kernel[(num_reqs,)](
        *verified, refused, inputs, blocks, argmax, BLOCK_VERIFICATION=block_verification, **padded, num_warps=1
    )
    num_tiles = triton.cdiv(vocab_size, RESAMPLE_BLOCK)
    _resample_kernel[(num_reqs, num_tiles)](
        *verified,
        refused,
        empty(num_reqs, num_tiles),
        empty(num_reqs, num_tiles, dtype=torch.int32),
        arrived,
        inputs,
        num_tiles,
        TILES_PADDED=triton.next_power_of_2(num_tiles),
        BLOCK=RESAMPLE_BLOCK,
        num_warps=4,
    )
    return verified
