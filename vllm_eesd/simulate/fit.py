"""A roofline whose machine is not published but was measured: fitted to the costs in a trace's header.

    ms = a engine step's own, and more if it verifies drafts + bytes / bandwidth + FLOPs / peak
    ms = a draft step's own + bytes / bandwidth + FLOPs / peak

with the bytes and FLOPs of `Shape.work`. Summed instead of the longer of the two, because on a CPU neither hides the
other; so it is linear in the five unknowns, none of which may be negative. `left_out` says how far it can be trusted:
each batch size in turn is predicted from the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares

from vllm_eesd.simulate.roofline import Overheads, Shape

GIGA = 1e9
#: Relative errors beyond this count linearly instead of squared: a median of few times can be far off.
OUTLIER = 0.1


class Point(NamedTuple):
    """One measured time: a target step (with drafts) or a draft step."""

    is_draft: bool
    num_reqs: int
    num_drafts: float
    ms: float


@dataclass(frozen=True)
class FittedRoofline:
    """Times as fitted; see the module.

    Attributes:
        shape, draft_layers, dtype, context: as in `Roofline`.
        overheads: fitted, but for `round_ms`, which is the measured median.
        bandwidth_gb_s, gflops: what bytes and FLOPs are charged at; infinite where they explain nothing.
    """

    shape: Shape
    draft_layers: int
    dtype: str
    context: int
    overheads: Overheads
    bandwidth_gb_s: float
    gflops: float

    def verify_ms(self, num_reqs: int, num_drafts: float) -> float:
        own = self.overheads.step_ms + (self.overheads.verify_ms if num_drafts else 0.0)
        return self._ms(self.shape.layers, num_reqs, num_reqs + num_drafts) + own

    def draft_step_ms(self, num_reqs: int) -> float:
        return self._ms(self.draft_layers, num_reqs, num_reqs) + self.overheads.draft_step_ms

    def _ms(self, layers: int, num_reqs: int, tokens: float) -> float:
        num_bytes, flops = np.sum(self.shape.work(layers, num_reqs, tokens, self.context, self.dtype), axis=0)
        return float(num_bytes / self.bandwidth_gb_s + flops / self.gflops) / GIGA * 1e3

    def predict(self, point: Point) -> float:
        """Return the time of a step like that one."""
        if point.is_draft:
            return self.draft_step_ms(point.num_reqs)
        return self.verify_ms(point.num_reqs, point.num_drafts)


def points_of(costs: dict[str, Any]) -> list[Point]:
    """Return the points of a trace's header (`CostModel.state`).

    Raises:
        ValueError: too few to tell five unknowns apart.
    """
    verify = costs.get("verify_ms", {}).items()
    points = [Point(False, int(size), drafts, ms) for size, curve in verify for drafts, ms in curve]
    points += [Point(True, int(rows), 0, ms) for rows, ms in costs.get("draft_step_ms", ())]
    if len({p.num_reqs for p in points if not p.is_draft}) < 2 or len(points) < 6:
        raise ValueError(
            "TRACE: its header holds too few measured costs to fit; record one with `eesd trace-record --batch 1,4,8`"
        )
    return points


def fit(
    points: Sequence[Point], shape: Shape, draft_layers: int, dtype: str, context: int, round_ms: float = 0.0
) -> FittedRoofline:
    """Return the machine that explains the points best: relative errors squared and summed, outliers' less."""
    rows = []
    for point in points:
        layers = draft_layers if point.is_draft else shape.layers
        tokens = point.num_reqs + point.num_drafts
        num_bytes, flops = np.sum(shape.work(layers, point.num_reqs, tokens, context, dtype), axis=0)
        own = (0.0, 1.0, 0.0) if point.is_draft else (1.0, 0.0, float(point.num_drafts > 0))
        rows.append([*own, num_bytes / GIGA, flops / GIGA])
    measured = np.array([point.ms for point in points])
    relative = np.array(rows) / measured[:, None]
    scale = 1 / np.maximum(relative.max(axis=0), np.finfo(float).tiny)  # what alone would explain the costliest point
    step, draft, verify, per_gb, per_gflop = scale * _robust_nonnegative(relative * scale)
    overheads = Overheads(float(step), float(draft), round_ms, float(verify))
    # What explains less than a millionth of the times explains nothing.
    explained = np.array([per_gb, per_gflop]) / scale[3:] > 1e-6
    bandwidth, gflops = (
        1e3 / cost if seen else np.inf for cost, seen in zip((per_gb, per_gflop), explained, strict=True)
    )
    return FittedRoofline(shape, draft_layers, dtype, context, overheads, float(bandwidth), float(gflops))


def _robust_nonnegative(columns: np.ndarray) -> np.ndarray:
    """Return the weights, none negative, with which the columns come closest to one everywhere."""
    start = np.full(columns.shape[1], 1 / columns.shape[1])
    settings = {"bounds": (0, np.inf), "loss": "soft_l1", "f_scale": OUTLIER, "xtol": 1e-12, "ftol": 1e-12}
    return least_squares(lambda w: columns @ w - 1, start, jac=lambda w: columns, gtol=1e-12, **settings).x


def left_out(points: Sequence[Point], *machine: Any) -> list[tuple[Point, float]]:
    """Return (point, predicted / measured - 1) of every target step, predicted without the points of its batch size.

    Args:
        machine: `fit`'s arguments behind the points.
    """
    errors = []
    for size in sorted({point.num_reqs for point in points if not point.is_draft}):
        fitted = fit([point for point in points if point.num_reqs != size], *machine)
        errors += [(p, fitted.predict(p) / p.ms - 1) for p in points if p.num_reqs == size and not p.is_draft]
    return errors
