"""What each tuned constant of the goodput policy earns: replays with it doubled, halved and removed.

    PYTHONPATH=benchmarks python benchmarks/ablate_policy.py     # seeded; one core, less than 12 minutes
    PYTHONPATH=benchmarks python benchmarks/pages.py constants   # docs/tables/policies.md: the table

Goodput is that of the replay's own clock, so other work on the machine does not move it. A replay here also drives the
idle back-off, and a decision that drafts nothing takes `DECISION_RATIO` of a plain step. Rows are written as they are
found, and those of --json are not replayed again: remove the file after a change of the policy.
"""

from __future__ import annotations

import argparse
import json
import math
import pkgutil
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
from numba.core.dispatcher import Dispatcher
from pages import PRIOR, RECORDED, RESULTS, load
from synthetic import synthetic_trace, text_trace

from vllm_eesd.policy import BetaPosterior, DraftLengthPolicy, build_policy
from vllm_eesd.simulate.replay import Batch, PolicyDrafter, replay
from vllm_eesd.simulate.world import World
from vllm_eesd.traces.dense import DenseTrace
from vllm_eesd.traces.read import read_dense

#: Time of a decision that drafts nothing, in plain steps, of the embedded model: see docs/tables/policies.md.
DECISION_RATIO = 0.03
#: A share of the unchanged goodput below which a variant is replayed with so many times the seeds.
SUSPICIOUS, MORE_SEEDS = 0.993, 4
NEVER = 1 << 30  # rounds, tokens or rows: more than any replay has
#: Tuned constants by module, each with the value at which it has no effect, or the nearest to that for which the
#: arithmetic is defined. tests/unit/test_ablate_policy.py says of every other number why it is not tuned.
REMOVED: dict[str, dict[str, Any]] = {
    "policy.calibration": {"MEMORY": math.inf, "SMOOTHING": 1.0},
    "policy.costs": {"WINDOW": 3, "MIN_SAMPLES": 1, "DEFAULT_VERIFY_GROWTH": 0.0},
    "policy.goodput": {"DISCOUNT": 1.0, "PRIOR_MEMORY": math.inf, "PRIOR_WEIGHT": 2.0}
    | {"TEMPER": 1.0, "MAX_EXPLORED": NEVER, "SPEEDUP_ROUNDS": math.inf, "QUIET_ROUNDS": 1},
    "policy.guard": {"REQUEST_ALLOWANCE": 0.5, "LEAST_ALLOWANCE": 2.0, "MAX_CREDIT": math.inf}
    | {"MAX_BACKOFF": 1.0, "PATIENCE": NEVER},
    "policy_args": {"GoodputArgs.probe_budget": 1e-6},
    "round.ngram": {"MAX_MATCH": 64, "MEMORY": math.inf, "FAMILIARITY_MEMORY": 1.0, "MOST": 2.0}
    | {"COMMON_WEIGHT": 1e12},
}
#: Doubled and halved where that is not twice and half the value; a share kept after each round is doubled and halved
#: by the memory 1 / (1 - share) that it stands for.
DOUBLED_AND_HALVED = {
    "policy.costs.MIN_SAMPLES": (6, 2),
    "policy.goodput.DISCOUNT": (0.965, 0.86),
}


class Case(NamedTuple):
    """A trace replayed at one batch size, with so many seeds at first."""

    name: str
    trace: DenseTrace
    batch: int
    num_seeds: int


def cases() -> dict[str, Case]:
    """Return the recorded traces, and synthetic ones: nothing accepted, acceptance that changes, texts that repeat."""
    code, repetitive, random = map(read_dense, RECORDED)
    never = replace(synthetic_trace((1e-6,), 0.6, 64, 150), prior=PRIOR)
    changing = replace(synthetic_trace((0.95, 0.02, 0.6), 0.6, 16, 400, None), prior=PRIOR, costs=code.costs)
    texts = replace(text_trace(), prior=PRIOR, costs=code.costs)
    found = (
        Case("held_out_code", code, 1, 2),
        Case("held_out_code", code, 8, 3),
        Case("repetitive_code", repetitive, 1, 1),
        Case("repetitive_code", repetitive, 8, 6),
        Case("random_tokens", first(random, 8), 1, 1),
        Case("random_tokens", random, 8, 1),
        Case("never", first(never, 8), 1, 1),
        Case("never", never, 32, 1),
        Case("changing", first(changing, 6), 1, 2),
        Case("changing", changing, 8, 2),
        Case("texts", first(texts, 12), 1, 1),
        Case("texts", texts, 8, 2),
    )
    return {f"{case.name}, {case.batch}": case for case in found}


def first(trace: DenseTrace, num_requests: int) -> DenseTrace:
    return replace(trace, requests=trace.requests[:num_requests])


