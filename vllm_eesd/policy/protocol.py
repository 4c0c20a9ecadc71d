"""What a round asks of a policy, and what every policy keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from vllm_eesd.policy.calibration import Calibration
from vllm_eesd.policy.costs import CostModel
from vllm_eesd.policy.posterior import BetaPosterior
from vllm_eesd.policy.source import GREEDY, NGRAM
from vllm_eesd.policy.state import save_state
from vllm_eesd.policy_args import PolicyArgs

#: Per request, for the interval that metrics show: its ends are good to about a hundredth.
INTERVAL_DRAWS = 1000
#: What a prior's key ends with, by kind of draft.
KEY_ENDINGS = ("", " (drawn)", " (shared noise)")


class Outcome(NamedTuple):
    """What became of one step's drafts, of the requests that decoded; one that drafted nothing is among them.

    Attributes:
        slots: [num_rows] int64, distinct: the requests.
        num_verified: [num_rows] int64, draft tokens the target judged; cut and placeholder drafts do not count.
        num_accepted: [num_rows] int64, of those, the leading ones accepted.
        confidences: [num_rows, MAX_SPECULATIVE_TOKENS] float32, of the draft tokens; NaN if unknown.
        source: [num_rows] int8, how each draft was made, see `vllm_eesd.policy.source`.
        updates_shared_prior: [num_rows] bool, which may teach what other requests use (the learned prior, the
            calibration): not those with penalties, bad_words, allowed_token_ids or a grammar.
        num_steps: draft steps that ran, where more did than the longest draft verified has tokens.
    """

    slots: np.ndarray
    num_verified: np.ndarray
    num_accepted: np.ndarray
    confidences: np.ndarray
    source: np.ndarray
    updates_shared_prior: np.ndarray
    num_steps: int = 0


class DraftLengthPolicy:
    """Decides, after every drafted token, which requests draft one more; this one, `fixed`, all up to their limit.

    One round of a batch: `begin`, then `more` before each draft step until no row goes on; when the target has judged
    the drafts, `observe`. `vllm_eesd.round.draft.DraftRound` makes these calls. State stands in arrays over request
    slots and does not grow with the requests served.

    **Exact output.** A drafted token is always submitted for verification. `more` decides about token k + 1 when token
    k is drawn and token k + 1 is not, and it is told the confidence of token k only: no policy can make the submission
    of a token depend on that token. Its random generator is its own.

    Args:
        posterior: acceptance per request slot, empty; a policy may set how fast it forgets.
        seed: of the policy's random generator; the same seed and the same calls give the same decisions.
        costs: what steps cost; a default model when None.
        calibration: what confidences mean; an empty table when None.
        settings: the policy's own; the defaults of all policies when None.
        state_file: where `save_state` writes; None: nowhere.
    Attributes:
        needs_confidence: whether `more` wants the confidence of the last drafted token.
        plans_ahead: whether `more`, told no confidence, decides by what it expects of the drafts to come: it can be
            asked for a whole round at once.
        kinds: [max_num_reqs] int8, by slot, how a request's drafts are made: GREEDY, DRAWN or SHARED_NOISE.
    """

    needs_confidence: bool = False
    plans_ahead: bool = False

    def __init__(
        self,
        posterior: BetaPosterior,
        seed: int,
        costs: CostModel | None = None,
        calibration: Calibration | None = None,
        settings: PolicyArgs | None = None,
        state_file: str | None = None,
    ) -> None:
        self.posterior = posterior
        self.costs = CostModel() if costs is None else costs
        self.calibration = Calibration() if calibration is None else calibration
        self.settings = PolicyArgs() if settings is None else settings
        self._state_file = state_file
        self.kinds = np.zeros(posterior.max_num_reqs, dtype=np.int8)
        self._generator = np.random.default_rng(seed)

    @property
    def uses_ngrams(self) -> bool:
        """Whether `take_ngrams` may return anything but zeros."""
        return self.settings.uses_ngrams

    def reset(
        self, slots: np.ndarray, keys: Sequence[str] | None = None, kinds: np.ndarray | Sequence[int] | None = None
    ) -> None:
        """Forget the requests that had these slots: new ones took them over.

        Args:
            slots: [num_rows] int64, distinct.
            keys: the name of each request's LoRA adapter, "" for none; used with `prior_key` "lora".
            kinds: [num_rows] integers, of their drafts; each kind has a prior of its own. None: all are greedy.
        """
        self.kinds[slots] = GREEDY if kinds is None else kinds
        names = keys if keys is not None and self.settings.prior_key == "lora" else [""] * len(slots)
        endings = (KEY_ENDINGS[kind] for kind in self.kinds[slots])
        self.posterior.reset(slots, [name + ending for name, ending in zip(names, endings, strict=True)])

    def begin(self, slots: np.ndarray, limits: np.ndarray) -> None:
        """Prepare a round for these requests, all those of the batch that decode.

        Args:
            slots: [num_rows] int64, distinct.
            limits: [num_rows] int64, the longest draft each may have; 0 drafts nothing.
        """

    def take_ngrams(self, slots: np.ndarray, chances: np.ndarray, limits: np.ndarray) -> np.ndarray:
        """Return how many tokens of its n-gram draft each request submits; 0 lets the exit head draft.

        Called once, between `begin` and `more`. An n-gram draft is a function of the text emitted so far, so submitting
        it or not may depend on anything known by then.

        Args:
            slots: [num_rows] int64, the round's.
            chances: [num_rows, longest + 1] float64, that all of the n-gram draft's first j tokens are accepted; see
                `vllm_eesd.round.ngram`.
            limits: [num_rows] int64, tokens each may submit: at least what the exit head may draft.
        Returns:
            [num_rows] int64.
        """
        return np.zeros(len(slots), dtype=np.int64)

    def more(self, slots: np.ndarray, num_drafted: int, confidence: np.ndarray | None) -> np.ndarray:
        """Return which of these requests draft token `num_drafted` + 1; those at their limit are stopped anyway.

        Args:
            slots: [num_rows] int64, the requests that drafted `num_drafted` tokens this round: at 0 all of the round's
                without an n-gram draft.
            num_drafted: tokens each of them has drafted so far this round.
            confidence: [num_rows] float32, of token `num_drafted`: the draft model's probability of its most probable
                token, or `margin_confidence` where token and noise decide nothing about what is emitted; None at 0 and
                when the draft model was not asked for it.
        Returns:
            [num_rows] bool.
        """
        return np.ones(len(slots), dtype=bool)

    def observe(self, outcome: Outcome) -> None:
        """Learn from one verified step; requests that drafted nothing are rounds too."""
        drafted = outcome.source != NGRAM  # n-gram drafts say nothing of the exit head: they count as none
        judged = outcome.num_verified * drafted, outcome.num_accepted * drafted
        self.posterior.observe(outcome.slots, *judged, outcome.updates_shared_prior)
        if judged[0].any():
            of_whom = outcome.updates_shared_prior, self.kinds[outcome.slots]
            self.calibration.observe(outcome.confidences, *judged, *of_whom)

    def idle_rounds(self, slots: np.ndarray) -> int:
        """Return for how many rounds this batch need not be asked, after one in which it drafted nothing.

        The rounds skipped are reported by `skipped`, before the next `begin`.

        Args:
            slots: [num_rows] int64, the batch.
        """
        return 0

    def skipped(self, slots: np.ndarray, num_rounds: int) -> None:
        """Take in rounds in which no row was asked; every request emitted one token in each.

        Args:
            slots: [num_rows] int64, the batch.
        """

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
        if self._state_file is not None:
            save_state(self._state_file, self.posterior, self.calibration)
