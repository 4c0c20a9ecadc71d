"""Questions answered by plain vLLM and by EESD, side by side in the terminal, accepted drafts coloured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from vllm_eesd.bench.latency import never_silent
from vllm_eesd.bench.streaming import ACCEPTED, MARKS, DraftText
from vllm_eesd.bench.vllm_engine import VllmEngine

TITLES = {"plain": "plain vLLM", "eesd": "EESD"}
#: Narrower terminals show one answer above the other.
TWO_COLUMNS = 72
#: What an answer ends with that reached the limit.
GOES_ON = " \u2026"


@dataclass
class Answer:
    """What one method has answered so far.

    Attributes:
        shown: its text.
        num_tokens, seconds: so far.
    """

    title: str
    shown: Text = field(default_factory=Text)
    num_tokens: int = 0
    seconds: float = 0.0

    def heading(self) -> Text:
        """Return the method, and how fast it was."""
        done = f"   {self.num_tokens} tokens in {self.seconds:.1f} s" if self.num_tokens else ""
        return Text.assemble((self.title, "bold"), (done, "dim"))


def answer(
    console: Console,
    engines: Mapping[str, VllmEngine],
    decode: Callable[[list[int]], str],
    question: str,
    prompt: list[int],
    max_tokens: int,
) -> dict[str, Answer]:
    """Answer a question with each engine in turn, the whole machine to itself, and leave the answers in the terminal.

    Args:
        prompt: the question's tokens, as the chat template has them.
    """
    answers = {method: Answer(TITLES[method]) for method in engines}
    console.print(Text.assemble(("Question  ", "dim"), (question, "bold")))
    for method, engine in engines.items():
        with _shown_while_growing(console, answers, method) as show:
            text = DraftText(decode, prompt, console.color_system is not None)
            for _ in grow(answers[method], text, engine, prompt, max_tokens):
                show()
    console.print(columns(list(answers.values()), console.width))
    console.print()
    return answers


def grow(given: Answer, text: DraftText, engine: VllmEngine, prompt: list[int], max_tokens: int) -> Iterator[None]:
    """Let an answer grow, and yield after every step of the engine."""
    engine.take_rounds()
    began = time.perf_counter()
    for step in engine.stream([prompt], max_tokens):
        tokens = [token for _, new in step for token in new]
        given.num_tokens, given.seconds = given.num_tokens + len(tokens), time.perf_counter() - began
        text.feed(tokens, engine.take_rounds())
        given.shown = text.text()
        yield
    engine.take_rounds(last=True)  # what is measured next shall run as a server's requests do
    if given.num_tokens == max_tokens:
        given.shown.append(GOES_ON)


def legend(console: Console) -> Text:
    """Return how accepted drafts are told apart."""
    if console.color_system is None:
        return Text(f"accepted drafts stand between {' and '.join(MARKS)}")
    return Text.assemble("accepted drafts are ", (ACCEPTED, ACCEPTED))


def columns(answers: Sequence[Answer], width: int) -> RenderableType:
    """Return the answers beside one another, or one above the other where the terminal is narrow."""
    if width < TWO_COLUMNS:
        return Group(*(part for given in answers for part in (given.heading(), given.shown, Text())))
    table = Table.grid(expand=True, padding=(0, 2, 0, 0), pad_edge=True)  # of one width: the same text wraps alike
    for _ in answers:
        table.add_column(ratio=1)
    table.add_row(*(given.heading() for given in answers))
    table.add_row(*(given.shown for given in answers))
    return table


@contextmanager
def _shown_while_growing(console: Console, answers: Mapping[str, Answer], method: str) -> Iterator[Callable[[], None]]:
    """Give a function that shows the answers as they are; elsewhere than in a terminal, say who is answering."""
    if not console.is_terminal:
        with never_silent(console) as say:
            say(f"{TITLES[method]} is answering")
            yield lambda: None
        return
    recorded, console.record = console.record, False
    try:
        live = {"console": console, "transient": True, "redirect_stdout": False, "redirect_stderr": False}
        with Live(refresh_per_second=8, **live) as shown:
            yield lambda: shown.update(columns(list(answers.values()), console.width))
    finally:
        console.record = recorded
