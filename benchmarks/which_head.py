"""Which head would pay where: recorded acceptance at the costs of other targets on GPUs, beside others' published.

    python benchmarks/which_head.py            # writes benchmarks/results/which_head.json, for docs/tables/gpu.md

A roofline and assumptions, no measurement: see docs/tables/gpu.md, which says so beside the table.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scipy.optimize import brentq

from vllm_eesd.bench.latency import write_json
from vllm_eesd.simulate.plan import Head, at_same_depth, plan_batch
from vllm_eesd.simulate.roofline import GPUS, Gpu, Roofline, Shape
from vllm_eesd.traces.dense import DraftLayers
from vllm_eesd.traces.read import read_dense

ROOT = Path(__file__).resolve().parents[1]
TRACE = ROOT / "models" / "traces" / "held_out_code.jsonl.gz"
RESULT = ROOT / "benchmarks" / "results" / "which_head.json"
#: Llama 3.2 1B, Llama 3.1 8B, Qwen3 32B, Llama 3.1 70B, as their config.json state them.
SHAPES = {
    "1B": Shape.of(16, 2048, 128256, intermediate=8192, head_dim=64),
    "8B": Shape.of(32, 4096, 128256),
    "32B": Shape.of(64, 5120, 151936, intermediate=25600, heads=64),
    "70B": Shape.of(80, 8192, 128256),
}
BATCHES, CONTEXT = (1, 8, 64), 1024
#: EAGLE-3's own size; a head of ours can have the same.
DRAFT_VOCAB = 32000
#: What the KV of a head of ours is filled from, with the auxiliary layers of `eesd distill`'s default.
FILL_STATES = 5


@dataclass(frozen=True)
class Published:
    """A drafter whose acceptance others have published.

    Attributes:
        tokens: a round emits, on HumanEval at T = 1, Qwen3-4B, both trained on the same data.
        layers: of the drafter.
        one_pass: whether all drafts come of one pass.
    Source: arXiv 2607.05147 (DSpark), its main table.
    """

    tokens: float
    layers: int
    one_pass: bool


PUBLISHED = {"EAGLE-3": Published(4.16, 1, False), "DSpark": Published(5.38, 5, True)}
#: What they draft a round.
LENGTH = 7


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    trace = read_dense(TRACE)
    # What was recorded before traces said so is of the embedded head.
    recorded = trace.layers or DraftLayers(exit=2, head=1, target=12)
    rows = []
    for name, shape in SHAPES.items():
        exit_layer = at_same_depth(recorded, shape.layers)
        for gpu in ("h100", "h200"):
            tp = devices(shape, GPUS[gpu])
            machine = {"gpu": GPUS[gpu], "tp": tp, "context": CONTEXT, "draft_vocab": DRAFT_VOCAB}
            for batch in BATCHES:
                row: dict[str, Any] = {"target": name, "gpu": gpu, "tp": tp, "batch": batch}
                for label, layer in (("same_depth", exit_layer), ("shallow", recorded.exit)):
                    head = Head(trace, layer, recorded.head)
                    times = Roofline(shape, layer, recorded.head, fill_states=FILL_STATES, **machine)
                    args = argparse.Namespace(policy="goodput", seed=0)
                    row[label] = {"exit_layer": layer, "speedup": plan_batch(head, times, batch, args)["head_speedup"]}
                row |= {drafter: best_published(known, shape, machine, batch) for drafter, known in PUBLISHED.items()}
                rows.append(row)
                print(row, flush=True)
    published = {drafter: asdict(known) for drafter, known in PUBLISHED.items()}
    known = {"recorded": asdict(recorded), "published": published, "length": LENGTH}
    known["labels"] = ["EESD at the same depth", "EESD at the same N", *PUBLISHED]
    write_json(RESULT, known | {"context": CONTEXT, "draft_vocab": DRAFT_VOCAB, "rows": rows})


def devices(shape: Shape, gpu: Gpu) -> int:
    """Return how many devices the target and the KV of the largest batch fit on, a power of two."""
    tp = 1
    while Roofline(shape, 0, 5, gpu, tp=tp, context=CONTEXT).memory_gb(max(BATCHES)) > gpu.memory_gb:
        tp *= 2
    return tp


def best_published(known: Published, shape: Shape, machine: dict[str, Any], batch: int) -> dict[str, Any]:
    """Return {"speedup", "length"} of the best draft length up to `LENGTH`, if every draft is as likely to be right."""
    rate = acceptance_of(known.tokens, LENGTH)
    times = Roofline(shape, 0, known.layers, **machine)
    plain, best = times.plain_ms(batch), {"speedup": 1.0, "length": 0}
    for length in range(1, LENGTH + 1):
        draft = times.draft_step_ms(batch, length) if known.one_pass else length * times.draft_step_ms(batch)
        tokens = sum(rate**place for place in range(length + 1))
        speedup = tokens * plain / (draft + times.verify_ms(batch, batch * length))
        best = max(best, {"speedup": round(speedup, 3), "length": length}, key=lambda one: one["speedup"])
    return best


def acceptance_of(tokens: float, length: int) -> float:
    """Return how likely each draft must be accepted for a round of so many drafts to emit `tokens`."""
    return float(brentq(lambda rate: sum(rate**place for place in range(length + 1)) - tokens, 0.0, 1.0))


if __name__ == "__main__":
    main()
