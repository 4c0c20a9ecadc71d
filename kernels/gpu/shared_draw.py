"""Drafts drawn by the noise with which the target's tokens will be, and their margins, in two launches.

`_draw_kernel`, grid (vocabulary tiles, rows), writes a tile's two largest of logit / temperature + noise and the column
of the larger; `_reduce_kernel`, grid (rows,), merges the tiles. Each logit is read once; rows that do not share their
noise are left out.
"""

import torch
import triton
import triton.language as tl

from .noise import gumbel

__all__ = ["shared_draw"]

# Logits per program of `_draw_kernel`.
DRAW_BLOCK = 1024


@triton.jit
def _shares(idx_mapping_ptr, shares_noise_ptr, row):
    """Return the row's request state, and whether it is one that shares its noise."""
    slot = tl.load(idx_mapping_ptr + row).to(tl.int64)
    return slot, tl.load(shares_noise_ptr + slot, mask=slot >= 0, other=0) != 0


@triton.jit
def _draw_kernel(
    logits_ptr,  # [num_rows, vocab_size]
    logits_stride,
    idx_mapping_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    shares_noise_ptr,
    maxima_ptr,  # [num_rows, num_tiles] float32
    seconds_ptr,  # [num_rows, num_tiles] float32
    columns_ptr,  # [num_rows, num_tiles] int32
    vocab_size,
    BLOCK: tl.constexpr,
):
    row, tile = tl.program_id(1).to(tl.int64), tl.program_id(0)
    slot, shares = _shares(idx_mapping_ptr, shares_noise_ptr, row)
    if shares:
        column = tile * BLOCK + tl.arange(0, BLOCK)
        here = column < vocab_size
        logits = tl.load(logits_ptr + row * logits_stride + column, mask=here, other=float("-inf")).to(tl.float32)
        noise = gumbel(tl.load(seeds_ptr + slot), tl.load(positions_ptr + row), column.to(tl.int64))
        scores = logits / tl.load(temperature_ptr + slot) + noise
        # A NaN must neither win nor lead an argmax out of the vocabulary.
        scores = tl.where(here & (scores == scores), scores, float("-inf"))
        maximum, index = tl.max(scores, axis=0, return_indices=True)
        others = tl.where(tl.arange(0, BLOCK) == index, float("-inf"), scores)
        cell = row * tl.num_programs(0) + tile
        tl.store(maxima_ptr + cell, maximum)
        tl.store(seconds_ptr + cell, tl.max(others, axis=0))
        tl.store(columns_ptr + cell, tile * BLOCK + index)


@triton.jit
def _reduce_kernel(
    idx_mapping_ptr,
    shares_noise_ptr,
    maxima_ptr,
    seconds_ptr,
    columns_ptr,
    tokens_ptr,
    confidences_ptr,
    drawn_ptr,  # [num_rows] int64
    drawn_confidences_ptr,  # [num_rows] float32
    num_tiles,
    TILES_PADDED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    _, shares = _shares(idx_mapping_ptr, shares_noise_ptr, row)
    token, confidence = tl.load(tokens_ptr + row), tl.load(confidences_ptr + row)
    if shares:
        tile = tl.arange(0, TILES_PADDED)
        here, cell = tile < num_tiles, row * num_tiles + tile
        maxima = tl.load(maxima_ptr + cell, mask=here, other=float("-inf"))
        maximum, winner = tl.max(maxima, axis=0, return_indices=True)
        seconds = tl.load(seconds_ptr + cell, mask=here, other=float("-inf"))
        second = tl.max(tl.where(tile == winner, seconds, maxima), axis=0)
        token = tl.load(columns_ptr + row * num_tiles + winner).to(tl.int64)
        confidence = 1.0 - tl.exp(second - maximum)
    tl.store(drawn_ptr + row, token)
    tl.store(drawn_confidences_ptr + row, confidence)


def shared_draw(
    logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    shares_noise: torch.Tensor,
    tokens: torch.Tensor,
    confidences: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the draft of every row and its confidence; see `reference.shared_draw.shared_draw`."""
    assert logits.stride(-1) == 1
    num_rows, vocab_size = logits.shape
    num_tiles = triton.cdiv(vocab_size, DRAW_BLOCK)
    maxima, seconds = logits.new_empty(2, num_rows, num_tiles, dtype=torch.float32)
    tiles = maxima, seconds, logits.new_empty(num_rows, num_tiles, dtype=torch.int32)
    of_rows = idx_mapping, temperature, seeds, positions, shares_noise
    _draw_kernel[(num_tiles, num_rows)](
        logits, logits.stride(0), *of_rows, *tiles, vocab_size, BLOCK=DRAW_BLOCK, num_warps=4
    )
    drawn, drawn_confidences = torch.empty_like(tokens), torch.empty_like(confidences)
    made = tokens, confidences, drawn, drawn_confidences
    padded = triton.next_power_of_2(num_tiles)
    _reduce_kernel[(num_rows,)](idx_mapping, shares_noise, *tiles, *made, num_tiles, TILES_PADDED=padded, num_warps=4)
    return drawn, drawn_confidences
