#!/usr/bin/env python3
"""What the parameters of real chats cost beside a temperature alone: top-p, top-k, a repetition penalty.

    PYTHONPATH=benchmarks python benchmarks/sampling_parameters.py [--model DIR] [--head DIR] [--prompts P]

Plain vLLM and EESD take turns on the same chat prompts, one request at a time and eight; rows go to
`benchmarks/results/NAME-sampling_parameters.json`. A CPU that does not multiply bfloat16 in hardware measures its
emulation: `--dtype float32` there.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from measure_public import FEWEST_IN_BLOCK, HEAD, NAME, RESULTS, ROOT, WAVES, head_beside, public_model

from vllm_eesd.bench.engines import EngineSettings, encode_prompts, running_engines
from vllm_eesd.bench.latency import latency_rows, latency_table, open_console, reporting, write_json
from vllm_eesd.bench.measure import Work
from vllm_eesd.bench.prompts import read_prompts, workload_file
from vllm_eesd.flags import positive
from vllm_eesd.provenance import provenance

#: Of `vllm.SamplingParams`, as model cards advise them.
KINDS: dict[str, dict[str, Any]] = {
    "T = 0.7": {"temperature": 0.7},
    "T = 0.7, top_p = 0.95": {"temperature": 0.7, "top_p": 0.95},
    "T = 0.6, top_p = 0.95, top_k = 20": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    "T = 0.7, repetition_penalty = 1.05": {"temperature": 0.7, "repetition_penalty": 1.05},
}
#: Prompts at each batch size.
SIZES = {1: 6, 8: 24}


def measure(args: argparse.Namespace) -> None:
    """Write a row for each kind, batch size and method, as soon as a kind is measured.

    Raises:
        ValueError: the model or its head is not here; one line.
    """
    model, console = args.model or public_model(), open_console()
    settings = EngineSettings(model, args.head or head_beside(model), dtype=args.dtype)
    source = workload_file("chat")
    sizes = {batch: max(batch, min(count, args.prompts or count)) for batch, count in SIZES.items()}
    texts = read_prompts(source)[: max(sizes.values())]
    provenance()  # before anything is written: the commit is the one that is measured
    found: list[dict[str, Any]] = []
    with reporting(console) as progress:
        _, prompts, longest = encode_prompts(settings.model, texts, args.max_tokens, progress)
        with running_engines(["plain", "eesd"], settings, longest, progress) as engines:
            for kind, params in KINDS.items():
                asked = {method: engine.at(**params) for method, engine in engines.items()}
                said = replace(settings, temperature=params["temperature"], top_p=params.get("top_p", 1.0))
                for batch, count in sizes.items():
                    block = max(FEWEST_IN_BLOCK, WAVES * batch)
                    work = Work(prompts[:count], source, args.max_tokens, args.rounds, None, False, block, len(texts))
                    rows = latency_rows(asked, said, work, batch, progress)
                    found += [row | {"kind": kind, "model": Path(settings.model).name} for row in rows]
                write_json(args.results / f"{args.name}-sampling_parameters.json", found)
                console.print(f"\n{kind}")
                console.print(latency_table([row for row in found if row["kind"] == kind]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="DIR", help=f"default: what `eesd model {NAME}` says")
    parser.add_argument("--head", metavar="DIR", help=f"default: eesd/ in the model's, else {HEAD}")
    parser.add_argument(
        "--prompts", type=positive, metavar="P", help=f"at most so many (default: {SIZES}, by batch size)"
    )
    parser.add_argument("--max-tokens", type=positive, default=96, metavar="T", help="of each answer (default: 96)")
    parser.add_argument("--rounds", type=positive, default=1, metavar="R", help="over all prompts (default: 1)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default: bfloat16")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--name", default=NAME, help="what the results' file begins with")
    args = parser.parse_args()
    os.chdir(ROOT)
    try:
        measure(args)
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
