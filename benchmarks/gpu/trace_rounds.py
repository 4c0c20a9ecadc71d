"""Where the time of a round goes on this GPU: kernels and gaps, of drafting and of the rest, in one table.

    export PYTHONPATH=benchmarks                                       # for gpu.end_to_end
    python benchmarks/gpu/trace_rounds.py 8b --json benchmarks/results/gpu_rounds.json
    python benchmarks/gpu/trace_rounds.py tiny --rounds 3             # without a GPU: as far as the summary

A target of an 8B model's shape with random weights and imposed acceptance (see end_to_end.py) runs in this process.
torch's profiler traces some rounds with `fixed` (three drafts) and with `goodput`, at every batch size. Read it so:
"gap" is time in which the device had nothing to do between the first and the last kernel traced; "waits" are calls in
which the host waited for the device; "drafting" are kernels that `propose` launched. The profiler slows the host: what
a round takes without it is said beside, and, of rounds under cProfile, whose Python took the time.
"""

from __future__ import annotations

import argparse
import bisect
import cProfile
import json
import os
import pstats
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from gpu.end_to_end import PROMPT_TOKENS, SHAPES, impose_acceptance_on_eesd, speculative_config, start_engine

from vllm_eesd.provenance import provenance

DRAFTING = "eesd: propose"
FIXED_LENGTH = 3
#: Rounds before the traced ones: compilers, allocators and the policy's first costs.
WARM_UP_ROUNDS = 30
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
#: Whose Python a file is, by what its path holds; the first that fits.
HOST_PARTS = {
    "EESD": "/vllm_eesd/",
    "scheduler": "/vllm/v1/core/",
    "engine": "/vllm/v1/engine/",
    "runner": "/vllm/v1/worker/",
    "rest of vLLM": "/vllm/",
}
OTHER_CODE = "other code"


class Rounds(NamedTuple):
    """Some traced rounds; times in ms a round.

    Attributes:
        span_ms: from the first kernel's beginning to the last one's end.
        busy_ms, gap_ms: of it, in which the device did something, and nothing.
        draft_ms: of `busy_ms`, kernels that drafting launched.
        kernels, draft_kernels: kernels and copies a round, and those of drafting.
        launches, draft_launches: calls by the host that started them; a graph is one.
        waits, wait_ms: calls in which the host waited for the device, and their time.
        slowest: (ms a round, name) of the kernels that take most.
    """

    span_ms: float
    busy_ms: float
    gap_ms: float
    draft_ms: float
    kernels: float
    draft_kernels: float
    launches: float
    draft_launches: float
    waits: float
    wait_ms: float
    slowest: list[tuple[float, str]]


