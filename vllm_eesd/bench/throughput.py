"""`eesd bench throughput`: requests that arrive at random, at several rates, served by several methods in turn."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from vllm_eesd.bench.engines import EngineSettings, encode_prompts, running_engines
from vllm_eesd.bench.latency import check_methods, check_sizes, open_console, reporting, write_json
from vllm_eesd.bench.measure import Work, bootstrap_interval, first_difference, rotated
from vllm_eesd.bench.prompts import chosen_file, read_prompts
from vllm_eesd.bench.vllm_engine import Served, VllmEngine
from vllm_eesd.provenance import provenance


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, write the rows as JSON.

    Raises:
        ValueError: a flag, the prompts or the model are not usable; one line.
    """
    settings = EngineSettings.of(args)
    check_methods(args.methods, settings)
    source = chosen_file(args)
    texts = read_prompts(source)
    check_sizes(len(texts), [1], max_tokens=args.max_tokens, rounds=args.rounds, requests=args.requests)
    console = open_console()
    with reporting(console) as progress:
        _, prompts, max_model_len = encode_prompts(settings.model, texts, args.max_tokens, progress, args.chat_template)
        requests = [prompts[number % len(prompts)] for number in range(args.requests)]
        fixed_length = not any(text.messages for text in texts)
        work = Work(requests, source, args.max_tokens, args.rounds, fixed_length=fixed_length)
        results: list[dict[str, Any]] = []
        with running_engines(args.methods, settings, max_model_len, progress) as engines:
            for rate in args.rate:
                results += arrival_rows(engines, settings, work, rate, args.seed, progress)
    if args.json:
        write_json(Path(args.json), results)
    console.print(arrival_table(results))
    each = "" if fixed_length else "at most "
    told = f"{args.requests} requests of {each}{args.max_tokens} tokens, {settings.dtype}; {results[0]['hardware']}"
    console.print(told)
    return 0


def arrival_rows(
    engines: Mapping[str, VllmEngine],
    settings: EngineSettings,
    work: Work,
    rate: float,
    seed: int,
    progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Return a row per engine of requests that arrive at a rate, with everything that says how it was measured.

    Args:
        work: a prompt for each request.
        seed: of the arrivals.
    """
    sizes = work.max_tokens, work.rounds
    runs = measure_rate(engines, work.prompts, rate, *sizes, seed, progress, fixed_length=work.fixed_length)
    shared = {"model": settings.model, "head": settings.head, "dtype": settings.dtype, "policy": settings.policy}
    shared |= {"prompts": str(work.source), "requests": len(work.prompts)}
    shared |= {"max_tokens": work.max_tokens, "rounds": work.rounds, "fixed_length": work.fixed_length}
    shared |= {"seed": seed, "temperature": settings.temperature, "top_p": settings.top_p}
    measured = rows(runs, compared=settings.exact)  # elsewhere rounding may change a text, drafts or none
    return [{"rate": rate, **row, **shared, **provenance()} for row in measured]


def poisson_arrivals(num_requests: int, rate: float, seed: int) -> list[float]:
    """Return when requests arrive, in seconds: `rate` a second on average, the first at once."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, num_requests - 1)
    return [0.0, *np.cumsum(gaps).tolist()]


def measure_rate(
    engines: Mapping[str, VllmEngine],
    requests: Sequence[list[int]],
    rate: float,
    max_tokens: int,
    rounds: int,
    seed: int,
    progress: Callable[[str], None] = lambda text: None,
    fixed_length: bool = True,
) -> dict[str, list[list[Served]]]:
    """Return every method's rounds; within a round all methods see the same arrivals, drawn anew for the next.

    A warm-up round of half the requests, all at once, stays out.
    """
    ends = {} if fixed_length else {"ignore_eos": False}
    runs: dict[str, list[list[Served]]] = {method: [] for method in engines}
    for method, engine in engines.items():
        progress(f"{rate:g} requests a second: warming up {method}")
        half = list(requests[: max(1, len(requests) // 2)])
        engine.serve(half, [0.0] * len(half), max_tokens, **ends)
    for number in range(rounds):
        arrivals = poisson_arrivals(len(requests), rate, seed + number)
        for method in rotated(list(engines), number):
            progress(f"{rate:g} requests a second: round {number + 1} of {rounds}, {method}")
            engines[method].forget_prefixes()
            runs[method].append(engines[method].serve(list(requests), arrivals, max_tokens, **ends))
    return runs


def rows(runs: Mapping[str, list[list[Served]]], compared: bool = True) -> list[dict[str, Any]]:
    """Return one row per method.

    Args:
        compared: whether outputs are compared with plain's; not where they are sampled.
    Returns:
        tokens_per_s of the whole run, medians over its rounds; latency_s, to the last token, and its 95th percentile;
        first_token_s; ms_per_token after the first; latency_ratio: plain's mean latency over the method's, paired by
        round, and its bootstrap interval; identical: whether every output is plain's, None if not compared.
    """
    result = []
    for method, rounds in runs.items():
        served = [request for round_ in rounds for request in round_]
        latencies = [request.last - request.arrived for request in served]
        speeds = [sum(len(r.tokens) for r in round_) / max(r.last for r in round_) for round_ in rounds]
        later = [1e3 * (r.last - r.first) / (len(r.tokens) - 1) for r in served if len(r.tokens) > 1]
        row = {
            "method": method,
            "tokens_per_s": round(statistics.median(speeds), 2),
            "latency_s": round(statistics.median(latencies), 4),
            "latency_p95_s": round(float(np.quantile(latencies, 0.95)), 4),
            "first_token_s": round(statistics.median(r.first - r.arrived for r in served), 4),
            "ms_per_token": round(statistics.median(later), 3) if later else None,
        }
        result.append(row | _beside_plain(rounds, runs.get("plain"), compared))
    return result


def _beside_plain(rounds: list[list[Served]], plain: list[list[Served]] | None, compared: bool) -> dict[str, Any]:
    if plain is None:
        return {"latency_ratio": None, "latency_ratio_interval": None, "identical": None}
    ratios = [_mean_latency(theirs) / _mean_latency(ours) for ours, theirs in zip(rounds, plain, strict=True)]
    expected = [request.tokens for request in plain[0]]
    differences = (first_difference(expected, [request.tokens for request in round_]) for round_ in rounds)
    return {
        "latency_ratio": round(statistics.median(ratios), 3),
        "latency_ratio_interval": bootstrap_interval(ratios),
        "identical": not any(differences) if compared else None,
    }


def _mean_latency(served: list[Served]) -> float:
    return statistics.fmean(request.last - request.arrived for request in served)


def arrival_table(results: list[dict[str, Any]]) -> Table:
    """Return `arrival_rows` as a table for the terminal."""
    table = Table()
    for heading in ("method", "requests/s", "tokens/s", "latency s", "95%", "first token s", "ms/token", "faster"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for row in results:
        per_token, ratio = row["ms_per_token"], row["latency_ratio"]
        table.add_row(
            row["method"],
            f"{row['rate']:g}",
            f"{row['tokens_per_s']:.1f}",
            f"{row['latency_s']:.3f}",
            f"{row['latency_p95_s']:.3f}",
            f"{row['first_token_s']:.3f}",
            "-" if per_token is None else f"{per_token:.2f}",
            "-" if ratio is None else f"{ratio:.2f}x",
        )
    return table
