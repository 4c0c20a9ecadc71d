"""Sections of docs/results.md about what stands behind the speedups: a step's time, the peers' training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.figure import Figure

Table = Callable[[Sequence[str], Sequence[Sequence[Any]]], str]
ENGINES = ("plain", "eesd")
#: Bars of less than this share of the longest are too short for a figure inside.
LABELLED_SHARE = 0.01
BESIDE = (
    "Beside what must be: a draft step's forward over its layers' share of a plain step's and the LM head's time; what "
    "verifying takes besides the forward (engine loop, scheduler, inputs, sampler, bookkeeping) over a plain step's; a "
    "step in which every request has drafting switched off over a plain step."
)
BESIDE_HEADINGS = ("batch", "draft step / its share", "overhead / plain's", "step without drafts / plain step")


def waterfall_section(rows: list[dict[str, Any]], table: Table, origin: str) -> str:
    """Return the section about waterfall.json, of `benchmarks/waterfall.py`."""
    first = rows[0]
    summary = [
        (
            row["batch"],
            f"{row['plain']['step_ms']:.2f}",
            f"{row['eesd']['step_ms']:.2f}",
            f"{row['eesd']['tokens'] / row['batch']:.2f}",
            f"{row['measured_speedup']:.2f}x",
            f"{row['ideal_speedup']:.2f}x",
            f"{row['efficiency']:.0%}",
            f"{row['plain']['explained']:.0%} and {row['eesd']['explained']:.0%}",
        )
        for row in rows
    ]
    beside = [
        (
            row["batch"],
            "no draft steps" if row["draft_step_ratio"] is None else f"{row['draft_step_ratio']:.2f}",
            f"{row['overhead_ratio']:.2f}",
            f"{row['idle_ratio']:.3f}",
        )
        for row in rows
    ]
    times = ("plain step, ms", "EESD round, ms")
    headings = ("batch", *times, "tokens per round", "measured", "ideal", "measured / ideal", "explained")
    pieces = [
        (name, *(f"{row[engine]['pieces'][name]:.3f}" for row in rows for engine in ENGINES))
        for name in first["plain"]["pieces"]
    ]
    columns = [f"{engine}, batch {row['batch']}" for row in rows for engine in ENGINES]
    return (
        "## Where a step's time goes\n\n"
        f"{' and '.join(str(row['prompts']) for row in rows)} held-out prompts, {first['tokens']} new tokens each, "
        "greedy, both engines in one process (so without the messages between vLLM's processes). Means over the steps "
        "in which the whole batch decodes; "
        "a round is one engine step and the drafting behind it. Ideally a round costs a plain step and its draft "
        "steps' forward passes: measured / ideal is what is left of that. Explained is the share of a step that "
        f"timers around named methods account for. {origin}\n\n```\npython benchmarks/waterfall.py --tokens "
        f"{first['tokens']} --rounds {first['rounds']} --json waterfall.json\n```\n\n"
        + table(headings, summary)
        + f"\n{BESIDE}\n\n"
        + table(BESIDE_HEADINGS, beside)
        + "\nMilliseconds a step:\n\n"
        + table(("piece", *columns), pieces)
        + "\n![From a plain step to EESD's round](results-waterfall.png)\n"
    )


def plot_waterfall(rows: list[dict[str, Any]]) -> Figure:
    """Return the figure: for each batch size, from a plain step to EESD's round, piece by piece."""
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
    return figure


def methods_note(methods: dict[str, dict[str, Any]]) -> str:
    """Return what methods.json says of the peers: how they were trained, and why one is left out."""
    told = []
    for method, about in methods.items():
        if "left_out" in about:
            told.append(f"- `{method}` is left out: {about['left_out']}.")
        elif "tokens" in about:
            told.append(
                f"- `{method}` of the same budget was trained on {about['tokens'] / 1e6:.2f} M tokens in "
                f"{about['minutes']:.0f} minutes; the exit head that is shipped, on "
                f"{about['budget_tokens'] / 1e6:.1f} M."
            )
    return "\n".join(told) + "\n" if told else ""
