"""Reductions over the vocabulary that a CPU does several times faster in two levels than in torch's one.

torch's `amax` over a short last dimension runs at memory speed on a CPU; its `argmax`, `topk` and `cumsum` over a long
one do not. So each row is cut into blocks, the blocks are reduced, and only the block that matters is looked into.
"""

from __future__ import annotations

import torch

# Long enough that few blocks remain, short enough that looking into one costs nothing.
BLOCK = 128
# Elements from which the two levels' extra calls are repaid: they cost what argmax takes for about 30,000.
TWO_LEVELS_FROM = 32768


def _in_two_levels(values: torch.Tensor) -> bool:
    return not values.is_cuda and values.shape[-1] >= 8 * BLOCK and values.numel() >= TWO_LEVELS_FROM


def _blocks(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ([num_rows, whole blocks, BLOCK], [num_rows, rest]), both views."""
    whole = values.shape[-1] // BLOCK * BLOCK
    return values[:, :whole].unflatten(-1, (-1, BLOCK)), values[:, whole:]


def _reduced(values: torch.Tensor, name: str) -> torch.Tensor:
    """Return [num_rows, num_blocks]: every block's `amax` or `sum`, the last block possibly short."""
    blocks, rest = _blocks(values)
    reduced = getattr(blocks, name)(-1)
    return reduced if rest.shape[-1] == 0 else torch.cat([reduced, getattr(rest, name)(-1, keepdim=True)], dim=-1)


def _look_into(values: torch.Tensor, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (columns, values) of one block per row, [num_rows, BLOCK]; columns past the end are >= vocab_size."""
    columns = block * BLOCK + torch.arange(BLOCK, device=values.device)
    return columns, values.gather(-1, columns.clamp(max=values.shape[-1] - 1))


def row_argmax(values: torch.Tensor) -> torch.Tensor:
    """Return the first column of each row's maximum (of its first NaN, if it has one), [num_rows] int64.

    Args:
        values: [num_rows, vocab_size].
    """
    if not _in_two_levels(values):
        return values.argmax(dim=-1)
    columns, inner = _look_into(values, _reduced(values, "amax").argmax(dim=-1, keepdim=True))
    # The columns past the end repeat the last value, which then comes first.
    return columns.gather(-1, inner.argmax(dim=-1, keepdim=True))[:, 0]


def row_choice(weights: torch.Tensor, uniforms: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    """Return a column per row, drawn in proportion to its weights by inverting their sum, [num_rows] int64.

    Args:
        weights: [num_rows, vocab_size] float32, not negative; they need not sum to 1.
        uniforms: [num_rows], in [0, 1).
        otherwise: [num_rows] int64, the column of a row without any weight.
    """
    if not _in_two_levels(weights):
        sums = weights.cumsum(dim=-1, dtype=torch.float64)
        total = sums[:, -1:]
        chosen = torch.searchsorted(sums, uniforms.double()[:, None] * total, right=True)[:, 0]
        return torch.where((total[:, 0] > 0) & (chosen < weights.shape[-1]), chosen, otherwise)
    sums = _reduced(weights, "sum").cumsum(dim=-1, dtype=torch.float64)
    total = sums[:, -1:]
    target = uniforms.double()[:, None] * total
    block = torch.searchsorted(sums, target, right=True)
    last_block = block.clamp(max=sums.shape[-1] - 1)
    columns, inner = _look_into(weights, last_block)
    inner = inner.masked_fill(columns >= weights.shape[-1], 0.0).cumsum(dim=-1, dtype=torch.float64)
    before = torch.where(last_block > 0, sums.gather(-1, (last_block - 1).clamp(min=0)), 0.0)
    # The block's sum was rounded, its running sum was not: go by the share of the block.
    share = (target - before) / (sums.gather(-1, last_block) - before)
    inner_index = torch.searchsorted(inner, share * inner[:, -1:], right=True).clamp(max=BLOCK - 1)
    chosen = columns.gather(-1, inner_index)[:, 0]
    return torch.where((total[:, 0] > 0) & (chosen < weights.shape[-1]), chosen, otherwise)
