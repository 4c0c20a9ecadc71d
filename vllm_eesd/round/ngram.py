"""The second drafter: n-gram drafts are what followed when the text last ended as it does now.

Finding one costs a search of the text instead of draft steps, and whether it would have been right shows in every token
the target emits, whichever drafter was used: its acceptance is known without ever having tried it.

Source: prompt lookup, as in vllm/v1/spec_decode/ngram_proposer.py. That the length of the match tells how likely the
draft is, is also what suffix decoding uses (arXiv 2411.04975, section 4); the estimate is this project's.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

#: The longest match told apart from longer ones; and how far back a text is searched, which bounds the time it takes.
MAX_MATCH, MAX_SEARCHED = 16, 32768
#: Outcomes that a matched length's rate remembers: a workload that repeats less must be noticed before its drafts cost
#: much.
MEMORY = 50.0
#: A text is familiar if most of its last tokens, about so many, stood in it before: a match is worth more there than in
#: a text that repeats nothing, where it is chance.
FAMILIARITY_MEMORY, MOST = 16.0, 0.5
#: A request's own outcomes by matched length, in classes 1, 2-3, 4-7, 8 and more: the weight of the common rate, in
#: outcomes.
NUM_CLASSES, COMMON_WEIGHT = 4, 16.0


class _State(NamedTuple):
    """What is known of each slot's text and of n-gram drafts in general.

    Attributes:
        tokens: [max_num_reqs, longest] int64, each slot's n-gram draft.
        matched: [max_num_reqs] int64, tokens matched, 0 for no draft.
        text_length: [max_num_reqs] int64, of the text that the draft continues.
        familiarity: [max_num_reqs] float64, share of the latest tokens that stood in the text before; negative:
            unknown.
        common: [2, 2, MAX_MATCH + 1] float64, tokens judged and right, by whether the text is familiar and matched
            length.
        own: [2, max_num_reqs, NUM_CLASSES] float64, tokens judged and right, by slot and class of matched lengths.
    """

    tokens: np.ndarray
    matched: np.ndarray
    text_length: np.ndarray
    familiarity: np.ndarray
    common: np.ndarray
    own: np.ndarray


class NgramDrafter:
    """The n-gram draft of each running request, and the chance that the target emits the same.

    The draft is the tokens after the longest earlier occurrence of the text's end (of several, the latest); where the
    text ends it goes on with the draft itself. Token j + 1 of a draft after m matched tokens extends a match of m + j:
    one rate for each matched length, learned over all requests whose texts are as familiar and corrected by each
    request's own outcomes, gives them all.

    Args:
        max_num_reqs: request slots.
        longest: tokens of a draft.
    Attributes:
        tokens: [max_num_reqs, longest] int64, each slot's n-gram draft.
    """

    def __init__(self, max_num_reqs: int, longest: int) -> None:
        self.tokens = np.zeros((max_num_reqs, longest), dtype=np.int64)
        lengths = np.arange(MAX_MATCH + 1)
        # Before anything is seen, m matched tokens are one outcome of m successes to two failures.
        given = np.stack([np.ones(MAX_MATCH + 1), lengths / (lengths + 2.0)])
        self._state = _State(
            tokens=self.tokens,
            matched=np.zeros(max_num_reqs, dtype=np.int64),
            text_length=np.zeros(max_num_reqs, dtype=np.int64),
            familiarity=np.full(max_num_reqs, -1.0),
            common=np.stack([given, given], axis=1),
            own=np.zeros((2, max_num_reqs, NUM_CLASSES)),
        )
        no_rows = np.zeros(0, dtype=np.int64)  # compiles: no request waits for that
        self.update(no_rows, np.zeros((0, 1), dtype=np.int32), no_rows, no_rows, no_rows.astype(bool))
        self.chances(no_rows)

    def reset(self, slots: np.ndarray) -> None:
        """Forget the requests that had these slots."""
        self._state.matched[slots] = 0
        self._state.familiarity[slots] = -1.0
        self._state.own[:, slots] = 0.0

    def update(
        self,
        slots: np.ndarray,
        texts: np.ndarray,
        rows: np.ndarray,
        num_tokens: np.ndarray,
        updates_shared_prior: np.ndarray,
    ) -> None:
        """Learn from what became of the last drafts, and find the next ones.

        Args:
            slots: [num_rows] int64, distinct.
            texts: [any, longest text] int32, token ids.
            rows: [num_rows] int64, the row of `texts` with each slot's text.
            num_tokens: [num_rows] int64, the length of its text, prompt and output, 1 or more.
            updates_shared_prior: [num_rows] bool, whose outcomes may teach what other requests use.
        """
        _update(slots, texts, rows, num_tokens, updates_shared_prior, self._state)

    def chances(self, slots: np.ndarray) -> np.ndarray:
        """Return the chance that all of the first j tokens are accepted, [num_rows, longest + 1] float64; 1 at j = 0.

        It is 0 from j = 1 on where there is no draft.
        """
        chances = np.empty((len(slots), self.tokens.shape[1] + 1))
        _chances(slots, self._state, chances)
        return chances


@numba.njit(cache=True)
def _class_of(length: int) -> int:
    return 3 if length >= 8 else 2 if length >= 4 else 1 if length >= 2 else 0


@numba.njit(cache=True)
def _familiarity(text: np.ndarray, num_new: int, last_stood: bool, familiarity: float) -> float:
    """Return the share of the latest tokens that stood in the text before, the new ones at its end taken in.

    Of the last one that is known, for its match was looked for.
    """
    last = len(text) - 1
    for end in range(max(len(text) - num_new, 0), len(text)):
        stood = 1.0 if (last_stood if end == last else text[end] in text[:end]) else 0.0
        before = familiarity if familiarity >= 0.0 else stood
        familiarity = before + (stood - before) / FAMILIARITY_MEMORY
    return familiarity


@numba.njit(cache=True)
def _longest_match(text: np.ndarray) -> tuple[int, int]:
    """Return how many tokens at the text's end stand somewhere before, at most MAX_MATCH, and what follows them."""
    last = len(text) - 1
    longest, follower = 0, 0
    for end in range(last - 1, -1, -1):
        length = 0
        while length < MAX_MATCH and length <= end and text[end - length] == text[last - length]:
            length += 1
        if length > longest:
            longest, follower = length, end + 1
            if longest == MAX_MATCH:
                break
    return longest, follower


