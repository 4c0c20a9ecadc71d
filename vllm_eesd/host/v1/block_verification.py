"""V1's verification of a ragged batch, compiled: on a CPU the calls of array operations would take most of its time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numba
import numpy as np
import torch

#: Columns whose sum is kept, so that a choice reads a row once and one block of it again.
BLOCK = 256
#: Sums may be added up in any order, which lets them use vector instructions.
_compiled = numba.njit(cache=True, fastmath={"reassoc", "contract"})


class Proposals(NamedTuple):
    """What the drafts of a step were drawn from.

    Attributes:
        q: [num_drawn, vocab_size] float32, at each request's temperature.
        first_q: [num_reqs] int64, where a request's begin in q; -1: its drafts are certain, not drawn.
    """

    q: np.ndarray
    first_q: np.ndarray

    @staticmethod
    def none(num_reqs: int, vocab_size: int) -> Proposals:
        """Return that nothing was drawn."""
        return Proposals(np.zeros((0, vocab_size), dtype=np.float32), np.full(num_reqs, -1))

    def dense(self, num_drafts: Sequence[int], token_ids: Iterable[int]) -> torch.Tensor:
        """Return every distribution, certain ones too, [num_reqs, longest draft, vocab_size] float32.

        Args:
            num_drafts: of each request.
            token_ids: the drafts of all, one request's after the other's; -1 is a placeholder.
        """
        gathered = np.zeros((len(num_drafts), max(num_drafts), self.q.shape[1]), dtype=np.float32)
        tokens = iter(token_ids)
        for request, (num, first) in enumerate(zip(num_drafts, self.first_q.tolist(), strict=True)):
            drafts = np.array([next(tokens) for _ in range(num)], dtype=np.int64)
            # Placeholders were drawn from nothing, whatever is kept of drafts that the scheduler dropped.
            num_drawn = np.count_nonzero(drafts >= 0) if first >= 0 else 0
            gathered[request, :num_drawn] = self.q[first : first + num_drawn]
            gathered[request, np.arange(num_drawn, num), drafts[num_drawn:].clip(0)] = 1.0
        return torch.from_numpy(gathered)


@_compiled
def verify_blocks(
    p: np.ndarray,
    proposals: Proposals,
    input_token_ids: np.ndarray,
    cu_num_logits: np.ndarray,
    best: np.ndarray,
    uniforms: np.ndarray,
    sampled: np.ndarray,
) -> None:
    """Write the tokens that the target emits: the accepted drafts and one more of its own, per request.

    A greedy request accepts drafts while they equal the target's argmax; a sampled one's are judged as a block. Either
    way the output is the target's, whatever the drafts' lengths hang on but their own tokens.

    Args:
        p: [num_logits, vocab_size] float32, the target's distributions at each request's temperature.
        input_token_ids: [num_logits] int64, of each row: the last token emitted, then drafts; -1 is a placeholder.
        cu_num_logits: [num_reqs + 1] int64, request r has rows cu_num_logits[r] up to cu_num_logits[r + 1].
        best: [num_logits] int64, the target's argmax for a greedy request's rows, -1 for a sampled one's.
        uniforms: [num_logits, 2] float64 in [0, 1): for a draft's test, and for the token after a request's last one.
        sampled: [num_reqs, longest draft + 1] int32, written: -1 after a request's last token.
    Source: arXiv 2403.10444, algorithm 2; `kernels/reference/rejection.py` says the same in array operations.
    """
    sampled[:] = -1
    q, first_q = proposals
    for request in range(len(first_q)):
        first, end = cu_num_logits[request], cu_num_logits[request + 1]
        drafts = input_token_ids[first + 1 : end]
        accepted = 0
        if best[first] >= 0:
            while accepted < len(drafts) and drafts[accepted] == best[first + accepted]:
                accepted += 1
            token = best[first + accepted]
        else:
            rows, q_rows = p[first:end], q[:0]
            if first_q[request] >= 0:
                q_rows = q[first_q[request] : first_q[request] + len(drafts)]
            accepted, share = _judge(rows, q_rows, drafts, uniforms[first:end, 0])
            token = _token_after(rows[accepted], q_rows, drafts, accepted, share, uniforms[first + accepted, 1])
        sampled[request, :accepted] = drafts[:accepted]
        sampled[request, accepted] = token


@_compiled
def _judge(p: np.ndarray, q: np.ndarray, drafts: np.ndarray, tests: np.ndarray) -> tuple[int, float]:
    """Return how many of a request's drafts are accepted, and the share of p that was left after the last of those."""
    joint, accepted, share = 1.0, 0, 1.0
    for i, token in enumerate(drafts):
        if token < 0:
            break
        ratio = float(p[i, token])
        if len(q):
            ratio /= q[i, token]
        joint = min(joint * ratio, 1.0)
        chance = joint
        if i + 1 < len(drafts) and drafts[i + 1] >= 0:
            if len(q):
                mass = _excess(p[i + 1], q[i + 1], joint)
            else:
                mass = joint * (1.0 - p[i + 1, drafts[i + 1]])
            rest = mass + 1.0 - joint
            chance = mass / rest if rest > 0.0 else 1.0
        if tests[i] < chance:
            accepted, share = i + 1, joint
    return accepted, share


