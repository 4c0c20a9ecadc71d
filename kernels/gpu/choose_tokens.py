"""The choice of a token from logits, with what it says about confidence; also the second half of `exit_head.py`.

Every tile of a row's vocabulary writes five statistics and its best token (`tile_statistics`, inside whichever kernel
has the logits in registers); `_reduce_kernel`, grid (rows,), merges the tiles. `_choose_kernel`, grid (vocabulary
tiles, rows), is the one for logits that are in memory: it reads each of them once.
"""

import torch
import triton
import triton.language as tl

from ..cpu.exit_head import DraftTokens, Sampling
from .noise import DRAFT_SALT, gumbel

# Logits a program of `_choose_kernel` looks at: enough to hide a load's latency, few enough to stay in registers.
CHOOSE_BLOCK = 2048


@triton.jit
def tile_statistics(
    logits,  # [BLOCK_V, BLOCK_T] float32, -inf outside the vocabulary
    columns,  # [BLOCK_V] int64
    tokens,  # [BLOCK_T] int64
    token_mask,
    d2t_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    exponentials_ptr,
    exponentials_stride,
    idx_mapping_ptr,
    statistics_ptr,
    token_ids_ptr,
    num_tokens,
    vocab_size,
    first_token_id,
):
    """Write SCORE, MAXIMUM, SECOND, SUMEXP, WEIGHTED and the best token id of one tile."""
    # A NaN must neither win nor lead an argmax out of the vocabulary.
    logits = tl.where(logits == logits, logits, float("-inf"))
    maximum, index = tl.max(logits, axis=0, return_indices=True)
    local = tl.arange(0, logits.shape[0])
    second = tl.max(tl.where(local[:, None] == index[None, :], float("-inf"), logits), axis=0)
    shifted = logits - tl.where(maximum == float("-inf"), 0.0, maximum)[None, :]
    exponential = tl.exp(shifted)
    sumexp = tl.sum(exponential, axis=0)
    weighted = tl.sum(tl.where(exponential > 0.0, exponential * shifted, 0.0), axis=0)

    column_mask = columns < vocab_size
    if d2t_ptr is not None:
        target_ids = tl.load(d2t_ptr + columns, mask=column_mask, other=0)
    else:
        target_ids = columns + first_token_id
    score = maximum
    if temperature_ptr is not None:
        request = tl.load(idx_mapping_ptr + tokens, mask=token_mask, other=-1).to(tl.int64)
        is_request = request >= 0
        temperature = tl.load(temperature_ptr + request, mask=is_request, other=0.0).to(tl.float32)
        if seeds_ptr is not None:
            seed = tl.load(seeds_ptr + request, mask=is_request, other=0)
            position = tl.load(positions_ptr + tokens, mask=token_mask, other=0).to(tl.int64) + DRAFT_SALT
            noise = gumbel(seed[None, :], position[None, :], target_ids[:, None])
        else:
            draws = exponentials_ptr + tokens[None, :] * exponentials_stride + columns[:, None]
            noise = -tl.log(tl.load(draws, mask=token_mask[None, :] & column_mask[:, None], other=1.0))
        is_greedy = temperature == 0.0
        sampled = logits / tl.where(is_greedy, 1.0, temperature)[None, :] + noise
        scores = tl.where(is_greedy[None, :], logits, sampled)
        scores = tl.where(column_mask[:, None], scores, float("-inf"))
        score, index = tl.max(scores, axis=0, return_indices=True)
    best = tl.sum(tl.where(local[:, None] == index[None, :], target_ids[:, None], 0), axis=0)

    row = tl.program_id(0).to(tl.int64) * num_tokens + tokens
    tl.store(token_ids_ptr + row, best, mask=token_mask)
    tl.store(statistics_ptr + row * 5, score, mask=token_mask)
    tl.store(statistics_ptr + row * 5 + 1, maximum, mask=token_mask)
    tl.store(statistics_ptr + row * 5 + 2, second, mask=token_mask)
    tl.store(statistics_ptr + row * 5 + 3, sumexp, mask=token_mask)
    tl.store(statistics_ptr + row * 5 + 4, weighted, mask=token_mask)


@triton.jit
def _choose_kernel(
    logits_ptr,  # [num_tokens, vocab_size]
    logits_stride,
    d2t_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    exponentials_ptr,
    exponentials_stride,
    idx_mapping_ptr,
    statistics_ptr,
    token_ids_ptr,
    num_tokens,
    vocab_size,
    first_token_id,
    BLOCK_V: tl.constexpr,
):
    columns = tl.program_id(0).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
    tokens = tl.program_id(1).to(tl.int64) + tl.arange(0, 1)
    row = logits_ptr + tokens[None, :] * logits_stride + columns[:, None]
    logits = tl.load(row, mask=columns[:, None] < vocab_size, other=float("-inf")).to(tl.float32)
    tile_statistics(
        logits,
        columns,
        tokens,
        tokens < num_tokens,
        d2t_ptr,
        temperature_ptr,
        seeds_ptr,
        positions_ptr,
        exponentials_ptr,
        exponentials_stride,
        idx_mapping_ptr,
        statistics_ptr,
        token_ids_ptr,
        num_tokens,
        vocab_size,
        first_token_id,
    )


