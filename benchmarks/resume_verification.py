"""Whether verification should resume at layer N (the paper's figure 2), on recorded acceptance and measured costs.

    python benchmarks/resume_verification.py                 # the shipped traces, docs/decisions/0003's tables
    python benchmarks/resume_verification.py --batch 1 TRACE...

Drafting has run the bonus token and all drafts but the last one through layers 0..N-1. Verification could start from
those hidden states: it would save N of its L layers, and the target would not see the last draft, so a round whose
drafts are all accepted emits one token less. With rho tokens emitted per ms that is worth it iff

    rho * saved ms per step  >  fully accepted drafts per step

The replay counts both sides, in resuming's favour: N / L of all that a step takes is called saved, the LM head's and
the engine's share included, and so is what the last draft's token costs.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm_eesd.policy import BetaPosterior, build_policy
from vllm_eesd.simulate.peers import FixedLength
from vllm_eesd.simulate.replay import Batch, PolicyDrafter, replay
from vllm_eesd.simulate.roofline import GPUS, Roofline, Shape, costs_of
from vllm_eesd.simulate.run import load_traces
from vllm_eesd.simulate.world import World
from vllm_eesd.trace import DenseTrace

TRACES = sorted((Path(__file__).resolve().parents[1] / "models" / "traces").glob("*.jsonl.gz"))
#: None is the policy `goodput`; a number, drafts of that length for everybody.
LENGTHS = (None, 1, 2, 4, 8)
#: A target of Llama 3.1 8B's shape drafting from layer 3, on a GPU that is computed from its datasheet.
BIG, BIG_EXIT_LAYER, GPU = Shape(32, 4096, 128256, 14336, 32, 8, 128), 3, "h200"


@dataclass
class Rounds:
    """Stands between a replay and its drafter and counts what resuming would change.

    Attributes:
        drafter: decides.
        world: true costs.
        saved_share: N / L.
        saved_ms, lost_tokens: over all steps.
        drafting, steps: requests that drafted, and steps, so far.
    """

    drafter: Any
    world: World
    saved_share: float
    saved_ms: float = 0.0
    lost_tokens: int = 0
    drafting: int = 0
    steps: int = 0

    def draft(self, batch: Batch, world: World) -> tuple[np.ndarray, np.ndarray]:
        return self.drafter.draft(batch, world)

    def observe(self, batch: Batch, num_verified: np.ndarray, num_accepted: np.ndarray, ms: float) -> None:
        self.drafter.observe(batch, num_verified, num_accepted, ms)
        drafting = num_verified > 0
        self.drafting += int(drafting.sum())
        self.steps += 1
        self.lost_tokens += int((drafting & (num_accepted == num_verified)).sum())
        if drafting.any():
            num_drafts = int(num_verified.sum())
            whole = self.world.verify_ms(len(num_verified), num_drafts)
            one_less = self.world.verify_ms(len(num_verified), num_drafts - int(drafting.sum()))
            self.saved_ms += whole - (1 - self.saved_share) * min(whole, one_less)


def row(trace: DenseTrace, costs: dict[str, Any], saved_share: float, batch: int, length: int | None) -> dict[str, Any]:
    """Return both sides of the inequality for one replay, and what resuming would make of its speed."""
    world = World(costs)
    if length is None:
        policy = build_policy("goodput", BetaPosterior(batch, *trace.prior), 0, {})
        rounds = Rounds(PolicyDrafter(policy), world, saved_share)
    else:
        rounds = Rounds(FixedLength(), world, saved_share)
    replayed = replay(trace, rounds, world, batch, length)
    tokens, ms = sum(replayed.tokens), sum(replayed.ms)
    drafting = max(rounds.drafting, 1)
    return {
        "length": "goodput" if length is None else f"fixed {length}",
        "speedup": replayed.goodput_vs_plain,
        "worth": tokens / ms * rounds.saved_ms / drafting,
        "lost": rounds.lost_tokens / drafting,
        "change": (tokens - rounds.lost_tokens) / (ms - rounds.saved_ms) / (tokens / ms) - 1,
    }


def print_table(title: str, trace: DenseTrace, costs: Any, saved_share: float, batches: list[int]) -> None:
    print(f"\n{title}\n")
    print("| batch | drafts | speedup without | saved, in tokens | P(all accepted) | with resuming |")
    print("|---|---|---|---|---|---|")
    for batch in batches:
        for length in LENGTHS:
            figures = row(trace, costs(batch), saved_share, batch, length)
            print(
                "| {batch} | {length} | {speedup:.2f}x | {worth:.2f} | {lost:.2f} | {change:+.1%} |".format(
                    batch=batch, **figures
                )
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="*", metavar="TRACE", default=[str(path) for path in TRACES])
    parser.add_argument("--batch", type=lambda text: [int(b) for b in text.split(",")], default=[1, 4, 8])
    parser.add_argument("--layers", type=int, default=24, help="of the target the traces were recorded on")
    parser.add_argument("--exit-layer", type=int, default=2)
    args = parser.parse_args()
    machine = Roofline(BIG, BIG_EXIT_LAYER + 1, GPUS[GPU])
    for name, trace in load_traces(args.traces).items():
        title = f"{name}, costs measured with it (N = {args.exit_layer} of {args.layers}):"
        print_table(title, trace, lambda batch, costs=trace.costs: costs, args.exit_layer / args.layers, args.batch)

        def computed(batch: int, depth: int = trace.num_speculative_tokens) -> dict[str, Any]:
            return costs_of(machine, batch, depth)

        title = f"{name}, 8B on one {GPU} as computed (N = {BIG_EXIT_LAYER} of {BIG.layers}):"
        print_table(title, trace, computed, BIG_EXIT_LAYER / BIG.layers, args.batch)
    return 0


if __name__ == "__main__":
    sys.exit(main())
