"""What happened: counters over all rounds and, on request, a record of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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
    decode_ms: float = 0.0
    plain_ms: float = 0.0
    draft_length_histogram: np.ndarray = field(init=False)
    accepted_length_histogram: np.ndarray = field(init=False)
    _record: list[Round] | None = field(default=None, init=False)

    #: Rounds kept for `take_rounds`; older ones are dropped when nobody takes them.
    MAX_RECORDED_ROUNDS = 100_000

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.rounds = self.emitted = 0
        self.decode_ms = self.plain_ms = 0.0
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

    def count_time(self, decode_ms: float, plain_ms: float) -> None:
        """Add the time of a step in which everybody decoded, and what its tokens would have taken without drafts."""
        self.decode_ms += decode_ms
        self.plain_ms += plain_ms

    def speedup(self) -> float | None:
        """Return the estimated speedup over plain decoding, None before any step was timed.

        An estimate: a plain step's time is measured now and then, or inferred from steps with drafts.
        """
        return self.plain_ms / self.decode_ms if self.decode_ms else None

    def summary(self) -> str:
        """Return one line for a log; of everything counted so far."""
        drafted = int((self.draft_length_histogram * np.arange(self.num_speculative_tokens + 1)).sum())
        accepted = self.emitted - self.rounds
        speedup = self.speedup()
        return (
            f"{self.emitted / max(self.rounds, 1):.2f} tokens a round, {drafted / max(self.rounds, 1):.2f} drafted, "
            f"{accepted / max(drafted, 1):.0%} of them accepted, "
            f"{self.draft_length_histogram[0] / max(self.rounds, 1):.0%} of rounds without a draft; "
            f"estimated speedup over plain decoding: {'unknown' if speedup is None else f'{speedup:.2f}x'}"
        )

    def take_rounds(self) -> list[Round]:
        """Return the rounds since the last call and go on recording; the first call starts it."""
        taken, self._record = self._record or [], []
        return taken

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers, as `eesd bench` and the metrics print them."""
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
            "estimated_speedup": self.speedup(),
        }
