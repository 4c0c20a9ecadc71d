"""One round of drafting: which rows draft one more token, asked after every token (arXiv 2406.03853, algorithm 1)."""

from __future__ import annotations

from typing import Protocol, cast

import numpy as np

from vllm_eesd.config import MAX_SPECULATIVE_TOKENS
from vllm_eesd.policy import NGRAM, DraftLengthPolicy
from vllm_eesd.round.second_drafter import DraftChances, SecondDrafter


class DraftRound:
    """Asks a policy, token by token, how far each row of a batch drafts.

    A driver runs draft steps for `rows` and tells their confidences; how many steps it runs ahead of what it has told
    is its own affair. `draft_tokens` is the driver without any delay.

    Args:
        policy: decides for each row after each token, of which the draft already consists.
        slots: [num_rows] int64, the policy's slot of each row.
        limits: [num_rows] int64, the longest draft each row may have; 0 drafts nothing.
        ngrams: what the second drafter's drafts are worth: the policy takes one for a row where that is more.
        ngram_limits: [num_rows] int64, the longest n-gram draft each row may have, at least `limits`: a row for which
            the exit head cannot draft may still have one. `limits` when None.
    Attributes:
        rows: [any] int64, ascending: the rows that draft another token, as far as the policy has been told.
        num_decided: draft steps decided on; the rows in `rows` have this many tokens once those have run.
        lengths: [num_rows] int64, of each row's draft.
        source: [num_rows] int8, how each row's draft is made, see `vllm_eesd.policy.source`.
        confidences: [num_rows, MAX_SPECULATIVE_TOKENS] float32, of the tokens drafted; NaN if unknown.
        may_draft: whether any row may have a draft.
    """

    def __init__(
        self,
        policy: DraftLengthPolicy,
        slots: np.ndarray,
        limits: np.ndarray,
        ngrams: DraftChances | None = None,
        ngram_limits: np.ndarray | None = None,
    ) -> None:
        self.policy, self.slots, self.limits, self.ngrams = policy, slots, limits, ngrams
        self.num_decided = 0
        self.rows = np.arange(len(slots))
        self.lengths = np.zeros(len(slots), dtype=np.int64)
        self.source = policy.kinds[slots].copy()
        self.confidences = np.full((len(slots), MAX_SPECULATIVE_TOKENS), np.nan, dtype=np.float32)
        ngram_limits = limits if ngram_limits is None else ngram_limits
        self.may_draft = bool((limits if ngrams is None else ngram_limits).any())
        if not self.may_draft:
            self.rows = self.rows[:0]
            return
        policy.begin(slots, limits)
        if ngrams is not None:
            self.lengths = np.minimum(policy.take_ngrams(slots, ngrams.chances(slots), ngram_limits), ngram_limits)
            self.source[self.lengths > 0] = NGRAM
            self.rows = np.flatnonzero(self.source != NGRAM)
        self._extend(None)

    def tell(self, confidence: np.ndarray | None) -> None:
        """Take in the confidences of the token that `rows` drafted last, and ask which of them draft another.

        Args:
            confidence: [len(rows)] float32; None where they were not asked for.
        """
        if confidence is not None:
            self.confidences[self.rows, self.num_decided - 1] = confidence
        self._extend(confidence)

    def decide_ahead(self, confidences: np.ndarray) -> None:
        """Decide the whole round before any draft step of it has run.

        Args:
            confidences: [num_rows, any] float32, of each request's last drafts that are known, NaN where unknown: a
                policy that cannot do without is told these instead of the coming ones.
        """
        while len(self.rows):
            told = None
            if self.policy.needs_confidence and not self.policy.plans_ahead:
                told = confidences[self.rows, self.num_decided - 1]
            self._extend(told)

    def _extend(self, confidence: np.ndarray | None) -> None:
        if not len(self.rows):
            return
        more = self.policy.more(self.slots[self.rows], self.num_decided, confidence)
        self.rows = self.rows[more & (self.limits[self.rows] > self.num_decided)]
        self.num_decided += 1
        self.lengths[self.rows] = self.num_decided

    @property
    def from_ngrams(self) -> np.ndarray:
        """Whose draft is an n-gram draft, [num_rows] bool."""
        return self.source == NGRAM

    @property
    def num_steps(self) -> int:
        """The draft steps decided on so far: as many as the longest draft of the exit head has tokens."""
        return int(self.lengths[~self.from_ngrams].max(initial=0))

    def ngram_drafts(self) -> list[list[int]]:
        """Return each row's n-gram draft, num_rows lists of token ids; empty where the exit head drafts."""
        drafts: list[list[int]] = [[] for _ in self.slots]
        for row in np.flatnonzero(self.from_ngrams).tolist():
            tokens = cast(SecondDrafter, self.ngrams).tokens
            drafts[row] = tokens[self.slots[row], : self.lengths[row]].tolist()
        return drafts


class DraftModel(Protocol):
    """Drafts one token at a time for rows of a batch."""

    def step(self, rows: np.ndarray, offset: int, token_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the drafted tokens and, when the policy asked for it, their confidences.

        Args:
            rows: [any] int64, ascending: the round's rows that draft one more token.
            offset: tokens each of them drafted before, so that its input stands `offset` after the input token.
            token_ids: [len(rows)] int64, the input of each row: the token the target just emitted, or the last draft.
        Returns:
            ([len(rows)] int64 token ids, [len(rows)] float32 probabilities or None).
        """


def draft_tokens(round_: DraftRound, model: DraftModel, input_token_ids: np.ndarray) -> list[list[int]]:
    """Return the draft of every row, num_rows lists of token ids of ragged lengths.

    Args:
        round_: has just begun.
        model: drafts one token at a time.
        input_token_ids: [num_rows] int64, the token the target just emitted.
    Source: arXiv 2406.03853, algorithm 1; the n-gram drafts are this project's.
    """
    drafts, token_ids = round_.ngram_drafts(), input_token_ids.copy()
    while len(rows := round_.rows):
        drafted, confidence = model.step(rows, round_.num_decided - 1, token_ids[rows])
        for row, token_id in zip(rows.tolist(), drafted.tolist(), strict=True):
            drafts[row].append(token_id)
        token_ids[rows] = drafted
        round_.tell(confidence)
    return drafts
