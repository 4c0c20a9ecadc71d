"""Draft and target tokens in the terminal, in place, as they are decided."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from vllm_eesd.traces.spell import INCOMPLETE, Speller

ACCEPTED, OWN, REJECTED, PROMPT = "green", "bold", "red strike", "dim"


class DraftStream:
    """Prints a completion with every round's accepted, rejected and own tokens told apart.

    In colour where the console has it; elsewhere rejected tokens stand in [-...-].
    """

    def __init__(self, console: Console, decode: Callable[[list[int]], str], prompt: list[int]) -> None:
        self._console = console
        self._in_colour = console.color_system is not None
        self._speller = Speller(decode, prompt)
        # Rounds wait here until the engine hands out their tokens: it may run ahead of its output.
        self._waiting: deque[Mapping[str, Any]] = deque()

    def legend(self) -> None:
        if self._in_colour:
            parts = [("accepted draft", ACCEPTED), ("the target's own token", OWN), ("rejected draft", REJECTED)]
            self._console.print(Text("  ").join(Text(*part) for part in parts))
        else:
            self._console.print("[-...-]: rejected draft tokens", markup=False)

    def feed(self, tokens: list[int], rounds: Iterable[Mapping[str, Any]]) -> None:
        """Print the tokens of one engine step; a round without a draft reads like plain decoding."""
        self._waiting.extend(r for r in rounds if r["draft"])
        while tokens:
            emitted = self._waiting[0]["emitted"] if self._waiting else []
            # max_tokens may cut what a round emitted: compare as far as there are tokens.
            if emitted and emitted[: len(tokens)] == tokens[: len(emitted)]:
                decided = self._waiting.popleft()
                self._round(decided["draft"], decided["num_accepted"], tokens[: len(emitted)])
                tokens = tokens[len(emitted) :]
            else:
                self._print(self._speller.push(tokens[0]), OWN)
                tokens = tokens[1:]

    def _round(self, draft: list[int], num_accepted: int, emitted: list[int]) -> None:
        for token in emitted[:num_accepted]:
            self._print(self._speller.push(token), ACCEPTED)
        if rejected := self._speller.peek(draft[num_accepted:]):
            # A rejected line end must not break the line.
            shown = rejected.replace("\n", "\u23ce").replace(INCOMPLETE, "")
            self._print(shown if self._in_colour else f"[-{shown}-]", REJECTED)
        for token in emitted[num_accepted:]:
            self._print(self._speller.push(token), OWN)

    def _print(self, text: str, style: str) -> None:
        if text:
            self._console.print(Text(text, style=style), end="", soft_wrap=True)
