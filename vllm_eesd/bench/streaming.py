"""Draft and target tokens as they are decided: printed in place, or gathered into a text."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from vllm_eesd.traces.spell import INCOMPLETE, Speller

ACCEPTED, OWN, REJECTED, PROMPT = "green", "bold", "red strike", "dim"
#: Around accepted drafts where there is no colour.
MARKS = "\u2039", "\u203a"


class Decided:
    """Tells every round's accepted, rejected and own tokens apart; what becomes of them a subclass says.

    Args:
        decode: token ids -> text.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt: list[int]) -> None:
        self._speller = Speller(decode, prompt)
        # Rounds wait here until the engine hands out their tokens: it may run ahead of its output.
        self._waiting: deque[Mapping[str, Any]] = deque()

    def feed(self, tokens: list[int], rounds: Iterable[Mapping[str, Any]]) -> None:
        """Take in the tokens of one engine step; a round without a draft reads like plain decoding."""
        self._waiting.extend(r for r in rounds if r["draft"])
        while tokens:
            emitted = self._waiting[0]["emitted"] if self._waiting else []
            # max_tokens may cut what a round emitted: compare as far as there are tokens.
            if emitted and emitted[: len(tokens)] == tokens[: len(emitted)]:
                decided = self._waiting.popleft()
                self._round(decided["draft"], decided["num_accepted"], tokens[: len(emitted)])
                tokens = tokens[len(emitted) :]
            else:
                self._take(self._speller.push(tokens[0]), OWN)
                tokens = tokens[1:]

    def _round(self, draft: list[int], num_accepted: int, emitted: list[int]) -> None:
        for token in emitted[:num_accepted]:
            self._take(self._speller.push(token), ACCEPTED)
        if rejected := self._speller.peek(draft[num_accepted:]):
            self._take(rejected, REJECTED)
        for token in emitted[num_accepted:]:
            self._take(self._speller.push(token), OWN)

    def _take(self, text: str, verdict: str) -> None:
        """Take in some text; `verdict` is ACCEPTED, REJECTED or OWN."""
        raise NotImplementedError


class DraftStream(Decided):
    """Prints a completion, rejected tokens included: in colour where the console has it, elsewhere in [-...-]."""

    def __init__(self, console: Console, decode: Callable[[list[int]], str], prompt: list[int]) -> None:
        super().__init__(decode, prompt)
        self._console = console
        self._in_colour = console.color_system is not None

    def legend(self) -> None:
        if self._in_colour:
            parts = [("accepted draft", ACCEPTED), ("the target's own token", OWN), ("rejected draft", REJECTED)]
            self._console.print(Text("  ").join(Text(*part) for part in parts))
        else:
            self._console.print("[-...-]: rejected draft tokens", markup=False)

    def _take(self, text: str, verdict: str) -> None:
        if verdict == REJECTED:
            # A rejected line end must not break the line.
            text = text.replace("\n", "\u23ce").replace(INCOMPLETE, "")
            text = text if self._in_colour else f"[-{text}-]"
        if text:
            self._console.print(Text(text, style=verdict), end="", soft_wrap=True)


class DraftText(Decided):
    """Gathers an answer as it reads, accepted drafts coloured, or between MARKS where there is no colour.

    Args:
        in_colour: whether colours are shown.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt: list[int], in_colour: bool) -> None:
        super().__init__(decode, prompt)
        self._in_colour = in_colour
        self._parts: list[tuple[str, bool]] = []

    def text(self) -> Text:
        """Return what there is so far."""
        shown = Text()
        for accepted, parts in groupby(self._parts, key=lambda part: part[1]):
            run = "".join(text for text, _ in parts)
            if accepted and not self._in_colour and (inner := run.strip()):
                run = run.replace(inner, inner.join(MARKS))
            shown.append(run, ACCEPTED if accepted else None)
        return shown

    def _take(self, text: str, verdict: str) -> None:
        if text and verdict != REJECTED:
            self._parts.append((text, verdict == ACCEPTED))
