"""How well a head predicts its target: what acceptance will be, measured without an engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllm_eesd.distill.losses import CHUNK_LOGITS
from vllm_eesd.distill.model import ExitHead, Target

LONGEST_DRAFT = 8


@torch.no_grad()
def evaluate(target: Target, head: ExitHead, windows: Tensor, first: int = 0) -> dict[str, Any]:
    """Return the head's agreement with the target, in float32.

    Args:
        windows: [num_windows, seq_len] int64.
        first: positions before it are context only.
    Returns:
        kl: mean KL(target || head) of a first draft token, nats.
        agreement: share of positions where both would take the same token: greedy acceptance of a first draft token.
        overlap: mean of sum min(p, q): acceptance of a first draft token when sampling.
        expected_matches: mean number of leading matches among the next 8 positions. Exact on the target's own greedy
            text (there the drafts that match are the text), teacher-forced elsewhere.
        matches_per_position: share of positions from which the first i + 1 all match.
    """
    device = target.lm_head.weight.device
    seq_len = windows.shape[1]
    depth = min(LONGEST_DRAFT, seq_len - first)
    kl = overlap = agreed = 0.0
    num_first = num_rounds = 0
    leading = torch.zeros(depth, dtype=torch.float64)
    for rows in windows.split(max(1, CHUNK_LOGITS // (seq_len * target.config.vocab_size))):
        exit_hidden, target_hidden, rotary = target(rows.to(device))
        target_logits = target.lm_head(target_hidden)
        target_ids = target_logits.argmax(-1)
        # A draft sees what was known when its round began: every position begins a round in one of `depth` passes.
        for phase in range(depth):
            starts = torch.arange(first + phase, seq_len, depth, device=device)
            draft_hidden = head(exit_hidden, target_hidden, rotary, _block_starts(starts, seq_len))
            draft_logits = target.lm_head(draft_hidden)
            p, q = target_logits[:, starts].log_softmax(-1), draft_logits[:, starts].log_softmax(-1)
            kl += (p.exp() * (p - q)).sum(dtype=torch.float64).item()
            overlap += torch.minimum(p.exp(), q.exp()).sum(dtype=torch.float64).item()
            match = (target_ids == draft_logits.argmax(-1))[:, first + phase :]
            agreed += match[:, ::depth].sum().item()
            num_first += len(rows) * len(starts)
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


def _block_starts(starts: Tensor, seq_len: int) -> Tensor:
    """Return for each position the last start at or before it, [seq_len] int64; 0 before the first."""
    positions = torch.arange(seq_len, device=starts.device)
    index = torch.searchsorted(starts, positions, right=True) - 1
    return torch.where(index >= 0, starts[index.clamp(min=0)], 0)
