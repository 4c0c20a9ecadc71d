"""The target's tokens that a pruned head can draft, and how its checkpoint says which: as EAGLE-3's do, by offsets."""

from __future__ import annotations

import torch
from torch import Tensor

D2T_NAME = "d2t"


def offsets_of(token_ids: Tensor) -> Tensor:
    """Return `d2t`, [draft_vocab_size] int64: what must be added to a draft id to get the target's id.

    Args:
        token_ids: [draft_vocab_size] int64, the target's ids in ascending order; draft id i is token_ids[i].
    Source: the `speculators` library's EAGLE-3 checkpoints.
    """
    return token_ids.long() - torch.arange(len(token_ids), device=token_ids.device)


def token_ids_of(d2t: Tensor) -> Tensor:
    """Return the target's id of each draft id, [draft_vocab_size] int64; the inverse of `offsets_of`."""
    return d2t.long() + torch.arange(len(d2t), device=d2t.device)


def check_offsets(d2t: Tensor, vocab_size: int) -> None:
    """Refuse a map that names a token twice, or one the target does not have.

    Ascending order makes two equal logits go to the lower id, as they do in the whole vocabulary.

    Raises:
        ValueError: it does.
    """
    token_ids = token_ids_of(d2t)
    lowest, highest = int(token_ids.min()), int(token_ids.max())
    if lowest < 0 or highest >= vocab_size:
        raise ValueError(f"{D2T_NAME}: maps to tokens {lowest} to {highest}, must be 0 to {vocab_size - 1}")
    if not (token_ids.diff() > 0).all():
        raise ValueError(f"{D2T_NAME}: the tokens it maps to must be in ascending order, each once")
