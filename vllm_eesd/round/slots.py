"""What stays with a request from round to round: its slot, and its draft until that is judged."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_eesd.config import MAX_SPECULATIVE_TOKENS
from vllm_eesd.policy import GREEDY
from vllm_eesd.round.draft import DraftRound


class PendingDrafts:
    """Every slot's last draft: how long it is, how it was made, and what is known of it.

    Args:
        max_num_reqs: slots.
    Attributes:
        lengths: [max_num_reqs] int64.
        confidences: [max_num_reqs, MAX_SPECULATIVE_TOKENS] float32, of the last draft whose are known; NaN if unknown.
        source: [max_num_reqs] int8, see `vllm_eesd.policy.source`.
        matched: [max_num_reqs] int64, `NgramRates.matched` when the n-gram draft was found, taken or not; negative if
            none was.
    """

    def __init__(self, max_num_reqs: int) -> None:
        self.lengths = np.zeros(max_num_reqs, dtype=np.int64)
        self.confidences = np.full((max_num_reqs, MAX_SPECULATIVE_TOKENS), np.nan, dtype=np.float32)
        self.source = np.full(max_num_reqs, GREEDY, dtype=np.int8)
        self.matched = np.zeros(max_num_reqs, dtype=np.int64)

    def keep(self, round_: DraftRound, confidences: np.ndarray | None = None) -> None:
        """Take over what a round has decided.

        Args:
            confidences: [num_rows, MAX_SPECULATIVE_TOKENS] float32, if they are known.
        """
        self.lengths[round_.slots] = round_.lengths
        if confidences is not None:
            self.confidences[round_.slots] = confidences
        self.source[round_.slots] = round_.source

    def clear(self, slots: np.ndarray | slice = slice(None)) -> None:
        """Forget the drafts of these slots, [any] int64; of all by default."""
        self.lengths[slots] = self.matched[slots] = 0
        self.confidences[slots] = np.nan
        self.source[slots] = GREEDY


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
            running = set(request_ids)
            self.release([other for other in self._slot_of if other not in running])
        for request_id, is_new in zip(request_ids, new, strict=True):
            if is_new:
                self._slot_of[request_id] = self._free.pop()
        return np.array([self._slot_of[r] for r in request_ids], dtype=np.int64), np.array(new, dtype=bool)
