"""How well a head predicts its target: what acceptance will be, measured without an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_eesd.config import LONGEST_DRAFT
from vllm_eesd.distill.precision import autocast
from vllm_eesd.distill.rows import Batch
from vllm_eesd.distill.target import Target
from vllm_eesd.distill.vocabulary import draft_token_ids, widened

# Logits of the target that exist at one time: 128 MiB of float32, and a few arrays of that size.
CHUNK_PASSES = 1 << 25


@torch.no_grad()
def evaluate(target: Target, head: nn.Module, windows: Tensor | Sequence[Batch], first: int = 0) -> dict[str, Any]:
    """Return the head's agreement with the target; logits are float32.

    Args:
        windows: [num_windows, seq_len] int64; or batches of conversations, of which the positions that count are
            measured.
        first: positions of windows before it are context only.
    Returns:
        kl: mean KL(target || head) of a first draft token, nats; with a draft vocabulary, within it.
        agreement: share of positions where both would take the same token: greedy acceptance of a first draft token.
        overlap: mean of sum min(p, q): acceptance of a first draft token when sampling.
        expected_matches: mean number of leading matches among the next 8 positions. Exact on the target's own greedy
            text (there the drafts that match are the text), teacher-forced elsewhere.
        matches_per_position: share of positions from which the first i + 1 all match.
    """
    batches = [Batch(windows, _from(windows, first))] if isinstance(windows, Tensor) else windows
    depth = min(LONGEST_DRAFT, max(int(batch.weights.sum(-1).max()) for batch in batches))
    kl = overlap = agreed = 0.0
    num_first = num_rounds = 0
    leading = torch.zeros(depth, dtype=torch.float64)
    for batch in batches:
        for rows, passed, target_logits, start in _passes(target, head, batch, depth):
            counted = batch.weights[rows].to(target_logits.device) > 0
            firsts = counted[:, start::depth]
            p = target_logits[:, start::depth][firsts].log_softmax(-1)
            q = passed[:, start::depth][firsts].log_softmax(-1)
            token_ids = draft_token_ids(head)
            said = p if token_ids is None else p[:, token_ids]
            kl += _divergence(said.log_softmax(-1), q)  # within what the draft can say
            overlap += torch.minimum(said.exp(), q.exp()).sum(dtype=torch.float64).item()
            drafted = passed.argmax(-1)
            drafted = drafted if token_ids is None else token_ids[drafted]
            match = (target_logits.argmax(-1) == drafted)[:, start:]
            agreed += match[:, ::depth][firsts].sum().item()
            num_first += int(firsts.sum())
            whole = match.shape[1] // depth * depth
            rounds = match[:, :whole].unflatten(1, (-1, depth))
            rounds = rounds[counted[:, start : start + whole].unflatten(1, (-1, depth)).all(-1)]
            leading += rounds.double().cumprod(-1).sum(0).cpu()
            num_rounds += len(rounds)
    leading /= num_rounds
    return {
        "kl": kl / num_first,
        "agreement": agreed / num_first,
        "overlap": overlap / num_first,
        "expected_matches": leading.sum().item(),
        "matches_per_position": [round(share, 4) for share in leading.tolist()],
    }


def _from(windows: Tensor, first: int) -> Tensor:
    """Return weights that count every position from `first` on."""
    return (torch.arange(windows.shape[1]) >= first).float().expand(windows.shape)


def draft_passes(
    target: Target, head: nn.Module, windows: Tensor, first: int
) -> Iterator[tuple[slice, Tensor, Tensor, int]]:
    """Yield (which windows, target logits, draft logits, where the first round starts).

    A draft sees what was known when its round began: every position from `first` on begins a round in one pass of
    each group of windows, where rounds are as long as the longest draft. Logits are [num_windows, seq_len, vocab_size].
    """
    depth = min(LONGEST_DRAFT, windows.shape[1] - first)
    for rows, drafted, target_logits, start in _passes(target, head, Batch(windows), depth, first):
        yield rows, target_logits, widened(drafted, head, target_logits.shape[-1]), start


def _passes(
    target: Target, head: nn.Module, batch: Batch, depth: int, first: int = 0
) -> Iterator[tuple[slice, Tensor, Tensor, int]]:
    """Yield (which rows, draft logits within the draft vocabulary, target logits, where the first round starts)."""
    device, seq_len = target.lm_head.weight.device, batch.ids.shape[1]
    positions = torch.arange(seq_len, device=device)
    at_once = max(1, CHUNK_PASSES // (seq_len * target.config.vocab_size))
    lm_logits, draft_logits = float_head(target), float_head(target, draft_token_ids(head))
    # A float32 target is measured in float32.
    lower = autocast(device.type, target.lm_head.weight.dtype != torch.float32)
    for row in range(0, len(batch.ids), at_once):
        rows = slice(row, min(row + at_once, len(batch.ids)))
        with lower:
            exit_hidden, output, rotary = target(batch.ids[rows].to(device))
        target_logits = lm_logits(output)
        for start in range(first, first + depth):
            block_starts = torch.where(positions < start, 0, positions - (positions - start) % depth)
            with lower:
                hidden = head(exit_hidden, output, rotary, block_starts)
            yield rows, draft_logits(hidden), target_logits, start


def float_head(target: Target, token_ids: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """Return what makes float32 logits, [..., vocab_size], of a normed hidden state, [..., hidden_size].

    In bfloat16 many tokens would share the first place.

    Args:
        token_ids: [draft_vocab_size] int64, whose logits are wanted; None: all.
    """
    weight, bias = target.lm_head.weight, target.lm_head.bias
    if token_ids is not None:
        weight, bias = weight[token_ids], None if bias is None else bias[token_ids]
    weight, bias = weight.float(), None if bias is None else bias.float()
    return lambda hidden: F.linear(hidden.float(), weight, bias)


def _divergence(p: Tensor, q: Tensor) -> float:
    """Return the sum of KL(p || q) over all positions.

    Args:
        p, q: [num_positions, vocab_size], log-probabilities.
    """
    return (p.exp() * (p - q)).sum(dtype=torch.float64).item()