@numba.njit(cache=True)
def _update(
    slots: np.ndarray,
    texts: np.ndarray,
    rows: np.ndarray,
    num_tokens: np.ndarray,
    updates_shared_prior: np.ndarray,
    state: _State,
) -> None:
    """See `NgramDrafter.update`."""
    tokens, matched, text_length, familiarity, common, own = state
    for index, slot in enumerate(slots):
        text = texts[rows[index], : num_tokens[index]]
        if matched[slot] > 0:
            emitted = text[text_length[slot] :]
            known = int(familiarity[slot] >= MOST)
            for j in range(min(len(emitted), tokens.shape[1])):
                length = min(matched[slot] + j, MAX_MATCH)
                right = 1.0 if emitted[j] == tokens[slot, j] else 0.0
                kind = _class_of(length)
                own[0, slot, kind] += 1.0
                own[1, slot, kind] += right
                if updates_shared_prior[index]:
                    kept = min(1.0, MEMORY / (common[0, known, length] + 1.0))
                    common[0, known, length] = kept * (common[0, known, length] + 1.0)
                    common[1, known, length] = kept * (common[1, known, length] + right)
                if right == 0.0:
                    break
        searched = text[max(len(text) - MAX_SEARCHED, 0) :]
        num_new = len(text) - text_length[slot] if familiarity[slot] >= 0.0 else int(2 * FAMILIARITY_MEMORY)
        text_length[slot] = len(text)
        matched[slot], follower = _longest_match(searched)
        familiarity[slot] = _familiarity(searched, num_new, matched[slot] > 0, familiarity[slot])
        period = len(searched) - follower
        for j in range(tokens.shape[1]):
            tokens[slot, j] = searched[follower + j] if j < period else tokens[slot, j - period]


@numba.njit(cache=True)
def _chances(slots: np.ndarray, state: _State, chances: np.ndarray) -> None:
    """See `NgramDrafter.chances`."""
    _, matched, _, familiarity, common, own = state
    for index, slot in enumerate(slots):
        chances[index, 0] = 1.0
        chances[index, 1:] = 0.0
        if matched[slot] == 0:
            continue
        known = int(familiarity[slot] >= MOST)
        for j in range(chances.shape[1] - 1):
            length = min(matched[slot] + j, MAX_MATCH)
            kind = _class_of(length)
            rate = common[1, known, length] / common[0, known, length]
            rate = (own[1, slot, kind] + COMMON_WEIGHT * rate) / (own[0, slot, kind] + COMMON_WEIGHT)
            chances[index, j + 1] = chances[index, j] * rate
