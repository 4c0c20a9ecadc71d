"""What `make bench` measures: every table of docs/results.md that can be measured on this machine.

    python benchmarks/measure_all.py [--only held_out_code] [--quick]

Prints what it runs, so that any line can be run by hand. `--quick` measures little, to see that everything works.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROMPTS, RESULTS, BUILD = ROOT / "models" / "prompts", ROOT / "benchmarks" / "results", ROOT / "build" / "bench"
MODEL = "models/eesd-code-10m"
#: Workload -> prompts, batch sizes, rounds: together about a quarter of an hour on two cores.
WORKLOADS = {
    "held_out_code": (16, "1,4,8,16", 4),
    "repetitive_code": (8, "1,8", 3),
    "random_tokens": (8, "1,8", 3),
}
MAX_TOKENS = 128
QUICK = (2, "1,2", 3, 16)
#: What arrives at random is taken from this workload.
ARRIVING, RATES = "held_out_code", "2,6"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(WORKLOADS), help="one workload")
    parser.add_argument("--quick", action="store_true", help="little, into build/bench instead of benchmarks/results")
    args = parser.parse_args()
    began = time.monotonic()
    for workload in [args.only] if args.only else WORKLOADS:
        run(latency(workload, args.quick))
    if args.only in (None, ARRIVING):
        run(throughput(args.quick))
    print(f"measured in {(time.monotonic() - began) / 60:.1f} minutes")
    return 0


def latency(workload: str, quick: bool) -> list[str]:
    """Return the `eesd` arguments of one workload; its prompts are the first lines of models/prompts."""
    num_prompts, batches, rounds, max_tokens = QUICK if quick else (*WORKLOADS[workload], MAX_TOKENS)
    words = ["bench", "latency", "--model", MODEL, "--prompts", prompts(workload, num_prompts), "--batch", batches]
    words += ["--methods", "plain,eesd,ngram", "--max-tokens", str(max_tokens), "--rounds", str(rounds)]
    return [*words, "--json", result(f"latency-{workload}.json", quick)]


def throughput(quick: bool) -> list[str]:
    """Return the `eesd` arguments for requests that arrive at random."""
    num_requests, _, rounds, max_tokens = QUICK if quick else (16, "", 3, MAX_TOKENS)
    words = ["bench", "throughput", "--model", MODEL, "--prompts", prompts(ARRIVING, num_requests), "--rate", RATES]
    words += ["--methods", "plain,eesd", "--requests", str(num_requests), "--max-tokens", str(max_tokens)]
    return [*words, "--rounds", str(rounds), "--json", result(f"throughput-{ARRIVING}.json", quick)]


def prompts(workload: str, num_prompts: int) -> str:
    """Write a workload's first prompts and return the file, seen from the root."""
    BUILD.mkdir(parents=True, exist_ok=True)
    chosen = BUILD / f"{workload}-{num_prompts}.jsonl"
    lines = (PROMPTS / f"{workload}.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    chosen.write_text("".join(lines[:num_prompts]), encoding="utf-8")
    return str(chosen.relative_to(ROOT))


def result(name: str, quick: bool) -> str:
    """Return where a result goes, seen from the root."""
    return str(((BUILD if quick else RESULTS) / name).relative_to(ROOT))


def run(words: list[str]) -> None:
    """Run `eesd` in the repository's root; what it says is shown."""
    print("eesd", *words, flush=True)
    subprocess.run([sys.executable, "-P", "-m", "vllm_eesd.cli", *words], cwd=ROOT, check=True)


if __name__ == "__main__":
    sys.exit(main())
