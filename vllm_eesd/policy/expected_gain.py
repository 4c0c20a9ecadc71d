"""`goodput`'s arithmetic, compiled: it runs before every draft step, where numpy's call overhead would be the cost.

Arrays are over request slots unless they say otherwise; `slots` is [num_rows] int64, the rows a call is about.
"""

from __future__ import annotations

import numba
import numpy as np


@numba.njit(cache=True)
def begin(
    slots: np.ndarray,
    parameters: np.ndarray,
    draws: np.ndarray,
    temper: float,
    least_theta: float,
    average_odds: float,
    request_weight: float,
    exponents: np.ndarray,
    chain: np.ndarray,
    own_odds: np.ndarray,
) -> None:
    """Write what each row's draw of its posterior says of the round.

    Args:
        parameters: [2, num_rows] float64, alpha and beta.
        draws: [num_rows] float64, of Beta(alpha, beta).
        temper: share of a draw's distance from the mean that is kept.
        average_odds: of acceptance of the average token.
        request_weight: share of a row's own log-odds that counts.
        exponents: [longest] how much harder than the average token the first j are together.
        chain: [max_num_reqs, longest or more + 1] written from column 1 on: theta to the power of each exponent.
        own_odds: written: the row's odds relative to the average, to the power of `request_weight`.
    """
    for row, slot in enumerate(slots):
        alpha, beta = parameters[0, row], parameters[1, row]
        mean = alpha / (alpha + beta)
        theta = max(mean + temper * (draws[row] - mean), least_theta)
        own_odds[slot] = (alpha / beta / average_odds) ** request_weight
        log_theta = np.log(theta)
        for j, exponent in enumerate(exponents):
            chain[slot, j + 1] = np.exp(exponent * log_theta)


@numba.njit(cache=True)
def survive(
    slots: np.ndarray,
    confidence: np.ndarray,
    edges: np.ndarray,
    rates: np.ndarray,
    own_odds: np.ndarray,
    survival: np.ndarray,
) -> None:
    """Multiply each row's chance that all it drafted is accepted by that of its last token.

    Args:
        confidence: [num_rows] float32, NaN where unknown.
        edges: [num_bins - 1] ascending.
        rates: [num_bins + 1] acceptance by bin at the token's position; the last is for unknown confidences.
    """
    for row, slot in enumerate(slots):
        shown = confidence[row]
        column = len(rates) - 1
        if not np.isnan(shown):
            column = np.searchsorted(edges, shown, side="right")
        odds = rates[column] / (1.0 - rates[column]) * own_odds[slot]
        survival[slot] *= odds / (1.0 + odds)


@numba.njit(cache=True)
def rows_to_extend(
    slots: np.ndarray,
    num_drafted: int,
    longest: int,
    limits: np.ndarray,
    survival: np.ndarray,
    chain: np.ndarray,
    num_drafts: int,
    verify: np.ndarray,
    draft: np.ndarray,
    rate: float,
    first_ms: float,
) -> np.ndarray:
    """Return the rows that draft one more, none if no number of further steps pays for itself.

    Args:
        num_drafted: tokens each of these rows has drafted.
        longest, limits: the longest draft of all, and of each.
        survival, chain: see `survive` and `begin`.
        num_drafts: tokens that all rows together have drafted.
        verify: ms by number of drafts verified.
        draft: ms of a draft step by number of rows.
        rate: tokens per ms that drafting must beat.
        first_ms: what the next step costs on top.
    Returns:
        [num_rows] bool.
    """
    num_rows, depth = len(slots), longest - num_drafted
    gain = np.zeros((num_rows, depth))  # expected tokens, falling along a row
    for row, slot in enumerate(slots):
        share = survival[slot] / chain[slot, num_drafted]
        for j in range(min(depth, limits[slot] - num_drafted)):
            gain[row, j] = share * chain[slot, num_drafted + 1 + j]
    first = gain[:, 0] > 0.0
    least = 0.0
    if num_rows > 1:
        first = _worth_the_next_step(gain[:, 0], num_drafts, verify, draft, rate)
        # For the steps after the next one costs are taken as straight lines.
        slope = (verify[num_drafts + (depth + 1) * num_rows] - verify[num_drafts + num_rows]) / (depth * num_rows)
        least = rate * (slope + (draft[num_rows] - draft[1]) / (num_rows - 1))
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
    limits: np.ndarray,
    chain: np.ndarray,
    verify: np.ndarray,
    draft: np.ndarray,
    round_ms: float,
    rate: float,
) -> np.ndarray:
    """Return how many tokens of its n-gram draft each row submits, 0 where drafting is expected to be worth more.

    Costs of rows are taken one by one for that comparison, with a share in what the batch pays together; how many
    tokens are taken in all is then decided with the batch's own times.

    Args:
        chances: [num_rows, any + 1], that all of the n-gram draft's first j tokens are accepted.
        ngram_limits: [num_rows], tokens of it that each row may submit.
        limits, chain: see `rows_to_extend`.
        verify: ms by number of tokens verified; from 1 on with `round_ms`, which n-gram drafts do not cost.
        draft: ms of a draft step by number of rows.
        rate: tokens per ms that it must beat.
    Returns:
        [num_rows] int64.
    """
    num_rows, depth = len(slots), chances.shape[1] - 1
    taken = np.zeros(num_rows, dtype=np.int64)
    if num_rows == 0:
        return taken
    depth = min(depth, ngram_limits.max())
    if depth == 0:
        return taken
    each = rate * (verify[(depth + 1) * num_rows] - verify[num_rows]) / (depth * num_rows)
    step, start = rate * draft[num_rows] / num_rows, rate * round_ms / num_rows
    gain = np.zeros((num_rows, depth))
    for row, slot in enumerate(slots):
        taking = drafting = most = 0.0
        for j in range(1, min(depth, ngram_limits[row]) + 1):
            taking += max(chances[row, j] - each, 0.0)
            if j <= limits[slot]:
                drafting += chain[slot, j] - each - step
                most = max(most, drafting)
        if taking > most - start:
            for j in range(min(depth, ngram_limits[row])):
                gain[row, j] = chances[row, j + 1]
    order = np.argsort(-gain.ravel(), kind="mergesort")  # stable: a row's tokens stay in their order
    best, most, tokens = 0, 0.0, 0.0
    for many in range(1, len(order) + 1):
        tokens += gain.ravel()[order[many - 1]]
        value = tokens - rate * (verify[many] - round_ms - verify[0])
        if value > most:
            best, most = many, value
    for many in range(best):
        if gain.ravel()[order[many]] > 0.0:
            taken[order[many] // depth] += 1
    return taken


@numba.njit(cache=True)
def round_cost(
    num_verified: np.ndarray, from_ngrams: np.ndarray, verify: np.ndarray, draft: np.ndarray, round_ms: float
) -> tuple[float, float]:
    """Return a round's time, and that of drafting and of verifying what was drafted, in plain steps.

    Args:
        num_verified: [num_reqs] int64, not all 0.
        from_ngrams: [num_reqs] bool, whose were n-gram drafts.
        verify, draft, round_ms: see `ngrams_to_take`.
    """
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
    for step in range(longest):
        rows = 0
        for row in range(len(num_verified)):
            if num_verified[row] > step and not from_ngrams[row]:
                rows += 1
        ms += draft[rows]
    return ms / verify[0], (ms - verify[of_ngrams]) / verify[0]
