"""What steps cost here, measured for the plan's validation: in passes, beside the rows that it is compared with.

A speedup is a ratio, so ratios are what must be right. A pass over a batch size times plain vLLM's prompts and steps
and EESD's, one right after the other, and lets EESD take steps of every draft length. Kept are the medians over the
passes: of the ratios of each pair, and of every size's time. So a minute in which the machine was slower for both
moves nothing, and a second in which it was slower for one is outvoted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from vllm_eesd.bench.trace_record import time_steps
from vllm_eesd.simulate.plan_costs import pooled

PASSES = 3
#: Steps behind the first token that a pair is timed over; groups of prompts it is timed with, at most.
STEPS, GROUPS = 24, 2
NO_DRAFTS = {"eesd_max_draft_tokens": 0}


def batch_costs(plain: Any, eesd: Any, prompts: Sequence[list[int]], batch: int, longest: int) -> dict[str, Any]:
    """Return what a batch size costs, the fields of `vllm_eesd.simulate.plan_costs.BatchCosts` as JSON takes them.

    Args:
        plain, eesd: engines (`vllm_eesd.bench.vllm_engine.VllmEngine`).
        prompts: at least `batch`.
        longest: draft length.
    """
    groups = [list(prompts[first : first + batch]) for first in range(0, len(prompts) - batch + 1, batch)][:GROUPS]
    pairs, states = [], []
    for number in range(PASSES):
        engines = [(plain, None), (eesd, NO_DRAFTS)]
        # Who comes first takes turns, as in every comparison.
        timed = [timed_groups(engine, groups, options) for engine, options in engines[:: 1 - 2 * (number % 2)]]
        pairs.append(timed[:: 1 - 2 * (number % 2)])
        time_steps(eesd.generate, groups[number % len(groups)], [batch], longest)
        states.append(eesd.costs())
    return {
        "costs": pooled(states),
        "prompt_ms": round(statistics.median(ours[0] for ours, _ in pairs), 3),
        "eesd_prompt_share": round(statistics.median(theirs[0] / ours[0] for ours, theirs in pairs), 4),
        "plain_share": round(statistics.median(ours[1] / theirs[1] for ours, theirs in pairs), 4),
    }


def timed_groups(engine: Any, groups: list[list[list[int]]], options: dict[str, Any] | None) -> tuple[float, float]:
    """Return the mean ms of a group's prompts and first tokens, and of a step behind them; the steps of all groups."""
    prompts, whole = [], []
    for group in groups:
        engine.forget_prefixes()
        for tokens, times in ((1, prompts), (1 + STEPS, whole)):
            began = time.perf_counter()
            engine.generate(group, tokens, options=options)
            times.append(1e3 * (time.perf_counter() - began))
            engine.forget_prefixes()
    prompt_ms, whole_ms = statistics.fmean(prompts), statistics.fmean(whole)
    return prompt_ms, max(whole_ms - prompt_ms, 1e-3) / STEPS
