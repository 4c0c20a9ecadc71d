"""What ends drafting on a device whose host runs ahead of it: rules compared in the replay, before one was built.

    python -P benchmarks/compare_draft_rules.py [--shapes 8B] [--batches 1,32] [--json FILE]

Costs are a roofline of the published figures of an H200 (`vllm_eesd/simulate/roofline.py`), the host's are estimates
(`HostTimes`; not yet measured on a GPU); acceptance is that of the recorded traces. `goodput` decides, with drafts of
at most 8 tokens. Each row is emitted tokens per time relative to plain decoding on the same device, the mean of a few
seeds, and the least of them where it is 5% less. The rules:

    waits        after each draft step but the first the host waits for the confidence of the step before the one that
                 runs, and decides; the step launched last is in vain, and not charged. 45 operators prepare a round.
    waits, few   the same with as few launches as the other rules have.
    charged      the same; the policy pays for the step in vain, and every token there is that is worth verifying is.
    ahead        the round is decided before its first draft step: what Model Runner V2 does (`DeviceDrafter`).
    ahead, trim  the same; as many tokens are verified, but which ones this round's confidences say, on the device.
    conditional  whether one more step runs is decided on the device (conditional graph nodes), as V1 decides it.
    n-grams      as ahead, with n-gram drafts, which the other rules are replayed without.

Under every rule token s + 1 of a row depends on the confidences of its tokens 1..s at most.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path

import numpy as np

from vllm_eesd.policy import BetaPosterior, build_policy
from vllm_eesd.policy.goodput import Goodput
from vllm_eesd.round.draft import DraftRound
from vllm_eesd.simulate.device import Device, DeviceDrafter, HostTimes
from vllm_eesd.simulate.replay import Batch, replay
from vllm_eesd.simulate.roofline import GPUS, Roofline, Shape, costs_of
from vllm_eesd.simulate.run import load_traces
from vllm_eesd.traces.dense import DenseTrace

TRACES = sorted((Path(__file__).resolve().parents[1] / "models" / "traces").glob("*.jsonl.gz"))
#: Llama 3's shapes, the exit layer, GPUs; the exit head has one layer.
SHAPES = {
    "1B": (Shape(16, 2048, 128256, 8192, 32, 8, 64), 2, 1),
    "8B": (Shape(32, 4096, 128256, 14336, 32, 8, 128), 2, 1),
    "70B": (Shape(80, 8192, 128256, 28672, 64, 8, 128), 4, 4),
}
CONTEXT, REACHED = 1024, 0.8
#: What some 45 operators outside any graph cost a round, and 12 after each draft step: estimates.
MANY_LAUNCHES = HostTimes(inputs_host_ms=0.28, inputs_device_ms=0.1, launch_ms=0.06, tail_ms=0.022)
#: Of the device for one conditional graph node, ms.
CONDITION_MS = 0.008


class Waits(DeviceDrafter):
    """The host decides step by step, one step after it launches; a draft step costs what the rows that draft do."""

    def __init__(self, policy: Goodput) -> None:
        super().__init__(policy)
        policy.costs.all_rows_draft = False

    def _round_of(self, batch: Batch, world: Device) -> tuple[np.ndarray, int]:
        self.session.round = round_ = DraftRound(self.policy, batch.slots, batch.limits)
        ends: list[float] = []
        while len(ends) < batch.limits.max(initial=0) and (round_.limits[round_.rows] > len(ends)).any():
            if not ends:
                self._prepare(world, len(batch.slots))
            ends.append(world.launch(world.host.launch_ms, world.draft_ms(len(batch.slots))))
            if len(ends) > 1:
                world.wait(ends[-2])
                round_.tell(batch.confidences[round_.rows, len(ends) - 2])
        return self._submitted(batch, round_, len(ends)), len(ends)

    def _submitted(self, batch: Batch, round_: DraftRound, num_steps: int) -> np.ndarray:
        return round_.lengths


class Charged(Waits):
    """The policy pays for the step in vain; tokens that exist anyway are submitted where verifying them pays."""

    def __init__(self, policy: Goodput) -> None:
        super().__init__(policy)
        policy.costs.all_rows_draft = True
        extend = policy._rows_to_extend

        def rows_to_extend(slots: np.ndarray, num_drafted: int) -> np.ndarray:
            times = policy._times
            if num_drafted == 0:  # one step more than drafted tokens
                policy._times = times._replace(verify=times.verify + times.draft[-1] * (times.verify > times.verify[0]))
            rows = extend(slots, num_drafted)
            policy._times = times
            return rows

        policy._rows_to_extend = rows_to_extend

    def _submitted(self, batch: Batch, round_: DraftRound, num_steps: int) -> np.ndarray:
        verify, num_reqs = self.policy._times.verify, len(batch.slots)
        least = self.policy._rate * (verify[2 * num_reqs] - verify[num_reqs]) / num_reqs
        lengths = round_.lengths.copy()
        scores = chances_before(batch.confidences, max(num_steps, 1))
        for step in range(num_steps):
            more = (lengths == step) & (batch.limits > step) & (scores[:, step] > least)
            lengths[more] = step + 1
        return lengths


class Trims(DeviceDrafter):
    """Tokens are submitted by this round's confidences, as many as were decided on; rows without a draft have none."""

    def _round_of(self, batch: Batch, world: Device) -> tuple[np.ndarray, int]:
        lengths, num_steps = super()._round_of(batch, world)
        if not num_steps:
            return lengths, 0
        scores = chances_before(batch.confidences, num_steps)
        scores[np.arange(num_steps) >= np.where(lengths > 0, batch.limits, 0)[:, None]] = -1.0
        best = np.argsort(-scores, axis=None, kind="stable")[: lengths.sum()]
        return np.bincount(best // num_steps, minlength=len(lengths)), num_steps


class Conditional(DeviceDrafter):
    """The device decides as V1's host does, after every step."""

    def _round_of(self, batch: Batch, world: Device) -> tuple[np.ndarray, int]:
        self.session.round = round_ = DraftRound(self.policy, batch.slots, batch.limits)
        num_steps = 0
        while len(round_.rows):
            if not num_steps:
                self._prepare(world, len(batch.slots))
            num_steps += 1
            world.launch(0.0, world.draft_ms(len(batch.slots)) + CONDITION_MS)
            round_.tell(batch.confidences[round_.rows, num_steps - 1])
        return round_.lengths, num_steps


def chances_before(confidences: np.ndarray, num_steps: int) -> np.ndarray:
    """Return the product of the confidences before each token, [num_rows, num_steps] float64; 1 for the first."""
    products = np.cumprod(np.nan_to_num(confidences[:, : num_steps - 1]), axis=1, dtype=np.float64)
    return np.concatenate([np.ones((len(confidences), 1)), products], axis=1)


RULES = {
    "waits": (Waits, MANY_LAUNCHES),
    "waits, few": (Waits, HostTimes()),
    "charged": (Charged, HostTimes()),
    "ahead": (DeviceDrafter, HostTimes()),
    "ahead, trim": (Trims, HostTimes()),
    "conditional": (Conditional, HostTimes()),
    "n-grams": (DeviceDrafter, HostTimes()),
}
#: Model Runner V2's longest draft, unless told otherwise.
LONGEST = 8


@functools.cache
def load(path: Path) -> DenseTrace:
    """Return a recorded trace with drafts of LONGEST tokens at most."""
    (trace,) = load_traces([str(path)]).values()
    requests = [
        replace(request, matches=np.minimum(request.matches, LONGEST), confidences=request.confidences[:, :LONGEST])
        for request in trace.requests
    ]
    return replace(trace, requests=requests, num_speculative_tokens=min(trace.num_speculative_tokens, LONGEST))


def goodput_by_rule(
    shape: str, batch: int, path: Path, host_scale: float, seed: int, rules: Sequence[str] = tuple(RULES)
) -> dict[str, float]:
    """Return tokens per time relative to plain decoding, by rule."""
    trace = load(path)
    sizes, exit_layer, tp = SHAPES[shape]
    machine = Roofline(sizes, exit_layer, 1, GPUS["h200"], tp, "bfloat16", CONTEXT, REACHED)
    costs = costs_of(machine, batch, trace.num_speculative_tokens)
    trace = replace(trace, requests=trace.requests * ceil(2 * batch / len(trace.requests)))
    goodputs = {}
    for name in rules:
        rule, host = RULES[name]
        scaled = replace(host, step_ms=host.step_ms * host_scale, request_ms=host.request_ms * host_scale)
        policy = build_policy("goodput", BetaPosterior(batch, *trace.prior), seed, {"ngram": name == "n-grams"})
        world = Device(costs, scaled, seed)
        # As an engine's policy, which starts from steps timed before any request was there (`host/cost_profile.py`).
        sizes_timed = [batch * (1 + drafts) for drafts in (0, 1, 3, LONGEST)]
        forwards = [(size, world.verify_ms(batch, size - batch)) for size in sizes_timed]
        policy.costs.start_from(forwards, [(batch, world.draft_ms(batch))])
        result = replay(trace, rule(policy), world, batch)
        goodputs[name] = round(result.goodput_vs_plain, 3)
    return goodputs


def cell(goodputs: list[float]) -> str:
    """Return the mean of the seeds' goodputs, and the least if it is far from it."""
    mean, least = float(np.mean(goodputs)), min(goodputs)
    return f"{mean:.2f}" + (f" ({least:.2f})" if least < 0.95 * mean else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--batches", default="1,8,32,64")
    parser.add_argument("--host-scale", type=float, default=1.0, help="factor on the host's time for a step")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    print("| shape | batch | trace | " + " | ".join(RULES) + " |")
    print("| --- | ---: | --- |" + " ---: |" * len(RULES))
    for shape in args.shapes.split(","):
        for batch in map(int, args.batches.split(",")):
            for path in TRACES:
                name = path.name.split(".")[0]
                of_seeds = [goodput_by_rule(shape, batch, path, args.host_scale, seed) for seed in range(args.seeds)]
                found = {rule: [goodputs[rule] for goodputs in of_seeds] for rule in RULES}
                rows.append({"shape": shape, "batch": batch, "trace": name, "host_scale": args.host_scale} | found)
                cells = " | ".join(cell(found[rule]) for rule in RULES)
                print(f"| {shape} | {batch} | {name.replace('_', ' ')} | {cells} |", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
