"""Verification by equality, where the target's tokens are drawn already: the kernel's reference in plain torch."""

import torch

__all__ = ["keep_equal"]


def keep_equal(
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
    tokens: torch.Tensor,
    draft_sampled: torch.Tensor,
    cu_num_logits: torch.Tensor,
    chosen: torch.Tensor | None = None,
) -> None:
    """Write what requests emit: the target's tokens up to the first that is not the draft's.

    Args:
        sampled: [num_reqs, K + 1] int64, written: -1 after a request's last token.
        num_sampled: [num_reqs] int32, written.
        tokens: [num_logits] int64, the target's own after each input token.
        draft_sampled: [num_logits], the last token emitted, then the drafts, of each request; -1 is a placeholder.
        cu_num_logits: [num_reqs + 1] int32, request r has rows cu_num_logits[r] up to cu_num_logits[r + 1].
        chosen: [num_reqs] bool, whose tokens to write; None: all.
    """
    starts, last = cu_num_logits[:-1, None].long(), cu_num_logits[1:, None].long() - 1
    steps = torch.arange(sampled.shape[1], device=sampled.device)
    rows = torch.minimum(starts + steps, last)
    of_target = tokens[rows]
    is_right = (of_target == draft_sampled[torch.minimum(rows + 1, last)]) & (starts + steps < last)
    accepted = is_right.long().cumprod(1).sum(1)
    emitted = torch.where(steps <= accepted[:, None], of_target, -1)
    written = torch.ones_like(accepted, dtype=torch.bool) if chosen is None else chosen
    sampled.copy_(torch.where(written[:, None], emitted, sampled))
    num_sampled.copy_(torch.where(written, (accepted + 1).int(), num_sampled))
