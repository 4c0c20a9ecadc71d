"""Drafts drawn by the noise with which the target's tokens will be, and their margins: the kernel's reference."""

import torch

from .noise import gumbel

__all__ = ["shared_draw"]


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
    """Return the draft of every row, [num_rows] int64, and its confidence, [num_rows] float32.

    Of a row that shares its noise that is the token with the largest logits / temperature + noise, as vLLM's plain step
    chooses the target's, and 1 - exp(-margin), where the margin is its distance from the second largest. Other rows
    keep what they have: what is verified by the ratio of probabilities may not be stopped for what was drawn.

    Args:
        logits: [num_rows, vocab_size].
        idx_mapping: [num_rows] int, the request state; negative for none, which shares nothing.
        temperature: [max_num_reqs] float32, by request state, above 0 where noise is shared.
        seeds: [max_num_reqs] int64, by request state.
        positions: [num_rows] int64, of each row's input token.
        shares_noise: [max_num_reqs] bool, by request state.
        tokens: [num_rows] int64, of the rows that do not share.
        confidences: [num_rows] float32, of the rows that do not share.
    """
    slots = idx_mapping.long().clamp(min=0)
    shares = shares_noise[slots] & (idx_mapping >= 0)
    scale = torch.where(temperature[slots] > 0, temperature[slots], 1.0)
    keys = torch.arange(logits.shape[1], device=logits.device)
    scores = logits.float() / scale[:, None] + gumbel(seeds[slots][:, None], positions[:, None], keys)
    # A NaN must not win.
    largest = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).topk(2, dim=-1)
    confidence = -torch.expm1(largest.values[:, 1] - largest.values[:, 0])
    return torch.where(shares, largest.indices[:, 0], tokens), torch.where(shares, confidence, confidences)
