"""Norm, LM head and the choice of a token in one pass over the LM head's weight.

    logits = (norm_weight * x / rms(x)) @ weight.T,  token = argmax(logits)  or  argmax(logits / T + Gumbel noise)

Grid of `_exit_head_kernel`: (vocabulary tiles, row tiles). A program multiplies its tile of the weight with its rows,
sums their squares on the way (rms is a factor of the whole row, so the product need not wait for it), and writes five
statistics and one token id per row. `_reduce_kernel`, grid (rows,), merges the tiles. Two launches. The logits reach
memory only if asked for. Bytes: vocab_size * hidden_size * (bytes of the weight) + small change.

From `CUBLAS_FROM` rows on, the product is compute-bound: torch multiplies, and `_choose_kernel` reads the logits.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from .exit_head_reference import DraftTokens, Partials, Sampling, merge_partials, store_logits
from .noise import DRAFT_SALT, gumbel

__all__ = ["DraftTokens", "Partials", "Sampling", "choose_tokens", "exit_head", "exit_head_partials", "merge_partials"]

# Rows from which cuBLAS and a reduction are taken instead. Assumed: not yet measured on a GPU.
CUBLAS_FROM = 128
# Logits a program of `_choose_kernel` looks at: enough to hide a load's latency, few enough to stay in registers.
CHOOSE_BLOCK = 2048


class Tiles(NamedTuple):
    """Block sizes of `_exit_head_kernel`."""

    block_t: int  # rows of hidden states; 1 multiplies without tensor cores
    block_v: int  # rows of the weight
    block_h: int  # columns of both per step
    num_warps: int
    num_stages: int


def tiles(num_tokens: int, weight_bytes: int) -> Tiles:
    """Return the block sizes for so many rows and bytes per weight.

    Small batches are bound by memory: many bytes in flight, a weight tile read once. float32 multiplies without tensor
    cores, where the accumulator must leave registers for both operands.
    """
    if num_tokens == 1:
        return Tiles(1, 32, 1024 // (4 * weight_bytes), 4, 2)
    if weight_bytes == 4:
        return Tiles(16, 64, 32, 4, 3)
    if num_tokens <= 32:
        return Tiles(16 if num_tokens <= 16 else 32, 64, 128, 4, 4)
    return Tiles(64, 64, 64, 8, 3)


@triton.jit
def _tile_statistics(
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
def _exit_head_kernel(
    hidden_ptr,  # [num_tokens, hidden_size]
    hidden_stride,
    weight_ptr,  # [vocab_size, hidden_size]
    weight_stride,
    norm_weight_ptr,  # [hidden_size] or None
    weight_scale_ptr,  # [vocab_size] or None
    logits_out_ptr,  # [num_tokens, target's vocab_size] or None
    logits_out_stride,
    d2t_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    exponentials_ptr,
    exponentials_stride,
    idx_mapping_ptr,
    statistics_ptr,  # [vocabulary tiles, num_tokens, 5]
    token_ids_ptr,  # [vocabulary tiles, num_tokens]
    num_tokens,
    vocab_size,
    hidden_size,
    first_token_id,
    eps,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    columns = tl.program_id(0).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
    tokens = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column_mask, token_mask = columns < vocab_size, tokens < num_tokens
    steps = tl.arange(0, BLOCK_H)
    squares = tl.zeros([BLOCK_T], tl.float32)
    logits = tl.zeros([BLOCK_V, BLOCK_T], tl.float32)
    for start in range(0, hidden_size, BLOCK_H):
        h = start + steps
        h_mask = h < hidden_size
        w = tl.load(
            weight_ptr + columns[:, None] * weight_stride + h[None, :],
            mask=column_mask[:, None] & h_mask[None, :],
            other=0.0,
        )
        x = tl.load(
            hidden_ptr + tokens[None, :] * hidden_stride + h[:, None],
            mask=token_mask[None, :] & h_mask[:, None],
            other=0.0,
        )
        wide = x.to(tl.float32)
        if norm_weight_ptr is not None:
            squares += tl.sum(wide * wide, axis=0)
            wide *= tl.load(norm_weight_ptr + h, mask=h_mask, other=0.0).to(tl.float32)[:, None]
        if BLOCK_T == 1:
            product = w.to(tl.float32) * tl.reshape(wide, [1, BLOCK_H])
            logits += tl.sum(product, axis=1)[:, None]
        else:
            logits = tl.dot(w.to(x.dtype), wide.to(x.dtype), acc=logits, input_precision="ieee", out_dtype=tl.float32)
    if norm_weight_ptr is not None:
        logits *= tl.rsqrt(squares / hidden_size + eps)[None, :]
    if weight_scale_ptr is not None:
        logits *= tl.load(weight_scale_ptr + columns, mask=column_mask, other=0.0)[:, None]
    rounded = logits.to(hidden_ptr.dtype.element_ty)
    if logits_out_ptr is not None:
        targets = columns + first_token_id
        if d2t_ptr is not None:
            targets = tl.load(d2t_ptr + columns, mask=column_mask, other=0)
        tl.store(
            logits_out_ptr + tokens[None, :] * logits_out_stride + targets[:, None],
            rounded.to(logits_out_ptr.dtype.element_ty),
            mask=token_mask[None, :] & column_mask[:, None],
        )
    _tile_statistics(
        tl.where(column_mask[:, None], rounded.to(tl.float32), float("-inf")),
        columns,
        tokens,
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
    )


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
    _tile_statistics(
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


def _sampling_arguments(sampling: Sampling | None, num_tokens: int) -> tuple:
    if sampling is None:
        return (None, None, None, None, 0, None)
    temperature, seeds, positions, exponentials, idx_mapping = sampling.checked(num_tokens)
    if exponentials is not None:
        return (temperature, None, None, exponentials, exponentials.stride(0), idx_mapping)
    return (temperature, seeds, positions, None, 0, idx_mapping)


def _reduce(statistics: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    num_tiles, num_tokens = token_ids.shape
    merged = statistics.new_empty(9, num_tokens)
    best = token_ids.new_empty(num_tokens)
    block = triton.next_power_of_2(num_tiles)
    _reduce_kernel[(num_tokens,)](
        statistics, token_ids, merged, best, num_tiles, num_tokens, BLOCK=block, num_warps=4 if block <= 1024 else 8
    )
    return merged, best


def _workspace(like: torch.Tensor, num_tiles: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    statistics = like.new_empty(num_tiles, num_tokens, 5, dtype=torch.float32)
    return statistics, like.new_empty(num_tiles, num_tokens, dtype=torch.int64)


def _named(merged: torch.Tensor, best: torch.Tensor, confidence: bool, entropy: bool) -> DraftTokens:
    if not (confidence or entropy):
        return DraftTokens(best)
    return DraftTokens(best, *merged[5:8], merged[8] if entropy else None)


def _launch(
    hidden_states, weight, norm_weight, eps, weight_scale, sampling, d2t, first_token_id, logits_out
) -> tuple[torch.Tensor, torch.Tensor]:
    assert hidden_states.stride(-1) == 1 and weight.stride(-1) == 1
    (num_tokens, hidden_size), vocab_size = hidden_states.shape, weight.shape[0]
    block_t, block_v, block_h, num_warps, num_stages = tiles(num_tokens, weight.element_size())
    grid = (triton.cdiv(vocab_size, block_v), triton.cdiv(num_tokens, block_t))
    statistics, token_ids = _workspace(hidden_states, grid[0], num_tokens)
    _exit_head_kernel[grid](
        hidden_states,
        hidden_states.stride(0),
        weight,
        weight.stride(0),
        norm_weight,
        weight_scale,
        logits_out,
        0 if logits_out is None else logits_out.stride(0),
        d2t,
        *_sampling_arguments(sampling, num_tokens),
        statistics,
        token_ids,
        num_tokens,
        vocab_size,
        hidden_size,
        first_token_id,
        eps,
        BLOCK_T=block_t,
        BLOCK_V=block_v,
        BLOCK_H=block_h,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return _reduce(statistics, token_ids)


def _choose(logits, sampling, d2t, first_token_id) -> tuple[torch.Tensor, torch.Tensor]:
    assert logits.stride(-1) == 1
    num_tokens, vocab_size = logits.shape
    grid = (triton.cdiv(vocab_size, CHOOSE_BLOCK), num_tokens)
    statistics, token_ids = _workspace(logits, grid[0], num_tokens)
    _choose_kernel[grid](
        logits,
        logits.stride(0),
        d2t,
        *_sampling_arguments(sampling, num_tokens),
        statistics,
        token_ids,
        num_tokens,
        vocab_size,
        first_token_id,
        BLOCK_V=CHOOSE_BLOCK,
        num_warps=4,
    )
    return _reduce(statistics, token_ids)


def _merged(
    hidden_states, weight, norm_weight, eps, weight_scale, sampling, d2t, first_token_id, logits_out
) -> tuple[torch.Tensor, torch.Tensor]:
    if len(hidden_states) < CUBLAS_FROM or weight_scale is not None:
        return _launch(hidden_states, weight, norm_weight, eps, weight_scale, sampling, d2t, first_token_id, logits_out)
    if norm_weight is not None:
        hidden_states = F.rms_norm(hidden_states, norm_weight.shape, norm_weight, eps)
    logits = F.linear(hidden_states, weight)
    if logits_out is not None:
        store_logits(logits_out, logits, d2t, first_token_id)
    return _choose(logits, sampling, d2t, first_token_id)


def exit_head(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    weight_scale: torch.Tensor | None = None,
    sampling: Sampling | None = None,
    d2t: torch.Tensor | None = None,
    logits_out: torch.Tensor | None = None,
    confidence: bool = False,
    entropy: bool = False,
) -> DraftTokens:
    """Return one drafted token per row; see `exit_head_reference.exit_head`."""
    merged, best = _merged(hidden_states, weight, norm_weight, eps, weight_scale, sampling, d2t, 0, logits_out)
    return _named(merged, best, confidence, entropy)


def exit_head_partials(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    weight_scale: torch.Tensor | None = None,
    sampling: Sampling | None = None,
    d2t: torch.Tensor | None = None,
    first_token_id: int = 0,
    logits_out: torch.Tensor | None = None,
) -> Partials:
    """Return `exit_head`'s result over one shard of the vocabulary; see `exit_head_reference.exit_head_partials`."""
    merged, best = _merged(
        hidden_states, weight, norm_weight, eps, weight_scale, sampling, d2t, first_token_id, logits_out
    )
    return Partials(best, merged[:5].T)


def choose_tokens(
    logits: torch.Tensor,
    *,
    sampling: Sampling | None = None,
    d2t: torch.Tensor | None = None,
    confidence: bool = False,
    entropy: bool = False,
) -> DraftTokens:
    """Return what `exit_head` makes of logits that are there already; see `exit_head_reference.choose_tokens`."""
    return _named(*_choose(logits, sampling, d2t, 0), confidence, entropy)
