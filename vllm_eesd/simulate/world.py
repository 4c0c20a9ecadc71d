"""What steps cost in a replay: the truth that a simulated policy can only measure."""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_eesd.policy.costs import CostModel

#: Plain steps in ms by batch size, and what a round of drafts adds relative to them: the embedded 24-layer model with
#: N = 2, float32, on two CPU cores. At batch 1 a round of k drafts costs 1.2 + 0.06 k + 0.125 k plain steps.
PLAIN_MS = {1: 3.6, 4: 4.7, 8: 6.6, 16: 10.5, 64: 33.0}
VERIFY_JUMP, DRAFT_ROUND_RATIO, DRAFT_STEP_RATIO = 0.1, 0.1, 0.125
VERIFY_GROWTH = {1: 0.06, 4: 0.075, 8: 0.085, 16: 0.055, 64: 0.0155}
#: Drafts a request for which the default costs state points.
_POINTS = (1, 4, 8, 32)
#: A few thousandths of the times measured are far off, as a garbage collection or a busy core makes them.
NOISE, OUTLIER_SHARE, OUTLIER_FACTOR = 0.05, 0.004, 10.0


def default_costs() -> dict[str, Any]:
    """Return the costs above in the form of `CostModel.state`."""
    verify = {}
    for size, plain in PLAIN_MS.items():
        grown = [[k * size, plain * (1 + VERIFY_JUMP + VERIFY_GROWTH[size] * k * size)] for k in _POINTS]
        verify[str(size)] = [[0, plain], [1, plain * (1 + VERIFY_JUMP + VERIFY_GROWTH[size])]][: 2 if size > 1 else 1]
        verify[str(size)] += grown
    return {
        "verify_ms": verify,
        "draft_step_ms": [[size, DRAFT_STEP_RATIO * ms] for size, ms in PLAIN_MS.items()],
        "draft_round_ms": [[size, DRAFT_ROUND_RATIO * ms] for size, ms in PLAIN_MS.items()],
    }


class World:
    """True costs, and noisy measurements of them.

    Args:
        costs: in the form of `CostModel.state`; empty: `default_costs`.
        draft_scale: multiplies draft steps and what else a drafted round costs.
        verify_scale: multiplies what verification costs beyond a plain step.
        seed: of the noise.
    """

    def __init__(
        self, costs: dict[str, Any] | None = None, draft_scale: float = 1.0, verify_scale: float = 1.0, seed: int = 0
    ) -> None:
        self._model = CostModel()
        self._model.restore(costs or default_costs())
        self._draft_scale, self._verify_scale = draft_scale, verify_scale
        self._generator = np.random.default_rng(seed)

    def plain_ms(self, num_reqs: int) -> float:
        """Return the time of a step without drafts."""
        return self.verify_ms(num_reqs, 0)

    def verify_ms(self, num_reqs: int, num_drafts: int) -> float:
        """Return the time of a step in which so many drafts are verified in all."""
        curve = self._model.verify_curve(num_reqs, max(num_drafts, 1))
        grown = curve[num_drafts] - curve[0] - (self._model.round_ms(num_reqs) if num_drafts else 0.0)
        return float(curve[0] + self._verify_scale * grown)

    def draft_step_ms(self, num_rows: int) -> float:
        """Return the time of a draft step."""
        return float(self._draft_scale * self._model.draft_curve(num_rows)[num_rows])

    def draft_round_ms(self, num_reqs: int) -> float:
        """Return what a drafted round costs on top of its draft steps."""
        return self._draft_scale * self._model.round_ms(num_reqs)

    def round_ms(self, num_reqs: int, num_drafted: np.ndarray, num_verified: np.ndarray) -> float:
        """Return the time of drafting and of the step that verifies it, one after the other.

        Args:
            num_drafted: [num_reqs] tokens that the exit head drafted.
            num_verified: [num_reqs] tokens submitted.
        """
        ms = self.verify_ms(num_reqs, int(num_verified.sum()))
        if num_drafted.any():
            ms += self.draft_round_ms(num_reqs)
            ms += sum(self.draft_step_ms(int((num_drafted > k).sum())) for k in range(num_drafted.max()))
        return ms

    def measured(self, ms: float) -> float:
        """Return one noisy measurement of a time."""
        factor = OUTLIER_FACTOR if self._generator.random() < OUTLIER_SHARE else 1.0
        return ms * factor * float(np.exp(NOISE * self._generator.standard_normal()))
