"""The one measuring function: methods interleaved round by round, ratios paired per round, outputs compared."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_eesd.bench.loops import share_in_loops
from vllm_eesd.bench.vllm_engine import Limits, VllmEngine, each_limit

Tokens = list[int]
#: Bootstrap samples of a run's ratios: the ends of an interval are then good to the digits shown.
RESAMPLES = 2000


@dataclass(frozen=True)
class Work:
    """What every method is given.

    Attributes:
        prompts: token ids.
        source: the prompts' file.
        max_tokens: generated for each, exactly.
        rounds: timed.
        limits: each prompt's own number of tokens, where it is not `max_tokens`.
    """

    prompts: list[Tokens]
    source: str | os.PathLike
    max_tokens: int
    rounds: int
    limits: Sequence[int] | None = None


@dataclass
class Runs:
    """What one method did: one entry per timed round, and its counters over all of them."""

    seconds: list[float] = field(default_factory=list)
    outputs: list[list[Tokens]] = field(default_factory=list)
    counters: Mapping[str, Any] = field(default_factory=dict)

    def tokens_per_s(self) -> list[float]:
        return [sum(map(len, out)) / seconds for out, seconds in zip(self.outputs, self.seconds, strict=True)]


def measure(
    engines: Mapping[str, VllmEngine],
    prompts: Sequence[Tokens],
    *,
    batch: int,
    max_tokens: Limits,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Runs]:
    """Return every method's runs over all prompts.

    One warm-up per method stays outside the clock; the order of the methods rotates from round to round.

    Args:
        batch: requests at a time: when one ends, the next begins, as under load. (Batches that all begin together end
            with their slowest request, which only speculation has.)
    """
    work = list(prompts), each_limit(max_tokens, len(prompts)), batch
    runs = {method: Runs() for method in engines}
    counted = {}
    for method, engine in engines.items():
        progress(f"batch {batch}: warming up {method}")
        engine.forget_prefixes()
        # Plain emits a token a round, whatever the prompts: one batch warms it up and shows that.
        some = [given[:batch] for given in work[:2]] if method == "plain" else work[:2]
        counted[method] = count_rounds(engine, *some, batch)
        engine.reset_statistics()
    for round_index in range(rounds):
        for method in rotated(list(engines), round_index):
            progress(f"batch {batch}: round {round_index + 1} of {rounds}, {method}")
            engine = engines[method]
            engine.forget_prefixes()
            began = clock()
            outputs = engine.generate(*work)
            runs[method].seconds.append(clock() - began)
            runs[method].outputs.append(outputs)
    for method, engine in engines.items():
        runs[method].counters = engine.statistics() or counted[method]
    return runs


def rotated(methods: list[str], round_index: int) -> list[str]:
    """Return the methods in this round's order: each is first in turn."""
    start = round_index % len(methods)
    return methods[start:] + methods[:start]


def count_rounds(engine: VllmEngine, prompts: list[Tokens], limits: list[int], batch: int) -> dict[str, int]:
    """Return the decoding rounds and the tokens emitted in them, seen from outside the engine.

    A request's first step ends its prompt and is no decoding round.
    """
    counters = {"rounds": 0, "emitted": 0}
    started: set[int] = set()
    for step in engine.stream(prompts, limits, batch):
        for index, tokens in step:
            if index in started and tokens:
                counters["rounds"] += 1
                counters["emitted"] += len(tokens)
            started.add(index)
    return counters


