"""Verification of ragged drafts in plain torch: the reference of `gpu/rejection.py` and of V1's compiled code."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .noise import gumbel, step_seed, uniform
from .row_reductions import row_argmax, row_choice


class Verified(NamedTuple):
    """What the target emits for each request."""

    sampled: torch.Tensor  # [num_reqs, num_speculative_tokens + 1] int64, -1 after the last token
    num_sampled: torch.Tensor  # [num_reqs] int32, accepted drafts + 1


class Layout(NamedTuple):
    """Where each request's rows are, [num_reqs, num_speculative_tokens + 1] int64 or bool each."""

    rows: torch.Tensor  # row of each step; after the request's last row, that row again
    is_draft: torch.Tensor  # this step verifies a draft; never in the last column
    drafts: torch.Tensor  # -1 where there is no draft, or a placeholder


class Noise(NamedTuple):
    """Random numbers, counted by seed and position or given by the caller."""

    seeds: torch.Tensor | None  # [num_reqs] int64
    positions: torch.Tensor | None  # [num_logits] int64
    uniforms: torch.Tensor | None  # [num_logits, 2]

    def tests(self, rows: torch.Tensor, by_step: bool) -> torch.Tensor:
        """Return what each draft's probability ratio is compared with, [num_reqs, num_speculative_tokens].

        Args:
            by_step: the number hangs on the step too, see `step_seed`: all tests of a round have a part in its length.
        """
        if self.seeds is not None:
            seeds = self.seeds[:, None]
            if by_step:
                seeds = step_seed(seeds, torch.arange(rows.shape[1], device=rows.device))
            return uniform(seeds, self.positions[rows])
        return self.uniforms[rows, 0]


def rejection(
    target_logits: torch.Tensor,
    draft_sampled: torch.Tensor,
    cu_num_logits: torch.Tensor,
    num_speculative_tokens: int,
    *,
    temperature: torch.Tensor,
    draft_logits: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    uniforms: torch.Tensor | None = None,
    idx_mapping: torch.Tensor | None = None,
    block_verification: bool = False,
) -> Verified:
    """Return the tokens the target emits: the accepted drafts and one more of its own, per request.

    A greedy request accepts drafts while they equal the target's argmax; a sampled one accepts x with probability
    min(1, p(x) / q(x)) and, once one is refused, draws from max(p - q, 0). Either way the output is the target's. Row i
    of a request holds the logits that follow its i-th input token: the last token emitted, then the drafts.

    Args:
        target_logits: [num_logits, vocab_size], before temperature, any float dtype, rows contiguous.
        draft_sampled: [num_logits] int, input token of each row; -1 for a placeholder, which is never accepted.
        cu_num_logits: [num_reqs + 1] int32, request r has rows cu_num_logits[r] up to cu_num_logits[r + 1], at least 1.
        num_speculative_tokens: most drafts a request may have.
        temperature: [max_num_reqs] float32, 0 for greedy requests.
        draft_logits: [max_num_reqs, num_speculative_tokens, vocab_size] before temperature; None for greedy drafts,
            which are certain of their token.
        seeds: [max_num_reqs] int64: V2's noise, Gumbel-max.
        positions: [num_logits] int64, of each row's input token: the counter of V2's noise.
        uniforms: [num_logits, 2] in [0, 1), instead of seeds, on a CPU only: for the test, and for the choice by
            inverting p's sum.
        idx_mapping: [num_reqs] int64, index into temperature, seeds and draft_logits; None for their order.
        block_verification: judge a draft as a whole (never fewer tokens are accepted).
    Raises:
        ValueError: no noise.
    Source: arXiv 2211.17192 (token by token), arXiv 2403.10444 (block); vLLM's gpu/spec_decode/rejection_sampler_utils.
    """
    if uniforms is None and (seeds is None or positions is None):
        raise ValueError("seeds, positions: None; verification needs both, or uniforms")
    if idx_mapping is not None:
        temperature, seeds, draft_logits = (
            state if state is None else state[idx_mapping] for state in (temperature, seeds, draft_logits)
        )
    layout, noise = _layout(draft_sampled, cu_num_logits, num_speculative_tokens), Noise(seeds, positions, uniforms)
    greedy = temperature == 0
    scale = torch.where(greedy, 1.0, temperature.float())
    if draft_logits is not None:  # a target's vocabulary may be padded further than its draft's
        target_logits = target_logits[:, : draft_logits.shape[-1]]
    row_scale = scale.repeat_interleave(cu_num_logits.diff().long(), output_size=len(target_logits))
    p = (target_logits.float() / row_scale[:, None]).softmax(dim=-1)
    q = None if draft_logits is None else (draft_logits.float() / scale[:, None, None]).softmax(dim=-1)

    accepted, scale_p = _accepted(p, q, layout, noise, block_verification)
    some_greedy = greedy.is_cuda or bool(greedy.any())  # looking costs nothing on a CPU
    if some_greedy:
        best = row_argmax(target_logits)[layout.rows]
        accepted = torch.where(greedy, _leading((layout.drafts == best) & layout.is_draft), accepted)
    final = _choose_final(target_logits, p, q, layout, accepted, scale, scale_p, noise)
    if some_greedy:
        final = torch.where(greedy, best.gather(1, accepted[:, None])[:, 0], final)

    steps = torch.arange(num_speculative_tokens + 1, device=p.device)
    sampled = torch.where(steps < accepted[:, None], layout.drafts, -1)
    return Verified(sampled.scatter_(1, accepted[:, None], final[:, None]), (accepted + 1).int())


