"""The plots of docs/results.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

#: Panels of the speedup plot beside one another.
COLUMNS = 3
#: Bars of less than this share of the longest are too short for a figure inside.
LABELLED_SHARE = 0.01


def interval(row: dict[str, Any]) -> Sequence[float]:
    """Return a row's bootstrap interval or, where it has none, the range of its ratios."""
    return row.get("speedup_interval") or row["speedup_spread"]


def plot_speedup(path: Path, latency: dict[str, list[dict[str, Any]]]) -> None:
    """Draw a panel per workload: speedup by batch size and method, with intervals."""
    columns = min(COLUMNS, len(latency))
    num_rows = -(-len(latency) // columns)
    figure = Figure(figsize=(4.2 * columns + 0.6, 3.6 * num_rows), layout="constrained")
    grid = figure.subplots(num_rows, columns, sharey=True, squeeze=False)
    for unused in grid.flat[len(latency) :]:
        unused.set_axis_off()
    panels = grid.flat[: len(latency)]
    methods = list(dict.fromkeys(row["method"] for rows in latency.values() for row in rows))
    methods.remove("plain")
    for axes, (workload, rows) in zip(panels, latency.items(), strict=True):
        batches = list(dict.fromkeys(row["batch"] for row in rows))
        here = [method for method in methods if any(row["method"] == method for row in rows)]
        for number, method in enumerate(here):
            drawn = [row for row in rows if row["method"] == method and row["speedup_vs_plain"] is not None]
            if not drawn:
                continue
            at = [batches.index(row["batch"]) + 0.8 * (number - (len(here) - 1) / 2) / len(here) for row in drawn]
            heights = [row["speedup_vs_plain"] for row in drawn]
            ends = zip(*(interval(row) for row in drawn), strict=True)
            lengths = [[abs(h - end) for h, end in zip(heights, side, strict=True)] for side in ends]
            color = f"C{methods.index(method)}"
            axes.bar(at, heights, 0.8 / len(here), label=method, color=color, yerr=lengths, capsize=2)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
        axes.set_xlabel("requests at once")
        axes.set_title(workload.replace("_", " "), fontsize="medium")
    for left in grid[:, 0]:
        left.set_ylabel("speedup over plain decoding")
    drawn = {label: bars for axes in panels for bars, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    shown = [method for method in methods if method in drawn]
    handles = [drawn[method] for method in shown]
    figure.legend(handles, shown, loc="outside upper center", ncols=min(6, len(shown)), fontsize="small")
    save(figure, path)


def plot_acceptance(path: Path, latency: dict[str, list[dict[str, Any]]]) -> None:
    """Draw a line per workload: the share of rounds in which drafts were accepted up to a position."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for workload, rows in latency.items():
        row = next((row for row in rows if row["acceptance_per_position"]), None)
        if row is not None:
            shares = row["acceptance_per_position"]
            label = f"{workload.replace('_', ' ')}, batch {row['batch']}"
            axes.plot(range(1, len(shares) + 1), shares, marker="o", label=label)
    axes.set_ylim(0, 1)
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("share of rounds accepted so far")
    axes.legend(fontsize="small")
    save(figure, path)


def plot_waterfall(path: Path, rows: list[dict[str, Any]]) -> None:
    """Draw, for each batch size, from a plain step to EESD's round, piece by piece."""
    figure = Figure(figsize=(6.2 * len(rows), 4.4), layout="constrained")
    for axes, row in zip(figure.subplots(1, len(rows), squeeze=False)[0], rows, strict=True):
        steps, round_ms = row["waterfall"], row["eesd"]["step_ms"]
        end = 0.0
        for place, (_, ms) in enumerate(steps):
            axes.barh(place, ms, left=end, color="C0" if place < 2 else "C1" if ms >= 0 else "C2")
            end += ms
            if abs(ms) > LABELLED_SHARE * round_ms:
                axes.text(max(end, end - ms) + 0.01 * round_ms, place, f"{ms:.2f}", va="center", fontsize="small")
        axes.barh(len(steps), round_ms, color="C0")
        axes.text(1.01 * round_ms, len(steps), f"{round_ms:.2f}", va="center", fontsize="small")
        axes.axvline(sum(ms for _, ms in steps[:2]), color="black", linewidth=0.8, linestyle=":")
        axes.set_yticks(range(len(steps) + 1), [*(name for name, _ in steps), "EESD's round"])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.12 * round_ms)
        axes.set_xlabel("ms; dotted: the ideal round")
        axes.set_title(f"batch {row['batch']}: {row['efficiency']:.0%} of the ideal speedup", fontsize="medium")
    save(figure, path)


def plot_end_to_end(path: Path, rows: list[dict[str, str]]) -> None:
    """Draw a panel per shape: speedup by batch size and method, with ranges, from the rows of gpu_end_to_end.csv."""
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    figure = Figure(figsize=(4.6 * len(shapes), 3.6), layout="constrained")
    for axes, shape in zip(figure.subplots(1, len(shapes), squeeze=False)[0], shapes, strict=True):
        for method in dict.fromkeys(row["method"] for row in rows if row["shape"] == shape):
            own = [row for row in rows if row["shape"] == shape and row["method"] == method]
            batches, speedups = ([float(row[name]) for row in own] for name in ("batch", "speedup"))
            least, most = ([float(row[f"speedup_{end}"]) for row in own] for end in ("min", "max"))
            ranges = [[s - low for s, low in zip(speedups, least, strict=True)]]
            ranges.append([high - s for s, high in zip(speedups, most, strict=True)])
            axes.errorbar(batches, speedups, ranges, marker="o", markersize=4, capsize=2, label=method)
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [f"{batch:.0f}" for batch in batches])
        axes.set(
            title=f"{shape} shape, {rows[0]['hardware']}", xlabel="requests at a time", ylabel="speedup over plain"
        )
        axes.legend(fontsize=8)
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    # Without matplotlib's version in it the same figures give the same file.
    figure.savefig(path, dpi=120, format="png", metadata={"Software": None})