def summarise(events: list[dict[str, Any]], num_rounds: int) -> Rounds:
    """Return what a Chrome trace of torch's profiler says of its rounds.

    Args:
        events: its `traceEvents`; times in us.
    Raises:
        ValueError: nothing ran on a device.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    kernels = sorted((e for e in complete if e.get("cat") in ON_DEVICE), key=lambda e: e["ts"])
    if not kernels:
        raise ValueError("the trace holds no kernel: nothing ran on a device")
    calls = [e for e in complete if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    ranges = sorted((e["ts"], e["ts"] + e["dur"]) for e in complete if e.get("name") == DRAFTING and "ts" in e)
    starts = [start for start, _ in ranges]

    def is_drafting(moment: float) -> bool:
        index = bisect.bisect_right(starts, moment) - 1
        return index >= 0 and moment <= ranges[index][1]

    launched_at = {e["args"]["correlation"]: e["ts"] for e in calls if "correlation" in e.get("args", {})}
    drafting = [k for k in kernels if is_drafting(launched_at.get(k.get("args", {}).get("correlation"), -1.0))]
    busy, end = 0.0, kernels[0]["ts"]
    for kernel in kernels:
        busy += max(0.0, kernel["ts"] + kernel["dur"] - max(end, kernel["ts"]))
        end = max(end, kernel["ts"] + kernel["dur"])
    span = end - kernels[0]["ts"]
    launches = [e for e in calls if "Launch" in e["name"]]
    waits = [e for e in calls if "Synchronize" in e["name"]]
    names: Counter[str] = Counter()
    for kernel in kernels:
        names[kernel["name"]] += kernel["dur"]
    each = 1e3 * num_rounds
    return Rounds(
        span_ms=span / each,
        busy_ms=busy / each,
        gap_ms=(span - busy) / each,
        draft_ms=sum(k["dur"] for k in drafting) / each,
        kernels=len(kernels) / num_rounds,
        draft_kernels=len(drafting) / num_rounds,
        launches=len(launches) / num_rounds,
        draft_launches=sum(is_drafting(e["ts"]) for e in launches) / num_rounds,
        waits=len(waits) / num_rounds,
        wait_ms=sum(e["dur"] for e in waits) / each,
        slowest=[(us / each, name) for name, us in names.most_common(8)],
    )


def mark_drafting() -> None:
    """Have the profiler show when the host drafts."""
    import torch

    from vllm_eesd.host.v2.speculator import EarlyExitSpeculator

    propose = EarlyExitSpeculator.propose

    def marked(*args, **kwargs):
        with torch.profiler.record_function(DRAFTING):
            return propose(*args, **kwargs)

    EarlyExitSpeculator.propose = marked


def start(policy: str, options: argparse.Namespace, root: Path) -> Any:
    """Return an engine in this process that drafts by this policy."""
    config = speculative_config("eesd", options.shape, root) | {"policy": policy}
    if policy == "fixed":
        config |= {"num_speculative_tokens": FIXED_LENGTH, "policy_args": {}}
    return start_engine(options.shape, root, config, options.engine)


def host_parts(stats: dict[tuple, tuple], num_rounds: int) -> dict[str, float]:
    """Return whose Python took the host's time, ms a round, most first.

    What other code takes counts for who called it, where that is one of `HOST_PARTS`; else it is `OTHER_CODE`.

    Args:
        stats: `pstats.Stats.stats`.
    """

    def part_of(function: tuple[str, int, str]) -> str | None:
        return next((part for part, path in HOST_PARTS.items() if path in function[0]), None)

    seconds: Counter[str] = Counter()
    for function, (_, _, own_s, _, callers) in stats.items():
        part = part_of(function)
        if part is None and callers:
            for caller, (_, _, caller_s, _) in callers.items():
                seconds[part_of(caller) or OTHER_CODE] += caller_s
        else:
            seconds[part or OTHER_CODE] += own_s
    return {part: round(1e3 * own / num_rounds, 3) for part, own in seconds.most_common()}


def trace(llm: Any, batch: int, num_rounds: int, path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run a full batch for three times so many rounds: undisturbed, under cProfile, under torch's profiler.

    Returns:
        (the trace's events, {"wall_ms": a round undisturbed, "host_ms": see `host_parts`}).
    """
    import torch
    from vllm import SamplingParams

    engine, generator = llm.llm_engine, random.Random(0)
    vocab_size = engine.model_config.get_vocab_size()
    params = SamplingParams(temperature=0, max_tokens=800, ignore_eos=True, detokenize=False)
    for number in range(batch):
        tokens = [generator.randrange(3, vocab_size) for _ in range(PROMPT_TOKENS)]
        engine.add_request(f"{path.stem}-{number}", {"prompt_token_ids": tokens}, params)
    for _ in range(WARM_UP_ROUNDS):
        engine.step()
    began = time.perf_counter()
    for _ in range(num_rounds):
        engine.step()
    wall_ms = (time.perf_counter() - began) * 1e3 / num_rounds
    host = cProfile.Profile()
    for _ in range(num_rounds):
        host.runcall(engine.step)
    with torch.profiler.profile() as profile:
        for _ in range(num_rounds):
            engine.step()
    profile.export_chrome_trace(str(path))
    engine.abort_request([f"{path.stem}-{number}" for number in range(batch)])
    while engine.has_unfinished_requests():
        engine.step()
    host_ms = host_parts(pstats.Stats(host).stats, num_rounds)
    return json.loads(path.read_text(encoding="utf-8"))["traceEvents"], {"wall_ms": wall_ms, "host_ms": host_ms}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table, and each one's slowest kernels."""
    columns = [name for name in Rounds._fields if name != "slowest"]
    lines = ["| policy | batch | " + " | ".join(columns) + " |", "| --- |" + " ---: |" * (len(columns) + 1)]
    for row in rows:
        cells = " | ".join(f"{row[name]:.2f}" for name in columns)
        lines.append(f"| {row['policy']} | {row['batch']} | {cells} |")
    for row in rows:
        lines += ["", f"{row['policy']}, batch {row['batch']}, ms a round:"]
        lines += [f"    {ms:8.3f}  {name:.100}" for ms, name in row["slowest"]]
        if "wall_ms" in row:
            parts = ", ".join(f"{part} {ms:.2f}" for part, ms in row["host_ms"].items())
            lines.append(f"    without a profiler {row['wall_ms']:.2f} ms a round; the host's under cProfile: {parts}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--policies", default="fixed,goodput")
    parser.add_argument("--batch", default="1,32")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--engine", type=json.loads, default={"gpu_memory_utilization": 0.3}, help="LLM's arguments")
    parser.add_argument("--traces", type=Path, help="folder that keeps the Chrome traces")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    impose_acceptance_on_eesd()
    mark_drafting()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.traces or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for policy in options.policies.split(","):
            llm = start(policy, options, Path(scratch))
            for batch in map(int, options.batch.split(",")):
                events, host = trace(llm, batch, options.rounds, folder / f"{policy}-{batch}.json")
                found = summarise(events, options.rounds)._asdict()
                rows.append({"policy": policy, "batch": batch} | found | host)
            llm.llm_engine.engine_core.shutdown()
            del llm
    print(table(rows))
    if options.json:
        content = {"shape": options.shape, "rounds": options.rounds, **provenance(), "rows": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
