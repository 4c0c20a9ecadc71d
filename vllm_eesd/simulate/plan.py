"""`eesd plan`: what a recorded trace's acceptance would be worth on another machine and with another model."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path

from rich.console import Console
from rich.table import Table

from vllm_eesd.policy import BetaPosterior, build_policy
from vllm_eesd.simulate.peers import best_fixed
from vllm_eesd.simulate.replay import PolicyDrafter, replay
from vllm_eesd.simulate.roofline import GPUS, Overheads, Roofline, Shape, costs_of
from vllm_eesd.simulate.run import load_traces
from vllm_eesd.simulate.world import World
from vllm_eesd.traces.dense import DenseTrace


@dataclass(frozen=True)
class Row:
    """One batch size.

    Attributes:
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

    batch: int
    plain_ms: float
    draft_step_ms: float
    verify_ms: float
    plain_tokens_per_s: float
    best_fixed: int
    best_fixed_speedup: float
    speedup: float
    draft_length: float
    memory_gb: float
    fits: bool


def run(args: argparse.Namespace) -> int:
    """Plan, print the table and write what was asked for.

    Raises:
        ValueError: a flag or the trace is not usable; one line.
    """
    shape = shape_of(args)
    if not 0 < args.exit_layer < shape.layers:
        raise ValueError(f"--exit-layer {args.exit_layer} is out of range: 1 to {shape.layers - 1}")
    traces = load_traces([args.trace])
    trace = next(iter(traces.values()))
    console = Console(highlight=False)
    draft_layers = args.exit_layer + (0 if args.headless else 1)
    machine, rows = roofline_of(args, shape, draft_layers), []
    for batch in args.batch:
        with console.status(f"batch {batch}"):
            rows.append(plan_batch(trace, machine, batch, args))
    console.print(table(rows, title(args, shape, trace)))
    console.print(
        f"Published figures: {machine.gpu.source}. A roofline: launches, link latencies and the engine's own work are "
        "not in it unless given (--step-overhead-ms, --draft-, --round- and --verify-overhead-ms, --reached), so "
        "read the speedups as an upper bound."
    )
    if args.json:
        notes = {"gpu": args.gpu, **asdict(machine.gpu), "tp": args.tp, "dtype": args.dtype}
        content = {"shape": asdict(shape), "draft_layers": draft_layers, "context": args.context, "machine": notes}
        content |= {"trace": args.trace, "policy": args.policy, "rows": [asdict(row) for row in rows]}
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


def roofline_of(args: argparse.Namespace, shape: Shape, draft_layers: int) -> Roofline:
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
    given = (args.step_overhead_ms, args.draft_overhead_ms, args.round_overhead_ms, args.verify_overhead_ms)
    overheads = Overheads(*given)
    if min(asdict(overheads).values()) < 0:
        raise ValueError("overheads are not allowed to be below 0")
    return Roofline(shape, draft_layers, gpu, args.tp, args.dtype, args.context, args.reached, overheads)


def plan_batch(trace: DenseTrace, machine: Roofline, batch: int, args: argparse.Namespace) -> Row:
    """Replay the trace at that machine's costs; a trace of fewer requests than the batch has is repeated."""
    costs = costs_of(machine, batch, trace.num_speculative_tokens)
    copies = ceil(batch / len(trace.requests))
    trace = replace(trace, requests=trace.requests * copies)

    def world() -> World:
        return World(costs, seed=args.seed)

    depth = trace.num_speculative_tokens
    best, fixed = best_fixed(trace, world, batch)
    policy = build_policy(args.policy, BetaPosterior(batch, *trace.prior), args.seed, {})
    replayed = replay(trace, PolicyDrafter(policy), world(), batch)
    true, memory = world(), machine.memory_gb(batch)
    return Row(
        batch=batch,
        plain_ms=true.plain_ms(batch),
        draft_step_ms=true.draft_step_ms(batch),
        verify_ms=true.verify_ms(batch, batch * depth),
        plain_tokens_per_s=1e3 * batch / true.plain_ms(batch),
        best_fixed=best,
        best_fixed_speedup=fixed.goodput_vs_plain,
        speedup=replayed.goodput_vs_plain,
        draft_length=replayed.mean_draft_length,
        memory_gb=memory,
        fits=memory <= machine.gpu.memory_gb,
    )


def title(args: argparse.Namespace, shape: Shape, trace: DenseTrace) -> str:
    where = f"{args.tp} x {args.gpu}, {args.dtype}"
    return (
        f"{shape.layers} layers of {shape.hidden}, vocabulary {shape.vocab}, exit layer {args.exit_layer}, {where}, "
        f"context {args.context}; acceptance of {trace.workload}"
    )


def table(rows: list[Row], title: str) -> Table:
    result = Table(title=title, title_justify="left")
    times = ("plain ms", "draft step ms", "verify K ms")
    for heading in ("batch", *times, "plain tok/s", "best fixed", "policy", "drafted"):
        result.add_column(heading, justify="right")
    for row in rows:
        result.add_row(
            str(row.batch) + ("" if row.fits else " *"),
            f"{row.plain_ms:.2f}",
            f"{row.draft_step_ms:.3f}",
            f"{row.verify_ms:.2f}",
            f"{row.plain_tokens_per_s:.0f}",
            f"{row.best_fixed_speedup:.2f}x (K={row.best_fixed})",
            f"{row.speedup:.2f}x",
            f"{row.draft_length:.2f}",
        )
    if not all(row.fits for row in rows):
        result.caption = "* more than the devices' memory holds"
    return result
