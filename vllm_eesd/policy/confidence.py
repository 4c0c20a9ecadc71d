"""The confidence policy: stop after a token the draft model was not sure of."""

from __future__ import annotations

import numpy as np

from vllm_eesd.policy.calibration import Calibration
from vllm_eesd.policy.costs import CostModel
from vllm_eesd.policy.posterior import BetaPosterior
from vllm_eesd.policy.protocol import DraftLengthPolicy


class Confidence(DraftLengthPolicy):
    """Draft while the last drafted token's confidence is at least `threshold`; the first token always.

    Args:
        threshold: see `vllm_eesd.policy_args.ConfidenceArgs`.
    Source: Hugging Face transformers' assisted generation (assistant_confidence_threshold, whose default this is).
    """

    needs_confidence = True

    def __init__(
        self,
        posterior: BetaPosterior,
        seed: int,
        costs: CostModel | None = None,
        calibration: Calibration | None = None,
        *,
        threshold: float,
    ) -> None:
        super().__init__(posterior, seed, costs, calibration)
        self.threshold = threshold

    def more(self, slots: np.ndarray, num_drafted: int, confidence: np.ndarray | None) -> np.ndarray:
        if confidence is None:
            return np.ones(len(slots), dtype=bool)
        return confidence >= self.threshold
