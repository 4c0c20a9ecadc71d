"""What the round loop asks of a policy."""

from __future__ import annotations

from typing import ClassVar, Protocol

import numpy as np

from vllm_eesd.policy.posterior import BetaPosterior


class DraftLengthPolicy(Protocol):
    """Decides, after every drafted token, which requests draft one more.

    A decision about draft token k + 1 may use everything known before that token is drawn, the confidences of
    tokens 1..k included. It never sees the token whose submission it decides: that is what keeps the output exact
    when drafts are sampled.

    Attributes:
        ARGS: names allowed in `policy_args`.
        needs_confidence: whether `draft_more` wants the confidence of the last drafted token.
        posterior: acceptance posterior per request slot; the round feeds it, the policy reads it.
    """

    ARGS: ClassVar[tuple[str, ...]]
    needs_confidence: bool
    posterior: BetaPosterior

    def draft_more(self, slots: np.ndarray, num_drafted: int, confidence: np.ndarray | None) -> np.ndarray:
        """Return which of these requests draft token `num_drafted` + 1.

        Args:
            slots: [num_rows] int64, request slots still drafting.
            num_drafted: tokens each of them has drafted so far this round.
            confidence: [num_rows] float32, the draft model's probability of its last token; None when not asked for.
        Returns:
            [num_rows] bool.
        """
