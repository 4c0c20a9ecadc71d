"""How well a draft token's acceptance can be foretold: from its confidence, from the request's posterior, from both.

    python benchmarks/confidence_quality.py TRACE... [--json FILE]
    python benchmarks/confidence_quality.py --model DIR [--head DIR] [--results DIR] [--name smollm2]

Drafts of K = 4 tokens in every round. A trace is a dense one (`eesd trace-record`), which is walked as if every round
drafted so many, or a server's rounds (`policy_args.trace_file`) of a policy that computes confidences. With --model the
rounds of chat and human_eval are recorded now, greedy and sampled, into NAME-confidence.json.

Judged tokens count: those up to the first rejection. A forecast is a logistic regression on the logarithm of the odds
of what it may look at and on the token's position, fitted on every other request and applied to the rest, both ways
round. AUC is the chance that an accepted token's forecast is above a rejected one's (0.5 knows nothing), the Brier
score the mean squared error (smaller is better). The posterior is `goodput`'s: it fades, and starts from what other
requests taught.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from scipy.special import expit, logit
from scipy.stats import rankdata

from vllm_eesd.bench.engines import EngineSettings, encode_prompts, running_engines
from vllm_eesd.bench.latency import digest, open_console, reporting, write_json
from vllm_eesd.bench.prompts import read_prompts, workload_file
from vllm_eesd.bench.vllm_engine import VllmEngine
from vllm_eesd.policy import BetaPosterior
from vllm_eesd.policy.goodput import DISCOUNT, PRIOR_MEMORY, PRIOR_WEIGHT
from vllm_eesd.provenance import provenance
from vllm_eesd.traces.dense import DenseTrace
from vllm_eesd.traces.read import read
from vllm_eesd.traces.rounds import RoundRecord

LENGTH = 4
#: A request's rounds: the confidences of the draft tokens, and how many of them were accepted.
Rounds = list[tuple[list[float], int]]
#: What each forecast looks at beside the position: columns of `judged_tokens`.
FORECASTS = {"position alone": [], "confidence": [0], "posterior": [1], "both": [0, 1]}
#: Odds stay finite; the weight of the regression's ridge keeps its weights so.
LEAST_CHANCE, RIDGE, NEWTON_STEPS = 1e-4, 1e-3, 30
PRIOR = (6.0, 4.0)
WORKLOADS, SAMPLINGS, AT_ONCE = ("chat", "human_eval"), ((0.0, 1.0), (0.7, 0.95)), 8
#: The last rounds reach the file within half a second of their end.
WRITTEN_WITHIN_S = 30.0


def rounds_of(path: str | os.PathLike) -> list[Rounds]:
    """Return the rounds of every request of a trace.

    Raises:
        ValueError: not a trace, or one without confidences; one line.
    """
    found = read(path)
    if isinstance(found, DenseTrace):
        return [list(walked(request.matches, request.confidences)) for request in found.requests]
    if not (requests := served(found)):
        raise ValueError(f"{path}: no round has confidences; allowed: traces of a policy that computes them")
    return requests


def served(records: list[RoundRecord]) -> list[Rounds]:
    """Return the rounds by request, those left out that have no confidences, as n-gram drafts."""
    by_request: dict[str, Rounds] = {}
    for record in records:
        shown = record["confidences"][:LENGTH]
        if shown and not record["copied"] and None not in shown:
            by_request.setdefault(record["request"], []).append((shown, min(record["accepted"], LENGTH)))
    return list(by_request.values())


def walked(matches: np.ndarray, confidences: np.ndarray) -> Iterator[tuple[list[float], int]]:
    """Yield the rounds of a request all of whose drafts have LENGTH tokens, from a dense trace's positions."""
    at = 0
    while at < len(matches):
        accepted = min(int(matches[at]), LENGTH)
        yield confidences[at, :LENGTH].tolist(), accepted
        at += accepted + 1


