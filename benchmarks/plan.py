"""What recorded acceptance would be worth on a GPU that is not here and with another model, and which head pays there.

    python -P benchmarks/plan.py --gpu h200 --tp 4 --layers 80 --hidden 8192 --vocab 128256 --trace TRACE

A dense trace (`eesd trace-record`) says which drafts of its head, of N of the L layers of its target and M of its own,
were right. How often a head of another target will be right is not known before it is trained; it is taken to be as
often as the recorded one at the same depth N / L. Traces of several heads are compared. Times are those of a roofline
(`roofline.py`): launches, link latencies and the engine's own work are left out unless given, so speedups are an upper
bound.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from roofline import GPUS, Roofline, Shape, costs_of

from vllm_eesd.flags import policy, positive, positive_list, thousands
from vllm_eesd.policy import POLICIES, BetaPosterior, build_policy
from vllm_eesd.simulate.peers import best_fixed
from vllm_eesd.simulate.replay import PolicyDrafter, Replay, replay
from vllm_eesd.simulate.run import load_traces
from vllm_eesd.simulate.world import World
from vllm_eesd.traces.dense import DenseTrace, DraftLayers

#: Flags of the target's sizes.
SIZES = {
    "layers": "decoder layers",
    "hidden": "width",
    "vocab": "vocabulary",
    "intermediate": "the MLP's width (default 3.5 times the width)",
    "heads": "attention heads (default: width / head-dim)",
    "kv-heads": "heads of keys and values (default 8)",
    "head-dim": "(default 128)",
}


@dataclass(frozen=True)
class Head:
    """An exit head whose acceptance was recorded, on the planned target.

    Attributes:
        trace: its acceptance.
        exit_layer, head_layers: N and M, there.
    """

    trace: DenseTrace
    exit_layer: int
    head_layers: int


def run(args: argparse.Namespace) -> int:
    """Plan, print the table and write what was asked for.

    Raises:
        ValueError: a flag or the trace is not usable; one line.
    """
    shape = shape_of(args)
    heads = [head_of(args, shape, next(iter(load_traces([path]).values())), path) for path in args.trace]
    console, rows = Console(highlight=False), []
    for batch in args.batch:
        for head in heads:
            with console.status(f"batch {batch}, N = {head.exit_layer}, M = {head.head_layers}"):
                rows.append(plan_batch(head, roofline_of(args, shape, head), batch, args))
    of = ", ".join(dict.fromkeys(head.trace.workload for head in heads))
    title = (
        f"{shape.layers} layers of {shape.hidden}, vocabulary {shape.vocab}"
        f"{f', {args.draft_vocab} of it drafted from' if args.draft_vocab else ''}, "
        f"{args.tp} x {args.gpu}, {args.dtype}, context {args.context}; steps in ms; acceptance of {of}"
    )
    console.print(table(rows, title))
    if len(heads) > 1:
        console.print(verdict(rows), soft_wrap=True)
    console.print(
        f"Published figures: {GPUS[args.gpu].source}. A roofline: launches, link latencies and the engine's own work "
        "are not in it unless given (--step-overhead-ms, --draft-, --round- and --verify-overhead-ms, --reached), so "
        "read the speedups as an upper bound. Acceptance is the trace's, whatever the target and the draft vocabulary; "
        "alone: without n-gram drafts."
    )
    if args.json:
        content = vars(args) | {"shape": asdict(shape), "machine": asdict(GPUS[args.gpu]), "rows": rows}
        Path(args.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


def head_of(args: argparse.Namespace, shape: Shape, trace: DenseTrace, path: str) -> Head:
    """Return the head that a trace was recorded with, at the flags' layers or, without, at the same depth.

    Raises:
        ValueError: there can be no such head, or neither the flags nor the trace say which.
    """
    recorded, exit_layer = trace.layers, args.exit_layer
    if exit_layer is None and recorded is None:
        raise ValueError(f"--exit-layer is missing: {path} does not say what drafted")
    if exit_layer is None:
        exit_layer = at_same_depth(recorded, shape.layers)
    head_layers = args.head_layers or (recorded.head if recorded else 1)
    if args.headless:
        head_layers = 0
    least = 0 if head_layers else 1
    if not least <= exit_layer < shape.layers:
        raise ValueError(f"--exit-layer {exit_layer} is out of range: {least} to {shape.layers - 1}")
    return Head(trace, exit_layer, head_layers)


def at_same_depth(recorded: DraftLayers, layers: int) -> int:
    """Return the exit layer that lies as deep in a target of so many layers as the recorded one in its own."""
    return max(min(recorded.exit, 1), round(recorded.exit * layers / recorded.target))


def shape_of(args: argparse.Namespace) -> Shape:
    """Return the target's shape from `--model`, with the flags that were given on top.

    Raises:
        ValueError: neither `--model` nor all of --layers, --hidden and --vocab.
    """
    given = {name: getattr(args, name) for name in Shape.__dataclass_fields__}
    if args.model is not None:
        return replace(Shape.read(args.model), **{name: size for name, size in given.items() if size is not None})
    missing = [name for name in ("layers", "hidden", "vocab") if given[name] is None]
    if missing:
        raise ValueError(f"--{missing[0]} is missing; allowed: --layers, --hidden and --vocab, or --model DIR")
    return Shape.of(**given)


def roofline_of(args: argparse.Namespace, shape: Shape, head: Head) -> Roofline:
    """Return the machine the flags describe.

    Raises:
        ValueError: it does not exist, or has no such arithmetic.
    """
    if args.gpu not in GPUS:
        raise ValueError(f"--gpu {args.gpu!r} is not known; allowed: {', '.join(GPUS)}")
    gpu = GPUS[args.gpu]
    if args.dtype not in gpu.tflops:
        raise ValueError(f"--dtype {args.dtype!r} is not what {args.gpu} computes in; allowed: {', '.join(gpu.tflops)}")
    if not 0 < args.reached <= 1:
        raise ValueError(f"--reached {args.reached} is not allowed: above 0, at most 1")
    if args.draft_vocab is not None and args.draft_vocab > shape.vocab:
        raise ValueError(f"--draft-vocab {args.draft_vocab} is more than the vocabulary, {shape.vocab}")
    overheads = (args.step_overhead_ms, args.draft_overhead_ms, args.round_overhead_ms, args.verify_overhead_ms)
    if min(*overheads, args.aux_layers) < 0:
        raise ValueError("overheads and --aux-layers are not allowed to be below 0")
    machine = args.tp, args.dtype, args.context, args.reached
    fill_states = 2 + args.aux_layers if head.head_layers else 0
    return Roofline(shape, head.exit_layer, head.head_layers, gpu, *machine, *overheads, args.draft_vocab, fill_states)


def plan_batch(head: Head, machine: Roofline, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """Replay a head's trace at that machine's costs; a trace of fewer requests than the batch has is repeated.

    Returns:
        exit_layer, head_layers: the head's.
        batch: requests that decode at once.
        plain_ms, draft_step_ms: times of plain vLLM's step and of a draft step of that batch.
        verify_ms: a step in which every request verifies the trace's longest draft.
        best_fixed, best_fixed_speedup: the best fixed draft length in hindsight.
        speedup: of the policy, over plain decoding.
        head_speedup: of it without n-gram drafts, which copy the trace's texts; of most policies the same.
        draft_length: mean of the policy.
        memory_gb: what one device holds.
        fits: whether it has that.
    """
    trace = head.trace
    costs = costs_of(machine, batch, trace.num_speculative_tokens)
    trace = replace(trace, requests=trace.requests * ceil(batch / len(trace.requests)))

    def world() -> World:
        return World(costs, seed=args.seed)

    best, fixed = best_fixed(trace, world, batch)

    def replayed(**policy_args: bool) -> Replay:
        policy = build_policy(args.policy, BetaPosterior(batch, *trace.prior), args.seed, policy_args)
        return replay(trace, PolicyDrafter(policy), world(), batch)

    chosen = replayed()
    alone = replayed(ngram=False) if POLICIES[args.policy].takes_ngrams else chosen
    true, memory, plain_ms = world(), machine.memory_gb(batch), machine.plain_ms(batch)
    # What a replay calls plain is EESD's own step without drafts, in which the head's KV is filled.
    of_plain = plain_ms / true.plain_ms(batch)
    return {
        "exit_layer": head.exit_layer,
        "head_layers": head.head_layers,
        "batch": batch,
        "plain_ms": plain_ms,
        "draft_step_ms": true.draft_step_ms(batch),
        "verify_ms": true.verify_ms(batch, batch * trace.num_speculative_tokens),
        "best_fixed": best,
        "best_fixed_speedup": of_plain * fixed.goodput_vs_plain,
        "speedup": of_plain * chosen.goodput_vs_plain,
        "head_speedup": of_plain * alone.goodput_vs_plain,
        "draft_length": chosen.mean_draft_length,
        "memory_gb": memory,
        "fits": memory <= machine.gpu.memory_gb,
    }


def verdict(rows: list[dict[str, Any]]) -> str:
    """Return which head to train: at each batch size the fastest that copies nothing."""
    best: dict[int, dict[str, Any]] = {}
    for row in rows:
        best[row["batch"]] = max(best.get(row["batch"], row), row, key=lambda one: one["head_speedup"])
    chosen: dict[tuple[int, int], list[str]] = {}
    for batch, row in best.items():
        at = f"batch {batch} ({row['head_speedup']:.2f}x)"
        chosen.setdefault((row["exit_layer"], row["head_layers"]), []).append(at)
    words = [f"--exit-layer {n} --head-layers {m} for {', '.join(batches)}" for (n, m), batches in chosen.items()]
    return "train: " + "; ".join(words)


def table(rows: list[dict[str, Any]], title: str) -> Table:
    result = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    columns = {
        "batch": "{batch}",
        "N + M": "{exit_layer} + {head_layers}",
        "plain": "{plain_ms:.2f}",
        "draft": "{draft_step_ms:.3f}",
        "verify": "{verify_ms:.2f}",
        "best K": "{best_fixed}: {best_fixed_speedup:.2f}x",
        "alone": "{head_speedup:.2f}x",
        "policy": "{speedup:.2f}x",
        "drafted": "{draft_length:.2f}",
    }
    for heading in columns:
        result.add_column(heading, justify="right")
    for row in rows:
        cells = [pattern.format(**row) for pattern in columns.values()]
        result.add_row(cells[0] + ("" if row["fits"] else " *"), *cells[1:])
    if not all(row["fits"] for row in rows):
        result.caption = "* more than the devices' memory holds"
    return result


def read_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--trace", required=True, nargs="+", metavar="TRACE", help="dense traces, one for each head")
    add("--gpu", required=True, metavar="G", help=", ".join(GPUS))
    add("--exit-layer", type=int, metavar="N", help="target layers a draft runs (default: as deep as the trace's)")
    add("--head-layers", type=positive, metavar="M", help="the exit head's (default: the trace's, or 1)")
    add("--aux-layers", type=int, default=3, metavar="A", help="from which its KV is filled too (default 3)")
    add("--draft-vocab", type=thousands, metavar="V", help="rows of the LM head a draft multiplies")
    add("--headless", action="store_true", help="without an exit layer after them")
    add("--model", metavar="DIR", help="read the target's sizes from its config.json")
    for size, text in SIZES.items():
        add(f"--{size}", type=positive, metavar="n", help=text)
    add("--tp", type=positive, default=1, metavar="T", help="devices, tensor parallel (default 1)")
    add("--dtype", default="bfloat16", help="of the weights: bfloat16 or fp8 (default bfloat16)")
    add("--context", type=positive, default=1024, metavar="C", help="tokens in the cache (default 1024)")
    add("--batch", type=positive_list, default=[1, 2, 4, 8, 16, 32, 64], help="(default 1,2,...,64)")
    policy(parser)
    add("--reached", type=float, default=1.0, help="share of published peaks (default 1)")
    for overhead in ("step", "draft", "round", "verify"):
        add(f"--{overhead}-overhead-ms", type=float, default=0.0, metavar="MS", help="added (default 0)")
    add("--seed", type=int, default=0, help="of the policy and of timing noise (default 0)")
    add("--json", metavar="OUT", help="write what was planned")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Plan; what the user got wrong is one line."""
    try:
        return run(read_arguments(argv))
    except (ValueError, OSError) as error:
        print(f"plan: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
