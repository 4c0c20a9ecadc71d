"""Plots of what the commands measured; matplotlib is imported only when one is asked for."""

from __future__ import annotations

from pathlib import Path

from vllm_eesd.distill.layer_costs import LayerCosts, LayerResult
from vllm_eesd.files import replacing

SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(path: str | None) -> None:
    """Refuse, before anything is measured, a plot that could not be made.

    Raises:
        ValueError: the file name's ending is of no known kind, or matplotlib is missing.
    """
    if path is None:
        return
    if Path(path).suffix not in SUFFIXES:
        raise ValueError(f"plot: {path!r} must end in one of {', '.join(SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise ValueError("plot: matplotlib is not installed; `pip install 'vllm-eesd[distill]'`") from None


def plot_probe(path: str, results: list[LayerResult], costs: LayerCosts) -> None:
    """Draw, over the exit layer, what headless drafts match and what speedup is predicted; write it to `path`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    quality, gain = figure.subplots(1, 2)
    layers = [result.exit_layer for result in results]
    quality.plot(layers, [r.agreement for r in results], label="agreement (greedy)")
    quality.plot(layers, [r.overlap for r in results], label="sum min(p, q) (T = 1)")
    total = costs.draft_ms(len(costs.layer_ms))
    quality.plot(layers, [r.draft_ms / total for r in results], ":", color="grey", label="draft step / plain step")
    quality.set(xlabel="exit layer N", ylim=(0, 1), title="headless")
    gain.plot(layers, [r.headless_speedup for r in results], label="headless")
    gain.plot(layers, [r.distilled_speedup for r in results], label="distilled (expected)")
    gain.plot(layers, [r.drawn_speedup for r in results], label="distilled, sampled at T = 1 (expected)")
    gain.axhline(1, color="grey", linewidth=0.8)
    gain.set(xlabel="exit layer N", title="predicted speedup, best fixed draft length")
    for axes in (quality, gain):
        axes.legend(frameon=False)
    with replacing(path) as file:
        figure.savefig(file, dpi=150)
