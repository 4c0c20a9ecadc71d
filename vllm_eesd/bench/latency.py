"""`eesd bench latency`: what a method costs against plain vLLM, all methods interleaved in one call."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

from vllm_eesd.bench.engines import METHODS, OURS, EngineSettings, encode_prompts, is_method, running_engines
from vllm_eesd.bench.loops import tokens_before_loops
from vllm_eesd.bench.measure import Work, measure, rows
from vllm_eesd.bench.prompts import chosen_file, read_prompts
from vllm_eesd.bench.vllm_engine import VllmEngine
from vllm_eesd.files import write_whole
from vllm_eesd.provenance import provenance


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, write the rows as JSON; return 1 if eesd's float32 output is not plain's.

    Raises:
        ValueError: a flag, the prompts or the model are not usable; one line.
    """
    settings = EngineSettings.of(args)
    check_methods(args.methods, settings)
    if args.up_to_loops and (settings.temperature or "plain" not in args.methods):
        raise ValueError("up_to_loops=True is not usable without temperature=0 and plain, whose loops end the texts")
    source = chosen_file(args)
    texts = read_prompts(source)
    check_sizes(len(texts), args.batch, max_tokens=args.max_tokens, rounds=args.rounds)
    console = open_console()
    with reporting(console) as progress:
        _, prompts, max_model_len = encode_prompts(settings.model, texts, args.max_tokens, progress)
        work, results = Work(prompts, source, args.max_tokens, args.rounds), []
        with running_engines(args.methods, settings, max_model_len, progress) as engines:
            if args.up_to_loops:
                work = ended_at_loops(engines["plain"], work)
            for batch in args.batch:
                results += latency_rows(engines, settings, work, batch, progress)
    if args.json:
        write_json(Path(args.json), results)
    console.print(latency_table(results))
    told = f"{len(prompts)} prompts, {args.max_tokens} tokens each, {settings.dtype}; {results[0]['hardware']}"
    console.print(told)
    return report_gate(results, console)


def ended_at_loops(plain: VllmEngine, work: Work) -> Work:
    """Return the work with every text ended where plain's greedy one begins to repeat itself."""
    plain.forget_prefixes()
    return replace(work, limits=[tokens_before_loops(text) for text in plain.generate(work.prompts, work.max_tokens)])


def latency_rows(
    engines: Mapping[str, VllmEngine], settings: EngineSettings, work: Work, batch: int, progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return a row per engine of prompts generated `batch` at a time, with everything that says how it was measured."""
    sizes = {"batch": batch, "max_tokens": work.limits or work.max_tokens, "rounds": work.rounds}
    runs = measure(engines, work.prompts, progress=progress, **sizes)
    shared = {"model": settings.model, "head": settings.head, "dtype": settings.dtype, "max_tokens": work.max_tokens}
    shared |= {"rounds": work.rounds, "prompts": str(work.source), "num_prompts": len(work.prompts), "refilled": True}
    shared |= {"policy": settings.policy, "temperature": settings.temperature, "up_to_loops": work.limits is not None}
    measured = rows(runs, exact=settings.exact, compared=settings.temperature == 0)
    return [{"method": row.pop("method"), "batch": batch, **row, **shared, **provenance()} for row in measured]


def check_methods(methods: list[str], settings: EngineSettings) -> None:
    """Refuse methods that do not exist, stand there twice, or lack something that they need.

    Raises:
        ValueError: so; one line.
    """
    unknown = [method for method in methods if not is_method(method)]
    if unknown or not methods or len(set(methods)) < len(methods):
        shown = unknown[0] if unknown else ",".join(methods)
        allowed = f"each once of {', '.join(METHODS)}; draft_model@K and eagle@K draft K tokens, at most 16"
        raise ValueError(f"methods={shown!r} is not usable; allowed: {allowed}")
    for method in methods:
        if (missing := settings.missing(method)) is not None:
            raise ValueError(f"methods={method!r} is not usable here: {missing}")


def check_sizes(num_prompts: int, batches: list[int], **sizes: int) -> None:
    """Refuse sizes below 1 and batches that the prompts cannot fill."""
    for name, value in [*(("batch", batch) for batch in batches), *sizes.items()]:
        if value < 1:
            raise ValueError(f"{name}={value} is not usable; allowed: whole numbers from 1")
    if not batches or max(batches) > num_prompts:
        raise ValueError(f"batch={max(batches, default='')} is not usable; allowed: 1 to {num_prompts}, the prompts")


def open_console(no_color: bool = False) -> Console:
    """Return a console on a copy of standard output, which stays the terminal's while engines are being started."""
    file = os.fdopen(os.dup(1), "w", encoding="utf-8")
    plain = no_color or bool(os.environ.get("NO_COLOR"))
    return Console(file=file, color_system=None if plain else "auto", highlight=False)


@contextmanager
def reporting(console: Console) -> Iterator[Callable[[str], None]]:
    """Give a function that shows what is going on: a spinner in a terminal, lines elsewhere; none of it is recorded."""
    recorded, console.record = console.record, False
    try:
        if not console.is_terminal:
            yield lambda text: console.print(text, style="dim")
            return
        live = {"console": console, "transient": True, "redirect_stdout": False, "redirect_stderr": False}
        with Live(refresh_per_second=8, **live) as shown:
            yield lambda text: shown.update(Spinner("dots", text))
    finally:
        console.record = recorded


def latency_table(results: list[dict[str, Any]]) -> Table:
    """Return `latency_rows` as a table for the terminal.

    `loops`: the share of the tokens that lies in loops; `copied`: of the accepted drafts, the n-gram drafts; `same`: as
    plain's. It fits 80 columns.
    """
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    for column in ("method", "batch", "tokens/s", "speedup", "tokens per round", "loops", "copied", "same"):
        justify = "left" if column in ("method", "same") else "right"
        table.add_column(column, justify=justify, no_wrap=column != "tokens per round")
    for row in results:
        length = row["acceptance_length"]
        cells = (row["method"], str(row["batch"]), f"{row['tokens_per_s']:.1f}", speedup_cell(row))
        shares = percent_cell(row["looping_share"]), percent_cell(row["ngram_share"])
        table.add_row(*cells, "-" if length is None else f"{length:.2f}", *shares, identical_cell(row))
    return table


def speedup_cell(row: dict[str, Any]) -> str:
    """Return "1.62x (1.58-1.66)": the median over rounds of the paired ratios and their extremes."""
    if row["speedup_vs_plain"] is None:
        return "-"
    low, high = row["speedup_spread"]
    return f"{row['speedup_vs_plain']:.2f}x ({low:.2f}-{high:.2f})"


def percent_cell(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def identical_cell(row: dict[str, Any]) -> str:
    return {True: "yes", False: "NO", None: "-"}[row["identical"]]


def report_gate(results: list[dict[str, Any]], console: Console) -> int:
    """Say whose output is not plain's and where; return 1 if eesd's is not, in float32."""
    failed = False
    for row in results:
        if row["identical"] is not False:
            continue
        gated = row["dtype"] == "float32"
        failed |= gated and row["method"] in OURS
        verdict = "no speedup is reported" if gated else "near-ties may flip with the shape of a batch"
        place = f"{row['method']}, batch {row['batch']}: output differs from plain's at {row['first_difference']}"
        console.print(f"{'NOT LOSSLESS' if gated else 'note'}: {place} ({row['dtype']}: {verdict})", style="red")
    return int(failed)


def write_json(path: Path, content: Any) -> None:
    write_whole(path, json.dumps(content, indent=1) + "\n")
