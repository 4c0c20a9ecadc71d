"""The second drafter: n-gram drafts are what followed when the text last ended as it does now.

Finding one costs a search of the text instead of draft steps, and whether it would have been right shows in every token
the target emits, whichever drafter was used: its acceptance is known without ever having tried it.

Source: prompt lookup, as in vllm/v1/spec_decode/ngram_proposer.py. That the length of the match tells how likely the
draft is, is also what suffix decoding uses (arXiv 2411.04975, section 4); the estimate is this project's.
"""

from __future__ import annotations

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


class NgramRates:
    """The chance that the target emits what an n-gram draft says, by matched length.

    Token j + 1 of a draft after m matched tokens extends a match of m + j: one rate for each matched length, learned
    over all requests whose texts are as familiar and corrected by each request's own outcomes, gives them all.
    Where the matched length is known some steps late, the draft's first token has rates of its own: the match may have
    ended or begun since.

    Args:
        max_num_reqs: request slots.
        longest: tokens of a draft.
        delayed: whether `matched` is of a text that has gone on since.
    Attributes:
        matched: [max_num_reqs] int64, tokens of each slot's text matched when last seen; 0 for none.
    """

    def __init__(self, max_num_reqs: int, longest: int, delayed: bool = False) -> None:
        self.longest = longest
        self.matched = np.zeros(max_num_reqs, dtype=np.int64)
        #: [max_num_reqs] float64, share of the latest tokens that stood in the text before; negative: unknown.
        self._familiarity = np.full(max_num_reqs, -1.0)
        lengths = np.arange(MAX_MATCH + 1)
        # Before anything is seen, m matched tokens are one outcome of m successes to two failures.
        given = np.stack([np.ones(MAX_MATCH + 1), lengths / (lengths + 2.0)])
        #: [familiar or not, first token or any, tokens judged and right, matched length] float64.
        self._common = np.tile(given, (2, 1 + delayed, 1, 1))
        #: [max_num_reqs, first token or any, tokens judged and right, class of matched lengths] float64.
        self._own = np.zeros((max_num_reqs, 1 + delayed, 2, NUM_CLASSES))
        no_rows = np.zeros(0, dtype=np.int64)  # compiles: no request waits for that
        self.learn(no_rows, no_rows, no_rows, no_rows, no_rows.astype(bool))
        self.chances(no_rows)

    def reset(self, slots: np.ndarray) -> None:
        """Forget the requests that had these slots."""
        self.matched[slots] = 0
        self._familiarity[slots] = -1.0
        self._own[slots] = 0.0

    def see(self, slots: np.ndarray, matched: np.ndarray) -> None:
        """Take in how much of their texts' ends the slots' requests match now, [num_rows] int64."""
        self.matched[slots] = matched
        before, stood = self._familiarity[slots], (matched > 0).astype(float)
        before = np.where(before < 0.0, stood, before)
        self._familiarity[slots] = before + (stood - before) / FAMILIARITY_MEMORY

    def learn(
        self,
        slots: np.ndarray,
        matched: np.ndarray,
        num_judged: np.ndarray,
        num_right: np.ndarray,
        updates_shared_prior: np.ndarray,
    ) -> None:
        """Learn from what the target emitted where the drafts stood, whether they were submitted or not.

        Args:
            slots: [num_rows] int64, distinct.
            matched: [num_rows] int64, `self.matched` when the draft was found.
            num_judged: [num_rows] int64, tokens of it that can be compared with emitted ones.
            num_right: [num_rows] int64, the leading ones that were emitted.
            updates_shared_prior: [num_rows] bool, whose outcomes may teach what other requests use.
        """
        familiar = (self._familiarity[slots] >= MOST).astype(np.int64)
        _learn_rows(slots, matched, num_judged, num_right, updates_shared_prior, (familiar, self._common, self._own))

    def chances(self, slots: np.ndarray) -> np.ndarray:
        """Return the chance that all of the first j tokens are accepted, [num_rows, longest + 1] float64; 1 at j = 0.

        Where nothing matched it is 0 from j = 1 on, unless the matched length is known late.
        """
        chances = np.empty((len(slots), self.longest + 1))
        familiar = (self._familiarity[slots] >= MOST).astype(np.int64)
        _chances(slots, self.matched, familiar, self._common, self._own, chances)
        return chances


class NgramDrafter(NgramRates):
    """The n-gram draft of each running request, found on the host.

    The draft is the tokens after the longest earlier occurrence of the text's end (of several, the latest); where the
    text ends it goes on with the draft itself.

    Args:
        max_num_reqs: request slots.
        longest: tokens of a draft.
    Attributes:
        tokens: [max_num_reqs, longest] int64, each slot's n-gram draft.
    """

    def __init__(self, max_num_reqs: int, longest: int) -> None:
        super().__init__(max_num_reqs, longest)
        self.tokens = np.zeros((max_num_reqs, longest), dtype=np.int64)
        #: [max_num_reqs] int64, of the text that each draft continues.
        self._text_length = np.zeros(max_num_reqs, dtype=np.int64)
        no_rows = np.zeros(0, dtype=np.int64)
        self.update(no_rows, np.zeros((0, 1), dtype=np.int32), no_rows, no_rows, no_rows.astype(bool))

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
        drafts = self.tokens, self.matched, self._text_length
        judged = _judge_rows(slots, texts, rows, num_tokens, drafts)
        self.learn(slots, self.matched[slots], *judged, updates_shared_prior)
        _find_rows(slots, texts, rows, num_tokens, drafts, self._familiarity)


