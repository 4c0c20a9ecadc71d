"""The synthetic traces that docs/policies.md is about, and its table.

python benchmarks/synthetic_traces.py write build/synthetic
eesd simulate build/synthetic/*.gz --json build/synthetic.json --plot docs/policies.png
python benchmarks/synthetic_traces.py table build/synthetic.json
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from vllm_eesd.simulate.synthetic import QUALITIES, SPREADS, synthetic_trace
from vllm_eesd.trace import write_trace

PAGE = Path(__file__).resolve().parents[1] / "docs" / "policies.md"
OPEN, CLOSE = "<!-- figures -->", "<!-- /figures -->"
#: What a head's config would state: about the mean acceptance of a first draft token over these traces.
PRIOR = (6.0, 4.0)


def write(directory):
    """Write a trace for every spread of regimes and quality of confidences."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    for spread, regimes in SPREADS.items():
        for quality, share in QUALITIES.items():
            trace = replace(synthetic_trace(regimes, share), prior=PRIOR)
            write_trace(Path(directory) / f"{spread}-{quality}.jsonl.gz", trace)


def table(rows_file):
    """Put the rows of `eesd simulate` into the page."""
    rows = json.loads(Path(rows_file).read_text())
    traces = list(dict.fromkeys(row["trace"] for row in rows))
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    goodput = {(row["trace"], row["policy"]): row["goodput_vs_plain"] for row in rows}
    lines = ["| policy | " + " | ".join(traces) + " |", "|---" * (len(traces) + 1) + "|"]
    lines += [f"| {p} | " + " | ".join(f"{goodput[t, p]:.2f}" for t in traces) + " |" for p in policies]
    text = "\n".join(
        [
            "Goodput relative to plain decoding, batch 1, on synthetic traces (20 requests of 300 tokens, acceptance",
            "that switches between three regimes every 60 tokens on average; names: how far apart the regimes are, and",
            "how much confidences tell), made by the commands in `benchmarks/synthetic_traces.py`:",
            "",
            *lines,
            "",
            "![Goodput by policy and trace; time lost to the oracle and draft lengths on the mixture](policies.png)",
        ]
    )
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.split(OPEN)[0], page.split(CLOSE)[1]
    PAGE.write_text(f"{before}{OPEN}\n{text}\n{CLOSE}{after}", encoding="utf-8")


if __name__ == "__main__":
    {"write": write, "table": table}[sys.argv[1]](sys.argv[2])
