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
        kl: mean KL(target || head), nats per token.
        agreement: share of positions where both would take the same token: greedy acceptance of a first draft token.
        overlap: mean of sum min(p, q): acceptance of a first draft token when sampling.
        expected_matches: mean number of leading matches among the next 8 positions. Exact on the target's own greedy
            text (there the drafts that match are the text), teacher-forced elsewhere.
        matches_per_position: share of positions from which the first i + 1 all match.
    """
    device = target.lm_head.weight.device
    sums, matches = torch.zeros(2, dtype=torch.float64), []
    for rows in windows.split(max(1, CHUNK_LOGITS // (windows.shape[1] * target.config.vocab_size))):
        exit_hidden, target_hidden, rotary = target(rows.to(device))
        target_logprobs = target.lm_head(target_hidden[:, first:]).log_softmax(-1)
        draft_logprobs = target.lm_head(head(exit_hidden, rotary)[:, first:]).log_softmax(-1)
        probs, draft_probs = target_logprobs.exp(), draft_logprobs.exp()
        sums[0] += (probs * (target_logprobs - draft_logprobs)).sum(dtype=torch.float64).cpu()
        sums[1] += torch.minimum(probs, draft_probs).sum(dtype=torch.float64).cpu()
        matches.append((target_logprobs.argmax(-1) == draft_logprobs.argmax(-1)).cpu())
    match = torch.cat(matches)
    depth = min(LONGEST_DRAFT, match.shape[1])
    leading = match.double().unfold(1, depth, 1).cumprod(-1).mean((0, 1))
    return {
        "kl": sums[0].item() / match.numel(),
        "agreement": match.double().mean().item(),
        "overlap": sums[1].item() / match.numel(),
        "expected_matches": leading.sum().item(),
        "matches_per_position": [round(share, 4) for share in leading.tolist()],
    }
