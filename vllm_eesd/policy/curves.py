"""Curves through measured points: made ascending, drawn towards a line, read between and beyond them."""

from __future__ import annotations

import numpy as np


def leaning_on_a_line(sizes: np.ndarray, times: np.ndarray, errors: np.ndarray) -> np.ndarray:
    """Return the times moved towards the line through them, the further the less their own deviation can be believed.

    What a token more costs is a difference of two medians, which noise of a few percent turns into anything. Where
    noise is small against the steps of a staircase (padded batch sizes), the staircase stays.

    Args:
        sizes, times: [num_cells]; a size of 0 takes no part: the first draft costs more than the next ones.
        errors: [num_cells] standard errors of the times.
    Source: empirical Bayes shrinkage to a regression, after Fay and Herriot (1979).
    """
    of_line = sizes > 0
    x, y, error = sizes[of_line], times[of_line], errors[of_line]
    if len(x) < 3 or not error.all():  # two points lie on their line
        return times
    weights = error**-2
    x_mean, y_mean = np.average(x, weights=weights), np.average(y, weights=weights)
    slope = max(0.0, float(weights @ ((x - x_mean) * (y - y_mean)) / (weights @ (x - x_mean) ** 2)))
    line = y_mean + slope * (x - x_mean)
    true_variance = max(0.0, float(((y - line) ** 2).sum() / (len(x) - 2) - (error**2).mean()))
    shrunk = times.copy()
    shrunk[of_line] = line + (y - line) * true_variance / (true_variance + error**2)
    return shrunk


def monotone(values: tuple[float, ...]) -> np.ndarray:
    """Return the closest ascending values: neighbours in the wrong order are replaced by their mean."""
    blocks: list[list[float]] = []  # [sum, count]
    for value in values:
        blocks.append([value, 1])
        while len(blocks) > 1 and blocks[-2][0] * blocks[-1][1] > blocks[-1][0] * blocks[-2][1]:
            total, count = blocks.pop()
            blocks[-1][0] += total
            blocks[-1][1] += count
    return np.repeat([total / count for total, count in blocks], [count for _, count in blocks])


def value_at(size: int, points: tuple[np.ndarray, np.ndarray]) -> float:
    """Return a curve's value at one size; beyond a single point it is level."""
    return float(interpolate(np.array([size]), *points)[0])


def interpolate(at: np.ndarray, xs: np.ndarray, ys: np.ndarray, default_slope: float = 0.0) -> np.ndarray:
    """Linear between the points, level before the first, with the mean slope beyond the last."""
    slope = (ys[-1] - ys[0]) / (xs[-1] - xs[0]) if len(xs) > 1 else default_slope
    return np.interp(at, xs, ys) + slope * np.maximum(at - xs[-1], 0.0)