@_compiled
def _excess(p: np.ndarray, q: np.ndarray, share: float) -> float:
    """Return the sum of max(share p - q, 0)."""
    total = 0.0
    for column in range(len(p)):
        total += max(share * p[column] - q[column], 0.0)
    return total


@_compiled
def _token_after(p: np.ndarray, q: np.ndarray, drafts: np.ndarray, accepted: int, share: float, uniform: float) -> int:
    """Return the token after the accepted drafts: from p if none was refused, else from max(share p - q, 0)."""
    if accepted == len(drafts) or drafts[accepted] < 0:
        return choose(p, uniform, 0)
    refused = drafts[accepted]
    weights = p.copy()
    if len(q):
        for column in range(len(p)):
            weights[column] = max(share * p[column] - q[accepted, column], 0.0)
    else:
        weights[refused] = 0.0
    return choose(weights, uniform, refused)


@_compiled
def choose(weights: np.ndarray, uniform: float, otherwise: int) -> int:
    """Return a column drawn in proportion to the weights by inverting their sum; `otherwise` if there are none.

    Args:
        weights: [vocab_size] float32, not negative; they need not sum to 1.
        uniform: in [0, 1).
    """
    num_blocks = (len(weights) + BLOCK - 1) // BLOCK
    sums, total = np.zeros(num_blocks), 0.0
    for block in range(num_blocks):
        part = 0.0
        for column in range(block * BLOCK, min((block + 1) * BLOCK, len(weights))):
            part += weights[column]
        sums[block] = part
        total += part
    if not total > 0.0:
        return otherwise
    left, block = uniform * total, 0
    while block < num_blocks - 1 and left >= sums[block]:
        left -= sums[block]
        block += 1
    chosen = otherwise
    for column in range(block * BLOCK, min((block + 1) * BLOCK, len(weights))):
        if weights[column] > 0.0:
            chosen = column
            left -= weights[column]
            if left < 0.0:
                break
    return chosen


@_compiled
def choose_each(weights: np.ndarray, uniforms: np.ndarray, tokens: np.ndarray, drawn: np.ndarray) -> None:
    """Overwrite the tokens of the rows that are `drawn` by ones drawn from their weights, see `choose`.

    Args:
        weights: [num_rows, vocab_size] float32.
        uniforms: [num_rows] float64.
        tokens: [num_rows] int64, written.
        drawn: [num_rows] bool.
    """
    for row in range(len(tokens)):
        if drawn[row]:
            tokens[row] = choose(weights[row], uniforms[row], tokens[row])


def compile_now() -> None:
    """Call the compiled functions with next to nothing, so that no request waits for their compilation."""
    p, ids = np.ones((1, 1), dtype=np.float32), np.zeros(1, dtype=np.int64)
    verify_blocks(p, Proposals(p, ids - 1), ids, np.arange(2), ids, np.zeros((1, 2)), np.zeros((1, 1), dtype=np.int32))
    choose_each(p, np.zeros(1), ids, np.zeros(1, dtype=bool))