def judged_tokens(requests: list[Rounds], prior: tuple[float, float] = PRIOR) -> dict[str, np.ndarray]:
    """Return every judged draft token.

    Returns:
        known: [num_tokens, 2] float64, its confidence and the mean of the request's posterior before the round.
        position: [num_tokens] int64 from 0; request: [num_tokens] int64; accepted: [num_tokens] bool.
    """
    posterior, slot = BetaPosterior(1, *prior), np.zeros(1, dtype=np.int64)
    posterior.fade(DISCOUNT)
    posterior.learn_priors(PRIOR_MEMORY, PRIOR_WEIGHT)
    rows = []
    for request, rounds in enumerate(requests):
        posterior.reset(slot)
        for confidences, accepted in rounds:
            mean = float(posterior.mean(slot)[0])
            judged = min(len(confidences), accepted + 1)
            rows += [(confidences[at], mean, at, request, at < accepted) for at in range(judged)]
            posterior.observe(slot, np.array([len(confidences)]), np.array([accepted]))
    table = np.array(rows, dtype=np.float64).reshape(-1, 5)
    position, request, accepted = (table[:, column].astype(np.int64) for column in (2, 3, 4))
    return {"known": table[:, :2], "position": position, "request": request, "accepted": accepted.astype(bool)}


def forecast(tokens: dict[str, np.ndarray], columns: list[int]) -> np.ndarray:
    """Return each token's foretold acceptance, [num_tokens] float64, by what the other half of the requests taught."""
    odds = logit(np.clip(tokens["known"][:, columns], LEAST_CHANCE, 1 - LEAST_CHANCE))
    features = np.concatenate([odds, np.eye(LENGTH)[tokens["position"]]], axis=1)
    found, half = np.zeros(len(features)), tokens["request"] % 2
    for part in (0, 1):
        weights = fitted(features[half != part], tokens["accepted"][half != part])
        found[half == part] = expit(features[half == part] @ weights)
    return found


def fitted(features: np.ndarray, outcomes: np.ndarray) -> np.ndarray:
    """Return the weights of a logistic regression with a ridge, by Newton's method, [num_features] float64."""
    weights = np.zeros(features.shape[1])
    for _ in range(NEWTON_STEPS):
        chances = expit(features @ weights)
        gradient = features.T @ (outcomes - chances) - RIDGE * weights
        curvature = (features * (chances * (1 - chances))[:, None]).T @ features + RIDGE * np.eye(len(weights))
        step = np.linalg.solve(curvature, gradient)
        weights += step
        if np.abs(step).max() < 1e-9:
            break
    return weights


def auc(foretold: np.ndarray, accepted: np.ndarray) -> float | None:
    """Return the chance that an accepted token's forecast is above a rejected one's, None without one of each."""
    right = int(accepted.sum())
    pairs = right * (len(accepted) - right)
    return float(rankdata(foretold)[accepted].sum() - right * (right + 1) / 2) / pairs if pairs else None


def quality(requests: list[Rounds], prior: tuple[float, float] = PRIOR) -> list[dict[str, Any]]:
    """Return a row per forecast.

    Raises:
        ValueError: fewer than two requests; one line.
    """
    if len(requests) < 2:
        raise ValueError(f"requests={len(requests)} are too few; allowed: 2 or more, for one half foretells the other")
    tokens = judged_tokens(requests, prior)
    rows = []
    for name, columns in FORECASTS.items():
        foretold = forecast(tokens, columns)
        area, brier = auc(foretold, tokens["accepted"]), float(np.mean((foretold - tokens["accepted"]) ** 2))
        row = {"forecast": name, "auc": None if area is None else round(area, 4), "brier": round(brier, 4)}
        row |= {"tokens": len(foretold), "accepted": round(float(tokens["accepted"].mean()), 4)}
        rows.append(row | {"requests": len(requests), "length": LENGTH})
    return rows


