"""A policy per request: every row of a round goes to the policy its request asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vllm_eesd.config import MAX_SPECULATIVE_TOKENS
from vllm_eesd.policy.protocol import DraftLengthPolicy


class Dispatch(DraftLengthPolicy):
    """Sends rows to named policies, each with its own posterior and generator; they share costs and calibration.

    Every policy sees only its own rows, so one that weighs a batch as a whole takes the others' rows for no cost.

    Args:
        default: name of the policy for requests that ask for none.
        build: makes a policy from its name, called at a name's first use; all must know equally many slots and share
            one `CostModel` and one `Calibration`.
    """

    def __init__(self, default: str, build: Callable[[str], DraftLengthPolicy]) -> None:
        self._build = build
        self._policies = {default: build(default)}
        first = self._policies[default]
        self.posterior, self.costs, self.calibration = first.posterior, first.costs, first.calibration
        self._names = [default]
        self._choice = np.zeros(first.posterior.max_num_reqs, dtype=np.int64)
        #: The policy of every row of the round that began last, None if they differ.
        self._only: DraftLengthPolicy | None = None

    @property
    def needs_confidence(self) -> bool:
        return any(policy.needs_confidence for policy in self._policies.values())

    @property
    def copies_text(self) -> bool:
        return any(policy.copies_text for policy in self._policies.values())

    def choose(self, slots: np.ndarray, names: Sequence[str | None]) -> None:
        """Set which policy these new requests use, before `reset`; None is the default.

        Raises:
            ValueError: no such policy; nothing is changed.
        """
        for name in names:
            if name is not None and name not in self._policies:
                self._policies[name] = self._build(name)
                self._names.append(name)
        self._only = None
        self._choice[slots] = [0 if name is None else self._names.index(name) for name in names]

    def reset(self, slots: np.ndarray, keys: Sequence[str] | None = None) -> None:
        for policy, rows in self._split(slots):
            policy.reset(slots[rows], None if keys is None else [keys[row] for row in rows])

    def begin_round(self, slots: np.ndarray, limits: np.ndarray) -> None:
        self._only = self._policy_of_all(slots)
        if self._only is not None:
            self._only.begin_round(slots, limits)
            return
        for policy, rows in self._split(slots):
            policy.begin_round(slots[rows], limits[rows])

    def copy(self, slots: np.ndarray, chances: np.ndarray, limits: np.ndarray) -> np.ndarray:
        if self._only is not None:
            return self._only.copy(slots, chances, limits)
        copied = np.zeros(len(slots), dtype=np.int64)
        for policy, rows in self._split(slots):
            copied[rows] = policy.copy(slots[rows], chances[rows], limits[rows])
        return copied

    def draft_more(self, slots: np.ndarray, num_drafted: int, confidence: np.ndarray | None) -> np.ndarray:
        if self._only is not None:
            return self._only.draft_more(slots, num_drafted, confidence)
        going_on = np.zeros(len(slots), dtype=bool)
        for policy, rows in self._split(slots):
            going_on[rows] = policy.draft_more(
                slots[rows], num_drafted, None if confidence is None else confidence[rows]
            )
        return going_on

    def observe(
        self, slots: np.ndarray, num_verified: np.ndarray, num_accepted: np.ndarray, shares: np.ndarray | None = None
    ) -> None:
        only = self._policy_of_all(slots)
        if only is not None:
            only.observe(slots, num_verified, num_accepted, shares)
            return
        for policy, rows in self._split(slots):
            policy.observe(
                slots[rows], num_verified[rows], num_accepted[rows], None if shares is None else shares[rows]
            )

    def rest(self, slots: np.ndarray) -> int:
        only = self._policy_of_all(slots)
        return 0 if only is None else only.rest(slots)

    def rested(self, slots: np.ndarray, num_rounds: int) -> None:
        for policy, rows in self._split(slots):
            policy.rested(slots[rows], num_rounds)

    def confidences_of(self, slots: np.ndarray) -> np.ndarray:
        confidences = np.empty((len(slots), MAX_SPECULATIVE_TOKENS), dtype=np.float32)
        for policy, rows in self._split(slots):
            confidences[rows] = policy.confidences[slots[rows]]
        return confidences

    def copied_of(self, slots: np.ndarray) -> np.ndarray:
        only = self._policy_of_all(slots)
        if only is not None:
            return only.copied[slots]
        copied = np.zeros(len(slots), dtype=np.int64)
        for policy, rows in self._split(slots):
            copied[rows] = policy.copied[slots[rows]]
        return copied

    def posterior_of(self, slots: np.ndarray) -> np.ndarray:
        parameters = np.empty((2, len(slots)))
        for policy, rows in self._split(slots):
            parameters[:, rows] = policy.posterior.parameters(slots[rows])
        return parameters

    def recall(self, slots: np.ndarray, confidences: np.ndarray | float) -> None:
        confidences = np.broadcast_to(confidences, (len(slots), MAX_SPECULATIVE_TOKENS))
        for policy, rows in self._split(slots):
            policy.recall(slots[rows], confidences[rows])

    def metrics(self, slots: np.ndarray) -> dict[str, Any]:
        """Return the default policy's beliefs about the requests that use it."""
        return self._policies[self._names[0]].metrics(slots[self._choice[slots] == 0])

    def save_state(self) -> None:
        self._policies[self._names[0]].save_state()

    def _policy_of_all(self, slots: np.ndarray) -> DraftLengthPolicy | None:
        """The policy that all these rows use, if there is one: the usual case, in which nothing need be split."""
        first = 0
        if len(self._names) > 1 and len(slots):
            choice = self._choice[slots]
            first = choice[0]
            if (choice != first).any():
                return None
        return self._policies[self._names[first]]

    def _split(self, slots: np.ndarray) -> list[tuple[DraftLengthPolicy, np.ndarray]]:
        """(policy, row numbers) of every policy that has rows."""
        choice = self._choice[slots]
        return [(self._policies[self._names[i]], np.flatnonzero(choice == i)) for i in np.unique(choice)]
