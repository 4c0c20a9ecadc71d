"""What `make bench` measures: the public model (`measure_public.py`) or, if asked to, the embedded one.

    python benchmarks/measure_all.py [--quick] [flags of measure_public.py]
    python benchmarks/measure_all.py --embedded | --all | --only held_out_code edits [--quick]

Of the embedded model: the README's table or, with --all, those of docs/results.md but "same budget", whose page says
how it was measured. All engines of a dtype are started once and stay alive (about 3 GB each), as starting them is what
takes longest. Suffix decoding is left out where it is not installed, and methods.json says so. `--quick` measures
little, to see that everything works.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import measure_public
from measure_public import BUILD, RESULTS, ROOT

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
from vllm_eesd.bench.prompts import read_prompts, workload_file
from vllm_eesd.bench.vllm_engine import VllmEngine
from vllm_eesd.provenance import provenance

MODEL, ROUNDS = "models/eesd-code-10m", 3
#: Of this one a step's time is taken apart, too.
HELD_OUT = "held_out_code"


@dataclass(frozen=True)
class Size:
    """How much is measured of a workload.

    Attributes:
        prompts: by the number of requests at a time, its first so many: at batch 1 they take longest, and while the
            last of a larger batch end, fewer run, the fewer the less it matters.
        head_alone: whether EESD also runs without n-gram drafts.
        max_tokens: per prompt.
        temperature: of every request; above 0 outputs are not compared.
        up_to_loops: whether a text ends where plain's begins to repeat itself.
        dtype: in bfloat16 outputs are compared but need not be the same.
    """

    prompts: Mapping[int, int]
    head_alone: bool = False
    max_tokens: int = 128
    temperature: float = 0.0
    up_to_loops: bool = False
    dtype: str = "float32"


WORKLOADS = {
    HELD_OUT: Size({1: 6, 4: 16, 8: 32, 16: 40}, head_alone=True),
    "repetitive_code": Size({1: 4, 8: 16}),
    # Greedy, the model soon repeats itself after random tokens, which is easy to draft; so they are sampled.
    "random_tokens": Size({1: 4, 8: 16}, max_tokens=64, temperature=2.0),
    "multi_turn": Size({1: 4, 8: 16}, max_tokens=64),
    "long_context": Size({1: 2, 4: 8}, max_tokens=64),
    "edits": Size({1: 4, 8: 16}),
    "mixed": Size({1: 6, 8: 24}, max_tokens=64),
}
#: The same prompts, sampled as a completion model is used: greedy text of a small model may repeat itself.
SAMPLED, TEMPERATURE = "_sampled", 0.8
WORKLOADS |= {
    name + SAMPLED: replace(size, temperature=TEMPERATURE, prompts={b: n for b, n in size.prompts.items() if b <= 8})
    for name, size in WORKLOADS.items()
    if not size.temperature
}
#: Greedy text up to its first loop.
UP_TO_LOOPS = "_up_to_loops"
WORKLOADS[HELD_OUT + UP_TO_LOOPS] = Size({1: 6, 8: 32}, head_alone=True, up_to_loops=True)
#: What the README shows, and meant to take less than 20 minutes on two slow cores.
SHOWN_FIRST = (HELD_OUT + UP_TO_LOOPS, HELD_OUT + SAMPLED)
#: Little of it: where a CPU does not multiply bfloat16 in hardware, an engine takes four minutes to compile.
BFLOAT16, _SIZE = "_bfloat16", Size({1: 2, 8: 8}, head_alone=True, dtype="bfloat16")
WORKLOADS |= {HELD_OUT + BFLOAT16: _SIZE, HELD_OUT + SAMPLED + BFLOAT16: replace(_SIZE, temperature=TEMPERATURE)}
QUICK = {"prompts": {1: 1, 2: 4, 4: 4}, "max_tokens": 16}
WATERFALL_SCRIPT = [sys.executable, str(ROOT / "benchmarks" / "waterfall.py")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--embedded", action="store_true", help="the embedded model's tables of the README")
    chosen.add_argument("--all", action="store_true", help="every workload of the embedded model: an hour")
    chosen.add_argument("--only", nargs="+", choices=list(WORKLOADS), metavar="WORKLOAD", help="these of its workloads")
    measure_public.add_flags(parser)
    args = parser.parse_args()
    if not (args.embedded or args.all or args.only):
        return measure_public.run_or_refuse(parser, args)
    sizes = {name: WORKLOADS[name] for name in (WORKLOADS if args.all else args.only or SHOWN_FIRST)}
    if args.quick:
        sizes = {name: replace(size, **QUICK) for name, size in sizes.items()}
    os.chdir(ROOT)
    began, console, results = time.monotonic(), open_console(), BUILD if args.quick else RESULTS
    provenance()  # before the first file is written: the commit is the one that was measured
    if HELD_OUT in sizes:
        words = ["--json", str(results / "waterfall.json"), "--tokens", "16" if args.quick else "64", "--rounds", "1"]
        # A process of its own, because there the engines run in it.
        subprocess.run([*WATERFALL_SCRIPT, *words], cwd=ROOT, check=True)
    with reporting(console) as progress:
        failed = measure_all(sizes, results, console, progress)
    console.print(f"measured in {(time.monotonic() - began) / 60:.1f} minutes")
    return failed


def measure_all(sizes: dict[str, Size], results: Path, console: Any, progress: Callable[[str], None]) -> int:
    """Measure, show and write workloads, those of a dtype with the same engines; return 1 if eesd's output is wrong."""
    settings, failed = EngineSettings(MODEL), 0
    left_out = {method: reason for method in METHODS if (reason := settings.missing(method)) is not None}
    known = {method: about(settings, method, left_out) for method in (*METHODS, "exit_head")}
    write_json(results / "methods.json", known)
    methods = [method for method in METHODS if method not in left_out and method not in TRAINED_PEERS]
    for dtype in dict.fromkeys(size.dtype for size in sizes.values()):
        prompts, longest = {}, 0
        for name, size in sizes.items():
            if size.dtype == dtype:
                texts = read_prompts(source_of(name))
                _, prompts[name], length = encode_prompts(MODEL, texts, size.max_tokens, progress)
                longest = max(longest, length)
        settings = replace(settings, dtype=dtype)
        with running_engines(methods, settings, longest, progress) as engines:
            for name, encoded in prompts.items():
                rows = measure_rows(engines, settings, name, sizes[name], encoded, progress)
                write_json(results / f"latency-{name}.json", rows)
                console.print(latency_table(rows))
                failed |= report_gate(rows, console)
    return failed


