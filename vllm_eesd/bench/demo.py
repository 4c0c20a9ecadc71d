"""`eesd demo`: held-out code completed by plain vLLM and by EESD, one snippet streamed, all of them measured.

Greedily, where both must say the same, and sampled as a completion model is used: a model as small as the embedded one
repeats itself when greedy, and how much of the text does is said beside the speedup.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import CONSOLE_SVG_FORMAT, Console
from rich.table import Table
from rich.text import Text

from vllm_eesd.bench.engines import EngineSettings, encode_prompts, running_engines, workers_on_either_core
from vllm_eesd.bench.latency import (
    check_sizes,
    identical_cell,
    open_console,
    percent_cell,
    report_gate,
    reporting,
    speedup_cell,
    write_json,
)
from vllm_eesd.bench.measure import Runs, measure, rows
from vllm_eesd.bench.prompts import Prompt, read_prompts
from vllm_eesd.bench.streaming import PROMPT, DraftStream
from vllm_eesd.bench.vllm_engine import VllmEngine
from vllm_eesd.embedded import PROMPTS, embedded_model, shipped
from vllm_eesd.provenance import hardware, provenance

#: Rich's picture of a terminal in the reader's own monospaced font: nothing is fetched to show it.
PICTURE = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace(
    "Fira Code", "monospace"
)
ROUNDS = 3
#: Snippets measured: as many as take so long, in seconds, within limits.
MEASURED_S, FEWEST, MOST = 60.0, 4, 8
DTYPE = "float32"
TEMPERATURE = 0.6


def run(args: argparse.Namespace) -> int:
    """Stream one completion, measure all of them, write the figures; return 1 if the outputs are not the same.

    Raises:
        ValueError: a flag, the prompts or the model are not usable; one line.
    """
    model, prompt_file = args.model or embedded_model(), args.prompts or shipped(PROMPTS, "prompts")
    settings = EngineSettings(model, args.head, DTYPE, args.num_speculative_tokens, args.policy)
    snippets = read_prompts(prompt_file)[:MOST]
    check_sizes(len(snippets), [1], max_tokens=args.max_tokens)
    console = open_console(args.no_color)
    console.record = bool(args.svg)
    console.print(f"[bold]EESD demo[/bold]: {Path(model).name} completes held-out Python snippets,")
    console.print(f"{args.max_tokens} tokens each, {DTYPE}, with plain vLLM and with EESD, on {hardware()}.\n")
    with ExitStack() as stack:
        with reporting(console) as progress:
            tokenizer, prompts, max_model_len = encode_prompts(settings.model, snippets, args.max_tokens, progress)
            starting = running_engines(["plain", "eesd"], settings, max_model_len, progress)
            with workers_on_either_core():
                engines = stack.enter_context(starting)
        sampling = {name: engine.at(TEMPERATURE) for name, engine in engines.items()}
        stream_one(console, sampling["eesd"], tokenizer.decode, snippets[0], prompts[0], args.max_tokens)
        with reporting(console) as progress:
            prompts = prompts[: snippets_that_fit(engines["plain"], prompts[0], args.max_tokens)]
            sizes = {"batch": 1, "max_tokens": args.max_tokens, "rounds": ROUNDS}
            greedy = measured_rows(measure(engines, prompts, progress=progress, **sizes), compared=True)
            sampled = measured_rows(measure(sampling, prompts, progress=progress, **sizes), compared=False)
    if args.json:
        figures = summary(*greedy) | {"sampled": summary(*sampled), "num_prompts": len(prompts)}
        write_json(Path(args.json), figures)
    console.print(summary_table(greedy, sampled))
    console.print(f"{len(prompts)} snippets, each {ROUNDS} times")
    if args.svg:
        console.save_svg(args.svg, title="eesd demo", code_format=PICTURE)
    return report_gate(greedy, console)


def snippets_that_fit(
    plain: VllmEngine, prompt: list[int], max_tokens: int, clock: Callable[[], float] = time.perf_counter
) -> int:
    """Return how many snippets `MEASURED_S` has time for, if EESD were as slow as plain vLLM."""
    plain.generate([prompt], 1)  # whatever a first request waits for
    began = clock()
    plain.generate([prompt], max_tokens)
    times_generated = 2 * (2 * ROUNDS + 1)  # greedy and sampled: by both methods, and once more by EESD to warm up
    return min(MOST, max(FEWEST, int(MEASURED_S / (times_generated * (clock() - began)))))


def measured_rows(runs: Mapping[str, Runs], compared: bool) -> list[dict[str, Any]]:
    """Return plain's row and EESD's."""
    return [row | {"batch": 1, "dtype": DTYPE} for row in rows(runs, exact=compared, compared=compared)]


def stream_one(
    console: Console,
    engine: VllmEngine,
    decode: Callable[[list[int]], str],
    snippet: Prompt,
    tokens: list[int],
    max_tokens: int,
) -> None:
    """Complete one snippet with EESD, printing every step's tokens when they come."""
    stream = DraftStream(console, decode, tokens)
    console.rule(snippet.source or "snippet 1", align="left", style="dim")
    stream.legend()
    console.print()
    console.print(Text(snippet.text, style=PROMPT), end="", soft_wrap=True)
    engine.take_rounds()
    for step in engine.stream([tokens], max_tokens):
        stream.feed([token for _, new in step for token in new], engine.take_rounds())
    console.print("\n")
    console.rule(style="dim")


