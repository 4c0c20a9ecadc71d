"""`eesd plan`: what a recorded trace's acceptance would be worth on another machine and with another model."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from math import ceil
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_eesd.policy import BetaPosterior, build_policy
from vllm_eesd.simulate.peers import best_fixed
from vllm_eesd.simulate.replay import PolicyDrafter, replay
from vllm_eesd.simulate.roofline import GPUS, Roofline, Shape, costs_of
from vllm_eesd.simulate.run import load_traces
from vllm_eesd.simulate.world import World
from vllm_eesd.traces.dense import DenseTrace


def run(args: argparse.Namespace) -> int:
    """Plan, print the table and write what was asked for.

    Raises:
        ValueError: a flag or the trace is not usable; one line.
    """
    shape = shape_of(args)
    head_layers = 0 if args.headless else args.head_layers
    least = 0 if head_layers else 1
    if not least <= args.exit_layer < shape.layers:
        raise ValueError(f"--exit-layer {args.exit_layer} is out of range: {least} to {shape.layers - 1}")
    (trace,) = load_traces([args.trace]).values()
    console = Console(highlight=False)
    machine, rows = roofline_of(args, shape, head_layers), []
    for batch in args.batch:
        with console.status(f"batch {batch}"):
            rows.append(plan_batch(trace, machine, batch, args))
    title = (
        f"{shape.layers} layers of {shape.hidden}, vocabulary {shape.vocab}, exit layer {args.exit_layer}, "
        f"{head_layers or 'no'} layer{'s' * (head_layers != 1)} behind it, "
        f"{args.tp} x {args.gpu}, {args.dtype}, context {args.context}; acceptance of {trace.workload}"
    )
    console.print(table(rows, title))
    console.print(
        f"Published figures: {machine.gpu.source}. A roofline: launches, link latencies and the engine's own work are "
        "not in it unless given (--step-overhead-ms, --draft-, --round- and --verify-overhead-ms, --reached), so "
        "read the speedups as an upper bound."
    )
    if args.json:
        notes = {"gpu": args.gpu, **asdict(machine.gpu), "tp": args.tp, "dtype": args.dtype}
        content = {"shape": asdict(shape), "exit_layer": args.exit_layer, "head_layers": head_layers}
        content |= {"context": args.context, "machine": notes}
        content |= {"trace": args.trace, "policy": args.policy, "rows": rows}
        Path(args.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


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


def roofline_of(args: argparse.Namespace, shape: Shape, head_layers: int) -> Roofline:
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
    overheads = (args.step_overhead_ms, args.draft_overhead_ms, args.round_overhead_ms, args.verify_overhead_ms)
    if min(overheads) < 0:
        raise ValueError("overheads are not allowed to be below 0")
    layers = args.exit_layer, head_layers
    return Roofline(shape, *layers, gpu, args.tp, args.dtype, args.context, args.reached, *overheads)


def plan_batch(trace: DenseTrace, machine: Roofline, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """Replay the trace at that machine's costs; a trace of fewer requests than the batch has is repeated.

    Returns:
        batch: requests that decode at once.
        plain_ms, draft_step_ms: times of a plain step and of a draft step of that batch.
        verify_ms: a step in which every request verifies the trace's longest draft.
        plain_tokens_per_s: of the whole batch.
        best_fixed, best_fixed_speedup: the best fixed draft length in hindsight.
        speedup: of the policy, over plain decoding.
        draft_length: mean of that policy.
        memory_gb: what one device holds.
        fits: whether it has that.
    """
    costs = costs_of(machine, batch, trace.num_speculative_tokens)
    trace = replace(trace, requests=trace.requests * ceil(batch / len(trace.requests)))

    def world() -> World:
        return World(costs, seed=args.seed)

    best, fixed = best_fixed(trace, world, batch)
    policy = build_policy(args.policy, BetaPosterior(batch, *trace.prior), args.seed, {})
    replayed = replay(trace, PolicyDrafter(policy), world(), batch)
    true, memory = world(), machine.memory_gb(batch)
    return {
        "batch": batch,
        "plain_ms": true.plain_ms(batch),
        "draft_step_ms": true.draft_step_ms(batch),
        "verify_ms": true.verify_ms(batch, batch * trace.num_speculative_tokens),
        "plain_tokens_per_s": 1e3 * batch / true.plain_ms(batch),
        "best_fixed": best,
        "best_fixed_speedup": fixed.goodput_vs_plain,
        "speedup": replayed.goodput_vs_plain,
        "draft_length": replayed.mean_draft_length,
        "memory_gb": memory,
        "fits": memory <= machine.gpu.memory_gb,
    }


def table(rows: list[dict[str, Any]], title: str) -> Table:
    result = Table(title=title, title_justify="left")
    columns = {
        "batch": "{batch}",
        "plain ms": "{plain_ms:.2f}",
        "draft step ms": "{draft_step_ms:.3f}",
        "verify K ms": "{verify_ms:.2f}",
        "plain tok/s": "{plain_tokens_per_s:.0f}",
        "best fixed": "{best_fixed_speedup:.2f}x (K={best_fixed})",
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