@numba.njit(cache=True)
def _class_of(length: int) -> int:
    return 3 if length >= 8 else 2 if length >= 4 else 1 if length >= 2 else 0


@numba.njit(cache=True)
def _learn_rows(
    slots: np.ndarray,
    matched: np.ndarray,
    num_judged: np.ndarray,
    num_right: np.ndarray,
    updates_shared_prior: np.ndarray,
    rates: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> None:
    """See `NgramRates.learn`."""
    familiar, common, own = rates
    for row, slot in enumerate(slots):
        for j in range(min(num_right[row] + 1, num_judged[row])):
            length = min(matched[row] + j, MAX_MATCH)
            right = 1.0 if j < num_right[row] else 0.0
            rate = 0 if j == 0 else common.shape[1] - 1
            own[slot, rate, 0, _class_of(length)] += 1.0
            own[slot, rate, 1, _class_of(length)] += right
            if updates_shared_prior[row]:
                judged = common[familiar[row], rate]
                kept = min(1.0, MEMORY / (judged[0, length] + 1.0))
                judged[0, length] = kept * (judged[0, length] + 1.0)
                judged[1, length] = kept * (judged[1, length] + right)


@numba.njit(cache=True)
def _chances(
    slots: np.ndarray,
    matched: np.ndarray,
    familiar: np.ndarray,
    common: np.ndarray,
    own: np.ndarray,
    chances: np.ndarray,
) -> None:
    """See `NgramRates.chances`."""
    for row, slot in enumerate(slots):
        chances[row, 0] = 1.0
        chances[row, 1:] = 0.0
        if matched[slot] == 0 and common.shape[1] == 1:
            continue
        for j in range(chances.shape[1] - 1):
            length = min(matched[slot] + j, MAX_MATCH)
            rate = 0 if j == 0 else common.shape[1] - 1
            judged, own_judged = common[familiar[row], rate], own[slot, rate]
            kind = _class_of(length)
            of_all = judged[1, length] / judged[0, length]
            chance = (own_judged[1, kind] + COMMON_WEIGHT * of_all) / (own_judged[0, kind] + COMMON_WEIGHT)
            if j == 0 and common.shape[1] > 1:
                # Drafts are chosen because their rates look high: on average those are lower than they look.
                chance *= 1.0 - judged[0, length] ** -0.5
            chances[row, j + 1] = chances[row, j] * chance


@numba.njit(cache=True)
def _judge_rows(
    slots: np.ndarray,
    texts: np.ndarray,
    rows: np.ndarray,
    num_tokens: np.ndarray,
    drafts: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    """Return how many tokens of each draft can be judged by its text, and how many of them, from the first, are right.

    Args:
        drafts: of all slots: tokens, matched lengths, length of the text that each continues.
    """
    tokens, matched, text_length = drafts
    num_judged, num_right = np.zeros_like(slots), np.zeros_like(slots)
    for row, slot in enumerate(slots):
        if matched[slot] > 0:
            emitted = texts[rows[row], text_length[slot] : num_tokens[row]]
            num_judged[row] = min(len(emitted), tokens.shape[1])
            while num_right[row] < num_judged[row] and emitted[num_right[row]] == tokens[slot, num_right[row]]:
                num_right[row] += 1
    return num_judged, num_right


@numba.njit(cache=True)
def _find_rows(
    slots: np.ndarray,
    texts: np.ndarray,
    rows: np.ndarray,
    num_tokens: np.ndarray,
    drafts: tuple[np.ndarray, np.ndarray, np.ndarray],
    familiarity: np.ndarray,
) -> None:
    """Find the next drafts; see `_judge_rows`."""
    tokens, matched, text_length = drafts
    for row, slot in enumerate(slots):
        text = texts[rows[row], : num_tokens[row]]
        searched = text[max(len(text) - MAX_SEARCHED, 0) :]
        num_new = len(text) - text_length[slot] if familiarity[slot] >= 0.0 else int(2 * FAMILIARITY_MEMORY)
        text_length[slot] = len(text)
        matched[slot], follower = _longest_match(searched)
        familiarity[slot] = _familiarity(searched, num_new, matched[slot] > 0, familiarity[slot])
        period = len(searched) - follower
        for j in range(tokens.shape[1]):
            tokens[slot, j] = searched[follower + j] if j < period else tokens[slot, j - period]


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
