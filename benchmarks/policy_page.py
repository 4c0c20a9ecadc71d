"""Write the figures of docs/policies.md: every policy replayed on the recorded traces and on synthetic ones.

    python -P benchmarks/policy_page.py

Everything is seeded: the same traces give the same page. What was measured live comes from benchmarks/results.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from vllm_eesd.policy import POLICIES
from vllm_eesd.simulate.plots import plot
from vllm_eesd.simulate.run import Outcome, load_traces, mix, simulate
from vllm_eesd.simulate.synthetic import QUALITIES, SPREADS, synthetic_trace
from vllm_eesd.trace import DenseTrace

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULTS = ROOT / "docs" / "policies.md", ROOT / "benchmarks" / "results"
#: What was measured live, and on which target.
LIVE = {
    "live_policies.json": "the embedded model",
    "live_policies-random_135m.json": "134 million random weights, the exit head untrained "
    "(`benchmarks/make_random_target.py`)",
}
RECORDED = [
    str(ROOT / "models" / "traces" / f"{n}.jsonl.gz") for n in ("held_out_code", "repetitive_code", "random_tokens")
]
BATCHES = (1, 8)
OPEN, CLOSE = "<!-- figures -->", "<!-- /figures -->"
#: What a head's config would state: about the mean acceptance of a first draft token over the synthetic traces.
PRIOR = (6.0, 4.0)


def main() -> None:
    recorded = load_traces(RECORDED)
    parts = []
    for batch in BATCHES:
        outcomes = replayed(recorded, batch)
        parts += [f"Recorded traces of the embedded model, batch {batch}:", "", *table(outcomes), ""]
        if batch == 1:
            plot(PAGE.with_suffix(".png"), outcomes)
    parts += [
        "![Goodput by policy and trace; time lost to the oracle and draft lengths on the mixture](policies.png)",
        "",
    ]
    for name, target in LIVE.items():
        if (RESULTS / name).exists():
            parts += live(json.loads((RESULTS / name).read_text(encoding="utf-8")), target)
    parts += [
        "Synthetic traces, batch 1 (20 requests of 300 tokens, acceptance that switches between three regimes every 60",
        "tokens on average; names: how far apart the regimes are, and how much confidences tell):",
        "",
        *table(replayed(synthetic(), 1)),
    ]
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.split(OPEN)[0], page.split(CLOSE)[1]
    PAGE.write_text(before + "\n".join([OPEN, *parts, CLOSE]) + after, encoding="utf-8")


def replayed(traces: dict[str, DenseTrace], batch: int) -> list[Outcome]:
    return [o for name, trace in traces.items() for o in simulate(name, trace, list(POLICIES), batch)]


def synthetic() -> dict[str, DenseTrace]:
    """Return a trace for every spread of regimes and quality of confidences, and their mixture."""
    traces = {
        f"{spread}-{quality}": replace(synthetic_trace(SPREADS[spread], QUALITIES[quality]), prior=PRIOR)
        for spread in sorted(SPREADS)
        for quality in sorted(QUALITIES)
    }
    return traces | {"mixed": mix(list(traces.values()))}


def table(outcomes: list[Outcome]) -> list[str]:
    """Goodput relative to plain decoding, a row per policy and a column per trace."""
    traces, policies = (
        list(dict.fromkeys(names)) for names in zip(*((o.trace, o.policy) for o in outcomes), strict=True)
    )
    goodput = {(o.trace, o.policy): o for o in outcomes}
    lines = ["| policy | " + " | ".join(traces) + " |", "|---" * (len(traces) + 1) + "|"]
    for policy in policies:
        cells = []
        for trace in traces:
            outcome = goodput[trace, policy]
            length = "" if outcome.length is None else f" (K={outcome.length})"
            cells.append(f"{outcome.replay.goodput_vs_plain:.2f}{length}")
        lines.append(f"| {policy} | " + " | ".join(cells) + " |")
    return lines


def live(rows: list[dict], target: str) -> list[str]:
    """What `benchmarks/bench_live_policies.py` measured: goodput, the best fixed length and no drafting."""
    first = rows[0]
    lines = [
        f"Measured in the engine on {target},",
        f"{first['hardware']}; {first['max_tokens']} tokens a prompt, {first['rounds']} interleaved rounds, medians",
        "and ranges (`benchmarks/bench_live_policies.py`). `off` is EESD loaded and no request drafting; a step is",
        "plain vLLM's:",
        "",
        "| workload | batch | ms a step | goodput vs plain | best fixed vs plain | goodput vs it | off vs plain |",
        "|---|---|---|---|---|---|---|",
    ]
    for workload, batch in dict.fromkeys((row["workload"], row["batch"]) for row in rows):
        found = {row["method"]: row for row in rows if (row["workload"], row["batch"]) == (workload, batch)}
        cells = [str(found["plain"]["ms_per_step"]), spread(found["goodput"], "vs_plain")]
        fixed = [row for name, row in found.items() if name.startswith("fixed")]
        if fixed:
            best = max(fixed, key=lambda row: row["vs_plain"])
            cells += [f"{spread(best, 'vs_plain')}, K={best['method'].split()[-1]}", spread(best, "goodput_vs_it")]
        else:
            cells += ["not measured"] * 2
        cells.append(spread(found["off"], "vs_plain"))
        lines.append(f"| {workload} | {batch} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def spread(row: dict, key: str) -> str:
    low, high = row[f"{key}_spread"]
    return f"{row[key]:.2f}x ({low:.2f}-{high:.2f})"


if __name__ == "__main__":
    main()
