"""What happened: counters over all rounds and, on request, a record of each."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

logger = logging.getLogger("vllm.eesd")


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


class DraftStats:
    """Counters of decoding rounds, per request and round.

    A round without drafts counts as a round: `acceptance_length` = emitted / rounds, and position i's unconditional
    acceptance is accepted_per_position[i] / rounds.

    Args:
        num_speculative_tokens: K.
    """

    #: Rounds kept for `take_rounds`; older ones are dropped when none are taken.
    MAX_RECORDED_ROUNDS = 100_000

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self._record: deque[Callable[[], list[Round]]] | None = None
        self.reset()

    def reset(self) -> None:
        self.rounds = self.emitted = self.not_finite = self.copied = self.copied_accepted = 0
        self.decode_ms = self.plain_ms = 0.0
        # Lists: counting one round in them takes a tenth of what an array takes.
        self.draft_length_histogram = [0] * (self.num_speculative_tokens + 1)
        self.accepted_length_histogram = [0] * (self.num_speculative_tokens + 1)

    def record(self, rounds: Callable[[], list[Round]]) -> None:
        """Keep rounds, counted by their lengths, for `take_rounds`.

        Args:
            rounds: returns them; called by `take_rounds` alone, and may wait for a device.
        """
        if self._record is not None:
            self._record.append(rounds)

    def count_lengths(self, num_drafted: int, num_accepted: int, num_rounds: int = 1) -> None:
        """Add rounds, all alike, of which only the lengths are known."""
        self.rounds += num_rounds
        self.emitted += num_rounds * (num_accepted + 1)
        self.draft_length_histogram[num_drafted] += num_rounds
        self.accepted_length_histogram[num_accepted] += num_rounds

    def count_ngrams(self, num_tokens: int, num_accepted: int) -> None:
        """Add draft tokens, of rounds counted otherwise, that were n-gram drafts."""
        self.copied += num_tokens
        self.copied_accepted += num_accepted

    def count_time(self, decode_ms: float, plain_ms: float) -> None:
        """Add the time of a step in which every request decoded, and what its tokens would have taken without drafts.

        Times that no clock shows are left out.
        """
        if not (0 < decode_ms < math.inf and 0 < plain_ms < math.inf):
            return
        self.decode_ms += decode_ms
        self.plain_ms += plain_ms

    def count_not_finite(self, num_tokens: int) -> None:
        """Add draft tokens that came from hidden states with infinities or NaN; the first are worth a line."""
        if num_tokens and not self.not_finite:
            logger.warning(
                "eesd: the drafter's hidden states are not finite; its drafts are worthless and the target rejects "
                "them: requests are served right, only not faster"
            )
        self.not_finite += num_tokens

    @property
    def recording(self) -> bool:
        """Whether `take_rounds` wants every round."""
        return self._record is not None

    def speedup(self) -> float | None:
        """Return the estimated speedup over plain decoding, None before any step was timed.

        An estimate: a plain step's time is measured now and then, or inferred from steps with drafts.
        """
        return self.plain_ms / self.decode_ms if self.decode_ms else None

    def summary(self) -> str:
        """Return one line for a log; of everything counted so far."""
        drafted = sum(length * rounds for length, rounds in enumerate(self.draft_length_histogram))
        accepted = self.emitted - self.rounds
        speedup = self.speedup()
        return (
            f"{self.emitted / max(self.rounds, 1):.2f} tokens a round, {drafted / max(self.rounds, 1):.2f} drafted, "
            f"{accepted / max(drafted, 1):.0%} of them accepted, "
            f"{self.copied / max(drafted, 1):.0%} copied from the text, "
            f"{self.draft_length_histogram[0] / max(self.rounds, 1):.0%} of rounds without a draft; "
            f"estimated speedup over plain decoding: {'unknown' if speedup is None else f'{speedup:.2f}x'}"
        )

    def take_rounds(self, last: bool = False) -> list[Round]:
        """Return the rounds since the last call; the first call starts the recording.

        Args:
            last: end it: while rounds are recorded, none is skipped.
        """
        taken, self._record = self._record or (), None if last else deque(maxlen=self.MAX_RECORDED_ROUNDS)
        return [round_ for rounds in taken for round_ in rounds()]

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers, as `eesd bench` and the metrics print them."""
        # A histogram of lengths, summed from the right, counts how often each position was reached.
        reached = np.cumsum(self.draft_length_histogram[::-1])[::-1][1:]
        accepted = np.cumsum(self.accepted_length_histogram[::-1])[::-1][1:]
        return {
            "rounds": self.rounds,
            "drafted": int(reached.sum()),
            "accepted": int(accepted.sum()),
            "emitted": self.emitted,
            "copied": self.copied,
            "copied_accepted": self.copied_accepted,
            "drafted_per_position": reached.tolist(),
            "accepted_per_position": accepted.tolist(),
            "draft_length_histogram": list(self.draft_length_histogram),
            "estimated_speedup": self.speedup(),
            "drafted_not_finite": self.not_finite,
        }
