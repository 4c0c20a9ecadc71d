"""The confidence policy: stop behind a token the draft model was not sure of."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from vllm_eesd.policy.calibration import Calibration
from vllm_eesd.policy.costs import CostModel
from vllm_eesd.policy.posterior import BetaPosterior
from vllm_eesd.policy.protocol import DraftLengthPolicy


class Confidence(DraftLengthPolicy):
    """Draft while the last drafted token's confidence is at least `threshold`; the first token always.

    Args:
        threshold: in [0, 1].
    Raises:
        ValueError: threshold is not in [0, 1].
    Source: Hugging Face transformers' assisted generation (assistant_confidence_threshold, whose default this is).
    """

    ARGS: ClassVar[tuple[str, ...]] = ("threshold",)
    needs_confidence = True

    def __init__(
        self,
        posterior: BetaPosterior,
        seed: int,
        costs: CostModel | None = None,
        calibration: Calibration | None = None,
        threshold: float = 0.4,
    ) -> None:
        super().__init__(posterior, seed, costs, calibration)
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0 <= threshold <= 1:
            raise ValueError(f"eesd: policy_args.threshold={threshold!r:.80} is not valid: must be 0 to 1")
        self.threshold = threshold

    def more(self, slots: np.ndarray, num_drafted: int, confidence: np.ndarray | None) -> np.ndarray:
        if confidence is None:
            return np.ones(len(slots), dtype=bool)
        return confidence >= self.threshold
