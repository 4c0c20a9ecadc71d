"""`eesd bench sweep`: exit layer x longest draft x policy, each against plain decoding in the same minutes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from rich.table import Table

from vllm_eesd.bench.engines import EngineSettings, encode_prompts, running_engines
from vllm_eesd.bench.latency import (
    check_sizes,
    identical_cell,
    open_console,
    report_gate,
    reporting,
    speedup_cell,
    write_json,
)
from vllm_eesd.bench.measure import measure, rows
from vllm_eesd.bench.prompts import chosen_file, read_prompts
from vllm_eesd.provenance import provenance

OWN_HEAD = "head"


def run(args: argparse.Namespace) -> int:
    """Measure every combination, print a table, the fastest first; return 1 if one's float32 output is not plain's.

    Raises:
        ValueError: a flag, the prompts or the model are not usable; one line.
    """
    base = EngineSettings(args.model, args.head, args.dtype)
    chosen = list(combinations(base, args.exit_layers, args.lengths, args.policies))
    source = chosen_file(args)
    texts = read_prompts(source)
    sizes = {"max_tokens": args.max_tokens, "rounds": args.rounds}
    ends = {"fixed_length": not any(text.messages for text in texts)}
    check_sizes(len(texts), args.batch, **sizes)
    console = open_console()
    results = []
    with reporting(console) as progress:
        _, prompts, max_model_len = encode_prompts(base.model, texts, args.max_tokens, progress, args.chat_template)
        with running_engines(["plain"], base, max_model_len, progress) as plain:
            for number, settings in enumerate(chosen, start=1):
                progress(f"combination {number} of {len(chosen)}")
                with running_engines(["eesd"], settings, max_model_len, progress) as eesd:
                    for batch in args.batch:
                        both = {**plain, **eesd}
                        runs = measure(both, prompts, batch=batch, progress=progress, **sizes, **ends)
                        (row,) = [row for row in rows(runs, exact=base.dtype == "float32") if row["method"] == "eesd"]
                        results.append(describe(settings, batch) | row)
    shared = {"model": base.model, "head": base.head, "dtype": base.dtype, "prompts": str(source), **sizes, **ends}
    results = [row | shared | provenance() for row in results]
    if args.json:
        write_json(Path(args.json), results)
    console.print(sweep_table(results))
    return report_gate(results, console)


def combinations(
    base: EngineSettings, exit_layers: list[str], lengths: list[int], policies: list[str]
) -> Iterator[EngineSettings]:
    """Return the settings of every combination.

    Args:
        exit_layers: numbers, to draft headless from, or "head" for the head's own.
    Raises:
        ValueError: something in them is not allowed.
    """
    for layer, length, policy in product(exit_layers, lengths, policies):
        if layer != OWN_HEAD and not (layer.isascii() and layer.isdigit() and int(layer)):
            raise ValueError(f"--exit-layers {layer!r} is not allowed: a layer's number, or {OWN_HEAD}")
        settings = replace(base, num_speculative_tokens=length, policy=policy)
        yield settings if layer == OWN_HEAD else replace(settings, head=None, exit_layer=int(layer))


def describe(settings: EngineSettings, batch: int) -> dict[str, Any]:
    """Return what tells a combination from the others."""
    return {
        "exit_layer": settings.exit_layer or OWN_HEAD,
        "num_speculative_tokens": settings.num_speculative_tokens,
        "policy": settings.policy,
        "batch": batch,
    }


def sweep_table(results: list[dict[str, Any]]) -> Table:
    table = Table()
    for heading in ("batch", "exit layer", "longest draft", "policy", "tokens/s", "speedup", "drafted", "identical"):
        table.add_column(heading, justify="left" if heading in ("policy", "identical") else "right")
    for row in sorted(results, key=lambda row: (row["batch"], -(row["speedup_vs_plain"] or 0.0))):
        drafted = row["mean_draft_length"]
        table.add_row(
            str(row["batch"]),
            str(row["exit_layer"]),
            str(row["num_speculative_tokens"]),
            row["policy"],
            f"{row['tokens_per_s']:.1f}",
            speedup_cell(row),
            "-" if drafted is None else f"{drafted:.2f}",
            identical_cell(row),
        )
    return table
