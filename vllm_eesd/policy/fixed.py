"""The fixed policy: always the longest draft allowed."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from vllm_eesd.policy.posterior import BetaPosterior


class Fixed:
    """Draft until the row's own limit (at most `num_speculative_tokens`)."""

    ARGS: ClassVar[tuple[str, ...]] = ()
    needs_confidence = False

    def __init__(self, posterior: BetaPosterior, seed: int) -> None:
        del seed  # nothing here is random
        self.posterior = posterior

    def draft_more(self, slots: np.ndarray, num_drafted: int, confidence: np.ndarray | None) -> np.ndarray:
        return np.ones(len(slots), dtype=bool)