def _layout(draft_sampled: torch.Tensor, cu_num_logits: torch.Tensor, num_speculative_tokens: int) -> Layout:
    cu_num_logits = cu_num_logits.long()
    last = cu_num_logits[1:, None] - 1
    rows = cu_num_logits[:-1, None] + torch.arange(num_speculative_tokens + 1, device=cu_num_logits.device)
    is_draft = rows < last
    drafts = draft_sampled[torch.minimum(rows + 1, last)].long()
    return Layout(torch.minimum(rows, last), is_draft, torch.where(is_draft, drafts, -1))


def _leading(accepted: torch.Tensor) -> torch.Tensor:
    """Return how many of each row are true before the first that is not, [num_reqs] int64."""
    return accepted.long().cumprod(1).sum(1)


def _accepted(
    p: torch.Tensor, q: torch.Tensor | None, layout: Layout, noise: Noise, block_verification: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return how many drafts a sampled request accepts, [num_reqs], and `_judge_blocks`' p_tau."""
    drafts, rows = layout.drafts[:, :-1].clamp(min=0), layout.rows[:, :-1]
    valid = layout.drafts[:, :-1] >= 0
    p_draft = p[rows, drafts]
    q_draft = None if q is None else q.gather(2, drafts[:, :, None])[:, :, 0]
    tests = noise.tests(rows, by_step=block_verification)
    if not block_verification:
        return _judge_tokens(p_draft, q_draft, valid, tests), None
    scale_p, accepted = _judge_blocks(p, q, p_draft, q_draft, valid, layout, tests)
    return accepted, scale_p


def _judge_tokens(
    p_draft: torch.Tensor, q_draft: torch.Tensor | None, valid: torch.Tensor, tests: torch.Tensor
) -> torch.Tensor:
    """Return how many drafts of each request are accepted, one after the other, [num_reqs]."""
    return _leading((p_draft > (tests if q_draft is None else tests * q_draft)) & valid)


def _judge_blocks(
    p: torch.Tensor,
    q: torch.Tensor | None,
    p_draft: torch.Tensor,
    q_draft: torch.Tensor | None,
    valid: torch.Tensor,
    layout: Layout,
    tests: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (p_tau [num_reqs, num_speculative_tokens + 1], accepted [num_reqs]) of block verification.

    Source: arXiv 2403.10444, algorithm 2: p_i = min(p_{i-1} * ratio_i, 1), accepted through the last i with
    u_i <= h_i, where h_i = mass_i / (mass_i + 1 - p_i), mass_i = sum max(p_i p - q, 0) at step i + 1, and h = p_i last.
    """
    # A placeholder ends the block; what follows it was not drafted from this prefix.
    valid = valid.long().cumprod(dim=1).bool()
    ratio = torch.where(valid, p_draft if q_draft is None else p_draft / q_draft, 0.0)
    joint = [torch.ones_like(ratio[:, 0])]
    for step in range(ratio.shape[1]):
        joint.append((joint[-1] * ratio[:, step]).clamp(max=1.0))
    joint_ratio = torch.stack(joint, dim=1)
    after = joint_ratio[:, 1:]
    if q is None:
        mass = after[:, :-1] * (1.0 - p_draft[:, 1:])
    else:
        ahead = p[layout.rows[:, 1:-1]]
        mass = (after[:, :-1, None] * ahead - q[:, 1:]).clamp(min=0.0).sum(dim=-1)
    share = torch.where(mass + 1.0 - after[:, :-1] > 0, mass / (mass + 1.0 - after[:, :-1]), 1.0)
    threshold = torch.cat([torch.where(valid[:, 1:], share, after[:, :-1]), after[:, -1:]], dim=1)
    steps = torch.arange(1, ratio.shape[1] + 1, device=p.device)
    return joint_ratio, torch.where(valid & (tests <= threshold), steps, 0).amax(dim=1)


def _choose_final(
    target_logits: torch.Tensor,
    p: torch.Tensor,
    q: torch.Tensor | None,
    layout: Layout,
    num_accepted: torch.Tensor,
    scale: torch.Tensor,
    scale_p: torch.Tensor | None,
    noise: Noise,
) -> torch.Tensor:
    """Return the token after the accepted drafts: from p if none was refused, else from max(p - q, 0)."""
    row = layout.rows.gather(1, num_accepted[:, None])[:, 0]
    refused = layout.drafts.gather(1, num_accepted[:, None])
    weights = p[row]
    if q is None:
        # A certain draft leaves p without its token.
        token = refused.clamp(min=0)
        weights.scatter_(1, token, weights.gather(1, token).masked_fill(refused >= 0, 0.0))
    else:
        step = num_accepted.clamp(max=q.shape[1] - 1)
        minuend = weights if scale_p is None else weights * scale_p.gather(1, num_accepted[:, None])
        residual = (minuend - q[torch.arange(len(row), device=row.device), step]).clamp(min=0.0)
        weights = torch.where(refused >= 0, residual, weights)
    if noise.seeds is None:
        return row_choice(weights, noise.uniforms[row, 1], refused[:, 0].clamp(min=0))
    if q is None:
        logits = (target_logits[row].float() / scale[:, None]).masked_fill(weights == 0, -torch.inf)
    else:
        logits = weights.log()
    keys = torch.arange(weights.shape[1], device=row.device)
    return row_argmax(logits + gumbel(noise.seeds[:, None], noise.positions[row][:, None], keys))
