"""The round: which requests draft, how far, and what the target made of it. Knows no engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from vllm_eesd.continuations import NgramContinuations
from vllm_eesd.policy import DraftLengthPolicy


class DraftModel(Protocol):
    """Runs one token per row through target layers [0, N), the exit head and the LM head."""

    def step(self, rows: np.ndarray, offset: int, token_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the drafted tokens and, when the policy asked for it, their confidences.

        Args:
            rows: [num_rows] int64, ascending: the round's rows that draft one more token.
            offset: tokens each of them drafted before, so that its input stands `offset` after the bonus token.
            token_ids: [num_rows] int64, the input token of each row: the bonus token or the last draft.
        Returns:
            ([num_rows] int64 token ids, [num_rows] float32 probabilities or None).
        """


def draft_round(
    model: DraftModel,
    policy: DraftLengthPolicy,
    slots: np.ndarray,
    bonus_token_ids: np.ndarray,
    limits: np.ndarray,
    continuations: NgramContinuations | None = None,
    copy_limits: np.ndarray | None = None,
) -> list[list[int]]:
    """Return the draft of every row, as long as the policy wants it and `limits` allows.

    Args:
        model: drafts one token at a time.
        policy: answers "draft one more?" for each row after each token, of which the draft already consists.
        slots: [num_rows] int64, the policy's slot of each row.
        bonus_token_ids: [num_rows] int64, the token the target just emitted.
        limits: [num_rows] int64, the longest draft each row may have; 0 drafts nothing.
        continuations: what the rows' texts suggest: the policy may submit it instead of drafting.
        copy_limits: [num_rows] int64, the longest continuation each row may submit, at least `limits`: a row that the
            exit head cannot draft for may still copy. `limits` when None.
    Returns:
        num_rows lists of token ids, of ragged lengths.
    Source: arXiv 2406.03853, algorithm 1; the continuations are this project's.
    """
    drafts: list[list[int]] = [[] for _ in slots]
    token_ids, confidence, num_drafted = bonus_token_ids, None, 0
    if copy_limits is None:
        copy_limits = limits
    if not copy_limits.any():
        return drafts
    policy.begin_round(slots, limits)
    rows = np.arange(len(slots))
    if continuations is not None:
        copied = np.minimum(policy.copy(slots, continuations.chances(slots), copy_limits), copy_limits)
        if copied.any():
            for row in np.flatnonzero(copied).tolist():
                drafts[row] = continuations.tokens[slots[row], : copied[row]].tolist()
            rows = np.flatnonzero(copied == 0)
            slots, token_ids, limits = slots[rows], token_ids[rows], limits[rows]
    while len(rows):
        going_on = policy.draft_more(slots, num_drafted, confidence) & (limits > num_drafted)
        if not going_on.any():
            break
        if not going_on.all():
            rows, token_ids = rows[going_on], token_ids[going_on]
            slots, limits = slots[going_on], limits[going_on]
        token_ids, confidence = model.step(rows, num_drafted, token_ids)
        for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=False):
            drafts[row].append(token_id)
        num_drafted += 1
    return drafts


class RequestSlots:
    """Gives every request id a stable slot in the policy's arrays, and takes slots back.

    vLLM moves requests between batch rows from step to step; a slot stays with its request.

    Args:
        max_num_reqs: slots, as many as the engine can run at once.
    """

    def __init__(self, max_num_reqs: int) -> None:
        self._slot_of: dict[str, int] = {}
        self._free = list(range(max_num_reqs - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._slot_of)

    def request_ids(self) -> list[str]:
        """Return the requests that have a slot."""
        return list(self._slot_of)

    def in_use(self) -> np.ndarray:
        """Return the slots that requests have, [num_requests] int64."""
        return np.array(list(self._slot_of.values()), dtype=np.int64)

    def release(self, request_ids: Sequence[str]) -> None:
        """Forget these requests; unknown ids are ignored."""
        for request_id in request_ids:
            slot = self._slot_of.pop(request_id, None)
            if slot is not None:
                self._free.append(slot)

    def assign(self, request_ids: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the slot of each request of the running batch, and which of them are new.

        Requests that are no longer in the batch keep their slot only while slots are plentiful.

        Args:
            request_ids: the running batch, at most `max_num_reqs` distinct ids.
        Returns:
            ([num_rows] int64 slots, [num_rows] bool newly assigned).
        """
        new = [request_id not in self._slot_of for request_id in request_ids]
        if sum(new) > len(self._free):
            self.release([other for other in self._slot_of if other not in set(request_ids)])
        for request_id, is_new in zip(request_ids, new, strict=False):
            if is_new:
                self._slot_of[request_id] = self._free.pop()
        return np.array([self._slot_of[r] for r in request_ids], dtype=np.int64), np.array(new, dtype=bool)