def about(settings: EngineSettings, method: str, left_out: dict[str, str]) -> dict[str, Any]:
    """Return why a method is left out, or what stands in a trained peer's training.json."""
    if method in left_out:
        return {"left_out": left_out[method]}
    record = settings.peer(method) / "training.json"
    return json.loads(record.read_text(encoding="utf-8")) if record.is_file() else {}


def measure_rows(
    engines: Mapping[str, VllmEngine],
    settings: EngineSettings,
    name: str,
    size: Size,
    prompts: list[list[int]],
    progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Return a workload's rows."""
    rows, settings = [], replace(settings, temperature=size.temperature)
    taking_part = [method for method in engines if size.head_alone or method != "eesd-head"]
    at = {method: engines[method].at(size.temperature) for method in taking_part}
    for batch, count in size.prompts.items():
        work = Work(prompts[:count], source_of(name), size.max_tokens, ROUNDS, out_of=len(prompts))
        if size.up_to_loops:
            work = ended_at_loops(at["plain"], work)
        rows += latency_rows(at, settings, work, batch, progress)
    return rows


def source_of(name: str) -> str:
    """Return the file of a workload's prompts."""
    return workload_file(name.removesuffix(BFLOAT16).removesuffix(SAMPLED).removesuffix(UP_TO_LOOPS))


if __name__ == "__main__":
    sys.exit(main())
