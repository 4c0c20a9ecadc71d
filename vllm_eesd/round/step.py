"""A step of the target that judged drafts, and which of its values may be read late."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from vllm_eesd.round.draft import DraftRound
from vllm_eesd.round.outcome import StepTimes


class Readable(Protocol):
    """Values that a device may still be computing."""

    def numpy(self) -> np.ndarray:
        """Return the values; waits for them."""


class Known(NamedTuple):
    """Values that are on the host already."""

    values: np.ndarray

    def numpy(self) -> np.ndarray:
        """Return the values."""
        return self.values


class Step(NamedTuple):
    """A step of the target that judged drafts; what has to be read of it is read `Session.delay` steps later.

    Attributes:
        slots: [num_rows] int64, distinct: its requests.
        decoded: [num_rows] bool, False for prompt chunks.
        num_verified: [num_rows] int64, draft tokens that it judged.
        counts: [num_rows, 1 or 3] integers: tokens emitted; and where n-gram drafts are known as late as this: the
            leading tokens of the last one that were emitted, and the tokens at the text's end that are matched now.
        times: called with the tokens emitted and whether all rows decoded, once those are read; returns what the step
            and the drafting before it took. None: no times are learned.
        unobserved: [num_rows] bool, rows of whose drafts it is not known which were judged; they are counted, and teach
            nothing. None: no row.
    """

    slots: np.ndarray
    decoded: np.ndarray
    num_verified: np.ndarray
    counts: Readable
    times: Callable[[int, bool], StepTimes] | None = None
    unobserved: np.ndarray | None = None


class Drafted(NamedTuple):
    """A round's drafts whose confidences are read with their verdict.

    Attributes:
        round: its rows and their lengths.
        generations: [num_rows] int64, which of a slot's requests each row was.
        confidences: [num_rows, K] float32, known before the counts of the step that judges the drafts.
        num_steps: draft steps that ran.
    """

    round: DraftRound
    generations: np.ndarray
    confidences: Readable
    num_steps: int

    def num_not_finite(self) -> int:
        """Return how many tokens of submitted drafts have a confidence that is NaN."""
        confidences = self.confidences.numpy()
        lengths = np.where(self.round.from_ngrams, 0, self.round.lengths)
        return int((np.isnan(confidences) & (np.arange(confidences.shape[1]) < lengths[:, None])).sum())

    def known_confidences(self) -> np.ndarray:
        """Return those of the steps that ran, [num_rows, K] float32, for every row ran every step; NaN of the rest."""
        confidences = self.confidences.numpy()
        return np.where(np.arange(confidences.shape[1]) < self.num_steps, confidences, np.nan)


class UnderWay(NamedTuple):
    """A step whose verdict is not read yet, and what was known when it ran.

    Attributes:
        generations: [num_rows] int64, which of a slot's requests each row was.
        source, matched: [num_rows], of its drafts, see `PendingDrafts`.
        drafted: by the round before; None if nothing was, or if its confidences were known at once.
        decision, num_skipped: see `StepTimes`.
    """

    step: Step
    generations: np.ndarray
    source: np.ndarray
    matched: np.ndarray
    drafted: Drafted | None
    decision: tuple[int, float] | None
    num_skipped: int


class Grown(NamedTuple):
    """Requests whose texts are known to be longer than one token a step: their slots, and by how many tokens."""

    slots: np.ndarray
    num_tokens: np.ndarray
