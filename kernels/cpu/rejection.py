"""Verification of ragged drafts in plain torch, for a CPU and as the reference of `rejection.py`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .noise import gumbel, philox_uniform
from .row_reductions import row_argmax, row_choice

# The bookkeeping per request is some forty operations on a few integers. On a CPU torch takes longer to dispatch them
# than to reduce the logits, numpy a quarter of that: so it is written in what arrays and tensors have in common.
Array = Any


class Verified(NamedTuple):
    """What the target made of each request's draft."""

    sampled: torch.Tensor  # [num_reqs, num_speculative_tokens + 1] int64, -1 behind the last token
    num_sampled: torch.Tensor  # [num_reqs] int32, accepted drafts + 1
    num_rejected: torch.Tensor  # [num_reqs] int32, drafts that were not accepted
    next_positions: torch.Tensor  # [num_reqs] int64, where the last sampled token stands
    next_slots: torch.Tensor | None  # [num_reqs] int64, its KV slot; -1 if the block table does not reach so far
    observed: torch.Tensor  # [num_reqs, 2] int32, successes and failures of the posterior; a placeholder is neither


class Layout(NamedTuple):
    """Where each request's rows are, [num_reqs, num_speculative_tokens + 1] each; numpy arrays on a CPU."""

    rows: Array  # row of each step; the request's last row again behind its end
    is_draft: Array  # this step verifies a draft; never in the last column
    drafts: Array  # -1 where there is no draft, or a placeholder


def rejection(
    target_logits: torch.Tensor,
    draft_sampled: torch.Tensor,
    cu_num_logits: torch.Tensor,
    positions: torch.Tensor,
    num_speculative_tokens: int,
    *,
    temperature: torch.Tensor | None = None,
    draft_logits: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    uniforms: torch.Tensor | None = None,
    exponentials: torch.Tensor | None = None,
    idx_mapping: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    block_size: int = 0,
    block_verification: bool = False,
) -> Verified:
    """Return the tokens the target emits: the accepted drafts and one more of its own, per request.

    A greedy request accepts drafts while they equal the target's argmax; a sampled one accepts x with probability
    min(1, p(x) / q(x)) and, once one is refused, draws from max(p - q, 0). Either way the output is the target's. Row i
    of a request holds the logits behind its i-th input token: the last bonus token, then the drafts.

    Args:
        target_logits: [num_logits, vocab_size], before temperature, any float dtype, rows contiguous.
        draft_sampled: [num_logits] int, input token of each row; -1 for a placeholder, which is never accepted.
        cu_num_logits: [num_reqs + 1] int32, request r has rows cu_num_logits[r] up to cu_num_logits[r + 1], at least 1.
        positions: [num_logits] int64, of each row's input token; also the counter of V2's noise.
        num_speculative_tokens: most drafts a request may have.
        temperature: [max_num_reqs] float32, 0 for greedy requests; None if all are greedy.
        draft_logits: [max_num_reqs, num_speculative_tokens, vocab_size] before temperature; None for greedy drafts,
            which are certain of their token.
        seeds: [max_num_reqs] int64: V2's noise, Gumbel-max.
        uniforms: [num_logits, 2] in [0, 1), the caller's noise: for the test, and for the choice by inverting p's sum.
        exponentials: [num_reqs, vocab_size] float32, Exp(1) draws: the choice by Gumbel-max instead; needs uniforms.
        idx_mapping: [num_reqs] int64, index into temperature, seeds and draft_logits; None for their order.
        block_table: [num_reqs, max_num_blocks] int32, of the batch's rows.
        block_size: tokens per KV block.
        block_verification: judge a draft as a whole (never fewer tokens are accepted).
    Raises:
        ValueError: a temperature without noise.
    Source: arXiv 2211.17192 (token by token), arXiv 2403.10444 (block); vLLM's gpu/spec_decode/rejection_sampler_utils.
    """
    if temperature is not None and seeds is None and uniforms is None:
        raise ValueError("seeds: None; a temperature needs seeds or uniforms")
    layout = _layout(draft_sampled, cu_num_logits, num_speculative_tokens)
    if draft_logits is not None:  # a target's vocabulary may be padded further than its draft's
        target_logits = target_logits[:, : draft_logits.shape[-1]]
    if temperature is None:
        best = _array(row_argmax(target_logits))[layout.rows]
        num_accepted = _leading((layout.drafts == best) & layout.is_draft)
        final = best[_array(torch.arange(len(best), device=target_logits.device)), num_accepted]
    else:
        if idx_mapping is not None:
            seeds, temperature, draft_logits = (
                state if state is None else state[idx_mapping] for state in (seeds, temperature, draft_logits)
            )
        noise = _Noise(seeds, positions, uniforms, exponentials)
        tensors = Layout(*(torch.as_tensor(array) for array in layout))
        verified = _verify(
            target_logits, draft_logits, tensors, temperature.float(), noise, cu_num_logits, block_verification
        )
        num_accepted, final = (_array(tensor) for tensor in verified)
    return _result(layout, num_accepted, final, positions, block_table, block_size)


