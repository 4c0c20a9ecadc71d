"""`eesd demo`: plain vLLM and EESD on one model, shown as they write and then measured.

A chat model answers questions, some of them side by side; another one completes held-out code, one snippet of it
streamed. Both are measured greedily, where both methods must say the same, and sampled as such a model is used.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import CONSOLE_SVG_FORMAT, Console
from rich.table import Table
from rich.text import Text

from vllm_eesd.bench.engines import (
    EngineSettings,
    encoded,
    fit_max_model_len,
    load_target,
    running_engines,
    workers_on_either_core,
)
from vllm_eesd.bench.latency import (
    check_sizes,
    identical_cell,
    never_silent,
    open_console,
    percent_cell,
    report_gate,
    speedup_cell,
    write_json,
)
from vllm_eesd.bench.measure import Runs, measure, rows
from vllm_eesd.bench.prompts import Prompt, read_prompts
from vllm_eesd.bench.side_by_side import answer, legend
from vllm_eesd.bench.streaming import PROMPT, DraftStream
from vllm_eesd.bench.vllm_engine import VllmEngine
from vllm_eesd.conversations import has_template, read_chat_template
from vllm_eesd.embedded import PROMPTS, embedded_model, shipped
from vllm_eesd.provenance import hardware, provenance
from vllm_eesd.public_model import public_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

#: Rich's picture of a terminal in the reader's own monospaced font: nothing is fetched to show it.
PICTURE = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace(
    "Fira Code", "monospace"
)
ROUNDS = 3
DTYPE = "float32"
QUESTIONS = "prompts/questions.jsonl"


@dataclass(frozen=True)
class Kind:
    """What a model is asked to do, and how it is measured.

    Attributes:
        task: in words.
        file: of models/, the prompts.
        unit: what one prompt is called.
        sampling: of the sampled half, parameters of `vllm.SamplingParams`.
        always: those of both halves.
        measured_s, fewest, most: as many prompts are measured as take so long, within limits.
    """

    task: str
    file: str
    unit: str
    sampling: Mapping[str, float]
    always: Mapping[str, Any]
    measured_s: float
    fewest: int
    most: int = 8

    def sampled(self) -> str:
        """Return how the sampled half chooses its tokens, in words."""
        top_p = f", top-p {self.sampling['top_p']}" if "top_p" in self.sampling else ""
        return f"T = {self.sampling['temperature']}{top_p}"


COMPLETION = Kind("completes held-out Python snippets", PROMPTS, "snippets", {"temperature": 0.6}, {}, 60.0, 4)
#: Answers end where the model ends them.
CHAT = Kind(
    "answers questions",
    QUESTIONS,
    "questions",
    {"temperature": 0.7, "top_p": 0.95},
    {"ignore_eos": False},
    measured_s=45.0,
    fewest=2,
)
#: Questions that are answered side by side.
SHOWN = 3


@dataclass(frozen=True)
class Task:
    """What the model is given.

    Attributes:
        prompts: each text's tokens, as the model is given them.
        decode: token ids -> text.
    """

    kind: Kind
    texts: list[Prompt]
    prompts: list[list[int]]
    decode: Callable[[list[int]], str]
    max_tokens: int
    max_model_len: int


def run(args: argparse.Namespace) -> int:
    """Show plain vLLM and EESD at work, measure both, write the figures; return 1 if the outputs are not the same.

    Raises:
        ValueError: a flag, the prompts or the model are not usable; one line.
    """
    console = open_console(args.no_color)
    console.record = bool(args.svg)
    with ExitStack() as stack:
        with never_silent(console) as progress:
            model = chosen_model(args, progress, console)
            settings = EngineSettings(model, args.head, DTYPE, args.num_speculative_tokens, args.policy)
            task = prepare(args, model, *load_target(model, progress))
        told = f"{Path(model).name} {task.kind.task} with plain vLLM and with EESD"
        sizes = f"at most {task.max_tokens} tokens each, in {DTYPE}, on {hardware()}"
        console.print(f"[bold]EESD demo[/bold]: {told}, {sizes}.\n")
        with never_silent(console) as progress:
            starting = running_engines(["plain", "eesd"], settings, task.max_model_len, progress)
            with workers_on_either_core():
                engines = stack.enter_context(starting)
        greedy = {name: engine.at(0.0, **task.kind.always) for name, engine in engines.items()}
        sampling = {name: engine.at(**task.kind.sampling, **task.kind.always) for name, engine in engines.items()}
        seconds = show(console, task, greedy, sampling)
        with never_silent(console) as progress:
            prompts = task.prompts[: prompts_that_fit(task.kind, seconds)]
            sizes = {"batch": 1, "max_tokens": task.max_tokens, "rounds": ROUNDS}
            sizes |= {"fixed_length": task.kind is COMPLETION}
            figures = (
                measured_rows(measure(greedy, prompts, progress=_of("greedy", progress), **sizes), compared=True),
                measured_rows(measure(sampling, prompts, progress=_of("sampled", progress), **sizes), compared=False),
            )
    if args.json:
        kept = summary(*figures[0]) | {"sampled": summary(*figures[1]), "num_prompts": len(prompts)}
        write_json(Path(args.json), kept | {"model": Path(model).name})
    console.print(summary_table(*figures, task.kind.sampled()))
    console.print(f"{len(prompts)} {task.kind.unit}, one at a time, each {ROUNDS} times")
    if args.svg:
        console.save_svg(args.svg, title="eesd demo", code_format=PICTURE)
    return report_gate(figures[0], console)


def chosen_model(args: argparse.Namespace, progress: Callable[[str], None], console: Console) -> str:
    """Return the directory or Hub id of the model to show: the user's, or the public one, or else the embedded one.

    Raises:
        ValueError: a head was named, and the public model it is for cannot be had.
    """
    if args.model is not None:
        return args.model
    progress("looking for the public model")
    try:
        found = public_model(progress)
    except (ValueError, OSError) as error:
        if args.head:
            raise
        why = " ".join(str(error).split())
    else:
        if args.head or found.head:
            return str(found.directory)
        why = "no exit head for it is here"
    console.print(f"Shown with the embedded model instead of SmolLM2: {why}.\n", soft_wrap=True, markup=False)
    return embedded_model()


def prepare(args: argparse.Namespace, model: str, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> Task:
    """Return the work of a model, by whether it has a chat template.

    Raises:
        ValueError: the prompts cannot be read, or are too long for the model; one line.
    """
    template = read_chat_template(args.chat_template)
    kind = CHAT if has_template(tokenizer, template) else COMPLETION
    texts = read_prompts(args.prompts or shipped(kind.file, "prompts"))[: kind.most]
    check_sizes(len(texts), [1], max_tokens=args.max_tokens)
    prompts = [encoded(tokenizer, replace(text, is_turn=kind is CHAT), template) for text in texts]
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    max_model_len = fit_max_model_len(limit, max(map(len, prompts)), args.max_tokens)
    decode = partial(tokenizer.decode, skip_special_tokens=kind is CHAT)
    return Task(kind, texts, prompts, decode, args.max_tokens, max_model_len)


def show(console: Console, task: Task, greedy: Mapping[str, VllmEngine], sampling: Mapping[str, VllmEngine]) -> float:
    """Show both methods at work, and return the seconds that plain vLLM needs for a prompt."""
    if task.kind is not CHAT:
        stream_one(console, sampling["eesd"], task.decode, task.texts[0], task.prompts[0], task.max_tokens)
        return seconds_of_plain(greedy["plain"], task.prompts[0], task.max_tokens)
    for engine in greedy.values():
        engine.generate(task.prompts[:1], 2)  # whatever a first request waits for
    console.print(Text.assemble("Greedy, so that both say the same; ", legend(console), ".\n"))
    shown = [
        answer(console, greedy, task.decode, text.text, prompt, task.max_tokens)
        for text, prompt in zip(task.texts[:SHOWN], task.prompts[:SHOWN], strict=True)
    ]
    return sum(answers["plain"].seconds for answers in shown) / len(shown)


def seconds_of_plain(
    plain: VllmEngine, prompt: list[int], max_tokens: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return how long plain vLLM takes for a prompt."""
    plain.generate([prompt], 1)  # whatever a first request waits for
    began = clock()
    plain.generate([prompt], max_tokens)
    return clock() - began


