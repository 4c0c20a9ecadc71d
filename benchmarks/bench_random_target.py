"""EESD beside plain vLLM on 134 million random weights, where a step takes what it does of models people serve on CPUs.

    python -P models/make/make_random_target.py build/random_135m
    python benchmarks/bench_random_target.py --json benchmarks/results/random_target.json

Little of every workload: prompts are most of the time. Each row is written when it is measured; a run that is begun
again leaves out what its file holds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from measure_all import HELD_OUT, ROOT, TEMPERATURE, Size, prompt_file

from vllm_eesd.bench.engines import EngineSettings, encode_prompts, running_engines
from vllm_eesd.bench.latency import latency_rows, latency_table, open_console, report_gate, reporting, write_json
from vllm_eesd.bench.measure import Work
from vllm_eesd.bench.prompts import read_prompts

MODEL = "build/random_135m"
#: Rounds at batch 4; at batch 1, where there is less of it, twice as many.
_SIZE = Size(16, (1, 4), 2, alone=2, max_tokens=32)
WORKLOADS = {
    "long_context": replace(_SIZE, prompts=8, alone=1),
    "multi_turn": _SIZE,
    "mixed": replace(_SIZE, prompts=12, alone=3),  # a third of each kind
    "edits": _SIZE,
    HELD_OUT: _SIZE,
    "repetitive_code": _SIZE,
    "random_tokens": _SIZE,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--temperatures", nargs="+", type=float, default=[TEMPERATURE, 0.0])
    parser.add_argument("--batches", nargs="+", type=int, choices=_SIZE.batches, default=list(_SIZE.batches))
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "bench" / "random_target.json")
    args = parser.parse_args()
    args.json = args.json.resolve()
    os.chdir(ROOT)
    console, failed = open_console(), 0
    rows: list[dict[str, Any]] = json.loads(args.json.read_text(encoding="utf-8")) if args.json.exists() else []
    known = {(row["workload"], row["temperature"], row["batch"]) for row in rows}
    asked = [(name, t, batch) for name in args.workloads for t in args.temperatures for batch in args.batches]
    missing = [one for one in asked if one not in known]
    settings, work, longest = EngineSettings(MODEL), {}, 0
    with reporting(console) as progress:
        for name, batch in dict.fromkeys((name, batch) for name, _, batch in missing):
            size = WORKLOADS[name]
            source = prompt_file(name, size.prompts_at(batch))
            _, prompts, length = encode_prompts(MODEL, read_prompts(source), size.max_tokens, progress)
            work[name, batch] = Work(
                prompts, source.relative_to(ROOT), size.max_tokens, size.rounds * (2 if batch == 1 else 1)
            )
            longest = max(longest, length)
        with running_engines(["plain", "eesd"], settings, longest, progress) as engines:
            for name, temperature, batch in missing:
                at = {method: engine.at(temperature) for method, engine in engines.items()}
                at_temperature = replace(settings, temperature=temperature)
                measured = latency_rows(at, at_temperature, work[name, batch], batch, progress)
                console.print(name, f"T = {temperature:g}", latency_table(measured))
                failed |= report_gate(measured, console)
                rows += [{"workload": name, **row} for row in measured]
                write_json(args.json, rows)
    return failed


if __name__ == "__main__":
    sys.exit(main())
