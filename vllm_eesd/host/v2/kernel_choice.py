"""Which of two ways to compute the same is faster on this device: timed once, while the engine starts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from vllm_eesd.host.compat import get_tp_group, init_logger

logger = init_logger("vllm.eesd")
#: Of one measurement, about; a start makes some thirty. The least time counts: whatever else happens only adds to it.
MEASURED_MS = 20

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

    from triton import testing

    if in_graphs:
        time = functools.partial(testing.do_bench_cudagraph, rep=MEASURED_MS / 10)  # which replays its graph ten times
    else:
        time = functools.partial(testing.do_bench, warmup=MEASURED_MS / 4, rep=MEASURED_MS)

    def times(kernel: Call, fallback: Call) -> tuple[float, float]:
        # Graphs are timed on a stream of their own, which would not wait for what is still filling the arguments.
        torch.cuda.synchronize(device)
        return time(kernel, return_mode="min"), time(fallback, return_mode="min")

    return times