def summary(plain: dict[str, Any], eesd: dict[str, Any]) -> dict[str, Any]:
    """Return what `build/demo.json` holds."""
    kept = ("identical", "acceptance_length", "acceptance_per_position", "mean_draft_length", "speedup_spread")
    kept += ("looping_share", "ngram_share")
    figures = {name: eesd[name] for name in kept}
    figures |= {"plain_tokens_per_s": plain["tokens_per_s"], "eesd_tokens_per_s": eesd["tokens_per_s"]}
    return {"speedup": eesd["speedup_vs_plain"], **figures, **provenance()}


def summary_table(greedy: list[dict[str, Any]], sampled: list[dict[str, Any]]) -> Table:
    """Return the figures of both ways to choose tokens, each of (plain's row, EESD's)."""
    table = Table("", "greedy", f"sampled, T = {TEMPERATURE}")
    ways = greedy, sampled

    def add(name: str, cell: Callable[[dict[str, Any], dict[str, Any]], str], style: str | None = None) -> None:
        table.add_row(name, *(cell(plain, eesd) for plain, eesd in ways), style=style)

    add("plain vLLM", lambda plain, eesd: f"{plain['tokens_per_s']:.1f} tokens/s")
    add("EESD", lambda plain, eesd: f"{eesd['tokens_per_s']:.1f} tokens/s")
    add(f"speedup (range of {ROUNDS} rounds)", lambda plain, eesd: speedup_cell(eesd), style="bold")
    add("tokens per round", lambda plain, eesd: tokens_per_round_cell(eesd))
    add("drafts accepted, 1st to 4th", lambda plain, eesd: positions_cell(eesd))
    add("n-gram drafts among them", lambda plain, eesd: percent_cell(eesd["ngram_share"]))
    add("text in loops", lambda plain, eesd: percent_cell(eesd["looping_share"]))
    add("identical output", lambda plain, eesd: identical_cell(eesd))
    return table


def tokens_per_round_cell(row: dict[str, Any]) -> str:
    length, drafted = row["acceptance_length"], row["mean_draft_length"]
    return "-" if length is None or drafted is None else f"{length:.2f} ({drafted:.2f} drafted)"


def positions_cell(row: dict[str, Any]) -> str:
    return "  ".join(f"{share:.0%}" for share in (row["acceptance_per_position"] or [])[:4]) or "-"
