"""What happened: counters over all rounds and, on request, a record of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Round:
    """One request's verification round.

    Attributes:
        request_id: the engine's id.
        draft: the draft tokens the target judged.
        num_accepted: how many of them, from the left, it accepted.
        emitted: the tokens emitted: the accepted ones and the target's own next one.
    """

    request_id: str
    draft: list[int]
    num_accepted: int
    emitted: list[int]


@dataclass
class DraftStats:
    """Counters of decoding rounds, per request and round.

    A round without drafts counts as a round: `acceptance_length` = emitted / rounds, and position i's unconditional
    acceptance is accepted_per_position[i] / rounds.

    Args:
        num_speculative_tokens: K.
    """

    num_speculative_tokens: int
    rounds: int = 0
    emitted: int = 0
    draft_length_histogram: np.ndarray = field(init=False)
    accepted_length_histogram: np.ndarray = field(init=False)
    _record: list[Round] | None = field(default=None, init=False)

    #: Rounds kept for `take_rounds`; older ones are dropped when nobody takes them.
    MAX_RECORDED_ROUNDS = 100_000

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.rounds = self.emitted = 0
        self.draft_length_histogram = np.zeros(self.num_speculative_tokens + 1, dtype=np.int64)
        self.accepted_length_histogram = np.zeros(self.num_speculative_tokens + 1, dtype=np.int64)

    def count(self, request_id: str, draft: Sequence[int], emitted: Sequence[int]) -> None:
        """Add one round; `emitted` holds the accepted drafts and one more token."""
        num_accepted = len(emitted) - 1
        self.rounds += 1
        self.emitted += len(emitted)
        self.draft_length_histogram[len(draft)] += 1
        self.accepted_length_histogram[num_accepted] += 1
        if self._record is not None:
            if len(self._record) >= self.MAX_RECORDED_ROUNDS:
                del self._record[: self.MAX_RECORDED_ROUNDS // 2]
            self._record.append(Round(request_id, list(draft), num_accepted, list(emitted)))

    def take_rounds(self) -> list[Round]:
        """Return the rounds since the last call and go on recording; the first call starts it."""
        taken, self._record = self._record or [], []
        return taken

    def as_dict(self) -> dict[str, int | list[int]]:
        """Return plain integers, as `eesd bench` and the metrics print them."""
        # A histogram of lengths, summed from the right, counts how often each position was reached.
        reached = self.draft_length_histogram[::-1].cumsum()[::-1][1:]
        accepted = self.accepted_length_histogram[::-1].cumsum()[::-1][1:]
        return {
            "rounds": self.rounds,
            "drafted": int(reached.sum()),
            "accepted": int(accepted.sum()),
            "emitted": self.emitted,
            "drafted_per_position": reached.tolist(),
            "accepted_per_position": accepted.tolist(),
            "draft_length_histogram": self.draft_length_histogram.tolist(),
        }
