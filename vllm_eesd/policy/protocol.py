"""What a round asks of a policy, and what every policy keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm_eesd.config import MAX_SPECULATIVE_TOKENS
from vllm_eesd.policy.calibration import Calibration
from vllm_eesd.policy.costs import CostModel
from vllm_eesd.policy.posterior import BetaPosterior
from vllm_eesd.policy.state import save_state

#: Per request, for the interval that metrics show: its ends are good to about a hundredth.
INTERVAL_DRAWS = 1000


class DraftLengthPolicy:
    """Decides, after every drafted token, which requests draft one more.

    One round of a batch: `begin_round`, then `draft_more` before each draft step until nobody goes on; when the target
    has judged the drafts, `observe`. State stands in arrays over request slots and does not grow with the requests
    served.

    **Exact output.** A drafted token is always submitted for verification. `draft_more` decides about token k + 1 when
    token k is drawn and token k + 1 is not, and it is told the confidence of token k only: no policy can make the
    submission of a token depend on that token. Its random generator is its own.

    Args:
        posterior: acceptance per request slot, empty; a policy may set how fast it forgets.
        seed: of the policy's random generator; the same seed and the same calls give the same decisions.
        costs: what steps cost; a default model when None.
        calibration: what confidences mean; an empty table when None.
    Attributes:
        needs_confidence: whether `draft_more` wants the confidence of the last drafted token.
        copies_text: whether `copy` may return anything but zeros.
        confidences: [max_num_reqs, MAX_SPECULATIVE_TOKENS] float32, of each slot's current draft; NaN if unknown.
        copied: [max_num_reqs] int64, tokens of each slot's current draft that were copied; then all of them were.
        keyed_by_lora: whether requests of different LoRA adapters start from different learned priors.
        state_file: where learned state is kept over restarts; None: nowhere.
    """

    needs_confidence: bool = False
    copies_text: bool = False
    keyed_by_lora: bool = False
    state_file: str | None = None

    def __init__(
        self,
        posterior: BetaPosterior,
        seed: int,
        costs: CostModel | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        self.posterior = posterior
        self.costs = CostModel() if costs is None else costs
        self.calibration = Calibration() if calibration is None else calibration
        self.confidences = np.full((posterior.max_num_reqs, MAX_SPECULATIVE_TOKENS), np.nan, dtype=np.float32)
        self.copied = np.zeros(posterior.max_num_reqs, dtype=np.int64)
        self._generator = np.random.default_rng(seed)

    def reset(self, slots: np.ndarray, keys: Sequence[str] | None = None) -> None:
        """Forget whoever had these slots: new requests took them over.

        Args:
            slots: [num_rows] int64, distinct.
            keys: the name of each request's LoRA adapter, "" for none; used if `keyed_by_lora`.
        """
        self.posterior.reset(slots, keys if self.keyed_by_lora else None)
        self.confidences[slots] = np.nan
        self.copied[slots] = 0

    def begin_round(self, slots: np.ndarray, limits: np.ndarray) -> None:
        """Prepare a round for these requests, all those of the batch that decode.

        Args:
            slots: [num_rows] int64, distinct.
            limits: [num_rows] int64, the longest draft each may have; 0 drafts nothing.
        """

    def copy(self, slots: np.ndarray, chances: np.ndarray, limits: np.ndarray) -> np.ndarray:
        """Return how many tokens of its n-gram continuation each request submits, within its limit; 0 lets it draft.

        Called once, between `begin_round` and `draft_more`. A continuation is a function of the text emitted so far,
        so submitting it or not may depend on anything known by then.

        Args:
            slots: [num_rows] int64, the round's.
            chances: [num_rows, longest + 1] float64, that all of the continuation's first j tokens are accepted; see
                `vllm_eesd.continuations`.
            limits: [num_rows] int64, tokens each may submit: at least what it may draft.
        Returns:
            [num_rows] int64.
        """
        return np.zeros(len(slots), dtype=np.int64)

    def draft_more(self, slots: np.ndarray, num_drafted: int, confidence: np.ndarray | None) -> np.ndarray:
        """Return which of these requests draft token `num_drafted` + 1; those at their limit are stopped anyway.

        Args:
            slots: [num_rows] int64, the requests that drafted `num_drafted` tokens this round: at 0 all of the round's
                that copied nothing.
            num_drafted: tokens each of them has drafted so far this round.
            confidence: [num_rows] float32, the draft model's probability of its most probable token where it drew
                token `num_drafted`; None at 0 and when the draft model was not asked for it.
        Returns:
            [num_rows] bool.
        """
        raise NotImplementedError

    def observe(
        self, slots: np.ndarray, num_verified: np.ndarray, num_accepted: np.ndarray, shares: np.ndarray | None = None
    ) -> None:
        """Learn from one verified step; requests that drafted nothing are rounds too.

        Args:
            slots: [num_rows] int64, distinct: the requests of the step that decoded.
            num_verified: [num_rows] draft tokens the target judged (cut and placeholder drafts do not count).
            num_accepted: [num_rows] of those, the leading ones accepted.
            shares: [num_rows] bool, which may teach what other requests use (the learned prior, the calibration):
                not those with penalties, bad_words, allowed_token_ids or a grammar. None: all.
        """
        if self.copied[slots].any():  # what was copied says nothing of the exit head
            drafted = self.copied[slots] == 0
            num_verified, num_accepted = num_verified * drafted, num_accepted * drafted
        self.posterior.observe(slots, num_verified, num_accepted, shares)
        if num_verified.any():
            self.calibration.observe(self.confidences[slots], num_verified, num_accepted, shares)

    def rest(self, slots: np.ndarray) -> int:
        """Return for how many rounds this batch need not be asked, after one in which it drafted nothing.

        Whoever rests says so by `rested`, before the next `begin_round`.

        Args:
            slots: [num_rows] int64, the batch.
        """
        return 0

    def rested(self, slots: np.ndarray, num_rounds: int) -> None:
        """Take in rounds for which nobody was asked; every request emitted one token in each.

        Args:
            slots: [num_rows] int64, the batch.
        """
        self.posterior.rest(slots, num_rounds)

    def confidences_of(self, slots: np.ndarray) -> np.ndarray:
        """Return the confidences of these slots' current drafts, [num_rows, MAX_SPECULATIVE_TOKENS] float32."""
        return self.confidences[slots]

    def copied_of(self, slots: np.ndarray) -> np.ndarray:
        """Return how many tokens of these slots' current drafts were copied, [num_rows] int64."""
        return self.copied[slots]

    def posterior_of(self, slots: np.ndarray) -> np.ndarray:
        """Return alpha and beta of these slots, [2, num_rows] float64."""
        return self.posterior.parameters(slots)

    def recall(self, slots: np.ndarray, confidences: np.ndarray | float) -> None:
        """Set the confidences of these slots' drafts: before `observe`, where other rounds began since.

        Args:
            confidences: [num_rows, MAX_SPECULATIVE_TOKENS] float32; NaN if unknown.
        """
        self.confidences[slots] = confidences

    def metrics(self, slots: np.ndarray) -> dict[str, Any]:
        """Return what the policy believes, in plain numbers.

        Args:
            slots: [num_rows] int64, of the running requests.
        Returns:
            posterior_mean and posterior_interval (the middle 90%) of acceptance over these requests (None without
            any), calibration_error (expected, 0 to 1) and costs (`CostModel.state`, ms).
        """
        believed = {"posterior_mean": None, "posterior_interval": None}
        if len(slots):
            # Draws of a generator of their own: looking must not change what the policy does next.
            draws = np.random.default_rng(0).beta(*self.posterior.parameters(slots), size=(INTERVAL_DRAWS, len(slots)))
            low, high = np.quantile(draws, (0.05, 0.95)).tolist()
            believed = {"posterior_mean": float(draws.mean()), "posterior_interval": [low, high]}
        error = float(self.calibration.expected_calibration_error())
        return believed | {"calibration_error": error, "costs": self.costs.state()}

    def save_state(self) -> None:
        """Write what was learned to `state_file`, if there is one: from time to time, and at the end.

        Raises:
            OSError: the file cannot be written.
        """
        if self.state_file is not None:
            save_state(self.state_file, self.posterior, self.calibration)

    def remember(self, slots: np.ndarray, num_drafted: int, confidence: np.ndarray | None) -> None:
        """Keep the confidence of draft token `num_drafted`, for `observe`."""
        if num_drafted:
            self.confidences[slots, num_drafted - 1] = np.nan if confidence is None else confidence
