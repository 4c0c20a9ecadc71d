"""Write the README's figures from benchmarks/results: nothing there is typed by hand.

    python benchmarks/measure_all.py --only held_out_code
    python benchmarks/readme_table.py
"""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
OPEN, CLOSE = "<!-- figures -->", "<!-- /figures -->"


def cell(value, pattern):
    return "-" if value is None else pattern.format(value)


def table(rows):
    """Return the Markdown table of `eesd bench latency`'s rows."""
    lines = [
        "| batch | method | tokens/s | speedup, paired median (range) | tokens per round | output identical |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        spread = row["speedup_spread"]
        speedup = cell(row["speedup_vs_plain"], "{:.2f}x") + (f" ({spread[0]:.2f}-{spread[1]:.2f})" if spread else "")
        identical = {True: "yes", False: "no", None: "-"}[row["identical"]]
        lines.append(
            f"| {row['batch']} | {row['method']} | {row['tokens_per_s']:.0f} | {speedup} "
            f"| {cell(row['acceptance_length'], '{:.2f}')} | {identical} |"
        )
    return "\n".join(lines)


def figures():
    """Return the section's text."""
    rows = json.loads((RESULTS / "latency-held_out_code.json").read_text())
    run = rows[0]
    shares = next(row["acceptance_per_position"] for row in rows if row["method"] == "eesd")
    positions = " ".join(f"{share:.2f}" for share in shares)
    return "\n".join(
        [
            f"On {run['hardware']} (a shared machine: read the ratios), the embedded 24-layer model, N = 2, float32,",
            f"greedy, {run['num_prompts']} held-out Python prompts, {run['max_tokens']} tokens each, methods "
            "interleaved;\nmade by the commands in `benchmarks/readme_table.py`. GPU: not yet measured.",
            "",
            table(rows),
            "",
            f"EESD's acceptance per draft position at batch 1, of all rounds: {positions}.",
        ]
    )


def main():
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, rest = text.split(OPEN)
    readme.write_text(f"{before}{OPEN}\n{figures()}\n{CLOSE}{rest.split(CLOSE)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
