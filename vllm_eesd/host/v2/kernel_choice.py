"""Which of two ways to compute the same is faster on this device: timed once, while the engine starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from vllm_eesd.host.compat import get_tp_group, init_logger

logger = init_logger("vllm.eesd")
#: Calls of one measurement, and measurements; the least time counts, since whatever else happens only adds to it.
CALLS, PASSES = 5, 5

Call = Callable[[], object]
#: Takes the kernel and what it replaces, returns the ms that a call of each takes.
Timer = Callable[[Call, Call], tuple[float, float]]


class Timing(NamedTuple):
    """Both ways at one size.

    Attributes:
        size: rows or tokens.
        kernel_ms, fallback_ms: of one call.
    """

    size: int
    kernel_ms: float
    fallback_ms: float


def sizes_up_to(limit: int) -> list[int]:
    """Return the sizes to time: the powers of two below `limit`, and itself."""
    return [1 << n for n in range(limit.bit_length()) if 1 << n < limit] + [limit]


def fast_up_to(timings: Sequence[Timing]) -> int:
    """Return the largest size up to which the kernel was slower at no timed size; 0 if it was at the smallest.

    Args:
        timings: sizes ascending.
    """
    largest = 0
    for timing in timings:
        if timing.kernel_ms > timing.fallback_ms:
            break
        largest = timing.size
    return largest


def described(timings: Sequence[Timing]) -> str:
    """Return the times as a line for the log."""
    return ", ".join(f"{t.size}: {t.kernel_ms:.3f} against {t.fallback_ms:.3f} ms" for t in timings)


def decide(name: str, sizes: Sequence[int], time: Callable[[int], Timing], everywhere: bool = False) -> int:
    """Return the largest size to use the kernel for, 0 for none, and log the times; all ranks decide as rank 0.

    Args:
        name: the kernel's.
        sizes: ascending.
        time: measures one of them; a kernel that fails there is not used.
        everywhere: it is used for all sizes or for none.
    """
    try:
        timings = [time(size) for size in sizes]
    except Exception:
        logger.warning("EESD: the %s kernel could not be timed", name, exc_info=True)
        timings = [Timing(sizes[0], float("inf"), 0.0)]
    if (group := get_tp_group()).world_size > 1:
        timings = group.broadcast_object(timings, src=0)
    largest = fast_up_to(timings)
    if everywhere and largest < sizes[-1]:
        largest = 0
    what = f"is used up to {largest} of {sizes[-1]}" if largest else "is not used"
    logger.info("EESD: the %s kernel %s (%s)", name, what, described(timings))
    return largest


def log_not_used(name: str, obstacle: str) -> None:
    """Say why a kernel cannot be used in this engine."""
    logger.info("EESD: the %s kernel is not used: %s", name, obstacle)


def timer_for(device: torch.device, in_graphs: bool) -> Timer | None:
    """Return what times calls on this device; None on a CPU, where times of interpreted kernels mean nothing.

    Args:
        in_graphs: whether serving replays CUDA graphs, where a launch costs the host nothing.
    """
    if device.type != "cuda":
        return None

    def time_both(kernel: Call, fallback: Call) -> tuple[float, float]:
        kernel_ms, fallback_ms = _least_ms([_repeated(kernel, in_graphs), _repeated(fallback, in_graphs)])
        return kernel_ms, fallback_ms

    return time_both


def _repeated(call: Call, in_graph: bool) -> Call:
    """Return what makes CALLS calls, warmed up: kernels are compiled by their first one, which no graph may hold."""
    call()
    torch.cuda.synchronize()

    def several() -> None:
        for _ in range(CALLS):
            call()

    if not in_graph:
        return several
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        several()
    return graph.replay


def _least_ms(runs: Sequence[Call]) -> list[float]:
    """Return the least ms a call took of each; the runs take turns, the first turn is a rehearsal."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(1 + PASSES):
        for run, ms in zip(runs, times, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            ms.append(begin.elapsed_time(end) / CALLS)
    return [min(ms[1:]) for ms in times]