class Engine(PolicyDrafter):
    """A policy with what its decisions take: `decision_ms` counts those that drafted nothing."""

    def __init__(self, policy: DraftLengthPolicy) -> None:
        super().__init__(policy)
        self.decision_ms = 0.0
        self._idle_rounds = self._num_reqs = 0
        self._is_idle = False

    def draft(self, batch: Batch, world: World) -> tuple[np.ndarray, np.ndarray]:
        self._is_idle = self._idle_rounds > 0 and len(batch.slots) == self._num_reqs and not batch.new.any()
        self._num_reqs = len(batch.slots)
        if self._is_idle:
            self._idle_rounds -= 1
            self.policy.skipped(batch.slots, 1)
            return np.zeros(self._num_reqs, dtype=np.int64), np.zeros(self._num_reqs, dtype=np.int64)
        num_drafted, num_verified = super().draft(batch, world)
        if not num_verified.any():
            ms = DECISION_RATIO * world.plain_ms(self._num_reqs)
            self.policy.costs.observe_decision(self._num_reqs, world.measured(ms))
            self.decision_ms += ms
        return num_drafted, num_verified

    def observe(self, batch: Batch, num_verified: np.ndarray, num_accepted: np.ndarray) -> None:
        if not self._is_idle:
            super().observe(batch, num_verified, num_accepted)
            self._idle_rounds = 0 if num_verified.any() else self.policy.idle_rounds(batch.slots)


def goodputs(case: Case, seeds: range, policy_args: dict[str, Any]) -> list[float]:
    """Return emitted tokens per time relative to plain decoding, decisions included, by seed."""
    found = []
    for seed in seeds:
        engine = Engine(build_policy("goodput", BetaPosterior(case.batch, *case.trace.prior), seed, policy_args))
        replayed = replay(case.trace, engine, World(case.trace.costs, seed=seed), case.batch)
        found.append(replayed.goodput_vs_plain / (1 + engine.decision_ms / sum(replayed.ms)))
    return found


def percent(case: Case, unchanged: list[float], policy_args: dict[str, Any]) -> float:
    """Return the present policy's goodput in percent of the unchanged one's, over the same seeds."""
    found = goodputs(case, range(case.num_seeds), policy_args)
    if sum(found) < SUSPICIOUS * sum(unchanged[: len(found)]):
        found += goodputs(case, range(len(found), len(unchanged)), policy_args)
    return round(100 * sum(found) / sum(unchanged[: len(found)]), 2)


def noise(found: list[float]) -> float:
    """Return, in percent, two standard errors of the difference of two means over so many seeds."""
    return round(200 * statistics.stdev(found) / statistics.mean(found) * (2 / len(found)) ** 0.5, 2)


@contextmanager
def changed(name: str, value: Any) -> Iterator[dict[str, Any]]:
    """Set a constant for a while; what it yields are the policy's arguments.

    Compiled functions freeze constants, so those of the module are compiled anew; nothing of that is kept on disk.
    """
    place, _, attribute = f"vllm_eesd.{name}".rpartition(".")
    if place.endswith("GoodputArgs"):
        yield {attribute: value}
        return
    module = pkgutil.resolve_name(place)
    before = dict(vars(module))
    setattr(module, attribute, value)
    for function_name, function in before.items():
        if isinstance(function, Dispatcher) and function.__module__ == place:
            setattr(module, function_name, numba.njit(function.py_func))
    try:
        yield {}
    finally:
        vars(module).update(before)


def present(name: str) -> Any:
    """Return a constant's value, or a policy argument's default."""
    place, _, attribute = f"vllm_eesd.{name}".rpartition(".")
    found = pkgutil.resolve_name(place)
    return getattr(found() if isinstance(found, type) else found, attribute)


def variants(name: str, value: Any, removed: Any) -> dict[str, Any]:
    """Return the values to replay with; counts stay whole numbers from 1."""
    if name in DOUBLED_AND_HALVED:
        doubled, halved = DOUBLED_AND_HALVED[name]
    else:
        doubled, halved = 2 * value, max(1, value // 2) if isinstance(value, int) else value / 2
    return {"doubled": doubled, "halved": halved, "removed": removed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=RESULTS / "ablate_policy.json")
    args = parser.parse_args()
    result = load(args.json, {"rows": []})
    found = {(row["constant"], row["value"], row["variant"], row["at"]) for row in result["rows"]}
    told = cases()
    unchanged = {label: goodputs(case, range(MORE_SEEDS * case.num_seeds), {}) for label, case in told.items()}
    result["noise"] = {label: noise(goodput) for label, goodput in unchanged.items()}
    for name, removed in ((f"{module}.{c}", at) for module, names in REMOVED.items() for c, at in names.items()):
        value = present(name)
        for variant, at in variants(name, value, removed).items():
            row = {"constant": name, "value": str(value), "variant": variant, "at": str(at)}
            if tuple(row.values()) in found:
                continue
            with changed(name, at) as policy_args:
                row["percent"] = percents = {
                    label: percent(case, unchanged[label], policy_args)
                    for label, case in told.items()
                    # n-gram drafts are made of texts.
                    if not name.startswith("round.ngram") or case.trace.requests[0].prompt is not None
                }
            print(f"{name:36}{variant:8} {min(percents.values()):7.2f}", flush=True)
            result["rows"].append(row)
            args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
