"""How well a head predicts its target: what acceptance will be, measured without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from vllm_eesd.config import LONGEST_DRAFT
from vllm_eesd.distill.losses import CHUNK_LOGITS
from vllm_eesd.distill.target import Target
from vllm_eesd.distill.vocabulary import draft_logits


@torch.no_grad()
def evaluate(target: Target, head: nn.Module, windows: Tensor, first: int = 0) -> dict[str, Any]:
    """Return the head's agreement with the target, in float32.

    Args:
        windows: [num_windows, seq_len] int64.
        first: positions before it are context only.
    Returns:
        kl: mean KL(target || head) of a first draft token, nats; with a draft vocabulary, within it.
        agreement: share of positions where both would take the same token: greedy acceptance of a first draft token.
        overlap: mean of sum min(p, q): acceptance of a first draft token when sampling.
        expected_matches: mean number of leading matches among the next 8 positions. Exact on the target's own greedy
            text (there the drafts that match are the text), teacher-forced elsewhere.
        matches_per_position: share of positions from which the first i + 1 all match.
    """
    seq_len = windows.shape[1]
    depth = min(LONGEST_DRAFT, seq_len - first)
    kl = overlap = agreed = 0.0
    num_first = num_rounds = 0
    leading = torch.zeros(depth, dtype=torch.float64)
    for _, target_logits, drafted_logits, start in draft_passes(target, head, windows, first):
        p, q = target_logits[:, start::depth].log_softmax(-1), drafted_logits[:, start::depth].log_softmax(-1)
        kl += _divergence(p, q)
        overlap += torch.minimum(p.exp(), q.exp()).sum(dtype=torch.float64).item()
        match = (target_logits.argmax(-1) == drafted_logits.argmax(-1))[:, start:]
        agreed += match[:, ::depth].sum().item()
        num_first += p.shape[0] * p.shape[1]
        rounds = match[:, : match.shape[1] // depth * depth].unflatten(1, (-1, depth))
        leading += rounds.double().cumprod(-1).sum((0, 1)).cpu()
        num_rounds += rounds.shape[0] * rounds.shape[1]
    leading /= num_rounds
    return {
        "kl": kl / num_first,
        "agreement": agreed / num_first,
        "overlap": overlap / num_first,
        "expected_matches": leading.sum().item(),
        "matches_per_position": [round(share, 4) for share in leading.tolist()],
    }


def draft_passes(
    target: Target, head: nn.Module, windows: Tensor, first: int
) -> Iterator[tuple[slice, Tensor, Tensor, int]]:
    """Yield (which windows, target logits, draft logits, where the first round starts).

    A draft sees what was known when its round began: every position from `first` on begins a round in one pass of
    each group of windows, where rounds are as long as the longest draft. Logits are [num_windows, seq_len, vocab_size].
    """
    device, seq_len = target.lm_head.weight.device, windows.shape[1]
    depth = min(LONGEST_DRAFT, seq_len - first)
    positions = torch.arange(seq_len, device=device)
    at_once = max(1, CHUNK_LOGITS // (seq_len * target.config.vocab_size))
    for row in range(0, len(windows), at_once):
        rows = slice(row, min(row + at_once, len(windows)))
        exit_hidden, target_hidden, rotary = target(windows[rows].to(device))
        target_logits = target.lm_head(target_hidden)
        for start in range(first, first + depth):
            block_starts = torch.where(positions < start, 0, positions - (positions - start) % depth)
            draft_hidden = head(exit_hidden, target_hidden, rotary, block_starts)
            yield rows, target_logits, draft_logits(target.lm_head, head, draft_hidden), start


def _divergence(p: Tensor, q: Tensor) -> float:
    """Return the sum of KL(p || q) over all positions, p taken within what q can say.

    Args:
        p, q: [..., vocab_size], log-probabilities; q is -inf for what the draft cannot say.
    """
    if (unsaid := q.isneginf()).any():
        p = p.masked_fill(unsaid, -torch.inf).log_softmax(-1)
    return (p.exp() * (p - q)).masked_fill(unsaid, 0.0).sum(dtype=torch.float64).item()
