"""Pictures of replays."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from vllm_eesd.simulate.replay import PolicyReplay

#: In the two lower panels more lines than these cannot be told apart.
SHOWN = ("goodput", "goodput-head", "beta_ts", "best_fixed", "vllm_adaptive")


def plot(path: str | os.PathLike, outcomes: Sequence[PolicyReplay]) -> None:
    """Write a PNG: goodput per policy and trace; regret against the oracle and draft lengths on the last trace."""
    figure = Figure(figsize=(11, 9), layout="constrained")
    axes = figure.subplot_mosaic([["goodput", "goodput"], ["regret", "lengths"]])
    _plot_goodput(axes["goodput"], outcomes)
    last = [outcome for outcome in outcomes if outcome.trace == outcomes[-1].trace]
    _plot_regret(axes["regret"], last)
    _plot_lengths(axes["lengths"], last)
    figure.savefig(path, dpi=120, format="png", metadata={"Software": None})


def _plot_goodput(axes, outcomes: Sequence[PolicyReplay]) -> None:
    traces = list(dict.fromkeys(outcome.trace for outcome in outcomes))
    policies = list(dict.fromkeys(outcome.policy for outcome in outcomes))
    width = 0.8 / len(policies)
    for number, policy in enumerate(policies):
        heights = [
            o.replay.goodput_vs_plain for trace in traces for o in outcomes if (o.trace, o.policy) == (trace, policy)
        ]
        places, colour = np.arange(len(traces)) + number * width, colormaps["tab20"](number)
        axes.bar(places, heights, width, label=policy, color=colour)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(np.arange(len(traces)) + 0.4 - width / 2, traces)
    axes.set_ylabel("goodput, plain decoding = 1")
    axes.legend(ncols=5, fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _plot_regret(axes, outcomes: Sequence[PolicyReplay]) -> None:
    oracle = next(outcome.replay for outcome in outcomes if outcome.policy == "oracle")
    step_ms = float(np.mean(oracle.plain_ms))
    for outcome in outcomes:
        if outcome.policy in SHOWN:
            tokens, ms = np.cumsum(outcome.replay.tokens), np.cumsum(outcome.replay.ms)
            best = np.interp(tokens, np.cumsum(oracle.tokens), np.cumsum(oracle.ms))
            axes.plot(tokens, (ms - best) / step_ms, label=outcome.policy)
    axes.set_title(f"{outcomes[0].trace}: time lost to the oracle", fontsize="medium")
    axes.set_xlabel("tokens emitted")
    axes.set_ylabel("plain steps")
    axes.legend(fontsize="small")


def _plot_lengths(axes, outcomes: Sequence[PolicyReplay]) -> None:
    longest = max(max(outcome.replay.draft_lengths) for outcome in outcomes)
    shown = [outcome for outcome in outcomes if outcome.policy in (*SHOWN[:3], "oracle")]
    width = 0.8 / max(len(shown), 1)
    for number, outcome in enumerate(shown):
        shares = np.bincount(outcome.replay.draft_lengths, minlength=longest + 1) / len(outcome.replay.draft_lengths)
        axes.bar(np.arange(longest + 1) + number * width, shares, width, label=outcome.policy)
    axes.set_title(f"{outcomes[0].trace}: draft lengths", fontsize="medium")
    axes.set_xlabel("tokens drafted in a round")
    axes.set_ylabel("share of rounds")
    axes.legend(fontsize="small")
