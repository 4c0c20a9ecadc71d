"""`eesd simulate`: every policy on the same recorded acceptance."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

from rich.console import Console
from rich.table import Table

from vllm_eesd.policy import POLICIES, BetaPosterior, build_policy
from vllm_eesd.simulate.peers import best_adaptive, best_fixed, oracle
from vllm_eesd.simulate.replay import PolicyDrafter, PolicyReplay, replay
from vllm_eesd.simulate.world import World
from vllm_eesd.traces.dense import DenseTrace
from vllm_eesd.traces.read import read_dense

#: What policies are compared with, in the table's order.
REFERENCES = ("oracle", "best_fixed", "vllm_adaptive")
#: What the name of a policy without its n-gram drafts ends with; replayed beside it where a trace holds texts.
HEAD_ALONE = "-head"
MIXED = "mixed"


def run(args: Namespace) -> int:
    """Replay, print the table and write what was asked for."""
    unknown = [name for name in args.policies or () if name not in POLICIES]
    if unknown:
        raise ValueError(f"--policies: {unknown[0]!r} is not allowed, choose from {', '.join(POLICIES)}")
    scales = parse_cost_scale(args.cost_scale)
    traces = load_traces(args.traces)
    console = Console()
    outcomes = []
    for name, trace in traces.items():
        with console.status(f"replaying {name}"):
            outcomes += simulate(name, trace, args.policies or list(POLICIES), args.batch, args.seed, **scales)
        console.print(table(name, trace, [o for o in outcomes if o.trace == name], args.batch))
    if args.json:
        rows = [outcome.row() | {"batch": args.batch} | scales for outcome in outcomes]
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        from vllm_eesd.simulate.plots import plot

        plot(args.plot, outcomes)
    return 0


def parse_cost_scale(text: str | None) -> dict[str, float]:
    """Return the factors of "draft=F,verify=F" by the names `World` has for them.

    Raises:
        ValueError: another name, or a factor that is not positive.
    """
    scales = {"draft_scale": 1.0, "verify_scale": 1.0}
    for part in text.split(",") if text else ():
        name, _, factor = part.partition("=")
        try:
            scale = float(factor)
        except ValueError:
            scale = 0.0
        if f"{name.strip()}_scale" not in scales or not 0 < scale < float("inf"):
            raise ValueError(f"--cost-scale: {part!r} is not allowed, must be draft=F or verify=F with F above 0")
        scales[f"{name.strip()}_scale"] = scale
    return scales


def load_traces(paths: list[str]) -> dict[str, DenseTrace]:
    """Return the traces by file name, and if there are several, one of all their requests in turn."""
    traces: dict[str, DenseTrace] = {}
    for path in paths:
        name = Path(path).name.removesuffix(".gz").removesuffix(".jsonl")
        if name in traces or name == MIXED:
            raise ValueError(f"TRACE: two traces would be called {name!r}, rename {path}")
        traces[name] = read_dense(path)
        if not any(len(request.matches) for request in traces[name].requests):
            raise ValueError(f"TRACE: {path} holds no emitted position")
    lengths = {trace.num_speculative_tokens for trace in traces.values()}
    if len(traces) > 1:
        if len(lengths) > 1:
            raise ValueError(f"TRACE: num_speculative_tokens differs ({sorted(lengths)}), must be one for all traces")
        traces[MIXED] = mix(list(traces.values()))
    return traces


def mix(traces: list[DenseTrace]) -> DenseTrace:
    """Return one trace with the first request of each, then the second of each, and so on; costs of the first trace."""
    turns = zip_longest(*(trace.requests for trace in traces))
    return replace(traces[0], workload=MIXED, requests=[r for turn in turns for r in turn if r is not None])


def simulate(
    name: str,
    trace: DenseTrace,
    policies: list[str],
    batch: int = 1,
    seed: int = 0,
    draft_scale: float = 1.0,
    verify_scale: float = 1.0,
) -> list[PolicyReplay]:
    """Return the replays of one trace: `REFERENCES` first, then the policies, each with fresh state.

    Args:
        name: the trace's, for the rows.
        policies: names in `POLICIES`.
        batch: requests that decode at once.
        seed: of policies and of the noise in their measurements.
        draft_scale, verify_scale: see `World`.
    """

    def world() -> World:
        return World(trace.costs, draft_scale, verify_scale, seed)

    length, fixed = best_fixed(trace, world, batch)
    longest, adaptive = best_adaptive(trace, world, batch)
    outcomes = [
        PolicyReplay(name, "oracle", oracle(trace, world(), batch)),
        PolicyReplay(name, "best_fixed", fixed, length),
        PolicyReplay(name, "vllm_adaptive", adaptive, longest),
    ]
    with_texts = all(request.prompt is not None for request in trace.requests)
    for policy_name in policies:
        variants: dict[str, dict] = {policy_name: {}}
        if POLICIES[policy_name].takes_ngrams and with_texts:
            variants[policy_name + HEAD_ALONE] = {"ngram": False}
        for label, policy_args in variants.items():
            policy = build_policy(policy_name, BetaPosterior(batch, *trace.prior), seed, policy_args)
            outcomes.append(PolicyReplay(name, label, replay(trace, PolicyDrafter(policy), world(), batch)))
    return outcomes


def table(name: str, trace: DenseTrace, outcomes: list[PolicyReplay], batch: int) -> Table:
    """Return the outcomes of one trace as a table, the fastest policy first below the references."""
    positions = sum(len(request.matches) for request in trace.requests)
    title = f"{name}: {len(trace.requests)} requests, {positions} tokens, batch {batch}"
    result = Table(title=title, title_justify="left")
    result.add_column("policy")
    for heading in ("goodput vs plain", "vs best fixed", "mean draft length"):
        result.add_column(heading, justify="right")
    best = next(o.replay.goodput_vs_plain for o in outcomes if o.policy == "best_fixed")
    references = [o for o in outcomes if o.policy in REFERENCES]
    policies = sorted((o for o in outcomes if o not in references), key=lambda o: -o.replay.goodput_vs_plain)
    for outcome in references + policies:
        goodput = outcome.replay.goodput_vs_plain
        label = outcome.policy if outcome.length is None else f"{outcome.policy} ({outcome.length})"
        result.add_row(label, f"{goodput:.3f}", f"{goodput / best:.3f}", f"{outcome.replay.mean_draft_length:.2f}")
        if outcome is references[-1]:
            result.add_section()
    return result
