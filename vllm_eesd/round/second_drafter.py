"""What a second drafter is: it proposes whole drafts, which cost no draft step. N-gram lookup (`ngram.py`) is one."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class DraftChances(Protocol):
    """What is believed of a second drafter's drafts: all that a round needs whose tokens the device finds (V2).

    Attributes:
        matched: [max_num_reqs] int64, by slot, what its draft stands on; 0: there is none.
    """

    matched: np.ndarray

    def reset(self, slots: np.ndarray) -> None:
        """Forget the requests that had these slots."""

    def chances(self, slots: np.ndarray) -> np.ndarray:
        """Return the chance that the first j tokens of each slot's draft are accepted, [num_rows, longest + 1]."""


class SecondDrafter(DraftChances, Protocol):
    """Drafts that are found on the host (V1).

    A draft must be a function of the text emitted so far: it is verified as certain, and taking it or not must say
    nothing of what the target will emit.

    Attributes:
        tokens: [max_num_reqs, longest] int64, by slot, its draft.
    """

    tokens: np.ndarray

    def update(
        self,
        slots: np.ndarray,
        texts: np.ndarray,
        rows: np.ndarray,
        num_tokens: np.ndarray,
        updates_shared_prior: np.ndarray,
    ) -> None:
        """Learn from what became of the last drafts, and find the next ones; see `NgramDrafter.update`."""
