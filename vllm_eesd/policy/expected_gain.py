"""`goodput`'s arithmetic, compiled: it runs before every draft step, where numpy's call overhead would be the cost.

Arrays are over request slots unless they say otherwise; `slots` is [num_rows] int64, the rows a call is about;
`beliefs` [max_num_reqs] `BELIEFS`.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from vllm_eesd.config import MAX_SPECULATIVE_TOKENS

#: Of one token: the product of a longest draft's is a number above 0, by which the next one can be divided.
_LEAST_CHANCE = 1e-9


class Times(NamedTuple):
    """What the steps of a batch cost, as far as is known.

    Attributes:
        verify: [most drafts + 1] float64, ms by number of drafts verified; from 1 on with `round_ms`.
        draft: [num_reqs + 1] float64, ms of a draft step by number of rows.
        round_ms: what a round costs on top of its draft steps; n-gram drafts do not cost it.
    """

    verify: np.ndarray
    draft: np.ndarray
    round_ms: float


#: What is believed of a slot's drafts in this round: the longest draft it may have; its kind; the chance, seen from the
#: round's start, that its first j tokens are all accepted; and the chance that all that it has drafted so far is.
BELIEFS = np.dtype(
    [
        ("limit", np.int64),
        ("kind", np.int64),
        ("chain", np.float64, MAX_SPECULATIVE_TOKENS + 1),
        ("survival", np.float64),
    ]
)


@numba.njit(cache=True)
def begin(slots: np.ndarray, theta: np.ndarray, exponents: np.ndarray, longest: int, beliefs: np.ndarray) -> None:
    """Write what each row's draw of its posterior says of the round: `chain`.

    Args:
        theta: [num_rows] float64, the draws.
        exponents: [kinds of drafts, longest or more] how much harder than the average token each is.
        longest: the longest draft of all.
    """
    for row, slot in enumerate(slots):
        log_theta = np.log(theta[row])
        for j in range(longest):
            chance = max(np.exp(exponents[beliefs[slot].kind, j] * log_theta), _LEAST_CHANCE)
            beliefs[slot].chain[j + 1] = beliefs[slot].chain[j] * chance


@numba.njit(cache=True)
def survive(
    slots: np.ndarray, confidence: np.ndarray, edges: np.ndarray, rates: np.ndarray, beliefs: np.ndarray
) -> None:
    """Multiply each row's `survival` by the chance of its last token.

    Args:
        confidence: [num_rows] float32, NaN where unknown.
        edges: [num_bins - 1] ascending.
        rates: [kinds of drafts, num_bins + 1] acceptance by bin at the token's position; the last bin is for unknown
            confidences.
    """
    for row, slot in enumerate(slots):
        shown = confidence[row]
        column = rates.shape[1] - 1
        if not np.isnan(shown):
            column = np.searchsorted(edges, shown, side="right")
        beliefs[slot].survival *= rates[beliefs[slot].kind, column]


@numba.njit(cache=True)
def rows_to_extend(
    slots: np.ndarray, num_drafted: int, longest: int, num_drafts: int, rate: float, times: Times, beliefs: np.ndarray
) -> np.ndarray:
    """Return the rows that draft one more, none if no number of further steps pays for itself.

    Args:
        num_drafted: tokens each of these rows has drafted.
        longest: the longest draft of all.
        num_drafts: tokens that all rows together have drafted, n-gram drafts included.
        rate: tokens per ms that drafting must beat.
    Returns:
        [num_rows] bool.
    """
    verify, draft, round_ms = times
    num_rows, depth = len(slots), longest - num_drafted
    gain = np.zeros((num_rows, depth))  # expected tokens, falling along a row
    for row, slot in enumerate(slots):
        share = beliefs[slot].survival / beliefs[slot].chain[num_drafted]
        for j in range(min(depth, beliefs[slot].limit - num_drafted)):
            gain[row, j] = share * beliefs[slot].chain[num_drafted + 1 + j]
    first = gain[:, 0] > 0.0
    least = 0.0
    if num_rows > 1:
        first = _worth_the_next_step(gain[:, 0], num_drafts, verify, draft, rate)
        # For the steps after the next one costs are taken as straight lines.
        slope = (verify[num_drafts + (depth + 1) * num_rows] - verify[num_drafts + num_rows]) / (depth * num_rows)
        least = rate * (slope + (draft[num_rows] - draft[1]) / (num_rows - 1))
    # Where there are n-gram drafts alone, the first draft step also costs what any drafted round does.
    first_ms = round_ms if num_drafted == 0 < num_drafts else 0.0
    tokens, ms, drafts = 0.0, first_ms - verify[num_drafts], num_drafts
    for j in range(depth):
        rows = 0
        for row in range(num_rows):
            if first[row] if j == 0 else gain[row, j] > least:
                tokens += gain[row, j]
                rows += 1
        drafts += rows
        ms += draft[rows]
        if tokens > rate * (ms + verify[drafts]):
            return first
        if rows == 0:
            break
    return np.zeros(num_rows, dtype=np.bool_)


@numba.njit(cache=True)
def _worth_the_next_step(
    gain: np.ndarray, num_drafts: int, verify: np.ndarray, draft: np.ndarray, rate: float
) -> np.ndarray:
    """Return the best number of rows by gain: [num_rows] bool, at least one."""
    order = np.argsort(-gain, kind="mergesort")
    best, best_value, tokens = 0, -np.inf, 0.0
    for many in range(1, len(gain) + 1):
        tokens += gain[order[many - 1]]
        value = tokens - rate * (verify[num_drafts + many] + draft[many])
        if value > best_value:
            best, best_value = many, value
    chosen = np.zeros(len(gain), dtype=np.bool_)
    chosen[order[:best]] = True
    return chosen


@numba.njit(cache=True)
def ngrams_to_take(
    slots: np.ndarray,
    chances: np.ndarray,
    ngram_limits: np.ndarray,
    rate: float,
    times: Times,
    beliefs: np.ndarray,
    all_rows_draft: bool,
) -> np.ndarray:
    """Return how many tokens of its n-gram draft each row submits, 0 where drafting is expected to be worth more.

    Args:
        chances: [num_rows, any + 1], that all of the n-gram draft's first j tokens are accepted.
        ngram_limits: [num_rows], tokens of it that each row may submit.
        rate: tokens per ms that it must beat.
        all_rows_draft: whether a row that does not draft spares a draft step nothing.
    Returns:
        [num_rows] int64.
    """
    taken = np.zeros(len(slots), dtype=np.int64)
    depth = 0 if len(slots) == 0 else min(chances.shape[1] - 1, ngram_limits.max())
    if depth == 0:
        return taken
    if all_rows_draft:
        takes = _worth_more_than_drafting_together(slots, chances[:, : depth + 1], ngram_limits, rate, times, beliefs)
    else:
        takes = _worth_more_than_drafting(slots, chances[:, : depth + 1], ngram_limits, rate, times, beliefs)
    gain = np.zeros((len(slots), depth))
    for row in np.flatnonzero(takes):
        many = min(depth, ngram_limits[row])
        gain[row, :many] = chances[row, 1 : many + 1]
    order = np.argsort(-gain.ravel(), kind="mergesort")  # stable: a row's tokens stay in their order
    best, most, tokens = 0, 0.0, 0.0
    for many in range(1, len(order) + 1):
        tokens += gain.ravel()[order[many - 1]]
        value = tokens - rate * (times.verify[many] - times.round_ms - times.verify[0])
        if value > most:
            best, most = many, value
    for many in range(best):
        if gain.ravel()[order[many]] > 0.0:
            taken[order[many] // depth] += 1
    return taken


@numba.njit(cache=True)
def _worth_more_than_drafting(
    slots: np.ndarray, chances: np.ndarray, ngram_limits: np.ndarray, rate: float, times: Times, beliefs: np.ndarray
) -> np.ndarray:
    """Return whether each row's n-gram draft is worth more than drafting, [num_rows] bool.

    Costs of rows are taken one by one, with a share in what the batch pays together.
    """
    num_rows, depth = len(slots), chances.shape[1] - 1
    each = rate * (times.verify[(depth + 1) * num_rows] - times.verify[num_rows]) / (depth * num_rows)
    step, start = rate * times.draft[num_rows] / num_rows, rate * times.round_ms / num_rows
    is_worth_more = np.zeros(num_rows, dtype=np.bool_)
    for row, slot in enumerate(slots):
        taking = drafting = most = 0.0
        for j in range(1, min(depth, ngram_limits[row]) + 1):
            taking += max(chances[row, j] - each, 0.0)
            if j <= beliefs[slot].limit:
                drafting += beliefs[slot].chain[j] - each - step
                most = max(most, drafting)
        is_worth_more[row] = taking > most - start
    return is_worth_more


@numba.njit(cache=True)
def _worth_more_than_drafting_together(
    slots: np.ndarray, chances: np.ndarray, ngram_limits: np.ndarray, rate: float, times: Times, beliefs: np.ndarray
) -> np.ndarray:
    """As `_worth_more_than_drafting`, where a draft step runs all rows: it is spared only if no row drafts.

    Two plans are compared: all rows take their n-gram drafts or nothing; or draft steps run, as many as pay, and those
    rows take theirs for which they are worth more than what is drafted anyway.
    """
    num_rows, depth = len(slots), chances.shape[1] - 1
    each = rate * (times.verify[(depth + 1) * num_rows] - times.verify[num_rows]) / (depth * num_rows)
    taking = np.zeros(num_rows)
    drafting = np.zeros((depth + 1, num_rows))
    for row, slot in enumerate(slots):
        for j in range(1, depth + 1):
            drafting[j, row] = drafting[j - 1, row]
            if j <= ngram_limits[row]:
                taking[row] += max(chances[row, j] - each, 0.0)
            if j <= beliefs[slot].limit:
                drafting[j, row] += max(beliefs[slot].chain[j] - each, 0.0)
    steps, most = 0, taking.sum()
    for j in range(1, depth + 1):
        value = np.maximum(taking, drafting[j]).sum() - rate * (j * times.draft[num_rows] + times.round_ms)
        if value > most:
            steps, most = j, value
    return taking > drafting[steps]


@numba.njit(cache=True)
def round_cost(num_verified: np.ndarray, from_ngrams: np.ndarray, num_steps: int, times: Times) -> tuple[float, float]:
    """Return a round's time, and that of drafting and of verifying what was drafted, in plain steps.

    Args:
        num_verified: [num_reqs] int64, not all 0.
        from_ngrams: [num_reqs] bool, whose were n-gram drafts.
        num_steps: draft steps that ran, if more than the longest draft has tokens.
    """
    verify, draft, round_ms = times
    of_ngrams = of_drafts = longest = 0
    for row in range(len(num_verified)):
        if from_ngrams[row]:
            of_ngrams += num_verified[row]
        else:
            of_drafts += num_verified[row]
            longest = max(longest, num_verified[row])
    if of_drafts == 0:
        return (verify[of_ngrams] - round_ms) / verify[0], 0.0
    ms = verify[of_ngrams + of_drafts]
    for step in range(max(longest, num_steps)):
        rows = 0
        for row in range(len(num_verified)):
            if num_verified[row] > step and not from_ngrams[row]:
                rows += 1
        ms += draft[max(rows, 1)]
    return ms / verify[0], (ms - verify[of_ngrams]) / verify[0]
