"""The most probable token of each row and its probability, from logits; also the second half of `exit_head.py`.

Every tile of a row's vocabulary writes its largest logit, that logit's column and a sum of exponentials
(`tile_statistics`, called by the kernel that has the logits in registers); `_reduce_kernel`, grid (rows,), merges the
tiles. `_choose_kernel`, grid (vocabulary tiles, rows), reads logits from memory, each of them once.
"""

import torch
import triton
import triton.language as tl

from ..reference.exit_head import DraftTokens

# Logits per program of `_choose_kernel`: enough to hide a load's latency, few enough to stay in registers.
CHOOSE_BLOCK = 2048


@triton.jit
def tile_statistics(
    logits,  # [BLOCK_V, BLOCK_T] float32, -inf outside the vocabulary
    tokens,  # [BLOCK_T] int64
    token_mask,
    maxima_ptr,  # [num_tiles, num_tokens] float32
    sums_ptr,  # [num_tiles, num_tokens] float32
    columns_ptr,  # [num_tiles, num_tokens] int32
    num_tokens,
):
    """Write one tile's largest logit, the sum of exp(logit - largest), and the largest's column."""
    # A NaN must neither win nor lead an argmax out of the vocabulary.
    logits = tl.where(logits == logits, logits, float("-inf"))
    maximum, index = tl.max(logits, axis=0, return_indices=True)
    shifted = logits - tl.where(maximum == float("-inf"), 0.0, maximum)[None, :]
    cell = tl.program_id(0).to(tl.int64) * num_tokens + tokens
    tl.store(maxima_ptr + cell, maximum, mask=token_mask)
    tl.store(sums_ptr + cell, tl.sum(tl.exp(shifted), axis=0), mask=token_mask)
    tl.store(columns_ptr + cell, tl.program_id(0) * logits.shape[0] + index, mask=token_mask)


@triton.jit
def _choose_kernel(
    logits_ptr,  # [num_tokens, vocab_size]
    logits_stride,
    maxima_ptr,
    sums_ptr,
    columns_ptr,
    num_tokens,
    vocab_size,
    BLOCK_V: tl.constexpr,
):
    columns = tl.program_id(0).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
    tokens = tl.program_id(1).to(tl.int64) + tl.arange(0, 1)
    row = logits_ptr + tokens[None, :] * logits_stride + columns[:, None]
    logits = tl.load(row, mask=columns[:, None] < vocab_size, other=float("-inf")).to(tl.float32)
    tile_statistics(logits, tokens, tokens < num_tokens, maxima_ptr, sums_ptr, columns_ptr, num_tokens)


@triton.jit
def _reduce_kernel(
    maxima_ptr,
    sums_ptr,
    columns_ptr,
    d2t_ptr,  # [vocab_size] int64 or None
    token_ids_ptr,  # [num_tokens] int64
    top1_prob_ptr,  # [num_tokens] float32
    num_tiles,
    num_tokens,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, BLOCK)
    mask = tile < num_tiles
    cell = tile.to(tl.int64) * num_tokens + token
    maximum = tl.load(maxima_ptr + cell, mask=mask, other=float("-inf"))
    top, winner = tl.max(maximum, axis=0, return_indices=True)
    # A tile without any mass (all -inf) must not turn 0 into NaN.
    factor = tl.where(maximum == float("-inf"), 0.0, tl.exp(maximum - top))
    total = tl.sum(factor * tl.load(sums_ptr + cell, mask=mask, other=0.0), axis=0)
    token_id = tl.load(columns_ptr + winner.to(tl.int64) * num_tokens + token).to(tl.int64)
    if d2t_ptr is not None:
        token_id = tl.load(d2t_ptr + token_id)
    tl.store(token_ids_ptr + token, token_id)
    tl.store(top1_prob_ptr + token, 1.0 / total)


def workspace(like: torch.Tensor, num_tiles: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what tiles write, uninitialised: (maxima, sums, columns), [num_tiles, num_tokens] each."""
    maxima, sums = like.new_empty(2, num_tiles, num_tokens, dtype=torch.float32)
    return maxima, sums, like.new_empty(num_tiles, num_tokens, dtype=torch.int32)


def reduce_tiles(
    maxima: torch.Tensor, sums: torch.Tensor, columns: torch.Tensor, d2t: torch.Tensor | None
) -> DraftTokens:
    """Return the choice over all tiles."""
    num_tiles, num_tokens = maxima.shape
    chosen = DraftTokens(columns.new_empty(num_tokens, dtype=torch.int64), maxima.new_empty(num_tokens))
    block = triton.next_power_of_2(num_tiles)
    _reduce_kernel[(num_tokens,)](
        maxima, sums, columns, d2t, *chosen, num_tiles, num_tokens, BLOCK=block, num_warps=4 if block <= 1024 else 16
    )
    return chosen


def choose_tokens(logits: torch.Tensor, *, d2t: torch.Tensor | None = None) -> DraftTokens:
    """Return each row's most probable token with its probability; see `reference.exit_head.choose_tokens`."""
    assert logits.stride(-1) == 1
    num_tokens, vocab_size = logits.shape
    num_tiles = triton.cdiv(vocab_size, CHOOSE_BLOCK)
    tiles = workspace(logits, num_tiles, num_tokens)
    _choose_kernel[(num_tiles, num_tokens)](
        logits, logits.stride(0), *tiles, num_tokens, vocab_size, BLOCK_V=CHOOSE_BLOCK, num_warps=4
    )
    return reduce_tiles(*tiles, d2t)
