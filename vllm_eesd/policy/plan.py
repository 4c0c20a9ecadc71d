"""`goodput`'s arithmetic, compiled: it runs before every draft step, where numpy's call overhead would be the cost.

Arrays are over request slots unless they say otherwise; `slots` is [num_rows] int64, the rows a call is about.
"""

from __future__ import annotations

import numba
import numpy as np


@numba.njit(cache=True)
def begin(
    generator: np.random.Generator,
    slots: np.ndarray,
    parameters: np.ndarray,
    temper: float,
    least_theta: float,
    average_odds: float,
    request_weight: float,
    exponents: np.ndarray,
    chain: np.ndarray,
    own_odds: np.ndarray,
) -> None:
    """Draw each row's theta, and write what follows from it for the round.

    Args:
        parameters: [2, num_rows] float64, alpha and beta.
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
        theta = max(mean + temper * (generator.beta(alpha, beta) - mean), least_theta)
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
def worthwhile(
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
        # For the steps behind the next one costs are taken as straight lines.
        slope = (verify[num_drafts + (depth + 1) * num_rows] - verify[num_drafts + num_rows]) / (depth * num_rows)
        least = rate * (slope + (draft[num_rows] - draft[1]) / (num_rows - 1))
    tokens, ms, drafts = 0.0, -verify[num_drafts], num_drafts
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
