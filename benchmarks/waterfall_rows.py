"""The arithmetic of benchmarks/waterfall.py: means over steps, and what EESD's round is made of beside a plain step."""

from __future__ import annotations

import statistics
from typing import Any

OUTLIER = 3.0
#: The piece of a step that no timer counts.
UNNAMED = "unnamed"
#: What verification needs in addition to the forward of its tokens; drafting has pieces of its own.
OVERHEAD = ("engine loop", "scheduler", "input preparation", "sampler and verification", "bookkeeping and output")


def summary(steps: list[Any], batch: int) -> dict[str, Any]:
    """Return means over the steps in which `batch` requests decode.

    Args:
        steps: `waterfall.Step`s.
    Returns:
        step_ms; pieces: ms each, adding up to it; explained: the share that is not "unnamed"; tokens: emitted a step,
        by all requests; drafts: scheduled a step, by all; draft_steps: run a step; steps, outliers: counted, left out.
    Raises:
        ValueError: there is no such step.
    """
    decoding = [step for step in steps if step.num_reqs == batch and not step.begins]
    if not decoding:
        raise ValueError(f"batch={batch}: no step in which so many requests decode; allowed: more prompts or tokens")
    limit = OUTLIER * statistics.median(step.ms for step in decoding)
    kept = [step for step in decoding if step.ms <= limit]
    pieces = {name: statistics.fmean(step.pieces[name] for step in kept) for name in kept[0].pieces}
    step_ms = sum(pieces.values())
    return {
        "step_ms": round(step_ms, 4),
        "pieces": {name: round(ms, 4) for name, ms in pieces.items()},
        "explained": round(1 - pieces[UNNAMED] / step_ms, 4),
        "tokens": round(statistics.fmean(step.num_emitted for step in kept), 4),
        "drafts": round(statistics.fmean(step.num_tokens - batch for step in kept), 4),
        "draft_steps": round(statistics.fmean(step.num_draft_steps for step in kept), 4),
        "steps": len(kept),
        "outliers": len(decoding) - len(kept),
    }


def compare(
    batch: int, plain: dict[str, Any], idle: dict[str, Any], eesd: dict[str, Any], layers_share: float
) -> dict[str, Any]:
    """Return a batch size's row.

    Args:
        plain, eesd: of `summary`.
        idle: EESD's, for requests that draft nothing: its forward differs from plain's by the KV fill.
        layers_share: layers that a draft step runs through, of the target's.
    Returns:
        the three; waterfall: (what, ms) from a plain step to EESD's round; measured_speedup, ideal_speedup, efficiency;
        draft_step_ratio: a draft step over its layers' share of a plain forward and the LM head, None without any;
        overhead_ratio: all of `OVERHEAD` over plain's; idle_ratio: a step in which no request drafts over plain's.
    """
    step_ms = layers_share * plain["pieces"]["model forward"] + plain["pieces"]["LM head"]
    draft_ms = eesd["pieces"]["draft forward"] / eesd["draft_steps"] if eesd["draft_steps"] else None
    plain_ms, eesd_ms = (sum(kind["pieces"][name] for name in OVERHEAD) for kind in (plain, eesd))
    ideal_ms = plain["step_ms"] + eesd["pieces"]["draft forward"]
    fill_ms = idle["pieces"]["model forward"] - plain["pieces"]["model forward"]
    waterfall = [("plain step", plain["step_ms"]), ("draft forward", eesd["pieces"]["draft forward"])]
    for name in plain["pieces"]:
        more = eesd["pieces"][name] - plain["pieces"][name]
        if name == "model forward":
            waterfall += [("KV fill", fill_ms), ("forward of the drafts", more - fill_ms)]
        elif name != "draft forward":
            waterfall.append((name, more))
    tokens = eesd["tokens"] / plain["tokens"]
    return {
        "batch": batch,
        "plain": plain,
        "idle": idle,
        "eesd": eesd,
        "waterfall": [[name, round(ms, 4)] for name, ms in waterfall],
        "measured_speedup": round(tokens * plain["step_ms"] / eesd["step_ms"], 4),
        "ideal_speedup": round(tokens * plain["step_ms"] / ideal_ms, 4),
        "efficiency": round(ideal_ms / eesd["step_ms"], 4),
        "draft_step_ratio": None if draft_ms is None else round(draft_ms / step_ms, 3),
        "overhead_ratio": round(eesd_ms / plain_ms, 3),
        "idle_ratio": round(idle["step_ms"] / plain["step_ms"], 3),
    }
