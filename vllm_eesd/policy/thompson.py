"""The paper's two policies: Thompson sampling decides after every drafted token."""

from __future__ import annotations

import numpy as np

from vllm_eesd.policy.protocol import DraftLengthPolicy

#: Keeps both parameters of a Beta distribution positive.
_MARGIN = 1e-3


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


class CalibratedThompson(DraftLengthPolicy):
    """After every drafted token draw theta ~ Beta(n c, n (1 - c)), chi ~ Bernoulli(theta); continue while chi = 1.

    c is the calibrated confidence of the last drafted token, n = alpha + beta what the request's posterior has counted.
    The first token is always drafted; where no confidence is known, c is the posterior's mean, which is `beta_ts`.
    Source: arXiv 2406.03853, section 3.3, which names the variant; the formula is this project's reading of it.
    """

    needs_confidence = True

    def more(self, slots: np.ndarray, num_drafted: int, confidence: np.ndarray | None) -> np.ndarray:
        if num_drafted == 0:
            return np.ones(len(slots), dtype=bool)
        alpha, beta = self.posterior.parameters(slots)
        if confidence is None:
            center = alpha / (alpha + beta)
        else:
            accepted = self.calibration.acceptance(confidence, num_drafted - 1, self.kinds[slots])
            center = accepted.clip(_MARGIN, 1 - _MARGIN)
        theta = self._generator.beta((alpha + beta) * center, (alpha + beta) * (1 - center))
        return self._generator.random(len(slots)) < theta
