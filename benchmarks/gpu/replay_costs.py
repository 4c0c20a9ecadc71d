"""What a replay says of the costs measured on a GPU, beside what was measured there end to end.

    PYTHONPATH=benchmarks/gpu python benchmarks/gpu/replay_costs.py     # writes benchmarks/results/gpu_replay.json

Needs no GPU. `end_to_end.py` has every token of a draft accepted by chance, at the rates it imposes; so does this, and
`goodput` decides through the round loop of the engine, token by token (Model Runner V2 decides a round before its first
draft step), at the costs that the engine's own clock on the device had in the end. As there all requests of a batch
begin together, and nothing takes the place of one that ends. What of plain's time is not steps (prompts and the host)
is added to both.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from end_to_end import RATES

from vllm_eesd.bench.latency import write_json
from vllm_eesd.policy import BetaPosterior, build_policy
from vllm_eesd.simulate.replay import PolicyDrafter, replay
from vllm_eesd.simulate.world import World
from vllm_eesd.traces.dense import DenseTrace, RequestTrace

RESULTS = Path(__file__).resolve().parents[1] / "results"
SHAPES, SEEDS, MAX_TOKENS = ("8b", "1b"), range(5), 128
#: What a head's config states that says nothing of it.
PRIOR = (1.0, 1.0)
#: Of a head of random weights no confidence says anything.
CONFIDENCE = 0.5


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with (RESULTS / "gpu_end_to_end.csv").open(newline="", encoding="utf-8") as file:
        measured = list(csv.DictReader(file))
    rows = []
    for shape in SHAPES:
        recorded = json.loads((RESULTS / f"gpu_costs_{shape}.json").read_text(encoding="utf-8"))
        commit, costs = recorded["git_sha"], recorded["costs"]
        of_run = {
            (int(row["batch"]), row["method"]): row
            for row in measured
            if (row["shape"], row["git_sha"]) == (shape, commit)
        }
        for batch in sorted({batch for batch, _ in of_run}):
            plain, eesd = of_run[batch, "plain"], of_run[batch, "eesd"]
            row = {"shape": shape, "batch": batch}
            row |= {f"measured{end}": float(eesd[f"speedup{end}"]) for end in ("", "_min", "_max")}
            rows.append(row | replayed(costs, batch, 1e3 * batch * MAX_TOKENS / float(plain["tokens_per_s"])))
            print(rows[-1], flush=True)
    write_json(RESULTS / "gpu_replay.json", rows)


def replayed(costs: dict[str, Any], batch: int, plain_ms: float) -> dict[str, float]:
    """Return the speedup of decoding alone and of everything, medians over seeds.

    Args:
        plain_ms: what plain vLLM took for `MAX_TOKENS` tokens of each request, prompts included.
    """
    steps_ms = MAX_TOKENS * World(costs).plain_ms(batch)
    other_ms, decoding, whole = max(0.0, plain_ms - steps_ms), [], []
    for seed in SEEDS:
        policy = build_policy("goodput", BetaPosterior(batch, *PRIOR), seed, {"ngram": False})
        ms = sum(replay(imposed_trace(batch, seed), PolicyDrafter(policy), World(costs, seed=seed), batch).ms)
        decoding.append(steps_ms / ms)
        whole.append(plain_ms / (other_ms + ms))
    return {"other_share": other_ms / plain_ms} | {
        name: statistics.median(speedups) for name, speedups in (("decoding", decoding), ("replayed", whole))
    }


def imposed_trace(num_requests: int, seed: int) -> DenseTrace:
    """Return requests whose drafts are right by chance: RATES[k] of them in their first k + 1 tokens."""
    luck = np.random.default_rng(seed).random((num_requests, MAX_TOKENS, 1))
    confidences = np.full((MAX_TOKENS, len(RATES)), CONFIDENCE, dtype=np.float32)
    requests = [RequestTrace((one < RATES).sum(axis=1).astype(np.int64), confidences) for one in luck]
    return DenseTrace("random weights", "imposed", len(RATES), {}, requests)


if __name__ == "__main__":
    main()
