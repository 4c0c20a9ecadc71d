"""`eesd demo`: held-out code completed by plain vLLM and by EESD, one snippet streamed, all of them measured."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_eesd.bench.engines import EngineSettings, encode_prompts, running_engines
from vllm_eesd.bench.hardware import hardware, provenance
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
from vllm_eesd.bench.prompts import Prompt, in_clone, read_prompts
from vllm_eesd.bench.streaming import PROMPT, DraftStream
from vllm_eesd.bench.vllm_engine import VllmEngine

MODEL, PROMPTS = Path("models/eesd-code-10m"), Path("models/prompts/held_out_code.jsonl")
SNIPPETS, ROUNDS = 8, 5
DTYPE = "float32"


def run(args: argparse.Namespace) -> int:
    """Stream one completion, measure all of them, write the figures; return 1 if the outputs are not the same.

    Raises:
        ValueError: a flag, the prompts or the model are not usable; one line.
    """
    model, prompt_file = args.model or in_clone(MODEL, "model"), args.prompts or in_clone(PROMPTS, "prompts")
    settings = EngineSettings(str(model), args.head, DTYPE, args.num_speculative_tokens, args.policy)
    snippets = read_prompts(prompt_file)[:SNIPPETS]
    check_sizes(len(snippets), [1], max_tokens=args.max_tokens)
    console = open_console(args.no_color)
    console.print(f"[bold]EESD demo[/bold]: {Path(model).name} completes {len(snippets)} held-out Python snippets,")
    console.print(f"{args.max_tokens} tokens each, greedy, {DTYPE}, with plain vLLM and with EESD, on {hardware()}.\n")
    with ExitStack() as stack:
        with reporting(console) as progress:
            tokenizer, prompts, max_model_len = encode_prompts(settings.model, snippets, args.max_tokens, progress)
            starting = running_engines(["plain", "eesd"], settings, max_model_len, progress)
            engines = stack.enter_context(starting)
        stream_one(console, engines["eesd"], tokenizer.decode, snippets[0], prompts[0], args.max_tokens)
        with reporting(console) as progress:
            sizes = {"batch": 1, "max_tokens": args.max_tokens, "rounds": ROUNDS}
            runs = measure(engines, prompts, progress=progress, **sizes)
    results = [row | {"batch": 1, "dtype": DTYPE} for row in rows(runs, exact=True)]
    plain, eesd = results
    if args.json:
        write_json(Path(args.json), summary(plain, eesd))
    console.print(summary_table(plain, eesd))
    return report_gate(results, console)


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
    figures = {name: eesd[name] for name in kept}
    figures |= {"plain_tokens_per_s": plain["tokens_per_s"], "eesd_tokens_per_s": eesd["tokens_per_s"]}
    return {"speedup": eesd["speedup_vs_plain"], **figures, **provenance()}


def summary_table(plain: dict[str, Any], eesd: dict[str, Any]) -> Table:
    table = Table(show_header=False)
    table.add_row("plain vLLM", f"{plain['tokens_per_s']:.1f} tokens/s")
    table.add_row("EESD", f"{eesd['tokens_per_s']:.1f} tokens/s")
    table.add_row("speedup, paired", f"{speedup_cell(eesd)}, median and range of {ROUNDS} rounds", style="bold")
    length, drafted = eesd["acceptance_length"], eesd["mean_draft_length"]
    if length is not None and drafted is not None:
        accepted = f"{length - 1:.2f} of {drafted:.2f} drafted"
        table.add_row("tokens per round", f"{length:.2f}: {accepted}, and the target's own")
    shares = eesd["acceptance_per_position"] or []
    table.add_row("drafts accepted, by position", "  ".join(f"{share:.0%}" for share in shares) + " of all rounds")
    table.add_row("identical output", identical_cell(eesd))
    return table
