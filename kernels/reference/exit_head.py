"""Norm, LM head and the choice of a token in plain torch: the reference of `gpu/exit_head.py`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

from .row_reductions import row_argmax


class DraftTokens(NamedTuple):
    """What one draft step gives, one entry per row."""

    token_ids: torch.Tensor  # [num_tokens] int64, the most probable token, in the target's vocabulary
    top1_prob: torch.Tensor  # [num_tokens] float32, its probability before any temperature


def exit_head(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    d2t: torch.Tensor | None = None,
) -> DraftTokens:
    """Return one drafted token per row with its probability: RMSNorm, LM head, argmax.

    Logits are rounded to the hidden states' dtype before they are compared, as if they had been written; the lowest
    id wins a tie.

    Args:
        hidden_states: [num_tokens, hidden_size], rows contiguous, any row stride.
        weight: [vocab_size, hidden_size], the LM head, of hidden_states' dtype.
        norm_weight: [hidden_size]; None if the hidden states are normed already.
        eps: of the RMSNorm.
        d2t: [vocab_size] int64, the target's id of each row of `weight`; None if they are the same.
    """
    if norm_weight is not None:
        hidden_states = F.rms_norm(hidden_states, norm_weight.shape, norm_weight, eps)
    # On CPUs with AMX torch 2.13 reads past bfloat16 rows of odd length; between strided ones may be anything.
    return choose_tokens(F.linear(hidden_states.contiguous(), weight), d2t=d2t)


def choose_tokens(logits: torch.Tensor, *, d2t: torch.Tensor | None = None) -> DraftTokens:
    """Return each row's most probable token with its probability.

    Args:
        logits: [num_tokens, vocab_size], any float dtype, rows contiguous.
        d2t: see `exit_head`.
    """
    columns = row_argmax(logits)
    # On a CPU softmax and its maximum take half of logsumexp's time.
    return DraftTokens(columns if d2t is None else d2t[columns], logits.float().softmax(dim=-1).amax(dim=-1))
