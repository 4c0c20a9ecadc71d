"""`eesd plan`: what recorded acceptance would be worth on another machine and with another model, and which head pays.

A trace says what its head, of N of the L layers of its target and M of its own, was right about. Nobody knows what a
head of another target will be right about before it is trained; here it is what the recorded one was, at the same depth
N / L.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from vllm_eesd.policy import POLICIES, BetaPosterior, build_policy
from vllm_eesd.simulate.peers import best_fixed
from vllm_eesd.simulate.replay import PolicyDrafter, Replay, replay
from vllm_eesd.simulate.roofline import GPUS, Roofline, Shape, costs_of
from vllm_eesd.simulate.run import load_traces
from vllm_eesd.simulate.world import World
from vllm_eesd.traces.dense import DenseTrace, DraftLayers

#: Of the vocabulary, what `plan` compares with where none is given: 8k of 49k tokens.
SUPPOSED_SHARE = 6
#: Rows of a draft vocabulary come in so many.
ROWS_MULTIPLE = 64


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

    def __str__(self) -> str:
        return (
            f"N = {self.exit_layer}, M = {self.head_layers}" if self.head_layers else f"N = {self.exit_layer}, headless"
        )


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
            with console.status(f"batch {batch}, {head}"):
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
    compared = [line for head in heads if (line := lm_head_line(args, shape, head))]
    for line in compared:
        console.print(line, soft_wrap=True)
    console.print(
        f"Published figures: {GPUS[args.gpu].source}. A roofline: launches, link latencies and the engine's own work "
        "are not in it unless given (--step-overhead-ms, --draft-, --round- and --verify-overhead-ms, --reached), so "
        "read the speedups as an upper bound. Acceptance is the trace's, whatever the target and the draft vocabulary; "
        "alone: without n-gram drafts."
    )
    if args.json:
        notes = {"gpu": args.gpu, **asdict(GPUS[args.gpu]), "tp": args.tp, "dtype": args.dtype}
        content = {"shape": asdict(shape), "draft_vocab": args.draft_vocab, "context": args.context, "machine": notes}
        content |= {"traces": args.trace, "policy": args.policy, "rows": rows}
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
    if min(overheads) < 0:
        raise ValueError("overheads are not allowed to be below 0")
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
        plain_tokens_per_s: of the whole batch.
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
        "plain_tokens_per_s": 1e3 * batch / plain_ms,
        "best_fixed": best,
        "best_fixed_speedup": of_plain * fixed.goodput_vs_plain,
        "speedup": of_plain * chosen.goodput_vs_plain,
        "head_speedup": of_plain * alone.goodput_vs_plain,
        "draft_length": chosen.mean_draft_length,
        "memory_gb": memory,
        "fits": memory <= machine.gpu.memory_gb,
    }


def lm_head_line(args: argparse.Namespace, shape: Shape, head: Head) -> str:
    """Return what the LM head costs a draft of the first batch size, with and without a draft vocabulary.

    "" where it has fewer weights than the layers of a draft step. The vocabulary is the one given, else a sixth of the
    target's.
    """
    if shape.vocab * shape.hidden <= (head.exit_layer + head.head_layers) * shape.layer_weights:
        return ""
    batch = args.batch[0]
    size = args.draft_vocab or -(-shape.vocab // (SUPPOSED_SHARE * ROWS_MULTIPLE)) * ROWS_MULTIPLE
    machine = roofline_of(args, shape, head)
    whole, cheap = (replace(machine, draft_vocab=rows) for rows in (None, size))
    without, with_it = (plan_batch(head, one, batch, args) for one in (whole, cheap))
    share = whole.lm_head_ms(batch) / whole.draft_step_ms(batch)
    return (
        f"{head}: the LM head is {share:.0%} of a draft step: with {size} of {shape.vocab} draft tokens one takes "
        f"{cheap.draft_step_ms(batch):.3f} ms instead of {whole.draft_step_ms(batch):.3f}, and batch {batch} is at "
        f"{with_it['head_speedup']:.2f}x instead of {without['head_speedup']:.2f}x without n-gram drafts, less what "
        "tokens beyond them cost (eesd probe measures their share of the text)"
    )


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
