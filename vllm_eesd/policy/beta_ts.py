"""The paper's policy: Thompson sampling from a Beta posterior decides after every drafted token."""

from __future__ import annotations

import numpy as np

from vllm_eesd.policy.protocol import DraftLengthPolicy


class BetaThompson(DraftLengthPolicy):
    """After every drafted token draw theta ~ Beta(alpha, beta), chi ~ Bernoulli(theta); continue while chi = 1.

    The first token is always drafted.
    Source: arXiv 2406.03853, section 3.3.
    """

    def more(self, slots: np.ndarray, num_drafted: int, confidence: np.ndarray | None) -> np.ndarray:
        if num_drafted == 0:
            return np.ones(len(slots), dtype=bool)
        theta = self.posterior.draw(slots, self._generator)
        return self._generator.random(len(slots)) < theta
