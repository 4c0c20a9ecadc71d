"""Time functions on a GPU or a CPU, fairly: interleaved, cold caches, the same inputs, the hardware in every row."""

from __future__ import annotations

import csv
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from vllm_eesd.provenance import provenance

# Copies of the inputs are rotated until they exceed this, so that none is found in a cache (an H200's L2: 50 MB).
CACHE_BYTES = 256 * 2**20
COPY_BYTES = 512 * 2**20
REPLAYS = 20


def rotations(num_bytes: int) -> int:
    """Return how many copies of inputs of so many bytes keep every call's cache cold, at most 64."""
    return min(max(2, -(-CACHE_BYTES // max(num_bytes, 1))), 64)


def _synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _replayable(function: Callable, inputs: Sequence, device: str) -> Callable[[], None]:
    """Return what runs `function` on every set of inputs in turn: a CUDA graph where there is a GPU."""

    def run() -> None:
        for arguments in inputs:
            function(*arguments)

    if device != "cuda":
        return run
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def measure(methods: dict[str, Callable], inputs: Sequence, device: str, rounds: int) -> dict[str, list[float]]:
    """Return milliseconds per call of every method, one figure per round; methods take turns within a round.

    Args:
        methods: name -> function of one set of inputs. The first one is ours; another that does not run here (not in a
            CUDA graph, say) is left out with a line, and the rest is measured.
        inputs: sets of inputs, rotated.
        device: "cuda" or "cpu".
        rounds: figures per method.
    """
    replays: dict[str, Callable[[], None]] = {}
    for name, function in methods.items():
        try:
            replay = _replayable(function, inputs, device)
            replay()
            _synchronise(device)
        except Exception as error:
            if not replays:
                raise
            print(f"{name}: left out, {type(error).__name__}: {error}")
            if device == "cuda":  # a capture that failed stays on its own stream
                torch.cuda.set_stream(torch.cuda.default_stream())
            continue
        replays[name] = replay
    times: dict[str, list[float]] = {name: [] for name in replays}
    repeat = REPLAYS if device == "cuda" else 1
    for _ in range(rounds):
        for name, replay in replays.items():
            _synchronise(device)
            start = time.perf_counter()
            for _ in range(repeat):
                replay()
            _synchronise(device)
            times[name].append((time.perf_counter() - start) * 1e3 / (repeat * len(inputs)))
    return times


def copy_gb_per_s(device: str, rounds: int) -> float:
    """Return the bandwidth of a copy, bytes read plus bytes written, in this run."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = measure({"copy": lambda: target.copy_(source)}, [()], device, rounds)["copy"]
    return 2 * COPY_BYTES / min(times) / 1e6


def rows(
    kernel: str, shape: dict, times: dict[str, list[float]], num_bytes: int, bandwidth: float, ours: str
) -> list[dict]:
    """Return one row per method: its time, its share of the copy's bandwidth, and how much faster `ours` was.

    Args:
        num_bytes: what has to be moved at least, whatever the method.
        bandwidth: of a copy, GB/s.
        ours: the method that the ratios are of; paired by round.
    """
    result = []
    for name, figures in times.items():
        ratios = [theirs / own for theirs, own in zip(figures, times[ours], strict=True)]
        median = statistics.median(figures)
        result.append(
            {
                "kernel": kernel,
                **shape,
                "method": name,
                "ms": round(median, 5),
                "ms_min": round(min(figures), 5),
                "ms_max": round(max(figures), 5),
                "bytes": num_bytes,
                "share_of_copy": round(num_bytes / median / 1e6 / bandwidth, 4),
                "ours_is_faster": round(statistics.median(ratios), 3),
                "ours_is_faster_min": round(min(ratios), 3),
                "ours_is_faster_max": round(max(ratios), 3),
                "copy_gb_per_s": round(bandwidth, 1),
            }
        )
    return result


def append(path: Path, new_rows: list[dict]) -> None:
    """Append rows to a CSV file, with the hardware, the versions and the commit they were measured on.

    Raises:
        ValueError: the file has other columns.
    """
    origin = provenance()
    origin["versions"] = " ".join(f"{name}={version}" for name, version in origin["versions"].items())
    new_rows = [row | origin for row in new_rows]
    columns = list(new_rows[0])
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            found = next(csv.reader(file))
        if found != columns:
            raise ValueError(f"{path}: its columns are {found}, allowed are {columns}; move the file away")
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        if is_new:
            writer.writeheader()
        writer.writerows(new_rows)
