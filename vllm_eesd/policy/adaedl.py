"""AdaEDL's policy: stop when a bound on the acceptance, from the draft distribution's entropy, falls low."""

from __future__ import annotations

import numpy as np

from vllm_eesd.policy.draft_verify import AdaptingThreshold

#: The source's factor between entropy and the squared total variation distance it bounds.
ENTROPY_FACTOR = 0.2
#: Over how many tokens the draft distribution is taken to spread what its first does not have.
OTHER_TOKENS = 32
_TINY = 1e-6


class AdaEDL(AdaptingThreshold):
    """Stop after a token where 1 - sqrt(0.2 H) is below the request's threshold, which adapts as in `draft_verify`.

    H is the draft distribution's entropy in nats. A round carries its largest probability c only, so the entropy of a
    distribution with c on one token and the rest spread evenly over `OTHER_TOKENS` stands in for it.
    Source: arXiv 2410.18351, section 3.
    """

    initial_threshold = 0.4

    def score(self, confidence: np.ndarray) -> np.ndarray:
        chance = np.clip(confidence.astype(np.float64), _TINY, 1 - _TINY)
        entropy = -chance * np.log(chance) - (1 - chance) * (np.log1p(-chance) - np.log(OTHER_TOKENS))
        return 1 - np.sqrt(ENTROPY_FACTOR * entropy)
