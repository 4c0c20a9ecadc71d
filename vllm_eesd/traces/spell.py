"""Token ids as text: one by one, and a request's rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm_eesd.traces.rounds import UNKNOWN, RoundRecord

#: Tokens of context that decide how a token is spelled out (a character may span several byte-level tokens).
CONTEXT = 8
INCOMPLETE = "\ufffd"
UNKNOWN_TEXT = "?"


class SpelledRound(RoundRecord):
    """A round with its tokens as text.

    Attributes:
        drafted: [text, verdict] of every draft token; verdicts are accepted, rejected and unjudged.
        own: the target's own token ("" if the output ended before it).
        kind: what that token is: corrected (a draft token was wrong), bonus (all were right), plain (none drafted).
    """

    drafted: list[list[str]]
    own: str
    kind: str


class Speller:
    """Spells tokens out one by one, as text that only ever grows.

    Args:
        decode: token ids -> text.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt: list[int]) -> None:
        self._decode = decode
        self._context = list(prompt[-CONTEXT:])
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """Return the text a token adds; "" while a character is incomplete."""
        text = self._added([*self._pending, token])
        if text.endswith(INCOMPLETE) and len(self._pending) < 3:
            self._pending.append(token)
            return ""
        self._context = [*self._context, *self._pending, token][-CONTEXT:]
        self._pending = []
        return text

    def peek(self, tokens: list[int]) -> str:
        """Return the text tokens would add, without taking them."""
        return self._added([*self._pending, *tokens])

    def _added(self, tokens: list[int]) -> str:
        return self._decode([*self._context, *tokens])[len(self._decode(self._context)) :]


def spell(
    decode: Callable[[list[int]], str], prompt: list[int], output: Sequence[int], rounds: Sequence[RoundRecord]
) -> tuple[str, list[SpelledRound]]:
    """Return the text of what came before the first round, and every round with its tokens as text.

    Args:
        decode: token ids -> text.
        prompt, output: the request's tokens; output may end within the last round.
        rounds: of that request, in order, as `vllm_eesd.traces.read` gives them.
    Raises:
        ValueError: the rounds are not those of this output.
    """
    speller = Speller(decode, prompt)
    emitted = [token for record in rounds for token in record["emitted"]]
    begin = next((n for n in range(len(output) + 1) if list(output[n:]) == emitted[: len(output) - n]), 0)
    if begin > 1 or len(output) - begin > len(emitted):
        raise ValueError(f"the rounds hold {len(emitted)} tokens, not those of an output of {len(output)}")
    first = "".join(speller.push(token) for token in output[:begin])
    left, spelled = len(output) - begin, []
    for record in rounds:
        draft, accepted = record["draft"], record["accepted"]
        drafted = [[speller.push(token), "accepted"] for token in draft[: min(accepted, left)]]
        for number in range(accepted, len(draft)):
            text = UNKNOWN_TEXT
            if draft[number] != UNKNOWN:
                before, after = (speller.peek(draft[accepted:end]) for end in (number, number + 1))
                text = after[len(before) :]
            drafted.append([text, "rejected" if number == accepted else "unjudged"])
        own = speller.push(record["emitted"][-1]) if left > accepted else ""
        kind = "plain" if not draft else "bonus" if accepted == len(draft) else "corrected"
        spelled.append({**record, "drafted": drafted, "own": own, "kind": kind})
        left = max(left - len(record["emitted"]), 0)
    return first, spelled