def prompts_that_fit(kind: Kind, seconds: float) -> int:
    """Return how many prompts there is time for, if EESD were as slow as plain vLLM, which takes `seconds` for one."""
    times_generated = 2 * (2 * ROUNDS + 1)  # greedy and sampled: by both methods, and once more by EESD to warm up
    return min(kind.most, max(kind.fewest, int(kind.measured_s / (times_generated * seconds))))


def _of(half: str, progress: Callable[[str], None]) -> Callable[[str], None]:
    return lambda text: progress(f"measuring, {half}: {text}")


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
    engine.take_rounds(last=True)  # what is measured next shall run as a server's requests do
    console.print("\n")
    console.rule(style="dim")


def summary(plain: dict[str, Any], eesd: dict[str, Any]) -> dict[str, Any]:
    """Return what `build/demo.json` holds."""
    kept = ("identical", "acceptance_length", "acceptance_per_position", "mean_draft_length", "speedup_spread")
    kept += ("looping_share", "ngram_share")
    figures = {name: eesd[name] for name in kept}
    figures |= {"plain_tokens_per_s": plain["tokens_per_s"], "eesd_tokens_per_s": eesd["tokens_per_s"]}
    return {"speedup": eesd["speedup_vs_plain"], **figures, **provenance()}


def summary_table(greedy: list[dict[str, Any]], sampled: list[dict[str, Any]], how_sampled: str) -> Table:
    """Return the figures of both ways to choose tokens, each of (plain's row, EESD's)."""
    table = Table("", "greedy", how_sampled)
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