class _Noise(NamedTuple):
    seeds: torch.Tensor | None  # [num_reqs]
    positions: torch.Tensor  # [num_logits]
    uniforms: torch.Tensor | None
    exponentials: torch.Tensor | None

    def tests(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what each draft's probability ratio is compared with, [num_reqs, num_speculative_tokens]."""
        if self.seeds is not None:
            return philox_uniform(self.seeds[:, None], self.positions[rows])
        return self.uniforms[rows, 0]


def _array(tensor: torch.Tensor) -> Array:
    return tensor if tensor.is_cuda else tensor.numpy()


def _layout(draft_sampled: torch.Tensor, cu_num_logits: torch.Tensor, num_speculative_tokens: int) -> Layout:
    cu_num_logits = _array(cu_num_logits)
    starts, last = cu_num_logits[:-1, None], cu_num_logits[1:, None] - 1
    rows = starts + _array(torch.arange(num_speculative_tokens + 1, device=draft_sampled.device))
    is_draft = rows < last
    drafts = _array(draft_sampled)[(rows + 1).clip(None, last)]
    return Layout(rows.clip(None, last), is_draft, (drafts + 1) * is_draft - 1)


def _leading(accepted: Array) -> Array:
    """Return how many of each row are true before the first that is not, [num_reqs] int64."""
    return accepted.cumprod(1).sum(1)


def _result(
    layout: Layout,
    num_accepted: Array,
    final: Array,
    positions: torch.Tensor,
    block_table: torch.Tensor | None,
    block_size: int,
) -> Verified:
    num_reqs, width = layout.rows.shape
    device, at = positions.device, num_accepted[:, None]
    steps = _array(torch.arange(width, device=device))
    is_last = steps == at
    sampled = (layout.drafts + 1) * (steps < at) + (final[:, None] + 1) * is_last - 1
    failed = (is_last & (layout.drafts >= 0)).sum(1)
    num_rejected = layout.is_draft.sum(1) - num_accepted
    next_positions = _array(positions)[layout.rows[:, 0]] + num_accepted + 1
    slots = None
    if block_table is not None:
        page, num_pages = next_positions // block_size, block_table.shape[1]
        requests = _array(torch.arange(num_reqs, device=device))
        # int64 before it is multiplied: pages are int32.
        held = _array(block_table)[requests, page.clip(None, num_pages - 1)] + page * 0
        slots = torch.as_tensor((held * block_size + next_positions % block_size + 1) * (page < num_pages) - 1)
    counts = (torch.as_tensor(count) for count in (num_accepted, num_rejected, failed))
    num_accepted, num_rejected, failed = counts
    return Verified(
        torch.as_tensor(sampled).long(),
        (num_accepted + 1).int(),
        num_rejected.int(),
        torch.as_tensor(next_positions),
        slots,
        torch.stack([num_accepted, failed], dim=1).int(),
    )


def _verify(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    layout: Layout,
    temperature: torch.Tensor,
    noise: _Noise,
    cu_num_logits: torch.Tensor,
    block_verification: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ([num_reqs] accepted drafts, [num_reqs] the token behind them) of greedy and sampled requests."""
    greedy = temperature == 0
    scale = torch.where(greedy, 1.0, temperature)
    num_rows = target_logits.shape[0]
    row_scale = scale.repeat_interleave(cu_num_logits.diff().long(), output_size=num_rows)
    p = (target_logits.float() / row_scale[:, None]).softmax(dim=-1)
    q = None if draft_logits is None else (draft_logits.float() / scale[:, None, None]).softmax(dim=-1)
    drafts, rows = layout.drafts[:, :-1].clamp(min=0), layout.rows[:, :-1]
    valid = layout.drafts[:, :-1] >= 0
    p_draft = p[rows, drafts]
    q_draft = None if q is None else q.gather(2, drafts[:, :, None])[:, :, 0]
    tests = noise.tests(rows)
    if block_verification:
        scale_p, accepted = _judge_blocks(p, q, p_draft, q_draft, valid, layout, tests)
    else:
        scale_p, accepted = None, _judge_tokens(p_draft, q_draft, valid, tests)
    some_greedy = greedy.is_cuda or bool(greedy.any())  # looking costs nothing on a CPU
    if some_greedy:
        best = row_argmax(target_logits)[layout.rows]
        same = _leading((layout.drafts == best) & layout.is_draft)
        accepted = torch.where(greedy, same, accepted)
    chosen = _choose_final(target_logits, p, q, layout, accepted, scale, scale_p, noise)
    if some_greedy:
        chosen = torch.where(greedy, best.gather(1, accepted[:, None])[:, 0], chosen)
    return accepted, chosen


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
    # A placeholder ends the block; what stands behind it was not drafted from this prefix.
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
    noise: _Noise,
) -> torch.Tensor:
    """Return the token behind the accepted drafts: from p if none was refused, else from max(p - q, 0)."""
    row = layout.rows.gather(1, num_accepted[:, None])[:, 0]
    refused = layout.drafts.gather(1, num_accepted[:, None]).long()
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
    if noise.seeds is None and noise.exponentials is None:
        return row_choice(weights, noise.uniforms[row, 1], refused[:, 0].clamp(min=0))
    if noise.seeds is None:
        return row_argmax(weights / noise.exponentials)
    if q is None:
        logits = (target_logits[row].float() / scale[:, None]).masked_fill(weights == 0, -torch.inf)
    else:
        logits = weights.log()
    keys = torch.arange(weights.shape[1], device=row.device)
    return row_argmax(logits + gumbel(noise.seeds[:, None], noise.positions[row][:, None], keys, drafting=False))