def round_statistics(counters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ratios of a drafter's counters, None where there is nothing to divide.

    Args:
        counters: rounds, emitted; from a drafter also drafted, accepted, accepted_per_position.
    Returns:
        acceptance_length: tokens emitted per round, the target's own included.
        acceptance_rate: accepted / drafted.
        mean_draft_length: tokens drafted per round.
        ngram_share: of the drafts accepted, those that were n-gram drafts.
        acceptance_per_position: unconditional: of all rounds, the share that accepted a draft at that position.
    """
    rounds, drafted = counters.get("rounds", 0), counters.get("drafted")
    accepted, copied = counters.get("accepted_per_position"), counters.get("copied_accepted")
    return {
        "acceptance_length": counters["emitted"] / rounds if rounds else None,
        "acceptance_rate": counters["accepted"] / drafted if drafted else None,
        "mean_draft_length": drafted / rounds if rounds and drafted is not None else None,
        "ngram_share": copied / counters["accepted"] if copied is not None and counters["accepted"] else None,
        "acceptance_per_position": [n / rounds for n in accepted] if rounds and accepted else None,
    }


def paired_ratios(runs: Runs, plain: Runs) -> list[float]:
    """Return the method's speed over plain's, round by round."""
    return [ours / theirs for ours, theirs in zip(runs.tokens_per_s(), plain.tokens_per_s(), strict=True)]


def bootstrap_interval(ratios: list[float]) -> list[float] | None:
    """Return the 95% interval of the ratios' median, None for fewer than three; always the same for the same ratios."""
    from scipy.stats import bootstrap

    if len(ratios) < 3:
        return None
    settings = {"n_resamples": RESAMPLES, "method": "percentile", "rng": 0}
    found = bootstrap((ratios,), statistics.median, vectorized=False, **settings).confidence_interval
    return [round(float(found.low), 3), round(float(found.high), 3)]


def first_difference(expected: list[Tokens], outputs: list[Tokens]) -> str | None:
    """Return where outputs leave the expected tokens, in words, None if they are the same."""
    for index, (right, ours) in enumerate(zip(expected, outputs, strict=True)):
        if right == ours:
            continue
        at = next((i for i, (a, b) in enumerate(zip(right, ours, strict=False)) if a != b), min(len(right), len(ours)))
        found, wanted = (str(t[at]) if at < len(t) else "nothing" for t in (ours, right))
        return f"prompt {index + 1}, token {at + 1}: {found} instead of {wanted}"
    return None


def identical_share(expected: list[Tokens], rounds: list[list[Tokens]]) -> float:
    """Return the share of texts that are the expected ones, over all rounds."""
    same = [ours == right for outputs in rounds for ours, right in zip(outputs, expected, strict=True)]
    return sum(same) / len(same)


def rows(runs: Mapping[str, Runs], *, exact: bool, compared: bool = True) -> list[dict[str, Any]]:
    """Return one row of results per method.

    Every round's output is compared with plain's first. With `exact` (float32) the comparison is a gate: a method
    whose output differs gets no speedup. Without plain there is nothing to compare with. Sampled outputs differ by
    chance: they are not `compared`.
    """
    plain = runs.get("plain")
    result = []
    for method, ours in runs.items():
        found = (first_difference(plain.outputs[0], out) for out in ours.outputs) if plain and compared else ()
        difference = next(filter(None, found), None)
        row: dict[str, Any] = {"method": method, "tokens_per_s": round(statistics.median(ours.tokens_per_s()), 2)}
        row |= {"speedup_vs_plain": None, "speedup_spread": None, "speedup_interval": None}
        if plain and not (exact and difference):
            ratios = paired_ratios(ours, plain)
            row["speedup_vs_plain"] = round(statistics.median(ratios), 3)
            row["speedup_spread"] = [round(min(ratios), 3), round(max(ratios), 3)]
            row["speedup_interval"] = bootstrap_interval(ratios)
        row |= {name: _rounded(value) for name, value in round_statistics(ours.counters).items()}
        row["looping_share"] = _rounded(share_in_loops(tokens for output in ours.outputs for tokens in output))
        row |= {"identical": None, "identical_share": None, "first_difference": difference}
        if plain and compared:
            share = identical_share(plain.outputs[0], ours.outputs)
            row |= {"identical": difference is None, "identical_share": _rounded(share)}
        result.append(row)
    return result


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    return round(value, 4) if isinstance(value, float) else value
