"""The fixed policy: always the longest draft allowed."""

from __future__ import annotations

import numpy as np

from vllm_eesd.policy.protocol import DraftLengthPolicy


class Fixed(DraftLengthPolicy):
    """Draft until the row's own limit (at most `num_speculative_tokens`)."""

    def more(self, slots: np.ndarray, num_drafted: int, confidence: np.ndarray | None) -> np.ndarray:
        return np.ones(len(slots), dtype=bool)
