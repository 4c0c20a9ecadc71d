"""What `make bench` measures: the public model (`measure_public.py`) or, if asked to, the embedded one.

    python benchmarks/measure_all.py [--quick] [flags of measure_public.py]
    python benchmarks/measure_all.py --embedded | --all | --only held_out_code same_budget [--quick]

Of the embedded model: the README's table or, with --all, every one of docs/tables/results.md.

One session: all engines are started once and stay alive (about 3 GB each), as starting them is what takes longest. A
row says how it was measured, and the page shows the `eesd bench` that measures the same. What needs something that is
not here (suffix decoding, trained peers) is left out, and methods.json says why. `--quick` measures little, to see that
everything works.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import measure_public

from vllm_eesd.bench.engines import METHODS, TRAINED_PEERS, EngineSettings, encode_prompts, running_engines
from vllm_eesd.bench.latency import (
    ended_at_loops,
    latency_rows,
    latency_table,
    open_console,
    report_gate,
    reporting,
    write_json,
)
from vllm_eesd.bench.measure import Work
from vllm_eesd.bench.prompts import read_prompts
from vllm_eesd.bench.throughput import arrival_rows, arrival_table
from vllm_eesd.provenance import provenance

ROOT = Path(__file__).resolve().parents[1]
PROMPTS, RESULTS, BUILD = ROOT / "models" / "prompts", ROOT / "benchmarks" / "results", ROOT / "build" / "bench"
MODEL = "models/eesd-code-10m"
#: Prompts for each request that runs at a time: while the last ones end, fewer run, the fewer the less it matters.
WAVES = 4
#: What arrives at random, and where trained peers take part.
HELD_OUT = "held_out_code"


@dataclass(frozen=True)
class Size:
    """How much is measured of a workload.

    Attributes:
        prompts: its first so many.
        batches: requests at a time; when one ends, the next prompt begins.
        rounds: timed, after one of warming up.
        head_alone: whether EESD also runs without n-gram continuations.
        alone: at batch 1 only the first so many, because there they take longest; None: all.
        max_tokens: per prompt.
        temperature: of every request; above 0 outputs are not compared.
        up_to_loops: whether a text ends where plain's begins to repeat itself.
        dtype: in bfloat16 outputs are compared but need not be the same.
    """

    prompts: int
    batches: tuple[int, ...]
    rounds: int
    head_alone: bool = False
    alone: int | None = None
    max_tokens: int = 128
    temperature: float = 0.0
    up_to_loops: bool = False
    dtype: str = "float32"

    def prompts_at(self, batch: int) -> int:
        """Return how many prompts are measured at a batch size."""
        return self.alone if batch == 1 and self.alone is not None else min(self.prompts, WAVES * batch)


WORKLOADS = {
    HELD_OUT: Size(40, (1, 4, 8, 16), 3, head_alone=True, alone=6),
    "repetitive_code": Size(16, (1, 8), 3, alone=4),
    # Greedy, the model soon repeats itself after random tokens, which is easy to draft; so they are sampled.
    "random_tokens": Size(16, (1, 8), 3, alone=4, max_tokens=64, temperature=2.0),
    "multi_turn": Size(16, (1, 8), 3, alone=4, max_tokens=64),
    "long_context": Size(8, (1, 4), 3, alone=2, max_tokens=64),
    "edits": Size(16, (1, 8), 3, alone=4),
    "mixed": Size(24, (1, 8), 3, alone=6, max_tokens=64),
}
#: The same prompts, sampled as a completion model is used: greedy text of a small model may repeat itself.
SAMPLED, TEMPERATURE, SAMPLED_BATCHES = "_sampled", 0.8, (1, 4, 8)
WORKLOADS |= {
    name + SAMPLED: replace(
        size, temperature=TEMPERATURE, batches=tuple(batch for batch in size.batches if batch in SAMPLED_BATCHES)
    )
    for name, size in WORKLOADS.items()
    if not size.temperature
}
#: Greedy text up to its first loop.
UP_TO_LOOPS = "_up_to_loops"
WORKLOADS[HELD_OUT + UP_TO_LOOPS] = replace(WORKLOADS[HELD_OUT], batches=(1, 8), up_to_loops=True)
#: What the README shows, and meant to take less than 20 minutes on two slow cores.
SHOWN_FIRST = (HELD_OUT + UP_TO_LOOPS, HELD_OUT + SAMPLED)
#: Held-out code once more, drafted for by what was trained on equally many tokens: an exit head and the trained peers.
SAME_BUDGET, _SIZE = "same_budget", Size(16, (1, 8), 3, head_alone=True, alone=3)
OF_SAME_BUDGET = {
    SAME_BUDGET + UP_TO_LOOPS: replace(_SIZE, up_to_loops=True),
    SAME_BUDGET + SAMPLED: replace(_SIZE, temperature=TEMPERATURE),
}
#: Little of it: where a CPU does not multiply bfloat16 in hardware, an engine takes four minutes to compile.
BFLOAT16, _SIZE = "_bfloat16", Size(8, (1, 8), 3, head_alone=True, alone=2, dtype="bfloat16")
WORKLOADS |= {
    HELD_OUT + BFLOAT16: _SIZE,
    HELD_OUT + SAMPLED + BFLOAT16: replace(_SIZE, temperature=TEMPERATURE),
}
BUDGET_HEAD = f"{MODEL}/peers/exit_head"
#: Tokens a peer drafts a round: whichever serves it best counts. 3 was nowhere ahead of both by more than the spread.
PEER_LENGTHS = (2, 5)
RATES, REQUESTS, ARRIVAL_ROUNDS, SEED = (2.0, 6.0), 8, 2, 0
WATERFALL_SCRIPT = [sys.executable, str(ROOT / "benchmarks" / "waterfall.py")]
WATERFALL = ["--tokens", "64", "--rounds", "1"]
QUICK_SIZE = Size(4, (1, 2, 4), 3, head_alone=True, alone=1, max_tokens=16)
QUICK_WATERFALL = ["--tokens", "16", "--rounds", "1"]


@dataclass(frozen=True)
class Session:
    """What everything is measured with."""

    engines: dict[str, Any]
    settings: EngineSettings
    prompts: dict[str, list[list[int]]]
    results: Path
    progress: Callable[[str], None]

    def write(self, name: str, content: Any) -> None:
        write_json(self.results / name, content)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--embedded", action="store_true", help="the embedded model's tables of the README")
    text = "every workload of the embedded model, and the trained peers: an hour or two"
    chosen.add_argument("--all", action="store_true", help=text)
    known = [*WORKLOADS, SAME_BUDGET]
    chosen.add_argument("--only", nargs="+", choices=known, metavar="WORKLOAD", help="these of the embedded model")
    measure_public.add_flags(parser)
    args = parser.parse_args()
    if not (args.embedded or args.all or args.only):
        return measure_public.run_or_refuse(parser, args)
    named = known if args.all else args.only or SHOWN_FIRST
    workloads = {name: size for name, size in WORKLOADS.items() if name in named}
    if args.quick:
        workloads = quick_sizes(workloads)
    os.chdir(ROOT)
    began, console = time.monotonic(), open_console()
    provenance()  # before the first file is written: the commit is the one that was measured
    results = BUILD if args.quick else RESULTS
    if HELD_OUT in workloads:
        words = ["--json", str(results / "waterfall.json"), *(QUICK_WATERFALL if args.quick else WATERFALL)]
        # A process of its own, because there the engines run in it.
        subprocess.run([*WATERFALL_SCRIPT, *words], cwd=ROOT, check=True)
    failed = measure_all(workloads, SAME_BUDGET in named, args.quick, console)
    console.print(f"measured in {(time.monotonic() - began) / 60:.1f} minutes")
    return failed


def measure_all(workloads: dict[str, Size], same_budget: bool, quick: bool, console: Any) -> int:
    """Measure with engines that are started once; return 1 if eesd's output is not plain's somewhere.

    Args:
        workloads: with `HELD_OUT` among them, requests that arrive at random are measured too.
        same_budget: whether trained peers are measured.
    """
    settings = EngineSettings(MODEL)
    left_out = {method: reason for method in METHODS if (reason := settings.missing(method)) is not None}
    methods = [method for method in METHODS if method not in left_out and method not in ("plain", *TRAINED_PEERS)]
    in_bfloat16 = {name: size for name, size in workloads.items() if size.dtype == "bfloat16"}
    in_float32 = {name: size for name, size in workloads.items() if name not in in_bfloat16}
    failed = 0
    with ExitStack() as stack:
        progress = stack.enter_context(reporting(console))
        prompts, longest = {}, 0
        for workload, size in (workloads | ({HELD_OUT: WORKLOADS[HELD_OUT]} if same_budget else {})).items():
            texts = read_prompts(prompt_file(workload, size.prompts))
            _, prompts[workload], length = encode_prompts(MODEL, texts, size.max_tokens, progress)
            longest = max(longest, length)
        needed = ["plain"] if in_float32 or same_budget else []
        plain = stack.enter_context(running_engines(needed, settings, longest, progress))
        session = Session(plain, settings, prompts, BUILD if quick else RESULTS, progress)
        known = {method: about(settings, method, left_out) for method in METHODS}
        session.write("methods.json", known | {"exit_head": trained(settings, "exit_head")})
        if in_float32:
            with running_engines(methods, settings, longest, progress) as engines:
                whole = replace(session, engines=plain | engines)
                failed |= measure_workloads(whole, in_float32, console)
                if HELD_OUT in workloads:
                    console.print(arrival_table(throughput(whole, workloads[HELD_OUT], quick)))
        # Started when the others but plain vLLM are gone: so many would not fit into memory at once.
        if same_budget and (ROOT / BUDGET_HEAD).is_dir():
            texts = dict.fromkeys(OF_SAME_BUDGET, prompts[HELD_OUT])
            whole = replace(session, settings=replace(settings, head=BUDGET_HEAD), prompts=texts)
            failed |= measure_same_budget(
                whole, [p for p in TRAINED_PEERS if p not in left_out], longest, quick, console
            )
        if in_bfloat16:
            half = replace(settings, dtype="bfloat16")
            with running_engines(["plain", *methods], half, longest, progress) as engines:
                whole = replace(session, engines=engines, settings=half)
                failed |= measure_workloads(whole, in_bfloat16, console)
    return failed


def measure_same_budget(session: Session, peers: list[str], longest: int, quick: bool, console: Any) -> int:
    """Measure the exit head beside peers of every length; return 1 if eesd's output is not plain's.

    Peers of one length are started at a time, and paired with plain vLLM and the exit head in a run of their own. The
    rows of these two are those of the first.
    """
    sizes, failed = quick_sizes(OF_SAME_BUDGET) if quick else OF_SAME_BUDGET, 0
    found: dict[str, list[dict[str, Any]]] = {workload: [] for workload in sizes}
    with running_engines(["eesd-head"], session.settings, longest, session.progress) as ours:
        for length in PEER_LENGTHS[:1] if quick else PEER_LENGTHS:
            named = [f"{peer}@{length}" for peer in peers]
            with running_engines(named, session.settings, longest, session.progress) as theirs:
                whole = replace(session, engines=session.engines | ours | theirs)
                for workload, size in sizes.items():
                    rows = measure_rows(whole, workload, size)
                    console.print(latency_table(rows))
                    failed |= report_gate(rows, console)
                    found[workload] += [row for row in rows if length == PEER_LENGTHS[0] or row["method"] in named]
    for workload, rows in found.items():
        session.write(f"latency-{workload}.json", sorted(rows, key=lambda row: row["batch"]))
    return failed


def measure_workloads(session: Session, sizes: dict[str, Size], console: Any) -> int:
    """Measure, show and write workloads; return 1 if eesd's output is not plain's in one."""
    failed = 0
    for workload, size in sizes.items():
        rows = latency(session, workload, size)
        console.print(latency_table(rows))
        failed |= report_gate(rows, console)
    return failed


def quick_sizes(sizes: dict[str, Size]) -> dict[str, Size]:
    """Return little to measure of each workload, at its temperature."""
    return {
        workload: replace(QUICK_SIZE, temperature=size.temperature, dtype=size.dtype)
        for workload, size in sizes.items()
    }


def about(settings: EngineSettings, method: str, left_out: dict[str, str]) -> dict[str, Any]:
    """Return why a method is left out, or how a trained peer was trained."""
    if method in left_out:
        return {"left_out": left_out[method]}
    return trained(settings, method) if method in TRAINED_PEERS else {}


def trained(settings: EngineSettings, peer: str) -> dict[str, Any]:
    """Return what stands in a peer's training.json, nothing where it has none."""
    record = settings.peer(peer) / "training.json"
    return json.loads(record.read_text(encoding="utf-8")) if record.is_file() else {}


