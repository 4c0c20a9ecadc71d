"""How much of a generated text merely repeats itself: what a drafter that copies lives on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

LOOP_TOKENS = 32
MAX_PERIOD = 16


def in_loops(tokens: Sequence[int]) -> np.ndarray:
    """Return which tokens lie in a loop, [len(tokens)] bool.

    A loop is a run of at least LOOP_TOKENS tokens, each equal to the one a period of at most MAX_PERIOD earlier; the
    period's first occurrence is none of them.
    """
    ids, found = np.asarray(tokens), np.zeros(len(tokens), dtype=bool)
    for period in range(1, MAX_PERIOD + 1):
        if len(ids) < LOOP_TOKENS + period:
            break
        same = np.zeros(len(ids), dtype=bool)
        same[period:] = ids[period:] == ids[:-period]
        runs = np.lib.stride_tricks.sliding_window_view(same, LOOP_TOKENS).all(axis=1)
        for start in np.flatnonzero(runs):
            found[start : start + LOOP_TOKENS] = True
    return found


def tokens_before_loops(tokens: Sequence[int]) -> int:
    """Return how many tokens stand before the first that lies in a loop: at least one."""
    looping = in_loops(tokens)
    return max(1, int(looping.argmax())) if looping.any() else len(tokens)


def share_in_loops(outputs: Iterable[Sequence[int]]) -> float | None:
    """Return which share of all these tokens lies in loops, each output by itself; None if there are no tokens."""
    found = [in_loops(tokens) for tokens in outputs]
    total = sum(map(len, found))
    return sum(int(part.sum()) for part in found) / total if total else None
