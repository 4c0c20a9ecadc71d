"""Norm, LM head and the choice of a token in one pass over the LM head's weight.

    logits = (norm_weight * x / rms(x)) @ weight.T,  token = argmax(logits),  probability = softmax(logits)[token]

Grid of `_exit_head_kernel`: (vocabulary tiles, row tiles). A program multiplies its tile of the weight with its rows
and sums their squares on the way: rms is a factor of the whole row, so the product need not wait for it. It writes
three numbers per row, which `choose_tokens.py` computes and merges. Two launches; the logits never reach memory.
Bytes: vocab_size * hidden_size * (bytes of the weight) + small change.

From `CUBLAS_FROM` rows on, the product is compute-bound: torch multiplies, and `_choose_kernel` reads the logits.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from ..reference.exit_head import DraftTokens
from .choose_tokens import choose_tokens, reduce_tiles, tile_statistics, workspace

__all__ = ["choose_tokens", "exit_head"]

# Rows from which cuBLAS and a reduction are taken instead. On an H200, 128256 x 4096 in bfloat16: 0.27 ms fused against
# 0.30 at 32 rows, 0.39 against 0.32 at 64.
CUBLAS_FROM = 64


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

    Args:
        num_tokens: rows.
        weight_bytes: of one weight, 2 or 4.
    """
    if num_tokens == 1:
        return Tiles(1, 32, 1024 // (4 * weight_bytes), 4, 2)
    if weight_bytes == 4:
        return Tiles(16, 64, 32, 4, 3)
    if num_tokens <= 32:
        return Tiles(16 if num_tokens <= 16 else 32, 64, 128, 4, 4)
    return Tiles(64, 64, 64, 8, 3)


@triton.jit
def _exit_head_kernel(
    hidden_ptr,  # [num_tokens, hidden_size]
    hidden_stride,
    weight_ptr,  # [vocab_size, hidden_size]
    weight_stride,
    norm_weight_ptr,  # [hidden_size] or None
    maxima_ptr,
    sums_ptr,
    columns_ptr,
    num_tokens,
    vocab_size,
    hidden_size,
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
        x = tl.load(
            hidden_ptr + tokens[None, :] * hidden_stride + h[:, None],
            mask=token_mask[None, :] & h_mask[:, None],
            other=0.0,
        )
        wide = x.to(tl.float32)
        if norm_weight_ptr is not None:
            squares += tl.sum(wide * wide, axis=0)
            wide *= tl.load(norm_weight_ptr + h, mask=h_mask, other=0.0).to(tl.float32)[:, None]
        # Loaded after the norm is applied: before it, one row's compiled kernel takes up to twice the registers.
        w = tl.load(
            weight_ptr + columns[:, None] * weight_stride + h[None, :],
            mask=column_mask[:, None] & h_mask[None, :],
            other=0.0,
        )
        if BLOCK_T == 1:
            product = w.to(tl.float32) * tl.reshape(wide, [1, BLOCK_H])
            logits += tl.sum(product, axis=1)[:, None]
        else:
            logits = tl.dot(w, wide.to(x.dtype), acc=logits, input_precision="ieee", out_dtype=tl.float32)
    if norm_weight_ptr is not None:
        logits *= tl.rsqrt(squares / hidden_size + eps)[None, :]
    rounded = logits.to(hidden_ptr.dtype.element_ty)
    judged = tl.where(column_mask[:, None], rounded.to(tl.float32), float("-inf"))
    tile_statistics(judged, tokens, token_mask, maxima_ptr, sums_ptr, columns_ptr, num_tokens)


def exit_head(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    d2t: torch.Tensor | None = None,
) -> DraftTokens:
    """Return one drafted token per row with its probability; see `reference.exit_head.exit_head`."""
    assert hidden_states.stride(-1) == 1 and weight.stride(-1) == 1
    (num_tokens, hidden_size), vocab_size = hidden_states.shape, weight.shape[0]
    if num_tokens >= CUBLAS_FROM:
        if norm_weight is not None:
            hidden_states = F.rms_norm(hidden_states, norm_weight.shape, norm_weight, eps)
        return choose_tokens(F.linear(hidden_states, weight), d2t=d2t)
    block_t, block_v, block_h, num_warps, num_stages = tiles(num_tokens, weight.element_size())
    grid = (triton.cdiv(vocab_size, block_v), triton.cdiv(num_tokens, block_t))
    written = workspace(hidden_states, grid[0], num_tokens)
    _exit_head_kernel[grid](
        hidden_states,
        hidden_states.stride(0),
        weight,
        weight.stride(0),
        norm_weight,
        *written,
        num_tokens,
        vocab_size,
        hidden_size,
        eps,
        BLOCK_T=block_t,
        BLOCK_V=block_v,
        BLOCK_H=block_h,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return reduce_tiles(*written, d2t)