@triton.jit
def _reduce_kernel(
    statistics_ptr,  # [num_tiles, num_tokens, 5]
    token_ids_ptr,  # [num_tiles, num_tokens]
    merged_ptr,  # [9, num_tokens]: the five statistics, then logsumexp, top1_prob, margin, entropy
    best_ptr,  # [num_tokens] int64
    num_tiles,
    num_tokens,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, BLOCK)
    mask = tile < num_tiles
    row = tile.to(tl.int64) * num_tokens + token
    maximum = tl.load(statistics_ptr + row * 5 + 1, mask=mask, other=float("-inf"))
    top, leader = tl.max(maximum, axis=0, return_indices=True)
    second = tl.load(statistics_ptr + row * 5 + 2, mask=mask, other=float("-inf"))
    second = tl.max(tl.where(tile == leader, second, maximum), axis=0)
    # A tile without any mass (all -inf) must not turn 0 into NaN.
    empty = maximum == float("-inf")
    shift = tl.where(empty, 0.0, maximum - top)
    factor = tl.where(empty, 0.0, tl.exp(shift))
    sumexp = tl.load(statistics_ptr + row * 5 + 3, mask=mask, other=0.0)
    weighted = tl.load(statistics_ptr + row * 5 + 4, mask=mask, other=0.0)
    weighted = tl.sum(factor * (weighted + shift * sumexp), axis=0)
    sumexp = tl.sum(factor * sumexp, axis=0)
    score, winner = tl.max(
        tl.load(statistics_ptr + row * 5, mask=mask, other=float("-inf")), axis=0, return_indices=True
    )
    tl.store(best_ptr + token, tl.load(token_ids_ptr + winner.to(tl.int64) * num_tokens + token))
    tl.store(merged_ptr + token, score)
    tl.store(merged_ptr + num_tokens + token, top)
    tl.store(merged_ptr + 2 * num_tokens + token, second)
    tl.store(merged_ptr + 3 * num_tokens + token, sumexp)
    tl.store(merged_ptr + 4 * num_tokens + token, weighted)
    tl.store(merged_ptr + 5 * num_tokens + token, top + tl.log(sumexp))
    tl.store(merged_ptr + 6 * num_tokens + token, 1.0 / sumexp)
    tl.store(merged_ptr + 7 * num_tokens + token, top - second)
    tl.store(merged_ptr + 8 * num_tokens + token, tl.log(sumexp) - weighted / sumexp)


def sampling_arguments(sampling: Sampling | None, num_tokens: int) -> tuple:
    if sampling is None:
        return (None, None, None, None, 0, None)
    temperature, seeds, positions, exponentials, idx_mapping, _ = sampling.checked(num_tokens)
    if exponentials is not None:
        return (temperature, None, None, exponentials, exponentials.stride(0), idx_mapping)
    return (temperature, seeds, positions, None, 0, idx_mapping)


def reduce_tiles(statistics: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    num_tiles, num_tokens = token_ids.shape
    merged = statistics.new_empty(9, num_tokens)
    best = token_ids.new_empty(num_tokens)
    block = triton.next_power_of_2(num_tiles)
    _reduce_kernel[(num_tokens,)](
        statistics, token_ids, merged, best, num_tiles, num_tokens, BLOCK=block, num_warps=4 if block <= 1024 else 8
    )
    return merged, best


def workspace(like: torch.Tensor, num_tiles: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    statistics = like.new_empty(num_tiles, num_tokens, 5, dtype=torch.float32)
    return statistics, like.new_empty(num_tiles, num_tokens, dtype=torch.int64)


def named(merged: torch.Tensor, best: torch.Tensor, confidence: bool, entropy: bool) -> DraftTokens:
    if not (confidence or entropy):
        return DraftTokens(best)
    return DraftTokens(best, *merged[5:8], merged[8] if entropy else None)


def choose(logits, sampling, d2t, first_token_id) -> tuple[torch.Tensor, torch.Tensor]:
    assert logits.stride(-1) == 1
    num_tokens, vocab_size = logits.shape
    grid = (triton.cdiv(vocab_size, CHOOSE_BLOCK), num_tokens)
    statistics, token_ids = workspace(logits, grid[0], num_tokens)
    _choose_kernel[grid](
        logits,
        logits.stride(0),
        d2t,
        *sampling_arguments(sampling, num_tokens),
        statistics,
        token_ids,
        num_tokens,
        vocab_size,
        first_token_id,
        BLOCK_V=CHOOSE_BLOCK,
        num_warps=4,
    )
    return reduce_tiles(statistics, token_ids)


def choose_tokens(
    logits: torch.Tensor,
    *,
    sampling: Sampling | None = None,
    d2t: torch.Tensor | None = None,
    confidence: bool = False,
    entropy: bool = False,
) -> DraftTokens:
    """Return what `exit_head` makes of logits that are there already; see `cpu.exit_head.choose_tokens`."""
    return named(*choose(logits, sampling, d2t, 0), confidence, entropy)