def record(args: argparse.Namespace, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return the rows of workloads that are generated now, greedy and sampled.

    Raises:
        ValueError: the model, its head or a workload is not usable; one line.
    """
    read_already = {name: read_prompts(workload_file(name))[: args.num_prompts] for name in args.workloads}
    rows, encoded, longest = [], {}, 0
    for name, texts in read_already.items():
        _, encoded[name], length = encode_prompts(args.model, texts, args.max_tokens, progress)
        longest = max(longest, length)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "rounds.jsonl"
        settings = EngineSettings(args.model, args.head, args.dtype, LENGTH, "confidence")
        # Drafts to the end, and computes every confidence on the way.
        settings = replace(settings, policy_args={"threshold": 0.0, "trace_file": str(trace)})
        with running_engines(["eesd"], settings, longest, progress) as engines:
            for name, prompts in encoded.items():
                for temperature, top_p in SAMPLINGS:
                    progress(f"{name}, T = {temperature:g}: {len(prompts)} prompts")
                    ends = not any(text.messages for text in read_already[name])
                    engine = engines["eesd"].at(temperature, top_p)
                    requests = recorded(engine, trace, prompts, args.max_tokens, ends)
                    shared = {"workload": name, "temperature": temperature, "top_p": top_p, "dtype": args.dtype}
                    shared |= {"model": Path(args.model).name, "head": args.head, "max_tokens": args.max_tokens}
                    shared["prompts_digest"] = digest(workload_file(name))
                    rows += [shared | row | provenance() for row in quality(requests)]
    return rows


def recorded(
    engine: VllmEngine, trace: Path, prompts: list[list[int]], max_tokens: int, ignore_eos: bool
) -> list[Rounds]:
    """Return the rounds of these prompts, once all of them are in the file.

    Raises:
        TimeoutError: some do not come.
    """
    known = {record["request"] for record in read(trace)}
    texts = engine.generate(prompts, max_tokens, AT_ONCE, ignore_eos=ignore_eos)
    # A text's first token ends its prompt and is of no round.
    wanted = sum(len(text) - 1 for text in texts)
    deadline = time.monotonic() + WRITTEN_WITHIN_S
    while True:
        records = [record for record in read(trace) if record["request"] not in known]
        if sum(len(record["emitted"]) for record in records) >= wanted:
            return served(records)
        if time.monotonic() > deadline:
            raise TimeoutError(f"{trace}: after {WRITTEN_WITHIN_S:.0f} s rounds are missing")
        time.sleep(0.1)


def shown(rows: list[dict[str, Any]]) -> Table:
    """Return the rows as a table for the terminal."""
    table = Table("workload", "T", "forecast", "AUC", "Brier", "tokens", "accepted")
    for row in rows:
        area = "-" if row["auc"] is None else f"{row['auc']:.3f}"
        cells = (row["workload"], f"{row.get('temperature', 0):g}", row["forecast"], area, f"{row['brier']:.4f}")
        table.add_row(*cells, str(row["tokens"]), f"{row['accepted']:.0%}")
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", metavar="TRACE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="rows of the traces")
    parser.add_argument("--model", metavar="DIR", help="record with this target instead")
    parser.add_argument("--head", metavar="DIR", help="default: the target's own")
    parser.add_argument("--dtype", default="bfloat16", help="of the target")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), metavar="NAME")
    parser.add_argument("--num-prompts", type=int, default=80)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"), metavar="DIR")
    parser.add_argument("--name", default="smollm2", help="what the results' file begins with")
    args = parser.parse_args()
    if bool(args.traces) == bool(args.model):
        parser.error("give traces or --model")
    console = open_console()
    try:
        if args.model:
            with reporting(console) as progress:
                rows = record(args, progress)
            write_json(args.results / f"{args.name}-confidence.json", rows)
        else:
            rows = []
            for path in args.traces:
                name = Path(path).name.split(".")[0]
                rows += [{"workload": name} | row | provenance() for row in quality(rounds_of(path))]
            if args.json:
                write_json(args.json, rows)
    except (ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    console.print(shown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
