"""What a validation is told of costs: measured in passes, a set for each batch size, and a roofline fitted to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from vllm_eesd.policy.costs import cell_of
from vllm_eesd.simulate.fit import FittedRoofline, Point, fit
from vllm_eesd.simulate.roofline import Shape
from vllm_eesd.simulate.world import World

#: Kinds of steps that a fit must have seen, at so many batch sizes: else five unknowns are told apart by noise.
MIN_SIZES = 2


@dataclass(frozen=True)
class BatchCosts:
    """What was measured at one batch size.

    Attributes:
        costs: of `CostModel.state`: EESD's steps of this batch and, of its tail, of smaller ones.
        prompt_ms: of a batch's prompts and first tokens with plain vLLM.
        eesd_prompt_share: the same with EESD, relative to that.
        plain_share: a plain step of plain vLLM's, relative to EESD's step without drafts.
    """

    costs: dict[str, Any]
    prompt_ms: float
    eesd_prompt_share: float
    plain_share: float


def pooled(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one `CostModel.state` of several: for every size the median of what they say, and the mean of the sizes.

    A state holds the medians of the last steps only, a moment's; a size that some of them lack is pooled of the rest.

    Args:
        states: at least one.
    """
    return {
        "verify_ms": {
            size: _pooled_points([state["verify_ms"].get(size, []) for state in states])
            for size in sorted({size for state in states for size in state["verify_ms"]}, key=int)
        },
        "draft_step_ms": _pooled_points([state["draft_step_ms"] for state in states]),
        "draft_round_ms": _pooled_points([state["draft_round_ms"] for state in states]),
    }


def _pooled_points(tables: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    by_cell: dict[int, list[Sequence[float]]] = {}
    for table in tables:
        for point in table:
            by_cell.setdefault(cell_of(int(point[0])), []).append(point)
    return [
        [fmean(size for size, _ in points), median(ms for _, ms in points)] for _, points in sorted(by_cell.items())
    ]


def full_batch_points(costs: dict[str, Any], batch: int) -> list[Point]:
    """Return the steps of a full batch: the tail's smaller batches are seen too seldom to fit anything to.

    Args:
        costs: of `CostModel.state`.
        batch: requests; the cost model keeps it beside sizes within a fifth of it.
    """
    cell = cell_of(batch)
    points = [Point(False, batch, drafts, ms) for drafts, ms in costs["verify_ms"].get(str(cell), ())]
    return points + [Point(True, batch, 0, ms) for rows, ms in costs["draft_step_ms"] if cell_of(int(rows)) == cell]


def fitted_to_others(
    batches: Mapping[int, BatchCosts], batch: int, shape: Shape, draft_layers: int, context: int
) -> tuple[FittedRoofline, float]:
    """Return the roofline fitted to the full batches of every size but this one, and their median `plain_share`.

    Args:
        batches: what each size costs.
        batch: the one left out.
        shape, draft_layers, context: as in `fit`.
    Raises:
        ValueError: the others are too few.
    """
    others = {size: costs for size, costs in batches.items() if size != batch}
    points = [point for size, own in others.items() for point in full_batch_points(own.costs, size)]
    sizes = [len({point.num_reqs for point in points if point.is_draft == kind}) for kind in (False, True)]
    if min(sizes) < MIN_SIZES:
        raise ValueError(
            f"costs beside batch {batch} hold target steps of {sizes[0]} batch sizes and draft steps of {sizes[1]}; "
            f"allowed: at least {MIN_SIZES} of each"
        )
    # What a drafted round costs besides its steps hardly depends on the batch.
    round_ms = median(World(own.costs).draft_round_ms(size) for size, own in others.items())
    machine = fit(points, shape, draft_layers, "float32", context, round_ms)
    return machine, median(own.plain_share for own in others.values())