def latency(session: Session, workload: str, size: Size) -> list[dict[str, Any]]:
    """Measure and write a workload's rows."""
    rows = measure_rows(session, workload, size)
    session.write(f"latency-{workload}.json", rows)
    return rows


def measure_rows(session: Session, workload: str, size: Size) -> list[dict[str, Any]]:
    """Return a workload's rows; methods that take part in none of its sizes are not in them."""
    rows = []
    for batch in size.batches:
        left_out = {"eesd-head"} if not size.head_alone else set()
        taking_part = [method for method in session.engines if method not in left_out]
        engines = {method: session.engines[method].at(size.temperature) for method in taking_part}
        settings, count = replace(session.settings, temperature=size.temperature), size.prompts_at(batch)
        prompts, source = session.prompts[workload][:count], shown(prompt_file(workload, count))
        work = Work(prompts, source, size.max_tokens, size.rounds)
        if size.up_to_loops:
            work = ended_at_loops(engines["plain"], work)
        rows += latency_rows(engines, settings, work, batch, session.progress)
    return rows


def throughput(session: Session, size: Size, quick: bool) -> list[dict[str, Any]]:
    """Measure and write requests that arrive at random."""
    engines = {method: session.engines[method] for method in ("plain", "eesd")}
    prompts = session.prompts[HELD_OUT]
    count = 2 if quick else REQUESTS
    requests = [prompts[number % len(prompts)] for number in range(count)]
    source = shown(prompt_file(HELD_OUT, len(prompts)))
    work, rows = Work(requests, source, size.max_tokens, ARRIVAL_ROUNDS), []
    for rate in RATES:
        rows += arrival_rows(engines, session.settings, work, rate, SEED, session.progress)
    session.write(f"throughput-{HELD_OUT}.json", rows)
    return rows


def prompt_file(workload: str, num_prompts: int) -> Path:
    """Write a workload's first prompts and return the file."""
    BUILD.mkdir(parents=True, exist_ok=True)
    workload = workload.removesuffix(BFLOAT16).removesuffix(SAMPLED).removesuffix(UP_TO_LOOPS)
    workload = HELD_OUT if workload == SAME_BUDGET else workload
    chosen = BUILD / f"{workload}-{num_prompts}.jsonl"
    lines = (PROMPTS / f"{workload}.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    chosen.write_text("".join(lines[:num_prompts]), encoding="utf-8")
    return chosen


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


if __name__ == "__main__":
    sys.exit(main())
